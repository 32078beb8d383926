"""The only interface a backend meets.

A backend is a module: one file `kernels/<op>/<name>.py` with

    supports(call, device) -> Verdict        pure, never raises, always explains a no
    run(*operands, **options) -> outputs     functional: fresh outputs, no state

and, where it lays weights out in a way of its own before it multiplies them, a third one, so that this can be done once (`loka.kernels.prepared`):

    prepare(weight, a) -> QTensor            the weight for products with operands of Spec a: the same values, and `run` gives the same bits

A backend without `prepare` takes weights as they are. `call` describes the operation without tensors (shapes, Specs, dtypes), so that a plan can be made on a machine that cannot run it. Third-party
libraries are imported inside these functions only; an absent one is a Verdict, not an ImportError.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Verdict:
    """Yes, or no with the reason.

    Args:
        ok: yes.
        reason: of a no.

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
    """A refusal."""
    return Verdict(False, reason)


class Backend(Protocol):
    """What the registry hands out: a module with these two functions, and `prepare` where it has one (`registry.prepare` knows).

    On a GPU its operands have rows at multiples of 16 bytes, unless it says `any_alignment = True`: then it gets them as they lie, and is judged so.

    Example:
        >>> registry.backend("scaled_mm", "reference").supports(call, torch.device("cpu"))
    """

    def supports(self, call: Any, device: Any) -> Verdict:
        """Whether this backend can run the call on the device, and if not, why."""
        ...

    def run(self, *operands: Any, **options: Any) -> Any:
        """Compute."""
        ...


class UnsupportedError(ValueError):
    """An explicit request that cannot be honoured. The message carries every reason."""


def require_library(module: str, extra: str) -> Verdict:
    """Whether an optional library can be imported; the reason carries the install line."""
    try:
        import_module(module)
    except Exception as error:  # a broken install raises anything from ImportError to OSError (missing .so)
        return no(
            f"{module} cannot be imported ({type(error).__name__}: {error}); install: pip install 'loka[{extra}]'"
        )
    return YES
