"""Options are called what the documentation calls them, whatever version of typer there is."""

import typing
from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from liteattention_e2e import cli


@pytest.mark.parametrize("command", [cli.e2e, cli.generate])
def test_no_metavar_is_the_name_of_its_option(command: Callable[..., Any]) -> None:
    """typer 0.27 would call such an option by its metavar: ``--DEVICE``."""
    hints = typing.get_type_hints(command, include_extras=True)
    infos = {name: hint.__metadata__[0] for name, hint in hints.items() if name != "return"}
    assert {"device", "dtype"} <= infos.keys()
    assert not [name for name, info in infos.items() if (info.metavar or "").lower() == name]


def test_generate_names_each_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the suite prints of its reports is enough."""
    artefacts = {"videos": ["a.mp4"], "contact_sheets": ["sheet.png"]}
    monkeypatch.setattr(cli, "load", lambda *_: None)
    monkeypatch.setattr(cli, "_suite", lambda *_: {"artefacts": artefacts})
    app = typer.Typer()
    app.command()(cli.generate)
    text = CliRunner().invoke(app, ["--model", "x", "--out", "here"]).output
    assert "here/a.mp4" in text and "here/sheet.png" in text and "report" not in text
