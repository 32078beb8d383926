"""Editor: what a mod is given to work with. It finds sites, makes changes through the journal, and writes down what was left and why.

One editor serves one mod on one model. Flow (what feeds what) is recorded when a mod first asks for it, on the example or on the model's own
`example_inputs`, in eval and in training mode; where there is neither, a mod gets the reason instead and does without.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

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
from loka.nn.wrapping import WRAPPER_SEGMENTS, own_parameters, plain_name
from loka.records.mods import ModChange, ModClass, ModLeft
from loka.units.flow import Call, Flow, Sink, Unknown, follow, prediction_linears, record

ModuleFilter = Callable[[nn.Module, str], bool]
Judge = Callable[[ModClass, Sequence[Step]], str | None]  # of one change: why it must be undone
FEW_OUTPUTS = 8  # without a flow, a linear with at most this many outputs is taken for a prediction layer


class Editor:
    """The hands of one mod on one model."""

    def __init__(
        self, model: nn.Module, mod: str, keep: ModuleFilter | None, example: Any, judge: Judge | None = None
    ) -> None:
        self.model, self.mod = model, mod
        self._keep, self._example, self._judge = keep, example, judge
        self._encoders = has_encoders(model)
        self._kept = len(journal_of(model))  # steps that no judge can take back any more
        self._flow: Flow | Unknown | None = None
        self._training_flow: Flow | Unknown | None = None
        self._prediction: frozenset[str] | None = None
        self.changed: list[ModChange] = []
        self.left: list[ModLeft] = []
        self.notes: list[str] = []

    # Looking

    @property
    def example(self) -> Any:
        """The input the model may be run on, or None."""
        return self._example

    def keeps(self, module: nn.Module, name: str) -> bool:
        """Whether the filter lets a module through."""
        return self._keep is None or self._keep(module, name)

    def modules(self, *kinds: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
        """Every module of these kinds (all without any) under its first name; what the filter rejects is left, with that reason."""
        for name, module in list(self.model.named_modules()):
            if (kinds and not isinstance(module, kinds)) or any(part in module._modules for part in WRAPPER_SEGMENTS):
                continue
            if self._lets_through(module, name):
                yield name, module
            else:
                self.leave(name, "module_filter_fn does not let it through")

    def _lets_through(self, module: nn.Module, name: str) -> bool:
        return self._keep is None or self._keep(module, plain_name(name))

    @property
    def flow(self) -> Flow | Unknown:
        """What feeds what, or why that is not known."""
        if self._flow is None:
            self._flow = record(self.model, self._example)
            if isinstance(self._flow, Unknown) and self._example is not None:
                self._flow = self.training_flow  # a model that runs in training mode only
        return self._flow

    @property
    def training_flow(self) -> Flow | Unknown:
        """The same in training mode."""
        if self._training_flow is None:
            self._training_flow = record(self.model, self._example, training=True)
        return self._training_flow

    def find_branch(self, *sites: str) -> str | None:
        """Why the modules at these sites may be passed on other ways than the example's; None where they are always passed together.

        What decides is the forward of every module from the innermost that holds them all down to the ones that call them.
        """
        common = sites[0].split(".")[:-1]
        for site in sites[1:]:
            parts = site.split(".")[:-1]
            same = [a == b for a, b in zip(common, parts, strict=False)]
            common = common[: same.index(False) if False in same else len(same)]
        while common and isinstance(self.model.get_submodule(".".join(common)), (nn.ModuleList, nn.ModuleDict)):
            common.pop()  # its parts are called by the module that holds it
        frames = {
            ".".join(site.split(".")[:count]) for site in sites for count in range(len(common), site.count(".") + 1)
        }
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
        """The calls of an atom that were seen, none where nothing was seen."""
        return [] if isinstance(self.flow, Unknown) else self.flow.calls_of(name)

    def sinks(self, name: str, *, shift: bool = False) -> list[Sink] | str:
        """The linears that alone read what the module makes, or what stands in the way of moving an affine map into them."""
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
        """What else training mode does with it; a model that cannot be run in it, on this example, is believed."""
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

    def is_tied(self, module: nn.Module) -> bool:
        """Whether a parameter of the module is registered elsewhere too."""
        own = {id(p) for p in module.parameters(recurse=False)}
        everywhere = [id(p) for m in self.model.modules() for p in own_parameters(m)]
        return any(everywhere.count(key) > 1 for key in own)

    @property
    def prediction(self) -> frozenset[str]:
        """Names of the linears whose output is the model's answer: seen in the flow, else guessed from their few outputs."""
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

    # Changing

    def swap(self, name: str, new: nn.Module, what: str, effect: ModClass) -> None:
        """Another module under all names of the old one."""
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
        """Put a class in front of the module's own; attributes go beside its parameters, outside of the state_dict."""
        module = self.model.get_submodule(name)
        self.log(Reclass(name, mixin, tuple(attributes)))
        module.__class__ = mix(type(module), mixin)
        module.__dict__.update(attributes)

    def hook(self, name: str, hook: Callable[..., Any], *, before: bool) -> None:
        """Change what goes into a module (before) or comes out of it."""
        step = Hook(name, hook, before)
        step.apply_to(self.model)
        self.log(step)

    def exchange(self, first: str, second: str) -> None:
        """Two modules under each other's names."""
        step = Exchange(first, second)
        step.apply_to(self.model)
        self.log(step)

    def drop(self, name: str, attribute: str) -> None:
        """A parameter that is no more; the mod says why with `change`."""
        module = self.model.get_submodule(name)
        old = getattr(module, attribute)
        self.log(Drop(names_of(self.model, module), attribute, old))
        setattr(module, attribute, None)

    def fold(self, fold: Fold) -> None:
        """Move values from one parameter into another."""
        fold.apply_to(self.model)
        self.log(fold)

    def mark(self, name: str, attribute: str, value: Any) -> None:
        """Leave a note on a module for other tools."""
        module = self.model.get_submodule(name)
        self.log(Mark(name, attribute, module.__dict__.get(attribute)))
        module.__dict__[attribute] = value

    def add(self, name: str, child: str, module: nn.Module) -> None:
        """A child that the module had not, over parameters that it has."""
        parent = self.model.get_submodule(name)
        module.train(parent.training)
        parent.add_module(child, module)
        self.log(Add(name, child))

    def log(self, step: Step) -> None:
        """A change that can be undone."""
        journal_of(self.model).append(step)

    # Telling

    def change(self, name: str, what: str, effect: ModClass) -> None:
        """A site was rewritten, by the steps since the last change; where there is a judge who refuses, they are undone."""
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
        """A site was not rewritten."""
        self.left.append(ModLeft(mod=self.mod, site=plain_name(name), why=why))

    def note(self, text: str) -> None:
        """Something a reader must know."""
        if text not in self.notes:
            self.notes.append(text)
