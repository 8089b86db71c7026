"""The skip lists of a request while its pipeline stage runs, and its report at the end.

The lists are in the request (:class:`.generation.Generation` in ``Req.extra``) and die with it,
whatever becomes of it. :func:`run_stage` frees them earlier.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from sglang.multimodal_gen.runtime.disaggregation.roles import RoleType
from sglang.multimodal_gen.runtime.distributed.parallel_state import get_world_rank
from sglang.multimodal_gen.runtime.pipelines_core.stages.base import PipelineStage

from liteattention_rocm import SkipPolicy, engines
from liteattention_rocm.brief import first_few, shown

from . import BACKEND_NAME, reports
from .diffusion_requests import defaults
from .generation import Generation
from .policies import asks, for_warm_up, own_options, request_policy

logger = logging.getLogger(__name__)

# SGLang leaves keys that begin with an underscore out when it sends requests elsewhere.
_STATE = "_liteattention_rocm"
_POLICY = "_liteattention_rocm_policy"
# What SGLang's scheduler puts before the id of a batch's first request.
_BATCH = "dynamic_batch::"


class _Unclaimed:
    """Counts self-attention calls outside a request.

    Key: none; one for the process. Owner: this module. Lifetime: the process's.
    """

    calls = 0


unclaimed = _Unclaimed()
#: Stages under way, the innermost last. Owner: :func:`run_stage`.
_running: list[Any] = []


def policy_of(extra: dict[str, Any]) -> SkipPolicy:
    """Return the policy of a request by its ``extra``, where it stays: it is validated once.

    Raises ``ValueError`` listing every reason.
    """
    options, server = own_options(extra.get("diffusers_kwargs")), defaults()
    held = extra.get(_POLICY)
    if held is not None and held[0] is options and held[1] is server:
        return cast(SkipPolicy, held[2])
    policy = request_policy(extra.get("diffusers_kwargs"), server)
    extra[_POLICY] = options, server, policy
    return policy


def generation_of(request: Any) -> Generation:
    """Return the skip lists of a request, made on its first call."""
    state = request.extra.get(_STATE)
    if state is None:
        policy = policy_of(request.extra)
        if request.is_warmup:
            policy = for_warm_up(policy)
        timesteps = request.timesteps
        steps = request.num_inference_steps if timesteps is None else len(timesteps)
        state = request.extra[_STATE] = Generation(policy, steps, warm_up=request.is_warmup)
        if _running:
            _name_layers(_running[-1])
    assert isinstance(state, Generation)
    return state


def _name_layers(stage: PipelineStage) -> None:
    """Name layers as diffusers' integration does, by their modules in the stage's models.

    SGLang builds some without a name, and those of two denoisers alike. Of the stage's attributes
    ``transformer`` comes first, as it may be the same model as another.
    """
    parts = sorted(vars(stage).items(), key=lambda item: item[0] != "transformer")
    for attribute, part in parts:
        if isinstance(part, PipelineStage):  # routers hold the stages that they choose from
            _name_layers(part)
        elif isinstance(part, torch.nn.Module):
            other = attribute.startswith(("transformer_", "unet_"))
            for name, module in part.named_modules():
                impl: Any = getattr(module, "attn_impl", None)
                if getattr(impl, "placed", True):
                    continue
                # Wrappers of compiled and of sharded modules are no part of a layer's name.
                name = name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "")
                name = impl.name if impl.named else name
                impl.name = f"{attribute}.{name}" if other else name
                impl.named = impl.placed = True


def run_stage(original: Callable[..., Any], stage: Any, batch: Any, server_args: Any) -> Any:
    """Stand around a pipeline stage: the lists that a request made in it end with it.

    Raises:
        ValueError: the request's options are wrong, or they say what to skip and no layer of a
            denoising stage could read them.
    """
    extra = getattr(batch, "extra", None)
    if not isinstance(extra, dict):
        return original(stage, batch, server_args)
    options = extra.get("diffusers_kwargs")
    if asks(options):
        policy_of(extra)  # refuse it before anything has been computed
    before = unclaimed.calls
    _running.append(stage)
    try:
        result = original(stage, batch, server_args)
    except BaseException:
        state = extra.pop(_STATE, None)
        if state is not None:
            state.free()  # a logged traceback may keep the object for long
        raise
    finally:
        _running.pop()
    state = extra.pop(_STATE, None)
    if state is not None:
        _report(batch, state, server_args.model_path)
    elif stage.role_affinity == RoleType.DENOISER:
        _without_state(stage, batch, server_args.model_path, unclaimed.calls > before)
    return result


def _without_state(stage: Any, request: Any, model: str, attended: bool) -> None:
    """Say that a denoising stage has ended in which no layer found its request."""
    options = request.extra.get("diffusers_kwargs")
    if not attended:
        if asks(options):
            raise ValueError(
                "the request has options for LiteAttention, but no self-attention layer ran on it: "
                f"start the server with --attention-backend {BACKEND_NAME}"
            )
        return
    if not policy_of(request.extra).enabled:
        return
    text = (
        f"LiteAttention did not run: {type(stage).__name__}, SGLang's denoising stage of {model}, "
        "does not say whose request it denoises, so all its self-attention was dense"
    )
    if asks(options):
        raise ValueError(f"{text}: leave the options for LiteAttention out, or give false")
    if not request.is_warmup and get_world_rank() == 0:
        _warn_once(text)


@functools.lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    """Log a warning that has not been logged lately."""
    logger.warning("%s", text)


def _report(request: Any, state: Generation, model: str) -> None:
    """Log what a request skipped and write its report if the server wants reports."""
    if request.is_warmup:
        return
    names, batched = _names(request)
    rank = get_world_rank()
    if rank == 0:
        statistics = state.statistics
        missing = batched - len(names)
        logger.info(
            "LiteAttention: request %s%s skipped %.1f %% of the tiles of self-attention "
            "(engine %s)",
            ", ".join(names),
            f" and {missing} more in its batch" if missing else "",
            100 * statistics.sparsity,
            engines.get(state.engine).described if state.engine else "none",
        )
        _warn(state, model)
    folder = reports.folder()
    if folder is None:
        return
    for name in names:
        own = name if rank == 0 else f"{name}.rank{rank}"
        try:
            state.write(folder, own, names, batched)
        except Exception as error:  # the video is done, and is worth more than its report
            logger.error(
                "LiteAttention: the report of request %s could not be written as %s: %s",
                name,
                folder / f"{reports.file_name(own)}.json",
                error,
            )


def _warn(state: Generation, model: str) -> None:
    """Warn about what the policy asked for and the model did not give."""
    policy = state.lite.policy
    if not policy.enabled:
        return
    for item in state.dense:
        _warn_once(
            f"LiteAttention did not run in {_some(list(item.layers))} of {model}, {item.reason}: "
            "self-attention was dense there"
        )
    unmatched = state.unmatched
    if unmatched:
        _warn_once(
            f"LiteAttention: no layer of {model} matches the policy's patterns {_some(unmatched)}: "
            f"the layers are {_some(state.layers)}"
        )


def _some(names: Sequence[str]) -> str:
    """Name a few layers or patterns and say how many more there are."""
    return first_few(list(map(shown, names)), ", ")


def _names(request: Any) -> tuple[list[str], int]:
    """Return the ids of the requests that SGLang has batched into this one, and their number.

    Rows of the lists are in this order. SGLang passes on ids of those requests alone whose
    progress is asked for; others are missing. If it passes on none, the batch's own id has that
    of its first request.
    """
    own = str(request.request_id or "request")
    merged = request.merged_request_ids
    if merged is None:
        return [own], 1
    return merged or [own.removeprefix(_BATCH)], len(request.prompt)
