"""Tokens computed in C against the model's formulas in float64, what has to run plain instead, and the build."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import generate as command
import model as model_file
from config import ModelConfig, option
from data.tokenizer import ByteTokenizer
from fast import decode, native
from fast.decode import FastDecoder, accelerate
from files import ROOT
from model import MLP, LayerCache, Llama
from runtime.checkpoint import save_pretrained
from sampling import cast_matrices, generate
from tests import test_options as options
from tests.random_values import randomize

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
    """In inference mode; for each token after a prompt, of a `FastDecoder`, whether C has computed it."""
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


def make(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    model = randomize(Llama(ModelConfig(**SMALL | settings)), gains=0.2)
    cast_matrices(model, dtype)
    return model


def decoder_of(model: Any) -> FastDecoder:
    """One that has computed no token yet."""
    decoder = accelerate(model)
    assert isinstance(decoder, FastDecoder), decoder
    return decoder


def steps(decoder: Any, tokens: Tensor = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Any]:
    """Logits after a prompt of four tokens and after each token that follows, and the cache."""
    cache = decoder.new_cache()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = [decoder.next_logits(step, cache) for step in (tokens[:, :4], *tokens[:, 4:].split(1, 1))]
    return torch.stack([logits.float() for logits in found], 1), cache


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_logits_against_float64(settings, dtype, bound, by_c):
    """From the prompt to a full context, relative to the largest logit."""
    model = make(dtype, **settings)
    exact = copy.deepcopy(model).double()(TOKENS)[:, 4:]
    decoder = decoder_of(model)
    by_c.clear()
    found, cache = steps(decoder, dtype=dtype)
    assert by_c == [True] * 13
    assert (found[:, 1:] - exact).abs().max() <= bound * exact.abs().max()
    with pytest.raises(ValueError, match="18 tokens exceed the model's context of 17"):
        decoder.next_logits(TOKENS[:, :1], cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_a_row_is_the_same_alone_and_on_any_number_of_threads(settings, dtype, by_c):
    """To the last bit, as long as the prompt's cache is the same."""
    tokens, before = TOKENS[[0, 1, 2, 0, 1]], torch.get_num_threads()
    decoder = decoder_of(make(dtype, **settings))
    _, filled = steps(decoder, tokens[:, :9], dtype=dtype)

    def again(rows: list[int]) -> Tensor:
        cache = decoder.new_cache()
        for kept, full in zip(cache, filled, strict=True):
            kept.extend(full.keys[rows, :, :5], full.values[rows, :, :5])
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return torch.stack([decoder.next_logits(step, cache) for step in tokens[rows, 5:].split(1, 1)])

    together = again([0, 1, 2, 3, 4])
    for row in range(5):
        assert torch.equal(again([row])[:, 0], together[:, row])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        alike = torch.equal(again([0, 1, 2, 3, 4]), together)
        torch.set_num_threads(before)
        assert alike
    assert by_c == [True] * (2 + 5 + 8 * 12)  # from `accelerate`, `steps`, and `again`


def test_generated_ids_are_those_of_the_plain_model(by_c):
    model = make(context=210, dim=96, kv_heads=2)
    model.layers[1].self_attn.q_proj.weight.mul_(100)  # so exp of a score overflows, unless the largest is subtracted
    decoders = None, decoder_of(model)
    by_c.clear()
    found = (generate(model, TOKENS[:, :4], decoder=each, tokens=200, temperature=0.8, seed=3) for each in decoders)
    assert torch.equal(*found)
    assert by_c == [True] * 199


