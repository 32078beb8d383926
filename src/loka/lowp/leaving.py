"""Converted modules under exporters that cannot take them: the error says which, and the way on."""

from typing import Any, NoReturn

import torch

_WAY_ON = "hint: loka.export(model, example, 'model.onnx') or 'model.pt2' writes a frozen model without this library's code; loka.revert(model) gives the original back"  # fmt: skip


def refuse_script(name: str) -> NoReturn:
    """torch.jit.script compiles Python sources, and those of a converted module are no TorchScript."""
    raise ValueError(f"{name or 'a linear'} is converted: TorchScript cannot compile it; {_WAY_ON}")


def refuse_export(converted: Any) -> None:
    """torch.onnx.export and torch.export fail far from here, with a message about a type or a constant that is written to.

    Takes what has the name: torch 2.11 compiles anew for every name that is read.
    """
    if _is_exporting():
        raise ValueError(
            f"{converted.name or 'a linear'} is converted: torch.onnx.export and torch.export cannot take its scales and casts; {_WAY_ON}"
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    """Asked outside of what is traced: torch 2.11's compiler takes `is_exporting()` for True wherever it compiles."""
    return torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting()
