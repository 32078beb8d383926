"""One HTTP request in flight, and the limits of a client."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loka.serving import wire

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
# ASGI scope keys of our listener
DISCONNECT = "loka.disconnect"  # functions that it calls when the connection is lost
READ = "loka.read"  # when it read the head of the request, by time.monotonic


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on what clients may use.

    Args:
        body: largest request body, in bytes.
        body_seconds: time to send the body.
        header_seconds: time to send the request head.
        header_bytes: largest request head.
        connections: open connections in total.
        keep_alive: seconds that an idle connection is kept open.
        grace: seconds past its deadline after which a request is given up, in case the engine hangs.

    Example:
        >>> Limits(body=64 * 1024).connections
        2048
    """

    body: int = 2 * 2**20
    body_seconds: float = 10.0
    header_seconds: float = 10.0
    header_bytes: int = 32 * 2**10
    connections: int = 2048
    keep_alive: float = 75.0
    grace: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")


class Outcome(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/outcome`: an event such as a click, for the answer with this request id."""

    request_id: Annotated[str, Meta(min_length=1, max_length=128)]
    name: Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.@-]{0,63}$")]
    value: Annotated[float, Meta(ge=-1e12, le=1e12)]
    user: Annotated[str, Meta(min_length=1, max_length=256)] | int | None = None


@dataclass(slots=True)
class Call:
    """One HTTP request in flight."""

    scope: Scope
    receive: Receive
    send: Send
    headers: dict[bytes, bytes]
    arrived: float
    request_id: str
    kind: str = wire.JSON
    model: str = "-"
    after: Callable[..., None] | None = None  # called with `status` once the response is sent

    @property
    def method(self) -> str:
        """The method. HEAD, of which monitors are fond, is a GET whose body the listener does not send."""
        found: str = self.scope["method"]
        return "GET" if found == "HEAD" else found

    def header(self, name: bytes) -> str | None:
        """Return a header as text, or None."""
        found = self.headers.get(name)
        return None if found is None else found.decode("latin-1")
