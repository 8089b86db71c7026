"""Registers the attention backend ``liteattention_rocm`` with SGLang's diffusion runtime.

The entry point of the group ``sglang.multimodal_gen.plugins``. SGLang calls :func:`register` in
every process, launcher and workers alike, so nothing here imports the model runtime: that waits in
:mod:`.diffusion_attention` until a worker asks for the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform
from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

from liteattention_common.enums import add_member
from liteattention_rocm import admission

from . import BACKEND_NAME, diffusion_requests, reports

_BACKEND_CLASS = "liteattention_sglang.diffusion_attention.LiteAttentionBackend"
_SAMPLING_PARAMS = (
    "sglang.multimodal_gen.configs.sample.sampling_params.SamplingParams"
    ".from_user_sampling_params_args"
)

_SERVER_ARGS = (
    "sglang.multimodal_gen.runtime.server_args.server_args.ServerArgs._validate_parameters"
)


def register() -> None:
    """Add the backend to the platform this process runs on; repeated calls change nothing."""
    backend()
    platform = _definer(type(current_platform), "get_attn_backend_cls_str")
    hook(
        f"{platform.__module__}.{platform.__qualname__}.get_attn_backend_cls_str",
        _choose,
        HookType.AROUND,
    )
    hook(_SAMPLING_PARAMS, diffusion_requests.check, HookType.AFTER)
    hook(_SERVER_ARGS, diffusion_requests.check_server, HookType.AFTER)
    _offer_ring()


def backend() -> AttentionBackendEnum:
    """Return the member of SGLang's closed enum of backends, adding it on the first call.

    Its value is the name, which no number that SGLang gives to a later backend can meet.
    """
    return add_member(AttentionBackendEnum, BACKEND_NAME)


def _offer_ring() -> None:
    """Name the backend among those that ``--ring-degree`` takes, a tuple of names in SGLang."""
    from sglang.multimodal_gen.runtime.server_args import server_args

    known = server_args.RING_CAPABLE_ATTENTION_BACKENDS
    if BACKEND_NAME not in known:
        server_args.RING_CAPABLE_ATTENTION_BACKENDS = (*known, BACKEND_NAME)


def _definer(cls: type, attribute: str) -> type:
    """Return the class that defines ``attribute``: a hook on a subclass would miss its siblings."""
    return next(base for base in cls.__mro__ if attribute in vars(base))


def hook(target: str, function: Callable[..., Any], kind: HookType) -> None:
    """Register a hook of SGLang; repeated calls change nothing."""
    if not any(known is function for _, known, _ in HookRegistry._hooks.get(target, ())):
        HookRegistry.register(target, function, kind)


def _choose(
    original: Callable[..., str],
    platform: type,
    selected_backend: AttentionBackendEnum | None,
    head_size: int,
    dtype: torch.dtype,
) -> str:
    """Stand in for a platform's ``get_attn_backend_cls_str``, which knows only SGLang's own.

    Raises ``ValueError`` with every reason if no engine serves the head size, which SGLang takes
    as leave to use another backend where the user did not insist on this one. Raises
    ``RuntimeError`` with every reason, which ends the start of the server, if the server's defaults
    are invalid or the folder of reports cannot be written to.
    ``dtype`` is not looked at: SGLang asks with float16 whatever the model's is.
    """
    if selected_backend is not backend():
        return original(platform, selected_backend, head_size, dtype)
    reasons = unsupported(torch.device(current_platform.device_type), head_size)
    if reasons:
        raise ValueError(f"attention backend {BACKEND_NAME!r}: {'; '.join(reasons)}")
    wrong = []
    for check in (diffusion_requests.defaults, reports.check_folder):
        try:
            check()
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return _BACKEND_CLASS


def unsupported(device: torch.device, head_size: int) -> list[str]:
    """Return why self-attention with this head size cannot run on ``device``; empty if it can."""
    return admission.video_reasons(device, heads=1, kv_heads=1, head_dim=head_size)
