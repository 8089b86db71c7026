"""One step of an SGLang model runner: the batches that its layers attend with.

The slots of a request are a row of ``req_to_token``, and a page is ``page_size`` consecutive slots,
so the page table is every ``page_size``-th slot of a row. Models that mix full and sliding-window
layers have a second pool, with slots of its own, and so a second table.

Lengths and tables live in buffers that every step refills, by one kernel on a GPU, with what the
requests of the step have: entries past a request's pages are left as they are, and the second table
has only what a window reaches. A graph holds that kernel and reads the same buffers, so a replay
needs nothing from the host. Steps of a runner follow each other on one stream, as its graphs do.

A table is a rectangle, as wide as the longest request of its step, so one long request beside many
takes room for as many long ones. Eager buffers grow with such steps and shrink after them; those of
graphs stay, as graphs read them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from liteattention_rocm import PagedBatch, engines, hip_graphs

from . import BACKEND_NAME

#: Eager steps after which buffers that are too large are made smaller, what too large is, as a
#: multiple of what the largest of these steps needed, and table entries that are never too many.
_PATIENCE, _TOO_LARGE, _FEW_ENTRIES = 256, 4, 1 << 18


@dataclass(frozen=True)
class Step:
    """What the layers of a step share.

    ``rows``: query rows of the requests; more than these are padding. ``window_batch``: the batch
    of layers with a window and ``window_slots`` (int64 [tokens]) where they write, both in the pool
    of those layers; None where they have none of their own.
    """

    rows: int
    batch: PagedBatch
    window_batch: PagedBatch | None = None
    window_slots: torch.Tensor | None = None


class Buffers:
    """Tensors that steps are written into, for up to so many requests, tokens and table entries.

    ``each``: int32 [R + 1], 0, 1, 2, ..., the starts of requests with one row each. ``q_start``:
    int32 [R + 1]. ``kv_len``: int32 [R]. ``tables``: int32 [1 or 2, entries], of which a step takes
    [R, columns] as one piece. ``window_slots``: int64 [tokens].
    """

    def __init__(
        self, requests: int, tokens: int, entries: int, windows: bool, device: torch.device
    ) -> None:
        self._tokens, self._windows = tokens, windows
        integers = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        self.each = torch.arange(requests + 1, dtype=torch.int32, device=device)
        self.q_start = integers(requests + 1)
        self.kv_len = integers(requests) + 1
        # Entries that no step wrote are pages, too: engines read whole blocks of keys.
        self.tables = integers(2 if windows else 1, entries)
        self.window_slots = torch.zeros(tokens if windows else 0, dtype=torch.int64, device=device)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Requests, tokens and table entries that there is room for."""
        return self.kv_len.shape[0], self._tokens, self.tables.shape[1]

    def hold(self, requests: int, tokens: int, entries: int) -> bool:
        """Whether a step of these sizes fits; only slots of windows take room for each token."""
        most_requests, most_tokens, most_entries = self.sizes
        fits = requests <= most_requests and entries <= most_entries
        return fits and (tokens <= most_tokens or not self._windows)

    def leave(self) -> None:
        """Let the allocator have the memory once steps that were launched before have read it.

        It may have come from another stream than that of the steps, the current one.
        """
        if self.kv_len.is_cuda:
            stream = torch.cuda.current_stream(self.kv_len.device)
            for tensor in (self.each, self.q_start, self.kv_len, self.tables, self.window_slots):
                tensor.record_stream(stream)


