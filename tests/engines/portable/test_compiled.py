"""The portable kernels compiled ahead of time, without a GPU, and the gfx942 code emulated.

Compilation needs the ``triton`` package (extra ``triton``), which brings LLVM and ptxas.
"""

import math
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

import liteattention_emulator as emulator
from liteattention_rocm import TileGeometry, lite_attention
from liteattention_rocm.contract import LOG2E
from liteattention_rocm.engines.triton import (
    copies,
    hopper,
    hopper_ragged,
    hopper_ragged_load,
    kernels,
    ragged,
    ragged_cut,
    tiles,
)
from liteattention_rocm.lite import bitmap, budget
from liteattention_tools import sass
from tests.emulator.triton_kernels import compile_for_gfx942
from tests.oracle.attention import bound, exact, exact_rows, expect_out

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
}
INTEGERS = {"k_blocks", "words", "q_blocks", "q_heads", "groups", "group", "q_len", "kv_len"}
INTEGERS |= {"requests", "window", "page_size", "rows", "splits", "part_blocks", "tiles", "limit"}
INTEGERS |= {"span", "pages", "kv_heads", "joint", "lookahead", "each", "shortest"}
TABLES = {
    "read", "must_do", "must_skip", "counts", "order", "next_tile", "spare", "votes", "weights",
    "limits",
}  # fmt: skip
TABLES |= {"q_start", "page_table", "part_count", "lengths", "table_out"}
CACHED_NAMES = {
    ragged.attention: ("k", "v"),
    ragged.widen: ("k", "v"),
    ragged.write_kv: ("k_cache", "v_cache"),
}
MANTISSA = {None: 0, torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as the launches ask for
    yield
    patch.undo()


def signature(
    kernel: Any, dtype: str, constants: dict[str, Any], cache: str = ""
) -> dict[str, str]:
    """Type of every run-time argument, by its name; ``cache`` of keys and values if not dtype."""
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name in TABLES or (name == "kv_len" and kernel in (ragged.attention, ragged.widen)):
            types[name] = "*i32"
        elif name in INTEGERS or name.startswith("stride"):
            types[name] = "i32"
        elif name in ("c", "threshold", "scale_log2", "soft_cap", "k_scale", "v_scale"):
            types[name] = "fp32"
        elif name in (
            "lse",
            "sinks",
            "part_out",
            "part_lse",
            "mass",
            "parts",
            "k_scale_at",
            "v_scale_at",
        ):
            types[name] = "*fp32"
        elif name == "items":
            types[name] = "*i16"
        elif name in ("slots", "tally"):
            types[name] = "*i64"
        elif cache and name in CACHED_NAMES[kernel]:
            types[name] = f"*{cache}"
        else:
            types[name] = f"*{dtype}"
    return types


def dense(**changes: Any) -> dict[str, Any]:
    chosen = dict(
        BLOCK_M=128, BLOCK_N=64, HEAD_DIM=128, CAUSAL=False, EVEN_K=False, LITE=False, VOTE_ROWS=0,
        HAS_DO=False, WEIGH=False, HAS_MASS=False, BY_HEAD=False, HAS_LSE=True, SIGN=1, ROUNDING=0,
        WIDEN=False, FAR=False,
    )  # fmt: skip
    return chosen | dict(ROWS=changes.get("BLOCK_M", 128)) | changes


RAGGED = dict(
    TILE_ROWS=2, GROUP=8, BLOCK_N=64, HEAD_DIM=128, WIDTH=128, SPLIT=True, ONE_TILE=False,
    PAGE=16, LOOKAHEAD=True, WINDOW=False, CAP=False, HAS_SINKS=False, HAS_LSE=True, ROUNDING=0,
    WIDEN=False, CHAINED=False, FROM=0, BELOW=0, SLOTS=0, SCALES=False, FP8=0,
)  # fmt: skip
MERGE = dict(
    PARTS=16, HEAD_DIM=128, WIDTH=128, HAS_SINKS=True, HAS_LSE=True, ROUNDING=0, CHAINED=False,
    SLOTS=0, FROM=0,
)  # fmt: skip
CASES = {
    "dense": (kernels.attention, dense()),
    "causal": (kernels.attention, dense(CAUSAL=True, HEAD_DIM=64)),
    "far": (kernels.attention, dense(FAR=True)),
    "lite": (kernels.attention, dense(BLOCK_N=128, LITE=True, HAS_DO=True)),
    "soft-skip": (kernels.attention, dense(BLOCK_N=128, LITE=True, VOTE_ROWS=64)),
    "192-rows": (
        kernels.attention,
        dense(BLOCK_M=256, ROWS=192, BLOCK_N=128, HEAD_DIM=64, LITE=True, VOTE_ROWS=64),
    ),
    "weigh": (kernels.attention, dense(LITE=True, HAS_DO=True, WEIGH=True, HAS_MASS=True)),
    "by-head": (kernels.attention, dense(LITE=True, WEIGH=True, BY_HEAD=True)),
    "plan": (
        kernels.plan,
        dict(
            WORDS=8,
            ROWS=64,
            DESCENDING=True,
            HAS_DO=True,
            HAS_SKIP=True,
            WEIGH=True,
            UNITS=0,
            ALL=0,
            LEAST=16,
            GOAL=6,
            SLOTS=0,
            EVEN=False,
            CHAINED=False,
        ),
    ),
    "plan-pieces": (
        kernels.plan,
        dict(
            WORDS=8,
            ROWS=64,
            DESCENDING=True,
            HAS_DO=True,
            HAS_SKIP=True,
            WEIGH=True,
            UNITS=132,
            ALL=2048,
            LEAST=16,
            GOAL=6,
            SLOTS=264,
            EVEN=True,
            CHAINED=False,
        ),
    ),
    "decode": (ragged.attention, RAGGED),
    "varlen": (ragged.attention, RAGGED | dict(TILE_ROWS=16, SPLIT=False, PAGE=0)),
    "decode-beside-prompts": (ragged.attention, RAGGED | dict(BELOW=9, SLOTS=8)),
    "beside-decodes": (ragged.attention, RAGGED | dict(TILE_ROWS=16, SPLIT=False, FROM=9)),
    "merge": (ragged.merge, MERGE),
    "merge-beside-prompts": (ragged.merge, MERGE | dict(SLOTS=8)),
    "merge-of-prompts": (ragged.merge, MERGE | dict(FROM=64)),
    "widen": (
        ragged.widen,
        dict(
            BLOCK_N=128,
            HEAD_DIM=80,
            WIDTH=128,
            PAGE=16,
            WINDOW=True,
            FROM=64,
            SCALES=True,
            FP8=3,
            INTERPRETED=False,
        ),
    ),
    "write": (ragged.write_kv, dict(HEAD_DIM=128, WIDTH=128, FP8_MANTISSA=0, SCALES=False)),
}
WIDE = RAGGED | dict(HEAD_DIM=256, WIDTH=256, BLOCK_N=32)
#: Constants, the cache's type, and stages of the loads.
CACHED = {
    "decode-80-e4m3": (RAGGED | dict(HEAD_DIM=80), "fp8e4nv", 3),
    "decode-256": (WIDE, "bf16", 2),
    "prefill-192-e5m2": (WIDE | dict(HEAD_DIM=192, TILE_ROWS=16, SPLIT=False), "fp8e5", 2),
}
#: Bits of mantissa of the fp8 types that NVIDIA reads in words.
WORDS = {"fp8e4nv": 3, "fp8e5": 2}
#: Local memory of a workgroup, bytes.
LOCAL = {"gfx942": 64 << 10, "sm_90": 227 << 10}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_plain_kernels_compile(case: str, target: str) -> None:
    kernel, constants = CASES[case]
    if kernel is ragged.widen and target != "sm_90":
        pytest.skip("words are unpacked by NVIDIA's instructions")
    types = signature(kernel, "bf16", constants, "i16" if kernel is ragged.widen else "")
    ordered = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=constants)
    built = triton.compile(source, target=TARGETS[target], options={"num_warps": 8})
    assert built.asm["cubin" if target == "sm_90" else "hsaco"]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("beside", [dict(ONE_TILE=True), dict(BELOW=9, SLOTS=8)], ids=str)
