"""The ragged kernels against float64: in Triton's interpreter, on a GPU where there is one.

With a GPU, name this file on the command line; see test_interpreter.py for the interpreter.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from liteattention_rocm import PagedBatch, attention_paged, attention_varlen, write_kv
from liteattention_rocm.contract import RaggedRequest, RaggedTensors
from tests.oracle.attention import exact_rows, expect_lse, expect_out

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAD = 3  # rows before the first and past the last request


def check(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    page_size: int = 0,
    dim: int = 64,
    fp8: torch.dtype | None = None,
    k_scale: float = 0.07,
    **options: Any,
) -> None:
    """lengths: (rows, keys) of every request. Compare each with its own float64 attention.

    ``fp8``: of the cache, with scales that are no powers of two; those of e4m3 are tensors.
    """
    generator = torch.Generator().manual_seed(len(lengths) + heads[0])
    q_heads, kv_heads = heads
    q_start = torch.tensor([PAD] + [n for n, _ in lengths]).cumsum(0).int()
    rows = int(q_start[-1]) + PAD

    def normal(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, dim, generator=generator).bfloat16().to(DEVICE)

    q = normal(rows, q_heads)
    requests = [tuple(normal(n, kv_heads) for _ in "kv") for _, n in lengths]
    out = torch.full_like(q, 7.0)
    scale = options.pop("scale", dim**-0.5)
    causal = options.pop("causal", False)
    common = {"scale": scale, "return_lse": True, "out": out, "engine": "portable", **options}
    common["causal"] = causal
    if page_size:
        kv_len = torch.tensor([n for _, n in lengths]).int()
        width = -(-int(kv_len.max()) // page_size)
        pages = torch.randperm(len(lengths) * width + 2, generator=generator).int()
        table = pages[: len(lengths) * width].view(len(lengths), width).contiguous()
        cache = torch.full((len(pages), 2, page_size, kv_heads, dim), math.nan)
        cache = cache.to(fp8 or torch.bfloat16).to(DEVICE)
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": 1.3} if fp8 else {}
        if fp8 == torch.float8_e4m3fn:
            scales = {name: torch.tensor([x], device=DEVICE) for name, x in scales.items()}
        k_cache, v_cache = cache[:, 0], cache[:, 1]
        for r, (k, v) in enumerate(requests):
            token = torch.arange(len(k))
            slots = table[r, token // page_size].long() * page_size + token % page_size
            slots = torch.cat([slots, torch.tensor([-1])]).to(DEVICE)  # a padding row
            k, v = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (k, v))
            write_kv(k, v, k_cache, v_cache, slots, engine="portable", **scales)
        table[0, -(-int(kv_len[0]) // page_size) :] = 1 << 30  # past the last key: never followed
        for r, (n, keys) in enumerate(lengths):  # before the window: pages of others, NaN
            unseen = max(0, keys - n - options["window"] + 1) if options.get("window") else 0
            table[r, : unseen // page_size] = pages[-1]
            if unseen % page_size:
                cache[table[r, unseen // page_size], :, : unseen % page_size] = math.nan
        batch = PagedBatch(*(x.to(DEVICE) for x in (q_start, kv_len, table)))
        _, lse = attention_paged(q, k_cache, v_cache, batch, **common, **scales)
        if fp8:
            factors = list(map(float, scales.values()))
            requests = [tuple(map(stored, kv, [fp8] * 2, factors)) for kv in requests]
    else:
        k_start = torch.tensor([0] + [n for _, n in lengths]).cumsum(0).int()
        k, v = (torch.cat([r[i] for r in requests]) for i in (0, 1))
        starts = q_start.to(DEVICE), k_start.to(DEVICE)
        _, lse = attention_varlen(q, k, v, *starts, **common)
    options = {name: x.cpu() if torch.is_tensor(x) else x for name, x in options.items()}
    q, out, lse = (x.cpu() for x in (q, out, lse))
    requests = [tuple(x.cpu() for x in kv) for kv in requests]
    for r, (k, v) in enumerate(requests):
        here = slice(int(q_start[r]), int(q_start[r + 1]))
        expected = exact_rows(q[here], k, v, scale=scale, causal=causal, **options)
        # the interpreter truncates to bf16: an ulp of probabilities and of outputs
        allowed = 2.0**-7 * (1.01 * expected.weight + expected.out.abs()) + 1e-6
        expect_out(out[here], expected, allowed)
        expect_lse(lse[:, here], expected.lse, atol=2e-5, rtol=1e-5)
    assert (out[:PAD] == 7.0).all() and (out[rows - PAD :] == 7.0).all()


def stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What a cache of ``dtype`` gives back of ``x``, in float64."""
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype).double() * scale


