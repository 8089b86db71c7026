"""The command line: ``liteattention-rocm``.

The library brings ``env`` and ``plan``; suites and benchmarks add their own commands through the
entry-point group ``liteattention_rocm.commands`` (a function or a typer app each), so that the
library does not import them. A command whose packages are missing says so; the others work.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import typer
from rich.logging import RichHandler

from .. import __version__
from . import env
from .needs import explain

COMMANDS_GROUP = "liteattention_rocm.commands"


def build() -> typer.Typer:
    """Return the root command with everything that is installed."""
    root = typer.Typer(
        help="Attention for AMD MI300X, CPUs and other GPUs: generate, measure, inspect.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    @root.callback()
    def options(
        verbose: bool = typer.Option(False, "--verbose", "-v", help="Show log lines."),
        version: bool = typer.Option(
            False, "--version", is_eager=True, callback=_version, help="Print the version."
        ),
    ) -> None:
        logging.basicConfig(
            level=logging.INFO if verbose else logging.WARNING,
            format="%(message)s",
            handlers=[RichHandler(show_path=False)],
        )

    root.command("env")(env.command)
    _add(root, "plan", lambda: importlib.import_module(".plan", __package__).command)
    for entry in sorted(entry_points(group=COMMANDS_GROUP), key=lambda e: e.name):
        _add(root, entry.name, entry.load)
    return root


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit()


def _add(root: typer.Typer, name: str, load: Callable[[], Any]) -> None:
    try:
        command = load()
    except (ImportError, OSError) as error:
        _add_unusable(root, name, explain(error))
        return
    if isinstance(command, typer.Typer):
        root.add_typer(command, name=name)
    else:
        root.command(name)(command)


def _add_unusable(root: typer.Typer, name: str, why: str) -> None:
    """Stand in for a command that cannot be imported: say why, whatever it is asked."""

    @root.command(
        name,
        help=f"Not usable here: {why}",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def say() -> None:
        typer.echo(f"liteattention-rocm {name}: {why}", err=True)
        raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    try:
        build()()
    except ImportError as error:
        logging.getLogger(__name__).info("an import failed", exc_info=True)
        typer.echo(f"liteattention-rocm: {explain(error)}", err=True)
        sys.exit(1)
    except OSError as error:  # a full disk behind standard output, as a rule
        logging.getLogger(__name__).info("reading or writing failed", exc_info=True)
        why = " ".join(str(error).split())
        typer.echo(
            f"liteattention-rocm: {why} (liteattention-rocm --verbose shows where)", err=True
        )
        _drop_unwritable()
        sys.exit(1)


def _drop_unwritable() -> None:
    """Drop what standard output holds and cannot write, at which Python's exit would fail again."""
    try:
        if sys.stdout is not None:  # it is None where it was closed before
            sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
