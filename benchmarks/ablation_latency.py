"""The latency of the ablation's grid: an MLP tower, {none, each core mod alone, all} x {bf16, FP8 per tensor, FP8 per row, fused FP8}.

    python benchmarks/ablation_latency.py --out ablation_latency.json --modes infer --seconds 50              on a GPU
    python benchmarks/ablation_latency.py --out /tmp/l.json --device cpu --scale 16 --processes 1             to test the script; times mean nothing

The tower is that of a Wukong layer: a norm, 4096 -> 4096 -> 4096 -> 4096 with LayerNorm, Swish and biases, a norm; batch 1024 and 8192; inference (16-bit weights
and input, FP8 weights quantised once) and a training step (forward and backward, autocast, weights quantised in every step). Naive FP8 is `tensorwise`; a plan runs
`tensorwise` or `rowwise` GEMM by GEMM, or the whole tower `fused`.

Everything is compiled, fused towers too, and timed by loka.measure: CUDA graphs, several copies of the weights that together exceed the L2 cache, the row and
the unmodified tower in bf16 in interleaved repeats of one process. Speed-ups are over that tower. What is timed is checked first: its output, and in training
its gradients, may differ from the same variant's in float32 by no more than FP8 explains. What a precision refuses is listed with the reason.

A process for every mode, batch and variant compiles its towers, all at once; then one after the other measures on the idle GPU. The file is a record of
kind "ablation_latency" (ablation_record.py); rows that are in it already are not measured again.
"""

import argparse
import copy
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from ablation_cell import ORIGINAL, VARIANTS
from ablation_record import AblationLatency, RefusedLatency, TowerLatency
from torch import Tensor, nn

from loka import mods
from loka.lowp import chains_of
from loka.measure.conformance import Conformance
from loka.measure.timing import Contender, sets_needed, time_together
from loka.nn import MLP, Style
from loka.placing import calibrating, convert, freeze_model
from loka.records import RecordError, capture_environment, load, save

WIDTH, DEPTH, BATCHES, MODES = 4096, 3, (1024, 8192), ("infer", "train")
PRECISIONS = ("bf16", "tensorwise", "rowwise", "fused")
LIMITS = {"bf16": 0.05, "tensorwise": 0.3, "rowwise": 0.3, "fused": 0.3}
OUT_OF_TIME = "out of time"
BAR = 2.0  # all mods in fused FP8 over the unmodified tower in bf16
METHOD = "compiled, CUDA graphs, weights rotated beyond the L2 cache, interleaved with the unmodified tower in bf16; medians with bootstrap intervals"


