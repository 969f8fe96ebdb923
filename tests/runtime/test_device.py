import platform

import pytest
import torch

from runtime.device import has_bfloat16, pick_dtype, prefers_bfloat16

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
