"""Scalar and vector instructions of the emulator against exact arithmetic.

Every operation runs on 8 waves of 64 lanes of special and random values; what numpy's integers,
rational numbers or float64 say about the same lanes is the oracle. Many instructions go into one
snippet, so that the assembler is called a few times only.
"""

import importlib.util
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from liteattention_emulator import listing, native, snippet

from . import cached

pytestmark = pytest.mark.usefixtures("variant")

WAVES, LANES = 8, 64
M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
Rule = Callable[..., int]

F16, F32, F64 = (5, 10), (8, 23), (11, 52)  # exponent and mantissa bits
SPECIAL = {
    F32: [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 1, 0x80000001,
          0x7FFFFF, 0x800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0xBF800000, 0x40000000,
          0x3F000000, 0x4B800000, 0x4F000000, 0xCF000000, 0x4F7FFFFF, 0x42FE0000, 0xC2FC0000],
    F64: [0, 1 << 63, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, (0x7FF << 52) + 1, 1, (1 << 52) - 1,
          1 << 52, (0x7FF << 52) - 1, 0x3FF << 52, 0xBFF << 52, 0x41E << 52, 0x40590 << 44],
    F16: [0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7D01, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF,
          0x3C00, 0xBC00, 0x4000, 0x3800, 0x6400],
}  # fmt: skip
INTEGERS = [0, 1, 2, 31, 32, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFF, 0x800000,
            0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x55555555]  # fmt: skip


# ---- numbers


def is_nan(bits: int, fmt: tuple[int, int]) -> bool:
    e, m = fmt
    return bits & ((1 << (e + m)) - 1) > ((1 << e) - 1) << m


def is_inf(bits: int, fmt: tuple[int, int]) -> bool:
    e, m = fmt
    return bits & ((1 << (e + m)) - 1) == ((1 << e) - 1) << m


def negative(bits: int, fmt: tuple[int, int]) -> bool:
    return bool(bits >> sum(fmt) & 1)


def value(bits: int, fmt: tuple[int, int]) -> Fraction:
    """Exact value of a finite number."""
    e, m = fmt
    exponent, mantissa = bits >> m & ((1 << e) - 1), bits & ((1 << m) - 1)
    bias = (1 << (e - 1)) - 1
    if exponent:
        mantissa |= 1 << m
    number = Fraction(mantissa) * Fraction(2) ** (max(exponent, 1) - bias - m)
    return -number if negative(bits, fmt) else number


def rounded(x: Fraction, fmt: tuple[int, int], zero_sign: bool = False, mode: int = 0) -> int:
    """Bits of x in a format; mode 0 nearest even, 1 up, 2 down, 3 towards zero."""
    e, m = fmt
    sign = (x < 0 or (x == 0 and zero_sign)) << (e + m)
    if x == 0:
        return sign
    a, bias = abs(x), (1 << (e - 1)) - 1
    exponent = a.numerator.bit_length() - a.denominator.bit_length()
    if Fraction(2) ** exponent > a:
        exponent -= 1
    exponent = max(exponent, 1 - bias)
    scaled = a / Fraction(2) ** (exponent - m)
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1)
    if mode:
        up = bool(rest) and mode == (2 if sign else 1)
    whole += up
    bits = whole + ((exponent + bias - 1) << m)
    top = ((1 << e) - 1) << m
    if bits >= top:
        bits = top if mode in (0, 2 if sign else 1) else top - 1
    return sign | bits


def quiet_nan(fmt: tuple[int, int]) -> int:
    return ((1 << (fmt[0] + 1)) - 1) << (fmt[1] - 1)


def fma(a: int, b: int, c: int, fmt: tuple[int, int], mode: int = 0) -> int:
    if any(is_nan(x, fmt) for x in (a, b, c)):
        return quiet_nan(fmt)
    product_sign = negative(a, fmt) != negative(b, fmt)
    infinity = ((1 << fmt[0]) - 1) << fmt[1]
    if is_inf(a, fmt) or is_inf(b, fmt):
        other = b if is_inf(a, fmt) else a
        if (not is_inf(other, fmt) and value(other, fmt) == 0) or (
            is_inf(c, fmt) and negative(c, fmt) != product_sign
        ):
            return quiet_nan(fmt)
        return infinity | product_sign << sum(fmt)
    if is_inf(c, fmt):
        return c
    product, addend = value(a, fmt) * value(b, fmt), value(c, fmt)
    minus = mode == 2  # the sign of an exact zero of two signs
    if product == 0 and addend == 0 and product_sign == negative(c, fmt):
        minus = product_sign
    return rounded(product + addend, fmt, minus, mode)


def one(fmt: tuple[int, int]) -> int:
    return ((1 << (fmt[0] - 1)) - 1) << fmt[1]


def add(a: int, b: int, fmt: tuple[int, int]) -> int:
    return fma(a, one(fmt), b, fmt)


def flip(a: int, fmt: tuple[int, int]) -> int:
    return a ^ 1 << sum(fmt)


def mul(a: int, b: int, fmt: tuple[int, int]) -> int:
    sign = negative(a, fmt) != negative(b, fmt)
    return fma(a, b, sign << sum(fmt), fmt)


def order(a: int, fmt: tuple[int, int]) -> int:
    """Integer that sorts as the numbers do, -0 below +0."""
    return ~(a & ((1 << sum(fmt)) - 1)) if negative(a, fmt) else a


def extreme(a: int, b: int, fmt: tuple[int, int], largest: bool) -> int:
    quiet = 1 << (fmt[1] - 1)
    for x in (a, b):
        if is_nan(x, fmt) and not x & quiet:
            return x | quiet
    if is_nan(a, fmt):
        return b
    if is_nan(b, fmt):
        return a
    pick = max if largest else min
    return pick(a, b, key=lambda x: order(x, fmt))


def extreme3(a: int, b: int, c: int, fmt: tuple[int, int], largest: bool) -> int:
    return extreme(extreme(a, b, fmt, largest), c, fmt, largest)


