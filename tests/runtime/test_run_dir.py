"""The files of a run directory."""

from runtime.run_dir import write_atomically


def test_a_file_is_replaced_and_not_overwritten(tmp_path):
    """Who has opened the file reads all of the old text, and nothing else is left in the folder."""
    path = tmp_path / "run.json"
    path.write_text("the old text")
    with path.open() as reader:
        write_atomically(path, "the new text")
        assert reader.read() == "the old text"
    assert path.read_text() == "the new text" and list(tmp_path.iterdir()) == [path]
