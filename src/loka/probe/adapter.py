"""Which modules are sites, and how their operands map to one GEMM out = a b^T. Rows of a come from the module's input.

    linear      nn.Linear (and what replaces it)       a = x [..., K]             b = W [N, K]
                transformers' Conv1D                   a = x [..., K]             b = W [K, N], transposed
    grouped     loka.nn.GroupedLinear                  a = x [rows, K]            b = W of the row's expert
    mixed       loka.nn.FeatureMix                     a = columns of x [B, K, d] b = W [N, K]
    batched     FactorizationMachine, DotInteraction,  a = rows of the first      b = the second operand of one example,
                DotProductAttention (Q K^T)                operand                    an activation
    lookup      nn.Embedding, nn.EmbeddingBag          no GEMM: statistics of table, output (as "x") and gradient

To observe other modules, call `register(MyModule, Adapter(...))` before creating a Probe. Subclasses are included.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

Kind = Literal["linear", "grouped", "mixed", "batched", "lookup"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Operands = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[Tensor, Tensor | None]]


def first_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the first argument, positional or keyword, and None: the other operand is the module's weight."""
    return args[0] if args else next(iter(kwargs.values())), None


def two_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the first two arguments: both operands are activations."""
    both = [*args, *kwargs.values()]
    return both[0], both[1]


def input_twice(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the first argument twice: it is multiplied by itself."""
    x, _ = first_input(module, args, kwargs)
    return x, x


def own_weight(module: nn.Module) -> Tensor | None:
    """Return `module.weight` if it is a tensor."""
    weight = module.weight
    return weight if isinstance(weight, Tensor) else None


@dataclass(frozen=True)
class Adapter:
    """Tells Probe how to read the operands of one class of modules.

    Args:
        kind: the kind of site, see `loka.probe.adapter`.
        operands: (module, args, kwargs) -> the input, and the second operand [..., N, K] if that is not a weight, else
            None.
        weight: module -> the weight [N, K] or [experts, N, K]; None if there is no weight.
        channel: the contracted dimension of the input, and the column dimension of the output.
        gradient: True if the output is the product itself, so that its gradient is an operand of dgrad and wgrad.

    Example:
        >>> register(MyLinear, Adapter("linear"))
    """

    kind: Kind
    operands: Operands = first_input
    weight: Callable[[nn.Module], Tensor | None] | None = own_weight
    channel: Literal[-1, -2] = -1
    gradient: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.channel not in (-1, -2):
            raise ValueError(f"channel={self.channel}: expected -1 (the last dimension) or -2")


_REGISTERED: dict[type[nn.Module], Adapter] = {}


def register(module_class: type[nn.Module], adapter: Adapter) -> None:
    """Make modules of a class sites of every Probe created from now on.

    Args:
        module_class: a subclass of nn.Module.
        adapter: how to read the operands of its GEMM.

    Example:
        >>> register(MyLinear, Adapter("linear"))
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise ValueError(f"register takes a class of modules, got {module_class!r}")
    _REGISTERED[module_class] = adapter


def _built_in() -> dict[type[nn.Module], Adapter]:
    from loka.nn import DotInteraction, DotProductAttention, FactorizationMachine, FeatureMix, GroupedLinear

    return {
        nn.Linear: Adapter("linear"),
        GroupedLinear: Adapter("grouped"),
        FeatureMix: Adapter("mixed", channel=-2),
        FactorizationMachine: Adapter("batched", two_inputs, None),
        DotInteraction: Adapter("batched", input_twice, None, gradient=False),
        DotProductAttention: Adapter("batched", two_inputs, None, gradient=False),
        nn.Embedding: Adapter("lookup"),
        nn.EmbeddingBag: Adapter("lookup"),
    }


def find_adapter(module: nn.Module) -> Adapter | None:
    """Return the adapter of the most specific registered class, or None if the module is not a site."""
    known = _built_in() | _REGISTERED
    found = next((known[base] for base in type(module).__mro__ if base in known), None)
    return _TRANSPOSED if found is None and _is_transposed_linear(module) else found


def _is_transposed_linear(module: nn.Module) -> bool:
    """Detect GPT-2's Conv1D by its structure, without importing transformers: weight [K, N], bias [N], and `nf` = N."""
    weight, bias, nf = (getattr(module, name, None) for name in ("weight", "bias", "nf"))
    if type(module).__name__ != "Conv1D" or not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        return False
    return nf == weight.shape[1] and isinstance(bias, Tensor) and bias.shape == weight.shape[1:]


def _transposed_weight(module: nn.Module) -> Tensor | None:
    weight = own_weight(module)
    return None if weight is None else weight.T


_TRANSPOSED = Adapter("linear", weight=_transposed_weight)
