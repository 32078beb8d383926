import math

import pytest
import torch

from loka import models
from loka.data.batch import Jagged
from loka.kernels.backend import UnsupportedError
from loka.models.hstu import HSTU, HSTUConfig, next_item_loss, next_times, take_last
from loka.nn import HardSwish

from .checks import affine, assert_compiles, assert_same_with_gradients, layer_norm, randomize

SMALL = {"items": 9, "d": 6, "layers": 2, "heads": 2, "d_qk": 3, "d_v": 4, "max_length": 5, "time_buckets": 8}
ROWS = Jagged.from_rows([[1, 2, 3, 8, 4], [], [5], [3, 3]])
TIMES = torch.tensor([3, 5, 20, 21, 500, 7, 2, 900])


def silu(x):
    return x / (1 + (-x).exp())


def bucket(dt, buckets):
    dt = max(abs(dt), 1)
    octave = math.floor(math.log2(dt))
    return min(2 * octave + (dt >= 1.5 * 2**octave), buckets - 1)


def plain_row(model, ids, times, asked):
    """The equations for one history, one pair of positions at a time."""
    config = model.config
    x = model.items.table.weight[ids] * config.d**0.5 + model.positions.weight[: len(ids)]
    for layer in model.layers:
        u, v, q, k = silu(affine(layer_norm(x, layer.norm), layer.uvqk)).split(layer.widths, 1)
        outs = []
        for h, (vh, qh, kh) in enumerate(zip(v.chunk(2, 1), q.chunk(2, 1), k.chunk(2, 1), strict=True)):
            at = h if config.bias_per_head else 0
            rows = []
            for i in range(len(ids)):
                row = torch.zeros(config.d_v, dtype=x.dtype)
                for j in range(i + 1):
                    s = qh[i] @ kh[j] + layer.position_bias.weight[at, i - j]
                    if times is not None:
                        s = s + layer.time_bias.weight[at, bucket(asked[i] - times[j], config.time_buckets)]
                    row = row + silu(s) * vh[j]
                rows.append(row / config.max_length)
            outs.append(torch.stack(rows))
        x = x + affine(layer_norm(torch.cat(outs, 1), layer.out_norm) * u, layer.out)
    h, e = layer_norm(x, model.norm), model.items.table.weight
    if not config.cosine:
        return h @ e.T
    return (h / h.norm(dim=1, keepdim=True)) @ (e / e.norm(dim=1, keepdim=True)).T / config.temperature


def plain_hstu(model, items, times):
    rows = []
    for i in range(items.rows):
        ids = items.row(i)
        if not len(ids):
            continue
        own = times[items.offsets[i] : items.offsets[i + 1]].tolist()
        rows.append(plain_row(model, ids, own, own[1:] + own[-1:]))
    return torch.cat(rows)


@pytest.mark.parametrize(("per_head", "cosine"), [(False, True), (True, False)])
def test_same_as_the_equations_in_float64(per_head, cosine):
    config = HSTUConfig(**{**SMALL, "time_buckets": 4}, bias_per_head=per_head, cosine=cosine)
    model = randomize(HSTU(config).double())
    assert_same_with_gradients(model, lambda *a: plain_hstu(model, *a), ROWS, TIMES)


def test_without_times_there_is_no_time_bias():
    model = randomize(HSTU(HSTUConfig(**SMALL)).double())
    row = Jagged.from_rows([[1, 2, 3]])
    torch.testing.assert_close(model(row), plain_row(model, row.values, None, None))


def test_the_future_does_not_change_the_past():
    model = HSTU(HSTUConfig(**SMALL))
    long, short = Jagged.from_rows([[1, 2, 3, 4, 5]]), Jagged.from_rows([[1, 2, 3]])
    times = torch.tensor([1, 5, 9, 40, 80])
    early = model(short, times[:3], next_times(times, long.offsets)[:3])
    torch.testing.assert_close(model(long, times)[:3], early)


def test_last_is_the_last_position_and_zero_for_an_empty_row():
    model = HSTU(HSTUConfig(**SMALL))
    every, last = model(ROWS, TIMES), model(ROWS, TIMES, last=True)
    torch.testing.assert_close(last[[0, 2, 3]], every[[4, 5, 7]])
    assert last[1].eq(0).all()
    torch.testing.assert_close(
        take_last(torch.arange(8.0)[:, None], ROWS.offsets).flatten(), torch.tensor([4.0, 0, 5, 7])
    )


@pytest.mark.parametrize("rows", [[[1]], [[]], [[], []], [[1, 2, 3, 4, 5]]])
def test_one_row_empty_rows_and_the_longest_row(rows):
    model = HSTU(HSTUConfig(**SMALL))
    items = Jagged.from_rows(rows)
    scores = model(items, torch.zeros_like(items.values))
    assert scores.shape == (len(items.values), 9)
    loss = next_item_loss(scores, items)
    assert loss.isfinite()
    loss.backward()


def test_loss_is_the_mean_over_positions_that_have_a_next_item():
    scores = torch.randn(8, 9)
    pairs = [(0, 2), (1, 3), (2, 8), (3, 4), (6, 3)]
    expected = -torch.stack([scores.log_softmax(1)[i, t] for i, t in pairs]).mean()
    torch.testing.assert_close(next_item_loss(scores, ROWS), expected)


def test_next_times_stay_in_their_row():
    assert next_times(TIMES, ROWS.offsets).tolist() == [5, 20, 21, 500, 500, 7, 900, 900]


def test_compiles_to_one_graph():
    assert_compiles(HSTU(HSTUConfig(**{**SMALL, "layers": 1})), ROWS, TIMES)


def test_mistakes_are_named():
    model = HSTU(HSTUConfig(**SMALL))
    with pytest.raises(ValueError, match=r"6 items.*max_length = 5"):
        model(Jagged.from_rows([[1] * 6]))
    with pytest.raises(ValueError, match=r"'item' got id 9 .*0 to 8"):
        model(Jagged.from_rows([[1, 9]]))
    with pytest.raises(ValueError, match="items is 1"):
        HSTUConfig(items=1)
    with pytest.raises(ValueError, match="attention is 'cuda'"):
        HSTUConfig(attention="cuda")


def test_attention_says_what_it_ran_and_never_runs_another() -> None:
    model = HSTU(HSTUConfig(**SMALL)).double()
    model(ROWS, TIMES)
    assert {layer.attention.chosen for layer in model.layers} == {"reference"}
    assert "float64" in model.layers[0].attention.refusals["triton"]
    with pytest.raises(UnsupportedError, match="attention backend 'triton' cannot run"):
        HSTU(HSTUConfig(**SMALL, attention="triton")).double()(ROWS, TIMES)


def test_hard_style_is_hard_everywhere_and_trains_with_dropout():
    model = models.build("hstu", "tiny", activation="hard_swish", norm="block", bias=False, dropout=0.2)
    assert isinstance(model.layers[0].activation, HardSwish)
    items = Jagged.from_rows([[1, 2, 3]])
    next_item_loss(model(items), items).backward()


def test_it_learns_a_cycle():
    """1 -> 2 -> 3 -> 1: a few steps must be enough."""
    model = models.build("hstu", "tiny", items=4)
    rows = Jagged.from_rows([[1, 2, 3, 1, 2, 3], [2, 3, 1, 2, 3, 1]])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        next_item_loss(model(rows), rows).backward()
        optimizer.step()
    assert model(rows, last=True).argmax(1).tolist() == [1, 2]
