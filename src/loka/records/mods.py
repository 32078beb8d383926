"""What mods did to a model: what changed where, what was left and why, and how much of its quality came back after training."""

from typing import Literal

import msgspec

from loka.records.measurement import Environment
from loka.records.record import Part, Record

ModClass = Literal["exact", "rounding", "architecture"]
MOD_CLASSES: tuple[ModClass, ...] = ("exact", "rounding", "architecture")


class ModChange(Part, frozen=True):
    """One site that a mod rewrote, and what that does to the function the model computes."""

    mod: str
    site: str  # fully qualified name of the module
    effect: ModClass  # the same function; the same up to rounding; another function, to be (re)trained
    what: str


class ModLeft(Part, frozen=True):
    """One site that a mod would have rewritten, and did not."""

    mod: str
    site: str
    why: str


class Recovery(Part, frozen=True):
    """A metric of a trained model before its mods, right after them, and after the fine-tune; None: not measured."""

    metric: str
    before: float
    after_mods: float
    after_training: float | None
    steps: int  # of the fine-tune
    lower_is_better: bool = True

    @property
    def recovered(self) -> float | None:
        """The share of what the mods cost that training won back; above 1 it is better than before, None where they cost nothing."""
        cost = self.after_mods - self.before if self.lower_is_better else self.before - self.after_mods
        if self.after_training is None or cost <= 0:
            return None
        back = self.after_mods - self.after_training
        return (back if self.lower_is_better else -back) / cost


class ModSummary(Record, frozen=True, tag="mods"):
    """What `loka.mods.apply` did."""

    model: str
    mods: list[str]  # as spelled, options included, in the order they were applied
    changed: list[ModChange]
    left: list[ModLeft]
    removed: list[str]  # entries of the original's state_dict that the modified model has not
    notes: list[str]  # what a reader must know before trusting it
    environment: Environment
    recovery: list[Recovery] = msgspec.field(default_factory=list)

    @property
    def effect(self) -> ModClass:
        """The strongest effect of any change: what the whole rewrite is."""
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
