"""The SGLang adapter beside SGLang's real pools and layers, without a server.

What no small model asks for: sinks, fp8 caches, refusals, and batches made by hand.
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.allocator.swa import PureSWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from liteattention_sglang import srt
from tests.serving import encoders, models

load_plugins()

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 64, 128


def pool(page_size: int = 1, dtype: torch.dtype = torch.float32) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=SLOTS, page_size=page_size, dtype=dtype, head_num=KV_HEADS, head_dim=DIM, layer_num=1,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip


def runner(layers: list[RadixAttention], cache: Any, page_size: int = 1, **more: Any) -> Any:
    return SimpleNamespace(
        **{
            "model": torch.nn.ModuleList(layers),
            "token_to_kv_pool": cache,
            "req_to_token_pool": SimpleNamespace(
                req_to_token=torch.zeros(8, 64, dtype=torch.int32)
            ),
            "page_size": page_size,
            "is_draft_worker": False,
            "kv_index_translator": SimpleNamespace(is_translating=False),
            "dtype": torch.float32,
            "kv_cache_dtype": cache.dtype,
            "server_args": SimpleNamespace(disable_radix_cache=False, chunked_prefill_size=512),
            **more,
        }
    )


class Step:
    """A step over requests with ``old`` cached and ``new`` fresh tokens, in random pages."""

    def __init__(self, made: Any, old: list[int], new: list[int], decode: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.table = made.req_to_token_pool.req_to_token
        page = made.page_size
        pages = torch.randperm(SLOTS // page - 1, generator=generator) + 1  # page 0 is nobody's
        self.rows = torch.arange(len(old)) + 2
        lengths = [a + b for a, b in zip(old, new, strict=True)]
        fresh, used = [], 0
        for row, length, before in zip(self.rows, lengths, old, strict=True):
            taken = pages[used : used + math.ceil(length / page)]
            used += len(taken)
            slots = (taken[:, None] * page + torch.arange(page)).flatten()[:length]
            self.table[row, :length] = slots.int()
            fresh.append(slots[before:])
        self.old, self.new, self.lengths = old, new, lengths
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=len(old),
            req_pool_indices=self.rows,
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens=torch.tensor(new, dtype=torch.int32),
            extend_seq_lens_cpu=new,
            out_cache_loc=torch.cat(fresh),
            out_cache_loc_is_physical=False,
        )

    def fill(self, cache: Any, at: Any = lambda slots: slots) -> None:
        """Put random keys and values where the requests' cached tokens lie."""
        generator = torch.Generator().manual_seed(2)
        for row, before in zip(self.rows, self.old, strict=True):
            slots = at(self.table[row, :before].long())
            for buffer in (cache.k_buffer[0], cache.v_buffer[0]):
                numbers = torch.randn(before, KV_HEADS, DIM, generator=generator)
                buffer[slots] = numbers.to(cache.dtype).view(buffer.dtype)  # fp8 is kept as bytes

    def expected(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None = None,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        at: Any = lambda slots: slots,
        causal: bool = True,
    ) -> torch.Tensor:
        """Attention in float64, key by key as SGLang names them; ``window``: keys before a row."""
        out, row = [], 0
        for request, length, count in zip(self.rows, self.lengths, self.new, strict=True):
            slots = at(self.table[request, :length].long())
            k = keys[slots].double().repeat_interleave(HEADS // KV_HEADS, 1)
            v = values[slots].double().repeat_interleave(HEADS // KV_HEADS, 1)
            for i in range(count):
                position = length - count + i
                scores = torch.einsum("hd,khd->hk", q[row].double(), k) * DIM**-0.5
                if cap:
                    scores = cap * torch.tanh(scores / cap)
                seen = torch.arange(length) <= (position if causal else length)
                if window is not None:
                    seen &= torch.arange(length) >= position - window
                    seen &= torch.arange(length) <= position + window
                scores[:, ~seen] = -math.inf
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double()[:, None]], 1)
                weights = scores.softmax(-1)[:, :length]
                out.append(torch.einsum("hk,khd->hd", weights, v))
                row += 1
        return torch.stack(out).float()


