"""A chain: the layers it stands for, up to FP8 rounding; its gradients; names; serving; refusals."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.lowp.emulated import emulate as emulate_linears
from torch import Tensor, nn

import loka
from loka.formats import Spec, fake_quantize, scale_from_amax
from loka.kernels.activation import ACTIVATIONS
from loka.lowp import Chain, ChainPrecision, Link, Part, chain_of, chains_of
from loka.lowp.witness import StaleWeightWarning
from loka.nn import MLP, BlockNorm, Style
from loka.records import LinkPlan, UnitPlan
from loka.units import discover, place

TENSOR, ROW, STATIC = (Spec.parse(f"e4m3:{text}") for text in ("tensor", "row", "tensor:static"))


def make_tower(width: int = 70, hidden=(300, 256), out: int | None = 27, *, bias: bool = False, norm: str = "block", activation: str = "hard_swish") -> MLP:  # fmt: skip
    torch.manual_seed(0)
    return MLP(width, list(hidden), out, style=Style(norm="block", activation=activation, bias=bias, tower_norm=norm))


def chained(mlp: MLP, precision: ChainPrecision | None = None, **options) -> Chain:
    """The whole tower as one chain, whatever its widths are."""
    parts = []
    for i, layer in enumerate(mlp.layers):
        norm = {"BlockNorm": "block", "LayerNorm": "layer", "RMSNorm": "rms"}.get(type(layer.norm).__name__, "none")
        last = i == len(mlp.layers) - 1 and not isinstance(mlp.last, nn.Linear)
        name = {"HardSwish": "hard_swish", "ReLU": "relu", "SiLU": "silu", "GELU": "gelu"}[type(layer.activation).__name__]  # fmt: skip
        plain = last and norm in ("layer", "rms")
        link = Link(f"layers.{i}.linear") if plain else Link(f"layers.{i}.linear", norm, name, getattr(layer.norm, "eps", 1e-5))  # fmt: skip
        passed = () if plain else (layer.norm, layer.activation, layer.dropout)
        parts.append(Part(link, layer.linear, None if norm == "none" else layer.norm, passed))
    if isinstance(mlp.last, nn.Linear):
        parts.append(Part(Link("last"), mlp.last))
    return Chain("tower", parts, precision, **options).place()


def emulate(mlp: MLP, x: Tensor, *, first: Spec = TENSOR, scales: list[Tensor] | None = None) -> Tensor:
    """The same tower with rounding where FP8 rounds, written with the modules themselves. `scales`: of what lies between layers; None is a BlockNorm's."""
    a = fake_quantize(x, first)
    for at, layer in enumerate(mlp.layers):
        p = a @ fake_quantize(layer.linear.weight.detach(), TENSOR).T
        if layer.linear.bias is not None:
            p = p + layer.linear.bias
        a = layer.activation(layer.norm(p))
        if layer is not mlp.layers[-1] or isinstance(mlp.last, nn.Linear):
            a = fake_quantize(a.detach(), STATIC, scale=torch.tensor(1 / 16) if scales is None else scales[at])
    if isinstance(mlp.last, nn.Linear):
        a = a @ fake_quantize(mlp.last.weight.detach(), TENSOR).T
        if mlp.last.bias is not None:
            a = a + mlp.last.bias
    return a


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm().detach() / b.norm().detach())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out", [27, None])
def test_forward_behind_block_norms_is_the_tower_with_fp8_rounding(bias: bool, out: int | None) -> None:
    mlp = make_tower(out=out, bias=bias)
    x, twin = torch.randn(33, 70), copy.deepcopy(mlp)
    chained(mlp)
    torch.testing.assert_close(mlp(x), emulate(twin, x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), emulate(twin, x), rtol=1e-4, atol=1e-4)
        mlp.eval()  # every row of the input has its own scale
        torch.testing.assert_close(mlp(x), emulate(twin, x, first=ROW), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["none", "layer", "rms"])
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_delayed_scales_are_those_of_the_last_step(norm: str, activation: str) -> None:
    """Largest |z| of the step before (|y| behind a norm), one doubling of headroom."""
    mlp = make_tower(width=64, hidden=(96, 128), out=64, bias=True, norm=norm, activation=activation)
    x, twin = torch.randn(33, 64), copy.deepcopy(mlp)
    chain = chained(mlp)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.0)
    mlp(x).sum().backward()
    optimizer.step()
    assert chain.primed
    scales, a = [], fake_quantize(x, TENSOR)
    for layer in twin.layers:
        z = layer.norm(a @ fake_quantize(layer.linear.weight.detach(), TENSOR).T + layer.linear.bias)
        y = layer.activation(z)
        seen = z if norm == "none" else y
        scales.append(scale_from_amax(2 * seen.detach().abs().amax(), STATIC))
        a = fake_quantize(y.detach(), TENSOR)
    for state, scale in zip(chain.out, [*scales, None], strict=True):
        assert (state is None) == (scale is None)
        if state is not None:
            torch.testing.assert_close(state.scale, scale, rtol=5e-3, atol=0)  # z is kept in 16 bits
    exact = [state.scale.clone() for state in chain.out if state is not None]
    torch.testing.assert_close(mlp(x), emulate(twin, x, scales=exact), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("norm", ["block", "none", "layer", "rms"])
@pytest.mark.parametrize(("gradient", "bias"), [("tensor", True), ("block", False), ("delayed", True)])
def test_gradients_are_autograds_up_to_fp8(norm: str, gradient: str, bias: bool, device: torch.device) -> None:
    mlp = make_tower(width=128, hidden=(256, 256), out=128, bias=bias, norm=norm).to(device)
    twin = copy.deepcopy(mlp)
    chain = chained(mlp, ChainPrecision(gradient=gradient))
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.0)
    x = torch.randn(128, 128, device=device, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    weight = torch.randn(128, 128, device=device)
    (twin(y) * weight).sum().backward()
    for step in range(2):  # without history, and with it
        optimizer.zero_grad()
        x.grad = None
        (mlp(x) * weight).sum().backward()
        assert 1e-3 < relative(x.grad, y.grad) < 0.12, step  # FP8 did run
        for (name, mine), (_, theirs) in zip(mlp.named_parameters(), twin.named_parameters(), strict=True):
            assert mine.grad is not None, name
            assert mine.grad.dtype == mine.dtype
            assert relative(mine.grad, theirs.grad) < 0.12, (name, step)
        optimizer.step()
    assert chain.primed
    assert chain.gradients_primed


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != "none"])
def test_every_activation_has_its_value_and_its_slope(activation: str) -> None:
    """Between two linears and behind the last one, beside the same linears emulated. Small pre-activations, where a sigmoid is far larger than what it is of."""
    own = {"hard_swish": nn.Hardswish(), "silu": nn.SiLU(), "relu": nn.ReLU(), "tanh": nn.Tanh(), "sigmoid": nn.Sigmoid(), "leaky_relu": nn.LeakyReLU(),
           "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh")}[activation]  # fmt: skip
    model = nn.Sequential(nn.Linear(64, 96), own, nn.Linear(96, 80), copy.deepcopy(own))
    with torch.no_grad():
        model[0].weight.mul_(0.02)
        model[0].bias.mul_(0.02)
    twin = copy.deepcopy(model)
    emulate_linears(twin, ["0", "2"])
    parts = [Part(Link("0", activation=activation), model[0], passed=(model[1],)), Part(Link("2", activation=activation), model[2], passed=(model[3],))]  # fmt: skip
    Chain("0", parts, ChainPrecision(gradient="delayed")).place()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, goal = torch.randn(64, 64), torch.randn(64, 80)
    for step in range(2):
        optimizer.zero_grad()
        twin.zero_grad()
        got, wanted = model(x), twin(x)
        assert relative(got, wanted) < 0.01, step
        (got * goal).sum().backward()
        (wanted * goal).sum().backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert relative(mine.grad, theirs.grad) < (0.02, 0.08)[step], step  # then z is read in FP8
        optimizer.step()


