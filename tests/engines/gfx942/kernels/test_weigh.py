"""Weighing tiles and choosing among them on the software MI300X, checkers on.

attention_weigh's weights against float64, select_tiles' choice bit for bit from its weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liteattention_rocm.contract import MI300X_GEOMETRY, LiteRequest
from liteattention_rocm.engines.reference import shares
from liteattention_rocm.lite import bitmap, budget
from tests.guards import wrong_masses

from . import machine

pytestmark = pytest.mark.usefixtures("emulator")

TILE = MI300X_GEOMETRY
WHOLE, PARTS = 2**28, 16  # a mass of 1 as the waves add it up, parts of a weight


def masses(weights: torch.Tensor) -> torch.Tensor:
    """fp32 masses of the sums that attention_weigh leaves, int32 that are meant as uint32."""
    parts = weights.long() & 0xFFFFFFFF
    weight = (-(-parts // PARTS)).clamp_max(budget.UNIT)
    return (weight.double() / budget.UNIT).float()


def rounding(k_blocks: int) -> float:
    """How far a row's share, and a mean of such, may be from the exact one, of at most 1.

    In units u = 2^-24:

    A lane adds up 32 probabilities of a tile in two chains (17 u) and its sum over the K blocks
    (1 u each), a row both of its groups (1 u); where a maximum rises by more than the slack the sum
    is shrunk to 2^-8 (4 u, of less and less). A probability p = 2^-a has an exponential of 1 ulp
    (2 u) and an argument in which c and the result of one multiply-add are rounded, a 2 ln 2 u of
    p: in the mean over a row at most 2 ln 2 log2(keys) < 32 u. All of these reach t and L: twice.
    Dividing and adding up the rows is rounded upwards, by at most 2^-19 + 14 u < 48 u, a wave's
    part by 1/16 u and the weight by 1 u.
    """
    return (2 * (17 + k_blocks + 1 + 4 + 2 + 32) + 48 + 2) * 2.0**-24


def grid(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Eighths within +-4: products of two are exact, whatever the order of their sums."""
    return ((torch.randn(shape, generator=generator) * 8).round() / 8).clamp(-4, 4)


