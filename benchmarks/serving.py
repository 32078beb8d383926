"""What a server adds, keeps and sheds on this machine, over loopback: the front's own cost, answers in time, overload, hostile clients, peeking.

    python benchmarks/serving.py --out benchmarks/results/cpu/serving.json
    python benchmarks/serving.py --out x.json --only front,overload --seconds 5

The server is another process; its model sleeps as long as the engine's batches were measured to take on an H200 (context 512, FP8 and bf16), because a GPU leaves the CPU
free and this machine has none. That measures batching, admission and HTTP, and nothing about kernels. Cases:

    front       requests one after the other against an engine that answers at once: what HTTP, parsing and the hand-over add
    capacity    open-loop traffic at the goodput capacity and at twice it, SLA 50 ms: goodput, late among the accepted, time to a 429
    formats     a history of 3,000 items as JSON numbers, base64 codes and MessagePack
    attacks     slow heads, 30 MB bodies, malformed bodies, clients that leave: codes, memory, and a normal request afterwards
    reload      a new model put in place under load: who was lost, p99 during and without
    virtual     the scheduler alone on a virtual clock, same times with jitter: late, goodput; says nothing of HTTP, and does not depend on how busy the machine is
    peeking     A/A experiments looked at 60 times: share of false alarms
    start       with --bundle: `loka serve` of a recommender's folder, from the command to the first answer; not among the cases that run by default
    memory      the server's memory while requests of ever new users and histories come; at its middle and at its end it must be the same
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from loka.records import capture_environment  # noqa: E402
from loka.serving.load import Traffic, quantiles, send, summarize  # noqa: E402


def read_times() -> dict[str, dict[int, float]]:
    """Milliseconds of a batch on an H200 by requests, copies included: OneRec 4B-A0.5B, beam 512, context 512, as recorded."""
    rows = json.loads((HERE / "results" / "h200" / "onerec_engine.json").read_text(encoding="utf-8"))["rows"]
    out: dict[str, dict[int, float]] = {"none": {8: 0.0, 16: 0.0}}
    for row in rows:
        if row["variant"] in ("fp8", "bf16") and row["context"] == 512:
            out.setdefault(row["variant"], {})[row["batch"]] = row["end_to_end_ms"]
    return {name: dict(sorted(times.items())) for name, times in out.items()}


TIMES = read_times()
SLA = 0.05


class Ask(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    history: list[int] | None = None
    codes: bytes | None = None
    user: str | int | None = None
    timeout_ms: float | None = None


class Said(msgspec.Struct, kw_only=True):
    items: list[int]
    version: str
    empty: bool = False


class Sleeper:
    """A Servable that takes an engine's time and returns ten items."""

    request_type = Ask

    def __init__(self, times: dict[int, float], version: str = "1") -> None:
        self.times = {(n, 512): ms / 1e3 for n, ms in times.items()}
        self.name, self.version, self.captures = "sleeper", version, 0

    @property
    def buckets(self) -> list[tuple[int, int]]:
        return list(self.times)

    def warm(self) -> None:
        self.captures = len(self.times)

    def example(self, bucket: tuple[int, int]) -> list[Any]:
        from loka.serving import Job

        return [Job(Ask(history=[n]), 1, bucket[1], n) for n in range(bucket[0])]

    def read(self, request: Ask) -> Any:
        from loka.serving import FieldError, Job

        if (request.history is None) == (request.codes is None):
            raise FieldError("$.history", "give `history` or `codes`")
        return Job(request, 1, min(512, len(request.history or b"")), 0)

    def run(self, bucket: tuple[int, int], jobs: Any) -> list[Said]:
        if self.times[bucket]:
            time.sleep(self.times[bucket])
        return [Said(items=list(range(10)), version=self.version) for _ in jobs]

    def describe(self) -> dict[str, Any]:
        return {"inputs": [{"name": "history", "datatype": "INT64", "shape": [-1]}], "outputs": []}

    def from_tensors(self, tensors: Any, parameters: Any) -> Ask:
        return Ask(history=tensors["history"].tolist())

    def to_tensors(self, answer: Said) -> dict[str, Any]:
        import numpy as np

        return {"items": np.array(answer.items)}


