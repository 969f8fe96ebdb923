"""train.py: learning, resuming, signals, and errors for invalid input."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

import train
from config import TrainConfig
from data.tokenizer import ByteTokenizer, train_tokenizer
from files import ROOT, warned
from machine import distributed
from machine.process import STOP_SIGNALS, NotFinite
from model import Llama
from norms import KINDS
from norms.placement import PLACEMENTS
from optim import learning_rate
from runtime.checkpoint import find_checkpoint, load_pretrained
from runtime.flags import read_train
from runtime.run import Run, open_run
from runtime.run_dir import read_run_file, read_samples, write_run_file
from sampling import TextStream

SIZES = "--dim 32 --layers 2 --heads 2 --context 32 --batch-size 8 --tokenizer bytes --device cpu --dtype float32"


@pytest.fixture
def text(text: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return Path(shutil.copy(text, tmp_path))


@pytest.fixture
def command(text: Path, tmp_path: Path):
    """Run train.py on `text` in this process, with additional flags in one string."""

    def run(flags: str, out: str = "run", tokenizer: str = "--tokenizer bytes", data: Path = text) -> Path:
        sizes = SIZES.replace("--tokenizer bytes", tokenizer)
        common = f"{sizes} --data {data} --cache-dir {tmp_path / 'cache'} --out {tmp_path / out}"
        train.main(f"{common} {flags}".split())
        return tmp_path / out

    return run


@pytest.fixture
def make_trainer(text: Path, tmp_path: Path):
    """`make_trainer(flags)`: before the first step of a run on `text`."""
    common = f"{SIZES} --data {text} --cache-dir {tmp_path / 'cache'} --out {tmp_path / 'run'}"
    return lambda flags: train.Trainer(opened(f"{common} {flags}"))


def opened(flags: str) -> Run:
    return open_run(read_train(flags.split()), ["train.py"])


def read_metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.pictures
def test_run_learns_and_writes_all_files(command, capsys):
    run = command("--steps 60 --lr 0.01 --eval-every 30 --save-every 15 --dtype bfloat16")
    evaluations = [row for row in read_metrics(run) if "val_bpb" in row]
    assert [row["step"] for row in evaluations] == [30, 60]
    # Ten equally likely words: log2(10) = 3.3 bits per word of about 4.9 bytes. The minimum is about 0.7 bits per byte.
    assert 0.6 < evaluations[-1]["val_bpb"] < 2.5
    training = [row for row in read_metrics(run) if "train_loss" in row]
    assert training[0].keys() == {"step", "tokens", "seconds", "train_loss", "lr", "grad_norm", "tokens_per_second"}
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000045", "step-000060"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "step 60" in (run / "samples.txt").read_text()
    assert re.search(r"gzip -9 on the validation text: .*\n.* peak memory (?!0\.0)\d+\.\d GB", capsys.readouterr().out)


@pytest.mark.pictures
def test_a_report_is_drawn_when_a_run_ends_or_stops(command, monkeypatch, tmp_path):
    """And between, at an evaluation, if the last one is old. Stopped before an evaluation, it says so."""
    drawn = list[int]()
    monkeypatch.setattr(train, "write_page", lambda folder, _: drawn.append(read_metrics(folder)[-1]["step"]))
    for flags, steps in (("", [6]), ("--resume", [6]), ("--resume --steps 8", [8])):
        command(f"--steps 6 --eval-every 2 {flags}")
        assert drawn == steps
        drawn.clear()
    monkeypatch.setattr("runtime.progress.EVERY", 0)
    command("--steps 6 --eval-every 2", "other")
    assert drawn == [2, 4, 6]
    monkeypatch.undo()
    with pytest.raises(SystemExit):
        command("--steps 6 --max-minutes 1e-9", "stopped")
    assert "<p>Not evaluated yet.</p>" in (tmp_path / "stopped/report.html").read_text()
    assert (tmp_path / "stopped/loss.png").exists()


def test_a_norm_whose_statistics_are_those_of_micro_batches_says_so(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    warned.clear()
    config = f"--config {command('--steps 1 --norm batchnorm --micro-batch-size 4') / 'run.json'}"
    for flags in (config, f"{config} --norm rmsnorm", f"{config} --micro-batch-size 8"):
        warned.clear()
        opened(flags)
    line = "warning: --norm batchnorm computes its statistics over each micro-batch of 4, not over the batch of 8"
    assert capsys.readouterr().err.count(line) == 2  # not with RMSNorm, and not with the whole batch


def test_a_term_of_the_objective_is_minimized_and_logged_apart(command):
    """A z-loss (arXiv 2204.02311). The losses that are logged stay cross-entropies."""
    flags = "--steps 1 --micro-batch-size 4"
    plain, run = command(flags, "plain"), command(f"{flags} --z-loss 100")
    settings = opened(f"--eval-only --out {run}")
    tokens, _ = train.training_batch(settings.data.train, 0, 0, range(8), 32)
    with torch.no_grad():
        z_loss = 100 * float(Llama(settings.model_config)(tokens).logsumexp(-1).square().mean())
    (without, _), (row, last) = read_metrics(plain), read_metrics(run)
    assert (row["train_loss"], row["z_loss"]) == pytest.approx((without["train_loss"], z_loss))
    assert abs(row["grad_norm"] / without["grad_norm"] - 1) > 0.01 and "z_loss" not in last


ARMS = [(kind, "pre") for kind in sorted(KINDS)] + [("rmsnorm", name) for name in PLACEMENTS if name != "pre"]


@pytest.mark.parametrize("kind, placement", ARMS)
def test_every_norm_and_placement_trains_from_the_weights_of_its_seed(kind, placement, make_trainer):
    trainer = make_trainer(f"--seed 5 --norm {kind} --placement {placement} --lr 0.005 --warmup 0")
    start = Llama(trainer.run.model_config, 5).state_dict()
    assert all(torch.equal(start[name], weight) for name, weight in trainer.model.state_dict().items())
    for trainer.step in range(12):
        trainer.train_step()
    trainer.read_pending()
    first, *_, last = (losses["train_loss"] for losses in trainer.logged_losses)
    assert last < first < 1.2 * math.log(257)
    for name, weight in trainer.model.state_dict().items():
        assert not torch.equal(weight, start[name]), name
        if placement == "ngpt" and weight.ndim == 2:  # length 1 along the features of the residual stream
            lengths = weight.norm(dim=0 if "o_proj" in name or "down_proj" in name else 1)
            torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=1e-6, atol=0)


@pytest.mark.parametrize("context, size", [(128, 16), (28, 14)])
def test_a_sample_ends_with_its_document(context, size, make_trainer):
    """It continues 16 validation tokens, at most half a context, with a temperature of 0.8 and a top-p of 0.95."""
    trainer = make_trainer(f"--norm layernorm --context {context}")
    model, prompt = trainer.model, trainer.run.data.val[:size].tolist()
    with torch.no_grad():  # ends become likely
        model.final_norm.bias.copy_(model.lm_head.weight[ByteTokenizer.end_of_document] * 400)
    ids = train.generate(model, prompt, tokens=min(64, context - size), temperature=0.8, top_p=0.95).tolist()
    assert len(set(ids[size + ids[size:].index(ByteTokenizer.end_of_document) :])) > 3, "text would follow"
    assert trainer.sample() == TextStream().add(bytes(ids[: ids.index(ByteTokenizer.end_of_document)]))


def test_columns_of_a_file_are_different_texts_and_one_may_be_for_validation(text, tmp_path):
    """Also in one cache."""
    path = tmp_path / "both.jsonl"
    path.write_text(json.dumps({"a": "the cat sings. " * 99, "b": "a dog hears the bird. " * 99}) + "\n")
    flags = f"{SIZES} --cache-dir {tmp_path} --out {tmp_path / 'run'}"
    texts = [bytes(opened(f"{flags} --data {path} --text-column {column}").data.train[:9].tolist()) for column in "aba"]
    assert texts == [b"the cat s", b"a dog hea", b"the cat s"]
    run = opened(f"{flags} --data {text} --val-data {path} --text-column b")
    assert run.config.val_data == [str(path)] and bytes(run.data.val[:9].tolist()) == b"a dog hea"


def test_a_step_has_the_windows_of_its_order(make_trainer):
    """Recorded values: runs must be reproducible. Eight windows of 32 tokens are an epoch, and a batch."""
    trainer = make_trainer("--order epochs --seed 3")
    trainer.run.data = dataclasses.replace(trainer.run.data, train=np.arange(257, dtype=np.uint16))
    trainer.update = lambda inputs, targets, lr: dict[str, Tensor](windows=inputs[:, 0] // 32)
    for trainer.step in (0, 1):
        trainer.train_step()
    windows = [step["windows"].tolist() for step in trainer.pending]
    assert windows == [[6, 1, 5, 2, 7, 4, 3, 0], [7, 3, 5, 6, 4, 0, 2, 1]]


def test_each_step_uses_the_learning_rate_of_the_schedule_and_rows_have_mean_losses(command, monkeypatch):
    """Means since the last row, and the last step's gradient norm. `test_a_stopped_run...` has them across a stop."""
    rates, steps, train_step = [], list[dict[str, float]](), train.Trainer.train_step

    def step_and_record(trainer):
        train_step(trainer)
        rates.append([group["lr"] for each in trainer.optimizers for group in each.param_groups])
        steps.append({name: float(value) for name, value in trainer.pending[-1].items()})

    monkeypatch.setattr(train.Trainer, "train_step", step_and_record)
    run = command("--steps 20 --warmup 5 --lr 0.01 --optimizer muon")
    config = TrainConfig(steps=20, warmup=5, lr=0.01)
    assert rates == [[learning_rate(config, step), 2 * learning_rate(config, step)] for step in range(20)]
    rows = [row for row in read_metrics(run) if "train_loss" in row]
    assert [(row["step"], row["lr"]) for row in rows] == [(step, learning_rate(config, step - 1)) for step in (10, 20)]
    for row, part in zip(rows, (steps[:10], steps[10:]), strict=True):
        assert row["train_loss"] == pytest.approx(sum(step["train_loss"] for step in part) / 10, rel=1e-9)
        assert row["grad_norm"] == part[-1]["grad_norm"]


