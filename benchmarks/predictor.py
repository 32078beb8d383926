"""Does the score predict the metric? Every (site, GEMM, recipe) of models trained here: the score Probe computed online beside what really happens.

    python benchmarks/predictor.py --out benchmarks/results/cpu/predictor.json --seconds 1500       continues where it stopped
    python benchmarks/predictor.py --out benchmarks/results/cpu/predictor.json --seconds 0          only the summary

A cell is a family, a hazard in the dense features, a learning rate, a number of steps and a seed, trained on Complete Journey with a Probe attached. Truth:

    fprop          relative change of the log loss of held-out examples with that site alone rounded, weights as they are; paired
    dgrad, wgrad   the same change after ten further steps from one state, with only that GEMM rounded, everything else as it was. Any nudge changes what ten
                   steps come to: the rms change of three runs from weights moved by 2^-9 of their size is added to the standard error

Hazards: `offset` turns the first dense column into a year (1975 + 10 z), `heavy` makes the second log-normal (exp(2 z)). The file holds one row per pair, written
after each cell; the summary (rank correlations, AUC) is computed from it and never stored apart from it.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.data import load
from loka.formats import Spec, dequantize, fake_quantize, quantize, scale_from_amax
from loka.models import build_ranker
from loka.probe import Probe
from loka.probe.score import operands_of, share_of_margin
from loka.records import capture_environment
from loka.training import ranking_loss

RECIPES = ("tensorwise", "rowwise", "blockwise", "static")
GRADIENT_RECIPES = ("tensorwise", "rowwise", "blockwise")
BATCH, HELD_OUT, MORE_STEPS = 512, 8, 10  # examples a step, batches of 4,096 examples, steps for gradients
MARGIN = 0.0002


@dataclass(frozen=True)
class Cell:
    """One trained model."""

    family: str
    hazard: str
    learning_rate: float
    steps: int
    seed: int

    @property
    def key(self) -> str:
        return "/".join(map(str, asdict(self).values()))


def cells(families: list[str]) -> Iterator[Cell]:
    """In an order that covers families first, then hazards, then seeds."""
    plans = (("none", 1e-3, 300), ("offset", 1e-3, 300), ("heavy", 1e-3, 300), ("none", 4e-3, 300), ("none", 1e-3, 900))
    for seed in range(8):
        for hazard, rate, steps in plans:
            for family in families:
                yield Cell(family, hazard, rate, steps, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="start no further cell after so many")
    parser.add_argument("--families", nargs="+", default=["dlrm", "dcn", "wukong", "dhen", "elfm"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gradients", type=int, default=1, help="dgrad and wgrad of DLRM and DCN on so many seeds")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    held = json.loads(asked.out.read_text()) if asked.out.exists() else {"pairs": []}
    done, started = {pair["cell"] for pair in held["pairs"]}, time.monotonic()
    data = load("complete-journey") if asked.seconds else None
    for cell in cells(asked.families):
        if cell.key in done or time.monotonic() - started > asked.seconds:
            continue
        began = time.monotonic()
        held["pairs"] += measure(cell, data, gradients=cell.family in ("dlrm", "dcn") and cell.seed < asked.gradients)
        environment = capture_environment(threads=asked.threads)
        held["environment"] = {f: getattr(environment, f) for f in environment.__struct_fields__}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(write(held))
        print(f"{cell.key}: {time.monotonic() - began:.0f} s, {len(held['pairs'])} pairs", flush=True)
    print(describe(held["pairs"]))


def write(held: dict[str, Any]) -> str:
    rows = ",\n".join(json.dumps(pair) for pair in held["pairs"])
    return f'{{"environment": {json.dumps(held["environment"])},\n"pairs": [\n{rows}\n]}}\n'


def measure(cell: Cell, data: Any, *, gradients: bool) -> list[dict[str, Any]]:
    torch.manual_seed(cell.seed)
    model = build_ranker(data.schema, cell.family, "small")
    optimizer = torch.optim.Adam(model.parameters(), lr=cell.learning_rate)
    probe = Probe(model, every=max(cell.steps // 24, 1), rows=512, stagger=1)
    for batch in stream(data, cell, cell.steps):
        step(model, optimizer, batch)
        probe.step()
    probe.detach()
    report = probe.evaluate(samples=3, sources=("rows",), judged_on=("rows",), gate=False)
    held_out = [hurt(b, cell.hazard) for b in take(data.valid.batches(4096, shuffle=False, seed=0), HELD_OUT)]
    base = losses(model, held_out)
    pairs = []
    modules = dict(model.named_modules())
    for site in report.record.sites:
        found = {(c.gemm, c.recipe): c for c in site.candidates}
        linear = modules[site.name]
        assert isinstance(linear, nn.Linear)
        largest = probe.watch(site.name).tally.largest
        for recipe in RECIPES:
            with rounded(linear, recipe, largest):
                pairs.append(pair(cell, site, "fprop", recipe, found, losses(model, held_out), base, report))
    if gradients:
        pairs += measure_gradients(cell, data, model, optimizer, report, held_out)
    return pairs


def measure_gradients(
    cell: Cell, data: Any, model: nn.Module, optimizer: Any, report: Any, held_out: list[Any]
) -> list[dict[str, Any]]:
    start = {k: v.clone() for k, v in model.state_dict().items()}
    saved = optimizer.state_dict()
    saved = {
        "state": {k: {n: t.clone() for n, t in v.items()} for k, v in saved["state"].items()},
        **{k: v for k, v in saved.items() if k != "state"},
    }
    more = list(stream(data, replace(cell, seed=cell.seed + 1000), MORE_STEPS))

    def train(nudge: int | None = None) -> Tensor:
        model.load_state_dict(start)
        if nudge is not None:
            noise = torch.Generator().manual_seed(nudge)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 2.0**-9 * torch.randn(parameter.shape, generator=noise))
        optimizer.load_state_dict(
            {**saved, "state": {k: {n: t.clone() for n, t in v.items()} for k, v in saved["state"].items()}}
        )
        for batch in more:
            step(model, optimizer, batch)
        return losses(model, held_out)

    base, pairs = train(), []
    control = math.sqrt(sum(float((train(n).mean() / base.mean() - 1) ** 2) for n in range(3)) / 3)
    modules = dict(model.named_modules())
    for site in report.record.sites:
        found = {(c.gemm, c.recipe): c for c in site.candidates}
        for gemm in ("dgrad", "wgrad"):
            for recipe in GRADIENT_RECIPES:
                if gemm in site.gemms:
                    linear = modules[site.name]
                    assert isinstance(linear, nn.Linear)
                    with rounded_gradient(linear, gemm, recipe):
                        pairs.append(pair(cell, site, gemm, recipe, found, train(), base, report, control))
    return pairs


def pair(
    cell: Cell,
    site: Any,
    gemm: str,
    recipe: str,
    found: Any,
    low: Tensor,
    base: Tensor,
    report: Any,
    control: float = 0.0,
) -> dict[str, Any]:
    change = (low - base) / base.mean()
    candidate = found.get((gemm, recipe))
    error = None if candidate is None else (candidate.mere if gemm == "fprop" else candidate.relative_l2)
    harm = None if candidate is None else candidate.harm
    return {
        "cell": cell.key,
        "family": cell.family,
        "site": site.name,
        "gemm": gemm,
        "recipe": recipe,
        "change": float(f"{float(change.mean()):.4g}"),
        "se": float(f"{math.hypot(float(change.std()) / math.sqrt(change.numel()), control):.4g}"),
        "harm": None if harm is None else [float(f"{v:.4g}") for v in (harm.value, harm.low, harm.high)],
        "drift": None if candidate is None or candidate.drift is None else float(f"{candidate.drift:.4g}"),
        "error": None if error is None else float(f"{error.high:.4g}"),
        "units": report.record.units,
    }


def stream(data: Any, cell: Cell, steps: int) -> Iterator[Any]:
    epoch, count = 0, 0
    while count < steps:
        for batch in data.train.batches(BATCH, shuffle=True, seed=cell.seed, epoch=epoch):
            if count == steps:
                return
            yield hurt(batch, cell.hazard)
            count += 1
        epoch += 1


def take(batches: Any, count: int) -> list[Any]:
    return [batch for batch, _ in zip(batches, range(count), strict=False)]


def hurt(batch: Any, hazard: str) -> Any:
    """The batch with a hazard in its dense features."""
    if hazard == "none":
        return batch
    dense = batch.dense.clone()
    column = 0 if hazard == "offset" else 1
    z = ((dense[:, column] - dense[:, column].mean()) / dense[:, column].std().clamp(min=1e-6)).clamp(-4, 4)
    dense[:, column] = 1975 + 10 * z if hazard == "offset" else torch.exp(2 * z)
    return replace(batch, dense=dense)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    ranking_loss(model, batch)[0].backward()
    optimizer.step()


@torch.no_grad()
def losses(model: nn.Module, held_out: list[Any]) -> Tensor:
    model.eval()
    found = []
    for batch in held_out:
        _, logits = ranking_loss(model, batch)
        assert logits is not None
        each = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        found.append(each.double().reshape(each.shape[0], -1).sum(1))
    model.train()
    return torch.cat(found)


class rounded:  # noqa: N801  reads like the verb it is
    """Inside, a linear's forward product is that of rounded operands."""

    def __init__(self, linear: nn.Linear, recipe: str, largest: dict[str, Tensor]) -> None:
        chosen = operands_of(recipe, "fprop")
        assert chosen is not None
        weight = fake_quantize(linear.weight.detach(), chosen.b)

        def hook(module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x = args[0].reshape(-1, args[0].shape[-1])
            if chosen.a.mode == "static":
                spec = Spec.parse("e4m3:tensor:static")
                low = dequantize(quantize(x, spec, scale=scale_from_amax(largest["x"], spec)))
            else:
                low = fake_quantize(x, chosen.a)
            return F.linear(low, weight, module.bias).reshape(output.shape)

        self._handle = linear.register_forward_hook(hook)  # type: ignore[arg-type]

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, round_dx: Any, round_dw: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounds = (round_dx, round_dw)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dy,), (x, weight), (round_dx, round_dw) = grads, ctx.saved_tensors, ctx.rounds
        return round_dx(dy, weight.T.contiguous()), round_dw(dy.T.contiguous(), x.T.contiguous()), None, None


