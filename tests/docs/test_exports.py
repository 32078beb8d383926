"""Every exported name says what it takes, what it gives, and how it is called."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import loka

ROOT = Path(__file__).resolve().parents[2]
ROOMS = sorted(file.parent.name for file in Path(loka.__file__).parent.glob("*/__init__.py"))


def exported(room: str) -> dict[str, Any]:
    """Functions and classes that a room has itself; records, whose fields carry comments, and exceptions aside."""
    module = importlib.import_module(f"loka.{room}")
    found = {name: getattr(module, name) for name in module.__all__}
    found = {name: each for name, each in found.items() if getattr(each, "__module__", "").startswith(module.__name__)}
    return {
        name: each
        for name, each in found.items()
        if inspect.isfunction(each) or (inspect.isclass(each) and not issubclass(each, msgspec.Struct | BaseException))
    }


# Arguments that are no part of the interface: state of a scheduler and of a clock, tags of records.
OWN = {"Entry": {"state", "trial"}, "StepClock": {"_step", "_calls"}}


def described(text: str) -> set[str]:
    """The names in the Args section of a docstring."""
    section = re.search(r"^ *Args:\n(.*?)(?=\n\n|\Z)", inspect.cleandoc(text), re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^    (\S[^:]*):", section[1], re.MULTILINE) if section else []
    return {name.strip(" *") for line in lines for name in line.split(",")}


def lacking(each: Any) -> list[str]:
    text = each.__doc__ or ""
    signature = inspect.signature(each)
    wanted = ["Example:"]
    if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
        wanted.append("Args:")
    if inspect.isfunction(each) and signature.return_annotation not in (None, "None"):
        wanted.append("Returns:")
    missing = [part for part in wanted if part not in text]
    if "Args:" in wanted and not missing:
        missing = sorted(set(signature.parameters) - described(text) - OWN.get(each.__name__, set()))
    return missing


@pytest.mark.parametrize("room", ROOMS)
def test_exported_names_are_documented(room: str) -> None:
    found = exported(room)
    assert found
    assert {name: parts for name, each in found.items() if (parts := lacking(each))} == {}


def test_what_is_lacking_is_seen() -> None:
    def bare(x: int) -> int:
        """Only a line."""
        return x

    assert lacking(bare) == ["Example:", "Args:", "Returns:"]


def test_an_argument_that_is_not_described_is_seen() -> None:
    def grown(x: int, *, scale: float = 1.0, shift: float = 0.0) -> float:
        """Scale.

        Args:
            x, scale: operands, see
                shift: not an argument here.

        Returns:
            The product.

        Example:
            >>> grown(1)
        """
        return x * scale + shift

    assert lacking(grown) == ["shift"]


def test_every_exported_name_is_in_the_reference() -> None:
    """A page shows a module's own names, and a room's exports where the room imports them when it is imported."""
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"(?m)^::: (\S+)$", text))
    missing = [
        f"loka.{room}.{name}"
        for room in ROOMS
        if room != "cli"
        for name, each in exported(room).items()
        if not {each.__module__, f"loka.{room}.{name}"} & shown
        and (f"loka.{room}" not in shown or "__getattr__" in vars(importlib.import_module(f"loka.{room}")))
    ]
    assert missing == []
