"""The words and tables of a report. Each function turns the records it needs into HTML, or into nothing where they are absent."""

from html import escape

from loka.records import Choice, Comparison, Environment, Plan, SitePlan
from loka.report.results import Results

__all__ = [
    "escape",
    "name_report",
    "write_environment",
    "write_headline",
    "write_plan",
    "write_quality",
    "write_sites",
]

NARROW = "\u202f"  # no-break space that keeps a unit with its number
_GOOD = {"equivalent": "good", "better": "good", "worse": "bad", "inconclusive": ""}


def name_report(results: Results) -> str:
    """Title of the page."""
    subject = results.probe.model if results.probe else (results.runs[0].model if results.runs else "report")
    return f"loka: {subject}"


def percent(value: float, digits: int = 1) -> str:
    """A share as text."""
    return f"{100 * value:.{digits}f}{NARROW}%"


def signed(value: float) -> str:
    """A relative change as text, with as many digits as a small change needs."""
    return f"{100 * value:+.3f}{NARROW}%".replace("-", "−")


def _chip(word: str, kind: str) -> str:
    return f'<span class="chip {kind}">{escape(word)}</span>'


def write_headline(results: Results) -> str:
    """One sentence, and the four numbers behind it."""
    first = results.ordered_comparisons[0] if results.comparisons else None
    lines = ['<div class="headline">', f'<p class="eyebrow">{_subject(results)}</p>']
    lines.append(f"<h1>{escape(_say_verdict(results, first))}</h1>")
    lines.append(f'<p class="lead">{escape(_say_lead(results, first))}</p>')
    tiles = [_tile_quality(first), _tile_share(results.plan), _tile_sites(results), _tile_speed(results)]
    lines.append(f'<ul class="tiles">{"".join(tile for tile in tiles if tile)}</ul></div>')
    return "\n".join(lines)


def _subject(results: Results) -> str:
    parts = []
    if results.probe:
        parts.append(results.probe.model)
    if results.runs:
        parts.append(results.runs[0].data)
    environment = _environment(results)
    if environment:
        parts += [environment.device, environment.date[:10]]
    return escape(" · ".join(parts))


def _say_verdict(results: Results, first: Comparison | None) -> str:
    if first is None:
        if results.probe is None:
            return "Training runs"
        verdicts = [v for site in results.probe.sites for v in site.verdicts]
        safe = sum(v.safety == "safe" for v in verdicts)
        return f"{safe} of {len(verdicts)} GEMMs are accurate enough in FP8"
    share = percent(first.low_precision_flops_share, 0)
    if first.outcome == "equivalent":
        return f"{share} of the GEMM work in FP8, and the {first.metric} stays within {percent(first.margin)}"
    if first.outcome == "inconclusive":
        return f"{share} of the GEMM work in FP8: the effect on {first.metric} is too uncertain to call"
    change = percent(abs(first.relative_change.value), 2)
    return f"{share} of the GEMM work in FP8 makes the {first.metric} {change} {first.outcome}"


def _say_lead(results: Results, first: Comparison | None) -> str:
    if first is None:
        return "No training runs were compared: this is about error only." if results.probe else ""
    change = first.relative_change
    text = (
        f"Against {first.baseline}, {first.candidate} changes the {first.metric} by {signed(change.value)} "
        f"(95 % interval {signed(change.low)} to {signed(change.high)}) on {first.pairs:,} paired test examples; "
        f"changes under {percent(first.margin)} are taken not to matter."
    )
    for other in (c for c in results.ordered_comparisons[1:] if c.low_precision_flops_share > 0):
        text += f" {_capitalise(other.candidate)}: {signed(other.relative_change.value)}, {other.outcome}."
    return text


def _tile(name: str, value: str, note: str, *, small: bool = False) -> str:
    kind = "value small" if small else "value"
    return (
        f'<li><span class="name">{escape(name)}</span><span class="{kind}">{escape(value)}</span>'
        f'<span class="note">{escape(note)}</span></li>'
    )


def _tile_quality(first: Comparison | None) -> str:
    if first is None:
        return _tile("Quality", "not measured", "no runs were compared", small=True)
    change = first.relative_change
    note = f"{first.outcome}; {signed(change.low)} to {signed(change.high)}"
    return _tile(f"Change of {first.metric}", signed(change.value), note)


def _tile_share(plan: Plan | None) -> str:
    if plan is None:
        return ""
    of = "of all GEMM FLOPs of a training step" if plan.flops_of == "model" else "of the probed GEMM FLOPs"
    return _tile("In FP8", percent(plan.low_precision_share), of)


def _tile_sites(results: Results) -> str:
    if results.plan is None:
        return ""
    converted = sum(_is_converted(site) for site in results.plan.sites)
    kept = len(results.plan.sites) - converted
    return _tile("Linears converted", f"{converted} of {len(results.plan.sites)}", f"{kept} kept in high precision")


def _tile_speed(results: Results) -> str:
    speedups = [c.expected_speedup for plan in results.plans[:1] for site in plan.sites for c in site.choices]
    measured = [s for s in speedups if s is not None]
    if not measured:
        return _tile("Speed", "not measured", "FP8 kernels are emulated on this machine", small=True)
    return _tile("Speed-up of chosen GEMMs", f"{min(measured):.2f}–{max(measured):.2f}×", "over bf16, each GEMM alone")


