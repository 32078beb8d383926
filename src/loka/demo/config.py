"""What the demo is asked to do, and what it says in the end."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from loka.records import Comparison, Plan


@dataclass(frozen=True)
class DemoConfig:
    """What the demo is asked to do. The defaults take four minutes on two cores."""

    data: str = "complete-journey"
    family: str = "wukong"
    size: str = "small"
    steps: int = 400
    more_steps: int = 200
    batch_size: int = 512
    learning_rate: float = 1e-3
    probe_every: int = 50
    rows: int = 512
    samples: int = 20
    sensitivity_examples: int = 16_384
    max_error: float = 0.2
    max_gradient_error: float = 0.1
    margin: float = 0.001
    seed: int = 0
    device: str = "cpu"  # on a GPU speed is measured, and asked for
    target: str = "NVIDIA H200"  # on a CPU: whose database rows a second plan is made from
    row_factor: float = 16.0  # rows per call there over those here: a batch of 8,192

    @classmethod
    def for_device(cls, device: str, **given: Any) -> Self:
        """The defaults of a kind of machine: on a GPU a model and a batch large enough for FP8 to have something to gain."""
        large = {"size": "wide", "batch_size": 8192, "steps": 60, "more_steps": 30, "probe_every": 15}
        return cls(**({**large, **given} if device.startswith("cuda") else given), device=device)

    def __post_init__(self) -> None:
        for name in ("steps", "more_steps", "batch_size", "probe_every", "samples", "sensitivity_examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1")
        if not 0 < self.margin < 1:
            raise ValueError(f"margin={self.margin}, expected a share of the log loss, e.g. 0.001 for 0.1 %")


@dataclass(frozen=True)
class DemoResult:
    """Where the report is, and what it rests on."""

    report: Path
    plan: Plan
    comparisons: dict[str, Comparison]  # planned, naive, control; swap-planned, swap-naive: not trained on
    converted: int
    linears: int
    resumed: tuple[str, ...]  # stations that were already finished
    restarted: str | None  # why earlier results were not used
    elsewhere: Plan | None = None  # for a machine whose rows ship with the package; None where speed was measured here

    def lines(self) -> list[str]:
        """What happened, in five lines."""
        share = self.plan.low_precision_share
        change = {name: f"{found.relative_change.value:+.3%}" for name, found in self.comparisons.items()}
        return [
            f"{self.converted} of {self.linears} linears run in FP8, {share:.1%} of the model's GEMM FLOPs; {self._say_speed()}",
            f"planned FP8: {spell_comparison(self.comparisons['planned'])}",
            f"naive FP8:   {spell_comparison(self.comparisons['naive'])}",
            f"noise of training, float32 against itself: {change['control']}; FP8 swapped in without training on: planned "
            f"{change['swap-planned']}, naive {change['swap-naive']}",
            f"report: {self.report}",
        ]

    def _say_speed(self) -> str:
        there = self.elsewhere
        if there is None:
            found = [c.expected_speedup for site in self.plan.sites for c in site.choices if c.expected_speedup]
            return f"measured {min(found):.2f}x to {max(found):.2f}x over bf16 per GEMM" if found else "none is faster"
        worth = sum(any(c.quantized for c in site.choices) for site in there.sites)
        return f"emulated here; by rows of the {there.target} FP8 would be faster there for {worth} of these linears"


def spell_comparison(found: Comparison) -> str:
    """A comparison in one clause."""
    change = found.relative_change
    return (
        f"{found.outcome}, {change.value:+.3%} log loss [{change.low:+.3%}, {change.high:+.3%}] "
        f"against high precision, margin {found.margin:.1%}"
    )
