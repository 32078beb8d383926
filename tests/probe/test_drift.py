"""A planted change is found at its site, operand and step; noise is not; and a verdict changes when it should."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from loka import records
from loka.probe import Probe
from loka.probe.drift import features_of, mean_level, spans_of
from loka.probe.statistics import Statistics
from loka.probe.window import MAX_MARKS
from loka.records import DriftReport

WIDTH = 64


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calm, self.moving = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        out: Tensor = self.calm(x) + self.moving(z)
        return out


def run(steps: int, scale: object, **options: object) -> tuple[Two, Probe]:
    """Train nothing; `scale(step)` multiplies what one of the two linears is given."""
    torch.manual_seed(0)
    model = Two()
    probe = Probe(model, every=1, rows=64, **{"window": 10, **options})
    for step in range(steps):
        out = model(torch.randn(64, WIDTH), torch.randn(64, WIDTH) * scale(step))  # type: ignore[operator]
        (out * torch.randn_like(out)).sum().backward()
        probe.step()
    return model, probe


def test_noise_is_not_drift() -> None:
    _, probe = run(60, lambda step: 1.0)
    report = probe.drift()
    assert report.moves == []
    assert report.sites == 2
    assert not report.judged


def test_a_jump_is_found_where_and_when_it_happened() -> None:
    _, probe = run(60, lambda step: 1.0 if step < 30 else 4.0)
    moves = probe.drift().moves
    assert {(m.site, m.role) for m in moves} == {("moving", "x")}
    assert {m.feature for m in moves} == {"absmax", "std", "histogram"}  # nothing about its shape
    assert {(m.since, m.step) for m in moves} == {(0, 30)}
    (std,) = [m for m in moves if m.feature == "std"]
    assert std.after - std.before == pytest.approx(2.0, abs=0.1)
    assert std.sigmas is not None
    assert std.sigmas > 20


def test_a_slow_change_is_dated_more_than_once() -> None:
    _, probe = run(100, lambda step: 2.0 ** (step / 25))
    steps = [m.step for m in probe.drift().moves if m.feature == "std"]
    assert len(steps) >= 4
    assert steps == sorted(steps)


def test_a_tail_that_appears_is_a_tail_and_not_a_scale() -> None:
    def spike(step: int) -> Tensor:
        return torch.where(torch.rand(64, WIDTH) < (0.0 if step < 30 else 0.01), 100.0, 1.0)

    _, probe = run(60, spike)
    features = {m.feature for m in probe.drift().moves if m.site == "moving"}
    assert {"absmax", "tail", "kurtosis"} <= features
    assert "histogram" not in features


def test_the_verdict_is_asked_on_the_first_and_on_the_latest_rows() -> None:
    _, probe = run(60, lambda step: 1.0 if step < 30 else 4.0)
    seen: list[tuple[str, float]] = []

    def judge(watch: object) -> str:
        seen.append((watch.name, float(watch.reservoir.x.std())))  # type: ignore[attr-defined]
        return "loud" if seen[-1][1] > 2 else "quiet"

    report = probe.drift(judge)
    assert [name for name, _ in seen] == ["moving", "moving"]  # what did not move is not asked about
    assert [round(std) for _, std in seen] == [1, 4]
    (change,) = report.changes
    assert (change.site, change.before, change.after) == ("moving", "quiet", "loud")


def test_an_evaluation_is_a_judge() -> None:
    """Rows of very different sizes appear: one scale per tensor no longer serves them, and the verdict says so."""
    _, probe = run(40, lambda step: 1.0 if step < 20 else torch.exp(5 * torch.randn(64, 1)))
    options = {"sources": ("rows",), "judged_on": ("rows",), "samples": 3, "gate": False}
    report = probe.drift(recipes=("tensorwise",), **options)
    (change,) = [c for c in report.changes if c.site == "moving"]
    assert "fprop not measured" in change.before  # a small error, of whose effect nothing is known
    assert "fprop unsafe" in change.after
    assert not [c for c in probe.drift(recipes=("rowwise",), **options).changes if "fprop unsafe" in c.after]


def test_too_early_is_said() -> None:
    _, probe = run(12, lambda step: 1.0)
    report = probe.drift()
    assert report.too_short == ["calm", "moving"]
    with pytest.raises(ValueError, match="at least every=1"):
        run(1, lambda step: 1.0, window=0)
    with pytest.raises(ValueError, match="no window"):
        Probe(Two(), every=1).watch("calm").at("first")


def test_long_runs_keep_their_history_coarsely() -> None:
    _, probe = run(200, lambda step: 1.0 if step < 150 else 4.0, window=4)
    windows = probe.watch("moving").learned.windows  # type: ignore[union-attr]
    assert len(windows.marks) <= MAX_MARKS
    assert windows.length == 16
    spans = list(spans_of(probe.watch("moving"), "x"))
    assert sum(len(span.looks) for span in spans) == 200
    assert {m.step for m in probe.drift().moves if m.feature == "std"} <= set(range(144, 170))


def test_history_survives_saving_and_merges(tmp_path: Path) -> None:
    model, probe = run(40, lambda step: 1.0 if step < 20 else 4.0)
    again = Probe(model, every=1, rows=64, window=10)
    again.load_state_dict(probe.state_dict())
    assert again.drift() == probe.drift()
    again.merge(probe.state_dict())
    moved = {(m.site, m.role, m.feature, m.step) for m in again.drift().moves}
    assert moved == {(m.site, m.role, m.feature, m.step) for m in probe.drift().moves}
    records.save(probe.drift(), tmp_path / "drift.json")
    assert records.load(tmp_path / "drift.json", DriftReport) == probe.drift()
    other = Probe(model, every=1, rows=64, window=10)
    with pytest.raises(ValueError, match="step together"):
        other.merge(probe.state_dict())


def test_features_are_what_their_names_say() -> None:
    values = torch.tensor([[0.0, 2.0, -2.0, 4.0], [0.0, -4.0, 8.0, -8.0]])
    statistics = Statistics(4, torch.device("cpu"))
    statistics.update(values, 7)
    absmax, std, tail, kurtosis, zeros = features_of(statistics.looks)[0].tolist()
    exact = values.double().flatten()
    spread = float(exact.std(correction=0))
    assert absmax == 3
    assert std == pytest.approx(torch.tensor(spread).log2().item(), abs=1e-6)
    assert tail == pytest.approx(absmax - std)
    fourth = float(((exact - exact.mean()) / spread).pow(4).mean())
    assert 2**kurtosis == pytest.approx(fourth)
    assert zeros == 0.25
    level = mean_level(statistics.raw_bins)
    assert level == pytest.approx((1 + 1 + 2 + 2 + 3 + 3) / 6, abs=0.1)
    empty = Statistics(4, torch.device("cpu"))
    empty.update(torch.zeros(2, 4))
    assert mean_level(empty.raw_bins) is None
    assert features_of(empty.looks)[0].isnan().tolist() == [True, True, True, True, False]
