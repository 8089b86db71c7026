"""Options are called what the documentation calls them, whatever version of typer there is."""

import typing
from collections.abc import Callable
from typing import Any

import pytest

from liteattention_e2e import cli


@pytest.mark.parametrize("command", [cli.e2e, cli.generate])
def test_no_metavar_is_the_name_of_its_option(command: Callable[..., Any]) -> None:
    """typer 0.27 would call such an option by its metavar: ``--DEVICE``."""
    hints = typing.get_type_hints(command, include_extras=True)
    infos = {name: hint.__metadata__[0] for name, hint in hints.items() if name != "return"}
    assert {"device", "dtype"} <= infos.keys()
    assert not [name for name, info in infos.items() if (info.metavar or "").lower() == name]
