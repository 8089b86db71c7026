"""The skip oracle against a second one: per row, in plain Python, sharing no code with it."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from liteattention_rocm import attention, lite_attention
from liteattention_rocm.contract import TileGeometry
from liteattention_rocm.lite import bitmap

F = np.float32
LOG2E = 1.0 / math.log(2.0)


@dataclass
class Case:
    q: torch.Tensor  # [B, H, Sq, D]
    k: torch.Tensor
    v: torch.Tensor
    tile: TileGeometry
    read: list  # [B][H][q_block] -> set of K blocks
    threshold: float
    scale: float
    descending: bool = False
    soft_skip: bool = False
    must_do: frozenset = frozenset()
    must_skip: frozenset = frozenset()


def slow_step(case: Case) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Next lists as sets, output (float64) and LSE of one LiteAttention step."""
    tile, scale = case.tile, case.scale
    batch, heads, q_len, dim = case.q.shape
    kv_heads, kv_len = case.k.shape[1], case.k.shape[2]
    c = F(abs(scale) * LOG2E) if scale else F(1)
    sign = math.copysign(1.0, scale) if scale else 0.0
    out = torch.zeros(batch, heads, q_len, dim, dtype=torch.float64)
    lse = torch.full((batch, heads, q_len), -math.inf, dtype=torch.float64)
    written = [[[] for _ in range(heads)] for _ in range(batch)]
    for b, h in itertools.product(range(batch), range(heads)):
        queries = case.q[b, h].double().tolist()
        keys = case.k[b, h // (heads // kv_heads)].double().tolist()
        values = case.v[b, h // (heads // kv_heads)].double().tolist()
        for block in range(-(-q_len // tile.q_block)):
            rows = range(block * tile.q_block, min((block + 1) * tile.q_block, q_len))
            walk = sorted(
                (case.read[b][h][block] | case.must_do) - case.must_skip, reverse=case.descending
            )
            running = {r: F(-math.inf) for r in rows}
            seen: dict = {r: [] for r in rows}
            nxt = set()
            for j in walk:
                cols = range(j * tile.k_block, min((j + 1) * tile.k_block, kv_len))
                agree = {}
                for r in rows:
                    exact = [
                        sign * math.fsum(x * y for x, y in zip(queries[r], keys[n], strict=True))
                        for n in cols
                    ]
                    top = max(F(s) for s in exact)
                    far = F(F(top - running[r]) * c) <= F(case.threshold)
                    agree[r] = (
                        case.threshold > -math.inf
                        and running[r] > -math.inf
                        and bool(far)
                        and j not in case.must_do
                    )
                    running[r] = max(running[r], top)
                if not all(agree.values()):
                    nxt.add(j)
                for r in rows:
                    group = (r - rows[0]) // tile.vote_rows
                    mates = [m for m in rows if (m - rows[0]) // tile.vote_rows == group]
                    if not (case.soft_skip and all(agree[m] for m in mates)):
                        seen[r] += list(cols)
            written[b][h].append(nxt)
            for r in rows:
                if not seen[r]:
                    continue
                scores = [
                    scale * math.fsum(x * y for x, y in zip(queries[r], keys[n], strict=True))
                    for n in seen[r]
                ]
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                total = math.fsum(weights)
                lse[b, h, r] = top + math.log(total)
                for d in range(dim):
                    out[b, h, r, d] = (
                        math.fsum(w * values[n][d] for w, n in zip(weights, seen[r], strict=True))
                        / total
                    )
    return written, out, lse


def packed(lists: list, k_blocks: int) -> torch.Tensor:
    """Sets of K blocks as words, by Python integers rather than by bitmap.pack."""
    words = -(-k_blocks // 32)

    def row(kept: set) -> list[int]:
        number = sum(1 << j for j in kept)
        found = []
        for _ in range(words):
            word = number & 0xFFFFFFFF
            found.append(word - (1 << 32) if word >> 31 else word)
            number >>= 32
        return found

    return torch.tensor([[[row(s) for s in h] for h in b] for b in lists], dtype=torch.int32)


def mask_words(blocks: frozenset, k_blocks: int) -> torch.Tensor | None:
    return packed([[[set(blocks)]]], k_blocks)[0, 0, 0] if blocks else None


def fast_step(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k_blocks = case.tile.k_blocks(case.k.shape[2])
    read = packed(case.read, k_blocks)
    write = torch.full_like(read, 0x5A5A5A5A)
    out, lse = lite_attention(
        case.q, case.k, case.v, read, write, layout="bhsd", scale=case.scale,
        threshold=case.threshold, descending=case.descending, soft_skip=case.soft_skip,
        must_do=mask_words(case.must_do, k_blocks), must_skip=mask_words(case.must_skip, k_blocks),
        geometry=case.tile, return_lse=True, engine="reference",
    )  # fmt: skip
    return write, out, lse


def full_lists(case_q: torch.Tensor, tile: TileGeometry, k_blocks: int) -> list:
    batch, heads, q_len, _ = case_q.shape
    return [
        [[set(range(k_blocks)) for _ in range(tile.q_blocks(q_len))] for _ in range(heads)]
        for _ in range(batch)
    ]


def random_case(seed: int) -> Case:
    """Rows agree more or less on which keys matter, so that whole tiles get skipped."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, kv_heads = rng.choice([(1, 1), (1, 2), (2, 1)])
    heads = kv_heads * rng.choice([1, 1, 2, 3])
    dim = rng.choice([8, 16])
    vote_rows = rng.choice([1, 2, 4])
    tile = TileGeometry(vote_rows * rng.choice([1, 2, 3]), rng.choice([1, 3, 4, 8]), vote_rows)
    q_len, kv_len = rng.choice([1, 3, 8, 13, 17]), rng.choice([1, 4, 9, 24, 40])
    common = torch.randn(dim)
    weight = torch.randn(batch, kv_heads, kv_len, 1) * rng.choice([0.3, 1.5])
    dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    q = (common + 0.3 * torch.randn(batch, heads, q_len, dim)).to(dtype)
    k = (common * weight + 0.3 * torch.randn(batch, kv_heads, kv_len, dim)).to(dtype)
    v = torch.randn(batch, kv_heads, kv_len, dim).to(dtype)
    k_blocks = tile.k_blocks(kv_len)
    density = rng.choice([0.0, 0.5, 1.0, 1.0, 1.0])
    read = [
        [
            [
                {j for j in range(k_blocks) if rng.random() < density}
                for _ in range(tile.q_blocks(q_len))
            ]
            for _ in range(heads)
        ]
        for _ in range(batch)
    ]
    blocks = list(range(k_blocks))
    rng.shuffle(blocks)
    forced = rng.choice([0, 0, 1, 3])
    return Case(
        q,
        k,
        v,
        tile,
        read,
        threshold=rng.choice([0.0, -0.5, -2.0, -4.0, -math.inf]),
        scale=rng.choice([1.0, 0.35, -0.5, 0.0]),
        descending=rng.random() < 0.5,
        soft_skip=rng.random() < 0.5,
        must_do=frozenset(blocks[:forced]),
        must_skip=frozenset(blocks[forced : forced + rng.choice([0, 0, 1, 2])]),
    )


def check(case: Case) -> list:
    want_lists, want, want_lse = slow_step(case)
    write, out, lse = fast_step(case)
    k_blocks = case.tile.k_blocks(case.k.shape[2])
    assert torch.equal(write, packed(want_lists, k_blocks))
    # half a unit in the last place, and half of the smallest fp16 subnormal
    half_ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
    bound = half_ulp[out.dtype] * 1.0001 * want.abs() + 2.0**-25
    assert bool(((out.double() - want).abs() <= bound).all())
    torch.testing.assert_close(lse, want_lse.float(), rtol=1e-6, atol=1e-6)
    return want_lists


def test_random_cases_over_consecutive_steps() -> None:
    skipped = total = soft = 0
    for seed in range(250):
        case = random_case(seed)
        for _ in range(2):
            lists = check(case)
            walked = sum(
                len((s | case.must_do) - case.must_skip) for b in case.read for h in b for s in h
            )
            total += walked
            skipped += walked - sum(len(s) for b in lists for h in b for s in h)
            soft += case.soft_skip
            case.read, case.descending = lists, not case.descending
    # the cases are worth something only if many tiles are dropped and many are not
    assert 0.1 < skipped / total < 0.9 and soft > 100


def structured(descending: bool = False, soft_skip: bool = False) -> Case:
    """12 rows, 5 K blocks of 4 keys (the last of 2); blocks 0 and 4 hold the large scores."""
    torch.manual_seed(0)
    tile = TileGeometry(8, 4, 4)
    q = torch.ones(1, 1, 12, 8).bfloat16()
    height = torch.tensor([4.0, 1.0, 2.0, 3.0, 4.0]).repeat_interleave(4)[:18]
    k = (height[:, None] * torch.ones(18, 8)).bfloat16()[None, None]
    v = torch.randn(1, 1, 18, 8).bfloat16()
    return Case(q, k, v, tile, full_lists(q, tile, 5), -6.0, 1.0, descending, soft_skip)


@pytest.mark.parametrize("soft_skip", [False, True])
def test_direction_decides_what_is_skipped(soft_skip: bool) -> None:
    up, down = structured(False, soft_skip), structured(True, soft_skip)
    assert check(up)[0][0] == [{0, 4}, {0, 4}]
    assert check(down)[0][0] == [{0, 4}, {0, 4}]
    up.read = [[[{1, 2, 3}, {2, 3}]]]
    assert check(up)[0][0] == [{1, 2, 3}, {2, 3}]  # each tile tops the ones before it
    up.descending = True
    assert check(up)[0][0] == [{3}, {3}]


def test_must_do_at_both_ends_and_must_skip_inside() -> None:
    for descending in (False, True):
        case = structured(descending)
        case.k[0, 0, 8:12] *= 4  # block 2 now tops everything
        case.must_do = frozenset({0, 4})
        case.must_skip = frozenset({3})
        case.read = [[[{1, 2, 3}, set()]]]
        first, second = check(case)[0][0]
        assert {0, 4} <= first and {0, 4} <= second and 3 not in first | second


def test_must_skip_wins_over_the_list_and_can_empty_it() -> None:
    case = structured()
    case.must_skip = frozenset(range(5))
    assert check(case)[0][0] == [set(), set()]
    _, out, lse = fast_step(case)
    assert not out.any() and bool((lse == -math.inf).all())


def test_empty_full_and_single_block_lists() -> None:
    case = structured()
    case.read = [[[set(), {2}]]]
    assert check(case)[0][0] == [set(), {2}]
    case.read = full_lists(case.q, case.tile, 5)
    check(case)


def test_rows_past_the_end_do_not_vote() -> None:
    case = structured()
    case.q = case.q[:, :, :9]  # the second q block has one valid row of eight
    case.read = full_lists(case.q, case.tile, 5)
    assert check(case)[0][0] == [{0, 4}, {0, 4}]


def test_threshold_minus_infinity_equals_dense_bit_for_bit() -> None:
    for seed in range(12):
        case = random_case(seed)
        case.threshold = -math.inf
        k_blocks = case.tile.k_blocks(case.k.shape[2])
        case.read = full_lists(case.q, case.tile, k_blocks)
        case.must_do = case.must_skip = frozenset()
        write, out, lse = fast_step(case)
        dense, dense_lse = attention(
            case.q, case.k, case.v, layout="bhsd", scale=case.scale, return_lse=True,
            engine="reference",
        )  # fmt: skip
        assert torch.equal(out, dense) and torch.equal(lse, dense_lse)
        assert torch.equal(write, packed(case.read, k_blocks))


def test_sparse_output_is_dense_output_masked_by_the_same_list() -> None:
    torch.manual_seed(5)
    tile = TileGeometry(16, 8, 8)
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float64) for _ in range(3))
    kept = torch.rand(1, 2, 3, 5) < 0.5
    kept[..., 0] |= ~kept.any(-1)
    read = bitmap.pack(kept)
    write = torch.empty_like(read)
    out = lite_attention(
        q, k, v, read, write, threshold=-2.0, geometry=tile, layout="bhsd", engine="reference"
    )
    mask = kept.repeat_interleave(16, 2)[:, :, :40].repeat_interleave(8, 3)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    assert torch.equal(write & ~read, torch.zeros_like(read))  # lists only shrink


def test_first_step_without_soft_skip_is_dense() -> None:
    case = structured(soft_skip=False)
    dense = attention(case.q, case.k, case.v, layout="bhsd", scale=case.scale, engine="reference")
    _, out, _ = fast_step(case)
    assert torch.equal(out, dense)
    case.soft_skip = True
    _, soft, _ = fast_step(case)
    assert not torch.equal(soft, dense)


def test_nan_scores_keep_their_tiles() -> None:
    case = structured()
    case.k[0, 0, 5, 0] = math.nan  # in block 1, which would be dropped
    write, out, _ = fast_step(case)
    # NaN stays in the running maximum, so nothing after block 1 may be dropped either
    assert bitmap.unpack(write, 5)[0, 0].tolist() == [[True] * 5] * 2
    assert bool(torch.isnan(out).all())


def test_what_a_skipped_tile_holds_does_not_matter() -> None:
    case = structured()
    case.read = [[[{0, 4}, {0, 4}]]]
    _, clean, _ = fast_step(case)
    case.k[:, :, 4:16] = math.nan
    case.v[:, :, 4:16] = math.inf
    _, out, _ = fast_step(case)
    assert torch.equal(out, clean)


def test_vote_is_exactly_float32() -> None:
    """A difference of exactly the threshold drops; one fp32 step less keeps."""
    q = torch.ones(1, 1, 1, 1)
    for score, kept in ((1.0, False), (1.0 + 2.0**-22, True)):
        k = torch.tensor([4.0, score]).view(1, 1, 2, 1)
        # scale ln 2 makes c = 1, so the differences are -3 and the next number above it
        case = Case(q, k, k.clone(), TileGeometry(1, 1, 1), [[[{0, 1}]]], -3.0, math.log(2.0))
        assert (1 in check(case)[0][0][0]) is kept


def test_product_with_the_factor_is_rounded_to_float32() -> None:
    q = torch.ones(1, 1, 1, 1)
    c = F(LOG2E)
    directions = set()
    for distance in (3.0, 5.0, 7.0, 9.0, 11.0, 13.0):
        k = torch.tensor([distance, 0.0]).view(1, 1, 2, 1)
        rounded = F(-distance) * c
        directions.add(float(rounded) < -distance * float(c))
        for threshold, kept in ((rounded, False), (np.nextafter(rounded, F(-99.0)), True)):
            tile = TileGeometry(1, 1, 1)
            case = Case(q, k, k.clone(), tile, [[[{0, 1}]]], float(threshold), 1.0)
            assert (1 in check(case)[0][0][0]) is kept
    assert directions == {False, True}  # a product left in float64 would miss on either side
