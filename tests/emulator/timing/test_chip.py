"""From clk of workgroups to clk of a launch."""

import numpy as np
import pytest

from liteattention_emulator.timing import Chip, Cost, launch, residency

BARE = Chip(start=0, dispatch=0)


def test_rounds() -> None:
    """305 equal workgroups take two rounds of 304 CUs, and 152 of them half the chip."""
    for count, rounds in ((304, 1), (305, 2), (608, 2), (3 * 304 + 1, 4), (152, 1)):
        found = launch([1000.0] * count, chip=BARE)
        assert found.clocks == 1000 * rounds
        assert found.rounds == count / 304
        assert found.held == 1000 * count
        assert found.occupied == pytest.approx(count / (304 * rounds))
        assert found.matrix_use(count * 4 * 700) == pytest.approx(0.7 * found.occupied)


def test_an_xcd_takes_every_eighth_workgroup() -> None:
    """Though the other seven XCDs idle, XCD 0 works through all the long ones."""
    clocks = np.ones(8 * 38 * 4)
    clocks[::8] = 1000
    assert launch(clocks, chip=BARE).clocks == 4000
    clocks = np.ones(8 * 38 * 4)
    clocks[: len(clocks) // 8] = 1000
    assert launch(clocks, chip=BARE).clocks < 1010


def test_unequal_workgroups_go_where_a_slot_is_free() -> None:
    """Longest first packs a tail that shortest first does not."""
    one = Chip(xcds=1, cus_per_xcd=2, start=0, dispatch=0)
    assert launch([4, 3, 2, 1], chip=one).clocks == 5
    assert launch([1, 2, 3, 4], chip=one).clocks == 6


def test_what_starting_costs() -> None:
    one = Chip(xcds=1, cus_per_xcd=2, start=10, dispatch=3)
    assert launch([100] * 2, chip=one).clocks == 103
    assert launch([100] * 4, chip=one).clocks == 213  # 100 + 10, then 100 more, 3 apart
    assert launch([100] * 4, chip=one).held == 400


def test_workgroups_share_a_cu() -> None:
    one = Chip(xcds=1, cus_per_xcd=1, start=0, dispatch=0)
    # In turns: nothing is gained. A CU that two fill better: each at 0.8.
    assert launch([100, 100], slots=2, chip=one).clocks == 200
    assert launch([100, 100], slots=2, speeds=(1, 0.8), chip=one).clocks == pytest.approx(125)
    # The second is alone once the first is done: 50 / 0.8, then 50 at full speed.
    found = launch([40, 90], slots=2, speeds=(1, 0.8), chip=one)
    assert found.clocks == pytest.approx(50 + 50)
    assert found.held == pytest.approx(50 + 100) and found.occupied == pytest.approx(0.75)
    # Both slots are not filled before every CU has one.
    two = Chip(xcds=1, cus_per_xcd=2, start=0, dispatch=0)
    assert launch([100, 100], slots=2, speeds=(1, 0.5), chip=two).clocks == 100
    with pytest.raises(ValueError, match="2 slots"):
        launch([1], slots=2, speeds=(1,))


def test_a_clock_is_asked_for() -> None:
    assert launch([2100.0], chip=BARE).microseconds(2.1) == pytest.approx(1)
    assert launch([], chip=BARE).clocks == 0


def test_residency() -> None:
    assert residency(256, 65536, 8) == 1
    assert residency(257, 0, 4) == 1
    assert residency(234, 16896, 4) == 2  # registers: two waves a SIMD
    assert residency(128, 16896, 4) == 3  # LDS
    assert residency(24, 0, 4) == 8  # never more than eight waves a SIMD
    with pytest.raises(ValueError, match="no CU holds"):
        residency(257, 0, 8)


def test_the_line_through_replays() -> None:
    cost = Cost.of([(4, 1400), (8, 2400), (16, 4400)])
    assert (cost.fixed, cost.per_block) == pytest.approx((400, 250))
    assert cost(32) == pytest.approx(8400)
    with pytest.raises(ValueError, match="two lengths"):
        Cost.of([(4, 1400), (4, 1500)])
