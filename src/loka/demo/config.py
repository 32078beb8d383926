"""The settings of the demo, and its result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from loka.records import Comparison, Plan
from loka.records.tuning import SizeEstimates, Tuning


@dataclass(frozen=True)
class DemoConfig:
    """The settings of the demo. The defaults take under three minutes on two quiet cores.

    Args:
        data: a ranking data set.
        family: family of the model.
        size: size of the model within its family.
        steps: training steps in high precision.
        more_steps: further steps of each continuation.
        batch_size: examples per step.
        learning_rate: learning rate of the optimizer.
        tune_batches: validation batches for `loka.tune`; half choose, half verify.
        tune_margin: margin of `loka.tune`.
        margin: margin of the comparison.
        seed: seed of everything random.
        device: device to train on; on a GPU, speed is measured and FP8 is used only where it is faster.
        target: without a GPU: device to estimate speeds for.
        large: size of a second model to estimate.
        large_rows: rows of its batch.

    Example:
        >>> Demo("runs/demo", DemoConfig(steps=40, more_steps=20)).run()
    """

    data: str = "complete-journey"
    family: str = "wukong"
    size: str = "small"
    steps: int = 400
    more_steps: int = 200
    batch_size: int = 512
    learning_rate: float = 1e-3
    tune_batches: int = 48
    tune_margin: float = 0.0002
    margin: float = 0.001
    seed: int = 0
    device: str = "cpu"
    target: str = "NVIDIA H200"
    large: str = "wide"
    large_rows: int = 8192

    @classmethod
    def for_device(cls, device: str, **given: Any) -> Self:
        """Return the defaults for a device: on a GPU, a model and batch large enough for FP8 to gain something.

        It must also learn enough in a minute of training. After 120 steps no chain of a Wukong of that size passes the
        score, since its weight gradients would still lose too much. A DLRM's does, and on an H200 its step is 1.33x as
        fast as compiled 16-bit (1.09x with an over arch of half the width).
        """
        large = {"family": "dlrm", "size": "wide", "batch_size": 8192, "steps": 120, "more_steps": 40, "tune_batches": 16}  # fmt: skip
        return cls(**({**large, **given} if device.startswith("cuda") else given), device=device)

    def __post_init__(self) -> None:
        for name in ("steps", "more_steps", "batch_size", "large_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1")
        if self.tune_batches < 2:
            raise ValueError(f"tune_batches={self.tune_batches}, expected at least 2: one to choose, one to verify")
        if not 0 < self.margin < 1:
            raise ValueError(f"margin={self.margin}, expected a share of the log loss, e.g. 0.001 for 0.1 %")


@dataclass(frozen=True)
class DemoResult:
    """The report and the records it is based on."""

    report: Path
    tuning: Tuning
    comparisons: dict[str, Comparison]  # planned, naive, control; swap-planned, swap-naive: without further training
    resumed: tuple[str, ...]  # stations that were already finished
    restarted: str | None  # why earlier results were not used
    sizes: SizeEstimates | None = None  # on a machine without a GPU

    @property
    def plan(self) -> Plan:
        """The plan that tune chose."""
        return self.tuning.plan

    @property
    def converted(self) -> int:
        """Number of linears that run in FP8."""
        return 0 if self.tuning.conversion is None else len(self.tuning.conversion.converted)

    @property
    def linears(self) -> int:
        """Number of all linears."""
        return len(self.plan.sites)

    @property
    def share(self) -> float:
        """Share of the model's GEMM FLOPs that run in FP8."""
        done = self.tuning.conversion
        return 0.0 if done is None or done.low_precision_share is None else done.low_precision_share

    def lines(self) -> list[str]:
        """Summarize what happened in six lines."""
        change = {name: f"{found.relative_change.value:+.3%}" for name, found in self.comparisons.items()}
        return [
            (
                f"{self.converted} of {self.linears} linears run in FP8, {self.share:.1%} of the model's GEMM FLOPs; "
                f"tuned in {sum(self.tuning.seconds.values()):.0f} s: {self.tuning.verdict}"
            ),
            f"planned FP8: {spell_comparison(self.comparisons['planned'])}",
            f"naive FP8:   {spell_comparison(self.comparisons['naive'])}",
            f"noise of training, float32 against itself: {change['control']}; FP8 swapped in without further training: planned "
            f"{change['swap-planned']}, naive {change['swap-naive']}",
            f"speed: {self._say_speed()}",
            f"report: {self.report}",
        ]

    def _say_speed(self) -> str:
        found = self.tuning.speedup
        if self.sizes is None:
            return f"measured: the step is {found.value:.2f}x as fast as compiled bf16" if found else "FP8 is not faster here"  # fmt: skip
        here, large = self.sizes.here, self.sizes.large
        pays = f"{here.linears.value:.2f}x" if here.share else "FP8 would not pay off"
        return (
            f"emulated here, not measured. Estimated for {self.sizes.target}: this model, {pays}; the {large.size} one at {large.rows:,} rows, its linears "
            f"{large.linears:.2fx} over compiled bf16"
        )


def spell_comparison(found: Comparison) -> str:
    """Format a comparison in one clause."""
    change = found.relative_change
    return (
        f"{found.outcome}, {change.value:+.3%} log loss [{change.low:+.3%}, {change.high:+.3%}] "
        f"against high precision, margin {found.margin:.1%}"
    )
