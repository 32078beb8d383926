"""The adapters of embedding tables: green for the law and for torch, red for kernels that are wrong in ways that happen."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loka.kernels import registry
from loka.kernels.embedding_bag import BagCall
from loka.kernels.embedding_bag import reference as bag_law
from loka.kernels.embedding_update import UpdateCall
from loka.kernels.embedding_update import reference as update_law
from loka.measure.adapter import adapter_for
from loka.measure.gate import judge_backend

CPU = torch.device("cpu")


def operands(op: str, variant: str) -> tuple[Any, Any, Any]:
    adapter = adapter_for(op)
    (call,) = adapter.calls([(16, 32, 100)], [variant])
    return adapter, call, adapter.operands(call, seed=1, distribution="normal", device=CPU)


@pytest.mark.parametrize("op", ["embedding_bag", "embedding_update"])
def test_the_law_and_the_baseline_are_green(op: str) -> None:
    for variant in adapter_for(op).VARIANTS:
        adapter, call, given = operands(op, variant)
        assert adapter.check(registry.backend(op, "reference"), call, given)
        assert adapter.check_baseline(call, given)
        adapter.thunk(registry.backend(op, "reference"), call, given)()
        assert adapter.bytes_moved(call) > 0


def broken_bag(change) -> Any:
    return SimpleNamespace(
        run=lambda rows, indices, offsets, **options: change(bag_law.run(rows, indices, offsets, **options))
    )


@pytest.mark.parametrize("change", [lambda out: out * 1.0001, lambda out: out[:-1], lambda out: out.roll(1, 0)])
def test_a_wrong_lookup_is_red(change) -> None:
    adapter, call, given = operands("embedding_bag", "int8:row|sum|items=20")
    assert not adapter.check(broken_bag(change), call, given)


@pytest.mark.parametrize("fault", ["nearest", "unsummed", "other numbers", "nothing"])
def test_a_wrong_update_is_red(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rows, indices, offsets, grad, rule, state, draw, **options):
        unique, total = update_law.sum_gradients(indices, offsets, grad, None, "sum")
        if fault == "unsummed":
            bag = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
            for i, row in enumerate(indices.tolist()):
                one = torch.tensor([row])
                moved = update_law.move(rows.take(one), grad[bag[i : i + 1]], one, rule, state, draw.step)
                update_law.write(rows, one, moved, draw)
            return
        if fault == "nothing":
            return
        moved = update_law.move(rows.take(unique), total, unique, rule, state, draw.step)
        with monkeypatch.context() as patch:
            if fault == "nearest":
                patch.setattr(
                    update_law, "uniform_bits", lambda rows, columns, draw, **_: torch.full((len(rows), columns), 2**22)
                )
            else:
                patch.setattr(
                    update_law,
                    "uniform_bits",
                    lambda rows, columns, draw, **_: torch.randint(0, 2**23, (len(rows), columns)),
                )
            update_law.write(rows, unique, moved, draw)

    adapter, call, given = operands("embedding_update", "int8:row|rowwise_adagrad|items=20")
    verdict = adapter.check(SimpleNamespace(run=run), call, given)
    assert not verdict
    assert verdict.reason


@pytest.mark.parametrize(
    ("op", "variant"),
    [
        ("embedding_bag", "int8:row"),
        ("embedding_bag", "int8:row|sum|items=0"),
        ("embedding_update", "int8:row|lion"),
        ("embedding_update", "fp8|sgd"),
    ],
)
def test_variants_that_mean_nothing_are_refused(op: str, variant: str) -> None:
    with pytest.raises(ValueError):
        adapter_for(op).calls([(4, 8, 10)], [variant])


@pytest.mark.parametrize(("bags", "items"), [(7, 23), (23, 7), (5, 0)])
def test_bags_of_a_model_need_not_be_equally_long(bags: int, items: int) -> None:
    law = registry.backend("embedding_bag", "reference"), registry.backend("embedding_update", "reference")
    lookup = BagCall(100, 32, bags, items, "int8:row", "mean", out_dtype=torch.bfloat16)
    update = UpdateCall(100, 32, bags, items, "e4m3:row:pow2")
    for backend, op, call in ((law[0], "embedding_bag", lookup), (law[1], "embedding_update", update)):
        verdict = judge_backend(op, SimpleNamespace(run=backend.run, supports=backend.supports), call, CPU)
        assert verdict, verdict.reason


def test_a_lookup_in_16_bits_may_round_the_other_way() -> None:
    adapter = adapter_for("embedding_bag")
    call = BagCall(100, 32, 16, 320, "int8:row", "sum", out_dtype=torch.bfloat16)
    given = adapter.operands(call, seed=1, distribution="normal", device=CPU)
    assert adapter.check(broken_bag(lambda out: torch.nextafter(out, out * 2)), call, given)
    assert not adapter.check(broken_bag(lambda out: out * 1.05), call, given)
