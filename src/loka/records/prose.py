"""Plans as readable text: summaries, the differences between two plans, and why a site runs what it runs; errors."""

import difflib
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loka.records.plan import Choice, Plan, SitePlan
    from loka.records.unit import CollectivePlan, LinkPlan, TablePlan, UnitEvidence, UnitPlan

_SETTINGS = (
    "model", "recipe", "target", "weights", "max_error", "max_gradient_error", "min_speedup", "max_metric_change",
    "margin", "mods",
)  # fmt: skip


def spell_error(error: BaseException) -> str:
    """Describe an exception in one line of at most 300 characters of its message, for reasons in records."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def name_some(names: Sequence[str], most: int = 5) -> str:
    """List the first names and count the others: `a, b and 3 more`."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")


def nearest(name: str, known: Sequence[str], most: int = 5) -> str:
    """List the known names for an error message: the nearest ones if any is similar, otherwise the first ones."""
    similar = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
    return f"did you mean {' or '.join(similar)}?" if similar else f"its sites are {name_some(known, most)}"


def fold(text: str, first: str = "      ", rest: str = "      ", width: int = 118) -> list[str]:
    """Break a sentence into lines that fit a terminal; `first` and `rest` begin them."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def spell(choice: "Choice") -> str:
    """Describe one GEMM's choice: `e4m3:row @ e4m3:row on reference`."""
    if not choice.quantized:
        return "high precision"
    fast = ", fast accumulation" if choice.fast_accum else ""
    return f"{choice.a} @ {choice.b} on {choice.backend}{fast}"


def describe(plan: "Plan") -> str:
    """Summarize a plan: a line per unit, other site, table and collective, then the share in FP8, mods and notes."""
    lines = [f"unit {unit.name}  {spell_unit(unit)}" for unit in plan.units]
    alone = [site for site in plan.sites if plan.unit_of(site.site) is None]
    lines += [f"{site.site}  {_spell_site(site, plan) or 'no GEMM was seen'}" for site in alone]
    lines += [f"{part.name}  {spell_part(part)}" for part in plan.parts]
    of = "the model's" if plan.flops_of == "model" else "the probed"
    lines.append(f"{plan.low_precision_share:.1%} of {of} GEMM FLOPs in low precision")
    lines += [f"mods: {', '.join(plan.mods)}"] if plan.mods else []
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def diff(before: "Plan", after: "Plan") -> str:
    """Describe what changes from one plan to another, one line per difference; empty if both run the same."""
    lines = [
        f"{name}: {old!r} -> {new!r}"
        for name in _SETTINGS
        if (old := getattr(before, name)) != (new := getattr(after, name))
    ]
    old_sites, new_sites = ({site.site: site for site in plan.sites} for plan in (before, after))
    for name in sorted(old_sites.keys() | new_sites.keys()):
        if name not in new_sites:
            lines.append(f"- {name}: gone")
        elif name not in old_sites:
            lines.append(f"+ {name}: new, {_spell_site(new_sites[name], after)}")
        else:
            lines += _diff_site(old_sites[name], new_sites[name], before, after)
    return "\n".join([*lines, *_diff_units(before, after)])


def _diff_units(before: "Plan", after: "Plan") -> list[str]:
    old, new = (
        {**{unit.name: spell_unit(unit) for unit in plan.units}, **{part.name: spell_part(part) for part in plan.parts}}
        for plan in (before, after)
    )
    return [f"~ unit {name}: {was} => {now}" for name, was, now in _find_changes(old, new)]