class Steps:
    """Makes the steps of one model runner.

    ``req_to_token`` is int32 [rows, context]. ``windowed`` is the runner's pool if layers with a
    window have slots of their own in it, and ``window`` the most keys that those layers look back,
    None for all. No request has more than ``longest`` tokens.

    Captured steps: by requests. Owner: this object. Lifetime: until larger graphs are prepared;
    the graphs read their tensors.

    Eager buffers: one set. Owner: this object. Lifetime: until a step needs larger ones, or none of
    the last ``_PATIENCE`` eager steps needed a fourth of them. Nothing waits for that; the memory
    goes back to PyTorch's allocator.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        page_size: int,
        longest: int,
        windowed: Any = None,
        window: int | None = None,
    ) -> None:
        self._req_to_token, self._page_size = req_to_token, page_size
        self._windowed = windowed
        self._columns = -(-longest // page_size)
        self._window = self._columns * page_size if window is None else window
        self._device = req_to_token.device
        self._from_bounds = engines.choose(self._device).plans_from_bounds
        # None while larger ones are made, and where that fails.
        self._eager: Buffers | None = None
        # The most that eager steps needed since their buffers were last looked at; their number.
        self._needed: tuple[int, ...] = (1, 1, 1)
        self._steps = 0
        self._graphs: Buffers | None = None
        self._captured: dict[int, Step] = {}

    def prepare_graphs(self, requests: int, tokens: int) -> None:
        """Allocate what graphs of up to so many requests and tokens read.

        Graphs that were captured before stay right if there was room for these already.

        Raises:
            ValueError: the engine plans every step on the host.
        """
        if not self._from_bounds:
            raise ValueError(
                f"attention backend {BACKEND_NAME!r}: engine "
                f"{engines.choose(self._device).name!r} plans every step on the host, so no graph "
                "can replay it: turn graphs off (--cuda-graph-backend-decode=disabled)"
            )
        hip_graphs.warn("SGLang")
        sizes = requests, tokens, requests * self._columns
        if self._graphs is None or not self._graphs.hold(*sizes):
            self._captured.clear()
            if self._graphs is not None:
                self._graphs.leave()
                self._graphs = None
            self._graphs = self._allocate(*sizes)

    def captured(self, requests: int) -> Step:
        """Return the step that graphs of so many requests, a row each, are captured with."""
        step = self._captured.get(requests)
        if step is None:
            assert self._graphs is not None, "init_cuda_graph_state comes before captures"
            longest = self._columns * self._page_size
            step = self._step(self._graphs, requests, requests, requests, None, 1, longest)
            self._captured[requests] = step
        return step

    def eager(self, forward_batch: Any) -> Step | None:
        """Make a step of prompts, decoded rows or both; None if there is nothing to attend.

        Raises:
            ValueError: the step verifies speculated tokens.
        """
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return None
        requests, tokens = forward_batch.batch_size, forward_batch.out_cache_loc.shape[0]
        lens = forward_batch.seq_lens_cpu
        longest = int((forward_batch.seq_lens if lens is None else lens).max())
        if mode.is_decode():
            rows, most_rows, new = requests, 1, None
        elif mode.is_extend_without_speculative():
            lengths = forward_batch.extend_seq_lens_cpu
            rows, most_rows, new = sum(lengths), max(lengths), forward_batch.extend_seq_lens
        else:
            raise ValueError(
                f"attention backend {BACKEND_NAME!r} has no {mode.name} steps "
                "(speculative decoding): leave the speculative options out"
            )
        if self._from_bounds:  # later steps find the plans of these bounds
            most_rows = _rounded_up(most_rows)
            # Dummy steps of warm-ups may be longer than any request.
            longest = max(longest, min(_rounded_up(longest), self._columns * self._page_size))
        entries = requests * -(-longest // self._page_size)
        buffers = self._room(requests, tokens, entries)
        # On a CPU the values are checked when the batch is made: they come first.
        self._fill(buffers, requests, longest, most_rows, forward_batch)
        return self._step(buffers, requests, tokens, rows, new, most_rows, longest)

    def refill(self, forward_batch: Any) -> Step:
        """Bring a step of one row per request into the buffers of its graph, on the device only.

        Recorded in a capture, it does so at every replay.
        """
        step = self.captured(forward_batch.batch_size)
        assert self._graphs is not None
        longest = self._columns * self._page_size
        self._fill(self._graphs, forward_batch.batch_size, longest, 1, forward_batch)
        return step

    def _room(self, *step: int) -> Buffers:
        """Return buffers for an eager step of so many requests, tokens and table entries.

        Those of graphs where it fits into them, else eager ones, which grow and shrink.
        """
        graphs = self._graphs if self._graphs is not None and self._graphs.hold(*step) else None
        self._steps += 1
        if graphs is None:
            self._needed = _larger(self._needed, step)
            if self._eager is None or not self._eager.hold(*step):
                now = (1, 1, 1) if self._eager is None else self._eager.sizes
                return self._renew(_larger(now, self._rounded(step)))
        if self._steps >= _PATIENCE:
            needed = self._rounded(self._needed)
            self._needed, self._steps = (1, 1, 1), 0
            if self._eager is not None and self._eager.sizes[2] > max(
                _TOO_LARGE * needed[2], _FEW_ENTRIES
            ):
                self._renew(needed)
        if graphs is not None:
            return graphs
        assert self._eager is not None
        return self._eager

    def _renew(self, sizes: tuple[int, ...]) -> Buffers:
        """Replace the eager buffers by others of these sizes, which may take their memory."""
        if self._eager is not None:
            self._eager.leave()
            self._eager = None
        self._eager = self._allocate(*sizes)
        return self._eager

    def _rounded(self, step: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes rounded up, so that they seldom change: no further than any step may need."""
        *others, entries = step
        most = self._req_to_token.shape[0] * self._columns
        return (*map(_rounded_up, others), max(entries, min(_rounded_up(entries), most)))

    def _allocate(self, requests: int, tokens: int, entries: int) -> Buffers:
        windows = self._windowed is not None
        return Buffers(requests, tokens, entries, windows, self._device)

    def _fill(
        self, buffers: Buffers, requests: int, longest: int, most_rows: int, forward_batch: Any
    ) -> None:
        tables = self._tables(buffers, requests, longest)
        fill(
            self._req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            buffers.kv_len[:requests],
            tables,
            self._page_size,
            None if self._windowed is None else self._windowed.full_to_swa_index_mapping,
            forward_batch.out_cache_loc,
            buffers.window_slots,
            near=self._window + most_rows,
        )

    def _tables(self, buffers: Buffers, requests: int, longest: int) -> torch.Tensor:
        """Return the tables of a step, int32 [1 or 2, R, columns]."""
        columns = -(-longest // self._page_size)
        return buffers.tables[:, : requests * columns].view(-1, requests, columns)

    def _step(
        self,
        buffers: Buffers,
        requests: int,
        tokens: int,
        rows: int,
        new: torch.Tensor | None,
        most_rows: int,
        longest: int,
    ) -> Step:
        """Describe what the buffers hold; ``new`` are the rows of each request, None for one."""
        q_start = buffers.each[: requests + 1]
        if new is not None:
            q_start = buffers.q_start[: requests + 1]
            torch.cumsum(new, 0, dtype=torch.int32, out=q_start[1:])
        tables = self._tables(buffers, requests, longest)
        batch = PagedBatch(
            q_start, buffers.kv_len[:requests], tables[0], max_q_len=most_rows, max_kv_len=longest
        )
        if self._windowed is None:
            return Step(rows, batch)
        return Step(rows, batch, batch.with_pages(tables[1]), buffers.window_slots[:tokens])


def fill(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_len: torch.Tensor,
    tables: torch.Tensor,
    page_size: int,
    window_of: torch.Tensor | None,
    slots: torch.Tensor,
    window_slots: torch.Tensor,
    near: int,
) -> None:
    """Write lengths and pages of requests into the buffers of a step.

    Args:
        req_to_token: int32 [rows, context], the slots of each row's tokens.
        requests: int [R], rows of the requests in it.
        seq_lens: int [R], their tokens.
        kv_len: int32 [R], is set to ``seq_lens``.
        tables: int32 [1 or 2, R, columns]; the first gets the pages that hold the tokens, the
            second those that ``window_of`` moved them to, for the last ``near`` tokens.
        page_size: tokens of a page.
        window_of: int64 [slots], what a slot is called in the second pool; None without one.
        slots: int64 [T], where the step writes.
        window_slots: int64 [at least T], gets where it writes in the second pool.
        near: most tokens, from a request's last one, that windows of the step's rows reach.
    """
    if on_gpu(kv_len):
        from . import srt_kernels as kernels

        blocks = -(-tables.shape[2] // kernels.BLOCK)
        windows = window_of is not None
        kernels.fill_step[(kv_len.shape[0], min(blocks, kernels.MOST_PARTS))](
            req_to_token, req_to_token.stride(0), requests, seq_lens, kv_len, tables[0],
            tables.stride(1), window_of, tables[1] if windows else None, slots,
            window_slots if windows else None, slots.shape[0], near,
            PAGE=page_size, WINDOWS=windows, BLOCK=kernels.BLOCK,
        )  # fmt: skip
        return
    kv_len.copy_(seq_lens)
    columns = -(-int(seq_lens.max()) // page_size)
    table = tables[0, :, :columns]
    torch.index_select(req_to_token[:, : columns * page_size : page_size], 0, requests, out=table)
    if page_size > 1:
        table.floor_divide_(page_size)
    if window_of is None:
        return
    torch.index_select(window_of, 0, slots, out=window_slots[: slots.shape[0]])
    last = (seq_lens - 1)[:, None]
    page = last // page_size - torch.arange(min(near // page_size + 2, columns), device=last.device)
    page.clamp_(min=0)
    moved = window_of[req_to_token[requests[:, None], page * page_size]]
    tables[1].scatter_(1, page, (moved // page_size).int())


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether steps are gathered by the kernel: nothing may wait for lengths there."""
    return bool(tensor.is_cuda)


def _larger(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The larger one of each two sizes."""
    return tuple(map(max, a, b))


def _rounded_up(bound: int) -> int:
    """The next power of two."""
    return 1 << max(int(bound) - 1, 0).bit_length()
