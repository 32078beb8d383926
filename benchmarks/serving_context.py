"""What an E4M3 context costs a trained recommender: the engine with `context_cache="e4m3"` against the same engine without, user by user.

    loka generate --train 500 --out runs/onerec
    python benchmarks/serving_context.py runs/onerec --out benchmarks/results/cpu/serving_context.json

On a GPU the products over such a context run in FP8, for which queries and weights are rounded as well; this happens here too (--exact leaves it out), in the same places and formats, against the
final maximum of a row instead of the running one. Lists come from the engine, log-likelihoods from the model with the same rounding.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from loka.inference import compare_arms, evaluate_users, load_bundle, overlap_of
from loka.kernels.beam_attention import torch as backend
from loka.records import save

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def round_to_fp8(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype)


def multiply(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [B, H, T, d], k, v [B, G, S, d] that are on the grid of E4M3 already, seen [B, S]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    size = q.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST
    s = (round_to_fp8(q / size) * size) @ k.transpose(-1, -2) * scale
    s = s.masked_fill(~seen[:, None, None], float("-inf"))
    p = (s - s.amax(-1, keepdim=True)).exp()
    return round_to_fp8(256 * p) @ v / (256 * p.sum(-1, keepdim=True))


class Multiplied(nn.Module):
    """The model's cross-attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return multiply(q, k, v, mask, q.shape[-1] ** -0.5)


def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
    """The engine's."""
    seen = torch.arange(k.shape[1])[None] < lengths[:, None]
    keys, values = (torch.where(seen[:, :, None, None], t.to(q.dtype), 0).transpose(1, 2) for t in (k, v))
    return multiply(q.transpose(1, 2), keys, values, seen, scale).transpose(1, 2).contiguous()


@contextmanager
def rounded(model: Any, *, products: bool) -> Iterator[None]:
    """The model, and where `products` the engine's attention too, as on a GPU with the context in E4M3."""
    hooks = [norm.register_forward_hook(lambda m, i, out: round_to_fp8(out)) for norm in model.context.chunk_norms]
    kept = [block.cross.attention for block in model.blocks]
    try:
        if products:
            for block in model.blocks:
                block.cross.attention = Multiplied()
            with patch.object(backend, "run", run):
                yield
        else:
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for block, attention in zip(model.blocks, kept, strict=True):
            block.cross.attention = attention


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--users", type=int, default=1500)
    parser.add_argument("--margin", type=float, default=0.01)
    parser.add_argument("--exact", action="store_true", help="round keys and values only")
    parser.add_argument("--source", type=Path)
    a = parser.parse_args()
    bundle = load_bundle(a.bundle)
    split = bundle.open_data(source=a.source).test
    plain = evaluate_users(bundle, split, users=a.users)
    with rounded(bundle.model, products=not a.exact):
        low = evaluate_users(bundle, split, users=a.users, context_cache="e4m3")
    name = "E4M3 context" if a.exact else "E4M3 context, products in FP8"
    found = compare_arms(
        plain.values, low.values, (plain.users, low.users), margin=a.margin, names=("plain context", name), data=bundle.info.data,
        overlap=overlap_of(plain, low, (10, 50)),
    )  # fmt: skip
    save(found, a.out)
    for metric in found.metrics:
        print(metric)
    print(found.overlap)
    return 0


if __name__ == "__main__":
    sys.exit(main())
