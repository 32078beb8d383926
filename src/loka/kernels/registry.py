"""The registry of backends by op. Adding a kernel takes one file and one entry here.

Backends are imported lazily, on first use. `pick` never substitutes silently: a named backend that cannot run the call
raises with its reason, and `auto` returns its choice together with the reasons of every backend that refused. `auto`
never picks a backend listed in `BY_NAME`, nor one that was found to be wrong (`avoid`).
"""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from threading import Lock, get_ident
from types import ModuleType
from typing import Any, cast

import torch

from loka.formats import QTensor, Spec
from loka.kernels.backend import Backend, UnsupportedError, Verdict

# In the order in which `auto` tries them if nothing was measured; dispatch passes a measured preference.
BACKENDS: dict[str, tuple[str, ...]] = {
    "quantize": ("triton", "compiled", "reference"),
    "norm_quantize": ("triton", "reference"),
    "fused_linear": ("triton", "reference"),
    "attention": ("triton", "reference"),
    "masked_attention": ("triton", "torch", "reference"),
    "interaction": ("triton", "reference"),
    "dots": ("triton", "reference"),
    "mixed_dots": ("triton", "torch", "reference"),
    "scaled_mm": ("torch", "triton", "deepgemm", "fbgemm", "torchao", "cublaslt", "reference"),
    "grouped_mm": ("torch", "triton", "deepgemm", "reference"),
    "beam_attention": ("triton", "torch", "reference"),
    "topk": ("triton", "torch", "reference"),
    "route": ("triton", "reference"),
    "embedding_bag": ("triton", "torch", "fbgemm", "reference"),
    "embedding_update": ("triton", "reference"),
}

# Backends that `auto` skips, and why. They run only when named.
BY_NAME: dict[tuple[str, str], str] = {
    ("quantize", "compiled"): "must be asked for by name: it is fast inside torch.compile, and slow outside",
    ("scaled_mm", "cublaslt"): "must be asked for by name: torch.compile cannot look into it as into torch's own op",
    ("embedding_bag", "fbgemm"): "must be asked for by name: otherwise results would depend on what is installed",
}

# Fields of calls that say how many rows an op has: its kernels are the same for any number. Of lookups, `rows` are the table's.
ROWS = ("m", "tokens", "requests", "bags", "rows")

_AVOIDED: dict[tuple[str, str, Any], str] = {}  # op, backend, kind of calls: why `auto` does not pick it, see `avoid`
_LOADED: dict[str, ModuleType] = {}


@dataclass(frozen=True)
class Selection:
    """The chosen backend, and why each backend tried before it refused."""

    name: str
    backend: Backend
    refusals: dict[str, str]


Hear = Callable[[str, Selection, Any], None]
_hearing: tuple[Hear, ...] = ()  # see `listening`
_by_reference: tuple[tuple[int, str], ...] = ()  # threads that listen, and ops of which they want the reference to run
_HEARING_CHANGES = Lock()

# op, call, device, backends offered, backend asked for or preferred, whether only that backend may run
_CacheKey = tuple[str, Any, torch.device, tuple[str, ...] | None, str | None, bool]
_CACHE: dict[_CacheKey, Selection] = {}
_CACHE_LIMIT = 4096


def backend(op: str, name: str) -> Backend:
    """Return the module of a backend, importing it on first use.

    Args:
        op: a key of `BACKENDS`.
        name: one of the op's backends.

    Returns:
        A module with `supports` and `run`.

    Raises:
        ValueError: no such op or backend; the message lists the valid ones.

    Example:
        >>> backend("scaled_mm", "reference").supports(call, torch.device("cpu"))
    """
    if op not in BACKENDS:
        raise ValueError(f"no op {op!r}; ops are {', '.join(BACKENDS)}")
    if name not in BACKENDS[op]:
        raise ValueError(f"{op} has no backend {name!r}; backends are {', '.join(BACKENDS[op])}")
    key = f"{op}.{name}"
    if key not in _LOADED:  # torch.compile cannot trace an import; `load` imports beforehand
        _LOADED[key] = import_module(f"loka.kernels.{key}")
    return cast(Backend, _LOADED[key])


def load(op: str) -> None:
    """Import all backends of an op, so that torch.compile can trace later lookups without a graph break."""
    for name in BACKENDS[op]:
        backend(op, name)


