"""The paths that a model takes: flows of all that was given to find its units on, which the units must agree with.

One input shows one path. A tower that is chosen by a string, a gate that is skipped for an empty list, a step that calls the model for the query and again for the item, or calls its parts and
never the model: each batch of a task may show another. So all of them are run; modules called in a new order are a path that is recorded, in eval mode and, for training, in training mode too, where a layer may be skipped by chance.
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
from loka.units.flow import Flow, Unknown, record, record_steps
from loka.units.undisturbed import keep_randomness, ordinary_encoders, set_mode, undisturbed

MOST = 16  # paths that are recorded at most; a model that takes another one later says so when it runs


def see_paths(model: nn.Module, example: Any, modes: Sequence[bool]) -> dict[bool, list[Flow]]:
    """The flows of a model, for every mode: eval mode is False.

    Args:
        model: any module, unwrapped.
        example: one input, as `record` takes it, or Steps.
        modes: in which it runs.

    Returns:
        For each mode its flows, none of them twice.

    Raises:
        ValueError: the model cannot be run on an example; what a step raises is raised as it is.
    """
    if isinstance(example, Steps):
        found = {
            t: [f for run in _find_trails(model, example.runs, t) for f in record_steps(model, run, training=t)]
            for t in modes
        }
    else:
        found = {t: [_check(model, record(model, example, training=t))] for t in modes}
    # none, where TorchScript runs all of it
    return {t: list({(*f.calls, f.results): f for f in flows or [Flow()]}.values()) for t, flows in found.items()}


def find_shared(flows: Iterable[Flow]) -> set[str]:
    """Modules that stand behind one thing on one path, and behind another on another."""
    behind: dict[str, set[tuple[str, str]]] = {}
    for flow in flows:
        for call in flow.calls:
            if call.site is not None:
                made = [flow.maker(value) for value in call.inputs]
                behind.setdefault(call.site, set()).update((c.site or c.op, c.inside) for c in made if c is not None)
    return {site for site, makers in behind.items() if len(makers) > 1}


def find_holders(model: nn.Module) -> dict[str, str]:
    """Parts of a model that a module outside of it holds as well: a tower that two models share, a stage of a pipeline. It calls them without what follows here.

    Args:
        model: any module.

    Returns:
        The kind of module that holds it, by the part's name. What holds the whole model is no holder of a part.
    """
    parts = {id(module): name for name, module in named_sites(model) if name}
    inside = {id(module) for module in model.modules()}
    # the type's own word: isinstance asks the object, which may be a proxy that answers with an import
    others = [
        o for o in gc.get_objects() if issubclass(type(o), nn.Module) and id(o) not in inside and not _is_trace(o)
    ]
    held = ((type(other).__name__, part) for other in others for part in vars(other).get("_modules", {}).values())
    return {parts[id(part)]: kind for kind, part in held if id(part) in parts}


def _is_trace(module: nn.Module) -> bool:
    """What a tracer made of a whole model, and the containers in it, which nobody calls."""
    return type(module) is nn.Module or issubclass(type(module), torch.fx.GraphModule)


def _check(model: nn.Module, found: Flow | Unknown) -> Flow:
    if isinstance(found, Unknown):
        raise ValueError(f"the units of {type(model).__name__} cannot be found: {found.reason}")
    return found


def _find_trails(model: nn.Module, runs: Sequence[Callable[[], Any]], training: bool) -> list[Callable[[], Any]]:
    """Those that call modules in an order that none before them did, with the random numbers they did it with: a layer may be skipped by chance."""
    trails: dict[tuple[int, ...], Callable[[], Any]] = {}
    trail: list[int] = []

    def note(module: nn.Module, args: Any) -> None:
        trail.append(id(module))

    with undisturbed(model), ordinary_encoders(), torch.no_grad():
        handles = [m.register_forward_pre_hook(note) for m in model.modules() if not is_scripted(m)]
        try:
            set_mode(model, training)
            for run in runs:
                trail.clear()
                draw_again = keep_randomness()
                # in training a batch norm refuses a batch of one row
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
