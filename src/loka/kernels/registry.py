"""Which backends exist for each op. Adding a kernel is one file and one row here.

Nothing is imported until a backend is asked for. `pick` never substitutes: an explicit name that cannot run raises with its reason, and `auto`
returns what it chose together with everything that refused. What is in BY_NAME `auto` never picks.
"""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import torch

from loka.formats import QTensor, Spec
from loka.kernels.backend import Backend, UnsupportedError, Verdict

# In order of preference for `auto`: dispatch replaces this order by measured times, the order only decides where nothing was measured.
BACKENDS: dict[str, tuple[str, ...]] = {
    "quantize": ("triton", "compiled", "reference"),
    "norm_quantize": ("triton", "reference"),
    "fused_linear": ("triton", "reference"),
    "attention": ("triton", "reference"),
    "masked_attention": ("triton", "torch", "reference"),
    "interaction": ("triton", "reference"),
    "dots": ("triton", "reference"),
    "mixed_dots": ("triton", "torch", "reference"),
    "scaled_mm": ("torch", "triton", "deepgemm", "fbgemm", "torchao", "reference"),
    "grouped_mm": ("torch", "triton", "deepgemm", "reference"),
    "beam_attention": ("triton", "torch", "reference"),
    "topk": ("triton", "torch", "reference"),
    "route": ("triton", "reference"),
    "embedding_bag": ("triton", "torch", "fbgemm", "reference"),
    "embedding_update": ("triton", "reference"),
}

# Backends that `auto` passes over, and why: they are for callers who ask for them by name.
BY_NAME: dict[tuple[str, str], str] = {
    ("quantize", "compiled"): "is only asked for by name: it is fast inside torch.compile, and slow outside",
    ("embedding_bag", "fbgemm"): "is only asked for by name: results would depend on what is installed",
}

_LOADED: dict[str, ModuleType] = {}


@dataclass(frozen=True)
class Selection:
    """A backend that will run, and why the ones before it will not."""

    name: str
    backend: Backend
    refusals: dict[str, str]


_Question = tuple[str, Any, torch.device, tuple[str, ...] | None, str | None, bool]  # last: of that backend alone
_ANSWERS: dict[_Question, Selection] = {}
_MANY_ANSWERS = 4096


def backend(op: str, name: str) -> Backend:
    """The module of one backend, imported when it is first asked for.

    Args:
        op: of the registry.
        name: of the backend.

    Returns:
        A module with `supports` and `run`.

    Raises:
        ValueError: no such op or backend; the message lists them.

    Example:
        >>> backend("scaled_mm", "reference").supports(call, torch.device("cpu"))
    """
    if op not in BACKENDS:
        raise ValueError(f"no op {op!r}; ops are {', '.join(BACKENDS)}")
    if name not in BACKENDS[op]:
        raise ValueError(f"{op} has no backend {name!r}; backends are {', '.join(BACKENDS[op])}")
    key = f"{op}.{name}"
    if key not in _LOADED:  # torch.compile cannot trace an import: `load` does it before the first traced call
        _LOADED[key] = import_module(f"loka.kernels.{key}")
    return cast(Backend, _LOADED[key])


def load(op: str) -> None:
    """Import the backends of an op, so that later look-ups can be traced by torch.compile without a graph break."""
    for name in BACKENDS[op]:
        backend(op, name)


@contextmanager
def offering(names: Collection[str]) -> Iterator[None]:
    """Inside this block no other backends exist: `auto` does not see them, preferred or not, and asking for one by name raises. An op that has none of them keeps its own."""
    before = dict(BACKENDS)
    kept = {op: tuple(name for name in found if name in names) for op, found in before.items()}
    BACKENDS.update({op: found for op, found in kept.items() if found})
    try:
        yield
    finally:
        BACKENDS.update(before)


def verdicts(op: str, call: Any, device: torch.device) -> dict[str, Verdict]:
    """What every backend of an op says to a call.

    Args:
        op: of the registry.
        call: what would be run.
        device: where.

    Returns:
        Yes, or no with the reason, by backend.

    Example:
        >>> {name: v.reason for name, v in verdicts("scaled_mm", call, torch.device("cpu")).items()}
    """
    return {name: backend(op, name).supports(call, device) for name in BACKENDS[op]}


