"""Requests in, recommendations out; and the padding between them and the engine's static shapes.

A request's history is its items as semantic ids, oldest first, int64 [n, levels], with the item numbers as one more column where the model has a table
of items; it may be empty. Only the most recent items that fit are used; how
many were left out is told, never silent. Codes outside their codebook raise and name the request.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.inference.decoder import Inputs
from loka.models.onerec import OneRecConfig


@dataclass(frozen=True)
class Request:
    """What one user did, as codes, and the user's features where the model takes them."""

    history: Tensor
    static: Tensor | None = None


@dataclass(frozen=True)
class Recommendation:
    """Best first: codes [W, levels], log-probabilities [W], items [W] where ids are constrained (valid ones only; shorter where there are fewer).

    `cut`: items of the history that did not fit; `dropped`: items that have no id (set by whoever translates items to codes).
    """

    codes: Tensor
    scores: Tensor
    items: Tensor | None
    cut: int = 0
    dropped: int = 0


def check_request(request: Request, config: OneRecConfig, place: int) -> None:
    """Raise for a request that does not fit the model."""
    history = request.history
    if history.dim() != 2 or history.shape[1] != config.history_width or history.is_floating_point():
        seen = f"{history.dtype} {tuple(history.shape)}"
        raise ValueError(f"request {place}: a history is int64 [items, {config.history_width}], got {seen}")
    limits = (*config.codebooks, config.items) if config.items else config.codebooks
    sizes = torch.tensor(limits, device=history.device)
    bad = ((history < 0) | (history >= sizes)).nonzero()
    if len(bad):
        row, level = bad[0].tolist()
        raise ValueError(
            f"request {place}: code {int(history[row, level])} of item {row}, level {level}, is outside "
            f"[0, {limits[level]}); hint: translate items with the model's own index"
        )
    wanted = (config.static,) if config.static else None
    given = None if request.static is None else tuple(request.static.shape)
    if wanted != given:
        raise ValueError(f"request {place}: the model takes user features of shape {wanted}, got {given}")


def pad_requests(requests: list[Request], config: OneRecConfig, bucket: tuple[int, int]) -> Inputs:
    """The batch on the host, newest items first, padded to the bucket; empty places are requests without history."""
    rows, length = bucket
    codes = torch.zeros(rows, length, config.history_width, dtype=torch.int64)
    lengths = torch.zeros(rows, dtype=torch.int64)
    static = torch.zeros(rows, config.static) if config.static else None
    places = codes.numpy()  # reversed in numpy: torch's flip of a few thousand codes takes longer than a decoding step
    for row, request in enumerate(requests):
        recent = request.history[-length:].cpu().numpy()[::-1]
        places[row, : len(recent)] = recent
        lengths[row] = len(recent)
        if static is not None and request.static is not None:
            static[row] = request.static.float().cpu()
    return Inputs(codes, lengths, static)


def split_found(
    codes: Tensor, scores: Tensor, items: Tensor | None, requests: list[Request], length: int
) -> list[Recommendation]:
    """One recommendation per request; beams that are no id are left out."""
    alive = scores > float("-inf")
    if items is not None:
        alive &= items >= 0
    whole = alive.all(1).tolist()
    out = []
    for row, request in enumerate(requests):
        kept = slice(None) if whole[row] else alive[row]
        out.append(
            Recommendation(
                codes=codes[row][kept],
                scores=scores[row][kept],
                items=None if items is None else items[row][kept],
                cut=max(0, request.history.shape[0] - length),
            )
        )
    return out


def make_histories(config: OneRecConfig, requests: int, items: int, *, seed: int = 0) -> list[Request]:
    """Requests with random histories of so many items."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.tensor((*config.codebooks, config.items) if config.items else config.codebooks)
    out = []
    for _ in range(requests):
        codes = (torch.rand(items, config.history_width, generator=g) * sizes).long()
        static = torch.randn(config.static, generator=g) if config.static else None
        out.append(Request(codes, static))
    return out
