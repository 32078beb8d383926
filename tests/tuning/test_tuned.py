import errno
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loka.records import Interval
from loka.records.tuning import TunedUnit
from loka.report.render import load_runtime
from loka.tuning.tuned import Tuned, TuningReport

from .small import make_trained, placed, same, state_of, tune


def test_a_person_can_read_what_was_found() -> None:
    """Every number stands under what it is, whatever is missing; a chain says where it ends."""
    tuned = tune(make_trained()[0])
    record = msgspec.structs.replace(
        tuned.record,
        units=[
            TunedUnit("tower.0", ["tower.0", "tower.2"], "chain", 0.9, "as wide as it can be", speedup=Interval(1.5, 1.4, 1.6), metric_change=Interval(0.0001, 0, 0.0002)),
            TunedUnit("head", ["head"], "high", 0.1, "it is a prediction layer", alarms=["column 0 has a mean of 1975"]),
            TunedUnit("items", [], "int8", 0.0, "a quarter of the bytes"),
        ],
        notes=["too early"],
    )  # fmt: skip
    shown = str(Tuned(tuned.model, record)).splitlines()
    head, chain, wide, _, kept, alarm, _, table = shown[2:10]
    assert chain.split() == ["tower.0", "to", ".2", "(2)", "chain", "90.0%", "1.50x", "+0.0100%"]
    assert chain.index("chain") == head.index("runs as")
    for value, name in (("90.0%", "FLOPs"), ("1.50x", "speed"), ("+0.0100%", "measured")):
        assert chain.index(value) + len(value) == head.index(name) + len(name)
    assert [wide, kept, table] == [f"      {why}" for why in ("as wide as it can be", "it is a prediction layer", "a quarter of the bytes")]  # fmt: skip
    assert alarm == "      alarm: column 0 has a mean of 1975"
    assert shown[-1] == "note: too early"
    empty = msgspec.structs.replace(record, units=[])  # a model without linears: no table either
    assert "runs as" not in str(Tuned(tuned.model, empty))


def test_without_the_charting_library_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for before the work; and what `save` can write it has written when it says so."""
    model = make_trained()[0]
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    load_runtime.cache_clear()
    with pytest.raises(ValueError, match="charting library"):
        tune(model, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()
    tuned = tune(model)
    with pytest.raises(ValueError, match="charting library"):
        tuned.save(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} >= {"plan.json", "tuning.json"}


def test_a_result_that_cannot_be_written_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make_trained()
    before = state_of(model, optimizer)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "report.html"))

    with monkeypatch.context() as patched:
        patched.setattr(TuningReport, "to_html", fail)
        with pytest.raises(OSError, match="No space left"):
            tune(model, out=tmp_path)
    assert same(state_of(model, optimizer), before)
    assert not placed(model)
    again = tune(model, out=tmp_path)  # the same call goes on from what was measured
    assert placed(model)
    assert any("resumed" in note for note in again.record.notes)
