"""FusedTower: the tower it replaces, up to FP8 rounding; its gradients; its names; its refusals."""

import copy

import pytest
import torch
from torch import Tensor, nn

from loka.formats import Spec, fake_quantize
from loka.lowp import FusedTower, Link, TowerPrecision
from loka.lowp.fused_tower import freeze
from loka.nn import MLP, BlockNorm, Style

MODDED = Style(norm="block", activation="hard_swish", bias=False, tower_norm="block")


def make_tower(width: int = 70, hidden=(300, 256), out: int | None = 27, *, bias: bool = False) -> MLP:
    torch.manual_seed(0)
    style = Style(norm="block", activation="hard_swish", bias=bias, tower_norm="block")
    return MLP(width, list(hidden), out, style=style)


def links_of(mlp: MLP) -> list[Link]:
    links = [Link(f"layers.{i}.linear") for i in range(len(mlp.layers))]
    return links + ([Link("last", 0, "none")] if isinstance(mlp.last, nn.Linear) else [])


def fused(mlp: MLP, **options) -> FusedTower:
    return FusedTower.replacing(mlp, links_of(mlp), **options)


def emulate(mlp: MLP, x: Tensor) -> Tensor:
    """The same tower with rounding where FP8 rounds, written with the modules themselves."""
    q = Spec.parse("e4m3:tensor")
    static = Spec.parse("e4m3:tensor:static")
    a = fake_quantize(x, q)
    for layer in mlp.layers:
        p = a @ fake_quantize(layer.linear.weight.detach(), q).T
        if layer.linear.bias is not None:
            p = p + layer.linear.bias
        a = layer.activation(layer.norm(p))
        if layer is not mlp.layers[-1] or isinstance(mlp.last, nn.Linear):
            a = fake_quantize(a.detach(), static, scale=torch.tensor(1 / 16))
    if isinstance(mlp.last, nn.Linear):
        a = a @ fake_quantize(mlp.last.weight.detach(), q).T
        if mlp.last.bias is not None:
            a = a + mlp.last.bias
    return a


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out", [27, None])
def test_forward_is_the_tower_with_fp8_rounding(bias: bool, out: int | None) -> None:
    mlp = make_tower(out=out, bias=bias)
    x = torch.randn(33, 70)
    tower = fused(mlp)
    torch.testing.assert_close(tower(x), emulate(mlp, x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(tower(x), emulate(mlp, x), rtol=1e-4, atol=1e-4)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm().detach() / b.norm().detach())


@pytest.mark.parametrize("gradient", ["tensor", "block"])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_autograds_up_to_fp8(gradient: str, bias: bool, device: torch.device) -> None:
    mlp = make_tower(width=128, hidden=(256, 256), out=128, bias=bias).to(device)
    twin = copy.deepcopy(mlp)
    tower = fused(mlp, precision=TowerPrecision(gradient=gradient))
    x = torch.randn(256, 128, device=device, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    weight = torch.randn(256, 128, device=device)
    (tower(x) * weight).sum().backward()
    (twin(y) * weight).sum().backward()
    assert relative(x.grad, y.grad) < 0.12
    assert relative(x.grad, y.grad) > 1e-3  # FP8 did run
    for (name, mine), (_, theirs) in zip(mlp.named_parameters(), twin.named_parameters(), strict=True):
        assert mine.grad is not None, name
        assert mine.grad.dtype == mine.dtype
        assert relative(mine.grad, theirs.grad) < 0.12, name


def test_e5m2_gradients_are_coarser() -> None:
    errors = []
    for name in ("e4m3", "e5m2"):
        mlp = make_tower(width=128, hidden=(256,), out=64)
        twin = copy.deepcopy(mlp)
        tower = fused(mlp, precision=TowerPrecision(gradient_format=name))
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
        tower(x).square().sum().backward()
        twin(x).square().sum().backward()
        errors.append(relative(mlp.layers[0].linear.weight.grad, twin.layers[0].linear.weight.grad))
    assert errors[0] < errors[1]


def test_names_stay_and_come_back() -> None:
    mlp = make_tower()
    before = {name: value.clone() for name, value in mlp.state_dict().items()}
    tower = fused(mlp)
    assert list(tower.state_dict()) == list(before)
    assert all(torch.equal(tower.state_dict()[name], value) for name, value in before.items())
    assert [name for name, _ in tower.named_parameters()] == [name for name, _ in mlp.named_parameters()]
    assert tower.restored() is mlp


def test_a_bounded_input_has_a_static_scale() -> None:
    mlp = make_tower(out=None, hidden=(256,))
    x = torch.randn(8, 70)
    static = fused(mlp, bounded_input=True)
    expected = mlp.layers[0](fake_quantize(x, Spec.parse("e4m3:tensor:static"), scale=torch.tensor(1 / 16)))
    assert relative(static(x), expected) < 0.05
    assert not torch.equal(static(x), fused(mlp)(x))


def test_a_tail_stays_in_high_precision() -> None:
    mlp = make_tower(hidden=(256,), out=1)
    tower = FusedTower.replacing(mlp, [Link("layers.0.linear")], tail=["last"])
    hidden = FusedTower.replacing(make_tower(hidden=(256,), out=None), [Link("layers.0.linear")])
    x = torch.randn(5, 70)
    torch.testing.assert_close(tower(x), mlp.last(hidden(x)))


def test_freezing_changes_nothing_until_the_weights_do() -> None:
    mlp = make_tower()
    tower = fused(mlp).eval()
    x = torch.randn(9, 70)
    with torch.no_grad():
        plain = tower(x)
        assert freeze(nn.Sequential(tower)) == 1
        assert torch.equal(tower(x), plain)
        assert "frozen" in repr(tower)
        mlp.last.weight.mul_(2)
        assert torch.equal(tower(x), plain), "frozen weights are not followed"
        tower.load_state_dict(mlp.state_dict())
        assert not tower.frozen, "loading weights thaws"
        assert not torch.equal(tower(x), plain)
        tower.freeze()
        assert not tower.train().frozen
    assert list(tower.state_dict()) == list(mlp.state_dict())


def test_offloaded_weights_come_back(device: torch.device) -> None:
    mlp = make_tower().to(device)
    tower = fused(mlp).eval()
    x = torch.randn(9, 70, device=device)
    with torch.no_grad():
        plain = tower(x)
        freeze(tower, offload=True)
        assert {p.device.type for p in mlp.parameters()} == {"cpu"}
        assert torch.equal(tower(x), plain)
        tower.thaw()
        assert {p.device.type for p in mlp.parameters()} == {device.type}
        assert torch.equal(tower(x), plain)


def test_autocast_decides_the_output() -> None:
    tower = fused(make_tower())
    x = torch.randn(4, 70, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = tower(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert tower.last.weight.grad.dtype == torch.float32


def test_leading_dimensions_and_an_empty_batch() -> None:
    tower = fused(make_tower())
    assert tower(torch.randn(2, 3, 70)).shape == (2, 3, 27)
    x = torch.randn(0, 70, requires_grad=True)
    tower(x).sum().backward()
    assert x.grad.shape == (0, 70)
    assert not tower.last.weight.grad.any()


def test_compiled_is_eager_with_no_graph_break() -> None:
    mlp = make_tower(width=64, hidden=(256,), out=64)
    tower = fused(mlp)
    x = torch.randn(16, 64)
    tower(x).square().sum().backward()
    eager = [p.grad.clone() for p in mlp.parameters()]
    mlp.zero_grad()
    compiled = torch.compile(tower, fullgraph=True, backend="aot_eager")
    compiled(x).square().sum().backward()
    for mine, theirs in zip(mlp.parameters(), eager, strict=True):
        assert theirs.any()
        torch.testing.assert_close(mine.grad, theirs)


def test_compiled_inference_behind_a_norm_is_eager_bit_for_bit() -> None:
    """There the static quantisation is plain torch, for the compiler to join to the norm."""
    tower = fused(make_tower(width=64, hidden=(256,), out=64), bounded_input=True).eval()
    model = nn.Sequential(BlockNorm(64), tower)
    x = torch.randn(16, 64)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


def test_a_frozen_tower_refuses_a_gradient_instead_of_losing_it() -> None:
    tower = fused(make_tower(width=64, hidden=(256,), out=64)).eval().freeze()
    x = torch.randn(4, 64, requires_grad=True)
    with pytest.raises(ValueError, match=r"frozen tower has no gradient.*no_grad"):
        tower(x)
    with torch.no_grad():
        assert torch.equal(tower(x), tower(x.detach()))
    assert not tower(x.detach()).requires_grad
    tower.thaw()
    assert tower(x).requires_grad


def test_saved_for_backward_is_fp8() -> None:
    """Per hidden element: z, and the transposed input of the next layer, one byte each."""
    tower = fused(make_tower(width=256, hidden=(256, 256), out=256))
    sizes: list[tuple[torch.dtype, int]] = []
    x = torch.randn(512, 256)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append((t.dtype, t.numel() * t.element_size())) or t, lambda t: t
    ):
        tower(x)
    rows = [(dtype, size) for dtype, size in sizes if size >= 512 * 256]
    assert rows
    assert all(dtype.itemsize == 1 for dtype, _ in rows)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: FusedTower.replacing(m, []), "at least one linear"),
        (lambda m: FusedTower.replacing(m, [Link("layers.0.norm")]), "is a BlockNorm, expected nn.Linear"),
        (lambda m: FusedTower.replacing(m, [Link("last"), Link("layers.0.linear")]), "takes 70 features"),
        (
            lambda m: FusedTower.replacing(m, [Link("layers.0.linear", 0, "relu"), Link("layers.1.linear")]),
            "block_norm",
        ),
        (lambda m: TowerPrecision(gradient="row"), "expected 'tensor' or 'block'"),
        (lambda m: TowerPrecision(gradient_format="e3m4"), "expected 'e4m3' or 'e5m2'"),
        (lambda m: TowerPrecision(gradient="block", gradient_format="e5m2"), "no library multiplies"),
        (lambda m: TowerPrecision(gemm_backend="nope"), "no backend 'nope'"),
        (lambda m: fused(m)(torch.randn(2, 71)), r"takes \[..., 70\], got \(2, 71\)"),
    ],
)
def test_refusals(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(make_tower())
