"""Entry point of the command line, outside of the library so that it imports nothing.

Importing ``liteattention_rocm`` imports PyTorch, which takes seconds. Ctrl-C in that time must end
the command as quietly as later on.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; an interrupt ends it with exit code 130 and no traceback."""
    try:
        from liteattention_rocm.cli.root import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
