"""Where operands may lie before a kernel sees them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from loka.kernels.plans import planned
from loka.kernels.strides import Maker, aligned_rows, empty_rows, maker, rows_maker
from loka.measure.conformance import poisoned_allocations


@pytest.mark.parametrize(
    ("x", "kept"),
    [
        (torch.empty(8, 64, dtype=torch.uint8, device="meta"), True),
        (torch.empty(8, 96, dtype=torch.uint8, device="meta")[:, 16:80], True),
        (torch.empty(8, 65, dtype=torch.uint8, device="meta")[:, :64], False),  # rows 65 bytes apart
        (torch.empty(8, 96, dtype=torch.uint8, device="meta")[:, 3:67], False),
        (torch.empty(8, 12, dtype=torch.bfloat16, device="meta"), False),
        (torch.empty(1, 12, dtype=torch.bfloat16, device="meta"), True),  # one row has no next one
        (torch.empty(64, 8, dtype=torch.uint8, device="meta").t(), True),  # by columns: a kernel turns it itself
    ],
)
def test_rows_on_a_device_begin_at_sixteen_bytes(x: torch.Tensor, kept: bool) -> None:
    found = aligned_rows(x)
    assert (found is x) == kept
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    if not kept:
        assert found.storage_offset() == 0
        assert found.stride(0) * found.element_size() % 16 == 0


def test_compiled_code_is_one_graph() -> None:
    run = torch.compile(lambda x: aligned_rows(x) + 1, fullgraph=True, backend="eager")
    assert run(torch.empty(8, 64, device="meta")).stride() == (64, 1)


def test_on_a_cpu_nothing_is_copied() -> None:
    x = torch.zeros(8, 65)[:, 1:]
    assert aligned_rows(x) is x


def test_rows_of_a_size_that_is_not_known_yet_ask_nothing() -> None:
    """What a compiled function sees of rows whose number depends on data; a question would fail, or compile once for every answer."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        columns = shapes.create_unbacked_symint()
        torch._check(columns >= 0)
        made = empty_rows(4, columns, 16, torch.bfloat16, torch.device("cpu"))  # type: ignore[arg-type]
        assert made.shape[0] == 4
    assert not shapes.guards


@pytest.mark.parametrize("columns", [32, 33])
def test_empty_rows_start_at_multiples(columns: int) -> None:
    made = empty_rows(4, columns, 16, torch.bfloat16, torch.device("cpu"))
    assert made.shape == (4, columns)
    assert made.stride() == (-(-columns // 16) * 16, 1)


@pytest.mark.parametrize("size", [(), (7,), (3, 5), (2, 3, 5), (0, 4), (4, 0), torch.Size((3, 5))])
def test_a_maker_makes_what_torch_makes(size: tuple[int, ...]) -> None:
    make = maker(size, torch.bfloat16, torch.device("cpu"))
    expected, made = torch.empty(size, dtype=torch.bfloat16), make()
    assert (made.shape, made.stride(), made.dtype, made.device) == (expected.shape, expected.stride(), expected.dtype, expected.device)  # fmt: skip
    assert made is not make()
    with torch.inference_mode():
        assert make().is_inference()


@pytest.mark.parametrize("columns", [16, 17, 32, 5])
def test_a_maker_of_rows_leaves_room_for_the_padding_of_all(columns: int) -> None:
    """Of the last row too: kernels write it."""
    made = rows_maker(3, columns, 16, torch.float8_e4m3fn, torch.device("cpu"))()
    expected = empty_rows(3, columns, 16, torch.float8_e4m3fn, torch.device("cpu"))
    assert (made.shape, made.stride()) == (expected.shape, expected.stride())
    assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes() == 3 * -(-columns // 16) * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_what_a_plan_allocates_is_poisoned_where_all_is(dtype: torch.dtype) -> None:
    """A plan from before too: otherwise no check would see what a kernel leaves unwritten."""

    @planned
    def plan(columns: int) -> Maker:
        return rows_maker(64, columns, 16, dtype, torch.device("cpu"))

    for columns in (64, 60):
        plan(columns)().zero_()
        with poisoned_allocations():
            assert plan(columns)().float().isnan().all()
    fast = maker((64, 64), dtype, torch.device("cpu"))
    assert plan(64).func is fast.func  # type: ignore[attr-defined]
