"""``bench mapping``: what it models, its tables and pictures."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from liteattention_benchmark import mapping, mapping_published
from liteattention_benchmark.cli import app
from liteattention_rocm import _core

SMALL = mapping.Shape("GQA", 2, 8, 4, 1024, 64)


def case(name: str, shape: mapping.Shape = SMALL, **changes: float) -> mapping.Case:
    return replace(mapping.Case(shape, name), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", mapping.MAPPINGS)
def test_a_workgroup_reads_every_block_of_its_kv_head(name: str) -> None:
    asked = case(name)
    reads = asked.reads()
    assert asked.whole and len(reads) == 2 * 8 * 8
    tiles = _core.tiles_of(getattr(_core.Mapping, name), 16, 8, 128)
    for (first, stride, count), tile in zip(reads.tolist(), tiles.tolist(), strict=True):
        batch, head = divmod(tile // 8, 8)
        assert (first, stride, count) == ((batch * 4 + head // 2) * 16, 1, 16)
    assert asked.total_bytes == 128 * 16 * 2 * 64 * 64 * 2  # K and V, 64 keys, bf16


def test_a_long_launch_is_cut_and_its_steps_vary_as_much_more() -> None:
    shape = mapping.Shape("MHA", 1, 64, 64, 8192)
    whole, cut = case("naive_head_first", shape), case("naive_head_first", shape, million_reads=0.2)
    assert whole.whole and not cut.whole
    assert cut.workgroups % cut.slots == 0 and cut.workgroups >= 3 * cut.slots
    assert (cut.reads() == whole.reads()[: cut.workgroups]).all()
    rounds = whole.workgroups / cut.workgroups
    usual = whole.chip()["compute_jitter"]
    assert cut.chip()["compute_jitter"] == pytest.approx(usual * rounds**0.5)


def test_block_first_reads_more_from_hbm_than_swizzled_head_first() -> None:
    shape = mapping.Shape("MHA 64", 4, 64, 64, 8192)
    rows = mapping.run([case(name, shape, million_reads=0.3) for name in mapping.MAPPINGS])
    head, _, _, block = rows
    assert head.l2 > 0.9 and head.relative == 1
    assert block.l2 < 0.2 and block.relative < 0.8
    assert block.bytes_by_level["hbm"] > 5 * head.bytes_by_level["hbm"]
    for row in rows:
        assert sum(row.bytes_by_level.values()) == pytest.approx(row.case.total_bytes)


def test_larger_tiles_read_less() -> None:
    ours, theirs = (
        mapping.run_case(replace(case(mapping.MAPPINGS[0]), kernel=kernel))
        for kernel in (mapping.OURS, mapping.PAPER)
    )
    assert ours.case.total_bytes * 2 == theirs.case.total_bytes  # tiles of 256 and of 128
    assert (ours.case.kernel.rows, ours.case.kernel.keys) == (_core.GFX942_Q_BLOCK, 64)


def test_the_command_writes_tables_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        mapping, "shapes", lambda batches: [replace(SMALL, batch=b) for b in batches]
    )
    one = mapping_published.Published("a paper", case(mapping.MAPPINGS[1]), "l2", 0, 1, why="small")
    monkeypatch.setattr(mapping_published, "PUBLISHED", (one,))
    done = CliRunner().invoke(app, ["mapping", "--out", str(tmp_path), "--batch", "3"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "mapping.md").read_text()
    (row,) = [row for row in mapping.run(mapping_published.cases()) if row.case == one.case]
    assert f"| {100 * row.l2:.1f} |" in " ".join(text.split()).replace("| ", "| ")
    assert "**no**: small" in text and "GQA, 1K, batch 3" in text
    with (tmp_path / "mapping.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(mapping.MAPPINGS)
    for each in rows:
        assert 0 <= float(each["l2_hit_rate"]) < 1 and each["whole_launch"] == "True"
    for name in ("mapping-128.png", "mapping-256.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_figure_within_its_range_is_not_off() -> None:
    found = mapping.run_case(case(mapping.MAPPINGS[0]))
    rate = 100 * found.l2
    for low, high, off in ((rate - 1, rate + 1, 0), (rate + 3, 100, 3), (0, rate - 4, 4)):
        each = mapping_published.Published("", found.case, "l2", low, high)
        assert each.off(found) == pytest.approx(off)
