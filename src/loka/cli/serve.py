"""`loka serve`: serve a model over HTTP within a latency deadline.

    loka serve runs/onerec --sla 50ms --port 8000                          a recommender of loka generate --train
    loka serve runs/ranker --sla 20ms --rows 256,1024                      a frozen ranker (loka.serving.save_ranker)
    loka serve runs/ranker --sla 20ms --fronts 6                           thousands of small requests a second
    loka serve runs/onerec --host 0.0.0.0 --token-file tokens --sla 50ms   beyond localhost, which requires tokens
    loka serve runs/a runs/b --split 95,5 --salt autumn --events runs/ab   an experiment; see loka ab --online runs/ab
    loka serve runs/a runs/b --shadow --events runs/shadow                 b runs on the same requests, a answers
    loka serve runs/onerec --on ray --replicas 4 --sla 50ms                several processes or machines, with Ray Serve
    loka serve --check http://127.0.0.1:8000                               is it ready, and does it accept this client

It binds to localhost by default. Metrics, a live page and reloads are on --admin-port, always on localhost. SIGTERM
drains the server, SIGHUP reloads the bundles. Exit 1 if --check finds a server that is not ready or rejects this
client; 2 if the request is invalid.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from loka.serving import Server, Split


def serve(
    bundles: Annotated[list[Path] | None, typer.Argument(help="Folder of a recommender or a ranker; two for an experiment.")] = None,
    sla: Annotated[str, typer.Option(help="Deadline from arrival to answer, e.g. 50ms or 0.1s.")] = "100ms",
    host: Annotated[str, typer.Option(help="Address to listen on; any other than localhost needs --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Public port; 0: a free one.")] = 8000,
    admin_port: Annotated[int | None, typer.Option(help="Port of metrics, live page and reload, on localhost; default: 8001; -1: none.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File of bearer tokens, one per line; reread when it changes.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="Precision of a recommender's unquantized layers: bf16, fp16 or fp32; default: fp32.")] = None,
    beams: Annotated[int | None, typer.Option(help="Width of a recommender's beam search; default: 50.")] = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes of a recommender, in requests; default: 1,2,4,8,16.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Context lengths to prepare, comma-separated; default: the recommender's longest.")] = None,
    context_cache: Annotated[str | None, typer.Option(help="Format of a recommender's context cache: plain (default) or e4m3.")] = None,
    rows: Annotated[str | None, typer.Option(help="Batch sizes of a ranker, in rows; default: 64,256,1024,4096.")] = None,
    factory: Annotated[str | None, typer.Option(help="pkg.module:function that builds the ranker, if its folder names one.")] = None,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="Make answers bitwise independent of the other requests in a batch.")] = False,
    compile_: Annotated[bool, typer.Option("--compile", help="Compile a ranker for every batch size before it is ready: slower start, faster answers.")] = False,
    body: Annotated[int | None, typer.Option(help="Largest request, in KiB; default: 2048, or 112 on Ray, where a larger limit slows every request.")] = None,
    split: Annotated[str | None, typer.Option(help="Traffic shares of two models, e.g. 95,5.")] = None,
    salt: Annotated[str | None, typer.Option(help="Name of the experiment; another name assigns users anew.")] = None,
    events: Annotated[Path | None, typer.Option(help="Folder for the experiment's events.")] = None,
    shadow: Annotated[bool, typer.Option("--shadow", help="Answer with the first model; run the second on the same requests and only record it.")] = False,
    on: Annotated[str, typer.Option(help="local: this process; ray: Ray Serve.")] = "local",
    fronts: Annotated[int, typer.Option(help="Processes that speak HTTP and decode requests for the one that has the model; 0: it does that itself.")] = 0,
    replicas: Annotated[int, typer.Option(help="Number of processes, with --on ray.")] = 1,
    log: Annotated[str | None, typer.Option(help="JSON lines on stderr: all (every answer), errors (default) or none.")] = None,
    check: Annotated[str | None, typer.Option(help="Check the server at this URL instead of serving.")] = None,
    token: Annotated[str | None, typer.Option(envvar="LOKA_TOKEN", help="Bearer token for --check.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result of --check, or the server's address, as JSON.")] = False,
) -> None:  # fmt: skip
    """Serve a model over HTTP within a latency deadline."""
    if check is not None:
        if bundles:
            raise ValueError("--check asks a running server and takes no folders")
        check_server(check, token, json_)
        return
    if not bundles:
        raise ValueError("give the folder of a model, or --check URL")
    if log not in (None, "all", "errors", "none"):
        raise ValueError(f"--log {log}: expected all, errors or none")
    if on not in ("local", "ray"):
        raise ValueError(f"--on {on}: expected local or ray")
    if on == "local" and replicas != 1:
        raise ValueError(f"--replicas {replicas} needs --on ray; one process serves one replica")
    if fronts < 0:
        raise ValueError(f"--fronts {fronts}: expected a number of processes, or 0 for none")
    if on == "ray" and fronts:
        raise ValueError(
            f"--fronts {fronts} is for a server on one machine: on Ray, HAProxy distributes requests and every "
            "replica reads its own; hint: --replicas"
        )
    if body is not None and body < 1:
        raise ValueError(f"--body {body}: expected KiB, at least 1")
    options: dict[str, Any] = {
        "device": device,
        "precision": precision,
        "beams": beams,
        "batches": parse_sizes("--batches", batches),
        "contexts": parse_sizes("--contexts", contexts),
        "context_cache": context_cache,
        "rows": parse_sizes("--rows", rows),
        "factory": factory,
        "batch_invariant": batch_invariant,
        "compiled": compile_ or None,
    }
    if on == "ray":
        if admin_port is not None:
            raise ValueError(
                "--admin-port is for the single-process server; on Ray, HAProxy and Ray have metrics of their own"
            )
        run_on_ray(
            bundles, host, port, replicas, json_, split=parse_split(name_arms(bundles), split, salt, shadow), sla=parse_seconds(sla),
            options=options, token_file=token_file, events=events, shadow=shadow, log=log or "errors",
            **({} if body is None else {"body": 1024 * body}),
        )  # fmt: skip
        return
    import logging

    from loka.serving import Limits
    from loka.serving.server import log_nothing, log_to_stderr

    server = make_server(
        bundles, options, split=split, salt=salt, shadow=shadow, sla=parse_seconds(sla), host=host, port=port, token_file=token_file,
        events=events, admin_port=None if admin_port == -1 else 8001 if admin_port is None else admin_port, verbose=log == "all",
        limits=Limits() if body is None else Limits(body=1024 * body), fronts=fronts,
    )  # fmt: skip
    if log == "none":
        log_nothing()
    else:
        log_to_stderr(logging.INFO if log == "all" else logging.WARNING)
    tell(server, json_)
    server.run()
    if server.service.busy:
        # a thread inside a model cannot be interrupted: an ordinary end would wait for it, or abort
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def make_server(
    bundles: list[Path], options: dict[str, Any], *, split: str | None, salt: str | None, shadow: bool, **rest: Any
) -> Server:
    """Open the models of the folders and return a server for this process."""
    from loka.cli.subject import find_device
    from loka.serving import Server
    from loka.serving.opening import open_model

    if find_spec("uvicorn") is None:
        raise ValueError("loka serve needs uvicorn; hint: pip install 'loka[serve]'")
    find_device(options["device"])
    names = name_arms(bundles)
    chosen = parse_split(names, split, salt, shadow)
    arms = dict(zip(names, bundles, strict=True))
    return Server(
        {name: open_model(folder, name=name, **options) for name, folder in arms.items()},
        split=chosen,
        shadow=shadow,
        folders={name: str(folder) for name, folder in arms.items()},
        opener=lambda folder: open_model(folder, **options),
        **rest,
    )


def tell(server: Server, as_json: bool) -> None:
    """Print the server's address once it is ready, from a thread, because the main thread serves."""
    import threading
    import time

    def wait() -> None:
        begin = time.monotonic()
        while not server.ready:
            if server.service.failed:
                return
            time.sleep(0.02)
        found = {"url": server.url, "admin": server.admin_url, "seconds": round(time.monotonic() - begin, 2)}
        arms = [server.service.describe_runner(r) for r in server.service.runners.values()]
        if as_json:
            typer.echo(json.dumps({**found, "models": arms}))
        else:
            for arm in arms:
                typer.echo(
                    (
                        f"{arm['model']} {arm['version']}: batches of up to {spell_caps(arm['caps'])} within "
                        f"{arm['sla_ms']:g} ms"
                    ),
                    err=True,
                )
            typer.echo(
                f"ready after {found['seconds']} s: {server.url}/v1/recommend"
                + (f", live page {server.admin_url}" if server.admin_url else ""),
                err=True,
            )

    threading.Thread(target=wait, daemon=True).start()


