"""The options of a video request, checked where SGLang reads the request."""

from __future__ import annotations

from typing import Any

from liteattention_rocm import SkipPolicy, brief

from . import BACKEND_NAME, policies, reports


def defaults() -> SkipPolicy:
    """Return the policy of requests that say nothing; ``ValueError`` if it is invalid."""
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    return policies.server_policy(_config(get_global_server_args()))


def check(params: Any, model_path: str, server_args: Any, *_: Any, **__: Any) -> None:
    """Refuse options that are wrong, or that no layer would read, before the request queues.

    The worker reads them again: requests reach it in other ways, too. Where another backend runs,
    nothing of ours is loaded in the worker, so this is the only check.

    Raises:
        ValueError: with every reason; SGLang's HTTP server answers 400.
    """
    names = _backends(server_args)
    override = getattr(params, "attention_backend_override", None)
    itself = isinstance(override, str) and override.lower() == BACKEND_NAME
    if itself and BACKEND_NAME in names:
        # It runs already. SGLang lets no request switch to it, and would refuse this one.
        params.attention_backend_override = override = None
    if not policies.asks(params.diffusers_kwargs):
        return
    reasons = []
    if override is not None and not itself:
        reasons.append(
            f"{policies.WHERE}: attention_backend_override {brief.shown(override)} runs another "
            "attention backend, which reads no such options: leave one of the two out"
        )
    elif BACKEND_NAME not in names:
        which = repr(names[0]) if names else "of its own choice"
        reasons.append(
            f"{policies.WHERE}: the server runs attention backend {which}, which reads no such "
            f"options: start it with --attention-backend {BACKEND_NAME}, or leave them out"
        )
    try:
        policies.request_policy(
            params.diffusers_kwargs, policies.server_policy(_config(server_args))
        )
    except ValueError as error:
        reasons.append(str(error))
    if reasons:
        raise ValueError("; ".join(reasons))


def check_server(_: Any, server_args: Any) -> None:
    """Refuse wrong defaults where SGLang checks its arguments, before it starts a worker.

    Raises:
        ValueError: they are wrong, or no report can be written; lists every reason.
    """
    if BACKEND_NAME not in _backends(server_args):
        return
    reasons = []
    for look in (lambda: policies.server_policy(_config(server_args)), reports.check_folder):
        try:
            look()
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError(f"attention backend {BACKEND_NAME!r}: {'; '.join(reasons)}")


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
