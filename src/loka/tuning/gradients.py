"""Whether the gradients that come out of the kernels are gradients: one backward pass as it will run, beside 16 bits and beside the reference.

The score predicts what rounding does to a gradient, and swapping measures the forward pass. Neither runs a backward kernel: one that is wrong at this shape, on this GPU, would train a model into the ground with every verdict
"within". So what is chosen runs forward and backward on batches that choose, and the gradients of every weight in it, and of what goes into it, which all that stands before it learns from, are held against

    16 bits          it must point the same way and have the same size, as far as FP8 can: a sign, a factor, a transpose, a scale that saturates
    the reference    the same plan with every kernel replaced by the law (`kernels/*/reference.py`): what a kernel gets wrong beyond the order in which it adds

A gradient that 16 bits do not determine cannot be asked for in FP8: where the first comparison fails, 16 bits run once more with the weights of linears moved by 2^-10 of their size, and what that turns or shrinks a gradient by is allowed for.
How far two runs of the law are apart when weights move so, about what another order of additions does, is measured too, since FP8 turns a small difference into that between two neighbouring numbers. Gradients are
compared as a whole and line by line: a kernel that is wrong in a few rows or columns changes little of the whole.

A unit whose gradients fail alone is left out, and says what was seen. Where the reference shows the same, FP8 is too coarse for them there and no kernel is wrong: then the linear with the worst gradient leaves, and what is left of its chain is compared anew. The model runs in eval mode: dropout inside a chain draws other numbers than torch's, so that two runs would differ by what they drop.
"""

import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from loka.dispatch.choosing import Offer
from loka.kernels import registry
from loka.nn.wrapping import named_sites
from loka.records import Plan
from loka.tuning.call import Call, Selection
from loka.tuning.comparing import converted
from loka.tuning.looking import ROWS
from loka.units.example import tensors_in
from loka.units.undisturbed import gradients_aside, train_recurrent, undisturbed

BATCHES = 2  # that are run
SAME_WAY = 0.6  # cos^2 of a gradient and that of 16 bits, at least: FP8 throughout a Wukong, a DLRM and tiny towers leaves 0.95 and more
SAME_SIZE = 1.4  # and how many times as long it may be along it, or as short; 0.95 to 1.03 were seen
LEAST_SIZE = 0.25  # of a gradient of 16 bits when weights are moved: what shrinks it further excuses no more
BESIDE_LAW = 0.15  # relative difference from the reference, at most ...
LINE_BESIDE_LAW = 0.5  # ... of a row or a column, beside its own size or that of most, whichever is larger ...
CHAOS = 3.0  # ... or so many times as much as two runs of the reference differ by
NUDGE = 2.0**-10  # of a weight
LAW = frozenset({"reference"})

Gradients = dict[str, list[Tensor]]  # matrices, by what they are of


@dataclass(frozen=True)
class Fault:
    """A gradient that is wrong.

    Args:
        linear: whose weight or input it belongs to.
        text: what was seen, and what was expected.
        size: how wrong, to say which is worst.
        coarse: the reference shows the same: no kernel is wrong, and what is left of the chain may stay without this linear.
    """

    linear: str
    text: str
    size: float
    coarse: bool = False


def verify_gradients(call: Call, selection: Selection, verified: set[str]) -> None:
    """Drop units, or linears of chains, whose gradients, as their kernels make them here, are not those of the model.

    Args:
        call: whose batches run.
        selection: what is in; what fails is dropped with the reason.
        verified: units that passed before, by `describe`; those that pass are added.
    """
    while selection.offers and not all(describe(offer) in verified for offer in selection.offers):
        exact = _run(call, selection, None)
        if isinstance(
            exact, Exception
        ):  # the model's own backward fails in eval mode, as that of what calls cuDNN directly does
            call.notes.append(f"gradients were not compared with 16 bits, which fail in eval mode: {type(exact).__name__}: {exact}")  # fmt: skip
            verified.update(describe(offer) for offer in selection.offers)
            return
        moved = cache(partial(_run, call, selection, None, nudged=True))
        if not (faults := _find_faults(call, selection, selection.offers, exact, moved)):
            verified.update(describe(offer) for offer in selection.offers)
            return
        alone = {o.name: _find_faults(call, selection, [o], exact, moved) for o in selection.offers}
        failing = [(offer, alone[offer.name][0]) for offer in selection.offers if alone[offer.name]]
        if not failing:  # together they are too far off, and none of them alone: the one that is worst among them
            worst = next(f for f in faults if any(f.linear in o.unit.linears for o in selection.offers))
            failing = [(next(o for o in selection.offers if worst.linear in o.unit.linears), worst)]
        for offer, fault in failing:
            if fault.coarse:
                selection.leave_out(fault.linear, fault.text, training=True)
            else:
                selection.drop(offer, fault.text)


