"""The guard in the training loop: it acts between steps, and a resumed run has the scales and the switches of the one it continues."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loka.lowp.guard import GuardConfig
from loka.lowp.linear import Linear
from loka.placing import LinearOptions, convert, scale_state
from loka.training import Callback, TrainConfig, Trainer
from loka.training.guard import GuardCallback

from .toy import assert_same_bits, make_data, make_model, weights_of

FAST = {"batch_size": 50, "device": "cpu", "log_every": 3, "checkpoint_every": 4}


class Damage(Callback):
    """Spoils what the first linear remembers of its inputs, before one step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, trainer: Trainer) -> None:
        if trainer.step == self.at:
            trainer.module.core[0].state.x.largest.fill_(1e-12)  # a history gone wrong: everything saturates


def run(out: Path, steps: int, *, at: int = 10**6, resume: bool = False) -> tuple[nn.Module, GuardCallback]:
    model = make_model()
    options = LinearOptions(scales="delayed")
    convert(model, recipe="tensorwise", backend="reference", options=options)
    guard = GuardCallback(GuardConfig(every=2))
    config = TrainConfig(steps=steps, **FAST)  # type: ignore[arg-type]
    Trainer(model, make_data(), config, callbacks=[Damage(at), guard], out=out).fit(resume=resume)
    return model, guard


def test_a_site_gone_wrong_is_switched_while_the_run_goes_on(tmp_path: Path) -> None:
    model, guard = run(tmp_path, 8, at=4)
    assert [(e.site, e.action) for e in guard.events] == [("core.0", "switched")]
    assert not model.core[0].binding.quantized
    assert model.core[4].binding.quantized
    assert all(math.isfinite(float(p.detach().sum())) for p in model.parameters())


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole", 8)
    run(tmp_path / "parts", 4)
    resumed, _ = run(tmp_path / "parts", 8, resume=True)
    assert_same_bits(weights_of(whole), weights_of(resumed))
    ours, theirs = scale_state(whole), scale_state(resumed)
    assert ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_switch_survives_the_restart(tmp_path: Path) -> None:
    run(tmp_path, 8, at=4)
    resumed, guard = run(tmp_path, 12, resume=True)
    assert guard.events == []
    assert not resumed.core[0].binding.quantized
    assert "guard:" in resumed.core[0].state.note
    assert guard.guard is not None
    assert guard.guard.switches == 1


@pytest.mark.parametrize("scales", ["dynamic", "delayed"])
def test_a_site_bound_to_something_else_survives_the_restart(scales: str) -> None:
    """A site with other scales than it was converted to: its checkpoint has no history for it, and a resume must not ask for one."""

    def trainer_of() -> SimpleNamespace:
        model = make_model()
        convert(model, recipe="tensorwise", backend="reference", options=LinearOptions(scales=scales))  # type: ignore[arg-type]
        return SimpleNamespace(module=model)

    rowwise = make_model()
    convert(rowwise, recipe="rowwise", backend="reference")
    first, callback = trainer_of(), GuardCallback(decide=lambda site: rowwise.core[0].binding)
    callback.on_start(first)
    callback.guard.report_drift("core.0", "x moved")
    callback.on_step_end(first, None)
    assert [(e.site, e.action) for e in callback.events] == [("core.0", "rebound")]

    second, resumed = trainer_of(), GuardCallback()
    resumed.on_resume(second, callback.on_checkpoint(first))
    assert second.module.core[0].binding == rowwise.core[0].binding
    assert second.module.core[4].binding == first.module.core[4].binding
    assert scale_state(second.module).keys() == scale_state(first.module).keys()


def test_the_models_section_is_a_plain_state_dict(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, _ = run(tmp_path, 4)
    saved = load_file(tmp_path / "checkpoints" / "step-00000004" / "model.safetensors")
    assert set(saved) == set(make_model().state_dict())
    extra = load_file(tmp_path / "checkpoints" / "step-00000004" / "extra.safetensors")
    assert "callback/GuardCallback/core.0/x/history" in extra
    assert isinstance(model.core[0], Linear)
