"""Levels that stay where a row's first K block put them, and tiles for which that went wrong.

On the machine of :mod:`.gluon_machine`, with every call as if it were a large one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry, attention, lite_attention
from liteattention_rocm.contract import DenseRequest, LiteRequest
from liteattention_rocm.lite import bitmap
from tests.oracle.tensors import normal

from . import gluon_machine

triton = pytest.importorskip("triton")
from liteattention_rocm import remembered  # noqa: E402
from liteattention_rocm.engines.triton import launch, tiles  # noqa: E402

from . import test_hopper_machine as machine  # noqa: E402
from . import test_weighing  # noqa: E402
from .test_hopper_machine import (  # noqa: E402
    TILE,
    WIDE_TILE,
    forgotten,  # noqa: F401
    hopper,  # noqa: F401
    run_on_machine,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
GEOMETRIES = pytest.mark.parametrize(
    ("dim", "tile"), [(64, TILE), (64, WIDE_TILE), (128, TILE)], ids=["64-low", "64", "128"]
)


@pytest.fixture(autouse=True)
def large(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Every grid is large and every walk long; no flag is left of a broken kernel."""
    monkeypatch.setattr(launch, "MOST_CUT", 0)
    monkeypatch.setattr(launch, "_FIXED_K_BLOCKS", 0)
    monkeypatch.setattr(launch, "workspaces", launch.Workspaces())


def computed_again() -> int:
    """Tiles that the last dense call noted; none is flagged any more."""
    _, last = launch.workspaces.pairs[CPU, 0]
    assert not bool(last[5::2].any())
    return int(last[1])


@pytest.mark.parametrize(("dim", "low"), [(64, False), (64, True), (128, False)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (192, 128), (300, 517), (130, 769)])
def test_dense(
    q_len: int, kv_len: int, dim: int, low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.test_dense(q_len, kv_len, dim, low, False, monkeypatch)
    assert computed_again() == 0


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("rising", "again"), [(1.0, False), (7.0, False), (9.0, True), (12.0, True)]
)
def test_rows_whose_scores_rise(rising: float, again: bool, dim: int) -> None:
    """By 13, 88, 113 and 150 log2 units in all; from 100 on, a level that stays is too low."""
    machine.test_rows_whose_scores_rise(rising, dim, torch.bfloat16)
    tile = TILE if dim == 128 else WIDE_TILE
    # Each once, of two videos and heads.
    assert computed_again() == again * 2 * 2 * tile.q_blocks(200)


def spoilt(dim: int, rows: int = 400, keys: int = 900) -> list[torch.Tensor]:
    """q, k, v [1, 2, S, D]: some rows of head 1 meet a key far above all that they saw first."""
    q, k, v = (normal(1, 2, n, dim, seed=n + i) for i, n in enumerate((rows, keys, keys)))
    k[0, 1, 70] = 30 * q[0, 1, 250]
    return [q, k, v]


@pytest.mark.parametrize("dim", [64, 128])
def test_calls_with_and_without_one_after_the_other(dim: int) -> None:
    """What a call noted is none of the next one's."""
    found = []
    for bad in (True, False, True, True, False):
        q, k, v = spoilt(dim)
        if not bad:
            k[0, 1, 70] = 0.0
        found.append((bad, attention(q, k, v, layout="bhsd", engine="portable")))
        assert (computed_again() > 0) == bad
        assert computed_again() < 2 * 3  # not all of them
    for bad, out in found:
        assert bool(out.isfinite().all())
        assert torch.equal(out, next(other for same, other in found if same == bad))


