"""Tokens computed in C against the model's formulas in float64, and everything that has to run plain instead."""

import copy
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import model as model_file
from config import ModelConfig
from fast import accelerate, decode
from generate import cast_matrices, generate
from model import LayerCache, Linear, Llama, SwiGLU
from norms import KINDS
from norms.placement import PLACEMENTS

ROOT = Path(__file__).parents[2]
TOKENS = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(0))
SMALL = {"dim": 32, "layers": 2, "heads": 4, "head_dim": 16, "hidden_dim": 48, "vocab_size": 61, "context": 17}
SHAPES: list[dict[str, Any]] = [
    {},
    {"kv_heads": 1, "tie_embeddings": False},
    {"dim": 80, "heads": 6, "kv_heads": 2, "hidden_dim": 112, "vocab_size": 263},
    {"dim": 288, "heads": 2, "head_dim": 48, "hidden_dim": 16, "rope_theta": 500.0, "norm_args": {"eps": 1e-5}},
    {"dim": 160, "heads": 2, "head_dim": 80, "hidden_dim": 416, "layers": 3, "dropout": 0.1, "vocab_size": 1000},
]  # the last is large enough for several threads


@pytest.fixture(autouse=True)
def by_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """In inference mode; for each token after a prompt, of an accelerated model, whether C has computed it."""
    found: list[bool] = []
    compute = decode.Cache.next_logits

    def recorded(cache: decode.Cache, model: Llama, tokens: Tensor) -> Tensor | None:
        started = cache[0].length > 0
        logits = compute(cache, model, tokens)
        found.extend([logits is not None] if started else [])
        return logits

    monkeypatch.setattr(decode.Cache, "next_logits", recorded)
    with torch.inference_mode():
        yield found


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A model with random gains, and matrices large enough for all of its parts to matter."""
    model = Llama(ModelConfig(**SMALL | settings)).eval()
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        values = normal(*parameter.shape, seed=seed)
        gain = 0.2 if "rotated_q_norm" in name else 1  # about where it starts: more, and softmax amplifies roundings
        parameter.data.copy_(values / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else gain * (1 + 0.2 * values))
    cast_matrices(model, dtype)
    return model


def steps(model: Any, tokens: Tensor = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Any]:
    """Logits after a prompt of four tokens and after each token that follows, and the cache."""
    cache = model.new_cache()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = [model.next_logits(step, cache) for step in (tokens[:, :4], *tokens[:, 4:].split(1, 1))]
    return torch.stack([logits.float() for logits in found], 1), cache


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_logits_against_float64(settings, dtype, bound, by_c):
    """From the prompt to a full context, relative to the largest logit."""
    model = make(dtype, **settings)
    exact = copy.deepcopy(model).double()(TOKENS)[:, 4:]
    assert accelerate(model) is None
    by_c.clear()
    found, cache = steps(model, dtype=dtype)
    assert by_c == [True] * 13
    assert (found[:, 1:] - exact).abs().max() <= bound * exact.abs().max()
    with pytest.raises(ValueError, match="18 tokens exceed the model's context of 17"):
        model.next_logits(TOKENS[:, :1], cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_a_row_is_the_same_alone_and_on_any_number_of_threads(settings, dtype, by_c):
    """To the last bit, as long as the prompt's cache is the same."""
    model, tokens, before = make(dtype, **settings), TOKENS[[0, 1, 2, 0, 1]], torch.get_num_threads()
    accelerate(model)
    _, filled = steps(model, tokens[:, :9], dtype=dtype)

    def again(rows: list[int]) -> Tensor:
        cache = model.new_cache()
        for kept, full in zip(cache, filled, strict=True):
            kept.extend(full.keys[rows, :, :5], full.values[rows, :, :5])
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return torch.stack([model.next_logits(step, cache) for step in tokens[rows, 5:].split(1, 1)])

    together = again([0, 1, 2, 3, 4])
    for row in range(5):
        assert torch.equal(again([row])[:, 0], together[:, row])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(again([0, 1, 2, 3, 4]), together)
    torch.set_num_threads(before)
    assert by_c == [True] * (1 + 5 + 8 * 12)  # of `accelerate`, `steps`, and `again`


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_generated_ids_are_those_of_the_plain_model(samples, temperature, by_c):
    settings: Any = {"context": 210, "dim": 96, "kv_heads": 2}
    plain, ours = make(**settings), make(**settings)
    assert accelerate(ours) is None
    by_c.clear()
    options = {"tokens": 200, "temperature": temperature, "seed": 3}
    assert torch.equal(*(generate(model, TOKENS[:samples, :4], **options) for model in (plain, ours)))
    assert by_c == [True] * 199


