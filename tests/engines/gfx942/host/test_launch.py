"""What reaches the HIP run-time, byte for byte, and what must not."""

from __future__ import annotations

import math
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import liteattention_rocm
from liteattention_rocm import MI300X_GEOMETRY, TileGeometry, _core, engines
from liteattention_rocm.contract import DenseTensors, LiteTensors, WriteRequest, WriteTensors
from liteattention_rocm.engines import LIBRARY_VARIABLE, gfx942, workspace
from liteattention_rocm.engines.environment import _architecture
from liteattention_rocm.engines.gfx942 import manifest
from tests.engines.gfx942.kernels.machine import divider
from tests.engines.gfx942.kernels.variants import KERNELS

from .calls import LAUNCHING, NUMBERS, bf16, expect_launches, launches, request_of, run, run_dense
from .conftest import OBJECTS, FakeHip


@dataclass
class Call:
    """Tensors as models make them: slices of one buffer with heads interleaved, v of its own."""

    layout: str
    dim: int
    dtype: torch.dtype
    with_lse: bool
    batch: int = 2
    q_len: int = 257
    kv_len: int = 200
    q_heads: int = 6
    kv_heads: int = 2

    def __post_init__(self) -> None:
        rows = max(self.q_len, self.kv_len)
        fused = torch.randn(self.batch, rows, self.q_heads + self.kv_heads, self.dim).to(self.dtype)
        q, k = fused.split([self.q_heads, self.kv_heads], dim=2)
        v = torch.randn(self.batch, self.kv_len + 2, self.kv_heads + 1, self.dim).to(self.dtype)
        found = (q[:, : self.q_len], k[:, : self.kv_len], v[:, 1:-1, :-1])
        if self.layout == "bhsd":
            found = tuple(x.transpose(1, 2) for x in found)
        self.q, self.k, self.v = found
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(self.batch, self.q_heads, self.q_len) if self.with_lse else None

    def strides(self, x: torch.Tensor) -> tuple[int, int, int]:
        b, one, two, _ = x.stride()
        return (b, one, two) if self.layout == "bshd" else (b, two, one)

    @property
    def lse_address(self) -> int:
        return self.lse.data_ptr() if self.lse is not None else 0

    @property
    def v_t_bytes(self) -> int:
        return self.batch * self.kv_heads * 4 * 64 * self.dim * 2

    def transposition(self, v_t: int) -> tuple[str, int, int, bytes]:
        sizes = (self.batch, self.kv_heads, self.kv_len, 0)
        return (
            f"transpose_v_bf16_d{self.dim}",
            self.batch * self.kv_heads * 4,
            256,
            struct.pack("<2Q3q4i", self.v.data_ptr(), v_t, *self.strides(self.v), *sizes),
        )

    @property
    def inner(self) -> tuple[Any, ...]:
        """What dense and lite arguments share behind their pointers: strides, sizes, scale."""
        return (
            *self.strides(self.q),
            *self.strides(self.k),
            *self.strides(self.out),
            *(self.batch, self.q_heads, self.kv_heads, self.q_len, self.kv_len),
            -0.37 * math.log2(math.e),
        )


@pytest.fixture(params=NUMBERS, ids=lambda number: "-".join(map(str, number)))
def number(request: pytest.FixtureRequest) -> tuple[torch.dtype, str]:
    return request.param


@pytest.mark.parametrize(
    ("layout", "with_lse", "dim", "splits"),
    [
        ("bshd", False, 64, 1),
        ("bshd", True, 128, 3),
        ("bhsd", False, 128, 1),
        ("bhsd", True, 64, 3),
    ],
)
def test_dense_kernels_get_exactly_these_bytes(
    engine: gfx942.Gfx942Engine,
    cpu_hip: FakeHip,
    number: tuple[torch.dtype, str],
    layout: str,
    with_lse: bool,
    dim: int,
    splits: int,
) -> None:
    dtype, rounding = number
    c = Call(layout, dim, dtype, with_lse)
    engine = gfx942.Gfx942Engine(kv_splits=splits)
    run_dense(engine, c.q, c.k, c.v, c.out, c.lse, layout, rounding=rounding, scale=-0.37)
    (memory,) = engine._workspaces.held.values()
    base = memory.data_ptr()
    tiles = c.batch * c.q_heads * 2
    tail, parts = (tiles, 3) if splits > 1 else (0, 1)
    part_out = base + c.v_t_bytes if tail else 0
    part_stats = part_out + tail * parts * 256 * dim * 4 if tail else 0
    assert memory.numel() == c.v_t_bytes + tail * parts * (256 * dim * 4 + 2 * 256 * 4)
    pointers = (c.q.data_ptr(), c.k.data_ptr(), base, c.out.data_ptr(), c.lse_address)
    split = (part_out, part_stats, *c.inner, tiles - tail, parts, 0, 0)
    params = struct.pack("<7Q9q5if4i", *pointers, *split)
    name = f"attention_dense_{NUMBERS[number].format(f'_d{dim}')}"
    expected = [c.transposition(base), (name, tiles - tail + tail * parts, 512, params)]
    if tail:
        sizes = (c.batch, c.q_heads, c.q_len, dim, tiles - tail, parts, 0, c.inner[-1])
        moved = (part_out, part_stats, c.out.data_ptr(), c.lse_address)
        merge = struct.pack("<4Q3q7if", *moved, *c.strides(c.out), *sizes)
        groups = tail * 256 // (256 * 8 // dim)
        expected.append((f"merge_parts_{NUMBERS[number].format('')}", groups, 256, merge))
    expect_launches(cpu_hip, expected)


