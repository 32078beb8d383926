"""What preparing a weight once saves: every backend of scaled_mm with its weight plain and prepared, at odd and at round widths.

    PYTHONPATH=src python benchmarks/prepared_weights.py --out result.json

Needs a GPU, torch, triton and msgspec. Each pair must be right and give the same bits before it is timed, both in one interleaved series, in a child process per
backend; `speedup` is plain over prepared. At round widths there is mostly nothing to prepare (`prepared` false) and nothing is timed.
"""

import argparse
import time

SHAPES = [
    (512, 13, 512), (512, 479, 1024), (2048, 479, 1024), (8192, 479, 1024), (2048, 1024, 27), (2048, 1000, 1000), (8192, 1408, 1408),
    (2048, 2816, 1408), (64, 4096, 4096), (2048, 2048, 2048), (8192, 4096, 4096),
]  # fmt: skip
VARIANTS = (
    "e4m3:tensor@e4m3:tensor|fast",
    "e4m3:row@e4m3:row|fast",
    "e4m3:row@e4m3:tensor|fast",
    "e4m3:1x128@e4m3:128x128",
)


def time_pair(backend: str, variant: str, shape: list[int], device: str, repeats: int) -> dict:
    """One backend on one call: times with the weight plain and prepared, or why there are none."""
    import torch

    from loka.kernels import registry
    from loka.measure.adapter import parse_variant
    from loka.measure.conformance import check_scaled_mm
    from loka.measure.inputs import matmul_operands
    from loka.measure.timing import Contender, sets_needed, time_together

    target, kernel = torch.device(device), registry.backend("scaled_mm", backend)
    m, k, n = shape
    call = parse_variant(variant, (m, k, n))
    verdict = kernel.supports(call, target)
    if not verdict:
        return {"refusal": verdict.reason}
    count = sets_needed((m + n) * k + 2 * m * n, target)
    sets = [matmul_operands(call, seed=s, device=target, outer_major=backend != "torchao") for s in range(count)]
    if registry.prepare_for(kernel, sets[0][1], call.a) is sets[0][1]:
        return {"prepared": False}
    checked = check_scaled_mm(kernel, call, *sets[0])
    if not checked:
        return {"refusal": f"wrong: {checked.reason}"}

    def thunk(a, b):
        return lambda: kernel.run(a, b, out_dtype=call.out_dtype, fast_accum=call.fast_accum)

    plain = Contender("plain", [thunk(a, b) for a, b in sets], checked)
    ready = Contender("prepared", [thunk(a, registry.prepare_for(kernel, b, call.a)) for a, b in sets], checked)
    before, after = time_together([plain, ready], target, repeats=repeats)
    times = {t.name: _fields(t.microseconds()) for t in (before, after)}
    return {
        "prepared": True,
        "microseconds": times,
        "speedup": _fields(after.speedup_over(before)),
        "method": after.method,
    }


def _fields(interval) -> dict:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--backends", default="torch,triton,fbgemm,deepgemm", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()

    import msgspec

    from loka.measure.device import snapshot
    from loka.measure.isolation import map_isolated
    from loka.records import write_atomically

    end = time.monotonic() + options.seconds
    command = f"python benchmarks/prepared_weights.py --backends {options.backends} --repeats {options.repeats}"
    body: dict = {"environment": msgspec.to_builtins(snapshot(command)), "rows": []}
    for name in options.backends.split(","):  # one after the other: times want the GPU for themselves
        pairs = [(shape, variant) for shape in SHAPES for variant in VARIANTS]
        common = {"backend": name, "device": options.device, "repeats": options.repeats}
        cases = [{"shape": list(shape), "variant": variant, **common} for shape, variant in pairs]
        answers = map_isolated("prepared_weights:time_pair", cases, timeout=max(end - time.monotonic(), 0.1))
        for (shape, variant), answer in zip(pairs, answers, strict=True):
            row = {"backend": name, "variant": variant, "shape": shape, **(answer.value or {"refusal": answer.refusal})}
            body["rows"].append(row)
            if row.get("prepared"):
                times = "  ".join(f"{kind} {t['value']:8.2f} us" for kind, t in row["microseconds"].items())
                print(
                    f"{name:<9} {variant:<32} {'x'.join(map(str, shape)):<16} {times}  {row['speedup']['value']:.2f}x"
                )
        write_atomically(options.out, msgspec.json.format(msgspec.json.encode(body), indent=1))


if __name__ == "__main__":
    main()
