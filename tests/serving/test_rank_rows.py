"""Rows of a ranker: what is the same in all of them is kept once, and spread where the model runs."""

from typing import Any

import numpy as np
import pytest
import torch

from loka.data.schema import Field, Schema
from loka.models import build_ranker
from loka.records import RankerInfo, capture_environment
from loka.serving import FieldError, RankerBundle, RankingModel, RankRequest
from loka.serving.rank_reader import find_best
from loka.serving.rank_rows import Columns, RowReader, join
from loka.serving.times import Bucket

SCHEMA = Schema(("price", "age"), (Field("user", 10), Field("item", 100)), (), ("click",))


def spread(columns: Columns, rows: int) -> np.ndarray:
    table = np.repeat(columns.same[None], rows, 0)
    table[:, columns.places] = columns.varying
    return table


def test_columns_are_read_as_they_were_meant() -> None:
    price = np.array([1, 2, 3], np.float32)
    request = RankRequest(features={"price": price.tobytes(), "age": 30, "user": 12, "item": [5, 100, 7]})
    job = RowReader(SCHEMA, 8).read(request)
    assert (job.units, job.data.count, job.data.unknown) == (3, 3, 4)  # user 12 in every row, and one item
    assert spread(job.data.dense, 3).tolist() == [[1, 30], [2, 30], [3, 30]]
    assert spread(job.data.categorical, 3).tolist() == [[0, 5], [0, 0], [0, 7]]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"user": -1}, "$.features.user[0]"),
        ({"item": [1, -2, 3]}, "$.features.item[1]"),
        ({"user": 1.5}, "$.features.user[0]"),
        ({"item": 2**63}, "$.features.item"),
        ({"age": float("inf")}, "$.features.age"),
        ({"item": [1, 2]}, "$.features.item"),
    ],
)
def test_what_does_not_fit_is_named(change: dict, path: str) -> None:
    features = {"price": [1.0, 2.0, 3.0], "age": 30, "user": 1, "item": [5, 6, 7]} | change
    with pytest.raises(FieldError) as found:
        RowReader(SCHEMA, 8).read(RankRequest(features=features))
    assert found.value.path.startswith(path)


def test_requests_that_differ_in_other_columns_join() -> None:
    first = Columns(np.array([1, 0]), np.array([1]), np.array([[10], [11]]))
    second = Columns(np.array([0, 2]), np.array([0]), np.array([[20], [21], [22]]))
    third = Columns(np.array([3, 4]), np.array([], np.int64), np.empty((1, 0), np.int64))
    joined = join([first, second, third])
    assert joined.places.tolist() == [0, 1]
    assert joined.varying.tolist() == [[1, 10], [1, 11], [20, 2], [21, 2], [22, 2], [3, 4]]
    assert joined.same.tolist() == [[1, 0], [0, 2], [3, 4]]


def make_served(device: str = "cpu") -> RankingModel:
    torch.manual_seed(0)
    model = build_ranker(SCHEMA, "wukong", "tiny")
    info = RankerInfo(name="w", family="wukong", size="tiny", options={}, factory=None, dense=[], columns=[], labels=["click"], link="sigmoid", environment=capture_environment())  # fmt: skip
    return RankingModel(RankerBundle(model, SCHEMA, info), rows=(8,), batch_invariant=True, device=device)


def test_the_model_reads_what_was_sent_and_zeros_behind_it() -> None:
    """Batches of other sizes, and columns that vary in all, some or none of the rows, one behind another."""
    served = make_served()
    draw = np.random.default_rng(0)
    for _ in range(40):
        jobs = []
        while not jobs or (draw.random() < 0.5 and sum(job.units for job in jobs) < 5):
            n = int(draw.integers(1, 4))
            varies = draw.random(4) < draw.choice([0.0, 0.5, 1.0])
            values = [draw.integers(0, 9, n).tolist() if many else int(draw.integers(0, 9)) for many in varies]
            jobs.append(served.read(RankRequest(features=dict(zip(("price", "age", "user", "item"), values, strict=True)))))  # fmt: skip
        served.score(8, [job.data for job in jobs])
        batch = served._made[8].batch
        for name in ("dense", "categorical"):
            expected = np.concatenate([spread(getattr(job.data, name), job.units) for job in jobs])
            found = getattr(batch, name).numpy()
            np.testing.assert_array_equal(found[: len(expected)], expected)
            assert not found[len(expected) :].any()


