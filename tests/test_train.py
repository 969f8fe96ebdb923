"""The training command: that it learns, goes on where it stopped, and says what is wrong."""

import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import train
from checkpoint import find_checkpoint
from config import ModelConfig, TrainConfig
from data.batches import training_batch
from machine import has_bfloat16
from model import Llama, weights_by_role
from norms import KINDS, TRAITS, register
from norms.placement import PLACEMENTS
from optim import learning_rate, make_optimizers

ROOT = Path(__file__).parents[1]
SIZES = "--dim 32 --layers 2 --heads 2 --context 32 --batch-size 8 --tokenizer bytes --device cpu --dtype float32"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sentences of a tiny language: enough structure that a model which learns at all gets far below chance."""
    draw = random.Random(0)
    words = ["the", "cat", "dog", "sees", "hears", "a", "bird", "and", "sings", "sleeps"]
    lines = (" ".join(draw.choices(words, k=6)) + ".\n" for _ in range(1500))
    path = tmp_path / "text.txt"
    path.write_text("".join(lines))
    return path


@pytest.fixture
def command(text: Path, tmp_path: Path):
    """Run `train.py` in this process on that text; further flags as one string."""

    def run(flags: str, out: str = "run") -> Path:
        common = f"{SIZES} --data {text} --cache-dir {tmp_path / 'cache'} --out {tmp_path / out}"
        train.main(f"{common} {flags}".split())
        return tmp_path / out

    return run


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def fingerprint(run: Path) -> list[str]:
    """SHA-256 of weights and of optimizer state after the last step."""
    last = find_checkpoint(str(run))
    names = ("model.safetensors", "optimizer.safetensors")
    return [hashlib.sha256((last / name).read_bytes()).hexdigest() for name in names]


# --- learning --------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_what_it_promises(command, capsys):
    run = command("--steps 60 --lr 0.01 --eval-every 30 --save-every 30")
    evaluations = [row for row in rows(run) if "val_bpb" in row]
    assert [row["step"] for row in evaluations] == [30, 60]
    # Ten words of equal chance cost log2(10) = 3.3 bits per word of about 4.9 bytes: the floor is near 0.7 bits a byte.
    assert 0.6 < evaluations[-1]["val_bpb"] < 2.5
    assert evaluations[-1]["val_loss"] == pytest.approx(evaluations[-1]["val_bpb"] * math.log(2), rel=1e-2)
    training = [row for row in rows(run) if "train_loss" in row]
    assert training[0].keys() == {"step", "tokens", "seconds", "train_loss", "lr", "grad_norm", "tokens_per_second"}
    assert training[-1]["tokens"] == 60 * 8 * 32
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000030", "step-000060"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "step 60" in (run / "samples.txt").read_text()
    assert "gzip -9 needs" in capsys.readouterr().out


def test_bits_per_byte_are_those_of_the_probabilities(command):
    """val_bpb against a sum over one window after the other, in float64, straight from the logits."""
    run = command("--steps 3")
    flags = train.parse(["--eval-only", "--out", str(run)])
    settled = train.settle(flags)
    model, _ = train.load_model(find_checkpoint(str(run)), settled.device)
    ids = torch.from_numpy(settled.data.val.tokens.astype("int64"))
    nats = 0.0
    for start in range(0, len(ids) - 1, 32):
        window = ids[start : start + 33]
        log_probabilities = model(window[None, :-1])[0].detach().double().log_softmax(-1)
        nats -= float(log_probabilities.gather(1, window[1:, None]).sum())
    spelled = sum(1 for token in ids[1:].tolist() if token < 256)  # end-of-document tokens have no bytes
    assert rows(run)[-1]["val_bpb"] == pytest.approx(nats / math.log(2) / spelled, rel=1e-6)


def test_accumulated_micro_batches_are_the_whole_batch(command):
    whole = command("--steps 5 --clip 0", "whole")
    parts = command("--steps 5 --clip 0 --micro-batch-size 2", "parts")
    for there, here in zip(rows(whole), rows(parts), strict=True):
        for name in there.keys() & {"train_loss", "grad_norm", "val_loss"}:
            assert there[name] == pytest.approx(here[name], rel=1e-4)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_and_placement_trains(kind, placement, command):
    run = command(f"--norm {kind} --placement {placement} --steps 50 --lr 0.003")
    losses = [row["train_loss"] for row in rows(run) if "train_loss" in row]
    assert losses[-1] < losses[0] < 1.2 * math.log(257)


def test_arms_start_alike_and_see_the_same_batches(text):
    """Every kind and placement starts from the same draws: the hash of all matrices is one and the same."""
    seen = set()
    for kind in sorted(KINDS):
        for placement, rules in PLACEMENTS.items():
            config = ModelConfig(norm=kind, placement=placement, dim=32, heads=2, vocab_size=257, context=32)
            digest = hashlib.sha256()
            for role, name, weight in weights_by_role(Llama(config, seed=5)):
                unscaled = weight.detach() / rules.init_gain(role, config.layers)
                digest.update(name.encode() + unscaled.numpy().round(5).tobytes())
            seen.add(digest.hexdigest())
    assert len(seen) == 1
    tokens = torch.arange(1000).numpy().astype("uint16")
    inputs, targets = training_batch(tokens, 5, 7, range(8), 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(training_batch(tokens, 5, 7, range(3, 5), 32)[0], inputs[3:5])


def test_a_norm_registered_on_the_fly_can_be_trained_with(command):
    @register("median_absolute")
    class MedianAbsolute(nn.Module):
        def __init__(self, dim: int, eps: float = 1e-6):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

        def forward(self, x):
            return x / (x.abs().median(-1, keepdim=True).values + self.eps) * self.weight

    try:
        run = command("--norm median_absolute --norm-arg eps=1e-3 --steps 20 --lr 0.003")
        assert json.loads((run / "run.json").read_text())["model"]["norm_args"] == {"eps": 1e-3}
        losses = [row["train_loss"] for row in rows(run) if "train_loss" in row]
        assert losses[-1] < losses[0]
    finally:
        del KINDS["median_absolute"], TRAITS["median_absolute"]


@pytest.mark.parametrize(
    "flags", ["--optimizer muon", "--dtype float16", "--dtype bfloat16", "--no-tie-embeddings --dropout 0.1"]
)
def test_other_ways_to_train_learn_too(flags, command):
    if "bfloat16" in flags and not has_bfloat16(torch.device("cpu")):
        pytest.skip("this processor does not compute in bfloat16")
    losses = [row["train_loss"] for row in rows(command(f"--steps 40 --lr 0.005 {flags}")) if "train_loss" in row]
    assert losses[-1] < losses[0] - 1


# --- optimizer and schedule ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_only_the_matrices_of_the_blocks_decay(optimizer):
    model = Llama(ModelConfig(dim=32, heads=2, norm="layernorm", tie_embeddings=False))
    names = {id(weight): name for name, weight in model.named_parameters()}
    decays = {
        names[id(weight)]: group["weight_decay"]
        for each in make_optimizers(model, TrainConfig(optimizer=optimizer, weight_decay=0.3))
        for group in each.param_groups
        for weight in group["params"]
    }
    assert decays.keys() == dict(model.named_parameters()).keys()
    for name, decay in decays.items():
        assert decay == (0.3 if "_proj" in name else 0.0), name


def test_schedules():
    cosine = TrainConfig(schedule="cosine", steps=100, warmup=10, lr=1.0)
    assert [learning_rate(cosine, step) for step in (0, 9, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert learning_rate(cosine, 55) == pytest.approx(0.5)
    assert learning_rate(cosine, 99) == pytest.approx((1 + math.cos(math.pi * 89 / 90)) / 2)
    stable = TrainConfig(schedule="wsd", steps=100, warmup=10, lr=1.0)
    assert [learning_rate(stable, step) for step in (10, 79, 90, 99)] == pytest.approx([1.0, 1.0, 0.5, 0.05])
    constant = TrainConfig(schedule="constant", steps=100, warmup=0, lr=1.0)
    assert {learning_rate(constant, step) for step in range(100)} == {1.0}


# --- stopping and going on -------------------------------------------------------------------------------------------


def test_a_resumed_run_ends_with_the_same_bits(command, monkeypatch):
    """Stopped by a real SIGTERM at five random steps, each time with dropout and an optimizer's momentum under way."""
    flags = "--steps 60 --dropout 0.1 --micro-batch-size 4 --eval-every 25 --save-every 60"
    straight = command(flags, "straight")
    update, stops = train.Trainer.update, sorted(random.Random(1).sample(range(1, 60), 5))

    def update_and_stop(trainer, rate):
        update(trainer, rate)
        if trainer.step + 1 in stops:
            stops.remove(trainer.step + 1)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train.Trainer, "update", update_and_stop)
    with pytest.raises(SystemExit) as stopped:
        command(flags, "stopped")
    while stops:
        with pytest.raises(SystemExit) as stopped:
            command("--resume", "stopped")
        assert stopped.value.code == 128 + signal.SIGTERM
    resumed = command("--resume", "stopped")
    assert fingerprint(resumed) == fingerprint(straight)
    evaluations = [[row for row in rows(run) if "val_bpb" in row] for run in (straight, resumed)]
    assert evaluations[0] == evaluations[1]
    steps = [row["step"] for row in rows(resumed) if "train_loss" in row]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("flags", ["--optimizer muon", "--norm batchnorm --placement post --dtype float16"])
