"""What may follow a linear inside a chain: one norm, one activation and one dropout that the kernels know, in an order that they can compute."""

from dataclasses import dataclass, field

import torch
from torch import nn

from loka.kernels.activation import LEAK
from loka.lowp.folding import can_fold
from loka.nn import BLOCK, EPS, BlockNorm, HardSwish, norm
from loka.records.unit import LinkPlan

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Hardswish: "hard_swish",
    HardSwish: "hard_swish",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.LeakyReLU: "leaky_relu",
}


@dataclass
class Following:
    """What was found behind a linear so far."""

    site: str
    linear: nn.Linear
    norm: str = "none"
    norm_site: str | None = None
    activation: str = "none"
    eps: float = 1e-5
    slope: float = 0.01
    passed: list[str] = field(default_factory=list)
    callers: list[str] = field(default_factory=list)
    called: bool = False
    dropout: float | None = None
    dropout_site: str | None = None

    def take(self, site: str, module: nn.Module, *, serving: bool, caller: str | None) -> str | None:
        """A module; one that is used more than once stays what it is, and its `caller` knows which call is the chain's."""
        if isinstance(module, nn.Identity):
            pass
        elif isinstance(module, nn.Dropout) and type(module).forward is nn.Dropout.forward:
            if why := self.take_dropout(module.p, site, site, caller=caller, serving=serving):
                return why
        elif (kind := norm_kind(module, self.linear.out_features)) is not None:
            if self.norm != "none" or self.activation != "none":
                return f"{site} normalises after {'another norm' if self.norm != 'none' else 'an activation'}"
            if why := self._forget_dropout(f"{site} normalises after a dropout", serving=serving):
                return why
            self.norm, self.norm_site = kind, site
            self.eps = norm_eps(module)
        elif (activation := activation_of(module)) is not None and self.activation == "none":
            slope = float(getattr(module, "negative_slope", LEAK))
            if caller is not None:
                return self.take_call(activation, slope, site, caller, serving=serving)
            if why := self._take_activation(activation, slope, site, serving=serving):
                return why
        else:
            return f"{site} ({type(module).__name__}) stands behind it"
        if caller is None:
            self.passed.append(site)
        return None

    def take_dropout(self, p: float, where: str, site: str, *, caller: str | None, serving: bool) -> str | None:
        """A dropout: a module, or a function that the forward of `caller` calls."""
        if p >= 1 and not serving:
            return f"{where} is a dropout with p {p:g}, which leaves nothing"
        if why := self._forget_dropout(f"{where} is a second dropout", serving=serving):
            return why
        self.dropout, self.dropout_site = p, site
        if caller is not None:
            self._add_caller(caller)
        return None

    def _forget_dropout(self, why: str, *, serving: bool) -> str | None:
        """Something stands behind a dropout that cannot be drawn after it: `why`, where it has an effect. One without is not drawn, and training with it is refused (`Part.find_p`)."""
        if self.dropout and not serving:
            return why
        self.dropout = self.dropout_site = None
        return None

    def take_call(self, activation: str, slope: float, where: str, caller: str, *, serving: bool) -> str | None:
        """An activation that is no module of its own: a function that the forward of `caller` calls, or a module it uses in many places."""
        if why := self._take_activation(activation, slope, where, serving=serving):
            return why
        self.called = True
        self._add_caller(caller)
        return None

    def _take_activation(self, activation: str, slope: float, where: str, *, serving: bool) -> str | None:
        moves = activation in ("relu", "leaky_relu")  # f(x kept / (1 - p)) = f(x) kept / (1 - p)
        why = None if moves else self._forget_dropout(f"{where}: {activation} stands behind a dropout", serving=serving)
        if why is not None:
            return why
        if self.norm in ("layer", "rms") and slope != LEAK:
            return f"{where}: behind a norm the kernels know a leaky ReLU of slope {LEAK:g}, not {slope:g}"
        self.activation, self.slope = activation, slope
        return None

    def _add_caller(self, caller: str) -> None:
        if caller not in self.callers:
            self.callers.append(caller)

    def link(self) -> LinkPlan:
        """The linear with what was found behind it."""
        return LinkPlan(
            linear=self.site, k=self.linear.in_features, n=self.linear.out_features, norm=self.norm,  # type: ignore[arg-type]
            norm_site=self.norm_site, activation=self.activation, passed=list(self.passed), callers=list(self.callers), called=self.called,
            eps=self.eps, slope=self.slope, dropout=self.dropout, dropout_site=self.dropout_site,
        )  # fmt: skip


def activation_of(module: nn.Module) -> str | None:
    """The kernels' name of an activation module; None where it is none that they know."""
    if isinstance(module, nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return ACTIVATIONS.get(type(module))


def make_activation(name: str, slope: float = LEAK) -> nn.Module:
    """A module of torch that `activation_of` gives this name."""
    if name in ("gelu", "gelu_tanh"):
        return nn.GELU("tanh" if name == "gelu_tanh" else "none")
    kind = next(kind for kind, known in ACTIVATIONS.items() if known == name)
    return nn.LeakyReLU(slope) if kind is nn.LeakyReLU else kind()


def norm_eps(module: nn.Module) -> float:
    """What a norm adds before it divides; RMSNorm's default is the smallest difference of float32."""
    return float(getattr(module, "eps", None) or torch.finfo(torch.float32).eps)


def norm_kind(module: nn.Module, width: int) -> str | None:
    """The kernels' name of a norm over the last dimension; None for other modules and norms they do not know."""
    if isinstance(module, BlockNorm):
        fits = module.block == min(BLOCK, module.width) and module.eps == EPS
        return "block" if fits else None
    if can_fold(module, width):
        return "batch"
    shape = getattr(module, "normalized_shape", None)
    if shape is None or tuple(shape) != (width,):
        return None
    if isinstance(module, nn.LayerNorm) and type(module).forward in _LAYER_FORWARDS:
        return "layer"
    return "rms" if isinstance(module, nn.RMSNorm) and type(module).forward in _RMS_FORWARDS else None


_LAYER_FORWARDS = {nn.LayerNorm.forward, norm.LayerNorm.forward}
_RMS_FORWARDS = {nn.RMSNorm.forward, norm.RMSNorm.forward}
