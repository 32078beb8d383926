"""An open-loop load generator: requests are sent on schedule, whether or not earlier ones were answered.

A closed loop (send, wait, send) slows down with the server and then measures only the requests it got around to
sending; this is coordinated omission. Here the schedule is drawn beforehand (Poisson, or evenly spaced), every request
is its own task, and latency counts from the scheduled time. So it includes any delay of the generator itself, which is
also reported separately. Connections are reused; a new one is opened when all are busy.

One process sends some 2,000 requests a second. `send_from` takes several, each of which sends its share of one schedule
from the same start, so that all of them together send what one would.

HTTP is written by hand, because a generator that shares two cores with the server must be cheap. Responses need a
content length, which loka's server sends.
"""

import asyncio
import bisect
import json
import math
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import msgspec

from loka.records import LoadBin, LoadTest, capture_environment

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
BINS = 30
Body = Callable[[int, random.Random], bytes]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The traffic to send.

    Args:
        rate: requests per second.
        seconds: duration.
        sla: latency of a good answer, in seconds.
        arrivals: "poisson" or "uniform".
        seed: seed of the arrivals and of random requests.
        connections: largest number of open connections.
        timeout: seconds after which a request is given up.
        kind: content type of the bodies.
    """

    rate: float
    seconds: float
    sla: float
    arrivals: Literal["poisson", "uniform"] = "poisson"
    seed: int = 0
    connections: int = 512
    timeout: float = 30.0
    kind: Literal["application/json", "application/msgpack"] = "application/json"

    def __post_init__(self) -> None:
        for name in ("rate", "seconds", "sla", "connections", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")
        if self.arrivals not in ("poisson", "uniform"):
            raise ValueError(f"arrivals is {self.arrivals!r}; expected 'poisson' or 'uniform'")

    def due(self) -> list[float]:
        """Return the time at which each request is due, in seconds from the start."""
        if self.arrivals == "uniform":
            return [n / self.rate for n in range(int(self.rate * self.seconds))]
        source, now, out = random.Random(self.seed), 0.0, []
        while (now := now + source.expovariate(self.rate)) < self.seconds:
            out.append(now)
        return out


@dataclass(slots=True)
class Sent:
    """One request: times in seconds from the start, status (0 if the connection broke), and the body of an error."""

    due: float
    left: float
    done: float
    code: int
    said: bytes = b""

    @property
    def latency(self) -> float:
        """Seconds from when the request was due."""
        return self.done - self.due


class _Client:
    """Connections to one server, reused last in, first out."""

    def __init__(self, url: str, token: str | None, most: int, kind: str = "application/json") -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r}: expected http://host:port")
        if token is not None and not token.isprintable():
            raise ValueError("the token holds a line break or another control character; expected one line of text")
        self.host, self.port, self.token, self.kind = parts.hostname, parts.port or 80, token, kind
        self.named = f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.room = asyncio.Semaphore(most)

    def _head(self, method: str, path: str, size: int, extra: str) -> bytes:
        token = f"authorization: Bearer {self.token}\r\n" if self.token else ""
        kind = f"content-type: {self.kind}\r\n" if size else ""
        return f"{method} {path} HTTP/1.1\r\nhost: {self.named}\r\ncontent-length: {size}\r\n{kind}{token}{extra}\r\n".encode()

    async def ask(self, method: str, path: str, body: bytes = b"", extra: str = "") -> tuple[int, bytes]:
        """Send a request; return status and body. Raises OSError if the connection breaks."""
        async with self.room:
            reader, writer = self.free.pop() if self.free else await asyncio.open_connection(self.host, self.port)
            try:
                writer.write(self._head(method, path, len(body), extra) + body)
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                sizes = [int(line.partition(b":")[2]) for line in lines[1:] if line.startswith(b"content-length:")]
                if not sizes:
                    raise ConnectionError("an answer without a content length")
                answer = await reader.readexactly(sizes[0])
            except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                writer.close()
                raise
            if b"connection: close" in lines:
                writer.close()
            else:
                self.free.append((reader, writer))
            return int(head[9:12]), answer

    def close(self) -> None:
        for _, writer in self.free:
            writer.close()


async def send(
    url: str,
    traffic: Traffic,
    body: Body,
    *,
    token: str | None = None,
    extra: str = "",
    share: tuple[int, int] = (0, 1),
    start: Callable[[], float] = time.perf_counter,
) -> list[Sent]:
    """Send the traffic and wait for every answer.

    Args:
        url: URL of the server.
        traffic: how much to send, and when.
        body: body(number, random) returns the body of a request, in the traffic's content type.
        token: bearer token.
        extra: more header lines, each ending in CRLF.
        share: (k, n): send only every n-th request, from the k-th.
        start: called when the bodies are made; returns the time, by time.perf_counter, at which the schedule begins.

    Returns:
        Every request, in the order they completed.
    """
    client = _Client(url, token, traffic.connections, traffic.kind)
    due, sent = traffic.due(), []
    places = range(share[0], len(due), share[1])
    if not due:
        raise ValueError(
            f"no request is due within {traffic.seconds:g} s at {traffic.rate:g} per second; hint: a longer test, "
            "or a higher rate"
        )
    # Made beforehand, because making them takes time. Each has random numbers of its own, whichever process sends it.
    bodies = {n: body(n, random.Random((traffic.seed + 1 << 32) + n)) for n in places}

    async def one(place: int, begin: float) -> None:
        left, said = time.perf_counter() - begin, b""
        try:
            async with asyncio.timeout(traffic.timeout):
                code, said = await client.ask("POST", "/v1/recommend", bodies[place], f"x-loka-simulated: 1\r\n{extra}")
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            code = 0
        sent.append(Sent(due[place], left, time.perf_counter() - begin, code, b"" if code == 200 else said))

    begin = start()
    tasks = set()
    for place in places:
        wait = begin + due[place] - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(one(place, begin))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    while tasks:
        await asyncio.gather(*tasks)
    client.close()
    return sent


def send_from(
    processes: int, url: str, traffic: Traffic, body: Body, *, token: str | None = None, extra: str = ""
) -> list[Sent]:
    """Send the traffic from several processes, and wait for every answer.

    Args:
        processes: number of processes; each has its own connections, up to the traffic's number in all.
        url, traffic, body, token, extra: as in `send`.

    Returns:
        Every request of all processes. Times count from the same start.

    Example:
        >>> send_from(4, "http://127.0.0.1:8000", Traffic(rate=6000, seconds=2, sla=0.05), body)   # doctest: +SKIP
    """
    if processes < 1:
        raise ValueError(f"processes={processes}: expected at least one")
    if processes == 1:
        return asyncio.run(send(url, traffic, body, token=token, extra=extra))
    context = multiprocessing.get_context("fork")  # bodies are made by a function, which cannot be pickled
    begin = context.Value("d", 0.0)

    def set_begin() -> None:
        begin.value = time.perf_counter() + 0.02  # the same clock in all processes

    ready = context.Barrier(processes, set_begin)

    def start() -> float:
        ready.wait(120)
        return float(begin.value)

    def work(place: int, out: Any) -> None:
        try:
            found: Any = asyncio.run(
                send(url, own, body, token=token, extra=extra, share=(place, processes), start=start)
            )
        except Exception as error:  # raised by the process that started this one
            ready.abort()
            found = error
        out.send(found)

    own = replace(traffic, connections=max(1, traffic.connections // processes))
    pipes = [context.Pipe(duplex=False) for _ in range(processes)]
    children = [context.Process(target=work, args=(k, pipe[1]), daemon=True) for k, pipe in enumerate(pipes)]
    for child in children:
        child.start()
    for _, end in pipes:
        end.close()  # so that a process that died ends its pipe
    found: list[Any] = []
    for pipe, _ in pipes:
        try:
            found.append(pipe.recv())
        except EOFError:
            found.append(RuntimeError("a process of the load generator ended before it had sent its share"))
    for child in children:
        child.join()
    errors = [one for one in found if isinstance(one, Exception)]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):  # others' last
        raise error
    return [one for part in found for one in part]


def summarize(url: str, model: str, traffic: Traffic, sent: Sequence[Sent], *, notes: Sequence[str] = ()) -> LoadTest:
    """Summarize the requests that were sent as a record.

    Args:
        url: the server.
        model: the name of its model.
        traffic: what was to be sent.
        sent: what was sent, and what came back.
        notes: what the record says besides.
    """
    codes: dict[str, int] = {}
    for one in sent:
        name = str(one.code) if one.code else "error"
        codes[name] = codes.get(name, 0) + 1
    answered = [one for one in sent if one.code == 200]
    good = sum(one.latency <= traffic.sla for one in answered)
    return LoadTest(
        url=url,
        model=model,
        arrivals=traffic.arrivals,
        rate=float(traffic.rate),
        seconds=float(traffic.seconds),
        sla_ms=1e3 * traffic.sla,
        seed=traffic.seed,
        offered=len(sent),
        codes=dict(sorted(codes.items())),
        good=good,
        late=len(answered) - good,
        goodput=good / traffic.seconds,
        latency_ms=quantiles([one.latency for one in answered]),
        shed_ms=quantiles([one.done - one.left for one in sent if one.code == 429]),
        send_lag_ms=quantiles([one.left - one.due for one in sent]),
        bins=_bins(traffic, sent),
        notes=[*notes, *_first_errors(sent)],
        environment=capture_environment(),
    )


def _first_errors(sent: Sequence[Sent]) -> list[str]:
    """Return the first message of each error status. 429 is not an error here: it sheds load."""
    first: dict[int, Sent] = {}
    for one in sorted(sent, key=lambda one: one.due):
        if one.code >= 400 and one.code != 429:
            first.setdefault(one.code, one)
    notes = []
    for code, one in sorted(first.items()):
        try:
            error = json.loads(one.said)["error"]
            words = f"{error['path']}: {error['message']}" if "path" in error else str(error["message"])
        except (ValueError, KeyError, TypeError):  # not loka's server
            words = one.said[:200].decode(errors="replace")
        notes.append(f"the first {code} said: {words}")
    return notes


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p90, p99 and max in milliseconds; empty without values."""
    values = sorted(seconds)
    if not values:
        return {}
    return {name: round(1e3 * values[min(len(values) - 1, int(q * len(values)))], 3) for name, q in QUANTILES}


