"""Pictures of skipped tiles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from liteattention_rocm.lite import bitmap
from liteattention_rocm.lite.picture import draw_steps, draw_tiles
from liteattention_rocm.lite.statistics import SkipStatistics

from .test_statistics import recorded


def test_picture_draws_every_head(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    kept = torch.rand(1, 3, 6, 40, generator=torch.manual_seed(0)) < 0.6
    all_heads = draw_tiles(kept, tmp_path / "all.png", title="step 3")
    one = draw_tiles(bitmap.pack(kept), tmp_path / "one.png", k_blocks=40, heads=[1])
    wide, narrow = imread(all_heads), imread(one)
    assert wide.shape[1] == 3 * narrow.shape[1]
    dark = (abs(narrow[..., :3] - torch.tensor([0x1F, 0x4E, 0x9C]).numpy() / 255) < 0.01).all(-1)
    light = (abs(narrow[..., :3] - torch.tensor([0xE9, 0xEC, 0xF2]).numpy() / 255) < 0.01).all(-1)
    share = light.sum() / (dark.sum() + light.sum())
    assert abs(share - float((~kept[0, 1]).float().mean())) < 0.02


def test_picture_by_step_shows_the_grid(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = draw_steps(recorded(), tmp_path / "steps.png", title="two layers")
    image = torch.from_numpy(imread(path)[..., :3].copy())
    # viridis: yellow is the most, dark violet nothing
    yellow = (image - torch.tensor([0.993, 0.906, 0.144])).abs().sum(-1) < 0.05
    violet = (image - torch.tensor([0.267, 0.005, 0.329])).abs().sum(-1) < 0.05
    left_of_bar = int(0.75 * image.shape[1])
    rows = lambda mask: mask[:, :left_of_bar].nonzero()[:, 0].float().mean()  # noqa: E731
    assert yellow[:, :left_of_bar].float().mean() > 0.05
    assert rows(yellow) < rows(violet), "layer b, which skips, is drawn above layer a"


def test_picture_by_step_needs_calls(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no calls are recorded"):
        draw_steps(SkipStatistics(), tmp_path / "none.png")


def test_picture_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.png"
    tiles = bitmap.full(1, 2, 3, 40)
    with pytest.raises(ValueError, match="give k_blocks, or a bool mask"):
        draw_tiles(tiles, path)
    with pytest.raises(TypeError, match=r"int32 bitmap or a bool mask, got torch.float32"):
        draw_tiles(torch.ones(3, 4), path)
    with pytest.raises(ValueError, match=r"takes .B, H, q_blocks, K_blocks."):
        draw_tiles(torch.ones(4, dtype=torch.bool), path)
    with pytest.raises(ValueError, match=r"nothing to draw: 1 x 2 heads .* asked for \[2\]"):
        draw_tiles(tiles, path, k_blocks=40, heads=[2])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "liteattention-rocm\[bench\]"'):
        draw_tiles(tiles, path, k_blocks=40)
