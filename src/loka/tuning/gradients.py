"""Check the gradients that the kernels compute, in one backward pass, against 16-bit and against the reference kernels.

The score predicts how rounding changes a gradient, and swapping measures the forward pass. Neither runs a backward
kernel: one that is wrong at this shape, on this GPU, would ruin training while every verdict says "within". So the
selection runs forward and backward on some batches. The gradients of its weights and of its inputs (which everything
before it learns from) are compared with

    16-bit           Direction and size must agree as far as FP8 allows. Finds a wrong sign, factor or transpose, and a
                     scale that saturates.
    the reference    The same plan with every kernel replaced by its reference (`kernels/*/reference.py`). Finds errors
                     of a kernel that are larger than those of another order of summation.

Both comparisons allow for gradients that are ill-conditioned. If the first fails, 16-bit runs once more with the
weights of linears moved by 2^-10 of their size, and a change of direction or size of that order is accepted. The
reference too runs with moved weights, which is about the effect of another order of summation: FP8 turns a tiny
difference into a whole rounding step. Gradients are compared as a whole and by row and column, since a kernel that is
wrong in a few rows changes little of the whole.

The worst of thousands of rows and elements has a heavy tail: one example whose ReLU flips may be most of the gradient of
one bias. A difference that is only somewhat too large, in one of them, must show again with moved weights on both
sides, as that of a wrong kernel does.

Where FP8 changes which rows a layer gets, as in a mixture of experts, the gradient of its input is of other rows. Those
are not compared, and a note says so. They are told from the rows themselves, which rounding moves far less than rows are
apart. The gradient of the layer's weight, a sum over rows, is compared.

Gradients of biases, and of norms inside a chain, are sums over the batch that kernels compute besides. Such sums may
cancel, so they are compared with the reference only, and only where moved weights hardly change it.

A unit whose gradients fail alone is dropped, with what was seen as the reason. If the reference shows the same, FP8 is
too coarse and no kernel is wrong: then only the linear with the worst gradient is dropped, and the rest of its chain is
compared again. The model runs in eval mode, since dropout inside a chain draws other random numbers than torch's.
"""

import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loka.dispatch.choosing import Offer
from loka.kernels import registry
from loka.nn.jagged import dense
from loka.nn.wrapping import named_sites
from loka.placing import converted
from loka.records import Plan
from loka.tuning.call import Call, Selection
from loka.tuning.looking import ROWS
from loka.units.example import tensors_in
from loka.units.undisturbed import gradients_aside, put_weight, train_recurrent, undisturbed

BATCHES = 2  # batches to run
# Least cos^2 of a gradient and the 16-bit one. FP8 throughout a Wukong, a DLRM and tiny towers leaves 0.95 and more.
LEAST_COSINE_SQUARED = 0.6
SAME_SIZE = 1.4  # largest ratio of their sizes, along the 16-bit one, in either direction; 0.95 to 1.03 were seen
LEAST_SIZE = 0.25  # a 16-bit gradient that shrinks further than this with moved weights excuses no more
BESIDE_REFERENCE = 0.15  # largest relative difference from the reference as a whole,
LINE_BESIDE_REFERENCE = 0.5  # and of a row or column, relative to its own norm or the rms norm, whichever is larger;
CHAOS = 3.0  # or this many times the difference between two runs of the reference, if that is more
CLOSE = 2.0  # a difference in one row, column or element up to this many times what is allowed must show twice
UNDETERMINED = 0.3  # a reference that changes by more than this with moved weights tells nothing about a kernel
NUDGE = 2.0**-10  # relative size of the change of moved weights
FAR = 0.5  # a row that moved by more than this share of the distance between rows is another one,
MOST = 0.5  # and if fewer than this share of the rows are the same, too few are left to compare
REFERENCE = frozenset({"reference"})

# Matrices, by a description of what they are the gradient of; and some rows of inputs, by `_rows_of`.
Gradients = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Fault:
    """A wrong gradient.

    Args:
        linear: the linear whose weight or input it belongs to.
        text: what was seen and what was expected.
        size: how wrong it is, for sorting.
        coarse: the reference shows the same, so no kernel is wrong, and the rest of the chain may stay.
    """

    linear: str
    text: str
    size: float
    coarse: bool = False


