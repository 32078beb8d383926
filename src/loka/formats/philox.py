"""Random numbers for stochastic rounding as a function of (step, stream, row), by Philox4x32.

The draws of an ordinary generator depend on earlier draws, so a run that is resumed or sharded differently would round
differently. A counter-based generator has no state:

    bits(row, column) = philox(key = (seed, stream), counter = (column // 8, row)) + step x golden ratio, modulo 1

so row 17 of table 3 gets the same numbers in step 1000 on one process, on four, and after a resume. Philox4x32 passes
BigCrush with seven rounds or more (Salmon et al., 2011); ten would cost a fused update 40 % more arithmetic.

From step to step an element's number advances by the golden ratio instead of being drawn anew. Each number is uniform,
and together they are spread more evenly than independent draws, so the rounding error of a row with many small updates
drifts less: after 400 steps by 2.9 to 5.1 quanta instead of 4.0 to 6.8 for a row that occurs in every step, 2.8 to 3.6
instead of 3.1 to 3.8 for one in a third of them, and equally for one in thirty (int8 rows, simulated updates of falling
size, compared with exact sums).

One call gives 128 bits, sixteen for each of eight columns. Sixteen alone would lose updates below 2^-16 quanta, so two
columns that share a word also use seven of each other's bits: each element's 23 bits (the mantissa of a float32) are
uniform, and the shared ones decide a rounding in 1 of 65,536 cases. This costs an eighth of a call per element. The
Triton kernels (`loka.kernels.embedding_update`) compute the same bits.

What is sent to other ranks (`loka.kernels.wire`) has numbers of its own, `block_bits`:

    bits(block, element) = philox(key = (seed, stream), counter = (block, group of the element, step))

New ones are drawn in every step: errors of gradients are not added up in place, as those of a row are, so there is
nothing to spread evenly. Two elements that share a word lie half a block apart, and so are in the same thread of a
kernel however wide its loads are. Each has twenty bits, as many as E4M3 cuts off a float32: normal numbers are rounded
without any bias, and subnormal ones with less than 2^-20 of a step (four standard deviations of the mean of a million
draws are 2^-9 of a step).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 7
_WORD = 0xFFFFFFFF
MULTIPLY = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
GOLDEN = 5184445  # 2^23 over the golden ratio, odd


@dataclass(frozen=True)
class Draw:
    """Which random numbers to use, apart from the position of the element.

    Args:
        step: of training; every step has other numbers.
        stream: of the table or the collective, so that two tables have different numbers.
        seed: of the run.

    Example:
        >>> uniform_bits(torch.tensor([17]), 8, Draw(step=1000, stream=3)).shape
        torch.Size([1, 8])
    """

    step: int
    stream: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("step", "stream", "seed"):
            value = getattr(self, name)
            if not 0 <= value <= _WORD:
                raise ValueError(f"Draw.{name} is a 32-bit counter, 0 to {_WORD}, got {value}")


def philox(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: int, key: tuple[int | Tensor, int | Tensor], *, rounds: int = ROUNDS
) -> list[Tensor]:
    """Return four 32-bit words, as int64, for each counter (c0, c1, c2, c3).

    Counters and keys are below 2^32; c1 and c2 are expanded to the shape of c0.
    """
    k0, k1 = key
    words = [t.expand_as(c0) for t in (c0, c1, c2, torch.full_like(c0, c3))]
    for _ in range(rounds):
        # int64 products wrap modulo 2^64: the sign may be wrong, the bits are right
        first, second = (words[0] * MULTIPLY[0], words[2] * MULTIPLY[1])
        words = [
            ((second >> 32) & _WORD) ^ words[1] ^ k0,
            second & _WORD,
            ((first >> 32) & _WORD) ^ words[3] ^ k1,
            first & _WORD,
        ]
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return words


def uniform_bits(rows: Tensor, columns: int, draw: Draw, *, first_column: int = 0) -> Tensor:
    """Return 23 random bits for each element of some rows.

    Args:
        rows: int64 [n], row indices in the whole table, not in a shard of it.
        columns: number of columns.
        draw: step, stream and seed.
        first_column: of a column-wise shard; a multiple of eight.

    Returns:
        int64 [n, columns], each in [0, 2^23).

    Example:
        >>> noise = uniform_bits(torch.arange(4), 64, Draw(step=5)) * 2.0**-23  # uniform in [0, 1)
    """
    if first_column % 8:
        raise ValueError(
            f"first_column must be a multiple of 8, got {first_column}: one call of Philox serves eight columns"
        )
    key = (draw.seed, draw.stream)
    low, high = (rows & _WORD).unsqueeze(1), ((rows >> 32) & _WORD).unsqueeze(1)
    groups = torch.arange(first_column // 8, first_column // 8 + -(-columns // 8), device=rows.device).unsqueeze(0)
    words = torch.stack(philox(groups.expand(len(rows), -1), low, high, 0, key), -1)  # [n, groups, 4]
    first = words >> 9
    second = ((words & 0xFFFF) << 7) | (words >> 25)
    return (torch.stack((first, second), -1).flatten(1)[:, :columns] + draw.step * GOLDEN) & 0x7FFFFF


def block_bits(blocks: Tensor, size: int, draw: Draw) -> Tensor:
    """Return 20 random bits for each element of some blocks.

    A kernel adds their complement to the bits that it cuts off: a carry says that they were less than the fraction.

    Args:
        blocks: int64 [n], indices of blocks in the whole tensor, not in a piece of it.
        size: elements of a block.
        draw: step, stream and seed.

    Returns:
        int64 [n, size], each in [0, 2^20).

    Example:
        >>> noise = block_bits(torch.arange(4), 128, Draw(step=5)) * 2.0**-20  # uniform in [0, 1)
    """
    half = -(-size // 2)
    low, high = (blocks & _WORD).unsqueeze(1), ((blocks >> 32) & _WORD).unsqueeze(1)
    groups = torch.arange(-(-half // 4), device=blocks.device).unsqueeze(0)
    words = philox(low.expand(-1, groups.shape[1]), high, groups, draw.step, (draw.seed, draw.stream))
    word = torch.stack(words, -1).flatten(1)[:, :half] ^ _WORD
    return torch.cat((word >> 12, ((word & 0xFFFF) << 4) | (word >> 28)), 1)[:, :size]


def round_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bf16 stochastically: up with a probability equal to the distance from the lower neighbour.

    The sixteen bits that bf16 drops are compared with sixteen random bits, so subnormals round like all other values.
    Values on the grid, NaN and Inf are kept, and a finite value stays finite.

    Args:
        x: float32.
        bits: 23 random bits for each element, from `uniform_bits`.

    Returns:
        bfloat16, of x's shape.

    Example:
        >>> round_bf16(torch.tensor([1.0]), torch.tensor([2**23 - 1])).item()
        1.0
    """
    if x.dtype != torch.float32:
        raise ValueError(f"round_bf16 takes float32, got {x.dtype}; hint: x.float()")
    pattern = x.contiguous().view(torch.int32)
    kept = pattern & ~0xFFFF
    up = (bits >> 7).to(torch.int32) < (pattern & 0xFFFF)
    rounded = torch.where(up, kept + 0x10000, kept).view(torch.float32)
    largest = torch.finfo(torch.bfloat16).max
    return torch.where(x.isfinite(), rounded.clamp(-largest, largest), x).to(torch.bfloat16)