def test_learning_rate_schedules():
    """Linear decay to 0 is compared in test_minimal.py."""
    cosine = TrainConfig(schedule="cosine", steps=100, warmup=10, lr=1.0)
    last = (1 + math.cos(math.pi * 89 / 90)) / 2
    assert [learning_rate(cosine, step) for step in (0, 9, 10, 55, 99)] == pytest.approx([0.1, 1, 1, 0.5, last])
    stable = TrainConfig(schedule="wsd", steps=100, warmup=10, lr=1.0)
    assert [learning_rate(stable, step) for step in (10, 79, 90, 99)] == pytest.approx([1.0, 1.0, 0.5, 0.05])
    for schedule, late in (("cosine", 0.625 - 0.375 * math.sqrt(0.75)), ("linear", 0.375), ("wsd", 0.8125)):
        floored = TrainConfig(schedule=schedule, steps=100, warmup=10, lr=1.0, min_lr=0.25)
        assert [learning_rate(floored, step) for step in (4, 85, 100)] == pytest.approx([0.5, late, 0.25])
    constant = TrainConfig(schedule="constant", steps=100, warmup=0, lr=1.0)
    assert {learning_rate(constant, step) for step in range(100)} == {1.0}


@pytest.mark.parametrize("flags, on", [("--tf32 --deterministic", True), ("", False)])
def test_tf32_and_deterministic_hold_for_the_run(flags, on, command, monkeypatch):
    """Also after a sample. It is drawn without `--deterministic`, because CUDA's cumsum would raise."""
    seen = []

    def record(*args):
        seen.append((torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()))

    monkeypatch.setattr(train, "learning_rate", lambda *args: record() or 1e-3)
    monkeypatch.setattr(train, "generate", lambda *args, **options: record() or torch.zeros(1, dtype=torch.int64))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the run leaves it alone
    before = torch.get_float32_matmul_precision()
    command(f"--steps 2 --eval-every 1 {flags}")
    torch.set_float32_matmul_precision(before)
    precision = "high" if on else "highest"
    assert seen == [(precision, on), (precision, on), (precision, False)] * 2
    assert not torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(
    "flags",
    [
        "--dropout 0.1 --micro-batch-size 4",
        "--norm batchnorm --placement post --dtype float16",
        "--recipe muse_glimmer --attention-cap 5 --inner-norm --v-norm --z-loss 1e-3 --decay-gains all",
        "--recipe deepseek_v4 --vector-lr 0.1",
        "--recipe inkling2 --norm seednorm --optimizer adamw",
    ],
)
def test_a_stopped_run_ends_with_the_same_bits(flags, command, monkeypatch, fingerprint, capsys):
    """With the momentum of Muon and AdamW, running statistics, and a loss scale that is too large at first."""
    init = train.GradScaler.__init__
    large = lambda scaler, device, enabled: init(scaler, device, 2.0**26, enabled=enabled)  # noqa: E731
    monkeypatch.setattr(train.GradScaler, "__init__", large)
    flags = f"--steps 12 --eval-every 3 --save-every 12 --eval-tokens 640 {flags}"
    uninterrupted, train_step = command(flags, "uninterrupted"), train.Trainer.train_step
    first = next(row for row in read_metrics(uninterrupted) if "train_loss" in row)
    assert (first["grad_norm"] is None) == ("float16" in flags)

    def step_and_stop(trainer):
        train_step(trainer)
        if trainer.step + 1 in (2, 6):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train.Trainer, "train_step", step_and_stop)
    for again in (flags, f"--resume {flags}"):
        with pytest.raises(SystemExit) as excinfo:
            command(again, "stopped")
        assert excinfo.value.code == 128 + signal.SIGTERM
        file = uninterrupted.with_name("stopped") / "run.json"
        run = read_run_file(file)
        for part in ("asked", "resolved"):
            run[part] |= {"cuda_graph": False}  # as 5a132b0 wrote it, which had one option more
        write_run_file(file, run)
    resumed = command(f"--resume {flags}", "stopped")
    assert fingerprint(resumed) == fingerprint(uninterrupted)
    assert "metrics.jsonl" not in capsys.readouterr().err  # stopped between its rows, it lacks none
    for key in ("val_bpb", "train_loss"):
        whole, parts = ([row for row in read_metrics(run) if key in row] for run in (uninterrupted, resumed))
        assert [(row["step"], row[key]) for row in whole] == [(row["step"], row[key]) for row in parts]


