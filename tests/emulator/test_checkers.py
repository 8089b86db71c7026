"""Every rule of the run-time checkers: a snippet that breaks it, and its corrected twin."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from liteattention_emulator import native, snippet

from .memory_bench import (
    SOME,
    active,
    checked,
    kinds,
    machine_code,
    registered,
    set_address,
    set_buffer,
)

__all__ = ["checked"]

ORDERS = ["round-robin:1", "round-robin:3", "random:1", "random:2", "first-ahead", "last-ahead"]
MEMORY = 8192


def prepared(waves: int = 1, mask: int | None = None) -> tuple[snippet.State, np.ndarray]:
    """Waves with s0 = wave, v0 = 4 * lane, v[2:3] a global address per lane, s[8:11] a buffer."""
    memory = np.zeros(MEMORY, np.uint8)
    at = snippet.State(waves=waves, lds_bytes=8192, scratch_bytes=64)
    lane = np.arange(64)
    base = memory.ctypes.data
    for wave in range(waves):
        at.scalar[wave, 0] = wave
        at.v(0, wave)[:] = lane * 4
        at.v(2, wave)[:] = (base + lane * 16) & 0xFFFFFFFF
        at.v(3, wave)[:] = base >> 32
        at.scalar[wave, 8:12] = [base & 0xFFFFFFFF, base >> 32, MEMORY, 0x20000]
        at.set_s64(12, base, wave)
        for register in (6, 7, 8):
            at.v(register, wave)[:] = 0x01010101 * (register + 10 * wave)
        if mask is not None:
            at.set_s64(snippet.EXEC, mask, wave)
    return at, memory


def found(code: str, waves: int = 1, mask: int | None = None) -> list[str]:
    at, memory = prepared(waves, mask)
    with registered(memory):
        return kinds(code, at)


def text_of(code: str, waves: int = 1) -> str:
    """The first finding's text."""
    at, memory = prepared(waves)
    with registered(memory):
        return str(snippet.run(machine_code(code), at)["findings"][0]["detail"])


# ---- registers in flight

USES = {  # a load into v4 (s4), and how it is waited for
    "global": ("global_load_dword v4, v[2:3], off", "vmcnt(0)"),
    "buffer": ("buffer_load_dword v4, v0, s[8:11], 0 offen", "vmcnt(0)"),
    "scratch": ("scratch_load_dword v4, off, off", "vmcnt(0)"),
    "atomic": ("global_atomic_add v4, v[2:3], v6, off sc0", "vmcnt(0)"),
    "flat": ("flat_load_dword v4, v[2:3]", "vmcnt(0) lgkmcnt(0)"),
    "ds": ("ds_read_b32 v4, v0", "lgkmcnt(0)"),
    "bpermute": ("ds_bpermute_b32 v4, v0, v6", "lgkmcnt(0)"),
    "swizzle": ("ds_swizzle_b32 v4, v6 offset:0x801b", "lgkmcnt(0)"),
    "ds atomic": ("ds_add_rtn_u32 v4, v0, v6", "lgkmcnt(0)"),
}


@pytest.mark.parametrize(
    "touch", ["v_add_u32 v7, v4, v6", "v_mov_b32 v4, 0", "v_add_u32 v7, s4, v4"]
)
@pytest.mark.parametrize("use", USES)
def test_touching_a_load_in_flight(use: str, touch: str) -> None:
    load, wait = USES[use]
    assert found(f"{load}\n{touch}") == ["in-flight register"]
    assert found(f"{load}\ns_waitcnt {wait}\n{touch}") == []
    # The other counter does not help.
    other = "lgkmcnt(0)" if "vmcnt" in wait else "vmcnt(0)"
    assert found(f"{load}\ns_waitcnt {other}\n{touch}") == ["in-flight register"]


@pytest.mark.parametrize(
    "touch",
    [
        "s_add_u32 s7, s4, s6",
        "s_mov_b32 s4, 0",
        "v_mov_b32 v4, s5",
        "v_cndmask_b32 v4, v5, v6, s[4:5]",
        "s_cbranch_vccz next\nnext:",
        "v_cmp_eq_u32 vcc, v4, v5",
    ],
)
def test_touching_a_scalar_load_in_flight(touch: str) -> None:
    to = "vcc" if "vcc" in touch else "s[4:5]"
    load = f"s_load_dwordx2 {to}, s[12:13], 0"
    assert found(f"{load}\n{touch}") == ["in-flight register"]
    assert found(f"{load}\ns_waitcnt lgkmcnt(0)\n{touch}") == []


def test_text_names_register_and_both_instructions() -> None:
    text = text_of("ds_read_b64 v[4:5], v0\nv_add_u32 v7, v5, v6")
    assert "v5 is read by v_add_u32 v7, v5, v6" in text
    assert "ds_read_b64 v[4:5], v0 at +0x0" in text
    text = text_of("buffer_load_dwordx4 a[4:7], v0, s[8:11], 0 offen\nv_accvgpr_write_b32 a6, 0")
    assert text.startswith("a6 is overwritten by")


def test_vector_loads_return_in_order() -> None:
    loads = "global_load_dword v4, v[2:3], off\nglobal_load_dword v5, v[2:3], off\n"
    assert found(loads + "s_waitcnt vmcnt(1)\nv_mov_b32 v6, v4") == []
    assert found(loads + "s_waitcnt vmcnt(1)\nv_mov_b32 v6, v5") == ["in-flight register"]
    assert found(loads + "s_waitcnt vmcnt(2)\nv_mov_b32 v6, v4") == ["in-flight register"]