def tensors(
    q_len: int, kv_len: int, dim: int, heads: tuple[int, int], seed: int
) -> list[torch.Tensor]:
    """q, k, v [2, S, H, D] bf16, strided; rows look one way, K blocks lie at different heights."""
    g = torch.Generator().manual_seed(seed)
    common, (q_heads, kv_heads) = grid(1, 1, 1, dim, generator=g), heads
    height = torch.rand(2, kv_heads, -(-kv_len // 64), 1, generator=g).repeat_interleave(64, 2)
    q = common + grid(2, q_heads, q_len, dim, generator=g) / 2
    k = (
        common * (height[:, :, :kv_len] * 3).round() / 2
        + grid(2, kv_heads, kv_len, dim, generator=g) / 2
    )
    v = torch.randn(2, kv_heads, kv_len, dim, generator=g)
    return [x.clamp(-4, 4).bfloat16().transpose(1, 2) for x in (q, k, v)]


def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, read: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weights, out, lse) of one launch, its memory guarded; 0 wherever no tile is computed."""
    shape = (*read.shape[:3], TILE.k_blocks(k.shape[1]))
    guarded = torch.full((math.prod(shape) + 64,), 0x5A5A5A5A, dtype=torch.int32)
    weights = guarded[32:-32].view(shape)
    out = torch.full_like(q, 7.0)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    machine.weigh(q, k, v, out, lse, read, weights, **options)
    assert (guarded[:32] == 0x5A5A5A5A).all() and (guarded[-32:] == 0x5A5A5A5A).all()
    return weights, out, lse


def exact(
    q: torch.Tensor, k: torch.Tensor, read: torch.Tensor, scale: float, descending: bool,
    must_do: torch.Tensor | None, must_skip: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, q_len, q_heads, dim = q.shape
    request = LiteRequest(
        batch, q_heads, k.shape[2], q_len, k.shape[1], dim, q.dtype, q.device, "bshd", scale,
        False, "rtne", False, TILE, -math.inf, descending, False, 0.5,
    )  # fmt: skip
    return shares(request, q, k, read, must_do, must_skip)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "dim", "heads", "scale"),
    [
        (390, 715, 128, (2, 1), 0.02),  # waves with all, some and none of their rows; ragged K
        (33, 2111, 64, (1, 1), 0.05),  # two words of bits
        (256, 256, 64, (2, 2), -0.05),
        (1, 64, 128, (1, 1), 0.0),
    ],
)
def test_weights_are_near_float64_and_outputs_those_without_a_threshold(
    q_len: int, kv_len: int, dim: int, heads: tuple[int, int], scale: float, descending: bool
) -> None:
    q, k, v = tensors(q_len, kv_len, dim, heads, seed=q_len)
    k_blocks = TILE.k_blocks(kv_len)
    g = torch.Generator().manual_seed(kv_len)
    shape = (2, heads[0], TILE.q_blocks(q_len), k_blocks)
    read = bitmap.pack(torch.rand(shape, generator=g) < 0.8)
    must_do, must_skip = (
        bitmap.pack(torch.rand(k_blocks, generator=g) < share) for share in (0.1, 0.1)
    )
    for n, dtype in itertools.product(range(2), (torch.bfloat16, torch.float16)):
        masks = {"must_do": must_do, "must_skip": must_skip} if n else {}
        given = [x.to(dtype) for x in (q, k, v)]
        options = {"scale": scale, "descending": descending, **masks}
        weights, out, lse = step(*given, read, order=machine.plan(read), **options)
        walked, share = exact(
            *given[:2], read, scale, descending, masks.get("must_do"), masks.get("must_skip")
        )
        found = masses(weights)
        assert not found[~walked].any()
        assert not wrong_masses(found, share, TILE.q_block, rounding(k_blocks)).any()
        first = walked.int().flip(-1) if descending else walked.int()
        at = first.argmax(-1, keepdim=True)
        at = k_blocks - 1 - at if descending else at
        assert (found.gather(-1, at)[walked.any(-1, keepdim=True)] == 1).all()
        voted, voted_lse = torch.full_like(out, 7.0), torch.empty_like(lse)
        write = torch.empty_like(read)
        machine.lite(*given, voted, voted_lse, read, write, threshold=-math.inf, **options)
        assert torch.equal(out.view(torch.int16), voted.view(torch.int16))
        assert torch.equal(lse, voted_lse)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_rows_that_met_a_special_score(special: float) -> None:
    q, k, v = tensors(70, 640, 64, (1, 1), seed=5)
    read = bitmap.full(2, 1, 1, 10)
    q[..., 63], k[..., 63] = 0.0, 0.0
    q[1, 40, 0, 63] = 1.0
    for descending in (False, True):
        k[1, 300, 0, 63] = 0.0
        plain = masses(step(q, k, v, read, scale=0.02, descending=descending)[0])
        k[1, 300, 0, 63] = special  # in tile 4; 0 * special is NaN in the other rows
        found = masses(step(q, k, v, read, scale=0.02, descending=descending)[0])
        after, before = slice(0, 5), slice(5, 10)
        if not descending:
            after, before = slice(4, 10), slice(0, 4)
        assert (found[1, ..., after] == 1).all() and not (plain[1, ..., after] == 1).all()
        assert torch.equal(found[1, ..., before], plain[1, ..., before])
        assert torch.equal(found[0], plain[0])


def test_rows_that_have_seen_nothing_keep_their_tiles() -> None:
    q, k, v = tensors(300, 512, 64, (1, 1), seed=6)
    q[..., 63], k[..., 63] = 1.0, 0.0
    k[:, :128, :, 63] = -math.inf  # every row scores -inf in the first two blocks
    found = masses(step(q, k, v, bitmap.full(2, 1, 2, 8), scale=0.02)[0])
    assert (found[..., :3] == 1).all() and (found[..., 3:] < 1).any(-1).all()


def parted(k_blocks: int) -> float:
    """How much less than its mass a tile of a cut list may weigh: :func:`rounding`, once more.

    What merge_lists multiplies by is rounded up (2^-16) by more than two exponents of at most 64
    in size, sums of 8 parts and a reciprocal lose.
    """
    return rounding(k_blocks)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "dim", "heads", "units", "scale"),
    [
        (300, 4231, 128, (2, 1), 5, 0.02),  # parts that end within words, a ragged block, GQA
        (33, 8192, 64, (1, 1), 38, 0.05),  # a list in many parts
        (256, 6400, 64, (2, 2), 2, -0.05),
        (1, 4111, 128, (1, 1), 9, 0.0),
    ],
)
def test_lists_that_are_cut_are_attended_to_and_weighed(
    q_len: int, kv_len: int, dim: int, heads: tuple[int, int], units: int, scale: float
) -> None:
    """Outputs as of whole lists up to rounding; tiles weigh their mass or more.

    No more than their share of what their part has seen, scaled as merge_lists says; 1 if a row
    has more than the guard of what the part has seen, unless the part has too little of all rows.
    """
    q, k, v = tensors(q_len, kv_len, dim, heads, seed=q_len)
    k_blocks, q_blocks = TILE.k_blocks(kv_len), TILE.q_blocks(q_len)
    g = torch.Generator().manual_seed(kv_len)
    read_tiles = torch.rand((2, heads[0], q_blocks, k_blocks), generator=g) < 0.8
    read_tiles[0, 0, 0, k_blocks // 3 : k_blocks // 2] = False  # whole words without a block
    read_tiles[1, -1, -1] = False  # a list of nothing
    read = bitmap.pack(read_tiles)
    must_do, must_skip = (
        bitmap.pack(torch.rand(k_blocks, generator=g) < share) for share in (0.1, 0.1)
    )
    guarded = 0
    for n, dtype in itertools.product(range(2), (torch.bfloat16, torch.float16)):
        masks = {"must_do": must_do, "must_skip": must_skip} if n else {}
        descending = n == 1
        given = [x.to(dtype) for x in (q, k, v)]
        cut = machine.cut(read, units, k_blocks=k_blocks, **masks)
        assert (cut.cuts[:, 1] > 1).any() and (cut.parts[cut.order >= 0][:, 2] >= 0).any()
        options = {"scale": scale, "descending": descending, **masks}
        weights, out, lse = step(*given, read, order=cut, **options)
        _, whole_out, whole_lse = step(*given, read, **options)
        walked, share = exact(
            *given[:2], read, scale, descending, masks.get("must_do"), masks.get("must_skip")
        )
        found, least = masses(weights), exact_masses(*given[:2], walked, scale)
        assert not found[~walked].any()
        assert (found - least).min() >= -parted(k_blocks)
        seen, above = seen_by_parts(*given[:2], walked, scale, descending, cut)
        error = parted(k_blocks) + 2.0**-16
        unsure = above.abs() <= error
        assert (found - seen)[~unsure & (above < 0)].max() <= error
        assert ((found - seen <= error) | (found == 1)).all()
        parts_of_lists = in_parts(cut, walked.shape[:3])[..., None]
        assert (found == 1)[~unsure & (above > 0) & parts_of_lists].all()
        guarded += int((parts_of_lists & (above > 0)).sum())
        wrong = wrong_masses(found, share, TILE.q_block, rounding(k_blocks))
        assert not (wrong & ~parts_of_lists).any()
        last_bit = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-10
        assert (out.float() - whole_out.float()).abs().max() <= 2 * last_bit * v.abs().max()
        assert torch.allclose(lse, whole_lse, rtol=0, atol=4e-6)
    assert guarded


def probabilities(
    q: torch.Tensor, k: torch.Tensor, walked: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of exponentials of each tile and row, [B, H, S, K_blocks] float64, and the rows' all."""
    group = q.shape[2] // k.shape[2]
    heads = k.double().repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), heads) * scale
    rows = walked.repeat_interleave(TILE.q_block, 2)[:, :, : q.shape[1]]
    keys = rows.repeat_interleave(TILE.k_block, 3)[..., : k.shape[1]]
    scores = scores.masked_fill(~keys, -math.inf)
    top = scores.amax(-1, keepdim=True).clamp_min(-1e300)
    sums = torch.nn.functional.pad((scores - top).exp(), (0, -k.shape[1] % TILE.k_block))
    tiles = sums.unflatten(-1, (-1, TILE.k_block)).sum(-1)
    return tiles, tiles.sum(-1, keepdim=True)


