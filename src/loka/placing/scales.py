"""Save, load and calibrate scales that are remembered between steps or fixed for serving.

They are not part of a model's state_dict.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from loka.lowp.chain import Chain, chains_of
from loka.lowp.linear import linears_of
from loka.lowp.scaling import AmaxState
from loka.nn.wrapping import unwrap
from loka.records.prose import name_some


def _amax_states(model: nn.Module) -> Iterator[tuple[str, AmaxState]]:
    """Yield every amax state of the model under a stable name, `site/operand`."""
    inner = unwrap(model)
    for name, linear in linears_of(inner):
        for role, amax in linear.state.amax_states.items():
            yield f"{name}/{role}", amax
    for _, chain in chains_of(inner):
        for role, states in (("z", chain.out), ("g", chain.grad)):
            for link, state in zip(chain.links, states, strict=True):
                if state is not None:
                    yield f"{link.linear}/{role}", state


def _chains(model: nn.Module) -> Iterator[tuple[str, Chain]]:
    """Yield the chains with remembered scales, and the names of what they remember of their steps."""
    for _, chain in chains_of(unwrap(model)):
        if chain.remembered:
            yield f"{chain.links[0].linear}/chain/steps", chain


def scale_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of remembered scales, to be saved along with a checkpoint. Empty if all scales are dynamic.

    Args:
        model: a converted model, wrapped or not.

    Returns:
        Tensors named `site/operand/part`.

    Example:
        >>> from safetensors.torch import save_file
        >>> save_file(loka.scale_state(model), "scales.safetensors")
    """
    states = {f"{name}/{part}": tensor for name, amax in _amax_states(model) for part, tensor in amax.state().items()}
    return states | {name: chain.steps() for name, chain in _chains(model)}


def load_scale_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore what `scale_state` returned. Raise a ValueError naming the differences if the conversions differ.

    Args:
        model: a model converted like the one the state was taken from.
        state: what `scale_state` returned.

    Example:
        >>> from safetensors.torch import load_file
        >>> loka.load_scale_state(model, load_file("scales.safetensors"))
    """
    expected = scale_state(model)
    if problems := sorted(expected.keys() ^ state.keys()):
        where = [f"{name}: {'missing' if name in expected else 'unknown'}" for name in problems]
        hint = "hint: if a Guard switched sites, call guard.load_state_dict(...) first"
        raise ValueError(
            f"this scale state does not fit the model ({len(where)} differences): {'; '.join(where[:6])}; {hint}"
        )
    for name, amax in _amax_states(model):
        amax.load({part: state[f"{name}/{part}"] for part in amax.state()})
    for name, chain in _chains(model):
        chain.load_steps(state[name])
        chain.find_primed()


def is_calibrated(model: nn.Module) -> bool:
    """Check whether a converted model has scales that `calibrating` sets: those of chains, and static ones.

    Args:
        model: a converted model, wrapped or not.

    Returns:
        False if every scale is found in the forward.

    Example:
        >>> loka.placing.scales.is_calibrated(model)
        True
    """
    inner = unwrap(model)
    return bool(_find_static(inner)) or any(True for _ in chains_of(inner))


def _find_static(model: nn.Module) -> dict[str, AmaxState]:
    """Return the states of linears with static scales."""
    return {
        name: linear.state.x
        for name, linear in linears_of(model)
        if linear.state.x is not None and any(spec.mode == "static" for spec in linear.binding.x_specs.values())
    }


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Set fixed scales from the batches run in this block: the largest magnitude each site sees becomes its bound.

    If the block raises, the earlier scales are restored.

    Args:
        model: a model converted with static scales or with chains.

    Returns:
        A context manager.

    Example:
        >>> with loka.placing.calibrating(model), torch.no_grad():
        ...     for batch in batches:
        ...         model(batch)
    """
    inner = unwrap(model)
    states, chains = _find_static(inner), [chain for _, chain in chains_of(inner)]
    if not states and not chains:
        raise ValueError(
            "no converted linear has static scales; hint: convert(..., options=LinearOptions(scales='static'))"
        )
    with ExitStack() as stack:
        for chain in chains:
            stack.enter_context(chain.calibrating())
        stack.enter_context(_calibrating_linears(states))
        yield


@contextmanager
def _calibrating_linears(states: Mapping[str, AmaxState]) -> Iterator[None]:
    before = {name: (state.static.clone(), state.calibrated) for name, state in states.items()}
    for state in states.values():
        state.static.zero_()
        state.calibrating = True
    try:
        yield
        for state in states.values():
            state.calibrated = bool(state.static > 0)
        if unseen := [name for name, state in states.items() if not state.calibrated]:
            raise ValueError(
                f"calibration saw no finite value other than zero at {name_some(unseen, 6)}; run more batches"
            )
    except BaseException:  # restore the last complete calibration, also after Ctrl-C
        for name, state in states.items():
            static, state.calibrated = before[name]
            state.static.copy_(static)
        raise
    finally:
        for state in states.values():
            state.calibrating = False
