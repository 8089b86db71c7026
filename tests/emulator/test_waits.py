"""Loads in flight, followed statically through assembled snippets."""

from pathlib import Path

import pytest

from liteattention_emulator import cfg, listing, waits
from liteattention_rocm.engines.gfx942 import manifest

from .toolchain import assemble, compile_hip, function

LOAD = "global_load_dword v1, v[2:3], off\n"


def analysed(body: str) -> tuple[waits.Waits, list[listing.Instruction]]:
    listed = listing.load(assemble(function("k", body + "\ns_endpgm")))
    return waits.analyse(cfg.Graph(listed.instructions, 0)), listed.instructions


def early(body: str) -> list[tuple[str, str]]:
    found, instructions = analysed(body)
    at = {inst.offset: inst.name for inst in instructions}
    return [(at[user], at[load]) for user, load in sorted(found.early)]


def test_use_before_the_wait() -> None:
    assert early(LOAD + "v_add_f32 v4, v1, v1") == [("v_add_f32", "global_load_dword")]
    assert early(LOAD + "v_mov_b32 v1, 0") == [("v_mov_b32", "global_load_dword")]
    assert early(LOAD + "s_waitcnt vmcnt(0)\nv_add_f32 v4, v1, v1") == []
    assert early(LOAD + "s_waitcnt lgkmcnt(0)\nv_add_f32 v4, v1, v1") != []
    assert early(LOAD + "v_add_f32 v4, v5, v5") == []


def test_counters_count_in_order() -> None:
    two = LOAD + "global_load_dword v5, v[2:3], off\ns_waitcnt vmcnt(1)\n"
    assert early(two + "v_mov_b32 v4, v1") == []
    assert early(two + "v_mov_b32 v4, v5") == [("v_mov_b32", "global_load_dword")]
    lds = "ds_read_b32 v1, v2\nds_read_b32 v5, v2\ns_waitcnt lgkmcnt(1)\n"
    assert early(lds + "v_mov_b32 v4, v1") == []
    assert early(lds + "v_mov_b32 v4, v5") == [("v_mov_b32", "ds_read_b32")]


def test_stores_count_too() -> None:
    body = LOAD + "global_store_dword v[2:3], v6, off\ns_waitcnt vmcnt(1)\nv_mov_b32 v4, v1"
    assert early(body) == []


def test_scalar_loads_have_no_order() -> None:
    body = "s_load_dword s4, s[0:1], 0\ns_load_dword s5, s[0:1], 4\ns_waitcnt lgkmcnt({})\n"
    assert early(body.format(1) + "s_mov_b32 s6, s4") == [("s_mov_b32", "s_load_dword")]
    assert early(body.format(0) + "s_mov_b32 s6, s4") == []


def test_large_counts_are_decoded() -> None:
    # vmcnt has six bits in two places.
    loads = "".join(f"global_load_dword v{10 + i}, v[2:3], off\n" for i in range(40))
    assert early(loads + "s_waitcnt vmcnt(20)\nv_mov_b32 v4, v29") == []
    assert early(loads + "s_waitcnt vmcnt(21)\nv_mov_b32 v4, v29") != []


@pytest.mark.parametrize("vmcnt", [0, 1, 15, 16, 37, 63])
def test_immediates_round_trip(vmcnt: int) -> None:
    for lgkmcnt in (0, 3, 15):
        _, (inst, *_) = analysed(f"s_waitcnt vmcnt({vmcnt}) lgkmcnt({lgkmcnt})")
        assert waits.counters(inst) == (vmcnt, lgkmcnt)
        assert waits.with_counters(inst.imm, vmcnt, lgkmcnt) & 0xFFFF == inst.imm & 0xFFFF


def test_paths_and_loops() -> None:
    branch = f"s_cbranch_scc1 1f\n{LOAD}1:\nv_mov_b32 v4, v1"
    assert early(branch) == [("v_mov_b32", "global_load_dword")]
    # The load of one turn is used in the next.
    loop = "1:\n{}v_mov_b32 v4, v1\n" + LOAD + "s_cbranch_scc1 1b"
    assert early(loop.format("")) == [("v_mov_b32", "global_load_dword")]
    assert early(loop.format("s_waitcnt vmcnt(0)\n")) == []


def test_later_load_of_the_same_kind_may_overwrite() -> None:
    assert early(LOAD + LOAD) == []
    assert early(LOAD + "ds_read_b32 v1, v2") == [("ds_read_b32", "global_load_dword")]


def test_order_at_barriers() -> None:
    def left(body: str) -> int:
        found, _ = analysed(body)
        return sum(len(which) for which in found.open.values())

    write, read = "ds_write_b32 v0, v1\n", "\nds_read_b32 v1, v2\ns_waitcnt lgkmcnt(0)"
    assert left(write + "s_barrier" + read) == 1
    assert left(write + "s_waitcnt lgkmcnt(0)\ns_barrier" + read) == 0
    copy = "s_mov_b32 m0, 0\ns_nop 0\nbuffer_load_dword v0, s[8:11], 0 offen lds\n"
    assert left(copy + "s_barrier" + read) == 2  # at the read as well
    assert left(copy + "ds_read_b32 v1, v2") == 1
    assert left(copy + "s_waitcnt vmcnt(0)\ns_barrier" + read) == 0
    assert left(LOAD + "s_barrier") == 0  # a register is the wave's own


