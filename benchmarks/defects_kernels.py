"""Defective GEMMs, drawn at random: a family of mistakes, where it strikes, and what it does there.

The gate (`loka.measure.gate`) knows nothing of this file, and this file uses none of the gate's operands. A draw is a family and its parameters; thresholds lie anywhere
up to the true shape. A draw counts as a defect only if it changes the result beyond tolerance on operands the family names here (`Draw.show`):

    some element is off by more than 8 tolerances of its terms, or the whole by more than 2      tolerance: loka.measure.conformance.tolerance

Otherwise it is a correct kernel with an odd habit, and another one is drawn.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loka.formats import E4M3, QTensor, Spec, decode, expand_scale, quantize
from loka.kernels.backend import YES, Verdict
from loka.kernels.scaled_mm.call import MatmulCall
from loka.kernels.strides import GRANULE

SPECS = (
    ("e4m3:row", "e4m3:row"),
    ("e4m3:tensor", "e4m3:tensor"),
    ("e4m3:1x128", "e4m3:128x128"),
    ("e4m3:1x128", "e4m3:1x128"),
    ("e5m2:row", "e4m3:row"),
)
Pair = tuple[QTensor, QTensor]
Effect = Callable[[Tensor, Tensor], Tensor]  # (the part it strikes, the whole right result) -> what it becomes


class Kernel:
    """A GEMM that is right but for what its subclass does."""

    def supports(self, call: MatmulCall, device: torch.device) -> Verdict:
        return YES

    def operands(self, a: QTensor, b: QTensor) -> tuple[Tensor, Tensor]:
        """The values that are multiplied."""
        return a.dequantize(), b.dequantize()

    def product(self, a: QTensor, b: QTensor) -> Tensor:
        left, right = self.operands(a, b)
        return left @ right.T

    def run(self, a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
        return self.product(a, b).to(out_dtype)


@dataclass(frozen=True)
class Draw:
    """One defective kernel, and how to see that it is one."""

    family: str
    text: str
    make: Callable[[], Kernel]
    show: Callable[[Kernel, MatmulCall, int], tuple[Tensor, Pair]]  # a result it spoils, and of which operands


# Operands that show a defect: none of the gate's.


def normal(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """N(0, 1) on the default device, the same numbers on all of them."""
    x = torch.randn(*shape, generator=generator, device="cpu", dtype=dtype)
    return x.to(torch.get_default_device())


def plain(call: MatmulCall, seed: int, *, spread: float = 0.0) -> Pair:
    """N(0, 1), quantised by the law; rows of different size where asked."""
    generator = torch.Generator().manual_seed(seed)

    def one(rows: int, spec: Spec) -> QTensor:
        x = normal(rows, call.k, generator=generator) * torch.exp(spread * normal(rows, 1, generator=generator))
        if spread:
            blocks = torch.exp(spread * normal(1, -(-call.k // 128), generator=generator))
            x = x * blocks.repeat_interleave(128, 1)[:, : call.k]
        return quantize(x, spec)

    return one(call.m, call.a), one(call.n, call.b)


def once(kernel: Kernel, call: MatmulCall, pair: Pair) -> Tensor:
    return kernel.run(*pair, out_dtype=call.out_dtype, fast_accum=call.fast_accum)


def show_plain(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
    pair = plain(call, seed)
    return once(kernel, call, pair), pair


def show_spread(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
    pair = plain(call, seed, spread=1.5)
    return once(kernel, call, pair), pair


def show_second(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
    """After calls on other values in the same memory."""
    first = plain(call, seed + 1, spread=1.5)
    buffers = [QTensor(q.data.clone(), q.scale.clone(), q.spec) for q in first]
    once(kernel, call, (buffers[0], buffers[1]))
    for number in range(2, 12):
        pair = plain(call, seed + number, spread=1.5)
        for buffer, q in zip(buffers, pair, strict=True):
            buffer.data.copy_(q.data)
            buffer.scale.copy_(q.scale)
        fresh = tuple(QTensor(q.data, q.scale, q.spec) for q in buffers)
        out = once(kernel, call, fresh)
    return out, pair


def show_copies(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
    """All rows of a alike, and of b."""
    a, b = plain(call, seed)

    def alike(q: QTensor) -> QTensor:
        data = q.data.view(torch.uint8)[:1].expand(q.shape).contiguous().view(q.data.dtype)
        scale = q.scale if q.scale.dim() == 0 else q.scale[:1].expand_as(q.scale).contiguous()
        return replace(q, data=data, scale=scale)

    pair = alike(a), alike(b)
    return once(kernel, call, pair), pair


def show_codes(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
    """The same codes in all rows of a, under scales that differ."""
    a, b = plain(call, seed, spread=1.0)
    data = a.data.view(torch.uint8)[:1].expand(a.shape).contiguous().view(a.data.dtype)
    return once(kernel, call, (replace(a, data=data), b)), (replace(a, data=data), b)


def show_saturated(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
    """Every element at the largest value, signs at random."""
    a, b = plain(call, seed)

    def full(q: QTensor) -> QTensor:
        values = decode(q.data, q.spec.format)
        return replace(q, data=torch.where(values >= 0, q.spec.format.max, -q.spec.format.max).to(q.data.dtype))

    pair = full(a), full(b)
    return once(kernel, call, pair), pair


def show_subnormal(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
    """Elements of a few of the format's smallest steps."""
    a, b = plain(call, seed)
    form = a.spec.format
    small = (decode(a.data, form) / form.max * 7 * form.smallest_subnormal * 4).clamp(
        -7 * form.smallest_subnormal, 7 * form.smallest_subnormal
    )
    pair = replace(a, data=small.to(a.data.dtype)), b
    return once(kernel, call, pair), pair


