"""An ablation of mods: every variant of a model in every precision, seed by seed, compared with the original in bf16; and what the same grid costs in time.

    quality     cell = (data, variant, precision), the mean of its runs; differences are paired by seed (same weights, same batches)
    latency     row = (mode, batch, variant, precision) of one tower; speed-ups are over the *unmodified* tower in bf16

The runs are part of the record: cells can be made again from them, and a benchmark that was cut short continues after the last one.
"""

from typing import Literal

import msgspec

from loka.records.measurement import Environment, Interval
from loka.records.record import Part, Record
from loka.records.run import Outcome

ORIGINAL, BASELINE = "none", "bf16"  # the variant and the precision that everything is compared with
Mode = Literal["infer", "train"]


class AblationRun(Part, frozen=True):
    """One model, trained and scored on the test split; a run that diverged has no scores."""

    data: str
    variant: str
    precision: str
    seed: int
    log_loss: float | None
    auc: float | None
    fp8_share: float  # of the model's GEMM FLOPs
    seconds: float
    steps: int | None = None
    forward: str | None = None  # how it ran: CUDA graphs, or eager and why
    train_loss: float | None = None  # of the last batch
    train_seconds: float | None = None
    converted: int | None = None  # linears; None in bf16
    kept: int | None = None
    operands: list[str] | None = None  # what its FP8 GEMMs multiply, every pair of Specs once


class MissingRun(Part, frozen=True):
    """A run of the grid that has no result, and why."""

    data: str
    variant: str
    precision: str
    seed: int
    why: str


class PairedChange(Part, frozen=True):
    """The relative change of the test log loss, paired by seed: 0.001 = 0.1 %, lower is better."""

    change: Interval
    minimum_detectable: float
    outcome: Outcome
    seeds: int  # pairs; runs that diverged on either side are in none


class AblationCell(Part, frozen=True):
    """The runs of one cell. What has fewer than two pairs is not compared, nor is a cell with itself: None."""

    data: str
    variant: str
    precision: str
    seeds: int
    diverged: int  # of these; counted, not averaged
    fp8_share: float
    log_loss: float | None
    auc: float | None
    seconds: float | None  # of a run
    against_original: PairedChange | None  # the unmodified model in bf16
    against_bf16: PairedChange | None  # the same variant in bf16: what FP8 alone costs
    against_naive: PairedChange | None  # the same variant in naive FP8: what a plan is worth


class Ablation(Record, frozen=True, tag="ablation"):
    """The quality of the grid."""

    model: str
    settings: dict[str, str | int | float | bool | None]
    margin: float  # relative; what is smaller is taken not to matter
    runs: list[AblationRun]
    cells: list[AblationCell]
    skipped: list[MissingRun]
    failed: list[MissingRun]
    seconds: float  # of the last time the benchmark ran
    environment: Environment

    @property
    def data(self) -> list[str]:
        """Data sets, in the order of the cells."""
        return list(dict.fromkeys(cell.data for cell in self.cells))

    def find(self, data: str, variant: str, precision: str) -> AblationCell | None:
        """A cell; None where no run of it has ended."""
        wanted = (data, variant, precision)
        return next((cell for cell in self.cells if (cell.data, cell.variant, cell.precision) == wanted), None)

    def list_equal_plans(self) -> dict[str, list[str]]:
        """By data set, the variants whose plan is the naive recipe: two names of one computation, and no evidence about plans."""
        ran = {
            (r.data, r.variant, r.precision): (r.operands, r.converted, round(r.fp8_share, 6))
            for r in self.runs
            if r.operands
        }
        found: dict[str, list[str]] = {}
        for cell in self.cells:
            planned, naive = (ran.get((cell.data, cell.variant, precision)) for precision in ("planned", "naive"))
            if cell.precision == "planned" and planned is not None and planned == naive:
                found.setdefault(cell.data, []).append(cell.variant)
        return found


class TowerLatency(Part, frozen=True):
    """One tower, timed beside the unmodified one in bf16."""

    mode: Mode
    batch: int
    variant: str
    precision: str
    error: float  # relative L2 distance from the same variant in float32, of what was timed
    microseconds: Interval
    speedup: Interval  # over the unmodified tower in bf16, paired by repeat


class RefusedLatency(Part, frozen=True):
    """A row of the grid that has no time, and why: it cannot run, was wrong, or there was no time left."""

    mode: Mode
    batch: int
    variant: str
    precision: str
    why: str


class AblationLatency(Record, frozen=True, tag="ablation_latency"):
    """The latency of the grid."""

    tower: str  # what was timed, in words
    method: str  # how the times were taken
    settings: dict[str, str | int | float | bool | None]
    rows: list[TowerLatency]
    environment: Environment
    refused: list[RefusedLatency] = msgspec.field(default_factory=list)

    def find(self, mode: Mode, batch: int, variant: str, precision: str) -> TowerLatency | None:
        """A row; None where it was not timed."""
        wanted = (mode, batch, variant, precision)
        return next((row for row in self.rows if (row.mode, row.batch, row.variant, row.precision) == wanted), None)
