"""Style, and the MLP tower: layers of linear -> norm -> activation, each part a child with a fixed name.

    y = W_L a_{L-1} (+ b),   a_i = activation(norm(W_i a_{i-1} (+ b)))

The names are a contract: `tower.layers.0.linear`, `.norm`, `.activation`, and `tower.last` for the linear without norm
and activation. The order linear, norm, activation is that of a fused epilogue.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

from torch import Tensor, nn

from loka.nn.activation import ActivationKind, make_activation
from loka.nn.norm import NormKind, make_norm


@dataclass(frozen=True)
class Style:
    """Options that all models share.

    Args:
        norm: the norms between blocks.
        activation: of hidden layers.
        bias: whether linears and norms have biases (the final prediction layer always has one).
        tower_norm: the norms inside MLP towers, after each hidden linear.
        dropout: after each hidden layer.

    Example:
        >>> core = loka.models.build("wukong", "tiny", style=Style(norm="block", bias=False))
    """

    norm: NormKind = "layer"
    activation: ActivationKind = "relu"
    bias: bool = True
    tower_norm: NormKind = "none"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Validate the options early."""
        for name, value, kinds in (
            ("norm", self.norm, get_args(NormKind)),
            ("tower_norm", self.tower_norm, get_args(NormKind)),
            ("activation", self.activation, get_args(ActivationKind)),
        ):
            if value not in kinds:
                raise ValueError(f"Style.{name} is {value!r}; expected one of {', '.join(kinds)}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"Style.dropout is {self.dropout}; expected 0 <= dropout < 1")


class Layer(nn.Module):
    """linear -> norm -> activation (-> dropout, when the style has any)."""

    def __init__(self, width_in: int, width_out: int, style: Style) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out, bias=style.bias)
        self.norm = make_norm(style.tower_norm, width_out, bias=style.bias)
        self.activation = make_activation(style.activation)
        self.dropout = nn.Dropout(style.dropout) if style.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width_in] to [..., width_out]."""
        out: Tensor = self.dropout(self.activation(self.norm(self.linear(x))))
        return out


class MLP(nn.Module):
    """Hidden layers of the given widths, then one plain linear.

    Args:
        width_in: input features.
        hidden: widths of the hidden layers.
        width_out: width of the last linear; None if the last hidden layer is the output.
        style: norms, activation, biases.
        last_bias: bias of the last linear; None for the style's.

    Example:
        >>> MLP(64, [128, 128], 1)(torch.randn(4, 64)).shape
        torch.Size([4, 1])
    """

    def __init__(
        self,
        width_in: int,
        hidden: Sequence[int],
        width_out: int | None = None,
        *,
        style: Style | None = None,
        last_bias: bool | None = None,
    ) -> None:
        super().__init__()
        style = style or Style()
        widths = [width_in, *hidden]
        if width_out is None and not hidden:
            raise ValueError("MLP needs hidden widths or an output width, got neither")
        if min(widths) < 1 or (width_out is not None and width_out < 1):
            raise ValueError(f"MLP widths must be positive, got {widths} -> {width_out}")
        self.layers = nn.ModuleList(Layer(a, b, style) for a, b in pairwise(widths))
        bias = style.bias if last_bias is None else last_bias
        self.last = nn.Identity() if width_out is None else nn.Linear(widths[-1], width_out, bias=bias)
        self.width_out = widths[-1] if width_out is None else width_out

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width_in] to [..., width_out]."""
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.last(x)
        return out


def make_head(width_in: int, hidden: Sequence[int], labels: int, style: Style) -> MLP:
    """Return the prediction tower of a ranking model. Its last linear has a bias whatever the style says.

    Args:
        width_in: input features.
        hidden: widths of the hidden layers.
        labels: number of logits.
        style: of the model.

    Returns:
        The MLP.

    Example:
        >>> make_head(64, [32], 1, Style(bias=False)).last.bias is not None
        True
    """
    return MLP(width_in, hidden, labels, style=style, last_bias=True)
