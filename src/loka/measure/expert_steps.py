"""What a mixture of experts runs beside its products, judged as part of grouped_mm's adapter: SwiGLU, sorting, moving rows.

permute, gather       equal to the reference, bit by bit
combine               each token's weighted sum, against float64, with and without a residual
swiglu                silu(gate) * up in float64, rounded or quantized once
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor
from loka.kernels.grouped_mm import reference
from loka.kernels.grouped_mm.call import MoveCall, Permutation, SwigluCall
from loka.measure import conformance, inputs
from loka.measure.arrangement import unchanged
from loka.measure.conformance import Conformance, Law, worst_of
from loka.measure.fused import FLOAT32, judge_twice
from loka.measure.rounding import judge_rounded

StepCall = SwigluCall | MoveCall


@dataclass(frozen=True)
class MoveOperands:
    """The experts of each token and how visits are sorted by them; rows, weights of visits and a residual."""

    ids: Tensor
    permutation: Permutation
    x: Tensor | QTensor
    weights: Tensor
    add: Tensor


def draw(call: StepCall, *, seed: int, distribution: str, device: torch.device) -> Tensor | MoveOperands:
    """Draw rows from the distribution; experts are random, and each token's differ. One has no rows."""
    options: dict[str, Any] = {"distribution": distribution, "device": device}
    if isinstance(call, SwigluCall):
        return inputs.draw(call.m, 2 * call.f, seed=seed, dtype=call.in_dtype, **options)
    generator = torch.Generator(device=device).manual_seed(3 * seed)
    chances = torch.rand(call.tokens, call.experts, generator=generator, device=device)
    if call.experts > call.top:
        chances[:, seed % call.experts] = -1.0
    ids = chances.topk(call.top, 1).indices
    permutation = Permutation(*reference.permute(ids, call.experts), call.top)
    rows = call.tokens * call.top if call.step == "combine" else call.tokens
    dtype = torch.float32 if call.spec is not None else call.dtype
    x = inputs.draw(rows, call.width, seed=3 * seed + 1, dtype=dtype, **options)
    add = inputs.draw(call.tokens, call.width, seed=3 * seed + 2, dtype=dtype, device=device)
    weights = torch.rand(call.tokens, call.top, generator=generator, device=device)
    return MoveOperands(ids, permutation, x if call.spec is None else inputs.quantized(x, call.spec), weights, add)


def exact(call: StepCall, operands: Any) -> Any:
    """Return what a backend must return."""
    if isinstance(call, SwigluCall):
        gate, up = operands.double().chunk(2, 1)
        return F.silu(gate) * up
    o: MoveOperands = operands
    if call.step == "permute":
        return reference.permute(o.ids, call.experts)
    if call.step == "gather":
        return reference.gather(o.x, o.permutation)
    assert isinstance(o.x, Tensor)
    terms = o.x.double()[o.permutation.inverse].view(*o.weights.shape, -1) * o.weights.double().unsqueeze(-1)
    return terms.sum(1), terms.square().sum(1)


def compare(backend: Any, call: StepCall, operands: Any, law: Callable[[], Any]) -> Conformance:
    """Check a step, plain and with poisoned allocations."""
    if isinstance(call, SwigluCall):
        return judge_twice(lambda: backend.swiglu(operands, call.spec), lambda made: _judge_swiglu(made, law()))
    o: MoveOperands = operands
    if call.step == "permute":
        return judge_twice(lambda: backend.permute(o.ids, call.experts), lambda made: _judge_same(made, law()))
    if call.step == "gather":
        return judge_twice(lambda: backend.gather(o.x, o.permutation), lambda made: _judge_same([made], [law()]))

    def judge(add: Tensor | None, made: Tensor) -> Conformance:
        y, squares = law()
        y, squares = (y, squares) if add is None else (y + add.double(), squares + add.double().square())
        allowed = conformance.baseline_tolerance(call.dtype, call.top + 1)
        return conformance.judge(made, Law(y, (squares + y.square()).sqrt()), allowed, call.dtype)

    runs = [(add, partial(backend.combine, o.x, o.permutation, o.weights, add)) for add in (None, o.add)]
    return worst_of(judge_twice(run, partial(judge, add)) for add, run in runs)


def _judge_swiglu(made: Tensor | QTensor, y: Tensor) -> Conformance:
    largest = y.abs().nan_to_num(0.0).amax(1, keepdim=True) if y.numel() else y
    return judge_rounded(made, y, FLOAT32 * largest.expand_as(y))


def _judge_same(made: Any, law: Any) -> Conformance:
    for found, expected in zip(made, law, strict=True):
        whole = isinstance(expected, Tensor)
        pairs = [(found, expected)] if whole else [(found.data, expected.data), (found.scale, expected.scale)]
        for ours, theirs in pairs:
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype or not unchanged(ours, theirs):
                return Conformance.failed("rows or their order differ from the reference's")
    return Conformance(True, 0.0, 0.0)
