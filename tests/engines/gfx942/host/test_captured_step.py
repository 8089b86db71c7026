"""Whole steps of a small language model, captured once and replayed as they serve requests.

One graph holds a step: the cache writes and the attention of every layer, as machine code through
the launcher, and between them, as host functions, what other kernels do on a GPU. It is recorded
with lengths, pages and tokens of no request, as frameworks do, and replayed with prompts in
chunks, decoding, requests that come and go, and pages that change hands, all written into the same
buffers. What it may read of a step is thus what it reads on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from liteattention_emulator import EmulatorError, Graph, Stream, capture, on_stream
from liteattention_rocm import (
    PagedBatch,
    _core,
    attention,
    attention_paged,
    engines,
    lite_attention,
    write_kv,
)
from liteattention_rocm.engines import gfx942
from liteattention_rocm.lite import bitmap
from tests.oracle.tensors import qkv

from .test_language_model import HIDDEN, KV_HEADS, LAYERS, PAGE, Q_HEADS, VOCABULARY, Model

pytestmark = pytest.mark.usefixtures("emulator")

DIM, STEPS = 64, 32
REQUESTS, ROWS, LENGTH = 3, 96, 4096  # at most, of a step; and of a request's keys
PAGES = 26  # fewer than the requests have in all
#: Prompts (tokens), when they come, and how many tokens they make.
PROMPTS = ((270, 0, 22), (5, 0, 9), (23, 2, 12), (40, 12, 14), (9, 15, 17))


@dataclass
class Request:
    """Tokens so far, how many of them are in the cache, and the pages that hold those."""

    tokens: list[int]
    most: int
    done: int = 0
    pages: list[int] = field(default_factory=list)


def call_now(function: Callable[[], None]) -> None:
    function()


class Step:
    """The static buffers of a step, and what it does with them."""

    def __init__(self, engine: str) -> None:
        self.model, self.engine = Model(DIM, torch.bfloat16, engine), engine
        shape = (LAYERS, 2, PAGES, PAGE, KV_HEADS, DIM)
        self.cache = torch.full(shape, torch.nan).bfloat16()
        integers = functools.partial(torch.zeros, dtype=torch.int32)
        self.tokens, self.position = integers(ROWS), integers(ROWS)
        self.q_start, self.kv_len = integers(REQUESTS + 1), integers(REQUESTS)
        self.table, self.slots = integers(REQUESTS, LENGTH // PAGE), integers(ROWS)
        self.x, self.logits = torch.zeros(ROWS, HIDDEN), torch.zeros(ROWS, VOCABULARY)
        self.q, self.k, self.v = (
            torch.zeros(LAYERS, ROWS, heads, DIM).bfloat16()
            for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
        )
        self.out = torch.zeros_like(self.q)

    def fill_for_capture(self) -> None:
        """One row and one key for each request, in page 0, written nowhere."""
        self.q_start.copy_(torch.arange(REQUESTS + 1))
        self.kv_len.fill_(1)
        self.table.zero_()
        self.slots.fill_(-1)

    def fill(self, requests: list[Request], rows: list[int]) -> None:
        """The next ``rows`` tokens of each request; the rest is padding that must not be read."""
        tokens, positions, slots = [], [], []
        self.table.fill_(-1)
        self.q_start.fill_(sum(rows))
        self.kv_len.zero_()
        for n, (request, count) in enumerate(zip(requests, rows, strict=True)):
            at = range(request.done, request.done + count)
            self.q_start[n] = len(tokens)
            self.kv_len[n] = at.stop
            self.table[n, : len(request.pages)] = torch.tensor(request.pages)
            tokens += [request.tokens[i] for i in at]
            positions += at
            slots += [request.pages[i // PAGE] * PAGE + i % PAGE for i in at]
        self.slots.fill_(-1)
        given = (self.tokens, tokens), (self.position, positions), (self.slots, slots)
        for buffer, values in given:
            buffer[: len(values)] = torch.tensor(values)

    def run(
        self, batch: PagedBatch, slots: torch.Tensor, host: Callable[[Callable[[], None]], None]
    ) -> None:
        """Launch everything; ``host`` runs, or records, what is no launch."""
        host(self.embed)
        for layer in range(LAYERS):
            k_cache, v_cache = self.cache[layer]
            host(functools.partial(self.project, layer))
            write_kv(self.k[layer], self.v[layer], k_cache, v_cache, slots, engine=self.engine)
            attention_paged(
                self.q[layer], k_cache, v_cache, batch, out=self.out[layer], engine=self.engine
            )
            host(functools.partial(self.finish, layer))
        host(self.predict)

    def embed(self) -> None:
        self.x.copy_(self.model.embedding[self.tokens])

    def project(self, layer: int) -> None:
        w, h = self.model.layers[layer], torch.nn.functional.rms_norm(self.x, (HIDDEN,))
        q, k, v = ((h @ w[name].T).unflatten(-1, (-1, DIM)) for name in "qkv")
        self.q[layer] = self.model.rotate(q, self.position)
        self.k[layer] = self.model.rotate(k, self.position)
        self.v[layer] = v

    def finish(self, layer: int) -> None:
        w = self.model.layers[layer]
        self.x += self.out[layer].float().flatten(1) @ w["o"].T
        h = torch.nn.functional.rms_norm(self.x, (HIDDEN,))
        self.x += (torch.nn.functional.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T

    def predict(self) -> None:
        h = torch.nn.functional.rms_norm(self.x, (HIDDEN,))
        self.logits.copy_(h @ self.model.head.T)

    @contextmanager
    def captured(self, **other: torch.Tensor) -> Iterator[Graph]:
        """The step as a graph; ``other`` stand in for buffers that the launches read."""
        self.fill_for_capture()
        given = {"q_start": self.q_start, "kv_len": self.kv_len, "page_table": self.table} | other
        slots = given.pop("slots", self.slots)
        batch = PagedBatch(**given, max_q_len=ROWS, max_kv_len=LENGTH)
        with Stream() as stream:
            self.run(batch, slots, call_now)  # as frameworks do: loads the modules
            with capture(stream) as graph:
                self.run(batch, slots, graph.call)
            with graph:
                yield graph

    def eager(self) -> None:
        """Run it as it is, planned for its own lengths."""
        batch = PagedBatch(self.q_start, self.kv_len, self.table)
        self.run(batch, self.slots, call_now)


@dataclass
class Served:
    """Tokens of each request, their logits in order, and the rows of each step's requests."""

    tokens: list[list[int]]
    logits: torch.Tensor
    rows: list[list[int]]


