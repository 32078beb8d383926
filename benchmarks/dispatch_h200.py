"""What every GEMM of the built-in models costs on one GPU, and whether dispatch chooses well from it. Time-boxed; run it again to go on.

    PYTHONPATH=src python benchmarks/dispatch_h200.py --out results/dispatch --seconds 240
    PYTHONPATH=src python benchmarks/dispatch_h200.py --out results/dispatch --seconds 240 --first models     more rows, the same files
    PYTHONPATH=src python benchmarks/dispatch_h200.py --out /tmp/dispatch --smoke                             CPU, tiny shapes: does it run?

Needs torch, triton, numpy and msgspec; kernel libraries that can be imported join in. Writes, every ten seconds and at the end,

    rows.json       a PerformanceRows record: what `loka db merge` reads and what ships in src/loka/dispatch/measured
    dispatch.json   per shape and GEMM: what was chosen from the first timing, what a second timing says of it, of bf16 and of the best

Four groups of jobs, by priority: `shapes`, the 44 shapes of the bar (fprop of all of them first, then dgrad and wgrad), each timed twice; `wukong`,
the GEMMs of Wukong's plain and 8192-wide configurations; `models`, those of every other built-in model; `chains`, bare and fused
kernels of Wukong's towers. Known rows are not measured again.

The bar: over the shapes, the speed of the choice is at least 0.97 of the oracle's (geometric mean; the oracle is the best of the second timing, bf16
included, among kernels that are right and accurate enough), and never more than 3 % slower than bf16. The choice is made by `loka.dispatch` from the first
timing at the bucket's M, with the error on N(0, 1) as its evidence. Exit 0: met. 1: missed, or not enough shapes were measured.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from loka.dispatch.database import Database, bucket_of
from loka.dispatch.policy import Policy, choose
from loka.dispatch.recipe import RECIPES, USUAL
from loka.dispatch.rows import LINEAR, linear_variant, machine_here, origin_of, rows_of_bench, rows_of_timings
from loka.kernels import registry
from loka.kernels.scaled_mm import GemmWay
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure import bench
from loka.measure.device import snapshot
from loka.measure.site import OURS, SiteJob, SiteTiming, decode_timing, encode_case, time_case
from loka.records import GEMMS, Candidate, Gemm, Interval, load, to_json, write_atomically
from loka.records.performance import Peaks, PerformanceRow, PerformanceRows

SHAPES = [
    (8192, 1024, 1024), (2048, 2048, 2048), (64, 1024, 1024), (32768, 1024, 1024), (8192, 479, 1024), (512, 256, 256),
    (2048, 256, 768), (1024, 128, 128), (8192, 4096, 4096), (512, 4096, 1024), (1000, 479, 1024), (4096, 1408, 5632),
    (64, 4096, 4096), (2048, 1024, 1024), (8192, 13, 512), (2048, 3072, 2048), (32768, 256, 256), (512, 1024, 4096),
    (8192, 512, 512), (1024, 16384, 2048), (16384, 512, 128), (2048, 4096, 4096), (3000, 1408, 1408), (256, 2048, 2048),
    (8192, 2048, 4096), (4096, 640, 640), (8192, 27, 256), (64, 16384, 1024), (16384, 2048, 2048), (512, 3072, 2048),
    (4096, 1792, 1792), (8192, 8192, 2048), (2048, 512, 512), (32768, 4096, 1024), (1000, 2048, 512), (4096, 896, 7168),
    (512, 8192, 8192), (8192, 256, 256), (1024, 1024, 479), (8192, 8192, 8192), (16384, 1024, 256), (256, 512, 2048),
    (32768, 1024, 16384), (8192, 1536, 2048),
]  # fmt: skip
SLOW = "torchao"  # tunes 48 configurations for every new shape, tens of seconds: only when asked for
BARS = {"oracle": 0.97, "slowdown": 1.03, "shapes": 30}
POLICIES = {"any gain": Policy(min_speedup=1.0), "default": Policy(min_speedup=1.05)}


Candidates = dict[Gemm, tuple[GemmWay, ...]]


def candidates_for(gemm: Gemm, backends: list[str]) -> tuple[GemmWay, ...]:
    pairs = dict.fromkeys(o for name in USUAL if (o := RECIPES[name].operands(gemm)) is not None)
    return tuple(o.on(backend) for o in pairs for backend in backends)


def linears_of(family: str, size: str) -> list[tuple[int, int]]:
    from loka.models import build

    with torch.device("meta"):
        model = build(family, size)
    found = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    return [(k, n) for k, n in dict.fromkeys(found) if n > 1 and k * n <= 1 << 28]


def model_shapes(group: str) -> list[tuple[int, int, int]]:
    """M x K x N of built-in models, the largest batch first; sequence models see tokens, not examples."""
    if group == "wukong":
        sizes = [("wukong", "plain"), ("wukong", "8x96x3x8192")]
        return [(m, k, n) for family in sizes for m in (8192, 2048, 1024) for k, n in linears_of(*family)]
    rankers = [("dlrm", "large"), ("dcn", "large"), ("dhen", "large"), ("interformer", "medium"), ("wukong", "4x32x3x2048"),
               ("wukong", "2x8x3x2048"), ("wukong", "8x48x3x4096"), ("elfm", "large")]  # fmt: skip
    tokens = [
        ("hstu", "base"),
        ("hstu", "xlarge"),
        ("onerec", "0.5b"),
        ("onerec", "4b-a0.5b"),
        ("onerec", "0.1b"),
        ("onerec", "1b"),
    ]
    shapes = [(m, k, n) for m in (8192, 2048, 1024) for family in rankers for k, n in linears_of(*family)]
    return shapes + [(m, k, n) for m in (32768, 8192, 512) for family in tokens for k, n in linears_of(*family)]


class Run:
    """The files of a run, and what is left of its time."""

    def __init__(self, out: Path, seconds: float, device: str, repeats: int) -> None:
        self.out, self.end, self.device, self.repeats = out, time.monotonic() + seconds, device, repeats
        self.written = 0.0
        self.environment = snapshot()
        self.machine = machine_here(self.environment)
        self.database = Database(":memory:")
        self.pairs: dict[str, Any] = {}
        out.mkdir(parents=True, exist_ok=True)
        if (out / "rows.json").exists():
            self.database.merge(load(out / "rows.json", PerformanceRows))
        if (out / "dispatch.json").exists():
            self.pairs = json.loads((out / "dispatch.json").read_text())["pairs"]
        self.refuse_the_last_crash()

    def refuse_the_last_crash(self) -> None:
        """A job that ended the process before: its candidates of other people's libraries (all, if there are none) get that as their row."""
        marker = self.out / "running.json"
        if not marker.exists():
            return
        fields = json.loads(marker.read_text())
        job = job_of(fields)
        job = replace(job, m=bucket_of(job.m))
        suspects = [c for c in job.candidates if c.backend not in OURS] or list(job.candidates)
        timings = [SiteTiming(c, refusal="the process ended while this job ran") for c in suspects]
        self.database.add(origin_of(self.environment), rows_of_timings(job, timings, self.machine.versions))
        marker.unlink()

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def measure(self, job: SiteJob) -> list[SiteTiming]:
        """Right, then timed, in this process: a crash is found again by its marker."""
        options = {"device": self.device, "repeats": self.repeats, "distributions": ["normal"]}
        case = encode_case(job, job.candidates, options)
        (self.out / "running.json").write_text(json.dumps(case))
        try:
            answers = time_case(**case, seconds=max(self.end - time.monotonic(), 0.0) + 5)
        except Exception as error:  # out of memory in drawing operands: say so and go on
            answers = [{"refusal": f"not timed: {type(error).__name__}: {str(error)[:200]}"}] * len(job.candidates)
        if self.device != "cpu":
            self.stop_if_poisoned()
        (self.out / "running.json").unlink()
        return [decode_timing(c, answer) for c, answer in zip(job.candidates, answers, strict=True)]

    def stop_if_poisoned(self) -> None:
        """After a kernel that broke the CUDA context every later answer would be its fault: leave the marker, and let the next run go on."""
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            self.write()
            sys.exit(f"a kernel broke the CUDA context ({str(error)[:200]}); run again to go on after it")

    def tune(self, job: SiteJob) -> None:
        """Rows of a job at its bucket's edge, unless they are known."""
        edge = replace(job, m=bucket_of(job.m))
        missing = [c for c in job.candidates if self.find(edge, c) is None]
        if missing:
            timings = self.measure(replace(edge, candidates=tuple(missing)))
            self.database.add(origin_of(self.environment), rows_of_timings(edge, timings, self.machine.versions))

    def find(self, job: SiteJob, c: GemmWay) -> PerformanceRow | None:
        variant = linear_variant(job.gemm, str(c.a), str(c.b), fast_accum=c.fast_accum, weights=job.weights)
        where = {"m": bucket_of(job.m), "k": job.k, "n": job.n, "backend": c.backend}
        found = self.database.entries(op=LINEAR, variant=variant, **where, version=self.machine.versions[c.backend])
        return next((row for _, row in found), None)

    def judge(self, job: SiteJob) -> None:
        """Choose from the rows, time everything a second time at the real M, and compare."""
        name = f"{job.gemm} {job.m}x{job.k}x{job.n}"
        if name in self.pairs:
            return
        rows = {c: row for c in job.candidates if (row := self.find(job, c)) is not None}
        again = {t.candidate: t for t in self.measure(job)}
        timed = {c: t for c, t in again.items() if t.speedup is not None and c in rows}
        if not timed:
            return
        fair = [c for c in timed if rows[c].errors and error_under_limit(job.gemm, rows[c])]
        best = max([1.0, *(timed[c].speedup.value for c in fair)])
        entry: dict[str, Any] = {"gemm": job.gemm, "shape": [job.m, job.k, job.n], "bf16_us": next(iter(timed.values())).baseline.value, "oracle_speedup": best}  # fmt: skip
        for label, policy in POLICIES.items():
            choice = choose([option_of(job.gemm, c, row) for c, row in rows.items()], job.gemm, policy)
            picked = next(
                (c for c in rows if (str(c.a), str(c.b), c.backend) == (choice.a, choice.b, choice.backend)), None
            )
            got = again[picked].speedup if picked is not None else None
            entry[label] = {
                "choice": "bf16" if picked is None else str(picked),
                "speedup": 1.0 if picked is None else (got.value if got else None),
                "expected": choice.expected_speedup,
                "why": choice.reason,
                "red": picked is not None and got is None,
            }
        self.pairs[name] = entry

    def write(self, *, every: float = 0.0) -> None:
        """Both files; at most once in `every` seconds, since writing thousands of rows takes as long as a measurement."""
        if time.monotonic() - self.written < every:
            return
        self.written = time.monotonic()
        record = self.database.export()
        write_atomically(self.out / "rows.json", to_json(record))
        summary = summarise(self.pairs)
        data = {"environment": msgspec.to_builtins(self.environment), "summary": summary, "pairs": self.pairs}
        write_atomically(self.out / "dispatch.json", json.dumps(data, indent=1).encode())


