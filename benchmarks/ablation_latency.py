"""The latency of the ablation's grid: an MLP tower, {none, each core mod alone, all} x {bf16, FP8 per tensor, FP8 per row, fused FP8}.

    python benchmarks/ablation_latency.py --out ablation_latency.json --seconds 240            on a GPU
    python benchmarks/ablation_latency.py --out /tmp/l.json --device cpu --scale 32             to test the script; times mean nothing

The tower is that of a Wukong layer: 4096 -> 4096 -> 4096 -> 4096 with LayerNorm, Swish and biases, batch 1024 and 8192, inference and a training step
(forward and backward). Everything but the fused tower, which is kernels already, is compiled; all is replayed as a CUDA graph, so that launches cost nobody
anything. A row is checked before it is timed: its output may differ from the same variant's in float32 by no more than FP8 explains. What a precision refuses is
listed with the reason. Speed-ups are over the *unmodified* tower in bf16, from interleaved repeats.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ablation_cell import ORIGINAL, VARIANTS
from torch import Tensor, nn

from loka import mods
from loka.convert import convert
from loka.nn import MLP, BlockNorm, FusedTower, Style, freeze
from loka.records import capture_environment

WIDTH, DEPTH, BATCHES = 4096, 3, (1024, 8192)
PRECISIONS = ("bf16", "tensorwise", "rowwise", "fused")
LIMITS = {"bf16": 0.03, "tensorwise": 0.3, "rowwise": 0.3, "fused": 0.3}


class Tower(nn.Module):
    """A tower behind a norm, as in a Wukong layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        style = Style(**ORIGINAL)
        self.norm = nn.LayerNorm(width)
        self.mlp = MLP(width, [width] * (DEPTH - 1), width, style=style)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.norm(x))
        return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; written again after every row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row after this")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--scale", type=int, default=1, help="divide width and batch, to test the script")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    environment = capture_environment(command="python benchmarks/ablation_latency.py", device=name)
    report: dict[str, Any] = {
        "environment": {f: getattr(environment, f) for f in environment.__struct_fields__},
        "settings": {"width": WIDTH // arguments.scale, "depth": DEPTH, "original": ORIGINAL, "limits": LIMITS},
        "rows": [],
        "refused": [],
    }
    for mode in ("infer", "train"):
        for batch in BATCHES:
            base = None
            for variant in VARIANTS:
                for precision in PRECISIONS:
                    label = {
                        "mode": mode,
                        "batch": batch // arguments.scale,
                        "variant": variant,
                        "precision": precision,
                    }
                    if time.monotonic() > deadline:
                        report["refused"].append(label | {"why": "out of time"})
                        continue
                    try:
                        step, facts = prepare(arguments, mode, batch // arguments.scale, variant, precision)
                        base = base or step
                        row = label | facts | time_against(step, base, arguments)
                    except Exception as error:  # one row must not cost the others theirs
                        report["refused"].append(label | {"why": f"{type(error).__name__}: {str(error)[:300]}"})
                        print(label, error, file=sys.stderr, flush=True)
                    else:
                        report["rows"].append(row)
                        print(row, file=sys.stderr, flush=True)
                    arguments.out.write_text(json.dumps(report, indent=1))
    print(describe(report))
    return 0


def prepare(
    arguments: argparse.Namespace, mode: str, batch: int, variant: str, precision: str
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A step to time, already checked."""
    device, width = arguments.device, WIDTH // arguments.scale
    torch.manual_seed(0)
    model = Tower(width).to(device)
    x = torch.randn(batch, width, device=device)
    if VARIANTS[variant]:
        mods.apply(model, VARIANTS[variant], example=x[:4])
    reference = copy.deepcopy(model)
    if mode == "infer":
        model, x = model.eval().requires_grad_(False).to(torch.bfloat16), x.bfloat16()
    facts = lower(model, precision, x)
    error = differ(model, reference, x[:256], device)
    if not error < LIMITS[precision]:
        raise ValueError(f"its output differs from float32's by {error:.3f}, more than {LIMITS[precision]}")
    del reference
    if mode == "infer" and precision == "fused":
        freeze(model)
    run = model if precision == "fused" or device == "cpu" else torch.compile(model, fullgraph=True, dynamic=False)
    step = infer_step(run, x) if mode == "infer" else train_step(run, model, x, device)
    return graphed(step, device), facts | {"error": error}


def lower(model: nn.Module, precision: str, x: Tensor) -> dict[str, Any]:
    if precision == "bf16":
        return {}
    if precision == "fused":
        applied = mods.apply(model, mods.Fuse(precision="fp8"), example=x[:4])
        if not any(isinstance(m, FusedTower) for m in model.modules()):
            raise ValueError("; ".join(left.why for left in applied.summary.left))
        return {"bounded_input": isinstance(model.norm, BlockNorm)}
    return {"converted": len(convert(model, recipe=precision).converted)}


@torch.no_grad()
def differ(model: nn.Module, reference: nn.Module, x: Tensor, device: str) -> float:
    with torch.autocast(device, torch.bfloat16):
        mine = model(x)
    theirs = reference(x.float())
    return float((mine.float() - theirs).norm() / theirs.norm())


def infer_step(run: Any, x: Tensor) -> Callable[[], Any]:
    def step() -> None:
        with torch.no_grad():
            run(x)

    return step


def train_step(run: Any, model: nn.Module, x: Tensor, device: str) -> Callable[[], Any]:
    x = x.requires_grad_()
    grad = torch.randn(x.shape[0], x.shape[1], device=device, dtype=torch.bfloat16)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            run(x).backward(grad)
        for leaf in (*model.parameters(), x):
            leaf.grad = None

    return step


def graphed(step: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The step as a CUDA graph."""
    if device != "cuda":
        step()
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(
        kept: Callable[[], Any] = step,
    ) -> None:  # a graph reads its weights and inputs where they lie: keep them alive
        graph.replay()

    return replay


def time_against(step: Callable[[], Any], base: Callable[[], Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds, and the speed-up over the unmodified tower in bf16, from interleaved repeats."""
    mine, theirs = [], []
    for repeat in range(arguments.repeats + 3):
        pair = (once(base, arguments.device), once(step, arguments.device))
        if repeat >= 3:
            theirs.append(pair[0])
            mine.append(pair[1])
    ratios = sorted(t / m for t, m in zip(theirs, mine, strict=True))
    tail = max(0, round(0.025 * len(ratios)))
    return {"microseconds": statistics.median(mine) * 1e6, "speedup": statistics.median(ratios),
            "speedup_low": ratios[tail], "speedup_high": ratios[-1 - tail]}  # fmt: skip


def once(step: Callable[[], Any], device: str, inner: int = 10) -> float:
    """Seconds of one call; on a GPU over ten, so that the events cost nothing."""
    if device != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(inner):
        step()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / inner / 1e3


def describe(report: dict[str, Any]) -> str:
    lines = [
        f"{'mode':6} {'batch':>6} {'mods':11} {'precision':11} {'us':>9} {'speed-up over the unmodified bf16 tower':>30} {'error':>7}"
    ]
    for row in report["rows"]:
        speed = f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
        lines.append(
            f"{row['mode']:6} {row['batch']:6} {row['variant']:11} {row['precision']:11} {row['microseconds']:9.1f} {speed:>30} {row['error']:7.4f}"
        )
    lines += [f"refused: {row}" for row in report["refused"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
