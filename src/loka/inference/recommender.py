"""Items in, items out: the engine behind a semantic index.

Items of a history that the index does not know have no id to read; they are dropped and counted, or refused with `unknown="raise"`. Items the user has
seen can be left out of the result: the search is then asked for as many beams as it has, and what remains after the removal is cut to `top`.
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
    """Items of a history as the model reads them: their codes, and their numbers where it has a table of items."""
    if not len(items):
        return torch.empty(0, config.history_width, dtype=torch.int64)
    codes = index.codes_of(items)
    return torch.cat([codes, items[:, None]], 1) if config.items else codes


@dataclass(frozen=True)
class Recommender:
    """An engine whose valid ids are those of `index`."""

    engine: Engine
    index: SemanticIndex
    unknown: Literal["drop", "raise"] = "drop"

    def __post_init__(self) -> None:
        if self.unknown not in ("drop", "raise"):
            raise ValueError(f"unknown={self.unknown!r}: items without an id are dropped or refused: 'drop' or 'raise'")
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
        """The `top` best items for each history of item numbers, oldest first; fewer where fewer are valid."""
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
