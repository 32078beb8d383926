"""Keep torch's fused encoder layer from bypassing modules that a mod changed.

In eval mode without gradients, nn.TransformerEncoderLayer passes the weights of its linears and norms to one fused
kernel and calls none of these modules. But a BlockNorm has no weight to pass, and a swapped activation would not run.
torch takes the regular path if anything inside the layer has a hook, so a changed layer gets a no-op hook.
nn.TransformerEncoder packs padded batches only for the fused kernel, so packing is switched off too, and padded
positions are zeroed as it would have done (`loka.nn.padding`). All of this is in the journal and undone with the mods.
`convert` does the same for its own linears, independently (`loka.lowp.fast_path`).
"""

from typing import Any

from torch import Tensor, nn

from loka.mods.journal import Hook, Mark, journal_of
from loka.nn.padding import ZeroPadding


class OrdinaryPath:
    """A forward-pre hook whose mere presence disables the fused path."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing, but raise if an encoder outside the modified model still packs its batches."""
        if args and isinstance(args[0], Tensor) and args[0].is_nested:
            raise ValueError(
                "a modified nn.TransformerEncoderLayer got a nested tensor from the nn.TransformerEncoder around it; "
                "hint: apply the mods to the encoder or the whole model, or build the encoder with enable_nested_tensor=False"
            )


def keep_ordinary_paths(model: nn.Module) -> None:
    """Disable the fused path of every encoder layer in which the model's journal records a change."""
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
    """Return True if the model contains an nn.TransformerEncoderLayer."""
    return any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules())


def _any_inside(name: str, sites: set[str]) -> bool:
    return any(site == name or not name or site.startswith(f"{name}.") for site in sites)
