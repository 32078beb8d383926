import json
import os
from pathlib import Path

import numpy as np
import pytest

from loka.data import DataError
from loka.data.cache import BUILDING, CacheWriter, open_cache
from loka.data.cached import open_ranking
from loka.data.schema import Field, Schema, SequenceField

SCHEMA = Schema(("x",), (Field("item", 50),), (SequenceField("history", 50, 4, "item"),), ("y",))


def write(target: Path, rows: int = 100, seed: int = 0, *, replace: bool = False) -> Path:
    rng = np.random.default_rng(seed)
    with CacheWriter(target, name="toy", kind="ranking", options={"seed": seed}, replace=replace) as writer:
        writer.schema = SCHEMA
        writer.bad.seen(3 * rows)
        writer.append("values/history", rng.integers(1, 50, 400), np.int32)
        for split in ("train", "valid", "test"):
            for _ in range(2):  # in two pieces, as a streaming build does
                half = rows // 2
                writer.append_rows(
                    split,
                    dense={"x": rng.standard_normal(half)},
                    categorical={"item": rng.integers(0, 50, half)},
                    labels={"y": rng.integers(0, 2, half)},
                    group=np.arange(half),
                    sequences={"history": (rng.integers(0, 390, half), rng.integers(0, 5, half))},
                )
        writer.add_asset("names.json", b'["a"]')
    return target


def test_round_trip(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    data = open_ranking(folder, open_cache(folder, verify=True))
    batch = next(data.test.batches(100, shuffle=False, seed=0))
    assert batch.size == 100
    column = np.load(folder / "test/categorical.item.npy", mmap_mode="r")
    assert np.array_equal(batch.categorical[:, 0].numpy(), column)
    values = np.load(folder / "values/history.npy")
    start, length = (np.load(folder / f"test/sequence.history.{n}.npy") for n in ("start", "length"))
    for row in range(100):
        assert batch.sequences["history"].row(row).tolist() == values[start[row] : start[row] + length[row]].tolist()


def test_the_same_data_gives_the_same_files(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a"), write(tmp_path / "b")
    for path in one.rglob("*.npy"):
        assert path.read_bytes() == (two / path.relative_to(one)).read_bytes()


def fail(target: Path) -> None:
    with CacheWriter(target, name="x", kind="ranking", options={}) as writer:
        writer.append("train/group", np.arange(3), np.int64)
        raise RuntimeError("boom")


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        fail(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rebuild_keeps_the_old_cache(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(RuntimeError, match="boom"):
        fail(folder)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_finished_rebuild_replaces_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", seed=0)
    write(folder, seed=1, replace=True)
    assert open_cache(folder, verify=True).options == {"seed": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_the_first_of_two_builders_wins(tmp_path: Path) -> None:
    slow = CacheWriter(tmp_path / "c", name="toy", kind="ranking", options={"seed": 7})
    with slow:
        slow.append("train/group", np.arange(3), np.int64)
        write(tmp_path / "c", seed=0)
    assert open_cache(tmp_path / "c", verify=True).options == {"seed": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_an_unfinished_build_is_not_a_cache(tmp_path: Path) -> None:
    half = tmp_path / f"c{BUILDING}x"
    (half / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"manifest.json is missing.*rebuild"):
        open_cache(half, verify=False)


def test_lossy_values_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="do not fit"),
        CacheWriter(tmp_path / "c", name="x", kind="r", options={}) as w,
    ):
        w.append("train/a", np.array([1 << 40]), np.int32)
    with pytest.raises(ValueError, match="2 rows"), CacheWriter(tmp_path / "c", name="x", kind="r", options={}) as w:
        w.append_rows("t", dense={"x": np.ones(2)}, categorical={}, labels={}, group=np.zeros(3))


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", rows=10)
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        original = path.read_bytes()
        flipped = bytearray(original)
        flipped[-3] ^= 0x40
        for damage in (original[:-2], original + b"x", b"", bytes(flipped), None):
            if damage is None:
                path.unlink()
            else:
                path.write_bytes(damage)
            with pytest.raises(DataError, match="rebuild") as caught:
                open_cache(folder, verify=True)
            assert path.name in str(caught.value)
            if damage is not None:
                assert path.read_bytes() == damage, "a damaged cache must not be touched"
            path.write_bytes(original)
    open_cache(folder, verify=True)


def test_a_changed_manifest_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    path = folder / "manifest.json"
    original = json.loads(path.read_text())
    for key, value in (
        ("version", 99),
        ("version", None),
        ("rows", {"train": 5}),
        ("schema", {"dense": 3}),
        ("name", 7),
    ):
        path.write_text(json.dumps({**original, key: value}))
        with pytest.raises(DataError, match=r"manifest\.json"):
            open_cache(folder, verify=False)
    path.write_text("[]")
    with pytest.raises(DataError, match="version None"):
        open_cache(folder, verify=False)


def test_another_process_may_read_while_a_file_vanishes(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    data = open_ranking(folder, open_cache(folder, verify=False))
    os.truncate(folder / "train/group.npy", 200)
    with pytest.raises(DataError, match=r"group\.npy.*ends early"):
        next(data.train.batches(100, shuffle=False, seed=0))