def test_e5m2_gradients_are_coarser() -> None:
    errors = []
    for name in ("e4m3", "e5m2"):
        mlp = make_tower(width=128, hidden=(256,), out=64)
        twin = copy.deepcopy(mlp)
        chained(mlp, ChainPrecision(gradient_format=name))
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
        mlp(x).square().sum().backward()
        twin(x).square().sum().backward()
        errors.append(relative(mlp.layers[0].linear.weight.grad, twin.layers[0].linear.weight.grad))
    assert errors[0] < errors[1]


def test_names_modules_and_parameters_stay() -> None:
    mlp = make_tower(bias=True)
    before = {name: value.clone() for name, value in mlp.state_dict().items()}
    modules, parameters = dict(mlp.named_modules()), dict(mlp.named_parameters())
    kinds = {name: type(module) for name, module in modules.items()}
    chain = chained(mlp)
    assert [name for name, _ in chains_of(mlp)] == ["layers.0.linear"]
    assert chain_of(mlp.last) is chain
    assert list(mlp.state_dict()) == list(before)
    assert all(torch.equal(mlp.state_dict()[name], value) for name, value in before.items())
    assert all(modules[name] is module for name, module in mlp.named_modules())
    assert all(parameters[name] is p for name, p in mlp.named_parameters())
    assert isinstance(mlp.layers[0].norm, BlockNorm)
    assert "70 -> 300 -> 256 -> 27" in repr(mlp)
    chain.release()
    assert {name: type(module) for name, module in mlp.named_modules()} == kinds
    assert not any(chain_of(module) for module in mlp.modules())
    assert not chain.placed


