"""Small problems for the shipped kernels, run from machine code that a test may have changed."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from liteattention_emulator import device, mutate, native
from liteattention_rocm.engines.gfx942 import manifest
from liteattention_rocm.lite import bitmap, budget
from liteattention_rocm.lite.budget import ROW_GUARD
from tests.engines.gfx942.kernels.machine import (
    CountParams,
    DenseParams,
    LiteParams,
    MergeListsParams,
    MergeParams,
    PlanParams,
    SelectParams,
    Strides,
    TransposeVParams,
    WeighParams,
    divider,
)
from tests.oracle import lpt

Float = npt.NDArray[np.float32]
Double = npt.NDArray[np.float64]
Half = npt.NDArray[np.uint16]

# Whatever order the waves run in, and how far a group of them can get ahead of the other.
ORDERS = ("round-robin", "first-ahead", "last-ahead", "random:1")

# Counters of what a launch moves: a prefetch too many shows nowhere else.
MOVED = "global_load_bytes", "global_store_bytes", "lds_dma_bytes", "lds_bytes"


def to_bf16(values: npt.NDArray[Any]) -> Half:
    """bf16 bits, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Half) -> Double:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def code_object(name: str) -> bytes:
    """A shipped code object, e.g. "attention_dense"."""
    return (manifest.DIRECTORY / f"{name}.co").read_bytes()


def contiguous(array: npt.NDArray[Any]) -> Strides:
    _, rows, heads, dim = array.shape
    return Strides(rows * heads * dim, heads * dim, dim)


