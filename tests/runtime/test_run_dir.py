"""The files of a run directory, of which run.json is the description that is read again."""

import itertools
import sys
from contextlib import suppress
from unittest.mock import MagicMock

import pytest

from files import write_atomically
from machine.process import NotFinite
from runtime.run_dir import Log, open_tracker, read_rows, read_run_file, write_run_file

RUN = {"asked": {}, "resolved": {"dim": 16, "lr": 0.01}, "versions": {}, "commit": "0123abc"}


def test_what_a_link_leads_to_is_not_overwritten(tmp_path):
    (tmp_path / "other").write_text("kept")
    for name in ("a.json", "a.json.part"):
        (tmp_path / name).symlink_to("other")
    write_atomically(tmp_path / "a.json", "new")
    assert [(tmp_path / name).read_text() for name in ("other", "a.json")] == ["kept", "new"]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("16", "17", "is damaged or was edited; pass changed options as flags instead"),
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
    write_run_file(path, RUN | {"resolved": {"future": 1}})
    with pytest.raises(ValueError, match="'future' is not an option of this version"):
        read_run_file(path)


DAMAGE = {
    '{"step": 4': "is not a row of JSON with a step",
    "\x00": "is not a row of JSON with a step",
    "5": "is not a row of JSON with a step",
    '{"train_loss": 1.0}': "is not a row of JSON with a step",
    '{"step": 3, "train_loss": 2.0}': "does not follow the line before it",
    '{"step": 2, "train_loss": 1.0}': "does not follow the line before it",
    '{"step": 4, "train_loss": NaN}': "has a value that is not finite",
    '{"step": 4, "train_loss": 1e999}': "has a value that is not finite",
}


@pytest.mark.parametrize("line, problem", DAMAGE.items())
def test_a_damaged_log_names_its_line(line, problem, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3, "train_loss": 1.0}\n' + line)
    assert read_rows(path) == [{"step": 3, "train_loss": 1.0}]  # a line that was not finished
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ValueError, match=rf"metrics\.jsonl is damaged: line 2 {problem}; repair or remove the file"):
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
