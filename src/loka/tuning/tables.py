"""Choose the format of every embedding table, and the codecs of what ranks send, under the margin that the linears are judged by.

    table       formats are tried from the fewest bytes on, of equal ones the smaller error first; the first whose measured change of the metric, with this table alone, stays within
                the margin at its upper end is taken
    weights     the same with codecs: what an all-gather brings is what every prediction is made with, so the metric is measured with the decoded weights
    gradients   a codec's error beside what gradients differ by from batch to batch anyway, both element by element relative to the element's own root mean square, which is what Adam
                divides by; taken where it adds at most 1 % to that variance. 8-bit codecs of gradients round stochastically: to nearest the same small elements are lost in every step,
                a bias that training follows and that no look at a single step sees

Rounding the rows of a trained table says what the format does to predictions. What it does to training, where rows are rounded in every step, is not measured here: formats that can be
trained are those of `loka.kernels.embedding_update`, with stochastic rounding.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from loka.tuning.metric import swap
from loka.tuning.task import Task
from loka.units import find_collectives, find_tables, place_tables, refuse_tables, release_tables
from loka.units.tables import dense_matrices, row_bytes

TRAINED = ("int8:row", "e4m3:row:pow2", "bfloat16")
SERVED = ("int4:row", "int8:row", "e4m3:row", "bfloat16")
WEIGHT_CODECS = ("e4m3:1x128:pow2", "int8:1x128", "bf16")
GRADIENT_CODECS = ("e4m3:1x128:pow2:stochastic", "int8:1x128:stochastic", "bf16")
ADDED_VARIANCE = 0.01
LOOKED_UP = 4096  # rows of a timed lookup
Measure = Callable[[], Interval]  # change of the metric as the model is now
Within = Callable[[Interval], bool]  # whether such a change counts as none


@dataclass(frozen=True)
class _Tried:
    """One way, with what it would take and lose."""

    name: str
    bytes: int
    error: float


@contextmanager
def unrounded(model: nn.Module, tables: Sequence[TablePlan]) -> Iterator[None]:
    """Whatever places and takes back these tables inside, their float values are the old ones afterwards: taking a table back writes what its rows hold."""
    held: list[tuple[Any, Tensor]] = []
    for table in tables:
        module: Any = model.get_submodule(table.name)
        held.append((module, module.weight.detach().clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for module, weight in held:
                module.weight.copy_(weight)


@contextmanager
def placed_alone(model: nn.Module, tables: Sequence[TablePlan]) -> Iterator[None]:
    """Inside, these tables have the rows they say."""
    with unrounded(model, tables):
        place_tables(model, tables)
        try:
            yield
        finally:
            release_tables(model)


def choose_tables(
    task: Task, measure: Measure, margin: float, *, training: bool, within: Within | None = None
) -> list[TablePlan]:
    """The smallest format of every table whose change of the metric is within the margin.

    Args:
        task: what the user gave; its model is left as it was.
        measure: change of the metric as the model is now, on held-out batches.
        margin: relative change that counts as none.
        training: formats that can be trained.
        within: what judges a change; None: its upper end is within the margin.

    Returns:
        Tables with evidence; one that no format suits keeps its own, and says what was refused.
    """
    return [
        _choose_table(task.model, table, measure, margin, within or (lambda change: change.high <= margin), training)
        for table in find_tables(task.model)
    ]


def _choose_table(
    model: nn.Module, table: TablePlan, measure: Measure, margin: float, within: Within, training: bool
) -> TablePlan:
    if problems := refuse_tables(model, [table]):
        return msgspec.structs.replace(table, reason="it stays: " + "; ".join(problems))
    module: Any = model.get_submodule(table.name)
    weight = module.weight.detach()
    ways = []
    for rows in TRAINED if training else SERVED:
        if rows == "int4:row" and table.width % 2:
            continue
        error = _relative(Rows.of(weight, rows).dequantize() - weight.float(), weight)
        ways.append(_Tried(rows, row_bytes(rows, table.count, table.width), error))
    refused: list[str] = []
    for way in sorted((way for way in ways if way.bytes < table.bytes), key=lambda w: (w.bytes, w.error)):
        asked = msgspec.structs.replace(table, rows=way.name, bytes=way.bytes)
        with placed_alone(model, [asked]):
            change = measure()
        if not within(change):
            refused.append(f"{way.name}: {_spell(change)}, margin {margin:.3%}")
            continue
        evidence = UnitEvidence(error=way.error, metric_change=change, microseconds=_time_lookup(weight, way.name))
        why = f"the fewest bytes whose change of the metric, {_spell(change)}, is within {margin:.3%}"
        return msgspec.structs.replace(asked, evidence=evidence, reason=why, refusals=refused)
    return msgspec.structs.replace(table, reason="it stays: no smaller format is within the margin", refusals=refused)


def choose_collectives(
    task: Task, measure: Measure, margin: float, *, within: Within | None = None
) -> list[CollectivePlan]:
    """Codecs of weights and gradients.

    Args:
        task: what the user gave; its model is left as it was.
        measure: change of the metric as the model is now, on held-out batches.
        margin: relative change that counts as none.
        within: what judges a change; None: its upper end is within the margin.

    Returns:
        Weights and gradients with evidence; empty for a model without dense matrices.
    """
    found = {part.name: part for part in find_collectives(task.model)}
    if not found:
        return []
    matrices = [p for _, p in dense_matrices(task.model)]
    return [_choose_weights(task.model, matrices, found["weights"], measure, margin, within or (lambda change: change.high <= margin)), _choose_gradients(task, matrices, found["gradients"])]  # fmt: skip


def _choose_weights(
    model: nn.Module, matrices: Sequence[Tensor], part: CollectivePlan, measure: Measure, margin: float, within: Within
) -> CollectivePlan:
    refused: list[str] = []
    for way in _codecs(WEIGHT_CODECS, part.elements, [p.detach() for p in matrices]):
        with rounded_weights(model, way.name):
            change = measure()
        if not within(change):
            refused.append(f"{way.name}: {_spell(change)}, margin {margin:.3%}")
            continue
        evidence = UnitEvidence(error=way.error, metric_change=change, microseconds=_time_codec(matrices, way.name))
        why = f"the fewest bytes whose change of the metric, {_spell(change)}, is within {margin:.3%}"
        return msgspec.structs.replace(part, codec=way.name, bytes=way.bytes, evidence=evidence, reason=why, refusals=refused)  # fmt: skip
    return msgspec.structs.replace(part, reason="they travel as they are: no codec is within the margin", refusals=refused)  # fmt: skip


def _choose_gradients(task: Task, matrices: Sequence[Tensor], part: CollectivePlan) -> CollectivePlan:
    batches = _gradients(task, matrices)
    size = torch.stack([g.square() for g in batches]).mean(0).sqrt().clamp(min=1e-30)
    mean = torch.stack(batches).mean(0)
    noise = sum(float(((g - mean) / size).square().mean()) for g in batches) / max(len(batches) - 1, 1)
    refused: list[str] = []
    for way in _codecs(GRADIENT_CODECS, part.elements, [batches[0]]):
        codec = parse_codec(way.name)
        lost = sum(float(((_through(codec, g) - g) / size).square().mean()) for g in batches) / len(batches)
        added = lost / max(noise, 1e-30)
        if added > ADDED_VARIANCE:
            refused.append(f"{way.name}: adds {added:.2%} to what batches differ by")
            continue
        evidence = UnitEvidence(error=way.error, microseconds=_time_codec([batches[0]], way.name))
        why = f"adds {added:.3%} to the variance that gradients have between batches, at most {ADDED_VARIANCE:.0%} is taken"
        return msgspec.structs.replace(part, codec=way.name, bytes=way.bytes, evidence=evidence, reason=why, refusals=refused)  # fmt: skip
    return msgspec.structs.replace(part, reason="they travel as they are: every codec adds too much", refusals=refused)


def _gradients(task: Task, matrices: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of every matrix, end to end, for some batches that choose."""
    from loka.units.undisturbed import undisturbed

    found = []
    for batch in task.looking[:8]:
        with undisturbed(task.model), torch.enable_grad():
            loss = task.mean_loss(task.model, batch)
            grads = torch.autograd.grad(loss, list(matrices), allow_unused=True)
        pairs = zip(grads, matrices, strict=True)
        found.append(torch.cat([(torch.zeros_like(p) if g is None else g).float().flatten() for g, p in pairs]))
    return found


