"""The plan: which GEMM of which site runs on which kernel in which precision, and why.

A plan file carries a seal, a digest of its content. A file that was damaged or edited does not match its seal and is
rejected; deleting the `seal` accepts the file as it is. In memory the seal is recomputed from the content, so a plan
made from another one (`msgspec.structs.replace`) has its own.
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
from loka.records.unit import CollectivePlan, TablePlan, UnitPlan


class Choice(Part, frozen=True):
    """What one GEMM will run, and why: a `GemmWay` spelled in strings (parsed by `loka.dispatch.way_of`), with its
    evidence.

    `a` and `b` are canonical Specs; both None means high precision. A `Candidate` was evaluated; a `Choice` was
    decided.
    """

    gemm: Gemm
    backend: str
    a: str | None
    b: str | None
    reason: str
    fast_accum: bool = False
    expected_error: float | None = None
    expected_speedup: float | None = None  # over bf16, quantization included
    expected_microseconds: float | None = None
    speed_source: str | None = None  # where the speed was measured; None: not measured
    refusals: list[str] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.a is None) != (self.b is None):
            raise ValueError(f"{self.gemm}: both operands are quantized or neither is, got a={self.a!r}, b={self.b!r}")

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
    flops_share: float  # this site's share of the step's GEMM FLOPs, forward and backward
    choices: list[Choice]  # one for every GEMM that runs

    def __post_init__(self) -> None:
        if not 0.0 <= self.flops_share <= 1.0 + 1e-9:
            raise ValueError(f"{self.site}: flops_share is {self.flops_share:g}, expected a share from 0 to 1")

    @property
    def quantized(self) -> list[Choice]:
        """The choices that run in low precision."""
        return [choice for choice in self.choices if choice.quantized]

    @property
    def low_precision_share(self) -> float:
        """The part of `flops_share` that runs in low precision. A linear's GEMMs have equal FLOPs."""
        return self.flops_share * len(self.quantized) / len(self.choices) if self.choices else 0.0


class Seal(Part, frozen=True):
    """Digest of a plan's content, as stored in its file."""

    sha256: str


class _Computed(Seal, frozen=True):
    """A seal computed from the content in memory. It needs no check and is recomputed when the content changes."""


class Plan(Record, frozen=True, kw_only=True, tag="plan"):
    """What runs where in a model, and why: mods, chains, single linears, tables and collectives, with evidence.

    `loka.tune` and `report.plan()` make plans; `loka.convert` applies them.

    Example:
        >>> plan = report.plan(min_speedup=None)
        >>> print(plan)  # one line per unit or linear; plan.explain(name) says why
        >>> plan.save("plan.json")
    """

    SCHEMA: ClassVar[int] = 2
    schema: int = 2
    model: str
    recipe: str
    target: str | None  # device the speed-ups are for; None: accuracy only
    max_error: float
    max_gradient_error: float
    min_speedup: float | None  # None: accuracy only
    flops_of: FlopsOf  # what the shares are shares of
    sites: list[SitePlan]
    environment: Environment
    notes: list[str] = msgspec.field(default_factory=list)  # caveats
    weights: str | None = None  # speeds are for weights quantized in every call ("dynamic") or once ("cached")
    max_metric_change: float | None = None  # budget for the relative change of the end metric; None: no budget
    expected_metric_change: float | None = None  # sum of the upper ends measured one site at a time
    mods: list[str] = msgspec.field(default_factory=list)  # rewrites to apply before conversion, with their options
    units: list[UnitPlan] = msgspec.field(default_factory=list)  # chains; other linears are decided in `sites`
    tables: list[TablePlan] = msgspec.field(default_factory=list)  # tables that are not listed stay unchanged
    collectives: list[CollectivePlan] = msgspec.field(default_factory=list)
    margin: float | None = None  # relative change of the metric that counts as no change
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

    def _check_units(self) -> None:
        """Raise ValueError if a linear, a table or a collective is decided twice."""
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
        for site in self.sites:
            if site.site in owner and (own := [choice.gemm for choice in site.quantized]):
                raise ValueError(
                    f"{site.site} is decided twice: it is in the unit {owner[site.site]}, and `sites` has a low-precision "
                    f"choice for its {', '.join(own)}; expected one decision per linear; hint: take the linear out of "
                    "the unit, or leave its `sites` entry in high precision (a=None, b=None)"
                )

    def unit_of(self, site: str) -> UnitPlan | None:
        """Return the unit that contains a linear, or None.

        Args:
            site: the linear's name.
        """
        return next((unit for unit in self.units if site in unit.linears), None)

    @property
    def parts(self) -> list[TablePlan | CollectivePlan]:
        """Tables and collectives."""
        return [*self.tables, *self.collectives]

    @property
    def changes_nothing(self) -> bool:
        """Whether a model that the plan is applied to stays as it is."""
        return not (self.units or self.mods or self.parts or any(site.low_precision_share for site in self.sites))

    @property
    def chained(self) -> set[str]:
        """The linears in its chains, whatever `sites` say of them."""
        return {name for unit in self.units for name in unit.linears}

    @property
    def low_precision_share(self) -> float:
        """Share of the GEMM FLOPs of a training step that this plan runs in low precision."""
        chained = self.chained
        return sum(s.flops_share if s.site in chained else s.low_precision_share for s in self.sites)

    def save(self, path: str | Path) -> Path:
        """Write the plan to a file, atomically.

        Args:
            path: a JSON file; missing folders are created.

        Returns:
            The path.

        Example:
            >>> plan.save("plan.json")
        """
        save(self, path)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan from a file. Raises RecordError if the file was edited after it was made or is not a plan.

        Args:
            path: a file written by `save`.

        Returns:
            The plan.

        Example:
            >>> loka.convert(model, loka.Plan.load("plan.json"))
        """
        return load(path, cls)

    def __str__(self) -> str:
        return prose.describe(self)

    def diff(self, other: "Plan") -> str:
        """Describe what changes from this plan to another, one line per difference; empty if both run the same."""
        return prose.diff(self, other)

    def explain(self, site: str) -> str:
        """Explain why a site runs what it runs."""
        return prose.explain(self, site)


def digest_of(plan: Plan) -> str:
    """Return the SHA-256 of everything but the seal.

    Fields that are None, False or empty are left out, so adding a field with such a default does not change digests.
    """
    content = {name: getattr(plan, name) for name in plan.__struct_fields__ if name != "seal"}
    content["schema"] = 1  # constant, so that a new schema alone does not change seals
    text = json.dumps(_prune(msgspec.to_builtins(content)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _prune(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _prune(item) for key, item in value.items()}
        return {
            key: item for key, item in kept.items() if item is not None and item is not False and item not in ([], {})
        }
    return [_prune(item) for item in value] if isinstance(value, list) else value