def error_under_limit(gemm: Gemm, row: PerformanceRow) -> bool:
    errors, policy = row.errors["normal"], Policy()
    return (errors.mere if gemm == "fprop" else errors.relative_l2) <= policy.limit(gemm)


def option_of(gemm: Gemm, c: GemmWay, row: PerformanceRow) -> Candidate:
    recipe = next(r.name for r in RECIPES.values() if (o := r.operands(gemm)) and (o.a, o.b) == (c.a, c.b))
    known = {name: row.errors["normal"] for name in ("normal",) if row.errors}
    error = {k: Interval(value=v, low=v, high=v) for k, v in (("mere", known["normal"].mere), ("relative_l2", known["normal"].relative_l2))} if known else {}  # fmt: skip
    return Candidate(
        gemm=gemm, recipe=recipe, backend=c.backend, a=str(c.a), b=str(c.b), refusal=row.refusal,
        microseconds=row.microseconds, speedup=row.speedup, speed_source="this run", **error,
    )  # fmt: skip


def job_of(case: dict[str, Any]) -> SiteJob:
    made = [GemmWay.parse(c["way"], fast_accum=c["fast_accum"]) for c in case["candidates"]]
    return SiteJob(case["gemm"], case["m"], case["k"], case["n"], tuple(made), case["weights"])


