"""bf16 rounding against an oracle of integers: candidates by bisection, distances exact."""

from __future__ import annotations

import bisect
import math
import struct
from fractions import Fraction

import pytest
import torch

from liteattention_rocm.engines.rounding import round_to_bf16

MODES = ("rtne", "rtna", "rtz")
OFFSETS = (0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF)


def magnitude_of_fp32(bits: int) -> int:
    """Value of a positive finite fp32 word in units of 2^-149."""
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    return mantissa if exponent == 0 else (mantissa + 0x800000) << (exponent - 1)


# Positive bf16 values in the same units; the last one is 2^128, where infinity stands in for the
# number that an unbounded exponent would give.
BF16 = []
for word in range(0x7F81):
    exponent, mantissa = word >> 7, word & 0x7F
    BF16.append((mantissa if exponent == 0 else (mantissa + 0x80) << (exponent - 1)) << 16)


def expected(bits: int, mode: str) -> int:
    """bf16 word of a positive finite fp32 word."""
    value = magnitude_of_fp32(bits)
    low = bisect.bisect_right(BF16, value) - 1
    if BF16[low] == value or mode == "rtz":
        return low
    below, above = value - BF16[low], BF16[low + 1] - value
    if below != above:
        return low if below < above else low + 1
    if mode == "rtna":
        return low + 1
    return low if low % 2 == 0 else low + 1


def from_words(words: list[int]) -> torch.Tensor:
    signed = [w - (1 << 32) if w >= 1 << 31 else w for w in words]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def words_of(x: torch.Tensor) -> list[int]:
    assert x.dtype == torch.bfloat16
    return [w & 0xFFFF for w in x.view(torch.int16).tolist()]


def test_oracle_decodes_known_numbers() -> None:
    for number in (1.0, 1.5, 2.0**-126, 2.0**-149, 3.0e38, 0.1):
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        (stored,) = struct.unpack("<f", struct.pack("<f", number))
        assert Fraction(magnitude_of_fp32(bits), 2**149) == Fraction(stored)


@pytest.mark.parametrize("mode", MODES)
def test_neighbourhood_of_every_bf16_value(mode: str) -> None:
    positive = [(w << 16) + offset for w in range(0x7F80) for offset in OFFSETS]
    want = [expected(bits, mode) for bits in positive]
    assert words_of(round_to_bf16(from_words(positive), mode)) == want
    negative = [bits | 0x80000000 for bits in positive]
    assert words_of(round_to_bf16(from_words(negative), mode)) == [w | 0x8000 for w in want]


@pytest.mark.parametrize("mode", MODES)
def test_random_words(mode: str) -> None:
    bits = torch.randint(0, 0x7F800000, (100_000,), generator=torch.manual_seed(1)).tolist()
    assert words_of(round_to_bf16(from_words(bits), mode)) == [expected(b, mode) for b in bits]


@pytest.mark.parametrize(
    ("number", "rtne", "rtna", "rtz"),
    [
        (1.0 + 2**-8, 0x3F80, 0x3F81, 0x3F80),  # tie below an odd mantissa
        (1.0 + 3 * 2**-8, 0x3F82, 0x3F82, 0x3F81),  # tie below an even mantissa
        (-(1.0 + 2**-8), 0xBF80, 0xBF81, 0xBF80),
        (0.0, 0, 0, 0),
        (-0.0, 0x8000, 0x8000, 0x8000),
        (math.inf, 0x7F80, 0x7F80, 0x7F80),
        (-math.inf, 0xFF80, 0xFF80, 0xFF80),
        (3.4028234663852886e38, 0x7F80, 0x7F80, 0x7F7F),  # largest fp32: overflow
        (-3.4028234663852886e38, 0xFF80, 0xFF80, 0xFF7F),
        (2.0**-149, 0, 0, 0),  # smallest fp32 subnormal
        (-(2.0**-149), 0x8000, 0x8000, 0x8000),
        (2.0**-134, 0, 1, 0),  # half of the smallest bf16 subnormal: a tie
        (3 * 2.0**-134, 2, 2, 1),
        (2.0**-126 - 2.0**-149, 0x0080, 0x0080, 0x007F),  # subnormal rounds up to normal
    ],
)
def test_special_values(number: float, rtne: int, rtna: int, rtz: int) -> None:
    x = torch.tensor([number], dtype=torch.float32)
    assert [words_of(round_to_bf16(x, mode))[0] for mode in MODES] == [rtne, rtna, rtz]


@pytest.mark.parametrize("mode", MODES)
def test_nan_stays_nan_quiet_with_sign_and_payload(mode: str) -> None:
    for sign in (0, 0x80000000):
        for payload in (1, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x3FFFFF, 0x400000, 0x7FFFFF):
            (word,) = words_of(round_to_bf16(from_words([sign | 0x7F800000 | payload]), mode))
            assert word & 0x7FC0 == 0x7FC0  # exponent of a NaN, quiet bit
            assert word & 0x8000 == sign >> 16
            assert word & 0x3F == payload >> 16 & 0x3F


def test_rtne_is_torchs_own_cast() -> None:
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=torch.manual_seed(2))
    x = bits.to(torch.int32).view(torch.float32)
    ours, torchs = round_to_bf16(x), x.to(torch.bfloat16)
    nan = torch.isnan(x)
    assert torch.equal(torch.isnan(ours), nan)
    assert torch.equal(ours[~nan].view(torch.int16), torchs[~nan].view(torch.int16))


def test_float64_goes_through_float32() -> None:
    just_above_a_tie = 1.0 + 2.0**-8 + 2.0**-40
    x = torch.tensor([just_above_a_tie], dtype=torch.float64)
    # float32 lands on the tie, which goes to even; rounding once would have gone up
    assert words_of(round_to_bf16(x, "rtne")) == [0x3F80]
    y = torch.randn(10_000, dtype=torch.float64, generator=torch.manual_seed(3))
    for mode in MODES:
        assert torch.equal(round_to_bf16(y, mode), round_to_bf16(y.float(), mode))


def test_shape_and_strides_are_kept() -> None:
    x = torch.randn(4, 6, generator=torch.manual_seed(4)).t()[::2]
    assert torch.equal(round_to_bf16(x), x.to(torch.bfloat16))


def test_refuses_other_dtypes_and_modes() -> None:
    with pytest.raises(TypeError, match="takes float32 or float64, got torch"):
        round_to_bf16(torch.ones(2, dtype=torch.float16))
    with pytest.raises(ValueError, match="unknown rounding 'up': use one of rtne, rtna, rtz"):
        round_to_bf16(torch.ones(2), "up")