@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.1.mlp.down_proj.weight"])
def test_an_overflow_in_one_weight_skips_every_optimizer(name, make_trainer):
    """In float16: of AdamW's weights or of Muon's. The scale of the loss is halved, and no momentum has changed."""
    trainer = make_trainer("--dtype float16 --clip 0 --lr 1e-3 --warmup 0")
    weights = list(trainer.model.parameters())

    def tensors() -> list[Tensor]:
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        return [x.clone() for x in (*weights, *(value for state in states for value in state.values()))]

    for good_steps in range(2):  # before the first, there is no momentum
        before, scale = tensors(), trainer.scaler.get_scale()
        handle = trainer.model.get_parameter(name).register_hook(lambda gradient: gradient * math.inf)
        trainer.train_step()
        assert len(before) >= len(weights) * (1 + good_steps) and all(map(torch.equal, tensors(), before))
        assert trainer.scaler.get_scale() == scale / 2
        handle.remove()
        trainer.train_step()
        assert not any(map(torch.equal, weights, before))


@pytest.mark.parametrize("clip, dtype", [(0.01, "float32"), (0.01, "float16"), (0, "float32")])
def test_gradients_are_clipped(clip, dtype, make_trainer, monkeypatch):
    """Their norm over the weights of both optimizers, when these take their steps."""
    trainer = make_trainer(f"--dtype {dtype} --recompute --clip {clip}")
    assert trainer.model.recompute
    norms, take_steps = list[float](), train.step_optimizers

    def record_norm(model: Llama, *others: Any) -> None:
        norms.append(float(train.get_total_norm([w.grad for w in model.parameters() if w.grad is not None])))
        take_steps(model, *others)

    monkeypatch.setattr(train, "step_optimizers", record_norm)
    trainer.train_step()
    assert norms == [pytest.approx(clip, rel=1e-3)] if clip else norms[0] > 0.1


