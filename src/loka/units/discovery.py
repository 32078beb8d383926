"""Find the units of a model by running it on an example and following the output of each linear.

A chain is a sequence of linears in which each output is read only by the next linear, with at most a norm, an
activation and dropout in between. How the model is written does not matter (nn.Sequential, a custom class, attributes
called in order), only what the example shows (`loka.units.flow`). Nothing is changed here.

The reason a chain ends is recorded for every linear: two readers, an addition, a norm over another dimension, a linear
that must stay in high precision. One execution proves nothing about paths that other data may take, so a linear that
the example calls more than once is never put in a chain.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from torch import nn

from loka.lowp.interaction import refuse_interaction
from loka.lowp.linear import refuse
from loka.nn import BLOCK, BlockNorm, HardSwish
from loka.nn.replacing import is_watched, runs_as
from loka.nn.wrapping import named_sites, own_parameters, plain_name, unwrap
from loka.records.prose import spell_part
from loka.records.unit import CollectivePlan, GradientScales, LinkPlan, TablePlan, UnitPlan
from loka.units.flow import STEP, Call, Flow, prediction_linears
from loka.units.following import Following, norm_kind
from loka.units.paths import find_holders, find_shared, see_paths
from loka.units.tables import find_collectives, find_tables

ModuleFilter = Callable[[nn.Module, str], bool]
NARROW = 64  # a linear with fewer inputs or outputs does not fill an FP8 tile
PROTECTED = "loka_protected"  # attribute that keeps a module in high precision; set by the mod `protect_intermediates`
_BYPASSED = (
    "its weight is read without calling the module, so its input is not seen; "
    "hint: module(x), not module.forward(x) or a function of its weight"
)


@dataclass(frozen=True)
class Discovered:
    """The chains of a model, and the reason for every linear that is in none.

    Args:
        units: chains, in the order they run.
        alone: linears that are in no chain, with the reason.
        by_themselves: those of `alone` that cannot be in a chain but can be converted individually: they are called
            several times, have hooks, or share their weight.
        rows: for every linear that was called, the rows of each call.
        ends: for the last linear of every chain, why the chain ends there.
        tables: the embedding tables in their current format.
        collectives: what the ranks of this model would send each other, in its current format.

    Example:
        >>> print(discover(model, batch))
    """

    units: list[UnitPlan] = field(default_factory=list)
    alone: dict[str, str] = field(default_factory=dict)
    by_themselves: list[str] = field(default_factory=list)
    rows: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    tables: list[TablePlan] = field(default_factory=list)
    collectives: list[CollectivePlan] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{unit.name}: {' -> '.join(unit.linears)}; ends: {self.ends[unit.linears[-1]]}" for unit in self.units
        ]
        lines += [f"{name}: alone, {why}" for name, why in self.alone.items()]
        parts: list[TablePlan | CollectivePlan] = [*self.tables, *(c for c in self.collectives if c.codec != "fp32")]
        return "\n".join([*lines, *(f"{part.name}: {spell_part(part)}" for part in parts)])


def discover(
    model: nn.Module,
    example: Any = None,
    *,
    serving: bool = False,
    narrow: int = NARROW,
    linears: int = 0,
    gradient: GradientScales | None = None,
    module_filter_fn: ModuleFilter | None = None,
) -> Discovered:
    """Find the units of a model.

    Args:
        model: any nn.Module, wrapped or not.
        example: one input; a tuple is *args, a dict **kwargs. Models of this package need none. `Steps` run the model
            with their own functions, for models that take more than one path.
        serving: find units for inference, where dropout has no effect and does not end a chain.
        narrow: linears with fewer inputs or outputs are not put in chains.
        linears: make a standalone linear a unit if it has at least this many inputs and outputs; 0 for never.
        gradient: how gradients are scaled. None means `delayed` for chains whose kernels write quantized gradients,
            where a known scale saves a pass over the data, and `tensor` for the others.
        module_filter_fn: `f(module, name)`; linears for which it is false are not taken.

    Returns:
        The chains, and why the other linears are in none.

    Raises:
        ValueError: the model fails on the example, or there is none.

    Example:
        >>> print(discover(model, batch))
        over.0: over.0 -> over.2 -> over.4; ends: over.6: it is a prediction layer
        over.6: alone, it is a prediction layer
    """
    inner, searches = unwrap(model), []
    held = find_holders(inner)
    # training mode too: an auxiliary loss may read a module's output only there
    for mode, flows in see_paths(inner, example, (False,) if serving else (False, True)).items():
        named = [_with_plain_names(flow) for flow in flows]
        shared = find_shared(named)
        searches += [
            _Search(inner, _Path(flow, mode, shared, held), serving, narrow, linears, module_filter_fn)
            for flow in named
        ]
    found = _find(searches, _Options(serving, linears, gradient))
    return replace(found, tables=find_tables(inner), collectives=find_collectives(inner))


def _with_plain_names(flow: Flow) -> Flow:
    """Return the flow with the unwrapped model's names, for blocks that are compiled or checkpointed individually."""
    calls = [
        replace(call, site=None if call.site is None else plain_name(call.site), inside=plain_name(call.inside))
        for call in flow.calls
    ]
    return replace(flow, calls=calls, outside_reads=frozenset(plain_name(name) for name in flow.outside_reads))


