"""A ranker in a folder: what is read back is what was written, code is run only when it is named, a plan is applied."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.data.batch import Batch, Jagged
from loka.data.schema import Field, Schema
from loka.lowp.chain_modules import chains_of
from loka.lowp.linear import linears_of
from loka.lowp.shared_inputs import SHARED
from loka.models import build_ranker
from loka.mods.weighted_sums import WeightedSums
from loka.probe import Probe
from loka.serving import RankingModel, RankRequest, load_ranker, rank_bundle, save_ranker
from loka.serving.opening import open_model
from loka.serving.rank_bundle import MODEL, draw_batch, is_ranker_bundle

from .small import SCHEMA, make_ranker

PLAIN = Schema(("price",), (Field("item", 50),), (), ("click",))


class Mine(nn.Module):
    """A model of a user's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.out = nn.Linear(width + 1, 1)

    def forward(self, batch: Batch) -> Tensor:
        out: Tensor = self.out(torch.cat([self.table(batch.categorical[:, 0]), batch.dense], 1))
        return out


def make_mine(schema: Schema, width: int = 4) -> Mine:
    return Mine(width)


def test_scores_are_those_of_the_model_it_was_made_from(tmp_path: Path) -> None:
    served = make_ranker(tmp_path)
    torch.manual_seed(0)
    model = build_ranker(SCHEMA, "wukong", "tiny").eval()
    features = {"age": 1.5, "price": [1.0, 2.0, 3.0], "user": 7, "item": [1, 2, 3], "seen": [[1], [], [4, 5, 6]]}
    job = served.read(RankRequest(features=features))  # type: ignore[arg-type]
    batch = Batch(
        torch.tensor([[1.5, 1.0], [1.5, 2.0], [1.5, 3.0]]), torch.tensor([[7, 1], [7, 2], [7, 3]]),
        {"seen": Jagged.from_rows([[1], [], [4, 5, 6]])}, torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64),
    )  # fmt: skip
    wanted = model(batch).detach().sigmoid()
    for bucket in served.buckets:
        assert torch.allclose(torch.from_numpy(served.score(bucket[0], [job.data])), wanted, atol=1e-6)


def test_in_one_bucket_company_does_not_change_a_bit(tmp_path: Path) -> None:
    served = make_ranker(tmp_path, batch_invariant=True)
    assert served.buckets == [(32, 0)]
    jobs = [
        served.read(
            RankRequest(features={"age": n, "price": [float(n)] * 3, "user": n, "item": [1, 2, 3], "seen": [n]})
        )
        for n in range(1, 6)
    ]
    together = list(served.run((32, 0), jobs))
    assert [next(served.run((32, 0), [job])).scores for job in jobs[:1]] == [together[0].scores]


class Echo(nn.Module):
    def forward(self, batch: Batch) -> Tensor:
        return batch.dense[:, :1]


def make_echo(schema: Schema) -> Echo:
    return Echo()


def test_answers_that_are_taken_during_the_next_batch_are_those_of_their_own(tmp_path: Path) -> None:
    name = f"{__name__}:make_echo"
    save_ranker(Echo(), PLAIN, tmp_path, factory=name, link="identity")
    served = RankingModel(load_ranker(tmp_path, factory=name), rows=(4,))
    first, second = (
        served.run((4, 0), [served.read(RankRequest(features={"price": [value] * 2, "item": 1}))])
        for value in (1.0, 2.0)
    )
    assert next(first).scores == {"click": [1.0, 1.0]}
    assert next(second).scores == {"click": [2.0, 2.0]}


def test_a_folder_cannot_make_a_server_run_code(tmp_path: Path) -> None:
    name = f"{__name__}:make_mine"
    save_ranker(make_mine(PLAIN), PLAIN, tmp_path, factory=name, options={"width": 4})
    with pytest.raises(ValueError, match="not allowed to run"):
        load_ranker(tmp_path)
    with pytest.raises(ValueError, match="not allowed to run"):
        load_ranker(tmp_path, factory="other:thing")
    bundle = load_ranker(tmp_path, factory=name)
    served = RankingModel(bundle, rows=(4,))
    served.warm()
    assert len(next(served.run((4, 0), served.example((4, 0)))).scores["click"]) == 4


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = build_ranker(PLAIN, "wukong", "tiny")
    with pytest.raises(ValueError, match="exactly one"):
        save_ranker(model, PLAIN, tmp_path)
    with pytest.raises(ValueError, match=r"no ranker\.json"):
        load_ranker(tmp_path / "none")
    save_ranker(model, PLAIN, tmp_path, family="dlrm", size="tiny")
    with pytest.raises(ValueError, match="does not fit"):
        load_ranker(tmp_path)
    save_ranker(model, PLAIN, tmp_path, family="wukong")
    (tmp_path / MODEL).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="does not fit"):
        load_ranker(tmp_path)
    with pytest.raises(ValueError, match="ascending"):
        make_ranker(tmp_path / "x", rows=(8, 4))
    with pytest.raises(ValueError, match="CUDA graphs"):
        make_ranker(tmp_path / "y", graphs=True)


