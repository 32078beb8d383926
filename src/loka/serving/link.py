"""What a front process and the engine's process say to each other, over a Unix socket and a piece of shared memory.

A frame is its length (four bytes, little-endian) and a MessagePack array whose first element names its kind. The front
writes the arrays of a request into the shared memory and sends where they are; it may use the place again when the
request was answered, refused or released, and every request that is submitted gets exactly one of these. Frames of one
turn of the event loop leave in one write.

States are pickled: they carry the reader of a model from the process that started the front. Nothing is unpickled on the
way back: a front parses what strangers send, and the engine's process takes only typed frames from it.
"""

import asyncio
import bisect
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from loka.serving.telemetry import Taken

ALIGN = 64  # bytes: a cache line
_LENGTH = struct.Struct("<I")


class Submit(msgspec.Struct, array_like=True, tag=0):
    """A request. Its arrays begin at `at` and have `size` bytes; its MessagePack has `tail` bytes and follows them."""

    id: int
    arm: str
    generation: int  # of the model whose reader packed it
    arrived: float
    request_id: str
    timeout_ms: float | None
    at: int
    size: int
    tail: int
    units: int = 0
    length: int = 0
    facts: list[int] | None = None  # None: not packed, the model reads the MessagePack


class Cancel(msgspec.Struct, array_like=True, tag=1):
    """The client of this request is gone."""

    id: int


class Sent(msgspec.Struct, array_like=True, tag=2):
    """Seconds from the end of a batch to the sending of its answers, for the scheduler's reserve."""

    arm: str
    seconds: list[float]


class Counted(msgspec.Struct, array_like=True, tag=3):
    """What the front has counted since it last told."""

    taken: Taken


class Exposed(msgspec.Struct, array_like=True, tag=4):
    """An answer was sent, during an experiment."""

    request_id: str
    fields: dict[str, Any]


class Outcome(msgspec.Struct, array_like=True, tag=5):
    """An outcome to write."""

    id: int
    request_id: str
    fields: dict[str, Any]


class Listening(msgspec.Struct, array_like=True, tag=6):
    """The front accepts connections, and knows whether the models are ready."""

    ready: bool


class Answer(msgspec.Struct, array_like=True, tag=7):
    """The answer of a model: MessagePack, or if `raw` the array for the reader to finish."""

    id: int
    name: str
    version: str
    raw: bool
    data: bytes
    started: float
    ended: float
    bucket: tuple[int, int]
    batch: int


class Refusal(msgspec.Struct, array_like=True, tag=8):
    """There is no answer, and why."""

    id: int
    status: int
    reason: str
    message: str
    retry_after: float | None = None
    path: str | None = None


class Released(msgspec.Struct, array_like=True, tag=9):
    """A cancelled request has left the queue or its batch."""

    id: int


class Written(msgspec.Struct, array_like=True, tag=10):
    """Whether the outcome was new."""

    id: int
    new: bool


class State(msgspec.Struct, array_like=True, tag=11):
    """Which models there are and whether they are ready, pickled. The first one carries the settings of the front too."""

    data: bytes


class Stop(msgspec.Struct, array_like=True, tag=12):
    """Answer whoever waits, then end."""


TO_ENGINE = msgspec.msgpack.Decoder(Submit | Cancel | Sent | Counted | Exposed | Outcome | Listening)
TO_FRONT = msgspec.msgpack.Decoder(Answer | Refusal | Released | Written | State | Stop)


class Link(asyncio.Protocol):
    """One end of the socket.

    Args:
        decoder: of the frames that arrive here.
        hear: called with every frame.
        lost: called when the other process is gone.
    """

    def __init__(
        self, decoder: "msgspec.msgpack.Decoder[Any]", hear: Callable[[Any], None], lost: Callable[[], None]
    ) -> None:
        self._decode, self._hear, self._lost = decoder.decode, hear, lost
        self._encode = msgspec.msgpack.Encoder().encode
        self._rest = b""
        self._out: list[bytes] = []
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._transport = None
        self._lost()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop: hear all frames that are complete."""
        if self._rest:
            data = self._rest + data
        at, end, view = 0, len(data), memoryview(data)
        while end - at >= 4:
            until = at + 4 + _LENGTH.unpack_from(data, at)[0]
            if until > end:
                break
            self._hear(self._decode(view[at + 4 : until]))
            at = until
        self._rest = data[at:]

    def send(self, frame: Any) -> None:
        """Send a frame at the end of this turn of the event loop; dropped if the other process is gone."""
        if self._transport is None:
            return
        data = self._encode(frame)
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out += (_LENGTH.pack(len(data)), data)

    def flush(self) -> None:
        """Send what there is."""
        out, self._out = self._out, []
        if out and self._transport is not None:
            self._transport.write(b"".join(out))

    def close(self) -> None:
        """Send what there is, and close the socket."""
        self.flush()
        if self._transport is not None:
            self._transport.close()


class Blocks:
    """Places in a piece of memory: the first free one that is large enough, so that as few pages as possible are touched.

    Args:
        size: bytes of the memory.

    Example:
        >>> blocks = Blocks(256)
        >>> [blocks.take(100), blocks.take(100), blocks.take(1)]
        [0, 128, None]
        >>> blocks.give(0, 100)
        >>> blocks.take(1)
        0
    """

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]  # (start, bytes), ascending, never two that touch

    def take(self, size: int) -> int | None:
        """Return the start of a place of this size, or None if there is none."""
        size = _round(size)
        for place, (start, room) in enumerate(self._free):
            if room >= size:
                if room == size:
                    del self._free[place]
                else:
                    self._free[place] = (start + size, room - size)
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Return a place that was taken with this size."""
        size = _round(size)
        place = bisect.bisect(self._free, (start, 0))
        if place < len(self._free) and self._free[place][0] == start + size:
            size += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == start:
            before = self._free[place - 1]
            self._free[place - 1] = (before[0], before[1] + size)
        else:
            self._free.insert(place, (start, size))


def _round(size: int) -> int:
    return max(1, -(-size // ALIGN)) * ALIGN
