"""A loss, gradient or weight that is NaN or infinite: the step changes nothing, is reported, and is never saved."""

import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import generate
import train
from data.batches import training_batch
from model import Llama
from runtime import distributed
from runtime.checkpoint import find_checkpoint, list_checkpoints, load_pretrained, save_pretrained
from runtime.process import NotFinite
from runtime.run import resolve_run

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).parents[2]
WHAT = ("loss", "gradient", "weight")
ARMS = ("", "--norm batchnorm", "--norm powernorm", "--placement ngpt", "--norm layernorm --no-tie-embeddings")
STEADY = "--schedule constant --warmup 0 --eval-every 100 --save-every 100"


@contextmanager
def injected(trainer: train.Trainer, what: str, value: float, draw: random.Random) -> Iterator[None]:
    """Make the loss, one gradient or one weight `value`. The weight stays so; a loss only in one micro-batch."""
    weight = draw.choice([weight for weight in trainer.weights if weight.ndim == 2])
    place = tuple(draw.randrange(size) for size in weight.shape)
    loss, poisoned = trainer.loss, itertools.chain([value], itertools.repeat(1.0))

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[place] = value
        return gradient

    hook = weight.register_hook(spoil) if what == "gradient" else None
    if what == "loss":
        trainer.loss = lambda *batch: loss(*batch) * next(poisoned)
    if what == "weight":
        weight.data[place] = value
    yield
    trainer.loss = loss
    if hook:
        hook.remove()


