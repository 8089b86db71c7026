"""Statistics: records, sums, counters."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liteattention_rocm.lite import bitmap
from liteattention_rocm.lite.counting import Count, CountReader, TileCounters
from liteattention_rocm.lite.statistics import SkipStatistics

from .test_bitmap import patterns


def sample() -> SkipStatistics:
    statistics = SkipStatistics()
    for step in (0, 1):
        for layer in ("a", "b"):
            for branch in ("cond", "uncond"):
                statistics.record(
                    "clip",
                    step,
                    layer,
                    branch,
                    tiles_total=100,
                    tiles_computed=100 - 10 * step - (5 if layer == "b" else 0),
                    tiles_kept=80,
                    threshold=float("-inf") if step else -6.0,
                    descending=bool(step),
                )
    return statistics


def test_sums_by_step_layer_and_branch() -> None:
    statistics = sample()
    assert len(statistics) == 8
    steps = statistics.by_step()
    assert [row["step"] for row in steps] == [0, 1]
    assert steps[1]["tiles_computed"] == 350 and steps[1]["tiles_total"] == 400
    assert steps[1]["calls"] == 4 and steps[1]["sparsity"] == 1 - 350 / 400
    assert [(r["layer"], r["tiles_computed"]) for r in statistics.by_layer()] == [
        ("a", 380),
        ("b", 360),
    ]
    assert [r["branch"] for r in statistics.by_branch()] == ["cond", "uncond"]
    assert statistics.by_generation()[0]["generation"] == "clip"
    assert statistics.sparsity == 1 - 740 / 800


def test_records_survive_json() -> None:
    statistics = sample()
    records = statistics.to_records()
    assert records[0] == {
        "generation": "clip", "step": 0, "layer": "a", "branch": "cond", "tiles_total": 100,
        "tiles_computed": 100, "tiles_kept": 80, "sparsity": 0.0, "dense": False, "threshold": -6.0,
        "descending": False, "budget": None,
    }  # fmt: skip
    assert records[4]["step"] == 1 and records[4]["threshold"] == "-inf"
    text = json.dumps(records, allow_nan=False)
    assert SkipStatistics.from_records(json.loads(text)).to_records() == records
    with pytest.raises(ValueError, match="record 1 lacks layer, tiles_kept"):
        broken = {k: v for k, v in records[1].items() if k not in ("layer", "tiles_kept")}
        SkipStatistics.from_records([records[0], broken])


def test_recording_again_replaces() -> None:
    statistics = sample()
    statistics.record("clip", 0, "a", "cond", tiles_total=10, tiles_computed=1, tiles_kept=1)
    assert len(statistics) == 8 and statistics.to_records()[0]["tiles_total"] == 10


def test_merge_adds_ranks() -> None:
    merged = sample().merge(sample(), sample())
    assert len(merged) == 8 and merged.sparsity == sample().sparsity
    assert merged.to_records()[0]["tiles_total"] == 300
    other = SkipStatistics()
    other.record(("a", 1), 0, "a", "", tiles_total=1, tiles_computed=1, tiles_kept=1, dense=True)
    both = sample().merge(other)
    assert len(both) == 9 and both.by_generation()[1]["generation"] == "('a', 1)"


@pytest.mark.parametrize("dense_at", [0, 1])
@pytest.mark.parametrize("limit", [{"threshold": -3.0}, {"budget": 0.1}])
def test_merging_with_a_dense_step_keeps_the_limits(limit: dict[str, float], dense_at: int) -> None:
    tiles = {"tiles_total": 4, "tiles_computed": 3, "tiles_kept": 2}
    ranks = [SkipStatistics() for _ in range(2)]
    for number, rank in enumerate(ranks):
        skips = {"dense": True} if number == dense_at else {"descending": True, **limit}
        rank.record(0, 1, "a", "", **tiles, **skips)
    (row,) = ranks[0].merge(ranks[1]).to_records()
    assert {name: row[name] for name in tiles} == {name: 2 * n for name, n in tiles.items()}
    assert row["descending"] is True and row["dense"] is False
    assert {name: row[name] for name in ("threshold", "budget")} == {
        "threshold": None, "budget": None, **limit
    }  # fmt: skip


def test_clear_and_discard() -> None:
    statistics = sample()
    statistics.discard("clip", "a", "cond")
    assert len(statistics) == 6
    statistics.discard("clip", "b")
    assert {row["layer"] for row in statistics.to_records()} == {"a"}
    statistics.clear("clip")
    assert len(statistics) == 0 and statistics.sparsity == 0.0


def test_old_generations_are_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    statistics = SkipStatistics(max_generations=2)
    for generation in range(4):
        statistics.record(generation, 0, "a", "", tiles_total=1, tiles_computed=1, tiles_kept=1)
    assert [row["generation"] for row in statistics.by_generation()] == [2, 3]
    warnings = [r for r in caplog.records if "skip statistics hold 2 generations" in r.message]
    assert len(warnings) == 1
    with pytest.raises(ValueError, match="max_generations must be >= 1"):
        SkipStatistics(max_generations=0)


@settings(max_examples=30)
@given(st.lists(patterns, min_size=1, max_size=8))
def test_counts_are_right_and_may_be_read_late(rows: list[list[bool]]) -> None:
    statistics, counters = SkipStatistics(), TileCounters()
    for step, bits in enumerate(rows):
        made = bitmap.pack(torch.tensor([bits, bits]))
        now, later = counters.count(made), counters.count_later(made)
        assert now == 2 * sum(bits)
        made.zero_()  # the list moves on; its count must not
        statistics.record(0, step, "a", "", 2 * len(bits), later, now)
    for row, bits in zip(statistics.to_records(), rows, strict=True):
        assert row["tiles_computed"] == row["tiles_kept"] == 2 * sum(bits)


def test_more_counters_than_one_chunk_holds() -> None:
    statistics, counters = SkipStatistics(), TileCounters()
    for step in range(1100):
        counter = counters.count_later(torch.tensor([step, -1], dtype=torch.int32))
        statistics.record(0, step, "a", "", 2000, counter, 0)
    expected = [step.bit_count() + 32 for step in range(1100)]
    assert [row["tiles_computed"] for row in statistics.to_records()] == expected


def test_calls_go_on_while_somebody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads waits for the device, but nobody else does; what comes meanwhile stays."""
    statistics, counters = SkipStatistics(), TileCounters()
    for step in range(2):
        counter = counters.count_later(torch.tensor([7], dtype=torch.int32))
        statistics.record(0, step, "a", "", 32, counter, counter)
    read = CountReader.__call__
    done = threading.Event()

    def others() -> None:
        statistics.record(0, 1, "a", "", 32, 5, 4)  # the step again
        statistics.record(0, 2, "a", "", 32, 4, 4)
        statistics.discard(0, "b")
        done.set()

    def slow(self: CountReader, value: Count) -> int:
        if not done.is_set():
            thread = threading.Thread(target=others)
            thread.start()
            thread.join(timeout=20)
            assert done.is_set()
        return read(self, value)

    monkeypatch.setattr(CountReader, "__call__", slow)
    assert [row["tiles_computed"] for row in statistics.to_records()] == [3, 3]
    assert [row["tiles_computed"] for row in statistics.to_records()] == [3, 5, 4]


def recorded() -> SkipStatistics:
    """Layer b skips 1/4 in step 0 and 3/4 in step 2, over two branches; layer a runs in step 2."""
    made = SkipStatistics()
    for step, layer, computed in ((0, "b", (4, 2)), (2, "b", (1, 1)), (2, "a", (4, 4))):
        for branch, tiles in zip(("cond", "uncond"), computed, strict=True):
            made.record(
                0, step, layer, branch, tiles_total=4, tiles_computed=tiles, tiles_kept=tiles
            )
    return made


def test_grid_is_layers_by_steps() -> None:
    assert recorded().grid() == (["b", "a"], [0, 2], [[0.25, 0.75], [None, 0.0]])
    assert SkipStatistics().grid() == ([], [], [])
