"""Quantized models on disk: one safetensors file that loads without the original.

    save(model, summary, path)              FP8 weights, float32 scales, and all other floats in `dtype` (16-bit)
    load_quantized(path)                    builds a model of this library from the configuration in the header
    load_quantized(path, build=factory)     fills your own model, from a factory that takes no arguments

The header (key "loka") holds one JSON object: schema, kind, the family and configuration if the model is one of this
library's, and the record of what was quantized and how. The record tells which modules to replace before the tensors
are loaded and which chains to place afterwards. Names, shapes and dtypes must then agree exactly.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from loka import mods
from loka.kernels.scaled_mm import GemmWay
from loka.lowp.chain import chains_of
from loka.models.registry import FAMILIES
from loka.nn.wrapping import named_sites
from loka.placing.linears import candidates
from loka.ptq.chains import narrowed, restore_chains, take_weights, tensors_of
from loka.ptq.modules import QuantizedExperts, QuantizedLinear, put, quantize_module
from loka.ptq.quantizing import Summary
from loka.records import Quantized, from_json, replacing, to_json
from loka.records.prose import name_some

SCHEMA = 1
KIND = "quantized_model"


def save(
    model: nn.Module, summary: Summary, path: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Save a quantized model. An existing file is replaced only when the new one is complete.

    Args:
        model: a model quantized with `quantize`.
        summary: the summary that `quantize` returned.
        path: the safetensors file to write.
        dtype: the dtype of floating-point tensors that are not quantized.

    Raises:
        ValueError: a part that runs in FP8 cannot be saved: a linear with static scales, or a chain that is not frozen.

    Example:
        >>> loka.ptq.save(model, loka.quantize(model, "rowwise"), "model.safetensors")
    """
    refuse_unpacked(model, summary)
    family = next((name for name, known in FAMILIES.items() if type(model) is known.model), None)
    header = {"schema": SCHEMA, "kind": KIND, "dtype": str(dtype).removeprefix("torch."), "family": family,
              "config": _plain(getattr(model, "config", None)), "record": to_json(summary.record).decode()}  # fmt: skip
    with replacing(Path(path)) as temporary:
        tensors = {name: narrowed(name, tensor, dtype) for name, tensor in tensors_of(model).items()}
        save_file(tensors, temporary, metadata={"loka": json.dumps(header)})


def refuse_unpacked(model: nn.Module, summary: Summary, *, chains: bool = True) -> None:
    """Raise ValueError if a site in FP8 has no FP8 weights to save. `chains`: whether the file can hold chains."""
    modules = dict(named_sites(model))
    frozen = {link.linear for _, chain in chains_of(model) if chain.frozen is not None for link in chain.links}
    recorded = {name for unit in summary.record.units for name in unit.linears}
    held = frozen & recorded if chains else set[str]()
    unpacked = [
        site.name
        for site in summary.record.sites
        if site.weight is not None
        and site.name not in held
        and not isinstance(modules.get(site.name), QuantizedLinear | QuantizedExperts)
    ]
    if unpacked:
        what = "with fixed scales" if chains else "in a chain or with fixed scales"
        raise ValueError(
            f"{name_some(sorted(unpacked))}: runs {what}, which this file cannot hold; hint: "
            "keep the plan (plan.save) and the 16-bit weights, and convert where they are loaded"
        )


