"""What the suite does with an engine, a model or a file that is not there."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from liteattention_e2e import busy, cli, config, runner, suite
from liteattention_e2e.config import load_config
from liteattention_emulator import library
from liteattention_rocm import engines

ROOT = Path(__file__).parents[2]
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
        named = text.endswith("add --emulate, which runs it in software")
        assert named == (command == ["generate"])


def test_without_hip_generate_is_brief(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "engine 'gfx942' cannot run here: no HIP run-time: none is loaded; libamdhip64.so.7: "
        "cannot open shared object file: No such file or directory; libamdhip64.so: cannot open "
        "shared object file: No such file or directory: install PyTorch for ROCm"
    )
    monkeypatch.setattr(config, "load_config", Mock(side_effect=ValueError(line)))
    outcome = CliRunner().invoke(app, ["generate", "--engine", "gfx942"])
    text = " ".join(outcome.stderr.split())
    assert outcome.exit_code == 2
    assert "none is loaded: install PyTorch for ROCm; or add --emulate" in text


def test_emulate_contradicts_another_engine(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITEATTENTION_HIP_LIBRARY", NOWHERE)
    monkeypatch.setenv("LITEATTENTION_EMULATOR_LIBRARY", "/nowhere/emulator.so")
    outcome = CliRunner().invoke(app, ["generate", "--emulate", "--engine", "cpu"])
    assert outcome.exit_code == 2
    assert "--emulate is for engine gfx942, got --engine cpu" in outcome.stderr
    assert "--emulate: " in outcome.stderr.replace("--emulate is", "")
    words = ["generate", "--emulate", "--device", "cuda", "--steps", "0"]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 2 and "PyTorch sees no GPU" not in outcome.stderr
    for part in ("--emulate runs on the CPU: leave --device cuda out", "--steps=0: must be at"):
        assert part in outcome.stderr


def test_a_wrong_variable_of_the_emulator_is_one_of_the_errors(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITEATTENTION_HIP_LIBRARY", "")
    monkeypatch.setenv("LITEATTENTION_EMULATOR_STEPS", "none")
    wanted = (
        "LITEATTENTION_EMULATOR_STEPS must be a number above 0, got 'none'",
        "--steps=0: must",
    )
    for words in (["generate", "--emulate"], ["e2e", "--engine", "gfx942"]):
        outcome = CliRunner().invoke(app, [*words, "--steps", "0"])
        assert outcome.exit_code == 2 and all(part in outcome.stderr for part in wanted)
        monkeypatch.setenv("LITEATTENTION_HIP_LIBRARY", str(library()))
        engines.settings.cache_clear()


def test_a_second_gpu_is_waited_for_and_a_missing_one_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", waited)
    runner._Stopwatch(SimpleNamespace(device="cuda:1"), busy.Meter()).wait()
    waited.assert_called_once_with(torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given = {"model": "x", "prompts": ["p"], "attention": "diffusers"}
    assert load_config({**given, "device": "cuda:1"}).device == "cuda:1"
    with pytest.raises(ValueError, match="'cuda:2' is asked for, and PyTorch sees cuda:0, cuda:1"):
        load_config({**given, "device": "cuda:2"})


def test_whose_cross_attention_it_is() -> None:
    base = {"model": "a/b", "prompts": ["x"]}
    assert not load_config(base).dense_cross_attention
    assert load_config({**base, "cross_attention": "dense"}).dense_cross_attention
    only_theirs = {**base, "attention": "diffusers", "engine": "gfx942"}
    assert not load_config({**only_theirs, "cross_attention": "dense"}).dense_cross_attention
    with pytest.raises(ValueError, match="cross_attention"):
        load_config({**base, "cross_attention": "theirs"})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a copy of the package that lies in no checkout, nor does the current folder."""
    name = "installed_e2e"
    shutil.copytree(Path(cli.__file__).parent, tmp_path / "site-packages" / name)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    yield name
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


def test_an_installed_package_takes_what_the_current_checkout_has(installed: str) -> None:
    config = importlib.import_module(f"{installed}.config")
    e2e = Path(cli.__file__).parents[1]
    Path("e2e").symlink_to(e2e, target_is_directory=True)
    found = config.load_config({})
    assert Path(found.model).samefile(e2e / "model" / "wan-shapes")
    assert list(found.prompts) == config.read_prompts(e2e / "prompts" / "shapes.txt")


