"""Record the paths that a model takes; its units must agree with all of them.

One input shows one path. A tower may be chosen by a string, a gate skipped for an empty list; a step may call the model
once for the query and once for the item, or call only its parts. So every batch is run, and each new order of module
calls is recorded as a path: in eval mode and, for training, in training mode too, where layers may be skipped at
random.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.fx
from torch import nn

from loka.nn.wrapping import is_scripted, named_sites
from loka.units.example import Steps
from loka.units.flow import Flow
from loka.units.recording import Unknown, record, record_steps
from loka.units.undisturbed import keep_randomness, ordinary_encoders, set_mode, sparing_weights, undisturbed

MOST = 16  # the maximum number of recorded paths; a chain raises if the model takes a different one later


def see_paths(model: nn.Module, example: Any, modes: Sequence[bool]) -> dict[bool, list[Flow]]:
    """Return the distinct flows of a model for every mode in `modes` (True is training mode, False eval mode).

    Args:
        model: any module, unwrapped.
        example: one input, as for `record`, or Steps.
        modes: the modes to run in.

    Raises:
        ValueError: the model fails on the example. Exceptions from Steps are passed on.
    """
    if isinstance(example, Steps):
        found = {
            t: [f for run in _find_trails(model, example.runs, t) for f in record_steps(model, run, training=t)]
            for t in modes
        }
    else:
        found = {t: [_check(model, record(model, example, training=t))] for t in modes}
    # no flows if TorchScript runs the whole model
    return {t: list({(*f.calls, f.results): f for f in flows or [Flow()]}.values()) for t, flows in found.items()}


def find_shared(flows: Iterable[Flow]) -> set[str]:
    """Return the modules whose input comes from different calls, on one path or on several."""
    sources: dict[str, set[tuple[str, str]]] = {}
    for flow in flows:
        for call in flow.calls:
            if call.site is not None:
                made = [flow.maker(value) for value in call.inputs]
                sources.setdefault(call.site, set()).update((c.site or c.op, c.inside) for c in made if c is not None)
    return {site for site, makers in sources.items() if len(makers) > 1}


def find_holders(model: nn.Module) -> dict[str, str]:
    """Return the parts of a model that a module outside of it holds too, with the type of that module.

    Examples are a tower that two models share, or a pipeline stage. The other module calls the part without what
    follows it here. A module that holds the whole model does not count.
    """
    parts = {id(module): name for name, module in named_sites(model) if name}
    inside = {id(module) for module in model.modules()}
    # not isinstance, which asks the object for its __class__: a lazy proxy would import something to answer
    others = [
        o for o in gc.get_objects() if issubclass(type(o), nn.Module) and id(o) not in inside and not _is_trace(o)
    ]
    held = ((type(other).__name__, part) for other in others for part in vars(other).get("_modules", {}).values())
    return {parts[id(part)]: kind for kind, part in held if id(part) in parts}


def _is_trace(module: nn.Module) -> bool:
    """Check whether a module comes from a tracer: a GraphModule, or one of its containers, which are never called."""
    return type(module) is nn.Module or issubclass(type(module), torch.fx.GraphModule)


def _check(model: nn.Module, found: Flow | Unknown) -> Flow:
    if isinstance(found, Unknown):
        raise ValueError(f"the units of {type(model).__name__} cannot be found: {found.reason}")
    return found


def _find_trails(model: nn.Module, runs: Sequence[Callable[[], Any]], training: bool) -> list[Callable[[], Any]]:
    """Return the runs that call modules in a new order, each with its random state: layers may be skipped at random."""
    trails: dict[tuple[int, ...], Callable[[], Any]] = {}
    trail: list[int] = []

    def note(module: nn.Module, args: Any) -> None:
        trail.append(id(module))

    with undisturbed(model), sparing_weights(model), ordinary_encoders(), torch.no_grad():
        handles = [m.register_forward_pre_hook(note) for m in model.modules() if not is_scripted(m)]
        try:
            set_mode(model, training)
            for run in runs:
                trail.clear()
                draw_again = keep_randomness()
                # in training mode a batch norm raises for a batch of one row
                with suppress(ValueError) if training else nullcontext():
                    run()
                    trails.setdefault(tuple(trail), partial(_run_after, draw_again, run))
        finally:
            for handle in handles:
                handle.remove()
    return list(trails.values())[:MOST]


def _run_after(draw_again: Callable[[], None], run: Callable[[], Any]) -> None:
    draw_again()
    run()
