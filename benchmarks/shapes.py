"""FP8 on 27 shapes of recommendation models beside bf16: with its quantisation and without, by every library that is here and every recipe.

    python benchmarks/shapes.py --out shapes.json --seconds 60                            on a GPU
    python benchmarks/shapes.py --out x.json --device cpu --shapes 2                      a walk through it on the emulation: its times say nothing

The published statement is about 27 production shapes "from (2048, 256) @ (256, 768) to (2048, 123200) @ (123200, 1024)"; the list itself is not published. Ours have these ends: 2048 rows, nine
K in equal ratios from 256 to 123,200, rounded to multiples of 16, each with N = 768, 896 and 1024. So its averages are over another list, and the record says so.

Forward GEMMs. `total` quantises activations and weights in the call and multiplies, as a linear does that stands alone; `gemm` multiplies operands that were quantised before, and
quantisation's share is 1 - gemm / total. Per cent of peak: FLOPs over `total`, against the data sheet's dense FP8 rate of this card (1,979 TFLOP/s, where known) and against the FP8 rate
measured in this run at 8192^3. Every candidate is judged right (`loka.measure.site`) before it is timed; what refuses, or is wrong, has its reason. CUDA graphs, operands rotated beyond the L2 cache,
interleaved repeats, medians. The file is written after every shape; finished shapes are not measured again.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent))
from evidence import spell_command

from loka.dispatch.recipe import RECIPES
from loka.kernels import registry
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm.call import GemmWay, MatmulCall
from loka.measure.conformance import Conformance
from loka.measure.device import peaks
from loka.measure.inputs import draw
from loka.measure.site import SiteJob as Job
from loka.measure.site import encode_case, time_case
from loka.measure.timing import Contender, sets_needed, time_together
from loka.records import capture_environment, write_atomically

FIRST, LAST = (2048, 256, 768), (2048, 123200, 1024)
NAMES = ("tensorwise", "rowwise", "blockwise")
DATA_SHEET = {"NVIDIA H200": 1979e12, "NVIDIA H100 80GB HBM3": 1979e12}  # dense FP8, FLOP/s
SLOW = ("reference", "torchao")  # emulation; and a library that tunes 48 configurations for every new shape
RULE = "2048 rows; K in nine equal ratios from 256 to 123200, multiples of 16; N 768, 896, 1024: constructed, since the published list has only its ends"


def make_shapes() -> list[tuple[int, int, int]]:
    """The 27, by the rule."""
    ratio = (LAST[1] / FIRST[1]) ** (1 / 8)
    widths = [round(FIRST[1] * ratio**i / 16) * 16 for i in range(9)]
    found = [(2048, k, n) for k in widths for n in (768, 896, 1024)]
    assert len(found) == 27
    assert (found[0], found[-1]) == (FIRST, LAST)
    return found


def candidates(device: torch.device, backends: list[str]) -> tuple[dict[GemmWay, str], dict[str, str]]:
    """Every recipe on every backend that can run here, with the recipe's name; and who cannot, with the reason."""
    able, refused = {}, {}
    for name in NAMES:
        operands = RECIPES[name].operands("fprop")
        assert operands is not None
        for backend in backends:
            call = MatmulCall(*FIRST, operands.a, operands.b, torch.bfloat16, operands.fast_accum)
            verdict = registry.backend("scaled_mm", backend).supports(call, device)
            if verdict:
                able[operands.on(backend)] = name
            else:
                refused[f"{name} on {backend}"] = verdict.reason
    return able, refused


@torch.no_grad()
def time_bare(shape: tuple[int, int, int], some: list[GemmWay], device: torch.device, repeats: int) -> list[float]:  # fmt: skip
    """Microseconds of the GEMM alone, operands quantised and laid out before the clock starts."""
    m, k, n = shape
    sets = range(sets_needed(m * k + k * n + 2 * m * n, device))
    timed = []
    for c in some:
        backend = registry.backend("scaled_mm", c.backend)
        thunks = []
        for s in sets:
            a = quantize(draw(m, k, seed=2 * s, device=device, dtype=torch.bfloat16), c.a)  # fmt: skip
            b = quantize(draw(n, k, seed=2 * s + 1, device=device, dtype=torch.bfloat16), c.b)  # fmt: skip
            kept = registry.prepare_for(backend, b, c.a)
            thunks.append(lambda a=a, b=kept, run=backend.run, fast=c.fast_accum: run(a, b, out_dtype=torch.bfloat16, fast_accum=fast))  # fmt: skip
        timed.append(Contender(str(c), thunks, Conformance(True, 0.0, 0.0)))  # judged with its quantisation just before
    return [t.microseconds().value for t in time_together(timed, device, repeats=repeats)] if timed else []


