"""What a plan's parts refuse, and what becomes of plan files of an older schema."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from loka.records import Plan, RecordError, SitePlan, from_json, to_json
from loka.records.conversion import Conversion
from loka.records.tuning import Tuning

from .examples import example_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


def test_a_site_cannot_be_more_than_the_whole() -> None:
    for share in (-0.1, 5.0, math.nan):
        with pytest.raises(ValueError, match=r"head: flops_share is .*, expected a share from 0 to 1"):
            SitePlan("head", 1, 1, 1, share, [])


def old_plan(**link: Any) -> tuple[Plan, dict[str, Any]]:
    """A plan, and the same as schema 1 wrote it: with `functions` instead of `callers`, and its seal."""
    plan = example_of(Plan)
    document = json.loads(to_json(plan))
    for unit in document["units"]:
        for each in unit["links"]:
            each.update(callers=[], called=False)
    plan = from_json(json.dumps({**document, "seal": None}), Plan)
    document = json.loads(to_json(plan))
    document["schema"] = 1
    for unit in document["units"]:
        for each in unit["links"]:
            del each["callers"], each["called"]
            each.update({"functions": [], **link})
    return plan, document


def test_an_older_plan_is_read_where_nothing_of_it_is_lost() -> None:
    plan, document = old_plan()
    found = from_json(json.dumps(document), Plan)
    assert found == plan
    assert json.loads(to_json(found))["schema"] == 2
    for schema in (0, -1):  # no version wrote that
        with pytest.raises(RecordError, match=f"field `schema` is {schema}, this loka reads 2; make it again"):
            from_json(json.dumps({**document, "schema": schema}), Plan)
    document["seal"]["sha256"] = hashlib.sha256(b"another").hexdigest()
    with pytest.raises(RecordError, match="does not match its seal"):
        from_json(json.dumps(document), Plan)


def test_an_older_plan_that_cannot_be_read_says_what_to_do() -> None:
    _, document = old_plan(functions=["tower:act"])
    said = r"old\.json: field `schema` is 1, this loka reads 2; it does not say which modules call .*tower:act.*hint: make it again, with loka\.tune"
    with pytest.raises(RecordError, match=said):
        from_json(json.dumps(document), Plan, source="old.json")
    whole = json.loads(to_json(example_of(Tuning)))
    with pytest.raises(RecordError, match=r"tuning\.json\.plan: field `schema` is 1, this loka reads 2; .*loka\.tune"):
        from_json(json.dumps({**whole, "plan": document}), Tuning, source="tuning.json")


@pytest.mark.parametrize("units", [None, 3, "text", [3], [{"links": 3}], [{"links": [3]}]], ids=str)
def test_an_older_plan_that_is_damaged_is_named(units: Any) -> None:
    _, document = old_plan()
    for kind in (Plan, Conversion):
        with pytest.raises(RecordError):
            from_json(json.dumps({**document, "kind": kind.__struct_config__.tag, "units": units}), kind)


@pytest.mark.parametrize("name", ["tune_zoo", "tune_zoo_wukong", "tune_zoo_serve", "tune_zoo_dlrm"])
def test_committed_plans_are_read(name: str) -> None:
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    assert rows
    for row in rows:
        record = from_json(json.dumps(row["record"]), Tuning)
        assert len(record.plan.units) == len(row["record"]["plan"]["units"])
        lines = str(record.plan).split("\n")
        assert all(f"{name}  in the unit {unit.name}" in lines for unit in record.plan.units for name in unit.linears if name in {s.site for s in record.plan.sites})  # fmt: skip
        assert len([line for line in lines if line.startswith("unit ")]) == len(record.plan.units)
        assert f"{record.plan.low_precision_share:.1%} of" in str(record.plan)
