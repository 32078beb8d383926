"""Dropout inside chains: the layers with the same mask, every kind of link; what decides a draw; what the model may change; refusals."""

import copy
import json

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.kernels.dropout import Dropout, factor_of, keep_mask
from loka.lowp import Chain, chains_of
from loka.lowp.health import FIELDS
from loka.nn import BlockNorm
from loka.placing import plan_everything
from loka.records import Plan
from loka.units import build_chain, describe_chain, discover, place

WIDTH, ROWS = 96, 64
NORMS = {"none": nn.Identity, "block": BlockNorm, "layer": nn.LayerNorm, "rms": lambda n: nn.RMSNorm(n, eps=1e-6)}


class Tower(nn.Module):
    """linear -> norm -> activation -> dropout, twice, and a linear; then one number."""

    def __init__(self, norm: str = "none", activation: type[nn.Module] = nn.ReLU, p: tuple[float, float] = (0.4, 0.2)) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        parts: list[nn.Module] = []
        for width, share in zip((WIDTH, 128), p, strict=True):
            parts += [nn.Linear(width, 128), NORMS[norm](128), activation(), nn.Dropout(share)]
        self.body, self.head = nn.Sequential(*parts, nn.Linear(128, 64)), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def placed(model: nn.Module, x: Tensor, **options) -> Chain:
    (unit,) = discover(model, x, **options).units
    return place(model, unit)