def test_decoding_tiles_keep_their_registers_on_hopper(
    beside: dict[str, Any], head_dim: int, tmp_path: Path
) -> None:
    """Alone and beside prompts, their merge included."""
    tile = RAGGED | dict(TILE_ROWS=4, GROUP=4, HEAD_DIM=head_dim, WIDTH=head_dim, CHAINED=True)
    merged = MERGE | dict(HEAD_DIM=head_dim, WIDTH=head_dim, CHAINED=True)
    merged |= dict(SLOTS=beside.get("SLOTS", 0))
    for kernel, constants in ((ragged.attention, tile | beside), (ragged.merge, merged)):
        types = signature(kernel, "bf16", constants)
        ordered = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        aligned = [name for name in types if types[name][0] == "*" or name.startswith("stride")]
        source = ASTSource(
            fn=kernel,
            signature=ordered,
            constexprs=constants,
            attrs={(kernel.arg_names.index(x),): [["tt.divisibility", 16]] for x in aligned},
        )
        options = {"num_warps": 4, "num_stages": 2}
        built = triton.compile(source, target=TARGETS["sm_90"], options=options)
        # ptxas stops at 64 or 96 registers, so that more programs fit, and puts up to three aside
        stores = int(assemble(built, tmp_path).split(" bytes spill stores")[0].split()[-1])
        assert stores <= 12


@pytest.mark.parametrize("target", LOCAL)
@pytest.mark.parametrize("case", CACHED)
def test_head_dims_and_fp8_caches_compile_and_fit(case: str, target: str) -> None:
    constants, held, stages = CACHED[case]
    if target == "sm_90" and held in WORDS:
        constants, held = constants | dict(FP8=WORDS[held]), "i16"
    kernel = ragged.attention
    types = signature(kernel, "bf16", constants, held)
    ordered = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=constants)
    options = {"num_warps": 8, "num_stages": stages}
    built = triton.compile(source, target=TARGETS[target], options=options)
    assert built.metadata.shared <= LOCAL[target]