@dataclass(frozen=True)
class _Options:
    """What the caller asked for, see `discover`."""

    serving: bool
    linears: int
    gradient: GradientScales | None


@dataclass(frozen=True)
class _Path:
    """The flow of one execution, and what is known about its modules from elsewhere."""

    flow: Flow
    training: bool
    shared: set[str]  # modules that follow something else on another path
    held: dict[str, str]  # modules that a module outside of the model holds too, with its type


def _find(searches: "list[_Search]", options: _Options) -> Discovered:
    """Assign every linear to one unit or to none, so that it holds on all paths."""
    found, modules, taken = Discovered(), searches[0].modules, set[str]()
    called = {id(modules[site]) for search in searches for site in search.calls}
    read = {name for search in searches for name in search.flow.outside_reads}
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and id(module) not in called:
            bypassed = f"{name}.weight" in read
            found.alone[name] = refuse(module) or (
                _BYPASSED if bypassed else "it was not called; hint: use an example, or batches, that call it"
            )
    for search in searches:
        others = [other for other in searches if other is not search]
        for site, calls in search.calls.items():
            if calls[0].linear:
                found.rows.setdefault(site, [math.prod(search.flow.shapes[call.outputs[0]][:-1]) for call in calls])
        for call in search.flow.calls:
            if call.site is None or not call.linear or call.site in taken or call.site in found.alone:
                continue
            meet = [s for s in searches if call.site in s.calls]
            if why := next((why for s in meet if (why := s.refuse(call.site))), None):
                found.alone[call.site] = why
                if all(s.refuse(call.site, in_chain=False) is None for s in meet):
                    found.by_themselves.append(call.site)
                continue
            links, end = search.agree(call, others)
            taken.update(link.linear for link in links)
            single = len(links) == 1 and links[0].activation == "none" and links[0].norm == "none"
            if single and not 0 < options.linears <= min(links[0].k, links[0].n):
                found.alone[call.site] = f"stands alone: {end}"
            else:
                bounded = all(s.is_bounded(one) for s in meet for one in s.calls[call.site])
                found.units.append(_make_unit(links, bounded, search.find_around(links, bounded), options))
                found.ends[links[-1].linear] = end
    return found