class Difference(NamedTuple):
    """Gradients that differ by more than is allowed.

    Args:
        text: what was seen and what was expected.
        size: how much they differ, for sorting.
        close: whether one look may be chance.
    """

    text: str
    size: float
    close: bool = False


def verify_gradients(call: Call, selection: Selection, verified: set[str]) -> None:
    """Drop units, or linears of chains, whose kernels compute wrong gradients here.

    Args:
        call: provides the batches.
        selection: what fails is dropped from it, with the reason.
        verified: units that have passed before, by `describe`; those that pass are added.
    """
    while selection.offers and not all(describe(offer) in verified for offer in selection.offers):
        exact = _run(call, selection, None)
        if isinstance(exact, Exception):  # the 16-bit backward fails in eval mode, as that of a direct cuDNN call does
            call.notes.append(
                f"gradients were not compared with 16-bit, where backward fails in eval mode: {type(exact).__name__}: "
                f"{exact}"
            )
            verified.update(describe(offer) for offer in selection.offers)
            return
        moved = cache(partial(_run, call, selection, None, nudged=True))
        if not (faults := _find_faults(call, selection, selection.offers, exact, moved)):
            verified.update(describe(offer) for offer in selection.offers)
            return
        alone = {o.name: _find_faults(call, selection, [o], exact, moved) for o in selection.offers}
        failing = [(offer, alone[offer.name][0]) for offer in selection.offers if alone[offer.name]]
        if not failing:  # wrong together, but none alone: drop the worst
            worst = next(f for f in faults if any(f.linear in o.unit.linears for o in selection.offers))
            failing = [(next(o for o in selection.offers if worst.linear in o.unit.linears), worst)]
        for offer, fault in failing:
            if fault.coarse:
                selection.leave_out(fault.linear, fault.text, training=True)
            else:
                selection.drop(offer, fault.text)


def describe(offer: Offer) -> str:
    """Return a key of the kernels that an offer runs."""
    return f"{offer.way} {' '.join(offer.unit.linears)}"


def _find_faults(
    call: Call, selection: Selection, offers: list[Offer], exact: Gradients, moved: Callable[[], Gradients | Exception]
) -> list[Fault]:
    """Return the faults of the gradients of some offers, the worst first."""
    plan = selection.to_plan(call, offers)
    parts = {_weight_of(name): name for offer in offers for name in offer.unit.linears}
    parts |= {_input_of(offer): offer.name for offer in offers}
    here = _run(call, selection, plan)
    if isinstance(here, Exception):
        return [Fault(offers[0].name, f"its backward fails here: {type(here).__name__}: {here}", float("inf"))]
    same = _find_same_rows(parts, here, exact)
    seen, base = _pick(here, same), _pick(exact, same)
    far = {
        what: fault
        for what in parts
        if what in base and (fault := _compare_with_exact(what, seen.get(what), base[what]))
    }
    if far and not isinstance(allowed := moved(), Exception):
        limit = _pick(allowed, same)
        far = {what: fault for what in far if (fault := _compare_with_exact(what, seen.get(what), base[what], limit.get(what)))}  # fmt: skip
    _note_other_rows(call, offers, here, exact, same)
    ref = _run(call, selection, plan, reference=True)
    nudged = ref if isinstance(ref, Exception) else _run(call, selection, plan, reference=True, nudged=True)
    if isinstance(ref, Exception) or isinstance(nudged, Exception):
        note = f"gradients were compared with 16-bit only: the reference fails: {type(nudged).__name__}: {nudged}"
        call.notes += [note] if note not in call.notes else []
        wrong, coarse = {}, set()
    else:
        vectors = _vectors_of(offers)
        wrong = _find_differences(list(parts), vectors, here, ref, nudged)
        if close := [what for what, seen in wrong.items() if seen.close]:
            again = _run(call, selection, plan, nudged=True)
            if not isinstance(again, Exception):
                twice = _find_differences([w for w in parts if w in close], [w for w in vectors if w in close], again, nudged, ref)  # fmt: skip
                wrong = {what: seen for what, seen in wrong.items() if not seen.close or what in twice}
        parts |= {what: linear for what, (linear, _, _) in vectors.items()}
        differing = _find_same_rows(far, here, ref)
        coarse = {what for what in far if what not in wrong and what not in differing and _can_compare(here.get(what), ref.get(what))}  # fmt: skip
    faults = [Fault(parts[what], _say_fault(found.text, what in coarse), found.size, what in coarse) for what, found in (far or wrong).items()]  # fmt: skip
    return sorted(faults, key=lambda fault: -fault.size)


