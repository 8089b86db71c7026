"""The metadata of a step, shared by a group of layers: a :class:`PagedBatch`, or packed requests.

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
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

from liteattention_rocm import PagedBatch, hip_graphs

from .admission import plans_from_bounds
from .counters import STEPS, counters


@dataclass(slots=True)
class StepMetadata(AttentionMetadata):  # type: ignore[misc]
    """What the layers of one group share in one step.

    ``batch``: rows, lengths and pages of the requests. ``num_actual_tokens``: rows of the step,
    padding included. ``causal``: whether a row sees the keys up to its own only, in all requests.
    ``slot_mapping``: where vLLM's cross-attention writes the keys of new requests, int64; vLLM sets
    it.
    """

    batch: PagedBatch
    num_actual_tokens: int
    causal: bool = True
    slot_mapping: torch.Tensor | None = None


@dataclass(slots=True)
class EncoderMetadata(AttentionMetadata):  # type: ignore[misc]
    """What layers without a cache share in one step: whole requests, packed, each seeing itself.

    ``starts``: int32 [R + 1], where the requests begin. ``longest``: a bound of their lengths.
    """

    starts: torch.Tensor
    longest: int


class LiteAttentionBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the metadata of a step for one group of layers.

    Captured batches: by requests, rows and longest request of the graph; the latest capture counts.
    Owner: this builder. Lifetime: the builder's, which vLLM keeps for as long as its graphs. vLLM
    drops the metadata once a graph is captured, and the graph reads the batch's tensors.
    """

    #: vLLM's class-level default; :meth:`get_cudagraph_support` is what it asks.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    #: Groups whose layers are of one kind differ in their page tables only, but for some builders.
    supports_update_block_table: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if isinstance(kv_cache_spec, (CrossAttentionSpec, EncoderOnlyAttentionSpec)):
            # Slots of cross-attention follow from a group's pages and the encoder's lengths: vLLM
            # builds each. An encoder has no pages.
            self.supports_update_block_table = False
        if getattr(getattr(vllm_config, "parallel_config", None), "use_ubatching", False):
            # vLLM's V1 runner would give the requests of one microbatch to the next.
            self.supports_update_block_table = False
        #: Draft models refill the tensors of a batch between their forward passes, in a graph too.
        self.supports_draft_decode_metadata_update = plans_from_bounds()
        self._captured: dict[tuple[int, int, int], PagedBatch] = {}
        self._sinks: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Any step, mixed ones and speculation included, where the engine plans from bounds."""
        return cls._cudagraph_support if plans_from_bounds() else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StepMetadata | EncoderMetadata:
        """Validate and remember the step's requests; the first layer's call plans it.

        Raises:
            NotImplementedError: some requests of the step are causal and others are not.
        """
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError(
                "liteattention_rocm takes no step in which some requests are causal and others "
                "are not: use another --attention-backend for this model"
            )
        self._refresh_sinks()
        requests = common.num_reqs
        starts = common.query_start_loc[: requests + 1]
        counters.add(STEPS)
        if isinstance(self.kv_cache_spec, EncoderOnlyAttentionSpec):
            return EncoderMetadata(starts, _rounded_up(common.max_query_len))
        batch = PagedBatch(
            starts,
            common.seq_lens[:requests],
            common.block_table_tensor[:requests],
            max_q_len=_rounded_up(common.max_query_len),
            max_kv_len=_rounded_up(common.max_seq_len),
        )
        return StepMetadata(batch, common.num_actual_tokens, bool(common.causal))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: Any
    ) -> StepMetadata | EncoderMetadata:
        """Build for a step that is captured, and keep the batch, whose tensors the graph reads.

        vLLM gives the largest lengths that a replay may bring as bounds. Not for encoders: there it
        gives those of a dummy batch, and one request of a replay may have all rows of the graph.
        """
        hip_graphs.warn("vLLM")
        metadata = self.build(0, common_attn_metadata)
        if isinstance(metadata, EncoderMetadata):
            metadata.longest = _rounded_up(common_attn_metadata.num_actual_tokens)
            return metadata
        batch = metadata.batch
        self._captured[batch.requests, metadata.num_actual_tokens, batch.max_q_len] = batch
        return metadata

    def update_block_table(
        self, metadata: StepMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> StepMetadata:
        """Return the metadata of another group with layers of the same kind: other pages."""
        self._refresh_sinks()
        batch = metadata.batch.with_pages(blk_table[: metadata.batch.requests])
        return StepMetadata(batch, metadata.num_actual_tokens, metadata.causal)

    def _refresh_sinks(self) -> None:
        """Let the group's layers follow weights that changed, in one operation outside of graphs.

        vLLM does not always say when they do: in reloads in a kernel's own format, or where a
        trainer calls the model's ``load_weights``.
        """
        if self._sinks is None:
            self._sinks = []
            for name in self.layer_names:
                layers = self.vllm_config.compilation_config.static_forward_context
                copied = getattr(getattr(layers.get(name), "impl", None), "copied_sinks", None)
                if copied is not None:
                    self._sinks.append(copied)
        if self._sinks:
            refresh_sinks(self._sinks)

    def update_draft_decode_metadata(self, metadata: StepMetadata) -> None:
        """Nothing to do: engines read the lengths and pages where the draft model writes them."""


def refresh_sinks(copied: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the sinks of all layers at once: (copy, what it is of), [num_heads] each."""
    copies, given = zip(*copied, strict=True)
    torch._foreach_copy_(copies, given)


def _rounded_up(bound: int) -> int:
    """The next power of two, as a plain integer: chunked local attention gives NumPy numbers."""
    return 1 << max(int(bound) - 1, 0).bit_length() if bound else 0
