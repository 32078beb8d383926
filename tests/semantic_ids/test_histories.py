import pytest
import torch

from loka.semantic_ids import embed_histories


def make_histories(groups=4, size=8, rows=400, length=6, seed=0):
    """Users stay inside one group of items; items 1 ... groups * size."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(groups, (rows, 1), generator=generator)
    items = which * size + torch.randint(size, (rows, length), generator=generator) + 1
    return items.flatten(), torch.arange(rows + 1) * length, which


def test_items_that_are_chosen_together_have_like_vectors():
    items, offsets, _ = make_histories()
    vectors = embed_histories(items, offsets, 32, dimensions=6)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(32))
    group = torch.arange(32) // 8
    likeness = vectors @ vectors.T
    inside = likeness[(group[:, None] == group) & ~torch.eye(32, dtype=torch.bool)]
    outside = likeness[group[:, None] != group]
    assert inside.mean() > 0.5
    assert outside.abs().mean() < 0.1


def test_it_is_the_svd_of_the_dense_matrix():
    items, offsets, _ = make_histories(rows=30)
    n, window = 32, 2
    counts = torch.zeros(n, n, dtype=torch.float64)
    for row in items.view(30, 6).tolist():
        for i, a in enumerate(row):
            for b in row[i + 1 : i + 1 + window]:
                if a != b:
                    counts[a - 1, b - 1] += 1
                    counts[b - 1, a - 1] += 1
    information = (counts * counts.sum() / (counts.sum(1, keepdim=True) * counts.sum(0))).log().clamp(min=0)
    information = torch.where(counts > 0, information, 0.0)
    u, s, _ = torch.linalg.svd(information)
    exact = torch.nn.functional.normalize((u * s)[:, :5], dim=1)
    found = embed_histories(items, offsets, n, dimensions=5, window=window).double()
    torch.testing.assert_close(found @ found.T, exact @ exact.T, atol=1e-3, rtol=0)


def test_rows_do_not_touch_and_a_lonely_item_gets_zeros():
    items, offsets, _ = make_histories()
    alone = torch.cat([items, torch.tensor([33, 34])])
    vectors = embed_histories(alone, torch.cat([offsets, offsets[-1:] + 1, offsets[-1:] + 2]), 34, dimensions=6)
    assert vectors[32:].eq(0).all()
    assert vectors[:32].norm(dim=1).min() > 0.99


def test_the_seed_decides_and_the_generator_of_the_caller_is_left_alone():
    items, offsets, _ = make_histories()
    before = torch.get_rng_state()
    first, again = (embed_histories(items, offsets, 32, dimensions=4, seed=3) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"dimensions": 32}, "dimensions=32 for 32 items"),
        ({"items": torch.tensor([0, 1])}, r"lie in \[0, 1\]"),
        ({"items": torch.tensor([5, 5])}, "nothing to learn"),
    ],
)
def test_what_cannot_be_honoured_says_why(change, message):
    items, offsets, _ = make_histories()
    if "items" in change:
        items, offsets = change.pop("items"), torch.tensor([0, 2])
    with pytest.raises(ValueError, match=message):
        embed_histories(items, offsets, 32, **{"dimensions": 4} | change)
