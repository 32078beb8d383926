"""The speed bars of the models, measured on one GPU: what layout alone gains, and how near every family comes to the card's ceiling.

    python benchmarks/models.py --out models.json                     all of it
    python benchmarks/models.py --out models.json --only wukong       the layout comparison alone; --only dlrm,hstu: those families alone

Layout: Wukong's dense part written the obvious way (below), against loka's, with the same weights, the same function and the same settings:
n = 128, d = 128, k = 24, six layers, hidden 2048, B = 8192. Training is forward and backward under bf16 autocast; inference has bf16 weights and inputs.

Families: one training step (forward, loss, backward, no optimiser) of every family at a realistic size, in bf16, and the model FLOPs utilisation:
FLOPs of the products in forward times three, per second, over the ceiling of a large bf16 GEMM.

Every case is a process of its own. All compile at the same time, each with one static graph; then they take turns on the idle GPU: CUDA events,
medians, inputs larger than the L2 cache. With --out pointing to an existing file, cases already there are kept unless named by --only.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evidence import describe_run

CEILING = 790e12
"""bf16 GEMM of 8192^3 on random data on an H200, in FLOP/s"""
LAYOUT = ("wukong-plain-train", "wukong-loka-train", "wukong-plain-infer", "wukong-loka-infer")
FAMILIES = ("dlrm", "dcn", "dhen", "elfm", "interformer", "hstu", "onerec", "onerec-moe", "wukong-row")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="comma-separated cases, or a prefix of them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divide batches by this; with cpu, to test the script")
    parser.add_argument(
        "--limit-seconds", type=float, default=240, help="a case that has not compiled by then is dropped"
    )
    parser.add_argument("--start-when", type=Path, help="measure once this file exists: another job has left the GPU")
    parser.add_argument("--eager", action="store_true", help="do not compile; for testing the script")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run_case(arguments.case, arguments)
        return 0
    known = LAYOUT + FAMILIES
    wanted = [word for word in arguments.only.split(",") if word]
    cases = [case for case in known if not wanted or any(case.startswith(word) for word in wanted)]
    if not cases:
        parser.error(f"--only {arguments.only} matches none of {', '.join(known)}")
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"cases": {}}
    if not wanted:
        cases = [case for case in cases if "error" in report["cases"].get(case, {"error": ""})]
    run_cases(cases, arguments, report)
    print(describe(report))
    return 1 if any("error" in result for result in report["cases"].values()) else 0


def run_cases(cases: list[str], arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Compile all at once, then let one after the other measure."""
    deadline = time.monotonic() + arguments.limit_seconds
    report["environment"] = describe_run(arguments.device)
    children = {case: start_child(case, arguments) for case in cases}
    ready: list[str] = []
    for case, child in children.items():  # the slowest decides; a child that is ready waits
        line = read_line(child, deadline)
        if line == "ready":
            ready.append(case)
        else:
            child.kill()
            report["cases"][case] = {"error": line or "did not compile in time"}
    while arguments.start_when and not arguments.start_when.exists():  # a busy GPU is never measured
        time.sleep(0.5)
    for case in ready:
        child = children[case]
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
        line = read_line(child, time.monotonic() + 30)
        child.kill()
        report["cases"][case] = json.loads(line) if line.startswith("{") else {"error": line or "died while measuring"}
        print(f"{case}: {line[:300]}", file=sys.stderr, flush=True)
        report["layout"] = compare_layouts(report["cases"])
        arguments.out.write_text(json.dumps(report, indent=1))
    for child in children.values():
        child.wait()
    arguments.out.write_text(json.dumps(report, indent=1))


def start_child(case: str, arguments: argparse.Namespace) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        getattr(arguments, "script", __file__),
        "--out",
        str(arguments.out),
        "--case",
        case,
        "--device",
        arguments.device,
    ]
    command += ["--scale", str(arguments.scale), *(["--eager"] if arguments.eager else [])]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "2")}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def read_line(child: "subprocess.Popen[str]", deadline: float) -> str:
    """The next line that is for us; '' when the child has ended or the time is over."""
    import select

    assert child.stdout is not None
    while True:
        found, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not found:
            return ""
        line = child.stdout.readline()
        if not line or line.startswith("@"):
            return line[1:].strip()