def test_a_bounded_input_has_a_static_scale() -> None:
    mlp = make_tower(out=None, hidden=(256,))
    x, twin = torch.randn(8, 70), copy.deepcopy(mlp)
    chain = chained(mlp, bounded_input=True)
    static = mlp(x)
    expected = twin.layers[0].activation(
        twin.layers[0].norm(
            fake_quantize(x, STATIC, scale=torch.tensor(1 / 16))
            @ fake_quantize(twin.layers[0].linear.weight.detach(), TENSOR).T
        )
    )
    torch.testing.assert_close(static, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-4)
    chain.release()
    chained(mlp)
    assert not torch.equal(static, mlp(x))


@pytest.mark.parametrize("norm", ["block", "none", "layer"])
def test_freezing_changes_nothing_until_the_weights_do(norm: str) -> None:
    mlp = make_tower(norm=norm)
    chain = chained(mlp)
    mlp.eval()
    x = torch.randn(9, 70)
    with torch.no_grad():
        if norm != "block":
            with pytest.raises(ValueError, match="no scales yet"):
                chain.freeze()
            with chain.calibrating():
                mlp(x)
        plain = mlp(x)
        chain.freeze()
        assert torch.equal(mlp(x), plain)
        assert "frozen" in repr(chain)
        mlp.last.weight.mul_(2)
        with pytest.warns(StaleWeightWarning, match="^last: the weight was changed"):
            doubled = mlp(x)
        assert not torch.equal(doubled, plain)
        mlp.load_state_dict(mlp.state_dict())
        assert torch.equal(mlp(x), doubled)
        assert mlp.train() is mlp
        assert chain.frozen is None
    assert list(mlp.state_dict()) == list(make_tower(norm=norm).state_dict())


def test_offloaded_weights_come_back(device: torch.device) -> None:
    mlp = make_tower().to(device)
    chain = chained(mlp)
    mlp.eval()
    x = torch.randn(9, 70, device=device)
    with torch.no_grad():
        plain = mlp(x)
        chain.freeze(offload=True)
        assert {p.device.type for p in mlp.parameters()} == {"cpu"}
        assert torch.equal(mlp(x), plain)
        chain.thaw()
        assert {p.device.type for p in mlp.parameters()} == {device.type}
        assert torch.equal(mlp(x), plain)


