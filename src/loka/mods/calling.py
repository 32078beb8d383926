"""Calling: in which modules' forwards the example calls a function that a mod computes otherwise.

Such a function belongs to no module: `torch.einsum` in the middle of a forward. A torch function mode sees the call (`Note`), hooks say whose forward is running, and the mod puts its class in front
of that module.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from loka.mods.editor import Editor
from loka.nn.wrapping import is_scripted
from loka.units.example import call_model
from loka.units.undisturbed import set_mode, undisturbed

Note = Callable[[str], None]  # what a mode calls where it finds something: with nothing, or with the reason to leave it


def find_callers(
    editor: Editor, mode: Callable[[Note], TorchFunctionMode], *, left: set[str] | None = None
) -> list[tuple[str, nn.Module]]:
    """Run the example under a mode.

    Args:
        editor: of the model; where the example does not run, it is told why nothing is changed.
        mode: makes the mode, given what to call where it finds something. What it finds and leaves is told to the editor.
        left: takes the names of modules in which something was left, instead of the editor.

    Returns:
        The innermost modules whose forwards it found something in, with their names.
    """
    if editor.example is None:
        editor.leave("", "what its forwards multiply is not known; pass example=")
        return []
    names = {id(module): name for name, module in editor.model.named_modules()}
    running: list[str] = []
    found: dict[str, str] = {}

    def enter(module: nn.Module, _: Any) -> None:
        running.append(names[id(module)])

    def leave(*_: Any) -> None:
        running.pop()

    def note(why: str) -> None:
        name = running[-1] if running else ""
        if why and left is not None:
            left.add(name)
        elif found.get(name) != "":
            found[name] = why

    try:
        with undisturbed(editor.model), torch.no_grad(), ExitStack() as stack:
            for module in (m for m in editor.model.modules() if not is_scripted(m)):
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(mode(note))
            set_mode(editor.model, False)
            call_model(editor.model, editor.example)
    except Exception as error:  # whatever a user's forward raises
        editor.leave("", f"the model failed on the example: {type(error).__name__}: {error}")
        return []
    for name, why in found.items():
        if why:
            editor.leave(name, why)
    return [(name, module) for name, module in editor.modules() if found.get(name) == ""]
