"""Weights that were laid out once, in the way the backend that multiplies them reads them.

A GEMM library wants more than a QTensor says: rows and columns in whole granules (479 columns become 480 or 512, the rest zeros), scales in an order and
padding of its own. Done in `run`, that is work in every call; of a weight it can be done once:

    prepared = backend.prepare(weight, a)       a: the Spec of the operand it will be multiplied with, which decides how a library reads scales
    backend.run(x, prepared)                    the same bits as backend.run(x, weight)

A prepared weight still is the QTensor it was made from: the same shape, values, Spec. Any backend takes it, and one takes it without work. Where there is nothing
to lay out (most widths) `prepare` gives back the weight itself. A copy with something replaced (`dataclasses.replace`, `transpose`) is not prepared any more.

Activations have no such step: they are new in every call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka.formats import Block, QTensor, Spec

Laid = tuple[Tensor, Tensor]  # data and scales as the backend reads them
Layout = tuple[str, Block]  # who reads them, and the scale block of the other operand
Lay = Callable[[QTensor, Spec], Laid]


@dataclass(frozen=True, eq=False)
class Prepared(QTensor):
    """A weight, and the same weight as one backend reads it. `data` is a view of what is laid out wherever that is larger."""

    layout: Layout | None = field(default=None, init=False)
    laid: Laid | None = field(default=None, init=False)

    @property
    def nbytes(self) -> int:
        """Bytes held; scales that were not laid out anew count once."""
        data, scale, laid = parts_of(self)
        return data.nbytes + scale.nbytes + (0 if laid is None else laid.nbytes)


def with_layout(weight: QTensor, reader: str, a: Spec, lay: Lay) -> QTensor:
    """The weight with what `lay` makes of it; itself where that is nothing, or has been done."""
    if weight.data.numel() == 0 or weight.tensor_scale is not None or _is_for(weight, reader, a):
        return weight  # no backend with a layout multiplies two-level scales
    data, scale = lay(weight, a)
    if data is weight.data and scale is weight.scale:
        return weight
    return assemble(data, weight.scale, scale, weight.spec, weight.shape, (reader, a.block))


def laid_out(weight: QTensor, reader: str, a: Spec, lay: Lay) -> Laid:
    """What a backend reads: laid out before, or now."""
    if isinstance(weight, Prepared) and _is_for(weight, reader, a):
        assert weight.laid is not None
        return weight.laid
    return lay(weight, a)


def _is_for(weight: QTensor, reader: str, a: Spec) -> bool:
    return isinstance(weight, Prepared) and weight.layout == (reader, a.block)


def parts_of(weight: QTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """A weight as the tensors that hold it: data (as laid out), scales, and scales as laid out where those are others."""
    laid = weight.laid if isinstance(weight, Prepared) else None
    if laid is None:
        return weight.data, weight.scale, None
    return laid[0], weight.scale, None if laid[1] is weight.scale else laid[1]


def layout_of(weight: QTensor | None) -> Layout | None:
    """What a weight was prepared for, None for a plain one."""
    return weight.layout if isinstance(weight, Prepared) else None


def assemble(
    data: Tensor, scale: Tensor, laid_scale: Tensor | None, spec: Spec, shape: torch.Size | tuple[int, ...], layout: Layout | None
) -> QTensor:  # fmt: skip
    """The inverse of `parts_of`; a weight without a layout is a plain one."""
    if layout is None:
        return QTensor(data, scale, spec)
    seen = data if data.shape == shape else data[..., : shape[-2], : shape[-1]]
    weight = Prepared(seen, scale, spec)
    object.__setattr__(weight, "layout", layout)
    object.__setattr__(weight, "laid", (data, scale if laid_scale is None else laid_scale))
    return weight
