"""Bound launches: what reaches the entry point of a compiled kernel, without a GPU.

The kernels and their launchers are stand-ins that note what they are given. `test_short.py` has the
short way into real ones, beside Triton's launcher. What the kernels do with their arguments is
compiled, interpreted and emulated in the other files of this folder.
"""

import contextlib
import math
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton import knobs

from liteattention_benchmark import tune
from liteattention_benchmark.cells import Prefill
from liteattention_rocm import TileGeometry
from liteattention_rocm.contract import (
    DenseRequest,
    DenseTensors,
    LiteRequest,
    LiteTensors,
    RaggedRequest,
    RaggedTensors,
    WriteRequest,
    WriteTensors,
)
from liteattention_rocm.engines import workspace
from liteattention_rocm.engines.triton import launch, ragged_cut, ragged_launch, tiles
from liteattention_rocm.engines.workspace import Workspaces
from liteattention_rocm.lite import bitmap

STREAM = 77
CPU = torch.device("cpu")


class Launcher:
    """Triton's launcher of a compiled kernel."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


class Compiled:
    function = 4711
    packed_metadata = (4, 1, 1000)
    metadata = types.SimpleNamespace()  # names no target: no short way

    def __init__(self) -> None:
        self.run = Launcher()
        self.hooked: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, stream=None: self.hooked.append((grid, stream, *args))


class Function:
    """A kernel: its first call compiles."""

    def __init__(self, compiled: Compiled) -> None:
        self.result = compiled
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*args: Any, **options: Any) -> Compiled:
            assert options.pop("enable_fp_fusion")
            self.started.append((grid, args, options))
            return self.result

        return start


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of five multiprocessors."""
    for module in (launch, ragged_launch):
        monkeypatch.setattr(module, "raw_stream", lambda index: STREAM)
    monkeypatch.setattr(launch, "_device", lambda: -1)
    monkeypatch.setattr(launch, "multiprocessors", lambda index: 5)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Function]:
    found = {}
    for name in ("_HOPPER", "_PLAIN", "_LISTS"):
        found[name] = Function(Compiled())
        monkeypatch.setattr(launch, name, launch.Kernel(found[name]))
    return found


def request(**changes: Any) -> Any:
    """A dense request; a LiteAttention step if ``changes`` say how it walks."""
    values = dict(
        batch=1, q_heads=4, kv_heads=2, q_len=300, kv_len=300, head_dim=128, dtype=torch.bfloat16,
        device=CPU, layout="bshd", scale=0.1, causal=False, rounding="rtne", return_lse=False,
    )  # fmt: skip
    if "descending" in changes:
        tile = TileGeometry(128, 128, 64)
        changes = {"threshold": -4.0, **changes}
        return LiteRequest(**values, geometry=tile, soft_skip=False, **changes)
    return DenseRequest(**(values | changes))