#: Bits of mantissa, head dim, keys of a block and warps of the tiles that decode fp8 caches on
#: Hopper; one head dim says how e5m2 is read.
FP8_TILES = {(3, dim, *tile) for dim, held in ragged_cut._RESIDENT[1].items() for tile in held}
FP8_TILES |= {(3, 128, ragged_cut._DECODE_KEYS, 4)}  # where there are many parts
FP8_TILES |= {(2, *tile) for _, *tile in FP8_TILES if tile[0] == 128}
#: Bytes that ptxas may put aside, by the tile; Triton 3.6 does of the largest.
FP8_SPILLS = {(3, 256, 128, 4): 24}
#: Registers and shared memory of a multiprocessor, bytes; the driver takes some of each program's.
REGISTERS, SHARED, RESERVED = 64 << 10, 228 << 10, 1 << 10


def programs_that_fit(said: str, shared: int, warps: int) -> int:
    """Programs of a kernel that a multiprocessor holds, by what ptxas says of it."""
    registers = -(-int(re.findall(r"Used (\d+) registers", said)[0]) // 8) * 8
    return min(REGISTERS // (registers * 32 * warps), SHARED // (shared + RESERVED))


@pytest.mark.parametrize("whole", [False, True])
def test_the_decoding_tile_of_four_warps_fits_as_often_as_counted(
    whole: bool, tmp_path: Path
) -> None:
    """Of bf16 keys at head dim 128, whose registers depend on the version of Triton."""
    kernel = ragged.attention
    constants = RAGGED | dict(TILE_ROWS=4, GROUP=4, ONE_TILE=True, HAS_LSE=False)
    constants |= dict(SPLIT=not whole, CHAINED=not whole)
    types = signature(kernel, "bf16", constants)
    aligned = [name for name in types if types[name][0] == "*" or name.startswith("stride")]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs=constants,
        attrs={(kernel.arg_names.index(x),): [["tt.divisibility", 16]] for x in aligned},
    )
    options = {"num_warps": 4, "num_stages": 2}
    built = triton.compile(source, target=TARGETS["sm_90"], options=options)
    fit = programs_that_fit(assemble(built, tmp_path), built.metadata.shared, 4)
    assert fit == ragged_cut._held(2, 128, (64, 4), whole)


@pytest.mark.parametrize("tile", sorted(FP8_TILES), ids=str)
def test_fp8_caches_are_read_in_words_on_hopper(
    tile: tuple[int, int, int, int], tmp_path: Path
) -> None:
    """No load and no conversion of single numbers, nothing spilled, as many programs as counted.

    Numbers go from memory to the product by way of one tile of words, not of fp16 numbers, too.
    """
    mantissa, head_dim, block_n, warps = tile
    kernel = ragged.attention
    constants = RAGGED | dict(
        TILE_ROWS=4, GROUP=4, ONE_TILE=True, CHAINED=True, BLOCK_N=block_n, FP8=mantissa,
        HEAD_DIM=head_dim, WIDTH=head_dim,
    )  # fmt: skip
    types = signature(kernel, "bf16", constants, "i16")
    aligned = [name for name in types if types[name][0] == "*" or name.startswith("stride")]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs=constants,
        attrs={(kernel.arg_names.index(x),): [["tt.divisibility", 16]] for x in aligned},
    )
    options = {"num_warps": warps, "num_stages": ragged_cut._STAGES[warps]}
    built = triton.compile(source, target=TARGETS["sm_90"], options=options)
    # Triton 3.8 computes an instruction of two results twice, once by way of shared memory.
    assert not re.search(r":\d+ = tt\.elementwise_inline_asm", built.asm["ttgir"])
    said = assemble(built, tmp_path)
    assert int(re.findall(r"(\d+) bytes spill stores", said)[0]) <= FP8_SPILLS.get(tile, 0)
    if (block_n, warps) in ragged_cut._RESIDENT[1][head_dim]:
        counted = ragged_cut._held(1, head_dim, (block_n, warps), False)
        assert programs_that_fit(said, built.metadata.shared, warps) >= counted
    # keys, values and three tiles of queries or weights, 16 rows high
    assert built.metadata.shared <= 2 * block_n * head_dim + 3 * 16 * 2 * max(block_n, head_dim)
    (tmp_path / "kernel.cubin").write_bytes(built.asm["cubin"])
    names = Counter(
        re.findall(
            r"[0-9a-f]{4}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)",
            sass.listing(tmp_path / "kernel.cubin"),
        )
    )
    assert names["LDSM.16.MT88.4"] and names["LDGSTS.E.BYPASS.128"]
    assert not [name for name in names if name.startswith(("LDS.U8", "LDS.U16", "F2F."))]
    unpacked = sum(names[name] for name in names if "UNPACK_B" in name)
    assert unpacked >= 2 * block_n * head_dim // 2 // (32 * warps)