def state_of(trainer: train.Trainer) -> dict[str, Tensor]:
    """Copies of weights, running statistics and optimizer state, as bytes, so that NaN equals NaN."""
    tensors: dict[str, Tensor] = dict(trainer.model.state_dict())
    for number, optimizer in enumerate(trainer.optimizers):
        for index, values in enumerate(optimizer.state.values()):
            tensors |= {f"optimizer {number} {index} {name}": value for name, value in values.items()}
    return {name: tensor.detach().clone().reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    assert before.keys() <= after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


def test_the_step_changes_nothing(cases, record, flags):
    """Nor do later steps, until the host reads the meter, or, in float16, where gradients may overflow, they go on."""
    draw, tried = random.Random(0), {what: 0 for what in WHAT}
    for number in range(cases(6, 60)):
        what, value = WHAT[number % 3], draw.choice([math.nan, math.inf, -math.inf])
        at = draw.randrange(cases(3, 20)) if number > 2 else 0  # in the first step, there is no optimizer state yet
        arm, dtype = ARMS[number % 5], ("float32", "bfloat16", "float16")[number // 3 % 3]
        optimizer, micro = ("muon", "adamw")[number % 2], draw.choice([2, 8])
        options = f"{arm} --dtype {dtype} --optimizer {optimizer} --micro-batch-size {micro} --no-fast"
        trainer = train.Trainer(resolve_run(train.parse([*flags, "--steps", "50", *options.split()])))
        for trainer.step in range(at):
            trainer.update(1e-3)
        assert trainer.meter.bad_steps() == []
        trainer.step, before = at, state_of(trainer)
        with injected(trainer, what, value, draw):
            before = state_of(trainer) if what == "weight" else before
            trainer.update(1e-3)
        case = f"{what} {value} at step {at} with {options}"
        after = state_of(trainer)
        new = after.keys() - before.keys()  # optimizer state that did not exist yet
        assert changed(before, after) == [] and not any(after[name].any() for name in new), case
        trainer.step += 1
        trainer.update(1e-3)
        expected = dtype == "float16" and what == "gradient"
        bad = [] if expected else [at + 1, at + 2] if what == "weight" else [at + 1]
        assert trainer.meter.bad_steps() == bad, case
        assert expected or changed(before, state_of(trainer)) == [], case
        tried[what] += 1
    record(withheld_bit_for_bit=tried)


@contextmanager
def bad_at(steps: set[int]) -> Iterator[list[tuple[int, Tensor]]]:
    """Make the loss NaN at these steps of runs in this process. Yields the inputs of each training step."""
    update, inputs = train.Trainer.update, []

    def spoiled(trainer: train.Trainer, rate: float) -> None:
        real = trainer.loss

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            inputs.append((trainer.step + 1, tokens))
            return real(tokens, targets) * (math.nan if trainer.step + 1 in steps else 1)

        trainer.loss = loss
        update(trainer, rate)
        trainer.loss = real

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "update", spoiled)
        yield inputs


def exit_code(flags: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        train.main(flags)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def rows_of(run: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if name in row]


def test_the_run_ends_at_the_state_before_it_and_goes_on(flags, tmp_path, capsys, fingerprint):
    """With step and rows reported. With --skip-nonfinite it goes on from there, and the count survives that."""
    run, steady = tmp_path / "run", [*flags, *STEADY.split(), "--dropout", "0.1"]
    with bad_at({7, 13}) as inputs:
        assert exit_code([*steady, "--steps", "16"]) == 5
        assert "step 7" in (error := capsys.readouterr().err.splitlines()[-1]) and "--skip-nonfinite" in error
        (row,) = rows_of(run, "not_finite")
        assert row["step"] == 7 and str(row["row_starts"])[1:-1] in error
        tokens = resolve_run(train.parse([*flags, "--resume"])).data.train.tokens
        expected = torch.stack([torch.from_numpy(tokens[i : i + 32].astype("int64")) for i in row["row_starts"]])
        assert torch.equal(dict(inputs)[7], expected)
        assert torch.equal(expected, training_batch(tokens, 0, 6, range(8), 32)[0])

        kept = fingerprint(run)
        assert find_checkpoint(run).name == "step-000006"
        assert exit_code([*flags, "--resume", "--skip-nonfinite", "1"]) == 5  # at the second
        assert rows_of(run, "not_finite")[0]["step"] == 13 and find_checkpoint(run).name == "step-000012"
        assert [row["step"] for row in rows_of(run, "skipped")] == [7]
        train.main([*flags, "--resume", "--skip-nonfinite", "2"])
        (training,) = [row["train_loss"] for row in rows_of(run, "train_loss") if row["step"] == 16]
        assert [row["skipped"] for row in rows_of(run, "skipped")] == [1, 2] and 0 < training < 6
        again = tmp_path / "again"
        train.main([*steady, "--out", str(again), "--steps", "16", "--skip-nonfinite", "2"])
    assert fingerprint(again) == fingerprint(run)
    train.main([*steady, "--out", str(tmp_path / "short"), "--steps", "6"])
    assert fingerprint(tmp_path / "short") == kept


def test_the_state_before_it_replaces_no_checkpoint(flags, tmp_path):
    """An older one may be better. With --keep 1 there are two then."""
    with bad_at({8}):
        assert exit_code([*flags, *STEADY.split(), "--save-every", "5", "--keep", "1", "--steps", "16"]) == 5
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000005", "step-000007"]


@pytest.mark.parametrize("limit", ["1", "2"])
def test_steps_skipped_before_a_resume_count(limit, flags, tmp_path, fingerprint):
    """The next one ends the run in the state before it, also if the limit is lower than before."""
    steady = [*flags, *STEADY.split()]
    with bad_at({3, 5, 12}):
        train.main([*steady, "--steps", "10", "--skip-nonfinite", "2"])
        assert exit_code([*steady, "--resume", "--steps", "16", "--skip-nonfinite", limit]) == 5
        train.main([*steady, "--steps", "11", "--skip-nonfinite", "2", "--out", str(tmp_path / "short")])
    assert find_checkpoint(tmp_path / "run").name == "step-000011"
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "short")


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_poisoned_running_statistics_are_not_saved(flags, tmp_path, capsys, name):
    """In training, BatchNorm's output does not depend on them."""
    update = train.Trainer.update

    def poison(trainer: train.Trainer, rate: float) -> None:
        update(trainer, rate)
        if trainer.step == 5:
            trainer.model.get_buffer(f"layers.1.mlp_residual.norm.{name}")[3] = math.nan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "update", poison)
        options = "--norm batchnorm --steps 20 --save-every 4 --keep 9 --eval-every 100"
        assert exit_code([*flags, *options.split()]) == 5
    assert "running statistic" in capsys.readouterr().err
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000004"]


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
]  # fmt: skip