def test_dropout_differs_between_steps_seeds_and_ranks_and_repeats_with_them(make_trainer, monkeypatch):
    """Of the same weights, on a training text of a single window, so that every step and rank has the same batch."""
    trainer, losses = make_trainer("--dropout 0.5"), []
    run = trainer.run
    run.data = dataclasses.replace(run.data, train=run.data.train[:33])
    monkeypatch.setattr(train, "update_weights", lambda *args: torch.zeros(()))
    monkeypatch.setattr(distributed, "rows", range)
    for seed, step, rank in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (0, 1, 1), (0, 0, 0)):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        run.config, trainer.step = dataclasses.replace(run.config, seed=seed), step
        trainer.train_step()
        losses.append(float(trainer.pending[-1]["train_loss"]))
    assert losses[0] == losses[-1] and len(set(losses)) == 6


def test_evaluation_is_deterministic_without_dropout_and_without_gradients(command, monkeypatch):
    """Its batch size does not matter. Ranks share it: each of three computes four of ten batches, to the same bits."""
    run = opened(f"--eval-only --out {command('--steps 1 --dropout 0.5 --eval-tokens 640')}")
    model, _ = load_pretrained(find_checkpoint(run.folder), run.device)
    state = torch.get_rng_state()
    gradients, sizes, losses = set(), [], set()

    def loss(inputs, targets):
        gradients.add(torch.is_grad_enabled())
        sizes.append(targets.numel())
        return Llama.loss(model, inputs, targets)

    monkeypatch.setattr(model, "loss", loss)
    for mode in (True, False):
        losses.add(train.evaluate(model.train(mode), run))
        assert model.training == mode  # or the rest of a run would train without dropout
    assert gradients == {False} and sum(sizes) == 2 * 640 and len(losses) == 1
    assert torch.equal(torch.get_rng_state(), state)
    for batch_tokens in (1, 96):
        monkeypatch.setattr(train, "EVAL_BATCH_TOKENS", batch_tokens)
        assert train.evaluate(model, run) == pytest.approx(losses.copy().pop(), rel=1e-6)
    monkeypatch.setattr(train, "EVAL_BATCH_TOKENS", 64)
    run.config = dataclasses.replace(run.config, micro_batch_size=1)
    alone, parts = train.evaluate(model, run), list[Any]()
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    monkeypatch.setattr(distributed, "all_gather", lambda part: parts.__iadd__([part]))
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        found = train.evaluate(model, run)
    assert [len(part) for part in parts] == [4, 4, 4] and found == alone


