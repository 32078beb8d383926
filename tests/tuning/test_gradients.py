"""Kernels whose backward is wrong, while every forward is right: what trains a model into the ground with every other verdict "within"."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.planted import plant
from torch import Tensor, nn

from loka.formats import QTensor
from loka.kernels.fused_linear import DgradResult
from loka.kernels.fused_linear import reference as fused_law
from loka.kernels.norm_quantize import reference as norm_law
from loka.kernels.scaled_mm import reference as product_law
from loka.tuning import gradients, session

from .small import make_trained, placed, train, tune

Defect = Callable[[DgradResult], DgradResult]


@pytest.fixture(autouse=True)
def no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate refuses most of these kernels before a gradient is looked at (test_kernels.py)."""
    monkeypatch.setattr(session, "verify_kernels", lambda *given: None)


def plant_step(monkeypatch: pytest.MonkeyPatch, defect: Defect) -> None:
    """The step of backward from one link of a chain to the one before."""
    plant(monkeypatch, "fused_linear", fused_law, dgrad=lambda *given, **options: defect(fused_law.dgrad(*given, **options)))  # fmt: skip


def plant_weight_gradient(monkeypatch: pytest.MonkeyPatch, defect: Callable[[Tensor], Tensor]) -> None:
    """Products that are added up exactly: weight gradients alone are."""

    def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
        product = product_law.run(a, b, out_dtype=out_dtype)
        return product if fast_accum else defect(product)

    plant(monkeypatch, "scaled_mm", product_law, run=run)


def changed(q: QTensor, change: Callable[[Tensor], Tensor]) -> QTensor:
    return QTensor(change(q.data.float()).to(q.data.dtype), q.scale, q.spec)


