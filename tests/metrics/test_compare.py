"""The four verdicts, the unit of independence, the MDE against simulation, relative log loss on known data."""

import dataclasses
import math

import pytest
import torch

from loka.metrics import LogLoss, compare_paired, decide, log_losses, minimum_detectable_effect
from loka.metrics.bootstrap import bound_unseen
from loka.metrics.compare import Comparison


def draw(units: int, *, shift: float, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Paired losses around 1 that share most of their variation; the candidate is `shift` higher on average."""
    generator = torch.Generator().manual_seed(seed)
    baseline = 1 + torch.rand(units, generator=generator, dtype=torch.float64)
    return baseline + shift + noise * torch.randn(units, generator=generator, dtype=torch.float64), baseline


def compare(units: int, *, shift: float, noise: float, lower_is_better: bool = True, seed: int = 0) -> Comparison:
    pair = draw(units, shift=shift, noise=noise, seed=seed)
    return compare_paired(*pair, margin=0.01, lower_is_better=lower_is_better, metric="loss")


def test_the_four_verdicts() -> None:
    assert compare(2000, shift=-0.1, noise=0.1).verdict == "better"
    assert compare(2000, shift=0.1, noise=0.1).verdict == "worse"
    assert compare(2000, shift=0.1, noise=0.1, lower_is_better=False).verdict == "better"
    assert compare(2000, shift=-0.1, noise=0.1, lower_is_better=False).verdict == "worse"
    assert compare(2000, shift=0.0, noise=0.02).verdict == "equivalent"
    assert compare(40, shift=0.0, noise=1.0).verdict == "inconclusive"


def test_significant_but_negligible_is_equivalent() -> None:
    result = compare(2000, shift=0.003, noise=0.02)
    assert result.low > 0
    assert result.verdict == "equivalent"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.9, 0.9, "equivalent"),
        (0.1, 0.9, "equivalent"),
        (0.1, 1.1, "worse"),
        (2.0, 3.0, "worse"),
        (-1.1, -0.1, "better"),
        (-1.1, 0.1, "inconclusive"),
        (-5.0, 5.0, "inconclusive"),
        (-1.0, 0.5, "inconclusive"),  # touching the margin is not inside it
        (0.0, 1.5, "inconclusive"),  # touching zero does not exclude it
        (-math.inf, 0.5, "inconclusive"),
        (math.nan, math.nan, "inconclusive"),
    ],
)
def test_decide(low: float, high: float, expected: str) -> None:
    assert decide(low, high, margin=1.0, lower_is_better=True) == expected


def test_equivalence_is_rarely_granted_at_the_margin() -> None:
    """The error that matters: a difference as large as the margin called equivalent. TOST at 2.5 %."""
    granted = 0
    for seed in range(400):
        pair = draw(50, shift=0.01, noise=0.02, seed=seed)
        granted += (
            compare_paired(*pair, margin=0.01, lower_is_better=True, resamples=300, seed=seed).verdict == "equivalent"
        )
    assert granted / 400 < 0.05


def test_pairing_removes_shared_variation() -> None:
    candidate, baseline = draw(500, shift=0.02, noise=0.01)
    paired = compare_paired(candidate, baseline, margin=0.01, lower_is_better=True)
    shuffled = baseline[torch.randperm(500, generator=torch.Generator().manual_seed(0))]
    unpaired = compare_paired(candidate, shuffled, margin=0.01, lower_is_better=True)
    assert paired.verdict == "worse"
    assert unpaired.high - unpaired.low > 10 * (paired.high - paired.low)


def test_clusters_widen_the_interval() -> None:
    """100 users of 50 examples with one shared deviation each: ten times fewer independent facts than it seems."""
    generator = torch.Generator().manual_seed(0)
    user = torch.randn(100, generator=generator, dtype=torch.float64)
    groups = torch.arange(5000) // 50
    baseline = torch.rand(5000, generator=generator, dtype=torch.float64)
    candidate = baseline + user[groups] + 0.1 * torch.randn(5000, generator=generator, dtype=torch.float64)
    naive = compare_paired(candidate, baseline, margin=0.1, lower_is_better=True)
    clustered = compare_paired(candidate, baseline, margin=0.1, lower_is_better=True, groups=groups * 17 - 3)
    assert clustered.estimate == pytest.approx(naive.estimate, rel=1e-12)
    assert (clustered.units, clustered.pairs) == (100, 5000)
    assert clustered.standard_error == pytest.approx(float(user.std()) / 10, rel=0.05)
    assert clustered.high - clustered.low > 5 * (naive.high - naive.low)


def test_cluster_coverage() -> None:
    """Unequal clusters, skewed effects: the interval covers the true mean difference 0 as often as it says."""
    covered = 0
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 20, (60,), generator=generator)
        groups = torch.repeat_interleave(torch.arange(60), sizes)
        effect = -torch.log(torch.rand(60, generator=generator, dtype=torch.float64)) - 1
        difference = effect[groups] + torch.randn(groups.numel(), generator=generator, dtype=torch.float64)
        result = compare_paired(
            difference,
            torch.zeros_like(difference),
            groups=groups,
            margin=1.0,
            lower_is_better=True,
            confidence=0.9,
            resamples=300,
            seed=seed,
        )
        covered += result.low <= 0 <= result.high
    assert covered / 400 == pytest.approx(0.9, abs=0.06)


@pytest.mark.parametrize("units", [5, 200])
def test_mde_is_found_with_the_stated_power(units: int) -> None:
    """Shift the truth by the MDE: the interval excludes 0 in 80 % of the trials."""
    noise, few = 0.5, units < 30
    error = noise / math.sqrt(units)
    effect = minimum_detectable_effect(error, confidence=0.95, power=0.8, units=units if few else None)
    found, trials = 0, 1000 if few else 200
    for seed in range(trials):
        candidate, baseline = draw(units, shift=effect, noise=noise, seed=seed)
        result = compare_paired(candidate, baseline, margin=9.0, lower_is_better=True, resamples=300, seed=seed)
        found += result.low > 0
    assert found / trials == pytest.approx(0.8, abs=0.08)


def test_mde_shrinks_with_the_root_of_units() -> None:
    small, large = compare(500, shift=0, noise=0.3), compare(50_000, shift=0, noise=0.3)
    assert small.mde / large.mde == pytest.approx(10, rel=0.1)
    assert large.mde == pytest.approx(2.8016 * large.standard_error, rel=1e-4)


def test_relative_log_loss_on_known_data() -> None:
    """The candidate's loss is exactly 2 % higher on every example: so is the ratio, with no uncertainty."""
    baseline = 0.1 + torch.rand(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = compare_paired(1.02 * baseline, baseline, margin=0.1, lower_is_better=True, relative=True)
    assert result.estimate == pytest.approx(2.0, rel=1e-9)
    assert result.low == pytest.approx(2.0, rel=1e-9)
    assert result.high == pytest.approx(2.0, rel=1e-9)
    assert result.verdict == "worse"


def test_relative_log_loss_of_two_models() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = 2 * torch.randn(20_000, generator=generator, dtype=torch.float64)
    labels = (torch.rand(20_000, generator=generator, dtype=torch.float64) < torch.sigmoid(truth)).long()
    noisy = truth + 0.5 * torch.randn(20_000, generator=generator, dtype=torch.float64)
    first, second = LogLoss(), LogLoss()
    first.update(truth, labels)
    second.update(noisy, labels)
    result = compare_paired(
        log_losses(truth, labels), log_losses(noisy, labels), margin=0.1, lower_is_better=True, relative=True
    )
    assert result.estimate == pytest.approx(100 * (first.compute() / second.compute() - 1), rel=1e-9)
    assert result.verdict == "better"
    assert result.low < result.estimate < result.high < 0


def test_relative_interval_covers() -> None:
    """True ratio 1.05; intervals of the ratio at 90 %."""
    covered = 0
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        baseline = -torch.log(torch.rand(80, generator=generator, dtype=torch.float64))
        candidate = 1.05 * baseline + 0.3 * torch.randn(80, generator=generator, dtype=torch.float64)
        result = compare_paired(
            candidate,
            baseline,
            relative=True,
            margin=1.0,
            lower_is_better=True,
            confidence=0.9,
            resamples=300,
            seed=seed,
        )
        covered += result.low <= 5.0 <= result.high
    assert covered / 400 == pytest.approx(0.9, abs=0.06)


@pytest.mark.parametrize(("users", "verdict"), [(20, "inconclusive"), (1_000, "inconclusive"), (10_000, "equivalent")])
def test_no_difference_at_all_is_as_much_evidence_as_there_are_users(users: int, verdict: str) -> None:
    """Hits of 3 users in 10, the same in both runs: of n users, 3.7 / n may differ unseen."""
    hits = (torch.arange(users) % 10 < 3).double()
    result = compare_paired(hits, hits, margin=1.0, lower_is_better=False, relative=True)
    assert result.verdict == verdict
    assert result.high == -result.low == pytest.approx(100 * (1 - 0.025 ** (1 / users)) / 0.3)
    assert result.mde > result.high
    grouped = compare_paired(
        hits, hits, margin=1.0, lower_is_better=False, relative=True, groups=torch.arange(users) // 10
    )
    assert grouped.high > result.high  # ten neighbours are one unit


def test_the_bound_of_unseen_differences_holds_as_often_as_it_says() -> None:
    """If as many hits are lost as the interval admits, a sample shows none of them once in 40 times, two-sided."""
    rate = bound_unseen(50, 0.95)
    draws = torch.rand(20_000, 50, generator=torch.Generator().manual_seed(0)) < rate
    assert float((~draws.any(1)).double().mean()) == pytest.approx(0.025, abs=0.004)


def test_zeros_alone_show_no_scale() -> None:
    zeros = torch.zeros(5_000)
    result = compare_paired(zeros, zeros, margin=0.1, lower_is_better=True)
    assert (result.estimate, result.verdict) == (0.0, "inconclusive")


def test_few_seeds_use_student() -> None:
    seeds = torch.tensor([0.801, 0.803, 0.802, 0.804, 0.800])
    result = compare_paired(seeds + torch.tensor([1, 2, 1, 2, 1]) * 1e-3, seeds, margin=0.0005, lower_is_better=False)
    assert (result.method, result.units, result.verdict) == ("student", 5, "better")
    difference = torch.tensor([1e-3, 2e-3, 1e-3, 2e-3, 1e-3], dtype=torch.float64)
    half = 2.7764451 * float(difference.std()) / math.sqrt(5)
    assert result.high == pytest.approx(float(difference.mean()) + half, rel=1e-4)


def test_line_reads_well() -> None:
    candidate, baseline = draw(64, shift=-0.1, noise=0.05)
    line = str(compare_paired(candidate, baseline, margin=0.5, lower_is_better=True, relative=True, metric="log loss"))
    assert line.startswith("log loss: better, -")
    for part in (" % [-", "95 % bca", "64 units", "margin 0.5 %", "MDE", "power 0.8"):
        assert part in line
    assert "\n" not in line


def test_result_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        compare(64, shift=0, noise=1).estimate = 1.0  # type: ignore[misc]


def test_bad_requests() -> None:
    a, b = torch.rand(10), torch.rand(10)
    with pytest.raises(ValueError, match="same units in the same order"):
        compare_paired(a, b[:9], margin=1, lower_is_better=True)
    with pytest.raises(ValueError, match="1 of 10 pairs"):
        compare_paired(torch.cat([a[:9], torch.tensor([math.nan])]), b, margin=1, lower_is_better=True)
    with pytest.raises(ValueError, match="margin"):
        compare_paired(a, b, margin=0, lower_is_better=True)
    with pytest.raises(ValueError, match="at least two"):
        compare_paired(a, b, margin=1, lower_is_better=True, groups=torch.zeros(10, dtype=torch.int64))
    with pytest.raises(ValueError, match="integer ids"):
        compare_paired(a, b, margin=1, lower_is_better=True, groups=torch.zeros(10))
    with pytest.raises(ValueError, match="positive one"):
        compare_paired(a, -b, margin=1, lower_is_better=True, relative=True)
    with pytest.raises(ValueError, match="confidence"):
        compare_paired(a, b, margin=1, lower_is_better=True, confidence=95)
    with pytest.raises(ValueError, match="resamples"):
        compare_paired(a, b, margin=1, lower_is_better=True, resamples=10)
    with pytest.raises(ValueError, match="method"):
        compare_paired(a, b, margin=1, lower_is_better=True, method="magic")  # type: ignore[arg-type]
