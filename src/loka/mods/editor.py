"""Editor: the interface through which a mod finds sites, makes reversible changes, and reports what it left and why.

One editor serves one mod on one model. The flow (which module feeds which) is recorded on first use, from the example
or from the model's own `example_inputs`, in eval and in training mode. With neither, the mod gets the reason instead.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from loka.mods.branching import find_branch
from loka.mods.encoders import has_encoders, keep_ordinary_paths
from loka.mods.journal import (
    Add,
    Drop,
    Exchange,
    Fold,
    Hook,
    Mark,
    Reclass,
    Step,
    Swap,
    journal_of,
    names_of,
    put_module,
    share_hooks,
    undo_to,
)
from loka.nn.mixing import mix
from loka.nn.wrapping import WRAPPER_SEGMENTS, find_holder, own_parameters, plain_name
from loka.records.mods import ModChange, ModClass, ModLeft
from loka.units.flow import Call, Flow, Sink, follow, prediction_linears
from loka.units.recording import Unknown, record

ModuleFilter = Callable[[nn.Module, str], bool]
Judge = Callable[[ModClass, Sequence[Step]], str | None]  # returns why one change must be undone, or None
FEW_OUTPUTS = 8  # without a flow, a linear with at most this many outputs is assumed to be a prediction layer


class Editor:
    """Finds sites for one mod on one model, and records its changes."""

    def __init__(
        self, model: nn.Module, mod: str, keep: ModuleFilter | None, example: Any, judge: Judge | None = None
    ) -> None:
        self.model, self.mod = model, mod
        self._keep, self._example, self._judge = keep, example, judge
        self._encoders = has_encoders(model)
        self._kept = len(journal_of(model))  # number of steps that are accepted and no longer undone by the judge
        self._flow: Flow | Unknown | None = None
        self._training_flow: Flow | Unknown | None = None
        self._prediction: frozenset[str] | None = None
        self.changed: list[ModChange] = []
        self.left: list[ModLeft] = []
        self.notes: list[str] = []

    # Inspecting the model

    @property
    def example(self) -> Any:
        """The input the model may be run on, or None."""
        return self._example

    def keeps(self, module: nn.Module, name: str) -> bool:
        """Return True if the module filter accepts a module."""
        return self._keep is None or self._keep(module, name)

    def modules(self, *kinds: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module of these classes (all if none is given) under its first name.

        Modules that the filter rejects are reported as left.
        """
        for name, module in list(self.model.named_modules()):
            if (kinds and not isinstance(module, kinds)) or any(part in module._modules for part in WRAPPER_SEGMENTS):
                continue
            if self._lets_through(module, name):
                yield name, module
            else:
                self.leave(name, "it is excluded by module_filter_fn")

    def _lets_through(self, module: nn.Module, name: str) -> bool:
        return self._keep is None or self._keep(module, plain_name(name))

    @property
    def flow(self) -> Flow | Unknown:
        """The flow in eval mode, or why it is not known."""
        if self._flow is None:
            self._flow = record(self.model, self._example)
            if isinstance(self._flow, Unknown) and self._example is not None:
                self._flow = self.training_flow  # the model may run in training mode only
        return self._flow

    @property
    def training_flow(self) -> Flow | Unknown:
        """The flow in training mode, or why it is not known."""
        if self._training_flow is None:
            self._training_flow = record(self.model, self._example, training=True)
        return self._training_flow

    def find_branch(self, *sites: str) -> str | None:
        """Return why the modules at these sites may not always be called together, as on the example; None if they are.

        This depends on the forwards from the innermost module that contains all of them down to the direct callers.
        """
        holder = find_holder(sites, self.model)
        depth = holder.count(".") + 1 if holder else 0
        frames = {".".join(site.split(".")[:count]) for site in sites for count in range(depth, site.count(".") + 1)}
        for frame in sorted(frames):
            module = self.model.get_submodule(frame)
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or any(
                part in module._modules for part in WRAPPER_SEGMENTS
            ):
                continue
            if why := find_branch(module):
                return f"{frame or 'the model'}: {why}"
        return None

    def calls(self, name: str) -> list[Call]:
        """Return the recorded calls of a module without children; empty if no flow is known."""
        return [] if isinstance(self.flow, Unknown) else self.flow.calls_of(name)

    def sinks(self, name: str, *, shift: bool = False) -> list[Sink] | str:
        """Return the linears that alone read a module's output, or why an affine map cannot move into them.

        Args:
            name: the module.
            shift: whether the map adds a shift, which cannot pass through dropout.
        """
        if isinstance(self.flow, Unknown):
            return self.flow.reason
        calls = self.flow.calls_of(name)
        if len(calls) != 1 or len(calls[0].outputs) != 1:
            return f"it is used {len(calls)} times" if len(calls) != 1 else "it has several outputs"
        found = follow(self.flow, calls[0].outputs[0], shift=shift)
        if isinstance(found, str):
            return found
        if why := self._refuse_in_training(name, found, shift=shift):
            return why
        for sink in found:
            if why := self._refuse_sink(sink):
                return f"{sink.site} {why}"
        return found

    def _refuse_in_training(self, name: str, sinks: list[Sink], *, shift: bool) -> str | None:
        """Return how training mode differs from eval. If training mode cannot be recorded, eval mode is trusted."""
        flow = self.training_flow
        if isinstance(flow, Unknown):
            return None
        calls = flow.calls_of(name)
        if len(calls) != 1:
            return f"in training it is used {len(calls)} times"
        found = follow(flow, calls[0].outputs[0], shift=shift)
        if isinstance(found, str):
            return f"in training {found}"
        return None if set(found) == set(sinks) else "in training other linears read it"

    def _refuse_sink(self, sink: Sink) -> str | None:
        assert isinstance(self.flow, Flow)
        linear = self.model.get_submodule(sink.site)
        if len(self.flow.calls_of(sink.site)) != 1 or len(names_of(self.model, linear)) != 1:
            return "is used more than once"
        if any(f"{sink.site}.{p}" in self.flow.outside_reads for p in ("weight", "bias")) or self.is_tied(linear):
            return "shares its weight"
        if not self._lets_through(linear, sink.site):
            return "is excluded by module_filter_fn"
        return None

    def has_bias(self, sink: Sink) -> bool:
        """Return True if the linear of a sink has a bias, into which a shift can move."""
        return isinstance(self.model.get_submodule(sink.site).bias, Tensor)

    def is_tied(self, module: nn.Module) -> bool:
        """Return True if another module shares a parameter of this one."""
        own = {id(p) for p in module.parameters(recurse=False)}
        everywhere = [id(p) for m in self.model.modules() for p in own_parameters(m)]
        return any(everywhere.count(key) > 1 for key in own)

    @property
    def prediction(self) -> frozenset[str]:
        """Names of the linears that produce the model's output: read from the flow, else guessed from few outputs."""
        if self._prediction is None:
            self._prediction = self._find_prediction()
        return self._prediction

    def _find_prediction(self) -> frozenset[str]:
        if isinstance(self.flow, Flow):
            return frozenset(prediction_linears(self.flow))
        linears = [(name, m) for name, m in self.model.named_modules() if isinstance(m, nn.Linear)]
        few = [name for name, m in linears if m.out_features <= FEW_OUTPUTS] or [name for name, _ in linears[-1:]]
        if few:
            self.note(f"prediction layers guessed from their few outputs ({', '.join(few)}): {self.flow.reason}")
        return frozenset(few)

    # Changing the model

    def swap(self, name: str, new: nn.Module, what: str, effect: ModClass) -> None:
        """Replace a module under all its names, and record the change."""
        old = self.model.get_submodule(name)
        names = names_of(self.model, old)
        lost = tuple(key for key in old.state_dict() if key not in new.state_dict())
        new.train(old.training)
        share_hooks(old, new)
        for every in names:
            put_module(self.model, every, new)
        self.log(Swap(names, old, lost))
        self.change(name, what, effect)

    def mix(self, name: str, mixin: type[nn.Module], **attributes: Any) -> None:
        """Add a mixin in front of the module's class. The attributes are not part of the state_dict."""
        module = self.model.get_submodule(name)
        self.log(Reclass(name, mixin, tuple(attributes)))
        module.__class__ = mix(type(module), mixin)
        module.__dict__.update(attributes)

    def hook(self, name: str, hook: Callable[..., Any], *, before: bool) -> None:
        """Register a forward-pre hook (`before`) or a forward hook."""
        step = Hook(name, hook, before)
        step.apply_to(self.model)
        self.log(step)

    def exchange(self, first: str, second: str) -> None:
        """Exchange the places of two modules."""
        step = Exchange(first, second)
        step.apply_to(self.model)
        self.log(step)

    def drop(self, name: str, attribute: str) -> None:
        """Set a parameter to None. The mod then reports it with `change`."""
        module = self.model.get_submodule(name)
        old = getattr(module, attribute)
        self.log(Drop(names_of(self.model, module), attribute, old))
        setattr(module, attribute, None)

    def fold(self, fold: Fold) -> None:
        """Move values from one parameter into another."""
        fold.apply_to(self.model)
        self.log(fold)

    def mark(self, name: str, attribute: str, value: Any) -> None:
        """Set an attribute on a module for other tools to read."""
        module = self.model.get_submodule(name)
        self.log(Mark(name, attribute, module.__dict__.get(attribute)))
        module.__dict__[attribute] = value

    def add(self, name: str, child: str, module: nn.Module) -> None:
        """Add a child module that uses parameters which its parent already has."""
        parent = self.model.get_submodule(name)
        module.train(parent.training)
        parent.add_module(child, module)
        self.log(Add(name, child))

    def log(self, step: Step) -> None:
        """Append a step to the journal, so that it can be undone."""
        journal_of(self.model).append(step)

    # Reporting

    def change(self, name: str, what: str, effect: ModClass) -> None:
        """Report that the steps since the last change rewrote a site. If the judge rejects them, they are undone."""
        if self._encoders:
            keep_ordinary_paths(self.model)
        steps = journal_of(self.model)
        why = None if self._judge is None else self._judge(effect, steps[self._kept :])
        if why is not None:
            undo_to(self.model, self._kept)
            self.leave(name, f"was undone: {why}")
            return
        self._kept = len(steps)
        self.changed.append(ModChange(mod=self.mod, site=plain_name(name), effect=effect, what=what))

    def leave(self, name: str, why: str) -> None:
        """Report that a site was not rewritten."""
        self.left.append(ModLeft(mod=self.mod, site=plain_name(name), why=why))

    def note(self, text: str) -> None:
        """Add a note to the summary."""
        if text not in self.notes:
            self.notes.append(text)