def without_late_rows(x: Tensor) -> Tensor:
    return torch.cat([x[: len(x) // 2], torch.zeros_like(x[len(x) // 2 :])])


def both(change: Callable[[Tensor], Tensor]) -> Defect:
    """Of the gradient and of its transpose."""
    return lambda made: replace(made, g=changed(made.g, change), g_t=changed(made.g_t, lambda x: change(x.T).T))


STEPS: dict[str, Defect] = {
    "sign": both(torch.neg),
    "late rows": both(without_late_rows),
    "nothing": both(torch.zeros_like),
    "not a number": both(lambda x: x * float("nan")),
    "too small": both(lambda x: x / 2),
    "another row of the transpose": lambda made: replace(made, g_t=changed(made.g_t, lambda x: x.roll(1, 0))),
}
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sign": torch.neg,
    "transposed": lambda x: x.T.reshape(x.shape),
    "a block of columns": lambda x: torch.cat([x[:, :-16], torch.zeros_like(x[:, -16:])], 1),
    "rare columns": lambda x: x * (1 + (torch.arange(x.shape[1]) % 16 == 3)),
}


class TwoTowers(nn.Module):
    """Two chains of different widths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.item = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.query(x)) * torch.tanh(self.item(x))).mean(-1)


def refused(model: nn.Module) -> set[str]:
    """Linears that tune leaves in high precision for the sake of their gradients."""
    tuned = tune(model)
    units = [unit for unit in tuned.record.units if "its gradients are wrong here" in unit.reason]
    assert all(unit.way == "high" for unit in units)
    return {name for unit in units for name in unit.linears}


@pytest.mark.parametrize("defect", STEPS.values(), ids=STEPS)
def test_a_wrong_step_of_backward_is_refused(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_step(monkeypatch, defect)
    model, _ = make_trained()
    assert refused(model) == {"first", "second", "third"}
    assert not placed(model)


def _flip_one(x: Tensor) -> Tensor:
    return torch.where(x.abs() == x.abs().max(), -3 * x, x)


VECTORS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "nothing": torch.zeros_like,
    "sign": torch.neg,
    "twice": lambda x: 2 * x,
    "another column": lambda x: x.roll(1),
    "one column": _flip_one,
    "not a number": lambda x: x * float("nan"),
    "none": lambda x: None,
}


@pytest.mark.parametrize("defect", VECTORS.values(), ids=VECTORS)
def test_a_wrong_bias_gradient_is_refused(defect: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels add up the gradients of biases besides; nothing else depends on them, and wrong ones train wrong biases."""
    plant_step(monkeypatch, lambda made: made if made.bias is None else replace(made, bias=defect(made.bias)))
    model, _ = make_trained()
    assert refused(model) == {"first", "second", "third"}
    assert not placed(model)


@pytest.mark.parametrize(("size", "twice", "wrong"), [(1.6, False, False), (1.6, True, True), (8.0, False, True)])
def test_one_element_that_is_slightly_off_must_be_so_twice(size: float, twice: bool, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The largest of thousands of differences may be chance: a Wukong lost a correct chain to 67 % where 52 % were expected."""
    run = gradients._run

    def jolt(call: Any, selection: Any, plan: Any, *, reference: bool = False, nudged: bool = False) -> Any:
        found = run(call, selection, plan, reference=reference, nudged=nudged)
        if plan is not None and not reference and (twice or not nudged):
            bias = found["the bias of first"][0]
            bias[0, 3] += size * torch.maximum(bias.abs()[0, 3], bias.square().mean().sqrt())
        return found

    monkeypatch.setattr(gradients, "_run", jolt)
    model, _ = make_trained()
    assert bool(refused(model)) == wrong


@pytest.mark.parametrize("which", ["weight", "bias"])
@pytest.mark.parametrize("defect", [torch.neg, torch.zeros_like, _flip_one])
def test_a_wrong_gradient_of_a_norm_is_refused(which: str, defect: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def gradient(*given: Any, **options: Any) -> Any:
        made = norm_law.gradient(*given, **options)
        vector = getattr(made, which)
        return made if vector is None else replace(made, **{which: defect(vector)})

    plant(monkeypatch, "norm_quantize", norm_law, gradient=gradient)
    model, _ = make_trained()
    assert refused(model) == {"first", "second", "third"}


def test_a_bias_whose_gradient_rounding_decides_is_not_compared() -> None:
    """Behind a shift that a norm removes again, the gradient of a bias is nothing but rounding."""
    generator = torch.Generator().manual_seed(0)
    ref, nudged, found = ([torch.randn(1, 64, generator=generator)] for _ in range(3))
    assert gradients._compare_vector("a bias", found, ref, nudged) is None
    close = [ref[0] * (1 + 0.01 * torch.randn(1, 64, generator=generator))]
    assert gradients._compare_vector("a bias", found, ref, close) is not None
    assert gradients._compare_vector("a bias", close, ref, close) is None


@pytest.mark.parametrize("defect", WEIGHTS.values(), ids=WEIGHTS)
def test_a_wrong_weight_gradient_is_refused(defect: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    plant_weight_gradient(monkeypatch, defect)
    model, _ = make_trained()
    assert refused(model) == {"first", "second", "third"}
    assert not placed(model)


def test_a_gradient_that_16_bits_do_not_determine_is_not_asked_for() -> None:
    """Where moving weights by a thousandth turns a gradient of 16 bits by sixty degrees, FP8 may turn it too; never around, and nowhere else."""
    exact = torch.tensor([[1.0, 0.0]])
    turned, little = torch.tensor([[0.45, 0.9]]), torch.tensor([[1.0, 0.01]])
    beside = partial(gradients._compare_with_exact, "it")
    assert "a cosine of 0.45" in beside([turned], [exact])[0]
    assert "a cosine of 0.45" in beside([turned], [exact], [little])[0]
    assert beside([turned], [exact], [torch.tensor([[0.5, 0.87]])]) is None
    assert beside([-turned], [exact], [torch.tensor([[0.5, 0.87]])]) is not None
    assert beside([torch.zeros(1, 2)], [exact], [torch.tensor([[-0.5, 0.87]])]) is not None
    assert (
        beside([0.25 * exact], [exact], [torch.tensor([[0.3, 0.954]])]) is not None
    )  # turning is no excuse for a size
    assert beside([1e-6 * exact], [exact], [torch.tensor([[-0.1, 1.0]])]) is not None


def test_a_reason_says_whether_a_kernel_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same defect in a kernel, and in the reference as well; what cannot be compared blames nobody."""
    for everywhere, defect in ((False, torch.neg), (True, torch.neg), (False, lambda x: x * float("nan"))):
        with monkeypatch.context() as patched:
            plant_weight_gradient(patched, defect)
            if everywhere:
                patched.setattr(gradients, "REFERENCE", frozenset({"planted", "reference"}))
            reasons = [unit.reason for unit in tune(make_trained()[0]).record.units if "its gradients" in unit.reason]  # fmt: skip
        assert reasons
        assert all(("no kernel is wrong" in reason) == everywhere for reason in reasons)


def test_no_memory_for_moved_weights_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    move = gradients._nudged

    def full(model: nn.Module, linears: Any) -> Any:
        if linears:
            raise torch.OutOfMemoryError("no room")
        return move(model, linears)

    plant_weight_gradient(monkeypatch, torch.neg)
    monkeypatch.setattr(gradients, "_nudged", full)
    assert refused(make_trained()[0]) == {"first", "second", "third"}


def test_only_what_is_wrong_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_weight_gradient(monkeypatch, lambda x: -x if 96 in x.shape else x)
    model = TwoTowers()
    train(model)
    assert refused(model) == {"item.0", "item.2"}
    assert placed(model) == {"query.0", "query.2"}


class Stacked(nn.Module):
    """A table and two chains, one behind the other; 96 columns go into the second, and into nothing else."""

    def __init__(self, below: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(2, 64)
        self.below = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) if below else nn.Identity()
        self.above = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 64))
        self.last = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.below(x + self.table((x[:, 0] > 0).long())))
        return self.last(torch.tanh(self.above(torch.cat([x, x[:, :32]], 1)))).squeeze(-1)


