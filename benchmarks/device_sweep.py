"""The wide shape sweep: every library backend of scaled_mm on seeded shapes of the whole range. Run by `device_libraries.py --sweep`.

    K and N in steps of 16 and of 128 up to 8192, M from 1 to 65536 evenly over its powers of two; no matrix beyond `elements`

All backends see the same shapes in the same order, each in child processes of its own, all at once. A case is a call with its weight plain and prepared, with
poisoned allocations, against float64 (`loka.measure.conformance`). The file is written after every handful of cases, so that an interrupted sweep loses little:

    counts     green, wrong, refused (by `supports`), failed (crash, hang, exception), not_run (the time was up)
    wrong      every call that ran and was wrong, with the reason
    failed     every call that did not come back, with the reason
    refused    reason -> variant -> "all", or the shapes M x K x N that were refused when others were not

Only conformance: nothing is timed, so nothing needs the GPU for itself.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MAIN = (
    "e4m3:tensor@e4m3:tensor|fast", "e4m3:row@e4m3:row|fast", "e4m3:1x128@e4m3:128x128", "e4m3:1x128@e4m3:1x128",
)  # fmt: skip
# At every fourth shape: what dgrad of rowwise_with_gw_hp multiplies, exact sums, and the pair DeepGEMM has in float32 only.
ALSO = ("e4m3:row@e4m3:tensor|fast", "e4m3:row@e4m3:row", "e4m3:1x128@e4m3:1x128|float32")
# Cases a child does before the file is written. DeepGEMM compiles each shape, torchao tunes 48 configurations for it.
HANDFUL = {"deepgemm": 24, "torchao": 12}
PATIENCE = {"deepgemm": 120.0, "torchao": 240.0}


def wide_sweep(
    *,
    seed: int = 0,
    seconds: float,
    max_width: int = 8192,
    max_batch: int = 65536,
    max_elements: int = 1 << 28,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[int, int, int]]:
    """Seeded shapes until the time is up: K and N multiples of 16 and of 128 by turns, M spread evenly over its powers of two."""
    source = random.Random(seed)
    end = clock() + seconds
    turn = 0
    while clock() < end:
        step = (16, 128)[turn % 2]
        turn += 1
        k, n = (step * source.randint(1, max_width // step) for _ in range(2))
        m = min(max_batch, int(2 ** source.uniform(0, max_batch.bit_length() - 1)) + source.randint(0, 1))
        if max(m * k, k * n, m * n) <= max_elements:
            yield m, k, n


class Sweep:
    """The answers of all backends, and the file they are written to."""

    def __init__(self, backends: list[str], out: str, settings: dict[str, Any]) -> None:
        self.out, self.settings = out, settings
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in backends}
        self.lock = threading.Lock()

    def add(self, backend: str, rows: list[dict[str, Any]]) -> None:
        """Take a handful of answers and write everything down."""
        import msgspec

        from loka.records import write_atomically

        with self.lock:
            self.rows[backend] += rows
            body = {**self.settings, "backends": {name: describe(found) for name, found in self.rows.items()}}
            write_atomically(self.out, msgspec.json.format(msgspec.json.encode({"sweep": body}), indent=1))


def calls(count: int, seed: int, elements: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """(variant, shape): all main variants of every shape, the others of every fourth."""

    shapes = wide_sweep(seed=seed, seconds=3600, max_elements=elements)
    for index, shape in enumerate(itertools.islice(shapes, count)):
        for variant in MAIN if index % 4 else MAIN + ALSO:
            yield variant, shape


def run(backends: list[str], device: str, *, count: int, seed: int, seconds: float, elements: int, out: str) -> Sweep:
    """Sweep until the shapes or the seconds are used up."""
    import msgspec

    from loka.measure.device import snapshot

    end = time.monotonic() + seconds
    command = (
        f"python benchmarks/device_libraries.py --sweep {count} --seconds {seconds:g} --seed {seed} --device {device}"
    )
    settings = {"seed": seed, "shapes": count, "seconds": seconds, "largest_matrix": elements, "variants": MAIN + ALSO}
    sweep = Sweep(backends, out, {**settings, "environment": msgspec.to_builtins(snapshot(command))})
    work = list(calls(count, seed, elements))
    with ThreadPoolExecutor(len(backends)) as pool:
        for future in [pool.submit(_sweep_backend, sweep, name, device, work, end) for name in backends]:
            future.result()
    return sweep


def _sweep_backend(sweep: Sweep, name: str, device: str, work: list[tuple[str, Any]], end: float) -> None:
    from loka.measure.adapter import ADAPTERS
    from loka.measure.isolation import map_isolated

    adapter = ADAPTERS["scaled_mm"]
    common = {"op": "scaled_mm", "backend": name, "device": device, "distributions": ["normal"]}
    handful = HANDFUL.get(name, 128)
    for start in range(0, len(work), handful):
        some = work[start : start + handful]
        left = end - time.monotonic()
        if left <= 0:
            sweep.add(name, [_row(call, not_run=True) for call in work[start:]])
            return
        cases = [{**common, "call": adapter.encode(adapter.calls([shape], [variant])[0])} for variant, shape in some]
        answers = map_isolated(
            "loka.measure.bench:check_case", cases, timeout=left, case_timeout=PATIENCE.get(name, 60.0)
        )
        late = time.monotonic() >= end  # then the case it was at did not hang: it was stopped
        rows = []
        for call, answer in zip(some, answers, strict=True):
            refusal = answer.refusal or ""
            if refusal.startswith("not run") or (late and refusal.startswith("timed out")):
                rows.append(_row(call, not_run=True))
            else:
                rows.append(_row(call, failure=answer.refusal, **(answer.value or {})))
        sweep.add(name, rows)


def _row(call: tuple[str, tuple[int, int, int]], **fields: Any) -> dict[str, Any]:
    variant, (m, k, n) = call
    return {"variant": variant, "shape": f"{m}x{k}x{n}", **fields}


def kind(row: dict[str, Any]) -> str:
    """What became of a case."""
    if row.get("not_run"):
        return "not_run"
    if row.get("failure"):
        return "failed"
    if row["ok"]:
        return "green"
    return "refused" if row["tolerance"] is None else "wrong"


def describe(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One backend's part of the file."""
    by_kind = {
        name: [row for row in rows if kind(row) == name] for name in ("green", "wrong", "refused", "failed", "not_run")
    }
    green = by_kind["green"]
    return {
        "counts": {name: len(found) for name, found in by_kind.items()},
        "green_by_variant": {v: count for v in MAIN + ALSO if (count := sum(row["variant"] == v for row in green))},
        "worst_error_over_tolerance": max((row["error"] / row["tolerance"] for row in green), default=None),
        "wrong": [{name: row[name] for name in ("variant", "shape", "reason", "error", "tolerance")} for row in by_kind["wrong"]],
        "failed": [{name: row[name] for name in ("variant", "shape", "failure")} for row in by_kind["failed"]],
        "refused": _refusals(by_kind["refused"], [row for row in rows if kind(row) != "not_run"]),
    }  # fmt: skip


def _refusals(refused: list[dict[str, Any]], ran: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for row in refused:
        result.setdefault(row["reason"], {}).setdefault(row["variant"], []).append(row["shape"])
    for variants in result.values():
        for variant, shapes in variants.items():
            if len(shapes) == sum(row["variant"] == variant for row in ran):
                variants[variant] = "all"
    return result


def print_summary(sweep: Sweep) -> None:
    """A few lines per backend."""
    for name, rows in sweep.rows.items():
        found = describe(rows)
        counts = ", ".join(f"{count} {word}" for word, count in found["counts"].items())
        worst = found["worst_error_over_tolerance"]
        print(f"{name}: {counts}" + ("" if worst is None else f" (worst green {worst:.2f} of tolerance)"))
        for row in found["wrong"][:20]:
            print(f"  WRONG   {row['shape']} {row['variant']}: {row['reason'][:200]}")
        for row in found["failed"][:10]:
            print(f"  FAILED  {row['shape']} {row['variant']}: {row['failure'][:200]}")
        for reason, variants in found["refused"].items():
            print(f"  refused {', '.join(variants)}: {reason[:160]}")
