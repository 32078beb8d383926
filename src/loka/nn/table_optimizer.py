"""The optimizer of low-precision tables, which updates rows in place.

    optimizer = TableOptimizer(model, Rule("rowwise_adagrad", lr=0.02), seed=0)
    loss.backward(); optimizer.step(); optimizer.zero_grad()

It is a torch optimizer over the tables' anchors, so learning-rate schedules, `state_dict` and training loops work. Its
state includes the codes and scales, so that a run resumes bit for bit. Several backward passes before a step
accumulate.

If a process group is initialized, the rows and summed gradients of all ranks are gathered and averaged, in the order of
ranks, so that all replicas make the same update.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loka.formats import Draw
from loka.kernels.embedding_update import TRAINABLE, Rule, embedding_update
from loka.kernels.embedding_update.reference import sum_gradients
from loka.nn.tables import Lookup, Table, hottest

_LIVE = ("data", "scale_code", "slot", "kept")


class TableOptimizer(torch.optim.Optimizer):
    """An optimizer for the low-precision tables of a model.

    Args:
        model: all its `Table` modules are trained, except those with a frozen `anchor`.
        rule: the update rule of all tables. Its `lr` is the initial one of the parameter group, which schedules may
            change.
        seed: of stochastic rounding.
        elect_every: steps between updates of the set of rows kept in float32, for tables with `hot` above 0.
        group: process group of the replicas; None for the default group, if initialized.
        replicated: False if other ranks hold other tables or rows; then nothing is gathered.

    Example:
        >>> optimizer = TableOptimizer(model, Rule("rowwise_adagrad", lr=0.02))
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule | None = None,
        *,
        seed: int = 0,
        elect_every: int = 100,
        group: dist.ProcessGroup | None = None,
        replicated: bool = True,
    ) -> None:
        found = {name: m for name, m in model.named_modules() if isinstance(m, Table)}
        self.tables = {name: table for name, table in found.items() if table.anchor.requires_grad}
        problems = [f"{name} has rows of {t.kind}" for name, t in self.tables.items() if t.kind not in TRAINABLE]
        if problems or not self.tables:
            why = "; ".join(problems) or ("every table is frozen" if found else "there is none")
            raise ValueError(
                f"tables that cannot be trained: {why}; rows for training are {', '.join(TRAINABLE)}; "
                "hint: table.requires_grad_(False) excludes a table"
            )
        self.rule, self.seed, self.elect_every = rule or Rule(), seed, elect_every
        self.group, self.replicated = group, replicated
        super().__init__([table.anchor for table in self.tables.values()], {"lr": self.rule.lr})
        for table in self.tables.values():
            memory = {f"memory{i}": t for i, t in enumerate(self.rule.state(table.rows))}
            self.state[table.anchor] = {"step": torch.zeros((), dtype=torch.int64), **memory, **self._live(table)}
            if table.hot:
                self.state[table.anchor]["counts"] = torch.zeros(
                    table.num_embeddings, dtype=torch.int32, device=table.data.device
                )

    @staticmethod
    def _live(table: Table) -> dict[str, Tensor]:
        return {name: value for name in _LIVE if (value := getattr(table, name)) is not None}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of all backward passes since the last step."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        rule = replace(self.rule, lr=float(self.param_groups[0]["lr"]))
        for table in self.tables.values():
            self._update(table, rule)
        return result

    def _update(self, table: Table, rule: Rule) -> None:
        state = self.state[table.anchor]
        items = self._gather(table) if self._world() > 1 else join(table.pending)
        table.pending = []
        step = int(state["step"])
        if items is not None and len(items[0]):
            indices, offsets, weights, _, grad = items
            memory = tuple(state[f"memory{i}"] for i in range(sum(key.startswith("memory") for key in state)))
            draw = Draw(step, table.stream, self.seed)
            embedding_update(
                table.rows, indices, grad, rule, memory, draw, offsets=offsets, weights=weights, backend=table.backend
            )
            if table.hot:
                state["counts"].index_add_(0, indices.long(), torch.ones_like(indices, dtype=torch.int32))
        state["step"] += 1
        if table.hot and step % self.elect_every == 0:
            table.keep_high(hottest(state["counts"], table.hot))
            state.update(self._live(table))

    def _world(self) -> int:
        if not self.replicated or not dist.is_available() or not dist.is_initialized():
            return 1
        return dist.get_world_size(self.group)

    def _gather(self, table: Table) -> Lookup:
        """Return the rows and summed gradients of all ranks, averaged as by DistributedDataParallel."""
        device, width, world = table.data.device, table.embedding_dim, self._world()
        mine = join(table.pending)
        if mine is None:
            rows, total = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, width, device=device)
        else:
            rows, total = sum_gradients(mine[0], mine[1], mine[4], mine[2], "sum")
        gather: Callable[..., Any] = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )  # renamed in torch 2.13
        counts = torch.zeros(world, dtype=torch.int64, device=device)
        gather(counts, torch.tensor([len(rows)], device=device), group=self.group)
        longest = int(counts.max())
        all_rows = torch.zeros(world * longest, dtype=torch.int64, device=device)
        totals = torch.zeros(world * longest, width, device=device)
        pad = (0, longest - len(rows))
        gather(all_rows, nn.functional.pad(rows, pad), group=self.group)
        gather(totals, nn.functional.pad(total, (0, 0, *pad)), group=self.group)
        real = (torch.arange(longest, device=device) < counts[:, None]).view(-1)
        return all_rows[real], None, None, "sum", totals[real] / world

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all backward passes since the last step."""
        super().zero_grad(set_to_none)
        for table in self.tables.values():
            table.pending = []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, including the rows of the tables, bit for bit."""
        stored = state_dict["state"]
        if len(stored) != len(self.tables):
            raise ValueError(f"the state has {len(stored)} tables, this optimizer {len(self.tables)}")
        self.param_groups[0]["lr"] = state_dict["param_groups"][0]["lr"]
        for number, table in enumerate(self.tables.values()):  # torch's own would cast codes to the anchor's dtype
            held = {key: value.clone() for key, value in stored[number].items()}
            self.state[table.anchor] = held
        self.adopt_state()

    def adopt_state(self) -> None:
        """Copy the rows in the state into the tables, after the state was replaced."""
        for name, table in self.tables.items():
            state = self.state[table.anchor]
            if state["data"].shape != table.data.shape or state["data"].dtype != table.data.dtype:
                raise ValueError(
                    f"{name}: the stored rows are {state['data'].dtype} {tuple(state['data'].shape)}, "
                    f"the table's {table.data.dtype} {tuple(table.data.shape)}"
                )
            table.data.copy_(state["data"])
            if table.scale_code is not None:
                table.scale_code.copy_(state["scale_code"])
            for key in ("slot", "kept"):
                if key in state:
                    setattr(table, key, state[key].to(table.anchor.device))
            state.update(self._live(table))
            state["step"] = state["step"].cpu()


def join(pending: list[Lookup]) -> Lookup | None:
    """Join several lookups into one of mode "sum", with the factors of means as weights of the items."""
    if not pending:
        return None
    if len(pending) == 1 and pending[0][3] != "mean":
        return pending[0]
    indices, offsets, weights, grads, items = [], [], [], [], 0
    for index, offset, weight, mode, grad in pending:
        starts = torch.arange(len(index) + 1, device=index.device) if offset is None else offset.long()
        factor = torch.ones(len(index), device=index.device) if weight is None else weight.float()
        if mode == "mean":
            lengths = starts.diff()
            factor = torch.repeat_interleave(1.0 / lengths.clamp(min=1).float(), lengths)
        indices.append(index.long())
        offsets.append(starts[:-1] + items)
        weights.append(factor)
        grads.append(grad.float())
        items += len(index)
    ends = torch.tensor([items], device=indices[0].device)
    return torch.cat(indices), torch.cat([*offsets, ends]), torch.cat(weights), "sum", torch.cat(grads)
