"""Compute what several modules take from one batch of features in one pass: products with mixtures, and other mixtures.

A layer of a Wukong multiplies its features x [B, n, d] by mixtures of them (`feature_products`) and compresses them by
linears over features (`feature_layout`): three kernels that each read x. `SharedFeatures` belongs to such a group of
modules. While the forward of the module that contains them is compiled, the first of them to be called computes the
results of all (`loka.nn.mix.multiply_and_mix`), and the others take theirs, if they are called with exactly the same
x. In eager mode every module computes for itself. The mod `shared_features` finds the groups.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loka.nn.mix import compute_dtype, multiply_and_mix
from loka.nn.sharing import Recorded, Shared, each, is_valid, run_sharing, take_stamp

SHARED = "loka_shared_features"  # attribute of a module: the SharedFeatures it belongs to
# (transpose, its source, whether gradients were enabled: a transpose made without them passes none to the source)
Transpose = tuple[Tensor, Tensor, bool]


class Matrix(NamedTuple):
    """A parameter by its module, so that it is found again where something replaces it (FSDP2)."""

    module: nn.Module
    name: str
    shape: tuple[int, ...]
    turned: bool  # whether it is [n, k], the transpose of the weight

    def get(self, device: torch.device) -> Tensor | None:
        """Return the parameter, or None if it cannot be read here before its module is called.

        It may be sharded, or replaced, or left behind on another device with a module that was replaced. A forward-pre
        hook may make it anew (`torch.nn.utils.weight_norm`).
        """
        if self.module._forward_pre_hooks:
            return None
        found = getattr(self.module, self.name)
        plain = type(found) in (nn.Parameter, Tensor) and tuple(found.shape) == self.shape
        return found if plain and found.device == device else None


class _Results(NamedTuple):
    """What was computed from x."""

    x: Tensor
    mode: tuple[bool, torch.dtype]  # whether gradients were enabled, and the dtype
    products: Tensor
    mixed: tuple[Tensor, ...]
    stamp: str


class SharedFeatures(Shared):
    """What modules that read one batch of features have computed from it.

    Args:
        product: the matrix of the mixtures that x is multiplied by.
        mixers: the weights of the linears over features.
        trains: whether they also share where gradients are enabled. Then every forward must use all results: a matrix
            whose result is not used would have a gradient of zeros instead of none, and an optimizer with weight decay
            would change it.
    """

    noting = False  # whether calls are recorded in eager mode (`loka.mods.shared_features`)

    def __init__(self, product: Matrix, mixers: Sequence[Matrix], *, trains: bool) -> None:
        self.product, self.mixers, self.trains = product, tuple(mixers), trains
        self.transposes: Recorded[Transpose] = ()
        self.results: _Results | None = None

    def forget(self) -> None:
        """Discard all tensors, which may have changed."""
        self.transposes = ()
        self.results = None

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Remember what a transposed tensor is a transpose of."""
        if is_named_transpose(func, args, kwargs):
            self.transposes = ((out, args[0], torch.is_grad_enabled()), self.transposes)

    def find_mixture(self, module: nn.Module, transposed: Tensor) -> Tensor | None:
        """Return W x [B, m, d] of a linear over features that is called with x^T, or None if nothing is shared."""
        for transpose, source, grad in each(self.transposes):
            if transposed is transpose and grad == torch.is_grad_enabled():
                results = self._compute(source)
                for at, mixer in enumerate(self.mixers):
                    if results is not None and mixer.module is module:
                        return results.mixed[at]
        return None

    def find_products(self, x: Tensor, matrix: Tensor, turned: bool) -> Tensor | None:
        """Return x (W x)^T [B, n, k] for W, which is the matrix or its transpose; None if nothing is shared."""
        same = turned == self.product.turned and self.product.get(x.device) is matrix
        results = self._compute(x) if same else None
        return None if results is None else results.products

    def _compute(self, x: Tensor) -> _Results | None:
        """Return the results for x, computed unless they are there. None if they must be computed apart."""
        if not self.open or not torch.compiler.is_compiling() or (torch.is_grad_enabled() and not self.trains):
            return None
        mode, results = (torch.is_grad_enabled(), compute_dtype(x)), self.results
        if results is not None and results.x is x and results.mode == mode and is_valid(results.stamp):
            return results
        matrix, weights = self.product.get(x.device), [mixer.get(x.device) for mixer in self.mixers]
        there = [weight for weight in weights if weight is not None]
        if matrix is None or len(there) < len(weights):
            return None
        weight = matrix.mT if self.product.turned else matrix
        if len(there) == 1:
            products, mixed = multiply_and_mix(x, weight, there[0])
            parts = [mixed]
        else:
            products, mixed = multiply_and_mix(x, weight, torch.cat(there))
            parts, first = [], 0
            for mixing in there:  # not torch.split, whose results must not be written to in place
                parts.append(mixed[:, first : first + mixing.shape[0]])
                first += mixing.shape[0]
        self.results = _Results(x, mode, products, tuple(parts), take_stamp())
        return self.results


class SharesFeatures(nn.Module):
    """Mixin for the module that contains groups of modules that share features."""

    loka_groups: tuple[SharedFeatures, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward with sharing, if it is being compiled."""
        return run_sharing(self.loka_groups, super().forward, *args, **kwargs)


_TRANSPOSES = (torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes)


def is_named_transpose(func: Any, args: Any, kwargs: Any) -> bool:
    """Check whether a function transposes the last two dimensions of a 3-D tensor, in a form that compiled code shows.

    `x.mT` is not seen there.
    """
    return func in _TRANSPOSES and not kwargs and len(args) == 3 and args[0].dim() == 3 and {args[1] % 3, args[2] % 3} == {1, 2}  # fmt: skip
