"""Plans are pure functions of the sizes: exact about memory and work, whatever the shape."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liteattention_rocm import _core

Q, K = _core.GFX942_Q_BLOCK, _core.GFX942_K_BLOCK
ALIGN = 256

sizes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 9),
        "kv_heads": st.integers(1, 24),
        "group": st.integers(1, 16),
        "q_len": st.integers(1, 200_000),
        "kv_len": st.integers(1, 200_000),
        "head_dim": st.sampled_from([64, 128]),
    }
)


def shape_of(s: dict[str, int]) -> _core.DenseShape:
    return _core.DenseShape(
        s["batch"], s["kv_heads"] * s["group"], s["kv_heads"], s["q_len"], s["kv_len"],
        s["head_dim"],
    )  # fmt: skip


def expect_exact(plan: _core.DensePlan, s: dict[str, int]) -> None:
    """Every tile is computed once, and each buffer has its bytes and no more than padding."""
    k_blocks = math.ceil(s["kv_len"] / K)
    tiles = s["batch"] * s["kv_heads"] * s["group"] * math.ceil(s["q_len"] / Q)
    assert plan.whole_tiles + plan.tail_tiles == tiles
    assert 1 <= plan.splits <= k_blocks
    assert (plan.splits == 1) == (plan.tail_tiles == 0)
    assert plan.dense_grid == plan.whole_tiles + plan.tail_tiles * plan.splits
    assert plan.transpose_grid == s["batch"] * s["kv_heads"] * k_blocks
    assert plan.merge_grid * 256 * 8 == plan.tail_tiles * Q * s["head_dim"]
    parts = plan.tail_tiles * plan.splits
    needed = [
        plan.transpose_grid * K * s["head_dim"] * 2,
        parts * Q * s["head_dim"] * 4,
        parts * 2 * Q * 4,
    ]
    begins = [plan.v_t_offset, plan.part_out_offset, plan.part_stats_offset, plan.workspace_bytes]
    assert begins[0] == 0
    for begin, end, size in zip(begins, begins[1:], needed, strict=False):
        assert begin % ALIGN == 0 and 0 <= end - begin - size < ALIGN


@given(sizes, st.sampled_from([304, 80, 1, 7]))
def test_chosen_plans_are_exact_and_split_only_what_leaves_units_idle(
    s: dict[str, int], units: int
) -> None:
    plan = _core.plan_dense(shape_of(s), units, 0)
    expect_exact(plan, s)
    tiles = plan.whole_tiles + plan.tail_tiles
    rest, k_blocks = tiles % units, math.ceil(s["kv_len"] / K)

    def cost(splits: int) -> float:
        return _core.tail_cost(rest, splits, k_blocks, s["head_dim"])

    if plan.tail_tiles:
        assert plan.tail_tiles == rest and plan.whole_tiles % units == 0
        assert plan.tail_tiles * plan.splits <= units  # all parts run at once
        assert cost(plan.splits) <= cost(1) * (1 - _core.TAIL_MIN_GAIN)
    allowed = range(2, min(k_blocks, units // rest) + 1) if rest else ()
    gains = [splits for splits in allowed if cost(splits) < cost(1) * (1 - _core.TAIL_MIN_GAIN)]
    best = min(gains, key=cost, default=1)
    assert cost(plan.splits) == cost(best) if rest else plan.splits == 1


@given(sizes, st.integers(1, 64))
def test_forced_plans_are_exact(s: dict[str, int], splits: int) -> None:
    k_blocks = math.ceil(s["kv_len"] / K)
    if splits > k_blocks:
        with pytest.raises(ValueError, match=f"splits must be from 0 to the {k_blocks} K blocks"):
            _core.plan_dense(shape_of(s), 304, splits)
        return
    plan = _core.plan_dense(shape_of(s), 304, splits)
    expect_exact(plan, s)
    assert plan.splits == splits
    if splits > 1:
        assert 1 <= plan.tail_tiles <= 304


def test_a_workgroup_short_of_a_round_is_declined() -> None:
    # 303 tiles on 304 units: no room for a second part of any
    plan = _core.plan_dense(_core.DenseShape(1, 303, 303, 384, 65536, 128), 304, 0)
    assert (plan.splits, plan.tail_tiles, plan.dense_grid) == (1, 0, 303)
    # a full round has nobody idle
    plan = _core.plan_dense(_core.DenseShape(1, 304, 304, 384, 65536, 128), 304, 0)
    assert plan.splits == 1
    # one more tile than a round, and long: its keys are spread over the GPU
    plan = _core.plan_dense(_core.DenseShape(1, 305, 305, 384, 65536, 128), 304, 0)
    assert plan.whole_tiles == 304 and plan.splits > 8
    # one K block cannot be split
    assert _core.plan_dense(_core.DenseShape(1, 1, 1, 384, 64, 128), 304, 0).splits == 1


def test_splitting_pays_less_as_the_merge_grows() -> None:
    costs = [_core.tail_cost(tiles, 2, 100, 128) for tiles in (1, 10, 100)]
    assert costs == sorted(costs) and costs[0] < _core.tail_cost(1, 1, 100, 128)


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        ((0, 3, 2, 1, 1, 96), ["batch must be from 1", "head dim must be 64 or 128, got 96"]),
        ((1, 3, 2, 1, 2**31, 64), ["kv_len must be from 1 to 2^31 - 1, got 2147483648"]),
        ((1, 3, 2, 1, 1, 64), ["query heads must be a multiple of key heads, got 3 and 2"]),
        (
            (2**20, 2**20, 2**20, 2**31 - 1, 2**31 - 1, 64),
            [
                "384 query rows) tiles must be at most 8388607 (2^32 threads",
                "64 keys) blocks must be at most 16777215",
            ],
        ),
    ],
)
def test_impossible_shapes_are_refused_with_every_reason(
    arguments: tuple[int, int, int, int, int, int], reasons: list[str]
) -> None:
    shape = _core.DenseShape(*arguments)
    assert len(_core.dense_reasons(shape)) == len(reasons)
    with pytest.raises(ValueError) as caught:
        _core.plan_dense(shape, 304, 0)
    for reason in reasons:
        assert reason in str(caught.value)


def test_bad_planner_arguments_are_refused() -> None:
    shape = _core.DenseShape(1, 1, 1, 1, 1, 64)
    with pytest.raises(ValueError) as caught:
        _core.plan_dense(shape, 0, -1)
    assert "compute units must be >= 1, got 0" in str(caught.value)
    assert "splits must be from 0 to the 1 K blocks, got -1" in str(caught.value)
