"""The committed code objects are what the manifest says, and what the sources build."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from liteattention_rocm.engines.gfx942 import manifest
from liteattention_tools import build, metadata

from .variants import KERNELS

OBJECTS = sorted(manifest.DIRECTORY.glob("*.co"))
VARIANTS = {name for name, _ in KERNELS}


def test_every_kernel_is_there_once() -> None:
    names = [k.name for o in manifest.read().objects for k in o.kernels]
    assert len(names) == len(set(names))
    assert set(names) == VARIANTS and len(VARIANTS) == 125


def test_the_manifest_describes_the_committed_bytes() -> None:
    described = manifest.read()
    assert [o.file for o in described.objects] == [p.name for p in OBJECTS]
    for entry, path in zip(described.objects, OBJECTS, strict=True):
        elf = path.read_bytes()
        assert entry.sha256 == hashlib.sha256(elf).hexdigest()
        assert entry.bytes == len(elf)
        assert entry.code_object_version == metadata.code_object_version(elf) == 5
        assert metadata.target(elf) == described.target == "gfx942"
        assert entry.kernels == metadata.kernels(elf)


def test_the_objects_belong_to_the_sources_beside_them() -> None:
    assert manifest.read().sources == build.source_hashes()


def test_limits_of_the_machine() -> None:
    for entry in manifest.read().objects:
        for kernel in entry.kernels:
            assert kernel.vgpr_spills == kernel.sgpr_spills == kernel.scratch_bytes == 0
            # 512 threads are two waves on each SIMD: 256 of its 512 registers a lane each.
            assert kernel.vgprs <= 256 * 512 // max(512, kernel.max_workgroup)
            assert kernel.lds_bytes <= 64 * 1024


def test_variants_are_read_from_names() -> None:
    _, kernel = manifest.read().find("attention_dense_bf16_d64_rtz")
    assert kernel.variant == {"head_dim": 64, "rounding": "rtz"}
    assert metadata.variant("plan_lpt") == {}
    with pytest.raises(KeyError, match="no kernel 'attention' in the manifest: it has attention_d"):
        manifest.read().find("attention")


def test_load_refuses_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifest.load("plan_lpt.co") == (manifest.DIRECTORY / "plan_lpt.co").read_bytes()
    with pytest.raises(KeyError, match=r"no code object 'x.co' in the manifest"):
        manifest.load("x.co")
    shutil.copytree(manifest.DIRECTORY, tmp_path / "k")
    with (tmp_path / "k" / "plan_lpt.co").open("r+b") as file:
        file.seek(0x200)
        file.write(b"\xff")
    monkeypatch.setattr(manifest, "DIRECTORY", tmp_path / "k")
    with pytest.raises(ValueError, match=r"has SHA-256 .* the manifest says"):
        manifest.load("plan_lpt.co")


def test_another_manifest_format_is_refused() -> None:
    with pytest.raises(ValueError, match="manifest of format 2: this package reads format 1"):
        manifest.parse({"format": 2})


def test_manifest_survives_its_own_json() -> None:
    described = manifest.read()
    document = json.loads(json.dumps({"format": 1, **dataclasses.asdict(described)}))
    assert manifest.parse(document) == described


@pytest.mark.parametrize(
    "text",
    ["[]", "1", '{"format": 0}', json.dumps({"format": manifest.FORMAT}),
     json.dumps({"format": manifest.FORMAT, "objects": 1}),
     json.dumps({"format": manifest.FORMAT, "objects": [1]}),
     json.dumps({"format": manifest.FORMAT, "objects": [{"kernels": [{"kernarg": [{}]}]}]}),
     "[" * 100_000 + "]" * 100_000, "no JSON"],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_a_manifest_of_another_shape_is_one_clear_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        manifest.load_document(file)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
