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
def test_chosen_plans_are_exact_and_never_modelled_to_lose(s: dict[str, int], units: int) -> None:
    plan = _core.plan_dense(shape_of(s), units, 0)
    expect_exact(plan, s)
    tiles = plan.whole_tiles + plan.tail_tiles
    rounds, rest = divmod(tiles, units)
    k_blocks = math.ceil(s["kv_len"] / K)

    def cost(splits: int) -> float:
        return _core.tail_cost(rest, splits, k_blocks, s["head_dim"], units)

    assert 0 < plan.modelled_us <= plan.modelled_unsplit_us
    ends = 2.6 if s["head_dim"] == 128 else 3.2
    block = plan.modelled_unsplit_us / (rounds * (k_blocks + ends) + (cost(1) if rest else 0))
    allowed = range(2, min(k_blocks, 4 * units // rest) + 1) if rest else ()
    gains = [splits for splits in allowed if cost(splits) < cost(1) * (1 - _core.TAIL_MIN_GAIN)]
    if not rest:
        assert plan.split == _core.Split.even
    elif rest >= _core.TAIL_NEARLY_FULL * units:
        assert plan.split == _core.Split.nearly_full
    elif not gains:
        assert plan.split == _core.Split.too_short
    else:
        assert plan.split == _core.Split.pays
        assert plan.tail_tiles == rest and plan.whole_tiles % units == 0
        assert cost(plan.splits) == min(map(cost, gains))
        gain = block * (cost(1) - cost(plan.splits))
        assert math.isclose(plan.modelled_unsplit_us - plan.modelled_us, gain, rel_tol=1e-6)
        return
    assert plan.splits == 1 and plan.modelled_us == plan.modelled_unsplit_us


@given(sizes, st.sampled_from([1, 38, 80, 304, 520]), st.booleans())
def test_plans_of_lite_steps_are_exact(s: dict[str, int], units: int, cuts: bool) -> None:
    weighs = s["q_len"] % 2 == 0
    plan = _core.plan_lite(shape_of(s), units, weighs, cuts)
    tiles = s["batch"] * s["kv_heads"] * s["group"] * math.ceil(s["q_len"] / Q)
    k_blocks = math.ceil(s["kv_len"] / K)
    assert plan.transpose_grid == s["batch"] * s["kv_heads"] * k_blocks
    assert plan.tiles == tiles
    half_again = math.ceil(tiles / 8) * 3 // 2
    # A whole MI300X, eight XCDs, of whose tiles a workgroup takes 768; and lists worth it.
    few = units == 304 and half_again <= 768
    cut = few and weighs and cuts and k_blocks >= 64
    assert plan.cuts == cut
    ordered = tiles > units or cut
    slots = (half_again + min(half_again, 64) + 38 if cut else half_again) if ordered else 0
    assert plan.slots == slots
    assert plan.together == (4 * math.ceil(units / 8) if ordered else 0)
    assert plan.lite_grid == (8 * slots if ordered else tiles)
    assert plan.count_grid == math.ceil(8 * slots / 256)
    packs = ordered and few
    assert plan.packs == packs
    assert plan.lpt_grid == (8 if packs else math.ceil(tiles / 256) if ordered else 0)
    assert plan.select_grid == (tiles if weighs else 0)
    assert plan.merge_grid == (304 * (s["head_dim"] // 8 + 1) if cut else 0)
    assert plan.order_bytes == 4 * 8 * slots
    assert plan.counts_bytes == (4 * 8 * math.ceil(tiles / 8) if ordered else 0)
    assert plan.weights_bytes == (4 * tiles * k_blocks if weighs else 0)
    assert plan.parts_bytes == (16 * 8 * slots if cut else 0)
    assert plan.cuts_bytes == (8 * 304 if cut else 0)
    at = plan.v_t_offset + plan.transpose_grid * K * s["head_dim"] * 2
    assert plan.v_t_offset == 0
    buffers = [
        (plan.order_offset, plan.order_bytes),
        (plan.counts_offset, plan.counts_bytes),
        (plan.weights_offset, plan.weights_bytes),
    ]
    if cut:
        buffers += [
            (plan.parts_offset, plan.parts_bytes),
            (plan.cuts_offset, plan.cuts_bytes),
            (plan.part_out_offset, 608 * Q * s["head_dim"] * 4),
            (plan.part_stats_offset, 608 * 2 * Q * 4),
            (plan.part_weights_offset, 608 * 8 * k_blocks * 4),
        ]
    for offset, size in [*buffers, (plan.workspace_bytes, 0)]:
        assert offset % ALIGN == 0 and 0 <= offset - at < ALIGN
        at = offset + size


def test_a_lite_step_takes_what_dense_attention_takes() -> None:
    assert _core.plan_lite(_core.DenseShape(1, 1, 1, 1, 2**29, 64), 304).workspace_bytes
    # More positions than a launch has workgroups: tiles go in their own order.
    most = _core.plan_lite(_core.DenseShape(1, 2**23 - 1, 1, 256, 64, 64), 304)
    assert most.lite_grid == most.tiles == 2**23 - 1 and most.slots == most.lpt_grid == 0
    with pytest.raises(ValueError, match=r"head dim must be 64 or 128, got 80; compute units"):
        _core.plan_lite(_core.DenseShape(1, 1, 1, 1, 2**22 + 1, 80), 0)


@pytest.mark.parametrize(("dim", "clocks", "ends"), [(128, 4230, 2.6), (64, 2890, 3.2)])
def test_full_rounds_take_their_blocks(dim: int, clocks: int, ends: float) -> None:
    """Clocks of docs/model.md at the clock of csrc/host/plan.cpp, 1.1 GHz."""
    for tiles, blocks in ((304, 10), (608, 1000)):
        shape = _core.DenseShape(1, tiles, tiles, 256, 64 * blocks, dim)
        plan = _core.plan_dense(shape, 304, 0)
        rounds = tiles // 304
        assert plan.modelled_us == pytest.approx(rounds * (blocks + ends) * clocks / 1100)


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
    # 303 tiles on 304 units: nothing to gain
    plan = _core.plan_dense(_core.DenseShape(1, 303, 303, 256, 65536, 128), 304, 0)
    assert (plan.splits, plan.tail_tiles, plan.dense_grid) == (1, 0, 303)
    assert plan.split == _core.Split.nearly_full
    # a full round has nobody idle
    plan = _core.plan_dense(_core.DenseShape(1, 304, 304, 256, 65536, 128), 304, 0)
    assert plan.splits == 1
    # one more tile than a round, and long: its keys are spread over the GPU
    plan = _core.plan_dense(_core.DenseShape(1, 305, 305, 256, 65536, 128), 304, 0)
    assert plan.whole_tiles == 304 and plan.splits > 8
    # 240 tiles on 304 units: five parts of each fill four rounds of a fifth of the length
    plan = _core.plan_dense(_core.DenseShape(1, 240, 240, 256, 65536, 128), 304, 0)
    assert plan.splits == 5 and plan.modelled_unsplit_us / plan.modelled_us > 1.15
    # one K block cannot be split
    assert _core.plan_dense(_core.DenseShape(1, 1, 1, 256, 64, 128), 304, 0).splits == 1


def test_splitting_pays_less_as_the_merge_grows() -> None:
    costs = [_core.tail_cost(tiles, 2, 100, 128, 304) for tiles in (1, 10, 100)]
    assert costs == sorted(costs) and costs[0] < _core.tail_cost(1, 1, 100, 128, 304)


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (
            (0, 3, 2, 1, 2**31, 96),
            [
                "batch must be from 1",
                "query heads must be a multiple of key heads, got 3 and 2",
                "kv_len must be from 1 to 2^31 - 1, got 2147483648",
                "head dim must be 64 or 128, got 96",
            ],
        ),
        ((1, 3, 0, 1, 1, 64), ["kv_heads must be from 1 to 2^31 - 1, got 0"]),
        (
            (2**20, 2**20, 2**20, 2**31 - 1, 2**31 - 1, 64),
            [
                "256 query rows) tiles must be at most 8388607 (2^32 threads",
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
