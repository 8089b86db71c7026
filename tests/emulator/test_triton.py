"""Kernels that Triton compiles for gfx942, on the emulator, against PyTorch.

Nobody wrote them with the emulator in mind: the instruction selection, the register allocation,
the LDS layouts and the waits are Triton's and LLVM's. Run with ``-s`` to see what ran.
"""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import liteattention_emulator as emulator

pytest.importorskip("triton", reason="triton is not installed (extra: triton)")
warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")

from . import triton_kernels as kernels  # noqa: E402

FLOATS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
ORDERS = ("round-robin", "random:7", "first-ahead", "last-ahead", "round-robin:1")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    yield
    patch.undo()


def launch(
    kernel: Any,
    constants: dict[str, int],
    grid: Sequence[int],
    args: Sequence[Any],
    options: dict[str, Any] | None = None,
) -> emulator.Report:
    """Compile, run under the checkers, say what ran. The output is the last tensor in ``args``."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {}
    for name, value in zip(names, args, strict=True):
        if isinstance(value, torch.Tensor):
            signature[name] = FLOATS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    compiled = kernels.compile_for_gfx942(kernel, signature, constants, options)
    with emulator.Module(compiled.code_object) as module:
        explicit = [a for a in module.kernel(compiled.name).arguments if not a.hidden]
        extra = [None] * (len(explicit) - len(args))  # Triton's scratch pointers
        report = module.launch(
            compiled.name,
            grid,
            [compiled.threads],
            [*args, *extra],
            dynamic_lds=compiled.lds_bytes,
        )
    types = ",".join(signature.values())
    mnemonics = len(report.by_name())
    print(
        f"\n{compiled.name}({types}) {constants} {options or ''}: {report.workgroups} workgroups, "
        f"{report.instructions} wave instructions of {mnemonics} kinds, "
        f"{report.rate / 1e6:.1f} M/s emulated"
    )
    assert report.instructions > 0
    assert not report.findings
    return report


@pytest.mark.parametrize("count", [1, 1000, 5000])
def test_vector_add(count: int) -> None:
    torch.manual_seed(0)
    x, y, out = torch.randn(count), torch.randn(count), torch.full((count,), torch.nan)
    launch(kernels.add_vectors, {"BLOCK": 1024}, [math.ceil(count / 1024)], [x, y, out, count])
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("columns", [781, 64, 2048])
def test_fused_softmax(columns: int) -> None:
    torch.manual_seed(0)
    x, out = torch.randn(5, columns) * 4, torch.full((5, columns), torch.nan)
    block = 1 << (columns - 1).bit_length()
    report = launch(kernels.softmax_rows, {"BLOCK": block}, [5], [x, out, columns, columns])
    assert (report.counters["barriers"] > 0) == (columns > 64)  # one wave needs none
    expected = torch.softmax(x.double(), 1)
    assert torch.allclose(out.double(), expected, rtol=4e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layer_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, columns = 6, 600
    x = (torch.randn(rows, columns) * 3 + 1).to(dtype)
    gain, bias = torch.randn(columns), torch.randn(columns)
    out = torch.full((rows, columns), torch.nan, dtype=dtype)
    args = [x, gain, bias, out, columns, 1e-5]
    launch(kernels.layer_norm, {"BLOCK": 1024}, [rows], args)
    expected = torch.nn.functional.layer_norm(
        x.double(), (columns,), gain.double(), bias.double(), 1e-5
    )
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert torch.allclose(out.double(), expected, rtol=rounding, atol=2 * rounding)


@pytest.mark.parametrize(
    ("dtype", "shape", "tile", "options"),
    [
        (torch.bfloat16, (70, 100, 96), (64, 64, 32), {}),
        (torch.float16, (70, 100, 96), (64, 64, 32), {}),
        (torch.bfloat16, (128, 128, 80), (32, 64, 64), {"matrix_instr_nonkdim": 16}),
        (torch.float16, (128, 64, 200), (128, 64, 64), {"num_warps": 8, "num_stages": 2}),
        (torch.float32, (40, 33, 50), (32, 32, 32), {}),
    ],
)
def test_matrix_product(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    tile: tuple[int, int, int],
    options: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    rows, columns, inner = shape
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    out = torch.full((rows, columns), torch.nan, dtype=dtype)
    constants = dict(zip(("ROWS", "COLUMNS", "INNER"), tile, strict=True))
    grid = [math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])]
    args = [a, b, out, rows, columns, inner]
    report = launch(kernels.matrix_product, constants, grid, args, options)
    assert report.by_unit()["mfma"] > 0
    expected = a.double() @ b.double()
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    bound = rounding * expected.abs() + 2e-6 * (a.double().abs() @ b.double().abs())
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("dtype", "dim", "tile", "options"),
    [
        (torch.bfloat16, 64, (64, 64), {}),
        (torch.float16, 128, (128, 64), {"num_warps": 8}),
        (torch.bfloat16, 64, (32, 32), {"matrix_instr_nonkdim": 16, "num_stages": 3}),
    ],
)
def test_attention(
    dtype: torch.dtype, dim: int, tile: tuple[int, int], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    heads, length_q, length_k = 2, 150, 200
    q = torch.randn(heads, length_q, dim).to(dtype)
    k, v = (torch.randn(heads, length_k, dim).to(dtype) for _ in range(2))
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    constants = {"ROWS": tile[0], "KEYS": tile[1], "DIM": dim}
    grid = [math.ceil(length_q / tile[0]), heads]
    scale_log2 = dim**-0.5 * math.log2(math.e)
    results = []
    for order in ORDERS:
        emulator.set_option("order", order)
        try:
            out = torch.full_like(q, torch.nan)
            args = [q, k, v, out, length_q, length_k, scale_log2]
            launch(kernels.attention, constants, grid, args, options)
        finally:
            emulator.set_option("order", "")
        results.append(out)
    rounding = 2**-8 if dtype is torch.bfloat16 else 2**-11
    error = (results[0].double() - expected).abs().max().item()
    assert error < 4 * rounding
    assert all(torch.equal(out, results[0]) for out in results)


def test_listed_code_objects_need_no_driver(tmp_path: Path) -> None:
    """What Triton wrote is an ordinary code object: metadata and kernarg preload included."""
    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "count": "i32"}
    compiled = kernels.compile_for_gfx942(kernels.add_vectors, types, {"BLOCK": 256})
    found = emulator.kernels(compiled.code_object)
    assert list(found) == ["add_vectors"]
    assert found["add_vectors"].unimplemented == ()
    assert [a.size for a in found["add_vectors"].arguments][:4] == [8, 8, 8, 4]
