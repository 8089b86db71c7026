"""The lane maps, replayed on the host through a model of the matrix instruction."""

from __future__ import annotations

import subprocess
from pathlib import Path

from liteattention_rocm.contract import MI300X_GEOMETRY
from liteattention_rocm.engines.gfx942 import manifest

from .conftest import SOURCES


def test_products_come_out_through_the_lane_maps(replay: Path) -> None:
    done = subprocess.run([replay], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_argument_blocks_are_the_parameter_structs(replay: Path) -> None:
    text = subprocess.run([replay, "sizes"], capture_output=True, text=True, check=True).stdout
    sizes = {name: int(size) for name, size in (line.split() for line in text.splitlines())}
    assert set(sizes) == {Path(o.file).stem for o in manifest.read().objects}
    for entry in manifest.read().objects:
        size = sizes[Path(entry.file).stem]
        for kernel in entry.kernels:
            assert kernel.kernarg_bytes == size
            assert [(a.offset, a.size, a.kind) for a in kernel.kernarg] == [(0, size, "by_value")]


def test_the_tile_is_the_one_python_speaks_of() -> None:
    text = (SOURCES / "geometry.h").read_text(encoding="utf-8")
    assert f"kKBlock = {MI300X_GEOMETRY.k_block};" in text
    assert f"kWaveRows = {MI300X_GEOMETRY.vote_rows};" in text
    assert MI300X_GEOMETRY.q_block == 8 * MI300X_GEOMETRY.vote_rows