def serve(step: Step, launch: Callable[[], None], steps: int = STEPS) -> Served:
    """Serve PROMPTS greedily: whoever decodes has a row, prompts share what is left."""
    g = torch.Generator().manual_seed(5)
    all_requests = [
        Request(torch.randint(VOCABULARY, (length,), generator=g).tolist(), length + made)
        for length, _, made in PROMPTS
    ]
    free = torch.randperm(PAGES, generator=g).tolist()
    logits, seen = [], []
    for number in range(steps):
        waiting = [
            request
            for request, (_, comes, _) in zip(all_requests, PROMPTS, strict=True)
            if comes <= number and len(request.tokens) < request.most
        ]
        active = waiting[:REQUESTS]
        rows, left = [], ROWS
        for request in active:
            rows.append(min(len(request.tokens) - request.done, left))
            left -= rows[-1]
            while len(request.pages) * PAGE < request.done + rows[-1]:
                request.pages.append(free.pop())
        step.fill(active, rows)
        launch()
        for n, (request, count) in enumerate(zip(active, rows, strict=True)):
            request.done += count
            if count == 0 or request.done < len(request.tokens):
                continue
            logits.append(step.logits[step.q_start[n + 1] - 1].clone())
            request.tokens.append(int(logits[-1].argmax()))
            if len(request.tokens) == request.most:
                free[:0] = request.pages
        seen.append(rows)
    made = [r.tokens[length:] for r, (length, _, _) in zip(all_requests, PROMPTS, strict=True)]
    return Served(made, torch.stack(logits), seen)


@functools.cache
def expected() -> Served:
    """What the CPU engine serves, eagerly."""
    step = Step("cpu")
    return serve(step, step.eager)


