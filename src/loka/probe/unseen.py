"""Products that Probe cannot observe, with a reason and a FLOP estimate, so that FLOP shares refer to the whole model.

    recurrent layers          the products are inside one fused call
    nn.MultiheadAttention     in_proj and out_proj are applied by functions, not by modules with hooks; the mod
                              attention_layout calls them as modules
    convolutions, bilinear    not a GEMM that conversion could swap
    TorchScript               cannot be hooked; its rows are not counted either
    other modules             a module that holds a Parameter with two or more dimensions and multiplies by it itself

Estimate: every parameter is used once per row in forward and twice in backward, so 6 x rows x parameters.
`probe.count_flops(step)` counts exactly, including functional products of activations, which have no parameters and do
not appear here.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from loka.nn.replacing import SEES_CHAINS
from loka.nn.wrapping import LENT, named_sites
from loka.probe.adapter import find_adapter
from loka.records import Unseen

REASONS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.RNNBase, "a recurrent layer multiplies inside one fused call"),
    (nn.RNNCellBase, "a recurrent cell multiplies by functions"),
    (
        nn.MultiheadAttention,
        (
            "nn.MultiheadAttention multiplies in_proj and out_proj by functions, without their modules; hint: "
            "the mod attention_layout, which takes attention of a sequence to itself"
        ),
    ),
    (_ConvNd, "a convolution is no GEMM that conversion could swap"),
    (nn.Bilinear, "a bilinear form is no GEMM that conversion could swap"),
    (
        torch.jit.ScriptModule,
        "TorchScript runs it, where nothing can be watched, counted or converted; hint: the module it was scripted from",
    ),
)


class UnseenWatch:
    """Counts the rows of a module that cannot be observed."""

    def __init__(self, name: str, module: nn.Module, reason: str, parameters: int) -> None:
        self.name, self.module, self.reason, self.parameters = name, module, reason, parameters
        self.rows = self.calls = 0

    def finish(self, steps: int) -> Unseen:
        """Return the record. `steps` is the number of sampled steps."""
        flops = 6.0 * self.rows * self.parameters / max(steps, 1)
        return Unseen(name=self.name, type=type(self.module).__name__, reason=self.reason, flops=flops)


def find_unseen(model: nn.Module, watched: Collection[int], outside: Collection[int]) -> list[UnseenWatch]:
    """Find modules that hold a matrix and are neither watched nor excluded by the user, outermost first.

    Modules inside a found recurrent layer, attention, convolution or script are counted with it.
    """
    found: list[UnseenWatch] = []
    covered = {*watched, *outside}
    for name, module in named_sites(model):
        if id(module) in covered or getattr(module, LENT, None):  # its children compute, and are sites themselves
            continue
        reason = next((text for kind, text in REASONS if isinstance(module, kind)), None)
        if reason is not None:
            covered |= {id(inner) for inner in module.modules()}
            count = sum(p.numel() for p in _matrices(module, recurse=True))
            found.append(UnseenWatch(name, module, reason, count))
            continue
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | parametrize.ParametrizationList) or find_adapter(module):
            continue
        own = list(_matrices(module, recurse=False))
        if own:
            reason = (
                "it holds a matrix of its own, and a function that multiplies it is not seen; hint: an nn.Linear is"
            )
            found.append(UnseenWatch(name, module, reason, sum(p.numel() for p in own)))
    return found


def _matrices(module: nn.Module, *, recurse: bool) -> Iterator[Tensor]:
    for parameter in module.parameters(recurse=recurse):
        if not isinstance(parameter, UninitializedParameter) and parameter.numel() > max(parameter.shape, default=1):
            yield parameter


def inside_attention(model: nn.Module) -> set[int]:
    """Return the ids of modules inside nn.MultiheadAttention, whose out_proj is a linear that is never called."""
    return {
        id(inner)
        for _, module in named_sites(model)
        if isinstance(module, nn.MultiheadAttention) and not getattr(module, LENT, ())
        for inner in module.modules()
        if inner is not module
    }


def make_counting_hook(switch: Any, watch: UnseenWatch) -> Callable[..., None]:
    """Make the forward hook that counts rows on sampled steps, in eager mode only."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not switch.on or not torch.is_grad_enabled():
            return
        shown = output if isinstance(module, _ConvNd) else next((a for a in args if isinstance(a, Tensor)), output)
        if isinstance(shown, Tensor) and shown.dim() and not shown.is_nested:
            width = shown.shape[1] if isinstance(module, _ConvNd) and shown.dim() > 1 else shown.shape[-1]
            watch.calls += 1
            watch.rows += shown.numel() // max(int(width), 1)

    setattr(hook, SEES_CHAINS, True)
    return hook
