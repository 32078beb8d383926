"""What mods did to a model: which sites changed, which did not and why, and how much quality training recovered."""

from typing import Literal

import msgspec

from loka.records.measurement import Environment
from loka.records.record import Part, Record

ModClass = Literal["exact", "rounding", "architecture"]
MOD_CLASSES: tuple[ModClass, ...] = ("exact", "rounding", "architecture")


class ModChange(Part, frozen=True):
    """One site that a mod rewrote, and how that changes the function the model computes."""

    mod: str
    site: str  # fully qualified name of the module
    effect: ModClass  # same function; same up to rounding; another function, which needs (re)training
    what: str


class ModLeft(Part, frozen=True):
    """One site that a mod applies to but left unchanged."""

    mod: str
    site: str
    why: str


LEAST_COST = 1e-3  # of mods, relative to the metric before them


class Recovery(Part, frozen=True):
    """A metric of a trained model before its mods, right after them, and after fine-tuning (None: not measured)."""

    metric: str
    before: float
    after_mods: float
    after_training: float | None
    steps: int  # of the fine-tune
    lower_is_better: bool = True

    @property
    def recovered(self) -> float | None:
        """The share of the mods' cost that training recovered: above 1 if better than before, None without a cost.

        A cost below a thousandth of the metric is none: a share of it would be that of noise.
        """
        cost = self.after_mods - self.before if self.lower_is_better else self.before - self.after_mods
        if self.after_training is None or cost <= LEAST_COST * abs(self.before):
            return None
        back = self.after_mods - self.after_training
        return (back if self.lower_is_better else -back) / cost


class ModSummary(Record, frozen=True, tag="mods"):
    """The result of `loka.mods.apply`."""

    model: str
    mods: list[str]  # with their options, in the order they were applied
    changed: list[ModChange]
    left: list[ModLeft]
    removed: list[str]  # state_dict keys of the original that the modified model does not have
    notes: list[str]  # caveats
    environment: Environment
    recovery: list[Recovery] = msgspec.field(default_factory=list)

    @property
    def effect(self) -> ModClass:
        """The strongest effect of any change, i.e. of the whole rewrite."""
        return max((c.effect for c in self.changed), key=MOD_CLASSES.index, default="exact")

    def __str__(self) -> str:
        lines = [f"{len(self.changed)} sites changed, {len(self.left)} left; {_EFFECTS[self.effect]}"]
        lines += [f"  {c.mod:22} {c.site or '(the model)'}: {c.what} [{c.effect}]" for c in self.changed]
        lines += [f"  {c.mod:22} left {c.site or '(the model)'}: {c.why}" for c in self.left]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


_EFFECTS = {
    "exact": "the model computes what it did",
    "rounding": "the model computes what it did, up to rounding",
    "architecture": "the model computes another function and needs training",
}
