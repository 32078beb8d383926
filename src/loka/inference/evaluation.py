"""Per-user quality metrics of a generative recommender, for offline A/B comparisons.

    recall@K            share of a user's held-out items among the first K recommended
    ndcg@K              with gains 1 / log2(rank + 2), divided by that of the best possible order
    log-likelihood      mean over levels of log p(code), averaged over the held-out items that have an id

Every metric is one number per user, so that two models can be compared user by user. Users without a held-out item that
has an id are left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.data.batch import Jagged
from loka.data.sequences import SequenceBatch, SequenceSplit
from loka.inference.bundle import Bundle
from loka.inference.config import EngineConfig
from loka.inference.engine import Engine
from loka.inference.recommender import Recommender, spell
from loka.models.onerec import OneRec

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class UserMetrics:
    """Users int64 [U], their recommended items [U, beams] padded with -1, and one tensor [U] per metric."""

    users: Tensor
    items: Tensor
    values: dict[str, Tensor]


@torch.no_grad()
def evaluate_users(
    bundle: Bundle,
    split: SequenceSplit,
    *,
    users: int | None = None,
    beams: int = 50,
    tops: Sequence[int] = (10,),
    dtype: str = "fp32",
    context_cache: str = "plain",
    batch: int = 16,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> UserMetrics:
    """Recommend to the users of a split and score their held-out items.

    Args:
        bundle: the recommender.
        split: the split of a data set.
        users: number of users, from the first; default: all.
        beams: width of the beam search.
        tops: values of K of the metrics.
        dtype: precision of unquantized layers.
        context_cache: see `EngineConfig`.
        batch: users per batch.
        device: device to run on.
        progress: called as progress(done, total) after every batch.

    Returns:
        The metrics of every user that has a held-out item with an id.

    Example:
        >>> evaluate_users(bundle, data.test, users=500).values["recall@10"].mean()     # doctest: +SKIP
    """
    if max(tops) > beams:
        raise ValueError(f"recall@{max(tops)} needs at least as many beams, got {beams}")
    config = EngineConfig(
        beams=beams, requests=(batch,), dtype=dtype, normalize=bundle.info.normalize, context_cache=context_cache
    )
    engine = Engine(bundle.model.to(device), config, valid=bundle.index.trie)
    recommender = Recommender(engine, bundle.index)
    total = len(split) if users is None else min(users, len(split))
    parts: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
    for start in range(0, total, batch):
        cut = split.cut(np.arange(start, min(start + batch, total)), bundle.model.config.context)
        parts.append(_score(bundle, recommender, cut, beams, tops))
        if progress is not None:
            progress(min(start + batch, total), total)
    kept = [part for part in parts if len(part[0])]
    if not kept:
        raise ValueError(f"none of the {total} users has a held-out item with an id")
    values = {name: torch.cat([part[2][name] for part in kept]) for name in kept[0][2]}
    return UserMetrics(torch.cat([p[0] for p in kept]), torch.cat([p[1] for p in kept]), values)


def make_likelihood_score(
    bundle: Bundle, split: SequenceSplit, users: int
) -> Callable[[nn.Module], tuple[Tensor, Tensor | None]]:
    """Return a score for `loka.quantize`: the negative log-likelihood of the held-out items, always of the same users.

    Raises ValueError if fewer than two of the users have a held-out item with an id.
    """
    cut = split.cut(np.arange(min(users, len(split))), bundle.model.config.context)
    goals = [torch.unique(t[torch.isin(t, bundle.index.items)]) for t in _rows(cut.targets)]
    keep = [i for i, t in enumerate(goals) if len(t)]
    if len(keep) < 2:
        raise ValueError(f"{len(keep)} of {users} validation users have a held-out item with an id: too few to measure")
    histories = _rows(cut.history)

    def score(model: nn.Module) -> tuple[Tensor, Tensor | None]:
        assert isinstance(model, OneRec)
        arm = replace(bundle, model=model)
        return -_likelihood(arm, [histories[i] for i in keep], [goals[i] for i in keep]), None

    return score


def _score(
    bundle: Bundle, recommender: Recommender, cut: SequenceBatch, beams: int, tops: Sequence[int]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    histories, targets = _rows(cut.history), _rows(cut.targets)
    known = bundle.index.items.cpu()
    targets = [torch.unique(t[torch.isin(t, known)]) for t in targets]
    keep = [i for i, t in enumerate(targets) if len(t)]
    found = recommender.recommend([histories[i] for i in keep], top=beams)
    items = torch.full((len(keep), beams), -1, dtype=torch.int64)
    columns: dict[str, list[float]] = {f"{name}@{k}": [] for k in tops for name in ("recall", "ndcg")}
    for row, (place, one) in enumerate(zip(keep, found, strict=True)):
        assert one.items is not None  # a recommender is constrained to items
        items[row, : len(one.items)] = one.items
        hits = torch.isin(items[row], targets[place]).double()
        for k in tops:
            columns[f"recall@{k}"].append(float(hits[:k].sum()) / len(targets[place]))
            columns[f"ndcg@{k}"].append(_ndcg(hits[:k], len(targets[place])))
    values = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    values["log-likelihood"] = _likelihood(bundle, [histories[i] for i in keep], [targets[i] for i in keep])
    return cut.users[keep], items, values


def _ndcg(hits: Tensor, targets: int) -> float:
    gains = 1.0 / torch.log2(torch.arange(2, len(hits) + 2, dtype=torch.float64))
    return float((hits * gains).sum() / gains[: min(targets, len(hits))].sum())


def _rows(jagged: Jagged) -> list[Tensor]:
    edges = jagged.offsets.tolist()
    return [jagged.values[a:b] for a, b in pairwise(edges)]


def _likelihood(bundle: Bundle, histories: list[Tensor], targets: list[Tensor]) -> Tensor:
    """Return, for every user, the mean over the targets of the mean log-probability of their codes."""
    if not histories:
        return torch.zeros(0, dtype=torch.float64)
    model, index = bundle.model, bundle.index
    device = model.begin.weight.device
    known = index.items.cpu()
    rows = [spell(h[torch.isin(h, known)], index, model.config) for h in histories]
    owner = torch.repeat_interleave(torch.arange(len(targets)), torch.tensor([len(t) for t in targets]))
    spread = [rows[i] for i in owner.tolist()]
    offsets = torch.tensor([0, *(len(r) for r in spread)]).cumsum(0)
    goals = index.codes_of(torch.cat(targets)).to(device)
    logits = model(Jagged(torch.cat(spread).to(device), offsets.to(device)), goals)
    if bundle.info.normalize == "valid":
        masks = index.trie.to(device).follow(goals)
        logits = tuple(part.masked_fill(~mask, float("-inf")) for part, mask in zip(logits, masks, strict=True))
    levels = [-F.cross_entropy(part.double(), goals[:, i], reduction="none") for i, part in enumerate(logits)]
    mean = torch.stack(levels).mean(0).cpu()
    sums = torch.zeros(len(targets), dtype=torch.float64).index_add_(0, owner, mean)
    return sums / torch.tensor([len(t) for t in targets])
