"""Every library backend of scaled_mm on a GPU: first whether it is right, then how fast it is. Within about 150 seconds.

    PYTHONPATH=src python benchmarks/device_libraries.py --site FOLDER --wheels FOLDER --out result.json

Needs torch, triton and msgspec, and nothing of the command line's dependencies. `--wheels` unpacks every wheel of a folder into `--site`, which is put
on the path of this process and of its children: for machines where nothing can be installed.

    1. conformance: each backend in its own child process, all at once, on real and odd shapes, several Specs and output types; refusals,
       crashes and wrong results are listed by backend with their reasons
    2. timing: what was green on the timed call, bf16 beside it, one after the other, alone on the GPU

With `--sweep N` it only checks, on N seeded shapes of the whole range (`device_sweep.py`), as far as --seconds reach.
"""

import argparse
import sys
import time
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SHAPES = [
    (1, 128, 128), (1, 4096, 1024), (7, 13, 27), (7, 479, 512), (7, 1408, 2816), (64, 27, 64), (64, 64, 13), (64, 1024, 1024),
    (65, 2048, 479), (100, 640, 384), (128, 128, 128), (333, 256, 1408), (512, 479, 1024), (512, 512, 256), (512, 1408, 1408),
    (513, 16, 16), (1000, 1152, 144), (2048, 13, 512), (2048, 256, 256), (2048, 1024, 1024), (2048, 2048, 2048), (2049, 3072, 2048),
    (4096, 8192, 512), (8192, 512, 27), (8192, 4096, 1024),
]  # fmt: skip
# Which variants run on how many of the shapes: all of them for the recipes' own, a few for the rest.
VARIANTS = [
    ("e4m3:tensor@e4m3:tensor|fast", 25), ("e4m3:row@e4m3:row|fast", 25), ("e4m3:1x128@e4m3:128x128", 25),
    ("e4m3:1x128@e4m3:1x128", 9), ("e4m3:128x128@e4m3:1x128", 5), ("e4m3:128x128@e4m3:128x128", 5),
    ("e4m3:row@e4m3:row", 7), ("e4m3:tensor@e4m3:tensor", 7), ("e4m3:row@e4m3:tensor|fast", 5),
    ("e5m2:tensor@e4m3:tensor|fast", 3), ("e5m2:row@e4m3:row", 3), ("e5m2:1x128@e4m3:128x128", 3),
    ("e4m3:tensor@e4m3:tensor|fast|float32", 3), ("e4m3:tensor@e4m3:tensor|fast|float16", 3),
    ("e4m3:row@e4m3:row|fast|float32", 3), ("e4m3:row@e4m3:row|fast|float16", 3),
    ("e4m3:1x128@e4m3:128x128|float32", 3), ("e4m3:1x128@e4m3:128x128|float16", 3), ("e4m3:1x128@e4m3:1x128|float32", 5),
]  # fmt: skip
TIMED = [
    (512, 256, 256), (8192, 512, 512), (512, 1024, 1024), (2048, 1024, 1024), (8192, 1024, 1024), (512, 2048, 2048),
    (2048, 2048, 2048), (8192, 2048, 2048), (64, 4096, 4096), (512, 4096, 4096), (2048, 4096, 4096), (8192, 4096, 4096),
]  # fmt: skip
# torchao tunes 48 configurations for every new shape, so it gets few of them.
FEW = {"torchao": 2}


def unpack(wheels: str | None, site: str | None) -> None:
    """Unpack the wheels, and put the folder on the path that children inherit."""
    if site is None:
        if wheels:
            raise SystemExit("--wheels needs --site: the folder to unpack into")
        return
    for wheel in sorted(Path(wheels).glob("*.whl")) if wheels else []:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    sys.path.append(str(Path(site).resolve()))


