"""Launches whose sizes are known beforehand: what reaches Triton is what an unbound launch hands it."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", exc_type=ImportError)

import triton
from triton.runtime.jit import TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels import triton_bound, triton_launcher
from loka.kernels.triton_bound import bind
from loka.kernels.triton_launcher import Quick


class Kernel:
    """Stands in for a kernel of Triton: a matrix, two tensors, a number, a constant. Notes what it was asked to compile, and what was launched."""

    def __init__(self) -> None:
        self.params = [SimpleNamespace(is_constexpr=constant) for constant in (False,) * 4 + (True,)]
        self.asked: list[Any] = []
        self.launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.asked.append((grid, args, options))
            return Compiled(self, len(self.asked))

        return launch


class Launcher:
    """Like Triton's of 3.6: it hands everything on."""

    launch = max  # a builtin: no descriptors

    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __call__(self, gridX: Any, gridY: Any, gridZ: Any, stream: Any, function: Any, *args: Any) -> None:
        self.kernel.launched.append((self.number, (gridX, gridY, gridZ), stream, args[4:]))


class Compiled:
    packed_metadata, function = (4, 1, 0), 77

    def __init__(self, kernel: Kernel, number: int) -> None:
        self.run = Launcher(kernel, number)
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.kernel.launched.append((self.number, grid, "Triton's", args))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Kernel, Quick]:
    driver = SimpleNamespace(get_current_stream=lambda device: 1000 + device)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    go_to(0, monkeypatch)
    kernel = Kernel()
    return kernel, Quick(kernel)


