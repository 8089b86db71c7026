"""The skip lists of a request while its pipeline stage runs, and its report at the end.

The lists are in the request (:class:`.generation.Generation` in ``Req.extra``) and die with it,
whatever becomes of it. :func:`run_stage` frees them earlier.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.runtime.disaggregation.roles import RoleType
from sglang.multimodal_gen.runtime.distributed.parallel_state import get_world_rank

from . import BACKEND_NAME
from .diffusion_requests import defaults
from .generation import REPORT_VARIABLE, Generation
from .policies import asks, for_warm_up, request_policy

logger = logging.getLogger(__name__)

# SGLang leaves keys that begin with an underscore out when it sends requests elsewhere.
_STATE = "_liteattention_rocm"


def generation_of(request: Any) -> Generation:
    """Return the skip lists of a request, made on its first call."""
    state = request.extra.get(_STATE)
    if state is None:
        policy = request_policy(request.extra.get("diffusers_kwargs"), defaults())
        if request.is_warmup:
            policy = for_warm_up(policy)
        timesteps = request.timesteps
        steps = request.num_inference_steps if timesteps is None else len(timesteps)
        state = request.extra[_STATE] = Generation(policy, steps)
    assert isinstance(state, Generation)
    return state


def run_stage(original: Callable[..., Any], stage: Any, batch: Any, server_args: Any) -> Any:
    """Stand around a pipeline stage: the lists that a request made in it end with it."""
    extra = getattr(batch, "extra", None)
    if not isinstance(extra, dict):
        return original(stage, batch, server_args)
    options = extra.get("diffusers_kwargs")
    if asks(options):
        request_policy(options, defaults())  # refuse it before anything has been computed
    try:
        result = original(stage, batch, server_args)
    except BaseException:
        state = extra.pop(_STATE, None)
        if state is not None:
            state.free()  # a logged traceback may keep the object for long
        raise
    state = extra.pop(_STATE, None)
    if state is not None:
        _report(batch, state)
    elif asks(options) and stage.role_affinity == RoleType.DENOISER:
        raise ValueError(
            "the request has options for LiteAttention, but no self-attention layer ran on it: "
            f"start the server with --attention-backend {BACKEND_NAME}"
        )
    return result


def _report(request: Any, state: Generation) -> None:
    """Log what a request skipped and write its report if the server wants reports."""
    if request.is_warmup:
        return
    # Requests that SGLang has batched are one to us; rows of the lists are in this order.
    names = getattr(request, "merged_request_ids", None) or [request.request_id or "request"]
    rank = get_world_rank()
    if rank == 0:
        statistics = state.statistics
        logger.info(
            "LiteAttention: request %s skipped %.1f %% of the tiles of self-attention (engine %s)",
            ", ".join(names),
            100 * statistics.sparsity,
            state.engine,
        )
    folder = os.environ.get(REPORT_VARIABLE)
    if folder:
        for name in names:
            state.write(Path(folder), name if rank == 0 else f"{name}.rank{rank}", names)
