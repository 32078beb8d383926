"""What the ranks of the TorchRec tests run."""

from typing import Any

import torch
import torch.distributed as dist

TABLES = (("first", 40, 64), ("second", 30, 64), ("third", 50, 64))
BATCH = 16


def example(rank: int) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 + rank)
    lengths = torch.randint(0, 5, (len(TABLES) * BATCH,), generator=generator)
    values = [
        torch.randint(0, rows, (int(lengths[i * BATCH : (i + 1) * BATCH].sum()),), generator=generator)
        for i, (_, rows, _) in enumerate(TABLES)
    ]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=[name for name, _, _ in TABLES], values=torch.cat(values), lengths=lengths
    )


def collection() -> Any:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=[n]) for n, r, d in TABLES]
    ebc = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    torch.manual_seed(1)
    for bag in ebc.embedding_bags.values():
        torch.nn.init.normal_(bag.weight)
    return ebc


def plan_of(kind: str, ebc: Any, sharder: Any) -> Any:
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan

    world = dist.get_world_size()
    ways = {
        "table": lambda i: table_wise(rank=i % world),
        "column": lambda i: column_wise(ranks=[(i + 1) % world, i % world]),
        "row": lambda i: row_wise(),
    }
    parts = {name: ways[kind](i) for i, (name, _, _) in enumerate(TABLES)}
    plan = construct_module_sharding_plan(ebc, parts, sharder, local_size=world, world_size=world, device_type="cpu")
    return ShardingPlan(plan={"": plan})


def pooled(kind: str, forward: str | None, backward: str | None, distribute: bool = True) -> dict:
    """One forward and backward of a sharded collection; the embeddings, the weights after one SGD step, and the wire."""
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingEnv

    from loka.comms import Wire
    from loka.comms.torchrec import distribute_rows, make_registry

    class AnyWay(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["table_wise", "column_wise", "row_wise"]

    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    wire = Wire()
    registry = None if forward is None or backward is None else make_registry(forward, backward, wire=wire)
    sharder = AnyWay(
        fused_params={"learning_rate": 1.0, "optimizer": EmbOptimType.EXACT_SGD}, qcomm_codecs_registry=registry
    )
    ebc = collection()
    state = {name: w.clone() for name, w in ebc.state_dict().items()}
    model = DistributedModelParallel(
        ebc, env=ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu"), sharders=[sharder],
        plan=plan_of(kind, ebc, sharder), init_data_parallel=False,
    )  # fmt: skip
    load(model, state)
    if registry is not None and kind == "row" and distribute:
        assert distribute_rows(model, forward, backward, wire=wire) == 1
    by_key = model(example(dist.get_rank())).wait().to_dict()  # sharding orders the keys by rank
    out = torch.cat([by_key[name] for name, _, _ in TABLES], 1)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    (out * weight).sum().backward()
    dense = [
        p for p in model.parameters() if p.grad is not None
    ]  # on the CPU the planner's kernel keeps plain gradients
    if dense:
        torch.optim.SGD(dense, lr=1.0).step()
    return {"out": out.detach(), "weights": gathered(model), "per_element": wire.bytes_per_element, "by_op": wire.by_op}


def load(model: Any, state: dict) -> None:
    """DMP does not carry the weights of an unsharded collection over."""
    for name, sharded in model.state_dict().items():
        full = state[name]
        for shard in sharded.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(full[row : row + rows, column : column + columns])


def gathered(model: Any) -> dict:
    """Every table whole."""
    result = {}
    for name, sharded in model.state_dict().items():
        full = torch.zeros(sharded.size())
        for shard in sharded.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            full[row : row + rows, column : column + columns] = shard.tensor
        dist.all_reduce(full)
        result[name] = full
    return result
