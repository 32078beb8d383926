"""Ways to call fused_linear and its gradient, and how a result is judged; for the tests of both."""

import math
import os
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor, Spec, quantize
from loka.kernels import BACKENDS, registry
from loka.kernels.fused_linear import (
    NORMALIZED,
    NORMALIZED_SCALE,
    FusedCall,
    FusedResult,
    GradientCall,
    fused_linear,
    fused_linear_gradient,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
every_backend = pytest.mark.parametrize("name", BACKENDS["fused_linear"])
# A result of 16 bits is rounded once; Triton's interpreter truncates instead, which errs up to a whole unit.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0 ** -(7 if INTERPRETED else 8), torch.float16: 2.0**-11}
ROUNDING[torch.float16] *= 2 if INTERPRETED else 1
FLOAT32 = 1e-5  # sums in another order, an approximate reciprocal
BLOCK = 256
ACTIVATIONS = {
    "none": lambda z: z,
    "relu": F.relu,
    "silu": F.silu,
    "hard_swish": F.hardswish,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
}
STATIC, GROUPED = "e4m3:tensor:static", "e4m3:1x128"
GRADIENTS = [
    ("e4m3:tensor:delayed", "e4m3:tensor:delayed"),
    ("e5m2:tensor:static", "e4m3:tensor:static"),
    ("e4m3:1x128", "e4m3:1x128"),
    ("e5m2:1x128:pow2", "e5m2:1x128:pow2"),
    ("e4m3:tensor", "e4m3:tensor"),
]


@dataclass(frozen=True)
class Case:
    """One way to call the op."""

    shape: tuple[int, int, int]
    a: str
    b: str
    out: str
    activation: str = "hard_swish"
    norm: bool = True
    bias: bool = False
    keep: bool = False
    transpose: bool = False
    amax: bool = False

    def __str__(self) -> str:
        extras = "".join(f"+{name}" for name in ("norm", "bias", "keep", "transpose", "amax") if getattr(self, name))
        return f"{'x'.join(map(str, self.shape))}-{self.a}@{self.b}-{self.activation}{extras}-{self.out}"

    @property
    def output(self) -> Spec | torch.dtype:
        return Spec.parse(self.out) if ":" in self.out else getattr(torch, self.out)

    def call(self) -> FusedCall:
        specs = Spec.parse(self.a), Spec.parse(self.b)
        norm = BLOCK if self.norm else 0
        extras = self.bias, self.keep, self.transpose, self.amax
        return FusedCall(*self.shape, *specs, self.output, norm, self.activation, *extras)


def operands(case: Case, device: torch.device) -> tuple[QTensor, QTensor, Tensor | None]:
    """Rows of different size, a zero row of activations."""
    m, k, n = case.shape
    a = torch.randn(m, k) * torch.exp(torch.randn(m, 1))
    if m > 3:
        a[2] = 0
    b = torch.randn(n, k) / math.sqrt(k) * torch.exp(0.3 * torch.randn(n, 1))
    bias = (0.5 * torch.randn(n)).to(device) if case.bias else None
    return quantize(a.to(device), Spec.parse(case.a)), quantize(b.to(device), Spec.parse(case.b)), bias


def run(
    name: str, case: Case, a: QTensor, b: QTensor, bias: Tensor | None, amax: Tensor | None = None, **more
) -> FusedResult:
    given = torch.full((), 2.0**-5, device=a.device) if "static" in case.out else None
    options = {"activation": case.activation, "keep": case.keep, "transpose": case.transpose, "bias": bias}
    norm = BLOCK if case.norm else 0
    return fused_linear(
        a, b, out=case.output, out_scale=given, norm_block=norm, backend=name, amax=amax, **options, **more
    )


def normalize(p: Tensor) -> Tensor:
    """Block norm in float64: torch's RMS norm on slices of 256 columns."""
    return torch.cat([F.rms_norm(part, part.shape[1:], eps=1e-6) for part in p.split(BLOCK, 1)], 1)


def supported(name: str, call: FusedCall | GradientCall, device: torch.device) -> None:
    verdict = registry.backend("fused_linear", name).supports(call, device)
    if not verdict:
        pytest.skip(f"{name}: {verdict.reason}")


def kept_from(z: Tensor, rstd: Tensor | None) -> FusedResult:
    """What forward would have kept."""
    scale = torch.tensor(NORMALIZED_SCALE, device=z.device)
    held = quantize(z, NORMALIZED, scale=scale) if rstd is not None else z.to(torch.bfloat16)
    return FusedResult(torch.empty(0), z=held, rstd=rstd)


def differentiate(dy: Tensor, kept: FusedResult, specs: tuple[str, str], name: str, **options):
    given = torch.full((), 2.0**-6, device=dy.device) if "tensor:" in specs[0] else None
    spec, spec_t = map(Spec.parse, specs)
    return fused_linear_gradient(dy, kept, spec=spec, spec_t=spec_t, scale=given, backend=name, **options)


def assert_codes_close(ours: QTensor | Tensor, law: QTensor | Tensor, share: float) -> None:
    """The same codes but for a small share, one code apart; 16-bit tensors within two units."""
    if not isinstance(law, QTensor):
        unit = 2 * ROUNDING[law.dtype] if law.dtype in ROUNDING else 0.0
        torch.testing.assert_close(ours.float(), law.float(), rtol=unit + 10 * FLOAT32, atol=1e-2 * share)
        return
    torch.testing.assert_close(ours.scale, law.scale, rtol=0.02 if share > 0.01 else FLOAT32, atol=0)
    codes = [q.data.contiguous().view(torch.uint8).int() for q in (ours, law)]
    apart = torch.where(ours.data.float() == law.data.float(), 0, (codes[0] - codes[1]).abs())  # -0 is 0
    size = law.dequantize().abs()
    largest = size.amax(-1, keepdim=True)
    small = size < 2.0**-5 * largest if share > 0.01 else torch.zeros_like(size, dtype=torch.bool)
    # Near zero many codes lie within what a tensor core's sums lose: there the bound around the float64 result decides.
    assert apart[~small].max() <= 1, f"up to {int(apart[~small].max())} codes apart"
    differing = float((apart != 0).double().mean())
    assert differing <= share, f"{differing:.3%} of the codes differ, allowed {share:.3%}"
