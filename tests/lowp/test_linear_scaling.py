"""Delayed and static scales: what they remember, when they move, and what a restart brings back. And what backward keeps."""

import math

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka.formats import Spec, dequantize, quantize, scale_from_amax
from loka.kernels.amax_history import file_amax
from loka.lowp.scaling import AmaxState, find_amax
from loka.placing import LinearOptions, Scaling, calibrating, convert, load_scale_state, refresh, scale_state

DELAYED = Spec.parse("e4m3:tensor:delayed")


def make(**options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Tanh(), nn.Linear(48, 16, bias=False))
    options = {"scales": "delayed", **options}
    convert(model, recipe="tensorwise", backend="reference", options=LinearOptions(**options))  # type: ignore[arg-type]
    return model


def gradients(model: nn.Module, x: Tensor, run=None) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = (run or model)(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


class TestAmax:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_it_is_the_largest_magnitude(self, dtype: torch.dtype) -> None:
        x = torch.randn(7, 33).to(dtype)
        assert find_amax(x) == x.float().abs().max()

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_leaves_no_trace(self, value: float) -> None:
        x = torch.randn(4, 4)
        x[1, 2] = value
        assert find_amax(x) == 0
        assert find_amax(torch.zeros(0, 4)) == 0

    def test_the_history_forgets(self) -> None:
        state = AmaxState(Scaling(history=3), torch.device("cpu"))
        seen = []
        for amax in (1.0, 8.0, 2.0, 4.0, 1.0):
            state.observe(torch.tensor(amax / 2))
            state.observe(torch.tensor(amax))
            state.observe(torch.tensor(amax / 4))
            file_amax([state])
            seen.append(float(state.largest))
        assert seen == [1, 8, 8, 8, 4]

    @pytest.mark.parametrize("margin", [0, 1, 3])
    def test_the_scale_has_headroom(self, margin: int) -> None:
        state = AmaxState(Scaling(margin=margin), torch.device("cpu"))
        state.observe(torch.tensor(6.0))
        file_amax([state])
        expected = scale_from_amax(torch.tensor(6.0 * 2**margin), DELAYED)
        assert torch.equal(state.scale_for(DELAYED, torch.tensor(1.0)), expected)

    def test_magnitudes_are_float32_whatever_the_default_type_is(self) -> None:
        """The kernel that files them reads no other."""
        torch.set_default_dtype(torch.bfloat16)
        try:
            state = AmaxState(Scaling(), torch.device("cpu"))
            assert {getattr(state, name).dtype for name in state._TENSORS} == {torch.float32}
            assert find_amax(torch.zeros(0)).dtype == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)

    def test_without_a_history_the_tensor_itself_decides(self) -> None:
        state = AmaxState(Scaling(), torch.device("cpu"))
        assert torch.equal(state.scale_for(DELAYED, torch.tensor(3.0)), scale_from_amax(torch.tensor(3.0), DELAYED))

    @pytest.mark.parametrize(("field", "value"), [("history", 0), ("history", 1.5), ("margin", -1), ("margin", 9)])
    def test_settings_are_checked(self, field: str, value: float) -> None:
        with pytest.raises(ValueError, match=field):
            Scaling(**{field: value})


