"""The share of a model's GEMM FLOPs that a set of bindings runs in low precision, counted on an example.

The model is run once on the example, forward and, in training mode, backward. torch's counter gives the FLOPs of everything it multiplies (attention and grouped
GEMMs included); hooks give the rows that each linear saw. A linear of M rows costs 2 M K N per GEMM, and has a dgrad only where its input needs a gradient.

The example leaves no trace: gradients go nowhere, buffers and random generators are put back.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from loka.lowp.binding import LinearBinding
from loka.nn.wrapping import named_sites
from loka.units.example import tensors_in, try_example
from loka.units.undisturbed import gradients_aside, undisturbed

_CPU_ATTENTION: dict[Any, Any] = {  # which torch's own counter does not know
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape),  # type: ignore[no-untyped-call]
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dy, q, k, v, *_, **__: sdpa_backward_flop_count(dy.shape, q.shape, k.shape, v.shape),  # type: ignore[no-untyped-call]
}  # fmt: skip


def low_precision_share(
    model: nn.Module, example: Any, bindings: Mapping[str, LinearBinding], whole: Collection[str] = ()
) -> float:
    """Share of the GEMM FLOPs of one step on `example`.

    `whole`: linears all of whose GEMMs run in low precision, since a chain does. The example is a Tensor, a tuple of arguments, a dict of them, one argument of any other kind, or a function without arguments that runs the model itself.
    """
    modules = dict(named_sites(model))
    low = 0.0

    def count_call(module: nn.Linear, x: Tensor, binding: LinearBinding | None) -> None:
        nonlocal low
        rows = x.numel() // max(x.shape[-1], 1)
        backward = torch.is_grad_enabled()
        happens = {
            "fprop": True,
            "dgrad": backward and x.requires_grad,
            "wgrad": backward and module.weight.requires_grad,
        }
        gemms = sum(happens[name] and (binding is None or getattr(binding, name) is not None) for name in happens)
        low += 2.0 * rows * module.in_features * module.out_features * gemms

    handles = [
        modules[name].register_forward_pre_hook(
            lambda m, args, given, b=binding: count_call(m, args[0] if args else given["input"], b), with_kwargs=True
        )
        for name, binding in (*bindings.items(), *((name, None) for name in whole))
    ]
    try:
        with undisturbed(model), gradients_aside(model), _Products() as counted:
            _run(model, example)
    finally:
        for handle in handles:
            handle.remove()
    if counted.flops == 0:
        raise ValueError("the example made the model multiply nothing: there is no share to tell")
    return float(min(low / counted.flops, 1.0))


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what torch's FLOP formulas say of every op. Its own counter also follows modules with gradient hooks, which a module that is given a Parameter (a parametrisation) breaks."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        formula: Any = flop_registry.get(packet) or _CPU_ATTENTION.get(packet)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        return out


def _run(model: nn.Module, example: Any) -> None:
    with torch.set_grad_enabled(model.training):
        given = tuple(example) if isinstance(example, list) else example
        out = example() if callable(example) else try_example(model, given)
        leaves = [t for t in tensors_in(out) if t.requires_grad]  # of whatever a forward returns, a dataclass too
        if leaves:  # not `grad`, which a checkpoint with use_reentrant=True refuses
            torch.autograd.backward([(t.abs() if t.is_complex() else t).float().sum() for t in leaves])