def diverged_after(steps: int, value: float, row: int) -> Callable[..., Tensor]:
    """`next_logits` of a model whose logits for one sample become `value` after so many tokens."""
    calls = itertools.count()

    def next_logits(model: Llama, *args: Any) -> Tensor:
        logits = model.lm_head(model.hidden(*args)[:, -1]).clone()
        if next(calls) == steps:
            logits[row, 4] = value
        return logits

    return next_logits


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_token_is_drawn_from_logits_that_are_not_finite(sampling, value, monkeypatch):
    model = Llama(dim=16, layers=1, heads=1, context=16, vocab_size=11)
    monkeypatch.setattr(Llama, "next_logits", diverged_after(2, value, row=1))
    prompts = torch.tensor([[1, 2], [3, 4], [5, 6]])
    with pytest.raises(NotFinite, match="logit of the model is not finite"):
        list(generate.stream_ids(model, prompts, generate.Sampling(tokens=8, **sampling)))
    monkeypatch.setattr(Llama, "next_logits", diverged_after(2, value, row=1))
    with pytest.raises(ValueError, match="not finite"):
        generate.generate(model, prompts, tokens=8, **sampling)
    monkeypatch.setattr(Llama, "next_logits", diverged_after(0, -math.inf, row=1))  # that is a token of probability 0
    ids = generate.generate(model, prompts, tokens=8, **sampling)
    assert int(ids.min()) >= 0 and int(ids.max()) < 11 and int(ids[1, 2]) != 4


def test_generating_with_a_diverged_model_is_one_line(flags, tmp_path, capsys):
    """Its weights are finite, and its logits are not."""
    train.main([*flags, "--steps", "1"])
    model, tokenizer = load_pretrained(tmp_path / "run")
    with torch.no_grad():
        for weight in model.layers.parameters():
            weight.mul_(1e30)
    save_pretrained(tmp_path / "diverged", model, tokenizer)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        generate.main(["--checkpoint", str(tmp_path / "diverged"), "--device", "cpu"])
    assert ended.value.code == 5
    assert capsys.readouterr().err.splitlines()[-1] == "error: a logit of the model is not finite"


# --- two ranks -------------------------------------------------------------------------------------------------------


def main_on_ranks(folder: Path, flags: list[str]) -> None:
    """Run by torchrun: the loss is NaN at step 7 on rank 1 only, with DDP and FSDP2, Muon and AdamW."""
    with distributed.process_group():
        for number, options in enumerate(itertools.product(("ddp", "--shard"), ("muon", "adamw"))):
            arm = [*flags, "--optimizer", options[1], "--no-fast", *(["--shard"] if options[0] == "--shard" else [])]
            with bad_at({7} if distributed.rank() else set()):
                code = exit_code([*arm, "--steps", "16", "--out", str(folder / f"bad-{number}")])
            assert code == 5, (options, code)
            train.main([*arm, "--steps", "6", "--out", str(folder / f"short-{number}")])


def test_two_ranks_withhold_the_same_step(full, flags, tmp_path, fingerprint, record):
    if not full:
        pytest.skip("starting ranks takes longer than all other cases")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    command += [str(tmp_path), *flags, *STEADY.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    for number in range(4):
        bad, short = tmp_path / f"bad-{number}", tmp_path / f"short-{number}"
        assert find_checkpoint(bad).name == "step-000006" and fingerprint(bad) == fingerprint(short)
    record(arms=4, equal_bit_for_bit=4)


if __name__ == "__main__":
    main_on_ranks(Path(sys.argv[1]), sys.argv[2:])
