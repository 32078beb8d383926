"""Guard: detect sites that fail in low precision, and return them to high precision between steps.

    guard = Guard(model, GuardConfig(max_error=0.1, every=50))
    for batch in loader:
        guard.begin_step()          # observes one step in `every`
        train_step(model, batch)
        for event in guard.check(): # synchronizes with the device only after an observed step
            print(event)

During an observed step every site counts on the device (`loka.lowp.health`); the host reads nothing. `check`, called
between steps, reads all counters at once and looks for:

    non-finite     the site's output has a NaN or Inf, and neither its input nor its weight has. A site whose input or
                   weight is bad is reported, not switched: a higher precision would not help
    error          the mean sampled error since the last check exceeds `max_error`
    saturation     in more than `max_saturated` of the steps since the last check, at least 20 of them, values exceeded
                   a chain's delayed scale; in serving, any exceeded its calibrated scale, which is only reported

A switch returns a linear to high precision; a chain is split there, and both halves stay in FP8. The event says what
must be redone: a captured CUDA graph must be captured again, since it replays the old kernels. Compiled code recompiles
by itself in the next step, once for all sites switched by one check, so it is checks that count against `max_switches`;
beyond that, sites are only reported. Observing also compiles a second variant of the model, once. With several
processes the counters are summed over all ranks, so all ranks make the same decisions.

`state_dict` has what a checkpoint needs besides the model's: the step, the switches used and the bindings of switched
or rebound sites. Load it into the guard of a model that was converted the same way, before `loka.load_scale_state`,
which expects the sites as they ran.

`report_drift` reports that a distribution has shifted, `take_drift` does so from a probe's report. The next check calls
`decide(site)` for a new binding; None keeps the current one.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.kernels.scaled_mm import GemmWay
from loka.lowp.auto import settle
from loka.lowp.binding import LinearBinding
from loka.lowp.chain import Chain, chains_of
from loka.lowp.health import BACKWARD, FIELDS, FORWARD, clear, new_health
from loka.lowp.interaction import interactions_of, release_interaction
from loka.lowp.linear import Linear, linears_of
from loka.lowp.scaling import Scaling
from loka.nn.wrapping import unwrap
from loka.records import GEMMS, DriftReport
from loka.records.prose import name_some

Decide = Callable[[str], LinearBinding | None]
log = logging.getLogger(__name__)
_SHARED = 20  # steps that a share of saturated steps is judged over at least: a jump of the loss scale lasts for a few


@dataclass(frozen=True)
class GuardConfig:
    """How often Guard observes a step, and beyond which limits it switches a site.

    Args:
        max_error: the limit of a GEMM's sampled error (`loka.lowp.health`). A sound E4M3 GEMM is near 0.04, a layer of
            a chain, whose output is FP8 too, near 0.06.
        every: observe one step in this many.
        max_switches: the number of checks that may switch sites; after that they are only reported.
        max_saturated: the share of steps since the last check in which values may exceed a remembered scale. If `every`
            is below 20, it is the share of the last 20 steps or more.

    Example:
        >>> guard = loka.Guard(model, GuardConfig(every=20))
    """

    max_error: float = 0.15
    every: int = 50
    max_switches: int = 4
    max_saturated: float = 0.2

    def __post_init__(self) -> None:
        if not self.max_error > 0:
            raise ValueError(f"max_error={self.max_error}: expected a positive number")
        if not 0 <= self.max_saturated <= 1:
            raise ValueError(f"max_saturated={self.max_saturated}: expected a share of the steps, 0 to 1")
        if self.every < 1 or self.max_switches < 0:
            raise ValueError(
                f"every={self.every}, max_switches={self.max_switches}: expected at least 1, and not negative"
            )


@dataclass(frozen=True)
class GuardEvent:
    """A finding at one site, and the action: `switched`, `rebound`, `reported`, or `capped` by `max_switches`."""

    step: int
    site: str
    action: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.site} {self.action}: {self.reason}"


@dataclass
class _ChainedSite:
    """A guarded linear of a chain."""

    chain: Chain
    at: int
    seen: tuple[float, float] = (0.0, 0.0)  # steps with saturated outputs and gradients at the last check
    steps: int = 0  # the guard's step at the last check

    @property
    def linear(self) -> nn.Linear:
        return self.chain.linears[self.at]


class Guard:
    """Monitor the converted linears of a model, including those in chains, and return failing ones to high precision.

    Args:
        model: a converted model, wrapped or not.
        config: how often to observe, and the limits.
        decide: called with a site whose distribution has drifted; returns its new binding, or None to keep the current.

    Example:
        >>> guard = loka.Guard(model)
        >>> for batch in loader:
        ...     guard.begin_step()
        ...     train_step(model, batch)
        ...     guard.check()
    """

    def __init__(self, model: nn.Module, config: GuardConfig | None = None, *, decide: Decide | None = None) -> None:
        if config is not None and not isinstance(config, GuardConfig):
            raise ValueError(
                f"config is {type(config).__name__}, expected a GuardConfig; hint: loka.Guard(model), "
                "or loka.Guard(model, loka.lowp.GuardConfig(every=20))"
            )
        self.config = config or GuardConfig()
        self.decide = decide
        self.model, self._outer = unwrap(model), model
        self.sites: dict[str, Linear] = {linear.state.name or name: linear for name, linear in linears_of(self.model)}
        self.chained: dict[str, _ChainedSite] = {}
        self._find_chained()
        if not self.sites and not self.chained:
            raise ValueError("the model has no converted linear to guard; hint: loka.convert(model, plan) first")
        self.step = self.switches = 0
        self.events: list[GuardEvent] = []
        self.opened: dict[str, str] = {}  # linears taken out of chains into high precision, and why
        self._drifted: dict[str, str] = {}
        self._looking = False
        self._bound: set[str] = set()  # sites that no longer run what they were converted to
        self._attach()

    def _find_chained(self) -> None:
        """Collect the linears of all current chains."""
        before = self.chained
        self.chained = {}
        # cached: walking a model's modules takes longer than everything else here
        self._chains = [chain for _, chain in chains_of(self.model)]
        for chain in self._chains:
            for at, link in enumerate(chain.links):
                old = before.get(link.linear)
                self.chained[link.linear] = _ChainedSite(chain, at, *(() if old is None else (old.seen, old.steps)))

    def begin_step(self) -> None:
        """Observe the following step if one is due. Call before every step."""
        self._attach()
        self._watch(self.step % self.config.every == 0)
        self.step += 1

    def _watch(self, looking: bool) -> None:
        """Turn counting on or off at all sites."""
        if looking == self._looking:
            return
        self._looking = looking
        for linear in self.sites.values():
            linear.state.watching = looking and linear.binding.quantized
        for chain in self._chains:
            chain.watching = looking

    def _attach(self) -> None:
        """Give every site a vector of counters. Raise if a site was reverted."""
        gone = [site for site, linear in self.sites.items() if not isinstance(linear, Linear)]
        gone += [site for site, inside in self.chained.items() if not inside.chain.placed]
        if gone:
            raise ValueError(
                f"guarded sites that are no longer converted: {name_some(gone, 6)}; "
                "hint: make a new Guard after loka.revert and another conversion"
            )
        for linear in self.sites.values():
            if linear.state.health is None:
                linear.state.health = new_health(linear.weight.device)
        for chain in self._chains:
            if chain.health is None:
                chain.health = [new_health(chain.static.device) for _ in chain.links]

    def report_drift(self, site: str, reason: str) -> None:
        """Report that a site's distribution has shifted; the next check calls `decide` for it."""
        if site not in self.sites and site not in self.chained:
            raise ValueError(f"no guarded site {site!r}; sites are {', '.join((*self.sites, *self.chained))}")
        if self.decide is None:
            raise ValueError(
                f"{site} drifted ({reason}), but this Guard has no `decide`; hint: Guard(model, decide=...)"
            )
        self._drifted[site] = reason

    def take_drift(self, report: DriftReport) -> list[str]:
        """Report the drifted sites of a probe's report, and return those that are guarded.

        These are the sites whose verdict changed or, if verdicts were not compared, whose distribution moved.
        """
        found = {c.site: f"verdict {c.before} -> {c.after}" for c in report.changes}
        if not report.judged:
            for move in report.moves:
                found.setdefault(
                    move.site, f"{move.role} {move.feature} {move.before:.3g} -> {move.after:.3g} at step {move.step}"
                )
        guarded = [site for site in found if site in self.sites or site in self.chained]
        for site in guarded:
            self.report_drift(site, found[site])
        return guarded

    def check(self) -> list[GuardEvent]:
        """Read the counters, act on them, and return what happened. Call between steps, on every rank."""
        self._attach()
        found = self._judge() if self._looking else {}
        self._watch(False)
        events = [self._act(site, reason, harmful) for site, (reason, harmful) in found.items()]
        events += [self._redecide(site, reason) for site, reason in self._drifted.items()]
        self._drifted.clear()
        if any(event.action in ("switched", "rebound") for event in events):
            self.switches += 1
        for event in events:
            log.warning("%s", event)
        self.events += events
        return events

    def put_back(self, site: str, reason: str = "asked for", *, chain: bool = False) -> list[GuardEvent]:
        """Return a linear to high precision, between two steps. It counts against no limit; `state_dict` includes it.

        Args:
            site: the linear's name.
            reason: for the record.
            chain: return the whole chain of the linear, not only the linear.

        Returns:
            One event per linear, which says what must be compiled or captured again.

        Example:
            >>> guard.put_back("tower.3")            # its chain splits there
            >>> guard.put_back("tower.3", chain=True)
        """
        self._attach()
        if site not in self.chained and (chain or site not in self.sites):
            guarded = ", ".join(self.chained if chain else (*self.sites, *self.chained))
            raise ValueError(f"no guarded site {site!r}{' in a chain' if chain else ''}; there are {guarded or 'none'}")
        names = [link.linear for link in self.chained[site].chain.links] if chain else [site]
        events = []
        for name in names:
            again = self._describe_redo(name)
            self._put_back(name, f"guard: {reason}")
            events.append(GuardEvent(self.step, name, "switched", f"{reason}; {again}"))
        self.events += events
        return events

    def stop(self) -> None:
        """Stop observing. Switched sites stay switched."""
        self._looking = False
        for chain in self._chains:
            chain.health, chain.watching = None, False
        for linear in self.sites.values():
            if isinstance(linear, Linear):
                linear.state.health, linear.state.watching = None, False

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, in values that JSON can hold."""
        self._attach()
        sites = {site: self.sites[site] for site in self.sites if site in self._bound}
        bound = {site: {"binding": _spell(at.binding), "note": at.state.note} for site, at in sites.items()}
        return {"step": self.step, "switches": self.switches, "sites": bound, "opened": dict(self.opened)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, including the bindings of switched sites."""
        self._attach()
        if missing := {"step", "switches", "sites"} - state.keys():
            raise ValueError(f"this is not the state of a Guard: {', '.join(sorted(missing))} missing")
        if unknown := sorted(state["sites"].keys() - self.sites.keys()):
            raise ValueError(
                f"the state switched {name_some(unknown, 6)}, which are not converted in this model; "
                f"guarded sites are {', '.join(self.sites)}"
            )
        opened = state.get("opened", {})
        if unknown := sorted(opened.keys() - self.chained.keys() - self.opened.keys()):
            raise ValueError(f"the state opened chains at {name_some(unknown, 6)}, which are in no chain of this model")
        for site, note in opened.items():
            if site in self.chained:
                self._open(site, note)
        bindings = {site: _parse(saved["binding"]) for site, saved in state["sites"].items()}
        for site, binding in bindings.items():
            self._bind(site, binding, state["sites"][site]["note"])
        self.step, self.switches = int(state["step"]), int(state["switches"])

    def _judge(self) -> dict[str, tuple[str, bool]]:
        """Return the findings by site: a description, and whether high precision would help."""
        names = [*self.sites, *self.chained]
        if not names:  # there were only chains, and all of their linears were put back
            return {}
        counted = [linear.state.health for linear in self.sites.values()]
        counted += [inside.chain.health[inside.at] if inside.chain.health else None for inside in self.chained.values()]
        saturated = [count for chain in self._chains for count in chain.count_saturated()]
        device = next(c.device for c in counted if c is not None)
        over = [torch.zeros(2, device=device)] * len(self.sites) + [count.to(device) for count in saturated]
        table = torch.cat([torch.stack([c.to(device) for c in counted if c is not None]), torch.stack(over)], 1)
        ranks = 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(table)
            ranks = torch.distributed.get_world_size()
        rows = table.tolist()  # the only synchronization with the device
        for c in counted:
            if c is not None:
                clear(c)
        found = {}
        for site, (*row, out, grad) in zip(names, rows, strict=True):
            if finding := self._find(site, row) or self._find_saturated(site, (out, grad), ranks):
                found[site] = finding
        return found

    def _find_saturated(self, site: str, beyond: tuple[float, float], ranks: int) -> tuple[str, bool] | None:
        inside = self.chained.get(site)
        if inside is None:
            return None
        if inside.chain.frozen is not None:
            reason = "values exceed the calibrated scale and saturate; hint: calibrate on batches like these"
            return (reason, False) if any(beyond) else None
        # counts from before the first check, with or without this guard, do not matter
        steps = self.step - inside.steps if inside.steps else 0
        if 0 < steps < _SHARED:
            return None  # judged by a later check, with the steps until then
        new = max(now - before for now, before in zip(beyond, inside.seen, strict=True))
        inside.seen, inside.steps = beyond, self.step
        if steps and new > self.config.max_saturated * steps * ranks:
            return f"values exceeded the delayed scale in {new:.0f} of {steps * ranks} steps", True
        return None

    def _find(self, site: str, row: list[float]) -> tuple[str, bool] | None:
        for place, given, made in ((FORWARD, "x", "y"), (BACKWARD, "dy", "dx or dW")):
            calls, bad_in, bad_weight, bad_out, error, _ = row[place : place + len(FIELDS)]
            if not calls:
                continue
            if bad_out > bad_in + bad_weight:
                began = bad_out - bad_in - bad_weight
                return (
                    f"{made} is not finite in {began:.0f} of {calls:.0f} observed calls with finite {given} and weight",
                    True,
                )
            for bad, what in ((bad_weight, "the weight"), (bad_in, given)):
                if bad:
                    return (
                        f"{what} is not finite in {bad:.0f} of {calls:.0f} observed calls: the cause is elsewhere",
                        False,
                    )
            if error / calls > self.config.max_error:
                which = "fprop" if place == FORWARD else "backward"
                return f"{which} error {error / calls:.3g} exceeds {self.config.max_error:g}", True
        return None

    def _bind(self, site: str, binding: LinearBinding, note: str) -> None:
        self.sites[site].rebind(settle(binding, self.sites[site].weight)[0], note=note)
        self._bound.add(site)

    def _act(self, site: str, reason: str, harmful: bool) -> GuardEvent:
        if not harmful:
            return GuardEvent(self.step, site, "reported", reason)
        if self.switches >= self.config.max_switches:
            return GuardEvent(self.step, site, "capped", f"{reason}; {self.switches} switches are the limit")
        again = self._describe_redo(site)
        self._put_back(site, f"guard: {reason}")
        return GuardEvent(self.step, site, "switched", f"{reason}; {again}")

    def _put_back(self, site: str, note: str) -> None:
        if site in self.chained:
            self._open(site, note)
        else:
            self._bind(site, LinearBinding(), note)

    def _describe_redo(self, site: str) -> str:
        """Say what must be compiled or captured again after switching a site."""
        linear: nn.Module = self.chained[site].linear if site in self.chained else self.sites[site]
        compiled = [
            name or "the model"
            for name, module in self._outer.named_modules()
            if ("_orig_mod" in module._modules or module._compiled_call_impl is not None)
            and any(inner is linear for inner in module.modules())
        ]
        again = "a CUDA graph that captured it must be captured again"
        return f"{' and '.join(compiled)} recompiles in the next step; {again}" if compiled else again

    def _open(self, site: str, note: str) -> None:
        """Return one linear of a chain to high precision; the chain is split."""
        chain = self.chained[site].chain
        for _, layer in list(interactions_of(self.model)):  # a fused interaction needs the whole chain
            if any(module is chain.linears[0] for module in layer.modules()):
                release_interaction(layer)
        chain.split(site)
        self.opened[site] = note
        self._find_chained()

    def _redecide(self, site: str, reason: str) -> GuardEvent:
        assert self.decide is not None
        if self.switches >= self.config.max_switches:
            return GuardEvent(self.step, site, "capped", f"{reason}; {self.switches} switches are the limit")
        if site in self.chained:  # a linear in a chain can only go to high precision
            if self.decide(site) is None:
                return GuardEvent(self.step, site, "reported", f"{reason}; the decision stands")
            again = self._describe_redo(site)
            self._open(site, f"new decision: {reason}")
            return GuardEvent(self.step, site, "rebound", f"{reason}; in high precision now; {again}")
        binding = self.decide(site)
        if binding is None or binding == self.sites[site].binding:
            return GuardEvent(self.step, site, "reported", f"{reason}; the decision stands")
        self._bind(site, binding, f"new decision: {reason}")
        return GuardEvent(self.step, site, "rebound", f"{reason}; now {binding}; {self._describe_redo(site)}")


