"""Serve on Ray Serve: replicas behind HAProxy, on one machine or several.

A replica is one service with its own scheduler, engines and front. Ray starts it, checks its health and replaces it;
HAProxy balances requests and retries one whose replica died before it answered. Batching is done by our scheduler,
because Ray's own batching queues requests past their deadline. A replica is ready only when every bucket is warm, so a
rolling update never sends a request to a cold engine.

    app = build_app(Settings(folders={"onerec": "/models/onerec"}, sla=0.05), replicas=2)
    serve.run(app)                                                        # or a deployment file, docs/guides/serving.md

Anyone who can reach a Ray cluster can run code on it: keep it on a private network, with token authentication.
HAProxy's metrics and statistics ports listen on all interfaces.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loka.serving.call import Limits
from loka.serving.experiment import Split, check_arms, open_log
from loka.serving.front import Front
from loka.serving.listener import is_local
from loka.serving.opening import open_model
from loka.serving.queues import Policy
from loka.serving.ray_replica import Replica, reload_replicas
from loka.serving.service import Service
from loka.serving.tokens import Tokens

log = logging.getLogger("loka.serving")
NAME = "loka"
# Bytes of a request's body and head. HAProxy can retry only a request that fits its buffer, and copies the whole buffer
# for every request: at 576 KiB that takes a millisecond.
BODY, HEAD = 112 * 1024, 16 * 1024
# HAProxy retries a request if its replica is gone or died without sending a byte, but only if it had read the whole
# request before. So it buffers requests, and waits at most this long for head and body.
RETRY = ("conn-failure empty-response", "option http-buffer-request", "timeout http-request 10s")
# Read by Ray's processes when they start. Variables that are already set are kept.
ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # the Python proxy adds milliseconds and loses requests of killed replicas
    "RAY_SERVE_HAPROXY_RETRY_ON": "\n    ".join(RETRY),  # Ray writes it verbatim into HAProxy's defaults
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BODY + HEAD),
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # a log line per request, read in Python; HAProxy's exporter stays on
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "10",  # silence in the middle of a request; Ray's default is an hour
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # the front only awaits; saves two thread switches per message
    "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # HAProxy drops a replica within one; Ray's default is 30
    "RAY_worker_niceness": "0",  # Ray's default is 15, so that any other process on the machine would come first
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every replica serves. Paths must be readable on every machine.

    Args:
        folders: arm -> folder of its model; several only for an experiment.
        sla: seconds from arrival to answer.
        options: keyword arguments of `loka.serving.open_model`, for every arm.
        token_file: file of bearer tokens.
        shares, salt: split of the users over the arms (`loka.serving.Split`).
        events: folder of the experiment's events.
        shadow: also run the second arm, without returning its answers.
        log: "all", "errors" or "none".
        body: largest request body, in bytes. More than the default needs a larger RAY_SERVE_HAPROXY_TUNE_BUFSIZE, which
            `run` sets, and slows down every request.
    """

    folders: dict[str, str]
    sla: float
    options: dict[str, Any] = field(default_factory=dict)
    token_file: str | None = None
    shares: tuple[float, ...] | None = None
    salt: str = ""
    events: str | None = None
    shadow: bool = False
    log: str = "errors"
    body: int = BODY

    def __post_init__(self) -> None:
        if not self.folders:
            raise ValueError("folders is empty: expected arm -> folder of a model")
        if self.log not in ("all", "errors", "none"):
            raise ValueError(f"log is {self.log!r}: expected all, errors or none")
        check_arms(tuple(self.folders), split=self.split, shadow=self.shadow)
        if len(self.folders) > 1 and self.events is None:
            raise ValueError("an experiment needs a folder for its events; hint: --events DIR")

    @property
    def split(self) -> Split | None:
        """The split of the experiment, if there is one."""
        return None if self.shares is None else Split(tuple(self.folders), tuple(self.shares), self.salt)

    def open(self) -> Front:
        """Open the models, without warming them, and return their front."""
        split, options = self.split, self.options
        service = Service(
            {arm: open_model(folder, name=arm, **options) for arm, folder in self.folders.items()},
            policy=Policy(sla=self.sla, reserve=min(0.005, self.sla / 10)),  # HAProxy adds latency
            opener=lambda folder: open_model(folder, **options),
            split=split,
            events=open_log(self.events, tuple(self.folders), split),
            shadow=self.shadow,
        )
        tokens = None if self.token_file is None else Tokens(self.token_file)
        return Front(service, tokens=tokens, limits=Limits(body=self.body), manage=False, verbose=self.log == "all")


