"""The stress set: where naive FP8 visibly fails and planned FP8 with mods does not. CPU, a few minutes; kernels are emulated, no speed is measured.

    python benchmarks/stress.py --out benchmarks/results/cpu/stress.json --figure docs/figures/stress.svg
    python benchmarks/stress.py --out /tmp/stress.json --seeds 2 --steps 40                                     a quick look

The data generator's stress mode makes the three things that hurt a scaled format: dense features whose rows differ by e^(+-4 sigma) (range inside a
scaling group), two channels 1,000 times larger than the others, and biases that diverge as the log goes on. Magnitude alone would be harmless.

A small DLRM learns from them, in float32 and in emulated FP8, as it is (LayerNorm, Swish, biases) and with mods (no bias, BlockNorm, hard swish, protected
prediction layer). A control never sees the dense features, so that a loss can be read as what it is: how much of what these features teach has survived,

    kept = (loss without the features - loss) / (loss without the features - loss of the original in float32).

Seeds are paired: same weights, same batches. Intervals are Student's over seeds.
"""

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from loka import mods
from loka.data import load
from loka.formats import Spec, quantize
from loka.metrics import compare_paired
from loka.models import build_ranker
from loka.nn import BlockNorm
from loka.placing import convert
from loka.probe import Probe
from loka.records import Plan, capture_environment
from loka.training import Optimizers, TrainConfig, learning_rate_factor

DATA = {"rows": 200_000, "dense": 12, "categorical": 2, "cardinality": 20, "max_history": 0, "seed": 1, "stress": True}
ORIGINAL = {"norm": "layer", "tower_norm": "layer", "activation": "silu", "bias": True}
MODS = (*mods.CORE, "protect_intermediates")
MARGIN = 0.1
# name in the record: (mods, precision)
ARMS = {
    "original, float32": ((), "float32"),
    "original, naive FP8": ((), "naive"),
    "original, planned FP8": ((), "planned"),
    "mods, float32": (MODS, "float32"),
    "mods, naive FP8": (MODS, "naive"),
    "mods, planned FP8": (MODS, "planned"),
    "without dense features": ((), "blind"),
}
BATCH, TEST_BATCH, PROBED = 512, 2000, 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; written again after every run")
    parser.add_argument("--figure", type=Path, help="SVG to draw")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--sigma", type=float, default=6.0, help="deviation of the logarithm of the row scales")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Stress(arguments.sigma, arguments.steps)
    report = bench.open_report()
    started, deadline = time.monotonic(), time.monotonic() + arguments.seconds
    for seed in range(arguments.seeds):
        for arm in ARMS:
            if time.monotonic() > deadline:
                report["skipped"].append({"arm": arm, "seed": seed, "reason": "out of time"})
                continue
            row = bench.run(arm, seed)
            report["runs"].append(row)
            report["summary"] = summarise(report["runs"])
            report["seconds"] = time.monotonic() - started
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report, indent=1))
            print(f"{arm} seed {seed}: {row['log_loss']} ({row['seconds']:.0f} s)", file=sys.stderr, flush=True)
    print(describe(report))
    if arguments.figure is not None:
        from stress_figure import draw

        arguments.figure.parent.mkdir(parents=True, exist_ok=True)
        arguments.figure.write_text(draw(report))
    return 0


