"""Benchmark adapter of masked_attention: histories padded to one length (shape rows x heads x length).

A variant is the width of a head, e.g. `64`. Options: `even` (every history has the full length; otherwise lengths are
spread evenly up to it), `gradient` (forward and backward), and a dtype. Queries come from the same histories, so only
real positions are computed. A call of a model may have other queries, all of which are computed, and fewer heads of keys
and values.

Results and gradients are judged by L2 error against float64, as a whole and per row, since 16-bit kernels round the
weights before they multiply the values. Errors of a gradient are relative to the size of what it sums:

    dq_i = scale sum_j w_ij (g_i . v_j - delta_i) k_j,    dk_j likewise,    delta_i = out_i . g_i

Where a query attends to one key almost alone, the difference is near zero and far smaller than the rounding of `out`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.masked_attention import reference
from loka.kernels.masked_attention.call import MaskedAttentionCall
from loka.measure import inputs, peaked
from loka.measure.conformance import Conformance, worst_of
from loka.measure.fused import compiled, judge_twice
from loka.measure.inputs import Shape
from loka.measure.op import Op, read_variant, spell_variant
from loka.measure.rounding import as_share, judge_near
from loka.measure.timing import Thunk

FLAGS = ("even", "gradient")
ALLOWED = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}  # relative L2
NAMES = ("q", "k", "v")


@dataclass(frozen=True)
class PaddedAttention(MaskedAttentionCall):
    """A call with the options of its variant."""

    even: bool = False
    gradient: bool = False

    def __str__(self) -> str:
        return ", ".join([super().__str__(), *(name for name in FLAGS if getattr(self, name))])


@dataclass(frozen=True)
class MaskedOperands:
    """The op's inputs, and the gradient of its output. `wanted` is None if queries are not those of the histories."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    wanted: Tensor | None
    dy: Tensor


class MaskedAttention(Op[PaddedAttention]):
    """Softmax attention over the keys selected by a mask."""

    op = "masked_attention"
    OWN = PaddedAttention
    OWN_SETS = (peaked.NAME,)
    DIMENSIONS = ("rows", "heads", "length=keys")
    VARIANTS = ("32", "64|gradient", "128")

    def parse(self, shape: Shape, variant: str) -> PaddedAttention:
        """See `Op.parse`: rows, heads, length and the width of a head."""
        match, options, dtype = read_variant(variant, r"(\d+)", FLAGS, f"D[|even][|gradient][|dtype]; e.g. {self.VARIANTS[1]}")  # fmt: skip
        rows, heads, length = shape
        return PaddedAttention(rows, length, length, heads, heads, int(match[1]), dtype, *(name in options for name in FLAGS))  # fmt: skip

    def spell(self, call: PaddedAttention) -> str:
        """See `Op.spell`."""
        return spell_variant(str(call.d), call, FLAGS)

    def operands(self, call: PaddedAttention, *, seed: int, distribution: str, device: torch.device) -> MaskedOperands:
        """Draw keys from the distribution, the rest normal, in a projection's layout: heads of a position adjacent."""
        if distribution == peaked.NAME:
            o = self.operands(call, seed=seed, distribution="normal", device=device)
            _make_peaked(call, o, seed=seed)
            return o

        def draw(part: int, length: int, heads: int, kind: str = "normal") -> Tensor:
            rows, seed_ = call.rows * length * heads, 8 * seed + part
            made = inputs.draw(rows, call.d, distribution=kind, seed=seed_, device=device, dtype=call.dtype)
            return made.view(call.rows, length, heads, call.d).transpose(1, 2)

        mask = torch.arange(call.keys, device=device) < torch.tensor(_lengths(call), device=device)[:, None]
        q, dy = (draw(part, call.queries, call.heads) for part in (0, 3))
        k, v = draw(1, call.keys, call.shared, distribution), draw(2, call.keys, call.shared)
        return MaskedOperands(q, k, v, mask, mask if call.queries == call.keys else None, dy)

    def thunk(self, backend: Any, call: PaddedAttention, operands: MaskedOperands) -> Thunk:
        """Return the forward pass, or forward and backward."""
        o, scale = operands, call.d**-0.5
        if not call.gradient:
            return lambda: backend.run(o.q, o.k, o.v, o.mask, o.wanted, scale=scale)
        leaves = [getattr(o, name).detach().clone().requires_grad_() for name in NAMES]

        def both() -> list[Tensor]:
            out = backend.run(*leaves, o.mask, o.wanted, scale=scale)
            return [out, *torch.autograd.grad(out, leaves, o.dy)]

        return both

    def exact(self, call: PaddedAttention, operands: MaskedOperands) -> list[tuple[Tensor, Tensor | None]]:
        """See `Op.exact`."""
        return _law(call, operands)

    def shows_nan(self, call: PaddedAttention) -> bool:
        """See `Op.shows_nan`."""
        return not call.gradient

    def compare(
        self, backend: Any, call: PaddedAttention, operands: MaskedOperands, exact: Callable[[], Any]
    ) -> Conformance:
        """Check the result and, for `gradient`, the gradients, plain and with poisoned allocations."""

        def judge(result: Any) -> Conformance:
            found = result if call.gradient else [result]
            names = ("result", *(f"d{name}" for name in NAMES))
            allowed = ALLOWED[call.dtype]
            return worst_of(
                [
                    as_share(judge_near(out.detach(), exact, allowed, what=name, size=size))
                    for name, out, (exact, size) in zip(names, found, exact(), strict=False)
                ]
            )

        return judge_twice(self.thunk(backend, call, operands), judge)

    def baseline(self, call: PaddedAttention, operands: MaskedOperands) -> Thunk:
        """Return torch's attention with the same mask, forward only, for all positions; compiled on a GPU."""
        o = operands
        run = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=o.mask[:, None, None]), o.q.device)  # fmt: skip
        return lambda: run(o.q, o.k, o.v)

    def check_baseline(self, call: PaddedAttention, operands: MaskedOperands) -> Conformance:
        """Check the real positions."""
        ((law, _),) = _law(replace(call, gradient=False), operands)
        out = self.baseline(call, operands)() * operands.mask[:, None, :, None]
        return judge_near(out, law, ALLOWED[call.dtype], what="the baseline")

    def bytes_moved(self, call: PaddedAttention) -> int:
        """Count inputs at real positions and results at all positions; for the gradient, backward's as well."""
        width = call.heads * call.d * call.dtype.itemsize
        real, whole = sum(_lengths(call)) * width, call.rows * call.keys * width
        return 3 * real + whole + (4 * real + 3 * whole if call.gradient else 0)

    def flops(self, call: PaddedAttention) -> int:
        """Count two products over the pairs of positions that attend; five more for backward."""
        pairs = sum(n * n for n in _lengths(call)) * call.heads
        return 2 * pairs * call.d * (7 if call.gradient else 2)


