"""LiteAttention in diffusers: turn it on for a pipeline, and off again without a trace.

::

    from liteattention_diffusers import enable
    from liteattention_rocm import SkipPolicy

    with enable(pipe, SkipPolicy(budget=0.05, warmup_steps=4)) as handle:
        video = pipe("a red circle moves left").frames
    print(handle.statistics.to_records())

Importing this package also registers the name ``liteattention_rocm`` with diffusers' attention
dispatcher, for ``set_attention_backend``: by that name alone it is the dense kernel, everywhere.
"""

from __future__ import annotations

from .backend import BACKEND_NAME, register
from .enabling import disable, enable
from .handle import Handle

__all__ = ["BACKEND_NAME", "Handle", "disable", "enable", "register"]

register()
