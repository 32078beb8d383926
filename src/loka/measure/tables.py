"""Benchmark adapters of embedding tables: lookups and updates. Baselines are torch's lookup and the update on float32
rows.

A shape is (bags, width, rows of the table). A variant is the rows' format and options:

    embedding_bag     int8:row|sum|items=20        items per bag; `mean`, or `item` for single rows; `weighted`
    embedding_update  int8:row|rowwise_adagrad|items=20

Lookups may differ from the reference by float32 summation error. Updates are judged on copies of the same rows: no
element may be further from the reference than one step of its grid, and only one in 500 may differ at all, since the
last bit of a sum may flip a rounding. A kernel that rounds to nearest, or squares before it sums duplicates, fails.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import Draw
from loka.kernels import registry
from loka.kernels.embedding_bag import BagCall, Rows, reference
from loka.kernels.embedding_bag.rows import FLOATS, parse_rows
from loka.kernels.embedding_update import Rule, UpdateCall
from loka.kernels.embedding_update import reference as update_law
from loka.measure import inputs
from loka.measure.conformance import ULP, Conformance
from loka.measure.fused import judge_twice
from loka.measure.inputs import Shape
from loka.measure.op import Op
from loka.measure.timing import Thunk

_SUM_ERROR = 1e-5  # of a float32 sum in another order, relative to the largest element of the result
_FLIPPED = 0.002  # share of elements whose rounding may flip


@dataclass(frozen=True)
class Items:
    """Operands of a lookup; an update also uses `grad`, the gradient of its result."""

    rows: Rows
    indices: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    grad: Tensor


def _parse_items(variant: str) -> tuple[str, list[str], int]:
    kind, *options = variant.split("|")
    parse_rows(kind)
    counts = [option.removeprefix("items=") for option in options if option.startswith("items=")]
    if len(counts) > 1 or any(not c.isdigit() or int(c) < 1 for c in counts):
        raise ValueError(f"variant {variant!r}: items=N is the length of a bag, once, at least 1")
    return kind, [option for option in options if not option.startswith("items=")], int(counts[0]) if counts else 1


def _draw(
    call: BagCall | UpdateCall, *, pooled: bool, weighted: bool, seed: int, distribution: str, device: torch.device
) -> Items:
    weight = inputs.draw(call.rows, call.width, distribution=distribution, seed=3 * seed, device=device)
    generator = torch.Generator(device=device).manual_seed(3 * seed + 1)
    indices = torch.randint(0, call.rows, (call.items,), generator=generator, device=device)
    offsets = None
    if pooled:
        offsets = torch.arange(call.bags + 1, device=device) * call.items // max(call.bags, 1)
    weights = torch.rand(call.items, generator=generator, device=device) if weighted else None
    grad = inputs.draw(call.bags, call.width, distribution=distribution, seed=3 * seed + 2, device=device)
    return Items(Rows.of(weight, call.kind), indices, offsets, weights, grad)


def _row_bytes(kind: str, width: int) -> float:
    parsed = parse_rows(kind)
    if isinstance(parsed, torch.dtype):
        return width * FLOATS[kind].itemsize
    return width * parsed.format.bits / 8 + 1


class EmbeddingBag(Op[BagCall]):
    """Pooled or single lookups."""

    op = "embedding_bag"
    DIMENSIONS = ("bags", "width", "rows")
    VARIANTS = (
        "float32|sum|items=20",
        "bfloat16|sum|items=20",
        "int8:row|sum|items=20",
        "e4m3:row|mean|items=20",
        "int4:row|item",
    )

    def parse(self, shape: Shape, variant: str) -> BagCall:
        """See `Op.parse`: bags, width, rows of the table and a format of rows."""
        kind, options, items = _parse_items(variant)
        modes = [option for option in options if option in ("sum", "mean", "item")]
        if len(modes) != 1 or set(options) - {*modes, "weighted"}:
            raise ValueError(
                f"variant {variant!r} is not ROWS|sum or mean or item[|items=N][|weighted]; e.g. {self.VARIANTS[2]}"
            )
        bags, width, rows = shape
        return BagCall(rows, width, bags, bags * items, kind, modes[0], "weighted" in options)

    def spell(self, call: BagCall) -> str:
        """See `Op.spell`."""
        items = call.items // max(call.bags, 1)
        options = [call.kind, call.mode, f"items={items}", *(["weighted"] if call.weighted else [])]
        return "|".join(options)

    def operands(self, call: BagCall, *, seed: int, distribution: str, device: torch.device) -> Items:
        """Draw a table and random items."""
        pooled, weighted = call.mode != "item", call.weighted
        return _draw(call, pooled=pooled, weighted=weighted, seed=seed, distribution=distribution, device=device)

    def thunk(self, backend: Any, call: BagCall, operands: Items) -> Thunk:
        """See `Op.thunk`."""
        o = operands
        return lambda: backend.run(
            o.rows, o.indices, o.offsets, weights=o.weights, mode=call.mode, out_dtype=call.out_dtype
        )

    def check(self, backend: Any, call: BagCall, operands: Items) -> Conformance:
        """Check that it is close to the reference, plain and with poisoned allocations."""
        law = self.thunk(reference, call, operands)()
        return judge_twice(self.thunk(backend, call, operands), lambda out: _near(out, law))

    def baseline(self, call: BagCall, operands: Items) -> Thunk:
        """Return torch's lookup in the same table in float32."""
        weight, o = operands.rows.dequantize(), operands
        if o.offsets is None:
            return lambda: F.embedding(o.indices, weight)
        offsets = o.offsets
        return lambda: F.embedding_bag(
            o.indices, weight, offsets, mode=call.mode, per_sample_weights=o.weights, include_last_offset=True
        )

    def check_baseline(self, call: BagCall, operands: Items) -> Conformance:
        """Check that it is close to the reference."""
        return _near(self.baseline(call, operands)(), self.thunk(reference, call, operands)())

    def bytes_moved(self, call: BagCall) -> int:
        """Count every looked-up row with its scale, the indices, and the result."""
        return int(
            call.items * (_row_bytes(call.kind, call.width) + 8) + call.bags * call.width * call.out_dtype.itemsize
        )