def lists(head_dim: int, rows: int, weigh: bool = False, **changes: Any) -> tuple[Any, Any]:
    """Tile and constants of a LiteAttention step as shipped."""
    tile = sass.lite_tile(head_dim, 0.1 if weigh else 0.0, rows)
    return tile, dict(HEAD_DIM=head_dim, LITE=True, WEIGH=weigh) | changes


HOPPER = {
    "dense": (tiles._HOPPER[128, False], dict(HEAD_DIM=128)),
    "causal": (tiles._HOPPER[128, True], dict(HEAD_DIM=128, CAUSAL=True, HAS_LSE=True)),
    "dense-64": (tiles._HOPPER[64, False], dict(HEAD_DIM=64)),
    "dense-64-low": (tiles._HOPPER_LOW[64, False], dict(HEAD_DIM=64)),
    "causal-64": (tiles._HOPPER[64, True], dict(HEAD_DIM=64, CAUSAL=True)),
    "lite": lists(128, 128),
    "lite-64": lists(64, 128),
    "lite-192-rows": lists(64, 192, HAS_DO=True),
    "soft-skip": lists(128, 128, SOFT_SKIP=True, HAS_DO=True, HAS_LSE=True, ROUNDING=1),
    "weigh": lists(128, 128, True, HAS_DO=True, HAS_LSE=True),
    "by-head": lists(128, 128, True, BY_HEAD=True),
    "weigh-64": lists(64, 128, True),
    "weigh-192-rows": lists(64, 192, True),
    "cut": lists(128, 128, SLOTS=264),
    "cut-64": lists(64, 128, SLOTS=264),
    "cut-weigh": lists(128, 128, True, SLOTS=264, HAS_DO=True, HAS_LSE=True),
    "cut-weigh-64": lists(64, 128, True, SLOTS=264, BY_HEAD=True),
    "stays": (tiles._HOPPER[128, False], dict(HEAD_DIM=128, FIXED=True)),
    "stays-64": (tiles._HOPPER_STAYING["dense"], dict(HEAD_DIM=64, FIXED=True, HAS_LSE=True)),
    "stays-lite": lists(128, 128, FIXED=True, HAS_DO=True),
    "stays-weigh": lists(128, 128, True, FIXED=True, HAS_DO=True, HAS_LSE=True),
    "stays-lite-192-rows": (
        tiles._HOPPER_STAYING["votes"],
        dict(HEAD_DIM=64, LITE=True, FIXED=True, HAS_DO=True),
    ),
    "stays-weigh-192-rows": (
        tiles._HOPPER_STAYING["weighs"],
        dict(HEAD_DIM=64, LITE=True, WEIGH=True, FIXED=True),
    ),
    "again": (tiles._HOPPER[128, False], dict(HEAD_DIM=128, AGAIN=True)),
    "again-64": (tiles._HOPPER_STAYING["dense"], dict(HEAD_DIM=64, AGAIN=True)),
    "again-lite-192-rows": (
        tiles._HOPPER_STAYING["votes"],
        dict(HEAD_DIM=64, LITE=True, AGAIN=True, HAS_DO=True),
    ),
    "again-weigh-192-rows": (
        tiles._HOPPER_STAYING["weighs"],
        dict(HEAD_DIM=64, LITE=True, WEIGH=True, AGAIN=True),
    ),
    "early-wait": (replace(tiles._HOPPER[128, False], late_wait=False), dict(HEAD_DIM=128)),
    "uncounted": (
        replace(tiles._HOPPER[128, True], counted=False, abreast=False),
        dict(HEAD_DIM=128, CAUSAL=True),
    ),
}


#: Bytes that lists of two and of three warpgroups may spill, outside of their loops: as many as
#: they do with Triton 3.9's ptxas; with that of 3.6 up to 8 and 24.
_SPILLED_OF_LISTS = {2: 144, 3: 336}
#: Accesses to them in a step of a list's later pieces, which leave marks.
_TOUCHED_WITH_MARKS = 5


@pytest.mark.parametrize("case", HOPPER)
def test_the_hopper_kernel_keeps_its_registers(case: str, tmp_path: Path) -> None:
    """Two warpgroups and lists spill nothing to speak of; no product waits for the one before."""
    tile, changes = HOPPER[case]
    constants = dict(
        GROUPS=tile.groups, BLOCK_N=tile.block_n, STAGES=tile.stages, CAUSAL=False, LITE=False,
        SOFT_SKIP=False, HAS_DO=False, WEIGH=False, HAS_MASS=False, BY_HEAD=False, HAS_LSE=False,
        TURNS=tile.turns, LATE_WAIT=tile.late_wait, SIGN=1, ROUNDING=0,
        REGISTERS=tile.registers, LOADER_REGISTERS=tile.loader_registers, COUNTED=tile.counted,
        ABREAST=tile.abreast, SLOTS=0, LATE_EXP=tile.late_exp, FIXED=False, AGAIN=False,
        CHAINED=True,
    ) | changes  # fmt: skip
    boxes = {
        name: (tile.block_n if name in "kv" else hopper.WARPGROUP_ROWS, constants["HEAD_DIM"])
        for name in ("q", "k", "v", "o")
    }
    built, said = build_for_hopper(hopper.attention, constants, boxes, tmp_path)
    assert built.metadata.num_warps == 4 * (tile.groups + 1)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled
    if constants["LITE"]:
        # between the loops, for what belongs to pieces, and to none of their plain steps
        loops = sass.inner_loops(sass.listing(tmp_path / "kernel.cubin"))
        assert len(loops) == tile.groups * (2 if constants["SLOTS"] else 1)
        touched = [sum(text.startswith(("LDL", "STL")) for text in loop) for loop in loops]
        if constants["SLOTS"]:
            assert max(touched[::2]) <= _TOUCHED_WITH_MARKS
            touched = touched[1::2]
        assert max(touched) == 0, touched
    if constants["LITE"] and not constants["SLOTS"]:
        assert int(spilled[1]) <= _SPILLED_OF_LISTS[tile.groups], said
    elif tile.groups == 2 and not constants["SLOTS"]:
        assert int(spilled[1]) == 0, said


