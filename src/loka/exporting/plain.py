"""Converted modules written out in operations that every torch has, so that a traced graph needs nothing of ours.

    PlainLinear     q(x) W^T + b                               for a converted linear, and a quantised one
    PlainChain      the same, layer after layer, with norm, activation and the next layer's cast between them

Weights are FP8 buffers with their scales, made once; how casts and products are spelled is in `loka.exporting.ops`.

Our Triton kernels are Python, so a package cannot hold them: they are never chosen here. What a fused kernel of ours does in one launch, the compiler of the package does in a GEMM
and one pointwise kernel behind it.
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
    """A buffer; one number as a vector of one, since AOTInductor (torch 2.13) writes a 0-dim buffer into the code and then cannot reshape it."""
    kept = None if tensor is None else tensor.detach()
    module.register_buffer(name, kept.reshape(1) if kept is not None and kept.dim() == 0 else kept)


def _stand_in(dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without elements: models ask `next(self.parameters()).dtype`, and all others have become buffers."""
    return nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)


def _number(tensor: Tensor | None) -> Tensor | None:
    """One number again."""
    return None if tensor is None else tensor.reshape(())


class _Weights(nn.Module):
    """FP8 weights as buffers, by their place."""

    def __init__(self, weights: list[QTensor]) -> None:
        super().__init__()
        self._forms = [(w.spec, tuple(w.shape), layout_of(w)) for w in weights]
        for index, weight in enumerate(weights):
            for role, tensor in zip(("data", "scale", "laid"), parts_of(weight), strict=True):
                _keep(self, f"{role}_{index}", tensor)

    def get(self, index: int) -> QTensor:
        """The weight again."""
        spec, shape, layout = self._forms[index]
        data, scale, laid = (getattr(self, f"{role}_{index}") for role in ("data", "scale", "laid"))
        if spec.block == TENSOR:
            scale = scale.reshape(())
        laid = laid.reshape(()) if laid is not None and laid.dim() == 1 and laid.numel() == 1 else laid
        return assemble(data, scale, laid, spec, shape, layout)


class PlainLinear(nn.Module):
    """A linear in low precision.

    Args:
        weight: quantised.
        spec: of the activation.
        scale: of the activation where it is known beforehand; None: from the activation.
        bias: or None.
        ops: how it is written.
        fast_accum: sums stay in the tensor cores.
        dtype: of the weight it stands for.
    """

    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: QTensor, spec: Spec, scale: Tensor | None, bias: Tensor | None, ops: Ops, *, fast_accum: bool, dtype: torch.dtype) -> None:  # fmt: skip
        super().__init__()
        self.fast_accum, self.like = fast_accum, _stand_in(dtype, weight.device)
        self.out_features, self.in_features = weight.shape
        self.spec, self.ops = spec, ops
        self.weights = _Weights([ops.hold(weight, spec)])
        _keep(self, "scale", scale)
        _keep(self, "bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """x [..., K] -> y [..., N] in the input's type."""
        a = self.ops.quantize(input.reshape(-1, self.in_features), self.spec, _number(self.scale))
        y = self.ops.multiply(a, self.weights.get(0), input.dtype, fast_accum=self.fast_accum)
        y = y if self.bias is None else y + self.bias.to(input.dtype)
        return y.reshape(*input.shape[:-1], self.out_features)


class PlainChain(nn.Module):
    """A chain of linears, FP8 between them. What it computes is what `loka.lowp.chain_function` does without gradients.

    Args:
        chain: frozen.
        ops: how it is written.

    What stood between its linears computes nothing, as in the model, and the last linear gives the result: `handing` is the copy's chain, which says what is handed on.
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
        """Of what goes into a layer."""
        return self.spec if index == 0 else STATIC_SPEC

    def forward(self, input: Tensor) -> Tensor:
        """x [..., K] -> y [..., N] in the input's type."""
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
        """One layer up to its activation; in float32, but for a last product with nothing behind it."""
        link, bias, weight = self.links[index], getattr(self, f"bias_{index}"), self.weights.get(index)
        if link.plain and index == len(self.links) - 1:
            p = self.ops.multiply(a, weight, dtype, fast_accum=self.fast_accum)
            return p if bias is None else p + bias.to(dtype)
        # In float32, as in the law: rounded to bf16 before it is cast to FP8, a DLRM's product costs its result half of what FP8 itself does.
        p = self.ops.multiply(
            a, weight, torch.float32, fast_accum=True
        )  # as the fused kernels do, whatever the chain says
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
    """A copy of a model whose converted modules are plain; it shares all other tensors with the model.

    Args:
        model: frozen; not changed.
        ops: how casts and products are written.
        dtype: the type it computes in.

    Returns:
        The copy, and what runs in low precision there by name.

    Raises:
        ValueError: what cannot be written out, each by name with the reason.
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
    """What stands for a module; None for one that stays."""
    chain = chain_of(module)
    if chain is not None:
        if module is not chain.linears[0]:
            return None
        if chain.frozen is None:
            problems.append(f"{name}: a chain that is not frozen; hint: loka.convert(model, plan, freeze=True), or loka.placing.freeze_model(model)")  # fmt: skip
            return None
        for index, weight in enumerate(chain.frozen):
            spec = ROW_SPEC if index == 0 and chain.input_scale is None else STATIC_SPEC
            if reason := ops.refuse(spec, weight, dtype):
                problems.append(f"{chain.links[index].linear}: {reason}")
        return None if problems else PlainChain(chain, ops)
    if isinstance(module, QuantizedLinear):
        return _check(
            name, module.qweight, module.activation, None, module.bias, ops, module.bound.fast_accum, dtype, problems
        )
    if not isinstance(module, Linear):
        return None
    bound = module.binding.fprop
    if bound is None:  # only its gradients run in low precision
        return module.restored()
    spec, scale = bound.a, None
    if spec.mode != "dynamic":
        scale = _known_scale(module, spec)
        if scale is None:
            problems.append(f"{name}: its {spec.mode} scale is not known yet; hint: run batches under loka.placing.calibrating(model)")  # fmt: skip
            return None
    return _check(name, quantize_weight(module.weight.detach(), bound.b), spec, scale, module.bias, ops, bound.fast_accum, dtype, problems)  # fmt: skip


def _check(name: str, weight: QTensor, spec: Spec, scale: Tensor | None, bias: Tensor | None, ops: Ops, fast_accum: bool, dtype: torch.dtype, problems: list[str]) -> nn.Module | None:  # fmt: skip
    if reason := ops.refuse(spec, weight, dtype):
        problems.append(f"{name}: {reason}")
        return None
    return PlainLinear(weight, spec, scale, bias, ops, fast_accum=fast_accum, dtype=dtype)


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
    """Put the plain modules where the model has converted ones, under every name they have."""
    copies = dict(twin.named_modules(remove_duplicate=False))
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in plain:
            made = plain[id(module)]
            if isinstance(made, PlainChain):
                made.handing = chain_of(copies[name])
        if name and id(module) in plain:
            parent, _, child = name.rpartition(".")
            copies[parent]._modules[child] = plain[id(module)]