def go_to(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (triton_launcher, triton_bound):
        monkeypatch.setattr(module, "_current_device", lambda: device)


class OnTheGPU(torch.Tensor):
    is_cuda = True


STORE = torch.zeros(4096).as_subclass(OnTheGPU)
X, Y = STORE[:64], STORE[1024:1088]


def test_the_second_launch_asks_triton_nothing_and_hands_on_addresses(made: tuple[Kernel, Quick]) -> None:
    kernel, fast = made
    launch = bind(fast, (3, 2), 48, True, num_warps=4)
    for _ in range(3):
        launch(X, None, Y)
    assert kernel.asked == [((3, 2, 1), (X, None, Y, 48, True), {"num_warps": 4})]
    expected = (X.data_ptr(), None, Y.data_ptr(), 48, True)
    assert kernel.launched == [(1, (3, 2, 1), 1000, expected)] * 2


OTHER = {
    "another dtype": (X, None, Y.view(torch.int32)),
    "another address": (STORE[1:65], None, Y),
    "another that is there": (X, Y, Y),
    "another that is not": (X, None, None),
}


@pytest.mark.parametrize("change", list(OTHER))
def test_what_triton_compiles_apart_is_kept_apart(made: tuple[Kernel, Quick], change: str) -> None:
    kernel, fast = made
    launch = bind(fast, (1,), 48, True)
    for tensors in ((X, None, Y), OTHER[change]) * 2:
        launch(*tensors)
    assert [number for number, *_ in kernel.launched] == [1, 2]
    assert kernel.launched[1][3][:3] == tuple(None if x is None else x.data_ptr() for x in OTHER[change])


def test_misaligned_tensors_are_told_apart_by_which_of_them_it_is(made: tuple[Kernel, Quick]) -> None:
    kernel, fast = made
    launch = bind(fast, (1,), 48, True)
    for x, y in ((STORE[1:], Y), (X, STORE[1:]), (STORE[1:], STORE[2:])) * 2:
        launch(x, None, y)
    assert [number for number, *_ in kernel.launched] == [1, 2, 3]


def test_an_address_that_is_as_aligned_is_no_other_kernel(made: tuple[Kernel, Quick]) -> None:
    kernel, fast = made
    launch = bind(fast, (1,), 48, True)
    for start in (0, 4, 8):
        launch(STORE[start:], None, Y)
    assert len(kernel.asked) == 1
    assert [args[0] for *_, args in kernel.launched] == [STORE[4:].data_ptr(), STORE[8:].data_ptr()]


def test_devices_have_kernels_and_streams_of_their_own(made: tuple[Kernel, Quick], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    kernel, fast = made
    launch = bind(fast, (1,), 48, True)
    for device in (0, 1, 0, 1):
        go_to(device, monkeypatch)
        launch(X, None, Y)
    assert [(number, stream) for number, _, stream, _ in kernel.launched] == [(1, 1000), (2, 1001)]


def test_bound_launches_share_what_was_compiled(made: tuple[Kernel, Quick]) -> None:
    """Two sizes of one kind are one kernel of Triton's, and a size of another kind is another."""
    kernel, fast = made
    for n in (48, 96, 47):
        bind(fast, (1,), n, True)(X, None, Y)
    assert [args[3] for _, args, _ in kernel.asked] == [48, 47]
    assert [args[3] for *_, args in kernel.launched] == [96]


def test_a_view_is_compiled_for_the_dtype_that_is_read(made: tuple[Kernel, Quick]) -> None:
    kernel, fast = made
    launch = bind(fast, (1,), 48, True, views={1: torch.int32, 2: torch.int16})
    for _ in range(2):
        launch(X, None, Y)
    ((_, args, _),) = kernel.asked
    assert isinstance(args[2], TensorWrapper)
    assert (args[2].dtype, args[2].base, args[1]) == (torch.int16, Y, None)
    assert kernel.launched[0][3][2] == Y.data_ptr()
    bind(fast, (1,), 48, True)(X, None, Y)
    assert len(kernel.asked) == 2


def test_a_host_tensor_is_examined_by_triton(made: tuple[Kernel, Quick]) -> None:
    kernel, fast = made
    here, launch = torch.zeros(8), bind(fast, (1,), 48, True)
    for _ in range(2):
        launch(X, here, Y)
    assert kernel.launched[0][3][1] is here


def test_hooks_are_told_by_triton(made: tuple[Kernel, Quick]) -> None:
    kernel, fast = made
    launch = bind(fast, (1,), 48, True, blocks={0: [4, 4]})
    x = STORE.as_strided((8, 8), (8, 1))
    launch(x, None, Y)

    def hear(metadata: Any) -> None: ...

    triton.knobs.runtime.launch_enter_hook.add(hear)
    try:
        launch(x, None, Y)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hear)
    ((number, grid, stream, args),) = kernel.launched
    assert (number, grid, stream) == (1, (1, 1, 1), "Triton's")
    assert type(args[0]) is TensorDescriptor
    assert len(kernel.asked) == 1


def test_no_tensor_is_kept(made: tuple[Kernel, Quick]) -> None:
    kernel, fast = made
    launch = bind(fast, (1,), 48, True, views={2: torch.int32})
    x = torch.zeros(64)
    gone = weakref.ref(x)
    for _ in range(2):
        launch(x, None, x)
    kernel.asked.clear()
    kernel.launched.clear()
    del x
    gc.collect()
    assert gone() is None


def test_what_was_compiled_is_kept_up_to_a_bound(made: tuple[Kernel, Quick], monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = made
    monkeypatch.setattr(triton_bound, "CACHE_LIMIT", 2)
    launch = bind(fast, (1,), 48, True)
    for tensors in OTHER.values():
        launch(*tensors)
    assert 0 < len(launch._compiled) <= 2


def test_a_kernel_that_is_left_alone_is_launched_plainly() -> None:
    kernel = Kernel()
    launch = bind(kernel, (3,), 48, True, views={2: torch.int32}, num_warps=4)
    for _ in range(2):
        launch(X, None, Y)
    assert [(grid, args[0], args[2].dtype, options) for grid, args, options in kernel.asked] == [((3, 1, 1), X, torch.int32, {"num_warps": 4})] * 2  # fmt: skip
