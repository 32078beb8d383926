"""Distribute a model over ranks: tables sharded by TorchRec, the dense part sharded by FSDP2 or replicated by DDP.

    spread = spread_model(model, Distribution(sharding="row", dense="fsdp"), learning_rate=0.02, device=device)
    spread.model(batch).sum().backward()        # tables are updated in the backward pass, by FBGEMM's rowwise Adagrad

    sharding    table    each table is on one rank; the largest first, on the rank that holds least
                row      every rank holds an equal section of each table's rows
                column   `columns` sections of each table's columns, on as many ranks. Their number does not depend on
                         the number of ranks, so a checkpoint fits any. Rowwise Adagrad keeps one number for each
                         section of a row, which differs from a single process
                None     every rank holds all tables, in any row format (`loka.nn.tables`)

`EmbeddingTables` (of a Ranker) becomes one EmbeddingBagCollection with the same values. A user's own
EmbeddingBagCollections are sharded as they are. Other kinds of tables are refused under `sharding`: they would be
replicated on every rank, or not trained at all.

If the codec of embeddings needs whole blocks, a rank's share of a batch is padded with empty bags and cut again, so any
batch can be sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loka.comms import StepClock, Wire, parse_codec, quantize_ddp, quantize_fsdp
from loka.comms.torchrec import distribute_rows, make_registry, require
from loka.kernels.embedding_update import trainable
from loka.nn.embedding import EmbeddingTables
from loka.nn.tables import Table, quantize_tables
from loka.nn.wrapping import unwrap

SHARDINGS = ("table", "row", "column")
DENSE = ("fsdp", "ddp")


@dataclass(frozen=True)
class Distribution:
    """How a model is placed on ranks, and what they send each other.

    Args:
        rows: row format of tables that every rank holds.
        sharding: how TorchRec shards the tables: table, row or column; None: every rank holds all of them.
        columns: number of column sections, for `column`.
        dense: `fsdp` shards the dense part, `ddp` replicates it.
        collectives: codec of dense weights and gradients, or two separated by a comma, weights first (FSDP2): an error
            of a weight affects every prediction, that of a gradient one step. None sends them unencoded.
        embeddings: codecs of sharded embeddings and of their gradients; None sends them unencoded.

    Example:
        >>> Distribution(sharding="row", dense="ddp", embeddings=("e4m3:1x32:e8m0", "e5m2:1x32:e8m0"))
    """

    rows: str = "float32"
    sharding: str | None = None
    columns: int = 2
    dense: str = "fsdp"
    collectives: str | None = None
    embeddings: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.sharding is not None and self.sharding not in SHARDINGS:
            problems.append(f"sharding is one of {', '.join(SHARDINGS)}, got {self.sharding!r}")
        if self.dense not in DENSE:
            problems.append(f"dense is one of {', '.join(DENSE)}, got {self.dense!r}")
        if self.columns < 1:
            problems.append(f"columns is at least 1, got {self.columns}")
        if self.sharding is not None and self.rows != "float32":
            problems.append(f"TorchRec's kernels train float32 rows only, not {self.rows}; hint: sharding=None")
        if self.sharding is None and self.embeddings is not None:
            problems.append("embeddings are sent only where tables are sharded; hint: sharding='row'")
        try:
            trainable(self.rows)
        except ValueError as error:
            problems.append(str(error))
        dense = [] if self.collectives is None else self.collectives.split(",")
        if len(dense) > (2 if self.dense == "fsdp" else 1):
            problems.append(
                f"collectives are one codec, or two under FSDP2 (weights, gradients), got {self.collectives!r} with "
                f"dense={self.dense!r}"
            )
        for text in (*dense, *(self.embeddings or ())):
            try:
                parse_codec(text)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError(f"this distribution cannot be honoured: {'; '.join(problems)}")

    @property
    def needs_tables(self) -> bool:
        """Whether tables are replaced or sharded."""
        return self.rows != "float32" or self.sharding is not None


@dataclass
class Spread:
    """A distributed model."""

    model: nn.Module  # what to call: DistributedModelParallel, DistributedDataParallel, or the model itself under FSDP2
    fused: FusedTables | None = None  # optimizer of sharded tables; None if there are none
    wire: Wire | None = None  # counts what the dense part sends, if it is encoded
    embedding_wire: Wire | None = None  # counts what sharded tables send, if it is encoded


def spread_model(
    model: nn.Module,
    how: Distribution,
    *,
    learning_rate: float,
    device: torch.device,
    clock: StepClock,
    tables: Mapping[str, str] | None = None,
    whole: bool = False,
) -> Spread:
    """Distribute a model over the ranks of the default process group, in place.

    `tables` are row formats that a plan gives to tables by name; other tables have that of the distribution. `whole`
    replaces no table and shards the dense part as one unit. Raises ValueError, with the reasons, if tables cannot be
    placed as requested.
    """
    if whole:
        spread = Spread(model)
    elif how.sharding is None:
        planned = tables or {}
        for rows in dict.fromkeys([*planned.values(), how.rows]):
            quantize_tables(model, rows=rows, filter_fn=lambda _, name, rows=rows: planned.get(name, how.rows) == rows)  # type: ignore[misc]
        spread = Spread(model)
    else:
        spread = _shard_tables(model, how, learning_rate, device)
    if how.dense == "fsdp":
        shard_dense(unwrap(model), whole=whole)
        if how.collectives is not None:
            weights, _, gradients = how.collectives.partition(",")
            spread.wire = quantize_fsdp(
                unwrap(model), all_gather=weights, reduce_scatter=gradients or weights, clock=clock
            )
        return spread
    copies = _copy_dense(spread, device)
    if how.collectives is not None:
        spread.wire = quantize_ddp(copies, how.collectives, clock=clock)
    return spread


def shard_dense(model: nn.Module, *, whole: bool = False) -> None:
    """Shard everything but tables: each child on its own, then the rest.

    With `whole`, as one unit, for a model that reads the parameters of a child outside of its forward.
    """
    from torch.distributed.fsdp import fully_shard

    kept = set(_table_parameters(model))
    for child in () if whole else model.children():
        if any(p not in kept for p in child.parameters()) and not isinstance(child, Table):
            fully_shard(child, ignored_params={p for p in child.parameters() if p in kept})
    fully_shard(model, ignored_params=kept)


def _table_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, Table):
            yield module.anchor
        elif any(kind.__name__ == "ShardedEmbeddingBagCollection" for kind in type(module).__mro__):
            yield from module.parameters()


def _copy_dense(spread: Spread, device: torch.device) -> DistributedDataParallel:
    """Replicate the dense part on every rank.

    `find_unused_parameters` keeps DDP from rebuilding its buckets, so that the first step after a resume adds in the
    same order as the others.
    """
    ids = None if device.type == "cpu" else [device]
    if spread.fused is None:
        spread.model = DistributedDataParallel(spread.model, device_ids=ids, find_unused_parameters=True)
        return spread.model
    dmp: Any = spread.model
    dmp.init_data_parallel()
    copies = dmp._dmp_wrapped_module
    if not isinstance(copies, DistributedDataParallel):
        raise ValueError("the model has no dense parameter to copy: every parameter is in a sharded table")
    return copies


class FusedTables:
    """TorchRec's fused optimizer with the interface that `Optimizers` expects.

    The backward pass updates the tables; `zero_grad`, called before it, sets its learning rate.
    """

    def __init__(self, fused: Any, learning_rate: float) -> None:
        self.fused = fused
        self.param_groups: list[dict[str, Any]] = [{"lr": learning_rate, "params": []}]
        self.state: dict[Any, Any] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the learning rate of the next backward pass."""
        for group in self.fused.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        self.fused.zero_grad()

    def step(self) -> None:
        """No-op: the backward pass has updated the tables."""

    def tensors(self) -> dict[str, Any]:
        """Return the optimizer state by `<table>:<slot>`, sharded like the tables and not copied."""
        state = self.fused.state_dict()["state"]
        return {f"{name}:{slot}": tensor for name, slots in state.items() for slot, tensor in slots.items()}


