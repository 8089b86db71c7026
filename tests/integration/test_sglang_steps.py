"""Steps of SGLang's language models: the memory that their page tables take. Without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liteattention_rocm import attention_paged, engines
from liteattention_sglang import srt_step

CONTEXT, ROWS = 16384, 65


def batch(lengths: list[int], rows: list[int], new: list[int] | None = None) -> Any:
    """What SGLang gives of a step: one row of each request, or ``new`` ones."""
    decode = new is None
    return SimpleNamespace(
        forward_mode=SimpleNamespace(
            name="DECODE" if decode else "EXTEND",
            is_idle=lambda: False,
            is_decode=lambda: decode,
            is_extend_without_speculative=lambda: not decode,
        ),
        batch_size=len(lengths),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        extend_seq_lens=None if new is None else torch.tensor(new),
        extend_seq_lens_cpu=new,
        out_cache_loc=torch.zeros(len(lengths) if new is None else sum(new), dtype=torch.int64),
    )


def slots() -> torch.Tensor:
    """Slots of every row's tokens, int32 [ROWS, CONTEXT]; each row has others in its first 512."""
    found = torch.randperm(ROWS * 512, generator=torch.Generator().manual_seed(5)).int()
    return torch.nn.functional.pad(found.view(ROWS, 512), (0, CONTEXT - 512))


class Windows:
    """A second pool, whose slots are those of the first one in reverse."""

    full_to_swa_index_mapping = torch.arange(ROWS * 512).flip(0)


def test_tables_shrink_when_long_requests_have_gone() -> None:
    """A request of 16,384 tokens beside 63 short ones takes 4 MiB of tables, which end with it."""
    steps = srt_step.Steps(slots(), 1, CONTEXT)
    step = steps.eager(batch([CONTEXT, *[100] * 63], list(range(64))))
    assert step is not None and step.batch.page_table.shape == (64, CONTEXT)
    assert steps._eager is not None and steps._eager.tables.nbytes == 4 * 64 * CONTEXT
    sizes = []
    for length in range(1, 2 * srt_step._PATIENCE):
        del step
        step = steps.eager(batch([length % 200 + 1, 50], [3, 5]))
        assert step is not None
        sizes.append(steps._eager.tables.nbytes)
        # Whatever happens to the memory, the table has the slots of these two requests.
        at = step.batch.page_table
        assert torch.equal(at[0, : length % 200 + 1], slots()[3, : length % 200 + 1])
        assert torch.equal(at[1, :50], slots()[5, :50]) and step.batch.kv_len[1] == 50
    # The first of these looks saw the long request, the next one saw only short ones.
    assert sizes[srt_step._PATIENCE - 3] == 4 * 64 * CONTEXT
    assert sizes[-1] == 4 * 512 and len(set(sizes)) == 2


def test_tables_stay_while_they_are_used() -> None:
    """As long as one step in so many needs the room, nothing is allocated again."""
    steps = srt_step.Steps(slots(), 1, CONTEXT)

    def serve(long: int) -> int:
        step = steps.eager(batch([long, *[20] * 63], list(range(64))))
        assert step is not None
        return step.batch.page_table.untyped_storage().nbytes()

    often = srt_step._PATIENCE // 2
    sizes = [serve(CONTEXT if n % often == 0 else 20) for n in range(6 * often)]
    assert set(sizes) == {4 * 64 * CONTEXT}
    assert [serve(20) for _ in range(4 * often)][-1] == 4 * 64 * 32  # rounded up


def test_small_tables_stay() -> None:
    steps, small = srt_step.Steps(slots(), 1, CONTEXT), srt_step._FEW_ENTRIES // CONTEXT
    for requests, kept in ((small, small * CONTEXT), (small + 1, 1)):
        steps.eager(batch([CONTEXT] * requests, list(range(requests))))
        for _ in range(2 * srt_step._PATIENCE):
            steps.eager(batch([1], [0]))
        assert steps._eager is not None and steps._eager.sizes[2] == kept


def test_tables_are_no_larger_than_all_requests_can_need() -> None:
    """The next power of two of 65 requests' pages would be twice as many."""
    steps = srt_step.Steps(slots(), 1, CONTEXT)
    step = steps.eager(batch([CONTEXT] * ROWS, list(range(ROWS))))
    assert step is not None and step.batch.page_table.shape == (ROWS, CONTEXT)
    assert steps._eager is not None and steps._eager.sizes[2] == ROWS * CONTEXT


