"""--import with ablate.py: who asks for a file again, and norms that cannot be one, as for train.py."""

from pathlib import Path

import pytest

from tests.runtime import test_plugins as train_py
from tests.runtime.test_plugins import NORM, TOY, call

finished, folder = train_py.finished, train_py.folder


def test_an_ablation_asks_for_the_file_of_a_run_and_refuses_a_norm_that_cannot_be_one(refused):
    error = refused(call, "ablate.py --config run/run.json --out other --import mynorm.py")
    assert error.endswith("this run uses third.py: add --import PATH/third.py\n")
    Path("bad.py").write_text(NORM.replace("return x * self.factor", "return x.mean(1, keepdim=True)"))
    error = refused(call, f"ablate.py --norms rmsnorm mynorm {TOY} --import bad.py")
    assert error.endswith("--norm mynorm must return a tensor with the shape and dtype of its input\n")


def test_a_file_in_addition_is_no_line_in_an_ablation(capsys):
    """Its next arm may need it."""
    call(f"train.py --out ablation/cells/rmsnorm-lr0.015-seed0 {TOY} --import third.py")
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^$"):  # exit code 0
        flags = f"--norms rmsnorm mynorm --seeds 1 --out ablation --print-commands {TOY}"
        call(f"ablate.py {flags} --import third.py --import mynorm.py")
    said = capsys.readouterr()
    assert said.out.count("; if [ -e ablation/cells/") == 1 and "warning" not in said.err