def build_app(settings: Settings, *, replicas: int = 1, gpus: float = 0.0) -> Any:
    """Build a Ray Serve application.

    Args:
        settings: what every replica serves.
        replicas: number of processes.
        gpus: GPUs of each replica; default: one for models on cuda, else none.

    Returns:
        The application, for `ray.serve.run`.
    """
    serve = need_ray()
    if replicas < 1:
        raise ValueError(f"replicas={replicas}: expected at least one")
    takes = gpus or (1.0 if str(settings.options.get("device", "cpu")).startswith("cuda") else 0.0)
    deployment = serve.deployment(
        name=NAME,
        num_replicas=replicas,
        max_ongoing_requests=4096,  # our scheduler does the admission
        user_config={"generation": 0},
        ray_actor_options={"num_gpus": takes, "num_cpus": 1},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=10 * settings.sla + 5,
        logging_config={"enable_access_log": False},  # logging a line costs more than the request itself
    )(serve.ingress()(Replica))
    return deployment.bind(settings)


def from_file(args: dict[str, Any]) -> Any:
    """Build the application of a deployment file, whose `args` are those of `Settings`, `replicas` and `gpus`."""
    rest = dict(args)
    more = {name: rest.pop(name) for name in ("replicas", "gpus") if name in rest}
    return build_app(Settings(**rest), **more)


def run(
    settings: Settings,
    *,
    host: str,
    port: int,
    replicas: int,
    wait: bool = True,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Start Ray on this machine, or join the cluster of RAY_ADDRESS, and serve until SIGTERM or Ctrl-C. SIGHUP reloads.

    Args:
        settings: what every replica serves.
        host, port: address of the ingress; one that other machines can reach needs tokens.
        replicas: number of processes.
        wait: serve until stopped; otherwise return once the replicas are ready.
        ready: called when every replica is ready.
    """
    if not is_local(host) and settings.token_file is None:
        raise ValueError(f"host {host} can be reached by others: that needs a token; hint: --token-file FILE")
    for name, value in (ENVIRONMENT | {"RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(settings.body + HEAD)}).items():
        os.environ.setdefault(name, value)
    serve = need_ray()
    import ray

    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=True, configure_logging=False)
    serve.start(http_options={"host": host, "port": port})
    handle = serve.run(build_app(settings, replicas=replicas), name=NAME, route_prefix="/")
    ready()
    if not wait:
        return
    heard: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: heard.append(number))
    reloads, reloader = 0, ThreadPoolExecutor(1)

    def reload(number: int) -> None:
        try:
            reload_replicas(handle, replicas, stop=lambda: number != reloads)  # a later reload starts over
        except Exception:
            log.exception("reload failed")

    while not {signal.SIGTERM, signal.SIGINT} & set(heard):
        if signal.SIGHUP in heard:
            heard.remove(signal.SIGHUP)  # only this one: a SIGTERM may have arrived since
            reloads += 1
            reloader.submit(reload, reloads)
        time.sleep(0.2)
    reloads += 1
    reloader.shutdown(wait=False, cancel_futures=True)
    drain_ingress(10 * settings.sla + 5)
    serve.shutdown()
    ray.shutdown()


def drain_ingress(seconds: float) -> None:
    """Let HAProxy on every machine finish its requests and accept no new ones; Ray would kill it in mid-request."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    stop = ray.remote(num_cpus=0)(stop_haproxy)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    told = [
        stop.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(node, seconds)
        for node in nodes
    ]
    ray.wait(told, num_returns=len(told), timeout=seconds + 5)


def stop_haproxy(node: str, seconds: float) -> None:
    """Tell HAProxy of this Ray node to finish and exit, and wait for it. Runs on that machine.

    It is found by its command line, whose configuration path contains the name of the node.
    """
    end = time.monotonic() + seconds

    def find() -> list[int]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (place / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"haproxy") and any(node.encode() in word for word in words):
                    found.append(int(place.name))
        return found

    for pid in find():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
    while find() and time.monotonic() < end:
        time.sleep(0.05)


def need_ray() -> Any:
    """Import Ray Serve, or raise ValueError with the install command."""
    try:
        from ray import serve
    except ImportError as error:
        raise ValueError("this needs Ray Serve; hint: pip install 'loka[ray]'") from error
    return serve
