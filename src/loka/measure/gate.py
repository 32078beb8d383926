"""The gate: check whether a backend computes a call correctly, at the exact shape, Specs and types that it will run.

    judge_backend("scaled_mm", registry.backend("scaled_mm", "triton"), call, device)      ok, or the reason why not

A GEMM runs on the thirteen operand sets of `stress`, a quantizer on its eight, all of them in each of several rounds,
so that between two calls on the same operands there are calls on others:

    1  fresh operands; memory that the allocator hands out next is filled with NaN
    2  operands in reused buffers, which held other values before; every allocation of torch is filled with NaN
    3  operands at odd addresses and, alternately, odd strides; memory handed out next is filled with large numbers

If the backend supports prepared weights, every other call of rounds 2 and 3 uses one. Every fifth call of these rounds
comes from another thread and, on a GPU, another stream, as those of a backward pass or a captured step do. A quantizer,
which has fewer sets, runs rounds 2 and 3 twice.

Every other op runs on five distributions of `inputs` through its benchmark adapter (softmax attention on a sixth,
`peaked`), six times on each, every second time in the buffers of the others, and at last on operands with a NaN, where
the exact result says where it must be seen. Its operands must not change.

The first result of a set is compared with the exact one, element by element (`comparison`). Later results are compared
with the first bit by bit and, if they differ, with the exact one: a kernel may add in another order each time, but must
be correct each time. Results must be new memory (of other ops, only those of fused layers are checked for this);
operands, and the memory around them, must not change. A backend may raise on an odd address or stride, but must not be
wrong there. For other ops twice the bound of their adapter's check is allowed: it is that of a single rounding.

The bound is 1.5 times the error of fast accumulation over all of K (`conformance.accumulation_error`), whether the call
permits it or not. Emulations that round each sum to 13 or 14 bits reach 1.0 times. How a library accumulates affects
its accuracy, which Probe measures, and is not a defect.

39 calls find a fault that affects a call with probability p with probability 1 - (1 - p)^39: 0.9998 at p = 0.2, 0.98 at
0.1, 0.32 at 0.01. Rarer faults may be missed.

Verdicts are cached for the life of the process. The reference backend itself (unless its function was replaced) is only
checked on two sets and a part of the rows.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.formats import quantize as quantize_by_law
from loka.kernels.backend import Backend
from loka.kernels.quantize import reference as quantize_reference
from loka.kernels.quantize.call import QuantizeCall
from loka.kernels.registry import prepare_for
from loka.kernels.scaled_mm import reference as matmul_reference
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure.adapter import Quantize, adapter_for
from loka.measure.arrangement import Arrangement, Place, Surroundings, all_unchanged, refill, same_values
from loka.measure.comparison import Product, compare_product
from loka.measure.conformance import (
    Conformance,
    accumulation_error,
    check_by_chance,
    check_quantized,
)
from loka.measure.rounding import remembering
from loka.measure.rounds import FRESH, Round, call_kernel, describe_call, fill_memory, order_calls, other_thread
from loka.measure.stress import MATMUL_SETS, QUANTIZE_SETS, OperandSet, matmul_set, quantize_set
from loka.records.prose import spell_error

T = TypeVar("T")
KEPT = 1 << 25  # elements of exact results cached between rounds
SHARED = 1 << 27  # elements of a result up to which backends are judged side by side, which keeps results of each
ANSWERS = 4096
OTHER_SETS = ("normal", "lognormal_rows", "outlier_channels", "zero_rows", "alike_rows")
OTHER_ROUNDS = 6
OTHER_HEADROOM = (
    2.0  # their bounds are those of a single rounding, which a kernel with other intermediate sums may exceed
)
HEADROOM = 1.5
LAW_SHAPE = {"m": 256, "k": 1024}
BLOCK = 128
LAWS = (matmul_reference.run, quantize_reference.run, quantize_by_law)  # as of import: tests may replace them later


_ANSWERS: dict[tuple[Any, ...], tuple[Conformance, Any]] = {}


def judge_backend(
    op: str, backend: Backend, call: Any, device: torch.device | str, *, moved: bool = True
) -> Conformance:
    """Judge a backend on a call, at the call's own shape. The verdict is cached.

    Args:
        op: an op that has an adapter in `loka.measure.adapter`, e.g. "scaled_mm" or "quantize".
        backend: any object with `supports` and `run`: a module of the registry or your own kernel.
        call: the op's description of shapes, Specs and types.
        device: the device to run on.
        moved: also put operands at odd addresses and strides (round 3), for which Triton compiles other kernels. False
            for a call whose operands are known to be where an allocator puts them.

    Returns:
        The verdict. A backend that does not support the call, raises, or is wrong in any round fails, with the reason.

    Example:
        >>> from loka.kernels.scaled_mm.call import MatmulCall
        >>> call = MatmulCall(64, 128, 32, loka.Spec.parse("e4m3:row"), loka.Spec.parse("e4m3:row"))
        >>> judge_backend("scaled_mm", loka.kernels.backend("scaled_mm", "reference"), call, "cpu").ok
        True
    """
    device = torch.device(device)
    supported = backend.supports(call, device)
    if not supported:
        return Conformance.failed(supported.reason)
    judges: dict[str, Callable[..., Conformance]] = {"scaled_mm": _judge_matmul, "quantize": _judge_quantize}
    judge = partial(judges.get(op, partial(_judge_other, op)), backend, call, device, moved=moved)
    return _judge_cached(_key(op, backend, call, device, moved), judge, backend, device)


def judge_products(
    backends: Sequence[Backend], call: MatmulCall, device: torch.device | str, *, moved: bool = True
) -> list[Conformance]:
    """Judge several backends of scaled_mm on one call. Operands and exact products, most of the work, are made once.

    Args:
        backends: the backends.
        call: the product.
        device: the device to run on.
        moved: see `judge_backend`.

    Returns:
        The verdict on each, which `judge_backend` then has cached.

    Example:
        >>> torch_, triton = judge_products([loka.kernels.backend("scaled_mm", name) for name in ("torch", "triton")], call, "cuda")
    """
    device = torch.device(device)
    keys = {id(b): _key("scaled_mm", b, call, device, moved) for b in backends}
    able = [b for b in backends if keys[id(b)] not in _ANSWERS and not _is_reference(b) and b.supports(call, device)]
    new = {keys[id(b)]: b for b in able}  # each once: engines may share a backend
    if len(new) > 1 and call.m * call.n <= SHARED:
        with suppress(torch.OutOfMemoryError), _exactly(device.type):  # one at a time, they may have enough memory
            found = _judge_matmuls(list(new.values()), call, device, moved=moved)
            for (key, backend), verdict in zip(new.items(), found, strict=True):
                _remember(key, verdict, backend)
    return [judge_backend("scaled_mm", backend, call, device, moved=moved) for backend in backends]


def _key(op: str, backend: Backend, call: Any, device: torch.device, moved: bool) -> tuple[Any, ...]:
    return op, identify(backend), call, str(device), moved


def judge_quantizer(quantize: Callable[..., QTensor], call: QuantizeCall, device: torch.device | str) -> Conformance:
    """Judge a quantizer that is a plain function of (x, spec) instead of a backend.

    Args:
        quantize: a function that returns a QTensor.
        call: shape, Spec and input type; no transpose.
        device: the device to run on.

    Returns:
        The verdict: the same bits as the reference in every round.

    Example:
        >>> from loka.kernels.quantize.call import QuantizeCall
        >>> call = QuantizeCall(64, 128, loka.Spec.parse("e4m3:row"))
        >>> judge_quantizer(loka.formats.quantize, call, "cpu").ok
        True
    """
    device = torch.device(device)
    key = ("quantizer", identify(quantize), call, str(device))
    judge = partial(_judge_quantize, _FunctionBackend(quantize), call, device, moved=True)
    return _judge_cached(key, judge, quantize, device)


class _FunctionBackend:
    """Wraps a function of (x, spec) as a backend of quantize."""

    def __init__(self, quantize: Callable[..., QTensor]) -> None:
        self.quantize = quantize

    def run(self, x: Tensor, spec: Any, **options: Any) -> tuple[QTensor, None]:
        return self.quantize(x, spec, **options), None


def forget_answers() -> None:
    """Clear the cached verdicts, e.g. after a kernel was changed in place."""
    _ANSWERS.clear()


def _judge_cached(
    key: tuple[Any, ...], judge: Callable[[], Conformance], subject: Any, device: torch.device
) -> Conformance:
    """Return the cached verdict, or judge and cache it. The subject is kept alive so that its id is not reused."""
    if key in _ANSWERS:
        return _ANSWERS[key][0]
    try:
        with _exactly(device.type):
            verdict = judge()
    except torch.OutOfMemoryError as error:  # there may be more memory the next time
        return _refuse_raising(error)
    except Exception as error:
        verdict = _refuse_raising(error)
    _remember(key, verdict, subject)
    return verdict


def _remember(key: tuple[Any, ...], verdict: Conformance, subject: Any) -> None:
    if len(_ANSWERS) >= ANSWERS:
        _ANSWERS.clear()
    _ANSWERS[key] = (verdict, subject)


def _refuse_raising(error: Exception) -> Conformance:
    """Return the verdict on a backend that raises."""
    return Conformance(False, math.inf, 0.0, spell_error(error), raised=True)


@contextmanager
def _exactly(kind: str) -> Iterator[None]:
    """Compute in the block exactly, whatever surrounds it.

    Autocast or TF32 would round what kernels are compared with, or return; exact gradients are computed by autograd; and
    operands have the dtype and the device that they have by default.
    """
    products, dtype = torch.backends.cuda.matmul, torch.get_default_dtype()
    with ExitStack() as undo:
        undo.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            undo.enter_context(torch.device("cpu"))
        try:
            if (before := torch.get_float32_matmul_precision()) != "highest":
                undo.callback(torch.set_float32_matmul_precision, before)
                torch.set_float32_matmul_precision("highest")
        except RuntimeError:  # it was set by the newer interface, and the two must not be mixed
            undo.callback(setattr, products, "fp32_precision", products.fp32_precision)
            products.fp32_precision = "ieee"
        with torch.autocast(kind, enabled=False), torch.inference_mode(False), torch.enable_grad():
            yield


def identify(subject: Any) -> tuple[Any, ...]:
    """Return a key for a backend or function: the object, and the function it runs, which a test may replace."""
    if isinstance(subject, partial):
        return (subject.func, subject.args, tuple(sorted(subject.keywords.items())))
    run = getattr(subject, "run", subject)
    return (id(subject), getattr(run, "__func__", run))


def _is_reference(backend: Any) -> bool:
    if isinstance(backend, _FunctionBackend):
        function = backend.quantize
        by_name = isinstance(function, partial) and function.keywords == {"backend": "reference"}
        return function is quantize_by_law or (by_name and quantize_reference.run is LAWS[1])
    return not hasattr(backend, "prepare") and any(getattr(backend, "run", None) is law for law in LAWS)


def _shrink_reference_call(backend: Any, call: Any) -> Any:
    """Return the call unchanged; for the reference itself, a smaller one with the same remainders."""
    if not _is_reference(backend):
        return call
    return replace(call, **{name: _shrink(getattr(call, name), limit) for name, limit in LAW_SHAPE.items()})


def _shrink(size: int, limit: int) -> int:
    return size if size <= limit + BLOCK else limit + size % BLOCK


def allow(call: MatmulCall) -> float:
    """Return the bound on the accumulation error for `comparison.compare_product`, for the call's K and formats."""
    # without scales along K, as if the sum were never moved to float32
    whole = [Spec(spec.format) for spec in (call.a, call.b)]
    return HEADROOM * accumulation_error(replace(call, a=whole[0], b=whole[1], fast_accum=True))


