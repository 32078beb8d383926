"""Chains are planned from measured rows only: fused where that was measured to pay, with what was missing listed."""

from pathlib import Path
from typing import Any

import pytest

from loka.dispatch import Policy, make_plan
from loka.dispatch.chain import BF16, STATIC, ChainOp
from loka.dispatch.chain_plan import plan_chain, refuse_by_report, with_chains
from loka.dispatch.database import Database
from loka.dispatch.rows import rows_of_bench
from loka.records import from_json, load, to_json
from loka.records.bench import KernelBench
from loka.records.plan import ChainPlan, Plan

from .evidence import candidate, report, site
from .measured import H200, interval, origin, row

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200"
M, W = 2048, 512
LAYER = "e4m3:tensor @ e4m3:tensor blocknorm256 hard_swish -> e4m3:tensor:static"


def kernel(op: str, variant: str, microseconds: float, n: int = W, backend: str = "triton") -> Any:
    version = H200.versions[backend]
    return row(op=op, variant=variant, m=M, k=W, n=n, backend=backend, version=version, microseconds=interval(microseconds), speedup=None, baseline=None)  # fmt: skip


def database(*rows: Any) -> Database:
    made = Database(":memory:")
    made.add(origin(), rows)
    return made


def tower(layers: int) -> list[ChainOp]:
    ops = []
    for i in range(layers):
        ops += [
            ChainOp(f"{i}.linear", "linear", W, W),
            ChainOp(f"{i}.norm", "norm", W, W, "block"),
            ChainOp(f"{i}.act", "activation", W, W, "hard_swish"),
        ]
    return [*ops, ChainOp("last", "linear", W, W)]


ROWS = (
    kernel("scaled_mm", "e4m3:tensor @ e4m3:tensor -> bfloat16 fast", 6.0),
    kernel("scaled_mm", "e4m3:tensor @ e4m3:tensor -> bfloat16 fast", 9.0, backend="bf16"),
    kernel("fused_linear", LAYER, 7.0),
    kernel("fused_linear", LAYER, 12.0, backend="bf16"),
    kernel("quantize", "bfloat16 -> e4m3:tensor", 8.0, n=0),
)


def test_what_is_dear_for_one_layer_pays_for_three() -> None:
    one = plan_chain([ChainOp("last", "linear", W, W)], M, database(*ROWS), H200)
    assert [step.kernel for step in one.steps] == ["bf16 linear"]  # 8 to quantise and 6 to multiply, against 9
    three = plan_chain(tower(3), M, database(*ROWS), H200)
    assert [step.writes for step in three.steps] == ["e4m3:tensor", *[str(STATIC)] * 3, BF16]
    assert three.microseconds == pytest.approx(8 + 3 * 7 + 6)
    assert three.baseline_microseconds == pytest.approx(3 * 12 + 9)
    assert three.steps[1].ops == ["0.linear", "0.norm", "0.act"]
    assert three.steps[1].kernel == f"fused_linear {LAYER} on triton"
    assert any("norm_quantize" in text for text in three.refusals)


def test_a_linear_with_its_quantisation_inside_is_an_edge() -> None:
    variant = "fprop e4m3:row @ e4m3:row fast, weights cached"
    rows = (*ROWS, row(variant=variant, m=M, k=W, n=W, microseconds=interval(8.5), baseline=interval(9.5)))
    one = plan_chain([ChainOp("last", "linear", W, W)], M, database(*rows), H200)
    assert one.steps[0].kernel == "quantise + e4m3:row @ e4m3:row on torch"
    assert one.baseline_microseconds == 9.0


def test_the_norm_writes_fp8_in_its_own_pass() -> None:
    ops = [
        ChainOp("n", "norm", W, W, "rms"),
        ChainOp("a", "activation", W, W, "hard_swish"),
        ChainOp("l", "linear", W, W),
    ]
    rows = (
        kernel("scaled_mm", "e4m3:row @ e4m3:row -> bfloat16 fast", 6.0),
        kernel("norm_quantize", "rms hard_swish -> e4m3:row", 3.0, n=0),
        kernel("norm_quantize", "rms hard_swish -> e4m3:row", 4.0, n=0, backend="bf16"),
        kernel("scaled_mm", "e4m3:row @ e4m3:row -> bfloat16 fast", 9.0, backend="bf16"),
    )
    chain = plan_chain(ops, M, database(*rows), H200)
    assert [step.ops for step in chain.steps] == [["n", "a"], ["l"]]
    assert (chain.microseconds, chain.baseline_microseconds) == (9.0, 13.0)