def test_resuming_keeps_every_kind_of_state(flags, command):
    straight = command(f"--steps 12 --schedule constant {flags}", "straight")
    command(f"--steps 5 --schedule constant {flags}", "stopped")
    assert fingerprint(command(f"--resume --steps 12 {flags}", "stopped")) == fingerprint(straight)


def test_resuming_a_finished_run_says_so(command, capsys):
    run = command("--steps 5")
    before = fingerprint(run)
    command("--resume")
    assert "is finished" in capsys.readouterr().out
    assert fingerprint(run) == before


def test_evaluation_of_a_checkpoint_repeats_the_run_s_own(command, capsys):
    run = command("--steps 5")
    command("--eval-only")
    assert f"val_bpb {rows(run)[-1]['val_bpb']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_first(number, code, command, monkeypatch, capsys, tmp_path):
    update = train.Trainer.update

    def update_and_stop(trainer, rate):
        update(trainer, rate)
        if trainer.step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(train.Trainer, "update", update_and_stop)
    with pytest.raises(SystemExit) as stopped:
        command("--steps 50")
    assert stopped.value.code == code
    assert find_checkpoint(str(tmp_path / "run")).name == "step-000004"
    assert capsys.readouterr().err.count("--resume") == 1


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing_bad(command, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        command("--norm none --lr 1e9 --clip 0 --warmup 0 --steps 200 --save-every 1 --keep 300")
    assert ended.value.code == 5
    bad = [row["step"] for row in rows(tmp_path / "run") if row.get("not_finite")]
    assert len(bad) == 1 and f"at step {bad[0]}" in capsys.readouterr().err
    kept = [train.load_model(path, "cpu")[0] for path in (tmp_path / "run/checkpoints").iterdir()]
    assert len(kept) == bad[0] - 1  # every step before it, and none from it on
    assert all(weight.isfinite().all() for model in kept for weight in model.parameters())


def test_running_out_of_memory_names_the_knobs(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command("--vocab-size 257 --hidden-dim 1000000000000")
    assert ended.value.code == 3
    assert "--micro-batch-size" in capsys.readouterr().err


def test_a_folder_in_use_is_left_alone(command, capsys, tmp_path):
    run = command("--steps 5")
    before = fingerprint(run)
    with train.locked(run), pytest.raises(SystemExit) as ended:
        command("--resume --steps 10")
    assert ended.value.code == 4
    assert "in use" in capsys.readouterr().err
    assert fingerprint(run) == before


BAD_INPUT = {
    "--norm nope": "--norm: invalid choice",
    "--placement nope": "--placement: invalid choice",
    "--dim 30 --heads 4": "--dim 30 is not divisible by --heads 4",
    "--heads 4 --kv-heads 3": "--heads 4 is not divisible by --kv-heads 3",
    "--batch-size 8 --micro-batch-size 3": "--batch-size 8 is not divisible by --micro-batch-size 3",
    "--dim 6 --heads 2": "odd",
    "--layers 0": "--layers must be at least 1",
    "--context -5": "--context must be at least 1",
    "--steps 0": "--steps must be at least 1",
    "--dim ten": "--dim: invalid int value",
    "--lr -1": "--lr must be a positive number",
    "--lr nan": "--lr must be a positive number",
    "--dropout 1.5": "--dropout must be",
    "--norm-arg epsilon=1": "has no argument 'epsilon'",
    "--norm-arg eps=small": "takes a number",
    "--norm-arg eps=0": "eps",
    "--data missing.txt": "missing.txt",
    "--context 100000000": "--context",
    "--tokenizer sentencepiece --vocab-size 30000": "--vocab-size",
    "--resume": "there is no run",
    "--eval-only": "there is no run",
    "--config missing.json": "missing.json",
    "--device cuda": "--device cuda",
    "--nonsense": "--nonsense",
    "--log wandb": "pip install wandb",
}


@pytest.mark.parametrize("flags, complaint", BAD_INPUT.items())
def test_bad_input_is_one_line_and_exit_code_2(flags, complaint, command, capsys, tmp_path):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(SystemExit) as ended:
        command(f"--steps 5 {flags}")
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert complaint in lines[-1]
    assert [line for line in lines if "error" in line] == lines[-1:]
    assert not (tmp_path / "run").exists()


def test_resuming_another_model_names_what_differs(command, capsys):
    command("--steps 5")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command("--resume --norm layernorm --layers 3")
    assert ended.value.code == 2
    assert "norm rmsnorm, not layernorm; layers 2, not 3" in capsys.readouterr().err


def test_a_folder_that_holds_something_else_is_not_touched(command, capsys, tmp_path):
    command("--steps 5")
    with pytest.raises(SystemExit) as ended:
        command("--steps 5")
    assert ended.value.code == 2 and "already holds a run" in capsys.readouterr().err
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/dear.txt").write_text("dear")
    with pytest.raises(SystemExit) as ended:
        command("--steps 5", "letters")
    assert ended.value.code == 2 and "is not empty" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is writable for root")
def test_an_unwritable_folder_is_refused(command, capsys, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(SystemExit) as ended:
        command("--steps 5", "closed/run")
    assert ended.value.code == 2 and "no permission" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["text.txt", "text.txt/run", "/proc/nothing/run"])
def test_a_folder_that_cannot_be_made_is_refused(out, command, capsys):
    with pytest.raises(SystemExit) as ended:
        command("--steps 5", out)
    assert ended.value.code == 2 and out in capsys.readouterr().err.splitlines()[-1]


def test_bfloat16_is_refused_where_the_processor_lacks_it(text, tmp_path):
    """oneDNN is told to leave AVX-512 alone, as on an older processor."""
    flags = f"{SIZES} --dtype bfloat16 --data {text} --cache-dir {tmp_path} --out {tmp_path / 'run'}".split()
    ended = subprocess.run(
        [sys.executable, ROOT / "train.py", *flags],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert "--dtype bfloat16" in ended.stderr and len(ended.stderr.splitlines()) == 1
