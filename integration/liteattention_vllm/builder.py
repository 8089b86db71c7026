"""The metadata of a step: one :class:`PagedBatch`, shared by a group of layers.

On a GPU an engine plans from bounds and reads lengths and page tables when it runs. So the builder
rounds the bounds of a step up, which lets later steps, and other groups of layers in the same step,
find the plans that are there; and a graph that vLLM captured replays on any lengths within the
bounds. vLLM refills the tensors of a captured batch in place.
"""

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

from .admission import plans_from_bounds
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
    """Makes the metadata of a step for one group of layers.

    Captured batches: by requests, rows and longest request of the graph; the latest capture counts.
    Owner: this builder. Lifetime: the builder's, which vLLM keeps for as long as its graphs. vLLM
    drops the metadata once a graph is captured, and the graph reads the batch's tensors.
    """

    #: vLLM's class-level default; :meth:`get_cudagraph_support` is what it asks.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    #: Groups whose layers are of one kind differ in their page tables only.
    supports_update_block_table: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        #: Draft models refill the tensors of a batch between their forward passes, in a graph too.
        self.supports_draft_decode_metadata_update = plans_from_bounds()
        self._captured: dict[tuple[int, int, int], PagedBatch] = {}

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Any step, mixed ones and speculation included, where the engine plans from bounds."""
        return cls._cudagraph_support if plans_from_bounds() else AttentionCGSupport.NEVER

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
            max_q_len=_rounded_up(common.max_query_len),
            max_kv_len=_rounded_up(common.max_seq_len),
        )
        counters.add(STEPS)
        return StepMetadata(batch, common.num_actual_tokens)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepMetadata:
        """Build for a step that is captured, and keep the batch, whose tensors the graph reads.

        vLLM gives the largest lengths that a replay may bring as bounds.
        """
        metadata = self.build(0, common_attn_metadata)
        batch = metadata.batch
        self._captured[batch.requests, metadata.num_actual_tokens, batch.max_q_len] = batch
        return metadata

    def update_block_table(
        self, metadata: StepMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> StepMetadata:
        """Return the metadata of another group with layers of the same kind: other pages."""
        batch = metadata.batch.with_pages(blk_table[: metadata.batch.requests])
        return StepMetadata(batch, metadata.num_actual_tokens)

    def update_draft_decode_metadata(self, metadata: StepMetadata) -> None:
        """Nothing to do: engines read the lengths and pages where the draft model writes them."""


def _rounded_up(bound: int) -> int:
    """The next power of two, as a plain integer: chunked local attention gives NumPy numbers."""
    return 1 << max(int(bound) - 1, 0).bit_length() if bound else 0
