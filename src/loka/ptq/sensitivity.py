"""Which sites the end metric can spare: each alone, then all together, the worst ones back to 16 bits until the bound holds.

Measuring alone gives an order, not a sum: errors of sites may add up or cancel. So the decision is made on the whole model. With the sites sorted from
harmless to harmful, the model that quantises the first n of them is measured, and the largest n within the bound is found by bisection: about
log2(sites) measurements instead of one per site. The upper end of the interval is what must stay within the bound.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from loka.metrics import compare_paired
from loka.ptq.modules import swap
from loka.records import Interval

Score = Callable[[nn.Module], tuple[Tensor, Tensor | None]]
Progress = Callable[[str, int, int], None]


def measure_sites(
    model: nn.Module, modules: dict[str, nn.Module], score: Score, *, progress: Progress | None = None
) -> dict[str, Interval]:
    """Relative change of the mean loss with each of `modules` alone in place of its original; the model is left as it was."""
    baseline, groups = _run(model, score)
    found = {}
    for number, name in enumerate(modules):
        if progress is not None:
            progress(name, number, len(modules))
        found[name] = _change(model, modules, [name], score, baseline, groups)
    return found


def choose(
    model: nn.Module,
    modules: dict[str, nn.Module],
    alone: dict[str, Interval],
    score: Score,
    *,
    cautious: set[str],
    bound: float | None,
    progress: Progress | None = None,
) -> tuple[list[str], Interval]:
    """The sites to quantise, in model order, and the change of the model that has them.

    Without a bound everything the recipe wants is quantised, and of the `cautious` sites those whose interval contains no loss. With one,
    the largest prefix of the order from harmless to harmful that stays within it.
    """
    baseline, groups = _run(model, score)
    usable = [name for name in modules if name not in cautious or alone[name].high <= (bound or 0.0)]
    order = sorted(usable, key=lambda name: (name in cautious, alone[name].high))
    cache: dict[int, Interval] = {}

    def measure(count: int) -> Interval:
        if count not in cache:
            if progress is not None:
                progress(f"{count} sites together", len(cache), len(cache) + 1)
            cache[count] = _change(model, modules, order[:count], score, baseline, groups)
        return cache[count]

    count = len(order) if bound is None or measure(len(order)).high <= bound else _bisect(measure, len(order), bound)
    picked = set(order[:count])
    return [name for name in modules if name in picked], measure(count)


def _bisect(measure: Callable[[int], Interval], too_many: int, bound: float) -> int:
    """The largest number of sites within the bound, if the change grows with it; 0 always holds."""
    fine = 0
    while too_many - fine > 1:
        middle = (fine + too_many) // 2
        if measure(middle).high <= bound:
            fine = middle
        else:
            too_many = middle
    return fine


def _change(
    model: nn.Module,
    modules: dict[str, nn.Module],
    names: Sequence[str],
    score: Score,
    baseline: Tensor,
    groups: Tensor | None,
) -> Interval:
    known = dict(model.named_modules())
    originals = {name: known[name] for name in names}
    swap(model, {name: modules[name] for name in names})
    try:
        losses, _ = _run(model, score)
    finally:
        swap(model, originals)
    result = compare_paired(
        losses, baseline, margin=0.1, metric="loss", lower_is_better=True, groups=groups, relative=True
    )
    value, low, high = (x / 100 for x in (result.estimate, result.low, result.high))
    return Interval(value=value, low=min(low, value), high=max(high, value))


@torch.no_grad()
def _run(model: nn.Module, score: Score) -> tuple[Tensor, Tensor | None]:
    training = model.training
    model.eval()
    try:
        return score(model)
    finally:
        model.train(training)
