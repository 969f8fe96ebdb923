"""For all tests: one thread, because their tensors are small; and norms from files outside the repository."""

import pytest
import torch

from runtime.plugins import import_files

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "also test the norms that this file registers, with the oracle in test_KIND.py next to it"
    parser.addoption("--import", dest="imports", action="append", default=[], metavar="FILE.py", help=help)


def pytest_configure(config: pytest.Config) -> None:
    try:
        import_files(config.getoption("imports"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are not drawn, which would take longer than a tiny run, unless the test is marked as looking at them."""
    if not request.node.get_closest_marker("pictures"):
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **options: None)
