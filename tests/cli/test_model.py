"""``liteattention-rocm model``, as typed."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from liteattention_benchmark.model_cli import model
from liteattention_emulator import Recording
from tests import ROOT

APP = typer.Typer()
APP.command()(model)


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(APP, words)
    return result.exit_code, result.stdout + " ".join(result.stderr.replace("│", " ").split())


def test_the_command_is_registered() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    line = next(row for row in text.splitlines() if row.startswith("model = "))
    value = line.partition("=")[2].strip().strip('"')
    assert EntryPoint("model", value, "liteattention_rocm.commands").load() is model


@pytest.mark.parametrize(("kernel", "dim"), [("dense", 128), ("lite", 64)])
def test_a_shipped_kernel(kernel: str, dim: int, tmp_path: Path) -> None:
    file = tmp_path / "kernel.npz"
    words = ("--kernel", kernel, "--no-range", "--record", str(file), "--rounding", "rtz", "--json")
    code, text = call("--shape", f"2,3,704,{dim}", *words)
    data = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert code == 0 and data["kernel"] == f"attention_{kernel}_bf16_d{dim}_rtz"
    for row in data["waves"]:  # 32 rows of a wave x 64 keys, two products of 32x32x8
        assert row["loop"]["matrix_instructions"] == 2 * 32 * 64 * dim / (32 * 32 * 8)
        assert row["clk_per_block"] == pytest.approx(row["loop"]["clk"])
    found = Recording.load(file)
    assert len(found.waves) == 8 and found.workgroup == 0
    # K and V lie as in tensors of three heads: the rows of K are that far apart.
    lines = {int(line) for wave in found.waves for line in wave.lines}
    assert max(lines) - min(lines) > 3 * 704 * dim * 2 // 128 * 0.9
    code, again = call(str(file), "--no-range", "--json")
    assert json.loads(again)["clk"] == data["clk"]


def test_every_mistake_is_named(tmp_path: Path) -> None:
    code, text = call("--shape", "1,2,3", "--kernel", "x", "--rounding", "y", "--set", "z=1")
    assert code == 2
    for part in ("four positive numbers", "'x'", "'y'", "no constant z"):
        assert part in text
    code, text = call("--shape", "1,1,64,96")
    assert code == 2 and "64 or 128" in text
    for words in ((), ("file.npz", "--shape", "1,1,64,128")):
        code, text = call(*words)
        assert code == 2 and "one of both" in text
    code, text = call(str(tmp_path / "none.npz"))
    assert code == 1 and "No such file" in text
