"""This machine, and others with cards, pretended by their files, commands, names, capabilities and memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import files
import train
from machine import device as machine_device
from machine.device import pick_device, pick_dtype, unused_gpu
from runtime import run
from runtime.flags import read_train


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds a file to a machine that has neither a GPU nor a compiler."""

    def add(name: str, text: str = "") -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    monkeypatch.setattr(machine_device, "Path", lambda *names: tmp_path.joinpath(*(name.lstrip("/") for name in names)))
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sysconfig.get_path", lambda name: "include")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    files.warned.clear()
    return add


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, install: Callable) -> Callable[..., None]:
    """Lets torch have such cards, on a machine with what compiling needs."""

    def add(capability: tuple[int, int], memory: float = 24e9, count: int = 1) -> None:
        found = {"is_available": True, "device_count": count, "get_device_capability": capability}
        found |= {"get_device_name": "NVIDIA card", "get_device_properties": SimpleNamespace(total_memory=memory)}
        for name, value in (found | {"get_arch_list": ["sm_75", "sm_80", "sm_120", "compute_120"]}).items():
            monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(machine_device, "find_spec", lambda name: name == "triton")

    install("gcc")
    install("include/Python.h")
    return add


@pytest.mark.parametrize(
    "built_for, version, file, why",
    [
        ("cuda", None, "nvidia-smi", "an NVIDIA GPU, but torch 2.13.0+cpu is not built for it"),
        ("hip", "7.1", "dev/kfd", "finds no driver for version 7.1 of its libraries"),
    ],
)
def test_a_gpu_that_torch_does_not_use_is_named(built_for, version, file, why, install, capsys, monkeypatch, refused):
    """Once where `auto` takes the CPU, and as the error of `--device cuda`. Not if the user has hidden it."""
    monkeypatch.setattr(torch.version, built_for, version)
    assert unused_gpu() == ""
    install(file)
    assert [pick_device("auto").type for _ in range(2)] == ["cpu", "cpu"]
    printed = capsys.readouterr().err
    assert printed == f"warning: {unused_gpu()}\n" and why in printed and "see docs/gpu.md" in printed
    assert refused(train.main, ["--device", "cuda"]) == f"error: --device cuda: {unused_gpu()}; try --device cpu\n"
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert unused_gpu() == ""


@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_a_card_that_torch_has_no_kernels_for_is_refused(device, card, refused, monkeypatch):
    card((7, 0))
    why = "compute capability 7.0, and torch 2.13.0+cpu has no kernels for it: see docs/gpu.md, or use --device cpu"
    assert refused(train.main, f"--device {device}".split()) == f"error: NVIDIA card has {why}\n"
    for capability in ((7, 5), (13, 0)):
        card(capability)
        assert pick_device(device).type == "cuda"
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])  # no PTX for later cards
    assert "has no kernels for it" in refused(train.main, f"--device {device}".split())


@pytest.mark.parametrize(
    "capability, memory, flags, expected",
    [
        ((7, 5), 15.8e9, "", ("float16", 64, 64, True)),
        ((8, 9), 8.6e9, "--steps 265", ("bfloat16", 64, 32, True)),
        ((8, 6), 5.9e9, "--steps 132", ("bfloat16", 64, 16, False)),
        ((12, 0), 8.6e9, "--batch-size 24", ("bfloat16", 24, 24, True)),
        ((8, 9), 8.6e9, "--norm batchnorm --micro-batch-size 16", ("bfloat16", 64, 16, True)),
        ((8, 9), 12.9e9, "--device mps", ("float32", 64, 32, False)),  # of 18 GB; 64 sequences need 15.4 by count
        ((8, 9), 17.2e9, "--device mps", ("float32", 64, 64, False)),
    ],
)
def test_the_default_run_fits_the_card(capability, memory, flags, expected, card, monkeypatch):
    """Its global batch, and so the rows of a step, are the same on all cards."""
    card(capability, memory)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: memory)
    _, model, config, *_ = run.resolve(read_train(flags.split()))
    assert (config.dtype, config.batch_size, config.micro_batch_size, config.compile) == expected
    assert model.dim == 384


