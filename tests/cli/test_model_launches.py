"""Launches of our kernels on the whole chip: the work is the shape's, whatever the plan."""

from __future__ import annotations

import numpy as np
import pytest

from liteattention_benchmark import launches
from liteattention_benchmark.model import Case, record
from liteattention_emulator.timing import replay
from liteattention_rocm import _core


@pytest.mark.parametrize("shape", [(2, 24, 16384, 128), (1, 1, 384, 64), (1, 5, 20000, 128)])
def test_dense_workgroups_do_all_blocks(shape: tuple[int, int, int, int]) -> None:
    batch, heads, length, dim = shape
    found = launches.work_of(Case(shape, "dense", "rtne"))
    tiles = batch * heads * -(-length // _core.GFX942_Q_BLOCK)
    blocks = -(-length // 64)
    plan = _core.plan_dense(_core.DenseShape(batch, heads, heads, length, length, dim), 304, 0)
    assert found.blocks.sum() == tiles * blocks
    assert len(found.blocks) == plan.dense_grid
    assert (found.blocks[: plan.whole_tiles] == blocks).all()
    assert np.ptp(found.blocks[plan.whole_tiles :]) <= 1 if plan.splits > 1 else True
    v_bytes = 2 * batch * heads * blocks * 64 * dim
    assert found.pass_bytes >= 2 * v_bytes and (found.pass_bytes > 2 * v_bytes) == (plan.splits > 1)


@pytest.mark.parametrize(
    ("shape", "kv_heads"), [((1, 8, 700, 128), 2), ((3, 6, 500, 64), 2), ((2, 16, 300, 256), 16)]
)
def test_causal_tiles_see_what_their_last_row_sees(
    shape: tuple[int, int, int, int], kv_heads: int
) -> None:
    batch, heads, length, dim = shape
    found = launches.work_of(Case(shape, "prefill", "rtne", kv_heads)).blocks
    group, rows = heads // kv_heads, 128 if dim > 128 else 256
    queries = np.arange(length * group) // group
    each = [-(-(queries[i : i + rows].max() + 1) // 64) for i in range(0, len(queries), rows)]
    assert sorted(found[found > 0]) == sorted(each * batch * kv_heads)
    # The longest come first, in every head of the first request dealt.
    sets = min(kv_heads & -kv_heads, 8)
    assert found[found > 0][0] == max(each) and len(set(found[:sets])) == 1


def test_a_tile_of_uneven_groups_is_recorded() -> None:
    case = Case((1, 3, 200, 64), "prefill", "rtne", 1)
    assert case.reasons() == []
    found, per_block = record(case)
    assert found.steps > 1000 and per_block is not None and per_block > 0


def test_a_launch_takes_its_rounds() -> None:
    """608 tiles: two rounds of what a workgroup takes; use as in one, but for its ends."""
    length = 2 * _core.GFX942_Q_BLOCK
    case = Case((1, 304, length, 64), "lite", "rtne")
    found, _ = record(Case((1, 1, length, 64), "lite", "rtne"))
    result = replay(found)
    per_block = result.per_iteration(0)
    assert per_block is not None
    chip, data = launches.of(case, result, per_block)
    assert data["rounds"] == 2 and data["workgroups"] == 608
    assert data["clk"] == pytest.approx(2 * result.clocks, rel=0.1)
    assert chip.clocks == data["clk"] and data["cus_in_use"] > 0.9
    in_loop = data["workgroup_clk_per_block"] * length / 64 / result.clocks
    assert data["matrix_use"] == pytest.approx(result.use * in_loop, rel=0.1)
