import json
import zipfile
from pathlib import Path

import pytest
import torch

from loka.data import Batch, DataError, RankingData, load, load_sequences

from . import raw


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raw.write_movielens(tmp_path_factory.mktemp("movielens") / "raw")


@pytest.fixture(scope="module")
def data(folder: Path) -> RankingData:
    return load("ml-1m", root=folder.parent, source=folder, max_history=10)


def read_ratings(folder: Path) -> list[tuple[int, int, int, int]]:
    lines = [tuple(map(int, line.split("::"))) for line in (folder / "ratings.dat").read_text().splitlines()]
    return sorted(lines, key=lambda r: (r[3], r[0], r[1]))


def whole(split) -> Batch:
    return next(split.batches(len(split), shuffle=False, seed=0))


def test_splits_do_not_overlap_in_time(folder: Path, data: RankingData) -> None:
    times = [rating[3] for rating in read_ratings(folder)]
    cuts = [len(data.train), len(data.train) + len(data.valid)]
    assert cuts[1] + len(data.test) == len(times)
    for cut in cuts:
        assert times[cut - 1] < times[cut], "ratings of one second must not be on two sides"
    starts = data.info["facts"]["split_starts"]
    assert (starts["valid"], starts["test"]) == (times[cuts[0]], times[cuts[1]])
    assert abs(len(data.test) / len(times) - 0.1) < 0.02
    assert abs(len(data.valid) / cuts[1] - 0.1) < 0.02


def test_features_are_of_the_past_only(folder: Path, data: RankingData) -> None:
    """Recompute every feature of every example from the raw file, slowly."""
    ratings = read_ratings(folder)
    movies = json.loads((Path(data.info["folder"]) / "assets/vocabulary.movie.json").read_text())
    ids = {movie: index + 1 for index, movie in enumerate(movies)}
    assert set(ids) == {r[1] for r in ratings[: len(data.train)]}, "the vocabulary comes from the training split"
    names = data.schema.dense
    row = 0
    for split in (data.train, data.valid, data.test):
        batch = whole(split)
        for i in range(batch.size):
            user, movie, rating, time = ratings[row]
            row += 1
            assert batch.labels[i, 0] == (rating >= 4)
            assert batch.group[i] == user
            assert batch.categorical[i, 1] == ids.get(movie, 0)
            mine = [r for r in ratings if r[0] == user and r[3] < time]
            others = [r for r in ratings if r[1] == movie and r[3] < time]
            liked = [ids.get(r[1], 0) for r in mine if r[2] >= 4]
            assert batch.sequences["history"].row(i).tolist() == liked[-10:]
            got = dict(zip(names, batch.dense[i].tolist(), strict=True))
            assert got["user_ratings"] == pytest.approx(torch.log1p(torch.tensor(float(len(mine)))).item())
            assert got["movie_ratings"] == pytest.approx(torch.log1p(torch.tensor(float(len(others)))).item())
            share = (sum(r[2] >= 4 for r in others) + 2.5) / (len(others) + 5)
            assert got["movie_like_share"] == pytest.approx(share, rel=1e-6)


def test_genres_are_bags(folder: Path, data: RankingData) -> None:
    batch = whole(data.train)
    ratings = read_ratings(folder)
    for i in range(0, batch.size, 97):
        movie = ratings[i][1]
        assert batch.sequences["genres"].lengths[i] == (1 if movie == 1 else 1 + movie % 4)


def test_the_archive_gives_the_same(folder: Path, data: RankingData, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("ratings", "users", "movies"):
            archive.write(folder / f"{name}.dat", f"ml-1m/{name}.dat")
    packed = load("ml-1m", root=tmp_path, source=tmp_path, max_history=10)
    assert packed.train.source.fingerprint() == data.train.source.fingerprint()
    path = tmp_path / "ml-1m.zip"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DataError, match=r"ml-1m\.zip: not readable as a zip"):
        load("ml-1m", root=tmp_path / "other", source=path)


def test_bad_lines_are_counted_and_named(folder: Path, tmp_path: Path) -> None:
    broken = raw.write_movielens(tmp_path / "raw")
    lines = (broken / "ratings.dat").read_text().splitlines()
    lines[4:4] = ["1::2::3", "1::2::9::956703932", "one::2::3::956703932", "-1::2::3::956703932"]
    (broken / "ratings.dat").write_text("\n".join(lines))
    with pytest.raises(DataError, match="4 of 3004 rows are bad") as caught:
        load("ml-1m", root=tmp_path, source=broken)
    message = str(caught.value)
    for expected in (
        "ratings.dat:5: expected 4 parts",
        "ratings.dat:6: bad rating",
        "ratings.dat:7: bad user",
        ":8: bad user",
    ):
        assert expected in message
    assert not list((tmp_path / "ml-1m").iterdir()), "a failed build leaves no cache"
    tolerant = load("ml-1m", root=tmp_path, source=broken, max_bad=0.01, max_history=10)
    assert tolerant.info["bad_rows"] == 4
    clean = load("ml-1m", root=tmp_path / "clean", source=folder, max_history=10)
    assert tolerant.train.source.fingerprint() == clean.train.source.fingerprint()


def test_truncated_files_are_named(tmp_path: Path) -> None:
    folder = raw.write_movielens(tmp_path / "raw")
    for name in ("ratings", "users", "movies"):
        path = folder / f"{name}.dat"
        content = path.read_bytes()
        path.write_bytes(content[: content.rindex(b"::")])
        with pytest.raises(DataError, match=rf"{name}\.dat: ends in the middle of line \d+, so the file is truncated"):
            load("ml-1m", root=tmp_path, source=folder, max_bad=0.5)
        path.write_bytes(content)
    path = folder / "ratings.dat"
    path.write_bytes(path.read_bytes()[:-5])  # what is left of the time still looks like a number
    with pytest.raises(DataError, match=r"ratings\.dat: ends in the middle"):
        load("ml-1m", root=tmp_path, source=folder)


def test_sequences_leave_the_last_out(folder: Path, tmp_path: Path) -> None:
    data = load_sequences("ml-1m", root=tmp_path, source=folder)
    lines = [tuple(map(int, line.split("::"))) for line in (folder / "ratings.dat").read_text().splitlines()]
    users = sorted({line[0] for line in lines})
    key = {k: i for i, k in enumerate(data.item_keys)}
    batch = next(data.test.batches(len(users), shuffle=False, seed=0, max_length=500))
    valid = next(data.valid.batches(len(users), shuffle=False, seed=0, max_length=500))
    train = next(data.train.batches(len(users), shuffle=False, seed=0, max_length=500))
    for row, user in enumerate(users):
        events = sorted([line for line in lines if line[0] == user], key=lambda line: line[3])
        items = [key[str(line[1])] for line in events]
        assert batch.history.row(row).tolist() == items[:-1]
        assert batch.targets.row(row).tolist() == items[-1:]
        assert valid.history.row(row).tolist() == items[:-2]
        assert valid.targets.row(row).tolist() == items[-2:-1]
        assert train.history.row(row).tolist() == items[:-2]
        assert batch.times is not None
        assert batch.times.row(row).tolist() == [line[3] for line in events][:-1]
    assert data.titles is not None
    assert data.titles[key["1"]] == "Misérables, Les (1995)"
    assert data.n_items == len(data.item_keys) - 1
