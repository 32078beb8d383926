"""The modules of a chain. They keep their identity and change their class while the chain is placed.

Head      the first linear; its forward runs the whole chain
Passed    every later linear, norm, activation and dropout; its forward computes nothing (`loka.lowp.chain_handing`)
caller    a module whose forward calls an activation as a function (`loka.lowp.passing`); it keeps its own forward
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loka.lowp.leaving import refuse_script, refuse_tracing
from loka.lowp.passing import CALLS, HandOn
from loka.nn.mixing import mix, unmix

if TYPE_CHECKING:
    from loka.lowp.chain import Chain

CHAIN = "loka_chain"  # attribute of every module of a chain: the chain


class InChain(nn.Module):
    """What all modules of a chain have in common. It is mixed in before the module's own class (`loka.nn.mixing`)."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        chain = self.__dict__[CHAIN]
        if isinstance(self, Head):
            # use the head's weight: later linears have not moved yet, and offloaded weights are on the host
            chain.to(self.weight.device if chain.frozen is None else fn(chain.static).device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        chain = self.__dict__[CHAIN]
        if chain.frozen is not None and isinstance(self, (nn.Linear, nn.BatchNorm1d)):  # made from other weights
            chain.refresh()

    def train(self, mode: bool = True) -> Any:
        """Set the mode. Training mode thaws the chain, since frozen weights have no gradient."""
        if mode and self.__dict__[CHAIN].frozen is not None:
            self.__dict__[CHAIN].thaw()
        return super().train(mode)

    def extra_repr(self) -> str:
        """Return the module's own repr and its chain."""
        own, chain = super().extra_repr(), self.__dict__[CHAIN]
        what = repr(chain) if isinstance(self, Head) else f"runs in chain {chain.name}"
        return f"{own}, {what}" if own else what

    def __prepare_scriptable__(self) -> Any:
        refuse_script(self.__dict__[CHAIN].name)

    def _replicate_for_data_parallel(self) -> Any:
        raise ValueError(
            "the replicas of nn.DataParallel would share a chain's scales; hint: DistributedDataParallel, "
            "or loka.revert(model) first"
        )


class Head(InChain):
    """The first linear of a chain."""

    weight: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Run the whole chain, and return its result or a placeholder that later modules pass on."""
        chain = self.__dict__[CHAIN]
        refuse_tracing(chain)
        handed: Tensor = chain.begin(chain.run(input))
        return handed


class Passed(InChain):
    """A later module of a chain; the head has already computed its result."""

    def forward(self, input: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return what the chain passes on. Raise if the input is not what the chain passed on before."""
        handed: Tensor = self.__dict__[CHAIN].meet(
            input, linear=isinstance(self, nn.Linear), in_place=getattr(self, "inplace", False)
        )
        return handed


class _Caller(nn.Module):
    """A module whose forward calls activations of chains as functions."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, in which these calls return their input."""
        return _hand_on(self, super().forward, *args, **kwargs)


def _hand_on(caller: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a caller's forward, in which the functions that its chains have computed return their input."""
    mode: HandOn | None = caller.__dict__.get(CALLS)
    if mode is None:  # reverted
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        return _run_under(mode, caller, forward, *args, **kwargs)
    try:
        return _run_under(mode, caller, forward, *args, **kwargs)
    except BaseException:  # do not report a missing call in the next batch because this one failed
        for chain in mode.chains:
            chain.forget()
        raise


def _run_under(mode: HandOn, caller: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        result = forward(*args, **kwargs)
    for chain in mode.chains:
        chain.leave(caller)
    return result


def add_call(caller: nn.Module, chain: "Chain") -> None:
    """Make a module's forward skip the functions that a chain has computed."""
    if CALLS not in caller.__dict__:
        caller.__dict__[CALLS] = HandOn()
        caller.__class__ = mix(type(caller), _Caller)
        if (own := caller.__dict__.get("forward")) is not None:  # model.forward = torch.compile(model.forward)
            caller.__dict__["forward"] = partial(_hand_on, caller, own)
    caller.__dict__[CALLS].chains.append(chain)


def drop_call(caller: nn.Module, chain: "Chain") -> None:
    """Undo `add_call`."""
    mode: HandOn | None = caller.__dict__.get(CALLS)
    if mode is None or chain not in mode.chains:
        return
    mode.chains.remove(chain)
    if not mode.chains:
        del caller.__dict__[CALLS]
        caller.__class__ = unmix(type(caller), _Caller)
        own = caller.__dict__.get("forward")
        if isinstance(own, partial) and own.func is _hand_on:  # one that was set later may call it, which does no harm
            caller.__dict__["forward"] = own.args[1]


def chain_of(module: nn.Module) -> "Chain | None":
    """Return the chain that a module is part of, or None.

    Args:
        module: any module.

    Returns:
        The chain; the same object for all of its modules.

    Example:
        >>> chain_of(model.top[0]).name
        'top.0'
    """
    found: Chain | None = module.__dict__.get(CHAIN)
    return found


def chains_of(model: nn.Module) -> "Iterator[tuple[str, Chain]]":
    """Yield every chain placed in a model.

    Args:
        model: converted or not.

    Returns:
        Pairs of the first linear's name in this model and the chain.

    Example:
        >>> for name, chain in chains_of(model): print(name, chain)
    """
    for name, module in model.named_modules():
        if isinstance(module, Head):
            chain = chain_of(module)
            assert chain is not None
            yield name, chain


def remaining_chains(model: nn.Module) -> "list[Chain]":
    """Return every chain that a module of a model is part of, also where its first linear has left the model.

    A user may have assigned another module in its place. The later modules are then of no use until `Chain.release`.
    """
    found: list[Any] = []
    for module in model.modules():
        mode: HandOn | None = module.__dict__.get(CALLS)
        found += [chain_of(module), *([] if mode is None else mode.chains)]
    return list({id(chain): chain for chain in found if chain is not None}.values())
