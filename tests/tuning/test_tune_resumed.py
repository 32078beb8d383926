"""tune with out=, cut short and called again: it goes on from its own evidence and from nobody else's; a stop leaves the model as it was."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor, nn

import loka
from loka.records import load
from loka.records.tuning import Tuning
from loka.tuning.tuned import keep_earlier

from .small import BATCHES, WIDTH, loss, make_trained, placed, same, state_of, tune


class Counted:
    """The loss, counting its calls, that stops at one of them."""

    def __init__(self, stop: int = -1, error: BaseException | None = None) -> None:
        self.count, self.stop, self.error = 0, stop, error

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        if self.count == self.stop and self.error is not None:
            raise self.error
        return loss(output, target)


@pytest.mark.parametrize("options", [{}, {"architecture": True}, {"target": "serve"}], ids=str)
def test_a_stop_anywhere_leaves_the_model_as_it_was(options: dict[str, Any]) -> None:
    whole = Counted()
    tune(make_trained()[0], given=whole, **options)
    model, optimizer = make_trained()
    before = state_of(model, optimizer)
    for share, error in [(0.0, KeyboardInterrupt()), (0.3, RuntimeError("no memory")), (0.6, KeyboardInterrupt()), (1.0, OSError("gone"))]:  # fmt: skip
        stop = max(1, round(share * whole.count))
        with pytest.raises(type(error)):
            tune(model, given=Counted(stop, error), **options)
        assert same(state_of(model, optimizer), before), f"stopped at call {stop} of {whole.count}"
        assert not placed(model)
        assert not loka.mods.applied_to(model)


def test_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    whole = Counted()
    expected = tune(make_trained()[0], given=whole)
    model, _ = make_trained()
    cut = Counted(whole.count - 4, KeyboardInterrupt())  # in the last batches: what was measured before is known
    with pytest.raises(KeyboardInterrupt):
        tune(model, given=cut, out=tmp_path)
    assert (tmp_path / "evidence.json").exists()
    again = Counted()
    tuned = tune(model, given=again, out=tmp_path)
    assert again.count < whole.count
    assert "resumed from the evidence of an earlier call" in tuned.record.notes
    assert tuned.record.units == expected.record.units
    assert tuned.record.metric_change == expected.record.metric_change
    assert load(tmp_path / "tuning.json", Tuning) == tuned.record
    assert loka.Plan.load(tmp_path / "plan.json").units == tuned.plan.units
    assert (tmp_path / "conversion.json").exists()


def test_evidence_of_other_weights_is_not_used(tmp_path: Path) -> None:
    """The same architecture, trained further: speeds would hold, losses do not."""
    tune(make_trained()[0], out=tmp_path)
    expected = tune(make_trained(60)[0])
    tuned = tune(make_trained(60)[0], out=tmp_path)
    assert tuned.record.units == expected.record.units


def test_evidence_of_other_scales_is_not_used(tmp_path: Path) -> None:
    """The batches that are held out are the same, and those that choose have other magnitudes, which scales come from."""
    model, _ = make_trained()
    tune(model, out=tmp_path).revert()
    larger = [(8 * x, y) for x, y in BATCHES[:4]] + BATCHES[4:]
    expected = tune(model, larger)
    expected.revert()
    tuned = tune(model, larger, out=tmp_path)
    assert tuned.record.units == expected.record.units


def test_a_call_that_converts_nothing_leaves_no_conversion_of_an_earlier_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, 64))  # no rewrite changes it
    batches = [(x, x) for x, _ in BATCHES]
    squares = lambda output, target: (output - target).square().mean(1)  # noqa: E731
    tune(model, batches, squares, margin=0.5, out=tmp_path).revert()
    assert (tmp_path / "conversion.json").exists()
    tuned = tune(model, batches, squares, margin=1e-9, out=tmp_path)
    assert tuned.conversion is None
    assert not (tmp_path / "conversion.json").exists()


@pytest.mark.parametrize("other", [{"margin": 0.5}, {"target": "serve"}, {"seconds": 11.0}, "weights"], ids=str)
def test_the_result_of_another_call_is_kept(tmp_path: Path, other: Any) -> None:
    first = tune(make_trained()[0], out=tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.startswith("evidence")}
    again = tune(make_trained()[0], out=tmp_path)  # the same call: nothing to keep
    assert again.record.arguments == first.record.arguments
    assert not (tmp_path / "earlier-1").exists()
    files = {name: (tmp_path / name).read_bytes() for name in files}
    tuned = (
        tune(make_trained(60)[0], out=tmp_path)
        if other == "weights"
        else tune(make_trained()[0], out=tmp_path, **other)
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "earlier-1").iterdir()} == files
    assert f"moved from {tmp_path} to {tmp_path / 'earlier-1'}" in tuned.record.notes[-1]
    assert load(tmp_path / "tuning.json", Tuning) == tuned.record
    back = tune(make_trained()[0], out=tmp_path)
    assert load(tmp_path / "earlier-2" / "tuning.json", Tuning) == tuned.record
    assert "resumed from the evidence of an earlier call" in back.record.notes


@pytest.mark.parametrize("moved", range(4))
def test_a_move_that_was_killed_is_completed(tmp_path: Path, moved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tune(make_trained()[0], out=tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.startswith("evidence")}
    other = msgspec.structs.replace(first.record, arguments={})
    rename, renamed = Path.rename, []

    def kill(path: Path, target: Path) -> Path:
        if len(renamed) == moved:
            raise KeyboardInterrupt
        renamed.append(path)
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", kill)
        with pytest.raises(KeyboardInterrupt):
            keep_earlier(tmp_path, other)
    assert keep_earlier(tmp_path, other) == tmp_path / "earlier-1"
    assert {path.name: path.read_bytes() for path in (tmp_path / "earlier-1").iterdir()} == files
    assert not (tmp_path / "earlier-2").exists()


def test_evidence_of_another_model_is_set_aside(tmp_path: Path) -> None:
    tune(make_trained()[0], out=tmp_path)
    old = (tmp_path / "evidence.json").read_text()
    model = nn.Sequential(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, 1), nn.Flatten(0))
    tuned = tune(model, out=tmp_path)
    assert [path.read_text() for path in tmp_path.glob("evidence-*.json")] == [old]
    assert not any("earlier call" in note for note in tuned.record.notes)


@pytest.mark.parametrize("text", ['{"fingerprint": "', "[]", "{}", '{"fingerprint": "x", "known": 3}', ""])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "evidence.json").write_text(text)
    model, optimizer = make_trained(2)
    before = state_of(model, optimizer)
    with pytest.raises(ValueError, match=r"evidence.json is damaged: .*hint: another out="):
        tune(model, out=tmp_path)
    assert (tmp_path / "evidence.json").read_text() == text
    assert same(state_of(model, optimizer), before)
