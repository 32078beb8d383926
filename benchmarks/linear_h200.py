"""One Linear and one MLP tower in every recipe, forward + backward and inference, against compiled bf16 and torchao. For a Hopper GPU.

    python benchmarks/linear_h200.py --out linear.json --seconds 480
    python benchmarks/linear_h200.py --out linear.json --only linear --shapes 8192x4096x4096
    python benchmarks/linear_h200.py --out smoke.json --smoke             CPU, emulation, tiny: tests the script, measures nothing

Every way is compiled by itself (fullgraph, static shapes), checked against float32 autograd, then timed in CUDA graphs interleaved with its rivals. Weights are float32 and the
step runs under bf16 autocast, on all sides. What the names mean:

    tensorwise                  weights are quantised inside the graph, once per forward + backward: a training step without accumulation
    tensorwise, cached          weights were quantised before: the second and later micro-batches of a step
    tensorwise delayed          scales of x and dy from earlier steps
    ... inductor                x and dy are quantised by plain torch ops, which the compiler joins to their neighbours, instead of our Triton kernels

The JSON is written after every case; a way that fails has its error there and stops nothing. Peak memory is that of one step outside a graph, above what was held before.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loka.measure.conformance import Conformance
from loka.measure.timing import Contender, sets_needed, time_together
from loka.nn import MLP, Style
from loka.placing import LinearOptions, calibrating, convert, refresh

SHAPES = ["8192x4096x4096", "8192x2048x2048", "2048x4096x4096", "2048x2048x2048", "8192x1024x1024", "2048x1024x1024"]
ALLOWED = {"bf16": 0.02, "linear": 0.08, "tower": 0.2}  # relative L2 of y, dx and every dW from float32
Way = Callable[[nn.Module], None]


def low(recipe: str, **options: Any) -> Way:
    return lambda model: print(
        convert(model, recipe=recipe, options=LinearOptions(**options)), file=sys.stderr
    )  # fmt: skip


def torchao(recipe: str) -> Way:
    def apply(model: nn.Module) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))

    return apply


TRAINING: dict[str, Way] = {
    "bf16": lambda model: None,
    "tensorwise": low("tensorwise"),
    "tensorwise, cached": low("tensorwise", weights="manual"),
    "tensorwise delayed": low("tensorwise", scales="delayed"),
    "tensorwise delayed, cached": low("tensorwise", scales="delayed", weights="manual"),
    "tensorwise delayed, cached, inductor": low(
        "tensorwise", scales="delayed", weights="manual", quantizer="reference"
    ),
    "tensorwise delayed e5m2, cached": low("tensorwise", scales="delayed", weights="manual", gradients="e5m2"),
    "rowwise, cached": low("rowwise", weights="manual"),
    "rowwise_with_gw_hp, cached": low("rowwise_with_gw_hp", weights="manual"),
    "blockwise, cached": low("blockwise", weights="manual"),
    "tensorwise, x kept in bf16": low("tensorwise", save="high"),
    "torchao tensorwise": torchao("tensorwise"),
    "torchao rowwise": torchao("rowwise"),
}
INFERENCE: dict[str, Way] = {
    "bf16": lambda model: None,
    "tensorwise": low("tensorwise"),
    "tensorwise static": low("tensorwise", scales="static"),
    "tensorwise static, inductor": low("tensorwise", scales="static", quantizer="reference"),
    "rowwise": low("rowwise"),
    "rowwise, inductor": low("rowwise", quantizer="reference"),
    "blockwise": low("blockwise"),
}


def build(kind: str, k: int, n: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(k, n, bias=False, device=device))
    style = Style(norm="block", activation="hard_swish", bias=False, tower_norm="block")
    return MLP(k, [n, n, n], style=style).to(device)


class Case:
    """One shape: operands, the exact result, and every way to compute it."""

    def __init__(self, kind: str, training: bool, shape: tuple[int, int, int], device: torch.device) -> None:
        self.kind, self.training, self.shape, self.device = kind, training, shape, device
        m, k, n = shape
        generator = torch.Generator(device).manual_seed(1)
        count = sets_needed(2 * m * (2 * k + 2 * n), device)
        self.sets = [
            (
                torch.randn(m, k, generator=generator, device=device, dtype=torch.bfloat16).requires_grad_(training),
                torch.randn(m, n, generator=generator, device=device, dtype=torch.bfloat16) / m,
            )
            for _ in range(count)
        ]
        model = build(kind, k, n, device).train(training)
        x, dy = self.sets[0]
        inputs = x.detach().float().requires_grad_(training)
        self.exact = self._results(model, inputs, dy.float(), model)

    def _results(self, called: Callable[..., Tensor], x: Tensor, dy: Tensor, model: nn.Module) -> list[Tensor]:
        if not self.training:
            with torch.no_grad():
                return [called(x)]
        y = called(x)
        return [y.detach(), *torch.autograd.grad(y, (x, *model.parameters()), dy)]

    def prepare(self, way: Way, compiled: bool) -> Callable[[tuple[Tensor, Tensor]], list[Tensor]]:
        _, k, n = self.shape
        model = build(self.kind, k, n, self.device).train(self.training)
        way(model)
        if any("static" in str(module) for module in model.modules() if isinstance(module, nn.Linear)):
            with calibrating(model), torch.no_grad():
                model(self.sets[0][0].detach())
        called = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model

        def run(operands: tuple[Tensor, Tensor]) -> list[Tensor]:
            with torch.autocast(self.device.type, torch.bfloat16):
                return self._results(called, *operands, model)

        for _ in range(2):  # compile, and give delayed scales a history
            run(self.sets[0])
            refresh(model)
        return run

    def check(self, name: str, found: list[Tensor]) -> Conformance:
        allowed = ALLOWED["bf16" if name == "bf16" else self.kind]
        errors = [float((f.float() - e).norm() / e.norm()) for f, e in zip(found, self.exact, strict=True)]
        worst = max(errors)
        reason = "" if worst <= allowed else f"errors {errors}, allowed {allowed}"
        return Conformance(worst <= allowed, worst, allowed, reason)

    def peak(self, run: Callable[[Any], Any]) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(self.sets[0])
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def measure(case: Case, ways: dict[str, Way], *, compiled: bool, repeats: int, deadline: float) -> list[dict[str, Any]]:
    rows, candidates = [], []
    for name, way in ways.items():
        row: dict[str, Any] = {"way": name}
        rows.append(row)
        if time.monotonic() > deadline:
            row["skipped"] = "out of time"
            continue
        try:
            run = case.prepare(way, compiled)
            verdict = case.check(name, run(case.sets[0]))
            row.update(error=verdict.error, peak_bytes=case.peak(run))
            candidates.append(Contender(name, [lambda s=s, r=run: r(s) for s in case.sets], verdict))
        except Exception as error:  # one way must not stop the others
            row["failed"] = f"{type(error).__name__}: {str(error)[:400]}"
    green = []
    for candidate in candidates:
        try:
            time_together(
                [candidate], case.device, repeats=1
            )  # capture alone first: what cannot be captured drops out here
            green.append(candidate)
        except Exception as error:
            next(r for r in rows if r["way"] == candidate.name)["failed"] = (
                f"{type(error).__name__}: {str(error)[:400]}"
            )
    timings = {t.name: t for t in time_together(green, case.device, repeats=repeats)} if green else {}
    base = timings.get("bf16")
    for row in rows:
        if timing := timings.get(row["way"]):
            us = timing.microseconds()
            row.update(us=us.value, us_low=us.low, us_high=us.high, method=timing.method)
            if base is not None:
                over = timing.speedup_over(base)
                row.update(speedup=over.value, speedup_low=over.low, speedup_high=over.high)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--only", default="linear,tower", help="linear, tower, or both")
    parser.add_argument("--modes", default="training,inference")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="MxKxN, comma-separated")
    parser.add_argument(
        "--ways", default="", help="comma-free substrings separated by '|': only ways that contain one (bf16 always)"
    )
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--smoke", action="store_true", help="CPU, emulation, tiny shapes, not compiled")
    options = parser.parse_args()
    device = torch.device("cpu" if options.smoke else "cuda")
    if not options.smoke and not torch.cuda.is_available():
        parser.error("this machine has no usable GPU; hint: --smoke")
    shapes = ["64x256x256"] if options.smoke else options.shapes.split(",")
    deadline = time.monotonic() + options.seconds
    torch._dynamo.config.recompile_limit = 64  # every way is another variant of the same forward
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu (emulated: no speed)"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "cases": []}
    words = [word for word in options.ways.split("|") if word]
    for text in shapes:
        for kind in options.only.split(","):
            for mode in options.modes.split(","):
                if time.monotonic() > deadline:
                    report.setdefault("skipped", []).append(f"{kind} {mode} {text}")
                    continue
                shape = tuple(int(part) for part in text.split("x"))
                ways = TRAINING if mode == "training" else INFERENCE
                ways = {n: w for n, w in ways.items() if not words or n == "bf16" or any(word in n for word in words)}
                begin = time.monotonic()
                torch.compiler.reset()
                case = Case(kind, mode == "training", shape, device)  # type: ignore[arg-type]
                rows = measure(
                    case, ways, compiled=not options.smoke, repeats=2 if options.smoke else options.repeats, deadline=deadline
                )  # fmt: skip
                report["cases"].append(
                    {"kind": kind, "mode": mode, "shape": shape, "sets": len(case.sets), "rows": rows}
                )
                options.out.write_text(json.dumps(report, indent=1) + "\n")
                describe(kind, mode, text, rows, time.monotonic() - begin)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    red = [row for case in report["cases"] for row in case["rows"] if "failed" in row and "torchao" not in row["way"]]
    return 1 if red else 0


def describe(kind: str, mode: str, shape: str, rows: list[dict[str, Any]], seconds: float) -> None:
    print(f"== {kind} {mode} {shape}, {seconds:.0f} s")
    for row in rows:
        if "us" in row:
            speed = f"{row['us']:9.1f} us  {row.get('speedup', float('nan')):5.2f}x"
            memory = "" if row.get("peak_bytes") is None else f"  peak {row['peak_bytes'] / 2**20:7.1f} MiB"
            print(f"  {row['way']:38s} {speed}  error {row['error']:.4f}{memory}")
        else:
            print(f"  {row['way']:38s} {row.get('failed') or row.get('skipped')}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
