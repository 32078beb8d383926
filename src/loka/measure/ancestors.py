"""The part of beam_attention's adapter for decode steps: each beam attends to its few ancestors and to its own token.

A variant is `ancestors HEADSxD`, e.g. `ancestors 11x128`, with requests x beams x earlier steps as the shape. Options: a
Spec to quantize the result, `>e4m3:row`; `keep` (the new keys and values are cached as well), and a dtype.

Compared with softmax attention in float64, and the cache bit by bit: nothing but the new step may change in it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels.beam_attention import reference
from loka.kernels.beam_attention.call import AncestorAttentionCall
from loka.measure import conformance, inputs, peaked
from loka.measure.arrangement import unchanged
from loka.measure.conformance import ELEMENT_ALLOWANCE, ULP, Conformance, Law
from loka.measure.fused import judge_twice
from loka.measure.inputs import Shape
from loka.measure.op import read_variant, spell_variant
from loka.measure.rounding import judge_rounded

HEAD = "ancestors "


@dataclass(frozen=True)
class AncestorOperands:
    """The new tokens' queries, keys and values, the cache of earlier steps, and which beam of each step is an ancestor."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor


def parse(shape: Shape, variant: str) -> AncestorAttentionCall:
    """Return the call of a variant."""
    spelled = f"{HEAD}HEADSxD[>SPEC][|keep][|dtype]; e.g. {HEAD}11x128>e4m3:row|keep"
    match, options, dtype = read_variant(variant, HEAD + r"(\d+)x(\d+)(?:>([^|]+))?", ("keep",), spelled)
    requests, beams, steps = shape
    heads, d, spec = match.groups()
    parsed = None if spec is None else Spec.parse(spec)
    return AncestorAttentionCall(requests, beams, int(heads), steps, int(d), dtype, "keep" in options, parsed)


def spell(call: AncestorAttentionCall) -> str:
    """Return the variant of a call."""
    result = "" if call.spec is None else f">{call.spec}"
    return spell_variant(f"{HEAD}{call.heads}x{call.d}{result}", call, ("keep",))


def draw(call: AncestorAttentionCall, *, seed: int, distribution: str, device: torch.device) -> AncestorOperands:
    """Draw cached keys from the distribution, the rest normal, and random ancestors.

    As in the engine, the cache has room for more steps and beams than the step has, and q, k and v lie in one tensor.
    With a NaN among the keys there is another in q, since no beam may have the key's as an ancestor. Of `peaked` operands,
    every head has one peaked key: the new one or an earlier one, by turns of beams and heads.
    """
    if distribution == peaked.NAME:
        return _draw_peaked(call, seed=seed, device=device)
    return _draw(call, seed=seed, distribution=distribution, device=device)


def _draw(call: AncestorAttentionCall, *, seed: int, distribution: str, device: torch.device) -> AncestorOperands:

    def vectors(part: int, *sizes: int, kind: str = "normal") -> Tensor:
        rows = math.prod(sizes) * call.heads
        made = inputs.draw(rows, call.d, distribution=kind, seed=8 * seed + part, device=device, dtype=call.dtype)
        return made.view(*sizes, call.heads, call.d)

    kinds = distribution if distribution == "nan_row" else "normal", "normal", "normal"
    new = [vectors(part, call.requests, call.beams, kind=kind) for part, kind in enumerate(kinds)]
    q, k, v = torch.stack(new, 2).unbind(2)
    width = call.beams + 1
    cache = call.steps + 2, call.requests, width
    generator = torch.Generator(device=device).manual_seed(8 * seed + 5)
    sizes = (call.steps, call.requests, call.beams)
    table = torch.randint(0, width, sizes, generator=generator, device=device, dtype=torch.int32)
    return AncestorOperands(q, k, v, vectors(3, *cache, kind=distribution), vectors(4, *cache), table)


