"""Compact copies of prepared data sets, so that a GPU machine needs neither the raw files nor a preprocessing library.

    python benchmarks/quality_data.py --root CACHE --out FOLDER [--source NAME=FOLDER ...]      writes one .npz per data set, and baselines.json
    python benchmarks/quality_data.py --root CACHE --out FOLDER --archive FILE.tar.xz             and packs them
    python benchmarks/quality_data.py --root CACHE --out FOLDER --only ranking-census-income-kdd,ranking-ml-1m,sequences-ml-1m --no-baselines    these files alone

Ranking sets: columns in the smallest integer type; a column that another one determines (a user's age) is stored once per value of that one;
histories stay windows into shared values. Dense features are rounded to eight significant bits.
Sequence sets: items and times per user, and semantic ids, made from training histories and item texts. baselines.json holds logistic regression on the unrounded features.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

RANKING = ("ml-1m", "census-income-kdd", "complete-journey")
SEQUENCES = ("ml-1m", "amazon-2014-beauty", "amazon-2018-scientific")
CODEBOOKS = (256, 256, 256)
SPLITS = ("train", "valid", "test")
BASELINES: tuple[dict[str, Any], ...] = ({"dense": False}, {"dense": True}, {"dense": True, "bins": 20})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="where loka.data keeps its caches")
    parser.add_argument("--out", type=Path, required=True, help="folder for the compact copies")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER", help="raw files of a data set")
    parser.add_argument("--archive", type=Path, help="pack the folder into this .tar.xz")
    parser.add_argument(
        "--only", default="", help="files to write, without .npz, comma-separated; others are left alone"
    )
    parser.add_argument("--no-baselines", action="store_true", help="leave baselines.json as it is")
    arguments = parser.parse_args()
    sources = dict(pair.split("=", 1) for pair in arguments.source)
    arguments.out.mkdir(parents=True, exist_ok=True)
    baselines: dict[str, Any] = {}
    from loka.data import load, load_sequences

    every = [f"ranking-{name}" for name in RANKING] + [f"sequences-{name}" for name in SEQUENCES]
    wanted = arguments.only.split(",") if arguments.only else every
    if unknown := sorted(set(wanted) - set(every)):
        parser.error(f"--only {', '.join(unknown)}: files are {', '.join(every)}")
    for name in RANKING:
        if f"ranking-{name}" not in wanted:
            continue
        data = load(name, root=arguments.root, source=sources.get(name))
        np.savez_compressed(arguments.out / f"ranking-{name}.npz", **pack_ranking(data))
        if not arguments.no_baselines:
            baselines[name] = fit_baselines(data)
            (arguments.out / "baselines.json").write_text(json.dumps(baselines, indent=1))
    for name in SEQUENCES:
        if f"sequences-{name}" not in wanted:
            continue
        sequences = load_sequences(name, root=arguments.root, source=sources.get(name))
        np.savez_compressed(arguments.out / f"sequences-{name}.npz", **pack_sequences(sequences))
    if arguments.archive:
        pack_folder(arguments.out, arguments.archive)


def fit_baselines(data: Any) -> list[dict[str, Any]]:
    from logistic_baseline import fit_baseline

    return [{**choice, **dataclasses.asdict(fit_baseline(data, **choice))} for choice in BASELINES]


def pack_folder(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, arcname=path.name)
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")


def pack_ranking(data: Any) -> dict[str, np.ndarray]:
    """Every column of all splits, one after another, and the schema."""
    parts = [getattr(data, name).source.read([(0, len(getattr(data, name)))]) for name in SPLITS]
    schema = data.schema
    columns = {
        field.name: np.concatenate([p.categorical[:, i] for p in parts]) for i, field in enumerate(schema.categorical)
    }
    sizes = {field.name: field.cardinality for field in schema.categorical}
    for sequence in schema.sequences:
        windows = [p.sequences[sequence.name] for p in parts]
        columns[f"start:{sequence.name}"] = np.concatenate([w.start for w in windows])
        columns[f"length:{sequence.name}"] = np.concatenate([w.length for w in windows])
    out: dict[str, np.ndarray] = {"schema": np.array(json.dumps(dataclasses.asdict(schema)))}
    out["rows"] = np.array([len(p) for p in parts])
    for sequence in schema.sequences:
        values = np.array(parts[0].sequences[sequence.name].values)
        out[f"values:{sequence.name}"] = shrink(keep_used(values, columns, sequence.name))
    for name, column in columns.items():
        keys = (k for k, size in sizes.items() if size > sizes.get(name, 0) and size * 4 < len(column))
        key = next((k for k in keys if determines(columns[k], sizes[k], column)), None)
        if key is None:
            out[f"column:{name}"] = shrink(column)
            continue
        table = np.zeros(sizes[key], column.dtype)
        table[columns[key]] = column
        out[f"table:{name}:{key}"] = shrink(table)
        out[f"unknown:{name}"] = shrink(column[columns[key] == 0])
    out["dense"] = round_bits(np.concatenate([p.dense for p in parts]).T.astype(np.float16))
    if not np.isfinite(out["dense"]).all():
        raise ValueError(f"{data.name}: a dense feature does not fit into float16")
    out["labels"] = np.concatenate([p.labels for p in parts]).T.astype(np.uint8)
    return out


def keep_used(values: np.ndarray, columns: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Zero what no window shows: it costs nothing when packed."""
    edges = np.zeros(len(values) + 1, np.int64)
    start, length = columns[f"start:{name}"], columns[f"length:{name}"]
    np.add.at(edges, start, 1)
    np.add.at(edges, start + length, -1)
    return np.where(np.cumsum(edges)[:-1] > 0, values, 0)


