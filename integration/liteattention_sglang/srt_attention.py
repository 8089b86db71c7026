"""The attention backend object of one SGLang model runner.

SGLang keeps keys and values in a pool of token slots [slots, Hkv, D] per layer, which is read in
place: as pages of the allocator's page size, which are ``page_size`` consecutive slots. The layers
of a step share its page tables (:mod:`.srt_step`); what a layer keeps is in :mod:`.srt_layer`.

SGLang calls ``init_forward_metadata`` before a step that runs eagerly. For a graph it calls
``init_forward_metadata_out_graph`` before the capture and before every replay, and
``init_forward_metadata_in_graph`` within the capture: all the work of a step is there, on the
device, and a replay needs nothing from the host. Prompts are never captured: a breakable graph runs
attention between its segments, as an eager step.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from liteattention_rocm import attention_paged, engines, write_kv
from liteattention_rocm.contract import FP8

from . import BACKEND_NAME, srt_admission
from .srt_layer import ServedLayer, Sinks
from .srt_step import Step, Steps

logger = logging.getLogger(__name__)


class LiteAttentionBackend(AttentionBackend):
    """Extend, mixed and decode steps through :func:`liteattention_rocm.attention_paged`.

    Key: none; SGLang makes one per model runner. Lifetime of a step: until the next one's
    ``init_forward_metadata``; of captured ones, that of the graphs.

    Raises:
        ValueError: the model or its cache is beyond the engine; with the reasons of all layers.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._page_size = int(runner.page_size or 1)
        #: Whether the model wants an image's tokens to see each other (Gemma 3 and 4).
        self._image_masks = hasattr(runner.model, "prepare_attn_masks")
        layers = srt_admission.attended(runner.model, self.token_to_kv_pool)
        reasons = srt_admission.reasons(runner, layers, self._page_size)
        if reasons:
            raise ValueError(f"attention backend {BACKEND_NAME!r}: " + "; ".join(reasons))
        logger.info(
            "attention backend %r: %d layers on engine %r, pages of %d tokens",
            BACKEND_NAME,
            len(layers),
            engines.choose(self.req_to_token_pool.req_to_token.device).name,
            self._page_size,
        )
        self._layers: dict[Any, ServedLayer] = {}
        self._sinks = Sinks()
        self._steps = self._make_steps(layers)
        self._step: Step | None = None

    def _make_steps(self, layers: list[Any]) -> Steps:
        """Say what steps need to know of the runner's pools."""
        table, pool = self.req_to_token_pool.req_to_token, self.token_to_kv_pool
        # SGLang takes no request with more tokens than the pool has slots. If all layers have a
        # window, that is the second pool: the first one is empty.
        windows_only = isinstance(pool, SWAKVPool) and not pool.full_layer_nums
        longest = min(table.shape[1], int(pool.size_swa if windows_only else pool.size))
        if not isinstance(pool, SWAKVPool):
            return Steps(table, self._page_size, longest)
        served = [ServedLayer(layer, pool, self._page_size) for layer in layers]
        windows = [layer.window for layer in served if layer.windowed]
        known = [window for window in windows if window is not None]
        return Steps(
            table,
            self._page_size,
            longest,
            pool,
            max(known) if known and len(known) == len(windows) else None,
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Gather the page tables of one eager step; all its layers use them."""
        mode = forward_batch.forward_mode
        if self._image_masks and mode.is_extend() and forward_batch.contains_image_inputs():
            # Said once. Raising would end the server, and with it all its requests.
            self._image_masks = False
            logger.warning(
                "attention backend %r: this model lets the tokens of an image see each other, "
                "here they see earlier ones only, as with most of SGLang's backends. Answers about "
                "images will be worse: serve them with --attention-backend triton",
                BACKEND_NAME,
            )
        self._step = None  # what the last step held goes before the next one comes
        self._step = self._steps.eager(forward_batch)
        self._sinks.refresh()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what the graphs of decode steps read, up to so many requests.

        Raises:
            ValueError: the engine plans every step on the host.
        """
        self._steps.prepare_graphs(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Make the batch that a graph is captured with; a replay needs nothing.

        Raises:
            ValueError: the step is not one of decoding.
        """
        if not in_capture:
            return
        mode = forward_batch.forward_mode
        if not mode.is_decode():
            raise ValueError(
                f"attention backend {BACKEND_NAME!r} captures no {mode.name} steps whole: use "
                "--cuda-graph-backend-prefill=breakable"
            )
        self._step = self._steps.captured(forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Gather lengths and page tables, and convert sinks: on the device, in static buffers."""
        self._step = self._steps.refill(forward_batch)
        self._sinks.refresh()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of requests that pad a batch: the row that they bring."""
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the same, where SGLang runs on a CPU."""
        return 1

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **extras: Any,
    ) -> torch.Tensor:
        """Attend the new rows of a step: several per request, single ones, or both.

        ``q`` is [T, Hq * D], ``k`` and ``v`` are [T, Hkv, D], ``sinks`` [Hq]; returns [T, Hq * D].
        """
        if extras:
            _refuse_unknown(layer, extras)
        step = self._step
        assert step is not None, "init_forward_metadata comes before the layers of a step"
        served = self._layers.get(layer)
        if served is None:
            served = ServedLayer(layer, self.token_to_kv_pool, self._page_size)
            self._layers[layer] = served
        keys, values = served.caches()
        k_scale, v_scale = served.scales()
        batch, slots = step.batch, forward_batch.out_cache_loc
        if served.windowed:
            assert step.window_batch is not None and step.window_slots is not None
            batch, slots = step.window_batch, step.window_slots
        if save_kv_cache and k is not None:
            assert v is not None
            # A breakable graph leaves the padding of a step out.
            slots = slots if slots.shape[0] == k.shape[0] else slots[: k.shape[0]]
            if k.dtype != keys.dtype and keys.dtype not in FP8:  # fp32 rotary embeddings
                k, v = k.to(keys.dtype), v.to(keys.dtype)
            write_kv(k, v, keys, values, slots, k_scale=k_scale, v_scale=v_scale)
        queries = q.reshape(-1, served.q_heads, served.head_dim)
        out = getattr(forward_batch, "_attn_output", None)  # a breakable graph's own memory
        found = attention_paged(
            queries,
            keys,
            values,
            batch,
            causal=served.causal,
            scale=served.scale,
            window=served.window,
            lookahead=served.lookahead,
            soft_cap=served.soft_cap,
            sinks=None if sinks is None else self._sinks.of(layer.layer_id, sinks),
            k_scale=k_scale,
            v_scale=v_scale,
            out=None if out is None else out.view(queries.shape),
        )
        if queries.shape[0] > step.rows:
            found[step.rows :] = 0  # padding, which later layers read
        return found.flatten(1)

    #: One row per request is the same call.
    forward_decode = forward_extend


def _refuse_unknown(layer: Any, extras: dict[str, Any]) -> None:
    """Raise if a model passes more than what says nothing."""
    unknown = [name for name, value in extras.items() if value is not None and value is not False]
    if unknown:
        raise ValueError(
            f"attention backend {BACKEND_NAME!r}, layer {layer.layer_id}: the model passes "
            f"{', '.join(sorted(unknown))}, which it does not know: serve it with another "
            "attention backend"
        )
