"""Launches of our kernels on the whole chip: the work is the shape's, whatever the plan."""

from __future__ import annotations

import numpy as np
import pytest

from liteattention_benchmark import launches
from liteattention_benchmark.cells import Lite
from liteattention_benchmark.contenders import tiles_to_keep
from liteattention_benchmark.model import DIMS, Case, record
from liteattention_emulator import kernels
from liteattention_emulator.timing import Cost, replay, residency
from liteattention_rocm import _core
from liteattention_rocm.engines.gfx942.manifest import DIRECTORY


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
    found = launches.work_of_prefill(batch, length, length, heads, kv_heads, dim, splits=1).blocks
    group, (rows, keys) = heads // kv_heads, (128, 32) if dim > 128 else (256, 64)
    queries = np.arange(length * group) // group
    ends = [queries[i : i + rows].max() + 1 for i in range(0, len(queries), rows)]
    each = [-(-end // keys) * (keys / 64) for end in ends]
    assert sorted(found[found > 0]) == sorted(each * batch * kv_heads)
    # The longest come first, in every head of the first request dealt.
    sets = min(kv_heads & -kv_heads, 8)
    assert found[found > 0][0] == max(each) and len(set(found[:sets])) == 1


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize(
    ("requests", "q_len", "kv_len", "heads"), [(1, 512, 33280, (8, 1)), (2, 700, 900, (6, 2))]
)
def test_parts_of_tiles_are_their_work(
    requests: int, q_len: int, kv_len: int, heads: tuple[int, int], dim: int
) -> None:
    shape = (requests, q_len, kv_len, *heads, dim)
    whole, parts = (launches.work_of_prefill(*shape, splits=n) for n in (1, 0))
    plan = _core.plan_ragged(
        _core.RaggedShape(
            requests, requests * q_len, *heads, dim, 0, q_len, kv_len, 1
        ), 304, 0,
    ).prefill  # fmt: skip
    assert plan.splits > 1 and len(parts.blocks) == plan.grid
    assert parts.blocks.sum() == whole.blocks.sum() and parts.blocks.max() < whole.blocks.max()
    tiles, workgroups = (np.count_nonzero(x.blocks) for x in (whole, parts))
    rows = 128 if dim > 128 else 256
    # every part is written and read once in fp32, every tile that has parts once in 16 bits
    assert whole.pass_bytes == 0
    assert parts.pass_bytes <= rows * dim * (8 * workgroups + 2 * tiles)
    assert parts.pass_bytes >= rows * dim * 8 * (workgroups - tiles)
    # and the model's case is the one that the engine plans
    case = Case((requests, heads[0], q_len, dim), "prefill", "rtne", heads[1])
    assert launches.work_of(case).blocks.sum() <= whole.blocks.sum()


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


def test_the_model_has_as_many_workgroups_on_a_cu_as_the_objects_leave_room_for() -> None:
    for kernel, dims in DIMS.items():
        stored = kernels((DIRECTORY / f"attention_{kernel}.co").read_bytes())
        for dim in dims:
            found = stored[f"attention_{kernel}_bf16_d{dim}_rtne"]
            waves = found.max_workgroup // 64
            held = residency(found.allocated_vgprs, found.lds_bytes, waves)
            assert held == Case((1, 8, 512, dim), kernel, "rtne").resident, found.name


def test_two_workgroups_of_a_cu_take_less_than_one_after_the_other() -> None:
    """Dense at D = 64: alone up to 304, else two at a time."""
    length = 8 * _core.GFX942_Q_BLOCK
    case = Case((1, 76, length, 64), "dense", "rtne")
    alone, matrix = record(case, 1)
    one = replay(alone)
    both, same = record(case)
    assert matrix == same == 32 and both.steps == 2 * alone.steps
    result = replay(both)
    assert 1.2 * one.clocks < result.clocks < 1.9 * one.clocks
    per_block = launches.clocks_of_block(result, same)
    assert per_block is not None
    _, data = launches.of(case, result, per_block)
    assert data["rounds"] == 1 and data["workgroups"] == 608
    assert data["clk"] == pytest.approx(result.clocks, rel=0.1)
    assert data["workgroup_clk_per_block"] == launches.clocks_of_block(one, matrix)
    _, few = launches.of(Case((1, 38, length, 64), "dense", "rtne"), result, per_block)
    assert few["workgroups"] == 304 and few["clk"] == pytest.approx(one.clocks, rel=0.1)


def cell(shape: tuple[int, int, int], sparsity: float, pattern: str) -> Lite:
    batch, heads, length = shape
    return Lite.model_validate(
        {"batch": batch, "heads": heads, "length": length, "head_dim": 128, "sparsity": sparsity,
         "pattern": pattern},
    )  # fmt: skip


@pytest.mark.parametrize("pattern", ["uniform", "uneven"])
def test_lists_have_the_blocks_that_they_keep(pattern: str) -> None:
    of = cell((1, 5, 20000), 0.5, pattern)
    kept = tiles_to_keep(of, 256, 64).sum(-1).flatten().tolist()
    dealt, ordered, cut = (launches.work_of_lists(of, each).blocks for each in launches.ORDERS)
    assert dealt.tolist() != kept or pattern == "uniform"
    assert sorted(dealt) == sorted(ordered[ordered > 0]) == sorted(kept)
    shape = _core.DenseShape(1, 5, 5, 20000, 20000, 128)
    assert len(dealt) == 395 and len(ordered) == _core.plan_lite(shape, 304).lite_grid
    # The heaviest tile that an XCD has comes first.
    runs = ordered.reshape(-1, 8)
    assert (runs[0] == runs.max(0)).all()
    # In more pieces, the same K blocks; 395 tiles are 1.3 rounds.
    assert cut.sum() == sum(kept) and np.count_nonzero(cut) > 395
    assert len(cut) == _core.plan_lite(shape, 304, True).lite_grid


def test_an_order_spreads_uneven_lists_and_cutting_them_more_evenly() -> None:
    cost = Cost(12000.0, 4300.0)

    def over_even(of: Lite) -> list[float]:
        work = [launches.work_of_lists(of, each) for each in launches.ORDERS]
        return [launches.clocks(each, cost) / launches.even(work[0].blocks, cost) for each in work]

    without, whole, _ = over_even(cell((1, 12, 16384), 0.42, "uneven"))
    assert 1 <= whole < 1.2 < 1.4 < without
    without, whole, cut = over_even(cell((1, 3, 32760), 0.42, "uniform"))
    assert 1 <= cut < 1.1 < 1.5 < min(without, whole)
    # 304 tiles of one length: a round.
    even = np.full(304, 7.0)
    assert launches.clocks(launches.Work(even), cost) == pytest.approx(
        launches.even(even, cost), rel=0.12
    )