def test_accuracy_forbids_a_cheaper_way() -> None:
    evidence = report(*(site(op.name, candidate(error=0.9)) for op in tower(3) if op.kind == "linear"))
    chain = plan_chain(tower(3), M, database(*ROWS), H200, refuse=refuse_by_report(evidence, Policy()))
    assert all(step.kernel.startswith("bf16") for step in chain.steps)
    assert any("error up to 0.91 exceeds 0.2" in text for text in chain.refusals)
    assert any("its error was not measured" in text for text in chain.refusals)


def test_stale_and_missing_rows_lead_nowhere() -> None:
    with pytest.raises(ValueError, match="no measured kernels lead from bf16 to bf16"):
        plan_chain(tower(1), M, Database(":memory:"), H200)
    stale = Database(":memory:")
    stale.add(origin(torch="2.9"), ROWS)
    with pytest.raises(ValueError, match=r"torch 2\.9, here 2\.11\.0"):
        plan_chain(tower(1), M, stale, H200)


def test_a_chain_of_the_committed_h200_rows() -> None:
    rows = Database(":memory:")
    for name in ("scaled_mm", "quantize", "norm_quantize", "fused_linear"):
        imported = rows_of_bench(load(RESULTS / f"{name}.json", KernelBench))
        rows.add(imported.origin, imported.rows)
    (machine,) = rows.machines()
    ops = [
        ChainOp("a", "linear", 4096, 4096),
        ChainOp("n", "norm", 4096, 4096, "block"),
        ChainOp("s", "activation", 4096, 4096, "hard_swish"),
        ChainOp("b", "linear", 4096, 4096),
    ]
    chain = plan_chain(ops, 8192, rows, machine, first=str(STATIC))
    assert [step.ops for step in chain.steps] == [["a", "n", "s"], ["b"]]
    assert chain.baseline_microseconds is not None
    assert 1.8 < chain.baseline_microseconds / chain.microseconds < 2.2


def test_a_plan_carries_its_chains(tmp_path: Path) -> None:
    chain = plan_chain(tower(1), M, database(*ROWS), H200)
    plan = make_plan(report(site("0.linear", candidate()), site("last", candidate())), Policy(min_speedup=None))
    both = with_chains(plan, [chain])
    assert from_json(to_json(both), Plan).chains == [chain]
    with pytest.raises(ValueError, match="do not run its ops one after another"):
        with_chains(plan, [ChainPlan(ops=["x"], steps=[], microseconds=1.0, baseline_microseconds=None)])


@pytest.mark.parametrize("missing", ["0.linear", "1.linear", "last"])
def test_every_linear_of_a_chain_is_a_site_of_the_plan(missing: str) -> None:
    variant = "fprop e4m3:row @ e4m3:row fast, weights cached"
    quick = row(variant=variant, m=M, k=W, n=W, microseconds=interval(1.0), baseline=interval(9.5))
    for rows in (ROWS, (*ROWS, quick)):  # steps of every kind that has a linear: fused, with its quantisation, bf16
        chain = plan_chain(tower(2), M, database(*rows), H200)
        sites = [site(name, candidate()) for name in ("0.linear", "1.linear", "last") if name != missing]
        with pytest.raises(ValueError, match=f"{missing} is no site of the plan"):
            with_chains(make_plan(report(*sites), Policy(min_speedup=None)), [chain])


def test_a_linear_is_in_one_chain() -> None:
    chain = plan_chain(tower(1), M, database(*ROWS), H200)
    plan = make_plan(report(site("0.linear", candidate()), site("last", candidate())), Policy(min_speedup=None))
    with pytest.raises(ValueError, match=r"one chain only: 0\.linear, last"):
        with_chains(with_chains(plan, [chain]), [chain])
