"""Counter-based random numbers: the published ones, uniform, a function of (step, stream, row); and the bf16 rounding they drive."""

import math

import pytest
import torch

from loka.formats import Draw, block_bits, round_bf16, uniform_bits
from loka.formats.philox import philox

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_ten_rounds_give_the_published_vectors(word: int, expected: tuple[int, ...]) -> None:
    counter = torch.tensor([word])
    assert [int(w) for w in philox(counter, counter, counter, word, (word, word), rounds=10)] == list(expected)


def test_a_row_draws_the_same_wherever_it_lies() -> None:
    draw = Draw(step=9, stream=3, seed=5)
    rows = torch.arange(64)
    whole = uniform_bits(rows, 48, draw)
    assert torch.equal(uniform_bits(rows[40:50], 48, draw), whole[40:50])  # row-wise shard
    assert torch.equal(uniform_bits(rows, 16, draw, first_column=32), whole[:, 32:])  # column-wise shard
    assert torch.equal(uniform_bits(rows.flip(0), 48, draw), whole.flip(0))
    for other in (Draw(8, 3, 5), Draw(9, 2, 5), Draw(9, 3, 4)):
        assert not torch.equal(uniform_bits(rows, 48, other), whole)
    assert not torch.equal(uniform_bits(rows + 2**32, 48, draw), whole)


def test_bits_are_uniform_and_columns_independent_where_it_counts() -> None:
    bits = uniform_bits(torch.arange(125_000), 8, Draw(step=1))
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 2**23
    u = bits.double() / 2**23
    assert abs(float(u.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 1e6)
    counts = torch.bincount((u * 64).long().flatten(), minlength=64).double()
    chi = float(((counts - 1e6 / 64) ** 2 / (1e6 / 64)).sum())
    assert chi < 63 + 4 * math.sqrt(2 * 63)
    correlation = torch.corrcoef(u.T) - torch.eye(8, dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / math.sqrt(125_000)


def test_blocks_draw_by_their_place_step_stream_and_seed() -> None:
    draw, blocks = Draw(step=9, stream=3, seed=5), torch.arange(64)
    whole = block_bits(blocks, 48, draw)
    assert torch.equal(block_bits(blocks[40:50], 48, draw), whole[40:50])
    for other in (Draw(8, 3, 5), Draw(9, 2, 5), Draw(9, 3, 4)):
        assert not torch.equal(block_bits(blocks, 48, other), whole)
    assert not torch.equal(block_bits(blocks + 2**32, 48, draw), whole)
    for size in (1, 2, 7, 100):
        assert block_bits(blocks, size, draw).shape == (64, size)


def test_every_bit_of_a_block_is_as_often_one_as_zero() -> None:
    bits = block_bits(torch.arange(20_000), 64, Draw(step=1, stream=2, seed=3)).view(-1)
    ones = torch.stack([(bits >> i) & 1 for i in range(20)]).double().mean(1)
    assert float((ones - 0.5).abs().max()) < 4.5 * 0.5 / math.sqrt(len(bits))  # the most of twenty
    counts = torch.bincount(bits >> 12, minlength=256).double()
    expected = len(bits) / 256
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 4 * math.sqrt(2 * 255)


def test_neighbors_blocks_steps_streams_and_seeds_draw_independently() -> None:
    """Of elements (the halves of a word among them), and of the same element where one counter is one more or a bit apart."""
    blocks, draw = torch.arange(8192), Draw(step=6, stream=10, seed=12)
    u = block_bits(blocks, 128, draw).double() - 2.0**19
    pairs = {f"{lag} elements on": (u[:, lag:], u[:, :-lag]) for lag in (1, 2, 3, 4, 8, 64)}
    pairs |= {f"{lag} blocks on": (u[lag:], u[:-lag]) for lag in (1, 2, 16, 4096)}
    for other in (Draw(7, 10, 12), Draw(6 ^ 2**16, 10, 12), Draw(6, 11, 12), Draw(6, 10 ^ 2**31, 12), Draw(6, 10, 13), Draw(12, 10, 6), Draw(10, 6, 12)):  # fmt: skip
        pairs[str(other)] = (u, block_bits(blocks, 128, other).double() - 2.0**19)
    for name, (a, b) in pairs.items():
        correlation = float((a * b).mean() / (2.0**40 / 12))
        assert abs(correlation) < 4.5 / math.sqrt(a.numel()), name
        signs = float(((a > 0) == (b > 0)).double().mean())  # the first bit alone
        assert abs(signs - 0.5) < 4.5 * 0.5 / math.sqrt(a.numel()), name


@pytest.mark.parametrize("value", [1.00123, -3.1e-4, 9.2e-41, 2.0**-133 * 1.3])  # the last two are subnormal
def test_bf16_is_unbiased_within_four_sigma_over_a_million_draws(value: float) -> None:
    x = torch.full((1_000_000,), value, dtype=torch.float32)
    rounded = round_bf16(x, uniform_bits(torch.arange(125_000), 8, Draw(step=4)).flatten()).double()
    low, high = float(rounded.min()), float(rounded.max())
    assert low < high, "nothing was rounded both ways"
    share = (float(x[0].double()) - low) / (high - low)
    sigma = (high - low) * math.sqrt(share * (1 - share) / 1e6)
    assert abs(float(rounded.mean()) - float(x[0].double())) < 4 * sigma


def test_bf16_keeps_what_it_can_hold() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    finite = patterns[patterns.isfinite()]
    bits = uniform_bits(torch.arange(-(-len(finite) // 8)), 8, Draw(step=0)).flatten()[: len(finite)]
    assert torch.equal(round_bf16(finite, bits).float(), finite)
    odd = torch.tensor([math.inf, -math.inf, math.nan, 3.4e38, -3.4e38])
    out = round_bf16(odd, torch.zeros(5, dtype=torch.int64))
    assert out[0] == math.inf
    assert out[1] == -math.inf
    assert out[2].isnan()
    assert bool(out[3:].isfinite().all())


def test_what_cannot_be_a_counter_is_refused() -> None:
    with pytest.raises(ValueError, match="32-bit"):
        Draw(step=-1)
    with pytest.raises(ValueError, match="multiple of 8"):
        uniform_bits(torch.arange(2), 8, Draw(step=0), first_column=4)
