"""Loader, dispatch and scheduling: what a wave starts with, and what its workgroup may rely on."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import liteattention_emulator as emulator
from liteattention_emulator import snippet

from . import cached
from .conftest import AVAILABLE
from .toolchain import assemble, build_hip, compile_hip, link

SOURCE = Path(__file__).with_name("machine_kernels.hip")
ORDERS = ["round-robin", "round-robin:1", "round-robin:1000", "random:1", "random:2"]
ORDERS += ["first-ahead", "last-ahead"]
Words = npt.NDArray[np.uint32]


@pytest.fixture(scope="module")
def image() -> bytes:
    return compile_hip(SOURCE, "-g")


@pytest.fixture(scope="module")
def module(image: bytes) -> Iterator[emulator.Module]:
    with emulator.Module(image) as loaded:
        yield loaded


def words(count: int) -> Words:
    return np.full(count, 0xDEADBEEF, np.uint32)


# ---- what a wave starts with ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "block"), [((3,), (64,)), ((2, 3, 2), (5, 3, 7)), ((1, 2, 3), (1024,)), ((2,), (1,))]
)
def test_identities(module: emulator.Module, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    gx, gy, gz = (*grid, 1, 1)[:3]
    bx, by, bz = (*block, 1, 1)[:3]
    threads = bx * by * bz
    out = words(8 * gx * gy * gz * threads)
    report = module.launch("identify", grid, block, [out])
    assert report.waves == gx * gy * gz * -(-threads // 64)
    rows = out.reshape(gz, gy, gx, bz, by, bx, 8)
    z, y, x, k, j, i = np.indices(rows.shape[:-1], np.uint32)
    assert (rows[..., 0] == (x | y << 8 | z << 16)).all()
    assert (rows[..., 1] == (i | j << 8 | k << 16)).all()
    assert (rows[..., 2:5] == (bx, by, bz)).all()
    assert (rows[..., 5:7] == (gx * bx, gz * bz)).all()
    item = (k * by + j) * bx + i
    assert (rows[..., 7] == np.minimum(64, threads - item // 64 * 64)).all()


@pytest.mark.parametrize("version", [4, 5, 6])
def test_code_object_versions(version: int) -> None:
    flag = f"-mcode-object-version={version}"
    code = compile_hip(SOURCE, flag, "-Wno-everything")
    with emulator.Module(code) as loaded:
        out = words(8 * 2 * 70)
        loaded.launch("identify", [2], [70], [out])
    assert out.reshape(-1, 8)[:, 2].tolist() == [70] * 140


def test_kernel_arguments_in_registers() -> None:
    """Kernarg preload: the wave starts 256 bytes behind the entry with the arguments in SGPRs."""
    flags = ["-mllvm", "-amdgpu-kernarg-preload-count=6"]
    code = compile_hip(SOURCE, *flags)
    index = np.arange(64, dtype=np.uint32)
    with emulator.Module(code) as loaded, emulator.Module(code) as plain:
        first, second = words(64), words(64)
        report = loaded.launch("tables", [1], [64], [first, index])
        plain.launch("tables", [1], [64], [second, index])
    assert np.array_equal(first, second)
    assert min(row.offset for row in report.executed) % 256 == 0
    assert "s_load_dwordx4" not in report.by_name()


def test_float_mode_comes_from_the_descriptor() -> None:
    tiny = np.full(64, 3e-39, np.float32)  # a denormal
    results = []
    for flag in ("-fno-gpu-flush-denormals-to-zero", "-fgpu-flush-denormals-to-zero"):
        with emulator.Module(compile_hip(SOURCE, flag)) as loaded:
            data = tiny.copy()
            loaded.launch("halve", [1], [64], [data])
            results.append(data[5])
    assert results == [np.float32(3e-39) * np.float32(0.5), 0]


# ---- the code object -----------------------------------------------------------------------------


def test_constants_and_relocations(module: emulator.Module) -> None:
    primes = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53]
    index, out = np.arange(64, dtype=np.uint32), words(64)
    module.launch("tables", [1], [64], [out, index])
    tables = [[100, 200], [300, 400]]
    assert out.tolist() == [primes[i & 15] + tables[i >> 4 & 1][i >> 5] for i in range(64)]


def collatz(n: int) -> int:
    steps = 0
    while n != 1:
        n = 3 * n + 1 if n % 2 else n // 2
        steps += 1
    return steps


def test_calls_and_private_memory(module: emulator.Module) -> None:
    order, out = np.array([3, 1, 4, 0, 5, 7, 2, 6], np.uint32), words(200)
    report = module.launch("calls", [1], [200], [out, order])
    assert report.counters["scratch_bytes"] > 0
    expected = []
    for i in range(200):
        stack = [0] * 8
        for k in range(8):
            stack[(int(order[k]) + i) & 7] = collatz(i + k + 1)
        total = 0
        for value in stack:
            total = total * 31 + value
        expected.append(total & 0xFFFFFFFF)
    assert out.tolist() == expected


def test_findings_name_the_source_line(module: emulator.Module) -> None:
    short = words(32)  # 64 threads store
    with pytest.raises(emulator.LaunchFailed, match=r"machine_kernels\.hip:\d+") as caught:
        module.launch("all_emulated", [1], [64], [short])
    assert [finding["kind"] for finding in caught.value.findings] == ["out of bounds"]
    line = int(str(caught.value).split("machine_kernels.hip:")[1].split(")")[0])
    assert "] = 1;" in SOURCE.read_text().splitlines()[line - 1]


def test_damaged_images(image: bytes) -> None:
    random = np.random.default_rng(0)
    for size in [0, 3, 20, 63, 64, 100, *random.integers(64, len(image), 150)]:
        with pytest.raises(emulator.EmulatorError):
            emulator.kernels(image[:size])
    # Flipped bytes, every other time in the headers: an error or something that can be listed.
    for number in range(300):
        broken = bytearray(image)
        for at in random.integers(0, 1500 if number % 2 else len(image), 1 + number % 8):
            broken[at] = random.choice([0, 1, 128, 255])
        try:
            emulator.kernels(bytes(broken))
        except emulator.EmulatorError as error:
            assert str(error)


def test_targets() -> None:
    plain = "--no-gpu-bundle-output"
    for arch in ("gfx90a", "gfx1100", "gfx942:xnack+", "gfx942:sramecc-"):
        code = build_hip(SOURCE, f"--offload-arch={arch}", plain, "-O1")
        with pytest.raises(emulator.EmulatorError, match=r"not for gfx942|needs|waves of 32"):
            emulator.kernels(code)
    for arch in ("gfx942:xnack-", "gfx942:sramecc+", "gfx942:sramecc+:xnack-"):
        code = build_hip(SOURCE, f"--offload-arch={arch}", plain, "-O1")
        assert "halve" in emulator.kernels(code)


def test_offload_bundles() -> None:
    bundle = "--gpu-bundle-output"
    code = build_hip(SOURCE, "--offload-arch=gfx90a", "--offload-arch=gfx942", bundle, "-O1")
    assert code.startswith(b"__CLANG_OFFLOAD_BUNDLE__")
    data = np.full(64, 3.0, np.float32)
    with emulator.Module(code) as loaded:
        loaded.launch("halve", [1], [64], [data])
    assert (data == 1.5).all()
    code = build_hip(SOURCE, "--offload-arch=gfx90a", bundle, "-O1")
    with pytest.raises(emulator.EmulatorError, match="nothing for gfx942"):
        emulator.kernels(code)
    with pytest.raises(emulator.EmulatorError, match="compressed"):
        emulator.kernels(b"CCOB" + bytes(100))


# ---- interleavings and barriers ------------------------------------------------------------------


def reversed_by_numpy(data: Words, size: int, rounds: int) -> Words:
    blocks = data.reshape(-1, size).copy()
    for step in range(rounds):
        blocks = np.roll(blocks[:, ::-1] + np.uint32(step), -1, axis=1)
    return blocks.reshape(-1)


@pytest.mark.parametrize("check", ["on", "off"])
@pytest.mark.parametrize("order", ORDERS)
def test_barriers_in_every_order(module: emulator.Module, order: str, check: str) -> None:
    emulator.set_option("order", order)
    emulator.set_option("check", check)
    start = np.random.default_rng(0).integers(0, 2**32, 5 * 512, dtype=np.uint32)
    for threads in ("1", "3"):
        emulator.set_option("threads", threads)
        data = start.copy()
        report = module.launch("reverse", [5], [512], [data, 6], dynamic_lds=2048)
        assert np.array_equal(data, reversed_by_numpy(start, 512, 6))
        assert report.threads == int(threads)


def test_ended_waves_do_not_hold_up_a_barrier(module: emulator.Module) -> None:
    emulator.set_option("check", "off")  # the checkers call it barrier divergence
    for order in ORDERS:
        emulator.set_option("order", order)
        out = words(256)
        module.launch("leave_early", [1], [256], [out])
        assert (out[:64] == 0xDEADBEEF).all()
        assert out[64:].tolist() == [64 + (i + 64) % 192 for i in range(64, 256)]


def test_orders_are_different_and_repeatable(module: emulator.Module) -> None:
    emulator.set_option("check", "off")
    results = {}
    for order in ["first-ahead", "last-ahead", *[f"random:{seed}" for seed in range(8)]] * 2:
        emulator.set_option("order", order)
        out = words(512)
        module.launch("racy", [1], [512], [out])
        assert results.setdefault(order, out.tobytes()) == out.tobytes()
    assert len(set(results.values())) > 4
    # Who is ahead loads before the others have stored.
    first, last = (np.frombuffer(results[f"{name}-ahead"], np.uint32) for name in ("first", "last"))
    assert first[:256].max() < 4 <= first[256:].min()
    assert last[256:].min() >= 4 > last[:256].max()


def test_a_race_is_found_in_every_order(module: emulator.Module) -> None:
    for order in ORDERS:
        emulator.set_option("order", order)
        with pytest.raises(emulator.LaunchFailed, match="LDS race"):
            module.launch("racy", [1], [512], [words(512)])


def test_copies_of_a_value_are_no_race(module: emulator.Module) -> None:
    for order in ORDERS:
        emulator.set_option("order", order)
        out = words(512)
        module.launch("same", [1], [512], [out])
        assert out.tolist() == [(i + 1) % 64 + 7 for i in range(512)]


@pytest.mark.parametrize("giver", [0, 1])
def test_spinning_waves_come_to_an_end(module: emulator.Module, giver: int) -> None:
    emulator.set_option("check", "off")
    for order in ORDERS:
        emulator.set_option("order", order)
        out = words(128)
        module.launch("hand_over", [1], [128], [out, giver])
        assert out.tolist() == [0] * 64 + [1] * 64


def test_a_hang_says_where_every_wave_stands(module: emulator.Module) -> None:
    emulator.set_option("steps", "20000")
    flag, out = np.zeros(1, np.uint32), words(128)
    with pytest.raises(emulator.LaunchFailed, match="hang") as caught:
        module.launch("wait_for", [1], [128], [flag, out])
    text = str(caught.value)
    assert "wave 0 waits behind wait_for+" in text and "s_barrier" in text
    assert "wave 1 is at wait_for+" in text
    assert (out == 0xDEADBEEF).all()
    flag[0] = 1
    module.launch("wait_for", [1], [128], [flag, out])
    assert (out == 1).all()


def test_threads_do_not_change_results(module: emulator.Module) -> None:
    outs, out = [], words(8 * 40 * 100)
    for threads in ("1", "2", "5"):
        emulator.set_option("threads", threads)
        out[:] = 0
        report = module.launch("identify", [40], [100], [out])
        outs.append((out.tobytes(), report.instructions, report.counters, report.executed))
    assert outs[0] == outs[1] == outs[2]


# ---- what cannot run -----------------------------------------------------------------------------


def test_missing_instructions_are_named_before_running(module: emulator.Module) -> None:
    out = words(64)
    with pytest.raises(emulator.LaunchFailed, match=r"not emulated: s_rfe_b64") as caught:
        module.launch("not_emulated", [1], [64], [out])
    assert not caught.value.findings
    assert (out == 0xDEADBEEF).all()
    assert module.kernels["not_emulated"].unimplemented == ("s_rfe_b64",)
    assert module.kernels["all_emulated"].unimplemented == ()
    module.launch("all_emulated", [1], [64], [out])


def linked(body: str, metadata: str = "", **directives: int) -> bytes:
    """A code object of one kernel, `k`, in assembly with its own descriptor."""
    settings = {"next_free_vgpr": 8, "next_free_sgpr": 8, "accum_offset": 8} | directives
    rows = "".join(f".amdhsa_{name} {value}\n" for name, value in settings.items())
    return link(
        f".text\n.globl k\n.p2align 8\n.type k,@function\nk:\n{body}\ns_endpgm\n"
        f".rodata\n.p2align 6\n.amdhsa_kernel k\n{rows}.end_amdhsa_kernel\n{metadata}"
    )


def test_registers_that_a_wave_does_not_have() -> None:
    cases = {
        "v_mov_b32 v7, 0": True,
        "v_mov_b32 v8, 0": False,
        "global_load_dwordx4 v[6:9], v[0:1], off": False,
        "v_accvgpr_write_b32 a0, 1": False,  # all 8 registers are VGPRs
        "s_endpgm\nv_mov_b32 v200, 0": True,  # not reached
        "v_nop\nv_nop_e64\nv_clrexcp": True,
    }
    for body, runs in cases.items():
        with emulator.Module(linked(body)) as loaded:
            if runs:
                loaded.launch("k", [1], [64], [])
                continue
            with pytest.raises(emulator.LaunchFailed, match="descriptor allocates 8 and 0"):
                loaded.launch("k", [1], [64], [])
    cases = {
        "v_accvgpr_write_b32 a7, 1": True,
        "v_mov_b32 v15, 0": True,  # past accum_offset, in the one file of 16
        "v_mov_b32 v16, 0": False,
        "v_accvgpr_write_b32 a8, 1": False,
    }
    for body, runs in cases.items():
        with emulator.Module(linked(body, next_free_vgpr=16)) as loaded:
            if runs:
                loaded.launch("k", [1], [64], [])
                continue
            with pytest.raises(emulator.LaunchFailed, match="descriptor allocates 8 and 8"):
                loaded.launch("k", [1], [64], [])


def test_one_register_by_two_names() -> None:
    """AGPR n is VGPR accum_offset + n; s_trap ends the launch with a finding."""
    expect = "s_nop 1\nv_readfirstlane_b32 s4, {}\ns_cmp_lg_u32 s4, {}\ns_cbranch_scc1 wrong\n"
    body = (
        "v_mov_b32 v9, 41\nv_accvgpr_read_b32 v1, a1\n" + expect.format("v1", 41)
        # A pair that lies on both sides of accum_offset.
        + "v_mov_b32 v6, 40\nv_mov_b32 v7, 1\nv_lshl_add_u64 v[6:7], v[6:7], 0, v[6:7]\n"
        + "v_accvgpr_write_b32 a0, 3\nv_accvgpr_write_b32 a1, 4\n"
        + "v_mov_b64 v[6:7], v[8:9]\n" + expect.format("v6", 3) + expect.format("v7", 4)
        + "s_branch right\nwrong: s_trap 2\nright:"
    )  # fmt: skip
    with emulator.Module(linked(body, next_free_vgpr=16)) as loaded:
        loaded.launch("k", [1], [64], [])
    swapped = body.replace("a1, 4", "a1, 5")
    code = linked(swapped, next_free_vgpr=16)
    with emulator.Module(code) as loaded, pytest.raises(emulator.LaunchFailed):
        loaded.launch("k", [1], [64], [])


KERNARG = {"kernarg_size": 16, "user_sgpr_kernarg_segment_ptr": 1}


def test_loads_past_the_arguments() -> None:
    """The segment ends on 16 bytes; within it, what nobody passed is undefined."""
    load = "s_load_dword s4, s[0:1], {}\ns_waitcnt lgkmcnt(0)\ns_cmp_lg_u32 s4, 0\n"
    load += "s_cbranch_scc1 end\nend:"
    cases = {(0, 16): "undefined", (12, 16): "undefined", (16, 16): "out of bounds"}
    cases |= {(48, 16): "out of bounds", (-4, 16): "out of bounds", (12, 12): "undefined"}
    cases |= {(0, 0): "undefined", (16, 0): "out of bounds"}
    for (offset, size), what in cases.items():
        settings = KERNARG | {"kernarg_size": size}
        code = linked(load.format(offset), **settings)
        with emulator.Module(code) as loaded, pytest.raises(emulator.LaunchFailed, match=what):
            loaded.launch("k", [1], [64], [])


METADATA = """.amdgpu_metadata
---
amdhsa.version: [1, 1]
amdhsa.kernels:
  - {{.name: k, .symbol: k.kd, .kernarg_segment_size: {size}, .kernarg_segment_align: 8,
     .group_segment_fixed_size: 0, .private_segment_fixed_size: 0, .wavefront_size: 64,
     .sgpr_count: 8, .vgpr_count: 8, .max_flat_workgroup_size: 64, .args: [
       {{.name: out, .offset: 0, .size: 8, .value_kind: global_buffer, .address_space: global}},
       {{.name: byte, .offset: 8, .size: 1, .value_kind: by_value}},
       {{.name: word, .offset: 20, .size: 4, .value_kind: by_value}}]}}
