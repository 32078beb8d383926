"""The interface of a mod: a name, options, the strongest effect it can have, and `rewrite`.

    exact           the same function, bitwise where the arithmetic is the same
    rounding        the same function up to rounding: sums in another order, another precision
    architecture    a different function: train from scratch with it, or fine-tune a trained model to recover

A mod's effect is the strongest it may have. Each change it makes records its own effect.

Two class attributes are optional. `under_autocast = True`: the mod is also checked under bf16 autocast.
`separable = False`: its changes are kept or undone all together, never one by one.
"""

from typing import Protocol, runtime_checkable

from loka.mods.editor import Editor
from loka.records.mods import ModClass


@runtime_checkable
class Mod(Protocol):
    """The protocol of a mod: a frozen dataclass of its options, with these attributes.

    Example:
        >>> find("no_bias").name
        'no_bias'
    """

    @property
    def name(self) -> str:
        """The mod's name in lists and records."""
        ...

    @property
    def effect(self) -> ModClass:
        """The strongest effect the mod can have."""
        ...

    def rewrite(self, editor: Editor) -> None:
        """Change the model through the editor. Report sites that cannot be changed safely with `editor.leave`."""
        ...


def spell(mod: Mod) -> str:
    """Write a mod as text: its name and the options that differ from their defaults. The inverse of `parse`.

    Args:
        mod: any mod.

    Returns:
        The text that plans and records contain.

    Example:
        >>> spell(UseBlockNorm(block=128))
        'block_norm(block=128)'
    """
    plain = vars(type(mod)())
    options = ", ".join(f"{name}={value!r}" for name, value in vars(mod).items() if value != plain.get(name))
    return f"{mod.name}({options})" if options else mod.name