def with_masks(model: Tower, x: Tensor, seed: Tensor) -> Tensor:
    """The model in its own precision, with what a chain drops that draws from this seed."""
    for at, first in enumerate((0, 4)):
        linear, norm, activation, dropout = model.body[first : first + 4]
        x = activation(norm(linear(x)))
        if dropout.p > 0:
            x = x * keep_mask(Dropout(dropout.p, seed, at), *x.shape) * factor_of(dropout.p)
    return model.body[-1](x)


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What chains draw from, call after call."""
    seen: list[Tensor] = []
    draw = Chain.draw_seed

    def remember(layout, device):
        made = draw(layout, device)
        if made is not None:
            seen.append(made)
        return made

    monkeypatch.setattr(Chain, "draw_seed", staticmethod(remember))
    return seen


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Identity], ids=["relu", "silu", "none"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_chain_is_the_layers_with_the_mask_it_drew(norm: str, activation: type, seeds: list[Tensor], device: torch.device) -> None:  # fmt: skip
    x, weight = torch.randn(ROWS, WIDTH, device=device), torch.randn(ROWS, 64, device=device)
    errors: list[list[dict[str, float]]] = []
    for p in ((0.4, 0.2), (0.0, 0.0)):
        model = Tower(norm, activation, p).to(device)
        twin, chain = copy.deepcopy(model), placed(model, x)
        assert [link.dropout for link in chain.links] == [*p, None]
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.0), []
        for _ in range(2):  # without history, in 16 bits between the layers, and with it
            mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            model.zero_grad()
            twin.zero_grad()
            y = model.body(mine)
            expected = with_masks(twin, theirs, seeds[-1])
            (y * weight).sum().backward()
            (expected * weight).sum().backward()
            pairs = zip(model.body.named_parameters(), twin.body.parameters(), strict=True)
            found.append({"y": relative(y, expected), "x": relative(mine.grad, theirs.grad), **{name: relative(a.grad, b.grad) for (name, a), b in pairs}})  # fmt: skip
            if p[0]:
                assert relative(y, with_masks(twin, theirs, seeds[-1] + 1)) > 0.4  # another mask is another number
            optimizer.step()
        assert chain.primed
        errors.append(found)
    assert len(seeds) == 2
    assert not torch.equal(*seeds)
    for dropping, plain in zip(*errors, strict=True):  # as far from float32 as without dropout, and no further
        assert 1e-3 < dropping["y"] < 0.1
        assert dropping["x"] > 1e-3
        for name in dropping:
            assert dropping[name] < 1.4 * plain[name] + 0.02, (name, dropping[name], plain[name])


def test_the_mean_over_many_draws_is_the_layer_without_dropout() -> None:
    model, x = Tower(p=(0.0, 0.5)), torch.randn(ROWS, WIDTH)
    placed(model, x)
    with torch.no_grad():
        body = torch.stack([model.body(x) for _ in range(60)])
        exact = copy.deepcopy(model).eval().body(x)
    apart = (body.mean(0) - exact).norm() / exact.norm()
    assert apart < 0.15 < relative(body[0], exact)


@pytest.mark.parametrize("norm", NORMS)
def test_eval_mode_is_the_chain_without_dropout_bit_for_bit(norm: str) -> None:
    x = torch.randn(ROWS, WIDTH)
    dropping, plain = Tower(norm), Tower(norm, p=(0.0, 0.0))
    for model in (dropping, plain):
        placed(model, x)
        model.eval()
    with torch.no_grad():
        assert torch.equal(dropping(x), plain(x))
    assert torch.equal(dropping(x), plain(x))
    dropping.train()
    plain.train()
    assert not torch.equal(dropping(x), plain(x))
    state = torch.get_rng_state()
    dropping.eval()(x)
    plain.train()(x)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn where nothing is dropped


def test_manual_seed_decides_and_every_call_draws_anew() -> None:
    model, x = Tower(), torch.randn(ROWS, WIDTH)
    placed(model, x)
    torch.manual_seed(3)
    first, second = model(x), model(x)
    torch.manual_seed(3)
    assert torch.equal(model(x), first)
    assert torch.equal(model(x), second)
    assert not torch.equal(first, second)
    with torch.no_grad():  # what reentrant checkpoints run first
        torch.manual_seed(3)
        assert torch.equal(model(x), first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_again(reentrant: bool) -> None:
    model, x = Tower("layer", nn.GELU), torch.randn(ROWS, WIDTH, requires_grad=True)
    placed(model, x.detach())
    found = []
    for run in (model, lambda given: checkpoint(model, given, use_reentrant=reentrant)):
        torch.manual_seed(5)
        model.zero_grad()
        run(x).sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_p_is_what_the_module_says_now(seeds: list[Tensor]) -> None:
    """Annealing: 1 / (1 - p) is in no scale that is remembered."""
    model, x = Tower(), torch.randn(ROWS, WIDTH)
    chain, twin = placed(model, x), Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for p in (0.0, 0.6, 0.1):
        for each in (model, twin):
            each.body[3].p = p
        y = model.body(x)
        assert relative(y, with_masks(twin, x, seeds[-1])) < 0.1, p
        y.sum().backward()
        optimizer.step()
    assert float(chain.out[0].saturated) == 0  # the layer that drops; the next one sees larger inputs
    assert describe_chain(model, chain).links[0].dropout == 0.1
    model.body[3].p = 1.0
    with pytest.raises(ValueError, match=r"the dropout after body.0: p is 1.0, a chain draws with 0 <= p < 1"):
        model(x)


class Called(nn.Module):
    """The same layers, dropout and activations as functions, or one dropout for all."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.head = nn.Linear(WIDTH, 128), nn.Linear(128, 128), nn.Linear(128, 64), nn.Linear(64, 1)  # fmt: skip
        self.drop, self.p = nn.Dropout(0.3) if shared else None, 0.3

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training) if self.drop is None else self.drop(x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropped(F.relu(self.a(x)))
        h = torch.relu(self.dropped(self.b(h)))
        return self.head(self.c(h))


@pytest.mark.parametrize("shared", [False, True])
def test_a_dropout_may_be_a_function_or_one_module_in_many_places(shared: bool, seeds: list[Tensor]) -> None:
    model, x = Called(shared=shared), torch.randn(ROWS, WIDTH)
    twin = copy.deepcopy(model)
    chain = placed(model, x)
    assert [(link.linear, link.activation, link.dropout) for link in chain.links] == [("a", "relu", 0.3), ("b", "relu", 0.3), ("c", "none", None)]  # fmt: skip
    y = model(x)
    h = x
    for at, linear in enumerate((twin.a, twin.b)):
        h = F.relu(linear(h)) * keep_mask(Dropout(0.3, seeds[-1], at), ROWS, 128) * factor_of(0.3)
    assert relative(y, twin.head(twin.c(h))) < 0.1
    with torch.no_grad():
        assert relative(model.eval()(x), twin.eval()(x)) < 0.1
    model.train()
    if shared:
        model.drop.p = 0.0
        assert relative(model(x), twin(x)) < 0.1
        return
    for p in (0.5, 0.0):  # a function must keep what the example showed: the head has run the chain before it is called
        model.p = p
        with pytest.raises(RuntimeError, match=f"a dropout with p {p:g} was called after a, where the chain a drew one with p 0.3"):  # fmt: skip
            model(x)
    model.p = 0.3
    model(x)


def test_an_encoder_layers_feed_forward_is_one_chain_in_training() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True), nn.Linear(64, 1))
    x = torch.randn(4, 16, 64)
    found = discover(model, x)
    unit = next(unit for unit in found.units if "0.linear1" in unit.linears)
    assert unit.linears == ["0.linear1", "0.linear2"]
    assert (unit.links[0].dropout, unit.links[0].dropout_site) == (0.1, "0.dropout")
    assert unit.links[1].dropout is None  # the library's GEMM, and torch's own dropout behind it
    loka.convert(model, plan_everything(model, x))
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_what_stands_behind_a_dropout_ends_the_link_in_training() -> None:
    def ends(*between: nn.Module) -> tuple[list[str], str]:
        model = nn.Sequential(nn.Linear(64, 64), *between, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        found = discover(model, torch.randn(8, 64))
        return [name for unit in found.units for name in unit.linears], str(found)

    last = {"0", "3"}
    assert last <= set(ends(nn.Dropout(0.1), nn.ReLU())[0])  # a ReLU changes places with it
    for between, why in (
        ((nn.Dropout(0.1), nn.GELU()), "2: gelu follows a dropout"),
        ((nn.Dropout(0.1), nn.LayerNorm(64)), "2 normalizes after a dropout"),
        ((nn.Dropout(0.1), nn.Dropout(0.2)), "2 is a second dropout"),
    ):
        names, said = ends(*between)
        assert "0" not in names
        assert why in said


def test_a_chain_found_for_serving_says_what_it_cannot_draw() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.randn(8, 64)
    placed(model.eval(), x, serving=True)
    with torch.no_grad():
        model(x)
        model.train()
        with pytest.raises(ValueError, match=r"a dropout after 0 has p 0\.1 and is in training mode"):
            model(x)


def test_plans_keep_it_name_it_and_compare_it(tmp_path) -> None:
    model, x = Tower(), torch.randn(ROWS, WIDTH)
    plan = plan_everything(model, x)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert [(link.dropout, link.dropout_site) for link in loaded.units[0].links] == [(0.4, "body.3"), (0.2, "body.7"), (None, None)]  # fmt: skip
    assert "chain body.0 relu dropout 0.4 -> body.4 relu dropout 0.2 -> body.8" in loaded.explain("body.0")
    other = plan_everything(Tower(p=(0.4, 0.1)), x)
    assert "relu dropout 0.2" in loaded.diff(other)
    assert "relu dropout 0.1" in loaded.diff(other)
    assert not loaded.diff(plan)
    older = json.loads((tmp_path / "plan.json").read_text())
    for link in older["units"][0]["links"]:
        del link["dropout"], link["dropout_site"]
    del older["seal"]  # what is written into a plan by hand breaks it
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert [link.dropout for link in Plan.load(tmp_path / "older.json").units[0].links] == [None] * 3
    broken = loaded.units[0].links[0]
    for change, why in (
        ({"dropout_site": "body.2"}, "body.2: is a ReLU, the plan has a dropout there"),
        ({"dropout_site": None}, "the plan has a dropout after it, but no dropout_site"),
        ({"dropout_site": "nowhere"}, "nowhere: the model has no such module"),
    ):
        links = [msgspec.structs.replace(broken, **change), *loaded.units[0].links[1:]]
        with pytest.raises(ValueError, match=why):
            build_chain(model, msgspec.structs.replace(loaded.units[0], links=links))


def test_convert_and_revert_leave_the_dropout_as_it_was() -> None:
    model, x = Tower(), torch.randn(ROWS, WIDTH)
    names, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    torch.manual_seed(1)
    before = model(x)
    loka.convert(model, plan_everything(model, x))
    again = copy.deepcopy(model)
    torch.manual_seed(2)
    first = model(x)
    torch.manual_seed(2)
    assert torch.equal(again(x), first)  # a copy draws as the model does
    assert list(model.state_dict()) == names
    loka.revert(model)
    assert [type(m) for m in model.modules()] == kinds
    torch.manual_seed(1)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("site", ["body.0", "body.4", "body.8"])
def test_what_is_left_of_a_split_chain_still_drops(site: str) -> None:
    model, x = Tower(), torch.randn(ROWS, WIDTH)
    chain = placed(model, x)
    chain.split(site)
    y = model(x)
    y.sum().backward()
    assert not torch.equal(model(x), y)
    with torch.no_grad():
        assert relative(model.eval()(x), Tower().eval()(x)) < 0.1


@pytest.mark.parametrize("norm", NORMS)
def test_guard_sees_no_error_in_what_was_dropped(norm: str) -> None:
    """A look compares sampled rows of the batch with the same rows in float32: they lost the same."""
    model, x = Tower(norm, p=(0.5, 0.5)), torch.randn(ROWS, WIDTH)
    chain = placed(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x).sum().backward()
    optimizer.step()
    chain.health = [torch.zeros(2 * len(FIELDS)) for _ in chain.links]
    chain.watching = True
    torch.manual_seed(1)
    watched = model(x)
    chain.watching = False
    torch.manual_seed(1)
    assert torch.equal(model(x), watched)  # and a look draws nothing
    errors = [float(health[FIELDS.index("error")]) for health in chain.health]
    assert all(0 < error < 0.08 for error in errors), errors


def test_one_graph_under_torch_compile() -> None:
    model, x = Tower(p=(0.4, 0.0)), torch.randn(ROWS, WIDTH)
    placed(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    model.zero_grad()
    torch.manual_seed(4)
    expected = model(x)
    expected.sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(4)
    found = compiled(x)
    found.sum().backward()
    assert relative(found, expected) < 0.02
    for p, grad in zip(model.parameters(), wanted, strict=True):
        assert relative(p.grad, grad) < 0.1
    assert not torch.equal(compiled(x), found)
    with torch.no_grad():
        for p in (0.1,):  # annealed: another graph, or the old one with another number, and never the old number
            model.body[3].p = p
            torch.manual_seed(4)
            expected = model(x)
            torch.manual_seed(4)
            assert relative(compiled(x), expected) < 0.02


def test_a_frozen_chain_serves_without_dropout_and_draws_again_in_training() -> None:
    x = torch.randn(ROWS, WIDTH)
    dropping, plain = Tower("layer"), Tower("layer", p=(0.0, 0.0))
    for model in (dropping, plain):
        loka.convert(model.eval(), plan_everything(model, x, serving=True), freeze=True)
    with torch.no_grad():
        assert torch.equal(dropping(x), plain(x))
    dropping.train()
    assert not torch.equal(dropping(x), dropping(x))


@pytest.mark.gpu
def test_a_cuda_graph_draws_anew_in_every_replay() -> None:
    model, x = Tower("layer").cuda(), torch.randn(ROWS, WIDTH, device="cuda")
    placed(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = model(x)
    made = []
    for _ in range(2):
        graph.replay()
        made.append(y.clone())
    assert not torch.equal(*made)


def test_every_chain_has_draws_of_its_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Tower(), Tower()  # the same weights

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.first(x), self.second(x)])

    model, x = Two(), torch.randn(ROWS, WIDTH)
    loka.convert(model, plan_everything(model, x))
    assert len(list(chains_of(model))) == 2
    first, second = model(x)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(*model(x))


def test_what_stands_behind_a_split_dropout_is_not_bounded_by_its_norm() -> None:
    """16 / (1 - p) exceeds what the static scale of a BlockNorm can hold."""
    model = Tower("block", p=(0.4, 0.2)).train()
    chain = placed(model, torch.randn(ROWS, WIDTH))
    assert [half.bounded_input for half in chain.split("body.0")] == [False]


def test_the_p_of_a_function_is_not_read_from_an_attribute_of_its_caller() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.head, self.p = nn.Linear(WIDTH, 128), nn.Linear(128, 64), nn.Linear(64, 1), 7.0

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.b(F.dropout(F.relu(self.a(x)), 0.25, self.training)))

    model = Caller()
    chain = placed(model, torch.randn(ROWS, WIDTH))
    assert describe_chain(model, chain).links[0].dropout == 0.25
