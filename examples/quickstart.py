"""Everything from Python: train, evaluate, swap the norm, generate, save, load. Seconds on a CPU.

Run it as `PYTHONPATH=. python examples/quickstart.py`, or cell by cell: editors read `# %%` as the start of a cell.
"""

# %% Text: the source of Python's json package, one token per byte
import json
import tempfile
from pathlib import Path

import torch

from data.batches import evaluation_batches, training_batch
from data.prepare import prepare
from generate import generate
from model import Llama
from runtime.checkpoint import load_pretrained, save_pretrained

CONTEXT, BATCH, STEPS = 64, 16, 60
data = prepare([str(Path(json.__file__).parent)], "bytes", 257, Path(".cache"), CONTEXT)
tokenizer = data.tokenizer


# %% A training loop and an evaluation
def train(model: Llama) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        inputs, targets = training_batch(data.train.tokens, 0, step, range(BATCH), CONTEXT)
        optimizer.zero_grad()
        model.loss(inputs, targets).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: Llama) -> float:
    """Nats per token of the validation text."""
    batches = list(evaluation_batches(data.val.tokens, CONTEXT, BATCH))
    total = sum(model.loss(inputs, targets).item() * targets.numel() for inputs, targets in batches)
    return total / sum(targets.numel() for _, targets in batches)


# %% Swap the norm: the same initial weights and batches
models = {}
for norm in ("rmsnorm", "layernorm"):
    models[norm] = model = Llama(norm=norm, dim=64, layers=2, heads=2, context=CONTEXT, vocab_size=257)
    before = evaluate(model)
    train(model)
    print(f"{norm}: {before:.3f} nats per token before, {evaluate(model):.3f} after {STEPS} steps")

# %% Generate: ids in, ids out; several prompts of the same length in a batch
model = models["rmsnorm"].eval()
ids = generate(model, tokenizer.encode("def "), tokens=50, temperature=0.7)
print(tokenizer.decode(ids.tolist()))
for row in generate(model, [tokenizer.encode(prompt) for prompt in ("def ", "self")], tokens=20, temperature=0.7):
    print(repr(tokenizer.decode(row.tolist())))

# %% Save and load
with tempfile.TemporaryDirectory() as folder:
    save_pretrained(f"{folder}/model", model, tokenizer)
    loaded, tokenizer = load_pretrained(f"{folder}/model")
print(f"saved and loaded: {evaluate(loaded):.3f} nats per token")
