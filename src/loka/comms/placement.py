"""Apply a plan's collectives to a distributed model, and revert them. `loka.convert` and `loka.revert` call this.

FSDP2   weights are all-gathered in one codec, gradients reduce-scattered in the other
DDP     gradients are averaged in their codec; weights are not sent
else    nothing is sent, and the record says so

A stochastic codec draws random numbers per step. Set `clock_of(model).step = step` before each step to make a resumed
run round as the original one (`loka.training` does). If it is never set, every call draws new numbers, and
a resumed run rounds differently.
"""

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loka.comms.collectives import Wire
from loka.comms.fsdp import StepClock, quantize_ddp, quantize_fsdp, release_fsdp
from loka.kernels.wire.codec import parse_codec
from loka.records import CollectivePlan

_WIRE = "_loka_wire"  # attribute of a model: the Wire that counts what its collectives send
_CLOCK = "_loka_clock"  # attribute of a model: the StepClock of its stochastic codecs


def place(model: nn.Module, collectives: Sequence[CollectivePlan]) -> list[str]:
    """Send in the codecs of a plan.

    Args:
        model: under FSDP2, under DistributedDataParallel, or in a single process.
        collectives: collectives of the plan.

    Returns:
        Notes for the record.

    Raises:
        ValueError: the model's collectives are already encoded.
    """
    codecs: dict[str, str | None] = {part.name: part.codec for part in collectives if part.codec != "fp32"}
    if not codecs:
        return []
    held = wire_of(model)
    if held is not None and (held.codec is not None or _is_fsdp(model)):
        raise ValueError("the model's collectives are already encoded; call loka.revert(model) first")
    spelled = ", ".join(f"{name} in {codec}" for name, codec in codecs.items())
    if _is_fsdp(model):
        weights, gradients = codecs.get("weights"), codecs.get("gradients")
        model.__dict__[_WIRE] = quantize_fsdp(model, all_gather=weights, reduce_scatter=gradients, clock=_clock(model))
        return [f"FSDP2 sends {spelled}"]
    copies = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if copies is None:
        return [f"not under FSDP2 or DistributedDataParallel: nothing is sent here, so {spelled} has no effect"]
    if (gradients := codecs.get("gradients")) is None:
        return ["DistributedDataParallel sends no weights"]
    if held is None:
        model.__dict__[_WIRE] = quantize_ddp(copies, gradients, clock=_clock(model))
    else:
        held.codec = parse_codec(gradients)
    return [f"DistributedDataParallel averages gradients in {gradients}" + ", and sends no weights" * ("weights" in codecs)]  # fmt: skip


def release(model: nn.Module) -> None:
    """Send without codecs again. The hook of a DDP model cannot be removed: it stays, and averages in float32."""
    wire: Wire | None = model.__dict__.get(_WIRE)
    if wire is None:
        return
    if _is_fsdp(model):
        del model.__dict__[_WIRE]
        release_fsdp(model)
    else:
        wire.codec = None


def wire_of(model: nn.Module) -> Wire | None:
    """Return the count of what a model's encoded collectives have sent, or None if there are none."""
    return model.__dict__.get(_WIRE)


def clock_of(model: nn.Module) -> StepClock | None:
    """Return the clock of a model's encoded collectives, or None if there are none."""
    return model.__dict__.get(_CLOCK)


def _clock(model: nn.Module) -> StepClock:
    clock: StepClock = model.__dict__.setdefault(_CLOCK, StepClock())
    return clock


def _is_fsdp(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