def test_prompts_that_fit_the_tables_of_graphs_have_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt has more tokens than a graph; without windows no buffer has an entry for each."""
    monkeypatch.setenv("LITEATTENTION_ENGINE", "reference")
    engines.settings.cache_clear()
    monkeypatch.setattr(engines.get("reference").__class__, "plans_from_bounds", True)
    try:
        for windowed in (None, Windows()):
            steps = srt_step.Steps(slots(), 1, CONTEXT, windowed)
            steps.prepare_graphs(4, 4)
            step = steps.eager(batch([300, 40], [7, 9], [250, 40]))
            assert step is not None and step.rows == 290
            assert torch.equal(step.batch.page_table[0, :300], slots()[7, :300])
            assert steps._graphs is not None
            homes = {
                x.untyped_storage().data_ptr()
                for x in (step.batch.page_table, steps._graphs.tables)
            }
            assert len(homes) == (1 if windowed is None else 2)
            if windowed is not None:
                assert step.window_slots is not None and step.window_slots.shape == (290,)
    finally:
        engines.settings.cache_clear()


def test_a_graphs_tables_stay_where_the_graph_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITEATTENTION_ENGINE", "reference")
    engines.settings.cache_clear()
    monkeypatch.setattr(engines.get("reference").__class__, "plans_from_bounds", True)
    try:
        steps = srt_step.Steps(slots(), 1, CONTEXT)
        steps.prepare_graphs(32, 32)
        captured = steps.captured(8)
        place = captured.batch.page_table.data_ptr()
        steps.eager(batch([CONTEXT] * 64, list(range(64))))  # too many for the graphs
        for _ in range(2 * srt_step._PATIENCE):
            steps.eager(batch([9, 9], [1, 2]))
        assert steps._eager is not None and steps._eager.sizes == (1, 1, 1)
        assert steps.captured(8) is captured
        refilled = steps.refill(batch([3] * 8, list(range(8))))
        assert refilled is captured and refilled.batch.page_table.data_ptr() == place
        assert refilled.batch.kv_len.tolist() == [3] * 8
        assert torch.equal(refilled.batch.page_table[:, :3], slots()[:8, :3])
    finally:
        engines.settings.cache_clear()


def test_replaced_tables_are_left_to_the_allocator_before_others_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that were launched may read them yet, on another stream than they came from."""
    events: list[tuple[str, int]] = []
    made = srt_step.Buffers.__init__

    def make(self: Any, requests: int, tokens: int, entries: int, *rest: Any) -> None:
        events.append(("made", entries))
        made(self, requests, tokens, entries, *rest)

    monkeypatch.setattr(srt_step.Buffers, "__init__", make)
    monkeypatch.setattr(
        srt_step.Buffers, "leave", lambda self: events.append(("left", self.sizes[2]))
    )
    steps = srt_step.Steps(slots(), 1, CONTEXT)
    for lengths in ([5], [CONTEXT] * 32, *[[7]] * 2 * srt_step._PATIENCE):
        steps.eager(batch(lengths, list(range(len(lengths)))))
    large = 32 * CONTEXT
    assert events == [("made", 8), ("left", 8), ("made", large), ("left", large), ("made", 8)]
    events.clear()
    monkeypatch.setattr(steps, "_from_bounds", True)
    for requests in (2, 1, 3):
        steps.prepare_graphs(requests, requests)
    made_first, made_next = 2 * CONTEXT, 3 * CONTEXT
    assert events == [("made", made_first), ("left", made_first), ("made", made_next)]


def test_a_failed_allocation_leaves_steps_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = srt_step.Steps(slots(), 1, CONTEXT)
    steps.eager(batch([5], [1]))

    def fail(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(srt_step, "Buffers", fail)
        steps.eager(batch([CONTEXT] * 32, list(range(32))))
    assert steps._eager is None  # what was there was given up first, for there to be more memory
    step = steps.eager(batch([6], [2]))
    assert step is not None and torch.equal(step.batch.page_table[0, :6], slots()[2, :6])


@pytest.mark.parametrize("windowed", [None, Windows()], ids=["one table", "two tables"])
def test_layers_attend_right_before_and_after_tables_shrink(windowed: Any) -> None:
    """Against float64, over the pool of each table."""
    steps = srt_step.Steps(slots(), 1, CONTEXT, windowed, None if windowed is None else 33)
    g = torch.Generator().manual_seed(7)
    keys, values = torch.randn(2, ROWS * 512, 1, 16, generator=g)
    q = torch.randn(3, 2, 16, generator=g)
    lengths, rows = [130, 65, 1], [11, 12, 13]
    for number in range(2 * srt_step._PATIENCE + 2):
        if number == 1:
            steps.eager(batch([CONTEXT] * 32, list(range(32))))
        step = steps.eager(batch(lengths, rows))
        assert step is not None
        if 1 < number < 2 * srt_step._PATIENCE:
            continue
        for table, window in ((step.batch, None), (step.window_batch, 33)):
            if table is None:
                continue
            found = attention_paged(q, keys.unsqueeze(1), values.unsqueeze(1), table, window=window)
            for i, (length, row) in enumerate(zip(lengths, rows, strict=True)):
                at = slots()[row, :length].long()
                if window is not None:
                    at = Windows.full_to_swa_index_mapping[at][-window:]
                k, v = (x[at].transpose(0, 1).double() for x in (keys, values))
                truth = torch.softmax(q[i, :, None].double() @ k.transpose(1, 2) / 4, -1) @ v
                assert (found[i].double() - truth[:, 0]).abs().max() < 1e-5
    assert steps._eager is not None and steps._eager.sizes[2] == 512
