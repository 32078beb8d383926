"""Sites: the map of errors, the sensitivity of the model to each site, drift during training, the plan, memory."""

from loka.records import Choice, DriftReport, Plan, ProbeReport, SitePlan
from loka.report.findings import write_findings
from loka.report.headline import count_converted
from loka.report.markup import about, capitalise, chart, chip, count, escape, mono, notice, percent, table
from loka.report.results import Results

STATIC_ROWS = 300  # rows of the plan in plain HTML, for readers without JavaScript
_TABS = (("fprop", "Forward"), ("dgrad", "Input gradient"), ("wgrad", "Weight gradient"))


def write_sites(results: Results) -> str:
    """Return the map of sites, and a placeholder for the page of one site."""
    probe = results.probe
    if probe is None:
        return ""
    tabs = "".join(
        f'<input type="radio" name="gemm" id="gemm-{gemm}" value="{gemm}"{" checked" if gemm == "fprop" else ""}>'
        f'<label class="tab" for="gemm-{gemm}">{label}</label>'
        for gemm, label in _TABS
    )
    return (
        about(
            f"Error of each linear's product when its operands are quantized, judged on {_say_sources(probe)} kept from "
            f"{probe.sampled_steps} sampled steps of {probe.steps:,}. Lines are 95 % intervals, the dashed line is the limit "
            f"(MERE {probe.max_mere:g} forward, relative L2 {probe.max_gradient_error:g} in gradients). A product below the limit is still unsafe if it changes the loss too much; the table says why. {_say_speed(probe)} "
            "Click a point, or a site in the table below, to open its page."
        )
        + _write_counts(probe)
        + f'<div class="controls"><fieldset aria-label="GEMM">{tabs}</fieldset></div>'
        + chart("sites", "Error of every linear with every recipe, and the limit; the table below has the same sites")
        + '<p class="facts" id="sites-note" role="status"></p>'
        + _write_sensitivity(results)
        + write_findings(probe)
        + _GLOSSARY
        + '<div id="site-page" hidden aria-live="polite"></div>'
    )


_GLOSSARY = (
    "<details><summary>Words on this page</summary><dl class=env>"
    "<dt>MERE</dt><dd>Mean element-wise relative error of a product: |result - exact| / |exact|, averaged over its elements. Forward products are judged by it.</dd>"
    "<dt>relative L2</dt><dd>L2 norm of the error divided by the L2 norm of the exact result. Gradients are judged by it.</dd>"
    "<dt>real rows</dt><dd>Rows of activations and gradients that Probe kept while the model trained.</dd>"
    "<dt>copula</dt><dd>Synthetic rows with the column distributions of the real rows and the same dependence between columns: what other batches could look like.</dd>"
    "<dt>Gaussian, N(0, 1)</dt><dd>Rows drawn from a Gaussian with the real rows' mean and covariance; independent standard normal numbers, which say nothing about the model.</dd>"
    "<dt>origin</dt><dd>Which of these rows an error was measured on; a site is judged by the worst.</dd>"
    "<dt>SQNR</dt><dd>Signal-to-quantization-noise ratio of the product, in decibels; 6 dB are one bit.</dd>"
    "<dt>underflow</dt><dd>Share of the operands' non-zero values that quantization turns into zero.</dd>"
    "<dt>fprop, dgrad, wgrad</dt><dd>The three products of a linear: its output, the gradient of its input, the gradient of its weight.</dd>"
    "</dl></details>"
)


_SOURCES = {"rows": "real rows", "copula": "a copula", "gaussian": "a Gaussian", "normal": "N(0, 1)"}


def _say_sources(probe: ProbeReport) -> str:
    learned = [_SOURCES[source] for source in probe.judged_on if source not in ("rows", "normal")]
    rows = "real rows" if "rows" in probe.judged_on or not probe.judged_on else ""
    if not learned:
        return rows or "N(0, 1)"
    fitted = f"{' and '.join(learned)} fitted to the rows"
    return f"the worst of {rows} and {fitted}," if rows else f"{fitted},"


def _say_speed(probe: ProbeReport) -> str:
    if any(c.speedup for site in probe.sites for c in site.candidates):
        return f"Speed-ups over bf16 were measured on {escape(probe.environment.device)}."
    return "Speed was not measured on this machine, so the vertical axis is the position in the model."