def _lengths(call: PaddedAttention) -> list[int]:
    return [call.keys if call.even else call.keys - index * call.keys // call.rows for index in range(call.rows)]


def _make_peaked(call: PaddedAttention, o: MaskedOperands, *, seed: int) -> None:
    """Make drawn operands peaked at the first key, which every history has but an empty one."""
    options: Any = {"device": o.q.device, "dtype": call.dtype}
    drawn = peaked.draw_queries(call.rows * call.queries * call.heads, call.d, seed=8 * seed, **options)
    o.q.copy_(drawn.view(call.rows, call.queries, call.heads, call.d).transpose(1, 2))
    o.k.mul_(peaked.REST)
    o.k[:, :, :1] = peaked.make_key(call.d, peaked.ABOVE, scale=call.d**-0.5, **options)
    o.v[:, :, :1] = 0


def _law(call: PaddedAttention, o: MaskedOperands) -> list[tuple[Tensor, Tensor | None]]:
    """Compute in float64 the result and, for `gradient`, the gradients of queries, keys and values.

    Each comes with the size that its errors are relative to; None: its own.
    """
    q, k, v = leaves = [getattr(o, name).double().requires_grad_(call.gradient) for name in NAMES]
    out = reference.run(q, k, v, o.mask, o.wanted, scale=call.d**-0.5)
    if not call.gradient:
        return [(out, None)]
    dq, dk, dv = torch.autograd.grad(out, leaves, o.dy.double())
    with torch.no_grad():
        dq_size, dk_size = _sizes(call, o, out.detach(), dq, dk)
    return [(out.detach(), None), (dq, dq_size), (dk, dk_size), (dv, None)]


def _sizes(call: PaddedAttention, o: MaskedOperands, out: Tensor, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root of the sum of squares of what the gradients of queries and of keys are sums of.

    delta has the rounding of `out` in it, which is the same for all keys of a query.
    """
    scale, share = call.d**-0.5, call.heads // call.shared
    answered = o.mask.any(1)[:, None] if o.wanted is None else o.wanted
    g = torch.where(answered[:, None, :, None], o.dy.double(), 0.0)
    k, v = (t.double().repeat_interleave(share, 1) for t in (o.k, o.v))
    w = (o.q.double() @ k.mT * scale).masked_fill_(~o.mask[:, None, None, :], -torch.inf).softmax(-1).nan_to_num_()
    w = torch.where(answered[:, None, :, None], w, 0.0)
    ds = (g @ v.mT).sub_((out * g).sum(-1, keepdim=True)).mul_(w)
    lost = (out.square() * g.square()).sum(-1, keepdim=True)
    of_q = ds.square() @ k.square() + lost * (w @ k).square()
    of_k = (ds.square() + w.square() * lost).mT @ o.q.double().square()
    of_k = of_k.view(call.rows, call.shared, share, call.keys, call.d).sum(2)
    return (of_q * scale**2 + dq.square()).sqrt(), (of_k * scale**2 + dk.square()).sqrt()
