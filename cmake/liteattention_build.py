"""The build backend: scikit-build-core's, and the commit goes into wheels and source archives.

A wheel has it in ``liteattention_rocm/commit.txt``, a source archive in ``COMMIT``. An editable
install asks git at run time instead. A build of sources that no git repository holds, with neither
``COMMIT`` nor the variable ``LITEATTENTION_COMMIT``, has none and says so.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from scikit_build_core import build as backend
from scikit_build_core.build import *  # noqa: F403  (the hooks that need nothing more)

ROOT = Path(__file__).resolve().parents[1]
CARRIED = ROOT / "COMMIT"


def commit() -> str:
    """Commit of these sources, with ``-dirty`` where they differ from it; "" if nothing says it."""
    stated = os.environ.get("LITEATTENTION_COMMIT")
    if stated:
        return stated
    try:
        # Sources that were unpacked inside of another repository are not that repository's.
        _git("ls-files", "--error-unmatch", "pyproject.toml")
        return _git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return CARRIED.read_text(encoding="utf-8").strip() if CARRIED.exists() else ""


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel whose ``commit.txt`` has the commit."""
    settings = dict(config_settings or {})
    settings["cmake.define.LITEATTENTION_COMMIT"] = commit()
    return backend.build_wheel(wheel_directory, settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build a source archive whose ``COMMIT`` has the commit."""
    found, earlier = commit(), CARRIED.read_bytes() if CARRIED.exists() else None
    CARRIED.write_text(f"{found}\n", encoding="utf-8")
    try:
        return backend.build_sdist(sdist_directory, config_settings)
    finally:
        if earlier is None:
            CARRIED.unlink()
        else:
            CARRIED.write_bytes(earlier)
