"""Cache quantized weights and their transposes until the weight changes.

    q   = quantize(W)      [N, K]   for fprop
    q_t = quantize(W^T)    [K, N]   for dgrad, from the same read of W

Each is stored as the backend of its GEMM reads it (`loka.kernels.prepared`), so that padding or reordering for a
library happens once per step, not once per call.

A cached weight must never be stale. Its `stamp`, one integer that is stored, copied and restored together with the
data, identifies an entry with the weight object, its storage, its place in it and its version counter. The cache is
used only while all of these are unchanged. Every in-place operation moves the counter (an optimizer step,
load_state_dict, `weight.mul_`); replacing the parameter or its memory changes the others.

Under torch.compile the check is made by `loka::refresh_weight`, an opaque op that inspects the live weight whenever it
runs: no guard, no recompilation, no graph break. The op mutates the stamp, so copies that the compiler makes of the
buffers have their own.

What the version counter does not show, and how it is handled:

    CUDA graphs       a replay checks nothing. A graph captured in training mode always quantizes the weight, inside the
                      graph; one captured in eval mode uses the cache, which `loka.refresh` updates in place
    FSDP2             deliberately preserves the counter of the all-gathered parameter. It is assigned, and a Linear
                      whose weight is assigned drops its cache
    hidden writes     to `weight.data` or a NumPy view of it; to a flat tensor that parameters are views of; by a
                      collective (`dist.broadcast(weight)`, `dist.all_reduce`, also of `weight.detach()`); to shared
                      memory by another process. After any optimizer step, and after a change of train / eval mode, the
                      weight of every Linear in training mode is treated as changed, which covers optimizers that write
                      through `.data` and master weights copied back after the step. After any other such write call
                      `loka.refresh(model)`. Otherwise a witness (`loka.lowp.witness`) notices in one of the next calls
                      and warns once, and the weight is quantized in every forward from then on

Backward reads what forward used. If the cache is rebuilt without an in-place change of the weight (an evaluation or a
step of another optimizer between forward and backward, functional_call), it uses new buffers and leaves the old ones to
that backward; an in-place change overwrites them, and autograd then rejects that backward, as it does for nn.Linear.
Only buffers that a captured CUDA graph reads always keep their addresses.

When in doubt, the weight is quantized again.
"""

import ctypes
import weakref
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from loka.formats import QTensor, Spec
from loka.kernels.op import fake_of, torch_op
from loka.kernels.prepared import assemble, layout_of, parts_of
from loka.kernels.quantize import quantize, quantize_both, quantize_transposed
from loka.kernels.scaled_mm import GemmWay, prepare
from loka.lowp.witness import Witness, warn_stale

# step: when the weight has changed. fresh: in every forward. manual: only by loka.refresh and the optimizer hook;
# using a stale weight raises.
WeightPolicy = Literal["step", "fresh", "manual"]
POLICIES: tuple[str, ...] = get_args(WeightPolicy)
Buffers = list[Tensor | None]  # data, scales and laid-out scales of the weight, then of its transpose
_BUFFERS = ("data", "scale", "laid", "data_t", "scale_t", "laid_t")
KEPT_FOR_LONG = 32  # uses in training without a step: apparently no torch optimizer trains this weight


class StaleWeightError(RuntimeError):
    """A weight with the policy `manual` changed after it was quantized."""


@dataclass
class _Made:
    """What a cached weight was computed from."""

    weight: weakref.ReferenceType[Tensor]
    storage: StorageWeakRef  # prevents the storage's address from being reused
    place: tuple[Any, ...]
    version: int
    witness: Witness | None = None  # None while every step rebuilds the cache: such a weight is not kept for long
    uses: int = 0

    def is_of(self, weight: Tensor) -> bool:
        """Check whether it was computed from this tensor in this memory, whatever its values are now."""
        if self.weight() is not weight or weight.is_inference():
            return False
        same_storage: bool = self.storage.cdata == weight.untyped_storage()._cdata
        return same_storage and self.place == _place_of(weight)

    def still_holds(self, weight: Tensor) -> bool:
        """Check cheaply whether a weight that seems unchanged still has the same values."""
        self.uses += 1
        if self.witness is None and self.uses == KEPT_FOR_LONG:
            self.witness = Witness(weight)
        return self.witness is None or self.witness.agrees(weight)