MIXED = [(1, 70), (20, 20), (0, 9), (5, 130), (3, 1)]


#: Decodes, drafts and empty requests beside longer ones; rows on both sides of what is short.
BESIDE = [(1, 300), (20, 20), (0, 9), (5, 130), (66, 200), (3, 1), (8, 75), (9, 80), (1, 1)]


@pytest.fixture
def cut_apart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Few keys are enough, on any GPU; every step then has requests that are cut apart."""
    from liteattention_rocm import remembered
    from liteattention_rocm.engines.triton import ragged_cut

    made: list[ragged_cut.Cut | None] = []
    choose = ragged_cut.cut_short

    def noting(request: RaggedRequest, rest: ragged_cut.Cut) -> ragged_cut.Cut | None:
        made.append(choose(request, rest))
        return made[-1]

    monkeypatch.setattr(ragged_cut, "cut_short", noting)
    monkeypatch.setattr(ragged_cut, "_SHORT_KEYS", 1)
    monkeypatch.setattr(ragged_cut, "_PROGRAMS_PER_UNIT", 0)  # the longer ones stay whole
    monkeypatch.setattr(ragged_cut, "units_of", lambda device: 16)  # enough for parts
    remembered.forget()
    yield made
    remembered.forget()
    assert made and all(step is not None and step.slots for step in made)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1), (32, 1)])
def test_few_rows_beside_longer_requests(
    cut_apart: list[Any], page_size: int, heads: tuple[int, int]
) -> None:
    """One tile or several of each; groups that are too high for decoding tiles stay whole here."""
    check(BESIDE, heads, page_size, causal=page_size > 0)
    assert all((step.splits > 1) == (step.group <= 16) for step in cut_apart)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 70},
        {"window": 66, "causal": False},
        {"window": 66, "lookahead": 5, "causal": False},
        {"soft_cap": 5.0, "scale": 0.7},
        {"sinks": torch.tensor([0.5, -2.0, 3.0, -math.inf], device=DEVICE)},
        {"dim": 80},
        {"dim": 256, "window": 100},
        {"dim": 80, "fp8": torch.float8_e4m3fn},
        {"dim": 128, "fp8": torch.float8_e5m2, "window": 150, "lookahead": 2, "causal": False},
    ],
    ids=[
        "window",
        "window-of-the-past",
        "window-on-both-sides",
        "soft-cap",
        "sinks",
        "80",
        "256",
        "e4m3",
        "e5m2",
    ],
)
def test_few_rows_beside_longer_requests_of_what_models_ask_for(
    cut_apart: list[Any], options: dict[str, Any]
) -> None:
    check(BESIDE, (4, 1), 16, **{"causal": True, **options})
    assert all(step.splits > 1 for step in cut_apart)


def test_few_rows_have_the_bits_of_a_decoding_step(cut_apart: list[Any]) -> None:
    """Whatever the other requests are, as long as the bounds are the same."""
    lengths, page = [1, 300, 64, 129, 70], 16
    pages = -(-max(lengths) // page)
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(2, len(lengths) * pages, page, 2, 64, generator=generator).bfloat16()
    k, v = cache.to(DEVICE)
    table = torch.randperm(len(lengths) * pages, generator=generator).int().view(-1, pages)
    q = torch.randn(200, 4, 64, generator=generator).bfloat16()

    def attend(rows: list[int], longest: int) -> torch.Tensor:
        """The first row of each request: the same in all batches."""
        starts = torch.tensor([0, *rows]).cumsum(0)
        mine = q.flip(0).clone()
        mine[starts[:-1]] = q[: len(rows)]
        batch = PagedBatch(
            *(x.int().to(DEVICE) for x in (starts, torch.tensor(lengths), table)),
            max_q_len=longest, max_kv_len=max(lengths),
        )  # fmt: skip
        mine = mine[: starts[-1]].to(DEVICE)
        return attention_paged(mine, k, v, batch, engine="portable").cpu()[starts[:-1]]

    mixed = attend([1, 1, 60, 1, 70], 100)
    other = attend([1, 1, 40, 1, 100], 100)
    assert torch.equal(mixed[[0, 1, 3]], other[[0, 1, 3]])
    assert len(cut_apart) == 2
    decoded = attend([1] * 5, 1)
    assert torch.equal(mixed[[0, 1, 3]], decoded[[0, 1, 3]])
    assert cut_apart.pop() is None


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_mixed_lengths(page_size: int, heads: tuple[int, int]) -> None:
    check(MIXED, heads, page_size, causal=page_size > 0)


@pytest.mark.parametrize("page_size", [0, 16])
def test_the_widest_window_hides_nothing(page_size: int) -> None:
    """Not even before a first row at position -6, where 2^31 - 1 would wrap around."""
    check([(9, 3), (2, 20)], (2, 1), page_size, causal=True, window=2**31 - 1)
    most = {"window": 2**31 - 1, "lookahead": 2**31 - 1}
    check([(9, 3), (2, 20)], (2, 1), page_size, **most)
    check([(9, 3), (2, 20)], (2, 1), page_size, lookahead=6, window=2**31 - 1)


def test_bounds_that_hide_nothing_are_none() -> None:
    """Of requests made by hand, too, and whatever the lengths are said to be at most."""
    from liteattention_rocm.engines.triton import ragged_launch

    q, k = torch.empty(40, 2, 64).bfloat16(), torch.empty(90, 1, 64).bfloat16()
    starts = torch.zeros(3, dtype=torch.int32)
    packed = RaggedTensors(q, k, k, q, None, None, starts, starts, None)
    table = torch.zeros(2, 5, dtype=torch.int32)
    paged = packed._replace(k=k.view(5, 18, 1, 64), v=k.view(5, 18, 1, 64), page_table=table)
    request = RaggedRequest(
        requests=2, rows=40, q_heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=torch.device("cpu"), page_size=0, max_q_len=20,
        max_kv_len=60, scale=1.0, lookahead=0, window=0, soft_cap=0.0, sinks=False, k_scale=1.0,
        v_scale=1.0, rounding="rtne", return_lse=False,
    )  # fmt: skip

    def bounds(like: RaggedTensors = packed, **changes: Any) -> tuple[int, int | None]:
        asked = replace(request, **changes)
        found = ragged_launch._without_idle_bounds(asked, like)
        assert replace(found, window=asked.window, lookahead=asked.lookahead) == asked
        return found.window, found.lookahead

    most = 2**31 - 1
    assert bounds() == (0, 0)  # causality stays, also of single rows
    assert bounds(max_q_len=1) == (0, 0) and bounds(lookahead=None) == (0, None)
    assert bounds(window=59, lookahead=18) == (59, 18)
    assert bounds(window=60, lookahead=19) == bounds(window=most, lookahead=most) == (0, None)
    loose = {"max_q_len": most, "max_kv_len": most}
    assert bounds(window=89, lookahead=38, **loose) == (89, 38)
    assert bounds(window=90, lookahead=39, **loose) == (0, None)
    assert bounds(paged, page_size=18, window=89, **loose) == (89, 0)
    assert bounds(paged, page_size=18, window=90, **loose) == (0, 0)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the other kernel would be there")
def test_long_requests_are_left_to_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tile they lie in, and without a part of a short one's rows."""
    from liteattention_rocm.engines.triton import ragged_cut, ragged_launch

    class Other:
        ready, counters = False, 0

        @staticmethod
        def start(boxed: Any, pointers: Any) -> None:
            """Write nothing."""

    lengths = [(63, 63), (64, 70), (0, 4), (1, 90), (130, 130), (2, 2)]
    q_start, k_start = (torch.tensor([0, *x]).cumsum(0).int() for x in zip(*lengths, strict=True))
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(int(n[-1]), heads, 64, generator=generator).bfloat16()
        for n, heads in ((q_start, 4), (k_start, 2), (k_start, 2))
    )
    out = torch.full_like(q, 7.0)
    expected = attention_varlen(q, k, v, q_start, k_start, causal=True, engine="cpu")
    other = ragged_launch.Prompts(Other(), 64, 1)  # type: ignore[arg-type]
    monkeypatch.setattr(ragged_launch, "prompts", lambda request, like, tile: other)
    attention_varlen(q, k, v, q_start, k_start, causal=True, out=out, engine="portable")
    for r, (rows, _) in enumerate(lengths):
        here = slice(int(q_start[r]), int(q_start[r + 1]))
        if rows >= ragged_cut.SHORTEST_PROMPT:
            assert (out[here] == 7.0).all()
        else:
            assert torch.allclose(out[here].float(), expected[here].float(), atol=0.03)


