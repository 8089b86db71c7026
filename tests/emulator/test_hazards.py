"""The wait-state checker against its rules one by one, LLVM, and code with known bugs."""

import random
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from liteattention_emulator import hazards, listing
from liteattention_emulator.cli import app
from liteattention_rocm.engines.gfx942 import manifest

from . import llvm_programs
from .toolchain import SHIPPED, assemble, assembled, compile_hip, function, insert_wait_states
from .toolchain import compiled as compiled_now

MFMA = "v_mfma_f32_16x16x16_bf16 v[120:123], {a}, {b}, {c}"
READ_A = MFMA.format(a="v[0:1]", b="v[102:103]", c="v[120:123]")
READ_B = MFMA.format(a="v[102:103]", b="v[0:1]", c="v[120:123]")
READ_C = MFMA.format(a="v[102:103]", b="v[104:105]", c="v[0:3]")
SHIFTED_C = MFMA.format(a="v[102:103]", b="v[104:105]", c="v[2:5]")
FP32_SHIFTED_C = "v_mfma_f32_16x16x4_f32 v[120:123], v102, v104, v[2:5]"

READERS = [
    "v_add_f32 v110, v0, v110",
    "v_exp_f32 v110, v1",
    "v_readfirstlane_b32 s0, v1",
    "global_store_dword v[110:111], v1, off",
    "ds_write_b32 v110, v1",
    "ds_read_b32 v110, v1",
    "buffer_load_dword v110, v1, s[4:7], 0 offen",
]
WRITERS = ["v_mov_b32 v1, v110", "ds_read_b32 v1, v110", "global_load_dword v1, v[110:111], off"]

Case = tuple[str, str, str, int]


def matrix(name: str, registers: int, c: int = 0, ab: int = 2) -> str:
    a = ("v100", "v102") if ab == 1 else ("v[100:101]", "v[102:103]")
    return f"{name} v[0:{registers - 1}], {a[0]}, {a[1]}, v[{c}:{c + registers - 1}]"


def xdl_cases() -> list[Case]:
    # instruction, registers of D; wait states of a read or write of D, shifted C, write of C
    shapes = [
        ("v_mfma_f32_4x4x4_16b_f16", 4, 5, 3, 1),
        ("v_mfma_f32_16x16x16_bf16", 4, 7, 5, 3),
        ("v_mfma_f32_32x32x8_bf16", 16, 11, 9, 7),
        ("v_mfma_f32_32x32x4_2b_f16", 32, 19, 17, 15),
    ]
    out = []
    for name, count, use, shifted, war in shapes:
        producer = matrix(name, count)
        out += [("MFMA D -> read", producer, reader, use) for reader in READERS]
        out += [("MFMA D -> write", producer, writer, use) for writer in WRITERS]
        out += [("MFMA D -> MFMA A/B", producer, reader, use) for reader in (READ_A, READ_B)]
        out.append(("MFMA D -> MFMA C shifted", producer, SHIFTED_C, shifted))
        early = matrix(name, count, c=64)
        writers = [writer.replace("v1,", "v65,") for writer in WRITERS]
        out += [("MFMA C -> write", early, writer, war) for writer in writers]
    producer = matrix("v_mfma_f32_4x4x4_16b_f16", 4)
    out.append(("2-pass MFMA D -> MFMA C", producer, READ_C, 2))
    return out


def fp32_cases() -> list[Case]:
    shapes = [
        ("v_mfma_f32_4x4x1_16b_f32", 4, 4, 2),
        ("v_mfma_f32_16x16x4_f32", 4, 10, 8),
        ("v_mfma_f32_32x32x2_f32", 16, 18, 16),
    ]
    out = []
    for name, count, use, shifted in shapes:
        producer = matrix(name, count, ab=1)
        out += [("fp32 MFMA D -> read", producer, reader, use) for reader in READERS]
        out += [("fp32 MFMA D -> write", producer, writer, use) for writer in WRITERS]
        out.append(("fp32 MFMA D -> MFMA A/B", producer, READ_A, use))
        out.append(("fp32 MFMA D -> C shifted", producer, FP32_SHIFTED_C, shifted))
    return out