def _find_same_rows(names: Iterable[str], found: Gradients, exact: Gradients) -> dict[str, list[Tensor]]:
    """Find the inputs that have other rows in `found` than in `exact`, though equally many, with finite gradients.

    Args:
        names: descriptions of what has a gradient; those of inputs have rows.
        found: of one run.
        exact: of the run it is compared with.

    Returns:
        Which rows are the same ones, for every call, by name; none at all if those are too few to compare. Inputs whose
        rows all are the same are left out.
    """
    same: dict[str, list[Tensor]] = {}
    for what in names:
        rows, others = found.get(_rows_of(what), []), exact.get(_rows_of(what), [])
        if not rows or not _are_alike(rows, others) or len({x.shape[1] for x in others}) > 1:
            continue
        every = torch.cat(others)
        apart = 2**0.5 * torch.linalg.vector_norm(every - every.mean(0), dim=1).square().mean().sqrt()
        # NaN counts as the same, and so do all rows where there is but one
        kept = [~((torch.linalg.vector_norm(x - y, dim=1) > FAR * apart) & (apart > 0)) for x, y in zip(rows, others, strict=True)]  # fmt: skip
        share = float(torch.cat(kept).float().mean())
        if share < 1 and bool(_flat(found[what]).isfinite().all()):
            same[what] = kept if share >= MOST else [torch.zeros_like(keep) for keep in kept]
    return same


def _pick(gradients: Gradients, same: dict[str, list[Tensor]]) -> Gradients:
    """Return gradients with only some rows of those of inputs, see `_find_same_rows`."""
    picked = dict(gradients)
    for what, kept in same.items():
        if what in gradients and [len(x) for x in gradients[what]] == [len(keep) for keep in kept]:
            picked[what] = [x[keep] for x, keep in zip(gradients[what], kept, strict=True)]
    return picked


def _note_other_rows(
    call: Call, offers: Iterable[Offer], here: Gradients, exact: Gradients, same: Collection[str]
) -> None:
    """Say which gradients of inputs are of other rows than in 16-bit, where they cannot be compared."""
    for what in map(_input_of, offers):
        a, b = here.get(what, []), exact.get(what, [])
        note = (
            f"the gradient of {what} was not compared with 16-bit in rows that are others there, as where the model "
            "itself decides which rows a layer gets"
        )
        other = what in same or (len(a) == len(b) and not _are_alike(a, b))
        if other and note not in call.notes:
            call.notes.append(note)


def _find_differences(
    matrices: Collection[str], vectors: Iterable[str], here: Gradients, ref: Gradients, nudged: Gradients
) -> dict[str, Difference]:
    """Compare gradients with those of the reference; `nudged` are the reference's with other weights."""
    same = _find_same_rows(matrices, here, ref)
    here, ref, nudged = (_pick(gradients, same) for gradients in (here, ref, nudged))
    found = {
        what: _compare_with_reference(what, here[what], ref[what], nudged[what])
        for what in matrices
        if what in here and what in ref and what in nudged
    }
    found |= {
        what: _compare_vector(what, here.get(what), ref[what], nudged[what])
        for what in vectors
        if what in ref and what in nudged
    }
    return {what: seen for what, seen in found.items() if seen is not None}


def _say_fault(text: str, coarse: bool) -> str:
    if coarse:
        return f"FP8 is too coarse for its gradients here: {text}; the reference computes the same: no kernel is wrong"
    return f"its gradients are wrong here: {text}"


def _vectors_of(offers: Iterable[Offer]) -> dict[str, tuple[str, str, str]]:
    """Return the vectors whose gradients some offers compute: (their linear, their module, their attribute) by name."""
    links = [link for offer in offers for link in offer.unit.links]
    owned = [(link.linear, link.linear, "bias") for link in links]
    owned += [(link.linear, link.norm_site, name) for link in links if link.norm_site for name in ("weight", "bias")]
    return {f"the {name} of {module}": (linear, module, name) for linear, module, name in owned}


