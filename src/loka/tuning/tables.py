"""Choose the format of every embedding table and the codecs of collectives, within the same margin as the linears.

    table       Try formats by increasing bytes, then error. Take the first whose measured change of the metric, with
                only this table converted, is within the margin at its upper end.
    weights     The same with codecs. Every prediction is made with the weights that an all-gather delivers, so the
                metric is measured with the decoded weights.
    gradients   Compare a codec's error with the variance of gradients between batches, both element by element and
                relative to the element's root mean square, which is what Adam divides by. Take the codec if it adds at
                most 1 % to that variance. 8-bit codecs of gradients round stochastically: rounding to nearest loses the
                same small elements in every step, a bias that training follows and that no single step reveals.

Rounding a trained table shows what the format does to predictions. What it does to training, where rows are rounded in
every step, is not measured here. Formats that can be trained are those of `loka.kernels.embedding_update`, with
stochastic rounding.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from loka.formats import Draw
from loka.kernels.embedding_bag import Rows, embedding_bag
from loka.kernels.wire.codec import Codec, parse_codec
from loka.measure.timing import bootstrap_median
from loka.probe.paired import spell_change
from loka.records import CollectivePlan, Interval, TablePlan, UnitEvidence
from loka.records.prose import spell_part
from loka.records.tuning import TunedUnit
from loka.tuning.call import Call, Selection
from loka.tuning.comparing import compare, evaluate
from loka.tuning.metric import swap_all
from loka.tuning.task import Task
from loka.units import find_collectives, find_tables, place_tables, refuse_tables, release_tables
from loka.units.tables import dense_matrices, row_bytes
from loka.units.undisturbed import put_weight, undisturbed

TRAINED = ("int8:row", "e4m3:row:pow2", "bfloat16")
SERVED = ("int4:row", "int8:row", "e4m3:row", "bfloat16")
WEIGHT_CODECS = ("e4m3:1x128:pow2", "int8:1x128", "bf16")
GRADIENT_CODECS = ("e4m3:1x128:pow2:stochastic", "int8:1x128:stochastic", "bf16")
ADDED_VARIANCE = 0.01  # of a gradient codec, at most
LOOKED_UP = 4096  # rows of a timed lookup


@dataclass(frozen=True)
class _Tried:
    """A format or codec with its size and error."""

    name: str
    bytes: int
    error: float


@contextmanager
def unrounded(model: nn.Module, tables: Sequence[TablePlan]) -> Iterator[None]:
    """Restore the float values of tables after the block. Releasing a placed table would leave its rounded values."""
    held: list[tuple[Any, Tensor]] = []
    for table in tables:
        weight: Any = model.get_submodule(table.name).weight
        held.append((weight, weight.detach()))  # a placed table leaves this memory, and nothing writes to it
    try:
        yield
    finally:
        for weight, memory in held:
            put_weight(weight, memory, None)


@contextmanager
def placed_alone(model: nn.Module, tables: Sequence[TablePlan]) -> Iterator[None]:
    """Give tables the formats of their plans inside the block."""
    with unrounded(model, tables):
        place_tables(model, tables)
        try:
            yield
        finally:
            release_tables(model)


@dataclass(frozen=True)
class Trial:
    """How a format or codec is judged while it is in place.

    Args:
        measure: returns the change of the metric on held-out batches for the current state of the model.
        margin: acceptable relative change, for the reasons that are given.
        within: judges a change; None compares its upper end with the margin.
    """

    measure: Callable[[], Interval]
    margin: float
    within: Callable[[Interval], bool] | None = None

    def accepts(self, change: Interval) -> bool:
        """Check whether a change is acceptable."""
        return change.high <= self.margin if self.within is None else self.within(change)


def choose_tables(task: Task, trial: Trial, *, training: bool) -> list[TablePlan]:
    """Choose for every table the smallest format whose change of the metric is within the margin.

    Args:
        task: the model and how to run it; the model is restored.
        trial: judges a format that is in place.
        training: choose among formats that can be trained.

    Returns:
        Tables with evidence. A table that no format suits keeps its own and lists what was refused.
    """
    return [_choose_table(task.model, table, trial, training) for table in find_tables(task.model)]


def _choose_table(model: nn.Module, table: TablePlan, trial: Trial, training: bool) -> TablePlan:
    if problems := refuse_tables(model, [table]):
        return msgspec.structs.replace(table, reason="not converted: " + "; ".join(problems))
    module: Any = model.get_submodule(table.name)
    weight = module.weight.detach()
    ways = []
    for rows in TRAINED if training else SERVED:
        if rows == "int4:row" and table.width % 2:
            continue
        error = _relative_error(Rows.of(weight, rows).dequantize() - weight.float(), weight)
        ways.append(_Tried(rows, row_bytes(rows, table.count, table.width), error))
    smaller = [way for way in ways if way.bytes < table.bytes]

    def place(way: _Tried) -> AbstractContextManager[None]:
        return placed_alone(model, [msgspec.structs.replace(table, rows=way.name, bytes=way.bytes)])

    taken, given = _take_first(smaller, place, lambda way: _time_lookup(weight, way.name), trial)
    if taken is None:
        return msgspec.structs.replace(table, reason="not converted: no smaller format is within the margin", **given)
    return msgspec.structs.replace(table, rows=taken.name, bytes=taken.bytes, **given)


def _take_first(
    ways: Sequence[_Tried],
    place: Callable[[_Tried], AbstractContextManager[None]],
    time: Callable[[_Tried], Interval],
    trial: Trial,
) -> tuple[_Tried | None, dict[str, Any]]:
    """Take the way with the fewest bytes, then the smallest error, that the trial accepts.

    Returns:
        The way, or None, and the fields of a plan that say so: what was refused and, of a way that was taken, its
        evidence and reason.
    """
    refused: list[str] = []
    for way in sorted(ways, key=lambda way: (way.bytes, way.error)):
        with place(way):
            change = trial.measure()
        if trial.accepts(change):
            evidence = UnitEvidence(error=way.error, metric_change=change, microseconds=time(way))
            why = f"the fewest bytes whose change of the metric, {change:+.4%}, is within {trial.margin:.3%}"
            return way, {"evidence": evidence, "reason": why, "refusals": refused}
        refused.append(f"{way.name}: {change:+.4%}, margin {trial.margin:.3%}")
    return None, {"refusals": refused}


def choose_collectives(task: Task, trial: Trial) -> list[CollectivePlan]:
    """Choose codecs for weights and gradients.

    Args:
        task: the model and how to run it; the model is restored.
        trial: judges a codec of weights while the decoded weights are in place.

    Returns:
        Weights and gradients with evidence; empty for a model without dense matrices.
    """
    found = {part.name: part for part in find_collectives(task.model)}
    if not found:
        return []
    matrices = [p for _, p in dense_matrices(task.model)]
    return [
        _choose_weights(task.model, matrices, found["weights"], trial),
        _choose_gradients(task, matrices, found["gradients"]),
    ]


def _choose_weights(model: nn.Module, matrices: Sequence[Tensor], part: CollectivePlan, trial: Trial) -> CollectivePlan:
    ways = _try_codecs(WEIGHT_CODECS, part.elements, [p.detach() for p in matrices])
    taken, given = _take_first(
        ways, lambda way: rounded_weights(model, way.name), lambda way: _time_codec(matrices, way.name), trial
    )
    if taken is None:
        return msgspec.structs.replace(part, reason="sent without a codec: none is within the margin", **given)
    return msgspec.structs.replace(part, codec=taken.name, bytes=taken.bytes, **given)


def _choose_gradients(task: Task, matrices: Sequence[Tensor], part: CollectivePlan) -> CollectivePlan:
    batches = _compute_gradients(task, matrices)
    size = torch.stack([g.square() for g in batches]).mean(0).sqrt().clamp(min=1e-30)
    mean = torch.stack(batches).mean(0)
    noise = sum(float(((g - mean) / size).square().mean()) for g in batches) / max(len(batches) - 1, 1)
    refused: list[str] = []
    for way in _try_codecs(GRADIENT_CODECS, part.elements, [batches[0]]):
        codec = parse_codec(way.name)
        lost = sum(float(((_round_trip(codec, g) - g) / size).square().mean()) for g in batches) / len(batches)
        added = lost / max(noise, 1e-30)
        if added > ADDED_VARIANCE:
            refused.append(f"{way.name}: adds {added:.2%} to the variance of gradients between batches")
            continue
        evidence = UnitEvidence(error=way.error, microseconds=_time_codec([batches[0]], way.name))
        why = f"adds {added:.3%} to the variance of gradients between batches, at most {ADDED_VARIANCE:.0%} is accepted"
        return msgspec.structs.replace(
            part, codec=way.name, bytes=way.bytes, evidence=evidence, reason=why, refusals=refused
        )
    return msgspec.structs.replace(part, reason="sent without a codec: each adds too much variance", refusals=refused)


def _compute_gradients(task: Task, matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of all matrices, concatenated, for some of the batches to choose on."""
    found = []
    for batch in task.looking[:8]:
        with undisturbed(task.model), torch.enable_grad():
            loss = task.mean_loss(task.model, batch)
            grads = torch.autograd.grad(loss, list(matrices), allow_unused=True)
        pairs = zip(grads, matrices, strict=True)
        found.append(torch.cat([(torch.zeros_like(p) if g is None else g).float().flatten() for g, p in pairs]))
    return found