def doubled(*arguments: Any) -> Any:
    output = arguments[-1]  # of some placements a pair of streams
    return tuple(2 * stream for stream in output) if isinstance(output, tuple) else 2 * output


def wrap(model: Any, path: str) -> None:
    """As an adapter does: the module in `path` becomes a part of another one."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.Sequential(model.get_submodule(path), nn.Tanh()))


def replace_weight(model: Any, cache: Any) -> None:
    model.layers[1].mlp.up_proj.weight = nn.Parameter(2 * model.layers[1].mlp.up_proj.weight)


def replace_data(model: Any, cache: Any) -> None:
    model.layers[0].self_attn.v_proj.weight.data = 3 * model.layers[0].self_attn.v_proj.weight


def patch(model: Any, cache: Any) -> None:
    model.layers[1].mlp.forward = lambda x: x


def reorder(model: Any, cache: Any) -> None:
    for kept in cache or ():
        kept.keys, kept.values = kept.keys[[1, 0, 1]], kept.values[[1, 0, 1]]


def reorder_in_place(model: Any, cache: Any) -> None:
    for kept in cache or ():
        kept.keys.copy_(kept.keys[[1, 0, 1]])


def forget(model: Any, cache: Any) -> None:
    for kept in cache or ():
        kept.length -= 1


def shorten(model: Any, cache: Any) -> None:
    """One layer's cache: C would read beyond what the others have."""
    if cache:
        cache[1].length -= 1


class Doubled(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OtherCache(LayerCache):
    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().extend(2 * k, v)


def other_cache(model: Any, cache: Any) -> None:
    for kept in cache or ():
        kept.__class__ = OtherCache


CHANGES: list[Callable[[Any, Any], Any]] = [
    lambda model, cache: None,
    lambda model, cache: model.layers[0].self_attn.dropout.register_forward_hook(doubled),
    lambda model, cache: model.layers[1].mlp.gate_proj.register_forward_hook(doubled),
    lambda model, cache: model.layers[1].mlp_residual.register_forward_hook(doubled),
    lambda model, cache: model.register_forward_pre_hook(lambda *arguments: None),
    lambda model, cache: model.layers[0].self_attn.register_forward_pre_hook(lambda module, x: (2 * x[0], *x[1:])),
    lambda model, cache: model.final_norm.register_forward_hook(doubled),
    lambda model, cache: nn.utils.parametrizations.weight_norm(model.layers[0].mlp.down_proj),
    lambda model, cache: wrap(model, "layers.0.mlp.dropout"),
    lambda model, cache: wrap(model, "layers.0.self_attn.o_proj"),
    lambda model, cache: wrap(model, "embed_tokens"),
    lambda model, cache: setattr(model.layers[1].self_attn, "q_norm", nn.Tanh()),
    lambda model, cache: setattr(model.lm_head, "bias", nn.Parameter(normal(len(model.lm_head.weight)))),
    lambda model, cache: setattr(model.rope, "cos", nn.Buffer(-model.rope.cos)),
    lambda model, cache: model.layers.__delitem__(-1) if cache else None,
    lambda model, cache: setattr(model, "config", replace(model.config, context=99, vocab_size=7)),
    replace_weight, replace_data, reorder, reorder_in_place, forget, shorten,
]  # fmt: skip
ONLY_BEFORE: list[Callable[[Any, Any], Any]] = [
    lambda model, cache: setattr(model.layers[1].mlp.up_proj, "__class__", Doubled),
    lambda model, cache: setattr(model.final_norm, "eps", 0.5),
    patch,
    other_cache,
]
CASES = [(change, first) for change in CHANGES for first in (4, 7)] + [(change, 4) for change in ONLY_BEFORE]


@pytest.mark.parametrize("change, first", CASES)
def test_what_is_changed_takes_effect(change, first):
    """Before the first token that C would compute, or between two: as with the plain model."""
    found: list[Tensor] = []
    for model in (make(), make()):
        if found:
            accelerate(model)
        cache, logits = model.new_cache(), []
        for start, end in [(0, 4), *((t, t + 1) for t in range(4, 12))]:
            if start == first:
                change(model, cache)
            logits.append(model.next_logits(TOKENS[:, start:end], cache))
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-6 * found[0].abs().max().item())


