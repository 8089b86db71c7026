"""The command line: ``liteattention-rocm``.

The library brings ``env`` and ``plan``; suites and benchmarks add their own commands through the
entry-point group ``liteattention_rocm.commands`` (a function or a typer app each), so that the
library does not import them. A command is imported when it is called: ``--help``, ``--version`` and
the completion of names import none. One whose packages are missing says so; the others work.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .needs import explain
from .options import Command, paragraphs

COMMANDS_GROUP = "liteattention_rocm.commands"
#: First sentences of the commands of this project, for lists of commands.
SUMMARIES = {
    "bench": "Measure kernels against their peers.",
    "calibrate": "Choose budgets by layer, or by head, for a wanted quality.",
    "doctor": "Examine this installation: versions, engines, results of all kernels.",
    "e2e": "Compare attention configurations end to end: time, memory, quality, videos.",
    "emulate": "The software MI300X: run code objects on the CPU.",
    "env": "Print what this machine and installation have (for bug reports).",
    "generate": "Make one video with each attention, and compare them.",
    "model": "Model how long a workgroup takes on a CU of an MI300X, and why.",
    "plan": "Show what a call launches on an MI300X: rounds, parts, workspace.",
}


class Commands(MutableMapping[str, Any]):
    """Commands by name, each imported when it is asked for."""

    def __init__(self) -> None:
        self._loaders: dict[str, Callable[[], Any]] = {
            name: _of_library(name) for name in ("env", "plan")
        }
        for entry in entry_points(group=COMMANDS_GROUP):
            self._loaders[entry.name] = entry.load
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(name, self._loaders[name])
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaders or name in self._loaded

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        self._loaders.pop(name, None)
        self._loaded.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._loaders, *self._loaded}))

    def __len__(self) -> int:
        return len({*self._loaders, *self._loaded})


class Root(TyperGroup):
    """The root command. Lists of commands have names and summaries, which import nothing."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, sorted."""
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A summary where there is one: see :meth:`resolve_command` for the command itself."""
        if cmd_name in SUMMARIES and cmd_name in self.commands:
            return TyperCommand(cmd_name, help=SUMMARIES[cmd_name])
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called."""
        if args[0] in self.commands:
            return args[0], self.commands[args[0]], args[1:]
        return super().resolve_command(ctx, args)


def build() -> typer.Typer:
    """Return the root command with everything that is installed."""
    root = typer.Typer(
        cls=Root,
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
        from rich.logging import RichHandler

        logging.basicConfig(
            level=logging.INFO if verbose else logging.WARNING,
            format="%(message)s",
            handlers=[RichHandler(show_path=False)],
        )

    return root


def _version(asked: bool) -> None:
    if asked:
        from .. import __version__
        from ..collect_env import commit

        typer.echo(f"{__version__} (commit {commit()})")
        raise typer.Exit()


def _of_library(name: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(f".{name}", __package__).command


def _load(name: str, load: Callable[[], Any]) -> Any:
    try:
        found = load()
    except (ImportError, OSError) as error:
        return _unusable(name, explain(error))
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(name, cls=Command)(found)
        return _in_paragraphs(typer.main.get_command(app))
    group = typer.main.get_group(found)
    group.name = name
    return _in_paragraphs(group)


def _in_paragraphs(command: Any) -> Any:
    """Let the help of a command and of those below it wrap where the terminal ends."""
    command.help = paragraphs(command.help)
    for inner in getattr(command, "commands", {}).values():
        _in_paragraphs(inner)
    return command


def _unusable(name: str, why: str) -> Any:
    """Stand in for a command that cannot be imported: say why, whatever it is asked."""
    app = typer.Typer(add_completion=False)

    @app.command(
        name,
        help=f"Not usable here: {why}",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def say() -> None:
        typer.echo(f"liteattention-rocm {name}: {why}", err=True)
        raise typer.Exit(1)

    return typer.main.get_command(app)


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
