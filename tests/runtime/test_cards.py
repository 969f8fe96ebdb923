"""Machines and cards that are not here, pretended by their files, commands, names, capabilities and memory."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from runtime import cards, run
from runtime.cards import BEFORE_AMPERE, CARDS, find_card, unused_gpu
from runtime.device import peak_flops, pick_device, pick_dtype

CUDA, CU126 = torch.device("cuda"), "pip install torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126"
KERNEL = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 14:37:44 UTC 2024\nGCC version: 12.2.0"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Add a file to a machine that has neither a GPU nor a compiler; if it has a text to print, as a command."""

    def add(name: str, text: str = "", prints: str | None = None) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if prints is None else f"#!/bin/sh\necho '{prints}'\n")
        path.chmod(0o755)

    monkeypatch.setattr(cards, "Path", lambda *names: tmp_path.joinpath(*(name.lstrip("/") for name in names)))
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "include")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    cards.warn.cache_clear()
    return add


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, install: Callable) -> Callable[..., None]:
    """Let torch have these cards, on a machine with a compiler."""

    def add(capability: tuple[int, int], memory: float = 24e9, count: int = 1) -> None:
        found = {"is_available": True, "device_count": count, "get_device_capability": capability}
        found |= {"get_device_name": "NVIDIA card", "get_device_properties": SimpleNamespace(total_memory=memory)}
        for name, value in (found | {"get_arch_list": ["sm_75", "sm_80", "sm_120", "compute_120"]}).items():
            monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(cards, "find_spec", lambda name: name == "triton")

    install("gcc")
    install("include/Python.h")
    return add


