"""A machine for the Gluon kernels: their Python source runs on a CPU, without Triton or a GPU.

Gluon has no interpreter. Here the kernel modules are imported once more, with stand-ins for
``triton.experimental.gluon``, and run as they stand on PyTorch's tensors:

- Programs and their warp-specialised partitions are threads of which one runs at a time. Who goes
  on is drawn from a seed wherever partitions can see one another: at barriers, copies, products and
  atomics.
- A bulk copy into shared memory lands at any time after it was issued. Until then its destination
  holds NaN, so what is read too early shows. A copy out reads shared memory at any time until it
  was waited for.
- A product of warpgroups reads shared memory when it is issued or when it is waited for, by lot.
  Its result cannot be used before.
- Memory that a copy or product may still be reading must not be written, and what ordinary stores
  wrote has to be fenced before copies or products read it.
- Barriers count arrivals and bytes and have phases. Too many arrivals and deadlocks are errors.
- Loads and stores outside of a tensor are errors. So is a load of what another partition, of this
  program or another one, stored or added, unless that came before: by way of barriers, or of
  atomics that release and acquire.
- A launch that may begin before its predecessor has ended must wait for that before it touches
  memory, and before it lets the next one begin.

Layouts of registers, warps within a partition, and time are not modelled; machine code neither.
Barriers follow the PTX ISA (mbarrier), shared memory the 128-byte swizzle's panels of 64 columns.
"""

from __future__ import annotations

import random
import re
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

import liteattention_rocm.engines

from . import ptx

#: Columns of 16 bits that lie together in shared memory under a swizzle of 128 bytes.
_PANEL = 64
#: Programs that are resident at a time; more wait for one of them to end.
_RESIDENT = 4
_KERNELS = Path(liteattention_rocm.engines.__file__).parent / "triton"


class KernelError(AssertionError):
    """What a GPU would answer with wrong numbers, a hang or a fault."""


class _Stopped(Exception):
    """Another thread failed."""


# --- values -------------------------------------------------------------------------------------


class Value:
    """A Triton tensor: int32 and fp32 arithmetic, integer division towards zero.

    Not its layout.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    type = SimpleNamespace(layout=None)
    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: list(self.data.shape))

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        """Convert, or take the bits for another type of the same width.

        A float that is too large for an int32 becomes the largest, as on a GPU, and NaN 0.
        """
        data = self.data
        if dtype == torch.int32 and data.is_floating_point() and not bitcast:
            data = data.double().nan_to_num(0.0).clamp(-(2**31), 2**31 - 1)
        return Value(data.view(dtype) if bitcast else data.to(dtype))

    def __getitem__(self, key: Any) -> Value:
        return Value(self.data[key])

    def __bool__(self) -> bool:
        return bool(self.data.item())

    def __index__(self) -> int:
        return int(self.data.item())

    __int__ = __index__

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)


def _data(x: Any) -> torch.Tensor:
    if isinstance(x, (Value, _Pending)):
        return x.data
    if isinstance(x, bool):
        return torch.tensor(x)
    if isinstance(x, float):
        return torch.tensor(x, dtype=torch.float32)
    # A literal of 32 bits has no sign.
    wrapped = (x + (1 << 31)) % (1 << 32) - (1 << 31) if abs(x) < 1 << 32 else x
    return torch.tensor(wrapped, dtype=torch.int32 if abs(x) < 1 << 32 else torch.int64)


def _common(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = _data(a), _data(b)
    # A plain number takes the type of the other side, if that can hold it.
    if not isinstance(b, Value) and x.is_floating_point():
        y = y.to(x.dtype)
    elif not isinstance(a, Value) and y.is_floating_point():
        x = x.to(y.dtype)
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def _divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="trunc")


_OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div,
    "floordiv": _divide, "mod": torch.fmod, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor, "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift, "lt": torch.lt, "le": torch.le, "gt": torch.gt,
    "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}  # fmt: skip


def _operator(name: str) -> None:
    function = _OPERATORS[name]

    def forward(self: Value, other: Any) -> Any:
        if isinstance(other, (Pointer, _Pending)):
            return NotImplemented
        return Value(function(*_common(self, other)))

    def backward(self: Value, other: Any) -> Value:
        return Value(function(*_common(other, self)))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", backward)


for _name in _OPERATORS:
    _operator(_name)


class Pointer:
    """Addresses in one tensor: its elements in memory, and offsets from its first one."""

    def __init__(self, storage: torch.Tensor, offset: torch.Tensor, name: str = "") -> None:
        self.storage, self.offset, self.name = storage, offset, name

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.offset + _data(other).to(torch.int64), self.name)

    __radd__ = __add__

    def at(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and which of them are accessed; all of those lie in the tensor."""
        live = torch.ones_like(self.offset, dtype=torch.bool)
        if mask is not None:
            live, offset = torch.broadcast_tensors(_data(mask).bool(), self.offset)
        else:
            offset = self.offset
        outside = live & ((offset < 0) | (offset >= len(self.storage)))
        if outside.any():
            raise KernelError(
                f"{self.name}: element {int(offset[outside][0])} of {len(self.storage)} is accessed"
            )
        return offset, live


