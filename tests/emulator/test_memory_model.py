"""The memory model: caches against a plain one, launches against what can be worked out by hand."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from liteattention_emulator import memory_model, native
from liteattention_emulator.memory_constants import MI300X, parameters

BLOCK = 32768
#: A chip in which nothing varies and workgroups start at once.
STEADY = {
    "residency": 1, "block_bytes": BLOCK, "compute_clocks": 3000, "compute_jitter": 0,
    "latency_jitter": 0, "dispatch_clocks": 0, "launch_clocks": 0, "slack_clocks": 0, "prefetch": 0,
}  # fmt: skip
TRANSFER = BLOCK / parameters()["cu_rate"]
QUEUE = BLOCK / parameters()["link_rate"]


def same(count: int, blocks: int, first: int = 0) -> npt.NDArray[np.uint64]:
    """``count`` workgroups that read the same blocks."""
    return np.array([[first, 1, blocks]] * count, np.uint64)


def launch(reads: npt.NDArray[np.uint64], **changes: float) -> memory_model.Run:
    return memory_model.run(parameters(**(STEADY | changes)), reads)


def home(block: int, sets: int) -> int:
    """The set of a block: SplitMix64's finaliser, scaled."""
    mask = 2**64 - 1
    x = (block + 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return (x >> 32) * sets >> 32


def cached(sets: int, ways: int, blocks: list[int], policy: str) -> list[bool]:
    """A plain set-associative cache, LRU or FIFO."""
    content: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(sets)]
    hits = []
    for block in blocks:
        one = content[home(block, sets)]
        hits.append(block in one)
        if block in one:
            if policy == "lru":
                one.move_to_end(block)
            continue
        if len(one) == ways:
            one.popitem(last=False)
        one[block] = None
    return hits


@pytest.mark.parametrize(("sets", "ways"), [(1, 1), (1, 16), (8, 16), (18, 16), (3, 5)])
def test_a_cache_replaces_the_least_recently_used(sets: int, ways: int) -> None:
    random = np.random.default_rng(sets * 100 + ways)
    blocks = random.zipf(1.3, 4000) % (3 * sets * ways)
    found = memory_model.trace(sets, ways, blocks.astype(np.uint64)).tolist()
    assert found == cached(sets, ways, blocks.tolist(), "lru")
    if ways > 1:  # such a trace tells the policies apart
        assert found != cached(sets, ways, blocks.tolist(), "fifo")


@pytest.mark.parametrize("seed", range(4))
def test_every_read_is_a_hit_or_a_miss_and_bytes_add_up(seed: int) -> None:
    random = np.random.default_rng(seed)
    reads = np.stack(
        [random.integers(0, 1500, 900), random.integers(0, 3, 900), random.integers(1, 60, 900)], 1
    ).astype(np.uint64)
    found = memory_model.run(
        parameters(residency=2, block_bytes=BLOCK, compute_clocks=900, prefetch=seed), reads
    )
    assert found.whole and found.started == 900
    assert found.steps == found.l2.reads == reads[:, 2].sum()
    for xcd, level in enumerate(found.l2_by_xcd):
        assert level.reads == reads[xcd::8, 2].sum()
    for level in (*found.l2_by_xcd, found.l2, found.cache):
        assert level.reads == level.hits + level.hits_on_miss + level.misses
    assert found.cache.reads == found.l2.misses
    assert sum(found.bytes_by_level.values()) == found.l2.reads * BLOCK
    distinct = {int(f + s * i) for f, s, n in reads for i in range(n)}
    assert found.cache.misses == len(distinct)  # 256 MB hold them all


def test_a_head_per_xcd_in_step_misses_once_per_block() -> None:
    blocks = 400  # three times the L2
    reads = same(304, blocks)
    reads[:, 0] = np.arange(304) % 8 * blocks
    found = launch(reads)
    for level in found.l2_by_xcd:
        assert (level.reads, level.misses) == (38 * blocks, blocks)
        assert level.hits_on_miss == 37 * blocks
    assert found.bytes_by_level["hbm"] == 8 * blocks * BLOCK
    # One head for all XCDs: each L2 misses once per block, HBM is read once.
    found = launch(same(304, blocks))
    assert found.l2.misses == 8 * blocks and found.cache.misses == blocks


def test_heads_that_do_not_fit_together_always_miss() -> None:
    reads = same(304, 40)
    reads[:, 0] = np.arange(304) * 40
    assert launch(reads).l2.hit_rate == 0


