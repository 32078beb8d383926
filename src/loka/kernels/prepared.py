"""Weights that are laid out once for the backend that multiplies them.

A GEMM library requires more than a QTensor guarantees: row and column counts padded to multiples (479 columns become
480 or 512, zero-filled), and scales in its own order and padding. `run` would do that in every call; for a weight it
can be done once:

    prepared = backend.prepare(weight, a)       a: the Spec of the other operand, which decides how scales are read
    backend.run(x, prepared)                    the same bits as backend.run(x, weight)

A prepared weight is still the QTensor it was made from: the same shape, values and Spec. Every backend accepts it, and
the one it was prepared for reads it without a copy. If there is nothing to lay out (most widths), `prepare` returns the
weight itself. A modified copy (`dataclasses.replace`, `transpose`) is no longer prepared.

Activations are new in every call, so they are never prepared.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka.formats import Block, QTensor, Spec

Laid = tuple[Tensor, Tensor]  # data and scales as the backend reads them
Layout = tuple[str, Block]  # the backend that reads them, and the scale block of the other operand
Lay = Callable[[QTensor, Spec], Laid]


@dataclass(frozen=True, eq=False)
class Prepared(QTensor):
    """A weight together with its layout for one backend. If that is padded, `data` is a view of it."""

    layout: Layout | None = field(default=None, init=False)
    laid: Laid | None = field(default=None, init=False)

    @property
    def nbytes(self) -> int:
        """The bytes held. Scales that the layout shares with the weight count once."""
        data, scale, laid = parts_of(self)
        return data.nbytes + scale.nbytes + (0 if laid is None else laid.nbytes)


def with_layout(weight: QTensor, reader: str, a: Spec, lay: Lay) -> QTensor:
    """Return the weight with the layout that `lay` makes; unchanged if there is nothing to do or it has that layout."""
    if weight.data.numel() == 0 or weight.tensor_scale is not None or _is_prepared_for(weight, reader, a):
        return weight  # no backend with a layout supports two-level scales
    data, scale = lay(weight, a)
    if data is weight.data and scale is weight.scale:
        return weight
    return assemble(data, weight.scale, scale, weight.spec, weight.shape, (reader, a.block))


def laid_out(weight: QTensor, reader: str, a: Spec, lay: Lay) -> Laid:
    """Return data and scales as a backend reads them: the prepared ones, or laid out now."""
    if isinstance(weight, Prepared) and _is_prepared_for(weight, reader, a):
        assert weight.laid is not None
        return weight.laid
    return lay(weight, a)


def _is_prepared_for(weight: QTensor, reader: str, a: Spec) -> bool:
    return isinstance(weight, Prepared) and weight.layout == (reader, a.block)


def parts_of(weight: QTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the tensors that hold a weight: data as laid out, scales, and the laid-out scales if they differ."""
    laid = weight.laid if isinstance(weight, Prepared) else None
    if laid is None:
        return weight.data, weight.scale, None
    return laid[0], weight.scale, None if laid[1] is weight.scale else laid[1]


def layout_of(weight: QTensor | None) -> Layout | None:
    """Return the layout that a weight was prepared for, None if it was not."""
    return weight.layout if isinstance(weight, Prepared) else None


def assemble(
    data: Tensor, scale: Tensor, laid_scale: Tensor | None, spec: Spec, shape: torch.Size | tuple[int, ...], layout: Layout | None
) -> QTensor:  # fmt: skip
    """Rebuild a weight from `parts_of`. Without a layout it is a plain QTensor."""
    if layout is None:
        return QTensor(data, scale, spec)
    unpadded = data if data.shape == shape else data[..., : shape[-2], : shape[-1]]
    weight = Prepared(unpadded, scale, spec)
    object.__setattr__(weight, "layout", layout)
    object.__setattr__(weight, "laid", (data, scale if laid_scale is None else laid_scale))
    return weight
