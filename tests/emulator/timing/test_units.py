"""The parts of the modelled CU that are no co-issue: LDS, vector memory, waits, barriers, order."""

from dataclasses import replace

import numpy as np
import pytest

from liteattention_emulator import device
from liteattention_emulator.snippet import State
from liteattention_emulator.timing import replay

from .streams import record, streams

LDS_READS = 11


def repeated(line: str, times: int) -> list[str]:
    return [f".rept {times}", line, ".endr"]


def lds_clocks(name: str, registers: int, stride: int, **overrides: float) -> tuple[float, float]:
    """Latency of one LDS read and clk per read of a row of them, as tingqli/pyhip measures."""
    state = State()
    state.v(0)[:] = stride * np.arange(64)
    reads = [
        f"{name} v[{4 + 4 * i}:{3 + 4 * i + registers}], v0" for i in range(LDS_READS)
    ] if registers > 1 else [f"{name} v{4 + i}, v0" for i in range(LDS_READS)]  # fmt: skip
    first, last = [], []
    for count in (1, LDS_READS):
        program = "\n".join([*reads[:count], "s_waitcnt lgkmcnt(0)", "v_add_f32 v1, v2, v3"])
        times = replay(record(program, state), overrides).issued[0]
        first.append(times[0])
        last.append(times[count])
    latency = float(last[0] - first[0])
    return latency, (float(last[1] - first[1]) - latency) / (LDS_READS - 1)


# tingqli/pyhip, mem_latency.md: 52 and 64 or 55 and 50 clk in two revisions; here the first ones.
@pytest.mark.parametrize(
    ("name", "registers", "stride", "latency", "each"),
    [
        ("ds_read_b32", 1, 4, 52, 4),
        ("ds_read_b128", 4, 16, 64, 16),
        ("ds_read_b32", 1, 32, 120, 16),  # 8 dwords apart: four banks serve a phase
        ("ds_read_b32", 1, 128, 119, 64),  # 32 dwords apart: one bank
    ],
)
def test_lds_reads(name: str, registers: int, stride: int, latency: int, each: int) -> None:
    found = lds_clocks(name, registers, stride)
    assert found == pytest.approx((latency, each), rel=0.02)


@pytest.mark.parametrize(
    ("constant", "value", "stride"),
    [("lds_phase", 2, 32), ("lds_pair_bytes", 128, 4), ("lds_latency", 51, 4)],
)
def test_another_constant_breaks_an_lds_row(constant: str, value: float, stride: int) -> None:
    measured = {4: (52, 4), 32: (120, 16)}[stride]
    found = lds_clocks("ds_read_b32", 1, stride, **{constant: value})
    assert found != pytest.approx(measured, rel=0.02)


def test_two_pairs_of_simds_share_the_banks() -> None:
    """128 B/clk: two pairs read at full rate, and two SIMDs of a pair at half of it."""
    program = "\n".join(repeated("ds_read_b128 v[4:7], v0", 64))
    clocks = {}
    for waves in (1, 2, 4):
        state = State(waves)
        for wave in range(waves):
            state.v(0, wave)[:] = 16 * np.arange(64)
        found = replay(record(program, state)).issued
        clocks[waves] = max(int(times[-2]) for times in found)
    assert clocks[2] == pytest.approx(2 * clocks[1], rel=0.1)  # waves 0 and 1: one pair
    assert clocks[4] == pytest.approx(clocks[2], rel=0.1)  # both pairs: no slower


def test_conflicts_of_one_pair_slow_the_other() -> None:
    """16 clk a read where a pair has the banks alone, 32 where both want them."""
    program = "\n".join(repeated("ds_read_b32 v4, v0", 64))
    clocks = {}
    for waves in (1, 4):
        state = State(waves)
        for wave in range(waves):
            state.v(0, wave)[:] = 32 * np.arange(64)
        found = replay(record(program, state)).issued
        clocks[waves] = max(int(times[-2]) for times in found)
    assert clocks[4] == pytest.approx(4 * clocks[1], rel=0.1)  # two waves a pair, half the banks


