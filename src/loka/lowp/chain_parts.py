"""The parts of a chain: each link with the modules it consists of, and the record that all of a chain is made from."""

from dataclasses import dataclass

from torch import nn

from loka.kernels.dropout import check_p
from loka.lowp.chain_function import ChainPrecision, Link
from loka.lowp.passing import draws_dropout
from loka.lowp.scaling import Scaling


@dataclass(frozen=True, eq=False)
class Part:
    """One link and the modules it consists of.

    Args:
        link: what it computes.
        linear: the nn.Linear.
        norm: the module whose weight, bias and eps the norm has; None without a norm. A batch norm is folded into the linear, and the link has none.
        passed: modules that hand on their input from now on: the norm, the activation, the dropout, identities.
        callers: modules whose forward calls the activation, or a dropout, as a function (`loka.lowp.passing`).
        called: whether one of them calls the activation.
        dropout: the nn.Dropout, whose mode and p say at every call what is drawn; or the module whose forward calls one as a function, with the p of the link. None: there is none.
    """

    link: Link
    linear: nn.Linear
    norm: nn.Module | None = None
    passed: tuple[nn.Module, ...] = ()
    callers: tuple[nn.Module, ...] = ()
    called: bool = False
    dropout: nn.Module | None = None

    def stops(self, p: float) -> int:
        """What is called between this linear and the next, and hands on what it is given, where dropout drops a share of p."""
        return len(self.passed) + self.called + (p > 0 and self.drops_in_call)

    @property
    def folds(self) -> bool:
        """Whether a batch norm is folded into the linear, for serving."""
        return isinstance(self.norm, nn.BatchNorm1d)

    @property
    def drops_in_call(self) -> bool:
        """Whether the dropout is a function that a forward calls, or a module in many places."""
        return self.dropout is not None and all(module is not self.dropout for module in self.passed)

    def find_p(self) -> float:
        """The share that is dropped now."""
        for module in self.passed:
            if module is not self.dropout and isinstance(module, nn.Dropout) and module.training and module.p > 0:
                raise ValueError(
                    f"a dropout behind {self.link.linear} has p {module.p:g} and is in training mode, and the chain was found without it, for serving or with p 0; "
                    "hint: loka.revert(model), and a plan made for training"
                )
        if self.dropout is None or not self.dropout.training or not draws_dropout():
            return 0.0
        p = self.dropout.p if isinstance(self.dropout, nn.Dropout) else self.link.dropout
        return check_p(float(p or 0.0), f"the dropout behind {self.link.linear}")

    def as_last(self) -> "Part":
        """The same where it ends a chain: a norm over the whole row runs as a module of its own, and what follows it; so does a dropout with nothing in front of it, as the library's GEMM draws none."""
        alone = self.link.plain and self.dropout is not None
        return Part(Link(self.link.linear), self.linear) if alone or self.link.norm in ("layer", "rms") else self


@dataclass(frozen=True, eq=False)
class ChainConfig:
    """What a chain is made of, checked.

    Args:
        name: of the unit, for records and messages.
        parts: first to last.
        precision: how it computes.
        bounded_input: x comes out of a BlockNorm: it has a static scale.
        scaling: how scales are remembered between steps.
    """

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
                raise ValueError(f"{self.name}: {link.linear} takes {linear.in_features} features, the layer before it gives {width}")  # fmt: skip
            if link.norm in ("layer", "rms") and index == len(self.parts) - 1:
                raise ValueError(
                    f"{self.name}: {link.linear} is the last linear; its {link.norm} norm stays outside of the chain"
                )
            width = linear.out_features