def test_a_frozen_chain_refuses_a_gradient_instead_of_losing_it() -> None:
    mlp = make_tower(width=64, hidden=(256,), out=64)
    chain = chained(mlp)
    mlp.eval()
    chain.freeze()
    x = torch.randn(4, 64, requires_grad=True)
    with pytest.raises(ValueError, match=r"is frozen for serving and has no gradient.*no_grad"):
        mlp(x)
    with torch.no_grad():
        assert torch.equal(mlp(x), mlp(x.detach()))
    assert not mlp(x.detach()).requires_grad
    chain.thaw()
    assert mlp(x).requires_grad


@pytest.mark.parametrize("norm", ["block", "none", "layer"])
def test_autocast_decides_the_output(norm: str) -> None:
    mlp = make_tower(norm=norm, bias=True)
    chained(mlp)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.0)
    x = torch.randn(4, 70, requires_grad=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            y = mlp(x)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert x.grad.dtype == torch.float32
        assert {p.grad.dtype for p in mlp.parameters()} == {torch.float32}
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", ["block", "none", "layer"])
def test_sixteen_bit_models(norm: str, dtype: torch.dtype) -> None:
    mlp = make_tower(width=64, norm=norm, bias=True).to(dtype)
    twin = copy.deepcopy(mlp)
    chained(mlp)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.0)
    x = torch.randn(32, 64, dtype=dtype)
    for _ in range(2):
        got, wanted = mlp(x), twin(x)
        assert got.dtype == dtype
        assert relative(got.float(), wanted.float()) < 0.1
        got.float().square().sum().backward()
        assert {p.grad.dtype for p in mlp.parameters()} == {dtype}
        optimizer.step()


@pytest.mark.parametrize("norm", ["block", "none", "layer"])
def test_leading_dimensions_and_an_empty_batch(norm: str) -> None:
    mlp = make_tower(norm=norm)
    chain = chained(mlp)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.0)
    x = torch.randn(2, 3, 70)
    flat = mlp(x.flatten(0, 1))
    assert torch.equal(mlp(x), flat.view(2, 3, 27))
    flat.sum().backward()
    optimizer.step()
    before = [state.state()["history"] for state in chain.remembered]
    optimizer.zero_grad()
    empty = torch.randn(0, 70, requires_grad=True)
    mlp(empty).sum().backward()
    optimizer.step()
    assert empty.grad.shape == (0, 70)
    assert not mlp.last.weight.grad.any()
    for state, was in zip(chain.remembered, before, strict=True):
        assert torch.equal(state.history, was), "a batch without rows says nothing about magnitudes"


@pytest.mark.parametrize(
    ("norm", "gradient", "hidden"),
    [("block", "tensor", (256,)), ("none", "delayed", (256, 128)), ("layer", "delayed", (256,))],
)
def test_compiled_is_eager_with_no_graph_break(norm: str, gradient: str, hidden: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    x = torch.randn(16, 64)

    def steps(compiled: bool) -> list[Tensor]:
        mlp = make_tower(width=64, hidden=hidden, out=64, norm=norm, bias=True)
        chained(mlp, ChainPrecision(gradient=gradient), bounded_input=norm == "block")
        optimizer = torch.optim.SGD(mlp.parameters(), lr=0.0)
        run = torch.compile(mlp, fullgraph=True, backend="aot_eager") if compiled else mlp
        results = []
        for _ in range(2):  # without history, and with it
            optimizer.zero_grad()
            out = run(x)
            out.square().sum().backward()
            results += [out.detach(), *(p.grad.clone() for p in mlp.parameters())]
            optimizer.step()
        return results

    for mine, theirs in zip(steps(compiled=True), steps(compiled=False), strict=True):
        assert theirs.any()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_compiled_inference_behind_a_norm_is_eager_bit_for_bit() -> None:
    """There the static quantisation is plain torch, for the compiler to join to the norm."""
    torch._dynamo.reset()
    tower = make_tower(width=64, hidden=(256,), out=64)
    chained(tower, bounded_input=True)
    model = nn.Sequential(BlockNorm(64), tower.eval())
    x = torch.randn(16, 64)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


@pytest.mark.parametrize("norm", ["block", "none"])
def test_saved_for_backward_is_fp8(norm: str) -> None:
    """Per hidden element: z, and the transposed input of the next layer, one byte each."""
    mlp = make_tower(width=256, hidden=(256, 256), out=256, norm=norm)
    chained(mlp)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.0)
    x = torch.randn(128, 256)
    mlp(x).sum().backward()
    optimizer.step()
    sizes: list[tuple[torch.dtype, int]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append((t.dtype, t.numel() * t.element_size())) or t, lambda t: t
    ):
        mlp(x)
    rows = [(dtype, size) for dtype, size in sizes if size >= 128 * 256]
    assert rows
    assert all(dtype.itemsize == 1 for dtype, _ in rows)


