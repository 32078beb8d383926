"""`loka serve --on ray` on this machine: what the way through Ray adds, what it keeps under overload, and whether anybody is lost or logged twice while replicas are killed.

    python benchmarks/serving_ray.py --out x.json
    python benchmarks/serving_ray.py --out benchmarks/results/cpu/serving_ray_kills.json --only kills --requests 100000 --every 2 --limit 480

Everything goes through the command line: a server is a process of `loka serve --on ray`, open-loop traffic is `loka load`, events are read by `loka ab --online`. Cases:

    front       requests one after the other to a small ranker, against the same model without a server; the same past HAProxy, and with Ray's Python proxy instead of HAProxy
    capacity    open-loop traffic at half, once and twice the capacity, SLA 50 ms, against a ranker that sleeps as long as an H200's batches were measured to take
    kills       an experiment of two rankers on two replicas, --clients connections, one request after the other each; every --every seconds, once HAProxy has had two replicas
                for two seconds, one gets SIGKILL. Lost is a request without an answer, or with a 5xx; repeated are request ids that stand in the events more than once
    reload      SIGHUP under open-loop traffic: both replicas read new weights; who was lost, p99 during and without
    drain       SIGTERM under traffic: who was accepted and not answered
    ingress     SIGKILL to HAProxy, then to the process that watches over it: seconds until the next answer

A kept connection that is closed before any byte of an answer is opened again and the request sent once more under the same id, as HTTP clients do; these are counted as `reconnected`,
and as lost where nobody listens any more.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from serving import SLA, TIMES, Line, free_port, offered, quantiles, scheduling, wait_ready  # noqa: E402

ROOT = HERE.parent
FEATURES = {"price": [1.0, 2.0, 3.0, 4.0], "user": 7, "item": [1, 2, 3, 4]}
STATS = 8404  # Ray's port of HAProxy's statistics


def make_ranker(folder: Path, *, seed: int = 0, times: str | None = None) -> str:
    """A tiny Wukong, or a ranker that sleeps."""
    import torch

    from loka.data.schema import Field, Schema
    from loka.models import build_ranker
    from loka.serving import save_ranker

    torch.manual_seed(seed)
    schema = Schema(("price",), (Field("user", 1000), Field("item", 1000)), (), ("click",))
    if times is None:
        save_ranker(build_ranker(schema, "wukong", "tiny"), schema, folder, family="wukong", size="tiny")
    else:
        save_ranker(sleeper(schema, times), schema, folder, factory="serving_ray:sleeper", options={"times": times})
    return str(folder)


def sleeper(schema: Any, times: str) -> Any:
    """A module whose forward takes an engine's time: the factory that `loka serve --factory` is told."""
    import torch

    class Sleeper(torch.nn.Module):
        def forward(self, batch: Any) -> Any:
            rows = batch.dense.shape[0]
            time.sleep(TIMES[times][rows] / 1e3)
            return torch.zeros(rows, 1)

    return Sleeper()


@contextlib.contextmanager
def served(*words: str, environment: dict[str, str] | None = None) -> Iterator[tuple[int, Any]]:
    """`loka serve ... --on ray` in a process of its own; yields (port, process)."""
    port = free_port()
    path = os.pathsep.join([str(HERE), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "loka", "serve", *words, "--on", "ray", "--port", str(port)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environment or {})},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_ready(port)
        time.sleep(2)  # HAProxy takes up the replicas one after the other
        yield port, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(120)


def loka(*words: str) -> Any:
    """The JSON that a command prints; its exit status is an outcome, not an error."""
    found = subprocess.run([sys.executable, "-m", "loka", *words, "--json"], env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.PIPE, check=False)  # fmt: skip
    return json.loads(found.stdout)


def processes(word: bytes) -> list[int]:
    """Processes that this one started, directly or not, whose command line has the word."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and word in (entry / "cmdline").read_bytes() and descends(int(entry.name)):
                found.append(int(entry.name))
    return found


def descends(pid: int) -> bool:
    while pid > 1 and pid != os.getpid():
        pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return pid == os.getpid()


def replicas_up() -> int:
    """How many replicas HAProxy sends requests to."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{STATS}/stats;csv", timeout=5) as page:
        lines = [line.split(",") for line in page.read().decode().splitlines()]
        status = lines[0].index("status")
        return sum(
            len(line) > 1 and line[1].startswith("SERVE_REPLICA") and line[status].startswith("UP") for line in lines
        )
    return 0