def _write_counts(probe: ProbeReport) -> str:
    """Return the counts of safe and unsafe by fast and slow GEMMs: the map as a table."""
    verdicts = [v for site in probe.sites for v in site.verdicts]
    speeds = [s for s in ("fast", "slow", "not measured") if any(v.speed == s for v in verdicts)]
    rows = [
        [
            chip(safety, {"safe": "good", "unsafe": "bad"}.get(safety, "")),
            *(f"{sum(v.safety == safety and v.speed == s for v in verdicts):,}" for s in speeds),
        ]
        for safety in ("safe", "unsafe", "not measured")
        if any(v.safety == safety for v in verdicts)
    ]
    head = ("GEMMs", *(f"speed {s}" if s == "not measured" else s for s in speeds))
    return f'<div class="narrow">{table(head, rows, numeric=range(1, 4), caption="GEMMs by verdict")}</div>'


def _write_sensitivity(results: Results) -> str:
    probe = results.probe
    if probe is None or probe.sensitivity is None:
        return ""
    together = ""
    if probe.combined_change is not None:
        c = probe.combined_change
        together = (
            f" All {len(probe.combined_sites)} safe sites together: {100 * c.value:+.3f} % "
            f"[{100 * c.low:+.3f}, {100 * c.high:+.3f}]."
        )
    return (
        "<h3>Effect of each site on the loss</h3>"
        + about(
            f"{escape(capitalise(probe.sensitivity))}: the weights are the same, so this contains no training noise.{together}"
        )
        + chart("sensitivity", "Change of the loss when each site alone runs in low precision")
    )


def write_drift(results: Results) -> str:
    """Return what moved while the model trained."""
    drift = results.drift
    if drift is None:
        return ""
    head = (
        f"Windows of {drift.window_steps:,} steps compared over {drift.steps:,} steps at {count(drift.sites, 'site')}: "
        f"{count(len(drift.moves), 'move')}. Values are log2, so 1 is a doubling."
    )
    if drift.too_short:
        head += f" {len(drift.too_short)} sites do not have two complete windows yet and were not compared."
    text = about(head) + _write_changes(drift)
    if not drift.moves:
        return text
    rows = [
        [
            f'<button type="button" class="link mono" data-site="{escape(m.site)}">{escape(m.site)}</button>',
            escape(m.role),
            escape(m.feature),
            f"{m.since:,} → {m.step:,}",
            f"{m.before:.3g} → {m.after:.3g}",
            "too few samples" if m.sigmas is None else f"{m.sigmas:.1f}",
        ]
        for m in sorted(drift.moves, key=lambda m: -(m.sigmas or 0))[:30]
    ]
    most = "" if len(drift.moves) <= 30 else "The 30 clearest moves"
    return (
        text
        + chart("drift", "Moves of the operands' statistics by training step")
        + table(("site", "of", "what", "steps", "from, to", "sigmas"), rows, numeric=(3, 4, 5), caption=most or "Moves")
    )


def _write_changes(drift: DriftReport) -> str:
    if not drift.judged:
        return about("Whether a verdict would change was not checked.")
    if not drift.changes:
        return about("No verdict would change.")
    lines = "; ".join(f"{c.site}: {c.before} → {c.after}" for c in drift.changes)
    return notice(f"A verdict would change at {count(len(drift.changes), 'site')}: {escape(lines)}")


def write_plan(results: Results) -> str:
    """Return the plan as a searchable table, or the verdicts if there is no plan."""
    plan = results.plan
    if plan is None and results.probe is None:
        return ""
    text = "" if plan is None else _say_plan(plan) + _say_target(results)
    controls = (
        '<div class="controls"><input type="search" id="plan-search" placeholder="Search sites, recipes, reasons" '
        'aria-label="Search the table"><select id="plan-kind" aria-label="Which sites"><option value="all">all sites</option>'
        '<option value="converted">converted</option><option value="kept">kept</option><option value="unsafe">with an unsafe GEMM</option></select>'
        '<select id="plan-order" aria-label="Order"><option value="model">in model order</option><option value="flops">by FLOPs</option>'
        '<option value="error">by error</option></select><span class="count" id="plan-count" role="status"></span></div>'
    )
    pager = (
        '<div class="pager" id="plan-pager" hidden><button type="button" class="step" id="plan-back">previous</button>'
        '<span id="plan-page" role="status"></span><button type="button" class="step" id="plan-next">next</button></div>'
    )
    head = ("site", "K × N", "FLOPs", *(label.lower() for _, label in _TABS), "why")
    return (
        text
        + controls
        + table(head, [], numeric=(1, 2), name="plan-table", caption="Sites")
        + pager
        + _write_static_plan(results)
    )


def _write_static_plan(results: Results) -> str:
    """Return the plan's rows for readers without JavaScript."""
    plan = results.plan
    if plan is None:
        return ""
    more, chained = len(plan.sites) - STATIC_ROWS, plan.chained
    rest = f"<p>{more} more: run <code>loka explain</code>.</p>" if more > 0 else ""
    head = ("site", "K × N", "FLOPs", *(label.lower() for _, label in _TABS), "why not FP8")
    return f"<noscript>{table(head, [_plan_row(site, site.site in chained) for site in plan.sites[:STATIC_ROWS]])}{rest}</noscript>"


