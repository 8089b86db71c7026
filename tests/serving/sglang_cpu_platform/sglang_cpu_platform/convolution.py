"""The short causal convolution of hybrid models, which SGLang has as GPU kernels only.

Each is depthwise, with a state of the last ``width - 1`` inputs per request. Called as
``sglang.srt.layers.attention.mamba.causal_conv1d`` says; states change in place.
"""

from __future__ import annotations

import torch
from torch.nn.functional import conv1d, silu


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    conv_states: torch.Tensor | None = None,
    activation: str | None = "silu",
    **_: object,
) -> torch.Tensor:
    """Prompts: ``x`` [channels, T], ``weight`` [channels, width]."""
    assert query_start_loc is not None and cache_indices is not None
    assert conv_states is not None and has_initial_state is not None
    starts, parts = query_start_loc.tolist(), []
    for request, slot in enumerate(cache_indices.tolist()):
        state = (conv_states[slot] * has_initial_state[request]).to(x.dtype)
        inputs = torch.cat([state, x[:, starts[request] : starts[request + 1]]], 1)
        parts.append(_convolved(inputs, weight, bias, activation))
        conv_states[slot] = inputs[:, -state.shape[1] :].to(conv_states.dtype)
    return torch.cat(parts, 1)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """Decoding: ``x`` [R, channels]."""
    assert cache_seqlens is None and conv_state_indices is not None
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_state[slots].to(x.dtype), x[..., None]], 2)
    conv_state[slots] = inputs[..., 1:].to(conv_state.dtype)
    return _convolved(inputs, weight, bias, activation)[..., 0]


def _convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    out = conv1d(inputs, weight[:, None], bias, groups=weight.shape[0])
    return out if activation is None else silu(out)
