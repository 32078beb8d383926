"""Quantise and dequantise against an independent implementation: blocks cut by hand, scales in exact arithmetic, codes from the tables."""

import copy
import io
import math
import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from loka.formats import (
    COL,
    ROW,
    SMALLEST_SCALE,
    TENSOR,
    WHOLE,
    Block,
    QTensor,
    Spec,
    block_amax,
    dequantize,
    expand_scale,
    fake_quantize,
    quantize,
    scale_from_amax,
    scale_shape,
)

from .tables import TABLES, power_of_two_at_least

FLOAT32_MAX = torch.finfo(torch.float32).max
DYNAMIC = [
    *[f"{f}:{b}" for f in TABLES for b in ("tensor", "row", "col", "1x128", "128x128", "3x5", "*x7")],
    *[f"{f}:{b}:{s}" for f in TABLES for b, s in (("row", "pow2"), ("128x128", "pow2"), ("1x32", "e8m0"))],
    "e2m1:1x16:e4m3",
    "int4:2x16:e4m3",
    "e4m3:row:e4m3",
]
SHAPES = [(), (1,), (13,), (0,), (0, 5), (5, 0), (1, 1), (3, 37), (130, 261), (2, 3, 37), (2, 0, 5), (2, 1, 3, 9)]
by_spec = pytest.mark.parametrize("spec", [Spec.parse(s) for s in DYNAMIC], ids=str)


def wild(shape: tuple[int, ...]) -> torch.Tensor:
    """Rows and columns of very different magnitude, with zeros: range inside every block."""
    x = torch.randn(shape) * torch.exp(3 * torch.randn(shape))
    return torch.where(torch.rand(shape) < 0.1, 0.0, x)