@pytest.mark.parametrize("below", [True, False], ids=["a chain before it", "a table before it"])
@pytest.mark.parametrize("defect", [torch.neg, lambda x: torch.cat([x[:, :-16], 0 * x[:, -16:]], 1)], ids=["sign", "columns"])  # fmt: skip
def test_what_a_unit_hands_back_is_compared(defect: Callable[[Tensor], Tensor], below: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """No weight of its own shows it: tables, and whatever stands before it, would learn from it."""

    def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
        product = product_law.run(a, b, out_dtype=out_dtype)
        return defect(product) if fast_accum and product.shape[1] == 96 else product

    plant(monkeypatch, "scaled_mm", product_law, run=run)
    model = Stacked(below)
    train(model)
    assert refused(model) == {"above.0", "above.2"}
    assert placed(model) == ({"below.0", "below.2"} if below else set())


def test_of_an_input_whole_examples_are_compared() -> None:
    """32 vectors of 1,024 examples: every 32nd row would be the first vector of each."""
    module, kept, rows = nn.Linear(4, 4), dict[int, Tensor](), dict[int, Tensor]()
    handle = module.register_forward_pre_hook(partial(gradients._watch_input, kept, rows, []), with_kwargs=True)
    x = torch.zeros(1024, 32, 4, requires_grad=True) + 0.0
    module(x)
    x.backward(torch.arange(32.0)[:, None].expand(1024, 32, 4))
    handle.remove()
    assert kept[0].shape == rows[0].shape == (1024, 4)
    assert set(kept[0][:, 0].tolist()) == set(range(32))


def test_another_order_of_additions_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are off by about a rounding of bf16 everywhere, as those of tensor cores are, forward and backward."""
    generator = torch.Generator().manual_seed(0)

    def nearly(x: Tensor) -> Tensor:
        return x * (1 + 2.0**-10 * torch.randn(x.shape, generator=generator)).to(x.dtype)

    def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
        return nearly(product_law.run(a, b, out_dtype=out_dtype))

    def run_fused(a: QTensor, b: QTensor, *given: Any, **options: Any) -> Any:
        scale = a.scale * (1 + 2.0**-10 * torch.randn((), generator=generator))
        return fused_law.run(QTensor(a.data, scale, a.spec), b, *given, **options)

    plant(monkeypatch, "scaled_mm", product_law, run=run)
    plant(monkeypatch, "fused_linear", fused_law, run=run_fused)
    model, _ = make_trained()
    tuned = tune(model)
    assert placed(model) == {"first", "second", "third"}
    assert tuned.record.gradients == "by the score, and by a backward pass compared with 16-bit gradients"


def test_recurrent_layers_keep_no_unit_from_being_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they have no backward in eval mode."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gru, self.inner = nn.GRU(64, 64, num_layers=2, dropout=0.1, batch_first=True), make_trained()[0]

        def forward(self, x: Tensor) -> Tensor:
            last: Tensor = self.gru(torch.stack([x, x.roll(1, 1)], 1))[0][:, -1]
            if last.requires_grad and not self.gru.training:
                last.register_hook(self.fail)
            return self.inner(last + x)

        @staticmethod
        def fail(gradient: Tensor) -> None:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")

    model = Recurrent().eval()
    tuned = tune(model)
    assert tuned.record.gradients == "by the score, and by a backward pass compared with 16-bit gradients"
    assert not any(module.training for module in model.modules())


def test_a_model_whose_backward_fails_in_eval_mode_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN's recurrent layers do on a GPU."""

    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_trained()[0]

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            if y.requires_grad and not self.training and all(p.requires_grad for p in self.parameters()):
                y.register_hook(self.fail)
            return y

        @staticmethod
        def fail(gradient: Tensor) -> None:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")

    tuned = tune(Strict())
    assert any(note.startswith("gradients were not compared with 16-bit") for note in tuned.record.notes)
    assert tuned.record.gradients == "by the score"


def test_tables_are_not_copied_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they may fill half of the memory, and their weights say nothing about the kernels of linears."""

    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.tower = nn.Embedding(7, 64), make_trained()[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.tower(x + 0.1 * self.table((x[:, 0] > 0).long()))

    model, moved = Recommender(), set[str]()
    real = gradients._mix

    def compare(*given: Any) -> Tensor:
        moved.update(name for name, p in model.named_parameters() if not torch.equal(p, before[name]))
        return real(*given)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    monkeypatch.setattr(gradients, "_mix", compare)
    tune(model)
    assert "tower.first.weight" in moved
    assert "table.weight" not in moved
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_what_fp8_is_too_coarse_for_leaves_its_chain_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight gradient that the reference gets wrong too, of the linear in the middle; where the kernel alone is wrong, nothing of the chain is trusted."""
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))  # fmt: skip
    train(tower)

    def spoil(product: Tensor) -> Tensor:
        return -product if sorted(product.shape) == [96, 128] else product

    plant_weight_gradient(monkeypatch, spoil)
    for law, left in ((frozenset({"planted", "reference"}), {"0", "4"}), (gradients.REFERENCE, set())):
        monkeypatch.setattr(gradients, "REFERENCE", law)
        tuned = tune(copy.deepcopy(tower))
        ways = {name: unit for unit in tuned.record.units for name in unit.linears}
        assert ways["2"].way == "high"
        assert ("no kernel is wrong" in ways["2"].reason) == bool(left)
        assert {name for name in "024" if ways[name].way != "high"} == left


