"""The kernels of generative inference on one GPU: grouped GEMM, the layer around it, selection, attention of beams. Every tile, then the bars.

    python benchmarks/generative_kernels.py --seconds 150 --out generative.json
    python benchmarks/generative_kernels.py --smoke --out generative.json          CPU, emulation, tiny shapes: walks every section

Order: (1) every configuration is proved right on ragged groups with an idle expert, several processes at a time (which also fills Triton's cache), (2) what is
green is timed section by section with CUDA graphs, rotated operands and interleaved repeats, (3) the bars are held against the best configuration. The record is
rewritten after every section; a row that fails says why and stops nothing; sections that no longer fit into the time are named.
"""

# ruff: noqa: B023  (closures over a loop's variables are called before the loop moves on)

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.grouped_mm import (
    Permutation,
    combine,
    gather,
    grouped_mm,
    grouped_swiglu,
    permute,
    swiglu_quantize,
)
from loka.kernels.quantize import quantize
from loka.measure.adapter import ADAPTERS
from loka.measure.beam import BeamOperands
from loka.measure.conformance import Conformance
from loka.measure.device import snapshot
from loka.measure.grouped import GroupedOperands, LoadedCall
from loka.measure.timing import Candidate, CaptureError, Timing, sets_needed, time_together
from loka.records import save
from loka.records.bench import KernelBench, KernelRow

GROUP, SQUARE, ROW = Spec.parse("e4m3:1x128"), Spec.parse("e4m3:128x128"), Spec.parse("e4m3:row")
BLOCKS, ROWS, PLAIN = "e4m3:1x128@e4m3:128x128", "e4m3:row@e4m3:row", "bfloat16"

# BM, BN, warps, stages, programs per multiprocessor
TILES: dict[str, list[tuple[int, ...]]] = {
    BLOCKS: [
        (64, 128, 4, 3, 2), (64, 128, 4, 3, 3), (128, 128, 8, 3, 1), (128, 128, 8, 4, 1), (64, 128, 4, 4, 2), (64, 64, 4, 4, 3),
        (128, 64, 4, 4, 2), (64, 128, 8, 4, 2),
    ],
    ROWS: [
        (128, 256, 8, 3, 1), (128, 128, 8, 4, 1), (128, 128, 4, 3, 2), (64, 256, 4, 4, 1), (64, 128, 4, 4, 2), (64, 256, 4, 2, 2),
        (128, 256, 8, 4, 1),
    ],
    PLAIN: [(128, 128, 8, 4, 1), (128, 256, 8, 3, 1), (64, 128, 4, 4, 2)],
}  # fmt: skip
FUSED: dict[str, list[tuple[int, ...]]] = {
    BLOCKS: [(64, 128, 4, 2, 2), (64, 128, 8, 2, 2), (64, 128, 4, 3, 1), (128, 128, 8, 3, 1), (64, 128, 8, 4, 1)],
    ROWS: [(128, 128, 8, 3, 1), (64, 128, 4, 2, 2), (64, 128, 4, 4, 1), (128, 128, 8, 4, 1)],
}
ATTENTION: list[tuple[int, ...]] = [
    (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3), (128, 128, 8, 3),
]  # fmt: skip
ROW_ERROR = 6e-3  # relative L2: rounding to bf16 is 1.7e-3, sums that stay in FP8 tensor cores 1.2e-3
SELECT = [
    {"select_warps": 16}, {"select_warps": 32}, {"select_warps": 8}, {"maxima_block": 4096, "maxima_warps": 4},
    {"maxima_block": 16384, "maxima_warps": 16},
]  # fmt: skip


