"""Grouped GEMMs of experts: bare, with quantisation of x inside the clock, with SwiGLU behind them."""

# ruff: noqa: B023  (closures over a loop's variables are called before the loop moves on)

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from generative_kernels_plan import BLOCKS, GROUP, PLAIN, ROWS, Plan, write
from generative_kernels_tiles import exact_swiglu, gemm, swiglu
from generative_kernels_timing import bar, close, fastest, fit, guarded, over

from loka.formats import QTensor
from loka.kernels import registry
from loka.kernels.grouped_mm import grouped_mm, swiglu_quantize
from loka.kernels.quantize import quantize
from loka.measure.adapter import ADAPTERS
from loka.measure.conformance import Conformance
from loka.measure.grouped import GroupedOperands, LoadedCall
from loka.measure.timing import Timing, sets_needed

ROW_ERROR = 6e-3  # relative L2: rounding to bf16 is 1.7e-3, sums that stay in FP8 tensor cores 1.2e-3


def operand_sets(
    plan: Plan, variant: str, rows: int, k: int, n: int, *, even: bool
) -> tuple[LoadedCall, list[GroupedOperands]]:
    adapter: Any = ADAPTERS["grouped_mm"]
    fast = "|fast" if variant == ROWS else ""
    call = adapter.parse((rows * plan.experts, k, n), f"{variant}|{plan.experts}{'|even' if even else ''}{fast}")
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
                    or not backend.supports(call, plan.device)
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
        act = torch.compile(silu_mul, dynamic=False, fullgraph=True) if cuda else silu_mul
        backend = "torch" if cuda else "reference"

        def plain(o: GroupedOperands, act: Any = act, backend: str = backend) -> torch.Tensor:
            return act(grouped_mm(o.x16, o.w16, o.offsets, out_dtype=torch.bfloat16, backend=backend))

        def apart(o: GroupedOperands) -> Any:
            h = grouped_mm(o.x, o.w, o.offsets, out_dtype=torch.bfloat16, backend=plan.ours)
            return swiglu_quantize(h, GROUP, backend=plan.ours)

        exact, row_exact = exact_swiglu(sets[0]).float(), exact_swiglu(row_sets[0]).float()
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


def silu_mul(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up
