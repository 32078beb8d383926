"""The server on Ray Serve behind HAProxy, with replicas killed while requests come: what the ingress adds, and whether anybody is lost.

    python benchmarks/serving_ray.py --out benchmarks/results/cpu/serving_ray.json --seconds 60 --every 12

Two replicas of a small ranker on this machine. Requests come from --clients connections, one after the other each; every --every seconds one replica gets SIGKILL, if another is ready.
An answer is a status; lost is a request that got none, or a 5xx. A kept connection that is closed before any byte of an answer is opened again and the request sent once more under the same
id, as HTTP clients do: HAProxy closes idle ones when it takes up a new replica. These are counted as `reconnected`. At the end HAProxy itself is killed, and then the process that watches over it.
"""

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent


def make_folder(folder: Path) -> Path:
    import torch

    from loka.data.schema import Field, Schema
    from loka.models import build_ranker
    from loka.serving import save_ranker

    torch.manual_seed(0)
    schema = Schema(("price",), (Field("user", 1000), Field("item", 1000)), (), ("click",))
    save_ranker(build_ranker(schema, "wukong", "tiny"), schema, folder, family="wukong", size="tiny")
    return folder


def processes(word: bytes) -> list[int]:
    """Processes that this one started, directly or not, whose command line has the word."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and word in (entry / "cmdline").read_bytes() and descends(int(entry.name)):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def descends(pid: int) -> bool:
    while pid > 1 and pid != os.getpid():
        pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return pid == os.getpid()


def replicas() -> list[int]:
    """Process ids of this Ray's replicas."""
    return processes(b"ray::ServeReplica:loka")


def kill_ingress(port: int) -> dict[str, Any]:
    """SIGKILL to HAProxy, and to the process that watches over it: seconds until the next answer."""
    out: dict[str, Any] = {}
    body = json.dumps({"features": {"price": 1.0, "user": 7, "item": 1}}).encode()
    for name, word in (("haproxy", b"bin/haproxy"), ("its manager", b"ray::HAProxyManager")):
        victims = processes(word)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        while time.monotonic() - begin < 120:
            time.sleep(0.1)
            try:
                connection = dial(port)
                connection.request("POST", "/v1/recommend", body, {"content-type": "application/json"})
                if connection.getresponse().status == 200:
                    break
            except (OSError, http.client.HTTPException):
                continue
        out[name] = {"killed": len(victims), "seconds_until_an_answer": round(time.monotonic() - begin, 1)}
    return out


def both_run() -> bool:
    """Whether the controller says that two replicas take requests."""
    from ray import serve

    states = serve.status().applications["loka"].deployments["loka"].replica_states
    return int(states.get("RUNNING", 0)) >= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=12.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=100_000, help="stop after so many")
    parser.add_argument("--port", type=int, default=8230)
    a = parser.parse_args()
    from loka.records import capture_environment
    from loka.serving.ray_app import run

    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = str(make_folder(Path(folder) / "ranker"))
        direct = time_direct(place)
        run(
            {"folder": place, "rows": (8, 32)},
            sla=2.0, host="127.0.0.1", port=a.port, token_file=None, replicas=2, wait=False,
        )  # fmt: skip
        started = time.monotonic() - begin
        found = measure(a)
        found["ingress killed"] = kill_ingress(a.port)
        from ray import serve

        serve.shutdown()
    report = {
        "environment": msgspec.to_builtins(capture_environment()), "seconds_to_ready": round(started, 1),
        "load_average": os.getloadavg()[0], "direct_ms": direct, **found,
    }  # fmt: skip
    a.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


FEATURES = {"price": [1.0, 2.0, 3.0, 4.0], "user": 7, "item": [1, 2, 3, 4]}


def time_direct(folder: str) -> dict[str, float]:
    """The same request without any server."""
    from loka.serving import RankRequest, open_model

    model = open_model(folder, rows=(8, 32))
    model.warm()
    times = []
    for _ in range(500):
        begin = time.perf_counter()
        model.run((8, 0), [model.read(RankRequest(features=FEATURES))])
        times.append(1e3 * (time.perf_counter() - begin))
    return {"p50": round(statistics.median(times), 3), "p99": round(sorted(times)[494], 3)}


def dial(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=30)


def measure(a: argparse.Namespace) -> dict[str, Any]:
    body = json.dumps({"features": FEATURES}).encode()
    stop, codes, times, lost = threading.Event(), {}, [], []
    lock = threading.Lock()

    again = [0]

    def ask_once(connection: Any, name: str) -> tuple[Any, int, bool]:
        headers = {"content-type": "application/json", "x-request-id": name}
        connection.request("POST", "/v1/recommend", body, headers)
        answer = connection.getresponse()
        answer.read()
        good = answer.status < 500 and name in (answer.getheader("x-request-id") or "")
        if answer.will_close:
            connection.close()
            connection = None
        return connection, answer.status, good

    def ask(number: int) -> None:
        connection, count = None, 0
        while not stop.is_set():
            count += 1
            name, begin, status, good = f"{number}-{count}", time.perf_counter(), 0, False
            for _ in range(2):
                kept, connection = connection is not None, connection or dial(a.port)
                try:
                    connection, status, good = ask_once(connection, name)
                    break
                except (OSError, http.client.HTTPException) as error:
                    connection, status = None, type(error).__name__
                    if not kept or not isinstance(error, http.client.RemoteDisconnected | ConnectionResetError):
                        break
                    again[0] += 1
            with lock:
                codes[str(status)] = codes.get(str(status), 0) + 1
                times.append(time.perf_counter() - begin)
                if not good:
                    lost.append(f"{name}: {status}")

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(a.clients)]
    for thread in threads:
        thread.start()
    kills, end, known = 0, time.monotonic() + a.seconds, set(replicas())
    while time.monotonic() < end and len(times) < a.requests:
        time.sleep(a.every)
        while not both_run() and time.monotonic() < end:  # a process that still warms up is no replica to fall back on
            time.sleep(0.5)
        time.sleep(2.0)  # HAProxy takes a new replica up a moment after the controller
        alive = replicas()
        if len(alive) >= 2 and time.monotonic() < end:
            os.kill(random.choice(alive), signal.SIGKILL)
            kills += 1
            known |= set(alive)
    stop.set()
    took = time.monotonic() - (end - a.seconds)
    for thread in threads:
        thread.join(35)
    ordered = sorted(times)
    return {
        "requests": len(times), "codes": codes, "kills": kills, "reconnected": again[0], "lost": len(lost), "lost_examples": lost[:5],
        "replica_processes_seen": len(known | set(replicas())), "requests_per_second": round(len(times) / took, 1),
        "latency_ms": {"p50": round(1e3 * statistics.median(times), 3), "p99": round(1e3 * ordered[int(0.99 * len(ordered))], 3), "max": round(1e3 * ordered[-1], 1)},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
