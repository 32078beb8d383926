"""Recipes: what each of a linear's three GEMMs quantises its operands to.

    fprop   y  = x  W^T      a = x  [M, K]     b = W   [N, K]
    dgrad   dx = dy W        a = dy [M, N]     b = W^T [K, N]
    wgrad   dW = dy^T x      a = dy^T [N, M]   b = x^T [K, M]

A GEMM whose pair is None stays in high precision. The names are torchao's where torchao has one, and so are the granularities of the scales. The rest is
not the same, as of torchao 0.17 to 0.19:

    gradients      torchao casts them to E5M2 under tensorwise, E4M3 under both rowwise recipes; here E4M3 (LinearOptions(gradients=...) changes that)
    scales         torchao rounds those of both rowwise recipes down to powers of two; here they are amax / 448
    accumulation   torchao's is fast in the forward GEMM only; here in every FP8 GEMM of these three

So errors and times of a recipe here are not those of torchao's under the same name. `export_torchao` writes the configuration of torchao that is ours.
"""

from dataclasses import dataclass

from loka.formats import Spec
from loka.records import Gemm


@dataclass(frozen=True)
class Operands:
    """Specs of the two K-major operands of one GEMM."""

    a: Spec
    b: Spec
    fast_accum: bool = False

    @classmethod
    def parse(cls, a: str, b: str, *, fast_accum: bool = False) -> "Operands":
        """From canonical strings."""
        return cls(Spec.parse(a), Spec.parse(b), fast_accum)


@dataclass(frozen=True)
class Recipe:
    """One named way to run a linear in low precision, forward and backward."""

    name: str
    fprop: Operands | None
    dgrad: Operands | None
    wgrad: Operands | None

    def operands(self, gemm: Gemm) -> Operands | None:
        """The operands of one GEMM; None for high precision."""
        chosen: Operands | None = getattr(self, gemm)
        return chosen


_TENSOR = Operands.parse("e4m3:tensor", "e4m3:tensor", fast_accum=True)
_ROW = Operands.parse("e4m3:row", "e4m3:row", fast_accum=True)
_ROW_BY_TENSOR = Operands.parse("e4m3:row", "e4m3:tensor", fast_accum=True)
_BLOCK = Operands.parse("e4m3:1x128", "e4m3:128x128")
_BLOCK_BY_BLOCK = Operands.parse("e4m3:1x128", "e4m3:1x128")

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("tensorwise", _TENSOR, _TENSOR, _TENSOR),
        Recipe("rowwise", _ROW, _ROW, _ROW),
        Recipe("rowwise_with_gw_hp", _ROW, _ROW_BY_TENSOR, None),
        Recipe("blockwise", _BLOCK, _BLOCK, _BLOCK_BY_BLOCK),
    )
}


def recipe_named(name: str) -> Recipe:
    """A recipe by name."""
    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}; recipes are {', '.join(RECIPES)}")
    return RECIPES[name]