def test_a_finished_run_is_evaluated_and_resuming_does_not_change_it(command, capsys, text, fingerprint, ends):
    run = command("--steps 1")
    before = fingerprint(run)
    command("--resume")
    assert "already has" in capsys.readouterr().out and fingerprint(run) == before
    for which in ("--out", str(run)), ("--config", str(run / "run.json")):
        train.main(["--eval-only", *which])
        assert f"val_bpb {read_metrics(run)[-1]['val_bpb']:.4f}" in capsys.readouterr().out
    for data in (text, shutil.copy(text, text.with_name("copy.txt"))):  # its own text, of which a part was held out
        train.main(["--eval-only", "--out", str(run), "--data", str(data)])
        shown = capsys.readouterr()
        assert f"val_bpb {read_metrics(run)[-1]['val_bpb']:.4f}" in shown.out
        assert "changed" not in shown.err and "warning" not in shown.err
    train.main(f"--resume --out {run} --steps 2 --data {data}".split())
    assert f"{run}, from step 1\n" in capsys.readouterr().out and read_metrics(run)[-1]["step"] == 2
    assert read_run_file(run / "run.json")["asked"].items() >= {"preset": "tiny", "dim": 32, "steps": 2}.items()
    for path in (text, Path(data)):
        path.write_text(path.read_text() + "one more line\n")
    for flag in ("--resume", "--eval-only"):
        code, error = ends(train.main, [flag, "--out", str(run)])
        assert code == 2 and "was trained with another corpus; start a new run" in error


