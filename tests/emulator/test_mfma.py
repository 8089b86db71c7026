"""Matrix instructions against float64 products; the documented register layouts spelled out."""

from typing import Any

import numpy as np
import pytest

from liteattention_emulator import snippet

from . import cached
from .test_alu import eight_bit

pytestmark = pytest.mark.usefixtures("variant")

A, B, C, D = 0, 16, 64, 128  # registers of the operands in the snippets
Array = Any


#: The 256 values of the 8-bit types.
EIGHT_BIT = {
    kind: np.array([eight_bit(code, mantissa) for code in range(256)])
    for kind, mantissa in (("fp8", 3), ("bf8", 2))
}


def encode(x: Array, kind: str) -> tuple[Array, int]:
    """Bit patterns of values that the type holds exactly, and the type's bits."""
    if kind == "f64":
        return x.astype(np.float64).view(np.uint64), 64
    if kind in ("f32", "xf32"):
        return x.astype(np.float32).view(np.uint32).astype(np.uint64), 32
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16).astype(np.uint64), 16
    if kind == "bf16":
        return x.astype(np.float32).view(np.uint32).astype(np.uint64) >> np.uint64(16), 16
    if kind == "i8":
        return x.astype(np.int8).view(np.uint8).astype(np.uint64), 8
    codes = {v: c for c, v in enumerate(EIGHT_BIT[kind].tolist()) if v == v}
    return np.vectorize(lambda v: codes[v], otypes=[np.uint64])(x), 8


def sample(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    """Random numbers of a type, as float64."""
    if kind == "i8":
        return rng.integers(-128, 128, shape).astype(np.float64)
    if kind in ("fp8", "bf8"):
        return EIGHT_BIT[kind][rng.choice(np.r_[0:0x60, 0x81:0xE0], shape)]
    x = rng.standard_normal(shape)
    if kind == "f16":
        return x.astype(np.float16).astype(np.float64)
    if kind == "bf16":
        bits = x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64)
    if kind == "xf32":
        bits = x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
        return bits.view(np.float32).astype(np.float64)
    return x if kind == "f64" else x.astype(np.float32).astype(np.float64)


