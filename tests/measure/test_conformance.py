"""The gate lets a correct kernel pass and stops the bugs real libraries have had. CPU, emulated tensor cores."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

from loka.formats import QTensor, Spec, quantize
from loka.kernels.scaled_mm import reference
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure.adapter import parse_variant
from loka.measure.conformance import (
    Conformance,
    check_quantized,
    check_scaled_mm,
    judge,
    law,
    poisoned_allocations,
    tolerance,
)
from loka.measure.inputs import DISTRIBUTIONS, matmul_operands

from .hopper import Hopper

VARIANTS = (
    "e4m3:tensor@e4m3:tensor|fast", "e4m3:tensor@e4m3:tensor", "e4m3:row@e4m3:row|fast", "e4m3:1x128@e4m3:128x128",
    "e4m3:1x128@e4m3:1x128", "e5m2:row@e4m3:row|fast", "e4m3:row@e4m3:row|fast|float32", "e4m3:row@e4m3:row|float16",
)  # fmt: skip


def _check(backend, variant: str, shape=(24, 1024, 24), *, distribution="normal", seed=0) -> Conformance:
    call = parse_variant(variant, shape)
    return check_scaled_mm(backend, call, *matmul_operands(call, seed=seed, distribution=distribution))


def _planted(change) -> Hopper:
    """A kernel that is right but for what it does to the scales."""
    return Hopper(lambda a, b: change(a, b) or (a, b))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_hopper_arithmetic_passes(variant: str, distribution: str) -> None:
    verdict = _check(Hopper(), variant, (16, 640, 16), distribution=distribution)
    assert verdict, verdict.reason


@pytest.mark.parametrize("k", [27, 479, 2048, 8192])
@pytest.mark.parametrize("variant", VARIANTS[:4])
def test_hopper_arithmetic_passes_at_every_depth(variant: str, k: int) -> None:
    verdict = _check(Hopper(), variant, (9, k, 10), distribution="outlier_channels")
    assert verdict, verdict.reason


@pytest.mark.parametrize("shape", [(1, 13, 27), (7, 479, 27), (64, 2048, 64), (33, 128, 1)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_passes(variant: str, shape: tuple[int, int, int]) -> None:
    for distribution in DISTRIBUTIONS:
        verdict = _check(reference, variant, shape, distribution=distribution)
        assert verdict, verdict.reason


@pytest.mark.parametrize("k", [256, 1024, 4096, 8192])
def test_a_scale_dropped_on_the_last_block_is_caught(k: int) -> None:
    def dropped(a: torch.Tensor, b: torch.Tensor) -> None:
        a[:, -1] = 1.0

    assert not _check(_planted(dropped), "e4m3:1x128@e4m3:128x128", (16, k, 32))


@pytest.mark.parametrize("k", [256, 1024, 4096, 8192])
def test_the_previous_blocks_scale_on_the_last_block_is_caught(k: int) -> None:
    def previous(a: torch.Tensor, b: torch.Tensor) -> None:
        a[:, -1] = a[:, -2]

    assert not _check(_planted(previous), "e4m3:1x128@e4m3:128x128", (16, k, 32))


@pytest.mark.parametrize(
    ("variant", "where"),
    [
        ("e4m3:tensor@e4m3:tensor|fast", ()),
        ("e4m3:row@e4m3:row|fast", (5, 0)),  # one row of many
        ("e4m3:1x128@e4m3:128x128", (5, 3)),  # one block of one row
        ("e4m3:1x128@e4m3:1x128", (0, -1)),
    ],
)
@pytest.mark.parametrize("k", [1024, 8192])
def test_a_scale_stale_by_ten_percent_is_caught(variant: str, where: tuple[int, ...], k: int) -> None:
    def stale(a: torch.Tensor, b: torch.Tensor) -> None:
        a[where] *= 1.1

    assert not _check(_planted(stale), variant, (16, k, 64))


def test_a_stale_block_of_the_weight_is_caught() -> None:
    def stale(a: torch.Tensor, b: torch.Tensor) -> None:
        b[1, 2] *= 0.9

    assert not _check(_planted(stale), "e4m3:1x128@e4m3:128x128", (16, 1024, 256))


@pytest.mark.parametrize("distribution", ["normal", "lognormal_rows"])
def test_row_scales_applied_per_tensor_are_caught(distribution: str) -> None:
    def averaged(a: torch.Tensor, b: torch.Tensor) -> None:
        a[:] = a.mean()

    assert not _check(_planted(averaged), "e4m3:row@e4m3:row|fast", distribution=distribution)


def test_one_row_with_its_neighbours_scale_is_caught() -> None:
    def shifted(a: torch.Tensor, b: torch.Tensor) -> None:
        a[7] = a[6]

    assert not _check(_planted(shifted), "e4m3:row@e4m3:row|fast", distribution="lognormal_rows")


def test_transposed_layouts_are_caught() -> None:
    transposed = SimpleNamespace(run=lambda a, b, **options: reference.run(a, b, **options).T.contiguous())
    assert not _check(transposed, "e4m3:tensor@e4m3:tensor")

    def grid(a: torch.Tensor, b: torch.Tensor) -> None:
        b[:] = b.T.clone()

    assert not _check(_planted(grid), "e4m3:1x128@e4m3:128x128", (16, 256, 256))

    def wrong_order(a: torch.Tensor, b: torch.Tensor) -> None:
        a[:] = a.T.reshape(a.shape).clone()  # read as if the other dimension were contiguous

    assert not _check(_planted(wrong_order), "e4m3:1x128@e4m3:128x128", (16, 1024, 32))


def test_unpadded_square_scales_are_caught() -> None:
    """The bug of torch._scaled_mm where K / 128 is not a multiple of 4: rows of scales read with a padded stride."""

    def misread(a: torch.Tensor, b: torch.Tensor) -> None:
        rows, cols = b.shape
        flat = torch.cat([b.flatten(), torch.ones(rows * 4)])
        b[:] = torch.stack([flat[row * 8 : row * 8 + cols] for row in range(rows)])

    assert _check(Hopper(), "e4m3:1x128@e4m3:128x128", (16, 640, 384))
    assert not _check(_planted(misread), "e4m3:1x128@e4m3:128x128", (16, 640, 384))


def test_an_unwritten_row_is_caught_by_poison() -> None:
    def forgets_the_tail(a: QTensor, b: QTensor, **options: object) -> torch.Tensor:
        right = reference.run(a, b, **options)
        out = torch.empty_like(right)
        if out[-1].isnan().all():  # fresh memory is poisoned: the kernel leaves its last row as it found it
            out[:-1] = right[:-1]
            return out
        return right  # and in lucky memory, where an earlier run left the right values, it looks correct

    verdict = _check(SimpleNamespace(run=forgets_the_tail), "e4m3:row@e4m3:row")
    assert not verdict
    assert "poisoned" in verdict.reason
    assert "NaN" in verdict.reason


def test_poison_fills_and_restores() -> None:
    with poisoned_allocations():
        assert torch.empty(1000).isnan().all()
        assert torch.empty(1000, dtype=torch.bfloat16).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_poison_of_two_threads_ends_with_the_last_of_them() -> None:
    """Blocks that overlap, as those of threads do, end in the order in which they began."""
    before = torch.get_deterministic_debug_mode(), list(warnings.filters)
    first, second = poisoned_allocations(), poisoned_allocations()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert bool(torch.empty(64).isnan().all())
    second.__exit__(None, None, None)
    assert (torch.get_deterministic_debug_mode(), list(warnings.filters)) == before


def test_one_garbage_element_is_caught() -> None:
    def garbage(a: QTensor, b: QTensor, **options: object) -> torch.Tensor:
        out = reference.run(a, b, **options)
        out[3, 5] = 0.9 * out[3, 5] + 0.3 * out.std()
        return out

    verdict = _check(SimpleNamespace(run=garbage), "e4m3:row@e4m3:row|fast", (256, 1024, 256))
    assert not verdict
    assert "element [3, 5]" in verdict.reason


@pytest.mark.parametrize("swallow", [True, False])
def test_nan_must_be_where_the_law_has_it(swallow: bool) -> None:
    def run(a: QTensor, b: QTensor, **options: object) -> torch.Tensor:
        out = reference.run(a, b, **options)
        return out.nan_to_num() if swallow else torch.where(out.isnan().any(), torch.nan, out).to(out.dtype)

    verdict = _check(SimpleNamespace(run=run), "e4m3:row@e4m3:row", distribution="nan_row")
    assert not verdict
    assert "NaN" in verdict.reason


def test_zero_rows_forgive_nothing() -> None:
    def run(a: QTensor, b: QTensor, **options: object) -> torch.Tensor:
        return reference.run(a, b, **options) + 1e-6

    assert not _check(SimpleNamespace(run=run), "e4m3:row@e4m3:row|float32", distribution="zero_rows")


def test_overflow_must_be_infinite() -> None:
    call = parse_variant("e4m3:tensor@e4m3:tensor|float16", (4, 64, 4))
    a, b = (QTensor(q.data, q.scale * 400, q.spec) for q in matmul_operands(call))
    assert check_scaled_mm(reference, call, a, b)
    saturating = SimpleNamespace(
        run=lambda *operands, **options: reference.run(*operands, **options).clamp(-65504, 65504)
    )
    verdict = check_scaled_mm(saturating, call, a, b)
    assert not verdict
    assert "overflow" in verdict.reason


@pytest.mark.parametrize("wrong", ["shape", "dtype"])
def test_a_wrong_shape_or_type_is_red(wrong: str) -> None:
    call = parse_variant("e4m3:row@e4m3:row", (4, 64, 6))
    a, b = matmul_operands(call)
    out = reference.run(a, b, out_dtype=torch.bfloat16)
    out = out[:3] if wrong == "shape" else out.float()
    assert not judge(out, law(a, b), tolerance(call), torch.bfloat16)


def test_empty_results_pass() -> None:
    assert _check(reference, "e4m3:row@e4m3:row", (0, 64, 16))
    assert _check(reference, "e4m3:row@e4m3:row", (4, 64, 0))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", [128, 2048])
def test_tolerances_are_tight(variant: str, k: int) -> None:
    """Three tolerances more on every element and the gate is red: there is no slack to hide a defect in."""
    call = parse_variant(variant, (32, k, 32))
    a, b = matmul_operands(call)
    expected = law(a, b)
    noise = torch.randn(expected.y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = (expected.y + 3 * tolerance(call) * expected.terms * noise).to(call.out_dtype)
    assert not judge(out, expected, tolerance(call), call.out_dtype)


def test_tolerance_grows_with_fast_accumulation_only() -> None:
    def at(text: str, k: int) -> float:
        return tolerance(parse_variant(text, (8, k, 8)))

    assert at("e4m3:row@e4m3:row|fast", 8192) > at("e4m3:row@e4m3:row|fast", 1024) > at("e4m3:row@e4m3:row", 1024)
    assert at("e4m3:row@e4m3:row", 8192) == pytest.approx(at("e4m3:row@e4m3:row", 1024), rel=1e-3)
    assert at("e4m3:1x128@e4m3:128x128|fast", 8192) == at("e4m3:1x128@e4m3:128x128", 8192)
    assert at("e4m3:row@e4m3:row|float32", 1024) < at("e4m3:row@e4m3:row|float16", 1024) < at("e4m3:row@e4m3:row", 1024)
    assert all(at(v, 8192) < 0.01 for v in VARIANTS)  # a scale stale by 10 % can never fit in
    assert tolerance(MatmulCall(8, 512, 8, Spec.parse("int8:row"), Spec.parse("int8:row"), torch.float32)) < 1e-5


def test_a_red_verdict_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="reason"):
        Conformance(False, math.inf, 0.1)


def test_quantisers_are_judged_bit_by_bit() -> None:
    x = torch.randn(16, 256)
    spec = Spec.parse("e4m3:1x128")
    right = quantize(x, spec)
    assert check_quantized(quantize(x, spec), right)
    data = right.data.clone()
    data.view(torch.uint8)[2, 3] ^= 1
    nudged = QTensor(data, right.scale, spec)
    verdict = check_quantized(nudged, right)
    assert not verdict
    assert "[2, 3]" in verdict.reason
    assert verdict.error == 1 / x.numel()
    data.view(torch.uint8)[2, 3] ^= 4  # now more than one code away
    assert math.isinf(check_quantized(QTensor(data, right.scale, spec), right).error)
    assert not check_quantized(QTensor(right.data, right.scale * 1.1, spec), right)
    assert not check_quantized(quantize(x, Spec.parse("e4m3:row")), right)
    x[0, 0] = torch.nan
    assert check_quantized(quantize(x, spec), quantize(x, spec))
