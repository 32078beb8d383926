"""Convert TorchRec's quantized EmbeddingBagCollection to tables of this package.

    tables = take_quantized(collection)                      # the same values, in float32
    tables = take_quantized(collection, rows="int8:row")     # rounded again, to our row format

TorchRec's int8 and int4 rows are u * scale + shift, with a 16-bit scale and shift inside the row; ours have only a
scale. Of our row formats only float32 can hold those values exactly, so it is the default. Other formats are rounded to
nearest, and `worst_error` of each table is the largest change.
"""

from typing import Any

import torch
from torch import Tensor

from loka.nn.tables import EmbeddingBag


def take_quantized(collection: Any, *, rows: str = "float32") -> dict[str, EmbeddingBag]:
    """Return the tables of a quantized collection as frozen tables of this package.

    Args:
        collection: a `torchrec.quant.embedding_modules.EmbeddingBagCollection`.
        rows: format of the rows; only float32 keeps the exact values.

    Returns:
        A table for each name, with the pooling of the collection; `worst_error` is the largest change of an element.

    Raises:
        ValueError: the collection is not TorchRec's quantized one, or has rows of an unsupported type.

    Example:
        >>> tables = take_quantized(quantized_ebc, rows="int8:row")
        >>> tables["item"](ids, offsets).shape
        torch.Size([64, 128])
    """
    weights = dequantize_collection(collection)
    made: dict[str, EmbeddingBag] = {}
    for config in collection.embedding_bag_configs():
        weight = weights[config.name]
        table = EmbeddingBag(
            *weight.shape, mode=config.pooling.value.lower(), rows=rows, weight=weight, name=config.name
        )
        table.worst_error = float((table.rows.dequantize() - weight).abs().max()) if weight.numel() else 0.0  # type: ignore[assignment]
        made[config.name] = table.eval().requires_grad_(False)
    return made


def dequantize_collection(collection: Any) -> dict[str, Tensor]:
    """Return the dequantized tables of a collection, float32 [rows, width] by name."""
    modules = getattr(collection, "_emb_modules", None)
    if modules is None or not all(hasattr(module, "split_embedding_weights") for module in modules):
        raise ValueError(
            f"expected TorchRec's quantized EmbeddingBagCollection, got {type(collection).__name__}; "
            "hint: for an unquantized one use loka.nn.tables.quantize_tables(model)"
        )
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for module in modules:
        parts = module.split_embedding_weights(split_scale_shifts=True)
        for (name, _, width, kind, _), (codes, scales) in zip(module.embedding_specs, parts, strict=True):
            read = _READERS.get(kind.value)
            if read is None:
                problems.append(f"{name} has rows of {kind.value}")
            else:
                found[name] = read(codes, scales)[:, :width].contiguous()
    if problems:
        raise ValueError(f"only rows of {', '.join(_READERS)} can be read: {'; '.join(problems)}")
    return found


def _affine(codes: Tensor, scales: Tensor) -> Tensor:
    pair = scales.contiguous().view(torch.float16).float()
    return codes.float() * pair[:, :1] + pair[:, 1:]


def _nibbles(codes: Tensor, scales: Tensor) -> Tensor:
    return _affine(torch.stack((codes & 15, codes >> 4), -1).flatten(1), scales)


_READERS: dict[str, Any] = {
    "fp32": lambda codes, _: codes.contiguous().view(torch.float32).clone(),
    "fp16": lambda codes, _: codes.contiguous().view(torch.float16).float(),
    "int8": _affine,
    "int4": _nibbles,
}
