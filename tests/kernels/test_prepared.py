"""Weights laid out once: the same weight to everybody, the same bits from its backend, and no layout work left for the call."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loka.formats import QTensor, Spec, quantize
from loka.kernels import registry
from loka.kernels.prepared import Prepared, assemble, laid_out, layout_of, parts_of
from loka.kernels.scaled_mm import deepgemm, fbgemm, prepare, reference, scaled_mm, torchao
from loka.kernels.scaled_mm import torch as library
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure.adapter import parse_variant
from loka.measure.conformance import check_scaled_mm
from loka.measure.inputs import matmul_operands

from .padding import padding_backend

MODULES = {"torch": library, "deepgemm": deepgemm, "fbgemm": fbgemm, "torchao": torchao}
PAIRS = [
    ("torch", "e4m3:tensor@e4m3:tensor"),
    ("torch", "e4m3:row@e4m3:row"),
    ("torch", "e4m3:row@e4m3:tensor"),  # dgrad of rowwise_with_gw_hp
    ("torch", "e4m3:tensor@e4m3:row"),
    ("torch", "e4m3:1x128@e4m3:128x128"),
    ("torch", "e4m3:1x128@e4m3:1x128"),
    ("torch", "e4m3:128x128@e4m3:1x128"),
    ("deepgemm", "e4m3:1x128@e4m3:128x128"),
    ("deepgemm", "e4m3:1x128@e4m3:1x128|float32"),
    ("fbgemm", "e4m3:tensor@e4m3:tensor"),
    ("fbgemm", "e4m3:row@e4m3:row"),
    ("fbgemm", "e4m3:row@e4m3:tensor"),
    ("fbgemm", "e4m3:1x128@e4m3:128x128"),
    ("fbgemm", "e4m3:128x128@e4m3:128x128"),
    ("torchao", "e4m3:1x128@e4m3:128x128"),
]
SHAPES = [(16, 13, 27), (16, 479, 64), (16, 640, 13), (16, 1408, 200), (16, 512, 256)]
every_pair = pytest.mark.parametrize(("name", "variant"), PAIRS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
COPIES = {"constant_pad_nd", "clone", "copy_", "_to_copy", "repeat", "contiguous", "cat", "index_put_", "fill_"}


def operands(variant: str, shape: tuple[int, int, int]) -> tuple[MatmulCall, QTensor, QTensor]:
    call = parse_variant(variant, shape)
    return call, *matmul_operands(call)


class Work(TorchDispatchMode):
    """Operations that move bytes, by name, but for `ours`: the GEMM itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen += [name] if name in COPIES else []
        return func(*args, **(kwargs or {}))


def handed_over(monkeypatch, name: str, call: MatmulCall, a: QTensor, b: QTensor) -> tuple[list, list[str]]:
    """The arguments of the library's GEMM, which is not here to be run, and the copies that were made on the way."""
    module, seen = MODULES[name], []

    def gemm(*args):
        seen.extend(args)
        left, right = (
            (args[0], args[1].t()) if name == "torch" else (args[0], args[2 if name in ("deepgemm", "torchao") else 1])
        )
        return left.new_zeros(left.shape[0], right.shape[0], dtype=call.out_dtype)

    monkeypatch.setattr(module, "_scaled_mm" if name == "torch" else "_gemm", gemm)
    with Work() as work:
        out = module.run(a, b, out_dtype=call.out_dtype)
    assert out.shape == (call.m, call.n)
    return seen, work.seen


@every_pair
@every_shape
def test_the_library_is_handed_the_same_tensors(monkeypatch, name: str, variant: str, shape) -> None:
    call, a, b = operands(variant, shape)
    prepared = registry.prepare("scaled_mm", name, b, a.spec)
    plain, _ = handed_over(monkeypatch, name, call, a, b)
    other, _ = handed_over(monkeypatch, name, call, a, prepared)
    assert len(plain) == len(other)
    for x, y in zip(plain, other, strict=True):
        if not isinstance(x, torch.Tensor):
            assert x == y
            continue
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        assert torch.equal(x.float(), y.float())


