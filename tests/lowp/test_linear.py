"""The low-precision Linear against float64 emulation of each recipe, and as the nn.Linear it must still be."""

import copy
import dataclasses
import io
import math

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.dispatch import RECIPES, recipe_named
from loka.formats import quantize
from loka.kernels.backend import UnsupportedError
from loka.kernels.scaled_mm import GemmWay
from loka.lowp.linear import Linear, LinearBinding
from loka.placing import plan_everything

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = [(8, 64, 32), (1, 13, 27), (5, 13, 27), (0, 13, 27), (130, 300, 150)]
REPEATABLE = [name for name in RECIPES if name != "nvfp4"]  # whose gradients are rounded by chance
every_recipe = pytest.mark.parametrize("recipe", REPEATABLE)


def binding_for(recipe: str, backend: str = "reference") -> LinearBinding:
    def bound(operands: GemmWay | None) -> GemmWay | None:
        return None if operands is None else operands.on(backend)

    chosen = recipe_named(recipe)
    return LinearBinding(bound(chosen.fprop), bound(chosen.dgrad), bound(chosen.wgrad))


def make(
    recipe: str, k: int, n: int, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, Linear]:
    plain = nn.Linear(k, n, bias=bias, dtype=dtype)
    return plain, Linear.replacing(plain, binding_for(recipe))


def emulate(a: Tensor, b: Tensor, operands: GemmWay | None) -> tuple[Tensor, Tensor]:
    """a [M, K] @ b [N, K]^T in float64 on quantised operands, and the size of its terms."""
    if operands is not None:
        a, b = quantize(a.contiguous(), operands.a).dequantize(), quantize(b.contiguous(), operands.b).dequantize()
    a, b = a.double(), b.double()
    return a @ b.T, (a.square() @ b.square().T).sqrt()


def excess(out: Tensor, exact: Tensor, terms: Tensor, k: int) -> float:
    """Worst error over what float32 sums of K terms and one rounding to the output's type may lose."""
    assert out.shape == exact.shape
    lost = (4 * math.sqrt(max(k, 1)) + 6) * 2.0**-24 * terms
    bound = lost + ROUNDING[out.dtype] * (exact.abs() + lost) + 2.0**-130
    return float(((out.detach().double() - exact).abs() / bound).max()) if exact.numel() else 0.0


def check_against(
    recipe: str, shape: tuple[int, int, int], dtype: torch.dtype, emulated: str | None = None
) -> list[float]:
    """Excess of y, dx and dW of one recipe over the emulation of another (itself unless told)."""
    m, k, n = shape
    _, linear = make(recipe, k, n, bias=False, dtype=dtype)
    x = torch.randn(m, k, dtype=dtype, requires_grad=True)
    y = linear(x)
    dy = torch.randn(m, n, dtype=dtype)
    y.backward(dy)
    law = recipe_named(emulated or recipe)
    w = linear.weight.detach()
    assert (y.dtype, x.grad.dtype, linear.weight.grad.dtype) == (dtype, dtype, dtype)
    return [
        excess(y, *emulate(x.detach(), w, law.fprop), k),
        excess(x.grad, *emulate(dy, w.T, law.dgrad), n),
        excess(linear.weight.grad, *emulate(dy.T, x.detach().T, law.wgrad), m),
    ]


