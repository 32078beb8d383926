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
    running: list[str] = []
    found: dict[str, str] = {}

    def note(why: str | None) -> str:
        name = running[-1] if running else ""
        if why and left is not None:
            left.add(name)
        elif why is not None and found.get(name) != "":
            found[name] = why
        return name

    if not run_example(editor, mode(note), running):
        return []
    for name, why in found.items():
        if why:
            editor.leave(name, why)
    return [(name, module) for name, module in editor.modules() if found.get(name) == ""]


def run_example(
    editor: Editor, mode: TorchFunctionMode, running: list[str], enter: Callable[[str, Any], None] | None = None
) -> bool:
    """Run the example in eval mode, without gradients, under a torch function mode that learns whose forward is running.

    Args:
        editor: the model's editor. If the example fails, the reason is reported here.
        mode: the mode.
        running: holds the names of the modules whose forwards are running, the outermost first.
        enter: called before a module's forward with its name and positional arguments.

    Returns:
        Whether the example ran to its end.
    """

    def make_hook(name: str) -> Callable[[nn.Module, Any], None]:
        def begin(module: nn.Module, args: Any) -> None:
            if enter is not None:
                enter(name, args)
            running.append(name)

        return begin

    def end(*_: Any) -> None:
        running.pop()

    try:
        with undisturbed(editor.model), torch.no_grad(), ExitStack() as stack:
            for name, module in editor.model.named_modules():
                if not is_scripted(module):
                    stack.callback(module.register_forward_pre_hook(make_hook(name)).remove)
                    stack.callback(module.register_forward_hook(end, always_call=True).remove)
            stack.enter_context(mode)
            set_mode(editor.model, False)
            call_model(editor.model, editor.example)
    except Exception as error:  # whatever a user's forward raises
        editor.leave("", f"the model failed on the example: {type(error).__name__}: {error}")
        return False
    return True


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