_MADE: dict[int, _Made] = {}
_CAPTURED: set[int] = set()  # ids of weights whose buffers a CUDA graph reads
# also by id, because torch cannot swap a tensor that has weak references
_SITES: dict[int, str] = {}  # names for messages; not an argument of the op, since layers share compiled code
_UNSEEN: set[int] = set()  # weights that were changed unseen, which are quantized in every forward
_SERIAL = count(1)


def _storage_of(weight: Tensor) -> StorageWeakRef:
    return StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]


def _place_of(weight: Tensor) -> tuple[Any, ...]:
    """Return the position and layout of a tensor in its storage."""
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def _is_current(weight: Tensor, stamp: Tensor) -> bool:
    made = _MADE.get(int(stamp))
    return made is not None and made.is_of(weight) and made.version == weight._version and id(weight) not in _UNSEEN


def _was_changed_unseen(weight: Tensor, stamp: Tensor, *, manual: bool) -> bool:
    """Check whether a weight that seems current has changed unseen.

    Unless the policy is `manual`, warn once, and treat it as never current again until `loka.refresh`.
    """
    made = _MADE.get(int(stamp))
    if made is None or _is_capturing(weight) or not _is_current(weight, stamp) or made.still_holds(weight):
        return False
    if not manual:
        warn_stale(_SITES.get(id(weight), ""))
        _UNSEEN.add(id(weight))
    return True


def _is_capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _forget(stamp: Tensor) -> None:
    _MADE.pop(int(stamp), None)
    stamp.zero_()


def _twin(buffer: Tensor | None) -> Tensor | None:
    """Return an empty tensor with the same strides, also for a slice: kernels and compiled code rely on them."""
    if buffer is None:
        return None
    return torch.empty_strided(buffer.size(), buffer.stride(), dtype=buffer.dtype, device=buffer.device)


def _drop(cell: list[Tensor]) -> None:
    """Drop the entry of a cache that was freed.

    This may happen anywhere, even in a FakeTensorMode, so the stamp is read without a torch operation.
    """
    _MADE.pop(ctypes.c_int64.from_address(cell[0].data_ptr()).value, None)


def _set_stamp(weight: Tensor, stamp: Tensor, *, kept: bool) -> None:
    """Record what the cache was computed from. `kept` caches stay for longer than a step and get a witness."""
    _forget(stamp)
    if weight.is_inference():  # such tensors have no version counter: never current
        return
    serial = next(_SERIAL)
    witness = Witness(weight) if kept and not _is_capturing(weight) else None
    _MADE[serial] = _Made(weakref.ref(weight), _storage_of(weight), _place_of(weight), weight._version, witness)
    stamp.fill_(serial)


def quantize_pair(
    x: Tensor,
    spec: Spec | None,
    transpose: Spec | None,
    quantizer: str,
    scale: Tensor | None = None,
    scale_t: Tensor | None = None,
) -> tuple[QTensor | None, QTensor | None]:
    """Quantize a matrix and its transpose, each if it has a spec, in one read if the quantizer can.

    Args:
        x: [M, K], without a graph.
        spec, transpose: the specs of x and x^T; None if it is not needed.
        quantizer: backend of `kernels.quantize`.
        scale, scale_t: their scales, if these are known beforehand.
    """
    if spec is not None and transpose is not None:
        return quantize_both(x, spec, transpose, scale=scale, transpose_scale=scale_t, backend=quantizer)
    if transpose is not None:
        return None, quantize_transposed(x, transpose, scale=scale_t, backend=quantizer)
    return (None if spec is None else quantize(x, spec, scale=scale, backend=quantizer)), None


