"""Errors are those of the operands named, intervals cover, and what is wrong or absent says so."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.dispatch import recipe_named
from loka.formats import QTensor, Spec, mere, relative_l2, saturated_fraction, underflowed_fraction
from loka.formats import quantize as quantize_by_law
from loka.kernels.backend import YES, Verdict, no
from loka.kernels.scaled_mm import GemmWay, reference
from loka.probe import Probe
from loka.probe import problem as problems
from loka.probe.engine import Engine
from loka.probe.evaluate import (
    Evaluator,
    Trial,
    check_sources,
    measure_draws,
    measure_rows,
    run_rows,
    summarise,
)
from loka.probe.interval import intervals_of, summarise_draws, to_decibel
from loka.probe.problem import (
    Outputs,
    Problem,
    count_weights,
    draw_chunks,
    rows_of,
    split_samples,
)
from loka.probe.row_errors import RowErrors, compare_rows, lost_by_row
from loka.records import GEMMS, SOURCES, DistributionError, Gemm, Interval

REFERENCE = Engine.named("reference")
ROWWISE = Trial("rowwise", GemmWay.parse("e4m3:row@e4m3:row"), REFERENCE)
TENSORWISE = Trial("tensorwise", GemmWay.parse("e4m3:tensor@e4m3:tensor"), REFERENCE)


@dataclass
class FakeWatch:
    """What an evaluation needs of a watch: x ~ size * N(0, 1) + shift, whatever the origin."""

    k: int = 24
    n: int = 16
    rows: int = 64
    size: float = 1.0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.name, self.type, self.largest, self.calls = "site", "Linear", self.rows, 1
        self.module = nn.Linear(self.k, self.n, bias=False)
        x, dy = (self.size * torch.randn(self.rows, w, generator=generator) for w in (self.k, self.n))
        self.reservoir = SimpleNamespace(x=x, dy=dy, kept=self.rows)
        self.device = torch.device("cpu")
        self.asked: list[tuple[str, str, int]] = []

    def draw(self, role: str, source: str, count: int, generator: torch.Generator) -> Tensor:
        self.asked.append((role, source, count))
        if role == "w" and source == "rows":
            return self.module.weight.detach()
        if role == "w":
            return torch.randn(self.n, self.k, generator=generator)
        size = 1.0 if source == "normal" else self.size
        return size * torch.randn(count, self.k if role == "x" else self.n, generator=generator)

    def draw_pair(self, source: str, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.draw("x", source, count, generator), self.draw("dy", source, count, generator)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_problem(rows: int = 40, k: int = 24, n: int = 16, spread: float = 0.0) -> Problem:
    g = generator(3)
    sizes = torch.exp(spread * torch.randn(rows, 1, generator=g))
    return Problem("fprop", sizes * torch.randn(rows, k, generator=g), torch.randn(n, k, generator=g))


def test_row_errors_add_up_to_the_metrics_of_the_whole() -> None:
    problem = make_problem(spread=1.0)
    qa, qb = (REFERENCE.quantize(x, ROWWISE.operands.a) for x in (problem.a, problem.b))
    out = REFERENCE.multiply(qa, qb, ROWWISE.operands)
    ref = problem.reference()
    errors, of_b = run_rows(problem, ROWWISE, ref)
    found = summarise(errors, of_b)
    by_row = [mere(out[[i]], ref[[i]]) for i in range(problem.rows)]
    assert found[0] == pytest.approx(sum(by_row) / len(by_row), rel=1e-12)
    assert found[1] == pytest.approx(relative_l2(out, ref), rel=1e-12)
    assert found[2] == max(saturated_fraction(problem.a, qa), saturated_fraction(problem.b, qb))
    assert found[3] == pytest.approx(max(underflowed_fraction(problem.a, qa), underflowed_fraction(problem.b, qb)))


def test_zero_rows_are_measured_against_the_whole_and_zero_is_no_error() -> None:
    ref = torch.cat([torch.ones(1, 8), torch.zeros(1, 8)])
    out = ref.clone()
    out[1, 0] = 0.1
    whole = float(ref.double().square().mean().sqrt())
    assert compare_rows(out, ref)[0].tolist() == pytest.approx([0.0, 0.1 / 8 / (0.01 * whole)])
    assert compare_rows(torch.zeros(2, 8), torch.zeros(2, 8))[0].tolist() == [0.0, 0.0]


def test_a_single_output_is_not_its_own_guard() -> None:
    ref, out = torch.tensor([[1.0], [1e-6]]), torch.tensor([[1.0], [1e-3]])
    whole = float(ref.double().square().mean().sqrt())
    assert compare_rows(out, ref)[0].tolist() == pytest.approx([0.0, 1e-3 / (0.01 * whole)], rel=1e-2)


def test_what_is_lost_by_row_is_what_is_lost() -> None:
    x = torch.tensor([[1.0, 1e-9, 0.0, 2.0], [500.0, 1.0, 1.0, 1.0]])
    q = quantize_by_law(x, Spec.parse("e4m3:tensor:static"), scale=torch.tensor(1.0))
    saturated, underflowed = lost_by_row(x, q)
    assert saturated.tolist() == [0.0, 0.25]
    assert underflowed.tolist() == pytest.approx([1 / 3, 0.0])


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_rows_are_the_operands_of_the_gemm(gemm: Any) -> None:
    watch: Any = FakeWatch()
    x, dy, weight = watch.reservoir.x, watch.reservoir.dy, watch.module.weight.detach()
    expected = {"fprop": x @ weight.T, "dgrad": dy @ weight, "wgrad": dy.T @ x}[gemm]
    assert torch.allclose(rows_of(watch, gemm).reference().float(), expected, atol=1e-5)


def test_a_resample_equals_computing_it() -> None:
    """Rows with row scales are reweighted: the plain bootstrap."""
    problem = make_problem(rows=12, spread=2.0)
    for trial in (ROWWISE,):
        (found,) = measure_rows(problem, [trial], 50, generator(5))
        assert isinstance(found, DistributionError)
        index = torch.randint(12, (50, 12), generator=generator(5))
        direct = [problem.select(part) for part in index]
        values = [summarise(*run_rows(part, trial, part.reference())) for part in direct]
        whole = summarise(*run_rows(problem, trial, problem.reference()))
        for i, interval in enumerate((found.mere, found.relative_l2, found.saturated, found.underflowed)):
            (expected,) = intervals_of([whole[i]], torch.tensor([[v[i]] for v in values], dtype=torch.float64))
            assert interval.value == pytest.approx(expected.value, rel=1e-9, abs=1e-12)
            assert interval.low == pytest.approx(expected.low, rel=1e-6, abs=1e-9)
            assert interval.high == pytest.approx(expected.high, rel=1e-6, abs=1e-9)


def test_the_interval_of_rows_covers() -> None:
    """The error of the whole population lies in about 95 of 100 intervals."""
    g = generator(1)
    sizes = torch.exp(torch.randn(4000, 1, generator=g))
    a, b = sizes * torch.randn(4000, 8, generator=g), torch.randn(16, 8, generator=g)
    population = Problem("fprop", a, b)
    truth = summarise(*run_rows(population, ROWWISE, population.reference()))[0]
    covered = 0
    for _ in range(60):
        part = population.select(torch.randint(4000, (80,), generator=g))
        (found,) = measure_rows(part, [ROWWISE], 100, g)
        assert isinstance(found, DistributionError)
        covered += found.mere.low <= truth <= found.mere.high
    assert covered >= 50


def test_draws_are_averaged_with_the_bootstrap_of_their_mean() -> None:
    values = [(float(i), 1.0, 0.0, 0.0) for i in range(100)]
    alone = summarise_draws(values, list(range(100)), "copula", 32, generator())
    shared = summarise_draws(values, [i // 10 for i in range(100)], "copula", 32, generator())
    assert isinstance(alone, DistributionError)
    assert isinstance(shared, DistributionError)
    assert alone.mere.value == shared.mere.value == 49.5
    error = (torch.arange(100).double().std() / 10).item()
    assert alone.mere.high - alone.mere.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert shared.mere.high - shared.mere.low > 1.5 * (alone.mere.high - alone.mere.low)  # ten weights, not a hundred


def test_a_chunk_gives_the_errors_of_its_samples() -> None:
    watch: Any = FakeWatch()
    (chunk,) = [c for c in draw_chunks(watch, "fprop", "copula", 3, generator()) if c.samples == 3][:1] or [
        problems.Chunk(make_problem(rows=48), 3)
    ]
    for trial in (ROWWISE, TENSORWISE):
        (found,) = measure_draws([chunk], [trial], "copula", generator())
        assert isinstance(found, DistributionError)
        errors, of_b = run_rows(
            chunk.problem, trial, chunk.problem.reference()
        )  # one scale for all, where it is the tensor's
        parts = zip(*(column.split(16) for column in vars(errors).values()), strict=True)
        values = [summarise(RowErrors(*part), of_b) for part in parts]
        assert found.mere.value == pytest.approx(sum(v[0] for v in values) / 3, rel=1e-9)
        assert (found.samples, found.rows) == (3, 16)


def test_draws_stop_once_the_interval_decides() -> None:
    drawn: list[int] = []

    def chunks() -> Any:
        for seed in range(8):
            drawn.append(seed)
            yield problems.Chunk(make_problem(rows=16 * 16), 16)

    for limit, expected in ((0.9, 2), (None, 8)):
        drawn.clear()
        (found,) = measure_draws(chunks(), [ROWWISE], "gaussian", generator(), limit=limit)
        assert isinstance(found, DistributionError)
        assert len(drawn) == expected
        assert found.samples == 16 * expected


def test_a_weight_gradient_is_resampled_in_groups_of_its_rows() -> None:
    """The value is that of the product; the interval is about that of computing every resample of rows."""
    g = generator(3)
    problem = Problem("wgrad", torch.randn(16, 512, generator=g), torch.randn(24, 512, generator=g))
    (found,) = measure_rows(problem, [ROWWISE], 100, generator(5))
    assert isinstance(found, DistributionError)
    direct = []
    for seed in range(40):
        part = problem.select(torch.randint(512, (512,), generator=generator(seed)))
        direct.append(summarise(*run_rows(part, ROWWISE, part.reference()))[1])
    whole = summarise(*run_rows(problem, ROWWISE, problem.reference()))[1]
    assert found.relative_l2.value == pytest.approx(whole, rel=1e-9)
    assert found.relative_l2.low < sum(direct) / 40 < found.relative_l2.high
    spread = max(direct) - min(direct)
    assert 0.3 * spread < found.relative_l2.high - found.relative_l2.low < 3 * spread


def test_operands_are_quantised_once_for_all_candidates_of_a_spec() -> None:
    count = 0

    def quantize(x: Tensor, spec: Spec) -> Any:
        nonlocal count
        count += 1
        return quantize_by_law(x, spec)

    engine = Engine("counting", quantize, REFERENCE.matmul)
    trials = [Trial(name, GemmWay.parse("e4m3:row@e4m3:row"), engine) for name in ("rowwise", "twin", "third")]
    measure_rows(make_problem(), trials, 20, generator())
    assert count == 2


def test_weights_are_drawn_where_the_gaussian_is_and_actual_elsewhere() -> None:
    watch: Any = FakeWatch()
    list(draw_chunks(watch, "fprop", "copula", 4, generator()))
    assert {source for role, source, _ in watch.asked if role == "w"} == {"rows"}
    chunks = list(draw_chunks(watch, "dgrad", "gaussian", 4, generator()))
    assert [asked[:2] for asked in watch.asked].count(("w", "gaussian")) == 4
    assert sum(c.samples for c in chunks) == 4
    assert chunks[0].problem.a.shape == (problems.ROWS_PER_SAMPLE, watch.n)


def test_a_wide_result_is_judged_by_blocks_of_its_outputs() -> None:
    a, b = torch.randn(300, 6), torch.randn(700, 6)
    b[500, 0] = 100.0
    found = Outputs.choose(Problem("fprop", a, b), generator())
    assert found.rows is None
    assert found.columns is not None
    assert found.columns.numel() == 256
    assert 500 in found.columns.tolist()
    both = Outputs.choose(Problem("wgrad", a, b), generator())
    assert both.rows is not None
    assert Problem("wgrad", a, b).keep(both).reference().shape == (both.rows.numel(), 128)
    assert Outputs.choose(Problem("fprop", a, b[:256]), generator()).columns is None


def test_wide_sites_draw_fewer_weights() -> None:
    assert count_weights(64, 64, 100) == problems.MAX_WEIGHTS
    assert count_weights(8192, 8192, 100) == problems.MIN_WEIGHTS
    assert count_weights(8192, 8192, 2) == 2
    assert split_samples(10, 4) == [3, 3, 2, 2]


def evaluate(watch: Any, engines: Sequence[Engine] = (REFERENCE,), **options: Any) -> Any:
    settings: dict[str, Any] = {
        "samples": 8,
        "sources": ["rows", "copula", "gaussian", "normal"],
        "judged_on": ["rows", "copula", "gaussian"],
        "seed": 0,
    }
    return Evaluator(["tensorwise", "rowwise"], engines, **{**settings, **options}).evaluate(watch, "fprop")


def test_the_worst_origin_that_counts_decides() -> None:
    candidates = evaluate(FakeWatch())
    assert [c.recipe for c in candidates] == ["tensorwise", "rowwise"]
    for candidate in candidates:
        assert [e.source for e in candidate.errors] == ["rows", "copula", "gaussian", "normal"]
        counted = {e.source: e.mere.high for e in candidate.errors if e.source != "normal"}
        assert candidate.mere.high == max(counted.values())
        assert candidate.distribution == max(counted, key=lambda s: counted[s])
        assert candidate.samples == 8


def test_normal_operands_are_evaluated_once_per_shape() -> None:
    watches: list[Any] = [FakeWatch(), FakeWatch(size=100.0)]
    evaluator = Evaluator(["rowwise"], [REFERENCE], samples=4, sources=["rows", "normal"], judged_on=["rows"], seed=0)
    found = [evaluator.evaluate(watch, "fprop")[0].errors[-1] for watch in watches]
    assert found[0] == found[1]
    assert "normal" not in {source for _, source, _ in watches[1].asked}


def test_a_recipe_that_keeps_a_gemm_has_no_candidate_for_it() -> None:
    watch: Any = FakeWatch()
    evaluator = Evaluator(["rowwise_with_gw_hp"], [REFERENCE], samples=2, sources=["rows"], judged_on=["rows"], seed=0)
    assert evaluator.evaluate(watch, "wgrad") == []
    assert len(evaluator.evaluate(watch, "dgrad")) == 1


@pytest.mark.parametrize("gemm", GEMMS)
def test_what_is_rehearsed_is_what_is_measured(gemm: Gemm) -> None:
    """Kernels are compiled for the sizes that `sizes` names, before anything is measured."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 384)
    probe = Probe(linear, every=1, rows=40)
    for _ in range(2):
        linear(torch.randn(40, 512)).square().mean().backward()
        probe.step()
    seen = set()

    def run(a: QTensor, b: QTensor, **options: Any) -> Any:
        seen.add((*a.shape, b.shape[0]))
        return reference.run(a, b, **options)

    evaluator = Evaluator(["rowwise"], [planted(run)], samples=20, sources=SOURCES, judged_on=["rows"], seed=0, gate=False)  # fmt: skip
    (watch,) = probe._watches.values()
    assert not [c.refusal for c in evaluator.evaluate(watch, gemm) if c.refusal]
    assert seen == set(evaluator.sizes(watch, gemm))


