"""One sequence run of benchmarks/quality.py, and the baselines beside it: popularity and first-order Markov.

Leave-last-out over the full catalogue: a user's last item is the test target, the one before it the validation target, the rest is for training.
Nothing is removed from the ranking, also not what the user has seen.

    popularity   items by how often they occur in the training part
    Markov       items by how often they followed the last item of the history in the training part; popularity breaks ties

HSTU learns every position's next item by a softmax over all items; where the data has times, a request's own moment is known to it, as it is
to a server. OneRec learns to spell the next item's semantic id from every prefix, over the probabilities of valid ids, and is scored by its beam
search over them: a target that is not among the beams is a miss.

On a GPU forward and backward of a step are one CUDA graph: batches are drawn inside it from the numbers of the examples, into buffers that have room
for the longest batch, because a small model spends its time in launches otherwise.
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
import torch.nn.functional as F
from quality_ranking import gather_windows
from torch import Tensor

from loka.data.batch import Jagged
from loka.kernels.attention import reference, silu_attention, triton
from loka.metrics import TopK
from loka.models import build
from loka.models.beam import search
from loka.models.hstu import next_item_loss, next_times
from loka.models.onerec import semantic_id_loss
from loka.semantic_ids.trie import build_trie
from loka.training import Optimizers, TrainConfig, learning_rate_factor


@dataclass(frozen=True)
class Recipe:
    """`batch`: users for HSTU, prefixes for OneRec; `model` goes to the family's config."""

    steps: int
    batch: int
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    evaluations: int = 6
    patience: int = 4
    length: int = 50
    model: dict[str, Any] = field(default_factory=dict)