@dataclass
class Problem:
    """Dense attention of bf16 q [1, Sq, 1, D], k and v [1, Skv, 1, D]; nothing lies behind them."""

    dim: int
    q_len: int
    kv_len: int
    seed: int = 0
    growth: float = 2.0  # of the last keys; from 12 on maxima rise by more than the kernels' slack
    reach: float = 1.0  # of every fourth query; 3000 takes scores beyond what one rounding bears

    @cached_property
    def inputs(self) -> tuple[Half, Half, Half]:
        """q, k, v as bf16 bits. The scores grow along the keys, so that maxima keep moving."""
        rng = np.random.default_rng(self.seed)
        q, k, v = (
            rng.standard_normal((1, rows, 1, self.dim))
            for rows in (self.q_len, self.kv_len, self.kv_len)
        )
        k *= np.linspace(0.5, self.growth, self.kv_len)[None, :, None, None]
        q[:, ::4] *= self.reach
        return to_bf16(q), to_bf16(k), to_bf16(v)

    @cached_property
    def exact(self) -> tuple[Double, Double]:
        """Output [Sq, D] and natural log-sum-exp [Sq] in float64."""
        q, k, v = (from_bf16(x)[0, :, 0] for x in self.inputs)
        scores = q @ k.T / np.sqrt(self.dim)
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        return weights @ v / total, (top + np.log(total))[:, 0]

    @cached_property
    def packed_v(self) -> Half:
        """V as transpose_v packs it."""
        v = self.inputs[2]
        blocks = -(-self.kv_len // 64)
        packed = np.zeros(blocks * 64 * self.dim, np.uint16)
        params = TransposeVParams(
            v.ctypes.data, packed.ctypes.data, contiguous(v), 1, 1, self.kv_len, 0
        )
        with device.Module(code_object("transpose_v")) as module, device.registered(v, packed):
            module.launch(f"transpose_v_bf16_d{self.dim}", [blocks], [256], [params])
        return packed

    def launch(self, module: device.Module, kernel: str, out: Half, lse: Float) -> device.Report:
        """Run one workgroup; ``out`` like q and ``lse`` [Sq] are written, also where it raises.

        Raises LaunchFailed as ``Module.launch`` does.
        """
        q, k, _ = self.inputs
        params = DenseParams(
            q.ctypes.data, k.ctypes.data, self.packed_v.ctypes.data, out.ctypes.data,
            lse.ctypes.data, 0, 0, contiguous(q), contiguous(k), contiguous(out), 1, 1, 1,
            self.q_len, self.kv_len, np.log2(np.e) / np.sqrt(self.dim), 1, 1, 0, 0,
        )  # fmt: skip
        with device.registered(q, k, self.packed_v, out, lse):
            return module.launch(kernel, [1], [512], [params])

    def errors(self, out: Half, lse: Float) -> tuple[float, float]:
        """Largest distances from float64 of output and log-sum-exp, relative above 1.

        Infinite for NaN.
        """
        ours = from_bf16(out)[0, :, 0], lse.astype(np.float64)
        far = [
            (np.abs(a - b) / np.maximum(1.0, np.abs(b))).max()
            for a, b in zip(ours, self.exact, strict=True)
        ]
        return far[0] if np.isfinite(far[0]) else np.inf, far[1] if np.isfinite(far[1]) else np.inf

    def run(self, module: device.Module, kernel: str) -> device.Report:
        """Launch; ``right`` then looks at what was written, also where this raises."""
        self.out = np.zeros_like(self.inputs[0])
        self.lse = np.zeros(self.q_len, np.float32)
        return self.launch(module, kernel, self.out, self.lse)

    def accept(self) -> None:
        """The results are the kernel's own: a mutant's may be twice as far from float64."""
        errors = self.errors(self.out, self.lse)
        assert errors[0] < 0.03 and errors[1] < 1e-4, errors
        self.allowed = 2 * errors[0], 2 * errors[1]

    def right(self) -> bool:
        """Whether the latest run's results are near enough to float64."""
        pairs = zip(self.errors(self.out, self.lse), self.allowed, strict=True)
        return all(error <= allowed for error, allowed in pairs)


@dataclass
class LiteProblem(Problem):
    """A LiteAttention step of one q block; its results are compared bit for bit.

    Of the K blocks ``keep`` says which are read, must_do pins the first of every 16. The growing
    scores of `Problem` are skipped when the walk descends and kept when it ascends.
    """

    descending: bool = True
    soft_skip: bool = False
    keep: float = 0.7
    row: int = 3  # of the query with a NaN, or of the one that meets +inf
    nan: bool = False  # in one query: its row keeps every tile
    nan_key: int = -1  # its scores are NaN, among others of a tile that could be dropped
    infinite: bool = False  # a row meets +inf, and later NaN in a tile that others keep
    empty: tuple[int, ...] = ()  # words of the bitmap in which nothing is kept

    @cached_property
    def inputs(self) -> tuple[Half, Half, Half]:
        """As `Problem.inputs`."""
        q, k, v = super().inputs
        if self.nan:
            q[0, self.row, 0, 5] = 0x7FC0
        if self.nan_key >= 0:
            k[0, self.nan_key, 0, 5] = 0x7FC0
        if self.infinite:
            one, minus, infinity = 0x3F80, 0xBF80, 0x7F80
            q[0, :, 0, :2] = minus
            q[0, self.row, 0, 0] = one
            k[0, :, 0, :2] = 0
            k[0, 770, 0, 0] = infinity  # +inf in that row, -inf in all others
            k[0, 650, 0, :2] = infinity  # inf - inf in that row, -inf in all others
        return q, k, v

    @cached_property
    def lists(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """The bitmap to read and the must-do mask."""
        words = -(-self.kv_len // 64 // 32)
        kept = np.setdiff1d(np.arange(words), self.empty)
        rng = np.random.default_rng(self.seed + 1)
        bits = rng.random((words, 32)) < self.keep
        read = np.packbits(bits, axis=1, bitorder="little").view(np.uint32).reshape(words)
        must_do = np.zeros(words, np.uint32)
        must_do[kept] = 0x00010001
        read[list(self.empty)] = 0
        return read, must_do

    def launch(self, module: device.Module, kernel: str, out: Half, lse: Float) -> device.Report:
        """Run one workgroup; also writes ``self.write``, the next step's bitmap."""
        (q, k, _), (read, must_do) = self.inputs, self.lists
        self.write = np.full(len(read), 0xAAAAAAAA, np.uint32)
        params = LiteParams(
            q.ctypes.data, k.ctypes.data, self.packed_v.ctypes.data, out.ctypes.data,
            lse.ctypes.data, read.ctypes.data, self.write.ctypes.data, must_do.ctypes.data, None,
            None, contiguous(q), contiguous(k), contiguous(out), 1, 1, 1, self.q_len, self.kv_len,
            np.log2(np.e) / np.sqrt(self.dim), -2.0, self.descending, self.soft_skip, 0,
        )  # fmt: skip
        with device.registered(q, k, self.packed_v, out, lse, read, self.write, must_do):
            return module.launch(kernel, [1], [512], [params])

    def accept(self) -> None:
        """The results are the kernel's own, which its tests hold against the oracle."""
        out, every = from_bf16(self.out)[0], self.nan_key >= 0
        assert np.isnan(out[self.row]).all() == (self.nan or self.infinite or every)
        assert (np.isnan if every else np.isfinite)(np.delete(out, self.row, axis=0)).all()
        self.accepted = self.out, self.lse.view(np.uint32), self.write

    def right(self) -> bool:
        """Whether the latest run gave the same bits."""
        written = self.out, self.lse.view(np.uint32), self.write
        return all(np.array_equal(a, b) for a, b in zip(written, self.accepted, strict=True))


@dataclass
class WeighProblem(LiteProblem):
    """A step with a budget of one q block; weights, too, are compared bit for bit."""

    def launch(self, module: device.Module, kernel: str, out: Half, lse: Float) -> device.Report:
        """Run one workgroup; also writes ``self.write``, the weights of its tiles."""
        (q, k, _), (read, must_do) = self.inputs, self.lists
        self.write = np.full(-(-self.kv_len // 64), 0xAAAAAAAA, np.uint32)
        params = WeighParams(
            q.ctypes.data, k.ctypes.data, self.packed_v.ctypes.data, out.ctypes.data,
            lse.ctypes.data, read.ctypes.data, self.write.ctypes.data, must_do.ctypes.data, None,
            None, None, None, None, None, contiguous(q), contiguous(k), contiguous(out),
            1, 1, 1, self.q_len, self.kv_len, np.log2(np.e) / np.sqrt(self.dim), self.descending, 0,
        )  # fmt: skip
        with device.registered(q, k, self.packed_v, out, lse, read, self.write, must_do):
            return module.launch(kernel, [1], [512], [params])


class Select:
    """The choice of tiles of three q blocks, bit for bit from their weights.

    ``exactly``: weights are 1 to 4, and the limit is what those of q block 0 up to this one add up
    to. Otherwise there are no masks, and masses are not wanted, if ``masked`` is false. ``heads``:
    the shares of heads, of ``q_blocks`` q blocks each.
    """

    def __init__(
        self,
        k_blocks: int,
        share: float = 0.0,
        *,
        exactly: int = 0,
        masked: bool = True,
        heads: Sequence[float] = (),
        q_blocks: int = 1,
    ) -> None:
        rng = np.random.default_rng(k_blocks)
        words = -(-k_blocks // 32)

        def bits(*shape: int, share: float) -> npt.NDArray[np.uint32]:
            drawn = rng.random((*shape, words, 32)) < share
            return np.packbits(drawn, axis=-1, bitorder="little").view(np.uint32)[..., 0]

        def blocks(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
            one_by_one = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
            return one_by_one[..., :k_blocks] > 0

        draw = rng.random((3, k_blocks)) ** 4
        draw[1] = np.round(draw[1] * 4) / 4  # ties
        parts = np.ceil(draw / draw.sum(axis=1, keepdims=True) * 2**28).astype(np.int64)
        parts[2, ::3] *= 8  # more than a mass of 1 in places
        if exactly:
            parts = 16 * rng.integers(1, 5, (3, k_blocks))
        self.read = bits(3, share=0.9)
        self.masks = [bits(share=0.1), bits(share=0.1)] if masked else [None, None]
        do, skip = (np.zeros(words, np.uint32) if mask is None else mask for mask in self.masks)
        walked, firm = blocks((self.read | do) & ~skip), blocks(do)
        self.weights = np.where(walked, parts, 0).astype(np.uint32)
        weight = np.minimum(-(-self.weights.astype(np.int64) // 16), 2**24)
        loose = walked[0] & ~firm
        if exactly:
            share = float(weight[0][loose & (weight[0] <= exactly)].sum()) / 2.0**24
        self.limit, self.mass, self.expected_mass = budget.limit_of(share), masked, weight / 2.0**24
        self.limits = budget.limits(heads).numpy() if heads else None
        self.q_heads, self.q_blocks = max(len(heads), 1), q_blocks
        shares = [heads[tile // q_blocks % len(heads)] if heads else share for tile in range(3)]
        chosen = torch.stack(
            [
                budget.select(
                    torch.from_numpy(self.expected_mass[tile]).float(),
                    torch.from_numpy(walked[tile]),
                    torch.from_numpy(firm),
                    shares[tile],
                )
                for tile in range(3)
            ]
        )
        self.k_blocks, self.expected = k_blocks, bitmap.pack(chosen).numpy().view(np.uint32)

    def run(self, module: device.Module, kernel: str) -> device.Report:
        """Launch; ``right`` then looks at what was written, also where this raises."""
        self.write = np.full_like(self.read, 0xAAAAAAAA)
        self.found_mass = np.full(self.weights.shape, np.nan, np.float32)
        mass = self.found_mass if self.mass else None
        inputs = self.read, *self.masks, self.limits
        read, *others = (None if array is None else array.copy() for array in inputs)
        given = [self.weights.copy(), read, self.write, *others[:2], mass, others[2]]
        pointers = (None if array is None else array.ctypes.data for array in given)
        dividers = *divider(self.q_heads), *divider(self.q_blocks)
        params = SelectParams(*pointers, self.k_blocks * 64, self.limit, self.q_heads, *dividers, 0)
        arrays = [array for array in given if array is not None]
        with device.registered(*arrays):
            return module.launch(kernel, [3], [64], [params])

    def accept(self) -> None:
        assert self.right()

    def right(self) -> bool:
        mass = not self.mass or np.array_equal(self.found_mass, self.expected_mass)
        return mass and np.array_equal(self.write, self.expected)


class Count:
    """How many K blocks tiles keep, and an order without tiles."""

    def __init__(self, tiles: int, words: int, positions: int, k_blocks: int = 0) -> None:
        rng = np.random.default_rng(tiles)
        self.skip = rng.integers(0, 1 << 32, (tiles, words), dtype=np.uint32)
        self.masks = rng.integers(0, 1 << 32, (2, words), dtype=np.uint32) & 0x11111111
        kept = (self.skip | self.masks[0]) & ~self.masks[1]
        bits = np.unpackbits(kept.view(np.uint8), axis=-1, bitorder="little")
        self.expected = bits[:, : k_blocks or None].sum(axis=-1, dtype=np.int64)
        self.positions, self.k_blocks = positions, k_blocks

    def run(self, module: device.Module, kernel: str) -> device.Report:
        """Launch; ``right`` then looks at what was written, also where this raises."""
        tiles, words = self.skip.shape
        self.counts, self.order = np.full(tiles, -7, np.int32), np.full(self.positions, 9, np.int32)
        must_do, must_skip = self.masks[0].copy(), self.masks[1].copy()
        arrays = self.skip.copy(), must_do, must_skip, self.counts, self.order
        sizes = tiles, self.positions, words, self.k_blocks
        params = CountParams(*(a.ctypes.data for a in arrays), *sizes)
        with device.registered(*arrays):
            return module.launch(kernel, [-(-self.positions // 256)], [256], [params])

    def accept(self) -> None:
        assert self.right()

    def right(self) -> bool:
        return np.array_equal(self.counts, self.expected) and bool((self.order == -1).all())


class Plan:
    """The order of tiles that keep ``kept`` K blocks, against the oracle's."""

    def __init__(
        self,
        kept: Sequence[int],
        q_blocks: int,
        slots: int,
        together: int,
        shift: int = 0,
        units: int = 0,
        *,
        cuts: bool = False,
    ) -> None:
        self.tiles, self.packs = len(kept), units > 0
        self.sizes = q_blocks, slots, together, shift, *divider(q_blocks), units
        self.kept = np.full(-(-len(kept) // 8) * 8, 2**31 - 1, np.int32)  # geometry.h: CountWords
        self.kept[: len(kept)] = kept
        self.expected = [
            np.array(lpt.order(kept, q_blocks, slots, together, shift, units), np.int32)
        ]
        if cuts:
            found = lpt.placed(kept, q_blocks, slots, together, units)
            parts = [[[-1] * 4 if part is None else part for part in row] for row in found.parts]
            self.expected = [np.array(x, np.int32) for x in (found.order, parts, found.cuts)]

    def run(self, module: device.Module, kernel: str) -> device.Report:
        """Launch; ``right`` then looks at what was written, also where this raises."""
        self.written = [np.full_like(x, -1) for x in self.expected]
        arrays = [self.kept.copy(), *self.written]  # a mutant may store to any
        given = [a.ctypes.data for a in arrays]
        params = PlanParams(*given, *[None] * (4 - len(given)), self.tiles, *self.sizes)
        with device.registered(*arrays):
            grid, threads = (8, 512) if self.packs else (-(-self.tiles // 256), 256)
            return module.launch(kernel, [grid], [threads], [params])

    def accept(self) -> None:
        assert self.right()

    def right(self) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.written, self.expected, strict=True))


def plans() -> list[Plan]:
    """Runs with room and without, heads that end within them, more counts than LDS holds."""
    rng = np.random.default_rng(5)
    uneven = rng.integers(0, 40, 1100) ** 2
    light, twice = (
        np.where(np.arange(330) % period < 0.6 * period, 0, 300) + rng.integers(0, 3, 330)
        for period in (330, 165)
    )
    return [
        Plan(uneven.tolist(), 1100, 200, 30),
        Plan(uneven[:301].tolist(), 43, 60, 19),
        Plan(light.tolist(), 33, 46, 19),
        Plan(uneven.tolist(), 110, 138, 19),  # several runs with more tiles than there is room for
        Plan([5, 0, 9], 1, 1, 1),
        Plan([5] * 320, 40, 60, 7),  # runs begin where exactly an eighth of the work is done
        Plan((twice * 9).tolist(), 33, 46, 19, 2),
        # Eight times their work has nearly 32 bits, unshifted and shifted.
        Plan([2**20] * 511, 1, 96, 152),
        Plan([2**25 - i for i in range(305)], 5, 58, 19, 5),
    ]


def packings() -> list[Plan]:
    """Tiles that fit in the first try, a later one and none; with some ordered before them."""
    rng = np.random.default_rng(6)
    even, swinging = rng.integers(150, 250, 330), np.sin(np.arange(320) * 0.1)
    like = (200 * (1 + swinging / 4)).astype(int)
    far = rng.integers(0, 9, 1330) ** 3
    twice = np.where(np.arange(330) % 165 < 99, 0, 300) + rng.integers(0, 3, 330)
    longest = rng.integers(0, 4, 200)
    longest[7] = 900
    many = rng.integers(0, 4, 6400) + np.where(np.arange(6400) < 3200, 0, 40)
    return [
        Plan(like.tolist(), 64, 60, 152, 0, 7),
        Plan(even.tolist(), 33, 62, 30, 0, 5),
        Plan(far.tolist(), 133, 250, 19, 0, 3),  # dozens before them, runs of more than 64
        Plan(far.tolist(), 133, 250, 152, 0, 38),
        Plan(far[:900].tolist(), 1, 169, 40, 1, 63),
        Plan(twice.tolist(), 33, 46, 19, 0, 38),  # two runs with more tiles than there is room for
        Plan(longest.tolist(), 10, 38, 152, 0, 6),
        Plan([5] * 320, 40, 60, 152, 0, 9),
        Plan([5, 0, 9], 1, 1, 1, 0, 38),
        Plan(many.tolist(), 6400, 6400, 152, 0, 38),  # a run of more tiles than are packed
        Plan([2**20] * 511, 1, 96, 152, 0, 38),
        Plan([2**19 + 4096 * (i % 9) for i in range(700)], 1, 132, 152, 0, 3),
        Plan([2**25 - i for i in range(305)], 5, 58, 19, 5, 1),
        # Runs of 768 tiles, which are packed, and of 769, which are not.
        Plan(np.random.default_rng(44).integers(50, 100, 6148).tolist(), 6148, 1200, 152, 0, 38),
        *cuttings(),
    ]


def cuttings() -> list[Plan]:
    """Lists that are cut, or whole because that takes as long, or because there is no room."""
    rng = np.random.default_rng(7)
    uneven = rng.integers(0, 23, 330) ** 2
    empty = rng.integers(0, 2, 200) * 700
    long = np.full(9, 1000)
    few_long = np.where(rng.random(1000) < 0.03, 1500, 20)
    return [
        Plan(few_long.tolist(), 100, 350, 19, 0, 38, cuts=True),  # more than a wave has lanes
        Plan(uneven.tolist(), 33, 160, 30, 0, 5, cuts=True),
        Plan(uneven[:90].tolist(), 9, 80, 152, 0, 38, cuts=True),
        Plan(uneven[:90].tolist(), 9, 30, 152, 0, 38, cuts=True),  # room for the lists, not parts
        Plan(empty.tolist(), 50, 140, 19, 0, 7, cuts=True),
        Plan(long.tolist(), 3, 42, 152, 0, 38, cuts=True),
        Plan([300], 1, 66, 152, 0, 63, cuts=True),
        Plan([*range(30, 40)] * 30, 30, 150, 152, 0, 3, cuts=True),  # whole, packed
        # More tiles than there is room for, and more than are packed.
        Plan([0] * 200 + [900] * 8, 26, 60, 19, 0, 5, cuts=True),
        Plan([0] * 900 + [70] * 40, 94, 1200, 19, 0, 5, cuts=True),
    ]


class Merge:
    """The merge of the parts of one tile of ``q_len`` rows, against float64."""

    def __init__(self, dim: int, q_len: int, splits: int) -> None:
        rng = np.random.default_rng(q_len)
        self.part_out = rng.standard_normal((splits, 256, dim)).astype(np.float32)
        self.stats = rng.standard_normal((splits, 2, 256)).astype(np.float32)
        self.stats[:, 1] = np.exp(self.stats[:, 1])
        self.dim, self.q_len, self.splits = dim, q_len, splits
        top, total = self.stats[:, 0].astype(np.float64), self.stats[:, 1].astype(np.float64)
        weights = np.exp2(top - top.max(axis=0))
        total = (weights * total).sum(axis=0)
        out = (weights[:, :, None] * self.part_out).sum(axis=0) / total[:, None]
        self.exact_out = out[:q_len]
        self.exact_lse = ((top.max(axis=0) + np.log2(total)) * np.log(2))[:q_len]

    def run(self, module: device.Module, kernel: str) -> device.Report:
        """Launch; ``right`` then looks at what was written, also where this raises."""
        self.out = np.zeros((1, self.q_len, 1, self.dim), np.uint16)
        self.lse = np.zeros(self.q_len, np.float32)
        arrays = self.part_out, self.stats, self.out, self.lse
        params = MergeParams(
            *(a.ctypes.data for a in arrays), contiguous(self.out),
            1, 1, self.q_len, self.dim, 0, self.splits, 0, 0,
        )  # fmt: skip
        rows = 256 * 8 // self.dim
        with device.registered(*arrays):
            return module.launch(kernel, [256 // rows], [256], [params])

    def accept(self) -> None:
        assert self.right()

    def right(self) -> bool:
        error = np.abs(from_bf16(self.out)[0, :, 0] - self.exact_out)
        near = error <= 2.0**-8 * np.abs(self.exact_out) + 1e-5
        return bool(near.all() and (np.abs(self.lse - self.exact_lse) < 1e-5).all())


class Transpose:
    """V [B, Skv, H, D] packed, against the packing of the kernel as it is."""

    def __init__(self, dim: int, kv_len: int, batch: int = 1, heads: int = 1) -> None:
        rng = np.random.default_rng(kv_len)
        self.v = to_bf16(rng.standard_normal((batch, kv_len, heads, dim)))
        self.dim = dim
        self.expected: Half | None = None

    def run(self, module: device.Module, kernel: str) -> device.Report:
        """Launch; ``right`` then looks at what was written, also where this raises."""
        batch, kv_len, heads, _ = self.v.shape
        grid = batch * heads * -(-kv_len // 64)
        self.packed = np.full(grid * 64 * self.dim, 0xFFFF, np.uint16)
        strides = contiguous(self.v)
        params = TransposeVParams(
            self.v.ctypes.data, self.packed.ctypes.data, strides, batch, heads, kv_len, 0
        )
        with device.registered(self.v, self.packed):
            return module.launch(kernel, [grid], [256], [params])

    def accept(self) -> None:
        """The results are the kernel's own: every value once, zeros for the missing keys."""
        assert np.array_equal(np.sort(self.packed[self.packed != 0]), np.sort(self.v[self.v != 0]))
        self.expected = self.packed

    def right(self) -> bool:
        return self.expected is not None and np.array_equal(self.packed, self.expected)


class Case(Protocol):
    """A launch whose results can be judged."""

    def run(self, module: device.Module, kernel: str) -> device.Report:
        """Launch; raises LaunchFailed."""

    def accept(self) -> None:
        """Take the latest run's results as those of the kernel itself."""

    def right(self) -> bool:
        """Whether the latest run's results are right."""


class Trial:
    """Runs mutants of one kernel on its cases. Owner: the test, which closes it.

    Case after case runs in one order of waves after the other, until something is found.
    ``reference`` is the outcome of the kernel as it is.
    """

    def __init__(
        self, image: bytes, kernel: str, cases: Sequence[Case], orders: Sequence[str] = ORDERS
    ) -> None:
        self.kernel, self.cases = kernel, cases
        # To load a code object takes as long as many a launch: those of an image share one.
        self.loaded: device.Module | None = None
        # Without LDS, waves share no more than memory, and the checker of its races asks no order.
        self.orders = orders if self.module(image).kernel(kernel).lds_bytes else orders[:1]
        native.set_option("threads", "1")
        self.steps: dict[int, int] = {}  # by case, what a workgroup that does not hang stays below
        for case in cases:
            report = case.run(self.module(image), kernel)
            case.accept()
            self.steps[id(case)] = 4 * report.instructions
        self.reference = self(image)
        assert self.reference.right and not self.reference.findings and not self.reference.failed

    def close(self) -> None:
        """Back to the environment's options."""
        if self.loaded:
            self.loaded.close()
        for name in ("order", "steps", "threads"):
            native.set_option(name, "")

    def module(self, image: bytes) -> device.Module:
        """An image, loaded until there is another."""
        if self.loaded is None or self.loaded.image != image:
            if self.loaded:
                self.loaded.close()
            self.loaded = device.Module(image)
        return self.loaded

    def unharmed(self, image: bytes) -> bool:
        """Whether all cases still find nothing in the kernel as it is.

        A mutant that stored to the inputs of a case would let it find something in all later ones.
        """
        found = self.tried(image, self.orders[:1], self.cases)
        return found.right and not (found.findings or found.failed)

    def begin(self, image: bytes) -> mutate.Outcome:
        """As a call, of the first launch only: where it finds nothing, the reference."""
        found = self.tried(image, self.orders[:1], self.cases[:1])
        return self.reference if found.right and not (found.findings or found.failed) else found

    def __call__(self, image: bytes) -> mutate.Outcome:
        """Findings of all launches together, and whether all results were right."""
        return self.tried(image, self.orders, self.cases)

    def tried(self, image: bytes, orders: Sequence[str], cases: Sequence[Case]) -> mutate.Outcome:
        """The launches of these, up to the first in which something is found."""
        native.set_option("threads", "1")
        findings: set[str] = set()
        right, failed, traffic = True, "", [0] * len(MOVED)
        extents: dict[int, tuple[int, int]] = {}
        for order, case in itertools.product(orders, cases):
            native.set_option("order", order)
            native.set_option("steps", str(self.steps[id(case)]))
            report = None
            try:
                report = case.run(self.module(image), self.kernel)
            except native.LaunchFailed as error:
                findings = {finding["kind"] for finding in error.findings}
                failed = "" if findings else str(error)
            right = not failed and case.right()
            if report is None or not right:
                break
            traffic = [sum_ + report.counters[n] for sum_, n in zip(traffic, MOVED, strict=True)]
            entry = min(row.offset for row in report.executed)
            for offset, (low, high) in report.lds_extents.items():
                before = extents.get(offset - entry, (low, high))
                extents[offset - entry] = min(low, before[0]), max(high, before[1])
        return mutate.Outcome(tuple(sorted(findings)), right, failed, tuple(traffic), extents)


class MergeLists:
    """The parts of two lists, merged: outputs against float64, weights bit for bit as accepted."""

    def __init__(self, dim: int, q_len: int, parts: tuple[int, int], first: int) -> None:
        rng = np.random.default_rng(q_len)
        self.dim, self.q_len, self.k_blocks, self.units = dim, q_len, 300, 5
        slots = 2 * self.units
        self.part_out = rng.standard_normal((slots, 256, dim)).astype(np.float32)
        self.stats = rng.standard_normal((slots, 2, 256)).astype(np.float32)
        self.stats[:, 1] = np.exp(self.stats[:, 1])
        self.stats[1::4, 1, 96:160] *= 1e-3  # a part with little of what two waves have seen
        # In every other wave from ``first`` on, a row that has seen nothing: its tiles weigh 1.
        self.stats[:, 0, 32 * first + 5 :: 64] = -np.inf
        self.stats[:, 1, 32 * first + 5 :: 64] = 0.0
        self.weights = rng.integers(1, 2**28, (slots, 8, self.k_blocks)).astype(np.uint32)
        self.weights[:, :, ::7] += np.uint32(2**28)  # rows that are guarded
        self.weights[:, :, 3::11] = 2**28  # the most without one
        # A K block is in one part of a list; some are in none.
        of = rng.integers(0, slots + 2, self.k_blocks)
        self.weights *= (np.arange(slots)[:, None, None] == of).astype(np.uint32)
        # Of the lists of tiles 1 and 0, which begin in units 0 and 2.
        self.cuts = np.array([[1, parts[0]], [0, 0], [0, parts[1]], [0, 0], [0, 0]], np.int32)

    def run(self, module: device.Module, kernel: str) -> device.Report:
        """Launch; ``right`` then looks at what was written, also where this raises."""
        self.out = np.zeros((1, self.q_len, 1, self.dim), np.uint16)
        self.lse = np.zeros(self.q_len, np.float32)
        self.sums = np.full((2, self.k_blocks), 7, np.uint32)
        given = [x.copy() for x in (self.cuts, self.part_out, self.stats, self.weights)]
        arrays = *given, self.out, self.lse, self.sums
        params = MergeListsParams(
            *(a.ctypes.data for a in arrays), contiguous(self.out),
            1, self.q_len, 64 * self.k_blocks, self.dim, 1.0, 0,
        )  # fmt: skip
        groups = 256 // (256 * 8 // self.dim) + 1
        with device.registered(*arrays):
            return module.launch(kernel, [self.units * groups], [256], [params])

    def accept(self) -> None:
        for (tile, many), unit in ((self.cuts[0], 0), (self.cuts[2], 2)):
            slots = [2 * unit + 1, *(2 * (unit + g) for g in range(1, many))]
            top, total = (self.stats[slots, i].astype(np.float64) for i in range(2))
            shift = np.where(np.isfinite(top), top, 0).max(axis=0)
            share = np.exp2(np.where(np.isfinite(top), top - shift, -np.inf))
            total = share * total
            rows = slice(256 * tile, min(256 * (tile + 1), self.q_len))
            with np.errstate(divide="ignore", invalid="ignore"):
                lse = (shift + np.log2(total.sum(axis=0))) * np.log(2)
                factor = total / total.sum(axis=0)
                out = np.nan_to_num((share[:, :, None] * self.part_out[slots]).sum(axis=0))
                out = np.nan_to_num(out / total.sum(axis=0)[:, None])
            many_rows = len(self.lse[rows])
            assert np.allclose(self.lse[rows], lse[:many_rows], atol=1e-5)
            assert np.allclose(
                from_bf16(self.out)[0, rows, 0], out[:many_rows], rtol=2**-8, atol=1e-3
            )
            largest = factor.reshape(many, 8, 32).max(axis=2)  # a NaN stays one
            guarded = self.weights[slots] > 2**28
            weights = self.weights[slots].astype(np.float64) - guarded * 2.0**28
            scaled = weights * largest[:, :, None]
            whole = np.isnan(scaled) | (guarded & (largest[:, :, None] > ROW_GUARD))
            assert whole[guarded].any() and not whole[guarded].all()
            scaled = np.where(whole, np.where(weights > 0, 2.0**28, 0), scaled)
            least = scaled.sum(axis=(0, 1))
            assert (self.sums[tile] >= least).all()
            assert (self.sums[tile] <= least * (1 + 2.0**-15) + 8 * many).all()
        self.accepted = self.out, self.lse.view(np.uint32), self.sums

    def right(self) -> bool:
        """Whether the latest run gave the same bits."""
        written = self.out, self.lse.view(np.uint32), self.sums
        return all(np.array_equal(a, b) for a, b in zip(written, self.accepted, strict=True))


def cases(kernel: str) -> tuple[str, Sequence[Case]]:
    """The code object that a kernel is in, and cases that reach its edges.

    D = 64 copies two keys at a time: odd lengths that end in each of the eight copies of a K block.
    """
    dim = 64 if "d64" in kernel else 128
    if kernel.startswith("attention_dense"):
        lengths = [257 + 8 * i for i in range(8)] if dim == 64 else [299]
        return "attention_dense", [
            *(Problem(dim, 200, n, growth=12.0) for n in (40, 100, *lengths)),
            Problem(dim, 200, 256, reach=3000.0),  # the last block is whole
        ]
    if kernel.startswith("attention_lite"):
        lengths = [257 + 8 * i for i in range(8)] if dim == 64 else []
        return "attention_lite", [
            # three words of the bitmap; votes that one wave group alone casts in each
            LiteProblem(dim, 148, 69 * 64 + 20, keep=0.15, nan=True),
            LiteProblem(dim, 148, 69 * 64 + 20, keep=0.15, nan=True, row=140),
            LiteProblem(dim, 20, 69 * 64 + 20, keep=0.2, empty=(0,)),  # the last one walked
            LiteProblem(dim, 20, 69 * 64 + 20, keep=0.2, empty=(1,), descending=False),
            LiteProblem(dim, 20, 800, keep=1.0, nan_key=70),
            LiteProblem(dim, 20, 800, keep=1.0, infinite=True),
            # the same, and a NaN, in a row of group B, which has a loop of its own
            LiteProblem(dim, 148, 800, keep=1.0, infinite=True, row=140),
            LiteProblem(dim, 148, 299, nan=True, keep=1.0, row=140),
            # tiles left out where a word of the bitmap ends
            LiteProblem(dim, 148, 69 * 64 + 20, keep=0.2, soft_skip=True),
            LiteProblem(dim, 20, 69 * 64 + 20, keep=0.2, soft_skip=True, growth=-1.0),
            LiteProblem(dim, 200, 40, descending=False, keep=1.0),
            LiteProblem(dim, 200, 299, nan=True, keep=1.0),
            LiteProblem(dim, 200, 700, soft_skip=True, keep=1.0),
            LiteProblem(dim, 200, 400, descending=False, growth=12.0),
            LiteProblem(dim, 200, 200, keep=1.0, descending=False, reach=3000.0),
            # a last block that ends between any two keys of a lane, walked first, by rows of both
            # groups
            *(LiteProblem(dim, 148, 68 + 8 * t + i, keep=1.0) for t in range(8) for i in range(4)),
            # walked last, so that the loop copies the block that ends in the middle
            *(LiteProblem(dim, 200, n, descending=False, keep=1.0) for n in lengths),
        ]
    if kernel.startswith("attention_weigh"):
        return "attention_weigh", [
            WeighProblem(dim, 50, 69 * 64 + 20, keep=0.15),  # three words of the bitmap
            WeighProblem(dim, 20, 69 * 64 + 20, keep=0.2, empty=(0,)),  # the last one walked
            WeighProblem(dim, 20, 69 * 64 + 20, keep=0.2, empty=(1,), descending=False),
            WeighProblem(dim, 20, 800, keep=1.0, infinite=True),
            WeighProblem(dim, 200, 299, nan=True, keep=1.0),
            WeighProblem(dim, 200, 400, descending=False, growth=12.0),
            WeighProblem(dim, 200, 200, keep=1.0, descending=False, reach=3000.0),
            WeighProblem(dim, 20, 131, keep=1.0),
        ]
    if kernel == "select_tiles":
        return "select_tiles", [
            *(Select(n, 0.1) for n in (1, 31, 33, 64, 65, 200)),
            Select(40, 0.5),
            Select(90, 2.0**-20),
            Select(80, exactly=2),
            Select(40, exactly=4),
            Select(96, exactly=3, masked=False),
            Select(50, 0.1, heads=(0.02, 0.0, 0.5)),
            Select(70, 0.1, heads=(0.5, 0.02)),  # the third tile: head 0 of the next batch
            Select(70, 0.1, heads=(0.02, 0.5), q_blocks=2),
        ]
    if kernel.startswith("transpose_v"):
        return "transpose_v", [Transpose(dim, n, 2, 3) for n in (64, 73, 89, 105, 121)]
    if kernel.startswith("merge_parts"):
        return "merge_parts", [Merge(128, 256, 3), Merge(64, 217, 2)]
    if kernel.startswith("merge_lists"):
        return "merge_lists", [MergeLists(128, 512, (2, 3), 0), MergeLists(64, 300, (3, 2), 1)]
    if kernel == "count_tiles":
        return "count_tiles", [Count(43, 5, 66), Count(300, 2, 450, 39), Count(9, 1, 600, 31)]
    if kernel == "pack_lists":
        return "pack_lists", packings()
    return "plan_lpt", plans()
