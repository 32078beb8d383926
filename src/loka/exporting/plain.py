"""Replace converted modules by plain torch ops, so that a traced graph needs nothing of loka.

    PlainLinear     q(x) W^T + b                               for a converted or quantized linear
    PlainChain      the same, layer after layer, with norm, activation and the next layer's cast between them

Weights are FP8 buffers with their scales, made once; casts and GEMMs are in `loka.exporting.ops`.

Our Triton kernels are launched from Python, so a package cannot contain them and they are never chosen here. What a
fused kernel does in one launch, the package's compiler does in a GEMM and one pointwise kernel after it.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from loka.exporting.ops import Ops
from loka.formats import TENSOR, QTensor, Spec
from loka.kernels.activation import activate
from loka.kernels.norm_quantize import NormCall
from loka.kernels.norm_quantize import reference as norms
from loka.kernels.prepared import assemble, layout_of, parts_of
from loka.lowp.chain import Chain, chain_of
from loka.lowp.chain_function import ROW_SPEC, STATIC_SPEC
from loka.lowp.interaction import interactions_of, release_interaction
from loka.lowp.linear import Linear
from loka.ptq.modules import QuantizedLinear, quantize_weight


def _keep(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Register a buffer. A 0-dim one becomes a vector: AOTInductor (torch 2.13) would inline and fail to reshape it."""
    kept = None if tensor is None else tensor.detach()
    module.register_buffer(name, kept.reshape(1) if kept is not None and kept.dim() == 0 else kept)