def planted(run: Any = None, supports: Any = None) -> Engine:
    matmul = SimpleNamespace(supports=supports or (lambda call, device: YES), run=run or reference.run)
    return Engine("planted", quantize_by_law, matmul)


def test_a_wrong_kernel_is_refused_by_the_gate_with_the_reason() -> None:
    wrong = planted(lambda a, b, **options: 1.1 * reference.run(a, b, **options))
    candidates = evaluate(FakeWatch(), [wrong])
    assert all("fails the conformance gate on flat operands" in c.refusal for c in candidates)
    assert all(c.mere is None and not c.errors for c in candidates)
    ungated = evaluate(FakeWatch(), [wrong], gate=False)
    assert all(c.mere.value > 0.1 for c in ungated)


def test_refusals_and_crashes_are_answers() -> None:
    def crash(a: Any, b: Any, **options: Any) -> Tensor:
        raise RuntimeError("device side assert")

    def refuse(call: Any, device: Any) -> Verdict:
        return no("not on a Tuesday")

    assert all("device side assert" in c.refusal for c in evaluate(FakeWatch(), [planted(crash)]))
    assert all("fails on rows" in c.refusal for c in evaluate(FakeWatch(), [planted(crash)], gate=False))
    assert all(c.refusal == "not on a Tuesday" for c in evaluate(FakeWatch(), [planted(supports=refuse)]))


