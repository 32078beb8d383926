"""Operands that show what a kernel does wrong: twelve sets for a GEMM of quantised operands, six for a quantiser.

Elements and scales are made apart from each other, since a kernel does not know where either came from: elements as shares v of the format's range
(q = round(v * format.max)), scales as a grid of their own. So every code can occur in every row, under tensor scales too, and every scale is
different from its neighbours.

    flat         all rows, columns and products of one size: whatever is missing, is missing visibly
    turned       flat, but for the signs of one row of a and of one of b: a result remembered by a part of its operands is the wrong one
    rescaled     flat, but for the scales of b, all elements equal: so is one remembered by elements
    spread       rows and blocks of very different size, in elements and scales: a scale read at the wrong place shows
    heavy        Student t with two degrees of freedom, where few elements carry a row; every other row of a zero
    extreme      rows that are zero, saturated, clipped, subnormal, one element, one outlier, 2^40 and 2^-40 times the others, and of all codes alike, interleaved
    duplicates   equal rows at many distances and in groups of many sizes; rows of equal elements under different scales
    constant     one row, M times, the largest group of duplicates there can be, a quarter under twice the scale; three quarters of b's rows alike too
    huge         all rows of a 2^20 to 2^40 times their size; half of b's rows hold a single element, so that the product shows single ones of a
    tiny         all elements of a among the format's smallest, under scales 2^-20 to 2^-40 of theirs; half of b's rows as well
    saturated    every element of a at plus or minus the largest value, half of b's rows too
    impulses     every other row of a holds a single element, the k-th in its turn, so that the product shows single ones of b; the others zero

All signs are random. The error bounds need that: fast accumulation loses a sum of one sign linearly, which is an error of the format (`loka.probe`
weighs it) and no defect of a kernel.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loka.formats import QTensor, Spec, decode, encode, quantize, scale_shape
from loka.kernels.scaled_mm.call import MatmulCall

MATMUL_SETS = (
    "flat", "turned", "rescaled", "spread", "heavy", "extreme", "duplicates", "constant", "huge", "tiny", "saturated", "impulses",
)  # fmt: skip
QUANTIZE_SETS = ("flat", "spread", "heavy", "extreme", "duplicates", "saturated")
TYPICAL = 0.25  # of the format's range: the standard deviation of ordinary elements
FAR = 40  # binary orders between an extreme row and the others
BLOCK = 128
EXTREMES = ("plain", "zero", "saturated", "clipped", "subnormal", "outlier", "impulse", "huge", "tiny")


@dataclass(frozen=True)
class OperandSet:
    """The two operands of one GEMM; `alike` where most rows are equal, so that errors of different elements are not independent."""

    name: str
    a: QTensor
    b: QTensor
    alike: bool = False


def matmul_set(call: MatmulCall, name: str, *, seed: int, device: torch.device) -> OperandSet:
    """One set of operands for a call, by its name in MATMUL_SETS: a function of call, name and seed on a kind of device, with values and scales that differ from those of every other set."""
    if name in ("turned", "rescaled"):
        return _vary(matmul_set(call, "flat", seed=seed, device=device), name)
    generator = torch.Generator(device=device).manual_seed(seed + 1000 * MATMUL_SETS.index(name))
    left, right = (_Maker(spec, rows, call, generator) for spec, rows in ((call.a, call.m), (call.b, call.n)))
    if name == "constant":
        one = _Maker(call.a, 1, call, generator).make(_normal(1, call.k, generator), spread=0.5)
        return OperandSet(name, left.vary_scales(_repeat(one, call.m)), right.mostly_constant(), True)
    return OperandSet(name, getattr(left, name)(), getattr(right, _PARTNER.get(name, name))())


def _vary(flat: OperandSet, name: str) -> OperandSet:
    """A set that is nearly another one."""
    a, b = flat.a, flat.b
    if name == "rescaled":
        return OperandSet(name, a, replace(b, scale=b.scale * (1.25 if b.spec.scale == "f32" else 2.0)))
    return OperandSet(name, _turn_row(a, 2 * a.shape[0] // 3), _turn_row(b, 2 * b.shape[0] // 3))


def _turn_row(q: QTensor, row: int) -> QTensor:
    """The signs of one row turned around."""
    values = decode(q.data, q.spec.format)
    values[row : row + 1] *= -1
    return replace(q, data=encode(values, q.spec.format))


# what stands opposite
_PARTNER = {"heavy": "spread", "huge": "flat", "tiny": "half_subnormal", "saturated": "half_saturated"}


class _Maker:
    """Makes one operand of a call."""

    def __init__(self, spec: Spec, rows: int, call: MatmulCall, generator: torch.Generator) -> None:
        self.spec, self.rows, self.k, self.generator = spec, rows, call.k, generator
        self.far = 4 if call.out_dtype == torch.float16 else FAR
        self.own_scales = spec.block.rows == 1

    def make(self, v: Tensor, *, spread: float, rows: Tensor | None = None) -> QTensor:
        """Elements v under scales e^(spread z) of their own, times a factor per row where rows have scales, and one for the whole."""
        if self.spec.scale == "e4m3":  # two levels: the law's own scales
            return quantize(v, self.spec)
        shape, device = scale_shape(v.shape, self.spec.block), v.device
        scale = torch.exp(spread * torch.randn(shape, generator=self.generator, device=device))
        scale = scale * torch.exp(4 * torch.rand((), generator=self.generator, device=device) - 2)
        if rows is not None and self.own_scales:
            scale = scale * rows[:, None]
        if self.spec.scale != "f32":
            scale = torch.exp2(torch.log2(scale).round())
        return QTensor(encode(v * self.spec.format.max, self.spec.format), scale / self._unit(), self.spec)

    def _unit(self) -> float:
        """The format's range as a power of two: values stay near 1."""
        return 2.0 ** math.floor(math.log2(self.spec.format.max))

    def flat(self) -> QTensor:
        return self.make(_normal(self.rows, self.k, self.generator), spread=0.25)

    def spread(self) -> QTensor:
        v = _normal(self.rows, self.k, self.generator)
        if not self.own_scales:  # rows share a scale: what differs is their elements
            v = v * torch.exp2(-6 * self._uniform(self.rows))[:, None]
        return self.make(v, spread=1.0, rows=torch.exp(2 * self._uniform(self.rows) - 1))

    def heavy(self) -> QTensor:
        v = heavy_tails(self.rows, self.k, self.generator)
        v[::2] = 0
        return self.make(v, spread=0.5)

    def extreme(self) -> QTensor:
        v = _normal(self.rows, self.k, self.generator)
        factors = torch.ones(self.rows, device=v.device)
        kinds = torch.randint(2 * len(EXTREMES), (self.rows,), generator=self.generator, device=v.device)
        v = torch.where((kinds >= len(EXTREMES))[:, None], self._any_code(v), v)
        for number, kind in enumerate(EXTREMES):
            at = (kinds == number).nonzero().flatten()
            if kind in ("huge", "tiny"):
                factors[at] = 2.0 ** (self.far if kind == "huge" else -self.far)
            elif len(at):
                v[at] = self._extreme_rows(kind, v[at])
        return self.make(v, spread=0.5, rows=factors)

    def _extreme_rows(self, kind: str, v: Tensor) -> Tensor:
        if kind == "zero":
            return torch.zeros_like(v)
        if kind == "saturated":
            return v.sign()
        if kind == "clipped":
            return 8 * v
        if kind == "subnormal":
            return v * self._subnormal()
        if kind in ("outlier", "impulse"):
            rest = torch.zeros_like(v) if kind == "impulse" else v * self._subnormal()
            return _with_impulses(rest, self.generator)
        return v

    def _any_code(self, v: Tensor) -> Tensor:
        """The signs of v, sizes from the format's largest down to its smallest, every octave alike."""
        octaves = (
            math.log2(self.spec.format.max / self.spec.format.smallest_subnormal)
            if not self.spec.format.is_integer
            else 7
        )
        return v.sign() * torch.exp2(-octaves * torch.rand(v.shape, generator=self.generator, device=v.device))

    def _subnormal(self) -> float:
        """A factor that leaves ordinary elements a few of the format's smallest steps."""
        form = self.spec.format
        return 8 * form.smallest_subnormal / (TYPICAL * form.max) if not form.is_integer else 8 / form.max

    def duplicates(self) -> QTensor:
        index, twice = duplicate_rows(self.rows, self.generator, device=self.generator.device)
        v = _normal(self.rows, self.k, self.generator)
        q = self.make(v, spread=0.75)
        if self.spec.scale == "e4m3":
            return quantize(v[index], self.spec)
        data = _bytes(q.data)[index].view(q.data.dtype)
        scale = q.scale
        if self.own_scales:
            scale = scale[index] * torch.where(twice, 2.0, 1.0)[:, None]
        return QTensor(data, scale.contiguous(), self.spec)

    def vary_scales(self, q: QTensor) -> QTensor:
        """Twice the scale for a quarter of the rows, the last among them."""
        if not self.own_scales or self.spec.scale == "e4m3" or self.rows < 2:
            return q
        twice = self._uniform(self.rows) < 0.25
        twice[-1] = True
        return replace(q, scale=q.scale * torch.where(twice, 2.0, 1.0)[:, None])

    def mostly_constant(self) -> QTensor:
        v = _normal(self.rows, self.k, self.generator)
        return self.make(torch.where((self._uniform(self.rows) < 0.75)[:, None], v[:1], v), spread=0.5)

    def huge(self) -> QTensor:
        return self._far(self.make(_normal(self.rows, self.k, self.generator), spread=0.5), 1)

    def tiny(self) -> QTensor:
        v = _normal(self.rows, self.k, self.generator) * self._subnormal()
        return self._far(self.make(v, spread=0.5), -1)

    def _far(self, q: QTensor, sign: int) -> QTensor:
        """Scales 2^20 to 2^40 times themselves, or that much smaller; one factor where rows share a scale."""
        if self.spec.scale == "e4m3":
            return q
        exponent = (self.far * (1 + self._uniform(self.rows if self.own_scales else 1)) / 2).round()
        factor = torch.exp2(sign * exponent)
        return replace(q, scale=q.scale * (factor[:, None] if self.own_scales else factor[0]))

    def half_subnormal(self) -> QTensor:
        v = _normal(self.rows, self.k, self.generator)
        small = self._uniform(self.rows) < 0.5
        return self.make(torch.where(small[:, None], v * self._subnormal(), v), spread=0.5)

    def saturated(self) -> QTensor:
        return self.make(_normal(self.rows, self.k, self.generator).sign(), spread=0.5)

    def half_saturated(self) -> QTensor:
        v = _normal(self.rows, self.k, self.generator)
        full = self._uniform(self.rows) < 0.5
        return self.make(torch.where(full[:, None], v.sign(), self._any_code(v)), spread=0.5)

    def impulses(self) -> QTensor:
        v = torch.zeros(self.rows, self.k, device=self.generator.device)
        v[::2] = _with_impulses(v[::2], self.generator)
        return self.make(v, spread=0.5)

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.generator, device=self.generator.device)


