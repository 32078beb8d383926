"""Scales that are remembered between steps or fixed for serving: kept beside a state_dict, of which they are no part, put back, and calibrated."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from loka.lowp.chain import chains_of
from loka.lowp.linear import linears_of
from loka.lowp.scaling import AmaxState
from loka.nn.wrapping import unwrap


def _remembered(model: nn.Module) -> Iterator[tuple[str, AmaxState]]:
    """Everything that remembers magnitudes, by a name that stays."""
    inner = unwrap(model)
    for name, linear in linears_of(inner):
        for role, amax in linear.state.amax_states.items():
            yield f"{name}/{role}", amax
    for _, chain in chains_of(inner):
        for role, states in (("z", chain.out), ("g", chain.grad)):
            for link, state in zip(chain.links, states, strict=True):
                if state is not None:
                    yield f"{link.linear}/{role}", state


def scale_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of remembered scales as tensors named `site/operand/part`, to be saved beside a checkpoint. Empty where all scales are dynamic.

    Args:
        model: converted, wrapped or not.

    Returns:
        Tensors to keep beside the model's state_dict.

    Example:
        >>> safetensors.torch.save_file(loka.scale_state(model), "scales.safetensors")
    """
    return {f"{name}/{part}": tensor for name, amax in _remembered(model) for part, tensor in amax.state().items()}


def load_scale_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what `scale_state` returned; refuses one of another conversion, naming the differences.

    Args:
        model: converted as the one the state is of.
        state: what `scale_state` returned there.

    Example:
        >>> loka.load_scale_state(model, safetensors.torch.load_file("scales.safetensors"))
    """
    expected = scale_state(model)
    if problems := sorted(expected.keys() ^ state.keys()):
        where = [f"{name}: {'missing' if name in expected else 'unknown'}" for name in problems]
        hint = "hint: where a Guard switched sites, guard.load_state_dict(...) comes first"
        raise ValueError(f"this scale state does not fit the model ({len(where)} differences): {'; '.join(where[:6])}; {hint}")  # fmt: skip
    for name, amax in _remembered(model):
        amax.load({part: state[f"{name}/{part}"] for part in amax.state()})
    for _, chain in chains_of(unwrap(model)):
        chain.find_primed()


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Batches run in this block set the fixed scales: the largest magnitude each site sees becomes its bound.

    A block that ends in an exception changes nothing: earlier scales stay as they were.

    Args:
        model: converted with static scales, or with chains.

    Returns:
        A context manager.

    Example:
        >>> with loka.placing.calibrating(model), torch.no_grad():
        ...     for batch in batches:
        ...         model(batch)
    """
    inner = unwrap(model)
    states = {
        name: linear.state.x
        for name, linear in linears_of(inner)
        if linear.state.x is not None and any(spec.mode == "static" for spec in linear.binding.x_specs.values())
    }
    chains = [chain for _, chain in chains_of(inner)]
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
                f"calibration saw no finite value other than zero at {', '.join(unseen[:6])}; run more batches"
            )
    except BaseException:  # the bounds of the last whole calibration stay, after Ctrl-C too
        for name, state in states.items():
            static, state.calibrated = before[name]
            state.static.copy_(static)
        raise
    finally:
        for state in states.values():
            state.calibrating = False
