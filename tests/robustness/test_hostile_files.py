"""Files from others: models, runs and text made to do harm are refused in one line, or do none."""

import gzip
import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import generate
import train
from config import ModelConfig
from data.tokenizer import ByteTokenizer
from model import Llama
from runtime.checkpoint import find_checkpoint, load_pretrained, save_pretrained
from runtime.process import bad_input
from runtime.run import resolve_settings

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = dict(dim=16, layers=2, heads=2, hidden_dim=24, context=16, vocab_size=257)
KINDS = {
    "llama": ModelConfig(**SIZES, tie_embeddings=False),
    "qwen3": ModelConfig(**SIZES, qk_norm="head"),
    "gemma2": ModelConfig(
        **SIZES, placement="sandwich", norm_args={"zero_centered": True}, embedding_scale=4.0
    ),
    "ours": ModelConfig(**SIZES, placement="post"),
}  # fmt: skip


@pytest.fixture
def theirs(tmp_path: Path) -> Callable[..., Path]:
    """`theirs(kind)`: a new directory with a model as `transformers` leaves it, or for "ours" as we do."""

    def make(kind: str = "llama") -> Path:
        directory = tmp_path / kind
        shutil.rmtree(directory, ignore_errors=True)
        save_pretrained(directory, Llama(KINDS[kind]), ByteTokenizer())
        if kind != "ours":
            change_json(directory / "config.json", normal_llama=None)
        return directory

    return make


def change_json(path: Path, **fields: Any) -> None:
    """Change fields of a file. Its checksum goes, as when someone edits it."""
    content = json.loads(path.read_text()) | fields
    content.pop("sha256", None)
    path.write_text(json.dumps(content))


def change_ours(path: Path, **fields: Any) -> None:
    """Change fields of our model in a config.json."""
    ours = json.loads(path.read_text())["normal_llama"]
    change_json(path, normal_llama=ours | {"model": ours["model"] | fields})


def one_line(code: int, error: str) -> bool:
    return code == 2 and error.startswith("error: ") and error.count("\n") == 1 and len(error) < 2000


# --- sizes -----------------------------------------------------------------------------------------------------------

MOST = 2**31 - 1
HUGE: list[tuple[str, dict[str, Any]]] = [  # what is changed in the config.json of which kind of model
    ("llama", {"num_hidden_layers": 10**6}), ("llama", {"num_hidden_layers": 10**4}),
    ("llama", {"num_hidden_layers": MOST}), ("qwen3", {"num_hidden_layers": 10**6}),
    ("gemma2", {"num_hidden_layers": 10**7}), ("llama", {"max_position_embeddings": 10**8}),
    ("llama", {"max_position_embeddings": MOST}), ("qwen3", {"max_position_embeddings": 1_100_000}),
    ("llama", {"vocab_size": 10**9}), ("llama", {"vocab_size": MOST, "hidden_size": 2}),
    ("llama", {"hidden_size": 2**30}), ("llama", {"intermediate_size": 10**9}),
    ("qwen3", {"head_dim": MOST - 1}), ("qwen3", {"head_dim": 10**8, "max_position_embeddings": 1}),
    ("llama", {"num_attention_heads": 2**30, "num_key_value_heads": 2**30, "head_dim": 2}),
    ("llama", {"hidden_size": 10**400}), ("ours", {"layers": 10**6}), ("ours", {"layers": 9999}),
    ("ours", {"context": 10**8}), ("ours", {"vocab_size": 10**9}), ("ours", {"hidden_dim": 10**9}),
    ("ours", {"head_dim": 10**8, "context": 1}), ("ours", {"placement": "mix", "layers": 9999}),
]  # fmt: skip
MEASURE = """
import json, sys, time
from runtime.checkpoint import load_pretrained
from tests.robustness.memory import megabytes_for
load_pretrained(sys.argv[1])  # what is imported on first use

def refused(directory):
    global error
    try:
        load_pretrained(directory)
    except ValueError as problem:
        error = str(problem)

for directory in sys.argv[2:]:
    started, error = time.perf_counter(), ""
    grown = megabytes_for(lambda: refused(directory))
    print(json.dumps([error, time.perf_counter() - started, grown]))
"""


