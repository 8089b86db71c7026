"""The committed code objects are what the manifest says, and what the sources build."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from liteattention_rocm import kernels
from liteattention_rocm.kernels import build, cli, disassembly, metadata

OBJECTS = sorted(kernels.DIRECTORY.glob("*.co"))
VARIANTS = {
    *(f"transpose_v_bf16_d{d}" for d in (64, 128)),
    *(
        f"attention_{kind}_bf16_d{d}_{r}"
        for kind in ("dense", "lite")
        for d in (64, 128)
        for r in ("rtne", "rtna", "rtz")
    ),
    *(f"attention_{kind}_fp16_d{d}" for kind in ("dense", "lite") for d in (64, 128)),
    *(f"merge_parts_bf16_{r}" for r in ("rtne", "rtna", "rtz")),
    "merge_parts_fp16",
    "plan_lpt",
    *(
        f"attention_{kind}_bf16_d{d}_{r}"
        for kind in ("prefill", "decode")
        for d in (64, 128, 256)
        for r in ("rtne", "rtna", "rtz")
    ),
    *(f"attention_{kind}_fp16_d{d}" for kind in ("prefill", "decode") for d in (64, 128, 256)),
    *(f"merge_decode_bf16_{r}" for r in ("rtne", "rtna", "rtz")),
    "merge_decode_fp16",
    "write_kv",
}


def test_every_kernel_is_there_once() -> None:
    names = [k.name for o in kernels.manifest().objects for k in o.kernels]
    assert len(names) == len(set(names))
    assert set(names) == VARIANTS


def test_the_manifest_describes_the_committed_bytes() -> None:
    manifest = kernels.manifest()
    assert [o.file for o in manifest.objects] == [p.name for p in OBJECTS]
    for entry, path in zip(manifest.objects, OBJECTS, strict=True):
        elf = path.read_bytes()
        assert entry.sha256 == hashlib.sha256(elf).hexdigest()
        assert entry.bytes == len(elf)
        assert entry.code_object_version == metadata.code_object_version(elf) == 5
        assert metadata.target(elf) == manifest.target == "gfx942"
        assert entry.kernels == metadata.kernels(elf)


def test_the_objects_belong_to_the_sources_beside_them() -> None:
    assert kernels.manifest().sources == build.source_hashes()


def test_limits_of_the_machine() -> None:
    for entry in kernels.manifest().objects:
        for kernel in entry.kernels:
            assert kernel.vgpr_spills == kernel.sgpr_spills == kernel.scratch_bytes == 0
            # 512 threads are two waves on each SIMD: 256 of its 512 registers a lane each.
            assert kernel.vgprs <= 256 * 512 // max(512, kernel.max_workgroup)
            assert kernel.lds_bytes <= 64 * 1024


def test_variants_are_read_from_names() -> None:
    _, kernel = kernels.manifest().find("attention_dense_bf16_d64_rtz")
    assert kernel.variant == {"head_dim": 64, "rounding": "rtz"}
    assert metadata.variant("plan_lpt") == {}
    with pytest.raises(KeyError, match="no kernel 'attention' in the manifest: it has attention_d"):
        kernels.manifest().find("attention")


def test_load_refuses_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.load("plan_lpt.co") == (kernels.DIRECTORY / "plan_lpt.co").read_bytes()
    with pytest.raises(KeyError, match=r"no code object 'x.co' in the manifest"):
        kernels.load("x.co")
    shutil.copytree(kernels.DIRECTORY, tmp_path / "k")
    with (tmp_path / "k" / "plan_lpt.co").open("r+b") as file:
        file.seek(0x200)
        file.write(b"\xff")
    monkeypatch.setattr(kernels, "DIRECTORY", tmp_path / "k")
    with pytest.raises(ValueError, match=r"has SHA-256 .* the manifest says"):
        kernels.load("plan_lpt.co")


def test_another_manifest_format_is_refused() -> None:
    with pytest.raises(ValueError, match="manifest of format 2: this package reads format 1"):
        kernels.parse({"format": 2})


@pytest.mark.parametrize(
    ("value", "packed"),
    [
        ({"a": [1, -1, 200]}, b"\x81\xa1a\x93\x01\xff\xcc\xc8"),
        ([None, True, False, 2**40, -(2**20)],
         b"\x95\xc0\xc3\xc2" + struct.pack(">BQBi", 0xCF, 2**40, 0xD2, -(2**20))),
        ("x" * 40, b"\xd9\x28" + b"x" * 40),
        ({i: i for i in range(20)}, b"\xde\x00\x14" + bytes(n for i in range(20) for n in (i, i))),
        (["y" * 300], b"\x91\xda\x01\x2c" + b"y" * 300),
        (list(range(17)), b"\xdc\x00\x11" + bytes(range(17))),
    ],
)  # fmt: skip
def test_messagepack_subset(value: Any, packed: bytes) -> None:
    assert metadata._unpack(packed, 0) == (value, len(packed))


def test_what_is_no_code_object_is_refused() -> None:
    with pytest.raises(metadata.NotACodeObject, match="not a little-endian 64-bit ELF"):
        metadata.kernels(b"MZ" + bytes(100))
    elf = OBJECTS[0].read_bytes()
    with pytest.raises(metadata.NotACodeObject, match="cut off"):
        metadata.kernels(elf[:100])
    with pytest.raises(metadata.NotACodeObject, match="no AMDGPU metadata note"):
        metadata.kernels(elf.replace(b"AMDGPU\0", b"AMDGPX\0"))
    with pytest.raises(metadata.NotACodeObject, match="unknown MessagePack tag 0xc1"):
        metadata._unpack(b"\xc1", 0)


def test_report_lists_every_kernel_and_names_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(disassembly, "OBJDUMP", "llvm-objdump-that-is-not-there")
    result = CliRunner().invoke(cli.app, ["report"])
    assert result.exit_code == 0
    for name in VARIANTS:
        assert re.sub("_(rtne|rtna|rtz)$", "_*", name) in result.output
    assert "apt-get install llvm-19" in " ".join(result.output.split())


@pytest.mark.llvm
def test_report_counts_the_hot_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    result = CliRunner().invoke(cli.app, ["report"])
    text = " ".join(result.output.split())
    found = re.search(r"attention_dense_bf16_d128_\*: (\d+) = ((?:\d+ [\w-]+(?: \+ )?)+)", text)
    assert found is not None, text
    cells = {name: int(n) for n, name in re.findall(r"(\d+) ([\w-]+)", found[2])}
    # 384 rows x 64 keys x 128 x 2 products, 8192 flop each, over 8 waves; two barriers a K block.
    assert cells["MFMA"] == 384 * 64 * 128 * 4 // 8192 // 8
    assert cells["barrier"] == 2
    assert "scratch" not in cells
    assert cells["LDS-DMA"] == 64 // 4
    assert int(found[1]) == sum(cells.values())


@pytest.mark.llvm
def test_check_lists_every_difference(tmp_path: Path) -> None:
    directory, sources = tmp_path / "k", tmp_path / "src"
    sources.mkdir()
    for name in ("plan_lpt.hip", "isa.h", "hip_shim.h", "params.h", "geometry.h"):
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
    with pytest.raises(disassembly.ToolMissing, match="apt-get install clang-19 lld-19 llvm-19"):
        build.find_compiler("clang++-that-is-not-there")
    with pytest.raises(FileNotFoundError, match=r"no kernel sources at .* from a checkout"):
        build.build(tmp_path, tmp_path / "nowhere")


def test_manifest_survives_its_own_json() -> None:
    manifest = kernels.manifest()
    document = json.loads(json.dumps({"format": 1, **dataclasses.asdict(manifest)}))
    assert kernels.parse(document) == manifest
