"""Trace the operands of every link in one call of a chain, by computing them a second time, for observers.

A chain is one autograd node, and most operands of its GEMMs exist only in FP8. A trace runs the same kernels again on
the same tensors with the same scales and records no magnitudes, so the training run does not change by a bit. For a few
rows it has, link by link:

    x, dy             before rounding: the product of the previous FP8 operands in float32, with norm and activation
    x_low, dy_low     as the GEMM read them, with the scale in use: bounded, delayed, calibrated or from the tensor
    w_low             W as the GEMM read it

The difference is what this link loses, including saturation and the FP8 z that backward reads. A chain inside a fused
interaction layer is entered through the layer; its first x exists only in FP8 and is dequantized.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from loka.formats import QTensor, Spec, left_in_sum
from loka.kernels.dropout import factor_of, keep_mask
from loka.kernels.quantize import transpose
from loka.lowp.chain import Chain
from loka.lowp.chain_backward import input_spec, run_backward
from loka.lowp.chain_forward import Kept, quantize_input, quantize_input_both, run_forward, run_link
from loka.lowp.chain_function import STATIC_SPEC, TENSOR_SPEC, ChainTensors, Layout
from loka.lowp.chain_running import follow_linear
from loka.lowp.interaction import enter_chain

_DELAYED = replace(STATIC_SPEC, mode="delayed")


@dataclass
class LinkRows:
    """Some rows of the operands of one link.

    Args:
        x: [R, K] float32, before rounding.
        x_low: the same rows as the GEMM read them.
        w_low: [N, K], as the forward GEMM read it.
        w_low_t: [K, N], as dgrad reads it.
        x_largest: amax of all rows of x.
        dy, dy_low, dy_largest: the same for the gradient of the link's product, after backward.
        dy_left: how much of that gradient, of all rows, is left in their sum (`loka.formats.left_in_sum`).
    """

    x: Tensor
    x_low: QTensor
    w_low: QTensor
    w_low_t: QTensor
    x_largest: Tensor
    dy: Tensor | None = None
    dy_low: QTensor | None = None
    dy_largest: Tensor | None = None
    dy_left: Tensor | None = None


class _Read(NamedTuple):
    """The operands that the forward GEMM of one link read: some rows of x, amax of all of them, W and W^T."""

    x: QTensor
    largest: Tensor
    w: QTensor
    w_t: QTensor


class Trace:
    """The trace of one call of a chain: its forward, and its backward once the gradient is known.

    Args:
        chain: a placed chain.
        x: the input of its head, or of the layer around it.
        dtype: the dtype of the chain's output.
        index: the rows to trace; None for all.
        graded: trace a call that runs with gradients, as in training, or one without.
        seed: the dropout seed of that call, or None.

    Example:
        >>> trace = Trace(chain, x, x.dtype, torch.arange(16), graded=True)
        >>> trace.see_gradient(dy); trace.finish()
        >>> trace.links[0].dy_low.dequantize()
    """

    @torch.no_grad()
    def __init__(
        self,
        chain: Chain,
        x: Tensor,
        dtype: torch.dtype,
        index: Tensor | None,
        *,
        graded: bool,
        seed: Tensor | None = None,
    ) -> None:
        x = x.detach()
        self._pull: Callable[[Tensor, Tensor], Tensor] | None = None
        self._arrived: Tensor | None = None
        given: Tensor | QTensor = x.reshape(-1, chain.linears[0].in_features)
        if chain.around is not None:
            given, self._pull = enter_chain(chain.around, x)
        self._index = index if index is None else index.to(given.device)
        self._layout, tensors = chain.layout(dtype), chain.tensors(seed)
        none = (None,) * len(chain.links)
        # copies: scales change with the optimizer step, and sharding may free gathered parameters before backward
        norm_weight, norm_bias, scale, g_scale = (
            tuple(None if t is None else t.detach().clone() for t in part)
            for part in (tensors.norm_weight, tensors.norm_bias, tensors.scale, tensors.g_scale)
        )
        self._tensors = ChainTensors(
            tensors.weight, tensors.bias, norm_weight, norm_bias, scale, none, g_scale, none, seed
        )
        read = self._run(chain, given) if graded else self._infer(chain, given)
        self._bias = [None if b is None else b.detach().to(torch.float32, copy=True) for b in tensors.bias]
        self.links: list[LinkRows] = []
        wide = (given.dequantize() if isinstance(given, QTensor) else given)[_all(self._index)].float()
        for at, link in enumerate(read):
            seen = torch.linalg.vector_norm(wide, torch.inf) if wide.numel() else torch.zeros_like(link.largest)
            self.links.append(LinkRows(wide, link.x, link.w, link.w_t, torch.maximum(link.largest, seen)))
            wide = self._hand_on(self._product(at), at)
        self._tensors = self._tensors._replace(weight=none, bias=none, scale=none)

    def _run(self, chain: Chain, given: Tensor | QTensor) -> list[_Read]:
        """Run the forward as in training, and keep what backward needs."""
        layout = self._layout
        if isinstance(given, QTensor):
            a, a_t = given, transpose(given, backend=layout.precision.quantize_backend)
        else:
            a, a_t = quantize_input_both(given, chain.input_scale, layout)
        self._y, self._saved = run_forward(a, a_t, layout, self._tensors)
        found, width = [], len(Kept._fields)
        for at in range(len(layout.links)):
            kept = Kept(*self._saved[width * at : width * (at + 1)])  # type: ignore[arg-type]
            spec = a.spec if at == 0 else input_spec(at, layout)
            rows = take_quantized(QTensor(kept.x_t.T, kept.x_t_scale, spec), self._index)
            if at == 0 and isinstance(given, Tensor):
                whole = torch.linalg.vector_norm(given, torch.inf).float()
            else:
                whole = _largest(kept.x_t, kept.x_t_scale)
            w_t = QTensor(kept.w_t, kept.w_t_scale, layout.precision.weight_t_spec)
            plain = layout.precision.weight_t_spec == TENSOR_SPEC
            w = QTensor(kept.w_t.T, kept.w_t_scale, TENSOR_SPEC) if plain else chain.quantized_weight(at)
            found.append(_Read(rows, whole, w, w_t))
        return found

    def _infer(self, chain: Chain, given: Tensor | QTensor) -> list[_Read]:
        """Run the forward as without gradients."""
        layout, a = self._layout, given
        if not isinstance(a, QTensor):
            a = quantize_input(a, chain.input_scale, layout, rows=not chain.training)
        found = []
        for at in range(len(layout.links)):
            w = chain.quantized_weight(at)
            whole = torch.linalg.vector_norm(a.dequantize(), torch.inf).float()
            found.append(_Read(take_quantized(a, self._index), whole, w, QTensor(w.data.T, w.scale, w.spec)))
            step = run_link(a, w, at, layout, self._tensors, training=False)
            a = a if step.a is None else step.a
        self._saved = []
        return found

    def _product(self, at: int) -> Tensor:
        """Return p of the rows, from the GEMM's operands."""
        link, bias = self.links[at], self._bias[at]
        p = link.x_low.dequantize() @ link.w_low.dequantize().T
        return p if bias is None else p + bias

    def _hand_on(self, p: Tensor, at: int) -> Tensor:
        """Return the output of a link before rounding."""
        y = follow_linear(p, self._layout.links[at], self._tensors.norm_weight[at], self._tensors.norm_bias[at])
        draw = self._tensors.draw(at, self._layout)
        if draw is None:
            return y
        return y * keep_mask(draw, y.shape[0] if self._index is None else self._index, y.shape[1]) * factor_of(draw.p)

    @torch.no_grad()
    def see_gradient(self, dy: Tensor) -> None:
        """Trace backward, and keep the rows of every link's gradient.

        Args:
            dy: the gradient of the output of the chain, or of the layer around it.
        """
        if not self._saved:
            return
        dy, count = dy.detach(), len(self.links)
        flat = self._pull(self._y, dy) if self._pull is not None else dy.reshape(-1, self._y.shape[-1])
        run_backward(
            flat, self._saved, self._layout, self._tensors, needs_input=False, needs_weight=[False] * count, show=self._show
        )  # fmt: skip
        self._arrived, self._saved = flat[_all(self._index)].float(), []

    def finish(self) -> bool:
        """Compute the gradients before rounding. Call it after backward, since it runs autograd itself.

        Returns:
            Whether there was a gradient.
        """
        if self._arrived is None:
            return False
        arriving = self._arrived
        for at, link in reversed(list(enumerate(self.links))):
            link.dy = self._pull_back(arriving, at)
            assert link.dy_low is not None
            assert link.dy_largest is not None
            if link.dy.numel():
                link.dy_largest = torch.maximum(link.dy_largest, torch.linalg.vector_norm(link.dy, torch.inf))
            arriving = link.dy_low.dequantize() @ link.w_low_t.dequantize().T
        return True

    def _show(self, at: int, g: QTensor) -> None:
        link = self.links[at]
        link.dy_low = take_quantized(g, self._index)
        whole = g.dequantize()
        link.dy_largest, link.dy_left = torch.linalg.vector_norm(whole, torch.inf).float(), left_in_sum(whole)

    def _pull_back(self, arriving: Tensor, at: int) -> Tensor:
        """Return the gradient of p from that of the link's output, in float32."""
        if self._layout.links[at].plain and self._tensors.draw(at, self._layout) is None:
            return arriving
        with torch.enable_grad():
            p = self._product(at).detach().requires_grad_()
            handed = self._hand_on(p, at)
        found: Tensor = torch.autograd.grad(handed, p, arriving)[0]
        return found.detach()


