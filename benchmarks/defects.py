"""The adversary: generated defective kernels that the gate must refuse, and generated correct ones that it must let pass.

    python benchmarks/defects.py --count 1000 --seed 0 --out benchmarks/results/cpu/defects.json
    python benchmarks/defects.py --count 1000 --seed 0 --out ... --seconds 600      stops there; the same line carries on
    python benchmarks/defects.py --device cuda --workers 1 --limits 16384 4096 4096 --out ...

Case i of a seed is the same on every machine: a shape up to --limits, Specs, a family and its parameters (defects_kernels, defects_quantizers, defects_correct). A draw that changes nothing beyond
tolerance on the operands its family names is drawn again. Exit 1 when fewer than 995 of 1,000 defects are refused, or any correct kernel is.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from defects_correct import draw_correct
from defects_kernels import FAMILIES, Draw, draw_call
from defects_quantizers import SPECS, draw_quantizer, spoils
from torch import Tensor

from loka.formats import Spec
from loka.kernels.quantize.call import QuantizeCall
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure.conformance import ELEMENT_ALLOWANCE, Law, law, tolerance
from loka.measure.gate import forget_answers, judge_backend, judge_quantizer
from loka.records import capture_environment, write_atomically

LIMITS = (2048, 1024, 1024)
BAR = 0.995
QUANTIZERS = 0.15  # share of the defects that are quantisers'
SAVE_EVERY = 20.0  # seconds


def beyond_tolerance(out: Tensor, exact: Law, call: MatmulCall) -> bool:
    """Whether a result is off by more than a correct kernel can be: an element by 8 tolerances of its terms, or the whole by 2."""
    allowed = tolerance(call)
    wrong = out.isfinite() != exact.y.isfinite()
    if bool(wrong.any()):
        return True
    error = (out.double() - exact.y).abs()
    size = torch.where(exact.terms > 0, exact.terms, 1e-300)
    ratio = error / size
    return bool(ratio.max() > ELEMENT_ALLOWANCE * allowed) or float(ratio.square().mean().sqrt()) > 2 * allowed


def shows(draw: Draw, call: MatmulCall, seed: int) -> bool:
    """Whether a drawn kernel is defective on the operands its family names."""
    out, pair = draw.show(draw.make(), call, seed)
    return beyond_tolerance(out, law(*pair), call)


def judge_defect(seed: int, index: int, limits: tuple[int, int, int], device: str = "cpu") -> dict[str, Any]:
    """Draw until something is defective, and show it to the gate."""
    begin = time.monotonic()
    rng = random.Random(f"defect {seed} {index}")
    for attempt in range(100):
        call = draw_call(rng, limits)
        if rng.random() < QUANTIZERS:
            spec = Spec.parse(rng.choice(SPECS))
            chosen = draw_quantizer(rng, call.m, call.k, spec)
            if not spoils(chosen.make(), chosen.inputs(index), spec):
                continue
            described = QuantizeCall(call.m, call.k, spec, torch.float32)
            family, text, verdict = chosen.family, chosen.text, judge_quantizer(chosen.make(), described, device)
            name = str(described)
        else:
            draw = rng.choice(FAMILIES)(rng, call)
            if not shows(draw, call, index):
                continue
            family, text, verdict = draw.family, draw.text, judge_backend("scaled_mm", draw.make(), call, device)
            name = str(call)
        forget_answers()
        row = {"index": index, "family": family, "call": name, "refused": not verdict.ok, "draws": attempt + 1}
        seconds = round(time.monotonic() - begin, 2)
        return row | {"seconds": seconds} | ({} if not verdict.ok else {"defect": text})
    raise RuntimeError(f"case {index} of seed {seed}: a hundred draws without a defect")


def judge_correct(seed: int, index: int, limits: tuple[int, int, int], device: str = "cpu") -> dict[str, Any]:
    """Draw a correct kernel and show it to the gate."""
    begin = time.monotonic()
    rng = random.Random(f"correct {seed} {index}")
    call = draw_call(rng, limits)
    family, text, kernel = draw_correct(rng, call)
    verdict = judge_backend("scaled_mm", kernel, call, device)
    forget_answers()
    row = {
        "index": index,
        "family": family,
        "call": str(call),
        "refused": not verdict.ok,
        "share": verdict.error / verdict.tolerance,
    }
    seconds = round(time.monotonic() - begin, 2)
    return row | {"seconds": seconds} | ({} if verdict.ok else {"kernel": text, "reason": verdict.reason})


JUDGES = {"defects": judge_defect, "correct": judge_correct}


def judge_case(
    kind: str, seed: int, index: int, limits: tuple[int, int, int], device: str
) -> tuple[str, dict[str, Any]]:
    torch.set_num_threads(1)
    torch.set_default_device(device)  # where drawn kernels make what they need
    return kind, JUDGES[kind](seed, index, limits, device)


def run_cases(
    todo: list[tuple[str, int]], seed: int, limits: tuple[int, int, int], device: str, workers: int, end: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Cases as they finish, until the time is up."""
    if workers < 2:
        for kind, index in todo:
            if time.monotonic() > end:
                return
            yield judge_case(kind, seed, index, limits, device)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        queue, running = iter(todo), set()
        while time.monotonic() < end:
            while len(running) < 2 * workers and (case := next(queue, None)) is not None:
                running.add(pool.submit(judge_case, case[0], seed, case[1], limits, device))
            if not running:
                return
            done = next(as_completed(running))
            running.discard(done)
            yield done.result()
        for future in running:
            future.cancel()


