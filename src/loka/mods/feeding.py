"""Find what produces the input of a linear, back to the nearest modules with parameters.

From the input of a site the flow is followed backwards, through operations and modules without parameters (activations,
dropout, reshapes, concatenations), to the producers:

    a linear or another module with parameters      its bias, if it has one, is part of the input's mean
    a norm                                          `block_norm` can replace it; its bias is part of the mean
    an input of the model                           raw data: no mod before the site can change it
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from loka.mods.norms import find_norms, refuse_norm
from loka.nn import BlockNorm
from loka.nn.wrapping import plain_name, unwrap
from loka.units.flow import Call, Flow
from loka.units.recording import record

NEEDS_FEEDING = ("block_norm", "no_bias")


@dataclass(frozen=True)
class Feeding:
    """A model and its recorded flow."""

    model: nn.Module
    flow: Flow

    @classmethod
    def of(cls, model: nn.Module, example: Any = None) -> "Feeding":
        """Record the flow by running the model once. Raises ValueError if there is no example or it does not run."""
        inner = unwrap(model)
        flow = record(inner, example)
        if not isinstance(flow, Flow):
            raise ValueError(f"what feeds a site is read off a run of the model: {flow.reason}")
        return cls(inner, flow)

    def fits(self, mod: str, site: str) -> bool:
        """Return True if a mod of NEEDS_FEEDING has something to change before a linear (`site`: its plain name)."""
        calls = [call for call in self.flow.calls if call.site is not None and plain_name(call.site) == site]
        makers = [list(self._makers(call)) for call in calls]
        if not calls or any(maker is None for found in makers for maker in found):
            return False  # the site was not called, or it reads raw data
        modules = {self.model.get_submodule(maker) for found in makers for maker in found if maker is not None}
        if mod == "block_norm":
            norms = tuple(kind for kind in find_norms(self.model) if not issubclass(kind, BlockNorm))
            return any(isinstance(module, norms) and refuse_norm(module) is None for module in modules)
        return any(isinstance(getattr(module, "bias", None), Tensor) for module in modules)

    def _makers(self, call: Call) -> Iterator[str | None]:
        """Yield the sites that produced a call's input; None for raw data."""
        waiting, seen = list(call.inputs), set(call.inputs)
        while waiting:
            value = waiting.pop()
            made = self.flow.maker(value)
            if made is None:
                if self.flow.floating[value] and value not in self.flow.owned:
                    yield None
            elif made.site is not None and self._is_producer(made.site):
                yield made.site
            else:
                waiting.extend(source for source in made.inputs if source not in seen)
                seen.update(made.inputs)

    def _is_producer(self, site: str) -> bool:
        """Return True if a module has parameters or is a norm (which may have none)."""
        module = self.model.get_submodule(site)
        return next(module.parameters(), None) is not None or isinstance(module, (BlockNorm, *find_norms(self.model)))
