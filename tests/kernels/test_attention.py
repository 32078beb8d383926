"""SiLU attention: the reference against plain loops, the Triton kernel against the reference.

Where there is no GPU the Triton tests need the interpreter, which must be chosen before triton is imported: one test runs this file again in a child
process that has it.
"""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels.interpreter import run_interpreted
from loka.kernels.attention import choose, describe, load, reference, silu_attention, triton
from loka.kernels.backend import UnsupportedError

ROWS = [5, 0, 1, 33]
CLAMPED, EXACTLY, BEYOND = 3, 33, 70  # entries of a position bias, for rows of 33


def make(lengths, *, heads=2, d_qk=8, d_v=12, positions=20, buckets=16, dtype=torch.float64, device="cpu"):
    """Operands with gradients: ragged rows, biases shorter than the longest row, times that grow within a row."""
    g = torch.Generator().manual_seed(len(lengths))
    total = sum(lengths)

    def leaf(*shape):
        return (torch.randn(*shape, generator=g) * 0.7).to(device, dtype).requires_grad_()

    times = torch.cat([torch.randint(0, 5000, (n,), generator=g).cumsum(0) for n in lengths] or [torch.zeros(0)]).long()
    return {
        "q": leaf(total, heads, d_qk),
        "k": leaf(total, heads, d_qk),
        "v": leaf(total, heads, d_v),
        "offsets": torch.tensor([0, *lengths]).cumsum(0).to(device),
        "position_bias": leaf(heads, positions),
        "time_bias": leaf(heads, buckets),
        "times": times.to(device),
        "query_times": (times + torch.randint(0, 900, (total,), generator=g)).to(device),
    }


def by_hand(q, k, v, offsets, position_bias, time_bias, times, query_times, *, divisor, alpha):
    out = torch.zeros_like(v)
    for start, stop in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        for h in range(q.shape[1]):
            for i in range(start, stop):
                total = torch.zeros(v.shape[2], dtype=v.dtype)
                for j in range(start, i + 1):
                    s = alpha * (q[i, h] @ k[j, h]) + position_bias[h, min(i - j, position_bias.shape[1] - 1)]
                    dt = max(abs(int(query_times[i]) - int(times[j])), 1)
                    octave = math.floor(math.log2(dt))
                    bucket = 2 * octave + (dt >= 1.5 * 2**octave)
                    s = s + time_bias[h, min(bucket, time_bias.shape[1] - 1)]
                    total = total + s / (1 + (-s).exp()) * v[j, h]
                out[i, h] = total / (divisor or stop - start)
    return out


def gradients(out, operands):
    leaves = {name: t for name, t in operands.items() if t is not None and t.requires_grad}
    probe = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return dict(zip(leaves, torch.autograd.grad((out * probe).sum(), leaves.values()), strict=True))


@pytest.mark.parametrize("divisor", [None, 50.0])
def test_reference_is_its_formula_with_gradients(divisor):
    operands = make([4, 0, 1, 6], positions=3, buckets=9)
    out = silu_attention(**operands, max_length=7, divisor=divisor, alpha=0.3, backend="reference")
    expected = by_hand(**operands, divisor=divisor, alpha=0.3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out, operands), gradients(expected, operands))


def test_time_buckets_are_two_per_octave():
    seen = reference.time_bucket(torch.tensor([0, 1, -2, 3, 4, 5, 6, 7, 8, 11, 12, 2**31, 10**12]), 64)
    assert seen.tolist() == [0, 0, 2, 3, 4, 4, 5, 5, 6, 6, 7, 62, 63]


def test_no_rows_and_only_empty_rows():
    for lengths in ([], [0, 0]):
        operands = make(lengths)
        assert silu_attention(**operands, max_length=4).shape == (0, 2, 12)


