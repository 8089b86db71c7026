"""The attention backend object of one SGLang model runner.

SGLang keeps keys and values in a pool of token slots [slots, Hkv, D] per layer, and the slots of
each request in rows of ``req_to_token``. The pool is read in place: as pages of the allocator's
page size, which are ``page_size`` consecutive slots, so that the page table is every
``page_size``-th slot of a row. The table is gathered once per step (a :class:`PagedBatch`) and
shared by the layers; models that mix full and sliding-window layers have a second pool, with slots
of its own, and so a second table.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from liteattention_rocm import PagedBatch, admission, attention_paged, engines

from . import BACKEND_NAME

logger = logging.getLogger(__name__)

#: Pools whose layers are [slots, Hkv, D]. Subclasses may lay them out otherwise.
_LAYOUT = "nhd"


class LiteAttentionBackend(AttentionBackend):
    """Extend, mixed and decode steps through :func:`liteattention_rocm.attention_paged`.

    Key: none; SGLang makes one per model runner. Lifetime of a step's batches: until the next
    ``init_forward_metadata``.

    Raises:
        ValueError: the model or its cache is beyond the engine; with the reasons of all layers.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._page_size = int(runner.page_size or 1)
        self._windowed = isinstance(self.token_to_kv_pool, SWAKVPool)
        #: Whether the model wants an image's tokens to see each other (Gemma 3 and 4).
        self._image_masks = hasattr(runner.model, "prepare_attn_masks")
        layers = [m for m in runner.model.modules() if isinstance(m, RadixAttention)]
        reasons = [
            *_runner_reasons(runner, self.token_to_kv_pool),
            *_layer_reasons(layers, runner, self._page_size),
        ]
        if reasons:
            raise ValueError(f"attention backend {BACKEND_NAME!r}: " + "; ".join(reasons))
        logger.info(
            "attention backend %r: %d layers on engine %r, pages of %d tokens",
            BACKEND_NAME,
            len(layers),
            engines.choose(self.req_to_token_pool.req_to_token.device).name,
            self._page_size,
        )
        self._rows = 0
        self._batch: PagedBatch | None = None
        self._window_batch: PagedBatch | None = None
        self._window_slots: torch.Tensor | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Gather the page tables of one step; all its layers use them."""
        self._batch = self._window_batch = self._window_slots = None
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if self._image_masks and mode.is_extend() and forward_batch.contains_image_inputs():
            # Said once. Raising would end the server, and with it everybody's requests.
            self._image_masks = False
            logger.warning(
                "attention backend %r: this model lets the tokens of an image see each other, "
                "here they see earlier ones only, as with most of SGLang's backends. Answers about "
                "images will be worse: serve them with --attention-backend triton",
                BACKEND_NAME,
            )
        requests = forward_batch.batch_size
        kv_len = forward_batch.seq_lens.to(torch.int32)
        device = kv_len.device
        lens = forward_batch.seq_lens_cpu
        max_kv_len = int((forward_batch.seq_lens if lens is None else lens).max())
        if mode.is_decode():
            self._rows, max_q_len = requests, 1
            q_start = torch.arange(requests + 1, dtype=torch.int32, device=device)
        elif mode.is_extend_without_speculative():
            new = forward_batch.extend_seq_lens_cpu
            self._rows, max_q_len = sum(new), max(new)
            q_start = torch.zeros(requests + 1, dtype=torch.int32, device=device)
            torch.cumsum(forward_batch.extend_seq_lens, 0, out=q_start[1:])
        else:
            raise ValueError(
                f"attention backend {BACKEND_NAME!r} has no {mode.name} steps "
                "(speculative decoding): leave the speculative options out"
            )
        # The row of a request holds a slot per token, and a page is page_size slots on end.
        slots = self.req_to_token_pool.req_to_token[
            forward_batch.req_pool_indices, : max_kv_len : self._page_size
        ]

        def batch(slots: torch.Tensor) -> PagedBatch:
            table = slots if self._page_size == 1 else slots // self._page_size
            return PagedBatch(
                q_start, kv_len, table.to(torch.int32), max_q_len=max_q_len, max_kv_len=max_kv_len
            )

        self._batch = batch(slots)
        if self._windowed:
            # Slots past a request's end may be left over from another: any number in the pool.
            pool = self.token_to_kv_pool
            self._window_batch = batch(pool.translate_loc_from_full_to_swa(slots.long()))
            self._window_slots = pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)

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
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend new rows of several tokens per request, beside single rows in mixed steps.

        ``q`` is [T, Hq * D], ``k`` and ``v`` are [T, Hkv, D]; returns [T, Hq * D].
        """
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend one row per request; shapes as in :meth:`forward_extend`."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        extras: dict[str, Any],
    ) -> torch.Tensor:
        sinks = extras.pop("sinks", None)
        unknown = [
            name for name, value in extras.items() if value is not None and value is not False
        ]
        if unknown:
            raise ValueError(
                f"attention backend {BACKEND_NAME!r}, layer {layer.layer_id}: the model passes "
                f"{', '.join(sorted(unknown))}, which it does not know: serve it with another "
                "attention backend"
            )
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=self._window_slots)
            pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        heads, head_dim = layer.tp_q_head_num, layer.head_dim
        batch = self._batch
        if self._windowed and pool.layers_mapping[layer.layer_id][1]:
            batch = self._window_batch
        assert batch is not None, "init_forward_metadata comes before the layers of a step"
        queries = q.reshape(-1, heads, head_dim)
        out = torch.empty_like(queries)
        if queries.shape[0] > self._rows:
            out[self._rows :] = 0  # padding, which later layers read
        attention_paged(
            queries,
            _pages(keys, self._page_size),
            _pages(values, self._page_size),
            batch,
            scale=layer.scaling,
            window=_window(layer),
            soft_cap=layer.logit_cap or None,
            sinks=None if sinks is None else sinks.float(),
            k_scale=_fp8_scale(keys, layer.k_scale_float),
            v_scale=_fp8_scale(values, layer.v_scale_float),
            out=out,
        )
        return out.view(-1, heads * head_dim)