def spell_caps(caps: dict[str, int]) -> str:
    """Format the largest batches that meet the SLA: rows for a ranker, requests per context length otherwise."""
    if caps.keys() == {"0"}:
        return f"{caps['0']:,} rows"
    return ", ".join(f"{most} requests with {context} items of history" for context, most in caps.items())


def run_on_ray(
    bundles: list[Path], host: str, port: int, replicas: int, as_json: bool, *, split: Split | None, token_file: Path | None,
    events: Path | None, **rest: Any,
) -> None:  # fmt: skip
    """Serve on Ray until interrupted."""
    import time

    from loka.serving.ray_app import Settings, run

    begin, url = time.monotonic(), f"http://{host}:{port}"

    def ready() -> None:
        found = {"url": url, "replicas": replicas, "seconds": round(time.monotonic() - begin, 2)}
        typer.echo(json.dumps(found)) if as_json else typer.echo(f"ready after {found['seconds']} s: {url}/v1/recommend", err=True)  # fmt: skip

    settings = Settings(
        folders={name: str(path.resolve()) for name, path in zip(name_arms(bundles), bundles, strict=True)},
        token_file=None if token_file is None else str(token_file.resolve()),
        events=None if events is None else str(events.resolve()),
        shares=None if split is None else split.shares,
        salt="" if split is None else split.salt,
        **rest,
    )
    run(settings, host=host, port=port, replicas=replicas, ready=ready)


