"""What the tests of the diffusers integration share."""

from __future__ import annotations

from typing import Any

from liteattention_rocm import TileGeometry

PROMPT = "a red circle moves left on a blue background"
#: Small enough that 512 tokens make 16 x 8 tiles.
TILE = TileGeometry(32, 64, 16)


def footprint(pipe: Any) -> list[Any]:
    """Everything `enable` could have left behind on a pipeline's transformer and in diffusers."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    seen: list[Any] = [
        _AttentionBackendRegistry._active_backend,
        list(_AttentionBackendRegistry._backends),
        list(AttentionBackendName.__members__),
        sorted(vars(pipe)),
    ]
    for name, module in pipe.transformer.named_modules():
        seen.append((name, sorted(vars(module)), list(module._forward_hooks)))
        seen.append((list(module._forward_pre_hooks), list(module._forward_hooks_always_called)))
        processor = getattr(module, "processor", None)
        if processor is not None:
            seen.append((id(processor), dict(vars(processor)), processor._attention_backend))
        registry = getattr(module, "_diffusers_hook", None)
        if registry is not None:
            seen.append((list(registry.hooks), list(registry._hook_order)))
    return seen
