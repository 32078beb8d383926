"""Every mod, in both modes, on structures as other libraries write them."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

import loka
from loka import mods
from loka.units.example import tensors_in

from .structures import STRUCTURES, Structure
from .zoo import assert_same_state, snapshot

ALLOWED = {"exact": 1e-5, "rounding": 1e-4}


def build(name: str) -> Structure:
    torch.manual_seed(0)
    structure = STRUCTURES[name]()
    with torch.no_grad():
        for p in structure.model.parameters():
            p.add_(0.05 * torch.randn(p.shape))
    return structure


def results(structure: Structure) -> list[Tensor]:
    """Of both modes, on copies: a batch norm keeps statistics."""
    found: list[Tensor] = []
    for training in (False, True):
        twin = Structure(copy.deepcopy(structure.model).train(training), structure.example)
        torch.manual_seed(7)
        with torch.no_grad():
            found += [t.double() for t in tensors_in(twin.call())]
    return found


def distance(before: list[Tensor], after: list[Tensor]) -> float:
    pairs = zip(before, after, strict=True)
    return max(float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in pairs)


@pytest.mark.parametrize("mod", [*mods.names(), "norm_order(pre)", "norm_order(post)"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_mod_keeps_its_word_in_both_modes(name, mod):
    structure = build(name)
    model, before, state = structure.model, results(structure), snapshot(structure.model)
    order = mod.partition("(")[2].rstrip(")")
    applied = mods.apply(model, mods.NormOrder(order) if order else mod, example=structure.example)
    after = results(structure)
    assert all(torch.isfinite(t).all() for t in after)
    if applied.effect != "architecture":
        assert distance(before, after) <= ALLOWED[applied.effect]
    assert not [left for left in applied.summary.left if "undone" in left.why]
    pickle.dumps(model)
    mods.revert(model)
    assert_same_state(model, state)
    assert distance(before, results(structure)) == 0.0


@pytest.mark.parametrize("name", STRUCTURES)
def test_modified_structures_are_converted_trained_and_put_back(name):
    structure = build(name)
    model = structure.model
    tree = repr(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mods.apply(model, ["protect_residual", "protect_intermediates", "align_shapes"], example=structure.example)
    summary = loka.convert(model, recipe="rowwise", module_filter_fn=mods.unprotected)
    assert summary.converted
    start = snapshot(model)
    for _ in range(2):
        model.train()
        loss = sum(t.square().mean() for t in tensors_in(structure.call()) if t.requires_grad)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = model.state_dict()
    still = {site for site in summary.converted if torch.equal(after[f"{site}.weight"], start[f"{site}.weight"])}
    assert not still, "an optimizer that was made before the mods must move every converted layer"
    loka.revert(model)
    mods.revert(model)
    assert repr(model) == tree