# --- shared memory ------------------------------------------------------------------------------


class Memory(NamedTuple):
    """An allocation of shared memory.

    Its elements; tiles that ordinary stores wrote and no fence followed; spans (first element,
    end) that copies and products may still be reading.
    """

    elements: torch.Tensor
    unfenced: dict[tuple[int, int], Partition]
    readers: list[tuple[int, int]]


class Shared:
    """A descriptor: [..., rows, columns] in an allocation, tiles one after the other."""

    def __init__(
        self,
        memory: Memory,
        shape: Sequence[int],
        offset: int = 0,
        rows: tuple[int, int] | None = None,
        turned: bool = False,
    ) -> None:
        self.memory, self.shape, self.offset = memory, list(shape), offset
        self._rows = (0, shape[-2]) if rows is None else rows
        self._high = shape[-2] if rows is None else rows[1]
        self._turned = turned

    dtype = property(lambda self: self.memory.elements.dtype)

    def index(self, i: Any) -> Shared:
        """The i-th along the first dimension."""
        if not 0 <= int(i) < self.shape[0]:
            raise KernelError(f"index {int(i)} of {self.shape[0]} buffers")
        rest = self.shape[1:] if len(self.shape) > 2 else [1, self.shape[1]]
        return Shared(self.memory, rest, self.offset + int(i) * prod(self.shape[1:]))

    def reshape(self, shape: Sequence[int]) -> Shared:
        """Drop dimensions of 1."""
        assert [n for n in self.shape if n > 1] == [n for n in shape if n > 1], (self.shape, shape)
        return Shared(self.memory, shape, self.offset)

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        """The same memory in other tiles."""
        assert dtype == self.dtype and prod(shape) == prod(self.shape)
        return Shared(self.memory, shape, self.offset)

    _reinterpret = reinterpret

    def permute(self, order: tuple[int, int]) -> Shared:
        """Transpose."""
        assert order == (1, 0)
        return Shared(self.memory, self.shape, self.offset, turned=True)

    def slice(self, start: int, length: int, dim: int) -> Shared:
        """Rows from ``start`` on."""
        assert dim == 0 and len(self.shape) == 2 and not self._turned
        part = Shared(self.memory, self.shape, self.offset, (start, length))
        part._high = self.shape[0]
        return part

    def _view(self) -> torch.Tensor:
        """[rows, columns] as a view of the allocation."""
        high, wide = self._high, self.shape[-1]
        assert prod(self.shape[:-2]) == 1, self.shape
        panel = min(wide, _PANEL)
        tile = self.memory.elements[self.offset : self.offset + high * wide]
        start, length = self._rows
        return tile.view(wide // panel, high, panel)[:, start : start + length]

    def read(self) -> torch.Tensor:
        """A copy [rows, columns] of the elements."""
        seen = self._view().transpose(0, 1).reshape(self._rows[1], -1)
        return (seen.T if self._turned else seen).clone()

    @property
    def span(self) -> tuple[int, int]:
        """First element and end of the tile."""
        return self.offset, self.offset + prod(self.shape)

    def write(self, data: torch.Tensor) -> None:
        """Set the elements [rows, columns]."""
        begin, end = self.span
        if any(first < end and begin < last for first, last in self.memory.readers):
            raise KernelError("shared memory is written that may still be read asynchronously")
        view = self._view()
        view.copy_(data.reshape(view.shape[1], view.shape[0], view.shape[2]).transpose(0, 1))

    def load(self, layout: Any) -> Value:
        """Ordinary load."""
        data = self.read()
        return Value(data if len(self.shape) > 1 and self.shape[0] > 1 else data.reshape(-1))

    def store(self, value: Value) -> None:
        """Ordinary store, which asynchronous readers see after a fence."""
        self.write(_data(value))
        self.memory.unfenced[self.offset, self._rows[0]] = _now().partition
        _machine().pause()

    def reserve(self) -> Callable[[], None]:
        """Begin an asynchronous read; what is returned ends it."""
        begin, end = self.span
        if any(begin <= at < end for at, _ in self.memory.unfenced):
            raise KernelError("shared memory is read asynchronously without a fence")
        self.memory.readers.append((begin, end))
        return lambda: self.memory.readers.remove((begin, end))


#: How far each thread, by number, had come when it was last heard of.
Clock = dict[int, int]


def _hear(clock: Clock, other: Clock) -> None:
    for number, time in other.items():
        clock[number] = max(clock.get(number, 0), time)


@dataclass
class Barrier:
    """An mbarrier. ``expected`` bytes may be negative while a copy is ahead of its announcement."""

    count: int = 0
    pending: int = 0
    expected: int = 0
    phase: int = 0
    seen: Clock = field(default_factory=dict)

    def settle(self) -> None:
        """End the phase if everything has arrived."""
        if self.pending < 0:
            raise KernelError("more arrivals at a barrier than it was made for")
        if self.pending == 0 and self.expected == 0:
            self.phase ^= 1
            self.pending = self.count


class Barriers:
    """An array of barriers in shared memory."""

    def __init__(self, number: int) -> None:
        self._all = [Barrier() for _ in range(number)]

    def index(self, i: Any) -> Barrier:
        """The i-th one."""
        return self._all[int(i)]


@dataclass(frozen=True)
class Boxes:
    """A tensor map: [B, H, S, D], read and written in boxes."""

    tensor: torch.Tensor
    box: tuple[int, ...]

    layout = None
    dtype = property(lambda self: self.tensor.dtype)

    @property
    def block_type(self) -> SimpleNamespace:
        """Shape and bytes of a box."""
        size = self.tensor.element_size()
        return SimpleNamespace(shape=list(self.box), nbytes=prod(self.box) * size)

    def _inside(self, place: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where the box overlaps the tensor: in the tensor, and in the box."""
        begin = [max(at, 0) for at in place]
        limits = zip(place, self.box, self.tensor.shape, strict=True)
        end = [min(at + n, size) for at, n, size in limits]
        spans = list(zip(begin, end, place, strict=True))
        there = tuple(slice(b, max(b, e)) for b, e, _ in spans)
        return there, tuple(slice(b - at, max(b, e) - at) for b, e, at in spans)

    def read(self, place: Sequence[int]) -> torch.Tensor:
        """[rows, columns] of the box at ``place``, zeros outside of the tensor."""
        found = torch.zeros(self.box, dtype=self.dtype)
        there, here = self._inside(place)
        found[here] = self.tensor[there]
        return found.reshape(self.box[-2:])

    def write(self, place: Sequence[int], data: torch.Tensor) -> None:
        """Write what lies inside of the tensor."""
        there, here = self._inside(place)
        self.tensor[there] = data.reshape(self.box)[here]


# --- who runs -----------------------------------------------------------------------------------


class _Pending:
    """A product that was issued."""

    def __init__(
        self, compute: Callable[[], torch.Tensor], reads: Sequence[Callable[[], None]]
    ) -> None:
        self._compute, self._reads = compute, reads
        self.result: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:
        """None that may be used."""
        raise KernelError("a product is used before it was waited for")

    def multiply(self) -> torch.Tensor:
        """Multiply, unless it was done."""
        if self.result is None:
            self.result = self._compute()
        return self.result

    def finish(self) -> None:
        """It was waited for."""
        self.multiply()
        for end in self._reads:
            end()


@dataclass(eq=False)
class Partition:
    """What one warp or warpgroup keeps: products in flight and copies out."""

    name: str
    products: list[_Pending] = field(default_factory=list)
    copies: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list)


@dataclass(eq=False)
class _Thread:
    program: int
    partition: Partition
    run: Callable[[], None]
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None
    waits_for: str = ""
    number: int = 0
    clock: Clock = field(default_factory=dict)

    def tell(self, clock: Clock) -> None:
        """Make what this thread did and heard of known to who hears of ``clock``."""
        _hear(clock, self.clock)
        self.clock[self.number] += 1


_local = threading.local()


def _now() -> _Thread:
    return _local.thread


def _machine() -> Machine:
    return _local.machine


class Machine:
    """Runs the programs of one launch, in an order drawn from ``seed``."""

    def __init__(self, seed: int, programs: int, early: bool = False) -> None:
        self.programs = programs
        #: Programs that have not waited for the launch before, which may still run.
        self._early = set(range(programs)) if early else set()
        self.memories: list[Memory] = []
        self._random = random.Random(seed)
        self._threads: list[_Thread] = []
        self._started = 0
        self._stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._released: dict[int, Clock] = {}
        self._landing: list[Callable[[], None]] = []
        self._waiting: list[_Thread] = []
        self._failure: BaseException | None = None
        self._done = threading.Event()

    def run(self, kernel: Callable[[], None]) -> None:
        """Run ``kernel`` once per program.

        Raises:
            KernelError: a deadlock, a race or an access outside of a tensor.
        """
        every = [_Thread(i, Partition("default"), kernel) for i in range(self.programs)]
        self._waiting = every[_RESIDENT:]
        for thread in every[:_RESIDENT]:
            self.start(thread)
        self._pick().go.release()
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        for land in self._landing:
            land()

    def start(self, thread: _Thread) -> None:
        """Make a thread ready to run, which knows what the one that starts it knows."""
        self._started += 1
        thread.number = self._started
        parent = getattr(_local, "thread", None)
        if parent is not None and parent in self._threads and parent.program == thread.program:
            parent.tell(thread.clock)
        thread.clock[thread.number] = 1
        self._threads.append(thread)
        threading.Thread(target=self._body, args=(thread,), daemon=True).start()

    def _body(self, thread: _Thread) -> None:
        _local.thread, _local.machine = thread, self
        thread.go.acquire()
        try:
            if self._failure is None:
                thread.run()
                left = thread.partition.products or thread.partition.copies
                if left:
                    raise KernelError(f"{thread.partition.name} ends before {len(left)} operations")
        except _Stopped:
            pass
        except BaseException as failure:
            self._failure = self._failure or failure
        self._threads.remove(thread)
        if thread.partition.name == "default" and self._waiting and self._failure is None:
            self.start(self._waiting.pop(0))
        self._hand_over()

    def _hand_over(self) -> None:
        """Let another thread run, or end."""
        if not self._threads:
            self._done.set()
        elif self._failure is not None:
            self._threads[0].go.release()
        else:
            try:
                self._pick().go.release()
            except KernelError as failure:
                self._failure = failure
                self._threads[0].go.release()

    def _pick(self) -> _Thread:
        """Draw a thread that can run, or a copy that lands first."""
        while True:
            ready = [t for t in self._threads if t.ready is None or t.ready()]
            draw = self._random.randrange(len(ready) + min(len(self._landing), 2) or 1)
            if draw < len(ready):
                return ready[draw]
            if not self._landing:
                where = "; ".join(
                    f"program {t.program}, {t.partition.name}: {t.waits_for}" for t in self._threads
                )
                raise KernelError(f"deadlock: {where}")
            self._landing.pop(self._random.randrange(len(self._landing)))()

    def wait(self, ready: Callable[[], bool] | None = None, what: str = "") -> None:
        """Let others run until ``ready``."""
        me = _now()
        me.ready, me.waits_for = ready, what
        chosen = self._pick()
        if chosen is not me:
            chosen.go.release()
            me.go.acquire()
        if self._failure is not None:
            raise _Stopped
        me.ready = None

    def pause(self) -> None:
        """Let others run, by lot."""
        if self._random.random() < 0.3:
            self.wait()

    def later(self, land: Callable[[], None]) -> None:
        """Do something at any time from now on."""
        self._landing.append(land)

    def now(self, land: Callable[[], None]) -> None:
        """Do it now if it is still to come."""
        if land in self._landing:
            self._landing.remove(land)
            land()

    def stored(self, storage: torch.Tensor, offset: torch.Tensor) -> None:
        """Note that this thread writes elements of a tensor."""
        who, when = self._stored.setdefault(
            storage.data_ptr(), (torch.zeros(len(storage)).int(), torch.zeros(len(storage)).int())
        )
        me = _now()
        who[offset], when[offset] = me.number, me.clock[me.number]

    def loaded(self, pointer: Pointer, offset: torch.Tensor) -> None:
        """Check that what this thread reads was not written by another that may still do so."""
        found = self._stored.get(pointer.storage.data_ptr())
        if found is None:
            return
        who, when, me = found[0][offset], found[1][offset], _now()
        for number in set(who.unique().tolist()) - {0, me.number}:
            if int(when[who == number].max()) > me.clock.get(number, 0):
                raise KernelError(
                    f"{pointer.name}: read what another partition may not have stored"
                )

    def exchange(self, pointer: Pointer, offset: torch.Tensor) -> None:
        """Hear of who released by these elements, and tell who acquires by them."""
        for at in offset.flatten().tolist():
            clock = self._released.setdefault(pointer.storage[at:].data_ptr(), {})
            _hear(_now().clock, clock)
            _now().tell(clock)

    def await_predecessor(self) -> None:
        """Wait until the launch before has ended."""
        self._early.discard(_now().program)

    def check_awaited(self, what: str) -> None:
        """Check that the launch before has ended where this program is."""
        if _now().program in self._early:
            raise KernelError(f"{what} while the launch before may still run")

    def toss(self) -> bool:
        """A coin."""
        return self._random.random() < 0.5


# --- what kernels import ------------------------------------------------------------------------


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, volatile: bool = False) -> Value:
    offset, live = pointer.at(mask)
    _machine().check_awaited(f"{pointer.name} is read")
    _machine().loaded(pointer, offset[live])
    found = pointer.storage[torch.where(live, offset, 0)]
    return Value(torch.where(live, found, _data(other).to(found.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, live = pointer.at(mask)
    _machine().check_awaited(f"{pointer.name} is written")
    data, offset, live = torch.broadcast_tensors(_data(value), offset, live)
    pointer.storage[offset[live]] = data[live].to(pointer.storage.dtype)
    _machine().stored(pointer.storage, offset[live])


def _atomic(join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Value]:
    def atomic(pointer: Pointer, value: Any, mask: Any = None, sem: str = "") -> Value:
        _machine().pause()
        _machine().check_awaited(f"{pointer.name} is changed")
        offset, live = pointer.at(mask)
        data, offset, live = torch.broadcast_tensors(_data(value), offset, live)
        before = pointer.storage[torch.where(live, offset, 0)].clone()
        for at, one in zip(offset[live].tolist(), data[live], strict=True):
            pointer.storage[at] = join(pointer.storage[at], one.to(pointer.storage.dtype))
        if sem == "acq_rel":
            _machine().exchange(pointer, offset[live])
        else:
            assert sem == "relaxed", sem
            _machine().stored(pointer.storage, offset[live])
        return Value(before)

    return atomic


def _where(condition: Any, a: Any, b: Any) -> Value:
    x, y = _common(a, b)
    return Value(torch.where(_data(condition).bool(), x, y))


def _extreme(pick: Any, pick_nan: Any) -> Callable[..., Value]:
    def extreme(a: Any, b: Any, propagate_nan: Any = None) -> Value:
        return Value((pick_nan if propagate_nan else pick)(*_common(a, b)))

    return extreme


def _minimum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.fmin(x, y) if x.is_floating_point() else torch.minimum(x, y)


def _maximum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.fmax(x, y) if x.is_floating_point() else torch.maximum(x, y)


def _reduce(x: Value, axis: int, join: Callable[[Value, Value], Value]) -> Value:
    parts = x.data.movedim(axis, 0)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = join(Value(parts[:half]), Value(parts[half:])).data
    return Value(parts[0])


def _scan(x: Value, axis: int, join: Callable[[Value, Value], Value]) -> Value:
    parts = [Value(part) for part in x.data.unbind(axis)]
    for i in range(1, len(parts)):
        parts[i] = join(parts[i - 1], parts[i])
    return Value(torch.stack([part.data for part in parts], axis))


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared | Barriers:
    if layout == "barrier":
        return Barriers(shape[0])
    size = prod(shape)
    if dtype.is_floating_point:
        elements = torch.full((size,), float("nan"), dtype=dtype)
    else:
        elements = torch.full((size,), -77, dtype=dtype)
    memory = Memory(elements, {}, [])
    _machine().memories.append(memory)
    return Shared(memory, shape)


def _specialize(partitions: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
    assert len(partitions) == len(warps) + 1 == len(registers) + 1
    machine, program = _machine(), _now().program
    left = len(partitions)

    def body(function: Any, arguments: tuple[Any, ...]) -> Callable[[], None]:
        def run() -> None:
            nonlocal left
            function(*arguments)
            left -= 1

        return run

    for i, (function, arguments) in enumerate(partitions):
        name = f"partition {i} ({function.__name__})"
        machine.start(_Thread(program, Partition(name), body(function, arguments)))
    machine.wait(lambda: left == 0, "its partitions")


def _static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


def _layout(*_: Any, **__: Any) -> None:
    return None


def _full(shape: Sequence[int], value: Any, dtype: torch.dtype, layout: Any = None) -> Value:
    return Value(torch.full(list(shape), value, dtype=dtype))


def _split(x: Value) -> tuple[Value, Value]:
    return Value(x.data[..., 0]), Value(x.data[..., 1])


_PAIRS = {
    "cvt.rn.bf16x2.f32 $0, $2, $1;": torch.bfloat16,
    "cvt.rn.f16x2.f32 $0, $2, $1;": torch.half,
}


def _inline_asm(
    text: str,
    constraints: str,
    args: Sequence[Value],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    is_pure: bool,
    pack: int,
) -> Value | tuple[Value, ...]:
    """The PTX that kernels bring along: pairs, 1 / x, logs, a load that never runs; :mod:`.ptx`."""
    if text in _PAIRS:
        low, high = (x.data.to(_PAIRS[text]).view(torch.int16).int() for x in args)
        return Value((low & 0xFFFF) | (high << 16))
    if text == "max.s16x2 $0, $1, $2;":
        first, second = (x.data.contiguous().view(torch.int16) for x in args)
        return Value(torch.maximum(first, second).view(torch.int32))
    if text == "rcp.approx.ftz.f32 $0, $1;":
        return Value(1.0 / args[0].data)
    if text == "lg2.approx.ftz.f32 $0, $1;":
        x = args[0].data
        return Value(torch.log2(torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0.0, x)))
    if pack > 1:  # all that a thread holds
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        found = tuple(map(Value, ptx.run(text, constraints, [x.data for x in args], dtypes)))
        return found if isinstance(dtype, tuple) else found[0]
    never = re.search(r"setp\.eq\.b32 (\w+), \$(\d), (\w+);.*@\1 ld\.", text, re.S)
    if never is None:
        assert not isinstance(dtype, tuple)
        return Value(ptx.run_each(text, constraints, [x.data for x in args], dtype))
    assert "mov.b32 $0, $1;" in text, text
    if (args[int(never[2]) - 1].data.view(torch.int32) == int(never[3], 16)).any():
        raise KernelError("what never runs does")
    return args[0]


_language = {
    "constexpr": lambda x: x,
    "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "load": _load, "store": _store, "where": _where, "reduce": _reduce,
    "atomic_add": _atomic(torch.add), "atomic_or": _atomic(torch.bitwise_or),
    "minimum": _extreme(_minimum, torch.minimum), "maximum": _extreme(_maximum, torch.maximum),
    "exp2": lambda x: Value(torch.exp2(_data(x))), "log2": lambda x: Value(torch.log2(_data(x))),
    "ceil": lambda x: Value(torch.ceil(_data(x))), "abs": lambda x: Value(torch.abs(_data(x))),
    "associative_scan": _scan,
    "sum": lambda x, axis: Value(_data(x).sum(axis, dtype=_data(x).dtype)),
    "max": lambda x, axis: Value(_data(x).amax(axis)),
    "min": lambda x, axis: Value(_data(x).amin(axis)),
    "reshape": lambda x, shape: Value(_data(x).reshape(shape)),
    "permute": lambda x, order: Value(_data(x).permute(order)),
    "split": _split, "join": lambda x, y: Value(torch.stack([x.data, y.data], -1)),
    "inline_asm_elementwise": _inline_asm,
    "convert_layout": lambda x, layout: x,
    "to_tensor": lambda x: Value(_data(x)),
    "arange": lambda a, b, layout: Value(torch.arange(a, b, dtype=torch.int32)),
    "full": _full,
    "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype),
    "static_range": range, "static_assert": _static_assert,
    "program_id": lambda axis: Value(torch.tensor(_now().program, dtype=torch.int32)),
    "num_programs": lambda axis: Value(torch.tensor(_machine().programs, dtype=torch.int32)),
    "allocate_shared_memory": _allocate, "warp_specialize": _specialize,
    "barrier": lambda: None, "thread_barrier": lambda: None,
    "BlockedLayout": _layout, "SliceLayout": _layout, "NVMMADistributedLayout": _layout,
    "DotOperandLayout": _layout, "SwizzledSharedLayout": _layout, "NVMMASharedLayout": _layout,
    "shared_memory_descriptor": Shared,
}  # fmt: skip


def _copy_in(boxes: Boxes, place: Sequence[Any], barrier: Barrier, shared: Shared) -> None:
    at = [int(_data(x)) for x in place]
    _machine().check_awaited("a box is copied in")
    assert prod(shared.shape) == prod(boxes.box), (shared.shape, boxes.box)
    tile = shared.reshape(list(boxes.box[-2:]))
    tile.write(torch.full(boxes.box[-2:], float("nan"), dtype=tile.dtype))

    def land() -> None:
        tile.write(boxes.read(at))
        barrier.expected -= boxes.block_type.nbytes
        barrier.settle()

    _machine().later(land)
    _machine().pause()


def _copy_out(boxes: Boxes, place: Sequence[Any], shared: Shared) -> None:
    at = [int(_data(x)) for x in place]
    _machine().check_awaited("a box is copied out")
    tile = shared.reshape(list(boxes.box[-2:]))

    def land() -> None:
        boxes.write(at, tile.read())

    _now().partition.copies.append((land, tile.reserve()))
    _machine().later(land)
    _machine().pause()


def _store_wait(pendings: int) -> None:
    copies = _now().partition.copies
    for land, end in copies[: len(copies) - pendings]:
        _machine().now(land)
        end()
    del copies[: len(copies) - pendings]


def _multiply(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    shared = [x for x in (a, b) if isinstance(x, Shared)]
    reads = [x.reserve() for x in shared]
    # Registers are given away when the product is issued.
    left, right = (x if isinstance(x, Shared) else _data(x).float() for x in (a, b))
    start = _data(acc)

    def compute() -> torch.Tensor:
        x, y = (x.read().float() if isinstance(x, Shared) else x for x in (left, right))
        return start + x @ y if use_acc else x @ y

    issued = _Pending(compute, reads)
    if _machine().toss():
        issued.multiply()
    if not is_async:
        issued.finish()
        return Value(issued.multiply())
    _now().partition.products.append(issued)
    _machine().pause()
    return issued


def _multiply_wait(pendings: int, deps: Sequence[Any]) -> Any:
    _machine().pause()
    products = _now().partition.products
    for issued in products[: len(products) - pendings]:
        issued.finish()
    del products[: len(products) - pendings]
    # What is still in flight stays so: its use is an error.
    found = [
        Value(x.multiply()) if isinstance(x, _Pending) and x not in products else x for x in deps
    ]
    return found[0] if len(found) == 1 else tuple(found)


def _fence() -> None:
    """Make this partition's stores visible to copies and products."""
    mine = _now().partition
    for memory in _machine().memories:
        for at in [at for at, who in memory.unfenced.items() if who is mine]:
            del memory.unfenced[at]


def _barrier_init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _barrier_arrive(barrier: Barrier, count: int = 1) -> None:
    _now().tell(barrier.seen)
    barrier.pending -= count
    barrier.settle()
    _machine().pause()


def _barrier_expect(barrier: Barrier, size: Any) -> None:
    barrier.expected += int(size)
    barrier.pending -= 1
    barrier.settle()
    _machine().pause()


def _barrier_wait(barrier: Barrier, phase: Any) -> None:
    parity = int(_data(phase))
    assert parity in (0, 1), parity
    caller = sys._getframe(1)
    _machine().wait(
        lambda: barrier.phase != parity,
        f"line {caller.f_lineno} of {caller.f_code.co_name}, phase {parity}",
    )
    _hear(_now().clock, barrier.seen)


@dataclass(frozen=True)
class Kernel:
    """A kernel function as Triton's launchers see it: ``kernel[grid](*arguments, **options)``."""

    function: Callable[..., None]
    seed: list[int]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Launch over ``grid``."""

        def launch(*arguments: Any, **options: Any) -> None:
            code = self.function.__code__
            names = code.co_varnames[: code.co_argcount]
            known = {name: options[name] for name in names if name in options}
            given = dict(zip(names, arguments, strict=False)) | known
            kinds = self.function.__annotations__
            ready = [
                given[name] if "constexpr" in kinds.get(name, "") else _argument(given[name], name)
                for name in names
            ]
            self.seed[0] += 1
            machine = Machine(self.seed[0], prod(grid), bool(options.get("launch_pdl")))
            machine.run(lambda: self.function(*ready))

        return launch


def _argument(x: Any, name: str) -> Any:
    """A run-time argument as kernels see it."""
    if isinstance(x, torch.Tensor):
        size = x.untyped_storage().size() // x.element_size() - x.storage_offset()
        storage = torch.as_strided(x, (size,), (1,))
        return Pointer(storage, torch.tensor(0, dtype=torch.int64), name)
    if hasattr(x, "block_shape"):
        return Boxes(torch.as_strided(x.base, x.shape, x.strides), tuple(x.block_shape))
    return Value(_data(x))


def _stand_ins(seed: list[int]) -> dict[str, types.ModuleType]:
    """Modules that kernels import, by name."""

    def module(name: str, content: dict[str, Any]) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        return made

    def jit(function: Any = None, **_: Any) -> Any:
        if function is None:
            return lambda function: Kernel(function, seed)
        return function

    language = module("language", _language)
    tl = module("language", {"PropagateNan": SimpleNamespace(ALL=True)})
    gluon = module("gluon", {"jit": jit, "language": language})
    hopper = module(
        "hopper",
        {
            "fence_async_shared": _fence,
            "warpgroup_mma": _multiply,
            "warpgroup_mma_wait": _multiply_wait,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: "barrier", init=_barrier_init, arrive=_barrier_arrive,
                expect=_barrier_expect, wait=_barrier_wait,
            ),
            "tma": SimpleNamespace(
                async_load=_copy_in, async_store=_copy_out, store_wait=_store_wait
            ),
        },
    )  # fmt: skip
    cuda = module(
        "cuda",
        {
            "gdc_wait": lambda: _machine().await_predecessor(),
            "gdc_launch_dependents": lambda: _machine().check_awaited("the next launch may begin"),
        },
    )
    begin = "triton.experimental.gluon"
    empty = {name: module(name, {}) for name in ("triton", "triton.experimental")}
    empty["triton"].__dict__["language"] = tl
    empty["triton.experimental"].__dict__["gluon"] = gluon
    return {
        **empty,
        "triton.language": tl,
        "triton.language.extra": module("extra", {"cuda": cuda}),
        "triton.language.extra.cuda": cuda,
        begin: gluon,
        f"{begin}.language": language,
        f"{begin}.language.nvidia": module("nvidia", {"hopper": hopper}),
        f"{begin}.language.nvidia.hopper": hopper,
    }


def load(name: str, seed: int = 0, change: tuple[str, str] | None = None) -> types.ModuleType:
    """Kernel module ``name`` of the portable engine, whose kernels run on this machine.

    So do the modules of the package that it imports. ``seed`` is that of the first launch; each
    later one has the next. ``change`` replaces a part of their source, which must be there once.
    """
    package = types.ModuleType("kernels_on_a_machine")
    package.__path__ = [str(_KERNELS)]
    sources = _sources(name)
    if change is not None:
        if sum(source.count(change[0]) for source in sources.values()) != 1:
            raise ValueError(f"{' and '.join(sources)} do not have once: {change[0]}")
        sources = {key: source.replace(*change) for key, source in sources.items()}
    with mock.patch.dict(sys.modules):
        sys.modules.update(_stand_ins([seed - 1]))
        sys.modules[package.__name__] = package
        for key, source in sources.items():
            module = types.ModuleType(f"{package.__name__}.{key}")
            module.__package__ = package.__name__
            sys.modules[module.__name__] = module
            exec(compile(source, _KERNELS / f"{key}.py", "exec"), module.__dict__)
    return module


def _sources(name: str) -> dict[str, str]:
    """Source of a kernel module, after that of the modules beside it that it imports."""
    source = (_KERNELS / f"{name}.py").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for sibling in re.findall(r"^from \.(\w+) import", source, re.M):
        found |= _sources(sibling)
    return found | {name: source}
