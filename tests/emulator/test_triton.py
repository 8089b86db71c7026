"""Kernels that Triton compiles for gfx942, on the emulator, against PyTorch.

Nobody wrote them with the emulator in mind: the instruction selection, the register allocation,
the LDS layouts and the waits are Triton's and LLVM's. Run with ``-s`` to see what ran.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import liteattention_emulator as emulator

from . import triton_kernels as kernels

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
TYPES |= {torch.int32: "*i32", torch.uint32: "*u32", torch.int8: "*i8", torch.int64: "*i64"}
TYPES |= {torch.float64: "*fp64"}
TYPES |= {torch.float8_e4m3fnuz: "*fp8e4b8", torch.float8_e5m2fnuz: "*fp8e5b16"}
MNEMONICS: set[str] = set()  # executed so far
ORDERS = ("round-robin", "random:7", "first-ahead", "last-ahead", "round-robin:1")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    MNEMONICS.clear()
    yield
    patch.undo()
    print(f"\n{len(MNEMONICS)} different instructions of gfx942: {' '.join(sorted(MNEMONICS))}")


def launch(
    kernel: Any,
    constants: dict[str, Any],
    grid: Sequence[int],
    args: Sequence[Any],
    options: dict[str, Any] | None = None,
) -> emulator.Report:
    """Compile, run under the checkers, say what ran. The output is the last tensor in ``args``."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {}
    for name, value in zip(names, args, strict=True):
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    compiled = kernels.compile_for_gfx942(kernel, signature, constants, options)
    with emulator.Module(compiled.code_object) as module:
        explicit = [a for a in module.kernel(compiled.name).arguments if not a.hidden]
        extra = [None] * (len(explicit) - len(args))  # Triton's scratch pointers
        report = module.launch(
            compiled.name, grid, [compiled.threads], [*args, *extra], dynamic_lds=compiled.lds_bytes
        )
    types = ",".join(signature.values())
    MNEMONICS.update(report.by_name())
    print(
        f"\n{compiled.name}({types}) {constants} {options or ''}: {report.workgroups} workgroups, "
        f"{report.instructions} wave instructions of {len(report.by_name())} kinds, "
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


REAL = {
    "exp": torch.exp,
    "log": lambda a: torch.log(a * a + 0.5),
    "sin": torch.sin,
    "cos": lambda a: torch.cos(a * 40.0),
    "erf": torch.erf,
    "rsqrt": lambda a: torch.rsqrt(a * a + 0.25),
    "floor": lambda a: torch.floor(a * 7.0),
    "ceil": lambda a: torch.ceil(a * 7.0),
    "clamp": lambda a: torch.clamp(a, -0.5, 0.5),
}
REAL_PAIR = {
    "divide": lambda a, b: a / b,
    "fma": lambda a, b: a * b + a,
    "select": lambda a, b: torch.where(a < b, a * 2, b - a),
    "multiply": lambda a, b: a * b,
}


def elementwise(which: str, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=dtype)
    grid = [math.ceil(len(x) / 512)]
    launch(kernels.elementwise, {"WHICH": which, "BLOCK": 512}, grid, [x, y, out, len(x)])
    return out


@pytest.mark.parametrize("which", [*REAL, *REAL_PAIR])
def test_real_functions(which: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(1500) * 3, torch.randn(1500)
    out = elementwise(which, x, y, torch.float32)
    # As exactly as fp32 allows: arguments that the kernel rounds are rounded here.
    if which == "cos":
        expected = torch.cos((x * 40.0).double())
    elif which in REAL:
        expected = REAL[which](x if which in ("floor", "ceil") else x.double()).double()
    else:
        expected = REAL_PAIR[which](x.double(), y.double())
    assert torch.allclose(out.double(), expected, rtol=5e-6, atol=1e-6)


def test_correctly_rounded_functions() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4000) * 10, torch.randn(4000)
    assert torch.equal(elementwise("div_rn", x, y, torch.float32), x / y)
    assert torch.equal(elementwise("sqrt_rn", x, y, torch.float32), torch.sqrt(x * x))
    a, b = x.double(), y.double()
    assert torch.equal(elementwise("multiply", a, b, torch.float64), a * b)
    assert torch.allclose(elementwise("divide", a, b, torch.float64), a / b, rtol=1e-15)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (1000,)).to(dtype)
    y = torch.randint(1, 2**15, (1000,)).to(dtype) * torch.randint(0, 2, (1000,)).mul(2).sub(1)
    y = y.to(dtype)
    quotient = elementwise("int_divide", x, y, dtype)  # rounds towards zero, as C does
    assert torch.equal(quotient, torch.div(x, y, rounding_mode="trunc"))
    assert torch.equal(elementwise("int_modulo", x, y, dtype), torch.fmod(x, y))
    bits = ((x ^ y) & (x | 12345)) + (~y) + (x << 3) - (y >> 2)
    assert torch.equal(elementwise("bits", x, y, dtype), bits)
    assert torch.equal(elementwise("multiply", x, y, dtype), x * y)
    assert torch.equal(elementwise("select", x, y, dtype), torch.where(x < y, x * 2, y - x))
    if dtype is torch.int32:
        u, w = x.view(torch.uint32), y.view(torch.uint32)
        high = [p * q >> 32 for p, q in zip(u.tolist(), w.tolist(), strict=True)]
        assert elementwise("mul_high", u, w, torch.uint32).tolist() == high


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_conversions(source: torch.dtype, target: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(700) * 500).to(source)
    out = elementwise("multiply", x, torch.ones_like(x), target)
    assert torch.equal(out, x.to(target))


