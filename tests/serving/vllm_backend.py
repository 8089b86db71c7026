"""What the backend declares to vLLM, refuses, and counts; no engine is started."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.serving.vllm_harness import prepare

prepare()

import torch  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from vllm.compilation.backends import set_model_tag  # noqa: E402
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.attention.chunked_local_attention import (  # noqa: E402
    create_chunked_local_attention_backend,
)
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
)
from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices, split_attn_metadata  # noqa: E402

import liteattention_vllm  # noqa: E402
from liteattention_emulator import library  # noqa: E402
from liteattention_rocm import attention_paged, attention_varlen, write_kv  # noqa: E402
from liteattention_rocm.engines import LIBRARY_VARIABLE  # noqa: E402
from liteattention_rocm.engines.environment import settings  # noqa: E402
from liteattention_vllm import admission  # noqa: E402
from liteattention_vllm import builder as steps  # noqa: E402
from liteattention_vllm.admission import fp8_dtype  # noqa: E402
from liteattention_vllm.backend import LiteAttentionBackend  # noqa: E402
from liteattention_vllm.layer import LiteAttentionImpl  # noqa: E402


def reasons(**more: Any) -> list[str]:
    asked: dict[str, Any] = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": None, "attn_type": "decoder",
    }  # fmt: skip
    return list(LiteAttentionBackend.validate_configuration(**asked | more))


def test_the_plugin_registers_once_and_for_all() -> None:
    (found,) = [p for p in entry_points(group="vllm.general_plugins") if "lite" in p.name]
    register = found.load()
    for _ in range(2):
        register()
        assert AttentionBackendEnum.CUSTOM.get_class() is LiteAttentionBackend
    assert AttentionBackendEnum[LiteAttentionBackend.get_name()] is AttentionBackendEnum.CUSTOM


def test_looking_at_the_plugin_imports_nothing_heavy() -> None:
    program = "import sys, liteattention_vllm; print({'vllm', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_what_is_supported_is_declared() -> None:
    assert reasons() == []
    assert reasons(dtype=torch.float32, head_size=64, has_sliding_window=True, has_sink=True) == []
    assert reasons(kv_cache_dtype="fp8", block_size=1) == []
    for kind in ("encoder_only", "encoder_decoder"):
        assert reasons(attn_type=kind) == []
    assert reasons(use_non_causal=True) == []
    assert reasons(use_mm_prefix=True) == []
    made = LiteAttentionBackend.get_builder_cls()
    assert made.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER


@pytest.mark.parametrize("images", [True, False])
def test_a_graph_holds_no_prompt_that_may_have_images(
    images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of images attend once more, which a captured step would not do."""
    monkeypatch.setattr(steps, "plans_from_bounds", lambda: True)
    config = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=images))
    found = steps.LiteAttentionBuilder.get_cudagraph_support(config, None)
    single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert found is (single if images else AttentionCGSupport.ALWAYS)


