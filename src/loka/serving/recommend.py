"""Requests to a generative model and its answers, without the model: they are also read and written in front processes."""

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from loka.serving.servable import FieldError, Reader

MOST_ITEMS = 65_536
Item = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class RecommendRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/recommend` for a generative model.

    Args:
        history: item numbers, oldest first. Give either `history` or `codes`.
        codes: the history as codes, little-endian uint16 [items, levels] in base64 (JSON) or as bytes (MessagePack).
        static: user features, if the model takes them.
        top: number of items; default: 10, or the number of beams if that is less.
        exclude_seen: leave out items of the history.
        with_codes: also return the items' codes.
        user: id of the user, for experiments.
        timeout_ms: a deadline shorter than the service's own.

    Example:
        >>> RecommendRequest(history=[12, 40, 7], top=5).top
        5
    """

    history: Annotated[list[Item], Meta(max_length=MOST_ITEMS)] | None = None
    codes: Annotated[bytes, Meta(max_length=16 * MOST_ITEMS)] | None = None
    static: Annotated[list[float], Meta(max_length=4096)] | None = None
    top: Annotated[int, Meta(ge=1, le=4096)] | None = None
    exclude_seen: bool = False
    with_codes: bool = False
    user: Annotated[str, Meta(min_length=1, max_length=256)] | int | None = None
    timeout_ms: Annotated[float, Meta(gt=0, le=600_000)] | None = None


class Recommended(msgspec.Struct, kw_only=True):
    """An answer, best items first. `cut` and `unknown` count items of the history that were not used."""

    items: list[int]
    scores: list[float]
    codes: list[list[int]] | None = None
    cut: int = 0
    unknown: int = 0
    unknown_items: list[int] = []

    @property
    def empty(self) -> bool:
        """Whether the answer has no items."""
        return not self.items


class RecommendReader(Reader):
    """The part of a generative model that needs no model.

    The index of its items stays in the engine's process, which reads the histories: it takes microseconds, and a batch
    milliseconds.

    Example:
        >>> RecommendReader().from_tensors({"history": np.array([1, 2])}, {}).history
        [1, 2]
    """

    def __init__(self) -> None:
        super().__init__(RecommendRequest, Recommended)

    def from_tensors(self, tensors: dict[str, Any], parameters: dict[str, Any]) -> RecommendRequest:
        """Make a request of `history` INT64 [n] or [1, n], or `codes` UINT16 [n, levels] or [1, n, levels].

        `parameters` are the other fields of the request.
        """
        values: dict[str, Any] = dict(parameters)
        for name, array in tensors.items():
            wanted = {"history": (1, "INT64", np.int64), "codes": (2, "UINT16", np.uint16)}.get(name)
            if wanted is None:
                raise FieldError("$.inputs", f"{name!r} is not an input; expected 'history' or 'codes'")
            dims, word, kind = wanted
            flat = array[0] if array.ndim == dims + 1 and array.shape[0] == 1 else array
            if flat.ndim != dims or flat.dtype != kind:
                raise FieldError(
                    f"$.inputs.{name}",
                    f"{array.dtype} {list(array.shape)}; expected one request, {word} of {dims} dimension(s)",
                )
            values[name] = flat.tolist() if name == "history" else flat.astype("<u2").tobytes()
        return msgspec.convert(values, RecommendRequest)

    def to_tensors(self, answer: Recommended) -> dict[str, Any]:
        """Return items, scores and the counts of unused history items as arrays."""
        return {
            "items": np.array(answer.items, dtype=np.int64),
            "scores": np.array(answer.scores, dtype=np.float32),
            "cut": np.array([answer.cut], dtype=np.int64),
            "unknown": np.array([answer.unknown], dtype=np.int64),
        }
