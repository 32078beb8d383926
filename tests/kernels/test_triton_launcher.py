"""Launching a kernel by what was compiled before: two launches share a compiled kernel only where Triton would share it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", exc_type=ImportError)

import triton
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels import triton_compiled, triton_launcher
from loka.kernels.triton_compiled import describe
from loka.kernels.triton_launcher import Quick, quick

PLACES = 5  # of the arguments that are no constants


class Kernel:
    """Stands in for a kernel of Triton: two tensors, a descriptor or none, two numbers, a constant. Counts what it was asked to compile."""

    def __init__(self) -> None:
        self.params = [SimpleNamespace(is_constexpr=constant) for constant in (False,) * PLACES + (True,)]
        self.asked, self.ran = 0, []
        self.compile: Any = Compiled

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.asked += 1
            return self.compile(self, self.asked, args)

        return launch


class Compiled:
    """Of a Triton that is built in another way: it can be launched, and that is all that is known."""

    def __init__(self, kernel: Kernel, number: int, args: Any) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: Any) -> Any:
        assert len(grid) == 3
        return lambda *args: self.kernel.ran.append((self.number, grid, args))


class Real(Compiled):
    """With the launcher of the Triton that is installed, down to where its C begins: `reached` has what came there."""

    packed_metadata, function = (4, 1, 0), 77

    def __init__(self, kernel: Kernel, number: int, args: Any) -> None:
        super().__init__(kernel, number, args)
        self.reached: list[Any] = []
        described = {str(i): type(arg) is TensorDescriptor for i, arg in enumerate(args)}
        signature = {name: "tensordesc<fp32[16,32]>" if there else "i32" for name, there in described.items()}
        self.facts = [
            {"swizzle": number, "elem_size": 4, "elem_type": 7, "block_size": arg.block_shape, "fp4_padded": False}
            for arg in args
            if type(arg) is TensorDescriptor
        ]
        self.run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
        vars(self.run).update(
            num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
            arg_annotations=[], kernel_signature=b"", launch=nvidia.wrap_handle_tensordesc(lambda *given: self.reached.append(given), signature, self.facts),
        )  # fmt: skip
        kernel.ran.append(self)

    def arguments(self) -> Any:
        """Of the last launch, as a kernel gets them. Triton 3.7 hands them over in a list."""
        *_, last = given = self.reached[-1]
        return list(last) if isinstance(last, list | tuple) else list(given[13:])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Kernel, Any]:
    monkeypatch.setattr(triton_launcher, "_current_device", lambda: 0)
    kernel = Kernel()
    return kernel, Quick(kernel)


@pytest.fixture
def real(made: tuple[Kernel, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Kernel, Any, list[Any]]:
    """A kernel that is launched in Triton's own way, and what its tensor maps were made of, one after another."""
    filled: list[Any] = []

    def fill(*facts: Any) -> tuple[Any, ...]:
        filled.append(facts)
        return "map", *facts

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    driver = SimpleNamespace(utils=utils, get_current_stream=lambda device: 1000 + device)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    kernel, fast = made
    kernel.compile = Real
    return kernel, fast, filled


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
    monkeypatch.setattr(triton_launcher, "_current_device", lambda: 1)
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
        key, _ = made[1].read([argument, None, None, 0, 0.0, True], {})
        assert found.setdefault(key, specialised(argument)) == specialised(argument), argument
    assert len(found) > 20


STORE_32 = torch.zeros(4096)


def matrix(rows: int, columns: int, stride: int, *, start: int = 0) -> torch.Tensor:
    """All of them lie in one place, as memory does that was freed and handed out again."""
    return STORE_32[start:].as_strided((rows, columns), (stride, 1))


def launch_on(fast: Any, desc: Any) -> None:
    fast[(3, 2)](torch.zeros(8), None, desc, 48, 0.5, True, num_warps=4)


def test_a_map_is_made_once_for_a_matrix_in_its_place(real: tuple[Kernel, Any, list[Any]]) -> None:
    kernel, fast, filled = real
    for _ in range(4):  # the first launch is Triton's
        launch_on(fast, describe(matrix(32, 32, 32), [16, 32]))
    (compiled,) = kernel.ran
    assert kernel.asked == 1
    assert len(filled) == 1
    assert len(compiled.reached) == 3
    _, _, *described, n, scale, constant = compiled.arguments()
    assert described == [("map", *filled[0]), 32, 32, 32, 1]
    assert (n, scale, constant) == (48, 0.5, True)
    assert compiled.reached[-1][:5] == (3, 2, 1, 1000, 77)


