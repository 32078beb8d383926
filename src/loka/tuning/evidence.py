"""Save every measurement to disk at once, so that an interrupted call resumes without measuring it again.

The file is one JSON file, replaced atomically, so a kill at any moment leaves either the old or the new one. It belongs
to one model (names and shapes of its parameters) on one machine, with one version of torch and one REVISION of the
code. The evidence of another call in the same folder is set aside as evidence-DIGEST.json, until that call is repeated.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from loka.measure.device import device_of, name_device
from loka.records import Interval, write_atomically

# Raised when the same unit runs different code, or is timed differently. 2: weight gradients are added exactly.
# 3: a step quantizes its weights again. 4: steps run back to back.
REVISION = 4


class Evidence:
    """The measurements so far, by key.

    Args:
        folder: where to save them; None keeps them in memory.
        model: the model they belong to.
        settings: other settings they depend on.

    Example:
        >>> evidence = Evidence("runs/x", model, {"target": "train"})
        >>> evidence.put("unit/top.0", [12.1, 12.2])
    """

    def __init__(self, folder: str | Path | None, model: nn.Module, settings: dict[str, Any]) -> None:
        self.path = None if folder is None else Path(folder) / "evidence.json"
        self.fingerprint = _fingerprint(model, settings)
        self.known: dict[str, Any] = {}
        self.resumed = False
        if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"out={str(folder)!r} is a file, expected a folder")
        if folder is not None:
            _check_writable(Path(folder))
        if self.path is not None:
            self._resume(self.path)

    def _resume(self, path: Path) -> None:
        """Read what is known, and set the evidence of another call aside."""
        if path.exists() and (fingerprint := _read(path)[0]) != self.fingerprint:
            path.replace(_aside(path, fingerprint))
        own = _aside(path, self.fingerprint)
        if not path.exists() and own.exists():
            own.replace(path)
        if path.exists():
            self.known, self.resumed = _read(path)[1], True

    def get(self, key: str) -> Any:
        """Return the value of a key, or None."""
        return self.known.get(key)

    def put(self, key: str, value: Any) -> Any:
        """Save a JSON value and return it."""
        self.known[key] = value
        if self.path is not None:
            text = json.dumps({"fingerprint": self.fingerprint, "known": self.known}, indent=1)
            write_atomically(self.path, text.encode())
        return value

    def get_interval(self, key: str) -> Interval | None:
        """Return the interval saved under a key, or None."""
        found = self.get(key)
        return None if found is None else Interval(value=found[0], low=found[1], high=found[2])

    def put_interval(self, key: str, interval: Interval) -> Interval:
        """Save an interval and return it."""
        self.put(key, [interval.value, interval.low, interval.high])
        return interval


def digest(record: msgspec.Struct) -> str:
    """Return a hash of a record, for use in a key."""
    return hashlib.sha256(msgspec.json.encode(record)).hexdigest()[:16]


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the fingerprint of saved evidence and what is known."""
    try:
        saved = json.loads(path.read_text())
        return str(saved["fingerprint"]), dict(saved["known"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}; hint: another out=, or remove the file") from error


def _aside(path: Path, fingerprint: str) -> Path:
    """Return where the evidence of a call is kept while another call uses the folder."""
    return path.with_name(f"evidence-{fingerprint[:16]}.json")


def _check_writable(folder: Path) -> None:
    """Create the folder now, so that a wrong one is an error before the measurements and not after them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out={str(folder)!r} cannot be created: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"out={str(folder)!r} cannot be written to: no permission")


def _fingerprint(model: nn.Module, settings: dict[str, Any]) -> str:
    shapes = [
        (key, list(value.shape), str(value.dtype))
        for key, value in model.state_dict().items()
        if isinstance(value, Tensor)
    ]
    text = json.dumps([name_device(device_of(model)), torch.__version__, REVISION, settings, shapes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
