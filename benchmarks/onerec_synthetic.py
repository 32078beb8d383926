"""A model that has not been trained but looks as if: for measuring speed, where weights matter by their distribution only.

    linears     heavy-tailed rows (Student's t, 6 degrees of freedom, cut at 8 sigma) of unit gain, output channels of different size (lognormal, 0.3)
    norms       gains lognormal around one, so that some channels are louder: what FP8 meets in a trained model
    heads       three times that, so that the codes compete like a trained softmax and not like a uniform one
    router      a bias per expert, scaled until the busiest expert has `skew` times the mean load on normed Gaussian rows

These are the statistics that published analyses report for generative recommenders (variance well under 0.1, moderate tails). Nothing about quality can be
learned from such a model.
"""

import math

import torch
from torch import Tensor, nn

from loka.models.onerec import OneRec, OneRecConfig
from loka.nn import EmbeddingTables, GroupedLinear, MixtureOfExperts
from loka.nn.experts import UNIT

TAIL = 6  # degrees of freedom
CUT = 8.0
SPREAD = 0.3


def make_trained_like(
    config: OneRecConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    skew: float = 2.5,
    seed: int = 0,
) -> OneRec:
    """A OneRec of that configuration, in evaluation mode; made on the device, tensor by tensor."""
    with torch.device("meta"):
        model = OneRec(config)
    model = model.to(dtype).to_empty(device=device).eval()
    g = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, module in model.named_modules():
            _fill(name, module, g)
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                _skew(module, skew, g)
    return model


def _fill(name: str, module: nn.Module, g: torch.Generator) -> None:
    if isinstance(module, nn.Linear):
        draw(module.weight, g, gain=3.0 if name.startswith("heads.") else 1.0)
        if module.bias is not None:
            module.bias.zero_()
    elif isinstance(module, GroupedLinear):
        for expert in module.weight:
            draw(expert, g)
    elif isinstance(module, nn.Embedding):
        module.weight.normal_(std=0.5, generator=g)
    elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
        module.weight.copy_(torch.randn(module.weight.shape, generator=g, device=g.device).mul_(SPREAD).exp_())
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()  # type: ignore[operator]
    elif isinstance(module, MixtureOfExperts):
        module.balance.zero_()
        module.load.zero_()
    else:
        for key, parameter in module.named_parameters(recurse=False):
            if key == "weight":
                parameter.normal_(std=0.5, generator=g)
    if isinstance(module, EmbeddingTables):
        module.first_row.copy_(torch.tensor(module.starts))
        module.cardinality.copy_(torch.tensor(module.sizes))


def draw(weight: Tensor, g: torch.Generator, *, gain: float = 1.0) -> None:
    """Fill [N, K] in place: Student's t over its own deviation, a size per output channel, unit gain over K inputs."""
    n, k = weight.shape
    normal = torch.randn(n, k, generator=g, device=weight.device)
    chi = sum(torch.randn(n, k, generator=g, device=weight.device).square_() for _ in range(TAIL))
    assert isinstance(chi, Tensor)  # a sum of tensors
    values = normal.div_(chi.div_(TAIL).sqrt_()).div_(math.sqrt(TAIL / (TAIL - 2))).clamp_(-CUT, CUT)
    size = torch.randn(n, 1, generator=g, device=weight.device).mul_(SPREAD).exp_()
    weight.copy_(values.mul_(size).mul_(gain / math.sqrt(k)))


def _skew(module: MixtureOfExperts, wanted: float, g: torch.Generator) -> None:
    """Bias the choice until max / mean of the load is about `wanted`, by bisection on the size of the bias."""
    experts, width = module.router.weight.shape
    rows = torch.randn(2048, width, generator=g, device=g.device)
    scores = torch.sigmoid(rows @ module.router.weight.float().T)
    direction = torch.randn(experts, generator=g, device=g.device)

    def measure(size: float) -> float:
        chosen = (scores + size * direction).topk(module.top, -1).indices
        load = torch.bincount(chosen.flatten(), minlength=experts).float()
        return float(load.max() / load.mean())

    most = experts / module.top  # an expert that everybody visits
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if measure(middle) > min(wanted, 0.9 * most) else (middle, high)
    module.balance.copy_((high * direction / UNIT).round().long())


def share_weights(model: OneRec) -> OneRec:
    """A second module tree over the same tensors, so that one can be quantised and the other stay."""
    import copy

    memo = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)
