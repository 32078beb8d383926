import pytest
import torch
from torch import nn

from loka import models
from loka.data.batch import Jagged
from loka.models.onerec import Experts, OneRec, OneRecConfig, reorder, semantic_id_loss
from loka.nn import MixtureOfExperts

from .checks import affine, assert_same_with_gradients, randomize, rms_norm

SMALL = {"codebooks": (5, 4, 3), "d": 8, "layers": 2, "heads": 4, "d_ff": 8, "g_kv": 2, "context": 4, "short": 2}
HISTORY = Jagged(
    torch.tensor([[0, 0, 0], [4, 3, 2], [1, 2, 1], [2, 0, 2], [3, 1, 0], [0, 3, 1], [1, 1, 1]]),
    torch.tensor([0, 5, 5, 7]),
)
CODES = torch.tensor([[1, 2, 0], [4, 0, 1], [0, 3, 2]])
MOE = Experts(routed=3, top=2, hidden=8, dense_blocks=1)


def silu(x):
    return x / (1 + (-x).exp())


def attend(q, k, v, causal=False):
    s = q @ k.T / q.shape[1] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), float("-inf"))
    return s.softmax(-1) @ v


def norm(x, module):
    return rms_norm(x, module.weight)


def plain_context(model, rows, static):
    """Keys and values of one request, from the ids of its most recent items."""
    config, context = model.config, model.context
    starts = (0, 5, 9)
    rows = rows[-config.context :]
    tokens = [context.static.weight[0] if static is None else affine(static, context.static)]
    for i, row in enumerate(rows):
        age = len(rows) - 1 - i
        vector = sum(model.codes.table.weight[start + int(code)] for start, code in zip(starts, row, strict=True))
        tokens.append(
            affine(vector + context.positions.weight[age], context.short if age < config.short else context.long)
        )
    c = affine(norm(torch.stack(tokens), context.norm), context.project)
    chunks = [norm(part, m) for part, m in zip(c.chunk(len(context.chunk_norms), -1), context.chunk_norms, strict=True)]
    return [(chunks[i * config.s_kv], chunks[i * config.s_kv + config.s_kv - 1]) for i in range(config.l_kv)]


def plain_ffn(ffn, x):
    if not isinstance(ffn, MixtureOfExperts):
        gate, up = affine(x, ffn.gate_up).chunk(2, -1)
        return affine(silu(gate) * up, ffn.down)
    rows = []
    for token in x:
        scores = torch.sigmoid(ffn.router.weight @ token)
        chosen = scores.topk(ffn.top).indices.tolist()
        out = plain_ffn(ffn.shared, token)
        for e in chosen:
            gate, up = (ffn.gate_up.weight[e] @ token).chunk(2)
            out = out + scores[e] / scores[chosen].sum() * (ffn.down.weight[e] @ (silu(gate) * up))
        rows.append(out)
    return torch.stack(rows)


