"""Find the modules whose forward calls a function that a mod computes differently, such as `torch.einsum`.

A torch function mode sees the call, and hooks tell whose forward is running. The mod then adds its mixin to that
module.
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

# A mode calls this for every call it finds, with "" if the mod takes it, or with the reason why not. It returns the name
# of the module whose forward is running; with None it does nothing else.
Note = Callable[[str | None], str]


def find_callers(
    editor: Editor, mode: Callable[[Note], TorchFunctionMode], *, left: set[str] | None = None
) -> list[tuple[str, nn.Module]]:
    """Run the example under a torch function mode that looks for certain calls.

    Args:
        editor: the model's editor. If there is no example or it fails, the reason is reported here.
        mode: makes the mode, given the `Note` to call. Calls that the mod does not take are reported to the editor.
        left: if given, the names of modules with calls that the mod does not take are added here instead.

    Returns:
        The innermost modules whose forwards make calls that the mod takes, with their names.
    """
    if editor.example is None:
        editor.leave("", "which products its forwards compute is not known; hint: pass example=")
        return []
    names = {id(module): name for name, module in editor.model.named_modules()}
    running: list[str] = []
    found: dict[str, str] = {}

    def enter(module: nn.Module, _: Any) -> None:
        running.append(names[id(module)])

    def leave(*_: Any) -> None:
        running.pop()

    def note(why: str | None) -> str:
        name = running[-1] if running else ""
        if why and left is not None:
            left.add(name)
        elif why is not None and found.get(name) != "":
            found[name] = why
        return name

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


def is_checkpointed(outside: Any) -> bool:
    """Return True if a checkpoint inside the forward of a mod's module will run this code again in backward.

    It runs again without the mod's function mode, and a non-reentrant checkpoint refuses other saved tensors than those of
    the first time: what is checkpointed there is computed as it is written. Compiled code keeps the mode in the graph.

    Args:
        outside: `find_saving_hooks()` where the forward began.
    """
    return not torch.compiler.is_compiling() and find_saving_hooks() is not outside


def find_saving_hooks() -> Any:
    """Return the innermost hook on tensors that are saved for backward, which is how a checkpoint works; None if there is none, and in compiled code."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]
