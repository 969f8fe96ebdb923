"""Runs train.py and generate.py on a fake card. For each case it reports what was raised and where Python waited.

python tests/cuda/on_fake_card.py LIBRARY FOLDER PART ...

FOLDER holds text.txt. Prints {part: {case: {"error": text or null, "waits": [[what, line], ...]}}} as JSON.
"""

# isort: off
from fake_card import fake_card, on_card, on_real_data

# isort: on
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn

import generate
import train
from model import Llama
from norms import KINDS
from norms.placement import PLACEMENTS, supports
from norms.rmsnorm import RMSNorm
from runtime.device import autocast
from runtime.run import Run, resolve_run

FOLDER = Path(sys.argv[2])
SIZES = (
    "--dim 16 --layers 2 --heads 2 --kv-heads 1 --hidden-dim 24 --context 8 --tokenizer bytes --steps 4 --batch-size 4"
)
CARD = torch.device("cuda")
DTYPES = ("bfloat16", "float32")
KINDS_IN_ORDER, PLACEMENTS_IN_ORDER = list(KINDS), list(PLACEMENTS)
CELLS = [(kind, name) for kind in KINDS for name in PLACEMENTS if supports(name, kind)]
SAMPLINGS = {
    "greedy": generate.Sampling(tokens=3, temperature=0),
    "temperature": generate.Sampling(tokens=3, temperature=0.7),
    "top-k": generate.Sampling(tokens=3, top_k=5),
    "top-p": generate.Sampling(tokens=3, top_p=0.9),
    "min-p": generate.Sampling(tokens=3, min_p=0.1),
    "all": generate.Sampling(tokens=3, top_k=50, top_p=0.9, min_p=0.1),
}

run_numbers = count()
train.training_batch = on_real_data(train.training_batch)
train.evaluation_batches = on_real_data(lambda *args, batches=train.evaluation_batches: list(batches(*args)))


def make_run(flags: str) -> Run:
    """What `train.py --device cuda` with these flags resolves to."""
    paths = f"--data {FOLDER}/text.txt --cache-dir {FOLDER}/cache --out {FOLDER}/runs/{next(run_numbers)}"
    return resolve_run(train.parse(f"{SIZES} {paths} --device cuda {flags}".split()))


# --- the cases -------------------------------------------------------------------------------------------------------

Waits = list[tuple[str, str]]


def training_step(flags: str) -> Waits:
    run = make_run(flags)
    with fake_card() as waits:
        trainer = train.Trainer(run)
        waits.take()  # before the first step, the weights are copied
        trainer.update(1e-3)
        assert on_card(trainer.meter.loss)
        states = [optimizer.state[weight] for optimizer in trainer.optimizers for weight in optimizer.state]
        assert len(states) == len(trainer.weights) and all(map(on_card, trainer.weights))
        assert all(on_card(tensor) for state in states for tensor in state.values())
        return waits.take()


def logging(flags: str) -> Waits:
    run = make_run(flags)
    with fake_card() as waits:
        trainer = train.Trainer(run)
        trainer.update(1e-3)
        waits.take()
        trainer.meter.read()
        return waits.take()


def evaluation(flags: str) -> Waits:
    run = make_run(flags)
    with fake_card() as waits:
        model = Llama(run.model_config).to(CARD)
        waits.take()
        train.evaluate(model, run)
        return waits.take()


def generation(flags: str, sampling: generate.Sampling, samples: int) -> Waits:
    """The waits of the token that has most, or those before the first token if they are more."""
    run = make_run(flags)
    found = []
    with fake_card() as waits, torch.inference_mode(), autocast(CARD, run.dtype):
        model = Llama(run.model_config).to(CARD).eval()
        generate.cast_matrices(model, run.dtype)
        waits.take()
        for ids in generate.stream_ids(model, torch.tensor([[5, 6, 7]] * samples), sampling, end_of_document=256):
            assert len(ids) == samples
            found.append(waits.take())
    assert len(found) == sampling.tokens
    return max(found, key=len)


# --- what the harness must notice -------------------------------------------------------------------------------------


@contextmanager
def planted_item() -> Iterator[None]:
    accumulate = train.Trainer.accumulate_gradients

    def accumulate_and_read(trainer: train.Trainer) -> Tensor:
        loss = accumulate(trainer)
        loss.item()  # planted
        return loss

    with patch.object(train.Trainer, "accumulate_gradients", accumulate_and_read):
        yield


@contextmanager
def planted_mix() -> Iterator[None]:
    def forward(norm: nn.Module, x: Tensor) -> Tensor:
        return x * torch.ones(x.shape[-1])

    with patch.object(RMSNorm, "forward", forward):
        yield


@contextmanager
def planted_copy() -> Iterator[None]:
    with patch.object(train, "to_device", lambda ids, device: ids.to(device)):  # planted
        yield


