"""Skip lists: the bitmap, its run-length import and export, statistics and a picture.

A *skip bitmap* is an int32 tensor [B, H, q_blocks, words] that holds uint32 bit patterns,
words = ceil(K_blocks / 32). K block j of a row is bit ``j % 32`` of word ``j // 32``; a set bit
means "compute this tile next time". Bits at and beyond K_blocks are 0 in every bitmap that this
library writes, and ignored where it reads one. The bitmap has no direction, so must-do is OR,
must-skip is AND-NOT and work is a population count.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

#: Largest number of K blocks that an int16 run-length row can name.
MAX_RUN_LENGTH_BLOCKS = 32767


def words_for(k_blocks: int) -> int:
    """Number of int32 words in one bitmap row over ``k_blocks`` K blocks."""
    return -(-k_blocks // 32)


def full(
    batch: int,
    heads: int,
    q_blocks: int,
    k_blocks: int,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return a bitmap [batch, heads, q_blocks, words] int32 that keeps every tile.

    Raises ``ValueError`` naming every negative size.
    """
    sizes = {"batch": batch, "heads": heads, "q_blocks": q_blocks, "k_blocks": k_blocks}
    reasons = [f"{name} must be >= 0, got {value}" for name, value in sizes.items() if value < 0]
    if reasons:
        raise ValueError("cannot make a skip bitmap: " + "; ".join(reasons))
    words = words_for(k_blocks)
    bitmap = torch.full((batch, heads, q_blocks, words), -1, dtype=torch.int32, device=device)
    if k_blocks % 32:
        bitmap[..., -1] = (1 << (k_blocks % 32)) - 1
    return bitmap


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Pack a bool mask [..., K_blocks] into int32 words [..., ceil(K_blocks / 32)].

    Raises ``TypeError`` if the mask is not bool, ``ValueError`` if it has no dimension.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"pack takes a bool mask over K blocks, got {mask.dtype}: use mask.bool()")
    if mask.dim() == 0:
        raise ValueError("pack takes a mask [..., K_blocks], got a scalar")
    k_blocks = mask.shape[-1]
    words = words_for(k_blocks)
    padded = torch.nn.functional.pad(mask, (0, words * 32 - k_blocks))
    bits = padded.reshape(*mask.shape[:-1], words, 32).to(torch.int64)
    weights = torch.ones(32, dtype=torch.int64, device=mask.device) << torch.arange(
        32, device=mask.device
    )
    # int64 -> int32 keeps the low 32 bits, which turns bit 31 into the sign.
    return (bits * weights).sum(-1).to(torch.int32)


def unpack(bitmap: torch.Tensor, k_blocks: int) -> torch.Tensor:
    """Unpack int32 words [..., words] into a bool mask [..., k_blocks].

    Raises ``TypeError`` if the bitmap is not int32, ``ValueError`` if its last dimension does not
    hold exactly ``ceil(k_blocks / 32)`` words.
    """
    _check_bitmap(bitmap, k_blocks)
    shifts = torch.arange(32, dtype=torch.int32, device=bitmap.device)
    bits = (bitmap.unsqueeze(-1) >> shifts) & 1
    return bits.reshape(*bitmap.shape[:-1], bitmap.shape[-1] * 32)[..., :k_blocks].bool()


def _check_bitmap(bitmap: torch.Tensor, k_blocks: int | None = None) -> None:
    if bitmap.dtype != torch.int32:
        raise TypeError(f"a skip bitmap is an int32 tensor of uint32 words, got {bitmap.dtype}")
    if bitmap.dim() == 0:
        raise ValueError("a skip bitmap is [..., words], got a scalar")
    if k_blocks is not None and bitmap.shape[-1] != words_for(k_blocks):
        raise ValueError(
            f"{k_blocks} K blocks need {words_for(k_blocks)} words in the last dimension of the "
            f"bitmap, got {bitmap.shape[-1]}"
        )


