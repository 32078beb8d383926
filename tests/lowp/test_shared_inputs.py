"""A tensor that several chains of a serving model read is quantised once in compiled code; other tensors, and one that was written to in between, are not taken for it."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import loka
from loka.lowp.chain import chains_of
from loka.lowp.shared_inputs import SHARED
from loka.placing import plan_everything

ROWS, WIDTH = 40, 256


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()


class Experts(nn.Module):
    """Three experts that read x; between the second and the third, what `between` does to it."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        self.last = nn.Linear(WIDTH, 1)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        y = self.experts[0](x) + self.experts[1](x)
        return self.last(y + self.experts[2](self.between(x)))


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


def doubled_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2.0)


def doubled_by_an_operator(x: torch.Tensor) -> torch.Tensor:
    x *= 2.0
    return x


def negated_first(x: torch.Tensor) -> torch.Tensor:
    """Leaves the largest magnitude what it was, so that scales are the same."""
    x[0] = -x[0]
    return x


def negated_by_foreach(x: torch.Tensor) -> torch.Tensor:
    """In compiled code no mode sees it."""
    torch._foreach_mul_([x], -1.0)
    return x


INPLACE = [nn.LeakyReLU(0.1, inplace=True), nn.ELU(inplace=True), nn.Hardswish(inplace=True), nn.ReLU(inplace=True), nn.Hardtanh(inplace=True), nn.Threshold(0.1, 0.0, inplace=True)]  # fmt: skip


def serve(between: Callable[[torch.Tensor], torch.Tensor] = same) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Experts(between).eval().to(torch.bfloat16), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    plan = plan_everything(model, x, serving=True, linears=WIDTH)
    loka.convert(model, plan, example=x, freeze=True)
    return model, x


def run_compiled(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What the model gives, compiled, and how often something as wide as x was quantised before a chain."""
    found = 0

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        nonlocal found
        nodes = [node for node in graph.graph.nodes if torch.float8_e4m3fn in node.args]
        found += len(nodes) - len(list(chains_of(model)))  # each chain hands FP8 on once, inside
        return graph.forward

    with torch.no_grad():
        return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x), found


def test_one_tensor_is_quantised_once() -> None:
    model, x = serve()
    with torch.no_grad():
        expected = model(x)
    found, count = run_compiled(model, x)
    loka.revert(model)
    assert torch.equal(found, expected)
    assert count == 1


@pytest.mark.parametrize("between", [doubled, doubled_in_place, doubled_by_an_operator, negated_first, negated_by_foreach, *INPLACE], ids=lambda f: getattr(f, "__name__", str(f)))  # fmt: skip
def test_what_is_another_tensor_or_was_written_to_is_quantised_again(between: Callable[..., torch.Tensor]) -> None:
    model, x = serve(between)
    with torch.no_grad():
        expected = model(x)
    found, count = run_compiled(model, x)
    assert torch.equal(found, expected)
    assert count == 2


def test_nothing_is_kept_after_a_call() -> None:
    model, x = serve()
    run_compiled(model, x)
    (shared,) = model.__dict__[SHARED]
    assert not shared.open
    assert shared.x is None
    assert shared.quantized is None


@pytest.mark.parametrize("hidden", [False, True], ids=["seen by a mode", "seen by the compiler alone"])
def test_what_the_example_did_not_write_is_noticed(hidden: bool) -> None:
    """A forward that writes on another path than the example's."""
    model, x = serve(later := Later(hidden))
    later.writes = True
    with torch.no_grad():
        expected = model(x)
    found, count = run_compiled(model, x)
    assert torch.equal(found, expected)
    assert count == 2


class Later:
    """The identity, until it is told to write."""

    writes = False

    def __init__(self, hidden: bool) -> None:
        self.hidden = hidden

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.writes:
            return x
        return torch.relu_(x) if self.hidden else nn.functional.elu(x, 1.0, True)


def test_a_refused_export_leaves_nothing_behind() -> None:
    model, x = serve()
    given = x.clone()
    with torch.no_grad():
        expected = model(-x)
        with pytest.raises(Exception, match="converted"):
            torch.export.export(model, (given,))
        assert not model.__dict__[SHARED][0].open
        model(given)
        given.copy_(-x)  # a static buffer
        assert torch.equal(model(given), expected)
        assert torch.equal(run_compiled(model, given)[0], expected)


def test_without_an_example_nothing_is_shared() -> None:
    torch.manual_seed(0)
    model, x = Experts(same).eval().to(torch.bfloat16), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    done = loka.convert(model, plan_everything(model, x, serving=True, linears=WIDTH), freeze=True)
    assert SHARED not in model.__dict__
    assert any("finding them takes an example" in note for note in done.notes)


def test_eager_mode_shares_nothing() -> None:
    model, x = serve()
    with torch.no_grad():
        model(x)
    assert model.__dict__[SHARED][0].x is None


def test_copies_share_among_themselves() -> None:
    model, x = serve()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        (mine,) = other.__dict__[SHARED]
        assert {id(chain.shared) for _, chain in chains_of(other)} == {id(mine)}
        assert mine is not model.__dict__[SHARED][0]
        torch._dynamo.reset()
        assert run_compiled(other, x)[1] == 1


def test_reverted_it_is_the_model_it_was() -> None:
    model, x = serve()
    assert type(model) is not Experts
    loka.revert(model)
    assert type(model) is Experts
    assert SHARED not in model.__dict__
    assert torch.isfinite(model(x)).all()


def test_training_shares_nothing() -> None:
    model, x = Experts(), torch.randn(ROWS, WIDTH)
    loka.convert(model, plan_everything(model, x, linears=WIDTH), example=x)
    assert SHARED not in model.__dict__