@dataclass
class Plan:
    """Where and how large."""

    device: torch.device
    ours: str
    experts: int
    d: int
    hidden: int
    rows: tuple[int, ...]  # per expert
    top: int
    selection: tuple[int, int, int]  # requests, beams, codes
    beams: int
    attention: tuple[tuple[int, int], ...]  # requests, context
    heads: int
    head: int
    repeats: int
    end: float = 0.0
    rows_out: list[KernelRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    green: dict[str, dict[tuple[int, ...], str]] = field(
        default_factory=dict
    )  # what of each kind: tile -> reason, "" for green
    out: Path | None = None

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def h200() -> Plan:
    return Plan(torch.device("cuda"), "triton", 53, 1408, 1408, (128, 512, 29, 232), 3, (16, 512, 8192), 512,
                ((8, 512), (8, 3000), (1, 3000), (16, 3000)), 11, 128, 15)  # fmt: skip


def smoke() -> Plan:
    return Plan(torch.device("cpu"), "reference", 3, 128, 128, (8,), 2, (2, 4, 32), 8, ((2, 20),), 2, 16, 3)


def write(plan: Plan) -> None:
    record = KernelBench(
        method="CUDA graph, events" if plan.device.type == "cuda" else "perf_counter on a CPU", peaks=None,
        rows=plan.rows_out, environment=snapshot(), notes=plan.notes,
    )  # fmt: skip
    if plan.out is not None:
        save(record, plan.out)


def say(plan: Plan, text: str) -> None:
    plan.notes.append(text)
    print(text, flush=True)


# -- checks: a configuration against the law, in a process of its own ------------------------------------------------------------------------------


AGAIN = "not checked: an earlier configuration broke this process"
_BROKEN: list[str] = []


def check_tile(kind: str, tile: tuple[int, ...]) -> str:
    """ "" where the configuration is right, otherwise what is wrong. Runs in a child: a crash is a reason."""
    torch.set_num_threads(1)
    device = torch.device("cuda")
    if _BROKEN:
        return AGAIN
    try:
        if kind == "attention":
            return _check_attention(tile, device)
        fused, _, variant = kind.partition(" ")
        adapter: Any = ADAPTERS["grouped_mm"]
        fast = "|fast" if variant == ROWS else ""
        call = adapter._call((1040, 1408, 2816), f"{variant}|53{fast}")
        operands = adapter.operands(call, seed=1, distribution="normal", device=device)
        if fused == "gemm":
            verdict = adapter.judge(gemm(operands, tile), call, operands)
            return "" if verdict else verdict.reason
        found = swiglu(operands, tile)
        exact = _exact_swiglu(operands)
        error = float((found.dequantize().double() - exact).norm() / exact.norm())
        return "" if error < 0.03 else f"fused SwiGLU is {error:.3f} from float64 (FP8 rounding alone: about 0.026)"
    except Exception as error:
        try:
            torch.cuda.synchronize()
        except Exception:  # CUDA stays broken in this process: what comes after must go elsewhere
            _BROKEN.append(kind)
        return f"{type(error).__name__}: {str(error)[:300]}"


def _exact_swiglu(o: GroupedOperands) -> torch.Tensor:
    assert isinstance(o.x, QTensor)
    assert isinstance(o.w, QTensor)
    x, w = o.x.dequantize().double(), o.w.dequantize()
    ends = o.offsets.tolist()
    h = torch.cat([x[a:b] @ w[e].double().T for e, (a, b) in enumerate(pairwise(ends))])
    gate, up = h.chunk(2, 1)
    return F.silu(gate) * up


def _check_attention(tile: tuple[int, ...], device: torch.device) -> str:
    adapter: Any = ADAPTERS["beam_attention"]
    for variant in ("11/11x128|shared|ragged", "4/2x128|ragged"):
        call = adapter._call((2, 200, 333), variant)
        operands = adapter.operands(call, seed=1, distribution="normal", device=device)
        verdict = adapter._judge(lambda o=operands: attend(o, tile), call, operands, poison=True)
        if not verdict:
            return f"{variant}: {verdict.reason}"
    return ""


def prove(plan: Plan, processes: int) -> None:
    """Check every configuration; several at a time, since most of the time is compilation."""
    jobs = [(f"gemm {kind}", tile) for kind, tiles in TILES.items() for tile in tiles]
    jobs += [(f"fused {kind}", tile) for kind, tiles in FUSED.items() for tile in tiles]
    jobs += [("attention", tile) for tile in ATTENTION]
    begin = time.monotonic()
    count = len(jobs)
    for attempt in range(3):
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = [(kind, tile, pool.submit(check_tile, kind, tile)) for kind, tile in jobs]
            for kind, tile, future in futures:
                try:
                    reason = future.result(timeout=max(plan.left, 1.0))
                except BrokenProcessPool:
                    reason = AGAIN
                except Exception as error:
                    reason = f"{type(error).__name__}: {str(error)[:200]}"
                plan.green.setdefault(kind, {})[tile] = reason
        jobs = [(kind, tile) for kind, tile in jobs if plan.green[kind][tile] == AGAIN]
        if not jobs:
            break
        print(f"attempt {attempt + 2} for {len(jobs)} configurations", flush=True)
    for kind, tiles in plan.green.items():
        for tile, reason in tiles.items():
            if reason:
                say(plan, f"RED {kind} {tile}: {reason}")
    say(plan, f"{count} configurations checked in {time.monotonic() - begin:.0f} s")


# -- what is timed -------------------------------------------------------------------------------------------------------------------------------


def gemm(o: GroupedOperands, tile: tuple[int, ...] | None) -> torch.Tensor:
    """Our GEMM with one tile."""
    from loka.kernels.grouped_mm import triton, triton_kernels

    a, b, sa, sb, scales = triton._operands(o.x, o.w)
    return triton_kernels.gemm(a, b, sa, sb, o.offsets, scales=scales, exact=False, out_dtype=torch.bfloat16, tile=tile)


def swiglu(o: GroupedOperands, tile: tuple[int, ...] | None) -> QTensor:
    """Our GEMM with SwiGLU and quantisation behind it."""
    from loka.kernels.grouped_mm import triton, triton_kernels

    a, b, sa, sb, scales = triton._operands(o.x, o.w)
    options = {"scales": scales, "exact": False, "fp8": True, "pow2": False, "out_dtype": torch.bfloat16}
    out, scale = triton_kernels.gemm_swiglu(a, b, sa, sb, o.offsets, **options, tile=tile)
    return QTensor(out, scale, GROUP)


def attend(o: BeamOperands, tile: tuple[int, ...] | None) -> torch.Tensor:
    from loka.kernels.beam_attention import triton_kernels

    return triton_kernels.attend(o.q, o.k, o.v, o.lengths, o.q.shape[3] ** -0.5, o.v is o.k, tile)


def fit(plan: Plan, op: str, call: str, shape: dict[str, int], ways: dict[str, tuple[list[Callable[[], Any]], Conformance]],
        base: str) -> dict[str, Timing]:  # fmt: skip
    """Time together what is green and can be captured; write a row for each way."""
    refused = {name: verdict.reason for name, (_, verdict) in ways.items() if not verdict}
    candidates = [Candidate(name, thunks, verdict) for name, (thunks, verdict) in ways.items() if verdict]
    timings: list[Timing] = []
    while candidates:
        try:
            timings = time_together(candidates, plan.device, repeats=plan.repeats)
            break
        except CaptureError as error:
            culprit = next(c for c in candidates if str(error).startswith(f"{c.name} "))
            refused[culprit.name] = str(error)
            candidates = [c for c in candidates if c is not culprit]
        except Exception as error:
            traceback.print_exc()
            refused |= {c.name: f"the run of all failed: {type(error).__name__}: {error}" for c in candidates}
            candidates = []
            if plan.device.type == "cuda":
                torch.cuda.synchronize()
    found = {t.name: t for t in timings}
    for name, (thunks, verdict) in ways.items():
        timing = found.get(name)
        speedup = timing.speedup_over(found[base]) if timing and base in found and name != base else None
        interval = timing.microseconds() if timing else None
        plan.rows_out.append(KernelRow(
            op=op, call=call, shape=shape, backend=name, refusal=refused.get(name), microseconds=interval, speedup=speedup,
            error=verdict.error if verdict.error < float("inf") else None, tolerance=verdict.tolerance, buffers=len(thunks),
        ))  # fmt: skip
        shown = f"{interval.value:9.1f} us" if interval else f"        - {refused.get(name, '')[:120]}"
        print(f"  {name:<46}{shown}" + (f"  {speedup.value:5.2f}x" if speedup else ""), flush=True)
    return found


def guarded(run: Callable[[], Any], judge: Callable[[Any], Conformance]) -> Conformance:
    """A verdict, whatever happens."""
    try:
        return judge(run())
    except Exception as error:
        return Conformance(False, float("inf"), 0.0, f"{type(error).__name__}: {str(error)[:300]}")


def close(law: torch.Tensor, allowed: float) -> Callable[[Any], Conformance]:
    """Relative L2 distance to a result in high precision."""

    def judge(found: Any) -> Conformance:
        values = found.dequantize() if isinstance(found, QTensor) else found
        error = float((values.double() - law.double()).norm() / law.double().norm())
        ok = error <= allowed
        return Conformance(ok, error, allowed, "" if ok else f"relative L2 error {error:.3g}, allowed {allowed:g}")

    return judge


def bar(plan: Plan, what: str, value: float | None, floor: float) -> None:
    if value is None:
        say(plan, f"bar not measured: {what} (>= {floor})")
    else:
        say(plan, f"{'met   ' if value >= floor else 'MISSED'} {value:5.2f} (>= {floor}) {what}")


def over(times: dict[str, Timing], name: str, base: str) -> float | None:
    return times[name].speedup_over(times[base]).value if name in times and base in times else None


def fastest(times: dict[str, Timing], prefix: str) -> str | None:
    names = [name for name in times if name.startswith(prefix)]
    return min(names, key=lambda name: times[name].microseconds().value) if names else None


def operand_sets(
    plan: Plan, variant: str, rows: int, k: int, n: int, *, even: bool
) -> tuple[LoadedCall, list[GroupedOperands]]:
    adapter: Any = ADAPTERS["grouped_mm"]
    fast = "|fast" if variant == ROWS else ""
    call = adapter._call((rows * plan.experts, k, n), f"{variant}|{plan.experts}{'|even' if even else ''}{fast}")
    count = min(3, sets_needed(adapter.bytes_moved(call), plan.device))
    return call, [adapter.operands(call, seed=s, distribution="normal", device=plan.device) for s in range(count)]


def judged(call: LoadedCall, operands: GroupedOperands) -> Callable[[Any], Conformance]:
    """Row by row against the law in float32, computed once; `prove` has judged every element of a smaller problem."""
    law = registry.backend("grouped_mm", "reference").run(
        operands.x, operands.w, operands.offsets, out_dtype=torch.float32
    )
    size = law.norm(dim=1).clamp(min=1e-12)

    def judge(out: torch.Tensor) -> Conformance:
        error = float(((out.float() - law).norm(dim=1) / size).max())
        ok = error <= ROW_ERROR  # NaN is not
        return Conformance(ok, error, ROW_ERROR, "" if ok else f"a row is {error:.3g} off, allowed {ROW_ERROR}")

    return judge


def section_gemm(plan: Plan) -> None:
    """Bare GEMMs of every tile; then the best of each kind with quantisation of x inside the clock, which is what the bar asks."""
    adapter: Any = ADAPTERS["grouped_mm"]
    cuda = plan.device.type == "cuda"
    for rows in plan.rows:
        even = rows in (128, 512)
        ways: dict[str, Any] = {}
        prepared: dict[str, Any] = {}
        for variant in (PLAIN, ROWS, BLOCKS):
            call, sets = operand_sets(plan, variant, rows, plan.d, 2 * plan.hidden, even=even)
            right = judged(call, sets[0])
            prepared[variant] = right, sets
            if variant == PLAIN:
                base = [adapter.baseline(call, o) for o in sets]
                ways["bf16"] = base, guarded(base[0], right)
            for name in ("torch", "reference", "deepgemm"):
                backend = registry.backend("grouped_mm", name)
                if (
                    (name == "reference") == cuda
                    or (variant == PLAIN and name == "torch")
                    or not backend.supports(call.call, plan.device)
                ):
                    continue
                thunks = [adapter.thunk(backend, call, o) for o in sets]
                ways[f"{variant} {name}"] = thunks, guarded(thunks[0], right)
            for tile, reason in plan.green.get(f"gemm {variant}", {}).items():
                if not reason:
                    thunks = [lambda o=o, tile=tile: gemm(o, tile) for o in sets]
                    ways[f"{variant} ours {tile}"] = thunks, guarded(thunks[0], right)
        text = f"{plan.experts} experts x {rows} rows{' skewed' if not even else ''}, {plan.d} -> {2 * plan.hidden}"
        shape = {"m": rows * plan.experts, "k": plan.d, "n": 2 * plan.hidden, "experts": plan.experts}
        print(f"grouped GEMM, {text}", flush=True)
        times = fit(plan, "grouped_mm", f"bare: {text}", shape, ways, "bf16")
        with_quantize(plan, text, shape, ways, prepared, times)
        write(plan)
        if plan.left < 10:
            return


def with_quantize(
    plan: Plan,
    text: str,
    shape: dict[str, int],
    ways: dict[str, Any],
    prepared: dict[str, Any],
    times: dict[str, Timing],
) -> None:
    """bf16 rows in, product out: x is quantised inside the clock, the weights were before."""
    best = {f"quantise + {name}": name for kind in (ROWS, BLOCKS) if (name := fastest(times, f"{kind} ours"))}
    best |= {
        f"quantise + {name}": name
        for kind in (ROWS, BLOCKS)
        for name in times
        if name in (f"{kind} torch", f"{kind} reference")
    }
    chosen: dict[str, Any] = {"bf16": ways["bf16"]}
    for label, name in best.items():
        variant, _, rest = name.partition(" ")
        right, sets = prepared[variant]
        tile = (
            tuple(json.loads(rest.removeprefix("ours ").replace("(", "[").replace(")", "]")))
            if rest.startswith("ours")
            else None
        )

        def run(o: GroupedOperands, tile: Any = tile, rest: str = rest) -> torch.Tensor:
            assert isinstance(o.x, QTensor)
            fresh = GroupedOperands(quantize(o.x16, o.x.spec), o.w, o.offsets, o.x16, o.w16)
            if tile is not None:
                return gemm(fresh, tile)
            return grouped_mm(fresh.x, fresh.w, o.offsets, out_dtype=torch.bfloat16, fast_accum=True, backend=rest)

        thunks = [lambda o=o, run=run: run(o) for o in sets]
        chosen[label] = thunks, guarded(thunks[0], right)
    print(f"grouped GEMM with quantisation, {text}", flush=True)
    found = fit(plan, "grouped_mm", f"quantised inside: {text}", shape, chosen, "bf16")
    for kind in (ROWS, BLOCKS):
        name = fastest(found, f"quantise + {kind}")
        if "skewed" in text and plan.device.type == "cuda":
            continue  # the bar is for even loads; the rows above tell the rest
        bar(
            plan,
            f"grouped_mm {kind} with quantisation over bf16, {text} ({name})",
            over(found, name, "bf16") if name else None,
            1.5,
        )


def section_swiglu(plan: Plan) -> None:
    """GEMM + SwiGLU + quantise: fused, in two kernels, and in bf16."""
    cuda = plan.device.type == "cuda"
    for rows in plan.rows[:2]:
        _, sets = operand_sets(plan, BLOCKS, rows, plan.d, 2 * plan.hidden, even=True)
        _, row_sets = operand_sets(plan, ROWS, rows, plan.d, 2 * plan.hidden, even=True)
        act = torch.compile(_silu_mul, dynamic=False, fullgraph=True) if cuda else _silu_mul
        backend = "torch" if cuda else "reference"

        def plain(o: GroupedOperands, act: Any = act, backend: str = backend) -> torch.Tensor:
            return act(grouped_mm(o.x16, o.w16, o.offsets, out_dtype=torch.bfloat16, backend=backend))

        def apart(o: GroupedOperands) -> Any:
            h = grouped_mm(o.x, o.w, o.offsets, out_dtype=torch.bfloat16, backend=plan.ours)
            return swiglu_quantize(h, GROUP, backend=plan.ours)

        exact, row_exact = _exact_swiglu(sets[0]).float(), _exact_swiglu(row_sets[0]).float()
        ways: dict[str, Any] = {
            "bf16": ([lambda o=o: plain(o) for o in sets], guarded(lambda: plain(sets[0]), close(exact, 0.02))),
            "blocks, two kernels": (
                [lambda o=o: apart(o) for o in sets],
                guarded(lambda: apart(sets[0]), close(exact, 0.04)),
            ),
        }
        for kind, which, law in ((BLOCKS, sets, exact), (ROWS, row_sets, row_exact)):
            for tile, reason in plan.green.get(f"fused {kind}", {}).items():
                if not reason:
                    thunks = [lambda o=o, tile=tile: swiglu(o, tile) for o in which]
                    ways[f"{kind} fused {tile}"] = thunks, guarded(thunks[0], close(law, 0.04))
        text = f"{plan.experts} experts x {rows} rows, {plan.d} -> 2 x {plan.hidden}"
        shape = {"m": rows * plan.experts, "k": plan.d, "n": 2 * plan.hidden, "experts": plan.experts}
        print(f"GEMM + SwiGLU + quantise, {text}", flush=True)
        fit(plan, "grouped_mm", f"swiglu: {text}", shape, ways, "bf16")
        write(plan)
        if plan.left < 10:
            return


def _silu_mul(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Layer:
    """A mixture of experts on T tokens: what is shared, in both precisions."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    q_gate_up: QTensor
    q_down: QTensor


def make_layer(plan: Plan, rows: int, seed: int) -> Layer:
    g = torch.Generator(device=plan.device).manual_seed(seed)
    tokens = max(1, rows * plan.experts // plan.top)
    options: dict[str, Any] = {"generator": g, "device": plan.device}
    x = torch.randn(tokens, plan.d, **options)
    bias = 0.6 * torch.randn(plan.experts, **options)  # a skewed router
    weights, ids = (torch.randn(tokens, plan.experts, **options) + bias).softmax(-1).topk(plan.top, -1)
    gate_up = torch.randn(plan.experts, 2 * plan.hidden, plan.d, **options) * plan.d**-0.5
    down = torch.randn(plan.experts, plan.d, plan.hidden, **options) * plan.hidden**-0.5
    from loka.formats import quantize as law

    return Layer(
        x.bfloat16(), ids, weights, gate_up.bfloat16(), down.bfloat16(), law(gate_up, SQUARE), law(down, SQUARE)
    )


def plain_layer(layer: Layer, backend: str) -> torch.Tensor:
    """What a user would write: sort, gather, grouped GEMMs, scatter back."""
    experts, top = layer.gate_up.shape[0], layer.ids.shape[1]
    visits = layer.ids.flatten()
    order = visits.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=visits.device).scatter_add(
        0, visits, torch.ones_like(visits)
    )
    offsets = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    h = grouped_mm(layer.x[order // top], layer.gate_up, offsets, out_dtype=torch.bfloat16, backend=backend)
    y = grouped_mm(_silu_mul(h), layer.down, offsets, out_dtype=torch.bfloat16, backend=backend)
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return (y[back].view(-1, top, y.shape[1]) * layer.weights.to(y.dtype).unsqueeze(-1)).sum(1)


def our_layer(layer: Layer, *, fp8: bool, fused: bool, ours: str, plain: str) -> torch.Tensor:
    """Our routing; bf16 with the library's GEMM, or FP8 throughout."""
    p: Permutation = permute(layer.ids, layer.gate_up.shape[0], backend=ours)
    if not fp8:
        rows = gather(layer.x, p, backend=ours)
        h: Any = grouped_mm(rows, layer.gate_up, p.offsets, out_dtype=torch.bfloat16, backend=plain)
        a = swiglu_quantize(h, None, backend=ours)
        y = grouped_mm(a, layer.down, p.offsets, out_dtype=torch.bfloat16, backend=plain)
        return combine(y, p, layer.weights, backend=ours)
    rows = gather(quantize(layer.x, GROUP, backend=ours), p, backend=ours)  # each token once, not once per visit
    if fused:
        a = grouped_swiglu(rows, layer.q_gate_up, p.offsets, spec=GROUP, backend=ours)
    else:
        h = grouped_mm(rows, layer.q_gate_up, p.offsets, out_dtype=torch.bfloat16, backend=ours)
        a = swiglu_quantize(h, GROUP, backend=ours)
    y = grouped_mm(a, layer.q_down, p.offsets, out_dtype=torch.bfloat16, backend=ours)
    return combine(y, p, layer.weights, backend=ours)


def section_layer(plan: Plan) -> None:
    """The whole mixture, router and shared expert left out."""
    cuda = plan.device.type == "cuda"
    library = "torch" if cuda else "reference"
    for rows in plan.rows:
        layers = [make_layer(plan, rows, seed) for seed in range(2)]
        exact = plain_layer(layers[0], library).float()
        compiled = torch.compile(plain_layer, dynamic=False, fullgraph=True) if cuda else plain_layer
        options = {"ours": plan.ours, "plain": library}
        forms: dict[str, tuple[Callable[[Layer], Any], float]] = {
            "bf16": (lambda layer: compiled(layer, library), 0.02),
            "bf16 eager": (lambda layer: plain_layer(layer, library), 0.02),
            "bf16, our routing": (lambda layer: our_layer(layer, fp8=False, fused=False, **options), 0.02),
            "FP8 blocks, SwiGLU apart": (lambda layer: our_layer(layer, fp8=True, fused=False, **options), 0.09),
            "FP8 blocks, SwiGLU fused": (lambda layer: our_layer(layer, fp8=True, fused=True, **options), 0.09),
        }
        ways = {
            name: ([lambda layer=layer, run=run: run(layer) for layer in layers], guarded(lambda run=run: run(layers[0]), close(exact, allowed)))
            for name, (run, allowed) in forms.items()
        }  # fmt: skip
        tokens = layers[0].x.shape[0]
        text = f"{tokens} tokens, top {plan.top} of {plan.experts}, {plan.d} -> {plan.hidden} -> {plan.d}"
        print(f"mixture of experts, {text}", flush=True)
        fit(plan, "grouped_mm", f"layer: {text}", {"tokens": tokens, "experts": plan.experts}, ways, "bf16")
        if cuda:
            pieces(plan, layers, text)
        write(plan)
        if plan.left < 15:
            return


def pieces(plan: Plan, layers: list[Layer], text: str) -> None:
    """Each step of the layer alone, so that what bounds it can be seen."""
    ours, green = plan.ours, Conformance(True, 0.0, 0.0)
    ways: dict[str, Any] = {}
    for layer in layers:
        p = permute(layer.ids, plan.experts, backend=ours)
        q = quantize(layer.x, GROUP, backend=ours)
        rows = gather(q, p, backend=ours)
        h = grouped_mm(rows, layer.q_gate_up, p.offsets, out_dtype=torch.bfloat16, backend=ours)
        a = swiglu_quantize(h, GROUP, backend=ours)
        y = grouped_mm(a, layer.q_down, p.offsets, out_dtype=torch.bfloat16, backend=ours)
        steps: dict[str, Callable[[], Any]] = {
            "permute": lambda s=layer: permute(s.ids, plan.experts, backend=ours),
            "permute, torch": lambda s=layer: permute(s.ids, plan.experts, backend="reference"),
            "quantise": lambda s=layer: quantize(s.x, GROUP, backend=ours),
            "gather": lambda q=q, p=p: gather(q, p, backend=ours),
            "gate and up": lambda r=rows, s=layer, p=p: grouped_mm(r, s.q_gate_up, p.offsets, out_dtype=torch.bfloat16, backend=ours),
            "swiglu": lambda h=h: swiglu_quantize(h, GROUP, backend=ours),
            "gate and up, swiglu fused": lambda r=rows, s=layer, p=p: grouped_swiglu(r, s.q_gate_up, p.offsets, spec=GROUP, backend=ours),
            "down": lambda a=a, s=layer, p=p: grouped_mm(a, s.q_down, p.offsets, out_dtype=torch.bfloat16, backend=ours),
            "combine": lambda y=y, s=layer, p=p: combine(y, p, s.weights, backend=ours),
        }  # fmt: skip
        for name, step in steps.items():
            ways.setdefault(name, ([], green))[0].append(step)
    fit(plan, "grouped_mm", f"steps: {text}", {"tokens": layers[0].x.shape[0]}, ways, "permute, torch")


def section_topk(plan: Plan) -> None:
    """Selection: plain, and fused with log-softmax and mask."""
    adapter: Any = ADAPTERS["topk"]
    requests, beams, codes = plan.selection
    shapes = [(requests, beams * codes, plan.beams), (1, beams * codes, plan.beams)]
    names = [name for name in registry.BACKENDS["topk"] if plan.device.type == "cuda" or name != "triton"]
    for shape in shapes:
        for variant in ("float32", "bfloat16", f"float32|beams={beams}", f"bfloat16|beams={beams}|masked"):
            width = codes if "beams" in variant else beams * codes
            (call,) = adapter.calls([(shape[0], width, shape[2])], [variant])
            count = min(2, sets_needed(adapter.bytes_moved(call), plan.device))
            sets = [adapter.operands(call, seed=s, distribution="normal", device=plan.device) for s in range(count)]
            base = [adapter.baseline(call, o) for o in sets]
            ways: dict[str, Any] = {
                "torch.topk": (base, guarded(base[0], lambda _: adapter.check_baseline(call, sets[0])))
            }
            for name in names:
                if name == "reference" and plan.device.type == "cuda":
                    continue
                backend = registry.backend("topk", name)
                thunks = [adapter.thunk(backend, call, o) for o in sets]
                ways[name] = thunks, guarded(thunks[0], lambda _, b=backend: adapter.check(b, call, sets[0]))
            if plan.device.type == "cuda" and shape[0] > 1 and variant in ("float32", f"bfloat16|beams={beams}|masked"):
                ways |= tuned(adapter, call, sets)
            print(f"topk, {call}", flush=True)
            found = fit(plan, "topk", str(call), adapter.shape(call), ways, "torch.topk")
            if shape[0] == requests:
                bar(
                    plan,
                    f"topk {call} over torch",
                    over(found, plan.ours if plan.ours in found else names[0], "torch.topk"),
                    2.0,
                )
            write(plan)
            if plan.left < 8:
                return


def tuned(adapter: Any, call: Any, sets: Sequence[Any]) -> dict[str, Any]:
    """The same kernel under other launch options."""
    from loka.kernels.topk import triton_kernels

    backend = registry.backend("topk", "triton")
    ways = {}
    for options in SELECT:

        def run(o: Any, options: dict[str, int] = options) -> Any:
            before = dict(triton_kernels.LAUNCH)
            triton_kernels.LAUNCH.update(options)
            try:
                return adapter.thunk(backend, call, o)()
            finally:
                triton_kernels.LAUNCH.update(before)

        thunks = [lambda o=o, run=run: run(o) for o in sets]
        name = "triton " + ", ".join(f"{key} {value}" for key, value in options.items())
        ways[name] = thunks, guarded(thunks[0], lambda _: Conformance(True, 0.0, 0.0))
    return ways


def section_attention(plan: Plan) -> None:
    """Beams over a shared context: SDPA without and with a mask, ours with every tile."""
    adapter: Any = ADAPTERS["beam_attention"]
    for requests, context in plan.attention:
        for variant in (
            f"{plan.heads}/{plan.heads}x{plan.head}|shared",
            f"{plan.heads}/{plan.heads}x{plan.head}|shared|ragged",
        ):
            ragged = variant.endswith("ragged")
            if ragged and context < 3000 and plan.device.type == "cuda":
                continue
            (call,) = adapter.calls([(requests, plan.beams, context)], [variant])
            sets = [adapter.operands(call, seed=s, distribution="normal", device=plan.device) for s in range(2)]
            base = [adapter.baseline(call, o) for o in sets]
            ways: dict[str, Any] = {"SDPA": (base, guarded(base[0], lambda _: adapter.check_baseline(call, sets[0])))}
            for name in ("torch", "reference") if plan.device.type != "cuda" else ("torch", "triton"):
                backend = registry.backend("beam_attention", name)
                thunks = [adapter.thunk(backend, call, o) for o in sets]
                ways[name] = thunks, guarded(thunks[0], lambda _, b=backend: adapter.check(b, call, sets[0]))
            if not ragged:
                for tile, reason in plan.green.get("attention", {}).items():
                    if not reason:
                        thunks = [lambda o=o, tile=tile: attend(o, tile) for o in sets]
                        ways[f"triton {tile}"] = thunks, guarded(thunks[0], lambda _: Conformance(True, 0.0, 0.0))
            print(f"beam attention, {call}", flush=True)
            fit(plan, "beam_attention", str(call), adapter.shape(call), ways, "SDPA")
            write(plan)
            if plan.left < 8:
                return


SECTIONS = {
    "gemm": section_gemm, "topk": section_topk, "swiglu": section_swiglu, "attention": section_attention, "layer": section_layer,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the record, JSON")
    parser.add_argument("--seconds", type=float, default=150.0, help="stop starting new work after this long")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"comma-separated: {', '.join(SECTIONS)}")
    parser.add_argument("--processes", type=int, default=12, help="configurations compiled and checked at a time")
    parser.add_argument("--smoke", action="store_true", help="CPU, emulation, tiny shapes")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    plan = smoke() if options.smoke else h200()
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no usable GPU; hint: --smoke")
    plan.end, plan.out = time.monotonic() + options.seconds, options.out
    if plan.device.type == "cuda":
        prove(plan, options.processes)
        write(plan)
    for name in chosen:
        if plan.left < 8:
            say(plan, f"out of time: {name} was not measured")
            continue
        begin = time.monotonic()
        try:
            SECTIONS[name](plan)
        except Exception as error:
            traceback.print_exc()
            say(plan, f"section {name} stopped: {type(error).__name__}: {str(error)[:300]}")
        say(plan, f"section {name}: {time.monotonic() - begin:.0f} s")
        write(plan)
    missed = [note for note in plan.notes if note.startswith("MISSED")]
    print(*[note for note in plan.notes if note[:6] in ("met   ", "MISSED")], sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