def load_quantized(
    path: str | os.PathLike[str],
    *,
    build: Callable[[], nn.Module] | None = None,
    device: torch.device | str = "cpu",
    backend: str = "auto",
) -> tuple[nn.Module, Summary]:
    """Load a quantized model.

    Args:
        path: a file written by `save`.
        build: makes the model, if it is not one of this library, with the mods it had when it was quantized. Tensors
            that are not quantized get the dtypes of this model.
        device: the device to load to.
        backend: the backend of its GEMMs.

    Returns:
        The model, in eval mode, and its summary.

    Raises:
        ValueError: the file is damaged or belongs to another model; the message says what differs.

    Example:
        >>> model, summary = loka.ptq.load_quantized("model.safetensors", build=MyModel)
    """
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            header = _read_header(path, file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    record = from_json(header["record"], Quantized, source=str(path))
    model = _build(path, header) if build is None else _build_own(build)
    if list(applied := mods.applied_to(model)) != record.mods:
        raise ValueError(
            f"{path}: was quantized with the mods {', '.join(record.mods) or 'none'}, the model has "
            f"{', '.join(applied) or 'none'}; hint: apply them in build= with loka.mods.apply"
        )
    _place_modules(path, model, record, backend)
    try:
        weights = take_weights(tensors, record.units, getattr(torch, header["dtype"]))
        _load_tensors(model, tensors, device, own_types=build is not None)
        restore_chains(model.eval(), record.units, weights, backend)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return model.eval().requires_grad_(False), Summary(record)


def _place_modules(path: str | os.PathLike[str], model: nn.Module, record: Quantized, backend: str) -> None:
    """Replace the recorded sites by quantized modules whose tensors are loaded later."""
    found = dict(candidates(model))
    recorded = {site.name: site for site in record.sites}
    if set(found) != set(recorded):
        odd = sorted(set(found) ^ set(recorded))[:5]
        raise ValueError(f"{path}: was made from a model with other sites, e.g. {', '.join(odd)}")
    new, chained = {}, {name for unit in record.units for name in unit.linears}
    for name, site in recorded.items():
        if list(found[name].weight.shape) != site.shape:
            seen = tuple(found[name].weight.shape)
            raise ValueError(f"{path}: {name} has a weight of {tuple(site.shape)}, the model's is {seen}")
        if site.activation is not None and site.weight is not None and name not in chained:
            operands = GemmWay.parse(f"{site.activation}@{site.weight}", fast_accum=site.fast_accum)
            new[name] = quantize_module(found[name], operands, backend=backend)
    put(model, new)


def _load_tensors(model: nn.Module, tensors: dict[str, Tensor], device: torch.device | str, *, own_types: bool) -> None:
    """Load tensors into the model.

    With `own_types`, floats are cast back to the model's own dtypes, because a user's model may not support others.
    """
    expected = model.state_dict()
    if set(expected) != set(tensors):
        odd = sorted(set(expected) ^ set(tensors))[:5]
        raise ValueError(f"holds other tensors than the model, e.g. {', '.join(odd)}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, the model's is {tuple(expected[name].shape)}")
    types = {
        name: expected[name].dtype if own_types and t.is_floating_point() and t.element_size() > 1 else t.dtype
        for name, t in tensors.items()
    }
    model.load_state_dict({name: t.to(device, types[name]) for name, t in tensors.items()}, assign=True)
    for module in model.modules():  # non-persistent buffers, e.g. first rows of stacked tables
        if any(b is not None and b.device.type == "meta" for b in module._buffers.values()):
            _make_buffers(module, device)
        module._buffers |= {name: b.to(device) for name, b in module._buffers.items() if b is not None}


def _make_buffers(module: nn.Module, device: torch.device | str) -> None:
    from loka.nn import EmbeddingTables, MixtureOfExperts

    if isinstance(module, EmbeddingTables):
        module.first_row = torch.tensor(module.starts, dtype=torch.int64, device=device)
        module.cardinality = torch.tensor(module.sizes, dtype=torch.int64, device=device)
    elif isinstance(module, MixtureOfExperts):
        module.load = torch.zeros(len(module.balance), dtype=torch.int64, device=device)
    elif _can_reset(module):  # e.g. rotary angles
        made: Any = module.to_empty(device=device, recurse=False)
        made.reset_parameters()
    else:
        names = [name for name, b in module.named_buffers(recurse=False) if b.device.type == "meta"]
        raise ValueError(
            f"{type(module).__name__} has buffers that are not saved: {', '.join(names)}; make them persistent, "
            "or let `reset_parameters` make them"
        )


def _can_reset(module: nn.Module) -> bool:
    """Return True if a module has only non-persistent buffers and a `reset_parameters` that makes them."""
    kept = set(module._buffers) - module._non_persistent_buffers_set
    return not module._parameters and not kept and callable(getattr(module, "reset_parameters", None))


def _plain(config: Any) -> Any:
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else None


def _build(path: str | os.PathLike[str], header: dict[str, Any]) -> nn.Module:
    family, config = header.get("family"), header.get("config")
    if family not in FAMILIES or not isinstance(config, dict):
        raise ValueError(f"{path}: not a model of this library; hint: pass build=, a factory that makes the model")
    with torch.device("meta"):
        return FAMILIES[family].model(msgspec.convert(config, FAMILIES[family].config))


def _build_own(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a user's model on the meta device if possible.

    Real storage is needed for mods that run an example and for non-persistent buffers.
    """
    with contextlib.suppress(Exception), torch.device("meta"):  # errors of `build` itself are raised below
        model = build()
        if not any(module._non_persistent_buffers_set for module in model.modules()):
            return model
    return build()


def _read_header(path: str | os.PathLike[str], metadata: dict[str, str] | None) -> dict[str, Any]:
    try:
        header = json.loads((metadata or {})["loka"])
    except (KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no JSON under 'loka' in its header: not a quantized model") from error
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise ValueError(f"{path}: header says kind {header.get('kind')!r}, expected {KIND!r}")
    if header.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {header.get('schema')!r}, this version reads {SCHEMA}")
    return header
