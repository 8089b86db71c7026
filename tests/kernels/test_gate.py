"""The build refuses kernels that spill, use too much LDS, or touch scratch memory in a loop."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from liteattention_rocm.kernels import build, disassembly

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
    assert any("scratch instructions in the loop at 0x" in r for r in reasons)


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
def test_hazards_come_from_the_checker_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compiled(CLEAN, tmp_path)
    found = types.ModuleType("liteattention_emulator.hazards")
    found.check = lambda p: [f"hazard in {Path(p).name}"]  # type: ignore[attr-defined]
    package = types.ModuleType("liteattention_emulator")
    package.library = lambda: Path("there")  # type: ignore[attr-defined]
    package.EmulatorError = RuntimeError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liteattention_emulator", package)
    monkeypatch.setitem(sys.modules, "liteattention_emulator.hazards", found)
    assert build.gate(path) == ["sample.co: hazard in sample.co"]

    def not_built() -> Path:
        raise RuntimeError("not built")

    package.library = not_built  # type: ignore[attr-defined]
    assert build.hazards(path) is None
    monkeypatch.setitem(sys.modules, "liteattention_emulator.hazards", None)
    assert build.hazards(path) is None


LISTING = """
0000000000001000 <first>:
\ts_mov_b32 s0, 0                                            // 000000001000: BE800080
\tv_exp_f32_e32 v0, v1                                       // 000000001004: 7E004101
\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]    // 000000001008: D3E10000 04020D04
\tbuffer_load_dword v1, s[0:3], 0 offen lds                  // 000000001010: E0511000 80000001
\ts_cbranch_scc1 2                                           // 000000001018: BF850002 <first+0x24>
\ts_cbranch_scc0 65530                                       // 00000000101C: BF84FFFA <first+0x8>
\ts_endpgm                                                   // 000000001020: BF810000
\tscratch_load_dword v0, off, off                            // 000000001024: DC504000 007F0000
\ts_branch 65528                                             // 00000000102C: BF82FFF8 <first+0x10>
\ts_nop 0                                                    // 000000001030: BF800000
"""


def test_loops_include_blocks_placed_elsewhere() -> None:
    code = disassembly.parse(LISTING)["first"]
    assert [i.address for i in code][-1] == 0x102C  # the padding is not reachable
    (loop,) = disassembly.loops(code)
    addresses = [i.address for i in loop]
    assert addresses == [0x1008, 0x1010, 0x1018, 0x101C, 0x1024, 0x102C]
    counts = disassembly.mix(loop)
    assert {k: v for k, v in counts.items() if v} == {
        "MFMA": 1, "LDS-DMA": 1, "branch": 3, "scratch": 1,
    }  # fmt: skip
    assert disassembly.mix(code)["trans"] == 1
    assert disassembly.hot_loop(code) == loop
