"""Tables of tiles: what is measured, what is kept, and that nothing else is ever used."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from liteattention_rocm.contract import DenseRequest
from liteattention_rocm.engines.triton import tiles, tuning
from liteattention_rocm.engines.triton.launch import HopperTile, PlainTile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tuning.DIRECTORY_VARIABLE, str(tmp_path))
    tuning._table.cache_clear()
    return tmp_path


def request(length: int = 8192, head_dim: int = 128, causal: bool = False) -> DenseRequest:
    return DenseRequest(
        1, 4, 4, length, length, head_dim, torch.bfloat16, torch.device("cpu"), "bhsd",
        0.1, causal, "rtne", False,
    )  # fmt: skip


def test_the_fastest_is_kept_for_its_class_alone() -> None:
    shipped = tiles.plain(request())
    best = PlainTile(64, 64, 8, 4)
    assert best != shipped

    def measure(tile: object) -> float:
        return 1.0 if tile == best else 2.0

    ranked = tuning.tune("plain", request(), measure)
    assert next(iter(ranked)) == best and len(ranked) == len(tuning.space("plain", 128))
    assert tiles.plain(request()) == best
    assert tiles.plain(request(5000)) == best  # the same power of two
    others = (request(8193), request(causal=True), request(head_dim=64))
    assert all(tuning.tuned("plain", other) is None for other in others)
    assert tiles.hopper(request()) == tiles._HOPPER[128, False]


def test_candidates_that_cannot_run_are_left_out() -> None:
    def measure(tile: object) -> float:
        assert isinstance(tile, HopperTile)
        if tile.groups == 3:
            raise RuntimeError("out of resources")
        return float(tile.stages)

    ranked = tuning.tune("hopper", request(head_dim=64), measure, rounds=3)
    assert all(isinstance(tile, HopperTile) and tile.groups == 2 for tile in ranked)

    def never(_: object) -> float:
        raise RuntimeError("out of resources")

    with pytest.raises(RuntimeError, match="no tile of the plain kernel runs here: out of res"):
        tuning.tune("plain", request(), never)


def test_entries_of_other_classes_stay(folder: Path) -> None:
    tuning.tune("plain", request(), lambda _: 1.0, [PlainTile(64, 64, 4, 2)])
    tuning.tune("plain", request(causal=True), lambda _: 1.0, [PlainTile(64, 64, 8, 2)])
    (path,) = folder.iterdir()
    assert len(json.loads(path.read_text())) == 2
    assert tiles.plain(request()) == PlainTile(64, 64, 4, 2)


@pytest.mark.parametrize("text", ["{", '{"plain x": {"tile": {"rows": 1}}}', '{"other x": {}}'])
def test_a_damaged_table_is_reported_and_ignored(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    tuning.table_path(torch.device("cpu")).write_text(text)
    assert tiles.plain(request()) == tiles._PLAIN[128]
    assert "unusable" in caplog.text


def test_no_candidate_has_other_blocks_of_keys() -> None:
    """Their width is part of the result: LiteAttention at -inf equals dense bit for bit."""
    for head_dim in (64, 128):
        for kind, shipped in (("plain", tiles._PLAIN[head_dim]), ("hopper", tiles._HOPPER_LITE)):
            found = tuning.space(kind, head_dim)
            assert {tile.block_n for tile in found} == {shipped.block_n}
            assert len(set(found)) == len(found)
        dense = (tiles._HOPPER[head_dim, False], tiles._HOPPER[head_dim, True])
        assert set(dense) <= set(tuning.space("hopper", head_dim))
        plain = tiles._PLAIN[head_dim]
        assert dataclasses.replace(plain) in tuning.space("plain", head_dim)
