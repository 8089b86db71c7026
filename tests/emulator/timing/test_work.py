"""Counts per flop, bytes under way, and several workgroups on a CU."""

from pathlib import Path

import numpy as np
import pytest

from liteattention_emulator import EmulatorError, Recording, device
from liteattention_emulator.snippet import State
from liteattention_emulator.timing import replay, work
from liteattention_emulator.timing.work import flops

from .streams import record, streams

MFMA = 2 * 16 * 16 * 16
"""flops of one v_mfma_f32_16x16x16_bf16."""


LOAD = "global_load_dwordx4 v[4:7], v0, s[2:3] offset:{}"
"""1024 bytes of eight lines."""


def recorded_loads(lines: list[str]) -> Recording:
    data = np.zeros(1 << 16, np.uint8)
    state = State()
    state.set_s64(2, data.ctypes.data + (-data.ctypes.data) % 4096)
    state.v(0)[:] = 16 * np.arange(64)
    with device.registered(data):
        return record("\n".join(lines), state)


def test_counts_per_flop() -> None:
    found = work(replay(streams(["MMVVVPE"] * 4)))
    assert found is not None
    mflop = 2 * MFMA / 1e6
    for name, count in {"matrix": 2, "plain": 3, "packed": 1, "exp": 1, "lds": 0}.items():
        assert getattr(found, name) == pytest.approx(count / mflop), name
    # A and B of 64 lanes x 8 bytes, C and D of 16; add 2 + 1 dwords, packed 4 + 2, exp 1 + 1.
    assert found.matrix_operands == pytest.approx((2 * 512 + 2 * 1024) / MFMA)
    assert found.other_operands == pytest.approx(256 * (3 * 3 + 6 + 2) / (2 * MFMA))
    assert found.l1_bytes == found.lds_bytes == found.l2_bytes == 0
    assert work(replay(streams(["VVV"]))) is None
    assert [flops(inst) for inst in streams(["M"]).instructions[:6]] == [MFMA] * 4 + [0] * 2


def test_bytes_of_loads_and_copies() -> None:
    """1024 bytes from L2, the same from L1, and 256 of them from L1 to LDS."""
    wait = "s_waitcnt vmcnt(0)"
    copy = ["s_mov_b32 m0, 0", "s_nop 0", "global_load_lds_dword v0, s[2:3]"]
    product = "v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]"
    lines = [LOAD.format(0), wait, LOAD.format(0), *copy, wait, product, "s_nop 0"]
    found = work(replay(recorded_loads(lines)))
    assert found is not None
    assert found.l1_bytes == pytest.approx((2 * 1024 + 256) / MFMA)
    assert found.l2_bytes == pytest.approx(1024 / MFMA)
    assert found.lds_bytes == pytest.approx(256 / MFMA)
    assert found.memory == pytest.approx(3 / (MFMA / 1e6)) and found.lds == 0


def test_bytes_under_way() -> None:
    """A load that misses and, when it is there, one that hits: each for its own time."""
    wait = "s_waitcnt vmcnt(0)"
    recorded = recorded_loads([LOAD.format(0), wait, LOAD.format(0), wait, "s_nop 0"])
    found = replay(recorded)
    times = found.issued[0]
    miss, hit = (float(times[i + 1] - times[i]) for i in (0, 2))
    flight = found.flight
    assert (flight.asked, flight.fetched) == (2048, 1024)
    assert flight.asked_clocks == pytest.approx(1024 * (miss + hit), rel=0.01)
    assert flight.fetched_clocks == pytest.approx(1024 * miss, rel=0.01)
    assert flight.fetched_under_way == flight.fetched_clocks / found.span
    assert flight.rate == 1024 / found.span
    # Only what issues in the window counts.
    behind = replay(recorded, window=(1, 5)).flight
    assert (behind.asked, behind.fetched) == (1024, 0)
    slower = replay(recorded, {"l2_latency": 876}).flight
    assert slower.fetched_clocks - flight.fetched_clocks == pytest.approx(1024 * 576, rel=0.01)


def test_stores_are_not_under_way() -> None:
    store = "global_store_dwordx4 v0, v[4:7], s[2:3]"
    found = replay(recorded_loads([store, "s_waitcnt vmcnt(0)"])).flight
    assert (found.asked, found.asked_clocks) == (0, 0)


def test_workgroups_of_a_cu_share_it_but_not_their_barriers() -> None:
    one = streams(["M" * 400 + "B" + "M" * 400] * 4)
    alone, both = replay(one).clocks, replay(one.beside(one)).clocks
    assert both == pytest.approx(2 * alone, rel=0.01)  # the matrix cores are the limit
    late = streams(["V" * 2000 + "BV", "BV", "BV", "BV"])
    early = streams(["V" * 20 + "BV", "BV", "BV", "BV"])
    times = replay(late.beside(early)).issued
    assert times[5][-1] < 500 < 2000 < times[1][-1]
    as_one = replay(Recording(late.text, (*late.waves, *early.waves))).issued
    assert as_one[5][-1] > 2000


def test_workgroups_of_a_cu_as_a_file(tmp_path: Path) -> None:
    one = streams(["MVB"] * 4)
    both = one.beside(one, one)
    assert both.workgroups == (0,) * 4 + (1,) * 4 + (2,) * 4
    both.save(tmp_path / "both.npz")
    assert Recording.load(tmp_path / "both.npz").workgroups == both.workgroups
    for wrong in (both, Recording(b"", one.waves)):
        with pytest.raises(ValueError, match="recording"):
            one.beside(wrong)
    with pytest.raises(EmulatorError, match="1 to 32 waves"):
        replay(Recording(one.text, one.waves * 9))
