"""--import: what a run keeps of a file, who asks for it again, and errors in it."""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import files
from norms import KINDS, TRAITS
from norms.placement import PLACEMENTS
from runtime import plugins
from runtime.checkpoint import find_checkpoint, load_pretrained

TOY = "--data text.txt --tokenizer bytes --dim 16 --layers 2 --heads 2 --context 16 --device cpu --dtype float32 "
TOY += "--eval-tokens 64 --steps 3"
NORM = """
import torch
from norms import register

@register("mynorm")
class MyNorm(torch.nn.Module):
    def __init__(self, dim: int, factor: float = 0.5):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor * (1 + 1e-6 * len(x))  # sums of other shapes differ on CUDA
"""
PLACEMENT = """
from norms.placement import Placement, PreNorm, register_placement, without_final_norm

class Third(PreNorm):
    def __init__(self, site, *, scale: float = 1.0):
        super().__init__(site)
        self.scale = scale / self.norm.factor

    def forward(self, x, f, *args):
        return x + self.scale * f(self.norm(x), *args)

register_placement("third", Placement(Third, without_final_norm))
"""
COMMANDS = [
    "generate.py --checkpoint copy --tokens 2",
    "train.py --eval-only --out run",
    "train.py --config run/run.json --out other --steps 2",
    "train.py --init-from copy --out tuned --steps 2 --data text.txt",
    "train.py --resume --out run --steps 4",
]


def forget() -> None:
    """As in a new process: nothing is imported."""
    for name in {*KINDS, *PLACEMENTS} & {"mynorm", "third"}:
        for table in (KINDS, TRAITS, PLACEMENTS):
            table.pop(name, None)  # type: ignore[attr-defined]
    for module in [name for name in sys.modules if name.startswith("imported_")]:
        del sys.modules[module]
    plugins.IMPORTED.clear()
    files.warned.clear()