class CollectionTables(nn.Module):
    """`EmbeddingTables` as one EmbeddingBagCollection: a table per field, and all features of a batch in one call.

    `features` are (feature, field whose table it reads), in the order of `embed`. Batches are padded to `multiple`.
    """

    def __init__(self, tables: EmbeddingTables, features: list[tuple[str, str]], multiple: int) -> None:
        super().__init__()
        configs, modules = require("torchrec.modules.embedding_configs"), require("torchrec.modules.embedding_modules")
        by_field: dict[str, list[str]] = {name: [] for name in tables.names}
        for feature, field in features:
            by_field[field].append(feature)
        self.names, self.width, self.multiple = tables.names, tables.width, multiple
        self.keys = [feature for feature, _ in features]
        self.fields = len(tables.names)
        self.sizes = dict(zip(tables.names, tables.sizes, strict=True))
        self.field_of = dict(features)
        made = [
            configs.EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=tables.width, feature_names=by_field[name],
                pooling=configs.PoolingType.MEAN,
            )
            for name, rows in self.sizes.items() if by_field[name]
        ]  # fmt: skip
        self.collection = modules.EmbeddingBagCollection(tables=made, device=torch.device("meta"))

    def embed(self, ids: Tensor, bags: list[tuple[str, Tensor, Tensor]]) -> list[Tensor]:
        """Look up a batch, see `EmbeddingTables.embed`."""
        batch, n = ids.shape[0], ids.shape[1]
        fill = -batch % self.multiple
        lengths = [torch.ones(batch, dtype=torch.int64, device=ids.device)] * n
        lengths += [offsets.diff() for _, _, offsets in bags]
        values = [ids.t().reshape(-1), *(items for _, items, _ in bags)]
        self._check(values[0].view(n, -1), [items for _, items, _ in bags])
        padded = [nn.functional.pad(part, (0, fill)) for part in lengths]
        jagged = require("torchrec.sparse.jagged_tensor").KeyedJaggedTensor(
            keys=self.keys, values=torch.cat(values), lengths=torch.cat(padded)
        )
        found = self.collection(jagged).to_dict()
        return [found[key][:batch].unsqueeze(1) for key in self.keys]

    def _check(self, ids: Tensor, bags: list[Tensor]) -> None:
        if ids.is_cuda:
            return
        for key, values in zip(self.keys, [*ids, *bags], strict=True):
            rows = self.sizes[self.field_of[key]]
            if values.numel() and (int(values.min()) < 0 or int(values.max()) >= rows):
                raise ValueError(
                    f"feature {key!r} has ids {int(values.min())} to {int(values.max())}, but its table has ids 0 to "
                    f"{rows - 1}"
                )