def _stand_in(dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return an empty parameter, for models that read `next(self.parameters()).dtype`: the weights become buffers."""
    return nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)


def _number(tensor: Tensor | None) -> Tensor | None:
    """Return a vector of one element as a scalar again."""
    return None if tensor is None else tensor.reshape(())


class _Weights(nn.Module):
    """FP8 weights as buffers, by index."""

    def __init__(self, weights: list[QTensor]) -> None:
        super().__init__()
        self._forms = [(w.spec, tuple(w.shape), layout_of(w)) for w in weights]
        for index, weight in enumerate(weights):
            for role, tensor in zip(("data", "scale", "laid"), parts_of(weight), strict=True):
                _keep(self, f"{role}_{index}", tensor)

    def get(self, index: int) -> QTensor:
        """Return a weight."""
        spec, shape, layout = self._forms[index]
        data, scale, laid = (getattr(self, f"{role}_{index}") for role in ("data", "scale", "laid"))
        if spec.block == TENSOR:
            scale = scale.reshape(())
        laid = laid.reshape(()) if laid is not None and laid.dim() == 1 and laid.numel() == 1 else laid
        return assemble(data, scale, laid, spec, shape, layout)


class PlainLinear(nn.Module):
    """A linear in low precision. Without a static `scale`, it is computed from the activation."""

    scale: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        weight: QTensor,
        spec: Spec,
        scale: Tensor | None,
        bias: Tensor | None,
        ops: Ops,
        *,
        fast_accum: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.fast_accum, self.like = fast_accum, _stand_in(dtype, weight.device)
        self.out_features, self.in_features = weight.shape
        self.spec, self.ops = spec, ops
        self.weights = _Weights([ops.hold(weight, spec)])
        _keep(self, "scale", scale)
        _keep(self, "bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return y [..., N] of x [..., K], in the input's dtype."""
        a = self.ops.quantize(input.reshape(-1, self.in_features), self.spec, _number(self.scale))
        y = self.ops.multiply(a, self.weights.get(0), input.dtype, fast_accum=self.fast_accum)
        y = y if self.bias is None else y + self.bias.to(input.dtype)
        return y.reshape(*input.shape[:-1], self.out_features)


class PlainChain(nn.Module):
    """A chain of linears with FP8 between them. Computes what `loka.lowp.chain_function` does without gradients.

    It takes the place of a frozen chain's first linear. As in the model, the modules between its linears are no-ops and
    the last linear returns the result; `handing` is the chain of the copied model, which passes the result on.
    """

    input_scale: Tensor | None
    handing: Chain | None = None

    def __init__(self, chain: Chain, ops: Ops) -> None:
        super().__init__()
        assert chain.frozen is not None
        self.like = _stand_in(chain.linears[0].weight.dtype, chain.frozen[0].device)
        self.links, self.ops, self.fast_accum = chain.links, ops, chain.precision.fast_accum
        self.in_features, self.out_features = chain.linears[0].in_features, chain.linears[-1].out_features
        self.spec = ROW_SPEC if chain.input_scale is None else STATIC_SPEC
        self.weights = _Weights([ops.hold(w, self._spec_of(i)) for i, w in enumerate(chain.frozen)])
        _keep(self, "input_scale", None if chain.input_scale is None else chain.input_scale.clone())
        tensors = chain.tensors()
        for role in ("bias", "norm_weight", "norm_bias", "scale"):
            for index, tensor in enumerate(getattr(tensors, role)):
                _keep(self, f"{role}_{index}", None if tensor is None else tensor.clone())

    def _spec_of(self, index: int) -> Spec:
        """Return the Spec of a layer's input."""
        return self.spec if index == 0 else STATIC_SPEC

    def forward(self, input: Tensor) -> Tensor:
        """Return y [..., N] of x [..., K], in the input's dtype."""
        dtype, last = input.dtype, len(self.links) - 1
        a = self.ops.quantize(input.reshape(-1, self.in_features), self.spec, _number(self.input_scale))
        y = input
        for index in range(len(self.links)):
            y = self._run(a, index, dtype)
            if index < last:
                a = self.ops.quantize(y, STATIC_SPEC, _number(getattr(self, f"scale_{index}")))
        y = y.to(dtype).reshape(*input.shape[:-1], self.out_features)
        return y if self.handing is None else self.handing.begin(y)

    def _run(self, a: Any, index: int, dtype: torch.dtype) -> Tensor:
        """Run one layer with its norm and activation, in float32 except for a plain last layer."""
        link, bias, weight = self.links[index], getattr(self, f"bias_{index}"), self.weights.get(index)
        if link.plain and index == len(self.links) - 1:
            p = self.ops.multiply(a, weight, dtype, fast_accum=self.fast_accum)
            return p if bias is None else p + bias.to(dtype)
        # In float32, like the reference: rounding a DLRM's GEMM to bf16 before the cast to FP8 adds half as much error
        # to its result as FP8 itself. fast_accum like the fused kernels, whatever the chain says.
        p = self.ops.multiply(a, weight, torch.float32, fast_accum=True)
        p = p if bias is None else p + bias.float()
        if link.norm == "none":
            return activate(p, link.activation, link.slope)
        if link.norm == "block":
            return _normed(p, link.norm, link.activation, None, None, None)
        weight_, bias_ = getattr(self, f"norm_weight_{index}"), getattr(self, f"norm_bias_{index}")
        return _normed(p.to(dtype), link.norm, link.activation, weight_, bias_, link.eps)


def _normed(p: Tensor, norm: str, activation: str, weight: Tensor | None, bias: Tensor | None, eps: float | None) -> Tensor:  # fmt: skip
    affine = weight is not None or bias is not None
    call = NormCall(p.shape[0], p.shape[1], None, norm, activation, affine, in_dtype=p.dtype, out_dtype=torch.float32)
    made = norms.run(p, call, weight=weight, bias=bias, eps=eps)
    assert made.y is not None
    return made.y


def write_out(model: nn.Module, ops: Ops, dtype: torch.dtype) -> tuple[nn.Module, dict[str, str]]:
    """Copy a frozen model with its converted modules replaced by plain ones. The copy shares all other tensors with it.

    Also returns name -> what runs in low precision there. Raises ValueError with the reasons if modules cannot be
    exported.
    """
    plain: dict[int, nn.Module] = {}
    written: dict[str, str] = {}
    problems: list[str] = []
    for name, module in model.named_modules():
        made = _write(name, module, ops, dtype, problems)
        if made is not None:
            plain[id(module)] = made
            if isinstance(made, (PlainLinear, PlainChain)):
                written[name] = _describe(made)
    if problems:
        raise ValueError("this model cannot be exported:\n  " + "\n  ".join(problems))
    twin = copy.deepcopy(model, {id(t): t for t in _tensors_of(model)})
    _exchange(model, twin, plain)
    for _, layer in list(interactions_of(twin)):
        release_interaction(layer)
    return plain.get(id(model), twin), written


def _write(name: str, module: nn.Module, ops: Ops, dtype: torch.dtype, problems: list[str]) -> nn.Module | None:
    """Return the replacement of a module, or None if it stays."""
    chain = chain_of(module)
    if chain is not None:
        if module is not chain.linears[0]:
            return None
        if chain.frozen is None:
            problems.append(
                f"{name}: a chain that is not frozen; hint: loka.convert(model, plan, freeze=True), "
                "or loka.placing.freeze_model(model)"
            )
            return None
        for index, weight in enumerate(chain.frozen):
            spec = ROW_SPEC if index == 0 and chain.input_scale is None else STATIC_SPEC
            if reason := ops.refuse(spec, weight, dtype):
                problems.append(f"{chain.links[index].linear}: {reason}")
        return None if problems else PlainChain(chain, ops)
    if isinstance(module, QuantizedLinear):
        bound, spec, scale, weight = module.bound, module.activation, None, module.qweight
    elif not isinstance(module, Linear):
        return None
    elif module.binding.fprop is None:  # only its gradient GEMMs run in low precision
        return module.restored()
    else:
        bound, spec = module.binding.fprop, module.binding.fprop.a
        scale = None if spec.mode == "dynamic" else _known_scale(module, spec)
        if scale is None and spec.mode != "dynamic":
            problems.append(f"{name}: its {spec.mode} scale is not known yet; hint: run batches under loka.placing.calibrating(model)")  # fmt: skip
            return None
        weight = quantize_weight(module.weight.detach(), bound.b)
    if reason := ops.refuse(spec, weight, dtype):
        problems.append(f"{name}: {reason}")
        return None
    return PlainLinear(weight, spec, scale, module.bias, ops, fast_accum=bound.fast_accum, dtype=dtype)


def _known_scale(module: Linear, spec: Spec) -> Tensor | None:
    state = module.state.x
    if state is None or not (state.calibrated if spec.mode == "static" else bool(state.largest > 0)):
        return None
    scale = state.scale_for(spec, state.largest)
    return None if scale is None else scale.detach().clone()


def _describe(module: PlainLinear | PlainChain) -> str:
    if isinstance(module, PlainLinear):
        return f"{module.spec} @ {module.weights.get(0).spec}"
    return f"chain of {len(module.links)}: {', '.join(link.linear for link in module.links)}"


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _exchange(model: nn.Module, twin: nn.Module, plain: dict[int, nn.Module]) -> None:
    """Replace the converted modules of the copy by the plain ones, under every name they have."""
    copies = dict(twin.named_modules(remove_duplicate=False))
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in plain:
            made = plain[id(module)]
            if isinstance(made, PlainChain):
                made.handing = chain_of(copies[name])
        if name and id(module) in plain:
            parent, _, child = name.rpartition(".")
            copies[parent]._modules[child] = plain[id(module)]