def _codecs(names: Sequence[str], elements: int, tensors: Sequence[Tensor]) -> list[_Tried]:
    """From the fewest bytes on; of equal ones the smaller error first."""
    flat = torch.cat([t.float().flatten() for t in tensors])
    tried = []
    for name in names:
        codec = parse_codec(name)
        tried.append(_Tried(name, codec.size(elements), _relative(_through(codec, flat) - flat, flat)))
    return sorted(tried, key=lambda way: (way.bytes, way.error))


@contextmanager
def rounded_weights(model: nn.Module, codec: str) -> Iterator[None]:
    """Inside, dense matrices have the values that an all-gather in this codec brings."""
    chosen, before = parse_codec(codec), [(p, p.detach().clone()) for _, p in dense_matrices(model)]
    try:
        with torch.no_grad():
            for p, value in before:
                p.copy_(_through(chosen, value.flatten()).view_as(p))
        yield
    finally:
        with torch.no_grad():
            for p, value in before:
                p.copy_(value)


def _through(codec: Codec, flat: Tensor) -> Tensor:
    return codec.decode(codec.encode(flat, draw=Draw(step=0) if codec.is_stochastic else None), flat.numel())


def _relative(difference: Tensor, of: Tensor) -> float:
    return float(difference.float().norm() / of.float().norm().clamp(min=1e-30))