def serve(times: str, port: int, admin: int, sla: float) -> None:
    """The server's process."""
    from loka.serving import Server

    Server(
        Sleeper(TIMES[times]),
        sla=sla,
        port=port,
        admin_port=admin,
        opener=lambda version: Sleeper(TIMES[times], version),
    ).run()


@contextlib.contextmanager
def server(times: str, *, sla: float = SLA) -> Any:
    """A server in a process of its own; yields (url, admin url, process)."""
    ports = [free_port(), free_port()]
    process = subprocess.Popen(
        [
            sys.executable,
            __file__,
            "--serve",
            times,
            "--ports",
            f"{ports[0]},{ports[1]}",
            "--sla",
            str(sla),
            "--out",
            "-",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    url = f"http://127.0.0.1:{ports[0]}"
    try:
        wait_ready(ports[0])
        yield url, f"http://127.0.0.1:{ports[1]}", process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def scheduling() -> str:
    """How the kernel schedules this process and those it starts."""
    policy = os.sched_getscheduler(0)
    if policy in (os.SCHED_RR, os.SCHED_FIFO):
        return f"real time, priority {os.sched_getparam(0).sched_priority}"
    return f"ordinary, nice {os.nice(0)}"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_ready(port: int, seconds: float = 120.0) -> float:
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return time.monotonic() - begin
        time.sleep(0.05)
    raise TimeoutError(f"port {port} is not ready within {seconds} s")


class Line:
    """One connection, one request after the other."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.sock = socket.create_connection((host, int(port)), timeout=30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.sock.makefile("rb")

    def ask(self, body: bytes, kind: str = "application/json") -> int:
        head = f"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.sock.sendall(head.encode() + body)
        status, size = int(self.file.readline()[9:12]), 0
        while (line := self.file.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length"):
                size = int(line.partition(b":")[2])
        self.file.read(size)
        return status

    def time(self, body: bytes, count: int, kind: str = "application/json") -> list[float]:
        """Round trips in seconds; one that was shed or dropped, on a machine that is busy otherwise, counts too."""
        out = []
        for _ in range(count):
            begin = time.perf_counter()
            status = self.ask(body, kind)
            out.append(time.perf_counter() - begin)
            if status not in (200, 429, 503):
                raise ValueError(f"status {status}")
        return out


def memory(process: Any) -> float:
    """Resident megabytes of a process."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def case_front(seconds: float) -> dict[str, Any]:
    """The engine answers at once, so the round trip is the front's; the same traffic at 100 requests a second beside it."""
    from loka.serving import Job

    model, body = Sleeper(TIMES["none"]), msgspec.json.encode({"history": list(range(50))})
    job = Job(Ask(history=[1]), 1, 1, 0)
    direct = []
    for _ in range(2000):
        begin = time.perf_counter()
        model.run((8, 512), [job])
        direct.append(time.perf_counter() - begin)
    with server("none") as (url, _, _process):
        line = Line(url)
        line.time(body, 200)
        used = cpu_seconds(_process)
        trips = line.time(body, int(400 * seconds))
        used = cpu_seconds(_process) - used
        open_loop = asyncio.run(send(url, Traffic(rate=100, seconds=seconds, sla=SLA), lambda n, s: body))
        server_side = [one.done - one.left for one in open_loop if one.code == 200]
    added = [t - statistics.median(direct) for t in trips]
    return {
        "direct_ms": quantiles(direct),
        "added_ms": quantiles(added),
        "server_cpu_us_per_request": round(1e6 * used / len(trips), 1),
        "requests_per_second_one_connection": round(len(trips) / sum(trips), 1),
        "open_loop_100_per_second_ms": quantiles(server_side),
    }


def cpu_seconds(process: Any) -> float:
    """Processor time that a process used, user and system."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def case_virtual(seconds: float) -> dict[str, Any]:
    """Poisson traffic against the scheduler with the recorded times, 2 % jitter and one batch in a hundred 30 % slower."""
    import heapq

    from loka.serving import BatchTimes, Entry, Policy, Scheduler

    def play(times: str, load: float) -> tuple[float, float]:
        cost = {(n, 512): ms / 1e3 for n, ms in TIMES[times].items()}
        source, learned = random.Random(5), BatchTimes()

        def draw(bucket: tuple[int, int]) -> float:
            return cost[bucket] * source.gauss(1, 0.02) * (1.3 if source.random() < 0.01 else 1.0)

        for bucket in cost:
            for _ in range(5):
                learned.learn(bucket, draw(bucket))
        scheduler = Scheduler(cost, policy=Policy(sla=SLA), times=learned)
        due = Traffic(rate=load * offered(times), seconds=60, sla=SLA, seed=3).due()
        events: list[tuple[float, int, str]] = [(at, n, "arrive") for n, at in enumerate(due)]
        good = late = 0
        while events:
            now, _, what = heapq.heappop(events)
            if what == "arrive":
                scheduler.offer(None, now=now, length=512)
            else:
                assert scheduler.running is not None
                for entry in scheduler.running.entries:
                    assert isinstance(entry, Entry)
                    good, late = good + (now <= entry.deadline), late + (now > entry.deadline)
                scheduler.finish(now=now)
            batch, _ = scheduler.start(now=now)
            if batch is not None:
                heapq.heappush(events, (now + draw(batch.bucket), -1, "end"))
        return good / 60, late / max(1, good + late)

    out: dict[str, Any] = {}
    for times in ("fp8", "bf16"):
        rows = {load: play(times, load) for load in (0.5, 1.0, 2.0, 5.0)}
        out[times] = {
            f"{load:g}x": {"goodput": round(g, 1), "late_share": round(share, 5)} for load, (g, share) in rows.items()
        }
        out[times]["goodput_2x_over_1x"] = round(rows[2.0][0] / rows[1.0][0], 4)
    return out


def offered(times: str) -> float:
    """Answers a second that the largest batch allowed under the SLA sustains."""
    return max(1e3 * n / ms for n, ms in TIMES[times].items() if n == 8 or 2 * ms / 1e3 <= SLA - 0.002)


def case_capacity(seconds: float) -> dict[str, Any]:
    out: dict[str, Any] = {}
    body = msgspec.json.encode({"history": list(range(50))})
    for times in ("fp8", "bf16"):
        capacity = offered(times)
        rows = {}
        for load in (0.5, 1.0, 2.0):
            with server(times) as (url, _, _process):
                traffic = Traffic(rate=load * capacity, seconds=seconds, sla=SLA, seed=int(10 * load))
                found = summarize(url, times, traffic, asyncio.run(send(url, traffic, lambda n, s: body)))
            rows[f"{load:g}x"] = {
                "offered_per_second": round(found.rate, 1), "goodput": round(found.goodput, 1), "late_share": round(found.late_share, 5),
                "codes": found.codes, "latency_ms": found.latency_ms, "shed_ms": found.shed_ms, "send_lag_ms": found.send_lag_ms,
            }  # fmt: skip
        out[times] = {"capacity_per_second": round(capacity, 1), **rows}
        out[times]["goodput_2x_over_1x"] = round(rows["2x"]["goodput"] / rows["1x"]["goodput"], 4)
    out["fp8_over_bf16_at_2x"] = round(out["fp8"]["2x"]["goodput"] / out["bf16"]["2x"]["goodput"], 3)
    return out


def case_formats(seconds: float) -> dict[str, Any]:
    source = random.Random(0)
    items = [source.randrange(10**6) for _ in range(3000)]
    codes = bytes(source.randrange(256) for _ in range(3000 * 3 * 2))
    import base64

    forms = {
        "json items": (msgspec.json.encode({"history": items}), "application/json"),
        "json base64 codes": (msgspec.json.encode({"codes": base64.b64encode(codes).decode()}), "application/json"),
        "msgpack items": (msgspec.msgpack.encode({"history": items}), "application/msgpack"),
        "msgpack codes": (msgspec.msgpack.encode({"codes": codes}), "application/msgpack"),
    }
    out = {}
    with server("none") as (url, _, _process):
        line = Line(url)
        for name, (body, kind) in forms.items():
            line.time(body, 50, kind)
            out[name] = {"bytes": len(body), "round_trip_ms": quantiles(line.time(body, int(100 * seconds), kind))}
    return out


def case_attacks(seconds: float) -> dict[str, Any]:
    out: dict[str, Any] = {}
    body = msgspec.json.encode({"history": [1, 2, 3]})
    with server("fp8") as (url, _, process):
        line = Line(url)
        line.time(body, 50)
        before = memory(process)
        host, port = url.removeprefix("http://").split(":")

        def dial() -> socket.socket:
            return socket.create_connection((host, int(port)), timeout=15)

        slow = [dial() for _ in range(300)]
        for sock in slow:
            sock.sendall(b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\n")
        out["asked_during_slow_heads_ms"] = quantiles(line.time(body, 50))
        answers = [sock.recv(12) for sock in slow]  # each waits until the server gives up on it
        out["slow_heads_closed_with"] = sorted({answer.decode() for answer in answers})
        for sock in slow:
            sock.close()
        big = dial()
        big.sendall(
            b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 31457280\r\n\r\n"
        )
        with contextlib.suppress(OSError):
            for _ in range(480):
                big.sendall(b" " * 65536)
        with contextlib.suppress(OSError):
            out["30_mb_body"] = big.recv(12).decode()
        source, codes = random.Random(1), {}
        bad = Line(url)
        for _ in range(10_000):
            junk = source.randbytes(source.randrange(0, 80))
            status = bad.ask(junk)
            codes[status] = codes.get(status, 0) + 1
        out["10000_malformed_bodies"] = {str(k): v for k, v in codes.items()}
        for _ in range(1000):
            sock = dial()
            sock.sendall(
                b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                % len(body)
                + body
            )
            sock.close()
        time.sleep(0.5)
        after = line.time(body, 100)
        out["after_1000_disconnects_ms"] = quantiles(after)
        many = Line(url)
        for _ in range(int(2000 * seconds / 5)):
            many.ask(body)
        out["memory_mb"] = {"before": round(before, 1), "after": round(memory(process), 1)}
    return out


def case_reload(seconds: float) -> dict[str, Any]:
    body = msgspec.json.encode({"history": list(range(50))})
    with server("fp8") as (url, admin, _process):
        rate = 0.4 * offered("fp8")
        quiet = summarize(url, "fp8", Traffic(rate=rate, seconds=seconds, sla=SLA), asyncio.run(send(url, Traffic(rate=rate, seconds=seconds, sla=SLA), lambda n, s: body)))  # fmt: skip
        done: list[int] = []

        def reload() -> None:
            for version in ("2", "3", "4"):
                time.sleep(seconds / 5)
                connection = http.client.HTTPConnection(admin.removeprefix("http://"), timeout=60)
                connection.request(
                    "POST", "/reload", json.dumps({"folder": version}), {"content-type": "application/json"}
                )
                done.append(connection.getresponse().status)

        thread = threading.Thread(target=reload)
        thread.start()
        traffic = Traffic(rate=rate, seconds=seconds, sla=SLA, seed=1)
        busy = summarize(url, "fp8", traffic, asyncio.run(send(url, traffic, lambda n, s: body)))
        thread.join()
    return {
        "reloads": done, "lost": busy.offered - sum(busy.codes.get(code, 0) for code in ("200", "429")), "codes": busy.codes,
        "p99_ms": busy.latency_ms["p99"], "p99_ms_without": quiet.latency_ms["p99"],
        "p99_ratio": round(busy.latency_ms["p99"] / quiet.latency_ms["p99"], 3),
    }  # fmt: skip


def case_memory(seconds: float) -> dict[str, Any]:
    """Requests of ever new users, ids and histories, as fast as four connections carry them, for twice the seconds."""
    with server("none") as (url, _, process):
        end, counts = time.monotonic() + 2 * seconds, [0] * 4

        def work(number: int) -> None:
            line, source = Line(url), random.Random(number)
            while time.monotonic() < end:
                history = [source.randrange(2**40) for _ in range(source.randrange(1, 200))]
                line.ask(msgspec.json.encode({"history": history, "user": f"{number}-{counts[number]}"}))
                counts[number] += 1

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        seen = []
        while any(thread.is_alive() for thread in threads):
            time.sleep(seconds / 5)
            seen.append(memory(process))
        return {"requests": sum(counts), "memory_mb": seen}


def case_peeking(seconds: float) -> dict[str, Any]:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from metrics.test_sequential import PEEKS, TESTS, alarms

    found, naive = alarms(lambda source, n: source.exponential(1.0, n), TESTS, 2400)
    return {
        "experiments": TESTS,
        "looks": PEEKS,
        "false_alarms": found,
        "false_alarms_of_a_fixed_sample_interval": naive,
    }


def case_start(seconds: float, bundle: str = "") -> dict[str, Any]:
    """`loka serve BUNDLE --sla 200ms`, five times: seconds until /v1/recommend answers with a 200."""
    if not bundle:
        raise ValueError("the case `start` needs --bundle, a folder of loka generate --train 100 --out FOLDER")
    times, body = [], json.dumps({"history": [12, 40, 7], "top": 5}).encode()
    for _ in range(5):
        port, begin = free_port(), time.monotonic()
        words = ["serve", bundle, "--sla", "200ms", "--port", str(port), "--admin-port", "-1"]
        path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen([sys.executable, "-m", "loka", *words], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            wait_ready(port)
            line = Line(f"http://127.0.0.1:{port}")
            while line.ask(body) != 200:  # shed: at this moment the machine is too busy for the SLA
                time.sleep(0.05)
            times.append(round(time.monotonic() - begin, 2))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    return {"seconds_to_first_answer": times}


CASES = {
    "front": case_front, "capacity": case_capacity, "formats": case_formats, "attacks": case_attacks, "reload": case_reload,
    "virtual": case_virtual, "peeking": case_peeking, "memory": case_memory, "start": case_start,
}  # fmt: skip


def judge(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars, with what was measured."""
    bars = []

    def bar(name: str, value: float, limit: float, *, most: bool = True) -> None:
        bars.append({"bar": name, "value": value, "limit": limit, "met": value <= limit if most else value >= limit})

    if "front" in found:
        bar("front adds, p50 ms", found["front"]["added_ms"]["p50"], 1.0)
        bar("front adds, p99 ms", found["front"]["added_ms"]["p99"], 3.0)
    if "capacity" in found:
        for times in ("fp8", "bf16"):
            rows = found["capacity"][times]
            bar(
                f"{times}: late among the accepted, worst load",
                max(rows[x]["late_share"] for x in ("0.5x", "1x", "2x")),
                0.005,
            )
            bar(
                f"{times}: goodput at twice the capacity over that at capacity",
                rows["goodput_2x_over_1x"],
                0.95,
                most=False,
            )
            bar(f"{times}: 429 decided, p99 ms at twice the capacity", rows["2x"]["shed_ms"].get("p99", 0.0), 5.0)
    if "virtual" in found:
        for times in ("fp8", "bf16"):
            rows = found["virtual"][times]
            worst = max(rows[x]["late_share"] for x in ("0.5x", "1x", "2x", "5x"))
            bar(f"{times}, virtual clock: late among the accepted, worst load", worst, 0.005)
            bar(
                f"{times}, virtual clock: goodput at twice the capacity over that at capacity",
                rows["goodput_2x_over_1x"],
                0.95,
                most=False,
            )
    if "reload" in found:
        bar("lost in three reloads", found["reload"]["lost"], 0)
        bar("p99 under reloads over without", found["reload"]["p99_ratio"], 2.0)
    if "start" in found:
        bar("seconds from loka serve to the first answer, worst of five", max(found["start"]["seconds_to_first_answer"]), 30.0)  # fmt: skip
    if "memory" in found:
        seen = found["memory"]["memory_mb"]
        bar("memory at the end over that at half, MB", seen[-1] - seen[len(seen) // 2], 2.0)
    if "peeking" in found:
        bar("false alarms over 60 looks", found["peeking"]["false_alarms"], 0.05)
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default=",".join(name for name in CASES if name != "start"))
    parser.add_argument("--bundle", default="", help="of the case `start`")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--serve")
    parser.add_argument("--ports")
    parser.add_argument("--sla", type=float, default=SLA)
    args = parser.parse_args()
    if args.serve:
        port, admin = map(int, args.ports.split(","))
        serve(args.serve, port, admin, args.sla)
        return
    found: dict[str, Any] = {}
    for name in args.only.split(","):
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = CASES[name](args.seconds, *([args.bundle] if name == "start" else []))
        found[name]["load_average"] = os.getloadavg()[0]
    report = {
        "environment": msgspec.to_builtins(capture_environment()), "settings": {"seconds": args.seconds, "sla_ms": 1e3 * SLA},
        "scheduling": scheduling(), "batch_ms": TIMES, "cases": found, "bars": judge(found),
    }  # fmt: skip
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for one in report["bars"]:
        print(
            f"{'met   ' if one['met'] else 'MISSED'} {one['bar']}: {one['value']:g} (limit {one['limit']:g})",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
