"""Recipes of post-training quantisation: which module is quantised how, by its name and kind; the first rule that matches decides.

    onerec      experts                          weights 128x128, activations 1x128 (dynamic)
                attention and dense FFN linears  weights per output channel, activations per token (dynamic)
                heads, router, context           16 bits: cheap, or the last thing before a ranking
    onerec_rows the same with experts per channel and per token too: their GEMM is faster without a rescaling every 128 products, and coarser
    onerec_mixed experts' gate and up per channel and per token, since their input was just normalised, and down in blocks, since its input is a product:
                the first GEMM keeps its sums in the tensor cores, and what SwiGLU makes of them is quantised in groups of 128 before it is written
    rowwise     every linear per channel and per token, experts in blocks as in `onerec`
    blockwise   every linear and every expert 128x128 and 1x128
    none        nothing: the model as it is, in the same files

Patterns are `fnmatch` on the qualified name, so `*.router` matches the router of every block. Embeddings and norms are no sites: nothing here
multiplies by them. A recipe names no kernel; the modules take one from the registry.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from loka.dispatch import Operands
from loka.nn import GroupedLinear

ROWWISE = Operands.parse("e4m3:row", "e4m3:row")
BLOCKWISE = Operands.parse("e4m3:1x128", "e4m3:128x128")


@dataclass(frozen=True)
class Rule:
    """Sites whose name matches, all of them or only experts; `operands` None keeps them in 16 bits, for `reason`."""

    pattern: str
    operands: Operands | None
    reason: str
    experts_only: bool = False

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether this rule decides about the module."""
        return (not self.experts_only or isinstance(module, GroupedLinear)) and fnmatchcase(name, self.pattern)


@dataclass(frozen=True)
class PtqRecipe:
    """Rules in order of precedence; what none of them matches stays in 16 bits."""

    name: str
    rules: tuple[Rule, ...]

    def decide(self, name: str, module: nn.Module) -> Rule:
        """The first rule that matches."""
        for rule in self.rules:
            if rule.matches(name, module):
                return rule
        return Rule(name, None, "no rule of the recipe names it")


def _onerec(name: str, gate_up: Operands, down: Operands) -> PtqRecipe:
    """Experts' two projections scaled as given, the shared expert's likewise: they are one GEMM then."""
    return PtqRecipe(
        name,
        (
            Rule("heads.*", None, "head: the last product before the ranking"),
            Rule("*.heads.*", None, "head: the last product before the ranking"),
            Rule("*.router", None, "router: a wrong expert is no small error, and it is cheap"),
            Rule("context.*", None, "context processor: once per request"),
            Rule("*.down", down, f"experts: {down.b.block} weights, {down.a.block} activations", experts_only=True),
            Rule("*", gate_up, f"experts: {gate_up.b.block} weights, {gate_up.a.block} activations", experts_only=True),
            Rule("*.ffn.shared.down", down, "shared expert: as the routed ones"),
            Rule("*.ffn.shared.*", gate_up, "shared expert: as the routed ones"),
            Rule("*", ROWWISE, "linear: per-channel weights, per-token activations"),
        ),
    )


_EXPERTS = Rule("*", BLOCKWISE, "experts: 128x128 weights, 1x128 activations", experts_only=True)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        _onerec("onerec", BLOCKWISE, BLOCKWISE),
        _onerec("onerec_rows", ROWWISE, ROWWISE),
        _onerec("onerec_mixed", ROWWISE, BLOCKWISE),
        PtqRecipe("rowwise", (_EXPERTS, Rule("*", ROWWISE, "linear: per-channel weights, per-token activations"))),
        PtqRecipe("none", (Rule("*", None, "left in 16 bits"),)),
        PtqRecipe("blockwise", (_EXPERTS, Rule("*", BLOCKWISE, "linear: 128x128 weights, 1x128 activations"))),
    )
}


def ptq_recipe(name: str) -> PtqRecipe:
    """A recipe by name."""
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; post-training recipes are {', '.join(RECIPES)}")
    return RECIPES[name]
