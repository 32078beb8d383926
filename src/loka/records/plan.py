"""The decision: which GEMM of which site runs on which kernel in which precision, and why.

A plan file carries a seal, a digest of its meaning. A file that was damaged or edited after it was made does not match it and is refused; deleting
the `seal` accepts the file as it stands. In memory the seal follows the content, so a plan made from another (`msgspec.structs.replace`) has its own.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from loka.records import prose
from loka.records.measurement import Environment
from loka.records.probe import FlopsOf, Gemm
from loka.records.record import Part, Record, load, save
from loka.records.unit import CollectivePlan, TablePlan, UnitPlan, upgrade_units


class Choice(Part, frozen=True):
    """What one GEMM will run, and why: a `GemmWay` in strings (`loka.dispatch.way_of` reads it) with the evidence it was chosen by. `a` and `b` are canonical Specs; both None means
    high precision. Other than a `Candidate` it was decided for."""

    gemm: Gemm
    backend: str
    a: str | None
    b: str | None
    reason: str
    fast_accum: bool = False
    expected_error: float | None = None
    expected_speedup: float | None = None  # over bf16, quantisation included
    expected_microseconds: float | None = None
    speed_source: str | None = None  # where the speed was measured; None: it was not
    refusals: list[str] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.a is None) != (self.b is None):
            raise ValueError(f"{self.gemm}: both operands are quantised or neither is, got a={self.a!r}, b={self.b!r}")

    @property
    def quantized(self) -> bool:
        """Whether this GEMM runs in low precision."""
        return self.a is not None


class SitePlan(Part, frozen=True):
    """The choices for one site."""

    site: str
    m: int
    k: int
    n: int
    flops_share: float  # of this site's GEMMs, forward and backward, in the step's GEMM FLOPs
    choices: list[Choice]  # one for every GEMM that happens

    def __post_init__(self) -> None:
        if not 0.0 <= self.flops_share <= 1.0 + 1e-9:
            raise ValueError(f"{self.site}: flops_share is {self.flops_share:g}, expected a share from 0 to 1")

    @property
    def low_precision_share(self) -> float:
        """The part of `flops_share` that runs in low precision: a linear's GEMMs cost the same."""
        return self.flops_share * sum(c.quantized for c in self.choices) / len(self.choices) if self.choices else 0.0


class Seal(Part, frozen=True):
    """Digest of a plan's meaning, as a file carries it."""

    sha256: str


class _Computed(Seal, frozen=True):
    """A seal made from the content in memory: it needs no check, and is made again when the content changes."""