def _say_plan(plan: Plan) -> str:
    goal = "accuracy only, no speed considered" if plan.min_speedup is None else f"a speed-up over {plan.min_speedup:g}"
    where = f" on {plan.target}" if plan.target else ""
    budget = (
        ""
        if plan.max_metric_change is None
        else (
            f" Budget of the end metric: {percent(plan.max_metric_change, 2)}, expected at most "
            f"{percent(plan.expected_metric_change or 0, 3)}."
        )
    )
    notes = "".join(notice(escape(capitalise(note))) for note in plan.notes if plan.min_speedup is not None)
    limits = (
        "no limits on the errors of single products, which were judged by the loss or not at all."
        if min(plan.max_error, plan.max_gradient_error) >= 1
        else f"error limits {plan.max_error:g} (MERE, forward) and {plan.max_gradient_error:g} (relative L2, gradients), "
        "each against the worse end of the interval."
    )
    return about(f"Made for {escape(goal + where)}: {limits}{budget}") + notes


def _say_target(results: Results) -> str:
    """Return the plan for another machine, if there is one."""
    there = results.target_plan
    if there is None:
        return ""
    rows = [[mono(s.site), *(_spell_target(s, gemm) for gemm, _ in _TABS)] for s in there.sites[:STATIC_ROWS]]
    notes = "".join(f"<li>{escape(capitalise(note))}</li>" for note in there.notes)
    head = ("site", *(label.lower() for _, label in _TABS))
    return (
        f"<details><summary>The plan for {escape(there.target or '')}: {count_converted(there)} of {len(there.sites)} linears, "
        f"{percent(there.low_precision_share)} of the GEMM FLOPs</summary>"
        + about(
            f"The same errors, measured here, with speed-ups from committed database rows of that machine; at least "
            f"{there.min_speedup:g}× is required. A GEMM without a row for its shape stays in high precision, because speeds are not guessed."
        )
        + f"<ul>{notes}</ul>"
        + table(head, rows, caption=f"Plan for {there.target}")
        + "</details>"
    )


def _spell_target(site: SitePlan, gemm: str) -> str:
    choice = next((c for c in site.choices if c.gemm == gemm), None)
    if choice is None:
        return "–"
    if choice.a is None:
        return f'high<br><span class="facts wrap">{escape(choice.reason)}</span>'
    speed = f"{choice.expected_speedup:.2f}×" if choice.expected_speedup else "speed not known"
    return (
        f'<span class="mono">{escape(choice.a)}</span><br><span class="facts">{escape(choice.backend)}, {speed}</span>'
    )


def _plan_row(site: SitePlan, chained: bool) -> list[str]:
    chosen: dict[str, Choice] = {choice.gemm: choice for choice in site.choices}
    kept = [choice for choice in site.choices if not choice.quantized]
    why = "<br>".join(escape(reason) for reason in dict.fromkeys(choice.reason for choice in kept))
    return [
        escape(site.site),
        f"{site.k} × {site.n}",
        percent(site.flops_share),
        *("chain" if chained and gemm in chosen else _spell(chosen.get(gemm)) for gemm, _ in _TABS),
        "" if chained else why if site.choices else "no GEMM was observed",
    ]


def _spell(choice: Choice | None) -> str:
    """Return what one GEMM runs in."""
    if choice is None:
        return "–"
    return "high" if choice.a is None else f"{escape(choice.a)} @ {escape(choice.b or '')}"


def write_memory(results: Results) -> str:
    """Return the memory of inputs saved for backward, from shapes: bf16, or FP8 if fprop and wgrad are quantized."""
    plan, probe = results.plan, results.probe
    if plan is None or probe is None or plan.chained:  # what a chain saves does not follow from these shapes
        return ""
    low = {s.site for s in plan.sites if {c.gemm for c in s.quantized} >= {"fprop", "wgrad"}}
    sizes = {site.name: site.m * site.k for site in probe.sites}
    before = 2 * sum(sizes.values())
    after = sum(size * (1 if name in low else 2) for name, size in sizes.items())
    rows = [
        [name, f"{value / 2**20:.2f}", percent(value / before if before else 0, 0)]
        for name, value in (("bf16", before), ("with the plan", after))
    ]
    return (
        about(
            f"Inputs that the {len(probe.sites)} linears save for the backward pass, computed from their shapes at the largest number of rows seen "
            f"(not measured; scales, below 4 %, are not counted). {len(low)} of the {count_converted(plan)} converted linears save them in FP8."
        )
        + f'<div class="narrow">{table(("saved for backward", "MiB", "of bf16"), rows, numeric=(1, 2), caption="Memory")}</div>'
    )
