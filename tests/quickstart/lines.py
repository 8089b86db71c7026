"""``lines.py PAGE NAME``: print the code block that follows ``<!-- run: NAME -->`` on a page."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

_BLOCK = re.compile(
    r"<!-- run: (?P<name>[\w-]+) -->\n\n"
    r"(?:```\w*\n(?P<fenced>.*?)\n```|(?P<indented>(?:    [^\n]+\n)+))",
    re.DOTALL,
)


def blocks(page: str) -> dict[str, str]:
    """Return every marked block of a page by its name.

    Raises:
        ValueError: a marker without a block, or a name that two blocks have.
    """
    found: dict[str, str] = {}
    for match in _BLOCK.finditer(page):
        if match["name"] in found:
            raise ValueError(f"two blocks are called {match['name']}")
        found[match["name"]] = (match["fenced"] or textwrap.dedent(match["indented"])).strip()
    named = re.findall(r"<!-- run: (.*?) -->", page)
    if named != list(found):
        raise ValueError(f"marked {named}, but blocks follow only {list(found)}")
    return found


if __name__ == "__main__":
    print(blocks(Path(sys.argv[1]).read_text())[sys.argv[2]])
