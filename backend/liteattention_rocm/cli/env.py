"""``liteattention-rocm env``: what a bug report needs."""

from __future__ import annotations

import typer

from .. import collect_env


def command() -> None:
    """Print what this machine and installation have (for bug reports)."""
    typer.echo(collect_env.report())