@every_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_equal_float64_emulation(
    recipe: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    assert max(check_against(recipe, shape, dtype)) <= 1


@pytest.mark.parametrize(
    ("recipe", "other", "different"),
    [
        ("tensorwise", "rowwise", [True, True, True]),
        ("rowwise", "blockwise", [True, True, True]),
        ("rowwise_with_gw_hp", "rowwise", [False, True, True]),
    ],
)
def test_the_emulation_notices_another_recipe(recipe: str, other: str, different: list[bool]) -> None:
    """Each of the three GEMMs is told apart, so none may run another's precision."""
    found = check_against(recipe, (130, 300, 150), torch.float32, emulated=other)
    assert [e > 1 for e in found] == different


def test_the_emulation_notices_a_scale_off_by_a_part_in_a_thousand() -> None:
    _, linear = make("rowwise", 300, 150, bias=False)
    x = torch.randn(8, 300)
    exact, terms = emulate(x, linear.weight.detach(), recipe_named("rowwise").fprop)
    y = linear(x).detach()
    assert excess(y, exact, terms, 300) <= 1
    y[3] *= 1.001
    assert excess(y, exact, terms, 300) > 1


@every_recipe
def test_the_bias_is_added_once_and_in_full(recipe: str) -> None:
    plain, linear = make(recipe, 64, 32)
    bare = Linear.replacing(nn.Linear(64, 32, bias=False), binding_for(recipe))
    bare.weight = plain.weight
    x = torch.randn(5, 64)
    assert torch.equal(linear(x), bare(x) + plain.bias)
    dy = torch.randn(5, 32)
    linear(x).backward(dy)
    assert torch.allclose(plain.bias.grad, dy.sum(0), rtol=1e-6, atol=1e-6)


@every_recipe
@pytest.mark.parametrize("shape", [(13,), (3, 13), (2, 3, 13), (2, 0, 13), (0, 13), (1, 1, 1, 13)], ids=str)
def test_any_leading_shape(recipe: str, shape: tuple[int, ...]) -> None:
    _, linear = make(recipe, 13, 27)
    x = torch.randn(shape, requires_grad=True)
    y = linear(x)
    assert y.shape == (*shape[:-1], 27)
    assert torch.equal(y.reshape(-1, 27), linear(x.reshape(-1, 13)))
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert linear.weight.grad.shape == (27, 13)
    if x.numel() == 0:
        assert (linear.weight.grad == 0).all()


def test_a_strided_input_and_gradient() -> None:
    _, linear = make("rowwise", 40, 24)
    x = torch.randn(40, 6).T
    torch.testing.assert_close(
        linear(x), linear(x.contiguous())
    )  # not to the bit: a library adds up in an order that strides and threads decide
    dy = torch.randn(24, 6).T
    grads = []
    for given in (dy, dy.contiguous()):
        linear.zero_grad()
        linear(x).backward(given)
        grads.append(linear.weight.grad)
    torch.testing.assert_close(*grads)


class TestIsStillALinear:
    def test_parameters_are_the_same_objects(self) -> None:
        plain, linear = make("rowwise", 64, 32)
        assert isinstance(linear, nn.Linear)
        assert linear.weight is plain.weight
        assert linear.bias is plain.bias
        assert (linear.in_features, linear.out_features) == (64, 32)

    @pytest.mark.parametrize("bias", [True, False])
    def test_the_state_dict_is_the_same(self, bias: bool) -> None:
        plain, linear = make("blockwise", 64, 32, bias=bias)
        before, after = plain.state_dict(), linear.state_dict()
        assert list(before) == list(after)
        assert all(before[name].data_ptr() == after[name].data_ptr() for name in before)
        fresh = nn.Linear(64, 32, bias=bias)
        linear.load_state_dict(fresh.state_dict())
        fresh.load_state_dict(linear.state_dict())
        assert torch.equal(linear.weight, fresh.weight)

    @pytest.mark.parametrize("training", [True, False])
    def test_the_mode_is_kept(self, training: bool) -> None:
        plain, _ = make("rowwise", 4, 4)
        linear = Linear.replacing(plain.train(training), binding_for("rowwise"))
        assert linear.training == training
        assert linear.restored().training == training

    @pytest.mark.parametrize("bias", [True, False])
    def test_restored_is_the_plain_module(self, bias: bool) -> None:
        plain, linear = make("rowwise", 64, 32, bias=bias)
        restored = linear.restored()
        assert type(restored) is nn.Linear
        assert restored.weight is plain.weight
        assert restored.bias is plain.bias
        assert list(restored.state_dict()) == list(plain.state_dict())
        x = torch.randn(3, 64)
        assert torch.equal(restored(x), plain(x))

    def test_replacing_twice_takes_the_last_binding(self) -> None:
        plain, first = make("tensorwise", 64, 32)
        second = Linear.replacing(first, binding_for("rowwise"))
        x = torch.randn(3, 64) * torch.tensor([[1.0], [100.0], [0.01]])
        assert second.weight is plain.weight
        assert torch.equal(second(x), Linear.replacing(plain, binding_for("rowwise"))(x))
        assert not torch.equal(second(x), first(x))
        assert type(second.restored()) is nn.Linear

    def test_a_deep_copy_is_independent_and_equal(self) -> None:
        _, linear = make("blockwise", 64, 32)
        twin = copy.deepcopy(linear)
        x = torch.randn(3, 64)
        assert torch.equal(twin(x), linear(x))
        assert twin.binding == linear.binding
        with torch.no_grad():
            twin.weight.zero_()
        assert linear.weight.abs().sum() > 0

    @pytest.mark.parametrize("text", ["e2m1:1x16:e4m3", "int4:1x32", "e4m3:1x32:e8m0"])
    def test_a_deep_copy_keeps_emulated_formats(self, text: str) -> None:
        bound = GemmWay.parse(f"{text}@{text}/reference")
        linear = Linear.replacing(nn.Linear(64, 32), LinearBinding(bound, bound, bound))
        x = torch.randn(3, 64)
        assert torch.equal(copy.deepcopy(linear)(x), linear(x))
        file = io.BytesIO()
        torch.save(linear, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(x), linear(x))

    def test_its_print_tells_precision_and_kernel(self) -> None:
        _, linear = make("rowwise_with_gw_hp", 64, 32)
        assert repr(linear) == (
            "Linear(in_features=64, out_features=32, bias=True, fprop=e4m3:row@e4m3:row/reference, "
            "dgrad=e4m3:row@e4m3:tensor/reference, wgrad=high)"
        )

    def test_without_low_precision_it_is_exactly_linear(self) -> None:
        plain = nn.Linear(64, 32)
        linear = Linear.replacing(plain, LinearBinding())
        x = torch.randn(5, 64, requires_grad=True)
        assert torch.allclose(linear(x), plain(x), rtol=1e-6, atol=1e-6)
        linear(x).square().sum().backward()
        got = x.grad.clone(), plain.weight.grad.clone(), plain.bias.grad.clone()
        x.grad = plain.weight.grad = plain.bias.grad = None
        plain(x).square().sum().backward()
        for ours, theirs in zip(got, (x.grad, plain.weight.grad, plain.bias.grad), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


class TestTraining:
    @every_recipe
    def test_autocast(self, recipe: str) -> None:
        _, linear = make(recipe, 64, 32, bias=False)
        x = torch.randn(8, 64, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x)
        dy = torch.randn(8, 32).bfloat16()
        y.backward(dy)
        assert (y.dtype, x.grad.dtype, linear.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        law, w = recipe_named(recipe), linear.weight.detach()
        assert excess(y, *emulate(x.detach(), w, law.fprop), 64) <= 1
        assert excess(x.grad.bfloat16(), *emulate(dy, w.T, law.dgrad), 32) <= (1 if law.dgrad else 4)
        assert torch.equal(x.grad, x.grad.bfloat16().float())  # it came in autocast's type

    @every_recipe
    def test_gradients_accumulate(self, recipe: str) -> None:
        _, linear = make(recipe, 64, 32)
        batches = [(torch.randn(4, 64), torch.randn(4, 32)) for _ in range(3)]
        separate = []
        for x, dy in batches:
            linear.zero_grad()
            linear(x).backward(dy)
            separate.append(linear.weight.grad.clone())
        linear.zero_grad()
        for x, dy in batches:
            linear(x).backward(dy)
        assert torch.equal(linear.weight.grad, separate[0] + separate[1] + separate[2])

    def test_shared_weights_get_both_gradients(self) -> None:
        plain = nn.Linear(32, 32, bias=False)
        first, second = (Linear.replacing(plain, binding_for("rowwise")) for _ in range(2))
        x = torch.randn(4, 32)
        hidden = first(x)
        leaf = hidden.detach().requires_grad_()
        dy = torch.randn(4, 32)
        (through_second, back) = torch.autograd.grad(second(leaf), (plain.weight, leaf), dy)
        (through_first,) = torch.autograd.grad(hidden, plain.weight, back)
        second(first(x)).backward(dy)
        assert torch.allclose(plain.weight.grad, through_first + through_second, rtol=1e-6, atol=1e-6)

    @every_recipe
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_activation_checkpointing_changes_nothing(self, recipe: str, reentrant: bool) -> None:
        model = nn.Sequential(make(recipe, 64, 32)[1], nn.ReLU(), make(recipe, 32, 16)[1])
        x = torch.randn(8, 64, requires_grad=True)

        def gradients(run) -> list[Tensor]:
            x.grad = None
            model.zero_grad()
            y = run(x)
            y.square().sum().backward()
            return [y.detach(), x.grad, *(p.grad for p in model.parameters())]

        plain = gradients(model)
        saved = gradients(lambda v: checkpoint(model, v, use_reentrant=reentrant))
        assert all(torch.equal(a, b) for a, b in zip(plain, saved, strict=True))

    @pytest.mark.parametrize(("x_grad", "w_grad"), [(True, False), (False, True), (False, False)])
    def test_only_the_gradients_asked_for(self, x_grad: bool, w_grad: bool) -> None:
        plain, linear = make("rowwise", 64, 32, bias=False)
        plain.weight.requires_grad_(w_grad)
        x = torch.randn(4, 64, requires_grad=x_grad)
        y = linear(x)
        assert y.requires_grad == (x_grad or w_grad)
        if y.requires_grad:
            y.sum().backward()
        assert (x.grad is not None) == x_grad
        assert (plain.weight.grad is not None) == w_grad

    def test_training_steps_reduce_the_loss(self) -> None:
        model = nn.Sequential(make("rowwise", 16, 64)[1], nn.ReLU(), make("rowwise", 64, 1)[1])
        x = torch.randn(256, 16)
        y = x[:, :4].sum(1, keepdim=True)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.1 * losses[0]

    def test_a_nan_example_leaves_the_others_alone(self) -> None:
        _, linear = make("rowwise", 64, 32)
        x = torch.randn(4, 64)
        clean = linear(x)
        x[2, 5] = math.nan
        dirty = linear(x)
        assert dirty[2].isnan().all()
        assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])


class TestCompile:
    @pytest.mark.parametrize(
        ("recipe", "sizes"),
        [("tensorwise", [8]), ("rowwise", [8, 5, 3]), ("rowwise_with_gw_hp", [8]), ("blockwise", [8])],
    )
    def test_compiled_equals_eager_without_a_graph_break(self, recipe: str, sizes: list[int]) -> None:
        torch._dynamo.reset()
        _, linear = make(recipe, 64, 32)
        compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")

        def gradients(module: nn.Module, rows: int) -> list[Tensor]:
            torch.manual_seed(rows)
            linear.zero_grad()
            x = torch.randn(rows, 64, requires_grad=True)
            y = module(x)
            y.square().sum().backward()
            return [y.detach(), x.grad, linear.weight.grad, linear.bias.grad]

        for rows in sizes:
            ours, theirs = gradients(compiled, rows), gradients(linear, rows)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    def test_under_autocast(self) -> None:
        torch._dynamo.reset()
        _, linear = make("rowwise", 64, 32)
        compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
        x = torch.randn(8, 64)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(compiled(x), linear(x))


class TestRefusals:
    @pytest.mark.parametrize(
        ("gemm", "a", "b", "message"),
        [
            ("fprop", "e4m3:row:static", "e4m3:row", "one per tensor"),
            ("fprop", "e4m3:1x128:delayed", "e4m3:row", "one per tensor"),
            ("fprop", "e4m3:tensor", "e4m3:tensor:delayed", "weight's scale is always dynamic"),
            ("dgrad", "e4m3:tensor", "e4m3:tensor:static", "weight's scale is always dynamic"),
            ("dgrad", "e5m2:tensor:static", "e4m3:tensor", "gradients have no bound"),
            ("wgrad", "e5m2:tensor:static", "e4m3:tensor", "gradients have no bound"),
        ],
    )
    def test_scales_that_cannot_be_remembered(self, gemm: str, a: str, b: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            LinearBinding(**{gemm: GemmWay.parse(f"{a}@{b}/reference")})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"save": "fp16"}, "auto, fp8 or high"),
            ({"weights": "sometimes"}, "step, fresh, manual"),
            ({"quantizer": "cutlass"}, "has no backend 'cutlass'"),
            ({"save": "fp8"}, "fprop and wgrad must both be quantized"),
        ],
    )
    def test_options_that_make_no_sense(self, options: dict[str, str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(binding_for("rowwise_with_gw_hp"), **options)

    def test_a_backend_that_cannot_run_raises_in_forward(self) -> None:
        bound = GemmWay.parse("int8:row@int8:row").on("triton")
        linear = Linear.replacing(nn.Linear(16, 16), LinearBinding(fprop=bound))
        with pytest.raises(UnsupportedError, match="scaled_mm backend 'triton' cannot run 2x16x16 int8:row @ int8:row"):
            linear(torch.ones(2, 16))

    def test_a_type_no_gemm_writes(self) -> None:
        with pytest.raises(ValueError, match="float64 weights: no low-precision GEMM writes float64"):
            Linear.replacing(nn.Linear(16, 16, dtype=torch.float64), binding_for("rowwise"))
        linear = Linear.replacing(nn.Linear(16, 16), binding_for("rowwise")).double()
        with pytest.raises(
            ValueError,
            match=r"a linear is converted and its input is torch\.float64: no low-precision GEMM writes that; hint",
        ):
            linear(torch.ones(2, 16, dtype=torch.float64))

    @pytest.mark.parametrize("shape", [(2, 17), (16, 2), (2, 32), (17,)], ids=str)
    def test_a_wrong_width(self, shape: tuple[int, ...]) -> None:
        _, linear = make("rowwise", 16, 8)
        with pytest.raises((RuntimeError, ValueError)):
            linear(torch.ones(shape))

    @pytest.mark.parametrize("shape", [(), (2, 64)])
    @pytest.mark.parametrize("how", ["rowwise", "chain"])
    def test_a_wrong_input_names_the_linear(self, how: str, shape: tuple[int, ...]) -> None:
        model, x = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()), torch.randn(4, 128)
        loka.convert(model, plan_everything(model, x) if how == "chain" else None, recipe=how if how == "rowwise" else None)  # fmt: skip
        with pytest.raises(ValueError, match=r"^0 takes \[\.\.\., 128\], got \("):
            model(torch.ones(shape))

    def test_a_wrong_width_of_nothing(self) -> None:
        _, linear = make("rowwise", 16, 8)
        with pytest.raises((RuntimeError, ValueError)):
            linear(torch.ones(0, 17))

    @pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
    def test_a_width_of_zero(self) -> None:
        linear = Linear.replacing(nn.Linear(0, 8), binding_for("rowwise"))
        assert torch.equal(linear(torch.ones(3, 0)), linear.bias.expand(3, 8))

    def test_an_unknown_backend(self) -> None:
        with pytest.raises(ValueError, match="has no backend 'cutlass'"):
            LinearBinding(GemmWay.parse("e4m3:row@e4m3:row/cutlass"))

    def test_second_derivatives(self) -> None:
        """A gradient penalty: without an error its part of the gradient would just be missing."""
        _, linear = make("rowwise", 16, 8)
        x = torch.randn(2, 16, requires_grad=True)
        loss = linear(x).square().sum()
        with pytest.raises(RuntimeError, match=r"cannot be differentiated again.*hint: loka\.revert"):
            torch.autograd.grad(loss, x, create_graph=True)

    def test_a_parametrised_weight(self) -> None:
        plain = nn.Linear(16, 8)
        parametrize.register_parametrization(plain, "weight", nn.Identity())
        with pytest.raises(ValueError, match="parametri"):
            Linear.replacing(plain, binding_for("rowwise"))

    def test_a_name_of_the_users_that_a_converted_linear_needs(self) -> None:
        """It would be hidden while the linear is converted, and gone once it is reverted."""

        class Tagged(nn.Linear):
            @property
            def state(self) -> str:
                return "of the user"

        noted = nn.Linear(16, 16)
        noted.binding = "of a book"  # type: ignore[assignment]
        model = nn.Sequential(noted, Tagged(16, 16), nn.Linear(16, 8))
        done = loka.convert(model, recipe="rowwise")
        assert set(done.converted) == {"2"}
        assert "'binding'" in done.kept["0"]
        assert "'state'" in done.kept["1"]
        loka.revert(model)
        assert noted.binding == "of a book"
        assert model[1].state == "of the user"

    def test_hooks_are_kept_or_refused(self) -> None:
        plain, seen = nn.Linear(16, 8), []
        plain.register_forward_hook(lambda *_: seen.append(1))
        try:
            Linear.replacing(plain, binding_for("rowwise"))(torch.ones(2, 16))
        except ValueError as error:
            assert "hook" in str(error)  # noqa: PT017 - refusing is as good as keeping
        else:
            assert seen
