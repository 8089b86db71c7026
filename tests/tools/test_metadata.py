"""What the tools read off code objects."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from liteattention_rocm.engines.gfx942 import manifest
from liteattention_tools import metadata
from liteattention_tools.__main__ import app

OBJECTS = sorted(manifest.DIRECTORY.glob("*.co"))


def test_what_is_no_code_object_is_refused() -> None:
    with pytest.raises(metadata.NotACodeObject, match="not a little-endian 64-bit ELF"):
        metadata.kernels(b"MZ" + bytes(100))
    elf = OBJECTS[0].read_bytes()
    with pytest.raises(metadata.NotACodeObject, match="cut off"):
        metadata.kernels(elf[:100])
    with pytest.raises(metadata.NotACodeObject, match="no AMDGPU metadata note"):
        metadata.kernels(elf.replace(b"AMDGPU\0", b"AMDGPX\0"))
    at = elf.index(b"amdhsa.kernels") - 2  # the map's tag
    with pytest.raises(metadata.NotACodeObject, match="no MessagePack"):
        metadata.kernels(elf[:at] + b"\xc1" + elf[at + 1 :])


def test_report_lists_every_kernel_and_counts_its_hot_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    result = CliRunner().invoke(app, ["report"])
    assert result.exit_code == 0
    for name in (k.name for o in manifest.read().objects for k in o.kernels):
        assert re.sub("_(rtne|rtna|rtz)$", "_*", name) in result.output
    text = " ".join(result.output.split())
    found = re.search(r"attention_dense_bf16_d128_\*: (\d+) = ((?:\d+ [\w-]+(?: \+ )?)+)", text)
    assert found is not None, text
    cells = {name: int(n) for n, name in re.findall(r"(\d+) ([\w-]+)", found[2])}
    # 256 rows x 64 keys x 128 x 2 products, 16384 flop each, over 8 waves; two barriers a K block.
    assert cells["MFMA"] == 256 * 64 * 128 * 4 // 16384 // 8
    assert cells["barrier"] == 2
    assert "scratch" not in cells
    # All of K, over the four waves of group A, and the four fragments of V that Pv begins with.
    assert cells["LDS-DMA"] == 64 // 4 + 4
    assert int(found[1]) == sum(cells.values())