@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("microbatches", [True, False])
def test_microbatches_of_a_model_with_images_are_refused(
    images: bool, microbatches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_mm_prefix_lm=images),
        parallel_config=SimpleNamespace(use_ubatching=microbatches),
        speculative_config=None,
    )
    monkeypatch.setattr(admission, "get_current_vllm_config_or_none", lambda: config)
    if images and microbatches:
        with pytest.raises(ValueError, match=r"--enable-dbo .*--limit-mm-per-prompt"):
            LiteAttentionImpl(4, 64, 1.0)
    else:
        LiteAttentionImpl(4, 64, 1.0)


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("other_group", [False, True])
def test_rows_of_an_image_see_the_whole_image(window: int | None, other_group: bool) -> None:
    """Causal with a window, or of the same image: against float64, row by row.

    The third request's prompt is cut within its image, the fourth begins within one, the last row
    of the fifth is text behind it. Padding rows are left alone.
    """
    heads, kv_heads, dim, page = 4, 2, 64, 8
    rows, lengths = [1, 20, 9, 7, 6], [30, 20, 25, 18, 26]
    ranges: dict[int, list[tuple[int, int]]] = {
        0: [(3, 12)], 1: [(2, 9), (12, 19)], 2: [(18, 27)], 3: [(8, 15)], 4: [(15, 24), (5, 5)]
    }  # fmt: skip
    generator = torch.Generator().manual_seed(8)
    cache = torch.randn(40, kv_heads, page, 2 * dim, generator=generator)
    tables = torch.randperm(40, generator=generator).int().view(2, 5, 4)
    starts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    total = sum(rows)
    common = SimpleNamespace(
        causal=True, num_reqs=5, query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths), block_table_tensor=tables[0],
        max_query_len=20, max_seq_len=30, num_actual_tokens=total + 2, mm_req_doc_ranges=ranges,
    )  # fmt: skip
    made = steps.LiteAttentionBuilder(None, [], None, torch.device("cpu"))
    metadata = made.build(0, common)
    if other_group:
        metadata = made.update_block_table(metadata, tables[1], torch.zeros(1))
    query = torch.randn(total + 2, heads, dim, generator=generator)
    out = torch.full_like(query, 7.0)
    LiteAttentionImpl(heads, dim, 0.2, kv_heads, sliding_window=window).forward(
        None, query, None, None, cache, metadata, out
    )
    row = 0
    for r, (count, length) in enumerate(zip(rows, lengths, strict=True)):
        pages = cache[tables[int(other_group), r].long()].transpose(1, 2).flatten(0, 1)[:length]
        k, v = pages.double().repeat_interleave(heads // kv_heads, 1).chunk(2, -1)
        for at in range(length - count, length):
            key = torch.arange(length)
            seen = (key <= at) & (key > at - (window or length))
            for first, last in ranges[r]:
                if first <= at <= last:
                    seen |= (key >= first) & (key <= last)
            score = torch.einsum("hd,khd->hk", query[row].double(), k) * 0.2
            weights = score.masked_fill(~seen, -math.inf).softmax(-1)
            expected = torch.einsum("hk,khd->hd", weights, v).float()
            torch.testing.assert_close(out[row], expected, atol=2e-5, rtol=2e-5)
            row += 1
    assert (out[total:] == 7.0).all()


def test_an_fp8_cache_holds_what_the_platform_computes_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert fp8_dtype("fp8") is current_platform.fp8_dtype()
    native = torch.float8_e4m3fnuz  # on gfx94x
    monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda cls: native))
    assert fp8_dtype("fp8") is fp8_dtype("fp8_e4m3") is native
    assert reasons(kv_cache_dtype="fp8") == []


