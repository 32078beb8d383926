"""One sequence run of benchmarks/quality.py, and the baselines beside it: popularity and first-order Markov.

Leave-last-out over the full catalogue: a user's last item is the test target, the one before it the validation target, the rest is for training.
Nothing is removed from the ranking, also not what the user has seen.

    popularity   items by how often they occur in the training part
    Markov       items by how often they followed the last item of the history in the training part; popularity breaks ties

HSTU learns every position's next item by a softmax over all items; where the data has times, a request's own moment is known to it, as it is
to a server. OneRec learns to spell the next item's semantic id from sampled prefixes, and is scored by its beam search over valid ids: a target
that is not among the beams is a miss.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_ranking import gather_windows
from torch import Tensor

from loka.data.batch import Jagged
from loka.kernels.attention import reference, silu_attention, triton
from loka.metrics import TopK
from loka.models import build
from loka.models.beam import search
from loka.models.hstu import next_item_loss, next_times
from loka.models.onerec import semantic_id_loss
from loka.semantic_ids import build_trie
from loka.training import Optimizers, TrainConfig, learning_rate_factor


@dataclass(frozen=True)
class Recipe:
    """`batch`: users for HSTU, prefixes for OneRec; `model` goes to the family's config."""

    steps: int
    batch: int
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    evaluations: int = 12
    patience: int = 4
    length: int = 50
    model: dict[str, Any] = field(default_factory=dict)


HSTU = {"d": 64, "layers": 2, "heads": 2, "d_qk": 32, "d_v": 32, "dropout": 0.3, "cosine": False}
ONEREC = {"d": 128, "layers": 3, "heads": 4, "d_ff": 384, "g_kv": 4, "short": 10, "dropout": 0.2}
RECIPES = {
    ("hstu", "ml-1m"): (Recipe(4000, 128, 2e-3, length=200, model=HSTU | {"layers": 4, "dropout": 0.2}),),
    ("hstu", "amazon-2014-beauty"): (Recipe(1200, 512, 4e-3, model=HSTU | {"dropout": 0.4}),),
    ("hstu", "amazon-2018-scientific"): (Recipe(1000, 256, 4e-3, model=HSTU | {"dropout": 0.4}),),
    ("onerec", "ml-1m"): (Recipe(4000, 2048, 1.5e-3, length=100, model=ONEREC, weight_decay=0.01),),
    ("onerec", "amazon-2014-beauty"): (Recipe(3000, 1024, 2e-3, model=ONEREC | {"dropout": 0.3}, weight_decay=0.05),),
    ("onerec", "amazon-2018-scientific"): (
        Recipe(2000, 512, 2e-3, model=ONEREC | {"dropout": 0.3}, weight_decay=0.05),
    ),
}


@dataclass(frozen=True)
class Events:
    """Everything every user did, on the device; user u has events first[u] ... last[u] - 1."""

    items: Tensor
    times: Tensor | None
    first: Tensor
    last: Tensor
    n_items: int
    codes: Tensor
    """int64 [n_items + 1, levels]"""

    def windows(self, begin: Tensor, end: Tensor, length: int, total: int) -> tuple[Jagged, Tensor]:
        """The last `length` events of [begin, end), as item ids and as positions of the events."""
        begin = torch.maximum(begin, end - length)
        at, offsets = gather_windows(begin, end - begin, total)
        return Jagged(self.items[at], offsets), at

    def held_out(self, split: str) -> tuple[Tensor, Tensor]:
        """Users with a target (and a history before it), and where the target stands."""
        target = self.last - (2 if split == "valid" else 1)
        users = (target > self.first).nonzero().squeeze(1)
        return users, target[users]


@lru_cache(maxsize=4)
def read_events(root: Path, data: str, device: str) -> Events:
    with np.load(root / f"sequences-{data}.npz") as packed:
        arrays = {name: packed[name] for name in packed.files}
    offsets = np.concatenate([[0], np.cumsum(arrays["lengths"].astype(np.int64))])
    times = None
    if "steps" in arrays:
        passed = np.cumsum(arrays["steps"].astype(np.int64))
        times = passed + np.repeat(arrays["first_times"] - passed[offsets[:-1]], arrays["lengths"])

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return Events(
        to_device(arrays["items"]),
        None if times is None else to_device(times),
        to_device(offsets[:-1]),
        to_device(offsets[1:]),
        int(arrays["n_items"]),
        to_device(arrays["codes"]),
    )