def cases(backend: str, device: str) -> list[dict]:
    from loka.measure.adapter import ADAPTERS

    adapter = ADAPTERS["scaled_mm"]
    few = FEW.get(backend)
    stride = lambda count: max(1, len(SHAPES) // count)  # noqa: E731
    calls = [c for text, count in VARIANTS for c in adapter.calls(SHAPES[:: stride(few or count)], [text])]
    distributions = (
        ["normal", "outlier_channels"]
        if few
        else ["normal", "outlier_channels", "lognormal_rows", "zero_rows", "nan_row"]
    )
    common = {"op": "scaled_mm", "backend": backend, "device": device, "distributions": distributions}
    return [{**common, "call": adapter.encode(call)} for call in calls]


def conformance(work: dict[str, list[dict]], seconds: float) -> dict[str, list[dict]]:
    """Every backend's answers to its cases, with the call they belong to."""
    from loka.measure.adapter import ADAPTERS
    from loka.measure.isolation import map_isolated

    decode = ADAPTERS["scaled_mm"].decode
    with ThreadPoolExecutor(len(work)) as pool:
        futures = {
            n: pool.submit(map_isolated, "loka.measure.bench:check_case", w, timeout=seconds) for n, w in work.items()
        }
        answers = {n: f.result() for n, f in futures.items()}
    report = {}
    for name, outcomes in answers.items():
        report[name] = [
            {"call": str(decode(case["call"])), "crash": o.refusal, **(o.value or {})}
            for case, o in zip(work[name], outcomes, strict=True)
        ]
    return report


def summarize(report: dict[str, list[dict]]) -> None:
    for name, rows in report.items():
        green = [row for row in rows if row.get("ok")]
        wrong = [row for row in rows if row.get("tolerance") is not None and not row["ok"]]
        refused = [row for row in rows if not row.get("ok") and row.get("tolerance") is None and not row["crash"]]
        crashed = [row for row in rows if row["crash"]]
        worst = max((row["error"] / row["tolerance"] for row in green), default=0.0)
        print(
            f"\n{name}: {len(green)} green (worst {worst:.2f} of tolerance), {len(wrong)} WRONG, {len(refused)} refused, {len(crashed)} failed"
        )
        for row in wrong[:12]:
            print(f"  WRONG   {row['call']}: {row['reason'][:220]}")
        for reason, count in Counter(row["crash"][:260] for row in crashed).most_common(8):
            first = next(row["call"] for row in crashed if row["crash"][:260] == reason)
            print(f"  FAILED  {count}x, first {first}: {reason}")
        for reason, count in Counter(row["reason"] for row in refused).most_common(10):
            print(f"  refused {count}x: {reason}")


def _timed(backends: list[str], report: dict[str, list[dict]], *, chosen: bool) -> list[str]:
    """Backends that got anything right; those that need a minute per shape only when they were named."""
    green = [name for name in backends if any(row.get("ok") for row in report[name])]
    return [name for name in green if chosen or name not in FEW] or backends[:1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--site", help="folder of unpacked wheels")
    parser.add_argument("--wheels", help="folder of wheels to unpack into --site first")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--backends", help="comma-separated; default: all of the registry but the reference")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--sweep", type=int, default=0, help="check N shapes of the wide sweep instead")
    parser.add_argument("--seed", type=int, default=0, help="of the sweep")
    parser.add_argument("--elements", type=int, default=1 << 27, help="of the largest matrix in the sweep")
    options = parser.parse_args()
    begin = time.monotonic()
    unpack(options.wheels, options.site)

    import msgspec
    import torch
    from evidence import describe_run

    from loka.kernels.registry import BACKENDS
    from loka.measure import bench
    from loka.records import write_atomically
    from loka.records.record import to_json

    backends = (
        options.backends.split(",") if options.backends else [n for n in BACKENDS["scaled_mm"] if n != "reference"]
    )
    if options.sweep:
        import device_sweep

        sweep = device_sweep.run(
            backends, options.device, count=options.sweep, seed=options.seed, seconds=options.seconds, elements=options.elements, out=options.out
        )  # fmt: skip
        device_sweep.print_summary(sweep)
        print(f"\nall of it took {time.monotonic() - begin:.0f} s; written to {options.out}")
        return
    report = conformance({name: cases(name, options.device) for name in backends}, 0.5 * options.seconds)
    summarize(report)
    print(f"\nconformance took {time.monotonic() - begin:.0f} s", flush=True)
    left = options.seconds - (time.monotonic() - begin)
    config = bench.BenchConfig(
        shapes=TIMED if torch.device(options.device).type == "cuda" else [(64, 128, 128)],
        variants=["e4m3:tensor@e4m3:tensor|fast", "e4m3:row@e4m3:row|fast", "e4m3:1x128@e4m3:128x128"],
        backends=_timed(backends, report, chosen=bool(options.backends)),
        device=options.device,
        repeats=options.repeats,
        seconds=max(left, 1.0),
        isolate=True,
        distributions=("normal",),
    )
    record = bench.run(config, command=" ".join(sys.argv))
    payload = {
        "environment": describe_run(torch.device(options.device).type),
        "conformance": report,
        "bench": msgspec.json.decode(to_json(record)),
    }
    write_atomically(options.out, msgspec.json.format(msgspec.json.encode(payload), indent=1))
    print("\n" + bench.table(record))
    print(f"\nall of it took {time.monotonic() - begin:.0f} s; written to {options.out}")


if __name__ == "__main__":
    main()