def replica_port() -> int:
    """Where the first replica listens."""
    for port in range(30000, 31000):
        with contextlib.suppress(OSError):
            wait_ready(port, 0.01)
            return port
    raise ValueError("no replica listens on 30000 to 31000")


def time_direct(folder: str, count: int = 500) -> list[float]:
    """The same request without any server."""
    from loka.serving import RankRequest, open_model

    model = open_model(folder, rows=(8, 32))
    model.warm()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        list(model.run((8, 0), [model.read(RankRequest(features=FEATURES))]))
        times.append(time.perf_counter() - begin)
    return times


def case_front(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Rounds of all ways in turn, so that a busy moment of the machine falls on each of them."""
    place, body = make_ranker(folder / "ranker"), json.dumps({"features": FEATURES}).encode()
    direct: list[float] = []
    out: dict[str, Any] = {}
    for name, environment in (("haproxy", None), ("python proxy", {"RAY_SERVE_ENABLE_HA_PROXY": "0"})):
        with served(place, "--rows", "8,32", "--sla", "2s", environment=environment) as (port, _):
            ways = {name: port} | ({"past haproxy": replica_port()} if environment is None else {})
            trips: dict[str, list[float]] = {way: [] for way in ways}
            lines = {way: Line(f"http://127.0.0.1:{at}") for way, at in ways.items()}
            for line in lines.values():
                line.time(body, 300)
            for _ in range(a.rounds):
                direct += time_direct(place)
                for way, line in lines.items():
                    trips[way] += line.time(body, int(100 * a.seconds / a.rounds))
        out |= {way: {"round_trip_ms": quantiles(times)} for way, times in trips.items()}
    middle = statistics.median(direct)
    for found in out.values():
        found["added_ms"] = {k: round(v - 1e3 * middle, 3) for k, v in found["round_trip_ms"].items()}
    return {"direct_ms": quantiles(direct), **out}


def case_capacity(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for times in ("fp8", "bf16"):
        place, capacity = make_ranker(folder / times, times=times), offered(times)
        sizes, rows = ",".join(map(str, TIMES[times])), dict[str, Any]()
        words = (place, "--factory", "serving_ray:sleeper", "--rows", sizes, "--sla", f"{SLA}s")
        with served(*words) as (port, _):
            for load in (0.5, 1.0, 2.0):
                found = loka(
                    "load", f"http://127.0.0.1:{port}", "--model", times, "--rate", f"{load * capacity:.1f}", "--seconds", f"{a.seconds:g}",
                    "--sla", f"{SLA}s", "--rows", "1", "--seed", str(int(10 * load)),
                )  # fmt: skip
                late = found["late"] / max(1, found["late"] + found["good"])
                names = ("rate", "goodput", "codes", "latency_ms", "shed_ms", "send_lag_ms")
                rows[f"{load:g}x"] = {name: found[name] for name in names} | {"late_share": round(late, 5)}
        ratio = rows["2x"]["goodput"] / rows["1x"]["goodput"]
        out[times] = {"capacity_per_second": round(capacity, 1), **rows, "goodput_2x_over_1x": round(ratio, 4)}
    return out


class Clients:
    """Connections that ask one request after the other, and what they got."""

    def __init__(self, port: int, count: int) -> None:
        self.port, self.stopped, self.lock = port, threading.Event(), threading.Lock()
        self.codes: Counter[str] = Counter()
        self.times: list[float] = []
        self.lost: list[str] = []
        self.answered: set[str] = set()
        self.said: list[str] = []  # of the servers, with a 5xx
        self.reconnected = 0
        self.threads = [threading.Thread(target=self.work, args=(n,), daemon=True) for n in range(count)]
        for thread in self.threads:
            thread.start()

    def ask(self, connection: Any, name: str) -> tuple[Any, int]:
        body = json.dumps({"features": FEATURES, "user": name}).encode()
        headers = {"content-type": "application/json", "x-request-id": name, "x-loka-simulated": "1"}
        connection.request("POST", "/v1/recommend", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status >= 500 and len(self.said) < 5:
            self.said.append(f"{name}: {answer.status} {dict(answer.getheaders())} {text[:200]!r}")
        if answer.will_close:
            connection.close()
            connection = None
        return connection, answer.status

    def work(self, number: int) -> None:
        connection, count = None, 0
        while not self.stopped.is_set():
            count += 1
            name, begin, status = f"{number}-{count}", time.perf_counter(), "0"
            for attempt in range(2):
                kept = connection is not None
                try:
                    connection = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
                    connection, code = self.ask(connection, name)
                    status = str(code)
                    break
                except (OSError, http.client.HTTPException) as error:
                    connection, status = None, type(error).__name__
                    if attempt and status == "ConnectionRefusedError":
                        status = "cut"  # it was under way when the server ended
                    if not kept or not isinstance(error, http.client.RemoteDisconnected | ConnectionResetError):
                        break
                    self.reconnected += 1
            with self.lock:
                self.codes[status] += 1
                self.times.append(time.perf_counter() - begin)
                if status == "200":
                    self.answered.add(name)
                elif not status.startswith("4"):
                    self.lost.append(f"{name}: {status}")
            if status == "ConnectionRefusedError":
                time.sleep(0.05)

    def stop(self) -> dict[str, Any]:
        self.stopped.set()
        for thread in self.threads:
            thread.join(35)
        return {
            "requests": len(self.times), "codes": dict(self.codes), "reconnected": self.reconnected, "lost": len(self.lost),
            "lost_examples": self.lost[:5], "said": self.said, "latency_ms": quantiles(self.times),
        }  # fmt: skip


def case_kills(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    places = [make_ranker(folder / name, seed=seed) for seed, name in enumerate("ab")]
    events = folder / "events"
    words = (
        "--rows",
        "8,32",
        "--sla",
        "2s",
        "--replicas",
        "2",
        "--split",
        "50,50",
        "--salt",
        "kills",
        "--events",
        str(events),
    )
    with served(*places, *words) as (port, _):
        while replicas_up() < 2:
            time.sleep(0.5)
        begin, clients, kills = time.monotonic(), Clients(port, a.clients), 0
        while len(clients.times) < a.requests and time.monotonic() - begin < a.limit:
            time.sleep(a.every)
            if replicas_up() < 2:  # one that still warms up is no replica to fall back on
                continue
            time.sleep(2)  # until the HAProxy from before the new replica, which knows only the other one, has let go
            if len(alive := processes(b"ray::ServeReplica:loka")) >= 2:
                os.kill(random.choice(alive), signal.SIGKILL)
                kills += 1
        took, found = time.monotonic() - begin, clients.stop()
    return {**found, "kills": kills, "seconds": round(took, 1), **count_events(events, clients.answered)}


def count_events(folder: Path, answered: set[str]) -> dict[str, Any]:
    """Exposures as they stand in the files, and as `loka ab --online` counts them."""
    lines = [line for path in folder.glob("events-*.jsonl") for line in path.read_bytes().splitlines()]
    ids = Counter(json.loads(line)["request_id"] for line in lines)
    read = loka("ab", "--online", str(folder))
    return {
        "event_files": len(list(folder.glob("events-*.jsonl"))), "exposures": len(lines), "repeated_in_files": sum(n - 1 for n in ids.values()),
        "answered_without_exposure": len(answered - set(ids)), "counted_by_ab": sum(read["requests"]), "duplicates_left_out_by_ab": read["duplicates"],
    }  # fmt: skip


def case_reload(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    place = make_ranker(folder / "ranker")
    with served(place, "--rows", "8,32", "--sla", "2s", "--replicas", "2") as (port, process):
        words = ("load", f"http://127.0.0.1:{port}", "--model", "ranker", "--rate", "50", "--seconds", f"{a.seconds:g}", "--rows", "4", "--sla", "2s")  # fmt: skip
        quiet, versions = loka(*words), [find_version(port)]

        def reload() -> None:
            for seed in (1, 2, 3):
                time.sleep(a.seconds / 4)
                make_ranker(folder / "ranker", seed=seed)
                process.send_signal(signal.SIGHUP)

        thread = threading.Thread(target=reload)
        thread.start()
        busy = loka(*words, "--seed", "1")
        thread.join()
        end = time.monotonic() + 60
        while len(set(versions[1:])) != 1 and time.monotonic() < end:  # both replicas are asked, each connection anew
            time.sleep(2)
            versions = [versions[0], *(find_version(port) for _ in range(8))]
    lost = busy["offered"] - sum(busy["codes"].get(code, 0) for code in ("200", "429"))
    p99 = [found["latency_ms"]["p99"] for found in (busy, quiet)]
    return {
        "lost": lost, "codes": busy["codes"], "version_changed": versions[0] not in versions[1:], "p99_ms": p99[0], "p99_ms_without": p99[1],
        "p99_ratio": round(p99[0] / p99[1], 3),
    }  # fmt: skip


def find_version(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/ranker", timeout=10) as page:
        return str(json.loads(page.read())["versions"][0])


def case_drain(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Connections that are refused were never accepted; every other failure is a request that got lost."""
    place = make_ranker(folder / "ranker")
    with served(place, "--rows", "8,32", "--sla", "2s", "--replicas", "2") as (port, process):
        clients = Clients(port, a.clients)
        time.sleep(a.seconds / 2)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        took, found = time.monotonic() - begin, clients.stop()
    refused = found["codes"].get("ConnectionRefusedError", 0)
    return {
        **found,
        "refused_afterwards": refused,
        "lost": found["lost"] - refused,
        "lost_examples": [],
        "seconds_to_end": round(took, 1),
    }


def case_ingress(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    place, out = make_ranker(folder / "ranker"), dict[str, Any]()
    with served(place, "--rows", "8,32", "--sla", "2s") as (port, _):
        for name, word in (("haproxy", b"bin/haproxy"), ("its manager", b"ray::HAProxyManager")):
            victims = processes(word)
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            begin = time.monotonic()
            while time.monotonic() - begin < 120:
                time.sleep(0.1)
                with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                    Line(f"http://127.0.0.1:{port}").time(json.dumps({"features": FEATURES}).encode(), 1)
                    break
            out[name] = {"killed": len(victims), "seconds_until_an_answer": round(time.monotonic() - begin, 1)}
    return out


CASES = {
    "front": case_front, "capacity": case_capacity, "kills": case_kills, "reload": case_reload, "drain": case_drain, "ingress": case_ingress,
}  # fmt: skip


def judge(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars, with what was measured."""
    bars = []

    def bar(name: str, value: float, limit: float, *, most: bool = True) -> None:
        bars.append({"bar": name, "value": value, "limit": limit, "met": value <= limit if most else value >= limit})

    if "front" in found:
        bar("Ray adds, p50 ms", found["front"]["haproxy"]["added_ms"]["p50"], 2.5)
        bar("Ray adds, p99 ms", found["front"]["haproxy"]["added_ms"]["p99"], 6.0)
    for times in ("fp8", "bf16") if "capacity" in found else ():
        rows = found["capacity"][times]
        late = max(rows[x]["late_share"] for x in ("0.5x", "1x", "2x"))
        shed = rows["2x"]["shed_ms"].get("p99", 0.0)
        bar(f"{times}: late among the accepted, worst load", late, 0.01)
        bar(f"{times}: goodput at twice the capacity over that at capacity", rows["goodput_2x_over_1x"], 0.95, most=False)  # fmt: skip
        bar(f"{times}: 429 decided, p99 ms at twice the capacity", shed, 5.0)
    if "kills" in found:
        bar("requests with replicas killed", found["kills"]["requests"], 100_000, most=False)
        bar("lost", found["kills"]["lost"], 0)
        bar("logged twice", found["kills"]["repeated_in_files"], 0)
    if "reload" in found:
        bar("lost in three reloads", found["reload"]["lost"], 0)
        bar("p99 under reloads over without", found["reload"]["p99_ratio"], 2.0)
    if "drain" in found:
        bar("lost in a drain", found["drain"]["lost"], 0)
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=100_000, help="of kills")
    parser.add_argument("--limit", type=float, default=550.0, help="seconds of kills at most")
    a = parser.parse_args()
    from loka.records import capture_environment

    found: dict[str, Any] = {}
    for name in a.only.split(","):
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            before = os.getloadavg()[0]
            found[name] = CASES[name](a, Path(folder))
        found[name]["load_average"] = {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)}
        report = {
            "environment": msgspec.to_builtins(capture_environment()), "scheduling": scheduling(), "cases": found, "bars": judge(found),
        }  # fmt: skip
        a.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for one in report["bars"]:
        print(
            f"{'met   ' if one['met'] else 'MISSED'} {one['bar']}: {one['value']:g} (limit {one['limit']:g})",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
