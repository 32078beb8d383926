"""The binding of a linear: what each of its three GEMMs runs. It changes only between steps.

    fprop   y  = x  W^T      a = x  [M, K]     b = W   [N, K]
    dgrad   dx = dy W        a = dy [M, N]     b = W^T [K, N]
    wgrad   dW = dy^T x      a = dy^T [N, M]   b = x^T [K, M]

Scales of x and dy may be dynamic, or delayed or static with one scale per tensor (`loka.lowp.scaling`). A weight's
scales always come from the weight: it is quantized once per optimizer step, so a delayed scale would save nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from loka.formats import FORMATS, TENSOR, Format, Spec
from loka.kernels import registry
from loka.kernels.scaled_mm import GemmWay
from loka.lowp.scaling import Scaling, check_mode
from loka.lowp.weight_cache import POLICIES, WeightPolicy

Save = Literal["auto", "fp8", "high"]


@dataclass(frozen=True)
class LinearBinding:
    """What each GEMM of a Linear runs.

    Args:
        fprop, dgrad, wgrad: precision and backend of each GEMM; None is high precision.
        save: what is saved of x for backward. `fp8` saves x^T as wgrad's operand: half the bytes of bf16 and the same
            result, since wgrad quantizes x anyway. `high` saves x, which is free if the op before saves it too. `auto`
            is `fp8` if fprop and wgrad are quantized.
        weights: when weights are quantized, see `loka.lowp.weight_cache`.
        scaling: how magnitudes are remembered, for delayed and static scales.
        quantizer: the backend of `kernels.quantize`.
    """

    fprop: GemmWay | None = None
    dgrad: GemmWay | None = None
    wgrad: GemmWay | None = None
    save: Save = "auto"
    weights: WeightPolicy = "step"
    scaling: Scaling = field(default_factory=Scaling)
    quantizer: str = "auto"

    def __post_init__(self) -> None:
        if self.save not in ("auto", "fp8", "high"):
            raise ValueError(f"save={self.save!r}: expected auto, fp8 or high")
        if self.weights not in POLICIES:
            raise ValueError(f"weights={self.weights!r}: expected {', '.join(POLICIES)}")
        for op in ("quantize", "scaled_mm"):
            registry.load(op)  # not in the first forward, which may be compiled
        for way in (self.fprop, self.dgrad, self.wgrad):
            if way is not None and way.backend != "auto":
                registry.backend("scaled_mm", way.backend)
        if self.quantizer != "auto":
            registry.backend("quantize", self.quantizer)
        for name, spec in self.weight_specs.items():
            if spec.mode != "dynamic":
                raise ValueError(f"{name}: {spec} for a weight; a weight's scale is always dynamic, once per step")
        for name, spec in {**self.x_specs, **self.dy_specs}.items():
            check_mode(spec, name)
        for name, spec in self.dy_specs.items():
            if spec.mode == "static":
                raise ValueError(
                    f"{name}: {spec} for a gradient; gradients have no bound, so their scale is dynamic or delayed"
                )
        if self.save == "fp8" and not self._can_save_fp8:
            raise ValueError(
                "save='fp8' saves x as wgrad's FP8 operand, so fprop and wgrad must both be quantized; "
                "a wgrad in high precision needs x in high precision"
            )

    @property
    def _can_save_fp8(self) -> bool:
        return self.fprop is not None and self.wgrad is not None

    @property
    def saves_fp8(self) -> bool:
        """Whether x^T is saved for backward in low precision instead of x."""
        return self.save != "high" and self._can_save_fp8

    @property
    def quantized(self) -> bool:
        """Whether any GEMM runs in low precision."""
        return any((self.fprop, self.dgrad, self.wgrad))

    @property
    def weight_specs(self) -> dict[str, Spec]:
        """Specs of W and W^T, by the GEMM that reads them."""
        bound = {"fprop b": self.fprop, "dgrad b": self.dgrad}
        return {name: gemm.b for name, gemm in bound.items() if gemm is not None}

    @property
    def x_specs(self) -> dict[str, Spec]:
        """Specs of x and x^T."""
        found = {"fprop a": self.fprop.a} if self.fprop is not None else {}
        return {**found, "wgrad b": self.wgrad.b} if self.wgrad is not None else found

    @property
    def dy_specs(self) -> dict[str, Spec]:
        """Specs of dy and dy^T."""
        found = {"dgrad a": self.dgrad.a} if self.dgrad is not None else {}
        return {**found, "wgrad a": self.wgrad.a} if self.wgrad is not None else found

    def with_scales(self, mode: str) -> "LinearBinding":
        """Return the binding with delayed scales for x and dy, or static ones for x. Each must be scaled per tensor."""

        def remembered(spec: Spec) -> Spec:
            if spec.block != TENSOR:
                raise ValueError(
                    f"{mode} scales are one per tensor; this binding has {spec}; hint: recipe='tensorwise'"
                )
            return Spec(spec.format, spec.block, spec.scale, mode, spec.rounding)  # type: ignore[arg-type]

        if mode not in ("dynamic", "delayed", "static"):
            raise ValueError(f"scales are dynamic, delayed or static, got {mode!r}")
        if mode == "dynamic":
            return self
        return self._map(remembered, remembered if mode == "delayed" else _same)

    def with_gradients(self, name: str) -> "LinearBinding":
        """Return the binding with another format of dy: e5m2 has the range of float16, e4m3 one more mantissa bit."""
        if name not in ("e4m3", "e5m2"):
            raise ValueError(f"gradients are e4m3 or e5m2, got {name!r}")
        wanted: Format = FORMATS[name]
        return self._map(_same, lambda s: Spec(wanted, s.block, s.scale, s.mode, s.rounding))

    def _map(self, x: Callable[[Spec], Spec], dy: Callable[[Spec], Spec]) -> "LinearBinding":
        """Return the binding with the Specs of x and dy mapped by two functions."""
        return replace(
            self, fprop=_changed(self.fprop, x, _same), dgrad=_changed(self.dgrad, dy, _same), wgrad=_changed(self.wgrad, dy, x)
        )  # fmt: skip

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name) or 'high'}" for name in ("fprop", "dgrad", "wgrad")]
        defaults = LinearBinding.__dataclass_fields__
        parts += [
            f"{n}={getattr(self, n)}"
            for n in ("save", "weights", "quantizer")
            if getattr(self, n) != defaults[n].default
        ]
        return ", ".join(parts)


def _same(spec: Spec) -> Spec:
    return spec


def _changed(gemm: GemmWay | None, a: Callable[[Spec], Spec], b: Callable[[Spec], Spec]) -> GemmWay | None:
    if gemm is None:
        return None
    return replace(gemm, a=a(gemm.a), b=b(gemm.b))


@dataclass(frozen=True)
class LinearOptions:
    """Settings of converted linears other than the precision of their GEMMs.

    Args:
        scales: "dynamic", "delayed" (x and dy; see `loka.lowp.scaling` for what an outlier does) or "static" (x, after a
            calibration).
        gradients: format of dy; None for the recipe's.
        save: what is saved of x for backward: "fp8", "high", or "auto" for FP8 if fprop and wgrad are quantized.
        weights: when weights are quantized: "step" (after they changed), "fresh" (in every forward) or "manual" (only
            by `loka.refresh` and optimizer steps).
        scaling: how magnitudes are remembered.
        quantizer: backend of the quantization kernels.

    Example:
        >>> loka.convert(model, recipe="tensorwise", options=LinearOptions(scales="delayed"))
    """

    scales: Literal["dynamic", "delayed", "static"] = "dynamic"
    gradients: Literal["e4m3", "e5m2"] | None = None
    save: Save = "auto"
    weights: WeightPolicy = "step"
    scaling: Scaling = field(default_factory=Scaling)
    quantizer: str = "auto"

    def apply(self, binding: LinearBinding) -> LinearBinding:
        """Return the binding with these options."""
        if self.gradients is not None:
            binding = binding.with_gradients(self.gradients)
        return replace(
            binding.with_scales(self.scales), save=self.save, weights=self.weights, scaling=self.scaling, quantizer=self.quantizer
        )  # fmt: skip