def _spell(binding: LinearBinding) -> dict[str, Any]:
    """Return a binding as JSON values. What `auto` resolved to is left out, since it is resolved again on loading."""
    spelled: dict[str, Any] = {name: getattr(binding, name) for name in ("save", "weights", "quantizer")}
    spelled["scaling"] = {"history": binding.scaling.history, "margin": binding.scaling.margin}
    for gemm in GEMMS:
        bound: GemmWay | None = getattr(binding, gemm)
        spelled[gemm] = None if bound is None else {
            "backend": bound.backend, "a": str(bound.a), "b": str(bound.b), "fast_accum": bound.fast_accum
        }  # fmt: skip
    return spelled


def _parse(spelled: Mapping[str, Any]) -> LinearBinding:
    """Undo `_spell`."""

    def bound(gemm: str) -> GemmWay | None:
        g = spelled[gemm]
        return None if g is None else GemmWay.parse(f"{g['a']}@{g['b']}/{g['backend']}", fast_accum=g["fast_accum"])

    fprop, dgrad, wgrad = (bound(gemm) for gemm in GEMMS)
    rest = {name: spelled[name] for name in ("save", "weights", "quantizer")}
    return LinearBinding(fprop, dgrad, wgrad, scaling=Scaling(**spelled["scaling"]), **rest)
