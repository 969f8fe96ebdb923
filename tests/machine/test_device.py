import re
from pathlib import Path

import pytest
import torch

from machine import device
from machine.device import describe, peak_memory, pick_device, pick_dtype, product_times

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("milliseconds", "chosen"), [(0.3, "bfloat16"), (0.19, "float32"), (0.05, "float32")])
def test_auto_takes_bfloat16_on_a_cpu_only_where_it_is_much_faster(milliseconds, chosen, monkeypatch):
    monkeypatch.setattr(device, "product_times", lambda: [milliseconds / 1e3, 0.2 / 1.5 / 1e3])
    assert pick_dtype("auto", CPU) is getattr(torch, chosen)
    assert pick_dtype("bfloat16", CPU) is torch.bfloat16 and pick_dtype("float32", CPU) is torch.float32


def test_products_are_timed_once_and_leave_the_threads_alone(monkeypatch):
    set_to = list[int]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    product_times.cache_clear()
    assert product_times() is product_times() and set_to == [1, 2]
    assert all(1e-6 < value < 10 for value in product_times())


def test_a_device_is_described_with_its_threads():
    assert describe(CPU).endswith(f"(cpu, {torch.get_num_threads()} threads)") and torch.get_num_threads() == 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_peak_memory_is_in_bytes():
    """At least what this process has now, which /proc says in kB."""
    (now,) = re.findall(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert 0.9 < peak_memory(CPU) / (1024 * int(now)) < 100


def test_one_of_several_gpus(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)  # a build for CUDA, without a driver
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == pick_device("cuda") == CUDA and pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="--device cuda:2: the last of this machine's GPUs is cuda:1"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="finds no such device; try --device cpu"):
        pick_device("cuda:0")
