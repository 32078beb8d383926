"""A plan's collectives, placed in a model that is spread over ranks, and taken back: `loka.convert` and `loka.revert` call these.

FSDP2   weights are gathered in one codec, gradients scattered in the other
DDP     gradients are averaged in theirs; weights are not sent
else    nothing is sent, and the record says so: the plan waits for ranks

A stochastic codec draws its numbers for a step. `clock_of(model).step = step`, set before each step, lets a resumed run round as the first one did (`loka.training` does it); where
nobody sets it, every call draws anew, and a resumed run rounds otherwise.
"""

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loka.comms.collectives import Wire
from loka.comms.fsdp import StepClock, quantize_ddp, quantize_fsdp, release_fsdp
from loka.kernels.wire.codec import parse_codec
from loka.records import CollectivePlan

_WIRE = "_loka_wire"  # on a model: the count of what its placed collectives send
_CLOCK = "_loka_clock"  # the step they draw for


def place(model: nn.Module, collectives: Sequence[CollectivePlan]) -> list[str]:
    """Send what a plan says in the codecs it says.

    Args:
        model: under FSDP2, under DistributedDataParallel, or on one process.
        collectives: of the plan.

    Returns:
        What a reader of the record must know.

    Raises:
        ValueError: the model's collectives are encoded already.
    """
    codecs: dict[str, str | None] = {part.name: part.codec for part in collectives if part.codec != "fp32"}
    if not codecs:
        return []
    held = wire_of(model)
    if held is not None and (held.codec is not None or _is_fsdp(model)):
        raise ValueError("the model's collectives are encoded already; call loka.revert(model) first")
    spelled = ", ".join(f"{name} in {codec}" for name, codec in codecs.items())
    if _is_fsdp(model):
        weights, gradients = codecs.get("weights"), codecs.get("gradients")
        model.__dict__[_WIRE] = quantize_fsdp(model, all_gather=weights, reduce_scatter=gradients, clock=_clock(model))
        return [f"FSDP2 sends {spelled}"]
    copies = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if copies is None:
        return [f"not under FSDP2 or DistributedDataParallel: nothing is sent here, so {spelled} wait"]
    if (gradients := codecs.get("gradients")) is None:
        return ["DistributedDataParallel sends no weights"]
    if held is None:
        model.__dict__[_WIRE] = quantize_ddp(copies, gradients, clock=_clock(model))
    else:
        held.codec = parse_codec(gradients)
    return [f"DistributedDataParallel averages gradients in {gradients}" + ", and sends no weights" * ("weights" in codecs)]  # fmt: skip


def release(model: nn.Module) -> None:
    """Send as before. A hook of DistributedDataParallel cannot be taken out: it stays, and averages in float32."""
    wire: Wire | None = model.__dict__.get(_WIRE)
    if wire is None:
        return
    if _is_fsdp(model):
        del model.__dict__[_WIRE]
        release_fsdp(model)
    else:
        wire.codec = None


def wire_of(model: nn.Module) -> Wire | None:
    """The count of what the placed collectives of a model have sent; None where none is placed."""
    return model.__dict__.get(_WIRE)


def clock_of(model: nn.Module) -> StepClock | None:
    """The step that the placed collectives of a model draw for; None where none is placed."""
    return model.__dict__.get(_CLOCK)


def _clock(model: nn.Module) -> StepClock:
    clock: StepClock = model.__dict__.setdefault(_CLOCK, StepClock())
    return clock


def _is_fsdp(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
