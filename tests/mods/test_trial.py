"""Claims are tried on the example, and what breaks one is undone by name; looking leaves no trace."""

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from loka import mods
from loka.mods.editor import Editor
from loka.mods.trial import Trial

from .zoo import assert_same_state, run, snapshot, subject


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 12), nn.BatchNorm1d(12)
        self.drop, self.second, self.last = nn.Dropout(0.3), spectral_norm(nn.Linear(12, 12)), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(self.drop(self.norm(self.first(x))))))


class Tampered(nn.Module):
    """Mixed in front of a linear: wrong in one mode, or backwards only."""

    loka_wrong: str

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.loka_wrong == "gradient":
            return out.detach() + 0 * out
        if self.loka_wrong == "raises":
            raise RuntimeError("no kernel for this")
        if self.loka_wrong == "little":
            return out * 1.0003
        return out * 1.5 if self.training == (self.loka_wrong == "training") else out


@dataclass(frozen=True)
class Lying:
    """Claims to keep the function, and does at every site but one."""

    site: str = "first"
    wrong: str = "eval"
    claim: str = "exact"
    name: ClassVar[str] = "lying"
    effect: ClassVar[Any] = "exact"

    def rewrite(self, editor: Editor) -> None:
        for name, _ in editor.modules(nn.Linear):
            if name == self.site:
                editor.mix(name, Tampered, loka_wrong=self.wrong)
            else:
                editor.mark(name, "loka_seen", True)
            editor.change(name, "nothing, it says", self.claim)


@pytest.mark.parametrize("claim", ["exact", "rounding"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("eval", "in eval mode the result changes by"),
        ("training", "in training mode norm.running_"),  # its result is normalised again, what it leaves is not
        ("gradient", "in training mode the gradient of first.weight changes by"),
        ("raises", "in eval mode the model fails: RuntimeError: no kernel for this"),
        ("little", "in eval mode the result changes by"),
    ],
)
def test_a_change_that_breaks_its_claim_is_undone_and_named(wrong, said, claim):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, 6)
    applied = mods.apply(model, Lying(wrong=wrong, claim=claim), example=x)
    assert [change.site for change in applied.summary.changed] == ["second", "last"]
    (left,) = applied.summary.left
    assert left.site == "first"
    assert left.why.startswith(f"was undone: {said}")
    assert "left first: was undone" in str(applied)
    assert type(model.first) is nn.Linear
    assert mods.revert(model) == 2


def test_an_architecture_change_must_only_run():
    model, x = Net(), torch.randn(16, 6)
    assert len(mods.apply(model, Lying(claim="architecture"), example=x).summary.changed) == 3
    model = Net()
    applied = mods.apply(model, Lying(claim="architecture", wrong="raises"), example=x)
    assert [left.site for left in applied.summary.left] == ["first"]


class Mixed(Lying):
    """One change of another kind among the claims."""

    def rewrite(self, editor: Editor) -> None:
        super().rewrite(editor)
        editor.mark("drop", "loka_seen", True)
        editor.change("drop", "something", "architecture")


def test_claims_beside_an_architecture_change_are_tried_one_by_one():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, 6)
    applied = mods.apply(model, Mixed(), example=x)
    assert [change.site for change in applied.summary.changed] == ["second", "last", "drop"]
    assert [left.site for left in applied.summary.left] == ["first"]


@pytest.mark.parametrize("training", [True, False])
def test_looking_leaves_no_trace(training):
    torch.manual_seed(0)
    model, x = Net().train(training), torch.randn(16, 6)
    model.drop.train(not training)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    kept = model.first.weight.grad
    before, buffers = snapshot(model), list(model.buffers())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    mods.apply(model, [mods.AlignShapes(), "protect_intermediates", "protect_residual"], example=x)
    assert_same_state(model, before)
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert model.first.weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "first.weight")
    assert model.training is training
    assert model.drop.training is not training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


@pytest.mark.parametrize("example", [torch.randn(3, 5), {"y": torch.randn(3, 6)}, (torch.randn(3, 6), 1)])
@pytest.mark.parametrize("mod", mods.names())
def test_an_example_the_model_cannot_run_is_refused(example, mod):
    model = Net()
    tree = repr(model)
    with pytest.raises(
        ValueError, match=r"the model cannot run the example: (RuntimeError|TypeError).*hint: example is"
    ):
        mods.apply(model, mod, example=example)
    assert repr(model) == tree
    assert mods.applied_to(model) == ()