class Plan(Record, frozen=True, kw_only=True, tag="plan"):
    """What runs where in a model, and why: mods, units and single linears, each with its evidence. It can be read, compared, saved and loaded."""

    SCHEMA: ClassVar[int] = 2
    schema: int = 2
    model: str
    recipe: str
    target: str | None  # device the speed-ups are for; None: made for accuracy only
    max_error: float
    max_gradient_error: float
    min_speedup: float | None  # None: accuracy only
    flops_of: FlopsOf  # what the shares are shares of
    sites: list[SitePlan]
    environment: Environment
    notes: list[str] = msgspec.field(default_factory=list)  # what a reader must know before trusting it
    weights: str | None = None  # speeds are for weights quantised in every call ("dynamic") or before ("cached")
    max_metric_change: float | None = None  # budget of the end metric, relative; None: none was set
    expected_metric_change: float | None = None  # sum of the upper ends measured one site at a time
    mods: list[str] = msgspec.field(default_factory=list)  # applied before anything is placed, as spelled
    units: list[UnitPlan] = msgspec.field(default_factory=list)  # chains; a linear in none of them is a unit of its own
    tables: list[TablePlan] = msgspec.field(default_factory=list)  # one not named stays as it is
    collectives: list[CollectivePlan] = msgspec.field(default_factory=list)
    margin: float | None = None  # relative change of the metric that counts as none
    seal: Seal | None = None

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        digest = digest_of(self)
        if self.seal is not None and not isinstance(self.seal, _Computed) and self.seal.sha256 != digest:
            raise ValueError(
                f"the plan's content does not match its seal ({self.seal.sha256} in the file, {digest} by content): it was changed after it "
                "was made; hint: restore the file, or delete its `seal` to accept it as it stands"
            )
        msgspec.structs.force_setattr(self, "seal", _Computed(sha256=digest))

        self._check_units()

    @classmethod
    def upgrade(cls, document: dict[str, Any]) -> None:
        """As `Record.upgrade`; the seal stays, and is checked."""
        upgrade_units(document.get("units"))

    def _check_units(self) -> None:
        """Every linear is in at most one unit, and a linear of a chain is not also told to run alone; a table or a collective is decided once."""
        for kind in ("tables", "collectives"):
            names = [part.name for part in getattr(self, kind)]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{', '.join(twice)}: decided twice among the plan's {kind}")
        owner: dict[str, str] = {}
        for unit in self.units:
            for name in unit.linears:
                if name in owner:
                    raise ValueError(f"{name} is in two units, {owner[name]} and {unit.name}")
                owner[name] = unit.name

    def unit_of(self, site: str) -> UnitPlan | None:
        """The unit a linear belongs to; None for one that is decided alone.

        Args:
            site: the linear's name.

        Returns:
            The unit, or None.
        """
        return next((unit for unit in self.units if site in unit.linears), None)

    @property
    def parts(self) -> list[TablePlan | CollectivePlan]:
        """Tables and collectives."""
        return [*self.tables, *self.collectives]

    @property
    def low_precision_share(self) -> float:
        """Share of the GEMM FLOPs of a training step that this plan runs in low precision."""
        chained = {name for unit in self.units for name in unit.linears}
        return sum(s.flops_share if s.site in chained else s.low_precision_share for s in self.sites)

    def save(self, path: str | Path) -> Path:
        """Write the plan to a file, whole or not at all.

        Args:
            path: a JSON file; its folder is made where it is missing.

        Returns:
            The path.

        Example:
            >>> plan.save("plan.json")
        """
        save(self, path)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan from a file; refuses one that was changed after it was made, and one of another kind, saying what to do.

        Args:
            path: what `save` wrote.

        Returns:
            The plan.

        Example:
            >>> loka.convert(model, loka.Plan.load("plan.json"))
        """
        return load(path, cls)

    def round_gradients_stochastically(self) -> "Plan":
        """The same plan with both operands of every low-precision gradient product rounded up or down by chance. Rounded to nearest, a weight is off to the same side in every
        step, which is a bias that training follows; by chance it is noise, which batches have anyway.

        Returns:
            A plan of its own, with its own seal. Chains are left as they are.

        Example:
            >>> report.plan(min_speedup=None, chains=False).round_gradients_stochastically()
        """

        def turn(choice: Choice) -> Choice:
            if choice.gemm == "fprop" or choice.a is None or choice.b is None:
                return choice
            a, b = (spec if spec.endswith(":stochastic") else f"{spec}:stochastic" for spec in (choice.a, choice.b))
            return msgspec.structs.replace(
                choice, a=a, b=b, reason=f"{choice.reason}; rounded stochastically, as asked"
            )

        sites = [msgspec.structs.replace(site, choices=[turn(c) for c in site.choices]) for site in self.sites]
        return msgspec.structs.replace(self, sites=sites, seal=None)

    def __str__(self) -> str:
        return prose.describe(self)

    def diff(self, other: "Plan") -> str:
        """What changes from this plan to another, one line per difference; empty when they run the same."""
        return prose.diff(self, other)

    def explain(self, site: str) -> str:
        """Why one site runs what it runs."""
        return prose.explain(self, site)


def digest_of(plan: Plan) -> str:
    """sha256 of everything but the seal. Absent, None, False and empty are one, so that a field added later changes no digest."""
    content = {name: getattr(plan, name) for name in plan.__struct_fields__ if name != "seal"}
    content["schema"] = 1  # how a file spells a plan is not what it means: seals of older files hold
    text = json.dumps(_prune(msgspec.to_builtins(content)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _prune(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _prune(item) for key, item in value.items()}
        return {
            key: item for key, item in kept.items() if item is not None and item is not False and item not in ([], {})
        }
    return [_prune(item) for item in value] if isinstance(value, list) else value
