"""The models of benchmarks/trained.py, what they are trained on, and how they are judged.

    wukong, dlrm    plain PyTorch of benchmarks/zoo.py behind one table; fields and dense features of Census-Income, two labels
    interformer     loka.models.InterFormer (`medium`, one layer, or two with --size deep) behind one table: fields, dense features and two histories of MovieLens 1M (is a rating 4 or more?), split by time
    hstu            loka.models.hstu's layers over MovieLens 1M histories (1024 wide, four layers, at most 200 events): every position's next item by a softmax over all items;
                    judged by the log-probability of each user's last item, and by whether it is among the first ten

Every batch of a family has the same shapes, so that a step is compiled and captured once: histories of a ranker are padded to the longest, those of HSTU lie one behind another in a buffer with
room for a batch (benchmarks/quality_sequences.py), filled up with rows of padding. A batch is (inputs, labels), both tuples of tensors on the device; the same seed gives the same batches.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import zoo
from quality_ranking import Table, read_tables
from quality_sequences import Recipe, find_capacity, gather_static, read_events

from loka.metrics import AUC, TopK
from loka.models import build, configure
from loka.models.hstu import HSTUConfig, HSTULayer, next_times
from loka.nn.mix import compute_dtype

Batch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]

DENSE_VECTORS = 9  # that Wukong makes of the dense features: 39 fields and these are 48 vectors
HELD = 32768  # rows of the training split that nobody trains on, for verifying
HELD_USERS = 1024  # the same for HSTU


@dataclass(frozen=True)
class Family:
    """How a family is trained: `steps` of `batch` rows (users), learning rates of tables are `table_rate` times the others'."""

    data: str
    batch: int
    steps: int
    warm_up: int = 20
    table_rate: float = 10.0
    tune_seconds: float = 75.0


FAMILIES = {
    "wukong": Family("census-income-kdd", 4096, 240),
    # ten epochs of a wide DLRM learn its training data by heart: test loss 0.122 to 0.131 over seeds, where Wukong has 0.111
    "dlrm": Family("census-income-kdd", 8192, 100),
    "interformer": Family("ml-1m", 4096, 190, table_rate=1.0, tune_seconds=110.0),  # one epoch
    "hstu": Family("ml-1m", 128, 480, warm_up=50),  # twelve epochs
}
SIZES: dict[str, dict[str, Any]] = {
    "wide": {
        "d": 128, "k": 24, "h": 2048, "layers": 4, "n": 32, "top": (1024, 1024, 512, 256), "interformer": {"layers": 1}, "interformer_size": "medium",
        "hstu": {"d": 1024, "layers": 4, "heads": 8, "d_qk": 128, "d_v": 128, "max_length": 200},
    },
    "tiny": {
        "d": 16, "k": 8, "h": 64, "layers": 2, "n": 8, "top": (64, 64, 32), "interformer": {"layers": 1, "hidden": 64, "backbone": "dhen"}, "interformer_size": "tiny",
        "hstu": {"d": 64, "layers": 1, "heads": 2, "d_qk": 32, "d_v": 32, "max_length": 32},
    },
}  # fmt: skip
SIZES["deep"] = SIZES["wide"] | {"interformer": {"layers": 2}}  # takes twice as long to compile, and to tune