def summarise(pairs: dict[str, Any]) -> dict[str, Any]:
    """The bar, for each policy, over fprop and over all GEMMs."""
    found: dict[str, Any] = {}
    for label in POLICIES:
        for scope, gemms in (("fprop", ("fprop",)), ("all", GEMMS)):
            some = [p for p in pairs.values() if p["gemm"] in gemms]
            red = [name for name, p in pairs.items() if p in some and p[label]["red"]]
            good = [p for p in some if not p[label]["red"]]
            if not good:
                continue
            ratios = [p[label]["speedup"] / p["oracle_speedup"] for p in good]
            worst = min(good, key=lambda p: p[label]["speedup"])
            found[f"{label}, {scope}"] = {
                "gemms": len(good),
                "of_oracle": math.exp(sum(math.log(r) for r in ratios) / len(ratios)),
                "worst_of_oracle": min(ratios),
                "slowdown_against_bf16": 1 / worst[label]["speedup"],
                "slowest": f"{worst['gemm']} {worst['shape']} {worst[label]['choice']}",
                "mean_speedup": math.exp(sum(math.log(p[label]["speedup"]) for p in good) / len(good)),
                "low_precision": sum(p[label]["choice"] != "bf16" for p in good),
                "red": red,
            }
    return found


CHAINS: dict[str, tuple[list[str], list[str] | None]] = {  # op -> variants, backends
    "fused_linear": (["e4m3:tensor@e4m3:tensor>e4m3:tensor:static", "e4m3:tensor@e4m3:tensor>bfloat16"], ["triton"]),
    "norm_quantize": ([f"{norm}>{spec}|hard_swish" for norm in ("block", "rms") for spec in ("e4m3:tensor:static", "e4m3:row", "e4m3:1x128")], ["triton"]),
    "quantize": (["e4m3:tensor", "e4m3:row", "e4m3:1x128"], ["triton"]),
    "scaled_mm": (["e4m3:tensor@e4m3:tensor|fast", "e4m3:row@e4m3:row|fast", "e4m3:1x128@e4m3:128x128"], ["torch", "triton"]),
}  # fmt: skip
CHAIN_SHAPES = [(m, k, n) for k, n in ((2048, 2048), (1536, 2048), (2048, 4096), (1024, 1024)) for m in (8192, 2048)]