class rounded_gradient:  # noqa: N801
    """Inside, one gradient GEMM of a linear is that of rounded operands."""

    def __init__(self, linear: nn.Linear, gemm: str, recipe: str) -> None:
        chosen = operands_of(recipe, gemm)  # type: ignore[arg-type]
        assert chosen is not None

        def low(a: Tensor, b: Tensor) -> Tensor:
            return fake_quantize(a, chosen.a) @ fake_quantize(b, chosen.b).T

        def exact(a: Tensor, b: Tensor) -> Tensor:
            return a @ b.T

        rounds = (low, exact) if gemm == "dgrad" else (exact, low)
        self._linear, self._forward = linear, linear.forward

        def forward(x: Tensor) -> Tensor:
            flat = x.reshape(-1, x.shape[-1])
            y = _RoundedGradient.apply(flat, linear.weight, *rounds).reshape(*x.shape[:-1], -1)  # type: ignore[no-untyped-call]
            return y if linear.bias is None else y + linear.bias

        linear.forward = forward  # type: ignore[method-assign]

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._linear.__dict__.pop("forward", None)


# What the pairs say


def describe(pairs: list[dict[str, Any]]) -> str:
    lines = [
        f"{len(pairs)} pairs of {len({p['cell'] for p in pairs})} models, {len({p['family'] for p in pairs})} families"
    ]
    parts: list[tuple[str, Callable[[dict[str, Any]], bool]]] = [
        ("fprop", lambda p: p["gemm"] == "fprop"),
        *[
            (f"fprop, {h}", lambda p, h=h: p["gemm"] == "fprop" and p["cell"].split("/")[1] == h)
            for h in ("none", "offset", "heavy")
        ],
        ("dgrad", lambda p: p["gemm"] == "dgrad"),
        ("wgrad", lambda p: p["gemm"] == "wgrad"),
        ("all", lambda p: True),
    ]
    for name, keep in parts:
        chosen = [
            p
            for p in pairs
            if (keep(p) and p["harm"] and p["error"] is not None) or (keep(p) and p["harm"] and p["recipe"] == "static")
        ]
        if len(chosen) > 5:
            lines.append(f"{name:15s} {describe_part(chosen)}")
    fprop = [p for p in pairs if p["gemm"] == "fprop" and p["harm"]]
    if fprop:
        wrong = [p for p in fprop if p["harm"][2] <= limit(p) < abs(p["change"]) - 1.96 * p["se"]]
        safe = [p for p in fprop if p["harm"][2] <= limit(p)]
        lines.append(
            f"called safe: {len(safe)} of {len(fprop)}; of these beyond their share of the margin at the lower end: {len(wrong)}"
        )
        ratios = sorted(abs(p["change"]) / p["harm"][0] for p in fprop if p["harm"][0] > 0)
        lines.append(
            "|change| / harm.value at 50, 90, 95, 99 %: "
            + ", ".join(f"{ratios[int(q * (len(ratios) - 1))]:.2f}" for q in (0.5, 0.9, 0.95, 0.99))
        )
    return "\n".join(lines)