def test_stores_and_dma_count_in_vmcnt() -> None:
    for other in (
        "global_store_dword v[2:3], v6, off",
        "buffer_load_dword v0, s[8:11], 0 offen lds",
    ):
        code = f"s_mov_b32 m0, 0\ns_nop 0\nglobal_load_dword v4, v[2:3], off\n{other}\n"
        assert found(code + "s_waitcnt vmcnt(1)\nv_mov_b32 v6, v4") == []
        assert found(code + "s_waitcnt vmcnt(2)\nv_mov_b32 v6, v4") == ["in-flight register"]


def test_lds_reads_return_in_order_unless_scalar_loads_are_out() -> None:
    reads = "ds_read_b32 v4, v0\nds_read_b32 v5, v0\n"
    assert found(reads + "s_waitcnt lgkmcnt(1)\nv_mov_b32 v6, v4") == []
    assert found(reads + "s_waitcnt lgkmcnt(1)\nv_mov_b32 v6, v5") == ["in-flight register"]
    # One of the two outstanding is enough for lgkmcnt(1), and it may be the scalar load.
    mixed = "ds_read_b32 v4, v0\ns_load_dword s4, s[12:13], 0\n"
    assert found(mixed + "s_waitcnt lgkmcnt(1)\nv_mov_b32 v6, v4") == ["in-flight register"]
    assert found(mixed + "s_waitcnt lgkmcnt(0)\nv_mov_b32 v6, v4") == []


def test_scalar_loads_return_in_any_order() -> None:
    loads = "s_load_dword s4, s[12:13], 0\ns_load_dword s5, s[12:13], 0\n"
    assert found(loads + "s_waitcnt lgkmcnt(1)\ns_mov_b32 s6, s4") == ["in-flight register"]
    assert found(loads + "s_waitcnt lgkmcnt(0)\ns_mov_b32 s6, s4") == []


def test_discard_register_reused_in_flight() -> None:
    """A prefetch into a register that the compiler holds for dead, given to something else."""
    code = (
        "buffer_load_dwordx4 v[20:23], v0, s[8:11], 0 offen\n"
        "v_exp_f32 v16, v6\n{wait}v_perm_b32 v21, v16, v7, v8\nv_add_f32 v9, v21, v6"
    )
    assert found(code.format(wait="")) == ["in-flight register"] * 2
    assert found(code.format(wait="s_waitcnt vmcnt(0)\n")) == []


@pytest.mark.parametrize("name, to", [("global_load_dword", "v[2:3], off"), ("ds_read_b32", "v0")])
def test_a_later_load_of_the_same_queue_may_overwrite(name: str, to: str) -> None:
    # As compilers let the two sides of a branch do, each under its part of EXEC.
    twice, late = f"{name} v4, {to}\n" * 2, "v_mov_b32 v6, v4"
    counter = "vm" if name.startswith("global") else "lgkm"
    assert found(f"{twice}s_waitcnt {counter}cnt(0)\n{late}") == []
    assert found(f"{twice}s_waitcnt {counter}cnt(1)\n{late}") == ["in-flight register"]
    other = "ds_read_b32 v4, v0" if counter == "vm" else "global_load_dword v4, v[2:3], off"
    assert found(twice + other) == ["in-flight register"]
    assert found(twice + "flat_load_dword v4, v[2:3]") == ["in-flight register"]


def test_two_loads_into_one_register() -> None:
    code = "global_load_dwordx2 v[4:5], v[2:3], off\nglobal_load_dword v5, v[2:3], off\n"
    assert found(code) == []
    # The second load keeps the register in flight when the first has returned.
    code += "s_waitcnt vmcnt({})\nv_mov_b32 v6, v4\nv_mov_b32 v6, v5"
    assert found(code.format(1)) == ["in-flight register"]
    assert found(code.format(0)) == []
    # Scalar loads have no order.
    scalar = "s_load_dwordx2 s[4:5], s[12:13], 0\ns_load_dword s5, s[12:13], 0"
    assert found(scalar) == ["in-flight register"]


def test_a_flat_load_takes_part_in_no_order() -> None:
    flat = "flat_load_dword v5, v[2:3]\n"
    loads = [("global_load_dword v4, v[2:3], off\n", "vm"), ("ds_read_b32 v4, v0\n", "lgkm")]
    for load, counter in loads:
        for code in (load + flat, flat + load):
            for left, kind in [(1, ["in-flight register"]), (0, [])]:
                wait = f"s_waitcnt {counter}cnt({left})\n"
                assert found(code + wait + "v_mov_b32 v6, v4") == kind
    both = flat + "s_waitcnt vmcnt({})\ns_waitcnt lgkmcnt({})\nv_mov_b32 v6, v5"
    assert found(both.format(0, 0)) == []
    assert found(both.format(1, 0)) == found(both.format(0, 1)) == ["in-flight register"]


