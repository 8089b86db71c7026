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
        "head_dim": st.sampled_from([32, 64, 80, 96, 112, 128, 192, 256]),
        "max_q_len": st.integers(0, 40) | st.integers(0, 3000),
        "max_kv_len": st.integers(0, 300_000),
        "min_q_len": st.integers(0, 4),
        "window": st.sampled_from([0, 0, 1, 100, 4096, 500_000]),
        "fp8": st.integers(0, 1),
        "lookahead": st.sampled_from([0, 0, 7, 4096, 2**30 - 1]),
    }
)


def shape_of(s: dict[str, int]) -> _core.RaggedShape:
    return _core.RaggedShape(
        s["requests"], s["requests"] * s["max_q_len"], s["kv_heads"] * s["group"], s["kv_heads"],
        s["head_dim"], 16, s["max_q_len"], s["max_kv_len"], min(s["min_q_len"], s["max_q_len"]),
        s["window"], bool(s["fp8"]), s["lookahead"],
    )  # fmt: skip


def block(head_dim: int) -> int:
    return 16 if head_dim > 128 else 64


def room_of(stage: _core.RaggedStage, rows: int, dim: int) -> tuple[int, int, int]:
    """Where outputs and then statistics of a stage's parts begin and end in the workspace."""
    if stage.parts == 0:
        assert stage.splits == 1 and stage.merge_grid == 0
        return 0, 0, 0
    out, stats = stage.parts * rows * dim * 4, stage.parts * 2 * rows * 4
    assert stage.splits > 1 and stage.merge_grid > 0
    assert stage.out_offset % ALIGN == 0 and stage.stats_offset % ALIGN == 0
    assert 0 <= stage.stats_offset - stage.out_offset - out < ALIGN
    return stage.out_offset, stage.stats_offset, -(-(stage.stats_offset + stats) // ALIGN) * ALIGN


@given(sizes, st.sampled_from([304, 80, 7]))
def test_plans_are_exact_and_never_modelled_to_lose(s: dict[str, int], units: int) -> None:
    shape = shape_of(s)
    plan = _core.plan_ragged(shape, units, 0)
    decode = plan.decode
    group, dim, items = s["group"], s["head_dim"], s["requests"] * s["kv_heads"]
    work = s["requests"] * s["max_q_len"] > 0
    least = max(1, min(s["min_q_len"], s["max_q_len"]))
    assert (decode.grid > 0) == (work and least * group <= 16)
    assert (plan.prefill.grid > 0) == (work and s["max_q_len"] * group > 16)
    *_, prefill_end = room_of(plan.prefill, 128 if dim > 128 else 256, dim)
    decode_at, _, decode_end = room_of(decode, 16, dim)
    assert decode_at == (prefill_end if decode.parts else 0)
    assert plan.workspace_bytes == max(prefill_end, decode_end)
    if not decode.grid:
        assert decode.splits == 1 and decode.modelled_us == decode.modelled_unsplit_us == 0
        return
    parts = items * decode.splits
    assert decode.grid == parts
    if decode.splits > 1:
        assert decode.parts == parts
        assert (decode.merge_grid - 1) * 2048 < items * 16 * dim <= decode.merge_grid * 2048
    rows = min(s["max_q_len"], 16 // group)
    seen = s["max_kv_len"]
    if s["window"]:
        seen = min(seen, s["window"] + rows - 1)
    assert plan.kv_bytes == items * seen * dim * (2 if s["fp8"] else 4)

    def cost(splits: int) -> float:
        return _core.decode_cost(shape, splits, units)

    assert 0 < decode.modelled_us == cost(decode.splits)
    assert decode.modelled_us <= decode.modelled_unsplit_us == cost(1)
    most = _core.decode_work(rows, s["max_kv_len"], s["window"], 128, dim)[2]
    gains = [n for n in range(2, most + 1) if cost(n) < cost(1) * (1 - _core.TAIL_MIN_GAIN)]
    if items >= 2 * units:
        assert decode.split == _core.Split.nearly_full and decode.splits == 1
    elif not gains:
        assert decode.split == _core.Split.too_short and decode.splits == 1
    else:
        assert decode.split == _core.Split.pays and decode.splits in gains
        assert decode.modelled_us == min(map(cost, gains))


def tile_blocks(s: dict[str, int]) -> list[int]:
    """K blocks that each tile of a request as long as allowed visits, row by row."""
    dim, group, q_len, kv_len = s["head_dim"], s["group"], s["max_q_len"], s["max_kv_len"]
    tile, keys = (128, 32) if dim > 128 else (256, 64)
    packed, blocks = q_len * group, []
    for first in range(0, packed, tile):
        queries = range(first // group, (min(first + tile, packed) - 1) // group + 1)
        ends = [min(kv_len - q_len + i + 1 + s["lookahead"], kv_len) for i in queries]
        begins = [max(kv_len - q_len + i + 1 - s["window"], 0) * (s["window"] > 0) for i in queries]
        spans = -(-ends[-1] // keys) - begins[0] // keys if ends[-1] > begins[0] else 0
        blocks.append(spans)
    return blocks


@given(sizes, st.sampled_from([304, 80, 7]))
def test_prefill_is_split_where_that_is_modelled_to_pay(s: dict[str, int], units: int) -> None:
    shape = shape_of(s)
    plan = _core.plan_ragged(shape, units, 0)
    prefill, dim, requests = plan.prefill, s["head_dim"], s["requests"]
    if not prefill.grid:
        assert prefill.splits == 1 and prefill.modelled_us == prefill.modelled_unsplit_us == 0
        return
    tile = 128 if dim > 128 else 256
    slots = requests * s["max_q_len"] * s["group"] // tile + requests
    blocks = tile_blocks(s)
    tiles = requests * len(blocks) * s["kv_heads"]

    def cost(splits: int) -> float:
        return _core.prefill_cost(shape, splits, units)

    assert 0 < prefill.modelled_us == cost(prefill.splits)
    assert prefill.modelled_us <= prefill.modelled_unsplit_us == cost(1)
    assert prefill.grid == max(slots, plan.prefill_room) * s["kv_heads"]
    if prefill.splits == 1:
        assert plan.prefill_room == 0
        assert (prefill.split == _core.Split.nearly_full) == (2 * tiles > 4 * units)
        return
    assert prefill.split == _core.Split.pays and prefill.splits <= -(-max(blocks) // 4)
    assert prefill.modelled_us < prefill.modelled_unsplit_us * (1 - _core.TAIL_MIN_GAIN)
    # room for the parts of such requests, four for each compute unit at most
    assert plan.prefill_room == requests * len(blocks) * prefill.splits
    assert prefill.parts == plan.prefill_room * s["kv_heads"] <= 4 * units
    assert _core.prefill_splits(requests * len(blocks), plan.prefill_room, 64) == prefill.splits
    assert plan.prefill_blocks == 4
    part = max(-(-max(blocks) // prefill.splits), 4)
    assert 2 <= max(_core.prefill_parts(n, part, prefill.splits) for n in blocks) <= prefill.splits


@given(sizes)
def test_the_modelled_time_of_prefill_is_that_of_its_tiles(s: dict[str, int]) -> None:
    # On as many compute units as there are tiles the longest one decides, on one their sum.
    if not s["requests"] * s["max_q_len"] or s["max_q_len"] * s["group"] <= 16:
        return
    shape, blocks = shape_of(s), tile_blocks(s)
    alike = s["requests"] * s["kv_heads"]
    clocks = {32: 3110, 64: 3110, 112: 4190, 192: 2350, 256: 2830}.get(s["head_dim"], 4450)
    tiles = [14000 + clocks * n for n in blocks]
    found = _core.prefill_cost(shape, 1, alike * len(blocks)) * 1100
    assert math.isclose(found, max(tiles), rel_tol=1e-9)
    assert math.isclose(_core.prefill_cost(shape, 1, 1) * 1100, alike * sum(tiles), rel_tol=1e-9)


@given(
    st.integers(0, 16), st.integers(0, 200_000), st.integers(0, 5000), st.integers(1, 128),
    st.sampled_from([32, 64, 80, 96, 112, 128, 192, 256]),
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
    def plan(requests: int, kv_heads: int, kv_len: int, window: int = 0) -> _core.RaggedStage:
        shape = _core.RaggedShape(
            requests, requests, 4 * kv_heads, kv_heads, 128, 16, 1, kv_len, window=window
        )
        return _core.plan_ragged(shape, 304, 0).decode

    long = plan(1, 8, 131072)
    assert long.grid > 100 and long.modelled_unsplit_us / long.modelled_us > 5
    assert plan(1, 8, 131072, window=256).splits == 1  # nothing to split in a window
    assert plan(256, 8, 4096).splits == 1
    assert plan(1, 8, 256).splits == 1
    grids = [plan(requests, 8, 8192).splits for requests in (1, 4, 16, 64)]
    assert all(a >= b for a, b in itertools.pairwise(grids)) and grids[0] > grids[-1]


def test_chunks_and_short_prompts_fill_the_gpu() -> None:
    def plan(rows: int, kv_len: int, kv_heads: int, decoded: int = 0) -> _core.RaggedPlan:
        shape = _core.RaggedShape(
            1 + decoded, rows + decoded, 8 * kv_heads, kv_heads, 128, 16, rows, kv_len
        )
        return _core.plan_ragged(shape, 304, 0)

    chunk = plan(512, 33_000, 1)
    assert chunk.prefill.modelled_unsplit_us / chunk.prefill.modelled_us > 10
    # Beside requests that are decoded as alone: they have no tiles and take no room.
    mixed = plan(512, 33_000, 1, decoded=200)
    assert (mixed.prefill.splits, mixed.prefill_room) == (chunk.prefill.splits, chunk.prefill_room)
    assert plan(8192, 8192, 1).prefill.splits > 1  # the longest tiles of a prompt
    assert plan(8192, 8192, 8).prefill.split == _core.Split.nearly_full
    assert plan(64, 64, 1).prefill.split == _core.Split.too_short
    # Of a million tokens at once a sample of tiles is looked at, and no room is needed.
    assert plan(1 << 20, 1 << 20, 8).prefill_room == 0
    long, half = (plan(n << 10, n << 10, 8).prefill.modelled_us for n in (1024, 512))
    assert long / half == pytest.approx(4, rel=0.02)


def test_forced_parts_have_room_up_to_a_bound() -> None:
    def plan(rows: int, splits: int) -> _core.RaggedPlan:
        shape = _core.RaggedShape(1, rows, 8, 1, 128, 16, rows, rows, rows)
        return _core.plan_ragged(shape, 304, splits)

    assert plan(320, 3).prefill_room == 3 * (320 * 8 // 256 + 1)
    # As many as K blocks, which the device counts, whatever else is in the batch.
    assert (plan(320, 9).prefill.splits, plan(320, 9).prefill_blocks) == (9, 0)
    assert plan(100_000, 128).prefill.splits == _core.PREFILL_MOST_SPLITS
    assert plan(100_000, 128).prefill_room == 4 * 304
    # No room for two parts of a key head each.
    heads = _core.plan_ragged(_core.RaggedShape(1, 17, 700, 700, 128, 16, 17, 1000), 304, 2)
    assert (heads.prefill.splits, heads.prefill.parts) == (1, 0)
    assert heads.prefill.split == _core.Split.nearly_full


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        ((-1, 0, 3, 2, 72, 0, 0, 0), [
            "requests must be from 0 to 2^31 - 1, got -1",
            "query heads must be a multiple of key heads, got 3 and 2",
            "head dim must be 32, 64, 80, 96, 112, 128, 192 or 256, got 72",
        ]),
        ((1, 1, 3, 0, 64, 0, 1, 1), ["kv_heads must be from 1 to 2^31 - 1, got 0"]),
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
    fits = _core.RaggedShape(1, most, 1, 1, 64, 0, most, most, window=most, lookahead=most)
    assert _core.ragged_reasons(fits) == []
    over = _core.RaggedShape(1, 1, 1, 1, 64, 0, 2**30, 2**30, window=2**30, lookahead=2**30)
    assert _core.ragged_reasons(over) == [
        f"{name} must be from 0 to 2^30 - 1, got 1073741824"
        for name in ("max_q_len", "max_kv_len", "window", "lookahead")
    ]


def test_models_refuse_what_they_cannot_divide_by() -> None:
    shape, none = (
        _core.RaggedShape(1, 1, 1, 1, 64, 0, 1, 1),
        _core.RaggedShape(1, 1, 1, 0, 64, 0, 1, 1),
    )
    for cost in (_core.prefill_cost, _core.decode_cost):
        with pytest.raises(ValueError, match="splits must be >= 1, got 0; compute units must be"):
            cost(shape, 0, 0)
        with pytest.raises(ValueError, match="kv_heads must be from 1"):
            cost(none, 1, 304)


def test_bad_planner_arguments_are_refused() -> None:
    shape = _core.RaggedShape(1, 1, 1, 1, 64, 0, 1, 1)
    with pytest.raises(ValueError) as caught:
        _core.plan_ragged(shape, 0, 129)
    assert "compute units must be >= 1, got 0" in str(caught.value)
    assert "splits must be from 0 to 128, got 129" in str(caught.value)
    assert _core.plan_ragged(shape, 304, 128).decode.split == _core.Split.forced
