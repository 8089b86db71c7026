"""Snippets assembled once, however many instruction-set variants of the emulator run them."""

from functools import lru_cache
from typing import Any

from liteattention_emulator import snippet

assemble = lru_cache(maxsize=None)(snippet.assemble)


def run(code: str | bytes, state: snippet.State) -> dict[str, Any]:
    """As snippet.run."""
    text = assemble(code + "\ns_endpgm\n") if isinstance(code, str) else code
    return snippet.run(text, state)
