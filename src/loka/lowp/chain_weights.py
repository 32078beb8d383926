"""The weights of a chain: quantized in every forward while training, once for serving.

If a frozen weight is written to, a warning says so, and the weights are quantized in every call from then on.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

from loka.formats import QTensor
from loka.kernels.quantize import quantize
from loka.lowp.chain_function import STATIC_SPEC, TENSOR_SPEC
from loka.lowp.chain_parts import ChainConfig, Part
from loka.lowp.chain_scales import ChainScales
from loka.lowp.folding import fold, refuse_training, statistics
from loka.lowp.witness import Witness, warn_stale


class ChainWeights(ChainScales):
    """The weights of a chain, and the batch norms folded into them."""

    def __init__(self, config: ChainConfig) -> None:
        super().__init__(config)
        self.frozen: list[QTensor] | None = None
        self.frozen_biases: dict[int, Tensor] = {}  # of links with a folded batch norm, while frozen
        self._witnesses: list[Witness] | None = None  # of frozen weights; None if every call quantizes them
        self._folded_types: set[torch.dtype] = set()  # of the tensors that were folded into them

    def followed_weights(self) -> list[Tensor]:
        """Return the weights as registered parameters, as optimizers know them."""
        return [weight for linear in self.linears if (weight := linear._parameters.get("weight")) is not None]

    def weights_changed(self, *, owned: bool) -> None:
        """Do nothing: weights that train are quantized in every forward."""

    def read_once(self) -> AbstractContextManager[None]:
        """Compute a parametrized weight once in this block, not at every reading: by that, a spectral norm changes."""
        made = any("parametrizations" in linear._modules for linear in self.linears)
        return parametrize.cached() if made else nullcontext()

    def _parameters(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the weight and bias of every link, with its batch norm folded in."""
        for at, part in enumerate(self.parts):
            if at in self.frozen_biases:  # the frozen weight is used instead, so it is not folded here
                refuse_training(part.norm, part.link.linear)
                yield part.linear.weight, self.frozen_biases[at].to(part.linear.weight.dtype)
            elif part.folds:
                yield fold(part.linear, cast(nn.BatchNorm1d, part.norm), part.link.linear)
            else:
                yield part.linear.weight, part.linear.bias

    def _quantized_weights(self) -> list[QTensor]:
        if self.frozen is not None and self._are_frozen_current():
            return self.frozen
        return [self._quantize(part) for part in self.parts]

    def quantized_weight(self, at: int) -> QTensor:
        """Return a weight as the forward GEMM uses it."""
        fresh = self.frozen is None or self._witnesses is None
        return self._quantize(self.parts[at]) if fresh else self.frozen[at]  # type: ignore[index]

    def _quantize(self, part: Part) -> QTensor:
        device = part.linear.weight.device if self.frozen is None else self.frozen[0].device
        weight = (
            fold(part.linear, cast(nn.BatchNorm1d, part.norm), part.link.linear)[0]
            if part.folds
            else part.linear.weight
        )
        return quantize(weight.detach().to(device), TENSOR_SPEC, backend=self.precision.quantize_backend)

    def _are_frozen_current(self) -> bool:
        """Check whether the weights are unchanged since they were frozen.

        If not, warn, and quantize them in every call. Compiled code does not look itself, but it is compiled again, and
        quantizes them in every call too, after an eager call has found a change.
        """
        if torch.compiler.is_compiling():
            return self._witnesses is not None
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True
        if self._witnesses is None:
            return False
        # a cast changes bits, not values, and is not a write; Witness handles weights the same way
        if self._folded_types != self._find_folded_types():
            self._make_witnesses()
        pairs = zip(self._witnessed(), self._witnesses, strict=True)
        changed = [name for (name, held), witness in pairs if not witness.agrees(held)]
        if changed:
            warn_stale(", ".join(dict.fromkeys(changed)))
            self._witnesses, self.frozen_biases = None, {}
        return not changed

    def freeze(self, *, offload: bool = False) -> None:
        """Quantize the weights once, for serving; updates to them are not tracked until `thaw`.

        Args:
            offload: move the high-precision weights to the host: a frozen chain then takes half the memory of a 16-bit
                one, not one and a half times as much.
        """
        if not self.primed:
            raise ValueError(f"{self.name} has no scales yet; hint: with loka.placing.calibrating(model): model(batch)")
        self.thaw()
        self._fix_weights()
        if offload:
            self._move_weights(torch.device("cpu"))
        self._make_witnesses()

    def _fix_weights(self) -> None:
        """Quantize the current weights and compute the folded biases."""
        self.frozen_biases = {}
        self.frozen = [self._quantize(part) for part in self.parts]
        with torch.no_grad():
            made = {at: bias for at, (_, bias) in enumerate(self._parameters()) if self.parts[at].folds}
        self.frozen_biases = {at: bias.to(self.frozen[0].device) for at, bias in made.items() if bias is not None}

    def _make_witnesses(self) -> None:
        """Remember the tensors that frozen weights were computed from."""
        self._witnesses = [Witness(held) for _, held in self._witnessed()]
        self._folded_types = self._find_folded_types()

    def _find_folded_types(self) -> set[torch.dtype]:
        tensors = [
            (part.linear.bias, part.norm.running_mean, part.norm.weight)
            for part in self.parts
            if isinstance(part.norm, nn.BatchNorm1d)
        ]
        return {tensor.dtype for three in tensors for tensor in three if tensor is not None}

    def _witnessed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that frozen weights are computed from, with the linear's name."""
        for part in self.parts:
            yield part.link.linear, part.linear.weight
            if part.folds:
                yield part.link.linear, statistics(part.linear, cast(nn.BatchNorm1d, part.norm))

    def thaw(self) -> None:
        """Undo `freeze`: move weights back to the device, and quantize them in every forward."""
        if self.frozen is not None:
            self._move_weights(self.frozen[0].device)
        self.frozen, self.frozen_biases = None, {}

    def refresh(self) -> None:
        """Quantize frozen weights again, after they were changed or loaded. A no-op if the chain is not frozen."""
        if self.frozen is not None:
            self._fix_weights()
            self._make_witnesses()

    def _move_weights(self, device: torch.device) -> None:
        for linear in self.linears:
            if linear.weight.device != device:
                linear.weight.data = linear.weight.data.to(device)

    def to(self, device: torch.device) -> None:
        """Move what belongs to the chain, but not its modules, to a device."""
        super().to(device)
        if self.frozen is not None:
            self.frozen = [replace(q, data=q.data.to(device), scale=q.scale.to(device)) for q in self.frozen]
        self.frozen_biases = {at: bias.to(device) for at, bias in self.frozen_biases.items()}

    def count_saturated(self) -> list[Tensor]:
        """Return for every link in how many steps its outputs and its gradients saturated so far, [2].

        For a frozen chain, it is whether they have saturated at all.
        """
        counts = []
        for states in zip(self.out, self.grad, strict=True):
            now = [
                self.static.new_zeros(())
                if s is None
                else (s.pending > s.scale * STATIC_SPEC.format.max).float()
                if self.frozen is not None
                else s.saturated
                for s in states
            ]
            counts.append(torch.stack(now))
        return counts
