"""What a site does to the model: the end metric with this site alone in low precision, everything else untouched.

Errors of a product say how much noise a site makes; this says how much of it arrives. Both runs have the same weights and see the same
examples, so the comparison is paired and free of the noise of training: an interval of a few hundredths of a percent is common.

    score(model) -> losses, groups        per-example losses in a fixed order, and the unit of independence (user, household)

Forward only: fprop is swapped, gradients do not happen here.
"""

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor, nn

from loka.convert import convert, revert
from loka.metrics import compare_paired
from loka.probe.report import Report
from loka.records import Interval

Score = Callable[[nn.Module], tuple[Tensor, Tensor | None]]


def measure_sensitivity(
    model: nn.Module,
    sites: Sequence[str],
    score: Score,
    *,
    recipe: str = "tensorwise",
    backend: str = "reference",
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Interval]:
    """Relative change of the mean loss for each site alone; the model is left as it was."""
    baseline, groups = _score(model, score)
    found = {}
    for number, site in enumerate(sites):
        if progress is not None:
            progress(site, number, len(sites))
        convert(model, recipe=recipe, module_filter_fn=lambda _, name, wanted=site: name == wanted, backend=backend)  # type: ignore[misc]
        try:
            losses, _ = _score(model, score)
        finally:
            revert(model)
        found[site] = compare_losses(losses, baseline, groups, seed=seed)
    return found


def compare_losses(candidate: Tensor, baseline: Tensor, groups: Tensor | None, *, seed: int = 0) -> Interval:
    """Relative change of the mean loss with its 95 % interval."""
    result = compare_paired(
        candidate, baseline, margin=0.1, metric="loss", lower_is_better=True, groups=groups, relative=True, seed=seed
    )
    value, low, high = (x / 100 for x in (result.estimate, result.low, result.high))
    return Interval(value=value, low=min(low, value), high=max(high, value))


def add_sensitivity(report: Report, found: dict[str, Interval], *, described: str) -> Report:
    """The report with what each site does to the end metric; `described` says what was measured, on what."""
    sites = [msgspec.structs.replace(s, metric_change=found.get(s.name)) for s in report.record.sites]
    return Report(msgspec.structs.replace(report.record, sites=sites, sensitivity=described))


@torch.no_grad()
def _score(model: nn.Module, score: Score) -> tuple[Tensor, Tensor | None]:
    training = model.training
    model.eval()
    try:
        return score(model)
    finally:
        model.train(training)