def _shard_tables(model: nn.Module, how: Distribution, learning_rate: float, device: torch.device) -> Spread:
    """Wrap the model in DistributedModelParallel, shard its tables and copy their values."""
    assert how.sharding is not None
    parallel, types = require("torchrec.distributed.model_parallel"), require("torchrec.distributed.types")
    block = math.lcm(*(parse_codec(text).block for text in how.embeddings or ("fp32",)))
    values = _collect(model, block, how.columns if how.sharding == "column" else 1)
    wire = None if how.embeddings is None else Wire()
    sharder = _make_sharder(how, learning_rate, wire)
    plan = types.ShardingPlan(plan={path: _plan(model.get_submodule(path), how, sharder, device) for path in values})
    dmp = parallel.DistributedModelParallel(
        model, env=types.ShardingEnv.from_process_group(dist.group.WORLD), device=device, sharders=[sharder], plan=plan,
        init_data_parallel=False, init_parameters=False,
        data_parallel_wrapper=parallel.DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True),
    )  # fmt: skip
    _fill(dmp, {f"{path}.embedding_bags.{t}.weight": w for path, own in values.items() for t, w in own.items()})
    if how.embeddings is not None and how.sharding == "row":
        distribute_rows(dmp, *how.embeddings, wire=wire)
    return Spread(dmp, FusedTables(dmp.fused_optimizer, learning_rate), embedding_wire=wire)


