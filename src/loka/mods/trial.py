"""Trial: whether a model still computes what it did, seen on the example.

Before and after a mod the model is run on the example with the same random state

    in eval mode          results
    in training mode      results, the gradients of every parameter that the mod did not touch (embedding tables of more than 2^24 numbers are
                          left out), and the buffers it leaves (a batch norm's statistics)
    under autocast        for mods about precision: how far bfloat16 is from float32, which they must not make worse

and the two are compared with a tolerance that fits the claim: what summing in another order does to the narrowest type in the model ("exact"), ten times that
("rounding"), or what FP8 does to a tower. FP8 chains draw dropout themselves, from other random numbers than torch: they are compared without dropout. A change of the architecture must only run. A model whose results differ from run to run is compared as far as that allows, and the summary
says where it was not.

Running leaves no trace (`loka.units.undisturbed`): no gradient, no buffer, no random number.
"""

import random
import sys
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.lowp.passing import without_dropout
from loka.records.mods import ModClass
from loka.units.example import call_model, tensors_in
from loka.units.flow import Flow, record
from loka.units.undisturbed import set_mode, undisturbed

Mode = Literal["eval", "training", "autocast"]
SEED = 20
# Relative error (Frobenius) of a result for "exact": sums in another order.
_EXACT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_ROUNDING = 10.0  # times that: another order of operations
_GRADIENTS = 30.0  # times that: a backward pass through them
_WORSE = 3.0  # times the error that autocast had: two errors of one size differ by chance
# elements: gradients of larger parameters, which are embedding tables, are not asked for; they would fill the memory
_LARGE = 2**24
_FP8 = 0.6  # of towers in FP8, layers deep: tells another function (1.4 for unrelated numbers) from a coarse one; how coarse it may be, Probe judges


@dataclass(frozen=True)
class Outcome:
    """One run: results, gradients by the identity of their parameter, or what it raised."""

    results: list[Tensor] = field(default_factory=list)
    gradients: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)  # after the run: what training leaves for eval mode
    error: str | None = None
    without_gradients: str | None = None  # why there are none


Outcomes = dict[Mode, Outcome]