def median(a: int, b: int, c: int, fmt: tuple[int, int]) -> int:
    if any(is_nan(x, fmt) for x in (a, b, c)):
        return extreme3(a, b, c, fmt, False)
    return sorted((a, b, c), key=lambda x: order(x, fmt))[1]


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def bounded(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def to_integer(x: int, fmt: tuple[int, int], low: int, high: int, half_up: int = 0) -> int:
    """Saturating conversion: towards zero, or floor (1), or floor of x + 1/2 (2)."""
    if is_nan(x, fmt):
        return 0
    if is_inf(x, fmt):
        return low if negative(x, fmt) else high
    v = value(x, fmt)
    n = math.floor(v + Fraction(half_up - 1, 2)) if half_up else math.trunc(v)
    return bounded(n, low, high)


def convert(x: int, source: tuple[int, int], to: tuple[int, int], mode: int = 0) -> int:
    if is_nan(x, source):
        return quiet_nan(to)
    if is_inf(x, source):
        return ((1 << to[0]) - 1) << to[1] | negative(x, source) << sum(to)
    return rounded(value(x, source), to, negative(x, source), mode)


def integral(x: int, fmt: tuple[int, int], how: Callable[[Fraction], int]) -> int:
    if is_nan(x, fmt) or is_inf(x, fmt):
        return quiet_nan(fmt) if is_nan(x, fmt) else x
    return rounded(Fraction(how(value(x, fmt))), fmt, negative(x, fmt))


# ---- running


def random_bits(rng: np.random.Generator, kind: object) -> np.ndarray[Any, Any]:
    """uint64 [waves, lanes] of a float format, or of integers of that many bits."""
    shape = (WAVES, LANES)
    if isinstance(kind, tuple):
        e, m = kind
        width = e + m + 1
        near = rng.integers(-8, 9, shape) + ((1 << (e - 1)) - 1)  # magnitudes around 1
        wild = rng.integers(0, 1 << e, shape)
        exponent = np.where(rng.random(shape) < 0.6, near, wild).astype(np.uint64)
        bits = rng.integers(0, 1 << m, shape, dtype=np.uint64) | exponent << np.uint64(m)
        bits |= rng.integers(0, 2, shape, dtype=np.uint64) << np.uint64(width - 1)
        special = np.array(SPECIAL[kind], np.uint64)
        chance = 0.25
    else:
        width = int(kind)  # type: ignore[call-overload]
        bits = rng.integers(0, M64, shape, dtype=np.uint64, endpoint=True)
        bits >>= rng.integers(0, 64, shape, dtype=np.uint64) % np.uint64(width)
        special = np.array(INTEGERS, np.uint64)
        chance = 0.3
    chosen = special[rng.integers(0, len(special), shape)]
    out = np.where(rng.random(shape) < chance, chosen, bits)
    return np.asarray(out & np.uint64((1 << width) - 1 if width < 64 else M64))


PAIR = (0, 0)  # two single-precision results in one number


def same(a: int, b: int, fmt: tuple[int, int]) -> bool:
    """Equal, or both NaN."""
    if fmt == PAIR:
        return same(a & M32, b & M32, F32) and same(a >> 32, b >> 32, F32)
    return a == b or (is_nan(a, fmt) and is_nan(b, fmt))


class Bench:
    """Sources v[2n:2n+1] hold operand n; each case has its own destination registers."""

    def __init__(self, kinds: list[object], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.operands = [random_bits(rng, kind) for kind in kinds]
        self.lines: list[str] = []
        self.checks: list[tuple[str, int, int, Rule, tuple[int, int] | None]] = []
        self.next = 32

    def case(
        self, text: str, rule: Rule, dwords: int = 1, fmt: tuple[int, int] | None = None
    ) -> None:
        """`text` has {d} for the destination; `fmt`: NaNs compare equal whatever their bits."""
        self.next += self.next % 2
        d = f"v[{self.next}:{self.next + dwords - 1}]" if dwords > 1 else f"v{self.next}"
        self.lines.append(text.format(d=d))
        self.checks.append((text, self.next, dwords, rule, fmt))
        self.next += dwords

    def run(self, exec_mask: int = M64, mode: int = snippet.DEFAULT_MODE) -> None:
        state = snippet.State(waves=WAVES)
        state.mode[:] = mode
        fill = 0xDEADBEEF
        state.vector[:, 32:256] = fill
        for n, bits in enumerate(self.operands):
            state.vector[:, 2 * n] = bits & M32
            state.vector[:, 2 * n + 1] = bits >> np.uint64(32)
        for wave in range(WAVES):
            state.set_s64(snippet.EXEC, exec_mask, wave)
        cached.run("\n".join(self.lines), state)
        columns = [bits.reshape(-1).tolist() for bits in self.operands]
        active = np.array([exec_mask >> lane & 1 for lane in range(LANES)], bool)
        everywhere = np.tile(active, WAVES)
        wrong = []
        for text, register, dwords, rule, fmt in self.checks:
            got = state.vector[:, register].astype(np.uint64).reshape(-1)
            before = fill
            if dwords == 2:
                got |= state.vector[:, register + 1].astype(np.uint64).reshape(-1) << np.uint64(32)
                before |= fill << 32
            for lane, values in enumerate(zip(*columns, strict=True)):
                seen = int(got[lane])
                if not everywhere[lane]:
                    if seen != before:
                        wrong.append(f"{text}: inactive lane {lane % 64} became {seen:#x}")
                        break
                    continue
                want = rule(*values)
                if seen == want or (fmt and same(seen, want, fmt)):
                    continue
                inputs = ", ".join(f"{v:#x}" for v in values)
                wrong.append(f"{text}: ({inputs}) gave {seen:#x}, not {want:#x}")
                break
        assert not wrong, "\n".join(wrong)


def u32(rule: Callable[..., int]) -> Rule:
    return lambda *x: rule(*x) & M32


def bfe(a: int, offset: int, width: int, sign: bool) -> int:
    offset, width = offset & 31, width & 31
    if sign:
        a = signed(a)
    field = (a >> offset) & ((1 << width) - 1)
    return (signed(field, width) if sign and width else field) & M32


def permute(a: int, b: int, selector: int) -> int:
    both = [*b.to_bytes(4, "little"), *a.to_bytes(4, "little")]
    out = []
    for s in selector.to_bytes(4, "little"):
        if s < 8:
            out.append(both[s])
        elif s < 12:
            out.append(255 if both[2 * (s - 8) + 1] & 128 else 0)
        else:
            out.append(0 if s == 12 else 255)
    return int.from_bytes(bytes(out), "little")


def differences(a: int, b: int, masked: bool = False) -> int:
    pairs = zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True)
    return sum(abs(x - y) for x, y in pairs if y or not masked)


def clz(x: int, bits: int) -> int:
    return bits - x.bit_length() if x else M32


def ctz(x: int) -> int:
    return (x & -x).bit_length() - 1 if x else M32


def sign_bits(x: int, bits: int) -> int:
    s = signed(x, bits)
    return clz(~s if s < 0 else s, bits)


def i24(x: int) -> int:
    return signed(x, 24)


def sat(x: int, bits: int = 32) -> int:
    return bounded(x, 0, (1 << bits) - 1)


def sats(x: int, bits: int = 32) -> int:
    return bounded(x, -(1 << (bits - 1)), (1 << (bits - 1)) - 1) & ((1 << bits) - 1)


def dot(a: int, b: int, c: int, bits: int, sign: bool) -> int:
    total = signed(c) if sign else c
    for at in range(0, 32, bits):
        x, y = a >> at & ((1 << bits) - 1), b >> at & ((1 << bits) - 1)
        total += signed(x, bits) * signed(y, bits) if sign else x * y
    return total


INT3: dict[str, Rule] = {
    "v_add_u32 {d}, v0, v2": lambda a, b, c: a + b,
    "v_sub_u32 {d}, v0, v2": lambda a, b, c: a - b,
    "v_subrev_u32 {d}, v0, v2": lambda a, b, c: b - a,
    "v_add_u32_e64 {d}, v0, v2 clamp": lambda a, b, c: sat(a + b),
    "v_sub_u32_e64 {d}, v0, v2 clamp": lambda a, b, c: sat(a - b),
    "v_add_i32 {d}, v0, v2": lambda a, b, c: a + b,
    "v_add_i32 {d}, v0, v2 clamp": lambda a, b, c: sats(signed(a) + signed(b)),
    "v_sub_i32 {d}, v0, v2 clamp": lambda a, b, c: sats(signed(a) - signed(b)),
    "v_mul_lo_u32 {d}, v0, v2": lambda a, b, c: a * b,
    "v_mul_hi_u32 {d}, v0, v2": lambda a, b, c: a * b >> 32,
    "v_mul_hi_i32 {d}, v0, v2": lambda a, b, c: signed(a) * signed(b) >> 32,
    "v_mul_i32_i24 {d}, v0, v2": lambda a, b, c: i24(a) * i24(b),
    "v_mul_hi_i32_i24 {d}, v0, v2": lambda a, b, c: i24(a) * i24(b) >> 32,
    "v_mul_u32_u24 {d}, v0, v2": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_hi_u32_u24 {d}, v0, v2": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
    "v_mad_i32_i24 {d}, v0, v2, v4": lambda a, b, c: i24(a) * i24(b) + c,
    "v_mad_u32_u24 {d}, v0, v2, v4": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_u32_u16 {d}, v0, v2, v4": lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c,
    "v_mad_i32_i16 {d}, v0, v2, v4": lambda a, b, c: signed(a, 16) * signed(b, 16) + c,
    "v_min_i32 {d}, v0, v2": lambda a, b, c: min(signed(a), signed(b)),
    "v_max_i32 {d}, v0, v2": lambda a, b, c: max(signed(a), signed(b)),
    "v_min_u32 {d}, v0, v2": lambda a, b, c: min(a, b),
    "v_max_u32 {d}, v0, v2": lambda a, b, c: max(a, b),
    "v_min3_i32 {d}, v0, v2, v4": lambda a, b, c: min(map(signed, (a, b, c))),
    "v_max3_i32 {d}, v0, v2, v4": lambda a, b, c: max(map(signed, (a, b, c))),
    "v_med3_i32 {d}, v0, v2, v4": lambda a, b, c: sorted(map(signed, (a, b, c)))[1],
    "v_min3_u32 {d}, v0, v2, v4": lambda a, b, c: min(a, b, c),
    "v_max3_u32 {d}, v0, v2, v4": lambda a, b, c: max(a, b, c),
    "v_med3_u32 {d}, v0, v2, v4": lambda a, b, c: sorted((a, b, c))[1],
    "v_and_b32 {d}, v0, v2": lambda a, b, c: a & b,
    "v_or_b32 {d}, v0, v2": lambda a, b, c: a | b,
    "v_xor_b32 {d}, v0, v2": lambda a, b, c: a ^ b,
    "v_xnor_b32 {d}, v0, v2": lambda a, b, c: ~(a ^ b),
    "v_not_b32 {d}, v0": lambda a, b, c: ~a,
    "v_lshlrev_b32 {d}, v0, v2": lambda a, b, c: b << (a & 31),
    "v_lshrrev_b32 {d}, v0, v2": lambda a, b, c: b >> (a & 31),
    "v_ashrrev_i32 {d}, v0, v2": lambda a, b, c: signed(b) >> (a & 31),
    "v_lshl_add_u32 {d}, v0, v2, v4": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32 {d}, v0, v2, v4": lambda a, b, c: (a + b) << (c & 31),
    "v_add3_u32 {d}, v0, v2, v4": lambda a, b, c: a + b + c,
    "v_lshl_or_b32 {d}, v0, v2, v4": lambda a, b, c: a << (b & 31) | c,
    "v_and_or_b32 {d}, v0, v2, v4": lambda a, b, c: a & b | c,
    "v_or3_b32 {d}, v0, v2, v4": lambda a, b, c: a | b | c,
    "v_xad_u32 {d}, v0, v2, v4": lambda a, b, c: (a ^ b) + c,
    "v_bfe_u32 {d}, v0, v2, v4": lambda a, b, c: bfe(a, b, c, False),
    "v_bfe_i32 {d}, v0, v2, v4": lambda a, b, c: bfe(a, b, c, True),
    "v_bfi_b32 {d}, v0, v2, v4": lambda a, b, c: a & b | ~a & c,
    "v_bfm_b32 {d}, v0, v2": lambda a, b, c: ((1 << (a & 31)) - 1) << (b & 31),
    "v_alignbit_b32 {d}, v0, v2, v4": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32 {d}, v0, v2, v4": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_perm_b32 {d}, v0, v2, v4": permute,
    "v_bfrev_b32 {d}, v0": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32 {d}, v0": lambda a, b, c: clz(a, 32),
    "v_ffbl_b32 {d}, v0": lambda a, b, c: ctz(a),
    "v_ffbh_i32 {d}, v0": lambda a, b, c: sign_bits(a, 32),
    "v_bcnt_u32_b32 {d}, v0, v2": lambda a, b, c: a.bit_count() + b,
    "v_sad_u8 {d}, v0, v2, v4": lambda a, b, c: differences(a, b) + c,
    "v_sad_hi_u8 {d}, v0, v2, v4": lambda a, b, c: (differences(a, b) << 16) + c,
    "v_msad_u8 {d}, v0, v2, v4": lambda a, b, c: differences(a, b, True) + c,
    "v_sad_u16 {d}, v0, v2, v4": lambda a, b, c: (
        abs((a & 0xFFFF) - (b & 0xFFFF)) + abs((a >> 16) - (b >> 16)) + c
    ),
    "v_sad_u32 {d}, v0, v2, v4": lambda a, b, c: abs(a - b) + c,
    "v_cvt_pk_u16_u32 {d}, v0, v2": lambda a, b, c: sat(a, 16) | sat(b, 16) << 16,
    "v_cvt_pk_i16_i32 {d}, v0, v2": lambda a, b, c: sats(signed(a), 16) | sats(signed(b), 16) << 16,
    "v_dot4_i32_i8 {d}, v0, v2, v4": lambda a, b, c: dot(a, b, c, 8, True),
    "v_dot4_u32_u8 {d}, v0, v2, v4": lambda a, b, c: dot(a, b, c, 8, False),
    "v_dot4_u32_u8 {d}, v0, v2, v4 clamp": lambda a, b, c: sat(dot(a, b, c, 8, False)),
    "v_dot8_i32_i4 {d}, v0, v2, v4": lambda a, b, c: dot(a, b, c, 4, True),
    "v_dot8_u32_u4 {d}, v0, v2, v4": lambda a, b, c: dot(a, b, c, 4, False),
    "v_dot2_i32_i16 {d}, v0, v2, v4": lambda a, b, c: dot(a, b, c, 16, True),
    "v_dot2_u32_u16 {d}, v0, v2, v4": lambda a, b, c: dot(a, b, c, 16, False),
    # literals and inline constants
    "v_add_u32 {d}, 0x12345678, v2": lambda a, b, c: 0x12345678 + b,
    "v_and_b32 {d}, -16, v2": lambda a, b, c: -16 & b,
    "v_or_b32 {d}, 64, v2": lambda a, b, c: 64 | b,
    "v_xor_b32 {d}, 1.0, v2": lambda a, b, c: 0x3F800000 ^ b,
    "v_xor_b32 {d}, 0.15915494, v2": lambda a, b, c: 0x3E22F983 ^ b,
    "v_perm_b32 {d}, v0, v2, 0": lambda a, b, c: permute(a, b, 0),
    # SDWA
    "v_add_u32_sdwa {d}, v0, v2 dst_sel:DWORD src0_sel:BYTE_1 src1_sel:WORD_1": lambda a, b, c: (
        (a >> 8 & 255) + (b >> 16)
    ),
    "v_add_u32_sdwa {d}, sext(v0), sext(v2) dst_sel:WORD_1 dst_unused:UNUSED_PAD "
    "src0_sel:BYTE_3 src1_sel:WORD_0": lambda a, b, c: (
        (signed(a >> 24, 8) + signed(b, 16) & 0xFFFF) << 16
    ),
    "v_or_b32_sdwa {d}, v0, v2 dst_sel:BYTE_1 dst_unused:UNUSED_SEXT src0_sel:DWORD "
    "src1_sel:DWORD": lambda a, b, c: signed((a | b) & 255, 8) << 8,
    "v_or_b32_sdwa {d}, v0, v2 dst_sel:WORD_0 dst_unused:UNUSED_PRESERVE src0_sel:DWORD "
    "src1_sel:BYTE_2": lambda a, b, c: (a | b >> 16 & 255) & 0xFFFF | 0xDEAD0000,
}  # fmt: skip


@pytest.mark.parametrize("mask", [M64, 0xF0F0_00FF_8000_0001], ids=["all", "some"])
def test_integers(mask: int) -> None:
    bench = Bench([32, 32, 32], 1)
    for text, rule in INT3.items():
        bench.case(text, u32(rule))
    bench.run(mask)


def test_permutation_by_a_scalar() -> None:
    bench = Bench([32, 32], 2)
    for selector in (0x07060302, 0x05040100, 0x0C0C0703, 0x080B0A09, 0x0D0C0B04):
        bench.lines.append(f"s_mov_b32 s0, {selector:#x}")
        bench.case("v_perm_b32 {d}, v0, v2, s0", lambda a, b, s=selector: permute(a, b, s))
    bench.run()


def test_64_bit_integers() -> None:
    bench = Bench([64, 64, 64], 3)
    cases: dict[str, Rule] = {
        "v_lshl_add_u64 {d}, v[0:1], 3, v[4:5]": lambda a, b, c: (a << 3) + c,
        "v_lshlrev_b64 {d}, v2, v[0:1]": lambda a, b, c: a << (b & 63),
        "v_lshrrev_b64 {d}, v2, v[0:1]": lambda a, b, c: a >> (b & 63),
        "v_ashrrev_i64 {d}, v2, v[0:1]": lambda a, b, c: signed(a, 64) >> (b & 63),
        "v_mad_u64_u32 {d}, s[0:1], v0, v2, v[4:5]": lambda a, b, c: (a & M32) * (b & M32) + c,
        "v_mad_i64_i32 {d}, s[0:1], v0, v2, v[4:5]": lambda a, b, c: signed(a) * signed(b) + c,
        "v_mov_b64 {d}, v[0:1]": lambda a, b, c: a,
        "v_mov_b64 {d}, -5": lambda a, b, c: -5,
        "v_pk_mov_b32 {d}, v[0:1], v[2:3] op_sel:[1,0]": lambda a, b, c: a >> 32 | b << 32,
        "v_pk_mov_b32 {d}, v[0:1], v[2:3] op_sel:[0,1]": lambda a, b, c: a & M32 | b >> 32 << 32,
        "v_mqsad_pk_u16_u8 {d}, v[0:1], v2, v[4:5]": lambda a, b, c: sum(
            min(differences(a >> 8 * n & M32, b & M32, True) + (c >> 16 * n & 0xFFFF), 0xFFFF)
            << 16 * n
            for n in range(4)
        ),
    }
    for text, rule in cases.items():
        bench.case(text, lambda *x, r=rule: r(*x) & M64, 2)
    bench.run()


def pair(rule: Callable[[int, int], int]) -> Rule:
    """Both halves of two registers."""
    return lambda a, b, c: (
        (rule(a & 0xFFFF, b & 0xFFFF) & 0xFFFF) | ((rule(a >> 16, b >> 16) & 0xFFFF) << 16)
    )


def test_16_bit_integers() -> None:
    bench = Bench([32, 32, 32], 4)
    s = lambda x: signed(x, 16)  # noqa: E731
    clear: dict[str, Rule] = {  # the upper half of the result becomes zero
        "v_add_u16 {d}, v0, v2": lambda a, b, c: a + b,
        "v_add_u16_e64 {d}, v0, v2 clamp": lambda a, b, c: sat((a & 0xFFFF) + (b & 0xFFFF), 16),
        "v_sub_u16 {d}, v0, v2": lambda a, b, c: a - b,
        "v_subrev_u16 {d}, v0, v2": lambda a, b, c: b - a,
        "v_mul_lo_u16 {d}, v0, v2": lambda a, b, c: a * b,
        "v_lshlrev_b16 {d}, v0, v2": lambda a, b, c: b << (a & 15),
        "v_lshrrev_b16 {d}, v0, v2": lambda a, b, c: (b & 0xFFFF) >> (a & 15),
        "v_ashrrev_i16 {d}, v0, v2": lambda a, b, c: s(b) >> (a & 15),
        "v_max_u16 {d}, v0, v2": lambda a, b, c: max(a & 0xFFFF, b & 0xFFFF),
        "v_min_u16 {d}, v0, v2": lambda a, b, c: min(a & 0xFFFF, b & 0xFFFF),
        "v_max_i16 {d}, v0, v2": lambda a, b, c: max(s(a), s(b)),
        "v_min_i16 {d}, v0, v2": lambda a, b, c: min(s(a), s(b)),
    }
    keep: dict[str, Rule] = {  # the other half stays
        "v_mad_u16 {d}, v0, v2, v4": lambda a, b, c: a * b + c,
        "v_mad_i16 {d}, v0, v2, v4 clamp": lambda a, b, c: sats(s(a) * s(b) + s(c), 16),
        "v_add_i16 {d}, v0, v2": lambda a, b, c: a + b,
        "v_sub_i16 {d}, v0, v2 clamp": lambda a, b, c: sats(s(a) - s(b), 16),
        "v_min3_i16 {d}, v0, v2, v4": lambda a, b, c: min(s(a), s(b), s(c)),
        "v_max3_u16 {d}, v0, v2, v4": lambda a, b, c: max(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF),
        "v_med3_i16 {d}, v0, v2, v4": lambda a, b, c: sorted((s(a), s(b), s(c)))[1],
    }
    for text, rule in clear.items():
        bench.case(text, lambda *x, r=rule: r(*x) & 0xFFFF)
    for text, rule in keep.items():
        bench.case(text, lambda *x, r=rule: r(*x) & 0xFFFF | 0xDEAD0000)
    bench.case(
        "v_mad_u16 {d}, v0, v2, v4 op_sel:[1,0,1,1]",
        lambda a, b, c: ((a >> 16) * b + (c >> 16) & 0xFFFF) << 16 | 0xBEEF,
    )
    packed = {
        "v_pk_add_u16 {d}, v0, v2": pair(lambda a, b: a + b),
        "v_pk_add_i16 {d}, v0, v2 clamp": pair(lambda a, b: sats(s(a) + s(b), 16)),
        "v_pk_sub_u16 {d}, v0, v2 clamp": pair(lambda a, b: sat(a - b, 16)),
        "v_pk_sub_i16 {d}, v0, v2": pair(lambda a, b: a - b),
        "v_pk_mul_lo_u16 {d}, v0, v2": pair(lambda a, b: a * b),
        "v_pk_lshlrev_b16 {d}, v0, v2": pair(lambda a, b: b << (a & 15)),
        "v_pk_lshrrev_b16 {d}, v0, v2": pair(lambda a, b: b >> (a & 15)),
        "v_pk_ashrrev_i16 {d}, v0, v2": pair(lambda a, b: s(b) >> (a & 15)),
        "v_pk_max_i16 {d}, v0, v2": pair(lambda a, b: max(s(a), s(b))),
        "v_pk_min_u16 {d}, v0, v2": pair(min),
        "v_pk_add_u16 {d}, v0, v2 op_sel:[1,0] op_sel_hi:[0,1]": lambda a, b, c: (
            ((a >> 16) + b & 0xFFFF) | ((a & 0xFFFF) + (b >> 16) & 0xFFFF) << 16
        ),
        "v_pk_mad_u16 {d}, v0, v2, v4": lambda a, b, c: (
            (a * b + c & 0xFFFF) | ((a >> 16) * (b >> 16) + (c >> 16) & 0xFFFF) << 16
        ),
    }
    for text, rule in packed.items():
        bench.case(text, rule)
    bench.run()


def float_cases(fmt: tuple[int, int]) -> dict[str, Rule]:
    """Operations that exist in single, double and half precision."""
    t = {F16: "f16", F32: "f32", F64: "f64"}[fmt]
    a, b, c = ("v[0:1]", "v[2:3]", "v[4:5]") if fmt == F64 else ("v0", "v2", "v4")
    sign = 1 << sum(fmt)
    cases: dict[str, Rule] = {
        f"v_add_{t} {{d}}, {a}, {b}": lambda x, y, z: add(x, y, fmt),
        f"v_mul_{t} {{d}}, {a}, {b}": lambda x, y, z: mul(x, y, fmt),
        f"v_min_{t} {{d}}, {a}, {b}": lambda x, y, z: extreme(x, y, fmt, False),
        f"v_max_{t} {{d}}, {a}, {b}": lambda x, y, z: extreme(x, y, fmt, True),
        f"v_add_{t}_e64 {{d}}, -{a}, |{b}|": lambda x, y, z: add(flip(x, fmt), y & ~sign, fmt),
        f"v_mul_{t}_e64 {{d}}, -|{a}|, 2.0": lambda x, y, z: mul(
            x | sign, rounded(Fraction(2), fmt), fmt
        ),
        f"v_trunc_{t} {{d}}, {a}": lambda x, y, z: integral(x, fmt, math.trunc),
        f"v_floor_{t} {{d}}, {a}": lambda x, y, z: integral(x, fmt, math.floor),
        f"v_ceil_{t} {{d}}, {a}": lambda x, y, z: integral(x, fmt, math.ceil),
        f"v_rndne_{t} {{d}}, {a}": lambda x, y, z: integral(x, fmt, round),
    }
    if fmt != F16:
        cases[f"v_fma_{t} {{d}}, {a}, {b}, {c}"] = lambda x, y, z: fma(x, y, z, fmt)
        cases[f"v_fma_{t} {{d}}, {a}, -{b}, |{c}|"] = lambda x, y, z: fma(
            x, flip(y, fmt), z & ~sign, fmt
        )
    if fmt != F64:
        cases |= {
            f"v_sub_{t} {{d}}, {a}, {b}": lambda x, y, z: add(x, flip(y, fmt), fmt),
            f"v_subrev_{t} {{d}}, {a}, {b}": lambda x, y, z: add(y, flip(x, fmt), fmt),
        }
    return cases


def unit_clamp(x: int, fmt: tuple[int, int]) -> int:
    if is_nan(x, fmt) or negative(x, fmt):
        return 0
    return min(x, one(fmt))


@pytest.mark.parametrize("mask", [M64, 0x0123_4567_89AB_CDEF], ids=["all", "some"])
def test_single_precision(mask: int) -> None:
    bench = Bench([F32, F32, F32], 5)
    cases = float_cases(F32) | {
        "v_min3_f32 {d}, v0, v2, v4": lambda a, b, c: extreme3(a, b, c, F32, False),
        "v_max3_f32 {d}, v0, v2, v4": lambda a, b, c: extreme3(a, b, c, F32, True),
        "v_med3_f32 {d}, v0, v2, v4": lambda a, b, c: median(a, b, c, F32),
        "v_fmamk_f32 {d}, v0, 0x40490fdb, v4": lambda a, b, c: fma(a, 0x40490FDB, c, F32),
        "v_fmaak_f32 {d}, v0, v2, 0x40490fdb": lambda a, b, c: fma(a, b, 0x40490FDB, F32),
        "v_add_f32_e64 {d}, v0, v2 clamp": lambda a, b, c: unit_clamp(add(a, b, F32), F32),
        "v_mul_f32 {d}, 0x3fb8aa3b, v2": lambda a, b, c: mul(0x3FB8AA3B, b, F32),
        "v_mul_f32 {d}, -4.0, v2": lambda a, b, c: mul(0xC0800000, b, F32),
        "v_add_f32 {d}, 0.15915494, v2": lambda a, b, c: add(0x3E22F983, b, F32),
        "v_mul_legacy_f32 {d}, v0, v2": lambda a, b, c: (
            0 if 0 in (a & 0x7FFFFFFF, b & 0x7FFFFFFF) else mul(a, b, F32)
        ),
        "v_ldexp_f32 {d}, v0, 12": lambda a, b, c: mul(a, 0x45800000, F32),
        "v_ldexp_f32 {d}, v0, -16": lambda a, b, c: mul(a, 0x37800000, F32),
    }
    for text, rule in cases.items():
        bench.case(text, rule, fmt=F32)
    bench.case("v_mov_b32 {d}, v4\nv_fmac_f32 {d}, v0, v2", lambda a, b, c: fma(a, b, c, F32),
               fmt=F32)  # fmt: skip
    bench.run(mask)


def test_output_modifier_scales_the_result() -> None:
    bench = Bench([F32, F32], 6)
    for text, factor in (("mul:2", 0x40000000), ("mul:4", 0x40800000), ("div:2", 0x3F000000)):
        bench.case(
            "v_add_f32_e64 {d}, v0, v2 " + text,
            lambda a, b, f=factor: mul(add(a, b, F32), f, F32), fmt=F32,
        )  # fmt: skip
    bench.run()


def test_double_precision() -> None:
    bench = Bench([F64, F64, F64], 7)
    for text, rule in float_cases(F64).items():
        bench.case(text.replace("_e64", ""), rule, 2, F64)
    bench.case("v_ldexp_f64 {d}, v[0:1], 60",
               lambda a, b, c: mul(a, (1023 + 60) << 52, F64), 2, F64)  # fmt: skip
    bench.run()


def test_half_precision() -> None:
    bench = Bench([F16, F16, F16], 8)
    for text, rule in float_cases(F16).items():
        bench.case(text, rule, fmt=F16)
    keep = {
        "v_fma_f16 {d}, v0, v2, v4": lambda a, b, c: fma(a, b, c, F16),
        "v_min3_f16 {d}, v0, v2, v4": lambda a, b, c: extreme3(a, b, c, F16, False),
        "v_med3_f16 {d}, v0, v2, v4": lambda a, b, c: median(a, b, c, F16),
    }
    for text, rule in keep.items():
        bench.case(text + "\nv_and_b32 {d}, 0xffff, {d}", rule, fmt=F16)
        bench.case(text + "\nv_and_b32 {d}, 0xffff0000, {d}", lambda *x: 0xDEAD0000)
    bench.case(
        "v_fma_f16 {d}, v0, v2, v4 op_sel:[0,0,0,1]\nv_lshrrev_b32 {d}, 16, {d}",
        keep["v_fma_f16 {d}, v0, v2, v4"], fmt=F16,
    )  # fmt: skip
    bench.run()


def test_packed_half_precision() -> None:
    bench = Bench([F16, F16, F16], 9)
    bench.lines.append(  # halves (a, b), (b, c), (c, a)
        "v_lshl_or_b32 v16, v2, 16, v0\nv_lshl_or_b32 v17, v4, 16, v2\n"
        "v_lshl_or_b32 v18, v0, 16, v4"
    )
    rules: dict[str, tuple[Rule, Rule]] = {
        "v_pk_fma_f16 {d}, v16, v17, v18": (
            lambda a, b, c: fma(a, b, c, F16), lambda a, b, c: fma(b, c, a, F16)),
        "v_pk_add_f16 {d}, v16, v17": (
            lambda a, b, c: add(a, b, F16), lambda a, b, c: add(b, c, F16)),
        "v_pk_mul_f16 {d}, v16, v17 neg_lo:[1,0] neg_hi:[0,1]": (
            lambda a, b, c: mul(flip(a, F16), b, F16), lambda a, b, c: mul(b, flip(c, F16), F16)),
        "v_pk_max_f16 {d}, v16, v17 op_sel:[1,0] op_sel_hi:[0,0]": (
            lambda a, b, c: extreme(b, b, F16, True), lambda a, b, c: extreme(a, b, F16, True)),
        "v_pk_min_f16 {d}, v16, v17": (
            lambda a, b, c: extreme(a, b, F16, False), lambda a, b, c: extreme(b, c, F16, False)),
    }  # fmt: skip
    for text, (low, high) in rules.items():
        bench.case(text + "\nv_and_b32 {d}, 0xffff, {d}", low, fmt=F16)
        bench.case(text + "\nv_lshrrev_b32 {d}, 16, {d}", high, fmt=F16)
    bench.run()


def both(rule: Rule, *picks: int) -> Rule:
    """A rule of single-precision operands for the low and the high halves of pairs.

    ``picks``: for each operand which half the low (bit 0) and the high result (bit 1) reads; 2 is
    the ordinary choice.
    """

    def pairs(*x: int) -> int:
        chosen = picks or (2,) * len(x)
        halves = []
        for h in (0, 1):
            operands = [v >> 32 * (p >> h & 1) & M32 for v, p in zip(x, chosen, strict=False)]
            halves.append(rule(*operands))
        return halves[0] | halves[1] << 32

    return pairs


def test_packed_single_precision() -> None:
    bench = Bench([F32] * 6, 10)
    low, high = bench.operands[:3], bench.operands[3:]
    bench.operands = [a | b << np.uint64(32) for a, b in zip(low, high, strict=True)]
    bench.lines.append("s_mov_b32 s0, 0x40490fdb\ns_mov_b32 s1, 0x402df854")
    pi = 0x40490FDB
    cases: dict[str, Rule] = {
        "v_pk_fma_f32 {d}, v[0:1], v[2:3], v[4:5]": both(lambda a, b, c: fma(a, b, c, F32)),
        "v_pk_mul_f32 {d}, v[0:1], v[2:3]": both(lambda a, b, c: mul(a, b, F32)),
        "v_pk_add_f32 {d}, v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,0]": both(
            lambda a, b: add(a, b, F32), 1, 0
        ),
        "v_pk_mul_f32 {d}, v[0:1], s[0:1] op_sel_hi:[1,0]": both(lambda a, b, c: mul(a, pi, F32)),
        "v_pk_add_f32 {d}, v[0:1], v[2:3] neg_lo:[1,0] neg_hi:[1,0]": both(
            lambda a, b, c: add(flip(a, F32), b, F32)
        ),
        "v_pk_add_f32 {d}, v[0:1], v[2:3] clamp": both(
            lambda a, b, c: unit_clamp(add(a, b, F32), F32)
        ),
    }
    for text, rule in cases.items():
        bench.case(text, rule, 2, PAIR)
    # the destination may be a source, too
    bench.case("v_mov_b64 {d}, v[0:1]\nv_pk_mul_f32 {d}, {d}, v[2:3] op_sel:[1,0] op_sel_hi:[0,1]",
               both(lambda a, b: mul(a, b, F32), 1, 2), 2, PAIR)  # fmt: skip
    bench.run()


def test_mixed_precision() -> None:
    bench = Bench([F32, F32, F32, F16, F16], 24)
    bench.lines.append("v_lshl_or_b32 v16, v8, 16, v6")  # halves d, e
    half = lambda x: convert(x, F16, F32)  # noqa: E731
    cases: dict[str, tuple[Rule, tuple[int, int]]] = {
        "v_fma_mix_f32 {d}, v16, v2, v4 op_sel_hi:[1,0,0]": (
            lambda a, b, c, d, e: fma(half(d), b, c, F32), F32),
        "v_fma_mix_f32 {d}, -v16, v16, |v4| op_sel:[1,0,0] op_sel_hi:[1,1,0]": (
            lambda a, b, c, d, e: fma(flip(half(e), F32), half(d), c & 0x7FFFFFFF, F32), F32),
        "v_fma_mixlo_f16 {d}, v0, v2, v4\nv_and_b32 {d}, 0xffff, {d}": (
            lambda a, b, c, d, e: convert(fma(a, b, c, F32), F32, F16), F16),
        "v_fma_mixhi_f16 {d}, v0, v2, v4\nv_lshrrev_b32 {d}, 16, {d}": (
            lambda a, b, c, d, e: convert(fma(a, b, c, F32), F32, F16), F16),
        "v_fma_mixhi_f16 {d}, v0, v2, v4\nv_and_b32 {d}, 0xffff, {d}": (
            lambda a, b, c, d, e: 0xBEEF, F16),
        "v_dot2_f32_f16 {d}, v16, v16, v4": (
            lambda a, b, c, d, e: fma(half(e), half(e), fma(half(d), half(d), c, F32), F32), F32),
        "v_mov_b32 {d}, v4\nv_dot2c_f32_f16 {d}, v16, v16": (
            lambda a, b, c, d, e: fma(half(e), half(e), fma(half(d), half(d), c, F32), F32), F32),
    }  # fmt: skip
    for text, (rule, fmt) in cases.items():
        bench.case(text, rule, fmt=fmt)
    bench.run()


def test_conversions() -> None:
    bench = Bench([F32, 32, F16], 11)
    low, high = -(1 << 31), (1 << 31) - 1
    f = lambda n, zero=False: rounded(Fraction(n), F32, zero)  # noqa: E731
    cases: dict[str, tuple[Rule, tuple[int, int] | None]] = {
        "v_cvt_i32_f32 {d}, v0": (lambda a, b, c: to_integer(a, F32, low, high) & M32, None),
        "v_cvt_u32_f32 {d}, v0": (lambda a, b, c: to_integer(a, F32, 0, M32), None),
        "v_cvt_flr_i32_f32 {d}, v0": (lambda a, b, c: to_integer(a, F32, low, high, 1) & M32, None),
        "v_cvt_rpi_i32_f32 {d}, v0": (lambda a, b, c: to_integer(a, F32, low, high, 2) & M32, None),
        "v_cvt_f32_i32 {d}, v2": (lambda a, b, c: f(signed(b)), None),
        "v_cvt_f32_u32 {d}, v2": (lambda a, b, c: f(b), None),
        "v_cvt_f32_ubyte0 {d}, v2": (lambda a, b, c: f(b & 255), None),
        "v_cvt_f32_ubyte1 {d}, v2": (lambda a, b, c: f(b >> 8 & 255), None),
        "v_cvt_f32_ubyte2 {d}, v2": (lambda a, b, c: f(b >> 16 & 255), None),
        "v_cvt_f32_ubyte3 {d}, v2": (lambda a, b, c: f(b >> 24), None),
        "v_cvt_f16_f32 {d}, v0": (lambda a, b, c: convert(a, F32, F16), F16),
        "v_cvt_f32_f16 {d}, v4": (lambda a, b, c: convert(c, F16, F32), F32),
        "v_cvt_u16_f16 {d}, v4": (lambda a, b, c: to_integer(c, F16, 0, 65535), None),
        "v_cvt_i16_f16 {d}, v4": (
            lambda a, b, c: to_integer(c, F16, -32768, 32767) & 0xFFFF, None),
        "v_cvt_f16_u16 {d}, v2": (lambda a, b, c: rounded(Fraction(b & 0xFFFF), F16), None),
        "v_cvt_f16_i16 {d}, v2": (lambda a, b, c: rounded(Fraction(signed(b, 16)), F16), None),
        "v_cvt_pkrtz_f16_f32 {d}, v0, v0\nv_and_b32 {d}, 0xffff, {d}": (
            lambda a, b, c: convert(a, F32, F16, 3), F16),
        "v_cvt_pkrtz_f16_f32 {d}, v0, -v0\nv_lshrrev_b32 {d}, 16, {d}": (
            lambda a, b, c: convert(flip(a, F32), F32, F16, 3), F16),
        "v_cvt_f32_f64 {d}, v[16:17]": (lambda a, b, c: a, F32),
        "v_frexp_exp_i32_f32 {d}, v0": (lambda a, b, c: frexp(a)[1] & M32, None),
        "v_frexp_mant_f32 {d}, v0": (lambda a, b, c: frexp(a)[0], F32),
        "v_cvt_pk_u8_f32 {d}, v0, 2, v2": (
            lambda a, b, c: b & 0xFF00FFFF | byte(a) << 16, None),
        "v_cvt_off_f32_i4 {d}, v2": (lambda a, b, c: f(Fraction(signed(b, 4), 16)), None),
    }  # fmt: skip
    bench.lines.append("v_cvt_f64_f32 v[16:17], v0")
    for text, (rule, fmt) in cases.items():
        bench.case(text, rule, fmt=fmt)
    bench.case("v_cvt_f64_f32 {d}, v0", lambda a, b, c: convert(a, F32, F64), 2, F64)
    bench.case("v_cvt_f64_i32 {d}, v2", lambda a, b, c: rounded(Fraction(signed(b)), F64), 2)
    bench.case("v_cvt_f64_u32 {d}, v2", lambda a, b, c: rounded(Fraction(b), F64), 2)
    bench.case("v_cvt_i32_f64 {d}, v[16:17]",
               lambda a, b, c: to_integer(a, F32, low, high) & M32)  # fmt: skip
    bench.case("v_cvt_u32_f64 {d}, v[16:17]", lambda a, b, c: to_integer(a, F32, 0, M32))
    bench.run()


def frexp(a: int) -> tuple[int, int]:
    if is_nan(a, F32) or is_inf(a, F32) or not a & 0x7FFFFFFF:
        return a, 0
    mantissa, exponent = math.frexp(float(value(a, F32)))
    return rounded(Fraction(mantissa), F32), exponent


def byte(a: int) -> int:
    if is_nan(a, F32):
        return 0
    if is_inf(a, F32):
        return 0 if negative(a, F32) else 255
    return bounded(round(value(a, F32)), 0, 255)


def eight_bit(code: int, mantissa: int) -> float:
    """Value of an 8-bit float of gfx942: no infinities, 0x80 is the only NaN."""
    bias = 1 << (6 - mantissa)
    if code == 0x80:
        return math.nan
    exponent, m = code >> mantissa & ((1 << (7 - mantissa)) - 1), code & ((1 << mantissa) - 1)
    number = math.ldexp(m + (exponent > 0) * (1 << mantissa), max(exponent, 1) - bias - mantissa)
    return -number if code & 0x80 else number


@pytest.mark.parametrize(("name", "mantissa"), [("fp8", 3), ("bf8", 2)])
def test_8_bit_floats(name: str, mantissa: int) -> None:
    bench = Bench([F32, 32], 12)
    codes = [eight_bit(c, mantissa) for c in range(256)]
    finite = sorted((v, c) for c, v in enumerate(codes) if v == v and c < 128)

    def encode(a: int) -> int:
        if is_nan(a, F32) or is_inf(a, F32):
            return 0x80
        x = value(a, F32)
        top, last = Fraction(finite[-1][0]), Fraction(finite[-2][0])
        if abs(x) >= top + (top - last) / 2:
            return 0x80
        # nearest, to the even code on a tie
        code = min(finite, key=lambda vc: (abs(Fraction(vc[0]) - abs(x)), vc[1] & 1))[1]
        return code | 0x80 if code and x < 0 else code

    wild = bench.operands[0]
    fitting = (wild & 0x807FFFFF) | ((wild >> 23) % 24 + 110) << 23
    bench.operands[0] = np.where(np.arange(LANES) % 4, fitting, wild)
    known = {a: encode(a) for a in bench.operands[0].reshape(-1).tolist()}
    pattern = [convert(_f32(v), F32, F32) for v in codes]
    bench.case(f"v_cvt_f32_{name} {{d}}, v2", lambda a, b: pattern[b & 255], fmt=F32)
    bench.case(f"v_cvt_f32_{name}_sdwa {{d}}, v2 src0_sel:BYTE_2",
               lambda a, b: pattern[b >> 16 & 255], fmt=F32)  # fmt: skip
    bench.case(f"v_cvt_pk_f32_{name} {{d}}, v2",
               lambda a, b: pattern[b & 255] | pattern[b >> 8 & 255] << 32, 2, PAIR)  # fmt: skip
    bench.case(f"v_cvt_pk_{name}_f32 {{d}}, v0, v0", lambda a, b: known[a] * 0x101 | 0xDEAD0000)
    bench.case(f"v_cvt_pk_{name}_f32 {{d}}, v0, v0 op_sel:[0,0,1]",
               lambda a, b: known[a] * 0x1010000 | 0xBEEF)  # fmt: skip
    bench.run()


def _f32(x: float) -> int:
    return int(np.array(x, np.float32).view(np.uint32))


def ulp_errors(text: str, function: Callable[[Any], Any], x: Any) -> Any:
    """Errors of an instruction in units of the last place of the exact result, lanes of x."""
    state = snippet.State(waves=WAVES)
    state.vector[:, 0] = x.astype(np.float32).view(np.uint32)
    cached.run(text, state)
    got = state.vector[:, 1].view(np.float32).astype(np.float64)
    want = function(x.astype(np.float32).astype(np.float64))
    unit = np.exp2(np.floor(np.log2(np.abs(want))) - 23)
    return np.abs(got - want) / unit


@pytest.mark.parametrize(
    ("text", "function", "low", "high", "bound"),
    [
        ("v_exp_f32 v1, v0", np.exp2, -125.9, 127.9, 0.5001),
        ("v_exp_f32 v1, v0", np.exp2, -0.9, 0.9, 0.5001),
        ("v_log_f32 v1, v0", np.log2, 1e-37, 1e37, 0.5001),
        ("v_log_f32 v1, v0", np.log2, 0.9, 1.1, 0.5001),
        ("v_rcp_f32 v1, v0", np.reciprocal, 1e-37, 1e37, 0.5001),
        ("v_rsq_f32 v1, v0", lambda x: 1 / np.sqrt(x), 1e-37, 1e37, 0.5001),
        ("v_sqrt_f32 v1, v0", np.sqrt, 1e-37, 1e37, 0.5001),
        ("v_sin_f32 v1, v0", lambda x: np.sin(2 * np.pi * x), 0.01, 0.49, 0.501),
        ("v_cos_f32 v1, v0", lambda x: np.cos(2 * np.pi * x), 0.01, 0.24, 0.501),
    ],
)
def test_transcendentals(
    text: str, function: Callable[[Any], Any], low: float, high: float, bound: float
) -> None:
    rng = np.random.default_rng(13)
    shape = (WAVES, LANES)
    if high / low > 1e6 if low > 0 else False:
        x = np.exp2(rng.uniform(math.log2(low), math.log2(high), shape))
    else:
        x = rng.uniform(low, high, shape)
    errors = ulp_errors(text, function, x)
    assert errors.max() <= bound
    assert errors.max() > 0.1  # not the oracle's own value


def test_transcendental_special_values() -> None:
    inf, nan = math.inf, math.nan
    table = {
        "v_exp_f32": [(0.0, 1.0), (-0.0, 1.0), (inf, inf), (-inf, 0.0), (nan, nan), (128.0, inf),
                      (-127.0, 0.0), (-126.0, 2.0**-126), (1e30, inf), (-1e30, 0.0), (5.0, 32.0)],
        "v_log_f32": [(0.0, -inf), (-0.0, -inf), (1.0, 0.0), (-1.0, nan), (inf, inf), (nan, nan),
                      (2.0**-140, -inf), (8.0, 3.0)],
        "v_rcp_f32": [(0.0, inf), (-0.0, -inf), (inf, 0.0), (-inf, -0.0), (nan, nan), (2.0, 0.5),
                      (2.0**-130, inf), (2.0**127, 0.0)],
        "v_sqrt_f32": [(0.0, 0.0), (-0.0, -0.0), (-1.0, nan), (inf, inf), (4.0, 2.0)],
        "v_rsq_f32": [(0.0, inf), (-0.0, -inf), (-1.0, nan), (inf, 0.0), (4.0, 0.5)],
        "v_sin_f32": [(0.0, 0.0), (-0.0, -0.0), (0.25, 1.0), (0.5, 0.0), (0.75, -1.0), (300.0, 0.0),
                      (inf, nan)],
        "v_cos_f32": [(0.0, 1.0), (0.25, 0.0), (0.5, -1.0), (300.0, 1.0), (nan, nan)],
        "v_fract_f32": [(1.25, 0.25), (-0.25, 0.75), (3.0, 0.0), (-1e-30, 1 - 2.0**-24)],
    }  # fmt: skip
    for name, pairs in table.items():
        state = snippet.State()
        state.v(0)[: len(pairs)] = np.array([p[0] for p in pairs], np.float32).view(np.uint32)
        cached.run(f"{name} v1, v0", state)
        got = state.v(1)[: len(pairs)].view(np.float32)
        want = np.array([p[1] for p in pairs], np.float32)
        same = (got == want) & (np.signbit(got) == np.signbit(want))
        same |= np.isnan(got) & np.isnan(want)
        wrong = [(p, float(g)) for p, g, s in zip(pairs, got, same, strict=True) if not s]
        assert not wrong, f"{name}: {wrong}"


@pytest.mark.parametrize(
    ("text", "function", "fmt"),
    [
        ("v_rcp_f64 v[2:3], v[0:1]", lambda x: 1 / x, F64),
        ("v_sqrt_f64 v[2:3], v[0:1]", np.sqrt, F64),
        ("v_rsq_f64 v[2:3], v[0:1]", lambda x: 1 / np.sqrt(x), F64),
        ("v_rcp_f16 v2, v0", lambda x: 1 / x, F16),
        ("v_rsq_f16 v2, v0", lambda x: 1 / np.sqrt(x), F16),
        ("v_sqrt_f16 v2, v0", np.sqrt, F16),
        ("v_exp_f16 v2, v0", np.exp2, F16),
        ("v_log_f16 v2, v0", np.log2, F16),
        ("v_sin_f16 v2, v0", lambda x: np.sin(2 * np.pi * (x % 1)), F16),
    ],
)
def test_other_transcendentals(text: str, function: Callable[[Any], Any], fmt: Any) -> None:
    dtype = np.float64 if fmt == F64 else np.float16
    x = np.random.default_rng(25).uniform(0.01, 14, LANES).astype(dtype)
    bits = x.view(np.uint64 if fmt == F64 else np.uint16).astype(np.uint64)
    state = snippet.State()
    state.v(0)[:], state.v(1)[:] = bits & M32, bits >> np.uint64(32)
    cached.run(text, state)
    low, high = state.v(2).astype(np.uint64), state.v(3).astype(np.uint64)
    got = (low | high << np.uint64(32)).view(np.float64)
    if fmt == F16:
        assert (state.v(2) < 0x10000).all()
        got = state.v(2).astype(np.uint16).view(np.float16).astype(np.float64)
    want = function(x.astype(np.float64))
    unit = np.exp2(
        np.maximum(np.floor(np.log2(np.abs(want) + 1e-300)), -14 if fmt == F16 else -1022) - fmt[1]
    )
    assert (np.abs(got - want) / unit).max() <= (1.0 if fmt == F64 else 0.51)


def test_bits_of_two_over_pi() -> None:
    """v_trig_preop_f64 gives 53-bit pieces of 2/pi; pi here by Machin's formula."""
    digits = 1300

    def arctan(n: int) -> int:
        total, term, k = 0, (1 << digits) // n, 0
        while term:
            total += (-1) ** k * (term // (2 * k + 1))
            term //= n * n
            k += 1
        return total

    quarter = 4 * arctan(5) - arctan(239)
    ratio = (1 << 2 * digits) // (2 * quarter)  # 2/pi, `digits` bits behind the point
    state = snippet.State()
    state.v(1)[:] = 0x3FF00000
    state.v(2)[:22] = range(22)
    cached.run("v_trig_preop_f64 v[4:5], v[0:1], v2", state)
    for segment in range(22):
        at = 53 * (segment + 1)
        piece = ratio >> (digits - at) & ((1 << 53) - 1)
        got = int(state.v(4)[segment]) | int(state.v(5)[segment]) << 32
        assert got == rounded(Fraction(piece, 1 << at), F64), f"segment {segment}"


def test_bytes_and_normalised_integers() -> None:
    bench = Bench([64, 32, 64, F32], 26)

    def lerp(a: int, b: int, c: int) -> int:
        parts = ((a & M32, b, c & M32)[n].to_bytes(4, "little") for n in range(3))
        return int.from_bytes(
            bytes((x + y + (z & 1)) >> 1 for x, y, z in zip(*parts, strict=True)), "little"
        )

    def norm(x: int, is_signed: bool) -> int:
        if is_nan(x, F32):
            return 0
        v = Fraction(-2 if negative(x, F32) else 2) if is_inf(x, F32) else value(x, F32)
        low, top = (-1, 32767) if is_signed else (0, 65535)
        scaled = max(Fraction(low), min(Fraction(1), v)) * top
        return round(Fraction(float(np.float32(float(scaled))))) & 0xFFFF

    cases: dict[str, Rule] = {
        "v_lerp_u8 {d}, v0, v2, v4": lambda a, b, c, f: lerp(a, b, c),
        "v_sat_pk_u8_i16 {d}, v2": lambda a, b, c, f: (
            bounded(signed(b, 16), 0, 255) | bounded(signed(b >> 16, 16), 0, 255) << 8
        ),
        "v_pack_b32_f16 {d}, v2, v4": lambda a, b, c, f: b & 0xFFFF | (c & 0xFFFF) << 16,
        "v_pack_b32_f16 {d}, v2, v4 op_sel:[1,1,0]": lambda a, b, c, f: (
            b >> 16 | (c >> 16 & 0xFFFF) << 16
        ),
        "v_cvt_pknorm_i16_f32 {d}, v6, v6": lambda a, b, c, f: norm(f, True) * 0x10001,
        "v_cvt_pknorm_u16_f32 {d}, v6, v6": lambda a, b, c, f: norm(f, False) * 0x10001,
    }
    for text, rule in cases.items():
        bench.case(text, rule)
    bench.case("v_qsad_pk_u16_u8 {d}, v[0:1], v2, v[4:5]", lambda a, b, c, f: sum(
        min(differences(a >> 8 * n & M32, b) + (c >> 16 * n & 0xFFFF), 0xFFFF) << 16 * n
        for n in range(4)), 2)  # fmt: skip
    bench.run()


def test_stochastic_rounding_to_8_bits() -> None:
    """Random bits of zero cut; all ones round up what is not exact; the other bytes stay."""
    state = snippet.State()
    x = np.array([1.0, 1.03, -1.03, 3.9, 0.0], np.float32)
    state.v(0)[: len(x)] = x.view(np.uint32)
    state.vector[0, 4:8] = 0xDEADBEEF
    cached.run(
        """
        v_mov_b32 v1, 0
        v_mov_b32 v2, -1
        v_cvt_sr_fp8_f32 v4, v0, v1
        v_cvt_sr_fp8_f32 v5, v0, v2 op_sel:[0,0,1,0]
        v_cvt_sr_bf8_f32 v6, v0, v1 op_sel:[0,0,0,1]
        v_cvt_sr_bf8_f32 v7, v0, v2 op_sel:[0,0,1,1]
        """,
        state,
    )
    registers = ((4, 3, 0, 0), (5, 3, 1, 1), (6, 2, 2, 0), (7, 2, 3, 1))
    for lane, number in enumerate(x.tolist()):
        for register, mantissa, place, up in registers:
            word = int(state.v(register)[lane])
            assert (word ^ 0xDEADBEEF) & ~(255 << 8 * place) == 0
            got = eight_bit(word >> 8 * place & 255, mantissa)
            grid = sorted(abs(eight_bit(c, mantissa)) for c in range(128))
            below = max(g for g in grid if g <= abs(number))
            above = min(g for g in grid if g >= abs(number))
            assert abs(got) == (above if up else below) and got * number >= 0


def quotient(a: int, b: int, fmt: tuple[int, int]) -> int:
    sign = (negative(a, fmt) != negative(b, fmt)) << sum(fmt)
    infinity = ((1 << fmt[0]) - 1) << fmt[1]
    if is_nan(a, fmt) or is_nan(b, fmt):
        return quiet_nan(fmt)
    a_zero = not is_inf(a, fmt) and value(a, fmt) == 0
    b_zero = not is_inf(b, fmt) and value(b, fmt) == 0
    if (a_zero and b_zero) or (is_inf(a, fmt) and is_inf(b, fmt)):
        return quiet_nan(fmt)
    if is_inf(a, fmt) or b_zero:
        return infinity | sign
    if a_zero or is_inf(b, fmt):
        return sign
    return rounded(value(a, fmt) / value(b, fmt), fmt, bool(sign))


def test_division_sequences_round_correctly() -> None:
    """div_scale, div_fmas and div_fixup as compilers combine them give IEEE quotients."""
    single = """
        v_div_scale_f32 v16, s[0:1], v2, v2, v0
        v_div_scale_f32 v17, vcc, v0, v2, v0
        v_rcp_f32 v18, v16
        v_fma_f32 v19, -v16, v18, 1.0
        v_fma_f32 v18, v19, v18, v18
        v_mul_f32 v19, v17, v18
        v_fma_f32 v20, -v16, v19, v17
        v_fma_f32 v19, v20, v18, v19
        v_fma_f32 v20, -v16, v19, v17
        v_div_fmas_f32 v21, v20, v18, v19
        v_div_fixup_f32 {d}, v21, v2, v0"""
    bench = Bench([F32, F32], 14)
    bench.case(single, lambda a, b: quotient(a, b, F32), fmt=F32)
    bench.run()
    double = """
        v_div_scale_f64 v[16:17], s[0:1], v[2:3], v[2:3], v[0:1]
        v_rcp_f64 v[18:19], v[16:17]
        v_fma_f64 v[20:21], -v[16:17], v[18:19], 1.0
        v_fma_f64 v[18:19], v[18:19], v[20:21], v[18:19]
        v_fma_f64 v[20:21], -v[16:17], v[18:19], 1.0
        v_fma_f64 v[18:19], v[18:19], v[20:21], v[18:19]
        v_div_scale_f64 v[20:21], vcc, v[0:1], v[2:3], v[0:1]
        v_mul_f64 v[22:23], v[20:21], v[18:19]
        v_fma_f64 v[16:17], -v[16:17], v[22:23], v[20:21]
        v_div_fmas_f64 v[16:17], v[16:17], v[18:19], v[22:23]
        v_div_fixup_f64 {d}, v[16:17], v[2:3], v[0:1]"""
    bench = Bench([F64, F64], 15)
    bench.case(double, lambda a, b: quotient(a, b, F64), 2, F64)
    bench.run()


@pytest.mark.parametrize("way", [1, 2, 3], ids=["up", "down", "to zero"])
def test_rounding_modes(way: int) -> None:
    bench = Bench([F32, F32, F32], 16)
    bench.case("v_fma_f32 {d}, v0, v2, v4", lambda a, b, c: fma(a, b, c, F32, way), fmt=F32)
    bench.case("v_cvt_f16_f32 {d}, v0", lambda a, b, c: convert(a, F32, F16, way), fmt=F16)
    # To the nearest even number in every mode.
    bench.case("v_rndne_f32 {d}, v0", lambda a, b, c: integral(a, F32, round), fmt=F32)
    bench.run(mode=0x3F0 | way | way << 2)
    bench = Bench([F64, F64, F64], 17)
    bench.case("v_fma_f64 {d}, v[0:1], v[2:3], v[4:5]",
               lambda a, b, c: fma(a, b, c, F64, way), 2, F64)  # fmt: skip
    bench.case("v_rndne_f64 {d}, v[0:1]", lambda a, b, c: integral(a, F64, round), 2, F64)
    bench.run(mode=0x3F0 | way | way << 2)


def test_mode_flushes_subnormals() -> None:
    def flush(x: int) -> int:
        return x if x & 0x7F800000 else x & 1 << 31

    bench = Bench([F32, F32, F32], 18)
    bench.case("v_fma_f32 {d}, v0, v2, v4",
               lambda a, b, c: flush(fma(flush(a), flush(b), flush(c), F32)), fmt=F32)  # fmt: skip
    bench.case("v_max_f32 {d}, v0, v2",
               lambda a, b, c: extreme(flush(a), flush(b), F32, True), fmt=F32)  # fmt: skip
    bench.case("v_mov_b32 {d}, v0", lambda a, b, c: a)
    bench.case("v_pk_mul_f32 {d}, v[0:1], v[2:3] op_sel_hi:[0,0]",
               both(lambda a, b, c: flush(mul(flush(a), flush(b), F32)), 0, 0, 0),
               2, PAIR)  # fmt: skip
    bench.run(mode=0x3C0)


# ---- compares

FLOAT_CONDITIONS: dict[str, Callable[[int, bool], bool]] = {
    # (sign of a - b, unordered)
    "f": lambda s, u: False, "lt": lambda s, u: not u and s < 0,
    "eq": lambda s, u: not u and s == 0, "le": lambda s, u: not u and s <= 0,
    "gt": lambda s, u: not u and s > 0,
    "lg": lambda s, u: not u and s != 0, "ge": lambda s, u: not u and s >= 0,
    "o": lambda s, u: not u, "u": lambda s, u: u, "nge": lambda s, u: u or s < 0,
    "nlg": lambda s, u: u or s == 0, "ngt": lambda s, u: u or s <= 0,
    "nle": lambda s, u: u or s > 0, "neq": lambda s, u: u or s != 0,
    "nlt": lambda s, u: u or s >= 0, "tru": lambda s, u: True,
}  # fmt: skip
INT_CONDITIONS = ("f", "lt", "eq", "le", "gt", "ne", "ge", "t")
INT_NAMES = {"ne": "lg", "t": "tru"}
TYPES: dict[str, object] = {"f16": F16, "f32": F32, "f64": F64, "i16": 16, "u16": 16, "i32": 32,
                            "u32": 32, "i64": 64, "u64": 64}  # fmt: skip


def compared(name: str, kind: object, a: int, b: int) -> tuple[int, bool]:
    if isinstance(kind, tuple):
        if is_nan(a, kind) or is_nan(b, kind):
            return 0, True
        x, y = order(a, kind), order(b, kind)
        zero = (1 << sum(kind)) - 1
        if not a & zero and not b & zero:
            x = y = 0
    else:
        width = int(name[1:])
        x, y = (signed(a, width), signed(b, width)) if name[0] == "i" else (a, b)
    return (x > y) - (x < y), False


@pytest.mark.parametrize("name", TYPES)
def test_compares(name: str) -> None:
    kind = TYPES[name]
    rng = np.random.default_rng(19)
    a, b = random_bits(rng, kind), random_bits(rng, kind)
    b = np.where(rng.random(b.shape) < 0.2, a, b)
    conditions = FLOAT_CONDITIONS if isinstance(kind, tuple) else INT_CONDITIONS
    ra, rb = ("v[0:1]", "v[2:3]") if name[1:] == "64" else ("v0", "v2")
    lines, register = [], 16
    for c in conditions:
        lines.append(f"v_cmp_{c}_{name} s[{register}:{register + 1}], {ra}, {rb}")
        lines.append(f"v_cmpx_{c}_{name} vcc, {ra}, {rb}")
        lines.append(f"s_and_b64 s[{register + 2}:{register + 3}], vcc, exec")
        lines.append("s_mov_b64 exec, s[0:1]")
        register += 4
    mask = 0xFFFF_0FF0_FFFF_FFF1
    state = snippet.State(waves=WAVES)
    for wave in range(WAVES):
        state.set_s64(snippet.EXEC, mask, wave)
        state.set_s64(0, mask, wave)
    for n, bits in enumerate((a, b)):
        state.vector[:, 2 * n], state.vector[:, 2 * n + 1] = bits & M32, bits >> np.uint64(32)
    cached.run("\n".join(lines), state)
    for wave in range(WAVES):
        outcomes = [
            compared(name, kind, int(x), int(y)) for x, y in zip(a[wave], b[wave], strict=True)
        ]
        for n, c in enumerate(conditions):
            rule = FLOAT_CONDITIONS[INT_NAMES.get(c, c)]
            want = sum(rule(*o) << lane for lane, o in enumerate(outcomes)) & mask
            assert state.s64(16 + 4 * n, wave) == want, f"v_cmp_{c}_{name}"
            assert state.s64(18 + 4 * n, wave) == want, f"v_cmpx_{c}_{name}"


@pytest.mark.parametrize(("name", "fmt"), [("f16", F16), ("f32", F32), ("f64", F64)])
def test_classes(name: str, fmt: tuple[int, int]) -> None:
    e, m = fmt
    top, sign = ((1 << e) - 1) << m, 1 << (e + m)
    samples = [top | 1, top | 1 << (m - 1), top | sign, one(fmt) | sign, 3 | sign, sign, 0, 3,
               one(fmt), top]  # fmt: skip
    state = snippet.State()
    state.v(0)[:10] = [s & M32 for s in samples]
    state.v(1)[:10] = [s >> 32 for s in samples]
    source = "v[0:1]" if fmt == F64 else "v0"
    lines = []
    for n in range(10):
        lines.append(f"v_mov_b32 v2, {1 << n}")
        lines.append(f"v_cmp_class_{name} s[{16 + 2 * n}:{17 + 2 * n}], {source}, v2")
    cached.run("\n".join(lines), state)
    for n in range(10):
        assert state.s64(16 + 2 * n) & 0x3FF == 1 << n, f"class {n}"


# ---- lanes


def dpp_source(control: str, lane: int) -> int | None:
    """Lane that `lane` reads; None when out of bounds."""
    name, _, argument = control.partition(":")
    row, at = lane // 16 * 16, lane % 16
    n = int(argument) if argument.isdigit() else 0
    if name == "quad_perm":
        return lane // 4 * 4 + eval(argument)[lane % 4]
    table: dict[str, int | None] = {
        "row_shl": lane + n if at + n < 16 else None,
        "row_shr": lane - n if at - n >= 0 else None,
        "row_ror": row + (at - n) % 16,
        "wave_shl": lane + 1 if lane < 63 else None,
        "wave_rol": (lane + 1) % 64,
        "wave_shr": lane - 1 if lane else None,
        "wave_ror": (lane - 1) % 64,
        "row_mirror": row + 15 - at,
        "row_half_mirror": lane // 8 * 8 + 7 - lane % 8,
        "row_bcast": (row - 1 if row else None) if n == 15 else (31 if lane >= 32 else None),
        "row_newbcast": row + n,
    }
    return table[name]


@pytest.mark.parametrize("bound", [False, True])
def test_dpp(bound: bool) -> None:
    controls = ["quad_perm:[3,0,2,1]", "row_shl:1", "row_shl:15", "row_shr:3", "row_ror:5",
                "wave_shl:1", "wave_rol:1", "wave_shr:1", "wave_ror:1", "row_mirror",
                "row_half_mirror", "row_bcast:15", "row_bcast:31", "row_newbcast:6"]  # fmt: skip
    mask, row_mask, bank_mask = 0xFFFF_FFF7_0FFF_FFFE, 0xB, 0x7
    state = snippet.State()
    state.set_s64(snippet.EXEC, mask)
    rng = np.random.default_rng(20)
    source = rng.integers(0, 1 << 32, 64, dtype=np.uint32)
    state.v(0)[:] = source
    state.v(1)[:] = 7
    state.vector[0, 16:64] = 0xDEADBEEF
    bound_text = " bound_ctrl:0" if bound else ""
    lines = [
        f"v_add_u32_dpp v{16 + n}, v0, v1 {c} row_mask:{row_mask:#x} bank_mask:{bank_mask:#x}"
        + bound_text
        for n, c in enumerate(controls)
    ]
    # negation applies to what was moved
    lines.append("v_add_f32_dpp v40, -v0, v1 row_mirror row_mask:0xf bank_mask:0xf")
    cached.run("\n".join(lines), state)
    for n, control in enumerate(controls):
        for lane in range(64):
            want = 0xDEADBEEF
            if mask >> lane & row_mask >> lane // 16 & bank_mask >> lane % 16 // 4 & 1:
                origin = dpp_source(control, lane)
                if origin is not None and mask >> origin & 1:
                    want = (int(source[origin]) + 7) & M32
                elif bound:
                    want = 7
            assert state.v(16 + n)[lane] == want, f"{control}, lane {lane}"
    got = state.v(40)
    for lane in range(64):
        origin = lane // 16 * 16 + 15 - lane % 16
        if mask >> lane & mask >> origin & 1:
            want = add(flip(int(source[origin]), F32), 7, F32)
            assert got[lane] == want or is_nan(want, F32)


def test_lane_moves() -> None:
    state = snippet.State()
    rng = np.random.default_rng(21)
    a, b = (rng.integers(0, 1 << 32, 64, dtype=np.uint32) for _ in range(2))
    state.v(0)[:], state.v(1)[:] = a, b
    state.v(2)[:], state.v(3)[:] = a, b
    mask = 0xFFFF_0000_FFF0_0F00
    state.set_s64(snippet.EXEC, mask)
    state.set_s64(10, 0x0123_4567_89AB_CDEF)
    cached.run(
        """
        v_readfirstlane_b32 s0, v0
        s_mov_b32 s1, 0x45
        v_readlane_b32 s2, v0, s1
        v_readlane_b32 s3, v1, 63
        s_mov_b32 s4, 0xabcdef01
        v_writelane_b32 v4, s4, 2
        v_swap_b32 v2, v3
        v_mbcnt_lo_u32_b32 v5, s10, 0
        v_mbcnt_hi_u32_b32 v5, s11, v5
        v_cndmask_b32_e64 v6, v0, v1, s[10:11]
        v_cndmask_b32_e64 v7, 0, -v1, s[10:11]
        v_accvgpr_write_b32 a5, v1
        v_accvgpr_mov_b32 a6, a5
        v_accvgpr_read_b32 v8, a6
        s_mov_b64 exec, 0
        v_readfirstlane_b32 s5, v1
        """,
        state,
    )
    s = state.scalar[0]
    assert s[0] == a[8] and s[2] == a[5] and s[3] == b[63] and s[5] == b[0]
    assert state.v(4)[2] == 0xABCDEF01 and np.count_nonzero(state.v(4)) == 1
    for lane in range(64):
        active, chosen = mask >> lane & 1, 0x0123_4567_89AB_CDEF >> lane & 1
        assert state.v(2)[lane] == (b if active else a)[lane]
        assert state.v(3)[lane] == (a if active else b)[lane]
        if active:
            below = 0x0123_4567_89AB_CDEF & ((1 << lane) - 1)
            assert state.v(5)[lane] == below.bit_count()
            assert state.v(6)[lane] == (b if chosen else a)[lane]
            assert state.v(7)[lane] == (int(b[lane]) ^ 1 << 31 if chosen else 0)
            assert state.v(8)[lane] == b[lane]
        else:
            assert state.v(5)[lane] == state.v(6)[lane] == state.v(8)[lane] == 0


def test_carries() -> None:
    rng = np.random.default_rng(22)
    state = snippet.State()
    a, b = (rng.integers(0, 1 << 32, 64, dtype=np.uint64) for _ in range(2))
    b[:8] = (1 << 32) - a[:8]
    state.v(0)[:], state.v(1)[:] = a, b
    mask, carry = 0xFFFF_FFFF_0000_FFFF, 0xA5A5_5A5A_C3C3_3C3C
    state.set_s64(snippet.EXEC, mask)
    state.set_s64(30, carry)
    names = ["add_co", "sub_co", "subrev_co", "addc_co", "subb_co", "subbrev_co"]
    lines = []
    for n, name in enumerate(names):
        more = ", s[30:31]" if n >= 3 else ""
        lines.append(f"v_{name}_u32_e64 v{10 + n}, s[{2 * n}:{2 * n + 1}], v0, v1{more}")
    lines.append("v_mad_u64_u32 v[20:21], s[12:13], v0, v1, v[0:1]")
    cached.run("\n".join(lines), state)
    for lane in range(64):
        if not mask >> lane & 1:
            continue
        x, y, c = int(a[lane]), int(b[lane]), carry >> lane & 1
        results = [x + y, x - y, y - x, x + y + c, x - y - c, y - x - c]
        for n, want in enumerate(results):
            assert state.v(10 + n)[lane] == want & M32, names[n]
            assert state.s64(2 * n) >> lane & 1 == (want >> 32 != 0), names[n]
        product = x * y + (y << 32 | x)
        assert state.s64(12) >> lane & 1 == product >> 64
    for n in range(7):
        assert state.s64(2 * n) & ~mask == 0


def test_register_indexing_by_m0() -> None:
    state = snippet.State()
    state.vector[0, :32] = np.arange(32, dtype=np.uint32)[:, None]
    cached.run(
        """
        s_mov_b32 s0, 5
        s_set_gpr_idx_on s0, gpr_idx(SRC0)
        v_mov_b32 v40, v3
        s_set_gpr_idx_off
        s_set_gpr_idx_on s0, gpr_idx(DST)
        v_mov_b32 v50, v3
        s_set_gpr_idx_off
        v_mov_b32 v41, v3
        """,
        state,
    )
    assert state.v(40)[0] == 8 and state.v(55)[0] == 3 and state.v(50)[0] == 0
    assert state.v(41)[0] == 3


# ---- scalar instructions


def scalar_bfe(a: int, b: int, bits: int, sign: bool) -> int:
    offset, width = b & (bits - 1), b >> 16 & 127
    field = (signed(a, bits) if sign else a) >> offset & ((1 << width) - 1)
    return (signed(field, width) if sign and 0 < width < bits else field) & ((1 << bits) - 1)


def quads(x: int, bits: int, spread: bool) -> int:
    out = 0
    for n in range(bits // 4):
        if x >> 4 * n & 15:
            out |= 15 << 4 * n if spread else 1 << n
    return out


# text -> (result bits, 64-bit sources, rule giving the exact result, SCC rule or None)
Scc = Callable[[int, int, int, int], bool]
nonzero: Scc = lambda a, b, d, s: d != 0  # noqa: E731
SCALAR: dict[str, tuple[int, int, Rule, Scc | None]] = {
    "s_add_u32": (32, 0, lambda a, b, s: a + b, lambda a, b, d, s: a + b > M32),
    "s_sub_u32": (32, 0, lambda a, b, s: a - b, lambda a, b, d, s: a < b),
    "s_addc_u32": (32, 0, lambda a, b, s: a + b + s, lambda a, b, d, s: a + b + s > M32),
    "s_subb_u32": (32, 0, lambda a, b, s: a - b - s, lambda a, b, d, s: a < b + s),
    "s_add_i32": (32, 0, lambda a, b, s: a + b,
                  lambda a, b, d, s: signed(a) + signed(b) != signed(d)),
    "s_sub_i32": (32, 0, lambda a, b, s: a - b,
                  lambda a, b, d, s: signed(a) - signed(b) != signed(d)),
    "s_min_i32": (32, 0, lambda a, b, s: min(signed(a), signed(b)),
                  lambda a, b, d, s: signed(a) < signed(b)),
    "s_max_i32": (32, 0, lambda a, b, s: max(signed(a), signed(b)),
                  lambda a, b, d, s: signed(a) > signed(b)),
    "s_min_u32": (32, 0, lambda a, b, s: min(a, b), lambda a, b, d, s: a < b),
    "s_max_u32": (32, 0, lambda a, b, s: max(a, b), lambda a, b, d, s: a > b),
    "s_cselect_b32": (32, 0, lambda a, b, s: a if s else b, None),
    "s_cselect_b64": (64, 3, lambda a, b, s: a if s else b, None),
    **{f"s_{n}_b{w}": (w, 3 * (w == 64), r, nonzero) for w in (32, 64) for n, r in {
        "and": lambda a, b, s: a & b, "or": lambda a, b, s: a | b, "xor": lambda a, b, s: a ^ b,
        "andn2": lambda a, b, s: a & ~b, "orn2": lambda a, b, s: a | ~b,
        "nand": lambda a, b, s: ~(a & b), "nor": lambda a, b, s: ~(a | b),
        "xnor": lambda a, b, s: ~(a ^ b)}.items()},
    "s_lshl_b32": (32, 0, lambda a, b, s: a << (b & 31), nonzero),
    "s_lshr_b32": (32, 0, lambda a, b, s: a >> (b & 31), nonzero),
    "s_ashr_i32": (32, 0, lambda a, b, s: signed(a) >> (b & 31), nonzero),
    "s_lshl_b64": (64, 1, lambda a, b, s: a << (b & 63), nonzero),
    "s_lshr_b64": (64, 1, lambda a, b, s: a >> (b & 63), nonzero),
    "s_ashr_i64": (64, 1, lambda a, b, s: signed(a, 64) >> (b & 63), nonzero),
    "s_bfm_b32": (32, 0, lambda a, b, s: ((1 << (a & 31)) - 1) << (b & 31), None),
    "s_bfm_b64": (64, 0, lambda a, b, s: ((1 << (a & 63)) - 1) << (b & 63), None),
    "s_mul_i32": (32, 0, lambda a, b, s: a * b, None),
    "s_mul_hi_u32": (32, 0, lambda a, b, s: a * b >> 32, None),
    "s_mul_hi_i32": (32, 0, lambda a, b, s: signed(a) * signed(b) >> 32, None),
    "s_bfe_u32": (32, 0, lambda a, b, s: scalar_bfe(a, b, 32, False), nonzero),
    "s_bfe_i32": (32, 0, lambda a, b, s: scalar_bfe(a, b, 32, True), nonzero),
    "s_bfe_u64": (64, 1, lambda a, b, s: scalar_bfe(a, b, 64, False), nonzero),
    "s_bfe_i64": (64, 1, lambda a, b, s: scalar_bfe(a, b, 64, True), nonzero),
    "s_absdiff_i32": (32, 0, lambda a, b, s: abs(signed(a) - signed(b)), nonzero),
    **{f"s_lshl{n}_add_u32": (32, 0, lambda a, b, s, n=n: (a << n) + b,
                             lambda a, b, d, s, n=n: (a << n) + b > M32) for n in (1, 2, 3, 4)},
    "s_pack_ll_b32_b16": (32, 0, lambda a, b, s: a & 0xFFFF | b << 16, None),
    "s_pack_lh_b32_b16": (32, 0, lambda a, b, s: a & 0xFFFF | b >> 16 << 16, None),
    "s_pack_hh_b32_b16": (32, 0, lambda a, b, s: a >> 16 | b >> 16 << 16, None),
    "s_mov_b32 ": (32, 0, lambda a, b, s: a, None),
    "s_mov_b64 ": (64, 1, lambda a, b, s: a, None),
    "s_not_b32 ": (32, 0, lambda a, b, s: ~a, nonzero),
    "s_not_b64 ": (64, 1, lambda a, b, s: ~a, nonzero),
    "s_wqm_b32 ": (32, 0, lambda a, b, s: quads(a, 32, True), nonzero),
    "s_wqm_b64 ": (64, 1, lambda a, b, s: quads(a, 64, True), nonzero),
    "s_quadmask_b32 ": (32, 0, lambda a, b, s: quads(a, 32, False), nonzero),
    "s_quadmask_b64 ": (64, 1, lambda a, b, s: quads(a, 64, False), nonzero),
    "s_brev_b32 ": (32, 0, lambda a, b, s: int(f"{a:032b}"[::-1], 2), None),
    "s_brev_b64 ": (64, 1, lambda a, b, s: int(f"{a:064b}"[::-1], 2), None),
    "s_bcnt0_i32_b32 ": (32, 0, lambda a, b, s: 32 - a.bit_count(), nonzero),
    "s_bcnt0_i32_b64 ": (32, 1, lambda a, b, s: 64 - a.bit_count(), nonzero),
    "s_bcnt1_i32_b32 ": (32, 0, lambda a, b, s: a.bit_count(), nonzero),
    "s_bcnt1_i32_b64 ": (32, 1, lambda a, b, s: a.bit_count(), nonzero),
    "s_ff0_i32_b32 ": (32, 0, lambda a, b, s: ctz(~a & M32), None),
    "s_ff0_i32_b64 ": (32, 1, lambda a, b, s: ctz(~a & M64), None),
    "s_ff1_i32_b32 ": (32, 0, lambda a, b, s: ctz(a), None),
    "s_ff1_i32_b64 ": (32, 1, lambda a, b, s: ctz(a), None),
    "s_flbit_i32_b32 ": (32, 0, lambda a, b, s: clz(a, 32), None),
    "s_flbit_i32_b64 ": (32, 1, lambda a, b, s: clz(a, 64), None),
    "s_flbit_i32 ": (32, 0, lambda a, b, s: sign_bits(a, 32), None),
    "s_flbit_i32_i64 ": (32, 1, lambda a, b, s: sign_bits(a, 64), None),
    "s_sext_i32_i8 ": (32, 0, lambda a, b, s: signed(a, 8), None),
    "s_sext_i32_i16 ": (32, 0, lambda a, b, s: signed(a, 16), None),
    "s_abs_i32 ": (32, 0, lambda a, b, s: abs(signed(a)), nonzero),
    "s_bitreplicate_b64_b32 ": (64, 0, lambda a, b, s: int(
        "".join(c * 2 for c in f"{a:032b}"), 2), None),
    **{f"s_cmp_{c}_{t}32?": (0, 0, lambda a, b, s: 0, lambda a, b, d, s, c=c, t=t: (
        FLOAT_CONDITIONS[c](*compared(t + "32", 32, a, b))))
       for c in ("eq", "lg", "gt", "ge", "lt", "le") for t in "iu"},
    "s_cmp_eq_u64?": (0, 3, lambda a, b, s: 0, lambda a, b, d, s: a == b),
    "s_cmp_lg_u64?": (0, 3, lambda a, b, s: 0, lambda a, b, d, s: a != b),
    "s_bitcmp0_b32?": (0, 0, lambda a, b, s: 0, lambda a, b, d, s: not a >> (b & 31) & 1),
    "s_bitcmp1_b32?": (0, 0, lambda a, b, s: 0, lambda a, b, d, s: bool(a >> (b & 31) & 1)),
    "s_bitcmp0_b64?": (0, 1, lambda a, b, s: 0, lambda a, b, d, s: not a >> (b & 63) & 1),
    "s_bitcmp1_b64?": (0, 1, lambda a, b, s: 0, lambda a, b, d, s: bool(a >> (b & 63) & 1)),
}  # fmt: skip


def test_scalar_arithmetic() -> None:
    """Results collect in the lanes of v0, v1 and SCC in v2 (v_writelane), one lane a case."""
    rng = np.random.default_rng(23)
    sources = random_bits(rng, 64).tolist()
    names = list(SCALAR)
    for chunk in range(0, len(names), 64):
        part = names[chunk : chunk + 64]
        lines = []
        for lane, name in enumerate(part):
            bits, wide, _, _ = SCALAR[name]
            d = "s[20:21], " if bits == 64 else "s20, " if bits else ""
            a = "s[0:1]" if wide & 1 else "s0"
            b = ", s[2:3]" if wide & 2 else ", s2"
            lines += [
                "s_cmp_lg_u32 s4, 0", "s_mov_b64 s[20:21], 0",
                f"{name.strip(' ?')} {d}{a}{'' if name.endswith(' ') else b}",
                "s_cselect_b32 s22, 1, 0", f"v_writelane_b32 v0, s20, {lane}",
                f"v_writelane_b32 v1, s21, {lane}", f"v_writelane_b32 v2, s22, {lane}",
            ]  # fmt: skip
        state = snippet.State(waves=WAVES)
        for wave in range(WAVES):
            row = sources[wave]
            state.set_s64(0, row[0] if wave % 4 else row[0] & M32, wave)
            state.set_s64(2, row[1] if wave % 3 else row[0], wave)
            state.scalar[wave, 4] = wave & 1
        before = state.scalar.copy()
        cached.run("\n".join(lines), state)
        for wave in range(WAVES):
            state_before = [int(before[wave, n]) for n in range(4)]
            for lane, name in enumerate(part):
                bits, wide, rule, scc = SCALAR[name]
                a = state_before[0] | (state_before[1] << 32 if wide & 1 else 0)
                b = state_before[2] | (state_before[3] << 32 if wide & 2 else 0)
                s = wave & 1
                d = rule(a, b, s) & ((1 << bits) - 1)
                got = int(state.v(0, wave)[lane]) | int(state.v(1, wave)[lane]) << 32
                text = f"{name} {a:#x}, {b:#x}, scc {s}"
                assert got == d, f"{text}: {got:#x}, not {d:#x}"
                flag = scc(a, b, d, s) if scc else s
                assert state.v(2, wave)[lane] == flag, f"{text}: scc"


def test_scalar_immediates() -> None:
    state = snippet.State()
    state.scalar[0, :8] = [0, 0x7FFFFFFF, 5, 0xFFFFFFFF, 0, 0, 0, 0]
    cached.run(
        """
        s_movk_i32 s0, 0x8001
        s_addk_i32 s1, 1
        s_cselect_b32 s10, 1, 0
        s_mulk_i32 s2, -3
        s_cmpk_gt_u32 s3, 0xffff
        s_cselect_b32 s11, 1, 0
        s_cmpk_eq_i32 s3, -1
        s_cselect_b32 s12, 1, 0
        s_cmovk_i32 s4, 77
        s_cmpk_lt_i32 s3, -1
        s_cmovk_i32 s5, 77
        s_bitset1_b32 s6, 35
        s_bitset1_b64 s[14:15], 40
        s_mov_b32 s16, -1
        s_bitset0_b32 s16, 4
        s_mov_b64 s[18:19], 0x7f
        s_mov_b32 s13, 0x80000000
        s_cmp_eq_u32 s13, s13
        s_cmov_b32 s20, s13
        s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0
        s_getreg_b32 s21, hwreg(HW_REG_MODE, 0, 10)
        s_mov_b32 s22, 3
        s_setreg_b32 hwreg(HW_REG_MODE, 0, 2), s22
        s_getreg_b32 s23, hwreg(HW_REG_MODE)
        """,
        state,
    )
    s = state.scalar[0]
    assert s[0] == 0xFFFF8001 and s[1] == 0x80000000 and s[10] == 1
    assert s[2] == (-15) & M32 and s[11] == 1 and s[12] == 1 and s[4] == 77 and s[5] == 0
    assert s[6] == 8 and s[15] == 1 << 8 and s[16] == 0xFFFFFFEF
    assert state.s64(18) == 0x7F and s[20] == 0x80000000
    assert s[21] == 0x3C0 and s[23] == 0x3C3 and state.mode[0] == 0x3C3


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("and", lambda a, e: a & e), ("or", lambda a, e: a | e), ("xor", lambda a, e: a ^ e),
        ("andn2", lambda a, e: a & ~e), ("orn2", lambda a, e: a | ~e),
        ("nand", lambda a, e: ~(a & e)), ("nor", lambda a, e: ~(a | e)),
        ("xnor", lambda a, e: ~(a ^ e)), ("andn1", lambda a, e: ~a & e),
        ("orn1", lambda a, e: ~a | e),
    ],
)  # fmt: skip
def test_exec_is_saved_and_replaced(name: str, rule: Callable[[int, int], int]) -> None:
    mask, a = 0xFF00FF00FF00FF00, 0x0FF00FF0_12345678
    for source in (a, mask, ~mask & M64):
        state = snippet.State()
        state.set_s64(snippet.EXEC, mask)
        state.set_s64(0, source)
        cached.run(f"s_{name}_saveexec_b64 s[2:3], s[0:1]", state)
        want = rule(source, mask) & M64
        assert state.s64(2) == mask and state.s64(snippet.EXEC) == want
        assert state.scc[0] == (want != 0)
        if name in ("andn1", "andn2"):
            state.set_s64(snippet.EXEC, mask)
            cached.run(f"s_{name}_wrexec_b64 s[2:3], s[0:1]", state)
            assert state.s64(2) == want == state.s64(snippet.EXEC)


def test_branches_calls_and_loops() -> None:
    state = snippet.State()
    cached.run(
        """
        s_mov_b32 s0, 10
        s_mov_b32 s1, 0
        loop:
        s_add_u32 s1, s1, s0
        s_sub_u32 s0, s0, 1
        s_cmp_lg_u32 s0, 0
        s_cbranch_scc1 loop
        s_getpc_b64 s[2:3]
        s_add_u32 s2, s2, function-.
        s_addc_u32 s3, s3, 0
        s_swappc_b64 s[4:5], s[2:3]
        s_add_u32 s6, s6, 100
        s_call_b64 s[4:5], function
        s_mov_b64 vcc, 0
        s_cbranch_vccnz bad
        s_cbranch_execz bad
        s_branch end
        bad:
        s_mov_b32 s7, 1
        s_endpgm
        function:
        s_add_u32 s6, s6, 1
        s_setpc_b64 s[4:5]
        end:
        s_movk_i32 s8, 3
        """.replace("function-.", "function-after").replace(
            "s_getpc_b64 s[2:3]", "s_getpc_b64 s[2:3]\nafter:"
        ),
        state,
    )
    assert state.scalar[0, 1] == 55 and state.scalar[0, 6] == 102
    assert state.scalar[0, 7] == 0 and state.scalar[0, 8] == 3


def test_what_cannot_run_says_so() -> None:
    state = snippet.State()
    with pytest.raises(native.EmulatorError, match="s_setpc_b64"):
        cached.run("s_mov_b64 s[0:1], 0\ns_setpc_b64 s[0:1]", state)
    with pytest.raises(native.EmulatorError, match="s_trap"):
        cached.run("s_trap 2", state)


LEFT_OUT = {"s_cbranch_i_fork", "s_cbranch_join", "s_rfe_b64", "s_setvskip", "s_setkill",
            "s_endpgm_ordered_ps_done", "v_screen_partition_4se_b32"}  # fmt: skip


def arithmetic_words() -> list[tuple[str, list[list[int]]]]:
    """(format, instruction words to try) of every scalar and vector encoding."""
    path = Path(__file__).parents[2] / "emulator" / "tools" / "opcode_tables.py"
    spec = importlib.util.spec_from_file_location("opcode_tables", path)
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    return [
        (fmt, candidates) for fmt, _, candidates in tables.words() if fmt.startswith(("sop", "vop"))
    ]


def test_every_listed_operation_has_a_handler() -> None:
    """Each encoding of the opcode table's generator runs, or fails for a reason of its own."""
    end = 0xBF810000.to_bytes(4, "little")
    missing, ran = set(), 0
    for fmt, candidates in arithmetic_words():
        word = b"".join(w.to_bytes(4, "little") for w in candidates[0])
        if fmt == "vop2":
            word = word[:4]  # the literal that few of them have decodes as s_endpgm's bytes
        ran += 1
        try:
            report = cached.run(word + end + end, snippet.State(lds_bytes=0))
        except native.EmulatorError:
            continue  # a jump to nowhere, a trap, a register that cannot be written
        missing |= {
            finding["detail"].removeprefix("instruction ")
            for finding in report["findings"]
            if finding["kind"] == "not emulated"
        }
    assert ran > 700
    assert missing - {"(invalid)"} == LEFT_OUT


def test_everything_a_compiler_emits_is_executed() -> None:
    """Encodings without an operation are those that ops_scalar.def lists as left out."""
    words = b"".join(
        word.to_bytes(4, "little") for _, candidates in arithmetic_words() for word in candidates[0]
    )
    decoded = listing.parse(native.json_of(native.functions().lae_decode(words, len(words))))
    assert len({inst.name for inst in decoded}) > 700
    assert {inst.name for inst in decoded if not inst.known} - {"(invalid)"} == LEFT_OUT