@contextmanager
def offering(names: Collection[str]) -> Iterator[None]:
    """Restrict the registry to the backends `names` inside the block.

    `auto` does not see any other backend, even a preferred one, and asking for one by name raises. An op that has none
    of `names` keeps all of its backends.
    """
    before = dict(BACKENDS)
    kept = {op: tuple(name for name in found if name in names) for op, found in before.items()}
    BACKENDS.update({op: found for op, found in kept.items() if found})
    try:
        yield
    finally:
        BACKENDS.update(before)


@contextmanager
def listening(hear: Hear, *, references: Collection[str] = ()) -> Iterator[None]:
    """Tell `hear` of every call that picks a backend inside the block, on any thread; not of code that is being compiled.

    Several threads may listen at the same time: each hears the calls of all.

    Args:
        hear: called with the op, the selection and the call.
        references: ops of which the reference runs in place of the backend that is picked, so that no kernel must be
            compiled. `hear` is told what would have run. Only in this thread and in autograd's: a server in another
            thread keeps its kernels.

    Example:
        >>> calls = []
        >>> with listening(lambda op, chosen, call: calls.append((op, chosen.name, call))):
        ...     model(batch)
    """
    global _hearing, _by_reference
    with _HEARING_CHANGES:
        _hearing = (*_hearing, hear)
        mine = [(get_ident(), op) for op in references]
        _by_reference = (*_by_reference, *mine)
    try:
        yield
    finally:
        with _HEARING_CHANGES:
            _hearing = tuple(other for other in _hearing if other is not hear)
            left = list(_by_reference)
            for one in mine:
                left.remove(one)
            _by_reference = tuple(left)


def verdicts(op: str, call: Any, device: torch.device) -> dict[str, Verdict]:
    """Ask every backend of an op whether it supports a call.

    Args:
        op: a key of `BACKENDS`.
        call: the op's call description, for example a `MatmulCall`.
        device: the device it would run on.

    Returns:
        The verdicts by backend name; a refusal carries its reason.

    Example:
        >>> {name: v.reason for name, v in verdicts("scaled_mm", call, torch.device("cpu")).items()}
    """
    return {name: backend(op, name).supports(call, device) for name in BACKENDS[op]}


def kind_of(call: Any) -> Any:
    """Return a call with one row: calls that differ in their rows alone are of the same kind."""
    rows = next((name for name in ROWS if hasattr(call, name)), None)
    return call if rows is None else replace(call, **{rows: 1})


def avoid(op: str, name: str, call: Any, reason: str) -> None:
    """Let `auto` no longer pick a backend for a kind of calls, in this process. Asked for by name, it still runs.

    Args:
        op: a key of `BACKENDS`.
        name: the backend.
        call: a call of that kind (`kind_of`).
        reason: why; stands among the refusals of later selections.

    Example:
        >>> avoid("topk", "triton", call, "fails the conformance gate: on normal operands: values: 3 differ")
    """
    _AVOIDED[op, name, kind_of(call)] = reason
    _CACHE.clear()


def is_avoided(op: str, name: str, call: Any) -> str:
    """Return why `auto` does not pick a backend for a call.

    Args:
        op: a key of `BACKENDS`.
        name: the name of a backend.
        call: what the backend would run, as its `supports` gets it.

    Returns:
        The reason that was noted for calls of this kind; empty if `auto` may pick the backend.
    """
    if not _AVOIDED:  # nearly always, and all that is traced then
        return ""
    try:
        return _AVOIDED.get((op, name, kind_of(call)), "")
    except TypeError:  # a symbolic shape has no hash
        return ""


def prepare(op: str, name: str, weight: QTensor, a: Spec) -> QTensor:
    """Lay a weight out for a backend; return it as it is if the backend needs no layout.

    Args:
        op: a key of `BACKENDS`.
        name: the name of a backend.
        weight: the quantized weight.
        a: the Spec of the activations it will be multiplied with.

    Returns:
        The same values, in the layout that the backend's `run` wants.

    Example:
        >>> laid_out = prepare("scaled_mm", "deepgemm", weight, loka.Spec.parse("e4m3:1x128"))
    """
    return prepare_for(backend(op, name), weight, a)


def prepare_for(chosen: Any, weight: QTensor, a: Spec) -> QTensor:
    """Do what `prepare` does, for a backend that need not be in the registry.

    Args:
        chosen: a module of the registry or any object, with `prepare` or without.
        weight: the quantized weight.
        a: the Spec of the activations.
    """
    prepare_weight = getattr(chosen, "prepare", None)
    prepared: QTensor = weight if prepare_weight is None else prepare_weight(weight, a)
    return prepared


