"""Forms of fused_linear and its dgrad, their operands, and whether a launch computes them right; for fused_linear_sweep.py."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import QTensor, Spec, quantize
from loka.kernels.fused_linear import (
    DgradCall,
    FusedCall,
    Launch,
    choose_launch,
    fused_linear,
    fused_linear_dgrad,
    properties_of,
)
from loka.kernels.fused_linear.launch import problems, work_of

TENSOR, STATIC = Spec.parse("e4m3:tensor"), Spec.parse("e4m3:tensor:static")
FORMS = {
    "relu": {"norm_block": 0, "activation": "relu", "bias": True},
    "norm": {"norm_block": 256, "activation": "hard_swish", "bias": False},
    "relu padded": {
        "norm_block": 0,
        "activation": "relu",
        "bias": True,
    },  # operands whose rows start at multiples of 128 bytes, as a chain writes them
    "train relu": {"norm_block": 0, "activation": "relu", "bias": True, "keep": True, "transpose": True, "amax": True},
    "train gelu": {"norm_block": 0, "activation": "gelu", "bias": True, "keep": True, "transpose": True, "amax": True},
    "train norm": {"norm_block": 256, "activation": "hard_swish", "bias": False, "keep": True, "transpose": True},
    "dgrad relu": {"activation": "relu", "bias": True, "amax": True},
    "dgrad gelu": {"activation": "gelu", "bias": True, "amax": True},
}
EXTRAS = [
    Launch(128, 256, 128, 8, 3),
    Launch(128, 256, 128, 8, 4, 4),
    Launch(128, 256, 128, 8, 4, 16),
    Launch(64, 128, 128, 4, 4),
]
SPLIT = ("relu", "norm", "train relu")  # forms whose launches are tried with a cut K too


def call_of(form: str, m: int, k: int, n: int) -> FusedCall | DgradCall:
    options = FORMS[form]
    if form.startswith("dgrad"):
        kept = "y" if options["activation"] == "relu" else "scaled"
        return DgradCall(m, k, n, TENSOR, TENSOR, STATIC, options["activation"], kept, True, True)
    flags = [options.get(name, False) for name in ("bias", "keep", "transpose", "amax")]
    return FusedCall(m, k, n, TENSOR, TENSOR, STATIC, options["norm_block"], options["activation"], *flags)


def launches_for(form: str, m: int, k: int, n: int, device: torch.device, splits: int) -> list[Launch]:
    """Every unsplit candidate, the extras that fit, and the splits the model likes best."""
    call, properties = call_of(form, m, k, n), properties_of(device)
    ranked = choose_launch(call, properties)
    whole = [launch for launch in ranked if launch.split == 1]
    whole += [launch for launch in EXTRAS if not problems(launch, work_of(call), properties)]
    if "gelu" in form:  # slow to compile
        whole = [launch for launch in whole if launch.bm * launch.bn >= 16384]
    splits = splits if form in SPLIT else 0
    return list(dict.fromkeys([*whole, *[launch for launch in ranked if launch.split > 1][:splits]]))


def with_padded_rows(q: QTensor) -> QTensor:
    rows, columns = q.shape
    data = torch.empty(rows, -(-columns // 128) * 128, dtype=torch.uint8, device=q.device)[:, :columns]
    return QTensor(data.copy_(q.data.view(torch.uint8)).view(q.data.dtype), q.scale, q.spec)


@dataclass
class Operands:
    """One set for a layer, and for the step back through it."""

    a: QTensor
    b: QTensor
    bias: Tensor
    scale: Tensor
    amax: Tensor
    z: QTensor | None = None

    @classmethod
    def make(cls, form: str, m: int, k: int, n: int, device: torch.device, seed: int) -> "Operands":
        maker = torch.Generator(device=device).manual_seed(seed)
        a = torch.randn(m, k, device=device, generator=maker)
        b = torch.randn(n, k, device=device, generator=maker) / math.sqrt(k)
        bias = 0.5 * torch.randn(n, device=device, generator=maker)
        z = torch.randn(m, n, device=device, generator=maker) if form.startswith("dgrad") else None
        one = torch.full((), 2.0**-6, device=device)
        kept = None if z is None else quantize(torch.relu(z) if "relu" in form else z, STATIC, scale=one)
        scale = torch.full((), 1 / 16 if "norm" in form else 2.0**-6, device=device)
        qa, qb = quantize(a, TENSOR), quantize(b, TENSOR)
        if "padded" in form:
            qa, qb = with_padded_rows(qa), with_padded_rows(qb)
        return cls(qa, qb, bias, scale, torch.zeros((), device=device), kept)

    def run(self, form: str, launch: Launch | None, backend: str = "triton"):
        options = dict(FORMS[form])
        amax = self.amax if options.pop("amax", False) else None
        if form.startswith("dgrad"):
            return fused_linear_dgrad(
                self.a,
                self.b,
                self.z,
                spec=STATIC,
                scale=self.scale,
                amax=amax,
                launch=launch,
                backend=backend,
                **options,
            )
        bias = self.bias if options.pop("bias") else None
        return fused_linear(
            self.a,
            self.b,
            out=STATIC,
            out_scale=self.scale,
            bias=bias,
            amax=amax,
            launch=launch,
            backend=backend,
            **options,
        )


def poison(o: Operands) -> None:
    """A row of NaN, a column of Inf and one far beyond the scale: they stay what they are, or saturate, and nothing else changes."""
    data = o.a.data.float()
    data[5] = math.nan
    o.a = QTensor(data.to(o.a.data.dtype), o.a.scale, o.a.spec)
    o.bias[3], o.bias[7] = math.inf, 1e6


def compare(form: str, shape: tuple[int, int, int], launch: Launch, device: torch.device, special: bool = False) -> str:
    """What is wrong with a result, against the reference in float32 on the same operands; "" where nothing is."""
    o = Operands.make(form, *shape, device, 1)
    if special:
        poison(o)
    law_amax = torch.zeros((), device=device)
    found = o.run(form, launch)
    ours, o.amax = o.amax, law_amax
    law = o.run(form, None, "reference")
    for name in ("y", "y_t", "z", "g", "g_t"):
        left, right = getattr(found, name, None), getattr(law, name, None)
        if right is None:
            continue
        mine, theirs = left.dequantize(), right.dequantize()
        if not torch.equal(mine.isnan(), theirs.isnan()) or bool(theirs.isnan().any()) != special:
            return f"{name}: {int(mine.isnan().sum())} NaN, {int(theirs.isnan().sum())} expected"
        mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
        # A code away, and what tensor cores lose of a sum, which counts where the sum is near zero.
        far = (mine - theirs).abs() > 0.13 * theirs.abs() + 0.02 * theirs.square().mean().sqrt()
        error = float((mine - theirs).norm() / theirs.norm())
        if not error < 0.02 or int(far.sum()) > 1e-5 * far.numel():
            return (
                f"{name}: relative error {error:.4f}, {int(far.sum())} of {far.numel()} elements more than a code away"
            )
    if (
        not special
        and getattr(law, "bias", None) is not None
        and not float((found.bias - law.bias).norm() / law.bias.norm()) < 0.02
    ):
        return "bias gradient"
    if FORMS[form].get("amax") and not abs(float(ours) / float(law_amax) - 1) < 0.02:
        return f"amax {float(ours)} against {float(law_amax)}"
    return ""


def checks(device: torch.device) -> Iterator[tuple[str, tuple[int, int, int], Launch]]:
    """Every launch of the sweep on the sizes of a real layer, and odd shapes. Compiled here, so that the sweep compiles nothing."""
    large, few, odd = (2560, 4096, 1536), (64, 4096, 1024), (205, 1000, 301)
    for form in FORMS:
        for launch in launches_for(form, *large, device, 0):
            yield form, large, launch
        yield form, odd, choose_launch(call_of(form, *odd), properties_of(device))[0]
        if form in SPLIT:
            yield from split_checks(form, few, large, device)


def split_checks(
    form: str, few: tuple[int, int, int], large: tuple[int, int, int], device: torch.device
) -> Iterator[tuple]:
    """Every tile that is split, and every way to finish one."""
    seen: dict[tuple[int, ...], tuple] = {}
    for shape in (few, large):
        for launch in choose_launch(call_of(form, *shape), properties_of(device)):
            if launch.split > 1:
                seen.setdefault(tuple(launch.numbers[:7]), (form, shape, launch))
                seen.setdefault((launch.bn, launch.split), (form, shape, launch))
    yield from dict.fromkeys(seen.values())
