"""Indexes as token tables: the JSON that public semantic-ID work exchanges.

    {"0": ["<a_12>", "<b_7>", "<c_40>", "<d_3>"], "1": [...], ...}

An item number, and one token per level: a letter prefix that names the level, and the code. Any number of levels, the
same for all items. The table holds neither codebook sizes (the largest code + 1 is taken unless given) nor centroids.
Many published tables contain collisions; the reader keeps them, and `SemanticIndex.colliding` counts them.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from loka.semantic_ids.index import SemanticIndex

__all__ = ["read_token_table", "write_token_table"]

_TOKEN = re.compile(r"<([a-z]+)_(\d+)>")


def read_token_table(
    path: str | os.PathLike[str],
    *,
    codebook_sizes: Sequence[int] | None = None,
    item_numbers: Mapping[str, int] | None = None,
) -> SemanticIndex:
    """Read a token table; rows in ascending order of item number.

    `item_numbers` translates the keys of the table (say, product ids) into item numbers; without it the keys must be integers.
    """
    table = _read_json(path)
    rows = sorted((_number(path, key, item_numbers), key) for key in table)
    prefixes: list[str] | None = None
    codes: list[list[int]] = []
    for _, key in rows:
        found, row = _parse(path, key, table[key])
        if prefixes is None:
            prefixes = found
            if len(set(prefixes)) != len(prefixes):
                raise ValueError(
                    f"{path}: item {key!r} has the level prefixes {prefixes}, expected a different one per level"
                )
        if found != prefixes:
            raise ValueError(f"{path}: item {key!r} has the levels {found}, other items have {prefixes}")
        codes.append(row)
    matrix = torch.tensor(codes, dtype=torch.int64)
    sizes = tuple(codebook_sizes) if codebook_sizes is not None else tuple(int(size) + 1 for size in matrix.amax(0))
    try:
        return SemanticIndex(matrix, sizes, torch.tensor([number for number, _ in rows], dtype=torch.int64))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_token_table(index: SemanticIndex, path: str | os.PathLike[str]) -> None:
    """Write the table form of an index (levels a, b, c, ...); centroids and codebook sizes are not part of it."""
    if index.levels > 26:
        raise ValueError(f"{index.levels} levels, the table has letters for 26")
    letters = [chr(ord("a") + level) for level in range(index.levels)]
    table = {
        str(item): [f"<{letter}_{code}>" for letter, code in zip(letters, row, strict=True)]
        for item, row in zip(index.items.tolist(), index.codes.tolist(), strict=True)
    }
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(table), encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"{path}: item {repeated!r} appears more than once")
        return table

    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=refuse_repeats)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); copy it again") from error
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{path}: expected a non-empty object of item -> tokens, got {type(table).__name__}")
    return table


def _number(path: str | os.PathLike[str], key: str, item_numbers: Mapping[str, int] | None) -> int:
    if item_numbers is not None:
        if key not in item_numbers:
            raise ValueError(f"{path}: item {key!r} is not among the {len(item_numbers)} given item numbers")
        return item_numbers[key]
    if not (key.isascii() and key.isdigit()):
        raise ValueError(f"{path}: item {key!r} is not a number: pass item_numbers to translate the keys")
    return int(key)


def _parse(path: str | os.PathLike[str], key: str, tokens: object) -> tuple[list[str], list[int]]:
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"{path}: item {key!r} holds {tokens!r}, expected a list of tokens such as '<a_12>'")
    matches = [_TOKEN.fullmatch(token) if isinstance(token, str) else None for token in tokens]
    for token, match in zip(tokens, matches, strict=True):
        if match is None:
            raise ValueError(f"{path}: item {key!r} has the token {token!r}, expected the form '<a_12>'")
    found = [match for match in matches if match is not None]
    return [match[1] for match in found], [int(match[2]) for match in found]
