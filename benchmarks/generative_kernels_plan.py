"""What `generative_kernels` measures: the kinds of operands, how large everything is, and the record that grows while it does."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from loka.formats import Spec
from loka.measure.device import snapshot
from loka.records import save
from loka.records.performance import KernelBench, KernelRow

GROUP, SQUARE = Spec.parse("e4m3:1x128"), Spec.parse("e4m3:128x128")
BLOCKS, ROWS, PLAIN = "e4m3:1x128@e4m3:128x128", "e4m3:row@e4m3:row", "bfloat16"


@dataclass
class Plan:
    """Where and how large."""

    device: torch.device
    ours: str
    experts: int
    d: int
    hidden: int
    rows: tuple[int, ...]  # per expert
    top: int
    selection: tuple[int, int, int]  # requests, beams, codes
    beams: int
    attention: tuple[tuple[int, int], ...]  # requests, context
    heads: int
    head: int
    repeats: int
    end: float = 0.0
    rows_out: list[KernelRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    green: dict[str, dict[tuple[int, ...], str]] = field(
        default_factory=dict
    )  # what of each kind: tile -> reason, "" for green
    out: Path | None = None

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def h200() -> Plan:
    return Plan(torch.device("cuda"), "triton", 53, 1408, 1408, (128, 512, 29, 232), 3, (16, 512, 8192), 512,
                ((8, 512), (8, 3000), (1, 3000), (16, 3000)), 11, 128, 15)  # fmt: skip


def smoke() -> Plan:
    return Plan(torch.device("cpu"), "reference", 3, 128, 128, (8,), 2, (2, 4, 32), 8, ((2, 20),), 2, 16, 3)


def write(plan: Plan) -> None:
    record = KernelBench(
        method="CUDA graph, events" if plan.device.type == "cuda" else "perf_counter on a CPU", peaks=None,
        rows=plan.rows_out, environment=snapshot(), notes=plan.notes,
    )  # fmt: skip
    if plan.out is not None:
        save(record, plan.out)


def say(plan: Plan, text: str) -> None:
    plan.notes.append(text)
    print(text, flush=True)