class Ranker(nn.Module):
    """One table for all fields in front of a plain model: what somebody writes who never heard of FP8."""

    def __init__(self, family: str, cards: list[int], dense: int, labels: int, size: str) -> None:
        super().__init__()
        s = SIZES[size]
        self.table = nn.Embedding(sum(cards), s["d"])
        self.register_buffer("offsets", torch.tensor([0, *itertools.accumulate(cards[:-1])]))
        nn.init.normal_(self.table.weight, std=s["d"] ** -0.5)
        self.family, self.d = family, s["d"]
        if family == "wukong":
            self.dense = nn.Linear(dense, DENSE_VECTORS * s["d"])
            n0 = len(cards) + DENSE_VECTORS
            self.core = zoo.Wukong(n0=n0, d=s["d"], k=s["k"], h=s["h"], n_l=s["n"], n_f=s["n"], layers=s["layers"])
            self.core.top[-1] = nn.Linear(s["h"] // 2, labels)
        else:
            self.core = zoo.DLRM(f=len(cards), d=s["d"], top=s["top"])
            self.core.dense[0] = nn.Linear(dense, self.core.dense[0].out_features)
            self.core.over[-1] = nn.Linear(s["top"][-1], labels)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.table(ids + self.offsets)
        if self.family == "dlrm":
            return self.core(dense, x)
        return self.core(torch.cat([x, self.dense(dense).view(-1, DENSE_VECTORS, self.d)], 1))


class HistoryRanker(nn.Module):
    """InterFormer behind one table, whose row 0 is padding and stays zero."""

    def __init__(self, rows: int, fields: int, dense: int, labels: int, length: int, histories: int, size: str) -> None:
        super().__init__()
        s = SIZES[size]
        config = configure(
            "interformer", s["interformer_size"], n=fields + 1, labels=labels, length=length, histories=histories, **s["interformer"]
        )  # fmt: skip
        self.table = nn.Embedding(rows + 1, config.d, padding_idx=0)
        nn.init.normal_(self.table.weight, std=config.d**-0.5)
        with torch.no_grad():
            self.table.weight[0].zero_()
        self.dense = nn.Linear(dense, config.d)
        self.core = build(config)

    def forward(self, dense: Tensor, ids: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        x = torch.cat([self.dense(dense)[:, None], self.table(ids).to(self.dense.weight.dtype)], 1)
        return self.core(x, self.table(history).flatten(2), lengths)


class NextItem(nn.Module):
    """HSTU: the scores of all items after every event."""

    def __init__(self, items: int, size: str) -> None:
        super().__init__()
        config = HSTUConfig(items=items, **SIZES[size]["hstu"])
        self.table, self.positions = nn.Embedding(items, config.d), nn.Embedding(config.max_length, config.d)
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d)
        # not the table itself: its own item would score highest at first, which nobody watches twice
        self.scores = nn.Linear(config.d, items, bias=False)

    def forward(self, items: Tensor, place: Tensor, offsets: Tensor, times: Tensor, asked: Tensor) -> Tensor:
        """Events [total] -> scores [total, items]."""
        x = self.table(items) + self.positions(place)
        x = x.to(compute_dtype(x))
        for layer in self.layers:
            x = layer(x, offsets, times, asked)
        return self.scores(self.norm(x))


class Fields:
    """A ranking data set on the device: batches by index."""

    def __init__(self, root: Path, name: str, family: str, size: str, device: str, batch: int) -> None:
        self.family, self.size, self.device, self.batch = family, size, device, batch
        self.schema, self.tables = read_tables(root, name, device)
        if bool(self.schema.sequences) != (family == "interformer"):
            raise ValueError(f"{name} has {'' if self.schema.sequences else 'no '}sequences, which is not what {family} takes")  # fmt: skip
        rows = len(self.tables["train"])
        self.rows = rows - HELD
        if self.rows < batch:
            raise ValueError(f"a batch of {batch} and {HELD} rows to verify on are more than {rows} training rows")

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        cards, s = [field.cardinality for field in self.schema.categorical], self.schema
        with torch.device(self.device):
            return Ranker(self.family, cards, len(s.dense), len(s.labels), self.size)

    def take(self, split: str, index: Tensor) -> Batch:
        table = self.tables[split]
        return (table.dense[index], table.categorical[index]), (table.labels[index],)

    def stream(self, seed: int) -> Iterator[Batch]:
        """Batches without end, in an order of the seed's."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(self.rows, generator=generator).to(self.device)
            for index in order.split(self.batch)[: self.rows // self.batch]:
                yield self.take("train", index)

    def for_tuning(self) -> list[Batch]:
        """Training batches to choose on; as many that were never trained on to verify on."""
        held = torch.arange(self.rows, len(self.tables["train"]), device=self.device).split(self.batch)
        valid = torch.arange(len(self.tables["valid"]), device=self.device).split(self.batch)
        verify = [self.take("train", i) for i in held if len(i) == self.batch]
        verify += [self.take("valid", i) for i in valid if len(i) == self.batch]
        verify = verify[:32]  # tune keeps 64 in all
        return [*itertools.islice(self.stream(0), len(verify)), *verify]

    def losses(self, output: Tensor, labels: tuple[Tensor, ...]) -> Tensor:
        """One number an example."""
        return F.binary_cross_entropy_with_logits(output.float(), labels[0], reduction="none").mean(1)

    def score(self, run: Callable[..., Tensor]) -> dict[str, Any]:
        """Log loss of every label on the test split, and AUC of the first."""
        table = self.tables["test"]
        pieces = torch.arange(len(table), device=self.device).split(self.batch)
        logits, metric = torch.cat([run(*self.take("test", index)[0]).float() for index in pieces]), AUC()
        each = F.binary_cross_entropy_with_logits(logits.double(), table.labels.double(), reduction="none").mean(0)
        metric.update(logits[:, 0], table.labels[:, 0])
        return {"log_loss": float(each[0]), "log_losses": each.tolist(), "auc": metric.compute()}


class Histories(Fields):
    """The same with histories, padded to the longest of the data set; ids of all tables are made distinct, and 0 is padding."""

    def __init__(self, root: Path, name: str, family: str, size: str, device: str, batch: int) -> None:
        super().__init__(root, name, family, size, device, batch)
        owners = [(f.name, f.cardinality) for f in self.schema.categorical]
        owners += [(s.name, s.cardinality) for s in self.schema.sequences if s.shares is None]
        begins = itertools.accumulate((cardinality for _, cardinality in owners), initial=1)
        self.first = dict(zip((name for name, _ in owners), begins, strict=False))  # the last one is where all end
        self.total_rows = sum(c for _, c in owners)
        self.starts = torch.tensor([self.first[f.name] for f in self.schema.categorical], device=device)
        self.longest = max(s.max_length for s in self.schema.sequences)

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        s = self.schema
        with torch.device(self.device):
            return HistoryRanker(
                self.total_rows, len(s.categorical), len(s.dense), len(s.labels), self.longest, len(s.sequences), self.size
            )  # fmt: skip

    def take(self, split: str, index: Tensor) -> Batch:
        table, shown, lengths = self.tables[split], [], []
        for field in self.schema.sequences:
            shown.append(self._pad(table, field, index))
            lengths.append(table.sequences[field.name][2][index])
        history, length = torch.stack(shown, -1), torch.stack(lengths).amax(0)
        return (table.dense[index], table.categorical[index] + self.starts, history, length), (table.labels[index],)

    def _pad(self, table: Table, field: Any, index: Tensor) -> Tensor:
        values, start, length = table.sequences[field.name]
        step = torch.arange(self.longest, device=self.device)
        at = (start[index, None] + step).clamp(max=len(values) - 1)
        ids = values[at] + self.first[field.shares or field.name]
        return torch.where(step < length[index, None], ids, 0)


class Sequences:
    """Histories of items on the device: a batch is a window of each of `batch` users, anywhere in a history that is longer than the model."""

    def __init__(self, root: Path, name: str, family: str, size: str, device: str, batch: int) -> None:
        self.size, self.device, self.batch = size, device, batch
        self.events = read_events(root, name, device)
        if self.events.times is None:
            raise ValueError(f"{name} has no times, which {family} reads")
        self.length = SIZES[size]["hstu"]["max_length"]
        e = self.events
        self.ends = torch.maximum(e.last - 2, e.first)
        users = (self.ends - e.first > 1).nonzero().squeeze(1)
        held = min(HELD_USERS, len(users) // 4)
        self.users, self.held = users[:-held], users[-held:]
        if len(self.users) < batch or held < batch:
            raise ValueError(f"a batch of {batch} users is larger than the {len(self.users)} to train or the {held} to verify on")  # fmt: skip
        self.capacity = find_capacity((self.ends - e.first)[users], Recipe(1, batch, length=self.length))

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        with torch.device(self.device):
            return NextItem(self.events.n_items + 1, self.size)

    def take(self, users: Tensor, spare: Tensor) -> Batch:
        """Windows that end `spare` (a share of what is too much) before the end of the users' training histories."""
        e = self.events
        extra = (self.ends[users] - e.first[users] - self.length).clamp(min=0)
        end = self.ends[users] - (spare * (extra + 1)).long().clamp(max=extra)
        inputs, real, row = self._lay_out(torch.maximum(e.first[users], end - self.length), end, self.capacity)
        final = real.new_zeros(self.capacity + 1).index_fill(0, inputs[2], True)[1:]
        target = torch.where(final | ~real, 0, inputs[0].roll(-1))
        return inputs, (target, torch.where(real, row, len(users)))

    def _lay_out(self, begin: Tensor, end: Tensor, capacity: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Windows one behind another and rows of padding behind them: what the model reads, which events are real, whose they are."""
        e, count = self.events, len(begin)
        at, offsets = gather_static(begin, end, capacity)
        fill = torch.arange(1, -(-capacity // self.length) + 1, device=self.device) * self.length + offsets[-1]
        rows, real = torch.cat([offsets, fill.clamp(max=capacity)]), at >= 0
        index = torch.arange(capacity, device=self.device)
        row = torch.bucketize(index, rows[1:], right=True)
        items = torch.where(real, e.items[at.clamp(min=0)], 0)
        times = torch.where(real, e.times[at.clamp(min=0)], 0)
        place = (index - rows[row.clamp(max=len(rows) - 2)]).clamp(0, self.length - 1)
        return (items, place, rows, times, next_times(times, rows)), real, row.clamp(max=count)

    def stream(self, seed: int) -> Iterator[Batch]:
        """Batches without end, in an order of the seed's."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.users), generator=generator).to(self.device)
            spare = torch.rand(len(self.users), generator=generator).to(self.device)
            for index in order.split(self.batch)[: len(order) // self.batch]:
                yield self.take(self.users[index], spare[index])

    def for_tuning(self) -> list[Batch]:
        """Users to choose on; others that were never trained on to verify on, with several windows of each."""
        generator, verify = torch.Generator().manual_seed(1), []
        for _ in range(4):
            spare = torch.rand(len(self.held), generator=generator).to(self.device)
            pieces = torch.arange(len(self.held), device=self.device).split(self.batch)
            verify += [self.take(self.held[i], spare[i]) for i in pieces if len(i) == self.batch]
        verify = verify[:32]
        return [*itertools.islice(self.stream(0), len(verify)), *verify]

    def losses(self, output: Tensor, labels: tuple[Tensor, ...]) -> Tensor:
        """One number a user, the sum over the events; their mean is the mean over the events of the batch."""
        target, row = labels
        each = F.cross_entropy(output.float(), target, ignore_index=0, reduction="none")
        sums = each.new_zeros(self.batch + 1).index_add(0, row, each)[: self.batch]
        return sums * (self.batch / (target != 0).sum())

    def score(self, run: Callable[..., Tensor]) -> dict[str, Any]:
        """Minus the log-probability of every user's last item, and whether it is among the first ten."""
        e, metric, each = self.events, TopK((10,)), []
        users, target = e.held_out("test")
        for some, goal in zip(users.split(self.batch), target.split(self.batch), strict=True):
            begin = torch.maximum(e.first[some], goal - self.length)
            inputs, _, _ = self._lay_out(begin, goal, len(some) * self.length)
            last = inputs[2][1 : len(some) + 1] - 1
            asked = inputs[4].index_put((last,), e.times[goal])
            scores = run(*inputs[:4], asked)[last].float()
            scores[:, 0] = -torch.inf
            each.append(F.cross_entropy(scores, e.items[goal], reduction="none").double())
            metric.update_scores(scores, e.items[goal])
        found = metric.compute()
        loss = float(torch.cat(each).mean())
        return {"log_loss": loss, "log_losses": [loss], "hr10": found.hit_rate[10], "ndcg10": found.ndcg[10]}


def open_data(root: Path, name: str, family: str, size: str, device: str, batch: int) -> Any:
    """What a family is trained on."""
    kinds = {"wukong": Fields, "dlrm": Fields, "interformer": Histories, "hstu": Sequences}
    if family not in kinds:
        raise ValueError(f"family {family!r}: expected one of {', '.join(kinds)}")
    return kinds[family](root, name, family, size, device, batch)
