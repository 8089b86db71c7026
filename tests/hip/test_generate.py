"""A video from text whose attention is the MI300X machine code, run in software."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from liteattention_e2e import cli

PROMPT = "a red circle moves right on a blue background"


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer(pretty_exceptions_enable=False)
    made.command("e2e")(cli.e2e)
    made.command("generate")(cli.generate)
    return made


@pytest.mark.usefixtures("emulator")
def test_generate_emulated(app: typer.Typer, tmp_path: Path) -> None:
    outcome = CliRunner().invoke(
        app,
        ["generate", PROMPT, "--emulate", "--height", "16", "--width", "16", "--frames", "2",
         "--steps", "2", "--guidance", "1", "--out", str(tmp_path)],
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [item["name"] for item in report["configurations"]] == ["diffusers", "dense"]
    assert report["settings"]["emulated"] and report["settings"]["cross_attention"] == "dense"
    assert report["settings"]["warmup_runs"] == 0
    # seconds of an emulator are compared with nothing
    assert all(
        value is None for item in report["configurations"] for value in item["speedup"].values()
    )
    # the machine code makes the same picture as the pipeline's own attention, within bf16
    assert report["configurations"][1]["quality"]["vs_diffusers"]["psnr_db_mean"] > 35
    frames = np.load(tmp_path / "frames_p0_s0.npz")
    assert frames["dense"].shape == (2, 16, 16, 3)
    text = " ".join((tmp_path / "report.md").read_text().split())
    for part in (
        "LiteAttention was left out: engine gfx942 has no kernel for it yet",
        "say nothing about a GPU",
        "Cross-attention ran on engine gfx942, too",
    ):
        assert part in text and part in " ".join(outcome.stderr.split())
    assert "emulated" in outcome.stderr
