"""Experiments on live traffic: assign users to arms and log events.

Assignment is sticky and stateless: a user's arm is where  blake2b(salt, user) / 2^64  falls in the cumulative shares.
Another salt gives a new assignment.

Events are JSON lines in a folder, one file per process. An exposure is written once per request id, after the response
was handed to the network. A proxy retries a request only if a dead replica sent no bytes, and such a replica has
written no event. Repeated request ids are counted once: by the process that sees both, otherwise by the reader. A
client that is refused and tries again with the same id counts as both: once refused, and once answered.

    {"event": "exposure", "at": ..., "request_id": ..., "user": ..., "arm": "B", "ms": 12.1, "status": 200,
     "empty": false, "simulated": false}
    {"event": "outcome", "at": ..., "request_id": ..., "user": ..., "name": "click", "value": 1.0}
    {"event": "shadow", "at": ..., "request_id": ..., "arm": "B", "ms": 14.0, "overlap": 0.9}
"""

import errno
import hashlib
import math
import os
import platform
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loka.records import write_atomically

REMEMBERED = 200_000  # recent request ids that a process keeps, to recognize repeated ones


@dataclass(frozen=True)
class Split:
    """The split of users over the arms of an experiment.

    Args:
        names: arms; the first is the baseline.
        shares: share of each arm; positive numbers, normalized to sum to one.
        salt: name of the experiment; another salt assigns users anew.

    Example:
        >>> Split(("a", "b"), (95, 5), "autumn").arm("user-7") in ("a", "b")
        True
    """

    names: tuple[str, ...]
    shares: tuple[float, ...]
    salt: str

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shares) or len(set(self.names)) < len(self.names) or not self.names:
            raise ValueError(
                f"arms {self.names} with shares {self.shares}: expected one share per arm, and different names"
            )
        if not all(math.isfinite(share) and share > 0 for share in self.shares):
            raise ValueError(f"shares {self.shares}: expected positive numbers")
        if not self.salt:
            raise ValueError("an experiment needs a salt, so that its assignment is independent of others")

    def arm(self, user: str | int) -> str:
        """Return the arm of a user, always the same."""
        key = hashlib.blake2b(self.salt.encode(), digest_size=32).digest()
        point = int.from_bytes(hashlib.blake2b(str(user).encode(), digest_size=8, key=key).digest(), "big") / 2**64
        total, reached = sum(self.shares), 0.0
        for name, share in zip(self.names, self.shares, strict=True):
            reached += share / total
            if point < reached:
                return name
        return self.names[-1]


class Described(msgspec.Struct):
    """The content of `experiment.json`."""

    arms: list[str]
    shares: list[float]
    salt: str


class EventLog:
    """Append events to this process's own file, each line in one write.

    Args:
        folder: created if missing. Its `experiment.json` holds arms, shares and salt, which must match.
        split: the experiment.

    Example:
        >>> EventLog("runs/ab", Split(("a", "b"), (95, 5), "autumn"))                   # doctest: +SKIP
    """

    def __init__(self, folder: str | Path, split: Split) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        described = Described(list(split.names), list(split.shares), split.salt)
        header, own = self.folder / "experiment.json", f"{platform.node()}-{os.getpid()}-{time.time_ns()}"
        if not header.exists():  # replicas start together, so the file must appear atomically
            write_atomically(header, msgspec.json.encode(described))
        if msgspec.json.decode(header.read_bytes(), type=Described) != described:
            raise ValueError(f"{header} is of another experiment; hint: use one folder per experiment, or remove it")
        self._file = (self.folder / f"events-{own}.jsonl").open("ab", buffering=0)
        self._seen: OrderedDict[tuple[str, str | bool | None, str], None] = OrderedDict()

    def write(self, event: str, request_id: str, **fields: Any) -> bool:
        """Write one event; return False if this process has already written one of this kind for this id.

        Raises:
            OSError: it could not be written. It is then not known, and no part of it is in the file.
        """
        kind = fields["name"] if event == "outcome" else fields["status"] == 200 if event == "exposure" else None
        key = (event, kind, request_id)
        if key in self._seen:
            return False
        line = {"event": event, "at": round(time.time(), 3), "request_id": request_id, **fields}
        data, end = msgspec.json.encode(line) + b"\n", self._file.seek(0, os.SEEK_END)
        if self._file.write(data) < len(data):  # what a full disk still takes
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._seen[key] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_arms(names: Sequence[str], *, split: Split | None, shadow: bool) -> None:
    """Raise ValueError unless the split or shadow mode fits the models."""
    if len(names) > 1 and split is None and not shadow:
        raise ValueError(f"{len(names)} models need a split, or shadow mode; hint: --split 95,5 --salt NAME")
    if split is not None and set(split.names) != set(names):
        raise ValueError(f"the split is over {split.names}, the models are {tuple(names)}")
    if shadow and (len(names) != 2 or split is not None):
        raise ValueError("shadow mode takes exactly two models and no split: the first one answers")


def open_log(folder: str | Path | None, names: Sequence[str], split: Split | None) -> EventLog | None:
    """Open the event log of an experiment over these arms; None without a folder."""
    if folder is None:
        return None
    return EventLog(folder, split or Split(tuple(names), tuple(1.0 for _ in names), "shadow"))


def overlap(first: Sequence[Any], second: Sequence[Any]) -> float | None:
    """Return the share of the first list that is also in the second, or None if the first is empty."""
    return len(set(first) & set(second)) / len(first) if first else None