class _Search:
    """The search for chains in one flow."""

    def __init__(
        self, model: nn.Module, path: _Path, serving: bool, narrow: int, least: int, keep: ModuleFilter | None
    ) -> None:
        self.path, self.serving, self.narrow, self.keep = path, serving, narrow, keep
        self.least = least or narrow  # of a linear that stands alone
        flow = self.flow = path.flow
        self.modules = dict(named_sites(model))
        self.prediction = frozenset(prediction_linears(flow))
        self.watched = [name for name, module in self.modules.items() if module._modules and is_watched(module)]
        self.calls: dict[str, list[Call]] = {}
        self.readers: dict[int, list[Call]] = {}
        for call in flow.calls:
            if call.site is not None:
                self.calls.setdefault(call.site, []).append(call)
            for value in dict.fromkeys(call.inputs):
                self.readers.setdefault(value, []).append(call)
        counts: dict[int, int] = {}
        for module in {id(m): m for m in self.modules.values()}.values():
            for parameter in own_parameters(module):
                counts[id(parameter)] = counts.get(id(parameter), 0) + 1
        self.tied = {key for key, count in counts.items() if count > 1}

    def agree(self, call: Call, others: "list[_Search]") -> tuple[list[LinkPlan], str]:
        """Return the chain that starts at a linear, as far as all modes and paths agree on it, and why it ends."""
        links, end = self.walk(call)
        for other in others:
            theirs = other.calls.get(call.site or "", [])
            if not theirs:  # this path does not call the linear, but may call a later one of the chain
                at = next((n for n, link in enumerate(links) if link.linear in other.calls), len(links))
                if at < len(links):
                    end = f"{links[at].linear} is called without it on another path"
                    links = [*links[: at - 1], links[at - 1].as_last()]
                continue
            seen, why = other.walk(theirs[0]) if len(theirs) == 1 else ([], f"it is called {len(theirs)} times")
            same = 0
            while same < min(len(links), len(seen)) and _agree_but_for_calls(links[same], seen[same]):
                links[same] = seen[same]
                same += 1
            if same == len(links):
                continue
            # end the chain at the first linear on which the paths disagree, without norm and activation
            reached = same < len(seen) and links[same].linear == seen[same].linear
            if reached or same == 0:
                links = [*links[:same], LinkPlan(linear=links[same].linear, k=links[same].k, n=links[same].n)]
            else:
                links = [*links[: same - 1], links[same - 1].as_last()]
            end = f"{'on another path' if other.path.training == self.path.training else 'in training'}: {why}"
        return links, end

    def refuse(self, site: str, *, in_chain: bool = True) -> str | None:
        """Return why a linear cannot be in a chain or, with `in_chain=False`, cannot be converted individually."""
        module = self.modules[site]
        if reason := refuse(module):
            return reason
        assert isinstance(module, nn.Linear)
        if self.keep is not None and not self.keep(module, site):
            return "excluded by module_filter_fn"
        if getattr(module, PROTECTED, None):
            return f"protected: {getattr(module, PROTECTED)}"
        if site in self.prediction:
            return "it is a prediction layer"
        narrow = self.narrow if in_chain else min(self.narrow, self.least)
        if min(module.in_features, module.out_features) < narrow:
            return f"{module.in_features} x {module.out_features}: narrower than {narrow}"
        return self._refuse_in_chain(site, module) if in_chain else None

    def _refuse_in_chain(self, site: str, module: nn.Linear) -> str | None:
        if any(id(p) in self.tied for p in module.parameters()):
            return "it shares its weight"
        if self._is_read_elsewhere(site):
            return "its weight is read elsewhere too"
        if is_watched(module):
            return "it has hooks that would see other tensors"
        if any(value in self.flow.nested for call in self.calls[site] for value in (*call.inputs, *call.outputs)):
            return "it runs on nested tensors"
        if len(self.calls[site]) != 1:
            return f"it is called {len(self.calls[site])} times"
        return None

    def _is_read_elsewhere(self, site: str) -> bool:
        """Check whether the forward reads, or writes, a module's parameters: a chain reads all of them at its start."""
        return bool({f"{site}.weight", f"{site}.bias"} & self.flow.outside_reads)

    def walk(self, call: Call) -> tuple[list[LinkPlan], str]:
        """Follow one linear to the end of its chain."""
        links: list[LinkPlan] = []
        while True:
            assert call.site is not None
            link, following, end = self._link(call)
            if following is None:
                links.append(link.as_last())
                return links, end
            links.append(link)
            call = following

    def _link(self, call: Call) -> tuple[LinkPlan, Call | None, str]:
        """Return a linear with what follows it, and the call of the next linear or why the chain ends."""
        linear = self.modules[call.site or ""]
        assert isinstance(linear, nn.Linear)
        state = Following(call.site or "", linear)
        value = call.outputs[0]
        while True:
            if value in self.flow.results:
                return state.link(), None, "it is a result of the model"
            readers = self.readers.get(value, [])
            if len(readers) != 1 or readers[0].inputs.count(value) != 1:
                return state.link(), None, f"its output is read by {len(readers)} operations"
            reader = readers[0]
            if why := self._refuse_reader(call, reader, value):
                return state.link(), None, why
            if self._is_next(reader, value):
                return state.link(), reader, ""
            if why := self._take(reader, value, state):
                return state.link(), None, why
            value = reader.outputs[0]

    @staticmethod
    def _is_next(reader: Call, value: int) -> bool:
        """Check whether a call is a linear that reads the value and nothing else."""
        return reader.site is not None and reader.linear and reader.inputs == (value,)

    def _refuse_reader(self, call: Call, reader: Call, value: int) -> str | None:
        """Return why the only call that reads a value cannot be in the chain of the linear `call`, whatever it is."""
        if watched := _find_between(self.watched, call, reader):
            return f"{watched} has hooks that would see other tensors"
        if part := _find_between(self.path.held, call, reader):
            return f"{part} is a part of another model too, a {self.path.held[part]}, which calls it without this"
        if reader.in_function != call.in_function:
            return (
                f"{reader.site or reader.op} follows it across the border of an autograd function, "
                "such as a reentrant checkpoint"
            )
        if reader.grad != call.grad:
            return f"{reader.site or reader.op} follows it where torch.no_grad begins or ends"
        if not self._is_next(reader, value):
            return None
        assert reader.site is not None
        if why := self.refuse(reader.site):
            return f"{reader.site}: {why}"
        mine, theirs = (self.flow.dtypes[one.outputs[0]] for one in (call, reader))
        if mine != theirs:  # a chain has one
            return f"{reader.site} computes in {theirs}, it in {mine}: autocast begins or ends between them"
        return None

    def _take(self, reader: Call, value: int, state: Following) -> str | None:
        """Add a norm, an activation or a dropout to the link, or return why this is not possible."""
        where = reader.site or f"{reader.op} in {reader.inside or 'the model'}"
        if len(reader.outputs) != 1 or reader.inputs != (value,):
            return f"{where} follows it"
        if reader.site is None and reader.dropout is not None and reader.inside != STEP:
            return state.take_dropout(reader.dropout, where, reader.inside, caller=reader.inside, serving=self.serving)
        if reader.site is None:
            if reader.activation is None or state.activation != "none" or reader.inside == STEP:
                return f"{where} follows it"
            return state.take_call(*reader.activation, where, reader.inside, serving=self.serving)
        module = self.modules[reader.site]
        if is_watched(module):
            return f"{where} has hooks that would see other tensors"
        if getattr(module, PROTECTED, None):
            return f"{where} is protected"
        if self._is_read_elsewhere(reader.site):
            return f"the weight of {where} is read elsewhere too"
        again = len(self.calls[reader.site]) != 1 or reader.site in self.path.shared
        if again and reader.inside == STEP:
            return f"{where} is used more than once"
        if again and norm_kind(module, state.linear.out_features) is not None:
            return f"{where} is used more than once"
        if isinstance(module, nn.BatchNorm1d) and (not self.serving or len(self.flow.shapes[value]) != 2):
            what = "normalizes by the batch in training" if not self.serving else "normalizes along another dimension"
            return f"{where} ({type(module).__name__}) {what}"
        return state.take(reader.site, module, serving=self.serving, caller=reader.inside if again else None)

    def find_around(self, links: list[LinkPlan], bounded: bool) -> str | None:
        """Return the name of the layer whose interactions can be fused around a chain, if there is one."""
        linears = [self.modules[link.linear] for link in links]
        for name, module in self.modules.items():
            if links[0].linear.startswith(f"{name}.fmb.mlp.") and name:
                return None if refuse_interaction(module, linears, bounded_input=bounded) else name
        return None

    def is_bounded(self, call: Call) -> bool:
        """Check whether the input comes from a BlockNorm, with at most reshapes and activations in between."""
        makers = self.flow.makers
        at = makers.get(call.inputs[0])
        while at is not None:
            if at.site is None:
                if at.op not in ("view", "_unsafe_view", "clone", "_to_copy", "alias", "detach"):
                    return False
            else:
                module = self.modules[at.site]
                if runs_as(module, BlockNorm):
                    assert isinstance(module, BlockNorm)
                    return module.block <= BLOCK
                if not runs_as(module, nn.ReLU, nn.SiLU, HardSwish, nn.Hardswish, nn.Identity, nn.Flatten):
                    return False
            at = makers.get(at.inputs[0]) if at.inputs else None
        return False


