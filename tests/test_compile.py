"""torch.compile on a CPU: the same losses and gradients as eager, and no needless compilation.

The backend aot_eager traces forward and backward as Inductor does and runs the graphs with eager operations. `eager`
traces the forward pass alone, in a third of the time.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend

import train
from config import ModelConfig
from machine.device import check_compile
from model import Llama
from runtime.parallel import Objective
from runtime.run_dir import read_rows
from tests.random_values import randomize

SMALL = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48, context=16, vocab_size=29)
TOKENS = torch.randint(29, (2, 4, 11), generator=torch.Generator().manual_seed(0))  # steps, B, T + 1
OPTIONS: dict[str, Any] = dict(
    dropout=0.2, qk_norm="head", qk_norm_args={"eps": 1e-3}, qk_norm_after_rope=True, v_norm=True, inner_norm=True,
    layers=1, embedding_norm="gain", embedding_scale="sqrt", attention_gate="element", gate_activation="softplus",
    attention_cap=5.0, logit_cap=3.0, z_loss=0.1, activation="gelu_tanh", norm_args={"zero_centered": True},
)  # fmt: skip
CELLS: list[tuple[dict[str, Any], str, torch.dtype]] = [  # each kind by itself is compiled in norms/test_contract.py
    (OPTIONS, "aot_eager", torch.float32),
    ({"norm": "batchnorm", "placement": "residual"}, "eager", torch.float32),
    ({"qk_norm": "head", "kv_heads": 4}, "eager", torch.bfloat16),
]
TRACED = {"hybrid": 2, "lns": 3, "siamese": 3, "ngpt": 2, "parallel": 2, "mhc": 3, "attnres": 4, "attnres-block": 4}
CELLS += [({"placement": name, "layers": 3}, "eager", torch.float32) for name in TRACED]


def training_step(model: Llama, objective: Callable, step: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients and buffers by name, after one forward and backward."""
    torch.manual_seed(step)
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        value = objective(TOKENS[step, :, :-1], TOKENS[step, :, 1:])["train_loss"]
    value.backward()
    gradients = {f"gradient of {name}": weight.grad for name, weight in model.named_parameters()}
    return value.detach(), {**dict(model.named_buffers()), **gradients}  # type: ignore[dict-item]


@pytest.mark.parametrize("changes, backend, dtype", CELLS, ids=str)
def test_training_matches_eager(changes, backend, dtype, monkeypatch):
    """No element of a gradient or buffer differs by more than 1e-5 times the largest of its tensor.

    aot_eager draws the same random numbers for dropout as eager, also in blocks that are computed again. Inductor does
    not. These are more models than the eight that torch compiles by default. Blocks that differ have more graphs.
    """
    graphs = count_graphs(monkeypatch, backend)
    check_compile(torch.device("cpu"))
    eager, compiled = (randomize(Llama(dataclasses.replace(SMALL, **changes))).train() for _ in range(2))
    eager.recompute = compiled.recompute = "dropout" in changes
    objective = Objective(compiled, True)
    for step in range(len(TOKENS)):
        expected_loss, expected = training_step(eager, eager.objective, step, dtype)
        got_loss, got = training_step(compiled, objective, step, dtype)
        assert float(got_loss) == pytest.approx(float(expected_loss), rel=1e-5)
        for name, tensor in expected.items():
            error, largest = (got[name] - tensor).abs().max().item(), tensor.abs().max().item()
            assert math.isfinite(largest) and (largest > 0 or not name.startswith("gradient")), f"step {step}: {name}"
            assert error <= 1e-5 * largest, f"step {step}: {name} differs by {error / largest:.1e}"
    assert len(graphs) == TRACED.get(changes.get("placement"), 3 if "norm" in changes else 2)


def count_graphs(monkeypatch: pytest.MonkeyPatch, name: str = "aot_eager") -> list[torch.fx.GraphModule]:
    """Make `torch.compile` use a backend. Returns the list of graphs, to which every compilation adds one."""
    torch.compiler.reset()
    monkeypatch.setattr("machine.device.missing_for_compile", lambda device: "")  # Inductor's, which is not used here
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return lookup_backend(name)(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    return graphs


def test_a_training_compiles_two_graphs_and_says_so(tmp_path, text, monkeypatch, capsys):
    """Evaluations, whose batches have three shapes, samples, `--watch`, a resume and the trained model add none."""
    flags = (
        f"--data {text} --cache-dir {tmp_path / 'cache'} --tokenizer bytes --dim 32 --layers 2 --watch 3 "
        f"--heads 2 --context 32 --batch-size 8 --eval-every 2 --steps 4 --device cpu --dtype float32 --out {tmp_path}"
    )
    graphs, losses = count_graphs(monkeypatch), []
    for run in ("eager", "compiled --compile"):
        train.main(f"{flags}/{run}".split())
        rows = read_rows(tmp_path / run.split()[0] / "metrics.jsonl")
        losses.append([row["val_loss"] for row in rows if "val_loss" in row])
        said = capsys.readouterr().out
        assert (len(graphs) == 2) is (", with torch.compile" in said)
    resumed = train.train(resume=True, out=str(tmp_path / "compiled"), steps=6)
    resumed.model.loss(TOKENS[0, :2], TOKENS[1, :2])
    assert len(graphs) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-5)