def _pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """View [slots, Hkv, D] as [pages, page_size, Hkv, D]; a last page that is not whole stays out.

    SGLang allocates whole pages, so nothing lies in that one.
    """
    if page_size == 1:
        return slots.unsqueeze(1)
    pages = slots.shape[0] // page_size
    return slots[: pages * page_size].view(pages, page_size, *slots.shape[1:])


def _window(layer: Any) -> int | None:
    """Return our window: SGLang counts the keys before a row, we count that row's own as well."""
    before = layer.sliding_window_size
    return None if before is None or before < 0 else before + 1


def _fp8_scale(cache: torch.Tensor, scale: float | None) -> float:
    """Return the factor of an fp8 cache; other caches have none, whatever the checkpoint says."""
    return 1.0 if scale is None or cache.element_size() > 1 else float(scale)


def _runner_reasons(runner: Any, pool: Any) -> list[str]:
    reasons = []
    if getattr(runner, "prefill_aware_swa", False):
        reasons.append("its sliding windows hide the prompt too, which this model keeps in sight")
    if runner.is_draft_worker:
        reasons.append("it does not serve draft models: leave the speculative options out")
    if runner.kv_index_translator.is_translating:
        reasons.append("it does not read unified memory pools: leave --enable-unified-memory out")
    parts = [pool.full_kv_pool, pool.swa_kv_pool] if isinstance(pool, SWAKVPool) else [pool]
    for part in parts:
        if not isinstance(part, MHATokenToKVPool):
            reasons.append(f"it reads MHATokenToKVPool, the cache is a {type(part).__name__}")
        elif part.kv_cache_layout != _LAYOUT:
            reasons.append(
                f"it reads the cache layout {_LAYOUT!r}, got {part.kv_cache_layout!r}: unset "
                "SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT"
            )
        elif part.is_quantized_kv_cache:
            reasons.append(
                f"it does not read caches quantised by blocks (--kv-cache-dtype {part.dtype})"
            )
    return reasons


def _layer_reasons(layers: list[Any], runner: Any, page_size: int) -> list[str]:
    """Return every reason against the model's layers, each once, with the layers it is about."""
    found: dict[str, list[int]] = {}
    device = runner.req_to_token_pool.req_to_token.device
    for layer in layers:
        reasons = []
        if layer.is_cross_attention:
            reasons.append("it has no cross-attention")
        if layer.attn_type != AttentionType.DECODER:
            reasons.append(f"attention is causal here, the model wants {layer.attn_type.value!r}")
        if layer.v_head_dim != layer.head_dim:
            reasons.append(
                f"keys and values must have one head dim, got {layer.head_dim} and "
                f"{layer.v_head_dim}"
            )
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            reasons.append(f"logits are capped by tanh, not {layer.logit_capping_method!r}")
        if layer.xai_temperature_len > 0:
            reasons.append("it has no temperature by position (attn_temperature_len)")
        fp8 = runner.kv_cache_dtype.itemsize == 1
        reasons += admission.serving_reasons(
            device,
            q_heads=layer.tp_q_head_num,
            kv_heads=layer.tp_k_head_num,
            head_dim=layer.head_dim,
            dtype=runner.dtype,
            kv_dtype=runner.kv_cache_dtype,
            page_size=page_size,
            scale=layer.scaling or None,
            window=_window(layer) or 0,
            soft_cap=float(layer.logit_cap or 0.0),
            k_scale=float(layer.k_scale_float or 1.0) if fp8 else 1.0,
            v_scale=float(layer.v_scale_float or 1.0) if fp8 else 1.0,
        )
        for reason in reasons:
            found.setdefault(reason, []).append(layer.layer_id)
    return [
        reason if len(at) == len(layers) else f"{reason} (layers {', '.join(map(str, at))})"
        for reason, at in found.items()
    ]