def test_an_exchange_between_lanes_passes_as_a_dword_of_each() -> None:
    lines = [*repeated("ds_bpermute_b32 v4, v0, v1", 32), "s_waitcnt lgkmcnt(0)", "v_nop"]
    times = replay(record("\n".join(lines), State())).issued[0]
    assert times[31] - times[0] == 31 * 4 and times[33] - times[31] == 52 + 4


def memory_program(lines: list[str]) -> tuple[np.ndarray, State, str]:
    data = np.zeros(1 << 18, np.uint8)
    state = State()
    state.set_s64(2, data.ctypes.data + (-data.ctypes.data) % 4096)
    state.v(0)[:] = 16 * np.arange(64)
    return data, state, "\n".join(lines)


def replay_memory(lines: list[str], **overrides: float) -> list[int]:
    data, state, program = memory_program(lines)
    with device.registered(data):
        return list(map(int, replay(record(program, state), overrides).issued[0]))


LOAD = "global_load_dwordx4 v[4:7], v0, s[2:3] offset:{}"


def check_a_miss_and_a_hit(**overrides: float) -> None:
    wait = "s_waitcnt vmcnt(0)"
    program = [LOAD.format(0), wait, LOAD.format(0), wait, "v_add_f32 v1, v2, v3"]
    times = replay_memory(program, **overrides)
    shortest = 1024 / 60.8 - 4  # of the bytes behind the first ones
    assert times[3] - times[2] == pytest.approx(120 + shortest, rel=0.02)
    behind = 7 * 128 / 43  # of the eight lines, at 43 B/clk
    assert times[1] - times[0] == pytest.approx(300 + shortest + behind, rel=0.02)


def test_a_miss_and_a_hit_of_l1() -> None:
    check_a_miss_and_a_hit()


def test_l1_delivers_its_bytes_per_clk() -> None:
    first = [LOAD.format(0), "s_waitcnt vmcnt(0)"]
    loads = 200
    times = replay_memory(first + repeated(LOAD.format(0), loads), vmem_queue=1000)
    assert 1024 * (loads - 100) / (times[-2] - times[101]) == pytest.approx(60.8, rel=0.02)


def test_lines_leave_l1_when_others_come() -> None:
    """256 lines in four sets: 33 KB walked twice miss, 32 KB hit."""
    for kilobytes, hits in ((32, 256), (40, 0)):
        walk = ["s_mov_b32 s5, 0", "again:", "s_mov_b32 s4, 0", "next:", "v_add_u32 v1, s4, v0"]
        walk += ["global_load_dwordx4 v[4:7], v1, s[2:3]", "s_addk_i32 s4, 0x400"]
        walk += [f"s_cmp_lt_u32 s4, 0x{1024 * kilobytes:x}", "s_cbranch_scc1 next"]
        walk += ["s_addk_i32 s5, 1", "s_cmp_lt_u32 s5, 2", "s_cbranch_scc1 again"]
        data, state, program = memory_program(walk)
        with device.registered(data):
            found = replay(record(program, state))
        assert (found.l1_hits, found.l1_misses) == (hits, 2 * 8 * kilobytes - hits)


@pytest.mark.parametrize(
    ("constant", "value"),
    [("l1_latency", 140), ("l1_bytes", 30), ("l2_latency", 400), ("l2_bytes", 30)],
)
def test_another_constant_breaks_a_memory_row(constant: str, value: float) -> None:
    with pytest.raises(AssertionError):
        check_a_miss_and_a_hit(**{constant: value})


def test_loads_retire_in_order() -> None:
    """A hit behind a miss: vmcnt(1) and vmcnt(0) both wait for the miss."""
    warm = [LOAD.format(0), "s_waitcnt vmcnt(0)"]
    pair = [LOAD.format(2048), LOAD.format(0)]
    after = ["v_add_f32 v1, v2, v3"]
    both = replay_memory([*warm, *pair, "s_waitcnt vmcnt(0)", *after])
    first = replay_memory([*warm, *pair, "s_waitcnt vmcnt(1)", *after])
    hit = replay_memory([*warm, pair[1], pair[0], "s_waitcnt vmcnt(1)", *after])
    assert both[4] == first[4] > hit[4] + 100