def _weight_of(linear: str) -> str:
    return f"the weight of {linear}"


def _input_of(offer: Offer) -> str:
    return f"the input of {offer.unit.around or offer.name}"


def _rows_of(what: str) -> str:
    return f"the rows of {what}"


def _compare_with_exact(
    what: str, found: list[Tensor] | None, exact: list[Tensor], moved: list[Tensor] | None = None
) -> Difference | None:
    """Compare a gradient with the 16-bit one. Return what is wrong and how much, or None.

    `moved` is the 16-bit gradient with moved weights; a gradient need not be closer to `exact` than that.
    """
    expected = _flat(exact)
    power = float(expected.square().sum())
    if power == 0.0 or not bool(expected.isfinite().all()):
        return None
    if found is None:
        return Difference(f"no gradient reaches {what}, but one does in 16-bit", float("inf"))
    if len(found) != len(exact):
        return Difference(
            f"gradients reach {what} in {len(found)} calls, but in {len(exact)} calls in 16-bit", float("inf")
        )
    seen = _flat(found)
    if not bool(seen.isfinite().all()):
        return Difference(f"the gradient of {what} is not finite, but is finite in 16-bit", float("inf"))
    if not _are_alike(found, exact):
        return None
    cosine, gain = _project(seen, expected)
    ratio = float(seen.norm() / expected.norm())
    least, turned, shrunk, grown = LEAST_COSINE_SQUARED**0.5, 1.0, 1.0, 1.0
    if moved is not None and _are_alike(moved, exact) and bool((other := _flat(moved)).isfinite().all()):
        turned, size = min(max(_project(other, expected)[0], 0.0), 1.0), float(other.norm() / expected.norm())
        least, shrunk, grown = least * turned, min(max(size, LEAST_SIZE), 1.0), max(size, 1.0)
    # a change of direction excuses a small projection onto the 16-bit gradient, but not a small gradient
    if cosine > 0 and cosine >= least and turned / SAME_SIZE <= gain <= grown * SAME_SIZE and ratio >= shrunk / SAME_SIZE:  # fmt: skip
        return None
    return Difference(
        f"the gradient of {what} has a cosine of {cosine:.2f} with the 16-bit one and {ratio:.2f} of its size "
        f"({gain:.2f} along it), expected a cosine of at least {least:.2f} and {shrunk / SAME_SIZE:.2f} of its size "
        f"({turned / SAME_SIZE:.2f} to {grown * SAME_SIZE:.2f} along it)",
        1 - cosine,
    )


def _are_alike(a: list[Tensor], b: list[Tensor]) -> bool:
    """Check whether gradients have the same shapes. Those of an input have not if a router chose other rows for it."""
    return [x.shape for x in a] == [x.shape for x in b]


def _can_compare(found: list[Tensor] | None, ref: list[Tensor] | None) -> bool:
    """Check whether both gradients exist, are alike and finite, and the reference is not zero."""
    if found is None or ref is None or not _are_alike(found, ref):
        return False
    return bool(_flat(found).isfinite().all()) and bool(_flat(ref).isfinite().all()) and any(bool(x.any()) for x in ref)