def test_a_checkout_takes_its_own_wherever_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "e2e" / "model" / "wan-shapes").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    e2e = Path(cli.__file__).parents[1]
    assert Path(load_config({}).model).samefile(e2e / "model" / "wan-shapes")


@pytest.mark.parametrize(
    ("given", "thresholds", "budgets"),
    [
        ([], None, "0.05"),
        (["--budget", "0.05"], None, "0.05"),
        (["--threshold", "-2", "--budget", "0.05"], "-2", "0.05"),
    ],
)
def test_a_video_is_made_by_a_threshold_or_a_budget(
    app: typer.Typer,
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    thresholds: str | None,
    budgets: str | None,
) -> None:
    seen: dict[str, Any] = {}

    def load(options: dict[str, Any], console: Any, called: Any, problems: Any) -> None:
        seen.update(options)
        raise typer.Exit(3)

    monkeypatch.setattr(cli, "load", load)
    assert CliRunner().invoke(app, ["generate", *given]).exit_code == 3
    assert (seen["thresholds"], seen["budgets"]) == (thresholds, budgets)


def test_an_installed_package_says_that_it_has_no_model(installed: str) -> None:
    commands = importlib.import_module(f"{installed}.cli")
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("e2e")(commands.e2e)
    app.command("generate")(commands.generate)
    install = (
        "install liteattention-rocm-model (pip install ./e2e/model in a checkout, or the wheel of "
        "that name that comes with this one), or "
    )
    model, prompts = (
        f"--{name}: the package has none of its own, and there is no 'e2e/{path}' in the current "
        f"folder: {cure}give --{name}, or run at the top of a checkout"
        for name, path, cure in (
            ("model", "model/wan-shapes", install),
            ("prompts", "prompts/shapes.txt", ""),
        )
    )
    for command, expected in (
        (["generate"], [model]),
        (["generate", "--steps", "x"], [model, "--steps=x: "]),
        (["e2e"], [model, prompts]),
        (["e2e", "--model", "some/where"], [prompts]),
    ):
        outcome = CliRunner().invoke(app, command)
        assert outcome.exit_code == 2
        lines = [line.strip() for line in outcome.stderr.splitlines()[1:]]
        assert len(lines) == len(expected)
        assert lines[0] == expected[0]
        assert all(line.startswith(e) for line, e in zip(lines, expected, strict=True)), lines


def test_an_installed_package_finds_the_distribution_of_the_model(
    installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is built as `pip install ./e2e/model` does, and read from where a wheel puts it."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    source = shutil.copytree(ROOT / "e2e" / "model", tmp_path / "source")
    subprocess.run([*command, "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("liteattention_rocm_model-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = Path(importlib.import_module(f"{installed}.config")._default("model"))
    assert found == tmp_path / "site" / "liteattention_model" / "wan-shapes"
    wanted = ROOT / "e2e" / "model" / "wan-shapes"
    for file in (path for path in wanted.rglob("*") if path.is_file()):
        assert (found / file.relative_to(wanted)).read_bytes() == file.read_bytes()
    sys.modules.pop("liteattention_model", None)


def test_the_recommended_setting_is_what_generate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def load(options: dict[str, Any], *_: Any) -> None:
        seen.append(options)
        raise typer.Exit(3)

    monkeypatch.setattr(cli, "load", load)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("generate")(cli.generate)
    for words in ([], ["--dense-steps", "0"], ["--threshold", "-4"]):
        assert CliRunner().invoke(app, words).exit_code == 3
    fields = ("model", "prompts", "thresholds", "budgets", "policy")
    configs = [load_config({name: one[name] for name in fields}) for one in seen]
    recommended, no_dense, threshold = (config.configurations()[-1] for config in configs)
    assert recommended.name == "lite budget 0.05"
    assert (recommended.policy.budget, recommended.policy.warmup_steps) == (0.05, 4)
    assert suite.notes(configs[0]) == ["Dense in the first 4 steps: lite budget 0.05."]
    assert no_dense.policy.warmup_steps == 0
    assert (threshold.name, threshold.policy.warmup_steps) == ("lite -4", 0)
