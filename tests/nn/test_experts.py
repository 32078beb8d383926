import pytest
import torch

from loka.nn import MixtureOfExperts, SwiGLU


def silu(x):
    return x / (1 + (-x).exp())


def plain_experts(moe, x):
    """One token at a time, one expert at a time."""
    rows = []
    for token in x:
        scores = 1 / (1 + (-(moe.router.weight @ token)).exp())
        chosen = sorted(range(len(scores)), key=lambda e: -float(scores[e].detach() + moe.balance[e] * 1e-6))[: moe.top]
        total = sum(scores[e] for e in chosen)
        out = 0
        for e in chosen:
            gate, up = (moe.gate_up.weight[e] @ token).chunk(2)
            out = out + scores[e] / total * (moe.down.weight[e] @ (silu(gate) * up))
        if moe.shared is not None:
            gate, up = (moe.shared.gate_up.weight @ token).chunk(2)
            out = out + moe.shared.down.weight @ (silu(gate) * up)
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("shared", [0, 2])
def test_mixture_is_its_formula_with_gradients(shared):
    moe = MixtureOfExperts(8, 16, routed=5, top=2, shared=shared).double()
    moe.balance.copy_(torch.tensor([300_000, -200_000, 0, 100_000, 0]))
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    tensors = (x, *moe.parameters())
    out, expected = moe(x), plain_experts(moe, x)
    torch.testing.assert_close(out, expected)
    probe = torch.randn_like(out)
    ours, theirs = torch.autograd.grad(out, tensors, probe), torch.autograd.grad(expected, tensors, probe)
    torch.testing.assert_close(ours, theirs)


def test_swiglu():
    ffn = SwiGLU(4, 6, bias=True).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    gate, up = (x @ ffn.gate_up.weight.T + ffn.gate_up.bias).chunk(2, -1)
    torch.testing.assert_close(ffn(x), (silu(gate) * up) @ ffn.down.weight.T + ffn.down.bias)


def test_balance_changes_who_is_chosen_but_not_how_much_it_counts():
    moe = MixtureOfExperts(8, 8, routed=4, top=1)
    x = torch.randn(32, 8)
    moe.balance[3] = 10_000_000
    chosen, gates = moe.route(x)
    assert chosen.eq(3).all()
    assert gates.eq(1).all()


def test_updates_of_the_balance_even_out_the_load():
    moe = MixtureOfExperts(8, 8, routed=4, top=1, shared=0)
    with torch.no_grad():
        moe.router.weight[1] += 1.0
    x = torch.randn(256, 8) + 1.0

    def loads():
        moe(x)
        return moe.load.clone()

    before = loads()
    assert before.sum() == 256
    for _ in range(200):
        moe.update_balance(0.02)
        after = loads()
    assert before.max() > 200
    assert after.max() < 110
    assert "balance" in moe.state_dict()


def test_small_updates_survive_a_cast_to_bf16():
    moe = MixtureOfExperts(8, 8, routed=2, top=1).bfloat16()
    for _ in range(1000):
        moe.load.copy_(torch.tensor([3, 1]))
        moe.update_balance(1e-3)
    assert moe.balance.tolist() == [-1_000_000, 1_000_000]
    with pytest.raises(ValueError, match="expected at least 1e-06"):
        moe.update_balance(1e-9)


def test_evaluation_counts_no_load():
    moe = MixtureOfExperts(8, 8, routed=4, top=2).eval()
    moe(torch.randn(3, 8))
    assert moe.load.eq(0).all()


def test_active_parameters():
    moe = MixtureOfExperts(8, 16, routed=5, top=2, shared=1)
    assert moe.active_parameters() == 5 * 8 + 3 * (3 * 8 * 16)


def test_compiles_to_one_graph():
    moe = MixtureOfExperts(8, 16, routed=5, top=2)
    x = torch.randn(6, 8)
    compiled = torch.compile(moe, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(x), moe(x))
    assert moe.load.sum() == 2 * 6 * 2


def test_bad_top():
    with pytest.raises(ValueError, match="top=6"):
        MixtureOfExperts(8, 8, routed=5, top=6)
