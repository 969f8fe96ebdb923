"""torch.compile on a CPU: the same losses, gradients and generated tokens as eager, and no needless compilation.

The backend aot_eager traces forward and backward as Inductor does and runs the graphs with eager operations.
"""

import dataclasses
import math
import random
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

import train
from config import ModelConfig
from generate import Sampling, stream_ids
from model import Llama
from norms import KINDS
from norms.placement import PLACEMENTS, supports
from runtime.decoding import compile_decoding

SIZES: dict[str, Any] = dict(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48, context=16, vocab_size=29)
SMALL = ModelConfig(**SIZES)
TOKENS = torch.randint(29, (3, 4, 11), generator=torch.Generator().manual_seed(0))  # steps, B, T + 1
CELLS = [(kind, placement) for kind in KINDS for placement in PLACEMENTS if supports(placement, kind)]
# Of these, by default: each placement with one kind, in turn, so that each kind is there as well.
DEFAULT = [("powernorm", "sandwich"), ("batchnorm", "residual")]
for number, placement in enumerate(PLACEMENTS):
    supported = [kind for kind in KINDS if supports(placement, kind)]
    DEFAULT.append((supported[number % len(supported)], placement))
DEFAULT += [(kind, "pre") for kind in KINDS.keys() - {kind for kind, _ in DEFAULT}]


def settings(kind: str, placement: str = "pre") -> ModelConfig:
    norm_args = {"warmup": 1} if kind == "powernorm" else {}  # the second step is past the warmup
    return ModelConfig(**SIZES, norm=kind, placement=placement, norm_args=norm_args)


def random_weights_model(config: ModelConfig, recompute: bool = False) -> Llama:
    """All weights random, the norms' gains and ReZero's scalars too: no gradient is zero."""
    model = Llama(config)
    model.recompute = recompute
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