class Trial:
    """A model, an example, and what the model last computed on it."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        """Raises ValueError for an example that the model cannot run."""
        self._model, self._example, self._low = model, example, False
        self._last: Outcomes = {mode: self._run_in(mode) for mode in ("eval", "training")}
        if self._last["eval"].error and self._last["training"].error:
            raise ValueError(
                f"the model cannot run the example: {self._last['eval'].error}; hint: example is the model's input, a tuple for several arguments, "
                "a dict for keyword arguments, (batch,) for one argument that is a tuple or a dict; mods.capture_example takes it from a call"
            )
        self.notes = list(self._tell())

    def prepare(self, *, autocast: bool, low: bool = False) -> None:
        """Look at the model under autocast too, or no longer, and for a change that runs something in FP8 (`low`) without dropout; before it is changed."""
        if low != self._low:
            self._low = low
            self._last["training"] = self._run_in("training")
        if not autocast:
            self._last.pop("autocast", None)
        elif "autocast" not in self._last:
            self._last["autocast"] = self._run_in("autocast")

    def refuse(self, effect: ModClass, *, touched: Collection[int] = (), low: bool = False) -> str | None:
        """Why a change must be taken back; None where it keeps its word, and then it is what the next one is compared with.

        Args:
            effect: what the change claims.
            touched: parameters, by identity, whose gradients the change moves on purpose.
            low: whether the change runs something in FP8.
        """
        claim = _Claim(effect, touched, low)
        now = {mode: self._run_in(mode) for mode in self._last}
        for mode, before in self._last.items():
            if before.error is not None:
                continue
            if (error := now[mode].error) is not None:
                return f"{_NAMES[mode]} the model fails: {error}"
            if effect != "architecture" and (why := self._differ(mode, now, claim)):
                return f"{_NAMES[mode]} {why}"
        self._last = now
        return None

    def _differ(self, mode: Mode, now: Outcomes, claim: "_Claim") -> str | None:
        """What differs, beyond what the model's types and its own noise explain; both are only looked for where something does."""
        if claim.compare(mode, self._last, now, self._narrowest(set()), 0.0) is None:
            return None
        flow = record(self._model, self._example, training=mode == "training")
        inside = flow.dtypes if isinstance(flow, Flow) else set()
        noise = _noise(now[mode], self._run_in(mode))
        narrowest = self._narrowest(inside)
        if noise > claim.limit(narrowest):
            self.notes.append(f"not checked {_NAMES[mode]}: two runs of the model itself differ by {noise:.1e}")
            return None
        return claim.compare(mode, self._last, now, narrowest, noise)

    def _narrowest(self, inside: set[torch.dtype]) -> torch.dtype:
        """The type whose rounding the results carry. TF32 has float16's digits."""
        tensors = [*self._model.parameters(), *(t for outcome in self._last.values() for t in outcome.results)]
        dtypes = {dtype for dtype in (*inside, *(t.dtype for t in tensors)) if dtype in _EXACT}
        if any(t.is_cuda for t in tensors) and torch.backends.cuda.matmul.allow_tf32:
            dtypes.add(torch.float16)
        return max(dtypes or {torch.float32}, key=lambda dtype: _EXACT[dtype])

    def _run_in(self, mode: Mode) -> Outcome:
        kind = next((p.device.type for p in self._model.parameters()), "cpu")
        # in training alone: an encoder's fused path in eval mode is not taken while any function mode is there
        drawing = _DrawInOrder(nothing=self._low) if mode == "training" else nullcontext()
        chains = without_dropout() if self._low else nullcontext()
        try:
            with undisturbed(self._model), torch.set_grad_enabled(mode == "training"), chains:
                set_mode(self._model, mode == "training")
                _seed()
                with torch.autocast(kind, dtype=torch.bfloat16, enabled=mode == "autocast"), drawing:
                    output = call_model(self._model, self._example)
                results = list(tensors_in(output))
                gradients, why = self._differentiate(results) if mode == "training" else ({}, None)
                buffers = {n: b.detach().clone() for n, b in self._model.named_buffers()} if mode == "training" else {}
                return Outcome([t.detach().clone() for t in results], gradients, buffers, None, why)
        except Exception as error:  # whatever a user's forward raises: the reason is reported
            first = str(error).strip().splitlines() or [""]
            return Outcome(error=f"{type(error).__name__}: {first[0]}")

    def _differentiate(self, results: list[Tensor]) -> tuple[dict[int, tuple[str, Tensor]], str | None]:
        """Of the results, weighed by fixed random numbers; with autograd.grad, which leaves .grad and whatever hangs on it alone."""
        every = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        named = [(n, p) for n, p in every if p.numel() <= _LARGE and not self._is_fused(n)]
        ends = [t for t in results if t.requires_grad and t.is_floating_point()]
        if not named or not ends:
            return {}, None
        generator = torch.Generator().manual_seed(SEED)
        weights = [torch.randn(t.shape, generator=generator).to(t) for t in ends]
        try:
            found = torch.autograd.grad(ends, [p for _, p in named], weights, allow_unused=True)
        except RuntimeError as error:
            return {}, str(error).strip().splitlines()[0]
        pairs = zip(named, found, strict=True)
        return {id(p): (n, torch.zeros_like(p) if g is None else g.detach()) for (n, p), g in pairs}, None

    def _is_fused(self, parameter: str) -> bool:
        """Whether a backward pass updates a parameter (FBGEMM's embedding tables do): that would be no mere look."""
        owner = self._model.get_submodule(parameter.rpartition(".")[0])
        return any(base.__module__.startswith("fbgemm_gpu") for base in type(owner).__mro__)

    def _tell(self) -> Iterator[str]:
        for mode, outcome in self._last.items():
            if outcome.error:
                yield f"not checked {_NAMES[mode]}: the model fails on the example, {outcome.error}"
            if outcome.without_gradients:
                yield f"gradients were not checked: {outcome.without_gradients}"


@dataclass(frozen=True)
class _Claim:
    """What a change promises, and the comparison that goes with it."""

    effect: ModClass
    touched: Collection[int]
    low: bool

    def limit(self, narrowest: torch.dtype) -> float:
        """The relative error of a result that the promise allows."""
        if self.low:
            return _FP8
        return _EXACT[narrowest] * (_ROUNDING if self.effect == "rounding" else 1.0)

    def compare(
        self, mode: Mode, before: Outcomes, after: Outcomes, narrowest: torch.dtype, noise: float
    ) -> str | None:
        """The first difference that is larger."""
        limit = self.limit(narrowest) + 2 * noise
        if mode == "autocast":
            return None if self.low else _compare_autocast(before, after, limit)
        why = _compare_results(before[mode].results, after[mode].results, limit, self.effect)
        if why is None:
            why = _compare_buffers(before[mode].buffers, after[mode].buffers, limit)
        if why is None and not self.low:
            why = _compare_gradients(before[mode], after[mode], limit * _GRADIENTS, self.touched)
        return why


_NAMES: dict[Mode, str] = {"eval": "in eval mode", "training": "in training mode", "autocast": "under autocast"}