@GEOMETRIES
def test_a_step_that_keeps_every_tile_is_dense_bit_for_bit(
    dim: int, tile: TileGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.test_a_step_that_keeps_every_tile_is_dense_bit_for_bit(dim, tile)
    # Where some are computed again, with q blocks of the same height.
    monkeypatch.setattr(tiles, "_COST_OF_LOW", 0.0 if tile is TILE else math.inf)
    remembered.forget()
    q, k, v = spoilt(dim)
    read = bitmap.full(1, 2, tile.q_blocks(400), tile.k_blocks(900))
    out, lse = lite_attention(
        q, k, v, read, torch.zeros_like(read), geometry=tile, layout="bhsd", return_lse=True,
        engine="portable", threshold=-math.inf,
    )  # fmt: skip
    dense, dense_lse = attention(q, k, v, layout="bhsd", return_lse=True, engine="portable")
    assert computed_again() > 0
    assert torch.equal(out, dense) and torch.equal(lse, dense_lse)


@GEOMETRIES
@pytest.mark.parametrize("limit", [{"threshold": -3.0}, {"budget": 0.2}], ids=["votes", "weighs"])
def test_lists_of_tiles_that_are_computed_again(
    limit: dict[str, Any], dim: int, tile: TileGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the outputs, votes and masses of levels that follow; others are near them."""
    keys = 2000 if "budget" in limit else 900  # so many tiles that rows do not guard each
    case = test_weighing.Case(400, keys, (2, 2), dim, tile, masks=True)
    limit = limit | {"descending": True}  # the key far above is in the last tile walked
    q, k, v = spoilt(dim, keys=keys)
    if "budget" in limit:
        q *= 0.25  # and so flat
    read = bitmap.full(*case.shape)
    stayed = test_weighing.step(q, k, v, case, read, **limit)
    monkeypatch.setattr(launch, "levels_stay", lambda *_: False)
    remembered.forget()
    followed = test_weighing.step(q, k, v, case, read, **limit)
    again = 250 // tile.q_block
    rows = slice(again * tile.q_block, min((again + 1) * tile.q_block, 400))
    for name, part in (("out", rows), ("lse", rows), ("write", again), ("mass", again)):
        if name != "mass" or "budget" in limit:
            assert torch.equal(stayed[name][:, 1, part], followed[name][:, 1, part]), name
    if "budget" in limit:  # else what was counted twice would not matter
        masses = followed["mass"][:, 1, again]
        assert bool(((masses > 0) & (masses < 0.5)).any())
    assert bool(stayed["out"].isfinite().all())
    torch.testing.assert_close(stayed["lse"], followed["lse"], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(stayed["out"], followed["out"], rtol=2.0**-6, atol=2.0**-8)
    if "threshold" in limit:  # no tile is so near to it that rounded weights decide otherwise
        assert torch.equal(stayed["write"], followed["write"])


@pytest.mark.parametrize("budget", [None, 0.2])
def test_tiles_that_are_computed_again_count_once(budget: float | None) -> None:
    limit: dict[str, Any] = {"threshold": -3.0} if budget is None else {"budget": budget}
    lite = LiteAttention(SkipPolicy(**limit, warmup_steps=0), engine="portable", geometry=TILE)
    q, k, v = (x.transpose(1, 2) for x in spoilt(128))
    k = k.flip(1)  # this walk ascends
    lite(q, k, v, step=0, layer="one", num_steps=3)
    (record,) = lite.statistics.to_records()
    assert record["tiles_computed"] == 2 * 4 * 8
    assert record["tiles_kept"] == int(bitmap.count(lite.lists("one")).sum())


def test_sums_and_outputs_that_overflow_by_values_alone() -> None:
    """Weights up to 2^90 times values of 2^60: the sum of weights would do."""
    q, k, v = spoilt(128)
    k[0, 1, 70] *= 0.0
    peak = 90 * math.log(2) * math.sqrt(128)
    k[0, 1, 70] = q[0, 1, 250] / q[0, 1, 250].double().norm() ** 2 * peak
    v[0, 1] *= 2.0**60
    out = attention(q, k, v, layout="bhsd", engine="portable")
    assert computed_again() == 1 and bool(out.isfinite().all())
    expected = attention(q, k, v, layout="bhsd", engine="reference")
    torch.testing.assert_close(out[0, 1, 250], expected[0, 1, 250], rtol=2e-2, atol=0)


@GEOMETRIES
def test_votes_keep_tiles_that_scored_a_nan(dim: int, tile: TileGeometry) -> None:
    machine.test_votes_keep_tiles_that_scored_a_nan(dim, tile)


def test_votes_at_head_dim_128() -> None:
    machine.test_votes_at_head_dim_128()


def test_votes_of_three_warpgroups() -> None:
    machine.test_votes_of_three_warpgroups(False)


def test_votes_by_weights_as_they_are_multiplied() -> None:
    """Of three warpgroups: by the largest weights so far, rounded to bf16.

    2^-2 and a little more is rounded to 2^-2, the threshold. Scores are in log2 units. Rows without
    a finite score keep every tile.
    """
    q, v = torch.zeros(1, 1, 192, 64), normal(1, 1, 512, 64, seed=1)
    q[..., :2] = 1.0
    kept = []
    for peaks in ((0.0, -2 + 1e-3, -2 + 1e-2, -2 - 1e-2), (0.0, 3.0, 1 - 1e-2, 1 + 1e-2)):
        k = torch.zeros(1, 1, 512, 64)
        k[..., 0] = -50.0
        for tile, peak in enumerate(peaks):  # near enough as a sum of two bf16 numbers
            k[0, 0, 128 * tile + 5, :2] = torch.tensor([round(peak), peak - round(peak)])
        write = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        lite_attention(
            q.bfloat16(), k.bfloat16(), v, bitmap.full(1, 1, 1, 4), write, scale=math.log(2),
            threshold=-2.0, descending=False, geometry=WIDE_TILE, layout="bhsd",
            engine="portable",
        )  # fmt: skip
        kept.append(bitmap.unpack(write, 4)[0, 0, 0].tolist())
    assert kept == [[True, False, True, False], [True, True, False, True]]
    q[..., :2] = torch.tensor([-math.inf, 0.0])
    k[..., 0] = 50.0
    lite_attention(
        q.bfloat16(), k.bfloat16(), v, bitmap.full(1, 1, 1, 4), write, threshold=-2.0,
        geometry=WIDE_TILE, layout="bhsd", engine="portable",
    )  # fmt: skip
    assert write.item() == 0b1111


@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "masks"), [(200, 1000, (4, 2), True), (70, 4224, (2, 1), False)]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_weights_and_choices(
    q_len: int, kv_len: int, heads: tuple[int, int], masks: bool, dim: int
) -> None:
    machine.test_weights_and_choices(q_len, kv_len, heads, masks, dim)


@pytest.mark.parametrize("kv_len", [33 * 128 + 5, 65 * 128])
def test_weights_and_choices_of_long_walks(kv_len: int) -> None:
    """A last step that hides keys after a word of 32 was written; two words and a plain step."""
    machine.test_weights_and_choices(40, kv_len, (2, 1), False, 128)


def test_the_last_step_of_a_walk_that_weighs_hides_keys() -> None:
    """Those past the end score 0 there, far more than all others."""
    q, k = torch.zeros(1, 1, 40, 128), torch.zeros(1, 1, 33 * 128 + 5, 128)
    q[..., 0], k[..., 0] = 1.0, -20.0
    v = normal(1, 1, k.shape[2], 128, seed=1)
    found = [
        lite_attention(
            q.bfloat16(),
            k.bfloat16(),
            v,
            bitmap.full(1, 1, 1, 34),
            torch.zeros(1, 1, 1, 2, dtype=torch.int32),
            budget=0.1,
            descending=False,
            scale=1.0,
            geometry=TILE,
            layout="bhsd",
            return_lse=True,
            engine=engine,
        )
        for engine in ("portable", "reference")
    ]
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours.float(), expected.float(), rtol=1e-2, atol=1e-3)


def test_votes_of_tiles_that_are_computed_again() -> None:
    """What levels that stay voted is nothing to them: by rounded weights it may be more."""
    q, k, v = torch.zeros(1, 1, 192, 64), torch.zeros(1, 1, 512, 64), torch.ones(1, 1, 512, 64)
    q[..., :2] = 1.0
    k[..., 0] = -50.0
    # A weight of 1.0037, which is rounded down, one of 0.1774, which is 2^-2.5003 of it and rounded
    # up, and one that overflows.
    for tile, peak in enumerate(((0, 0), (0, 0.0054), (-2.5, 0.00508), (110, 0))):
        k[0, 0, 128 * tile + 5, :2] = torch.tensor(peak)
    write = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    lite_attention(
        q.bfloat16(), k.bfloat16(), v.bfloat16(), bitmap.full(1, 1, 1, 4), write, threshold=-2.5,
        scale=math.log(2), descending=False, geometry=WIDE_TILE, layout="bhsd", engine="portable",
    )  # fmt: skip
    assert bitmap.unpack(write, 4)[0, 0, 0].tolist() == [True, True, False, True]


def test_weights_of_three_warpgroups() -> None:
    machine.test_weights_of_three_warpgroups(200, True)


@pytest.mark.parametrize("rising", [0.7, 3.0])
def test_weights_of_rows_whose_scores_rise(rising: float) -> None:
    machine.test_weights_of_rows_whose_scores_rise(rising)


@GEOMETRIES
def test_a_row_keeps_the_tile_that_it_looks_at(dim: int, tile: TileGeometry) -> None:
    machine.test_a_row_keeps_the_tile_that_it_looks_at(dim, tile)


@pytest.mark.parametrize("dim", [64, 128])
def test_rows_past_the_end_take_nothing_from_a_weight(dim: int) -> None:
    machine.test_rows_past_the_end_take_nothing_from_a_weight(129, dim)


def test_who_keeps_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 without a mask, in large grids and long walks; alike for q blocks of either height."""
    monkeypatch.undo()
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    large = DenseRequest(
        1, 12, 12, 8192, 8192, 64, torch.bfloat16, CPU, "bhsd", 0.1, False, "rtne", False
    )
    wide = tiles._THREE_GROUPS
    assert launch.levels_stay(large, wide) and launch.levels_stay(large, tiles._TWO_GROUPS)
    others: list[dict[str, Any]] = [
        {"dtype": torch.float16}, {"causal": True}, {"kv_len": 4096}, {"q_len": 5120 * 4 // 3 // 2},
    ]  # fmt: skip
    for other in others:
        assert not launch.levels_stay(replace(large, **other), wide)
    lists = {name: getattr(large, name) for name in large.__dataclass_fields__}
    step = LiteRequest(
        **lists, geometry=WIDE_TILE, threshold=-4.0, descending=True, soft_skip=False
    )
    assert launch.levels_stay(step, wide)
    assert not launch.levels_stay(replace(step, soft_skip=True), wide)
    # Weights that are not negligible must not be flushed, where lists vote by them.
    for threshold, stay in ((-math.inf, True), (-100.0, True), (-101.0, False)):
        assert launch.levels_stay(replace(step, threshold=threshold), wide) == stay
        assert launch.levels_stay(replace(step, threshold=threshold), tiles._TWO_GROUPS)
    assert not launch.levels_stay(step, tiles.plain_lite(step))
    # Lists that may be cut follow.
    for heads in (1, 5, 8, 10, 12):
        small = replace(step, q_heads=heads, kv_heads=heads, geometry=TILE)
        own = tiles._HOPPER_LITE[64, 128]
        rows = heads * 64
        cut = launch.cut_for(small, own, rows, 64) > 0
        assert not (cut and launch.levels_stay(small, own))


#: What may be missing, and the test that notices.
BROKEN = [
    ("a look at sums", "(sums <= _MOST) & (zero == 0.0)", "zero == 0.0", "sums"),
    ("a look at outputs", "(sums <= _MOST) & (zero == 0.0)", "sums <= _MOST", "values"),
    ("what dense attention notes", "compute_again(next_tile, tile, True)", "pass", "calls"),
    ("a list that is noted", "compute_again(next_tile, tile, False)", "pass", "lists"),
    ("weights before the walk", "_weigh_anew(weights + at * k_blocks, k_blocks)", "pass", "lists"),
    ("rows without a finite score", "-1, bits)\n                    flush",
     "0, bits)\n                    flush", "wide votes"),
    ("votes before the walk", "_vote_anew(votes + at * words, words)", "pass", "votes again"),
    ("the last of 34 tiles, masked", "gl.where(hidden > 0, hidden, count)", "count", "34 tiles"),
    ("who counts", "gl.where(again == 0, count, 0)", "count", "counts"),
    ("what the last call but one noted", "gl.store(spare + 1, 0)", "pass", "calls"),
    ("the next tile that was noted", "turn += gl.num_programs(0)", "turn += 2 * gl.num_programs(0)",
     "all"),
    ("a list whose levels were low", ".store(low)", ".store(low * 0)", "lists"),
    ("a list of three warpgroups whose levels were low", "elif gl.max(low, 0):\n        per_group",
     "elif gl.max(low, 0) < 0:\n        per_group", "wide lists"),
    ("the tile that is voted on", "vote_by_weight(peak, top, bits, i - 1, negligible)",
     "vote_by_weight(peak, top, bits, i, negligible)", "wide votes"),
    ("every other weight", "gl.maximum(pair << 16, pair & -65536)", "(pair << 16)", "wide votes"),
    ("the largest weight so far", "bits, peak, top * share", "bits, peak, peak * 0.0 + share",
     "wide votes"),
    ("a tile that was noted already", "sem=\"relaxed\") == 0", "sem=\"relaxed\") >= 0", "all"),
    ("a flag that is cleared", "gl.store(next_tile + 5 + 2 * tile, 0, mask=noted)", "pass", "all"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "where"), [x[1:] for x in BROKEN], ids=[x[0] for x in BROKEN]
)
def test_what_is_missing_is_noticed(
    before: str, after: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError):
        run_on_machine(monkeypatch, "hopper", gluon_machine.load("hopper", 0, (before, after)))
        if where in ("lists", "wide lists"):
            dim, tile = (128, TILE) if where == "lists" else (64, WIDE_TILE)
            for limit in ({"threshold": -3.0}, {"budget": 0.2}):
                with monkeypatch.context() as patch:
                    test_lists_of_tiles_that_are_computed_again(limit, dim, tile, patch)
                remembered.forget()
        elif where == "votes again":
            test_votes_of_tiles_that_are_computed_again()
        elif where == "34 tiles":
            test_the_last_step_of_a_walk_that_weighs_hides_keys()
        elif where == "wide votes":
            test_votes_by_weights_as_they_are_multiplied()
        elif where == "calls":
            test_calls_with_and_without_one_after_the_other(128)
        elif where == "sums":
            test_rows_whose_scores_rise(9.0, True, 128)
        elif where == "counts":
            test_tiles_that_are_computed_again_count_once(0.2)
        elif where == "all":
            test_rows_whose_scores_rise(12.0, True, 128)
        else:
            test_sums_and_outputs_that_overflow_by_values_alone()
