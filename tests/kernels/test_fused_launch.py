"""How fused GEMMs are launched: the ranking is a function of the call and the device, everything in it fits, and every launch computes the same."""

import random

import pytest
import torch

from kernels.fused_cases import INTERPRETED, STATIC, Case, assert_codes_close, every_backend, operands, run, supported
from kernels.interpreter import run_interpreted
from loka.formats import Spec
from loka.kernels.fused_linear import DgradCall, FusedCall, Launch, Properties, choose_launch, properties_of
from loka.kernels.fused_linear.launch import predicted_time, problems, work_of

H200 = Properties(132, 232448)
SMALL = Properties(24, 101376)  # a GPU with less of both
TENSOR, OUT = Spec.parse("e4m3:tensor"), Spec.parse(STATIC)


def layer(m: int, k: int, n: int, out: Spec | torch.dtype = OUT, norm: bool = False, **more) -> FusedCall:
    return FusedCall(m, k, n, TENSOR, TENSOR, out, 256 if norm else 0, "relu", **more)


def test_the_last_wave_decides() -> None:
    """Shapes where one fixed tile of 128 x 256 left most of the GPU idle: the choice is predicted, and was measured, to be faster."""
    fixed = Launch(128, 256, 128, 8, 4)
    for shape in ((3072, 1280, 1792), (4096, 5120, 1536), (1536, 3584, 4096)):
        for norm in (False, True):
            call = layer(*shape, norm=norm)
            best = choose_launch(call, H200)[0]
            work = work_of(call)
            assert predicted_time(best, work, H200) < 0.96 * predicted_time(fixed, work, H200), (shape, norm, best)
    assert (
        choose_launch(layer(8192, 4096, 4096), H200)[0].bm * choose_launch(layer(8192, 4096, 4096), H200)[0].bn == 32768
    )


def test_few_rows_take_small_tiles_or_cut_k() -> None:
    tile = choose_launch(layer(64, 2048, 4096), H200)[0]
    assert tile.bm == 64
    assert tile.bn < 256
    deep = choose_launch(layer(64, 8192, 512, norm=True), H200)[0]  # two tiles of 64 x 256
    assert deep.split >= 4


@pytest.mark.parametrize("device", [H200, Properties(1, 232448), SMALL], ids=str)
def test_everything_ranked_can_run(device: Properties) -> None:
    draw = random.Random(0)
    grouped = Spec.parse("e4m3:1x128")
    for _ in range(60):
        m, k, n = (2 ** draw.randint(0, 15) + draw.randint(0, 40) for _ in range(3))
        out = draw.choice([OUT, grouped, torch.bfloat16, torch.float32])
        keep, transpose = draw.random() < 0.5, draw.random() < 0.5 and isinstance(out, Spec)
        norm, sources = draw.random() < 0.5, draw.choice([TENSOR, grouped])
        calls = [
            FusedCall(m, k, n, sources, sources, out, 256 if norm else 0, "silu", False, keep, transpose),
            DgradCall(m, k, n, TENSOR, TENSOR, OUT),
        ]
        for call in calls:
            ranked = choose_launch(call, device)
            assert ranked or device is SMALL, f"{call}: nothing fits"
            assert not any(problems(launch, work_of(call), device) for launch in ranked)
            times = [predicted_time(launch, work_of(call), device) for launch in ranked]
            assert times == sorted(times)
            assert ranked == choose_launch(call, device)


def test_a_launch_is_its_numbers() -> None:
    launch = Launch(128, 256, 64, warps=8, stages=3, group=5, resident=2, split=7)
    assert launch.numbers == [128, 256, 64, 8, 3, 5, 2, 7]
    assert Launch(*launch.numbers) == launch


def test_a_launch_is_checked() -> None:
    for wrong, reason in (({"bm": 96}, "bm=96 is not a power of two"), ({"split": 0}, "split=0 is less than 1")):
        with pytest.raises(ValueError, match=reason):
            Launch(**{"bm": 64, "bn": 64, **wrong})
    assert Launch(*Launch(64, 128, split=3).numbers) == Launch(64, 128, split=3)
    assert str(Launch(64, 128, resident=2, split=3)) == "64x128x128 4 warps 4 stages group 8 x2 split 3"


@pytest.mark.parametrize(
    ("launch", "call", "reason"),
    [
        (
            Launch(64, 128),
            layer(64, 512, 512, norm=True),
            "a tile holds whole norm blocks: bn is 256, or at least n=512, not 128",
        ),
        (Launch(64, 64), layer(64, 512, 512, Spec.parse("e4m3:1x128")), "need bn=128 or 256, not 64"),
        (
            Launch(64, 128),
            layer(64, 512, 512, Spec.parse("e4m3:1x128"), transpose=True),
            "scales of the transpose per 128 rows need bm=128, not 64",
        ),
        (Launch(128, 256, 128, 8, 8), layer(64, 512, 512), "bytes of shared memory, there are 232448"),
        (Launch(64, 64, split=9), layer(64, 512, 512), "k=512 has no 9 parts of 128"),
        (Launch(64, 64, split=2), layer(64 * 132, 512, 64), "no tile is left over to split"),
        (
            Launch(64, 64, split=2),
            DgradCall(64, 512, 512, TENSOR, TENSOR, OUT),
            "the second kernel writes no transpose",
        ),
    ],
    ids=str,
)
def test_a_launch_that_cannot_run_a_call_says_why(launch: Launch, call: FusedCall | DgradCall, reason: str) -> None:
    assert any(reason in problem for problem in problems(launch, work_of(call), H200))


LAUNCHES = [
    Launch(64, 64), Launch(128, 256, 128, 8, 3), Launch(64, 128, 64, 4, 3, 2, 2), Launch(64, 256, split=2), Launch(64, 32, split=3),
    Launch(128, 128, 128, 8, 3, 1, 1, 2),
]  # fmt: skip


@every_backend
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_every_launch_computes_the_same(name: str, launch: Launch, norm: bool, device: torch.device) -> None:
    """Whole tiles, and some whose K was cut; ragged in every dimension; everything an epilogue writes."""
    whole = launch.split == 1
    case = Case((140, 400, 300), "e4m3:row", "e4m3:tensor", STATIC, "silu", norm, True, True, whole, True)
    supported(name, case.call(), device)
    if name == "triton" and problems(launch, work_of(case.call()), properties_of(device)):
        pytest.skip("not for this call on this device")
    a, b, bias = operands(case, device)
    amax, law_amax = torch.zeros((), device=device), torch.zeros((), device=device)
    found = run(name, case, a, b, bias, amax, launch=launch)
    law = run("reference", case, a, b, bias, law_amax)
    share = 0.05 if device.type == "cuda" else 0.003
    for field in ("y", "y_t", "z") if whole else ("y", "z"):
        assert_codes_close(getattr(found, field), getattr(law, field), share)
    torch.testing.assert_close(amax, law_amax, rtol=0.02 if device.type == "cuda" else 1e-5, atol=0)


def test_triton_refuses_a_launch_that_does_not_fit(device: torch.device) -> None:
    case = Case((40, 64, 300), "e4m3:row", "e4m3:row", STATIC, "relu")
    supported("triton", case.call(), device)
    with pytest.raises(ValueError, match=r"64x128x128 .* cannot run this call: a tile holds whole norm blocks"):
        run("triton", case, *operands(case, device), launch=Launch(64, 128))


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)
