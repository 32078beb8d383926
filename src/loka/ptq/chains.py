"""Save and restore frozen chains.

A chain's weights are stored as they are multiplied: in FP8 with one scale. The scales between its layers follow from
the magnitudes in its unit. The 16-bit weights are not stored: a loaded chain has dequantized FP8 values in their place
and cannot be reverted.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor, nn

from loka.formats import QTensor
from loka.lowp.chain import Chain, chains_of
from loka.lowp.chain_function import TENSOR_SPEC
from loka.lowp.folding import PACKED
from loka.placing.linears import fit_units
from loka.records import UnitPlan
from loka.units import place
from loka.units.placement import describe_chain


def describe_chains(model: nn.Module) -> list[UnitPlan]:
    """Describe a model's chains as units that can be placed again, including their scales."""
    return [_describe(model, chain) for _, chain in chains_of(model)]


def _describe(model: nn.Module, chain: Chain) -> UnitPlan:
    unit = describe_chain(model, chain)
    if chain.input is None:
        return unit
    first = unit.links[0].linear
    known = msgspec.structs.replace(unit.magnitudes[first], input=float(chain.input.largest))
    return msgspec.structs.replace(unit, scales="calibrated", magnitudes=unit.magnitudes | {first: known})


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors to save: the state_dict, with weights of frozen chains in FP8 and their `weight_scale`."""
    tensors: dict[str, Tensor] = model.state_dict()
    for _, chain in chains_of(model):
        if chain.frozen is not None:
            for at, link in enumerate(chain.links):
                q = chain.quantized_weight(at)
                tensors[f"{link.linear}.weight"], tensors[f"{link.linear}.weight_scale"] = q.data, q.scale
    return tensors


def is_wide(name: str, tensor: Tensor) -> bool:
    """Return True for a float that a checkpoint stores in its 16-bit dtype: not FP8, and no scale."""
    return tensor.is_floating_point() and tensor.element_size() > 1 and not name.endswith("weight_scale")


def narrowed(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as it is written to a file: a copy on the CPU, in `dtype` if it is wide."""
    return (tensor.to(dtype) if is_wide(name, tensor) else tensor).detach().cpu().contiguous().clone()


def take_weights(tensors: dict[str, Tensor], units: Sequence[UnitPlan], dtype: torch.dtype) -> dict[str, QTensor]:
    """Return the FP8 weights of chains from a file's tensors, and replace them there by their values in `dtype`."""
    taken = {}
    for name in (name for unit in units for name in unit.linears):
        data, scale = tensors.get(f"{name}.weight"), tensors.pop(f"{name}.weight_scale", None)
        if data is None or scale is None or data.dtype != TENSOR_SPEC.format.dtype or scale.dtype != torch.float32:
            raise ValueError(f"{name} is in a chain: expected an FP8 weight and a float32 weight_scale")
        taken[name] = QTensor(data, scale, TENSOR_SPEC)
        tensors[f"{name}.weight"] = taken[name].dequantize(dtype)
    return taken


def restore_chains(model: nn.Module, units: Sequence[UnitPlan], weights: dict[str, QTensor], backend: str) -> None:
    """Place frozen chains with the weights that they were saved with."""
    for unit in fit_units(units, backend):
        chain = place(model, unit)
        device = chain.device
        chain.freeze(offload=True)
        chain.frozen = [
            replace(q, data=q.data.to(device), scale=q.scale.to(device)) for q in (weights[n] for n in unit.linears)
        ]
        for linear in chain.linears:
            linear.__dict__[PACKED] = True
