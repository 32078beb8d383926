"""Trial: check on the example that a modified model still computes what it did.

Before and after a mod, the model runs on the example with the same random state, and these are recorded:

    in eval mode          results
    in training mode      results, buffers (a batch norm's statistics) and the gradients of every parameter that the mod
                          did not touch, except embedding tables of more than 2^24 numbers
    under autocast        for mods about precision: the error of bfloat16 relative to float32, which must not get worse

The tolerance depends on the claimed effect: the error of summing in another order in the narrowest dtype of the model
("exact"), ten times that ("rounding"), or the error of a tower in FP8. FP8 chains draw dropout from their own random
numbers, so they are compared without dropout. An architecture change only has to run. If a model's results differ from
run to run, the tolerance is widened by that much; what could not be checked is listed in the summary.

The runs have no side effects on gradients, buffers or random state (`loka.units.undisturbed`).
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
from loka.units.flow import Flow
from loka.units.recording import record
from loka.units.undisturbed import set_mode, sparing_weights, undisturbed

Mode = Literal["eval", "training", "autocast"]
SEED = 20
# Relative error (Frobenius) of a result for "exact": sums in another order.
_EXACT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_ROUNDING = 10.0  # "rounding" allows this many times the error of "exact": another order of operations
_GRADIENTS = 30.0  # gradients may differ by this many times more than results
_WORSE = 3.0  # the error under autocast may grow by this factor: two errors of one size differ by chance
# gradients of parameters with more elements (embedding tables) are not computed: they would fill the memory
_LARGE = 2**24
# Relative error allowed for towers in FP8, many layers deep. It tells a coarse result from another function (1.4 for
# unrelated numbers). Whether the precision is sufficient is for Probe to judge.
_FP8 = 0.6


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run: results, gradients by id of the parameter, buffers, or the error it raised."""

    results: list[Tensor] = field(default_factory=list)
    gradients: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)  # after a run in training mode
    error: str | None = None
    without_gradients: str | None = None  # why gradients could not be computed


Outcomes = dict[Mode, Outcome]


class Trial:
    """Compares the model's outcomes on the example with those before a change."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        """Run the model as it is. Raises ValueError if it cannot run the example."""
        self._model, self._example, self._low = model, example, False
        self._last: Outcomes = {mode: self._run_in(mode) for mode in ("eval", "training")}
        if self._last["eval"].error and self._last["training"].error:
            raise ValueError(
                f"the model cannot run the example: {self._last['eval'].error}; hint: example is the model's input, a tuple for several arguments, "
                "a dict for keyword arguments, (batch,) for one argument that is a tuple or a dict; mods.capture_example takes it from a call"
            )
        self.notes = list(self._list_notes())

    def prepare(self, *, autocast: bool, low: bool = False) -> None:
        """Record the unmodified model as the next mod needs it.

        Args:
            autocast: run it under autocast too.
            low: run it without dropout, because the mod runs parts of it in FP8.
        """
        if low != self._low:
            self._low = low
            self._last["training"] = self._run_in("training")
        if not autocast:
            self._last.pop("autocast", None)
        elif "autocast" not in self._last:
            self._last["autocast"] = self._run_in("autocast")

    def refuse(self, effect: ModClass, *, touched: Collection[int] = (), low: bool = False) -> str | None:
        """Return why a change must be undone. None accepts it, and the next change is compared with its outcome.

        Args:
            effect: the effect that the change claims.
            touched: ids of parameters whose gradients are expected to change.
            low: whether the change runs parts of the model in FP8.
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
        """Return the first difference that dtypes inside the model and its run-to-run noise do not explain.

        Both are costly to determine, so this is only done if there is a difference at all.
        """
        if claim.compare(mode, self._last, now, self._narrowest(set()), 0.0) is None:
            return None
        flow = record(self._model, self._example, training=mode == "training")
        inside = set(flow.dtypes) if isinstance(flow, Flow) else set()
        noise = _measure_noise(now[mode], self._run_in(mode))
        narrowest = self._narrowest(inside)
        if noise > claim.limit(narrowest):
            self.notes.append(f"not checked {_NAMES[mode]}: two runs of the model itself differ by {noise:.1e}")
            return None
        return claim.compare(mode, self._last, now, narrowest, noise)

    def _narrowest(self, inside: set[torch.dtype]) -> torch.dtype:
        """Return the dtype with the coarsest rounding in the model. TF32 has as many mantissa bits as float16."""
        tensors = [*self._model.parameters(), *(t for outcome in self._last.values() for t in outcome.results)]
        dtypes = {dtype for dtype in (*inside, *(t.dtype for t in tensors)) if dtype in _EXACT}
        if any(t.is_cuda for t in tensors) and torch.backends.cuda.matmul.allow_tf32:
            dtypes.add(torch.float16)
        return max(dtypes or {torch.float32}, key=lambda dtype: _EXACT[dtype])

    def _run_in(self, mode: Mode) -> Outcome:
        kind = next((p.device.type for p in self._model.parameters()), "cpu")
        # only in training mode: any function mode would disable an encoder's fused path in eval mode
        dropout = _OrderedDropout(off=self._low) if mode == "training" else nullcontext()
        chains = without_dropout() if self._low else nullcontext()
        try:
            with (
                undisturbed(self._model),
                sparing_weights(self._model),
                torch.set_grad_enabled(mode == "training"),
                chains,
            ):
                set_mode(self._model, mode == "training")
                _seed()
                with torch.autocast(kind, dtype=torch.bfloat16, enabled=mode == "autocast"), dropout:
                    output = call_model(self._model, self._example)
                results = list(tensors_in(output))
                gradients, why = self._differentiate(results) if mode == "training" else ({}, None)
                buffers = {n: b.detach().clone() for n, b in self._model.named_buffers()} if mode == "training" else {}
                return Outcome([t.detach().clone() for t in results], gradients, buffers, None, why)
        except Exception as error:  # whatever a user's forward raises: the reason is reported
            first = str(error).strip().splitlines() or [""]
            return Outcome(error=f"{type(error).__name__}: {first[0]}")

    def _differentiate(self, results: list[Tensor]) -> tuple[dict[int, tuple[str, Tensor]], str | None]:
        """Return the gradients of a randomly weighted sum of the results, or why there are none.

        autograd.grad does not touch `.grad`.
        """
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
        """Return True if the backward pass itself updates a parameter, as for FBGEMM's embedding tables."""
        owner = self._model.get_submodule(parameter.rpartition(".")[0])
        return any(base.__module__.startswith("fbgemm_gpu") for base in type(owner).__mro__)

    def _list_notes(self) -> Iterator[str]:
        for mode, outcome in self._last.items():
            if outcome.error:
                yield f"not checked {_NAMES[mode]}: the model fails on the example, {outcome.error}"
            if outcome.without_gradients:
                yield f"gradients were not checked: {outcome.without_gradients}"