def _try_codecs(names: Sequence[str], elements: int, tensors: Sequence[Tensor]) -> list[_Tried]:
    """Return codecs with their size and error, sorted by bytes, then error."""
    flat = torch.cat([t.float().flatten() for t in tensors])
    tried = []
    for name in names:
        codec = parse_codec(name)
        tried.append(_Tried(name, codec.size(elements), _relative_error(_round_trip(codec, flat) - flat, flat)))
    return sorted(tried, key=lambda way: (way.bytes, way.error))


@contextmanager
def rounded_weights(model: nn.Module, codec: str) -> Iterator[None]:
    """Give dense matrices the values that an all-gather with this codec delivers, inside the block."""
    chosen = parse_codec(codec)
    before = [(p, p.detach(), p.detach().clone()) for _, p in dense_matrices(model)]
    try:
        with torch.no_grad():
            for p, _, value in before:
                p.copy_(_round_trip(chosen, value.flatten()).view_as(p))
        yield
    finally:
        for p, memory, value in before:
            put_weight(p, memory, value)


def _round_trip(codec: Codec, flat: Tensor) -> Tensor:
    return codec.decode(codec.encode(flat, draw=Draw(step=0) if codec.is_stochastic else None), flat.numel())


def _relative_error(difference: Tensor, of: Tensor) -> float:
    return float(difference.float().norm() / of.float().norm().clamp(min=1e-30))