def test_a_wait_for_later_lds_operations_does_not_cover_a_flat_one() -> None:
    code = """
        s_mov_b64 s[4:5], src_shared_base
        v_mov_b32 v4, v0
        v_mov_b32 v5, s5
        s_cmp_lg_u32 s0, 0
        s_cbranch_scc1 other
        flat_store_dword v[4:5], v6
        ds_read_b32 v7, v0 offset:1024
        ds_read_b32 v7, v0 offset:1024
        s_waitcnt lgkmcnt({})
        s_barrier
        s_endpgm
    other:
        s_barrier
        ds_read_b32 v7, v0
        s_waitcnt lgkmcnt(0)
    """
    assert found(code.format(0), waves=2) == []
    # Wave 0 ends later than at its barrier, and s_endpgm waits for everything: keep it running.
    spin = code.replace("s_endpgm", "s_barrier\n s_endpgm")
    spin = spin.replace("ds_read_b32 v7, v0\n", "ds_read_b32 v7, v0\n s_barrier\n")
    assert found(spin.format(0), waves=2) == []
    assert found(spin.format(1), waves=2) == ["LDS race"]


INDEXED = "s_mov_b32 s0, 2\ns_set_gpr_idx_on s0, gpr_idx({})\n{}\ns_set_gpr_idx_off\n"


def test_registers_indexed_by_m0_are_followed() -> None:
    load = "global_load_dword {}, v[2:3], off\n"
    for role, move in [("SRC0", "v_mov_b32 v9, v4"), ("DST", "v_mov_b32 v4, v9")]:
        code = INDEXED.format(role, move)
        assert found(load.format("v6") + code) == ["in-flight register"]
        assert found(load.format("v4") + code) == []
    # A lane access is not indexed.
    code = INDEXED.format("SRC0", "v_readlane_b32 s6, v4, 0")
    assert found(load.format("v6") + code) == []
    assert found(load.format("v4") + code) == ["in-flight register"]
    store = "scratch_load_dword v6, off, off\ns_waitcnt vmcnt(0)\n{}"
    store += "global_store_dword v[2:3], v6, off"
    assert found(store.format("")) == ["undefined value"]
    assert found(store.format(INDEXED.format("DST", "v_mov_b32 v4, v8"))) == []


def test_scalar_registers_relative_to_m0_are_followed() -> None:
    load, m0 = "s_load_dword s20, s[12:13], 0\n", "s_mov_b32 m0, 2\ns_nop 0\n"
    for move in ("s_movrels_b32 s4, s18", "s_movreld_b32 s18, s4"):
        assert found(load + m0 + move) == ["in-flight register"]
        assert found(load + m0 + move.replace("s18", "s20")) == []


@pytest.mark.parametrize(
    "name", ["andn1_saveexec", "orn1_saveexec", "andn1_wrexec", "andn2_wrexec"]
)
def test_exec_from_undefined_bits(name: str) -> None:
    undefined = "scratch_load_dword v4, off, off\ns_waitcnt vmcnt(0)\nv_readfirstlane_b32 s4, v4\n"
    code = f"s_mov_b32 s5, 0\ns_{name}_b64 s[6:7], s[4:5]"
    assert found(undefined + code, mask=0xF0F0) == ["undefined value"]
    assert found(f"s_mov_b32 s4, 5\n{code}", mask=0xF0F0) == []
    # Bits that EXEC alone decides: ~x | 1, and x & ~1.
    decided = name.startswith(("orn1", "andn2"))
    assert (found(undefined + code) == []) == decided


def test_ending_with_loads_in_flight_is_fine() -> None:
    assert found("global_load_dword v4, v[2:3], off\nds_read_b32 v5, v0") == []


# ---- LDS races

READ = "ds_read_b32 v4, v0\ns_waitcnt lgkmcnt(0)\n"
DMA = "s_mov_b32 m0, 0\ns_nop 0\nbuffer_load_dword v0, s[8:11], 0 offen lds\n"
WRITE, ADD = "ds_write_b32 v0, v6\n", "ds_add_u32 v0, v6\n"
DONE, BROUGHT = "s_waitcnt lgkmcnt(0)\n", "s_waitcnt vmcnt(0)\n"
NO_BARRIER = {
    # name: what wave 0 does, and wave 1 without a barrier in between
    "no barrier": (WRITE + DONE, READ),
    "no barrier between writes": (WRITE + DONE, "ds_write_b64 v0, v[6:7]"),
    "no barrier before overwriting": (READ, WRITE),
    "DMA over what another wave reads": (READ, DMA),
    "DMA over what another wave's DMA brings": (DMA + BROUGHT, DMA),
    "atomic on what another wave writes": (WRITE + DONE, ADD),
    "read of what another wave adds to": (ADD + DONE, READ),
    "byte of a dword": ("ds_write_b8 v0, v6 offset:2\n" + DONE, READ),
    "same byte": ("ds_write_b16 v0, v6 offset:2\n" + DONE, "ds_write_b8 v0, v6 offset:3"),
    "half read of a dword": (WRITE + DONE, "ds_read_u16 v4, v0 offset:2"),
}
NO_WAIT = {
    # name: what wave 0 does, the wait that it lacks before the barrier, what wave 1 does behind it
    "vote not waited for before the barrier": (WRITE, DONE, READ),
    "read not finished before it is overwritten": ("ds_read_b32 v4, v0\n", DONE, WRITE),
    "DMA not waited for before the barrier": (DMA, BROUGHT, READ),
    "DMA waited for with lgkmcnt": (DMA + DONE, BROUGHT, READ),
}
RACES = {
    # name: (wave 0, wave 1), each with the barriers; what corrects it replaces FIX
    **{
        name: (f"{first}FIX:s_barrier", f"FIX:s_barrier\n{second}")
        for name, (first, second) in NO_BARRIER.items()
    },
    **{
        name: (f"{first}FIX:{wait}s_barrier", f"s_barrier\n{second}")
        for name, (first, wait, second) in NO_WAIT.items()
    },
    "waited for behind the barrier": (
        f"{WRITE}FIX:{DONE}s_barrier\n{DONE}s_nop 0",
        f"s_barrier\ns_nop 0\n{READ}",
    ),
    "newest of two DMAs not waited for": (
        f"{DMA}{DMA.replace('m0, 0', 'm0, 256')}FIX:{BROUGHT}s_waitcnt vmcnt(1)\ns_barrier",
        "s_barrier\n" + READ.replace("v4, v0", "v4, v0 offset:256"),
    ),
    "read after atomics of both waves": (
        f"{ADD}{DONE}FIX:s_barrier",
        f"{ADD}{DONE}FIX:s_barrier\n{READ}",
    ),
}