F64_16 = "v_mfma_f64_16x16x4_f64 v[0:7], v[100:101], v[102:103], v[0:7]"
F64_4 = "v_mfma_f64_4x4x4_4b_f64 v[0:1], v[100:101], v[102:103], v[0:1]"
F64_C = "v_mfma_f64_16x16x4_f64 v[120:127], v[100:101], v[102:103], v[2:9]"
ADD = "v_add_f32 v0, v110, v110"
EXP = "v_exp_f32 v0, v110"
PART = "v_add_u32_sdwa v0, v110, v111 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD "
PART += "src1_sel:DWORD"
OP_SEL = "v_mad_f16 v0, v110, v111, v112 op_sel:[0,0,0,1]"
CVT_BYTE = "v_cvt_sr_fp8_f32 v0, v110, v111 op_sel:[0,0,1,0]"
DPP = "v_mov_b32_dpp v110, v0 row_shr:8 row_mask:0xf bank_mask:0xf"
CMPX = "v_cmpx_eq_u32 vcc, v110, v111"
CMP = "v_cmp_eq_u32 vcc, v110, v111"
CMP_S4 = "v_cmp_eq_u32 s[4:5], v110, v111"
FIRST = "v_readfirstlane_b32 s4, v110"
DMA = "buffer_load_dword v110, s[8:11], 0 offen lds"
STORE4 = "global_store_dwordx4 v[110:111], v[0:3], off"
BUFFER_STORE4 = "buffer_store_dwordx4 v[0:3], v110, s[8:11], 0 offen"
DOT = "v_dot2_f32_f16 v0, v110, v111, v112"
SETREG = "s_setreg_b32 hwreg(HW_REG_MODE, 0, 4), s0"

