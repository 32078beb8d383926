"""The top of a report: one sentence, and the four numbers that support it."""

from loka.records import Comparison, Plan
from loka.records.tuning import Tuning
from loka.report.markup import capitalise, escape, percent, signed, span_of
from loka.report.results import Results
from loka.report.tuning import say_tuning


def name_report(results: Results) -> str:
    """Return the title of the page."""
    if results.probe:
        return f"loka: {results.probe.model}"
    named = [
        record.model
        for group in (results.runs, results.quantized, results.plans, results.loads, results.tunings)
        for record in group
    ]
    return f"loka: {named[0] if named else 'report'}"


def count_converted(plan: Plan) -> int:
    """Return the number of sites of a plan that are in a chain, or of which any GEMM runs in low precision."""
    chained = plan.chained
    return sum(site.site in chained or bool(site.quantized) for site in plan.sites)


def write_headline(results: Results) -> str:
    """Return the headline, the paragraph below it and the tiles as HTML."""
    first = results.ordered_comparisons[0] if results.comparisons else None
    if results.tunings and (results.plan is None or results.probe is None):  # the plan is that of the tuning
        tiles = _tiles_tuned(results, first)
    else:
        tiles = [_tile_quality(results, first), _tile_share(results.plan), _tile_sites(results), _tile_speed(results)]
    return "\n".join(
        [
            '<div class="headline">',
            f'<p class="eyebrow">{_subject(results)}</p>',
            f"<h1>{escape(say_verdict(results, first))}</h1>",
            f'<p class="lead">{escape(_say_lead(results, first))}</p>',
            f'<ul class="tiles">{"".join(tile for tile in tiles if tile)}</ul></div>',
        ]
    )


def _subject(results: Results) -> str:
    parts = []
    if results.probe:
        parts.append(results.probe.model)
    if results.runs:
        parts.append(results.runs[0].data)
    for environment in list(results.environments.values())[:1]:
        parts += [environment.device, environment.date[:10]]
    return escape(" · ".join(parts))


def say_verdict(results: Results, first: Comparison | None) -> str:
    """Return the headline: one sentence that claims no more than was measured."""
    if results.tunings and first is None:
        tuning = results.tunings[0]
        text = say_tuning(tuning)
        return text if results.sizes else text.replace(f" ({tuning.speed_note})", "")  # which the tile of speed says
    if first is None:
        return _say_without_runs(results)
    share = percent(first.low_precision_flops_share, 0)
    if results.tunings and not first.low_precision_flops_share:
        return "Nothing was converted: no part of this model is both faster in FP8 and within the margin"
    if results.plan is not None and not count_converted(results.plan):
        best = _find_best(results)
        found = f"faster in FP8 on {best[1]}" if best else "accurate enough in FP8"
        return f"Nothing was converted: no GEMM of this model is {found}"
    if first.outcome == "equivalent":
        return f"{share} of the GEMM work in FP8, and the {first.metric} stays within {percent(first.margin)}"
    if first.outcome == "inconclusive":
        return f"{share} of the GEMM work in FP8: the effect on {first.metric} is too uncertain to call"
    change = percent(abs(first.relative_change.value), 2)
    return f"{share} of the GEMM work in FP8 makes the {first.metric} {change} {first.outcome}"


def _say_without_runs(results: Results) -> str:
    if results.probe is not None:
        verdicts = [v for site in results.probe.sites for v in site.verdicts]
        safe = sum(v.safety == "safe" for v in verdicts)
        return f"{safe} of {len(verdicts)} GEMMs are accurate enough in FP8"
    if results.quantized:
        done = results.quantized[0]
        return f"{done.model} in {percent(done.ratio, 0)} of its size"
    if results.tests:
        return f"{capitalise(results.tests[0].candidate)} against {results.tests[0].baseline}"
    if results.benches or results.rows:
        return "Kernels, measured"
    if results.loads:
        load = results.loads[0]
        return (
            f"{load.model}: {load.goodput:.3g} answers a second within {load.sla_ms:g} ms, of {load.rate:g} requested"
        )
    if results.experiments:
        return f"{capitalise(results.experiments[0].candidate)} against {results.experiments[0].baseline}, live"
    if results.plan is not None:
        return f"A plan: {count_converted(results.plan)} of {len(results.plan.sites)} sites in FP8"
    if results.conversions:
        return "Conversions"
    return "Distributions" if results.analyses else "Training runs"


def _say_lead(results: Results, first: Comparison | None) -> str:
    if first is None:
        if results.probe is not None:
            return "No training runs were compared: this report covers quantization error only."
        return ""
    change = first.relative_change
    text = (
        f"Against {first.baseline}, {first.candidate} changes the {first.metric} by {signed(change.value)} "
        f"(95 % interval {span_of(change)}) on {first.pairs:,} paired test examples; "
        f"changes below {percent(first.margin)} count as no change."
    )
    if not change.low and not change.high and not first.low_precision_flops_share:
        text = f"{capitalise(first.candidate)} is {first.baseline} itself, so there is nothing to compare."
    for other in (c for c in results.ordered_comparisons[1:] if c.low_precision_flops_share > 0):
        text += f" {capitalise(other.candidate)}: {signed(other.relative_change.value)}, {other.outcome}."
    return text