def two_waves(first: str, second: str, *, corrected: bool) -> str:
    def side(code: str) -> str:
        lines = code.splitlines()
        if corrected:
            return "\n".join(line.removeprefix("FIX:") for line in lines)
        return "\n".join(line for line in lines if not line.startswith("FIX:"))

    return (
        f"s_cmp_eq_u32 s0, 0\ns_cbranch_scc0 second\n{side(first)}\ns_branch done\n"
        f"second:\n{side(second)}\ndone:"
    )


@pytest.mark.parametrize("name", RACES)
def test_races_in_every_order(name: str) -> None:
    """Whichever wave happens to come first, the race is found, and the corrected code is not."""
    for order in ORDERS:
        native.set_option("order", order)
        assert "LDS race" in found(two_waves(*RACES[name], corrected=False), 2), order
        assert found(two_waves(*RACES[name], corrected=True), 2) == [], order


def test_race_text_says_who_and_why() -> None:
    text = text_of(two_waves(*RACES["vote not waited for before the barrier"], corrected=False), 2)
    assert "wave 1 lane 0 reads LDS byte 0x0 (ds_read_b32 v4, v0)" in text
    assert "wave 0 has written by ds_write_b32 v0, v6 at +0x8" in text
    assert "without waiting for it (lgkmcnt) before the barrier" in text
    native.set_option("order", "first-ahead")
    text = text_of(two_waves(*RACES["no barrier"], corrected=False), 2)
    assert "no barrier lies between" in text


@pytest.mark.parametrize(
    "code",
    [
        # neighbours of one dword
        "v_lshl_add_u32 v1, s0, 1, v0\nds_write_b16 v1, v6",
        "v_add_u32 v1, s0, v0\nds_write_b8 v1, v6\ns_waitcnt lgkmcnt(0)\nds_read_u8 v4, v1",
        # atomics among each other, with and without result
        "ds_add_u32 v0, v6\nds_max_rtn_u32 v4, v0, v6\nds_append v5",
        # reads among each other
        "ds_read_b64 v[4:5], v0\nds_read_b32 v7, v0",
        # several waves that hold a copy of a value all store it
        "v_mov_b32 v6, 5\nds_write_b32 v0, v6\nds_write_b16 v0, v6 offset:256",
        # own data needs no barrier, and LDS operations of a wave no wait between them
        "v_lshl_add_u32 v1, s0, 10, v0\nds_write_b32 v1, v6\nds_read_b32 v4, v1\n"
        "ds_write_b32 v1, v7\nds_add_u32 v1, v7\nds_read_b32 v5, v1",
    ],
)
def test_no_race(code: str) -> None:
    for order in ORDERS:
        native.set_option("order", order)
        assert found(code, 2) == []


def test_bytes_become_a_dword_again() -> None:
    """A dword written in parts by two waves, then as a whole, then read: each behind a barrier."""
    fence = "\ns_waitcnt lgkmcnt(0)\ns_barrier\n"
    first = f"ds_write_b8 v0, v6{fence}ds_write_b32 v0, v6{fence}ds_read_u8 v4, v0"
    second = f"ds_write_b8 v0, v6 offset:3{fence}s_nop 0{fence}ds_read_b32 v4, v0"
    assert found(two_waves(first, second, corrected=True), 2) == []
    second += "\nds_write_b8 v0, v6"
    assert found(two_waves(first, second + " offset:1", corrected=True), 2) == []
    assert found(two_waves(first, second, corrected=True), 2) == ["LDS race"]


def test_a_waves_own_dma() -> None:
    """LDS-DMA is not in order with the wave's LDS operations."""
    assert found(DMA + READ) == ["LDS race"]
    assert found(DMA + "s_waitcnt lgkmcnt(0)\n" + READ) == ["LDS race"]
    assert found(DMA + "s_waitcnt vmcnt(0)\n" + READ) == []
    assert found("ds_read_b32 v4, v0\n" + DMA) == ["LDS race"]
    assert found(READ + DMA) == []
    assert found("ds_write_b32 v0, v6\n" + DMA) == ["LDS race"]
    assert found("ds_write_b32 v0, v6\ns_waitcnt lgkmcnt(0)\n" + DMA + DMA) == []


