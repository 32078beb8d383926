"""The engine on a GPU: latency and throughput of OneRec-V2 4B-A0.5B in bf16 and FP8, beside what a user would run, in one process.

    python benchmarks/onerec_engine.py --out onerec_512.json --contexts 512 --seconds 400
    python benchmarks/onerec_engine.py --out onerec_3000.json --contexts 3000 --seconds 400
    python benchmarks/onerec_engine.py --record-of onerec_512.json --out engine_bench.json        for `loka report`
    python benchmarks/onerec_engine.py --out x.json --device cpu --size tiny-moe --contexts 16 --batches 2,1 --beams 20 --compiler eager    dry run

Rows, each for a context length and a batch size:

    eager          (a) the plain model, eager bf16
    graph              the plain model in a CUDA graph
    compiled       (b) the plain model compiled, static shapes, CUDA graph, torch grouped GEMM, torch.topk
    fused              this engine in bf16 with torch.topk
    bf16           (c) this engine in bf16, everything on
    fp8 linears        attention and dense FFN linears in FP8, experts in bf16
    fp8            (d) all of it, by `loka.quantize(model, "onerec")`
    fp8 rows           the same with experts scaled per row, by the recipe "onerec_rows"
    fp8 mixed          the same with experts' gate and up scaled per row, down in blocks, by the recipe "onerec_mixed"
    fp8 mixed context  that, with the context in E4M3 and attention to it in FP8, by `context_cache="e4m3"`

First the correctness: the engine in bf16 against the plain search, and FP8 against bf16, as overlap of beam sets. Then the rows, most important first, until
--seconds is over; the file is written again after every row, and a row that fails is a row with its error. Weights are random with the statistics of trained
ones, the router's load is skewed. Latency: median of repeated batches, events around the graph; `end_to_end_ms` adds padding, copies and the way back.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_record import EngineBar, EngineBench, EngineProfile, EngineRow
from onerec_baselines import make_compiled, make_plain
from onerec_costs import classify_kernel, count_costs
from onerec_synthetic import make_trained_like, share_weights

from loka.inference import Engine, EngineConfig, estimate_memory
from loka.inference.request import make_histories, pad_requests
from loka.metrics import BeamOverlap
from loka.models import configure
from loka.models.onerec import OneRec
from loka.nn import GroupedLinear, MixtureOfExperts
from loka.ptq import quantize
from loka.records import (
    Environment,
    Interval,
    capture_environment,
    save,
)

PLAIN = ("eager", "graph", "compiled")
LOW = {
    "fp8": "onerec",
    "fp8 rows": "onerec_rows",
    "fp8 mixed": "onerec_mixed",
    "fp8 mixed context": "onerec_mixed",
}  # variant: recipe
ENGINES = ("bf16", *LOW, "fp8 linears", "fused")
PEAKS = {
    "bf16 TFLOP/s": 790.0,
    "fp8 TFLOP/s": 1300.0,
    "TB/s": 4.3,
}  # measured on one H200: GEMMs and copies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="4b-a0.5b")
    parser.add_argument("--contexts", default="512,3000")
    parser.add_argument("--batches", default="8,1,16,2,4")
    parser.add_argument("--compiled-batches", default="8,1", help="batch sizes of (b): each compiles for a minute")
    parser.add_argument("--beams", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--backends", default="", help="op=backend,... for the engine, e.g. topk=triton")
    parser.add_argument("--record-of", type=Path, help="run nothing: write what a report reads of that file to --out")
    parser.add_argument("--only", default="", help="variants to run, e.g. fp8,bf16,compiled; default all")
    parser.add_argument("--no-tune", action="store_true", help="take backends in the registry's order")
    parser.add_argument("--no-fuse", action="store_true", help="do not compile the engine's small operations")
    parser.add_argument("--no-fold", action="store_true", help="keep the shared expert apart from the grouped GEMM")
    arguments = parser.parse_args()
    if arguments.record_of:
        save(make_record(json.loads(arguments.record_of.read_text())), arguments.out)
        return 0
    unknown = set(filter(None, arguments.only.split(","))) - {*PLAIN, *ENGINES}
    if unknown:
        parser.error(f"--only knows {', '.join((*PLAIN, *ENGINES))}, not {', '.join(sorted(unknown))}")
    Bench(arguments).run()
    return 0


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.a = arguments
        self.device = torch.device(arguments.device)
        self.started = time.monotonic()
        self.contexts = [int(s) for s in arguments.contexts.split(",")]
        self.batches = [int(s) for s in arguments.batches.split(",")]
        self.compiled_batches = [int(s) for s in arguments.compiled_batches.split(",") if s]
        self.backends = tuple(tuple(pair.split("=")) for pair in arguments.backends.split(",") if pair)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self.report: dict[str, Any] = {
            "environment": _plain(capture_environment(device=name)),
            "settings": {k: str(v) for k, v in vars(arguments).items() if k != "out"},
            "peaks": PEAKS,
            "rows": [],
            "failed": [],
            "skipped": [],
        }
        self.models: dict[str, OneRec] = {}
        self.engines: dict[str, Engine] = {}

    def run(self) -> None:
        self.step("build", self.build)
        if "bf16" not in self.models:
            return
        self.step("correctness", self.check)
        first = self.batches[0]
        for context in self.contexts:  # what the bars need
            for name in ("fp8", "bf16", "fp8 mixed", "fp8 mixed context", "fp8 rows", "eager"):
                self.row(name, first, context)
            if first in self.compiled_batches:
                self.row("compiled", first, context)
        for context in self.contexts:
            for batch in self.batches[1:]:
                for name in ("bf16", *LOW):
                    self.row(name, batch, context)
            for name in filter(self.wants, ("bf16", *LOW)):
                self.step(f"profile {name} {context}", lambda n=name, s=context: self.profile(n, first, s))
        for context in self.contexts:  # the waterfall
            for name in ("graph", "fused", "fp8 linears"):
                self.row(name, first, context)
        for context in self.contexts:
            for batch in self.compiled_batches:
                if batch != first:
                    self.row("compiled", batch, context)
        self.report["summary"] = summarise(self.report["rows"], self.contexts, self.batches)
        self.save()
        print(json.dumps(self.report["summary"], indent=1))

    # -- bookkeeping

    def left(self) -> float:
        return self.a.seconds - (time.monotonic() - self.started)

    def save(self) -> None:
        self.report["seconds"] = time.monotonic() - self.started
        self.a.out.write_text(json.dumps(self.report, indent=1))

    def step(self, name: str, job: Any) -> None:
        """Run a part; a failure is written down and the next part runs."""
        if self.left() < 0:
            self.report["skipped"].append(name)
            return
        begin = time.monotonic()
        try:
            job()
            print(f"[{time.monotonic() - self.started:6.1f} s] {name}", file=sys.stderr, flush=True)
        except Exception as error:
            traceback.print_exc()
            self.report["failed"].append({"part": name, "error": f"{type(error).__name__}: {error}"[:800]})
        self.report.setdefault("parts", {})[name] = time.monotonic() - begin
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.save()

    def row(self, name: str, batch: int, context: int) -> None:
        if self.wants(name):
            self.step(f"{name} batch {batch} context {context}", lambda: self.measure(name, batch, context))

    def wants(self, name: str) -> bool:
        return not self.a.only or name in self.a.only.split(",")

    # -- what is measured

    def build(self) -> None:
        config = configure(
            "onerec", self.a.size, context=max(*self.contexts, configure("onerec", self.a.size).short + 1)
        )
        model = make_trained_like(config, device=self.device, dtype=torch.bfloat16)
        low = share_weights(model)
        summary = quantize(low, "onerec")
        linears = share_weights(model)
        part = quantize(
            linears, "onerec", module_filter_fn=lambda m, n: not isinstance(m, GroupedLinear) and ".shared." not in n
        )
        self.models = {"bf16": model, "fp8": low, "fp8 linears": linears}
        for name in filter(self.wants, LOW):
            if name != "fp8":
                self.models[name] = share_weights(model)
                quantize(self.models[name], LOW[name])
        needed = estimate_memory(model, self.configure("bf16"), self.configure("bf16").buckets(config.context))
        self.report["model"] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "active": model.active_parameters(),
            "bytes bf16": summary.record.bytes_before,
            "bytes fp8": summary.record.bytes_after,
            "ratio": summary.record.ratio,
            "quantised": {"fp8": len(summary.quantized), "fp8 linears": len(part.quantized)},
            "weight variance": {n: float(m.weight.float().var()) for n, m in model.named_modules() if n in ("blocks.0.attention.qkv", "heads.0.linear")},
            "memory estimate bf16": str(needed),
        }  # fmt: skip

    def configure(self, name: str) -> EngineConfig:
        backends = dict(self.backends) | ({"topk": "torch"} if name == "fused" else {})
        return EngineConfig(
            beams=self.a.beams,
            requests=tuple(sorted(self.batches)),
            contexts=tuple(sorted(self.contexts)),
            dtype="bf16",
            fuse=False if self.a.no_fuse or self.device.type == "cpu" else None,
            tune=False if self.a.no_tune else None,
            fold_shared=not self.a.no_fold,
            context_cache="e4m3" if name == "fp8 mixed context" else "plain",
            backends=tuple(backends.items()),
        )

    def engine(self, name: str) -> Engine:
        """Engines stay: preparing one costs more than the 12 GB it holds."""
        if name not in self.engines:
            self.engines[name] = Engine(self.models["bf16" if name == "fused" else name], self.configure(name))
        return self.engines[name]

    def check(self) -> None:
        context, batch = self.contexts[0], self.batches[0]
        requests = make_histories(self.models["bf16"].config, batch, context, seed=7)
        plain = make_plain(self.models["bf16"], requests, self.a.beams, graph=False)()
        found = {}
        for name in ("bf16", *filter(self.wants, LOW)):
            results = self.engine(name).generate(requests)
            found[name] = torch.stack([r.codes for r in results])
        ns = [n for n in (10, 50, 512) if n <= found["bf16"].shape[1]]
        self.report["correctness"] = {
            "bf16 engine vs plain bf16": _overlap(plain.codes.cpu(), found["bf16"], ns),
            **{f"{n} engine vs bf16 engine": _overlap(found["bf16"], found[n], ns) for n in found if n != "bf16"},
            "note": "random weights: overlaps show that the same search is run, not what quantisation costs a trained model",
        }
        self.report["router load max / mean"] = self.loads(requests)

    def loads(self, requests: list[Any]) -> dict[str, float]:
        """Measured while the plain model decodes, per mixture."""
        model = self.models["bf16"]
        ratios, hooks = {}, []
        for name, module in model.named_modules():
            if isinstance(module, MixtureOfExperts):
                counts = torch.zeros(module.gate_up.experts, device=self.device)

                def count(m: Any, args: Any, out: Any, counts: torch.Tensor = counts) -> None:
                    chosen, _ = m.route(args[0].flatten(0, -2))
                    counts.add_(torch.bincount(chosen.flatten(), minlength=len(counts)))

                hooks.append(module.register_forward_hook(count))
                ratios[name] = counts
        make_plain(model, requests, self.a.beams, graph=False)()
        for hook in hooks:
            hook.remove()
        return {name: float(c.max() / c.mean()) for name, c in ratios.items()}

    def measure(self, name: str, batch: int, context: int) -> None:
        requests = make_histories(self.models["bf16"].config, batch, context)
        row: dict[str, Any] = {"variant": name, "batch": batch, "context": context}
        if name in PLAIN:
            begin = time.monotonic()
            model = shorten(self.models["bf16"], context)
            if name == "compiled":
                run = make_compiled(model, requests, self.a.beams, compiler=self.a.compiler)
            else:
                run = make_plain(model, requests, self.a.beams, graph=name == "graph")
            row["prepare_s"] = time.monotonic() - begin
            row |= self.time(run)
            del run
        else:
            engine = self.engine(name)
            bucket = (batch, min(s for s in self.contexts if s >= context))
            begin = time.monotonic()
            engine.run(bucket, pad_requests(requests, engine.model_config, bucket))
            self.sync()
            row["prepare_s"] = time.monotonic() - begin
            row |= self.time(lambda: engine.run(bucket))
            row["end_to_end_ms"] = 1e3 * statistics.median(
                self.clock(lambda: engine.generate(requests)) for _ in range(5)
            )
            rows = {batch, batch * min(self.a.beams, engine.model_config.codebooks[0])}
            row["tuned"] = [vars(t) for t in engine.tuning.log if t.rows in rows]
        if self.device.type == "cuda":
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()
        row["queries_per_s"] = 1e3 * batch / row["ms"]
        self.report["rows"].append(row)
        print(f"  {name:12} batch {batch:3} context {context:5}: {row['ms']:9.3f} ms {row['queries_per_s']:9.1f} /s", file=sys.stderr, flush=True)  # fmt: skip

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clock(self, job: Any) -> float:
        self.sync()
        begin = time.perf_counter()
        job()
        self.sync()
        return time.perf_counter() - begin

    def time(self, run: Any) -> dict[str, Any]:
        """Median, with the range of the middle half, over repeats that take at most ten seconds."""
        first = self.clock(run)
        count = max(3, min(self.a.repeats, int(10 / max(first, 1e-6))))
        times = sorted(1e3 * self.clock(run) for _ in range(count))
        return {
            "ms": statistics.median(times),
            "ms_low": times[count // 4],
            "ms_high": times[(3 * count) // 4],
            "repeats": count,
        }

    def profile(self, name: str, batch: int, context: int) -> None:
        """Share of time by kind of kernel, and what the roofline says of each operator."""
        engine = self.engine(name)
        bucket = (batch, context)
        requests = make_histories(engine.model_config, batch, context)
        engine.run(bucket, pad_requests(requests, engine.model_config, bucket))
        self.sync()
        kinds: dict[str, float] = {}
        kernels: list[tuple[float, int, str]] = []
        if self.device.type == "cuda":
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
                for _ in range(3):
                    engine.run(bucket)
                self.sync()
            for event in seen.key_averages():
                spent = getattr(event, "self_device_time_total", 0.0) / 3 / 1e3
                if spent > 0 and "cudaGraphLaunch" not in event.key:
                    kinds[classify_kernel(event.key)] = kinds.get(classify_kernel(event.key), 0.0) + spent
                    kernels.append((spent, event.count // 3, event.key[:160]))
        width = 1 if name in LOW else 2
        costs = count_costs(engine.model_config, requests=batch, context=context, beams=self.a.beams,
                            linear_bytes=1 if name.startswith("fp8") else 2, expert_bytes=width)  # fmt: skip
        self.report.setdefault("profiles", []).append(
            {
                "variant": name,
                "batch": batch,
                "context": context,
                "ms_by_kind": dict(sorted(kinds.items(), key=lambda pair: -pair[1])),
                "kernels": [{"ms": s, "calls": c, "name": k} for s, c, k in sorted(kernels, reverse=True)[:40]],
                "costs": [{"operator": c.operator, "gflop": c.flops / 1e9, "gb": c.bytes / 1e9, "intensity": c.intensity} for c in costs],
                "ridge": {"bf16": PEAKS["bf16 TFLOP/s"] / PEAKS["TB/s"], "fp8": PEAKS["fp8 TFLOP/s"] / PEAKS["TB/s"]},
            }
        )  # fmt: skip


def _overlap(reference: torch.Tensor, candidate: torch.Tensor, ns: list[int]) -> dict[str, float]:
    metric = BeamOverlap(ns)
    metric.update(reference, candidate)
    return {f"@{n}": value for n, value in metric.compute().overlap.items()}


def _plain(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def make_record(report: dict[str, Any]) -> EngineBench:
    """The rows, profiles and bars as `loka report` reads them."""
    settings = report["settings"]
    rows = [
        EngineRow(
            variant=row["variant"],
            batch=row["batch"],
            context=row["context"],
            milliseconds=Interval(value=row["ms"], low=row["ms_low"], high=row["ms_high"]),
            queries_per_second=row["queries_per_s"],
            run=row.get("run"),
        )
        for row in report["rows"]
    ]
    profiles = [
        EngineProfile(variant=p["variant"], batch=p["batch"], context=p["context"], by_kind=p["ms_by_kind"])
        for p in report.get("profiles", [])
    ]
    bars = [
        EngineBar(context=found["context"], what=what, value=bar["value"], bar=bar["bar"], met=bar["met"])
        for found in report.get("summary", [])
        for what, bar in found.items()
        if isinstance(bar, dict) and "bar" in bar
    ]
    return EngineBench(
        model=f"onerec {settings['size']}",
        beams=int(settings["beams"]),
        rows=rows,
        profiles=profiles,
        bars=bars,
        notes=report.get("notes", []),
        environment=Environment(**report["environment"]),
    )


def shorten(model: OneRec, context: int) -> OneRec:
    """The same weights for contexts of that length: the plain search pads every history to the model's longest."""
    plain = share_weights(model)
    plain.config = plain.context.config = replace(model.config, context=context)
    return plain


