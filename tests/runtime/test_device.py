import os

import pytest
import torch

from runtime import device
from runtime.device import describe, deterministic, pick_device, pick_dtype, product_times

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


def test_a_device_is_described_with_its_threads():
    assert describe(CPU).endswith(f"(cpu, {torch.get_num_threads()} threads)") and torch.get_num_threads() == 1


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:01", "cpu:0", "CPU", "cuda:1\n"])
def test_a_name_that_is_no_device_is_refused(name):
    with pytest.raises(ValueError, match="choose auto, cpu, cuda, mps, or one of several GPUs, such as cuda:1"):
        pick_device(name)


def test_one_of_several_gpus(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)  # of a build for CUDA, without a driver
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
