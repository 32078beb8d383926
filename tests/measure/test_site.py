"""A site's GEMM is timed as Linear runs it: right first, quantisation included, beside bf16, and every no has its reason."""

import time
from typing import Any

import pytest
import torch

from kernels.padding import in_place_of_the_reference
from loka.formats import Spec, relative_l2
from loka.kernels import registry
from loka.kernels.scaled_mm import GemmWay
from loka.measure import site
from loka.measure.site import SiteJob, gemm_shape, time_case, time_jobs
from loka.measure.timing import CaptureError, Timing

TENSOR, ROW = Spec.parse("e4m3:tensor"), Spec.parse("e4m3:row")
GEMMS = ("fprop", "dgrad", "wgrad")


def case(gemm: str = "fprop", weights: str = "dynamic", backends: tuple[str, ...] = ("reference",), **more: Any) -> Any:
    candidates = [{"way": f"e4m3:row@e4m3:row/{b}", "fast_accum": True} for b in backends]
    base = {"gemm": gemm, "m": 24, "k": 40, "n": 13, "weights": weights, "candidates": candidates}
    return time_case(**{**base, "device": "cpu", "repeats": 3, "distributions": ["normal"], **more})


def test_without_a_gpu_nothing_is_measured_and_it_says_so() -> None:
    candidates = [GemmWay(ROW, ROW, backend="torch"), GemmWay(TENSOR, TENSOR, True, "fbgemm")]
    (found,) = time_jobs([SiteJob("fprop", 64, 32, 16, tuple(candidates))], "cpu")
    assert [timing.candidate for timing in found] == candidates
    assert all(t.refusal == "not measured: no GPU" and t.microseconds is None and t.speedup is None for t in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_an_error_not_an_answer() -> None:
    with pytest.raises(ValueError, match="no usable GPU"):
        time_jobs([SiteJob("fprop", 64, 32, 16, (GemmWay(ROW, ROW, backend="torch"),))], "cuda")


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("weights", ["dynamic", "cached"])
def test_a_green_candidate_has_time_speedup_and_error(gemm: str, weights: str) -> None:
    (answer,) = case(gemm, weights)
    assert "refusal" not in answer
    assert answer["error"] <= answer["tolerance"]
    for name in ("microseconds", "speedup", "baseline"):
        assert 0 < answer[name]["low"] <= answer[name]["value"] <= answer[name]["high"]
    assert 0.02 < answer["errors"]["normal"]["relative_l2"] < 0.05  # what rowwise E4M3 gives on N(0, 1)


def test_speedups_are_over_bf16_repeat_by_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(candidates: list[Any], device: torch.device, *, repeats: int) -> list[Timing]:
        bf16 = (15e-6, 30e-6, 45e-6)  # drifts, and the candidate with it
        return [
            Timing(c.name, bf16 if c.name == "bf16" else tuple(t / 1.5 for t in bf16), "test", 1) for c in candidates
        ]

    monkeypatch.setattr("loka.measure.timing.time_together", clock)
    (answer,) = case()
    assert answer["speedup"] == {"value": pytest.approx(1.5), "low": pytest.approx(1.5), "high": pytest.approx(1.5)}
    assert (answer["microseconds"]["value"], answer["baseline"]["value"]) == (pytest.approx(20.0), pytest.approx(30.0))


def test_what_cannot_be_captured_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(candidates: list[Any], device: torch.device, *, repeats: int) -> list[Timing]:
        for c in candidates:
            if "1x128" in c.name:
                raise CaptureError(f"{c.name} cannot be captured in a CUDA graph: it waits")
        return [Timing(c.name, (1e-6, 1e-6, 1e-6), "test", 1) for c in candidates]

    monkeypatch.setattr("loka.measure.timing.time_together", clock)
    pair = [
        {"way": f"{pair}/reference", "fast_accum": False} for pair in ("e4m3:1x128@e4m3:128x128", "e4m3:row@e4m3:row")
    ]
    refused, timed = case(candidates=pair)
    assert "it waits" in refused["refusal"]
    assert timed["speedup"]["value"] == 1.0


@pytest.mark.parametrize("gemm", GEMMS)
def test_what_is_timed_is_the_gemm_of_a_linear(gemm: str) -> None:
    job = SiteJob(gemm, 24, 40, 13, (), "dynamic")  # type: ignore[arg-type]
    a, b = site._draw(job, 0, "normal", torch.device("cpu"))
    rows, inner, cols = gemm_shape(gemm, 24, 40, 13)  # type: ignore[arg-type]
    assert (a.shape, b.shape) == ((rows, inner), (cols, inner))
    out = site._thunk(job, GemmWay(ROW, ROW, backend="reference"), (a, b))()
    assert out.shape == (rows, cols)
    assert (out.float() - a.float() @ b.float().T).norm() < 0.05 * (a.float() @ b.float().T).norm()


def test_a_cached_weight_is_not_quantised_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    quantised: list[tuple[int, ...]] = []
    real = site._quantize

    def count(x: torch.Tensor, spec: Spec) -> Any:
        quantised.append(tuple(x.shape))
        return real(x, spec)

    monkeypatch.setattr(site, "_quantize", count)
    for gemm, weights, expected in (
        ("fprop", "dynamic", [(24, 40), (13, 40)]),
        ("fprop", "cached", [(24, 40)]),
        ("dgrad", "cached", [(24, 13)]),
        ("wgrad", "cached", [(13, 24), (40, 24)]),
    ):
        job = SiteJob(gemm, 24, 40, 13, (), weights)  # type: ignore[arg-type]
        thunk = site._thunk(
            job, GemmWay(ROW, ROW, backend="reference"), site._draw(job, 0, "normal", torch.device("cpu"))
        )
        quantised.clear()
        thunk()
        assert quantised == expected


def test_a_cached_weight_is_laid_out_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    padding = in_place_of_the_reference(monkeypatch)
    for gemm, weights, expected in (
        ("fprop", "dynamic", 3),
        ("fprop", "cached", 0),
        ("dgrad", "cached", 0),
        ("wgrad", "cached", 3),  # its second operand is no weight
    ):
        job = SiteJob(gemm, 24, 40, 13, (), weights)  # type: ignore[arg-type]
        pair = site._draw(job, 0, "normal", torch.device("cpu"))
        thunk = site._thunk(job, GemmWay(ROW, ROW, backend="reference"), pair)
        padding.count = 0
        results = [thunk() for _ in range(3)]
        assert padding.count == expected
        again = site._thunk(SiteJob(gemm, 24, 40, 13, (), "dynamic"), GemmWay(ROW, ROW, backend="reference"), pair)()  # type: ignore[arg-type]
        assert all(torch.equal(result, again) for result in results)


def test_a_refusal_keeps_its_reason_and_does_not_stop_the_others() -> None:
    refused, timed = case(backends=("deepgemm", "reference"))
    assert "takes 1x128" in refused["refusal"]
    assert "microseconds" in timed


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = registry.backend("scaled_mm", "reference")
    right = reference.run
    monkeypatch.setattr(reference, "run", lambda *a, **o: right(*a, **o) * 1.1)
    (answer,) = case()
    assert answer["refusal"].startswith("wrong:")
    assert answer["wrong"]
    assert "microseconds" not in answer
    assert answer["error"] > answer["tolerance"]


def test_a_kernel_that_is_wrong_beyond_some_row_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = registry.backend("scaled_mm", "reference")
    right = reference.run

    def zeros_beyond(*operands: Any, **options: Any) -> torch.Tensor:
        out = right(*operands, **options)
        out[700:701] = 0
        return out

    monkeypatch.setattr(reference, "run", zeros_beyond)
    (answer,) = case(m=701)
    assert answer["wrong"]
    (answer,) = case(m=700)
    assert "wrong" not in answer


def test_a_wrong_quantiser_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = site.quantize
    monkeypatch.setattr(site, "quantize", lambda x, spec: real(x * 1.3, spec))
    (answer,) = case()
    assert answer["refusal"].startswith("wrong: quantizing to e4m3:row")


def test_a_failing_kernel_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*operands: Any, **options: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(registry.backend("scaled_mm", "reference"), "run", fail)
    (answer,) = case()
    assert answer["refusal"] == "RuntimeError: no kernel image"


@pytest.mark.parametrize("weights", ["dynamic", "cached"])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_rehearsal_runs_what_is_timed_on_zeros(gemm: Any, weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[tuple[int, ...], tuple[int, ...], float]] = []

    def run(a: Any, b: Any, **_: Any) -> Any:
        seen.append((a.shape, b.shape, float(a.dequantize().abs().max())))
        raise RuntimeError("broken")  # as it would be again when it is timed, where it becomes an answer

    monkeypatch.setattr(registry.backend("scaled_mm", "reference"), "run", run)
    way = GemmWay.parse("e4m3:row@e4m3:row/reference")
    site.rehearse(SiteJob(gemm, 64, 32, 48, (way,), weights), torch.device("cpu"))
    m, k, n = gemm_shape(gemm, 64, 32, 48)
    assert seen == [((m, k), (n, k), 0.0)]


def test_a_used_up_time_box_is_an_answer() -> None:
    (answer,) = case(seconds=-1.0)
    assert answer["refusal"] == "not timed: the time box was used up"


def test_large_results_are_judged_on_spread_rows() -> None:
    rows = site._judged_rows(32768, 4096)
    assert len(rows) == 1024
    assert (int(rows[0]), int(rows[-1])) == (0, 32767)
    assert len(site._judged_rows(100, 64)) == 100


def test_jobs_are_answered_in_order_with_children_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    from loka.measure.isolation import Outcome

    asked: list[list[dict[str, Any]]] = []

    def children(target: str, cases: list[dict[str, Any]], *, timeout: float) -> list[Outcome]:
        asked.append(cases)
        done = [Outcome([{"refusal": f"child {c['m']}"}] * len(c["candidates"])) for c in cases[:-1]]
        return [*done, Outcome(refusal="killed by SIGSEGV")]

    monkeypatch.setattr(site, "map_isolated", children)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(site, "time_case", lambda **c: [{"refusal": f"here {c['m']}"}] * len(c["candidates"]))
    both = (GemmWay(ROW, ROW, backend="fbgemm"), GemmWay(ROW, ROW, backend="torch"))
    jobs = [SiteJob("fprop", m, 8, 8, both) for m in (1, 2)]
    found = [[t.refusal for t in timings] for timings in time_jobs(jobs, "cuda")]
    assert found == [["child 1", "here 1"], ["killed by SIGSEGV", "here 2"]]
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gemm": "bprop"}, "no GEMM 'bprop'"),
        ({"m": 0}, "must be positive"),
        ({"weights": "frozen"}, "expected one of dynamic, cached"),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"gemm": "fprop", "m": 8, "k": 8, "n": 8, "candidates": (), **change}
    with pytest.raises(ValueError, match=message):
        SiteJob(**fields)


