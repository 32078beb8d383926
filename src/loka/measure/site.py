"""Time one GEMM of a linear in low precision, quantization included, compared with the same GEMM in bf16.

`bench` times kernels alone; a model pays for more. This is what a converted linear (`loka.lowp.linear`) does for one of
its GEMMs: quantize a and b along the contracted axis (a transpose directly from the original memory layout), then run
scaled_mm on the candidate's backend with bf16 output.

    fprop   y  = x  W^T    a = x     b = W
    dgrad   dx = dy W      a = dy    b = W^T
    wgrad   dW = dy^T x    a = dy^T  b = x^T

    weights = "dynamic"    the weight is quantized in every call
    weights = "cached"     the weight is quantized and laid out for its backend outside the timed region: inference, or
                           many calls per optimizer step

wgrad has no weight operand, so both are the same there. M, K, N are the *linear's* rows, inputs and outputs for every
GEMM. A linear whose fprop and wgrad (dgrad and wgrad) are both quantized may produce x and x^T (dy and dy^T) from one
read, and quantizes a weight once per optimizer step for both GEMMs that read it. These savings belong to no single GEMM
and are not counted, so times are conservative.

Every candidate must pass two checks before it is timed: the backend on this call (`gate`), and the timed code itself.
Its quantized operands must equal the reference bit for bit, and its product must be within the tolerance of
`conformance` (for results beyond 2^22 elements on evenly spaced rows, first and last included). A wrong candidate is
marked as wrong, and no plan uses it. Then all candidates and bf16 are timed together (`timing`). Third-party backends
do all of this in a child process, with their own bf16 baseline. A candidate that refuses, crashes, is wrong or had no
time left becomes a SiteTiming with the reason. Without a GPU nothing is timed, and every result says so.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from msgspec.structs import asdict
from torch import Tensor

from loka.formats import QTensor, Spec, mere, relative_l2
from loka.kernels import registry
from loka.kernels.quantize import quantize, quantize_transposed
from loka.kernels.scaled_mm.call import GemmWay, MatmulCall
from loka.measure import conformance, inputs
from loka.measure.conformance import Conformance
from loka.measure.gate import judge_backend
from loka.measure.isolation import map_isolated
from loka.measure.timing import BASELINE, Contender, Thunk, sets_needed, time_capturable
from loka.records import GEMMS, Gemm, Interval
from loka.records.prose import spell_error

Weights = Literal["dynamic", "cached"]
OURS = ("torch", "triton", "reference")  # these fail with an exception; all others run in a child process
JUDGED_ELEMENTS = 1 << 22
DEFAULT_REPEATS = 15
NO_GPU = "not measured: no GPU"
TARGET = "loka.measure.site:time_case"


@dataclass(frozen=True)
class SiteTiming:
    """The time of a candidate, or why there is none."""

    candidate: GemmWay
    microseconds: Interval | None = None  # quantization included
    speedup: Interval | None = None  # over the bf16 GEMM timed with it, paired by repeat
    refusal: str | None = None
    wrong: bool = False  # refused because its result is wrong
    baseline: Interval | None = None  # microseconds of that bf16 GEMM
    error: float | None = None  # of the conformance check; passes if error <= tolerance
    tolerance: float | None = None
    # distribution -> mere and relative_l2, compared with float64
    errors: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteJob:
    """One GEMM of a linear with M rows, K inputs and N outputs, and the candidates to time on it."""

    gemm: Gemm
    m: int
    k: int
    n: int
    candidates: tuple[GemmWay, ...]
    weights: Weights = "dynamic"

    def __post_init__(self) -> None:
        if self.gemm not in GEMMS:
            raise ValueError(f"no GEMM {self.gemm!r}; they are {', '.join(GEMMS)}")
        if min(self.m, self.k, self.n) < 1:
            raise ValueError(f"M, K and N must be positive, got {self.m} x {self.k} x {self.n}")
        if self.weights not in get_args(Weights):
            raise ValueError(f"weights={self.weights!r}, expected one of {', '.join(get_args(Weights))}")
        for way in self.candidates:
            if way.backend == "auto" or any(spec.mode != "dynamic" for spec in (way.a, way.b)):
                raise ValueError(f"a candidate names its backend and computes its scales from its operands, got {way}")
            registry.backend("scaled_mm", way.backend)
        if len(set(self.candidates)) != len(self.candidates):
            raise ValueError(f"{self.gemm} {self.m} x {self.k} x {self.n}: a candidate is listed twice")


def gemm_shape(gemm: Gemm, m: int, k: int, n: int) -> tuple[int, int, int]:
    """Return rows, contracted length and columns of one GEMM of a linear with M rows, K inputs and N outputs."""
    shapes: dict[Gemm, tuple[int, int, int]] = {"fprop": (m, k, n), "dgrad": (m, n, k), "wgrad": (n, m, k)}
    return shapes[gemm]


def time_jobs(
    jobs: Sequence[SiteJob],
    device: torch.device | str,
    *,
    repeats: int = DEFAULT_REPEATS,
    seconds: float = 60.0,
    distributions: Sequence[str] = (),
) -> list[list[SiteTiming]]:
    """Time several GEMMs.

    Args:
        jobs: the GEMMs, each with its candidates.
        device: the device; on a CPU nothing is timed.
        repeats: measurements of each candidate.
        seconds: the time limit for all of them; what does not begin within it says so.
        distributions: of operands on which errors are measured, too.

    Returns:
        For each job its candidates' times, or why there are none, in the order of the candidates.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return [[SiteTiming(c, refusal=NO_GPU) for c in job.candidates] for job in jobs]
    if not torch.cuda.is_available():
        raise ValueError("device cuda was asked for and this machine has no usable GPU")
    end = time.monotonic() + seconds
    found: list[dict[GemmWay, SiteTiming]] = [{} for _ in jobs]
    options = {"device": str(device), "repeats": repeats, "distributions": list(distributions)}
    for group in ((*OURS,), tuple(b for b in registry.BACKENDS["scaled_mm"] if b not in OURS)):
        chosen = [[c for c in job.candidates if c.backend in group] for job in jobs]
        asked = [i for i, some in enumerate(chosen) if some]
        cases = [encode_case(jobs[i], chosen[i], options) for i in asked]
        left = end - time.monotonic()
        if group != OURS:
            answers = map_isolated(TARGET, cases, timeout=max(left, 0.1)) if cases else []
            results = [(a.value, a.refusal) for a in answers]
        else:
            results = [(time_case(**case, seconds=max(end - time.monotonic(), 0.0)), None) for case in cases]
        for i, (value, refusal) in zip(asked, results, strict=True):
            fields = value if value is not None else [{"refusal": refusal}] * len(chosen[i])
            found[i].update({c: decode_timing(c, f) for c, f in zip(chosen[i], fields, strict=True)})
    return [[answers[c] for c in job.candidates] for job, answers in zip(jobs, found, strict=True)]