@every_pair
@every_shape
def test_no_copy_of_the_weight_is_left(monkeypatch, name: str, variant: str, shape) -> None:
    """What a call still copies is its activation: as much as beside a weight that needs nothing."""
    call, a, b = operands(variant, shape)
    if (
        a.spec.block.rows == 1 and name != "torchao"
    ):  # as our quantiser writes them; torchao's kernel reads them the other way
        a = replace(a, scale=a.scale.t().contiguous().t())
    easy = registry.prepare("scaled_mm", name, matmul_operands(replace(call, n=256))[1], a.spec)
    _, floor = handed_over(monkeypatch, name, replace(call, n=256), a, easy)
    _, after = handed_over(monkeypatch, name, call, a, registry.prepare("scaled_mm", name, b, a.spec))
    cut = ["clone"] if shape[2] % {"torchao": 1, "deepgemm": 64}.get(name, _granule(call)) else []  # of the output
    assert after == floor + cut
    if shape[1] % 128 == 0 and a.spec.block.rows != 128 and not (a.scale.dim() == 0 and "row" in variant):
        assert after == cut


def _granule(call: MatmulCall) -> int:
    return 128 if call.b.block.rows == 128 else 16


@every_pair
def test_without_it_there_was_work_in_every_call(monkeypatch, name: str, variant: str) -> None:
    call, a, b = operands(variant, (16, 640 if name != "torchao" else 479, 200 if name != "torchao" else 256))
    _, before = handed_over(monkeypatch, name, call, a, b)
    _, after = handed_over(monkeypatch, name, call, a, registry.prepare("scaled_mm", name, b, a.spec))
    assert len(before) > len(after)


@every_pair
@every_shape
def test_it_is_the_same_weight_to_everybody(name: str, variant: str, shape) -> None:
    call, a, b = operands(variant, shape)
    prepared = registry.prepare("scaled_mm", name, b, a.spec)
    assert (prepared.shape, prepared.spec, prepared.device) == (b.shape, b.spec, b.device)
    assert torch.equal(prepared.dequantize(), b.dequantize())
    assert MatmulCall.of(a, prepared, out_dtype=call.out_dtype) == MatmulCall.of(a, b, out_dtype=call.out_dtype)
    result = reference.run(a, prepared, out_dtype=torch.float32)
    assert torch.equal(result, reference.run(a, b, out_dtype=torch.float32))
    assert registry.prepare("scaled_mm", name, prepared, a.spec) is prepared
    for other in MODULES:  # prepared for one backend, then for another
        again = registry.prepare("scaled_mm", other, prepared, a.spec)
        assert torch.equal(again.dequantize(), b.dequantize())


@pytest.mark.parametrize("name", registry.BACKENDS["scaled_mm"])
def test_nothing_to_do_gives_the_weight_itself(name: str) -> None:
    a, b = matmul_operands(parse_variant("e4m3:row@e4m3:row", (16, 512, 256)))
    assert registry.prepare("scaled_mm", name, b, a.spec) is b
    for text in ("int4:row", "e4m3:64x64", "e4m3:col", "e2m1:1x16:e4m3"):  # which no library multiplies
        odd = quantize(torch.randn(27, 13), Spec.parse(text))
        assert torch.equal(registry.prepare("scaled_mm", name, odd, a.spec).dequantize(), odd.dequantize())
    for shape in ((0, 16), (16, 0)):
        empty = quantize(torch.empty(shape), b.spec)
        assert registry.prepare("scaled_mm", name, empty, a.spec) is empty


