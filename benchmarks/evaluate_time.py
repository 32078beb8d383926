"""How long `probe.evaluate()` takes, with and without compiled kernels to start from.

    python benchmarks/evaluate_time.py --out evaluate_time.json                          on a GPU, a minute and a half
    python benchmarks/evaluate_time.py --device cpu --rows 64 --models dlrm --out x.json dry run

The plain models of benchmarks/zoo.py, a few training steps, then `evaluate` with its defaults: every recipe and backend, conformance, errors on every distribution, and times. Each model twice, in processes
of their own: with an empty cache of Triton (`cold`: the first look on a machine) and with the cache that this left (`warm`). Bar: 1.5 s a linear.

    chains_s      judging the kernels of the model's chains and of its linears at the step's own shapes
    kernels_s     judging the kernels of all candidates, which compiles them side by side
    sites_s       errors and times, linear by linear
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import zoo
from evidence import describe_run

BAR = 1.5
STEPS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="wukong,dlrm")
    parser.add_argument(
        "--caches", default="cold,warm", help="cold, or cold,warm: the second takes what the first left"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, help="of a batch, instead of each model's own")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.caches not in ("cold", "cold,warm"):
        parser.error(f"--caches {a.caches}: expected cold, or cold,warm")
    if a.one:
        print("TIMED " + json.dumps(evaluate(a.one, a.device, a.rows)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process that is timed ends, too
    body = {"environment": describe_run(a.device), "bar_seconds_a_linear": BAR, "rows": []}
    for model in a.models.split(","):
        with tempfile.TemporaryDirectory() as cache:
            for cached in a.caches.split(","):
                row = {"model": model, "cache": cached, **run(model, a, cache)}
                body["rows"].append(row)
                a.out.write_text(json.dumps(body, indent=1))
                print(row, flush=True)
    return 0


def run(model: str, a: argparse.Namespace, cache: str) -> dict:
    """Time one evaluation in a process of its own."""
    command = [sys.executable, __file__, "--one", model, "--device", a.device, "--out", str(a.out)]
    command += [] if a.rows is None else ["--rows", str(a.rows)]
    done = subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    return json.loads(done.stdout.rpartition("TIMED ")[2])


def evaluate(name: str, device: str, rows: int | None) -> dict:
    """Train a few steps with a Probe attached, and time its evaluation."""
    from loka.probe import Probe

    if rows is not None:
        zoo.ROWS[name] = rows
    torch.manual_seed(0)
    with torch.device(device):
        model, inputs = zoo.make(name, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    probe = Probe(model, every=1)
    for _ in range(STEPS):
        with torch.autocast(device, torch.bfloat16):
            output = model(*inputs)
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        probe.step()
    phases: dict[str, float] = {}

    def hear(site: str, done: int, total: int) -> None:
        phases.setdefault("kernels" if site == "kernels" else "sites", time.perf_counter())

    began = time.perf_counter()
    report = probe.evaluate(progress=hear)
    ended = time.perf_counter()
    linears = len(report.record.sites)
    sites = phases.get("sites", ended)
    kernels = phases.get("kernels", sites)
    return {
        "linears": linears,
        "seconds": ended - began,
        "seconds_a_linear": (ended - began) / linears,
        "chains_s": kernels - began,
        "kernels_s": sites - kernels,
        "sites_s": ended - sites,
    }


if __name__ == "__main__":
    sys.exit(main())