def encode_case(job: SiteJob, candidates: Sequence[GemmWay], options: dict[str, Any]) -> dict[str, Any]:
    """Encode a job as JSON values for a child process."""
    encoded = [{"way": str(c), "fast_accum": c.fast_accum} for c in candidates]
    shape = {"gemm": job.gemm, "m": job.m, "k": job.k, "n": job.n, "weights": job.weights}
    return {**shape, "candidates": encoded, **options}


def decode_timing(candidate: GemmWay, fields: dict[str, Any]) -> SiteTiming:
    """Decode one result of `time_case`."""
    values: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    for name in ("microseconds", "speedup", "baseline"):
        if name in values:
            values[name] = Interval(**values[name])
    return SiteTiming(candidate, **values)


@torch.no_grad()
def time_case(
    gemm: Gemm,
    m: int,
    k: int,
    n: int,
    weights: Weights,
    candidates: Sequence[dict[str, Any]],
    device: str,
    repeats: int,
    distributions: Sequence[str],
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Check and time one job in this process, with JSON values in and out: what a child process runs for `time_jobs`.

    A candidate is given by its way (`a@b/backend`) and fast_accum; a result has times or a refusal. After `seconds` no
    further candidate is started. Also runs on a CPU, where times are only good for tests.
    """
    target, end = torch.device(device), time.monotonic() + seconds
    parsed = [GemmWay.parse(c["way"], fast_accum=c["fast_accum"]) for c in candidates]
    job = SiteJob(gemm, m, k, n, tuple(parsed), weights)
    expected = _Expected(job, target)
    answers: list[dict[str, Any]] = [_check_candidate(job, c, expected, distributions, end) for c in parsed]
    del expected
    green = [(c, answer) for c, answer in zip(parsed, answers, strict=True) if "refusal" not in answer]
    if green:
        _time(job, green, target, repeats)
    return answers


@torch.no_grad()
def rehearse(job: SiteJob, device: torch.device) -> None:
    """Run the timed code of every candidate once, on zeros, so that its kernels are compiled. Errors come up later."""

    def matrix(rows: int, cols: int, _: int) -> Tensor:
        return torch.zeros(rows, cols, dtype=torch.bfloat16, device=device)

    pair = _lay_out(job, matrix)
    for candidate in job.candidates:
        with suppress(Exception):
            _thunk(job, candidate, pair)()


def _draw(job: SiteJob, seed: int, distribution: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw a and b as a linear has them."""
    weight = "normal" if distribution in ("zero_rows", "nan_row") else distribution

    def matrix(rows: int, cols: int, part: int) -> Tensor:
        name = weight if part == 1 and job.gemm != "wgrad" else distribution
        return inputs.draw(rows, cols, distribution=name, seed=2 * seed + part, device=device, dtype=torch.bfloat16)

    return _lay_out(job, matrix)


def _lay_out(job: SiteJob, matrix: Callable[[int, int, int], Tensor]) -> tuple[Tensor, Tensor]:
    """Return a and b: bf16, with transposed views where the GEMM reads a transpose. `matrix` makes part 0 or 1."""
    if job.gemm == "fprop":
        return matrix(job.m, job.k, 0), matrix(job.n, job.k, 1)
    dy = matrix(job.m, job.n, 0)
    if job.gemm == "dgrad":
        return dy, matrix(job.n, job.k, 1).T
    return dy.T, matrix(job.m, job.k, 1).T


def _quantize(x: Tensor, spec: Spec) -> QTensor:
    """Quantize an operand of `_draw`; a transposed view is read in its original memory layout."""
    return quantize(x, spec) if x.is_contiguous() else quantize_transposed(x.T, spec)


def _thunk(job: SiteJob, candidate: GemmWay, pair: tuple[Tensor, Tensor]) -> Thunk:
    """Return a function that quantizes and multiplies. A cached weight is prepared here, outside the timed region."""
    a, b = pair
    backend = registry.backend("scaled_mm", candidate.backend)
    kept = None
    if job.weights == "cached" and job.gemm != "wgrad":
        kept = registry.prepare_for(backend, _quantize(b, candidate.b), candidate.a)

    def run() -> Tensor:
        qa = _quantize(a, candidate.a)
        qb = kept if kept is not None else _quantize(b, candidate.b)
        result: Tensor = backend.run(qa, qb, out_dtype=torch.bfloat16, fast_accum=candidate.fast_accum)
        return result

    return run


def _check_candidate(
    job: SiteJob, candidate: GemmWay, expected: "_Expected", distributions: Sequence[str], end: float
) -> dict[str, Any]:
    """Check whether a candidate may be timed, and measure its errors on the given distributions."""
    if time.monotonic() > end:
        return {"refusal": "not timed: the time box was used up"}
    call = candidate.call(*gemm_shape(job.gemm, job.m, job.k, job.n))
    backend, device = registry.backend("scaled_mm", candidate.backend), expected.device
    verdict = backend.supports(call, device)
    if not verdict:
        return {"refusal": verdict.reason}
    try:
        judged = judge_backend("scaled_mm", backend, call, device)
        checked = judged and _check_timed_code(job, candidate, call, expected)
        if checked.raised:
            return {"refusal": checked.reason}
        if not checked:
            error = checked.error if math.isfinite(checked.error) else None
            return {
                "refusal": f"wrong: {checked.reason}",
                "wrong": True,
                "tolerance": checked.tolerance,
                "error": error,
            }
        errors = {name: _errors(job, candidate, _draw(job, 1, name, device)) for name in distributions}
    except Exception as raised:  # a failing backend must not stop the others
        return {"refusal": spell_error(raised)}
    return {"error": checked.error, "tolerance": checked.tolerance, "errors": errors}


class _Expected:
    """What the timed code must compute, made once for all candidates of a job that quantize alike."""

    def __init__(self, job: SiteJob, device: torch.device) -> None:
        self.job, self.device = job, device
        m, _, n = gemm_shape(job.gemm, job.m, job.k, job.n)
        self.rows = _judged_rows(m, n).to(device)  # the rows of the product that are checked
        self._pair: tuple[Tensor, Tensor] | None = None
        self._quantized: dict[tuple[int, Spec], tuple[QTensor, Conformance]] = {}
        self._laws: dict[tuple[Spec, Spec], conformance.Law] = {}

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """The operands, as a linear has them."""
        if self._pair is None:
            self._pair = _draw(self.job, 0, "normal", self.device)
        return self._pair

    def quantized(self, side: int, spec: Spec) -> tuple[QTensor, Conformance]:
        """Return an operand as the timed code quantizes it, and whether it is the reference's, bit for bit."""
        if (side, spec) not in self._quantized:
            x = self.pair[side]
            q = _quantize(x, spec)
            law, _ = registry.backend("quantize", "reference").run(x.contiguous(), spec)
            self._quantized[side, spec] = q, conformance.check_quantized(q, law)
        return self._quantized[side, spec]

    def law(self, a: Spec, b: Spec) -> conformance.Law:
        """Return the exact product of the quantized operands, of the rows that are checked."""
        if (a, b) not in self._laws:
            left, right = (self.quantized(side, spec)[0].dequantize() for side, spec in enumerate((a, b)))
            self._laws[a, b] = conformance.law_of_values(left[self.rows].double(), right.double())
        return self._laws[a, b]


def _check_timed_code(job: SiteJob, candidate: GemmWay, call: MatmulCall, expected: _Expected) -> Conformance:
    """Compare the quantizer with the reference bit for bit, then the result with the exact product of its operands."""
    for side, spec in enumerate((candidate.a, candidate.b)):
        _, same = expected.quantized(side, spec)
        if not same:
            return Conformance(False, same.error, same.tolerance, f"quantizing to {spec}: {same.reason}")
    run, law = _thunk(job, candidate, expected.pair), expected.law(candidate.a, candidate.b)
    return conformance.judge_runs(lambda: run()[expected.rows], law, conformance.tolerance(call), call.out_dtype)


def _judged_rows(m: int, n: int) -> Tensor:
    """Return the indices of the rows to check: all of a small result, evenly spaced ones of a large result."""
    count = min(m, max(256, JUDGED_ELEMENTS // n))
    return torch.linspace(0, m - 1, count, dtype=torch.float64).round().long()


def _errors(job: SiteJob, candidate: GemmWay, pair: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Measure errors compared with the float64 product of the unquantized operands."""
    a, b = pair
    rows = _judged_rows(a.shape[0], b.shape[0]).to(a.device)
    expected = a[rows].double() @ b.double().T
    out = _thunk(job, candidate, pair)()[rows]
    return {"mere": mere(out, expected), "relative_l2": relative_l2(out, expected)}


def _time(job: SiteJob, green: list[tuple[GemmWay, dict[str, Any]]], device: torch.device, repeats: int) -> None:
    """Time the candidates that passed together with bf16. Adds the times to their answers in place."""
    m, k, n = gemm_shape(job.gemm, job.m, job.k, job.n)
    pairs = [_draw(job, s, "normal", device) for s in range(sets_needed(2 * (m * k + k * n + m * n), device))]
    try:
        racers = [Contender(BASELINE, [partial(torch.matmul, a, b.T) for a, b in pairs], _check_baseline(pairs[0]))]
        for c, answer in green:
            checked = Conformance(True, answer["error"], answer["tolerance"])
            racers.append(Contender(_label(c), [_thunk(job, c, pair) for pair in pairs], checked))
        timings, refused = time_capturable(racers, device, repeats)
    except Exception as error:  # out of memory, or a wrong baseline: nothing of this job can be timed
        reason = f"not timed: {spell_error(error)}"
        timings, refused = {}, dict.fromkeys([BASELINE, *(_label(c) for c, _ in green)], reason)
    baseline = asdict(timings[BASELINE].microseconds()) if BASELINE in timings else None
    for candidate, answer in green:
        if _label(candidate) in refused:
            answer["refusal"] = refused[_label(candidate)]
        elif BASELINE in refused:
            answer["refusal"] = f"not timed: {refused[BASELINE]}"
        else:
            timing, bf16 = timings[_label(candidate)], timings[BASELINE]
            answer["microseconds"] = asdict(timing.microseconds())
            answer["speedup"] = asdict(timing.speedup_over(bf16))
            answer["baseline"] = baseline


def _label(way: GemmWay) -> str:
    return f"{way}{' fast' * way.fast_accum}"


def _check_baseline(pair: tuple[Tensor, Tensor]) -> Conformance:
    a, b = pair
    rows = _judged_rows(a.shape[0], b.shape[0]).to(a.device)
    law = conformance.law_of_values(a[rows], b)
    allowed = conformance.baseline_tolerance(torch.bfloat16, a.shape[1])
    return conformance.judge_runs(lambda: torch.matmul(a, b.T)[rows], law, allowed, torch.bfloat16, poison=False)
