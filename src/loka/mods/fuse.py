"""fuse: run chains of linears in FP8 from layer to layer, without measuring whether that is safe or fast.

    loka.mods.apply(model, ["no_bias", "block_norm", "hard_swish", loka.mods.Fuse()], example=batch)

It places every chain that `loka.units.discover` finds, with the same modules and scales as `loka.convert` with a plan
that names them all (`loka.placing.plan_everything`). Nothing is measured or compared; use a plan made from evidence for
that. With `linears=N`, linears outside of chains with at least N inputs and outputs run in FP8 too. If a chain is the
tower of a Wukong layer, the layer's interactions are fused with it.

`fuse` must come last: a later mod that swaps modules of a chain would not change what the chain runs.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from loka.mods.editor import Editor
from loka.mods.journal import PlacedUnit
from loka.records.mods import ModClass
from loka.records.prose import spell_unit
from loka.records.unit import GradientScales
from loka.units import discover, place
from loka.units.discovery import NARROW


@dataclass(frozen=True)
class Fuse:
    """Run every chain in FP8.

    Args:
        precision: only "fp8" is supported.
        gradient: scales of the gradients. None chooses what the chain's norms allow: "tensor" behind block norms and
            for a linear with nothing behind it, "delayed" otherwise.
        linears: linears outside of chains are converted too if they are at least this wide; 0 converts none.
        narrow: the width of the narrowest linear that a chain may contain.

    Example:
        >>> loka.mods.apply(model, [Fuse()], example=batch)
    """

    precision: Literal["fp8"] = "fp8"
    gradient: GradientScales | None = None
    linears: int = 0
    narrow: int = NARROW
    name: ClassVar[str] = "fuse"
    separable: ClassVar[bool] = False  # fused modules and the chain that replaces them can only be undone together
    effect: ClassVar[ModClass] = "rounding"

    def __post_init__(self) -> None:
        if self.precision != "fp8":
            raise ValueError(f"fuse(precision={self.precision!r}): expected 'fp8'")
        if self.gradient is not None and self.gradient not in get_args(GradientScales):
            raise ValueError(
                f"fuse(gradient={self.gradient!r}): expected {', '.join(get_args(GradientScales))}, or None"
            )
        if self.narrow < 1:
            raise ValueError(f"fuse(narrow={self.narrow}): expected a width of at least 1")
        if self.linears < 0:
            raise ValueError(f"fuse(linears={self.linears}): expected a width, or 0 for none")

    def rewrite(self, editor: Editor) -> None:
        """Find the chains, then place them."""
        found = discover(
            editor.model,
            editor.example,
            module_filter_fn=editor.keeps,
            linears=self.linears,
            gradient=self.gradient,
            narrow=self.narrow,
        )
        for unit in found.units:
            try:
                chain = place(editor.model, unit)
            except ValueError as error:
                editor.leave(unit.name, str(error))
                continue
            editor.log(PlacedUnit(tuple(unit.linears), unit.around))
            editor.change(unit.name, f"{spell_unit(unit)}, {chain.precision}", "rounding")
        for name, why in found.alone.items():
            editor.leave(name, why)
