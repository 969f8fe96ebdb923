import os
import platform

import pytest
import torch

from runtime.device import (
    CARDS,
    compile_by_default,
    describe,
    deterministic,
    has_bfloat16,
    pick_device,
    pick_dtype,
    prefers_bfloat16,
    to_device,
)

CPU = torch.device("cpu")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AMX exists on x86 only")
@pytest.mark.parametrize("amx", [True, False])
def test_bfloat16_is_the_default_on_x86_only_with_amx(monkeypatch, amx):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert prefers_bfloat16(CPU) == (amx and has_bfloat16(CPU))
    assert pick_dtype("auto", CPU) is (torch.bfloat16 if prefers_bfloat16(CPU) else torch.float32)


def test_a_dtype_that_is_named_is_taken():
    assert pick_dtype("float32", CPU) is torch.float32
    if has_bfloat16(CPU):
        assert pick_dtype("bfloat16", CPU) is torch.bfloat16
    else:
        with pytest.raises(ValueError, match="--dtype float32"):
            pick_dtype("bfloat16", CPU)


def test_a_device_is_described_with_its_threads():
    assert describe(CPU).endswith(f"(cpu, {torch.get_num_threads()} threads)") and torch.get_num_threads() == 1


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_limits_of_cards_are_in_the_same_units(card):
    """So many FLOPs for each byte of its memory's bandwidth have the cards of these years."""
    assert 70 < card.flops / card.bandwidth < 500 and 20e9 < card.memory < 200e9


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_card_has_bfloat16_from_ampere_on(capability, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_bfloat16(torch.device("cuda")) == has


def test_long_runs_on_a_card_are_compiled_by_default(monkeypatch):
    monkeypatch.setattr("runtime.device.find_spec", lambda name: name == "triton" or None)
    assert compile_by_default(torch.device("cuda"), 500) and not compile_by_default(torch.device("cuda"), 499)
    assert not compile_by_default(CPU, 500)
    monkeypatch.setattr("runtime.device.find_spec", lambda name: None)
    assert not compile_by_default(torch.device("cuda"), 500)


NO_DEVICES = ["", "gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:x", "cpu:0", "CPU", " cuda", "cuda:1\n"]


@pytest.mark.parametrize("name", NO_DEVICES)
def test_a_name_that_is_no_device_is_refused(name):
    with pytest.raises(ValueError, match="choose auto, cpu, cuda, mps, or one of several GPUs, such as cuda:1"):
        pick_device(name)


def test_one_of_several_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    for name in ("cuda:2", "cuda:9999999999999999999999"):
        with pytest.raises(ValueError, match=f"--device {name}: the last of this machine's GPUs is cuda:1"):
            pick_device(name)


def test_a_gpu_on_a_machine_without_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:0", "cuda:3"):
        with pytest.raises(ValueError, match=f"--device {name}: torch .* finds no such device; try --device cpu"):
            pick_device(name)


def test_deterministic_kernels_are_a_setting_of_the_block(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # what the user has set stays
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        with deterministic(False):
            assert not torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_copy_to_the_cpu_is_not_pinned():
    ids = torch.arange(3)
    assert to_device(ids, CPU) is ids