def describe(offer: Offer) -> str:
    """What decides which kernels an offer runs."""
    return f"{offer.way} {' '.join(offer.unit.linears)}"


def _find_faults(call: Call, selection: Selection, offers: list[Offer], exact: Gradients, moved: Callable[[], Gradients | Exception]) -> list[Fault]:  # fmt: skip
    """What is wrong with the gradients of some offers, the worst first."""
    plan = selection.to_plan(call, offers)
    parts = {_weight_of(name): name for offer in offers for name in offer.unit.linears}
    parts |= {_input_of(offer): offer.name for offer in offers}
    here = _run(call, selection, plan)
    if isinstance(here, Exception):
        return [Fault(offers[0].name, f"its backward fails here: {type(here).__name__}: {here}", float("inf"))]
    far = {
        what: fault for what in parts if what in exact and (fault := _beside_high(what, here.get(what), exact[what]))
    }
    if far and not isinstance(allowed := moved(), Exception):
        far = {what: fault for what in far if (fault := _beside_high(what, here.get(what), exact[what], allowed.get(what)))}  # fmt: skip
    law = _run(call, selection, plan, law=True)
    nudged = law if isinstance(law, Exception) else _run(call, selection, plan, law=True, nudged=True)
    if isinstance(law, Exception) or isinstance(nudged, Exception):
        note = f"gradients were compared with 16 bits alone: the reference fails: {type(nudged).__name__}: {nudged}"
        call.notes += [note] if note not in call.notes else []
        wrong, coarse = {}, set()
    else:
        wrong = {what: fault for what in parts if what in here and what in law and what in nudged and (fault := _beside_law(what, here[what], law[what], nudged[what]))}  # fmt: skip
        coarse = {what for what in far if what not in wrong and _can_compare(here.get(what), law.get(what))}
    faults = [Fault(parts[what], _say_fault(text, what in coarse), size, what in coarse) for what, (text, size) in (far or wrong).items()]  # fmt: skip
    return sorted(faults, key=lambda fault: -fault.size)


def _say_fault(text: str, coarse: bool) -> str:
    """coarse: the reference shows the same."""
    if coarse:
        return f"FP8 is too coarse for its gradients here: {text}; the reference computes the same: no kernel is wrong"
    return f"its gradients are wrong here: {text}"


def _weight_of(linear: str) -> str:
    return f"the weight of {linear}"


def _input_of(offer: Offer) -> str:
    return f"the input of {offer.unit.around or offer.name}"