class ByHand:
    """The law of the module's docstring in numpy, one block at a time. Finite inputs."""

    def __init__(self, x: torch.Tensor, spec: Spec) -> None:
        self.table, self.spec = TABLES[spec.format.name], spec
        self.x = x.float().numpy()
        self.matrices = self.x.reshape(-1, *(1, 1, *self.x.shape)[-2:]) if x.numel() else None
        total = np.float32(np.abs(self.x).max(initial=0))
        if spec.block == TENSOR and self.matrices is not None:
            self.matrices = self.x.reshape(1, 1, -1)
        self.outer = np.float32(1)
        if spec.scale == "e4m3" and total > 0:
            self.outer = max(total / np.float32(self.table.max * 448), np.float32(2.0**-117))

    def scale(self, block: np.ndarray) -> np.float32:
        amax = np.abs(block).max()
        if amax == 0:
            return np.float32(1)
        if self.spec.scale in ("pow2", "e8m0"):
            return np.float32(2.0 ** power_of_two_at_least(float(amax), self.table.max))
        if self.spec.scale == "e4m3":
            inner = TABLES["e4m3"].nearest(np.array(amax / np.float32(self.table.max) / self.outer))
            return np.float32(max(TABLES["e4m3"].decode(inner), 2.0**-9))
        return max(amax / np.float32(self.table.max), np.float32(2.0**-126))

    def run(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes, scales (in order of blocks) and values."""
        codes, values = np.zeros(self.matrices.shape, np.int64), np.zeros(self.matrices.shape, np.float32)
        scales = []
        high, wide = self.matrices.shape[1:]
        rows = high if self.spec.block.rows == WHOLE else self.spec.block.rows
        cols = wide if self.spec.block.cols == WHOLE else self.spec.block.cols
        for index in range(len(self.matrices)):
            for i in range(0, high, rows):
                for j in range(0, wide, cols):
                    cut = (index, slice(i, i + rows), slice(j, j + cols))
                    scale = self.scale(self.matrices[cut])
                    whole = scale * self.outer
                    codes[cut] = self.table.nearest(self.matrices[cut] * (np.float32(1) / whole))
                    values[cut] = self.table.decode(codes[cut]).astype(np.float32) * whole
                    scales.append(scale)
        return codes.reshape(self.x.shape), np.array(scales, np.float32), values.reshape(self.x.shape)


@by_spec
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_law_by_hand(spec: Spec, shape: tuple[int, ...]) -> None:
    x = wild(shape)
    q = quantize(x, spec)
    assert q.shape == x.shape
    assert q.spec == spec
    assert q.scale.shape == scale_shape(shape, spec.block)
    if x.numel() == 0:
        assert (q.scale == 1).all()
        assert q.dequantize().shape == x.shape
        return
    codes, scales, values = ByHand(x, spec).run()
    stored = q.data.view(torch.uint8) if spec.format.has_nan else q.data
    assert np.array_equal(q.scale.numpy().reshape(-1), scales)
    assert np.array_equal(stored.numpy().astype(np.int64), codes)
    assert np.array_equal(q.dequantize().numpy(), values)


@pytest.mark.parametrize(
    "spec", [Spec.parse(s) for s in ("e4m3:tensor", "int8:row", "e2m1:1x16:e4m3", "e5m2:row:pow2")], ids=str
)
def test_the_comparison_notices_one_changed_element(spec: Spec) -> None:
    x = wild((130, 261))
    codes, _, _ = ByHand(x, spec).run()
    x[1, 1] = -2 * x.abs().max() if x[1, 1] >= 0 else 2 * x.abs().max()
    stored = quantize(x, spec).data
    stored = stored.view(torch.uint8) if spec.format.has_nan else stored
    assert not np.array_equal(stored.numpy().astype(np.int64), codes)


@pytest.mark.parametrize("format", TABLES)
def test_power_of_two_scales_round_up_exactly(format: str) -> None:
    largest = TABLES[format].max
    exact = torch.tensor([largest * 2.0**k for k in range(-140, 120)], dtype=torch.float64).float()
    exact = exact[exact.isfinite() & (exact > 0)]
    infinity = torch.full_like(exact, math.inf)
    amax = torch.cat([exact, exact.nextafter(infinity), exact.nextafter(-infinity), torch.rand(500) * 10])
    amax = torch.cat([amax, torch.tensor([2.0**-149, 2.0**-126, FLOAT32_MAX])])
    for kind in ("pow2", "e8m0"):
        scale = scale_from_amax(amax, Spec.parse(f"{format}:row:{kind}"))
        expected = [power_of_two_at_least(float(a), largest) for a in amax]
        assert torch.equal(scale, torch.tensor([2.0**k for k in expected]))
        assert (amax.double() <= largest * scale.double()).all()  # so the largest element never saturates


def test_scale_of_a_zero_and_of_a_non_finite_maximum() -> None:
    amax = torch.tensor([0.0, 448.0, math.nan, math.inf])
    for text in ("e4m3:row", "e4m3:row:pow2"):
        scale = scale_from_amax(amax, Spec.parse(text))
        assert scale[:2].tolist() == [1.0, 1.0]
        assert scale[2:].isnan().all()
    with pytest.raises(ValueError, match=r"e2m1:1x16:e4m3 has two levels of scales; hint: quantize makes both"):
        scale_from_amax(amax, Spec.parse("e2m1:1x16:e4m3"))


def test_nvfp4_pair() -> None:
    x = wild((16, 48))
    q = quantize(x, Spec.parse("e2m1:1x16:e4m3"))
    assert q.tensor_scale is not None
    assert q.tensor_scale.item() == pytest.approx(x.abs().max().item() / 2688, rel=1e-7)
    assert torch.equal(q.scale.to(torch.float8_e4m3fn).float(), q.scale)  # E4M3 values
    assert q.scale.max() == 448  # the block with the largest element uses the whole range
    assert q.nbytes == 16 * 48 + 16 * 3 * 4 + 4


def test_nvfp4_tiny_blocks_keep_one_scale_for_both_ways() -> None:
    """Scales whose product would be subnormal: quantised with one value and dequantised with another, they would not cancel."""
    x = torch.zeros(2, 16)
    x[0], x[1] = 1e-36, 3e-39
    q = quantize(x, Spec.parse("e2m1:1x16:e4m3"))
    assert (q.scale * q.tensor_scale).min() >= SMALLEST_SCALE
    assert ((q.dequantize() - x).abs() <= x.abs().clamp(min=6 * SMALLEST_SCALE) / 4).all()


@by_spec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_a_non_finite_element_changes_nothing_else(spec: Spec, bad: float) -> None:
    """It stays visible, no other element moves; where the format cannot hold it, its block is poisoned instead."""
    x = wild((130, 261))
    x[7, 200] = 0
    clean = quantize(x, spec)
    x[7, 200] = bad
    q = quantize(x, spec)
    assert not q.dequantize()[7, 200].isfinite()
    data, clean_data = q.data.view(torch.uint8).clone(), clean.data.view(torch.uint8).clone()
    data[7, 200] = clean_data[7, 200] = 0
    assert torch.equal(data, clean_data)
    if spec.format.has_nan:
        assert torch.equal(q.scale, clean.scale)
        assert q.dequantize()[7, 200].isnan() or (spec.format.has_inf and q.dequantize()[7, 200] == bad)
    else:
        poisoned = q.scale.isnan()
        assert poisoned.sum() == 1
        assert torch.equal(q.scale[~poisoned], clean.scale[~poisoned])
        assert expand_scale(q.scale, q.shape, spec.block).expand(q.shape)[7, 200].isnan()
    if spec.scale == "e4m3":
        assert torch.equal(q.tensor_scale, clean.tensor_scale)


@pytest.mark.parametrize("spec", ["e4m3:row", "e4m3:1x128", "int8:row", "e2m1:1x16:e4m3", "e2m1:1x32:e8m0"])
def test_a_nan_row_leaves_the_other_rows_alone(spec: str) -> None:
    x = wild((5, 300))
    before = fake_quantize(x, Spec.parse(spec))
    x[2] = torch.where(torch.arange(300) % 2 == 0, math.nan, 0.0)  # no finite magnitude left in this row
    after = fake_quantize(x, Spec.parse(spec))
    others = [0, 1, 3, 4]
    if spec != "e2m1:1x16:e4m3" or before[2].abs().max() < before[others].abs().max():
        assert torch.equal(after[others], before[others])
    assert after[2, ::2].isnan().all()


@by_spec
def test_all_non_finite_and_all_zero(spec: Spec) -> None:
    zeros = quantize(torch.zeros(4, 40), spec)
    assert (zeros.scale == 1).all()
    assert torch.equal(zeros.dequantize(), torch.zeros(4, 40))
    lost = quantize(torch.full((4, 40), math.nan), spec)
    assert (lost.scale == 1).all() or not spec.format.has_nan
    assert lost.dequantize().isnan().all()


@by_spec
def test_zero_rows_stay_zero_beside_others(spec: Spec) -> None:
    x = wild((6, 40))
    x[3] = 0
    assert (fake_quantize(x, spec)[3] == 0).all()


@by_spec
@pytest.mark.parametrize("magnitude", [2.0**-149, 1e-45, 1e-40, 2.0**-126, 1e-38, 1e-30, 1e30, 1e38, FLOAT32_MAX])
def test_extreme_magnitudes_stay_finite(spec: Spec, magnitude: float) -> None:
    x = magnitude * torch.tensor([[1.0, -1.0, 0.5, 0.0, 0.9999999, 0.3]] * 3)
    q = quantize(x, spec)
    assert q.scale.isfinite().all()
    assert (q.scale > 0).all()
    values = q.dequantize()
    assert values.isfinite().all()
    step = 1 / 3.4 if spec.format.name in ("e2m1", "int4", "e5m2") else 1 / 14  # of the largest element, generously
    assert ((values - x).abs() <= max(magnitude * step, 4 * SMALLEST_SCALE * spec.format.smallest_subnormal)).all()


@pytest.mark.parametrize("text", ["e4m3:row:pow2", "int8:row", "e2m1:1x32:e8m0", "e5m2:row:pow2"])
def test_the_way_back_saturates_in_the_type_asked_for(text: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        top = torch.finfo(dtype).max
        x = torch.tensor([[top, -top, 1.0]], dtype=dtype)
        assert fake_quantize(x, Spec.parse(text)).isfinite().all()
        assert fake_quantize(x, Spec.parse(text)).dtype == dtype
    inf = torch.tensor([[math.inf, -math.inf, 1.0]])
    assert torch.equal(fake_quantize(inf, Spec.parse("e5m2:row:pow2"))[0, :2], inf[0, :2])


def test_float64_beyond_float32_saturates() -> None:
    x = torch.tensor([[1e300, -1e300, 1.0, math.inf, math.nan]], dtype=torch.float64)
    q = quantize(x, Spec.parse("e5m2:row"))
    assert q.dequantize(torch.float64)[0, :2].tolist() == pytest.approx([FLOAT32_MAX, -FLOAT32_MAX], rel=1e-6)
    assert q.dequantize()[0, 3] == math.inf
    assert block_amax(x, TENSOR) == FLOAT32_MAX


@by_spec
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_are_computed_in_float32(spec: Spec, dtype: torch.dtype) -> None:
    x = wild((7, 40)).to(dtype)
    narrow, wide = quantize(x, spec), quantize(x.float(), spec)
    assert torch.equal(narrow.data.view(torch.uint8), wide.data.view(torch.uint8))
    assert torch.equal(narrow.scale, wide.scale)
    assert fake_quantize(x, spec).dtype == dtype


@by_spec
def test_memory_layout_does_not_matter(spec: Spec) -> None:
    x = wild((24, 40))
    expected = fake_quantize(x, spec)
    for view in (x.T.contiguous().T, torch.stack([x, x], -1)[..., 0], x[:1].expand(24, 40)):
        assert torch.equal(fake_quantize(view, spec), fake_quantize(view.contiguous(), spec))
    assert torch.equal(fake_quantize(x.T.contiguous().T, spec), expected)


def test_leading_dimensions_are_independent_but_for_tensor() -> None:
    x = wild((3, 5, 40))
    for text in ("e4m3:row", "int8:1x32", "e4m3:2x8:pow2", "e4m3:col"):
        whole = fake_quantize(x, Spec.parse(text))
        assert torch.equal(whole, torch.stack([fake_quantize(part, Spec.parse(text)) for part in x]))
    flat = fake_quantize(x.reshape(-1), Spec.parse("e4m3:tensor"))
    assert torch.equal(fake_quantize(x, Spec.parse("e4m3:tensor")), flat.reshape(x.shape))


@by_spec
def test_transpose_keeps_elements_and_scales_together(spec: Spec) -> None:
    x = wild((2, 13, 37))
    q = quantize(x, spec)
    t = q.transpose()
    assert t.spec == spec.transposed
    assert torch.equal(t.dequantize(), q.dequantize().transpose(-2, -1))
    assert torch.equal(t.transpose().dequantize(), q.dequantize())
    direct = quantize(x.transpose(-2, -1), spec.transposed)
    assert torch.equal(direct.dequantize(), t.dequantize())


def test_transpose_needs_two_dimensions() -> None:
    with pytest.raises(ValueError, match=r"transpose swaps the last two dimensions, got shape \(5,\)"):
        quantize(torch.ones(5), Spec.parse("e4m3:row")).transpose()


def test_expand_scale_repeats_each_block() -> None:
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = torch.tensor([[1, 1, 1, 2], [1, 1, 1, 2], [3, 3, 3, 4]]).float()
    assert torch.equal(expand_scale(scale, (3, 4), Block(2, 3)).expand(3, 4), expected)
    assert scale_shape((3, 4), Block(2, 3)) == (2, 2)
    assert scale_shape((7, 3, 4), ROW) == (7, 3, 1)
    assert scale_shape((7, 3, 4), COL) == (7, 1, 4)
    assert scale_shape((7, 3, 4), TENSOR) == ()


@pytest.mark.parametrize(
    "spec", [Spec.parse(s) for s in ("e4m3:tensor:static", "int8:row:delayed", "e5m2:2x4:static:pow2")], ids=str
)
def test_a_given_scale_is_used_as_it_is(spec: Spec) -> None:
    x = torch.randn(5, 9)
    scale = torch.full(scale_shape(x.shape, spec.block), 0.25)
    q = quantize(x, spec, scale=scale.requires_grad_())
    assert torch.equal(q.scale, scale)
    codes = TABLES[spec.format.name].nearest(x.numpy() * np.float32(4))
    stored = q.data.view(torch.uint8) if spec.format.has_nan else q.data
    assert np.array_equal(stored.numpy().astype(np.int64), codes)


@pytest.mark.parametrize(
    ("text", "scale", "message"),
    [
        (
            "e4m3:row",
            torch.ones(2, 1),
            r"e4m3:row computes its scale from x; hint: a given scale needs e4m3:row:static",
        ),
        ("e4m3:row:static", None, r"e4m3:row:static needs a scale: its scales do not come from x"),
        ("e4m3:row:delayed", None, r"e4m3:row:delayed needs a scale"),
        ("e4m3:row:static", torch.ones(2), r"of shape \(2, 3\) needs scales of \(2, 1\), got \(2,\)"),
        ("e4m3:row:static", torch.ones(1, 1), r"needs scales of \(2, 1\), got \(1, 1\)"),
        ("e4m3:tensor:static", torch.ones(1), r"needs scales of \(\), got \(1,\)"),
        ("e4m3:tensor:static", torch.tensor(0.0), r"must be finite and at least 2\^-126"),
        ("e4m3:tensor:static", torch.tensor(-1.0), r"must be finite and at least 2\^-126"),
        ("e4m3:tensor:static", torch.tensor(math.nan), r"must be finite and at least 2\^-126"),
        ("e4m3:tensor:static", torch.tensor(math.inf), r"must be finite and at least 2\^-126"),
        ("e4m3:tensor:static:pow2", torch.tensor(0.3), r"must be powers of two"),
        ("e4m3:tensor:static:e8m0", torch.tensor(3.0), r"must be powers of two"),
    ],
)
def test_scales_that_cannot_be_meant_are_refused(text: str, scale: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(2, 3), Spec.parse(text), scale=scale)


@pytest.mark.parametrize("format", TABLES)
def test_a_small_given_scale_saturates_even_beyond_float32(format: str) -> None:
    """x / scale is infinite in float32; x was not."""
    spec = Spec.parse(f"{format}:tensor:static")
    x = torch.tensor([3e38, -3e38, 1e5, 0.0, -0.0])
    q = quantize(x, spec, scale=torch.tensor(SMALLEST_SCALE))
    assert torch.equal(q.dequantize(), torch.tensor([1.0, -1.0, 1.0, 0.0, 0.0]) * (spec.format.max * SMALLEST_SCALE))
    special = quantize(torch.tensor([math.inf, math.nan]), Spec.parse("e5m2:tensor:static"), scale=torch.tensor(0.5))
    assert special.dequantize()[0] == math.inf
    assert special.dequantize()[1].isnan()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.complex64])
def test_only_floating_tensors_are_quantised(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"quantize takes a floating tensor, got {dtype}"):
        quantize(torch.ones(2, 3, dtype=dtype), Spec.parse("e4m3:row"))


def test_stochastic_quantisation_is_unbiased_and_follows_its_generator() -> None:
    spec = Spec.parse("e4m3:row:stochastic")
    x = torch.randn(4, 64)

    def draw(seed: int) -> torch.Tensor:
        return fake_quantize(x, spec, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(0), draw(0))
    scale = quantize(x, spec, generator=torch.Generator()).scale.double().numpy()
    low, high = TABLES["e4m3"].neighbours(x.numpy() / scale)
    quantum = torch.from_numpy((high - low) * scale)
    fraction = torch.from_numpy(x.numpy() / scale - low) / torch.from_numpy(high - low).clamp(min=1e-9)
    count = 400  # five standard deviations of a mean of Bernoulli variables, and a few events where almost none are expected
    bound = quantum * (5 * (fraction * (1 - fraction) / count).clamp(min=0).sqrt() + 5 / count) + 2**-22 * x.abs()
    mean = torch.stack([draw(seed) for seed in range(count)]).double().mean(0)
    assert ((mean - x).abs() <= bound).all()
    nearest = fake_quantize(x, Spec.parse("e4m3:row")).double()
    assert not ((nearest - x).abs() <= bound).all()  # it would notice a bias


def test_nothing_is_differentiable_and_nothing_is_changed() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    before = x.detach().clone()
    q = quantize(x, Spec.parse("e4m3:row"))
    assert not q.dequantize().requires_grad
    assert torch.equal(x, before)


class TestQTensor:
    def test_wrong_storage(self) -> None:
        with pytest.raises(ValueError, match=r"e4m3:row is stored as torch.float8_e4m3fn, got data of torch.int8"):
            QTensor(torch.zeros(2, 3, dtype=torch.int8), torch.ones(2, 1), Spec.parse("e4m3:row"))

    def test_wrong_scale_shape(self) -> None:
        with pytest.raises(ValueError, match=r"int8:1x2 of shape \(2, 3\) needs scales of \(2, 2\), got \(2, 1\)"):
            QTensor(torch.zeros(2, 3, dtype=torch.int8), torch.ones(2, 1), Spec.parse("int8:1x2"))

    def test_wrong_scale_type(self) -> None:
        with pytest.raises(ValueError, match=r"scale must be float32 on cpu, where data is; got torch.float64 on cpu"):
            QTensor(torch.zeros(2, 3, dtype=torch.int8), torch.ones(2, 1, dtype=torch.float64), Spec.parse("int8:row"))

    def test_wrong_device(self) -> None:
        with pytest.raises(ValueError, match=r"scale must be float32 on cpu, where data is; got torch.float32 on meta"):
            QTensor(torch.zeros(2, 3, dtype=torch.int8), torch.ones(2, 1, device="meta"), Spec.parse("int8:row"))

    @pytest.mark.parametrize("text", ["e2m1:1x16:e4m3", "e2m1:1x16"])
    def test_a_tensor_scale_goes_with_two_levels_only(self, text: str) -> None:
        outer = None if text.endswith("e4m3") else torch.tensor(1.0)
        with pytest.raises(ValueError, match="a tensor_scale belongs to e4m3 block scales and to no other"):
            QTensor(torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1), Spec.parse(text), outer)

    def test_a_tensor_scale_is_one_number(self) -> None:
        with pytest.raises(ValueError, match=r"tensor_scale must be a scalar, got shape \(1,\)"):
            QTensor(
                torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1), Spec.parse("e2m1:1x16:e4m3"), torch.ones(1)
            )

    @by_spec
    def test_copies_stand_for_the_same_values(self, spec: Spec) -> None:
        q = quantize(wild((4, 40)), spec)
        file = io.BytesIO()
        torch.save(q, file)
        file.seek(0)
        for copied in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), torch.load(file, weights_only=False)):
            assert torch.equal(copied.dequantize(), q.dequantize())
            assert copied.spec == q.spec

    def test_reports_where_and_how_large(self) -> None:
        q = quantize(torch.randn(4, 40), Spec.parse("e4m3:row"))
        assert q.shape == (4, 40)
        assert q.device == torch.device("cpu")
        assert q.nbytes == 4 * 40 + 4 * 4
        assert torch.equal(dequantize(q, torch.bfloat16), q.dequantize().bfloat16())


@pytest.mark.gpu
@by_spec
def test_the_gpu_computes_the_same_bits(spec: Spec) -> None:
    """Division by a constant and powers of two are where devices differ, and a last bit of a scale moves codes."""
    for shape in [(13,), (0, 5), (5, 0), (130, 261), (2, 3, 37)]:
        x = wild(shape) * torch.exp(20 * torch.randn(shape))
        here, there = quantize(x, spec), quantize(x.cuda(), spec)
        assert torch.equal(there.scale.cpu(), here.scale)
        assert torch.equal(there.data.cpu().view(torch.uint8), here.data.view(torch.uint8))
        assert torch.equal(there.dequantize().cpu(), here.dequantize())


def test_a_compiler_sees_that_two_scales_of_one_tensor_are_one() -> None:
    """What two chains read is then quantised once. A NaN in the graph would be unequal to itself."""
    from torch._functorch.compile_utils import fx_graph_cse
    from torch.fx.experimental.proxy_tensor import make_fx

    spec = Spec.parse("e4m3:tensor")
    traced = make_fx(lambda x: (scale_from_amax(x.amax(), spec) * 2, scale_from_amax(x.amax(), spec) * 3))(
        torch.ones(4)
    )
    left = Counter(str(node.target) for node in fx_graph_cse(traced.graph).nodes if node.op == "call_function")
    assert left.pop("aten.mul.Tensor") == 2
    assert set(left.values()) == {1}
    found = scale_from_amax(torch.tensor([0.0, 448.0, torch.inf, torch.nan]), spec)
    assert torch.equal(found.isnan(), torch.tensor([False, False, True, True]))
    assert found[:2].tolist() == [1.0, 1.0]