PLANTED = {"item": planted_item, "mix": planted_mix, "copy": planted_copy}


def few_lines() -> dict[str, Callable[[], Any]]:
    """Single expressions, by their text."""
    x, ids = torch.ones(3, device="cuda"), torch.tensor([0, 1])
    pinned = torch.ones(3).pin_memory()
    return {
        "x.sum().item()": lambda: x.sum().item(),
        "float(x[0])": lambda: float(x[0]),
        "bool(x.isfinite().all())": lambda: bool(x.isfinite().all()),
        "x.tolist()": lambda: x.tolist(),
        "x.cpu()": lambda: x.cpu(),
        "torch.tensor([1.0], device='cuda')": lambda: torch.tensor([1.0], device="cuda"),
        "ids.to('cuda')": lambda: ids.to("cuda"),
        "ids.to('cuda', non_blocking=True)": lambda: ids.to("cuda", non_blocking=True),
        "pinned.to('cuda')": lambda: pinned.to("cuda"),
        "x[ids]": lambda: x[ids],
        "x[:2].copy_(ids)": lambda: x[:2].copy_(ids),
        # none of these waits
        "pinned.to('cuda', non_blocking=True)": lambda: pinned.to("cuda", non_blocking=True),
        "x.copy_(pinned, non_blocking=True)": lambda: x.copy_(pinned, non_blocking=True),
        "x * 2 + x.mean()": lambda: x * 2 + x.mean(),
        "torch.full((), 2.0, device='cuda')": lambda: torch.full((), 2.0, device="cuda"),
        "x.double().cumsum(0)": lambda: x.double().cumsum(0),
        # these raise
        "x * torch.ones(3)": lambda: x * torch.ones(3),
        "x.nonzero()": lambda: x.nonzero(),
    }


# --- the parts -------------------------------------------------------------------------------------------------------


def outcome(case: Callable[..., Waits], *args: Any) -> dict[str, Any]:
    try:
        return {"error": None, "waits": case(*args)}
    except Exception as error:  # whatever a case raises is its result
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0], "waits": []}


def training_flags(number: int, kind: str, placement: str) -> str:
    """QK-norm, dropout, recompute, accumulation and the optimizer are taken in turn."""
    flags = f"--norm {kind} --placement {placement} --qk-norm {('none', 'head', 'full')[number % 3]}"
    in_turn = {"--dropout 0.1": 2, "--recompute": 4, "--micro-batch-size 2": 5, "--optimizer muon": 3}
    options = [option for option, turns in in_turn.items() if number // 3 % turns == 0]
    return " ".join(["--optimizer adamw", flags, *options])  # the last --optimizer counts


def train_cells(dtype: str, *quarters: int) -> dict[str, Any]:
    """Quarters of all cells in one dtype. Each kind and each placement is in every quarter, if it has a choice."""
    results = {}
    for number, (kind, placement) in enumerate(CELLS):
        if (KINDS_IN_ORDER.index(kind) + PLACEMENTS_IN_ORDER.index(placement)) % 4 in quarters:
            flags = f"{training_flags(number, kind, placement)} --dtype {dtype}"
            results[flags] = outcome(training_step, flags)
    return results


def generate_cells() -> dict[str, Any]:
    """Every mode in both dtypes, with one sample and with three in turn."""
    results = {}
    for number, (name, sampling) in enumerate(SAMPLINGS.items()):
        for dtype, samples in zip(DTYPES, (1, 3) if number % 2 else (3, 1), strict=True):
            results[f"{name}, {dtype}, {samples}"] = outcome(generation, f"--dtype {dtype}", sampling, samples)
    return results


def plant() -> dict[str, Any]:
    results = {}
    for name, planted in PLANTED.items():
        with planted():
            results[name] = outcome(training_step, "")
    return results


def lines() -> dict[str, Any]:
    with fake_card() as waits:
        expressions = few_lines()
        results = {}
        for text, expression in expressions.items():
            waits.take()
            results[text] = outcome(lambda run=expression: (run(), waits.take())[1])
        return results


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "lines": lines,
    "planted": plant,
    "train bfloat16": lambda: train_cells("bfloat16", 0),
    "train float32": lambda: train_cells("float32", 1),
    "train the rest in bfloat16": lambda: train_cells("bfloat16", 1, 2, 3),
    "train the rest in float32": lambda: train_cells("float32", 0, 2, 3),
    "log": lambda: {"log": outcome(logging, "")},
    "evaluate": lambda: {dtype: outcome(evaluation, f"--dtype {dtype}") for dtype in DTYPES},
    "generate": generate_cells,
}

if __name__ == "__main__":
    torch.set_num_threads(1)  # there is nothing to compute
    print(json.dumps({part: PARTS[part]() for part in sys.argv[3:]}))
