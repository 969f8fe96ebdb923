"""Time and peak memory of a checkpoint of a billion weights, both ways. `pytest -m slow -s` prints them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = """
import resource, sys, time
import torch
from config import ModelConfig
from data.tokenizer import ByteTokenizer
from model import Llama
from runtime.checkpoint import load_pretrained, save_pretrained
torch.set_num_threads(1)
config = ModelConfig(
    dim=2048, layers=16, heads=32, kv_heads=8, hidden_dim=8192, context=64, vocab_size=257, tie_embeddings=False
)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
"""
SAVE = """
with torch.device("meta"):
    model = Llama(config)
before = peak()
state = {name: torch.full(weight.shape, 0.01, dtype=torch.bfloat16) for name, weight in model.state_dict().items()}
model.load_state_dict(state, assign=True)
del state
weights = sum(weight.nbytes for weight in model.parameters())
started = time.perf_counter()
save_pretrained(sys.argv[1], model, ByteTokenizer())
print(time.perf_counter() - started, (peak() - before) / weights, weights)
"""
LOAD = """
before = peak()
started = time.perf_counter()
model, _ = load_pretrained(sys.argv[1])
seconds = time.perf_counter() - started
weights = sum(weight.nbytes for weight in model.parameters())
print(seconds, (peak() - before) / weights, weights)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit")
def test_saving_and_loading_take_little_more_memory_than_the_weights(tmp_path, capsys):
    for name, code in (("save", SAVE), ("load", LOAD)):
        command = [sys.executable, "-c", CONFIG + code, str(tmp_path / "model")]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        seconds, ratio, weights = map(float, ended.stdout.split())
        with capsys.disabled():
            print(f"\n{name}: {weights / 1e9:.2f} GB of weights in {seconds:.1f} s, peak memory {ratio:.3f} of that")
        assert weights > 1.8e9 and ratio <= 1.2