def test_a_step_that_was_captured_once_serves_every_step() -> None:
    step, truth = Step("gfx942"), expected()
    with step.captured() as graph:
        layer = (
            "hipLaunchHostFunc", "write_kv", "attention_prefill_bf16_d64_rtne",
            "attention_decode_bf16_d64_rtne", "merge_prefill_bf16_rtne", "merge_decode_bf16_rtne",
            "hipLaunchHostFunc",
        )  # fmt: skip
        assert graph.nodes == ("hipLaunchHostFunc", *layer * LAYERS, "hipLaunchHostFunc")
        found = serve(step, graph.launch)

    # Steps of every kind: chunks alone and beside decoding, decoding alone, as many requests as
    # there may be and fewer, decoding in two parts, pages of requests that have ended.
    assert len(found.rows) == STEPS and {len(rows) for rows in found.rows} == {1, 2, 3}
    kinds = {(min(rows) == 1, max(rows) > 1) for rows in found.rows}
    assert kinds == {(False, True), (True, True), (True, False)}
    assert _core.decode_work(1, PROMPTS[0][0] + 1, 0, 2, DIM)[2] == 2
    assert sum(-(-(length + made) // PAGE) for length, _, made in PROMPTS) > PAGES
    assert [len(made) for made in found.tokens] == [made for _, _, made in PROMPTS]

    assert found.rows == truth.rows and found.tokens == truth.tokens
    # Nor is that luck: no winner's lead over the second differs by more than half between engines.
    top = truth.logits.topk(2)
    lead = top.values[:, 0] - top.values[:, 1]
    found_top = found.logits.gather(-1, top.indices)
    change = (found_top[:, 0] - found_top[:, 1] - lead).abs()
    assert (lead > 2 * change).all(), f"lead {lead.min():.4f}, {(lead / change).min():.2f} changes"
    assert all(len(set(made)) >= 4 for made in found.tokens)


@pytest.mark.parametrize("name", ["q_start", "kv_len", "page_table", "slots"])
def test_a_frozen_buffer_is_noticed(name: str) -> None:
    """What a launcher would do that took a value of the capture for that of the step."""
    step, truth, steps = Step("gfx942"), expected(), 5
    step.fill_for_capture()
    frozen = {name: getattr(step, "table" if name == "page_table" else name).clone()}
    with step.captured(**frozen) as graph:
        found = serve(step, graph.launch, steps)
    assert found.rows == truth.rows[:steps]
    assert any(
        made != true[: len(made)] for made, true in zip(found.tokens, truth.tokens, strict=True)
    )


def test_what_a_capture_forbids_fails_it() -> None:
    step = Step("gfx942")
    k_cache, v_cache = step.cache[0]

    def write() -> None:
        write_kv(step.k[0], step.v[0], k_cache, v_cache, step.slots, engine="gfx942")

    write()
    with Stream() as stream:
        for call, error in (
            # kernels are loaded when an engine is first used: before the capture
            (lambda: gfx942.Gfx942Engine().device(torch.device("cpu")), "hipModuleLoadData"),
            (
                functools.partial(launched_on, None, write),
                "write_kv failed: hipErrorStreamCaptureImplicit",
            ),
        ):
            with pytest.raises(EmulatorError, match="Invalidated"), capture(stream):
                with pytest.raises(_core.HipError, match=error):
                    call()
                with pytest.raises(_core.HipError, match="hipErrorStreamCaptureInvalidated"):
                    write()
        # Another stream's launches are no concern of a capture.
        with Stream(blocking=False) as other, capture(stream) as graph:
            write()
            launched_on(other, write)
        assert graph.nodes == ("write_kv",)
        with graph:
            graph.launch()


def launched_on(stream: Stream | None, call: Callable[[], None]) -> None:
    with on_stream(stream):
        call()


def test_replays_follow_scales_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache of fp8: written, read by prefill and decode, merged, all in one graph."""
    monkeypatch.setattr(engines.get("gfx942"), "_kv_splits", 2)
    requests, kv_heads = [(1, 300), (40, 130), (1, 1)], 2
    fp8 = torch.float8_e4m3fnuz
    starts, lengths = zip(*requests, strict=True)
    table = torch.randperm(3 * 19, generator=torch.Generator().manual_seed(1)).view(3, 19).int()
    g = torch.Generator().manual_seed(2)
    k, v = torch.randn(2, sum(lengths), kv_heads, DIM, generator=g).bfloat16()
    q = torch.randn(sum(starts), 4, DIM, generator=g).bfloat16()
    slots = torch.cat([table[r].repeat_interleave(16)[:n] * 16 for r, n in enumerate(lengths)])
    slots += torch.cat([torch.arange(n) % 16 for n in lengths])
    q_start = torch.tensor([0, *starts]).cumsum(0).int()
    kv_len = torch.tensor(lengths).int()
    batch = PagedBatch(q_start, kv_len, table)
    cache = torch.zeros(2, 3 * 19, 16, kv_heads, DIM).to(fp8)
    out = torch.empty_like(q)
    k_scale, v_scale = torch.ones(()), torch.ones(1)

    def step(out: torch.Tensor, cache: torch.Tensor, engine: str, **scales: Any) -> None:
        write_kv(k, v, *cache, slots, engine=engine, **scales)
        attention_paged(q, *cache, batch, out=out, engine=engine, **scales)

    tensors = {"k_scale": k_scale, "v_scale": v_scale}
    with Stream() as stream:
        step(out, cache, "gfx942", **tensors)
        with capture(stream) as graph:
            step(out, cache, "gfx942", **tensors)
    assert graph.nodes == (
        "write_kv_bf16_fp8", "attention_prefill_bf16_fp8_d64_rtne",
        "attention_decode_bf16_fp8_d64_rtne", "merge_prefill_bf16_rtne", "merge_decode_bf16_rtne",
    )  # fmt: skip
    seen = []
    with graph:
        for numbers in ((0.07, 0.013), (0.02, 1.3), (-0.05, -0.02), (0.07, 0.013)):
            k_scale.fill_(numbers[0])
            v_scale.fill_(numbers[1])
            cache.view(torch.uint8).fill_(0x80)  # NaN
            out.zero_()
            graph.launch()
            seen.append((out.clone(), cache.clone()))
            same, written = torch.empty_like(out), torch.zeros_like(cache)
            step(same, written, "gfx942", **tensors)
            assert torch.equal(out, same)
            exact = torch.empty_like(out)
            step(exact, written, "reference", **tensors)
            held = slots.tolist()
            for found, expected in zip(cache, written, strict=True):
                found, expected = (x.view(torch.uint8).flatten(0, 1) for x in (found, expected))
                assert torch.equal(found[held], expected[held])
            torch.testing.assert_close(out, exact, atol=2.0**-7, rtol=2.0**-7)
            if min(numbers) > 0:
                as_numbers = [x.item() for x in tensors.values()]
                step(same, written, "gfx942", **dict(zip(tensors, as_numbers, strict=True)))
                assert torch.equal(out, same)
    first, second, _, last = seen
    assert all(map(torch.equal, map(as_bytes, first), map(as_bytes, last)))
    assert not any(map(torch.equal, map(as_bytes, first), map(as_bytes, second)))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def test_dense_calls_and_steps_of_liteattention() -> None:
    """Their workspaces, and the starts that a causal call makes, belong to the graph."""
    q, k, v = qkv(1, 2, 1, 90, 200, DIM)
    read = torch.full((1, 2, 1, 1), -1, dtype=torch.int32)
    outs = [torch.empty_like(q) for _ in range(3)]
    write = torch.empty_like(read)

    def calls() -> None:
        attention(q, k, v, layout="bhsd", out=outs[0], engine="gfx942")
        attention(q, k, v, layout="bhsd", out=outs[1], causal=True, engine="gfx942")
        lite_attention(
            q, k, v, read, write, threshold=-2.0, layout="bhsd", out=outs[2], engine="gfx942"
        )

    with Stream() as stream:
        calls()
        with capture(stream) as graph:
            calls()
    for x in (q, k, v):
        x.copy_(x.roll(7, 2))
    with graph:
        for out in outs:
            out.zero_()
        write.zero_()
        graph.launch()
    found, lists = [out.clone() for out in outs], write.clone()
    calls()
    assert all(map(torch.equal, found, outs)) and torch.equal(lists, write)
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("how", [{"threshold": -2.0}, {"budget": 0.1}])
def test_steps_in_an_order_of_their_own(how: dict[str, float]) -> None:
    """More tiles than compute units: a replay orders the lists that it finds."""
    q, k, v = qkv(1, 155, 1, 257, 200, 64)
    generator = torch.Generator().manual_seed(4)

    def lists() -> torch.Tensor:
        kept = torch.rand(1, 155, 2, 4, generator=generator) < 0.5
        kept[..., 0] = True
        return bitmap.pack(kept)

    read, out = lists(), torch.empty_like(q)
    write = torch.empty_like(read)

    def call() -> None:
        lite_attention(q, k, v, read, write, layout="bhsd", out=out, engine="gfx942", **how)

    with Stream() as stream:
        call()
        with capture(stream) as graph:
            call()
    read.copy_(lists())
    with graph:
        out.zero_()
        write.zero_()
        graph.launch()
    found, kept = out.clone(), write.clone()
    call()
    assert torch.equal(found, out) and torch.equal(kept, write)
