"""Steps that vLLM captures in a graph and replays, without a GPU.

A graph is played by the calls that the engine bound: what a capture freezes are their arguments,
addresses that is, and a replay runs them with no Python of the backend in between. Metadata are
built as vLLM's model runner does: static buffers, padded to the size of the graph, refilled in
place for every step. The engine that is captured plans from bounds, as those of GPUs do; the CPU
engine, called eagerly in fresh buffers, says what is right.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.serving.vllm_harness import prepare

prepare()

import torch  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata  # noqa: E402
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec  # noqa: E402

from liteattention_rocm import engines, remembered  # noqa: E402
from liteattention_rocm.contract import RaggedRequest, RaggedTensors  # noqa: E402
from liteattention_rocm.engines.environment import settings  # noqa: E402
from liteattention_rocm.engines.reference import ReferenceEngine  # noqa: E402
from liteattention_vllm.builder import LiteAttentionBuilder, StepMetadata  # noqa: E402
from liteattention_vllm.layer import LiteAttentionImpl  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
MOST_REQUESTS, MOST_TOKENS, MODEL_LENGTH = 8, 32, 256
#: Windows of the layers, a group of caches each: Gemma 3 has six windowed groups and a full one.
GROUPS = [40, 40, None]
#: (rows, keys) of each request, at most MODEL_LENGTH keys.
Lengths = list[tuple[int, int]]

Graph = list[tuple[Callable[[Any], None], Any]]


class Runner:
    """The buffers of a model runner, and a model of attention layers only, one per group."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.q_start = torch.zeros(MOST_REQUESTS + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(MOST_REQUESTS, dtype=torch.int32)
        width = MODEL_LENGTH // PAGE
        pages = 1 + MOST_REQUESTS * width
        shape = (pages, KV_HEADS, PAGE, 2 * DIM)
        self.tables = [torch.zeros(MOST_REQUESTS, width, dtype=torch.int32) for _ in GROUPS]
        self.slots = [torch.full((MOST_TOKENS,), -1) for _ in GROUPS]
        self.caches = [torch.randn(shape, generator=self.random) for _ in GROUPS]
        draw = [torch.randn(MOST_TOKENS, n, DIM, generator=self.random) for n in (4, 2, 2)]
        self.query, self.key, self.value = draw
        self.outputs = [torch.full_like(self.query, 7.0) for _ in GROUPS]
        cpu = torch.device("cpu")
        self.layers = [LiteAttentionImpl(HEADS, DIM, 0.125, 2, sliding_window=w) for w in GROUPS]
        self.builders = [LiteAttentionBuilder(None, [], None, cpu) for _ in GROUPS]

    def fill(self, lengths: Lengths, requests: int, tokens: int) -> None:
        """Bring a step into the static buffers; ``requests`` and ``tokens`` with their padding."""
        rows = torch.tensor([n for n, _ in lengths])
        self.q_start[1 : len(lengths) + 1] = rows.cumsum(0)
        self.q_start[len(lengths) + 1 : requests + 1] = rows.sum()
        self.seq_lens.zero_()
        self.seq_lens[: len(lengths)] = torch.tensor([n for _, n in lengths])
        for x in (self.query, self.key, self.value):
            x.copy_(torch.randn(x.shape, generator=self.random))
        for table, slots, out in zip(self.tables, self.slots, self.outputs, strict=True):
            out.fill_(7.0)
            pages = 1 + torch.randperm(table.numel(), generator=self.random).view(table.shape)
            table.copy_(pages)
            table[len(lengths) : requests] = 0
            slots[:tokens] = -1
            at = 0
            for r, (n, keys) in enumerate(lengths):
                token = torch.arange(keys - n, keys)
                slots[at : at + n] = table[r, token // PAGE].long() * PAGE + token % PAGE
                at += n

    def common(
        self, group: int, requests: int, tokens: int, longest: int, keys: int
    ) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(
            query_start_loc=self.q_start[: requests + 1],
            query_start_loc_cpu=self.q_start[: requests + 1], seq_lens=self.seq_lens[:requests],
            num_reqs=requests, num_actual_tokens=tokens, max_query_len=longest, max_seq_len=keys,
            block_table_tensor=self.tables[group][:requests],
            slot_mapping=self.slots[group][:tokens],
        )  # fmt: skip

    def for_capture(self, requests: int, tokens: int, longest: int) -> list[StepMetadata]:
        """Metadata of a dummy step, whose bounds are the largest a replay may bring."""
        each = tokens // requests
        self.fill([(each, each)] * requests, requests, tokens)
        for slots in self.slots:
            slots.fill_(-1)
        return [
            builder.build_for_cudagraph_capture(
                self.common(group, requests, tokens, longest, MODEL_LENGTH)
            )
            for group, builder in enumerate(self.builders)
        ]

    def for_step(self, lengths: Lengths) -> list[StepMetadata]:
        """Metadata of an eager step; the second windowed group takes the first one's."""
        tokens = sum(n for n, _ in lengths)
        longest, keys = (max(x[i] for x in lengths) for i in (0, 1))
        commons = [
            self.common(group, len(lengths), tokens, longest, keys) for group in range(len(GROUPS))
        ]
        first = self.builders[0].build(0, commons[0])
        second = self.builders[1].update_block_table(
            first, commons[1].block_table_tensor, commons[1].slot_mapping
        )
        return [first, second, self.builders[2].build(0, commons[2])]

    def forward(self, metadata: list[StepMetadata], tokens: int) -> None:
        """Run the layers: each writes its rows and attends."""
        for group, layer in enumerate(self.layers):
            rows = (x[:tokens] for x in (self.key, self.value))
            layer.do_kv_cache_update(None, *rows, self.caches[group], self.slots[group][:tokens])
            query, out = self.query[:tokens], self.outputs[group][:tokens]
            layer.forward(
                None, query, query, query, self.caches[group], metadata[group], out
            )  # fmt: skip

    def eagerly(self, lengths: Lengths) -> list[torch.Tensor]:
        """What a fresh call of the CPU engine makes of the step that is in the buffers."""
        tokens = sum(n for n, _ in lengths)
        given = self.outputs, self.caches
        self.outputs = [torch.full_like(out, 7.0) for out in self.outputs]
        self.caches = [cache.clone() for cache in self.caches]
        try:
            with engine("cpu"):
                self.forward(self.for_step(lengths), tokens)
            return [out[:tokens] for out in self.outputs]
        finally:
            self.outputs, self.caches = given


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Attend on an engine by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITEATTENTION_ENGINE", name)
        settings.cache_clear()
        yield
    settings.cache_clear()


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    """What the engine ran, while it is the reference engine, which plans from bounds."""
    noted: Graph = []
    bind = ReferenceEngine.bind

    def noting(engine: ReferenceEngine, request: Any, like: Any) -> Callable[[Any], None]:
        run = bind(engine, request, like)

        def runs(tensors: Any) -> None:
            noted.append((run, tensors))
            run(tensors)

        return runs

    monkeypatch.setattr(ReferenceEngine, "bind", noting)
    remembered.forget()
    with engine("reference"):
        yield noted
    remembered.forget()


def replay(graph: Graph) -> None:
    for run, tensors in graph:
        run(tensors)


#: Requests, tokens and longest request of a graph; steps that it is replayed for.
GRAPHS: dict[str, tuple[tuple[int, int, int], list[Lengths]]] = {
    "decode": (
        (4, 4, 1),
        [[(1, 40), (1, 3), (1, 256), (1, 17)], [(1, 200)], [(1, 1), (1, 129), (1, 16)]],
    ),
    "speculation": (
        (4, 12, 3),  # a token and two drafts each
        [[(3, 40), (3, 3), (3, 256), (3, 17)], [(3, 100), (3, 9)]],
    ),
    "mixed": (
        (8, 24, 24),
        [[(20, 90), (1, 256), (3, 33)], [(1, 9)] * 8, [(24, 24)], [(7, 7), (1, 120), (9, 200)]],
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_replay_reads_lengths_and_pages_of_its_own_step(graph: Graph, name: str) -> None:
    (requests, tokens, longest), steps = GRAPHS[name]
    runner = Runner()
    runner.forward(runner.for_capture(requests, tokens, longest), tokens)  # warm-up
    graph.clear()
    runner.forward(runner.for_capture(requests, tokens, longest), tokens)
    captured = list(graph)
    assert len(captured) == 2 * len(GROUPS)

    for lengths in steps:
        runner.fill(lengths, requests, tokens)
        graph.clear()
        expected = runner.eagerly(lengths)
        assert not [t for _, t in graph if isinstance(t, RaggedTensors)]  # another engine's
        replay(captured)
        rows = sum(n for n, _ in lengths)
        for out, right in zip(runner.outputs, expected, strict=True):
            assert (out[:rows] - right).abs().max() < 2e-5
            assert (out[rows:] == 7.0).all()  # padding


def test_a_replay_of_an_encoder_reads_where_its_requests_begin(graph: Graph) -> None:
    """vLLM captures them with a dummy batch, whose requests are shorter than those of replays."""
    random = torch.Generator().manual_seed(1)
    spec = EncoderOnlyAttentionSpec(
        block_size=16, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32
    )
    builder = LiteAttentionBuilder(spec, [], None, torch.device("cpu"))
    layer = LiteAttentionImpl(HEADS, DIM, 0.125, KV_HEADS, attn_type="encoder_only")
    tokens, requests = 32, 4
    q, k, v, out = (torch.zeros(tokens, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    q_start = torch.arange(0, tokens + 1, tokens // requests, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=q_start, query_start_loc_cpu=q_start, seq_lens=q_start.diff(),
        num_reqs=requests, num_actual_tokens=tokens, max_query_len=tokens // requests,
        max_seq_len=MODEL_LENGTH, block_table_tensor=torch.zeros(requests, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64), causal=False,
    )  # fmt: skip
    metadata = builder.build_for_cudagraph_capture(common)
    assert metadata.longest == tokens
    layer.forward(None, q, k, v, torch.empty(0), metadata, out)
    captured = list(graph)
    assert len(captured) == 1
    for lengths in ([30], [1, 17, 3], [8, 8, 8, 8]):
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, generator=random))
        out.fill_(7.0)
        rows = sum(lengths)
        q_start.fill_(rows)
        q_start[: len(lengths) + 1] = torch.tensor([0, *lengths]).cumsum(0)
        replay(captured)
        for begin, end in itertools.pairwise(q_start[: len(lengths) + 1].tolist()):
            mine = slice(begin, end)
            keys, values = (x[mine].double().repeat_interleave(2, 1) for x in (k, v))
            score = 0.125 * torch.einsum("qhd,khd->hqk", q[mine].double(), keys)
            expected = torch.einsum("hqk,khd->qhd", torch.softmax(score, -1), values)
            assert (out[mine] - expected).abs().max() < 2e-5
        assert (out[rows:] == 7.0).all()


def test_what_a_graph_reads_outlives_its_metadata(graph: Graph) -> None:
    """vLLM drops the metadata after a capture; the builder keeps the tensors of its batch."""
    runner = Runner()
    metadata = runner.for_capture(4, 4, 1)
    held = [sys.getrefcount(m.batch) for m in metadata]
    batches = [m.batch for m in metadata]
    places = [(b.q_start.data_ptr(), b.kv_len.data_ptr(), b.page_table.data_ptr()) for b in batches]
    del metadata
    assert all(n > 2 for n in held)
    kept = [next(iter(builder._captured.values())) for builder in runner.builders]
    assert [id(b) for b in kept] == [id(b) for b in batches]
    # the model runner's own buffers: nothing was copied, so refilling them reaches the graph
    assert places == [
        (runner.q_start.data_ptr(), runner.seq_lens.data_ptr(), table.data_ptr())
        for table in runner.tables
    ]
    again = runner.for_capture(4, 4, 1)
    assert all(len(builder._captured) == 1 for builder in runner.builders)
    assert [m.batch.page_table.data_ptr() for m in again] == [x[2] for x in places]


def test_groups_and_steps_share_plans(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> None:
    """A plan per kind of layer: not per group, not per step whose bounds round up to the same."""
    planned: list[Any] = []
    bind = ReferenceEngine.bind

    def counting(engine: ReferenceEngine, request: Any, like: Any) -> Callable[[Any], None]:
        if isinstance(request, RaggedRequest):
            planned.append(request)
        return bind(engine, request, like)

    monkeypatch.setattr(ReferenceEngine, "bind", counting)
    runner = Runner()
    for keys in (129, 130, 200, 256):
        lengths = [(1, keys), (1, 5)]
        runner.fill(lengths, 2, 2)
        expected = runner.eagerly(lengths)
        runner.forward(runner.for_step(lengths), 2)
        for out, right in zip(runner.outputs, expected, strict=True):
            assert (out[:2] - right).abs().max() < 2e-5
        assert [r.window for r in planned] == [40, 0]
    runner.fill([(1, 30), (1, 5)], 2, 2)
    runner.forward(runner.for_step([(1, 30), (1, 5)]), 2)
    assert [r.max_kv_len for r in planned] == [256, 256, 32, 32]


def test_a_capture_finds_what_its_warm_up_planned(graph: Graph) -> None:
    """Nothing is planned while launches are recorded: modules would be loaded then."""
    runner = Runner()
    runner.forward(runner.for_capture(4, 4, 1), 4)
    warm = [run for run, _ in graph]
    graph.clear()
    runner.forward(runner.for_capture(4, 4, 1), 4)
    assert [run for run, _ in graph] == warm


def test_the_host_does_little_for_a_layer() -> None:
    """Python functions per layer, its cache written and its rows attended to, in an eager step."""
    remembered.forget()
    runner = Runner()
    lengths = [(1, 40), (1, 5)]
    runner.fill(lengths, 2, 2)
    metadata = runner.for_step(lengths)
    runner.forward(metadata, 2)
    calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        runner.forward(metadata, 2)
    finally:
        sys.setprofile(None)
    each, rest = divmod(len(calls), len(GROUPS))
    print(f"{each} Python functions per layer: {calls[:each]}")
    assert not rest and each <= 14


def test_graphs_of_any_step_where_plans_rest_on_bounds(graph: Graph) -> None:
    assert LiteAttentionBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.ALWAYS
    builder = LiteAttentionBuilder(None, [], None, torch.device("cpu"))
    assert builder.supports_draft_decode_metadata_update and builder.supports_update_block_table
    assert {name: engines.get(name).plans_from_bounds for name in engines.available()} == {
        "reference": True, "cpu": False, "gfx942": True, "portable": True
    }  # fmt: skip
