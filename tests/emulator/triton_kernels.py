"""Triton kernels, compiled for gfx942 without a GPU: code that nobody wrote for the emulator.

``compile_for_gfx942`` needs the ``triton`` package (extra ``triton``); LLVM comes with it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Compiled:
    name: str
    code_object: bytes
    threads: int
    lds_bytes: int


def compile_for_gfx942(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, Any] | None = None,
    aligned: Collection[str] = (),
) -> Compiled:
    """signature: argument name -> Triton type ("*fp32", "i32", ...), run-time arguments only.

    aligned: arguments that are multiples of 16, as Triton finds out when it launches.
    """
    types = signature | {name: "constexpr" for name in constants}
    ordered = {name: types[name] for name in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(ordered) if name in aligned}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=constants, attrs=attrs)
    built = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options or {})
    metadata = built.metadata
    threads = metadata.num_warps * 64
    return Compiled(metadata.name, built.asm["hsaco"], threads, metadata.shared)


@triton.jit
def add_vectors(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    left = tl.load(x + at, mask=inside)
    right = tl.load(y + at, mask=inside)
    tl.store(out + at, left + right, mask=inside)


@triton.jit
def softmax_rows(x, out, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    scores = tl.load(x + row * stride + at, mask=inside, other=float("-inf"))
    powers = tl.exp(scores - tl.max(scores, axis=0))
    tl.store(out + row * stride + at, powers / tl.sum(powers, axis=0), mask=inside)


@triton.jit
def layer_norm(x, gain, bias, out, columns, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / columns
    centred = tl.where(inside, values - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + epsilon)
    weight = tl.load(gain + at, mask=inside, other=0.0)
    shift = tl.load(bias + at, mask=inside, other=0.0)
    result = centred * scale * weight + shift
    tl.store(out + row * columns + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def matrix_product(
    a, b, out, rows, columns, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = a [rows, inner] @ b [inner, columns], all row-major."""
    tiles_across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    row = tile // tiles_across * ROWS + tl.arange(0, ROWS)
    column = tile % tiles_across * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, INNER)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, INNER):
        k = start + step
        left = tl.load(
            a + row[:, None] * inner + k[None, :],
            mask=(row[:, None] < rows) & (k[None, :] < inner),
            other=0.0,
        )
        right = tl.load(
            b + k[:, None] * columns + column[None, :],
            mask=(k[:, None] < inner) & (column[None, :] < columns),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(
        out + row[:, None] * columns + column[None, :],
        total.to(out.dtype.element_ty),
        mask=(row[:, None] < rows) & (column[None, :] < columns),
    )


@triton.jit
def attention(
    q, k, v, out, length_q, length_k, scale_log2,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One head per program_id(1), one tile of queries per program_id(0); [heads, length, DIM]."""
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = tl.arange(0, KEYS)
    dim = tl.arange(0, DIM)
    at_q = (head * length_q + row[:, None]) * DIM + dim[None, :]
    query = tl.load(q + at_q, mask=row[:, None] < length_q, other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(0, length_k, KEYS):
        place = start + key
        inside = place < length_k
        at = (head * length_k + place[:, None]) * DIM + dim[None, :]
        keys = tl.load(k + at, mask=inside[:, None], other=0.0)
        score = tl.dot(query, tl.trans(keys)) * scale_log2
        score = tl.where(inside[None, :], score, float("-inf"))
        peak = tl.maximum(top, tl.max(score, axis=1))
        fade = tl.exp2(top - peak)
        power = tl.exp2(score - peak[:, None])
        weight = weight * fade + tl.sum(power, axis=1)
        values = tl.load(v + at, mask=inside[:, None], other=0.0)
        total = tl.dot(power.to(values.dtype), values, total * fade[:, None])
        top = peak
    result = (total / weight[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_q, result, mask=row[:, None] < length_q)


@triton.jit
def elementwise(x, y, out, count, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a = tl.load(x + at, mask=inside, other=1)
    b = tl.load(y + at, mask=inside, other=1)
    if WHICH == "exp":
        result = tl.exp(a)
    elif WHICH == "log":
        result = tl.log(a * a + 0.5)
    elif WHICH == "sin":
        result = tl.sin(a)
    elif WHICH == "cos":
        result = tl.cos(a * 40.0)
    elif WHICH == "erf":
        result = tl.erf(a)
    elif WHICH == "rsqrt":
        result = tl.rsqrt(a * a + 0.25)
    elif WHICH == "sqrt_rn":
        result = tl.sqrt_rn(a * a)
    elif WHICH == "div_rn":
        result = tl.div_rn(a, b)
    elif WHICH == "divide":
        result = a / b
    elif WHICH == "fma":
        result = tl.fma(a, b, a)
    elif WHICH == "floor":
        result = tl.floor(a * 7.0)
    elif WHICH == "ceil":
        result = tl.ceil(a * 7.0)
    elif WHICH == "clamp":
        result = tl.clamp(a, -0.5, 0.5)
    elif WHICH == "int_divide":
        result = a // b
    elif WHICH == "int_modulo":
        result = a % b
    elif WHICH == "mul_high":
        result = tl.umulhi(a, b)
    elif WHICH == "bits":
        result = ((a ^ b) & (a | 12345)) + (~b) + (a << 3) - (b >> 2)
    elif WHICH == "select":
        result = tl.where(a < b, a * 2, b - a)
    else:
        result = a * b
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def reduce_rows(x, out, columns, WHICH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """x [ROWS, columns] -> out [ROWS]."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column[None, :] < columns
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0)
    if WHICH == "sum":
        result = tl.sum(values, axis=1)
    elif WHICH == "max":
        result = tl.max(values, axis=1)
    elif WHICH == "argmax":
        result = tl.argmax(values, axis=1)
    elif WHICH == "xor":
        result = tl.xor_sum(values, axis=1)
    tl.store(out + row, result)


@triton.jit
def scan_rows(x, out, WHICH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [ROWS, COLUMNS] -> out [ROWS, COLUMNS]."""
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    values = tl.load(x + at)
    if WHICH == "cumsum":
        result = tl.cumsum(values, axis=1)
    elif WHICH == "sort":
        result = tl.sort(values, dim=1)
    elif WHICH == "flip":
        result = tl.flip(values, 1)
    tl.store(out + at, result)


@triton.jit
def transpose(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    values = tl.load(x + row[:, None] * COLUMNS + column[None, :])
    tl.store(out + column[:, None] * ROWS + row[None, :], tl.trans(values))


@triton.jit
def count_values(x, bins, total, highest, count, BLOCK: tl.constexpr):
    """Atomics: bins [32] by value, the sum and the maximum."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    values = tl.load(x + at, mask=inside, other=0)
    tl.atomic_add(bins + values, 1, mask=inside)
    tl.atomic_add(total + at % 1, values.to(tl.float32), mask=inside)
    tl.atomic_max(highest, tl.max(values, axis=0))


@triton.jit
def tile_product(a, b, out, SIZE: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr):
    """out [SIZE, SIZE] = a [SIZE, INNER] @ b [INNER, SIZE] in one workgroup, any dot type."""
    i = tl.arange(0, SIZE)
    k = tl.arange(0, INNER)
    left = tl.load(a + i[:, None] * INNER + k[None, :])
    right = tl.load(b + k[:, None] * SIZE + i[None, :])
    result = tl.dot(left, right, input_precision=PRECISION, out_dtype=out.dtype.element_ty)
    tl.store(out + i[:, None] * SIZE + i[None, :], result)
