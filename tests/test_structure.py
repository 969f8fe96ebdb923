"""The rules of the layout: imports run one way, the reference is plain, and only the seam knows fast/."""

import ast
import re
import sys
import tokenize
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from machine.process import PACKAGES
from norms.placement import PLACEMENTS
from recipes import RECIPES

ROOT = Path(__file__).parents[1]
GROUND = ["files", "norms", "data", "machine"]
ORDER = [*GROUND, "recipes", "config", "roles", "model", "optim", "sampling", "fast"]
ORDER += ["runtime", "pages", "train", "generate", "experiments", "ablate", "bench"]
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0] in (*ORDER, "tests") or path.parent == ROOT
)
OURS = [path for path in SOURCES if not path.startswith("tests/")]
KINDS = [path for path in SOURCES if path.startswith("norms/") and path.count("/") == 1]
KINDS = [path for path in KINDS if path.split("/")[1] not in ("__init__.py", "registry.py", "numerics.py")]


def imports(source: str) -> Iterator[str]:
    """The modules that a source file imports, anywhere in it."""
    for node in ast.walk(ast.parse((ROOT / source).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source} has a relative import"
            yield str(node.module)


def test_the_model_a_kind_and_the_smallest_import_little_besides_torch():
    known = {*sys.stdlib_module_names, "torch"}
    ours = {
        source: {name for name in imports(source) if name.partition(".")[0] not in known}
        for source in ["model.py", "examples/minimal.py", *KINDS]
    }
    assert {name.partition(".")[0] for name in ours.pop("model.py")} == {"config", "files", "norms", "roles"}
    assert not ours.pop("examples/minimal.py")
    assert all({"norms.registry"} <= names <= {"norms.registry", "norms.numerics"} for names in ours.values()), ours


@pytest.mark.parametrize("names, seams", [(["fast"], {"runtime/acceleration.py"}), (ORDER[-3:], set())], ids=str)
def test_only_the_seam_and_the_tests_in_its_folder_import_an_attachment(names, seams):
    own = (*(f"{name}/" for name in names), *(f"{name}.py" for name in names), f"tests/{names[0]}/")
    others = [path for path in SOURCES if not path.startswith(own)]
    assert {
        path for path in others for name in imports(path) if name.removeprefix("tests.").split(".")[0] in names
    } == seams


def test_imports_run_one_way_the_parser_stays_in_its_file_and_no_class_is_assigned():
    """Each package may import those before it, and one of the ground floor only `files`.

    What was asked is a mapping, and decoders are objects of their own.
    """
    for source in OURS:
        owner, text = source.removesuffix(".py").split("/")[0], (ROOT / source).read_text("utf-8")
        allowed = {owner, "files"} if owner in GROUND[1:] else set(ORDER[: ORDER.index(owner) + 1])
        names = {name.partition(".")[0] for name in imports(source)}
        assert names & set(ORDER) <= allowed, f"{source} imports {names & set(ORDER) - allowed}"
        parses = "argparse" in names or re.search(r"\.parse_(known_)?args\(", text)
        assert not parses or source in ("runtime/flags.py", "runtime/plugins.py"), source
        assert "__class__" not in text, source


def test_the_reference_stays_short():
    """Long enough to understand everything, short enough to read in one sitting. The smallest is one file alone."""
    most = {"model.py": 420, "examples/minimal.py": 220} | dict.fromkeys(KINDS, 50)
    lines = {source: len((ROOT / source).read_text("utf-8").splitlines()) for source in most}
    assert all(lines[source] <= most[source] for source in most), lines


MOST = {"source": 10_300, "core": 7_387, "tests": 9_892, "tokens a line": 7.8}  # these are only ever lowered
ATTACHMENTS = ("experiments/", "ablate.py", "bench.py", "fast/")  # which can be deleted


def count_tokens(source: str) -> int:
    """Names, operators, numbers and strings. An f-string is one, whatever the version of Python."""
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    start, end = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)
    count = depth = 0
    with (ROOT / source).open(encoding="utf-8") as file:
        for token in tokenize.generate_tokens(file.readline):
            count += depth == 0 and token.type in (*kinds, start)
            depth += (token.type == start) - (token.type == end)
    return count