@pytest.mark.parametrize(
    ("blocks", "latency", "queue"),
    [(20, "l2_latency", 0.0), (400, "cache_latency", QUEUE)],
    ids=["in L2", "in the Infinity Cache"],
)
def test_a_second_pass_takes_the_time_of_the_level_that_has_its_blocks(
    blocks: int, latency: str, queue: float
) -> None:
    chip = parameters()
    step = TRANSFER + STEADY["compute_clocks"]
    first = blocks * (chip["hbm_latency"] + QUEUE + step)
    reads = np.zeros((9, 3), np.uint64)
    reads[:] = 10**6, 0, 1
    reads[0] = reads[8] = 0, 1, blocks  # both on XCD 0, one after the other
    found = launch(reads, cus_per_xcd=1)
    second = blocks * (chip[latency] + queue + step)
    share = found.l2_by_xcd[0]
    # Sets are hashed: a few of the 400 blocks stay in L2.
    again = share.hits + share.hits_on_miss if queue == 0 else found.cache.hits
    assert again >= blocks * (1 if queue == 0 else 0.7)
    assert found.clocks == pytest.approx(first + second, rel=1e-3 if queue == 0 else 0.02)


def test_prefetch_hides_the_delay_and_neighbours_share_arithmetic() -> None:
    blocks, step = 50, STEADY["compute_clocks"]
    start = parameters()["hbm_latency"] + QUEUE + TRANSFER
    assert launch(same(1, blocks)).clocks == pytest.approx(blocks * (start + step))
    assert launch(same(1, blocks), prefetch=1).clocks == pytest.approx(start + blocks * step)
    assert launch(same(1, blocks), slack_clocks=2000).clocks == pytest.approx(blocks * step)
    one = launch(same(16, blocks), prefetch=1, cus_per_xcd=2)
    two = launch(same(16, blocks), prefetch=1, cus_per_xcd=1, residency=2)
    assert two.clocks == pytest.approx(2 * one.clocks, rel=0.02)


def test_hbm_sets_the_pace_of_reads_that_all_miss() -> None:
    reads = same(304 * 4, 40)
    reads[:, 0] = np.arange(304 * 4) * 40
    found = launch(reads, compute_clocks=100, prefetch=4)
    least = found.bytes_by_level["hbm"] / parameters()["hbm_rate"]
    assert least <= found.clocks <= 1.05 * least


def varied(seed: int) -> tuple[Any, ...]:
    chip = parameters(residency=1, block_bytes=BLOCK, compute_clocks=3000, seed=seed)
    found = memory_model.run(chip, same(900, 100))
    return found.clocks, found.l2_by_xcd, found.cache


def test_a_run_depends_on_its_seed_alone() -> None:
    assert varied(1) == varied(1)
    assert varied(1) != varied(2)


def test_a_window_ends_when_an_xcd_has_nothing_more_to_start() -> None:
    whole = memory_model.run(parameters(**STEADY), same(304 * 5, 30))
    window = memory_model.run(parameters(**STEADY), same(304 * 5, 30), 304, stop_at_drain=True)
    assert whole.whole and whole.steps == 304 * 5 * 30
    assert not window.whole
    # The first round is not counted, and at the end of the last nothing more is started.
    assert window.steps == pytest.approx(304 * 4 * 30, rel=0.02)


def test_bad_parameters_are_all_named() -> None:
    chip = dict(parameters(**STEADY)) | {"residency": 0, "prefetch": 1.5, "speed": 3, "cu_rate": 0}
    del chip["hbm_rate"]
    with pytest.raises(native.EmulatorError) as error:
        memory_model.run(chip, same(1, 1))
    for part in ("residency", "prefetch", "speed", "cu_rate", "hbm_rate is missing"):
        assert part in str(error.value)
    with pytest.raises(native.EmulatorError, match="workgroup 0 must read"):
        memory_model.run(parameters(**STEADY), same(1, 0))
    with pytest.raises(native.EmulatorError, match="no workgroup"):
        memory_model.run(parameters(**STEADY), same(0, 1).reshape(0, 3))
    with pytest.raises(ValueError, match="uint64"):
        memory_model.run(parameters(**STEADY), np.zeros((3, 3)))
    with pytest.raises(ValueError, match="bandwidth"):
        parameters(bandwidth=1)


def test_every_constant_lies_in_its_range_and_has_a_source() -> None:
    assert len({each.name for each in MI300X}) == len(MI300X)
    for each in MI300X:
        assert each.source
        if each.low is not None and each.high is not None:
            assert each.low <= each.value <= each.high, each.name
        assert not each.fitted or each.low is not None, each.name
