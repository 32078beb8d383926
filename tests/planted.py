"""Kernels that are right on the batches at hand and wrong elsewhere, planted in front of the registry's own."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from loka.formats import QTensor
from loka.kernels import registry
from loka.kernels.fused_linear import reference as fused_law
from loka.kernels.quantize import reference as quantize_law
from loka.kernels.scaled_mm import reference as product_law


def plant(monkeypatch: pytest.MonkeyPatch, op: str, law: ModuleType, **changed: Any) -> None:
    """A backend that `auto` prefers: the law, but for some functions."""
    made = ModuleType(f"loka.kernels.{op}.planted")
    vars(made).update({name: value for name, value in vars(law).items() if not name.startswith("__")} | changed)
    monkeypatch.setitem(registry.BACKENDS, op, ("planted", *registry.BACKENDS[op]))
    monkeypatch.setitem(registry._LOADED, f"{op}.planted", made)


def raw(y: QTensor | Tensor) -> Tensor:
    """The elements, as bytes where they are FP8: torch masks no float8."""
    data = y.data if isinstance(y, QTensor) else y
    return data.view(torch.uint8) if data.itemsize == 1 else data


def zero_equal_rows(found: Any, a: QTensor) -> Any:
    """Zeros where a row equals the one before it."""
    rows = raw(a)
    raw(found)[1:][(rows[1:] == rows[:-1]).all(1)] = 0
    return found


def zero_late_rows(found: Any, a: QTensor) -> Any:
    """Zeros beyond row 32, as from a grid of fixed size."""
    raw(found)[32:] = 0
    return found


def layer(defect: Callable[[Any, QTensor], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A layer of a chain with a defect of its result."""

    def run(a: QTensor, b: QTensor, call: Any, **options: Any) -> Any:
        found = fused_law.run(a, b, call, **options)
        defect(found.y, a)
        return found

    return lambda monkeypatch: plant(monkeypatch, "fused_linear", fused_law, run=run)


def product(defect: Callable[[Any, QTensor], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A GEMM with a defect of its result."""

    def run(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        return defect(product_law.run(a, b, **options), a)

    return lambda monkeypatch: plant(monkeypatch, "scaled_mm", product_law, run=run)


def wrap_row_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM whose row scales are those of 16 rows earlier, from row 16 on."""

    def run(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        if a.scale.shape[0] > 16:
            a = replace(a, scale=torch.cat([a.scale[:16], a.scale[:-16]]).contiguous())
        return product_law.run(a, b, **options)

    plant(monkeypatch, "scaled_mm", product_law, run=run)


def spoil_bias_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of backward whose bias gradient is twice what it should be."""

    def dgrad(*given: Any, **options: Any) -> Any:
        found = fused_law.dgrad(*given, **options)
        return replace(found, bias=None if found.bias is None else found.bias * 2)

    plant(monkeypatch, "fused_linear", fused_law, dgrad=dgrad)


def spoil_each_fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantizer that is wrong in one call of five."""
    calls = 0

    def run(*operands: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        found = quantize_law.run(*operands, **options)
        first = found[0] if isinstance(found, tuple) else found
        if calls % 5 == 0 and first is not None:
            raw(first)[-1:] = 1
        return found

    plant(monkeypatch, "quantize", quantize_law, run=run)


# what a chain runs, and what a single linear runs: the op, and a function that plants it
CHAINED = {
    "equal rows": ("fused_linear", layer(zero_equal_rows)),
    "late rows": ("fused_linear", layer(zero_late_rows)),
    "bias gradient": ("fused_linear", spoil_bias_gradient),
    "each fifth": ("quantize", spoil_each_fifth),
}
SINGLE = {
    "equal rows": ("scaled_mm", product(zero_equal_rows)),
    "late rows": ("scaled_mm", product(zero_late_rows)),
    "row scales": ("scaled_mm", wrap_row_scales),
    "each fifth": ("quantize", spoil_each_fifth),
}
