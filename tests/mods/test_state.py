import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from loka import mods

from .zoo import SUBJECTS, run, snapshot, subject


@pytest.mark.parametrize("mod", mods.names())
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_checkpoint_of_the_original_does_in_the_modified_model_what_the_mod_did(name, mod, tmp_path):
    """Mods then checkpoint equals checkpoint then mods, also for values the mods have never seen."""
    model, inputs = subject(name)
    twin, _ = subject(name)
    mods.apply(twin, mod, example=inputs)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1).add_(0.01)
    state = snapshot(model)
    applied = mods.apply(model, mod, example=inputs)
    save_file({key: value.clone() for key, value in state.items()}, tmp_path / "model.safetensors")
    notes = mods.load_checkpoint(twin, tmp_path)
    assert len(notes) == len(applied.summary.removed)
    for key, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[key], value), key
    torch.testing.assert_close(run(twin, inputs), run(model, inputs), rtol=1e-12, atol=1e-12)
    assert mods.load_state_dict(twin, snapshot(model)) == [], "a checkpoint of the modified model needs no help"


def test_notes_say_what_was_moved_and_what_was_lost():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    state = snapshot(model)
    mods.apply(model, ["no_bias", "block_norm"], example=torch.randn(2, 4))
    assert mods.load_state_dict(model, state) == [
        "0.weight: moved into the next linear",
        "0.bias: dropped",
        "1.bias: dropped",
    ]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    model, inputs = subject("mlp")
    state = snapshot(model)
    mods.apply(model, mods.CORE, example=inputs)
    with pytest.raises(ValueError, match=r"neither of the modified model nor of its original.*'extra'"):
        mods.adapt_state_dict(model, {**state, "extra": torch.zeros(1)})
    with pytest.raises(ValueError, match="does not fit the modified model"):
        mods.load_state_dict(model, {**state, "0.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"neither a \.safetensors file"):
        mods.load_checkpoint(model, tmp_path)
