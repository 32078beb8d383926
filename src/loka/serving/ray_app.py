"""The same core on Ray Serve: replicas behind HAProxy, on one machine or several.

A replica is one service with its own scheduler, engines and front; Ray starts it, checks its health and replaces it, and HAProxy spreads requests and sends one again whose replica died before it answered.
Batching stays ours: Ray's own batching queues past the deadline. A replica counts as ready only when every bucket is warm, so a rolling update never sends a request to a cold engine.

    app = build_app(Settings(folders={"onerec": "/models/onerec"}, sla=0.05), replicas=2)
    serve.run(app)                                                        # or a deployment file, docs/guides/serving.md

Whoever reaches a Ray cluster can run code on it: keep it on a network of its own, with token authentication. HAProxy's metrics and statistics ports listen on every interface.
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
# Bytes of a request. HAProxy can only send again what its buffer holds whole, and for that copies the whole buffer with every request: at 576 KiB a millisecond.
BODY, HEAD = 112 * 1024, 16 * 1024
# A request is sent again whose replica is gone, or went without a word, but only if HAProxy had all of it before it sent the first byte: so it waits for the body, and for neither head nor body longer than this.
RETRY = ("conn-failure empty-response", "option http-buffer-request", "timeout http-request 10s")
# Read by Ray's processes when they start; what is set already stays.
ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # the Python proxy adds several milliseconds and loses requests of killed replicas
    "RAY_SERVE_HAPROXY_RETRY_ON": "\n    ".join(RETRY),  # Ray writes it into HAProxy's defaults as it stands
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BODY + HEAD),
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # a log line a request, read in Python; HAProxy's own exporter stays
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "10",  # of silence in the middle of a request; Ray's default is an hour
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # the front only waits: two changes of thread a message buy nothing
    "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # HAProxy leaves a replica out within one; Ray's default is 30
    "RAY_worker_niceness": "0",  # Ray runs replicas and HAProxy at 15: whatever else the machine does comes first
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every replica serves; paths must be readable on every machine.

    Args:
        folders: arm -> folder; several only for an experiment.
        sla: seconds from arrival to answer.
        options: keyword arguments of `loka.serving.opening.open_model`, for every arm.
        token_file: of bearer tokens.
        shares, salt: which user gets which arm.
        events: folder of the experiment's events.
        shadow: the second arm runs too, and nobody sees its answers.
        log: "all", "errors" or "none".
        body: bytes of a request; a larger one than the default needs RAY_SERVE_HAPROXY_TUNE_BUFSIZE, which `run` sets, and makes every request slower.
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
        """The experiment, if there is one."""
        return None if self.shares is None else Split(tuple(self.folders), tuple(self.shares), self.salt)

    def open(self) -> Front:
        """The models, opened and not yet warm, behind a front."""
        split, options = self.split, self.options
        service = Service(
            {arm: open_model(folder, name=arm, **options) for arm, folder in self.folders.items()},
            policy=Policy(sla=self.sla, reserve=min(0.005, self.sla / 10)),  # HAProxy costs more than loopback
            opener=lambda folder: open_model(folder, **options),
            split=split,
            events=open_log(self.events, tuple(self.folders), split),
            shadow=self.shadow,
        )
        tokens = None if self.token_file is None else Tokens(self.token_file)
        return Front(service, tokens=tokens, limits=Limits(body=self.body), manage=False, verbose=self.log == "all")


def build_app(settings: Settings, *, replicas: int = 1, gpus: float = 0.0) -> Any:
    """A Ray Serve application.

    Args:
        settings: what every replica serves.
        replicas: how many processes.
        gpus: that one replica takes; models on cuda take one unless told otherwise.

    Returns:
        What `ray.serve.run` takes.
    """
    serve = need_ray()
    if replicas < 1:
        raise ValueError(f"replicas={replicas}: expected at least one")
    takes = gpus or (1.0 if str(settings.options.get("device", "cpu")).startswith("cuda") else 0.0)
    deployment = serve.deployment(
        name=NAME,
        num_replicas=replicas,
        max_ongoing_requests=4096,  # admission is ours
        user_config={"generation": 0},
        ray_actor_options={"num_gpus": takes, "num_cpus": 1},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=10 * settings.sla + 5,
        logging_config={"enable_access_log": False},  # a line a request costs more than the request
    )(serve.ingress()(Replica))
    return deployment.bind(settings)


def from_file(args: dict[str, Any]) -> Any:
    """The application of a deployment file: its `args` are those of `Settings`, and `replicas` and `gpus`."""
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
    """Start Ray on this machine, or join the cluster of RAY_ADDRESS, serve, and stay until SIGTERM or Ctrl-C; SIGHUP reads the bundles again.

    Args:
        settings: what every replica serves.
        host, port: of the ingress; an address that others reach needs tokens.
        wait: stay; otherwise return once the replicas are ready.
        ready: called when every replica is.
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
            reload_replicas(handle, replicas, stop=lambda: number != reloads)  # a later one begins anew
        except Exception:
            log.exception("reload failed")

    while not {signal.SIGTERM, signal.SIGINT} & set(heard):
        if signal.SIGHUP in heard:
            heard.remove(signal.SIGHUP)  # that one alone: a SIGTERM may have come since
            reloads += 1
            reloader.submit(reload, reloads)
        time.sleep(0.2)
    reloads += 1
    reloader.shutdown(wait=False, cancel_futures=True)
    drain_ingress(10 * settings.sla + 5)
    serve.shutdown()
    ray.shutdown()


def drain_ingress(seconds: float) -> None:
    """Let HAProxy on every machine finish what it has, and take no new connections: Ray kills it in the middle of requests."""
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
    """On its machine: tell HAProxy of this Ray node to end, and wait until it has. Its configuration lies in a folder of the node's name."""
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
    """Ray Serve, or what to install."""
    try:
        from ray import serve
    except ImportError as error:
        raise ValueError("this needs Ray Serve; hint: pip install 'loka[ray]'") from error
    return serve
