"""Attention for AMD MI300X: dense, LiteAttention and LLM serving, one API over several engines.

See :func:`attention`, :func:`sdpa`, :func:`merge_states`, :class:`LiteAttention`,
:class:`SeqParallel` and :class:`SkipPolicy`; for serving :func:`attention_paged`,
:class:`PagedBatch`, :func:`write_kv`, :func:`attention_varlen`.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

#: Why the public names cannot be imported; they raise it when they are used.
_broken: ImportError | OSError | None = None


def _starts_a_command() -> bool:
    """Whether the command line imports this package: ``liteattention-rocm`` or ``python -m``.

    Its ``--help`` and ``--version`` need no PyTorch, which takes seconds to import. Python sets
    ``sys.argv[0]`` to ``-m`` while it looks for the module that it is to run.
    """
    return "liteattention_rocm_cli" in sys.modules or sys.argv[:1] == ["-m"]


if TYPE_CHECKING or not _starts_a_command():
    try:
        from .public import (
            MI300X_GEOMETRY,
            LiteAttention,
            PagedBatch,
            SeqParallel,
            SkipPolicy,
            TileGeometry,
            attention,
            attention_paged,
            attention_varlen,
            lite_attention,
            merge_states,
            sdpa,
            write_kv,
        )
    except (ImportError, OSError) as error:
        # Raised when a name is used: collect_env is in this package too, and a broken
        # installation is what it is for.
        _broken = error

if TYPE_CHECKING:
    __commit__: str
else:

    def __getattr__(name: str) -> object:
        if name == "__commit__":
            from .collect_env import commit  # in a checkout it asks git

            return commit()
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        global _broken
        if _broken is None:
            try:
                from . import public

                globals().update({each: getattr(public, each) for each in public.__all__})
                return globals()[name]
            except (ImportError, OSError) as error:
                _broken = error
        remedy = (
            "install the build of PyTorch (2.6 or newer) that fits your device"
            if getattr(_broken, "name", None) == "torch"
            else "`python -m liteattention_rocm.collect_env` shows the installation"
        )
        raise ImportError(f"liteattention_rocm: {_broken}: {remedy}") from _broken


try:
    __version__ = version("liteattention-rocm")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "MI300X_GEOMETRY",
    "LiteAttention",
    "PagedBatch",
    "SeqParallel",
    "SkipPolicy",
    "TileGeometry",
    "__version__",
    "attention",
    "attention_paged",
    "attention_varlen",
    "lite_attention",
    "merge_states",
    "sdpa",
    "write_kv",
]
