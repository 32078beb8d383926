"""Quantised weights, and their transposes, made once and used until the weight changes.

    q   = quantize(W)      [N, K]   for fprop
    q_t = quantize(W^T)    [K, N]   for dgrad, from the same read of W

A cached weight must never be stale. What it was made from is written into `stamp`, one integer that is kept, copied and restored together with the data; the
integer names an entry that holds the weight object, its storage and its version counter, and the cache is used only while all three are the same. Every in-place
operation moves the counter (an optimizer step, load_state_dict, `weight.mul_`); replacing the parameter or its storage changes the others.

Under torch.compile the question is asked by `loka::refresh_weight`, an opaque op that looks at the live weight every time it runs: no guard, no recompilation, no
graph break. The stamp is an operand the op mutates, so copies that the compiler makes of the buffers carry their own.

Three things the version counter cannot show, and what is done about them:

    CUDA graphs       a replay asks nothing. While a graph is captured in training mode the weight is always quantised, inside the graph; in eval mode
                      the cache is used as it is, and `loka.refresh` rewrites it in place for the graph to see
    FSDP2             the all-gathered parameter keeps its counter on purpose. It arrives by assignment, and a Linear whose weight is assigned drops its cache
    weight.data       edits through `.data` are hidden from autograd, and from here. Optimizers that use it are covered (every step marks its weights),
                      so is a change of train / eval mode; after any other such edit call `loka.refresh(model)`

In doubt the weight is quantised again.
"""

import weakref
from dataclasses import dataclass
from itertools import count
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from loka.formats import QTensor, Spec
from loka.kernels.quantize import quantize, quantize_both

__all__ = ["POLICIES", "StaleWeightError", "WeightCache", "WeightPolicy", "quantize_weight"]

# step: when the weight has changed. fresh: in every forward. manual: by loka.refresh and the optimizer hook alone; a stale use raises.
WeightPolicy = Literal["step", "fresh", "manual"]
POLICIES: tuple[str, ...] = get_args(WeightPolicy)


class StaleWeightError(RuntimeError):
    """A weight changed after it was quantised, and nothing allowed to quantise it again."""


@dataclass(frozen=True)
class _Made:
    """What a cached weight was made from."""

    weight: weakref.ReferenceType[Tensor]
    storage: StorageWeakRef  # keeps the storage's address from being given to another one
    version: int


_MADE: dict[int, _Made] = {}
_SERIAL = count(1)


def _storage_of(weight: Tensor) -> StorageWeakRef:
    return StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]


def _is_current(weight: Tensor, stamp: Tensor) -> bool:
    made = _MADE.get(int(stamp))
    if made is None or made.weight() is not weight or weight.is_inference():
        return False
    same_storage: bool = made.storage.cdata == weight.untyped_storage()._cdata
    return same_storage and made.version == weight._version


def _set_stamp(weight: Tensor, stamp: Tensor) -> None:
    _MADE.pop(int(stamp), None)
    if weight.is_inference():  # such tensors have no version counter: never current
        stamp.zero_()
        return
    serial = next(_SERIAL)
    _MADE[serial] = _Made(weakref.ref(weight), _storage_of(weight), weight._version)
    stamp.fill_(serial)


def quantize_weight(
    weight: Tensor, spec: Spec | None, transpose: Spec | None, quantizer: str
) -> tuple[QTensor | None, QTensor | None]:
    """W and W^T as asked for, from one read where the quantiser can."""
    weight = weight.detach()
    if spec is not None and transpose is not None:
        return quantize_both(weight, spec, transpose, backend=quantizer)
    if transpose is not None:
        return None, quantize(weight.T.contiguous(), transpose, backend=quantizer)
    return (None if spec is None else quantize(weight, spec, backend=quantizer)), None


