"""Estimate the memory of an engine before anything is allocated.

    weights       the model, plus copies if the shared expert is folded into the routed ones
    caches        keys and values of every block for every beam, [2, levels - 1, R, W, d]
    working set   the peak of a batch: tokens of the context, rows of the experts, or logits and their scores

The working set is an upper estimate from shapes: it counts the largest tensors of the widest step as if all were alive.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from loka.inference.config import Bucket, EngineConfig
from loka.inference.decoder import beam_widths
from loka.models.onerec import OneRec
from loka.nn import MixtureOfExperts


@dataclass(frozen=True)
class Needed:
    """The memory an engine needs, in bytes, by purpose."""

    weights: int
    caches: int
    working: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.caches + self.working

    def __str__(self) -> str:
        parts = ((self.weights, "weights"), (self.caches, "caches"), (self.working, "working set"))
        return f"{self.total / 2**30:.2f} GiB ({', '.join(f'{size / 2**30:.2f} {name}' for size, name in parts)})"


class EngineMemoryError(ValueError):
    """The engine does not fit: the message says what it needs, what is available, and what to reduce.

    Example:
        >>> issubclass(EngineMemoryError, ValueError)
        True
    """


def estimate_memory(model: OneRec, config: EngineConfig, buckets: list[Bucket]) -> Needed:
    """Estimate the memory of an engine from shapes alone.

    Args:
        model: the model.
        config: configuration of the engine.
        buckets: (requests, context length) of `config.buckets`.

    Returns:
        Bytes by purpose.

    Example:
        >>> print(estimate_memory(model, config, config.buckets(512)))                  # doctest: +SKIP
    """
    c, size = model.config, config.torch_dtype.itemsize
    weights = sum(t.numel() * (1 if t.element_size() == 1 else size) for t in model.state_dict().values())
    if config.fold_shared:
        for module in model.modules():
            if isinstance(module, MixtureOfExperts) and module.shared is not None:
                pair = (module.gate_up.weight, module.down.weight)
                weights += sum(t.numel() * (1 if t.element_size() == 1 else size) for t in pair)
    widths = beam_widths(c.codebooks, config.beams)
    rows, width = max(r for r, _ in buckets), max(widths[:-1])
    tokens = rows * width
    visits = 1 if c.experts is None else c.experts.top + int(c.experts.shared > 0)
    hidden = c.d_ff if c.experts is None else max(c.d_ff, visits * c.experts.hidden)
    context = max(r * (s + 1) for r, s in buckets) * c.d * size * (c.levels + 6)
    experts = tokens * (visits * 2 * c.d + 3 * hidden) * size
    logits = tokens * max(c.codebooks) * (size + 4 + 4 + 1)
    caches = 2 * c.layers * (c.levels - 1) * tokens * c.d * size
    return Needed(weights, caches, max(context, experts, logits) + 8 * tokens * c.d * size)


def check_memory(model: OneRec, config: EngineConfig, buckets: list[Bucket], device: torch.device) -> Needed:
    """Raise EngineMemoryError if the engine needs more than `config.memory`, or than the GPU has free."""
    needed = estimate_memory(model, config, buckets)
    available = config.memory
    if available is None and device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
        available += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch, unused
        if model.begin.weight.is_cuda:  # the weights are already on the GPU
            available += min(needed.weights, sum(t.nbytes for t in model.state_dict().values()))
    if available is not None and needed.total > available:
        raise EngineMemoryError(
            f"the engine needs {needed}, {available / 2**30:.2f} GiB are available on {device}; hint: fewer requests "
            f"({max(r for r, _ in buckets)}), beams ({config.beams}) or a shorter context ({max(s for _, s in buckets)})"
        )
    return needed


@contextmanager
def explain_exhaustion(needed: Needed, device: torch.device) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that says what the engine needs."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineMemoryError(
            f"{device} ran out of memory while the engine was made; it needs about {needed}; hint: fewer requests, beams "
            f"or a shorter context ({error})"
        ) from error
