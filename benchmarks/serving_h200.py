"""Answers within a deadline on a GPU, HTTP included: FP8 against bf16 behind the same server, for a generative recommender and for a ranker.

    python benchmarks/serving_h200.py --part generative --contexts 512 --out serving_512.json --limit 115
    python benchmarks/serving_h200.py --part generative --contexts 3000 --out serving_3000.json --limit 115
    python benchmarks/serving_h200.py --part generative --variants compiled --contexts 512 --out serving_compiled.json --limit 115
    python benchmarks/serving_h200.py --part ranker --out serving_ranker.json --limit 115
    python benchmarks/serving_h200.py --part generative --out x.json --device cpu --size tiny --contexts 16 --beams 16 --batches 1,4 --slas 500,1000 --seconds 2     dry run
    python benchmarks/serving_h200.py --part ranker --out x.json --device cpu --size tiny --rows 64,256 --slas 500 --seconds 2 --no-compile                            dry run

Needs uvicorn (with click and h11) and msgspec beside torch. Weights are random with the statistics of trained ones: this is speed, not quality. The server runs in this process, the open-loop
generator (loka.serving.load) in another. Per model and context: every bucket is warmed and timed, answers over HTTP are compared with the engine's own, bit for bit in
the same bucket, and only then is traffic sent, at --load times what the scheduler's largest batch sustains. The file is written again after every row; when --limit seconds are
over, what is left is named in `skipped`.

    goodput       answers with status 200 within the SLA, a second; latency counts from when a request was due
    utilisation   share of the time of the traffic that the engine ran batches
"""

import argparse
import base64
import json
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
RECIPES = {"fp8": "onerec_mixed", "fp8 published": "onerec"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("generative", "ranker"), default="generative")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default=None, help="default: 4b-a0.5b, or plain for the ranker")
    parser.add_argument(
        "--variants", default=None, help="bf16, fp8, 'fp8 published', compiled; bf16 and fp8 by default"
    )
    parser.add_argument("--contexts", default="512,3000")
    parser.add_argument("--batches", default="4,8,12,16,24")
    parser.add_argument("--beams", type=int, default=512)
    parser.add_argument("--items", type=int, default=200_000, help="valid ids")
    parser.add_argument("--rows", default="512,1024,2048,4096", help="buckets, and rows of a request, of the ranker")
    parser.add_argument("--slas", default="50,100", help="milliseconds")
    parser.add_argument("--load", type=float, default=1.5, help="offered over what the scheduler can sustain")
    parser.add_argument("--seconds", type=float, default=4.0, help="of traffic per row")
    parser.add_argument("--limit", type=float, default=115.0)
    parser.add_argument("--plan", type=Path, help="of the ranker's core, for its FP8; default: every chain of it")
    parser.add_argument("--no-compile", action="store_true", help="the ranker without torch.compile")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.generate:
        generate(json.loads(arguments.generate), arguments.out)
        return 0
    bench = Generative(arguments) if arguments.part == "generative" else Ranking(arguments)
    bench.run()
    print(json.dumps(bench.report["ratios"], indent=1))
    return 1 if bench.report["failed"] else 0


def generate(settings: dict[str, Any], out: Path) -> None:
    """The generator's process: no torch in it."""
    import asyncio

    import msgspec

    from loka.serving.load import Traffic, send, summarize

    traffic = Traffic(rate=settings["rate"], seconds=settings["seconds"], sla=settings["sla"], seed=settings["seed"])
    if settings["part"] == "generative":
        source = random.Random(settings["seed"])
        pool = []
        for _ in range(32):
            codes = b"".join(
                source.randrange(size).to_bytes(2, "little") for _ in range(settings["context"]) for size in settings["codebooks"]
            )  # fmt: skip
            pool.append(msgspec.json.encode({"codes": base64.b64encode(codes).decode(), "top": settings["top"]}))
    else:
        pool = [body.encode() for body in settings["bodies"]]
    sent = asyncio.run(send(settings["url"], traffic, lambda n, s: pool[n % len(pool)]))
    found = summarize(settings["url"], settings["name"], traffic, sent)
    out.write_bytes(msgspec.json.encode(found))


