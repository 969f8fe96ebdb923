"""`ablate.py compare` on run directories that the project's own writers made."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import scipy.stats

import ablate
import train
from norms import KINDS, TRAITS
from runtime.run_dir import read_run_file, write_run_file

FLAGS = "--dim 16 --layers 1 --heads 2 --context 16 --tokenizer bytes --device cpu --dtype float32 --steps 4"


@pytest.fixture(scope="module")
def template(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    train.main(f"{FLAGS} --data {text} --cache-dir {folder / 'cache'} --out {folder / 'run'}".split())
    return folder / "run"


@pytest.fixture
def make(template, tmp_path, monkeypatch):
    """`make("name", 2.5, seed=1, norm="dyt")` writes a run that ended with this val_bpb, or without one has not."""
    monkeypatch.chdir(tmp_path)

    def write(
        name: str, bpb: float | None = None, corpus: str = "", tokenizer: str = "", last: dict | None = None, **changed
    ) -> str:
        folder = Path(name)
        folder.mkdir(parents=True)
        run = read_run_file(template / "run.json")
        run["resolved"] |= {name: value for name, value in changed.items() if name in run["resolved"]}
        run["corpus"]["hash"] = corpus or run["corpus"]["hash"]
        run["tokenizer"]["hash"] = tokenizer or run["tokenizer"]["hash"]
        run |= {name: value for name, value in changed.items() if name in ("imports", "weights_from")}
        write_run_file(folder / "run.json", run)
        training = {"train_loss": 3.0, "tokens_per_second": 128.0}
        early, late = ({"step": step, "tokens": 64 * step, "seconds": 0.5 * step} | training for step in (2, 4))
        log = [early, {"step": 2, "val_loss": 4.0, "val_bpb": 3.25}]
        log += [late, {"step": 4, "val_loss": 2.0, "val_bpb": bpb}] if bpb else [last] if last else []
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
        return name

    return write


def compared(*runs: str) -> str:
    ablate.main(["compare", *runs, "--out", "out"])
    return Path("out/table.md").read_text("utf-8")


def test_differences_are_paired_by_seed_and_all_files_are_written(make, capsys, monkeypatch, refused):
    """Also for cells that an ablation reports, and for a norm that is not imported. The baseline has a third seed."""
    for seed, bpb in enumerate((2.0, 2.5, 9.0)):
        make(f"abl/cells/{9 - seed}", bpb, seed=seed)
    Path("abl/runs.csv").write_text("run,search\n8,False\n9,\n7,False\n6,True\n")
    Path("abl/report.json").write_text("{}")
    runs = ["abl", *(make(f"b{seed}", bpb, seed=seed, norm="mynorm") for seed, bpb in enumerate((2.1, 2.8)))]
    page = compared(*runs)
    p = scipy.stats.ttest_1samp([0.1, 0.3], 0).pvalue
    assert page.startswith(f"Compared with rmsnorm: mynorm (+0.2000 ± 1.2706, p = {p:.2g}) is undecided. In bits")
    assert "| mynorm | 0.015 | 2.4500 ± 4.4472 (2) | +0.2000 ± 1.2706 (2) |" in page
    assert "| run | seed | norm | step | val_bpb |" in page
    assert "| abl/cells/7 | 2 | rmsnorm | 4 of 4 | 9.0000 |" in page
    assert page.index("abl/cells/8") < page.index("abl/cells/9") < page.index("abl/cells/7")  # as in runs.csv
    assert f"{page.splitlines()[0]}\nsee out/report.html" in capsys.readouterr().out
    html = Path("out/report.html").read_text("utf-8")
    assert html.index("is undecided") < html.index("<img ") < html.index("<table>")
    assert Path("out/curves.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **options: None)  # drawn once is enough
    Path("abl/report.json").unlink()  # as of an ablation that runs, or was killed
    assert "abl has not ended; continue it, or name runs" in refused(ablate.main, ["compare", *runs])


@pytest.mark.usefixtures("undrawn")
def test_all_of_a_folder_and_an_imported_norm(make, refused, monkeypatch):
    """Files beside the runs and an earlier comparison are ignored. The report of an ablation is not replaced."""
    Path("mine.py").write_text("import torch\nfrom norms import register\nregister('mine')(torch.nn.RMSNorm)\n")
    runs = [make("runs/a", 2.0), make("runs/b", 2.5, norm="mine"), "runs/notes.txt", "runs/earlier"]
    Path("runs/notes.txt").touch()
    Path("runs/earlier").mkdir()
    Path("runs/earlier/report.json").touch()
    compared(*runs)
    assert ["parameters" in arm for arm in json.loads(Path("out/report.json").read_text())["arms"]] == [True, False]
    monkeypatch.setattr("runtime.plugins.IMPORTED", {})
    for table in (KINDS, TRAITS):
        monkeypatch.setitem(table, "mine", None)
        del table["mine"]
    assert compared(*runs, "--import", "mine.py").startswith("Compared with rmsnorm: mine (+0.5000)")
    with open("out/arms.csv", newline="") as file:
        sizes = [(int(row["parameters"]), int(row["tokens"])) for row in csv.DictReader(file)]
    assert sizes == [(read_run_file(Path("runs/a/run.json"))["parameters"], 4 * 8 * 16)] * 2
    with open("out/runs.csv", newline="") as file:
        assert [(row["run"], row["val_bpb"]) for row in csv.DictReader(file)] == [("runs/a", "2.0"), ("runs/b", "2.5")]
    assert "out runs/a holds runs" in refused(ablate.main, ["compare", *runs, "--out", "runs/a"])


@pytest.mark.usefixtures("undrawn")
def test_other_text_is_warned_of_and_never_paired(make):
    page = compared(make("a", 2.0), make("b", 2.5, corpus="f" * 64))
    assert page.splitlines()[0].endswith("Not paired with data=text@4db9d0: data=text@ffffff (other data).")
    assert "Compared with" not in page and "+0.5" not in page
    others = {"tokenizer": "f" * 64, "batch_size": 4, "context": 8, "eval_tokens": 99}
    for name, value in others.items():
        page = compared("a", make(name, 2.5, **{name: value}))
        assert f"(other {name.replace('_', ' ')})." in page and "Compared with" not in page


@pytest.mark.usefixtures("undrawn")
def test_what_makes_another_arm(make):
    """Micro-batches only of a norm with statistics over them, an imported file, a new option, other weights."""
    runs = [make("a", 2.0, micro_batch_size=4), make("b", 2.5, norm="batchnorm")]
    assert "| run | seed | norm | step |" in compared(*runs)
    assert "| batchnorm | 4 |" in compared(*runs, make("c", 2.5, norm="batchnorm", micro_batch_size=4))
    imports = [{"file": "p.py", "sha256": digit * 8, "norms": [], "placements": ["pre"]} for digit in "12"]
    assert "| run | seed | imports | step |" in compared("a", make("d", 2.0, imports=imports[:1]))
    assert "| p.py@222222 |" in compared("d", make("p", 2.0, seed=1, imports=imports[1:]))
    path = Path(make("e", 2.0), "run.json")
    run = read_run_file(path)
    del run["resolved"]["min_lr"]  # as before there was one
    write_run_file(path, run)
    assert "| min_lr |" in compared("e", make("f", 2.0, min_lr=0.001))
    weights = [{"directory": "w", "sha256": {"model.safetensors": digit}} for digit in "12"]
    page = compared(*(make(f"w{i}", 2.0, seed=i, init_from="w", weights_from=weights[i]) for i in range(2)))
    assert "| run | seed | init_from |" in page
    many = {"lr": 0.1, "clip": 3.0, "momentum": 0.5, "weight_decay": 0.3}
    page = compared("a", *(make(f"w-seed{seed}", 2.2, seed=seed, **many) for seed in (0, 1)))
    assert page.startswith("Compared with a: w (+0.2000) is undecided")


@pytest.mark.usefixtures("undrawn")
def test_runs_without_a_result_and_a_single_seed(make):
    runs = [make("a", 2.0), make("b", 2.5, lr=0.1), make("c", lr=0.2)]
    page = compared(*runs, make("d", last={"step": 3, "not_finite": True}, lr=0.3))
    assert page.startswith(
        "**Partial: 3 of 4 runs have ended.** Compared with lr=0.015: lr=0.1 (+0.5000) is undecided, as a single seed "
        "cannot tell a difference from chance; lr=0.2 and lr=0.3 are undecided, as runs diverged or have not ended, "
        "here or in the baseline."
    )
    assert "c has not ended: it is at step 2 of 4, its last val_bpb is 3.2500." in page.splitlines()[0]
    assert "d diverged at step 3 of 4" in page.splitlines()[0]
    again = compared("a", str(shutil.copytree("a", "again")))
    assert "rmsnorm pre folder=again (+0.0000) is undecided" in again
    assert "in their seed only. One arm, rmsnorm pre: val_bpb 2.1000 ± 1.2" in compared("a", make("e", 2.2, seed=1))


def test_what_is_no_run_or_damaged_is_refused_in_a_line(make, refused):
    Path("empty").mkdir()
    Path(shutil.copytree(make("a", 2.0), "log"), "metrics.jsonl").write_text("garbage\n")
    Path(shutil.copytree("a", "run"), "run.json").write_text("{}")
    for name, error in {"empty": "no run in empty", "log": "log/metrics.jsonl is d", "run": "run/run.json"}.items():
        assert error in refused(ablate.main, ["compare", "a", name])
    Path("part").mkdir()
    Path("part/report.json").write_text(json.dumps({"summary": "**Partial: 1 of 2 runs have ended.**"}))
    shutil.copytree("a", "part/cells/a")
    assert "part has not ended; continue it, or name runs" in refused(ablate.main, ["compare", "a", "part"])
    assert "at least two runs, not 1" in refused(ablate.main, ["compare", "a", str(Path("a").resolve())])
