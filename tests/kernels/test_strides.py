"""Where operands may lie before a kernel sees them."""

import pytest
import torch

from loka.kernels.strides import aligned_rows


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
