"""A backend with wishes, for machines without a GPU: the reference behind a layout that pads and reorders, as libraries ask for it. It counts how often it lays out."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.backend import YES
from loka.kernels.prepared import laid_out, with_layout
from loka.kernels.scaled_mm import reference


def padding_backend() -> SimpleNamespace:
    """Rows and columns to multiples of 16, scales one per row; `count` is the number of operands laid out so far."""
    backend = SimpleNamespace(count=0)

    def lay(b: QTensor, a: Spec) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            backend.count += 1
        n, k = b.shape
        data = F.pad(b.data.contiguous().view(torch.uint8), (0, -k % 16, 0, -n % 16)).view(b.data.dtype)
        return data, F.pad(b.scale.expand(n, 1), (0, 0, 0, -n % 16), value=1.0)

    def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
        data, scale = laid_out(b, "padding", a.spec, lay)
        (_, k), n = a.shape, b.shape[0]
        product = a.dequantize() @ (data.float() * scale).T[:k, :n]
        return product if product.dtype == out_dtype else product.to(out_dtype)

    backend.supports = lambda call, device: YES
    backend.run = run
    backend.prepare = lambda weight, a: with_layout(weight, "padding", a, lay)
    return backend


def in_place_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Register it under the one name every machine can run."""
    backend = padding_backend()
    registry.load("scaled_mm")
    monkeypatch.setitem(registry._LOADED, "scaled_mm.reference", backend)  # type: ignore[arg-type]
    assert registry.backend("scaled_mm", "reference") is not reference
    return backend
