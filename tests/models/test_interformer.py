import pytest
import torch

from loka import models
from loka.models.interformer import InterFormer, InterFormerConfig

from .checks import affine, assert_compiles, assert_same_with_gradients, layer_norm, randomize, tower

SMALL = {"n": 3, "d": 4, "layers": 1, "heads": 2, "cls": 2, "pma": 1, "recent": 2, "hidden": 12, "top": (8,)}
LENGTHS = torch.tensor([3, 0, 1])


def gating(z, module):
    return 1 / (1 + (-z * tower(z, module.mlp)).exp())


def turn(x):
    """Rotary positions of one example, [T, d]: pair (i, i + d/2) is a complex number, turned by an angle."""
    t, half = x.shape[0], x.shape[1] // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(t, dtype=x.dtype)[:, None] * rates
    z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], 1)


def attend(q, k, v):
    return ((q @ k.T) / q.shape[1] ** 0.5).softmax(-1) @ v


def summarise(module, x, s, length, config):
    """S_sum and X_sum of one example without padding: s [cls + length, d]."""
    x_sum = gating(tower(x.flatten(), module.compress).view(config.cls, config.d), module.x_gate)
    return x_sum, None if s is None else gating(
        torch.cat([s[: config.cls], pooled(module.pma, s), recent(s, length, config)]), module.s_gate
    )


def pooled(pma, s):
    k, v = affine(s, pma.kv).chunk(2, -1)
    parts = zip(pma.seeds.weight.chunk(2, -1), k.chunk(2, -1), v.chunk(2, -1), strict=True)
    return affine(torch.cat([attend(q, a, b) for q, a, b in parts], -1), pma.out)


def recent(s, length, config):
    zero = torch.zeros(config.d, dtype=s.dtype)
    return torch.stack([s[config.cls + length - 1 - i] if i < length else zero for i in range(config.recent)])


def interact(backbone, z, kind):
    n = z.shape[0]
    if kind == "dot":
        flat = torch.stack([z[i] @ z[j] for i in range(n) for j in range(i)])
    elif kind == "dcn":
        (cross,) = backbone.interaction.layers
        x0 = z.flatten()
        flat = x0 * affine(x0, cross.up) + x0
    else:
        layer = backbone.interaction
        dots = torch.stack([z[i] @ z[j] for i in range(n) for j in range(i)])
        made = affine(dots, layer.interactions["0_dot"].project).view(-1, z.shape[1])
        made = torch.cat([made, layer.interactions["1_linear"].weight @ z])
        flat = layer_norm(made + layer.shortcut.weight @ z, layer.norm).flatten()
    return tower(flat, backbone.mlp)


def plain_interformer(model, x, history, lengths):
    """One example at a time, its history cut to its length: no padding and no masks."""
    config, rows = model.config, []
    for xi, hi, length in zip(x, history, lengths.tolist(), strict=True):
        s = hi[:length]
        if config.histories > 1:
            s = affine(s * tower(s, model.merge.mask), model.merge.project)
        x_sum, _ = summarise(model.summaries[0], xi, None, length, config)
        s = torch.cat([x_sum, s])
        _, s_sum = summarise(model.summaries[0], xi, s, length, config)
        (layer,) = model.layers
        made = interact(layer.backbone, torch.cat([xi, s_sum]), config.backbone).view(config.n, config.d)
        personal = s @ tower(x_sum.flatten(), layer.pffn.make_weight).view(config.d, config.d).T
        q, k, v = affine(personal, layer.mha.qkv).chunk(3, -1)
        parts = zip(q.chunk(2, -1), k.chunk(2, -1), v.chunk(2, -1), strict=True)
        seen = affine(torch.cat([attend(turn(a), turn(b), c) for a, b, c in parts], -1), layer.mha.out)
        if config.residual:
            made, seen = layer_norm(xi + made, layer.x_norm), layer_norm(personal + seen, layer.s_norm)
        x_sum, s_sum = summarise(model.summaries[1], made, seen, length, config)
        rows.append(tower(torch.cat([x_sum, s_sum]).flatten(), model.head))
    return torch.stack(rows)


@pytest.mark.parametrize("backbone", ["dot", "dcn", "dhen"])
@pytest.mark.parametrize(("histories", "residual"), [(1, True), (2, False)])
def test_same_as_the_equations_in_float64(backbone, histories, residual):
    torch.manual_seed(0)
    config = InterFormerConfig(**SMALL, backbone=backbone, histories=histories, residual=residual)
    model = randomize(InterFormer(config).double())
    x = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    history = torch.randn(3, 3, 4 * histories, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(model, lambda *a: plain_interformer(model, *a), x, history, LENGTHS)


def test_what_lies_beyond_the_length_is_not_read():
    torch.manual_seed(0)
    model = InterFormer(InterFormerConfig(**SMALL))
    x, history = torch.randn(3, 3, 4), torch.randn(3, 3, 4)
    garbage = history.clone()
    garbage[torch.arange(3)[None, :] >= LENGTHS[:, None]] = 1e3
    torch.testing.assert_close(model(x, history, LENGTHS), model(x, garbage, LENGTHS))


def test_compiles_to_one_graph():
    torch.manual_seed(0)
    model = InterFormer(InterFormerConfig(**SMALL, backbone="dhen"))
    assert_compiles(model, torch.randn(3, 3, 4), torch.randn(3, 3, 4), LENGTHS)


@pytest.mark.parametrize("length", [0, 1, 8])
def test_batch_of_one_with_empty_and_longest_history(length):
    model = models.build("interformer", "tiny")
    out = model(torch.randn(1, 16, 16), torch.randn(1, 8, 16), torch.tensor([length]))
    assert out.isfinite().all()
    assert out.shape == (1, 1)


def test_large_costs_what_was_published():
    """28 GFLOP per sample, read as forward and backward: three times the forward."""
    assert models.count(models.configure("interformer", "large")).flops_forward * 3 == pytest.approx(28e9, rel=0.02)


def test_mistakes_are_named():
    model = InterFormer(InterFormerConfig(**SMALL))
    with pytest.raises(ValueError, match=r"history of shape \[B, T, 4\].*\(2, 3, 8\)"):
        model(torch.randn(2, 3, 4), torch.randn(2, 3, 8), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="3 heads"):
        InterFormerConfig(d=16, heads=3)
    with pytest.raises(ValueError, match="backbone is 'fm'"):
        InterFormerConfig(backbone="fm")