def test_the_queue_is_24_deep() -> None:
    times = replay_memory(repeated(LOAD.format(0), 40), vmem_backlog=1e9)
    gaps = np.diff(times[:40])
    assert gaps[:23].max() == 4 and gaps[23] > 100
    times = replay_memory(repeated(LOAD.format(0), 40), vmem_backlog=1e9, vmem_queue=30)
    assert np.diff(times[:40])[:29].max() == 4


def test_a_wait_that_asks_for_nothing_waits_for_nothing() -> None:
    after = "v_add_f32 v1, v2, v3"
    free = replay_memory([LOAD.format(0), "s_waitcnt lgkmcnt(0)", after])
    assert free[2] - free[0] == 8
    asked = replay_memory([LOAD.format(0), "s_waitcnt vmcnt(0)", after])
    assert asked[2] - asked[0] > 300


@pytest.mark.parametrize("count", [15, 20])
def test_a_wait_for_many_counts_them(count: int) -> None:
    """vmcnt has six bits, in two places."""
    loads = [*repeated(LOAD.format(0), 22), f"s_waitcnt vmcnt({count})", "v_add_f32 v1, v2, v3"]
    times = replay_memory(loads)
    assert times[23] - times[0] > 300


def test_waves_leave_a_barrier_together() -> None:
    """However early a wave came: 16 clk behind the last one."""
    found = replay(streams(["V" * 50 + "BV", "BV", "E" * 10 + "BV", "V" * 3 + "BV"])).issued
    last = max(int(times[-2]) for times in found)
    assert {int(times[-1]) for times in found} == {last + 16}
    moved = replay(streams(["V" * 50 + "BV", "BV"]), {"barrier_release": 40}).issued
    assert moved[1][1] == moved[0][-2] + 40


def test_a_wave_that_ends_at_a_barrier_lets_nobody_through_early() -> None:
    found = replay(streams(["B", "BV", "V" * 50 + "BV"])).issued
    assert found[1][1] == found[2][50] + 16


def test_a_wave_that_ended_keeps_nobody_at_a_barrier() -> None:
    found = replay(streams(["VVVV", "BV"])).issued
    assert found[1][1] <= found[0][-1] + 17


def test_the_higher_priority_issues_first() -> None:
    """A wave behind s_setprio 1 has the port as if it were alone."""
    alone = replay(streams(["H" + "V" * 200])).issued[0]
    plain, first = (
        replay(streams([head + "V" * 200, *[""] * 3, "V" * 400])).issued[0] for head in ("", "H")
    )
    assert first[-1] == pytest.approx(alone[-1], abs=8)
    assert plain[-1] > 1.8 * alone[-1]


def test_results_are_waited_for() -> None:
    """A product in a vector instruction, one in the next product, a transcendental."""
    chain = "v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]"
    read = "v_accvgpr_read_b32 v9, a0"
    times = replay(record("\n".join([chain, chain, read]), State())).issued[0]
    assert times[1] - times[0] == 16
    assert times[2] - times[1] == 16 + 8
    slow = {"matrix_to_accumulator": 4, "matrix_to_other": 16}
    times = replay(record("\n".join([chain, chain, read]), State()), slow).issued[0]
    assert (times[1] - times[0], times[2] - times[1]) == (20, 32)
    exp = "v_exp_f32 v5, v4\nv_add_f32 v6, v5, v5\nv_add_f32 v7, v6, v6"
    times = replay(record(exp, State()), {"trans_latency": 24, "valu_latency": 8}).issued[0]
    assert (times[1] - times[0], times[2] - times[1]) == (24, 8)


def test_a_scalar_reader_of_a_vector_mask_waits_longer() -> None:
    mask = "v_cmp_lt_f32 vcc, v0, v1\n"
    vector = replay(record(mask + "v_cndmask_b32 v2, v3, v4, vcc", State())).issued[0]
    scalar = replay(record(mask + "s_mov_b64 s[4:5], vcc", State())).issued[0]
    assert (vector[1] - vector[0], scalar[1] - scalar[0]) == (4, 16)


def test_agprs_are_the_vector_registers_from_accum_offset_on() -> None:
    program = "v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]\nv_mov_b32 v9, v128"
    found = record(program, State())
    apart = replay(found).issued[0]
    same = replay(replace(found, accum_offset=128)).issued[0]
    assert (apart[1] - apart[0], same[1] - same[0]) == (4, 24)