STEPS = [
    pytest.param([0, 0, 0], [5, 1, 17], False, id="prefill"),
    pytest.param([8, 0, 21], [3, 9, 1], False, id="mixed with prefixes"),
    pytest.param([1, 30, 7], [1, 1, 1], True, id="decode"),
]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("options", ["plain", "window", "cap and sinks"])
@pytest.mark.parametrize(("old", "new", "decode"), STEPS)
def test_steps(old: list[int], new: list[int], decode: bool, options: str, page_size: int) -> None:
    window = 6 if options == "window" else -1
    cap = 2.0 if options == "cap and sinks" else 0.0
    layer = RadixAttention(
        HEADS, DIM, DIM**-0.5, KV_HEADS, 0, logit_cap=cap, sliding_window_size=window
    )
    made = runner([layer], pool(page_size), page_size)
    backend = ATTENTION_BACKENDS[srt.BACKEND_NAME](made)
    step = Step(made, old, new, decode)
    step.fill(made.token_to_kv_pool)
    backend.init_forward_metadata(step.batch)
    generator = torch.Generator().manual_seed(3)
    total = sum(new)
    q = torch.randn(total, HEADS * DIM, generator=generator)
    k, v = torch.randn(2, total, KV_HEADS, DIM, generator=generator)
    more = {}
    sinks = None
    if cap:
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
        more["sinks"] = sinks.to(torch.bfloat16)
    out = (backend.forward_decode if decode else backend.forward_extend)(
        q, k, v, layer, step.batch, **more
    )
    keys, values = made.token_to_kv_pool.get_kv_buffer(0)
    assert torch.equal(keys[step.batch.out_cache_loc], k)
    expected = step.expected(
        q.view(total, HEADS, DIM), keys, values, None if window < 0 else window, cap, sinks
    )
    assert out.shape == (total, HEADS * DIM)
    torch.testing.assert_close(out.view_as(expected), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("page_size", [1, 4])
def test_layers_with_a_window_have_a_pool_of_their_own(page_size: int) -> None:
    full = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
    near = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 1, sliding_window_size=6)
    cache = SWAKVPool(
        size=SLOTS, size_swa=SLOTS, page_size=page_size, dtype=torch.float32, head_num=KV_HEADS,
        head_dim=DIM, swa_attention_layer_ids=[1], full_attention_layer_ids=[0], device="cpu",
    )  # fmt: skip
    # Pages lie elsewhere in the second pool; the last entry is for slot -1.
    pages = torch.randperm(SLOTS // page_size - 1, generator=torch.Generator().manual_seed(4)) + 1
    mapping = torch.zeros(SLOTS + page_size + 1, dtype=torch.int64)
    mapping[page_size:SLOTS] = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
    cache.register_mapping(mapping)
    made = runner([full, near], cache, page_size)
    backend = ATTENTION_BACKENDS[srt.BACKEND_NAME](made)
    step = Step(made, [8, 0, 21], [3, 9, 1], decode=False)
    step.fill(cache.full_kv_pool)
    step.fill(cache.swa_kv_pool, mapping.__getitem__)
    backend.init_forward_metadata(step.batch)
    q = torch.randn(13, HEADS, DIM)
    k, v = torch.randn(2, 13, KV_HEADS, DIM)
    for layer, part, window, at in (
        (full, cache.full_kv_pool, None, lambda slots: slots),
        (near, cache.swa_kv_pool, 6, mapping.__getitem__),
    ):
        out = backend.forward_extend(q.view(13, -1), k, v, layer, step.batch)
        assert torch.equal(part.k_buffer[0][at(step.batch.out_cache_loc)], k)
        expected = step.expected(q, part.k_buffer[0], part.v_buffer[0], window, at=at)
        torch.testing.assert_close(out.view_as(expected), expected, atol=2e-5, rtol=2e-5)


def test_layers_that_all_have_a_window() -> None:
    """The first pool is empty, and slots have one name."""
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0, sliding_window_size=6)
    cache = SWAKVPool(
        size=0, size_swa=SLOTS, page_size=1, dtype=torch.float32, head_num=KV_HEADS, head_dim=DIM,
        swa_attention_layer_ids=[0], full_attention_layer_ids=[], device="cpu",
    )  # fmt: skip
    PureSWATokenToKVPoolAllocator(SLOTS, 1, torch.float32, "cpu", cache, need_sort=False)
    made = runner([layer], cache)
    made.req_to_token_pool.req_to_token = torch.zeros(8, 2 * SLOTS, dtype=torch.int32)
    backend = ATTENTION_BACKENDS[srt.BACKEND_NAME](made)
    assert backend._steps._columns == SLOTS  # what tables of graphs are sized by
    step = Step(made, [8, 0, 21], [3, 9, 1], decode=False)
    step.fill(cache.swa_kv_pool)
    backend.init_forward_metadata(step.batch)
    q = torch.randn(13, HEADS, DIM)
    k, v = torch.randn(2, 13, KV_HEADS, DIM)
    out = backend.forward_extend(q.view(13, -1), k, v, layer, step.batch)
    keys, values = cache.get_kv_buffer(0)
    assert torch.equal(keys[step.batch.out_cache_loc], k)
    expected = step.expected(q, keys, values, 6)
    torch.testing.assert_close(out.view_as(expected), expected, atol=2e-5, rtol=2e-5)