PIPELINE = """
v_lshlrev_b32 v1, 8, v6
s_lshl_b32 s4, s0, 8
s_mov_b32 s5, 0
s_mov_b32 s6, 0
s_mov_b32 m0, s4
s_nop 0
buffer_load_dword v0, s[8:11], 0 offen lds
loop:
s_xor_b32 s5, s5, 1024
s_add_u32 s7, s4, s5
s_mov_b32 m0, s7
s_nop 0
buffer_load_dword v0, s[8:11], 0 offen lds
s_waitcnt vmcnt(1)
s_barrier
s_xor_b32 s7, s5, 1024
v_add_u32 v1, s7, v0
ds_read_b32 v4, v1
ds_read_b32 v5, v1 offset:256
s_waitcnt lgkmcnt(0)
v_add_u32 v7, v4, v5
s_barrier
s_add_u32 s6, s6, 1
s_cmp_lt_u32 s6, 4
s_cbranch_scc1 loop
"""


def test_deleting_any_wait_or_barrier_of_a_pipeline() -> None:
    """Two waves bring a tile each by DMA, one step ahead; the next tile stays in flight."""
    lines = PIPELINE.strip().splitlines()
    for order in ORDERS:
        native.set_option("order", order)
        assert found(PIPELINE, 2) == []
        for n, line in enumerate(lines):
            if line.startswith(("s_waitcnt", "s_barrier")):
                assert found("\n".join(lines[:n] + lines[n + 1 :]), 2), f"{order}: {n} {line}"


def test_long_histories() -> None:
    """More LDS operations than the checker keeps: behind a full barrier it may forget them."""
    loop = (
        "s_mov_b32 s4, 20000\nv_lshl_add_u32 v1, s0, 10, v0\nagain:\n"
        "ds_write_b32 v1, v6\nds_add_u32 v1, v6 offset:256\nds_write_b8 v1, v6 offset:512\n"
        "s_waitcnt lgkmcnt(0)\ns_barrier\ns_sub_u32 s4, s4, 1\ns_cmp_lg_u32 s4, 0\n"
        "s_cbranch_scc1 again\n"
    )
    last = "v_xor_b32 v2, 1024, v1\nds_read_b32 v4, v2\nds_read_u8 v5, v2 offset:512\n"
    assert found(loop + last, 2) == []
    for other in ("ds_write_b32 v1, v7", "ds_add_u32 v1, v6", "ds_write_b8 v1, v7 offset:512"):
        assert set(found(f"{loop}{other}\n{last}", 2)) == {"LDS race"}


# ---- bounds


def test_global_bounds() -> None:
    at, memory = prepared()
    code = (
        "global_load_dwordx4 v[4:7], v[2:3], off offset:{}\n"
        "global_store_dword v[2:3], v8, off offset:{}"
    )
    memory[:] = 1
    part = memory[: 64 * 16]
    with registered(part):
        assert kinds(code.format(0, 12), at) == []
        assert kinds(code.format(4, 0), at) == ["out of bounds"]
        # An outside load gives zero, the other lanes go on.
        np.testing.assert_array_equal(at.v(4) != 0, np.arange(64) < 63)
        assert kinds(code.format(0, 16), at) == ["out of bounds"]
        assert kinds(code.format(-4, -8), at) == ["out of bounds"] * 2
        assert (memory[64 * 16 :] == 1).all()
        # Inactive lanes access nothing.
        at.set_s64(snippet.EXEC, (1 << 63) - 1)
        assert kinds(code.format(16, 16), at) == []
        at.set_s64(snippet.EXEC, 0)
        assert kinds(code.format(4000, 4000), at) == []


def test_bounds_text() -> None:
    at, memory = prepared()
    with registered(memory[: 63 * 16]):
        report = snippet.run(machine_code("global_load_dwordx4 v[4:7], v[2:3], off"), at)
    (finding,) = report["findings"]
    assert "lane 63" in finding["detail"] and hex(memory.ctypes.data + 63 * 16) in finding["detail"]
    assert (finding["offset"], finding["wave"], finding["count"]) == (0, 0, 1)


def test_ranges_nest_and_overlap() -> None:
    """Views of one tensor: what any of them covers is inside, removed one by one."""
    at, memory = prepared()
    code = "global_load_dword v4, v[2:3], off"
    with registered(memory):
        with registered(memory[:64], memory[32:128], memory):
            assert kinds(code, at) == []
        assert kinds(code, at) == []
    assert kinds(code, at) == ["out of bounds"]
    with registered(memory[: 64 * 8], memory[64 * 8 :]):  # adjacent: no access across the seam
        assert kinds(code, at) == []
        at.v(2)[:] = (memory.ctypes.data + 64 * 8 - 2) & 0xFFFFFFFF
        assert kinds(code, at) == ["out of bounds"]


def test_buffer_bounds_are_not_allocation_bounds() -> None:
    """What num_records excludes is no finding; what it wrongly includes is one."""
    at, memory = prepared()
    at.v(0)[:] = np.arange(64) * 64
    code = "buffer_load_dwordx4 v[4:7], v0, s[8:11], 0 offen"
    with registered(memory[:1024]):
        set_buffer(at, 8, memory.ctypes.data, 1024)
        assert kinds(code, at) == []
        set_buffer(at, 8, memory.ctypes.data, 1028)
        assert kinds(code, at) == ["out of bounds"]


