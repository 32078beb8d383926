"""Our kernels under every configuration, and the proof that a configuration is right.

Each is checked against the law in a process of its own, several at a time: a crash is a reason, and most of the time is compilation, which fills Triton's cache.
"""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from generative_kernels_plan import BLOCKS, GROUP, PLAIN, ROWS, Plan, say

from loka.formats import QTensor
from loka.measure.adapter import ADAPTERS
from loka.measure.beam import BeamOperands
from loka.measure.grouped import GroupedOperands

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
AGAIN = "not checked: an earlier configuration broke this process"
_BROKEN: list[str] = []  # in a child: what left CUDA unusable there


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
        call = adapter.parse((1040, 1408, 2816), f"{variant}|53{fast}")
        operands = adapter.operands(call, seed=1, distribution="normal", device=device)
        if fused == "gemm":
            verdict = adapter.judge(gemm(operands, tile), call, operands)
            return "" if verdict else verdict.reason
        found = swiglu(operands, tile)
        exact = exact_swiglu(operands)
        error = float((found.dequantize().double() - exact).norm() / exact.norm())
        return "" if error < 0.03 else f"fused SwiGLU is {error:.3f} from float64 (FP8 rounding alone: about 0.026)"
    except Exception as error:
        try:
            torch.cuda.synchronize()
        except Exception:  # CUDA stays broken in this process: what comes after must go elsewhere
            _BROKEN.append(kind)
        return f"{type(error).__name__}: {str(error)[:300]}"


def exact_swiglu(o: GroupedOperands) -> torch.Tensor:
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
        call = adapter.parse((2, 200, 333), variant)
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
