"""`loka load`: send open-loop traffic to a server and measure latency, free of coordinated omission.

    loka load http://127.0.0.1:8000 --model onerec --rate 100 --seconds 20 --sla 50ms
    loka load http://127.0.0.1:8000 --model onerec --rate 200 --seconds 20 --arrivals uniform --out load.json --report load.html
    loka load http://127.0.0.1:8000 --model ranker --rate 50 --seconds 10 --rows 512
    loka load http://127.0.0.1:8000 --model ranker --rate 6000 --seconds 10 --processes 4

Requests are sent on schedule and latency counts from the scheduled time, so a server that stalls cannot delay the load
and hide the stall. Requests are random; their users are marked as simulated, and the server records that. Exit 1 if
more than --late of the accepted requests were late, a connection broke, or the server rejected requests (any status but
200 and 429, which is load shedding); 2 if the request is invalid.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.places import check_file

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from loka.records import LoadTest


def load(
    url: Annotated[str, typer.Argument(help="URL of the server: http://host:port.")],
    model: Annotated[str, typer.Option(help="Name of the model on the server.")],
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 50.0,
    seconds: Annotated[float, typer.Option(help="Duration of the test.")] = 10.0,
    sla: Annotated[str, typer.Option(help="Latency limit of a good answer, e.g. 50ms.")] = "100ms",
    arrivals: Annotated[str, typer.Option(help="Arrival process: poisson or uniform.")] = "poisson",
    requests: Annotated[Path | None, typer.Option(help="Request bodies to send in turn, one JSON object per line; default: random ones.")] = None,
    items: Annotated[int, typer.Option(help="Length of a random history.")] = 50,
    vocabulary: Annotated[int, typer.Option(help="Largest random item or id, from 1.")] = 1000,
    rows: Annotated[int, typer.Option(help="Rows of a random request to a ranker.")] = 100,
    users: Annotated[int, typer.Option(help="Number of simulated users.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and random requests.")] = 0,
    processes: Annotated[int, typer.Option(help="Processes that send; one sends some 2,000 requests a second.")] = 1,
    token: Annotated[str | None, typer.Option(envvar="LOKA_TOKEN", help="Bearer token.")] = None,
    late: Annotated[float, typer.Option(help="Largest accepted share of late answers.")] = 0.01,
    out: Annotated[Path | None, typer.Option(help="Write the record here.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with the plot here.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:  # fmt: skip
    """Send open-loop traffic to a server and measure its latency."""
    import asyncio

    from loka import records
    from loka.cli.serve import parse_seconds
    from loka.serving.load import Traffic, describe, make_body, send_from, summarize

    check_file("--out", out, [requests])
    check_file("--report", report)
    if report is not None:
        from loka.report.render import require_charts

        require_charts()
    if not 0 <= late <= 1:
        raise ValueError(f"--late {late:g}: expected a share from 0 to 1")
    if processes < 1:
        raise ValueError(f"--processes {processes}: expected at least 1")
    traffic = Traffic(rate=rate, seconds=seconds, sla=parse_seconds(sla), arrivals=arrivals, seed=seed)  # type: ignore[arg-type]
    given = None if requests is None else read_bodies(requests)
    about = asyncio.run(describe(url, model, token))
    body = given or make_body(about["inputs"], items=items, vocabulary=vocabulary, rows=rows, users=users)
    sent = send_from(processes, url, traffic, body, token=token)
    found = summarize(url, f"{model} {about['versions'][0]}", traffic, sent)
    if out is not None:
        records.save(found, out)
    if report is not None:
        from loka.report.render import write_html
        from loka.report.results import Results

        write_html(Results.of([found]), report)
    typer.echo(records.to_json(found).decode() if json_ else tell(found))
    findings = []
    if found.late_share > late:
        findings.append(f"{found.late_share:.2%} of the accepted requests were late, more than --late {late:.2%}")
    if others := sorted(found.codes.keys() - {"200", "429"}):
        findings.append(f"answers with status {', '.join(others)}")
    for finding in findings:
        typer.echo(f"finding: {finding}", err=True)
    if findings:
        raise typer.Exit(1)


def read_bodies(path: Path) -> Callable[[int, random.Random], bytes]:
    """Return a function that yields the lines of a file as request bodies, in turn."""
    import msgspec

    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}; expected one JSON object per line") from error
        lines.append(line)
    if not lines:
        raise ValueError(f"{path}: no requests in it")
    return lambda number, source: lines[number % len(lines)]


def tell(found: LoadTest) -> str:
    """Format a load test as text."""

    def spell(quantiles: dict[str, float]) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in quantiles.items()) or "none"

    return "\n".join(
        [
            f"{found.model} at {found.url}: {found.offered:,} requests, {found.rate:g}/s for {found.seconds:g} s ({found.arrivals})",
            f"answers by status   {', '.join(f'{code}: {count:,}' for code, count in found.codes.items())}",
            (
                f"within {found.sla_ms:g} ms        {found.good:,}, {found.goodput:.1f} a second; "
                f"late {found.late:,} ({found.late_share:.2%} of the accepted)"
            ),
            f"latency ms          {spell(found.latency_ms)}",
            f"429 decided in ms   {spell(found.shed_ms)}",
            f"generator late ms   {spell(found.send_lag_ms)}",
            *(f"note: {note}" for note in found.notes),
        ]
    )
