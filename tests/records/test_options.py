"""`check_options`: an option of the wrong type is named with what it should be."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from loka.records.options import check_options


@dataclass(frozen=True)
class Style:
    bias: bool = True


@dataclass(frozen=True)
class Options:
    rows: int = 10
    share: float = 0.5
    stress: bool = False
    rank: int | None = None
    top: tuple[int, ...] = ()
    kind: Literal["a", "b"] = "a"
    style: Style = field(default_factory=Style)


def test_what_fits_passes() -> None:
    given = {"rows": 3, "share": 1, "stress": True, "rank": None, "top": (4, 2), "kind": "b", "style": Style(False)}
    check_options(Options, given, "it")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rows", "x", "expected `int`, got `str`"),
        ("rows", 2.5, "expected `int`, got `float`"),
        ("rows", True, "expected `int`, got `bool`"),
        ("share", "half", "expected `float`, got `str`"),
        ("stress", 1, "expected `bool`, got `int`"),
        ("rank", "x", "expected `int | null`, got `str`"),
        ("top", 3, "expected a list, got `int`"),
        ("top", ("a",), "expected `int`, got `str`"),
        ("kind", "c", "invalid enum value 'c'"),
        ("style", {"bias": 1}, "expected `Style`, got `dict`"),
    ],
)
def test_what_does_not_fit_is_named(name: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"^option {name} of it is ") as caught:
        check_options(Options, {name: value}, "it")
    assert said in str(caught.value)