def _find_changes(old: dict[str, str], new: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return (name, before, after) of what differs; what is on one side only is absent on the other."""
    names = dict.fromkeys([*old, *new])
    pairs = ((name, old.get(name, "absent"), new.get(name, "absent")) for name in names)
    return [(name, was, now) for name, was, now in pairs if was != now]


def spell_unit(unit: "UnitPlan") -> str:
    """Describe a unit in one line: `chain top.0 relu -> top.2, delayed scales, delayed gradients`."""
    links = " -> ".join(_spell_link(link) for link in unit.links)
    kernels = "".join(
        f", up to {b.rows} rows: {' '.join(f'{op}={name}' for op, name in b.kernels.items())}" for b in unit.kernels
    )
    around = "" if unit.around is None else f", interactions of {unit.around} fused around it"
    return f"{unit.kind} {links}, {unit.scales} scales, {unit.gradient} gradients{around}{kernels}"


def spell_part(part: "TablePlan | CollectivePlan") -> str:
    """Describe a table or collective in one line: `table of 1000 x 64 in int8:row, 0.27 of float32's bytes`."""
    share = f"{part.bytes / max(part.float32_bytes, 1):.2f} of float32's bytes"
    if part.kind == "table":
        return f"table of {part.count} x {part.width} in {part.rows}, {share}"
    return f"collective of {part.elements} elements in {part.codec}, {share}"


def _spell_link(link: "LinkPlan") -> str:
    norm = "" if link.norm == "none" else f" {link.norm} norm"
    dropout = "" if link.dropout is None else f" dropout {link.dropout:g}"
    return f"{link.linear}{norm}{'' if link.activation == 'none' else f' {link.activation}'}{dropout}"


def _spell_site(site: "SitePlan", plan: "Plan") -> str:
    if (unit := plan.unit_of(site.site)) is not None:
        return f"in the unit {unit.name}"
    return ", ".join(f"{choice.gemm} {spell(choice)}" for choice in site.choices)


def _diff_site(before: "SitePlan", after: "SitePlan", old_plan: "Plan", new_plan: "Plan") -> list[str]:
    lines = []
    shapes = [(site.m, site.k, site.n) for site in (before, after)]
    if shapes[0] != shapes[1]:
        lines.append(f"~ {before.site}: M x K x N {shapes[0]} -> {shapes[1]}")
    if old_plan.unit_of(before.site) or new_plan.unit_of(after.site):  # a unit decides for its linears
        was, now = _spell_site(before, old_plan), _spell_site(after, new_plan)
        return lines if was == now else [*lines, f"~ {before.site}: {was} -> {now}"]
    old, new = ({str(c.gemm): spell(c) for c in site.choices} for site in (before, after))
    return [*lines, *(f"~ {before.site} {gemm}: {was} -> {now}" for gemm, was, now in _find_changes(old, new))]


def explain(plan: "Plan", site: str) -> str:
    """Explain why a site, table, collective or unit runs what it runs."""
    planned = next((s for s in plan.sites if s.site == site), None)
    unit = plan.unit_of(site) or next((u for u in plan.units if u.name == site), None)
    if planned is None:
        part = next((p for p in plan.parts if p.name == site), None)
        if part is not None:
            return "\n".join([f"{site}: {spell_part(part)}", *_explain_reasons(part)])
        if unit is not None:
            return "\n".join([*_explain_unit(unit), *(f"  note: {note}" for note in plan.notes)])
        parts = [part.name for part in plan.parts]
        linears = [*(s.site for s in plan.sites), *(n for u in plan.units for n in u.linears)]
        raise ValueError(f"the plan has no site {site!r}; {nearest(site, list(dict.fromkeys([*linears, *parts])))}")
    shape = f"M {planned.m}, K {planned.k}, N {planned.n}"
    of = "the model's" if plan.flops_of == "model" else "the probed sites'"
    lines = [f"{site}: {shape}, {planned.flops_share:.1%} of {of} GEMM FLOPs"]
    if not planned.choices and unit is None:
        lines.append("  no sampled step of the probe called it: it stays in high precision")
    for choice in planned.choices if unit is None else ():  # the unit decides for its linears
        lines.append(f"  {choice.gemm}: {spell(choice)}")
        lines.append(f"    because {choice.reason}")
        lines += _explain_numbers(choice)
        if choice.quantized:
            lines += [f"    refused {refusal}" for refusal in choice.refusals]
    if unit is not None:
        lines += _explain_unit(unit)
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join(lines)


def _explain_numbers(choice: "Choice") -> list[str]:
    """Describe a choice's expected error and speed, and where the speed comes from."""
    if not choice.quantized:
        return []
    error = "not measured" if choice.expected_error is None else f"{choice.expected_error:.3g}"
    if choice.expected_speedup is None:
        return [f"    expected error {error}; speed not measured"]
    time = f", {choice.expected_microseconds:.1f} us" if choice.expected_microseconds is not None else ""
    return [
        f"    expected error {error}; {choice.expected_speedup:.2f}x over bf16{time}: {choice.speed_source or 'source unknown'}"
    ]


def _explain_unit(unit: "UnitPlan") -> list[str]:
    """Describe what a unit runs, why, its measurements, and the refused alternatives."""
    return [f"  in the unit {unit.name}: {spell_unit(unit)}", *_explain_reasons(unit)]


def _explain_reasons(part: "UnitPlan | TablePlan | CollectivePlan") -> list[str]:
    because = f"    because {part.reason or 'it was asked for, without evidence'}"
    return [because, *_explain_evidence(part.evidence), *(f"    refused {refusal}" for refusal in part.refusals)]


def _explain_evidence(known: "UnitEvidence | None") -> list[str]:
    if known is None:
        return []
    lines = [] if known.error is None else [f"    relative error {known.error:.3%}"]
    for name, interval, how in (
        ("speed-up over the compiled 16-bit unit", known.speedup, "{:.2f}x"),
        ("time", known.microseconds, "{:.1f} us"),
        ("predicted change of the loss", known.harm, "{:+.4%}"),
        ("measured change of the metric, this unit alone", known.metric_change, "{:+.4%}"),
    ):
        if interval is not None:
            low, value, high = (how.format(v) for v in (interval.low, interval.value, interval.high))
            lines.append(f"    {name}: {value} [{low}, {high}]")
    return lines