HSTU = {"d": 64, "layers": 2, "heads": 2, "d_qk": 32, "d_v": 32, "dropout": 0.3, "cosine": False}
ONEREC = {"d": 128, "layers": 3, "heads": 4, "d_ff": 384, "g_kv": 4, "short": 10, "dropout": 0.3}
RECIPES = {
    ("hstu", "ml-1m"): (Recipe(3000, 128, 2e-3, length=200, model=HSTU | {"layers": 4, "dropout": 0.2}),),
    ("hstu", "amazon-2014-beauty"): (Recipe(1200, 512, 4e-3, model=HSTU | {"dropout": 0.4}),),
    ("hstu", "amazon-2018-scientific"): (Recipe(1000, 256, 4e-3, model=HSTU | {"dropout": 0.4}),),
    ("onerec", "ml-1m"): (Recipe(4000, 2048, 2e-3, length=50, model=ONEREC | {"dropout": 0.1}, weight_decay=0.01),),
    ("onerec", "amazon-2014-beauty"): (Recipe(2500, 1024, 2e-3, length=30, model=ONEREC, weight_decay=0.05),),
    ("onerec", "amazon-2018-scientific"): (Recipe(1500, 512, 2e-3, length=30, model=ONEREC, weight_decay=0.05),),
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
    """HSTU over users: a window of each training history, anywhere in it where it is longer than the model."""

    def __init__(self, events: Events, recipe: Recipe, attention: str) -> None:
        self.events, self.recipe = events, recipe
        options = recipe.model | {"items": events.n_items + 1, "max_length": recipe.length, "attention": attention}
        self.model = build("hstu", "small", **options)
        self.ends = torch.maximum(events.last - 2, events.first)
        self.examples = (self.ends - events.first > 1).nonzero().squeeze(1)
        self.capacity = find_capacity((self.ends - events.first)[self.examples], recipe)

    def loss(self, users: Tensor) -> Tensor:
        """users [B]: every shape depends on B alone. What the windows leave of the capacity is filled with rows of padding, which is no target."""
        e, length = self.events, self.recipe.length
        spare = (self.ends[users] - e.first[users] - length).clamp(min=0)
        end = self.ends[users] - (torch.rand(len(users), device=users.device) * (spare + 1)).long().clamp(max=spare)
        at, offsets = gather_static(torch.maximum(e.first[users], end - length), end, self.capacity)
        fill = torch.arange(1, -(-self.capacity // length) + 1, device=users.device) * length + offsets[-1]
        real = at >= 0
        rows = torch.cat([offsets, fill.clamp(max=self.capacity)])
        history = Jagged(torch.where(real, e.items[at.clamp(min=0)], 0), rows)
        times = None if e.times is None else torch.where(real, e.times[at.clamp(min=0)], 0)
        return next_item_loss(self.model(history, times), history)

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
    """OneRec over all prefixes of training histories; an item of a history is its codes and itself."""

    def __init__(self, events: Events, recipe: Recipe) -> None:
        self.events, self.recipe = events, recipe
        sizes = tuple(int(size) + 1 for size in events.codes.amax(0))
        options = recipe.model | {"codebooks": sizes, "context": recipe.length, "items": events.n_items + 1}
        self.model = build("onerec", "small", **options)
        numbers = torch.arange(events.n_items + 1, device=events.codes.device)
        self.described = torch.cat([events.codes, numbers[:, None]], 1)
        self.trie = build_trie(events.codes[1:], sizes, numbers[1:])
        ends = torch.maximum(events.last - 2, events.first)
        _, at = events.windows(events.first, ends, 10**9, int((ends - events.first).sum()))
        first = events.first[torch.bucketize(at, events.last, right=True)]
        self.targets, self.first = at[at > first], first[at > first]
        self.examples = torch.arange(len(self.targets), device=at.device)
        self.capacity = find_capacity(self.targets - self.first, recipe)

    def loss(self, examples: Tensor) -> Tensor:
        """examples [B]: every shape depends on B alone; values behind the last row are not read."""
        e, target = self.events, self.targets[examples]
        begin = torch.maximum(self.first[examples], target - self.recipe.length)
        at, offsets = gather_static(begin, target, self.capacity)
        goal = e.codes[e.items[target]]
        history = Jagged(self.described[e.items[at.clamp(min=0)]], offsets)
        return semantic_id_loss(self.model(history, goal), goal, self.trie.follow(goal))

    @torch.no_grad()
    def rank(self, users: Tensor, target: Tensor, metric: TopK) -> None:
        e = self.events
        total = int((target - e.first[users]).clamp(max=self.recipe.length).sum())
        history, _ = e.windows(e.first[users], target, self.recipe.length, total)
        context = self.model.encode(Jagged(self.described[history.values], history.offsets))
        found = search(self.model, context, beams=BEAMS, valid=self.trie, normalize="valid").items
        assert found is not None  # valid ids were given
        metric.update(found, e.items[target][:, None])


BEAMS = 50


def find_capacity(lengths: Tensor, recipe: Recipe) -> int:
    """Room for the windows of a batch: six standard deviations above their mean sum, at most what they can be at all."""
    windows = lengths.clamp(max=recipe.length).double()
    likely = recipe.batch * float(windows.mean()) + 6 * recipe.batch**0.5 * float(windows.std())
    return min(recipe.batch * recipe.length, -(-int(likely) // 64) * 64 + 64)


def gather_static(begin: Tensor, end: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Positions of the values of windows [begin, end), one after another and -1 behind them, [capacity], and offsets [B + 1].

    Nothing is asked of the device, so this can be captured. A window that finds no room is cut; `find_capacity` makes that all but impossible.
    """
    offsets = F.pad((end - begin).cumsum(0), (1, 0)).clamp(max=capacity)
    index = torch.arange(capacity, device=begin.device)
    row = torch.bucketize(index, offsets[1:], right=True)
    at = index + (begin - offsets[:-1])[row.clamp(max=len(begin) - 1)]
    return torch.where(row < len(begin), at, -1), offsets


class Stepper:
    """Forward and backward of a batch; on a GPU one CUDA graph, of which only the numbers of the examples change."""

    def __init__(self, task: Any, recipe: Recipe, device: str) -> None:
        self.task, self.device = task, device
        self.examples = task.examples[: recipe.batch].clone()
        if len(self.examples) < recipe.batch:
            raise ValueError(f"a batch of {recipe.batch} is larger than the {len(self.examples)} training examples")
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss = torch.zeros((), device=device)
        self.how = self._capture() if device == "cuda" else "eager: no GPU"

    def __call__(self, examples: Tensor) -> Tensor:
        """Leave the gradients in the parameters; the loss is overwritten by the next call."""
        self.examples.copy_(examples)
        if self.graph is not None:
            self.graph.replay()
            return self.loss
        self.task.model.zero_grad(set_to_none=True)
        return self._run()

    def _run(self) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.task.loss(self.examples)
        loss.backward()
        return loss.detach()

    def _capture(self) -> str:
        self.task.model.train()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.task.model.zero_grad(set_to_none=True)
                    self._run()
            torch.cuda.current_stream().wait_stream(side)
            self.task.model.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.loss = self._run()
            self.graph = graph
        except Exception as error:  # a run without a graph is the same run, only slower; the result says which it was
            torch.cuda.synchronize()
            self.graph = None
            return f"eager: {type(error).__name__}: {str(error).splitlines()[0]}"
        return "CUDA graph"


def run(
    root: Path,
    family: str,
    data: str,
    seed: int,
    device: str,
    *,
    deadline: float,
    recipe: Recipe,
    events: Events | None = None,
) -> dict[str, Any]:
    """Train one model and score it on the test split. `events`: those of the data set with something about them changed."""
    events = events or read_events(root, data, device)
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


def train(
    task: Any, recipe: Recipe, config: TrainConfig, device: str, deadline: float, *, limit: int = 3000
) -> dict[str, Any]:
    """The best state by validation NDCG@10 on at most `limit` users."""
    optimizers, bad = Optimizers(task.model, config), 0
    best: dict[str, Any] = {"valid_ndcg10": -1.0}
    every = max(1, recipe.steps // recipe.evaluations)
    stepper, batches, started = Stepper(task, recipe, device), draw(task.examples, recipe.batch), time.perf_counter()
    for step in range(recipe.steps):
        task.model.train()
        optimizers.set_factor(learning_rate_factor(config, step))
        loss = stepper(next(batches))
        optimizers.step()
        if device == "cuda" and step % 50 == 0:
            torch.cuda.synchronize()  # else the host runs ahead and finds out too late that time is up
        late = time.time() > deadline
        if (step + 1) % every and step + 1 != recipe.steps and not late:
            continue
        hit, ndcg = score(task, "valid", device, limit=limit)
        bad = 0 if ndcg > best["valid_ndcg10"] else bad + 1
        if not bad:
            state = {name: t.clone() for name, t in task.model.state_dict().items()}
            best = {"valid_hr10": hit, "valid_ndcg10": ndcg, "best_step": step + 1, "state": state}
        if bad >= recipe.patience or late:
            break
    seconds = time.perf_counter() - started
    return {
        **best, "steps": step + 1, "last_loss": loss.item(), "cut_short": late and step + 1 < recipe.steps,
        "train_seconds": seconds, "forward": stepper.how,
    }  # fmt: skip


def draw(examples: Tensor, size: int) -> Iterator[Tensor]:
    """Full batches, epoch after epoch, each in a new order."""
    while True:
        order = examples[torch.randperm(len(examples), device=examples.device)]
        yield from order[: len(order) // size * size].split(size)


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
