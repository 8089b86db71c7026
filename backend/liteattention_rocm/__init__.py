"""Attention for AMD MI300X: dense, LiteAttention and LLM serving, one API over several engines.

See :func:`attention`, :func:`sdpa`, :func:`merge_states`, :class:`LiteAttention`,
:class:`SeqParallel` and :class:`SkipPolicy`; for serving :func:`attention_paged`,
:class:`PagedBatch`, :func:`write_kv`, :func:`attention_varlen`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

try:
    from . import operators as _operators  # noqa: F401  (registers them)
    from .cache_writes import write_kv
    from .contract import MI300X_GEOMETRY, TileGeometry
    from .dense import attention, lite_attention, merge_states
    from .drop_in import sdpa
    from .lite.attention import LiteAttention
    from .lite.parallel import SeqParallel
    from .lite.policy import SkipPolicy
    from .serving import PagedBatch, attention_paged, attention_varlen
except (ImportError, OSError) as error:
    # Raised when a name is asked for: collect_env is in this package too, and a broken
    # installation is what it is for.
    _broken = error
    if not TYPE_CHECKING:

        def __getattr__(name: str) -> object:
            if name not in __all__:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
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