def test_the_command_decodes_with_it_unless_told_not_to(by_c, tmp_path, capsys, monkeypatch):
    """C and the model compute two tokens to compare them. Of six tokens, the model computes the first one."""
    monkeypatch.setattr("machine.device.missing_for_compile", lambda device: "")
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    save_pretrained(tmp_path / "model", make(vocab_size=257, tie_embeddings=False), ByteTokenizer())
    texts = []
    for flags, computed, said in (
        ("", 2 + 5, "in float32, tokens computed by fast/\n"),
        ("--no-fast", 0, "in float32\n"),
        ("--no-fast --compile", 0, "in float32, tokens compiled by fast/\n"),
        ("--samples 33", 0, "in float32, without fast/: for more than 32 samples torch is faster\n"),
    ):
        by_c.clear()
        command.main(f"--checkpoint {tmp_path}/model --tokens 6 --device cpu --dtype float32 {flags}".split())
        printed = capsys.readouterr()
        texts.append(printed.out)
        assert by_c == [True] * computed and said in printed.err
    assert texts[0] == texts[1] == texts[2] in texts[3]


def test_several_tokens_run_plain_and_unknown_ids_are_refused(by_c):
    model = make()
    plain, ours = model, decoder_of(model)
    by_c.clear()
    caches = [steps(decoder, TOKENS[:, :8])[1] for decoder in (plain, ours)]
    assert by_c == [True] * 4

    def assert_alike(ids: Tensor) -> None:
        found = [decoder.next_logits(ids, cache) for decoder, cache in zip((plain, ours), caches, strict=True)]
        torch.testing.assert_close(*found, rtol=0, atol=1e-5)

    for ids, by in ((TOKENS[:, 8:10], False), (TOKENS[:, 10:11].int(), True)):
        assert_alike(ids)
        assert by_c[-1] is by
    with pytest.raises(IndexError):
        ours.next_logits(TOKENS[:, :1] + 61, caches[1])
    for kept in (*caches[0], *caches[1]):  # as when samples have ended: C knows three rows
        kept.keys, kept.values = kept.keys[:1], kept.values[:1]
    assert_alike(TOKENS[:1, 11:12])


@pytest.mark.parametrize("size, error", [(4, RuntimeError), (40, ValueError)])
def test_neither_a_full_cache_nor_a_full_context_takes_a_token(size, error, by_c):
    """C would read or write beyond the cache, or beyond the rotary tables."""
    decoder = decoder_of(make())
    by_c.clear()
    cache, last = decoder.new_cache(size), min(size, SMALL["context"])
    decoder.next_logits(TOKENS[:1, : last - 1], cache)
    decoder.next_logits(TOKENS[:1, :1], cache)
    with pytest.raises(error):
        decoder.next_logits(TOKENS[:1, :1], cache)
    assert by_c == [True, False]


def extend_with_window(cache: LayerCache, k: Tensor, v: Tensor, extend: Any = LayerCache.extend) -> tuple:
    """`LayerCache.extend` for attention to a window of 99 tokens."""
    past, (k, v, _) = cache.length, extend(cache, k, v)
    return k, v, (torch.arange(cache.length) > past - 99)[None]


def test_edited_code_runs_plain(monkeypatch):
    """Of model.py, which people copy."""
    edits: list[tuple[Any, str, Any]] = [
        (MLP, "forward", lambda self, x: self.down_proj(self.gate_proj(x) * self.up_proj(x))),
        (model_file, "rotate", lambda x, rope: x),
        (LayerCache, "extend", extend_with_window),
        (Llama, "logits", lambda self, x: 3 * self.lm_head(x / 3).tanh()),
        (MLP, "forward", lambda self, x: self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)[..., :48])),
    ]
    for edit in edits:
        monkeypatch.setattr(*edit)
        assert accelerate(make(torch.bfloat16, context=128)) == "model.py computes something else", edit
        monkeypatch.undo()


CHANGES: list[tuple[Callable[[Any], Any], bool]] = [  # and whether C may compute a token
    (lambda model: setattr(model, "init_stream", lambda x: 1.1 * x), True),
    (lambda model: setattr(model.layers[1].mlp, "up_proj", nn.Sequential(nn.Linear(32, 48), nn.Tanh())), False),
    (lambda model: setattr(model.layers[0], "mlp", MLP(replace(model.config, hidden_dim=32))), False),
    (lambda model: setattr(up := model.layers[1].mlp.up_proj.weight, "data", up.T.contiguous().T), False),
]