def call(command: str) -> None:
    """Run a command in this process, as if it were a new one."""
    forget()
    script, *arguments = command.split()
    import_module(script.removesuffix(".py")).main(arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, two files to import, and a run with both."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 40)
        Path("mynorm.py").write_text(NORM)
        Path("third.py").write_text(PLACEMENT)
        files = "--placement third --placement-arg scale=0.5 --import third.py --import mynorm.py"
        call(f"train.py --norm mynorm --norm-arg factor=0.25 {files} --out run {TOY}")
    return folder


@pytest.fixture(autouse=True)
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder is a copy of that."""
    monkeypatch.chdir(shutil.copytree(finished, tmp_path / "folder"))
    forget()  # what `finished` has imported, if this test is the first
    yield
    forget()


def test_a_run_keeps_name_and_hash_and_is_restored():
    record = json.loads(Path("run/run.json").read_text())["imports"][1]
    digest = hashlib.sha256(NORM.encode()).hexdigest()
    assert record == {"file": "mynorm.py", "sha256": digest, "norms": ["mynorm"], "placements": []}
    call("train.py --resume --out run --steps 4 --import mynorm.py --import third.py")
    model = load_pretrained(find_checkpoint("run"), "cpu")[0]
    assert type(model.layers[0].attention_residual).__name__ == "Third"
    Path("mynorm.py").write_text(NORM + "# changed\n")
    with pytest.raises(ValueError, match=r"^--import mynorm\.py has changed; restart Python to use it$"):
        plugins.import_files(["mynorm.py"])


@pytest.mark.parametrize("command", COMMANDS[:3])
def test_a_run_asks_for_the_file_again(command, capsys, refused):
    """Also for a checkpoint that was copied alone. A file that has changed since is one warning."""
    shutil.copytree("run/checkpoints/step-000003", "copy")
    error = refused(call, f"{command} --import mynorm.py")
    assert error.endswith("this run uses third.py: add --import PATH/third.py\n")
    Path("mynorm.py").write_text(NORM + "# changed\n")
    call(f"{command} --import mynorm.py --import third.py")
    digest = hashlib.sha256(NORM.encode()).hexdigest()
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert warnings == [f"warning: this run was trained with another mynorm.py (SHA-256 {digest[:8]}...)"]


def test_a_file_whose_norm_is_not_used_is_asked_for_again(refused):
    """It may change what is computed, so the checkpoint does not claim the architecture of others either."""
    shutil.rmtree("run")
    call(f"train.py --import mynorm.py --out run {TOY}")
    shutil.copytree("run/checkpoints/step-000003", "copy")
    config = json.loads(Path("copy/config.json").read_text())
    assert config["model_type"] == "normal-llama"
    assert config["not_in_transformers"] == "mynorm.py was imported, and may change what is computed"
    for command in COMMANDS:
        assert refused(call, command).endswith("this run uses mynorm.py: add --import PATH/mynorm.py\n")


def test_a_file_in_addition_is_a_line(capsys):
    """A renamed file is no other."""
    call(f"train.py --out plain {TOY} --import third.py")
    Path("third.py").rename("renamed.py")
    for command in ("generate.py --checkpoint plain --tokens 2", "train.py --resume --out plain --steps 4"):
        call(f"{command} --import renamed.py --import mynorm.py")
        assert re.findall("warning: this run was trained without (.*)", capsys.readouterr().err) == ["mynorm.py"]


@pytest.mark.parametrize(
    "forward, message",
    {
        "return x.mean(1, keepdim=True)": "must return a tensor with the shape and dtype of its input",
        "return x - x.mean(1, keepdim=True)": "lets a token see later tokens",
        "return x - (x.mean(1, keepdim=True) if not self.training else 0)": "lets a token see later tokens",
        "return x * x.square().mean((0, 2), keepdim=True)": "mixes the sequences of a batch; register it with "
        "per_token=False",
        "return x.mul_(self.factor)": "changes its input in place; the stream needs it",
    }.items(),
)
def test_a_norm_that_cannot_be_one_is_refused(forward, message, refused):
    traits = ", causal_in_training=False" if "if not self.training" in forward else ""  # it allows nothing else
    Path("bad.py").write_text(NORM.replace('"mynorm"', f'"mynorm"{traits}').replace("return x * self.factor", forward))
    assert refused(call, f"train.py --norm mynorm {TOY} --import bad.py").endswith(f"--norm mynorm {message}\n")


@pytest.mark.parametrize(
    "tensor",
    [
        "torch.nn.Parameter(torch.ones(dim, dim).T)",  # safetensors refuses it
        "torch.nn.Buffer(torch.ones(dim), persistent=False)",
        "torch.nn.Buffer(torch.ones(dim, dtype=torch.float64))",
        "torch.rand(dim)",
    ],
)
def test_a_norm_that_no_checkpoint_would_bring_back_is_refused_before_training(tensor, refused):
    bad = NORM.replace("= factor", f"= {tensor}").replace("x * self.factor", "x * self.factor.sum()")
    Path("bad.py").write_text(bad)
    error = refused(call, f"train.py --norm mynorm {TOY} --import bad.py")
    assert error.startswith("error: --norm mynorm could not be loaded from a checkpoint: its tensors must be")


def test_a_norm_with_a_network_starts_from_the_seed_and_keeps_its_precision():
    forward = "with torch.autocast('cpu', enabled=False):\n            return x * self.factor(x.float()).to(x.dtype)"
    gated = NORM.replace("= factor", "= torch.nn.Linear(dim, 1)").replace("return x * self.factor", forward)
    Path("gate.py").write_text(gated)
    for out in ("one", "two"):
        torch.seed()  # as in a new process
        call(f"train.py --norm mynorm {TOY} --import gate.py --out {out}")
    one, two = (Path(out, "metrics.jsonl").read_text().splitlines()[-1] for out in ("one", "two"))
    assert json.loads(one)["val_loss"] == json.loads(two)["val_loss"]
    call("generate.py --checkpoint one --dtype bfloat16 --device cpu --tokens 2 --import gate.py")


BAD_FILES = {
    "\n\n1 / 0\n": ", line 3: ZeroDivisionError: division by zero",
    "import sys\nsys.exit(7)\n": ", line 2: SystemExit: 7",
    "raise KeyboardInterrupt\n": ", line 1: KeyboardInterrupt: ",
    NORM.replace("mynorm", "rmsnorm"): ", line 5: ValueError: norm 'rmsnorm' is registered twice; choose another name",
    PLACEMENT.replace('"third"', '"pre"'): ", line 12: ValueError: placement 'pre' is registered twice; choose another",
    None: ": no such file; name a Python file, such as mynorm.py",
}


@pytest.mark.parametrize("source, message", BAD_FILES.items())
def test_an_error_in_the_file_is_one_line(source, message, refused):
    Path("bad.py").write_text(source) if source else None
    error = refused(call, "train.py --import bad.py")
    assert error.startswith(f"error: --import bad.py{message}")
