"""--init-from: fine-tuning a model of `transformers`, or one of ours. test_parity.py compares their logits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import train
from config import TrainConfig, configs_of
from data.tokenizer import ByteTokenizer
from files import sha256
from model import Llama
from runtime.checkpoint import load_checkpoint, load_pretrained
from runtime.flags import read_train
from runtime.huggingface.weights import WEIGHTS
from runtime.run import open_run

TRAINING = "--steps 20 --batch-size 4 --device cpu --dtype float32 --optimizer adamw --warmup 3 "
TRAINING += "--eval-every 20"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A random tiny model, saved by transformers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=32, rms_norm_eps=1e-5, eos_token_id=[256, 3],
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "theirs")
    ByteTokenizer().save(tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.fixture
def fine_tune(text: Path, tmp_path: Path, directory: Path):
    """Flags of a run that starts from `directory`, with additional flags."""

    def flags(more: str = "", out: str = "run") -> list[str]:
        where = f"--data {text} --cache-dir {text.parent / 'cache'} --out {tmp_path / out}"
        return f"{where} {TRAINING} --init-from {directory} {more}".split()

    return flags


def test_a_run_records_its_origin_and_resumes_without_it(fine_tune, directory, tmp_path, fingerprint, capsys):
    flags = fine_tune("--context 24 --dropout 0.1 --save-every 10 --keep 3")
    train.main(flags)
    run = tmp_path / "run"
    assert "; lr 0.015 (the preset's 0.015, for new models); the run is " in capsys.readouterr().out
    recorded = json.loads((run / "run.json").read_text())
    assert recorded["weights_from"] == {"directory": str(directory), "sha256": {WEIGHTS: sha256(directory / WEIGHTS)}}
    resolved = recorded["resolved"]
    assert resolved["tokenizer"] == recorded["tokenizer"]["kind"] == "pretrained"
    assert [resolved[name] for name in ("context", "dropout", "head_dim", "rope_theta")] == [24, 0.1, 16, 5e4]
    start = Llama(configs_of(resolved)[0])
    optimizers = train.make_optimizers(start, TrainConfig(optimizer="adamw"))
    load_checkpoint(run / "checkpoints/step-000000", start, optimizers)
    theirs = load_pretrained(directory)[0].state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in start.state_dict().items())

    finished = fingerprint(run)
    shutil.rmtree(directory)
    for step in (20, 10):  # only the first checkpoint is left
        shutil.rmtree(run / f"checkpoints/step-{step:06d}")
    train.main(["--resume", "--out", str(run)])
    assert fingerprint(run) == finished
    assert json.loads((run / "run.json").read_text())["weights_from"] == recorded["weights_from"]


def test_master_weights_are_fp32_and_a_longer_context_is_said(fine_tune, directory, capsys):
    theirs = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float16)
    theirs.save_pretrained(directory)
    trainer = train.Trainer(open_run(read_train(fine_tune("--dtype float16 --context 40")), []))
    assert "--context 40 is longer than that of --init-from, which is 32\n" in capsys.readouterr().err
    for name, weight in trainer.model.state_dict().items():
        assert weight.dtype == torch.float32
        assert name != "final_norm.weight" or torch.equal(weight, theirs.model.norm.weight.float())


def test_a_run_of_ours_is_fine_tuned_with_its_tokenizer(fine_tune, tmp_path, fingerprint, monkeypatch):
    """Its files are hashed once."""
    base, flags = tmp_path / "base", fine_tune()
    cut = flags.index("--init-from")
    sizes = "--dim 32 --layers 1 --heads 2 --context 32 --placement post --tokenizer bytes --steps 4"
    train.main([*flags[:cut], *sizes.split(), "--out", str(base)])
    path = base / "checkpoints/step-000004/config.json"  # changed by others, with its manifest
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [256, 10], "pad_token_id": 0}))
    manifest = path.with_name("manifest.json")
    hashes = json.loads(manifest.read_text()) | {path.name: sha256(path)}
    manifest.write_text(json.dumps(hashes))
    hashed = list[Path]()
    monkeypatch.setattr("runtime.checkpoint.sha256", lambda path: hashed.__iadd__([path]) and sha256(path))
    own = ["--steps", "4", "--lr", "1e-9", "--context", "16", "--dropout", "0.1"]
    train.main([*flags[:cut], "--init-from", str(base), *own])
    recorded = json.loads((tmp_path / "run/run.json").read_text())
    assert [recorded["resolved"][name] for name in ("tokenizer", "placement")] == ["bytes", "post"]
    assert recorded["weights_from"] == {"directory": str(path.parent), "sha256": {WEIGHTS: hashes[WEIGHTS]}}
    assert hashed.count(path) == hashed.count(path.with_name(WEIGHTS)) == 1
    described = json.loads((tmp_path / "run/checkpoints/step-000004/config.json").read_text())
    assert (described["eos_token_id"], described["pad_token_id"]) == ([256, 10], 0)
    assert recorded["resolved"]["trained_context"] == 32
    before, after = (load_pretrained(run)[0].state_dict() for run in (base, tmp_path / "run"))
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    # The run is repeated by its run.json, which names where it started.
    repeated = [*flags[:cut], "--config", str(tmp_path / "run/run.json"), "--steps", "4", "--lr", "1e-9"]
    train.main([*repeated, "--out", str(tmp_path / "again")])
    assert fingerprint(tmp_path / "again") == fingerprint(tmp_path / "run")
    again = configs_of(json.loads((tmp_path / "again/run.json").read_text())["resolved"])[0]
    assert again == configs_of(recorded["resolved"])[0] and (again.context, again.dropout) == (16, 0.1)