def test_evaluation_on_training_text_says_so(command, capsys, text, tmp_path):
    (tmp_path / "texts").mkdir()
    part, whole = Path(shutil.move(text, tmp_path / "texts/part.txt")), tmp_path / "texts"
    (whole / "more.txt").write_text("a bird hears the dog. " * 99)
    for trained, flag, data in ((part, "--val-data", part), (part, "--data", whole), (whole, "--data", part)):
        warned.clear()  # a line comes once
        run = command("--steps 1", f"{trained.name}{flag}", data=trained)
        train.main(f"--eval-only --out {run} {flag} {data} --cache-dir {tmp_path / 'cache'}".split())
        assert f"warning: the run was trained on text of {data}\n" in capsys.readouterr().err


def test_a_model_is_evaluated_on_all_of_another_text(command, capsys, tmp_path, text):
    """With its own tokenizer, in its own context; a run, or a directory named with --init-from."""
    run = command("--steps 3 --tokenizer sentencepiece --vocab-size 320 --eval-tokens 64")
    model, tokenizer = load_pretrained(run)
    other, part = tmp_path / "other.jsonl", tmp_path / "part.txt"
    texts = ["a bird hears the dog. " * 9, "short", text.read_text()[:5000]]
    other.write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    part.write_text("cats\n")
    ids = [id for text in texts for id in (*tokenizer.encode(text), tokenizer.end_of_document)]
    nats = 0.0  # of all ids but the first, in windows of 32
    for start in range(0, len(ids) - 1, 32):
        window = torch.tensor(ids[start : start + 33])
        log_probabilities = model(window[None, :-1])[0].detach().double().log_softmax(-1)
        nats -= float(log_probabilities.gather(1, window[1:, None]).sum())
    byte_count = len("".join(texts).encode()) - len(tokenizer.decode_bytes(ids[:1]))
    expected = {"val_loss": nats / (len(ids) - 1), "val_bpb": nats / math.log(2) / byte_count}
    before = sorted(tmp_path.rglob("runs/*"))
    text.unlink()  # the training text is not needed
    for where in (f"--out {run}", f"--init-from {find_checkpoint(run)}"):
        for flag in ("--data", "--val-data"):
            capsys.readouterr()
            common = f"--eval-only {where} --cache-dir {tmp_path / 'cache'} --device cpu --dtype float32"
            train.main(f"{common} {flag} {other} --text-column content".split())
            line, result = capsys.readouterr().out.splitlines()
            found = json.loads(result)
            assert line.startswith(f"{found.pop('checkpoint')}: val_loss {expected['val_loss']:.4f}, val_bpb ")
            assert found == pytest.approx(expected, rel=1e-6), flag
    train.main(f"{common} --data {part}".split())  # shorter than the context
    assert sorted(tmp_path.rglob("runs/*")) == before, "no run begins"


