"""The figures that train.py reports, by hand: a step takes 2 seconds, an evaluation 50, and a checkpoint 7."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from config import ModelConfig
from data.prepare import prepare
from model import Llama
from runtime.device import peak_flops, peak_memory

SIZES = "--dim 32 --layers 2 --heads 4 --kv-heads 2 --head-dim 16 --hidden-dim 40 --context 32 --batch-size 8"
RUN = f"{SIZES} --tokenizer bytes --device cpu --dtype float32 --steps 20 --eval-every 10 --save-every 10"
TOKENS = 8 * 32  # per step
# 6 FLOPs for each weight in a matrix product: the head, and in both blocks queries and output, keys and values, MLP.
# Attention has 2 products over on average half of 32 tokens, with 2 FLOPs each, and as much again twice in backward.
FLOPS = 6 * (257 * 32 + 2 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 40)) + 3 * 2 * (2 * 2 * 64 * 32 / 2)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Seconds, which only what takes time advances."""
    now = [1000.0]

    def taking(seconds: float, function):
        def slow(*args, **options):
            now[0] += seconds
            return function(*args, **options)

        return slow

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(train.Trainer, "update", taking(2.0, train.Trainer.update))
    monkeypatch.setattr(train, "evaluate", taking(50.0, train.evaluate))
    monkeypatch.setattr(train, "save_checkpoint", taking(7.0, train.save_checkpoint))
    return now


def trained(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train_loss" in row]


def test_seconds_tokens_and_utilization_of_a_run_that_is_resumed(tmp_path, clock, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(train.tqdm, "set_postfix", lambda bar, values, **options: shown.append(values))
    monkeypatch.setattr(train, "peak_flops", lambda device, dtype: 1e9)
    monkeypatch.setattr(train, "peak_memory", lambda device: 2.54e9)
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(500)))
    flags = [*RUN.split(), "--data", str(text), "--cache-dir", str(tmp_path / "cache"), "--out", str(out)]
    train.main(flags)
    speed = TOKENS / 2.0
    first, last = trained(out)
    assert (first["tokens"], first["seconds"], first["tokens_per_second"]) == (10 * TOKENS, 20.0, speed)
    # The second ten steps, after an evaluation and a checkpoint.
    assert (last["tokens"], last["seconds"], last["tokens_per_second"]) == (20 * TOKENS, 20 + 57 + 20, speed)
    assert shown[-1]["tokens/s"] == f"{speed:,.0f}" and shown[-1]["MFU"] == f"{speed * FLOPS / 1e9:.1%}"
    printed = capsys.readouterr().out
    assert "done in 154 s, peak memory 2.5 GB" in printed  # 20 steps, 2 evaluations, 2 checkpoints
    data = prepare([str(text)], "bytes", 257, tmp_path / "cache", 32)
    val = bytes(np.asarray(data.val.tokens)[np.asarray(data.val.tokens) < 256].astype(np.uint8))
    in_bytes = 8 * len(gzip.compress(val, 9)) / len(val)
    assert f"gzip -9 on the whole validation text: {in_bytes:.4f} bits per byte" in printed

    shutil.rmtree(out / "checkpoints" / "step-000020")
    clock[0] += 10_000  # while nothing runs
    train.main([*flags, "--resume"])
    first, last = trained(out)
    # Saved after ten steps, 20 s, before the evaluation. The checkpoint itself does not know how long it took.
    assert (last["seconds"], last["tokens_per_second"]) == (20 + 20, speed)
    assert "done in 97 s" in capsys.readouterr().out


def test_speed_of_a_stretch_shorter_than_others(tmp_path, clock):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(500)))
    flags = [*RUN.split(), "--data", str(text), "--cache-dir", str(tmp_path / "cache"), "--out", str(out)]
    train.main([*flags, "--steps", "13"])
    assert [(row["step"], row["tokens_per_second"]) for row in trained(out)] == [(10, TOKENS / 2), (13, TOKENS / 2)]


def test_flops_per_token_by_hand():
    config = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, hidden_dim=40, context=32, vocab_size=257)
    for tied in (True, False):
        with torch.device("meta"):
            model = Llama(ModelConfig(**{**vars(config), "tie_embeddings": tied}))
        assert train.flops_per_token(model) == FLOPS


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_flops_of_a_card_by_its_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), torch.bfloat16) == peak
    assert peak_flops(torch.device("cuda"), torch.float32) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="compares with Linux's /proc")
def test_peak_memory_is_that_of_the_process():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert peak_memory(torch.device("cpu")) == pytest.approx(int(line.split()[1]) * 1024, rel=0.05)