@pytest.mark.parametrize(
    ("layout", "with_lse", "dim", "masks", "q_len", "threshold"),
    [
        ("bshd", False, 64, (True, False), 257, -3.5),
        ("bhsd", True, 128, (False, True), 257, -math.inf),
        ("bshd", True, 128, (False, False), 256, 0.0),  # a compute unit for each tile
    ],
)
def test_lite_kernels_get_exactly_these_bytes(
    engine: gfx942.Gfx942Engine,
    cpu_hip: FakeHip,
    number: tuple[torch.dtype, str],
    layout: str,
    with_lse: bool,
    dim: int,
    masks: tuple[bool, bool],
    q_len: int,
    threshold: float,
) -> None:
    dtype, rounding = number
    cpu_hip.units(12)
    c = Call(layout, dim, dtype, with_lse, q_len=q_len)
    request = request_of(
        c.q, c.k, layout, rounding=rounding, scale=-0.37, return_lse=with_lse,
        geometry=MI300X_GEOMETRY, threshold=threshold, descending=True, soft_skip=with_lse,
    )  # fmt: skip
    q_blocks = -(-q_len // 256)
    read, write = (torch.zeros(2, 6, q_blocks, 1, dtype=torch.int32) for _ in range(2))
    must_do, must_skip = (torch.zeros(1, dtype=torch.int32) if used else None for used in masks)
    assert engine.reasons(request) == []
    tensors = LiteTensors(c.q, c.k, c.v, c.out, c.lse, read, write, must_do, must_skip)
    run(engine, request, tensors)
    (memory,) = engine._workspaces.held.values()
    base = memory.data_ptr()
    tiles = c.batch * c.q_heads * q_blocks
    ordered = tiles > 12
    # 24 tiles: 3 for each XCD, half as many again have room
    positions = 8 * 4 if ordered else 0
    order = base + c.v_t_bytes if ordered else 0
    counts = order + 256 if ordered else 0
    assert memory.numel() == c.v_t_bytes + (256 + 256 if ordered else 0)
    do, skip = (0 if mask is None else mask.data_ptr() for mask in (must_do, must_skip))
    expected = [c.transposition(base)]
    if ordered:
        sizes = (tiles, positions, 1, -(-request.kv_len // 64))
        count = struct.pack("<5Q4i", read.data_ptr(), do, skip, counts, order, *sizes)
        expected.append(("count_tiles", 1, 256, count))
        # 2 compute units of an XCD, 4 tiles of each are ordered together
        plan = struct.pack(
            "<4Q5iIIi", counts, order, 0, 0, tiles, q_blocks, positions // 8, 8, 0, 2**31, 1, 2
        )
        expected.append(("plan_lpt", 1, 256, plan))
    voting = threshold > -math.inf  # nothing is voted on at -inf: walk as dense does
    params = struct.pack(
        "<10Q9q5iff3i",
        *(c.q.data_ptr(), c.k.data_ptr(), base, c.out.data_ptr(), c.lse_address),
        *(read.data_ptr(), write.data_ptr(), do, skip, order),
        *(*c.inner, threshold, voting, with_lse, 0),
    )
    name = f"attention_lite_{NUMBERS[number].format(f'_d{dim}')}"
    expected.append((name, positions or tiles, 512, params))
    expect_launches(cpu_hip, expected)
    spans = {tuple(map(int, call.split()[:2])) for call in cpu_hip.of("hipHostRegister")}
    for bits in (read, write, must_do, must_skip):
        if bits is not None:
            assert (bits.data_ptr(), bits.numel() * 4) in spans
    assert (base, c.v_t_bytes) in spans
    assert ((order, positions * 4) in spans) == ((counts, tiles * 4) in spans) == ordered
    # all of it is handed back
    undone = [int(call) for call in cpu_hip.of("hipHostUnregister")]
    assert sorted(undone) == sorted(address for address, _ in spans)


@pytest.mark.parametrize(("layout", "with_lse", "dim"), [("bshd", False, 64), ("bhsd", True, 128)])
def test_steps_whose_lists_may_be_cut_get_exactly_these_bytes(
    engine: gfx942.Gfx942Engine,
    cpu_hip: FakeHip,
    number: tuple[torch.dtype, str],
    layout: str,
    with_lse: bool,
    dim: int,
) -> None:
    """All that a list of 64 K blocks on a whole MI300X takes, each buffer behind the other."""
    dtype, rounding = number
    cpu_hip.units(304)
    c = Call(layout, dim, dtype, with_lse, kv_len=4033)
    request = request_of(
        c.q, c.k, layout, rounding=rounding, scale=-0.37, return_lse=with_lse,
        geometry=MI300X_GEOMETRY, threshold=-math.inf, descending=True, budget=0.1,
    )  # fmt: skip
    tiles = c.batch * c.q_heads * -(-c.q_len // 256)
    read, write = (torch.zeros(2, 6, tiles // 12, 2, dtype=torch.int32) for _ in range(2))
    tensors = LiteTensors(c.q, c.k, c.v, c.out, c.lse, read, write, None, None)
    run(engine, request, tensors)
    (memory,) = engine._workspaces.held.values()
    base = memory.data_ptr()
    slots = 2 * (-(-tiles // 8) * 3 // 2) + 38
    at, ends = base, []
    for size in (
        c.batch * c.kv_heads * 64 * 64 * dim * 2,  # V
        slots * 8 * 4,  # order
        -(-tiles // 8) * 8 * 4,  # counts
        tiles * 64 * 4,  # weights
        slots * 8 * 16,  # parts
        304 * 8,  # cuts
        608 * 256 * dim * 4,  # outputs, statistics and weights of parts
        608 * 2 * 256 * 4,
        608 * 8 * 64 * 4,
    ):
        ends.append((at, size))
        at += -(-size // 256) * 256
    assert memory.numel() == at - base
    v_t, order, counts, weights, parts, cuts, part_out, part_stats, part_weights = (
        begin for begin, _ in ends
    )
    spans = {tuple(map(int, call.split()[:2])) for call in cpu_hip.of("hipHostRegister")}
    assert set(ends) <= spans
    made = launches(cpu_hip)
    suffix = NUMBERS[number]
    assert [(of["name"], of["grid"], of["block"]) for of, _ in made[1:]] == [
        ("count_tiles", f"{-(-slots * 8 // 256)}x1x1", "256x1x1"),
        ("pack_lists", "8x1x1", "512x1x1"),
        (f"attention_weigh_{suffix.format(f'_d{dim}')}", f"{slots * 8}x1x1", "512x1x1"),
        (f"merge_lists_{suffix.format('')}", f"{304 * (256 // (2048 // dim) + 1)}x1x1", "256x1x1"),
        ("select_tiles", f"{tiles}x1x1", "64x1x1"),
    ]
    _, _, (_, pack), (_, weigh), (_, merge), _ = made
    assert struct.unpack_from("<4Q3i", pack) == (
        counts, order, parts, cuts, tiles, tiles // 12, slots,
    )  # fmt: skip
    of_parts = part_out, part_stats, part_weights
    assert weigh == struct.pack(
        "<14Q9q5if2i",
        *(c.q.data_ptr(), c.k.data_ptr(), v_t, c.out.data_ptr(), c.lse_address),
        *(read.data_ptr(), weights, 0, 0, order, parts, *of_parts, *c.inner, 1, 0),
    )
    assert merge == struct.pack(
        "<7Q3q4ifi", cuts, *of_parts, c.out.data_ptr(), c.lse_address, weights,
        *c.strides(c.out), c.q_heads, c.q_len, c.kv_len, dim, c.inner[-1], 0,
    )  # fmt: skip
    # Whole lists if they are asked for; then no tile needs an order.
    run(gfx942.Gfx942Engine(kv_splits=1), request, tensors)
    assert [of["name"] for of, _ in launches(cpu_hip)[len(made) :]] == [
        made[0][0]["name"], made[3][0]["name"], "select_tiles",
    ]  # fmt: skip


def test_the_emulator_is_told_exactly_the_bytes_of_the_tensors(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    buffer = bf16(2, 10, 5, 128)
    q, k, v, out = buffer[:, 1:9, 2:4], bf16(2, 70, 1, 128), bf16(2, 70, 1, 128), bf16(2, 8, 2, 128)
    lse = torch.empty(2, 2, 8)
    run_dense(engine, q, k, v, out, lse)
    spans = [tuple(map(int, call.split()[:2])) for call in cpu_hip.of("hipHostRegister")]
    whole = 2 * 70 * 128 * 2
    last_element = (1 * 10 * 5 + 7 * 5 + 1) * 128 + 128
    assert spans[:5] == [
        (q.data_ptr(), last_element * 2),
        (k.data_ptr(), whole),
        (v.data_ptr(), whole),
        (out.data_ptr(), 2 * 8 * 2 * 128 * 2),
        (lse.data_ptr(), 2 * 2 * 8 * 4),
    ]
    assert len(spans) == 6 and spans[5][1] == 2 * 128 * 128 * 2  # V_t: two blocks per head
    undone = [int(call) for call in cpu_hip.of("hipHostUnregister")]
    assert undone == [address for address, _ in reversed(spans)]
    order = [call.split()[0] for call in cpu_hip.calls if call.split()[0] in LAUNCHING]
    assert (
        order == ["hipHostRegister"] * 6 + ["hipModuleLaunchKernel"] * 2 + ["hipHostUnregister"] * 6
    )


def touchable(calls: list[str]) -> dict[int, list[int]]:
    """Bytes of the spans that the run-time has at each address after these calls."""
    spans: dict[int, list[int]] = {}
    for call in calls:
        name, *fields = call.split()
        if name == "hipHostRegister":
            spans.setdefault(int(fields[0]), []).append(int(fields[1]))
        elif name == "hipHostUnregister":
            spans[int(fields[0])].pop()  # by its address alone: the newest goes
    return {address: sizes for address, sizes in spans.items() if sizes}


@pytest.mark.parametrize("ends_first", ["short", "long"])
@pytest.mark.parametrize("begins_first", ["short", "long"])
def test_threads_on_views_of_one_tensor_keep_each_others_memory(
    cpu_hip: FakeHip, engine: gfx942.Gfx942Engine, begins_first: str, ends_first: str
) -> None:
    """Two launches are in flight whose tensors begin at one address; one of them ends."""
    whole = bf16(1, 400, 1, 64)
    views = {"short": whole[:, :100], "long": whole}
    bytes_of = {name: view.numel() * 2 for name, view in views.items()}
    entered = {name: threading.Event() for name in views}
    leave = {name: threading.Event() for name in views}
    mine = threading.local()

    def wait() -> None:
        entered[mine.name].set()
        assert leave[mine.name].wait(20)

    cpu_hip.during_launches(wait)

    def run(name: str) -> None:
        mine.name = name
        x = views[name]
        # an engine of its own: what is registered belongs to the run-time, not to an engine
        run_dense(gfx942.Gfx942Engine(1), x, x, x, torch.empty_like(x))

    threads = {name: threading.Thread(target=run, args=(name,)) for name in views}
    other = {"short": "long", "long": "short"}
    for name in (begins_first, other[begins_first]):
        threads[name].start()
        assert entered[name].wait(20)
    address = whole.data_ptr()
    assert max(touchable(cpu_hip.calls)[address]) == bytes_of["long"]
    leave[ends_first].set()
    threads[ends_first].join()
    still_running = other[ends_first]
    left = touchable(cpu_hip.calls)[address]
    assert max(left) >= bytes_of[still_running]
    if (begins_first, ends_first) == ("short", "long"):
        assert left == [bytes_of["short"]]  # no longer than is needed
    leave[still_running].set()
    threads[still_running].join()
    assert touchable(cpu_hip.calls) == {}


def run_on_stream(device: _core.Gfx942Device, stream: int, splits: int = 1) -> None:
    """Launch with addresses that nothing reads: the run-time is a fake."""
    shape = _core.DenseShape(1, 1, 1, 100, 200, 128)
    plan = _core.plan_dense(shape, device.compute_units, splits)
    launch = _core.DenseLaunch()
    launch.set_strides(*([(12800, 128, 128)] * 4))
    device.attention(plan, launch, 0x1000, 0x2000, 0x3000, 0x4000, 0, 0x10000, stream)


def run_lite_on_stream(device: _core.Gfx942Device, stream: int, budget: float = 0.0) -> None:
    plan = _core.plan_lite(_core.DenseShape(1, 1, 1, 400, 200, 128), 1, budget > 0)
    launch = _core.DenseLaunch()
    launch.set_strides(*([(51200, 128, 128)] * 4))
    tensors = (0x1000, 0x2000, 0x3000, 0x4000, 0, 0x5000, 0x6000, 0, 0, 0, 0)
    step = _core.LiteLaunch()
    step.budget = budget
    device.lite(plan, launch, step, *tensors, 0x10000, stream)


def test_every_launch_goes_to_the_callers_stream_and_nothing_waits(gpu_hip: FakeHip) -> None:
    device = _core.Gfx942Device(gpu_hip.library(), 0, OBJECTS)
    before = len(gpu_hip.calls)
    run_on_stream(device, 0xABCD0, splits=2)
    run_on_stream(device, 0)
    plan = _core.plan_lite(_core.DenseShape(1, 1, 1, 400, 200, 128), 1)
    device.plan_lpt(plan, 0x1000, 0, 0, 0x2000, 0x3000, 77)
    run_lite_on_stream(device, 0xF00)
    run_lite_on_stream(device, 0xF10, budget=0.1)
    streams = [made["stream"] for made, _ in launches(gpu_hip)]
    assert streams == (
        [str(0xABCD0)] * 3 + ["0"] * 2 + ["77"] * 2 + [str(0xF00)] * 4 + [str(0xF10)] * 5
    )
    # and that is all: no allocation, copy, wait, module load or look-up
    assert {call.split()[0] for call in gpu_hip.calls[before:]} == {"hipModuleLaunchKernel"}


def test_bound_calls_go_to_pytorchs_stream_on_the_tensors_gpu(
    gpu_hip: FakeHip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream that is current at the call, not when it was bound; each has its workspace."""
    gpu_hip.devices(2)
    gpu_hip.units(1)
    monkeypatch.setenv(LIBRARY_VARIABLE, gpu_hip.path)
    monkeypatch.setattr(gfx942.engine, "code_objects", lambda: OBJECTS)
    current = {1: 0}
    monkeypatch.setattr(workspace, "raw_stream", lambda index: current[index])
    captured = []
    monkeypatch.setattr(workspace, "_capturing", lambda: bool(captured))
    engine, gpu = gfx942.Gfx942Engine(kv_splits=1), torch.device("cuda:1")
    streams = {0: torch.empty(2**18), 0xF00D: torch.empty(2**18)}
    for stream, memory in streams.items():
        engine._workspaces.held[gpu, stream] = memory.view(torch.uint8)

    x, bits = bf16(1, 400, 1, 64), torch.zeros(1, 1, 2, 1, dtype=torch.int32)
    dense = DenseTensors(x, x, x, x, None)
    lite = LiteTensors(*dense, bits, bits.clone(), None, None)
    write = WriteTensors(x[0], x[0], x, x, torch.zeros(400, dtype=torch.int32))
    row = WriteRequest(400, 1, 64, x.dtype, x.dtype, gpu, 1, 400, 1.0, 1.0)
    calls = [
        (engine.bind(request_of(x, x, device=gpu), dense), dense),
        (engine.bind(request_of(x, x, device=gpu, geometry=MI300X_GEOMETRY), lite), lite),
        (engine.bind(row, write), write),
    ]
    for stream, memory in streams.items():
        current[1] = stream
        before = len(launches(gpu_hip))
        for bound, tensors in calls:
            bound(tensors)
        made = launches(gpu_hip)[before:]
        assert [(of["device"], of["stream"]) for of, _ in made] == [("1", str(stream))] * len(made)
        assert made[0][0]["name"] == "transpose_v_bf16_d64" and len(made) == 7
        assert struct.unpack_from("<2Q", made[0][1])[1] == memory.data_ptr()
    # A captured call takes memory of its own, from PyTorch's pool of the graph.
    pool = torch.empty(2**20, dtype=torch.uint8)
    monkeypatch.setattr(workspace.Workspaces, "take", lambda *_: pool)
    captured.append(True)
    before = len(launches(gpu_hip))
    for bound, tensors in calls:
        bound(tensors)
    assert struct.unpack_from("<2Q", launches(gpu_hip)[before][1])[1] == pool.data_ptr()


def test_a_graph_has_a_workspace_of_its_own(engine: gfx942.Gfx942Engine, cpu_hip: FakeHip) -> None:
    x = bf16(1, 400, 1, 64)
    tensors = DenseTensors(x, x, x, torch.empty_like(x), None)
    bound = engine.bind(request_of(x, x), tensors)
    for graph in (False, True, False):
        cpu_hip.stream(0, captured=graph)
        bound(tensors)
    (held,) = engine._workspaces.held.values()
    made = [
        struct.unpack_from("<2Q", data)[1] for of, data in launches(cpu_hip) if "v_" in of["name"]
    ]
    assert made[0] == made[2] == held.data_ptr() != made[1]


def test_starts_of_a_causal_call_are_kept_by_stream_and_not_for_a_graph(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *a, **b: made.append(at) or arange(*a, **b))
    x = bf16(2, 9, 1, 64)
    tensors = DenseTensors(x, x, x, torch.empty_like(x), None)
    bound = engine.bind(request_of(x, x, causal=True), tensors)
    for at, graph in ((0, 0), (0, 0), (7, 1), (7, 1), (7, 0), (7, 0), (0, 0)):
        cpu_hip.stream(at, captured=bool(graph))
        bound(tensors)
    assert made == [0, 0, 7, 7, 7, 7, 7, 7]  # of queries and of keys
    seen = [struct.unpack_from("<9Q", data) for _, data in launches(cpu_hip)]
    assert seen[0][6] == seen[1][6] == seen[6][6] != seen[4][6] == seen[5][6]


def test_modules_are_loaded_once_per_device(
    gpu_hip: FakeHip, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_hip.devices(2)
    monkeypatch.setenv(LIBRARY_VARIABLE, gpu_hip.path)
    monkeypatch.setattr(gfx942.engine, "code_objects", lambda: OBJECTS)
    owner = [gfx942.Gfx942Engine()]
    barrier = threading.Barrier(8)

    def ask(index: int) -> None:
        barrier.wait()
        for _ in range(5):
            run_on_stream(owner[0].device(torch.device("cuda", index % 2)), 0)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loads = sorted(gpu_hip.of("hipModuleLoadData"))
    assert loads == [f"device={i} magic=7fELF" for i in (0, 0, 1, 1)]
    assert len(gpu_hip.of("hipModuleGetFunction")) == 2 * len(KERNELS)
    made = [launch for launch, _ in launches(gpu_hip)]
    assert sorted(launch["device"] for launch in made) == ["0"] * 40 + ["1"] * 40
    owner.clear()
    assert len(gpu_hip.of("hipModuleUnload")) == 4


def test_the_threads_own_device_is_put_back(gpu_hip: FakeHip) -> None:
    gpu_hip.devices(2)
    device = _core.Gfx942Device(gpu_hip.library(), 1, OBJECTS)
    run_on_stream(device, 0)
    assert gpu_hip.of("hipSetDevice") == ["1", "0", "1", "0"]
    assert all(made["device"] == "1" for made, _ in launches(gpu_hip))


def test_a_failed_launch_names_the_error_and_the_kernel(
    gpu_hip: FakeHip, cpu_hip: FakeHip, engine: gfx942.Gfx942Engine
) -> None:
    device = _core.Gfx942Device(gpu_hip.library(), 0, OBJECTS)
    gpu_hip.fail("hipModuleLaunchKernel", 719)
    with pytest.raises(_core.HipError) as caught:
        run_on_stream(device, 0)
    assert str(caught.value) == (
        "launch of transpose_v_bf16_d128 failed: hipErrorLaunchFailure (719): "
        "unspecified launch failure"
    )
    assert gpu_hip.calls[-1] == "hipGetLastError"  # PyTorch must not find it and blame itself

    cpu_hip.fail("hipModuleLaunchKernel", 719)
    x = bf16(1, 8, 1, 64)
    with pytest.raises(_core.HipError, match="LDS race: wave 3 reads dword 17"):
        run_dense(engine, x, x, x, torch.empty_like(x))
    assert len(cpu_hip.of("hipHostRegister")) == len(cpu_hip.of("hipHostUnregister")) == 3


def test_a_code_object_for_another_gpu_is_refused_by_name(gpu_hip: FakeHip) -> None:
    gpu_hip.fail("hipModuleLoadData", 209)
    with pytest.raises(_core.HipError) as caught:
        _core.Gfx942Device(gpu_hip.library(), 0, OBJECTS)
    assert "hipModuleLoadData of attention.co failed: hipErrorNoBinaryForGpu (209)" in str(
        caught.value
    )
    gpu_hip.native.fake_reset()
    gpu_hip.fail("hipModuleGetFunction", 209)
    with pytest.raises(_core.HipError, match=r"of transpose_v_bf16_d128 in attention\.co"):
        _core.Gfx942Device(gpu_hip.library(), 0, OBJECTS)
    assert len(gpu_hip.of("hipModuleUnload")) == 1


def test_code_objects_of_another_build_are_refused_with_every_reason(gpu_hip: FakeHip) -> None:
    kernels = [(name, size + 8 if "rtz" in name else size) for name, size in KERNELS[:-1]]
    with pytest.raises(ValueError) as caught:
        _core.Gfx942Device(gpu_hip.library(), 0, [("all.co", b"x", kernels)])
    text = str(caught.value)
    assert "attention_dense_bf16_d64_rtz takes 176 bytes, this build passes 168" in text
    assert "merge_parts_bf16_rtz takes 96 bytes" in text and "no kernel write_kv" in text
    assert not gpu_hip.of("hipModuleLoadData")
    with pytest.raises(ValueError, match=r"no device 3: .* sees 1"):
        _core.Gfx942Device(gpu_hip.library(), 3, OBJECTS)


def test_rows_off_the_dword_grid_are_refused_with_every_reason(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    good = bf16(1, 8, 2, 64)
    odd = torch.empty(1 * 8 * 131 + 1, dtype=torch.bfloat16)
    shifted = odd[1:].as_strided(good.shape, (1048, 131, 64, 1))
    stepped = odd.as_strided(good.shape, (1048, 130, 65, 1))
    with pytest.raises(ValueError) as caught:
        run_dense(engine, shifted, stepped, good, good.clone())
    text = str(caught.value)
    assert "every row of q must" in text and "every row of k must" in text
    assert "every row of v" not in text and "every row of out" not in text
    assert not launches(cpu_hip)
    # a stride that is never stepped over does not matter
    one = odd.as_strided((1, 8, 1, 64), (1048, 130, 65, 1))
    run_dense(engine, one, one, one, good[:, :, :1].clone())
    assert len(launches(cpu_hip)) == 2


def test_a_lite_step_lists_every_reason_against_it(gpu_hip: FakeHip) -> None:
    device = _core.Gfx942Device(gpu_hip.library(), 0, OBJECTS)
    plan_shape = _core.DenseShape(1, 1, 1, 400, 200, 128)
    plan = _core.plan_lite(plan_shape, 304)
    step = _core.LiteLaunch()
    step.threshold = 0.5
    with pytest.raises(ValueError) as caught:
        device.lite(plan, _core.DenseLaunch(), step, *[0] * 11, 8, 0)
    text = str(caught.value)
    for name in ("q", "k", "v", "out", "read", "write"):
        assert f"{name} has no memory" in text
    assert "workspace must be 16-byte aligned" in text and "threshold must be <= 0" in text
    step.threshold = -1.0
    row = 4  # bytes of a q block's row; there are two
    for read, write in ((4096, 4096), (4096, 4096 + row), (4096 + row, 4096)):
        with pytest.raises(ValueError, match="write must not overlap read"):
            device.lite(plan, _core.DenseLaunch(), step, *[0] * 5, read, write, *[0] * 4, 16, 0)
    with pytest.raises(ValueError) as caught:
        device.lite(
            plan, _core.DenseLaunch(), step, *[0] * 5, 4096, 4096 + 2 * row, *[0] * 4, 16, 0
        )
    assert "overlap" not in str(caught.value)
    for weighs, share, said in (
        (False, 0.1, "0 in a plan"),
        (True, 0.0, "above 0"),
        (True, 1.0, "above 0"),
    ):
        step.budget = share
        with pytest.raises(ValueError, match=f"budget must be {said}"):
            device.lite(
                _core.plan_lite(plan_shape, 304, weighs),
                _core.DenseLaunch(),
                step,
                *[0] * 11,
                16,
                0,
            )
    with pytest.raises(ValueError) as caught:
        device.plan_lpt(plan, *[0] * 6)
    text = str(caught.value)
    assert "each tile has a compute unit of its own" in text
    for name in ("read has", "order has", "counts have"):
        assert f"{name} no memory" in text
    assert not launches(gpu_hip)


def test_keys_too_far_apart_for_32_bits_are_refused(gpu_hip: FakeHip) -> None:
    device = _core.Gfx942Device(gpu_hip.library(), 0, OBJECTS)
    far = 2**25
    tensors = (0x1000, 0x2000, 0x3000, 0x4000)
    for kv_len, apart in ((2, far), (2, far + 2), (1, far + 2)):
        plan = _core.plan_dense(_core.DenseShape(1, 1, 1, 4, kv_len, 64), 304, 1)
        launch = _core.DenseLaunch()
        launch.set_strides((0, 64, 64), (0, apart, 64), (0, far + 2, 64), (0, far + 2, 64))
        if kv_len > 1 and apart > far:
            with pytest.raises(ValueError, match=f"k must be at most {far} elements apart, got"):
                device.attention(plan, launch, *tensors, 0, 0x10000, 0)
        else:
            device.attention(plan, launch, *tensors, 0, 0x10000, 0)
    assert len(launches(gpu_hip)) == 4


def test_damaged_code_objects_are_refused_with_every_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = manifest.DIRECTORY
    monkeypatch.setattr(manifest, "DIRECTORY", tmp_path)
    monkeypatch.setattr(manifest, "read", manifest.read.__wrapped__)
    with pytest.raises(ValueError, match="this installation has no gfx942 code objects"):
        gfx942.code_objects()
    for file in shipped.glob("*.co"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = (shipped / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(stored)
    whole = gfx942.code_objects()
    assert dict(kernel for _, _, names in whole for kernel in names) == dict(KERNELS)
    (tmp_path / "attention_dense.co").write_bytes(whole[0][1][:-1] + b"?")
    (tmp_path / "plan_lpt.co").unlink()
    with pytest.raises(ValueError) as caught:
        gfx942.code_objects()
    text = str(caught.value)
    assert "attention_dense.co has SHA-256" in text and "plan_lpt.co" in text
    assert "merge_parts.co" not in text
    (tmp_path / "manifest.json").write_text(stored.replace('"format": 1', '"format": 7'))
    with pytest.raises(ValueError, match=r"no gfx942 code objects: .*format 7"):
        gfx942.code_objects()


def test_the_order_alone_gets_exactly_these_bytes(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    lists = torch.zeros(2, 3, 700, 2, dtype=torch.int32)
    must_skip = torch.zeros(2, dtype=torch.int32)
    order = engine.order_of_tiles(lists, must_skip=must_skip, k_blocks=39)
    assert order.shape == (787, 8) and order.dtype == torch.int32  # 525 and half as many again
    (count, counting), (plan, planning) = launches(cpu_hip)
    assert (count["name"], count["grid"], count["block"]) == ("count_tiles", "25x1x1", "256x1x1")
    assert (plan["name"], plan["grid"], plan["block"]) == ("plan_lpt", "17x1x1", "256x1x1")
    counts, *_ = struct.unpack_from("<Q", planning)
    assert counting == struct.pack(
        "<5Q4i", lists.data_ptr(), 0, must_skip.data_ptr(), counts, order.data_ptr(),
        4200, 787 * 8, 2, 39,
    )  # fmt: skip
    assert planning == struct.pack(
        "<4Q5iIIi", counts, order.data_ptr(), 0, 0, 4200, 700, 787, 152, 0, *divider(700), 38
    )
    assert cpu_hip.of("hipHostRegister") == [
        f"{lists.data_ptr()} {4200 * 8} 0",
        f"{must_skip.data_ptr()} 8 0",
        f"{order.data_ptr()} {787 * 8 * 4} 0",
        f"{counts} {4200 * 4} 0",
    ]
    # So many K blocks that eight times the work of all tiles has more than 32 bits.
    many = _core.plan_lite(_core.DenseShape(1, 305, 1, 1, 2**29, 64), 304)
    engine.device(torch.device("cpu")).plan_lpt(many, 0x1000, 0, 0, 0x2000, 0x3000, 0)
    *_, shift, _, _, _ = struct.unpack("<4Q5iIIi", launches(cpu_hip)[-1][1])
    assert 8 * 305 * ((2**23 + 2 >> shift) + 1) < 2**32 <= 8 * 305 * ((2**23 + 2 >> shift - 1) + 1)
    with pytest.raises(ValueError, match="70 K blocks do not fill 2 words"):
        engine.order_of_tiles(lists, k_blocks=70)
    with pytest.raises(ValueError, match="each tile has a compute unit of its own"):
        engine.order_of_tiles(lists[:1, :1, :304])


def test_no_order_of_what_is_no_list(engine: gfx942.Gfx942Engine, cpu_hip: FakeHip) -> None:
    """Kernels would read past a short mask, and the bits of other numbers."""
    lists = torch.zeros(2, 3, 700, 2, dtype=torch.int32)
    mask = torch.zeros(2, dtype=torch.int32)
    for order in (engine.order_of_tiles, engine.order_of_parts):
        for wrong in (lists.long(), lists[..., :1], lists[0], lists.transpose(0, 1)):
            with pytest.raises(ValueError, match="lists must be int32 of 4 dimensions, contiguous"):
                order(wrong)
        with pytest.raises(ValueError) as error:
            order(lists.long(), mask[:1], mask.float(), k_blocks=70)
        for reason in (
            "lists must be int32 of 4 dimensions, contiguous, on cpu, got torch.int64",
            "must_do must have 2 words, as lists have, got 1",
            "must_skip must be int32 of 1 dimension, contiguous, on cpu, got torch.float32 [2]",
            "70 K blocks do not fill 2 words",
        ):
            assert reason in str(error.value)
    assert not launches(cpu_hip)


def test_gpu_tensors_on_a_gfx942_take_this_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engines.ENGINE_VARIABLE, raising=False)
    found = {0: "gfx942", 1: "gfx90a"}
    monkeypatch.setattr(engines.registry, "architecture", lambda device: found[device.index])
    assert engines.choose("cuda:0").name == "gfx942"
    assert engines.choose("cuda:1").name == "portable"
    assert engines.choose("cpu").name == "cpu"


def test_architecture_is_the_compilers_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        gcnArchName = "gfx942:sramecc+:xnack-"
        major, minor = 9, 4

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    for hip, expected in (("6.4", "gfx942"), (None, "sm_94")):
        _architecture.cache_clear()
        monkeypatch.setattr(torch.version, "hip", hip)
        assert engines.architecture(torch.device("cuda:0")) == expected
    _architecture.cache_clear()
    assert engines.architecture(torch.device("cpu")) == ""


def test_compiled_calls_are_one_opaque_operator(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    def two_layers(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        first = liteattention_rocm.attention(q, k, k, engine="gfx942")
        return liteattention_rocm.attention(first, k, k, scale=2.0, engine="gfx942")

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(two_layers, fullgraph=True, dynamic=True, backend="aot_eager")
    for q_len, kv_len in ((5, 70), (9, 130), (400, 3)):
        compiled(bf16(1, q_len, 4, 64), bf16(1, kv_len, 2, 64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    denses = [data for made, data in launches(cpu_hip) if made["name"].startswith("attention")]
    assert [struct.unpack_from("<ii", data, 140) for data in denses] == [
        lengths for lengths in ((5, 70), (9, 130), (400, 3)) for _ in range(2)
    ]
    with pytest.raises(Exception, match="dtype must be bf16"):
        compiled(torch.zeros(1, 5, 4, 64), torch.zeros(1, 5, 2, 64))


def test_compiled_lite_steps_are_one_opaque_operator(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    def step(q: torch.Tensor, k: torch.Tensor, read: torch.Tensor, write: torch.Tensor) -> Any:
        return liteattention_rocm.lite_attention(
            q, k, k, read, write, threshold=-3.0, soft_skip=True,
            geometry=MI300X_GEOMETRY, engine="gfx942",
        )  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, q_blocks in ((70, 1), (400, 2), (600, 3)):
        read, write = (torch.zeros(1, 200, q_blocks, 1, dtype=torch.int32) for _ in range(2))
        compiled(bf16(1, length, 200, 64), bf16(1, length, 2, 64), read, write)
    names = [made["name"] for made, _ in launches(cpu_hip)]
    whole = ["transpose_v_bf16_d64", "count_tiles", "pack_lists", "attention_lite_bf16_d64_rtne"]
    assert names == [whole[0], whole[3], *whole, *whole]
    with pytest.raises(Exception, match="its tile is q_block 256"):
        tile = TileGeometry(128, 64, 32)
        x, bits = bf16(1, 70, 4, 64), torch.zeros(1, 4, 1, 1, dtype=torch.int32)
        liteattention_rocm.lite_attention(
            x, x, x, bits, bits.clone(), threshold=-1.0, geometry=tile, engine="gfx942"
        )


def test_operator_passes_opcheck(engine: gfx942.Gfx942Engine) -> None:
    q, out = bf16(1, 5, 4, 64), torch.zeros(1, 5, 4, 64, dtype=torch.bfloat16)
    torch.library.opcheck(
        torch.ops.liteattention_rocm.attention.default,
        (q, q, q, out, torch.zeros(1, 4, 5), "bshd", 0.125, False, "rtne", "gfx942"),
        test_utils=("test_schema", "test_faketensor"),
    )
