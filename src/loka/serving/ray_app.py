"""The same core on Ray Serve: replicas behind HAProxy, on one machine or several.

A replica is one service with its own scheduler, engine and front; Ray starts it, checks its health and replaces it, and HAProxy spreads requests and sends one again whose replica died before it answered.
Batching stays ours: Ray's own batching queues past the deadline. A replica counts as ready only when every bucket is warm, so a rolling update never sends a request to a cold engine.

    app = build_app({"folder": "/models/onerec"}, sla=0.05, replicas=2)
    serve.run(app)                                                        # or a deployment file, docs/guides/serving.md

Whoever reaches a Ray cluster can run code on it: keep it on a network of its own, with token authentication. HAProxy's metrics port listens on every interface.
"""

import os
import signal
import time
from typing import Any

BODY = 512 * 1024  # bytes of a request; HAProxy can only send again what its buffer holds whole
# Read by Ray when its processes start: HAProxy as the ingress; send a request again when its replica is gone or said nothing.
ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BODY + 64 * 1024),
}


def build_app(
    model: dict[str, Any], *, sla: float, replicas: int = 1, token_file: str | None = None, gpus: float = 0.0
) -> Any:
    """A Ray Serve application.

    Args:
        model: keyword arguments of `loka.serving.opening.open_model`; the folder must be readable on every machine.
        sla: seconds from arrival to answer.
        replicas: how many processes.
        token_file: of bearer tokens, readable on every machine.
        gpus: that one replica takes; a model on cuda takes one unless told otherwise.

    Returns:
        What `ray.serve.run` takes.
    """
    serve = need_ray()
    if replicas < 1:
        raise ValueError(f"replicas={replicas}: expected at least one")
    takes = gpus or (1.0 if str(model.get("device", "cpu")).startswith("cuda") else 0.0)
    deployment = serve.deployment(
        name="loka",
        num_replicas=replicas,
        max_ongoing_requests=4096,  # admission is ours
        ray_actor_options={"num_gpus": takes, "num_cpus": 1},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=10 * sla + 5,
        logging_config={"enable_access_log": False},  # a line a request costs more than the request
    )(serve.ingress()(Replica))
    return deployment.bind(model, sla, token_file)


def from_file(args: dict[str, Any]) -> Any:
    """The application of a deployment file: its `args` are those of `build_app`."""
    return build_app(**args)


class Replica:
    """One process: opened and warm before Ray sends it anything."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, model: dict[str, Any], sla: float, token_file: str | None
    ) -> None:
        import sys

        from loka.serving.opening import open_model
        from loka.serving.queues import Policy
        from loka.serving.server import SWITCH
        from loka.serving.service import Service
        from loka.serving.tokens import Tokens

        options = dict(model)
        folder = options.pop("folder")
        sys.setswitchinterval(SWITCH)
        self.tokens = None if token_file is None else Tokens(token_file)
        self.service = Service(
            open_model(folder, **options),
            policy=Policy(sla=sla, reserve=min(0.004, sla / 10)),  # the way through HAProxy costs more than loopback
            opener=lambda other: open_model(other, **options),
        )
        await self.service.start()

    def __serve_build_asgi_app__(self) -> Any:
        """What Ray puts behind its ingress."""
        from loka.serving.call import Limits
        from loka.serving.front import Front

        return Front(self.service, tokens=self.tokens, limits=Limits(body=BODY), manage=False)

    async def check_health(self) -> None:
        """Raise where the engine hangs: Ray then replaces this replica."""
        if not self.service.alive:
            raise RuntimeError("the engine hangs or could not be started")

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """A new bundle from the deployment's `user_config`: {"folder": ...}; a bad one fails the update and the old model stays."""
        if config.get("folder"):
            await self.service.reload(self.service.first.arm, config["folder"])


def run(
    model: dict[str, Any], *, sla: float, host: str, port: int, token_file: str | None, replicas: int, wait: bool = True
) -> None:
    """Start Ray on this machine, or join the cluster of RAY_ADDRESS, serve, and stay until SIGTERM or Ctrl-C.

    Args:
        model: keyword arguments of `open_model`.
        host, port: of the ingress; an address that others reach needs tokens.
        wait: stay; otherwise return once the replicas are ready.
    """
    from loka.serving.listener import is_local

    serve = need_ray()
    if not is_local(host) and token_file is None:
        raise ValueError(f"host {host} can be reached by others: that needs a token; hint: --token-file FILE")
    import ray

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=True, configure_logging=False)
    serve.start(http_options={"host": host, "port": port})
    serve.run(build_app(model, sla=sla, replicas=replicas, token_file=token_file), name="loka", route_prefix="/")
    if not wait:
        return
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while not stopped:
        time.sleep(0.2)
    serve.shutdown()
    ray.shutdown()


def need_ray() -> Any:
    """Ray Serve, or what to install."""
    try:
        from ray import serve
    except ImportError as error:
        raise ValueError("this needs Ray Serve; hint: pip install 'loka[ray]'") from error
    return serve