def summarise(rows: list[dict[str, Any]], contexts: list[int], batches: list[int]) -> list[dict[str, Any]]:
    """The bars, for every context: FP8 by the default recipe against each of the others, and by the other recipes."""
    out = []
    for context in contexts:
        ms = {(r["variant"], r["batch"]): r["ms"] for r in rows if r["context"] == context}
        found: dict[str, Any] = {"context": context, "batch": batches[0]}
        for low in LOW:
            found |= _judge(low, ms, batches)
        order = ("eager", "graph", "fused", "bf16", "fp8 linears", *LOW)
        found["waterfall ms"] = {n: ms[n, batches[0]] for n in order if (n, batches[0]) in ms}
        out.append(found)
    return out


def _judge(low: str, ms: dict[tuple[str, int], float], batches: list[int]) -> dict[str, Any]:
    """What was measured of one FP8 variant beside the bars."""
    found: dict[str, Any] = {}
    first = batches[0]
    for name, bar in (("compiled", 0.51), ("eager", 0.3)):
        if (low, first) in ms and (name, first) in ms:
            ratio = ms[low, first] / ms[name, first]
            found[f"latency {low} / {name}"] = {"value": ratio, "bar": f"<= {bar}", "met": ratio <= bar}
    if ("compiled", 8) in ms:
        limit = ms["compiled", 8]
        within = [b / ms[low, b] for b in batches if ms.get((low, b), 1e9) <= limit]
        if within:
            gain = max(within) / (8 / limit)
            found[f"throughput of {low} within compiled's latency at 8"] = {
                "value": gain,
                "bar": ">= 1.92",
                "met": gain >= 1.92,
            }
    rates = {n: [b / ms[n, b] for b in batches if (n, b) in ms] for n in (low, "bf16")}
    if all(rates.values()):
        gain = max(rates[low]) / max(rates["bf16"])
        found[f"throughput {low} / bf16 engine"] = {"value": gain, "bar": ">= 1.42", "met": gain >= 1.42}
    return found


if __name__ == "__main__":
    sys.exit(main())
