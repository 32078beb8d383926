"""torch.compile for the parts of a model that have one shape.

Compiled are the largest submodules without embedding tables (`loka.nn.EmbeddingTables`, or any embedding with sparse
gradients). A lookup of ragged ids has a new shape in every batch, so tables stay eager. The dense part after them (the
core of a ranker) only sees [batch, n, d]. Each part is compiled with `dynamic=False` and `fullgraph=True`: a graph
break, or more shapes than the compiler's limit, is an error and not a silent fallback to eager code.

`on` raises if nothing can be compiled; `auto` decides and says why. Only the `forward` attribute is replaced, so names,
state_dict and hooks are unchanged, and the original is restored when the run ends. What must run eagerly (the
incomplete batch at the end of an evaluation) sets the compiler's stance to `force_eager`, which runs hooks too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from loka.nn import EmbeddingTables
from loka.training.config import CompileRequest


@dataclass(frozen=True)
class CompileChoice:
    """What was compiled and why, or why nothing was."""

    enabled: bool
    reason: str
    modules: tuple[str, ...] = ()


@contextmanager
def compiled(model: nn.Module, request: CompileRequest, device: torch.device) -> Iterator[CompileChoice]:
    """Compile the parts of `model` for the duration of the block."""
    choice = choose(model, request, device)
    parts = [model.get_submodule(name) for name in choice.modules]
    for part in parts:
        part.forward = torch.compile(part.forward, fullgraph=True, dynamic=False)
    try:
        yield choice
    finally:
        for part in parts:
            part.__dict__.pop("forward", None)


def choose(model: nn.Module, request: CompileRequest, device: torch.device) -> CompileChoice:
    """Decide what to compile, without changing the model."""
    if request == "off":
        return CompileChoice(False, "not asked for")
    if request == "auto" and device.type != "cuda":
        return CompileChoice(False, f"auto: on {device.type!r} compiling costs more than a short run gains")
    names = tuple(find_compilable(model))
    problem = "no submodule has parameters and no embedding table" if not names else find_problem(device)
    if problem is None:
        return CompileChoice(True, f"{request}: a compiled test function ran on {device.type!r}", names)
    if request == "on":
        raise ValueError(
            f"compile='on' cannot be honoured: {problem}; use compile='off', or 'auto' to decide by machine"
        )
    return CompileChoice(False, f"auto: {problem}")


def find_problem(device: torch.device) -> str | None:
    """Return why the compiler does not work here, or None. The only reliable test is to compile and run something."""
    try:
        torch.compile(_double, fullgraph=True, dynamic=False)(torch.ones(2, device=device))
    except Exception as error:  # any failure of the tool chain is an answer
        return f"the compiler does not work here ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    return None


def _double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def find_compilable(module: nn.Module, name: str = "") -> Iterator[str]:
    """Yield the names of the largest submodules with parameters and without a table ('' is the model itself)."""
    if not any(True for _ in module.parameters()):
        return
    # A ModuleList is never called, so compiling it would do nothing.
    container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if not container and not any(_is_table(part) for part in module.modules()):
        yield name
        return
    for child_name, child in module.named_children():
        yield from find_compilable(child, f"{name}.{child_name}" if name else child_name)


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, EmbeddingTables) or (isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse)
