"""`file_amax` in plain torch. Operands of one kind are stacked, so that a few kernels serve all of them.

All state is in tensors, none in Python, so a CUDA graph that captured this updates it in every replay.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loka.formats import Spec, scale_from_amax

if TYPE_CHECKING:
    from loka.kernels.amax_history import Magnitudes

GIVEN = Spec.parse("e4m3:tensor:static")


def given_scale(largest: Tensor, headroom: float, floor: float) -> Tensor:
    """Return the E4M3 scale of the next step."""
    return scale_from_amax((largest * headroom).clamp(min=floor), GIVEN)


def file_amax(operands: "Sequence[Magnitudes]") -> None:
    """See `loka.kernels.amax_history`. All operands are on one device."""
    by_kind: dict[tuple[int, float, float], list[Magnitudes]] = {}
    for one in operands:
        by_kind.setdefault((len(one.history), one.headroom, one.floor), []).append(one)
    for (_, headroom, floor), group in by_kind.items():
        history, pending = (torch.stack([getattr(one, name) for one in group]) for name in ("history", "pending"))
        history = torch.where(pending[:, None] > 0, torch.cat([pending[:, None], history[:, :-1]], 1), history)
        before, scale = (torch.stack([getattr(one, name) for one in group]) for name in ("largest", "scale"))
        over = ((pending > scale * GIVEN.format.max) & (before > 0)).float()  # without history a dynamic scale was used
        largest = history.amax(1)
        scale = torch.where(largest > 0, given_scale(largest, headroom, floor), scale)
        for name, rows in (("history", history), ("largest", largest), ("scale", scale)):
            torch._foreach_copy_([getattr(one, name) for one in group], list(rows.unbind()))
        torch._foreach_add_([one.saturated for one in group], list(over.unbind()))
        torch._foreach_zero_([one.pending for one in group])
