"""Apply mods to a model, and take them back.

    applied = mods.apply(model, ["no_bias", "block_norm", "hard_swish"], example=batch)
    print(applied)                            what changed where, what was left and why
    mods.revert(model)                        the original modules and state_dict

Mods work in place, in the order given, each on what the ones before left. They may be applied again later; `revert` undoes all. A model already converted
to low precision is refused: mods come first, because they decide what there is to convert. Wrappers (DistributedDataParallel, torch.compile, TorchRec's
DistributedModelParallel) are seen through, and sites are named as in the plain model.

With an example every change that claims to keep the function is checked on it (`loka.mods.trial`), a whole mod at once; where that fails, change by change, and
those that fail are undone and listed as left.
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
from loka.units.undisturbed import is_compiled, same_randomness

APPLIED = "_loka_mod_names"


@dataclass(frozen=True)
class Applied:
    """What `apply` did; prints as the summary.

    Args:
        summary: the record.

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
    """Rewrite a model in place.

    Args:
        model: any module, wrapped or not, that is not in low precision yet.
        mods: names or objects with options, in order; a string may hold several names with commas.
        module_filter_fn: `(module, name) -> bool`, which modules may be touched.
        example: one input of the model (a tuple is *args, a dict **kwargs). It is run, in eval and in training mode, to see which module feeds which and to check
            that what claims to keep the function does; the model, its gradients and the random state are left as they were. Without it, a model with
            `example_inputs()` is run without storage; otherwise mods that need the order say so for every site they leave, and nothing is checked.
        model_name: for the summary.

    Returns:
        What changed where, what was left and why.

    Raises:
        ValueError: an unknown mod, an example that the model cannot run, a model that is converted, fused or not initialised yet.

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
        torch.compiler.reset()  # graphs made before know nothing of what changed
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
    """One mod, what it works on, and who judges it."""

    model: nn.Module
    mod: Mod
    keep: ModuleFilter | None
    example: Any
    trial: Trial | None
    ddp: bool

    @property
    def low(self) -> bool:
        """Whether the mod runs something in FP8."""
        return getattr(self.mod, "precision", None) == "fp8"

    def edit(self, *, one_by_one: bool = False) -> Editor:
        editor = Editor(self.model, self.mod.name, self.keep, self.example, self.judge if one_by_one else None)
        self.mod.rewrite(editor)
        return editor

    def judge(self, effect: ModClass, steps: Sequence[Step]) -> str | None:
        """Why steps must be undone."""
        lost = [step for step in steps if isinstance(step, Drop) or (isinstance(step, Swap) and step.lost)]
        if self.ddp and lost:
            return "DistributedDataParallel waits for the gradients of every parameter it was given; apply the mods before wrapping"
        return None if self.trial is None else self.trial.refuse(effect, touched=self._touched(steps), low=self.low)

    def _touched(self, steps: Sequence[Step]) -> set[int]:
        """Parameters whose values a step changed: their gradients change with them."""
        targets = {step.target for step in steps if isinstance(step, Fold)}
        return {id(p) for name in targets for p in self.model.get_submodule(name).parameters()}


def _rewrite(job: _Job) -> Editor:
    """Let a mod do its work, judge it as a whole, and where that fails change by change."""
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
    """A mod whose changes only make sense together."""
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
        raise ValueError(f"not initialised yet: {', '.join(lazy[:5])}; run the model once on a batch before its mods")


def refuse_converted(model: nn.Module) -> None:
    """Mods come before conversion, and fuse comes last."""
    converted = [plain_name(name) for name, module in model.named_modules() if isinstance(module, Linear)]
    if converted:
        raise ValueError(
            f"already in low precision: {', '.join(converted[:5])}; call loka.revert(model) before its mods"
        )
    fused = [plain_name(name) for name, _ in chains_of(model)]
    if fused:
        raise ValueError(
            f"already fused: {', '.join(fused[:5])}; mods.revert(model), then apply all mods with fuse last"
        )


def applied_to(model: nn.Module) -> tuple[str, ...]:
    """The mods a model carries.

    Args:
        model: any module, wrapped or not.

    Returns:
        The mods as spelled, oldest first.

    Example:
        >>> loka.mods.applied_to(model)
        ('no_bias', 'block_norm')
    """
    return tuple(unwrap(model).__dict__.get(APPLIED, ()))


def revert(model: nn.Module) -> int:
    """Undo every mod. What was trained meanwhile stays trained.

    Args:
        model: any module, wrapped or not, that is not in low precision any more.

    Returns:
        How many changes that were.

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
        raise ValueError(
            f"still in low precision: {', '.join(converted[:5])}; call loka.revert(model) before mods.revert"
        )
    count = undo_to(inner)
    inner.__dict__.pop(APPLIED, None)
    if count and is_compiled(model):
        torch.compiler.reset()
    return count
