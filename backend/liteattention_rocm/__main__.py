"""``python -m liteattention_rocm``: the command line, where its script is not on the path."""

from __future__ import annotations

from liteattention_rocm_cli import main

if __name__ == "__main__":
    main()
