"""The files of a run directory."""

import pytest

from files import write_atomically
from runtime.run_dir import Log, check_run_dir


def test_a_file_is_replaced_and_not_overwritten(tmp_path):
    """Who has opened the file reads all of the old text, and nothing else is left in the folder."""
    path = tmp_path / "run.json"
    path.write_text("the old text")
    with path.open() as reader:
        write_atomically(path, "the new text")
        assert reader.read() == "the old text"
    assert path.read_text() == "the new text" and list(tmp_path.iterdir()) == [path]


def test_a_sample_without_the_row_of_its_evaluation_is_written_again(tmp_path):
    """The run was killed between the two, and repeats the evaluation of its last checkpoint."""
    log = Log(tmp_path, 0, lambda row: None)
    for step, text in ((2, "first"), (4, "without a row")):
        log.add(step=step, train_loss=1.0)
        log.add_sample(step, text)
        if step == 2:
            log.add(step=step, val_loss=1.0, val_bpb=1.0)
    Log(tmp_path, 4, lambda row: None).add_sample(4, "again")
    assert (tmp_path / "samples.txt").read_text() == "----- step 2 -----\nfirst\n----- step 4 -----\nagain\n"


def test_a_run_that_was_killed_before_it_existed_can_start_again(tmp_path):
    """What is left is the lock and a part of run.json. Any other file belongs to someone."""
    for name in (".lock", "run.json.part"):
        (tmp_path / name).touch()
    check_run_dir(tmp_path, exists=False)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="is not empty"):
        check_run_dir(tmp_path, exists=False)