def test_an_encoder_is_asked_about_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps none, so the dtype of caches says nothing against it; its layer asks so, too."""
    of_fp32 = {"dtype": torch.float32, "kv_cache_dtype": "bfloat16"}
    assert reasons(**of_fp32) and not reasons(**of_fp32, attn_type="encoder_only")
    monkeypatch.setenv("LITEATTENTION_ENGINE", "gfx942")
    monkeypatch.setenv(LIBRARY_VARIABLE, str(library()))
    settings.cache_clear()
    try:
        for block in (None, 16):
            asked = {"kv_cache_dtype": "fp8_e5m2", "block_size": block}
            for kind in ("decoder", "encoder_decoder"):
                assert any("torch.float8_e5m2" in r for r in reasons(**asked, attn_type=kind))
            assert reasons(**asked, attn_type="encoder_only") == []
        # What has nothing to do with a cache is still refused.
        (found,) = reasons(**asked, attn_type="encoder_only", dtype=torch.float32)
        assert "gfx942" in found and "torch.float32" in found
    finally:
        settings.cache_clear()


def test_every_reason_is_given_at_once() -> None:
    found = reasons(
        head_size=100, use_mla=True, use_sparse=True, use_dcp=True,
        use_pcp=True, use_rswa=True, use_batch_invariant=True, use_adaptive_verification=True,
        attn_type="encoder", kv_cache_dtype="nvfp4",
    )  # fmt: skip
    for part in (
        "kv_cache_dtype",
        "MLA",
        "sparse",
        "attention type encoder not",
        "R-SWA",
        "batch invariance",
        "PCP",
        "DCP",
        "query lens",
        "head dim must be a multiple of 8",
    ):
        assert any(part in reason for reason in found), (part, found)
    assert any("bfloat16" in r for r in reasons(dtype=torch.float32, kv_cache_dtype="bfloat16"))


def test_a_layer_that_cannot_run_says_why() -> None:
    with pytest.raises(ValueError) as error:
        LiteAttentionImpl(
            4, 100, 0.1, 2, alibi_slopes=[1.0] * 4, attn_type="encoder", sinks=torch.zeros(3), odd=1
        )
    for part in ("ALiBi", "encoder attention", "sinks must be [4]", "option odd", "head dim"):
        assert part in str(error.value)
    for window in (0, -1):
        with pytest.raises(ValueError, match=f"sliding_window must be at least 1.*got {window}"):
            LiteAttentionImpl(4, 64, 0.1, 2, sliding_window=window)
    with pytest.raises(ValueError, match="no sliding window in cross-attention"):
        LiteAttentionImpl(4, 64, 0.1, 2, sliding_window=8, attn_type="encoder_decoder")


def build_layer(
    monkeypatch: pytest.MonkeyPatch, tag: str | None, runner: str, rocm: bool = True, **drafts: Any
) -> None:
    """Build a layer of a draft model, which vLLM calls ``tag``, or of the model itself (None)."""
    of_model = nullcontext() if tag is None else set_model_tag(tag)
    config = VllmConfig()
    config.speculative_config = SimpleNamespace(
        **{"num_speculative_tokens": 3, "parallel_drafting": False, **drafts}
    )
    with monkeypatch.context() as faked, set_current_vllm_config(config), of_model:
        faked.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
        faked.setattr(type(current_platform), "is_rocm", lambda self: rocm)
        LiteAttentionImpl(4, 64, 0.1, 2)


@pytest.mark.parametrize("tag", ["draft_model", "eagle_head"])
def test_a_draft_model_of_the_v1_runner_is_refused_on_rocm(
    tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself would stop only in the first step that drafts a second token."""
    with pytest.raises(ValueError) as error:
        build_layer(monkeypatch, tag, "0")
    for part in ("V1 model runner", "num_speculative_tokens=3", "VLLM_USE_V2_MODEL_RUNNER unset"):
        assert part in str(error.value)
    build_layer(monkeypatch, tag, "1")
    build_layer(monkeypatch, tag, "0", rocm=False)
    build_layer(monkeypatch, tag, "0", num_speculative_tokens=1)
    build_layer(monkeypatch, tag, "0", parallel_drafting=True)
    build_layer(monkeypatch, None, "0")


def test_options_that_are_off_are_none() -> None:
    LiteAttentionImpl(4, 64, 0.1, 2, future_feature=None, other_feature=False)


def test_keys_and_values_of_one_head_dim_only() -> None:
    def spec(head_size_v: int) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=16,
            num_kv_heads=2,
            head_size=128,
            head_size_v=head_size_v,
            dtype=torch.bfloat16,
        )

    assert LiteAttentionBackend.customize_spec(spec(128)) == spec(128)
    with pytest.raises(ValueError, match="one head dim, this model's have 128 and 64"):
        LiteAttentionBackend.customize_spec(spec(64))


def test_a_step_with_two_masks_is_refused() -> None:
    builder = LiteAttentionBackend.get_builder_cls()(None, [], None, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="some requests are causal"):
        builder.build(0, SimpleNamespace(causal=torch.tensor([True, False])))


