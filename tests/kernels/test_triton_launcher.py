"""Launching a kernel by what was compiled before: two launches share a compiled kernel only where Triton would share it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", exc_type=ImportError)

from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.triton_launcher import Quick, describe, quick


class Kernel:
    """Stands in for a kernel of Triton: two tensors, a descriptor or none, two numbers, a constant. Counts what it was asked to compile."""

    def __init__(self) -> None:
        self.params = [SimpleNamespace(is_constexpr=constant) for constant in (False,) * 5 + (True,)]
        self.asked, self.ran = 0, []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.asked += 1
            return Compiled(self, self.asked)

        return launch


class Compiled:
    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: Any) -> Any:
        assert len(grid) == 3
        return lambda *args: self.kernel.ran.append((self.number, grid, args))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Kernel, Any]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel = Kernel()
    return kernel, Quick(kernel)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, which do not start at a multiple of 16 bytes."""
    store = torch.empty(x.numel() + 1, dtype=x.dtype)
    return store[1:].view(x.shape).copy_(x)


BASE = {
    "x": torch.zeros(32, 32),
    "y": torch.zeros(8),
    "desc": None,
    "n": 48,
    "scale": 0.5,
    "constant": True,
    "num_warps": 4,
}
OTHER = {
    "type": {"x": torch.zeros(32, 32, dtype=torch.bfloat16)}, "alignment": {"x": shifted(torch.zeros(32, 32))}, "none": {"y": None},
    "descriptor": {"desc": ([16, 32], torch.float32)}, "one": {"n": 1}, "not a multiple": {"n": 47}, "long": {"n": 2**40}, "unsigned": {"n": 2**63}, "an int": {"scale": 16},
    "constant": {"constant": False}, "warps": {"num_warps": 8},
}  # fmt: skip


def launch(kernel: Any, **changes: Any) -> None:
    given = BASE | changes
    desc = None if given["desc"] is None else describe(torch.zeros(32, 32, dtype=given["desc"][1]), given["desc"][0])
    kernel[(3, 2)](
        given["x"], given["y"], desc, given["n"], given["scale"], given["constant"], num_warps=given["num_warps"]
    )


def test_the_second_launch_of_a_kind_asks_triton_nothing(made: tuple[Kernel, Any]) -> None:
    kernel, fast = made
    launch(fast)
    launch(fast, x=torch.ones(4, 4), n=96, scale=0.25)
    assert kernel.asked == 1
    ((number, grid, args),) = kernel.ran
    assert (number, grid) == (1, (3, 2, 1))
    assert torch.equal(args[0], torch.ones(4, 4))
    assert args[3:] == (96, 0.25, True)


@pytest.mark.parametrize("change", list(OTHER))
def test_what_triton_compiles_apart_is_kept_apart(made: tuple[Kernel, Any], change: str) -> None:
    kernel, fast = made
    for changes in ({}, OTHER[change], {}, OTHER[change]):
        launch(fast, **changes)
    assert kernel.asked == 2
    assert [number for number, _, _ in kernel.ran] == [1, 2]


@pytest.mark.parametrize(("fits", "does_not"), [(-(2**31), -(2**31) - 16), (-(2**63), -(2**63) - 16)])
def test_numbers_at_the_end_of_a_type_are_kept_apart(made: tuple[Kernel, Any], fits: int, does_not: int) -> None:
    kernel, fast = made
    launch(fast, n=fits)
    launch(fast, n=does_not)
    assert kernel.asked == 2


def test_an_argument_of_an_unknown_kind_is_triton_s(made: tuple[Kernel, Any]) -> None:
    """Tuples of numbers differ in what they hold: none may run what was compiled for another."""
    kernel, fast = made
    for pair in ((16, 16), (1, 16), (1, 16)):
        launch(fast, scale=pair)
    assert kernel.asked == 3
    assert not kernel.ran


def test_a_block_of_a_descriptor_decides(made: tuple[Kernel, Any]) -> None:
    kernel, fast = made
    for block in ([16, 32], [32, 32], [16, 32]):
        launch(fast, desc=(block, torch.float32))
    assert kernel.asked == 2


def test_devices_have_kernels_of_their_own(made: tuple[Kernel, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, fast = made
    launch(fast)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(fast)
    assert kernel.asked == 2


def test_a_descriptor_is_checked_where_it_is_new(made: tuple[Kernel, Any]) -> None:
    _, fast = made
    x = torch.zeros(32, 33)
    for _ in range(2):
        with pytest.raises(AssertionError, match="16-byte aligned"):
            fast[(1,)](x, None, describe(x, [16, 32]), 1, 1.0, True)


def test_a_description_is_what_triton_makes() -> None:
    x = torch.zeros(32, 64)
    assert vars(TensorDescriptor.from_tensor(x, [16, 32])) | vars(describe(x, [16, 32])) == vars(TensorDescriptor.from_tensor(x, [16, 32]))  # fmt: skip
    assert describe(x, [16, 32]).padding == "zero"


def test_what_is_no_compiled_kernel_is_left_alone() -> None:
    def interpreted() -> None: ...

    assert quick(interpreted) is interpreted


EDGES = [2**bits + step for bits in (31, 32, 63, 64) for step in (-17, -16, -1, 0, 1, 16)]
STORE = torch.zeros(64, dtype=torch.uint8)
ARGUMENTS = [
    None, True, False, 0.0, 1.0, 0, 1, 15, 16, *EDGES, *(-edge for edge in EDGES),
    *(STORE[at : at + 16].view(dtype) for dtype in (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64) for at in range(0, 48, dtype.itemsize)),
    *(describe(torch.zeros(64, 64, dtype=dtype), block) for dtype in (torch.bfloat16, torch.float8_e5m2) for block in ([16, 32], [32, 32])),
]  # fmt: skip


def test_the_key_is_at_least_as_fine_as_triton_s_own(made: tuple[Kernel, Any]) -> None:
    """Asked of the Triton that is installed: arguments with one key are specialised for alike."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    library = pytest.importorskip("triton._C.libtriton")
    backend = CUDABackend(GPUTarget("cuda", 90, 32))

    def specialised(argument: Any) -> Any:
        try:
            return library.native_specialize_impl(backend, argument, False, True, True)
        except OverflowError:
            return "no number of a kernel"

    found: dict[Any, Any] = {}
    for argument in ARGUMENTS:
        key = made[1].key((argument, None, None, 0, 0.0, True), {})
        assert found.setdefault(key, specialised(argument)) == specialised(argument), argument
    assert len(found) > 20
