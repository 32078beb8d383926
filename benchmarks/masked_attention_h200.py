"""Masked softmax attention on one GPU: our kernels beside torch's, forward and backward, and every tile of ours. The fastest ones belong into `kernels/masked_attention/triton_ops.py`.

    PYTHONPATH=src python benchmarks/masked_attention_h200.py --out masked_attention.json
    PYTHONPATH=src TRITON_INTERPRET=1 python benchmarks/masked_attention_h200.py --smoke --out x.json       CPU, tiny: does it run?

Every side and tile is compared with the reference in float32 first (relative L2 of the result and of all gradients), then timed in CUDA graphs. `torch` is scaled_dot_product_attention with the mask, and
nothing else: what a model without this kernel runs. Padding: lengths spread evenly from none to all (`half`), or no padding at all (`full`).
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attention_h200 import time_call
from evidence import describe_run

from loka.kernels.masked_attention import reference, triton_ops
from loka.kernels.masked_attention.triton_ops import Tile
from loka.records import write_atomically

# rows, heads, shared, queries, keys, d
CASES = {
    "interformer": (2048, 4, 4, 260, 260, 32), "seeds": (2048, 4, 4, 2, 260, 32), "sasrec": (1024, 2, 2, 200, 200, 64), "bst": (4096, 8, 8, 50, 50, 16),
    "long": (64, 8, 8, 1024, 1024, 64), "wide": (256, 8, 8, 512, 512, 128), "onerec": (256, 16, 4, 48, 512, 64),
}  # fmt: skip
SMOKE = {"smoke": (2, 2, 1, 5, 20, 16)}
TILES = {
    "forward": [Tile(64, 64), Tile(64, 64, stages=3), Tile(128, 64), Tile(128, 64, 8), Tile(64, 32, stages=3), Tile(128, 32), Tile(64, 128)],
    "backward_q": [Tile(64, 64), Tile(64, 64, stages=3), Tile(128, 64, 8), Tile(64, 32, stages=3), Tile(128, 32), Tile(64, 128)],
    "backward_kv": [Tile(64, 64), Tile(64, 64, stages=3), Tile(64, 128, 8), Tile(32, 64, stages=3), Tile(32, 128), Tile(128, 64)],
}  # fmt: skip
SWEPT = ("interformer", "sasrec", "wide")
ERROR = 1e-2  # weights and their gradients are rounded to bf16 between two products


def draw(sizes: tuple[int, ...], padding: str, device: str) -> dict[str, Any]:
    """Slices of one projection, as a model passes them, and a gradient."""
    rows, heads, shared, queries, keys, d = sizes
    g = torch.Generator(device=device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def heads_of(count: int, length: int) -> torch.Tensor:
        x = torch.randn(rows, length, count * d, device=device, generator=g).to(dtype)
        return x.view(rows, length, count, d).transpose(1, 2)

    lengths = torch.randint(1, keys + 1, (rows,), device=device, generator=g) if padding == "half" else torch.full((rows,), keys, device=device)  # fmt: skip
    mask = torch.arange(keys, device=device) < lengths[:, None]
    q, k, v = heads_of(heads, queries), heads_of(shared, keys), heads_of(shared, keys)
    return {"q": q, "k": k, "v": v, "mask": mask, "wanted": mask if queries == keys else None, "grad": heads_of(heads, queries)}  # fmt: skip


def plain(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """torch's."""
    folded = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask[:, None, None, :]).view(q.shape)


def run(side: str, o: dict[str, Any]) -> Any:
    """Forward, and forward with backward, as functions without arguments that return tensors."""
    scale = o["q"].shape[3] ** -0.5
    leaves = [o[name].detach().requires_grad_() for name in "qkv"]

    def forward() -> list[Any]:
        if side == "triton":
            return [triton_ops.masked_attention(*leaves, o["mask"], o["wanted"], scale)[0]]
        return [plain(*leaves, o["mask"])]

    def both() -> list[Any]:
        (out,) = forward()
        return [out.detach(), *torch.autograd.grad(out, leaves, o["grad"])]

    return forward, both


def compare(side: str, o: dict[str, Any], few: int = 16) -> float:
    """The worst relative L2 error of the result and the gradients, over a few rows and the queries that are wanted."""
    part = {name: None if t is None else t[:few].clone() for name, t in o.items()}
    if part["wanted"] is not None:
        part["grad"] = part["grad"] * part["wanted"][:, None, :, None]
    whole = {n: t.float() if n in ("q", "k", "v", "grad") else t for n, t in part.items()}
    leaves = [whole[name].requires_grad_() for name in "qkv"]
    law = reference.run(*leaves, part["mask"], part["wanted"], scale=leaves[0].shape[3] ** -0.5)
    expected = [law.detach(), *torch.autograd.grad(law, leaves, whole["grad"])]
    found = run(side, part)[1]()
    if part["wanted"] is not None:
        found[0] = found[0] * part["wanted"][:, None, :, None]
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def time_side(side: str, o: dict[str, Any], device: str) -> dict[str, float]:
    """Microseconds, forward and backward; backward is what both take, less the forward."""
    forward, both = run(side, o)
    with torch.no_grad():
        first = time_call(forward, device)[0]
    return {"forward_us": round(first, 1), "backward_us": round(time_call(both, device)[0] - first, 1)}


def warm(job: tuple[str, str, Tile]) -> None:
    """Fill Triton's cache."""
    case, kernel, tile = job
    triton_ops.TILES = {**triton_ops.TILES, kernel: tile}
    _, *rest = CASES[case]
    run("triton", draw((2, *rest), "half", "cuda"))[1]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="every tile, and not those of the library alone")
    args = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    record: dict[str, Any] = {"environment": describe_run(device), "rows": [], "tiles": []}
    cases = SMOKE if args.smoke else CASES
    swept = [(case, kernel, tile) for case in SWEPT for kernel, tiles in TILES.items() for tile in tiles] if args.sweep else []  # fmt: skip
    if swept:
        with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_quietly, swept))
    for case, padding in product(cases, ("half", "full")):
        o = draw(cases[case], padding, device)
        row: dict[str, Any] = {"case": case, "sizes": cases[case], "padding": padding}
        for side in ("triton", "torch"):
            row[side] = {"error": compare(side, o), **time_side(side, o, device)}
            torch.cuda.empty_cache() if device == "cuda" else None
        for part in ("forward_us", "backward_us"):
            row[f"{part[:-3]}_speedup"] = round(row["torch"][part] / row["triton"][part], 3)
        record["rows"].append(row)
        print(json.dumps(row), flush=True)
        write_atomically(args.out, json.dumps(record, indent=1).encode())
    ours = dict(triton_ops.TILES)
    for case, kernel, tile in swept:
        triton_ops.TILES = {**ours, kernel: tile}
        o = draw(cases[case], "half", device)
        row = {"case": case, "kernel": kernel, "tile": vars(tile)}
        try:
            row |= {"error": compare("triton", o), **time_side("triton", o, device)}
        except Exception as e:
            row["why"] = f"{type(e).__name__}: {str(e)[:200]}"
        record["tiles"].append(row)
        print(json.dumps(row), flush=True)
    write_atomically(args.out, json.dumps(record, indent=1).encode())
    wrong = [row for row in record["rows"] if row["triton"]["error"] > ERROR]
    if wrong:
        raise SystemExit(f"wrong results: {wrong}")


def _quietly(job: tuple[str, str, Tile]) -> None:
    try:
        warm(job)
    except Exception as e:
        print(f"{job}: {type(e).__name__}", flush=True)


if __name__ == "__main__":
    main()