def _normal(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    return TYPICAL * torch.randn(rows, cols, generator=generator, device=generator.device)


def heavy_tails(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Student t with two degrees of freedom, in shares of the range."""
    z = torch.randn(3, rows, cols, generator=generator, device=generator.device)
    return 0.1 * z[0] / (z[1].square() + z[2].square()).mul(0.5).sqrt().clamp(min=1e-3)


def _with_impulses(rest: Tensor, generator: torch.Generator) -> Tensor:
    """One element of full size, of random sign, in each row: all columns in turn, in random order."""
    rows, cols = rest.shape
    if not rows or not cols:
        return rest
    order = torch.randperm(cols, generator=generator, device=rest.device)
    at = order.repeat(-(-rows // cols))[:rows]
    signs = 2.0 * torch.randint(2, (rows,), generator=generator, device=rest.device) - 1
    return rest.scatter(1, at[:, None], signs[:, None])


def duplicate_rows(rows: int, generator: torch.Generator, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which row each row repeats, and which repeats are under twice the scale.

    A third of the rows repeat others: pairs at distances 1, 2, 4, ... and from the first to the last row, small groups, and one group over all rows.
    """
    index = torch.arange(rows, device=device)
    if rows < 2:
        return index, torch.zeros(rows, dtype=torch.bool, device=device)
    places = torch.randint(rows, (3, rows), generator=generator, device=device)
    repeats = torch.rand(rows, generator=generator, device=device) < 0.3
    pool = torch.where(places[1] % 2 == 0, places[0] % max(1, rows // 16), places[2][0].expand(rows))
    index = torch.where(repeats, pool, index)
    distance = 1
    while distance < rows:  # later pairs may undo earlier ones: there are many
        start = int(places[1][distance % rows]) % (rows - distance)
        index[start + distance] = index[start]
        distance *= 2
    index[rows - 1] = index[0]
    twice = (index != torch.arange(rows, device=device)) & (places[2] % 4 == 0)
    return index, twice


def _repeat(one: QTensor, rows: int) -> QTensor:
    """A single row as a whole operand."""
    shape = (rows, one.shape[1])
    data = _bytes(one.data).expand(shape).contiguous().view(one.data.dtype)
    grid = scale_shape(shape, one.spec.block)
    scale = one.scale if not grid else one.scale.expand(grid).contiguous()
    return QTensor(data, scale, one.spec, one.tensor_scale)


def _bytes(data: Tensor) -> Tensor:
    """8-bit floats as bytes: torch does not index, expand and compare all of them."""
    return data.view(torch.uint8) if data.element_size() == 1 else data


def quantize_set(name: str, rows: int, cols: int, *, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An input [rows, cols] for a quantiser, by its name in QUANTIZE_SETS: the kinds of the module's table, in the values themselves. The extreme one has a NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator, device=device)
    factor = torch.exp(4 * torch.rand((), generator=generator, device=device) - 2)
    if name == "spread":
        x = x * torch.exp(2 * torch.randn(rows, 1, generator=generator, device=device))
        x = (
            x
            * torch.exp(torch.randn(1, -(-cols // BLOCK), generator=generator, device=device)).repeat_interleave(
                BLOCK, 1
            )[:, :cols]
        )
    elif name == "heavy":
        x = heavy_tails(rows, cols, generator)
    elif name == "extreme":
        x = _extreme_values(x, 4 if dtype == torch.float16 else FAR, generator)
    elif name == "duplicates":
        index, twice = duplicate_rows(rows, generator, device=device)
        x = x[index] * torch.where(twice, 2.0, 1.0)[:, None]
    elif name == "saturated":
        x = x.sign() * (1 + torch.randint(2, (rows, 1), generator=generator, device=device))
    return (factor * x).to(dtype)


def _extreme_values(x: Tensor, far: int, generator: torch.Generator) -> Tensor:
    rows, cols = x.shape
    kinds = torch.randint(12, (rows, 1), generator=generator, device=x.device)
    # down to the subnormals and below
    steps = torch.exp2(-24 * torch.rand(rows, cols, generator=generator, device=x.device))
    x = torch.where(kinds == 0, torch.zeros_like(x), x)
    x = torch.where(kinds == 1, x * 2.0**far, x)
    x = torch.where(kinds == 2, x * 2.0**-far, x)
    x = torch.where(kinds == 3, _with_impulses(x * 2.0**-12, generator), x)
    x = torch.where((kinds == 4) | (kinds == 5), _with_impulses(x * steps, generator), x)
    x = torch.where(kinds == 6, (8 * x).round() / 8, x)  # ties
    if rows and cols:
        x[rows // 2, cols // 2] = torch.nan
    return x