def test_backends_that_lay_nothing_out_have_no_prepare() -> None:
    without = {
        (op, name)
        for op in ("scaled_mm", "grouped_mm")
        for name in registry.BACKENDS[op]
        if not hasattr(registry.backend(op, name), "prepare")
    }
    assert without == {
        ("scaled_mm", "reference"),
        ("grouped_mm", "reference"), ("grouped_mm", "torch"), ("grouped_mm", "deepgemm"),
    }  # fmt: skip
    b = quantize(torch.randn(27, 13), Spec.parse("e4m3:row"))
    assert registry.prepare("scaled_mm", "reference", b, b.spec) is b


def test_a_changed_copy_is_not_prepared() -> None:
    spec = Spec.parse("e4m3:row")
    prepared = registry.prepare("scaled_mm", "torch", quantize(torch.randn(27, 13), spec), spec)
    assert isinstance(prepared, Prepared)
    assert layout_of(prepared) == ("torch", spec.block)
    doubled = replace(prepared, scale=prepared.scale * 2)
    assert layout_of(doubled) is None
    assert torch.equal(doubled.dequantize(), 2 * prepared.dequantize())
    turned = prepared.transpose()
    assert layout_of(turned) is None
    assert torch.equal(turned.dequantize(), prepared.dequantize().T)


def test_it_takes_no_second_copy_and_survives_copying() -> None:
    spec = Spec.parse("e4m3:row")
    weight = quantize(torch.randn(27, 13), spec)
    prepared = registry.prepare("scaled_mm", "torch", weight, spec)
    data, scale, laid = parts_of(prepared)
    assert data.shape == (32, 16)
    assert prepared.data.data_ptr() == data.data_ptr()
    assert prepared.nbytes == 32 * 16 + 4 * 27 + 4 * 32
    again = assemble(data, scale, laid, spec, (27, 13), layout_of(prepared))
    twin = copy.deepcopy(prepared)
    for other in (again, twin):
        assert layout_of(other) == layout_of(prepared)
        assert torch.equal(other.dequantize(), weight.dequantize())


def test_another_partner_is_another_layout() -> None:
    """One scale beside row scales is repeated per row; beside one scale it is not."""
    row, tensor = Spec.parse("e4m3:row"), Spec.parse("e4m3:tensor")
    weight = quantize(torch.randn(32, 64), tensor)
    assert library.prepare(weight, tensor) is weight
    beside_rows = library.prepare(weight, row)
    assert parts_of(beside_rows)[2].shape == (32, 1)
    with Work() as work:  # it is the wrong one here, and is not taken for the right one
        _, scale = laid_out(beside_rows, "torch", tensor, library.lay_out)
    assert scale.dim() == 0
    assert work.seen == []


def test_by_name_or_by_the_registrys_choice() -> None:
    a, b = matmul_operands(parse_variant("e4m3:row@e4m3:row", (4, 13, 27)))
    assert layout_of(prepare(b, a.spec, backend="torch")) == ("torch", a.spec.block)
    chosen = prepare(b, a.spec)
    name = registry.first("scaled_mm", MatmulCall(1024, 13, 27, a.spec, b.spec), b.device).name
    assert layout_of(chosen) == layout_of(registry.prepare("scaled_mm", name, b, a.spec))
    expected = scaled_mm(a, b, out_dtype=torch.bfloat16, backend="reference")
    assert torch.equal(
        scaled_mm(a, prepare(b, a.spec, backend="fbgemm"), out_dtype=torch.bfloat16, backend="reference"), expected
    )


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch has no scaled_mm on the CPU (2.11 has none, 2.13 has)",
)
@every_shape
@pytest.mark.parametrize("variant", [variant for name, variant in PAIRS[:4]])
def test_torch_gives_the_same_bits(variant: str, shape) -> None:
    call, a, b = operands(variant, shape)
    prepared = library.prepare(b, a.spec)
    out = library.run(a, prepared, out_dtype=torch.bfloat16)
    assert torch.equal(out, library.run(a, b, out_dtype=torch.bfloat16))
    verdict = check_scaled_mm(library, call, a, b)
    assert verdict, verdict.reason


