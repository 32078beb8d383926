import math

import pytest
import torch

from loka.nn import DotProductAttention, SelfAttention
from loka.nn.attention import Rotary


def attend(q, k, v, seen):
    """One query at a time, in plain loops over heads and positions."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                keys = [s for s in range(k.shape[2]) if seen(b, t, s)]
                logits = torch.stack([q[b, h, t] @ k[b, h // group, s] for s in keys]) / math.sqrt(q.shape[-1])
                out[b, h, t] = sum(p * v[b, h // group, s] for p, s in zip(logits.softmax(0), keys, strict=True))
    return out


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_groups_of_queries_share_keys_and_values(groups):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    k, v = torch.randn(2, 2, groups, 6, 5, dtype=torch.float64)
    mask = torch.tensor([[True] * 6, [True, False, True, False, False, True]])
    expected = attend(q, k, v, lambda b, _t, s: bool(mask[b, s]))
    torch.testing.assert_close(DotProductAttention()(q, k, v, mask), expected)


def test_causal_sees_no_later_key():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(DotProductAttention(causal=True)(q, k, v), attend(q, k, v, lambda _b, t, s: s <= t))
    with pytest.raises(ValueError, match="no mask"):
        DotProductAttention(causal=True)(q, k, v, torch.ones(1, 4, dtype=torch.bool))


def test_rotary_turns_pairs_and_depends_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, dtype=torch.float64)
    rotate, close = Rotary(8, 12), {"rtol": 1e-6, "atol": 1e-6}
    turned_q = rotate(q.expand(1, 1, 10, 8))[0, 0]
    turned_k = rotate(k.expand(1, 1, 10, 8))[0, 0]
    by_hand = torch.polar(torch.ones(4, dtype=torch.float64), 3 * 10_000.0 ** (-torch.arange(4).double() / 4))
    expected = torch.complex(q[:4], q[4:]) * by_hand
    torch.testing.assert_close(turned_q[3], torch.cat([expected.real, expected.imag]), **close)
    torch.testing.assert_close(turned_q[7] @ turned_k[4], turned_q[5] @ turned_k[2], **close)
    with pytest.raises(ValueError, match="13 positions"):
        rotate(torch.zeros(1, 1, 13, 8))
    with pytest.raises(ValueError, match="even"):
        Rotary(3, 2)


def test_rotary_keeps_its_angles_in_16_bits_and_after_an_empty_start():
    table = Rotary(8, 12).table
    assert torch.equal(Rotary(8, 12).to(torch.bfloat16).table, table)
    with torch.device("meta"):
        made = Rotary(8, 12)
    made.to_empty(device="cpu").reset_parameters()
    assert torch.equal(made.table, table)
    assert not made.state_dict()


@pytest.mark.parametrize("rotary", [0, 7])
def test_self_attention(rotary):
    torch.manual_seed(0)
    layer = SelfAttention(8, 2, rotary=rotary, bias=True).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    q, k, v = (x @ layer.qkv.weight.T + layer.qkv.bias).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    if rotary:
        q, k = layer.rotary(q), layer.rotary(k)
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    out = attend(q, k, v, lambda b, _t, s: bool(mask[b, s])).transpose(1, 2).reshape(2, 5, 8)
    out = out * mask[:, :, None]  # padding is answered with zeros
    torch.testing.assert_close(layer(x, mask), out @ layer.out.weight.T + layer.out.bias)


def test_heads_must_divide():
    with pytest.raises(ValueError, match="3 heads do not divide a width of 8"):
        SelfAttention(8, 3)
