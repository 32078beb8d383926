"""Operands that expose kernel bugs: thirteen sets for a GEMM of quantized operands, eight for a quantizer.

Elements and scales are drawn independently, since a kernel does not know where they come from: elements as shares v of
the format's range (q = round(v * format.max)), scales as a grid of their own. So every code can occur in every row,
under tensor scales too, and every scale differs from its neighbors.

    flat         all rows, columns and products of one size: anything missing is visible
    turned       flat, except for the signs of one row of a and one of b: exposes results cached by a part of the
                 operands
    rescaled     flat, except for the scales of b: exposes results cached by elements
    spread       rows and blocks of very different size, in elements and scales: exposes scales read at the wrong place
    heavy        Student t with two degrees of freedom, where few elements dominate a row; every other row of a is zero;
                 half of b's rows are as behind a ReLU: in a weight gradient, b is the layer's input
    extreme      an interleaved mix of rows: zero, saturated, clipped, subnormal, with a single element or outlier, 2^40
                 and 2^-40 times the others, or with all codes equally likely; up to three rows of each operand contain a
                 NaN, also in the first and the last column
    duplicates   equal rows at many distances and in groups of many sizes; rows of equal elements with different scales
    constant     one row repeated M times, a quarter with twice the scale; three quarters of b's rows are equal too
    huge         all rows of a 2^20 to 2^40 times their size; every other row of b has one element that dominates it,
                 among zeros or among the format's smallest, so that it shows in every row of the result
    tiny         all elements of a among the format's smallest, with scales 2^20 to 2^40 times smaller; half of b's rows
                 have such elements too
    saturated    every element of a at plus or minus the largest value, half of b's rows too
    impulses     every other row of a and b has a single nonzero element, at every column in turn, so that single
                 products show; the other rows are zero
    rectified    a as behind a ReLU: no negative element, half of them zero, columns equal in pairs; some rows without a
                 zero, of one value, or with zeros in their right half
    zero         nothing but zeros, for quantizers: a scale of 0 / 0

The signs of all products are random. The error bounds require that: fast accumulation loses a sum of one sign linearly,
which is an error of the format (measured by `loka.probe`), not a defect of a kernel.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loka.formats import QTensor, Spec, decode, encode, quantize, scale_shape
from loka.kernels.scaled_mm.call import MatmulCall

MATMUL_SETS = (
    "flat", "turned", "rescaled", "spread", "heavy", "extreme", "duplicates", "constant", "huge", "tiny", "saturated", "impulses",
    "rectified",
)  # fmt: skip
QUANTIZE_SETS = ("flat", "spread", "heavy", "extreme", "duplicates", "saturated", "rectified", "zero")
TYPICAL = 0.25  # standard deviation of ordinary elements, as a share of the format's range
FAR = 40  # powers of two between an extreme row and the others
FURTHER = 100  # the same for a quantizer, which multiplies no two of them
BLOCK = 128
NAN_ROWS = 8  # rows of an operand for each that contains a NaN
EXTREMES = ("plain", "zero", "saturated", "clipped", "subnormal", "outlier", "impulse", "huge", "tiny")


@dataclass(frozen=True)
class OperandSet:
    """The two operands of one GEMM. `alike`: most rows are equal, so that errors of elements are not independent."""

    name: str
    a: QTensor
    b: QTensor
    alike: bool = False


def matmul_set(call: MatmulCall, name: str, *, seed: int, device: torch.device) -> OperandSet:
    """Make the operand set of a call by its name in MATMUL_SETS. Deterministic on a given type of device."""
    if name in ("turned", "rescaled"):
        return _vary_flat(matmul_set(call, "flat", seed=seed, device=device), name)
    generator = torch.Generator(device=device).manual_seed(seed + 1000 * MATMUL_SETS.index(name))
    left, right = (_Maker(spec, rows, call, generator) for spec, rows in ((call.a, call.m), (call.b, call.n)))
    if name == "constant":
        one = _Maker(call.a, 1, call, generator).make(_normal(1, call.k, generator), spread=0.5)
        return OperandSet(name, left.vary_scales(_repeat(one, call.m)), right.mostly_constant(), True)
    a, b = getattr(left, name)(), getattr(right, _PARTNER.get(name, name))()
    return OperandSet(name, _put_nan(a), _put_nan(b)) if name == "extreme" else OperandSet(name, a, b)


def _vary_flat(flat: OperandSet, name: str) -> OperandSet:
    """Make a set that differs only slightly from `flat`."""
    a, b = flat.a, flat.b
    if name == "rescaled":
        return OperandSet(name, a, replace(b, scale=b.scale * (1.25 if b.spec.scale == "f32" else 2.0)))
    return OperandSet(name, _negate_row(a, 2 * a.shape[0] // 3), _negate_row(b, 2 * b.shape[0] // 3))


def _negate_row(q: QTensor, row: int) -> QTensor:
    values = decode(q.data, q.spec.format)
    values[row : row + 1] *= -1
    return replace(q, data=encode(values, q.spec.format))


def _put_nan(q: QTensor) -> QTensor:
    """Put NaN into the middle, the first and the last column of one row each, if the format has NaN.

    Such a row makes a row or column of the result NaN, so small operands have fewer of them.
    """
    rows, cols = q.shape
    if not q.spec.format.has_nan or rows < NAN_ROWS or not cols:
        return q
    values = decode(q.data, q.spec.format)
    for row, column in ((rows // 2, cols // 2), (rows // 4, 0), (3 * rows // 4, cols - 1))[: rows // NAN_ROWS]:
        values[row, column] = torch.nan
    return replace(q, data=encode(values, q.spec.format))


# the kind of b for a given kind of a, where they differ
_PARTNER = {
    "heavy": "half_rectified",
    "huge": "half_dominated",
    "tiny": "half_subnormal",
    "saturated": "half_saturated",
    "rectified": "flat",
}


class _Maker:
    """Makes one operand of a call."""

    def __init__(self, spec: Spec, rows: int, call: MatmulCall, generator: torch.Generator) -> None:
        self.spec, self.rows, self.k, self.generator = spec, rows, call.k, generator
        self.far = 4 if call.out_dtype == torch.float16 else FAR
        self.own_scales = spec.block.rows == 1

    def make(self, v: Tensor, *, spread: float, rows: Tensor | None = None) -> QTensor:
        """Combine elements v with random scales e^(spread z), times `rows` if rows have scales, and a global factor."""
        if self.spec.scale == "e4m3":  # two-level scales: use those of the reference
            return quantize(v, self.spec)
        shape, device = scale_shape(v.shape, self.spec.block), v.device
        scale = torch.exp(spread * torch.randn(shape, generator=self.generator, device=device))
        scale = scale * torch.exp(4 * torch.rand((), generator=self.generator, device=device) - 2)
        if rows is not None and self.own_scales:
            scale = scale * rows[:, None]
        if self.spec.scale != "f32":
            scale = torch.exp2(torch.log2(scale).round())
        unit = 2.0 ** math.floor(math.log2(self.spec.format.max))  # keeps values near 1
        return QTensor(encode(v * self.spec.format.max, self.spec.format), scale / unit, self.spec)

    def flat(self) -> QTensor:
        return self.make(_normal(self.rows, self.k, self.generator), spread=0.25)

    def spread(self) -> QTensor:
        v = _normal(self.rows, self.k, self.generator)
        if not self.own_scales:  # rows share a scale, so vary their elements
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
        """Return values with the signs of v and sizes log-uniform over the format's range."""
        form = self.spec.format
        octaves = 7 if form.is_integer else math.log2(form.max / form.smallest_subnormal)
        return v.sign() * torch.exp2(-octaves * torch.rand(v.shape, generator=self.generator, device=v.device))

    def _subnormal(self) -> float:
        """Return a factor that scales ordinary elements down to a few of the format's smallest steps."""
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
        """Double the scale of a quarter of the rows, including the last."""
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
        """Multiply scales by 2^20 to 2^40 (sign 1) or divide them (sign -1); one factor if rows share a scale."""
        if self.spec.scale == "e4m3":
            return q
        exponent = (self.far * (1 + self._uniform(self.rows if self.own_scales else 1)) / 2).round()
        factor = torch.exp2(sign * exponent)
        return replace(q, scale=q.scale * (factor[:, None] if self.own_scales else factor[0]))

    def half_dominated(self) -> QTensor:
        v = _normal(self.rows, self.k, self.generator)
        v[::4] = 0
        v[2::4] *= self._subnormal()
        v[::2] = _with_impulses(v[::2], self.generator)
        return self.make(v, spread=0.25)

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

    def rectified(self) -> QTensor:
        return self.make(_rectify(_normal(self.rows, self.k, self.generator)), spread=0.5)

    def half_rectified(self) -> QTensor:
        v = _normal(self.rows, self.k, self.generator)
        chosen = self._uniform(self.rows) < 0.5
        return self.make(torch.where(chosen[:, None], _rectify(v.clone()), v), spread=0.5)

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.generator, device=self.generator.device)