class PromptsOnCpu:
    """In place of the Hopper kernel: the CPU engine, on what that kernel is given to read."""

    ready, counters = False, 0

    def __init__(self, request: RaggedRequest) -> None:
        self._request = request

    def start(self, boxed: Any, pointers: Any) -> None:
        """Compute the long requests."""
        q, k, v = boxed
        out, lse, _, q_start, lengths, table, _, _, k_scale, v_scale, *_ = pointers
        scale, factor = self._request.scale * self._request.k_scale, self._request.v_scale
        if self._request.scale_tensors:
            scale, factor = scale * abs(float(k_scale)), factor * float(v_scale)
        for r, length in enumerate(lengths.tolist()):
            begin, end = q_start[r : r + 2].tolist()
            if end - begin < 64:
                continue
            pages = table[r : r + 1, : -(-length // k.shape[1])]
            batch = PagedBatch(torch.tensor([0, end - begin]).int(), lengths[r : r + 1], pages)
            found, lse[:, begin:end] = attention_paged(
                q[0, begin:end], k, v, batch, causal=self._request.lookahead == 0,
                window=self._request.window or None, lookahead=self._request.lookahead or None,
                scale=scale, return_lse=True, engine="cpu",
            )  # fmt: skip
            out[begin:end] = found * factor


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the GPU's own kernel would be there")
@pytest.mark.parametrize(
    ("fp8", "dim", "options"),
    [
        (torch.float8_e4m3fn, 80, {"k_scale": -0.07}),
        (torch.float8_e5m2, 64, {"window": 60, "lookahead": 20, "causal": False}),
    ],
    ids=["e4m3", "e5m2-window"],
)
def test_prompts_over_fp8_caches_read_copies(
    monkeypatch: pytest.MonkeyPatch, fp8: torch.dtype, dim: int, options: dict[str, Any]
) -> None:
    """Scaled copies of what their rows see, beside requests that read the cache itself."""
    from liteattention_rocm import remembered
    from liteattention_rocm.engines import workspace
    from liteattention_rocm.engines.triton import ragged_launch

    given = []

    def prompts(request: RaggedRequest, like: RaggedTensors, tile: Any) -> Any:
        given.append(request)
        if request.kv_dtype != request.dtype:
            return None
        return ragged_launch.Prompts(PromptsOnCpu(request), 64, 1)  # type: ignore[arg-type]

    take = workspace.Workspaces.take

    def nan(*arguments: Any) -> torch.Tensor:
        return take(*arguments).fill_(255)

    monkeypatch.setattr(ragged_launch, "prompts", prompts)
    monkeypatch.setattr(ragged_launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(workspace.Workspaces, "take", nan)
    remembered.forget()
    monkeypatch.setattr(ragged_launch, "_WIDENED_ROWS", 70)
    lengths = [(70, 150), (66, 129), (1, 200), (9, 40)]
    options = {"causal": True, **options}
    check(lengths, (2, 1), 16, dim, fp8, **options)
    assert [request.kv_dtype for request in given] == [fp8, torch.bfloat16]
    assert given[1].page_size == 128
    given.clear()
    check([(69, 69)], (2, 1), 16, dim, fp8, **options)  # too few rows
    monkeypatch.setattr(ragged_launch, "_WIDENED_MOST", 1 << 15)
    check([(70, 70)], (2, 1), 16, dim, fp8, **options)  # too large
    assert [request.kv_dtype for request in given] == [fp8, fp8]
    remembered.forget()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU reads the copies itself")
def test_copies_leave_out_what_no_row_sees() -> None:
    """The page table may name any page before the window: frameworks have freed those."""
    from liteattention_rocm.engines.triton import ragged_launch

    keys, rows, window, page = 400, 300, 40, 16
    first = keys - rows - window + 1
    request = RaggedRequest(
        requests=1, rows=rows, q_heads=1, kv_heads=1, head_dim=64, dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn, device=torch.device("cpu"), scale=1.0, page_size=page,
        max_q_len=rows, max_kv_len=keys, lookahead=0, window=window, soft_cap=0.0, sinks=False,
        k_scale=1.0, v_scale=1.0, rounding="rtne", return_lse=False,
    )  # fmt: skip
    q = torch.zeros(rows, 1, 64).bfloat16()
    draw = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 25, page, 1, 64, generator=draw).to(torch.float8_e4m3fn)
    table = torch.arange(25).int()[None]
    table[:, : first // page] = 1 << 30
    starts, lengths = torch.tensor([0, rows]).int(), torch.tensor([keys]).int()
    like = RaggedTensors(q, k, v, q, None, None, starts, lengths, table)
    made = ragged_launch.Widened(request, like)
    read = made.views(like, torch.zeros(made.size, dtype=torch.uint8))
    words, scale = (x.view(torch.int16) for x in (k, v)), torch.ones(1)
    made.launch.start((), (*words, read.k, read.v, read.page_table, starts, lengths, table, scale))
    for copy, cache in ((read.k, k), (read.v, v)):
        seen = copy.flatten(0, 1)[first:keys]
        assert torch.equal(seen, cache.flatten(0, 1)[first:].to(torch.bfloat16))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU they have one")
def test_prompts_have_no_kernel_of_their_own_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even on a Hopper GPU, whose tensors it takes, too: it knows no Gluon."""
    from liteattention_rocm.engines.triton import ragged_launch

    monkeypatch.setattr(ragged_launch, "architecture", lambda device: "sm_90")
    q, out = (torch.empty(128, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    starts = torch.tensor([0, 128], dtype=torch.int32)
    request = RaggedRequest(
        requests=1, rows=128, q_heads=2, kv_heads=2, head_dim=64, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=torch.device("cuda:0"), page_size=0, max_q_len=128,
        max_kv_len=128, scale=1.0, lookahead=0, window=0, soft_cap=0.0, sinks=False, k_scale=1.0,
        v_scale=1.0, rounding="rtne", return_lse=False,
    )  # fmt: skip
    like = RaggedTensors(q, q, q, out, None, None, starts, starts, None)
    assert ragged_launch.prompts(request, like) is None


def test_rows_of_no_request_are_padding() -> None:
    """However many the bound allows: lengths and tables of none have no memory."""
    q = torch.randn(200, 2, 64).bfloat16().to(DEVICE)
    k, v = torch.randn(2, 2, 16, 1, 64).bfloat16().to(DEVICE)
    out = torch.full_like(q, 7.0)
    start = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    none = start[:0]
    batch = PagedBatch(start, none, none.view(0, 1), max_q_len=200, max_kv_len=10)
    attention_paged(q, k, v, batch, out=out, engine="portable")
    attention_varlen(
        q, k[0], v[0], start, start.clone(), max_seqlen_q=200, max_seqlen_k=10, out=out,
        engine="portable",
    )  # fmt: skip
    assert (out == 7.0).all()


def test_decode_in_parts() -> None:
    lengths = [(1, 700), (1, 64), (1, 1), (0, 5), (1, 300)]
    check(lengths, (8, 1), page_size=16, dim=128, causal=True)


def test_parts_are_cut_where_programs_are_few() -> None:
    from liteattention_rocm.engines.triton import ragged_cut

    fields = dict(
        requests=1, rows=1, q_heads=8, kv_heads=1, head_dim=64, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=torch.device("cpu"), page_size=16, max_q_len=1,
        max_kv_len=32768, scale=1.0, lookahead=0, window=0, soft_cap=0.0, sinks=False,
        k_scale=1.0, v_scale=1.0, rounding="rtne", return_lse=False,
    )  # fmt: skip
    few, many = (ragged_cut.cut(RaggedRequest(**fields | {"requests": n})) for n in (1, 1000))
    assert few.splits > 1 and few.one_tile
    assert many.splits == 1


def test_requests_of_few_rows_are_cut_apart_where_it_pays() -> None:
    from liteattention_rocm.engines.triton import ragged_cut

    request = RaggedRequest(
        requests=5, rows=2048, q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=torch.device("cpu"), page_size=16, max_q_len=2000,
        max_kv_len=32768, scale=1.0, lookahead=0, window=0, soft_cap=0.0, sinks=False,
        k_scale=1.0, v_scale=1.0, rounding="rtne", return_lse=False,
    )  # fmt: skip

    def short(**changes: Any) -> ragged_cut.Cut | None:
        step = replace(request, **changes)
        return ragged_cut.cut_short(step, ragged_cut.cut(step))

    found = short()
    decoding = ragged_cut.cut(replace(request, rows=5, max_q_len=1))
    assert found == decoding._replace(slots=8) and found.tile_rows == 4
    assert short(requests=1) is None  # it is long or it is not
    assert short(max_q_len=8) is None and short(max_q_len=9) is not None
    assert short(max_kv_len=1023) is None and short(window=1023) is None
    assert short(max_kv_len=1024) is not None and short(window=1024) is not None
    assert short(rows=9, max_q_len=9, requests=2, kv_heads=1) is None  # everything is cut
    slots = {n: short(q_heads=n, kv_heads=1).slots for n in (1, 2, 16, 17, 100)}
    assert slots == {1: 16, 2: 8, 16: 8, 17: 4, 100: 1}


@pytest.mark.parametrize(
    "options",
    [
        {"window": 20},
        {"window": 20, "causal": False},
        {"window": 20, "lookahead": 19, "causal": False},
        {"lookahead": 2, "causal": False},
        {"soft_cap": 5.0, "scale": 0.7},
        {"sinks": torch.tensor([0.5, -2.0, 3.0, -math.inf], device=DEVICE)},
    ],
    ids=["window", "window-of-the-past", "window-on-both-sides", "lookahead", "soft-cap", "sinks"],
)
@pytest.mark.parametrize("lengths", [MIXED, [(1, 600), (2, 90)]], ids=["mixed", "parts"])
def test_what_models_ask_for(lengths: list[tuple[int, int]], options: dict[str, Any]) -> None:
    check(lengths, (4, 2), page_size=16, **{"causal": True, **options})


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("options", [{"window": 20}, {"window": 2}, {}], ids=str)
def test_rows_see_keys_ahead(page_size: int, options: dict[str, Any]) -> None:
    """Tiles whose keys begin and end within the request, and rows that see none or few."""
    check([(150, 180), (90, 70), (40, 8), (1, 30)], (2, 1), page_size, lookahead=19, **options)
    check([(90, 90), (12, 40)], (8, 1), page_size, lookahead=30, **options)


def test_tiles_read_no_keys_that_none_of_their_rows_sees() -> None:
    """But for the rest of a block of 128, which lies within the request."""
    q, k, v = torch.randn(3, 400, 1, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    k[0] = k[-1] = v[0] = v[-1] = math.nan
    tensors = (x.to(DEVICE) for x in (q, k, v, *2 * [torch.tensor([0, 400]).int()]))
    out = attention_varlen(*tensors, window=20, lookahead=19, engine="portable")
    assert out[128:256].isfinite().all() and out[[0, -1]].isnan().all()


PROMPTS = [(70, 200), (1, 90), (130, 130), (64, 33), (0, 7), (63, 64)]


@pytest.mark.parametrize("page_size", [0, 8, 16, 48])
def test_prompts_beside_shorter_requests(page_size: int) -> None:
    """On Hopper two kernels share the step; a cache's unwritten tokens are NaN."""
    check(PROMPTS, (3, 1), page_size, causal=page_size > 0)


@pytest.mark.parametrize("dim", [80, 128, 192, 256])
def test_prompts_of_all_widths(dim: int) -> None:
    check(PROMPTS[:4], (2, 1), 16, dim, causal=True)
    check(PROMPTS[:4], (2, 1), 0, dim, causal=True, scale=-0.3)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 40},
        {"window": 150, "causal": False},
        {"window": 20, "lookahead": 19, "causal": False},
        {"window": 70, "soft_cap": 5.0, "scale": 0.7},
        {"sinks": torch.tensor([0.5, -2.0], device=DEVICE), "scale": 0.0},
    ],
    ids=["window", "window-of-the-past", "window-on-both-sides", "soft-cap", "sinks"],
)
def test_prompts_of_what_models_ask_for(options: dict[str, Any]) -> None:
    check([(100, 300), (66, 66), (2, 150)], (2, 1), 16, 128, **{"causal": True, **options})