...
.end_amdgpu_metadata
"""
STORE_ARGUMENT = """
s_load_dwordx2 s[2:3], s[0:1], 0
s_load_dword s4, s[0:1], {offset}
s_waitcnt lgkmcnt(0)
v_lshlrev_b32 v0, 2, v0
v_mov_b32 v1, s4
global_store_dword v0, v1, s[2:3]
"""


@pytest.mark.parametrize("declared", [0, 24])
def test_the_size_of_the_arguments_may_stand_in_the_metadata(tmp_path: Path, declared: int) -> None:
    def code(offset: int) -> bytes:
        settings = KERNARG | {"kernarg_size": declared}
        body, metadata = STORE_ARGUMENT.format(offset=offset), METADATA.format(size=24)
        return linked(body, metadata, **settings)

    out = words(64)
    assert emulator.kernels(code(8))["k"].kernarg_bytes == 24
    for offset, value in ((8, 200), (20, 77)):
        with emulator.Module(code(offset)) as loaded:
            loaded.launch("k", [1], [64], [out, 200, 77])
        assert (out == value).all()  # of the byte at 8 its whole dword may be loaded
    # Padding between arguments, and behind the last.
    cases = {12: "v1 is undefined", 24: "v1 is undefined", 32: "out of bounds"}
    for offset, what in cases.items():
        module = emulator.Module(code(offset))
        with module, pytest.raises(emulator.LaunchFailed, match=what):
            module.launch("k", [1], [64], [out, 200, 77])
    with pytest.raises(emulator.EmulatorError, match="lies outside its kernarg segment"):
        emulator.kernels(
            linked("s_nop 0", METADATA.format(size=20), **KERNARG | {"kernarg_size": 0})
        )


def test_every_reason_against_a_launch(module: emulator.Module) -> None:
    with pytest.raises(emulator.LaunchFailed) as caught:
        module.launch("reverse", [0], [1024], [words(8), 1], dynamic_lds=64000)
    text = str(caught.value)
    for reason in ("at least 1", "at most 512", "there are 65536"):
        assert reason in text
    with pytest.raises(TypeError, match="takes 2 arguments"):
        module.launch("reverse", [1], [64], [words(64)])
    with pytest.raises(TypeError, match="argument 1"):
        module.launch("reverse", [1], [64], [words(64), "many"])
    with pytest.raises(KeyError, match="there are"):
        module.launch("nothing", [1], [64], [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("order", "sideways"),
        ("order", "random"),
        ("order", "random:x"),
        ("order", "round-robin:0"),
        ("threads", "-1"),
        ("check", "maybe"),
        ("variant", "sse9"),
        ("steps", "0"),
        ("colour", "1"),
    ],
)
def test_bad_options(
    module: emulator.Module, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    with pytest.raises(emulator.EmulatorError, match=name):
        emulator.set_option(name, value)
    if name == "colour":
        return
    monkeypatch.setenv(f"LITEATTENTION_EMULATOR_{name.upper()}", value)
    with pytest.raises(emulator.LaunchFailed, match=f"LITEATTENTION_EMULATOR_{name.upper()}"):
        module.launch("all_emulated", [1], [64], [words(64)])


def test_problems_of_the_environment_leave_options_as_they_are(
    module: emulator.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.set_option("order", "last-ahead")
    for name, value in (("order", "up"), ("steps", "1"), ("check", "off"), ("threads", "")):
        monkeypatch.setenv(f"LITEATTENTION_EMULATOR_{name.upper()}", value)
    (problem,) = emulator.environment_problems()
    assert problem.startswith("LITEATTENTION_EMULATOR_ORDER must be") and "got 'up'" in problem
    monkeypatch.setenv("LITEATTENTION_EMULATOR_ORDER", "random:1")
    assert not emulator.environment_problems()
    with pytest.raises(emulator.LaunchFailed):  # of one step
        module.launch("all_emulated", [1], [64], [words(64)])
    monkeypatch.delenv("LITEATTENTION_EMULATOR_STEPS")
    module.launch("all_emulated", [1], [64], [words(64)])  # its number of steps is back


def test_variants_agree(module: emulator.Module, image: bytes) -> None:
    order, results = np.arange(8, dtype=np.uint32), set()
    for variant in AVAILABLE:
        emulator.set_option("variant", variant)
        with emulator.Module(image) as loaded:
            out = words(256)
            loaded.launch("calls", [1], [256], [out, order])
        results.add(out.tobytes())
    assert len(results) == 1


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize(
    "name", ["v_mfma_f32_16x16x16_bf16", "v_mfma_f32_4x4x4_16b_f16", "v_mfma_f32_16x16x4_f32"]
)
def test_results_that_overlap_their_addend(name: str) -> None:
    sources = "v40, v41" if name.endswith("_f32") else "v[40:41], v[42:43]"
    results = []
    for where in (80, 2, 6):  # apart from v[4:7], and over half of it from below and above
        state = snippet.State()
        small = np.random.default_rng(0).integers(1, 9, (48, 64)).astype(np.float32)
        state.vector[0, :48] = small.view(np.uint32)
        cached.run(f"{name} v[{where}:{where + 3}], {sources}, v[4:7]", state)
        results.append(state.vector[0, where : where + 4].copy())
    assert results[0].any()
    assert all(np.array_equal(result, results[0]) for result in results)


# ---- counters and bare snippets ------------------------------------------------------------------


def test_counters() -> None:
    state = snippet.State(waves=3)
    state.v(1)[:] = np.arange(64) * 128  # every lane in bank 0
    state.vector[1:, 1] = state.v(1)
    source = """
      ds_read_b32 v2, v1
      s_waitcnt lgkmcnt(0)
      s_barrier
      v_mfma_f32_16x16x16_bf16 v[4:7], v[8:9], v[10:11], v[4:7]
      v_mfma_f32_4x4x4_16b_f16 v[4:7], v[8:9], v[10:11], v[4:7]
      v_mfma_f32_32x32x8_f16 v[16:31], v[8:9], v[10:11], v[16:31]
    """
    report = cached.run(source, state)
    assert report["findings"] == []
    assert report["counters"]["barriers"] == 3
    assert report["counters"]["flops"] == 3 * 2 * (16 * 16 * 16 + 4 * 4 * 4 * 16 + 32 * 32 * 8)
    assert report["counters"]["lds_bytes"] == 3 * 64 * 4
    times = {name: count for _, _, name, count, _, _ in report["executed"]}
    assert times["ds_read_b32"] == 3 and times["s_endpgm"] == 3
    phases, extra = report["executed"][0][4:]
    assert extra > 20 * phases > 0
    state.vector[:, 1] = np.arange(64) * 4
    assert cached.run(source, state)["executed"][0][5] == 0


def test_snippets_have_registers_of_their_own() -> None:
    state = snippet.State(waves=2)
    for wave in range(2):
        state.v(1, wave)[:] = 10 * wave + np.arange(64)
        state.scalar[wave, 5] = 100 * (wave + 1)
        state.set_s64(snippet.EXEC, 0x0F0F, wave)
    assert cached.run("v_add_u32 v2, s5, v1\ns_mov_b64 s[6:7], exec", state)["findings"] == []
    lanes = np.arange(64)
    active = (0x0F0F >> np.minimum(lanes, 31) & 1).astype(bool) & (lanes < 16)
    for wave in range(2):
        expected = np.where(active, 100 * (wave + 1) + 10 * wave + lanes, 0)
        assert np.array_equal(state.v(2, wave), expected)
        assert state.s64(6, wave) == 0x0F0F


def test_leaving_the_code_is_a_finding() -> None:
    code = snippet.text_section(assemble("s_nop 0\ns_nop 0\n"))
    report = snippet.run(code, snippet.State())
    assert [finding["kind"] for finding in report["findings"]] == ["left the code"]


def test_arrays_of_any_stride(module: emulator.Module) -> None:
    data: Any = np.full((4, 64), 8.0, np.float32)
    module.launch("halve", [1], [64], [data[2]])
    assert data[2].tolist() == [4.0] * 64 and (data[[0, 1, 3]] == 8).all()
    with pytest.raises(emulator.LaunchFailed, match="out of bounds"):
        module.launch("halve", [1], [64], [data[3, 1:]])
    module.launch("halve", [1], [64], [data[:, ::-1][::2]])  # first element: the last of row 0


def test_library_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = emulator.library()
    monkeypatch.setenv("LITEATTENTION_EMULATOR_LIBRARY", os.fspath(found))
    assert emulator.library() == found
    monkeypatch.setenv("LITEATTENTION_EMULATOR_LIBRARY", os.fspath(tmp_path / "none.so"))
    with pytest.raises(emulator.EmulatorError, match=r"none\.so"):
        emulator.library()
    monkeypatch.undo()