def _popcount_into(
    bitmap: torch.Tensor, pairs: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor
) -> None:
    """Add up the set bits of ``bitmap`` into the 0-dim int64 ``out``, allocating nothing.

    ``pairs`` and ``scratch`` are int32 work space of the bitmap's shape. Adds bits in pairs,
    nibbles, bytes and words. The shifts of int32 bring in copies of the sign; every mask that
    follows one clears them.
    """
    torch.bitwise_right_shift(bitmap, 1, out=scratch)
    scratch.bitwise_and_(0x55555555)
    torch.sub(bitmap, scratch, out=pairs)
    torch.bitwise_right_shift(pairs, 2, out=scratch)
    scratch.bitwise_and_(0x33333333)
    # pair sums a + 4b become nibble sums a + b by taking 3b away
    pairs.sub_(scratch, alpha=3)
    torch.bitwise_right_shift(pairs, 4, out=scratch)
    pairs.add_(scratch).bitwise_and_(0x0F0F0F0F)
    torch.bitwise_right_shift(pairs, 8, out=scratch)
    pairs.add_(scratch)
    torch.bitwise_right_shift(pairs, 16, out=scratch)
    pairs.add_(scratch).bitwise_and_(0x3F)
    torch.sum(pairs.view(-1), dim=0, dtype=torch.int64, out=out)


def count(bitmap: torch.Tensor, k_blocks: int | None = None) -> torch.Tensor:
    """Return the number of kept tiles as a 0-dim int64 tensor on the bitmap's device (no sync).

    With ``k_blocks`` given, bits at and beyond it do not count. Raises ``TypeError`` if the bitmap
    is not int32, ``ValueError`` if it has not the words of ``k_blocks``.
    """
    _check_bitmap(bitmap, k_blocks)
    if k_blocks is not None:
        bitmap = bitmap & full(1, 1, 1, k_blocks, bitmap.device).view(-1)
    dense = bitmap.contiguous()
    out = torch.empty((), dtype=torch.int64, device=bitmap.device)
    _popcount_into(dense, torch.empty_like(dense), torch.empty_like(dense), out)
    return out


def sparsity(bitmap: torch.Tensor, k_blocks: int) -> float:
    """Return 1 - kept tiles / all tiles of a bitmap over ``k_blocks`` K blocks (0.0 if empty).

    Reads one number back from the device. Raises like :func:`unpack`.
    """
    _check_bitmap(bitmap, k_blocks)
    rows = 1
    for size in bitmap.shape[:-1]:
        rows *= size
    total = rows * k_blocks
    return 1.0 - int(count(bitmap, k_blocks)) / total if total else 0.0