def write_quality(results: Results) -> str:
    """Comparison with intervals, and the loss curves."""
    if not results.runs and not results.comparisons:
        return ""
    text = []
    if results.comparisons:
        first = results.ordered_comparisons[0]
        text.append(
            f'<p class="about">All runs continue the same checkpoint on the same batches.{_say_swapped(results)} The shaded band '
            f"is the margin of ±{percent(first.margin)}: an interval inside it is equivalent; one that leaves it and contains "
            f"zero is inconclusive. Smallest change this test would find (80 % power): "
            f"{percent(first.minimum_detectable, 3)}.{_say_noise(results)}</p>"
        )
        text.append(_chart("comparisons", "Change of the log loss by run, with 95 % intervals and the margin"))
        text.append(_table_comparisons(results))
    if results.runs:
        text.append('<div class="pair">')
        text.append(f"<div><h3>Training loss</h3>{_chart('curves', 'Training loss by step')}</div>")
        if len(results.runs) > 1:
            text.append(f"<div><h3>Difference</h3>{_chart('gaps', 'Training loss relative to the first run')}</div>")
        text.append("</div>")
    return "\n".join(text)


def _say_swapped(results: Results) -> str:
    """What a comparison without a run of its own is."""
    if {c.candidate for c in results.comparisons} <= {run.name for run in results.runs}:
        return ""
    return (
        ' "Swapped in" is the baseline\'s own final weights, converted and not trained on: no noise of training there.'
    )


def _say_noise(results: Results) -> str:
    """What a control in high precision, where there is one, says about every other difference."""
    return "".join(
        f" The {escape(c.candidate)} is high precision too, from slightly nudged weights: its "
        f"{signed(c.relative_change.value)} is the noise of training, which the intervals (over test examples) do not contain."
        for c in results.ordered_comparisons
        if c.low_precision_flops_share == 0
    )


def _chart(name: str, label: str) -> str:
    return f'<figure><div class="chart" id="chart-{name}" role="img" aria-label="{escape(label)}"></div></figure>'


def _table_comparisons(results: Results) -> str:
    head = ("run", "verdict", "change", "95 % interval", "log loss", "AUC", "in FP8", "pairs", "clusters")
    runs = {run.name: run for run in results.runs}
    rows = []
    baseline = runs.get(results.ordered_comparisons[0].baseline)
    if baseline is not None:
        cells = [escape(baseline.name), "baseline", "", "", *_metrics(baseline.metrics), percent(0, 0), "", ""]
        rows.append(_row(cells, numeric=range(2, 9)))
    for c in results.ordered_comparisons:
        run = runs.get(c.candidate)
        change = c.relative_change
        cells = [
            escape(c.candidate),
            _chip(c.outcome, _GOOD[c.outcome]),
            signed(change.value),
            f"{signed(change.low)} to {signed(change.high)}",
            *_metrics(run.metrics if run else {}),
            percent(c.low_precision_flops_share),
            f"{c.pairs:,}",
            f"{c.clusters:,}",
        ]
        rows.append(_row(cells, numeric=range(2, 9)))
    return _table(head, rows, numeric=range(2, 9))


def _metrics(metrics: dict[str, float]) -> list[str]:
    return [f"{metrics[name]:.5f}" if name in metrics else "–" for name in ("log_loss", "auc")]


def _row(cells: list[str], *, numeric: range) -> str:
    body = "".join(f'<td class="n">{c}</td>' if i in numeric else f"<td>{c}</td>" for i, c in enumerate(cells))
    return f"<tr>{body}</tr>"


