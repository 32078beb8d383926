"""Converted modules written out in operations that every torch has, so that a traced graph needs nothing of ours.

    PlainLinear     q(x) W^T + b                               for a converted linear, and a quantised one
    PlainChain      the same, layer after layer, with norm, activation and the next layer's cast between them

Weights are FP8 buffers with their scales, made once; activations are cast by amax, multiply, clamp, cast. Two spellings of these two operations:

    AtenOps     aten: a product of dequantised operands on a CPU, torch's own scaled product (cuBLASLt) on a GPU
    OnnxOps     QuantizeLinear -> DequantizeLinear -> Gemm, the pattern that runtimes replace by an FP8 product

Our Triton kernels are Python, so a package cannot hold them: they are never chosen here. What a fused kernel of ours does in one launch, the compiler of the package does in a GEMM
and one pointwise kernel behind it.
"""

import copy
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.formats import E4M3, E5M2, ROW, TENSOR, QTensor, Spec, expand_scale, scale_from_amax
from loka.kernels import registry
from loka.kernels.activation import activate
from loka.kernels.norm_quantize import NormCall
from loka.kernels.norm_quantize import reference as norms
from loka.kernels.prepared import assemble, layout_of, parts_of
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm import MatmulCall, prepare
from loka.lowp.chain import Chain, chain_of
from loka.lowp.chain_function import ROW_SPEC, STATIC_SPEC
from loka.lowp.interaction import interactions_of, release_interaction
from loka.lowp.linear import Linear
from loka.ptq.modules import QuantizedLinear, quantize_weight

ROWS = 1024  # a product of so many rows stands for all when a kernel is asked whether it can


class Ops(Protocol):
    """How a cast and a product are written."""

    def refuse(self, a: Spec, weight: QTensor, dtype: torch.dtype) -> str | None:
        """Why a product cannot be written, or None."""
        ...

    def hold(self, weight: QTensor, a: Spec) -> QTensor:
        """A weight as the product reads it."""
        ...

    def quantize(self, x: Tensor, spec: Spec, scale: Tensor | None) -> Any:
        """x [M, K] in low precision."""
        ...

    def multiply(self, a: Any, weight: QTensor, dtype: torch.dtype) -> Tensor:
        """a [M, K] @ weight [N, K]^T."""
        ...


class AtenOps:
    """Plain torch.

    Args:
        device: where the package will run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.gemm = device, "torch" if device.type == "cuda" else "reference"
        for op in ("quantize", "scaled_mm"):
            registry.load(op)

    def refuse(self, a: Spec, weight: QTensor, dtype: torch.dtype) -> str | None:
        """Formats that are no type of torch, and products that torch's own GEMM does not have."""
        if reason := _refuse_formats(a, weight.spec):
            return reason
        n, k = weight.shape
        verdict = registry.backend("scaled_mm", self.gemm).supports(MatmulCall(ROWS, k, n, a, weight.spec, dtype), self.device)  # fmt: skip
        return None if verdict else f"torch's own product {verdict.reason}, and no kernel of ours can be packaged"

    def hold(self, weight: QTensor, a: Spec) -> QTensor:
        """Padded and with its scales ordered as the product reads them."""
        return prepare(weight, a, backend=self.gemm)

    def quantize(self, x: Tensor, spec: Spec, scale: Tensor | None) -> QTensor:
        """By the law."""
        return quantize(x, spec, scale=scale, backend="compiled")

    def multiply(self, a: QTensor, weight: QTensor, dtype: torch.dtype) -> Tensor:
        """On the backend that was asked when the module was made; the law without its autocast block, which would be a graph of its own."""
        if self.gemm == "reference":
            return (_values_of(a) @ _values_of(weight).T).to(dtype)
        from loka.kernels.scaled_mm import torch as own

        return own.run_packaged(a, weight, out_dtype=dtype)


