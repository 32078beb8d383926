"""`loka bench onerec`: the engine on this machine, in 16 bits and FP8, beside the plain beam search.

    loka bench onerec                                                   a tiny model, seconds on a CPU
    loka bench onerec --size 4b-a0.5b --device cuda --beams 512 --context 512 --requests 1,8 --json

Weights are random with the statistics of trained ones. On a CPU FP8 is emulated: its numerics are right and its time means nothing, and the output says so.
benchmarks/onerec_engine.py is the long form, with compiled baselines, a waterfall and profiles.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

__all__ = ["onerec"]


def onerec(
    size: Annotated[str, typer.Option(help="Named size of OneRec.")] = "tiny-moe",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    beams: Annotated[int, typer.Option(help="Width of the search.")] = 32,
    context: Annotated[int | None, typer.Option(help="Items of history; default: the size's longest.")] = None,
    requests: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4",
    seconds: Annotated[float, typer.Option(help="Time for each number.")] = 0.5,
    json_: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Latency and throughput of generating recommendations."""
    sizes = tuple(sorted({int(word) for word in requests.split(",")}))
    if not seconds > 0:
        raise ValueError(f"--seconds {seconds}: expected a positive number")
    found = measure(size, device, beams, context, sizes, seconds)
    if json_:
        typer.echo(json.dumps(found, indent=1))
        return
    note = "" if found["fp8_is_native"] else "; FP8 is emulated here: its times mean nothing"
    typer.echo(f"{size} on {found['device']}, context {found['context']}, {beams} beams{note}")
    for row in found["rows"]:
        typer.echo(
            f"  {row['variant']:14} {row['requests']:3} requests {row['ms']:10.2f} ms {row['queries_per_second']:10.1f} /s"
        )
    typer.echo(f"  overlap of FP8 and bf16 beams: {found['overlap']:.1%} (random weights)")


def measure(
    size: str, device: str, beams: int, context: int | None, sizes: tuple[int, ...], seconds: float
) -> dict[str, Any]:
    """Rows for the plain search, the engine in bf16 and in FP8."""
    import torch

    from loka.cli.subject import find_device
    from loka.data.batch import Jagged
    from loka.inference import Engine, EngineConfig
    from loka.inference.synthetic import make_histories, make_trained_like, share_weights
    from loka.metrics import BeamOverlap
    from loka.models import configure
    from loka.models.beam import search
    from loka.ptq import quantize

    place = find_device(device)
    options = {} if context is None else {"context": context}
    config = configure("onerec", size, **options)
    plain = make_trained_like(config, device=place)
    low = share_weights(plain)
    quantize(low, "onerec")
    engines = {
        name: Engine(model, EngineConfig(beams=beams, requests=sizes, dtype="bf16"))
        for name, model in (("engine bf16", plain), ("engine fp8", low))
    }
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for count in sizes:
        batch = make_histories(config, count, config.context)
        offsets = torch.tensor([0, *(len(r.history) for r in batch)]).cumsum(0).to(place)
        history = Jagged(torch.cat([r.history for r in batch]).to(place), offsets)

        def run_plain(history: Jagged = history) -> Any:
            with torch.no_grad():
                return search(plain, plain.encode(history), beams=beams)

        jobs: dict[str, Callable[[], Any]] = {"plain bf16": run_plain}
        jobs |= {name: (lambda e=engine, b=batch: e.generate(b)) for name, engine in engines.items()}  # type: ignore[misc]
        for name, job in jobs.items():
            spent, found[name] = _clock(job, seconds, place)
            rows.append({"variant": name, "requests": count, "ms": 1e3 * spent, "queries_per_second": count / spent})
    first, second = (torch.stack([r.codes for r in found[f"engine {n}"]]) for n in ("bf16", "fp8"))
    metric = BeamOverlap([first.shape[1]])
    metric.update(first, second)
    native = place.type == "cuda" and torch.cuda.get_device_capability(place) >= (8, 9)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    return {
        "size": size,
        "device": name,
        "fp8_is_native": native,
        "context": config.context,
        "beams": beams,
        "rows": rows,
        "overlap": metric.compute().overlap[first.shape[1]],
    }


def _clock(job: Callable[[], Any], seconds: float, device: Any) -> tuple[float, Any]:
    """Median seconds after one run that does not count, and the last result."""
    import torch

    result = job()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        begin = time.perf_counter()
        result = job()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times), result
