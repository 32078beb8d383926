"""Quantised weights, and their transposes, made once and used until the weight changes.

    q   = quantize(W)      [N, K]   for fprop
    q_t = quantize(W^T)    [K, N]   for dgrad, from the same read of W

Each is kept as the backend of its GEMM reads it (`loka.kernels.prepared`): what a library wants padded or reordered is so once per step, not once per call.

A cached weight must never be stale. What it was made from is written into `stamp`, one integer that is kept, copied and restored together with the data; the
integer names an entry that holds the weight object, its storage, where and how it lies in it, and its version counter, and the cache is used only while all are the
same. Every in-place operation moves the counter (an optimizer step, load_state_dict, `weight.mul_`); replacing the parameter or its memory changes the others.

Under torch.compile the question is asked by `loka::refresh_weight`, an opaque op that looks at the live weight every time it runs: no guard, no recompilation, no
graph break. The stamp is an operand the op mutates, so copies that the compiler makes of the buffers carry their own.

What the version counter cannot show, and what is done about it:

    CUDA graphs       a replay asks nothing. While a graph is captured in training mode the weight is always quantised, inside the graph; in eval mode
                      the cache is used as it is, and `loka.refresh` rewrites it in place for the graph to see
    FSDP2             the all-gathered parameter keeps its counter on purpose. It arrives by assignment, and a Linear whose weight is assigned drops its cache
    hidden writes     to `weight.data` or a NumPy view of it; to a flat tensor that parameters are views of; by a collective (`dist.broadcast(weight)`,
                      `dist.all_reduce`, also of `weight.detach()`: they move no counter); to shared memory by another process. After any optimizer's step, and after a
                      change of train / eval mode, the weight of every Linear that trains is taken for changed: an optimizer that writes through `.data`, and master
                      weights copied back after the step, need nothing else. After any other such write call `loka.refresh(model)`; where nobody does, a
                      witness of the weight notices on one of the next calls (`loka.lowp.witness`), warns once, and the weight is quantised in every forward from then on

Backward reads what forward used. Whatever makes the cache anew without the weight itself being changed in place (an evaluation or a step of another optimizer between
forward and backward, functional_call) therefore fills new buffers and leaves the old ones to the backward that still wants them; a change in place overwrites them,
and autograd then refuses that backward, as it does for nn.Linear. Only buffers that a CUDA graph was captured with keep their addresses for good.

In doubt the weight is quantised again.
"""

import ctypes
import weakref
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from loka.formats import QTensor, Spec
from loka.kernels.op import fake_of, torch_op
from loka.kernels.prepared import assemble, layout_of, parts_of
from loka.kernels.quantize import quantize, quantize_both, quantize_transposed
from loka.kernels.scaled_mm import GemmWay, prepare
from loka.lowp.witness import Witness, warn_stale

# step: when the weight has changed. fresh: in every forward. manual: by loka.refresh and the optimizer hook alone; a stale use raises.
WeightPolicy = Literal["step", "fresh", "manual"]
POLICIES: tuple[str, ...] = get_args(WeightPolicy)
Buffers = list[Tensor | None]  # data, scales, scales as laid out: of the weight, then of its transpose
_BUFFERS = ("data", "scale", "laid", "data_t", "scale_t", "laid_t")
KEPT_FOR_LONG = 32  # uses in training without a step: no optimizer of torch's trains this weight


class StaleWeightError(RuntimeError):
    """A weight changed after it was quantised, and nothing allowed to quantise it again."""


@dataclass
class _Made:
    """What a cached weight was made from."""

    weight: weakref.ReferenceType[Tensor]
    storage: StorageWeakRef  # keeps the storage's address from being given to another one
    place: tuple[Any, ...]
    version: int
    witness: Witness | None = None  # None while every step makes it anew: such a weight is not kept for long
    uses: int = 0

    def is_of(self, weight: Tensor) -> bool:
        """Whether it was made from this tensor in this memory, whatever it holds now."""
        if self.weight() is not weight or weight.is_inference():
            return False
        same_storage: bool = self.storage.cdata == weight.untyped_storage()._cdata
        return same_storage and self.place == _place_of(weight)

    def still_holds(self, weight: Tensor) -> bool:
        """Whether the weight, which by all counters is the same, holds what it held, as far as a cheap look tells."""
        self.uses += 1
        if self.witness is None and self.uses == KEPT_FOR_LONG:
            self.witness = Witness(weight)
        return self.witness is None or self.witness.agrees(weight)


_MADE: dict[int, _Made] = {}
_CAPTURED: set[int] = set()  # ids of weights whose buffers a CUDA graph reads
# By id as well, and not by weak reference: torch swaps no tensor that somebody holds one to
_SITES: dict[int, str] = {}  # names, for whoever must name a weight: layers that share compiled code share no name
_UNSEEN: set[int] = set()  # weights that were changed unseen: quantised in every forward
_SERIAL = count(1)


