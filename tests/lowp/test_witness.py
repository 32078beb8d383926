"""A weight changed where no counter shows it: noticed, said once by name, and right from then on."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from loka.lowp.chain import Chain, Part
from loka.lowp.chain_function import Link
from loka.lowp.weight_cache import StaleWeightError
from loka.lowp.witness import StaleWeightWarning, Witness
from loka.placing import LinearOptions, convert, refresh

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def make(**options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    convert(model, recipe="rowwise", backend="reference", options=LinearOptions(**options))  # type: ignore[arg-type]
    return model


def expected(model: nn.Sequential) -> Tensor:
    twin = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    twin.load_state_dict(model.state_dict())
    convert(twin, recipe="rowwise", backend="reference")
    with torch.no_grad():
        return twin.train(model.training)(X)


def through_data(weight: Tensor) -> None:
    weight.data.mul_(1.5)


def through_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[...] *= 1.5


def through_ema(weight: Tensor) -> None:
    weight.data.copy_(weight.data * 0.9 + 0.1 * torch.ones_like(weight))


@pytest.mark.parametrize("write", [through_data, through_numpy, through_ema])
@pytest.mark.parametrize("training", [False, True])
def test_hidden_write_is_noticed_in_the_next_call(write: Callable[[Tensor], None], training: bool) -> None:
    model = make().train(training)
    with torch.no_grad():
        model(X), model(X)
        write(model[0].weight)
        with pytest.warns(StaleWeightWarning, match="^0: the weight was changed"):
            y = model(X)
        assert torch.equal(y, expected(model))
        for _ in range(3):  # every write from then on is followed, without another word
            write(model[0].weight)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert torch.equal(model(X), expected(model))


def test_a_loader_that_writes_data_before_the_first_call() -> None:
    model = make()
    for p in model.parameters():
        p.data.copy_(torch.randn_like(p))
    with pytest.warns(StaleWeightWarning) as told, torch.no_grad():
        y = model(X)
    assert [str(w.message).split(":")[0] for w in told] == ["0", "2"]
    assert torch.equal(y, expected(model))


def test_a_loop_without_an_optimizer_trains_on_what_it_writes() -> None:
    model, plain = make(weights="step"), make(weights="fresh")
    for step in range(4):
        results = []
        for m in (model, plain):
            loss = m(X).square().mean()
            loss.backward()
            for p in m.parameters():
                p.data -= 0.1 * p.grad
                p.grad = None
            results.append(loss.item())
        assert results[0] == results[1], f"step {step}"


def test_one_element_is_noticed_within_64_calls() -> None:
    model = make().eval()
    with torch.no_grad():
        model(X)
        model[2].weight.data[3, 5] += 4.0
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(64):
                model(X)
        assert [str(w.message).split(":")[0] for w in told] == ["2"]
        assert torch.equal(model(X), expected(model))


def test_refresh_ends_the_distrust() -> None:
    model = make().eval()
    with torch.no_grad():
        model(X)
        model[0].weight.data.mul_(2)
        with pytest.warns(StaleWeightWarning):
            model(X)
        refresh(model)
        model[0].weight.data.mul_(2)
        with pytest.warns(StaleWeightWarning):  # a second write that nobody announced is news again
            assert torch.equal(model(X), expected(model))


def test_manual_weights_raise() -> None:
    model = make(weights="manual").eval()
    refresh(model)
    with torch.no_grad():
        model(X)
        model[0].weight.data.mul_(2)
        with pytest.raises(StaleWeightError, match="changed after it was quantized"):
            model(X)


def test_nothing_is_said_where_nothing_was_hidden() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
        with torch.no_grad():
            model(X)
            model[0].weight.mul_(2)
            for _ in range(70):
                y = model.eval()(X)
        assert torch.equal(y, expected(model))


def test_a_backward_still_to_come_keeps_its_weight() -> None:
    model = make()
    x = X.clone().requires_grad_()
    first = model(x)
    wanted = torch.autograd.grad(make()(x).sum(), x)[0]
    model[0].weight.data.mul_(2)
    with pytest.warns(StaleWeightWarning):
        model(x)
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], wanted)


def make_chain() -> tuple[nn.Sequential, Chain]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    parts = [Part(Link("0", activation="relu"), model[0], passed=(model[1],)), Part(Link("2"), model[2])]
    chain = Chain("0", parts).place()
    with chain.calibrating(), torch.no_grad():
        model(X)
    chain.freeze()
    return model, chain


def test_frozen_chain_notices() -> None:
    model, chain = make_chain()
    with torch.no_grad():
        before = model(X)
        model[2].weight.data.mul_(2)
        with pytest.warns(StaleWeightWarning, match="^2: the weight was changed"):
            y = model(X)
        assert not torch.equal(y, before)
        after = copy.deepcopy(model)
        chain.refresh()
        assert torch.equal(model(X), y)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            after[2].weight.data.mul_(0.5)  # the copy is distrusted as the chain was
            assert torch.equal(after(X), before)


def test_compiled_code_of_a_frozen_chain_learns_what_an_eager_call_noticed() -> None:
    model, chain = make_chain()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        before = compiled(X)
        model[2].weight.mul_(2)
        with pytest.warns(StaleWeightWarning, match="^2: the weight was changed"):
            y = model(X)
        assert not torch.allclose(y, before)
        assert torch.allclose(compiled(X), y)
        chain.refresh()
        assert torch.allclose(compiled(X), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_see_what_any_element_does(dtype: torch.dtype) -> None:
    weight = torch.randn(37, 53, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for row, column in ((0, 0), (36, 52), (17, 3)):
        witness = Witness(weight)
        weight[row, column] += 1
        assert not all(witness.agrees(weight) for _ in range(64))
    witness = Witness(weight)
    weight[[1, 2]] = weight[[2, 1]].clone()
    assert not all(witness.agrees(weight) for _ in range(64)), "rows changed places"
    weight[0, 0] = torch.nan
    witness = Witness(weight)
    assert all(witness.agrees(weight) for _ in range(130)), "a NaN is no change"
