"""train.py and generate.py on a fake card: nothing mixes devices or waits for it. test_fake_card.py runs this file."""

from fake_card import PLACEHOLDERS, fake_card, on_card, on_real_data  # isort: skip

import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider", "-o", "filterwarnings="]))

import sampling as sampler
import train
from machine.device import autocast
from model import Llama
from norms import KINDS
from norms.placement import PLACEMENTS
from runtime.flags import read_train
from runtime.run import Run, open_run

SIZES = "--dim 16 --layers 2 --heads 2 --kv-heads 1 --hidden-dim 24 --context 8 --tokenizer bytes --steps 4"
CARD, DTYPES = torch.device("cuda"), ("bfloat16", "float32")
OPTIONS = ["--optimizer muon --dropout 0.1", "--optimizer adamw --recompute --qk-norm head", "--qk-norm full"]
NORMS = sorted(set(KINDS) - {"none", "rmsnorm"}, key=lambda kind: (kind == "batchnorm", kind))  # without --recompute
CELLS = ["--norm none --placement pre --micro-batch-size 2", "--norm rmsnorm --placement ngpt"]
PAIRS = [pair for pair in zip(cycle(NORMS), PLACEMENTS, strict=False) if pair[1] not in ("pre", "ngpt")]
CELLS += [f"--norm {kind} --placement {name}" for kind, name in PAIRS]
COPY_FROM = "copy from cuda to cpu"
MakeRun = Callable[[str], Run]

train.training_batch = on_real_data(train.training_batch)
train.evaluation_batches = on_real_data(lambda *args, batches=train.evaluation_batches: iter([*batches(*args)]))


@pytest.fixture(scope="session")
def make_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """`make_run(flags)`: what `train.py --device cuda` with these flags resolves to."""
    cache = tmp_path_factory.mktemp("cache")

    def make(flags: str) -> Run:
        paths = f"--data {text} --cache-dir {cache} --out {tmp_path_factory.mktemp('run')}"
        return open_run(read_train(f"{SIZES} --batch-size 4 {paths} --device cuda {flags}".split()), [])

    return make


def training_step(run: Run) -> list[str]:
    with fake_card() as waits:
        trainer = train.Trainer(run)
        waits.take()  # before the first step, the weights are copied
        trainer.train_step()
        weights = list(trainer.model.parameters())
        states = [optimizer.state[weight] for optimizer in trainer.optimizers for weight in optimizer.state]
        assert len(states) == len(weights) and all(map(on_card, weights))
        assert all(on_card(tensor) for state in states for tensor in state.values())
        return waits.take()


@pytest.mark.parametrize("number, flags", enumerate(CELLS))
def test_a_training_step_does_not_wait(number, flags, make_run):
    assert not training_step(make_run(f"{flags} --dtype {DTYPES[number % 2]} {OPTIONS[number % len(OPTIONS)]}"))


def test_launches_of_a_step_and_an_evaluation_that_waits_once(make_run):
    """Of Muon, and of AdamW for vectors."""
    run = make_run("--dtype bfloat16 --dropout 0.2")
    with fake_card() as waits:
        trainer = train.Trainer(run)
        ids = torch.zeros(4, 8, dtype=torch.int64, device=CARD)
        trainer.update(ids, ids, 0.1)  # the first step makes the optimizers' state
        waits.take()
        waits.launches = 0
        trainer.pending = [trainer.update(ids, ids, 0.1)] * 10
        assert waits.launches <= 600 and not waits.take()
        for wait in (trainer.read_pending, lambda: train.evaluate(trainer.model, run)):
            wait()
            assert waits.take() == [COPY_FROM]


@pytest.mark.parametrize("samples, sampling", [(1, {"temperature": 0}), (3, {"top_k": 5, "top_p": 0.9, "min_p": 0.1})])
def test_generation_waits_once_for_each_token(samples, sampling, make_run):
    run, found, launches = make_run("--dtype bfloat16"), [], []
    with fake_card() as waits, torch.inference_mode(), autocast(CARD, run.dtype):
        model = Llama(run.model_config).to(CARD).eval()
        sampler.cast_matrices(model, run.dtype)
        prompts = torch.tensor([[5, 6, 7]] * samples, device=CARD if samples > 1 else "cpu")
        waits.take()
        for ids in sampler.stream_ids(model, prompts, sampler.Sampling(tokens=3, **sampling), ends=256):
            assert len(ids) == samples
            found.append(waits.take())
            launches.append(waits.launches)
    assert found == [["event"]] * 3 and launches[0] < launches[1] == launches[2]  # the last is ahead


@pytest.mark.parametrize("capability, dtype, reads", [((7, 5), torch.float16, 1), ((9, 0), torch.bfloat16, 0)], ids=str)
def test_the_default_step_of_a_card(capability, dtype, reads, make_run, monkeypatch):
    """In the dtype that `auto` takes there. Float16 waits once, to read whether the gradient has overflowed."""
    dtypes, attention = [], F.scaled_dot_product_attention

    def record(q: Tensor, *others: Any, **options: Any) -> Tensor:
        dtypes.append(q.dtype)
        return attention(q, *others, **options)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setitem(PLACEHOLDERS, torch.bool, True)  # whether the gradient is finite
    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    assert len(training_step(make_run(""))) == reads and dtypes == [dtype] * 2  # blocks