def test_scalar_and_scratch_bounds() -> None:
    at, memory = prepared()
    with registered(memory[:64]):
        assert kinds("s_load_dwordx2 s[4:5], s[12:13], 56", at) == []
        assert kinds("s_load_dwordx2 s[4:5], s[12:13], 60", at) == ["out of bounds"]
    assert kinds("scratch_store_dwordx2 off, v[4:5], off offset:56", at) == []
    assert kinds("scratch_store_dwordx2 off, v[4:5], off offset:60", at) == ["out of bounds"]
    assert kinds("scratch_load_dword v4, v0, off", at) == ["out of bounds"]


def test_misaligned() -> None:
    at, memory = prepared()
    at.set_s64(12, memory.ctypes.data + 2)
    with registered(memory):
        assert kinds("s_load_dword s4, s[12:13], 0", at) == ["misaligned"]
        assert kinds("s_load_dword s4, s[12:13], 2", at) == []
        assert kinds("global_load_dwordx2 v[4:5], v[2:3], off offset:1", at) == []
        assert kinds("global_atomic_add v[2:3], v6, off offset:4", at) == []
        assert kinds("global_atomic_add v[2:3], v6, off offset:2", at) == ["misaligned"]
        assert kinds("global_atomic_add_x2 v[2:3], v[6:7], off offset:4", at) == ["misaligned"]
        assert kinds("ds_add_u32 v0, v6 offset:4\nds_add_u64 v0, v[6:7]", at) == ["misaligned"]
        assert kinds(DMA.replace("m0, 0", "m0, 6"), at) == ["misaligned"]


def test_dma_beyond_lds() -> None:
    assert found(DMA.replace("m0, 0", f"m0, {8192 - 256}")) == []
    assert found(DMA.replace("m0, 0", f"m0, {8192 - 252}")) == ["LDS out of bounds"]


# ---- undefined values


@contextmanager
def allocated(size: int) -> Iterator[int]:
    """Fresh device memory: nothing in it has been written."""
    functions = native.functions()
    pointer = ctypes.c_void_p()
    native.check(functions.hipMalloc(ctypes.byref(pointer), size), "hipMalloc")
    yield int(pointer.value or 0)
    native.check(functions.hipFree(pointer), "hipFree")


LOAD = (
    "global_load_dword v4, v[16:17], off\ns_load_dword s4, s[14:15], 0\n"
    "s_waitcnt vmcnt(0) lgkmcnt(0)\n"
)
"""v4 and s4 from fresh memory."""


def fresh(code: str, *, written: int = 0, mask: int | None = None, waves: int = 1) -> list[str]:
    """Findings of LOAD and code, after `written` bytes of the memory were set by the host."""
    at, memory = prepared(waves, mask)
    with allocated(1024) as base, registered(memory):
        native.check(native.functions().hipMemset(base, 0, written), "hipMemset")
        for wave in range(waves):
            at.v(16, wave)[:] = (base + np.arange(64) * 4) & 0xFFFFFFFF
            at.v(17, wave)[:] = base >> 32
            at.set_s64(14, base, wave)
        return kinds(LOAD + code, at)


STORE = "global_store_dword v[2:3], v{}, off"
SINKS = {
    "stored": STORE.format(4),
    "first of two stored": "global_store_dwordx2 v[2:3], v[4:5], off",
    "added to memory": "global_atomic_add v[2:3], v4, off",
    "address": "v_and_b32 v4, 0, v4\nglobal_load_dword v5, v4, s[12:13]",
    "LDS address": "v_and_b32 v4, 60, v4\nds_write_b32 v4, v6",
    "buffer offset": "buffer_load_dword v5, v4, s[8:11], 0 offen",
    "soffset": "s_and_b32 s4, s4, 60\nbuffer_load_dword v5, v0, s[8:11], s4 offen",
    "descriptor": "s_mov_b32 s10, s4\nbuffer_load_dword v5, v0, s[8:11], 0 offen",
    "scalar address": "s_and_b32 s4, s4, 60\ns_load_dword s5, s[12:13], s4",
    "m0 of DMA": "s_and_b32 m0, s4, 60\ns_nop 0\nbuffer_load_dword v0, s[8:11], 0 offen lds",
    "scc": "s_cmp_eq_u32 s4, 0\ns_cbranch_scc1 next\nnext:",
    "vcc": "v_cmp_eq_u32 vcc, 0, v4\ns_cbranch_vccz next\nnext:",
    "exec": "v_cmp_eq_u32 vcc, 0, v4\ns_and_saveexec_b64 s[6:7], vcc",
    "exec by v_cmpx": "v_cmpx_ne_u32 vcc, 1, v4",
    "exec from memory": "s_mov_b32 exec_lo, s4\ns_mov_b32 exec_hi, -1",
    "first lane": "v_readfirstlane_b32 s5, v4\ns_cmp_eq_u32 s5, 0\ns_cbranch_scc1 next\nnext:",
}


@pytest.mark.parametrize("name", SINKS)
def test_undefined_values_reach_something(name: str) -> None:
    assert fresh(SINKS[name]) == ["undefined value"]
    assert fresh(SINKS[name], written=1024) == []