@pytest.mark.parametrize("change, by", CHANGES)
def test_edited_models_run_plain(change, by, by_c):
    """C must not read what it does not know, nor equal values in another order."""
    change(model := make(torch.bfloat16))
    by_c.clear()
    assert accelerate(model) == "model.py computes something else"
    assert by_c == [by]


VARIANTS: list[dict[str, Any]] = [*options.OPTIONS, {"placement": "lns"}, {"norm": "prmsnorm"}, {"qk_norm": "head"}]
VARIANTS += [{"scaled_embedding": True}, {"norm_args": {"cast_order": "llama"}}]
VARIANTS += [{"dim": 24}, {"head_dim": 24}, {"hidden_dim": 24}]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_other_architectures_and_sizes_run_plain(settings):
    """An option for training only changes nothing here."""
    first = next(iter(settings.get("norm_args", settings)))
    name = {"qk_norm_args": "qk_norm", "qk_norm_after_rope": "qk_norm"}.get(first, first)
    sizes = "it needs --dim, --head-dim and --hidden-dim to be multiples of 16"
    reason = sizes if "dim" in name else f"it does not support {name} "
    assert str(accelerate(make(**settings))).startswith("<fast.decode.FastDecoder" if name == "z_loss" else reason)


def test_a_new_option_runs_plain_unless_it_is_off():
    """As one whose effect begins after more tokens than are compared."""
    config = make_dataclass("Edited", [("window", int, option(0, "tokens"))], bases=(ModelConfig,), frozen=True)
    assert decode.unsupported(config(**SMALL)) is None
    assert decode.unsupported(config(window=5000, **SMALL)) == "it does not support window 5000"


def test_without_a_cache_directory_there_is_a_reason(monkeypatch):
    monkeypatch.setattr("shutil.which", {"cc": "cc"}.get)  # another compiler than gcc
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)
    library, reason = native.load.__wrapped__(torch.float32)
    assert library is None and str(reason).startswith("cc could not build fast/decode.c: ") and __file__ in str(reason)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # neither HOME nor a passwd entry
    assert "home directory" in str(native.load.__wrapped__(torch.float32)[1])


def test_a_library_is_built_again_when_anything_it_is_made_of_has_changed(tmp_path, monkeypatch):
    compiler, source = tmp_path / "cc", tmp_path / "decode.c"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo one && exit\nfor out; do :; done\necho > "$out"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr("os.environ", os.environ | {"XDG_CACHE_HOME": "", "HOME": str(tmp_path)})  # "" is none
    monkeypatch.setattr(native, "SOURCE", source)
    source.write_text("// nothing")
    built = {native.build(str(compiler), flags) for flags in (["-O3"], ["-O3"], ["-O2"])}
    for file, changed in ((source, "// something"), (compiler, compiler.read_text().replace("echo one", "echo two"))):
        file.write_text(changed)
        built.add(native.build(str(compiler), ["-O3"]))
    assert len(built) == 4 and built == set(tmp_path.glob(".cache/normal-llama/*.so"))


@pytest.mark.slow
def test_under_sanitizers(tmp_path):
    """This file, with the code built for AddressSanitizer and UndefinedBehaviorSanitizer."""
    flags = "-g -fsanitize=address,undefined -fno-sanitize-recover=all"
    program = "import sys, pytest; from fast import native; native.FLAGS += sys.argv[1].split()"
    program += "; sys.exit(pytest.main(sys.argv[2:]))"
    found = [subprocess.check_output(["cc", f"-print-file-name=lib{name}.so"], text=True) for name in ("asan", "ubsan")]
    settings = {"LD_PRELOAD": " ".join(found).replace("\n", ""), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-c", program, flags, "-q", "-k", "not sanitizers", __file__]
    environment = os.environ | settings | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
