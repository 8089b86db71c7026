"""Bound launches: what reaches the entry point of a compiled kernel, without a GPU.

The kernels and Triton's driver are stand-ins that note what they are given; what the real ones do
with it is compiled, interpreted and emulated in the other files of this folder.
"""

import sys
import types
from typing import Any

import pytest
import torch
from triton import knobs

from liteattention_rocm import TileGeometry, skiplist
from liteattention_rocm.engines import AttentionSpec, LiteSpec
from liteattention_rocm.engines.triton import launch, tiles

STREAM = 77
CPU = torch.device("cpu")


class Driver(types.ModuleType):
    """Triton's NVIDIA driver as of 3.6, as far as launches know it."""

    def __init__(self, entry_format: str | None) -> None:
        super().__init__("fake_driver")
        self.made: list[int] = []
        if entry_format is not None:
            self._BASE_ARGS_FORMAT = entry_format

    def make_tensordesc_arg(self, descriptor: Any, meta: Any) -> list[Any]:
        assert meta == {"swizzle": 3}
        self.made.append(descriptor.base.data_ptr())
        return [("map", descriptor.base.data_ptr()), *descriptor.shape, *descriptor.strides]


class Launcher:
    """A compiled kernel's launcher; ``launch`` wraps the entry point where there are boxes."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, boxes: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.generic: list[tuple[Any, ...]] = []

        def launcher(*args: Any) -> None:
            self.calls.append(args)

        def inner(*args: Any) -> None:
            raise AssertionError(f"the wrapper was called: {launcher}")

        self.launch = inner if boxes else launcher

    def __call__(self, *args: Any) -> None:
        self.generic.append(args)


class Compiled:
    function = 4711
    packed_metadata = (4, 1, 1000)
    metadata = types.SimpleNamespace(tensordesc_meta=[{"swizzle": 3}] * 4)

    def __init__(self, boxes: int) -> None:
        self.run = Launcher(boxes)
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


@pytest.fixture(params=["iiiKKppOOOOOO", "iiiKKpOOOOOOO", None], ids=["3.6", "other", "3.9"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(request.param)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(Launcher, "__module__", made.__name__)
    monkeypatch.setattr(launch, "_stream", lambda index: STREAM)
    monkeypatch.setattr(launch, "_device", lambda: -1)
    monkeypatch.setattr(launch, "multiprocessors", lambda index: 5)
    return made


@pytest.fixture
def kernels(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> dict[str, Function]:
    found = {}
    for name, boxes in (("_HOPPER", 4), ("_PLAIN", 0), ("_LIST_TILES", 0), ("_ORDER", 0)):
        found[name] = Function(Compiled(boxes))
        monkeypatch.setattr(launch, name, launch.Kernel(found[name]))
    return found


def request(**changes: Any) -> AttentionSpec:
    values = dict(
        batch=1, q_heads=4, kv_heads=2, q_len=300, kv_len=300, head_dim=128, dtype=torch.bfloat16,
        device=CPU, layout="bshd", scale=0.1, causal=False, rounding="rtne", return_lse=False,
    )  # fmt: skip
    return AttentionSpec(**(values | changes))  # type: ignore[arg-type]


def tensors() -> tuple[torch.Tensor, ...]:
    q, out = (torch.empty(1, 300, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(1, 300, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    return q, k, v, out


def described(x: torch.Tensor) -> list[Any]:
    """A box of the copy engine as the entry point takes it: map, sizes and strides of B, H, S, D"""
    batch, rows, heads, dim = x.shape
    sizes = [batch, heads, rows, dim]
    return [("map", x.data_ptr()), *sizes, 16, x.stride(2), x.stride(1), 1]


def arguments(compiled: Compiled, driver: Driver) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the latest launch gave: (grid and stream, the kernel's own arguments)."""
    run = compiled.run
    if hasattr(driver, "_BASE_ARGS_FORMAT") and driver._BASE_ARGS_FORMAT == launch._ENTRY_FORMAT:
        assert not run.generic
        call = run.calls[-1]
        assert call[4:13] == (4711, False, False, None, None, (4, 1, 1000), None, None, None)
        return call[:4], call[13:]
    assert not run.calls
    call = run.generic[-1]
    assert call[4:9] == (4711, (4, 1, 1000), None, None, None)
    return call[:4], call[9:]


