"""Correct GEMMs, drawn at random: what the gate must let pass.

They differ in how they add up, as real ones do: whole products or blocks of K in any order, split along K and added in an order that changes from call to call, in float64, in
float32, or as Hopper's FP8 tensor cores add (about 14 bits, moved to float32 every 128 products, or never with fast accumulation); scales on the operands or on the
sums. And in habits that are nobody's business: results that are views of something larger, weights laid out beforehand, an honest no to odd addresses.
"""

import random
from collections.abc import Callable

import torch
from defects_kernels import Kernel
from torch import Tensor

from loka.formats import QTensor, decode, expand_scale
from loka.kernels.prepared import laid_out, with_layout
from loka.kernels.scaled_mm.call import MatmulCall

BITS = 13  # below the largest term: what Hopper keeps of a sum
EMULATED = 1 << 21  # elements of partial sums that an emulation of tensor cores may take in a call
Adder = Callable[[Tensor, Tensor, random.Random], Tensor]


def whole(left: Tensor, right: Tensor, rng: random.Random) -> Tensor:
    return left @ right.T


def wide(left: Tensor, right: Tensor, rng: random.Random) -> Tensor:
    return (left.double() @ right.double().T).float()


def blocks(chunk: int, *, shuffled: bool, split: int = 1) -> Adder:
    """Blocks of K in float32, in order, or in an order of the moment; `split` sums that are added at the end."""

    def add(left: Tensor, right: Tensor, rng: random.Random) -> Tensor:
        parts = list(zip(left.split(chunk, 1), right.split(chunk, 1), strict=True))
        if shuffled:
            rng.shuffle(parts)
        sums = [torch.zeros(len(left), len(right)) for _ in range(min(split, len(parts)))]
        for number, (x, w) in enumerate(parts):
            sums[number % len(sums)] += x @ w.T
        if shuffled:
            rng.shuffle(sums)
        total = sums[0]
        for one in sums[1:]:
            total = total + one
        return total

    return add


def short_sums(bits: int, step: int) -> Adder:
    """The running sum cut to a few bits after every step: a plain way to emulate fast accumulation."""

    def add(left: Tensor, right: Tensor, rng: random.Random) -> Tensor:
        total = torch.zeros(len(left), len(right))
        for x, w in zip(left.split(step, 1), right.split(step, 1), strict=True):
            mantissa, exponent = torch.frexp(total + x @ w.T)
            total = torch.ldexp(torch.trunc(mantissa * 2.0**bits) / 2.0**bits, exponent)
        return total

    return add


def tensor_core(promotion: int) -> Adder:
    """32 products at a time, sum and products cut to a grid 2^-13 below the larger of them; moved to float32 every `promotion` products."""

    def add(left: Tensor, right: Tensor, rng: random.Random) -> Tensor:
        total = torch.zeros(len(left), len(right))
        running = torch.zeros_like(total)
        for start in range(0, left.shape[1], 32):
            part = left[:, start : start + 32] @ right[:, start : start + 32].T
            largest = torch.maximum(part.abs(), running.abs())
            grid = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-120))) - BITS)
            running = torch.trunc(part / grid) * grid + torch.trunc(running / grid) * grid
            if (start + 32) % promotion == 0:
                total, running = total + running, torch.zeros_like(running)
        return total + running

    return add


class Correct(Kernel):
    """A GEMM that is right."""

    def __init__(self, add: Adder, *, late_scales: bool, habit: str, seed: int) -> None:
        self.add, self.late, self.habit, self.rng = add, late_scales, habit, random.Random(seed)
        if habit == "prepares":
            self.prepare = lambda weight, a: with_layout(weight, "correct", a, self._lay)

    def _lay(self, weight: QTensor, a: object) -> tuple[Tensor, Tensor]:
        data = torch.zeros(weight.shape[0] + 3, weight.shape[1] + 5, dtype=torch.uint8)
        data[: weight.shape[0], : weight.shape[1]] = weight.data.view(torch.uint8)
        return data.view(weight.data.dtype), weight.scale.clone()

    def run(self, a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
        if self.habit == "demands alignment" and (a.data.data_ptr() % 16 or not a.data.is_contiguous()):
            raise ValueError("a must be contiguous and begin at a multiple of 16 bytes")
        if self.habit == "prepares":
            data, scale = laid_out(b, "correct", a.spec, self._lay)
            b = QTensor(data[: b.shape[0], : b.shape[1]], scale, b.spec)
        out = self.sums(a, b).to(out_dtype)
        if self.habit == "transposed result":
            return out.T.contiguous().T
        if self.habit == "padded result":
            padded = torch.full((out.shape[0] + 7, out.shape[1] + 9), torch.nan, dtype=out_dtype)
            padded[: out.shape[0], : out.shape[1]] = out
            return padded[: out.shape[0], : out.shape[1]]
        return out

    def sums(self, a: QTensor, b: QTensor) -> Tensor:
        """Scales applied once per row to the sums, per block of K to its sums, or to the operands."""
        if not self.late:
            return self.add(a.dequantize(), b.dequantize(), self.rng)
        left, right = decode(a.data, a.spec.format), decode(b.data, b.spec.format)
        of_a, of_b = (expand_scale(q.scale, q.shape, q.spec.block).expand(q.shape) for q in (a, b))
        width = 128 if a.scale.dim() == 2 and a.scale.shape[1] > 1 else max(a.shape[1], 1)
        total = torch.zeros(len(left), len(right))
        for start in range(0, a.shape[1], width):
            part = slice(start, start + width)
            total = (
                total + self.add(left[:, part], right[:, part], self.rng) * of_a[:, start, None] * of_b[None, :, start]
            )
        return total


def draw_correct(rng: random.Random, call: MatmulCall) -> tuple[str, str, Correct]:
    """(family, description, kernel)."""
    chunk, split = rng.choice((16, 32, 64, 128, 256)), rng.choice((2, 3, 4, 8))
    families: dict[str, tuple[str, Adder]] = {
        "whole products": ("float32", whole),
        "float64": ("float64", wide),
        "blocks of K": (f"blocks of {chunk}", blocks(chunk, shuffled=False)),
        "split K": (f"{split} sums of blocks of {chunk}, any order", blocks(chunk, shuffled=True, split=split)),
    }
    if call.m * call.n * -(-call.k // 32) <= EMULATED:
        promotion = 1 << 30 if call.fast_accum else 128
        families["tensor cores"] = (f"tensor cores, promotion every {promotion}", tensor_core(promotion))
        families["short sums"] = ("sums of 14 bits every 32 products", short_sums(14, 32))
    family = rng.choice(sorted(families))
    text, add = families[family]
    habit = rng.choice(("", "", "", "transposed result", "padded result", "prepares", "demands alignment"))
    late = family == "tensor cores" or rng.random() < 0.5
    kernel = Correct(add, late_scales=late, habit=habit, seed=rng.randrange(1 << 30))
    return family, f"{text}, scales {'late' if late else 'early'}{', ' + habit if habit else ''}", kernel
