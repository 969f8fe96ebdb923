"""The files of a run directory, of which run.json is the description that is read again."""

import itertools
import subprocess
import sys
from contextlib import suppress
from unittest.mock import MagicMock

import pytest

import runtime.run
from machine.process import NotFinite
from runtime.run_dir import Log, open_tracker, read_rows, read_run_file, write_run_file

RUN = {"asked": {}, "resolved": {"dim": 16, "lr": 0.01}, "versions": {}, "commit": "0123abc"}


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("16", "17", "is damaged or was edited; pass changed options as flags instead"),
        ('"format"', '"former"', "is damaged or was edited"),
        ('"asked"', "asked", "is missing or damaged"),
        ("{", "[" * 10**6, "is missing or damaged"),
    ],
)
def test_a_run_json_that_is_not_ours(old, new, message, tmp_path):
    path = tmp_path / "run.json"
    write_run_file(path, RUN)
    assert read_run_file(path) == RUN | {"format": 3}
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=f"^{path} {message}"):
        read_run_file(path)
    for name, value, there in (("future", 1, "1"), ("cuda_graph", True, "true")):
        write_run_file(path, RUN | {"resolved": {name: value}})
        with pytest.raises(ValueError, match=rf"'{name}' \({there}\) is not an option of this version"):
            read_run_file(path)


DAMAGE = ["\x00", '{"train_loss": 1.0}', '{"step": 3, "train_loss": 2.0}', '{"step": 2, "train_loss": 1.0}']
DAMAGE += ['{"step": 4, "train_loss": NaN}']


@pytest.mark.parametrize("line", DAMAGE)
def test_a_damaged_log_names_its_line(line, tmp_path):
    """What is no row of JSON with a step, is there twice, goes back, or is not finite."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3, "train_loss": 1.0}\n' + line)
    assert read_rows(path) == [{"step": 3, "train_loss": 1.0}]  # a line that was not finished
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged in line 2; repair or remove the file"):
        read_rows(path)


def test_a_tracker_gets_every_row(tmp_path, monkeypatch):
    """Of stand-ins for the packages, which nothing else here needs."""
    tensorboard, wandb = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = RUN | {"id": "f1"}
    for kind, error in itertools.product(("tensorboard", "wandb", "none"), ((), (NotFinite("loss is not finite"),))):
        with suppress(NotFinite), open_tracker(kind, tmp_path, run, 3) as tracker:
            Log(tmp_path, 0, tracker).add(step=4, train_loss=1.5, grad_norm=None)
            for each in error:
                raise each
    writer, tracked = tensorboard.SummaryWriter.return_value, wandb.init.return_value
    writer.__enter__.return_value.add_scalar.assert_called_with("train_loss", 1.5, 4)
    tracked.log.assert_called_with({"train_loss": 1.5, "grad_norm": None}, step=4)
    assert writer.__exit__.call_count == 2
    assert [call.kwargs for call in tracked.finish.call_args_list] == [{"exit_code": 0}, {"exit_code": 1}]
    options = {"config": run, "id": "f1", "resume": "allow"}  # a resumed run goes on there
    assert wandb.init.call_args.kwargs.items() >= options.items()
    assert tensorboard.SummaryWriter.call_args.kwargs == {"purge_step": 4}  # steps 4 and later are new


def test_a_commit_has_a_hash_of_the_code_that_differs_from_it(tmp_path, monkeypatch):
    """Also of new files in folders, which may be norms, but not of those that --import names."""
    monkeypatch.setattr(runtime.run, "ROOT", tmp_path)
    found = [(tmp_path / "a.py").touch()]
    for command in ("init", "add a.py", "-c user.name=a -c user.email=b commit -m c"):
        subprocess.run(f"git {command}".split(), cwd=tmp_path, check=True)
    new = [("venv/site-packages/x.py", "a"), ("x.py", "a"), ("a.py", "b"), *(("norms/x.py", text) for text in "aba")]
    for name, text in (*new, ("a.py", "")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        found.append(runtime.run.commit())
    assert found[3].startswith(f"{found[2]}-dirty-") and found[4] == found[6] and len({*found[1:]}) == 5
