"""The attention backend object of one SGLang model runner.

SGLang keeps keys and values in a pool of token slots [slots, Hkv, D] per layer, which is read in
place: as pages of the allocator's page size, which are ``page_size`` consecutive slots. The layers
of a step share its page tables (:mod:`.srt_step`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from liteattention_rocm import attention_paged, engines

from . import BACKEND_NAME, srt_admission
from .srt_admission import window_of
from .srt_step import Step, plan

logger = logging.getLogger(__name__)


class LiteAttentionBackend(AttentionBackend):
    """Extend, mixed and decode steps through :func:`liteattention_rocm.attention_paged`.

    Key: none; SGLang makes one per model runner. Lifetime of a step: until the next
    ``init_forward_metadata``.

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
        layers = [m for m in runner.model.modules() if isinstance(m, RadixAttention)]
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
        self._step: Step | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Gather the page tables of one step; all its layers use them."""
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
        self._step = None  # the last step's tables go before the next ones come
        self._step = plan(
            forward_batch,
            self.req_to_token_pool.req_to_token,
            self.token_to_kv_pool,
            self._page_size,
        )

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
        unknown = [
            name for name, value in extras.items() if value is not None and value is not False
        ]
        if unknown:
            raise ValueError(
                f"attention backend {BACKEND_NAME!r}, layer {layer.layer_id}: the model passes "
                f"{', '.join(sorted(unknown))}, which it does not know: serve it with another "
                "attention backend"
            )
        step, pool = self._step, self.token_to_kv_pool
        assert step is not None, "init_forward_metadata comes before the layers of a step"
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=step.window_slots)
            pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        batch = step.batch
        if step.window_batch is not None and pool.layers_mapping[layer.layer_id][1]:
            batch = step.window_batch
        queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty_like(queries)
        if queries.shape[0] > step.rows:
            out[step.rows :] = 0  # padding, which later layers read
        attention_paged(
            queries,
            _pages(keys, self._page_size),
            _pages(values, self._page_size),
            batch,
            scale=layer.scaling,
            window=window_of(layer),
            soft_cap=layer.logit_cap or None,
            sinks=None if sinks is None else sinks.float(),
            k_scale=_fp8_scale(keys, layer.k_scale_float),
            v_scale=_fp8_scale(values, layer.v_scale_float),
            out=out,
        )
        return out.flatten(1)

    #: One row per request is the same call.
    forward_decode = forward_extend


def _pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """View [slots, Hkv, D] as [pages, page_size, Hkv, D]; a last page that is not whole stays out.

    SGLang allocates whole pages, so nothing lies in that one.
    """
    if page_size == 1:
        return slots.unsqueeze(1)
    pages = slots.shape[0] // page_size
    return slots[: pages * page_size].view(pages, page_size, *slots.shape[1:])


def _fp8_scale(cache: torch.Tensor, scale: float | None) -> float:
    """Return the factor of an fp8 cache; other caches have none, whatever the checkpoint says."""
    return 1.0 if scale is None or cache.element_size() > 1 else float(scale)