class _OnDemand(dict[str, T]):
    """What is made for each set of operands, when it is first asked for.

    A trial that is put off at its first launch, because a kernel is being compiled (`loka.kernels.compiling`), starts
    again: what it has made by then is made twice.
    """

    def __init__(self, make: Callable[[str], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> T:
        made = self[name] = self._make(name)
        return made


class _Operands:
    """The operand sets of one product and their exact results, for all backends that are judged on it."""

    def __init__(self, call: MatmulCall, device: torch.device, backends: int) -> None:
        self._for_all_rounds = len(MATMUL_SETS) * call.m * call.n <= KEPT
        keep = self._for_all_rounds or backends > 1
        self.sets = sets = _OnDemand(lambda name: matmul_set(call, name, seed=0, device=device))
        # not by way of `self`: in a cycle, all of it would stay in memory until Python looks for cycles
        self.products = _OnDemand(lambda name: Product(sets[name].a, sets[name].b, keep=keep))

    def leave(self, name: str) -> None:
        """Release the exact result of a set, unless those of all sets may stay."""
        if not self._for_all_rounds and name in self.products:
            self.products[name].forget()


class _MatmulTrial:
    """The state of judging one backend of scaled_mm.

    Args:
        backend: the backend.
        call: the product.
        device: the device to run on.
        operands: those of the product.
        thread: the other thread that some calls come from.
    """

    def __init__(
        self, backend: Any, call: MatmulCall, device: torch.device, operands: _Operands, thread: ThreadPoolExecutor
    ) -> None:
        self.backend, self.call, self.device = backend, call, device
        self.sets, self.products, self.allowed = operands.sets, operands.products, allow(call)
        self.arrangement = Arrangement(exact=getattr(backend, "any_alignment", False))
        self.first: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        self._thread = thread

    def step(self, number: int, round_: Round, name: str) -> Conformance:
        """Run and judge one call."""
        chosen = self.sets[name]
        with fill_memory(round_, self.call.m * self.call.n, self.device):
            out, a, b, beside = self._run(chosen, round_, number)
        # Until the next set: the next backend, which must compute the same, might get memory that has it already.
        self.last = out
        known = self.first.get(name)
        pairs = [(a.data, chosen.a.data), (b.data, chosen.b.data), (a.scale, chosen.a.scale), (b.scale, chosen.b.scale)]
        *same, as_before = all_unchanged([*pairs, (out, out if known is None else known)])
        if not (same[0] and same[1]):
            return Conformance.failed("it writes into its operands", self.allowed)
        if not (same[2] and same[3]):
            return Conformance.failed("it writes into the scales of its operands", self.allowed)
        if beside:
            return Conformance.failed("it writes beside its operands", self.allowed)
        if out.numel() and any(out.data_ptr() == known.data_ptr() for known in self.first.values()):
            reason = "the result lies in memory that an earlier result was returned in"
            return Conformance.failed(reason, self.allowed)
        if known is not None and as_before:
            return Conformance(True, 0.0, self.allowed)
        compare = partial(
            compare_product,
            exact=self.products[name],
            allowed=self.allowed,
            dtype=self.call.out_dtype,
            alike=chosen.alike,
        )
        verdict = compare(out)
        if verdict and known is None:
            self.first[name] = out
        elif verdict and known is not None and not compare(known):  # it was right when it was returned
            return Conformance.failed("it writes into a result that it has returned earlier", self.allowed)
        return verdict

    def _run(self, chosen: OperandSet, round_: Round, number: int) -> tuple[Tensor, QTensor, QTensor, bool]:
        try:
            return self._run_in(chosen, round_, number, round_.place)
        except Exception:
            if round_.place in ("fresh", "reused"):
                raise
            return self._run_in(chosen, round_, number, "fresh")  # a backend may refuse odd addresses and strides

    def _run_in(
        self, chosen: OperandSet, round_: Round, number: int, place: Place
    ) -> tuple[Tensor, QTensor, QTensor, bool]:
        """Return the result, the operands, and whether anything beside them was written to."""
        a = self.arrangement.put_quantized(chosen.a, place, number, role="a")
        b = self.arrangement.put_quantized(chosen.b, place, number + 5, role="b")
        around = Surroundings(a.data, a.scale, b.data, b.scale)
        weight = prepare_for(self.backend, b, a.spec) if round_ is not FRESH and number % 2 == 0 else b
        run = partial(self.backend.run, a, weight, out_dtype=self.call.out_dtype, fast_accum=self.call.fast_accum)
        out = call_kernel(run, self.device, self._thread if round_.is_elsewhere(number) else None)
        return out, a, b, around.changed()


def _judge_matmul(backend: Any, call: MatmulCall, device: torch.device, *, moved: bool) -> Conformance:
    (verdict,) = _judge_matmuls([backend], _shrink_reference_call(backend, call), device, moved=moved)
    return verdict


@torch.no_grad()
def _judge_matmuls(
    backends: Sequence[Any], call: MatmulCall, device: torch.device, *, moved: bool
) -> list[Conformance]:
    """Judge backends side by side: each set is shown to all of them before the next one is made.

    Too little memory is raised: it may be the other backends that take it.
    """
    operands = _Operands(call, device, len(backends))
    worst, ended = [0.0] * len(backends), dict[int, Conformance]()
    with ExitStack() as threads:
        trials = [
            _MatmulTrial(backend, call, device, operands, threads.enter_context(other_thread())) for backend in backends
        ]
        for number, round_, name in order_calls(MATMUL_SETS, reference=_is_reference(backends[0]), moved=moved):
            for at, trial in enumerate(trials):
                if at in ended:
                    continue
                try:
                    verdict = trial.step(number, round_, name)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    ended[at] = _refuse_raising(error)  # not the error itself: its frames hold tensors
                else:
                    worst[at] = max(worst[at], verdict.error)
                    if not verdict:
                        reason = describe_call(round_, number, name, verdict.reason)
                        ended[at] = Conformance(False, verdict.error, trial.allowed, reason)
                if at in ended:
                    trial.first.clear()  # of no use any more
            operands.leave(name)
    return [ended.get(at, Conformance(True, worst[at], trial.allowed)) for at, trial in enumerate(trials)]


@torch.no_grad()
def _judge_quantize(backend: Any, call: QuantizeCall, device: torch.device, *, moved: bool) -> Conformance:
    call = _shrink_reference_call(backend, call)
    arrangement, options_of = (Arrangement(exact=getattr(backend, "any_alignment", False)), Quantize()._options)
    seeds = {name: seed for seed, name in enumerate(QUANTIZE_SETS)}
    inputs_ = _OnDemand(
        lambda name: quantize_set(name, call.m, call.k, seed=seeds[name], dtype=call.in_dtype, device=device)
    )
    options = _OnDemand(lambda name: options_of(call, inputs_[name]))
    expected = _OnDemand(lambda name: _make_checks(call.spec, inputs_[name], options[name]))
    with other_thread() as thread:
        for number, round_, name in order_calls(QUANTIZE_SETS, reference=_is_reference(backend), moved=moved):
            x = arrangement.put(inputs_[name], round_.place, number, role="x")
            around = Surroundings(x)
            with fill_memory(round_, call.m * call.k, device):
                run = partial(backend.run, x, call.spec, **options[name])
                found = call_kernel(run, device, thread if round_.is_elsewhere(number) else None)
            wanted = expected[name]
            given, *same = all_unchanged([(x, inputs_[name]), *_parts_of(found, wanted)])
            for q, check in () if same and all(same) else zip(found, wanted, strict=True):
                verdict = check_quantized(q, check) if isinstance(check, QTensor) else check(q) if check else None
                if verdict is not None and not verdict:
                    return Conformance(False, verdict.error, 0.0, describe_call(round_, number, name, verdict.reason))
            if not given:
                return Conformance.failed(describe_call(round_, number, name, "it writes into its input"))
            if around.changed():
                return Conformance.failed(describe_call(round_, number, name, "it writes beside its input"))
    return Conformance(True, 0.0, 0.0)


def _make_checks(
    spec: Spec | None, x: Tensor, options: dict[str, Any]
) -> list[QTensor | Callable[[QTensor], Conformance] | None]:
    """Return what the quantized x and its transpose must be, or checks by statistics if rounding is stochastic."""
    if all(s is None or s.rounding == "nearest" for s in (spec, options.get("transpose"))):
        return list(LAWS[1](x, spec, **options))
    turned = (options.get("transpose"), x.T.contiguous(), options.get("transpose_scale"))
    return [
        None if s is None else partial(check_by_chance, x=matrix, spec=s, scale=scale)
        for s, matrix, scale in ((spec, x, options.get("scale")), turned)
    ]


def _parts_of(found: Sequence[QTensor | None], wanted: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that must be bitwise equal for all results to be right; none if that is not enough."""
    pairs = []
    for q, law in zip(found, wanted, strict=True):
        if law is not None:
            if not isinstance(law, QTensor) or not isinstance(q, QTensor) or q.spec != law.spec:
                return []
            pairs += [(q.data, law.data), (q.scale, law.scale)]
    return pairs


def _judge_other(op: str, backend: Any, call: Any, device: torch.device, *, moved: bool) -> Conformance:
    """Judge any other op with its adapter's check on several distributions, each repeated; at last on one with a NaN.

    Their operands are always where an allocator puts them, so `moved` changes nothing.
    """
    adapter, worst, held = adapter_for(op), Conformance(True, 0.0, 0.0), None
    sets = (*OTHER_SETS, *adapter.OWN_SETS)
    for seed, (name, rounds) in enumerate([*((name, OTHER_ROUNDS) for name in sets), ("nan_row", 1)]):
        if name == "nan_row" and not adapter.shows_nan(call):
            continue
        operands = adapter.operands(call, seed=seed, distribution=name, device=device)
        # the memory of all sets, which exposes what is cached by address; whichever is not used is as it was
        held = copy.deepcopy(operands) if held is None else refill(held, operands)
        exact = cache(partial(adapter.exact, call, operands))  # the most expensive part, so once for all rounds
        with remembering():
            for turn in range(rounds):
                used, kept = (held, operands) if turn % 2 else (operands, held)
                verdict = adapter.compare(backend, call, used, exact)
                if not same_values(used, kept):
                    return Conformance.failed(f"on {name} operands: it writes into its operands", verdict.tolerance)
                if not verdict and not verdict.error <= OTHER_HEADROOM * verdict.tolerance:
                    return Conformance(False, verdict.error, verdict.tolerance, f"on {name} operands: {verdict.reason}")
                verdict = replace(verdict, ok=True, reason="")
                worst = max(worst, verdict, key=lambda v: v.error)
    return worst