@pytest.mark.parametrize(
    ("order", "causal"), [((0, 1, 2, 3), True), ((0, 2, 1, 3), True), ((0, 1, 2, 3), False)]
)
def test_a_layer_attends_with_sinks_window_and_cap(order: tuple[int, ...], causal: bool) -> None:
    """A layer's calls are those of the API on its views, padding rows left alone.

    Without causality the window reaches as many keys after a row as before it.
    """
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    heads, kv_heads, dim, page = 8, 2, 64, 16
    sinks, window = draw(heads).bfloat16(), 21 if causal else 4
    layer = LiteAttentionImpl(
        heads, dim, 0.2, kv_heads, sliding_window=window, logits_soft_cap=3.0, sinks=sinks
    )  # fmt: skip
    layer.process_weights_after_loading(torch.float32)
    physical = torch.zeros([(6, kv_heads, page, 2 * dim)[i] for i in order])
    cache = physical.permute([order.index(i) for i in range(4)])
    table = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
    lengths = [19, 40]
    total = sum(lengths)
    keys, values = draw(total, kv_heads, dim), draw(total, kv_heads, dim)
    slots = torch.cat(
        [
            table[r, torch.arange(n) // page].long() * page + torch.arange(n) % page
            for r, n in enumerate(lengths)
        ]
    )
    layer.do_kv_cache_update(None, keys, values, cache, slots)

    q_start = torch.tensor([0, 1, 8], dtype=torch.int32)
    common = SimpleNamespace(
        causal=causal, num_reqs=2, query_start_loc=q_start,
        seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table_tensor=table,
        max_query_len=7, max_seq_len=48, num_actual_tokens=10,
    )  # fmt: skip
    builder = LiteAttentionBackend.get_builder_cls()(None, [], None, torch.device("cpu"))
    metadata = builder.build(0, common)
    query, out = draw(10, heads, dim), torch.full((10, heads, dim), 7.0)
    assert layer.forward(None, query, keys, values, cache, metadata, out) is out

    expected = torch.full((10, heads, dim), 7.0, dtype=torch.float64)
    first = 0
    for r, (rows, length) in enumerate(zip((1, 7), lengths, strict=True)):
        mine = slice(first, first + length)
        first += length
        k = keys[mine].double().repeat_interleave(heads // kv_heads, 1)
        v = values[mine].double().repeat_interleave(heads // kv_heads, 1)
        q = query[int(q_start[r]) : int(q_start[r + 1])].double()
        score = 3.0 * torch.tanh(0.2 * torch.einsum("qhd,khd->hqk", q, k) / 3.0)
        position = torch.arange(length - rows, length)[:, None]
        key = torch.arange(length)
        ahead = 0 if causal else window - 1
        score[:, (key > position + ahead) | (key <= position - window)] = -torch.inf
        sink = sinks.double()[:, None, None].expand(-1, rows, 1)
        weight = torch.softmax(torch.cat([score, sink], -1), -1)[..., :-1]
        expected[int(q_start[r]) : int(q_start[r + 1])] = torch.einsum("hqk,khd->qhd", weight, v)
    assert (out.double() - expected).abs().max() < 2e-5
    assert (out[8:] == 7.0).all()


def test_sinks_follow_weights_that_are_loaded_anew() -> None:
    """At the place where graphs read them, whether vLLM says so or a step finds out."""
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
    layer = LiteAttentionImpl(4, 64, 0.125, sinks=parameter)
    assert layer.sinks is not None
    place = layer.sinks.data_ptr()
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    layers = {"one": SimpleNamespace(impl=layer), "other": SimpleNamespace()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    builder = LiteAttentionBackend.get_builder_cls()(
        spec, [*layers, "gone"], config, torch.device("cpu")
    )
    common = SimpleNamespace(
        causal=True, num_reqs=1, query_start_loc=torch.tensor([0, 1]).int(), max_query_len=1,
        seq_lens=torch.tensor([3]).int(), block_table_tensor=torch.zeros(1, 1).int(),
        max_seq_len=3, num_actual_tokens=1,
    )  # fmt: skip
    metadata = builder.build(0, common)

    def loaded() -> None:
        layer.process_weights_after_loading(torch.bfloat16)

    def built() -> None:
        builder.build(0, common)

    def other_pages() -> None:
        builder.update_block_table(metadata, common.block_table_tensor, torch.zeros(1))

    for value, told in enumerate((loaded, built, other_pages), 1):
        parameter.data.fill_(value)
        told()
        assert layer.sinks.dtype is torch.float32 and layer.sinks.tolist() == [value] * 4
        assert layer.sinks.data_ptr() == place


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_no_layer_keeps_a_cache_alive(dtype: str) -> None:
    """vLLM drops one after it has measured the memory of graphs, and all when it shuts down."""
    layer = LiteAttentionImpl(4, 64, 0.125, kv_cache_dtype=dtype)
    cache = torch.zeros(3, 4, 16, 128, dtype=torch.uint8 if dtype != "auto" else torch.bfloat16)
    gone = StorageWeakRef(cache.untyped_storage())
    rows = torch.ones(2, 4, 64, dtype=torch.bfloat16)
    scales = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
    for _ in range(2):
        layer.do_kv_cache_update(scales, rows, rows, cache, torch.tensor([0, 17]))
    assert int((cache != 0).sum()) == 2 * 4 * 128
    del cache
    assert gone.expired()


def test_what_groups_do_not_share_metadata() -> None:
    """vLLM makes slots of cross-attention where it builds; another group's pages alone would leave
    none. Encoders have no pages.
    """
    shape: dict[str, Any] = {
        "block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16,
    }  # fmt: skip
    cross = create_cross_attention_backend(LiteAttentionBackend).get_builder_cls()
    for builder, spec, shared in (
        (cross, CrossAttentionSpec(**shape), False),
        (LiteAttentionBackend.get_builder_cls(), EncoderOnlyAttentionSpec(**shape), False),
        (LiteAttentionBackend.get_builder_cls(), FullAttentionSpec(**shape), True),
    ):
        for config in (None, SimpleNamespace(parallel_config=ParallelConfig())):
            made = builder(spec, [], config, torch.device("cpu"))
            assert made.supports_update_block_table is shared


@pytest.mark.parametrize("option", [{"enable_dbo": True}, {"ubatch_size": 3}])
def test_microbatches_have_metadata_of_their_own(option: dict[str, Any]) -> None:
    """vLLM's V1 runner knows metadata by spec and builder's class, not by microbatch."""
    config = ParallelConfig(**option)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    rows, lengths = [1, 1, 7, 5], [5, 30, 7, 12]
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    seq_lens = torch.tensor(lengths).int()
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens, num_reqs=4, num_actual_tokens=14, max_query_len=7,
        max_seq_len=30, block_table_tensor=torch.arange(8).int().view(4, 2),
        slot_mapping=torch.arange(14),
    )  # fmt: skip
    slices, _ = maybe_create_ubatch_slices(
        True, np.array(rows), 14, 4, config.num_ubatches, split_point=None
    )
    parts = split_attn_metadata(slices, common)
    assert len(parts) == config.num_ubatches > 1
    # As GPUModelRunner._build_attention_metadata does.
    cached: dict[Any, Any] = {}
    for part in parts:
        builder = LiteAttentionBackend.get_builder_cls()(
            spec,
            [],
            SimpleNamespace(
                parallel_config=config,
                compilation_config=SimpleNamespace(static_forward_context={}),
            ),
            torch.device("cpu"),
        )
        key = (spec, type(builder))
        if key in cached and builder.supports_update_block_table:
            metadata = builder.update_block_table(
                cached[key], part.block_table_tensor, part.slot_mapping
            )
        else:
            metadata = builder.build(0, part)
            if builder.supports_update_block_table:
                cached[key] = metadata
        assert metadata.num_actual_tokens == part.num_actual_tokens
        for mine, theirs in (
            (metadata.batch.q_start, part.query_start_loc),
            (metadata.batch.kv_len, part.seq_lens),
            (metadata.batch.page_table, part.block_table_tensor),
        ):
            assert mine.tolist() == theirs.tolist()


def test_chunked_local_attention_sees_its_chunk_only() -> None:
    """vLLM cuts requests into virtual ones, a chunk each, and gives NumPy numbers with them."""
    generator = torch.Generator().manual_seed(6)
    chunk, page, dim, rows, lengths = 4, 2, 64, [4, 10, 5, 1], [6, 17, 9, 4]
    q_start = torch.tensor([0, 4, 14, 19, 20], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    table = torch.randperm(36, generator=generator).int().view(4, 9)
    cache = torch.randn(36, 1, page, 2 * dim, generator=generator)
    common = CommonAttentionMetadata(
        query_start_loc=q_start, query_start_loc_cpu=q_start, seq_lens=seq_lens, num_reqs=4,
        num_actual_tokens=20, max_query_len=max(rows), max_seq_len=max(lengths),
        block_table_tensor=table, slot_mapping=torch.empty(0, dtype=torch.int64),
    )  # fmt: skip
    backend = create_chunked_local_attention_backend(LiteAttentionBackend, chunk)
    spec = SimpleNamespace(block_size=page)
    metadata = backend.get_builder_cls()(spec, [], None, torch.device("cpu")).build(0, common)
    query = torch.randn(20, 1, dim, generator=generator)
    out = torch.empty_like(query)
    LiteAttentionImpl(1, dim, 0.125).forward(None, query, query, query, cache, metadata, out)
    for r, length in enumerate(lengths):
        mine = slice(int(q_start[r]), int(q_start[r + 1]))
        tokens = cache[table[r].long(), 0].reshape(-1, 2 * dim)[:length].double()
        score = 0.125 * query[mine, 0].double() @ tokens[:, :dim].T
        position, key = torch.arange(length - rows[r], length)[:, None], torch.arange(length)
        score[(key > position) | (key // chunk != position // chunk)] = -torch.inf
        expected = torch.softmax(score, -1) @ tokens[:, dim:]
        assert (out[mine, 0].double() - expected).abs().max() < 2e-5


def test_profiling_and_unknown_outputs() -> None:
    layer = LiteAttentionImpl(2, 64, 0.125)
    x, out = torch.ones(3, 2, 64), torch.ones(3, 2, 64)
    assert not layer.forward(None, x, x, x, torch.empty(0), None, out).any()
    with pytest.raises(NotImplementedError, match="fuse_attn_quant"):
        layer.forward(None, x, x, x, torch.empty(0), None, out, output_scale=torch.ones(1))


def test_counters_outlive_a_killed_process(tmp_path: Path) -> None:
    program = (
        "import os, signal; from liteattention_vllm.counters import counters\n"
        "counters.add(2, 5); counters.add(3, 7); os.kill(os.getpid(), signal.SIGKILL)"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "LITEATTENTION_STATISTICS_DIR": str(tmp_path)},
        )
        for _ in range(2)
    ]
    assert [child.wait() for child in children] == [-9, -9]
    found = liteattention_vllm.read_statistics(tmp_path)
    assert found.keys() == {child.pid for child in children}
    assert all((c["attention_calls"], c["attention_rows"]) == (5, 7) for c in found.values())


def test_the_api_is_what_the_layer_calls() -> None:
    """The tests of broken attention replace these names; a rename must not disarm them."""
    from liteattention_vllm import layer

    assert layer.attention_paged is attention_paged and layer.write_kv is write_kv
    assert layer.attention_varlen is attention_varlen
