"""Checkpoints of the original model, in the modified one.

    notes = mods.load_state_dict(model, state)         state of the original, or of the modified model
    notes = mods.load_checkpoint(model, "step-00001000")

What a mod did to the parameters it does to a checkpoint's tensors too: a folded gain is folded into the checkpoint's own weight, a dropped bias is left out.
Notes say, entry by entry, what was lost; where a mod is an architecture change the result is a starting point for training, not the original's function.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from loka.mods.journal import Fold, journal_of
from loka.nn.wrapping import unwrap


def adapt_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The state_dict of the original model as the modified one takes it. A state_dict of the modified model itself is returned as it is.

    Args:
        model: modified.
        state: of the original.

    Returns:
        The adapted one, and what was lost on the way.

    Example:
        >>> adapted, lost = loka.mods.adapt_state_dict(model, state)
    """
    model = unwrap(model)
    wanted = set(model.state_dict())
    adapted = dict(state)
    if set(adapted) == wanted:
        return adapted, []
    folded: set[str] = set()
    for step in journal_of(model):
        step.adapt(adapted)
        if isinstance(step, Fold):
            folded.add(step.source)
    if set(adapted) != wanted:
        missing, extra = sorted(wanted - set(adapted)), sorted(set(adapted) - wanted)
        raise ValueError(
            f"the checkpoint is neither of the modified model nor of its original: missing {missing[:5]}, unexpected {extra[:5]}; "
            "hint: apply the mods to a model of the same sizes"
        )
    lost = [key for key in state if key not in adapted]
    notes = [f"{key}: {'moved into the next linear' if key in folded else 'dropped'}" for key in lost]
    return adapted, notes


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Load a state_dict of the original or of the modified model.

    Args:
        model: modified.
        state: either's.

    Returns:
        What was lost or moved.

    Example:
        >>> print(*loka.mods.load_state_dict(model, torch.load("weights.pt")))
    """
    adapted, notes = adapt_state_dict(model, state)
    try:
        unwrap(model).load_state_dict(adapted)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint does not fit the modified model: {error}") from error
    return notes


def load_checkpoint(model: nn.Module, path: str | Path) -> list[str]:
    """Load the weights of the original or of the modified model from a file; no pickle is read.

    Args:
        model: modified.
        path: a .safetensors file, or the folder of a checkpoint that holds model.safetensors.

    Returns:
        What was lost or moved.

    Example:
        >>> loka.mods.load_checkpoint(model, "runs/x/checkpoints/step-00000020")
    """
    from safetensors.torch import load_file

    path = Path(path)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file() or file.suffix != ".safetensors":
        raise ValueError(f"{path} is neither a .safetensors file nor a checkpoint folder with model.safetensors")
    return load_state_dict(model, load_file(file))
