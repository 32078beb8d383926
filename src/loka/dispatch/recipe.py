"""The table of recipes, for training, post-training quantization and the generative engine.

A recipe says what each of a linear's three GEMMs quantizes its operands to:

    fprop   y  = x  W^T      a = x  [M, K]     b = W   [N, K]
    dgrad   dx = dy W        a = dy [M, N]     b = W^T [K, N]
    wgrad   dW = dy^T x      a = dy^T [N, M]   b = x^T [K, M]

A GEMM whose entry is None stays in high precision. Names and scale granularities follow torchao where it has the
recipe. The rest differs from torchao 0.17 to 0.19:

    gradients      torchao casts them to E5M2 under tensorwise and to E4M3 under both rowwise recipes; here always E4M3
                   (LinearOptions(gradients=...) changes that)
    scales         torchao rounds those of both rowwise recipes down to powers of two; here they are amax / 448
    accumulation   torchao's is fast in the forward GEMM only; here in dgrad too. Never in wgrad: Hopper keeps about 14
                   bits of a running sum, and the sum over the batch is long and, behind a ReLU, of one sign, so the
                   small gradients of the many easy examples are cut off. A DLRM at 8192 rows lost 0.4 % of its log loss
                   to that alone (NOTES.md, 2026-11-16)

So a recipe's errors and times here are not those of the torchao recipe of the same name. `export_torchao` writes a
torchao configuration that is equivalent to ours.

Serving only runs forward products, of linears and grouped linears (experts), so there a recipe means its fprop. A
mixture assigns recipes to sites by name and kind; the first rule that matches decides:

    onerec        experts blockwise; attention and dense FFN rowwise; heads, router and context processor in 16-bit,
                  since they are cheap or come last before the ranking
    onerec_rows   the same with experts rowwise: their GEMM is faster without rescaling every 128 products, but coarser
    onerec_mixed  experts' gate and up rowwise, since their input was just normalized; down blockwise, since its input
                  is a product
    none          nothing is quantized

Three more recipes are not FP8 on Hopper. No kernel supports them yet, so they run emulated and are labelled so: their
errors are those of the format, their times mean nothing. Probe evaluates them on request (`Probe(model,
recipes=("mxfp8", "nvfp4", "int8"))`), to show what would be safe on other GPUs:

    mxfp8   E4M3 with one power-of-two scale per 32 elements; Blackwell
    nvfp4   E2M1 with one E4M3 scale per 16 elements and one float32 scale per tensor; gradients are rounded
            stochastically; Blackwell
    int8    one float32 scale per row; GPUs before Hopper and after
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from loka.kernels.scaled_mm import GemmWay
from loka.records import Candidate, Choice, Gemm


@dataclass(frozen=True)
class Recipe:
    """A named way to run a linear in low precision, forward and backward. None keeps a GEMM in high precision."""

    name: str
    fprop: GemmWay | None
    dgrad: GemmWay | None
    wgrad: GemmWay | None
    usual: bool = True  # FP8 that Hopper supports: scored and timed unless other recipes are named

    def operands(self, gemm: Gemm) -> GemmWay | None:
        """Return what one GEMM runs, with no backend chosen yet; None for high precision."""
        chosen: GemmWay | None = getattr(self, gemm)
        return chosen


_TENSOR = GemmWay.parse("e4m3:tensor@e4m3:tensor", fast_accum=True)
_ROW = GemmWay.parse("e4m3:row@e4m3:row", fast_accum=True)
_TENSOR_EXACT = replace(_TENSOR, fast_accum=False)
_ROW_EXACT = replace(_ROW, fast_accum=False)
_ROW_BY_TENSOR = GemmWay.parse("e4m3:row@e4m3:tensor", fast_accum=True)
_BLOCK = GemmWay.parse("e4m3:1x128@e4m3:128x128")
_BLOCK_BY_BLOCK = GemmWay.parse("e4m3:1x128@e4m3:1x128")
_MX = GemmWay.parse("e4m3:1x32:e8m0@e4m3:1x32:e8m0")
_NV = GemmWay.parse("e2m1:1x16:e4m3@e2m1:1x16:e4m3")
_NV_GRADIENT = GemmWay.parse("e2m1:1x16:e4m3:stochastic@e2m1:1x16:e4m3")
_INT = GemmWay.parse("int8:row@int8:row")

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("tensorwise", _TENSOR, _TENSOR, _TENSOR_EXACT),
        Recipe("rowwise", _ROW, _ROW, _ROW_EXACT),
        Recipe("rowwise_with_gw_hp", _ROW, _ROW_BY_TENSOR, None),
        Recipe("blockwise", _BLOCK, _BLOCK, _BLOCK_BY_BLOCK),
        Recipe("mxfp8", _MX, _MX, _MX, usual=False),
        Recipe("nvfp4", _NV, _NV_GRADIENT, _NV_GRADIENT, usual=False),
        Recipe("int8", _INT, _INT, _INT, usual=False),
    )
}
USUAL: tuple[str, ...] = tuple(name for name, recipe in RECIPES.items() if recipe.usual)


def recipe_named(name: str) -> Recipe:
    """Look up a recipe by name.

    Args:
        name: a key of RECIPES, e.g. "rowwise".

    Returns:
        The recipe: what each GEMM quantizes its operands to.

    Raises:
        ValueError: no such recipe; the message lists them.

    Example:
        >>> str(recipe_named("rowwise").fprop.a)
        'e4m3:row'
    """
    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}; recipes are {', '.join(RECIPES)}")
    return RECIPES[name]


def way_of(written: Choice | Candidate) -> GemmWay | None:
    """Parse the `GemmWay` that a plan's choice or a report's candidate spells in strings.

    Args:
        written: a choice, or a candidate (whose recipe decides about fast accumulation).

    Returns:
        The operands' formats and the backend; None for high precision.

    Example:
        >>> str(way_of(plan.sites[0].choices[0]))
        'e4m3:row@e4m3:row/torch'
    """
    if written.a is None or written.b is None:
        return None
    if isinstance(written, Choice):
        fast = written.fast_accum
    else:
        recipe = RECIPES.get(written.recipe)
        way = recipe.operands(written.gemm) if recipe else None
        fast = way is not None and way.fast_accum
    return GemmWay.parse(f"{written.a}@{written.b}/{written.backend}", fast_accum=fast)


def choice_of(gemm: Gemm, way: GemmWay | None, reason: str, **evidence: Any) -> Choice:
    """Make a plan's choice from a `GemmWay` (None: high precision). `evidence` holds further fields of `Choice`."""
    if way is None:
        return Choice(gemm=gemm, backend="high", a=None, b=None, reason=reason, **evidence)
    a, b = str(way.a), str(way.b)
    return Choice(gemm=gemm, backend=way.backend, a=a, b=b, fast_accum=way.fast_accum, reason=reason, **evidence)


