"""The metadata of a step, shared by a group of layers: a :class:`PagedBatch`, or packed requests.

On a GPU an engine plans from bounds and reads lengths and page tables when it runs. So the builder
rounds the bounds of a step up, which lets later steps, and other groups of layers in the same step,
find the plans that are there; and a graph that vLLM captured replays on any lengths within the
bounds. vLLM refills the tensors of a captured batch in place.
"""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True, slots=True)
class Images:
    """Rows of a step that see later keys: those of images, up to the end of their image.

    ``rows``: int64 [N], where they are in the step. ``batch``: an image, or what the step holds of
    it, for each request; its keys end with the image. ``requests``: int64 [images], whose they are.
    """

    rows: torch.Tensor
    batch: PagedBatch
    requests: torch.Tensor

    def with_pages(self, page_table: torch.Tensor) -> Images:
        """Return the same rows in the cache of another group of layers, int32 [R, columns]."""
        return Images(self.rows, self.batch.with_pages(page_table[self.requests]), self.requests)


@dataclass(slots=True)
class StepMetadata(AttentionMetadata):  # type: ignore[misc]
    """What the layers of one group share in one step.

    ``batch``: rows, lengths and pages of the requests. ``num_actual_tokens``: rows of the step,
    padding included. ``causal``: whether a row sees the keys up to its own only, in all requests.
    ``slot_mapping``: where vLLM's cross-attention writes the keys of new requests, int64; vLLM sets
    it. ``images``: rows that attend once more, to more keys; None without images.
    """

    batch: PagedBatch
    num_actual_tokens: int
    causal: bool = True
    slot_mapping: torch.Tensor | None = None
    images: Images | None = None


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
        """Any step, mixed ones and speculation included, where the engine plans from bounds.

        Not prompts of models whose images are no causal ones: their rows attend once more.
        """
        if not plans_from_bounds():
            return AttentionCGSupport.NEVER
        if getattr(getattr(vllm_config, "model_config", None), "is_mm_prefix_lm", False):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

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
        metadata = StepMetadata(batch, common.num_actual_tokens, bool(common.causal))
        if getattr(common, "mm_req_doc_ranges", None):
            metadata.images = images(common)
        return metadata

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
        pages = blk_table[: metadata.batch.requests]
        return StepMetadata(
            metadata.batch.with_pages(pages),
            metadata.num_actual_tokens,
            metadata.causal,
            images=None if metadata.images is None else metadata.images.with_pages(pages),
        )

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


def images(common: Any) -> Images | None:
    """Find the rows of a step that see later keys, None if there are none.

    vLLM's ``mm_req_doc_ranges`` has the first and last position of each image by request. It leaves
    out images longer than the model's window, unless the window bounds them, too: so a window of
    the keys before a row, and all keys up to the image's end, is what a row sees. Where a chunk of
    the prompt ends within an image, its rows see what is there.
    """
    lengths = common.seq_lens_cpu_upper_bound
    lengths = (common.seq_lens if lengths is None else lengths).tolist()
    starts = common.query_start_loc_cpu.tolist()
    rows: list[int] = []
    pieces: list[tuple[int, int, int]] = []  # request, rows, keys
    for request, ranges in common.mm_req_doc_ranges.items():
        before = lengths[request] - (starts[request + 1] - starts[request])
        for first, last in ranges:
            begin, end = max(first, before), min(last + 1, lengths[request])
            if last <= first or begin >= end:
                continue
            at = starts[request] - before
            rows.extend(range(at + begin, at + end))
            pieces.append((request, end - begin, end))
    if not pieces:
        return None
    requests, new, keys = zip(*pieces, strict=True)
    device = common.seq_lens.device
    of = torch.tensor(requests, device=device)
    batch = PagedBatch(
        torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32, device=device),
        torch.tensor(keys, dtype=torch.int32, device=device),
        common.block_table_tensor[of],
        max_q_len=_rounded_up(max(new)),
        max_kv_len=_rounded_up(max(keys)),
    )
    return Images(torch.tensor(rows, device=device), batch, of)


def refresh_sinks(copied: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the sinks of all layers at once: (copy, what it is of), [num_heads] each."""
    copies, given = zip(*copied, strict=True)
    torch._foreach_copy_(copies, given)


def _rounded_up(bound: int) -> int:
    """The next power of two, as a plain integer: chunked local attention gives NumPy numbers."""
    return 1 << max(int(bound) - 1, 0).bit_length() if bound else 0
