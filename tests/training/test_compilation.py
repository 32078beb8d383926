import pytest
import torch
from torch import nn

from loka.training import Callback, TrainConfig, Trainer
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


class Hooked(Callback):
    """Counts how often a hook inside the compiled part fires."""

    def __init__(self):
        self.calls = 0

    def wants_eager(self, step):
        return step in (2, 4)

    def on_step_begin(self, trainer):
        self.handle = None
        if self.wants_eager(trainer.step):
            self.handle = trainer.module.core[0].register_forward_hook(self.count)

    def on_step_end(self, trainer, log):
        if self.handle is not None:
            self.handle.remove()

    def count(self, *_):
        self.calls += 1


def test_a_compiled_run_equals_an_eager_one_and_lets_hooks_fire():
    from torch._dynamo.utils import counters

    data, models = make_data(), [make_model(dropout=0.0) for _ in range(2)]
    plain = Trainer(models[0], data, TrainConfig(**FAST)).fit()
    torch._dynamo.reset()  # other tests may have compiled the trial function
    counters.clear()
    hooked = Hooked()
    result = Trainer(models[1], data, TrainConfig(**FAST, compile="on"), callbacks=[hooked]).fit()
    assert result.compile.enabled
    assert result.compile.modules == ("core",)
    assert hooked.calls == 2
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
