"""Benchmark adapter of attention: ragged rows of at most `length` positions (shape rows x heads x length).

A variant is `QKxV`, the widths of a head, e.g. `128x128`. Options: `even` (every row has the full length; otherwise
lengths range from a third to all of it), `plain` (without position and time bias), `gradient` (forward and backward),
and a dtype. Sums are divided by the maximal length, as in HSTU.

The result is compared with float64, element by element. The tolerance allows for attention weights that are rounded to
16-bit before they multiply the values, for the rounding of the result, and for float32 errors of scores that cancel.
Gradients are judged by relative L2 error against autograd in float64, as a whole and per position.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.attention.call import AttentionCall
from loka.kernels.attention.reference import locate, time_bucket
from loka.measure import conformance, inputs
from loka.measure.conformance import ULP, Conformance, Law, worst_of
from loka.measure.fused import compiled, judge_twice
from loka.measure.inputs import Shape
from loka.measure.op import Op, read_variant, spell_variant
from loka.measure.rounding import as_share, judge_near
from loka.measure.timing import Thunk

FLAGS = ("even", "plain", "gradient")
_BUCKETS = 64
GRADIENT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}  # relative L2
BASELINE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4}  # scores are rounded too
NAMES = ("q", "k", "v", "position_bias", "time_bias")


@dataclass(frozen=True)
class RaggedAttention(AttentionCall):
    """A call with the options of its variant."""

    even: bool = False
    plain: bool = False
    gradient: bool = False

    def __str__(self) -> str:
        return ", ".join([super().__str__(), *(name for name in FLAGS if getattr(self, name))])


@dataclass(frozen=True)
class AttentionOperands:
    """The op's inputs, the gradient of its output, and the lengths as integers."""

    tensors: dict[str, Tensor | None]
    offsets: Tensor
    dy: Tensor
    lengths: tuple[int, ...]