def test_a_batch_scores_as_its_requests_do_alone() -> None:
    served = make_served()
    bodies = [
        {"price": 1.0, "age": 2.0, "user": 3, "item": 4},
        {"price": [0.5, 0.1], "age": 2.0, "user": 3, "item": [4, 9]},
        {"price": 1.0, "age": [3.0, 4.0], "user": [1, 2], "item": 8},
    ]
    jobs = [served.read(RankRequest(features=body)) for body in bodies]
    together = served.score(8, [job.data for job in jobs])
    alone = np.concatenate([served.score(8, [job.data]) for job in jobs])
    np.testing.assert_array_equal(together, alone)
    assert len(np.unique(together)) == 5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scores_of_batches_in_flight_are_those_of_each_alone(device: str) -> None:
    """One set of static tensors serves them all: a batch must not change when the next one is laid out."""
    served, draw = make_served(device), np.random.default_rng(0)
    served.warm()
    batches = []
    for sizes in ((3, 2), (4,), (1, 1, 6), (8,), (2,)):
        columns = [{"price": draw.normal(size=n).tolist(), "age": 2.0, "user": 3, "item": draw.integers(0, 99, n).tolist()} for n in sizes]  # fmt: skip
        batches.append([served.read(RankRequest(features=features)) for features in columns])
    alone = [served.score(8, [job.data for job in jobs]) for jobs in batches]
    launched = [served.launch(Bucket(8, 0), batches[0])]
    for place, jobs in enumerate(batches):
        launched += [served.launch(Bucket(8, 0), following) for following in batches[place + 1 : place + 2]]
        answers: list[Any] = list(launched[place]())
        assert [len(answer.scores["click"]) for answer in answers] == [job.units for job in jobs]
        scores = np.concatenate([answer.scores["click"] for answer in answers], dtype=np.float32)
        np.testing.assert_array_equal(scores, alone[place][:, 0])
    assert served.captures == 1


@pytest.mark.gpu
def test_a_launch_does_not_wait_for_the_batches_before() -> None:
    served = make_served("cuda")
    served.warm()
    jobs = served.example(Bucket(8, 0))
    (alone,) = served.run(Bucket(8, 0), jobs)
    torch.cuda.synchronize()
    before = served.device_seconds
    first = served.launch(Bucket(8, 0), jobs)
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    second = served.launch(Bucket(8, 0), jobs)
    assert not busy.query()  # the device has not even begun it
    (found,) = first()
    assert not busy.query()  # and the one before is answered meanwhile
    assert found.scores == alone.scores
    (found,) = second()
    assert busy.query()
    assert found.scores == alone.scores
    assert 0 < served.device_seconds - before < 0.5


def test_the_best_rows_are_those_of_a_stable_sort() -> None:
    """Also with equal scores, NaN and infinities, and more wanted than there are."""
    draw = np.random.default_rng(0)
    for n in (1, 7, 300):
        for kind in range(40):
            scores = draw.integers(0, 6, n).astype(np.float32) if kind % 2 else draw.normal(size=n).astype(np.float32)
            scores[draw.random(n) < 0.1 * (kind % 4)] = (np.nan, np.inf, -np.inf)[kind % 3]
            count = int(draw.integers(1, n + 3))
            assert np.array_equal(find_best(scores, count), np.argsort(-scores, kind="stable")[:count])
