"""Runs train.py and generate.py on a fake card. For each case it reports what was raised and where Python waited.

python tests/cuda/on_fake_card.py LIBRARY FOLDER

FOLDER holds text.txt. Prints {part: {case: {"error": text or null, "waits": [[what, line], ...]}}} as JSON.
"""

# isort: off
from fake_card import PLACEHOLDERS, fake_card, on_card, on_real_data

# isort: on
import json
import sys
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import generate
import train
from machine.device import autocast
from model import Llama
from norms import KINDS
from norms.placement import PLACEMENTS
from norms.rmsnorm import RMSNorm
from runtime.flags import read_train
from runtime.run import Run, open_run

FOLDER = Path(sys.argv[2])
SIZES = (
    "--dim 16 --layers 2 --heads 2 --kv-heads 1 --hidden-dim 24 --context 8 --tokenizer bytes --steps 4 --batch-size 4"
)
CARD, DTYPES = torch.device("cuda"), ("bfloat16", "float32")
SAMPLINGS = [{"temperature": 0}, {"top_k": 50, "top_p": 0.9, "min_p": 0.1}]
OPTIONS = ["--optimizer muon --dropout 0.1", "--optimizer adamw --recompute --qk-norm head"]
OPTIONS += ["--micro-batch-size 2 --qk-norm full"]
run_numbers = count()
train.training_batch = on_real_data(train.training_batch)
train.evaluation_batches = on_real_data(lambda *args, batches=train.evaluation_batches: list(batches(*args)))


def make_run(flags: str) -> Run:
    """What `train.py --device cuda` with these flags resolves to."""
    paths = f"--data {FOLDER}/text.txt --cache-dir {FOLDER}/cache --out {FOLDER}/runs/{next(run_numbers)}"
    return open_run(read_train(f"{SIZES} {paths} --device cuda {flags}".split()), [])


Waits = list[tuple[str, str]]


def training_step(flags: str) -> Waits:
    run = make_run(flags)
    with fake_card() as waits:
        trainer = train.Trainer(run)
        waits.take()  # before the first step, the weights are copied
        trainer.train_step()
        weights = list(trainer.model.parameters())
        states = [optimizer.state[weight] for optimizer in trainer.optimizers for weight in optimizer.state]
        assert len(states) == len(weights) and all(map(on_card, weights))
        assert all(on_card(tensor) for state in states for tensor in state.values())
        return waits.take()


def evaluation(flags: str) -> Waits:
    run = make_run(flags)
    with fake_card() as waits:
        model = Llama(run.model_config).to(CARD)
        waits.take()
        train.evaluate(model, run)
        return waits.take()


def generation(flags: str, sampling: dict[str, Any], samples: int) -> Waits:
    """The waits of the token that has most, or those before the first token if they are more."""
    run, found = make_run(flags), []
    with fake_card() as waits, torch.inference_mode(), autocast(CARD, run.dtype):
        model = Llama(run.model_config).to(CARD).eval()
        generate.cast_matrices(model, run.dtype)
        waits.take()
        prompts = torch.tensor([[5, 6, 7]] * samples)
        for ids in generate.stream_ids(model, prompts, generate.Sampling(tokens=3, **sampling), ends=256):
            assert len(ids) == samples
            found.append(waits.take())
    assert len(found) == 3
    return max(found, key=len)


# What the harness must notice.


def accumulate_and_read(*args: Any, accumulate: Callable = train.accumulate_gradients) -> dict[str, Tensor]:
    terms = accumulate(*args)
    terms["train_loss"].item()  # planted
    return terms


def norm_with_gain_on_cpu(norm: nn.Module, x: Tensor) -> Tensor:
    return x * torch.ones(x.shape[-1])


PLANTED: dict[str, Any] = {
    "item": patch.object(train, "accumulate_gradients", accumulate_and_read),
    "mix": patch.object(RMSNorm, "forward", norm_with_gain_on_cpu),
    "copy": patch.object(train, "to_device", lambda ids, device: ids.to(device)),  # planted
}


def outcome(case: Callable[..., Waits], *args: Any) -> dict[str, Any]:
    try:
        return {"error": None, "waits": case(*args)}
    except Exception as error:  # whatever a case raises is its result
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0], "waits": []}


def planted() -> dict[str, Any]:
    results = {}
    for name, patched in PLANTED.items():
        with patched:
            results[name] = outcome(training_step, "")
    return results


def train_cells(dtype: str) -> dict[str, Any]:
    """Each norm in bfloat16, each placement in float32, with the options in turn."""
    cells = [(kind, "pre") for kind in KINDS] if dtype == "bfloat16" else [("rmsnorm", name) for name in PLACEMENTS]
    results = {}
    for number, (kind, placement) in enumerate(cells):
        flags = f"--norm {kind} --placement {placement} --dtype {dtype} {OPTIONS[number % len(OPTIONS)]}"
        results[flags] = outcome(training_step, flags)
    return results


def generate_cells() -> dict[str, Any]:
    cells = [(dtype, sampling, samples) for dtype in DTYPES for sampling in SAMPLINGS for samples in (1, 3)]
    return {str(cell): outcome(generation, f"--dtype {cell[0]}", *cell[1:]) for cell in cells}


def default_step(capability: tuple[int, int]) -> dict[str, Any]:
    """A step in the dtype that `auto` takes on such a card, and which calls of attention it makes."""
    calls, attention = [], F.scaled_dot_product_attention

    def record(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        same_heads = q.shape[1] == k.shape[1] == v.shape[1]
        calls.append({"dtype": str(q.dtype), "same_heads": same_heads} | {k: options[k] for k in sorted(options)})
        return attention(q, k, v, **options)

    with (
        patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        patch.dict(PLACEHOLDERS, {torch.bool: True}),  # float16 reads whether the gradient is finite
        patch.object(F, "scaled_dot_product_attention", record),
    ):
        return outcome(training_step, "") | {"calls": calls}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "planted": planted,
    "train bfloat16": lambda: train_cells("bfloat16"),
    "train float32": lambda: train_cells("float32"),
    "evaluate": lambda: {dtype: outcome(evaluation, f"--dtype {dtype}") for dtype in DTYPES},
    "generate": generate_cells,
    "default": lambda: {str(capability): default_step(capability) for capability in ((7, 5), (9, 0))},
}

if __name__ == "__main__":
    torch.set_num_threads(1)  # there is nothing to compute
    print(json.dumps({part: cases() for part, cases in PARTS.items()}))