def run_case(case: str, arguments: argparse.Namespace, build: Callable[..., Any] | None = None) -> None:
    """In the child: build, check, compile, wait for the word, measure."""
    start = time.perf_counter()
    try:
        step, facts = (build or build_case)(case, arguments)
        for _ in range(2):
            step()
        synchronize(arguments.device)
    except Exception as error:
        import traceback

        traceback.print_exc()
        print(f"@{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
        return
    facts["compile_s"] = round(time.perf_counter() - start, 1)
    release_memory(arguments.device)
    print("@ready", flush=True)
    sys.stdin.readline()
    facts["ms"], facts["ms_low"], facts["ms_high"] = measure(step, arguments.device)
    if "flops" in facts:
        facts["tflops"] = facts["flops"] / facts["ms"] / 1e9
        facts["mfu"] = facts["tflops"] * 1e12 / CEILING
    facts["profile"] = profile(step, arguments.device)
    if arguments.device == "cuda":
        import torch

        facts["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        facts["gpu"], facts["torch"] = torch.cuda.get_device_name(), torch.__version__
    print(f"@{json.dumps(facts)}", flush=True)


def release_memory(device: str) -> None:
    """Give back what the warm-up left in the allocator: others are still compiling."""
    if device == "cuda":
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def measure(step: Callable[[], Any], device: str, *, budget: float = 2.5) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of one step in ms."""
    import torch

    times: list[float] = []
    begin = time.perf_counter()
    for _ in range(3 if device == "cuda" else 0):
        step()
    while len(times) < 5 or (time.perf_counter() - begin < budget and len(times) < 100):
        if device == "cuda":
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            step()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        else:
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
    times.sort()
    return statistics.median(times), times[len(times) // 10], times[-1 - len(times) // 10]


KINDS = (
    ("attention", ("flash", "fmha", "attention", "silu_attn", "_forward_kernel", "_backward")),
    ("gemm", ("gemm", "nvjet", "cutlass", "splitk", "triton_tem", "cublas", "gemv", "mm_")),
    ("copy", ("memcpy", "copy_", "memset", "direct_copy")),
    ("reduction", ("triton_red", "triton_per", "triton_mix", "reduce_kernel", "layer_norm", "softmax")),
    ("element-wise", ("triton_poi", "elementwise")),
)


def profile(step: Callable[[], Any], device: str) -> dict[str, Any]:
    """Share of GPU time by kind of kernel, and the longest kernels, over three steps."""
    import torch
    from torch.profiler import ProfilerActivity

    if device != "cuda":
        return {}
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for event in trace.events():
        name = event.name.lower()
        if event.device_type != torch.autograd.DeviceType.CUDA or name.startswith("##") or "torch-compiled" in name:
            continue  # not a kernel, or a marked region that holds kernels counted on their own
        kind = next((kind for kind, words in KINDS if any(word in name for word in words)), "other")
        spent[kind] = spent.get(kind, 0.0) + event.time_range.elapsed_us() / 3e3
        kernels.setdefault(event.name[:110], []).append(event.time_range.elapsed_us() / 3e3)
    longest = sorted(kernels.items(), key=lambda pair: -sum(pair[1]))[:14]
    total = sum(spent.values())
    return {
        "gpu_ms": total,
        "share": {kind: value / total for kind, value in sorted(spent.items(), key=lambda pair: -pair[1])}
        if total
        else {},
        "longest": [{"name": name, "ms": sum(values), "calls": len(values) / 3} for name, values in longest],
    }


def compare_layouts(cases: dict[str, Any]) -> dict[str, float]:
    found = {}
    for kind in ("train", "infer"):
        plain, ours = cases.get(f"wukong-plain-{kind}", {}), cases.get(f"wukong-loka-{kind}", {})
        if "ms" in plain and "ms" in ours:
            found[kind] = plain["ms"] / ours["ms"]
    return found


def describe(report: dict[str, Any]) -> str:
    lines = [f"{'case':20} {'ms':>9} {'10-90 %':>17} {'TFLOP/s':>8} {'MFU':>6}  share of GPU time"]
    for case, result in report["cases"].items():
        if "error" in result:
            lines.append(f"{case:20} failed: {result['error']}")
            continue
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in result["profile"].get("share", {}).items())
        spread = f"{result['ms_low']:.2f} - {result['ms_high']:.2f}"
        lines.append(
            f"{case:20} {result['ms']:9.3f} {spread:>17} {result.get('tflops', math.nan):8.0f} {result.get('mfu', math.nan):6.1%}  {shares}"
        )
    lines += [f"layout alone, {kind}: {gain:.2f}x" for kind, gain in report.get("layout", {}).items()]
    return "\n".join(lines)


def build_case(case: str, arguments: argparse.Namespace) -> tuple[Callable[[], Any], dict[str, Any]]:
    import models_cases

    return models_cases.build(case, arguments.device, scale=arguments.scale, compiled=not arguments.eager)


if __name__ == "__main__":
    sys.exit(main())
