"""Masked softmax attention: the reference against plain loops, torch's and the Triton kernel against the reference.

Where there is no GPU the Triton tests need the interpreter, which must be chosen before triton is imported: one test runs this file again in a child
process that has it.
"""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from kernels.interpreter import run_interpreted
from loka.kernels.backend import UnsupportedError
from loka.kernels.masked_attention import MaskedAttentionCall, choose, load, masked_attention, triton
from loka.kernels.strides import near_rows
from loka.nn import DotProductAttention, SelfAttention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
KINDS = ["after", "before", "holes", "whole", "none"]


def make(*, rows=3, heads=2, shared=1, queries=18, keys=34, d=8, kind="after", dtype=torch.float64, device="cpu"):
    """Operands with gradients; the mask of `kind`, and queries of which some are not wanted."""
    g = torch.Generator().manual_seed(keys)

    def leaf(*shape):
        return torch.randn(*shape, generator=g).to(device, dtype).requires_grad_()

    place, lengths = torch.arange(keys), torch.tensor([keys, keys // 3, 1])[:rows, None]
    mask = {
        "after": place < lengths,
        "before": place >= keys - lengths,
        "holes": (place * 7 + lengths) % 3 > 0,
        "whole": place.expand(rows, keys) >= 0,
        "none": (place < lengths) & (torch.arange(rows) != 1)[:, None],
    }[kind]
    wanted = torch.arange(queries) < torch.tensor([queries, queries // 2, 0])[:rows, None]
    return {
        "q": leaf(rows, heads, queries, d),
        "k": leaf(rows, shared, keys, d),
        "v": leaf(rows, shared, keys, d),
        "mask": mask.to(device),
        "wanted": wanted.to(device),
    }


def gradients(out, operands):
    leaves = {name: operands[name] for name in "qkv"}
    probe = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out.dtype)
    found = torch.autograd.grad(out, list(leaves.values()), probe, retain_graph=True)
    return dict(zip(leaves, found, strict=True))


def assert_near(ours, law, tolerance, name="out"):
    size = law.double().norm()
    error = (ours.double() - law.double()).norm() / size if size else ours.double().norm()
    assert error < tolerance, f"{name}: relative L2 error {error:.2e}"


def assert_same(operands, backend, **options):
    dtype = operands["q"].dtype
    out, law = (masked_attention(**operands, **options, backend=name) for name in (backend, "reference"))
    assert out.dtype == dtype
    assert out.shape == law.shape
    assert_near(out, law, TOLERANCE[dtype])
    expected = gradients(law, operands)
    for name, found in gradients(out, operands).items():
        assert_near(found, expected[name], TOLERANCE[dtype], f"d{name}")


def by_hand(q, k, v, mask, wanted, scale):
    out = torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        g = h // (q.shape[1] // k.shape[1])
        seen = mask[b].nonzero()[:, 0].tolist()
        if wanted[b, i] and seen:
            weights = torch.stack([(scale * (q[b, h, i] @ k[b, g, j])).exp() for j in seen])
            out[b, h, i] = sum(w * v[b, g, j] for w, j in zip(weights, seen, strict=True)) / weights.sum()
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_its_formula(kind):
    operands = make(queries=5, keys=7, kind=kind)
    out = masked_attention(**operands, scale=0.7, backend="reference")
    torch.testing.assert_close(out, by_hand(**operands, scale=0.7))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_torch_same_as_reference_with_gradients(kind, shared):
    assert_same(make(kind=kind, heads=4, shared=shared), "torch")


def test_all_queries_are_wanted_where_nobody_says():
    operands = make() | {"wanted": None}
    law = masked_attention(**operands, backend="reference")
    assert (law.norm(dim=-1) > 0).all()
    assert_same(operands, "torch")


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("kind", ["after", "none"])
def test_what_is_not_seen_is_not_read(kind, backend):
    assert_ignores(make(kind=kind), backend)


def assert_ignores(operands, backend):
    law = masked_attention(**operands, backend=backend)
    with torch.no_grad():
        for name, read in (("q", operands["wanted"]), ("k", operands["mask"]), ("v", operands["mask"])):
            operands[name][~read[:, None, :].expand(operands[name].shape[:3])] = torch.nan
    out = masked_attention(**operands, backend=backend)
    torch.testing.assert_close(out, law)
    for name, found in gradients(out, operands).items():
        assert found.isfinite().all(), name


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_what_is_no_number_stays_none(backend):
    assert_spreads(make(), backend)


def assert_spreads(operands, backend):
    """A diverged model must not answer with numbers."""
    for name in "qk":
        with torch.no_grad():
            spoiled = {**operands, name: operands[name].clone()}
            spoiled[name][0, 0, 0] = torch.nan
        assert masked_attention(**spoiled, backend=backend)[0, 0, 0].isnan().all(), name


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("sizes", [{"rows": 0}, {"keys": 0}, {"queries": 0}])
def test_nothing_to_attend_to(sizes, backend):
    operands = make(**sizes)
    out = masked_attention(**operands, backend=backend)
    assert out.shape == operands["q"].shape
    assert not out.any()
    assert not torch.autograd.grad(out.sum(), operands["q"])[0].any()


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_scale_of_zero_and_autocast_change_nothing_else(backend):
    operands = make(dtype=torch.float32) | {"wanted": None}
    mask, v = operands["mask"][:, None, :, None], operands["v"]
    mean = ((v * mask).sum(2, keepdim=True) / mask.sum(2, keepdim=True)).expand(-1, 2, 18, -1)
    torch.testing.assert_close(masked_attention(**operands, scale=0.0, backend=backend), mean)
    with torch.autocast("cpu", dtype=torch.float16):
        assert masked_attention(**operands, backend=backend).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(3, 33, dtype=torch.bool)}, r"mask must be bool \[3, 34\], got torch.bool \(3, 33\)"),
        ({"mask": torch.ones(3, 34)}, r"mask must be bool .* got torch.float32"),
        ({"wanted": torch.ones(3, 34, dtype=torch.bool)}, r"wanted must be bool \[3, 18\]"),
        ({"k": torch.zeros(3, 3, 34, 8)}, "G dividing H"),
        ({"q": torch.zeros(3, 2, 18, 9)}, "expects q"),
        ({"q": torch.zeros(3, 2, 18, 8, dtype=torch.float16)}, "of one type"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        masked_attention(**(make() | change))


def test_auto_says_what_it_chose_and_a_named_backend_that_cannot_raises():
    operands = make()
    chosen = choose(operands["q"], operands["k"])
    assert chosen.name == "torch"
    assert "not torch.float64" in chosen.refusals["triton"]
    with pytest.raises(UnsupportedError, match=r"'triton' cannot run 3 rows, 18 x 34, 2 heads on 1, d 8, float64"):
        masked_attention(**operands, backend="triton")
    wide = MaskedAttentionCall(1, 1, 1, 1, 1, 200)
    assert "128 wide, got 200" in triton.supports(wide, torch.device("cuda")).reason


def test_modules_answer_padding_with_zeros_and_do_not_read_it():
    mask = torch.arange(9) < torch.tensor([9, 4, 0])[:, None]
    attend = SelfAttention(16, 2, rotary=9)
    x = torch.randn(3, 9, 16)
    out = attend(x, mask)
    torch.testing.assert_close(attend(torch.where(mask[:, :, None], x, 7.0), mask), out)
    torch.testing.assert_close(out[1:2, :4], attend(x[1:2, :4]))
    assert not out[~mask].any()
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    everything = torch.ones(2, 5, dtype=torch.bool)
    plain = DotProductAttention()
    torch.testing.assert_close(plain(q, k, k, everything), plain(q, k, k))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plain(q, k.bfloat16(), k, everything).dtype == torch.bfloat16
    assert plain.chosen == "torch"
    assert "CUDA" in plain.refusals["triton"]
    with pytest.raises(UnsupportedError, match="'triton' cannot run"):
        DotProductAttention(backend="triton")(q, k, k, everything)
    with pytest.raises(ValueError, match="needs a mask of keys"):
        plain(q, k, k, wanted=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="no backend 'cudnn'; backends are auto, triton, torch, reference"):
        DotProductAttention(backend="cudnn")


def test_what_lies_too_far_apart_is_copied():
    """Kernels count within a row in 32 bits."""
    near = make()["k"]
    assert near_rows(near) is near
    for strides in ((8, 2**33, 2**29, 1), (8, 2**30, 2**33, 1)):
        apart = torch.empty_strided((3, 3, 5, 8), strides, device="meta")
        assert near_rows(apart).is_contiguous()


def runs_here(device):
    return bool(triton.supports(MaskedAttentionCall(1, 1, 1, 1, 1, 8, torch.float32), device))


@pytest.fixture
def triton_device(device):
    if not runs_here(device):
        pytest.skip("Triton runs neither on a GPU nor interpreted in this process; the child process runs this test")
    return device


def test_triton_in_the_interpreter(device):
    if runs_here(device):
        pytest.skip("Triton runs in this process")
    run_interpreted(__file__, "on_triton")


BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter multiplies bf16 by its bit patterns


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("kind", KINDS)
def test_on_triton_same_as_reference_with_gradients(triton_device, kind, dtype):
    assert_same(make(kind=kind, dtype=dtype, device=triton_device), "triton")
    with pytest.raises(AssertionError):
        assert_near(torch.ones(3) * (1 + 4 * TOLERANCE[dtype]), torch.ones(3), TOLERANCE[dtype])


def test_on_triton_in_fp16(triton_device):
    assert_same(make(kind="holes", dtype=torch.float16, device=triton_device), "triton")


@pytest.mark.parametrize(
    "sizes",
    [
        {"queries": 1, "keys": 1},
        {"queries": 2, "keys": 50},
        {"queries": 33, "keys": 3, "d": 24, "shared": 2},
        {"d": 5, "heads": 4, "shared": 2, "queries": 3},
        {"rows": 1, "queries": 16, "keys": 16, "d": 16},
        {"keys": 0},
        {"queries": 0},
        {"rows": 0},
    ],
)
def test_on_triton_of_every_shape(triton_device, sizes):
    operands = make(**sizes, dtype=torch.float32, device=triton_device)
    assert_same(operands | {"wanted": None}, "triton", scale=0.5)


def test_on_triton_strided_and_expanded_operands(triton_device):
    operands = make(dtype=torch.float32, device=triton_device)
    seeds = torch.randn(1, 4, 5, 8, device=triton_device, requires_grad=True)
    packed = torch.randn(3, 34, 2, 2, 8, device=triton_device, requires_grad=True)
    k, v = packed.permute(2, 0, 3, 1, 4).unbind()

    def run(backend):
        out = masked_attention(seeds.expand(3, -1, -1, -1), k, v, operands["mask"], backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), [seeds, packed], retain_graph=True)

    for ours, law in zip(run("triton"), run("reference"), strict=True):
        assert_near(ours.detach(), law.detach(), 2e-5)


def test_on_triton_what_is_not_seen_is_not_read(triton_device):
    assert_ignores(make(kind="holes", dtype=torch.float32, device=triton_device), "triton")


def test_on_triton_what_is_no_number_stays_none(triton_device):
    assert_spreads(make(dtype=torch.float32, device=triton_device), "triton")


def test_on_triton_forward_mode_is_refused(triton_device):
    operands = make(queries=3, keys=5, dtype=torch.float32, device=triton_device)
    fixed = {name: operands[name].detach() for name in "kv"} | {"mask": operands["mask"], "backend": "triton"}
    q = operands["q"].detach()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: masked_attention(q, **fixed), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        masked_attention(forward_ad.make_dual(q, q), **fixed)


def test_on_triton_flops_are_those_of_torch(triton_device):
    operands = make(queries=3, keys=5, dtype=torch.float32, device=triton_device)

    load()  # a counter knows what was there when it was opened

    def count(backend):
        with FlopCounterMode(display=False) as counter:
            gradients(masked_attention(**operands, backend=backend), operands)
        return counter.get_total_flops()

    pairs = 3 * 2 * 3 * 5 * 8
    assert count("triton") == 2 * pairs * 2 + 2 * pairs * 5


def test_on_triton_large_scores_do_not_overflow(triton_device):
    operands = make(dtype=torch.float32, device=triton_device)
    out, law = (masked_attention(**operands, scale=200.0, backend=name) for name in ("triton", "reference"))
    assert_near(out, law, 1e-3)  # scores in the thousands keep three digits behind the point
    for name, found in gradients(out, operands).items():
        assert found.isfinite().all(), name


def test_on_triton_gradients_that_are_not_finite_stay_where_they_are(triton_device):
    """A NaN in the gradient of an answer that nobody wanted is not read."""
    operands = make(dtype=torch.float32, device=triton_device)
    out = masked_attention(**operands, backend="triton")
    grad = torch.where(operands["wanted"][:, None, :, None], torch.ones_like(out), torch.nan)
    for found in torch.autograd.grad(out, [operands[name] for name in "qkv"], grad):
        assert found.isfinite().all()


def test_on_triton_compiles_to_one_graph(triton_device):
    operands = make(dtype=torch.float32, device=triton_device)
    compiled = torch.compile(masked_attention, fullgraph=True, dynamic=False, backend="aot_eager")
    out = compiled(**operands, backend="triton")
    expected = masked_attention(**operands, backend="triton")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out, operands), gradients(expected, operands), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [32, 64, 128])
