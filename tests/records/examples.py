"""Records of every kind, made from their own type descriptions: a new field or a new kind is tested the day it is added."""

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

import loka.records
from loka.records import Choice, Interval, LinkPlan, Plan, Record, SitePlan, UnitPlan

KINDS: list[type[Record]] = sorted(
    {v for v in vars(loka.records).values() if isinstance(v, type) and issubclass(v, Record) and v is not Record},
    key=lambda kind: kind.__name__,
)

COMPUTED = ("schema", "seal")  # they follow from the rest

finite = st.floats(allow_nan=False, allow_infinity=False)


def strategy_for(type_: inspect.Type) -> st.SearchStrategy[Any]:
    """Every value of a field's type; structs with rules of their own are listed by hand."""
    match type_:
        case inspect.StructType(cls=cls) if cls is Interval:
            return st.lists(finite, min_size=3, max_size=3).map(sorted).map(_interval)
        case inspect.StructType(cls=cls, fields=fields):
            free = {f.name: strategy_for(f.type) for f in fields if f.name not in COMPUTED}
            if cls is Choice:  # both operands or neither
                return st.one_of([st.builds(cls, **{**free, "a": both, "b": both}) for both in (st.none(), st.text())])
            if cls is SitePlan:
                free["flops_share"] = st.floats(0, 1)
            if cls is UnitPlan:
                links = next(f.type for f in fields if f.name == "links")
                free["links"] = st.lists(strategy_for(links.item_type), min_size=1, max_size=2).map(_joined)
            if cls is Plan:
                free["units"] = free["units"].map(_apart)
                for kind in ("tables", "collectives"):
                    free[kind] = free[kind].map(lambda parts: list({part.name: part for part in parts}.values()))
            return st.builds(cls, **free)
        case inspect.IntType():
            return st.integers()
        case inspect.FloatType():
            return finite
        case inspect.StrType():
            return st.text(max_size=8)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.UnionType(types=types):
            return st.one_of([strategy_for(t) for t in types])
        case inspect.ListType(item_type=item):
            return st.lists(strategy_for(item), max_size=2)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(strategy_for(key), strategy_for(value), max_size=2)
    raise NotImplementedError(f"no strategy for {type_}: add one")


def _interval(ends: list[float]) -> Interval:
    return Interval(low=ends[0], value=ends[1], high=ends[2])


def _joined(links: list[LinkPlan]) -> list[LinkPlan]:
    """Every linear takes as many features as the one before it gives."""
    widths = [links[0].k, *(link.n for link in links)]
    return [msgspec.structs.replace(link, k=width) for link, width in zip(links, widths, strict=False)]


def _apart(units: list[UnitPlan]) -> list[UnitPlan]:
    """Every linear is in one unit, and none is also told to run alone."""
    return [
        msgspec.structs.replace(
            unit,
            links=[
                msgspec.structs.replace(link, linear=f"linear {place} of unit {number}")
                for place, link in enumerate(unit.links)
            ],
        )
        for number, unit in enumerate(units)
    ]


def records(kind: type[Record]) -> st.SearchStrategy[Record]:
    return strategy_for(inspect.type_info(kind))


def example_of(kind: type[Record]) -> Record:
    """One full record: every optional field set, every list of two."""
    return _fill(inspect.type_info(kind), 1)


def _fill(type_: inspect.Type, number: int) -> Any:
    match type_:
        case inspect.StructType(cls=cls, fields=fields):
            filled = {f.name: _fill(f.type, number) for f in fields if f.name not in COMPUTED}
            if cls is UnitPlan:
                filled["links"] = _joined(filled["links"])
            if cls is Plan:
                filled["units"] = _apart(filled["units"])
            return cls(**filled)
        case inspect.IntType():
            return number
        case inspect.FloatType():
            return number / 4
        case inspect.StrType():
            return f"text {number}"
        case inspect.BoolType():
            return True
        case inspect.LiteralType(values=values):
            return values[number % len(values)]
        case inspect.UnionType(types=types):
            return _fill(next(t for t in types if not isinstance(t, inspect.NoneType)), number)
        case inspect.ListType(item_type=item):
            return [_fill(item, 1), _fill(item, 2)]
        case inspect.DictType(key_type=key, value_type=value):
            return {_fill(key, n): _fill(value, n) for n in (1, 2)}
    raise NotImplementedError(f"no example for {type_}: add one")