def plain_onerec(model, history, codes, static=None):
    """The equations, one request at a time and one head at a time."""
    config, requests = model.config, []
    for b in range(len(codes)):
        rows = history.values[history.offsets[b] : history.offsets[b + 1]]
        pairs = plain_context(model, rows, None if static is None else static[b])
        inputs = [
            model.begin.weight[0],
            model.codes.table.weight[codes[b, 0]],
            model.codes.table.weight[5 + codes[b, 1]],
        ]
        h = torch.stack(inputs)
        for index, block in enumerate(model.blocks):
            k, v = (t.split(2, -1) for t in pairs[index * config.l_kv // config.layers])
            q = affine(norm(h, block.cross_norm), block.cross.query).split(2, -1)
            share = config.heads // config.g_kv
            seen = torch.cat([attend(q[i], k[i // share], v[i // share]) for i in range(config.heads)], -1)
            h = h + affine(seen, block.cross.out)
            q, k, v = (t.split(2, -1) for t in affine(norm(h, block.self_norm), block.attention.qkv).chunk(3, -1))
            seen = torch.cat([attend(*t, causal=True) for t in zip(q, k, v, strict=True)], -1)
            h = h + affine(seen, block.attention.out)
            h = h + plain_ffn(block.ffn, norm(h, block.ffn_norm))
        requests.append(torch.cat([affine(norm(h[p], head.norm), head.linear) for p, head in enumerate(model.heads)]))
    return torch.stack(requests)


class Joined(nn.Module):
    """The logits of all levels side by side, so that one comparison covers them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return torch.cat(self.model(*inputs), 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"s_kv": 2, "l_kv": 2},
        {"static": 3, "experts": MOE},
    ],
)
def test_same_as_the_equations_in_float64(options):
    model = OneRec(OneRecConfig(**SMALL, **options)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    static = torch.randn(3, 3, dtype=torch.float64) if "static" in options else None
    assert_same_with_gradients(Joined(model), lambda *a: plain_onerec(model, *a), HISTORY, CODES, static)


def test_an_item_of_the_history_is_its_codes_and_itself():
    model = OneRec(OneRecConfig(**SMALL, items=9)).double()
    plain = OneRec(OneRecConfig(**SMALL)).double()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("items.")})
    numbers = torch.tensor([3, 8, 1, 1, 2, 5, 7])
    wide = Jagged(torch.cat([HISTORY.values, numbers[:, None]], 1), HISTORY.offsets)
    with torch.no_grad():
        model.items.table.weight.zero_()
        same = model(wide, CODES)
        model.items.table.weight[7] = torch.randn(8, dtype=torch.float64)
        other = model(wide, CODES)
    for a, b, c in zip(plain(HISTORY, CODES), same, other, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(b[:2], c[:2])
        assert not torch.allclose(b[2], c[2]), "item 7 is in the last request's history only"
    with pytest.raises(ValueError, match=r"ids and item numbers has values \[total, 4\], got \(7, 3\)"):
        model(HISTORY, CODES)
    with pytest.raises(ValueError, match="'item' got id 9"):
        model(Jagged(wide.values + torch.tensor([0, 0, 0, 1]), wide.offsets), CODES)
    history, codes, _ = model.example_inputs()
    assert history.values.shape == (4, 4)
    assert codes.shape == (1, 3)


def test_steps_with_beams_spell_what_the_whole_forward_sees():
    model = randomize(OneRec(OneRecConfig(**SMALL, experts=MOE))).eval()
    context = model.encode(HISTORY)
    beams = torch.stack([CODES, CODES.flip(0).clamp(max=2)], 1)
    expected = [model(HISTORY, beams[:, w]) for w in range(2)]
    first, past = model.step(context, None, None)
    assert first.shape == (3, 1, 5)
    past = reorder(past, torch.zeros(3, 2, dtype=torch.int64))
    second, past = model.step(context, beams[:, :, 0], past)
    third, _ = model.step(context, beams[:, :, 1], past)
    for w in range(2):
        torch.testing.assert_close(first[:, 0], expected[w][0])
        torch.testing.assert_close(second[:, w], expected[w][1])
        torch.testing.assert_close(third[:, w], expected[w][2])


def test_reordered_beams_take_their_past_along():
    model = randomize(OneRec(OneRecConfig(**SMALL))).eval()
    context = model.encode(HISTORY)
    _, past = model.step(context, None, None)
    past = reorder(past, torch.zeros(3, 2, dtype=torch.int64))
    codes, after = torch.tensor([[0, 1], [2, 3], [4, 0]]), torch.tensor([[1, 2], [0, 1], [3, 3]])
    _, past = model.step(context, codes, past)
    swapped, _ = model.step(context, after.flip(1), reorder(past, torch.tensor([[1, 0]] * 3)))
    straight, _ = model.step(context, after, past)
    torch.testing.assert_close(swapped.flip(1), straight)


def test_only_the_most_recent_items_count_and_padding_does_not():
    model = OneRec(OneRecConfig(**SMALL))
    recent = Jagged(HISTORY.values[[1, 2, 3, 4, 5, 6]], torch.tensor([0, 4, 4, 6]))
    for a, b in zip(model(HISTORY, CODES), model(recent, CODES), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("codebooks", [(6,), (6, 5), (6, 5, 4, 3)])
@pytest.mark.parametrize("rows", [[0], [0, 0], [4], [9]])
def test_any_number_of_levels_with_empty_and_longest_histories(codebooks, rows):
    model = OneRec(OneRecConfig(**{**SMALL, "codebooks": codebooks}))
    offsets = torch.tensor([0, *rows]).cumsum(0)
    history = Jagged(torch.zeros(int(offsets[-1]), len(codebooks), dtype=torch.int64), offsets)
    codes = torch.zeros(len(rows), len(codebooks), dtype=torch.int64)
    logits = model(history, codes)
    assert [tuple(level.shape) for level in logits] == [(len(rows), size) for size in codebooks]
    loss = semantic_id_loss(logits, codes)
    assert loss.isfinite()
    loss.backward()


def test_loss_is_the_mean_over_levels():
    logits = (torch.randn(3, 5), torch.randn(3, 4), torch.randn(3, 3))
    by_hand = -sum(logits[p].log_softmax(1)[b, CODES[b, p]] for b in range(3) for p in range(3)) / 9
    torch.testing.assert_close(semantic_id_loss(logits, CODES), by_hand)


def test_compiles_to_one_graph():
    torch._dynamo.reset()
    model = Joined(OneRec(OneRecConfig(**SMALL, experts=MOE)))
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    results = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(HISTORY, CODES)
        out.square().mean().backward()
        results.append((out.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1])


def test_bf16_under_autocast():
    model = OneRec(OneRecConfig(**SMALL, experts=MOE)).eval()
    exact = torch.cat(model(HISTORY, CODES), 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = torch.cat(model(HISTORY, CODES), 1)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, rtol=0.1, atol=0.1)


def test_published_mixture_has_4_14_billion_parameters_and_half_a_billion_active():
    cost = models.count(models.configure("onerec", "4b-a0.5b"))
    assert round(cost.parameters / 1e9, 2) == 4.14
    assert round(cost.active_parameters / 1e9, 2) == 0.50


@pytest.mark.parametrize(
    ("size", "billions"),
    [("0.1b", 0.1), ("0.2b", 0.2), ("0.5b", 0.5), ("1b", 1.0), ("2b", 2.0), ("4b", 4.0), ("8b", 8.0)],
)
def test_published_dense_sizes_are_named_by_the_parameters_of_their_blocks(size, billions):
    """The names round; the nearest is 0.1b, whose blocks have 0.088 billion."""
    with torch.device("meta"):
        model = models.build("onerec", size)
    assert model.active_parameters() / 1e9 == pytest.approx(billions, rel=0.14)


def test_balance_moves_only_mixtures():
    model = OneRec(OneRecConfig(**SMALL, experts=MOE))
    model(HISTORY, CODES)
    model.update_balance(0.1)
    (moe,) = (m for m in model.modules() if isinstance(m, MixtureOfExperts))
    assert moe.balance.abs().max() > 0
    assert moe.load.eq(0).all()


def test_mistakes_are_named():
    model = OneRec(OneRecConfig(**SMALL))
    wrong = CODES.clone()
    wrong[1, 1] = 4
    with pytest.raises(ValueError, match=r"'level 2' got id 4 .*0 to 3"):
        model(HISTORY, wrong)
    with pytest.raises(ValueError, match=r"values \[total, 3\], got \(7, 2\)"):
        model(Jagged(HISTORY.values[:, :2], HISTORY.offsets), CODES)
    with pytest.raises(ValueError, match=r"built for 0 user features, got \(3, 2\)"):
        model(HISTORY, CODES, torch.zeros(3, 2))
    for bad, message in (
        ({"g_kv": 3}, "divide the 4 heads"),
        ({"s_kv": 3}, "s_kv is 3"),
        ({"l_kv": 9}, "more key-value pairs"),
        ({"short": 4}, "short < context"),
    ):
        with pytest.raises(ValueError, match=message):
            OneRecConfig(**{**SMALL, **bad})


def test_it_learns_to_repeat_the_last_item():
    model = models.build("onerec", "tiny-moe")
    values = torch.randint(8, (64, 3))
    history = Jagged(values, torch.arange(0, 65, 2))
    target = values[1::2]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    first = None
    for _ in range(60):
        optimizer.zero_grad()
        loss = semantic_id_loss(model(history, target), target)
        first = first or loss.item()
        loss.backward()
        optimizer.step()
        model.update_balance()
    assert loss.item() < 0.2 * first