class _Forms(NamedTuple):
    """What a cache makes of a weight: the GEMMs that read W and W^T, None if none does, and the quantizer."""

    w: GemmWay | None
    w_t: GemmWay | None
    quantizer: str

    @classmethod
    def parse(cls, w: str, w_t: str, quantizer: str) -> "_Forms":
        """Undo `spell`."""
        return cls(GemmWay.parse(w) if w else None, GemmWay.parse(w_t) if w_t else None, quantizer)

    def spell(self) -> tuple[str, str, str]:
        """Return the forms as the strings that a torch op can take."""
        return str(self.w or ""), str(self.w_t or ""), self.quantizer

    def make(self, weight: Tensor) -> tuple[QTensor | None, QTensor | None]:
        """Return W and W^T, quantized and laid out for the GEMMs that read them."""
        spec, transpose = (None if way is None else way.b for way in (self.w, self.w_t))
        q, q_t = quantize_pair(weight.detach(), spec, transpose, self.quantizer)
        return _lay_out(q, self.w), _lay_out(q_t, self.w_t)


def _lay_out(q: QTensor | None, way: GemmWay | None) -> QTensor | None:
    return None if q is None or way is None else prepare(q, way.a, backend=way.backend)


def _refresh(
    weight: Tensor, buffers: Buffers, stamp: Tensor, forms: _Forms, *, manual: bool, training: bool, changed: bool
) -> None:
    """Update the buffers if they are stale; `changed` means they are, whatever the version counter says."""
    capturing = _is_capturing(weight)
    if capturing:
        _CAPTURED.add(id(weight))
    if not changed and _is_current(weight, stamp) and (manual or not (capturing and training)):
        return
    if manual and not capturing:
        raise StaleWeightError(
            "the weight changed after it was quantized; "
            "hint: loka.refresh(model) after changing weights by hand, or weights='step'"
        )
    if not manual:
        _write(weight, buffers, stamp, forms, kept=not training)