class Bench:
    part = ""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import msgspec
        import torch

        from loka.records import capture_environment

        self.a, self.started = arguments, time.monotonic()
        self.device = torch.device(arguments.device)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self.report: dict[str, Any] = {
            "environment": msgspec.to_builtins(capture_environment(device=name)),
            "settings": {k: str(v) for k, v in vars(arguments).items() if k not in ("out", "generate")},
            "models": {}, "rows": [], "ratios": [], "failed": [], "skipped": [], "parts": {},
        }  # fmt: skip
        self.slas = [float(word) / 1e3 for word in arguments.slas.split(",")]
        self.variants = (arguments.variants or "bf16,fp8").split(",")

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
        self.report["ratios"] = ratios(self.report["rows"])
        self.a.out.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")

    def drive(self, model: Any, variant: str, sla: float, settings: dict[str, Any], limits: Any = None, units: int = 1) -> None:  # fmt: skip
        """One row: a server over the warm model, traffic from another process."""
        from loka.serving import Policy, Server

        policy = Policy(sla=sla, reserve=0.002)
        with Server(model, policy=policy, port=0, limits=limits).background(wait=60) as server:
            runner = server.service.first
            about = server.service.describe_runner(runner)
            context = settings.get("context", 0)
            cap = max(runner.scheduler.cap(context), units)  # a request larger than the cap runs alone
            quick = runner.scheduler.times.quantile((cap, context), 0.5)
            rate = self.a.load * max(1, cap // units) / quick
            kept = self.a.out.with_suffix(".load.json")
            told = {**settings, "part": self.part, "url": server.url, "name": variant, "rate": rate, "seconds": self.a.seconds, "sla": sla, "seed": 0}  # fmt: skip
            script = [sys.executable, __file__, "--out", str(kept), "--generate", json.dumps(told)]
            subprocess.run(script, check=True, timeout=self.a.seconds + 40)
            busy = runner.telemetry.histograms["loka_batch_seconds"]
            batches = sum(h.total for h in busy.values())
            units_run = runner.telemetry.counters["loka_units_total"]
            padding = runner.telemetry.counters["loka_padding_total"]
            captured = runner.captured_since_ready
        found = json.loads(kept.read_bytes())
        kept.unlink()
        answered = found["good"] + found["late"]
        self.report["rows"].append(
            {
                "variant": variant, "sla_ms": 1e3 * sla, **{k: v for k, v in settings.items() if k in ("context", "rows_a_request")},
                "offered_per_second": round(rate, 1), "goodput": round(found["goodput"], 1), "late_share": found["late"] / answered if answered else None,
                "codes": found["codes"], "latency_ms": found["latency_ms"], "shed_ms": found["shed_ms"], "send_lag_ms": found["send_lag_ms"],
                "cap": cap, "batch_ms": about["batch_ms"], "utilisation": round(min(1.0, batches / self.a.seconds), 3),
                "padding_share": round(sum(padding.values()) / max(1, sum(padding.values()) + sum(units_run.values())), 4),
                "captured_after_ready": captured,
            }
        )  # fmt: skip
        row = self.report["rows"][-1]
        print(f"    {variant:14} {settings.get('context', settings.get('rows_a_request'))} SLA {1e3 * sla:g} ms: goodput {row['goodput']}/s, late {row['late_share']}, p99 {row['latency_ms'].get('p99')} ms, cap {cap}", file=sys.stderr)  # fmt: skip


class Generative(Bench):
    part = "generative"

    def run(self) -> None:
        self.size = self.a.size or "4b-a0.5b"
        self.contexts = [int(word) for word in self.a.contexts.split(",")]
        self.batches = tuple(int(word) for word in self.a.batches.split(","))
        self.step("build", self.build)
        for context in self.contexts:  # both variants of one context first: a ratio needs both
            for variant in self.variants:
                model = self.step(f"{variant} {context}: warm", lambda v=variant, c=context: self.make(v, c), needs=15)
                if model is None:
                    continue
                if variant != "compiled" and not self.step(
                    f"{variant} {context}: correctness", lambda m=model: self.check(m), needs=5
                ):
                    self.report["failed"].append(
                        {
                            "part": f"{variant} {context}",
                            "error": "correctness was not shown (answers differ, or no time was left): not measured",
                        }
                    )
                    continue
                for sla in self.slas:
                    told = {"context": context, "codebooks": list(self.config.codebooks), "top": min(50, self.a.beams)}
                    self.step(f"{variant} {context} {1e3 * sla:g} ms", lambda m=model, v=variant, s=sla, t=told: self.drive(m, v, s, t), needs=self.a.seconds + 4)  # fmt: skip
                del model
        self.save()

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
        self.engines: dict[str, Any] = {}

    def make(self, variant: str, context: int) -> Any:
        """A warm model of one context: its own buckets, so that a row is about that context alone."""
        from loka.inference import Bundle, EngineConfig
        from loka.records import BundleInfo, capture_environment
        from loka.serving import GenerativeModel

        model, summary = self.models[variant]
        if variant == "compiled":
            return Compiled(
                model, self.index, context, self.a.beams, "eager" if self.device.type == "cpu" else "inductor"
            )
        info = BundleInfo(data="random", settings={}, steps=0, seed=0, loss=None, normalize="codebook", environment=capture_environment())  # fmt: skip
        dtype = "bf16" if self.device.type == "cuda" else "fp32"
        config = EngineConfig(beams=self.a.beams, requests=self.batches, contexts=(context,), dtype=dtype)
        made = GenerativeModel(Bundle(model, summary, self.index, info), config, device=self.device, name="onerec", version=variant)  # fmt: skip
        made.warm()
        return made

    def check(self, model: Any) -> bool:
        """Answers over HTTP equal those of the engine in the same bucket, bit for bit; overlap with bf16 is told."""
        import asyncio

        import msgspec
        import torch

        from loka.inference.request import make_histories
        from loka.serving import Policy, RecommendRequest, Server
        from loka.serving.load import _Client

        (context,) = {c for _, c in model.buckets}
        requests = make_histories(self.config, 4, context, seed=3)
        bodies = [r.history.numpy().astype("<u2").tobytes() for r in requests]
        bucket, top = min(model.buckets), min(50, self.a.beams)
        with Server(model, policy=Policy(sla=30.0), port=0).background() as server:

            async def ask(body: bytes) -> Any:
                client = _Client(server.url, None, 1)
                packed = msgspec.json.encode({"codes": base64.b64encode(body).decode(), "top": top})
                status, answer = await client.ask("POST", "/v1/recommend", packed)
                client.close()
                return status, json.loads(answer)

            found = [asyncio.run(ask(body)) for body in bodies]  # one by one: each alone in the smallest bucket
        same, lists = True, []
        for body, (status, answer) in zip(bodies, found, strict=True):
            (direct,) = model.run(bucket, [model.read(RecommendRequest(codes=body, top=top))])
            same &= status == 200 and answer["items"] == direct.items and answer["scores"] == direct.scores
            same &= bool(direct.items) and bool(torch.tensor(direct.scores).isfinite().all())
            lists.append(set(direct.items))
        self.engines[f"{model.version} {context}"] = lists
        reference = self.engines.get(f"bf16 {context}")
        facts: dict[str, Any] = {"bit for bit over HTTP": same}
        if reference is not None and model.version != "bf16":
            facts["overlap@50 with bf16"] = sum(len(a & b) / max(1, len(a)) for a, b in zip(reference, lists, strict=True)) / 4  # fmt: skip
        self.report["models"][model.version][f"context {context}"] = facts
        return same


class Compiled:
    """The plain model compiled, static shapes, one CUDA graph (benchmarks/onerec_baselines.py), as a Servable: one bucket of eight full contexts, ids not constrained."""

    def __init__(self, model: Any, index: Any, context: int, beams: int, compiler: str) -> None:
        from dataclasses import replace

        from onerec_baselines import make_compiled
        from onerec_synthetic import share_weights

        from loka.inference.request import make_histories
        from loka.serving import RecommendRequest

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
        self.sizes = tuple(int(word) for word in self.a.rows.split(","))
        for variant in self.variants:
            model = self.step(f"{variant}: warm", lambda v=variant: self.make(v), needs=20)
            if model is None or not self.step(f"{variant}: correctness", lambda m=model: self.check(m), needs=5):
                continue
            for sla in self.slas:
                for rows in self.sizes:
                    told = {"rows_a_request": rows, "bodies": [self.body(rows, n) for n in range(4)]}
                    self.step(f"{variant} {rows} rows {1e3 * sla:g} ms", lambda m=model, v=variant, s=sla, t=told, r=rows: self.drive(m, v, s, t, self.limits(), r), needs=self.a.seconds + 4)  # fmt: skip
        self.save()

    def limits(self) -> Any:
        from loka.serving import Limits

        return Limits(body=64 * 2**20)

    def schema(self) -> Any:
        from loka.data.schema import Field, Schema
        from loka.models import configure

        n = configure("wukong", self.a.size or "plain").n
        self.columns = [f"c{i}" for i in range(n)]
        return Schema((), tuple(Field(name, 10_000) for name in self.columns), (), ("click",))

    def body(self, rows: int, seed: int) -> str:
        """Eight columns of candidates, the rest the user's."""
        import numpy as np

        draw = np.random.default_rng(seed)
        features: dict[str, Any] = {}
        for place, name in enumerate(self.columns):
            if place < 8:
                features[name] = base64.b64encode(draw.integers(0, 10_000, rows).astype("<i8").tobytes()).decode()
            else:
                features[name] = int(draw.integers(0, 10_000))
        return json.dumps({"features": features, "top": 100})

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
        if not self.a.no_compile:
            ranker.core = torch.compile(ranker.core, dynamic=False)
        info = RankerInfo(name="wukong", family="wukong", size=self.a.size or "plain", options={}, factory=None, dense=[], columns=[], labels=["click"], link="sigmoid", environment=capture_environment())  # fmt: skip
        model = RankingModel(RankerBundle(ranker, schema, info), rows=self.sizes, device=self.device, version=variant)
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

    def check(self, model: Any) -> bool:
        """Scores are finite and alike in every bucket; how far FP8 is from bf16 is told."""
        import msgspec
        import numpy as np

        from loka.serving import RankRequest

        job = model.read(msgspec.json.decode(self.body(self.sizes[0], 9).encode(), type=RankRequest))
        scores = [model.score(size, [job.data]) for size in self.sizes]
        self.report["models"][model.version]["largest difference between buckets"] = float(max(np.abs(s - scores[0]).max() for s in scores))  # fmt: skip
        self.scores = getattr(self, "scores", {}) | {model.version: scores[0]}
        if "bf16" in self.scores:
            self.report["models"][model.version]["largest difference from bf16"] = float(np.abs(scores[0] - self.scores["bf16"]).max())  # fmt: skip
        return bool(np.isfinite(scores[0]).all()) and float(scores[0].std()) > 0


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
