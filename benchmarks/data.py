"""The data bars, measured: preprocessing time, loader speed on one core, memory while streaming a set ten times the limit.

    python benchmarks/data.py --movielens FOLDER
    python benchmarks/data.py --limit-mb 256 --json

Loader speed is wall time of one shuffled epoch in batches of 4,096, files in the page cache, one thread; the first epoch does not count.
Memory is measured in a child process of its own: the growth of its peak resident size over what it had after its imports, while it streams
a cached synthetic set ten times the limit. The set is built in another child, whose growth is reported too.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH = 4096
BYTES_PER_ROW = 200  # of the synthetic set below, rounded down; the real size is measured
TARGETS = {"movielens_seconds": 30.0, "examples_per_second": 200_000.0, "factor": 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--movielens", type=Path, help="folder with ml-1m.zip or its .dat files; skipped without")
    parser.add_argument("--limit-mb", type=int, default=128, help="memory limit for streaming (default 128)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=("build", "stream"), help=argparse.SUPPRESS)
    parser.add_argument("--child-root", help=argparse.SUPPRESS)
    parser.add_argument("--child-rows", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.child:
        print(json.dumps(run_child(arguments.child, arguments.child_root, arguments.child_rows)))
        return
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory() as folder:
        if arguments.movielens:
            result["movielens"] = measure_preprocessing(arguments.movielens, folder)
        result["loader"] = measure_loader(folder)
        result["memory"] = measure_memory(folder, arguments.limit_mb)
    print(json.dumps(result, indent=1) if arguments.json else describe(result))


def measure_preprocessing(source: Path, root: str) -> dict[str, Any]:
    from loka.data import load

    start = time.perf_counter()
    data = load("ml-1m", root=root, source=source)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "ratings": len(data.train) + len(data.valid) + len(data.test), **_speed(data.train)}


def measure_loader(root: str) -> dict[str, Any]:
    from loka.data import load

    click_log = load("synthetic", rows=1_000_000, cached=True, root=root)
    start = time.perf_counter()
    journey = load("complete-journey", root=root)
    seconds = time.perf_counter() - start
    return {
        "complete-journey": {"build_seconds": seconds, **_speed(journey.train)},
        "synthetic, 13 dense + 26 ids + history": _speed(click_log.train),
    }


def measure_memory(root: str, limit_mb: int) -> dict[str, Any]:
    rows = TARGETS["factor"] * (limit_mb << 20) // BYTES_PER_ROW
    build = _spawn("build", root, int(rows))
    stream = _spawn("stream", root, int(rows))
    return {
        "limit_mb": limit_mb,
        "set_mb": build["set_mb"],
        "rows": int(rows),
        "build_seconds": build["seconds"],
        "build_growth_mb": build["growth_mb"],
        "stream_seconds": stream["seconds"],
        "stream_growth_mb": stream["growth_mb"],
        "stream_baseline_mb": stream["baseline_mb"],
        "examples_per_second": rows / stream["seconds"],
        "within_limit": stream["growth_mb"] <= limit_mb,
    }


def run_child(what: str, root: str, rows: int) -> dict[str, Any]:
    import torch

    from loka.data import load

    torch.set_num_threads(1)
    small = load("synthetic", rows=BATCH, cached=True, root=f"{root}/warm-{what}")  # lazy imports count as baseline
    next(small.train.batches(BATCH, shuffle=True, seed=0))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    baseline = _memory_mb("VmRSS")
    start = time.perf_counter()
    data = load("synthetic", rows=rows, cached=True, root=root, verify=False)
    if what == "stream":
        for _ in data.train.batches(BATCH, shuffle=True, seed=0):
            pass
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in Path(data.info["folder"]).rglob("*") if path.is_file())
    return {
        "seconds": seconds,
        "baseline_mb": baseline,
        "growth_mb": _memory_mb("VmHWM") - baseline,
        "set_mb": size / (1 << 20),
    }


def describe(result: dict[str, Any]) -> str:
    lines = [f"data on {result['machine']}, Python {result['python']}"]
    if movielens := result.get("movielens"):
        lines.append(
            f"  MovieLens 1M preprocessed in {movielens['seconds']:.1f} s (bar: {TARGETS['movielens_seconds']:.0f} s), "
            f"streams {movielens['examples_per_second']:,.0f} examples/s"
        )
    else:
        lines.append("  MovieLens 1M: skipped, no folder given (--movielens FOLDER)")
    for name, found in result["loader"].items():
        lines.append(f"  {name}: {found['examples_per_second']:,.0f} examples/s on one core (bar: 200,000)")
    memory = result["memory"]
    lines.append(
        f"  streaming {memory['set_mb']:,.0f} MB with a limit of {memory['limit_mb']} MB: peak growth "
        f"{memory['stream_growth_mb']:.0f} MB over {memory['stream_baseline_mb']:.0f} MB, "
        f"{'within' if memory['within_limit'] else 'OVER'} the limit, {memory['examples_per_second']:,.0f} examples/s; "
        f"building it grew by {memory['build_growth_mb']:.0f} MB"
    )
    return "\n".join(lines)


def _speed(split: Any) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    times = []
    for epoch in range(4):
        start = time.perf_counter()
        for _ in split.batches(BATCH, shuffle=True, seed=0, epoch=epoch):
            pass
        times.append(time.perf_counter() - start)
    return {"examples": len(split), "examples_per_second": len(split) / sorted(times[1:])[1]}


def _spawn(what: str, root: str, rows: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", what, "--child-root", root, "--child-rows", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the {what} child failed:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def _memory_mb(what: str) -> float:
    """Read VmRSS or VmHWM (the peak) of this process.

    Not getrusage: its ru_maxrss survives exec, so a child starts with the peak of its parent.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {what}; this measurement needs Linux")


if __name__ == "__main__":
    main()