def hybrid_pool(kind: type = HybridLinearKVPool, **more: Any) -> HybridLinearKVPool:
    """Layers 1 and 3 of a model attend, the others are Mamba's or of linear attention."""
    return kind(
        size=SLOTS, dtype=torch.float32, page_size=1, head_num=KV_HEADS, head_dim=DIM,
        full_attention_layer_ids=[1, 3], device="cpu", mamba_pool=None, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("old", "new", "decode"), STEPS)
def test_hybrids_keep_keys_for_some_layers(old: list[int], new: list[int], decode: bool) -> None:
    """Qwen3-Next, Nemotron-H, Falcon-H1 and others: layers have the model's numbers."""
    layers = [RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, at) for at in (1, 3)]
    # Lightning attention has layers of the same class, which SGLang computes elsewhere.
    linear = RadixAttention(HEADS, 7, 1.0, KV_HEADS, 0, v_head_dim=DIM)
    cache = hybrid_pool()
    made = runner([linear, *layers], cache)
    backend = ATTENTION_BACKENDS[srt.BACKEND_NAME](made)
    step = Step(made, old, new, decode)
    step.fill(cache.full_kv_pool)
    backend.init_forward_metadata(step.batch)
    rows = sum(new)
    for at, layer in enumerate(layers):
        q = torch.randn(rows, HEADS, DIM)
        k, v = torch.randn(2, rows, KV_HEADS, DIM)
        out = backend.forward_extend(q.view(rows, -1), k, v, layer, step.batch)
        keys, values = cache.full_kv_pool.k_buffer[at], cache.full_kv_pool.v_buffer[at]
        assert torch.equal(keys[step.batch.out_cache_loc], k)
        expected = step.expected(q, keys, values)
        torch.testing.assert_close(out.view_as(expected), expected, atol=2e-5, rtol=2e-5)


