"""A linear whose three GEMMs each run in their own precision and on their own kernel.

    fprop   y  = x  W^T        dgrad   dx = dy W        wgrad   dW = dy^T x

It is an nn.Linear with the original's parameters, so the state_dict is the same before and after the conversion. What
runs is bound once (`loka.lowp.binding`). A backend that cannot run what it is bound to raises in forward; there is no
fallback.

Every tensor is quantized once, along the axis that the GEMM contracts, together with its transpose if two GEMMs need
both: x and x^T in forward, dy and dy^T in backward, W and W^T once per optimizer step. Nothing is transposed in memory
for that. The bias is added after the GEMM in the output's dtype, where a compiler can fuse it with what follows.

Backends pad widths that are not a multiple of 16; the result has the shape of an nn.Linear's.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

from loka.kernels.prepared import layout_of
from loka.kernels.scaled_mm.call import OUT_DTYPES
from loka.lowp.auto import moved
from loka.lowp.binding import LinearBinding
from loka.lowp.chain import chains_of
from loka.lowp.health import FORWARD, record, sampled_error, turn_of
from loka.lowp.leaving import refuse_dtype, refuse_script, refuse_tracing
from loka.lowp.linear_function import Given, Layouts, LinearFunction, parts_of
from loka.lowp.linear_state import LinearState, can_cache
from loka.lowp.scaling import AmaxState, find_amax
from loka.lowp.step import file_magnitudes, follow, unfollow
from loka.lowp.weight_cache import WeightCache, quantize_pair
from loka.nn.jagged import on_values
from loka.nn.mixing import declare_mixed, mix, unmix

__all__ = ["Linear", "LinearBinding", "LinearState", "linears_of", "refresh", "refuse"]


class Linear(nn.Linear):
    """An nn.Linear in low precision. Create one with `Linear.replacing`, or convert one in place with `Linear.adopt`.

    Args:
        in_features, out_features, bias, device, dtype: as for nn.Linear; do not call the constructor.

    Example:
        >>> from loka.lowp.binding import LinearBinding
        >>> Linear.replacing(nn.Linear(64, 64), LinearBinding(loka.dispatch.recipe_named("rowwise").fprop))
    """

    binding: LinearBinding
    state: LinearState

    @staticmethod
    def replacing(module: nn.Linear, binding: LinearBinding) -> "Linear":
        """Return a new Linear that shares the module's parameters and hooks."""
        twin = nn.Linear.__new__(nn.Linear)
        twin.__dict__.update(
            {k: v.copy() if k in ("_parameters", "_buffers", "_modules") else v for k, v in vars(module).items()}
        )
        if isinstance(module, Linear):
            twin.__dict__.pop("state"), twin.__dict__.pop("binding")
        elif reason := refuse(module):
            raise ValueError(f"{module} cannot run in low precision: {reason}")
        return Linear.adopt(twin, binding)

    @staticmethod
    def adopt(module: nn.Linear, binding: LinearBinding, name: str = "") -> "Linear":
        """Turn a module into a Linear in place, so that wrappers and all other references to it stay valid."""
        if reason := refuse(module):
            raise ValueError(f"{name or module} cannot run in low precision: {reason}")
        state = LinearState(binding, module.weight)
        state.name = name
        module.__dict__["state"], module.__dict__["binding"] = state, binding
        plain: nn.Module = module
        plain.__class__ = mix(type(module), Linear)
        assert isinstance(module, Linear)
        try:
            module._allocate()
        except BaseException:  # also after Ctrl-C
            module.release()
            raise
        follow(module)
        return module

    def release(self) -> nn.Linear:
        """Undo `adopt`: restore the original class in place."""
        plain: nn.Module = self
        plain.__class__ = unmix(type(self), Linear)
        unfollow(self)
        del self.__dict__["state"], self.__dict__["binding"]
        return self

    def restored(self) -> nn.Linear:
        """Return a new plain nn.Linear that shares the parameters."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight, plain.bias = self.weight, self.bias
        return plain.train(self.training)

    def rebind(self, binding: LinearBinding, note: str = "") -> None:
        """Replace the binding, between two steps. Compiled code recompiles once."""
        state = LinearState(binding, self.weight)
        state.name, state.note = self.state.name, note
        state.health, state.watching = self.state.health, self.state.watching
        self.__dict__["state"], self.__dict__["binding"] = state, binding
        self._allocate()

    def refresh(self) -> None:
        """Quantize the weight now, after writes that no version counter shows."""
        if self.state.weights is None:
            self._allocate()
        else:
            self.state.weights.rewrite(self.weight)

    @property
    def remembered(self) -> list[AmaxState]:
        """The amax states that its scales come from; none after it was reverted."""
        state: LinearState | None = vars(self).get("state")
        return [] if state is None else list(state.amax_states.values())

    def followed_weights(self) -> list[Tensor]:
        """Return the weight as a registered parameter, as optimizers know it."""
        weight = self._parameters.get("weight")
        return [] if weight is None or "state" not in vars(self) else [weight]

    def weights_changed(self, *, owned: bool) -> None:
        """Invalidate the cached weight after an optimizer step; `owned` if the optimizer owns this weight."""
        state: LinearState | None = vars(self).get("state")
        weights = None if state is None else state.weights
        if weights is None:
            return
        if weights.manual:
            if owned:
                weights.rewrite(self.weight, kept=False)
        elif owned:  # changed in place: a later backward that needs the old weight is an error, as for nn.Linear
            weights.invalidate()
        elif self.training:
            weights.renew()

    def after_step(self) -> None:
        """Do nothing after a step's magnitudes were filed; chains do."""

    def _allocate(self) -> None:
        """Create the cache of the quantized weight, if it can be cached."""
        weight, binding = self._parameters.get("weight"), self.binding
        self.state.weights = None
        if binding.weights == "fresh" or not can_cache(weight, binding):
            return
        assert weight is not None
        w, w_t = (None if gemm is None else gemm.of_weight for gemm in (binding.fprop, binding.dgrad))
        if w_t is not None and not self.training:
            w_t = None  # inference never needs the transpose; `train()` creates it
        if w is not None or w_t is not None:
            self.state.weights = WeightCache(
                weight, w, w_t, quantizer=binding.quantizer, manual=binding.weights == "manual", site=self.state.name
            )

    def forward(self, input: Tensor) -> Tensor:
        """Compute x [..., K] -> y [..., N] in the input's dtype, or autocast's if it is enabled."""
        if "state" not in self.__dict__:  # reverted, and called by a forward that was kept before
            return type(self).forward(self, input)
        if input.is_nested:
            return on_values(lambda values: Linear.forward(self, values), input)
        refuse_tracing(self.state)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        if dtype not in OUT_DTYPES and self.binding.fprop is not None:
            refuse_dtype(self.state.name, dtype)
        with torch.autocast(kind, enabled=False):
            if input.shape[-1:] != (self.in_features,):
                name = self.state.name or "Linear"
                raise ValueError(f"{name} takes [..., {self.in_features}], got {tuple(input.shape)}")
            matrix = input.dim() == 2
            x = input if matrix else input.reshape(math.prod(input.shape[:-1]), self.in_features)
            y = self._multiply(x, dtype)
            if self.bias is not None:
                y = y + self.bias.to(dtype)
        # as for nn.Linear, the result is not a view, so that the caller can modify it in place
        return y if matrix else torch.ops.aten._unsafe_view(y, [*input.shape[:-1], self.out_features])

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return y [M, N] without the bias."""
        weight, state = self.weight, self.state
        if type(weight) not in (nn.Parameter, Tensor):
            raise ValueError(
                f"the weight is a {type(weight).__name__}, expected a plain tensor; "
                "a sharded linear cannot run in low precision"
            )
        needs = (torch.is_grad_enabled() and x.requires_grad, torch.is_grad_enabled() and weight.requires_grad)
        health = state.health if state.watching else None
        with torch.no_grad():
            given, layouts = self._operands(x, weight, needs, health)
        # hidden from function modes: a compiler cannot trace their side effects inside an autograd function
        with torch._C.DisableTorchFunction():
            y: Tensor = LinearFunction.apply(x, weight, self.binding, dtype, needs, layouts, *given)  # type: ignore[no-untyped-call]
        if health is not None:
            with torch.no_grad():
                turn, low = turn_of(health, FORWARD), self.binding.fprop is not None
                error = sampled_error(x, weight.T, y, turn) if low else torch.zeros_like(turn)
                record(health, FORWARD, x, weight, (y,), error)
        return y

    def _operands(
        self, x: Tensor, weight: Tensor, needs: tuple[bool, bool], health: Tensor | None
    ) -> tuple[Given, Layouts]:
        """Return what is known before the GEMM: the quantized weight, its layouts, and remembered scales."""
        binding, state = self.binding, self.state
        w_spec = None if binding.fprop is None else binding.fprop.b
        t_spec = binding.dgrad.b if binding.dgrad is not None and needs[0] else None
        w = w_t = None
        if state.weights is not None:
            w, w_t = state.weights.get(weight, training=self.training)
        missing = (w_spec if w is None else None, t_spec if w_t is None else None)
        if missing[0] is not None or missing[1] is not None:
            made = quantize_pair(weight.detach(), *missing, binding.quantizer)
            w, w_t = made[0] if w is None else w, made[1] if w_t is None else w_t
        scales = (None, None) if state.x is None else self._x_scales(x, state.x)
        largest, pending = (None, None) if state.dy is None else (state.dy.largest, state.dy.pending)
        given = Given(*parts_of(w), *parts_of(w_t if needs[0] else None))
        return given._replace(
            x_scale=scales[0], xt_scale=scales[1], dy_largest=largest, dy_pending=pending, health=health
        ), (layout_of(w), layout_of(w_t))

    def _x_scales(self, x: Tensor, amax: AmaxState) -> tuple[Tensor | None, Tensor | None]:
        """Return the remembered scales of x and x^T, and record the amax of x."""
        now = find_amax(x)
        if amax.calibrating:
            amax.calibrate(now)
        elif not amax.calibrated and any(spec.mode == "static" for spec in self.binding.x_specs.values()):
            raise ValueError(
                f"{self.state.name or 'Linear'}: the static scale of x is not calibrated; "
                "hint: with loka.placing.calibrating(model): model(batch)"
            )
        if self.training:
            amax.observe(now)
        gemms = (self.binding.fprop, self.binding.wgrad)
        specs = [None if g is None else (g.a, g.b)[i] for i, g in enumerate(gemms)]
        return amax.scale_for(specs[0], now), amax.scale_for(specs[1], now)

    def extra_repr(self) -> str:
        """Return the precision and kernel of each GEMM."""
        note = f", {self.state.note}" if self.state.note else ""
        return f"{super().extra_repr()}, {self.binding}{note}"

    def train(self, mode: bool = True) -> "Linear":
        """Set the mode. A change drops the cached weight, since weights are often swapped between modes (EMA)."""
        changed = mode != self.training
        super().train(mode)
        weights = self.state.weights
        if changed and weights is not None:
            if mode and self.binding.dgrad is not None and weights.data_t is None:
                self._allocate()
            if self.state.weights is not None and not weights.manual:
                self.state.weights.renew()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "Linear":
        if self.state.weights is not None:
            self.state.weights.invalidate()  # drops its weak reference, with which torch could not swap the tensor
        before = self.weight.device, self.weight.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.state.to(self.weight.device)
        if (self.weight.device, self.weight.dtype) != before:
            self.__dict__["binding"] = moved(self.binding, self.weight, before[0])
        self._allocate()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.state.weights is not None:
            self.state.weights.invalidate()
        super()._load_from_state_dict(*args, **kwargs)
        if self.state.weights is None or self.state.weights.manual:
            self.refresh()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "state" in self.__dict__:
            # code that assigns weights (FSDP2, weight tying) may change them without moving the version counter
            self.state.weights = None
        super().__setattr__(name, value)

    def _replicate_for_data_parallel(self) -> "Linear":
        raise ValueError(
            f"{self.state.name or 'Linear'} is converted: the replicas of nn.DataParallel would share its quantized "
            "weight and its scales; hint: DistributedDataParallel, or loka.revert(model) first"
        )

    def __prepare_scriptable__(self) -> Any:
        refuse_script(self.state.name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._allocate()
        follow(self)


declare_mixed(Linear, nn.Linear)  # a converted nn.Linear is a Linear itself, not a mixed class
# attributes that Linear adds to nn.Linear; a user's attribute of the same name would clash
_NAMES = sorted({*Linear.__annotations__, *vars(Linear)} - {*dir(nn.Linear), "_loka_mixed", "__annotations__"})


def refuse(module: nn.Module) -> str | None:
    """Return why a module cannot become a Linear, or None if it can."""
    if not isinstance(module, nn.Linear):
        return f"is a {type(module).__name__}, expected an nn.Linear"
    if isinstance(module, Linear):
        return "already converted; hint: loka.revert(model) first"
    if parametrize.is_parametrized(module):
        return "has parametrised weights; hint: remove the parametrisation"
    forward = type(module).forward
    if forward is not nn.Linear.forward and not getattr(forward, "loka_is_linear", False):  # the mod align_shapes
        why: str = getattr(forward, "loka_refused", f"is a {type(module).__name__} with a forward of its own")
        return why  # a mod says what its forward does
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if own := [name for name in _NAMES if name in vars(module) or hasattr(type(module), name)]:
        return f"its own attribute {own[0]!r} has a name that a converted linear needs; hint: rename it"
    if "weight" not in module._parameters:
        return "its weight is not a parameter (weight_norm, spectral_norm?)"
    if isinstance(module.weight, nn.UninitializedParameter):
        return "its weight is not initialized yet (lazy module)"
    if not module.weight.is_floating_point():
        return f"its weight is {module.weight.dtype}, expected a floating-point type"
    if module.weight.dtype == torch.float64:
        return "float64 weights: no low-precision GEMM writes float64"
    if type(module).__name__ == "NonDynamicallyQuantizableLinear" and not getattr(module, "loka_called", False):
        return (
            "nn.MultiheadAttention reads its weight without calling it; "
            "hint: the mod attention_layout, which replaces self-attention"
        )
    return None


def linears_of(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yield the converted linears of a model with their names."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield name, module


def refresh(model: nn.Module) -> int:
    """Quantize all weights again and update delayed scales, as after an optimizer step.

    Call it after writing weights without a torch optimizer. Caches are updated in place, so captured CUDA graphs see
    it.

    Args:
        model: a converted model.

    Returns:
        The number of converted linears, those in chains included.

    Example:
        >>> loka.refresh(model)
        12
    """
    linears, chains = [linear for _, linear in linears_of(model)], [chain for _, chain in chains_of(model)]
    for linear in linears:
        linear.refresh()
    for chain in chains:
        chain.refresh()
    file_magnitudes([*linears, *chains])
    return len(linears) + sum(len(chain.links) for chain in chains)
