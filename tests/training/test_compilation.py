import pytest
import torch
from torch import nn

from loka.training import TrainConfig, Trainer
from loka.training import compilation as module
from loka.training.compilation import choose, compiled, find_compilable

from .toy import make_data, make_model, weights_of

CPU = torch.device("cpu")
FAST = {"steps": 6, "batch_size": 64, "device": "cpu", "evaluate_every": 3, "log_every": 3}


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(3, 2, sparse=True)])
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.activation = nn.ReLU()
        self.inner = nn.ModuleDict({"a": make_model()})


def test_the_largest_parts_without_sparse_tables_are_found():
    assert list(find_compilable(make_model())) == ["core"]
    assert list(find_compilable(make_model().core)) == [""]
    assert list(find_compilable(Nested())) == ["layers.0", "layers.1", "inner.a.core"]


def test_off_and_auto_say_why():
    assert choose(make_model(), "off", CPU).reason == "not asked for"
    choice = choose(make_model(), "auto", CPU)
    assert not choice.enabled
    assert "cpu" in choice.reason


def test_on_without_a_working_compiler_raises_with_the_reason(monkeypatch):
    def broken(*args, **keywords):
        raise RuntimeError("g++ is not installed\nlong story")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(ValueError, match=r"RuntimeError: g\+\+ is not installed\)"):
        choose(make_model(), "on", CPU)


def test_on_with_nothing_to_compile_raises():
    with pytest.raises(ValueError, match="no submodule"):
        choose(nn.Embedding(3, 2, sparse=True), "on", CPU)


def test_compiled_code_lives_only_inside_the_block(monkeypatch):
    monkeypatch.setattr(module, "find_problem", lambda device: None)
    monkeypatch.setattr(torch, "compile", lambda function, **keywords: "compiled")
    model = make_model()
    names = list(model.state_dict())
    with compiled(model, "on", CPU) as choice:
        assert model.core.forward == "compiled"
        assert choice.modules == ("core",)
        assert list(model.state_dict()) == names
    assert "forward" not in vars(model.core)


def test_a_compiled_run_equals_an_eager_one():
    from torch._dynamo.utils import counters

    data, models = make_data(), [make_model(dropout=0.0) for _ in range(2)]
    plain = Trainer(models[0], data, TrainConfig(**FAST)).fit()
    torch._dynamo.reset()  # other tests may have compiled the trial function
    counters.clear()
    result = Trainer(models[1], data, TrainConfig(**FAST, compile="on")).fit()
    assert result.compile.enabled
    assert result.compile.modules == ("core",)
    assert counters["stats"]["unique_graphs"] == 3  # the trial function, training, evaluation of a full batch
    assert result.loss == pytest.approx(plain.loss, rel=1e-5)
    for name, tensor in weights_of(models[0]).items():
        torch.testing.assert_close(models[1].state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, batch):
        torch._dynamo.graph_break()
        return self.linear(batch.dense)


def test_a_graph_break_is_an_error_and_not_a_slow_run():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        Trainer(Breaking(), make_data(), TrainConfig(**FAST, compile="on")).fit()
