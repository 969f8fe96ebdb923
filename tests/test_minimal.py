"""examples/minimal.py and the project are two sizes of one thing: in float64, both compute the same.

An operation rounds to 1e-16. Layers, and steps of training, add and amplify that: measured, to 5e-14.
"""

import dataclasses
import io

import pytest
import torch

import train
from config import configure
from data.batches import training_batch
from examples import minimal
from model import Llama
from runtime.flags import read_train
from runtime.run import open_run
from tests.random_values import randomize

LETTERS = {"V": 257, "C": 32, "L": 2, "H": 4, "K": 2, "D": 8, "M": 48, "CONTEXT": 32}
FLAGS = "--dim 32 --layers 2 --heads 4 --kv-heads 2 --hidden-dim 48 --context 32 --tokenizer bytes --optimizer adamw "
FLAGS += "--steps 59 --lr 0.01 --batch-size 8 --micro-batch-size 4 --device cpu --dtype float32"
CONFIG, _ = configure(read_train(FLAGS.split()))
TOKENS = torch.randint(257, (3, 32), generator=torch.Generator().manual_seed(0))
NAMES = ("_residual.norm", "_norm")  # in model.py and in minimal.py; others are the same


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for letter, size in LETTERS.items():
        monkeypatch.setattr(minimal, letter, size)


def same_weights(model: Llama) -> minimal.Llama:
    """Every weight has its place in both. The head is the embedding."""
    state = {name.replace(*NAMES): weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    other = minimal.Llama(model.config.norm, model.config.placement).double()
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_logits_and_gradients_are_those_of_model_py(norm, placement):
    model = randomize(Llama(dataclasses.replace(CONFIG, norm=norm, placement=placement))).double()
    other = same_weights(model)
    logits, expected = other(TOKENS), model(TOKENS)
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()
    grad_y = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward((logits, expected), (grad_y, grad_y))
    for name, weight in model.named_parameters():
        error = other.get_parameter(name.replace(*NAMES)).grad - weight.grad
        assert error.abs().max() <= 1e-12 * weight.grad.abs().max() > 0, name


@pytest.mark.parametrize("norm, placement", [("rmsnorm", "pre"), ("layernorm", "post")])
def test_losses_are_those_of_train_py(norm, placement, text, tmp_path):
    """So learning rates, weight decay and clipping are, and train.py's micro-batches add up to a batch."""
    files = f"--data {text} --cache-dir {tmp_path / 'cache'} --out {tmp_path / 'run'}"
    run = open_run(read_train(f"{FLAGS} --norm {norm} --placement {placement} {files}".split()), ["train.py"])
    trainer = train.Trainer(run)
    trainer.model.double()
    batches = (training_batch(run.data.train, run.config.seed, step, range(8), 32) for step in range(59))
    for loss in minimal.train(same_weights(trainer.model), batches, run.config.steps, run.config.lr):
        trainer.train_step()
        trainer.step += 1
        assert loss == pytest.approx(float(trainer.pending[-1]["train_loss"]), rel=1e-12)
    norms = [float(step["grad_norm"]) for step in trainer.pending]
    assert len(norms) == 59 and min(norms) < 1 < max(norms), "clipped, and not clipped"


def test_initial_weights_are_as_large_as_those_of_model_py():
    """Up to chance: a matrix has at least 512 values."""
    torch.manual_seed(0)
    other = minimal.Llama()
    for name, weight in Llama(CONFIG).named_parameters():
        torch.testing.assert_close(other.get_parameter(name.replace(*NAMES)).norm(), weight.norm(), rtol=0.2, atol=0)


@torch.no_grad()
def test_the_cache_changes_no_logit_and_no_sample_and_every_eighth_window_is_evaluated():
    model = randomize(minimal.Llama()).double()
    expected, cache = model(TOKENS), model.rope.new_zeros(2, 2, 3, 2, 32, 8)
    logits = torch.cat([model(TOKENS[:, past:end], cache, past) for past, end in ((0, 5), (5, 6), (6, 32))], dim=1)
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()
    loss = torch.nn.functional.cross_entropy(expected[::2].mT, TOKENS.flatten().roll(-1).view(3, 32)[::2])
    assert minimal.evaluate(model, TOKENS.flatten().repeat(4)) == pytest.approx(float(loss), rel=1e-12)  # two windows
    greedy = minimal.generate(model, TOKENS[:, :4], 28, temperature=1e-9)
    assert greedy[:, :4].equal(TOKENS[:, :4]) and greedy[:, 4:].equal(model(greedy)[:, 3:-1].argmax(-1))


def test_each_flag_of_the_command_matters(text, capsys, main=minimal.main):
    flags = ["", "--norm rmsnorm --placement pre --lr 0.004 --seed 0"]
    flags += ["--norm layernorm", "--placement post", "--lr 0.01", "--seed 1", "--steps 2"]
    found = [main(f"--data {text} --steps 1 {each}".split()) or capsys.readouterr().out for each in flags]
    assert found[0] == found[1] and len({*found}) == 6


def test_the_command_learns_and_refuses_a_missing_text(text, monkeypatch, ends):
    monkeypatch.setattr("sys.stdout", output := io.StringIO())  # without an encoding to change, as in a notebook
    minimal.main(["--data", str(text), "--steps", "100", "--lr", "0.01"])
    loss, bits = (float(output.getvalue().split(before)[1].split()[0]) for before in ("validation loss ", "nats or "))
    assert 0.5 < loss < 2.5 and abs(bits - loss / 0.693147) < 2e-4  # the frequencies of the bytes alone give 2.6 nats
    assert output.getvalue().partition("per byte\n")[2][0] == text.read_text()[text.stat().st_size * 9 // 10]
    code, error = ends(minimal.main, ["--data", "none.txt"])
    assert code == 2 and "--data none.txt: no file of 640 bytes" in error
