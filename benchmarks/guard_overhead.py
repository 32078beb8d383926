"""What a guard costs a training step on the CPU, at its default: it looks during one step in fifty.

    python benchmarks/guard_overhead.py --out benchmarks/results/cpu/guard.json

A step is forward, backward and AdamW of a converted model on a batch of 1,024. FP8 is emulated here and slow, so the guard's own time (what looking adds to a step, and its calls on every other step) is
held against the float32 step of the same model, which is faster: the share on a machine with FP8 differs by how its step and sixteen sampled rows compare. Times are CPU times of this process with
one thread, the median of repeats taken in turns, so other work on the machine counts little.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import loka
from loka.models import build
from loka.records import capture_environment

BATCH, REPEATS = 1024, 5


def make_tower() -> tuple[nn.Module, torch.Tensor]:
    sizes = (512, 1024, 1024, 512, 256)
    layers = [m for k, n in pairwise(sizes) for m in (nn.Linear(k, n), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 1)), torch.randn(BATCH, sizes[0])


def make_wukong() -> tuple[nn.Module, torch.Tensor]:
    return build("wukong", "small", n=32), torch.randn(BATCH, 32, 32)


def timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(name: str, model: nn.Module, x: torch.Tensor) -> dict[str, float | str | int]:
    plain, guarded = model, copy.deepcopy(model)
    loka.convert(guarded, recipe="rowwise", backend="reference")
    guard = loka.Guard(guarded)
    every = guard.config.every
    optimizers = {id(m): torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (plain, guarded)}

    def step(m: nn.Module) -> None:
        m(x).float().square().mean().backward()
        optimizers[id(m)].step()
        optimizers[id(m)].zero_grad()

    def look() -> None:
        guard.step = 0
        guard.begin_step()
        step(guarded)
        guard.check()

    def pass_by() -> None:
        guard.step = 1
        for _ in range(100):
            guard.step = 1
            guard.begin_step()
            guard.check()

    found: dict[str, list[float]] = {"float32": [], "fp8": [], "looking": [], "idle": []}
    for warm in (plain, guarded):
        step(warm)
    look()
    for _ in range(REPEATS):
        found["float32"].append(timed(lambda: step(plain)))
        found["fp8"].append(timed(lambda: step(guarded)))
        found["looking"].append(timed(look))
        found["idle"].append(timed(pass_by) / 100)
    added = statistics.median(look - usual for look, usual in zip(found["looking"], found["fp8"], strict=True))
    idle, base = statistics.median(found["idle"]), statistics.median(found["float32"])
    return {
        "model": name,
        "sites": len(guard.sites) + len(guard.chained),
        "every": every,
        "float32_step_ms": round(base * 1e3, 3),
        "emulated_step_ms": round(statistics.median(found["fp8"]) * 1e3, 3),
        "look_adds_ms": round(added * 1e3, 3),
        "other_steps_ms": round(idle * 1e3, 4),
        "share_of_float32_step": float(f"{(max(added, 0) / every + idle) / base:.4g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [
        measure("tower 512-1024-1024-512-256-1", *make_tower()),
        measure("wukong small, 32 vectors", *make_wukong()),
    ]
    environment = capture_environment(threads=1)
    made = {f: getattr(environment, f) for f in environment.__struct_fields__}
    asked.out.write_text(json.dumps({"environment": made, "rows": rows}, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
