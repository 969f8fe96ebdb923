"""The kernels, three C files, beside the formulas: where they are used, that they agree, and what if there are none.

That they keep the contract is tests/norms/test_contract.py's, which meets them wherever they fit.
"""

import copy
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import native
from norms import KINDS, TRAITS, build_norm, calling, columns, pointwise
from norms.calling import formula_only
from norms.fused import fits, in_use
from norms.job import KERNELS

ROOT = Path(__file__).parents[2]
FUSED = sorted(kind for kind, norm in KINDS.items() if hasattr(norm, "formula"))
SOURCES = [KERNELS, columns.KERNELS, pointwise.KERNELS]
each_fused = pytest.mark.parametrize("kind", FUSED)
each_exact = pytest.mark.parametrize("kind", [kind for kind in FUSED if TRAITS[kind].exact_backward])


@pytest.fixture(autouse=True)
def kernels() -> None:
    if native.library(KERNELS)[0] is None:
        pytest.skip(in_use())


def norm_and_tensors(kind: str, rows: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor, Tensor]:
    """A norm with random gains, its input and a gradient of its output."""
    generator = torch.Generator().manual_seed(0)
    norm = build_norm(kind, dim)
    for parameter in norm.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    x = (3 * torch.randn(rows, dim, generator=generator) + 1).to(dtype).requires_grad_()
    return norm, x, torch.randn(rows, dim, generator=generator).to(dtype)


def results(norm: Any, x: Tensor, grad_y: Tensor) -> list[Tensor]:
    """The output, all gradients, and what a norm that remembers then remembers."""
    norm = copy.deepcopy(norm)
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *norm.parameters()), grad_y), *norm.buffers()]


def uses_kernel(norm: Any, x: Tensor) -> bool:
    """Whether a function of a C file is called."""
    called, function = [], calling.function

    def noticed(*which: Any) -> Any:
        called.append(which)
        return function(*which)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calling, "function", noticed)
        copy.deepcopy(norm)(x)
    return bool(called)


def test_every_kind_has_a_kernel():
    assert set(FUSED) == {kind for kind, traits in TRAITS.items() if not traits.identity}