def _bins(traffic: Traffic, sent: Sequence[Sent]) -> list[LoadBin]:
    edges = [traffic.seconds * n / BINS for n in range(BINS)]
    piles: list[list[Sent]] = [[] for _ in edges]
    for one in sent:
        piles[bisect.bisect_right(edges, one.due) - 1].append(one)
    out = []
    for edge, pile in zip(edges, piles, strict=True):
        answered = [one.latency for one in pile if one.code == 200]
        found = quantiles(answered)
        good = sum(latency <= traffic.sla for latency in answered)
        out.append(
            LoadBin(second=round(edge, 3), offered=len(pile), answered=len(answered), good=good, p50_ms=found.get("p50"), p99_ms=found.get("p99"))
        )  # fmt: skip
    return out


async def look(url: str, token: str | None = None) -> dict[str, Any]:
    """Check whether a server is live and ready, and whether it accepts the token.

    Args:
        url: URL of the server.
        token: bearer token.

    Returns:
        `live` and `ready`; `status` and `server`, the status and body of `GET /v2`.
    """
    live, ready, (code, body) = await _get(url, token, "/v2/health/live", "/v2/health/ready", "/v2")
    return {"live": live[0] == 200, "ready": ready[0] == 200, "status": code, "server": _decode(url, body)}