def _spell(change: Interval) -> str:
    return f"{change.value:+.4%} [{change.low:+.4%}, {change.high:+.4%}]"


def _time_lookup(weight: Tensor, rows: str) -> Interval:
    made = Rows.of(weight, rows)
    index = torch.randint(len(weight), (LOOKED_UP,), device=weight.device)
    return _time(lambda: embedding_bag(made, index), weight.device)


def _time_codec(tensors: Sequence[Tensor], codec: str) -> Interval:
    flat, chosen = torch.cat([t.detach().float().flatten() for t in tensors]), parse_codec(codec)
    return _time(lambda: _through(chosen, flat), flat.device)


def _time(call: Callable[[], object], device: torch.device, repeats: int = 5) -> Interval:
    """Microseconds of a call, from the host."""
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
    """Tables and collectives that are within the margin alone, and with everything else; what costs most leaves until they are.

    Returns:
        All that were looked at; those that are in are in the selection.
    """
    task, used = call.task, selection.used

    def measure() -> Interval:
        return compare(
            evaluate(task, task.held_out, call.metric, as_trained=call.training), selection.base, call.metric
        )

    within = partial(call.is_within, used=used)
    tables = choose_tables(task, measure, used, training=call.training, within=within) if call.choose_tables else []
    sent = choose_collectives(task, measure, used, within=within) if call.choose_collectives else []
    found: list[TablePlan | CollectivePlan] = [*tables, *sent]
    taken = [part for part in found if part.evidence is not None]
    without = selection.change
    while taken:
        selection.tables = [part for part in taken if isinstance(part, TablePlan)]
        selection.collectives = [part for part in taken if isinstance(part, CollectivePlan)]
        weights = next((part.codec for part in selection.collectives if part.name == "weights"), "fp32")
        with unrounded(task.model, selection.tables), rounded_weights(task.model, weights):
            change = selection.change = swap(call, selection, selection.offers)
        judged = [p for p in taken if p.evidence is not None and p.evidence.metric_change is not None]
        if call.is_within(change, used) or not judged:
            break
        worst = max(judged, key=lambda p: p.evidence.metric_change.high)  # type: ignore[union-attr]
        taken.remove(worst)
        call.notes.append(f"{worst.name} stays as it is: with everything together the metric moved {spell_change(change)}")  # fmt: skip
        selection.tables, selection.collectives, selection.change, selection.swapped = [], [], without, None
    return found


def describe_part(part: TablePlan | CollectivePlan) -> TunedUnit:
    """A table or a collective as a row of the record: memory, bytes, error and time in words.

    Args:
        part: with its evidence.

    Returns:
        The row; `high` where it stays as it is.
    """
    known = part.evidence
    way = part.rows if isinstance(part, TablePlan) else part.codec
    numbers = ""
    if known is not None and known.error is not None and known.microseconds is not None:
        what = "a lookup of 4,096 rows" if isinstance(part, TablePlan) else "writing and reading"
        numbers = f"; error {known.error:.2%}; {what} {known.microseconds.value:.0f} us"
    return TunedUnit(
        name=part.name, linears=[], way="high" if known is None else way, flops_share=0.0,
        reason=f"{spell_part(part)}: {part.bytes:,} of {part.float32_bytes:,} bytes{numbers}; {part.reason}",
        metric_change=None if known is None else known.metric_change,
    )  # fmt: skip