def measure(shape: tuple[int, int, int], able: dict[GemmWay, str], device: torch.device, repeats: int) -> list[dict[str, Any]]:  # fmt: skip
    """One shape: judged, timed with quantisation, timed without."""
    job = Job("fprop", *shape, tuple(able))
    options = {"device": str(device), "repeats": repeats, "distributions": ["normal"]}
    answers = time_case(**encode_case(job, job.candidates, options))
    rows = [
        {"recipe": able[c], "backend": c.backend, **answer} for c, answer in zip(job.candidates, answers, strict=True)
    ]
    good = [(c, row) for c, row in zip(job.candidates, rows, strict=True) if "microseconds" in row]
    for (_, row), bare in zip(good, time_bare(shape, [c for c, _ in good], device, repeats), strict=True):
        total = row["microseconds"]["value"]
        row |= {"gemm_microseconds": bare, "quantisation_share": 1 - bare / total}
        row["tflops"] = 2e-6 * math.prod(shape) / total
    return rows


def summarise(found: dict[str, list[dict[str, Any]]], body: dict[str, Any]) -> dict[str, Any]:
    """Over the shapes measured: each recipe on each backend, and the best of them shape by shape."""
    sheet, seen = body.get("data_sheet_flops"), body["peaks"].get("fp8_flops")
    groups: dict[str, list[dict[str, Any]]] = {}
    for rows in found.values():
        timed = [row for row in rows if "tflops" in row]
        for row in timed:
            groups.setdefault(f"{row['recipe']} on {row['backend']}", []).append(row)
        if timed:
            groups.setdefault("the fastest of a shape", []).append(min(timed, key=lambda r: r["microseconds"]["value"]))
    summary = {}
    for name, rows in groups.items():
        speeds, rate = [row["speedup"]["value"] for row in rows], statistics.fmean(row["tflops"] for row in rows) * 1e12
        summary[name] = {
            "shapes": len(rows), "mean_speedup": statistics.fmean(speeds), "geometric_speedup": statistics.geometric_mean(speeds), "slowest": min(speeds), "fastest": max(speeds),
            "mean_quantisation_share": statistics.fmean(row["quantisation_share"] for row in rows),
            "quantisation_share_of_all_time": 1 - sum(row["gemm_microseconds"] for row in rows) / sum(row["microseconds"]["value"] for row in rows),
            "share_of_data_sheet_peak": rate / sheet if sheet else None, "share_of_measured_peak": rate / seen if seen else None,
        }  # fmt: skip
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no shape after this")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backends", help="comma-separated; default: all that are here, torchao's slow tuner excepted")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--shapes", type=int, default=27, help="only so many, the ends first")
    a = parser.parse_args()
    end, device = time.monotonic() + a.seconds, torch.device(a.device)
    backends = a.backends.split(",") if a.backends else [b for b in registry.BACKENDS["scaled_mm"] if b not in SLOW]
    if a.device == "cpu":
        backends = ["reference"]
    able, refused = candidates(device, backends)
    if not able:
        raise SystemExit(f"no backend can run here: {refused}")
    body: dict[str, Any] = json.loads(a.out.read_text()) if a.out.exists() else {"shapes": {}}
    name = torch.cuda.get_device_name() if a.device == "cuda" else "cpu"
    if "peaks" not in body:
        body["peaks"] = msgspec.to_builtins(peaks(device))
    command = spell_command()
    body |= {"rule": RULE, "refused": refused, "data_sheet_flops": DATA_SHEET.get(name), "environment": msgspec.to_builtins(capture_environment(command=command, device=name))}  # fmt: skip
    shapes = make_shapes()
    for shape in [*shapes[:1], *shapes[-1:], *shapes[1:-1:2], *shapes[2:-1:2]][: a.shapes]:
        key = "x".join(map(str, shape))
        if key in body["shapes"] or time.monotonic() > end:
            continue
        try:
            body["shapes"][key] = measure(shape, able, device, a.repeats)
        except RuntimeError as error:  # out of memory: the other shapes are still worth their rows
            body["shapes"][key] = [{"failed": f"{type(error).__name__}: {str(error)[:500]}"}]
        body["summary"] = summarise(body["shapes"], body)
        write_atomically(a.out, json.dumps(body, indent=1).encode())
        best = max((row["speedup"]["value"] for row in body["shapes"][key] if "speedup" in row), default=math.nan)
        print(f"{key}: best {best:.2f}x, {end - time.monotonic():.0f} s left", flush=True)
        if a.device == "cuda":
            torch.cuda.empty_cache()
    for name, row in body.get("summary", {}).items():
        print(f"{name}: {json.dumps(row)}")
    for name, why in refused.items():
        print(f"refused {name}: {why}")
    print(f"{len(body['shapes'])} of 27 shapes")


if __name__ == "__main__":
    main()