def tensors(lse: torch.Tensor | None = None) -> DenseTensors:
    q, out = (torch.empty(1, 300, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(1, 300, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    return DenseTensors(q, k, v, out, lse)


def arguments(compiled: Compiled, which: int = -1) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the latest launch gave, or another one: (grid and stream, the kernel's arguments)."""
    call = compiled.run.calls[which]
    assert call[4:9] == (4711, (4, 1, 1000), None, None, None)
    return call[:4], call[9:]


def flat(values: tuple[Any, ...]) -> list[Any]:
    """Arguments with the addresses of tensors in place of their descriptors."""
    return [x.base.data_ptr() if isinstance(x, launch.TensorDescriptor) else x for x in values]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_bound_hopper_launch_gets_the_addresses_of_each_call(
    kernels: dict[str, Function], with_lse: bool, counted: bool
) -> None:
    function = kernels["_HOPPER"]
    t = tensors(torch.empty(1, 4, 300) if with_lse else None)
    bound = launch.Attention(request(), replace(tiles._HOPPER[128, False], counted=counted), t)
    bound(t)  # compiles
    ((grid, started, _),) = function.started
    assert grid == (5,) and all(d.base is x for d, x in zip(started, t[:4], strict=False))
    assert not function.result.run.calls

    for _ in range(2):
        t = tensors(torch.empty(1, 4, 300) if with_lse else None)
        bound(t)
        where, found = arguments(function.result)
        assert where == (5, 1, 1, STREAM)
        expected = [x.data_ptr() for x in t[:4]]
        sums = t.out if t.lse is None else t.lse
        unused = t.out.data_ptr()
        later, now = launch.workspaces.counters(CPU, 0) if counted else (t.out, t.out)
        expected += [sums.data_ptr(), *3 * [unused], now.data_ptr(), later.data_ptr()]
        expected += 7 * [unused]
        assert started[8].dtype == started[9].dtype == now.dtype
        # the numbers and constants are those that it was compiled with
        assert flat(found) == expected + list(started[17:])
    assert len(function.started) == 1


@pytest.mark.parametrize("lite", [False, True], ids=["dense", "lists"])
def test_what_levels_that_stay_spoilt_is_a_second_launch_of_the_same_call(
    lite: bool, kernels: dict[str, Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the same tensors and counters, and comes after the first.

    On GPUs that let it, it begins before the first one has ended, and a walk before its lists have.
    """
    monkeypatch.setattr(launch, "chains", lambda device: True)
    monkeypatch.setattr(launch, "MOST_CUT", 0)
    monkeypatch.setattr(launch, "_FIXED_K_BLOCKS", 0)
    function = kernels["_HOPPER"]
    if lite:
        read = bitmap.full(1, 4, 3, 3)
        t: Any = LiteTensors(*tensors(), read, torch.empty_like(read), None, None)
        step = request(descending=False, budget=0.0, threshold=-4.0)
        bound: Any = launch.LiteStep(step, tiles._HOPPER_LITE[128, 128], t)
    else:
        t = tensors()
        bound = launch.Attention(request(), tiles._HOPPER[128, False], t)
    bound(t)
    (grid, first, options), (again_grid, again, again_options) = function.started
    assert grid == again_grid == (5,)
    assert first[-3:] == (True, False, True) and again[-3:] == (False, True, True)
    early = {"num_warps": 4, "launch_pdl": True}
    assert options == (early if lite else {"num_warps": 4}) and again_options == early
    if lite:
        assert kernels["_LISTS"].started[0][1][-1] is True
    if not lite:  # which tiles are noted, and their flags
        assert first[8].numel() == first[9].numel() >= 4 + 12 * 2
    assert all(x is y for x, y in zip(first[4:17], again[4:17], strict=True))
    bound(t)
    one, two = (flat(arguments(function.result, i)[1]) for i in (-2, -1))
    assert one[:-3] == two[:-3]
    assert one[-3:] == [True, False, True] and two[-3:] == [False, True, True]


def test_a_call_whose_second_launch_is_not_compiled_yet_goes_through_triton(
    kernels: dict[str, Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another thread is compiling it, or where that was interrupted."""
    monkeypatch.setattr(launch, "MOST_CUT", 0)
    monkeypatch.setattr(launch, "_FIXED_K_BLOCKS", 0)
    t = tensors()
    bound = launch.Attention(request(), tiles._HOPPER[128, False], t)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bound._again, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bound(t)
    bound(t)
    assert [args[-3:] for _, args, _ in kernels["_HOPPER"].started] == [
        (True, False, False),
        (False, True, False),
    ]


def test_each_stream_and_each_graph_has_a_counter_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Workspaces()
    one, other = held.counters(CPU, 1), held.counters(CPU, 2)
    places = [x.data_ptr() for x in (*one, *other)]
    assert all(x.dtype == torch.int32 and x.tolist() == [0] * 4 for x in (*one, *other))
    assert len(set(places)) == 4 and not any(place % 16 for place in places)
    held.keep(CPU, 1, one)
    assert held.counters(CPU, 1) is one and [x.data_ptr() for x in one] == [places[1], places[0]]
    monkeypatch.setattr(workspace, "capturing_on", lambda device: lambda: True)
    one[0].fill_(7)
    captured = held.counters(CPU, 1)
    assert [x.tolist() for x in captured] == [[0] * 4] * 2
    assert captured[0].data_ptr() not in (one[0].data_ptr(), one[1].data_ptr())
    held.keep(CPU, 1, captured)
    assert held.counters(CPU, 1)[0].data_ptr() != captured[0].data_ptr()


def test_the_device_of_a_call_is_asked_whether_it_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may be current: a graph of the call's device must not use memory that is held."""
    current, graphs = [0], {1}

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(workspace, "_current_device", lambda: current[0])
    monkeypatch.setattr(workspace, "_capturing", lambda: current[0] in graphs)
    asked = workspace.capturing_on.__wrapped__
    for count in (2, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert not asked(torch.device("cuda:0"))()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert asked(torch.device("cuda:1"))() and current == [0]
    current[0] = 1
    assert asked(torch.device("cuda:1"))() and not asked(torch.device("cuda:0"))()
    assert current == [1] and not asked(CPU)()


def test_counters_of_a_launch_that_failed_are_not_used_again(
    kernels: dict[str, Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have run and left its counter as it was."""
    held = Workspaces()
    monkeypatch.setattr(launch, "workspaces", held)
    t = tensors()
    bound = launch.Attention(request(), replace(tiles._HOPPER[128, False], counted=True), t)
    bound(t)
    (before,) = held.pairs.values()

    def fail(*arguments: object) -> None:
        raise RuntimeError("a profiler's hook")

    monkeypatch.setattr(launch.Launch, "__call__", fail)
    with pytest.raises(RuntimeError, match="hook"):
        bound(t)
    assert held.counters(CPU, 0) is not before


@pytest.mark.parametrize(
    ("heads", "group", "kv_bytes", "together"),
    [
        (48, 1, 4 << 20, 6),  # 24 MB
        (8, 1, 2 << 20, 8),  # all of them
        (32, 4, 4 << 20, 16),  # four key heads at a time
        (32, 4, 5 << 20, 16),  # two sections of equal size, not four and four and two
        (40, 1, 39 << 20, 1),  # not even one
        (28, 7, 7 << 20, 14),
    ],
)
def test_heads_whose_keys_fit_the_cache_are_computed_side_by_side(
    heads: int, group: int, kv_bytes: int, together: int
) -> None:
    assert launch.abreast(heads, group, kv_bytes) == together


def test_code_is_shared_by_requests_of_other_sizes_and_not_by_other_kinds(
    kernels: dict[str, Function],
) -> None:
    function = kernels["_HOPPER"]
    t = tensors()
    launch.Attention(request(), tiles._HOPPER[128, False], t)(t)
    half = DenseTensors(*(x[:, :150] for x in t[:4]), None)
    launch.Attention(request(q_len=150, kv_len=150), tiles._HOPPER[128, False], half)(half)
    assert len(function.started) == 1
    launch.Attention(request(causal=True), tiles._HOPPER[128, True], t)(t)
    fp16 = DenseTensors(*(x.half() for x in t[:4]), None)
    launch.Attention(request(dtype=torch.float16), tiles._HOPPER[128, False], fp16)(fp16)
    assert len(function.started) == 3


def test_plain_code_depends_on_alignment(kernels: dict[str, Function]) -> None:
    function = kernels["_PLAIN"]
    t = tensors()
    tile = tiles._PLAIN[128]
    launch.Attention(request(), tile, t)(t)
    shifted = t._replace(k=torch.empty(t.k.numel() + 1, dtype=t.k.dtype)[1:].view(t.k.shape))
    launch.Attention(request(), tile, shifted)(shifted)
    assert len(function.started) == 2
    launch.Attention(request(), tile, t)(t)
    where, found = arguments(function.result)
    assert where[0] == 3 * 4 and len(function.started) == 2
    assert found[:5] == tuple(x.data_ptr() for x in (*t[:4], t.out))
    assert found[14:] == function.started[0][1][14:]


@pytest.mark.parametrize("share", [0.0, 0.1], ids=["vote", "weigh"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("hopper", [False, True])
def test_a_bound_step_hands_its_workspace_on(
    kernels: dict[str, Function], hopper: bool, given: bool, share: float
) -> None:
    """``given``: masks and a tally of the caller's, and masses where tiles are weighed."""
    read = bitmap.full(1, 4, 3, 3)
    write = torch.empty_like(read)
    do, skip = (torch.zeros(1, dtype=torch.int32) if given else None for _ in range(2))
    mass = torch.empty(1, 4, 3, 3) if given and share else None
    tally = torch.zeros(2, dtype=torch.int64) if given else None
    step = request(descending=True, budget=share, threshold=-math.inf if share else -4.0)
    tile = tiles.hopper_lite(step) if hopper else tiles.plain_lite(step)
    assert tile is not None
    everything = LiteTensors(*tensors(), read, write, do, skip, mass, tally)
    out = everything.out
    bound = launch.LiteStep(step, tile, everything)
    bound(everything)
    attend = kernels["_HOPPER" if hopper else "_PLAIN"]
    first = [kernels["_LISTS"].started[0][1], attend.started[0][1]]
    bound(everything)
    planned, attended = (flat(arguments(f.result)[1]) for f in (kernels["_LISTS"], attend))
    masked = [read.data_ptr() if x is None else x.data_ptr() for x in (do, skip)]
    items, counts, order, counter = planned[3:7]
    weights, sums = planned[8:10]
    assert planned[:3] == [read.data_ptr(), *masked] and planned[7] == write.data_ptr()
    assert tally is None or sums == tally.data_ptr()
    assert tuple(planned[10:]) == first[0][10:]
    begin = 4
    lse, *pointers = attended[begin : begin + (12 if hopper else 9)]
    middle = [counter, counter] if hopper else []
    masses = out.data_ptr() if mass is None else mass.data_ptr()
    assert lse == out.data_ptr()
    last = [write.data_ptr(), weights, masses, sums, masked[0]]
    assert pointers[: 5 + len(middle) + 3] == [items, counts, order, *middle, *last]
    # 12 lists of 3 K blocks (int16), 12 counts twice, a counter, a tally, weights: apart, aligned
    places = [items, counts, order, counter, *([] if given else [sums]), weights]
    assert [x % 16 for x in places] == [0] * len(places)
    sizes = [12 * 3 * 2, 12 * 4, 12 * 4, 4, 16][: len(places) - 1]
    for low, high, size in zip(places, places[1:], sizes, strict=False):
        assert high - low >= size
    assert bound._size - (weights - items) >= (12 * 3 * 4 if share else 0)
    # the first time they were tensors laid out the same way
    views = [*first[0][3:7], *([] if given else [first[0][9]])]
    views += [first[0][8]] if share else []
    base = views[0].data_ptr()
    assert [x.data_ptr() - base for x in views] == [
        x - items for x in (places if share else places[:-1])
    ]
    assert views[0].dtype == torch.int16 and first[0][9].dtype == torch.int64
    assert {x.dtype for x in (*first[0][4:7], first[0][8])} == {torch.int32}


@pytest.mark.parametrize("share", [0.0, 0.1], ids=["vote", "weigh"])
def test_a_step_whose_lists_may_be_cut_has_room_for_pieces(
    kernels: dict[str, Function], share: float
) -> None:
    """33 K blocks of 128 keys, 12 lists, five multiprocessors: fifteen slots."""
    q, out = (torch.empty(1, 300, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(1, 33 * 128, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    read = bitmap.full(1, 4, 3, 33)
    everything = LiteTensors(q, k, v, out, None, read, torch.empty_like(read), None, None)
    limit = -math.inf if share else -4.0
    step = replace(request(descending=False, budget=share, threshold=limit), kv_len=33 * 128)
    tile = tiles.hopper_lite(step)
    assert tile is not None
    bound = launch.LiteStep(step, tile, everything)
    bound(everything)
    (grid, lists, _), (width, first, _) = (
        kernels[name].started[0] for name in ("_LISTS", "_HOPPER")
    )
    # the last: lists of one length may be cut, too, as this step drops tiles
    assert grid == (12,) and lists[-7:-1] == (5, 16, launch.LEAST_PIECE, 4, 15, True)
    assert width == (5,) and first[-5:-1] == (15, tile.late_exp, False, False)
    bound(everything)
    planned, attended = (flat(arguments(kernels[name].result)[1]) for name in ("_LISTS", "_HOPPER"))
    items, counts, order, counter = planned[3:7]
    parts = attended[4 + 11]
    assert attended[4 + 1 : 4 + 6] == [items, counts, order, counter, counter]
    assert counts - items >= 2 * 12 * 33 and order - counts >= 4 * 27 and counter - order >= 4 * 27
    # two words, two unused ones and two for each slot
    assert planned[9] - counter >= 4 * (4 + 2 * 15) and not parts % 16
    assert parts - planned[8] >= (4 * 12 * 33 if share else 0)
    # outputs, levels, sums and maxima of two warpgroups' rows; marks of their rows, by K block, of
    # half as many lists, since a list that is cut has two slots or more
    assert bound._size - (parts - items) == 4 * (15 * 128 * (128 + 3) + 8 * 33 * 128)


def test_a_step_that_keeps_every_tile_cuts_no_lists_of_one_length(
    kernels: dict[str, Function],
) -> None:
    """It is dense attention bit for bit, which pieces are not."""
    q, out = (torch.empty(1, 300, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(1, 33 * 128, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    read = bitmap.full(1, 4, 3, 33)
    tensors = LiteTensors(q, k, v, out, None, read, torch.empty_like(read), None, None)
    step = replace(request(descending=False, budget=0.0, threshold=-math.inf), kv_len=33 * 128)
    tile = tiles.hopper_lite(step)
    assert tile is not None
    launch.LiteStep(step, tile, tensors)(tensors)
    assert kernels["_LISTS"].started[0][1][-2] is False


@pytest.mark.parametrize(
    ("changes", "cut"),
    [
        ({}, True),
        ({"soft_skip": True}, False),  # a tile is decided where it is computed
        ({"kv_len": 31 * 128}, False),  # a list has no two pieces
        ({"kv_len": 640 * 128}, True),
        ({"kv_len": 641 * 128}, False),
        ({"q_len": 128 * 160}, True),
        ({"q_len": 128 * 161}, False),
        ({"head_dim": 64}, True),
    ],
    ids=str,
)
def test_which_lists_may_be_cut(changes: dict[str, int], cut: bool) -> None:
    step = replace(request(descending=False), **({"kv_len": 4096} | changes))
    size = step.geometry
    k_blocks = size.k_blocks(step.kv_len)
    rows = step.q_heads * size.q_blocks(step.q_len)
    tile, plain = tiles._HOPPER_LITE[128, 128], tiles._PLAIN[128]
    assert launch.cut_for(step, tile, rows, k_blocks) == (5 if cut else 0)
    assert launch.cut_for(step, plain, rows, k_blocks) == 0
    # which lack the registers
    assert launch.cut_for(step, tiles._HOPPER_LITE[64, 192], rows, k_blocks) == 0


def test_a_step_whose_kernels_are_not_all_compiled_yet_compiles_the_rest(
    kernels: dict[str, Function],
) -> None:
    """The attention kernel does not depend on the direction, the one that lists tiles does."""
    read = bitmap.full(1, 4, 3, 3)
    everything = LiteTensors(*tensors(), read, torch.empty_like(read), None, None)
    for descending in (True, False, True):
        step = request(descending=descending)
        tile = tiles.hopper_lite(step)
        assert tile is not None
        launch.LiteStep(step, tile, everything)(everything)
    assert [len(kernels[name].started) for name in ("_LISTS", "_HOPPER")] == [2, 1]
    planned = flat(arguments(kernels["_LISTS"].result)[1])
    assert planned[0] == read.data_ptr()


def test_profilers_see_launches(
    kernels: dict[str, Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    t = tensors()
    bound = launch.Attention(request(), tiles._HOPPER[128, False], t)
    bound(t)
    compiled = kernels["_HOPPER"].result

    def hook(metadata: Any) -> None:
        raise AssertionError("the stand-in calls no hooks")

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        bound(t)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    ((grid, stream, *_),) = compiled.hooked
    assert grid == (5, 1, 1) and stream == STREAM
    assert not compiled.run.calls


def test_tensors_of_another_device_than_the_current_are_not_launched_here(
    kernels: dict[str, Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way is for the current device; the long one makes the right device current."""
    t = tensors()
    bound = launch.Attention(request(), tiles._HOPPER[128, False], t)
    bound(t)
    monkeypatch.setattr(launch, "_device", lambda: 3)
    bound(t)
    compiled = kernels["_HOPPER"].result
    assert not compiled.run.calls
    assert len(compiled.hooked) == 1  # Triton's own way, with the device made current


def test_a_bound_ragged_call_hands_its_workspace_on(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, merge = (Function(Compiled()) for _ in range(2))
    monkeypatch.setattr(ragged_launch, "_ATTENTION", launch.Kernel(attend))
    monkeypatch.setattr(ragged_launch, "_MERGE", launch.Kernel(merge))
    decode = RaggedRequest(
        requests=2, rows=2, q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=CPU, page_size=16, max_q_len=1, max_kv_len=1024, scale=0.1,
        lookahead=0, window=0, soft_cap=0.0, sinks=True, k_scale=1.0, v_scale=1.0, rounding="rtne",
        return_lse=True, scale_tensors=True,
    )  # fmt: skip
    splits = ragged_cut.cut(decode).splits
    assert splits > 1
    parts = splits * 2 * 4

    def step() -> RaggedTensors:
        q, out = (torch.empty(2, 4, 64, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.empty(9, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        index = [torch.zeros(n, dtype=torch.int32) for n in (3, 2)]
        table = torch.zeros(2, 64, dtype=torch.int32)
        scales = [torch.ones(1) for _ in range(2)]
        return RaggedTensors(
            q, k, v, out, torch.empty(4, 2), torch.empty(4), *index, table, *scales
        )

    first = step()
    bound = ragged_launch.Attention(decode, first)
    bound(first)
    ((_, started, _),), ((_, merged, _),) = attend.started, merge.started
    assert all(given is x for given, x in zip(started, first[:6], strict=False))
    assert [x.numel() for x in started[6:9]] == [parts * 64, parts, 2]
    assert all(given is x for given, x in zip(started[9:], first[6:], strict=False))
    assert all(given is x for given, x in zip(merged, (*started[6:9], *first[3:7]), strict=False))
    memory = started[6].data_ptr()
    inner = [memory, memory + 4 * parts * 64, memory + 4 * parts * 65]
    assert [x.data_ptr() for x in started[6:9]] == inner
    assert started[8].dtype == torch.int32
    for _ in range(2):
        t = step()
        bound(t)
        where, found = arguments(attend.result)
        pointers = [x.data_ptr() for x in t]
        assert where == (2, 2, splits, STREAM)
        assert found == (*pointers[:6], *inner, *pointers[6:], *started[14:])
        where, found = arguments(merge.result)
        assert where == (2, 4, 1, STREAM)
        assert found == (*inner, *pointers[3:7], *merged[7:])
    assert len(attend.started) == len(merge.started) == 1


def test_what_parts_are_kept_in_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code is chosen without looking at the workspace."""
    attend, merge = (Function(Compiled()) for _ in range(2))
    monkeypatch.setattr(ragged_launch, "_ATTENTION", launch.Kernel(attend))
    monkeypatch.setattr(ragged_launch, "_MERGE", launch.Kernel(merge))
    decode = RaggedRequest(
        requests=1, rows=1, q_heads=1, kv_heads=1, head_dim=64, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=CPU, page_size=0, max_q_len=1, max_kv_len=9 * 64, scale=0.1,
        lookahead=0, window=0, soft_cap=0.0, sinks=False, k_scale=1.0, v_scale=1.0,
        rounding="rtne", return_lse=False,
    )  # fmt: skip
    assert ragged_cut.cut(decode).splits % 4
    q, out = (torch.empty(1, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(9 * 64, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    starts = [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    t = RaggedTensors(q, k, v, out, None, None, *starts, None)
    ragged_launch.Attention(decode, t)(t)
    ((_, started, _),) = attend.started
    assert [x.data_ptr() % 16 for x in started[6:9]] == [0, 0, 0]


def mixed_step(
    monkeypatch: pytest.MonkeyPatch, rows: int, parts: int
) -> tuple[Function, Function, Function, RaggedRequest, RaggedTensors]:
    """A step of three requests on Hopper, prompts and few rows, and stand-ins of its kernels.

    Those of prompts, in ``parts`` parts, of few rows, and of merges.
    """
    long, attend, merge = Function(Compiled()), Function(Compiled()), Function(Compiled())
    for name, function in (("_PROMPTS", long), ("_ATTENTION", attend), ("_MERGE", merge)):
        monkeypatch.setattr(ragged_launch, name, launch.Kernel(function))
    monkeypatch.setattr(ragged_launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(ragged_cut, "units_of", lambda device: 132)
    monkeypatch.setattr(ragged_launch.knobs.runtime, "interpret", False)
    mixed = RaggedRequest(
        requests=3, rows=rows, q_heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=CPU, page_size=16, max_q_len=rows, max_kv_len=8192,
        scale=0.1, lookahead=0, window=0, soft_cap=0.0, sinks=False, k_scale=1.0, v_scale=1.0,
        rounding="rtne", return_lse=False,
    )  # fmt: skip
    q, out = (torch.empty(rows, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(9, 16, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    index = [torch.zeros(n, dtype=torch.int32) for n in (4, 3)]
    table = torch.zeros(3, 512, dtype=torch.int32)
    t = RaggedTensors(q, k, v, out, None, None, *index, table)
    monkeypatch.setattr(ragged_cut, "prompt_parts", lambda *_: parts)
    return long, attend, merge, mixed, t


@pytest.mark.parametrize("rows", [300, 4000])
def test_a_mixed_step_cuts_its_short_requests_apart(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Their partial results take the same memory beside any number of rows of prompts."""
    _, attend, merge, mixed, t = mixed_step(monkeypatch, rows, parts=1)
    out = t.out
    bound = ragged_launch.Attention(mixed, t)
    bound(t)
    rest, short = attend.started
    splits = 4 * 132 // (3 * 2)  # as many programs of short requests as run at once
    parts = splits * 3 * 8 * 8
    # 2 tiles of 32 rows for each of three requests: no more have less than 64 rows
    assert rest[0] == (3 * 2, 2, 1) and short[0] == (3 * 2, 2, splits)
    assert [x.numel() for x in short[1][6:9]] == [parts * 128, parts, 3 * 8]
    ((grid, merged, _),) = merge.started
    assert grid == (3, 8) and all(x is y for x, y in zip(merged, short[1][6:9], strict=False))
    names = ragged_launch.ragged.attention.arg_names[-9:]
    said = [dict(zip(names, call[1][-9:], strict=True)) for call in (rest, short)]
    # of 9 rows to 63, and to 8: with the 64 of prompts every request has one kernel
    limits = [(x["FROM"], x["BELOW"], x["SLOTS"]) for x in said]
    assert limits == [(9, ragged_cut.SHORTEST_PROMPT, 64), (0, 9, 8)] and merged[-2:] == (8, 0)
    bound(t)
    where, found = arguments(merge.result)
    assert where == (3, 8, 1, STREAM) and found[3] == out.data_ptr()
    where, second = arguments(attend.result)
    assert where == (6, 2, splits, STREAM) and second[6:9] == found[:3]
    assert second[14:] == short[1][14:]
    assert len(attend.started) == 2


def test_parts_of_prompts_have_a_room_and_a_merge_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside those of requests of few rows."""
    rows = 300
    long, _, merge, mixed, t = mixed_step(monkeypatch, rows, parts=3)
    ragged_launch.Attention(mixed, t)(t)
    ((grid, cut, _),) = long.started
    (_, of_short, _), (merged, of_long, _) = merge.started
    names = ragged_launch.hopper_ragged.attention.arg_names
    given = dict(zip(names, cut, strict=True))
    assert grid == ((rows // 128 + 3) * 8 * 3, 1, 1)[: len(grid)]
    assert (given["splits"], given["part_blocks"]) == (3, ragged_cut.PROMPT_PART_BLOCKS)
    assert given["PARTS"] and not given["COUNTED"]
    assert merged == (rows, 8) and of_long[-2:] == (0, ragged_cut.SHORTEST_PROMPT)
    assert of_short[-2:] == (8, 0)
    for x, name in zip(of_long, ("part_out", "part_lse", "part_count"), strict=False):
        assert x is given[name]
    assert [x.numel() for x in of_long[:3]] == [3 * rows * 8 * 128, 3 * rows * 8, rows]
    end = of_short[2].data_ptr() + 4 * of_short[2].numel()
    assert 0 <= of_long[0].data_ptr() - end < 16


@pytest.mark.parametrize("counted", [False, True])
def test_prompts_ask_for_a_counter_only_if_they_count(
    monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """In a graph that is captured, a counter is one more node for each layer."""
    long, rest = Function(Compiled()), Function(Compiled())
    monkeypatch.setattr(ragged_launch, "_PROMPTS", launch.Kernel(long))
    monkeypatch.setattr(ragged_launch, "_ATTENTION", launch.Kernel(rest))
    monkeypatch.setattr(ragged_launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(ragged_launch.knobs.runtime, "interpret", False)
    held = Workspaces()
    monkeypatch.setattr(launch, "workspaces", held)
    prompts = RaggedRequest(
        requests=2, rows=300, q_heads=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=CPU, page_size=16, max_q_len=200, max_kv_len=200, scale=0.1,
        lookahead=0, window=0, soft_cap=0.0, sinks=False, k_scale=1.0, v_scale=1.0,
        rounding="rtne", return_lse=False,
    )  # fmt: skip
    q, out = (torch.empty(300, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(26, 16, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    starts, keys = (torch.zeros(n, dtype=torch.int32) for n in (3, 2))
    t = RaggedTensors(q, k, v, out, None, None, starts, keys, torch.zeros(2, 13, dtype=torch.int32))
    bound = ragged_launch.Attention(prompts, t, replace(tiles.PROMPTS[128], counted=counted))
    for _ in range(2):  # the first compiles
        bound(t)
    given = flat(arguments(long.result)[1])[3:11]
    assert given[:4] == [out.data_ptr()] * 3 + [starts.data_ptr()]
    assert len(held.pairs) == counted
    later, now = held.counters(CPU, 0) if counted else (starts, starts)
    assert given[6:] == [now.data_ptr(), later.data_ptr()]
    assert long.started[0][1][9].dtype == now.dtype


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_size": 0},
        {"page_size": 8},
        {"head_dim": 256},
        {"rows": 63},
        {"page_size": 12},
        {"context": 64},
        {"context": 65},
        {"head_dim": 32, "context": 512},
        {"head_dim": 32, "context": 513},
    ],
    ids=str,
)
def test_prompts_are_tuned_where_their_kernel_runs_them(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    """Elsewhere no tile matters, and the fastest would be one by chance."""
    monkeypatch.setattr(ragged_launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(ragged_launch.knobs.runtime, "interpret", False)
    sizes = dict(requests=1, rows=64, context=96, q_heads=4, kv_heads=2, head_dim=64, page_size=16)
    cell = Prefill.model_validate(sizes | changes)
    dim, page = cell.head_dim, cell.page_size
    request = RaggedRequest(
        requests=1, rows=cell.rows, q_heads=4, kv_heads=2, head_dim=dim, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=CPU, page_size=page, max_q_len=cell.rows,
        max_kv_len=cell.context, scale=0.1, lookahead=0, window=0, soft_cap=0.0, sinks=False,
        k_scale=1.0, v_scale=1.0, rounding="rtne", return_lse=False,
    )  # fmt: skip
    q = torch.empty(cell.rows, 4, dim, dtype=torch.bfloat16)
    cache = torch.empty(96, 2, dim, dtype=torch.bfloat16)
    starts, table = torch.zeros(2, dtype=torch.int32), None
    if page:
        cache = cache.view(-1, page, 2, dim)
        table = torch.zeros(1, len(cache), dtype=torch.int32)
    t = RaggedTensors(q, cache, cache, q, None, None, starts, starts, table)
    assert (ragged_launch.prompts(request, t) is None) == bool(tune.problems(cell))


def test_prompts_that_no_kernel_takes_are_not_tuned() -> None:
    sizes = dict(requests=1, rows=64, context=96, q_heads=8, kv_heads=3, head_dim=100)
    heads, dim = sorted(tune.problems(Prefill.model_validate(sizes)), reverse=True)
    assert "8 and 3" in heads and "got 100" in dim


def test_a_bound_write_gets_the_addresses_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    function = Function(Compiled())
    monkeypatch.setattr(ragged_launch, "_WRITE", launch.Kernel(function))

    def rows() -> WriteTensors:
        k, v = (torch.empty(3, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        caches = [torch.empty(9, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
        slots, scales = torch.zeros(3, dtype=torch.int32), [torch.ones(1) for _ in range(2)]
        return WriteTensors(k, v, *caches, slots, *scales)

    first = rows()
    shape = (3, 2, 64, torch.bfloat16, torch.bfloat16, CPU, 9, 16, 1.0, 1.0, True)
    bound = ragged_launch.Write(WriteRequest(*shape), first)
    bound(first)
    t = rows()
    bound(t)
    where, found = arguments(function.result)
    assert where == (3, 2, 1, STREAM)
    assert found == (*(x.data_ptr() for x in t), *function.started[0][1][7:])
    assert len(function.started) == 1
    ragged_launch.Write(WriteRequest(0, *shape[1:]), first)(first)  # no rows, no launch
    assert arguments(function.result)[1] == found and len(function.started) == 1
