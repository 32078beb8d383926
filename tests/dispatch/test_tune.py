"""Tuning measures what is missing, once, never under capture, and gives every rank the same rows."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from loka.dispatch.database import Database
from loka.dispatch.rows import machine_here
from loka.dispatch.tune import jobs_of_report, key_of, missing_jobs, tune
from loka.formats import Spec
from loka.kernels.scaled_mm import GemmWay
from loka.measure.site import SiteJob

from .evidence import HERE, candidate, report, site
from .measured import fake_timer

ROW = Spec.parse("e4m3:row")
BOTH = (GemmWay(ROW, ROW, True, "torch"), GemmWay(ROW, ROW, True, "triton"))
JOB = SiteJob("fprop", 2048, 64, 32, BOTH)


def test_only_what_is_missing_is_measured() -> None:
    database, timer = Database(":memory:"), fake_timer()
    result = tune([replace(JOB, candidates=BOTH[:1])], database, environment=HERE, timer=timer)
    assert (result.measured, result.known) == (1, 0)
    result = tune([JOB], database, environment=HERE, timer=timer)
    assert (result.measured, result.known) == (1, 1)
    assert [job.candidates for job in timer.asked] == [BOTH[:1], BOTH[1:]]
    assert str(tune([JOB], database, environment=HERE, timer=timer)) == "0 rows measured, 2 known"
    assert len(timer.asked) == 2
    found = database.find(key_of(JOB, BOTH[1]), machine_here(HERE))
    assert found.row is not None
    assert found.row.speedup is not None
    assert found.row.speedup.value == 1.5


def test_jobs_of_one_bucket_are_measured_once_at_its_edge() -> None:
    database, timer = Database(":memory:"), fake_timer()
    jobs = [replace(JOB, m=m) for m in (2048, 2064, 3056)]
    wgrads = [SiteJob("wgrad", 512, 8, 8, BOTH, weights) for weights in ("dynamic", "cached")]  # type: ignore[arg-type]
    tune([*jobs, *wgrads], database, environment=HERE, timer=timer)
    assert [(job.gemm, job.m) for job in timer.asked] == [("fprop", 2048), ("wgrad", 512)]
    missing, known = missing_jobs([*jobs, *wgrads], database, machine_here(HERE))
    assert (missing, known) == ([], 4)


def test_another_machine_measures_again() -> None:
    database, timer = Database(":memory:"), fake_timer()
    tune([JOB], database, environment=HERE, timer=timer)
    newer = msgspec.structs.replace(HERE, torch="3")
    assert tune([JOB], database, environment=newer, timer=timer).measured == 2


def test_nothing_is_measured_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    timer = fake_timer()
    result = tune([JOB], Database(":memory:"), environment=HERE, timer=timer)
    assert result.skipped == "a CUDA graph is being captured"
    assert "nothing measured" in str(result)
    assert not timer.asked


def test_without_a_gpu_no_row_is_written_and_the_result_says_so() -> None:
    database = Database(":memory:")
    result = tune([JOB], database, "cpu", environment=HERE)
    assert result.unmeasured == {"not measured: no GPU": 2}
    assert len(database) == 0
    assert "2 not: not measured: no GPU" in str(result)


@pytest.mark.gpu
def test_on_a_gpu_rows_are_measured_once_and_not_under_capture() -> None:
    database = Database(":memory:")
    job = SiteJob("fprop", 1000, 512, 256, BOTH)
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        skipped = tune([job], database)
    assert skipped.skipped == "a CUDA graph is being captured"
    assert len(database) == 0
    assert tune([job], database, seconds=60).measured == 2
    assert tune([job], database, seconds=60).known == 2
    assert {row.m for _, row in database.entries()} == {769}
    assert all(row.refusal is None for _, row in database.entries())


def test_a_report_becomes_jobs() -> None:
    jobs = jobs_of_report(report(site("a", candidate(), candidate(gemm="wgrad"))), backends=["torch"])
    assert [(job.gemm, job.m, job.k, job.n) for job in jobs] == [("fprop", 32, 16, 8), ("wgrad", 32, 16, 8)]
    assert {str(c.a) for c in jobs[0].candidates} == {"e4m3:tensor", "e4m3:row", "e4m3:1x128"}
    (only,) = jobs_of_report(report(site("a", candidate())), backends=["triton"], recipes=["rowwise"], weights="cached")
    assert only.candidates == BOTH[1:]
    assert only.weights == "cached"


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no clock")


def attempt(mode: str, rank: int) -> dict[str, Any]:
    """What one rank sees of one tuning run."""
    timer = fake_timer(10.0 if rank == 0 else 20.0)
    here = msgspec.structs.replace(HERE, device="another") if mode == "mixed" and rank == 1 else HERE
    database = Database(":memory:")
    try:
        result = tune([JOB], database, environment=here, timer=fail if mode == "fail" else timer)
    except ValueError as error:
        return {"error": str(error)}
    row = database.find(key_of(JOB, JOB.candidates[0]), machine_here(here)).row
    assert row is not None
    assert row.speedup is not None
    return {"asked": len(timer.asked), "speedup": row.speedup.value, "result": str(result)}


def be_rank(folder: Path, rank: int) -> None:
    """One of two processes with gloo, every mode in turn."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    seen = {}
    for mode in ("tune", "fail", "mixed"):
        seen[mode] = attempt(mode, rank)
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, object]]]:
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("fork")  # importing torch twice more would take longer than the tests
    running = [context.Process(target=be_rank, args=(folder, rank)) for rank in (0, 1)]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout=60)
        assert process.exitcode == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_rank_0_measures_and_all_ranks_know(ranks: list[dict[str, dict[str, object]]]) -> None:
    first, second = (seen["tune"] for seen in ranks)
    assert (first["asked"], second["asked"]) == (1, 0)
    assert first["speedup"] == second["speedup"] == 1.5  # rank 1's own timer would have said 0.75
    assert first["result"] == second["result"]


def test_a_failure_of_rank_0_reaches_all_ranks(ranks: list[dict[str, dict[str, object]]]) -> None:
    assert all("rank 0 could not tune: RuntimeError: no clock" in str(seen["fail"]["error"]) for seen in ranks)


def test_a_rank_on_another_machine_raises(ranks: list[dict[str, dict[str, object]]]) -> None:
    first, second = (seen["mixed"] for seen in ranks)
    assert "error" not in first
    assert "their rows do not hold here" in str(second["error"])
