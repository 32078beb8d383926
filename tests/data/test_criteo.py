import gzip
from pathlib import Path

import numpy as np
import pytest

import loka.data.criteo as criteo
from loka.data import DataError, load

from . import raw


def test_values_survive(tmp_path: Path) -> None:
    source = raw.write_criteo(tmp_path / "raw")
    data = load("criteo", root=tmp_path, source=source, min_count=3)
    assert (len(data.train), len(data.valid), len(data.test)) == (500, 60, 70)
    train = [line.split("\t") for line in (source / "sample_train.tsv").read_text().splitlines()]
    test = [line.split("\t") for line in (source / "sample_test.tsv").read_text().splitlines()]
    batch = next(data.test.batches(70, shuffle=False, seed=0))
    assert batch.labels[:, 0].tolist() == [float(line[0]) for line in test]
    numbers = np.array([[float(v or 0) for v in line[1:14]] for line in test])
    assert batch.dense.numpy() == pytest.approx(np.sign(numbers) * np.log1p(np.abs(numbers)), rel=1e-6)
    for field in range(26):
        values, counts = np.unique([line[14 + field] for line in train], return_counts=True)
        known = sorted(int(v, 16) for v, c in zip(values, counts, strict=True) if v and c >= 3)
        assert data.schema.categorical[field].cardinality == len(known) + 1
        ids = {value: index + 1 for index, value in enumerate(known)}
        expected = [ids.get(int(line[14 + field], 16), 0) if line[14 + field] else 0 for line in test]
        assert batch.categorical[:, field].tolist() == expected


def test_hashing_has_a_fixed_size(tmp_path: Path) -> None:
    source = raw.write_criteo(tmp_path / "raw")
    data = load("criteo", root=tmp_path, source=source, encoding="hash", buckets=17)
    batch = next(data.train.batches(500, shuffle=False, seed=0))
    assert {field.cardinality for field in data.schema.categorical} == {17}
    lines = [line.split("\t") for line in (source / "sample_train.tsv").read_text().splitlines()]
    missing = np.array([[value == "" for value in line[14:]] for line in lines])
    assert np.array_equal(batch.categorical.numpy() == 0, missing), "id 0 is missing and nothing else"
    assert batch.categorical.max() == 16
    assert len(set(criteo._hash(np.arange(1000), 3, 1 << 20).tolist())) > 990
    assert not np.array_equal(criteo._hash(np.arange(9), 0, 999), criteo._hash(np.arange(9), 1, 999))


def test_blocks_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = raw.write_criteo(tmp_path / "raw")
    whole = load("criteo", root=tmp_path, source=source)
    monkeypatch.setattr(criteo, "_BLOCK", 20_000)
    pieces = load("criteo", root=tmp_path / "other", source=source)
    assert pieces.train.source.fingerprint() == whole.train.source.fingerprint()
    path = source / "sample_train.tsv"
    lines = path.read_text().splitlines()
    lines[432] = "2" + lines[432][1:]
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"sample_train\.tsv:433: bad click"):
        load("criteo", root=tmp_path / "third", source=source)


def test_a_single_log_is_cut_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo, "_BLOCK", 5000)
    source = raw.write_criteo(tmp_path / "raw", rows={"log": 200})
    data = load("criteo", root=tmp_path, source=source)
    assert (len(data.train), len(data.valid), len(data.test)) == (160, 20, 20)
    lines = [line.split("\t") for line in (source / "sample_log.tsv").read_text().splitlines()]
    order = [
        label
        for split in (data.train, data.valid, data.test)
        for label in next(split.batches(200, shuffle=False, seed=0)).labels[:, 0].tolist()
    ]
    assert order == [float(line[0]) for line in lines]
    packed = tmp_path / "log.tsv.gz"
    packed.write_bytes(gzip.compress((source / "sample_log.tsv").read_bytes()))
    again = load("criteo", root=tmp_path / "gz", source=packed)
    assert again.test.source.fingerprint() == data.test.source.fingerprint()
    packed.write_bytes(packed.read_bytes()[:-2000])
    with pytest.raises(DataError, match=r"log\.tsv\.gz: truncated"):
        load("criteo", root=tmp_path / "cut", source=packed)


def test_unclear_folders_are_refused(tmp_path: Path) -> None:
    source = raw.write_criteo(tmp_path / "raw", rows={"train": 20, "test": 20})
    with pytest.raises(DataError, match="one file each for train, dev and test"):
        load("criteo", root=tmp_path, source=source)
    raw.write_criteo(source, rows={"train": 20, "train2": 20, "dev": 9, "test": 20})
    with pytest.raises(DataError, match="several train files"):
        load("criteo", root=tmp_path, source=source)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        (0, "2", "click"),
        (3, "1.5", "integer_3"),
        (14, "xyz", "category_1"),
        (20, "123456789", "category_7"),
        (39, "-1", "category_26"),
    ],
)
def test_bad_values_name_the_column(tmp_path: Path, column: int, value: str, reason: str) -> None:
    source = raw.write_criteo(tmp_path / "raw")
    path = source / "sample_dev.tsv"
    lines = path.read_text().splitlines()
    parts = lines[6].split("\t")
    parts[column] = value
    path.write_text("\n".join([*lines[:6], "\t".join(parts), *lines[7:]]))
    with pytest.raises(DataError, match=rf"sample_dev\.tsv:7: bad {reason}"):
        load("criteo", root=tmp_path, source=source)
