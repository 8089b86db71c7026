"""What a figure was measured on: recorded beside every result."""

from __future__ import annotations

import subprocess
from pathlib import Path

from liteattention_rocm import collect_env


def describe() -> dict[str, str]:
    """Return machine, versions and the commit of the source tree (or "not a checkout")."""
    return {**collect_env.collect(), "commit": _commit()}


def _commit() -> str:
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "not a checkout"
    return found.stdout.strip()