class Stress:
    """The data, and one run on it."""

    def __init__(self, sigma: float, steps: int) -> None:
        self.data = load("synthetic", **DATA, sigma=sigma)
        self.sigma, self.steps = sigma, steps
        self.test = list(self.data.test.batches(TEST_BATCH, shuffle=False, seed=0))
        self.plans: dict[tuple[str, ...], tuple[Plan, list[str]]] = {}

    def open_report(self) -> dict[str, Any]:
        environment = capture_environment(command="python benchmarks/stress.py", threads=1)
        return {
            "settings": {"data": DATA | {"sigma": self.sigma}, "model": "dlrm tiny, dense tower (64,)", "steps": self.steps,
                         "batch": BATCH, "original": ORIGINAL, "mods": list(MODS), "margin_percent": MARGIN},
            "groups": self.describe_groups(),
            "environment": {f: getattr(environment, f) for f in environment.__struct_fields__},
            "runs": [],
            "skipped": [],
        }  # fmt: skip

    def build(self, chosen: tuple[str, ...], seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = build_ranker(self.data.schema, "dlrm", "tiny", dense_hidden=(64,), sparse=True, **ORIGINAL)
        if chosen:
            mods.apply(model, chosen, example=self.test[0])
        return model

    def train(
        self, model: nn.Module, seed: int, *, steps: int, blind: bool = False, probe: Probe | None = None
    ) -> None:
        config = TrainConfig(
            steps=self.steps,
            warmup_steps=min(20, self.steps),
            learning_rate=5e-3,
            embedding_learning_rate=5e-2,
            schedule="cosine",
            final_fraction=0.02,
        )
        optimizers = Optimizers(model, config)
        model.train()
        batches = self.data.train.batches(BATCH, shuffle=True, seed=seed)
        for step, batch in zip(range(steps), batches, strict=False):
            batch = replace(batch, dense=torch.zeros_like(batch.dense)) if blind else batch
            optimizers.set_factor(learning_rate_factor(config, step))
            F.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
            optimizers.step()
            optimizers.zero_grad()
            if probe is not None:
                probe.step()

    def plan(self, chosen: tuple[str, ...]) -> tuple[Plan, list[str]]:
        """Probe the first steps of a float32 run, once for all seeds; and what Probe's findings suggest."""
        if chosen not in self.plans:
            model = self.build(chosen, 0)
            probe = Probe(model, mods.unprotected, every=PROBED // 4, rows=512)
            self.train(model, 0, steps=min(PROBED, self.steps), probe=probe)
            probe.detach()
            report = probe.evaluate(samples=10, sources=("rows",), judged_on=("rows",))
            self.plans[chosen] = report.plan(min_speedup=None), [str(s) for s in mods.suggest(report)]
        return self.plans[chosen]

    def run(self, arm: str, seed: int) -> dict[str, Any]:
        chosen, precision = ARMS[arm]
        started = time.monotonic()
        model = self.build(chosen, seed)
        row: dict[str, Any] = {"arm": arm, "seed": seed, "fp8_share": 0.0}
        if precision == "naive":
            convert(model, recipe="tensorwise")
            row["fp8_share"] = 1.0
        elif precision == "planned":
            plan, suggested = self.plan(chosen)
            convert(model, plan)
            kept = [f"{s.site} {c.gemm}" for s in plan.sites for c in s.choices if not c.quantized]
            row |= {"fp8_share": plan.low_precision_share, "kept_in_high_precision": kept, "suggested": suggested}
        self.train(model, seed, steps=self.steps, blind=precision == "blind")
        loss = self.score(model, blind=precision == "blind")
        return row | {"log_loss": loss if math.isfinite(loss) else None, "seconds": time.monotonic() - started}

    @torch.no_grad()
    def score(self, model: nn.Module, *, blind: bool) -> float:
        model.eval()
        total = 0.0
        for batch in self.test:
            batch = replace(batch, dense=torch.zeros_like(batch.dense)) if blind else batch
            total += F.binary_cross_entropy_with_logits(model(batch), batch.labels, reduction="sum").item()
        return total / sum(batch.size for batch in self.test)

    def describe_groups(self) -> list[dict[str, Any]]:
        """Where the values of one batch of dense features lie relative to what E4M3 holds, by scaling group."""
        x = self.test[0].dense
        cases = {
            "one scale for the tensor": (x, "e4m3:tensor"),
            "one scale for every row": (x, "e4m3:row"),
            "one scale for the tensor, behind a BlockNorm": (BlockNorm(x.shape[1])(x), "e4m3:tensor"),
        }
        return [{"case": case, **describe_group(values, Spec.parse(spec))} for case, (values, spec) in cases.items()]


def describe_group(values: torch.Tensor, spec: Spec) -> dict[str, Any]:
    """A histogram of log2 |x / scale| in octaves, and the share that becomes zero."""
    q = quantize(values, spec)
    scaled = (values / q.scale.reshape(-1, 1) if q.scale.numel() > 1 else values / q.scale).abs()
    octaves = scaled[scaled > 0].log2().floor().clamp(-50, 9).int() + 50
    lost = (q.data.float() == 0) & (values != 0)
    return {
        "first_octave": -50,
        "histogram": torch.bincount(octaves, minlength=60).tolist(),
        "lost": float(lost.float().mean()),
    }


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    losses = {
        arm: {r["seed"]: r["log_loss"] for r in runs if r["arm"] == arm and r["log_loss"] is not None} for arm in ARMS
    }
    original, blind = losses["original, float32"], losses["without dense features"]
    rows = []
    for arm, mine in losses.items():
        tried = [r for r in runs if r["arm"] == arm]
        if not tried:
            continue
        row: dict[str, Any] = {"arm": arm, "seeds": len(tried), "diverged": len(tried) - len(mine),
                               "fp8_share": tried[-1]["fp8_share"]}  # fmt: skip
        if mine:
            row["log_loss"] = statistics.fmean(mine.values())
        both = sorted(mine.keys() & original.keys())
        if len(both) > 1 and arm != "original, float32":
            pair = [torch.tensor([side[s] for s in both], dtype=torch.float64) for side in (mine, original)]
            found = compare_paired(
                *pair, margin=MARGIN, metric="log loss", lower_is_better=True, relative=True, method="student"
            )
            row["against_original"] = {"percent": found.estimate, "low": found.low, "high": found.high,
                                       "verdict": found.verdict, "mde": found.mde}  # fmt: skip
        common = sorted(both and set(both) & blind.keys())
        if len(common) > 1:
            row["kept"] = keep_share(
                [mine[s] for s in common], [original[s] for s in common], [blind[s] for s in common]
            )
        rows.append(row)
    return rows


def keep_share(mine: list[float], original: list[float], blind: list[float]) -> dict[str, float]:
    """The share of what the dense features teach that survives, with a Student interval over seeds of the numerator."""
    worth = statistics.fmean(b - o for b, o in zip(blind, original, strict=True))
    shares = [(b - m) / worth for b, m in zip(blind, mine, strict=True)]
    mean, spread = statistics.fmean(shares), statistics.stdev(shares)
    half = (
        {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}.get(len(shares), 2.1)
        * spread
        / len(shares) ** 0.5
    )
    return {"share": mean, "low": mean - half, "high": mean + half}


def describe(report: dict[str, Any]) -> str:
    lines = [f"{'arm':24} {'log loss':>9} {'FP8':>6} {'kept':>7}  against the original in float32"]
    for row in report.get("summary", []):
        found, kept = row.get("against_original"), row.get("kept")
        text = (
            ""
            if not found
            else f"{found['percent']:+.2f} % [{found['low']:+.2f}, {found['high']:+.2f}] {found['verdict']}"
        )
        share = "" if not kept else f"{kept['share']:7.0%}"
        lines.append(f"{row['arm']:24} {row.get('log_loss', math.nan):9.5f} {row['fp8_share']:6.0%} {share:>7}  {text}")
    return "\n".join([*lines, f"{report.get('seconds', 0):.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