class EmbeddingUpdate(Op[UpdateCall]):
    """One optimizer step on the rows that were looked up."""

    op = "embedding_update"
    DIMENSIONS = EmbeddingBag.DIMENSIONS
    VARIANTS = (
        "float32|rowwise_adagrad|items=20",
        "bfloat16|sgd|items=20",
        "int8:row|rowwise_adagrad|items=20",
        "e4m3:row:pow2|adam|items=4",
    )

    def parse(self, shape: Shape, variant: str) -> UpdateCall:
        """See `Op.parse`: bags, width, rows of the table, a format of rows and an update rule."""
        kind, options, items = _parse_items(variant)
        if len(options) != 1:
            raise ValueError(f"variant {variant!r} is not ROWS|RULE[|items=N]; e.g. {self.VARIANTS[2]}")
        rule = Rule(options[0])  # type: ignore[arg-type]
        bags, width, rows = shape
        return UpdateCall(rows, width, bags, bags * items, kind, rule.kind)

    def spell(self, call: UpdateCall) -> str:
        """See `Op.spell`."""
        return f"{call.kind}|{call.rule}|items={call.items // max(call.bags, 1)}"

    def operands(self, call: UpdateCall, *, seed: int, distribution: str, device: torch.device) -> Items:
        """Draw a table, random items and a gradient."""
        return _draw(call, pooled=True, weighted=False, seed=seed, distribution=distribution, device=device)

    def thunk(self, backend: Any, call: UpdateCall, operands: Items) -> Thunk:
        """Return the update, in place on a copy of the rows."""
        held = _copy(operands.rows)
        rule = Rule(call.rule)
        state = rule.state(held)
        o = operands
        return lambda: backend.run(held, o.indices, o.offsets, o.grad, rule, state, Draw(1, 2, 3))

    def check(self, backend: Any, call: UpdateCall, operands: Items) -> Conformance:
        """Check two successive updates: each within a step of the grid, and almost all elements equal."""
        ours, law, rule, o = _copy(operands.rows), _copy(operands.rows), Rule(call.rule), operands
        states = rule.state(ours), rule.state(law)
        for step in range(2):
            backend.run(ours, o.indices, o.offsets, o.grad, rule, states[0], Draw(step, 2, 3))
            update_law.run(law, o.indices, o.offsets, o.grad, rule, states[1], Draw(step, 2, 3))
            verdict = judge_update(ours, law)
            if not verdict:
                return verdict
            law = _copy(ours)  # a flipped rounding must not count as an error of the next step
        return verdict

    def baseline(self, call: UpdateCall, operands: Items) -> Thunk:
        """Return the same update of float32 rows, on the backend chosen for them."""
        return self.thunk(*_in_float32(call, operands))

    def check_baseline(self, call: UpdateCall, operands: Items) -> Conformance:
        """Check the float32 update against the reference."""
        return self.check(*_in_float32(call, operands))

    def bytes_moved(self, call: UpdateCall) -> int:
        """Count rows (assumed distinct) read and written with scale and state, and indices and gradients once."""
        state = {"sgd": 0, "rowwise_adagrad": 8, "adam": 16 * call.width}[call.rule]
        rows = min(call.items, call.rows)
        return int(rows * (2 * _row_bytes(call.kind, call.width) + state) + call.items * 8 + call.bags * call.width * 4)