@dataclass(frozen=True)
class _Claim:
    """The effect that a change claims, and the comparison that checks it."""

    effect: ModClass
    touched: Collection[int]
    low: bool

    def limit(self, narrowest: torch.dtype) -> float:
        """Return the relative error of results that the claim allows."""
        if self.low:
            return _FP8
        return _EXACT[narrowest] * (_ROUNDING if self.effect == "rounding" else 1.0)

    def compare(
        self, mode: Mode, before: Outcomes, after: Outcomes, narrowest: torch.dtype, noise: float
    ) -> str | None:
        """Return the first difference beyond the limit, in words, or None."""
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


class _OrderedDropout(TorchFunctionMode):
    """Dropout whose draws do not depend on the memory layout, which a mod may change.

    torch draws in memory order, so another layout gives the same distribution but other draws. `off` disables dropout.
    """

    def __init__(self, *, off: bool = False) -> None:
        super().__init__()
        self._off = off

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout) and args and (self._off or not kwargs.get("inplace", args[3:4] == (True,))):  # fmt: skip
            x, p, training = _parse_dropout_arguments(func, args, kwargs)
            if self._off:
                return x
            if training and 0 < p < 1:
                kept = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
                return x * (kept / (1 - p))
        return func(*args, **kwargs)


def _parse_dropout_arguments(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, float, bool]:
    """Return the input, p and training of F.dropout(input, p, training, inplace) or torch.dropout(input, p, train)."""
    mode = "training" if func is F.dropout else "train"
    given = dict(zip(("input", "p", mode), args, strict=False)) | kwargs
    return given["input"], given.get("p", 0.5), given.get(mode, True)


def _seed() -> None:
    """Seed the generators in use. torch.manual_seed would also seed devices that are not initialized yet."""
    torch.default_generator.manual_seed(SEED)
    for generator in torch.cuda.default_generators if torch.cuda.is_initialized() else ():  # type: ignore[no-untyped-call]
        generator.manual_seed(SEED)
    random.seed(SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)


def _measure_noise(first: Outcome, second: Outcome) -> float:
    """Return the largest relative difference between the results of two runs of one model."""
    if first.error or second.error or len(first.results) != len(second.results):
        return 0.0
    pairs = zip(first.results, second.results, strict=True)
    return max((_distance(a, b) for a, b in pairs if a.shape == b.shape), default=0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |a| over finite entries (inf if their positions differ); for integers, the share that differs."""
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
    """Compare the error of autocast relative to float32, before and after."""
    if before["eval"].error or after["eval"].error:
        return None
    pairs = [zip(run["eval"].results, run["autocast"].results, strict=False) for run in (before, after)]
    was, now = (
        max((_distance(a, b.to(a.dtype)) for a, b in pair if a.is_floating_point()), default=0.0) for pair in pairs
    )
    if now > _WORSE * was + max(limit, _EXACT[torch.bfloat16]):
        return f"the error of bfloat16 grows from {was:.1e} to {now:.1e}"
    return None