def test_calls_that_run_plain(by_c):
    """Ids of other types, gradients, recording, autocast that disagrees with the weights; and ids out of range."""
    plain, ours = make(), make()
    assert accelerate(ours) is None
    by_c.clear()
    for ids in (TOKENS[:, 4:5].int(), TOKENS[:, 4:6]):
        caches = [model.new_cache() for model in (plain, ours)]
        for model, cache in zip((plain, ours), caches, strict=True):
            model.next_logits(TOKENS[:, :4], cache)
        expected, found = (model.next_logits(ids, c) for model, c in zip((plain, ours), caches, strict=True))
        torch.testing.assert_close(found, expected)
    assert not any(by_c)
    _, cache = steps(ours, TOKENS[:, :8])
    assert by_c[-4:] == [True] * 4
    with pytest.raises(IndexError):
        ours.next_logits(TOKENS[:, :1] + 61, cache)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.next_logits(TOKENS[:, :1], cache).dtype == torch.bfloat16
    by_c.clear()
    with torch.inference_mode(False), torch.no_grad():
        steps(ours)
    with nn.modules.module.register_module_forward_hook(lambda *arguments: None):  # as profilers do
        steps(ours)
    assert by_c == [False] * 26
    assert accelerate(ours, 33) == "for more than 32 samples torch is faster"


def test_edited_code_runs_plain(monkeypatch):
    """Of model.py, which people copy, and of what a placement does to the embedding."""
    edits: list[tuple[Any, str, Any]] = [
        (SwiGLU, "forward", lambda self, x: self.down_proj(self.gate_proj(x) * self.up_proj(x))),
        (model_file, "rotate", lambda x, rope: x),
        (LayerCache, "mask", lambda self, new: (torch.arange(self.length + new) > self.length - 3)[None]),  # a window
    ]
    for edit in edits:
        monkeypatch.setattr(*edit)
        assert accelerate(make()) == "model.py computes something else", edit
        monkeypatch.undo()
    model = make()
    model.init_stream = lambda x: 3 * x
    assert accelerate(model) == "model.py computes something else"


def test_caches_are_copied_and_handed_on(by_c):
    """To another model, and under other defaults of torch, which the scratch memory must not follow."""
    first, second = make(), make(norm_args={"eps": 0.1})
    _, cache = steps(first, TOKENS[:, :6])
    expected = [model.next_logits(TOKENS[:, 6:7], copy.deepcopy(cache)) for model in (first, second)]
    assert accelerate(first) is None and accelerate(second) is None
    _, cache = steps(first, TOKENS[:, :6])
    torch.set_default_dtype(torch.bfloat16)
    found = [model.next_logits(TOKENS[:, 6:7], copy.deepcopy(cache)) for model in (first, second)]
    torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(second.next_logits(TOKENS[:, 6:7], cache), expected[1], rtol=0, atol=1e-5)
    assert by_c == [True] * 7  # two of `accelerate`, two of `steps`, and three here


