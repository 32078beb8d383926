"""What every model must satisfy, written once: its output and gradients equal an independent float64 reference, compiled equals eager."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def layer_norm(x: Tensor, norm: nn.Module) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    y = (x - mean) / (variance + norm.eps).sqrt() * norm.weight
    return y if norm.bias is None else y + norm.bias


def rms_norm(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def affine(x: Tensor, linear: nn.Linear) -> Tensor:
    y = torch.einsum("oi,...i->...o", linear.weight, x)
    return y if linear.bias is None else y + linear.bias


def tower(x: Tensor, mlp: nn.Module) -> Tensor:
    """A ReLU tower without norms, read from the parameters of an MLP."""
    for layer in mlp.layers:
        x = affine(x, layer.linear).clamp(min=0)
    return affine(x, mlp.last) if isinstance(mlp.last, nn.Linear) else x


def assert_same_with_gradients(
    model: nn.Module, reference: Callable[..., Tensor], *inputs: Any, tolerance: float = 1e-9
) -> None:
    """model(*inputs) and reference(*inputs) agree, and so do the gradients of every parameter and float input.

    Every parameter must receive a gradient that is not zero: an unused one would pass unnoticed.
    """
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    tensors = leaves + [p for _, p in named]
    ours, theirs = model(*inputs), reference(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    probe = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(1))
    g_ours = torch.autograd.grad((ours * probe).sum(), tensors)
    g_theirs = torch.autograd.grad((theirs * probe).sum(), tensors)
    labels = [f"input {i}" for i in range(len(leaves))] + [n for n, _ in named]
    for label, a, b in zip(labels, g_ours, g_theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, label=label: f"{label}: {m}")
        assert a.abs().max() > 0, f"{label} has no influence"


def assert_compiles(model: nn.Module, *inputs: Any, backend: str = "aot_eager") -> None:
    """One graph without breaks, with the output and the parameter gradients of eager."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(*inputs)
        out.float().square().mean().backward()
        results.append((out.detach(), {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter away from its initial value: a gain of one or a bias of zero hides mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
    return model
