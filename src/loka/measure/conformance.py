"""Conformance: check that a kernel computes what it claims to.

Accuracy of a format and correctness of a kernel are different questions. Here a kernel is compared with the exact
result (`Law`) *for the same Spec and the same quantized operands*, so quantization error cancels. What is left is
rounding, which can be bounded tightly:

    y = sum_k (a_k s_a)(b_k s_b)          the exact result, in float64
    T = sqrt( sum_k (a_k b_k)^2 + y^2 )   the size that rounding errors are relative to: if terms cancel, y << T, but
                                          errors do not shrink

    tolerance^2 = output^2 + accumulation^2

    output        u / sqrt(12): rounding to nearest errs uniformly within an ulp; u = 2^-7 bf16, 2^-10 fp16, 2^-23 fp32
    accumulation  1.5 * 2^-13 * sqrt(chunk / 32)     FP8 tensor cores
                  4 * 2^-24 * sqrt(K)                float32 adds

Where 2^-13 comes from: Hopper's FP8 tensor cores align the 32 products of an instruction and the running sum to the
largest of them and keep about 14 bits, so each instruction truncates at 2^-13 of the largest term; K / 32 truncations
of random sign add up as a square root. With `fast_accum` the sum stays in the tensor core for all of K (chunk = K);
without it, and for every scale block of 128, it is moved to a float32 register every 128 products (chunk = 128). The
factor 1.5 covers an emulation of exactly that (tests/measure) on every distribution of `inputs`, where 0.5 to 1.3 was
seen. It does not cover products of one sign: there the truncations add up linearly, and fast accumulation over K = 8192
is off by 15 %. That is an error of fast accumulation, which Probe measures, not a defect of a kernel, so the gate's
inputs are zero-mean.

Errors are taken in four ways, since each hides what another shows. Each is divided by its allowance, and the worst is
reported and compared with the tolerance:

    all elements     ||out - y|| / ||T||, allowance 1 + 5 / sqrt(n), n the effective number of elements in the norm
    each row, column the same: a wrong scale on one row is invisible in the whole
    each element     |out - y| / T, allowance 8: one garbage element is invisible in its row

A prepared weight must give the same bits as a plain one, since preparation only changes the layout. NaN must be exactly
where the exact result has it, and an output beyond the type's range must be infinite. The kernel runs twice, the second
time with torch filling every new allocation with NaN, so that an element it never wrote cannot pass by luck.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import E4M3, E5M2, Format, QTensor, Spec, decode, expand_scale, quantize
from loka.kernels.backend import Backend
from loka.kernels.plans import forget_plans
from loka.kernels.registry import prepare_for
from loka.kernels.scaled_mm.call import MatmulCall

TRUNCATION = 1.5 * 2.0**-13  # by an FP8 tensor core instruction of 32 products, margin included
PROMOTION = 128  # products between moves of the sum to float32
ELEMENT_ALLOWANCE = 8.0
CHANCE = 6.0  # standard errors: one correct kernel in 500 million exceeds them
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}


@dataclass(frozen=True)
class Conformance:
    """The result of checking one kernel on one call. True if the kernel is correct.

    Args:
        ok: whether the kernel is correct.
        error: worst error over its allowance; infinite if NaN or infinity is misplaced.
        tolerance: the bound on the error.
        reason: why it failed.
        raised: whether the kernel raised an exception, so that there is no result to judge.

    Example:
        >>> bool(Conformance(False, 0.3, 0.1, "row 7 is off"))
        False
    """

    ok: bool
    error: float
    tolerance: float
    reason: str = ""
    raised: bool = False

    def __post_init__(self) -> None:
        if not self.ok and not self.reason:
            raise ValueError("a failed conformance needs a reason")

    def __bool__(self) -> bool:
        return self.ok

    @classmethod
    def failed(cls, reason: str, tolerance: float = 0.0) -> "Conformance":
        """Return a failure without a finite error."""
        return cls(False, math.inf, tolerance, reason)

    @classmethod
    def within(cls, error: float, tolerance: float, reason: str) -> "Conformance":
        """Compare an error with its tolerance; the reason is that of a failure."""
        return cls(error <= tolerance, error, tolerance, "" if error <= tolerance else reason)


def worst_of(verdicts: Iterable[Conformance]) -> Conformance:
    """Return the worst of several verdicts: a failed one, or else the one with the largest error."""
    return max(verdicts, key=lambda verdict: (not verdict.ok, verdict.error))


def show_first(wrong: Tensor, seen: Tensor, expected: Tensor, *, start: int = 0) -> str:
    """Describe the first wrong element of a result; `start` is the number of the first row given here."""
    index = tuple(int(i) for i in wrong.nonzero()[0])
    place = [start + index[0], *index[1:]] if index else []
    return f"first at {place}: {seen[index].item()}, expected {expected[index].item()}"


def tolerance(call: MatmulCall) -> float:
    """Return how far a correct kernel may be from the exact result, as a share of T."""
    output = ULP[call.out_dtype] / math.sqrt(12)
    return math.hypot(output, accumulation_error(call))


def accumulation_error(call: MatmulCall) -> float:
    """Return the share of T that may be lost by adding K products in hardware."""
    in_float32 = 4 * 2.0**-24 * math.sqrt(max(call.k, 1))
    if not {call.a.format, call.b.format} & {E4M3, E5M2}:
        return in_float32
    blocks = [spec.block.cols for spec in (call.a, call.b) if spec.block.cols > 0]  # scales along K force a promotion
    chunk = call.k if call.fast_accum and not blocks else min(call.k, PROMOTION)
    return math.hypot(in_float32, TRUNCATION * math.sqrt(max(chunk, 32) / 32))


@dataclass(frozen=True)
class Law:
    """The exact result, and the size that its rounding errors are relative to."""

    y: Tensor  # float64
    terms: Tensor  # T above


def law(a: QTensor, b: QTensor) -> Law:
    """Compute scaled_mm in float64, where sums of a few thousand products of 8-bit values are (nearly) exact."""
    left, right = _exact(a), _exact(b)
    y = left @ right.T
    sizes = [_exact(q, nominal=True).square() for q in (a, b)]
    return Law(y, (sizes[0] @ sizes[1].T + y.square()).sqrt())


def law_of_values(left: Tensor, right: Tensor) -> Law:
    """Compute left [M, K] @ right [N, K]^T in float64 for unquantized values, e.g. of the 16-bit baseline."""
    left, right = left.double(), right.double()
    y = left @ right.T
    return Law(y, (left.square() @ right.square().T + y.square()).sqrt())


def nominal_size(elements: Tensor, format: Format) -> Tensor:
    """Return the magnitudes that hardware assumes when it aligns a sum of decoded elements.

    A subnormal has the exponent of the smallest normal, so bits of what is added to it are cut off up to 8 times as
    early. Zeros stay zero.
    """
    size = elements.abs()
    return torch.where(size > 0, size.clamp(min=format.smallest_normal), size)


def baseline_tolerance(dtype: torch.dtype, k: int) -> float:
    """Return the tolerance of a 16-bit GEMM: float32 sums, and one more 16-bit rounding of partial sums (split-K)."""
    return math.hypot(2 * ULP[dtype] / math.sqrt(12), 4 * 2.0**-24 * math.sqrt(max(k, 1)))


def _exact(q: QTensor, *, nominal: bool = False) -> Tensor:
    elements = decode(q.data, q.spec.format).double()
    elements = nominal_size(elements, q.spec.format) if nominal else elements
    return elements * expand_scale(q.multiplier(torch.float64), q.shape, q.spec.block)


def check_scaled_mm(backend: Backend, call: MatmulCall, a: QTensor, b: QTensor, *, poison: bool = True) -> Conformance:
    """Check a backend of scaled_mm on given operands, with the weight plain and prepared.

    `poison` also runs it with new allocations filled with NaN.
    """
    expected = law(a, b)

    def run(weight: QTensor = b) -> Tensor:
        result: Tensor = backend.run(a, weight, out_dtype=call.out_dtype, fast_accum=call.fast_accum)
        return result

    verdict = judge_runs(run, expected, tolerance(call), call.out_dtype, poison=poison)
    prepared = prepare_for(backend, b, a.spec)
    if not verdict or prepared is b:
        return verdict
    return same_bits(run(prepared), run(), verdict)


def same_bits(prepared: Tensor, plain: Tensor, verdict: Conformance) -> Conformance:
    """Return the verdict, or a failure if a prepared weight changed the result."""
    if prepared.shape != plain.shape:
        reason = f"a prepared weight gives {tuple(prepared.shape)}, the plain one {tuple(plain.shape)}"
        return Conformance.failed(reason, verdict.tolerance)
    differing = ~((prepared == plain) | (prepared.isnan() & plain.isnan()))
    if not differing.any():
        return verdict
    row, col = (int(i) for i in differing.nonzero()[0])
    seen = f"first at [{row}, {col}]: {float(prepared[row, col])}, without {float(plain[row, col])}"
    return Conformance.failed(
        f"{int(differing.sum())} elements differ with a prepared weight, {seen}", verdict.tolerance
    )


def judge_runs(
    run: Callable[[], Tensor], law: Law | Callable[[], Law], allowed: float, dtype: torch.dtype, *, poison: bool = True
) -> Conformance:
    """Judge a plain run and, with `poison`, one with poisoned allocations; return the worse verdict."""
    first = run()
    expected = law() if callable(law) else law
    verdicts = [judge(first, expected, allowed, dtype)]
    if poison and verdicts[0]:
        with poisoned_allocations():
            result = run()
        verdicts.append(judge(result, expected, allowed, dtype, prefix="with poisoned allocations: "))
    return worst_of(verdicts)


def judge(out: Tensor, expected: Law, allowed: float, dtype: torch.dtype, *, prefix: str = "") -> Conformance:
    """Compare one result with the exact one."""
    y = expected.y
    if out.shape != y.shape or out.dtype != dtype:
        seen, wanted = f"{tuple(out.shape)} {out.dtype}", f"{tuple(y.shape)} {dtype}"
        return Conformance.failed(f"{prefix}result is {seen}, expected {wanted}", allowed)
    if out.numel() == 0:
        return Conformance(True, 0.0, allowed)
    misplaced = _find_misplaced(out, y, allowed, dtype)
    if misplaced:
        return Conformance.failed(prefix + misplaced, allowed)
    finite = out.isfinite() & y.isfinite()
    error = torch.where(finite, out.double() - y, 0.0).abs()
    terms = torch.where(finite, expected.terms, 0.0)
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the type cannot represent less
    worst, where = max(_looks((error - step).clamp(min=0.0), terms), key=lambda look: look[0])
    return Conformance.within(worst, allowed, f"{prefix}{where}: error {worst:.3g} of the terms, allowed {allowed:.3g}")


def _find_misplaced(out: Tensor, y: Tensor, allowed: float, dtype: torch.dtype) -> str | None:
    """Describe where NaN or infinity differs from the exact result, or return None."""
    limit = torch.finfo(dtype).max
    margin = 1 + ELEMENT_ALLOWANCE * allowed
    overflows = y.abs() > limit * margin
    inside = y.abs() * margin < limit
    infinite = out.isinf()
    overflow = (overflows & ~infinite) | (inside & infinite) | (infinite & (out.sign() != y.sign()))
    for what, wrong in (("differ in being NaN", out.isnan() != y.isnan()), ("overflow differently", overflow)):
        if wrong.any():
            return f"{int(wrong.sum())} elements {what}, {show_first(wrong, out, y)}"
    return None


def _looks(error: Tensor, terms: Tensor) -> Iterator[tuple[float, str]]:
    """Yield the worst error over its allowance, and its place, for each of the four ways."""
    for dims, name in (((0, 1), "the whole result"), ((1,), "row"), ((0,), "column")):
        ratios = (_ratios(error.norm(dim=dims), terms.norm(dim=dims)) / _allowance(terms, dims)).flatten()
        index = int(ratios.argmax())
        yield float(ratios[index]), name if len(dims) == 2 else f"{name} {index}"
    ratios = _ratios(error, terms) / ELEMENT_ALLOWANCE
    index = int(ratios.argmax())
    yield float(ratios.flatten()[index]), f"element [{index // error.shape[1]}, {index % error.shape[1]}]"


def _ratios(error: Tensor, size: Tensor) -> Tensor:
    """Return error / size; any error at a size of zero is infinite."""
    ratio = error / torch.where(size > 0, size, 1.0)
    return torch.where((size == 0) & (error > 0), torch.inf, ratio)


def _allowance(terms: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return 1 + 5 / sqrt(n), n = (sum T^2)^2 / sum T^4 the effective number of elements: 1 if one dominates."""
    squares = terms.square()
    squares = squares / squares.amax(dim=dims, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    effective = squares.sum(dim=dims).square() / squares.square().sum(dim=dims).clamp(
        min=torch.finfo(torch.float64).tiny
    )
    return 1 + 5 / effective.clamp(min=1.0).sqrt()


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Make torch fill every uninitialized floating-point allocation with NaN (its deterministic mode, C++ included).

    Plans of ops are forgotten before and after: they allocate as they did when they were made. The mode belongs to the
    process, so it is on while any thread is in such a block, and afterwards what it was before the first of them.
    """
    with _poison.lock:
        if not _poison.blocks:
            _poison.undo.enter_context(_fill_with_nan())
        _poison.blocks += 1
    forget_plans()
    try:
        yield
    finally:
        with _poison.lock:
            _poison.blocks -= 1
            if not _poison.blocks:
                _poison.undo.close()
        forget_plans()


class _Poison:
    """How many blocks of `poisoned_allocations` are running, and what ends the mode after the last of them."""

    def __init__(self) -> None:
        self.lock, self.blocks, self.undo = threading.Lock(), 0, ExitStack()


_poison = _Poison()


@contextmanager
def _fill_with_nan() -> Iterator[None]:
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # ops without a deterministic implementation may run: only the fill matters
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode(mode)


def check_by_chance(out: QTensor, *, x: Tensor, spec: Spec, scale: Tensor | None = None) -> Conformance:
    """Judge a stochastic quantizer: every element is one of the two neighbors of x on the grid, with the right
    frequency.

    If p is the position of x between the neighbor nearer to zero (0) and the other one (1), an element is the other one
    with probability p, so over many elements

        z = sum(is the other - p) / sqrt(sum p (1 - p))

    is standard normal. Rounding to nearest would pass if p is spread evenly over [0, 1], so p below and above one half
    are judged separately, and the larger |z| is the verdict's `error`. A static or delayed spec needs its scale.
    """
    down, up = (quantize(x, spec, scale=scale, noise=torch.full_like(x, at, dtype=torch.float32)) for at in (1.0, 0.0))
    seen, low, high = (decode(q.data, spec.format) for q in (out, down, up))
    found = check_quantized(QTensor(down.data, out.scale, out.spec, out.tensor_scale), down)
    if not found:
        return found
    wrong = ~((seen == low) | (seen == high) | (seen.isnan() & low.isnan()))
    if wrong.any():
        index = tuple(int(i) for i in wrong.nonzero()[0])
        where = f"first at {list(index)}: {float(seen[index])}, between {float(low[index])} and {float(high[index])}"
        return Conformance.failed(f"{int(wrong.sum())} elements are not a neighbor of their value, {where}")
    exact = x.double() / expand_scale(down.multiplier(), x.shape, spec.block).double()
    p, worst = ((exact - low) / (high - low)).clamp(0, 1), 0.0  # NaN on the grid, where both neighbors coincide
    for side in ((p > 0) & (p < 0.5), (p > 0.5) & (p < 1)):
        due, upper = p[side], (seen == high)[side].double()
        spread = float((due * (1 - due)).sum())
        if spread > 0:
            worst = max(worst, abs(float((upper - due).sum())) / math.sqrt(spread))
    return Conformance.within(worst, CHANCE, f"it rounds up too often or too rarely, by {worst:.3g} standard errors")


def check_quantized(out: QTensor, ref: QTensor) -> Conformance:
    """Judge a quantizer: the same bits as the reference, which leaves a kernel no freedom."""
    if out.spec != ref.spec or out.shape != ref.shape:
        reason = f"result is {out.spec} {tuple(out.shape)}, expected {ref.spec} {tuple(ref.shape)}"
        return Conformance.failed(reason)
    differing = ~((out.scale == ref.scale) | (out.scale.isnan() & ref.scale.isnan()))
    if differing.any():
        first = show_first(differing, out.scale, ref.scale)
        return Conformance.failed(f"{int(differing.sum())} scales differ, {first}")
    seen, law_ = decode(out.data, ref.spec.format), decode(ref.data, ref.spec.format)
    wrong = ~((seen == law_) | (seen.isnan() & law_.isnan()))
    if not wrong.any():
        return Conformance(True, 0.0, 0.0)
    apart = (out.data.view(torch.uint8).short() - ref.data.view(torch.uint8).short()).abs() > 1
    far = wrong & apart  # more than one code away
    if far.any():
        return Conformance.failed(f"{int(wrong.sum())} elements differ, {show_first(far, seen, law_)}")
    reason = f"{int(wrong.sum())} elements differ, {show_first(wrong, seen, law_)}"
    return Conformance(False, float(wrong.double().mean()), 0.0, reason)
