"""What a generation must compute and move, operator by operator, from shapes alone: arithmetic intensity beside the roofline.

    flops        2 M N K of products; attention 4 T S d (scores and values)
    bytes        weights once per step, activations in and out once, logits once; what caches could save is not counted
    intensity    flops / bytes; an operator is memory-bound where it lies below peak FLOP/s over bandwidth of its precision

Experts: the weights of every expert that some token visits are read once per step. With T tokens and random routing, E (1 - (1 - top / E)^T) of them.
"""

from dataclasses import dataclass

from loka.inference.decoder import beam_widths
from loka.models.onerec import OneRecConfig


@dataclass(frozen=True)
class Cost:
    """One operator over a whole generation."""

    operator: str
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def count_costs(
    config: OneRecConfig, *, requests: int, context: int, beams: int, linear_bytes: int = 2, expert_bytes: int = 2
) -> list[Cost]:
    """Costs of one batch; `linear_bytes` and `expert_bytes` are 1 where those weights and their inputs are FP8."""
    c, total = config, dict[str, list[float]]()

    def add(name: str, flops: float, size: float) -> None:
        entry = total.setdefault(name, [0.0, 0.0])
        entry[0] += flops
        entry[1] += size

    def linear(name: str, m: float, n: float, k: float, width: int, weight: float | None = None) -> None:
        add(name, 2 * m * n * k, (n * k if weight is None else weight) * width + m * k * width + m * n * 2)

    tokens = requests * (context + 1)
    add("context: look-up", 0, tokens * c.d * 2 * (c.levels + 1))
    linear("context: projections", tokens, c.d, c.d, 2)
    linear("context: projections", tokens, c.s_kv * c.l_kv * c.kv_width, c.d, 2)
    dense = c.layers if c.experts is None else min(c.experts.dense_blocks, c.layers)
    for level, width in enumerate(beam_widths(c.codebooks, beams)[:-1]):
        t = requests * width
        for _ in range(c.layers):
            for n in (c.d, c.d, 3 * c.d, c.d):
                linear("attention linears", t, n, c.d, linear_bytes)
            add("cross attention", 4 * t * (context + 1) * c.d, (2 * t * c.d + c.s_kv * tokens * c.kv_width) * 2)
            add("self attention", 4 * t * (level + 1) * c.d, (level + 3) * 2 * t * c.d * 2)
            add("norms and residuals", 8 * 3 * t * c.d, 3 * 4 * t * c.d * 2)
        for _ in range(dense):
            linear("dense FFN", t, 2 * c.d_ff, c.d, linear_bytes)
            linear("dense FFN", t, c.d, c.d_ff, linear_bytes)
        if c.experts is not None:
            e = c.experts
            visited = e.routed * (1 - (1 - e.top / e.routed) ** t) + e.shared
            rows = t * (e.top + e.shared)
            for _ in range(c.layers - dense):
                linear("experts", rows, 2 * e.hidden, c.d, expert_bytes, visited * 2 * e.hidden * c.d)
                linear("experts", rows, c.d, e.hidden, expert_bytes, visited * e.hidden * c.d)
                add("routing and moving rows", 2 * t * e.routed * c.d, 2 * rows * c.d * expert_bytes + rows * c.d * 2)
        linear("heads", t, c.codebooks[level], c.d, 2)
        add("softmax and selection", 4 * t * c.codebooks[level], t * c.codebooks[level] * 2)
    return [Cost(name, flops, size) for name, (flops, size) in total.items()]


# Our Triton kernels go by the name of their function; libraries' by substrings of theirs, in order: the first that matches decides. Seen in profiles of
# torch 2.11, Triton 3.6, CUTLASS and cuBLAS.
_OURS = {
    "experts": ("_grouped", "_grouped_swiglu"),
    "attention": ("_attend", "_ancestors"),
    "softmax and selection": ("_maxima", "_log_sum_exp", "_select", "_rank"),
    "routing and moving rows": ("_route", "_sort", "_count", "_place", "_gather", "_combine"),
    "norms, activations, quantisation": ("_forward", "_swiglu", "_rows", "_tiles", "_amax", "_scales"),
    "linears and heads": ("_gemm",),
}
_THEIRS = {
    "experts": ("grouped", "Grouped", "group_gemm", "GroupProblemShape"),
    "softmax and selection": (
        "topk",
        "TopK",
        "radix",
        "Radix",
        "sort",
        "Sort",
        "bitonic",
        "logsumexp",
        "softmax",
        "SoftMax",
    ),
    "attention": ("fmha", "flash", "attention", "Attention"),
    "norms, activations, quantisation": ("norm", "Norm", "quantize", "silu", "rsqrt", "triton_red", "triton_per"),
    "routing and moving rows": (
        "gather",
        "scatter",
        "index",
        "Index",
        "embedding",
        "copy",
        "Memcpy",
        "CatArray",
        "sigmoid",
    ),
    "linears and heads": (
        "gemm",
        "Gemm",
        "cutlass",
        "nvjet",
        "sm90_",
        "cublas",
        "matmul",
        "scaled_mm",
        "splitK",
        "wgmma",
    ),
}


def classify_kernel(name: str) -> str:
    """What a GPU kernel is for, by its name; "other" where no rule knows it."""
    for kind, names in _OURS.items():
        if name in names:
            return kind
    for kind, words in _THEIRS.items():
        if any(word in name for word in words):
            return kind
    return "other"