@dataclass(frozen=True)
class Rule:
    """Assigns a recipe to the sites whose qualified names match a pattern.

    Args:
        pattern: an `fnmatch` pattern.
        recipe: a key of RECIPES; None keeps the sites in 16-bit precision.
        reason: written to the record.
        experts_only: whether the rule applies to grouped linears only.

    Example:
        >>> Rule("head.*", None, "the last product")
    """

    pattern: str
    recipe: str | None
    reason: str
    experts_only: bool = False

    def __post_init__(self) -> None:
        if self.recipe is not None:
            recipe_named(self.recipe)


@dataclass(frozen=True)
class Mixture:
    """Assigns recipes to sites by rules. Sites that no rule matches stay in 16-bit precision.

    Args:
        name: the name used in records.
        rules: the first that matches decides.

    Example:
        >>> Mixture("mine", (Rule("head.*", None, "the prediction"), Rule("*", "rowwise", "the rest")))
    """

    name: str
    rules: tuple[Rule, ...]

    def decide(self, site: str, *, experts: bool) -> Rule:
        """Return the first rule that matches a site.

        Args:
            site: its qualified name.
            experts: whether it is a grouped linear.
        """
        for rule in self.rules:
            if (experts or not rule.experts_only) and fnmatchcase(site, rule.pattern):
                return rule
        return Rule(site, None, "no rule of the recipe names it")


def _onerec(name: str, gate_up: str, down: str) -> Mixture:
    """Make a OneRec mixture. The shared expert uses the routed experts' recipes, so that both run as one GEMM."""
    return Mixture(
        name,
        (
            Rule("heads.*", None, "head: the last product before the ranking"),
            Rule("*.heads.*", None, "head: the last product before the ranking"),
            Rule("*.router", None, "router: a wrong expert is no small error, and it is cheap"),
            Rule("context.*", None, "context processor: once per request"),
            Rule("*.down", down, f"experts: {down}", experts_only=True),
            Rule("*", gate_up, f"experts: {gate_up}", experts_only=True),
            Rule("*.ffn.shared.down", down, "shared expert: as the routed ones"),
            Rule("*.ffn.shared.*", gate_up, "shared expert: as the routed ones"),
            Rule("*", "rowwise", "linear: rowwise"),
        ),
    )


MIXTURES: dict[str, Mixture] = {
    mixture.name: mixture
    for mixture in (
        _onerec("onerec", "blockwise", "blockwise"),
        _onerec("onerec_rows", "rowwise", "rowwise"),
        _onerec("onerec_mixed", "rowwise", "blockwise"),
        Mixture("none", (Rule("*", None, "left in 16-bit precision"),)),
    )
}


def mixture_named(name: str) -> Mixture:
    """Look up a mixture by name. The name of a recipe gives a mixture that applies it to every site.

    Args:
        name: the name of a recipe or a mixture.

    Returns:
        The mixture.

    Raises:
        ValueError: no such name.

    Example:
        >>> mixture_named("onerec").decide("blocks.0.ffn.up", experts=True).recipe
        'blockwise'
    """
    if name in MIXTURES:
        return MIXTURES[name]
    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}; recipes are {', '.join((*RECIPES, *MIXTURES))}")
    return Mixture(name, (Rule("*", name, f"{name} everywhere"),))