def limit(pair: dict[str, Any]) -> float:
    return share_of_margin(MARGIN, pair["units"])


def describe_part(pairs: list[dict[str, Any]]) -> str:
    clear = [p for p in pairs if abs(p["change"]) > 2 * p["se"]]
    with_error = [p for p in clear if p["error"] is not None]
    harm = spearman([abs(p["change"]) for p in clear], [p["harm"][2] for p in clear])
    mere = spearman([abs(p["change"]) for p in with_error], [p["error"] for p in with_error])
    costly = [abs(p["change"]) - 0 > MARGIN and abs(p["change"]) > 2 * p["se"] for p in pairs]
    judged = [p for p in pairs if p["error"] is not None]
    return (
        f"{len(pairs):5d} pairs, {len(clear)} beyond two standard errors: rank correlation {harm:.3f} (error of the product {mere:.3f}); "
        f"AUC for more than {MARGIN:.2%} ({sum(costly)}): {auc(costly, [p['harm'][2] for p in pairs]):.3f} "
        f"(error of the product {auc([abs(p['change']) > MARGIN and abs(p['change']) > 2 * p['se'] for p in judged], [p['error'] for p in judged]):.3f})"
    )


def spearman(a: list[float], b: list[float]) -> float:
    if len(a) < 3:
        return math.nan
    ranks = torch.stack([ranked(a), ranked(b)])
    return float(torch.corrcoef(ranks)[0, 1])


def ranked(values: list[float]) -> Tensor:
    """Mean ranks: ties share theirs."""
    tensor = torch.tensor(values, dtype=torch.float64)
    _, inverse, counts = torch.unique(tensor, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]


def auc(labels: list[bool], scores: list[float]) -> float:
    positive = sum(labels)
    negative = len(labels) - positive
    if not positive or not negative:
        return math.nan
    ranks = ranked(scores)
    return float((ranks[torch.tensor(labels)].sum() - positive * (positive + 1) / 2) / (positive * negative))


if __name__ == "__main__":
    main()
