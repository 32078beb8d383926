"""A plan file that was damaged or edited is refused with a clear message, or means exactly what it meant."""

import json
import random
from collections import Counter
from typing import Any

import pytest

from loka.dispatch import Policy, make_plan
from loka.dispatch.budget import spend
from loka.records import LinkPlan, Plan, RecordError, UnitPlan, from_json, load, save, to_json

from .evidence import candidate, interval, report, site

MUTANTS = 1000


def plan() -> Plan:
    import msgspec

    sites = [
        msgspec.structs.replace(
            site(f"layers.{i}.linear", *(candidate(gemm=g, recipe=r, error=0.01 * (i + 1)) for g in ("fprop", "dgrad") for r in ("tensorwise", "rowwise"))),
            metric_change=interval(0.0001 * i, 0.00005),
        )
        for i in range(4)
    ]  # fmt: skip
    evidence = report(*sites)
    made = make_plan(evidence, Policy(min_speedup=None, overrides={"*.3.*": "high"}))
    links = [
        LinkPlan(linear="tower.0", k=64, n=96, activation="relu", passed=["tower.1"]),
        LinkPlan(linear="tower.2", k=96, n=64),
    ]
    unit = UnitPlan(name="tower.0", links=links, reason="asked for")
    return msgspec.structs.replace(spend(evidence, made, 0.001), units=[unit], mods=["no_bias"])


def damage_bytes(data: bytes, dice: random.Random) -> bytes:
    """A flipped bit, a byte changed, lost or doubled, a piece lost, doubled or moved, the end cut off."""
    where, to = sorted(dice.randrange(len(data)) for _ in range(2))
    other = dice.randrange(len(data))
    return dice.choice(
        [
            data[:where] + bytes([data[where] ^ (1 << dice.randrange(8))]) + data[where + 1 :],
            data[:where] + bytes([dice.randrange(256)]) + data[where + 1 :],
            data[:where] + bytes([dice.choice(b"0123456789")]) + data[where + 1 :],
            data[:where] + data[where + 1 :],
            data[:where] + data[where : where + 1] + data[where:],
            data[:where] + data[to:],
            data[:to] + data[where:to] + data[to:],
            data[:where] + data[other : other + 20] + data[where:],
            data[:where],
        ]
    )


def edit_values(data: bytes, dice: random.Random) -> bytes:
    """What a person or a script might do: valid JSON with another value, key, order, or without a field."""
    document: Any = json.loads(data)
    nodes: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            nodes.append((value, key))
            if isinstance(value[key], dict | list):
                collect(value[key])

    collect(document)
    container, key = dice.choice(nodes)
    change = dice.randrange(6)
    if change == 0:
        del container[key]
    elif change == 1:
        container[key] = dice.choice([None, True, 0, -1, 0.5, "", "e4m3:row", [], {}])
    elif change == 2 and isinstance(container[key], int | float):
        container[key] = container[key] + dice.choice([1, -1, 0.25])
    elif change == 3 and isinstance(container[key], str):
        container[key] += "x"
    elif change == 4 and isinstance(container, dict):
        container["extra"] = container.pop(key)
    else:
        other, place = dice.choice(nodes)
        if place in other if isinstance(other, dict) else place < len(other):
            container[key] = other[place]
    return json.dumps(document, default=str).encode()


def read(data: bytes) -> Plan | None:
    """The plan, or None where it was refused with a message that names the file."""
    try:
        return from_json(data, Plan, source="plan.json")
    except RecordError as error:  # anything else is a failure of the test
        message = str(error)
    assert message.startswith("plan.json: ")
    assert len(message) > len("plan.json: ") + 10
    return None


@pytest.mark.parametrize("mutate", [damage_bytes, edit_values])
def test_mutants_are_refused_or_mean_the_same(mutate: Any, tmp_path: Any) -> None:
    original, dice = plan(), random.Random(11)
    save(original, tmp_path / "plan.json")
    data = (tmp_path / "plan.json").read_bytes()
    outcomes: Counter[str] = Counter()
    for _ in range(MUTANTS):
        mutant = data
        for _ in range(dice.randint(1, 3)):
            try:
                mutant = mutate(mutant, dice) or mutant
            except (ValueError, RecursionError):
                break
        found = read(mutant)
        if found is not None and b'"seal"' in mutant:  # an edit without a seal is meant
            assert found == original
        outcomes["same" if found is not None else "refused"] += 1
    assert outcomes["refused"] > 0.8 * MUTANTS, outcomes
    assert outcomes["same"] > 0, outcomes


def test_a_changed_number_is_refused_with_a_hint(tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    save(plan(), path)
    path.write_text(path.read_text().replace('"max_error": 0.2', '"max_error": 0.9'))
    with pytest.raises(RecordError, match=r"does not match its seal.*delete its `seal`"):
        load(path, Plan)


def test_an_edit_is_accepted_once_its_seal_is_removed() -> None:
    document = json.loads(to_json(plan()))
    document["max_error"] = 0.9
    del document["seal"]
    edited = from_json(json.dumps(document), Plan)
    assert edited.max_error == 0.9
    assert from_json(to_json(edited), Plan) == edited  # sealed anew


def test_plans_from_before_there_were_seals_load() -> None:
    document = json.loads(to_json(plan()))
    for name in ("seal", "units", "mods", "weights", "max_metric_change", "expected_metric_change"):
        document.pop(name)
    for planned in document["sites"]:
        for choice in planned["choices"]:
            choice.pop("speed_source")
            choice.pop("expected_microseconds")
    assert from_json(json.dumps(document), Plan).sites == plan().sites


def test_a_field_added_later_breaks_no_seal() -> None:
    document = json.loads(to_json(plan()))
    assert document["weights"] is None
    del document["weights"]  # as a file from before the field existed
    assert from_json(json.dumps(document), Plan) == plan()