def token_folder(folder: Path, tokenizer: Any, text: Path) -> Path:
    """As nanoGPT writes it."""
    folder.mkdir()
    ids = np.array(tokenizer.encode(text.read_text()), np.uint16)
    ids[:-2000].tofile(folder / "train.bin")
    ids[-2000:].tofile(folder / "val.bin")
    return folder


def test_token_files_need_no_tokenizer(command, tmp_path, text, capsys, ends):
    """Then there is only val_loss. It is that of the same ids with a tokenizer, which also gives bits per byte."""
    data = token_folder(tmp_path / "ids", ByteTokenizer(), text)
    code, error = ends(lambda flags: command(flags, "refused", "", data), "--steps 2 --vocab-size 100")
    assert code == 2 and error.endswith("train.bin has the id 114, but --vocab-size is 100\n")
    without = command("--steps 4 --eval-every 2 --vocab-size 257", "a", "", data)
    with_bytes = command("--steps 4 --eval-every 2", "b", data=data)
    rows, others = ([row for row in read_metrics(run) if "val_loss" in row] for run in (without, with_bytes))
    assert [row["val_loss"] for row in rows] == [row["val_loss"] for row in others]
    assert [row["val_bpb"] for row in rows] == [None, None] and not read_samples(without)
    assert all(row["val_bpb"] == pytest.approx(row["val_loss"] / math.log(2)) for row in others)
    assert read_samples(with_bytes)[-1][1].startswith(text.read_text()[-2000:-1990])
    assert "nats per token of the validation text." in (without / "report.html").read_text("utf-8")
    train.main(f"--eval-only --out {without}".split())
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["val_bpb"] is None
    with pytest.raises(ValueError, match="token files came without one; "):
        load_pretrained(without)[1].encode("text")


@pytest.mark.parametrize("tokens", [True, False])
def test_a_tokenizer_of_ones_own_is_only_needed_for_the_start(command, tmp_path, text, fingerprint, tokens):
    """In an order of epochs, a resumed run ends with the same bits. The checkpoint has the tokenizer."""
    tokenizer, own = train_tokenizer([text.read_text()], 300), tmp_path / "own"
    own.mkdir()
    tokenizer.save(own)
    data = token_folder(tmp_path / "ids", tokenizer, text) if tokens else text
    flags = "--steps 6 --save-every 3 --dropout 0.1 --order epochs"
    whole, run = (command(flags, out, f"--tokenizer {own}", data) for out in ("whole", "run"))
    assert opened(f"--eval-only --out {run}").model_config.vocab_size == 300
    shutil.rmtree(run / "checkpoints/step-000006")
    shutil.rmtree(own)
    train.main(f"--resume --out {run}".split())
    assert fingerprint(run) == fingerprint(whole) and load_pretrained(run)[1].hash == tokenizer.hash


def test_a_resumed_run_says_what_changes_and_keeps_its_first_command(command, capsys, monkeypatch):
    """What follows changes as well. On another machine, or with other threads, it cannot have the same bits."""
    for flags in ("--steps 1", "--steps 2 --resume", "--steps 3 --resume"):
        run = command(flags)
    warnings = capsys.readouterr().err
    assert "changed: --steps 2 -> 3\n" in warnings and "last digits" not in warnings
    opened(f"--resume --out {run} --steps 1500 --keep 1")  # at the same learning rate
    assert "changed: --steps 3 -> 1500, --warmup 0 -> 75, --keep 2 -> 1\n" in capsys.readouterr().err
    last = json.loads((run / "run.json").read_text())
    commands = [last["command"], *(each["command"] for each in last["resumed"])]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    assert all((each["commit"] or "")[:12] == head[:12] for each in (last, *last["resumed"]))
    assert {each[0] for each in commands} == {"train.py"} and [each["step"] for each in last["resumed"]] == [1, 2]
    assert [each[each.index("--steps") + 1 :] for each in commands] == [["1"], ["2", "--resume"], ["3", "--resume"]]
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    command("--steps 4 --resume")
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "last digits" in line]
    before, now = warning.split(", now ")
    assert f"{threads} threads), " in before and f"{threads + 1} threads), " in now


