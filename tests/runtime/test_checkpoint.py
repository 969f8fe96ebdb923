"""Checkpoints: saving is atomic, hashes are verified, and resuming is bit-identical."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim import AdamW

from config import ModelConfig, TrainConfig
from data.tokenizer import ByteTokenizer, train_tokenizer
from model import Llama
from runtime.checkpoint import (
    check_space,
    find_checkpoint,
    intact_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    load_model,
    load_pretrained,
    load_training_state,
    save_checkpoint,
    save_pretrained,
    sha256,
)
from runtime.huggingface.names import hugging_face_name

CONFIG = ModelConfig(dim=16, layers=2, heads=2, hidden_dim=24, context=8, vocab_size=257)
BATCHES = torch.randint(0, 257, (20, 2, 9), generator=torch.Generator().manual_seed(0))
FILES = ["config.json", "manifest.json", "model.safetensors", "optimizer.safetensors"]
FILES += ["tokenizer.json", "tokenizer_config.json", "trainer.json"]


def adamw(model: Llama, **options) -> list:
    return [AdamW([{"params": [weight]} for weight in model.parameters()], lr=1e-2, **options)]


def muon(model: Llama) -> list:
    matrices = [weight for weight in model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=1e-2), AdamW(others, lr=1e-2, fused=True)]


def train(model: Llama, optimizers: list, steps: range) -> None:
    model.train()
    for step in steps:
        model.loss(BATCHES[step][:, :-1], BATCHES[step][:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def save(run: Path, step: int = 3, keep: int = 2, model: Llama | None = None, trained: bool = True, **trainer) -> Path:
    model = model or Llama(CONFIG)
    optimizers = adamw(model)
    if trained:
        train(model, optimizers, range(2))
    return save_checkpoint(run, step, model, ByteTokenizer(), optimizers, trainer, keep)


def newest_checkpoint(run: Path) -> Path:
    found = latest_checkpoint(run)
    assert found
    return found


def update_manifest(checkpoint: Path) -> None:
    """Recompute the hashes in the manifest after a test has changed files."""
    path = checkpoint / "manifest.json"
    hashes = {name: sha256(checkpoint / name) for name in json.loads(path.read_text()) if name != path.name}
    path.write_text(json.dumps(hashes))


def full_state(model: Llama, optimizers: list) -> dict[str, torch.Tensor]:
    state = dict(model.state_dict())
    for number, optimizer in enumerate(optimizers):
        for index, values in optimizer.state_dict()["state"].items():
            state |= {f"{number} {index} {key}": tensor for key, tensor in values.items()}
    return state


# --- saving and resuming ---------------------------------------------------------------------------------------------


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    for step in (1_000_000, 999_999, 2):
        (tmp_path / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000002", "step-999999", "step-1000000"]


@pytest.mark.parametrize(
    "optimizers, changes",
    [
        (lambda model: adamw(model, fused=True), {}),
        (lambda model: adamw(model, fused=False), {"tie_embeddings": False}),
        (lambda model: adamw(model, foreach=False, amsgrad=True), {"norm": "batchnorm"}),
        pytest.param(
            muon, {"norm": "batchnorm"}, marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="no Muon")
        ),
    ],
    ids=["fused", "foreach untied", "plain batchnorm", "muon batchnorm"],
)
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_resumed_training_is_bit_identical(tmp_path, optimizers, changes, stop):
    config = dataclasses.replace(CONFIG, **changes)
    uninterrupted = Llama(config, seed=1)
    uninterrupted_optimizers = optimizers(uninterrupted)
    train(uninterrupted, uninterrupted_optimizers, range(stop))
    save_checkpoint(tmp_path, stop, uninterrupted, ByteTokenizer(), uninterrupted_optimizers, {"seconds": 0.1 + 0.2}, 1)
    state_at_stop = {
        name: tensor.clone() for name, tensor in full_state(uninterrupted, uninterrupted_optimizers).items()
    }
    train(uninterrupted, uninterrupted_optimizers, range(stop, 7))

    resumed = Llama(config, seed=2)
    resumed_optimizers = optimizers(resumed)
    train(resumed, resumed_optimizers, range(10, 11))  # loading replaces this state
    trainer = load_training_state(newest_checkpoint(tmp_path), resumed, resumed_optimizers)
    assert trainer["step"] == stop and trainer["seconds"] == 0.1 + 0.2
    for expected in (state_at_stop, None):
        expected = expected or full_state(uninterrupted, uninterrupted_optimizers)
        got = full_state(resumed, resumed_optimizers)
        assert got.keys() == expected.keys()
        assert all(
            torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in expected.items()
        )
        train(resumed, resumed_optimizers, range(stop, 7))


def test_loading_state_keeps_the_learning_rate(tmp_path):
    checkpoint = save(tmp_path)
    model = Llama(CONFIG)
    (optimizer,) = optimizers = adamw(model)
    optimizer.param_groups[0]["lr"] = 0.125
    load_training_state(checkpoint, model, optimizers)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_checkpoint_contents(tmp_path):
    model = Llama(dataclasses.replace(CONFIG, norm="batchnorm"))
    checkpoint = save(tmp_path, 600, model=model, seconds=2.5)
    assert checkpoint == tmp_path / "checkpoints" / "step-000600"
    assert sorted(path.name for path in checkpoint.iterdir()) == FILES
    assert [path.name for path in checkpoint.parent.iterdir()] == ["step-000600"]
    assert len({path.stat().st_mode for path in checkpoint.iterdir()}) == 1  # that of the umask
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["normal_llama"] == {"model": dataclasses.asdict(model.config), "tokenizer": "bytes", "imports": []}
    assert config["model_type"] == "normal-llama" and "no architecture" in config["not_in_transformers"]
    assert json.loads((checkpoint / "trainer.json").read_text()) == {
        "step": 600,
        "optimizers": ["AdamW"],
        "seconds": 2.5,
    }
    weights = load_file(checkpoint / "model.safetensors")
    stored = {hugging_face_name(name, model.config) for name in model.state_dict()}
    assert weights.keys() == stored - {"lm_head.weight"}  # tied weights are stored once
    assert {"model.layers.0.input_layernorm.weight", "layers.0.attention_residual.norm.running_var"} <= weights.keys()
    state = load_file(checkpoint / "optimizer.safetensors")
    names = [name for name, _ in model.named_parameters()]
    assert state.keys() == {f"{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("tied", [True, False])
def test_loaded_model_equals_the_saved_model_in_eval_mode(tmp_path, tied):
    tokenizer = train_tokenizer(["def first(x):\n\treturn x\n" * 20], 300)
    model = Llama(dataclasses.replace(CONFIG, vocab_size=300, tie_embeddings=tied, norm="batchnorm", dropout=0.5))
    optimizers = adamw(model)
    train(model, optimizers, range(3))
    checkpoint = save_checkpoint(tmp_path, 3, model, tokenizer, optimizers, {}, 1)
    loaded, loaded_tokenizer = load_pretrained(checkpoint, "cpu")
    assert not loaded.training and loaded.config == model.config
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == tied
    assert loaded_tokenizer.hash == tokenizer.hash and loaded_tokenizer.kind == "sentencepiece"
    tokens = BATCHES[0, :, :8]
    with torch.no_grad():
        assert torch.equal(loaded(tokens), model.eval()(tokens))
    train(loaded, adamw(loaded), range(1))  # training can continue


def test_old_checkpoints_are_deleted_and_the_same_step_is_replaced(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=3, trained=False)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000002", "step-000003", "step-000010"]
    save(tmp_path, 10, keep=3, trained=False, note="again")
    assert json.loads((newest_checkpoint(tmp_path) / "trainer.json").read_text())["note"] == "again"
    save(tmp_path, 11, keep=1, trained=False)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000011"]
    save(tmp_path, 1_000_000, keep=1, trained=False)  # one more digit
    assert newest_checkpoint(tmp_path).name == "step-1000000"


class FullDiskTokenizer(ByteTokenizer):
    def save(self, directory: Path) -> None:
        raise OSError(28, "No space left on device")


def test_failed_save_keeps_existing_checkpoints(tmp_path):
    earlier = save(tmp_path, 1, keep=1, trained=False)
    model = Llama(CONFIG)
    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, step, model, FullDiskTokenizer(), [], {}, 1)
        assert list(earlier.parent.iterdir()) == [earlier]
    load_pretrained(earlier, "cpu")


def test_full_disk_raises_os_error(tmp_path):
    resource = pytest.importorskip("resource")
    earlier = save(tmp_path, 1, trained=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # bytes; the weights need more space
    try:
        with pytest.raises(OSError, match=r"model\.safetensors cannot be written"):
            save(tmp_path, 2, trained=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(earlier.parent.iterdir()) == [earlier]


@pytest.mark.parametrize(
    "steps, save_every, keep, saved, count",
    [(10, 10, 2, 0, 1), (11, 10, 2, 0, 2), (3, 10, 2, 0, 1), (31, 10, 2, 0, 3), (31, 10, 5, 0, 4), (31, 10, 2, 1, 2)],
)
def test_the_disk_needs_space_for_each_checkpoint_to_come(steps, save_every, keep, saved, count, tmp_path, monkeypatch):
    """At most one more than --keep, while the newest is written; the last step is always saved."""
    for step in range(saved):
        save(tmp_path, 10 * (step + 1), trained=False)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=0))
    training = TrainConfig(steps=steps, save_every=save_every, keep=keep)
    with pytest.raises(OSError, match=rf"{count} of [\d,]+; free some space"):
        check_space(tmp_path, CONFIG, training)


def test_unfinished_checkpoint_is_ignored_and_deleted(tmp_path):
    whole = save(tmp_path, 1, trained=False)
    leftover = whole.with_name(".step-000002-unfinished")
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == whole
    save(tmp_path, 2, keep=2, trained=False)
    assert sorted(path.name for path in whole.parent.iterdir()) == ["step-000001", "step-000002"]


# --- damaged or mismatched checkpoints -------------------------------------------------------------------------------


def one_line_message(excinfo: pytest.ExceptionInfo) -> str:
    message = str(excinfo.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut off", "altered", "gone"])
def test_damaged_file_is_named_in_the_error(tmp_path, name, damage):
    checkpoint = save(tmp_path)
    path, content = checkpoint / name, (checkpoint / name).read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        middle = len(content) // 2
        altered = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes(content[:-1] if damage == "cut off" else altered)
    with pytest.raises(ValueError) as excinfo:
        intact_checkpoint(tmp_path)
    assert str(path) in one_line_message(excinfo)
    if name in ("optimizer.safetensors", "trainer.json"):
        load_pretrained(checkpoint)  # load_pretrained does not read this file
    else:
        with pytest.raises(ValueError, match=name):
            load_pretrained(checkpoint)


@pytest.mark.parametrize("content", [None, "", "[1]", "[[1, 2]]", "{", "{}"])
def test_damaged_manifest_is_named_in_the_error(tmp_path, content):
    checkpoint = save(tmp_path)
    (checkpoint / "manifest.json").unlink()
    if content is not None:
        (checkpoint / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json is missing or damaged"):
        load_pretrained(checkpoint, "cpu")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda weights: weights.pop("model.norm.weight"), "lacks model.norm.weight"),
        (lambda weights: weights.update(extra=torch.ones(1)), "has an unknown extra"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(17)}),
            "has another shape of model.norm.weight",
        ),
    ],
)
def test_mismatched_weights_are_named_in_the_error(tmp_path, change, message):
    checkpoint = save(tmp_path)
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, checkpoint / "model.safetensors")
    update_manifest(checkpoint)
    model = Llama(CONFIG)
    for load in (
        lambda: load_pretrained(checkpoint, "cpu"),
        lambda: load_training_state(checkpoint, model, adamw(model)),
    ):
        with pytest.raises(ValueError, match=rf"model\.safetensors is of another model: it {message}") as excinfo:
            load()
        one_line_message(excinfo)


@pytest.mark.parametrize(
    "config",
    [{}, {"model": {"dim": 15}, "tokenizer": "bytes"}, {"model": {"dims": 16}, "tokenizer": "bytes"}, {"model": 3}],
    ids=str,
)
def test_invalid_config_json_is_named_in_the_error(tmp_path, config):
    checkpoint = save(tmp_path)
    (checkpoint / "config.json").write_text(json.dumps(config))
    update_manifest(checkpoint)
    with pytest.raises(ValueError, match=r"config\.json does not describe a model") as excinfo:
        load_pretrained(checkpoint, "cpu")
    one_line_message(excinfo)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="no Muon")
def test_state_of_another_optimizer_is_refused(tmp_path):
    checkpoint = save(tmp_path)
    model = Llama(CONFIG)
    with pytest.raises(ValueError, match="is of another optimizer: AdamW, not Muon, AdamW"):
        load_training_state(checkpoint, model, muon(model))


# --- from Python -----------------------------------------------------------------------------------------------------


def test_load_model_takes_a_run_or_a_checkpoint_as_text_or_path(tmp_path):
    run = tmp_path / "run"
    save(run, 1)
    checkpoint = save(run, 2, model=Llama(CONFIG, seed=1))
    expected = load_pretrained(checkpoint)[0].state_dict()
    for where in (run, checkpoint):
        for argument in (where, str(where), f"{where}/"):
            state = load_model(argument, "cpu")[0].state_dict()
            assert all(torch.equal(expected[name], tensor) for name, tensor in state.items())
    with pytest.raises(ValueError, match=r"nowhere is not a directory; name a run of train\.py"):
        load_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), train_tokenizer(["some text to learn from\n" * 9], 280)])
def test_saved_model_is_loaded(tmp_path, tokenizer):
    model = Llama(dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size), seed=3)
    save_pretrained(tmp_path / "new/model", model, tokenizer)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]
    loaded, loaded_tokenizer = load_pretrained(str(tmp_path / "new/model"))
    assert loaded.config == model.config and not loaded.training and loaded_tokenizer.hash == tokenizer.hash
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_a_model_is_not_saved_over_something(tmp_path):
    """Neither over a checkpoint, which its manifest would call damaged, nor into a run, whose checkpoints it hides."""
    model = Llama(dataclasses.replace(CONFIG, vocab_size=257), seed=3)
    checkpoint = save_checkpoint(tmp_path / "run", 1, model, ByteTokenizer(), [], {}, keep=1)
    (tmp_path / "file").touch()
    for path in (checkpoint, tmp_path / "run", tmp_path / "file"):
        with pytest.raises(ValueError, match="is not empty; name a new directory"):
            save_pretrained(path, model, ByteTokenizer())
    load_pretrained(checkpoint)
    (tmp_path / "empty").mkdir()
    save_pretrained(tmp_path / "empty", model, ByteTokenizer())
    load_pretrained(tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "run"]


def test_a_manifest_names_files_of_its_directory_only(tmp_path):
    model = Llama(dataclasses.replace(CONFIG, vocab_size=257), seed=3)
    checkpoint = save_checkpoint(tmp_path, 1, model, ByteTokenizer(), [], {}, keep=1)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"../../secret": "0"}))
    with pytest.raises(ValueError, match=r"manifest\.json is missing or damaged"):
        load_pretrained(checkpoint)


# --- find_checkpoint -------------------------------------------------------------------------------------------------


def test_find_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")
    with pytest.raises(ValueError, match=r"no run in runs/ yet; start one"):
        find_checkpoint(None)
    old, new = (save(runs / name, 1, trained=False) for name in ("b-old", "a-new"))
    for number, run in enumerate((runs / "b-old", runs / "a-new"), 1):
        (run / "run.json").touch()
        os.utime(run / "run.json", (1000 * number, 1000 * number))
    assert find_checkpoint(None) == new
    assert find_checkpoint(str(runs / "b-old")) == find_checkpoint(str(old)) == old
    later = save(runs / "b-old", 2, trained=False)
    assert find_checkpoint(str(runs / "b-old")) == later
    os.utime(runs / "b-old" / "run.json")
    assert find_checkpoint(None) == later
    (runs / "z-empty").mkdir()
    for path in (runs / "z-empty", runs / "nowhere", later / "config.json"):
        with pytest.raises(
            ValueError, match=r"name a run of train\.py, one of its checkpoints, or a Hugging"
        ) as excinfo:
            find_checkpoint(str(path))
        assert one_line_message(excinfo).startswith(str(path))