def pick(op: str, name: str, call: Any, device: torch.device, *, prefer: str | None = None) -> Selection:
    """Choose a backend for a call. On a GPU, warn if `auto` ends at the reference backend.

    Args:
        op: a key of `BACKENDS`.
        name: a backend, or "auto" for `prefer` if it supports the call, else the first backend that does.
        call: the op's call description, for example a `MatmulCall`.
        device: the device it runs on.
        prefer: the backend that "auto" tries first.

    Returns:
        The backend, and the reasons of those that refused before it.

    Raises:
        UnsupportedError: the named backend, or with "auto" every backend, refuses the call; the message has the
            reasons.

    Example:
        >>> pick("scaled_mm", "auto", call, torch.device("cpu")).name
        'reference'
    """
    if name != "auto":
        chosen = _cached(
            (op, call, device, BACKENDS.get(op), name, True), lambda: _select_named(op, name, call, device)
        )
    else:
        chosen = first(op, call, device, prefer=prefer)
        if chosen.name == "reference" and device.type == "cuda":
            _warn_emulated(op, call, chosen.refusals)
    if not torch.compiler.is_compiling() and _hearing:  # in this order: compiled code needs no guard then
        for hear in _hearing:
            hear(op, chosen, call)
        if _by_reference and _runs_by_reference(op, device):
            chosen = Selection("reference", backend(op, "reference"), chosen.refusals)
    return chosen


def _runs_by_reference(op: str, device: torch.device) -> bool:
    """Return whether this thread, or the one whose backward may run in it, wants the reference of an op to run.

    Not while a CUDA graph is being captured, which would keep what runs.
    """
    wanted_by = [thread for thread, wanted in _by_reference if wanted == op]
    if not wanted_by or (get_ident() not in wanted_by and torch._C._current_graph_task_id() == -1):
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def first(op: str, call: Any, device: torch.device, *, prefer: str | None = None) -> Selection:
    """Return the first backend that supports a call, trying `prefer` first. Unlike `pick`, it never warns.

    Asking all backends in every call cost the host up to 70 us where many refuse, so selections are cached. They depend
    on the call, the device and the installed libraries, none of which changes while the process runs.
    """
    return _cached((op, call, device, BACKENDS.get(op), prefer, False), lambda: _select_first(op, call, device, prefer))


def _cached(key: _CacheKey, select: Callable[[], Selection]) -> Selection:
    """Return the cached selection for `key`, or make it. A refusal raises and is not cached."""
    if torch.compiler.is_compiling():  # runs once, while tracing
        return select()
    try:
        known = _CACHE.get(key)
    except TypeError:  # a symbolic shape has no hash
        return select()
    if known is None or known.backend is not _LOADED.get(f"{key[0]}.{known.name}"):
        known = select()
        if len(_CACHE) >= _CACHE_LIMIT:  # ragged batches: each row count is a different call
            _CACHE.clear()
        _CACHE[key] = known
    return known


def _select_named(op: str, name: str, call: Any, device: torch.device) -> Selection:
    verdict = backend(op, name).supports(call, device)
    if not verdict:
        raise UnsupportedError(f"{op} backend {name!r} cannot run {call} on {device}: {verdict.reason}")
    return Selection(name, backend(op, name), {})


def _select_first(op: str, call: Any, device: torch.device, prefer: str | None = None) -> Selection:
    refusals: dict[str, str] = {}
    order = BACKENDS[op]
    if prefer in order:  # the performance database may prefer a backend that `offering` has removed
        order = (prefer, *(name for name in order if name != prefer))
    for candidate in order:
        if (op, candidate) in BY_NAME and candidate != prefer:
            refusals[candidate] = BY_NAME[op, candidate]
            continue
        if why := is_avoided(op, candidate, call):
            refusals[candidate] = why
            continue
        verdict = backend(op, candidate).supports(call, device)
        if verdict:
            return Selection(candidate, backend(op, candidate), refusals)
        refusals[candidate] = verdict.reason
    reasons = "\n".join(f"  {name}: {reason}" for name, reason in refusals.items())
    raise UnsupportedError(f"no backend of {op} can run {call} on {device}:\n{reasons}")


def _warn_emulated(op: str, call: Any, refusals: dict[str, str]) -> None:
    """Warn, once per call site, that a GPU call runs in the slow reference backend."""
    if torch.compiler.is_compiling():  # cannot trace a warning; for linears `loka.convert` has already warned
        return
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    warnings.warn(f"{op} {call} runs emulated on the GPU, no kernel can: {reasons}", stacklevel=3)
