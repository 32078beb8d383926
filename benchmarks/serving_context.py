"""What an E4M3 context costs a trained recommender: the engine with `context_cache="e4m3"` against the same engine without, user by user.

    loka generate --train 500 --out runs/onerec
    python benchmarks/serving_context.py runs/onerec --out benchmarks/results/cpu/serving_context.json

Lists come from the engine. Log-likelihoods come from the model, whose keys and values are rounded in the same place.
"""

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from loka.inference import compare_arms, evaluate_users, load_bundle, overlap_of
from loka.inference.context import LARGEST
from loka.records import save


@contextmanager
def rounded(model: Any) -> Any:
    """The model with keys and values of its context in E4M3."""

    def cast(module: Any, inputs: Any, out: Any) -> Any:
        return out.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(out.dtype)

    hooks = [norm.register_forward_hook(cast) for norm in model.context.chunk_norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--users", type=int, default=1500)
    parser.add_argument("--margin", type=float, default=0.01)
    parser.add_argument("--source", type=Path)
    a = parser.parse_args()
    bundle = load_bundle(a.bundle)
    split = bundle.open_data(source=a.source).test
    plain = evaluate_users(bundle, split, users=a.users)
    with rounded(bundle.model):
        low = evaluate_users(bundle, split, users=a.users, context_cache="e4m3")
    gains = [float(norm.weight.detach().square().mean().sqrt()) for norm in bundle.model.context.chunk_norms]
    found = compare_arms(plain.values, low.values, (plain.users, low.users), margin=a.margin, names=("plain context", "E4M3 context"), data=bundle.info.data,
                         overlap=overlap_of(plain, low, (10, 50)))  # fmt: skip
    save(found, a.out)
    for metric in found.metrics:
        print(metric)
    print(found.overlap, "gains", [round(gain, 3) for gain in gains])
    return 0


if __name__ == "__main__":
    sys.exit(main())