def test_order_at_barriers_is_for_accesses_of_the_next_stretch() -> None:
    def left(body: str, extents: dict[str, tuple[int, int]] | None = None) -> int:
        listed = listing.load(assemble(function("k", body + "\ns_endpgm")))
        bytes_of = {i.offset: extents.get(i.name, (0, 0)) for i in listed.instructions if extents}
        found = waits.analyse(cfg.Graph(listed.instructions, 0), bytes_of or None)
        return sum(len(which) for which in found.open.values())

    write, wait = "ds_write_b32 v0, v1\n", "\ns_waitcnt lgkmcnt(0)\n"
    read, atomic = "\nds_read_b32 v1, v2" + wait, "ds_or_b32 v0, v1\n"
    # nobody reads it, or only behind one barrier more, by when it has been waited for
    assert left(write + "s_barrier") == 0
    assert left(write + "s_barrier" + wait + "s_barrier" + read) == 0
    assert left(write + "s_barrier\ns_barrier" + read) == 1
    # read before: by the same wave in order, by another in an earlier stretch
    assert left(read + "s_barrier\n" + write + "s_barrier") == 0
    # in a loop any stretch may follow any other, but for what comes before and behind the loop
    loop = "1:\n{}" + atomic + "s_barrier" + wait + "s_barrier\ns_cbranch_scc1 1b\n"
    assert left(loop.format(read)) == 1
    assert left(read + "s_barrier\n" + loop.format("") + read) == 0
    # equal atomic operations commute, others do not; what is read cannot be spoilt by a read
    assert left(atomic + "s_barrier\n" + atomic) == 0
    assert left(atomic + "s_barrier\nds_xor_b32 v0, v1") == 1
    assert left(atomic + "s_barrier\n" + write) == 1
    assert left("ds_read_b32 v1, v2\ns_barrier" + read) == 0
    assert left("ds_read_b32 v1, v2\ns_barrier\n" + write) == 1
    assert left("ds_swizzle_b32 v1, v2\ns_barrier\n" + write) == 0
    # bytes apart
    for high, expected in ((128, 0), (132, 1)):
        extents = {"ds_write_b32": (0, high), "ds_read_b32": (128, 256)}
        assert left(write + "s_barrier" + read, extents) == expected
        copy = "s_mov_b32 m0, 0\ns_nop 0\nbuffer_load_dword v0, s[8:11], 0 offen lds\n"
        extents = {"buffer_load_dword": (0, high), "ds_read_b32": (128, 256)}
        assert left(copy + "ds_read_b32 v1, v2", extents) == expected


def test_what_is_weaker() -> None:
    strong, _ = analysed(LOAD + "s_waitcnt vmcnt(0)\ns_nop 0\nv_mov_b32 v4, v1")
    same, _ = analysed(LOAD + "s_nop 0\ns_waitcnt vmcnt(0)\nv_mov_b32 v4, v1")
    weak, _ = analysed(LOAD + "s_waitcnt vmcnt(1)\ns_nop 0\nv_mov_b32 v4, v1")
    assert weak.weaker_than(strong) and not strong.weaker_than(weak)
    assert not same.weaker_than(strong)


SHIPPED = sorted(manifest.DIRECTORY.glob("*.co"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_kernels_wait_for_every_load(path: Path) -> None:
    assert [str(use) for use in waits.check(path)] == []


def test_report_names_place_and_registers(tmp_path: Path) -> None:
    source = tmp_path / "early.hip"
    source.write_text(
        'extern "C" __attribute__((global)) void early(float* p) {\n'
        "  float x;\n"
        '  asm("global_load_dword %0, %1, off" : "=v"(x) : "v"(p));\n'
        "  p[1] = x;\n"
        "}\n"
    )
    image = compile_hip(source, "-gline-tables-only")
    (use,) = waits.check(image)
    assert use.kernel == "early" and use.text.startswith("global_store_dword")
    assert use.load_text.startswith("global_load_dword") and use.registers.startswith("v")
    assert use.line.endswith("early.hip:4") and "not waited for" in str(use)


def test_paths_that_meet_are_joined() -> None:
    # Sixteen branches around a load each: 65,536 paths. The youngest load may be the only one.
    branch = "s_cbranch_scc0 l{0}\nglobal_load_dword v{1}, v[2:3], off\nl{0}:\n"
    body = LOAD + "".join(branch.format(i, 10 + i) for i in range(16))
    assert early(body + "s_waitcnt vmcnt(1)\nv_mov_b32 v4, v1") != []  # no branch may have loaded
    assert early(body + "s_waitcnt vmcnt(0)\nv_mov_b32 v4, v1") == []
    last = body + "global_load_dword v40, v[2:3], off\ns_waitcnt vmcnt(1)\n"
    assert early(last + "v_mov_b32 v4, v1") == []
    assert early(last + "v_mov_b32 v4, v40") != []


def test_flat_operations_are_in_no_order() -> None:
    flat = "flat_load_dword v5, v[2:3]\n"
    assert early(LOAD + flat + "s_waitcnt vmcnt(1)\nv_mov_b32 v4, v1") != []
    assert early(LOAD + flat + "s_waitcnt vmcnt(0)\nv_mov_b32 v4, v1") == []
    assert early(flat + "s_waitcnt vmcnt(0)\nv_mov_b32 v4, v5") != []
    assert early(flat + "s_waitcnt vmcnt(0) lgkmcnt(0)\nv_mov_b32 v4, v5") == []
    assert early(LOAD + "flat_load_dword v1, v[2:3]\ns_waitcnt vmcnt(0) lgkmcnt(0)") != []