class Tower(nn.Module):
    """A tower between two norms, as in a Wukong layer: its last linear is no prediction layer, and mods treat it like the others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = MLP(width, [width] * (DEPTH - 1), width, style=Style(**ORIGINAL))
        self.out = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.mlp(self.norm(x)))
        return out


@dataclass(frozen=True)
class Group:
    """What one process compiles and measures: a variant, beside the unmodified tower in bf16."""

    mode: str
    batch: int
    variant: str
    precisions: tuple[str, ...]
    width: int
    device: str
    repeats: int

    def label(self, precision: str) -> dict[str, Any]:
        return {"mode": self.mode, "batch": self.batch, "variant": self.variant, "precision": precision}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; written again after every group of rows")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--modes", default=",".join(MODES), help="infer, train or both")
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave out what is not compiled by then")
    parser.add_argument("--processes", type=int, default=10, help="groups that compile at the same time")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--start-when", type=Path, help="measure once this file exists: another job has left the GPU")
    parser.add_argument("--scale", type=int, default=1, help="divide width and batch, to test the script")
    arguments = parser.parse_args()
    unknown = set(arguments.modes.split(",")) - set(MODES)
    if unknown:
        parser.error(f"--modes: unknown {', '.join(sorted(unknown))}; expected {', '.join(MODES)}")
    report = open_report(arguments)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the groups are the threads
    deadline = time.monotonic() + arguments.seconds
    groups = list_groups(report, arguments)
    for start in range(0, len(groups), arguments.processes):
        for outcome in run_wave(groups[start : start + arguments.processes], deadline, arguments.start_when):
            report = add(report, outcome)
            save(report, arguments.out)
    print(describe(report))
    return 0


def open_report(arguments: argparse.Namespace) -> AblationLatency:
    """A new report, or the rows of an old one of the same settings and device."""
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    settings = {"width": WIDTH // arguments.scale, "depth": DEPTH, "device": name, "repeats": arguments.repeats}
    rows: list[TowerLatency] = []
    refused: list[RefusedLatency] = []
    if arguments.out.exists():
        try:
            old = load(arguments.out, AblationLatency)
        except RecordError as error:
            raise SystemExit(f"{error}: choose another --out") from error
        if old.settings != settings:
            raise SystemExit(f"{arguments.out} holds rows of other settings, {old.settings}: choose another --out")
        rows, refused = old.rows, old.refused
    width = settings["width"]
    tower = f"LayerNorm, an MLP of {DEPTH} linears, {' -> '.join([str(width)] * (DEPTH + 1))}, with LayerNorm, Swish and biases, LayerNorm"
    environment = capture_environment(command="python benchmarks/ablation_latency.py", device=name)
    method = METHOD if arguments.device == "cuda" else "eager on a CPU: a test of the script"
    return AblationLatency(
        tower=tower, method=method, settings=settings, rows=rows, refused=refused, environment=environment
    )


def list_groups(report: AblationLatency, arguments: argparse.Namespace) -> list[Group]:
    """What is not in the report yet, inference first."""
    groups = []
    for mode in (mode for mode in MODES if mode in arguments.modes.split(",")):
        for batch in (batch // arguments.scale for batch in BATCHES):
            for variant in VARIANTS:
                missing = tuple(p for p in PRECISIONS if report.find(mode, batch, variant, p) is None)
                if missing:
                    width = WIDTH // arguments.scale
                    groups.append(Group(mode, batch, variant, missing, width, arguments.device, arguments.repeats))
    return groups


def add(report: AblationLatency, outcome: TowerLatency | RefusedLatency) -> AblationLatency:
    """The report with one more row; what was refused before, and now is not, is forgotten."""
    refused = [row for row in report.refused if key_of(row) != key_of(outcome)]
    rows = [*report.rows, outcome] if isinstance(outcome, TowerLatency) else report.rows
    refused += [outcome] if isinstance(outcome, RefusedLatency) else []
    return msgspec.structs.replace(report, rows=rows, refused=refused)


def key_of(row: TowerLatency | RefusedLatency) -> tuple[str, int, str, str]:
    return row.mode, row.batch, row.variant, row.precision


def run_wave(groups: list[Group], deadline: float, signal: Path | None) -> Iterator[TowerLatency | RefusedLatency]:
    """All compile at once; when the last is ready, or out of time, one after the other measures."""
    if time.monotonic() > deadline:
        labels = (group.label(precision) for group in groups for precision in group.precisions)
        yield from (RefusedLatency(**label, why=OUT_OF_TIME) for label in labels)
        return
    context = multiprocessing.get_context("spawn")
    children: list[tuple[Group, Any, Connection]] = []
    for group in groups:
        ours, theirs = context.Pipe()
        child = context.Process(target=serve, args=(theirs, group), daemon=True)
        child.start()
        theirs.close()
        children.append((group, child, ours))
    told = [receive(pipe, deadline - time.monotonic()) for _, _, pipe in children]  # the slowest decides
    while signal is not None and not signal.exists():  # a busy GPU is never measured
        time.sleep(0.2)
    for (group, child, pipe), first in zip(children, told, strict=True):
        outcomes = first
        if isinstance(first, list):
            pipe.send("go")
            outcomes = receive(pipe, 60)
        if isinstance(outcomes, str):
            outcomes = [RefusedLatency(**group.label(precision), why=outcomes) for precision in group.precisions]
        child.kill()
        yield from outcomes


def receive(pipe: Connection, seconds: float) -> Any:
    """What a child says next, or in words why it says nothing."""
    try:
        return pipe.recv() if pipe.poll(None if math.isinf(seconds) else max(0.0, seconds)) else OUT_OF_TIME
    except EOFError:
        return "its process died"


def serve(pipe: Connection, group: Group) -> None:
    """In the child: compile and check everything, wait for the word, measure, hand over."""
    base, ready, refused = prepare_group(group)
    pipe.send([])
    pipe.recv()
    pipe.send([*refused, *measure(group, base, ready)])


def prepare_group(group: Group) -> tuple[Contender | None, list[Contender], list[RefusedLatency]]:
    """The unmodified tower in bf16, the rows that can be timed, and the others with their reasons."""
    ready: list[Contender] = []
    refused: list[RefusedLatency] = []

    def refuse(precision: str, why: str) -> None:
        print(group.label(precision), why, file=sys.stderr, flush=True)
        refused.append(RefusedLatency(**group.label(precision), why=why))

    for precision in group.precisions:
        try:
            ready.append(prepare(group, group.variant, precision))
        except Exception as error:  # one row must not cost the others theirs
            refuse(precision, say(error))
    if not ready:
        return None, [], refused
    try:
        return prepare(group, "none", "bf16"), ready, refused
    except Exception as error:  # without it there is no speed-up
        for row in ready:
            refuse(row.name, f"the unmodified tower in bf16 failed: {say(error)}")
        return None, [], refused


def say(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def prepare(group: Group, variant: str, precision: str) -> Contender:
    """A tower, compiled, run once on every set of weights, and checked."""
    torch.manual_seed(0)
    with torch.device(group.device):
        model = Tower(group.width)
        x = torch.randn(group.batch, group.width)
        dy = torch.randn(group.batch, group.width)
    if VARIANTS[variant]:
        mods.apply(model, VARIANTS[variant], example=x[:4])
    truth = find_truth(copy.deepcopy(model), x, dy, group.mode)
    if group.mode == "infer":
        model, x = model.eval().requires_grad_(False).to(torch.bfloat16), x.bfloat16()
    lower(model, precision, x)
    if group.mode == "infer" and precision == "fused":
        freeze(model, x)
    bytes_of_weights = group.width * group.width * DEPTH * (1 if group.mode == "infer" else 4)
    copies = [
        model,
        *(copy.deepcopy(model) for _ in range(sets_needed(bytes_of_weights, torch.device(group.device)) - 1)),
    ]
    steps = [make_step(tower, x, dy, group) for tower in copies]
    errors = [max(map(differ, step(), truth)) for step in steps]
    error, limit = max(errors), LIMITS[precision]
    reason = "" if error < limit else f"its results differ from float32's by {error:.3f}, more than {limit}"
    return Contender(precision, steps, Conformance(not reason, error, limit, reason))


def lower(model: nn.Module, precision: str, x: Tensor) -> None:
    if precision == "fused":
        applied = mods.apply(model, mods.Fuse(), example=x[:4])
        if not list(chains_of(model)):
            raise ValueError("; ".join(left.why for left in applied.summary.left))
    elif precision != "bf16":
        convert(model, recipe=precision)


def freeze(model: nn.Module, x: Tensor) -> None:
    """Weights quantised once; scales that no norm bounds from the batch that is timed."""
    if not all(chain.primed for _, chain in chains_of(model)):
        with calibrating(model), torch.no_grad():
            model(x)
    freeze_model(model)


def find_truth(model: nn.Module, x: Tensor, dy: Tensor, mode: str) -> tuple[Tensor, ...]:
    """In float32: the output, and in training the gradients of the input and of the first weight."""
    if mode == "infer":
        with torch.no_grad():
            return (model(x),)
    x = x.clone().requires_grad_()
    y = model(x)
    return y.detach(), *torch.autograd.grad(y, (x, model.mlp.layers[0].linear.weight), dy)


def differ(mine: Tensor, theirs: Tensor) -> float:
    """Relative L2 distance; anything not finite is infinitely far."""
    distance = float((mine.float() - theirs).norm() / theirs.norm())
    return distance if math.isfinite(distance) else math.inf


def make_step(model: nn.Module, x: Tensor, dy: Tensor, group: Group) -> Callable[[], tuple[Tensor, ...]]:
    """One call: what it returns is what `find_truth` returns."""
    run = model if group.device == "cpu" else torch.compile(model, fullgraph=True, dynamic=False)
    weights = list(model.parameters())
    first = next((i for i, w in enumerate(weights) if w is model.mlp.layers[0].linear.weight), 0)
    x = x.clone().requires_grad_(group.mode == "train")
    dy = dy.bfloat16()

    def infer() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (run(x),)

    def train() -> tuple[Tensor, ...]:
        with torch.autocast(group.device, torch.bfloat16, cache_enabled=False):
            y = run(x)
        dx, *gradients = torch.autograd.grad(y, (x, *weights), dy.to(y.dtype))
        return y.detach(), dx, gradients[first]

    return infer if group.mode == "infer" else train


def measure(group: Group, base: Contender | None, ready: list[Contender]) -> Iterator[TowerLatency | RefusedLatency]:
    """Every row beside the unmodified tower, two at a time."""
    for row in ready:
        assert base is not None
        pair = [Contender("baseline", base.thunks, base.conformance), row]
        try:
            against, mine = time_together(pair, group.device, repeats=group.repeats)
        except Exception as error:
            print(group.label(row.name), say(error), file=sys.stderr, flush=True)
            yield RefusedLatency(**group.label(row.name), why=say(error))
            continue
        yield TowerLatency(**group.label(row.name), error=row.conformance.error, microseconds=mine.microseconds(),
                           speedup=mine.speedup_over(against))  # fmt: skip


def describe(report: AblationLatency) -> str:
    lines = [
        f"{'mode':6} {'batch':>6} {'mods':11} {'precision':11} {'us':>9} {'over the unmodified bf16 tower':>30} {'error':>7}"
    ]
    for row in report.rows:
        s = row.speedup
        speed = f"{s.value:.2f} [{s.low:.2f}, {s.high:.2f}]"
        lines.append(
            f"{row.mode:6} {row.batch:6} {row.variant:11} {row.precision:11} {row.microseconds.value:9.1f} {speed:>30} {row.error:7.4f}"
        )
    for row in report.rows if report.environment.device != "cpu" else ():
        if (row.mode, row.variant, row.precision) == ("infer", "all", "fused"):
            met = "met" if row.speedup.low >= BAR else "missed"
            lines.append(f"bar {BAR} at batch {row.batch}, all mods in fused FP8: {row.speedup.value:.2f}, {met}")
    lines += [f"refused: {row.mode} {row.batch} {row.variant} {row.precision}: {row.why}" for row in report.refused]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