def _time_lookup(weight: Tensor, rows: str) -> Interval:
    made = Rows.of(weight, rows)
    index = torch.randint(len(weight), (LOOKED_UP,), device=weight.device)
    return _time(lambda: embedding_bag(made, index), weight.device)


def _time_codec(tensors: Sequence[Tensor], codec: str) -> Interval:
    flat, chosen = torch.cat([t.detach().float().flatten() for t in tensors]), parse_codec(codec)
    return _time(lambda: _round_trip(chosen, flat), flat.device)


def _time(call: Callable[[], object], device: torch.device, repeats: int = 5) -> Interval:
    """Return the microseconds of a call, timed on the host."""
    call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e6 * (time.perf_counter() - begin))
    return bootstrap_median(times)


def choose_parts(call: Call, selection: Selection) -> list[TablePlan | CollectivePlan]:
    """Choose tables and collectives that are within the margin alone, then drop the worst until all together are.

    Returns:
        Everything that was tried, as it stays: what was dropped keeps its own format. What is chosen is in the selection.
    """
    task, used = call.task, selection.used

    def measure() -> Interval:
        return compare(
            evaluate(task, task.held_out, call.metric, as_trained=call.training), selection.base, call.metric
        )

    trial = Trial(measure, used, partial(call.is_within, used=used))
    tables = choose_tables(task, trial, training=call.training) if call.choose_tables else []
    sent = choose_collectives(task, trial) if call.choose_collectives else []
    found: list[TablePlan | CollectivePlan] = [*tables, *sent]
    taken = [part for part in found if part.evidence is not None]
    without = selection.change
    dropped: dict[str, str] = {}
    while taken:
        selection.tables = [part for part in taken if isinstance(part, TablePlan)]
        selection.collectives = [part for part in taken if isinstance(part, CollectivePlan)]
        weights = next((part.codec for part in selection.collectives if part.name == "weights"), "fp32")
        with unrounded(task.model, selection.tables), rounded_weights(task.model, weights):
            change = selection.change = swap_all(call, selection, selection.offers)
        judged = [p for p in taken if p.evidence is not None and p.evidence.metric_change is not None]
        if call.is_within(change, used) or not judged:
            break
        worst = max(judged, key=lambda p: p.evidence.metric_change.high)  # type: ignore[union-attr]
        taken.remove(worst)
        dropped[worst.name] = f"not converted: with everything together the metric moved {spell_change(change)}"
        call.notes.append(f"{worst.name} is {dropped[worst.name]}")
        selection.tables, selection.collectives, selection.change, selection.swapped = [], [], without, None
    unchanged: list[TablePlan | CollectivePlan] = [*find_tables(task.model), *find_collectives(task.model)]
    plain = {part.name: part for part in unchanged}
    return [
        msgspec.structs.replace(plain[part.name], reason=dropped[part.name], refusals=part.refusals)
        if part.name in dropped
        else part
        for part in found
    ]


def describe_part(part: TablePlan | CollectivePlan) -> TunedUnit:
    """Describe a table or a collective as a row of the record: bytes, error and time.

    Its way is "high" if it is not converted.
    """
    known = part.evidence
    way = part.rows if isinstance(part, TablePlan) else part.codec
    numbers = ""
    if known is not None and known.error is not None and known.microseconds is not None:
        what = "a lookup of 4,096 rows" if isinstance(part, TablePlan) else "encoding and decoding"
        numbers = f"; error {known.error:.2%}; {what} {known.microseconds.value:.0f} us"
    return TunedUnit(
        name=part.name, linears=[], way="high" if known is None else way, flops_share=0.0,
        reason=f"{spell_part(part)}: {part.bytes:,} of {part.float32_bytes:,} bytes{numbers}; {part.reason}",
        metric_change=None if known is None else known.metric_change,
    )  # fmt: skip
