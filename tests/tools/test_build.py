"""The build refuses kernels that spill, use too much LDS, touch scratch memory in a loop or lack
wait states; the check lists every difference from what is committed."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from liteattention_emulator import cfg, listing, llvm
from liteattention_rocm.engines.gfx942 import manifest
from liteattention_tools import build, loops
from tests.emulator.toolchain import assemble, function

HEAD = '#include "hip_shim.h"\nusing namespace liteattention::gfx942;\n'

SPILLS = (
    HEAD
    + """
LITE_KERNEL(1024, 8) spills(const float* in, float* out) {
    float x[200];
#pragma unroll
    for (int i = 0; i < 200; ++i) x[i] = in[i * 1024 + ThreadId()];
    for (int n = 0; n < 100; ++n)
#pragma unroll
        for (int i = 0; i < 200; ++i) x[i] = x[i] * x[(i + 7) % 200] + 1.0f;
#pragma unroll
    for (int i = 0; i < 200; ++i) out[i * 1024 + ThreadId()] = x[i];
}
"""
)
TOO_MUCH_LDS = (
    HEAD
    + """
LITE_KERNEL(64, 1) hoards(float* out) {
    __shared__ float x[16385];
    x[ThreadId()] = out[ThreadId()];
    x[ThreadId() + 16000] = 1.0f;
    out[ThreadId() + 64] = x[(ThreadId() * 7) % 16385];
}
"""
)
CLEAN = HEAD + "LITE_KERNEL(64, 1) clean(float* out) { out[ThreadId()] = 1.0f; }\n"


def compiled(source: str, folder: Path) -> Path:
    path = folder / "sample.hip"
    path.write_text(source)
    for header in ("hip_shim.h",):
        (folder / header).write_bytes((build.SOURCES / header).read_bytes())
    build.compile_source(path, folder / "sample.co", build.find_compiler())
    return folder / "sample.co"


@pytest.mark.llvm
def test_a_clean_kernel_passes(tmp_path: Path) -> None:
    assert build.gate(compiled(CLEAN, tmp_path)) == []


@pytest.mark.llvm
def test_spills_are_refused_with_every_reason(tmp_path: Path) -> None:
    reasons = build.gate(compiled(SPILLS, tmp_path))
    assert any(r.startswith("spills: ") and r.endswith("vector registers spilled") for r in reasons)
    assert any("scratch instructions in loops, the first at 0x" in r for r in reasons)


@pytest.mark.llvm
def test_lds_past_a_compute_unit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiler refuses as well where it can see it; the gate must not depend on that.
    with pytest.raises(build.BuildError, match="local memory"):
        compiled(TOO_MUCH_LDS, tmp_path)
    path = compiled(TOO_MUCH_LDS.replace("16385", "16384"), tmp_path)
    assert build.gate(path) == []
    monkeypatch.setattr(build, "LDS_LIMIT", 65535)
    assert build.gate(path) == ["hoards: 65536 bytes of LDS, a compute unit has 65535"]


@pytest.mark.llvm
def test_nothing_is_written_when_a_kernel_is_refused(tmp_path: Path) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "hip_shim.h").write_bytes((build.SOURCES / "hip_shim.h").read_bytes())
    (sources / "good.hip").write_text(CLEAN)
    (sources / "slow.hip").write_text(SPILLS)
    (sources / "wrong.hip").write_text("int x = ;\n")
    with pytest.raises(build.BuildError) as error:
        build.build(tmp_path / "out", sources)
    assert "vector registers spilled" in str(error.value)
    assert "wrong.hip" in str(error.value)
    assert "expected expression" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.llvm
def test_missing_wait_states_are_refused(tmp_path: Path) -> None:
    source = HEAD + "LITE_KERNEL(64, 1) early(float* out) {\n    float x = out[ThreadId()];\n"
    source += '    asm("v_exp_f32 %0, %0\\n\\tv_mul_f32 %0, %0, %0" : "+v"(x));\n'
    source += "    out[ThreadId()] = x;\n}\n"
    (reason,) = build.gate(compiled(source, tmp_path))
    assert reason.startswith("sample.co: ") and "v_exp_f32" in reason


# The loop's last block lies behind the end; scratch memory before and in the loop.
LOOP = """
  s_mov_b32 s0, 0
  scratch_load_dword v0, off, off