TRAVELS = {
    # from v4 (undefined) to v20
    "moved": "v_mov_b32 v20, v4",
    "computed with": "v_mad_u32_u24 v5, v6, v7, v4\nv_add_f32 v20, v5, v6",
    "accumulated": "v_mov_b32 v20, 0\nv_fmac_f32 v20, v4, v6",
    "packed": "v_mov_b32 v5, v4\nv_pk_fma_f32 v[20:21], v[4:5], v[6:7], v[6:7]",
    "carried": "v_add_co_u32 v5, vcc, v4, v6\nv_addc_co_u32 v20, vcc, v6, v6, vcc",
    "through AGPRs": "v_accvgpr_write_b32 a5, v4\nv_accvgpr_read_b32 v20, a5",
    "matrix product": "s_nop 1\nv_mfma_f32_4x4x1_16b_f32 v[20:23], v4, v6, 0\ns_nop 15",
    "through scalars": "v_readlane_b32 s5, v4, 7\nv_mov_b32 v20, s5",
    "through LDS": "ds_write_b32 v0, v4\nds_read_b32 v20, v0\ns_waitcnt lgkmcnt(0)",
    "through scratch": "scratch_store_dword off, v4, off\nscratch_load_dword v20, off, off\n"
    "s_waitcnt vmcnt(0)",
    "permuted": "ds_bpermute_b32 v20, v0, v4\ns_waitcnt lgkmcnt(0)",
    "swizzled": "ds_swizzle_b32 v20, v4 offset:0x801b\ns_waitcnt lgkmcnt(0)",
    "by DPP": "v_mov_b32_dpp v20, v4 row_ror:3 row_mask:0xf bank_mask:0xf",
    "by SDWA": "v_mov_b32_sdwa v20, v4 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1",
    "selected": "s_mov_b64 vcc, 8\nv_cndmask_b32 v20, v6, v4, vcc",
    "by a comparison": "v_cmp_gt_u32 vcc, 9, v4\nv_cndmask_b32 v20, v6, v7, vcc",
    "added to LDS": "ds_add_u32 v0, v4\nds_read_b32 v20, v0\ns_waitcnt lgkmcnt(0)",
    "by DMA": "s_mov_b32 m0, 0\ns_nop 0\nglobal_load_lds_dword v[16:17], off\ns_waitcnt vmcnt(0)\n"
    "ds_read_b32 v20, v0\ns_waitcnt lgkmcnt(0)",
}


@pytest.mark.parametrize("name", TRAVELS)
def test_undefined_values_travel(name: str) -> None:
    code = f"{TRAVELS[name]}\n{STORE.format(20)}"
    assert fresh(code) == ["undefined value"]
    assert fresh(code, written=1024) == []


# lanes 0..31 of v4 are written, 32..63 are not
HALF = {
    "active lanes": "s_mov_b32 exec_hi, 0\n" + STORE.format(4),
    "other lanes written": "s_mov_b32 exec_lo, 0\nv_mov_b32 v4, 1\ns_mov_b32 exec_lo, -1\n"
    + STORE.format(4),
    "selected": "s_mov_b32 vcc_lo, -1\ns_mov_b32 vcc_hi, 0\nv_cndmask_b32 v20, v6, v4, vcc\n"
    + STORE.format(20),
    "first lane": "v_readfirstlane_b32 s5, v4\nv_mov_b32 v20, s5\n" + STORE.format(20),
    "one lane": "v_readlane_b32 s5, v4, 31\nv_mov_b32 v20, s5\n" + STORE.format(20),
    "from lower lanes": "v_and_b32 v1, 127, v0\nds_bpermute_b32 v20, v1, v4\ns_waitcnt lgkmcnt(0)\n"
    + STORE.format(20),
    "mask with zeros": "v_cmp_eq_u32 vcc, 0, v4\ns_mov_b32 s6, -1\ns_mov_b32 s7, 0\n"
    "s_and_b64 vcc, vcc, s[6:7]\ns_cbranch_vccz next\nnext:",
    "mask with ones": "v_cmp_eq_u32 vcc, 0, v4\ns_mov_b32 s6, 0\ns_mov_b32 s7, -1\n"
    "s_or_b64 s[6:7], vcc, s[6:7]\ns_cbranch_scc1 next\nnext:",
    "a set bit decides": "v_cmp_eq_u32 vcc, 0, v4\ns_cbranch_vccz next\nnext:",
    "unused": "v_add_f32 v20, v4, v6",
}  # fmt: skip


@pytest.mark.parametrize("name", HALF)
def test_definedness_is_by_lane(name: str) -> None:
    assert fresh(HALF[name], written=128) == []
    if name not in ("unused", "mask with ones"):  # those need none of the lanes
        assert fresh(HALF[name]) == ["undefined value"]


COLUMNS, ROWS = 0x00FF00FF00FF00FF, 0x0000000F0000000F
MATRICES = {
    # lanes of v[4:5] that are defined, and those of v20 that then are: an element of a product
    # takes from one row of the first operand and one column of the second
    "v_mfma_f32_16x16x16_bf16 v[20:23], v[6:7], v[4:5], 0": (COLUMNS, COLUMNS),
    "v_mfma_f32_16x16x16_bf16 v[20:23], v[4:5], v[6:7], 0": (COLUMNS, 0x00000000FFFFFFFF),
    "v_mfma_f32_16x16x16_bf16 v[20:23], v[6:7], v[6:7], v[4:7]": (0x8001, 0x8001),
    "v_mfma_f32_32x32x8_bf16 v[20:35], v[6:7], v[4:5], 0": (ROWS, ROWS),
    "v_mfma_f32_32x32x8_bf16 v[20:35], v[4:5], v[6:7], 0": (ROWS, 0x00000000FFFFFFFF),
    "v_mfma_f32_32x32x8_bf16 v[16:31], v[4:5], v[6:7], 0": (0xF0000000F000, 0xFFFFFFFF00000000),
    "v_mfma_f32_4x4x4_16b_bf16 v[20:23], v[6:7], v[4:5], 0": (COLUMNS, 0),
}


