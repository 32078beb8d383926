"""One process of Ray Serve: a service with its own scheduler, engines and front, and how all of them read their bundles again."""

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

if TYPE_CHECKING:
    from loka.serving.ray_app import Settings

log = logging.getLogger("loka.serving")


class Replica:
    """One process: opened and warm before Ray sends it anything."""

    async def __init__(self, settings: "Settings") -> None:  # type: ignore[misc] # Ray awaits it
        sys.setswitchinterval(SWITCH)
        if settings.log != "none":
            log_to_stderr(logging.INFO if settings.log == "all" else logging.WARNING)
        self.settings, self.generation, self.name = settings, -1, secrets.token_hex(8)
        self.front = await asyncio.to_thread(settings.open)
        await self.front.service.start()
        shorten(self.front)

    def __serve_build_asgi_app__(self) -> Front:
        """What Ray puts behind its ingress."""
        return self.front

    async def check_health(self) -> None:
        """Raise where the engine hangs: Ray then replaces this replica."""
        if not self.front.service.alive:
            raise RuntimeError("the engine hangs or could not be started")

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Read the folders again where a deployment file has another `generation`."""
        fresh, self.generation = self.generation < 0, config["generation"]
        if not fresh:
            await self.reload(self.name)

    async def identify(self) -> str:
        """A name that no other replica has."""
        return self.name

    async def reload(self, name: str) -> None:
        """Read the folders again if it is this replica that is meant; a bad bundle is logged, and the old model stays."""
        if name == self.name:
            await self.front.service.reload_all(self.settings.folders)


def reload_replicas(handle: Any, replicas: int, *, stop: Callable[[], bool] = lambda: False) -> None:
    """Let one replica after the other read its folders again, until all have, those that are only starting now included.

    Ray's own update would take each of them out of HAProxy and put it back, every time with a new process of HAProxy and new connections.

    Args:
        handle: of the application.
        replicas: how many there should be.
        stop: whether to give up.
    """
    done: set[str] = set()
    while not stop():
        names = {name for name in _ask_all(handle, "identify") if isinstance(name, str)}
        if names <= done and len(names) >= replicas:
            return
        for name in sorted(names - done):
            for failure in filter(None, _ask_all(handle, "reload", name)):
                log.warning("reload", extra={"fields": {"error": str(failure)}})  # its replica died: another one comes
        done |= names
        time.sleep(0.5)


def _ask_all(handle: Any, method: str, *values: Any) -> list[Any]:
    """What the replicas answer; exceptions are answers too."""
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        found: list[Any] = handle.broadcast(method, *values).results(return_exceptions=True)
    except DeploymentUnavailableError:  # there are none just now
        return []
    return found


def shorten(front: Front) -> None:
    """Let the replica's HTTP server hand requests to the front itself: Ray's tasks, counts and log lines around each cost as much as answering it.

    Nothing here needs them: limits, deadlines, cancelling and counting are the front's, and a drain waits for the HTTP server. Ray's own paths (/-/...) stay Ray's. Ray leaves the choice of a protocol to uvicorn,
    which takes what stands under "auto".
    """
    from uvicorn.config import HTTP_PROTOCOLS

    loop, guarded = asyncio.get_running_loop(), make_protocol(front.limits)

    class Straight(guarded):  # type: ignore[misc, valid-type]
        """One connection of HAProxy."""

        app: Any

        def __init__(self, *values: Any, **named: Any) -> None:
            super().__init__(*values, **named)
            if self.loop is loop:  # with RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=1 the front lives in another
                self.app = Fork(front, self.app)

    HTTP_PROTOCOLS["auto"] = Straight


@dataclass(frozen=True, slots=True)
class Fork:
    """Requests to the front, Ray's own paths to Ray."""

    front: Front
    ray: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await (self.ray if scope["path"].startswith("/-/") else self.front)(scope, receive, send)