loop:
  v_exp_f32 v0, v1
  v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
  buffer_load_dword v1, s[0:3], 0 offen lds
  s_cbranch_scc1 elsewhere
  s_nop 0
  s_cbranch_scc0 loop
  s_endpgm
elsewhere:
  scratch_load_dword v0, off, off
  s_branch loop
  s_waitcnt vmcnt(0)
"""


def test_loops_include_blocks_placed_elsewhere() -> None:
    listed = listing.load(assemble(function("k", LOOP)))
    graph = cfg.Graph(listed.instructions, 0)
    counts = loops.mix(loops.hot(graph))
    assert {name: n for name, n in counts.items() if n} == {
        "MFMA": 1, "LDS-DMA": 1, "trans": 1, "branch": 3, "scratch": 1, "nop": 1,
    }  # fmt: skip
    (again,) = loops.scratch_in_loops(graph)
    assert again.offset > graph.body(graph.loops[0])[0].offset


def test_all_that_is_reached_where_there_is_no_loop() -> None:
    body = "s_barrier\ns_waitcnt vmcnt(0)\nscratch_load_dword v0, off, off\ns_endpgm\ns_nop 0"
    graph = cfg.Graph(listing.load(assemble(function("k", body))).instructions, 0)
    counts = loops.mix(loops.hot(graph))
    assert {name: n for name, n in counts.items() if n} == {
        "branch": 1, "waitcnt": 1, "barrier": 1, "scratch": 1,
    }  # fmt: skip
    assert loops.scratch_in_loops(graph) == []


@pytest.mark.llvm
def test_check_lists_every_difference(tmp_path: Path) -> None:
    directory, sources = tmp_path / "k", tmp_path / "src"
    sources.mkdir()
    headers = ("isa.h", "hip_shim.h", "params.h", "geometry.h", "lpt.h")
    for name in ("plan_lpt.hip", "variants.def", *headers):
        shutil.copy(build.SOURCES / name, sources / name)
    built = build.build(directory, sources)
    assert [o.file for o in built.objects] == ["plan_lpt.co"]
    assert build.check(directory, sources) == []
    assert json.loads((directory / "manifest.json").read_text())["format"] == 1
    with (sources / "plan_lpt.hip").open("a") as file:
        file.write("LITE_KERNEL(64, 1) another(const PlanParams p) { p.order[0] = 1; }\n")
    (directory / "stray.co").write_bytes(b"")
    assert build.check(directory, sources) == [
        "source plan_lpt.hip: changed since the objects were built",
        "plan_lpt.co: other bytes",
        "stray.co: no source builds it",
        "manifest: describes other objects than a rebuild makes",
    ]


def test_build_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(llvm.ToolMissing, match=r"ld.lld of LLVM 19 is missing .*install lld-19"):
        build.find_compiler()
    with pytest.raises(llvm.ToolMissing, match="hipcc is not installed"):
        build.find_compiler("hipcc")
    with pytest.raises(FileNotFoundError, match=r"no kernel sources at .* from a checkout"):
        build.build(tmp_path, tmp_path / "nowhere")


def test_no_wheel_has_these_tools() -> None:
    shipped = sorted(path.name for path in manifest.DIRECTORY.parent.glob("*.py"))
    assert shipped == ["__init__.py", "engine.py", "manifest.py"]
    project = tomllib.loads((build.SOURCES.parents[1] / "pyproject.toml").read_text("utf-8"))
    assert not any("tools" in name for name in project["tool"]["scikit-build"]["wheel"]["packages"])
