"""One replica of Ray Serve, a process with its own scheduler, engines and front; and the reload of all replicas."""

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loka.serving.call import Receive, Scope, Send
from loka.serving.front import Front
from loka.serving.listener import make_protocol
from loka.serving.server import SWITCH, log_to_stderr
from loka.serving.service import Service

if TYPE_CHECKING:
    from loka.serving.ray_app import Settings

log = logging.getLogger("loka.serving")


class Replica:
    """One process. It is warm before Ray sends it requests."""

    async def __init__(self, settings: "Settings") -> None:  # type: ignore[misc] # Ray awaits it
        sys.setswitchinterval(SWITCH)
        if settings.log != "none":
            log_to_stderr(logging.INFO if settings.log == "all" else logging.WARNING)
        self.settings, self.generation, self.name = settings, -1, secrets.token_hex(8)
        self.front = await asyncio.to_thread(settings.open)
        service = self.front.service
        assert isinstance(service, Service)
        self.service = service
        await service.start()
        shorten(self.front)

    def __serve_build_asgi_app__(self) -> Front:
        """Return the ASGI application that Ray puts behind its ingress."""
        return self.front

    async def check_health(self) -> None:
        """Raise if an engine hangs or failed to start; Ray then replaces this replica."""
        if not self.service.alive:
            raise RuntimeError("the engine hangs or could not be started")

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Reload the folders if a deployment file changed `generation`."""
        fresh, self.generation = self.generation < 0, config["generation"]
        if not fresh:
            await self.reload(self.name)

    async def identify(self) -> str:
        """Return the unique name of this replica."""
        return self.name

    async def reload(self, name: str) -> None:
        """Reload the folders if `name` is this replica. A bad bundle is logged, and the old model stays."""
        if name == self.name:
            await self.service.reload_all(self.settings.folders)


def reload_replicas(handle: Any, replicas: int, *, stop: Callable[[], bool] = lambda: False) -> None:
    """Reload one replica after the other until all have reloaded, including those that are still starting.

    Ray's own update would remove each replica from HAProxy and add it again, each time with a new HAProxy process and
    new connections. `stop` is asked whether to give up.
    """
    done: set[str] = set()
    while not stop():
        names = {name for name in _call_all(handle, "identify") if isinstance(name, str)}
        if names <= done and len(names) >= replicas:
            return
        for name in sorted(names - done):
            for failure in filter(None, _call_all(handle, "reload", name)):
                log.warning("reload", extra={"fields": {"error": str(failure)}})  # the replica died; Ray starts another
        done |= names
        time.sleep(0.5)


def _call_all(handle: Any, method: str, *values: Any) -> list[Any]:
    """Call a method of every replica; return the results, with exceptions among them."""
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        found: list[Any] = handle.broadcast(method, *values).results(return_exceptions=True)
    except DeploymentUnavailableError:  # no replica at the moment
        return []
    return found


def shorten(front: Front) -> None:
    """Make the replica's HTTP server pass requests directly to the front.

    Ray's own tasks, counters and log lines for a request cost as much as answering it, and are not needed: the front
    does limits, deadlines, cancellation and metrics, and a drain waits for the HTTP server. Ray's own paths (/-/...)
    still go to Ray. Ray lets uvicorn choose the protocol, which is the "auto" entry replaced here.
    """
    from uvicorn.config import HTTP_PROTOCOLS

    loop, guarded = asyncio.get_running_loop(), make_protocol(front.limits)

    class Straight(guarded):  # type: ignore[misc, valid-type]
        """One connection of HAProxy."""

        app: Any

        def __init__(self, *values: Any, **named: Any) -> None:
            super().__init__(*values, **named)
            if self.loop is loop:  # with RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=1 the front is in another loop
                self.app = Fork(front, self.app)

    HTTP_PROTOCOLS["auto"] = Straight


@dataclass(frozen=True, slots=True)
class Fork:
    """An ASGI application that passes Ray's own paths to Ray and all other requests to the front."""

    front: Front
    ray: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI scope."""
        await (self.ray if scope["path"].startswith("/-/") else self.front)(scope, receive, send)
