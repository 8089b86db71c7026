"""The public names, whose modules import PyTorch; importing this module registers the operators."""

from __future__ import annotations

from . import operators as _operators  # noqa: F401  (registers them)
from .cache_writes import write_kv
from .contract import MI300X_GEOMETRY, TileGeometry
from .dense import attention, lite_attention, merge_states
from .drop_in import sdpa
from .lite.attention import LiteAttention
from .lite.parallel import SeqParallel
from .lite.policy import SkipPolicy
from .serving import PagedBatch, attention_paged, attention_varlen

__all__ = [
    "MI300X_GEOMETRY",
    "LiteAttention",
    "PagedBatch",
    "SeqParallel",
    "SkipPolicy",
    "TileGeometry",
    "attention",
    "attention_paged",
    "attention_varlen",
    "lite_attention",
    "merge_states",
    "sdpa",
    "write_kv",
]
