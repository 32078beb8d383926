"""Layers and norms are judged with dropout where they run with it: faults that only dropout shows are found."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.dropout import Dropout
from loka.kernels.fused_linear import reference as fused_law
from loka.kernels.fused_linear.call import DgradCall, FusedCall, GradientCall
from loka.kernels.norm_quantize import reference as norm_law
from loka.kernels.norm_quantize.call import NormCall, NormGradientCall
from loka.measure.conformance import Conformance
from loka.measure.gate import judge_backend

STATIC, DELAYED, TENSOR = (Spec.parse(f"e4m3:tensor{mode}") for mode in (":static", ":delayed", ""))
SIZES = (48, 64, 96)

CALLS: dict[str, Any] = {
    **{f"layer {name}": FusedCall(*SIZES, STATIC, STATIC, STATIC, 0, name, True, True, True, True, dropout=True) for name in ("relu", "leaky_relu", "tanh", "silu", "none")},
    "layer, block norm": FusedCall(*SIZES, STATIC, STATIC, STATIC, 256, "hard_swish", False, True, dropout=True),
    "layer, 16 bits": FusedCall(*SIZES, STATIC, STATIC, torch.bfloat16, 0, "gelu", True, True, dropout=True),
    "layer, dynamic": FusedCall(*SIZES, TENSOR, TENSOR, TENSOR, 0, "gelu", True, True, dropout=True),
    "gradient": GradientCall(48, 64, DELAYED, DELAYED, 0, "relu", True, dropout=True),
    "gradient, block norm": GradientCall(48, 64, DELAYED, DELAYED, 256, "silu", True, dropout=True),
    **{f"dgrad {name}": DgradCall(*SIZES, DELAYED, DELAYED, DELAYED, name, form, True, True, dropout=True) for name, form in (("relu", "y"), ("leaky_relu", "y"), ("sigmoid", "y"), ("gelu", "scaled"), ("silu", "bf16"), ("none", "nothing"))},
    **{f"norm {name}": NormCall(48, 96, STATIC, name, "relu", out_dtype=torch.bfloat16, transpose=True, dropout=True) for name in ("rms", "layer", "block")},
    "norm, rows": NormCall(48, 96, Spec.parse("e4m3:row"), "rms", "silu", affine=True, dropout=True),
    "norm gradient": NormGradientCall(48, 96, "layer", "relu", affine=True, dropout=True),
    "norm gradient, FP8": NormGradientCall(48, 96, "rms", "silu", spec=DELAYED, dropout=True),
}  # fmt: skip


def judge(call: Any, change: Any = lambda dropout: dropout) -> Conformance:
    """The reference as a backend, with other parameters of dropout."""
    op, law = ("norm_quantize", norm_law) if "Norm" in type(call).__name__ else ("fused_linear", fused_law)

    def with_change(function: Any) -> Any:
        def run(*given: Any, dropout: Dropout | None = None, **options: Any) -> Any:
            assert dropout is not None
            return function(*given, dropout=change(dropout), **options)

        return run

    names = [name for name in ("run", "gradient", "dgrad") if hasattr(law, name)]
    backend = SimpleNamespace(supports=law.supports, **{name: with_change(getattr(law, name)) for name in names})
    return judge_backend(op, backend, call, "cpu", moved=False)


@pytest.mark.parametrize("name", CALLS)
def test_the_law_passes(name: str) -> None:
    verdict = judge(CALLS[name])
    assert verdict, verdict.reason


CHANGES = {
    "another p": lambda d: d._replace(p=d.p + 0.02),
    "nothing dropped": lambda d: d._replace(p=0.0),
    "p for 1 - p": lambda d: d._replace(p=1 - d.p),
    "another layer's mask": lambda d: d._replace(stream=d.stream + 1),
    "half of the seed": lambda d: d._replace(seed=d.seed & 0xFFFFFFFF),
    "one mask for ever": lambda d: d._replace(seed=torch.ones_like(d.seed)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_mask_fails(name: str, change: str) -> None:
    assert not judge(CALLS[name], CHANGES[change])


@pytest.mark.parametrize("name", ["layer relu", "layer silu", "norm rms"])
def test_a_scale_without_the_factor_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law = norm_law if "norm" in name else fused_law
    real = law.run

    def run(*given: Any, dropout: Dropout, **options: Any) -> Any:
        found = real(*given, dropout=dropout, **options)
        q: QTensor = found.q if "norm" in name else found.y
        q = replace(q, scale=q.scale * (1 - dropout.p))
        return found._replace(q=q) if hasattr(found, "_replace") else replace(found, **{"q" if "norm" in name else "y": q})  # fmt: skip

    monkeypatch.setattr(law, "run", run)
    assert not judge(CALLS[name])


def test_a_mask_that_starts_again_in_the_second_tile_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fused_law.dropped

    def dropped(x: Tensor, dropout: Dropout | None) -> Tensor:
        return torch.cat([real(part, dropout) for part in torch.split(x, 32)])

    monkeypatch.setattr(fused_law, "dropped", dropped)
    assert not judge(CALLS["layer relu"])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [48, 1000, 4096])
@pytest.mark.parametrize(
    "name", [name for name in CALLS if name != "layer, dynamic"]
)  # no kernel of ours has that amax
def test_our_own_kernels_pass_on_a_gpu(name: str, rows: int) -> None:
    call, device = replace(CALLS[name], m=rows), torch.device("cuda")
    op = "norm_quantize" if name.startswith("norm") else "fused_linear"
    backend = registry.backend(op, "triton")
    if isinstance(call, NormCall) and call.transpose:  # FP8 both ways is written alone, and not of a block norm
        call = replace(call, transpose=False) if call.norm == "block" else replace(call, out_dtype=None)
    verdict = backend.supports(call, device)
    assert verdict, verdict.reason
    verdict = judge_backend(op, backend, call, device, moved=False)
    assert verdict, verdict.reason
