"""Recommend items for histories of items: the engine with a semantic index.

Items of a history that are not in the index have no id; they are dropped and counted, or raise with `unknown="raise"`.
Items that the user has already seen can be left out of the result: they are removed from all beams of the search, and
the rest is cut to `top`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from loka.inference.engine import Engine
from loka.inference.request import Recommendation, Request
from loka.models.onerec import OneRecConfig
from loka.semantic_ids import SemanticIndex


def spell(items: Tensor, index: SemanticIndex, config: OneRecConfig) -> Tensor:
    """Return a history as the model reads it: the codes of the items, and their numbers if it has a table of items."""
    if not len(items):
        return torch.empty(0, config.history_width, dtype=torch.int64)
    codes = index.codes_of(items)
    return torch.cat([codes, items[:, None]], 1) if config.items else codes


@dataclass(frozen=True)
class Recommender:
    """Recommend items with an engine that is constrained to the ids of an index.

    Args:
        engine: the engine, built with `valid=index.trie`.
        index: the semantic ids of the items.
        unknown: whether to "drop" items without an id from histories, or to "raise".

    Example:
        >>> Recommender(engine, index).recommend([torch.tensor([12, 40, 7])], top=5)[0].items    # doctest: +SKIP
    """

    engine: Engine
    index: SemanticIndex
    unknown: Literal["drop", "raise"] = "drop"

    def __post_init__(self) -> None:
        if self.unknown not in ("drop", "raise"):
            raise ValueError(f"unknown={self.unknown!r}: expected 'drop' or 'raise', for items without an id")
        if self.engine.trie is None:
            raise ValueError("a recommender needs an engine constrained to valid ids: Engine(..., valid=index.trie)")

    def recommend(
        self,
        histories: Sequence[Tensor],
        *,
        top: int = 10,
        exclude_seen: bool = False,
        static: Sequence[Tensor] | None = None,
    ) -> list[Recommendation]:
        """Return the `top` best items for each history of item numbers, oldest first; fewer if fewer are valid."""
        if top < 1:
            raise ValueError(f"top={top}: expected at least one item")
        requests, dropped = [], []
        for place, history in enumerate(histories):
            codes, missing = self._translate(history, place)
            requests.append(Request(codes, None if static is None else static[place]))
            dropped.append(missing)
        found = self.engine.generate(requests)
        return [
            self._finish(one, history, top, exclude_seen, missing)
            for one, history, missing in zip(found, histories, dropped, strict=True)
        ]

    def _translate(self, history: Tensor, place: int) -> tuple[Tensor, int]:
        items = history.reshape(-1).cpu()
        known = torch.isin(items, self.index.items.cpu())
        if self.unknown == "raise" and not bool(known.all()):
            raise ValueError(f"request {place}: item {int(items[~known][0])} is not in the index; hint: unknown='drop'")
        kept = items[known].to(self.index.items.device)
        return spell(kept, self.index, self.engine.model_config).cpu(), int((~known).sum())

    def _finish(
        self, found: Recommendation, history: Tensor, top: int, exclude_seen: bool, dropped: int
    ) -> Recommendation:
        assert found.items is not None  # the engine is constrained
        keep = torch.ones_like(found.items, dtype=torch.bool)
        if exclude_seen:
            keep &= ~torch.isin(found.items, history.reshape(-1).cpu())
        return replace(
            found,
            codes=found.codes[keep][:top],
            scores=found.scores[keep][:top],
            items=found.items[keep][:top],
            dropped=dropped,
        )
