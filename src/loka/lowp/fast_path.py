"""Keep torch's fused encoder layer from bypassing converted linears.

In eval mode and without gradients nn.TransformerEncoderLayer passes the weights of its linears to one fused kernel and
never calls the linears: converted ones would silently run in high precision. torch takes the ordinary path if anything
inside the layer has a hook, so a layer with a converted linear gets one that does nothing. The nn.TransformerEncoder
around it packs padded batches into nested tensors only for that kernel, so this is disabled too, and the padding is
zeroed as the nested path does it (`loka.nn.padding`).

nn.TransformerDecoderLayer has no such path. nn.MultiheadAttention has one, which reads its own parameters and those of
`out_proj`: that linear is never converted (`loka.lowp.linear.refuse`).
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from loka.lowp.chain import chain_of
from loka.lowp.linear import Linear
from loka.nn.padding import ZeroPadding

_NESTED = "loka_used_nested_tensor"  # attribute of an encoder: its original `use_nested_tensor`


def _call_every_module(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Do nothing: the presence of this hook makes torch call every module.

    Raise if the encoder around still packs its batches, because only a layer of it was converted.
    """
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_nested:
        raise ValueError(
            "a converted nn.TransformerEncoderLayer got a nested tensor from the nn.TransformerEncoder around it; "
            "hint: convert the encoder or the whole model, not the layer alone, "
            "or build the encoder with enable_nested_tensor=False"
        )


def _has_hook(module: nn.Module) -> bool:
    return _call_every_module in module._forward_pre_hooks.values()


def _encoders(model: nn.Module) -> Iterator[nn.TransformerEncoder]:
    return (module for module in model.modules() if isinstance(module, nn.TransformerEncoder))


def close_fast_paths(model: nn.Module) -> None:
    """Make every encoder layer with a converted linear call its modules."""
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and any(
            isinstance(m, Linear) or chain_of(m) is not None for m in layer.modules()
        ):
            layer.register_forward_pre_hook(_call_every_module)
    for encoder in _encoders(model):
        if hasattr(encoder, "use_nested_tensor") and any(_has_hook(layer) for layer in encoder.layers):
            setattr(encoder, _NESTED, encoder.use_nested_tensor)
            if encoder.use_nested_tensor:
                encoder.layers[-1].register_forward_hook(ZeroPadding(encoder), with_kwargs=True)
            encoder.use_nested_tensor = False


def open_fast_paths(model: nn.Module) -> None:
    """Undo `close_fast_paths`, for a model that was reverted."""
    for module in model.modules():
        ours = [number for number, hook in module._forward_pre_hooks.items() if hook is _call_every_module]
        for number in ours:
            del module._forward_pre_hooks[number]
    for encoder in _encoders(model):
        if hasattr(encoder, _NESTED):
            encoder.use_nested_tensor = getattr(encoder, _NESTED)
            delattr(encoder, _NESTED)
            if encoder.use_nested_tensor:
                last = encoder.layers[-1]
                for number in [number for number, hook in last._forward_hooks.items() if isinstance(hook, ZeroPadding)]:
                    del last._forward_hooks[number]
                    last._forward_hooks_with_kwargs.pop(number, None)
