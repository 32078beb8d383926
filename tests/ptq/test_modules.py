"""Quantised modules hold their weight ready for the GEMM: odd widths are padded when a module is made, moved or loaded, never in a forward."""

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kernels.padding import in_place_of_the_reference
from loka.formats import QTensor, Spec
from loka.formats import quantize as quantize_by_law
from loka.kernels.prepared import parts_of
from loka.nn import GroupedLinear
from loka.ptq.modules import QuantizedExperts, QuantizedLinear, quantize_weight

ROW = Spec.parse("e4m3:row")


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return in_place_of_the_reference(monkeypatch)


def make(seed: int = 0) -> QuantizedLinear:
    torch.manual_seed(seed)
    source = nn.Linear(13, 27)
    return QuantizedLinear(quantize_by_law(source.weight, ROW), ROW, source.bias, backend="reference")


def test_a_forward_lays_nothing_out(padding: SimpleNamespace) -> None:
    module = make()
    assert padding.count == 1
    assert parts_of(module.ready)[0].shape == (32, 16)
    for _ in range(3):
        module(torch.randn(5, 13))
    assert padding.count == 1


def test_the_state_dict_is_of_the_weight_as_it_is(padding: SimpleNamespace) -> None:
    module = make()
    assert {name: tuple(t.shape) for name, t in module.state_dict().items()} == {
        "weight": (27, 13), "weight_scale": (27, 1), "bias": (27,),
    }  # fmt: skip


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_weight_is_the_one_that_runs(padding: SimpleNamespace, assign: bool) -> None:
    module, other = make(), make(1)
    x = torch.randn(5, 13)
    assert not torch.equal(module(x), other(x))
    module.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(module(x), other(x))


def test_a_moved_or_copied_module_brings_it_along(padding: SimpleNamespace) -> None:
    module = make()
    x = torch.randn(5, 13)
    expected = module(x)
    twin = copy.deepcopy(module)
    assert parts_of(twin.ready)[0].data_ptr() != parts_of(module.ready)[0].data_ptr()
    assert torch.equal(twin(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), expected)
    assert torch.equal(module.double().float()(x), expected)  # casts leave the FP8 bytes alone
    assert module.to("meta").ready.device.type == "meta"


def test_buffers_written_into_or_exchanged_are_what_runs(padding: SimpleNamespace) -> None:
    other, x = make(1), torch.randn(5, 13)
    expected = other(x)
    written, assigned, swapped = make(), make(), make()
    for name, tensor in other.state_dict().items():
        written.state_dict()[name].copy_(tensor)
        setattr(assigned, name, tensor if name != "bias" else other.bias)
    assert torch.equal(written(x), expected)
    assert torch.equal(assigned(x), expected)
    before, tensors = swapped(x), dict(other.state_dict())
    assert torch.equal(torch.func.functional_call(swapped, tensors, (x,)), expected)
    assert torch.equal(swapped(x), before)
    count = padding.count
    written(x)
    assert padding.count == count  # laid out once, after the write
    assigned.weight = other.weight  # read in high precision
    with pytest.raises(
        ValueError, match=r"replaced by torch.float32, expected torch.float8_e4m3fn.*hint: assign the `codes`"
    ):
        assigned(x)


def test_compiled_it_is_one_graph(padding: SimpleNamespace) -> None:
    torch._dynamo.reset()
    module, x = make(), torch.randn(5, 13)
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))


def test_printing_computes_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    module = QuantizedLinear(quantize_by_law(torch.randn(32, 64), Spec.parse("e4m3:row")), Spec.parse("e4m3:row"), None)
    monkeypatch.setattr(QTensor, "dequantize", lambda *given: pytest.fail("computed"))
    assert "(32, 64)" in repr(module)


def test_most_widths_are_the_buffers_themselves() -> None:
    weight = quantize_by_law(torch.randn(32, 64), ROW)
    for backend in ("auto", "torch", "triton", "fbgemm"):
        module = QuantizedLinear(weight, ROW, None, backend=backend)
        assert module.ready.data is module.codes
        assert module.ready.scale is module.weight_scale


def test_experts_too() -> None:
    torch.manual_seed(0)
    source = GroupedLinear(3, 40, 24)
    weight = quantize_weight(source.weight.detach(), ROW)
    module = QuantizedExperts(weight, ROW, backend="triton")
    assert parts_of(module.ready)[0].shape == (3, 24, 48)
    assert torch.equal(module.ready.dequantize(), weight.dequantize())
    plain = QuantizedExperts(weight, ROW, backend="reference")
    assert plain.ready.data is plain.codes
    x, ends = torch.randn(6, 40), torch.tensor([2, 2, 6], dtype=torch.int32)
    module.bound = replace(module.bound, backend="reference")  # any backend takes what was prepared for another
    assert torch.equal(module(x, ends), plain(x, ends))