CASES: list[Case] = [
    *xdl_cases(),
    *fp32_cases(),
    ("f64 16x16x4 D -> VALU read", F64_16, "v_add_f32 v110, v7, v7", 11),
    ("f64 16x16x4 D -> memory read", F64_16, "ds_write_b32 v110, v7", 18),
    ("f64 16x16x4 D -> write", F64_16, "v_mov_b32 v7, v110", 11),
    ("f64 16x16x4 D -> MFMA A/B", F64_16, READ_A, 11),
    ("f64 16x16x4 D -> C shifted", F64_16, F64_C, 9),
    ("f64 4x4x4 D -> VALU read", F64_4, "v_add_f32 v110, v1, v1", 6),
    ("f64 4x4x4 D -> memory read", F64_4, "ds_write_b32 v110, v1", 9),
    ("f64 4x4x4 D -> write", F64_4, "v_mov_b32 v1, v110", 6),
    ("f64 4x4x4 D -> MFMA A/B", F64_4, READ_A, 6),
    ("f64 4x4x4 D -> C", F64_4, F64_4, 4),
    ("VALU -> MFMA", ADD, READ_A, 2),
    ("VALU -> MFMA", ADD, READ_C, 2),
    ("VALU -> MFMA", EXP, READ_B, 2),
    ("trans -> VALU", EXP, "v_mul_f32 v110, v0, v110", 1),
    ("trans -> VALU", EXP, DMA.replace("v110", "v0"), 1),
    ("part of a register -> VALU", PART, "v_add_f32 v110, v0, v110", 1),
    ("part of a register -> VALU", OP_SEL, "v_add_f32 v110, v0, v110", 1),
    ("part of a register -> VALU", CVT_BYTE, "v_add_f32 v110, v0, v110", 1),
    ("VALU -> readlane", ADD, "v_readlane_b32 s0, v0, 3", 1),
    ("VALU -> readlane", ADD, "v_readfirstlane_b32 s0, v0", 1),
    ("VALU -> DPP", ADD, DPP, 2),
    ("VALU -> DPP", ADD, DPP.replace("v110, v0", "v0, v110"), 2),
    ("store data -> VALU write", STORE4, "v_mov_b32 v3, v110", 2),
    ("store data -> VALU write", BUFFER_STORE4, "v_mov_b32 v3, v110", 2),
    ("dot -> read", DOT, "v_add_f32 v110, v0, v0", 3),
    ("dot -> read", DOT, "global_store_dword v[110:111], v0, off", 3),
    ("dot -> write", DOT, "v_mov_b32 v0, v110", 3),
    ("dot -> same dot A/B", DOT, "v_dot2_f32_f16 v1, v0, v111, v112", 3),
    ("VALU SGPR -> VALU", CMP, "v_cndmask_b32 v110, v111, v112, vcc", 2),
    ("VALU SGPR -> VALU", FIRST, "v_add_f32 v110, s4, v111", 2),
    ("VALU SGPR -> VALU", CMP_S4, "v_cndmask_b32 v112, v110, v111, s[4:5]", 2),
    ("VALU SGPR -> VMEM", FIRST, "buffer_load_dword v110, v111, s[8:11], s4 offen", 5),
    ("VALU SGPR -> VMEM", FIRST, "buffer_load_dword v110, v111, s[4:7], 0 offen", 5),
    ("VALU SGPR -> VMEM", FIRST, "global_load_dword v110, v111, s[4:5]", 5),
    ("VALU SGPR -> VMEM", "v_readfirstlane_b32 m0, v110", DMA, 5),
    ("VALU SGPR -> lane select", FIRST, "v_readlane_b32 s0, v111, s4", 4),
    ("VALU VCC -> v_div_fmas", CMP, "v_div_fmas_f32 v0, v110, v111, v112", 4),
    ("VALU EXEC -> DPP", CMPX, DPP, 5),
    ("VALU EXEC -> readlane", CMPX, "v_readfirstlane_b32 s0, v0", 4),
    ("VALU EXEC -> MFMA", CMPX, READ_A, 4),
    ("VALU VCC/EXEC -> vccz/execz", CMP, "v_mov_b32 v0, src_vccz", 5),
    ("m0 -> LDS-DMA, GDS, message", "s_mov_b32 m0, 0x400", DMA, 1),
    ("s_setreg -> s_getreg", SETREG, "s_getreg_b32 s1, hwreg(HW_REG_MODE, 0, 4)", 2),
    ("s_setreg -> s_setreg", SETREG, SETREG, 2),
]


def waits(count: int) -> str:
    nops = ["s_nop 7"] * (count // 8) + ([f"s_nop {count % 8 - 1}"] if count % 8 else [])
    return "\n".join(nops)


def found(body: str, name: str = "k") -> list[hazards.Hazard]:
    return hazards.check(assemble(function(name, body)))


def of_rule(body: str, rule: str) -> list[hazards.Hazard]:
    return [hazard for hazard in found(body) if hazard.rule == rule]


def test_every_rule_has_a_case() -> None:
    behind = {"VALU, f64 MFMA -> memory"}  # has a test of its own
    assert {case[0] for case in CASES} | behind == {rule.name for rule in hazards.RULES}


# Straight code, a branch over code, and a loop's back edge, with exactly `count` wait states.
def bodies(producer: str, consumer: str, count: int) -> dict[str, str]:
    out = {
        "straight": f"{producer}\n{waits(count)}\n{consumer}\ns_endpgm",
        "branch": f"s_cbranch_scc1 1f\n{producer}\ns_branch 1f\ns_nop 7\n1:\n"
        f"{waits(count - 1)}\n{consumer}\ns_endpgm",
        "loop": f"1:\n{consumer}\n{waits(19)}\n{producer}\n{waits(count - 1)}\n"
        "s_cbranch_scc1 1b\ns_endpgm",
    }
    return out if count > 0 else {"straight": out["straight"]}


@pytest.fixture(scope="module")
def of_cases() -> dict[str, list[hazards.Hazard]]:
    """Hazards by function: every case with as many wait states as it needs, and one less."""
    text, out = "", {}
    for number, (_, producer, consumer, needed) in enumerate(CASES):
        for which, count in (("enough", needed), ("short", needed - 1)):
            for shape, body in bodies(producer, consumer, count).items():
                name = f"case{number}_{which}_{shape}"
                text += function(name, body)
                out[name] = []
    for hazard in hazards.check(assemble(text)):
        out[hazard.kernel].append(hazard)
    return out


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: CASES[n][0])
def test_needed_wait_states(of_cases: dict[str, list[hazards.Hazard]], number: int) -> None:
    rule, _, _, needed = CASES[number]
    mine = {k: v for k, v in of_cases.items() if k.startswith(f"case{number}_")}
    assert len(mine) == (6 if needed > 1 else 4)
    for name, everything in mine.items():
        assert all(hazard.rule != "unknown instruction" for hazard in everything)
        got = [(hazard.found, hazard.needed) for hazard in everything if hazard.rule == rule]
        assert got == ([] if "_enough_" in name else [(needed - 1, needed)]), name


