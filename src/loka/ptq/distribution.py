"""Analyze whether the distributions of a model's weights and activations suit FP8.

    variance, AbsMax, AbsP99, kurtosis      per layer, of weights and of input activations
    crest = absmax / rms inside a group     per Spec: with scales, only the range of values that share a scale matters
    underflow                               share of non-zero elements that a Spec turns into zero

Published (arXiv 2603.11486, orders of magnitude read from its text): weights of traditional rankers have variances up
to about 1e7 and maxima above 1000; those of generative recommenders and language models stay below a variance of 0.1.
The verdict compares with these: "LLM-like" if every weight is below and no group of activations loses more than a
percent to zero, "ranker-like" if some weight is as large as a ranker's, otherwise "between".
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from loka.formats import Block, Spec, block_amax, expand_scale, quantize, underflowed_fraction
from loka.nn import FeatureMix
from loka.nn.wrapping import in_eval
from loka.ptq.modules import Site
from loka.records import GroupRange, LayerStats, Likeness, ModelStats, Reference

SPECS = tuple(Spec.parse(text) for text in ("e4m3:tensor", "e4m3:row", "e4m3:1x128", "e4m3:128x128"))
CHUNK = 2**22  # elements per update of the statistics
GROUP_ELEMENTS = 2**22  # at most this many elements of a tensor are used for the group ranges
LLM_VARIANCE, RANKER_VARIANCE, RANKER_ABSMAX = 0.1, 10.0, 1000.0
UNDERFLOW = 0.01
REFERENCES = [
    Reference(label="traditional ranker, weights (published)", statistic="variance", value=1e7),
    Reference(label="language models and OneRec-V2, weights stay below (published)", statistic="variance", value=0.1),
    Reference(label="traditional ranker, weights exceed (published)", statistic="absmax", value=1000.0),
]


@torch.no_grad()
def analyze_tensor(name: str, kind: Any, values: Tensor) -> LayerStats:
    """Return the statistics of one tensor: moments and maxima of all elements, group ranges of the first 2^22."""
    from loka.probe.statistics import Statistics

    rows = values.detach().reshape(-1, values.shape[-1])
    seen = Statistics(rows.shape[1], rows.device)
    for part in rows.split(max(1, CHUNK // max(1, rows.shape[1]))):  # type: ignore[no-untyped-call]
        seen.update(part)
    return _finish(name, kind, list(values.shape), seen, rows)


def _finish(name: str, kind: Any, shape: list[int], seen: Any, rows: Tensor) -> LayerStats:
    found = seen.finish("w" if kind == "weight" else "x")
    if found is None:
        raise ValueError(f"{name} is empty: nothing to analyse")
    sample = rows[: max(1, GROUP_ELEMENTS // max(1, rows.shape[1]))].float().nan_to_num()
    return LayerStats(
        name=name,
        kind=kind,
        shape=shape,
        elements=found.elements,
        variance=found.std**2,
        absmax=found.absmax,
        abs_p99=found.abs_p99,
        kurtosis=found.kurtosis,
        groups=[measure_groups(sample, spec) for spec in SPECS],
    )


def measure_groups(x: Tensor, spec: Spec) -> GroupRange:
    """Measure the range inside the groups of one Spec, and the share that underflows to zero."""
    amax = block_amax(x, spec.block)
    ones = torch.ones_like(x)
    count = _block_sum(ones, spec)
    rms = (_block_sum(x.square(), spec) / count).sqrt()
    alive = amax > 0
    crest = (amax[alive] / rms[alive]).log2()
    high = float(torch.quantile(crest[:: max(1, len(crest) // 10**6)], 0.99)) if crest.numel() else 0.0
    return GroupRange(spec=str(spec), crest_bits=high, underflow=underflowed_fraction(x, quantize(x, spec)))


def _block_sum(x: Tensor, spec: Spec) -> Tensor:
    """Sum over the blocks of a matrix; the result has the shape of its scales."""
    rows, cols = spec.block.rows, spec.block.cols
    rows, cols = (x.shape[0] if rows < 0 else rows), (x.shape[1] if cols < 0 else cols)
    padded = nn.functional.pad(x, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))
    sums = padded.view(padded.shape[0] // rows, rows, -1, cols).sum((1, 3))
    return sums.view(()) if str(spec.block) == "tensor" else sums


def analyze_model(
    model: nn.Module,
    *,
    name: str,
    source: str,
    run: Callable[[nn.Module], Any] | None = None,
    activations_of: str | None = None,
    trained: bool = True,
) -> ModelStats:
    """Analyze the weight matrices of a model and, optionally, the activations that enter its linears.

    Args:
        model: any model.
        name: the model's name in the record.
        source: where the model comes from, for the record.
        run: runs the model on data, to observe activations.
        activations_of: a description of that data, for the record.
        trained: whether the weights are trained; without training there is no verdict.

    Returns:
        Statistics of every layer, and the verdict.

    Example:
        >>> analyze_model(model, name="mine", source="runs/x", run=lambda m: m(batch))
    """
    weights = ((n, p) for n, p in model.named_parameters() if p.dim() >= 2)
    layers = [analyze_tensor(n.removesuffix(".weight"), "weight", p) for n, p in weights]
    if run is not None:
        layers += _observe_activations(model, run)
    return conclude(name, source, layers, activations_of if run is not None else None, trained=trained)


@torch.no_grad()
def _observe_activations(model: nn.Module, run: Callable[[nn.Module], Any]) -> list[LayerStats]:
    from loka.probe.statistics import Statistics

    seen: dict[str, Any] = {}
    first: dict[str, Tensor] = {}
    hooks = ExitStack()
    for name, module in model.named_modules():
        if isinstance(module, Site | FeatureMix):

            def observe(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                if not args or not isinstance(args[0], Tensor):
                    return  # the layer itself says what is wrong with it, or was called by name
                rows = args[0].detach().reshape(-1, args[0].shape[-1])
                if name not in seen:
                    seen[name], first[name] = Statistics(rows.shape[1], rows.device), rows[:4096].clone()
                seen[name].update(rows)

            hooks.callback(module.register_forward_pre_hook(observe).remove)
    with hooks, in_eval(model):
        run(model)
    return [_finish(n, "activation", list(first[n].shape), s, first[n]) for n, s in seen.items()]


def analyze_checkpoint(path: str | os.PathLike[str]) -> ModelStats:
    """Analyze the matrices of a safetensors file, one at a time. FP8 weights are dequantized with their scales.

    Args:
        path: the file.

    Returns:
        Statistics as from `analyze_model`, without activations.

    Example:
        >>> analyze_checkpoint("model.safetensors").layers[0]
    """
    layers = [analyze_tensor(name, "weight", tensor) for name, tensor in _read_matrices(path)]
    if not layers:
        raise ValueError(f"{path}: contains no floating-point matrix")
    return conclude(os.path.basename(os.fspath(path)), "file", layers, None)


def _read_matrices(path: str | os.PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            names = set(file.keys())
            for name in sorted(names):
                tensor = file.get_tensor(name)
                if tensor.dim() < 2 or not tensor.is_floating_point() or name.endswith("weight_scale"):
                    continue
                if tensor.element_size() == 1 and f"{name}_scale" in names:
                    tensor = _dequantize(tensor, file.get_tensor(f"{name}_scale"))
                yield name.removesuffix(".weight"), tensor
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error


def _dequantize(data: Tensor, scale: Tensor) -> Tensor:
    """Multiply FP8 elements by their scales. The shape of the scales tells the block: a row, or 128 x 128."""
    extents = (-(-size // count) for size, count in zip(data.shape[-2:], scale.shape[-2:], strict=True))
    rows, cols = (128 if 1 < extent <= 128 else extent for extent in extents)
    return data.float() * expand_scale(scale, data.shape, Block(rows, cols))


def conclude(
    name: str, source: str, layers: Iterable[LayerStats], activations_of: str | None, *, trained: bool = True
) -> ModelStats:
    """Draw the verdict from the layers, with reasons. Untrained weights look like their initializer and get none."""
    found = list(layers)
    weights = [layer for layer in found if layer.kind == "weight"]
    widest = max(weights, key=lambda layer: layer.variance)
    largest = max(weights, key=lambda layer: layer.absmax)
    lost = [x for x in found if x.kind == "activation" and _best_underflow(x) > UNDERFLOW]
    reasons = [
        f"largest weight variance {widest.variance:.3g} ({widest.name})",
        f"largest weight {largest.absmax:.3g} ({largest.name})",
    ]
    likeness: Likeness
    if not trained:
        likeness = "untrained"
        reasons.insert(0, "no verdict: these weights are as they were initialized")
    elif widest.variance >= RANKER_VARIANCE or largest.absmax >= RANKER_ABSMAX:
        likeness = "ranker-like"
    elif widest.variance < LLM_VARIANCE and not lost:
        likeness = "LLM-like"
    else:
        likeness = "between"
    if lost:
        worst = max(lost, key=_best_underflow)
        share = _best_underflow(worst)
        reasons.append(
            f"{len(lost)} layers lose activations to zero under one scale per token, {share:.1%} in {worst.name}"
        )
    reasons.append("activations were not looked at" if activations_of is None else f"seen with {activations_of}")
    return ModelStats(
        name=name, source=source, activations_of=activations_of, layers=found, likeness=likeness, reasons=reasons
    )


def _best_underflow(layer: LayerStats) -> float:
    return next(group.underflow for group in layer.groups if group.spec == "e4m3:row")