@each_fused
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "dim"), [(1, 16), (3, 48), (700, 64), (2000, 100), (517, 768), (5000, 256), (33, 4100)], ids=str
)
def test_kernel_and_formula_agree(kind, dtype, rows, dim):
    """Relative to the largest; in fp32 the sums over rows differ most, in bf16 each rounds to the nearest of its own.

    Widths with and without padding, rows in one and in many chunks, the last one shorter.
    """
    norm, x, grad_y = norm_and_tensors(kind, rows, dim, dtype)
    norm.train(rows > 1)  # one token is too few to train BatchNorm on
    ours = results(norm, x, grad_y)
    with formula_only():
        formulas = results(norm, x, grad_y)
        assert not uses_kernel(norm, x)
    assert uses_kernel(norm, x)
    for a, b in zip(ours, formulas, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = a.to(torch.promote_types(dtype, a.dtype)), b.to(torch.promote_types(dtype, b.dtype))
        # A scalar's gradient is what a sum over everything leaves, of terms about as large as one.
        size = b.abs().max() if b.numel() > 1 else x.numel() ** 0.5
        assert (a - b).abs().max() <= max(2e-6, torch.finfo(a.dtype).eps) * size


@each_fused
def test_the_number_of_threads_changes_no_bit(kind, each_number_of_threads):
    norm, x, grad_y = norm_and_tensors(kind, 3000, 96)
    one, *others = each_number_of_threads(lambda: results(norm, x, grad_y))
    for other in others:
        assert all(map(torch.equal, one, other))


def test_what_the_kernels_cannot_do_goes_by_the_formula():
    norm, x, _ = norm_and_tensors("layernorm", 4, 32)
    assert uses_kernel(norm, x)
    for dtype in (torch.float64, torch.float16):
        assert not uses_kernel(norm, x.to(dtype))
    assert not uses_kernel(norm.bfloat16(), x)
    statistics = norm.statistics
    assert fits(statistics, x) and not fits(statistics, x[:0]) and not fits(statistics, x[:, :16])
    assert not fits(statistics, x.to("meta"))


@pytest.mark.parametrize("kind", sorted({*FUSED} - {"rmsnorm", "prmsnorm", "scalenorm"}))
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameters_of_another_size_are_refused(kind, name):
    """And never read beyond their end."""
    norm, x, _ = norm_and_tensors(kind, 4, 32)
    for size in (16, 64):
        with pytest.raises((RuntimeError, ValueError)):
            torch.func.functional_call(norm, {name: torch.ones(size)}, (x,))


def test_a_curves_scalar_may_be_one_for_each_feature():
    norm, x, _ = norm_and_tensors("derf", 4, 32)
    each = {name: torch.linspace(0.1, 2, 32) for name in ("alpha", "shift")}
    ours = torch.func.functional_call(norm, each, (x,))
    torch.testing.assert_close(ours, torch.erf(each["alpha"] * x + each["shift"]) * norm.weight + norm.bias)


@each_fused
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_has_the_formula(kind):
    norm, x, _ = norm_and_tensors(kind, 4, 32)
    norm.eval()
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            traced = torch.jit.trace(norm, x.detach())
            torch.testing.assert_close(traced(2 * x.detach() - 1), norm(2 * x.detach() - 1))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@each_exact
def test_forward_mode_differentiation_is_the_formulas(kind, training):
    """⟨Jv, w⟩ = ⟨v, Jᵀw⟩, Jᵀw being what backward finds. RMSNorm, with derivatives by hand, refuses it aloud."""
    norm, x, grad_y = norm_and_tensors(kind, 6, 32)
    norm.train(training)
    direction = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad(norm(x), x, grad_y)
    for context in (torch.enable_grad, torch.no_grad):
        with context(), forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), direction)
            if kind == "rmsnorm":
                with pytest.raises(NotImplementedError, match="jvp"):
                    norm(dual)
                continue
            tangent = forward_ad.unpack_dual(norm(dual)).tangent
            assert (tangent * grad_y).sum().item() == pytest.approx((direction * grad).sum().item(), rel=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@each_fused
def test_gradients_in_batches_are_those_one_by_one(kind, training):
    if training and not TRAITS[kind].exact_backward:
        pytest.skip("each backward pass changes it")
    norm, x, _ = norm_and_tensors(kind, 4, 32)
    norm.train(training)
    y, inputs = norm(x), (x, *norm.parameters())
    incoming = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(1))

    def pull(grad_y: Tensor, **how: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, inputs, grad_y, retain_graph=True, **how)

    expected = [torch.stack(each) for each in zip(*map(pull, incoming), strict=True)]
    found_in_batches = [pull(incoming, is_grads_batched=True)]
    if kind != "rmsnorm":  # whose function with derivatives by hand torch.func refuses
        found_in_batches.append(torch.func.vmap(pull)(incoming))
    for found in found_in_batches:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def test_transforms_look_into_the_formula():
    norm, x, _ = norm_and_tensors("layernorm", 4, 32)

    def loss(x: Tensor) -> Tensor:
        return norm(x).pow(3).sum()

    one_by_one = torch.stack([torch.autograd.grad(loss(row), row)[0] for row in x])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x.detach()), one_by_one)


@each_exact
def test_second_derivatives_in_fp32_are_the_formulas(kind):
    norm, x, grad_y = norm_and_tensors(kind, 6, 32)

    def second() -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(norm(x), (x, *norm.parameters()), grad_y, create_graph=True)
        squares = torch.stack([grad.pow(2).sum() for grad in grads]).sum()
        return torch.autograd.grad(squares, (x, *norm.parameters()), allow_unused=True)

    ours = second()
    with formula_only():
        formulas = second()
    for a, b in zip(ours, formulas, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * (b.abs().max().item() if b is not None else 0))


