"""`loka plan`, `loka explain`, `loka diff`: make a plan from a probe's report, ask it why, compare two.

    loka plan runs/demo/records/probe.json --accuracy-only --out plan.json
    loka plan probe.json --min-speedup 1.05 --override 'core.head.*=high'
    loka explain plan.json core.head.last
    loka diff plan.json other.json

`loka diff` exits 1 when the plans differ, as diff does.
"""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["diff", "explain", "plan"]

PlanFile = Annotated[Path, typer.Argument(help="A plan (JSON).")]


def plan(
    probe: Annotated[Path, typer.Argument(help="A probe's report (JSON).")],
    max_error: Annotated[float | None, typer.Option(help="Limit of MERE, forward; default: the report's.")] = None,
    max_gradient_error: Annotated[
        float | None, typer.Option(help="Limit of relative L2, gradients; default: the report's.")
    ] = None,
    min_speedup: Annotated[float, typer.Option(help="Least speed-up over bf16 worth converting for.")] = 1.05,
    accuracy_only: Annotated[bool, typer.Option("--accuracy-only", help="Ignore speed; the plan says so.")] = False,
    override: Annotated[list[str] | None, typer.Option(help="WILDCARD=RECIPE or WILDCARD=high.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write the plan to.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Choose, for every GEMM, the fastest candidate that is accurate enough."""
    from loka import records
    from loka.dispatch import spell
    from loka.probe import Report

    made = Report.load(probe).plan(
        max_error=max_error,
        max_gradient_error=max_gradient_error,
        min_speedup=None if accuracy_only else min_speedup,
        overrides=parse_overrides(override or []),
    )
    if out is not None:
        records.save(made, out)
    if json_:
        typer.echo(records.to_json(made).decode())
        return
    for site in made.sites:
        typer.echo(f"{site.site}  {'; '.join(f'{c.gemm} {spell(c)}' for c in site.choices) or 'no GEMM was seen'}")
    of = "the model's" if made.flops_of == "model" else "the probed"
    typer.echo(f"{made.low_precision_share:.1%} of {of} GEMM FLOPs in low precision")
    for note in made.notes:
        typer.echo(f"note: {note}")


def parse_overrides(texts: list[str]) -> dict[str, str]:
    """`WILDCARD=RECIPE`, the first that matches a site decides."""
    overrides = {}
    for text in texts:
        pattern, separator, recipe = text.rpartition("=")
        if not separator or not pattern:
            raise ValueError(f"--override {text!r}: expected WILDCARD=RECIPE, e.g. 'core.head.*=high'")
        overrides[pattern] = recipe
    return overrides


def explain(file: PlanFile, site: Annotated[str, typer.Argument(help="Name of the site.")]) -> None:
    """Say why a site runs what it runs."""
    from loka import dispatch, records

    typer.echo(dispatch.explain(records.load(file, records.Plan), site))


def diff(before: PlanFile, after: PlanFile) -> None:
    """Say what changed from one plan to another."""
    from loka import dispatch, records

    text = dispatch.diff(records.load(before, records.Plan), records.load(after, records.Plan))
    if text:
        typer.echo(text)
        raise typer.Exit(1)
