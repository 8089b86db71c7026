"""LiteAttention's dense kernels as an attention backend of vLLM.

Installing this package next to vLLM is all: vLLM finds the entry point ``liteattention_rocm`` and
calls :func:`register` in each of its processes. Choose the backend with ::

    vllm serve MODEL --attention-backend CUSTOM

Nothing here imports vLLM before it is asked to, so that processes which only look at entry points
stay light. :func:`statistics` tells whether it is really this backend that answers.
"""

from __future__ import annotations

from .counters import read_statistics, statistics

__all__ = ["BACKEND_CLASS", "read_statistics", "register", "statistics"]

#: What vLLM's registry holds under ``CUSTOM``.
BACKEND_CLASS = "liteattention_vllm.backend.LiteAttentionBackend"


def register() -> None:
    """Put the backend under ``CUSTOM`` into vLLM's registry; repeated calls change nothing.

    Raises:
        RuntimeError: this vLLM has no registry with ``CUSTOM``.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"this vLLM takes no out-of-tree attention backend ({error}): install vllm 0.32 or "
            "newer"
        ) from error
    register_backend(custom, BACKEND_CLASS)
