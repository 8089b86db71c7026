"""The metadata of a step: one :class:`PagedBatch`, shared by a group of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

from liteattention_rocm import PagedBatch

from .counters import STEPS, counters


@dataclass(slots=True)
class StepMetadata(AttentionMetadata):  # type: ignore[misc]
    """What the layers of one group share in one step.

    ``batch``: rows, lengths and pages of the requests, all of them causal.
    ``num_actual_tokens``: rows of the step, padding included.
    """

    batch: PagedBatch
    num_actual_tokens: int


class LiteAttentionBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the metadata of a step for one group of layers."""

    #: Calls have not been captured and replayed by vLLM on a GPU yet, so it must not try: it then
    #: captures the pieces between attention layers (PIECEWISE) and calls these eagerly.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StepMetadata:
        """Validate and remember the step's requests; the first layer's call plans it.

        Raises:
            NotImplementedError: requests of the step are not causal.
        """
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError(
                "liteattention_rocm takes no step in which some requests are causal and others "
                "are not: use another --attention-backend for this model"
            )
        if not common.causal:
            raise NotImplementedError(
                "liteattention_rocm serves causal decoders, and this step is not causal (vLLM and "
                "this backend also disagree on what a sliding window hides then): use another "
                "--attention-backend for this model"
            )
        requests = common.num_reqs
        batch = PagedBatch(
            common.query_start_loc[: requests + 1],
            common.seq_lens[:requests],
            common.block_table_tensor[:requests],
            max_q_len=int(common.max_query_len),  # a NumPy number in chunked local attention
            max_kv_len=common.max_seq_len,
        )
        counters.add(STEPS)
        return StepMetadata(batch, common.num_actual_tokens)
