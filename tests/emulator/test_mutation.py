"""Broken copies of the shipped kernels, and three known bugs: the checkers must notice them.

The quick part tries a few mutants of each kind on the dense kernel's hot loop; with ``-m slow`` all
kernels have their turn, with one in ten of the mutants of each kind, or all of them if the
environment says ``MUTANTS=all``.
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from liteattention_emulator import cfg, device, hazards, listing, mutate, snippet, waits

from . import cached
from .mutants import ALWAYS, Bench, expect_noticed, shipped, summary
from .toolchain import assemble, function

ALL = os.environ.get("MUTANTS") == "all"
# Of the mutants that are not redundant, at least this share must be noticed. The few that are not
# may weigh three times as much among a third.
BAR = 0.95 if ALL else 0.85
DENSE = "attention_dense_bf16_d128_rtne"
LITE = ["attention_lite_bf16_d128_rtne", "attention_lite_bf16_d64_rtne"]
WEIGH = "attention_weigh_bf16_d128_rtne"
KERNELS = [
    DENSE,
    "attention_dense_bf16_d64_rtne",
    "transpose_v_bf16_d128",
    "transpose_v_bf16_d64",
    "merge_parts_bf16_rtne",
]


@pytest.fixture(scope="module")
def dense() -> Iterator[Bench]:
    with shipped(DENSE) as bench:
        yield bench


def tried(bench: Bench, places: list[listing.Instruction]) -> list[mutate.Verdict]:
    """Judge the mutants at these places: one in ten of each kind, or all."""
    of_kind: dict[str, list[mutate.Mutation]] = {}
    for mutation in mutate.mutations(bench.kernel, places):
        of_kind.setdefault(mutation.kind, []).append(mutation)
    step = 1 if ALL else 10
    return bench.judge([mutation for kind in of_kind.values() for mutation in kind[::step]])


def test_a_few_mutants_of_each_kind(dense: Bench) -> None:
    everything = mutate.mutations(dense.kernel, dense.kernel.loop())
    kinds = {mutation.kind for mutation in everything}
    assert kinds >= ALWAYS | {"bound reversed", "bound off by one"}
    chosen = []
    for kind in sorted(kinds):
        of_kind = [mutation for mutation in everything if mutation.kind == kind]
        chosen += of_kind[:: max(1, len(of_kind) // 2)][:3]
    verdicts = dense.judge(chosen)
    text = summary(DENSE, verdicts)
    assert mutate.noticed(verdicts) >= 0.9, text  # of few: one bound that only prefetches
    for kind in ALWAYS:
        of_kind = [verdict for verdict in verdicts if verdict.mutation.kind == kind]
        assert not any(verdict.survived for verdict in of_kind), text
        assert any(verdict.flagged for verdict in of_kind), text


@pytest.mark.slow
def test_mutants_of_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    total = []
    for name in KERNELS:
        with shipped(name) as bench:
            verdicts = tried(bench, bench.kernel.loop())
        with capsys.disabled():
            print("\n" + summary(name, verdicts))
        expect_noticed(bench.kernel, verdicts, 0.0, between_halves=2)
        total += verdicts
    with capsys.disabled():
        print("\n" + "\n".join(summary("all kernels", total).splitlines()[:16]))
    assert mutate.noticed(total) >= BAR


@pytest.mark.slow
@pytest.mark.parametrize("name", LITE)
def test_mutants_of_the_lite_kernel(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with shipped(name) as bench:
        verdicts = tried(bench, bench.kernel.loop())
    with capsys.disabled():
        print("\n" + summary(name, verdicts))
    assert mutate.noticed(verdicts) >= 0.96
    # One wait, and so two mutants, may survive: where soft_skip leaves a K block out, between the
    # copy of K into one half of the LDS and a read of the other. Both halves are copied to and read
    # from in turn, so the bytes of the two instructions do not tell them apart.
    left = {v.mutation.offset for v in verdicts if v.survived and v.mutation.kind in ALWAYS}
    assert len(left) <= 1, left


@pytest.mark.slow
def test_mutants_of_weighing_and_choosing(capsys: pytest.CaptureFixture[str]) -> None:
    """What weighs a tile and hands weights over, and all of the kernel that chooses.

    The rest of the weighing kernel's loop is the voting kernel's.
    """
    with shipped(WEIGH) as bench:
        loop = bench.kernel.loop()
        names = [inst.name for inst in loop]
        places = []
        # From where L comes from the other lane to the weight in its lane, and the atomics.
        for at, name in enumerate(names):
            if name == "v_writelane_b32":
                begin = max(i for i in range(at) if names[i] == "ds_bpermute_b32")
                places += loop[begin - 2 : at + 1]
            elif name == "buffer_atomic_add":
                places += loop[at - 2 : at + 3]
        assert places
        verdicts = bench.judge(mutate.mutations(bench.kernel, places))
        expect_noticed(bench.kernel, verdicts, 0.9)
    with shipped("select_tiles") as bench:
        reached = [bench.kernel.listing.instructions[index] for index in bench.kernel.graph.next]
        chosen = bench.judge(mutate.mutations(bench.kernel, reached))
        expect_noticed(bench.kernel, chosen, 0.96)
    with capsys.disabled():
        print("\n" + summary(WEIGH, verdicts) + "\n" + summary("select_tiles", chosen))
    assert mutate.noticed(verdicts + chosen) >= 0.96


@pytest.mark.slow
@pytest.mark.parametrize("name", ["count_tiles", "plan_lpt", "pack_lists"])
def test_mutants_of_the_order(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All of these kernels. Of bounds, some only say how the compiler unrolls a loop.

    The two orders have waves farthest apart. Races are found in any, from the barriers alone.
    """
    with shipped(name, "first-ahead", "last-ahead") as bench:
        reached = [bench.kernel.listing.instructions[index] for index in bench.kernel.graph.next]
        verdicts = bench.judge(mutate.mutations(bench.kernel, reached))
        expect_noticed(bench.kernel, verdicts, 0.93)
    with capsys.disabled():
        print("\n" + summary(name, verdicts))