@pytest.mark.parametrize("which", ["sum", "max", "argmax", "xor"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 700), (16, 96), (64, 33)])
def test_reductions(which: str, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(1, 10**6, (rows, columns)).to(torch.int32)
    out = torch.zeros(rows, dtype=torch.int32)
    constants = {"WHICH": which, "ROWS": rows, "BLOCK": 1 << (columns - 1).bit_length()}
    launch(kernels.reduce_rows, constants, [1], [x, out, columns])
    if which == "xor":
        expected = torch.zeros(rows, dtype=torch.int32)
        for column in range(columns):
            expected ^= x[:, column]
    else:
        expected = {"sum": x.sum(1), "max": x.amax(1), "argmax": x.argmax(1)}[which]
    assert torch.equal(out, expected.to(torch.int32))


@pytest.mark.parametrize("which", ["cumsum", "sort", "flip"])
@pytest.mark.parametrize("shape", [(1, 512), (8, 128)])
def test_scans(which: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randint(-1000, 1000, shape).to(torch.int32)
    out = torch.zeros_like(x)
    constants = {"WHICH": which, "ROWS": shape[0], "COLUMNS": shape[1]}
    launch(kernels.scan_rows, constants, [1], [x, out])
    expected = {"cumsum": x.cumsum(1), "sort": x.sort(1).values, "flip": x.flip(1)}[which]
    assert torch.equal(out, expected.to(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
def test_transpose(dtype: torch.dtype) -> None:
    x = torch.arange(64 * 128).remainder(127).reshape(64, 128).to(dtype)
    out = torch.zeros(128, 64, dtype=dtype)
    launch(kernels.transpose, {"ROWS": 64, "COLUMNS": 128}, [1], [x, out])
    assert torch.equal(out, x.T)


def test_atomics() -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 32, (3000,)).to(torch.int32)
    bins, highest = torch.zeros(32, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    total = torch.zeros(1)
    launch(kernels.count_values, {"BLOCK": 1024}, [3], [x, bins, total, highest, 3000])
    assert torch.equal(bins, torch.bincount(x, minlength=32).to(torch.int32))
    assert (total.item(), highest.item()) == (x.sum().item(), x.max().item())


@pytest.mark.parametrize(
    ("dtype", "precision", "size", "inner", "bound"),
    [
        (torch.int8, "ieee", 64, 64, 0.0),
        (torch.float8_e4m3fnuz, "ieee", 32, 64, 2e-6),
        (torch.float8_e5m2fnuz, "ieee", 64, 32, 2e-6),
        (torch.float32, "tf32", 32, 32, 2e-3),
        (torch.float32, "bf16x3", 32, 32, 2e-5),
        (torch.float64, "ieee", 32, 16, 1e-15),
    ],
)
def test_other_dots(
    dtype: torch.dtype, precision: str, size: int, inner: int, bound: float
) -> None:
    torch.manual_seed(0)
    if dtype is torch.int8:
        a = torch.randint(-128, 128, (size, inner)).to(dtype)
        b = torch.randint(-128, 128, (inner, size)).to(dtype)
    else:
        a, b = torch.randn(size, inner).to(dtype), torch.randn(inner, size).to(dtype)
    wide = {torch.int8: torch.int32, torch.float64: torch.float64}.get(dtype, torch.float32)
    out = torch.zeros(size, size, dtype=wide)
    constants = {"SIZE": size, "INNER": inner, "PRECISION": precision}
    launch(kernels.tile_product, constants, [1], [a, b, out])
    magnitude = a.double().abs() @ b.double().abs()
    error = (out.double() - a.double() @ b.double()).abs()
    assert (error <= bound * magnitude).all()


def test_listed_code_objects_need_no_driver(tmp_path: Path) -> None:
    """What Triton wrote is an ordinary code object: metadata and kernarg preload included."""
    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "count": "i32"}
    compiled = kernels.compile_for_gfx942(kernels.add_vectors, types, {"BLOCK": 256})
    found = emulator.kernels(compiled.code_object)
    assert list(found) == ["add_vectors"]
    assert found["add_vectors"].unimplemented == ()
    assert [a.size for a in found["add_vectors"].arguments][:4] == [8, 8, 8, 4]
