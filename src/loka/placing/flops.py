"""Count the share of a model's GEMM FLOPs that a set of bindings runs in low precision, on an example.

The model is run once on the example: forward and, in training mode, backward. torch's FLOP formulas give the total,
attention and grouped GEMMs included; hooks give the rows of each linear. A linear with M rows costs 2 M K N per GEMM,
and has a dgrad only if its input requires a gradient.

The run leaves no trace: gradients are discarded, buffers and random generators are restored.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from loka.lowp.binding import LinearBinding
from loka.nn.jagged import dense
from loka.nn.wrapping import named_sites
from loka.units.example import tensors_in, try_example
from loka.units.undisturbed import gradients_aside, sparing_weights, undisturbed

_MORE: dict[Any, Any] = {  # missing in torch's own registry: attention on a CPU, and what nested tensors do not take apart
    torch.ops.aten.linear: lambda x, w, *_, **__: 2 * x.numel() * w.shape[0],
    torch.ops.aten.matmul: lambda a, b, **__: 2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape),  # type: ignore[no-untyped-call]
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dy, q, k, v, *_, **__: sdpa_backward_flop_count(dy.shape, q.shape, k.shape, v.shape),  # type: ignore[no-untyped-call]
}  # fmt: skip


def low_precision_share(
    model: nn.Module, example: Any, bindings: Mapping[str, LinearBinding], whole: Collection[str] = ()
) -> tuple[float, list[str]]:
    """Return the low-precision share of the GEMM FLOPs of one step on `example`, and the linears it did not call.

    Args:
        model: not converted yet.
        example: a tensor, a tuple or dict of arguments, one argument of any other kind, or a function without
            arguments that runs the model itself.
        bindings: the linears that will be bound, by name.
        whole: linears all of whose GEMMs run in low precision: those in a chain.
    """
    modules = dict(named_sites(model))
    low, called = 0.0, set[int]()

    def count(module: nn.Linear, given: Tensor, gemms: float) -> None:
        nonlocal low
        x = dense(given)
        low += 2.0 * (x.numel() // max(x.shape[-1], 1)) * module.in_features * module.out_features * gemms

    def count_call(module: nn.Linear, x: Tensor, y: Tensor, binding: LinearBinding | None) -> None:
        called.add(id(module))
        count(module, x, binding is None or binding.fprop is not None)
        needs = {"dgrad": x.requires_grad, "wgrad": module.weight.requires_grad}
        gemms = sum(needs[name] and (binding is None or getattr(binding, name) is not None) for name in needs)
        if y.requires_grad:  # counted when it runs: a checkpoint repeats the forward only, and y may be detached later
            y.register_hook(lambda _: count(module, x, gemms))  # type: ignore[no-untyped-call]

    handles = [
        modules[name].register_forward_hook(
            lambda m, args, given, y, b=binding: count_call(m, args[0] if args else given["input"], y, b),
            with_kwargs=True,
        )
        for name, binding in (*bindings.items(), *((name, None) for name in whole))
    ]
    try:
        # in inference mode torch does not take a linear apart into a GEMM, which has a formula
        with (
            torch.inference_mode(False),
            undisturbed(model),
            gradients_aside(model),
            sparing_weights(model),
            _FlopCounter() as counted,
        ):
            _run(model, example)
    finally:
        for handle in handles:
            handle.remove()
    if counted.flops == 0:
        raise ValueError("the model ran no GEMM on the example, so no share of FLOPs can be computed")
    idle = [name for name in (*bindings, *whole) if id(modules[name]) not in called]
    return float(min(low / counted.flops, 1.0)), idle


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sum torch's FLOP formulas over all ops.

    torch's FlopCounterMode also tracks modules by gradient hooks, which fail for a module whose input is a Parameter
    (a parametrization).
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if jagged := next(
            (type(x) for x in tensors_in((args, kwargs)) if x.is_nested and x.layout == torch.jagged), None
        ):
            with self:  # count what it does with its values: the formulas know no ragged dimension
                return jagged.__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        formula: Any = flop_registry.get(packet) or _MORE.get(packet)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        return out


def _run(model: nn.Module, example: Any) -> None:
    with torch.set_grad_enabled(model.training):
        given = tuple(example) if isinstance(example, list) else example
        out = example() if callable(example) else try_example(model, given)
        # `out` may be any structure, also a dataclass; a parameter in it requires a gradient in eval mode, too
        leaves = [t for t in tensors_in(out) if t.requires_grad and torch.is_grad_enabled()]
        if leaves:  # not torch.autograd.grad, which checkpoint(use_reentrant=True) does not support
            torch.autograd.backward([(t.abs() if t.is_complex() else t).float().sum() for t in leaves])
