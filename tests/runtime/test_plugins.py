"""--import: README's walkthrough, what a run keeps of a file, who asks for it again, and errors in it."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ablate
import bench
import generate
import model
import train
from experiments.ablation.run import resolve_ablation
from norms import KINDS, TRAITS
from norms.placement import PLACEMENTS
from runtime import plugins
from runtime.checkpoint import find_checkpoint, load_pretrained

ROOT = Path(__file__).parents[2]
TOY = "--data text.txt --tokenizer bytes --dim 16 --layers 2 --heads 2 --context 16 --device cpu --dtype float32 "
TOY += "--no-fast --eval-tokens 64 --steps 3"
NORM = """
import torch
from norms import register

@register("mynorm")
class MyNorm(torch.nn.Module):
    def __init__(self, dim: int, factor: float = 0.5):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor
"""
PLACEMENT = """
import torch
from norms.placement import Placement, Site, register_placement

class Third(torch.nn.Module):
    def __init__(self, site: Site):
        super().__init__()
        self.norm = site.make_norm(site.name)

    def forward(self, x, f, *args):
        return x + f(self.norm(x), *args) / 3

register_placement("third", Placement(Third))
"""


def forget() -> None:
    """As in a new process: nothing is imported."""
    for plugin in plugins.IMPORTED.values():
        for name in plugin.norms:
            del KINDS[name], TRAITS[name]
        for name in plugin.placements:
            del PLACEMENTS[name]
    plugins.IMPORTED.clear()
    plugins._warn.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a text and a norm."""
    monkeypatch.chdir(tmp_path)
    write_inputs()
    yield tmp_path
    forget()


def call(command: str) -> None:
    """Run a README command in this process, as if it were a new one."""
    forget()
    _, script, *arguments = command.split()
    {"train.py": train.main, "generate.py": generate.main, "ablate.py": ablate.main}[script](arguments)


def error_of(command: str, capsys: pytest.CaptureFixture) -> str:
    """The only line of standard error with which a command ends, with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as excinfo:
        call(command)
    (line,) = capsys.readouterr().err.splitlines()
    assert excinfo.value.code == 2
    return line


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with `NORM`, and the cache with its text."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_inputs()
        call(f"python train.py --norm mynorm --norm-arg factor=0.25 --import mynorm.py --out run {TOY}")
    return folder


@pytest.fixture
def trained(finished: Path) -> None:
    """That run in the current folder."""
    shutil.copytree(finished, ".", dirs_exist_ok=True)


def write_inputs() -> None:
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 40)
    Path("mynorm.py").write_text(NORM)


# --- a file that works -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_readme_walkthrough(capsys):
    """README's file and its commands, at toy size."""
    section = (ROOT / "README.md").read_text("utf-8").split("### A norm of your own")[1].split("\n## ")[0]
    code, commands = re.findall(r"```(?:python|sh)\n(.*?)```", section, re.DOTALL)
    Path("mynorm.py").write_text(code)
    train_command, generate_command, ablate_command = (line.replace('"def "', "def") for line in commands.splitlines())
    call(f"{train_command} {TOY}")
    call(f"{generate_command} --tokens 4")
    assert capsys.readouterr().out.splitlines()[-1].startswith("def")
    call(f"{ablate_command} {TOY} --seeds 1 --jobs 2 --out comparison")
    table = Path("comparison/table.md").read_text()
    assert "| rmsnorm |" in table and "| mynorm |" in table
    assert load_pretrained(find_checkpoint("runs/mynorm"), "cpu")[0].config.norm == "mynorm"


def test_the_order_of_flags_does_not_matter_and_help_lists_what_is_imported(capsys):
    Path("third.py").write_text(PLACEMENT)
    with pytest.raises(SystemExit):
        call("python train.py --help --import mynorm.py --import third.py")
    text = capsys.readouterr().out
    assert "mynorm}" in text and "third}" in text
    call(f"python train.py --placement third --norm mynorm --import third.py --import mynorm.py --out run {TOY}")
    assert type(load_pretrained(find_checkpoint("run"), "cpu")[0].layers[0].attention_residual).__name__ == "Third"


def test_a_run_keeps_name_hash_and_a_copy_that_is_never_executed(trained):
    (record,) = json.loads(Path("run/run.json").read_text())["imports"]
    assert record == {
        "file": "mynorm.py",
        "sha256": hashlib.sha256(NORM.encode()).hexdigest(),
        "norms": ["mynorm"],
        "placements": [],
    }
    copy = Path(f"run/imports/mynorm-{record['sha256'][:8]}.py")
    assert copy.read_text() == NORM
    copy.write_text("raise SystemExit('executed')")
    call("python generate.py --checkpoint run --tokens 2 --import mynorm.py")
    copy.unlink()
    copy.symlink_to("elsewhere.py")
    call("python train.py --resume --out run --steps 4 --import mynorm.py")
    assert copy.read_text() == NORM and not Path("elsewhere.py").exists()


