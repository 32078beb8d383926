"""Lookups and updates that the tests of both embedding ops share: ragged, with empty bags, duplicates and weights."""

import torch
from torch import Tensor

from loka.kernels.embedding_bag import Rows

FORMATS = ("float32", "bfloat16", "int8:row", "e4m3:row:pow2", "int4:row")


def table(kind: str, *, rows: int = 50, width: int = 24, hot: bool = False) -> Rows:
    made = Rows.of(torch.randn(rows, width), kind)
    if not hot:
        return made
    slot = torch.full((rows,), -1, dtype=torch.int32)
    slot[::7] = torch.arange(len(slot[::7]), dtype=torch.int32)
    return Rows(made.data, made.scale_code, made.spec, slot, torch.randn(len(slot[::7]), width))


def bags(rows: int = 50, count: int = 9, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices with many duplicates, and offsets of bags of 0 to 40 items; the first and the last are empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (count,), generator=generator)
    lengths[0] = lengths[-1] = lengths[3] = 0
    lengths[4] = 40
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    indices = torch.randint(0, rows, (int(offsets[-1]),), generator=generator)
    indices[::5] = 7  # hot
    return indices, offsets


def copy(rows: Rows, device: torch.device | None = None) -> Rows:
    held = (rows.data, rows.scale_code, rows.slot, rows.hot)
    parts = [None if t is None else t.clone().to(device or t.device) for t in held]
    return Rows(parts[0], parts[1], rows.spec, parts[2], parts[3])