OTHER_MATRIX = {
    "address": (matrix(32, 32, 32, start=64), [16, 32], {}), "rows": (matrix(48, 32, 32), [16, 32], {}), "columns": (matrix(32, 28, 32), [16, 32], {}),
    "strides": (matrix(32, 32, 64), [16, 32], {}), "block": (matrix(32, 32, 32), [32, 32], {}), "padding": (matrix(32, 32, 32), [16, 32], {"padding": "nan"}),
    "type": (matrix(32, 32, 32).view(torch.int32), [16, 32], {}),
}  # fmt: skip
if "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__:
    OTHER_MATRIX["rounding"] = (matrix(32, 32, 32), [16, 32], {"round_f32_to_tf32": True})


@pytest.mark.parametrize("change", list(OTHER_MATRIX))
def test_no_map_of_another_matrix_is_handed_out(real: tuple[Kernel, Any, list[Any]], change: str) -> None:
    """One matrix and another, in turn: every launch has what Triton makes of its own."""
    kernel, fast, filled = real
    reached = 0
    for x, block, manner in [(matrix(32, 32, 32), [16, 32], {}), OTHER_MATRIX[change]] * 3:
        descriptor = TensorDescriptor.from_tensor(x, block, **manner)
        before = [len(compiled.reached) for compiled in kernel.ran]
        launch_on(fast, descriptor)
        for compiled, count in zip(kernel.ran, before, strict=False):
            if len(compiled.reached) > count:
                reached += 1
                made = compiled.arguments()[2:-3]
                assert made == nvidia.make_tensordesc_arg(descriptor, compiled.facts[0])
                filled.pop()  # of the comparison
    assert reached == 6 - kernel.asked
    assert len(filled) == 2  # each was made once
    assert filled[0] != filled[1]


def test_descriptors_keep_their_places(real: tuple[Kernel, Any, list[Any]]) -> None:
    """One matrix as two arguments: the compiled kernel may want a map of its own for each."""
    kernel, fast, filled = real
    x = matrix(32, 32, 32)
    for _ in range(3):
        fast[(1,)](describe(x, [16, 32]), 16, describe(x, [16, 32]), 48, 0.5, True)
        (compiled,) = kernel.ran
        compiled.facts[1]["swizzle"] = 3
    first, *sizes, between, second = compiled.arguments()[:7]
    assert first == ("map", *filled[1])
    assert second == ("map", *filled[0])
    assert (first[2], second[2]) == (1, 3)
    assert (sizes, between) == ([32, 32, 32, 1], 16)
    assert compiled.arguments()[7:] == [32, 32, 32, 1, 48, 0.5, True]
    assert len(filled) == 2


def test_a_matrix_that_tma_cannot_read_is_refused_where_it_is_new(real: tuple[Kernel, Any, list[Any]]) -> None:
    _, fast, filled = real
    for _ in range(2):
        launch_on(fast, describe(matrix(32, 32, 32), [16, 32]))
    for wrong in (matrix(32, 32, 33), matrix(32, 32, 32, start=1), matrix(0, 32, 32)):
        for _ in range(2):
            with pytest.raises(AssertionError, match=r"16-byte aligned|positive"):
                launch_on(fast, describe(wrong, [16, 32]))
    assert len(filled) == 1


