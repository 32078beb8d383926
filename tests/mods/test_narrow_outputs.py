"""narrow_outputs: the same values and gradients compiled, nn.Linear's own bits in eager mode, wide linears left."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka import mods

from .zoo import assert_same_state, snapshot


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()  # one forward is compiled in many ways here


def make(outputs: int, *, bias: bool = True, width: int = 24) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, outputs, bias=bias))


def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = x.clone().requires_grad_()
    y = model(x)
    return y.detach(), list(torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()]))


@pytest.mark.parametrize("shape", [(7, 8), (3, 2, 8)])
@pytest.mark.parametrize(("outputs", "bias"), [(1, True), (3, True), (4, False)])
def test_compiled_as_sums_and_eager_as_it_was(outputs: int, bias: bool, shape: tuple[int, ...]) -> None:
    model, x = make(outputs, bias=bias), torch.randn(shape)
    expected, before = step(model, x), snapshot(model)
    done = mods.apply(model, "narrow_outputs", example=x)
    assert [change.site for change in done.summary.changed] == ["3"]
    for found, wanted in zip(step(model, x)[1], expected[1], strict=True):
        assert torch.equal(found, wanted)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(step(compiled, x), expected, rtol=1e-5, atol=1e-6)
    mods.revert(model)
    assert_same_state(model, before)


def test_under_autocast_it_computes_in_that_type() -> None:
    model, x = make(2), torch.randn(6, 8)
    mods.apply(model, "narrow_outputs", example=x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(x), compiled(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("outputs", [6, 21])
def test_a_gate_is_padded_to_what_a_gemm_wants(outputs: int) -> None:
    model, x, padded = make(outputs, width=256), torch.randn(7, 8), -(-outputs // 8) * 8
    expected, before = step(model, x), snapshot(model)
    done = mods.apply(model, "narrow_outputs", example=x)
    assert [change.site for change in done.summary.changed] == ["3"]
    assert f"computed as 256 x {padded}" in repr(model[3])
    for found, wanted in zip(step(model, x)[1], expected[1], strict=True):
        assert torch.equal(found, wanted)  # in eager mode it is the linear that it was
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(step(compiled, x), expected, rtol=1e-5, atol=1e-5)
    assert compiled(x).is_contiguous()
    mods.revert(model)
    assert_same_state(model, before)


def test_wide_and_parametrised_linears_are_left() -> None:
    model = nn.Sequential(
        nn.Linear(8, 260),  # no multiple of eight, and what follows neither
        nn.Linear(260, 13),
        nn.Linear(13, 256),
        nn.Linear(256, 64),
        nn.Linear(64, 5),
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 1)),
    )
    done = mods.apply(model, "narrow_outputs", example=torch.randn(2, 8))
    assert not done.summary.changed
    assert "parametrised" in done.summary.left[0].why or "more than" in done.summary.left[0].why


class Joins(nn.Module):
    """A head over a concatenation; `write` changes a part before the head reads it."""

    def __init__(self, write: str = "") -> None:
        super().__init__()
        self.a, self.b, self.last, self.drop = nn.Linear(8, 6), nn.Linear(8, 5), nn.Linear(11, 2), nn.Dropout(0.5)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        joined = torch.cat([a, b], -1)
        if self.write == "seen":
            a.mul_(2)
        elif self.write == "hidden":
            torch._foreach_mul_([a], 2.0)
        return self.last(self.drop(joined))


class Norms(nn.Module):
    """A head behind a norm and an activation."""

    def __init__(self, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), norm, activation, nn.Dropout(0.5))
        self.last = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x))


def calls_of(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """The compiled result, and the functions in the graph whose results are used."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graph.graph.eliminate_dead_code()
        graphs.append(graph)
        return graph.forward

    y = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x)
    return y, [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize("shape", [(7, 8), (3, 2, 8)])
def test_a_head_sums_over_the_parts_of_a_concatenation_in_inference(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = Joins().eval(), torch.randn(shape)
    expected, before = step(model, x), snapshot(model)
    done = mods.apply(model, "narrow_outputs", example=x)
    assert [change.site for change in done.summary.changed] == ["last"]
    assert "parts of the concatenation" in done.summary.changed[0].what
    with torch.no_grad():
        y, calls = calls_of(model, x)
    torch.testing.assert_close(y, expected[0], rtol=1e-5, atol=1e-6)
    assert not any("cat" in call for call in calls)
    torch._dynamo.reset()
    torch.testing.assert_close(step(torch.compile(model, backend="aot_eager"), x), expected, rtol=1e-5, atol=1e-6)
    assert any("cat" in call for call in calls_of(model, x)[1])  # with gradients it is the GEMM that it was
    torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)
    mods.revert(model)
    assert_same_state(model, before)


@pytest.mark.parametrize("write", ["seen", "hidden"])
def test_a_part_that_is_written_to_is_not_read_again(write: str) -> None:
    torch.manual_seed(0)
    model, x = Joins(write).eval(), torch.randn(5, 8)
    with torch.no_grad():
        expected = model(x)
        mods.apply(model, "narrow_outputs", example=x)
        found = torch.compile(model, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


NORMS = {"layer": nn.LayerNorm(24), "bare": nn.LayerNorm(24, elementwise_affine=False), "rms": nn.RMSNorm(24, eps=1e-5)}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.ReLU(), nn.GELU(), nn.Identity(), nn.LeakyReLU(0.2), nn.SiLU(inplace=True)], ids=str)  # fmt: skip
def test_a_head_behind_a_wide_norm_runs_in_the_kernel_of_the_norm(
    norm: str, activation: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loka.mods.narrow_outputs.WIDE", 16)
    torch.manual_seed(0)
    model, x = Norms(copy.deepcopy(NORMS[norm]), activation).eval(), torch.randn(3, 5, 8)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    expected, before = step(model, x), snapshot(model)
    done = mods.apply(model, "narrow_outputs", example=x)
    with torch.no_grad():
        y, calls = calls_of(model, x)
    torch.testing.assert_close(y, expected[0], rtol=1e-5, atol=1e-5)
    known = not isinstance(activation, nn.LeakyReLU) and not getattr(activation, "inplace", False)
    assert ("kernel of the norm" in done.summary.changed[0].what) == known
    assert any("norm" in call for call in calls) != known
    torch._dynamo.reset()
    torch.testing.assert_close(step(torch.compile(model, backend="aot_eager"), x), expected, rtol=1e-5, atol=1e-5)
    mods.revert(model)
    assert_same_state(model, before)


def test_what_draws_or_changes_the_input_of_a_head_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout in training mode without gradients, and a hook that changes what the norm returns."""
    monkeypatch.setattr("loka.mods.narrow_outputs.WIDE", 16)
    torch.manual_seed(0)
    model, x = Norms(nn.LayerNorm(24), nn.SiLU()), torch.randn(5, 8)
    mods.apply(model, "narrow_outputs", example=x)
    with torch.no_grad():
        assert any("dropout" in call for call in calls_of(model.train(), x)[1])
        torch._dynamo.reset()
        model.eval()
        model.body[1].register_forward_hook(lambda module, args, out: out * 3)
        torch.testing.assert_close(calls_of(model, x)[0], model(x), rtol=1e-5, atol=1e-5)


def test_a_container_that_is_never_called_is_not_what_watches() -> None:
    """The module around it is: `parts` has no forward of its own."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.last = nn.Linear(8, 6), nn.Linear(14, 1)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = Parts()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts.last(torch.cat([self.parts.a(x), x], 1))

    model, x = Around().eval(), torch.randn(5, 8)
    with torch.inference_mode():  # whose tensors have no versions
        mods.apply(model, "narrow_outputs", example=x)
    with torch.no_grad():
        y, calls = calls_of(model, x)
        torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-6)
    assert not any("cat" in call for call in calls)


