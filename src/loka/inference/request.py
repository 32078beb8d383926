"""Requests and recommendations, and the padding between them and the engine's static shapes.

A request's history is its items as semantic ids, oldest first, int64 [n, levels], with the item numbers as one more
column if the model has a table of items; it may be empty. Only the most recent items that fit are used, and the result
counts those that were cut. Codes outside their codebook raise an error that names the request.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loka.inference.config import Bucket
from loka.inference.decoder import Inputs
from loka.models.onerec import OneRecConfig


@dataclass(frozen=True)
class Request:
    """A request for one user.

    Args:
        history: the user's items as codes, int64 [n, levels], oldest first.
        static: the user's features, if the model takes them.

    Example:
        >>> Request(torch.zeros(3, 4, dtype=torch.int64)).history.shape
        torch.Size([3, 4])
    """

    history: Tensor
    static: Tensor | None = None


@dataclass(frozen=True)
class Recommendation:
    """The result of one request, best first; shorter than the beam width if there are fewer valid ids.

    Args:
        codes: semantic ids [W, levels].
        scores: log-probabilities [W].
        items: items [W], if the engine is constrained to valid ids.
        cut: number of items of the history that did not fit.
        dropped: number of items of the history without an id, set by `Recommender`.

    Example:
        >>> engine.generate([request])[0].scores                                        # doctest: +SKIP
    """

    codes: Tensor
    scores: Tensor
    items: Tensor | None
    cut: int = 0
    dropped: int = 0


def check_request(request: Request, config: OneRecConfig, place: int) -> None:
    """Raise ValueError if a request does not fit the model."""
    history = request.history
    if history.dim() != 2 or history.shape[1] != config.history_width or history.is_floating_point():
        seen = f"{history.dtype} {tuple(history.shape)}"
        raise ValueError(f"request {place}: a history is int64 [items, {config.history_width}], got {seen}")
    limits = (*config.codebooks, config.items) if config.items else config.codebooks
    codes = _on_host(history)
    bad = (codes < 0) | (codes >= np.array(limits))
    if bad.any():
        row, level = np.argwhere(bad)[0].tolist()
        raise ValueError(
            f"request {place}: code {codes[row, level]} of item {row}, level {level}, is outside "
            f"[0, {limits[level]}); hint: translate items with the model's own index"
        )
    wanted = (config.static,) if config.static else None
    given = None if request.static is None else tuple(request.static.shape)
    if wanted != given:
        raise ValueError(f"request {place}: the model takes user features of shape {wanted}, got {given}")


def pad_requests(requests: list[Request], config: OneRecConfig, bucket: Bucket) -> Inputs:
    """Pad requests to the bucket, on the host, newest items first; unused rows are requests without history.

    In numpy, like `split_found`: the GPU idles meanwhile, and every torch op releases the GIL, which a busy server may
    then hold for long.
    """
    rows, length = bucket
    codes = np.zeros((rows, length, config.history_width), np.int64)
    lengths = np.zeros(rows, np.int64)
    static = np.zeros((rows, config.static), np.float32) if config.static else None
    for row, request in enumerate(requests):
        recent = _on_host(request.history)[-length:][::-1]
        codes[row, : len(recent)] = recent
        lengths[row] = len(recent)
        if static is not None and request.static is not None:
            static[row] = _on_host(request.static.float())
    return Inputs(
        torch.from_numpy(codes), torch.from_numpy(lengths), None if static is None else torch.from_numpy(static)
    )


def _on_host(values: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = (values if values.device.type == "cpu" else values.cpu()).numpy()
    return found


def split_found(
    codes: Tensor, scores: Tensor, items: Tensor | None, requests: list[Request], length: int
) -> list[Recommendation]:
    """Split host tensors into one recommendation per request, leaving out beams that are not a valid id."""
    parts: list[NDArray[Any]] = [part.numpy() for part in (codes, scores, items) if part is not None]
    alive: NDArray[np.bool_] = parts[1] > -np.inf
    if items is not None:
        alive &= parts[2] >= 0
    whole: Any = alive.all(1)
    out = []
    for row, request in enumerate(requests):
        kept = slice(None) if whole[row] else alive[row]
        each = [torch.from_numpy(part[row][kept]) for part in parts]
        cut = max(0, request.history.shape[0] - length)
        out.append(Recommendation(codes=each[0], scores=each[1], items=None if items is None else each[2], cut=cut))
    return out


def make_histories(config: OneRecConfig, requests: int, items: int, *, seed: int = 0) -> list[Request]:
    """Return requests with random histories of `items` items."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.tensor((*config.codebooks, config.items) if config.items else config.codebooks)
    out = []
    for _ in range(requests):
        codes = (torch.rand(items, config.history_width, generator=g) * sizes).long()
        static = torch.randn(config.static, generator=g) if config.static else None
        out.append(Request(codes, static))
    return out