class Attention(Op[RaggedAttention]):
    """SiLU attention over ragged rows."""

    op = "attention"
    OWN = RaggedAttention
    DIMENSIONS = ("rows", "heads", "length")
    VARIANTS = ("128x128", "128x128|gradient", "64x64")

    def parse(self, shape: Shape, variant: str) -> RaggedAttention:
        """See `Op.parse`: rows, heads, length and `QKxV`."""
        spelled = f"QKxV[|even][|plain][|gradient][|dtype]; e.g. {self.VARIANTS[1]}"
        match, options, dtype = read_variant(variant, r"(\d+)x(\d+)", FLAGS, spelled)
        rows, heads, length = shape
        return RaggedAttention(
            rows, length, heads, int(match[1]), int(match[2]), dtype, *(name in options for name in FLAGS)
        )

    def spell(self, call: RaggedAttention) -> str:
        """See `Op.spell`."""
        return spell_variant(f"{call.d_qk}x{call.d_v}", call, FLAGS)

    def operands(
        self, call: RaggedAttention, *, seed: int, distribution: str, device: torch.device
    ) -> AttentionOperands:
        """Draw keys from the distribution, normal queries, values, biases and gradients, and increasing times."""
        lengths = _lengths(call)
        total = sum(lengths)

        def draw(width: int, part: int, kind: str = "normal") -> Tensor:
            made = inputs.draw(
                total * call.heads, width, distribution=kind, seed=8 * seed + part, device=device, dtype=call.dtype
            )
            return made.view(total, call.heads, width)

        tensors: dict[str, Tensor | None] = {
            "q": draw(call.d_qk, 0) * call.d_qk**-0.5,
            "k": draw(call.d_qk, 1, distribution),
            "v": draw(call.d_v, 2),
        }
        dy = draw(call.d_v, 3)
        if not call.plain:
            generator = torch.Generator(device=device).manual_seed(8 * seed + 4)
            tensors["position_bias"] = inputs.draw(call.heads, call.length, seed=8 * seed + 5, device=device)
            tensors["time_bias"] = inputs.draw(call.heads, _BUCKETS, seed=8 * seed + 6, device=device)
            steps = torch.randint(0, 5000, (total,), generator=generator, device=device)
            tensors["times"] = steps.cumsum(0)
            tensors["query_times"] = steps.cumsum(0) + torch.randint(
                0, 900, (total,), generator=generator, device=device
            )
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
        return AttentionOperands(tensors, offsets, dy, lengths)

    def thunk(self, backend: Any, call: RaggedAttention, operands: AttentionOperands) -> Thunk:
        """Return the forward pass, or forward and backward."""
        o, options = operands, {"max_length": call.length, "divisor": float(call.length)}
        if not call.gradient:
            return lambda: backend.run(offsets=o.offsets, **o.tensors, **options)
        leaves = {name: t.detach().clone().requires_grad_() for name in NAMES if (t := o.tensors.get(name)) is not None}
        rest = {name: t for name, t in o.tensors.items() if name not in leaves}

        def both() -> list[Tensor]:
            out = backend.run(offsets=o.offsets, **leaves, **rest, **options)
            return [out, *torch.autograd.grad(out, list(leaves.values()), o.dy)]

        return both

    def exact(self, call: RaggedAttention, operands: AttentionOperands) -> tuple[Law, list[tuple[str, Tensor]]]:
        """See `Op.exact`."""
        return _law(call, operands)

    def shows_nan(self, call: RaggedAttention) -> bool:
        """See `Op.shows_nan`."""
        return not call.gradient

    def compare(
        self, backend: Any, call: RaggedAttention, operands: AttentionOperands, exact: Callable[[], Any]
    ) -> Conformance:
        """Check the result and, for `gradient`, the gradients, plain and with poisoned allocations."""
        width = call.heads * call.d_v

        def judge(result: Any) -> Conformance:
            law, gradients = exact()
            out = result[0] if call.gradient else result
            verdicts = [conformance.judge(out.detach().reshape(-1, width), law, _allowed(call), call.dtype)]
            if call.gradient:
                pairs = zip(gradients, result[1:], strict=True)
                verdicts += [
                    judge_near(found, exact, GRADIENT[call.dtype], what=f"d{name}") for (name, exact), found in pairs
                ]
            return worst_of([as_share(verdict) for verdict in verdicts])

        return judge_twice(self.thunk(backend, call, operands), judge)

    def baseline(self, call: RaggedAttention, operands: AttentionOperands) -> Thunk:
        """Return the forward pass in plain torch on padded rows, in the operands' dtype; compiled on a GPU."""
        o = operands
        row, place = locate(o.offsets, o.dy.shape[0])
        run = compiled(lambda q, k, v: _padded(call, q, k, v, row, place, o.tensors), o.dy.device)
        return lambda: run(o.tensors["q"], o.tensors["k"], o.tensors["v"])

    def check_baseline(self, call: RaggedAttention, operands: AttentionOperands) -> Conformance:
        """Check by relative L2, since the baseline rounds its scores."""
        law, _ = _law(call, operands, forward=True)
        out = self.baseline(call, operands)()
        return judge_near(out.reshape(law.y.shape), law.y, BASELINE[call.dtype], what="the baseline", slices=False)

    def bytes_moved(self, call: RaggedAttention) -> int:
        """Count inputs and results; for the gradient all of them once more, and the gradient of the result."""
        total = sum(_lengths(call)) * call.heads * call.dtype.itemsize
        forward = total * (2 * call.d_qk + 2 * call.d_v)
        return forward + (forward + total * call.d_v if call.gradient else 0)

    def flops(self, call: RaggedAttention) -> int:
        """Count two products over the pairs of positions that attend; five more for backward."""
        pairs = sum(n * (n + 1) // 2 for n in _lengths(call)) * call.heads
        forward = 2 * pairs * (call.d_qk + call.d_v)
        return forward + (2 * pairs * (3 * call.d_qk + 2 * call.d_v) if call.gradient else 0)


def _lengths(call: RaggedAttention) -> tuple[int, ...]:
    if call.even or call.rows < 2:
        return (call.length,) * call.rows
    return tuple(call.length - index * 2 * call.length // (3 * (call.rows - 1)) for index in range(call.rows))


def _allowed(call: RaggedAttention) -> float:
    rounding = math.hypot(ULP[call.dtype], 2 * ULP[call.dtype] * (call.dtype != torch.float32)) / math.sqrt(12)
    return math.hypot(rounding, 2.0**-20)


def _law(call: RaggedAttention, o: AttentionOperands, *, forward: bool = False) -> tuple[Law, list[tuple[str, Tensor]]]:
    """Compute in float64, row by row: the result, the size that its errors are relative to, and the gradients."""
    wide = {name: t.double() for name in NAMES if (t := o.tensors.get(name)) is not None}
    differentiate = call.gradient and not forward
    leaves = {name: t.requires_grad_() for name, t in wide.items()} if differentiate else wide
    values, sizes = [], []
    sums = {name: torch.zeros_like(t) for name, t in wide.items()} if differentiate else {}
    begin = 0
    for n in o.lengths:
        at = slice(begin, begin + n)
        with torch.set_grad_enabled(differentiate):
            y, size = _row(call, leaves, o, at)
        if differentiate and n:
            found = torch.autograd.grad(y, list(leaves.values()), o.dy[at].double(), allow_unused=True)
            for name, part in zip(leaves, found, strict=True):
                sums[name] += 0 if part is None else part
        values.append(y.detach())
        sizes.append(size.detach())
        begin += n
    width = call.heads * call.d_v
    law = Law(torch.cat(values).reshape(-1, width), torch.cat(sizes).reshape(-1, width))
    return law, list(sums.items())


def _row(call: RaggedAttention, wide: dict[str, Tensor], o: AttentionOperands, at: slice) -> tuple[Tensor, Tensor]:
    """Compute one row, silu(q k^T + biases) v / length, [n, H, d_v], and the size of its terms."""
    q, k, v = wide["q"][at], wide["k"][at], wide["v"][at]
    s = torch.einsum("ihd,jhd->hij", q, k)
    steps = torch.arange(q.shape[0], device=q.device)
    distance = steps[:, None] - steps[None, :]
    if not call.plain:
        times, asked = o.tensors["times"], o.tensors["query_times"]
        assert times is not None
        assert asked is not None
        s = s + wide["position_bias"][:, distance.clamp(0, call.length - 1)]
        s = s + wide["time_bias"][:, time_bucket(asked[at][:, None] - times[at][None, :], _BUCKETS)]
    w = torch.where(distance >= 0, F.silu(s), 0.0) / call.length
    y = torch.einsum("hij,jhd->ihd", w, v)
    # a score has the float32 error of its terms, however small the score is
    lost = torch.where(distance >= 0, torch.einsum("ihd,jhd->hij", q.square(), k.square()), 0.0) / call.length**2
    share = (2.0**-20 / _allowed(call)) ** 2
    terms = torch.einsum("hij,jhd->ihd", w.square() + share * lost, v.square()) + y.square()
    return y, terms.sqrt()


def _padded(
    call: RaggedAttention, q: Tensor, k: Tensor, v: Tensor, row: Tensor, place: Tensor, extra: dict[str, Tensor | None]
) -> Tensor:
    """Compute attention on padded rows, as a model without the kernel does."""

    def dense(t: Tensor) -> Tensor:
        return t.new_zeros(call.rows, call.length, *t.shape[1:]).index_put((row, place), t)

    s = torch.einsum("bihd,bjhd->bhij", dense(q), dense(k))
    steps = torch.arange(call.length, device=q.device)
    distance = steps[:, None] - steps[None, :]
    if not call.plain:
        position, bias, times, asked = (extra[name] for name in ("position_bias", "time_bias", "times", "query_times"))
        assert position is not None and bias is not None and times is not None and asked is not None  # noqa: PT018
        s = s + position.to(s.dtype)[:, distance.clamp(min=0)]
        which = time_bucket(dense(asked)[:, :, None] - dense(times)[:, None, :], _BUCKETS)
        s = s + bias.to(s.dtype)[:, which].transpose(0, 1)
    w = torch.where(distance >= 0, F.silu(s), 0.0) * (1 / call.length)
    return torch.einsum("bhij,bjhd->bihd", w.to(v.dtype), dense(v))[row, place]