def test_hybrids_with_other_caches_are_refused() -> None:
    """Latent attention (Kimi Linear), and hybrids that SGLang attends in by its own backend."""

    class Sparse(HybridLinearKVPool):
        pass

    layer = RadixAttention(HEADS, DIM, 1.0, KV_HEADS, 1)
    latent = hybrid_pool(use_mla=True, kv_lora_rank=64, qk_rope_head_dim=16)
    for cache, name in ((latent, "MLATokenToKVPool"), (hybrid_pool(Sparse), "Sparse")):
        with pytest.raises(ValueError, match=f"the cache is a {name}"):
            ATTENTION_BACKENDS[srt.BACKEND_NAME](runner([layer], cache))


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])  # the latter: gfx94x
@pytest.mark.parametrize("source", ["checkpoint", "--quantization-param-path", "both"])
def test_fp8_cache_is_written_and_read_with_the_models_scales(
    fp8: torch.dtype, source: str
) -> None:
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
    if source == "checkpoint":
        layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
        layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(2.0)
    else:
        if (
            source == "both"
        ):  # SGLang leaves the checkpoint's numbers, but its pool takes the file's
            layer.k_scale_float, layer.v_scale_float = 8.0, 0.25
        layer.k_scale, layer.v_scale = 0.5, 2.0
    made = runner([layer], pool(dtype=fp8))
    backend = ATTENTION_BACKENDS[srt.BACKEND_NAME](made)
    step = Step(made, [8, 21], [3, 1], decode=False)
    step.fill(made.token_to_kv_pool)
    backend.init_forward_metadata(step.batch)
    q = torch.randn(4, HEADS, DIM)
    k, v = torch.randn(2, 4, KV_HEADS, DIM)
    out = backend.forward_extend(q.view(4, -1), k.clone(), v.clone(), layer, step.batch)
    keys, values = made.token_to_kv_pool.get_kv_buffer(0)
    keys, values = keys.float() * 0.5, values.float() * 2.0
    stored = keys[step.batch.out_cache_loc]
    torch.testing.assert_close(stored, k, atol=0.02, rtol=0.07)  # 3 bits of mantissa
    other = pool(dtype=fp8)  # as SGLang's other backends write, which may serve the other phase
    slots = step.batch.out_cache_loc
    other.set_kv_buffer(layer, slots, k.clone(), v.clone(), layer.k_scale, layer.v_scale)
    for mine, theirs in zip(
        made.token_to_kv_pool.get_kv_buffer(0), other.get_kv_buffer(0), strict=True
    ):
        assert torch.equal(mine[slots].float(), theirs[slots].float())
    expected = step.expected(q, keys, values)
    torch.testing.assert_close(out.view_as(expected), expected, atol=1e-4, rtol=1e-4)


def test_scales_that_scale_nothing_are_refused() -> None:
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
    layer.k_scale, layer.v_scale = 0.0, -1.0
    with pytest.raises(ValueError) as refused:
        ATTENTION_BACKENDS[srt.BACKEND_NAME](runner([layer], pool(dtype=torch.float8_e4m3fn)))
    for name, got in (("k_scale", "0.0"), ("v_scale", "-1.0")):
        assert f"{name} must be" in str(refused.value) and f"got {got}" in str(refused.value)
    ATTENTION_BACKENDS[srt.BACKEND_NAME](runner([layer], pool()))  # which has no scales


def test_every_reason_against_a_model_at_once() -> None:
    layers = [
        RadixAttention(HEADS, DIM, 1.0, KV_HEADS, 0, is_cross_attention=True),
        RadixAttention(
            HEADS,
            DIM,
            1.0,
            KV_HEADS,
            1,
            sliding_window_size=9,
            attn_type=AttentionType.ENCODER_ONLY,
        ),
        RadixAttention(HEADS, DIM, 1.0, KV_HEADS, 2, v_head_dim=32),
        RadixAttention(HEADS, DIM, 1.0, KV_HEADS, 3, logit_cap=1.0, logit_capping_method="other"),
    ]
    cache = pool()
    cache.kv_cache_layout = "hnd"
    made = runner(
        layers,
        cache,
        is_draft_worker=True,
        prefill_aware_swa=True,
        kv_cache_dtype=torch.float16,  # the engine's to refuse: the model is fp32
        kv_index_translator=SimpleNamespace(is_translating=True),
    )
    with pytest.raises(ValueError) as refused:
        ATTENTION_BACKENDS[srt.BACKEND_NAME](made)
    text = str(refused.value)
    for part in (
        "draft models",
        "windows hide the prompt",
        "unified memory",
        "'hnd'",
        "cross-attention (layers 0)",
        "--disable-radix-cache --chunked-prefill-size -1 (layers 1)",
        "64 and 32 (layers 2)",
        "tanh, not 'other' (layers 3)",
        "torch.float16",
    ):
        assert part in text, (part, text)


