"""A kernel that turns NaN into a number is refused: it would hide a model that has broken."""

from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loka.formats import QTensor, Spec, quantize
from loka.kernels import registry
from loka.measure.adapter import adapter_for
from loka.measure.conformance import Conformance
from loka.measure.gate import judge_backend
from loka.measure.inputs import draw
from loka.measure.rounding import judge_rounded

LAYER = "e4m3:tensor@e4m3:tensor>e4m3:tensor:static"
CALLS = [
    *(("fused_linear", f"{LAYER}|{name}|nonorm|bias|keep|transpose|amax", (16, 32, 48)) for name in ("relu", "gelu", "silu", "tanh", "leaky_relu", "none")),
    ("fused_linear", f"{LAYER}|keep|transpose", (16, 32, 256)),
    ("fused_linear", "e4m3:row@e4m3:row>bfloat16|relu|nonorm|bias", (16, 32, 48)),
    ("norm_quantize", "layer>e4m3:row|silu|affine", (16, 48, 0)),
    ("norm_quantize", "rms>e4m3:tensor:static|relu|transpose|bfloat16", (16, 48, 0)),
    ("norm_quantize", "layer>bfloat16|silu", (16, 48, 0)),
    ("grouped_mm", "e4m3:row@e4m3:row|3", (24, 32, 16)),
    ("grouped_mm", "bfloat16|3", (24, 32, 16)),
    ("attention", "16x16", (3, 2, 12)),
    ("masked_attention", "16", (3, 2, 12)),
    ("beam_attention", "4/2x16", (2, 5, 12)),
    ("interaction", "4/4+4", (6, 8, 32)),
    ("dots", "pairs", (6, 8, 16)),
    ("mixed_dots", "mixtures=3+2", (6, 8, 16)),
]  # fmt: skip


def judge(op: str, variant: str, shape: tuple[int, int, int], change: Any) -> Conformance:
    """The reference as a backend whose results are changed."""
    law = registry.backend(op, "reference")

    def changed(name: str) -> Any:
        return lambda *given, **options: change(getattr(law, name)(*given, **options))

    parts = {name: changed(name) for name in ("run", "finish") if hasattr(law, name)}
    backend = SimpleNamespace(supports=law.supports, **parts)
    return judge_backend(op, backend, adapter_for(op).parse(shape, variant), "cpu", moved=False)


def lose_nan(made: Any) -> Any:
    """What a kernel returns, with zeros for NaN."""
    if isinstance(made, QTensor):
        return replace(made, data=lose_nan(made.data.float()).to(made.data.dtype))
    if isinstance(made, Tensor):
        return made.nan_to_num(0.0) if made.is_floating_point() else made
    if isinstance(made, tuple | list):
        return type(made)(*map(lose_nan, made)) if hasattr(made, "_fields") else type(made)(map(lose_nan, made))
    if is_dataclass(made):
        return replace(made, **{field.name: lose_nan(getattr(made, field.name)) for field in fields(made)})
    return made


@pytest.mark.parametrize(("op", "variant", "shape"), CALLS)
def test_the_law_passes_and_a_kernel_that_loses_nan_does_not(
    op: str, variant: str, shape: tuple[int, int, int]
) -> None:
    verdict = judge(op, variant, shape, lambda made: made)
    assert verdict, verdict.reason
    verdict = judge(op, variant, shape, lose_nan)
    assert not verdict
    assert "on nan_row operands" in verdict.reason


def test_infinity_is_not_nan() -> None:
    """E5M2 has both."""
    exact = torch.tensor([[1.0, torch.nan, 2.0]], dtype=torch.float64)
    q = quantize(exact.float(), Spec.parse("e5m2:tensor:static"), scale=torch.ones(()))
    assert judge_rounded(q, exact, torch.zeros_like(exact))
    wrong = replace(q, data=q.data.float().nan_to_num(torch.inf).to(q.data.dtype))
    assert not judge_rounded(wrong, exact, torch.zeros_like(exact))


@pytest.mark.parametrize(("op", "variant", "shape"), CALLS)
def test_a_nan_in_the_wrong_place_is_seen(op: str, variant: str, shape: tuple[int, int, int]) -> None:
    def spread(made: Any) -> Any:
        """All of a result is NaN where one element is."""
        if isinstance(made, Tensor) and made.is_floating_point() and made.element_size() > 1 and made.isnan().any():
            return torch.full_like(made, torch.nan)
        if isinstance(made, QTensor) and made.data.float().isnan().any():
            return replace(made, data=torch.full_like(made.data.float(), torch.nan).to(made.data.dtype))
        if isinstance(made, tuple | list):
            return type(made)(*map(spread, made)) if hasattr(made, "_fields") else type(made)(map(spread, made))
        if is_dataclass(made) and not isinstance(made, QTensor):
            return replace(made, **{field.name: spread(getattr(made, field.name)) for field in fields(made)})
        return made

    assert not judge(op, variant, shape, spread)


def test_the_exact_result_of_a_set_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, computed = adapter_for("dots"), []
    exact = adapter.exact
    monkeypatch.setattr(adapter, "exact", lambda call, operands: computed.append(1) or exact(call, operands))
    assert judge("dots", "pairs", (6, 8, 16), lambda made: made)
    assert len(computed) == 6  # five sets, and the one with a NaN


def test_dropout_may_take_a_nan_away() -> None:
    adapter = adapter_for("fused_linear")
    call = adapter.parse((16, 32, 48), f"{LAYER}|relu|nonorm|keep")
    assert adapter.shows_nan(call)
    assert not adapter.shows_nan(replace(call, dropout=True))
    assert not adapter.shows_nan(adapter.parse((16, 32, 48), f"dgrad {LAYER}|relu"))


def test_the_row_with_a_nan_is_in_the_middle() -> None:
    assert draw(9, 5, distribution="nan_row").isnan().nonzero().tolist() == [[4, 2]]
