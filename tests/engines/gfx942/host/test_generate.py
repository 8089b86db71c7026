"""A video from text whose attention is the MI300X machine code, run in software."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from liteattention_rocm import MI300X_GEOMETRY
from liteattention_rocm.contract import Bound, LiteRequest, LiteTensors, Request
from liteattention_rocm.engines import gfx942, reference
from liteattention_rocm.lite import bitmap

PROMPT = "a red circle moves right on a blue background"


@pytest.fixture
def voted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tiles walked and tiles kept by each LiteAttention step; its lists equal the oracle's."""
    seen: list[tuple[int, int]] = []
    bind = gfx942.Gfx942Engine.bind

    def checked(self: gfx942.Gfx942Engine, request: Request, like: Any) -> Bound:
        run = bind(self, request, like)
        if not isinstance(request, LiteRequest):
            return run
        assert request.geometry == MI300X_GEOMETRY

        def step(t: LiteTensors) -> None:
            run(t)
            expected, _ = reference.vote(request, t.q, t.k, t.read, t.must_do, t.must_skip)
            assert torch.equal(t.write, bitmap.pack(expected))
            seen.append((int(bitmap.count(t.read)), int(bitmap.count(t.write))))

        return step

    monkeypatch.setattr(gfx942.Gfx942Engine, "bind", checked)
    return seen


@pytest.mark.usefixtures("emulator")
def test_generate_emulated(app: typer.Typer, tmp_path: Path, voted: list[tuple[int, int]]) -> None:
    outcome = CliRunner().invoke(
        app,
        ["generate", PROMPT, "--emulate", "--height", "48", "--width", "48", "--frames", "4",
         "--steps", "2", "--guidance", "1", "--threshold=-1", "--out", str(tmp_path)],
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    report = json.loads((tmp_path / "report.json").read_text())
    diffusers, dense, lite = report["configurations"]
    assert [diffusers["name"], dense["name"], lite["name"]] == ["diffusers", "dense", "lite -1"]
    settings = report["settings"]
    assert settings["emulated"] and settings["cross_attention"] == "dense"
    assert settings["warmup_runs"] == 0 and settings["tokens"] == 576
    assert settings["geometry"] == {"q_block": 256, "k_block": 64, "vote_rows": 32}
    # seconds of an emulator are compared with nothing
    assert all(
        value is None for item in report["configurations"] for value in item["speedup"].values()
    )
    assert report["artefacts"]["plots"] == ["sparsity_by_step.png", "sparsity_by_layer_lite_-1.png"]
    # the machine code makes the same picture as the pipeline's own attention, within bf16
    assert dense["quality"]["vs_diffusers"]["psnr_db_mean"] > 35
    assert lite["quality"]["vs_dense"]["psnr_db_mean"] > 20
    # every layer skipped with the oracle's lists, and the report says how much
    assert len(voted) == 2 * len(lite["sparsity"]["by_layer"])
    assert any(kept < walked for walked, kept in voted)
    tiles = sum(9 * 3 * 3 for _ in voted)  # K blocks, q blocks, heads
    assert lite["sparsity"]["mean"] == pytest.approx(1 - sum(n for n, _ in voted) / tiles)
    assert 0 < lite["sparsity"]["mean"] < lite["sparsity"]["last_step"] < 1
    frames = np.load(tmp_path / "frames_p0_s0.npz")
    assert frames["dense"].shape == frames["lite_-1"].shape == (4, 48, 48, 3)
    text = " ".join((tmp_path / "report.md").read_text().split())
    for part in ("say nothing about a GPU", "Cross-attention ran on engine gfx942, too"):
        assert part in text and part in " ".join(outcome.stderr.split())
    assert " s |" not in text and "denoise s" not in outcome.stderr
    assert "emulated" in outcome.stderr and "left out" not in text + outcome.stderr