def test_a_mode_that_cannot_run_is_named():
    applied = mods.apply(Net(), "align_shapes", example=torch.randn(1, 6))
    assert any(
        note.startswith("not checked in training mode: the model fails on the example, ValueError")
        for note in applied.summary.notes
    )
    assert applied.summary.changed


def test_without_an_example_the_summary_says_that_nothing_was_checked():
    model, _ = subject("mlp")
    applied = mods.apply(model, "align_shapes")
    assert "nothing was checked: pass example= to have every claim tried on it" in applied.summary.notes


class Answer(NamedTuple):
    score: Tensor
    hidden: list[Tensor]


@dataclass
class Held:
    score: Tensor
    more: dict[str, tuple[Tensor, ...]]


class Opaque:
    """As a library's cache of keys and values: neither a container nor a dataclass."""

    def __init__(self, score: Tensor) -> None:
        self._score = score


WRAPPED = {
    "named tuple": lambda t: Answer(t, [t + 1]),
    "ordered dict": lambda t: OrderedDict(loss=t.sum(), logits=t),
    "nested": lambda t: {"a": [(t,), {"b": t * 2}], "n": 3, "none": None},
    "dataclass": lambda t: Held(t.mean(0), {"all": (t, t)}),
    "object": lambda t: (Opaque(t), "text"),
    "whole numbers": lambda t: (t.argmax(-1), t),
}


class Wrapping(Net):
    kind: str = ""

    def forward(self, x: Tensor) -> Any:
        return WRAPPED[self.kind](super().forward(x))


@pytest.mark.parametrize("kind", WRAPPED)
def test_results_are_compared_in_whatever_they_come(kind):
    torch.manual_seed(0)
    model, x = Wrapping(), torch.randn(16, 6)
    model.kind = kind
    applied = mods.apply(
        model, [Lying(), "protect_residual", "protect_intermediates", "align_shapes", "no_bias"], example=x
    )
    assert [left.site for left in applied.summary.left if left.mod == "lying"] == ["first"]
    assert "align_shapes" in applied.sites
    mods.revert(model)
    assert type(model.first) is nn.Linear


class Noisy(Net):
    def forward(self, x: Tensor) -> Tensor:
        Noisy.count += 1
        return super().forward(x) + Noisy.count

    count = 0


def test_a_model_that_differs_from_run_to_run_is_said_to_be_unchecked():
    applied = mods.apply(Noisy(), "align_shapes", example=torch.randn(16, 6))
    assert any("two runs of the model itself differ by" in note for note in applied.summary.notes)


class Writing(Net):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


def test_the_example_is_not_written_to():
    x = torch.randn(16, 6)
    kept = x.clone()
    mods.apply(Writing(), "align_shapes", example=x)
    assert torch.equal(x, kept)


def test_16_bit_inside_a_float32_model_is_no_broken_claim():
    class Narrow(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    torch.manual_seed(0)
    applied = mods.apply(Narrow(), "align_shapes", example=torch.randn(64, 6))
    assert not [left for left in applied.summary.left if "undone" in left.why]


def test_a_model_that_is_not_initialised_is_refused():
    with pytest.raises(ValueError, match=r"not initialized yet: 0\.weight.*run the model once"):
        mods.apply(nn.Sequential(nn.LazyLinear(4)), "no_bias", example=torch.randn(2, 3))


def test_a_replaced_parameter_is_a_broken_claim():
    model, inputs = subject("mlp")
    trial = Trial(model, inputs)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    assert "0.weight is another Parameter" in str(trial.refuse("exact"))


def test_everything_together_keeps_what_it_claims():
    model, inputs = subject("residual")
    before = run(model, inputs)
    applied = mods.apply(model, ["protect_residual", "protect_intermediates", "align_shapes"], example=inputs)
    assert not [left for left in applied.summary.left if "undone" in left.why]
    torch.testing.assert_close(run(model, inputs), before, rtol=1e-11, atol=1e-11)