def summarise(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Counts by family; misses and false alarms in full."""
    families: dict[str, dict[str, list[int]]] = {kind: {} for kind in rows}
    for kind, some in rows.items():
        for row in some:
            count = families[kind].setdefault(row["family"], [0, 0])
            count[0] += 1
            count[1] += row["refused"]
    return {
        "defects": len(rows["defects"]),
        "defects_refused": sum(row["refused"] for row in rows["defects"]),
        "correct": len(rows["correct"]),
        "correct_refused": sum(row["refused"] for row in rows["correct"]),
        "largest_share_of_tolerance": max((row["share"] for row in rows["correct"]), default=None),
        "families": {kind: {name: {"drawn": n, "refused": r} for name, (n, r) in sorted(f.items())} for kind, f in families.items()},
        "missed": [row for row in rows["defects"] if not row["refused"]],
        "false_alarms": [row for row in rows["correct"] if row["refused"]],
    }  # fmt: skip


def save(path: Path, rows: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    environment = capture_environment(device=options.device, threads=options.workers)
    content = {
        "summary": summarise(rows), "seed": options.seed, "count": options.count, "limits": list(options.limits),
        "environment": {name: getattr(environment, name) for name in environment.__struct_fields__},
        **{kind: sorted(some, key=lambda row: row["index"]) for kind, some in rows.items()},
    }  # fmt: skip
    head = json.dumps({name: value for name, value in content.items() if name not in rows}, indent=1)[:-2]
    lists = [f' "{kind}": [\n' + ",\n".join(json.dumps(row) for row in content[kind]) + "\n]" for kind in rows]
    write_atomically(path, (head + ",\n" + ",\n".join(lists) + "\n}\n").encode())


def load(path: Path | None, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What an earlier run of the same seed and limits has answered."""
    if path is None or not path.exists():
        return {kind: [] for kind in JUDGES}
    content = json.loads(path.read_text())
    if content["seed"] != options.seed or tuple(content["limits"]) != tuple(options.limits):
        raise SystemExit(
            f"{path} holds seed {content['seed']} at {content['limits']}; hint: another --out, or remove it"
        )
    return {kind: content[kind] for kind in JUDGES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="defects, and as many correct kernels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file; a run that was cut off carries on there")
    parser.add_argument("--limits", type=int, nargs=3, default=LIMITS, metavar=("M", "K", "N"), help="largest shape")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--device", default="cpu", help="cuda: emulated on a GPU, for larger --limits; one worker then")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    rows = load(options.out, options)
    known = {(kind, row["index"]) for kind, some in rows.items() for row in some}
    todo = [(kind, i) for i in range(options.count) for kind in JUDGES if (kind, i) not in known]
    saved = time.monotonic()
    end = saved + options.seconds
    for kind, row in run_cases(todo, options.seed, tuple(options.limits), options.device, options.workers, end):
        rows[kind].append(row)
        if row["refused"] != (kind == "defects"):
            print(f"{kind}: {json.dumps(row)}", file=sys.stderr, flush=True)
        if options.out is not None and time.monotonic() - saved > SAVE_EVERY:
            save(options.out, rows, options)
            saved = time.monotonic()
    if options.out is not None:
        save(options.out, rows, options)
    found = summarise(rows)
    print(json.dumps({name: found[name] for name in list(found)[:5]}, indent=1))
    return 1 if found["correct_refused"] or found["defects_refused"] < BAR * found["defects"] else 0


if __name__ == "__main__":
    sys.exit(main())
