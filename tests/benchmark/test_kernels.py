"""``liteattention-rocm bench kernels``: cells, correctness in the row, absent peers as lines."""

import csv
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import ValidationError

from liteattention_benchmark import cells, contenders, kernels, kernels_report, peers

CPU = torch.device("cpu")
CONFIGS = Path(kernels.__file__).parent / "configs"


def test_smoke_configuration_measures_every_cell(tmp_path: Path) -> None:
    config = cells.load(CONFIGS / "smoke.yaml")
    rows = kernels.run(config, CPU)
    assert {row.cell for row in rows} == {str(cell) for cell in config.cells}
    for row in rows:
        assert row.absent == "" and row.error is not None and row.median_ms is not None
        assert row.error < 6e-3  # bf16
        assert row.p25_ms <= row.median_ms <= row.p75_ms
    text = kernels_report.to_markdown(config, rows, {"torch": "x"}, "command")
    assert " ".join(text.split()).count("| 1,2,1024,64 25% uniform |") == 1
    (tmp_path / "rows.csv").write_text(kernels_report.to_csv(rows, {"torch": "x"}))
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert len(read) == len(rows) and read[0]["torch"] == "x"
    assert [path.name for path in kernels_report.plot(config, rows, tmp_path)] == [
        "kernels-dense.png",
        "kernels-lite.png",
    ]


def test_cells_of_one_size_have_names_of_their_own() -> None:
    size = {"batch": 1, "heads": 1, "length": 64, "head_dim": 64}
    cache = {"requests": 1, "context": 64, "q_heads": 1, "kv_heads": 1, "head_dim": 64}
    lite = [size | {"sparsity": share} for share in (0.5, 0.504)]
    config = cells.Config(
        rounds=3, warmup=1, lite=[*lite, lite[0] | {"dtype": "fp16"}],
        dense=[size, size | {"dtype": "fp16"}], host=[size, size | {"dtype": "fp16"}],
        decode=[cache, cache | {"dtype": "fp16"}, cache | {"page_size": 256}],
        prefill=[cache | {"rows": 8}, cache | {"rows": 8, "dtype": "fp16"}],
    )  # fmt: skip
    assert len({str(cell) for cell in config.cells}) == len(config.cells) == 12


def test_lists_are_compared_with_the_share_of_tiles_that_they_keep() -> None:
    cell = cells.Lite(batch=1, heads=1, length=64, head_dim=64, sparsity=0.5)
    config = cells.Config(rounds=3, warmup=1, lite=(cell,))
    figures = (None, None, 1.0, 1e-3, "")
    rows = [
        kernels.Row("lite", str(cell), name, ms, *figures, kept=0.6)
        for name, ms in (("ours", 2.0), ("ours, lite", 1.8), ("ours, budget", 1.2))
    ]
    text = " ".join(kernels_report.to_markdown(config, rows, {}, "command").split())
    assert "| 60.0% | 1.800 | 1.200 | 2.000 | 1.500 | 1.000 |" in text


def test_a_wrong_result_shows_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = contenders.attention
    monkeypatch.setattr(contenders, "attention", lambda *a, **b: right(*a, **b) * 1.5)
    config = cells.Config(
        rounds=3, warmup=1, dense=({"batch": 1, "heads": 1, "length": 64, "head_dim": 64},)
    )
    found = {row.contender: row for row in kernels.run(config, CPU)}
    assert found["ours"].error == pytest.approx(0.5, abs=0.01)
    assert found["SDPA"].error < 6e-3


def test_a_peer_that_is_not_there_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "sdpa", lambda _: peers.package("no_such_package", "f"))
    config = cells.Config(
        rounds=3, warmup=1, dense=({"batch": 1, "heads": 1, "length": 64, "head_dim": 64},)
    )
    rows = kernels.run(config, CPU)
    assert [(row.contender, row.absent) for row in rows if row.absent] == [
        ("SDPA", "package no_such_package is not installed")
    ]
    text = kernels_report.to_markdown(config, rows, {}, "command")
    assert "- SDPA: package no_such_package is not installed" in text


@pytest.mark.parametrize("pattern", ["uniform", "clustered", "uneven"])
@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.75])
def test_tiles_have_the_sparsity_that_was_asked_for(pattern: str, sparsity: float) -> None:
    cell = cells.Lite(
        batch=1, heads=3, length=8192, head_dim=64, sparsity=sparsity, pattern=pattern
    )
    tiles = contenders.tiles_to_keep(cell, 128, 64)
    assert tiles.shape == (1, 3, 64, 128)
    assert 1 - tiles.float().mean().item() == pytest.approx(sparsity, abs=0.02)
    counts = tiles.sum(-1).float()
    uneven = pattern != "uniform" and sparsity > 0
    assert (counts.std() > 1) == uneven


def test_configurations_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({"rounds": 1, "dense": [{"batch": 1, "head": 2}]}))
    with pytest.raises(ValidationError) as error:
        cells.load(path)
    assert {"rounds", "heads", "head"} <= {
        str(part) for e in error.value.errors() for part in e["loc"]
    }
    for name in ("gpu", "smoke"):
        assert cells.load(CONFIGS / f"{name}.yaml").cells