def test_where_the_compilers_graph_cannot_be_looked_at_nothing_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a version of torch that keeps it elsewhere."""
    torch.manual_seed(0)
    model, x = Joins().eval(), torch.randn(5, 8)
    mods.apply(model, "narrow_outputs", example=x)
    monkeypatch.setattr("loka.nn.writing._graph_in_tracing", lambda: None)
    with torch.no_grad():
        y, calls = calls_of(model, x)
        assert any("cat" in call for call in calls)
        torch.testing.assert_close(y, model(x))


def test_a_head_that_is_called_twice_asks_for_no_origin() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.cat([x, x + 1], 1)) + self.last(torch.cat([x, x], 1))

    model, x = Twice(), torch.randn(5, 8)
    mods.apply(model, "narrow_outputs", example=x)
    with torch.no_grad():
        torch.testing.assert_close(calls_of(model, x)[0], model(x), rtol=1e-5, atol=1e-5)


def test_float64_stays_float64() -> None:
    """Sums are in float32, which is not enough for it."""
    torch.manual_seed(0)
    model, x = make(2).double(), torch.randn(32, 8, dtype=torch.float64)
    expected = step(model, x)
    mods.apply(model, "narrow_outputs", example=x)
    found = step(torch.compile(model, backend="aot_eager"), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class JoinsAt(Joins):
    """Writes to a part before the head reads it, if a flag is set that is not set on the example."""

    write_now = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        joined = torch.cat([a, b], -1)
        if self.write_now and self.write == "torch":
            torch.relu_(joined)
        elif self.write_now and self.write == "part":
            torch.exp_(a)
            return self.last(joined) + a.sum()
        elif self.write_now and self.write == "list":
            torch._foreach_mul_([joined], 2.0)
        elif self.write_now:
            with torch._C.DisableTorchFunction():
                joined.mul_(2)
        return self.last(joined)


@pytest.mark.parametrize("write", ["torch", "part", "list", "no mode"])
def test_a_write_that_neither_the_example_nor_a_mode_shows(write: str) -> None:
    torch.manual_seed(0)
    model, x = JoinsAt(write).eval(), torch.randn(5, 8)
    with torch.no_grad():
        done = mods.apply(model, "narrow_outputs", example=x)
        assert "parts of the concatenation" in done.summary.changed[0].what
        assert not any("cat" in call for call in calls_of(model, x)[1])
        torch._dynamo.reset()
        model.write_now = True
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-6)


class Checkpointed(nn.Module):
    """A concatenation and its head in a checkpoint, which lets nothing inside change what is outside."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.inner, self.out, self.always = Joins(), nn.Linear(2, 8), always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keeps = self.always or self.training
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False) if keeps else self.inner(x)
        return self.out(y)