FREE = [
    (matrix("v_mfma_f32_16x16x16_bf16", 4), READ_C),  # D as C whole: the chip forwards it
    (matrix("v_mfma_f32_32x32x8_bf16", 16), matrix("v_mfma_f32_32x32x8_bf16", 16)),
    (matrix("v_mfma_f32_16x16x16_bf16", 4), "v_mov_b32 v100, v110"),  # A is read at once
    (matrix("v_mfma_f32_16x16x4_f32", 4, 64, 1), "v_mov_b32 v64, v110"),
    (EXP, "v_exp_f32 v1, v0"),
    ("v_pk_mul_f32 v[0:1], v[2:3], v[4:5]", "v_pk_add_f32 v[6:7], v[0:1], v[4:5]"),
    (EXP, "global_store_dword v[110:111], v0, off"),
    (EXP, "v_mov_b32 v0, v110"),
    (ADD, "global_load_dword v1, v[0:1], off"),
    (ADD, "v_add_f32 v1, v0, v0"),
    (CMPX, "v_add_f32 v1, v0, v0"),
    (FIRST, "s_add_u32 s0, s4, s4"),
    (FIRST, "s_mov_b32 m0, s4"),
    ("s_mov_b32 s4, 0", "buffer_load_dword v110, v111, s[8:11], s4 offen"),
    ("s_mov_b64 exec, -1", DPP),
    ("s_mov_b32 m0, 0", "ds_read_b32 v0, v1"),
    ("buffer_store_dwordx4 v[0:3], v110, s[8:11], s4 offen", "v_mov_b32 v3, v110"),
    ("global_store_dwordx2 v[110:111], v[0:1], off", "v_mov_b32 v0, v110"),
    (SETREG, "s_getreg_b32 s1, hwreg(HW_REG_STATUS, 0, 4)"),
    (CMP, "v_readlane_b32 s0, v0, 3"),
]


@pytest.mark.parametrize(("first", "second"), FREE)
def test_pairs_that_need_no_wait(first: str, second: str) -> None:
    assert found(f"{first}\n{second}\ns_endpgm") == []


def test_scalar_writes_in_between_do_not_shorten_a_wait() -> None:
    body = (
        f"{FIRST}\ns_nop 2\ns_setprio 1\nbuffer_load_dword v110, v111, s[8:11], s4 offen\ns_endpgm"
    )
    assert [(h.found, h.needed) for h in found(body)] == [(4, 5)]


def test_the_later_matrix_instruction_counts() -> None:
    # Both write v[0:3] in order; the second one's result is what is read.
    second = matrix("v_mfma_f32_4x4x4_16b_f16", 4)
    body = f"{matrix('v_mfma_f32_16x16x16_bf16', 4)}\n{second}\n{waits(5)}\n{READERS[0]}\ns_endpgm"
    assert found(body) == []


def test_valu_result_to_memory_behind_a_double_matrix_instruction() -> None:
    rule = "VALU, f64 MFMA -> memory"
    other = F64_16.replace("[0:7]", "[20:27]")
    late = f"v_add_f32 v0, v110, v110\n{other}\nds_write_b32 v111, v0\ns_endpgm"
    assert [(h.found, h.needed) for h in of_rule(late, rule)] == [(1, 2)]
    assert of_rule(late.replace("ds_write", "s_nop 0\nds_write"), rule) == []
    assert of_rule(late.replace(other, "s_nop 0"), rule) == []