def place_input(state: snippet.State, register: int, matrix: Array, kind: str) -> None:
    """[blocks, side, k] into registers: lane = row + side * (block + blocks * (k // n))."""
    blocks, side, depth = matrix.shape
    patterns, bits = encode(matrix, kind)
    n = blocks * side * depth // 64
    for lane in range(64):
        row, block, group = lane % side, lane // side % blocks, lane // (side * blocks)
        packed = 0
        for j in range(n):
            packed |= int(patterns[block, row, group * n + j]) << bits * j
        for r in range(max(n * bits // 32, 1)):
            state.vector[0, register + r, lane] = packed >> 32 * r & 0xFFFFFFFF


def output_place(kind: str, side: int, block: int, row: int, column: int) -> tuple[int, int]:
    """(first register, lane) of an element of C and D."""
    if kind == "f64":
        return (2 * (row // 4), column + 16 * (row % 4)) if side == 16 else (
            0, column + 4 * block + 16 * row)  # fmt: skip
    if side == 4:
        return row, column + 4 * block
    if side == 16:
        return 4 * block + row % 4, column + 16 * (row // 4)
    return 16 * block + 4 * (row // 8) + row % 4, column + 32 * (row // 4 % 2)


def output(
    state: snippet.State, register: int, kind: str, blocks: int, side: int, write: Array = None
) -> Array:
    """[blocks, side, side] from registers, or into them."""
    result = np.zeros((blocks, side, side))
    for block in range(blocks):
        for row in range(side):
            for column in range(side):
                r, lane = output_place(kind, side, block, row, column)
                words = state.vector[0, register + r : register + r + 1 + (kind == "f64"), lane]
                dtype = {"f64": np.float64, "i32": np.int32}.get(kind, np.float32)
                if write is not None:
                    words[:] = np.array([write[block, row, column]], dtype).view(np.uint32)
                result[block, row, column] = words.copy().view(dtype)[0]
    return result


SHAPES = [
    # mnemonic, type of A, of B, of C and D, side, depth, blocks
    *[(f"f32_{n}_{t}", t, t, "f32", side, depth, blocks) for t in ("f16", "bf16")
      for n, side, depth, blocks in (("32x32x4_2b", 32, 4, 2), ("16x16x4_4b", 16, 4, 4),
        ("4x4x4_16b", 4, 4, 16), ("32x32x8", 32, 8, 1), ("16x16x16", 16, 16, 1))],
    *[(f"f32_{n}_f32", "f32", "f32", "f32", side, depth, blocks)
      for n, side, depth, blocks in (("32x32x1_2b", 32, 1, 2), ("16x16x1_4b", 16, 1, 4),
        ("4x4x1_16b", 4, 1, 16), ("32x32x2", 32, 2, 1), ("16x16x4", 16, 4, 1))],
    ("f32_16x16x8_xf32", "xf32", "xf32", "f32", 16, 8, 1),
    ("f32_32x32x4_xf32", "xf32", "xf32", "f32", 32, 4, 1),
    *[(f"i32_{n}_i8", "i8", "i8", "i32", side, depth, blocks)
      for n, side, depth, blocks in (("32x32x4_2b", 32, 4, 2), ("16x16x4_4b", 16, 4, 4),
        ("4x4x4_16b", 4, 4, 16), ("32x32x16", 32, 16, 1), ("16x16x32", 16, 32, 1))],
    ("f64_16x16x4_f64", "f64", "f64", "f64", 16, 4, 1),
    ("f64_4x4x4_4b_f64", "f64", "f64", "f64", 4, 4, 4),
    *[(f"f32_{n}_{a}_{b}", a, b, "f32", side, depth, 1) for a in ("fp8", "bf8")
      for b in ("fp8", "bf8") for n, side, depth in (("16x16x32", 16, 32), ("32x32x16", 32, 16))],
]  # fmt: skip


def span(register: int, dwords: int, file: str = "v") -> str:
    if dwords == 1:
        return f"{file}{register}"
    return f"{file}[{register}:{register + dwords - 1}]"


def dwords(kind: str, side: int, depth: int, blocks: int) -> int:
    bits = {"f64": 64, "f32": 32, "xf32": 32, "f16": 16, "bf16": 16}.get(kind, 8)
    return max(side * depth * blocks // 64 * bits // 32, 1)


@pytest.mark.parametrize(
    ("name", "a", "b", "d", "side", "depth", "blocks"), SHAPES, ids=[s[0] for s in SHAPES]
)
def test_shapes(name: str, a: str, b: str, d: str, side: int, depth: int, blocks: int) -> None:
    rng = np.random.default_rng(1)
    state = snippet.State()
    left, right = sample(rng, a, (blocks, side, depth)), sample(rng, b, (blocks, side, depth))
    start = rng.integers(-9, 10, (blocks, side, side)).astype(np.float64)
    place_input(state, A, left, a)
    place_input(state, B, right, b)
    output(state, C, d, blocks, side, start)
    state.set_s64(snippet.EXEC, 0x1234)  # plays no part
    wide = side * side * blocks // 64 * (2 if d == "f64" else 1)
    ra, rb = span(A, dwords(a, side, depth, blocks)), span(B, dwords(b, side, depth, blocks))
    text = f"v_mfma_{name} {span(D, wide)}, {ra}, {rb}, {span(C, wide)}\n"
    text += f"v_mfma_{name} {span(0, wide, 'a')}, {ra}, {rb}, 0\n"
    text += f"v_mfma_{name} {span(C, wide)}, {ra}, {rb}, {span(C, wide)}"  # in place
    cached.run(text, state)
    product = np.einsum("bik,bjk->bij", left, right)
    scale = np.einsum("bik,bjk->bij", abs(left), abs(right)) + 9
    tolerance = 0 if d == "i32" else scale * (depth + 1) * (2.0**-53 if d == "f64" else 2.0**-24)
    for register, base in ((D, start), (256, 0 * start), (C, start)):
        got = output(state, register, d, blocks, side)
        assert (abs(got - product - base) <= tolerance).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_small_integers_are_exact_and_subnormals_count(kind: str) -> None:
    rng = np.random.default_rng(2)
    state = snippet.State()
    left, right = (rng.integers(-8, 9, (1, 16, 16)).astype(float) for _ in range(2))
    tiny = 2.0**-24 if kind == "f16" else 2.0**-130  # a subnormal input
    left[0, 3] *= tiny
    place_input(state, A, left, kind)
    place_input(state, B, right, kind)
    cached.run(f"v_mfma_f32_16x16x16_{kind} v[128:131], v[0:1], v[16:17], 0", state)
    assert (output(state, D, "f32", 1, 16) == np.einsum("bik,bjk->bij", left, right)).all()


def test_sum_is_fused_and_in_order_of_k() -> None:
    """2^24 + 1 + 1 ... loses each 1 in turn; a sum of the products first would not."""
    state = snippet.State()
    left, right = np.zeros((1, 16, 16)), np.zeros((1, 16, 16))
    left[0, :, :8], right[0, :, :8] = 1, 1
    place_input(state, A, left, "bf16")
    place_input(state, B, right, "bf16")
    output(state, C, "f32", 1, 16, np.full((1, 16, 16), 2.0**24))
    cached.run("v_mfma_f32_16x16x16_bf16 v[128:131], v[0:1], v[16:17], v[64:67]", state)
    assert (output(state, D, "f32", 1, 16) == 2.0**24).all()
    left[0, :, 0] = 2.0**24
    place_input(state, A, left, "bf16")
    output(state, C, "f32", 1, 16, np.full((1, 16, 16), 1.0 - 2.0**24))
    cached.run("v_mfma_f32_16x16x16_bf16 v[128:131], v[0:1], v[16:17], v[64:67]", state)
    assert (output(state, D, "f32", 1, 16) == 8).all()


@pytest.mark.parametrize(("cbsz", "abid"), [(1, 0), (1, 1), (2, 3), (4, 9)])
def test_one_block_of_a_for_several(cbsz: int, abid: int) -> None:
    rng = np.random.default_rng(3)
    state = snippet.State()
    left, right = (rng.integers(-8, 9, (16, 4, 4)).astype(float) for _ in range(2))
    place_input(state, A, left, "f16")
    place_input(state, B, right, "f16")
    cached.run(
        f"v_mfma_f32_4x4x4_16b_f16 v[128:131], v[0:1], v[16:17], 0 cbsz:{cbsz} abid:{abid}", state
    )
    used = left[[block // 2**cbsz * 2**cbsz + abid for block in range(16)]]
    assert (output(state, D, "f32", 16, 4) == np.einsum("bik,bjk->bij", used, right)).all()


GROUPS = {
    1: [0, 1, 0, 1],
    2: [2, 3, 2, 3],
    3: [1, 2, 3, 0],
    4: [0] * 4,
    5: [1] * 4,
    6: [2] * 4,
    7: [3] * 4,
}


@pytest.mark.parametrize("blgp", GROUPS)
def test_lane_groups_of_b(blgp: int) -> None:
    rng = np.random.default_rng(4)
    state = snippet.State()
    left, right = (rng.integers(-8, 9, (1, 32, 2)).astype(float) for _ in range(2))
    place_input(state, A, left, "f32")
    place_input(state, B, right, "f32")
    before = state.vector[0, B].copy()
    cached.run(f"v_mfma_f32_32x32x2_f32 v[128:143], v0, v16, 0 blgp:{blgp}", state)
    moved = snippet.State()
    place_input(moved, A, left, "f32")
    for group, source in enumerate(GROUPS[blgp]):
        moved.vector[0, B, 16 * group : 16 * group + 16] = before[16 * source : 16 * source + 16]
    cached.run("v_mfma_f32_32x32x2_f32 v[128:143], v0, v16, 0", moved)
    assert (state.vector[0, D : D + 16] == moved.vector[0, D : D + 16]).all()
    assert state.vector[0, D : D + 16].any()


def test_negation_of_doubles() -> None:
    rng = np.random.default_rng(5)
    left, right = rng.standard_normal((2, 1, 16, 4))
    start = rng.standard_normal((1, 16, 16))
    for bits in range(8):
        state = snippet.State()
        place_input(state, A, left, "f64")
        place_input(state, B, right, "f64")
        output(state, C, "f64", 1, 16, start)
        neg = f"neg:[{bits & 1},{bits >> 1 & 1},{bits >> 2 & 1}]" if bits else ""
        cached.run(f"v_mfma_f64_16x16x4_f64 v[128:135], v[0:1], v[16:17], v[64:71] {neg}", state)
        want = np.einsum("bik,bjk->bij", left, right) * (-1) ** (bits.bit_count() - (bits >> 2))
        want = want + start * (-1) ** (bits >> 2)
        assert np.allclose(output(state, D, "f64", 1, 16), want, rtol=0, atol=1e-14)


SPARSE = [
    *[(f"f32_16x16x32_{t}", t, t, "f32", 16, 32) for t in ("f16", "bf16")],
    *[(f"f32_32x32x16_{t}", t, t, "f32", 32, 16) for t in ("f16", "bf16")],
    ("i32_16x16x64_i8", "i8", "i8", "i32", 16, 64), ("i32_32x32x32_i8", "i8", "i8", "i32", 32, 32),
    *[(f"f32_{n}_{a}_{b}", a, b, "f32", side, depth) for a in ("fp8", "bf8") for b in ("fp8", "bf8")
      for n, side, depth in (("16x16x64", 16, 64), ("32x32x32", 32, 32))],
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "a", "b", "d", "side", "depth"), SPARSE, ids=[s[0] for s in SPARSE]
)
def test_structured_sparsity(name: str, a: str, b: str, d: str, side: int, depth: int) -> None:
    rng = np.random.default_rng(6)
    state = snippet.State()
    kept, right = sample(rng, a, (1, side, depth // 2)), sample(rng, b, (1, side, depth))
    start = rng.integers(-9, 10, (1, side, side)).astype(float)
    # two different positions of each four, ascending
    choices = np.array([(x, y) for x in range(4) for y in range(x + 1, 4)])
    picked = choices[rng.integers(0, 6, (side, depth // 4))].reshape(side, depth // 2)
    dense = np.zeros((1, side, depth))
    for row in range(side):
        for n in range(depth // 2):
            dense[0, row, 4 * (n // 2) + picked[row, n]] = kept[0, row, n]
    place_input(state, A, kept, a)
    place_input(state, B, right, b)
    values = side * depth // 2 // 64
    abid = 32 // (2 * values) - 1  # the uppermost set of positions
    for lane in range(64):
        first = values * (lane // side)
        index = sum(int(picked[lane % side, first + j]) << 2 * j for j in range(values))
        state.vector[0, 40, lane] = index << 2 * values * abid
    output(state, D, d, 1, side, start)
    wide = side * side // 64
    text = f"v_smfmac_{name} {span(D, wide)}, v[0:1], v[16:19], v40 abid:{abid}"
    cached.run(text, state)
    want = np.einsum("bik,bjk->bij", dense, right) + start
    scale = np.einsum("bik,bjk->bij", abs(dense), abs(right)) + 9
    tolerance = 0 if d == "i32" else scale * (depth + 1) * 2.0**-24
    assert (abs(output(state, D, d, 1, side) - want) <= tolerance).all()