@pytest.mark.parametrize(
    "command",
    [
        "generate.py --checkpoint moved --tokens 2",
        "generate.py --checkpoint copy --tokens 2",
        "train.py --resume --out moved --steps 4",
        "train.py --eval-only --out moved",
        "train.py --config moved/run.json --out other --steps 2",
        "train.py --plan --config moved/run.json --dtype bfloat16 --device cuda",
        "ablate.py --config moved/run.json --out other",
    ],
)
def test_a_run_asks_for_the_file_again(command, capsys, trained):
    """Also if its folder was moved, and for a checkpoint that was copied alone."""
    shutil.move("run", "moved")
    shutil.copytree("moved/checkpoints/step-000003", "copy")
    assert error_of(f"python {command}", capsys).endswith("this run uses mynorm.py: add --import PATH/mynorm.py")
    if "--plan" not in command and not command.startswith("ablate.py"):
        call(f"python {command} --import mynorm.py")
        assert "warning" not in capsys.readouterr().err


def test_a_file_that_has_changed_is_one_warning(capsys, trained):
    first = json.loads(Path("run/run.json").read_text())["imports"]
    Path("mynorm.py").write_text(NORM + "# changed\n")
    for command in ("generate.py --checkpoint run --tokens 2", "train.py --eval-only --out run"):
        capsys.readouterr()
        call(f"python {command} --import mynorm.py")
        warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
        assert warnings == [
            f"warning: this run was trained with another mynorm.py (SHA-256 {first[0]['sha256'][:8]}...)"
        ]
    call("python train.py --resume --out run --steps 4 --import mynorm.py")
    records = json.loads(Path("run/run.json").read_text())["imports"]
    assert records[:1] == first and len(records) == len(list(Path("run/imports").iterdir())) == 2
    capsys.readouterr()
    call("python train.py --eval-only --out run --import mynorm.py")  # which the last steps were trained with
    assert "warning" not in capsys.readouterr().err


def test_a_norm_that_is_known_without_the_file_is_not_asked_for(capsys, trained):
    """As after the file was added to norms/."""
    forget()
    exec(NORM, {"__name__": "norms.mynorm"})
    try:
        load_pretrained(find_checkpoint("run"), "cpu")
    finally:
        del KINDS["mynorm"], TRAITS["mynorm"]
    assert "another mynorm.py" in capsys.readouterr().err


def test_a_run_that_does_not_use_the_file_does_not_ask_for_it():
    call(f"python train.py --import mynorm.py --out run {TOY}")
    call("python generate.py --checkpoint run --tokens 2")


def test_damaged_records_are_refused(capsys, trained):
    run = json.loads(Path("run/run.json").read_text())
    del run["sha256"]
    for damaged in (3, [3], [{"file": "mynorm.py"}], [{**run["imports"][0], "norms": "mynorm"}]):
        Path("run/run.json").write_text(json.dumps(run | {"imports": damaged}))
        assert error_of("python train.py --resume --out run --import mynorm.py", capsys).endswith(
            "run/run.json: 'imports' is damaged"
        )


def test_each_run_of_an_ablation_imports_it_when_it_starts_and_when_it_resumes():
    flags = f"--norms rmsnorm mynorm --seeds 1 --out comparison --import mynorm.py {TOY}"
    ablation = resolve_ablation(*ablate.parse(flags.split()))
    for cell in ablation.reported:
        start = ablation.grid.command(cell)
        (ablation.grid.cell_folder(cell) / "run.json").parent.mkdir()
        (ablation.grid.cell_folder(cell) / "run.json").touch()
        for command in (start, ablation.grid.command(cell)):
            assert Path("mynorm.py").resolve() in plugins.IMPORTED
            forget()
            train.parse(command[2:])
            assert "mynorm" in KINDS


@pytest.mark.slow
def test_an_ablation_never_mixes_two_versions(capsys):
    ablation = f"python ablate.py --norms rmsnorm mynorm --seeds 1 --jobs 2 --out comparison --import mynorm.py {TOY}"
    call(ablation)
    Path("mynorm.py").write_text(NORM + "# changed\n")
    assert "this run was trained with another mynorm.py" in error_of(ablation, capsys)


def test_bench_measures_it(capsys):
    flags = "--rows 8 --dim 16 --rounds 1 --device cpu --out report.json"
    bench.main(["norms", "--import", "mynorm.py", *flags.split()])
    assert "mynorm" in capsys.readouterr().out


# --- a file with errors ----------------------------------------------------------------------------------------------

