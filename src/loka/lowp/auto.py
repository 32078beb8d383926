"""Resolve the backend `auto` for the GEMMs of a linear on its device.

The choice is made when the linear is bound and stored in its binding; summaries and reprs show it. On a GPU the
performance database decides, if it has rows for this machine, shape and number of rows
(`loka.dispatch.speed.fastest_backend`); otherwise the first backend of the registry that supports the call. The binding
still says `auto`, so a linear that is moved to another device is resolved again. What a backend supports may depend on
its output dtype, which under autocast differs from the weight's, so both are resolved, and both are shown if they
differ. A call that the chosen backend does not support (other rows) runs on the first one that does.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from loka.dispatch.speed import fastest_backend
from loka.kernels import registry
from loka.kernels.scaled_mm import ROWS, GemmWay
from loka.kernels.scaled_mm.call import OUT_DTYPES
from loka.lowp.binding import LinearBinding
from loka.measure.site import gemm_shape
from loka.records import GEMMS, Gemm

__all__ = ["ROWS", "Pick", "is_emulation", "moved", "settle", "spell_refusals"]


@dataclass(frozen=True)
class Pick:
    """What `auto` resolved to on a device: the kernel per output dtype, which backends refused and why, and the
    measurement that decided, if there is one."""

    kernel: str
    device: torch.device
    refusals: tuple[tuple[str, str], ...]
    source: str | None = None
    by_dtype: tuple[tuple[torch.dtype, str], ...] = field(default=(), compare=False)

    @property
    def emulated(self) -> bool:
        """Whether this is emulation on a device with kernels of its own."""
        return any(is_emulation(name, self.device) for name in self.kernel.split())

    def __str__(self) -> str:
        return f"{self.kernel} on {self.device}" + (f", fastest by {self.source}" if self.source else "")


def is_emulation(backend: str, device: torch.device) -> bool:
    """Check whether a backend is emulation: the reference on a device other than a CPU, which has nothing else."""
    return backend == "reference" and device.type not in ("cpu", "meta")


def settle(binding: LinearBinding, weight: Tensor, rows: int = ROWS) -> tuple[LinearBinding, list[Pick]]:
    """Return the binding with `auto` resolved for this weight, and the picks. A weight on the meta device has none."""
    if weight.device.type == "meta":
        return binding, []
    bound: dict[str, GemmWay] = {}
    picks: list[Pick] = []
    for gemm in GEMMS:
        now: GemmWay | None = getattr(binding, gemm)
        if now is not None and now.backend == "auto":
            pick = _pick(gemm, now, weight, rows)
            bound[gemm] = replace(now, picked=str(pick), kernels=pick.by_dtype)
            picks.append(pick)
    return (replace(binding, **bound) if bound else binding), picks  # type: ignore[arg-type]


def moved(binding: LinearBinding, weight: Tensor, before: torch.device) -> LinearBinding:
    """Resolve `auto` again after a weight was moved or cast. Warn if the linear is emulated on its new device."""
    binding, picks = settle(binding, weight)
    named = any(is_emulation(g.backend, weight.device) for g in (binding.fprop, binding.dgrad, binding.wgrad) if g)
    if weight.device != before and (named or any(pick.emulated for pick in picks)):
        warnings.warn(
            f"linears that were converted on {before} are emulated on {weight.device}: correct, but slow; "
            "hint: loka.revert(model) and convert there",
            stacklevel=2,
        )
    return binding


def _pick(gemm: Gemm, bound: GemmWay, weight: Tensor, rows: int) -> Pick:
    n, k = weight.shape
    own = weight.dtype if weight.dtype in OUT_DTYPES else torch.bfloat16
    dtypes = [own] if gemm == "wgrad" or own != torch.float32 else [own, torch.bfloat16]
    shape = gemm_shape(gemm, rows, k, n)
    fastest = fastest_backend(gemm, bound, rows, k, n) if weight.device.type == "cuda" else None
    found = {
        dtype: registry.first(
            "scaled_mm", bound.call(*shape, dtype), weight.device,
            prefer=None if fastest is None else fastest.backend,
        )
        for dtype in dtypes
    }  # fmt: skip
    names = dict.fromkeys(selection.name for selection in found.values())
    source = fastest.source if fastest is not None and fastest.backend in names else None
    table = tuple((dtype, selection.name) for dtype, selection in found.items())
    return Pick(" or ".join(names), weight.device, tuple(found[own].refusals.items()), source, table)


def spell_refusals(refusals: Mapping[str, str]) -> str:
    """Return which backends refused and why, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
