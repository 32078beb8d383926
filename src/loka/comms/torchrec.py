"""Encode the embeddings that ranks exchange in TorchRec.

    wire = Wire()
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=make_registry(wire=wire))
    model = DistributedModelParallel(model, sharders=[sharder], ...)
    distribute_rows(model, wire=wire)            # row-wise sharded tables: their reduce-scatter

Table-wise and column-wise tables exchange pooled embeddings by all-to-all, which TorchRec encodes with a codec of its
registry. Row-wise tables reduce-scatter partial sums. There TorchRec would add encoded bytes, or replace the codec by
another. So `distribute_rows` replaces its output distribution by ours: an all-to-all of encoded partial sums, added in
float32, and an all-gather of encoded gradients in backward. Until it is called, the registry's entry for reduce-scatter
raises.

Sequence embeddings (all-to-all of single rows) use the same codecs. Not supported are variable batch sizes per feature
for row-wise tables, and splits of the batch that are not a multiple of the codec's block where TorchRec does not tell
the codec its splits.

TorchRec's own QCommsConfig replaces what it does not support, with a warning. `refuse_substitutions` raises instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loka.comms.collectives import Wire, gather_tensors
from loka.kernels.wire.codec import Codec, parse_codec

# On a CPU torchrec would bring the GPU build of FBGEMM, which cannot be imported there.
INSTALL = (
    "pip install 'loka[torchrec]'; on a machine without a GPU: pip install fbgemm-gpu-cpu==1.8.0 "
    "torchmetrics==1.0.3 tensordict pyre-extensions, then pip install --no-deps torchrec==1.8.0"
)
FORWARD, BACKWARD = "e4m3:1x32:e8m0", "e5m2:1x32:e8m0"


def _refuse_stochastic(*codecs: Codec) -> None:
    if stochastic := [str(codec) for codec in codecs if codec.is_stochastic]:
        raise ValueError(
            f"{', '.join(stochastic)}: TorchRec tells a codec neither step nor table, so stochastic rounding could not be repeated"
        )


class EmbeddingCodec:
    """A codec with the interface of TorchRec's registry, for one direction of one kind of collective."""

    def __init__(self, codec: Codec, op: str, wire: Wire) -> None:
        _refuse_stochastic(codec)
        self.codec, self.op, self.wire = codec, op, wire

    def encode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        """Encode a tensor to bytes."""
        data = self.codec.encode(input_tensor)
        self.wire.add(self.op, input_tensor.numel(), data.numel())
        return data

    def decode(self, input_grad: Tensor, ctx: Any = None) -> Tensor:
        """Decode bytes to float32."""
        return self.codec.decode(input_grad.view(-1), self._elements(input_grad.numel()))

    def _elements(self, size: int) -> int:
        block = self.codec.block
        return size * block // self.codec.size(block)  # only whole blocks: `calc_quantized_size` refuses others

    @property
    def quantized_dtype(self) -> torch.dtype:
        """Type of the encoded data."""
        return torch.uint8

    def calc_quantized_size(self, input_len: int, ctx: Any = None) -> int:
        """Return the bytes of one rank's share."""
        if input_len % self.codec.block:
            raise ValueError(
                f"{self.op} sends a rank {input_len} elements, which {self.codec} cannot cut into blocks of {self.codec.block}; "
                "hint: batch x width must be a multiple of it on every rank, or choose a smaller block (drop the last, smaller batch)"
            )
        return self.codec.size(input_len)

    def create_context(self) -> None:
        """Return None: the bytes need no context."""

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: Any
    ) -> tuple[int, int]:
        """Return the size without padding: backward has none, and it would send needless bytes."""
        return input_tensor.shape[0] if input_tensor.dim() == 1 else input_tensor.shape[1], 0


class _RefusingCodec(EmbeddingCodec):
    """Raises where TorchRec would add encoded bytes."""

    def encode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        raise ValueError(
            f"a row-wise table is reduce-scattered by TorchRec, which cannot add {self.codec}; hint: "
            "loka.comms.torchrec.distribute_rows(model)"
        )