def mean_over_rows(shares: torch.Tensor) -> torch.Tensor:
    """[B, H, S, K_blocks] to [B, H, q_blocks, K_blocks]."""
    return torch.stack([rows.nan_to_num().mean(2) for rows in shares.split(TILE.q_block, 2)], 2)


def exact_masses(
    q: torch.Tensor, k: torch.Tensor, walked: torch.Tensor, scale: float
) -> torch.Tensor:
    tiles, all_of_row = probabilities(q, k, walked, scale)
    return mean_over_rows(tiles / all_of_row)


def seen_by_parts(
    q: torch.Tensor, k: torch.Tensor, walked: torch.Tensor, scale: float, descending: bool,
    cut: machine.Cut,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The largest that a tile may weigh: its share of what its part has seen by then.

    Times the largest share, in the wave's 32 rows, that the part has of the whole row. Then how far
    the tile is above the guard: of a wave's largest share of a row and of that share of the part
    the smaller one, and of the waves the largest.
    """
    tiles, all_of_row = probabilities(q, k, walked, scale)
    numbers = walked.flatten(0, 2)
    most = torch.zeros(walked.shape, dtype=torch.float64)
    above = torch.full_like(most, -1.0)
    flat, flat_above = most.flatten(0, 2), above.flatten(0, 2)
    heads, q_blocks = walked.shape[1:3]
    for tile, (first, end, slot, _) in zip(
        cut.order[cut.order >= 0].tolist(), cut.parts[cut.order >= 0].tolist(), strict=True
    ):
        blocks = numbers[tile].nonzero().flatten()
        blocks = blocks.flip(0) if descending else blocks
        mine = blocks if slot < 0 else blocks[first:end]
        b, h, x = tile // q_blocks // heads, tile // q_blocks % heads, tile % q_blocks
        here = slice(x * TILE.q_block, (x + 1) * TILE.q_block)
        rows = tiles[b, h, here][:, mine]
        shares = rows / rows.cumsum(-1)
        of_row = rows.sum(-1) / all_of_row[b, h, here, 0]
        for share, factor in zip(shares.split(32), of_row.split(32), strict=True):
            flat[tile, mine] += share.sum(0) * factor.max() / len(rows)
            over = share.amax(0).clamp(max=float(factor.max())) - budget.ROW_GUARD
            flat_above[tile, mine] = flat_above[tile, mine].maximum(over)
    return most, above


def in_parts(cut: machine.Cut, shape: torch.Size) -> torch.Tensor:
    """Which tiles' lists are cut."""
    found = torch.zeros(math.prod(shape), dtype=torch.bool)
    found[cut.order[(cut.order >= 0) & (cut.parts[..., 2] >= 0)].long()] = True
    return found.view(shape)


def test_parts_with_special_scores_keep_their_tiles() -> None:
    """NaN and +inf: all tiles that come after weigh 1; what has seen only -inf does not count."""
    q, k, v = tensors(70, 4096, 64, (1, 1), seed=5)
    read = bitmap.full(2, 1, 1, 64)
    cut = machine.cut(read, 38, k_blocks=64)
    q[..., 63], k[..., 63] = 0.0, 0.0
    q[1, 40, 0, 63] = 1.0
    plain = masses(step(q, k, v, read, scale=0.02, order=cut)[0])
    assert not (plain[..., 33:] == 1).all(-1).any()
    for special in (math.nan, math.inf):
        k[1, 64 * 33, 0, 63] = special  # in tile 33; 0 * special is NaN in the other rows
        found = masses(step(q, k, v, read, scale=0.02, order=cut)[0])
        assert (found[1, ..., 33:] == 1).all() and torch.equal(found[0], plain[0])
    k[..., 63], q[..., 63] = 0.0, 1.0
    k[:, : 64 * 30, :, 63] = -math.inf  # no row scores anything in the first parts
    weights, out, lse = step(q, k, v, read, scale=0.02, order=cut)
    walked = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    kept = walked.clone()
    kept[..., :30] = False
    finite = k.clone()
    finite[..., 63] = 0.0
    least = exact_masses(q, finite, kept, 0.02)
    assert (masses(weights) - least)[..., 30:].min() >= -parted(64)
    only, only_lse = torch.full_like(q, 7.0), torch.empty_like(lse)
    machine.weigh(
        q, finite, v, only, only_lse, bitmap.pack(kept), torch.empty_like(weights), scale=0.02
    )
    assert torch.allclose(lse, only_lse, rtol=0, atol=4e-6)
    assert (out.float() - only.float()).abs().max() <= 2.0**-6 * v.abs().max()


def test_the_parts_of_a_row_that_sees_nothing_give_nothing() -> None:
    q, k, v = tensors(40, 4096, 64, (1, 1), seed=7)
    q[..., 63], k[..., 63] = 1.0, -math.inf
    read = bitmap.full(2, 1, 1, 64)
    weights, out, lse = step(q, k, v, read, scale=0.02, order=machine.cut(read, 38, k_blocks=64))
    assert (masses(weights) == 1).all()
    assert not out.any() and (lse == -math.inf).all()


def test_all_interleavings_of_waves_agree() -> None:
    import liteattention_emulator as emulator

    q, k, v = tensors(300, 330, 64, (1, 1), seed=23)
    long = [x[:1] for x in tensors(300, 2600, 64, (1, 1), seed=24)]
    results: list[tuple[torch.Tensor, ...]] = []
    for order in ("round-robin", "first-ahead", "last-ahead", "random:1"):
        emulator.set_option("order", order)
        try:
            results.append(step(q, k, v, bitmap.full(2, 1, 2, 6), scale=0.05, descending=True))
            cut = machine.cut(bitmap.full(1, 1, 2, 41), 5, k_blocks=41)
            parts = step(*long, bitmap.full(1, 1, 2, 41), scale=0.05, order=cut)
            results[-1] = *results[-1], *parts
        finally:
            emulator.set_option("order", "")
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


parts = st.one_of(
    st.sampled_from([0, 1, 15, 16, 17, 2**27, WHOLE - 15, WHOLE, WHOLE + 1, 2**31, 2**32 - 8]),
    st.integers(0, WHOLE),
    st.integers(0, 2**12),
)
tile_rows = st.lists(
    st.tuples(parts, st.sampled_from([True, True, True, False]), st.booleans(), st.booleans()),
    min_size=1,
    max_size=140,
)


def choose(
    weights: torch.Tensor, listed: torch.Tensor, share: float | Sequence[float],
    must_do: torch.Tensor | None, must_skip: torch.Tensor | None, q_blocks: int = 1,
) -> torch.Tensor:  # fmt: skip
    """``weights`` int64 [tiles, K_blocks]; checks the choice and the masses that are written.

    A sequence has a share for each head, of which ``q_blocks`` tiles in a row are. Returns which
    tiles were dropped.
    """
    k_blocks = weights.shape[-1]
    nothing = torch.zeros(k_blocks, dtype=torch.bool)
    do, skip = (nothing if x is None else x for x in (must_do, must_skip))
    walked = (listed | do) & ~skip
    raw = torch.where(walked, weights, 0)
    stored = torch.where(raw > 2**31 - 1, raw - 2**32, raw).int()
    read = bitmap.pack(listed)
    if k_blocks % 32:  # bits past the last block mean nothing
        read[..., -1] |= -1 << k_blocks % 32
    guarded = torch.full((read.numel() + 2,), 0x5A5A5A5A, dtype=torch.int32)
    write = guarded[1:-1].view_as(read)
    mass = torch.full(raw.shape, math.nan)
    masks = [None if x is None else bitmap.pack(x) for x in (must_do, must_skip)]
    by_head = isinstance(share, Sequence)
    machine.select(
        stored.clone(), read, write, budget.limit_of(max(share) if by_head else share),
        must_do=masks[0], must_skip=masks[1], mass=mass,
        limits=budget.limits(share) if by_head else None, q_blocks=q_blocks,
    )  # fmt: skip
    assert torch.equal(mass, masses(stored))
    shares = share if by_head else [share]
    each = zip(mass.split(q_blocks), walked.split(q_blocks), itertools.cycle(shares), strict=False)
    chosen = torch.cat([budget.select(x, here, do, value) for x, here, value in each])
    assert torch.equal(write, bitmap.pack(chosen))
    assert guarded[0] == guarded[-1] == 0x5A5A5A5A
    return walked & ~chosen


@settings(max_examples=120, deadline=None)
@given(tile_rows, st.floats(2.0**-40, 0.999), st.booleans())
def test_the_choice_is_the_rules(
    row: list[tuple[int, bool, bool, bool]], share: float, masked: bool
) -> None:
    weight, listed, must_do, must_skip = (torch.tensor([e[i] for e in row]) for i in range(4))
    masks = (must_do, must_skip & must_do.roll(1)) if masked else (None, None)
    choose(weight[None], listed[None].bool(), share, *masks)


@pytest.mark.parametrize("k_blocks", [1, 31, 32, 33, 64, 2100])
def test_rows_of_any_length_and_ties(k_blocks: int) -> None:
    g = torch.Generator().manual_seed(k_blocks)
    fine = torch.randint(0, WHOLE // k_blocks * 2, (5, k_blocks), generator=g)
    ties = torch.randint(1, 4, (5, k_blocks), generator=g) * (WHOLE // k_blocks // 4)
    huge = torch.full((5, k_blocks), 2**32 - 8)
    listed = torch.rand(5, k_blocks, generator=g) < 0.9
    listed[4] = False  # nothing computed, nothing kept
    for weights, share in itertools.product((fine, ties, huge), (2.0**-30, 0.1, 0.5)):
        choose(weights, listed, share, None, None)
        choose(weights, listed, share, torch.rand(k_blocks, generator=g) < 0.1, None)


@pytest.mark.parametrize(
    ("batch", "q_blocks", "shares"),
    [
        (2, 3, (0.3, 0.0, 2.0**-30, 0.02, 0.6)),
        (3, 1, (0.0, 0.4, 0.1)),
        (1, 7, (0.0, 0.5)),
        (2, 4, (0.2,)),
    ],
)
def test_heads_have_limits_of_their_own(
    batch: int, q_blocks: int, shares: tuple[float, ...]
) -> None:
    """One whose limit is 0 keeps all, also what weighs nothing."""
    k_blocks = 70
    g = torch.Generator().manual_seed(q_blocks)
    tiles = batch * len(shares) * q_blocks
    weights = torch.randint(0, WHOLE // k_blocks * 2, (tiles, k_blocks), generator=g)
    weights[:, ::9] = 0
    listed = torch.rand(tiles, k_blocks, generator=g) < 0.9
    must_do = torch.rand(k_blocks, generator=g) < 0.1
    for mask in (None, must_do):
        dropped = choose(weights, listed, shares, mask, None, q_blocks)
        heads = dropped.view(batch, len(shares), q_blocks, k_blocks).any(-1)
        for head, share in enumerate(shares):
            assert bool((heads[:, head] == (share > 2.0**-24)).all())
