"""Load checkpoints of the original model into the modified one.

    notes = mods.load_state_dict(model, state)         state of the original, or of the modified model
    notes = mods.load_checkpoint(model, "step-00001000")

The changes that mods made to parameters are repeated on the checkpoint's tensors: a folded gain is folded into the
checkpoint's own weight, a dropped bias is left out. The notes list every entry that was moved or dropped. With an
architecture change, the result is a starting point for training and not the original function.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from loka.mods.journal import Fold, journal_of
from loka.nn.wrapping import unwrap


def adapt_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Convert a state_dict of the original model to one that the modified model can load.

    Args:
        model: the modified model.
        state: the original model's state_dict. One of the modified model itself is returned as it is.

    Returns:
        The adapted state_dict, and one note for each entry that was moved or dropped.

    Example:
        >>> adapted, lost = loka.mods.adapt_state_dict(model, torch.load("weights.pt"))
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
        model: the modified model.
        state: a state_dict of either.

    Returns:
        One note for each entry that was moved or dropped.

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
    """Load the weights of the original or of the modified model from a safetensors file. Pickles are not read.

    Args:
        model: the modified model.
        path: a .safetensors file, or a checkpoint folder that contains model.safetensors.

    Returns:
        One note for each entry that was moved or dropped.

    Example:
        >>> loka.mods.load_checkpoint(model, "runs/x/checkpoints/step-00000020")
    """
    from safetensors.torch import load_file

    path = Path(path)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file() or file.suffix != ".safetensors":
        raise ValueError(f"{path} is neither a .safetensors file nor a checkpoint folder with model.safetensors")
    return load_state_dict(model, load_file(file))