def _draw_peaked(call: AncestorAttentionCall, *, seed: int, device: torch.device) -> AncestorOperands:
    """A beam's ancestors are beams of its own parity, so that they have their peak in the same heads."""
    o = _draw(call, seed=seed, distribution="normal", device=device)
    rows = call.requests * call.beams * call.heads
    o.q.copy_(peaked.draw_queries(rows, call.d, seed=8 * seed, device=device, dtype=call.dtype).view(o.q.shape))
    o.k.mul_(peaked.REST)
    o.keys.mul_(peaked.REST)
    key = peaked.make_key(call.d, peaked.ABOVE, scale=call.d**-0.5, device=device, dtype=call.dtype)
    width = o.keys.shape[2]
    earlier = (torch.arange(width, device=device)[:, None] + torch.arange(call.heads, device=device)) % 2 == 0
    for step in range(call.steps):
        at = slice(step, None, call.steps)  # requests differ in which step has the peak
        for cached, peak in ((o.keys, key), (o.values, torch.zeros_like(key))):
            cached[step, at] = torch.where(earlier[..., None], peak, cached[step, at])
    new = ~earlier[: call.beams, :, None] if call.steps else torch.zeros((), dtype=torch.bool, device=device)
    o.k.copy_(torch.where(new, key, o.k))
    o.v.copy_(torch.where(new, torch.zeros_like(key), o.v))
    parity = torch.arange(call.beams, device=device, dtype=torch.int32) % 2
    table = (o.table // 2 * 2 + parity).clamp(max=width - 1)
    table = torch.where(table % 2 == parity, table, table - 1)
    return replace(o, table=table)


def make_thunk(backend: Any, call: AncestorAttentionCall, o: AncestorOperands) -> Callable[[], Tensor | QTensor]:
    """Return a step. With `keep` it writes to the cache, each time the same."""
    options = {"keep": call.keep, "spec": call.spec, "scale": call.d**-0.5}
    return lambda: backend.ancestors(o.q, o.k, o.v, o.keys, o.values, o.table, **options)


def exact(call: AncestorAttentionCall, o: AncestorOperands) -> Law:
    """Compute in float64, with the size that errors are relative to."""
    new_k, new_v, keys, values = (t.double() for t in (o.k, o.v, o.keys, o.values))
    k, v = reference.collect(new_k, new_v, keys, values, o.table, keep=False)
    p = torch.softmax((o.q.double() * k).sum(-1, keepdim=True) * call.d**-0.5, 0)
    y = (p * v).sum(0)
    terms = ((p * v).square().sum(0) + y.square()).sqrt()
    return Law(y.reshape(-1, call.d), terms.reshape(-1, call.d))


def compare(
    backend: Any, call: AncestorAttentionCall, o: AncestorOperands, law: Callable[[], Law], allowed: float
) -> Conformance:
    """Check a step and what it leaves in the cache, plain and with poisoned allocations.

    Args:
        backend, call, o: the kernel, and what it is called with. The operands' cache is left as it is.
        law: the exact result.
        allowed: the tolerance of a result that is not quantized.
    """
    mine = replace(o, keys=o.keys.clone(), values=o.values.clone())
    step = make_thunk(backend, call, mine)

    def run() -> Tensor | QTensor:
        mine.keys.copy_(o.keys)  # without what the call before has kept
        mine.values.copy_(o.values)
        return step()

    def judge(made: Tensor | QTensor) -> Conformance:
        keys, values = o.keys.clone(), o.values.clone()
        if call.keep:
            keys[call.steps, :, : call.beams], values[call.steps, :, : call.beams] = o.k, o.v
        if not (unchanged(mine.keys, keys) and unchanged(mine.values, values)):
            return Conformance.failed("the cache is not what the step must leave", allowed)
        if isinstance(made, QTensor):
            wide = law().y.view(-1, call.heads * call.d)
            error = ELEMENT_ALLOWANCE * allowed * law().terms.view(wide.shape) + ULP[call.dtype] / 2 * wide.abs()
            return judge_rounded(made, wide, error)
        return conformance.judge(made.reshape(-1, call.d), law(), allowed, call.dtype)

    return judge_twice(run, judge)


def bytes_moved(call: AncestorAttentionCall) -> int:
    """Count queries, results, new and earlier keys and values once, and what is kept."""
    row = call.requests * call.beams * call.heads * call.d
    result = 1 if call.spec is not None else call.dtype.itemsize
    return row * (call.dtype.itemsize * (3 + 2 * call.steps + 2 * call.keep) + result)