def _tile(name: str, value: str, note: str, *, small: bool = False) -> str:
    kind = "value small" if small else "value"
    return (
        f'<li><span class="name">{escape(name)}</span><span class="{kind}">{escape(value)}</span>'
        f'<span class="note">{escape(note)}</span></li>'
    )


def _tiles_tuned(results: Results, first: Comparison | None) -> list[str]:
    """Return the tiles of the first tuning: quality, speed and how much was converted."""
    tuning = results.tunings[0]
    converted = [unit for unit in tuning.units if unit.way != "high"]
    linears, taken = (sum(len(unit.linears) for unit in units) for units in (tuning.units, converted))
    quality = _tile_quality(results, first)
    if first is None and (change := tuning.metric_change) is not None:
        quality = _tile(f"Change of the {tuning.metric_name}", signed(change.value), f"swapped in; {span_of(change)}")
    return [
        quality,
        _tile_step(results, tuning),
        _tile("In FP8", percent(sum(unit.flops_share for unit in converted)), _say_share(results)),
        _tile("Linears converted", f"{taken} of {linears}", f"{linears - taken} kept in 16-bit precision"),
    ]


def _say_share(results: Results) -> str:
    """Say what the linears' share is a share of; with the model's own, which includes other products."""
    whole = next((c.low_precision_share for c in results.conversions if c.flops_of == "model"), None)
    if whole is None and results.comparisons:
        whole = results.ordered_comparisons[0].low_precision_flops_share
    return "of the linears' FLOPs" + ("" if whole is None else f"; {percent(whole)} of the model's GEMM FLOPs")


def _tile_step(results: Results, tuning: Tuning) -> str:
    """Return the tile with the measured speed-up, an estimate for another device, or why there is neither."""
    if tuning.speedup is not None:
        low, high = (f"{end:.2f}" for end in (tuning.speedup.low, tuning.speedup.high))
        return _tile("Whole step", f"{tuning.speedup.value:.2f}×", f"over the compiled 16-bit model; {low} to {high}")
    if results.sizes:
        found = results.sizes[0]
        note = f"over bf16, the linears of the {found.large.size} model; not measured"
        return _tile(f"Estimated for {found.target}", f"{found.large.linears.value:.2f}×", note)
    return _tile("Speed", "not measured", tuning.speed_note or "nothing was timed", small=True)


def _tile_quality(results: Results, first: Comparison | None) -> str:
    if first is None:
        return _tile("Quality", "not measured", "no runs were compared", small=True) if results.probe else ""
    note = f"{first.outcome}; {span_of(first.relative_change)}"
    return _tile(f"Change of {first.metric}", signed(first.relative_change.value), note)


def _tile_share(plan: Plan | None) -> str:
    if plan is None:
        return ""
    of = "of all GEMM FLOPs of a training step" if plan.flops_of == "model" else "of the probed GEMM FLOPs"
    return _tile("In FP8", percent(plan.low_precision_share), of)


def _tile_sites(results: Results) -> str:
    if results.plan is None:
        return ""
    converted, total = count_converted(results.plan), len(results.plan.sites)
    return _tile("Linears converted", f"{converted} of {total}", f"{total - converted} kept in high precision")


def _tile_speed(results: Results) -> str:
    if results.plan is None and results.probe is None:
        return ""
    plan = results.plan
    measured = [c.expected_speedup for site in (plan.sites if plan else []) for c in site.choices if c.expected_speedup]
    if plan and measured:
        where = f"on {plan.target}, " if plan.target else ""
        span = f"{min(measured):.2f}–{max(measured):.2f}×"
        return _tile("Speed-up of chosen GEMMs", span, f"over bf16, {where}each GEMM alone")
    there = results.target_plan
    if there is not None:
        share = f"{count_converted(there)} of {len(there.sites)}"
        note = "linears, by measurements on that device; FP8 is emulated here"
        return _tile(f"Faster on {there.target}", share, note)
    best = _find_best(results)
    if best is not None:
        return _tile("Fastest FP8 candidate", f"{best[0]:.2f}×", f"over bf16, each GEMM alone, on {best[1]}")
    return _tile("Speed", "not measured", "FP8 kernels are emulated on this machine", small=True)


def _find_best(results: Results) -> tuple[float, str] | None:
    """Return the largest speed-up of any candidate and the device, or None if no candidate was timed."""
    if results.probe is None:
        return None
    found = [c.speedup.value for site in results.probe.sites for c in site.candidates if c.speedup is not None]
    return (max(found), results.probe.environment.device) if found else None
