"""The configuration of an engine: beam width, the shapes it prepares, precision, and how the small operations run.

A bucket is (requests, context length). Every batch runs in the smallest bucket that holds it, padded, so that shapes
are known before the first request, memory is allocated once, and on a GPU each bucket is one CUDA graph.
`batch_invariant` keeps only the largest bucket: every request then runs with the same shapes, and so with the same
kernels and the same order of summation, whatever else is in the batch.
"""

from dataclasses import dataclass

import torch

from loka.kernels.registry import BACKENDS

OPS = ("quantize", "norm_quantize", "scaled_mm", "grouped_mm", "beam_attention", "topk", "route")  # what an engine runs
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Bucket = tuple[int, int]  # requests, context length


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The configuration of an engine.

    Args:
        beams: width of the beam search.
        requests: batch sizes to prepare.
        contexts: context lengths to prepare, in items; None: the model's longest.
        dtype: precision of everything that is not quantized: "bf16", "fp16" or "fp32".
        normalize: what probabilities are normalized over, as in training: the whole "codebook", or the "valid" codes.
        batch_invariant: make results independent of the rest of the batch, with one bucket only, the largest.
        graphs: use CUDA graphs; None: on a GPU.
        fuse: torch.compile the small operations between the GEMMs; None: on a GPU.
        tune: time the backends of every GEMM and use the fastest; None: on a GPU, unless `batch_invariant`. Otherwise
            the order of the registry decides.
        fold_shared: run the shared expert as one more expert of the grouped GEMM, where it fits.
        fast_accum: let FP8 GEMMs accumulate in the tensor cores, where their recipe allows it.
        context_cache: format of the keys and values of contexts: "plain" (in `dtype`), or "e4m3", which takes half the
            memory of 16-bit and needs them to come out of a norm.
        backends: (op, backend) pairs of loka.kernels; an op that is not named uses "auto".
        memory: bytes the engine may use; None: the free memory of the GPU.

    Example:
        >>> EngineConfig(beams=50, requests=(1, 8)).buckets(512)
        [(1, 512), (8, 512)]
    """

    beams: int = 512
    requests: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] | None = None
    dtype: str = "bf16"
    normalize: str = "codebook"
    batch_invariant: bool = False
    graphs: bool | None = None
    fuse: bool | None = None
    tune: bool | None = None
    fold_shared: bool = True
    fast_accum: bool = True
    context_cache: str = "plain"
    backends: tuple[tuple[str, str], ...] = ()
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ValueError(f"beams is {self.beams}; a search needs at least one")
        for what, sizes in (("batch sizes", self.requests), ("context lengths", self.contexts)):
            if sizes is not None and (not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes))):
                raise ValueError(f"{what} are {sizes}; expected ascending positive numbers")
        if self.normalize not in ("codebook", "valid"):
            raise ValueError(f"normalize is {self.normalize!r}; expected 'codebook' or 'valid'")
        if self.context_cache not in ("plain", "e4m3"):
            raise ValueError(f"context cache is {self.context_cache!r}; expected 'plain' or 'e4m3'")
        if self.dtype not in DTYPES:
            raise ValueError(f"precision is {self.dtype!r}; expected one of {', '.join(DTYPES)}")
        for op, name in self.backends:
            known = ("auto", *BACKENDS[op]) if op in OPS else ()
            if name not in known:
                hint = f"{op} has {', '.join(known)}" if known else f"an engine runs {', '.join(OPS)}"
                raise ValueError(f"backends asks for {op}: {name!r}; {hint}")
        if self.memory is not None and self.memory < 1:
            raise ValueError(f"memory is {self.memory} bytes; expected a positive number")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of everything that is not quantized."""
        return DTYPES[self.dtype]

    def backend(self, op: str) -> str:
        """Return the configured backend of an op, else `auto`."""
        return dict(self.backends).get(op, "auto")

    def buckets(self, longest: int) -> list[Bucket]:
        """Return the (requests, context length) to prepare for a model whose longest context is `longest` items."""
        contexts = self.contexts or (longest,)
        if contexts[-1] > longest:
            raise ValueError(f"contexts go up to {contexts[-1]} items, the model was built for {longest}")
        if self.batch_invariant:
            return [(self.requests[-1], contexts[-1])]
        return [(r, s) for s in contexts for r in self.requests]


def choose_bucket(buckets: list[Bucket], requests: int, length: int) -> Bucket:
    """Return the smallest bucket for so many requests of at most `length` items; the longest if none is long enough."""
    length = min(length, max(s for _, s in buckets))
    fitting = [(s, r) for r, s in buckets if r >= requests and s >= length]
    if not fitting:
        raise ValueError(f"{requests} requests do not fit into the buckets {buckets}")
    s, r = min(fitting)
    return r, s