@pytest.mark.parametrize("code", MATRICES)
def test_definedness_of_matrix_products(code: str) -> None:
    def lanes(mask: int) -> str:
        return f"s_mov_b32 exec_lo, {mask & 0xFFFFFFFF:#x}\ns_mov_b32 exec_hi, {mask >> 32:#x}\n"

    written, clean = MATRICES[code]
    product = f"{lanes(written)}v_mov_b32 v4, v6\n{lanes(2**64 - 1)}v_mov_b32 v5, v4\ns_nop 1\n"
    product += f"{code}\ns_nop 15\n"
    if clean:
        assert fresh(f"{product}{lanes(clean)}{STORE.format(20)}") == []
    text = fresh(f"{product}{lanes(2**64 - 1 & ~clean)}{STORE.format(20)}")
    assert text == ["undefined value"]


UNUSED_HALVES = {
    # v5 is undefined; result, and which half of it does not depend on v5
    "v_mad_u64_u32 v[20:21], vcc, v6, v7, v[4:5]": 20,
    "v_lshl_add_u64 v[20:21], v[4:5], 2, v[6:7]": 20,
    "v_lshlrev_b64 v[20:21], v6, v[4:5]": 20,
    "v_mov_b64 v[20:21], v[4:5]": 20,
    "v_pk_fma_f32 v[20:21], v[4:5], v[6:7], v[6:7]": 20,
    "v_pk_mul_f32 v[20:21], v[4:5], v[6:7] op_sel:[1,0] op_sel_hi:[0,1]": 21,
    "v_pk_fma_f32 v[20:21], v[4:5], v[4:5], v[6:7] op_sel_hi:[0,0,1]": -1,
}


@pytest.mark.parametrize("code", UNUSED_HALVES)
def test_halves_of_pairs(code: str) -> None:
    """Compilers leave the half of a pair undefined that a result does not depend on."""
    setup = "v_mov_b32 v5, v4\nv_mov_b32 v4, 1\n"
    for half in (20, 21):
        clean = UNUSED_HALVES[code] in (half, -1)
        want = [] if clean else ["undefined value"]
        assert fresh(f"{setup}{code}\n{STORE.format(half)}") == want
    code = "v_lshrrev_b64 v[20:21], v6, v[22:23]"
    setup = "v_mov_b32 v22, v4\nv_mov_b32 v23, 1\n"
    assert fresh(f"{setup}{code}\n{STORE.format(21)}") == []
    assert fresh(f"{setup}{code}\n{STORE.format(20)}") == ["undefined value"]


def test_undefined_text() -> None:
    at, memory = prepared()
    with allocated(1024) as base, registered(memory):
        native.check(native.functions().hipMemset(base, 0, 128), "hipMemset")
        set_address(at, 16, np.uint64(base) + np.arange(64, dtype=np.uint64) * np.uint64(4))
        at.set_s64(14, base)
        report = snippet.run(machine_code(LOAD + STORE.format(4)), at)
    (finding,) = report["findings"]
    assert finding["detail"].startswith(
        "v4 is undefined in lanes 32 to 63 (32) and used as data to store (global_store_dword"
    )


def test_stores_define_memory() -> None:
    """Also those of an earlier launch, byte by byte."""
    at, memory = prepared(mask=SOME)
    with allocated(1024) as base, registered(memory):
        set_address(at, 16, np.uint64(base) + np.arange(64, dtype=np.uint64) * np.uint64(4))
        back = "global_load_dword v4, v[16:17], off\ns_waitcnt vmcnt(0)\n" + STORE.format(4)
        assert kinds("global_store_short v[16:17], v6, off", at) == []
        assert kinds(back, at) == ["undefined value"]
        assert kinds("global_store_byte v[16:17], v6, off offset:2", at) == []
        assert kinds(back, at) == ["undefined value"]
        assert kinds("global_store_byte v[16:17], v6, off offset:3", at) == []
        assert kinds(back, at) == []
        at.set_s64(snippet.EXEC, (1 << 64) - 1)
        assert kinds(back, at) == ["undefined value"]
        assert not active(SOME).all()


# ---- barriers


def test_barrier_that_not_all_waves_reach() -> None:
    for order in ORDERS:
        native.set_option("order", order)
        assert found(two_waves("s_barrier", "s_nop 0", corrected=True), 2) == ["barrier divergence"]
        assert found(two_waves("s_barrier", "s_barrier", corrected=True), 2) == []
        code = two_waves("s_barrier\ns_nop 0\ns_barrier", "s_barrier", corrected=True)
        assert found(code, 2) == ["barrier divergence"]


def test_checks_can_be_off() -> None:
    native.set_option("check", "off")
    at, memory = prepared()
    with registered(memory[:512]):
        assert kinds("global_load_dword v4, v[2:3], off\nv_mov_b32 v5, v4", at) == []
