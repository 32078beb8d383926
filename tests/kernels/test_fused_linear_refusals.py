"""fused_linear: what is refused, and that the reason is given."""

import pytest
import torch

from kernels.fused_cases import GROUPED, Case, operands
from loka.formats import Spec, quantize
from loka.kernels import registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.fused_linear import FusedCall, GradientCall, fused_linear, fused_linear_gradient


def fused(out: str | torch.dtype, a: str = "e4m3:row", b: str = "e4m3:row") -> FusedCall:
    return FusedCall(4, 32, 64, Spec.parse(a), Spec.parse(b), Spec.parse(out) if isinstance(out, str) else out)


def backward(spec: str, spec_t: str) -> GradientCall:
    return GradientCall(4, 64, Spec.parse(spec), Spec.parse(spec_t))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (fused("e4m3:tensor"), "an epilogue sees one tile and cannot know the amax e4m3:tensor needs; hint: a static"),
        (fused("e4m3:row"), "cannot know the amax e4m3:row needs"),
        (fused("e4m3:128x128"), "static per tensor or dynamic per 1x128, not e4m3:128x128"),
        (fused("int8:tensor:static"), "writes e4m3 or e5m2 rounded to nearest"),
        (fused(torch.float64), "writes bf16, fp16, fp32 or FP8, not torch.float64"),
        (fused(torch.bfloat16, a="int8:row"), "multiplies e4m3 and e5m2, not int8"),
        (fused(torch.bfloat16, a="e4m3:128x128"), "a is scaled per tensor, row or 1x128, not 128x128"),
        (backward("e4m3:tensor", "e5m2:tensor"), "one dynamic scale serves both"),
        (backward("e4m3:tensor", "e4m3:tensor:static"), "scaled alike in one pass"),
        (backward("e4m3:1x128", "e4m3:tensor:static"), "scaled alike in one pass"),
        (backward("e4m3:1x128", "int8:1x128"), "writes e4m3 or e5m2"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:60],
)
def test_triton_refuses_with_the_reason(call: FusedCall | GradientCall, reason: str, monkeypatch) -> None:
    backend = registry.backend("fused_linear", "triton")
    scaled_mm = registry.backend("scaled_mm", "triton")
    for module in (backend, scaled_mm):  # answer as where Triton runs: about the call, not about this machine
        monkeypatch.setattr(module, "triton_runs_on", lambda device: registry.Verdict(True))
    verdict = backend.supports(call, torch.device("cuda"))
    assert not verdict
    assert reason in verdict.reason


def test_mistakes_are_named(device: torch.device) -> None:
    case = Case((4, 32, 64), "e4m3:row", "e4m3:row", "bfloat16")
    a, b, _ = operands(case, device)
    with pytest.raises(ValueError, match=r"the norm block is 256 \(or 0 for none\), got 128"):
        fused_linear(a, b, out=torch.bfloat16, norm_block=128)
    with pytest.raises(ValueError, match="activation 'mish' is not one of none, relu"):
        fused_linear(a, b, out=torch.bfloat16, activation="mish")
    with pytest.raises(ValueError, match=r"slope is between 0 and 1, got -0\.5"):
        fused_linear(a, b, out=torch.bfloat16, activation="leaky_relu", slope=-0.5)
    for wrong in (torch.zeros(2, device=device), torch.zeros((), dtype=torch.float64, device=device)):
        with pytest.raises(ValueError, match=r"amax is one float32 number on .* raised in place, got"):
            fused_linear(a, b, out=torch.bfloat16, amax=wrong)
    with pytest.raises(ValueError, match="the transpose is an FP8 operand for the next wgrad"):
        fused_linear(a, b, out=torch.bfloat16, transpose=True)
    result = fused_linear(a, b, out=torch.bfloat16)
    with pytest.raises(ValueError, match=r"nothing for backward; hint: fused_linear\(..., keep=True\)"):
        fused_linear_gradient(torch.ones(4, 64), result, spec=Spec.parse(GROUPED), spec_t=Spec.parse(GROUPED))
    with pytest.raises(UnsupportedError, match=r"'triton' cannot run 4x32x64 int8:row @ e4m3:row blocknorm256"):
        fused_linear(quantize(torch.ones(4, 32), Spec.parse("int8:row")), b.__class__(b.data.cpu(), b.scale.cpu(), b.spec),
                     out=torch.bfloat16, backend="triton")  # fmt: skip