def _refresh(
    weight: Tensor, buffers: list[Tensor | None], stamp: Tensor, spec: Spec | None, transpose: Spec | None,
    quantizer: str, manual: bool, training: bool,
) -> None:  # fmt: skip
    """Bring the buffers up to date, or leave them where they are."""
    capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    if _is_current(weight, stamp) and (manual or not (capturing and training)):
        return
    if manual and not capturing:
        raise StaleWeightError(
            "the weight changed after it was quantised; hint: loka.refresh(model) after changing weights by hand, or weights='step'"
        )
    if manual:
        return
    _write(weight, buffers, stamp, spec, transpose, quantizer)


def _write(
    weight: Tensor, buffers: list[Tensor | None], stamp: Tensor, spec: Spec | None, transpose: Spec | None, quantizer: str
) -> None:  # fmt: skip
    with torch.no_grad():
        made = quantize_weight(weight, spec, transpose, quantizer)
        values = [part for q in made for part in ((None, None) if q is None else (q.data, q.scale))]
        for buffer, value in zip(buffers, values, strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        _set_stamp(weight, stamp)


@torch.library.custom_op("loka::refresh_weight", mutates_args=("data", "scale", "data_t", "scale_t", "stamp"))
def refresh_weight(
    weight: Tensor, data: Tensor | None, scale: Tensor | None, data_t: Tensor | None, scale_t: Tensor | None,
    stamp: Tensor, spec: str, transpose: str, quantizer: str, manual: bool, training: bool,
) -> None:  # fmt: skip
    """`_refresh` for compiled code."""
    specs = [Spec.parse(text) if text else None for text in (spec, transpose)]
    _refresh(weight, [data, scale, data_t, scale_t], stamp, specs[0], specs[1], quantizer, manual, training)


@refresh_weight.register_fake
def _(weight, data, scale, data_t, scale_t, stamp, spec, transpose, quantizer, manual, training):  # type: ignore[no-untyped-def]
    return None


class WeightCache:
    """The quantised forms of one weight in buffers of fixed addresses. `spec` or `transpose` is None for a form nobody asked for."""

    def __init__(
        self, weight: Tensor, spec: Spec | None, transpose: Spec | None, *, quantizer: str, manual: bool
    ) -> None:
        self.spec, self.transpose, self.quantizer, self.manual = spec, transpose, quantizer, manual
        self.spelled = ("" if spec is None else str(spec), "" if transpose is None else str(transpose))
        with torch.inference_mode(False), torch.no_grad():
            self.stamp = torch.zeros((), dtype=torch.int64)
            q, q_t = quantize_weight(weight, spec, transpose, quantizer)
            self.data: Tensor | None = None if q is None else q.data
            self.scale: Tensor | None = None if q is None else q.scale
            self.data_t: Tensor | None = None if q_t is None else q_t.data
            self.scale_t: Tensor | None = None if q_t is None else q_t.scale
            _set_stamp(weight, self.stamp)

    def get(self, weight: Tensor, *, training: bool) -> tuple[QTensor | None, QTensor | None]:
        """The forms of `weight` as it is now."""
        if torch.compiler.is_compiling():
            refresh_weight(
                weight, self.data, self.scale, self.data_t, self.scale_t, self.stamp, *self.spelled, self.quantizer, self.manual, training
            )  # fmt: skip
        else:
            _refresh(weight, self._buffers(), self.stamp, self.spec, self.transpose, self.quantizer, self.manual, training)  # fmt: skip
        q = None if self.data is None or self.scale is None or self.spec is None else QTensor(self.data, self.scale, self.spec)  # fmt: skip
        if self.data_t is None or self.scale_t is None or self.transpose is None:
            return q, None
        return q, QTensor(self.data_t, self.scale_t, self.transpose)

    def rewrite(self, weight: Tensor) -> None:
        """Quantise now, in place, whatever the stamp says."""
        with torch.inference_mode(False):
            _write(weight, self._buffers(), self.stamp, self.spec, self.transpose, self.quantizer)

    def invalidate(self) -> None:
        """Forget what this was made from."""
        _MADE.pop(int(self.stamp), None)
        self.stamp.zero_()

    def _buffers(self) -> list[Tensor | None]:
        return [self.data, self.scale, self.data_t, self.scale_t]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers() if buffer is not None)
