"""Do requests gain by joining a running batch between its decoding steps, or by finding their context computed already? Measured before it is built.

    python benchmarks/serving_joining.py --out benchmarks/results/cpu/serving_joining.json

Joining. A generation is a narrow step (context and first code, one row a request) and L - 1 wide ones (all beams). In whole batches a newcomer waits for the running batch and then for its own:
2 T at worst. With joining it waits for a step, is taken into the next, and its rows share that step's GEMMs with those of requests one code further on. Both are played with the best batch cap
each can have, every request dropped that can no longer be in time, at twice the capacity:

    h200    a virtual clock with the batch times recorded on an H200 (onerec_engine.json), linear between sizes; which share of them is the narrow step is not recorded, so three are tried, and what
            the host needs at every boundary to take newcomers in
    cpu     the same loop in real time: the engine's own decoder, and one whose wide step runs groups at different codes together (checked against the first); in turns

Reuse. A key depends on an item and its age, so a new item changes every key of a history: only a request with the very same history can take over a context. `reuse` is what that could save at
most: the share of a generation that is the context, on this CPU and from the recorded profile.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from loka.inference import Engine, EngineConfig
from loka.inference.decoder import Decoder, Inputs
from loka.inference.request import make_histories, pad_requests
from loka.kernels.beam_attention import ancestor_attention, beam_attention
from loka.models import build
from loka.records import capture_environment

HERE = Path(__file__).resolve().parent
Cost = Callable[[int], float]


@dataclass
class Costs:
    """Seconds of a narrow step of n requests, of a wide step of n, and of the host between two steps."""

    narrow: Cost
    wide: Cost
    boundary: float = 0.0
    steps: int = 2  # wide ones

    def whole(self, n: int) -> float:
        return self.narrow(n) + self.steps * self.wide(n)

    def joined(self, n: int) -> float:
        """Of a newcomer among n, where as many others are a step further on at every step."""
        return self.narrow(n) + self.steps * (self.wide(2 * n) + self.boundary)

    def keep(self, waiting: list[float], now: float, sla: float, cap: int, *, joined: bool) -> list[float]:
        """Who can still be in time if the next batch is as full as it may be."""
        n = min(cap, len(waiting))
        takes = self.joined(n) if joined else self.whole(n)
        return [at for at in waiting if now + takes <= at + sla]


def play_whole(due: list[float], costs: Costs, sla: float, cap: int) -> list[float]:
    """Latencies of who was answered in time: whole batches of at most `cap`, earliest first."""
    now, place, waiting, done = 0.0, 0, [], []
    while place < len(due) or waiting:
        while place < len(due) and due[place] <= now:
            waiting.append(due[place])
            place += 1
        waiting = costs.keep(waiting, now, sla, cap, joined=False)
        if not waiting:
            now = due[place] if place < len(due) else now
            if place >= len(due):
                break
            continue
        batch, waiting = waiting[:cap], waiting[cap:]
        now += costs.whole(len(batch))
        done += [now - at for at in batch if now - at <= sla]
    return done


def play_joined(due: list[float], costs: Costs, sla: float, cap: int) -> list[float]:
    """The same with at most `cap` newcomers taken in at every boundary."""
    now, place, waiting, done = 0.0, 0, [], []
    running: list[tuple[list[float], int]] = []  # arrivals, wide steps made
    while place < len(due) or waiting or running:
        while place < len(due) and due[place] <= now:
            waiting.append(due[place])
            place += 1
        waiting = costs.keep(waiting, now, sla, cap, joined=True)
        new, waiting = waiting[:cap], waiting[cap:]
        if not new and not running:
            if place >= len(due):
                break
            now = due[place]
            continue
        if new:
            now += costs.narrow(len(new))
            running.append((new, 0))
        now += costs.wide(sum(len(arrivals) for arrivals, _ in running)) + costs.boundary
        running = [(arrivals, made + 1) for arrivals, made in running]
        for arrivals, made in running:
            if made == costs.steps:
                done += [now - at for at in arrivals if now - at <= sla]
        running = [(arrivals, made) for arrivals, made in running if made < costs.steps]
    return done


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    source, now, out = random.Random(seed), 0.0, []
    while (now := now + source.expovariate(rate)) < seconds:
        out.append(now)
    return out


def best(play: Any, costs: Costs, sla: float, rate: float, seconds: float) -> dict[str, float]:
    """Goodput and median latency at the best cap."""
    due = arrivals(rate, seconds, 0)
    tried = {cap: play(due, costs, sla, cap) for cap in range(1, 49)}
    cap = max(tried, key=lambda c: len(tried[c]))
    return {"cap": cap, "goodput": round(len(tried[cap]) / seconds, 1), "p50_ms": round(1e3 * statistics.median(tried[cap]), 1)}  # fmt: skip


def on_h200() -> list[dict[str, Any]]:
    rows = json.loads((HERE / "results" / "h200" / "onerec_engine.json").read_text(encoding="utf-8"))["rows"]
    ms = {(r["variant"], r["context"], r["batch"]): r["ms"] for r in rows if "ms" in r}
    out = []
    for variant in ("bf16", "fp8 mixed"):
        for context in (512, 3000):
            few, many = ms[variant, context, 8] / 1e3, ms[variant, context, 16] / 1e3
            slope = (many - few) / 8

            def whole(n: int, few: float = few, slope: float = slope) -> float:
                return few + slope * (n - 8)

            for share in (0.05, 0.1, 0.2):
                for boundary in (0.0, 0.0003):
                    costs = Costs(lambda n, s=share, w=whole: s * w(n), lambda n, s=share, w=whole: (1 - s) / 2 * w(n), boundary)  # fmt: skip
                    for sla in (0.05, 0.1):
                        rate = 2 / slope
                        kept, joined = (best(p, costs, sla - 0.002, rate, 20.0) for p in (play_whole, play_joined))
                        out.append({"variant": variant, "context": context, "sla_ms": 1e3 * sla, "narrow_share": share, "boundary_ms": 1e3 * boundary,
                                    "whole": kept, "joined": joined, "goodput_ratio": round(joined["goodput"] / kept["goodput"], 3)})  # fmt: skip
    return out


@dataclass
class Group:
    """Requests that began together: what the decoder keeps between their steps."""

    due: list[float]
    pairs: Any
    seen: Any
    caches: Any
    scores: Any
    nodes: Any
    level: int = 0
    lines: list[Any] = field(default_factory=list)
    spelled: list[Any] = field(default_factory=list)


def begin(decoder: Decoder, inputs: Inputs, due: list[float]) -> Group:
    """Context and first code."""
    n = inputs.codes.shape[0]
    group = Group(due, decoder.context(inputs.codes, inputs.static), (inputs.lengths + 1).to(torch.int32), decoder.make_caches(n),
                  torch.zeros(n, 1), torch.zeros(n, 1, dtype=torch.int64))  # fmt: skip
    step(decoder, [group])
    return group


def step(decoder: Decoder, groups: list[Group]) -> None:
    """One code for every group: rows of all of them in one GEMM, attention by group."""
    model = decoder.narrow if groups[0].level == 0 else decoder.wide
    c, dtype = decoder.config, decoder.dtype
    parts = [decoder._embed(model, g.level, len(g.due), g.spelled) for g in groups]
    sizes, h, delta = [len(p) for p in parts], torch.cat(parts), None
    heads = (c.heads, c.d // c.heads)
    for place, block in enumerate(model.blocks):
        x, _, h = decoder.glue.add_norm(h, delta, block.cross_norm, block.query.activation)
        q = block.query(x, dtype)
        out = [beam_attention(part.view(len(g.due), -1, *heads), *g.pairs[block.pair], g.seen).reshape(part.shape) for part, g in zip(q.split(sizes), groups, strict=True)]  # fmt: skip
        x, _, h = decoder.glue.add_norm(h, block.cross_out(torch.cat(out), dtype), block.self_norm, block.qkv.activation)  # fmt: skip
        out = []
        for part, g in zip(block.qkv(x, dtype).split(sizes), groups, strict=True):
            width = len(part) // len(g.due)
            lines = torch.stack(g.lines).to(torch.int32) if g.lines else torch.empty(0, len(g.due), width, dtype=torch.int32)  # fmt: skip
            q, k, v = part.view(len(g.due), width, 3, *heads).unbind(2)
            found = ancestor_attention(q, k, v, *g.caches[place], lines, keep=g.level < c.levels - 1)
            out.append(found.reshape(len(part), -1))
        h, delta = decoder._ffn(block, h, block.self_out(torch.cat(out), dtype))
    for part, more, g in zip(h.split(sizes), delta.split(sizes), groups, strict=True):
        logits = decoder._head(model, g.level, part, more).view(len(g.due), decoder.widths[g.level], -1)
        choice = decoder.constraints[g.level].choose(logits, g.scores, g.nodes, decoder.widths[g.level + 1])
        g.scores, g.nodes = choice.scores, choice.nodes
        g.lines = [line.gather(1, choice.parents) for line in g.lines] + [choice.parents]
        g.spelled = [codes.gather(1, choice.parents) for codes in g.spelled] + [choice.codes]
        g.level += 1


class Real:
    """The decoder of a small OneRec on this CPU, any number of requests."""

    def __init__(self, context: int, beams: int) -> None:
        torch.manual_seed(0)
        model = build("onerec", "small", context=context)
        self.engine = Engine(model.eval(), EngineConfig(beams=beams, requests=(1,), dtype="fp32"))
        self.decoder = self.engine.prepare((1, context)).decoder
        self.context, self.config = context, model.config
        self.made = make_histories(model.config, 64, context)

    def inputs(self, n: int) -> Inputs:
        return pad_requests(self.made[:n], self.config, (n, self.context))

    def whole(self, n: int) -> Any:
        return self.decoder.generate(self.inputs(n), self.decoder.make_caches(n))

    def check(self) -> float:
        """Groups that run together answer as alone: the largest difference of a score."""
        first = begin(self.decoder, self.inputs(3), [0.0] * 3)
        step(self.decoder, [first])
        second = begin(self.decoder, self.inputs(2), [0.0] * 2)
        step(self.decoder, [first, second])
        step(self.decoder, [second])
        alone = self.whole(3).scores
        return max(float((first.scores - alone).abs().max()), float((second.scores - alone[:2]).abs().max()))


def timed(job: Callable[[], Any], repeats: int = 5) -> float:
    job()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        job()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def serve(real: Real, due: list[float], sla: float, cap: int, costs: Costs, *, joined: bool) -> int:
    """Answers in time of one run in real time."""
    begun, place, waiting, good = time.perf_counter(), 0, [], 0
    running: list[Group] = []
    while place < len(due) or waiting or running:
        now = time.perf_counter() - begun
        while place < len(due) and due[place] <= now:
            waiting.append(due[place])
            place += 1
        waiting = costs.keep(waiting, now, sla, cap, joined=joined)
        batch, waiting = waiting[:cap], waiting[cap:]
        if not batch and not running:
            if place < len(due):
                time.sleep(max(0.0, due[place] - now))
            continue
        if not joined:
            real.whole(len(batch))
            good += sum(time.perf_counter() - begun - at <= sla for at in batch)
            continue
        if batch:
            running.append(begin(real.decoder, real.inputs(len(batch)), batch))
        step(real.decoder, running)
        end = time.perf_counter() - begun
        good += sum(end - at <= sla for g in running if g.level == real.config.levels for at in g.due)
        running = [g for g in running if g.level < real.config.levels]
    return good


@torch.no_grad()
def on_cpu(seconds: float, rounds: int) -> dict[str, Any]:
    real = Real(context=50, beams=64)
    apart = real.check()
    sizes = (1, 4, 8, 16)
    whole = {n: timed(lambda n=n: real.whole(n)) for n in sizes}
    narrow = {n: timed(lambda n=n: begin(real.decoder, real.inputs(n), [0.0] * n)) for n in sizes}
    slope, few = (whole[16] - whole[8]) / 8, whole[8]
    share = narrow[8] / whole[8]
    costs = Costs(lambda n: share * (few + slope * (n - 8)), lambda n: (1 - share) / 2 * (few + slope * (n - 8)))
    sla, rate = 3.0 * few, 2 * 8 / few
    caps = {name: int(best(play, costs, sla, rate, 20.0)["cap"]) for name, play in (("whole", play_whole), ("joined", play_joined))}  # fmt: skip
    found: dict[str, list[float]] = {"whole": [], "joined": []}
    for seed in range(rounds):
        due = arrivals(rate, seconds, seed)
        for name in found:
            found[name].append(serve(real, due, sla, caps[name], costs, joined=name == "joined") / seconds)
    ratios = [j / max(1e-9, w) for w, j in zip(found["whole"], found["joined"], strict=True)]
    return {
        "largest difference of a score": apart, "whole_ms": {n: round(1e3 * t, 2) for n, t in whole.items()}, "narrow_ms": {n: round(1e3 * t, 2) for n, t in narrow.items()},
        "sla_ms": round(1e3 * sla, 1), "offered_per_second": round(rate, 1), "caps": caps, "goodput": {k: [round(x, 1) for x in v] for k, v in found.items()},
        "goodput_ratio": {"median": round(statistics.median(ratios), 3), "each": [round(r, 3) for r in ratios]},
    }  # fmt: skip


@torch.no_grad()
def reuse() -> dict[str, Any]:
    out: dict[str, Any] = {"cpu": []}
    for context, beams in ((50, 64), (500, 64), (500, 16)):
        real = Real(context, beams)
        part = timed(lambda r=real: r.decoder.context(r.inputs(4).codes, None))
        all_of_it = timed(lambda r=real: r.whole(4))
        out["cpu"].append({"context": context, "beams": beams, "requests": 4, "context_ms": round(1e3 * part, 2), "whole_ms": round(1e3 * all_of_it, 2), "share": round(part / all_of_it, 3)})  # fmt: skip
    report = json.loads((HERE / "results" / "h200" / "onerec_engine.json").read_text(encoding="utf-8"))
    ms = {(r["variant"], r["context"]): r["ms"] for r in report["rows"] if r["batch"] == 8 and "ms" in r}
    attention = {(p["variant"], p["context"]): p["ms_by_kind"]["attention"] for p in report["profiles"]}
    for variant in ("bf16", "fp8 mixed"):
        grown = ms[variant, 3000] - ms[variant, 512] - (attention[variant, 3000] - attention[variant, 512])
        whole = ms[variant, 3000]
        out[f"h200 {variant}"] = {"what a context of 3000 adds beyond attention, ms": round(grown, 2), "of a batch of 8, ms": round(whole, 2), "share": round(grown / whole, 3)}  # fmt: skip
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=5.0, help="of real traffic a round")
    parser.add_argument("--rounds", type=int, default=6)
    a = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "environment": msgspec.to_builtins(capture_environment(device="cpu")), "reuse": reuse(), "h200 virtual": on_h200(),
        "cpu real": on_cpu(a.seconds, a.rounds),
    }  # fmt: skip
    a.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    ratios = [row["goodput_ratio"] for row in report["h200 virtual"]]
    print(json.dumps({"reuse": report["reuse"], "cpu real": report["cpu real"], "h200 ratio": [min(ratios), statistics.median(ratios), max(ratios)]}, indent=1))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
