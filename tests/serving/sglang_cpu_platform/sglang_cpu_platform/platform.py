"""The out-of-tree SGLang platform: every operator in its plain PyTorch form, on CPU tensors.

SGLang's in-tree CPU engine needs a CPU build of its kernel library, which registries do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuTestPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain CPU: no graphs, no Triton, no pinned memory."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"


def activate() -> str | None:
    """Name the platform's class, or None where SGLang has a GPU of its own to run on."""
    if torch.cuda.is_available():
        return None
    return f"{CpuTestPlatform.__module__}.{CpuTestPlatform.__qualname__}"


def _device_name(original: Callable[..., Any], *args: Any, **options: Any) -> str:
    return str(original(*args, **options))


def fill_gaps() -> None:
    """Put PyTorch where SGLang has Triton only, or picks it by the backend's name alone."""
    if activate() is None:
        return
    from sglang.srt.mem_cache import allocation
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import convolution

    for function in (convolution.causal_conv1d_fn, convolution.causal_conv1d_update):
        where = f"sglang.srt.layers.attention.mamba.causal_conv1d.{function.__name__}"
        HookRegistry.register(where, function, HookType.REPLACE)
    # Without --device SGLang asks a platform from outside for a device and takes it for a name.
    HookRegistry.register(
        "sglang.srt.arg_groups.serving_hook.get_device", _device_name, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        allocation.get_last_loc_torch,
        HookType.REPLACE,
    )