def test_mistakes_are_named():
    operands = make([3])
    with pytest.raises(ValueError, match="belong together"):
        silu_attention(**{**operands, "time_bias": None}, max_length=4)
    with pytest.raises(ValueError, match=r"position_bias must be \[H = 2, entries\]"):
        silu_attention(**{**operands, "position_bias": torch.zeros(3, 4)}, max_length=4)
    with pytest.raises(ValueError, match="q, k"):
        silu_attention(**{**operands, "k": torch.zeros(3, 2, 9)}, max_length=4)
    with pytest.raises(ValueError, match="offsets must be int64"):
        silu_attention(**{**operands, "offsets": torch.tensor([0.0, 3.0])}, max_length=4)
    with pytest.raises(ValueError, match="query_times must be int64"):
        silu_attention(**{**operands, "query_times": torch.zeros(2, dtype=torch.int64)}, max_length=4)


def test_on_triton_bf16_is_refused_in_the_interpreter(triton_device):
    if triton_device.type == "cuda":
        pytest.skip("about the interpreter")
    operands = make([3], dtype=torch.bfloat16)
    verdict = triton.supports(describe(operands["q"], operands["v"], operands["offsets"], 4), triton_device)
    assert "bit patterns" in verdict.reason


def test_auto_says_what_it_chose_and_a_named_backend_that_cannot_raises():
    operands = make([3])  # float64
    chosen = choose(operands["q"], operands["v"], operands["offsets"], 4)
    assert chosen.name == "reference"
    assert "not torch.float64" in chosen.refusals["triton"]
    with pytest.raises(UnsupportedError, match=r"attention backend 'triton' cannot run 1 rows .* not torch\.float64"):
        silu_attention(**operands, max_length=4, backend="triton")


def test_triton_says_why_not():
    operands = make([3])
    call = describe(operands["q"], operands["v"], operands["offsets"], 4)
    assert "float64" in triton.supports(call, torch.device("cuda")).reason
    wide = make([3], d_v=300, dtype=torch.float32)
    assert (
        "up to 256" in triton.supports(describe(wide["q"], wide["v"], wide["offsets"], 4), torch.device("cuda")).reason
    )


def runs_here(device):
    operands = make([3], dtype=torch.float32)
    return bool(triton.supports(describe(operands["q"], operands["v"], operands["offsets"], 4), device))


@pytest.fixture
def triton_device(device):
    if not runs_here(device):
        pytest.skip("Triton runs neither on a GPU nor interpreted in this process; the child process runs this test")
    return device


def test_triton_in_the_interpreter(device):
    if runs_here(device):
        pytest.skip("Triton runs in this process")
    run_interpreted(__file__, "on_triton")


TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(
    ("dtype", "divisor"),
    [
        (torch.float32, None),
        (torch.float16, 40.0),
        pytest.param(
            torch.bfloat16, None, marks=pytest.mark.gpu
        ),  # the interpreter multiplies bf16 by its bit patterns
    ],
)
def test_on_triton_same_as_reference_with_gradients(triton_device, dtype, divisor):
    operands = make(ROWS, dtype=dtype, device=triton_device)
    out = silu_attention(**operands, max_length=33, divisor=divisor, alpha=0.3, backend="triton")
    expected = silu_attention(**operands, max_length=33, divisor=divisor, alpha=0.3, backend="reference")
    assert out.dtype == dtype
    assert_near(out, expected, TOLERANCE[dtype])
    ours, law = gradients(out, operands), gradients(expected, operands)
    for name, value in law.items():
        assert ours[name].dtype == dtype
        assert_near(ours[name], value, TOLERANCE[dtype], name)
    with pytest.raises(AssertionError):
        assert_near(out * (1 + 4 * TOLERANCE[dtype]), expected, TOLERANCE[dtype])


def assert_near(ours, law, tolerance, name="out"):
    error = (ours.double() - law.double()).norm() / law.double().norm()
    assert error < tolerance, f"{name}: relative L2 error {error:.2e}"


