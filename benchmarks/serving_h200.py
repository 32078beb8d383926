"""Answers within a deadline on a GPU, HTTP included: FP8 against bf16 behind the same server, for a generative recommender and for a ranker.

    python benchmarks/serving_h200.py --part generative --contexts 512,3000 --out serving_generative.json
    python benchmarks/serving_h200.py --part generative --variants compiled --out serving_compiled.json --after serving_generative.json
    python benchmarks/serving_h200.py --part ranker --fronts 8 --generators 4 --out serving_ranker.json
    python benchmarks/serving_h200.py --part generative --out x.json --device cpu --size tiny --contexts 16,32 --beams 16 --batches 1,4 --slas 500,1000 --seconds 2     dry run
    python benchmarks/serving_h200.py --part ranker --out x.json --device cpu --size tiny --rows 64,256 --slas 500 --seconds 2 --no-compile --fronts 2 --generators 2   dry run

Needs uvicorn (with click and h11) and msgspec beside torch. Weights are random with the statistics of trained ones: this is speed, not quality. The server runs in this process, its HTTP in --fronts others, the open-loop
generator (loka.serving.load) in --generators more. Every bucket is warmed and timed, answers over HTTP are compared with the engine's own in the same bucket, and only then is traffic sent, at --load times what
the scheduler's largest batch sustains (once more at 60 % of it where more than 5 % came late; the better of both is the row). The file is written again after every step, so that a run that is cut short loses the row it was at; when --limit seconds are over, what is left is named in
`skipped`. `--after FILE` takes the rows of an earlier run into the ratios.

One engine holds all contexts; a row's server sees the buckets of its context alone. Backends are those of the registry's order unless --tune names the variant: measuring every GEMM for every
number of rows takes longer than all the traffic.

The first --settle seconds of the traffic of a row are sent and not counted: fronts that have just started answer their first requests slowly.

    limited_by_most   the engine alone would take more than --most requests a second: the row is about the front
    goodput       answers with status 200 within the SLA, a second; latency counts from when a request was due
    utilisation   share of the time of the traffic in which a batch ran, by the engine's thread: with a layout if that is not hidden behind the batch before
    device_busy   share of that time in which the GPU worked on batches, copies included, by its own events (ranker)
    dropped_share of the admitted: answered with 503 because they could no longer be in time
    margins_ms    what the scheduler has learned at the end: layout of a batch, sending of answers (reserve; leaving is its median), drift of batches beyond their plan
"""

