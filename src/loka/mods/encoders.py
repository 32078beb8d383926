"""Keep torch's fused encoder layer from going past what a mod changed.

In eval mode and without gradients nn.TransformerEncoderLayer hands the weights of its linears and norms to one fused kernel and calls none of them: a norm that became a
BlockNorm has no weight to hand over, an activation that was swapped would not be the one that runs. torch takes the ordinary path where anything inside the layer has a
hook, so a layer in which a mod changed something gets one that does nothing else; the nn.TransformerEncoder around it packs padded batches for that kernel alone, so this is
switched off with it, and the zeros it left for the padding are put there (`loka.nn.padding`). All are steps of the journal and undone with the mods. `convert` does the same for its own linears (`loka.lowp.fast_path`), each without the other.
"""

from typing import Any

from torch import Tensor, nn

from loka.mods.journal import Hook, Mark, journal_of
from loka.nn.padding import ZeroPadding


class OrdinaryPath:
    """A forward-pre hook whose presence is its effect."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nothing, unless an encoder that was not seen packs its batches all the same."""
        if args and isinstance(args[0], Tensor) and args[0].is_nested:
            raise ValueError(
                "a modified nn.TransformerEncoderLayer got a nested tensor from the nn.TransformerEncoder around it; "
                "hint: apply the mods to the encoder or the whole model, or build the encoder with enable_nested_tensor=False"
            )


def keep_ordinary_paths(model: nn.Module) -> None:
    """Close the fused path of every encoder layer in which the journal has a change.

    Args:
        model: with the change made, and written in its journal.
    """
    steps = journal_of(model)
    closed = {step.name for step in steps if isinstance(step, Hook) and isinstance(step.hook, OrdinaryPath)}
    sites = {name for step in steps for name in (getattr(step, "name", None), *getattr(step, "names", ())) if name}
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.TransformerEncoderLayer) and name not in closed and _any_inside(name, sites):
            hook = Hook(name, OrdinaryPath(), before=True)
            hook.apply_to(model)
            steps.append(hook)
            closed.add(name)
    for name, encoder in list(model.named_modules()):
        packs = isinstance(encoder, nn.TransformerEncoder) and getattr(encoder, "use_nested_tensor", False)
        if packs and _any_inside(name, closed):
            assert isinstance(encoder, nn.TransformerEncoder)
            last = f"{name}.layers.{len(encoder.layers) - 1}".removeprefix(".")
            steps.append(Mark(name, "use_nested_tensor", True))
            encoder.__dict__["use_nested_tensor"] = False
            zeros = Hook(last, ZeroPadding(encoder), before=False)
            zeros.apply_to(model)
            steps.append(zeros)


def has_encoders(model: nn.Module) -> bool:
    """Whether there is any layer with a fused path.

    Args:
        model: any module.
    """
    return any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules())


def _any_inside(name: str, sites: set[str]) -> bool:
    return any(site == name or not name or site.startswith(f"{name}.") for site in sites)