def test_a_folder_that_is_written_again_keeps_nothing_of_the_model_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_ranker(PLAIN, "wukong", "tiny")
    plan = loka.placing.plan_everything(model.eval(), draw_batch(PLAIN, 8), serving=True)
    save_ranker(model, PLAIN, tmp_path, family="wukong", plan=plan)
    planned = open_model(tmp_path)
    save_ranker(model, PLAIN, tmp_path, family="wukong")
    again = load_ranker(tmp_path)
    assert not list(linears_of(again.model))
    assert not list(chains_of(again.model))
    assert open_model(tmp_path).version != planned.version  # the same weights, another function

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_bundle, "save_record", stop)
    with pytest.raises(KeyboardInterrupt):
        save_ranker(model, PLAIN, tmp_path, family="wukong")
    assert not is_ranker_bundle(tmp_path)  # rather than new weights beside an old description


def test_a_plan_is_applied_when_it_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_ranker(PLAIN, "wukong", "tiny").eval()

    def batch() -> Batch:
        return Batch(
            torch.randn(64, 1),
            torch.randint(0, 50, (64, 1)),
            {},
            torch.zeros(64, 1),
            torch.zeros(64, dtype=torch.int64),
        )

    probe = Probe(model)
    for _ in range(3):
        model(batch()).sum().backward()
        probe.step()
    plan = probe.evaluate().plan(min_speedup=None)
    save_ranker(model, PLAIN, tmp_path, family="wukong", size="tiny", plan=plan)
    loaded = load_ranker(tmp_path).model
    twin = build_ranker(PLAIN, "wukong", "tiny").eval()
    twin.load_state_dict(model.state_dict())
    converted = loka.convert(twin, plan)
    assert converted.converted, "the plan converts nothing: the test would show nothing"
    rows = batch()
    assert torch.equal(loaded(rows), twin(rows))
    assert not torch.equal(loaded(rows), model(rows))


def test_a_model_in_low_precision_is_not_saved_as_a_plain_one(tmp_path: Path) -> None:
    """Served, it would run in other numbers than the ones that were looked at, and nobody would be told."""
    model = build_ranker(PLAIN, "wukong", "tiny").eval()
    loka.convert(model, recipe="rowwise", freeze=True)
    with pytest.raises(ValueError, match=r"run in low precision here, .* hint: give the plan="):
        save_ranker(model, PLAIN, tmp_path, family="wukong")
    loka.revert(model)
    save_ranker(model, PLAIN, tmp_path / "plain", family="wukong")
    loka.quantize(model)
    with pytest.raises(ValueError, match="keeps FP8 weights only"):
        save_ranker(model, PLAIN, tmp_path, family="wukong")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain"]


WIDE = Schema(tuple(f"d{i}" for i in range(256)), (Field("item", 50),), (), ("click",))


class Gated(nn.Module):
    """Experts that read one tensor, mixed by a gate: a plan's rewrites are found by running it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.gate, self.out = nn.Linear(256, 3), nn.Linear(256, 1)

    def forward(self, batch: Batch) -> Tensor:
        made = torch.stack([torch.relu(expert(batch.dense)) for expert in self.experts], 1)
        out: Tensor = self.out(torch.einsum("be,bed->bd", self.gate(batch.dense).softmax(-1), made))
        return out


def make_gated(schema: Schema) -> Gated:
    torch.manual_seed(0)
    return Gated()


def test_what_a_plan_finds_by_running_the_model_is_found_again(tmp_path: Path) -> None:
    model, example = make_gated(WIDE).eval(), draw_batch(WIDE, 64)
    plan = loka.placing.plan_everything(model, example, mods=list(loka.mods.FREE), serving=True, linears=256)
    save_ranker(model, WIDE, tmp_path, factory=f"{__name__}:make_gated", plan=plan)
    served = load_ranker(tmp_path, factory=f"{__name__}:make_gated").model
    assert isinstance(served, WeightedSums)
    assert SHARED in served.__dict__
    loka.convert(model, plan, example=example, freeze=True)
    assert torch.equal(served(example), model(example))


def test_compiled_every_bucket_is_compiled_before_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    made: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        made.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    save_ranker(make_gated(WIDE), WIDE, tmp_path, factory=f"{__name__}:make_gated")
    rows = tuple(range(2, 12))  # more than torch would compile by itself
    plain, served = (open_model(tmp_path, factory=f"{__name__}:make_gated", rows=rows, compiled=c) for c in (False, True))  # fmt: skip
    for model in (plain, served):
        model.warm()
    assert len(made) == len(rows)
    for bucket in served.buckets:
        job = served.example(bucket)
        expected, found = (torch.tensor(next(model.run(bucket, job)).scores["click"]) for model in (plain, served))
        torch.testing.assert_close(found, expected)
    assert len(made) == len(rows)


def test_a_ranker_with_sequences_is_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sequence columns \(seen\): their sizes vary within a bucket"):
        make_ranker(tmp_path, compiled=True)