import argparse
import base64
import json
import logging
import os
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # importing torch counts
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
RECIPES = {"fp8": "onerec_mixed", "fp8 published": "onerec", "fp8 context": "onerec_mixed"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("generative", "ranker"), default="generative")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default=None, help="default: 4b-a0.5b, or plain for the ranker")
    parser.add_argument("--variants", help="fp8, bf16, 'fp8 published', 'fp8 context' (fp8 with the context in E4M3), compiled; fp8, bf16 and compiled by default, the ranker without the last")  # fmt: skip
    parser.add_argument("--tune", default="", help="variants whose engine measures its backends, a minute or more each")
    parser.add_argument("--after", type=Path, action="append", default=[], help="files of earlier runs, for the ratios")
    parser.add_argument("--contexts", default="512,3000")
    parser.add_argument("--batches", default="4,6,8,12,14,16,18,20,24,28")
    parser.add_argument("--beams", type=int, default=512)
    parser.add_argument("--items", type=int, default=200_000, help="valid ids")
    parser.add_argument("--rows", default="512,1024,2048,4096", help="of a request to the ranker")
    parser.add_argument(
        "--buckets", default="1024,4096", help="rows of a batch of the ranker; each compiles for itself"
    )
    parser.add_argument("--slas", default="50,100", help="milliseconds")
    parser.add_argument("--load", type=float, default=1.5, help="offered over what the scheduler can sustain")
    parser.add_argument(
        "--most", type=float, default=1e5, help="requests a second that the generators and fronts are asked for"
    )
    parser.add_argument(
        "--seconds", type=float, help="of traffic per row: 3, or 1.5 for the ranker, which has more rows"
    )
    parser.add_argument("--settle", type=float, help="seconds of traffic before them: 0, or 0.3 for the ranker")
    parser.add_argument("--fronts", type=int, default=0, help="front processes of the server; 0: it speaks HTTP itself")
    parser.add_argument("--generators", type=int, default=1, help="processes that send the traffic")
    parser.add_argument("--limit", type=float, help="seconds for all of it: 145, or 110 for the ranker")
    parser.add_argument("--plan", type=Path, help="of the ranker's core, for its FP8; default: every chain of it")
    parser.add_argument("--no-compile", action="store_true", help="the ranker without torch.compile")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.generate:
        generate(Path(arguments.generate), arguments.out)
        return 0
    usual = (3.0, 145.0, 0.0) if arguments.part == "generative" else (1.5, 110.0, 0.3)
    arguments.seconds, arguments.limit = arguments.seconds or usual[0], arguments.limit or usual[1]
    arguments.settle = usual[2] if arguments.settle is None else arguments.settle
    if arguments.worker:
        Ranking(arguments).work(arguments.worker)
        return 0
    bench = Generative(arguments) if arguments.part == "generative" else Ranking(arguments)
    bench.run()
    print(json.dumps(bench.report["ratios"], indent=1))
    return 1 if bench.report["failed"] else 0


def generate(asked: Path, out: Path) -> None:
    """The generator's process, which starts the others: no torch in it."""
    from dataclasses import replace

    import msgspec

    from loka.serving.load import Sent, Traffic, send_from, summarize

    settings = msgspec.msgpack.decode(asked.read_bytes())
    kind = "application/json" if settings["part"] == "generative" else "application/msgpack"
    settle, seconds = settings["settle"], settings["seconds"]
    traffic = Traffic(rate=settings["rate"], seconds=settle + seconds, sla=settings["sla"], seed=settings["seed"], kind=kind, connections=512 * settings["generators"])  # fmt: skip
    if settings["part"] == "generative":
        source = random.Random(settings["seed"])
        pool = []
        for _ in range(32):
            codes = b"".join(
                source.randrange(size).to_bytes(2, "little") for _ in range(settings["context"]) for size in settings["codebooks"]
            )  # fmt: skip
            pool.append(msgspec.json.encode({"codes": base64.b64encode(codes).decode(), "top": settings["top"]}))
    else:
        pool = settings["bodies"]
    sent = send_from(settings["generators"], settings["url"], traffic, lambda n, s: pool[n % len(pool)])
    counted = [Sent(s.due - settle, s.left - settle, s.done - settle, s.code, s.said) for s in sent if s.due >= settle]
    found = summarize(settings["url"], settings["name"], replace(traffic, seconds=seconds), counted)
    out.write_bytes(msgspec.json.encode(found))