def test_a_frozen_gain_and_a_frozen_input_are_left_alone():
    norm, x, grad_y = norm_and_tensors("layernorm", 40, 32)
    (expected, *gains) = torch.autograd.grad(norm(x), (x, *norm.parameters()), grad_y)
    norm(x.detach()).backward(grad_y)
    assert all(torch.equal(parameter.grad, gain) for parameter, gain in zip(norm.parameters(), gains, strict=True))
    norm.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(norm(x), x, grad_y)[0], expected)


@pytest.mark.parametrize("dim", [16, 48, 96, 192, 384, 768])
def test_a_row_below_scalenorms_floor_has_the_formulas_gradient(dim):
    """There the scale no longer depends on the row, whatever the width makes of the floor's rounding."""
    norm, x, grad_y = norm_and_tensors("scalenorm", 4, dim)
    short = (x.detach() * (1e-7 / x.detach().norm(dim=-1, keepdim=True))).requires_grad_()
    (ours,) = torch.autograd.grad(norm(short), short, grad_y)
    with formula_only():
        (expected,) = torch.autograd.grad(norm(short), short, grad_y)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_bf16_rounds_special_values_as_torch_does(special):
    """A not-a-number with all bits set must not become a zero by rounding up."""
    x = torch.tensor([[special, *[1.0] * 15]]).bfloat16()
    x.view(torch.int16)[x.isnan()] = 0x7FFF
    norm = build_norm("rmsnorm", 16)
    with formula_only():
        expected = norm(x)
    assert torch.equal(norm(x).isnan(), expected.isnan()) and norm(x).isnan().any()


@pytest.mark.parametrize("kind", ["dyt", "derf"])
def test_curves_are_those_of_float64(kind):
    """On a dense grid, relative to the curve, from where it is a straight line to where it is 1; and for the slope."""
    norm = build_norm(kind, 1 << 18, alpha=1.0)
    x = torch.linspace(-12, 12, 1 << 18).requires_grad_()
    curve = torch.tanh if kind == "dyt" else torch.erf
    for scale in (1.0, 1e-3, 1e-30):
        exact_x = (x.detach() * scale).double().requires_grad_()
        exact, y = curve(exact_x), norm(exact_x.float())
        assert ((y - exact) / exact).abs().max() <= 2.5e-7  # measured: 2.2e-7
        assert y.abs().max() <= 1
    slope = torch.autograd.grad(norm(x).sum(), x)[0]
    exact_x = x.detach().double().requires_grad_()
    assert (slope - torch.autograd.grad(curve(exact_x).sum(), exact_x)[0]).abs().max() <= 2.5e-7


@pytest.mark.parametrize("curve", [pointwise.TANH, pointwise.ERF])
def test_a_curves_table_does_not_depend_on_the_default_dtype_or_device(curve):
    pointwise.table.cache_clear()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            found = pointwise.table(curve)
    finally:
        torch.set_default_dtype(before)
        pointwise.table.cache_clear()
    assert torch.equal(found, pointwise.table(curve))


@pytest.mark.parametrize("kind", ["dyt", "derf"])
def test_curves_of_special_values_are_the_formulas(kind):
    norm, x, _ = norm_and_tensors(kind, 2, 40)
    x = x.detach()
    x[0, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -0.0, -torch.nan])
    with formula_only():
        expected = norm(x)
    torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", ["batchnorm", "powernorm"])