def test_shortest_of_two_paths_is_reported() -> None:
    body = f"{EXP}\ns_cbranch_scc1 1f\ns_nop 3\n1:\n{READ_A}\ns_endpgm"
    assert [(h.found, h.needed) for h in of_rule(body, "VALU -> MFMA")] == [(1, 2)]


def test_report_names_place_and_registers() -> None:
    (hazard,) = found("v_exp_f32 v7, v8\nv_mul_f32 v9, v7, v7\ns_endpgm", "softmax")
    assert (hazard.kernel, hazard.offset, hazard.producer_offset) == ("softmax", 4, 0)
    assert (hazard.found, hazard.needed, hazard.registers) == (0, 1, "v7")
    assert "v_mul_f32" in str(hazard) and "v_exp_f32" in str(hazard) and "0x4" in str(hazard)


def test_what_cannot_be_decoded_is_reported() -> None:
    rules = [hazard.rule for hazard in found(".long 0xbfff0000\ns_endpgm")]
    assert rules == ["unknown instruction"]


@pytest.mark.parametrize("image", [b"", b"\x7fELF", b"\x7fELF\x02" + bytes(100)])
def test_bad_images_are_refused(image: bytes) -> None:
    with pytest.raises(listing.BadImage):
        hazards.check(image)


def test_command(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.o", tmp_path / "bad.o"
    good.write_bytes(assemble(function("k", f"{EXP}\ns_nop 0\nv_mul_f32 v1, v0, v0\ns_endpgm")))
    bad.write_bytes(assemble(function("k", f"{EXP}\nv_mul_f32 v1, v0, v0\ns_endpgm")))
    run = CliRunner().invoke(app, ["hazards", str(good)])
    assert run.exit_code == 0 and "missing wait states: 0" in run.output
    run = CliRunner().invoke(app, ["hazards", str(good), str(bad)])
    assert run.exit_code == 1 and "bad.o" in run.output and "v_mul_f32" in run.output
    assert "missing wait states: 1, loads used too early: 0" in run.output
    run = CliRunner().invoke(app, ["hazards", str(tmp_path / "none.o")])
    assert run.exit_code == 2 and "none.o" in run.output


# The three patterns that were found in published attention kernels.
def test_known_bugs() -> None:
    dma = "s_mov_b32 m0, 0x1000\nbuffer_load_dword v1, s[8:11], 0 offen lds\ns_endpgm"
    assert [h.rule for h in found(dma)] == ["m0 -> LDS-DMA, GDS, message"]
    exp = "v_exp_f32 v1, v2\nv_mul_f32 v3, v1, v4\ns_endpgm"
    assert [h.rule for h in found(exp)] == ["trans -> VALU"]
    offset = "v_readfirstlane_b32 s4, v0\nbuffer_load_dword v1, v2, s[8:11], s4 offen\ns_endpgm"
    assert [h.rule for h in found(offset)] == ["VALU SGPR -> VMEM"]


IN_ASSEMBLY = """
extern "C" __attribute__((global)) void scale(float* p) {
  float x = p[__builtin_amdgcn_workitem_id_x()];
  asm("v_exp_f32 %0, %0\\n\\tv_mul_f32 %0, %0, %0" : "+v"(x));
  p[__builtin_amdgcn_workitem_id_x()] = x;
}
"""


def test_inline_assembly_is_found_with_its_line(tmp_path: Path) -> None:
    source = tmp_path / "scale.hip"
    source.write_text(IN_ASSEMBLY)
    image = compile_hip(source, "-gline-tables-only")
    (hazard,) = hazards.check(image)
    assert (hazard.rule, hazard.kernel) == ("trans -> VALU", "scale")
    assert hazard.line.endswith("scale.hip:4") and "scale.hip:4" in str(hazard)


# LLVM inserts exactly the wait states that are needed in straight code.
NOP = re.compile(r"^\ts_nop (\d+)$", re.MULTILINE)
FUNCTION = re.compile(r"^\t\.globl\t(f\d+)\b.*?^\t\.size\t.*?$", re.MULTILINE | re.DOTALL)


def without_one(functions: dict[str, str], which: int) -> dict[str, str]:
    """The functions that have a ``which``-th s_nop, with it one shorter."""
    shorter = {}
    for name, text in functions.items():
        found = list(NOP.finditer(text))[which : which + 1]
        for nop in found:
            left = f"\ts_nop {int(nop[1]) - 1}" if nop[1] != "0" else ""
            shorter[name] = text[: nop.start()] + left + text[nop.end() :]
    return shorter


@pytest.mark.llvm
@pytest.mark.parametrize("seed", [1, 2])
def test_agrees_with_llvm_on_random_programs(seed: int) -> None:
    rng = random.Random(seed)
    count = 250 if seed == 1 else 4000
    mir = "".join(llvm_programs.machine_function(f"f{i}", rng) for i in range(count))
    text = insert_wait_states(mir)
    listed = listing.load(assembled(text))
    strict = hazards.check_listing(listed)
    # LLVM asks the last of several overlapping matrix results only; we ask for each.
    for hazard in strict:
        first, last = listed.index_of[hazard.producer_offset], listed.index_of[hazard.offset]
        between = listed.instructions[first + 1 : last]
        assert any(inst.unit == "mfma" for inst in between), str(hazard)
    assert len(strict) <= count / 100
    functions = {found[1]: found[0] for found in FUNCTION.finditer(text)}
    assert len(functions) == count
    checked = 0
    for which in range(12):
        shorter = without_one(functions, which)
        flagged = {
            hazard.kernel for hazard in hazards.check(assembled("\n".join(shorter.values())))
        }
        unnoticed = sorted(shorter.keys() - flagged)
        assert not unnoticed, f"{unnoticed} lack a wait state unnoticed"
        checked += len(shorter)
    assert checked > count


COMPILED = r"""
#define GLOBAL extern "C" __attribute__((global))
typedef float f4 __attribute__((ext_vector_type(4)));
typedef float f16 __attribute__((ext_vector_type(16)));
typedef short h4 __attribute__((ext_vector_type(4)));
typedef int i4 __attribute__((ext_vector_type(4)));
struct Arguments { const h4* a; const float* x; float* out; int n; int m; };

GLOBAL __attribute__((amdgpu_flat_work_group_size(1, 256))) void softmax_product(Arguments p) {
  const int lane = __builtin_amdgcn_workitem_id_x();
  f4 acc = {0, 0, 0, 0};
  f16 wide = {};
  float sum = 0, top = -3e38f;
  for (int i = 0; i < p.n; ++i) {
    const h4 a = p.a[i * 256 + lane], b = p.a[(i + 1) * 256 + lane];
    f4 s = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, f4{0, 0, 0, 0}, 0, 0, 0);
    wide = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, wide, 0, 0, 0);
    float high = s.x > s.y ? s.x : s.y;
    high = high > s.z ? high : s.z;
    high = high > s.w ? high : s.w;
    // over the 16 lanes of a row, by DPP
    const int bits = __builtin_bit_cast(int, high);
    const int moved = __builtin_amdgcn_update_dpp(0, bits, 0x118, 15, 15, 0);
    const float other = __builtin_bit_cast(float, moved);
    high = high > other ? high : other;
    top = top > high ? top : high;
    h4 q;
    for (int j = 0; j < 4; ++j) {
      const float e = __builtin_amdgcn_exp2f(s[j] - top);
      sum += e;
      q[j] = (short)(__builtin_bit_cast(unsigned, e) >> 16);
    }
    acc = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(q, b, acc, 0, 0, 0);
  }
  const int first = __builtin_amdgcn_readfirstlane(__builtin_bit_cast(int, sum));
  acc *= __builtin_amdgcn_rcpf(sum + (float)first);
  float total = 0;
  for (int j = 0; j < 16; ++j) total += wide[j];
  for (int j = 0; j < 4; ++j) p.out[lane * 4 + j] = acc[j] + total + __builtin_amdgcn_sqrtf(total);
}

GLOBAL __attribute__((amdgpu_flat_work_group_size(1, 64))) void lanes(Arguments p) {
  const int lane = __builtin_amdgcn_workitem_id_x();
  float x = p.x[lane];
  for (int i = 0; i < p.n; ++i) {
    const int from = __builtin_amdgcn_readfirstlane(__builtin_bit_cast(int, x)) & 63;
    const int got = __builtin_amdgcn_readlane(__builtin_bit_cast(int, x), from);
    if (__builtin_bit_cast(float, got) > 1.0f) x = x * __builtin_bit_cast(float, got) + 1.0f;
    x = x / (1.0f + x * x);
    const f4 c = {x, x, x, x};
    const f4 d = __builtin_amdgcn_mfma_f32_16x16x4f32(x, x, c, 0, 0, 0);
    x = d.x + d.w;
    p.out[i * 64 + lane + got] = x;
  }
  p.out[lane] = x;
}

using LdsVoid = __attribute__((address_space(3))) void;
__attribute__((device)) void load_lds(__amdgpu_buffer_rsrc_t from, LdsVoid* to, unsigned size,
                                      unsigned lane_offset, unsigned offset, unsigned more,
                                      unsigned cache) __asm("llvm.amdgcn.raw.ptr.buffer.load.lds");

GLOBAL __attribute__((amdgpu_flat_work_group_size(1, 256))) void stage(Arguments p) {
  __attribute__((shared)) static float tile[2048];
  const int lane = __builtin_amdgcn_workitem_id_x();
  float sum = 0;
  for (int i = 0; i < p.n; ++i) {
    auto from = __builtin_amdgcn_make_buffer_rsrc((void*)(p.x + i * 512), 0, 2048, 0x27000);
    for (int j = 0; j < 8; ++j)
      load_lds(from, (LdsVoid*)(tile + j * 64), 4, 4 * (j * 64 + lane), 0, 0, 0);
    __builtin_amdgcn_s_waitcnt(0);
    __builtin_amdgcn_s_barrier();
    for (int j = 0; j < 8; ++j) sum += tile[j * 64 + (lane ^ 1)];
    __builtin_amdgcn_s_barrier();
  }
  p.out[lane] = sum;
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("compiled")
    source = folder / "code.hip"
    source.write_text(COMPILED)
    return compiled_now(source, *SHIPPED, "-S").decode()


@pytest.mark.llvm
def test_compiled_code_is_clean(compiled: str) -> None:
    listed = listing.load(assembled(compiled))
    names = {inst.name for inst in listed.instructions}
    units = {inst.unit for inst in listed.instructions}
    assert units >= {"mfma", "trans", "vmem", "ds", "smem", "barrier"}
    assert {"s_nop", "v_readfirstlane_b32", "v_readlane_b32"} <= names
    assert any("dpp" in inst.flags for inst in listed.instructions)
    assert any("lds" in inst.flags for inst in listed.instructions)
    assert [str(hazard) for hazard in hazards.check_listing(listed)] == []


@pytest.mark.llvm
def test_compiled_code_without_its_wait_states(compiled: str) -> None:
    # Each run of s_nop that the compiler inserted is taken out in turn.
    lines = compiled.splitlines()
    at = [i for i, line in enumerate(lines) if NOP.match(line)]
    runs = [i for i in at if i - 1 not in at]
    assert len(runs) >= 8
    for first in runs:
        end = first
        while end in at:
            end += 1
        assert hazards.check(assembled("\n".join(lines[:first] + lines[end:]) + "\n")), lines[end]


@pytest.mark.parametrize("path", sorted(manifest.DIRECTORY.glob("*.co")), ids=lambda p: p.stem)
def test_shipped_kernels_are_clean(path: Path) -> None:
    assert [str(hazard) for hazard in hazards.check(path)] == []