def test_huge_sizes(tmp_path, theirs, cases, record):
    """Each is refused before the model is built: in a second, and with less than 100 MB."""
    chosen = HUGE if cases(0, 1) else random.Random(0).sample(HUGE, 8)
    directories = [shutil.copytree(theirs(), tmp_path / "whole")]
    for number, (kind, fields) in enumerate(chosen):
        directory = shutil.copytree(theirs(kind), tmp_path / f"huge{number}")
        (change_ours if kind == "ours" else change_json)(directory / "config.json", **fields)
        directories.append(directory)
    command = [sys.executable, "-c", MEASURE, *map(str, directories)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    measured = [json.loads(line) for line in result.stdout.splitlines()]
    for directory, case, (error, seconds, megabytes) in zip(directories[1:], chosen, measured, strict=True):
        assert str(directory) in error and len(error) < 2000, (case, error)
        assert seconds < 1 and megabytes < 100, (case, seconds, megabytes)
    record(
        configurations=len(chosen),
        most_seconds=max(row[1] for row in measured),
        most_mb=max(row[2] for row in measured),
    )


# --- directories -----------------------------------------------------------------------------------------------------


def weights_of(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors")

    return damage


def header(content: bytes, length: int | None = None, data: bytes = b"") -> Callable[[Path], None]:
    """A safetensors file with this header, which may say that it has another length."""

    def write(directory: Path) -> None:
        size = struct.pack("<Q", len(content) if length is None else length)
        (directory / "model.safetensors").write_bytes(size + content + data)

    return write


def content(name: str, text: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_text(text)


def indexed(file: str) -> Callable[[Path], None]:
    """An index that says that all weights are in `file`, a path relative to the directory."""

    def write(directory: Path) -> None:
        names = list(load_file(directory / "model.safetensors"))
        shutil.move(directory / "model.safetensors", directory.parent / "outside.safetensors")
        index = {"weight_map": dict.fromkeys(names, file.format(directory.parent))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


def deep_index(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text('{"weight_map": ' * 50_000)


def listed(name: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / "manifest.json").write_text(json.dumps({name: "0" * 64}))


def fifo_for(name: str) -> Callable[[Path], None]:
    def replace(directory: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return replace


def value_in(name: str, value: float, dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for each in weights:
            weights[each] = weights[each].to(dtype)
        weights[name].view(-1)[3] = value

    return weights_of(change)


EMBEDDING = "model.embed_tokens.weight"
LONG = "x" * 10_000_000
HOSTILE: dict[str, tuple[str, Callable[[Path], Any], str]] = {  # a kind of model, what is done to it, the error
    "a deep configuration": ("llama", content("config.json", "[" * 100_000), "config.json is missing or damaged"),
    "deep fields": ("llama", content("config.json", '{"a":' * 100_000), "config.json is missing or damaged"),
    "a large configuration": ("llama", content("config.json", '{"a": "' + LONG + '"}'), "config.json is missing or"),
    "a long field": ("llama", lambda d: change_json(d / "config.json", **{LONG[:3_000_000]: 1}), "xxx.* is a field"),
    "a long value": ("llama", lambda d: change_json(d / "config.json", model_type=LONG[:3_000_000]), "model_type"),
    "a long architecture": ("llama", lambda d: change_json(d / "config.json", architectures=LONG[:3_000_000]), "arch"),
    "a field with escapes": ("llama", lambda d: change_json(d / "config.json", **{"\x1b[2J\n": 1}), r"\\x1b\[2J\\n"),
    "a configuration in UTF-16": ("llama", lambda d: (d / "config.json").write_bytes(b"\xff\xfe{\0"), "config.json"),
    "a configuration of no fields": ("llama", content("config.json", "{}"), "model_type None is not supported"),
    "NaN as a number": ("llama", lambda d: change_json(d / "config.json", rms_norm_eps=float("nan")), "rms_norm_eps"),
    "a FIFO as configuration": ("llama", fifo_for("config.json"), "holds no checkpoint"),
    "a FIFO as weights": ("llama", fifo_for("model.safetensors"), "holds no model.safetensors"),
    "a FIFO as tokenizer": ("llama", fifo_for("tokenizer.json"), "holds no tokenizer"),
    "an unknown tokenizer": (
        "ours",
        lambda d: change_json(
            d / "config.json",
            normal_llama=json.loads((d / "config.json").read_text())["normal_llama"] | {"tokenizer": "x"},
        ),
        "the tokenizer 'x' is unknown; bytes, sentencepiece, pretrained are known",
    ),
    "an earlier version's with text as width": (
        "ours",
        lambda d: (d / "config.json").write_text('{"model": {"dim": "x"}, "tokenizer": "bytes"}'),
        "dim must be of type int",
    ),
    "an earlier version's without a tokenizer": ("ours", content("config.json", '{"model": {}}'), "damaged"),
    "no safetensors": ("llama", content("model.safetensors", ""), "model.safetensors: not a readable safetensors file"),
    "no tensors": ("llama", header(b"{}"), "the weights are 0 tensors"),
    "a header longer than the file": ("llama", header(b"{}", 1000), "not a readable safetensors file"),
    "a header of 2**63 bytes": ("llama", header(b"{}", 2**63), "not a readable safetensors file"),
    "a header of 20 MB": ("llama", header(b"{" + b" " * 20_000_000 + b"}"), "its header has 200000"),
    "a deep header": ("llama", header(b'{"a":' * 50_000), "not a readable safetensors file"),
    "a header that is a list": ("llama", header(b"[]"), "not a readable safetensors file"),
    "a tensor outside the file": (
        "llama",
        header(json.dumps({EMBEDDING: {"dtype": "F32", "shape": [257, 16], "data_offsets": [0, 16448]}}).encode()),
        "not a readable safetensors file",
    ),
    "a tensor of 2**80 values": (
        "llama",
        header(json.dumps({EMBEDDING: {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 0]}}).encode()),
        "not a readable safetensors file",
    ),
    "a tensor with a long name": ("llama", weights_of(lambda w: w.update({LONG: torch.ones(1)})), "has an unknown xxx"),
    "a tensor with escapes": ("llama", weights_of(lambda w: w.update({"\x1b[2J": torch.ones(1)})), r"unknown \\x1b"),
    "float64": ("llama", value_in(EMBEDDING, 1.0, torch.float64), "another dtype than F32, BF16 or F16"),
    "eight bits": ("llama", value_in(EMBEDDING, 1.0, torch.float8_e4m3fn), "another dtype than F32, BF16 or F16"),
    "booleans": ("llama", value_in(EMBEDDING, 1.0, torch.bool), "another dtype than F32, BF16 or F16"),
    "NaN": ("llama", value_in(EMBEDDING, float("nan")), f"{EMBEDDING} has values that are NaN or infinite"),
    "NaN in a norm": ("llama", value_in("model.norm.weight", float("nan"), torch.bfloat16), "model.norm.weight has"),
    "infinity": ("llama", value_in("lm_head.weight", -float("inf"), torch.float16), "lm_head.weight has values"),
    "an index to a file above": ("llama", indexed("../outside.safetensors"), "which is not a .safetensors file in"),
    "an index to another place": ("llama", indexed("{}/outside.safetensors"), "which is not a .safetensors file in"),
    "a deep index": ("llama", deep_index, "not a readable index"),
    "a manifest of a file above": ("llama", listed("../outside"), "manifest.json is missing or damaged"),
    "a manifest of another place": ("llama", listed("/etc/passwd"), "manifest.json is missing or damaged"),
    "a manifest of the parent": ("llama", listed(".."), "is missing"),
    "a deep manifest": ("llama", content("manifest.json", "[" * 100_000), "manifest.json is missing or damaged"),
    "a deep tokenizer": ("llama", content("tokenizer.json", "[" * 100_000), "tokenizer.json"),
    "a deep tokenizer_config": ("llama", content("tokenizer_config.json", "[" * 100_000), "tokenizer_config.json"),
}


def test_hostile_directories(theirs, ends, cases, record):
    """Each is one line, from `generate.py` and from `train.py --init-from`."""
    for kind, damage, pattern in HOSTILE.values():
        directory = theirs(kind)
        damage(directory)
        commands = [(generate.main, ["--checkpoint", str(directory)]), (check, ["--init-from", str(directory)])]
        for command, flags in commands[: cases(1, 2)]:
            started = time.perf_counter()
            code, error = ends(command, [*flags, "--device", "cpu", "--no-fast"])
            if command is check and code == 0:  # --init-from reads the values of the weights later
                continue
            assert one_line(code, error) and re.search(pattern, error), (pattern, error)
            assert time.perf_counter() - started < 20, pattern
    record(directories=len(HOSTILE))


def check(flags: list[str]) -> None:
    """What train.py does before it makes a model."""
    with bad_input():
        resolve_settings(train.parse(flags))


def test_code_in_a_directory_is_not_run(theirs, tmp_path):
    """`auto_map` names code for transformers."""
    directory, marker = theirs(), tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w')\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (directory / name).write_text(code)
    names = {
        "AutoConfig": "configuration_evil.C",
        "AutoModelForCausalLM": "modeling_evil.M",
        "AutoTokenizer": ["x", None],
    }
    before = load_pretrained(directory)[0]
    for name in ("config.json", "tokenizer_config.json"):
        change_json(directory / name, auto_map=names)
    after = load_pretrained(directory)[0]
    assert after.config == before.config and not marker.exists()
    assert all(torch.equal(weight, after.state_dict()[name]) for name, weight in before.state_dict().items())


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_mutated_tokenizers(tmp_path, cases, record):
    """A process that loads damaged tokenizers, one after another, and encodes with them, goes on to the last."""
    command = [sys.executable, str(Path(__file__).with_name("damaged_tokenizers.py")), str(cases(12, 600))]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=cases(60, 1800))
    assert result.returncode == 0, result.stderr[-2000:]
    record(**json.loads(result.stdout))


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that has ended."""
    folder = tmp_path_factory.mktemp("trained")
    sizes = "--dim 32 --layers 2 --heads 2 --context 32 --batch-size 8 --tokenizer bytes --device cpu --dtype float32"
    places = ["--data", str(text), "--cache-dir", str(folder / "cache"), "--out", str(folder / "run")]
    train.main([*sizes.split(), *places, "--steps", "2", "--eval-tokens", "64", "--no-fast"])
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained`."""
    return shutil.copytree(trained, tmp_path / "run")


def seal(checkpoint: Path) -> None:
    """Give a changed checkpoint a manifest that fits."""
    files = [path for path in checkpoint.iterdir() if path.name != "manifest.json"]
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (checkpoint / "manifest.json").write_text(json.dumps(sums))


ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 10**9, 10**30, 10**400, 0.5, 1e-300, 1e300, float("nan"), float("inf"), "", "x",
    "..", "/", "\0", "\ud800", "x" * 100_000, [], {}, [[]], [None], {"a": 1}, {"hash": 1}, {"factor": "8"}, ["python"],
]  # fmt: skip


def mutated(run: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A run.json in which some fields have odd values, are missing, or are new."""
    changed = json.loads(json.dumps(run))
    changed.pop("sha256", None)  # as its author would
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        inside = draw.choice(
            [changed, *[changed.get(name) for name in ("model", "training", "corpus", "tokenizer")] * 2]
        )
        if not isinstance(inside, dict) or not inside:
            continue
        name = draw.choice(sorted(inside))
        if draw.random() < 0.15:
            del inside[name]
        else:
            inside[draw.choice([name] * 9 + ["new"])] = draw.choice(ODD)
    return changed


def test_values_in_run_json_have_the_right_types(run, ends):
    whole = json.loads((run / "run.json").read_text())
    wrong: list[tuple[str, str, Any]] = [
        ("training", "lr", 10**400), ("training", "lr", "1"), ("training", "steps", 1.5), ("training", "data", [1]),
        ("model", "rope_theta", 10**400), ("model", "rope_scaling", {"factor": "8"}), ("model", "norm_args", []),
        ("model", "dim", True), ("model", "tie_embeddings", 1),
    ]  # fmt: skip
    made_up: list[Any] = [None, [], {"torch": 2}]
    for versions in made_up:
        change_json(run / "run.json", versions=versions)
        code, error = ends(train.main, ["--resume", "--out", str(run), "--steps", "3"])
        assert one_line(code, error) and "run.json is missing or damaged" in error
    change_json(run / "run.json", versions={})
    assert ends(train.main, ["--resume", "--out", str(run), "--steps", "3"])[0] == 0
    for part, name, value in wrong:
        change_json(run / "run.json", **{part: whole[part] | {name: value}})
        code, error = ends(check, ["--config", str(run / "run.json"), "--device", "cpu"])
        assert one_line(code, error) and f"{name} must be of type" in error, (name, value, error)


def test_mutated_run_json(run, tmp_path, ends, cases, record, monkeypatch):
    """It is used, or refused in one line, by --resume, --eval-only and --config. Nothing is written elsewhere."""
    monkeypatch.chdir(tmp_path)
    whole = json.loads((run / "run.json").read_text())
    draw, refused = random.Random(0), 0
    cache, elsewhere = whole["training"]["cache_dir"], tmp_path / "elsewhere"
    for _ in range(cases(60, 3000)):
        changed = mutated(whole, draw)
        if isinstance(changed.get("training"), dict):
            changed["training"] |= {"out": str(elsewhere), "cache_dir": str(draw.choice([cache, elsewhere]))}
        (run / "run.json").write_text(json.dumps(changed))
        wanted = draw.choice(
            [["--resume", "--out", str(run)], ["--eval-only", "--out", str(run)], ["--config", str(run / "run.json")]]
        )
        code, error = ends(check, [*wanted, "--device", "cpu"])
        full = code == 1 and "bytes free" in error  # a model too large for this disk
        assert code == 0 or full or one_line(code, error.splitlines(keepends=True)[-1]), (changed, error)
        refused += code == 2
        assert not elsewhere.exists()
    record(files=cases(60, 3000), refused=refused)


def test_nothing_is_written_where_a_file_says(run, tmp_path, ends, monkeypatch):
    """Neither `out` nor `cache_dir`; a cache is only read."""
    monkeypatch.chdir(tmp_path)
    whole = json.loads((run / "run.json").read_text())
    elsewhere, shorter = str(tmp_path / "elsewhere"), {"steps": 3, "warmup": 0}
    change_json(run / "run.json", training=whole["training"] | shorter | {"out": elsewhere})
    assert ends(train.main, ["--eval-only", "--out", str(run)])[0] == 0
    assert not (tmp_path / ".cache").exists()  # the text was found where it had been prepared
    change_json(run / "run.json", training=whole["training"] | shorter | {"out": elsewhere, "cache_dir": elsewhere})
    assert ends(train.main, ["--resume", "--out", str(run)])[0] == 0
    assert find_checkpoint(run).name == "step-000003" and not Path(elsewhere).exists()
    assert ends(train.main, ["--config", str(run / "run.json")])[0] == 0
    assert (
        list((tmp_path / "runs").iterdir()) and list((tmp_path / ".cache").iterdir()) and not Path(elsewhere).exists()
    )


def test_a_run_json_of_another_model(run, ends, tmp_path):
    """It is compared with the checkpoint before a model is built."""
    whole = json.loads((run / "run.json").read_text())
    for fields in ({"layers": 9999}, {"dim": 64, "hidden_dim": 96}, {"norm": "layernorm"}, {"vocab_size": 10**7}):
        change_json(run / "run.json", model=whole["model"] | fields)
        for wanted in ("--resume", "--eval-only"):
            started = time.perf_counter()
            code, error = ends(train.main, [wanted, "--out", str(run)])
            full = code == 1 and "bytes free" in error  # for the checkpoints of such a model
            assert full or one_line(code, error), error
            assert full or re.search("another model|describes 9999 layers|has vocab_size", error), error
            assert time.perf_counter() - started < 10


TRAINER_JSON: list[Any] = [
    {"step": "x"},
    {"step": None},
    {"seconds": "1"},
    {"seconds": None},
    {"optimizers": [1]},
    {"scaler": 1},
]


def test_a_training_state_that_was_made_up(run, ends):
    """Its manifest fits, so only its content can give it away."""
    checkpoint = find_checkpoint(run)
    trainer = json.loads((checkpoint / "trainer.json").read_text())
    state = load_file(checkpoint / "optimizer.safetensors")
    name = next(iter(state))

    def refused(pattern: str) -> None:
        seal(checkpoint)
        code, error = ends(train.main, ["--resume", "--out", str(run), "--steps", "4"])
        error = error.splitlines(keepends=True)[-1]
        assert one_line(code, error) and re.search(pattern, error), (code, error)

    for fields in TRAINER_JSON:
        (checkpoint / "trainer.json").write_text(json.dumps(trainer | fields))
        refused("trainer.json")
    for text in ("[]", "[" * 100_000, "{}"):
        (checkpoint / "trainer.json").write_text(text)
        refused("trainer.json")
    (checkpoint / "trainer.json").write_text(json.dumps(trainer))
    for changed in (
        {"unknown.step": torch.ones(())},
        {name: torch.ones(3)},
        {name: torch.full_like(state[name], torch.nan)},
    ):
        save_file(state | changed, checkpoint / "optimizer.safetensors")
        refused("optimizer.safetensors")


def test_links_in_a_run(run, ends, tmp_path):
    """What a run would write through a link goes nowhere; a link to a folder of checkpoints is fine."""
    target = tmp_path / "precious"
    for name in (
        ".lock",
        "run.json.part",
        "metrics.jsonl.part",
        "samples.txt",
        "loss.png",
        "report.html",
        "report.html.part",
    ):
        target.write_text("precious")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)
        code, error = ends(train.main, ["--resume", "--out", str(run), "--steps", "3"])
        assert one_line(code, error) and f"{name} is a symbolic link" in error, error
        assert target.read_text() == "precious"
        (run / name).unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/.lock").symlink_to(tmp_path / "new")  # in the folder of a new run
    code, error = ends(train.main, ["--out", str(tmp_path / "empty"), "--steps", "3"])
    assert one_line(code, error) and not (tmp_path / "new").exists()
    os.mkfifo(run / "samples.txt.part")
    code, error = ends(train.main, ["--resume", "--out", str(run), "--steps", "3"])
    assert one_line(code, error) and "samples.txt.part is neither a file nor a directory" in error
    os.remove(run / "samples.txt.part")
    shutil.move(run / "checkpoints", tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    assert ends(train.main, ["--resume", "--out", str(run), "--steps", "3"])[0] == 0
    assert (tmp_path / "disk/step-000003").is_dir()


def test_links_and_pipes_in_a_cache(text, tmp_path, ends):
    """Whatever preparation would write to or wait for."""
    command = [*f"--data {text} --tokenizer bytes --context 16 --cache-dir {tmp_path / 'cache'} --device cpu".split()]
    assert ends(check, command)[0] == 0
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    part, target = folder.with_name(folder.name + ".part"), tmp_path / "precious"
    target.write_text("precious")
    shutil.rmtree(folder)
    folder.with_name(folder.name + ".lock").unlink()
    for make in (lambda path: path.symlink_to(target), lambda path: path.symlink_to(tmp_path / "new"), os.mkfifo):
        for path in (folder.with_name(folder.name + ".lock"), part / "train.bin", part, folder):
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            make(path)
            code, error = ends(check, command)
            assert one_line(code, error) and f"{path} is a link, a pipe or a device" in error
            assert target.read_text() == "precious" and not (tmp_path / "new").exists()
            path.unlink()
            shutil.rmtree(part, ignore_errors=True)
    assert ends(check, command)[0] == 0


def test_what_is_called_like_an_unfinished_checkpoint(run, ends, tmp_path):
    """Files and links do not stop a run from saving, and nothing is deleted through a link."""
    folder, checkpoints = tmp_path / "precious", run / "checkpoints"
    folder.mkdir()
    (folder / "file").write_text("precious")
    (checkpoints / ".step-notes").write_text("of someone")
    (checkpoints / ".step-000003-unfinished").write_text("a file")
    (checkpoints / ".step-000001-unfinished").symlink_to(folder)
    (checkpoints / ".step-000001-retired").symlink_to(tmp_path / "missing")
    (checkpoints / ".step-000009-unfinished").mkdir()
    assert ends(train.main, ["--resume", "--out", str(run), "--steps", "3"])[0] == 0
    assert find_checkpoint(run).name == "step-000003" and (folder / "file").read_text() == "precious"
    assert [path.name for path in checkpoints.glob(".step-*")] == [".step-notes"]


HUGE_FILES = """
import sys
from contextlib import suppress
from pathlib import Path
from runtime.checkpoint import intact_checkpoint
from runtime.run_dir import read_rows, read_samples
from tests.robustness.memory import megabytes_for

def read():
    for work in (intact_checkpoint, read_samples, lambda run: read_rows(run / "metrics.jsonl")):
        try:
            work(Path(sys.argv[1]))
        except ValueError as error:
            print(error)

print(megabytes_for(read))
"""


def test_huge_files_in_a_run(run):
    """Files of 3 GB of zeros that take no space on the disk. They are not read as a whole."""
    for name in ("checkpoints/step-000002/manifest.json", "samples.txt", "metrics.jsonl"):
        os.truncate(run / name, 3 << 30)
    command = [sys.executable, "-c", HUGE_FILES, str(run)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    manifest, rows, megabytes = result.stdout.splitlines()
    assert "manifest.json is missing or damaged" in manifest and "metrics.jsonl is damaged: line 3 is" in rows
    assert float(megabytes) < 250


# --- compressed text -------------------------------------------------------------------------------------------------

READ = """
import sys
from contextlib import suppress
from pathlib import Path
from data.corpus import open_corpus
from tests.robustness.memory import megabytes_for

def read():
    with suppress(ValueError):  # lines of .jsonl have a limit
        open_corpus([sys.argv[1]], Path(sys.argv[2]))

print(megabytes_for(read))
"""


def test_a_bomb(tmp_path, cases, record):
    """Little that decompresses to much: memory does not grow with it, and the command says what it is reading."""
    megabytes, most, said = cases(50, 1000), 0.0, ""
    for name in ("bomb.jsonl.gz", "bomb.txt.gz"):
        with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
            for _ in range(megabytes):
                file.write(bytes(1_000_000))
        command = [sys.executable, "-c", READ, str(tmp_path / name), str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
        assert result.returncode == 0, result.stderr
        most, said = max(most, float(result.stdout)), result.stderr
    assert most < 200  # a line of .jsonl may have 32 MiB, which is held as bytes and as text
    assert re.fullmatch(r"(reading .*bomb.txt.gz: \d+ MB of text so far\n)+", said), said
    record(megabytes=megabytes, memory_mb=most, lines=len(said.splitlines()))