def _table(head: tuple[str, ...], rows: list[str], *, numeric: range = range(0), name: str = "") -> str:
    cells = "".join(
        f'<th scope="col" class="n">{escape(h)}</th>' if i in numeric else f'<th scope="col">{escape(h)}</th>'
        for i, h in enumerate(head)
    )
    mark = f' id="{name}"' if name else ""
    return (
        f'<div class="scroll"><table{mark}><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def write_sites(results: Results) -> str:
    """The map of sites and the place for one site's page."""
    probe = results.probe
    if probe is None:
        return ""
    timed = any(c.speedup for site in probe.sites for c in site.candidates)
    speed = "" if timed else " Speed was not measured on this machine, so the vertical axis is the place in the model."
    tabs = "".join(
        f'<input type="radio" name="gemm" id="gemm-{gemm}" value="{gemm}"{" checked" if gemm == "fprop" else ""}>'
        f'<label class="tab" for="gemm-{gemm}">{label}</label>'
        for gemm, label in (
            ("fprop", "Forward"),
            ("dgrad", "Input gradient"),
            ("wgrad", "Weight gradient"),
        )
    )
    return (
        f'<p class="about">Error of each linear\'s product when its operands are quantised, measured on real rows kept from '
        f"{probe.sampled_steps} sampled steps of {probe.steps:,}; lines are 95 % intervals, the dashed line is the limit "
        f"(MERE {probe.max_mere:g} forward, relative L2 {probe.max_gradient_error:g} in gradients).{speed} "
        f"Choose a point, or a site in the plan below, for its page.</p>"
        f'<div class="controls"><fieldset aria-label="GEMM">{tabs}</fieldset></div>'
        f"{_chart('sites', 'Error of every linear under every recipe, with the limit')}"
        f"{_write_sensitivity(results)}"
        f'<div id="site-page" hidden aria-live="polite"></div>'
    )


def _write_sensitivity(results: Results) -> str:
    probe = results.probe
    if probe is None or probe.sensitivity is None:
        return ""
    return (
        f'<h3>What each site does to the model</h3><p class="about">{escape(_capitalise(probe.sensitivity))}: the weights are '
        f"the same, so none of this is noise of training.</p>"
        f"{_chart('sensitivity', 'Change of the loss when each site alone runs in low precision')}"
    )


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def write_plan(results: Results) -> str:
    """The plan as a table one can search."""
    plan = results.plan
    if plan is None:
        return ""
    goal = "accuracy only, no speed considered" if plan.min_speedup is None else f"a speed-up over {plan.min_speedup:g}"
    notes = "".join(f'<p class="notice">{escape(note)}</p>' for note in plan.notes if plan.min_speedup is not None)
    controls = (
        '<div class="controls"><input type="search" id="plan-search" placeholder="Search sites, recipes, reasons" '
        'aria-label="Search the plan"><select id="plan-kind" aria-label="Which sites"><option value="all">all sites</option>'
        '<option value="converted">converted</option><option value="kept">kept</option></select>'
        '<span class="count" id="plan-count" role="status"></span></div>'
    )
    head = ("site", "K × N", "FLOPs", "forward", "input gradient", "weight gradient", "why not FP8")
    rows = [_plan_row(site) for site in plan.sites]
    return (
        f'<p class="about">Made for {escape(goal)}: error limits {plan.max_error:g} (MERE, forward) and '
        f"{plan.max_gradient_error:g} (relative L2, gradients), each against the worse end of the interval.</p>"
        f"{notes}{controls}{_table(head, rows, numeric=range(1, 3), name='plan-table')}"
    )


def _is_converted(site: SitePlan) -> bool:
    return any(choice.quantized for choice in site.choices)


def _plan_row(site: SitePlan) -> str:
    chosen = {choice.gemm: choice for choice in site.choices}
    kind = "converted" if _is_converted(site) else "kept"
    kept = [choice for choice in site.choices if not choice.quantized]
    why = "<br>".join(escape(reason) for reason in dict.fromkeys(choice.reason for choice in kept))
    name = escape(site.site, quote=True)
    cells = [
        f'<button type="button" class="link mono" data-site="{name}">{name}</button>',
        f"{site.k} × {site.n}",
        percent(site.flops_share),
        *(_spell(chosen.get(gemm)) for gemm in ("fprop", "dgrad", "wgrad")),
        why if site.choices else "no GEMM was seen",
    ]
    words = [site.site, kind, *(text for c in site.choices for text in (c.a or "high", c.b or "", c.backend, c.reason))]
    text = escape(" ".join(words).lower(), quote=True)
    body = "".join(f"<td{_PLAN_CLASSES[i]}>{cell}</td>" for i, cell in enumerate(cells))
    return f'<tr data-kind="{kind}" data-text="{text}">{body}</tr>'


_PLAN_CLASSES = ("", ' class="n"', ' class="n"', "", "", "", ' class="why"')


def _spell(choice: Choice | None) -> str:
    """What one GEMM runs, and how far off it is expected to be."""
    if choice is None:
        return "–"
    if choice.a is None or choice.b is None:
        return "high"
    operands = [choice.a] if choice.a == choice.b else [choice.a, choice.b]
    error = "" if choice.expected_error is None else f'<span class="facts">error {choice.expected_error:.3g}</span>'
    return f'<span class="mono">{"<br>".join(escape(o) for o in operands)}</span><br>{error}'


def _environment(results: Results) -> Environment | None:
    for record in (*results.runs, results.probe, *results.plans):
        if record is not None:
            return record.environment
    return None


def write_environment(results: Results) -> str:
    """Where the numbers come from."""
    found = _environment(results)
    if found is None:
        return ""
    facts = {
        "command": f"<code>{escape(found.command)}</code>",
        "date": escape(found.date),
        "loka": escape(f"{found.loka}, commit {found.commit or 'unknown'}"),
        "Python, torch": escape(
            f"{found.python}, {found.torch}" + (f", triton {found.triton}" if found.triton else "")
        ),
        "device": escape(found.device + (f", driver {found.driver}" if found.driver else "")),
        "processor": escape(f"{found.cpu}, {found.threads} threads"),
    }
    seeds = sorted({run.seed for run in results.runs})
    if seeds:
        facts["seed"] = ", ".join(str(seed) for seed in seeds)
        facts["steps"] = escape(", ".join(f"{run.name} {run.steps:,}" for run in results.ordered_runs))
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
    return f'<p class="about">Run the command again for the same numbers.</p><dl class="env">{rows}</dl>'