@pytest.mark.parametrize("causal", [False, True])
def test_late_waits_lie_behind_the_maxima(causal: bool) -> None:
    """In the machine code: ptxas leaves them where the kernel has them."""
    late, early = (
        sass.count(hopper.attention, sass.dense(128, causal, early)).before_wait[0]
        for early in (False, True)
    )
    assert early < late and late >= 64


@pytest.mark.parametrize(
    "name",
    [
        "dense 128, levels follow",
        "causal 128",
        "causal 64",
        "lite 128, votes, levels follow",
        "lite 128, weighs, levels follow",
    ],
)
def test_outputs_are_scaled_if_the_factor_of_either_row_asks_for_it(
    name: str, tmp_path: Path
) -> None:
    """A thread's outputs are of two rows, in the order that the condition takes for granted."""
    (tmp_path / "kernel.cubin").write_bytes(sass.compiled(*sass.shipped()[name]))
    loops = sass.inner_loops(sass.listing(tmp_path / "kernel.cubin"))
    groups, held = (3, 32) if "64" in name else (2, 64)
    assert len(loops) == groups * (2 if "causal" in name else 1)  # with masks and without
    for loop in loops:
        looked_at = [
            found[1]
            for text in loop
            if (found := re.match(r"FSETP\.NEU\.\S+ .*, (R\d+), 1, ", text))
        ]
        assert len(looked_at) == 2
        branch = max(i for i, text in enumerate(loop[:-1]) if text.startswith("BRA"))
        factors: dict[str, int] = {}
        for text in loop[branch + 1 : branch + 1 + held]:
            found = re.match(r"FMUL (R\d+), (R\d+)(?:\.reuse)?, (R\d+)(?:\.reuse)?$", text)
            assert found and found[1] in found.groups()[1:], text
            other = found[3] if found[2] == found[1] else found[2]
            factors[other] = factors.get(other, 0) + 1
        assert factors == dict.fromkeys(looked_at, held // 2)


#: Tile, head dim, tokens that lie together, tokens of a page, and what else is asked for.
PROMPTS = {
    "paged": (128, 16, 16, dict(LOOKAHEAD=True)),
    "packed": (128, 128, 0, dict(LOOKAHEAD=True, HAS_LSE=True, LATE_WAIT=True)),
    "of-fp8": (128, 128, 128, dict(LOOKAHEAD=True, LATE_WAIT=True, SCALES=True)),
    "late-96": (96, 128, 256, dict(LOOKAHEAD=True, WINDOW=True, HAS_SINKS=True, LATE_WAIT=True)),
    "64": (64, 128, 256, dict(LOOKAHEAD=True)),
    "96": (96, 16, 16, dict(LOOKAHEAD=True, HAS_SINKS=True)),
    "window-192": (192, 32, 96, dict(LOOKAHEAD=True, WINDOW=True, HAS_LSE=True)),
    "cap-256": (256, 64, 64, dict(LOOKAHEAD=True, WINDOW=True, CAP=True)),
    "cap": (128, 16, 16, dict(LOOKAHEAD=True, CAP=True)),
    "256": (256, 64, 64, dict(LOOKAHEAD=True)),
    "uncounted": (128, 16, 16, dict(LOOKAHEAD=True, COUNTED=False)),
    "all": (128, 8, 8, dict(WINDOW=True, HAS_SINKS=True, HAS_LSE=True, SIGN=-1, ROUNDING=1)),
}


def test_the_tool_that_counts_instructions_knows_every_argument() -> None:
    for kernel, one in sass.shipped().values():
        signature = sass.source_of(kernel, one).signature
        assert list(signature) == kernel.arg_names
        untyped = sum(kind == "constexpr" for kind in signature.values())
        assert untyped == len(one._how[0])


@pytest.mark.parametrize("case", PROMPTS)
def test_the_hopper_kernel_of_prompts_keeps_its_registers(case: str, tmp_path: Path) -> None:
    head_dim, piece, page, changes = PROMPTS[case]
    width = ragged_cut.width(head_dim)
    tile = tiles.PROMPTS[width]
    constants = dict(
        GROUPS=tile.groups, BLOCK_N=tile.block_n, HEAD_DIM=head_dim, WIDTH=width,
        PIECE=min(piece, tile.block_n), PAGE=page, STAGES=tile.stages, LOOKAHEAD=False,
        WINDOW=False, CAP=False, HAS_SINKS=False, HAS_LSE=False, TURNS=tile.turns,
        LATE_WAIT=tile.late_wait, SIGN=1, ROUNDING=0, REGISTERS=tile.registers,
        LOADER_REGISTERS=tile.loader_registers, COUNTED=tile.counted, SCALES=False, PARTS=False,
    ) | changes  # fmt: skip
    cache = (constants["PIECE"], hopper_ragged_load.COLUMNS)
    boxes = {"q": (hopper.WARPGROUP_ROWS, width), "k": cache, "v": cache}
    _, said = build_for_hopper(hopper_ragged.attention, constants, boxes, tmp_path)
    # Three warpgroups have 160 registers each. A window spills up to 15 numbers at 256 columns, and
    # with two loops up to five numbers lie aside outside of both.
    split = constants["LOOKAHEAD"] and not constants["WINDOW"] and width == 128
    stores = int(said.split(" bytes spill stores")[0].split()[-1])
    assert stores <= (60 if changes.get("WINDOW") else 20 if split else 0) or tile.groups == 3
    if split:
        loops = sass.inner_loops(sass.listing(tmp_path / "kernel.cubin"))
        touched = [sum(text.startswith(("LDL", "STL")) for text in loop) for loop in loops]
        # With sinks and small pages one warpgroup reads and writes one number in a loop.
        assert len(touched) == 2 * tile.groups and sum(touched) <= 2 * (case == "96"), touched


def build_for_hopper(
    kernel: Any, constants: dict[str, Any], boxes: dict[str, tuple[int, int]], directory: Path
) -> tuple[Any, str]:
    """Compile for sm_90 with tensor maps of ``boxes`` [rows, columns]; what ptxas says of it."""
    types = signature(kernel, "bf16", constants)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    for name, (rows, columns) in boxes.items():
        types[f"{name}_desc"] = f"tensordesc<bf16[1, 1, {rows}, {columns}],{layout!r}>"
    ordered = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = GluonASTSource(
        fn=kernel,
        signature=ordered,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    built = triton.compile(source, target=TARGETS["sm_90"], options={"num_warps": 4})
    assert built.metadata.shared <= 227 << 10
    said = assemble(built, directory)
    assert "serialized" not in said
    return built, said


def assemble(built: Any, directory: Path) -> str:
    """What ptxas says of a kernel for sm_90."""
    ptx = directory / "kernel.ptx"
    ptx.write_text(built.asm["ptx"])
    assembler = get_ptxas(90).path  # several come with Triton
    command = [assembler, "-v", "--gpu-name=sm_90a", ptx, "-o", directory / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def run_on_emulator(
    kernel: Any,
    constants: dict[str, Any],
    grid: list[int],
    args: list[Any],
    warps: int,
    cache: str = "",
) -> None:
    types = signature(kernel, "bf16", constants, cache)
    compiled = compile_for_gfx942(kernel, types, constants, {"num_warps": warps})
    assert len(types) == len(args)
    with emulator.Module(compiled.code_object) as module:
        explicit = [a for a in module.kernel(compiled.name).arguments if not a.hidden]
        extra = [None] * (len(explicit) - len(args))  # Triton's scratch pointers
        report = module.launch(
            compiled.name, grid, [compiled.threads], [*args, *extra], dynamic_lds=compiled.lds_bytes
        )
    assert report.instructions > 0
    assert not report.findings


def steps(x: torch.Tensor) -> list[int]:
    """Strides of batch, row and head of [B, H, S, D]."""
    return [x.stride(0), x.stride(2), x.stride(1)]


@pytest.mark.parametrize("causal", [False, True])
def test_dense_attention_on_the_emulator(causal: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 70, 64).bfloat16()
    k, v = (torch.randn(1, 1, 150, 64).bfloat16() for _ in range(2))
    out, lse = torch.full_like(q, math.nan), torch.full((1, 2, 70), math.nan)
    constants = dense(BLOCK_M=64, BLOCK_N=32, HEAD_DIM=64, CAUSAL=causal)
    none = torch.zeros(4, dtype=torch.int32)
    args = [
        q,
        k,
        v,
        out,
        lse,
        none.short(),
        none,
        none,
        none,
        none,
        none.float(),
        none.long(),
        none,
        none,
    ]
    args += [*steps(q), *steps(k), *steps(v), *steps(out)]
    args += [2, 2, 70, 150, 2, 5, 1, 0, 64**-0.5 * LOG2E, math.nan]
    run_on_emulator(kernels.attention, constants, [4], args, 4)
    expected = exact(q, k, v, causal=causal)
    assert ((out.double() - expected.out).abs() <= bound(expected, torch.bfloat16)).all()
    assert torch.allclose(lse.double(), expected.lse, atol=1e-5)


@pytest.mark.parametrize(
    ("dim", "fp8"),
    [(80, None), (64, torch.float8_e4m3fn), (64, torch.float8_e5m2)],
    ids=["80", "e4m3", "e5m2"],
)
def test_decoding_on_the_emulator(dim: int, fp8: torch.dtype | None) -> None:
    """A cache write, parts of requests and their merge, gfx942 machine code, against float64.

    Scales of e4m3 are tensors, those of e5m2 numbers.
    """
    torch.manual_seed(0)
    lengths, page, width, heads, splits = (150, 40), 16, 1 << (dim - 1).bit_length(), 3, 3
    q = torch.randn(2, heads, dim).bfloat16()
    rows = [torch.randn(sum(lengths), 1, dim).bfloat16() for _ in "kv"]
    pages = [-(-n // page) for n in lengths]
    table = torch.full((2, max(pages)), 1 << 30, dtype=torch.int32)
    order = torch.randperm(sum(pages)).int()
    table[0, : pages[0]], table[1, : pages[1]] = order[: pages[0]], order[pages[0] :]
    tokens = [torch.arange(n) for n in lengths]
    slots = [t[at // page].long() * page + at % page for t, at in zip(table, tokens, strict=True)]
    cache = torch.full((sum(pages), 2, page, 1, dim), math.nan).to(fp8 or torch.bfloat16)
    held = cache.view(torch.uint8) if fp8 else cache
    caches = held.unbind(1)
    k_scale, v_scale = (0.07, 1.3) if fp8 else (1.0, 1.0)
    in_memory = fp8 == torch.float8_e4m3fn
    memory = [torch.tensor([x] if in_memory else [math.nan]) for x in (k_scale, v_scale)]
    by_value = (1.0, 1.0) if in_memory else (k_scale, v_scale)
    row_steps, cache_steps = 2 * [dim, dim], 2 * [2 * page * dim, dim, dim]
    run_on_emulator(
        ragged.write_kv,
        dict(HEAD_DIM=dim, WIDTH=width, FP8_MANTISSA=MANTISSA[fp8], SCALES=in_memory),
        [sum(lengths), 1],
        [*rows, *caches, torch.cat(slots), *memory, *row_steps, *cache_steps, page, *by_value],
        1,
        "u8" if fp8 else "",
    )
    none = torch.zeros(4)
    out, lse = torch.full_like(q, math.nan), torch.full((heads, 2), math.nan)
    starts, keys = torch.tensor([0, 1, 2]).int(), torch.tensor(lengths).int()
    parts = [torch.full((splits, 2, heads, *x), math.nan) for x in ((dim,), ())]
    counts = torch.full((2,), -1, dtype=torch.int32)
    steps = [heads * dim, dim]
    strides = [*steps, *cache_steps, *steps, table.stride(0)]
    scale, v_factor = dim**-0.5 * LOG2E * by_value[0], by_value[1]
    numbers = [2, heads, heads, 0, 0, 2, splits, 1, scale, 0.0, v_factor]
    run_on_emulator(
        ragged.attention,
        RAGGED
        | dict(HEAD_DIM=dim, WIDTH=width, TILE_ROWS=4, GROUP=4, BLOCK_N=32, SPLIT=True)
        | dict(ONE_TILE=True, SCALES=in_memory),
        [2, 1, splits],
        [
            q,
            *caches,
            out,
            lse,
            none,
            *parts,
            counts,
            starts,
            keys,
            table,
            *memory,
            *strides,
            *numbers,
        ],
        4,
        {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", None: ""}[fp8],
    )
    assert counts.tolist() == [3, 2]
    run_on_emulator(
        ragged.merge,
        MERGE | dict(PARTS=4, HEAD_DIM=dim, WIDTH=width, HAS_SINKS=False),
        [2, heads],
        [*parts, counts, out, lse, none, starts, *steps, 2, heads, 2],
        1,
    )
    if fp8:
        limit, scales = torch.finfo(fp8).max, (k_scale, v_scale)
        rows = [
            (x.float() / scale).clamp(-limit, limit).to(fp8).double() * scale
            for x, scale in zip(rows, scales, strict=True)
        ]
    for r, (k, v) in enumerate(zip(*(x.split(lengths) for x in rows), strict=True)):
        expected = exact_rows(q[r : r + 1], k, v, scale=dim**-0.5, causal=True)
        allowed = 2.0**-8 * (1.01 * expected.weight + expected.out.abs()) + 1e-6
        expect_out(out[r : r + 1], expected, allowed)
        assert torch.allclose(lse[:, r].double(), expected.lse[:, 0], atol=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.2], ids=["vote", "weigh"])
def test_lists_on_the_emulator_equal_the_oracle_bit_for_bit(share: float) -> None:
    """Both launches of a step, gfx942 machine code, two steps in both directions.

    Votes equal the oracle's; of weighed tiles those go that the rule names for their weights.
    """
    tile, q_len, kv_len = TileGeometry(32, 16, 32), 60, 600
    q_blocks, k_blocks, words = tile.q_blocks(q_len), tile.k_blocks(kv_len), tile.words(kv_len)
    do = torch.arange(k_blocks) % 9 == 2
    must_do, must_skip = bitmap.pack(do), bitmap.pack(torch.arange(k_blocks) % 7 == 3)
    generator = torch.Generator().manual_seed(0)

    def grid(rows: int) -> torch.Tensor:
        x = torch.randn(1, 1, rows, 64, generator=generator)
        return ((x * 8).round() / 8).clamp(-4, 4).bfloat16()

    read = bitmap.full(1, 1, q_blocks, k_blocks)
    for descending in (False, True):
        q, k, v = grid(q_len), grid(kv_len), grid(kv_len)
        heights = torch.linspace(-3, 3, k_blocks)[(torch.arange(k_blocks) * 5) % k_blocks]
        k[..., 0] = heights.repeat_interleave(tile.k_block)[:kv_len].bfloat16()
        q[..., 0] = 4.0
        votes = torch.full_like(read, -5)
        items = torch.zeros(q_blocks, k_blocks, dtype=torch.int16)
        counts, order = (torch.zeros(q_blocks, dtype=torch.int32) for _ in range(2))
        counter, tally = torch.full((2,), 7, dtype=torch.int32), torch.full((2,), 7)
        weights = torch.zeros(q_blocks, k_blocks, dtype=torch.int32)
        mass = torch.full((1, 1, q_blocks, k_blocks), math.nan)
        out, lse = torch.full_like(q, math.nan), torch.full((1, 1, q_len), math.nan)
        run_on_emulator(
            kernels.plan,
            dict(
                WORDS=2, ROWS=16, DESCENDING=descending, HAS_DO=True, HAS_SKIP=True,
                WEIGH=share > 0, UNITS=0, ALL=0, LEAST=16, GOAL=6, SLOTS=0, EVEN=False,
                CHAINED=False,
            ),
            [q_blocks],
            [
                read, must_do, must_skip, items, counts, order, counter, votes, weights, tally,
                q_blocks, k_blocks, words, 1,
            ],
            1,
        )  # fmt: skip
        here = bitmap.unpack((read | must_do) & ~must_skip, k_blocks)
        lengths = here.sum(-1).flatten()
        assert counter.tolist() == [0, 0] and tally.tolist() == [0, 0]
        assert torch.equal(order, lengths.argsort(descending=True, stable=True).int())
        assert torch.equal(counts, lengths[order.long()].int())
        args = [q, k, v, out, lse, items, counts, order, votes, weights, mass, tally, must_do]
        args += [order]  # budgets by head: none
        args += [*steps(q), *steps(k), *steps(v), *steps(out)]
        args += [1, 1, q_len, kv_len, q_blocks, k_blocks, words, budget.limit_of(share)]
        args += [0.25 * LOG2E, math.nan if share else -4.0]
        constants = dense(
            BLOCK_M=32, BLOCK_N=16, HEAD_DIM=64, LITE=True, HAS_DO=True, WEIGH=share > 0,
            HAS_MASS=share > 0,
        )  # fmt: skip
        run_on_emulator(kernels.attention, constants, [q_blocks], args, 4)
        expected, masses = torch.empty_like(read), torch.empty_like(mass)
        limit: dict[str, Any] = {"threshold": -4.0}
        if share:
            limit = {"budget": share, "mass": masses}
        other, other_lse = lite_attention(
            q, k, v, read, expected, **limit, descending=descending, must_do=must_do,
            must_skip=must_skip, geometry=tile, layout="bhsd", scale=0.25, return_lse=True,
            engine="reference",
        )  # fmt: skip
        if share:
            assert torch.allclose(mass, masses, atol=1e-5)
            expected = bitmap.pack(budget.select(mass, here, do, share))
        assert torch.equal(votes, expected)
        assert tally.tolist() == [int(here.sum()), int(bitmap.count(votes))]
        assert torch.allclose(out.double(), other.double(), atol=0.02, rtol=0.01)
        assert torch.allclose(lse, other_lse, atol=1e-4)
        read = votes
    assert 0.1 < bitmap.sparsity(read, k_blocks) < 0.95


@pytest.mark.parametrize(("indexed", "into"), [(False, False), (True, True)])
def test_heads_are_copied_16_bytes_at_a_time(indexed: bool, into: bool) -> None:
    constants = dict(INDEXED=indexed, INTO=into, ROWS=128, WIDTH=32, PADDED=32)
    types = {"target": "*i64", "source": "*i64", "index": "*i64"}
    source = ASTSource(
        fn=copies._copy,
        signature={
            name: "constexpr" if name in constants else types.get(name, "i32")
            for name in copies._copy.arg_names
        },
        constexprs={(copies._copy.arg_names.index(x),): value for x, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(copies._copy.arg_names)
            if name in types or name[:2] in ("s_", "t_")
        },
    )
    ptx = triton.compile(source, target=TARGETS["sm_90"], options={"num_warps": 32}).asm["ptx"]
    # 128 rows of 256 bytes by 1,024 threads; the heads' numbers are read besides
    assert len(re.findall(r"ld\.global\.v2\.b64", ptx)) == 2
    assert len(re.findall(r"ld\.global", ptx)) == 2 + indexed
    assert re.findall(r"st\.global\S*", ptx) == ["st.global.v2.b64"] * 2
