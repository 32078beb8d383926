"""The interface that every backend implements.

A backend is a module, one file `kernels/<op>/<name>.py`, with

    supports(call, device) -> Verdict        pure, never raises, always gives the reason for a refusal
    run(*operands, **options) -> outputs     functional: new outputs, no state

A backend that pads or reorders weights before a GEMM adds a third function, so that this is done once per weight
(`loka.kernels.prepared`):

    prepare(weight, a) -> QTensor            the same values, laid out for GEMMs with operands of Spec a; `run` returns
                                             the same bits with it

`call` describes the operation without tensors (shapes, Specs, dtypes), so that a plan can be made on a machine that
cannot run it. Third-party libraries are imported inside these functions only; a missing one is a Verdict, not an
ImportError.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Verdict:
    """Whether a backend supports a call. Truthy if it does.

    Args:
        ok: True if the call is supported.
        reason: why it is not; required if `ok` is False.

    Example:
        >>> bool(Verdict(False, "needs a GPU"))
        False
    """

    ok: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():  # torch 2.11 cannot tell whether a formatted string is empty
            return
        if not self.ok and not self.reason:
            raise ValueError("a refusal needs a reason")

    def __bool__(self) -> bool:
        return self.ok


YES = Verdict(True)


def no(reason: str) -> Verdict:
    """Return a refusal with its reason."""
    return Verdict(False, reason)


def accept_every_call(call: Any, device: torch.device) -> Verdict:
    """Return yes: the `supports` of the references, and of backends in plain torch that run every call of their op."""
    return YES


class Backend(Protocol):
    """The type of a backend module: these two functions, and optionally `prepare` (called through `registry.prepare`).

    On a GPU the rows of its operands start at multiples of 16 bytes. A backend that sets `any_alignment = True`
    receives operands of any alignment, and conformance tests it with them.

    Example:
        >>> registry.backend("scaled_mm", "reference").supports(call, torch.device("cpu"))
    """

    def supports(self, call: Any, device: Any) -> Verdict:
        """Return whether this backend can run the call on the device, and if not, why."""
        ...

    def run(self, *operands: Any, **options: Any) -> Any:
        """Run the op and return new outputs."""
        ...


class UnsupportedError(ValueError):
    """Raised when no requested backend can run a call. The message carries every reason."""


def require_library(module: str, extra: str) -> Verdict:
    """Check whether an optional library can be imported; a refusal says how to install it."""
    try:
        import_module(module)
    except Exception as error:  # a broken install raises anything from ImportError to OSError (missing .so)
        return no(
            f"{module} cannot be imported ({type(error).__name__}: {error}); install: pip install 'loka[{extra}]'"
        )
    return YES