def test_the_project_stays_small():
    """An addition names what it deletes: a change that needs a larger number here is the wrong change."""
    lines = {source: len((ROOT / source).read_text("utf-8").splitlines()) for source in SOURCES}
    in_c = sum(len(path.read_text("utf-8").splitlines()) for path in ROOT.glob("fast/*.c"))
    tests = sum(count for source, count in lines.items() if source.startswith("tests/"))
    core = sum(lines[source] for source in OURS if not source.startswith(ATTACHMENTS))
    python = sum(lines[source] for source in OURS)
    found: dict[str, float] = {"source": python + in_c, "core": core, "tests": tests}
    found["tokens a line"] = sum(map(count_tokens, OURS)) / python
    assert all(found[what] <= most for what, most in MOST.items()), f"{found}, but at most {MOST}"


def test_nothing_is_imported_that_is_not_required():
    """At the top of a file. requirements.txt has the version and the license of each package."""
    required = set(re.findall(r"^([\w-]+)==[\d.]+ +# \w", (ROOT / "requirements.txt").read_text(), re.M))
    assert required >= set(PACKAGES)
    for source in OURS:
        names = set(re.findall(r"^(?:import|from) (\w+)", (ROOT / source).read_text("utf-8"), re.M))
        assert names - sys.stdlib_module_names - {*ORDER} <= required, source


UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "pty"}
RUNS_CODE = {"eval", "exec", "__import__"}  # model.eval() is a method
RUNS_CODE |= {"torch.load", "torch.hub.load", "yaml.load", "os.system", "os.popen", "subprocess.getoutput"}


def runs_code(source: str) -> Iterator[str]:
    """What could run code from data in a Python source: pickle and its like, eval, exec, a shell."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        yield from {name.partition(".")[0] for name in names} & UNSAFE_MODULES
        if isinstance(node, ast.ImportFrom):
            yield from {f"{node.module}.{alias.name}" for alias in node.names} & RUNS_CODE
        if isinstance(node, ast.Call):
            yield from {ast.unparse(node.func)} & RUNS_CODE
            for keyword in node.keywords:
                if keyword.arg in ("allow_pickle", "shell") and ast.unparse(keyword.value) != "False":
                    yield f"{keyword.arg}={ast.unparse(keyword.value)}"


def test_no_source_runs_code_from_data():
    """Checkpoints and configurations are data. `--import` runs a file that the user names, by importlib."""
    unsafe = ["import pickle", "import yaml", "from marshal import loads", "eval(x)", "exec(x)", "os.system(x)"]
    unsafe += ["torch.load(x)", "from torch import load", "np.load(x, allow_pickle=True)", "run(x, shell=True)"]
    assert all(list(runs_code(line)) for line in unsafe) and not list(runs_code("model.eval()"))
    for source in OURS:
        assert not list(runs_code((ROOT / source).read_text("utf-8"))), source


def test_the_tests_that_show_a_promise_exist():
    """CONTRIBUTING's table names them."""
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(named) > 20
    for path, test in named:
        if (ROOT / "tests" / path).parent.exists():  # else it was removed, with an attachment
            assert f"def {test}(" in (ROOT / "tests" / path).read_text("utf-8"), f"{path}::{test}"


def test_every_recipe_is_in_the_table():
    """Of docs/recipes.md, which has no others, and README counts them."""
    table, _, _ = (ROOT / "docs/recipes.md").read_text("utf-8").partition("## They train")
    rows = re.findall(r"^\| (`.+?) \|", table, re.M)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(RECIPES)
    assert f"`--recipe gemma3` and {len(RECIPES) - 1} more" in (ROOT / "README.md").read_text("utf-8")


def test_every_placement_has_a_section_and_a_small_drawing():
    """And docs/placements.md has no others. Dark mode is in the drawings."""
    page, names = (ROOT / "docs/placements.md").read_text("utf-8"), sorted(PLACEMENTS)
    assert sorted(re.findall(r"^## ([\w-]+)$", page, re.M)) == names
    assert sorted(re.findall(r"^!\[.+\]\(placements/([\w-]+)\.svg\)$", page, re.M)) == names
    assert sorted(path.name for path in (ROOT / "docs/placements").iterdir()) == sorted(f"{name}.svg" for name in names)
    for path in [ROOT / "docs/placements.svg", *(ROOT / "docs/placements").iterdir()]:
        drawing = path.read_text("utf-8")
        title = ElementTree.fromstring(drawing).findtext("{http://www.w3.org/2000/svg}title")
        assert title and "prefers-color-scheme:dark" in drawing and 'role="img"' in drawing, path
        assert len(drawing.encode()) < 5000, path