def test_maps_are_kept_up_to_a_bound(real: tuple[Kernel, Any, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast, filled = real
    monkeypatch.setattr(triton_compiled, "CACHE_LIMIT", 4)
    launch_on(fast, describe(matrix(32, 32, 32), [16, 32]))
    for rows in range(1, 12):
        launch_on(fast, describe(matrix(rows, 32, 32), [16, 32]))
    (compiled,) = fast._compiled.values()
    assert 0 < len(compiled._maps) <= 4
    assert len(filled) == 11


def test_without_tma_nothing_is_kept(real: tuple[Kernel, Any, list[Any]]) -> None:
    """A descriptor is its tensor there: kept, it would hold memory that was freed."""
    kernel, fast, filled = real

    class Ada(Real):
        def __init__(self, kernel: Kernel, number: int, args: Any) -> None:
            super().__init__(kernel, number, args)
            signature = dict.fromkeys("01", "i32") | {"2": "tensordesc<fp32[16,32]>"} | dict.fromkeys("345", "i32")
            self.run.launch = nvidia.wrap_handle_tensordesc(lambda *given: self.reached.append(given), signature, None)

    kernel.compile = Ada
    x = matrix(32, 32, 32)
    for _ in range(3):
        launch_on(fast, describe(x, [16, 32]))
    (compiled,) = fast._compiled.values()
    assert compiled.kernel.arguments()[2] is x
    assert not compiled._maps
    assert not filled


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told_by_triton(real: tuple[Kernel, Any, list[Any]], hook: str) -> None:
    kernel, fast, _ = real
    heard: list[Any] = []

    def hear(metadata: Any) -> None:
        heard.append(metadata)

    for _ in range(2):
        launch_on(fast, describe(matrix(32, 32, 32), [16, 32]))
    compiled = kernel.ran[0]
    getattr(triton.knobs.runtime, hook).add(hear)
    try:
        launch_on(fast, describe(matrix(32, 32, 32), [16, 32]))
    finally:
        getattr(triton.knobs.runtime, hook).remove(hear)
    number, grid, args = kernel.ran[
        -1
    ]  # Triton's own `CompiledKernel[grid](...)`, with the arguments as they were given
    assert (number, grid) == (1, (3, 2, 1))
    assert type(args[2]) is TensorDescriptor
    assert len(compiled.reached) == 1
    launch_on(fast, describe(matrix(32, 32, 32), [16, 32]))
    assert len(compiled.reached) == 2


def _renamed(launcher: Any) -> None:
    def inner(*args: Any, kept: Any = launcher) -> None: ...

    launcher.launch = inner


class _Elsewhere(nvidia.CudaLauncher):
    def __call__(self, grid: Any, stream: Any, function: Any, *args: Any) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    "change", [_renamed, lambda run: delattr(run, "launch"), lambda run: setattr(run, "__class__", _Elsewhere)], ids=["other step", "no launch", "other order"]
)  # fmt: skip
def test_what_is_built_in_another_way_is_left_to_triton(real: tuple[Kernel, Any, list[Any]], change: Any) -> None:
    kernel, fast, filled = real

    class Strange(Real):
        def __init__(self, kernel: Kernel, number: int, args: Any) -> None:
            super().__init__(kernel, number, args)
            change(self.run)

    kernel.compile = Strange
    for _ in range(3):
        launch_on(fast, describe(matrix(32, 32, 32), [16, 32]))
    assert [ran[:2] for ran in kernel.ran[1:]] == [(1, (3, 2, 1))] * 2
    assert not filled


class Launcher:
    """Of Triton 3.6, word for word where it calls its C function."""

    def __init__(self, launch: Any, scratch: int) -> None:
        self.launch, self.global_scratch_size, self.profile_scratch_size = launch, scratch, 0
        self.launch_cooperative_grid, self.launch_pdl = "cooperative", "pdl"
        self.arg_annotations, self.kernel_signature = "annotations", "signature"

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):  # type: ignore[no-untyped-def]
        global_scratch, profile_scratch = "scratch" if self.global_scratch_size else None, None
        # fmt: off
        self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl,
                    global_scratch, profile_scratch, *args)
        # fmt: on


class Later(Launcher):
    """Of Triton 3.7."""

    def __call__(self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, *args):  # type: ignore[no-untyped-def]  # fmt: skip
        global_scratch, profile_scratch = "scratch" if self.global_scratch_size else None, None
        # fmt: off
        self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl,
                    kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, global_scratch,
                    profile_scratch, self.arg_annotations, self.kernel_signature, args)
        # fmt: on


class Other(Launcher):
    """Of a release to come: the C function takes the stream last."""

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):  # type: ignore[no-untyped-def]
        self.launch(gridX, gridY, gridZ, function, *args, stream)


@pytest.mark.parametrize(("release", "scratch", "short"), [(Launcher, 0, True), (Later, 0, True), (Launcher, 8, False), (Later, 8, False), (Other, 0, False)])  # fmt: skip
def test_the_c_function_is_handed_what_triton_s_launcher_hands_it(
    real: Any, release: type[Launcher], scratch: int, short: bool
) -> None:
    """Called without the launcher where that is known to add nothing."""
    reached: list[Any] = []

    def launch(*given: Any) -> None:
        reached.append((*given[:-1], list(given[-1]) if isinstance(given[-1], tuple) else given[-1]))

    launcher = release(launch, scratch)
    kernel = SimpleNamespace(run=launcher, function=77, packed_metadata=(4, 1, 0))
    start, fixed, flat = triton_compiled._shorten(kernel, launcher)
    assert (start is launch) == short
    launcher(3, 2, 1, 1005, 77, (4, 1, 0), None, None, None, "x", "y")
    start(3, 2, 1, 1005, *fixed, *(("x", "y") if flat else (["x", "y"],)))
    assert reached[0] == reached[1]


