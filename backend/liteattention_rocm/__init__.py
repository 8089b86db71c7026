"""Attention for AMD MI300X: dense and LiteAttention, one API over several engines.

See :func:`attention`, :func:`merge_states`, :class:`LiteAttention` and :class:`SkipPolicy`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .engines import MI300X_GEOMETRY, TileGeometry
from .lite import LiteAttention
from .ops import attention, lite_attention, merge_states
from .policy import SkipPolicy

try:
    __version__ = version("liteattention-rocm")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "MI300X_GEOMETRY",
    "LiteAttention",
    "SkipPolicy",
    "TileGeometry",
    "__version__",
    "attention",
    "lite_attention",
    "merge_states",
]