def _storage_of(weight: Tensor) -> StorageWeakRef:
    return StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]


def _place_of(weight: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in its storage, and how."""
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def _is_current(weight: Tensor, stamp: Tensor) -> bool:
    made = _MADE.get(int(stamp))
    return made is not None and made.is_of(weight) and made.version == weight._version and id(weight) not in _UNSEEN


def _was_changed_unseen(weight: Tensor, stamp: Tensor, *, manual: bool) -> bool:
    """Whether a weight that seems current is not. Says so once; where nobody watches over it, it is never current again until it is refreshed by hand."""
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
    """An empty one with the strides of what may be a slice: kernels and compiled code count on them."""
    if buffer is None:
        return None
    return torch.empty_strided(buffer.size(), buffer.stride(), dtype=buffer.dtype, device=buffer.device)


def _drop(cell: list[Tensor]) -> None:
    """Forget a cache that is gone. It may end anywhere, a FakeTensorMode included: its stamp is read without a torch operation."""
    _MADE.pop(ctypes.c_int64.from_address(cell[0].data_ptr()).value, None)


def _set_stamp(weight: Tensor, stamp: Tensor, *, kept: bool) -> None:
    """`kept`: it is to stay for longer than a step."""
    _forget(stamp)
    if weight.is_inference():  # such tensors have no version counter: never current
        return
    serial = next(_SERIAL)
    witness = Witness(weight) if kept and not _is_capturing(weight) else None
    _MADE[serial] = _Made(weakref.ref(weight), _storage_of(weight), _place_of(weight), weight._version, witness)
    stamp.fill_(serial)


def quantize_weight(
    weight: Tensor, spec: Spec | None, transpose: Spec | None, quantizer: str
) -> tuple[QTensor | None, QTensor | None]:
    """W and W^T as asked for, from one read where the quantiser can."""
    weight = weight.detach()
    if spec is not None and transpose is not None:
        return quantize_both(weight, spec, transpose, backend=quantizer)
    if transpose is not None:
        return None, quantize_transposed(weight, transpose, backend=quantizer)
    return (None if spec is None else quantize(weight, spec, backend=quantizer)), None


def _refresh(
    weight: Tensor, buffers: Buffers, stamp: Tensor, form: GemmWay | None, form_t: GemmWay | None, quantizer: str, manual: bool, training: bool, changed: bool
) -> None:  # fmt: skip
    """Bring the buffers up to date, or leave them where they are; `changed`: they are not, whatever the counters say."""
    capturing = _is_capturing(weight)
    if capturing:
        _CAPTURED.add(id(weight))
    if not changed and _is_current(weight, stamp) and (manual or not (capturing and training)):
        return
    if manual and not capturing:
        raise StaleWeightError(
            "the weight changed after it was quantised; hint: loka.refresh(model) after changing weights by hand, or weights='step'"
        )
    if manual:
        return
    _write(weight, buffers, stamp, form, form_t, quantizer, kept=not training)


def _make(
    weight: Tensor, form: GemmWay | None, form_t: GemmWay | None, quantizer: str
) -> tuple[QTensor | None, QTensor | None]:
    """W and W^T, quantised and laid out for the GEMMs that read them."""
    q, q_t = quantize_weight(weight, None if form is None else form.b, None if form_t is None else form_t.b, quantizer)
    return (
        None if q is None or form is None else prepare(q, form.a, backend=form.backend),
        None if q_t is None or form_t is None else prepare(q_t, form_t.a, backend=form_t.backend),
    )


def _tensors(q: QTensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if q is None else parts_of(q)


def _write(
    weight: Tensor, buffers: Buffers, stamp: Tensor, form: GemmWay | None, form_t: GemmWay | None, quantizer: str, *, kept: bool
) -> None:  # fmt: skip
    with torch.no_grad():
        q, q_t = _make(weight, form, form_t, quantizer)
        for buffer, value in zip(buffers, (*_tensors(q), *_tensors(q_t)), strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        _set_stamp(weight, stamp, kept=kept)


def _parse(text: str) -> GemmWay | None:
    return GemmWay.parse(text) if text else None


@torch_op("refresh_weight", mutates=("data", "scale", "laid", "data_t", "scale_t", "laid_t", "stamp"))
def refresh_weight(
    weight: Tensor, data: Tensor | None, scale: Tensor | None, laid: Tensor | None, data_t: Tensor | None, scale_t: Tensor | None,
    laid_t: Tensor | None, stamp: Tensor, form: str, form_t: str, quantizer: str, manual: bool, training: bool,
) -> None:  # fmt: skip
    """`_refresh` for compiled code."""
    buffers = [data, scale, laid, data_t, scale_t, laid_t]
    changed = _was_changed_unseen(weight, stamp, manual=manual)
    _refresh(weight, buffers, stamp, _parse(form), _parse(form_t), quantizer, manual, training, changed)


@fake_of(refresh_weight)
def _(weight, data, scale, laid, data_t, scale_t, laid_t, stamp, form, form_t, quantizer, manual, training):  # type: ignore[no-untyped-def]
    return None


class WeightCache:
    """The forms of one weight in buffers: as the forward GEMM wants it, and transposed as the backward one does; None for what nobody asked for. `laid` are scales laid out apart from `scale`, where a backend wants them."""

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
        self.form, self.form_t, self.quantizer, self.manual = form, form_t, quantizer, manual
        _SITES[id(weight)] = site
        _UNSEEN.discard(id(weight))
        self.weight_id = id(weight)
        self.spelled = ("" if form is None else str(form), "" if form_t is None else str(form_t))
        with torch.inference_mode(False), torch.no_grad():
            self.stamp = torch.zeros((), dtype=torch.int64)
            q, q_t = _make(weight, form, form_t, quantizer)
            self.data, self.scale, self.laid = _tensors(q)
            self.data_t, self.scale_t, self.laid_t = _tensors(q_t)
            self.layouts = (layout_of(q), layout_of(q_t))
            _set_stamp(weight, self.stamp, kept=True)  # between a conversion and the first step weights are loaded
        self.cell = [self.stamp]
        weakref.finalize(self, _drop, self.cell).atexit = False

    def get(self, weight: Tensor, *, training: bool) -> tuple[QTensor | None, QTensor | None]:
        """The forms of `weight` as it is now."""
        if torch.compiler.is_compiling():
            refresh_weight(
                weight, self.data, self.scale, self.laid, self.data_t, self.scale_t, self.laid_t, self.stamp, *self.spelled,
                self.quantizer, self.manual, training,
            )  # fmt: skip
            return self._assemble(weight, self._buffers())
        made = None if self.manual else _MADE.get(int(self.stamp))
        changed = _was_changed_unseen(weight, self.stamp, manual=self.manual)
        if made is not None and (not made.is_of(weight) or id(weight) in _UNSEEN):
            self.renew()  # another tensor, or other values that no counter shows: the last one's backward may be to come
        now = vars(self).copy()  # one look: an optimizer in another thread may renew the buffers meanwhile
        buffers: Buffers = [now[name] for name in _BUFFERS]
        _refresh(weight, buffers, now["stamp"], self.form, self.form_t, self.quantizer, self.manual, training, changed)
        return self._assemble(weight, buffers)

    def _assemble(self, weight: Tensor, buffers: Buffers) -> tuple[QTensor | None, QTensor | None]:
        (n, k), (data, scale, laid, data_t, scale_t, laid_t) = weight.shape, buffers
        q = q_t = None
        if self.form is not None and data is not None and scale is not None:
            q = assemble(data, scale, laid, self.form.b, (n, k), self.layouts[0])
        if self.form_t is not None and data_t is not None and scale_t is not None:
            q_t = assemble(data_t, scale_t, laid_t, self.form_t.b, (k, n), self.layouts[1])
        return q, q_t

    def rewrite(self, weight: Tensor, *, kept: bool = True) -> None:
        """Quantise now, whatever the stamp says; where a CUDA graph looks, in place. Whoever says so watches over the weight."""
        _UNSEEN.discard(id(weight))
        self.renew()
        with torch.inference_mode(False):
            _write(weight, self._buffers(), self.stamp, self.form, self.form_t, self.quantizer, kept=kept)

    def invalidate(self) -> None:
        """Forget what this was made from; the next forward fills the same buffers."""
        _forget(self.stamp)

    def renew(self) -> None:
        """Forget what this was made from; the next forward fills new buffers, and the old ones stay what they are for a backward that has kept them."""
        stamp = self.stamp
        if not int(stamp):
            return  # nothing was made since the last time, or a change in place has ended what was
        if self.weight_id not in _CAPTURED:
            with torch.inference_mode(False):
                fresh: dict[str, Tensor | None] = {name: _twin(getattr(self, name)) for name in _BUFFERS}
                fresh["stamp"] = torch.zeros_like(stamp)
            replaced = vars(self).copy()  # freeing a tensor lets other threads run: the old ones outlive the update
            vars(self).update(fresh)  # at once: a forward in another thread sees all of them or none
            self.cell[0] = self.stamp
            del replaced
        _forget(stamp)

    def _buffers(self) -> Buffers:
        return [getattr(self, name) for name in _BUFFERS]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers() if buffer is not None)