def _find_between(names: Iterable[str], call: Call, reader: Call) -> str | None:
    """Return a module that contains only one of two calls: its input or output would be inside the chain."""
    for name in names:
        inside = [
            f"{at}.".startswith(f"{name}.") or not name
            for at in (call.site or call.inside, reader.site or reader.inside)
        ]
        if inside[0] != inside[1]:
            return name
    return None


def _agree_but_for_calls(evaluated: LinkPlan, trained: LinkPlan) -> bool:
    """Check whether links agree except for functional dropouts, which are not visible in eval mode."""
    if evaluated.dropout_site is not None or trained.dropout_site not in trained.callers:
        return evaluated == trained
    plain = msgspec.structs.replace(trained, dropout=None, dropout_site=None, callers=evaluated.callers)
    return plain == evaluated and set(evaluated.callers) <= set(trained.callers)


def _make_unit(links: list[LinkPlan], bounded: bool, around: str | None, options: _Options) -> UnitPlan:
    between = [link for link in links[:-1] if link.norm != "block"]
    scales = "calibrated" if options.serving else "delayed"
    # in serving the input's scale is calibrated too, so that a compiler can fuse its quantization without an amax pass
    if not between and (bounded or not options.serving):
        scales = "bounded" if len(links) > 1 else "dynamic"
    # where our kernels write the quantized gradient, a known scale saves a pass over their input
    made = bool(between) or (len(links) == 1 and links[0].norm == "none" and links[0].activation != "none")
    gradient = options.gradient or ("delayed" if made else "tensor")
    return UnitPlan(
        name=links[0].linear, links=links, scales=scales, gradient=gradient, bounded_input=bounded, around=around  # type: ignore[arg-type]
    )  # fmt: skip