def test_a_pool_that_writes_its_own_way_is_refused() -> None:
    class Writes(MHATokenToKVPool):
        def set_kv_buffer(self, *arguments: Any, **options: Any) -> None:
            raise RuntimeError("it writes elsewhere")

    cache = pool()
    cache.__class__ = Writes
    with pytest.raises(ValueError, match="a Writes writes its own way"):
        ATTENTION_BACKENDS[srt.BACKEND_NAME](
            runner([RadixAttention(HEADS, DIM, 1.0, KV_HEADS, 0)], cache)
        )


def test_the_hooks_are_sglangs() -> None:
    """A renamed hook would never be called, and SGLang would do without."""
    from liteattention_sglang.srt_attention import LiteAttentionBackend

    overridden = [
        name
        for name, method in vars(LiteAttentionBackend).items()
        if callable(method) and not name.startswith("_")
    ]
    assert len(overridden) == 8
    for name in overridden:
        if name == "get_cpu_graph_seq_len_fill_value":  # of its runner on CPUs
            continue
        own = inspect.signature(getattr(LiteAttentionBackend, name)).parameters
        theirs = inspect.signature(getattr(AttentionBackend, name)).parameters
        assert list(own)[: len(theirs)] == list(theirs) or name.startswith("forward")


def test_a_model_that_passes_more_is_refused() -> None:
    layer = RadixAttention(HEADS, DIM, 1.0, KV_HEADS, 0)
    made = runner([layer], pool())
    backend = ATTENTION_BACKENDS[srt.BACKEND_NAME](made)
    step = Step(made, [3], [1], decode=True)
    backend.init_forward_metadata(step.batch)
    q, k = torch.randn(1, HEADS * DIM), torch.randn(1, KV_HEADS, DIM)
    with pytest.raises(ValueError, match="passes aux, rel_bias"):
        backend.forward_decode(q, k, k, layer, step.batch, rel_bias=q, aux=1, return_lse=False)


def test_a_padded_decode_step() -> None:
    """SGLang pads batches of data-parallel and sequence-parallel runs, graphs or none."""
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
    made = runner([layer], pool())
    backend = ATTENTION_BACKENDS[srt.BACKEND_NAME](made)
    step = Step(made, [8, 21], [1, 1], decode=True)
    step.fill(made.token_to_kv_pool)
    padded = ForwardBatch(
        forward_mode=ForwardMode.DECODE, batch_size=4, input_ids=torch.tensor([3, 4]),
        positions=torch.tensor([8, 21]), req_pool_indices=step.rows,
        seq_lens=torch.tensor(step.lengths), seq_lens_cpu=torch.tensor(step.lengths),
        out_cache_loc=step.batch.out_cache_loc, seq_lens_sum=sum(step.lengths),
    )  # fmt: skip
    padded._pad_inputs_to_size(SimpleNamespace(attn_backend=backend), 4, 4)
    assert padded.seq_lens.tolist() == [9, 22, 1, 1] and padded.seq_lens_sum == 33
    assert backend.get_cpu_graph_seq_len_fill_value() == 1
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    backend.init_forward_metadata(padded)
    q = torch.randn(4, HEADS, DIM)
    k, v = torch.randn(2, 4, KV_HEADS, DIM, dtype=torch.float64)  # converted, as the pool does
    out = backend.forward_decode(q.view(4, -1), k, v, layer, padded)
    keys, values = made.token_to_kv_pool.get_kv_buffer(0)
    expected = step.expected(q[:2], keys, values)
    torch.testing.assert_close(out[:2].view_as(expected), expected, atol=2e-5, rtol=2e-5)
    assert out[2:].isfinite().all()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", [AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL])
