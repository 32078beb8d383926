import json
from pathlib import Path

import pytest

from loka.data import DataError, load_sequences
from loka.data.amazon import read_semantic_ids

from . import raw

NAME = "amazon-2014-beauty"


def test_sequences_texts_and_semantic_ids(tmp_path: Path) -> None:
    source = raw.write_amazon(tmp_path / "raw")
    data = load_sequences(NAME, root=tmp_path, source=source)
    rows = json.loads((source / "Toys.inter.json").read_text())
    assert data.n_users == len(rows)
    assert data.n_items == 20
    assert data.times is None
    for user, items in enumerate(rows.values()):
        assert data.items.row(user).tolist() == [item + 1 for item in items]
    assert data.titles is not None
    assert data.titles[1] == "Toy 0"
    assert data.texts is not None
    assert data.texts[20] == "Toy 19\nB\nToys"
    assert data.semantic_id_names == ("rqvae",)
    codes = data.semantic_ids("rqvae")
    assert codes[1] == (0, 0)
    assert codes[20] == (3, 4)
    with pytest.raises(ValueError, match=r"no semantic-ID index 'letter'.*rqvae"):
        data.semantic_ids("letter")


def test_leave_last_out_batches_and_resume(tmp_path: Path) -> None:
    data = load_sequences(NAME, root=tmp_path, source=raw.write_amazon(tmp_path / "raw"))
    stream = data.test.batches(7, shuffle=True, seed=1, max_length=3)
    next(stream)
    state = stream.state_dict()
    rest = [(b.users.tolist(), b.history.values.tolist(), b.targets.values.tolist()) for b in stream]
    again = data.test.batches(7, shuffle=True, seed=1, max_length=3)
    again.load_state_dict(state)
    assert [(b.users.tolist(), b.history.values.tolist(), b.targets.values.tolist()) for b in again] == rest
    for users, _, targets in rest:
        assert targets == [int(data.items.row(user)[-1]) for user in users]
    with pytest.raises(ValueError, match="seed: saved 1, here 2"):
        data.test.batches(7, shuffle=True, seed=2, max_length=3).load_state_dict(state)
    batch = next(data.test.batches(30, shuffle=False, seed=0, max_length=3))
    assert batch.history.lengths.max() == 3
    assert batch.history.row(4).tolist() == data.items.row(4)[-4:-1].tolist()


def test_the_text_format(tmp_path: Path) -> None:
    source = tmp_path / "raw"
    source.mkdir()
    (source / "user_sequence_asin.txt").write_text("U1 B1 B2 B3\nU2 B3 B1 B4\n\n")
    (source / "item_keywords_idgenrec.txt").write_text("B1 red polish\nB3 green soap\n")
    data = load_sequences(NAME, root=tmp_path, source=source)
    assert data.items.values.tolist() == [1, 2, 3, 3, 1, 4]
    assert data.item_keys == ("", "B1", "B2", "B3", "B4")
    assert data.titles == ("", "red polish", "", "green soap", "")


def test_damage_is_named(tmp_path: Path) -> None:
    source = raw.write_amazon(tmp_path / "raw")
    path = source / "Toys.inter.json"
    content = path.read_text()
    path.write_text(content[:-40])
    with pytest.raises(DataError, match=r"Toys\.inter\.json: not readable as JSON"):
        load_sequences(NAME, root=tmp_path, source=source)
    path.write_text(json.dumps({**json.loads(content), "7": [1, "two"]}))
    with pytest.raises(DataError, match=r"1 of 30 rows are bad.*\n.*Toys.inter.json:8: user '7'"):
        load_sequences(NAME, root=tmp_path, source=source)
    path.write_text("[1, 2]")
    with pytest.raises(DataError, match="expected a JSON object, got list"):
        load_sequences(NAME, root=tmp_path, source=source)
    path.unlink()
    with pytest.raises(DataError, match="no file matches"):
        load_sequences(NAME, root=tmp_path, source=source)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"0": ["<a_1>"], "1": ["<a_1>", "<b_2>"]}', "different numbers"),
        ('{"0": ["a1"]}', "item '0' has codes"),
        ('{"0": 3}', "item '0' has codes 3"),
        ('{"x": ["<a_1>"]}', "item 'x'"),
        ("{", "not readable"),
    ],
)
def test_bad_indexes_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "Toys.index.json"
    path.write_text(content)
    with pytest.raises(DataError, match=rf"Toys\.index\.json.*{message}"):
        read_semantic_ids(path)
