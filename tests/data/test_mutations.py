"""Every mutation of a raw file either loads or names what is wrong; the raw files stay as they are, and no cache is left."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loka.data import DataError, load, load_sequences

from . import raw

CASES: dict[str, tuple[Callable[[Path], Path], Callable[..., object], list[str]]] = {
    "ml-1m": (lambda p: raw.write_movielens(p, ratings=400), load, ["ratings.dat", "users.dat", "movies.dat"]),
    "census-income-kdd": (
        lambda p: raw.write_census(p, train=60, test=30),
        load,
        ["census-income.data.gz", "census-income.test.gz"],
    ),
    "criteo": (
        lambda p: raw.write_criteo(p, rows={"train": 60, "dev": 20, "test": 20}),
        load,
        ["sample_train.tsv", "sample_test.tsv"],
    ),
    "amazon-2018-scientific": (
        raw.write_amazon,
        load_sequences,
        ["Toys.inter.json", "Toys.item.json", "Toys.index.rqvae.json"],
    ),
    "complete-journey": (
        lambda p: raw.write_journey(p, baskets=200),
        load,
        ["transactions.parquet", "products.parquet", "demographics.parquet"],
    ),
}


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    kind = rng.integers(6)
    position = int(rng.integers(0, len(content)))
    if kind == 0:  # truncate
        return content[:position]
    if kind == 1:  # flip a bit
        return content[:position] + bytes([content[position] ^ (1 << int(rng.integers(8)))]) + content[position + 1 :]
    if kind == 2:  # insert junk
        return content[:position] + rng.bytes(int(rng.integers(1, 40))) + content[position:]
    if kind == 3:  # remove a stretch
        return content[:position] + content[position + int(rng.integers(1, 60)) :]
    if kind == 4:  # repeat a stretch
        return content[:position] + content[max(0, position - 50) : position] + content[position:]
    lines = content.split(b"\n")
    lines.insert(int(rng.integers(0, len(lines))), b"junk,\x00\xff::\t" * int(rng.integers(1, 50)))
    return b"\n".join(lines)


@pytest.mark.parametrize("name", list(CASES))
def test_mutations_load_or_are_named(name: str, tmp_path: Path) -> None:
    write, open_, files = CASES[name]
    source = write(tmp_path / "raw")
    rng = np.random.default_rng(7)
    outcomes = {"loaded": 0, "named": 0}
    for round_ in range(24):
        path = source / files[round_ % len(files)]
        original = path.read_bytes()
        mutated = mutate(original, rng)
        path.write_bytes(mutated)
        try:
            open_(name, root=tmp_path / "root", source=source, rebuild=True, max_bad=0.0)
            outcomes["loaded"] += 1
            message = None
        except DataError as error:
            message = str(error)
            outcomes["named"] += 1
        assert message is None or path.name in message or name in message
        assert path.read_bytes() == mutated
        path.write_bytes(original)
    assert outcomes["named"] > 3, outcomes
    leftovers = (
        [p.name for p in (tmp_path / "root" / name).glob("*.building-*")] if (tmp_path / "root" / name).exists() else []
    )
    assert leftovers == []
