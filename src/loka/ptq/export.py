"""Export the quantized model in the layout of compressed-tensors: a folder with `config.json` and `model.safetensors`.

    weights per channel, activations per token       strategies "channel" and "token"
    weights 128x128, activations 1x128               strategies "block" [128, 128] and "group" 128

Every target in this layout is a two-dimensional weight, so a layer of experts becomes one linear per expert: `ffn.down`
[E, N, K] is written as `ffn.down.0.weight` ... with its own scale. What the layout cannot express (formats other than
E4M3, power-of-two or static scales, other blocks) raises an error that names the site. The config describes how tensors
are stored; the architecture is this library's, so another engine must implement it.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from loka.formats import E4M3, ROW, Block
from loka.kernels.scaled_mm import GemmWay
from loka.ptq.chains import narrowed
from loka.ptq.checkpoint import refuse_unpacked
from loka.ptq.modules import QuantizedExperts, QuantizedLinear
from loka.ptq.quantizing import Summary
from loka.records import replacing

_BASE = {"num_bits": 8, "type": "float", "symmetric": True}
_SCHEMES: dict[tuple[Block, Block], tuple[dict[str, Any], dict[str, Any]]] = {
    (ROW, ROW): ({**_BASE, "strategy": "channel", "dynamic": False}, {**_BASE, "strategy": "token", "dynamic": True}),
    (Block(1, 128), Block(128, 128)): (
        {**_BASE, "strategy": "block", "block_structure": [128, 128], "dynamic": False},
        {**_BASE, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
}


def quantization_config(model: nn.Module, summary: Summary) -> dict[str, Any]:
    """Return the `quantization_config` for config.json: one group per pair of Specs, and the sites that are ignored.

    Args:
        model: a model quantized with `quantize`.
        summary: the summary that `quantize` returned.

    Returns:
        The value of `quantization_config`.

    Raises:
        ValueError: the layout does not support a pair of Specs.

    Example:
        >>> quantization_config(model, summary)["format"]
        'float-quantized'
    """
    groups: dict[tuple[Block, Block], list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedExperts):
            key = _scheme(name, module.bound)
            experts = module.experts if isinstance(module, QuantizedExperts) else None
            groups.setdefault(key, []).extend([name] if experts is None else [f"{name}.{e}" for e in range(experts)])
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {"targets": targets, "weights": _SCHEMES[key][0], "input_activations": _SCHEMES[key][1]}
            for i, (key, targets) in enumerate(groups.items())
        },
        "ignore": list(summary.kept),
    }


def _scheme(name: str, operands: GemmWay) -> tuple[Block, Block]:
    key = (operands.a.block, operands.b.block)
    plain = all(
        s.format == E4M3 and s.scale == "f32" and s.mode == "dynamic" and s.rounding == "nearest"
        for s in (operands.a, operands.b)
    )
    if key not in _SCHEMES or not plain:
        raise ValueError(f"{name}: {operands.a}@{operands.b} has no spelling in the compressed-tensors layout")
    return key


def export_compressed_tensors(
    model: nn.Module, summary: Summary, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors into a folder, in the layout of compressed-tensors.

    Args:
        model: a model quantized with `quantize`.
        summary: the summary that `quantize` returned.
        folder: the folder to write to; created if missing.
        dtype: the dtype of floating-point tensors that are not quantized.

    Raises:
        ValueError: the layout does not support how a site runs; nothing was written.

    Example:
        >>> loka.ptq.export_compressed_tensors(model, summary, "for_the_engine")
    """
    target = Path(folder)
    refuse_unpacked(model, summary, chains=False)
    config = quantization_config(model, summary)  # raises before anything is written
    target.mkdir(parents=True, exist_ok=True)
    experts = {name for name, m in model.named_modules() if isinstance(m, QuantizedExperts)}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        site, _, kind = name.rpartition(".")
        if site in experts:
            tensors |= {f"{site}.{e}.{kind}": part.cpu().clone() for e, part in enumerate(tensor.unbind(0))}
        else:
            tensors[name] = narrowed(name, tensor, dtype)
    with replacing(target / "model.safetensors") as written:
        save_file(tensors, written, metadata={"format": "pt"})
    body = {"architectures": [summary.record.model], "torch_dtype": str(dtype).removeprefix("torch.")}
    (target / "config.json").write_text(json.dumps(body | {"quantization_config": config}, indent=1) + "\n")
