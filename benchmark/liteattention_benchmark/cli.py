"""``liteattention-rocm bench``: figures that anyone can measure again."""

from __future__ import annotations

import typer

from liteattention_rocm.cli.options import Command

from . import emulator_cli, kernels_cli, serving_cli, video_cli

# What needs torch is imported when a command runs: --help answers without it.

app = typer.Typer(help="Measure kernels against their peers.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """Measure kernels against their peers."""


# In the order of --help.
app.command("cpu", cls=Command)(kernels_cli.cpu)
app.command("kernels", cls=Command)(kernels_cli.kernels)
app.command("video", cls=Command)(video_cli.video)
app.command("tune", cls=Command)(kernels_cli.tune)
app.command("emulator", cls=Command)(emulator_cli.emulator)
app.command("mapping", cls=Command)(emulator_cli.mapping)
app.command("model", cls=Command)(emulator_cli.model)
app.command("serving", cls=Command)(serving_cli.serving)