def measure_baselines(root: Path, data: str, device: str) -> dict[str, float]:
    """HR@10 on the test split."""
    events = read_events(root, data, device)
    n = events.n_items + 1
    ends = torch.maximum(events.last - 2, events.first)
    _, at = events.windows(events.first, ends, 10**9, int((ends - events.first).sum()))
    owner = torch.bucketize(at, events.last, right=True)
    popularity = torch.bincount(events.items[at], minlength=n).double()
    follows = owner[1:] == owner[:-1]
    before, after = events.items[at[:-1]][follows], events.items[at[1:]][follows]
    keys, counts = torch.unique(before * n + after, return_counts=True)
    users, target = events.held_out("test")
    hits = {"popularity": TopK((10,)), "markov": TopK((10,))}
    share = popularity / (popularity.sum() + 1)  # below one: breaks ties between counts
    for some, goal in zip(users.split(1024), target.split(1024), strict=True):
        scores = share.repeat(len(some), 1)
        scores[:, 0] = -1.0
        hits["popularity"].update_scores(scores, events.items[goal])
        last = events.items[goal - 1]
        low, high = torch.searchsorted(keys, last * n), torch.searchsorted(keys, (last + 1) * n)
        place, offsets = gather_windows(low, high - low, int((high - low).sum()))
        row = torch.bucketize(torch.arange(len(place), device=place.device), offsets[1:], right=True)
        scores[row, keys[place] % n] += counts[place].double()
        hits["markov"].update_scores(scores, events.items[goal])
    return {name: metric.compute().hit_rate[10] for name, metric in hits.items()}


@lru_cache(maxsize=1)
def choose_attention(device: str) -> tuple[str, str]:
    """HSTU's attention backend and the reason: Triton on a GPU after it agreed with the reference here, forward and backward."""
    if device == "cpu":
        return "reference", "no GPU"
    shape, offsets = (200, 2, 32), torch.tensor([0, 0, 1, 70, 200], device=device)
    times = torch.arange(200, device=device) * 37
    results = []
    for run in (reference.run, triton.run):
        torch.manual_seed(0)
        q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        biases = [torch.randn(2, 130, device=device, requires_grad=True) for _ in range(2)]
        options = {"position_bias": biases[0], "time_bias": biases[1], "times": times, "divisor": 130.0}
        try:
            silu_attention(q, k, v, offsets, max_length=130, run=run, **options).float().square().sum().backward()
        except Exception as error:
            return "reference", f"Triton refused: {type(error).__name__}: {error}"
        results.append([t.grad.float() for t in (q, k, v, *biases)])
    worst = max(float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True))
    agrees = worst < 0.02
    return (
        "triton" if agrees else "reference"
    ), f"gradients of Triton and reference differ by {worst:.1e} (relative L2)"


class NextItem:
    """HSTU over users."""

    def __init__(self, events: Events, recipe: Recipe, attention: str) -> None:
        self.events, self.recipe = events, recipe
        options = recipe.model | {"items": events.n_items + 1, "max_length": recipe.length, "attention": attention}
        self.model = build("hstu", "small", **options)
        self.ends = torch.maximum(events.last - 2, events.first)
        self.users = (self.ends - events.first > 1).nonzero().squeeze(1)

    def losses(self) -> Iterator[Tensor]:
        """One loss per batch, without end."""
        e, size = self.events, self.recipe.batch
        while True:
            order = self.users[torch.randperm(len(self.users), device=self.users.device)]
            lengths = (self.ends - e.first)[order].clamp(max=self.recipe.length)
            totals = torch.stack([part.sum() for part in lengths.split(size)]).tolist()
            for some, total in zip(order.split(size), totals, strict=True):
                history, at = e.windows(e.first[some], self.ends[some], self.recipe.length, total)
                times = None if e.times is None else e.times[at]
                yield next_item_loss(self.model(history, times), history)

    @torch.no_grad()
    def rank(self, users: Tensor, target: Tensor, metric: TopK) -> None:
        e = self.events
        total = int((target - e.first[users]).clamp(max=self.recipe.length).sum())
        history, at = e.windows(e.first[users], target, self.recipe.length, total)
        times = asked = None
        if e.times is not None:
            times = e.times[at]
            asked = next_times(times, history.offsets).index_put((history.offsets[1:] - 1,), e.times[target])
        scores = self.model(history, times, asked, last=True)
        scores[:, 0] = -math.inf
        metric.update_scores(scores, e.items[target])