def measure_chains(run: Run) -> None:
    """Bare kernels of fused towers, one shape after the other, until the time is over."""
    for shape in CHAIN_SHAPES:
        for op, (variants, backends) in CHAINS.items():
            known = {row.op for _, row in run.database.entries(op=op, m=shape[0], k=shape[1])}
            if known and op in ("quantize", "norm_quantize"):
                continue
            if run.over or any(True for _ in run.database.entries(op=op, m=shape[0], k=shape[1], n=shape[2])):
                continue
            config = bench.BenchConfig(
                op=op, shapes=[shape], variants=variants, backends=backends, device=run.device, repeats=run.repeats,
                isolate=False, distributions=("normal",),
            )  # fmt: skip
            try:
                imported = rows_of_bench(bench.run(config, ceilings=Peaks(copy_bytes_per_second=1.0)))
                run.database.add(imported.origin, imported.rows)
            except Exception as error:  # one op that fails must not end the others
                print(f"{op} {shape}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            run.write(every=10.0)


def jobs_of(group: str, candidates: Candidates, shapes: list[tuple[int, int, int]]) -> list[tuple[SiteJob, bool]]:
    """Jobs in order, and whether each is judged a second time."""
    if group == "shapes":
        return [
            (SiteJob(gemm, m, k, n, candidates[gemm]), True)
            for gemms in (("fprop",), ("dgrad", "wgrad"))
            for m, k, n in shapes
            for gemm in gemms
        ]
    jobs = []
    for m, k, n in dict.fromkeys(model_shapes(group)):
        for gemm, weights in (("fprop", "dynamic"), ("dgrad", "dynamic"), ("wgrad", "dynamic"), ("fprop", "cached"), ("dgrad", "cached")):  # fmt: skip
            jobs.append((SiteJob(gemm, m, k, n, candidates[gemm], weights), False))
    return jobs


def usable(device: str, wanted: list[str] | None) -> Candidates:
    """Candidates that can run here at all; the others are named once instead of in a row of every shape."""
    names = wanted or [b for b in registry.BACKENDS["scaled_mm"] if b not in ("reference", SLOW)]
    found: Candidates = {}
    for gemm in GEMMS:
        able = []
        for c in candidates_for(gemm, names):
            call = MatmulCall(2048, 1024, 1024, c.a, c.b, torch.bfloat16, c.fast_accum)
            verdict = registry.backend("scaled_mm", c.backend).supports(call, torch.device(device))
            if verdict:
                able.append(c)
            else:
                print(f"left out: {gemm} {c}: {verdict.reason}", flush=True)
        found[gemm] = tuple(able)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--first", choices=("shapes", "wukong", "models", "chains"), default="shapes")
    parser.add_argument("--backends", help="comma-separated; default: all that can run, torchao's slow tuner excepted")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--gemms", default=",".join(GEMMS), help="only these")
    parser.add_argument("--smoke", action="store_true", help="CPU, emulation, two tiny shapes")
    options = parser.parse_args(arguments)
    device = "cpu" if options.smoke else "cuda"
    wanted = ["reference"] if options.smoke else (options.backends.split(",") if options.backends else None)
    candidates = usable(device, wanted)
    if not any(candidates.values()):
        print("no backend can run here")
        return 1
    run = Run(options.out, options.seconds, device, 3 if options.smoke else options.repeats)
    groups = [options.first, *(g for g in ("shapes", "wukong", "models", "chains") if g != options.first)]
    shapes = [(64, 48, 32), (20, 13, 27)] if options.smoke else SHAPES
    done = 0
    for group in groups[:1] if options.smoke else groups:
        if group == "chains":
            if options.gemms == ",".join(GEMMS):
                measure_chains(run)
            continue
        for job, judged in jobs_of(group, candidates, shapes):
            if run.over:
                break
            if job.gemm not in options.gemms.split(","):
                continue
            begin = time.monotonic()
            run.tune(job)
            if judged:
                run.judge(job)
            if time.monotonic() - begin > 0.05:  # something was measured
                done += 1
                run.write(every=10.0)
    run.write()
    summary = summarise(run.pairs)
    for name, found in summary.items():
        print(f"{name}: {found['gemms']} GEMMs, {found['of_oracle']:.3f} of the oracle (worst {found['worst_of_oracle']:.3f}), "
              f"mean {found['mean_speedup']:.2f}x, slowest {1 / found['slowdown_against_bf16']:.3f}x of bf16 ({found['slowest']}), red {found['red']}")  # fmt: skip
    print(
        f"{done} jobs measured, {len(run.database)} rows, {len(run.pairs)} judged; time {'over' if run.over else 'left'}"
    )
    if options.smoke:
        print("a walk through the script on the emulation: no bar was measured")
        return 0
    bar = summary.get("any gain, fprop")
    met = bar is not None and bar["gemms"] >= BARS["shapes"] and not bar["red"]
    met = met and bar["of_oracle"] >= BARS["oracle"] and bar["slowdown_against_bf16"] <= BARS["slowdown"]
    print(f"bar {'met' if met else 'MISSED'}: {BARS}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