def test_the_triton_that_is_installed_is_known() -> None:
    source = triton_compiled._source_of(nvidia.CudaLauncher)
    assert (triton_compiled._CALL_3_6 in source) != (triton_compiled._CALL_3_7 in source)


def test_a_launch_that_a_hook_of_triton_s_suppressed_is_not_remembered(made: tuple[Kernel, Any]) -> None:
    kernel, fast = made
    kernel.compile = lambda *_: None
    for _ in range(2):
        launch(fast)
    assert kernel.asked == 2


class OnTheGPU(torch.Tensor):
    is_cuda = True


def test_a_tensor_on_a_gpu_goes_by_its_address_and_others_are_examined(real: tuple[Kernel, Any, list[Any]]) -> None:
    kernel, fast, _ = real
    there, here = torch.zeros(8).as_subclass(OnTheGPU), torch.zeros(8)
    for _ in range(2):
        fast[(1,)](there, here, describe(matrix(32, 32, 32), [16, 32]), 1, 0.5, True)
    first, second, *_ = kernel.ran[0].arguments()
    assert first == there.data_ptr()
    assert second is here


@pytest.mark.gpu
def test_memory_that_is_handed_out_again_is_read_as_what_it_is_now() -> None:
    """Two shapes in turn in the same memory, through maps that were kept; then in memory that torch's allocator had back."""
    from loka.kernels.scaled_mm.triton_kernels import gemm

    generator = torch.Generator("cuda").manual_seed(7)
    store, one = torch.empty(2, 2**20, dtype=torch.uint8, device="cuda"), torch.ones((), device="cuda")
    shapes = [(256, 512, 384), (512, 256, 640), (256, 512, 384), (128, 1024, 384)]
    for lies in ("in one place", "anywhere"):
        for m, k, n in shapes * 3:
            wanted = [
                torch.randn(rows, k, generator=generator, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n)
            ]
            if lies == "in one place":
                operands = [
                    held[: x.numel()].view(x.dtype).view(x.shape).copy_(x)
                    for held, x in zip(store, wanted, strict=True)
                ]
            else:
                operands = [x.clone() for x in wanted]
            found = gemm(*operands, one, one, a_source=1, b_source=1, exact=True, out_dtype=torch.float32)
            a, b = (x.float().double() for x in wanted)
            # tensor cores keep about 14 bits of a sum of FP8 products; another matrix in this place is off by far more
            assert ((found.double() - a @ b.T).abs() <= 2**-12 * (a.abs() @ b.abs().T)).all()
            del operands, wanted, found, a, b  # given back, and handed out again
    assert any(compiled._maps for compiled in _gemm_compiled())


def _gemm_compiled() -> Any:
    from loka.kernels.scaled_mm import triton_kernels

    return triton_kernels._gemm._compiled.values()


@pytest.mark.gpu
def test_a_captured_launch_is_replayed_with_its_own_maps() -> None:
    from loka.kernels.scaled_mm.triton_kernels import gemm

    one = torch.ones((), device="cuda")
    a, b = (torch.randn(rows, 256, device="cuda").to(torch.float8_e4m3fn) for rows in (256, 128))

    def run() -> torch.Tensor:
        return gemm(a, b, one, one, a_source=1, b_source=1, exact=True, out_dtype=torch.bfloat16)

    before = run()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):  # other work, other maps
        gemm(b, a, one, one, a_source=1, b_source=1, exact=True, out_dtype=torch.bfloat16)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, before)


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "gcc")) is None, reason="no compiler for Triton's launcher")
@pytest.mark.skipif(not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(), reason="no headers of Python")
@pytest.mark.skipif(not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists(), reason="no ptxas")
@pytest.mark.parametrize(
    ("file", "answer"),
    [
        pytest.param("noted_launches.py", r"same \d{3,}\n", id="the driver is handed what Triton hands it"),
        pytest.param("compiled_together.py", r"together\n", id="kernels of several tasks are compiled side by side"),
    ],
)
def test_up_to_the_driver(tmp_path: Path, file: str, answer: str) -> None:
    """Triton's compiler and its launcher in C, to the driver and not beyond."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0", "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"}  # fmt: skip
    child = [sys.executable, str(Path(__file__).with_name(file)), str(tmp_path)]
    done = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.fullmatch(answer, done.stdout)
