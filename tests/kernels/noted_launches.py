"""Run in a process of its own: Triton compiles and launches for Hopper on a machine without a GPU, and the driver notes what reaches it.

The driver is a library in the place of CUDA's (`DRIVER`), built here. What Triton's own `kernel[grid](...)` hands it for a launch is compared, byte by byte, with what a quick kernel hands it.
"""

import ctypes
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

MOST = 64  # parameters of a kernel
DRIVER = """
#include "cuda.h"
#include <string.h>
unsigned char noted[64][128];
unsigned noted_grid[3];
int noted_sizes[64], noted_count, launches, encoded;
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "no such thing"; return 0; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return 0; }
CUresult cuCtxSetCurrent(CUcontext c) { return 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return 0; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = 232448; return 0; }
CUresult cuModuleLoadData(CUmodule *m, const void *d) { *m = (CUmodule)1; return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) { *f = (CUfunction)1; return 0; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = 1024; return 0; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return 0; }
CUresult cuCtxSetLimit(CUlimit l, size_t v) { return 0; }
CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 0; return 0; }
CUresult cuDriverGetVersion(int *v) { *v = 12080; return 0; }
CUresult cuPointerGetAttribute(void *d, CUpointer_attribute a, CUdeviceptr p) { *(CUdeviceptr *)d = p; return 0; }
CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave i, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  unsigned long long *word = (unsigned long long *)m;
  encoded++;
  memset(m, 0, 128);
  word[0] = type, word[1] = (unsigned long long)address, word[2] = swizzle, word[3] = l2, word[4] = fill;
  for (unsigned at = 0; at < rank; at++) word[5 + at] = sizes[at], word[8 + at] = box[at], word[11 + at] = at + 1 < rank ? strides[at] : 0;
  return 0;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra) {
  launches++;
  noted_grid[0] = config->gridDimX, noted_grid[1] = config->gridDimY, noted_grid[2] = config->gridDimZ;
  for (int at = 0; at < noted_count; at++) memcpy(noted[at], parameters[at], noted_sizes[at]);
  return 0;
}
"""  # fmt: skip


def build(folder: Path, include: Path) -> ctypes.CDLL:
    """The library, under the name that Triton asks for; loaded first, it is what everybody finds."""
    library = folder / "libcuda.so.1"
    command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-w", f"-I{include}", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o", str(library)]  # fmt: skip
    subprocess.run(command, input=DRIVER.encode(), check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class Notes:
    """What the library noted."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._bytes = (ctypes.c_ubyte * 128 * MOST).in_dll(library, "noted")
        self._grid = (ctypes.c_uint * 3).in_dll(library, "noted_grid")
        self._sizes = (ctypes.c_int * MOST).in_dll(library, "noted_sizes")
        self._count = ctypes.c_int.in_dll(library, "noted_count")
        self.launches, self.encoded = (ctypes.c_int.in_dll(library, name) for name in ("launches", "encoded"))

    def expect(self, sizes: list[int]) -> None:
        """Parameters of the launches to come, in bytes."""
        self._sizes[: len(sizes)] = sizes
        self._count.value = len(sizes)

    def take(self) -> tuple[Any, ...]:
        """Grid and parameters of the last launch; forgotten afterwards."""
        found = tuple(self._grid), *(bytes(self._bytes[at][: self._sizes[at]]) for at in range(self._count.value))
        ctypes.memset(self._bytes, 0xEE, ctypes.sizeof(self._bytes))
        return found


def sizes_of(ptx: str) -> list[int]:
    """Bytes of each parameter of a kernel."""
    head = ptx.split(".visible .entry")[1].split(")")[0]
    arrays = re.findall(r"\.param [^,\n]*?(?:\.b8 \w+\[(\d+)\]|\.[usbf](\d+) )", head)
    return [int(array) if array else int(bits) // 8 for array, bits in arrays]


def make_driver() -> Any:
    """Triton's driver of a Hopper that is not there."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia

    class Driver(nvidia.CudaDriver):
        def __init__(self) -> None:
            self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
            self.get_current_device, self.get_current_stream = lambda: 0, lambda device: 0
            self.set_current_device = lambda device: None

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    return Driver()


def main(folder: Path) -> None:
    import triton
    from triton.backends.nvidia import driver as nvidia

    notes = Notes(build(folder, Path(nvidia.__file__).parent / "include"))

    triton.runtime.driver.set_active(make_driver())
    import torch
    from launched_kernels import add, scale  # beside this file

    from loka.kernels import triton_bound, triton_compiled, triton_launcher

    triton_launcher._current_device = triton_bound._current_device = lambda: 0

    class OnTheGPU(torch.Tensor):
        is_cuda = True

    def compare(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> int:
        """Triton's launch and three quick ones, of which the first two may still be Triton's or encode maps. How many the third encoded."""
        return compare_with(partial(kernel[grid], *args, **options), kernel, grid, *args, **options)

    def compare_with(launch: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> int:
        notes.expect([])
        compiled = kernel.jitted[grid](*args, **options)
        notes.expect(sizes_of(compiled.asm["ptx"]))
        kernel.jitted[grid](*args, **options)
        expected = notes.take()
        for _ in range(3):
            launches, encoded = notes.launches.value, notes.encoded.value
            launch()
            assert notes.take() == expected, (kernel.jitted, args)
            assert notes.launches.value == launches + 1
        assert all(found._launcher is not None for found in kernel._compiled.values()), "left to Triton"
        return notes.encoded.value - encoded

    store, out = torch.zeros(1 << 16), torch.zeros(1 << 16).as_subclass(OnTheGPU)
    add, scale = triton_launcher.quick(add), triton_launcher.quick(scale)
    bounds: dict[Any, Any] = {}
    for _ in range(2):  # the second time all of them are in turn with others at the same address
        for rows, columns, stride, block in ((64, 64, 64, [32, 32]), (128, 64, 64, [32, 32]), (64, 32, 96, [32, 32]), (64, 64, 64, [64, 32])):  # fmt: skip
            x = store.as_strided((rows, columns), (stride, 1))
            first, second = triton_compiled.describe(x, block), triton_compiled.describe(x.view(torch.int32), block)
            for n, factor, optional in ((48, 0.5, None), (47, 2.0, out), (2**40, -1.0, out[4:])):
                assert compare(add, (3, 2), first, out, second, optional, n, factor, *block, num_warps=4) == 0
                # one for all matrices: what differs between them must reach the driver
                key, blocks = (n, factor, *block), {0: block, 2: block}
                bound = bounds.setdefault(key, triton_bound.bind(add, (3, 2), *key, blocks=blocks, num_warps=4))
                again = partial(bound, x, out, x.view(torch.int32), optional)
                assert compare_with(again, add, (3, 2), first, out, second, optional, *key, num_warps=4) == 0
    halves = triton_bound.bind(scale, (5,), 7, 0.25, 64, views={0: torch.float16}, num_warps=1)
    for x in (torch.zeros(64), torch.zeros(65)[1:], out):
        assert compare(scale, (5,), x, out, 7, 0.25, 64, num_warps=1) == 0
        again, viewed = partial(halves, x, out), x.view(torch.float16)
        assert compare_with(again, scale, (5,), viewed, out, 7, 0.25, 64, num_warps=1) == 0
    print(f"same {notes.launches.value}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