class Bench:
    part = ""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import msgspec
        import torch

        from loka.records import capture_environment

        logging.getLogger("loka.serving").setLevel(logging.CRITICAL)  # under overload every late answer is a line
        self.a, self.started = arguments, STARTED
        self.device = torch.device(arguments.device)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self.report: dict[str, Any] = {
            "environment": msgspec.to_builtins(capture_environment(device=name)),
            "settings": {k: str(v) for k, v in vars(arguments).items() if k not in ("out", "generate")},
            "models": {}, "rows": [], "ratios": [], "failed": [], "skipped": [], "parts": {},
        }  # fmt: skip
        self.slas = [float(word) / 1e3 for word in arguments.slas.split(",")]
        usual = "fp8,bf16,compiled" if self.part == "generative" else "bf16,fp8"
        self.variants = (arguments.variants or usual).split(",")
        if unknown := set(self.variants) - {*usual.split(","), *(RECIPES if self.part == "generative" else ())}:
            raise SystemExit(f"--variants: {sorted(unknown)} is not of {self.part}")
        self.earlier = [row for file in arguments.after for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]

    def left(self) -> float:
        return self.a.limit - (time.monotonic() - self.started)

    def step(self, name: str, job: Any, *, needs: float = 0.0) -> Any:
        if self.left() < needs:
            self.report["skipped"].append(name)
            return None
        begin, out = time.monotonic(), None
        try:
            out = job()
        except Exception as error:
            traceback.print_exc()
            self.report["failed"].append({"part": name, "error": f"{type(error).__name__}: {error}"[:800]})
        self.report["parts"][name] = round(time.monotonic() - begin, 2)
        self.report["seconds"] = round(time.monotonic() - self.started, 1)
        print(f"[{self.report['seconds']:6.1f} s] {name}", file=sys.stderr, flush=True)
        self.save()
        return out

    def save(self) -> None:
        self.report["ratios"] = ratios(self.earlier + self.report["rows"])
        self.a.out.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")

    def drive(self, model: Any, variant: str, sla: float, settings: dict[str, Any], limits: Any = None, units: int = 1) -> dict[str, Any]:  # fmt: skip
        """One row: a server over the warm model, traffic from another process."""
        from loka.serving import Server

        row = {"variant": variant, "sla_ms": 1e3 * sla, **{k: v for k, v in settings.items() if k in ("context", "rows_a_request")}}  # fmt: skip
        server = Server(model, sla=sla, port=0, limits=limits, fronts=self.a.fronts)
        try:
            with server.background(wait=60):
                row |= self.measure(server, variant, sla, settings, units)
        except ValueError as error:
            if "the SLA leaves" not in str(error):
                raise
            row |= {"goodput": 0.0, "refused": str(error)}  # the server does not promise what one batch cannot keep
        where = settings.get("context", settings.get("rows_a_request"))
        told = row.get("refused") or f"late {row['late_share']}, p99 {row['latency_ms'].get('p99')} ms, dropped {row['dropped_share']}, cap {row['cap']}, utilisation {row['utilisation']}, GPU {row['device_busy']}, margins {row['margins_ms']}"  # fmt: skip
        print(f"    {variant:14} {where} SLA {1e3 * sla:g} ms: goodput {row['goodput']}/s, {told}", file=sys.stderr)
        return row

    def measure(self, server: Any, variant: str, sla: float, settings: dict[str, Any], units: int) -> dict[str, Any]:
        """Traffic at `load` times what the largest batch sustains; where more than 5 % of the answers are late, again at 60 % of it, and the better of both."""
        runner = server.service.first
        context = settings.get("context", 0)
        cap = max(runner.scheduler.cap(context), units)  # a request larger than the cap runs alone
        wanted = self.a.load * max(1, cap // units) / runner.scheduler.times.quantile((cap, context), 0.5)
        about = {"cap": cap, "batch_ms": server.service.describe_runner(runner)["batch_ms"]}
        rate, tried = min(wanted, self.a.most), []
        for share in (1.0, 0.6):
            tried.append(self.send(runner, {**settings, "part": self.part, "url": server.url, "name": variant, "rate": share * rate, "seconds": self.a.seconds, "settle": self.a.settle, "generators": self.a.generators, "sla": sla, "seed": 0}))  # fmt: skip
            if (tried[-1]["late_share"] or 0.0) <= 0.05 or self.left() < self.a.seconds + self.a.settle + 4:
                break
        best = max(tried, key=lambda found: found["goodput"])
        others = [{k: found[k] for k in ("offered_per_second", "goodput", "late_share")} for found in tried if found is not best]  # fmt: skip
        return {**best, "limited_by_most": rate < wanted, "others": others, **about, "captured_after_ready": runner.captured_since_ready}  # fmt: skip

    def send(self, runner: Any, told: dict[str, Any]) -> dict[str, Any]:
        """What became of one run of traffic."""
        import msgspec

        kept, asked = (self.a.out.with_suffix(f".{os.getpid()}.{name}") for name in ("load", "asked"))
        asked.write_bytes(msgspec.msgpack.encode(told))
        before = busy_of(runner)
        subprocess.run([sys.executable, __file__, "--out", str(kept), "--generate", str(asked)], check=True, timeout=told["seconds"] + told["settle"] + 40)  # fmt: skip
        busy, used, padding, device, dropped = (
            after - begun for after, begun in zip(busy_of(runner), before, strict=True)
        )
        found = json.loads(kept.read_bytes())
        kept.unlink()
        asked.unlink()
        answered, lasted, margins = (
            found["good"] + found["late"],
            told["seconds"] + told["settle"],
            runner.scheduler.margins,
        )
        return {
            "offered_per_second": round(told["rate"], 1), "goodput": round(found["goodput"], 1),
            "late_share": round(found["late"] / answered, 5) if answered else None,
            "codes": found["codes"], "latency_ms": found["latency_ms"], "shed_ms": found["shed_ms"], "send_lag_ms": found["send_lag_ms"],
            "utilisation": round(min(1.0, busy / lasted), 3), "device_busy": round(min(1.0, device / lasted), 3) if device else None,
            "padding_share": round(padding / max(1, padding + used), 4), "dropped_share": round(dropped / max(1, answered + dropped), 5),
            "margins_ms": {name: round(1e3 * getattr(margins, name), 3) for name in ("layout", "reserve", "leaving", "drift")},
        }  # fmt: skip


def busy_of(runner: Any) -> tuple[float, ...]:
    """Seconds of batches, units that ran, units of padding, seconds of the GPU, and requests that were dropped so far."""
    told = runner.telemetry
    seconds = sum(h.total for h in told.histograms["loka_batch_seconds"].values()) if "loka_batch_seconds" in told.histograms else 0.0  # fmt: skip
    used, padding, dropped = (sum(told.counters[name].values()) if name in told.counters else 0.0 for name in ("loka_units_total", "loka_padding_total", "loka_dropped_total"))  # fmt: skip
    return seconds, used, padding, getattr(runner.model, "device_seconds", 0.0), dropped


class Generative(Bench):
    part = "generative"

    def run(self) -> None:
        self.size = self.a.size or "4b-a0.5b"
        self.contexts = [int(word) for word in self.a.contexts.split(",")]
        self.batches = tuple(int(word) for word in self.a.batches.split(","))
        self.lists: dict[str, list[set[int]]] = {}
        self.made: dict[str, Any] = {}
        self.step("build", self.build)
        for context in self.contexts:  # all engines at one context first: a ratio needs both
            for variant in self.variants:
                if variant != "compiled":
                    self.serve(variant, context)
        if "compiled" in self.variants:  # last: it compiles for half a minute a context
            for context in self.contexts:
                model = self.step(f"compiled {context}: warm", lambda c=context: self.compile(c), needs=30)
                for sla in reversed(self.slas) if model is not None else ():
                    self.row(model, "compiled", context, sla)
                del model
        self.save()

    def serve(self, variant: str, context: int) -> None:
        """The rows of one engine at one context."""
        if variant not in self.made:
            self.made[variant] = self.step(f"{variant}: warm", lambda: self.make(variant), needs=15)
        if self.made[variant] is None:
            return
        model = OneContext(self.made[variant], context)
        if self.step(f"{variant} {context}: correctness", lambda: self.check(model), needs=5):
            for sla in self.slas:
                self.row(model, variant, context, sla)

    def row(self, model: Any, variant: str, context: int, sla: float) -> None:
        told = {"context": context, "codebooks": list(self.config.codebooks), "top": min(50, self.a.beams)}
        self.step(f"{variant} {context} {1e3 * sla:g} ms", lambda: self.report["rows"].append(self.drive(model, variant, sla, told)), needs=self.a.seconds + 4)  # fmt: skip

    def build(self) -> None:
        import torch
        from onerec_synthetic import make_trained_like, share_weights

        from loka.models import configure
        from loka.ptq import quantize
        from loka.semantic_ids import SemanticIndex

        base = configure("onerec", self.size)
        self.config = configure("onerec", self.size, context=max(*self.contexts, base.short + 1))
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        plain = make_trained_like(self.config, device=self.device, dtype=dtype)
        g = torch.Generator().manual_seed(1)
        sizes = torch.tensor(self.config.codebooks)
        codes = torch.unique((torch.rand(self.a.items, len(sizes), generator=g) * sizes).long(), dim=0)
        self.index = SemanticIndex(codes, self.config.codebooks, torch.arange(1, len(codes) + 1))
        self.models: dict[str, Any] = {}
        for variant in self.variants:
            model = share_weights(plain)
            recipe = RECIPES.get(variant, "none")
            self.models[variant] = (model, quantize(model, recipe))
            self.report["models"][variant] = {"recipe": recipe, "quantised": len(self.models[variant][1].quantized)}

    def compile(self, context: int) -> Any:
        model, _ = self.models["compiled"]
        made = Compiled(model, context, self.a.beams, "eager" if self.device.type == "cpu" else "inductor")
        made.warm()  # here: Dynamo of torch 2.11 was seen to end the process when the server's thread compiles
        return made

    def make(self, variant: str) -> Any:
        """A warm model of all contexts."""
        from loka.inference import Bundle, EngineConfig
        from loka.records import BundleInfo, capture_environment
        from loka.serving import GenerativeModel

        model, summary = self.models[variant]
        info = BundleInfo(data="random", settings={}, steps=0, seed=0, loss=None, normalize="codebook", environment=capture_environment())  # fmt: skip
        dtype = "bf16" if self.device.type == "cuda" else "fp32"
        tune = variant in self.a.tune.split(",")
        config = EngineConfig(beams=self.a.beams, requests=self.batches, contexts=tuple(sorted(self.contexts)), dtype=dtype, tune=tune,
                              context_cache="e4m3" if variant == "fp8 context" else "plain")  # fmt: skip
        made = GenerativeModel(Bundle(model, summary, self.index, info), config, device=self.device, name="onerec", version=variant)  # fmt: skip
        made.warm()
        self.report["models"][variant] |= {"tuned": tune, "needs": str(made.engine.needed), "captures": made.captures}
        return made

    def check(self, model: Any) -> bool:
        """Answers over HTTP beside those of the engine in the same bucket: bit for bit or not is told, as is the overlap with bf16; wrong ones are not measured."""
        import msgspec
        import numpy as np

        from loka.inference.request import make_histories
        from loka.serving import Policy, RecommendRequest, Server

        context, top = model.context, min(50, self.a.beams)
        histories = make_histories(self.config, 4, context, seed=3)
        codes = [r.history.numpy().astype("<u2").tobytes() for r in histories]
        with Server(model, policy=Policy(sla=30.0), port=0).background() as server:
            bodies = [msgspec.json.encode({"codes": base64.b64encode(each).decode(), "top": top}) for each in codes]
            found = [ask(server.url, body) for body in bodies]  # one by one: each alone in the smallest bucket
        lists, same, shared, finite = [], [], [], True
        for each, answer in zip(codes, found, strict=True):
            (direct,) = model.run(min(model.buckets), [model.read(RecommendRequest(codes=each, top=top))])
            same.append(answer["items"] == direct.items and answer["scores"] == direct.scores)
            shared.append(len(set(answer["items"]) & set(direct.items)) / max(1, len(direct.items)))
            finite &= bool(direct.items) and bool(np.isfinite(direct.scores).all())
            lists.append(set(direct.items))
        self.lists[f"{model.version} {context}"] = lists
        facts: dict[str, Any] = {"bit for bit over HTTP": all(same), "overlap@50 with the engine's own": statistics.mean(shared), "finite": finite}  # fmt: skip
        for name, other in self.lists.items():
            if name != f"{model.version} {context}" and name.endswith(f" {context}"):
                shares = [len(a & b) / max(1, len(a)) for a, b in zip(other, lists, strict=True)]
                facts[f"overlap@50 with {name.removesuffix(f' {context}')}"] = statistics.mean(shares)
        self.report["models"][model.version][f"context {context}"] = facts
        if not (finite and min(shared) >= 0.9):
            raise RuntimeError(f"{model.version} at {context}: {facts}: not measured")
        return True


def ask(url: str, body: bytes) -> dict[str, Any]:
    """One request, the standard library's way."""
    from urllib.request import Request, urlopen

    asked = Request(f"{url}/v1/recommend", data=body, headers={"content-type": "application/json"})
    with urlopen(asked, timeout=60) as answer:
        return dict(json.load(answer))


class OneContext:
    """A model's buckets of one context, as a Servable of its own: a row is then about that context alone."""

    def __init__(self, model: Any, context: int) -> None:
        self._model, self.context = model, context
        self.buckets = [bucket for bucket in model.buckets if bucket[1] == context]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def warm(self) -> None:
        """All contexts are warm already."""


class Compiled:
    """The plain model compiled, static shapes, one CUDA graph (benchmarks/onerec_baselines.py), as a Servable: one bucket of eight full contexts, ids not constrained."""

    def __init__(self, model: Any, context: int, beams: int, compiler: str) -> None:
        from dataclasses import replace

        import torch
        from onerec_baselines import make_compiled
        from onerec_synthetic import share_weights

        from loka.inference.request import make_histories
        from loka.serving import RecommendRequest

        torch._dynamo.reset()  # recompilations are counted by code object: another context must not add up with the last
        plain = share_weights(model)
        plain.config = plain.context.config = replace(model.config, context=context)
        self.name, self.version, self.captures, self.request_type = "onerec", "compiled", 1, RecommendRequest
        self.buckets, self.context, self.codebooks = [(8, context)], context, model.config.codebooks
        self.requests = make_histories(plain.config, 8, context)
        self._run = make_compiled(plain, self.requests, beams, compiler=compiler)

    def warm(self) -> None:
        self._run()

    def example(self, bucket: tuple[int, int]) -> list[Any]:
        from loka.serving import Job, RecommendRequest

        return [Job(RecommendRequest(codes=b""), 1, self.context, r.history) for r in self.requests]

    def read(self, request: Any) -> Any:
        import numpy as np
        import torch

        from loka.serving import FieldError, Job

        codes = np.frombuffer(request.codes or b"", dtype="<u2").reshape(-1, len(self.codebooks))
        if len(codes) != self.context:
            raise FieldError("$.codes", f"{len(codes)} items; this baseline has static shapes, {self.context} items")
        return Job(request, 1, self.context, torch.from_numpy(codes.astype(np.int64)))

    def run(self, bucket: tuple[int, int], jobs: Any) -> list[Any]:
        import torch

        from loka.serving import Recommended

        rows = [job.data for job in jobs]
        rows += [rows[0]] * (8 - len(rows))
        self._run.history.values.copy_(torch.cat(rows), non_blocking=True)
        codes, scores = (part.cpu() for part in self._run())
        top = [job.request.top or 10 for job in jobs]
        return [Recommended(items=[], scores=scores[i][:n].tolist(), codes=codes[i][:n].tolist()) for i, n in enumerate(top)]  # fmt: skip

    def describe(self) -> dict[str, Any]:
        return {"inputs": [], "outputs": []}

    def from_tensors(self, tensors: Any, parameters: Any) -> Any:
        raise ValueError("not here")

    def to_tensors(self, answer: Any) -> dict[str, Any]:
        raise ValueError("not here")


class Ranking(Bench):
    """A Wukong with the Mods in bf16, compiled, against the same in FP8; users' columns once a request, candidates' columns once a row."""

    part = "ranker"

    def run(self) -> None:
        sizes = [int(word) for word in self.a.rows.split(",")]
        workers = {
            variant: Worker(variant) for variant in self.variants
        }  # they compile at the same time, and are timed one by one
        try:
            ready = {v: w for v, w in workers.items() if self.step(f"{v}: warm", lambda v=v, w=w: self.meet(v, w)) is not None}  # fmt: skip
            for sla in self.slas:
                for rows in sizes:
                    for variant, worker in ready.items():
                        told = {"sla": sla, "rows": rows}
                        self.step(f"{variant} {rows} rows {1e3 * sla:g} ms", lambda w=worker, t=told: self.report["rows"].append(w.ask(t, self.left() + 5)), needs=self.a.seconds + self.a.settle + 4)  # fmt: skip
        finally:
            for worker in workers.values():
                worker.end()
        self.save()

    def meet(self, variant: str, worker: "Worker") -> bool:
        import numpy as np

        facts = worker.answer(max(5.0, self.left() - 20))
        scores = np.array(facts.pop("scores"))
        self.report["models"][variant] = facts
        self.scores = {**getattr(self, "scores", {}), variant: scores}
        if "bf16" in self.scores:
            facts["largest difference from bf16"] = float(np.abs(scores - self.scores["bf16"]).max())
        return True

    def work(self, variant: str) -> None:
        """A process of one variant: warm, say so, then a row for every line of stdin."""
        told, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not come between the answers

        def tell(what: dict[str, Any]) -> None:
            print(json.dumps(what), file=told, flush=True)

        try:
            model = self.make(variant)
            tell({**self.report["models"][variant], **self.check(model)})
            for line in sys.stdin:
                asked = json.loads(line)
                settings = {"rows_a_request": asked["rows"], "bodies": [self.body(asked["rows"], n) for n in range(4)]}
                tell(self.drive(model, variant, asked["sla"], settings, self.limits(), asked["rows"]))
        except Exception as error:
            traceback.print_exc()
            tell({"error": f"{type(error).__name__}: {error}"[:800]})

    def limits(self) -> Any:
        from loka.serving import Limits

        return Limits(body=64 * 2**20, connections=8192)

    def schema(self) -> Any:
        from loka.data.schema import Field, Schema
        from loka.models import configure

        n = configure("wukong", self.a.size or "plain").n
        self.columns = [f"c{i}" for i in range(n)]
        return Schema((), tuple(Field(name, 10_000) for name in self.columns), (), ("click",))

    def body(self, rows: int, seed: int) -> bytes:
        """Eight columns of candidates, the rest the user's."""
        import msgspec
        import numpy as np

        draw = np.random.default_rng(seed)
        features: dict[str, Any] = {}
        for place, name in enumerate(self.columns):
            if place < 8:
                features[name] = draw.integers(0, 10_000, rows).astype("<i8").tobytes()
            else:
                features[name] = int(draw.integers(0, 10_000))
        return bytes(msgspec.msgpack.encode({"features": features, "top": min(rows, 100)}))

    def make(self, variant: str) -> Any:
        import torch

        from loka.models import build_ranker
        from loka.records import RankerInfo, capture_environment
        from loka.serving import RankerBundle, RankingModel

        schema = self.schema()
        torch.manual_seed(0)
        style = {"norm": "block", "activation": "hard_swish", "bias": False}
        with torch.device(self.device):
            ranker = build_ranker(schema, "wukong", self.a.size or "plain", **style)
        ranker = ranker.to(self.device).eval().requires_grad_(False)
        if self.device.type == "cuda":
            ranker = ranker.to(torch.bfloat16)
        facts = self.lower(ranker, schema) if variant == "fp8" else {}
        info = RankerInfo(name="wukong", family="wukong", size=self.a.size or "plain", options={}, factory=None, dense=[], columns=[], labels=["click"], link="sigmoid", environment=capture_environment())  # fmt: skip
        buckets = tuple(int(word) for word in self.a.buckets.split(","))
        model = RankingModel(RankerBundle(ranker, schema, info), rows=buckets, device=self.device, version=variant, compiled=not self.a.no_compile)  # fmt: skip
        model.warm()
        self.report["models"][variant] = {"parameters": sum(p.numel() for p in ranker.parameters()), **facts}
        return model

    def lower(self, ranker: Any, schema: Any) -> dict[str, Any]:
        """The core in FP8, frozen: by a plan that was made for it, or else every chain of it."""
        import torch

        import loka
        from loka.data.batch import Batch
        from loka.placing import plan_everything
        from loka.records import Plan, load

        rows, d = 1024, self.device
        ids = torch.randint(0, 10_000, (rows, len(schema.categorical)), device=d)
        batch = Batch(torch.zeros(rows, 0, device=d), ids, {}, torch.zeros(rows, 1, device=d), torch.zeros(rows, dtype=torch.int64, device=d))  # fmt: skip
        with torch.no_grad():
            x = ranker.embed(batch)
        if self.a.plan:
            plan = load(self.a.plan, Plan)
        else:
            plan = plan_everything(ranker.core, (x,), serving=True, linears=256 if d.type == "cuda" else 16)
        done = loka.convert(ranker.core, plan, freeze=True, example=(x,))
        return {"converted": len(done.converted), "kept": len(done.kept), "low_precision_share": done.low_precision_share, "plan": str(self.a.plan or "every chain")}  # fmt: skip

    def check(self, model: Any) -> dict[str, Any]:
        """Scores of one request in every bucket: finite, not all the same, and alike."""
        import msgspec
        import numpy as np

        from loka.serving import RankRequest

        job = model.read(msgspec.msgpack.decode(self.body(model.rows[0], 9), type=RankRequest))
        scores = [model.score(size, [job.data]) for size in model.rows]
        if not (np.isfinite(scores[0]).all() and float(scores[0].std()) > 0):
            raise RuntimeError(f"{model.version}: scores are not finite, or all the same: not measured")
        apart = max(float(np.abs(s - scores[0]).max()) for s in scores)
        return {"largest difference between buckets": apart, "scores": scores[0].tolist()}


class Worker:
    """The process of one variant of the ranker, and its answers, one JSON object a line."""

    def __init__(self, variant: str) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", variant]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put('{"error": "the process ended"}')

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next line; raises for an error, or when none comes."""
        try:
            found = json.loads(self.lines.get(timeout=timeout))
        except queue.Empty:
            raise TimeoutError(f"no answer within {timeout:.0f} s") from None
        if "error" in found:
            raise RuntimeError(found["error"])
        return dict(found)

    def ask(self, what: dict[str, Any], timeout: float) -> dict[str, Any]:
        """One row."""
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        return self.answer(timeout)

    def end(self) -> None:
        """No more rows."""
        self.process.kill()
        self.process.wait()


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Goodput of every variant over bf16 and over compiled bf16, at the same context or rows and SLA."""
    keyed = {(r["variant"], r["sla_ms"], r.get("context"), r.get("rows_a_request")): r for r in rows}
    out = []
    for (variant, *rest), row in keyed.items():
        for base in ("bf16", "compiled"):
            other = keyed.get((base, *rest))
            if other is not None and variant != base and other["goodput"]:
                out.append({"variant": variant, "over": base, "sla_ms": rest[0], "context": rest[1], "rows_a_request": rest[2],
                            "goodput_ratio": round(row["goodput"] / other["goodput"], 3)})  # fmt: skip
    return out


if __name__ == "__main__":
    sys.exit(main())