def training_step(model: Llama, loss: Callable, step: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients and buffers by name, after one forward and backward."""
    torch.manual_seed(step)
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        value = loss(TOKENS[step, :, :-1], TOKENS[step, :, 1:])
    value.backward()
    tensors = dict(model.named_buffers())
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        tensors[f"gradient of {name}"] = weight.grad
    return value.detach(), tensors


def assert_training_matches(
    config: ModelConfig,
    recompute: bool = False,
    dtype: torch.dtype = torch.float32,
    bound: float = 1e-5,
    backend: str = "aot_eager",
) -> None:
    """Three steps. No element of a gradient or buffer differs by more than `bound` times the largest of its tensor."""
    torch.compiler.reset()
    eager, compiled = (random_weights_model(config, recompute) for _ in range(2))
    loss = torch.compile(compiled.loss, backend=backend, fullgraph=True)
    for step in range(len(TOKENS)):
        expected_loss, expected = training_step(eager, eager.loss, step, dtype)
        got_loss, got = training_step(compiled, loss, step, dtype)
        assert float(got_loss) == pytest.approx(float(expected_loss), rel=bound)
        for name, tensor in expected.items():
            error, largest = (got[name] - tensor).abs().max().item(), tensor.abs().max().item()
            assert math.isfinite(largest) and (largest > 0 or not name.startswith("gradient")), f"step {step}: {name}"
            assert error <= bound * largest, f"step {step}: {name} differs by {error / largest:.1e}"


@pytest.mark.parametrize(
    "kind, placement", [pytest.param(*cell, marks=[] if cell in DEFAULT else [pytest.mark.slow]) for cell in CELLS]
)
def test_training_matches_eager(kind, placement):
    assert_training_matches(settings(kind, placement))


@pytest.mark.parametrize(
    "changes, options",
    [
        ({"dropout": 0.2}, {}),  # aot_eager draws the same random numbers; Inductor does not
        ({"dropout": 0.2, "qk_norm": "full"}, {"recompute": True}),
        ({"qk_norm": "head", "kv_heads": 4}, {"dtype": torch.bfloat16}),
    ],
    ids=["dropout", "recompute", "bfloat16"],
)
def test_training_options_match_eager(changes, options):
    assert_training_matches(dataclasses.replace(SMALL, **changes), **options)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("kind, placement", [("rmsnorm", "siamese"), ("powernorm", "pre")])
def test_training_with_inductor_matches_eager(kind, placement):
    assert_training_matches(settings(kind, placement), backend="inductor")


# --- the number of compilations --------------------------------------------------------------------------------------


def count_graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Make `torch.compile` use aot_eager. Returns the list of graphs, to which every compilation adds one."""
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    return graphs


def test_a_training_compiles_each_shape_once(tmp_path, monkeypatch):
    """Evaluations have full batches, a smaller last batch and a shorter last window. Sampling compiles nothing."""
    draw = random.Random(0)
    (tmp_path / "text.txt").write_text("".join(draw.choices("abcde \n", k=50_000)))
    flags = (
        f"--data {tmp_path / 'text.txt'} --cache-dir {tmp_path / 'cache'} --tokenizer bytes --dim 32 --layers 1 "
        "--heads 2 --context 32 --batch-size 8 --eval-every 2 --save-every 2 --device cpu --dtype float32"
    )
    evaluations: list[tuple[int, float]] = []  # the number of compilations so far, and the loss
    evaluate = train.evaluate

    def evaluate_and_count(*args) -> tuple[float, float]:
        losses = evaluate(*args)
        evaluations.append((len(graphs), losses[0]))
        return losses

    monkeypatch.setattr(train, "evaluate", evaluate_and_count)
    graphs: list[torch.fx.GraphModule] = []
    train.main(f"{flags} --steps 4 --out {tmp_path / 'eager'}".split())
    eager = [loss for _, loss in evaluations]
    evaluations.clear()

    graphs = count_graphs(monkeypatch)
    compiled = f"{flags} --compile --out {tmp_path / 'compiled'}"
    train.main(f"{compiled} --steps 4".split())
    assert [loss for _, loss in evaluations] == pytest.approx(eager, rel=1e-5)
    first = evaluations[0][0]
    assert 2 <= first <= 4, "a training batch and at most three shapes of evaluation batches"
    assert {count for count, _ in evaluations} == {len(graphs)} == {first}

    train.main(f"{compiled} --steps 6 --micro-batch-size 4 --resume".split())
    assert {count for count, _ in evaluations[2:]} == {len(graphs)} and len(graphs) <= first + 1


# --- decoding --------------------------------------------------------------------------------------------------------

GREEDY = Sampling(tokens=12, temperature=0)


@pytest.mark.parametrize("changes", [{}, {"placement": "hybrid", "norm": "layernorm", "qk_norm": "full"}])
def test_compiled_decoding_gives_the_same_tokens(changes, monkeypatch):
    """Two samples, then a prompt of one token: compiled once."""
    model = random_weights_model(dataclasses.replace(SMALL, **changes)).eval()
    prompts = [torch.tensor([[3, 1, 4]] * 2), torch.tensor([[1]] * 2)]
    plain = [list(stream_ids(model, prompt, GREEDY)) for prompt in prompts]
    assert len({ids[0] for sample in plain for ids in sample}) > 3
    graphs = count_graphs(monkeypatch)
    compile_decoding(model)
    assert plain == [list(stream_ids(model, prompt, GREEDY)) for prompt in prompts]
    assert len(graphs) == 1


def test_static_cache_gives_the_same_logits(monkeypatch):
    """A prompt in one pass, single tokens, and several tokens after them."""
    model = random_weights_model(SMALL).eval()
    with torch.no_grad():
        expected = model(TOKENS[0])
        count_graphs(monkeypatch)
        compile_decoding(model)
        cache = model.new_cache()
        for start, stop in [(0, 4), (4, 5), (5, 6), (6, 10), (10, 11)]:
            logits = model.next_logits(TOKENS[0, :, start:stop], cache)
            torch.testing.assert_close(logits, expected[:, stop - 1], rtol=1e-5, atol=1e-5)


def test_a_decoding_step_can_be_a_cuda_graph(monkeypatch):
    """It reads no value, copies nothing between devices, and writes only to buffers that stay where they are."""
    found: list[tuple[torch.fx.GraphModule, set[int]]] = []

    def record(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        metadata = TracingContext.get().fw_metadata
        assert metadata is not None
        found.append((graph, set(metadata.static_input_indices)))
        return graph

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=record, keep_inference_input_mutations=True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    model = random_weights_model(SMALL).eval()
    compile_decoding(model)
    list(stream_ids(model, torch.tensor([[3, 1, 4]]), GREEDY))
    ((graph, static),) = found
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    names = {str(node.target) for node in calls}
    assert not {name for name in names if "item" in name.replace("getitem", "") or "_local_scalar" in name}
    assert not {name for name in names if "_to_copy" in name or "device_put" in name}
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    written = [inputs.index(node.args[0]) for node in calls if node.target == torch.ops.aten.copy_.default]
    assert len(written) == 2 * SMALL.layers and set(written) <= static
    assert len(static) == len(inputs) - 1, "all inputs but the token"
