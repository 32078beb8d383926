"""Everything that was measured, on disk as soon as it is known. A call that was cut short goes on where it was: what is known is not measured again.

One JSON file, replaced in one step, so that a kill at any moment leaves the old one or the new one. It belongs to one model (names and shapes of its parameters) on one machine with one torch
and one REVISION of what units run: for any other it is set aside, never mixed.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from loka.measure.device import device_of, name_device
from loka.records import Interval, write_atomically

REVISION = 4  # raised where the same unit runs, or is timed with, something else than before. 2: weight gradients are added exactly. 3: a step quantises its weights anew. 4: steps follow one another without a pause


class Evidence:
    """What is known so far.

    Args:
        folder: where to keep it; None keeps it in memory.
        model: whose evidence it is.
        settings: what else it depends on.

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
        if self.path is not None and self.path.exists():
            try:
                saved = json.loads(self.path.read_text())
                fingerprint, known = saved["fingerprint"], dict(saved["known"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{self.path} is damaged: {error}; hint: another out=, or remove the file") from error
            if fingerprint == self.fingerprint:
                self.known, self.resumed = known, True
            else:
                self.path.replace(self.path.with_name("evidence-of-another-model.json"))

    def get(self, key: str) -> Any:
        """What is known under a key, or None."""
        return self.known.get(key)

    def put(self, key: str, value: Any) -> Any:
        """Keep a value that JSON can hold; returns it."""
        self.known[key] = value
        if self.path is not None:
            text = json.dumps({"fingerprint": self.fingerprint, "known": self.known}, indent=1)
            write_atomically(self.path, text.encode())
        return value

    def get_interval(self, key: str) -> Interval | None:
        """An interval that was put."""
        found = self.get(key)
        return None if found is None else Interval(value=found[0], low=found[1], high=found[2])

    def put_interval(self, key: str, interval: Interval) -> Interval:
        """Keep an interval; returns it."""
        self.put(key, [interval.value, interval.low, interval.high])
        return interval


def digest(record: msgspec.Struct) -> str:
    """Of all that a record says, for a key: other names, sizes or magnitudes have another.

    Args:
        record: a unit.
    """
    return hashlib.sha256(msgspec.json.encode(record)).hexdigest()[:16]


def _fingerprint(model: nn.Module, settings: dict[str, Any]) -> str:
    shapes = [
        (key, list(value.shape), str(value.dtype))
        for key, value in model.state_dict().items()
        if isinstance(value, Tensor)
    ]
    text = json.dumps([name_device(device_of(model)), torch.__version__, REVISION, settings, shapes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