async def _get(url: str, token: str | None, *paths: str) -> list[tuple[int, bytes]]:
    client = _Client(url, token, 1)
    try:
        return [await client.ask("GET", path) for path in paths]
    except (OSError, asyncio.IncompleteReadError) as error:
        raise ValueError(
            f"{url}: no answer: {error}; hint: is a server running there? loka serve prints its address"
        ) from error
    finally:
        client.close()


async def describe(url: str, name: str, token: str | None = None) -> dict[str, Any]:
    """Return `GET /v2/models/NAME`, or raise ValueError with the server's message."""
    ((code, body),) = await _get(url, token, f"/v2/models/{quote(name, safe='')}")
    found = _decode(url, body)
    if code != 200:
        raise ValueError(f"{url}: {code}: {found.get('error', {}).get('message', found)}")
    return found


def _decode(url: str, body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{url}: this is no server of loka: it answered {body[:60]!r}, expected a JSON object") from error  # fmt: skip


def make_body(inputs: Sequence[dict[str, Any]], *, items: int, vocabulary: int, rows: int, users: int) -> Body:
    """Return a function that makes random requests with the inputs that a server describes.

    Args:
        inputs: the inputs of `GET /v2/models/NAME`.
        items: length of a history, for a generative model.
        vocabulary: largest item number or id; they are drawn from 1.
        rows: rows of a request to a ranker.
        users: number of different users.
    """
    if items < 0 or min(vocabulary, rows, users) < 1:
        raise ValueError(
            f"items {items}, vocabulary {vocabulary}, rows {rows}, users {users}: expected at least 1 (items: 0)"
        )
    generative = {one["name"] for one in inputs} <= {"history", "codes"}  # a ranker may have a column of that name

    def draw(number: int, source: random.Random) -> bytes:
        user = f"simulated-{source.randrange(users)}"
        if generative:
            return msgspec.json.encode({"user": user, "history": [source.randint(1, vocabulary) for _ in range(items)]})
        features: dict[str, Any] = {}
        for one in inputs:
            if one["datatype"] == "FP32":
                features[one["name"]] = [source.gauss(0, 1) for _ in range(rows)]
            elif len(one["shape"]) == 1:
                features[one["name"]] = [source.randint(1, vocabulary) for _ in range(rows)]
            else:
                features[one["name"]] = [source.randint(1, vocabulary) for _ in range(min(items, one["shape"][1]))]
        return msgspec.json.encode({"user": user, "features": features})

    return draw