@pytest.mark.parametrize("absent", ["position_bias", "time_bias", "both"])
def test_on_triton_without_biases(triton_device, absent):
    operands = make([5, 18], dtype=torch.float32, device=triton_device)
    if absent in ("position_bias", "both"):
        operands["position_bias"] = None
    if absent in ("time_bias", "both"):
        operands |= {"time_bias": None, "times": None, "query_times": None}
    assert_same_gradients(operands, max_length=20)


@pytest.mark.parametrize("shared", [("position_bias",), ("time_bias",), ("position_bias", "time_bias")])
def test_on_triton_heads_share_biases(triton_device, shared):
    """[1, entries]: gradients are summed over heads."""
    lengths = [7, 0, 70] if len(shared) == 2 else [7, 0, 18]  # the first more than one program's keys
    operands = make(lengths, dtype=torch.float32, device=triton_device)
    operands |= {name: operands[name].detach()[:1].requires_grad_() for name in shared}
    assert_same_gradients(operands, max_length=max(lengths))


def test_on_triton_expanded_bias_and_strided_operands(triton_device):
    """Slices of one projection, as the model passes them, and one bias expanded to all heads."""
    torch.manual_seed(0)
    operands = make([6, 17], dtype=torch.float32, device=triton_device)
    wide = torch.randn(23, 56, device=triton_device, requires_grad=True)
    shared = torch.randn(1, 9, device=triton_device, requires_grad=True)
    results = []
    for backend in ("triton", "reference"):
        v, q, k = (t.unflatten(1, (2, -1)) for t in wide.split((24, 16, 16), 1))
        extra = {"position_bias": shared.expand(2, -1), "offsets": operands["offsets"]}
        out = silu_attention(q, k, v, **extra, max_length=17, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (wide, shared))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", [1, CLAMPED, EXACTLY, BEYOND])
def test_on_triton_position_bias_of_every_size(triton_device, positions):
    """The kernel sums by distance; distances beyond the bias are folded into its last entry afterwards."""
    operands = make([33, 7], positions=positions, dtype=torch.float32, device=triton_device)
    assert_same_gradients(operands, max_length=40)


@pytest.mark.parametrize("scale", [1, 2**40])
def test_on_triton_times_in_any_order(triton_device, scale):
    """Unsorted times make a tile's range of buckets long; the sums over it must still be whole, with 126 buckets too."""
    operands = make([18, 1, 5], buckets=126, dtype=torch.float32, device=triton_device)
    g = torch.Generator().manual_seed(3)
    for name in ("times", "query_times"):
        operands[name] = torch.randint(-50, 50, (24,), generator=g).to(triton_device) * scale
    assert_same_gradients(operands, max_length=18)


def test_on_triton_times_whose_differences_overflow(triton_device):
    """The reference wraps around, and so does the kernel; a range of buckets from differences that wrapped would miss some."""
    operands = make([8], buckets=126, dtype=torch.float32, device=triton_device)
    extreme = torch.tensor([-(2**63), 2**63 - 1, 0, 5], device=triton_device).repeat(2)
    assert_same_gradients(operands | {"times": extreme, "query_times": extreme.flip(0)}, max_length=8)