BAD_FILES = {
    "def f(:\n": ", line 1: SyntaxError: ",
    "\n\n1 / 0\n": ", line 3: ZeroDivisionError: division by zero",
    "def f():\n    raise KeyError('a\\nb')\n\nf()\n": r", line 2: KeyError: 'a\nb'",
    "raise RuntimeError('two\\nlines')\n": ", line 1: RuntimeError: two lines",
    "\nimport nothing_of_this_name\n": ", line 2: ModuleNotFoundError: No module named 'nothing_of_this_name'",
    "import sys\nsys.exit(7)\n": ", line 2: SystemExit: 7",
    "x = 1\n": ": registers no norm and no placement; see CONTRIBUTING.md",
    NORM.replace("mynorm", "rmsnorm"): ", line 5: norm 'rmsnorm' is registered twice; choose another name",
    NORM.replace("mynorm", "my/norm"): ": the name 'my/norm' must consist of letters, digits, - and _",
    NORM.replace(": float = 0.5", ""): ", line 5: norm 'mynorm': its argument 'factor' needs a default",
    NORM.replace("(torch.nn.Module)", ""): ", line 5: norm 'mynorm': MyNorm is not a torch.nn.Module",
    NORM.replace('"mynorm"', '"mynorm", fast=True'): ", line 5: TypeError: ",
    PLACEMENT.replace('"third"', '"pre"'): ", line 13: placement 'pre' is registered twice; choose another name",
    PLACEMENT.replace("Placement(Third)", "Third"): ", line 13: placement 'third' is a type, not a Placement",
    NORM + "from norms import KINDS\nKINDS['rmsnorm'] = MyNorm\n": ": replaces 'rmsnorm', which exists already",
}


@pytest.mark.parametrize("source, message", BAD_FILES.items())
def test_an_error_in_the_file_is_one_line_and_leaves_nothing_registered(source, message, capsys):
    before = [dict(table) for table in plugins.TABLES]
    Path("mynorm.py").write_text(source)
    line = error_of("python train.py --import mynorm.py", capsys)
    assert line.startswith("train.py: error: --import mynorm.py" + message)
    assert [dict(table) for table in plugins.TABLES] == before


def test_what_is_not_a_file_is_refused(capsys):
    Path("other").mkdir()
    Path("other/mynorm.py").write_text(NORM.replace('"mynorm"', '"other"'))
    for flags, message in {
        "--import nowhere.py": "--import nowhere.py: no such file; name a Python file, such as mynorm.py",
        "--import other": "--import other: no such file",
        "--import mynorm.py --import other/mynorm.py": "--import other/mynorm.py: another file of this name",
        "--import": "argument --import: expected one argument",
    }.items():
        for command in ("train.py", "generate.py", "ablate.py"):
            assert error_of(f"python {command} {flags}", capsys).startswith(f"{command}: error: {message}")


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("x * self.factor", "x * torch.ones(3)", "line 12: RuntimeError: The size of tensor"),
        ("x * self.factor", "torch.nn.functional.layer_norm(x, (3,))", "line 12: RuntimeError: Given normalized_shape"),
        ("self.factor = factor", "self.factor = undefined", "line 9: NameError: name 'undefined' is not defined"),
    ],
)
def test_an_error_while_the_norm_computes_names_its_line(old, new, message, capsys):
    Path("mynorm.py").write_text(NORM.replace(old, new))
    with pytest.raises(SystemExit) as excinfo:
        call(f"python train.py --import mynorm.py --norm mynorm --out run {TOY}")
    assert excinfo.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {Path('mynorm.py').resolve()}, {message}")


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    """A placement calls the sublayer, so its line is in the traceback of every error there."""
    Path("third.py").write_text(PLACEMENT)
    monkeypatch.setattr(model.SwiGLU, "forward", lambda module, x: x @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size mismatch"):
        call(f"python train.py --import third.py --placement third --out run {TOY}")


# --- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_of_torchrun_import_it():
    def launch(flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return subprocess.run(
            [*command, ROOT / "train.py", *TOY.split(), *flags.split()], capture_output=True, text=True, timeout=300
        )

    assert launch("--import mynorm.py --norm mynorm --out run").returncode == 0
    call("python generate.py --checkpoint run --tokens 2 --import mynorm.py")
    Path("mynorm.py").write_text("1 / 0\n")
    refused = launch("--import mynorm.py --norm mynorm --out other").stderr
    assert refused.count("train.py: error: --import mynorm.py, line 1: ZeroDivisionError: division by zero") == 1


@pytest.mark.slow
def test_the_contract_runs_on_a_file_outside(tmp_path):
    """The norm and the oracle of CONTRIBUTING."""
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Add a norm")[1].split("\n## ")[0]
    norm, oracle = (
        re.sub(r"^   ", "", code, flags=re.MULTILINE) for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    )
    Path("mynorm.py").write_text(norm)
    Path("test_mynorm.py").write_text(oracle)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "tests/norms/test_contract.py"]
    command += ["--import", str(tmp_path / "mynorm.py"), "-k", "mynorm and not compiled"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout
    assert len(re.findall("^PASSED .*mynorm", result.stdout, re.MULTILINE)) > 100