def test_on_triton_tiles_as_they_are_launched(triton_device, d):
    assert_same(make(queries=260, keys=300, d=d, dtype=torch.bfloat16, device=triton_device), "triton")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "backward_q", "backward_kv"])
@pytest.mark.parametrize(("dtype", "width"), [("*bf16", 32), ("*bf16", 128), ("*fp32", 128)])
def test_compiles_for_hopper_as_it_is_launched(kernel, dtype, width):
    """Every tile of the launch table fits into shared memory and multiplies 16-bit operands on tensor cores."""
    pytest.importorskip("triton", exc_type=ImportError)
    from kernels.hopper import SHARED_MEMORY, compile_kernel, needs_ptxas
    from loka.kernels.masked_attention import triton_kernels, triton_ops

    if any(mark.args[0] for mark in needs_ptxas):
        pytest.skip("Triton cannot compile for sm_90 here")
    q = torch.empty(1, 1, 512, width, dtype=torch.float32 if dtype == "*fp32" else torch.bfloat16)
    constants = triton_ops._options(triton_ops.choose(kernel, q, q), q, torch.ones(1, dtype=torch.bool))
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    names = getattr(triton_kernels, f"_{kernel}").arg_names
    types = {f"{name}_ptr": dtype for name in ("q", "k", "v", "out", "grad", "dq", "dk", "dv")}
    types |= {"mask_ptr": "*u8", "wanted_ptr": "*u8", "seen_ends_ptr": "*i32", "wanted_ends_ptr": "*i32"}
    types |= {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "scale": "fp32", "natural": "fp32"}
    strides = {name for name in names if name.endswith(("_row", "_head", "_step"))}
    chosen = ({name: kind for name, kind in types.items() if name in names}, constants, options)
    compiled = compile_kernel("masked_attention", f"_{kernel}", chosen, strides)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert ("wgmma" in compiled.asm["ptx"]) == (dtype == "*bf16")
