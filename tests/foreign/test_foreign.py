"""Models that nobody here wrote: every mod in both modes, and the whole loop. No crash, no silent change; a refusal has a reason and a way on."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loka
from loka import mods
from loka.mods import narrow_outputs
from loka.units.example import tensors_in

from .catalog import BUILDERS, Foreign, build

pytestmark = [pytest.mark.foreign, pytest.mark.filterwarnings("ignore")]

EVERY: list[Any] = [*mods.names(), mods.NormOrder("pre"), mods.NormOrder("post"), mods.Fuse(precision="fp8")]
CORES = [name for name in mods.names() if name not in mods.CORE and name != "norm_order"]
ALLOWED = {"exact": 1e-5, "rounding": 1e-4}
# Reasons that are a way on themselves: there is nothing to gain, or another tool has done it.
COMPLETE = (
    "prediction layer",
    "nothing to fuse",
    "narrower than",
    "it is called",  # several times: a chain has one place for what it remembers
    "reads its bias itself",
    "reads its weight without calling it",
    "protected already",
)


def results(foreign: Foreign, example: Any, *, training: bool) -> list[Tensor]:
    """In training mode on a copy, because a batch norm keeps statistics."""
    twin = Foreign(copy.deepcopy(foreign.model) if training else foreign.model, foreign.make_example)
    twin.model.train(training)
    torch.manual_seed(7)
    with torch.no_grad():
        return [t.clone() for t in tensors_in(twin.call(copy.deepcopy(example)))]


def distance(before: list[Tensor], after: list[Tensor]) -> float:
    assert [t.shape for t in before] == [t.shape for t in after]
    pairs = [(a.double(), b.double()) for a, b in zip(before, after, strict=True)]
    return max(float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in pairs)


@pytest.mark.parametrize("mod", EVERY, ids=lambda mod: mods.spell(mods.find(mod)))
@pytest.mark.parametrize("name", BUILDERS)
def test_every_mod_keeps_its_word_in_both_modes(name: str, mod: Any) -> None:
    foreign = build(name)
    example, model = foreign.example(), foreign.model
    state = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    before = {training: results(foreign, example, training=training) for training in (False, True)}
    applied = mods.apply(model, mod, example=example)
    for training in (False, True):
        after = results(foreign, example, training=training)
        assert all(torch.isfinite(t).all() for t in after if t.is_floating_point())
        if applied.effect != "architecture":
            assert distance(before[training], after) <= ALLOWED[applied.effect]
    if applied.effect != "architecture":
        assert all(parameters[key] is p for key, p in model.named_parameters())
    for left in applied.summary.left:
        assert "undone" not in left.why, left
        assert "hint" in left.why or any(words in left.why for words in COMPLETE), left
    mods.revert(model)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    for training in (False, True):
        assert distance(before[training], results(foreign, example, training=training)) == 0.0


@pytest.mark.parametrize("name", BUILDERS)
def test_narrow_outputs_in_compiled_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager code never takes this way. Capture alone shows it: no compiler is needed behind."""
    foreign, calls = build(name), []
    example = foreign.example()
    before = results(foreign, example, training=False)
    summary = mods.apply(foreign.model, "narrow_outputs", example=example).summary
    if not summary.changed:
        pytest.skip("no linear of few outputs")
    for way in ("sum_products", "sum_from_origin"):  # over its input, or over what that was made of
        compute = getattr(narrow_outputs, way)

        def counted(*args: Any, compute: Any = compute) -> Tensor:
            calls.append(compute)
            return compute(*args)

        monkeypatch.setattr(narrow_outputs, way, counted)
    torch.compiler.reset()
    compiled = Foreign(torch.compile(foreign.model, backend="eager"), foreign.make_example)
    assert distance(before, results(compiled, example, training=False)) <= ALLOWED["rounding"]
    assert len(calls) >= len(summary.changed)


@pytest.mark.parametrize("name", BUILDERS)
def test_mods_on_fresh_batches_and_after_training(name: str) -> None:
    """What was seen on the example holds on other data, with an optimizer made before."""
    foreign, plain = build(name), build(name)
    optimizers = [torch.optim.AdamW(f.model.parameters(), lr=1e-3) for f in (foreign, plain)]
    mods.apply(foreign.model, CORES, example=foreign.example())
    for seed in range(1, 4):
        losses = []
        for side, optimizer in zip((foreign, plain), optimizers, strict=True):
            side.model.train()
            torch.manual_seed(seed)
            loss = side.loss(side.example(seed))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    twin = Foreign(pickle.loads(pickle.dumps(foreign.model)), foreign.make_example)
    example = foreign.example(9)
    assert distance(results(foreign, example, training=False), results(twin, example, training=False)) == 0.0
    mods.revert(foreign.model)
    assert repr(foreign.model) == repr(plain.model)
    assert distance(results(plain, example, training=False), results(foreign, example, training=False)) < 1e-2


def train(foreign: Foreign, optimizer: torch.optim.Optimizer, steps: range, probe: Any = None) -> list[float]:
    losses = []
    foreign.model.train()
    for step in steps:
        loss = foreign.loss(foreign.example(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if probe is not None:
            probe.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("modded", [False, True], ids=["plain", "modded"])
@pytest.mark.parametrize("name", BUILDERS)
def test_the_whole_loop(name: str, modded: bool) -> None:
    foreign = build(name)
    model = foreign.model
    if modded:
        mods.apply(model, ["protect_residual", "align_shapes", "attention_layout"], example=foreign.example())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    classes = {key: type(module) for key, module in model.named_modules()}
    probe = loka.Probe(model, every=1)
    train(foreign, optimizer, range(3), probe)
    probe.detach()
    report = probe.evaluate(["tensorwise", "rowwise"], samples=5)
    attentions = [key for key, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    projections = {f"{key}.{part}" for key in attentions for part in ("in_proj", "out_proj")}
    assert not modded or projections <= {site.name for site in report.record.sites}
    plan = report.plan(min_speedup=None)
    summary = loka.convert(model, plan)
    assert set(summary.converted) | set(summary.kept) == {
        key for key, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    assert all(torch.isfinite(torch.tensor(train(foreign, optimizer, range(3, 6)))))
    loka.revert(model)
    assert {key: type(module) for key, module in model.named_modules()} == classes
    assert all(torch.isfinite(torch.tensor(train(foreign, optimizer, range(6, 7)))))