def test_an_encoders_rows_see_later_tokens(kind: AttentionType, window: int | None) -> None:
    """All of their request; within a window, as many as before them."""
    layer = RadixAttention(
        HEADS, DIM, DIM**-0.5, KV_HEADS, 0, attn_type=kind,
        sliding_window_size=-1 if window is None else window,
    )  # fmt: skip
    whole = SimpleNamespace(disable_radix_cache=True, chunked_prefill_size=-1)
    made = runner([layer], pool(), server_args=whole)
    backend = ATTENTION_BACKENDS[srt.BACKEND_NAME](made)
    step = Step(made, [0, 0, 0], [1, 19, 8], decode=False)
    backend.init_forward_metadata(step.batch)
    q = torch.randn(28, HEADS, DIM)
    k, v = torch.randn(2, 28, KV_HEADS, DIM)
    out = backend.forward_extend(q.view(28, -1), k, v, layer, step.batch)
    keys, values = made.token_to_kv_pool.get_kv_buffer(0)
    expected = step.expected(q, keys, values, window, causal=False)
    torch.testing.assert_close(out.view_as(expected), expected, atol=2e-5, rtol=2e-5)


def test_image_tokens_that_want_to_see_each_other_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = runner([RadixAttention(HEADS, DIM, 1.0, KV_HEADS, 0)], pool())
    for wants, images, warnings in ((False, True, 0), (True, False, 0), (True, True, 1)):
        if wants:
            made.model.prepare_attn_masks = lambda *arguments: None
        backend = ATTENTION_BACKENDS[srt.BACKEND_NAME](made)
        step = Step(made, [3], [2], decode=False)
        step.batch.contains_image_inputs = lambda images=images: images
        caplog.clear()
        for _ in range(2):
            backend.init_forward_metadata(step.batch)
        assert caplog.text.count("tokens of an image see each other") == warnings


def test_speculative_steps_are_refused() -> None:
    made = runner([RadixAttention(HEADS, DIM, 1.0, KV_HEADS, 0)], pool())
    backend = ATTENTION_BACKENDS[srt.BACKEND_NAME](made)
    step = Step(made, [3], [1], decode=False)
    step.batch.forward_mode = ForwardMode.TARGET_VERIFY
    with pytest.raises(ValueError, match="TARGET_VERIFY"):
        backend.init_forward_metadata(step.batch)


LISTED = ("gpt-oss", "gemma4", "exaone4")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folders = models.make(tmp_path_factory.mktemp("models"), ["llama-d64", *LISTED])
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def model(made: dict[str, str]) -> str:
    return made["llama-d64"]


def resolved(model: str, **options: Any) -> Any:
    arguments = ServerArgs(model_path=model, **{"device": "cpu", **options})
    arguments.resolve_once()
    return resolved_view(arguments)