def assert_same_gradients(operands, *, max_length, **options):
    out, expected = (
        silu_attention(**operands, max_length=max_length, **options, backend=backend)
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(out, operands), gradients(expected, operands), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tile", [(16, 32), (64, 16)])
def test_on_triton_tiles_of_every_shape(triton_device, tile, monkeypatch):
    """Blocks of queries and of keys need not be equal: diagonals then reach over several multiples of a block."""
    from loka.kernels.attention import triton_launch

    monkeypatch.setattr(triton_launch, "choose", lambda *_: triton_launch.Tile(*tile))
    assert_same_gradients(make([0, 65, 16], heads=1, dtype=torch.float32, device=triton_device), max_length=70)


@pytest.mark.parametrize("heads", [1, 2])
def test_on_triton_backward_in_little_memory(triton_device, heads, monkeypatch):
    """Many long rows: gradients of scores are kept for some of the heads at a time, and for one at least."""
    from loka.kernels.attention import triton_launch

    operands = make([17, 3, 0], heads=3, dtype=torch.float32, device=triton_device)
    kept = heads * 20 * triton_launch.MOST_QUERIES * 4 if heads > 1 else 1
    monkeypatch.setattr(triton_launch, "KEPT_BYTES", kept)
    seen = []
    run = triton_launch.run_backward_kv
    monkeypatch.setattr(triton_launch, "run_backward_kv", lambda part, *rest: seen.append(part.q.shape[1]) or run(part, *rest))  # fmt: skip
    assert_same_gradients(operands, max_length=20)
    assert seen == ([1, 1, 1] if heads == 1 else [2, 1])


@pytest.mark.parametrize("places", [1, 3])
def test_on_triton_bias_gradients_in_little_memory(triton_device, places, monkeypatch):
    """Thousands of long rows: programs share the numbers they add to."""
    from loka.kernels.attention import triton_launch

    operands = make([33, 7, 0, 40], dtype=torch.float32, device=triton_device)
    monkeypatch.setattr(triton_launch, "PARTIAL_BYTES", 4 * 2 * 48 * places)
    assert_same_gradients(operands, max_length=40)


@pytest.mark.parametrize(
    "strided",
    [lambda b: b.t().contiguous().t(), lambda b: b.repeat_interleave(2, 1)[:, ::2], lambda b: b[:, :1].expand(-1, 10)],
)
def test_on_triton_biases_with_strides(triton_device, strided):
    operands = make([7, 18], dtype=torch.float32, device=triton_device)
    operands |= {name: strided(operands[name]) for name in ("position_bias", "time_bias")}
    results = [silu_attention(**operands, max_length=18, backend=backend) for backend in ("triton", "reference")]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_on_triton_small_gradients_in_fp16(triton_device):
    """The range of fp16 ends where gradients of scores begin, and sums of them are in it."""
    operands = make([33, 7], dtype=torch.float16, device=triton_device)
    grads = []
    for backend in ("triton", "reference"):
        out = silu_attention(**operands, max_length=33, backend=backend)
        grads.append(torch.autograd.grad(out.float().sum() * 1e-5, operands["position_bias"])[0])
    assert_near(grads[0], grads[1], 2e-2)


def test_on_triton_nothing_is_read_that_was_not_written(triton_device, monkeypatch):
    """Gradients of scores that lie before a key, and beyond a row, are left as they were in memory."""
    from loka.kernels.attention import triton_launch

    run, empty = triton_launch.run_backward_kv, torch.Tensor.new_empty

    def poisoned(*given):
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "new_empty", lambda self, *shape, **kind: empty(self, *shape, **kind).fill_(math.nan if self.is_floating_point() else 0))  # fmt: skip
            return run(*given)

    monkeypatch.setattr(triton_launch, "run_backward_kv", poisoned)
    assert_same_gradients(make([33, 7, 0], heads=1, dtype=torch.float32, device=triton_device), max_length=70)


@pytest.mark.gpu
def test_on_triton_the_same_bits_from_run_to_run(triton_device):
    """Every program adds to numbers of its own: no gradient depends on which program came first."""
    operands = make([40, 333, 64, 5] * 40, heads=4, d_qk=64, d_v=64, dtype=torch.bfloat16, device=triton_device)
    runs = [gradients(silu_attention(**operands, max_length=333, backend="triton"), operands) for _ in range(3)]
    assert all(torch.equal(run[name], runs[0][name]) for run in runs for name in run)


