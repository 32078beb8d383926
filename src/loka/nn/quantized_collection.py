"""TorchRec's quantised EmbeddingBagCollection, read into tables of ours.

    tables = take_quantized(collection)                      # the same values, float32
    tables = take_quantized(collection, rows="int8:row")     # rounded once more, to our rows, and said so

TorchRec's int8 and int4 rows are u * scale + shift, with 16-bit scale and shift inside the row; ours have a scale alone. No row format of ours holds those values exactly but float32, so that is the
default; another format is rounded to nearest, and `worst_error` of each table says by how much, beside the largest value.
"""

from typing import Any

import torch
from torch import Tensor

from loka.nn.tables import EmbeddingBag


def take_quantized(collection: Any, *, rows: str = "float32") -> dict[str, EmbeddingBag]:
    """The tables of a quantised collection as frozen tables of ours.

    Args:
        collection: a `torchrec.quant.embedding_modules.EmbeddingBagCollection`.
        rows: format of the rows; only float32 keeps the values as they are.

    Returns:
        A table for each name, with the pooling of the collection; `worst_error` is the largest change of an element.

    Raises:
        ValueError: the collection is not TorchRec's quantised one, or has rows of another kind; with every reason.

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
        table.worst_error = float((table.weight - weight).abs().max()) if weight.numel() else 0.0  # type: ignore[assignment]
        made[config.name] = table.eval().requires_grad_(False)
    return made


def dequantize_collection(collection: Any) -> dict[str, Tensor]:
    """The values of the tables of a quantised collection, as `take_quantized` takes it: float32 [rows, width] by name."""
    modules = getattr(collection, "_emb_modules", None)
    if modules is None or not all(hasattr(module, "split_embedding_weights") for module in modules):
        raise ValueError(
            f"expected TorchRec's quantised EmbeddingBagCollection, got {type(collection).__name__}; "
            "hint: of an unquantised one loka.nn.tables.quantize_tables(model)"
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