def _collect(model: nn.Module, block: int, columns: int) -> dict[str, dict[str, Tensor]]:
    """Replace EmbeddingTables by collections. Return the values of each collection's tables, by its name.

    Batches are padded so that ranks send whole blocks even of the narrowest section of a table.
    """
    modules = require("torchrec.modules.embedding_modules")
    own = {name: m for name, m in model.named_modules() if isinstance(m, modules.EmbeddingBagCollection)}
    stacked = {name: m for name, m in model.named_modules() if isinstance(m, EmbeddingTables)}
    inside = tuple(f"{name}." for name in (*own, *stacked))
    other = [
        f"{name} is an {type(m).__name__}"
        for name, m in model.named_modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag | Table) and not name.startswith(inside)
    ]
    refused = [f"{name}: {reason}" for name, m in stacked.items() for reason in _refuse_tables(model, name, m)]
    if other or refused or not (own or stacked):
        seen = "; ".join([*other, *refused]) or "the model has no table"
        raise ValueError(
            f"tables cannot be sharded: {seen}; expected the EmbeddingTables of a Ranker, or TorchRec's EmbeddingBagCollection"
        )
    values = {
        name: {t.name: m.embedding_bags[t.name].weight.detach().clone() for t in m.embedding_bag_configs()}
        for name, m in own.items()
    }
    for name, tables in stacked.items():
        parent, _, child = name.rpartition(".")
        ranker: Any = model.get_submodule(parent)
        made = CollectionTables(tables, _features(ranker), block // math.gcd(block, tables.width // columns))
        parts = torch.split(tables.table.weight.detach(), list(tables.sizes))
        setattr(ranker, child, made)
        values[f"{name}.collection"] = {
            t: part.clone() for t, part in zip(tables.names, parts, strict=True) if t in made.collection.embedding_bags
        }
    return values


def _refuse_tables(model: nn.Module, name: str, tables: EmbeddingTables) -> Iterator[str]:
    parent: Any = model.get_submodule(name.rpartition(".")[0])
    if not hasattr(parent, "schema") or not hasattr(parent, "core"):
        yield f"it belongs to a {type(parent).__name__}, whose features are unknown"
    elif parent.core.takes_sequence:
        yield f"{type(parent.core).__name__} reads single items of a history, and pooled tables have none"
    if isinstance(tables.table, Table):
        yield f"its rows are {tables.table.kind}, and TorchRec's kernels train float32 rows only"
    for field in tables.names:
        if "." in field:
            yield f"the name of field {field!r} has a dot, which TorchRec cannot keep"


def _features(ranker: Any) -> list[tuple[str, str]]:
    """Return what a Ranker looks up, in order: each categorical field, then each history, which may share a table."""
    schema = ranker.schema
    return [(f.name, f.name) for f in schema.categorical] + [(s.name, s.shares or s.name) for s in schema.sequences]


def _make_sharder(how: Distribution, learning_rate: float, wire: Wire | None) -> Any:
    """Make a sharder that allows every kind of sharding on every device; TorchRec's allows row-wise on GPUs only."""
    optimizer = require("fbgemm_gpu.split_embedding_configs").EmbOptimType.EXACT_ROWWISE_ADAGRAD
    base = require("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder
    ways = [f"{way}_wise" for way in SHARDINGS]
    methods: dict[str, Callable[..., list[str]]] = {
        "sharding_types": lambda self, device: ways,
        "compute_kernels": lambda self, sharding, device: ["fused"],
    }
    registry = None if how.embeddings is None else make_registry(*how.embeddings, wire=wire)
    fused = {"learning_rate": learning_rate, "optimizer": optimizer, "eps": 1e-8}
    return type("AnySharder", (base,), methods)(fused_params=fused, qcomm_codecs_registry=registry)


def _plan(collection: Any, how: Distribution, sharder: Any, device: torch.device) -> Any:
    ways, world = require("torchrec.distributed.sharding_plan"), dist.get_world_size()
    tables = {t.name: (t.num_embeddings, t.embedding_dim) for t in collection.embedding_bag_configs()}
    narrow = [f"{name} has {width}" for name, (_, width) in tables.items() if width % (4 * how.columns)]
    if how.sharding == "column" and narrow:
        raise ValueError(
            f"{how.columns} sections of columns, each a multiple of 4 (FBGEMM), do not fit: {', '.join(narrow)} columns"
        )
    held, parts = [0] * world, {}
    for i, name in enumerate(sorted(tables, key=lambda name: -math.prod(tables[name]))):
        if how.sharding == "row":
            parts[name] = ways.row_wise(compute_kernel="fused")
        elif how.sharding == "column":
            ranks = [(i + j) % world for j in range(how.columns)]
            parts[name] = ways.column_wise(ranks=ranks, compute_kernel="fused")
        else:
            rank = held.index(min(held))
            held[rank] += math.prod(tables[name])
            parts[name] = ways.table_wise(rank=rank, compute_kernel="fused")
    parts = {name: parts[name] for name in tables}  # back to the order of the collection
    return ways.construct_module_sharding_plan(
        collection, parts, sharder, local_size=world, world_size=world, device_type=device.type
    )


@torch.no_grad()
def _fill(dmp: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy values into the shards: DistributedModelParallel does not copy those of an unsharded collection."""
    held = dmp.state_dict()
    for name, whole in values.items():
        for shard in held[name].local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(whole[row : row + rows, column : column + columns])
