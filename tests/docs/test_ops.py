"""The table of ops in the manual has every op, with its backends."""

import re
from pathlib import Path

from loka.kernels import BACKENDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "kernels.md"


def test_every_op_is_in_the_table_with_its_backends() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", PAGE.read_text(), re.M))
    assert set(rows) == set(BACKENDS)
    for op, told in rows.items():
        assert tuple(re.sub(r" \([^)]*\)", "", told).split(", ")) == BACKENDS[op]