def _beside_high(what: str, found: list[Tensor] | None, exact: list[Tensor], moved: list[Tensor] | None = None) -> tuple[str, float] | None:  # fmt: skip
    """A gradient beside that of 16 bits: what is wrong, and how much. moved: that of 16 bits with weights moved a little, which none is asked to be nearer than."""
    expected = _flat(exact)
    power = float(expected.square().sum())
    if power == 0.0 or not bool(expected.isfinite().all()):
        return None
    if found is None:
        return f"none reaches {what}, and one does in 16 bits", float("inf")
    if len(found) != len(exact):
        return f"gradients reach {what} in {len(found)} calls, and in {len(exact)} in 16 bits", float("inf")
    seen = _flat(found)
    if not bool(seen.isfinite().all()):
        return f"the gradient of {what} is not finite, and is in 16 bits", float("inf")
    way, gain = _project(seen, expected)
    ratio = float(seen.norm() / expected.norm())
    least, turned, shrunk, grown = SAME_WAY**0.5, 1.0, 1.0, 1.0
    if moved is not None and len(moved) == len(exact) and bool((other := _flat(moved)).isfinite().all()):
        turned, size = min(max(_project(other, expected)[0], 0.0), 1.0), float(other.norm() / expected.norm())
        least, shrunk, grown = least * turned, min(max(size, LEAST_SIZE), 1.0), max(size, 1.0)
    # along the gradient of 16 bits it may be as short as its turning makes it; by itself it may not be short because it turns
    if way > 0 and way >= least and turned / SAME_SIZE <= gain <= grown * SAME_SIZE and ratio >= shrunk / SAME_SIZE:
        return None
    return f"the gradient of {what} has a cosine of {way:.2f} with that of 16 bits and {ratio:.2f} of its size ({gain:.2f} along it), expected a cosine of at least {least:.2f} and {shrunk / SAME_SIZE:.2f} of its size ({turned / SAME_SIZE:.2f} to {grown * SAME_SIZE:.2f} along it)", 1 - way  # fmt: skip


def _can_compare(found: list[Tensor] | None, law: list[Tensor] | None) -> bool:
    """Whether a gradient and that of the reference say anything about each other."""
    if found is None or law is None or len(found) != len(law):
        return False
    return bool(_flat(found).isfinite().all()) and bool(_flat(law).isfinite().all()) and any(bool(x.any()) for x in law)


def _project(seen: Tensor, expected: Tensor) -> tuple[float, float]:
    """The cosine of two gradients, and how long the first is along the second, beside it."""
    along, size, power = (float(x) for x in ((seen * expected).sum(), seen.square().sum(), expected.square().sum()))
    return (along / (power * size) ** 0.5 if size else 0.0), along / power


def _beside_law(what: str, found: list[Tensor], law: list[Tensor], nudged: list[Tensor]) -> tuple[str, float] | None:
    """A gradient beside that of the same plan run by the reference: what is wrong, and how much."""
    if len(found) == len(law) and bool(_flat(law).isfinite().all()) and not bool(_flat(found).isfinite().all()):
        return f"the gradient of {what} is not finite, and is by the reference: a kernel is wrong", float("inf")
    if not _can_compare(found, law) or len(law) != len(nudged):
        return None
    for where, distance, least in (("", _distance, BESIDE_LAW), (" in a row or a column", _line_distance, LINE_BESIDE_LAW)):  # fmt: skip
        differs, allowed = distance(found, law), max(least, CHAOS * distance(nudged, law))
        if differs > allowed:
            return f"the gradient of {what} differs by {differs:.0%}{where} from what the reference computes by the same plan, expected at most {allowed:.0%}: a kernel is wrong", differs  # fmt: skip
    return None


def _flat(matrices: list[Tensor]) -> Tensor:
    return torch.cat([matrix.flatten() for matrix in matrices])


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """||a - b|| / ||b||."""
    exact = _flat(b)
    return float(torch.linalg.vector_norm(_flat(a) - exact) / torch.linalg.vector_norm(exact))


