"""Amazon review sequences (research use), 5-core: Beauty (2014 release), Industrial and Scientific (2018 release).

The files contain the order of each user's reviews but not their times, so the only honest hold-out is leave-last-out.
Two formats are supported:

- `<Name>.inter.json`: {"user": [item, item, ...]} with items numbered from 0, next to `<Name>.item.json`
  ({"item": {"title": ..., "description": ..., "brand": ..., "categories": ...}}) or `derived_id2asin_keywords.json`
  ({"item": {"asin": ..., "keywords": ...}});
- `user_sequence_asin.txt`: "user item item ..." per line, next to `item_keywords_idgenrec.txt`: "item words ...".

Item ids start at 1 (0 is padding), so item i of the files has id i + 1. Semantic-ID indexes
(`<Name>.index.<method>.json`, codes such as "<a_146>") are copied into the cache and read on request. Some of them give
the same codes to several items; `read_semantic_ids` returns them as they are.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loka.data.cache import CacheWriter
from loka.data.faults import BadRows, DataError
from loka.data.progress import Progress
from loka.data.sequences import write_sequences

_CODE = re.compile(r"<[a-z]+_(\d+)>")


@dataclass(frozen=True)
class SequenceOptions:
    """No options: the sets are published as 5-core sequences."""


def find_files(source: Path | None) -> dict[str, Path]:
    """Locate interactions, item texts and semantic-ID indexes in a folder."""
    if source is None or not source.is_dir():
        raise DataError(f"Amazon sequences need a folder, got {source}")
    files = {"interactions": _only(source, ("*.inter.json", "user_sequence*.txt"))}
    if files["interactions"].suffix == ".json":
        text = _first(source, ("*.item.json", "*id2asin*.json"))
    else:
        text = _first(source, ("item_keywords*.txt",))
    if text is not None:
        files["text"] = text
    for path in sorted(source.glob("*.index*.json")):
        name, _, method = path.name.removesuffix(".json").partition(".index")
        files[f"semantic_ids.{method.lstrip('.') or name}"] = path
    return files


def build_sequences(files: dict[str, Path], options: SequenceOptions, writer: CacheWriter, progress: Progress) -> None:
    """Write each user's items in the order of the file."""
    progress("reading interactions", 0, 2)
    path = files["interactions"]
    if path.suffix == ".json":
        rows = _read_json_rows(path, writer.bad)
        keys = [str(item) for item in range(max((max(row) for row in rows), default=-1) + 1)]
    else:
        rows, keys = _read_text_rows(path, writer.bad)
    writer.bad.check(path.name)
    progress("writing", 1, 2)
    lengths = np.array([len(row) for row in rows], np.int64)
    titles, texts, names = _read_texts(files.get("text"), keys)
    write_sequences(
        writer,
        users=np.repeat(np.arange(len(rows)), lengths),
        items=np.concatenate([np.asarray(row, np.int64) for row in rows]) + 1,
        item_keys=names,
        titles=titles,
        texts=texts,
    )
    for name, index in files.items():
        if name.startswith("semantic_ids."):
            read_semantic_ids(index)
            writer.add_asset(f"{name}.json", index.read_bytes())
    progress("done", 2, 2)


def read_semantic_ids(path: Path) -> dict[int, tuple[int, ...]]:
    """Read an index file into {item id (from 1): one code per level}."""
    document = _load_json(path)
    out: dict[int, tuple[int, ...]] = {}
    for key, codes in document.items():
        strings = isinstance(codes, list) and all(isinstance(code, str) for code in codes)
        matches = [_CODE.fullmatch(code) for code in codes] if strings else []
        if not key.isdecimal() or not matches or None in matches:
            raise DataError(f'{path}: item {key!r} has codes {codes!r}, expected a list such as ["<a_1>", "<b_2>"]')
        out[int(key) + 1] = tuple(int(match[1]) for match in matches if match)
    levels = {len(codes) for codes in out.values()}
    if len(levels) > 1:
        raise DataError(f"{path}: items have different numbers of codes: {sorted(levels)}")
    return out


def _read_json_rows(path: Path, bad: BadRows) -> list[list[int]]:
    rows = []
    for number, (user, items) in enumerate(_load_json(path).items(), start=1):
        bad.seen(1)
        if not isinstance(items, list) or not items or not all(type(i) is int and 0 <= i < 1 << 31 for i in items):
            bad.reject(path.name, number, f"user {user!r}: expected a list of item numbers", json.dumps(items))
        else:
            rows.append(items)
    return rows


def _read_text_rows(path: Path, bad: BadRows) -> tuple[list[list[int]], list[str]]:
    known: dict[str, int] = {}
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        user, *items = line.split() or [""]
        if not user:
            continue
        bad.seen(1)
        if not items:
            bad.reject(path.name, number, "a user without items", line)
        else:
            rows.append([known.setdefault(item, len(known)) for item in items])
    return rows, list(known)


def _read_texts(path: Path | None, keys: list[str]) -> tuple[list[str] | None, list[str] | None, list[str]]:
    """Return titles, longer texts and publisher's ids, each in the order of `keys`."""
    if path is None:
        return None, None, keys
    if path.suffix == ".txt":
        pairs = (line.partition(" ") for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
        words = {key: text for key, _, text in pairs}
        titles = [words.get(key, "") for key in keys]
        return titles, titles, keys
    document = _load_json(path)
    items = [entry if isinstance(entry := document.get(key), dict) else {} for key in keys]
    titles = [str(item.get("title") or item.get("keywords") or "") for item in items]
    parts = ("title", "keywords", "brand", "categories", "description")
    texts = ["\n".join(str(item[part]) for part in parts if item.get(part)) for item in items]
    return titles, texts, [str(item.get("asin") or key) for item, key in zip(items, keys, strict=True)]


def _load_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON ({error}); the file may be truncated") from None
    if not isinstance(document, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(document).__name__}")
    return document


def _only(folder: Path, patterns: tuple[str, ...]) -> Path:
    for pattern in patterns:
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            raise DataError(f"{folder}: several files match {pattern}: {[p.name for p in found]}; keep one")
        if found:
            return found[0]
    raise DataError(f"{folder}: no file matches any of {list(patterns)}")


def _first(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    return next((path for pattern in patterns for path in sorted(folder.glob(pattern))), None)