@pytest.mark.parametrize("dim", [32, 80, 96, 112, 192, 256])
def test_head_dims(dim: int) -> None:
    """Packed, paged and in parts; tiles of columns that do not exist, next to other heads'."""
    check([(3, 5), (1, 40)], (2, 1), dim=dim)
    check([(9, 40), (1, 33)], (6, 2), 16, dim, causal=True)
    check([(1, 300), (1, 7)], (4, 1), 16, dim, causal=True, window=270)


@pytest.mark.parametrize(("fp8", "dim"), [(torch.float8_e4m3fn, 80), (torch.float8_e5m2, 64)])
def test_fp8_caches(fp8: torch.dtype, dim: int) -> None:
    check([(1, 300), (1, 9)], (4, 1), 16, dim, fp8, causal=True)
    check([(7, 30), (1, 70)], (2, 2), 16, dim, fp8, causal=True)
    check([(7, 150), (20, 40)], (2, 1), 16, dim, fp8, window=9, lookahead=3)


@pytest.mark.parametrize(
    ("found", "has"), [("sm_80", False), ("sm_86", False), ("sm_89", True), ("sm_100", True)]
)
def test_gpus_without_fp8_read_e5m2_number_by_number(
    monkeypatch: pytest.MonkeyPatch, found: str, has: bool
) -> None:
    """An A100 has no instructions for words of fp8."""
    from liteattention_rocm import remembered
    from liteattention_rocm.engines import environment
    from liteattention_rocm.engines.triton import ragged_launch

    monkeypatch.setattr(environment, "architecture", lambda device: found)
    words = []
    choose = ragged_launch._words
    monkeypatch.setattr(
        ragged_launch, "_words", lambda *call: words.append(choose(*call)) or words[-1]
    )
    remembered.forget()
    check([(1, 70)], (2, 1), 16, 64, torch.float8_e5m2, causal=True)
    remembered.forget()
    assert set(words) == {2 if has else 0}


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_fp8_rows_are_rounded_as_the_reference_rounds_them(fp8: torch.dtype) -> None:
    """Bit by bit: ties, subnormals, zeros of both signs, what is too large, NaN."""
    every = torch.arange(256, dtype=torch.uint8).view(fp8).float()
    numbers = every[every.isfinite()].unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-30])
    rows = torch.cat([numbers, ties, ties * 1.004, ties * 0.996, special]).bfloat16()
    rows = torch.nn.functional.pad(rows, (0, -len(rows) % 80)).view(-1, 1, 80)
    slots = torch.arange(len(rows))
    for scale in (1.0, 0.37):
        written = []
        for engine, device in (("portable", DEVICE), ("reference", torch.device("cpu"))):
            k, v = torch.zeros(2, 2, 16, 1, 80, dtype=torch.uint8, device=device).view(fp8)
            new = rows.to(device), -rows.to(device)
            write_kv(*new, k, v, slots.to(device), k_scale=scale, v_scale=scale, engine=engine)
            written.append(torch.stack([k.view(torch.uint8), v.view(torch.uint8)]).cpu())
        ours, expected = written
        nan = [x.view(fp8).float().isnan() for x in written]
        same = (ours == expected) | (nan[0] & nan[1])
        assert same.all()


def test_what_no_kernel_takes_is_refused() -> None:
    k = torch.zeros(2, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    cache = torch.zeros(4, 16, 1, 64, dtype=torch.float8_e4m3fnuz, device=DEVICE)
    with pytest.raises(ValueError, match="the cache must be"):
        slots = torch.tensor([0, 1], device=DEVICE)
        write_kv(k, k, cache, cache.clone(), slots, engine="portable")
    starts = torch.tensor([0, 2], device=DEVICE).int()
    q = torch.zeros(2, 1, 72, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="head dim must be 32, 64, 80, 96, 112, 128, 192 or 256"):
        attention_varlen(q, q, q, starts, starts, engine="portable")


@pytest.mark.parametrize("cap", [2.0**-60, 3.0, 50.0, 1e5, 1e6, 1e8, 2.0**60])
def test_any_soft_cap(cap: float) -> None:
    check([(1, 90), (20, 40)], (2, 1), 16, soft_cap=cap, causal=True)
    check([(1, 90), (20, 40)], (2, 1), soft_cap=cap, scale=-0.3)