class OnnxOps:
    """Nodes of ONNX, opset 21. They compute nothing in eager: a module with these is only traced."""

    OPSET = 21
    _TYPES = {E4M3: (17, torch.float8_e4m3fn), E5M2: (19, torch.float8_e5m2)}  # noqa: RUF012 - a table

    def refuse(self, a: Spec, weight: QTensor, dtype: torch.dtype) -> str | None:
        """Formats that ONNX has no element type for."""
        return _refuse_formats(a, weight.spec)

    def hold(self, weight: QTensor, a: Spec) -> QTensor:
        """As it is."""
        return weight

    def quantize(self, x: Tensor, spec: Spec, scale: Tensor | None) -> Tensor:
        """QuantizeLinear and DequantizeLinear: the values that x has in low precision."""
        x = x.float()
        width = x.shape[1]
        across = width if spec.block in (TENSOR, ROW) else spec.block.cols
        if spec.block.rows > 1 and spec.block != TENSOR:
            raise ValueError(f"{spec} of an activation has no spelling in ONNX: several rows share a scale")
        wide = F.pad(x, (0, -width % across)) if width % across else x
        blocks = wide if across == width else wide.reshape(-1, across)
        if scale is None:
            amax = blocks.abs().amax((0, 1)) if spec.block == TENSOR else blocks.abs().amax(1)
            scale = scale_from_amax(amax, spec)
        code, kind = self._TYPES[spec.format]
        attributes: dict[str, Any] = {} if scale.dim() == 0 else {"axis": 0}
        q = self._node("QuantizeLinear", (blocks, scale), kind, blocks.shape, output_dtype=code, **attributes)
        values = self._node("DequantizeLinear", (q, scale), torch.float32, blocks.shape, **attributes)
        return values if across == width else values.reshape(wide.shape)[:, :width]

    def multiply(self, a: Tensor, weight: QTensor, dtype: torch.dtype) -> Tensor:
        """Gemm and not MatMul: onnxruntime 1.31 turns a MatMul behind two DequantizeLinear into an integer product, and then refuses its own graph for being FP8."""
        values = self._values(weight)
        product = self._node("Gemm", (a, values), torch.float32, (a.shape[0], weight.shape[0]), transB=1)
        return product if dtype == torch.float32 else product.to(dtype)

    def _values(self, weight: QTensor) -> Tensor:
        data, scale, (rows, width) = weight.data, weight.scale, weight.shape
        if scale.dim() == 0:
            return self._node("DequantizeLinear", (data, scale), torch.float32, data.shape)
        if weight.spec.block == ROW:
            return self._node("DequantizeLinear", (data, scale.reshape(-1)), torch.float32, data.shape, axis=0)
        one = self._node("DequantizeLinear", (data, torch.ones((), device=data.device)), torch.float32, data.shape)
        return one * expand_scale(scale, (rows, width), weight.spec.block)

    def _node(self, name: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Tensor:
        made: Tensor = torch.onnx.ops.symbolic(name, inputs, attributes, dtype=dtype, shape=shape, version=self.OPSET)
        return made


def _values_of(q: QTensor) -> Tensor:
    """data * scale, block by block.

    Not `q.dequantize()`: that repeats scales along the columns, and Inductor (torch 2.13) on a CPU reads beyond them where the width is no multiple of the block: at 200 columns
    `x * scales[torch.arange(200) // 128]` compiled is off by 1e33.
    """
    values, block = q.data.float(), q.spec.block
    if block in (TENSOR, ROW):
        return values * q.scale
    rows, columns = values.shape
    high, wide = (min(size, whole) for size, whole in zip((block.rows, block.cols), values.shape, strict=True))
    values = F.pad(values, (0, -columns % wide, 0, -rows % high))
    parts = values.reshape(-1, high, values.shape[1] // wide, wide) * q.scale[:, None, :, None]
    return parts.reshape(values.shape)[:rows, :columns]


def _refuse_formats(*specs: Spec) -> str | None:
    for spec in specs:
        if spec.format not in (E4M3, E5M2) or spec.scale == "e4m3":
            return f"{spec} is emulated here and has no type outside; e4m3 and e5m2 have"
    return None


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
        dtype: of the weight it stands for.
    """

    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: QTensor, spec: Spec, scale: Tensor | None, bias: Tensor | None, ops: Ops, dtype: torch.dtype = torch.float32) -> None:  # fmt: skip
        super().__init__()
        self.like = _stand_in(dtype, weight.device)
        self.out_features, self.in_features = weight.shape
        self.spec, self.ops = spec, ops
        self.weights = _Weights([ops.hold(weight, spec)])
        _keep(self, "scale", scale)
        _keep(self, "bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """x [..., K] -> y [..., N] in the input's type."""
        a = self.ops.quantize(input.reshape(-1, self.in_features), self.spec, _number(self.scale))
        y = self.ops.multiply(a, self.weights.get(0), input.dtype)
        y = y if self.bias is None else y + self.bias.to(input.dtype)
        return y.reshape(*input.shape[:-1], self.out_features)


class PlainChain(nn.Module):
    """A chain of linears, FP8 between them. What it computes is what `loka.lowp.chain_function` does without gradients.

    Args:
        chain: frozen.
        ops: how it is written.

    What stood between its linears hands on the result, as it does in the model: `handing` is the copy's chain, which is told of it.
    """

    input_scale: Tensor | None
    handing: Chain | None = None

    def __init__(self, chain: Chain, ops: Ops) -> None:
        super().__init__()
        assert chain.frozen is not None
        self.like = _stand_in(chain.linears[0].weight.dtype, chain.frozen[0].device)
        self.links, self.ops = chain.links, ops
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
        if self.handing is not None:
            self.handing.begin(y)
        return y

    def _run(self, a: Any, index: int, dtype: torch.dtype) -> Tensor:
        """One layer up to its activation; in float32 unless it is a product and nothing else."""
        link, bias, weight = self.links[index], getattr(self, f"bias_{index}"), self.weights.get(index)
        if link.plain:
            p = self.ops.multiply(a, weight, dtype)
            return p if bias is None else p + bias.to(dtype)
        # On a GPU the product is written in the model's type, half the bytes of float32; emulated, it is float32 as in the law.
        p = self.ops.multiply(a, weight, dtype if a.device.type == "cuda" else torch.float32).float()
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
        return _check(name, module.qweight, module.activation, None, module.bias, ops, dtype, problems)
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
    return _check(name, quantize_weight(module.weight.detach(), bound.b), spec, scale, module.bias, ops, dtype, problems)  # fmt: skip


def _check(name: str, weight: QTensor, spec: Spec, scale: Tensor | None, bias: Tensor | None, ops: Ops, dtype: torch.dtype, problems: list[str]) -> nn.Module | None:  # fmt: skip
    if reason := ops.refuse(spec, weight, dtype):
        problems.append(f"{name}: {reason}")
        return None
    return PlainLinear(weight, spec, scale, bias, ops, dtype)


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