def test_graphs_are_off_on_a_cpu(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """By default SGLang would capture decode steps."""
    ours, other = srt.BACKEND_NAME, "triton"
    assert resolved(model, attention_backend=other).cuda_graph_config.decode.backend == "full"
    with caplog.at_level("INFO"):
        config = resolved(model, attention_backend=ours).cuda_graph_config
    assert config.decode.backend == config.prefill.backend == "disabled"
    assert caplog.text.count("graphs are off for decode") == 1
    config = resolved(model, attention_backend=other, decode_attention_backend=ours)
    assert config.cuda_graph_config.decode.backend == "disabled"
    config = resolved(model, attention_backend=other, prefill_attention_backend=ours)
    assert config.cuda_graph_config.decode.backend == "full"


def test_graphs_are_on_on_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps whole, prompts in pieces, on ROCm if asked to; whole prompts are refused."""
    options = {"attention_backend": srt.BACKEND_NAME, "device": "cuda"}
    for cuda, prompts in ((True, "breakable"), (False, "disabled")):
        monkeypatch.setattr("sglang.srt.utils.is_cuda", lambda cuda=cuda: cuda)
        config = resolved(model, **options).cuda_graph_config
        assert (config.decode.backend, config.prefill.backend) == ("full", prompts)
    config = resolved(model, **options, cuda_graph_backend_prefill="breakable").cuda_graph_config
    assert config.decode.backend == "full" and config.prefill.backend == "breakable"
    with pytest.raises(ValueError, match="no prompts whole"):
        resolved(model, **options, cuda_graph_backend_prefill="full")


def test_prompts_of_encoders_stay_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang shares prefixes of a BERT by default, whose keys depend on what follows them."""
    encoders.make("bert", tmp_path)
    assert not resolved(str(tmp_path), attention_backend="torch_native").disable_radix_cache
    with caplog.at_level("INFO"):
        view = resolved(str(tmp_path), attention_backend=srt.BACKEND_NAME)
    assert view.disable_radix_cache and view.chunked_prefill_size == -1
    assert caplog.text.count("prompts stay whole") == 1


@pytest.mark.parametrize(
    "spelling", [{"attn_dp_size": 2}, {"dp_size": 2, "enable_dp_attention": True}]
)
def test_every_reason_against_the_arguments_at_once(model: str, spelling: dict[str, Any]) -> None:
    """SGLang makes the first spelling of data-parallel attention out of the second."""
    with pytest.raises(ValueError) as refused:
        resolved(
            model,
            attention_backend=srt.BACKEND_NAME,
            speculative_algorithm="NGRAM",
            disaggregation_mode="prefill",
            enable_two_batch_overlap=True,
            enable_torch_compile=True,
            tp_size=2,
            **spelling,
        )
    for part in (
        "NGRAM", "--disaggregation-mode", "--enable-two-batch-overlap", "--enable-torch-compile",
        "--attn-dp-size", "--dp-size with --enable-dp-attention",
    ):  # fmt: skip
        assert part in str(refused.value)
    resolved(model, attention_backend="triton", disaggregation_mode="prefill")  # not ours to refuse


def test_replicas_are_no_data_parallel_attention(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether SGLang says so itself or only the arguments do."""
    resolved(model, attention_backend=srt.BACKEND_NAME, dp_size=2)
    asked = [(1, False), (2, False), (1, True)]
    views = [
        SimpleNamespace(attn_dp_size=size, enable_dp_attention=flag, ep_join_mode=None)
        for size, flag in asked
    ]
    assert [srt.data_parallel_attention(view) for view in views] == [False, True, True]
    monkeypatch.delattr("sglang.srt.runtime_context.attn_dp_enabled_of")
    assert [srt.data_parallel_attention(view) for view in views] == [False, True, True]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_no_phase_of_deterministic_inference(model: str, phase: str) -> None:
    """SGLang looks at --attention-backend only, which another backend's name satisfies."""
    options: dict[str, Any] = {"enable_deterministic_inference": True}
    resolved(model, attention_backend="triton", **options)
    options[f"{phase}_attention_backend"] = srt.BACKEND_NAME
    with pytest.raises(ValueError, match="leave out --enable-deterministic-inference"):
        resolved(model, attention_backend="triton", **options)


@pytest.mark.parametrize("name", LISTED)
def test_models_whose_backends_sglang_lists(made: dict[str, str], name: str) -> None:
    ours, other = srt.BACKEND_NAME, "triton"
    for chosen in (
        {"attention_backend": ours},
        {"attention_backend": other, "prefill_attention_backend": ours},
        {"attention_backend": other, "decode_attention_backend": ours},
    ):
        view = resolved(made[name], **chosen)
        assert {field: getattr(view, field) for field in chosen} == chosen
    with pytest.raises(AssertionError):  # the lists hold for everybody else
        resolved(made[name], attention_backend="flex_attention")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_models_config_asks_for(tmp_path: Path, device: str) -> None:
    """Llama 4 is refused with the reason, not because SGLang's list lacks our name."""
    import transformers

    config = transformers.Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=8192)
    config.architectures = ["Llama4ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"attention_chunk_size 8192"):
        resolved(str(tmp_path), attention_backend=srt.BACKEND_NAME, device=device)


def test_registering_again_changes_nothing() -> None:
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    hooks = len(resolution_hooks._HOOKS["handle_attention_backend_compatibility"])
    factory = ATTENTION_BACKENDS[srt.BACKEND_NAME]
    srt.register()
    assert ATTENTION_BACKEND_CHOICES.count(srt.BACKEND_NAME) == 1
    assert len(resolution_hooks._HOOKS["handle_attention_backend_compatibility"]) == hooks
    assert ATTENTION_BACKENDS[srt.BACKEND_NAME] is factory
