"""Apply mods to a model, and take them back.

    applied = mods.apply(model, ["no_bias", "block_norm", "hard_swish"], example=batch)
    print(applied)                            what changed where, what was left and why
    mods.revert(model)                        the original modules and state_dict

Mods work in place, in the order given, each on what the ones before left. They may be applied again later; `revert` undoes all. A model already converted
to low precision is refused: mods come first, because they decide what there is to convert.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.mods.editor import Editor, ModuleFilter
from loka.mods.fuse import ChainForward
from loka.mods.journal import journal_of, undo_to
from loka.mods.mod import Mod, spell
from loka.mods.registry import find_all
from loka.nn import FusedTower
from loka.nn.linear import Linear
from loka.records import capture_environment
from loka.records.mods import ModClass, ModSummary

APPLIED = "_loka_mod_names"


@dataclass(frozen=True)
class Applied:
    """What `apply` did; prints as the summary."""

    summary: ModSummary

    @property
    def effect(self) -> ModClass:
        """The strongest effect of any change."""
        return self.summary.effect

    @property
    def sites(self) -> dict[str, list[str]]:
        """The changed sites of every mod."""
        return {
            mod: [c.site for c in self.summary.changed if c.mod == mod] for mod in (c.mod for c in self.summary.changed)
        }

    def __str__(self) -> str:
        return str(self.summary)


def apply(
    model: nn.Module,
    mods: str | Mod | Iterable[str | Mod],
    *,
    module_filter_fn: ModuleFilter | None = None,
    example: Any = None,
    model_name: str | None = None,
) -> Applied:
    """Rewrite a model in place. Mods are names or objects with options; `module_filter_fn(module, name)` says which modules may be touched.

    `example` is one input (a tuple is *args, a dict **kwargs): the model is run on it once, to see which module feeds which. Without it, a model with
    `example_inputs()` is run without storage; otherwise mods that need the order say so for every site they leave.
    """
    chosen = find_all(mods)
    refuse_converted(model)
    before = set(model.state_dict())
    editors = []
    for mod in chosen:
        editors.append(Editor(model, mod.name, module_filter_fn, example))
        mod.rewrite(editors[-1])
        model.__dict__.setdefault(APPLIED, []).append(spell(mod))
    device = next((str(p.device) for p in model.parameters()), "cpu")
    summary = ModSummary(
        model=model_name or type(model).__name__,
        mods=[spell(mod) for mod in chosen],
        changed=[change for editor in editors for change in editor.changed],
        left=[left for editor in editors for left in editor.left],
        removed=sorted(before - set(model.state_dict())),
        notes=list(dict.fromkeys(note for editor in editors for note in editor.notes)),
        environment=capture_environment(device=device, threads=torch.get_num_threads()),
    )
    return Applied(summary)


def refuse_converted(model: nn.Module) -> None:
    """Mods come before conversion, and fuse comes last."""
    converted = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    if converted:
        raise ValueError(
            f"already in low precision: {', '.join(converted[:5])}; call loka.revert(model) before its mods"
        )
    fused = [name for name, module in model.named_modules() if isinstance(module, (FusedTower, ChainForward))]
    if fused:
        raise ValueError(
            f"already fused: {', '.join(fused[:5])}; mods.revert(model), then apply all mods with fuse last"
        )


def applied_to(model: nn.Module) -> tuple[str, ...]:
    """The mods a model carries, as spelled, oldest first."""
    return tuple(model.__dict__.get(APPLIED, ()))


def revert(model: nn.Module) -> int:
    """Undo every mod; returns how many changes that were. What was trained meanwhile stays trained."""
    converted = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    if converted and journal_of(model):
        raise ValueError(
            f"still in low precision: {', '.join(converted[:5])}; call loka.revert(model) before mods.revert"
        )
    count = undo_to(model)
    model.__dict__.pop(APPLIED, None)
    return count
