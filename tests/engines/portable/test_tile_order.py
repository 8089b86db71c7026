"""Orders in which Hopper workgroups take tiles: each computes every tile once, with the same bits.

The kernels run on the machine of gluon_machine.py, of two multiprocessors, launched as on a GPU.
"""

import heapq
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from liteattention_rocm.contract import DenseRequest, DenseTensors, RaggedRequest, RaggedTensors
from liteattention_rocm.engines.triton import launch, ragged_cut, ragged_launch, tiles
from liteattention_rocm.engines.triton.compiled_tiles import HopperTile
from tests.oracle import ragged
from tests.oracle.attention import exact, exact_rows, expect_close

from . import gluon_machine

CPU = torch.device("cpu")
#: What a tile may be changed to; persistent and in the order of its number otherwise.
ORDERS = {
    "counted": dict(counted=True),
    "abreast": dict(persistent=False, abreast=True),
    "counted-abreast": dict(counted=True, abreast=True),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, prompts = (gluon_machine.load(x) for x in ("hopper", "hopper_ragged"))
    monkeypatch.setattr(launch, "_HOPPER", launch.Kernel(dense.attention))
    monkeypatch.setattr(ragged_launch, "_PROMPTS", launch.Kernel(prompts.attention))
    monkeypatch.setattr(launch, "multiprocessors", lambda index: 2)
    monkeypatch.setattr(ragged_launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(ragged_cut, "units_of", lambda device: 2)
    monkeypatch.setattr(launch, "workspaces", launch.Workspaces())


def attend(
    request: DenseRequest, tile: HopperTile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:3], math.nan)
    t = DenseTensors(q, k, v, out, lse)
    launch.Attention(request, tile, t)(t)
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_gives_the_same_bits(order: str, causal: bool, machine: None) -> None:
    torch.manual_seed(0)
    q_len, kv_len = (300, 200) if causal else (130, 300)
    q = torch.randn(1, 4, q_len, 64).bfloat16()
    k, v = (torch.randn(1, 2, kv_len, 64).bfloat16() for _ in range(2))
    request = DenseRequest(
        1, 4, 2, q_len, kv_len, 64, torch.bfloat16, CPU, "bhsd", 0.125, causal, "rtne", True
    )  # fmt: skip
    shipped = HopperTile(2, 128, 2, 232, 40, turns=False)
    expected = exact(q, k, v, causal=causal)
    plain, plain_lse = attend(request, shipped, q, k, v)
    expect_close(plain, plain_lse, expected)
    for _ in range(3):  # whatever a call leaves in its counter
        out, lse = attend(request, replace(shipped, **ORDERS[order]), q, k, v)
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
        pairs = list(launch.workspaces.pairs.values())
        assert len(pairs) == bool(ORDERS[order].get("counted"))
        for now, later in pairs:
            assert now[0] == 0
            later.fill_(10**6)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    ("dim", "page", "options"),
    [
        (64, 16, {}),
        (128, 0, {}),
        (80, 64, {}),
        (64, 16, {"window": 100, "lookahead": 19}),
        (64, 16, {"scaled": 1}),
    ],
    ids=["paged", "packed", "80", "window-on-both-sides", "scaled"],
)
def test_prompts_in_every_order(
    dim: int, page: int, options: dict[str, Any], counted: bool, machine: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Requests with fewer rows than a prompt and empty ones lie between them and stay untouched.

    Of copies of an fp8 cache, scores and values have scales, in memory and as numbers.
    """
    options = dict(options)
    scaled = bool(options.pop("scaled", 0))
    k_scale, v_scale = torch.tensor([-0.75]), torch.tensor([1.3])
    case = ragged.make([(130, 200), (3, 90), (0, 0), (64, 64), (200, 200)], 4, 2, dim, padding=2)
    columns = ragged_cut.width(dim)
    shipped = tiles.PROMPTS[columns]
    out, lse = torch.full(case.q.shape, math.nan).bfloat16(), torch.full((4, len(case.q)), math.nan)
    if page:
        k, v, table = ragged.paged(case, page, options.get("window", 0))
        keys = case.kv_len
    else:
        k, v, table, keys = torch.cat(case.k), torch.cat(case.v), None, case.kv_start
    window, lookahead = options.get("window", 0), options.setdefault("lookahead", 0)
    request = RaggedRequest(
        requests=5, rows=len(case.q), q_heads=4, kv_heads=2, head_dim=dim, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=CPU, page_size=page, max_q_len=200, max_kv_len=200,
        scale=dim**-0.5, lookahead=lookahead, window=window, soft_cap=0.0, sinks=False,
        k_scale=0.5 if scaled else 1.0, v_scale=2.0 if scaled else 1.0, rounding="rtne",
        return_lse=True, scale_tensors=scaled,
    )  # fmt: skip
    factor, gain = (0.375, 2.6) if scaled else (1.0, 1.0)
    t = RaggedTensors(case.q, k, v, out, lse, None, case.q_start, keys, table)
    order = dict(persistent=counted, counted=counted, abreast=True)
    monkeypatch.setitem(tiles.PROMPTS, columns, replace(shipped, **order))
    monkeypatch.setattr(tiles, "_LOW_PROMPTS", {})
    long = ragged_launch.prompts(request, t)
    assert long is not None and long.parts == 1
    counters = list(torch.zeros(2, 2, dtype=torch.int32))
    tables = (case.q_start, keys, case.q_start if table is None else table)
    for _ in range(3):  # whatever a call leaves in its counter
        out.fill_(math.nan)
        pointers = (out, lse, out, *tables, *counters, k_scale, v_scale, out, out, tables[0])
        long.launch.start(ragged_launch._views(t, page > 0), pointers)
        counters.reverse()
        counters[1].fill_(10**6)
        for r, (n, keys_of) in enumerate(case.requests):
            rows = slice(int(case.q_start[r]), int(case.q_start[r]) + n)
            if n < ragged_cut.SHORTEST_PROMPT:
                assert out[rows].isnan().all()
                continue
            expected = exact_rows(
                case.q[rows], case.k[r], gain * case.v[r].double(), scale=factor * dim**-0.5,
                **options,
            )  # fmt: skip
            expect_close(out[rows], lse[:, rows], expected, what=(n, keys_of))
        assert out[-2:].isnan().all()


@pytest.mark.parametrize(
    ("window", "lookahead"),
    [(0, None), (0, 0), (0, 100), (150, None), (150, 0), (1, 1), (128, 127), (20, 300)],
)
def test_prompts_walk_and_mask_no_more_blocks_than_they_must(
    window: int, lookahead: int | None
) -> None:
    """Of 128 keys: they walk those that hold a key which some row of the tile sees, one at least,
    and mask those that hold one which some row does not see. However tiles are numbered.
    """
    kernel, number = gluon_machine.load("hopper_ragged_load"), gluon_machine.Value
    requests = [(300, 700), (256, 256), (200, 90), (129, 5)]
    ahead = lookahead or 0
    for (q_len, length), searched in itertools.product(requests, (False, True)):
        blocks = -(-length // 128)
        tables = [
            gluon_machine.Pointer(torch.tensor(x), torch.tensor(0)) for x in ([0, q_len], [length])
        ]
        count = -(-q_len // 128)
        sizes = [
            1, count, 0 if searched else count, 64, 1, 1, 1, window + ahead if window else 0,
            ahead, 1, 1,
        ]  # fmt: skip
        found: list[tuple[Any, ...]] = []

        def places(tables: Any = tables, sizes: Any = sizes, found: Any = found) -> None:
            given = [*tables, *(number(torch.tensor(x)) for x in sizes)]
            for program in range(sizes[1]):
                found.append(
                    kernel.place_of(
                        number(torch.tensor(program)), *given, 2, 128, 16, lookahead is not None,
                        window > 0, False,
                    )
                )  # fmt: skip

        gluon_machine.Machine(0, 1).run(places)
        for place in found:
            first, low, begin, count, mask_from, mask_below = (
                int(place[i]) for i in (5, 9, 10, 11, 12, 13)
            )
            at = torch.arange(first, min(first + 128, q_len))[:, None] + length - q_len
            key = torch.arange(128 * blocks)
            sees = (key < length).expand(len(at), -1)
            if lookahead is not None:
                sees = sees & (key <= at + lookahead)
            if window:
                sees = sees & (key > at - window)
            seen, whole = (x(0).unflatten(0, (-1, 128)) for x in (sees.any, sees.all))
            walked = seen.any(1).nonzero().flatten().tolist()
            assert list(range(begin, begin + count)) == (walked or [0])
            if walked and window:
                assert low == seen.flatten().nonzero()[0]
            for block in range(begin, begin + count):
                assert (block >= mask_from or block < mask_below) == (not whole[block].all())


def test_causal_tiles_of_a_section_come_longest_first() -> None:
    """And each tile of each head comes once."""
    hopper = gluon_machine.load("hopper_load")
    heads, q_blocks, span = 7, 5, 3
    number = gluon_machine.Value
    sizes = [number(torch.tensor(x)) for x in (heads * q_blocks, heads, 640, 640, q_blocks, 5)]
    found = []
    for tile in range(heads * q_blocks):
        _, head, _, row, _, _, count, _, _ = hopper.place_of(
            number(torch.tensor(tile)), (None, None, None, number(torch.tensor(span))), sizes,
            2, 128, True, False, True, 0,
        )  # fmt: skip
        found.append((int(head), int(row), int(count)))
    assert sorted(found) == [(h, 128 * r, r + 1) for h in range(heads) for r in range(q_blocks)]
    for begin in range(0, heads, span):
        section = found[begin * q_blocks : (begin + span) * q_blocks]
        assert {h for h, _, _ in section} == set(range(begin, min(begin + span, heads)))
        lengths = [count for _, _, count in section]
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("heads", "length", "apart", "in_turn"),
    [
        (8, 4096, 1.56, 1.00),
        (40, 4096, 1.11, 1.02),
        (48, 8192, 1.04, 1.00),
        (48, 16384, 1.00, 1.00),
    ],
)
def test_how_evenly_causal_tiles_fill_132_multiprocessors(
    heads: int, length: int, apart: float, in_turn: float
) -> None:
    """The table of docs/hopper.md: the longest load over the mean, d = 128."""
    q_blocks = length // 128
    for span, expected in ((1, apart), (launch.abreast(heads, 1, 4 * 128 * length), in_turn)):
        loads = [0] * 132
        for first in range(0, heads, span):
            for count in range(q_blocks, 0, -1):
                for _ in range(min(span, heads - first)):
                    heapq.heapreplace(loads, loads[0] + count + 1)
        assert round(max(loads) / (sum(loads) / len(loads)), 2) == expected