@pytest.mark.parametrize("always", [False, True])
def test_a_checkpoint_is_still_compiled_as_one_graph(always: bool) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(always=always), torch.randn(5, 8)
    model.inner.drop.p = 0.0
    expected = step(model, x)
    done = mods.apply(model, "narrow_outputs", example=x)
    assert ("parts of the concatenation" in done.summary.changed[0].what) != always
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, x), expected, rtol=1e-5, atol=1e-6)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected[0], rtol=1e-5, atol=1e-6)


def test_the_arguments_of_a_rewritten_model_keep_their_names() -> None:
    """A dict of dynamic shapes is keyed by them, and torch.fx makes placeholders of them."""
    model, x = Joins().eval(), torch.randn(5, 8)
    mods.apply(model, "narrow_outputs", example=x)
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    with torch.no_grad():
        exported = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}}).module()
        more = torch.randn(9, 8)
        torch.testing.assert_close(exported(more), model(more), rtol=1e-5, atol=1e-6)
    assert next(node.name for node in torch.fx.symbolic_trace(model).graph.nodes) == "x"
    again = copy.deepcopy(model)
    mods.revert(model)
    assert type(model) is Joins
    assert list(inspect.signature(again.forward).parameters) == ["x"]


def test_rows_that_only_the_data_counts_need_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel asks whether there are rows, which a compiler cannot know behind a mask."""
    monkeypatch.setattr("loka.mods.narrow_outputs.WIDE", 16)

    class Masks(Norms):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[x[:, 0] > 0])

    torch.manual_seed(0)
    model, x = Masks(nn.LayerNorm(24), nn.SiLU()).eval(), torch.randn(9, 8)
    done = mods.apply(model, "narrow_outputs", example=x)
    assert "kernel of the norm" in done.summary.changed[0].what

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr("loka.mods.narrow_outputs.norm_quantize", refuse)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for given in (x, -x.abs()):
            torch._dynamo.reset()
            found = torch.compile(model, backend="aot_eager", fullgraph=True)(given)
            torch.testing.assert_close(found, model(given), rtol=1e-5, atol=1e-5)
        exported = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(exported(x), model(x), rtol=1e-5, atol=1e-5)