@pytest.mark.parametrize(("name", "variant"), [pair for pair in PAIRS if "tensor" not in pair[1]])
def test_a_traced_call_takes_it_without_a_graph_break(monkeypatch, name: str, variant: str) -> None:
    call, a, b = operands(variant, (16, 640, 200))
    prepared = registry.prepare("scaled_mm", name, b, a.spec)
    module = MODULES[name]

    def gemm(*args):
        left, right = (
            (args[0], args[1].t()) if name == "torch" else (args[0], args[2 if name in ("deepgemm", "torchao") else 1])
        )
        return left.float() @ right.float().t()

    monkeypatch.setattr(module, "_scaled_mm" if name == "torch" else "_gemm", gemm)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: module.run(x, w, out_dtype=call.out_dtype), fullgraph=True, backend="eager")
    assert torch.equal(compiled(a, prepared), module.run(a, b, out_dtype=call.out_dtype))


@pytest.mark.parametrize("kind", ["e4m3:row@e4m3:row", "e4m3:1x128@e4m3:128x128"])
def test_grouped_weights_are_padded_once(kind: str) -> None:
    from loka.kernels import grouped_mm
    from loka.kernels.grouped_mm import triton

    a, b = (Spec.parse(text) for text in kind.split("@"))
    w = quantize(torch.randn(3, 24, 40), b)
    prepared = grouped_mm.prepare(w, a, backend="triton")
    assert parts_of(prepared)[0].shape == (3, 24, 48)
    assert torch.equal(prepared.dequantize(), w.dequantize())
    x = quantize(torch.randn(5, 48), a)
    x = QTensor(x.data[:, :40], x.scale, a)  # rows at multiples of 16 bytes, as our quantiser writes them
    plain, other = triton._operands(x, w), triton._operands(x, prepared)
    assert torch.equal(plain[1].view(torch.uint8), other[1].view(torch.uint8))
    with Work() as work:
        triton._operands(x, prepared)
    assert work.seen == []
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    results = [
        grouped_mm.grouped_mm(x, v, offsets, out_dtype=torch.float32, backend="reference") for v in (w, prepared)
    ]
    assert torch.equal(*results)


def test_the_gate_stops_a_preparation_that_changes_the_result() -> None:
    call, a, b = operands("e4m3:row@e4m3:row", (8, 64, 24))
    honest = padding_backend()
    assert check_scaled_mm(honest, call, a, b)
    assert honest.count >= 2  # plain runs, and the preparation
    slightly = padding_backend()
    slightly.prepare = lambda weight, spec: replace(weight, scale=weight.scale * (1 + 2.0**-7))
    verdict = check_scaled_mm(slightly, call, a, b)
    assert not verdict
    assert "differ with a prepared weight, first at [0, 0]" in verdict.reason
    longer = padding_backend()
    longer.prepare = lambda weight, spec: QTensor(weight.data[:16], weight.scale[:16], weight.spec)
    assert "gives (8, 16), the plain one (8, 24)" in check_scaled_mm(longer, call, a, b).reason


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1, 4096, 1000), (512, 640, 384)], ids=str)
@pytest.mark.parametrize("name", ["torch", "triton", "deepgemm", "fbgemm"])
def test_on_a_gpu_the_bits_are_the_same(name: str, shape) -> None:
    backend, device, ran = registry.backend("scaled_mm", name), torch.device("cuda"), 0
    variants = {variant for _, variant in PAIRS} | {"e4m3:row@e4m3:row|fast"}
    for variant in sorted(variants):
        call = parse_variant(variant, shape)
        if backend.supports(call, device):
            ran += 1
            a, b = matmul_operands(call, device=device)
            options = {"out_dtype": call.out_dtype, "fast_accum": call.fast_accum}
            prepared = registry.prepare("scaled_mm", name, b, a.spec)
            assert torch.equal(backend.run(a, prepared, **options), backend.run(a, b, **options)), variant
    if not ran:
        pytest.skip(f"{name}: {backend.supports(call, device).reason}")
