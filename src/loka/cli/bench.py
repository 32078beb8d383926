"""`loka bench`: what this machine can measure. Data loading, the reference quantiser, and where there is a GPU the kernels.

    loka bench                     data and cpu, and kernels where there is a GPU
    loka bench data --json
    loka bench cpu --seconds 0.5
    loka bench kernels             see loka.cli.kernels
    loka bench onerec              the generative engine, see loka.cli.onerec

`data` streams the embedded data set (shuffled, batches of 4096) on one thread. `cpu` quantises a 512 x 2048 tensor with the reference
implementation. Each number is the median of repetitions that together take about `--seconds`.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from loka.cli.kernels import kernels
from loka.cli.onerec import onerec

__all__ = ["app"]

SPECS = ("e4m3:tensor", "e4m3:row", "e4m3:1x128", "e4m3:128x128", "e5m2:tensor", "int8:row", "e2m1:1x16:e4m3")
ROWS, COLUMNS = 512, 2048

app = typer.Typer(invoke_without_command=True)
app.command("kernels")(kernels)
app.command("onerec")(onerec)

Seconds = Annotated[float, typer.Option(help="Time for each number.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure data loading and CPU quantisation here, and the kernels where there is a GPU."""
    if context.invoked_subcommand is not None:
        return
    data()
    cpu()
    import torch

    if torch.cuda.is_available():
        context.invoke(kernels)
    else:
        typer.echo("kernels: not measured, there is no GPU here")


@app.command()
def data(seconds: Seconds = 1.0, json_: AsJson = False) -> None:
    """Examples per second of the embedded data set's training stream."""
    found = _measure(measure_data, seconds)
    if json_:
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(
        f"data: {found['examples_per_second']:,.0f} examples/s of {found['name']} on {found['threads']} thread "
        f"({found['examples']:,} examples, batches of 4096, shuffled)"
    )


@app.command()
def cpu(seconds: Seconds = 1.0, json_: AsJson = False) -> None:
    """Throughput of the reference quantiser, by Spec."""
    found = _measure(measure_quantize, seconds)
    if json_:
        typer.echo(json.dumps(found, indent=1))
        return
    rows, columns = found["shape"]
    typer.echo(f"cpu: reference quantise of float32 {rows} x {columns}, {found['threads']} threads, GB/s of input")
    for spec, rate in found["gigabytes_per_second"].items():
        typer.echo(f"  {spec:<18} {rate:6.2f}")


def _measure(job: Callable[[float], dict[str, Any]], seconds: float) -> dict[str, Any]:
    from rich.console import Console

    if not seconds > 0:
        raise ValueError(f"--seconds {seconds}: expected a positive number")
    with Console(stderr=True).status("measuring"):
        return job(seconds)


def measure_data(seconds: float) -> dict[str, Any]:
    """Examples per second of the default data set's training stream, after its cache is warm."""
    import torch

    from loka.data import load

    data = load("complete-journey")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        count = sum(batch.size for batch in data.train.batches(4096, shuffle=True, seed=0))
        spent = _repeat(lambda: [None for _ in data.train.batches(4096, shuffle=True, seed=0)], seconds)
    finally:
        torch.set_num_threads(threads)
    return {"name": data.name, "examples": count, "examples_per_second": count / spent, "threads": 1}


def measure_quantize(seconds: float) -> dict[str, Any]:
    """Gigabytes of float32 input per second, by Spec."""
    import torch

    from loka.formats import Spec, quantize

    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    rates = {}
    for text in SPECS:
        spec = Spec.parse(text)
        rates[text] = x.nbytes / _repeat(partial(quantize, x, spec), seconds) / 1e9
    return {"shape": [ROWS, COLUMNS], "threads": torch.get_num_threads(), "gigabytes_per_second": rates}


def _repeat(job: Callable[[], Any], seconds: float) -> float:
    """Median seconds of a job, after one run that does not count."""
    job()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