class _DrawInOrder(TorchFunctionMode):
    """Dropout draws element by element. torch draws in the order in which a tensor lies in memory, which a change of layout may change: the same distribution, other draws. `nothing`: it drops nothing."""

    def __init__(self, *, nothing: bool = False) -> None:
        super().__init__()
        self._nothing = nothing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout) and args and (self._nothing or not kwargs.get("inplace", args[3:4] == (True,))):  # fmt: skip
            x, p, training = _dropout_arguments(func, args, kwargs)
            if self._nothing:
                return x
            if training and 0 < p < 1:
                kept = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
                return x * (kept / (1 - p))
        return func(*args, **kwargs)


def _dropout_arguments(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, float, bool]:
    """Of torch.nn.functional.dropout(input, p, training, inplace) or torch.dropout(input, p, train)."""
    mode = "training" if func is F.dropout else "train"
    given = dict(zip(("input", "p", mode), args, strict=False)) | kwargs
    return given["input"], given.get("p", 0.5), given.get(mode, True)


def _seed() -> None:
    """Generators one by one: torch.manual_seed would also seed devices that nobody uses, now or when they are first used."""
    torch.default_generator.manual_seed(SEED)
    for generator in torch.cuda.default_generators if torch.cuda.is_initialized() else ():  # type: ignore[no-untyped-call]
        generator.manual_seed(SEED)
    random.seed(SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)


def _noise(first: Outcome, second: Outcome) -> float:
    """How far two runs of one model are apart."""
    if first.error or second.error or len(first.results) != len(second.results):
        return 0.0
    pairs = zip(first.results, second.results, strict=True)
    return max((_distance(a, b) for a, b in pairs if a.shape == b.shape), default=0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |a| over finite entries; infinite where one is finite and the other is not. For integers, the share that differs."""
    if torch.equal(a, b):
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float((a != b).double().mean())
    a, b = a.double(), b.double()
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).norm() / a.norm().clamp_min(torch.finfo(torch.float32).tiny)) if a.numel() else 0.0


def _compare_results(before: list[Tensor], after: list[Tensor], limit: float, effect: ModClass) -> str | None:
    shapes = [tuple(t.shape) for t in before], [tuple(t.shape) for t in after]
    if shapes[0] != shapes[1]:
        return f"it returns {shapes[1][:4]} instead of {shapes[0][:4]}"
    for index, (was, now) in enumerate(zip(before, after, strict=True)):
        whole = not was.is_floating_point()
        bound = (0.0 if effect == "exact" else 0.01) if whole else limit
        if (distance := _distance(was, now)) > bound:
            which = f"result {index}" if len(before) > 1 else "the result"
            return f"{which} changes by {distance:.1e}, more than the {bound:.1e} that {effect} allows"
    return None


def _compare_buffers(before: dict[str, Tensor], after: dict[str, Tensor], limit: float) -> str | None:
    for name in before.keys() & after.keys():
        if before[name].shape == after[name].shape and (distance := _distance(before[name], after[name])) > limit:
            return f"{name} becomes another value, {distance:.1e} off"
    return None


def _compare_gradients(before: Outcome, after: Outcome, limit: float, touched: Collection[int]) -> str | None:
    new = [name for key, (name, _) in after.gradients.items() if key not in before.gradients]
    if new and before.gradients:
        return f"{new[0]} is another Parameter, which an optimizer that exists does not know"
    shared = [key for key in before.gradients if key in after.gradients and key not in touched]
    total = sum(float(before.gradients[key][1].double().square().sum()) for key in shared) ** 0.5
    for key in shared:
        name, was = before.gradients[key]
        now = after.gradients[key][1]
        size = max(float(was.double().norm()), 1e-3 * total)
        distance = float((was.double() - now.double()).norm())
        if not distance <= limit * size and bool(torch.isfinite(was).all()):
            return f"the gradient of {name} changes by {distance / max(size, 1e-300):.1e}, more than {limit:.1e}"
    return None


def _compare_autocast(before: Outcomes, after: Outcomes, limit: float) -> str | None:
    """Results under autocast against those in float32, before and after."""
    if before["eval"].error or after["eval"].error:
        return None
    pairs = [zip(run["eval"].results, run["autocast"].results, strict=False) for run in (before, after)]
    was, now = (
        max((_distance(a, b.to(a.dtype)) for a, b in pair if a.is_floating_point()), default=0.0) for pair in pairs
    )
    if now > _WORSE * was + max(limit, _EXACT[torch.bfloat16]):
        return f"the error of bfloat16 grows from {was:.1e} to {now:.1e}"
    return None
