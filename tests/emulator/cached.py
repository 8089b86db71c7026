"""Runs assembly on the emulator without an assembler: see toolchain."""

from typing import Any

from liteattention_emulator import snippet

from . import toolchain


def run(code: str | bytes, state: snippet.State) -> dict[str, Any]:
    """As snippet.run."""
    text = toolchain.machine_code(code + "\ns_endpgm\n") if isinstance(code, str) else code
    return snippet.run(text, state)
