"""The command line: ``liteattention-rocm``.

The library brings ``env`` and ``plan``; suites and benchmarks add their own commands through the
entry-point group ``liteattention_rocm.commands`` (a function or a typer app each), so that the
library does not import them.
"""

from __future__ import annotations

import logging
from importlib.metadata import entry_points

import typer
from rich.logging import RichHandler

from . import collect_env, plan

COMMANDS_GROUP = "liteattention_rocm.commands"


def build() -> typer.Typer:
    """Return the root command with everything that is installed."""
    root = typer.Typer(
        help="Attention for AMD MI300X and everything else: generate, measure, inspect.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    @root.callback()
    def options(
        verbose: bool = typer.Option(False, "--verbose", "-v", help="Show log lines."),
    ) -> None:
        logging.basicConfig(
            level=logging.INFO if verbose else logging.WARNING,
            format="%(message)s",
            handlers=[RichHandler(show_path=False)],
        )

    @root.command("env")
    def env() -> None:
        """Print what this machine and installation have (for bug reports)."""
        typer.echo(collect_env.report())

    root.command("plan")(plan.command)

    for entry in sorted(entry_points(group=COMMANDS_GROUP), key=lambda e: e.name):
        command = entry.load()
        if isinstance(command, typer.Typer):
            root.add_typer(command, name=entry.name)
        else:
            root.command(entry.name)(command)
    return root


def main() -> None:
    """Run the command line."""
    build()()
