"""The exported package of a frozen model beside the converted model it came from: the difference of their results, and their latencies.

    python benchmarks/export_zoo.py --models dlrm,wukong --out export_zoo.json

The model is converted by the plan that places every chain, calibrated and frozen, in bf16; timed compiled (default mode) and as the loaded AOTInductor package, in turns, on the same input. Neither side is in a CUDA
graph: a package has none of its own. On a machine without a GPU `--rows 64 --device cpu` shows that it runs; its times say nothing.
"""

import argparse
import faulthandler
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent))
import zoo

import loka
from loka.placing import plan_everything
from loka.records import capture_environment

TURNS, REPEATS = 7, 20


def clock(run, device):
    """Milliseconds of one call: the median over calls."""
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - begin))
    return statistics.median(taken)


@torch.no_grad()
def prepare(name, device, rows):
    """A model frozen in FP8, compiled and packaged; what can be said before anything is timed."""
    torch.manual_seed(0)
    model, inputs = zoo.make(name, device)
    inputs = tuple(x[:rows] if rows else x for x in inputs)
    model = model.to(device)
    if device == "cuda":
        model, inputs = model.to(torch.bfloat16), tuple(x.to(torch.bfloat16) for x in inputs)
    model.eval()
    with torch.enable_grad():
        plan = plan_everything(model, inputs, serving=True)
    loka.convert(model, plan, freeze=True)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        made = loka.export(model, inputs, Path(folder) / "model.pt2")
        seconds, size = time.perf_counter() - begin, made.path.stat().st_size
        print(f"{name}: packaged in {seconds:.0f} s, differs by {made.difference:.2g}", flush=True)
        package = torch._inductor.aoti_load_package(str(made.path))
    compiled = torch.compile(model, dynamic=False)
    runs = {"compiled": lambda: compiled(*inputs), "package": lambda: package(*inputs)}
    for run in runs.values():
        for _ in range(3):
            run()
    return runs, {"model": name, "rows": inputs[0].shape[0], "chains": list(made.low_precision), "difference": made.difference, "moved": made.moved, "export_s": seconds, "bytes": size}  # fmt: skip


@torch.no_grad()
def measure(runs, device):
    """Both in turns."""
    times = {kind: [] for kind in runs}
    for _ in range(TURNS):
        for kind, run in runs.items():
            times[kind].append(clock(run, device))
    ratios = [a / b for a, b in zip(times["package"], times["compiled"], strict=True)]
    return {"ms": {kind: statistics.median(values) for kind, values in times.items()}, "package_over_compiled": [statistics.median(ratios), min(ratios), max(ratios)]}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dlrm,wukong")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start-when", type=Path, help="compile at once, time when this file is there: when the card is free")  # fmt: skip
    given = parser.parse_args()
    faulthandler.enable()  # a package that ends the process says where
    made = [prepare(name, given.device, given.rows) for name in given.models.split(",")]
    while given.start_when is not None and not given.start_when.exists():
        time.sleep(0.2)
    rows = [facts | measure(runs, given.device) for runs, facts in made]
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    command = f"benchmarks/export_zoo.py --models {given.models} --out {given.out.name}"
    environment = msgspec.to_builtins(capture_environment(command=command, device=device))
    given.out.write_text(json.dumps({"command": command, "environment": environment, "rows": rows}, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
