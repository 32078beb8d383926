"""The layer around the grouped GEMM, a mixture of experts: whole, in both precisions, and step by step."""

# ruff: noqa: B023  (closures over a loop's variables are called before the loop moves on)

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from generative_kernels_gemm import silu_mul
from generative_kernels_plan import GROUP, SQUARE, Plan, write
from generative_kernels_timing import close, fit, guarded

from loka.formats import QTensor
from loka.formats import quantize as quantize_law
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
from loka.measure.conformance import Conformance


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
    return Layer(
        x.bfloat16(),
        ids,
        weights,
        gate_up.bfloat16(),
        down.bfloat16(),
        quantize_law(gate_up, SQUARE),
        quantize_law(down, SQUARE),
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
    y = grouped_mm(silu_mul(h), layer.down, offsets, out_dtype=torch.bfloat16, backend=backend)
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