def token_ranges_to_blocks(
    ranges: Sequence[tuple[int, int]], kv_len: int, k_block: int, *, outward: bool
) -> torch.Tensor:
    """Convert ascending token ranges [start, end) over keys into a bool mask [K_blocks] (CPU).

    ``outward=True`` (must-do) sets every block that holds a token of a range; ``outward=False``
    (must-skip) sets only blocks all of whose keys lie in the ranges. A last block shorter than
    ``k_block`` counts as covered when its existing keys are; ranges that touch are taken together.
    Raises ``ValueError`` listing every range that is empty, descending, negative, past the end of
    the keys, or out of order.
    """
    reasons = range_reasons(ranges)
    reasons += [
        f"range {i} [{start}, {end}) ends past the {kv_len} keys: clip it to {kv_len} or drop it"
        for i, (start, end) in enumerate(ranges)
        if end > kv_len
    ]
    if reasons:
        raise ValueError("invalid token ranges: " + "; ".join(reasons))
    k_blocks = -(-kv_len // k_block)
    tokens = torch.zeros(k_blocks * k_block, dtype=torch.bool)
    if not outward:
        tokens[kv_len:] = True
    for start, end in ranges:
        tokens[start:end] = True
    blocks = tokens.view(k_blocks, k_block)
    return blocks.any(-1) if outward else blocks.all(-1)


def range_reasons(ranges: Sequence[tuple[int, int]]) -> list[str]:
    """Return what is wrong with token ranges whatever the number of keys; empty means nothing."""
    reasons = []
    previous: tuple[int, int] | None = None
    for i, (start, end) in enumerate(ranges):
        if start < 0:
            reasons.append(f"range {i} [{start}, {end}) starts before key 0: token ranges are >= 0")
        if start > end:
            reasons.append(
                f"range {i} [{start}, {end}) is descending: write it as ({end}, {start}); "
                "ranges are ascending token positions, end exclusive"
            )
        elif start == end:
            reasons.append(f"range {i} [{start}, {end}) is empty: remove it (end is exclusive)")
        if previous is not None and start < previous[1]:
            reasons.append(
                f"range {i} [{start}, {end}) starts before the end of range {i - 1} "
                f"[{previous[0]}, {previous[1]}): sort the ranges and merge those that overlap"
            )
        previous = (start, end)
    return reasons


# --- run-length lists of LiteAttention ------------------------------------------------------


def _flat_rows(tensor: torch.Tensor) -> list[list[int]]:
    """Rows of a tensor [..., n] as Python lists."""
    rows: list[list[int]] = tensor.reshape(-1, tensor.shape[-1]).tolist()
    return rows


def to_run_length(
    bitmap: torch.Tensor, k_blocks: int, *, writer_descending: bool = False
) -> torch.Tensor:
    """Export a bitmap [..., words] as LiteAttention rows, int16 [..., k_blocks + 2] (CPU).

    A row is ``[n, start0, end0, start1, end1, ...]`` followed by zeros: ``n`` numbers that name
    runs of kept K blocks in the walking direction of the writer, end exclusive. A descending
    writer names the run of blocks 3, 2, 1 as ``3, 0``. The reader of a row walks in the opposite
    direction, so a list that an ascending kernel is to read is exported with
    ``writer_descending=True``. ``k_blocks + 2`` numbers hold every pattern, alternating ones
    included. Raises ``ValueError`` for more than 32767 K blocks (int16) and like :func:`unpack`.
    """
    if k_blocks > MAX_RUN_LENGTH_BLOCKS:
        raise ValueError(
            f"{k_blocks} K blocks do not fit int16 run-length rows (at most "
            f"{MAX_RUN_LENGTH_BLOCKS}): keep the bitmap or use a larger k_block"
        )
    mask = unpack(bitmap, k_blocks).cpu()
    if writer_descending:
        mask = mask.flip(-1)
    step = -1 if writer_descending else 1
    first = k_blocks - 1 if writer_descending else 0
    rows = []
    for row in _flat_rows(mask.to(torch.int8)):
        runs: list[int] = []
        for i, kept in enumerate(row):
            if kept and not (i and row[i - 1]):
                runs.append(first + step * i)
            if kept and (i + 1 == k_blocks or not row[i + 1]):
                runs.append(first + step * (i + 1))
        rows.append([len(runs), *runs, *[0] * (k_blocks + 1 - len(runs))])
    return torch.tensor(rows, dtype=torch.int16).reshape(*mask.shape[:-1], k_blocks + 2)


def from_run_length(
    rows: torch.Tensor, k_blocks: int, *, writer_descending: bool = False
) -> torch.Tensor:
    """Import LiteAttention rows, int16 [..., >= 3], as a bitmap int32 [..., words] (CPU).

    The inverse of :func:`to_run_length`: ``writer_descending`` says in which direction the kernel
    that wrote the rows walked. Numbers after the first ``n`` of a row are ignored. Raises
    ``TypeError`` for another dtype and one ``ValueError`` that lists what is wrong row by row (at
    most eight rows): odd or impossible lengths, runs that walk the other way, lie outside the K
    blocks, overlap, or stand out of order.
    """
    if rows.dtype != torch.int16:
        raise TypeError(f"run-length rows are int16, got {rows.dtype}")
    if k_blocks > MAX_RUN_LENGTH_BLOCKS:
        raise ValueError(
            f"{k_blocks} K blocks do not fit int16 run-length rows (at most "
            f"{MAX_RUN_LENGTH_BLOCKS}): these rows cannot come from such a list"
        )
    if rows.dim() == 0 or rows.shape[-1] < 1:
        raise ValueError("run-length rows are [..., length], got none")
    step = -1 if writer_descending else 1
    first = k_blocks - 1 if writer_descending else 0
    reasons: list[str] = []
    kept = []
    for index, row in enumerate(_flat_rows(rows)):
        mask = [False] * k_blocks
        kept.append(mask)
        problem = None
        if row[0] < 0 or row[0] % 2 or row[0] + 1 > len(row):
            problem = (
                f"length {row[0]} must be even, >= 0 and leave room in a row of {len(row)} numbers"
            )
        else:
            at = 0  # next block the writer could reach, counted along its walk
            for i in range(1, row[0], 2):
                begin, end = (row[i] - first) * step, (row[i + 1] - first) * step
                if begin >= end:
                    problem = (
                        f"run {row[i]}, {row[i + 1]} does not walk "
                        f"{'down' if writer_descending else 'up'}: is writer_descending="
                        f"{not writer_descending} meant?"
                    )
                elif begin < 0 or end > k_blocks:
                    problem = f"run {row[i]}, {row[i + 1]} leaves the {k_blocks} K blocks"
                elif begin < at:
                    problem = f"run {row[i]}, {row[i + 1]} overlaps or precedes the run before it"
                if problem:
                    break
                at = end
                for j in range(begin, end):
                    mask[first + step * j] = True
        if problem:
            reasons.append(f"row {index}: {problem}")
    if reasons:
        more = f"; and {len(reasons) - 8} more rows" if len(reasons) > 8 else ""
        raise ValueError("invalid run-length rows: " + "; ".join(reasons[:8]) + more)
    mask_tensor = torch.tensor(kept, dtype=torch.bool).reshape(*rows.shape[:-1], k_blocks)
    return pack(mask_tensor)


# --- statistics -----------------------------------------------------------------------------


class _CounterChunk:
    """512 int64 counters on one device, handed out one by one and read back together."""

    SIZE = 512

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.values = torch.zeros(self.SIZE, dtype=torch.int64, device=device)
        self.used = 0


class _Scratch(threading.local):
    """Work space for counting, by device and stream: two threads or streams must not share it."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[torch.device, int], torch.Tensor] = {}


@dataclass(slots=True)
class Counter:
    """A tile count that may still live on a device; :meth:`SkipStatistics.to_records` reads it."""

    chunk: _CounterChunk
    index: int

    @property
    def slot(self) -> torch.Tensor:
        """The 0-dim int64 tensor to write the count into."""
        return self.chunk.values[self.index]


class CountReader:
    """Reads counters back: one wait and one copy per chunk of 512 counters."""

    def __init__(self) -> None:
        self._chunks: dict[int, tuple[_CounterChunk, list[int]]] = {}

    def __call__(self, value: int | Counter) -> int:
        """Return a count as a number; one that came after the first of its chunk may read 0."""
        if isinstance(value, int):
            return value
        key = id(value.chunk)
        if key not in self._chunks:
            if value.chunk.values.is_cuda:
                # counts may have been made on any stream
                torch.cuda.synchronize(value.chunk.values.device)
            self._chunks[key] = value.chunk, value.chunk.values.tolist()
        return self._chunks[key][1][value.index]


@dataclass(slots=True)
class _Record:
    total: int
    computed: int | Counter
    kept: int | Counter
    dense: bool
    threshold: float | None
    descending: bool | None


_INF = float("inf")
_FIELDS = ("generation", "step", "layer", "branch")
_TILES = ("tiles_total", "tiles_computed", "tiles_kept")


class SkipStatistics:
    """Tiles computed and kept, by generation, step, layer and branch.

    Key: (generation, step, layer, branch); recording a key again replaces it. Owner: a
    :class:`~liteattention_rocm.LiteAttention`, or whoever merges several. Lifetime: until
    :meth:`clear`, or until ``max_generations`` newer generations were recorded (one warning says
    so), so that a server that never asks does not grow for ever.

    Counts live on the device that made them and are read back only when asked for, so recording
    never synchronises a GPU. All methods may be called from several threads. Copies and pickles
    hold the numbers read so far, and share nothing with the original.
    """

    def __init__(self, max_generations: int = 64) -> None:
        if max_generations < 1:
            raise ValueError(f"max_generations must be >= 1, got {max_generations}")
        self._max_generations = max_generations
        # generation -> (layer, branch) -> step
        self._records: dict[Hashable, dict[tuple[str, str], dict[int, _Record]]] = {}
        self._chunks: dict[torch.device, _CounterChunk] = {}
        self._scratch = _Scratch()
        self._lock = threading.RLock()
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._fetch()
            records = {
                generation: {
                    key: {step: replace(entry) for step, entry in steps.items()}
                    for key, steps in by_layer.items()
                }
                for generation, by_layer in self._records.items()
            }
            return {
                "max_generations": self._max_generations,
                "records": records,
                "warned": self._warned,
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        SkipStatistics.__init__(self, state["max_generations"])
        self._records = state["records"]
        self._warned = state["warned"]

    # recording ------------------------------------------------------------------------------

    def counter(self, device: torch.device) -> Counter:
        """Return a fresh counter on ``device``; its slot is 0."""
        with self._lock:
            chunk = self._chunks.get(device)
            if chunk is None or chunk.used == chunk.SIZE:
                chunk = self._chunks[device] = _CounterChunk(device)
            chunk.used += 1
            return Counter(chunk, chunk.used - 1)

    def count_tiles(self, bitmap: torch.Tensor, counter: Counter) -> None:
        """Write the number of set bits of a contiguous bitmap into ``counter``.

        Allocates nothing once a thread and stream have counted a bitmap of this size or larger;
        does not synchronise.
        """
        stream = torch.cuda.current_stream(bitmap.device).cuda_stream if bitmap.is_cuda else 0
        key = (bitmap.device, stream)
        size = bitmap.numel()
        buffer = self._scratch.buffers.get(key)
        if buffer is None or buffer.numel() < 2 * size:
            with torch.inference_mode(False):
                buffer = torch.empty(2 * size, dtype=torch.int32, device=bitmap.device)
            self._scratch.buffers[key] = buffer
        _popcount_into(bitmap.view(-1), buffer[:size], buffer[size : 2 * size], counter.slot)

    def record(
        self,
        generation: Hashable,
        step: int,
        layer: str,
        branch: str,
        *,
        tiles_total: int,
        tiles_computed: int | Counter,
        tiles_kept: int | Counter,
        dense: bool = False,
        threshold: float | None = None,
        descending: bool | None = None,
    ) -> None:
        """Enter one call: all tiles, tiles computed, tiles kept for the next step.

        ``threshold`` (log2 units) and ``descending`` are None for dense steps.
        """
        entry = _Record(tiles_total, tiles_computed, tiles_kept, dense, threshold, descending)
        with self._lock:
            records = self._records.get(generation)
            if records is None:
                if len(self._records) >= self._max_generations:
                    self._drop_oldest()
                records = self._records[generation] = {}
            records.setdefault((layer, branch), {})[step] = entry

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._records))
        del self._records[oldest]
        if not self._warned:
            self._warned = True
            logger.warning(
                "skip statistics hold %d generations: dropped the oldest, %r, and will go on "
                "doing so; read and clear() them more often to keep all",
                self._max_generations,
                oldest,
            )

    def discard(self, generation: Hashable, layer: str, branch: str | None = None) -> None:
        """Forget the records of one layer (and branch, if given) of a generation."""
        with self._lock:
            records = self._records.get(generation, {})
            if branch is not None:
                records.pop((layer, branch), None)
                return
            for key in [key for key in records if key[0] == layer]:
                del records[key]

    def clear(self, generation: Hashable | None = None) -> None:
        """Forget one generation, or all of them when ``generation`` is None."""
        with self._lock:
            if generation is None:
                self._records.clear()
            else:
                self._records.pop(generation, None)

    # reading --------------------------------------------------------------------------------

    def __len__(self) -> int:
        with self._lock:
            return sum(1 for _ in self._entries())

    def _entries(self) -> Iterator[tuple[Hashable, int, str, str, _Record]]:
        """Every record: by generation, then by step, then in the order of first calls."""
        for generation, records in self._records.items():
            rows = [
                (generation, step, layer, branch, entry)
                for (layer, branch), steps in records.items()
                for step, entry in steps.items()
            ]
            yield from sorted(rows, key=lambda row: row[1])

    def _fetch(self) -> None:
        """Replace every device counter by its number."""
        number = CountReader()
        for *_, entry in self._entries():
            entry.computed = number(entry.computed)
            entry.kept = number(entry.kept)

    def to_records(self) -> list[dict[str, Any]]:
        """Return one JSON-friendly dict per call, by generation, then step.

        Keys: generation (a str unless it is a JSON scalar), step, layer, branch, tiles_total,
        tiles_computed, tiles_kept, sparsity (1 - computed / total), dense, threshold (log2 units;
        None for dense steps, the string "-inf" for -inf) and descending. Waits for the device.
        """
        with self._lock:
            self._fetch()
            return [
                {
                    "generation": _json_key(generation),
                    "step": step,
                    "layer": layer,
                    "branch": branch,
                    "tiles_total": entry.total,
                    "tiles_computed": entry.computed,
                    "tiles_kept": entry.kept,
                    "sparsity": _sparsity(entry.total, entry.computed),
                    "dense": entry.dense,
                    "threshold": "-inf" if entry.threshold == -_INF else entry.threshold,
                    "descending": entry.descending,
                }
                for generation, step, layer, branch, entry in self._entries()
            ]

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> SkipStatistics:
        """Rebuild statistics from :meth:`to_records` (also after a round trip through JSON).

        Records of the same generation, step, layer and branch are added up. Raises ``ValueError``
        naming every record that lacks a field.
        """
        return cls._from_rows(list(records))

    @classmethod
    def _from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> SkipStatistics:
        reasons = [
            f"record {i} lacks {', '.join(missing)}"
            for i, row in enumerate(rows)
            if (missing := [name for name in (*_FIELDS, *_TILES) if name not in row])
        ]
        if reasons:
            raise ValueError("invalid statistics records: " + "; ".join(reasons))
        result = cls(max_generations=max(1, len({row["generation"] for row in rows})))
        for row in rows:
            records = result._records.setdefault(row["generation"], {})
            steps = records.setdefault((row["layer"], row["branch"]), {})
            entry = steps.get(row["step"])
            threshold = row.get("threshold")
            fresh = _Record(
                row["tiles_total"],
                row["tiles_computed"],
                row["tiles_kept"],
                bool(row.get("dense", False)),
                None if threshold is None else float(threshold),
                row.get("descending"),
            )
            if entry is not None:
                fresh.total += entry.total
                fresh.computed = row["tiles_computed"] + entry.computed
                fresh.kept = row["tiles_kept"] + entry.kept
                fresh.dense = fresh.dense and entry.dense
            steps[row["step"]] = fresh
        return result

    def merge(self, *others: SkipStatistics) -> SkipStatistics:
        """Return new statistics with the tiles of this one and all others added key by key.

        Use it over ranks (each holds its own heads) or over repeated runs. Generations become
        their JSON form, see :meth:`to_records`.
        """
        rows = self.to_records()
        for other in others:
            rows += other.to_records()
        return self._from_rows(rows)

    def _grouped(self, fields: tuple[str, ...]) -> list[dict[str, Any]]:
        sums: dict[tuple[Any, ...], list[int]] = {}
        for row in self.to_records():
            entry = sums.setdefault(tuple(row[name] for name in fields), [0, 0, 0, 0])
            for i, name in enumerate(_TILES):
                entry[i] += row[name]
            entry[3] += 1
        return [
            {
                **dict(zip(fields, key, strict=True)),
                **dict(zip(_TILES, entry[:3], strict=True)),
                "sparsity": _sparsity(entry[0], entry[1]),
                "calls": entry[3],
            }
            for key, entry in sums.items()
        ]

    def by_step(self) -> list[dict[str, Any]]:
        """Return tiles and sparsity per step, ascending, over all generations and layers."""
        return sorted(self._grouped(("step",)), key=lambda row: int(row["step"]))

    def by_layer(self) -> list[dict[str, Any]]:
        """Return tiles and sparsity per layer, in the order of their first call."""
        return self._grouped(("layer",))

    def by_branch(self) -> list[dict[str, Any]]:
        """Return tiles and sparsity per branch, in the order of their first call."""
        return self._grouped(("branch",))

    def by_generation(self) -> list[dict[str, Any]]:
        """Return tiles and sparsity per generation, in the order of their first call."""
        return self._grouped(("generation",))

    def grid(self) -> tuple[list[str], list[int], list[list[float | None]]]:
        """Return layers, steps, and the sparsity of each layer (rows) in each step (columns).

        Over all generations and branches; None where a layer did not run in a step. Layers are in
        the order of their first call, steps ascend.
        """
        cells = {
            (row["layer"], row["step"]): row["sparsity"] for row in self._grouped(("layer", "step"))
        }
        layers = list(dict.fromkeys(layer for layer, _ in cells))
        steps = sorted({step for _, step in cells})
        return layers, steps, [[cells.get((layer, step)) for step in steps] for layer in layers]

    @property
    def sparsity(self) -> float:
        """1 - tiles computed / all tiles over everything recorded, dense steps included."""
        rows = self.to_records()
        total = sum(row["tiles_total"] for row in rows)
        return _sparsity(total, sum(row["tiles_computed"] for row in rows))


def _sparsity(total: int, computed: int | Counter) -> float:
    assert isinstance(computed, int)
    return 1.0 - computed / total if total else 0.0


def _json_key(generation: Hashable) -> str | int | float | bool | None:
    if generation is None or isinstance(generation, str | int | float | bool):
        return generation
    return repr(generation)


# --- picture --------------------------------------------------------------------------------


def picture(
    mask: torch.Tensor,
    path: str | PathLike[str],
    *,
    k_blocks: int | None = None,
    heads: Sequence[int] | None = None,
    title: str | None = None,
) -> Path:
    """Draw which tiles are kept (dark) and skipped (light), one panel per head; return the path.

    ``mask`` is a bitmap int32 [B, H, q_blocks, words] (then ``k_blocks`` is required) or a bool
    mask [B, H, q_blocks, K_blocks], [H, q_blocks, K_blocks] or [q_blocks, K_blocks]. Batch entries
    are drawn one below the other, ``heads`` picks heads (all by default). The file format follows
    the suffix (.png, .svg, .pdf). Needs matplotlib (extra "bench"), which is imported here only
    and drawn with its Agg canvas, so no display is needed. Raises ``ImportError`` without it and
    ``ValueError`` / ``TypeError`` with every reason for input it cannot draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'skiplist.picture needs matplotlib: pip install "liteattention-rocm[bench]"'
        ) from error

    kept = _picture_mask(mask, k_blocks)
    batch, n_heads = kept.shape[:2]
    chosen = list(range(n_heads)) if heads is None else list(heads)
    outside = [head for head in chosen if not 0 <= head < n_heads]
    if outside or not chosen or not kept.numel():
        raise ValueError(
            f"nothing to draw: {batch} x {n_heads} heads of {kept.shape[2]} x {kept.shape[3]} "
            f"tiles, heads asked for {chosen}"
        )
    figure = Figure(figsize=(3.2 * len(chosen), 3.2 * batch + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(batch, len(chosen), squeeze=False)
    colours = ListedColormap(["#e9ecf2", "#1f4e9c"])
    for b, n in ((b, n) for b in range(batch) for n in range(len(chosen))):
        panel = kept[b, chosen[n]]
        axis = axes[b][n]
        axis.imshow(
            panel.numpy(), cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest"
        )
        share = 1.0 - float(panel.float().mean())
        where = f"batch {b}, head {chosen[n]}" if batch > 1 else f"head {chosen[n]}"
        axis.set_title(f"{where}: {share:.1%} skipped", fontsize=9)
        axis.set_xlabel("K block", fontsize=8)
        axis.set_ylabel("q block", fontsize=8)
        axis.tick_params(labelsize=7)
    if title:
        figure.suptitle(title, fontsize=10)
    target = Path(path)
    figure.savefig(target, dpi=120)
    return target


def picture_by_step(
    statistics: SkipStatistics, path: str | PathLike[str], *, title: str | None = None
) -> Path:
    """Draw the share of skipped tiles by layer (rows) and step (columns); return the path.

    Cells without a call are hatched. The colours go from 0 to the largest share in the picture,
    which the bar beside it names. File format, needs and errors as :func:`picture`.
    """
    layers, steps, cells = statistics.grid()
    if not layers:
        raise ValueError("nothing to draw: no calls are recorded")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'skiplist.picture_by_step needs matplotlib: pip install "liteattention-rocm[bench]"'
        ) from error

    values = torch.tensor(
        [[float("nan") if cell is None else 100 * cell for cell in row] for row in cells]
    )
    figure = Figure(
        figsize=(2.6 + 0.22 * max(len(steps), 12), 1.4 + 0.22 * max(len(layers), 4)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.patch.set(hatch="///", edgecolor="#999999", facecolor="white")
    image = axis.imshow(
        values.numpy(), cmap="viridis", vmin=0, aspect="auto", interpolation="nearest"
    )
    axis.set_yticks(range(len(layers)), layers, fontsize=7)
    shown = range(0, len(steps), -(-len(steps) // 20))
    axis.set_xticks(list(shown), [str(steps[i]) for i in shown], fontsize=7)
    axis.set_xlabel("step", fontsize=8)
    figure.colorbar(image, ax=axis, label="skipped tiles, %")
    if title:
        axis.set_title(title, fontsize=10)
    target = Path(path)
    figure.savefig(target, dpi=120)
    return target


def _picture_mask(mask: torch.Tensor, k_blocks: int | None) -> torch.Tensor:
    if mask.dtype == torch.int32:
        if k_blocks is None:
            raise ValueError(
                "a bitmap does not say how many K blocks it has: give k_blocks, or a bool mask "
                "from skiplist.unpack"
            )
        mask = unpack(mask, k_blocks)
    elif mask.dtype != torch.bool:
        raise TypeError(f"picture takes an int32 bitmap or a bool mask, got {mask.dtype}")
    if not 2 <= mask.dim() <= 4:
        raise ValueError(
            "picture takes [B, H, q_blocks, K_blocks], [H, q_blocks, K_blocks] or "
            f"[q_blocks, K_blocks], got {tuple(mask.shape)}"
        )
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)).cpu()


__all__ = [
    "MAX_RUN_LENGTH_BLOCKS",
    "CountReader",
    "Counter",
    "SkipStatistics",
    "count",
    "from_run_length",
    "full",
    "pack",
    "picture",
    "picture_by_step",
    "range_reasons",
    "sparsity",
    "to_run_length",
    "token_ranges_to_blocks",
    "unpack",
    "words_for",
]
