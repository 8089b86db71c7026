"""Plans of ragged batches: what decode splits, what is launched, what it needs."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liteattention_rocm import _core

ALIGN = 256

sizes = st.fixed_dictionaries(
    {
        "requests": st.integers(0, 300),
        "kv_heads": st.integers(1, 24),
        "group": st.integers(1, 20),
        "head_dim": st.sampled_from([64, 80, 96, 112, 128, 192, 256]),
        "max_q_len": st.integers(0, 40),
        "max_kv_len": st.integers(0, 300_000),
        "min_q_len": st.integers(0, 4),
        "window": st.sampled_from([0, 0, 1, 100, 4096, 500_000]),
        "fp8": st.integers(0, 1),
    }
)


def shape_of(s: dict[str, int]) -> _core.RaggedShape:
    return _core.RaggedShape(
        s["requests"], s["requests"] * s["max_q_len"], s["kv_heads"] * s["group"], s["kv_heads"],
        s["head_dim"], 16, s["max_q_len"], s["max_kv_len"], min(s["min_q_len"], s["max_q_len"]),
        s["window"], bool(s["fp8"]),
    )  # fmt: skip


def block(head_dim: int) -> int:
    return 16 if head_dim > 128 else 64


@given(sizes, st.sampled_from([304, 80, 7]))
def test_plans_are_exact_and_never_modelled_to_lose(s: dict[str, int], units: int) -> None:
    shape = shape_of(s)
    plan = _core.plan_ragged(shape, units, 0)
    group, dim, items = s["group"], s["head_dim"], s["requests"] * s["kv_heads"]
    work = s["requests"] * s["max_q_len"] > 0
    least = max(1, min(s["min_q_len"], s["max_q_len"]))
    assert (plan.decode_grid > 0) == (work and least * group <= 16)
    assert (plan.prefill_grid > 0) == (work and s["max_q_len"] * group > 16)
    if plan.prefill_grid:
        tile = 128 if dim > 128 else 256
        slots = s["requests"] * s["max_q_len"] * group // tile + s["requests"]
        assert plan.prefill_grid == slots * s["kv_heads"]
    if not plan.decode_grid:
        assert (plan.splits, plan.merge_grid, plan.workspace_bytes) == (1, 0, 0)
        assert plan.modelled_us == plan.modelled_unsplit_us == 0
        return
    parts = items * plan.splits
    assert plan.decode_grid == parts
    assert (plan.merge_grid > 0) == (plan.splits > 1) == (plan.workspace_bytes > 0)
    if plan.splits > 1:
        assert (plan.merge_grid - 1) * 2048 < items * 16 * dim <= plan.merge_grid * 2048
        out, stats = parts * 16 * dim * 4, parts * 2 * 16 * 4
        assert plan.part_out_offset == 0 and plan.part_stats_offset % ALIGN == 0
        assert 0 <= plan.part_stats_offset - out < ALIGN
        assert 0 <= plan.workspace_bytes - plan.part_stats_offset - stats < ALIGN
    rows = min(s["max_q_len"], 16 // group)
    seen = s["max_kv_len"]
    if s["window"]:
        seen = min(seen, s["window"] + rows - 1)
    assert plan.kv_bytes == items * seen * dim * (2 if s["fp8"] else 4)

    def cost(splits: int) -> float:
        return _core.decode_cost(shape, splits, units)

    assert 0 < plan.modelled_us == cost(plan.splits)
    assert plan.modelled_us <= plan.modelled_unsplit_us == cost(1)
    most = _core.decode_work(rows, s["max_kv_len"], s["window"], 128, dim)[2]
    gains = [n for n in range(2, most + 1) if cost(n) < cost(1) * (1 - _core.TAIL_MIN_GAIN)]
    if items >= 2 * units:
        assert plan.split == _core.Split.nearly_full and plan.splits == 1
    elif not gains:
        assert plan.split == _core.Split.too_short and plan.splits == 1
    else:
        assert plan.split == _core.Split.pays and plan.splits in gains
        assert plan.modelled_us == min(map(cost, gains))


@given(
    st.integers(0, 16), st.integers(0, 200_000), st.integers(0, 5000), st.integers(1, 128),
    st.sampled_from([64, 80, 96, 112, 128, 192, 256]),
)  # fmt: skip
def test_parts_cover_the_keys_that_some_row_sees(
    q_len: int, kv_len: int, window: int, splits: int, dim: int
) -> None:
    first, blocks, parts = _core.decode_work(q_len, kv_len, window, splits, dim)
    lowest = max(0, kv_len - q_len - window + 1) if window else 0
    assert first == lowest and blocks == max(0, math.ceil((kv_len - lowest) / block(dim)))
    # every wave of every part has work, as far as there is work
    assert 1 <= parts <= splits and (parts == 1 or (parts - 1) * 4 < blocks)


def test_the_gpu_is_filled_by_few_long_requests_and_left_alone_by_many() -> None:
    def plan(requests: int, kv_heads: int, kv_len: int, window: int = 0) -> _core.RaggedPlan:
        shape = _core.RaggedShape(
            requests, requests, 4 * kv_heads, kv_heads, 128, 16, 1, kv_len, window=window
        )
        return _core.plan_ragged(shape, 304, 0)

    long = plan(1, 8, 131072)
    assert long.decode_grid > 100 and long.modelled_unsplit_us / long.modelled_us > 5
    assert plan(1, 8, 131072, window=256).splits == 1  # nothing to split in a window
    assert plan(256, 8, 4096).splits == 1
    assert plan(1, 8, 256).splits == 1
    grids = [plan(requests, 8, 8192).splits for requests in (1, 4, 16, 64)]
    assert all(a >= b for a, b in itertools.pairwise(grids)) and grids[0] > grids[-1]


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        ((-1, 0, 3, 2, 72, 0, 0, 0), ["requests must be from 0 to 2^31 - 1, got -1",
                                      "head dim must be 64, 80, 96, 112, 128, 192 or 256, got 72"]),
        ((1, 1, 3, 2, 64, 0, 1, 1), ["query heads must be a multiple of key heads, got 3 and 2"]),
        ((1, 2**28, 8, 1, 64, 0, 1, 2**30), ["max_kv_len must be from 0 to 2^30 - 1"]),
        ((1, 2**28, 8, 1, 64, 0, 1, 1), ["key head must be below 2^30, got 268435456 times 8"]),
        ((2**24, 2**24, 8, 8, 64, 0, 1, 1), ["requests times key heads must be at most"]),
    ],
)  # fmt: skip
def test_impossible_shapes_are_refused_with_every_reason(
    arguments: tuple[int, ...], reasons: list[str]
) -> None:
    shape = _core.RaggedShape(*arguments)
    assert len(_core.ragged_reasons(shape)) == len(reasons)
    with pytest.raises(ValueError) as caught:
        _core.plan_ragged(shape, 304, 0)
    assert all(reason in str(caught.value) for reason in reasons)


def test_lengths_and_windows_stay_below_half_of_an_int() -> None:
    # Kernels add positions, windows and rows of a key head's queries as 32-bit numbers.
    most = 2**30 - 1
    fits = _core.RaggedShape(1, most, 1, 1, 64, 0, most, most, window=most)
    assert _core.ragged_reasons(fits) == []
    over = _core.RaggedShape(1, 1, 1, 1, 64, 0, 2**30, 2**30, window=2**30)
    assert _core.ragged_reasons(over) == [
        f"{name} must be from 0 to 2^30 - 1, got 1073741824"
        for name in ("max_q_len", "max_kv_len", "window")
    ]


def test_bad_planner_arguments_are_refused() -> None:
    shape = _core.RaggedShape(1, 1, 1, 1, 64, 0, 1, 1)
    with pytest.raises(ValueError) as caught:
        _core.plan_ragged(shape, 0, 129)
    assert "compute units must be >= 1, got 0" in str(caught.value)
    assert "splits must be from 0 to 128, got 129" in str(caught.value)
    assert _core.plan_ragged(shape, 304, 128).split == _core.Split.forced
