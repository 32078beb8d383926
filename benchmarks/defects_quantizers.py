"""Defective quantisers, drawn at random. What they claim is exact: the law's bits, so a draw counts as a defect if any element or scale differs on inputs it names."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from defects_kernels import normal as draw_normal
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.formats import quantize as quantize_by_law

Quantizer = Callable[[Tensor, Spec], QTensor]
SPECS = ("e4m3:row", "e4m3:tensor", "e4m3:1x128", "e4m3:128x128", "e5m2:row")


@dataclass(frozen=True)
class QuantizerDraw:
    """One defective quantiser, and an input it spoils."""

    family: str
    text: str
    make: Callable[[], Quantizer]
    inputs: Callable[[int], list[Tensor]]  # of consecutive calls; the last is spoiled


def _codes(q: QTensor) -> Tensor:
    return q.data.view(torch.uint8).clone()


def _with(q: QTensor, codes: Tensor) -> QTensor:
    return replace(q, data=codes.view(q.data.dtype))


def draw_quantizer(rng: random.Random, rows: int, cols: int, spec: Spec) -> QuantizerDraw:
    """A family and its parameters."""
    row, col = rng.randrange(rows), rng.randrange(cols)
    chance, seed = rng.uniform(0.2, 1.0), rng.randrange(1 << 30)
    top = 0x7E if spec.format.name == "e4m3" else 0x7B

    def normal(number: int, *, size: float = 1.0) -> Tensor:
        return size * draw_normal(rows, cols, generator=torch.Generator().manual_seed(number))

    def uneven(number: int) -> list[Tensor]:
        return [normal(number) * torch.exp(normal(number + 1)[:, :1] * 2), normal(number + 2, size=7.0)]

    def beyond(x: Tensor, spec: Spec) -> QTensor:
        q = quantize_by_law(x, spec)
        codes = _codes(q)
        codes[row:] = 0
        return _with(q, codes)

    def tail(x: Tensor, spec: Spec) -> QTensor:
        q = quantize_by_law(x, spec)
        codes = _codes(q)
        codes[:, col:] = codes[:, col:].flip(1) if col + 1 < cols else 0
        return _with(q, codes)

    def ulp(x: Tensor, spec: Spec) -> QTensor:
        q = quantize_by_law(x, spec)
        codes = _codes(q)
        codes[row:] -= ((codes[row:] & 0x7F) == top).to(torch.uint8)
        return _with(q, codes)

    def flush(x: Tensor, spec: Spec) -> QTensor:
        q = quantize_by_law(x, spec)
        codes = _codes(q)
        small = (codes & (0x78 if spec.format.name == "e4m3" else 0x7C)) == 0
        return _with(q, torch.where(small, 0, codes).to(torch.uint8))

    def truncate(x: Tensor, spec: Spec) -> QTensor:
        q = quantize_by_law(x, spec)
        codes = _codes(q)
        off = (q.dequantize().abs() > x.abs()) & ((codes & 0x7F) > 0)
        off[:row] = False
        return _with(q, codes - off.to(torch.uint8))

    class Stale:
        def __init__(self) -> None:
            self.kept: Tensor | None = None

        def __call__(self, x: Tensor, spec: Spec) -> QTensor:
            q = quantize_by_law(x, spec)
            held, self.kept = self.kept, q.scale
            return q if held is None or held.shape != q.scale.shape else replace(q, scale=held)

    class Race:
        def __init__(self) -> None:
            self.rng = random.Random(seed)

        def __call__(self, x: Tensor, spec: Spec) -> QTensor:
            q = quantize_by_law(x, spec)
            if self.rng.random() >= chance:
                return q
            codes = _codes(q)
            codes[self.rng.randrange(rows), self.rng.randrange(cols)] ^= 0x11
            return _with(q, codes)

    def unwritten(x: Tensor, spec: Spec) -> QTensor:
        q = quantize_by_law(x, spec)
        out = torch.empty(rows, cols, dtype=torch.uint8)
        out[:row] = q.data.view(torch.uint8)[:row]
        return _with(q, out)

    def moved(x: Tensor, spec: Spec) -> QTensor:
        return (
            quantize_by_law(x.flip(0), spec) if x.data_ptr() % 16 or not x.is_contiguous() else quantize_by_law(x, spec)
        )

    def shifted(number: int) -> list[Tensor]:
        return [torch.zeros(rows * cols + 1)[1:].view(rows, cols).copy_(normal(number))]

    def full(number: int) -> list[Tensor]:
        return [normal(number).sign()]

    def tiny(number: int) -> list[Tensor]:
        uniform = torch.rand(rows, cols, generator=torch.Generator().manual_seed(number), device="cpu")
        x = normal(number) * torch.exp2(-20 * uniform.to(torch.get_default_device()))
        x[:, 0] = 1
        return [x]

    draws = {
        "rows": (f"rows from {row} zero", lambda: beyond, uneven),
        "columns": (f"columns from {col} spoiled", lambda: tail, uneven),
        "saturation": (f"largest codes one lower from row {row}", lambda: ulp, full),
        "subnormals": ("flushed", lambda: flush, tiny),
        "rounding": (f"towards zero from row {row}", lambda: truncate, uneven),
        "stale scales": ("of the call before", Stale, uneven),
        "races": (
            f"one element with probability {chance:.2f}",
            Race,
            lambda number: [normal(number + i) for i in range(40)],
        ),
        "uninitialised": (f"rows from {row} unwritten", lambda: unwritten, uneven),
        "alignment": ("rows flipped at odd addresses", lambda: moved, shifted),
    }
    family = rng.choice(sorted(draws))
    text, make, inputs = draws[family]
    return QuantizerDraw(f"quantiser: {family}", text, make, inputs)


def spoils(quantizer: Quantizer, inputs: list[Tensor], spec: Spec) -> bool:
    """Whether any of the results differs from the law's."""
    for x in inputs:
        q, law = quantizer(x, spec), quantize_by_law(x, spec)
        same = torch.equal(q.data.float().nan_to_num(-1e6), law.data.float().nan_to_num(-1e6)) and torch.equal(
            q.scale, law.scale
        )
        if not same:
            return True
    return False
