"""Token tables: round trip, every kind of damage, and real files where LOKA_TEST_DATA points at some."""

import json
import os
from pathlib import Path

import pytest
import torch

from loka.semantic_ids import SemanticIndex, read_token_table, resolve_collisions, write_token_table

TABLE = {"2": ["<a_3>", "<b_0>", "<c_7>"], "0": ["<a_1>", "<b_2>", "<c_0>"], "10": ["<a_3>", "<b_0>", "<c_7>"]}


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_reads_the_published_form(tmp_path: Path) -> None:
    index = read_token_table(write(tmp_path / "x.index.json", TABLE))
    assert index.items.tolist() == [0, 2, 10]
    assert index.codes.tolist() == [[1, 2, 0], [3, 0, 7], [3, 0, 7]]
    assert index.codebook_sizes == (4, 3, 8)
    assert index.colliding == 2
    assert resolve_collisions(index, "level").colliding == 0


def test_sizes_and_item_numbers_can_be_given(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", {"B0X": ["<a_1>"], "B0Y": ["<a_0>"]})
    index = read_token_table(path, codebook_sizes=(256,), item_numbers={"B0X": 5, "B0Y": 4, "other": 1})
    assert index.codebook_sizes == (256,)
    assert torch.equal(index.codes_of(torch.tensor([5, 4])), torch.tensor([[1], [0]]))


def test_round_trip(tmp_path: Path) -> None:
    codes = torch.randint(9, (40, 4), generator=torch.Generator().manual_seed(0))
    index = SemanticIndex(codes, (9, 9, 9, 9), torch.arange(40) + 1)
    write_token_table(index, tmp_path / "t.json")
    again = read_token_table(tmp_path / "t.json", codebook_sizes=(9, 9, 9, 9))
    assert torch.equal(again.codes, codes)
    assert torch.equal(again.items, index.items)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "non-empty object"),
        ("{}", "non-empty object"),
        ('{"1": ["<a_1>"], "1": ["<a_2>"]}', "item '1' appears more than once"),
        ({"x": ["<a_1>"]}, "pass item_numbers"),
        ({"-1": ["<a_1>"]}, "is not a number"),
        ({"1": []}, "expected a list of tokens"),
        ({"1": "<a_1>"}, "expected a list of tokens"),
        ({"1": ["<a_1>", 3]}, "expected the form"),
        ({"1": ["<a_-1>"]}, "expected the form"),
        ({"1": ["<a_1> "]}, "expected the form"),
        ({"1": ["<a_1>", "<a_2>"]}, "a different one per level"),
        ({"1": ["<a_1>", "<b_2>"], "2": ["<a_1>"]}, "item '2' has the levels"),
        ({"1": ["<a_1>", "<b_2>"], "2": ["<b_1>", "<a_2>"]}, "item '2' has the levels"),
        ({"1": ["<a_1>"], "01": ["<a_2>"]}, "repeat"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: object, message: str) -> None:
    path = write(tmp_path / "broken.json", content)
    with pytest.raises(ValueError, match=message) as caught:
        read_token_table(path)
    assert "broken.json" in str(caught.value)


def test_other_bad_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", TABLE)
    with pytest.raises(ValueError, match="not among the 1 given"):
        read_token_table(path, item_numbers={"2": 1})
    with pytest.raises(ValueError, match="outside"):
        read_token_table(path, codebook_sizes=(2, 3, 8))
    deep = SemanticIndex(torch.zeros(1, 27, dtype=torch.int64), (1,) * 27, torch.arange(1))
    with pytest.raises(ValueError, match="26"):
        write_token_table(deep, tmp_path / "deep.json")


def find_real_tables() -> list[Path]:
    folder = os.environ.get("LOKA_TEST_DATA")
    return sorted(Path(folder).rglob("*.index*.json")) if folder else []


@pytest.mark.skipif(not find_real_tables(), reason="LOKA_TEST_DATA names no folder with *.index*.json token tables")
def test_real_tables_load_and_resolve() -> None:
    for path in find_real_tables():
        index = read_token_table(path)
        assert torch.equal(index.items, torch.arange(len(index))), path.name
        assert index.levels in (3, 4), path.name
        unique = index if index.colliding == 0 else resolve_collisions(index, "level")
        assert torch.equal(unique.items_of(unique.codes), unique.items), path.name
        raw = json.loads(path.read_text())
        letters = "abcd"[: index.levels]
        for item in (0, len(index) // 2, len(index) - 1):
            codes = index.codes_of(torch.tensor([item]))[0].tolist()
            assert raw[str(item)] == [f"<{letter}_{code}>" for letter, code in zip(letters, codes, strict=True)]