def test_a_tracker_continues_with_the_run(command, monkeypatch):
    """Under its id, from the step on at which it is resumed. Another run with the same options has its own id."""
    made = MagicMock()
    monkeypatch.setattr("runtime.progress.open_tracker", made)
    for flags, out in (("--steps 2", "run"), ("--steps 3 --resume", "run"), ("--steps 2", "other")):
        command(flags, out)
    (first, start), (again, step), (other, _) = ((call.args[2]["id"], call.args[3]) for call in made.call_args_list)
    assert first == again != other and (start, step) == (0, 2)


def test_train_from_python_is_the_command(command, text, tmp_path, fingerprint, monkeypatch):
    """Twice in one process: the same bits. A wrong option is an error, which does not end the process."""
    by_command = command("--steps 3 --norm dyt --norm-arg alpha=0.25 --no-tie-embeddings --seed 4")
    options = {"dim": 32, "layers": 2, "heads": 2, "context": 32, "batch_size": 8, "tokenizer": "bytes"}
    options |= {"device": "cpu", "dtype": "float32", "data": [text], "cache_dir": tmp_path / "cache"}
    options |= {"norm": "dyt", "norm_args": {"alpha": 0.25}, "tie_embeddings": False, "steps": 3, "seed": 4}
    monkeypatch.chdir(tmp_path)
    handlers = [*map(signal.getsignal, STOP_SIGNALS)]
    first = train.train(**options)
    assert [*map(signal.getsignal, STOP_SIGNALS)] == handlers, "in a notebook, an interrupt stops a cell alone"
    with ThreadPoolExecutor(1) as thread:  # its thread gets no signals
        second = thread.submit(train.train, **options, out="mine", resume=False).result()
    assert (first.folder.name, second.folder) == ("text-dyt-pre", Path("mine"))
    assert fingerprint(by_command) == fingerprint(first.folder) == fingerprint(second.folder)
    assert second.rows == read_metrics(second.folder) and "val_bpb" in second.rows[-1]
    saved, tokenizer = load_pretrained(second.folder)
    assert all(map(torch.equal, second.model.state_dict().values(), saved.state_dict().values()))
    assert not second.model.training and tokenizer.hash == second.tokenizer.hash
    assert json.loads((second.folder / "run.json").read_text())["command"][:2] == ["train.py", "--dim=32"]
    for wrong, message in (
        ({"norm": "layrnorm"}, "unknown --norm 'layrnorm'; choose from "),
        ({"sed": 1}, "'sed' (1) is not an option of this version"),
        ({"resume": 1}, "resume must be of type bool, not 1"),
        ({"out": "mine"}, "already holds a run; add --resume"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            train.train(**options | wrong)
        assert "\n" not in str(error.value)
    with pytest.raises(NotFinite, match="at step"):
        train.train(**options | {"lr": 1e30, "steps": 9})
    monkeypatch.setattr("machine.process.PACKAGES", ("torch", "matplotlip"))
    with pytest.raises(ValueError, match=r"has no matplotlip; use the virtual environment"):
        train.train(**options, out="before training")
    assert not Path("before training").exists()


def test_default_run_folders_are_numbered(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        train.main(f"{SIZES} --data {text} --steps 1".split())
    assert sorted(path.name for path in Path("runs").iterdir()) == ["text-rmsnorm-pre", "text-rmsnorm-pre-2"]
    train.main(["--eval-only"])