def _project(seen: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the cosine of two gradients, and the projection of the first on the second relative to the second."""
    along, size, power = (float(x) for x in ((seen * expected).sum(), seen.square().sum(), expected.square().sum()))
    return (along / (power * size) ** 0.5 if size else 0.0), along / power


def _compare_with_reference(what: str, found: list[Tensor], ref: list[Tensor], nudged: list[Tensor]) -> Difference | None:  # fmt: skip
    """Compare a gradient with that of the reference kernels. Return what is wrong and how much, or None."""
    if len(found) == len(ref) and bool(_flat(ref).isfinite().all()) and not bool(_flat(found).isfinite().all()):
        return Difference(
            f"the gradient of {what} is not finite, but is finite in the reference: a kernel is wrong", float("inf")
        )
    if not _can_compare(found, ref) or not _are_alike(ref, nudged):
        return None
    for where, distance, least in (("", _distance, BESIDE_REFERENCE), (" in a row or a column", _line_distance, LINE_BESIDE_REFERENCE)):  # fmt: skip
        differs, allowed = distance(found, ref), max(least, CHAOS * distance(nudged, ref))
        if differs > allowed:
            chaos = allowed / CHAOS
            why = (
                "a kernel is wrong"
                if chaos < UNDETERMINED
                else (
                    f"the reference itself changes by {chaos:.0%} if weights move by a thousandth, so rounding decides "
                    "this gradient, and it says little about a kernel"
                )
            )
            return Difference(
                f"the gradient of {what} differs by {differs:.0%}{where} from the reference of the same plan, "
                f"expected at most {allowed:.0%}: {why}",
                differs,
                close=bool(where) and differs <= CLOSE * allowed,
            )
    return None


def _compare_vector(what: str, found: list[Tensor] | None, ref: list[Tensor], nudged: list[Tensor]) -> Difference | None:  # fmt: skip
    """Compare the gradient of a bias or of a norm with that of the reference, unless rounding decides it."""
    if not _can_compare(ref, nudged) or _distance(nudged, ref) > UNDETERMINED:
        return None
    if found is None:
        return Difference(f"no gradient reaches {what}, but one does in the reference: a kernel is wrong", float("inf"))
    if not bool(_flat(found).isfinite().all()):
        return Difference(
            f"the gradient of {what} is not finite, but is finite in the reference: a kernel is wrong", float("inf")
        )
    for where, distance in (("", _distance), (" in an element", _line_distance)):
        differs, allowed = distance(found, ref), max(LINE_BESIDE_REFERENCE, CHAOS * distance(nudged, ref))
        if differs > allowed:
            return Difference(
                f"the gradient of {what} differs by {differs:.0%}{where} from the reference of the same plan, "
                f"expected at most {allowed:.0%}: a kernel is wrong",
                differs,
                close=bool(where) and differs <= CLOSE * allowed,
            )
    return None


def _flat(matrices: list[Tensor]) -> Tensor:
    return torch.cat([matrix.flatten() for matrix in matrices])


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """||a - b|| / ||b||."""
    exact = _flat(b)
    return float(torch.linalg.vector_norm(_flat(a) - exact) / torch.linalg.vector_norm(exact))


def _line_distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the largest relative difference of a row or column.

    It is relative to the norm of the line, or the root mean square of all norms if that is larger, so that lines with
    tiny gradients do not count.
    """
    worst = 0.0
    for other, exact in zip(a, b, strict=True):
        for along in (0, 1):
            lengths = torch.linalg.vector_norm(exact, dim=along)
            usual = lengths.square().mean().sqrt()
            if bool(usual > 0):
                off = torch.linalg.vector_norm(other - exact, dim=along) / torch.maximum(lengths, usual)
                worst = max(worst, float(off.max()))
    return worst


def _run(call: Call, selection: Selection, plan: Plan | None, *, reference: bool = False, nudged: bool = False) -> Gradients | Exception:  # fmt: skip
    """Run forward and backward on a few batches, and return the gradients or the exception that was raised.

    The gradients are those of the weights of all observed linears, summed over the batches, and of the inputs of the
    offers. `plan` None runs in 16-bit.
    """
    model, task = call.task.model, call.task
    try:
        names = selection.looked.sites if nudged else {}
        with (
            _reference_kernels(reference),
            _placed(model, plan),
            undisturbed(model),
            gradients_aside(model),
            _nudged(model, names),
            _watch_inputs(model, selection) as inputs,
        ):
            model.eval()
            train_recurrent(model)  # cuDNN needs it for backward; all runs draw the same dropout
            torch.manual_seed(0)
            with torch.enable_grad():
                for index, batch in enumerate(task.looking[:BATCHES]):
                    loss = _mix(task.losses(model, batch).float(), index)
                    if loss.requires_grad:  # False if every parameter is frozen
                        loss.backward()  # type: ignore[no-untyped-call]
            weights = {
                _weight_of(name): found
                for name, module in named_sites(model)
                if name in selection.looked.sites and (found := _gradient_of(module)) is not None
            }
            return (
                weights
                | _vector_gradients(model, selection)
                | {what: [calls[number] for number in sorted(calls)] for what, calls in inputs.items() if calls}
            )
    except torch.AcceleratorError:
        raise
    except Exception as error:  # Triton's errors share no type with torch's
        if isinstance(error, torch.OutOfMemoryError) and not (reference or nudged):
            raise
        traceback.clear_frames(error.__traceback__)  # frees the tensors its frames hold
        return error


def _mix(losses: Tensor, batch: int) -> Tensor:
    """Return the mean of losses, half of them with their sign changed, chosen at random; of single losses, by batch.

    In the gradient of a plain mean, the examples of a trained model nearly cancel. A change of all outputs by a
    thousandth then turns it by a tenth.
    """
    if losses.numel() < 2:
        return -losses.mean() if batch % 2 else losses.mean()
    signs = torch.randint(2, losses.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (losses * signs.to(losses.device)).mean()


def _gradient_of(module: nn.Module) -> list[Tensor] | None:
    """Return the gradients of a linear's weight, or of the parameters of its parametrization; None if there are none."""
    found = [p.grad.detach().float().flatten(1) for p in module.parameters() if p.grad is not None and p.dim() > 1 and not p.grad.is_sparse]  # fmt: skip
    return found or None


def _vector_gradients(model: nn.Module, selection: Selection) -> Gradients:
    """Return the gradients of the biases and norms of all offers, each as a matrix with one row."""
    modules, found = dict(named_sites(model)), {}
    for what, (_, site, name) in _vectors_of(selection.offers).items():
        vector = getattr(modules[site], name, None)
        if isinstance(vector, nn.Parameter) and vector.grad is not None:
            found[what] = [vector.grad.detach().float().reshape(1, -1).clone()]
    return found


@contextmanager
def _watch_inputs(model: nn.Module, selection: Selection) -> Iterator[dict[str, dict[int, Tensor]]]:
    """Collect some rows of every offer's input and of its gradient inside the block, by number of the call."""
    found: dict[str, dict[int, Tensor]] = {}
    modules = dict(named_sites(model))
    with ExitStack() as stack:
        for offer in selection.offers:
            what = _input_of(offer)
            found[what], found[_rows_of(what)] = {}, {}
            module = modules[offer.unit.around or offer.name]
            watch = partial(_watch_input, found[what], found[_rows_of(what)], [])
            stack.callback(module.register_forward_pre_hook(watch, with_kwargs=True).remove)
        yield found


def _watch_input(
    calls: dict[int, Tensor], rows: dict[int, Tensor], begun: list[int], module: nn.Module, args: Any, kwargs: Any
) -> None:
    x = next(tensors_in((args, kwargs)), None)
    number = len(begun)
    begun.append(number)

    if x is not None and x.requires_grad:
        seen = _take_some(x)

        def keep(gradient: Tensor) -> None:
            calls[number], rows[number] = _take_some(gradient), seen

        x.register_hook(keep)  # type: ignore[no-untyped-call]


def _take_some(x: Tensor) -> Tensor:
    """Return a copy of some rows."""
    # slice whole examples: every 32nd row would pick the same one of 32 vectors from each example
    whole = dense(x.detach())
    some = whole[:: max(whole.shape[:-1].numel() // ROWS, 1)]
    return some.reshape(-1, whole.shape[-1]).to(torch.float32, copy=True)


@contextmanager
def _reference_kernels(on: bool) -> Iterator[None]:
    if not on:
        yield
        return
    with warnings.catch_warnings(), registry.offering(REFERENCE):
        warnings.simplefilter("ignore")  # running the emulation on a GPU is intended here
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
    """Move the weights of linears by about one rounding inside the block. Tables are left: they may be huge."""
    weights = {
        id(p): p
        for name, module in named_sites(model)
        if name in linears
        for p in module.parameters()
        if p.is_floating_point() and p.dim() > 1
    }
    kept = [(p, p.detach(), p.detach().clone()) for p in weights.values()]
    try:
        with torch.no_grad():
            for p, _, before in kept:
                generator = torch.Generator(device=p.device).manual_seed(1)
                p.add_(before * NUDGE * torch.randn(p.shape, generator=generator, device=p.device).to(p.dtype))
        yield
    finally:
        for p, memory, before in kept:
            put_weight(p, memory, before)