def _tensors(q: QTensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if q is None else parts_of(q)


def _write(weight: Tensor, buffers: Buffers, stamp: Tensor, forms: _Forms, *, kept: bool) -> None:
    with torch.no_grad():
        q, q_t = forms.make(weight)
        for buffer, value in zip(buffers, (*_tensors(q), *_tensors(q_t)), strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        _set_stamp(weight, stamp, kept=kept)


@torch_op("refresh_weight", mutates=("data", "scale", "laid", "data_t", "scale_t", "laid_t", "stamp"))
def refresh_weight(
    weight: Tensor, data: Tensor | None, scale: Tensor | None, laid: Tensor | None, data_t: Tensor | None, scale_t: Tensor | None,
    laid_t: Tensor | None, stamp: Tensor, form: str, form_t: str, quantizer: str, manual: bool, training: bool,
) -> None:  # fmt: skip
    """Run `_refresh` in compiled code. An op takes no lists of tensors and no objects, so it gets them one by one.

    Args:
        weight: [N, K].
        data, scale, laid: buffers of the quantized weight, as in `WeightCache`.
        data_t, scale_t, laid_t: those of its transpose.
        stamp: what the buffers were computed from.
        form, form_t, quantizer: `_Forms.spell`.
        manual: whether only `loka.refresh` may update them.
        training: whether the weight trains.
    """
    changed = _was_changed_unseen(weight, stamp, manual=manual)
    forms = _Forms.parse(form, form_t, quantizer)
    buffers = [data, scale, laid, data_t, scale_t, laid_t]
    _refresh(weight, buffers, stamp, forms, manual=manual, training=training, changed=changed)


@fake_of(refresh_weight)
def _(weight, data, scale, laid, data_t, scale_t, laid_t, stamp, form, form_t, quantizer, manual, training):  # type: ignore[no-untyped-def]
    return None


class WeightCache:
    """The buffers of one quantized weight: `data` for fprop, `data_t` transposed for dgrad; None if not needed.

    `laid` has the scales in a backend's own layout, if it needs one besides `scale`.
    """

    def __init__(
        self,
        weight: Tensor,
        form: GemmWay | None,
        form_t: GemmWay | None,
        *,
        quantizer: str,
        manual: bool,
        site: str = "",
    ) -> None:
        self.forms, self.manual = _Forms(form, form_t, quantizer), manual
        _SITES[id(weight)] = site
        _UNSEEN.discard(id(weight))
        self.weight_id = id(weight)
        self.spelled = self.forms.spell()
        with torch.inference_mode(False), torch.no_grad():
            self.stamp = torch.zeros((), dtype=torch.int64)
            q, q_t = self.forms.make(weight)
            self.data, self.scale, self.laid = _tensors(q)
            self.data_t, self.scale_t, self.laid_t = _tensors(q_t)
            self.layouts = (layout_of(q), layout_of(q_t))
            _set_stamp(weight, self.stamp, kept=True)  # weights may be loaded between conversion and the first step
        self.cell = [self.stamp]
        weakref.finalize(self, _drop, self.cell).atexit = False

    def get(self, weight: Tensor, *, training: bool) -> tuple[QTensor | None, QTensor | None]:
        """Return the current weight and its transpose, quantized."""
        if torch.compiler.is_compiling():
            refresh_weight(weight, *self._buffers(), self.stamp, *self.spelled, self.manual, training)
            return self._assemble(weight, self._buffers())
        made = None if self.manual else _MADE.get(int(self.stamp))
        changed = _was_changed_unseen(weight, self.stamp, manual=self.manual)
        if made is not None and (not made.is_of(weight) or id(weight) in _UNSEEN):
            self.renew()  # another tensor, or values changed unseen: the old buffers may still be needed by a backward
        now = vars(self).copy()  # a consistent snapshot: an optimizer in another thread may renew the buffers meanwhile
        buffers: Buffers = [now[name] for name in _BUFFERS]
        _refresh(weight, buffers, now["stamp"], self.forms, manual=self.manual, training=training, changed=changed)
        return self._assemble(weight, buffers)

    def _assemble(self, weight: Tensor, buffers: Buffers) -> tuple[QTensor | None, QTensor | None]:
        (n, k), (data, scale, laid, data_t, scale_t, laid_t) = weight.shape, buffers
        q = q_t = None
        if self.forms.w is not None and data is not None and scale is not None:
            q = assemble(data, scale, laid, self.forms.w.b, (n, k), self.layouts[0])
        if self.forms.w_t is not None and data_t is not None and scale_t is not None:
            q_t = assemble(data_t, scale_t, laid_t, self.forms.w_t.b, (k, n), self.layouts[1])
        return q, q_t

    def rewrite(self, weight: Tensor, *, kept: bool = True) -> None:
        """Quantize now, whatever the stamp says; in place if a CUDA graph reads the buffers.

        The caller takes responsibility for the weight, so it counts as current again.
        """
        _UNSEEN.discard(id(weight))
        self.renew()
        with torch.inference_mode(False):
            _write(weight, self._buffers(), self.stamp, self.forms, kept=kept)

    def invalidate(self) -> None:
        """Mark the cache as stale; the next forward fills the same buffers."""
        _forget(self.stamp)

    def renew(self) -> None:
        """Mark the cache as stale; the next forward fills new buffers and leaves the old ones to a pending backward."""
        stamp = self.stamp
        if not int(stamp):
            return  # nothing was quantized since the last time, or an in-place change invalidated it
        if self.weight_id not in _CAPTURED:
            with torch.inference_mode(False):
                fresh: dict[str, Tensor | None] = {name: _twin(getattr(self, name)) for name in _BUFFERS}
                fresh["stamp"] = torch.zeros_like(stamp)
            replaced = vars(self).copy()  # freeing a tensor lets other threads run, so the old ones outlive the update
            vars(self).update(fresh)  # atomically: a forward in another thread sees all of them or none
            self.cell[0] = self.stamp
            del replaced
        _forget(stamp)

    def _buffers(self) -> Buffers:
        return [getattr(self, name) for name in _BUFFERS]

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers() if buffer is not None)
