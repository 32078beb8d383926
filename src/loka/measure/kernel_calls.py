"""Find every kernel call that a piece of code makes through the registry, and judge each one at its own shape.

    calls = find_calls(lambda: model(batch))                what runs, whichever modules run it
    verdicts = [judge_call(one, device) for one in calls]   whether each is correct

A verdict on what runs needs no list of the modules that a plan may place: a new kind of module is covered by the calls
it makes. Code that is being compiled is not heard, so run it eagerly.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from loka.kernels import registry
from loka.measure.adapter import ADAPTERS
from loka.measure.conformance import Conformance
from loka.measure.gate import judge_backend


@dataclass(frozen=True)
class KernelCall:
    """A call of a backend.

    Args:
        op: the op.
        backend: the name of the backend that runs it.
        call: the op's description of shapes, Specs and types.
        gradient: the call's gradient, where forward and backward are described by one call. Fused layers, norms and
            quantizers describe their gradients as calls of their own.

    Example:
        >>> str(find_calls(run)[0])
        'fused_linear on triton, 8192x1024x512 e4m3:tensor:static @ e4m3:tensor relu -> e4m3:tensor:static +bias'
    """

    op: str
    backend: str
    call: Any
    gradient: bool = False

    @property
    def kind(self) -> "KernelCall":
        """The call with one row: calls that differ in their rows alone have the same kind."""
        return replace(self, call=registry.kind_of(self.call))

    def __str__(self) -> str:
        return f"{self.op} on {self.backend}, {self.call}{', gradient' * self.gradient}"


def find_calls(
    run: Callable[[], object], *, training: bool = False, references: Collection[str] = ()
) -> list[KernelCall]:
    """Run code and return the kernel calls that it made, each once, in the order in which they first occurred.

    Args:
        run: runs the code, eagerly. Calls from autograd's threads are found, too.
        training: it runs backward, so calls that do not describe their gradients by themselves are followed by these.
        references: ops of which the reference runs instead of the kernel, which then need not be compiled.

    Returns:
        The calls.

    Example:
        >>> calls = find_calls(lambda: model(batch).sum().backward(), training=True)
    """
    found: dict[KernelCall, None] = {}

    def hear(op: str, chosen: registry.Selection, call: Any) -> None:
        found[KernelCall(op, chosen.name, call)] = None
        if training and _has_gradient(op):
            found[KernelCall(op, chosen.name, call, gradient=True)] = None

    with registry.listening(hear, references=references):
        run()
    return list(found)


def _has_gradient(op: str) -> bool:
    """Check whether an op's adapter judges gradients as an option of its calls."""
    own = ADAPTERS[op].OWN if op in ADAPTERS else None
    return own is not None and "gradient" in own.__dataclass_fields__  # type: ignore[attr-defined]


def judge_call(one: KernelCall, device: torch.device | str) -> Conformance | None:
    """Judge a call with the gate (`loka.measure.gate`), at its own shape. The gate caches verdicts.

    Args:
        one: a call that `find_calls` returned.
        device: the device it runs on.

    Returns:
        The verdict; None for a reference, which defines the correct result, and for a call that the gate does not cover,
        as those in float64.

    Raises:
        torch.OutOfMemoryError: the exact result does not fit beside what is in memory already.

    Example:
        >>> verdict = judge_call(calls[0], "cuda")
        >>> verdict is None or verdict.ok
        True
    """
    if one.backend == "reference" or one.op not in ADAPTERS:
        return None
    call = ADAPTERS[one.op].adopt(one.call)
    if call is None or torch.float64 in vars(call).values():  # exact results are in float64 themselves
        return None
    call = replace(call, gradient=True) if one.gradient else call
    verdict = judge_backend(one.op, registry.backend(one.op, one.backend), call, device, moved=False)
    if verdict.raised and verdict.reason.startswith(torch.OutOfMemoryError.__name__):  # tells nothing about the kernel
        raise torch.OutOfMemoryError(verdict.reason)
    return verdict