def make_registry(
    forward: str | Codec = FORWARD, backward: str | Codec = BACKWARD, *, wire: Wire | None = None
) -> dict[str, Any]:
    """Make codecs for a TorchRec sharder's `qcomm_codecs_registry`.

    Args:
        forward: codec of embeddings.
        backward: codec of their gradients.
        wire: counts what is sent.

    Returns:
        An entry for each of TorchRec's collectives.

    Raises:
        ValueError: TorchRec is not installed, or a codec rounds stochastically.

    Example:
        >>> sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=make_registry("e4m3:1x32:e8m0", "e5m2:1x32:e8m0"))
    """
    types = require("torchrec.distributed.types")
    wire = Wire() if wire is None else wire
    pair = parse_codec(forward), parse_codec(backward)
    registry: dict[str, Any] = {}
    for op in types.CommOp:
        kind = _RefusingCodec if op == types.CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER else EmbeddingCodec
        ahead, back = (
            kind(codec, f"{op.value} {way}", wire) for codec, way in zip(pair, ("forward", "backward"), strict=True)
        )
        registry[op.name] = types.QuantizedCommCodecs(forward=ahead, backward=back)
    return registry


class _ReduceRows(torch.autograd.Function):
    """Forward: all-to-all of encoded partial sums, added in float32. Backward: all-gather of the encoded gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        partial: Tensor,
        splits: Sequence[int],
        codecs: tuple[Codec, Codec],
        group: Any,
        divide: bool,
        wire: Wire,
    ) -> Tensor:
        rank, width, codec = dist.get_rank(group), partial.shape[1], codecs[0]
        ctx.splits, ctx.codec, ctx.group, ctx.divide, ctx.wire = splits, codecs[1], group, divide, wire
        pieces = [codec.encode(piece) for piece in torch.split(partial, list(splits))]
        sent, mine = torch.cat(pieces), codec.size(splits[rank] * width)
        received = sent.new_empty(mine * len(splits))
        dist.all_to_all_single(received, sent, [mine] * len(splits), [p.numel() for p in pieces], group=group)
        wire.add("rows forward", partial.numel(), sent.numel())
        total = partial.new_zeros(splits[rank] * width, dtype=torch.float32)
        for data in torch.split(received, mine):
            total += codec.decode(data, total.numel())
        total = total.view(splits[rank], width)
        return total if total.dtype == partial.dtype else total.to(partial.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (grad,) = grads
        codec, splits, width = ctx.codec, ctx.splits, grad.shape[1]
        sizes = [codec.size(rows * width) for rows in splits]
        data = codec.encode(grad)
        sent = torch.nn.functional.pad(data, (0, max(sizes) - data.numel()))  # all-gather needs equal lengths
        received = sent.new_empty(len(splits) * sent.numel())
        gather_tensors(received, sent, ctx.group)
        ctx.wire.add("rows backward", grad.numel(), data.numel())
        parts = [
            codec.decode(bytes_[:size], rows * width, grad.dtype).view(rows, width)
            for bytes_, size, rows in zip(received.view(len(splits), -1), sizes, splits, strict=True)
        ]
        whole = torch.cat(parts)
        return whole / len(splits) if ctx.divide else whole, None, None, None, None, None


class RowDistribution(nn.Module):
    """The encoded output distribution of row-wise sharded tables. `distribute_rows` installs it."""

    def __init__(self, group: Any, codecs: tuple[Codec, Codec], wire: Wire) -> None:
        super().__init__()
        self.group, self.codecs, self.wire = group, codecs, wire

    def forward(self, local_embs: Tensor, sharding_ctx: Any = None) -> Any:
        """Reduce local_embs [sum of all ranks' batches, D]; returns an awaitable of this rank's [batch, D]."""
        comm_ops, types = require("torchrec.distributed.comm_ops"), require("torchrec.distributed.types")
        if sharding_ctx is not None and sharding_ctx.variable_batch_per_feature:
            raise ValueError(
                "encoded row-wise tables take one batch size for all features; hint: the codec fp32 through TorchRec's own path"
            )
        world = dist.get_world_size(self.group)
        splits = (
            tuple(sharding_ctx.batch_size_per_rank)
            if sharding_ctx is not None and sharding_ctx.batch_size_per_rank
            else (local_embs.shape[0] // world,) * world
        )
        divide = comm_ops.get_gradient_division()
        reduced = _ReduceRows.apply(local_embs, splits, self.codecs, self.group, divide, self.wire)  # type: ignore[no-untyped-call]
        return types.NoWait(reduced)

    def extra_repr(self) -> str:
        """Show the codecs."""
        return f"forward={self.codecs[0]}, backward={self.codecs[1]}"


def distribute_rows(
    model: nn.Module, forward: str | Codec = FORWARD, backward: str | Codec = BACKWARD, *, wire: Wire | None = None
) -> int:
    """Encode what row-wise sharded tables exchange, in a model that DistributedModelParallel has sharded.

    Args:
        model: the sharded model.
        forward: codec of partial sums.
        backward: codec of gradients.
        wire: counts what is sent.

    Returns:
        The number of output distributions that were replaced.

    Example:
        >>> distribute_rows(dmp_model, "e4m3:1x32:e8m0", "e5m2:1x32:e8m0")
        1
    """
    rows = require("torchrec.distributed.sharding.rw_sharding")
    codecs, wire = (parse_codec(forward), parse_codec(backward)), Wire() if wire is None else wire
    _refuse_stochastic(*codecs)
    replaced = 0
    for module in model.modules():
        dists: Any = getattr(module, "_output_dists", ())
        for i, old in enumerate(dists):
            if isinstance(old, rows.RwPooledEmbeddingDist):
                dists[i] = RowDistribution(old._pg, codecs, wire)
                replaced += 1
    return replaced


def refuse_substitutions(config: Any, *, device: torch.device) -> None:
    """Raise if TorchRec would run another precision than its QCommsConfig requests.

    Args:
        config: a `torchrec.distributed.fbgemm_qcomm_codec.QCommsConfig`.
        device: device of the collectives.

    Raises:
        ValueError: lists every substitution that would happen.

    Example:
        >>> refuse_substitutions(QCommsConfig(forward_precision=CommType.BF16), device=torch.device("cpu"))
        ValueError: TorchRec would not run what was asked: forward bf16 on gloo becomes fp16; ...
    """
    problems = []
    for way in ("forward", "backward"):
        kind = str(getattr(config, f"{way}_precision"))
        if kind == "bf16" and device.type == "cpu":
            problems.append(f"{way} bf16 on gloo becomes fp16")
        if kind in ("fp8", "mx4"):
            instead = "fp16" if way == "forward" or device.type == "cpu" else "bf16"
            problems.append(f"{way} {kind} of row-wise tables (reduce-scatter) becomes {instead}")
            if device.type == "cpu":
                problems.append(f"{way} {kind} has no CPU kernel and fails in the first batch")
        if kind == "int8":
            problems.append(f"{way} int8 of row-wise tables (reduce-scatter) adds up encoded bytes")
    if problems:
        raise ValueError(
            f"TorchRec would not run what was asked: {'; '.join(problems)}; hint: loka.comms.torchrec.make_registry and distribute_rows"
        )


def refuse_rounding(data_type: str, *, stochastic: bool, device: torch.device) -> None:
    """Raise if FBGEMM's fused optimizers would round rows differently from what `stochastic_rounding` requests.

    Args:
        data_type: type of a table's rows, as TorchRec spells it: FP32, FP16, BF16, FP8, INT8, ...
        stochastic: whether the sharder's `fused_params` request stochastic rounding.
        device: device of the table.

    Raises:
        ValueError: the rows would be rounded to nearest, or cannot be trained.

    Example:
        >>> refuse_rounding("FP16", stochastic=True, device=torch.device("cpu"))
        ValueError: FBGEMM would not run what was asked: ...
    """
    kind, problems = data_type.upper(), []
    if kind not in ("FP32", "FP16", "FP8"):
        problems.append(f"it trains no {kind} rows")
    elif stochastic and kind == "FP16" and device.type == "cpu":
        problems.append("FP16 rows on the CPU are rounded to nearest, whatever stochastic_rounding says")
    elif stochastic and kind == "FP8":
        problems.append("FP8 rows are rounded to nearest, whatever stochastic_rounding says")
    if problems:
        raise ValueError(
            f"FBGEMM would not run what was asked: {'; '.join(problems)}; hint: loka.nn.tables.quantize_tables(model, rows='int8:row')"
        )


def require(module: str) -> Any:
    """Import a module of TorchRec, or raise a ValueError that says how to install it."""
    from importlib import import_module

    try:
        return import_module(module)
    except Exception as error:  # a broken install raises anything from ImportError to OSError
        raise ValueError(
            f"TorchRec cannot be imported ({type(error).__name__}: {error}); install: {INSTALL}"
        ) from error
