"""The parts of a chain: each link with its modules, and the configuration that a chain is built from."""

from dataclasses import dataclass

from torch import nn

from loka.kernels.dropout import check_p
from loka.lowp.chain_function import ChainPrecision, Link
from loka.lowp.passing import draws_dropout
from loka.lowp.scaling import Scaling


@dataclass(frozen=True, eq=False)
class Part:
    """One link and its modules.

    Args:
        link: what it computes.
        linear: the nn.Linear.
        norm: the norm module, if there is one. A batch norm is folded into the linear, and `link.norm` is "none".
        passed: modules that only pass on their input while the chain is placed: norm, activation, dropout, identities.
        callers: modules whose forward calls the activation, or a dropout, as a function (`loka.lowp.passing`).
        called: whether one of them calls the activation.
        dropout: the nn.Dropout, whose mode and p apply at every call; or the module whose forward calls a functional
            dropout with the p of the link; or None.

    Example:
        >>> Part(Link("top.0", activation="relu"), model.top[0], passed=(model.top[1],))
    """

    link: Link
    linear: nn.Linear
    norm: nn.Module | None = None
    passed: tuple[nn.Module, ...] = ()
    callers: tuple[nn.Module, ...] = ()
    called: bool = False
    dropout: nn.Module | None = None

    def stops(self, p: float) -> int:
        """Return how many modules and functions are called between this linear and the next, with a dropout of p."""
        return len(self.passed) + self.called + (p > 0 and self.drops_in_call)

    @property
    def folds(self) -> bool:
        """Whether a batch norm is folded into the linear, for serving."""
        return isinstance(self.norm, nn.BatchNorm1d)

    @property
    def drops_in_call(self) -> bool:
        """Whether the dropout is a function that a forward calls, or a module that is used in several places."""
        return self.dropout is not None and all(module is not self.dropout for module in self.passed)

    def find_p(self) -> float:
        """Return the p of the dropout in the current mode; 0 if nothing is dropped."""
        for module in self.passed:
            self._check_unchanged(module)
            if module is not self.dropout and isinstance(module, nn.Dropout) and module.training and module.p > 0:
                raise ValueError(
                    f"a dropout after {self.link.linear} has p {module.p:g} and is in training mode, but the chain was "
                    "found without it, for serving or with p 0; hint: loka.revert(model), and a plan made for training"
                )
        if self.dropout is None or not self.dropout.training or not draws_dropout():
            return 0.0
        p = self.dropout.p if isinstance(self.dropout, nn.Dropout) else self.link.dropout
        return check_p(float(p or 0.0), f"the dropout after {self.link.linear}")

    def _check_unchanged(self, module: nn.Module) -> None:
        """Raise if an option of a norm or an activation was changed since the chain was placed."""
        link = self.link
        name: str
        now: float | str
        before: float | str
        if isinstance(module, nn.LeakyReLU):
            name, now, before = "negative_slope", module.negative_slope, link.slope
        elif isinstance(module, nn.GELU):
            name, now, before = "approximate", module.approximate, "tanh" if link.activation == "gelu_tanh" else "none"
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.eps is not None:
            name, now, before = "eps", module.eps, link.eps
        else:
            return
        if now != before:
            raise ValueError(
                f"the {type(module).__name__} after {link.linear} has {name} {now}, but the chain was found with "
                f"{before}; hint: loka.revert(model), and a new plan"
            )

    def as_last(self) -> "Part":
        """Return the part as the last of a chain.

        A layer or rms norm, and what follows it, then runs outside of the chain. So does a dropout directly after the
        linear, because the library's GEMM cannot draw it.
        """
        alone = self.link.plain and self.dropout is not None
        return Part(Link(self.link.linear), self.linear) if alone or self.link.norm in ("layer", "rms") else self


@dataclass(frozen=True, eq=False)
class ChainConfig:
    """The arguments of a `Chain`, validated."""

    name: str
    parts: tuple[Part, ...]
    precision: ChainPrecision
    bounded_input: bool
    scaling: Scaling

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError(f"{self.name}: a chain needs at least one linear")
        width: int | None = None
        for index, part in enumerate(self.parts):
            linear, link = part.linear, part.link
            if not isinstance(linear, nn.Linear):
                raise ValueError(f"{self.name}: {link.linear} is a {type(linear).__name__}, expected nn.Linear")
            if width is not None and linear.in_features != width:
                raise ValueError(
                    f"{self.name}: {link.linear} takes {linear.in_features} features, the layer before it gives {width}"
                )
            if link.norm in ("layer", "rms") and index == len(self.parts) - 1:
                raise ValueError(
                    f"{self.name}: {link.linear} is the last linear; its {link.norm} norm must be outside of the chain"
                )
            width = linear.out_features
