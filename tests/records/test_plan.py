"""What a plan's parts refuse, and that committed plans are read."""

import json
import math
from pathlib import Path

import pytest

from loka.records import Plan, RecordError, SitePlan, from_json, to_json
from loka.records.tuning import Tuning

from .examples import example_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


def test_a_site_cannot_be_more_than_the_whole() -> None:
    for share in (-0.1, 5.0, math.nan):
        with pytest.raises(ValueError, match=r"head: flops_share is .*, expected a share from 0 to 1"):
            SitePlan("head", 1, 1, 1, share, [])


def test_an_older_plan_is_refused_also_inside_another_record() -> None:
    document = {**json.loads(to_json(example_of(Plan))), "schema": 1}
    for schema in (0, -1):  # no version wrote that
        with pytest.raises(RecordError, match=f"field `schema` is {schema}, this loka reads 2; make it again"):
            from_json(json.dumps({**document, "schema": schema}), Plan)
    with pytest.raises(RecordError, match=r"old\.json: field `schema` is 1, this loka reads 2; make it again"):
        from_json(json.dumps(document), Plan, source="old.json")
    whole = json.loads(to_json(example_of(Tuning)))
    with pytest.raises(RecordError, match=r"tuning\.json: field `?\$\.plan`?: schema 1 of Plan is not 2"):
        from_json(json.dumps({**whole, "plan": document}), Tuning, source="tuning.json")


@pytest.mark.parametrize("name", ["tune_zoo", "tune_zoo_wukong", "tune_zoo_serve", "tune_zoo_dlrm"])
def test_committed_plans_are_read(name: str) -> None:
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    assert rows
    for row in rows:
        record = from_json(json.dumps(row["record"]), Tuning)
        assert len(record.plan.units) == len(row["record"]["plan"]["units"])
        lines = str(record.plan).split("\n")
        assert len([line for line in lines if line.startswith("unit ")]) == len(record.plan.units)
        chained = [name for unit in record.plan.units for name in unit.linears]
        assert all(any(name in line for line in lines) for name in chained)
        assert not any(line.startswith(f"{name}  ") for line in lines for name in chained)  # its unit says what it runs
        assert f"{record.plan.low_precision_share:.1%} of" in str(record.plan)
