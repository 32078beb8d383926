"""Place what `loka.quantize` decided, for good or to find the kernels that it will run.

made = pack(model, parts, ..., undo)         convert, calibrate, freeze; then only FP8 weights are left
calls = find_packed(model, example, parts)   what it will run, to be judged (`loka.placing.judging`)
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from loka.kernels.scaled_mm import GemmWay
from loka.lowp.linear import linears_of
from loka.measure.kernel_calls import KernelCall
from loka.placing import calibrating, convert, freeze_model, revert
from loka.placing.judging import find_step
from loka.placing.linears import candidates
from loka.placing.scales import is_calibrated
from loka.ptq.modules import Site, put, quantize_module
from loka.records import Conversion, Plan
from loka.units.example import call_model


class Parts(NamedTuple):
    """What to place: a plan of linears and chains, if there are any, and how experts run."""

    plan: Plan | None
    experts: dict[str, GemmWay]


@dataclass(frozen=True)
class Packed:
    """What was placed.

    Args:
        done: the conversion of linears and chains, if there are any.
        found: the original modules of all sites, after the plan's mods.
        running: what the forward GEMM of each linear runs.
    """

    done: Conversion | None
    found: dict[str, Site]
    running: dict[str, GemmWay]


def pack(
    model: nn.Module, parts: Parts, held: Sequence[Any], backend: str | None, read: Mapping[str, str], undo: ExitStack
) -> Packed:
    """Convert and freeze a model, then replace linears and experts by modules with only FP8 weights.

    Args:
        model: not converted. If there are batches, its static scales are calibrated on them.
        parts: what to place.
        held: batches.
        backend: the backend of the GEMMs; None is `auto`, or what a plan names.
        read: linears whose weight is read elsewhere, which therefore stay as they are.
        undo: gets what restores the model.

    Returns:
        What was placed. Linears with static scales are frozen and keep their 16-bit weights.
    """
    plan, experts = parts
    done = None
    if plan is not None:
        modes = [(module, module.training) for module in model.modules()]
        done = convert(model, plan, backend=backend, example=held[0] if held else None)
        undo.callback(_restore, model, plan, modes)
        if held and is_calibrated(model):
            with calibrating(model):
                for batch in held:
                    call_model(model.eval(), batch)
        freeze_model(model, offload=True)
    found, running, new = dict(candidates(model)), dict[str, GemmWay](), dict[str, nn.Module]()
    for first, linear in list(linears_of(model)):
        gemm, name = linear.binding.fprop, linear.state.name or first
        if gemm is not None and name not in read:
            running[name] = gemm
        if gemm is None or gemm.a.mode == "dynamic" or name in read:
            plain = linear.release()
            if gemm is not None and name not in read:
                new[name] = quantize_module(plain, gemm, backend=gemm.backend)
    new |= {
        name: quantize_module(found[name], operands, backend=backend or "auto") for name, operands in experts.items()
    }
    undo.callback(put, model, {name: found[name] for name in new})
    put(model, new)
    return Packed(done, found, running)


def _restore(model: nn.Module, plan: Plan, modes: Sequence[tuple[nn.Module, bool]]) -> None:
    revert(model, discard=[spelled.partition("(")[0] for spelled in plan.mods])
    for module, training in modes:
        module.training = training


def find_packed(
    model: nn.Module, shown: Any, held: Sequence[Any], backend: str | None, read: Mapping[str, str], parts: Parts
) -> list[KernelCall]:
    """Return the kernel calls of a model as it would be packed. It is left as it was.

    Args:
        model: not converted.
        shown: an input of the model, or a function that runs it.
        held, backend, read, parts: see `pack`.

    Returns:
        The calls, each once.
    """
    with ExitStack() as undo:
        pack(model, parts, held, backend, read, undo)
        return find_step(model, shown, training=False)