class NextId:
    """OneRec over prefixes of training histories."""

    def __init__(self, events: Events, recipe: Recipe) -> None:
        self.events, self.recipe = events, recipe
        sizes = tuple(int(size) + 1 for size in events.codes.amax(0))
        self.model = build("onerec", "small", **(recipe.model | {"codebooks": sizes, "context": recipe.length}))
        self.trie = build_trie(events.codes[1:], sizes, torch.arange(1, events.n_items + 1, device=events.codes.device))
        ends = torch.maximum(events.last - 2, events.first)
        _, at = events.windows(events.first, ends, 10**9, int((ends - events.first).sum()))
        first = events.first[torch.bucketize(at, events.last, right=True)]
        self.targets, self.first = at[at > first], first[at > first]

    def losses(self) -> Iterator[Tensor]:
        e, size = self.events, self.recipe.batch
        while True:
            order = torch.randperm(len(self.targets), device=self.targets.device)[: 256 * size]
            lengths = (self.targets - self.first)[order].clamp(max=self.recipe.length)
            totals = torch.stack([part.sum() for part in lengths.split(size)]).tolist()
            for some, total in zip(order.split(size), totals, strict=True):
                history, _ = e.windows(self.first[some], self.targets[some], self.recipe.length, total)
                goal = e.codes[e.items[self.targets[some]]]
                yield semantic_id_loss(self.model(Jagged(e.codes[history.values], history.offsets), goal), goal)

    @torch.no_grad()
    def rank(self, users: Tensor, target: Tensor, metric: TopK) -> None:
        e = self.events
        total = int((target - e.first[users]).clamp(max=self.recipe.length).sum())
        history, _ = e.windows(e.first[users], target, self.recipe.length, total)
        context = self.model.encode(Jagged(e.codes[history.values], history.offsets))
        found = search(self.model, context, beams=BEAMS, valid=self.trie).items
        assert found is not None  # valid ids were given
        metric.update(found, e.items[target][:, None])


BEAMS = 32


def run(
    root: Path, family: str, data: str, seed: int, device: str, *, deadline: float, recipe: Recipe
) -> dict[str, Any]:
    """Train one model and score it on the test split."""
    events = read_events(root, data, device)
    torch.manual_seed(seed)
    attention = choose_attention(device) if family == "hstu" else ("", "")
    task = NextItem(events, recipe, attention[0]) if family == "hstu" else NextId(events, recipe)
    task.model.to(device)
    config = TrainConfig(
        steps=recipe.steps,
        warmup_steps=min(100, recipe.steps),
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        schedule="cosine",
        final_fraction=0.02,
    )
    best = train(task, recipe, config, device, deadline)
    task.model.load_state_dict(best.pop("state"))
    result = score(task, "test", device, limit=None)
    parameters = sum(p.numel() for p in task.model.parameters())
    found = {"hr10": result[0], "ndcg10": result[1], **best, "parameters": parameters, "recipe": asdict(recipe)}
    return found | {"valid_loss": -best["valid_ndcg10"], **({"attention": attention} if family == "hstu" else {})}


def train(task: Any, recipe: Recipe, config: TrainConfig, device: str, deadline: float) -> dict[str, Any]:
    """The best state by validation NDCG@10 on at most 6,000 users."""
    optimizers, bad = Optimizers(task.model, config), 0
    best: dict[str, Any] = {"valid_ndcg10": -1.0}
    every = max(1, recipe.steps // recipe.evaluations)
    losses = task.losses()
    for step in range(recipe.steps):
        task.model.train()
        optimizers.set_factor(learning_rate_factor(config, step))
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = next(losses)
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        late = time.time() > deadline
        if (step + 1) % every and step + 1 != recipe.steps and not late:
            continue
        hit, ndcg = score(task, "valid", device, limit=6000)
        bad = 0 if ndcg > best["valid_ndcg10"] else bad + 1
        if not bad:
            state = {name: t.clone() for name, t in task.model.state_dict().items()}
            best = {"valid_hr10": hit, "valid_ndcg10": ndcg, "best_step": step + 1, "state": state}
        if bad >= recipe.patience or late:
            break
    return {**best, "steps": step + 1, "last_loss": loss.item(), "cut_short": late}


def score(task: Any, split: str, device: str, *, limit: int | None) -> tuple[float, float]:
    """HR@10 and NDCG@10."""
    task.model.eval()
    users, target = task.events.held_out(split)
    metric = TopK((10,))
    for some, goal in zip(users[:limit].split(512), target[:limit].split(512), strict=True):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            task.rank(some, goal, metric)
    result = metric.compute()
    return result.hit_rate[10], result.ndcg[10]
