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

from liteattention_rocm import SkipPolicy, admission

from . import BACKEND_NAME, generation

_MEMBER_NAME = BACKEND_NAME.upper()
_BACKEND_CLASS = "liteattention_sglang.diffusion_attention.LiteAttentionBackend"
_SAMPLING_PARAMS = (
    "sglang.multimodal_gen.configs.sample.sampling_params.SamplingParams"
    ".from_user_sampling_params_args"
)


def register() -> None:
    """Add the backend to the platform this process runs on; repeated calls change nothing."""
    backend()
    platform = _definer(type(current_platform), "get_attn_backend_cls_str")
    _hook(
        f"{platform.__module__}.{platform.__qualname__}.get_attn_backend_cls_str",
        _choose,
        HookType.AROUND,
    )
    _hook(_SAMPLING_PARAMS, _check_request, HookType.AFTER)
    _offer_ring()


def backend() -> AttentionBackendEnum:
    """Return the member of SGLang's closed enum of backends, adding it on the first call.

    Its value is the name, which no number that SGLang gives to a later backend can meet, so that
    it pickles between processes that have this plugin.
    """
    known = AttentionBackendEnum.__members__.get(_MEMBER_NAME)
    if known is not None:
        return known
    member = object.__new__(AttentionBackendEnum)
    member._name_ = _MEMBER_NAME
    member._value_ = BACKEND_NAME
    member.__objclass__ = AttentionBackendEnum
    member._sort_order_ = len(AttentionBackendEnum._member_names_)
    type.__setattr__(AttentionBackendEnum, _MEMBER_NAME, member)
    AttentionBackendEnum._member_names_.append(_MEMBER_NAME)
    AttentionBackendEnum._member_map_[_MEMBER_NAME] = member
    AttentionBackendEnum._value2member_map_[BACKEND_NAME] = member
    return member


def _offer_ring() -> None:
    """Name the backend among those that ``--ring-degree`` takes, a tuple of names in SGLang."""
    from sglang.multimodal_gen.runtime.server_args import server_args

    known = server_args.RING_CAPABLE_ATTENTION_BACKENDS
    if BACKEND_NAME not in known:
        server_args.RING_CAPABLE_ATTENTION_BACKENDS = (*known, BACKEND_NAME)


def _definer(cls: type, attribute: str) -> type:
    """Return the class that defines ``attribute``: a hook on a subclass would miss its siblings."""
    return next(base for base in cls.__mro__ if attribute in vars(base))


def _hook(target: str, hook: Callable[..., Any], kind: HookType) -> None:
    if not any(known is hook for _, known, _ in HookRegistry._hooks.get(target, ())):
        HookRegistry.register(target, hook, kind)


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
    ``RuntimeError``, which ends the start of the server, if the server's defaults are invalid.
    ``dtype`` is not looked at: SGLang asks with float16 whatever the model's is.
    """
    if selected_backend is not backend():
        return original(platform, selected_backend, head_size, dtype)
    reasons = unsupported(torch.device(current_platform.device_type), head_size)
    if reasons:
        raise ValueError(f"attention backend {BACKEND_NAME!r}: {'; '.join(reasons)}")
    try:
        defaults()
    except ValueError as error:
        raise RuntimeError(str(error)) from error
    return _BACKEND_CLASS


def unsupported(device: torch.device, head_size: int) -> list[str]:
    """Return why self-attention with this head size cannot run on ``device``; empty if it can."""
    return admission.video_reasons(device, heads=1, kv_heads=1, head_dim=head_size)


def defaults() -> SkipPolicy:
    """Return the policy of requests that say nothing; ``ValueError`` if it is invalid."""
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    return generation.server_policy(_config(get_global_server_args()))


def _check_request(params: Any, model_path: str, server_args: Any, *_: Any, **__: Any) -> None:
    """Refuse bad options as soon as SGLang has read a request, before it queues.

    The worker reads them again: requests reach it in other ways, too.
    """
    if generation.asks(params.diffusers_kwargs):
        policy = generation.server_policy(_config(server_args))
        generation.request_policy(params.diffusers_kwargs, policy)


def _config(server_args: Any) -> dict[str, Any] | None:
    """Return ``--attention-backend-config``, which is ours only if the backend is."""
    ours = (server_args.attention_backend or "").lower() == BACKEND_NAME
    return server_args.attention_backend_config if ours else None
