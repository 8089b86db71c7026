"""What the suite does with an engine, a model or a file that is not there."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from liteattention_e2e import cli
from liteattention_e2e.config import load_config

NOWHERE = "/nowhere/libhip.so"


def test_an_engine_without_its_device_is_one_error(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITEATTENTION_HIP_LIBRARY", NOWHERE)
    for command in (["generate"], ["e2e", "--attention", "dense"]):
        outcome = CliRunner().invoke(app, [*command, "--engine", "gfx942"])
        assert outcome.exit_code == 2
        text = " ".join(outcome.stderr.split())
        assert text.count("engine 'gfx942' cannot run here") == 1
        assert NOWHERE in text and "use engine='cpu'" in text


def test_emulate_contradicts_another_engine(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITEATTENTION_HIP_LIBRARY", NOWHERE)
    monkeypatch.setenv("LITEATTENTION_EMULATOR_LIBRARY", "/nowhere/emulator.so")
    outcome = CliRunner().invoke(app, ["generate", "--emulate", "--engine", "cpu"])
    assert outcome.exit_code == 2
    assert "--emulate is for engine gfx942, got --engine cpu" in outcome.stderr
    assert "--emulate: " in outcome.stderr.replace("--emulate is", "")


def test_whose_cross_attention_it_is() -> None:
    base = {"model": "a/b", "prompts": ["x"]}
    assert not load_config(base).dense_cross_attention
    assert load_config({**base, "cross_attention": "dense"}).dense_cross_attention
    only_theirs = {**base, "attention": "diffusers", "engine": "gfx942"}
    assert not load_config({**only_theirs, "cross_attention": "dense"}).dense_cross_attention
    with pytest.raises(ValueError, match="cross_attention"):
        load_config({**base, "cross_attention": "theirs"})


def test_an_installed_package_says_that_it_has_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    shutil.copytree(Path(cli.__file__).parent, site / "installed_e2e")
    monkeypatch.syspath_prepend(site)
    installed = importlib.import_module("installed_e2e.cli")
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("e2e")(installed.e2e)
    app.command("generate")(installed.generate)
    wanted = " is part of the repository, not of the package: run from a checkout or give --"
    model, prompts = (
        f"{name}: {str(site / folder)!r}{wanted}{name}"
        for name, folder in (("model", "model/wan-shapes"), ("prompts", "prompts/shapes.txt"))
    )
    for command, expected in (
        (["generate"], [model]),
        (["generate", "--steps", "x"], [model, "steps: "]),
        (["e2e"], [model, prompts]),
        (["e2e", "--model", "some/where"], [prompts]),
    ):
        outcome = CliRunner().invoke(app, command)
        assert outcome.exit_code == 2
        lines = [line.strip() for line in outcome.stderr.splitlines()[1:]]
        assert len(lines) == len(expected)
        assert lines[0] == expected[0]
        assert all(line.startswith(e) for line, e in zip(lines, expected, strict=True)), lines
