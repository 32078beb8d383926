"""`loka bench`: check every kernel of an op against the reference, and time it.

    loka bench kernels                                    scaled_mm on the default shapes, GPU
    loka bench kernels --shapes 2048x1024x1024,512x479x64 --backends torch,triton
    loka bench kernels --op quantize --out benchmarks/results/h200/quantize.json
    loka bench kernels --op fused_linear                  the layer, its training form and its gradient
    loka bench kernels --op attention --shapes 256x8x320  rows x heads x length
    loka bench kernels --device cpu --no-isolate          emulation only, and labelled so

Shapes are MxKxN for most ops; quantize and norm_quantize need only MxK, attention takes rows x heads x length,
interaction rows x vectors x width, route tokens x width x experts. Prints bf16, each backend and the roofline per call, then which backends do not support the call and
why. A kernel with wrong results is listed but not timed, and the exit code is 1.
"""

from pathlib import Path
from typing import Annotated

import typer

from loka.cli.places import check_file

app = typer.Typer(no_args_is_help=True)
WITHOUT_N = ("quantize", "norm_quantize")  # ops of one matrix, whose shapes may leave N out


@app.callback()
def bench() -> None:
    """Check and time kernels on this machine."""


@app.command()
def kernels(
    op: Annotated[
        str,
        typer.Option(
            help="Op of the kernel registry, e.g. scaled_mm, quantize, norm_quantize, fused_linear, attention."
        ),
    ] = "scaled_mm",
    shapes: Annotated[
        str, typer.Option(help="MxKxN, comma-separated.")
    ] = "2048x1024x1024,8192x1024x1024,8192x4096x4096",
    variants: Annotated[str, typer.Option(help="Specs, comma-separated, e.g. 'e4m3:row@e4m3:row|fast'.")] = "",
    backends: Annotated[str, typer.Option(help="Comma-separated; default: all but the reference.")] = "",
    device: Annotated[str, typer.Option(help="cuda, or cpu for the emulation.")] = "cuda",
    repeats: Annotated[int, typer.Option(help="Interleaved repeats per call.")] = 31,
    seconds: Annotated[float, typer.Option(help="Time limit of the whole run.")] = 600.0,
    isolate: Annotated[bool, typer.Option(help="Run backends in child processes.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the record to this file.")] = None,
) -> None:
    """Check and time the kernels of an op."""
    from loka.cli.subject import find_device
    from loka.measure import bench
    from loka.records import save, to_json

    check_file("--out", out)
    config = bench.BenchConfig(
        op=op,
        shapes=parse_shapes(shapes, op),
        variants=_list(variants),
        backends=_list(backends),
        device=str(find_device(device)),
        repeats=repeats,
        seconds=seconds,
        isolate=isolate,
    )
    record = bench.run(config)
    if out is not None:
        save(record, out)
    typer.echo(to_json(record).decode() if json_ else bench.table(record))
    if any(row.red for row in record.rows):
        raise typer.Exit(1)


def _list(text: str) -> tuple[str, ...] | None:
    return tuple(part.strip() for part in text.split(",") if part.strip()) or None


def parse_shapes(text: str, op: str = "scaled_mm") -> list[tuple[int, int, int]]:
    """Parse "MxKxN,MxKxN", or "MxK" with N = 1 for an op of one matrix."""
    shapes = []
    for part in text.split(","):
        numbers = part.strip().split("x")
        numbers += ["1"] if len(numbers) == 2 and op in WITHOUT_N else []
        if len(numbers) != 3 or not all(number.isdigit() for number in numbers):
            raise ValueError(f"shape {part!r} is not MxKxN, e.g. 2048x1024x1024")
        m, k, n = (int(number) for number in numbers)
        if not m * k * n:
            raise ValueError(f"shape {part!r} is empty; expected sizes of at least 1")
        shapes.append((m, k, n))
    return shapes