class Routed(nn.Module):
    """A product decides which rows the tower gets, as in a mixture of experts: in FP8, other rows than in 16-bit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.last = nn.Linear(64, 64), nn.Linear(64, 1)
        self.tower = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.below(x))
        rows = (h > 0.2).nonzero()[:, 0]  # an example comes as often as it has large features
        return self.last(h.index_add(0, rows, self.tower(h[rows]) / 64)).squeeze(-1)


def test_gradients_of_other_rows_are_not_compared() -> None:
    model = Routed()
    train(model)
    tuned = tune(model)
    assert placed(model) == {"below", "tower.0", "tower.2"}
    assert [note for note in tuned.record.notes if note.startswith("the gradient of the input of tower.0 was not compared with 16-bit")]  # fmt: skip
    rows = [torch.ones(5, 4), torch.ones(5, 4)]
    assert gradients._compare_with_exact("it", [torch.ones(6, 4)], [-torch.ones(5, 4)]) is None
    assert gradients._compare_with_exact("it", [torch.ones(6, 4), torch.ones(4, 4)], rows) is None
    assert gradients._compare_with_reference("it", [torch.ones(6, 4), torch.ones(4, 4)], rows, rows) is None
    assert gradients._compare_with_reference("it", rows, rows, [torch.ones(6, 4), torch.ones(4, 4)]) is None


class Chosen(nn.Module):
    """The tower gets the rows with the highest score, as an expert that chooses its tokens: always half, by their score.

    What it returns is weighted by a feature of either sign, so the gradients of different rows point anywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.last = nn.Linear(64, 64), nn.Linear(64, 1)
        self.tower = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.below(x))
        rows = h[:, 0].topk(len(x) // 2).indices
        return self.last(h.index_add(0, rows, self.tower(h[rows]) * x[rows, :1])).squeeze(-1)


def test_gradients_of_equally_many_other_rows_are_not_compared() -> None:
    model = Chosen()
    train(model)
    tuned = tune(model)
    reasons = {unit.name: unit.reason for unit in tuned.record.units}
    assert placed(model) == {"below", "tower.0", "tower.2"}, reasons
    assert [note for note in tuned.record.notes if note.startswith("the gradient of the input of tower.0 was not compared with 16-bit")]  # fmt: skip


def test_rows_are_told_apart_by_far_more_than_rounding() -> None:
    """Noise of a tenth, as of several layers in FP8, leaves rows what they are; a row that is exchanged is another one."""
    generator = torch.Generator().manual_seed(0)
    law = torch.randn(2, 32, 16, generator=generator) + 1.0
    rough = law * (1 + 0.1 * torch.randn(law.shape, generator=generator))
    ones = [torch.ones(32, 16), torch.ones(32, 16)]

    def find(rows: Tensor, gradients_: list[Tensor] = ones) -> dict[str, list[Tensor]]:
        exact = {"it": ones, "the rows of it": list(law)}
        return gradients._find_same_rows(["it", "other"], {"it": gradients_, "the rows of it": list(rows)}, exact)

    assert find(rough) == {}
    some, most = rough.clone(), rough.flip(1)
    some[0, :4] = rough[1, :4]
    kept = find(some)["it"]
    assert [int(keep.sum()) for keep in kept] == [28, 32]
    assert [int(keep.sum()) for keep in find(most)["it"]] == [0, 0]
    assert find(most, [torch.full((32, 16), torch.nan), torch.ones(32, 16)]) == {}  # a fault, whatever the rows
    assert find(law * torch.nan) == {}
    one = {"it": [torch.ones(1, 16)], "the rows of it": [law[0, :1]]}
    assert gradients._find_same_rows(["it"], one | {"the rows of it": [law[1, :1]]}, one) == {}  # nothing to tell from


def test_a_wrong_gradient_of_the_same_rows_is_found_beside_others() -> None:
    """The row that is another one says nothing; of the two others, one has the wrong sign."""
    same = {"it": [torch.tensor([True, True, False])]}
    law, found = torch.ones(3, 4), torch.tensor([[1.0], [-1.0], [9.0]]).expand(3, 4)
    assert "and 5.26 of its size" in gradients._compare_with_exact("it", [found], [law]).text
    picked = [gradients._pick({"it": [x]}, same)["it"] for x in (found, law)]
    assert "a cosine of 0.00" in gradients._compare_with_exact("it", *picked).text


def test_a_gradient_that_rounding_decides_accuses_no_kernel() -> None:
    """An InterFormer that had hardly been trained: the reference changed by half if its weights moved by a thousandth."""
    generator = torch.Generator().manual_seed(0)
    law, other, noise = (torch.randn(32, 16, generator=generator) for _ in range(3))
    text, size, _ = gradients._compare_with_reference("it", [law + 4 * other], [law], [law + 0.01 * noise])
    assert text.endswith("a kernel is wrong")
    text, chaotic, _ = gradients._compare_with_reference("it", [law + 4 * other], [law], [law + 0.5 * noise])
    assert "says little about a kernel" in text
    assert "a kernel is wrong" not in text
    assert size == chaotic > 3
    assert gradients._compare_with_reference("it", [law + 1.2 * other], [law], [law + 0.5 * noise]) is None
