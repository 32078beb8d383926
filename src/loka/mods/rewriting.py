"""Apply mods to a model, and revert them.

    applied = mods.apply(model, ["no_bias", "block_norm", "hard_swish"], example=batch)
    print(applied)                            what changed where, what was left unchanged and why
    mods.revert(model)                        the original modules and state_dict

Mods work in place, in the given order, each on the result of the previous one. More mods can be applied later;
`revert` undoes all of them. A model already converted to low precision is refused: mods come first, because they decide
what there is to convert. Wrappers (DistributedDataParallel, torch.compile, TorchRec's DistributedModelParallel) are
unwrapped, and sites are named as in the plain model.

With an example, every change that claims to keep the function is checked on it (`loka.mods.trial`). A mod is first
checked as a whole. If that fails, its changes are checked one by one, and those that fail are undone and listed as
left.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.lowp.chain import chains_of
from loka.lowp.linear import Linear
from loka.measure.device import environment_of
from loka.mods.editor import Editor, ModuleFilter
from loka.mods.journal import Drop, Fold, PlacedUnit, Step, Swap, journal_of, undo_to
from loka.mods.mod import Mod, spell
from loka.mods.registry import find_all
from loka.mods.trial import Trial
from loka.nn.wrapping import plain_name, unwrap
from loka.records.mods import ModClass, ModSummary
from loka.records.prose import name_some
from loka.units.undisturbed import is_compiled, same_randomness

APPLIED = "_loka_mod_names"


@dataclass(frozen=True)
class Applied:
    """The result of `apply`. Prints as the summary.

    Args:
        summary: the record of what was changed and what was left.

    Example:
        >>> loka.mods.apply(model, ["no_bias"]).sites["no_bias"]
    """

    summary: ModSummary

    @property
    def effect(self) -> ModClass:
        """The strongest effect of any change."""
        return self.summary.effect

    @property
    def sites(self) -> dict[str, list[str]]:
        """The changed sites by mod."""
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
    """Rewrite a model in place.

    Args:
        model: any module, wrapped or not, that is not converted to low precision yet.
        mods: names, or mods with options, in order. A string may hold several names separated by commas.
        module_filter_fn: `(module, name) -> bool`, which modules may be changed.
        example: one input of the model (a tuple is *args, a dict **kwargs). The model runs on it in eval and training
            mode, to see which module feeds which and to check changes that claim to keep the function. Parameters,
            gradients and random state are left untouched. Without an example, a model with `example_inputs()` is run on
            meta tensors; failing that, mods that need the order of modules report this for each site they leave.
            Nothing is checked without an example.
        model_name: the model's name in the summary.

    Returns:
        What changed where, what was left unchanged and why.

    Raises:
        ValueError: the mod is unknown, the model cannot run the example, or the model is converted, fused or has
            uninitialized (lazy) parameters.

    Example:
        >>> applied = apply(model, ["align_shapes", "protect_residual"], example=batch)
    """
    chosen = find_all(mods)
    inner = unwrap(model)
    refuse_converted(inner)
    _refuse_lazy(inner)
    before = set(inner.state_dict())
    with same_randomness():
        trial = None if example is None else Trial(inner, example)
        editors = [_rewrite(_Job(inner, mod, module_filter_fn, example, trial, _is_ddp(model))) for mod in chosen]
    if is_compiled(model) and any(editor.changed for editor in editors):
        torch.compiler.reset()  # graphs compiled before the change are stale
    notes = [*(trial.notes if trial else []), *(note for editor in editors for note in editor.notes)]
    summary = ModSummary(
        model=model_name or type(inner).__name__,
        mods=[spell(mod) for mod in chosen],
        changed=[change for editor in editors for change in editor.changed],
        left=[left for editor in editors for left in editor.left],
        removed=sorted(plain_name(key) for key in before - set(inner.state_dict())),
        notes=list(dict.fromkeys(notes)),
        environment=environment_of(inner),
    )
    return Applied(summary)


@dataclass(frozen=True)
class _Job:
    """One mod to apply, with the model, the filter, the example and the trial that checks it."""

    model: nn.Module
    mod: Mod
    keep: ModuleFilter | None
    example: Any
    trial: Trial | None
    ddp: bool

    @property
    def low(self) -> bool:
        """Whether the mod runs parts of the model in FP8."""
        return getattr(self.mod, "precision", None) == "fp8"

    def edit(self, *, one_by_one: bool = False) -> Editor:
        editor = Editor(self.model, self.mod.name, self.keep, self.example, self.judge if one_by_one else None)
        self.mod.rewrite(editor)
        return editor

    def judge(self, effect: ModClass, steps: Sequence[Step]) -> str | None:
        """Return why the steps must be undone, or None if they may stay."""
        lost = [step for step in steps if isinstance(step, Drop) or (isinstance(step, Swap) and step.lost)]
        if self.ddp and lost:
            return "DistributedDataParallel waits for gradients of parameters that the mod removes; hint: apply mods before wrapping"
        return None if self.trial is None else self.trial.refuse(effect, touched=self._touched(steps), low=self.low)

    def _touched(self, steps: Sequence[Step]) -> set[int]:
        """Return the ids of parameters whose values a step changed: their gradients are expected to change too."""
        targets = {step.target for step in steps if isinstance(step, Fold)}
        return {id(p) for name in targets for p in self.model.get_submodule(name).parameters()}


def _rewrite(job: _Job) -> Editor:
    """Run a mod and check it as a whole. If that fails, undo it and run it again, checking change by change."""
    start = len(journal_of(job.model))
    if job.trial is not None:
        job.trial.prepare(autocast=getattr(job.mod, "under_autocast", False), low=job.low)
    editor = job.edit()
    if editor.changed:
        effects = {change.effect for change in editor.changed}
        mixed = "architecture" in effects and len(effects) > 1 and job.trial is not None
        strongest: ModClass = next(e for e in ("architecture", "rounding", "exact") if e in effects)
        separable = getattr(job.mod, "separable", True)
        one_by_one = separable and mixed
        why = None if one_by_one else job.judge(strongest, journal_of(job.model)[start:])
        if why is not None or one_by_one:
            undo_to(job.model, start)
            editor = job.edit(one_by_one=True) if separable else _leave_all(job, editor, why)
        if job.trial is None and effects != {"architecture"}:
            editor.note("nothing was checked: pass example= to have every claim tried on it")
    job.model.__dict__.setdefault(APPLIED, []).append(spell(job.mod))
    return editor


def _leave_all(job: _Job, done: Editor, why: str | None) -> Editor:
    """List every change of an inseparable mod as left, after all of them were undone."""
    editor = Editor(job.model, job.mod.name, job.keep, job.example)
    editor.left = list(done.left)
    for change in done.changed:
        editor.leave(change.site, f"was undone: {why}")
    return editor


def _is_ddp(model: nn.Module) -> bool:
    return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())


def _refuse_lazy(model: nn.Module) -> None:
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise ValueError(f"not initialized yet: {name_some(lazy)}; run the model once on a batch before applying mods")


def refuse_converted(model: nn.Module) -> None:
    """Raise ValueError if the model is converted or fused: mods come before conversion, and fuse comes last."""
    converted = [plain_name(name) for name, module in model.named_modules() if isinstance(module, Linear)]
    if converted:
        raise ValueError(
            f"already in low precision: {name_some(converted)}; call loka.revert(model) before applying mods"
        )
    fused = [plain_name(name) for name, _ in chains_of(model)]
    if fused:
        raise ValueError(
            f"already fused: {name_some(fused)}; mods.revert(model), then apply all mods again with fuse last"
        )


def applied_to(model: nn.Module) -> tuple[str, ...]:
    """Return the mods that were applied to a model.

    Args:
        model: any module, wrapped or not.

    Returns:
        The mods with their options, as text (see `spell`), oldest first.

    Example:
        >>> loka.mods.applied_to(model)
        ('no_bias', 'block_norm')
    """
    return tuple(unwrap(model).__dict__.get(APPLIED, ()))


def revert(model: nn.Module) -> int:
    """Undo every mod. Parameters keep their trained values.

    Args:
        model: any module, wrapped or not. A converted model must be reverted with `loka.revert` first.

    Returns:
        The number of changes that were undone.

    Raises:
        ValueError: the model is still in low precision.

    Example:
        >>> loka.mods.revert(model)
        7
    """
    inner = unwrap(model)
    converted = [name for name, module in inner.named_modules() if isinstance(module, Linear)]
    fused = {name for step in journal_of(inner) if isinstance(step, PlacedUnit) for name in step.linears}
    converted += [name for name, chain in chains_of(inner) if chain.links[0].linear not in fused]
    if converted and journal_of(inner):
        raise ValueError(f"still in low precision: {name_some(converted)}; call loka.revert(model) before mods.revert")
    count = undo_to(inner)
    inner.__dict__.pop(APPLIED, None)
    if count and is_compiled(model):
        torch.compiler.reset()
    return count