def test_what_is_not_finite_is_refused() -> None:
    def overflow(a: Any, b: Any, **options: Any) -> Tensor:
        out = reference.run(a, b, **options)
        return torch.where(out.abs() > 1e4, torch.inf, out)

    watch: Any = FakeWatch(size=1e5)
    assert all("not finite on rows" in c.refusal for c in evaluate(watch, [planted(overflow)], gate=False))


def test_a_distribution_that_cannot_be_drawn_is_a_refusal() -> None:
    class Unlearned(FakeWatch):
        def draw(self, role: str, source: str, count: int, generator: torch.Generator) -> Tensor:
            if source == "rows":
                return super().draw(role, source, count, generator)
            raise ValueError("no finite row was seen")

    assert all("no finite row was seen" in c.refusal for c in evaluate(Unlearned()))


def test_the_gate_looks_at_the_sites_own_widths() -> None:
    def wrong_at_48(a: Any, b: Any, **options: Any) -> Tensor:
        out = reference.run(a, b, **options)
        return out.flip(0) if a.shape[1] == 48 else out

    operands = recipe_named("rowwise").operands("fprop")
    assert operands is not None
    engine, cpu = planted(wrong_at_48), torch.device("cpu")
    assert engine.refuse(operands, (100, 32, 16), cpu) is None
    assert "conformance" in (engine.refuse(operands, (100, 48, 16), cpu) or "")


