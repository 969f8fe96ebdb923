"""The contract of every norm: each registered kind is tested against it, according to its traits.

Each kind has a float64 oracle in its own test file, tests/norms/test_<kind>.py, written in torch and sharing no code
with the norm. For a norm of `pytest --import FILE.py`, the test file may be next to that file.

    def oracle(x, state, **norm_args) -> Tensor

`x` (..., dim) is the norm's input in float64. `state` has the norm's parameters by name in float64 and, in
evaluation, its buffers too. Gradients come from autograd. The file may also define

    def error_bound(x, state, eps, **norm_args) -> Tensor

the absolute error allowed when computing with machine epsilon `eps` (default: 4 ulp of the output, the bound of
RMSNorm; measured: 3.6 for dim 64 to 4096), WIDTHS, if `dim` must be a multiple of it, and GRADIENT_ERROR, a factor of
the error allowed in gradients.
"""

import contextlib
import gc
import importlib.util
import inspect
import multiprocessing
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model import Llama
from norms import KINDS, TRAITS, build_norm
from runtime.plugins import IMPORTED
from tests.random_values import normal

HERE = Path(__file__).parent
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@cache
def oracle_file(kind: str) -> Any:
    """The test file of `kind`, which defines its oracle. None if there is none."""
    for path in (HERE / f"test_{kind}.py", *(each.with_name(f"test_{kind}.py") for each in IMPORTED)):
        if path.exists():
            spec = importlib.util.spec_from_file_location(f"oracle_of_{kind}", path)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            if hasattr(module, "oracle"):
                return module
    return None


KIND_NAMES = [kind for kind in sorted(KINDS) if oracle_file(kind)]  # the others fail one test
WITH_EPS = [kind for kind in KIND_NAMES if "eps" in inspect.signature(KINDS[kind]).parameters]
STATEFUL = [kind for kind in KIND_NAMES if [*build_norm(kind, 64).buffers()]]  # others do the same in both modes
CELLS = [(kind, True) for kind in KIND_NAMES] + [(kind, False) for kind in STATEFUL]
each_kind = pytest.mark.parametrize("kind", KIND_NAMES)
each_kind_and_mode = pytest.mark.parametrize(("kind", "training"), CELLS)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device, or hidden by conftest.py: pass -m gpu")
    return request.param