def test_rows_of_a_cache_are_dropped(by_c):
    """As when a sample has ended. The first rows are where they were in memory, but there are fewer of them."""
    plain, ours, found = make(), make(), []
    assert accelerate(ours) is None
    for model in (plain, ours):
        _, cache = steps(model, TOKENS[:, :6])
        for kept in cache:
            kept.keys, kept.values = kept.keys[:1], kept.values[:1]
        found.append(model.next_logits(TOKENS[:1, 6:7], cache))
    assert by_c == [True] * 4  # of `accelerate`, `steps`, and here
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


VARIANTS: list[dict[str, Any]] = [
    *({"placement": placement} for placement in PLACEMENTS if placement != "pre"),
    *({"norm": kind} for kind in sorted(KINDS) if kind != "rmsnorm"),
    {"qk_norm": "head"},
    {"qk_norm": "full"},
    {"embedding_scale": 4.9},
    {"scaled_embedding": True},
    {"norm_args": {"zero_centered": True}},
    {"norm_args": {"cast_order": "llama"}},
    {"norm_args": {"elementwise_affine": False}},
    *({size: 24} for size in ("dim", "head_dim", "hidden_dim")),
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_other_architectures_and_sizes_run_plain(settings):
    model = make(**settings)
    reason = "to be multiples of 16" if 24 in settings.values() else "it does not support "
    assert reason in str(accelerate(model)) and type(model) is Llama


def random_case(seed: int) -> None:
    """A model of random shape and kind, with a random change at a random time, continues as the plain one does."""
    draw = random.Random(seed)
    heads = draw.choice([1, 2, 4, 6])
    kv_heads = draw.choice([count for count in (1, 2, 3, 4, 6) if heads % count == 0])
    settings: dict[str, Any] = {
        "dim": 16 * draw.randint(1, 6), "heads": heads, "kv_heads": kv_heads,
        "head_dim": 16 * draw.randint(1, 5), "hidden_dim": 16 * draw.randint(1, 8), "layers": draw.randint(2, 3),
        "tie_embeddings": draw.random() < 0.5, "vocab_size": draw.randint(61, 140),
    }  # fmt: skip
    if draw.random() < 0.1:
        settings[draw.choice(["dim", "head_dim", "hidden_dim"])] -= 2
    if draw.random() < 0.3:
        settings["placement"] = draw.choice(list(PLACEMENTS))
    if draw.random() < 0.2 and settings.get("placement") != "ngpt":
        settings["norm"] = draw.choice(["layernorm", "dyt", "scalenorm"])
    if draw.random() < 0.2:
        settings["qk_norm"] = draw.choice(["head", "full"])
    change = draw.choice(CHANGES) if draw.random() < 0.7 else CHANGES[0]
    first, rows = draw.randint(1, 12), draw.randint(1, 3)
    if rows < 3 and change in (reorder, reorder_in_place):
        change = CHANGES[0]
    found: list[Tensor] = []
    for model in (make(**settings), make(**settings)):
        if found:
            accelerate(model)
        cache = model.new_cache()
        logits = [model.next_logits(TOKENS[:rows, :1], cache)]
        for t in range(1, 14):
            if t == first:
                change(model, cache)
            logits.append(model.next_logits(TOKENS[:rows, t : t + 1], cache))
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5 * found[0].abs().max().item(), msg=f"seed {seed}")


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 340), marks=pytest.mark.slow)])
def test_random_models_and_changes(seeds):
    for seed in seeds:
        random_case(seed)


@pytest.mark.slow
def test_under_sanitizers(tmp_path):
    """This file, with the code built for AddressSanitizer and UndefinedBehaviorSanitizer."""
    flags = "-g -fsanitize=address,undefined -fno-sanitize-recover=all"
    program = "import sys, pytest; from fast import native; native.FLAGS += sys.argv[1].split()"
    program += "; sys.exit(pytest.main(sys.argv[2:]))"
    found = [subprocess.check_output(["cc", f"-print-file-name=lib{name}.so"], text=True) for name in ("asan", "ubsan")]
    settings = {"LD_PRELOAD": " ".join(found).replace("\n", ""), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-c", program, flags, "-q", "-k", "not sanitizers", __file__],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | settings | {"XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
