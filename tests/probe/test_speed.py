"""Speed is measured through `measure` or called not measured; and where a slow GEMM's time goes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from loka.measure.site import SiteTiming
from loka.probe import Probe, speed
from loka.probe.speed import UNKNOWN_BACKEND, explain_slow, spell_slow, time_candidates
from loka.probe.survey import IN_CHAIN
from loka.records import Candidate, Interval


def watch() -> Any:
    return SimpleNamespace(largest=32, k=16, n=16, device=torch.device("cpu"))


def candidate(**more: Any) -> Candidate:
    error = Interval(value=0.1, low=0.1, high=0.1)
    settings: dict[str, Any] = {"gemm": "fprop", "recipe": "rowwise", "backend": "reference", "mere": error, **more}
    return Candidate(a="e4m3:row", b="e4m3:row", **settings)


def timed(*candidates: Candidate, known: dict[Any, SiteTiming] | None = None) -> list[Candidate]:
    return time_candidates(watch(), "fprop", candidates, weights="dynamic", repeats=3, seconds=1.0, timed=known)


def test_on_a_cpu_nothing_is_timed_and_it_says_so() -> None:
    (found,) = timed(candidate())
    assert found.speedup is None
    assert found.speed_note == "not measured: no GPU"


def test_what_was_refused_or_is_not_in_the_registry_is_not_timed() -> None:
    refused = candidate(mere=None, refusal="wrong")
    own = candidate(backend="mine")
    first, second, third = timed(refused, own, candidate())
    assert first == refused
    assert second.speed_note == UNKNOWN_BACKEND
    assert third.speed_note == "not measured: no GPU"
    assert timed(own)[0].speed_note == UNKNOWN_BACKEND


def test_times_reach_every_candidate_and_equal_ones_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fake(jobs: Any, device: Any, **_: Any) -> list[list[SiteTiming]]:
        asked.append(len(jobs[0].candidates))
        time = Interval(value=5.0, low=4.0, high=6.0)
        return [[SiteTiming(c, microseconds=time, speedup=time) for c in job.candidates] for job in jobs]

    monkeypatch.setattr(speed, "time_jobs", fake)
    found = timed(candidate(), candidate(recipe="rowwise_with_gw_hp"))
    assert asked == [1]
    assert [c.speedup.value for c in found if c.speedup] == [5.0, 5.0]
    known: dict[Any, SiteTiming] = {}
    assert timed(candidate(), known=known) == timed(candidate(), known=known)  # two sites of one shape
    assert asked == [1, 1, 0]


def test_what_turns_out_wrong_while_timed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note about speed would leave it to a plan for accuracy alone."""

    def fake(jobs: Any, device: Any, **_: Any) -> list[list[SiteTiming]]:
        return [[SiteTiming(c, refusal="wrong: row 7", wrong=True) for c in job.candidates] for job in jobs]

    monkeypatch.setattr(speed, "time_jobs", fake)
    (found,) = timed(candidate())
    assert found.refusal == "fails the conformance gate while timed, wrong: row 7"
    assert (found.mere, found.speed_note, found.errors) == (None, None, [])


def test_a_slow_candidate_is_taken_apart() -> None:
    torch.manual_seed(0)
    time = Interval(value=1e6, low=1e6, high=1e6)
    text = explain_slow(watch(), candidate(microseconds=time, speedup=time), repeats=3)
    assert text is not None
    assert text.startswith("K = 16: ")
    assert explain_slow(watch(), candidate(), repeats=3) is None


def test_the_three_sentences() -> None:
    assert spell_slow(256, 20.0, 8.0, 11.0).endswith("quantization (12.0 us) costs more than the GEMM saves (3.0 us)")
    assert "no faster than bf16" in spell_slow(256, 20.0, 12.0, 11.0)
    assert "leaves little" in spell_slow(256, 10.0, 8.0, 11.0)


@pytest.mark.gpu
def test_on_a_gpu_every_candidate_has_a_time_or_a_reason() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda().bfloat16()
    probe = Probe(model, every=1, rows=256)
    for _ in range(2):
        model(torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
        probe.step()
    report = probe.evaluate(samples=5, backends=("torch", "triton"), repeats=5)
    candidates = [c for site in report.record.sites for c in site.candidates]
    silent = [c for c in candidates if (c.speedup is None) != (c.speed_note is not None or c.refusal is not None)]
    assert not silent, silent[:3]
    assert any(c.speedup is not None for c in candidates)
    alone = [c for c in candidates if c.refusal is None and c.speed_note != IN_CHAIN]
    assert all(c.mere is not None and c.mere.high < 0.5 for c in alone)
    assert {v.speed for site in report.record.sites for v in site.verdicts} <= {"fast", "slow"}
    print(report.table())