def test_special_values_reach_their_own_row_only() -> None:
    """A NaN or an Inf of one example is that example's: no scale is taken from it."""
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU())
    place(model, discover(model, torch.randn(4, 64)).units[0])
    x = torch.randn(8, 64)
    x[3, 5], x[4, 6] = torch.inf, torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        assert model(x).isnan().any(1).tolist() == [row in (3, 4) for row in range(8)]
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()


def test_a_gradient_that_is_not_finite_shows_in_the_weights_and_leaves_no_trace_in_the_scales() -> None:
    """A GradScaler finds an overflow by looking at the gradients of the parameters: FP8 must not turn Inf into its largest number."""
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    links = [
        LinkPlan(linear="0", k=64, n=96, activation="relu", passed=["1"]),
        LinkPlan(linear="2", k=96, n=64),
    ]
    chain = place(model, UnitPlan(name="0", links=links, gradient="delayed"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(16, 64)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    before = [state.scale.clone() for state in chain.grad]
    for bad in (torch.inf, torch.nan):
        optimizer.zero_grad()
        weight = torch.ones(16, 64)
        weight[2, 3] = bad
        (model(x) * weight).sum().backward()
        assert not all(p.grad.isfinite().all() for p in model.parameters())
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    for state, was in zip(chain.grad, before, strict=True):
        assert state.scale.isfinite()
        torch.testing.assert_close(state.scale, was, rtol=0.2, atol=0)


def test_another_path_is_an_error_and_never_another_number() -> None:
    mlp = make_tower(hidden=(256,), out=64)
    chained(mlp)
    x = torch.randn(3, 70)
    mlp(x)
    with pytest.raises(RuntimeError, match="takes another path"):
        mlp.layers[0].activation(torch.randn(3, 256))
    with pytest.raises(RuntimeError, match="takes another path"):
        mlp.last(torch.randn(3, 256))
    first = mlp.layers[0].linear(x)
    with pytest.raises(RuntimeError, match="in the call before this one"):  # the head alone gave the whole chain
        mlp.layers[0].linear(x)
    with pytest.raises(RuntimeError, match="takes another path"):
        mlp.layers[0].norm(first)
    mlp(x)


def test_scales_move_with_the_model() -> None:
    mlp = make_tower(hidden=(256, 256), out=64, norm="none")
    chain = chained(mlp, ChainPrecision(gradient="delayed"))
    mlp.to("meta")
    assert {state.scale.device.type for state in chain.remembered} == {"meta"}
    assert chain.static.device.type == "meta"


@pytest.mark.parametrize("norm", ["none", "layer", "block"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_split_opens_one_linear_and_keeps_the_rest(norm: str, at: int) -> None:
    mlp = make_tower(width=64, hidden=(96, 128), out=64, norm=norm, bias=True, activation="silu")
    exact = copy.deepcopy(mlp)
    chain = chained(mlp, ChainPrecision(gradient="delayed"))
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.0)
    x = torch.randn(32, 64)
    mlp(x).sum().backward()
    optimizer.step()
    remembered = {link.linear: state.scale.clone() for link, state in zip(chain.links, chain.out, strict=True) if state}
    names = ["layers.0.linear", "layers.1.linear", "last"]
    halves = chain.split(names[at])
    assert [name for half in halves for name in (link.linear for link in half.links)] == names[:at] + names[at + 1 :]
    assert chain_of(mlp.get_submodule(names[at])) is None
    assert type(mlp.get_submodule(names[at])) is nn.Linear
    assert relative(mlp(x), exact(x)) < 0.1
    for half in halves:
        assert half.placed
        for link, state in zip(half.links, half.out, strict=True):
            if state is not None:
                assert torch.equal(state.scale, remembered[link.linear]), "scales go on from where they were"
    mlp(x).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has no linear 'nope'"):
        halves[0].split("nope")


def test_calibration_that_fails_changes_nothing() -> None:
    mlp = make_tower(norm="none")
    chain = chained(mlp)
    x = torch.randn(9, 70)
    with torch.no_grad(), chain.calibrating():
        mlp(x)
    before = [state.scale.clone() for state in chain.out if state is not None]
    with pytest.raises(ValueError, match="takes"), torch.no_grad(), chain.calibrating():
        nn.Sequential(mlp, nn.Linear(27, 71, bias=False), mlp)(100 * x)  # fails in the second call
    with pytest.raises(ValueError, match="run more batches"), chain.calibrating():
        pass
    assert chain.primed
    for state, was in zip((s for s in chain.out if s is not None), before, strict=True):
        assert torch.equal(state.scale, was)


def _hooked(mlp: MLP) -> Chain:
    mlp.last.register_forward_hook(lambda module, inputs, output: None)
    return chained(mlp)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: Chain("t", []), "at least one linear"),
        (lambda m: Chain("t", [Part(Link("norm"), m.layers[0].norm)]), "is a BlockNorm, expected nn.Linear"),
        (lambda m: Chain("t", [Part(Link("last"), m.last), Part(Link("l"), m.layers[0].linear)]), "takes 70 features"),
        (lambda m: Chain("t", [Part(Link("last", "layer"), m.last)]), "must be outside of the chain"),
        (lambda m: (chained(m), chained(m)), "is in a chain already"),
        (_hooked, "last has forward or backward hooks"),
        (lambda m: ChainPrecision(gradient="row"), "expected 'tensor', 'block' or 'delayed'"),
        (lambda m: ChainPrecision(gradient_format="e3m4"), "expected 'e4m3' or 'e5m2'"),
        (lambda m: ChainPrecision(gradient="block", gradient_format="e5m2"), "no library multiplies"),
        (lambda m: ChainPrecision(gemm_backend="nope"), "no backend 'nope'"),
        (lambda m: (chained(m), m(torch.randn(2, 71))), r"takes \[..., 70\], got \(2, 71\)"),
    ],
)
def test_refusals(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(make_tower())


@pytest.mark.parametrize("epilogue", ["relu", "silu", "hard_swish", "none"])
@pytest.mark.parametrize("bias", [False, True])
def test_one_linear_with_its_activation(epilogue: str, bias: bool) -> None:
    """A chain of one: what stands alone."""
    linear, x = nn.Linear(70, 48, bias=bias), torch.randn(5, 7, 70)
    act = {"relu": F.relu, "silu": F.silu, "hard_swish": F.hardswish, "none": lambda z: z}[epilogue]
    weight, shift = linear.weight.detach(), linear.bias
    Chain("one", [Part(Link("one", activation=epilogue), linear)]).place()
    for spec, training in ((TENSOR, True), (ROW, False)):
        linear.train(training)
        with torch.set_grad_enabled(training):
            z = fake_quantize(x.flatten(0, 1), spec) @ fake_quantize(weight, TENSOR).T
            expected = act(z if shift is None else z + shift).view(5, 7, 48)
            torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("at", "name", "value"), [(1, "eps", 0.5), (4, "negative_slope", 0.5), (6, "approximate", "tanh")]
)
def test_an_option_that_changes_after_conversion_is_noticed(at: int, name: str, value: float | str) -> None:
    """The kernels use those that the chain was found with."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.LeakyReLU(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))  # fmt: skip
    x = torch.randn(32, 64)
    loka.convert(model, loka.placing.plan_everything(model, x))
    expected, before = model(x), getattr(model[at], name)
    setattr(model[at], name, value)
    with pytest.raises(ValueError, match=f"{name} {value}, but the chain was found with {before}"):
        model(x)
    setattr(model[at], name, before)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("way", ["eager", "no_grad", "compiled"])
def test_a_spectral_norm_added_to_a_chain_makes_one_step_a_forward(way: str, at: int) -> None:
    """It steps its power iteration whenever the weight is read."""
    mlp, x = make_tower(norm="layer"), torch.randn(32, 70)
    chained(mlp)
    mlp(x)
    linear = mlp.layers[at].linear
    torch.nn.utils.parametrizations.spectral_norm(linear)
    vector, weight = linear.parametrizations.weight[0]._u, linear.parametrizations.weight.original
    expected = F.normalize(weight @ F.normalize(weight.T @ vector, dim=0), dim=0)
    run = torch.compile(mlp, backend="aot_eager", fullgraph=True) if way == "compiled" else mlp
    with torch.set_grad_enabled(way != "no_grad"):
        y = run(x)
    torch.testing.assert_close(vector, expected)
    if way != "no_grad":
        y.square().sum().backward()
        assert weight.grad.abs().sum() > 0


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda given: model(given).sum())(x),
    "grad of parameters": lambda model, x: torch.func.grad(
        lambda held: torch.func.functional_call(model, held, (x,)).sum()
    )({name: p.detach() for name, p in model.named_parameters()}),
    "vjp": lambda model, x: torch.func.vjp(model, x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "vmap": lambda model, x: torch.func.vmap(model)(x[None]),
}


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("chain", [False, True])
def test_transforms_of_functions_are_refused_with_a_hint(how: str, chain: bool) -> None:
    mlp, x = make_tower(norm="layer"), torch.randn(32, 70)
    if chain:
        chained(mlp)
    else:
        loka.convert(mlp, recipe="rowwise")
    expected = mlp(x)
    with pytest.raises(ValueError, match=r"transforms of torch.func.*hint: loka.revert\(model\) first"):
        TRANSFORMS[how](mlp, x)
    held = {name: p.detach() for name, p in mlp.named_parameters()}
    assert torch.equal(torch.func.functional_call(mlp, held, (x,)), expected)


DERIVATIVES = {
    "penalty": lambda model, x: torch.autograd.grad(model(x).square().sum(), x, create_graph=True),
    "Hessian": lambda model, x: torch.autograd.functional.hessian(lambda given: model(given).square().sum(), x[:1]),
    "product with it": lambda model, x: torch.autograd.functional.hvp(lambda given: model(given).square().sum(), x, x),
    "in batches": lambda model, x: torch.autograd.functional.jacobian(model, x[:2], vectorize=True),
    "a trace": lambda model, x: torch.jit.trace(model, x),
}


@pytest.mark.parametrize("how", DERIVATIVES)
@pytest.mark.parametrize("chain", [False, True])
def test_second_derivatives_are_refused_and_not_zero(how: str, chain: bool) -> None:
    mlp, x = make_tower(norm="layer"), torch.randn(8, 70, requires_grad=True)
    if chain:
        chained(mlp)
    else:
        loka.convert(mlp, recipe="rowwise")
    with pytest.raises((RuntimeError, ValueError), match=r"converted.*loka.revert\(model\)"):
        DERIVATIVES[how](mlp, x)
    (slope,) = torch.autograd.grad(mlp(x).sum(), x)
    assert slope.abs().sum() > 0
