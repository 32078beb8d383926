"""The tables of ops and of mods in the manual have every one of them."""

import re
from pathlib import Path

from loka import mods
from loka.kernels import BACKENDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "kernels.md"


def test_every_op_is_in_the_table_with_its_backends() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", PAGE.read_text(), re.M))
    assert set(rows) == set(BACKENDS)
    for op, told in rows.items():
        assert tuple(re.sub(r" \([^)]*\)", "", told).split(", ")) == BACKENDS[op]


def test_every_mod_is_in_the_table_with_its_effect() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", (PAGE.parents[1] / "mods.md").read_text(), re.M))
    assert rows == {name: mods.find(name).effect for name in mods.names()}