@pytest.mark.parametrize("continues", [True, False])
@pytest.mark.parametrize("before, after", [(None, 24e9), (24e9, 8e9), (8e9, None)])
def test_a_default_run_stays_what_it_is_on_another_machine(before, after, continues, card, monkeypatch):
    """Of a CPU on a card, on a smaller card, and on a CPU, where the device gives way, and compilation."""

    def move(memory: float | None) -> None:
        card((8, 0), memory or 0.0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: memory is not None)

    move(before)
    asked, model, training, *_ = run.resolve({})
    assert (asked, model.dim) == (({"preset": "small"}, 384) if before else ({"preset": "tiny"}, 128))
    move(after)
    expected = asked, model, training if after else replace(training, device="cpu", compile=False), None, None
    previous = {"asked": asked, "resolved": run.fields_of(model, training), "imports": []}
    assert run.resolve({}, previous, continues) == expected


def test_auto_is_float32_where_there_is_no_loss_scale_and_on_mps(card, monkeypatch):
    monkeypatch.setattr(run.distributed, "world_size", lambda: 2)
    for capability, dtypes in (((7, 5), ["float32", "float16"]), ((8, 0), ["bfloat16", "bfloat16"])):
        card(capability, count=2)
        assert [run.resolve({"shard": shard})[2].dtype for shard in (True, False)] == dtypes
    assert pick_dtype("auto", torch.device("mps")) is torch.float32


@pytest.mark.parametrize("device, compiler", [("cuda", "clang"), ("cpu", "g++")])
def test_long_runs_are_compiled_if_they_can_be(device, compiler, card, install, capsys, monkeypatch, tmp_path, refused):
    """Else a line says what is missing, and `--compile` is an error."""
    card((8, 0))
    monkeypatch.setattr("sys.platform", "linux")
    (tmp_path / "gcc").unlink()
    flags, line = f"--device {device} --dtype float32 --preset small", "not compiled: torch.compile needs "

    def resolved(steps: int) -> tuple[bool | None, str]:
        files.warned.clear()
        asked = read_train(f"{flags} --steps {steps}".split())
        return run.resolve(asked)[2].compile, capsys.readouterr().err

    assert resolved(2000)[1].startswith(f"{line}a compiler: ") and resolved(9) == (False, "")
    assert refused(train.main, f"{flags} --compile".split()).startswith("error: --compile needs a compiler: ")
    install(compiler)
    assert resolved(2000) == (True, "")
    (tmp_path / "include/Python.h").unlink()
    assert resolved(2000) == (False, f"{line}Python's headers, which are not in {tmp_path}/include\n")


@pytest.mark.parametrize(
    "capability, words, chosen",
    [
        ("AVX512", "AuthenticAMD avx512f avx512_bf16", "bfloat16"),
        ("AVX512", "GenuineIntel avx512f avx512_bf16 amx_bf16 amx_tile", "bfloat16"),
        ("AVX512", "GenuineIntel avx512f avx512_bf16", "float32"),  # slower in bfloat16
        ("AVX2", "AuthenticAMD avx512f avx512_bf16", "float32"),  # torch is limited to AVX2
        ("DEFAULT", "", "float32"),  # no /proc/cpuinfo, as on macOS and Windows
    ],
)
def test_auto_takes_bfloat16_on_a_cpu_only_where_it_is_much_faster(capability, words, chosen, monkeypatch, tmp_path):
    """By what the processor is, so the same command has the same dtype on a busy machine too."""
    if words:
        (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {words.replace(' ', chr(10) + 'flags: ', 1)}\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(machine_device, "Path", lambda path: tmp_path / Path(path).name)
    for asked, expected in (("auto", chosen), ("bfloat16", "bfloat16"), ("float32", "float32")):
        assert pick_dtype(asked, torch.device("cpu")) is getattr(torch, expected)