def determines(key: np.ndarray, size: int, column: np.ndarray) -> bool:
    """Whether every known id of the key (not 0) has one value of the column."""
    table = np.zeros(size, column.dtype)
    table[key] = column
    return bool(((table[key] == column) | (key == 0)).all())


def round_bits(x: np.ndarray) -> np.ndarray:
    """float16 rounded to eight significant bits: the last three bits become zero, which packs well."""
    return ((x.view(np.uint16) + 4) & 0xFFF8).view(np.float16)


def shrink(column: np.ndarray) -> np.ndarray:
    """The same integers in the smallest unsigned type."""
    return column.astype(np.min_scalar_type(int(column.max(initial=0))))


def unpack_ranking(path: Path) -> tuple[dict[str, Any], np.ndarray, dict[str, np.ndarray]]:
    """The schema as a dictionary, the rows of each split, and full columns."""
    with np.load(path) as packed:
        arrays = {name: packed[name] for name in packed.files}
    columns: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name.startswith("column:"):
            columns[name.removeprefix("column:")] = array
        elif not name.startswith(("table:", "unknown:")):
            columns[name] = array
    waiting = [name for name in arrays if name.startswith("table:")]
    while waiting:  # a determining column may itself be determined
        name = waiting.pop(0)
        target, key = name.removeprefix("table:").rsplit(":", 1)
        if key in columns:
            column = arrays[name][columns[key]]
            column[columns[key] == 0] = arrays[f"unknown:{target}"]
            columns[target] = column
        else:
            waiting.append(name)
    return json.loads(str(columns.pop("schema"))), columns.pop("rows"), columns


def pack_sequences(data: Any) -> dict[str, np.ndarray]:
    """Items per user, times as steps from event to event, and a semantic id for every item."""
    out = {
        "items": shrink(data.items.values.numpy()),
        "lengths": shrink(np.diff(data.items.offsets.numpy())),
        "n_items": np.array(data.n_items),
    }
    if data.times is not None:
        times = data.times.numpy()
        first = data.items.offsets.numpy()[:-1]
        steps = np.diff(times, prepend=times[:1])
        out["first_times"] = times[first]
        steps[first] = 0
        out["steps"] = shrink(steps)
    out["codes"] = shrink(make_codes(data))
    return out


def make_codes(data: Any) -> np.ndarray:
    """int64 [n_items + 1, levels]: residual k-means over what items are about and what they are chosen with; distinct for every item."""
    from loka.semantic_ids import ResidualKMeans, fit_semantic_ids
    from loka.training import embed_items

    index = fit_semantic_ids(embed_items(data), ResidualKMeans(CODEBOOKS), collisions="level")
    table = np.zeros((data.n_items + 1, index.levels), np.int64)
    table[1:] = index.codes.numpy()
    return table


if __name__ == "__main__":
    main()
