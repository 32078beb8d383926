"""What may follow a linear in a chain: one norm, activation and dropout, in an order that the kernels support."""

from dataclasses import dataclass, field

import torch
from torch import nn

from loka.kernels.activation import LEAK
from loka.lowp.folding import can_fold
from loka.nn import BLOCK, EPS, BlockNorm, HardSwish, norm
from loka.nn.replacing import runs_as
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
    """What has been found after a linear so far. The `take` methods return why something cannot be added, or None."""

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
        """Add a module. For one that is used more than once, `caller` is the module whose forward calls it here."""
        if runs_as(module, nn.Identity):
            pass
        elif runs_as(module, nn.Dropout):
            assert isinstance(module, nn.Dropout)
            if why := self.take_dropout(module.p, site, site, caller=caller, serving=serving):
                return why
        elif (kind := norm_kind(module, self.linear.out_features)) is not None:
            if self.norm != "none" or self.activation != "none":
                return f"{site} normalizes after {'another norm' if self.norm != 'none' else 'an activation'}"
            if why := self._forget_dropout(f"{site} normalizes after a dropout", serving=serving):
                return why
            self.norm, self.norm_site = kind, site
            self.eps = norm_eps(module)
        elif (activation := activation_of(module)) is not None and self.activation == "none":
            slope = float(getattr(module, "negative_slope", LEAK))
            if caller is not None and activation == "hard_swish":  # its forward calls F.hardswish
                return f"{site} is used more than once, and compiled code does not show its calls"
            if caller is not None:
                return self.take_call(activation, slope, site, caller, serving=serving)
            if why := self._take_activation(activation, slope, site, serving=serving):
                return why
        else:
            return f"{site} ({type(module).__name__}) follows it"
        if caller is None:
            self.passed.append(site)
        return None

    def take_dropout(self, p: float, where: str, site: str, *, caller: str | None, serving: bool) -> str | None:
        """Add a dropout: a module, or a function that the forward of `caller` calls."""
        if p >= 1 and not serving:
            return f"{where} is a dropout with p {p:g}, which zeroes everything"
        if why := self._forget_dropout(f"{where} is a second dropout", serving=serving):
            return why
        self.dropout, self.dropout_site = p, site
        if caller is not None:
            self._add_caller(caller)
        return None

    def _forget_dropout(self, why: str, *, serving: bool) -> str | None:
        """Drop a dropout that something follows which does not commute with it; return `why` if it has an effect.

        A dropped one has no effect now; training with it later raises (`Part.find_p`).
        """
        if self.dropout and not serving:
            return why
        self.dropout = self.dropout_site = None
        return None

    def take_call(self, activation: str, slope: float, where: str, caller: str, *, serving: bool) -> str | None:
        """Add an activation called by the forward of `caller`: a function, or a module with several uses."""
        if why := self._take_activation(activation, slope, where, serving=serving):
            return why
        self.called = True
        self._add_caller(caller)
        return None

    def _take_activation(self, activation: str, slope: float, where: str, *, serving: bool) -> str | None:
        commutes = activation in ("relu", "leaky_relu")  # f(x kept / (1 - p)) = f(x) kept / (1 - p)
        why = None if commutes else self._forget_dropout(f"{where}: {activation} follows a dropout", serving=serving)
        if why is not None:
            return why
        if self.norm in ("layer", "rms") and slope != LEAK:
            return f"{where}: after a norm the kernels support a leaky ReLU of slope {LEAK:g}, not {slope:g}"
        self.activation, self.slope = activation, slope
        return None

    def _add_caller(self, caller: str) -> None:
        if caller not in self.callers:
            self.callers.append(caller)

    def link(self) -> LinkPlan:
        """Return the linear with what was found after it."""
        return LinkPlan(
            linear=self.site, k=self.linear.in_features, n=self.linear.out_features, norm=self.norm,  # type: ignore[arg-type]
            norm_site=self.norm_site, activation=self.activation, passed=list(self.passed), callers=list(self.callers), called=self.called,
            eps=self.eps, slope=self.slope, dropout=self.dropout, dropout_site=self.dropout_site,
        )  # fmt: skip


def activation_of(module: nn.Module) -> str | None:
    """Return the kernels' name of an activation module; None if they do not support it."""
    if runs_as(module, nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return next((name for kind, name in ACTIVATIONS.items() if runs_as(module, kind)), None)


def make_activation(name: str, slope: float = LEAK) -> nn.Module:
    """Return a module for which `activation_of` returns this name."""
    if name in ("gelu", "gelu_tanh"):
        return nn.GELU("tanh" if name == "gelu_tanh" else "none")
    kind = next(kind for kind, known in ACTIVATIONS.items() if known == name)
    return nn.LeakyReLU(slope) if kind is nn.LeakyReLU else kind()


def norm_eps(module: nn.Module) -> float:
    """Return the eps of a norm; RMSNorm's default, None, means the machine epsilon of float32."""
    return float(getattr(module, "eps", None) or torch.finfo(torch.float32).eps)


def norm_kind(module: nn.Module, width: int) -> str | None:
    """Return the kernels' name of a norm over the last dimension; None for anything they do not support."""
    if runs_as(module, BlockNorm):
        assert isinstance(module, BlockNorm)
        fits = module.block == min(BLOCK, module.width) and module.eps == EPS
        return "block" if fits else None
    if can_fold(module, width):
        return "batch"
    shape = getattr(module, "normalized_shape", None)
    if shape is None or tuple(shape) != (width,):
        return None
    if runs_as(module, nn.LayerNorm, norm.LayerNorm):
        return "layer"
    return "rms" if runs_as(module, nn.RMSNorm, norm.RMSNorm) else None
