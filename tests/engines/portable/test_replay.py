"""Launches that a graph recorded, replayed on other lengths and pages, in Triton's interpreter.

A graph freezes grid, arguments and constants of each launch, so that is what is recorded here. The
buffers are then refilled in place, and the launches run again with nothing of the host between
them. What they write is held against float64 and against a fresh call of the CPU engine.
"""

import math
from typing import Any

import pytest
import torch

from liteattention_rocm import PagedBatch, attention_paged, write_kv
from liteattention_rocm.engines.triton import launch, ragged_cut, ragged_launch
from tests.oracle.attention import exact_rows, expect_out

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
MODEL_LENGTH = 2048
#: Keys of the smallest part of a decoding step.
PART = 64
Lengths = list[tuple[int, int]]


class Step:
    """Static buffers of a decode or mixed step: at most R requests and T rows."""

    def __init__(self, requests: int, tokens: int) -> None:
        self.random = torch.Generator().manual_seed(requests)
        width = MODEL_LENGTH // PAGE
        self.q_start = torch.zeros(requests + 1, dtype=torch.int32)
        self.kv_len = torch.zeros(requests, dtype=torch.int32)
        self.table = torch.zeros(requests, width, dtype=torch.int32)
        cache = torch.randn(requests * width + 1, 2, PAGE, KV_HEADS, DIM, generator=self.random)
        self.k, self.v = cache.bfloat16().unbind(1)
        self.q = torch.zeros(tokens, HEADS, DIM, dtype=torch.bfloat16)
        self.out = torch.zeros_like(self.q)

    def fill(self, lengths: Lengths) -> None:
        """(rows, keys) of each request; the rest of the requests and rows are padding."""
        rows = torch.tensor([n for n, _ in lengths])
        self.q_start[1 : len(lengths) + 1] = rows.cumsum(0)
        self.q_start[len(lengths) + 1 :] = rows.sum()
        self.kv_len.zero_()
        self.kv_len[: len(lengths)] = torch.tensor([n for _, n in lengths])
        pages = torch.randperm(self.table.numel(), generator=self.random)
        self.table.copy_(1 + pages.view(self.table.shape))
        self.table[len(lengths) :] = 0
        self.q.copy_(torch.randn(self.q.shape, generator=self.random))
        self.out.fill_(7.0)

    def attend(self, longest: int, **options: Any) -> PagedBatch:
        """Call the engine as for a capture: with the bounds that a replay may reach."""
        batch = PagedBatch(
            self.q_start, self.kv_len, self.table, max_q_len=longest, max_kv_len=MODEL_LENGTH
        )
        attention_paged(
            self.q, self.k, self.v, batch, out=self.out, engine="portable", **options
        )  # fmt: skip
        return batch

    def expect(self, lengths: Lengths, **options: Any) -> None:
        fresh = torch.full_like(self.out, 7.0)
        batch = PagedBatch(*(x.clone() for x in (self.q_start, self.kv_len, self.table)))
        attention_paged(self.q, self.k, self.v, batch, out=fresh, engine="cpu", **options)
        first = 0
        for r, (rows, keys) in enumerate(lengths):
            here = slice(first, first + rows)
            first += rows
            pages = self.table[r, : -(-keys // PAGE)].long()
            k, v = (x[pages].flatten(0, 1)[:keys] for x in (self.k, self.v))
            expected = exact_rows(self.q[here], k, v, causal=True, **options)
            # the interpreter truncates to bf16: an ulp of probabilities and of outputs
            allowed = 2.0**-7 * (1.01 * expected.weight + expected.out.abs()) + 1e-6
            expect_out(self.out[here], expected, allowed)
            assert ((self.out[here] - fresh[here]).abs() <= 2 * allowed).all()
        assert (self.out[first:] == 7.0).all()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every launch: the kernel and what it was given."""
    noted: list[tuple[Any, ...]] = []
    call = launch.Kernel.__call__

    def noting(kernel: launch.Kernel, *given: Any) -> None:
        noted.append((kernel, *given))
        call(kernel, *given)

    monkeypatch.setattr(launch.Kernel, "__call__", noting)
    return noted


def counts(launches: list[tuple[Any, ...]]) -> torch.Tensor:
    """Parts of each row, which the first launch's last pointer before q_start names."""
    found = launches[0][2][8]
    assert isinstance(found, torch.Tensor) and found.dtype == torch.int32
    return found


DECODE = [[(1, 2048), (1, PART), (1, 1)], [(1, 1)], [(1, PART + 1), (1, 3 * PART), (1, 1500)]]
SPECULATION = [[(4, 2000), (4, 4), (4, PART + 2)], [(4, 1025)]]
MIXED = [[(24, 700)], [(1, 2048), (20, 20), (1, 300)], [(8, 8), (8, 600), (8, 9)]]


@pytest.mark.parametrize("options", [{}, {"window": 333}], ids=["full", "window"])
@pytest.mark.parametrize(
    ("tokens", "longest", "steps"),
    [(3, 1, DECODE), (12, 4, SPECULATION), (24, 24, MIXED)],
    ids=["decode", "speculation", "mixed"],
)
def test_replayed_launches_read_their_own_step(
    launches: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    longest: int,
    steps: list[Lengths],
    options: dict[str, Any],
) -> None:
    monkeypatch.setattr(ragged_cut, "units_of", lambda device: 16)  # enough for parts
    step = Step(3, tokens)
    step.fill([(tokens // 3, tokens // 3)] * 3)
    batch = step.attend(longest, **options)
    graph = list(launches)
    assert len(graph) == 2  # parts, and their merge
    del batch  # as vLLM drops the metadata
    for lengths in steps:
        step.fill(lengths)
        launches.clear()
        for x in graph[0][2][6:8]:
            x.fill_(math.nan)  # of parts that no program writes, nothing is read
        for kernel, *given in graph:
            kernel(*given)
        step.expect(lengths, **options)


@pytest.mark.parametrize("options", [{}, {"window": 1033}], ids=["full", "window"])
def test_replayed_mixed_steps_read_their_own_step(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Requests that are long at the capture are short in a replay, and the other way round."""
    monkeypatch.setattr(ragged_cut, "units_of", lambda device: 16)
    monkeypatch.setattr(ragged_cut, "_PROGRAMS_PER_UNIT", 0)  # long requests stay whole
    step = Step(4, 48)
    step.fill([(12, 12)] * 4)
    step.attend(48, **options)
    graph = list(launches)
    kernels = [kernel for kernel, *_ in graph]
    assert kernels == [ragged_launch._ATTENTION] * 2 + [ragged_launch._MERGE]
    splits = graph[1][1][2]
    assert splits > 1
    for lengths in (
        [(1, 2048), (40, 90), (0, 0), (2, 1500)],
        [(9, 40), (1, 1), (8, 1200), (30, 30)],
        [(1, 1300)] * 4,
        [(48, 1100)],
    ):
        step.fill(lengths)
        for x in graph[0][2][6:8]:
            x.fill_(math.nan)
        for x in graph[0][2][8:9]:
            x.fill_(splits)  # counts that no program writes are not looked at, either
        for kernel, *given in graph:
            kernel(*given)
        step.expect(lengths, **options)
    step.fill([(8, 40), (40, 90)])
    kernel, *given = graph[0]
    kernel(*given)  # leaves the short ones alone: their keys are read once
    assert (step.out[:8] == 7.0).all() and not (step.out[8:] == 7.0).all(-1).any()


def test_replayed_launches_read_the_scales_of_their_caches(launches: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(0)
    scales = {"k_scale": torch.ones(()), "v_scale": torch.ones(1)}
    rows, slots = torch.randn(64, KV_HEADS, DIM).bfloat16(), torch.arange(64)
    k, v = torch.zeros(2, 4, PAGE, KV_HEADS, DIM).to(torch.float8_e4m3fn)
    q, out = torch.randn(1, HEADS, DIM).bfloat16(), torch.zeros(1, HEADS, DIM).bfloat16()
    batch = PagedBatch(*(torch.tensor(x).int() for x in ([0, 1], [64], [[0, 1, 2, 3]])))
    write_kv(rows, -rows, k, v, slots, engine="portable", **scales)
    attention_paged(q, k, v, batch, out=out, engine="portable", **scales)
    graph = list(launches)
    for k_scale, v_scale in ((0.07, 1.3), (2.5, 0.01)):
        scales["k_scale"].fill_(k_scale)
        scales["v_scale"].fill_(v_scale)
        for kernel, *given in graph:
            kernel(*given)
        held = [
            (x.float() / scale).clamp(-448, 448).to(k.dtype).double() * scale
            for x, scale in ((rows, k_scale), (-rows, v_scale))
        ]
        expected = exact_rows(q, *held, causal=True)
        expect_out(out, expected, 2.0**-7 * (1.01 * expected.weight + expected.out.abs()) + 1e-6)


def test_the_device_chooses_as_many_parts_as_there_are_keys_for(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    units = 16
    monkeypatch.setattr(ragged_cut, "units_of", lambda device: units)
    step = Step(3, 3)
    step.fill([(1, 1)] * 3)
    step.attend(1)
    (_, grid, *_), _ = graph = list(launches)
    most = 7 * units // (3 * KV_HEADS)  # seven programs of four warps run at once on a unit
    assert grid == (3, KV_HEADS, most)
    for keys in (1, PART, PART + 1, 2 * PART, 5 * PART - 3, MODEL_LENGTH):
        step.fill([(1, keys), (1, 1)])
        counts(graph).fill_(-1)
        for kernel, *given in graph:
            kernel(*given)
        blocks = -(-keys // PART)
        parts = -(-blocks // -(-blocks // most))
        assert counts(graph).tolist() == [parts, 1, -1]


def test_a_plan_serves_every_batch_of_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors and lengths, the same sizes and bounds: nothing is bound again."""
    bound: list[Any] = []
    make = ragged_launch.Attention.__init__

    def counting(call: Any, request: Any, like: Any) -> None:
        bound.append(request)
        make(call, request, like)

    monkeypatch.setattr(ragged_launch.Attention, "__init__", counting)
    for lengths in DECODE:
        step = Step(3, 3)
        step.fill(lengths)
        step.attend(1)
        step.expect(lengths)
    assert len(bound) == 1
    step.attend(1, window=333)
    assert len(bound) == 2


def test_plans_are_not_shared_by_tables_of_other_strides() -> None:
    step = Step(3, 3)
    wide = torch.zeros(3, 2 * step.table.shape[1], dtype=torch.int32)
    tables = [step.table, wide[:, : step.table.shape[1]]]
    for lengths in DECODE:
        step.table = tables[0]
        step.fill(lengths)
        tables[1].copy_(tables[0])
        for step.table in tables:
            step.out.fill_(7.0)
            step.attend(1)
            step.expect(lengths)