@pytest.mark.slow
def test_mutants_of_merging_lists(capsys: pytest.CaptureFixture[str]) -> None:
    """All of the kernel: outputs, and weights of their own waves' factors.

    Many bounds only say how the compiler unrolls a loop, and eight that no output is NaN.
    """
    name = "merge_lists_bf16_rtne"
    with shipped(name) as bench:
        reached = [bench.kernel.listing.instructions[index] for index in bench.kernel.graph.next]
        verdicts = bench.judge(mutate.mutations(bench.kernel, reached))
    with capsys.disabled():
        print("\n" + summary(name, verdicts))
    expect_noticed(bench.kernel, verdicts, 0.84)


@pytest.mark.slow
@pytest.mark.parametrize("name", [DENSE, "merge_parts_bf16_rtne"])
def test_no_wait_of_a_whole_kernel_can_go(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with shipped(name) as bench:
        reached = [bench.kernel.listing.instructions[index] for index in bench.kernel.graph.next]
        mutations = [m for m in mutate.mutations(bench.kernel, reached) if m.kind in ALWAYS]
        verdicts = bench.judge(mutations if ALL else mutations[::3])
    with capsys.disabled():
        print("\n" + summary(f"{name}, not only its loop", verdicts))
    # Of the dense kernel, the first reads of V before the barrier to Pv: in the loop of either
    # group, and behind that of group A.
    expect_noticed(bench.kernel, verdicts, 0.96, between_halves=3 if name == DENSE else 0)


def test_unchanged_kernels_are_clean(dense: Bench) -> None:
    assert dense.kernel.hazards == set()
    assert dense.kernel.waits.early == frozenset()
    assert dense.trial.reference.traffic[0] > 0


def test_mutations_keep_the_code_decodable(dense: Bench) -> None:
    # Same size, and no instruction but the changed ones differs.
    for mutation in mutate.mutations(dense.kernel, dense.kernel.loop())[::7]:
        image = mutation.apply(dense.kernel.listing)
        assert len(image) == len(dense.kernel.listing.image)
        mutant = dense.kernel.listing.with_image(image)
        assert all(inst.known for inst in mutant.instructions)
        old = {inst.offset: inst.text for inst in dense.kernel.listing.instructions}
        new = {inst.offset: inst.text for inst in mutant.instructions}
        different = {at for at in old if new.get(at) != old[at]}
        assert all(mutation.offset <= at < mutation.offset + 16 for at in different)


SNIPPET = """
  s_load_dword s4, s[0:1], 0
  s_waitcnt lgkmcnt(0)
  s_waitcnt lgkmcnt(0)
  s_cmp_lt_i32 s4, 7
  s_cbranch_scc1 1f
  s_min_i32 s4, s4, 9
1:
  v_cmp_lt_u32 vcc, v0, v1
  ds_read2_b32 v[2:3], v0 offset0:1 offset1:2
  ds_write_b64 v0, v[4:5] offset:8
  s_waitcnt vmcnt(3) lgkmcnt(0)
  s_mov_b32 m0, s4
  s_movk_i32 s10, 0x200
  buffer_load_dword v6, s[8:11], 0 offen lds
  v_exp_f32 v7, v6
  s_nop 2
  v_mul_f32 v7, v7, v7
  s_barrier
  s_endpgm
"""


class Small(mutate.Kernel):
    """The snippet as a kernel."""

    def __init__(self) -> None:
        listed = listing.load(assemble(function("k", SNIPPET)))
        (entry,) = listed.entries
        entries = [listing.Entry("k", entry.first, entry.end, True)]
        super().__init__(listing.Listing(*_fields(listed), entries, {}), "k")


def _fields(listed: listing.Listing) -> tuple[bytes, int, int, list[listing.Instruction]]:
    return listed.image, listed.text_at, listed.text_bytes, listed.instructions


def test_makers_make_what_they_say() -> None:
    kernel = Small()
    got = {}
    for mutation in mutate.mutations(kernel, kernel.listing.instructions):
        mutant = kernel.listing.with_image(mutation.apply(kernel.listing))
        at = {inst.offset: inst for inst in mutant.instructions}[mutation.offset]
        key = mutation.kind, mutation.before.split()[0]
        got.setdefault(key, []).append(at)

    def names(kind: str, before: str) -> list[str]:
        return [inst.name for inst in got[kind, before]]

    def immediates(kind: str, before: str) -> list[int]:
        return [inst.imm for inst in got[kind, before]]

    weakened = [waits.counters(inst) for inst in got["wait weakened by one", "s_waitcnt"]]
    assert weakened == [(63, 1), (63, 1), (4, 0), (3, 1)]
    assert names("wait deleted", "s_waitcnt") == ["s_nop"] * 3
    assert names("barrier deleted", "s_barrier") == ["s_nop"]
    assert immediates("wait state removed", "s_nop") == [1]
    assert names("bound off by one", "s_cmp_lt_i32") == ["s_cmp_le_i32"]
    assert names("bound off by one", "v_cmp_lt_u32") == ["v_cmp_le_u32"]
    assert names("bound reversed", "s_min_i32") == ["s_max_i32"]
    assert immediates("LDS offset shifted", "ds_read2_b32") == [2 | 2 << 8, 1 | 3 << 8]
    assert immediates("LDS offset shifted", "ds_write_b64") == [16]
    assert names("m0 write dropped", "s_mov_b32") == ["s_nop"]
    (shifted,) = got["m0 shifted by 4", "s_mov_b32"]
    assert shifted.text == "s_add_i32 m0, s4, 0x4"
    assert immediates("buffer extent halved", "s_movk_i32") == [0x100]
    assert names("buffer extent unlimited", "s_movk_i32") == ["s_mov_b32"]


def test_redundancy_is_proved_not_assumed() -> None:
    kernel = Small()
    # Whatever moves more or fewer bytes is noticed. What waits between instructions cannot.
    different = [
        mutate.judge(kernel, mutation, lambda _: mutate.Outcome(), mutate.Outcome(traffic=(1, 0)))
        for mutation in mutate.mutations(kernel, kernel.listing.instructions)
        if mutation.kind != "wait state removed"
    ]
    assert all("bytes moved" in verdict.flagged for verdict in different)
    verdicts = [
        mutate.judge(kernel, mutation, lambda _: mutate.Outcome(), mutate.Outcome())
        for mutation in mutate.mutations(kernel, kernel.listing.instructions)
    ]
    by_kind: dict[str, list[mutate.Verdict]] = {}
    for verdict in verdicts:
        by_kind.setdefault(verdict.mutation.kind, []).append(verdict)
    # Either of the two equal waits can go, not the third; s_nop 2 has two to spare.
    assert [bool(v.redundant) for v in by_kind["wait deleted"]] == [True, True, False]
    assert [bool(v.redundant) for v in by_kind["wait state removed"]] == [True]
    # Nothing looked at these but the run, which says nothing is wrong.
    for kind in ("barrier deleted", "bound reversed", "m0 write dropped", "LDS offset shifted"):
        assert all(verdict.survived for verdict in by_kind[kind])
    # As many bytes read without the limit: it stops no lane.
    assert all(verdict.redundant for verdict in by_kind["buffer extent unlimited"])
    assert "survived" in mutate.table(verdicts) and mutate.noticed(verdicts) < BAR


# Three bugs of published kernels. They give right numbers on a CPU, and wrong ones on the chip at
# times: only a checker can see them.
@pytest.mark.parametrize("waited", [True, False])
def test_vote_not_waited_for_before_the_barrier(waited: bool) -> None:
    state = snippet.State(waves=2)
    for wave in range(2):
        state.v(0, wave)[:] = 4 * wave
        state.v(1, wave)[:] = wave + 1
        state.v(3, wave)[:] = 4 - 4 * wave
    report = cached.run(
        "ds_write_b32 v0, v1\n"
        + ("s_waitcnt lgkmcnt(0)\n" if waited else "")
        + "s_barrier\nds_read_b32 v2, v3\ns_waitcnt lgkmcnt(0)",
        state,
    )
    kinds = {finding["kind"] for finding in report["findings"]}
    assert kinds == (set() if waited else {"LDS race"})


def test_discard_register_reused_in_flight() -> None:
    data = np.zeros(64, np.float32)
    for wait, expected in (("s_waitcnt vmcnt(0)\n", set()), ("", {"in-flight register"})):
        body = "global_load_dword v5, v0, s[4:5]\n" + wait + "v_exp_f32 v5, v1\ns_nop 0"
        state = snippet.State()
        state.v(0)[:] = 4 * np.arange(64)
        state.set_s64(4, data.ctypes.data)
        with device.registered(data):
            report = cached.run(body, state)
        assert {finding["kind"] for finding in report["findings"]} == expected
        listed = listing.load(assemble(function("k", body + "\ns_endpgm")))
        found = waits.analyse(cfg.Graph(listed.instructions, 0))
        assert bool(found.early) == bool(expected)


def test_m0_straight_before_the_copy_to_lds(dense: Bench) -> None:
    # In the shipped loop another instruction lies between the two; it moves in front of them.
    code = dense.kernel.loop()
    places = [
        (write, between)
        for write, between, copy in zip(code, code[1:], code[2:], strict=False)
        if write.writes >> listing.M0 & 1 and "lds" in copy.flags
    ]
    assert places
    for write, between in places:
        at = dense.kernel.listing.text_at + write.offset
        image = bytearray(dense.kernel.listing.image)
        pair = image[at : at + write.bytes + between.bytes]
        image[at : at + len(pair)] = pair[write.bytes :] + pair[: write.bytes]
        mutant = dense.kernel.listing.with_image(bytes(image))
        rules = {hazard.rule for hazard in hazards.check_listing(mutant)}
        assert "m0 -> LDS-DMA, GDS, message" in rules
