"""fuse: chains of linears run in FP8 from layer to layer, chosen without evidence.

    loka.mods.apply(model, ["no_bias", "block_norm", "hard_swish", loka.mods.Fuse()], example=batch)

It places every chain that `loka.units.discover` finds, which is what `loka.convert` does with a plan that names them all (`loka.placing.plan_everything`): the same modules with the same
scales. Nothing is measured and nothing is compared: a plan made from evidence is the other way to the same place. With `linears=N`, linears that stand alone and have at least N inputs and
outputs run in FP8 too. Where a chain is the tower of a Wukong layer, the layer's interactions are fused around it.

`fuse` comes last: a mod that swaps the modules of a chain would not reach what it runs.
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
        precision: "fp8", the only one there is.
        gradient: scales of the gradients; None is what the chain's norms allow: "tensor" behind block norms and of a linear with nothing behind it, "delayed" otherwise.
        linears: the narrowest linear outside of a chain that is taken too; 0 takes none.
        narrow: the narrowest linear that a chain may have.

    Example:
        >>> loka.mods.apply(model, [Fuse()], example=batch)
    """

    precision: Literal["fp8"] = "fp8"
    gradient: GradientScales | None = None
    linears: int = 0
    narrow: int = NARROW
    name: ClassVar[str] = "fuse"
    separable: ClassVar[bool] = False  # what a kernel took over and what no longer runs itself go together
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