def test_on_triton_flops_are_counted(triton_device):
    load()  # a counter takes the formulas that there are when it begins
    operands = make([5, 0, 18], dtype=torch.float32, device=triton_device)
    with FlopCounterMode(display=False) as counter:
        gradients(silu_attention(**operands, max_length=20, backend="triton"), operands)
    pairs = (5 * 6 + 18 * 19) // 2 * 2
    assert counter.get_total_flops() == 2 * pairs * (8 + 12) + 2 * pairs * (3 * 8 + 2 * 12)


def test_on_triton_no_positions_at_all(triton_device):
    operands = make([0, 0], dtype=torch.float32, device=triton_device)
    out = silu_attention(**operands, max_length=4, backend="triton")
    assert out.shape == (0, 2, 12)
    assert all(g.eq(0).all() for g in gradients(out, operands).values())


def test_on_triton_nothing_is_read_beyond_a_row(triton_device):
    """NaN in a neighbouring row must not leak: a mask that multiplies instead of selecting would."""
    operands = make([5, 4, 6], dtype=torch.float32, device=triton_device)
    with torch.no_grad():
        for name in "qkv":
            operands[name][5:9] = float("nan")
    out = silu_attention(**operands, max_length=6, backend="triton")
    assert out[:5].isfinite().all()
    assert out[9:].isfinite().all()
    assert out[5:9].isnan().all()


def test_on_triton_compiles_to_one_graph(triton_device):
    operands = make([5, 18], dtype=torch.float32, device=triton_device)
    compiled = torch.compile(silu_attention, fullgraph=True, dynamic=False, backend="aot_eager")
    out = compiled(**operands, max_length=20, backend="triton")
    expected = silu_attention(**operands, max_length=20, backend="triton")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out, operands), gradients(expected, operands), rtol=1e-5, atol=1e-5)


TYPES = {"offsets_ptr": "*i64", "asked_ptr": "*i64", "times_ptr": "*i64", "position_ptr": "*fp32", "time_ptr": "*fp32"}
TYPES |= {"alpha": "fp32", "divisor": "fp32"}
STRIDES = {"q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "g_row", "g_head", "width", "of_head"}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "backward_q", "backward_kv", "backward_biases"])
@pytest.mark.parametrize(("dtype", "width"), [("*bf16", 128), ("*bf16", 256), ("*fp32", 256)])
def test_compiles_for_hopper_as_it_is_launched(kernel, dtype, width):
    """Every tile of the launch table, at its widest, fits into shared memory and multiplies 16-bit operands on tensor cores."""
    pytest.importorskip("triton", exc_type=ImportError)
    from kernels.hopper import SHARED_MEMORY, compile_kernel, needs_ptxas
    from loka.kernels.attention import triton_launch as launch

    if any(mark.args[0] for mark in needs_ptxas):
        pytest.skip("Triton cannot compile for sm_90 here")
    q = torch.empty(1, 1, width, dtype=torch.float32 if dtype == "*fp32" else torch.bfloat16)
    for tile in dict.fromkeys(launch.choose(kernel, q, q, length) for length in (launch.LONG, launch.LONG + 1)):
        constants = launch.Problem(q, q, q, q, q, q, torch.empty(1, 320), torch.empty(1, 64), 320, 0.0, 1.0).options(
            tile
        )
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg")}
        constants |= {"APART": tile.queries}
        constants = {
            name: value for name, value in constants.items() if name in getattr(launch, f"_{kernel}").arg_names
        }
        pointers = {f"{name}_ptr": dtype for name in ("q", "k", "v", "grad", "out", "dq", "dk", "dv", "ds")} | TYPES
        names = set(getattr(launch, f"_{kernel}").arg_names)
        types = {name: kind for name, kind in pointers.items() if name in names}
        compiled = compile_kernel("attention", f"_{kernel}", (types, constants, options), STRIDES)
        assert compiled.metadata.shared <= SHARED_MEMORY
        assert ("wgmma" in compiled.asm["ptx"]) == (dtype == "*bf16" and not kernel.endswith("biases"))