def test_first_tokens_far_from_the_others_cost_no_digits(kind):
    """From their mean columns.c measures distances."""
    norm, x, grad_y = norm_and_tensors(kind, 3000, 40)
    x = x.detach()
    x[:20] += 1e4
    x.requires_grad_()
    ours = results(norm, x, grad_y)
    exact = results(copy.deepcopy(norm).double(), x.double(), grad_y.double())
    for a, b in zip(ours[:4], exact[:4], strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


def test_numbers_too_small_for_the_processors_own_rounding_are_rounded_as_torch_does():
    """Below 2^-126 the instruction for bf16 gives zeros."""
    norm, x, _ = norm_and_tensors("rmsnorm", 4, 40, torch.bfloat16)
    norm.weight.data *= 1e-38
    with formula_only():
        expected = norm(x)
    assert (expected.abs() < torch.finfo(torch.bfloat16).tiny).any() and expected.count_nonzero() > 100
    assert (norm(x).float() - expected.float()).abs().max() <= 2**-133  # the smallest there is


@pytest.mark.parametrize("kind", ["layernorm", "groupnorm"])
@pytest.mark.parametrize("dim", [100, 4096])
def test_a_first_feature_far_from_the_others_costs_no_digits(kind, dim):
    """From it kernels.c measures distances: their mean square would be thousands of times the variance."""
    norm, x, _ = norm_and_tensors(kind, 8, dim)
    x = x.detach()
    x[::2, 0], x[1::2, dim // 2] = 1e3, -1e3
    exact = norm.double()(x.double())
    terms = norm.weight.abs() + (exact - norm.bias).abs() + norm.bias.abs()  # as the contract bounds LayerNorm's error
    assert ((norm.float()(x) - exact).abs() / terms).max() <= 2**-22


# --- how it comes to be there ----------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty folder for what is built."""
    monkeypatch.setattr(native, "BUILT", tmp_path / "kernels")
    for cached in (native.library, native.function):
        cached.cache_clear()
    yield tmp_path / "kernels"
    for cached in (native.library, native.function):
        cached.cache_clear()


def test_kernels_and_formulas_agree_without_avx512(elsewhere, without_avx512):
    """As most processors run them; where the tests run, there may be AVX-512, with instructions of its own."""
    for kind in ("rmsnorm", "layernorm", "dyt", "derf", "batchnorm"):
        for dtype in (torch.float32, torch.bfloat16):
            test_kernel_and_formula_agree(kind, dtype, 700, 100)
    for kind in ("dyt", "derf"):
        test_curves_are_those_of_float64(kind)
    for special in (torch.nan, torch.inf):
        test_bf16_rounds_special_values_as_torch_does(special)
    assert len(list(elsewhere.iterdir())) == len(SOURCES)


def test_it_is_built_once(elsewhere):
    native.library(KERNELS)
    (first,) = elsewhere.iterdir()
    made = first.stat().st_mtime_ns
    native.library.cache_clear()
    library, how = native.library(KERNELS)
    assert library and "kernels by" in how
    assert [file.stat().st_mtime_ns for file in elsewhere.iterdir()] == [made]


def test_many_may_build_it_at_once(elsewhere):
    flags = [*native.FLAGS, *native.THREADS["on torch's threads"]]
    with ThreadPoolExecutor(4) as pool:
        built = set(pool.map(lambda _: native.build(KERNELS, "cc", flags), range(4)))
    assert list(elsewhere.iterdir()) == list(built)


@pytest.mark.parametrize("trouble", ["no compiler", "a compiler that fails", "no room"])
def test_where_it_cannot_be_built_the_formula_is_used_and_one_can_see_why(trouble, elsewhere, tmp_path, monkeypatch):
    if trouble == "no room":
        elsewhere.write_text("a file where the folder should be")
    else:
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        (tmp_path / "bin").mkdir()
    if trouble == "a compiler that fails":
        script = tmp_path / "bin" / "cc"
        script.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho this is no compiler >&2\nexit 1\n")
        script.chmod(0o755)
    norm, x, grad_y = norm_and_tensors("rmsnorm", 8, 32)
    got = results(norm, x, grad_y)
    assert not uses_kernel(norm, x)
    expected = {
        "no compiler": "no C compiler (cc, gcc or clang) was found",
        "a compiler that fails": "cc could not build the kernels: this is no compiler",
        "no room": "could not build the kernels: [Errno",
    }[trouble]
    assert in_use().startswith("formulas, as ") and expected in in_use()
    with formula_only():
        assert all(map(torch.equal, got, results(norm, x, grad_y)))


def test_there_is_one_pool_of_threads():
    """The kernels' threads are torch's: a second OpenMP in the process would fight the first one for the cores."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("no list of the libraries in this process")
    program = (
        "import torch; from norms.fused import in_use; in_use(); "
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line or 'libomp' in line}))"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True)
    assert found.stdout == "1\n"