def prepare(op: str, name: str, weight: QTensor, a: Spec) -> QTensor:
    """A weight as a backend reads it beside operands of Spec `a`; the weight itself where the backend lays nothing out."""
    return prepare_for(backend(op, name), weight, a)


def prepare_for(chosen: Any, weight: QTensor, a: Spec) -> QTensor:
    """`prepare` for a backend at hand, which may be anybody's."""
    lay_out = getattr(chosen, "prepare", None)
    prepared: QTensor = weight if lay_out is None else lay_out(weight, a)
    return prepared


def pick(op: str, name: str, call: Any, device: torch.device, *, prefer: str | None = None) -> Selection:
    """A backend for a call.

    Args:
        op: of the registry.
        name: a backend, or `auto`: the preferred one where it can run the call, else the first that can.
        call: what is to be run.
        device: where.
        prefer: what `auto` tries first.

    Returns:
        The backend, and who refused before it.

    Raises:
        UnsupportedError: a named backend cannot; the message has its reason.

    Example:
        >>> pick("scaled_mm", "auto", call, torch.device("cpu")).name
        'reference'
    """
    if name != "auto":
        return _remembered((op, call, device, BACKENDS.get(op), name, True), lambda: _ask_one(op, name, call, device))
    chosen = first(op, call, device, prefer=prefer)
    if chosen.name == "reference" and device.type == "cuda":
        _warn_of_emulation(op, call, chosen.refusals)
    return chosen


def first(op: str, call: Any, device: torch.device, *, prefer: str | None = None) -> Selection:
    """The first backend that can run a call, without a word about it; `prefer` is asked before the others.

    Asking all backends in every call cost the host up to 70 us where many refuse, so an answer is kept: what a backend supports depends on the call, the device and what is
    installed, and none of these changes under a running process.
    """
    return _remembered(
        (op, call, device, BACKENDS.get(op), prefer, False), lambda: _ask_in_order(op, call, device, prefer)
    )


def _remembered(key: _Question, ask: Callable[[], Selection]) -> Selection:
    """The answer to a question that may have been asked before; a refusal raises, and is not kept."""
    if torch.compiler.is_compiling():  # asked once, while tracing
        return ask()
    try:
        known = _ANSWERS.get(key)
    except TypeError:  # a symbolic shape has no hash
        return ask()
    if known is None or known.backend is not _LOADED.get(f"{key[0]}.{known.name}"):
        known = ask()
        if len(_ANSWERS) >= _MANY_ANSWERS:  # ragged batches: every number of rows is another call
            _ANSWERS.clear()
        _ANSWERS[key] = known
    return known


def _ask_one(op: str, name: str, call: Any, device: torch.device) -> Selection:
    verdict = backend(op, name).supports(call, device)
    if not verdict:
        raise UnsupportedError(f"{op} backend {name!r} cannot run {call} on {device}: {verdict.reason}")
    return Selection(name, backend(op, name), {})


def _ask_in_order(op: str, call: Any, device: torch.device, prefer: str | None = None) -> Selection:
    refusals: dict[str, str] = {}
    order = BACKENDS[op]
    if prefer in order:  # a row of the performance database may prefer what `offering` has taken away
        order = (prefer, *(name for name in order if name != prefer))
    for candidate in order:
        if (op, candidate) in BY_NAME and candidate != prefer:
            refusals[candidate] = BY_NAME[op, candidate]
            continue
        verdict = backend(op, candidate).supports(call, device)
        if verdict:
            return Selection(candidate, backend(op, candidate), refusals)
        refusals[candidate] = verdict.reason
    reasons = "\n".join(f"  {name}: {reason}" for name, reason in refusals.items())
    raise UnsupportedError(f"no backend of {op} can run {call} on {device}:\n{reasons}")


def _warn_of_emulation(op: str, call: Any, refusals: dict[str, str]) -> None:
    """On a GPU nobody expects emulation: say it, once per call site. torch.compile cannot trace a warning: for linears `loka.convert` has said it before."""
    if torch.compiler.is_compiling():
        return
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    warnings.warn(f"{op} {call} runs emulated on the GPU, no kernel can: {reasons}", stacklevel=3)
