"""Random machine functions (LLVM MIR) that are full of gfx942 hazards."""

import random
from collections.abc import Callable

FLOAT = "implicit $mode, implicit $exec"
Template = Callable[[random.Random], str]


def _v(first: int, count: int = 1) -> str:
    return "$" + "_".join(f"vgpr{i}" for i in range(first, first + count))


def _s(first: int, count: int = 1) -> str:
    return "$" + "_".join(f"sgpr{i}" for i in range(first, first + count))


def _even(rng: random.Random, count: int = 2) -> str:
    return _v(rng.randrange(0, 12, 2), count)


def _any(rng: random.Random) -> str:
    return _v(rng.randrange(12))


def _scalar(rng: random.Random) -> str:
    return _s(rng.randrange(4))


def _mfma(name: str, size: int, ab: int = 2) -> Template:
    def make(rng: random.Random) -> str:
        d, c = (rng.randrange(0, 12, 2) for _ in range(2))
        if rng.random() < 0.5:
            c = d
        elif abs(d - c) < size:  # C may be D, or no part of it
            c, d = rng.choice([(c, d + 48), (c + 48, d)])
        a, b = (_even(rng, ab) for _ in range(2))
        last = f"{_v(c, size)}, 0, 0, 0, {FLOAT}"
        return f"{_v(d, size)} = V_MFMA_{name}_vgprcd_e64 {a}, {b}, {last}"

    return make


def _exec_compare(rng: random.Random) -> str:
    outputs = "implicit-def $exec, implicit-def $vcc, implicit $exec"
    return f"V_CMPX_EQ_U32_e32 {_any(rng)}, {_any(rng)}, {outputs}"


def _sdwa(rng: random.Random) -> str:
    # byte and word destinations, the rest padded with zero
    select = rng.randrange(7)
    d, a, b = (_any(rng) for _ in range(3))
    return f"{d} = V_ADD_U32_sdwa 0, {a}, 0, {b}, 0, {select}, 0, 6, 6, implicit $exec"


# DPP has registers of its own: LLVM also separates it from loads, which s_waitcnt does anyway.
def _dpp(rng: random.Random) -> str:
    d, a = (_v(rng.randrange(100, 103)) for _ in range(2))
    return f"{d} = V_MOV_B32_dpp {d}, {a}, 280, 15, 15, 0, implicit $exec"


def _dpp_source(rng: random.Random) -> str:
    return f"{_v(rng.randrange(100, 103))} = V_ADD_F32_e32 {_any(rng)}, {_any(rng)}, {FLOAT}"


MATRIX: list[Template] = [
    _mfma("F32_16X16X16F16", 4),
    _mfma("F32_16X16X16BF16_1K", 4),
    _mfma("F32_4X4X4F16", 4),
    _mfma("F32_32X32X8BF16_1K", 16),
    _mfma("F32_32X32X4F16", 32),
    _mfma("F32_16X16X4F32", 4, 1),
    _mfma("F32_32X32X2F32", 16, 1),
    _mfma("F32_4X4X1F32", 4, 1),
]

VECTOR: list[Template] = [
    lambda r: f"{_any(r)} = V_ADD_F32_e32 {_any(r)}, {_any(r)}, {FLOAT}",
    lambda r: f"{_any(r)} = V_MUL_F32_e32 {_any(r)}, {_any(r)}, {FLOAT}",
    lambda r: f"{_any(r)} = V_EXP_F32_e32 {_any(r)}, {FLOAT}",
    lambda r: f"{_any(r)} = V_ADD_U32_e32 {_scalar(r)}, {_any(r)}, implicit $exec",
    _sdwa,
]

SCALAR: list[Template] = [
    lambda r: f"{_scalar(r)} = V_READFIRSTLANE_B32 {_any(r)}, implicit $exec",
    lambda r: f"{_scalar(r)} = V_READLANE_B32 {_any(r)}, {_scalar(r)}",
    lambda r: f"$m0 = V_READFIRSTLANE_B32 {_any(r)}, implicit $exec",
    lambda r: "$m0 = S_MOV_B32 64",
    lambda r: f"V_CMP_EQ_U32_e32 {_any(r)}, {_any(r)}, implicit-def $vcc, implicit $exec",
    lambda r: (
        f"{_s(r.randrange(0, 4, 2), 2)} = V_CMP_EQ_U32_e64 {_any(r)}, {_any(r)}, implicit $exec"
    ),
    lambda r: f"{_any(r)} = V_CNDMASK_B32_e32 {_any(r)}, {_any(r)}, implicit $vcc, implicit $exec",
    lambda r: (
        f"{_any(r)} = V_DIV_FMAS_F32_e64 0, {_any(r)}, 0, {_any(r)}, 0, {_any(r)}, 0, 0, "
        "implicit $mode, implicit $vcc, implicit $exec"
    ),
    _exec_compare,
    _dpp,
    _dpp_source,
    lambda r: "S_SETREG_B32 $sgpr0, 6145, implicit-def $mode, implicit $mode",
    lambda r: "$sgpr1 = S_GETREG_B32 6145, implicit $mode",
    lambda r: f"{_scalar(r)} = S_ADD_U32 {_scalar(r)}, 1, implicit-def $scc",
]

MEMORY: list[Template] = [
    lambda r: f"{_any(r)} = GLOBAL_LOAD_DWORD {_even(r)}, 0, 0, implicit $exec",
    lambda r: f"{_even(r, 4)} = DS_READ_B128_gfx9 {_any(r)}, 0, 0, implicit $exec",
    lambda r: f"DS_WRITE_B32_gfx9 {_any(r)}, {_any(r)}, 0, 0, implicit $exec",
    lambda r: f"GLOBAL_STORE_DWORDX4 {_even(r)}, {_even(r, 4)}, 0, 0, implicit $exec",
    lambda r: (
        f"{_any(r)} = BUFFER_LOAD_DWORD_OFFEN {_any(r)}, $sgpr0_sgpr1_sgpr2_sgpr3, "
        f"{_scalar(r)}, 0, 0, 0, implicit $exec"
    ),
    lambda r: (
        f"BUFFER_STORE_DWORDX4_OFFEN {_even(r, 4)}, {_any(r)}, $sgpr4_sgpr5_sgpr6_sgpr7, "
        f"{r.choice(['0', '$sgpr8'])}, 0, 0, 0, implicit $exec"
    ),
    lambda r: (
        f"BUFFER_LOAD_DWORD_LDS_OFFEN {_any(r)}, $sgpr4_sgpr5_sgpr6_sgpr7, 0, 0, 0, 0, "
        "implicit $exec, implicit $m0"
    ),
]

GROUPS = [MATRIX, VECTOR, SCALAR, MEMORY]


def _line(rng: random.Random) -> str:
    return rng.choice(rng.choice(GROUPS))(rng)


def machine_function(name: str, rng: random.Random) -> str:
    """A function of 2 to 12 random instructions one after the other.

    No branches: where paths meet, LLVM takes the nearest producer's rule for the other path's too
    (too few wait states), and before a back edge it does not yet know what it will insert (too
    many), so that its count is not exact there.
    """
    lines = "".join(f"    {_line(rng)}\n" for _ in range(rng.randrange(2, 13)))
    return f"---\nname: {name}\nbody: |\n  bb.0:\n{lines}    S_ENDPGM 0\n...\n"
