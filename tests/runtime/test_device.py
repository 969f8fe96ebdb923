import os

import pytest
import torch

from runtime import device
from runtime.device import (
    CARDS,
    compile_by_default,
    describe,
    deterministic,
    pick_device,
    pick_dtype,
    product_times,
    to_device,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("milliseconds", "chosen"), [(0.3, "bfloat16"), (0.19, "float32"), (0.05, "float32")])
def test_auto_takes_bfloat16_on_a_cpu_only_where_it_is_much_faster(milliseconds, chosen, monkeypatch):
    monkeypatch.setattr(device, "product_times", lambda: [milliseconds / 1e3, 0.2 / 1.5 / 1e3])
    assert pick_dtype("auto", CPU) is getattr(torch, chosen)
    assert pick_dtype("bfloat16", CPU) is torch.bfloat16 and pick_dtype("float32", CPU) is torch.float32


def test_products_are_timed_once_and_leave_the_threads_alone():
    torch.set_num_threads(2)
    seconds = product_times()
    assert torch.get_num_threads() == 2 and product_times() is seconds
    torch.set_num_threads(1)
    assert all(1e-6 < value < 10 for value in seconds)


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_auto_takes_bfloat16_on_a_card_from_ampere_on(capability, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert pick_dtype("auto", CUDA) is (torch.bfloat16 if has else torch.float32)


def test_a_device_is_described_with_its_threads():
    assert describe(CPU).endswith(f"(cpu, {torch.get_num_threads()} threads)") and torch.get_num_threads() == 1


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_limits_of_cards_are_in_the_same_units(card):
    """So many FLOPs for each byte of its memory's bandwidth have the cards of these years."""
    assert 70 < card.flops / card.bandwidth < 500 and 20e9 < card.memory < 200e9


def test_long_runs_are_compiled_by_default_where_there_is_a_compiler(monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: tmp_path)
    for found in (True, False):
        monkeypatch.setattr(device, "find_spec", lambda name, found=found: found or None)
        monkeypatch.setattr("shutil.which", lambda name, found=found: found or None)
        assert compile_by_default(CUDA, 500, 1e9) == found and not compile_by_default(CUDA, 499, 1e9)
        assert compile_by_default(CPU, 10_000, 1e10) == found and not compile_by_default(CPU, 500, 1e10)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:01", "cpu:0", "CPU", "cuda:1\n"])
def test_a_name_that_is_no_device_is_refused(name):
    with pytest.raises(ValueError, match="choose auto, cpu, cuda, mps, or one of several GPUs, such as cuda:1"):
        pick_device(name)


def test_one_of_several_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == pick_device("cuda") == CUDA and pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="--device cuda:2: the last of this machine's GPUs is cuda:1"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="finds no such device; try --device cpu"):
        pick_device("cuda:0")


def test_deterministic_kernels_are_a_setting_of_the_block(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # what the user has set stays
    with deterministic(True), pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    assert not torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_copy_to_the_cpu_is_not_pinned():
    ids = torch.arange(3)
    assert to_device(ids, CPU) is ids