def error_of(flags: str, capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as ended:
        train.main(flags.split())
    assert ended.value.code == 2
    return capsys.readouterr().err


# --- a GPU that torch does not use -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cuda, driver, files, said",
    [
        (None, "551.86", {}, f"(CUDA none) does not use this machine's NVIDIA GPU (driver 551.86): {CU126}\n"),
        (None, "581.29", {}, CU126.replace("cu126", "cu130")),
        (None, "472.12", {}, "(driver 472.12): update the driver\n"),
        ("13.0", "535.183.01", {}, f"(driver 535.183.01): update the driver to 580 or later, or {CU126}\n"),
        (
            "13.0",
            "",
            {"proc/driver/nvidia/version": KERNEL},
            "(driver 470.256.02): update the driver to 580 or later\n",
        ),
        (
            "13.0",
            "580.65.06",
            {},
            "(CUDA 13.0) does not use this machine's NVIDIA GPU (driver 580.65.06): does nvidia-",
        ),
        ("12.6", "NVIDIA-SMI has failed", {}, "(driver unknown): does nvidia-smi list it?\n"),
        (None, "", {"dev/kfd": ""}, "this machine's AMD GPU: pytorch.org/get-started has ROCm\n"),
    ],
)
def test_a_gpu_that_torch_does_not_use_is_named(cuda, driver, files, said, install, capsys, monkeypatch):
    """Once where `auto` takes the CPU, and as the error of `--device cuda`. Not if the user has hidden it."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name, text in files.items():
        install(name, text)
    if driver:
        install("nvidia-smi", prints=driver)
    assert [pick_device("auto").type for _ in range(2)] == ["cpu", "cpu"]
    printed = capsys.readouterr().err
    assert printed == f"warning: {unused_gpu()}\n" and said in printed
    assert error_of("--device cuda", capsys) == f"error: --device cuda: {unused_gpu()}; try --device cpu\n"
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert unused_gpu() == ""


def test_nothing_is_said_where_there_is_no_gpu(install, capsys):
    assert pick_device("auto").type == "cpu" and capsys.readouterr().err == ""


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_a_card_older_than_this_build_of_torch_is_refused_with_one_that_has_it(device, card, capsys):
    card((7, 0))
    said = (
        f"error: NVIDIA card has compute capability 7.0, and torch 2.13.0+cpu needs 7.5: {CU126}, or use --device cpu\n"
    )
    assert error_of(f"--device {device}", capsys) == said
    card((7, 5))
    assert pick_device(device).type == "cuda"


# --- what the default run takes from the card ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capability, memory, flags, expected",
    [
        ((7, 5), 15.8e9, "", ("float16", 64, 32, True)),
        ((8, 6), 12.6e9, "", ("bfloat16", 64, 32, True)),
        ((8, 9), 8.6e9, "", ("bfloat16", 64, 16, True)),
        ((8, 9), 8.6e9, "--micro-batch-size 64 --steps 499", ("bfloat16", 64, 64, False)),
        ((12, 0), 8.6e9, "--batch-size 24", ("bfloat16", 24, 24, True)),
    ],
)
def test_the_default_run_fits_the_card(capability, memory, flags, expected, card):
    """Its global batch, and so the rows of a step, are the same on all cards."""
    card(capability, memory)
    model, config = run.resolve(train.parse(flags.split()))
    assert (config.dtype, config.batch_size, config.micro_batch_size, config.compile) == expected
    assert model.dim == 384


def test_auto_is_float32_where_training_is_sharded_without_bfloat16(card, monkeypatch):
    parsed = {flag: train.parse([flag]) for flag in ("--shard", "--no-shard")}
    card((7, 5), count=2)
    monkeypatch.setattr(run.distributed, "world_size", lambda: 2)
    assert [run.resolve(flags)[1].dtype for flags in parsed.values()] == ["float32", "float16"]
    card((8, 0), count=2)
    assert run.resolve(parsed["--shard"])[1].dtype == "bfloat16"
    assert pick_dtype("auto", torch.device("mps")) is torch.float32


@pytest.mark.parametrize("device, compiler", [("cuda", "clang"), ("cpu", "g++")])
def test_long_runs_are_compiled_if_they_can_be(device, compiler, card, install, capsys, monkeypatch, tmp_path):
    """Else a line says what is missing, and `--compile` is an error."""
    card((8, 0))
    monkeypatch.setattr("sys.platform", "linux")
    (tmp_path / "gcc").unlink()
    flags, line = f"--device {device} --dtype float32 --preset small", "not compiled: torch.compile needs "

    def resolved(steps: int) -> tuple[bool | None, str]:
        cards.warn.cache_clear()
        return run.resolve(train.parse(f"{flags} --steps {steps}".split()))[1].compile, capsys.readouterr().err

    assert resolved(2000)[1].startswith(f"{line}a compiler: ") and resolved(9) == (False, "")
    assert error_of(f"{flags} --compile", capsys).startswith("error: --compile needs a compiler: ")
    install(compiler)
    assert resolved(2000) == (True, "")
    (tmp_path / "include/Python.h").unlink()
    assert resolved(2000) == (False, f"{line}Python's headers, which are not in {tmp_path}/include\n")


# --- data sheets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", CARDS)
def test_limits_of_cards_are_in_the_same_units(card):
    """So many FLOPs for each byte of its memory's bandwidth have the cards of these years."""
    limits = CARDS[card]
    assert 65 < limits.flops / limits.bandwidth < 500 and 8e9 <= limits.memory < 200e9
    ratio = limits.flops / limits.float32  # of tensor cores to the others; 2 on GeForce
    assert 1.9 < ratio < 2.1 if card.startswith("rtx") else 3.9 < ratio < 31


def test_a_card_is_found_by_its_name_in_cuda(monkeypatch):
    """A slower or faster one with a similar name is not."""
    teraflops = {
        "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": None, "NVIDIA L4": 121,
        "NVIDIA L40S": 362, "NVIDIA GeForce GTX 1080": None, "Tesla T4": 65, "Tesla V100-PCIE-16GB": 112,
        "Tesla V100-SXM2-32GB": 125, "NVIDIA A10": 125, "NVIDIA A10G": None, "NVIDIA B200": 2250,
        "NVIDIA GeForce RTX 4060 Ti": 44.1, "NVIDIA GeForce RTX 4060": 30.2, "NVIDIA GeForce RTX 4090": 165,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA GeForce RTX 4090 D": None,
        "NVIDIA GeForce RTX 3080 Ti": None, "NVIDIA GeForce RTX 4080 SUPER": None, "NVIDIA GeForce RTX 5070": 61.7,
    }  # fmt: skip
    for name, peak in teraflops.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        expected = peak and pytest.approx(1e12 * peak)
        assert peak_flops(CUDA, torch.float16) == peak_flops(CUDA, torch.bfloat16) == expected, name
        assert peak_flops(CUDA, torch.float32) is None
    assert set(BEFORE_AMPERE) < set(CARDS) and find_card("NVIDIA A100-SXM4-40GB") is CARDS["a100"]