def _in_float32(call: UpdateCall, o: Items) -> tuple[Any, UpdateCall, Items]:
    """Return the backend, call and operands of the same update of float32 rows."""
    plain = UpdateCall(call.rows, call.width, call.bags, call.items, "float32", call.rule, call.hot)
    chosen = registry.first("embedding_update", plain, o.indices.device)
    return chosen.backend, plain, Items(Rows(o.rows.dequantize()), o.indices, o.offsets, None, o.grad)


def _copy(rows: Rows) -> Rows:
    parts = [None if t is None else t.clone() for t in (rows.scale_code, rows.slot, rows.hot)]
    return Rows(rows.data.clone(), parts[0], rows.spec, parts[1], parts[2])


def _near(out: Tensor, law: Tensor) -> Conformance:
    if out.shape != law.shape:
        return Conformance.failed(f"shape {tuple(out.shape)}, expected {tuple(law.shape)}", _SUM_ERROR)
    gap = (out.float() - law.float()).abs()
    size = law.float().abs().amax(1, keepdim=True).clamp(min=1e-30) if law.numel() else law.float()
    error = float((gap / size).max()) if gap.numel() else 0.0
    allowed = _SUM_ERROR if law.dtype == torch.float32 else _SUM_ERROR + ULP[law.dtype]  # which rounds either way
    return Conformance.within(error, allowed, f"results are off by {error:.2g} of the largest of their bag")


def judge_update(ours: Rows, law: Rows) -> Conformance:
    """Compare updated rows with the reference's."""
    found, expected = ours.dequantize(), law.dequantize()
    if not torch.equal(found.isnan(), expected.isnan()):
        return Conformance.failed("NaN is elsewhere than in the reference", _FLIPPED)
    gap = (found - expected).abs().nan_to_num(0.0)
    far = int((gap > 1.01 * _quantum(law, expected)).sum())
    if far:
        return Conformance.failed(f"{far} elements are more than a step of their grid from the reference", _FLIPPED)
    flipped = float((gap > 1e-5 * expected.abs().nan_to_num(0.0) + 1e-6).double().mean())
    reason = f"{flipped:.2%} of the elements were rounded differently from the reference"
    return Conformance.within(flipped, _FLIPPED, reason)


def _quantum(rows: Rows, values: Tensor) -> Tensor:
    """Return the size of one step of the grid at each value."""
    size = values.abs().nan_to_num(0.0)
    scale = rows.scale
    if rows.spec is None or scale is None:
        return size * (2.0**-7 if rows.data.dtype == torch.bfloat16 else 1e-5) + 1e-6
    scale = scale.nan_to_num(0.0).unsqueeze(1)
    return scale.expand_as(size) if rows.spec.format.is_integer else torch.maximum(size * 2.0**-3, scale * 2.0**-9)
