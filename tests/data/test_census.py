import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from loka.data import DataError, load
from loka.data.census import COLUMNS

from . import raw


def test_labels_and_features(tmp_path: Path) -> None:
    source = raw.write_census(tmp_path / "raw")
    data = load("census-income-kdd", root=tmp_path, source=source)
    assert (len(data.train), len(data.valid), len(data.test)) == (540, 60, 200)
    assert data.schema.labels == ("income", "never_married")
    names = {*data.schema.dense, *(field.name for field in data.schema.categorical)}
    assert names == set(COLUMNS) - {"marital_status", "instance_weight", "income_class"}
    lines = [
        line.split(", ")
        for line in gzip.decompress((source / "census-income.test.gz").read_bytes()).decode().splitlines()
    ]
    batch = next(data.test.batches(200, shuffle=False, seed=0))
    column = {name: index for index, name in enumerate(COLUMNS)}
    assert batch.labels[:, 0].tolist() == [line[column["income_class"]] == "50000+." for line in lines]
    assert batch.labels[:, 1].tolist() == [line[column["marital_status"]] == "Never married" for line in lines]
    ages = np.log1p([float(line[column["age"]]) for line in lines])
    assert batch.dense[:, data.schema.dense.index("age")].numpy() == pytest.approx(ages, rel=1e-6)
    field = [f.name for f in data.schema.categorical].index("migration_msa")
    assert data.schema.categorical[field].cardinality == 2, "'?' is missing, not a value"
    expected = [0 if line[column["migration_msa"]] == "?" else 1 for line in lines]
    assert batch.categorical[:, field].tolist() == expected


def test_unseen_values_are_unknown(tmp_path: Path) -> None:
    source = raw.write_census(tmp_path / "raw")
    path = source / "census-income.test.gz"
    text = gzip.decompress(path.read_bytes()).decode().replace("Bachelors degree(BA AB BS)", "Doctorate")
    path.write_bytes(gzip.compress(text.encode()))
    data = load("census-income-kdd", root=tmp_path, source=source)
    field = [f.name for f in data.schema.categorical].index("education")
    batch = next(data.test.batches(200, shuffle=False, seed=0))
    doctors = ["Doctorate" in line for line in text.splitlines()]
    assert [code == 0 for code in batch.categorical[:, field].tolist()] == doctors
    known = json.loads((Path(data.info["folder"]) / "assets/vocabulary.education.json").read_text())
    assert "Doctorate" not in known


def test_truncated_and_damaged_files_are_named(tmp_path: Path) -> None:
    source = raw.write_census(tmp_path / "raw")
    path = source / "census-income.data.gz"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"census-income\.data\.gz: truncated"):
        load("census-income-kdd", root=tmp_path, source=source)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(DataError, match=r"census-income\.data\.gz: damaged gzip"):
        load("census-income-kdd", root=tmp_path, source=source)
    path.write_bytes(gzip.compress(b"a, b, c\n" * 50))
    with pytest.raises(DataError, match=r"50 of 50 rows are bad.*\n.*:1: expected 42 parts"):
        load("census-income-kdd", root=tmp_path, source=source)
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match="no rows at all"):
        load("census-income-kdd", root=tmp_path, source=source)
    path.unlink()
    with pytest.raises(DataError, match=r"neither census-income\.data\.gz nor census-income\.data"):
        load("census-income-kdd", root=tmp_path, source=source)
    assert not (tmp_path / "census-income-kdd").exists() or not list((tmp_path / "census-income-kdd").iterdir())


def test_unpacked_files_give_the_same(tmp_path: Path) -> None:
    source = raw.write_census(tmp_path / "raw")
    packed = load("census-income-kdd", root=tmp_path, source=source)
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in source.iterdir():
        (plain / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    unpacked = load("census-income-kdd", root=tmp_path / "other", source=plain)
    assert unpacked.train.source.fingerprint() == packed.train.source.fingerprint()
