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
    """Refuse options that are wrong, or that no layer would read, before the request queues.

    The worker reads them again: requests reach it in other ways, too. Where this backend does not
    run it has nobody in the worker, so that this is the only check.

    Raises:
        ValueError: with every reason; SGLang's HTTP server answers 400.
    """
    if not generation.asks(params.diffusers_kwargs):
        return
    reasons = []
    names = _backends(server_args)
    override = getattr(params, "attention_backend_override", None)
    if override is not None:
        reasons.append(
            f"{generation.WHERE}: attention_backend_override {override!r} runs another attention "
            "backend, which reads no such options: leave one of the two out"
        )
    elif BACKEND_NAME not in names:
        which = repr(names[0]) if names else "of its own choice"
        reasons.append(
            f"{generation.WHERE}: the server runs attention backend {which}, which reads no such "
            f"options: start it with --attention-backend {BACKEND_NAME}, or leave them out"
        )
    try:
        generation.request_policy(
            params.diffusers_kwargs, generation.server_policy(_config(server_args))
        )
    except ValueError as error:
        reasons.append(str(error))
    if reasons:
        raise ValueError("; ".join(reasons))


def _backends(server_args: Any) -> list[str]:
    """Return the names of all attention backends that the server was told to run, without order.

    None of them may be the one of self-attention: the worker, which knows, looks once more.
    """
    by_role = (server_args.component_attention_backend_roles or {}).values()
    named = [
        server_args.attention_backend,
        *(server_args.component_attention_backends or {}).values(),
        *(name for roles in by_role for name in roles.values()),
    ]
    return [name.lower() for name in named if name]


def _config(server_args: Any) -> dict[str, Any] | None:
    """Return ``--attention-backend-config``, which is ours only if the backend is."""
    chosen = (server_args.attention_backend or "").lower()
    ours = chosen == BACKEND_NAME or (not chosen and BACKEND_NAME in _backends(server_args))
    return server_args.attention_backend_config if ours else None