def _line_distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The same of the row or column that is farthest off, beside its own length or the root mean square of all, whichever is larger: lines of next to nothing say nothing."""
    worst = 0.0
    for other, exact in zip(a, b, strict=True):
        for along in (0, 1):
            lengths = torch.linalg.vector_norm(exact, dim=along)
            usual = lengths.square().mean().sqrt()
            if bool(usual > 0):
                off = torch.linalg.vector_norm(other - exact, dim=along) / torch.maximum(lengths, usual)
                worst = max(worst, float(off.max()))
    return worst


def _run(call: Call, selection: Selection, plan: Plan | None, *, law: bool = False, nudged: bool = False) -> Gradients | Exception:  # fmt: skip
    """The gradients of the weights of linears that were looked at, summed over a few batches, and of what went into the offers that are in; what the pass raised, where it did."""
    model, task = call.task.model, call.task
    try:
        names = selection.looked.sites if nudged else {}
        with _by(law), _placed(model, plan), undisturbed(model), gradients_aside(model), _nudged(model, names), _watched(model, selection) as inputs:  # fmt: skip
            model.eval()
            train_recurrent(model)  # what they drop, every run drops alike
            torch.manual_seed(0)
            with torch.enable_grad():
                for index, batch in enumerate(task.looking[:BATCHES]):
                    loss = _mix(task.losses(model, batch).float(), index)
                    if loss.requires_grad:  # not where every parameter is frozen
                        loss.backward()  # type: ignore[no-untyped-call]
            weights = {_weight_of(name): found for name, module in named_sites(model) if name in selection.looked.sites and (found := _gradient_of(module)) is not None}  # fmt: skip
            return weights | {
                what: [calls[number] for number in sorted(calls)] for what, calls in inputs.items() if calls
            }
    except torch.AcceleratorError:
        raise
    except Exception as error:  # Triton's errors share no type with torch's
        if isinstance(error, torch.OutOfMemoryError) and not (law or nudged):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the pass
        return error


def _mix(losses: Tensor, batch: int) -> Tensor:
    """The losses of examples, or of batches, half of them counting against: in the gradient of a mean the examples of a trained model all but cancel, and a change of all outputs by a thousandth then turns it by a tenth."""
    if losses.numel() < 2:
        return -losses.mean() if batch % 2 else losses.mean()
    signs = torch.randint(2, losses.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (losses * signs.to(losses.device)).mean()


def _gradient_of(module: nn.Module) -> list[Tensor] | None:
    """Of everything a linear's weight is made of: the weight, or what a parametrisation makes it from. Biases are sums that may cancel to nothing, and say little."""
    found = [p.grad.detach().float().flatten(1) for p in module.parameters() if p.grad is not None and p.dim() > 1 and not p.grad.is_sparse]  # fmt: skip
    return found or None


@contextmanager
def _watched(model: nn.Module, selection: Selection) -> Iterator[dict[str, dict[int, Tensor]]]:
    """The gradients of what goes into the offers that are in, some rows of each, by the call they are of."""
    found: dict[str, dict[int, Tensor]] = {}
    modules = dict(named_sites(model))
    with ExitStack() as stack:
        for offer in selection.offers:
            calls = found[_input_of(offer)] = {}
            module = modules[offer.unit.around or offer.name]
            stack.callback(module.register_forward_pre_hook(partial(_watch, calls, []), with_kwargs=True).remove)
        yield found


def _watch(calls: dict[int, Tensor], begun: list[int], module: nn.Module, args: Any, kwargs: Any) -> None:
    x = next(tensors_in((args, kwargs)), None)
    number = len(begun)
    begun.append(number)

    def keep(gradient: Tensor) -> None:
        # whole examples: every 32nd row of examples with 32 vectors each would be one vector of each
        some = gradient.detach()[:: max(gradient.shape[:-1].numel() // ROWS, 1)]
        calls[number] = some.reshape(-1, gradient.shape[-1]).to(torch.float32, copy=True)

    if x is not None and x.requires_grad:
        x.register_hook(keep)  # type: ignore[no-untyped-call]


@contextmanager
def _by(law: bool) -> Iterator[None]:
    if not law:
        yield
        return
    with warnings.catch_warnings(), registry.offering(LAW):
        warnings.simplefilter("ignore")  # that an emulation runs on a GPU is what is wanted here
        yield


@contextmanager
def _placed(model: nn.Module, plan: Plan | None) -> Iterator[None]:
    if plan is None:
        yield
        return
    with converted(model, plan):
        yield


@contextmanager
def _nudged(model: nn.Module, linears: Collection[str]) -> Iterator[None]:
    """The weights of some linears moved by about a rounding, and put back. Not those of tables, which may fill half of the memory."""
    weights = {id(p): p for name, module in named_sites(model) if name in linears for p in module.parameters() if p.is_floating_point() and p.dim() > 1}  # fmt: skip
    kept = [(p, p.detach().clone()) for p in weights.values()]
    try:
        with torch.no_grad():
            for p, before in kept:
                generator = torch.Generator(device=p.device).manual_seed(1)
                p.add_(before * NUDGE * torch.randn(p.shape, generator=generator, device=p.device).to(p.dtype))
        yield
    finally:
        with torch.no_grad():
            for p, before in kept:
                p.copy_(before)
