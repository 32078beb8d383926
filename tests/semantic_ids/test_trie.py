"""The trie against a dictionary of prefixes."""

import pytest
import torch

from loka.semantic_ids import Trie
from loka.semantic_ids.trie import build_trie

SIZES = (5, 7, 3, 6)


def make(items: int = 150, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Trie]:
    generator = torch.Generator().manual_seed(seed)
    space = torch.randperm(5 * 7 * 3 * 6, generator=generator)[:items]
    codes = torch.stack([space // 126, space // 18 % 7, space // 6 % 3, space % 6], dim=1)
    numbers = torch.randperm(10 * items, generator=generator)[:items]
    return codes, numbers, build_trie(codes, SIZES, numbers)


def walk(trie: Trie, prefix: torch.Tensor) -> torch.Tensor:
    nodes = torch.zeros(prefix.shape[0], dtype=torch.int64)
    for level in range(prefix.shape[1]):
        nodes = trie.step(nodes, prefix[:, level])
    return nodes


def test_every_id_leads_to_its_item() -> None:
    codes, numbers, trie = make()
    assert torch.equal(trie.items(walk(trie, codes)), numbers)


def test_every_possible_id_is_accepted_or_refused_rightly() -> None:
    codes, _, trie = make()
    every = torch.cartesian_prod(*(torch.arange(size) for size in SIZES))
    valid = {tuple(row) for row in codes.tolist()}
    expected = torch.tensor([tuple(row) in valid for row in every.tolist()])
    nodes = walk(trie, every)
    assert torch.equal(nodes >= 0, expected)
    assert torch.equal(trie.items(nodes) >= 0, expected)


@pytest.mark.parametrize("level", range(4))
def test_both_views_of_the_children_agree(level: int) -> None:
    codes, _, trie = make()
    prefixes = codes[:, :level].unique(dim=0) if level else torch.empty(1, 0, dtype=torch.int64)
    nodes = torch.cat([walk(trie, prefixes), torch.tensor([-1])])
    expected = [
        sorted({row[level] for row in codes.tolist() if row[:level] == prefix}) for prefix in prefixes.tolist()
    ] + [[]]
    mask = trie.mask(nodes, level)
    assert mask.shape == (nodes.numel(), SIZES[level])
    assert [row.nonzero()[:, 0].tolist() for row in mask] == expected
    padded_codes, padded_children = trie.allowed(nodes, level)
    assert [row[row >= 0].tolist() for row in padded_codes] == expected
    parents = nodes[:, None].expand_as(padded_codes)[padded_codes >= 0]
    children = padded_children[padded_codes >= 0]
    assert torch.equal(trie.step(parents, padded_codes[padded_codes >= 0]), children)
    assert trie.fanouts[level] == max(len(row) for row in expected) == padded_codes.shape[1]


def test_invalid_codes_and_nodes_give_minus_one() -> None:
    codes, _, trie = make()
    leaf = walk(trie, codes[:1])
    assert trie.step(torch.tensor([0, 0, 0, -1]), torch.tensor([-1, 99, 5, 0])).tolist() == [-1, -1, -1, -1]
    assert trie.step(leaf, torch.tensor([0])).tolist() == [-1]  # nothing follows a leaf
    assert trie.items(torch.tensor([0, -1])).tolist() == [-1, -1]


def test_a_negative_code_does_not_reach_the_neighbour() -> None:
    """Key arithmetic: node 1 with code -1 has the key of node 0 with the last code."""
    trie = build_trie(torch.tensor([[1, 0], [0, 1]]), (2, 2), torch.tensor([0, 1]))
    assert trie.step(torch.tensor([1, 0]), torch.tensor([-1, 1])).tolist() == [-1, 2]


def test_shapes_broadcast_as_a_beam_search_needs() -> None:
    codes, _, trie = make()
    nodes = walk(trie, codes[:12, :2]).reshape(3, 4)
    assert trie.mask(nodes, 2).shape == (3, 4, 3)
    assert trie.allowed(nodes, 2)[0].shape == (3, 4, trie.fanouts[2])
    assert trie.step(nodes[..., None], torch.arange(3)).shape == (3, 4, 3)


def test_constrained_greedy_decoding_yields_items() -> None:
    """Random scores, masked: every decoded id belongs to an item."""
    _, numbers, trie = make()
    generator = torch.Generator().manual_seed(1)
    nodes = torch.zeros(64, dtype=torch.int64)
    for level in range(4):
        scores = torch.randn(64, SIZES[level], generator=generator)
        nodes = trie.step(nodes, scores.masked_fill(~trie.mask(nodes, level), -torch.inf).argmax(1))
    assert torch.isin(trie.items(nodes), numbers).all()


def test_order_of_rows_does_not_matter() -> None:
    codes, numbers, trie = make()
    shuffle = torch.randperm(150, generator=torch.Generator().manual_seed(9))
    other = build_trie(codes[shuffle], SIZES, numbers[shuffle])
    assert torch.equal(trie.keys, other.keys)
    assert torch.equal(trie.leaf_items, other.leaf_items)


def test_one_item_and_one_level() -> None:
    trie = build_trie(torch.tensor([[3]]), (5,), torch.tensor([42]))
    assert trie.items(trie.step(torch.tensor([0]), torch.tensor([3]))).tolist() == [42]
    assert trie.fanouts == (1,)
    assert "1 ids" in repr(trie)


def test_bad_requests() -> None:
    with pytest.raises(ValueError, match="items 5 and 7 have"):
        build_trie(torch.tensor([[0, 1], [0, 0], [0, 1]]), (1, 2), torch.tensor([5, 6, 7]))
    with pytest.raises(ValueError, match="at least one"):
        build_trie(torch.empty(0, 2, dtype=torch.int64), (1, 1), torch.empty(0, dtype=torch.int64))
    _, _, trie = make()
    with pytest.raises(ValueError, match="level=4"):
        trie.mask(torch.tensor([0]), 4)


def test_decoding_compiles_to_one_graph() -> None:
    """No data-dependent shape and no host read: one graph without breaks, which is what a captured decoding step needs."""
    codes, numbers, trie = make()

    def decode(choices: torch.Tensor) -> torch.Tensor:
        nodes = torch.zeros(choices.shape[0], dtype=torch.int64)
        for level in range(4):
            allowed, children = trie.allowed(nodes, level)
            found = allowed == choices[:, level, None]
            stepped = torch.where(found, children, -1).amax(1)
            nodes = torch.where(trie.mask(nodes, level).any(1), trie.step(nodes, choices[:, level]), -1)
            nodes = torch.where(stepped == nodes, nodes, -2)
        return trie.items(nodes)

    compiled = torch.compile(decode, backend="eager", fullgraph=True)
    assert torch.equal(compiled(codes), numbers)


def test_what_may_follow_each_part_of_an_id() -> None:
    codes, _, trie = make()
    for level, mask in enumerate(trie.follow(codes)):
        nodes = walk(trie, codes[:, :level]) if level else torch.zeros(len(codes), dtype=torch.int64)
        assert torch.equal(mask, trie.mask(nodes, level))
        assert mask.gather(1, codes[:, level : level + 1]).all(), "the true code may follow"
    with pytest.raises(ValueError, match="expected"):
        trie.follow(codes[:, :2])
