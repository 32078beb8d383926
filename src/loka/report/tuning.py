"""Results of tuning: how every unit runs, and the step time and loss of the whole model compared with 16-bit."""

from loka.records import Conversion, Interval
from loka.records.prose import spell_unit
from loka.records.tuning import SizeEstimates, TunedUnit, Tuning
from loka.report.markup import about, chip, dotted, escape, notice, percent, signed, table, times
from loka.report.results import Results

_GLOSSARY = (
    "<p class=about><b>Unit</b>: a linear, or a chain of linears that pass FP8 from one to the next; each unit is decided as a whole. "
    "<b>Predicted</b>: the relative change of the loss that the score expects from the unit's rounding. <b>Swapped, alone</b>: the change measured with only this unit in FP8, on held-out "
    "batches, paired. <b>Speed-up</b>: of the unit alone, outside of the model, compiled, over its compiled 16-bit version. <b>Margin</b>: changes up to this size count as none.</p>"
)

_CHOSEN = "auto is "  # notes of a conversion about backends: long, and seldom of interest


def say_tuning(tuning: Tuning) -> str:
    """Return the headline of a tuning: one sentence that claims no more than was measured."""
    return f"{tuning.model}: {tuning.verdict}"


def write_tuning(results: Results) -> str:
    """Return all tunings, then the conversions and the estimates."""
    parts = [
        *(_write_one(tuning, _title(results, tuning)) for tuning in results.tunings),
        *map(_write_conversion, results.conversions),
        *map(_write_sizes, results.sizes),
    ]
    return "".join(parts)


def _write_sizes(found: SizeEstimates) -> str:
    """Return the estimates for another device, marked as estimates in every place."""
    rows = [
        [escape(size.size), f"{size.rows:,}", percent(size.share), f"{times(size.linears)} {chip('estimated', '')}"]
        for size in (found.here, found.large)
    ]
    head = ("size of the model", "batch size", "FLOPs in FP8", "speed-up of its linears over bf16")
    note = notice(f"Speeds are {escape(found.method)}. None was measured; only linears are counted.")
    caption = "Linears that are faster in FP8 are converted, the others stay in 16-bit precision"
    return f"<h3>Estimated for {escape(found.target)}</h3>{note}" + table(
        head, rows, numeric=(1, 2, 3), caption=caption
    )


def _title(results: Results, tuning: Tuning) -> str:
    """Return the model's name where the headline of the page already says what was found, otherwise both."""
    told = tuning is results.tunings[0] and not results.comparisons
    return tuning.model if told else say_tuning(tuning)


def _write_one(tuning: Tuning, title: str) -> str:
    rows = [_unit_row(unit) for unit in tuning.units]
    head = ("unit", "runs as", "FLOPs", "speed-up", "predicted", "swapped, alone", "why")
    margin = f"Margin {percent(tuning.margin, 2)}"
    if tuning.used_margin != tuning.margin:
        margin += (
            f", judged at {percent(tuning.used_margin, 2)}, the smallest change that the held-out data could resolve"
        )
    text = f"<h3>{escape(title)}</h3>" + about(
        f"{margin}. The forward pass was judged by swapping FP8 in on held-out {tuning.metric_unit}; "
        f"{_say_gradients(tuning)}. {_say_kernels(tuning)}The model itself was not trained."
    )
    text += "".join(notice(escape(note)) for note in tuning.notes)
    if tuning.estimate is not None:
        text += notice(
            f"Speeds are {escape(tuning.estimate.method)}. Calls there have {tuning.estimate.rows:g} times as many "
            "rows as here. None was measured."
        )
    if tuning.step_microseconds:
        steps = [[escape(name), f"{us / 1000:.3f}"] for name, us in tuning.step_microseconds.items()]
        text += table(("whole step, compiled", "ms"), steps, numeric=(1,), caption="The step compared with 16-bit")
    return text + table(head, rows, numeric=range(2, 6), why=6, caption="Units") + _GLOSSARY


def _say_kernels(tuning: Tuning) -> str:
    """Return how many kernel calls were judged; nothing where all are references, as on a CPU."""
    return f"{tuning.kernels} kernel calls were tested at the shapes they run. " if tuning.kernels else ""


def _say_gradients(tuning: Tuning) -> str:
    """Return how gradients were judged. The record's "score" is called "predicted change" on the page."""
    if tuning.gradients.startswith("none"):
        return "a served model has no gradients"
    return f"gradients {escape(tuning.gradients.replace('by the score', 'by the predicted change'))}"


def _unit_row(unit: TunedUnit) -> list[str]:
    kind = "good" if unit.way != "high" else ""
    why = escape(unit.reason) + "".join(f"<br>{chip('alarm', 'bad')} {escape(alarm)}" for alarm in unit.alarms)
    names = "&nbsp;→ ".join(map(dotted, unit.linears)) if len(unit.linears) > 1 else dotted(unit.name)
    way = chip("16-bit" if unit.way == "high" else unit.way, kind)
    return [names, way, percent(unit.flops_share), _speed(unit), _change(unit.harm), _change(unit.metric_change), why]


def _speed(unit: TunedUnit) -> str:
    if unit.speedup is None and unit.estimated is not None:
        return f"{times(unit.estimated)} {chip('estimated', '')}"
    return "–" if unit.speedup is None else times(unit.speedup)


def _change(change: Interval | None) -> str:
    return "–" if change is None else signed(change.value)


def _write_conversion(done: Conversion) -> str:
    rows = [[dotted(name), escape(what)] for name, what in done.converted.items()]
    rows += [[dotted(name), f"kept: {escape(why)}"] for name, why in done.kept.items()]
    units = "".join(f"<li>{escape(spell_unit(unit))}</li>" for unit in done.units)
    notes = "".join(notice(escape(note)) for note in done.notes if not note.startswith(_CHOSEN))
    if chosen := "".join(notice(escape(note)) for note in done.notes if note.startswith(_CHOSEN)):
        notes += f"<details><summary>Which kernels auto chose, and why not others</summary>{chosen}</details>"
    first = escape(str(done).splitlines()[0])
    return f"<h3>Conversion</h3><p>{first}</p>{notes}<ul>{units}</ul>" + table(
        ("linear", "runs in"), rows, why=1, caption="Precision of each linear"
    )