def _normal(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    return TYPICAL * torch.randn(rows, cols, generator=generator, device=generator.device)


def _rectify(x: Tensor) -> Tensor:
    """Make what a ReLU gives, from random signs; columns are equal in pairs, and of eight rows three are special."""
    cols = x.shape[1]
    x[:, 1::2] = x[:, : cols // 2 * 2 : 2]
    y = x.clamp(min=0)
    y[1::8] = x[1::8].abs()
    y[3::8] = x[3::8, :1].abs()
    y[5::8, cols // 2 :] = 0
    return y


def heavy_tails(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Draw from Student's t with two degrees of freedom, as shares of the range."""
    z = torch.randn(3, rows, cols, generator=generator, device=generator.device)
    return 0.1 * z[0] / (z[1].square() + z[2].square()).mul(0.5).sqrt().clamp(min=1e-3)


def _with_impulses(rest: Tensor, generator: torch.Generator) -> Tensor:
    """Set one element of each row to plus or minus 1, cycling through all columns in random order."""
    rows, cols = rest.shape
    if not rows or not cols:
        return rest
    order = torch.randperm(cols, generator=generator, device=rest.device)
    at = order.repeat(-(-rows // cols))[:rows]
    signs = 2.0 * torch.randint(2, (rows,), generator=generator, device=rest.device) - 1
    return rest.scatter(1, at[:, None], signs[:, None])


def duplicate_rows(rows: int, generator: torch.Generator, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which row each row repeats, and which repeats have twice the scale.

    A third of the rows repeat others: pairs at distances 1, 2, 4, ..., the first and the last row, small groups, and
    one group across all rows.
    """
    index = torch.arange(rows, device=device)
    if rows < 2:
        return index, torch.zeros(rows, dtype=torch.bool, device=device)
    places = torch.randint(rows, (3, rows), generator=generator, device=device)
    repeats = torch.rand(rows, generator=generator, device=device) < 0.3
    pool = torch.where(places[1] % 2 == 0, places[0] % max(1, rows // 16), places[2][0].expand(rows))
    index = torch.where(repeats, pool, index)
    distance = 1
    while distance < rows:  # later pairs may overwrite earlier ones, but there are many
        start = int(places[1][distance % rows]) % (rows - distance)
        index[start + distance] = index[start]
        distance *= 2
    index[rows - 1] = index[0]
    twice = (index != torch.arange(rows, device=device)) & (places[2] % 4 == 0)
    return index, twice


def _repeat(one: QTensor, rows: int) -> QTensor:
    shape = (rows, one.shape[1])
    data = _bytes(one.data).expand(shape).contiguous().view(one.data.dtype)
    grid = scale_shape(shape, one.spec.block)
    scale = one.scale if not grid else one.scale.expand(grid).contiguous()
    return QTensor(data, scale, one.spec, one.tensor_scale)


def _bytes(data: Tensor) -> Tensor:
    """View 8-bit floats as bytes: torch does not support indexing, expanding and comparing for all of them."""
    return data.view(torch.uint8) if data.element_size() == 1 else data


def quantize_set(name: str, rows: int, cols: int, *, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make an input [rows, cols] for a quantizer, by its name in QUANTIZE_SETS (see the module's table).

    The set `extreme` contains a NaN and, if it has three rows, two infinities.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator, device=device)
    factor = torch.exp(4 * torch.rand((), generator=generator, device=device) - 2)
    if name == "spread":
        x = x * torch.exp(2 * torch.randn(rows, 1, generator=generator, device=device))
        blocks = torch.exp(torch.randn(1, -(-cols // BLOCK), generator=generator, device=device))
        x = x * blocks.repeat_interleave(BLOCK, 1)[:, :cols]
    elif name == "heavy":
        x = heavy_tails(rows, cols, generator)
    elif name == "extreme":
        x = _extreme_values(x, 4 if dtype == torch.float16 else FURTHER, generator)
    elif name == "duplicates":
        index, twice = duplicate_rows(rows, generator, device=device)
        x = x[index] * torch.where(twice, 2.0, 1.0)[:, None]
    elif name == "saturated":
        x = x.sign() * (1 + torch.randint(2, (rows, 1), generator=generator, device=device))
    elif name == "rectified":
        x = _rectify(x)
    elif name == "zero":
        x = torch.zeros_like(x)
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
    if rows > 2 and cols:
        x[0, 0], x[rows - 1, cols - 1] = torch.inf, -torch.inf
    return x