def flat(values: tuple[Any, ...], driver: Driver) -> list[Any]:
    """Arguments with descriptors as the entry point takes them."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, launch.TensorDescriptor):
            found += [("map", value.base.data_ptr()), *value.shape, *value.strides]
        else:
            found.append(value)
    return found


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_bound_hopper_launch_gets_the_addresses_of_each_call(
    driver: Driver, kernels: dict[str, Function], with_lse: bool
) -> None:
    function = kernels["_HOPPER"]
    q, k, v, out = tensors()
    lse = torch.empty(1, 4, 300) if with_lse else None
    tile = tiles._HOPPER[128, False]
    bound = launch.Attention(request(), tile, q, k, v, out, lse)
    bound(q, k, v, out, lse)  # compiles
    ((grid, started, _),) = function.started
    assert grid == (5,) and [d.base is x for d, x in zip(started, (q, k, v, out), strict=False)]
    assert not function.result.run.calls and not function.result.run.generic

    for _ in range(2):
        q, k, v, out = tensors()
        lse = torch.empty(1, 4, 300) if with_lse else None
        bound(q, k, v, out, lse)
        where, found = arguments(function.result, driver)
        assert where == (5, 1, 1, STREAM)
        expected = [number for x in (q, k, v, out) for number in described(x)]
        sums = out if lse is None else lse
        expected += [sums.data_ptr()] + 6 * [out.data_ptr()]
        # the numbers and constants are those that it was compiled with
        assert flat(found, driver) == expected + list(started[11:])
    assert len(function.started) == 1


def test_maps_are_made_once_per_address_and_not_kept_for_ever(
    driver: Driver, kernels: dict[str, Function]
) -> None:
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != launch._ENTRY_FORMAT:
        pytest.skip("Triton makes the maps")
    sets = [tensors() for _ in range(launch._MOST_MAPS + 3)]
    bound = launch.Attention(request(), tiles._HOPPER[128, False], *sets[0], None)
    bound(*sets[0], None)
    for _ in range(3):
        bound(*sets[0], None)
        bound(*sets[1], None)
    assert len(driver.made) == 8
    for some in sets:
        bound(*some, None)
        assert len(bound._launch._begins) <= launch._MOST_MAPS
        flattened = flat(arguments(kernels["_HOPPER"].result, driver)[1], driver)
        assert [x[1] for x in flattened if isinstance(x, tuple)] == [x.data_ptr() for x in some]


def test_code_is_shared_by_requests_of_other_sizes_and_not_by_other_kinds(
    driver: Driver, kernels: dict[str, Function]
) -> None:
    function = kernels["_HOPPER"]
    q, k, v, out = tensors()
    launch.Attention(request(), tiles._HOPPER[128, False], q, k, v, out, None)(q, k, v, out, None)
    half = [x[:, :150] for x in (q, k, v, out)]
    smaller = request(q_len=150, kv_len=150)
    bound = launch.Attention(smaller, tiles._HOPPER[128, False], *half, None)
    bound(*half, None)
    assert len(function.started) == 1
    causal = request(causal=True)
    launch.Attention(causal, tiles._HOPPER[128, True], q, k, v, out, None)(q, k, v, out, None)
    fp16 = [x.half() for x in (q, k, v, out)]
    half_precision = request(dtype=torch.float16)
    launch.Attention(half_precision, tiles._HOPPER[128, False], *fp16, None)(*fp16, None)
    assert len(function.started) == 3


def test_plain_code_depends_on_alignment(driver: Driver, kernels: dict[str, Function]) -> None:
    function = kernels["_PLAIN"]
    q, k, v, out = tensors()
    tile = tiles._PLAIN[128]
    launch.Attention(request(), tile, q, k, v, out, None)(q, k, v, out, None)
    shifted = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    launch.Attention(request(), tile, q, shifted, v, out, None)(q, shifted, v, out, None)
    assert len(function.started) == 2
    bound = launch.Attention(request(), tile, q, k, v, out, None)
    bound(q, k, v, out, None)
    where, found = arguments(function.result, driver)
    assert where[0] == 3 * 4 and len(function.started) == 2
    assert found[:5] == tuple(x.data_ptr() for x in (q, k, v, out, out))
    assert found[10:] == function.started[0][1][10:]


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("hopper", [False, True])
def test_a_bound_step_hands_its_workspace_on(
    driver: Driver, kernels: dict[str, Function], hopper: bool, masks: bool
) -> None:
    q, k, v, out = tensors()
    lite = LiteSpec(TileGeometry(128, 128, 64), -4.0, True, False)
    read = skiplist.full(1, 4, 3, 3)
    write = torch.empty_like(read)
    do, skip = (torch.zeros(1, dtype=torch.int32) if masks else None for _ in range(2))
    tile = tiles.hopper_lite(request(), lite) if hopper else tiles.plain_lite(request(), lite)
    assert tile is not None
    bound = launch.LiteStep(request(), lite, tile, True, q, k, v, out, None, read, write, do, skip)
    everything = (q, k, v, out, None, read, write, do, skip)
    bound(*everything)
    attend = kernels["_HOPPER" if hopper else "_PLAIN"]
    first = [kernels[name].started[0][1] for name in ("_LIST_TILES", "_ORDER")]
    first.append(attend.started[0][1])
    bound(*everything)
    listed, ordered, attended = (
        flat(arguments(f.result, driver)[1], driver)
        for f in (kernels["_LIST_TILES"], kernels["_ORDER"], attend)
    )
    masked = [read.data_ptr() if x is None else x.data_ptr() for x in (do, skip)]
    items, counts = listed[3:5]
    assert listed[:3] == [read.data_ptr(), *masked] and listed[5] == write.data_ptr()
    assert tuple(listed[6:]) == first[0][6:] and tuple(ordered[4:]) == first[1][4:]
    order, in_order, counter = ordered[1:4]
    assert ordered[0] == counts
    must = write.data_ptr() if do is None else do.data_ptr()
    begin = 4 * 9 if hopper else 4
    sums, *pointers = attended[begin : begin + (7 if hopper else 6)]
    middle = [counter] if hopper else []
    assert sums == out.data_ptr()
    assert pointers == [items, in_order, order, *middle, write.data_ptr(), must]
    # 12 lists of 3 K blocks (int16), 12 counts three times, a counter: apart and aligned
    assert [x % 16 for x in (items, counts, order, in_order, counter)] == [0] * 5
    for low, high, size in (
        (items, counts, 12 * 3 * 2),
        (counts, order, 12 * 4),
        (order, in_order, 12 * 4),
        (in_order, counter, 12 * 4),
    ):
        assert high - low >= size
    # the first time they were tensors laid out the same way
    views = first[0][3:5] + first[1][1:4]
    base = views[0].data_ptr()
    assert [x.data_ptr() - base for x in views] == [
        x - items for x in (items, counts, order, in_order, counter)
    ]
    assert views[0].dtype == torch.int16 and {x.dtype for x in views[1:]} == {torch.int32}


def test_a_step_whose_kernels_are_not_all_compiled_yet_compiles_the_rest(
    driver: Driver, kernels: dict[str, Function]
) -> None:
    """The attention kernel does not depend on the direction, the one that lists tiles does."""
    q, k, v, out = tensors()
    read = skiplist.full(1, 4, 3, 3)
    write = torch.empty_like(read)
    for descending in (True, False, True):
        lite = LiteSpec(TileGeometry(128, 128, 64), -4.0, descending, False)
        tile = tiles.hopper_lite(request(), lite)
        assert tile is not None
        bound = launch.LiteStep(
            request(), lite, tile, descending, q, k, v, out, None, read, write, None, None
        )
        bound(q, k, v, out, None, read, write, None, None)
    assert [len(kernels[name].started) for name in ("_LIST_TILES", "_ORDER", "_HOPPER")] == [
        2,
        1,
        1,
    ]
    listed = flat(arguments(kernels["_LIST_TILES"].result, driver)[1], driver)
    assert listed[0] == read.data_ptr()


def test_profilers_see_launches(
    driver: Driver, kernels: dict[str, Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, out = tensors()
    bound = launch.Attention(request(), tiles._HOPPER[128, False], q, k, v, out, None)
    bound(q, k, v, out, None)
    compiled = kernels["_HOPPER"].result

    def hook(metadata: Any) -> None:
        raise AssertionError("the stand-in calls no hooks")

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        bound(q, k, v, out, None)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    ((grid, stream, *_),) = compiled.hooked
    assert grid == (5, 1, 1) and stream == STREAM
    assert not compiled.run.calls and not compiled.run.generic


def test_tensors_of_another_device_than_the_current_are_not_launched_here(
    driver: Driver, kernels: dict[str, Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way is for the current device; the long one makes the right device current."""
    q, k, v, out = tensors()
    bound = launch.Attention(request(), tiles._HOPPER[128, False], q, k, v, out, None)
    bound(q, k, v, out, None)
    monkeypatch.setattr(launch, "_device", lambda: 3)
    bound(q, k, v, out, None)
    compiled = kernels["_HOPPER"].result
    assert not compiled.run.calls and not compiled.run.generic
    assert len(compiled.hooked) == 1  # Triton's own way, with the device made current