def width(kind: str, at_least: int) -> int:
    """The smallest width of at least `at_least` that the kind supports."""
    multiple = getattr(oracle_file(kind), "WIDTHS", 1)
    return -(-at_least // multiple) * multiple


def trained_norm(kind: str, dim: int, training: bool = True, device: str = "cpu", **norm_args) -> Any:
    """A norm as after some training: no parameter or running statistic has its initial value."""
    norm = build_norm(kind, dim, **norm_args).to(device)
    norm(3 * normal(32, dim, device=device, seed=1) + 1)
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.add_(0.5 * normal(*parameter.shape, device=device, seed=seed + 2))
    return norm.train(training)


def state_of(norm: nn.Module) -> dict[str, Tensor]:
    """The `state` argument of the oracle, in float64 on the CPU."""
    tensors: dict[str, Tensor] = dict(norm.named_parameters())
    if not norm.training:
        tensors |= dict(norm.named_buffers())
    return {name: tensor.detach().cpu().double().requires_grad_() for name, tensor in tensors.items()}


def ulp(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype` numbers at each value of `y`."""
    info = torch.finfo(dtype)
    smallest = torch.full_like(y, info.tiny)
    return info.eps * torch.exp2(torch.floor(torch.log2(torch.maximum(y.abs(), smallest))))


def allowed_error(kind: str, x: Tensor, state: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The kind's bound in the precision it computes in, plus half an ulp for the final cast to `dtype`."""
    computed_in = torch.promote_types(dtype, torch.float32)
    y = oracle_file(kind).oracle(x, state)
    eps = torch.finfo(computed_in).eps
    if hasattr(oracle_file(kind), "error_bound"):
        bound = oracle_file(kind).error_bound(x, state, eps)
    else:
        bound = 4 * ulp(y, computed_in)
    if dtype == torch.float64:
        return 2 * bound  # the oracle has rounding errors of the same size
    return bound if dtype == computed_in else bound + 0.5 * ulp(y, dtype)


def assert_matches_oracle(kind: str, norm: nn.Module, x: Tensor, y: Tensor | None = None, extra: float = 0.0) -> None:
    """Compare y, by default norm(x), with the oracle. `extra` is added to the kind's error bound."""
    y, state = norm(x) if y is None else y, state_of(norm)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    exact_x = x.detach().cpu().double()
    error = (y.detach().cpu().double() - oracle_file(kind).oracle(exact_x, state)).abs()
    worst = (error / (allowed_error(kind, exact_x, state, x.dtype) + extra)).max().item()
    assert worst <= 1, f"{worst:.2f} times the error allowed"  # fails for NaN too


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_there_is_an_oracle(kind):
    where = f"test_{kind}.py, in tests/norms or next to the norm's file"
    assert oracle_file(kind), f"norm {kind!r} has no float64 oracle: define oracle(x, state, **norm_args) in {where}"


@each_kind
@pytest.mark.parametrize("shape", [(16,), (2, 16), (2, 3, 4, 16)])
def test_any_number_of_dimensions(kind, shape, device):
    """BatchNorm cannot train on a single token."""
    norm = trained_norm(kind, 16, len(shape) > 1, device)
    assert_matches_oracle(kind, norm, normal(*shape, device=device))


@each_kind_and_mode
@pytest.mark.parametrize(
    ("dim", "mean", "parameters"),
    [(64, 0, torch.float64), (256, 0, torch.bfloat16), (4096, 0, torch.float32), (256, 1e3, torch.float32)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_match_the_oracle(kind, dtype, dim, mean, parameters, training, device):
    """E[x²] − E[x]² would cancel: in fp32 its error is 0.8 at mean 1e3. Parameters add only their own rounding."""
    norm = trained_norm(kind, dim, training, device).to(parameters)
    assert_matches_oracle(kind, norm, (normal(4, 12, dim, device=device) + mean).to(dtype))


@each_kind_and_mode
def test_autocast_does_not_change_the_result(kind, training, device):
    norm = trained_norm(kind, 256, training, device)
    x = normal(4, 12, 256, device=device, seed=7).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        inside = norm(x)
    outside = norm(x)
    assert inside.dtype == torch.float32 and torch.equal(inside, outside)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (inside, outside)]
    assert torch.equal(*grads)


@each_kind_and_mode
@pytest.mark.parametrize(
    ("rows", "dim", "scale", "bound", "gain_bound"),
    [(512, 64, 1, 5e-7, 5e-7), (512, 1024, 1, 5e-7, 5e-7), (8192, 32, 1, 5e-7, 2e-6)]
    + [(12, 64, scale, 2e-6, 2e-6) for scale in (1e6, 1e12)],  # beyond, torch.rsqrt's derivative underflows
)
def test_gradients_match_the_oracle(kind, training, rows, dim, scale, bound, gain_bound, device):
    """Errors are relative to the largest gradient. The gradient of a gain is a sum over rows.

    The gradient of a scalar is a sum over rows and features whose terms cancel, so its error is relative to the root of
    their sum of squares (measured: 3e-7 for 512 rows, 5e-7 for 8192, where the sum may be 400 times smaller).
    """
    norm = trained_norm(kind, dim, training, device)
    x = (normal(4, rows // 4, dim, device=device) * scale).requires_grad_()
    grad_y = normal(4, rows // 4, dim, device=device, seed=1)
    norm(x).backward(grad_y)

    exact_x, state = x.detach().cpu().double().requires_grad_(), state_of(norm)
    scalars = [name for name, parameter in norm.named_parameters() if parameter.shape == (1,)]
    state |= {name: state[name].detach().expand(x.shape).clone().requires_grad_() for name in scalars}
    oracle_file(kind).oracle(exact_x, state).backward(grad_y.cpu().double())

    factor, exact = getattr(oracle_file(kind), "GRADIENT_ERROR", 1), dict[str, Any](x=exact_x, **state)
    for name, found in {"x": x, **dict(norm.named_parameters())}.items():
        gradient, largest = exact[name].grad, exact[name].grad.abs().max()
        if name in scalars:
            gradient, largest = gradient.sum(), gradient.norm()
        allowed = factor * (bound if name == "x" else gain_bound) * largest
        smallest = torch.finfo(torch.float32).tiny  # DyT and Derf have no gradient at 1e12
        assert (found.grad.cpu().double() - gradient).abs().max() <= allowed + smallest, name


def relative_error(a: Tensor | None, exact: Tensor | None) -> float:
    assert a is not None and exact is not None
    return ((a.cpu().double() - exact).abs().max() / exact.abs().max()).item()


@each_kind
@pytest.mark.parametrize("dim", [16, 768])
@pytest.mark.parametrize("value", [1.0, -3e-5, 0.1, 1e3 + 0.7, 1e6 + 0.3, 1e17])
def test_constant_rows_give_the_bias(kind, value, dim, device):
    """Only for shift-invariant norms. A naive two-pass variance gives 0.9997 at 1e6 + 0.3."""
    dim = width(kind, dim)
    norm = trained_norm(kind, dim, device=device)
    y = norm(torch.full((2, 3, dim), value, device=device))
    bias = dict(norm.named_parameters()).get("bias", torch.zeros(dim, device=device))
    if TRAITS[kind].shift_invariant:
        assert torch.equal(y, bias.expand_as(y))
    else:
        assert (y - bias).abs().max() > min(abs(value), 1e-2) / 2


LARGEST = [(dtype, 0.0) for dtype in DTYPES] + [(torch.float16, 65504), (torch.bfloat16, 1e17), (torch.float32, 1e17)]


@each_kind_and_mode
@pytest.mark.parametrize("dtype, largest", LARGEST, ids=str)
def test_zeros_and_large_values_match_the_oracle_and_have_finite_gradients(kind, training, dtype, largest, device):
    norm = trained_norm(kind, 1024, device=device)
    x = torch.rand(2, 6, 1024, generator=torch.Generator().manual_seed(0)).mul(2).sub(1)
    x[0, 0, 0], x[0, 0, 1] = 1, -1
    x = (x * largest).to(device, dtype).requires_grad_()
    norm(x)  # updates the running statistics with such values
    assert_matches_oracle(kind, norm.train(training), x)
    # ScaleNorm's exact gradient is √dim/eps = 3e6 times the incoming one, which must be small to fit in fp16.
    norm(x).backward(torch.full_like(x, 1e-3))
    for tensor in (x, *norm.parameters()):
        assert tensor.grad is not None and tensor.grad.isfinite().all()


@each_kind_and_mode
def test_nan_affects_only_its_row(kind, training, device):
    """In the output, and in the gradient of the input. The gradient of a gain is a sum over all rows."""
    norm = trained_norm(kind, 64, training, device)
    x, grad_y = normal(2, 6, 64, device=device), normal(2, 6, 64, device=device, seed=1)
    x[1, 3, 5] = x[0, 4, 6] = grad_y[0, 2, 5] = torch.nan
    grad_y[1, 0, 7] = torch.inf
    y = norm(x.requires_grad_())
    has_nan = y.isnan().any(-1)
    assert has_nan[1, 3] and has_nan[0, 4]
    if not TRAITS[kind].per_token and training:
        assert has_nan.all()  # statistics are of all rows
        return
    assert has_nan.sum() == 2
    (grad,) = torch.autograd.grad(y, x, grad_y)
    bad = (~grad.isfinite()).any(-1)
    assert bad[0, 2] and bad[1, 0]
    bad[1, 3] = bad[0, 4] = True  # may be finite: some gradients do not depend on the input
    assert bad.sum() == 4


@pytest.mark.parametrize("kind", WITH_EPS)
@pytest.mark.parametrize("eps", [0.0, -1e-6, float("nan")])
def test_invalid_eps_is_refused(kind, eps):
    with pytest.raises(ValueError, match=f"^eps of a norm must be positive, not {eps}$"):
        KINDS[kind](8, eps=eps)


@each_kind
def test_traits_hold_where_they_are_claimed_and_fail_where_they_are_not(kind, device):
    """In training. Scaling by a power of two is exact, so a scale-invariant norm gives the same bits."""
    traits, norm_args = TRAITS[kind], dict[str, Any](eps=1e-15) if kind in WITH_EPS else {}
    norm: Any = trained_norm(kind, 256, device=device, **norm_args)
    x = normal(4, 12, 256, device=device)
    for power in (-6, -1, 1, 10):
        scaled = norm(x * 2**power)
        assert torch.equal(scaled, norm(x)) if traits.scale_invariant else (scaled - norm(x)).abs().max() > 0.1
    for shift in (-8.0, 0.5):
        difference = (norm(x.double() + shift) - norm(x.double())).abs().max()
        assert difference < 1e-12 if traits.shift_invariant else difference > 0.1
    assert torch.equal(norm(torch.cat((x[:1], 2 * x[1:])))[0], norm(x)[0]) == traits.per_token
    fresh = build_norm(kind, 256).to(device)
    assert torch.equal(fresh(3 * x), 3 * x) == traits.identity


@pytest.mark.parametrize("kind", [kind for kind in KIND_NAMES if KINDS[kind].__module__.startswith("norms.")])
def test_a_kind_for_single_heads_limits_each_of_eight_features(kind):
    """Whatever their directions, so that it limits the scores of attention. The others do not, or refuse the width."""
    bounded = False
    with contextlib.suppress(ValueError):
        bounded = bool(build_norm(kind, 8).eval()(1e6 * torch.eye(8)).abs().max() <= 2 * 8**0.5)
    assert bounded == TRAITS[kind].per_head


@pytest.mark.parametrize("kind", sorted(set(KIND_NAMES) - set(STATEFUL)))
def test_a_kind_without_state_does_the_same_in_training_and_evaluation(kind):
    """So it is tested in training alone. No random numbers are drawn either."""
    norm, x, state = trained_norm(kind, 256), normal(4, 12, 256).requires_grad_(), torch.get_rng_state()
    training, evaluation = (
        (y := norm.train(mode)(x), *torch.autograd.grad(y.square().sum(), (x, *norm.parameters())))
        for mode in (True, False)
    )
    assert all(map(torch.equal, training, evaluation)) and torch.equal(state, torch.get_rng_state())


@each_kind_and_mode
def test_model_is_causal(kind, training):
    """With `pre`. In test_placement.py and test_recipes.py placements are compared with models that are."""
    sizes: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 2, "context": 12, "vocab_size": 50}
    model = Llama(norm=kind, qk_norm="head", **sizes).train(training)
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * normal(*parameter.shape, seed=seed))
        model(tokens)  # updates the running statistics
        for t in (1, 7, 11):
            changed = tokens.clone()
            changed[:, t] = (changed[:, t] + 1) % 50
            before, after = model(tokens), model(changed)
            assert not torch.equal(before[:, t], after[:, t])
            assert torch.equal(before[:, :t], after[:, :t]) == (TRAITS[kind].causal_in_training or not training)


@each_kind_and_mode
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0,)])
def test_empty_batch_does_not_change_state(kind, training, shape, device):
    dim = width(kind, 8)
    norm = trained_norm(kind, dim, training, device)
    before = [tensor.clone() for tensor in norm.state_dict().values()]
    x = torch.empty(*shape, dim, device=device, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.shape == x.shape == getattr(x.grad, "shape", None)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in norm.parameters())
    assert all(map(torch.equal, norm.state_dict().values(), before))


@each_kind_and_mode
@pytest.mark.parametrize("rearranged", ["features first", "strided", "one feature expanded"])
def test_noncontiguous_input(kind, training, rearranged, device):
    x = normal(7, 64, 64, device=device)
    views = {"features first": x.permute(2, 0, 1), "strided": x[:, ::2, 1::2]}
    x = views.get(rearranged, x[..., :1].expand(-1, -1, 64)).requires_grad_()
    norm = trained_norm(kind, x.shape[-1], training, device)
    assert not x.is_contiguous()
    assert_matches_oracle(kind, norm, x)
    contiguous, grad_y = x.detach().contiguous().requires_grad_(), normal(*x.shape, device=device, seed=1)
    (expected,) = torch.autograd.grad(norm(contiguous), contiguous, grad_y)
    assert relative_error(torch.autograd.grad(norm(x), x, grad_y)[0], expected.cpu().double()) <= 1e-6


@each_kind
def test_parameter_names_shapes_values_and_dtype_and_the_meta_device(kind):
    """The values with which they start are checked of the kinds here."""
    dim = width(kind, 16)
    with torch.device("meta"):
        meta = build_norm(kind, dim)
        assert meta(torch.empty(2, 3, dim)).shape == (2, 3, dim)
    assert all(tensor.is_meta for tensor in meta.state_dict().values())
    norm = build_norm(kind, dim)
    start = {"weight": 1.0, "bias": 0.0, "alpha": 0.5, "beta": 0.0, "shift": 0.0}
    start |= {"scalenorm": {"weight": 4.0}, "seednorm": {"alpha": 1.0}}.get(kind, {})
    for name, parameter in norm.named_parameters():
        assert name in start and parameter.shape in ((dim,), (1,)) and parameter.dtype == torch.float32
        if KINDS[kind].__module__.startswith("norms."):
            assert torch.equal(parameter, torch.full_like(parameter, start[name])), name
    trained = trained_norm(kind, dim)
    norm.load_state_dict(trained.state_dict(), strict=True)
    assert all(map(torch.equal, norm.state_dict().values(), trained.state_dict().values()))


ONE = [("rmsnorm", True)]
INDUCTOR = [pytest.param("inductor", [cell], marks=pytest.mark.slow) for cell in CELLS if cell not in ONE]


@pytest.mark.parametrize("backend, cells", [("aot_eager", CELLS), ("inductor", ONE), *INDUCTOR], ids=str)
def test_compiled_matches_eager(backend, cells, device):
    """Together, which takes half as long. aot_eager generates no code."""
    if backend == "inductor" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler for Inductor")
    # Finding out what this CPU can do, and compiling a header first, take longer than the rest.
    choices = {"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}
    options: dict[str, Any] = {"options": choices} if backend == "inductor" else {}
    eager, norms = ([trained_norm(kind, 64, training, device) for kind, training in cells] for _ in range(2))
    xs = [normal(4, 12, 64, device=device, seed=9).requires_grad_() for _ in cells]
    grad_y = normal(4, 12, 64, device=device, seed=10)

    def together(*xs: Tensor) -> list[Tensor]:
        return [norm(x) for norm, x in zip(norms, xs, strict=True)]

    ys: Any = torch.compile(together, backend=backend, fullgraph=True, **options)(*xs)
    for (kind, _), plain, norm, x, y in zip(cells, eager, norms, xs, ys, strict=True):
        assert_matches_oracle(kind, norm, x, y.detach(), extra=getattr(oracle_file(kind), "COMPILED_ERROR", 0.0))
        got = torch.autograd.grad(y, (x, *norm.parameters()), grad_y, retain_graph=len(cells) > 1)
        expected = torch.autograd.grad(plain(x), (x, *plain.parameters()), grad_y)
        for ours, theirs in zip(got, expected, strict=True):
            bound = 1e-6 if ours.numel() > 1 else 2e-5  # a scalar's gradient is a sum of 3072 terms that mostly cancel
            assert relative_error(ours, theirs.cpu().double()) <= bound, kind
        for name, tensor in plain.named_buffers():
            torch.testing.assert_close(dict(norm.named_buffers())[name], tensor)


NORM_FILE = """
from norms import register
from norms.rmsnorm import RMSNorm

@register("KIND")
class Norm(RMSNorm):
    pass
"""


def test_the_contract_takes_imported_norms_and_their_oracles(tmp_path):
    """A correct norm passes, one with a wrong sign fails, and one without an oracle fails a single test."""
    for kind in ("rightnorm", "wrongnorm", "orphannorm"):
        (tmp_path / f"{kind}.py").write_text(NORM_FILE.replace("KIND", kind))
    oracle = (HERE / "test_rmsnorm.py").read_text()
    (tmp_path / "test_rightnorm.py").write_text(oracle)
    (tmp_path / "test_wrongnorm.py").write_text(oracle.replace('return state["weight"]', 'return -state["weight"]'))
    imports = [f"--import={tmp_path / kind}.py" for kind in ("rightnorm", "wrongnorm", "orphannorm")]
    chosen = "orphannorm or (values_match_the and float32 and 4096 and (rightnorm or wrongnorm) and not cuda)"

    def in_a_fork() -> None:  # of this process, which has imported torch
        gc.freeze()  # what the process has compiled cannot be freed in a fork
        del sys.modules[__name__]
        with open(tmp_path / "printed", "w") as file, contextlib.redirect_stdout(file):
            pytest.main([__file__, *imports, "-k", chosen, "-q", "-rpf", "--tb=short", "-p", "no:cacheprovider"])

    process = multiprocessing.get_context("fork").Process(target=in_a_fork)
    process.start()
    process.join()
    printed = (tmp_path / "printed").read_text()
    outcomes = [line for line in printed.splitlines() if line.startswith(("PASSED", "FAILED"))]
    assert len(outcomes) == 3, printed
    assert all(line.startswith("PASSED") == ("rightnorm" in line) for line in outcomes), printed
    assert "times the error allowed" in printed
    assert "norm 'orphannorm' has no float64 oracle" in printed