def check_server(url: str, token: str | None, as_json: bool) -> None:
    """Print the state of a server; exit 1 if it is not ready or rejects this client."""
    import asyncio

    from loka.serving.load import look

    found = asyncio.run(look(url, token))
    if as_json:
        typer.echo(json.dumps(found))
    else:
        states = " and ".join(f"{'' if found[state] else 'not '}{state}" for state in ("live", "ready"))
        token_state = "accepted" if found["status"] == 200 else f"refused ({found['status']})"
        hint = "; hint: --token" if found["status"] == 401 and token is None else ""
        typer.echo(f"{url}: {states}, this client is {token_state}{hint}")
    if not found["ready"] or found["status"] != 200:
        raise typer.Exit(1)


def parse_seconds(text: str) -> float:
    """Parse 50ms, 0.1s or 0.1 into seconds."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*(ms|s|)\s*", text)
    try:
        value = float(found[1]) * (1e-3 if found[2] == "ms" else 1.0) if found else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ValueError(f"{text!r} is not a duration; expected 50ms or 0.05s")
    return value


def parse_sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    """Parse comma-separated integers; sorted, without duplicates."""
    if text is None:
        return None
    try:
        return tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError as error:
        raise ValueError(f"{option} {text!r}: expected whole numbers with commas between them") from error


def parse_split(names: list[str], split: str | None, salt: str | None, shadow: bool) -> Split | None:
    """Return the experiment given by --split and --salt, if any."""
    from loka.serving import Split

    if split is None:
        if salt is not None:
            raise ValueError("--salt goes with --split")
        return None
    if shadow:
        raise ValueError("--shadow answers everybody with the first model and does not go with --split")
    try:
        shares = tuple(float(word) for word in split.split(","))
    except ValueError as error:
        raise ValueError(f"--split {split!r}: expected shares with commas between them, as 95,5") from error
    if salt is None:
        raise ValueError("--split needs --salt, the experiment's name")
    return Split(tuple(names), shares, salt)


def name_arms(bundles: list[Path]) -> list[str]:
    """Name the models after their folders, prefixed by the parent folder if two are the same."""
    names = [path.resolve().name for path in bundles]
    if len(set(names)) < len(names):
        names = [f"{path.resolve().parent.name}-{path.resolve().name}" for path in bundles]
    if len(set(names)) < len(names):
        raise ValueError(
            f"the bundles {', '.join(map(str, bundles))} have the same names; hint: give two different folders"
        )
    return names
