"""Which backend multiplies what: measured once per number of rows, on the weights themselves.

Linears of one role (all queries, all QKV, ...) share shape and Specs, so they share a choice. A candidate is timed over the weights of all its blocks in turn,
in one CUDA graph: together they exceed the L2 cache, as in a generation. Before it is timed it must agree with the reference on the first block. A
candidate that refuses, fails or disagrees is written down with its reason and not used. Backends that the configuration names are not tuned.

Where nothing is to be measured, the registry's order decides.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from loka.formats import QTensor, Spec, relative_l2
from loka.inference.weights import Operand, PackedExperts, PackedLinear, PackedModel
from loka.kernels import registry
from loka.kernels.grouped_mm import permute, swiglu_quantize
from loka.kernels.grouped_mm.call import GroupedCall
from loka.kernels.quantize import quantize

ROLES = ("query", "cross_out", "qkv", "self_out")
TOLERANCE = 0.03  # relative L2 against the reference: tensor cores and bf16 outputs stay an order below, a wrong kernel does not
REPEATS = 5


@dataclass(frozen=True)
class Tuned:
    """A choice: role, rows, what was chosen, microseconds by candidate, and why others were not."""

    role: str
    rows: int
    chosen: str
    microseconds: dict[str, float]
    refused: dict[str, str]


class Tuning:
    """Tuned copies of a packed model, by number of rows; the weights are shared."""

    def __init__(self, packed: PackedModel, dtype: torch.dtype, *, fixed: set[str], measure: bool) -> None:
        self.packed, self.dtype, self.fixed = packed, dtype, fixed
        self.measure = measure
        self.log: list[Tuned] = []
        self._made: dict[int, PackedModel] = {}

    def tuned(self, rows: int) -> PackedModel:
        """The model with backends chosen for so many rows."""
        if rows not in self._made:
            self._made[rows] = self._tune(rows) if self.measure else self._by_rule()
        return self._made[rows]

    def _by_rule(self) -> PackedModel:
        blocks = [
            replace(b, ffn=replace(b.ffn, fused=_has_fused(b.ffn, self.dtype)))
            if isinstance(b.ffn, PackedExperts)
            else b
            for b in self.packed.blocks
        ]
        return replace(self.packed, blocks=blocks)

    def _tune(self, rows: int) -> PackedModel:
        blocks = list(self.packed.blocks)
        if "scaled_mm" not in self.fixed:
            for role in ROLES:
                name = self._pick_linear(role, [getattr(b, role) for b in blocks], rows)
                if name is not None:
                    blocks = [
                        replace(b, **{role: getattr(b, role).on(name)})
                        if getattr(b, role).activation is not None
                        else b
                        for b in blocks
                    ]
        if "grouped_mm" not in self.fixed:
            groups = [b.ffn for b in blocks if isinstance(b.ffn, PackedExperts)]
            if groups:
                backend, fused = self._pick_experts(groups, rows)
                blocks = [
                    replace(b, ffn=b.ffn.on(backend, fused=fused)) if isinstance(b.ffn, PackedExperts) else b
                    for b in blocks
                ]
        return dataclasses.replace(self.packed, blocks=blocks)

    def _pick_linear(self, role: str, linears: list[PackedLinear], rows: int) -> str | None:
        low = [m for m in linears if m.activation is not None]
        if not low:
            return None
        weight = low[0].weight
        assert isinstance(weight, QTensor)  # it has an activation Spec
        x = _sample(rows, weight.shape[1], self.dtype, weight.device)
        q = low[0].prepare(x)

        def make(name: str) -> list[Callable[[], Any]]:
            return [partial(m.on(name), q, self.dtype) for m in low]

        names = [n for n in registry.BACKENDS["scaled_mm"] if n != "reference"]
        return self._race(role, rows, {n: make(n) for n in names}, make("reference")[0], default="auto")

    def _pick_experts(self, groups: list[PackedExperts], rows: int) -> tuple[str, bool]:
        first = groups[0]
        visits = first.top + int(first.always)
        device = first.router.device
        shares = torch.rand(rows, first.routed, generator=torch.Generator(device).manual_seed(0), device=device)
        chosen = shares.topk(first.top).indices
        if first.always:
            chosen = nn.functional.pad(chosen, (0, 1), value=first.routed)
        sorting = permute(chosen, first.experts)
        x = _sample(rows * visits, first.gate_up.shape[2], self.dtype, device)
        q: Operand = x if first.specs[0] is None else quantize(x, first.specs[0])

        def make(name: str, fused: bool) -> list[Callable[[], Tensor]]:
            on = [m.on(name, fused=fused) for m in groups]
            return [lambda m=m: _run_experts(m, q, sorting.offsets, self.dtype) for m in on]  # type: ignore[misc]

        runs = {}
        mixed = (
            ("auto",) if first.specs[0] is None else ()
        )  # 16 bits: one backend's fused half may go with another's plain one
        for name in (*mixed, *registry.BACKENDS["grouped_mm"]):
            if name != "reference":
                runs[name] = make(name, False)
                if isinstance(first.activation, nn.SiLU):  # the fused kernel has no other
                    runs[f"{name} fused"] = make(name, True)
        won = self._race("experts", rows, runs, make("reference", False)[0], default="auto")
        return won.removesuffix(" fused"), won.endswith(" fused")

    def _race(
        self, role: str, rows: int, runs: dict[str, list[Callable[[], Any]]], law: Callable[[], Any], *, default: str
    ) -> str:
        expected = law()
        times: dict[str, float] = {}
        refused: dict[str, str] = {}
        for name, calls in runs.items():
            try:
                error = relative_l2(calls[0]().float(), expected.float())
                if not error < TOLERANCE:
                    refused[name] = f"differs from the reference by {error:.3g} (relative L2)"
                    continue
                times[name] = time_calls(calls, expected.device)
            except Exception as error:  # a backend that fails here must not take the engine with it; it is written down
                refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        chosen = min(times, key=lambda n: times[n]) if times else default
        self.log.append(Tuned(role, rows, chosen, times, refused))
        return chosen


def _sample(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, width, device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)


def _run_experts(moe: PackedExperts, x: Operand, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    if moe.fused:
        inner = moe.multiply_gated(x, offsets, dtype)
    else:
        inner = swiglu_quantize(moe.expand(x, offsets, dtype), moe.specs[1])
    return moe.reduce(inner, offsets, dtype)


def _has_fused(moe: PackedExperts, dtype: torch.dtype) -> bool:
    """Whether a backend other than the emulation has gate, up, SwiGLU and quantisation in one kernel for this layer."""
    if not isinstance(moe.activation, nn.SiLU):
        return False
    specs: tuple[Spec | None, Spec | None] = (
        moe.specs[0],
        moe.gate_up.spec if isinstance(moe.gate_up, QTensor) else None,
    )
    experts, n, k = moe.gate_up.shape
    data = moe.gate_up.data.dtype if isinstance(moe.gate_up, QTensor) else moe.gate_up.dtype
    call = GroupedCall(experts, k, n, experts, *specs, data, dtype, False, True, moe.specs[1])
    name = moe.backend if moe.backend != "auto" else None
    names = [name] if name else [n for n in registry.BACKENDS["grouped_mm"] if n != "reference"]
    device = moe.router.device
    return any(bool(registry.backend("grouped_mm", n).supports(call, device)) for n in names)


def time_calls(calls: list[Callable[[], Any]], device: torch.device) -> float:
    """Microseconds per call: all calls in one CUDA graph, the best of a few replays; on a CPU plainly, for tests."""
    import time

    if device.type != "cuda":
        begin = time.perf_counter()
        for call in calls:
            call()
        return 1e6 * (time.perf_counter() - begin) / len(calls)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    best = float("inf")
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, 1e3 * start.elapsed_time(stop) / len(calls))
    return best
