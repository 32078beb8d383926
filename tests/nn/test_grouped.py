import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from loka.nn import GroupedLinear

ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_row_meets_its_own_expert_with_gradients(dtype, device):
    layer = GroupedLinear(3, 8, 16).to(device, dtype)
    x = torch.randn(5, 8, dtype=dtype, device=device, requires_grad=True)
    expert = [0, 0, 2, 2, 2]
    expected = torch.stack([layer.weight[e] @ x[r] for r, e in enumerate(expert)])
    out = layer(x, ENDS.to(device))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, expected, **tolerance)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, layer.weight), grad)
    theirs = torch.autograd.grad(expected, (x, layer.weight), grad)
    torch.testing.assert_close(ours, theirs, **tolerance)
    assert ours[1][1].eq(0).all(), "an expert without rows has no gradient"


def test_no_rows_at_all():
    layer = GroupedLinear(3, 8, 16)
    out = layer(torch.zeros(0, 8, requires_grad=True), torch.zeros(3, dtype=torch.int32))
    assert out.shape == (0, 16)
    out.sum().backward()
    assert layer.weight.grad.eq(0).all()


def test_op_is_sound_for_the_compiler():
    x = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(3, 16, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.loka.grouped_linear.default, (x, weight, ENDS))


def test_flops_are_those_of_one_expert_per_row():
    layer = GroupedLinear(3, 8, 16)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(5, 8), ENDS)
    assert counter.get_total_flops() == 2 * 5 * 8 * 16


def test_widths_of_grouped_gemms():
    with pytest.raises(ValueError, match="multiples of 8, got 8 -> 12"):
        GroupedLinear(3, 8, 12)