def show_huge(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
    """Results beyond float16."""
    a, b = plain(call, seed)
    pair = replace(a, scale=a.scale * 2.0**20), b
    return once(kernel, call, pair), pair


def show_giant_row(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
    """Every third row 2^20 times the others, by its scale."""
    a, b = plain(call, seed)
    scale = a.scale.clone()
    scale[::3] *= 2.0**20
    pair = replace(a, scale=scale), b
    return once(kernel, call, pair), pair


def show_zero_rows(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
    """No element of a but zero."""
    a, b = plain(call, seed)
    pair = replace(a, data=torch.zeros_like(a.data.view(torch.uint8)).view(a.data.dtype)), b
    return once(kernel, call, pair), pair


def show_nearly_the_same(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
    """After a call that differed in the last rows of a and b alone."""
    a, b = plain(call, seed)
    once(kernel, call, (a, b))

    def changed(q: QTensor) -> QTensor:
        codes = q.data.view(torch.uint8).clone()
        codes[-1] ^= 0x80
        return replace(q, data=codes.view(q.data.dtype))

    pair = changed(a), changed(b)
    return once(kernel, call, pair), pair


def show_moved(shift_a: int, shift_b: int, stride: int) -> Callable[[Kernel, MatmulCall, int], tuple[Tensor, Pair]]:
    """Operands that begin some bytes into their storage, with rows farther apart; on a GPU by multiples of 16 bytes, since `scaled_mm` hands kernels nothing else there."""

    def move(q: QTensor, shift: int) -> QTensor:
        rows, cols = q.shape
        unit = 1 if q.device.type == "cpu" else GRANULE
        apart, shift = cols + -cols % unit + unit * stride, unit * shift
        storage = torch.zeros(rows * apart + shift, dtype=torch.uint8, device=q.device)
        view = storage.as_strided((rows, cols), (apart, 1), shift)
        view.copy_(q.data.view(torch.uint8))
        return replace(q, data=view.view(q.data.dtype))

    def show(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
        a, b = plain(call, seed)
        pair = move(a, shift_a), move(b, shift_b)
        return once(kernel, call, pair), pair

    return show


# What happens to the part that is struck.


def draw_effect(rng: random.Random) -> tuple[str, Effect]:
    factor = 1 + rng.choice((-1, 1)) * rng.uniform(0.05, 0.9)
    shift = rng.randrange(1, 9)
    effects: dict[str, Effect] = {
        "zeros": lambda part, whole: torch.zeros_like(part),
        f"times {factor:.3f}": lambda part, whole: part * factor,
        "doubled": lambda part, whole: part * 2,
        "negated": lambda part, whole: -part,
        "its first row": lambda part, whole: part[:1].expand_as(part),
        f"columns rolled by {shift}": lambda part, whole: part.roll(shift, 1),
        f"rows rolled by {shift}": lambda part, whole: part.roll(shift, 0),
        "flipped": lambda part, whole: part.flip(0),
        "a constant": lambda part, whole: torch.full_like(part, float(whole.abs().mean())),
        "an offset": lambda part, whole: part + whole.abs().mean() * 0.5,
    }
    name = rng.choice(sorted(effects))
    return name, effects[name]


class Struck(Kernel):
    """A part of the result is spoiled."""

    def __init__(self, part: tuple[slice, slice], effect: Effect) -> None:
        self.part, self.effect = part, effect

    def spoil(self, out: Tensor) -> Tensor:
        spoiled = out.clone()
        spoiled[self.part] = self.effect(out[self.part], out)
        return spoiled

    def product(self, a: QTensor, b: QTensor) -> Tensor:
        return self.spoil(super().product(a, b))


def rows_beyond(rng: random.Random, call: MatmulCall) -> Draw:
    start = rng.randrange(0, call.m)
    stop = call.m if rng.random() < 0.7 else rng.randrange(start, call.m) + 1
    name, effect = draw_effect(rng)
    part = slice(start, stop), slice(None)
    return Draw("rows", f"rows {start} to {stop}: {name}", lambda: Struck(part, effect), show_plain)


def column_block(rng: random.Random, call: MatmulCall) -> Draw:
    start = rng.randrange(0, call.n)
    stop = call.n if rng.random() < 0.3 else min(call.n, start + rng.choice((1, 8, 16, 64, 128, 200)))
    name, effect = draw_effect(rng)
    part = slice(None), slice(start, stop)
    return Draw("columns", f"columns {start} to {stop}: {name}", lambda: Struck(part, effect), show_plain)


def tile(rng: random.Random, call: MatmulCall) -> Draw:
    size = rng.choice((1, 4, 8, 16, 32, 64, 128))
    high, wide = min(size, call.m), min(size, call.n)
    row, col = rng.randrange(call.m - high + 1), rng.randrange(call.n - wide + 1)
    part = slice(row, row + high), slice(col, col + wide)
    if rng.random() < 0.4:
        side = min(high, wide)
        part = slice(row, row + side), slice(col, col + side)
        return Draw("tiles", f"tile {part} transposed", lambda: Struck(part, lambda p, w: p.T), show_plain)
    name, effect = draw_effect(rng)
    return Draw("tiles", f"tile {part}: {name}", lambda: Struck(part, effect), show_plain)


def swapped(rng: random.Random, call: MatmulCall) -> Draw:
    by_rows = rng.random() < 0.6
    first, second = rng.sample(range(call.m if by_rows else call.n), 2)

    class Swapped(Kernel):
        def product(self, a: QTensor, b: QTensor) -> Tensor:
            out = super().product(a, b)
            index = torch.arange(out.shape[0 if by_rows else 1])
            index[first], index[second] = second, first
            return out[index] if by_rows else out[:, index]

    return Draw("swapped", f"{'rows' if by_rows else 'columns'} {first} and {second} swapped", Swapped, show_plain)


def k_part(rng: random.Random, call: MatmulCall) -> Draw:
    tail = rng.random() < 0.7
    start = rng.randrange(0, call.k)
    stop = call.k if tail else min(call.k, start + rng.choice((1, 4, 16, 32, 128)))
    start_row = 0 if rng.random() < 0.6 else rng.randrange(call.m)
    kind = rng.choice(("dropped", "twice", "of the row before", "in reverse"))

    class Part(Kernel):
        def operands(self, a: QTensor, b: QTensor) -> tuple[Tensor, Tensor]:
            left, right = super().operands(a, b)
            left = left.clone()
            struck = left[start_row:, start:stop]
            spoiled = {
                "dropped": struck * 0, "twice": struck * 2, "of the row before": struck.roll(1, 0), "in reverse": struck.flip(1),
            }[kind]  # fmt: skip
            left[start_row:, start:stop] = spoiled
            return left, right

    return Draw("K parts", f"k {start} to {stop} {kind}, rows from {start_row}", Part, show_plain)


def _expanded(q: QTensor, scale: Tensor) -> Tensor:
    return decode(q.data, q.spec.format) * expand_scale(scale, q.shape, q.spec.block)


def wrapped_scale(rng: random.Random, call: MatmulCall) -> Draw:
    of_a = rng.random() < 0.6
    spec, rows = (call.a, call.m) if of_a else (call.b, call.n)
    high = -(-rows // max(spec.block.rows, 1))
    wide = 1 if spec.block.cols == -1 else -(-call.k // spec.block.cols)
    ways = (
        ["wrap", "shift", "first", "transposed", "one dropped", "clamp"]
        if high > 1
        else ["shift along K", "last block"]
    )
    if wide > 1:
        ways += ["shift along K", "last block"]
    way, at, by = rng.choice(ways), rng.randrange(1, max(high, 2)), rng.randrange(1, 9)

    def misread(scale: Tensor) -> Tensor:
        if scale.dim() != 2:
            return scale
        index = torch.arange(scale.shape[0])
        if way == "wrap":
            return scale[index % at]
        if way == "shift":
            return torch.cat([scale[:at], scale[at:].roll(by, 0)])
        if way == "first":
            return torch.cat([scale[:at], scale[:1].expand_as(scale[at:])])
        if way == "clamp":
            return scale[index.clamp(max=at - 1)]
        if way == "transposed":
            return scale.T.reshape(scale.shape) if scale.shape[1] > 1 else scale.flip(0)
        if way == "one dropped":
            spoiled = scale.clone()
            spoiled[min(at, len(scale) - 1)] = 1.0
            return spoiled
        return torch.cat([scale[:, :-1], scale[:, :1]], 1) if way == "last block" else scale.roll(1, 1)

    class Misread(Kernel):
        def operands(self, a: QTensor, b: QTensor) -> tuple[Tensor, Tensor]:
            return _expanded(a, misread(a.scale) if of_a else a.scale), _expanded(
                b, b.scale if of_a else misread(b.scale)
            )

    return Draw("wrapped scales", f"scales of {'a' if of_a else 'b'}: {way} at {at} by {by}", Misread, show_spread)


def stale_scale(rng: random.Random, call: MatmulCall) -> Draw:
    which = rng.choice(("a", "b", "both"))
    every = rng.randrange(2, 12)
    way = rng.choice(("first", "previous", "refreshed", "by address", "largest so far"))

    class Stale(Kernel):
        def __init__(self) -> None:
            self.kept: dict[object, Tensor] = {}
            self.calls = 0

        def pick(self, q: QTensor, name: str) -> Tensor:
            if way == "by address":
                return self.kept.setdefault((name, q.scale.data_ptr(), q.scale.shape), q.scale.clone())
            held = self.kept.get(name)
            if held is None or held.shape != q.scale.shape:
                self.kept[name] = q.scale.clone()
                return q.scale
            if way == "largest so far":
                self.kept[name] = torch.maximum(held, q.scale)
                return self.kept[name]
            if way == "previous" or (way == "refreshed" and self.calls % every == 0):
                self.kept[name] = q.scale.clone()
            return held if way != "refreshed" else self.kept[name]

        def operands(self, a: QTensor, b: QTensor) -> tuple[Tensor, Tensor]:
            self.calls += 1
            of_a = self.pick(a, "a") if which != "b" else a.scale
            of_b = self.pick(b, "b") if which != "a" else b.scale
            return _expanded(a, of_a), _expanded(b, of_b)

    return Draw("stale scales", f"scales of {which}: {way} (every {every})", Stale, show_second)


def duplicates(rng: random.Random, call: MatmulCall) -> Draw:
    least = min(call.m, call.n)
    distance, group = rng.randrange(1, max(least // 2, 2)), rng.randrange(2, max(least // 2, 3))
    way = rng.choice(("any", "adjacent", "far", "many", "scale of the first"))
    of_b = way != "scale of the first" and rng.random() < 0.3
    effect_name, effect = draw_effect(rng)
    if effect_name in ("its first row", "flipped") or "rolled" in effect_name:
        effect_name, effect = "zeros", lambda part, whole: torch.zeros_like(part)

    class Duplicates(Kernel):
        def product(self, a: QTensor, b: QTensor) -> Tensor:
            out = super().product(a, b)
            if of_b:
                a, b, out = b, a, out.T.contiguous()
            key = normal(a.shape[1], 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
            hashed = (a.data.view(torch.uint8).double() @ key).round(decimals=6)
            _, group_of = torch.unique(hashed, dim=0, return_inverse=True)
            first = torch.full((int(group_of.max()) + 1,), len(out)).scatter_reduce(
                0, group_of, torch.arange(len(out)), "amin"
            )[group_of]
            again = first < torch.arange(len(out))
            if way == "adjacent":
                again[1:] &= group_of[1:] == group_of[:-1]
            elif way == "far":
                again &= torch.arange(len(out)) - first >= distance
            elif way == "many":
                again &= torch.bincount(group_of)[group_of] >= group
            elif way == "scale of the first" and a.scale.dim() == 2 and a.spec.block.rows == 1:
                return _expanded(a, a.scale[first]) @ b.dequantize().T
            if bool(again.any()):
                out[again] = effect(out[again], out)
            return out.T.contiguous() if of_b else out

    by_codes = way == "scale of the first" and call.a.block.rows == 1
    text = f"rows of {'b' if of_b else 'a'} seen before ({way}, distance {distance}, group {group}): {effect_name}"
    return Draw("duplicates", text, Duplicates, show_codes if by_codes else show_copies)


def race(rng: random.Random, call: MatmulCall) -> Draw:
    chance = rng.uniform(0.2, 1.0)
    seed = rng.randrange(1 << 30)
    size = rng.choice((1, 8, 16, 64, 128))
    name, effect = draw_effect(rng)

    class Race(Kernel):
        def __init__(self) -> None:
            self.rng = random.Random(seed)
            self.always = False

        def product(self, a: QTensor, b: QTensor) -> Tensor:
            out = super().product(a, b)
            if self.rng.random() >= chance and not self.always:
                return out
            row, col = self.rng.randrange(max(call.m - size, 0) + 1), self.rng.randrange(max(call.n - size, 0) + 1)
            part = slice(row, row + size), slice(col, col + size) if self.rng.random() < 0.7 else slice(None)
            return Struck(part, effect).spoil(out)

    def show(kernel: Kernel, call: MatmulCall, number: int) -> tuple[Tensor, Pair]:
        kernel.always = True  # type: ignore[attr-defined]
        return show_plain(kernel, call, number)

    return Draw("races", f"with probability {chance:.2f} a tile of {size}: {name}", Race, show)


def uninitialised(rng: random.Random, call: MatmulCall) -> Draw:
    way = rng.choice(("rows", "tile", "columns", "workspace", "previous result"))
    row, col = rng.randrange(call.m), rng.randrange(call.n)
    parts = {
        "rows": (slice(row, None), slice(None)), "columns": (slice(None), slice(col, None)),
        "tile": (slice(row, row + 16), slice(col, col + 16)), "previous result": (slice(row, None), slice(None)),
    }  # fmt: skip

    class Unwritten(Kernel):
        def __init__(self) -> None:
            self.last: Tensor | None = None

        def run(self, a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
            right = self.product(a, b).to(out_dtype)
            out = torch.empty_like(right)
            if way == "workspace":  # partial sums are added to what the memory held
                return right + _leftover(right, row)
            part = parts[way]
            written = torch.ones(right.shape, dtype=torch.bool)
            written[part] = False
            if way == "previous result":
                held = right if self.last is None else self.last
                self.last = right.clone()
                return torch.where(written, right, held)
            out[written] = right[written]
            return out

    def show(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
        show_plain(kernel, call, seed)
        pair = plain(call, seed + 1)
        blocks = [torch.full((call.m, call.n), 1e4).to(call.out_dtype) for _ in range(4)]
        del blocks
        return once(kernel, call, pair), pair

    return Draw("uninitialised", f"{way} from [{row}, {col}] unwritten", Unwritten, show)


def _leftover(like: Tensor, row: int) -> Tensor:
    """What fresh memory happens to hold, from a row on."""
    held = torch.empty_like(like)
    held[:row] = 0
    return held


def misaligned(rng: random.Random, call: MatmulCall) -> Draw:
    align = rng.choice((2, 4, 8, 16, 32, 64))
    which = rng.choice(("a", "b"))
    way = rng.choice(("address", "stride", "contiguous", "offset"))
    name, effect = draw_effect(rng)
    row = rng.randrange(call.m)

    class Misaligned(Kernel):
        def product(self, a: QTensor, b: QTensor) -> Tensor:
            out = super().product(a, b)
            data = (a if which == "a" else b).data
            off = {
                "address": data.data_ptr() % align != 0, "offset": data.storage_offset() % align != 0,
                "stride": data.stride(0) % align != call.k % align, "contiguous": not data.is_contiguous(),
            }[way]  # fmt: skip
            return Struck((slice(row, None), slice(None)), effect).spoil(out) if off else out

    return Draw(
        "alignment", f"{which}'s {way} against {align}, rows from {row}: {name}", Misaligned, show_moved(1, 1, 1)
    )


def saturation(rng: random.Random, call: MatmulCall) -> Draw:
    which, sign = rng.choice(("a", "b")), rng.choice((0, 1, -1))
    spec, rows = (call.a, call.m) if which == "a" else (call.b, call.n)
    top = spec.format.max
    step = 32.0 if spec.format == E4M3 else 8192.0
    by = rng.choice((-step, step)) * rng.choice((1, 1, 1, 0.5))
    row, k = (0, 0) if rng.random() < 0.5 else (rng.randrange(rows), rng.randrange(call.k))

    class Saturation(Kernel):
        def operands(self, a: QTensor, b: QTensor) -> tuple[Tensor, Tensor]:
            q = a if which == "a" else b
            elements = decode(q.data, q.spec.format)
            at = (elements.abs() == top) & ((elements.sign() == sign) | (sign == 0))
            at[:row] = False
            at[:, :k] = False
            spoiled = torch.where(at, elements + by * elements.sign(), elements) * expand_scale(
                q.scale, q.shape, q.spec.block
            )
            return (spoiled, b.dequantize()) if which == "a" else (a.dequantize(), spoiled)

    return Draw(
        "saturation", f"{which}'s largest codes ({sign}) off by {by}, from [{row}, {k}]", Saturation, show_saturated
    )


def subnormals(rng: random.Random, call: MatmulCall) -> Draw:
    row, keep = 0 if rng.random() < 0.5 else rng.randrange(call.m), rng.choice((0.0, 2.0))

    class Flushed(Kernel):
        def operands(self, a: QTensor, b: QTensor) -> tuple[Tensor, Tensor]:
            elements = decode(a.data, a.spec.format)
            small = elements.abs() < (2.0**-6 if a.spec.format == E4M3 else 2.0**-14)
            small[:row] = False
            return torch.where(small, keep * elements, elements) * expand_scale(
                a.scale, a.shape, a.spec.block
            ), b.dequantize()

    return Draw("subnormals", f"subnormals of a times {keep} from row {row}", Flushed, show_subnormal)


def precision(rng: random.Random, call: MatmulCall) -> Draw:
    dtype = rng.choice((torch.bfloat16, torch.float16))
    chunk = rng.choice((8, 16, 32, 64, 128))

    class Narrow(Kernel):
        def product(self, a: QTensor, b: QTensor) -> Tensor:
            left, right = self.operands(a, b)
            total = torch.zeros(len(left), len(right), dtype=dtype)
            for x, w in zip(left.split(chunk, 1), right.split(chunk, 1), strict=True):
                total = (total.float() + (x @ w.T)).to(dtype)
            return total.float()

    return Draw("precision", f"sums kept in {dtype} every {chunk} products", Narrow, show_plain)


def overflow(rng: random.Random, call: MatmulCall) -> Draw:
    clip = rng.random() < 0.5
    limit = 2.0 ** rng.randrange(14, 20)

    class Overflow(Kernel):
        def product(self, a: QTensor, b: QTensor) -> Tensor:
            out = super().product(a, b)
            return out.clamp(-limit, limit) if clip else torch.where(out.abs() > limit, out.sign() * torch.inf, out)

    return Draw("overflow", f"results beyond {limit} {'clipped' if clip else 'infinite'}", Overflow, show_huge)


def shared_exponent(rng: random.Random, call: MatmulCall) -> Draw:
    height, bits = rng.choice((16, 64, 128)), rng.choice((8, 12))

    class Shared(Kernel):
        def product(self, a: QTensor, b: QTensor) -> Tensor:
            out = super().product(a, b)
            parts = []
            for part in out.split(height):
                grid = torch.exp2(torch.floor(torch.log2(part.abs().amax().clamp(min=1e-30))) - bits)
                parts.append((part / grid).round() * grid)
            return torch.cat(parts)

    return Draw(
        "shared exponents",
        f"{height} rows share an exponent with {bits} bits",
        Shared,
        show_giant_row if call.a.block.rows == 1 else show_spread,
    )


def remembered(rng: random.Random, call: MatmulCall) -> Draw:
    part = rng.choice(("the first row of a", "the first element of both", "the shape"))

    class Remembered(Kernel):
        def __init__(self) -> None:
            self.kept: dict[object, Tensor] = {}

        def product(self, a: QTensor, b: QTensor) -> Tensor:
            row, other = (q.data.view(torch.uint8)[0].tolist() for q in (a, b))
            key = {
                "the first row of a": (tuple(row), float(a.scale.flatten()[0])),
                "the first element of both": (
                    row[0],
                    other[0],
                    float(a.scale.flatten()[0]),
                    float(b.scale.flatten()[0]),
                ),
                "the shape": (a.shape, b.shape),
            }[part]
            return self.kept.setdefault(key, super().product(a, b)).clone()

    return Draw("remembered", f"results are remembered by {part}", Remembered, show_nearly_the_same)


def one_code(rng: random.Random, call: MatmulCall) -> Draw:
    code = rng.randrange(1, 0x7E if call.a.format == E4M3 else 0x7B) | rng.choice((0, 0x80))
    by = rng.choice((1, -1))
    which = "a" if call.a.format == E4M3 and rng.random() < 0.5 else "b"
    code = min(code, 0xFD) if which == "b" else code

    class Misread(Kernel):
        def operands(self, a: QTensor, b: QTensor) -> tuple[Tensor, Tensor]:
            q = a if which == "a" else b
            codes = q.data.view(torch.uint8).clone()
            codes[codes == code] = code + by
            spoiled = replace(q, data=codes.view(q.data.dtype)).dequantize()
            return (spoiled, b.dequantize()) if which == "a" else (a.dequantize(), spoiled)

    return Draw("one code", f"code {code:#x} of {which} is read as {code + by:#x}", Misread, show_plain)


def zero_rows(rng: random.Random, call: MatmulCall) -> Draw:
    row, value = rng.randrange(call.m), rng.choice((torch.nan, 1.0, torch.inf))

    class Zero(Kernel):
        def product(self, a: QTensor, b: QTensor) -> Tensor:
            out = super().product(a, b)
            empty = (decode(a.data, a.spec.format) == 0).all(1)
            empty[:row] = False
            return torch.where(empty[:, None], value, out)

    return Draw("zero rows", f"rows of zeros give {value} from row {row}", Zero, show_zero_rows)


def truncated(rng: random.Random, call: MatmulCall) -> Draw:
    row = rng.randrange(call.m)

    class Truncated(Kernel):
        def run(self, a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
            out = self.product(a, b)
            cut = (out.view(torch.int32) & ~0xFFFF).view(torch.float32)
            return torch.cat([out[:row], cut[row:]]).to(out_dtype)

    return Draw("truncated", f"results cut to 8 bits instead of rounded from row {row}", Truncated, show_plain)


def returned_buffer(rng: random.Random, call: MatmulCall) -> Draw:
    class Buffer(Kernel):
        def __init__(self) -> None:
            self.out: Tensor | None = None

        def run(self, a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
            right = self.product(a, b).to(out_dtype)
            self.out = right if self.out is None or self.out.shape != right.shape else self.out.copy_(right)
            return self.out

    def show(kernel: Kernel, call: MatmulCall, seed: int) -> tuple[Tensor, Pair]:
        out, pair = show_plain(kernel, call, seed)
        show_plain(kernel, call, seed + 1)
        return out, pair

    return Draw("one buffer", "every result is returned in the same memory", Buffer, show)


FAMILIES: tuple[Callable[[random.Random, MatmulCall], Draw], ...] = (
    rows_beyond, column_block, tile, swapped, k_part, wrapped_scale, stale_scale, duplicates, race, uninitialised, misaligned,
    saturation, subnormals, precision, overflow, shared_exponent, remembered, one_code, zero_rows, truncated, returned_buffer,
)  # fmt: skip


def draw_call(rng: random.Random, limits: tuple[int, int, int]) -> MatmulCall:
    """A shape up to the limits (one in a hundred and fifty at them), spread evenly over sizes; half of the widths are multiples of 16, Specs and types of any kind."""

    def size(limit: int) -> int:
        value = min(limit, int(2 ** rng.uniform(3, math.log2(limit) + 0.2)))
        return max(16, value // 16 * 16) if rng.random() < 0.5 else max(2, value)

    shape = limits if rng.random() < 1 / 150 else (size(limits[0]), size(limits[1]), size(limits[2]))
    a, b = rng.choice(SPECS)
    dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float32))
    return MatmulCall(*shape, Spec.parse(a), Spec.parse(b), dtype, rng.random() < 0.5)