def test_candidates_are_checked() -> None:
    for text in ("e4m3:tensor:static@e4m3:tensor/torch", "e4m3:tensor@e4m3:tensor"):
        with pytest.raises(ValueError, match="names its backend and computes its scales"):
            SiteJob("fprop", 8, 8, 8, (GemmWay.parse(text),))
    with pytest.raises(ValueError, match="no backend 'cutlass'"):
        SiteJob("fprop", 8, 8, 8, (GemmWay.parse("e4m3:tensor@e4m3:tensor/cutlass"),))
    one = GemmWay(TENSOR, TENSOR, backend="torch")
    with pytest.raises(ValueError, match="listed twice"):
        SiteJob("fprop", 8, 8, 8, (one, one))


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", GEMMS)
def test_on_a_gpu_ours_are_timed(gemm: str) -> None:
    candidates = [GemmWay(s, s, True, b) for s in (TENSOR, ROW) for b in ("torch", "triton")]
    begin = time.monotonic()
    for weights in ("dynamic", "cached"):
        job = SiteJob(gemm, 2048, 1024, 512, tuple(candidates), weights)  # type: ignore[arg-type]
        for timing in time_jobs([job], "cuda", distributions=("normal",))[0]:
            assert timing.refusal is None
            assert timing.microseconds is not None
            assert timing.microseconds.value > 0
            assert timing.speedup is not None
            assert timing.errors["normal"]["relative_l2"] < 0.05
    assert time.monotonic() - begin < 120


def test_a_transpose_is_never_copied_before_it_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear quantises x^T from x; a timing that transposed first would be of something else."""
    read: list[tuple[int, ...]] = []
    real = site.quantize_transposed

    def note(x: torch.Tensor, spec: Spec) -> Any:
        assert x.is_contiguous()
        read.append(tuple(x.shape))
        return real(x, spec)

    monkeypatch.setattr(site, "quantize_transposed", note)
    job = SiteJob("wgrad", 24, 40, 13, ())
    pair = site._draw(job, 0, "normal", torch.device("cpu"))
    out = site._thunk(job, GemmWay(ROW, ROW, backend="reference"), pair)()
    assert read == [(24, 13), (24, 40)]
    assert relative_l2(out, pair[0].double() @ pair[1].double().T) < 0.06
