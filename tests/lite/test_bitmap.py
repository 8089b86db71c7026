"""Bitmaps: packing, counting, token ranges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liteattention_rocm.lite import bitmap

patterns = st.lists(st.booleans(), min_size=1, max_size=140)


def naive_words(bits: list[bool]) -> list[int]:
    number = sum(1 << j for j, bit in enumerate(bits) if bit)
    words = []
    for i in range(-(-len(bits) // 32)):
        word = number >> (32 * i) & 0xFFFFFFFF
        words.append(word - (1 << 32) if word >> 31 else word)
    return words


@given(patterns)
def test_pack_and_unpack(bits: list[bool]) -> None:
    mask = torch.tensor(bits)
    packed = bitmap.pack(mask)
    assert packed.dtype == torch.int32 and packed.tolist() == naive_words(bits)
    assert bitmap.unpack(packed, len(bits)).tolist() == bits
    assert int(bitmap.count(packed)) == sum(bits)
    assert bitmap.sparsity(packed, len(bits)) == 1 - sum(bits) / len(bits)


def test_pack_many_rows() -> None:
    mask = torch.rand(2, 3, 4, 70, generator=torch.manual_seed(0)) < 0.5
    packed = bitmap.pack(mask)
    assert packed.shape == (2, 3, 4, 3)
    assert torch.equal(bitmap.unpack(packed, 70), mask)
    assert int(bitmap.count(packed)) == int(mask.sum())
    assert int(bitmap.count(packed.transpose(0, 1))) == int(mask.sum())
    for one, bits in ((packed, mask), (packed.transpose(0, 1), mask.transpose(0, 1))):
        assert torch.equal(bitmap.count_by_head(one), bits.sum((0, 2, 3)))


@pytest.mark.parametrize("k_blocks", [1, 31, 32, 33, 64, 100])
def test_full_keeps_everything_and_nothing_beyond(k_blocks: int) -> None:
    made = bitmap.full(2, 3, 4, k_blocks)
    assert torch.equal(made, bitmap.pack(torch.ones(2, 3, 4, k_blocks, dtype=torch.bool)))
    assert int(bitmap.count(made)) == 24 * k_blocks
    assert bitmap.sparsity(made, k_blocks) == 0.0


def test_raises_of_the_bitmap_functions() -> None:
    with pytest.raises(TypeError, match=r"bool mask over K blocks, got torch.int32: use mask"):
        bitmap.pack(torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="got a scalar"):
        bitmap.pack(torch.tensor(True))
    with pytest.raises(TypeError, match=r"int32 tensor of uint32 words, got torch.int64"):
        bitmap.unpack(torch.ones(1, dtype=torch.int64), 3)
    with pytest.raises(TypeError, match="int32 tensor of uint32 words"):
        bitmap.count(torch.ones(1))
    with pytest.raises(ValueError, match="33 K blocks need 2 words in the last dimension"):
        bitmap.unpack(torch.ones(1, dtype=torch.int32), 33)
    with pytest.raises(ValueError, match="batch must be >= 0, got -1; k_blocks must be >= 0"):
        bitmap.full(-1, 1, 1, -2)


def test_token_ranges() -> None:
    outward = bitmap.token_ranges_to_blocks([(3, 5), (9, 10)], 11, 4, outward=True)
    assert outward.tolist() == [True, True, True]
    inward = bitmap.token_ranges_to_blocks([(3, 9), (9, 11)], 11, 4, outward=False)
    assert inward.tolist() == [False, True, True]
    with pytest.raises(ValueError, match=r"range 0 \[5, 3\) is descending.*\[9, 12\) ends past"):
        bitmap.token_ranges_to_blocks([(5, 3), (9, 12)], 11, 4, outward=True)


def test_bits_past_the_last_k_block_do_not_count() -> None:
    made = torch.full((1, 2, 3, 2), -1, dtype=torch.int32)
    assert int(bitmap.count(made, 39)) == 6 * 39
    assert bitmap.sparsity(made, 39) == 0.0
    assert int(bitmap.count(made)) == 6 * 64
    with pytest.raises(ValueError, match="need 1 words"):
        bitmap.count(made, 32)