def zero_beyond(limit: int) -> Any:
    def run(a: Any, b: Any, **options: Any) -> Tensor:
        out = reference.run(a, b, **options)
        out[limit:] = 0
        return out

    return run


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_the_gate_looks_at_all_rows_of_every_gemm(gemm: Any) -> None:
    """Right on the first 1,024 rows (wgrad: contracted rows), wrong on the site's 1,500: a refusal, not a note."""

    def short_contraction(a: Any, b: Any, **options: Any) -> Tensor:
        part = slice(0, 1024)
        return (a.dequantize()[:, part] @ b.dequantize()[:, part].T).to(options["out_dtype"])

    watch: Any = FakeWatch()
    watch.largest = 1500
    wrong = planted(short_contraction if gemm == "wgrad" else zero_beyond(1024))
    found = Evaluator(["rowwise"], [wrong], samples=2, sources=["rows"], judged_on=["rows"], seed=0).evaluate(
        watch, gemm
    )
    assert [c.refusal is not None and "conformance" in c.refusal and c.mere is None for c in found] == [True]
    watch.largest = 1024
    assert (
        Evaluator(["rowwise"], [wrong], samples=2, sources=["rows"], judged_on=["rows"], seed=0)
        .evaluate(watch, gemm)[0]
        .refusal
        is None
    )


def test_intervals_contain_their_value_and_decibels_turn_around() -> None:
    (interval,) = intervals_of([1.0], torch.tensor([[2.0], [3.0]], dtype=torch.float64))
    assert (interval.low, interval.value) == (1.0, 1.0)
    decibel = to_decibel(Interval(value=0.1, low=0.01, high=1.0))
    assert decibel is not None
    assert (decibel.low, decibel.value, decibel.high) == pytest.approx((0.0, 20.0, 40.0))
    assert to_decibel(Interval(value=0.1, low=0.0, high=1.0)) is None


@pytest.mark.parametrize(
    ("sources", "judged"), [((), ("rows",)), (("rows",), ("copula",)), (("elsewhere",), ("rows",)), (("rows",), ())]
)
def test_nonsense_is_refused(sources: Any, judged: Any) -> None:
    with pytest.raises(ValueError):
        check_sources(sources, judged)