def _all(index: Tensor | None) -> Tensor | slice:
    return slice(None) if index is None else index


def _largest(data: Tensor, scale: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(data.float(), torch.inf) * scale
    return found


def take_quantized(q: QTensor, index: Tensor | None) -> QTensor:
    """Return some rows of a quantized matrix, or all if `index` is None. Scales must be per tensor or per row."""
    if index is None:
        return q
    scale = q.scale if q.scale.dim() == 0 else q.scale[index]
    return QTensor(q.data.view(torch.uint8)[index].view(q.data.dtype), scale, q.spec)


def operand_specs(chain: Chain, at: int) -> dict[str, tuple[Spec, Spec]]:
    """Return the Specs of both operands of the three GEMMs of a link; their mode says where the scales come from."""
    if at == 0:
        x = STATIC_SPEC if chain.input_scale is not None else TENSOR_SPEC
    elif chain.links[at - 1].bounded or chain.frozen is not None:
        x = STATIC_SPEC
    else:
        x = _DELAYED if chain.primed else TENSOR_SPEC
    layout: Layout = chain.layout(torch.float32)
    g = replace(layout.gradient_spec, mode="delayed") if layout.delays_gradients else layout.gradient_spec
    return {"fprop": (x, TENSOR_SPEC), "dgrad": (g, chain.precision.weight_t_spec), "wgrad": (g, x)}
