"""`ablate.py compare` on run directories that the project's own writers made. `test_report` tests its sentences."""

import json
import os
import shutil
from pathlib import Path

import pytest

import ablate
import train
from experiments.compare import find_records
from experiments.report import make_report
from files import warned
from norms import KINDS, TRAITS
from runtime.run_dir import read_run_file, write_run_file
from tests.experiments.made import records
from tests.test_earlier import EARLIER

FLAGS = "--dim 16 --layers 1 --heads 2 --context 16 --tokenizer bytes --device cpu --dtype float32 --lr 0.015 --steps 4"


@pytest.fixture(scope="module")
def template(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    train.main(f"{FLAGS} --data {text} --cache-dir {folder / 'cache'} --out {folder / 'run'}".split())
    return folder / "run"


@pytest.fixture
def make(template, tmp_path, monkeypatch):
    """`make("name", 2.5, seed=1, norm="dyt")` writes a run that ended with this val_bpb, or without one has not."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, bpb: float | None = None, **changed) -> str:
        run = read_run_file(template / "run.json")
        run["tokenizer"] |= {name: changed.pop(name) for name in ("lost", "hash") if name in changed}
        run["corpus"]["name"] = changed.pop("text", run["corpus"]["name"])
        run["resumed"] = [{"commit": changed.pop("commit", run["commit"])}, {"commit": None}]  # then without a clone
        run["resolved"] |= changed
        Path(name).mkdir(parents=True)
        write_run_file(Path(name, "run.json"), run)
        training = {"train_loss": 3.0, "tokens_per_second": 128.0, "seconds": bpb, "tokens": 64}
        log = [training | {"step": 4}, {"step": 4, "val_loss": 2.0, "val_bpb": bpb}] if bpb else []
        Path(name, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
        return name

    return write


def compared(*runs: str) -> list[str]:
    """The lines of the report's table.md that are not empty."""
    ablate.main(["compare", *runs, "--out", "out"])
    return [line for line in Path("out/table.md").read_text("utf-8").splitlines() if line]


def test_runs_are_paired_by_seed_and_all_files_are_written(make, capsys):
    """The costs of a norm that is not imported are unknown. One run has not ended, and one tokenizer loses text."""
    runs = [make(f"a{seed}", bpb, seed=seed) for seed, bpb in {0: 2.0, 1001: 2.5, 1002: 9.0}.items()]
    runs += [make(f"b{seed}", bpb, seed=seed, norm="mynorm") for seed, bpb in {0: 2.1, 1001: 2.8}.items()]
    page = compared(*runs, make("c", norm="dyt"))
    assert page[0].startswith("**Partial: 5 of 6 runs ended.** Compared with rmsnorm, at learning rate 0.015, ")
    assert "mynorm (+0.200 ± 1.271, p = 0.59) is undecided" in page[0]
    assert page[1] == "n = 2; 8,256 to 8,307 parameters, 512 tokens of text, float32; at unequal or unknown costs."
    assert page[0] + "\n" in capsys.readouterr().out
    assert {path.name for path in Path("out").iterdir()} >= {"runs.csv", "arms.csv", "report.json", "report.html"}
    assert "tokenizer=bytes@ab lossy (25%) (val_bpb 2.5000" in compared("a0", make("d", 2.5, hash="ab", lost=0.25))[0]
    page = compared("a0", make("e", 2.5, norm="dyt", text="other", commit="zzz"))
    assert "dyt +0.500" in page[0] and " of text, float" in page[1] and page[1].endswith(", resumed at zzz.")
    for name, value in {"batch_size": 4, "context": 8, "eval_tokens": 99}.items():
        assert compared("a0", make(name, 2.5, **{name: value}))[0].startswith("Not compared, as no other arm has ")


def test_all_of_a_folder_with_an_earlier_report_and_an_imported_norm(make, monkeypatch):
    """Files beside the runs are ignored, and a run that the report has counts once, whichever is named first."""
    Path("mine.py").write_text("import torch\nfrom norms import register\nregister('mine')(torch.nn.RMSNorm)\n")
    runs = [make("runs/a", 2.0), make("runs/b", 2.5, norm="mine"), "mine.py"]
    ablate.main(["compare", *runs, "--out", "runs/earlier"])
    alone = compared(*runs)
    assert compared("runs/earlier", *runs) == compared(*runs, "runs/earlier") == alone
    assert all(run.log for run in find_records([*map(Path, ["runs/earlier", *runs, "runs/earlier"])])), "for curves"
    monkeypatch.setattr("runtime.plugins.IMPORTED", {})
    for table in (KINDS, TRAITS):
        monkeypatch.setitem(table, "mine", None)
        del table["mine"]
    assert "; 8,256 parameters, 512 tokens of text, float32; equal" in compared(*runs, "--import", "mine.py")[1]
    shutil.rmtree("runs/a")
    assert "mine +0.500, dyt +7.000" in compared("runs/earlier", make("runs/a", 9.0, norm="dyt"))[0]


def test_cells_that_runs_csv_has_count_as_they_are_now(make, refused):
    """Relative times of two folders do not compare."""
    make("abl/cells/rmsnorm-lr0.01-seed0", 2.25)
    make("abl/cells/orphan", 9.0)
    make_report(Path("abl"), records({"rmsnorm": [None, 2.25], "dyt": [2.0, 2.5]}, step_time=1.5))
    warned.clear()
    assert "| rmsnorm | – | – | – | – | 2.2500 ± 0.0000 (2) | 0.01 | 0 of 2 | 1.00 | 1.00 |" in compared("abl")
    assert warned == ["runs in abl/cells left out, because runs.csv does not have them: 1"]
    assert any(line.endswith("| 1.00 | – |") for line in compared("abl", make("b", 2.5, norm="derf")))
    ablate.main(["compare", "abl", "--out", "earlier"])
    assert "--out earlier holds runs" in refused(ablate.main, ["compare", "./earlier", "--out", "earlier"])
    assert compared("abl", "earlier") == compared("abl", "abl/cells/rmsnorm-lr0.01-seed0") == compared("abl")


def test_runs_of_one_name_are_told_apart_although_they_diverged_at_once(make):
    for bpb, norm, lr in ((2.0, "dyt", 0.1), (2.5, "derf", 0.1), (2.2, "derf", 0.2)):
        runs = [make(f"d{bpb}/{seed}", bpb + seed, seed=seed, norm=norm, lr=lr) for seed in range(3)]
        Path(runs[0], "metrics.jsonl").write_text('{"step": 3, "not_finite": true}\n')
    page = compared(*map(str, Path().glob("d*/*")))
    assert page[0].count("undecided, as 1 of its 3 runs d") == 2 and sum("| 1 of 3 |" in line for line in page) == 3
    assert page[0].endswith("; 1 of derf lr=0.2's 3 runs diverged.")


def test_what_is_no_run_or_damaged_is_refused_in_a_line_and_nothing_is_written(make, refused):
    Path(shutil.copytree(make("a", 2.0), "log"), "metrics.jsonl").write_text("garbage\n")
    Path(shutil.copytree("a", "run"), "run.json").write_text("{}")
    Path("csv").mkdir()
    os.mkfifo("csv/runs.csv")  # it would be waited for
    wrong = {"log": "log/metrics.jsonl is d", "run": "run/run.json"}
    wrong |= {name: f"{name} has no run.json and no runs.csv" for name in ("x", "csv")}
    for name, error in wrong.items():
        assert error in refused(ablate.main, ["compare", "a", name, "--out", "out"])
    assert "at least two runs, not 1; name fo" in refused(ablate.main, ["compare", "a", "a/run.json", "--out", "out"])
    lines = Path(shutil.copytree("a", "ids"), "metrics.jsonl").read_text().replace("2.0}", "null}")
    Path("ids/metrics.jsonl").write_text(lines)
    assert "ids has no val_bpb; train with --tokenizer DIR" in refused(ablate.main, ["compare", "a", "ids"])
    assert "b has options and seed of another run; name one" in refused(ablate.main, ["compare", "a", make("b", 2.1)])
    assert "--out a holds runs" in refused(ablate.main, ["compare", "a", make("c", 2.0, norm="dyt"), "--out", "a"])
    assert not Path("out").exists()


def test_a_run_of_an_earlier_version_is_refused_also_as_a_cell(tmp_path, refused, text):
    shutil.copytree(EARLIER, tmp_path / "ablation/cells/rmsnorm-pre-lr0.05-seed0")
    sizes = "--dim 8 --layers 1 --heads 2 --hidden-dim 16 --context 16 --vocab-size 300 --steps 6 --lr 0.05 --seeds 1"
    shared = f"{sizes} --batch-size 4 --device cpu --dtype float32 --eval-every 3 --eval-tokens 1024 --norms rmsnorm"
    ablation = f"{shared} --data {text} --cache-dir {tmp_path}/cache --out {tmp_path}/ablation"
    for flags in (ablation, f"compare {EARLIER} {EARLIER}"):
        said = refused(ablate.main, flags.split())
        assert "is of another version (format 1, not 3); commit b246c92b927e can read it" in said
