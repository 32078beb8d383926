"""Optimizers: fused AdamW for dense parameters, rowwise Adagrad for embedding tables.

An embedding table is far larger than everything else, and a batch touches few of its rows. Rowwise Adagrad keeps one
number per row (not per element) and, given sparse gradients, only reads and writes rows that were touched. With g_r the
summed gradient of row r over the batch, D its width:

    h_r <- h_r + |g_r|^2 / D
    w_r <- w_r - lr * g_r / (sqrt(h_r) + eps)

Duplicate ids of a batch are summed first, since the square of a sum is not the sum of squares: sort, then sum segments,
in buffers of the size of the batch. On a GPU, reading how many different ids there were would stall the queue once per
table and step, so there the buffers keep the batch's length. GPU sums use atomics: their last bits vary unless
torch.use_deterministic_algorithms is on.

The weight of an `nn.Embedding` or `nn.EmbeddingBag` built with `sparse=True` is a table; every other parameter is
dense. Low-precision tables (`loka.nn.tables`) have an optimizer of their own with the same rule. Sharded tables of
TorchRec are updated in the backward pass. Weight decay applies to dense parameters with two or more dimensions. Neither
decay nor clipping applies to tables: a sparse gradient has no cheap global norm, and Adagrad already divides by each
row's own history.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loka.kernels.embedding_update import Rule
from loka.nn.table_optimizer import TableOptimizer
from loka.nn.tables import Table
from loka.training.config import TrainConfig

NamedParameters = list[tuple[str, nn.Parameter]]


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row of a [rows, D] table. Takes sparse COO gradients only.

    Args:
        params: tables.
        lr: learning rate.
        eps: added to the root of the accumulator.
        initial: initial value of the accumulators.

    Example:
        >>> embedding = nn.Embedding(100, 16, sparse=True)
        >>> embedding(torch.tensor([3, 7])).sum().backward()
        >>> RowwiseAdagrad([embedding.weight], lr=2e-2).step()
    """

    def __init__(self, params: Iterable[Any], lr: float = 2e-2, *, eps: float = 1e-8, initial: float = 0.0) -> None:
        if not (lr > 0 and eps > 0 and initial >= 0):
            raise ValueError(f"expected lr > 0, eps > 0, initial >= 0; got lr={lr}, eps={eps}, initial={initial}")
        super().__init__(params, {"lr": lr, "eps": eps, "initial": initial})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows that occur in the gradients."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._update(table, table.grad, group)
        return result

    def _update(self, table: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if not grad.is_sparse or table.ndim != 2:
            raise ValueError(
                f"RowwiseAdagrad expected a sparse COO gradient of a [rows, D] table, got "
                f"{'a sparse' if grad.is_sparse else 'a dense'} gradient of shape {tuple(grad.shape)}; "
                "build the embedding with sparse=True and do not tie its weight to a dense layer"
            )
        state = self.state[table]
        if not state:
            state["sum"] = torch.full((table.shape[0],), group["initial"], dtype=torch.float32, device=table.device)
        if grad._nnz() == 0:
            return
        rows, sums = sum_duplicates(grad._indices()[0], grad._values().float())
        history = state["sum"].index_add_(0, rows, sums.square().mean(dim=1))
        update = sums / (history[rows].sqrt() + group["eps"]).unsqueeze(1)
        table.index_add_(0, rows, (update * -group["lr"]).to(table.dtype))


def sum_duplicates(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum `values` [n, D] over equal `rows` [n]. Return the different rows and their sums, as suits the device."""
    ordered, order = rows.sort(stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    if rows.device.type == "cpu":
        return sum_segments(ordered, order, is_first, values)
    return sum_segments_padded(ordered, order, is_first, values)


def sum_segments(ordered: Tensor, order: Tensor, is_first: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return only the different rows.

    A bag per segment takes 0.4 ms where index_add_ takes 17 (40,960 ids of width 32, one core).
    """
    starts = is_first.nonzero().squeeze(1)
    return ordered[starts], F.embedding_bag(order, values, starts, mode="sum")


def sum_segments_padded(ordered: Tensor, order: Tensor, is_first: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different rows first, then a zero sum for every duplicate, so that all sizes are known to the host.

    The zero sums refer to rows that occur anyway, so adding them is harmless: x + -0.0 is bitwise x.
    """
    segment = is_first.cumsum(0) - 1
    sums = torch.zeros_like(values).index_add_(0, segment, values[order])
    return ordered.scatter(0, segment, ordered), sums


def split_parameters(model: nn.Module) -> tuple[NamedParameters, NamedParameters]:
    """Split the parameters of a model into dense ones and embedding tables, by module type.

    Args:
        model: any module.

    Returns:
        Names and parameters of both. Frozen parameters, and those updated in the backward pass, are in neither.

    Example:
        >>> dense, tables = split_parameters(model)
    """
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    # anchors are updated by TableOptimizer
    anchors = {id(module.anchor) for module in model.modules() if isinstance(module, Table)}
    named = [
        (name, p)
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in anchors and not hasattr(p, "_in_backward_optimizers")
    ]
    return (
        [(name, parameter) for name, parameter in named if id(parameter) not in tables],
        [(name, parameter) for name, parameter in named if id(parameter) in tables],
    )


class Optimizers:
    """All optimizers of a model: step, zero_grad, learning rate, and state as named tensors.

    Args:
        model: the model to train.
        config: learning rates, betas and weight decay.

    Example:
        >>> Optimizers(model, TrainConfig()).step()
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        dense, tables = split_parameters(model)
        if not dense and not tables and not any(isinstance(module, Table) for module in model.modules()):
            raise ValueError("the model has no parameter that requires a gradient")
        self.dense = [parameter for _, parameter in dense]
        self._names = {id(parameter): name for name, parameter in dense + tables}
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        low = {name: m for name, m in model.named_modules() if isinstance(m, Table) and m.anchor.requires_grad}
        self._names |= {id(table.anchor): f"{name}.weight" for name, table in low.items()}
        if dense:
            self._parts.append((build_adam(self.dense, config), config.learning_rate))
        if tables:
            rate = config.embedding_learning_rate
            self._parts.append((RowwiseAdagrad([table for _, table in tables], lr=rate), rate))
        if low:
            rate = config.embedding_learning_rate
            self._parts.append((TableOptimizer(model, Rule("rowwise_adagrad", lr=rate), seed=config.seed), rate))

    def add(self, optimizer: Any, rate: float) -> None:
        """Add an optimizer with its peak learning rate. If its `state` is empty, `state_tensors` leaves it out."""
        self._parts.append((optimizer, rate))

    def set_factor(self, factor: float) -> None:
        """Multiply every peak learning rate by `factor`."""
        for optimizer, rate in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for optimizer, _ in self._parts:
            optimizer.step()

    def zero_grad(self) -> None:
        """Discard all gradients."""
        for optimizer, _ in self._parts:
            optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return optimizer state by parameter name: `<parameter>:<slot>`. The tensors are not copied."""
        return {
            f"{self._names[id(parameter)]}:{slot}": value
            for optimizer, _ in self._parts
            for parameter, slots in optimizer.state.items()
            for slot, value in slots.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the result of `state_tensors`. A name that fits no parameter raises."""
        slots: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, slot = key.rpartition(":")
            slots.setdefault(name, {})[slot] = value
        if unknown := sorted(set(slots) - set(self._names.values())):
            raise ValueError(f"optimizer state for parameters this model does not train: {unknown[:5]}")
        for optimizer, _ in self._parts:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if stored := slots.get(self._names[id(parameter)]):
                        # Adam keeps its step counter on the parameter's device only if fused, as built here.
                        optimizer.state[parameter] = {k: v.to(parameter.device).clone() for k, v in stored.items()}
            if isinstance(optimizer, TableOptimizer):
                optimizer.adopt_state()


def build_adam(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """Build AdamW, fused if the device has a fused kernel (one launch instead of a dozen per tensor)."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in {"cpu", "cuda"} and p.is_floating_point() for p in parameters)
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)