class TestDelayed:
    def test_the_first_step_is_dynamic(self) -> None:
        x = torch.randn(8, 32)
        dynamic = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Tanh(), nn.Linear(48, 16, bias=False))
        model = make()
        dynamic.load_state_dict(model.state_dict())
        convert(dynamic, recipe="tensorwise", backend="reference")
        assert same(gradients(model, x), gradients(dynamic, x))

    def test_the_scale_of_the_last_steps_is_used(self) -> None:
        """By hand: x of the second step under the scale of the first, saturating."""
        model = make(scaling=Scaling(history=1))
        small, large = torch.randn(8, 32), 4 * torch.randn(8, 32)
        gradients(model, small)
        refresh(model)
        spec, weight = Spec.parse("e4m3:tensor:static"), model[0].weight.detach()
        q = dequantize(quantize(large, spec, scale=scale_from_amax(small.abs().max(), spec)))
        w = dequantize(quantize(weight, Spec.parse("e4m3:tensor")))
        assert torch.allclose(model[0](large), q @ w.T, rtol=1e-6, atol=1e-6)
        assert q.abs().max() < large.abs().max()
        refresh(model)
        assert model[0].state.x.largest == large.abs().max()

    def test_optimizers_file_the_step(self) -> None:
        model = make()
        optimizer = torch.optim.SGD([model[0].weight], 0.1)  # only the first layer is its own
        gradients(model, torch.randn(8, 32))
        assert model[0].state.dy.pending > 0
        optimizer.step()
        assert model[0].state.dy.largest > 0
        assert model[0].state.dy.pending == 0
        assert model[2].state.dy.largest == 0
        assert model[2].state.dy.pending > 0

    def test_of_two_optimizers_one_files_the_steps_of_frozen_linears(self) -> None:
        """A second filing would fill every other place with nothing, and a history of one would hold nothing at all."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        model[0].requires_grad_(False)
        convert(model, recipe="tensorwise", backend="reference", options=LinearOptions(scales="delayed"))
        table = nn.Parameter(torch.ones(1))
        dense, sparse = torch.optim.SGD(model[2].parameters(), 0.01), torch.optim.SGD([table], 0.01)
        for _ in range(4):
            (model(torch.randn(8, 32)).square().mean() + table.sum()).backward()
            dense.step()
            sparse.step()
        for linear in (model[0], model[2]):
            assert int((linear.state.x.history > 0).sum()) == 4
            assert bool((linear.state.x.history[:4] > 0).all())

    def test_the_step_of_a_frozen_linear_is_filed_too(self) -> None:
        model, x = make(), torch.randn(8, 32, requires_grad=True)
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD([model[2].weight], 0.01)
        model(x).square().sum().backward()
        optimizer.step()
        state = model[0].state
        assert state.x.largest == x.detach().abs().max()
        assert state.dy.largest > 0
        assert state.x.pending == 0
        model[0].eval()  # sees nothing any more, so there is nothing to file
        optimizer.step()
        assert int((state.x.history > 0).sum()) == 1

    def test_micro_batches_share_one_scale(self) -> None:
        model = make()
        x = torch.randn(8, 32)
        gradients(model, x)
        refresh(model)
        first = gradients(model, x)
        gradients(model, 100 * x)  # a micro-batch of another size changes nothing before the step ends
        assert same(gradients(model, x), first)
        refresh(model)
        assert not same(gradients(model, x), first)

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("save", ["fp8", "high"])
    def test_checkpointing_changes_nothing(self, reentrant: bool, save: str) -> None:
        model, x = make(save=save), torch.randn(8, 32)
        gradients(model, x)
        refresh(model)
        plain = gradients(model, 2 * x)
        again = gradients(model, 2 * x, lambda v: checkpoint(model, v, use_reentrant=reentrant))
        assert same(plain, again)

    def test_evaluation_does_not_move_the_history(self) -> None:
        model = make()
        gradients(model, torch.randn(8, 32))
        refresh(model)
        before = scale_state(model)
        model.eval()
        with torch.no_grad():
            model(1000 * torch.randn(8, 32))
        model.train()
        assert all(torch.equal(before[name], tensor) for name, tensor in scale_state(model).items())

    @pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
    def test_gradients_in_either_format(self, gradient: str) -> None:
        model, x = make(gradients=gradient), torch.randn(8, 32)
        for _ in range(2):
            found = gradients(model, x)
            refresh(model)
        binding = model[0].binding
        assert {str(s) for s in binding.dy_specs.values()} == {f"{gradient}:tensor:delayed"}
        assert {str(s) for s in binding.x_specs.values()} == {"e4m3:tensor:delayed"}
        exact = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Tanh(), nn.Linear(48, 16, bias=False))
        exact.load_state_dict(model.state_dict())
        error = [float((a - b).norm() / b.norm()) for a, b in zip(found, gradients(exact, x), strict=True)]
        assert max(error) < (0.08 if gradient == "e4m3" else 0.14)
        assert error[2] > 0.01

    @pytest.mark.parametrize("compiled", [False, True])
    def test_one_linear_twice_and_backwards_in_another_order(self, compiled: bool) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        linear = nn.Linear(32, 32, bias=False)
        model = nn.Sequential(linear, nn.Tanh(), linear)
        convert(model, recipe="tensorwise", backend="reference", options=LinearOptions(scales="delayed"))
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        first, second = (run(torch.randn(8, 32)).square().sum() for _ in range(2))
        first.backward()
        second.backward()
        assert linear.state.dy.pending > 0
        refresh(model)
        (run(torch.randn(8, 32)).square().sum()).backward()

    def test_compiled_equals_eager_step_by_step_and_compiles_once(self) -> None:
        torch._dynamo.reset()
        model, twin = make(), make()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (model, twin)]
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(8, 32) * 3**step
            assert same(gradients(compiled, x), gradients(twin, x)), step
            for optimizer in optimizers:
                optimizer.step()
        assert counter.frame_count == 1
        ours, theirs = scale_state(model), scale_state(twin)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    def test_training_reduces_the_loss(self) -> None:
        model = make(gradients="e5m2")
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        x = torch.randn(256, 32)
        y = x[:, :16].tanh()
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.2 * losses[0]


class TestStatic:
    def test_calibrate_then_run(self) -> None:
        model, x = make(scales="static"), torch.randn(8, 32)
        with pytest.raises(ValueError, match="0: the static scale of x is not calibrated"):
            model(x)
        with calibrating(model):
            model(x / 2)
            model(x)
        assert model[0].state.x.static == x.abs().max()
        first = model(x)
        model(1000 * x)
        assert torch.equal(model(x), first)
        model(x).sum().backward()
        assert math.isfinite(float(model[0].weight.grad.sum()))

    def test_a_calibration_that_saw_nothing(self) -> None:
        model = make(scales="static")
        with pytest.raises(ValueError, match="saw no finite value"), calibrating(model):
            pass
        with pytest.raises(ValueError, match="no converted linear has static scales"), calibrating(make()):
            pass


class TestRestart:
    def test_scales_survive_in_a_section_of_their_own(self) -> None:
        model, x = make(scaling=Scaling(history=4)), torch.randn(8, 32)
        for k in range(6):
            gradients(model, x * (6 - k))
            refresh(model)
        gradients(model, 9 * x)
        kept, weights = scale_state(model), model.state_dict()
        assert list(weights) == ["0.weight", "2.weight"]
        fresh = make(scaling=Scaling(history=4))
        fresh.load_state_dict(weights)
        load_scale_state(fresh, kept)
        for _ in range(5):  # also when the restored history is forgotten, step by step
            assert same(gradients(model, x), gradients(fresh, x))
            refresh(model), refresh(fresh)
            for name in ("0", "2"):
                a, b = (m.get_submodule(name).state.x.largest for m in (model, fresh))
                assert torch.equal(a, b)

    def test_another_length_of_history(self) -> None:
        model = make(scaling=Scaling(history=4))
        for k in (8, 1, 2):
            gradients(model, torch.ones(8, 32) * k)
            refresh(model)
        short = make(scaling=Scaling(history=2))
        load_scale_state(short, scale_state(model))
        assert short[0].state.x.largest == 2

    def test_a_state_of_another_conversion_is_refused(self) -> None:
        model = make()
        state = scale_state(model)
        state["1/x/history"] = state.pop("0/x/history")
        with pytest.raises(ValueError, match="2 differences"):
            load_scale_state(model, state)

    def test_a_calibration_survives(self) -> None:
        model, x = make(scales="static"), torch.randn(8, 32)
        with calibrating(model):
            model(x)
        fresh = make(scales="static")
        load_scale_state(fresh, scale_state(model))
        assert torch.equal(fresh(x), model(x))

    def test_a_deep_copy_keeps_its_history(self) -> None:
        import copy

        model, x = make(), torch.randn(8, 32)
        gradients(model, x)
        refresh(model)
        twin = copy.deepcopy(model)
        assert same(gradients(twin, 2 * x), gradients(model, 2 * x))
        torch.optim.SGD(twin.parameters(), 1e-3).step()  # optimizers know copies too
        assert twin[0].state.x.largest != model[0].state.x.largest


class TestSaved:
    """What backward keeps, measured by hooks on saved tensors."""

    @staticmethod
    def saved_bytes(save: str, dtype: torch.dtype = torch.bfloat16) -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256, bias=False, dtype=dtype))
        convert(model, recipe="tensorwise", backend="reference", options=LinearOptions(save=save))  # type: ignore[arg-type]
        kept: dict[int, int] = {}
        own = {t.data_ptr() for t in (model[0].weight, *model[0].state.weights._buffers()) if t is not None}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in own:
                kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        x = torch.randn(512, 256, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = model(x)
        y.float().square().sum().backward()
        return sum(kept.values()), [y.detach(), x.grad, model[0].weight.grad]

    def test_fp8_halves_what_bf16_keeps_and_changes_nothing(self) -> None:
        high, exact = self.saved_bytes("high")
        low, same_result = self.saved_bytes("fp8")
        assert high == 512 * 256 * 2
        assert low <= 512 * 256 + 64
        assert same(exact, same_result)
        assert self.saved_bytes("auto")[0] == low

    def test_without_a_gradient_of_the_weight_nothing_is_kept(self) -> None:
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        convert(model, recipe="tensorwise", backend="reference")
        model.requires_grad_(False)
        kept = []
        own = {t.data_ptr() for t in model[0].state.weights._buffers() if t is not None}
        x = torch.randn(512, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
            model(x)
        assert set(kept) <= own


@pytest.mark.parametrize(("factor", "own", "after"), [(1e3, 0.99, 0.045), (1e4, 0.99, 0.07), (1e5, 0.99, 0.6)])
def test_an_outlier_makes_scales_coarse_for_as_long_as_it_is_remembered(
    factor: float, own: float, after: float
) -> None:
    """What the documentation says of one batch with an outlier: `loka.lowp.scaling` and the how-to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    convert(model, recipe="tensorwise", options=LinearOptions(scales="delayed", scaling=Scaling(history=4)))
    errors = []
    for step in range(9):
        x = torch.randn(128, 64) * (factor if step == 2 else 1.0)
        y, exact = model(x), x @ model[0].weight.T
        errors.append(float(((y - exact).norm() / exact.norm()).detach()))
        y.sum().backward()
        refresh(model)
    usual = 1.1 * errors[0]
    assert errors[2] > own
    assert all(error < after for error in errors[3:7])
    assert (max(errors[3:7]) > usual) == (factor > 1e3)
    assert max(errors[:2] + errors[7:]) < usual
