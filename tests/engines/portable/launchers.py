"""Launch compiled kernels the short way and through Triton's own launcher; compare bit for bit.

A program of its own, run by `test_short.py`: it loads a stand-in of CUDA's driver. Kernels and
Triton's launcher are the real ones of the installed Triton.

    python tests/engines/portable/launchers.py libcuda.so.1
"""

import ctypes
import re
import sys
import types
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

from liteattention_rocm.engines.triton import hopper, hopper_ragged, launch
from liteattention_tools import sass

STREAM = 0x7777_0000_1234
FUNCTION = 0x4711_0000
SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "f32": 4, "f64": 8, "b8": 1, "b32": 4, "b64": 8}


class Stub:
    """The stand-in of the driver."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)

    def has(self, sizes: list[int]) -> None:
        self.library.stub_parameters((ctypes.c_size_t * len(sizes))(*sizes), len(sizes))

    def taken(self) -> bytes:
        buffer = ctypes.create_string_buffer(1 << 14)
        return buffer.raw[: self.library.stub_take(buffer)]


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of a kernel's parameters, as its PTX declares them."""
    head = ptx[ptx.index(".entry") :].split("{")[0]
    found = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^,\[]*?(?:\[(\d+)\])?[,\n]", head)
    return [SIZES[kind] * int(count or 1) for kind, count in found]


def compiled(kernel: Any, bound: launch.Launch, stub: Stub) -> None:
    """Compile what ``bound`` launches and let it be loaded."""
    constants, options, key = bound._how
    target = GPUTarget("cuda", 90, 32)
    built = triton.compile(
        sass.source_of(kernel, bound), target=target,
        options={**dict(options), "enable_fp_fusion": True},
    )  # fmt: skip
    stub.has(parameter_sizes(built.asm["ptx"]))
    built.function = FUNCTION
    built.module = "loaded"
    built._run = CudaLauncher(built.src, built.metadata)
    bound._kernel._compiled[-1, key, constants, options] = built
    bound._bind()
    built.module = None


def compare(name: str, kernel: Any, bound: launch.Launch, stub: Stub) -> None:
    compiled(kernel, bound, stub)
    assert bound.ready and bound._short is not None, f"{name}: no short way"
    tensors = tuple(torch.empty(64, dtype=torch.bfloat16) for _ in bound._boxes)
    pointers = len(kernel.arg_names) - len(tensors) - len(bound._rest)
    for call in range(2):
        addresses = tuple(0x7F00_0000_0000 + 4096 * (call * 64 + i) for i in range(pointers))
        bound(STREAM, tensors, addresses)
        short = stub.taken()
        with mock.patch.object(bound, "_short", None):
            bound(STREAM, tensors, addresses)
        long = stub.taken()
        assert len(long) > 8 * pointers + 128 * len(tensors)
        assert short == long, f"{name}: launches differ"
    # Without a context Triton's launcher makes one current; here it fails as there is none.
    stub.library.stub_set_context(0)
    assert bound._short(STREAM, tensors, addresses) is False and not stub.taken()
    stub.library.stub_set_context(1)
    stub.library.stub_set_error(999)
    try:
        bound(STREAM, tensors, addresses)
    except RuntimeError as error:
        assert "cuLaunchKernelEx failed: a planted error (999)" in str(error)
    else:
        raise AssertionError("an error of the driver was not raised")
    stub.library.stub_set_error(0)
    print(f"{name}: {len(long)} bytes alike, {len(tensors)} boxes, {pointers} pointers")


def main() -> None:
    stub = Stub(sys.argv[1])
    # Triton 3.6 does not know what older drivers do to maps of small tensors.
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    stub.library.stub_set_driver_version(13020 if old else 13000)
    triton.runtime.driver.set_active(types.SimpleNamespace(utils=CudaUtils()))
    compare("dense", hopper.attention, sass.dense(128, False), stub)
    with mock.patch.object(launch, "chains", lambda device: True):
        walk = sass.lite(128, 0.0, 128)
    assert dict(walk._how[1])["launch_pdl"]
    compare("lists, launched early", hopper.attention, walk, stub)
    compare("prompts", hopper_ragged.attention, sass.prompts(128), stub)
    # A kernel with other parameters than Triton 3.6 to 3.9 give it goes through Triton.
    bound = sass.dense(128, False)
    with mock.patch(f"{__name__}.parameter_sizes", lambda ptx: [8] * 90):
        compiled(hopper.attention, bound, stub)
    assert bound.ready and bound._short is None
    print("other parameters: Triton's launcher")


if __name__ == "__main__":
    main()
