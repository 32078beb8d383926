"""Mod: one reusable rewrite. A name, options, the strongest effect it can have, and `rewrite`.

    exact           the same function, bit by bit where the arithmetic is the same
    rounding        the same function up to rounding: sums in another order, another precision
    architecture    another function: train from scratch with it, or fine-tune a trained model to recover

The effect a mod states is what it may do; every change it makes states its own. Adding a mod is one file and one row of the registry.

Two class attributes are optional: `under_autocast = True` has the mod checked in 16 bits as well, `separable = False` says that its changes are undone together or not
at all.
"""

from typing import Protocol, runtime_checkable

from loka.mods.editor import Editor
from loka.records.mods import ModClass


@runtime_checkable
class Mod(Protocol):
    """What every mod is: a frozen dataclass of its options, with these attributes.

    Example:
        >>> find("no_bias").name
        'no_bias'
    """

    @property
    def name(self) -> str:
        """What it is called in lists and records."""
        ...

    @property
    def effect(self) -> ModClass:
        """The strongest effect it can have."""
        ...

    def rewrite(self, editor: Editor) -> None:
        """Change the model through the editor; leave what cannot be done safely, with the reason."""
        ...


def spell(mod: Mod) -> str:
    """The mod with the options that are not the default.

    Args:
        mod: any.

    Returns:
        What a plan writes and `parse` reads.

    Example:
        >>> spell(UseBlockNorm(block=128))
        'block_norm(block=128)'
    """
    plain = vars(type(mod)())
    options = ", ".join(f"{name}={value!r}" for name, value in vars(mod).items() if value != plain.get(name))
    return f"{mod.name}({options})" if options else mod.name
