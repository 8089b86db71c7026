"""Tiles computed and kept, by generation, step, layer and branch."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .counting import Count, CountReader

logger = logging.getLogger(__name__)

#: Records that may wait to be entered.
MOST_PENDING = 4096

_FIELDS = ("generation", "step", "layer", "branch")
_TILES = ("tiles_total", "tiles_computed", "tiles_kept")


class Record(NamedTuple):
    """One call. ``descending`` is None for dense steps, and so are both of the limits.

    Of these, ``threshold`` (log2 units) and ``budget`` (share of mass, a tuple where heads have
    their own), a step has one.
    """

    generation: Hashable
    step: int
    layer: str
    branch: str
    tiles_total: int
    tiles_computed: Count
    tiles_kept: Count
    dense: bool = False
    threshold: float | None = None
    descending: bool | None = None
    budget: float | tuple[float, ...] | None = None


#: By generation, then layer and branch, then step.
_Records = dict[Hashable, dict[tuple[str, str], dict[int, Record]]]


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
        #: Records in the order of their calls, as tuples; :meth:`enter` sorts them in.
        self.pending: deque[tuple[Any, ...]] = deque()
        self._records: _Records = {}
        self._lock = threading.RLock()
        self._warned = False

    def __getstate__(self) -> tuple[Any, ...]:
        return self._max_generations, self._read(), self._warned

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        SkipStatistics.__init__(self, state[0])
        _, self._records, self._warned = state

    # recording ------------------------------------------------------------------------------

    def record(self, *fields: Any, **more: Any) -> None:
        """Enter one call; arguments as in :class:`Record`."""
        self.pending.append(Record(*fields, **more))
        self.enter()

    def enter(self) -> None:
        """Sort in what is pending; whoever appends does it once there are ``MOST_PENDING``."""
        with self._lock:
            while self.pending:
                entry = Record._make(self.pending.popleft())
                records = self._records.get(entry.generation)
                if records is None:
                    if len(self._records) >= self._max_generations:
                        self._drop_oldest()
                    records = self._records[entry.generation] = {}
                records.setdefault((entry.layer, entry.branch), {})[entry.step] = entry

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

    def discard(
        self, generation: Hashable, layer: str, branch: str | None = None, first: int = 0
    ) -> None:
        """Forget the records of one layer (and branch, if given) of a generation.

        Only those of steps from ``first`` on.
        """
        with self._lock:
            self.enter()
            records = self._records.get(generation, {})
            for key, steps in list(records.items()):
                if key[0] == layer and branch in (None, key[1]):
                    for step in [step for step in steps if step >= first]:
                        del steps[step]
                    if not steps:
                        del records[key]

    def clear(self, generation: Hashable | None = None) -> None:
        """Forget one generation, or all of them when ``generation`` is None."""
        with self._lock:
            self.enter()
            if generation is None:
                self._records.clear()
            else:
                self._records.pop(generation, None)

    # reading --------------------------------------------------------------------------------

    def __len__(self) -> int:
        with self._lock:
            self.enter()
            return sum(map(len, self._series()))

    def _series(self) -> Iterator[dict[int, Record]]:
        """The records of each generation, layer and branch, by step."""
        return (steps for records in self._records.values() for steps in records.values())

    def _read(self) -> _Records:
        """Return a copy of the records so far, with numbers for counters of a device.

        It waits for the device without the lock, so that calls go on.
        """
        with self._lock:
            self.enter()
            records = {
                generation: {key: dict(steps) for key, steps in by_layer.items()}
                for generation, by_layer in self._records.items()
            }
        number = CountReader()
        found = []
        for generation, by_layer in records.items():
            for key, steps in by_layer.items():
                for step, entry in steps.items():
                    computed, kept = entry.tiles_computed, entry.tiles_kept
                    if not (isinstance(computed, int) and isinstance(kept, int)):
                        steps[step] = entry._replace(
                            tiles_computed=number(computed), tiles_kept=number(kept)
                        )
                        found.append((generation, key, entry, steps[step]))
        with self._lock:
            for generation, key, entry, read in found:
                held = self._records.get(generation, {}).get(key, {})
                if held.get(entry.step) is entry:
                    held[entry.step] = read
        return records

    def to_records(self) -> list[dict[str, Any]]:
        """Return one JSON-friendly dict per call, by generation, then step.

        Keys: generation (a str unless it is a JSON scalar), step, layer, branch, tiles_total,
        tiles_computed, tiles_kept, sparsity (1 - computed / total), dense, threshold (log2 units;
        None for dense steps and those with a budget, the string "-inf" for -inf), descending and
        budget (share of mass; by head, a list; or None). Waits for the device.
        """
        return [
            {
                **entry._asdict(),
                "generation": _json_key(entry.generation),
                "sparsity": _sparsity(entry.tiles_total, entry.tiles_computed),
                "threshold": "-inf" if entry.threshold == float("-inf") else entry.threshold,
                "budget": _json_budget(entry.budget),
            }
            for records in self._read().values()
            for entry in sorted(
                (entry for steps in records.values() for entry in steps.values()),
                key=lambda entry: entry.step,
            )
        ]

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> SkipStatistics:
        """Rebuild statistics from :meth:`to_records` (also after a round trip through JSON).

        Records of the same generation, step, layer and branch are added up; limits and direction
        are those of the last one that is not dense. Raises ``ValueError`` naming every record that
        lacks a field.
        """
        rows = list(records)
        reasons = [
            f"record {i} lacks {', '.join(missing)}"
            for i, row in enumerate(rows)
            if (missing := [name for name in (*_FIELDS, *_TILES) if name not in row])
        ]
        if reasons:
            raise ValueError("invalid statistics records: " + "; ".join(reasons))
        result = cls(max_generations=max(1, len({row["generation"] for row in rows})))
        for row in rows:
            fresh = Record(**{name: row[name] for name in Record._fields if name in row})
            if fresh.threshold is not None:
                fresh = fresh._replace(threshold=float(fresh.threshold))
            if isinstance(fresh.budget, list):
                fresh = fresh._replace(budget=tuple(fresh.budget))
            by_layer = result._records.setdefault(fresh.generation, {})
            steps = by_layer.setdefault((fresh.layer, fresh.branch), {})
            before = steps.get(fresh.step)
            if before is not None:
                added = {name: getattr(before, name) + row[name] for name in _TILES}
                skipping = before if fresh.dense else fresh  # a dense record has no limits
                fresh = skipping._replace(**added, dense=fresh.dense and before.dense)
            steps[fresh.step] = fresh
        return result

    def merge(self, *others: SkipStatistics) -> SkipStatistics:
        """Return new statistics with the tiles of this one and all others added key by key.

        Use it over ranks (each holds its own heads) or over repeated runs. Generations become
        their JSON form, see :meth:`to_records`.
        """
        return self.from_records(row for one in (self, *others) for row in one.to_records())

    def _grouped(self, *fields: str) -> list[dict[str, Any]]:
        sums: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in self.to_records():
            key = {name: row[name] for name in fields}
            group = sums.setdefault(
                tuple(key.values()), {**key, **dict.fromkeys((*_TILES, "sparsity", "calls"), 0)}
            )
            for name in _TILES:
                group[name] += row[name]
            group["calls"] += 1
            group["sparsity"] = _sparsity(group["tiles_total"], group["tiles_computed"])
        return list(sums.values())

    def by_step(self) -> list[dict[str, Any]]:
        """Return tiles and sparsity per step, ascending, over all generations and layers."""
        return sorted(self._grouped("step"), key=lambda row: int(row["step"]))

    def by_layer(self) -> list[dict[str, Any]]:
        """Return tiles and sparsity per layer, in the order of their first call."""
        return self._grouped("layer")

    def by_branch(self) -> list[dict[str, Any]]:
        """Return tiles and sparsity per branch, in the order of their first call."""
        return self._grouped("branch")

    def by_generation(self) -> list[dict[str, Any]]:
        """Return tiles and sparsity per generation, in the order of their first call."""
        return self._grouped("generation")

    def grid(self) -> tuple[list[str], list[int], list[list[float | None]]]:
        """Return layers, steps, and the sparsity of each layer (rows) in each step (columns).

        Over all generations and branches; None where a layer did not run in a step. Layers are in
        the order of their first call, steps ascend.
        """
        cells = {
            (row["layer"], row["step"]): row["sparsity"] for row in self._grouped("layer", "step")
        }
        layers = list(dict.fromkeys(layer for layer, _ in cells))
        steps = sorted({step for _, step in cells})
        return layers, steps, [[cells.get((layer, step)) for step in steps] for layer in layers]

    @property
    def sparsity(self) -> float:
        """1 - tiles computed / all tiles over everything recorded, dense steps included."""
        everything = self._grouped()
        return everything[0]["sparsity"] if everything else 0.0


def _sparsity(total: int, computed: Count) -> float:
    assert isinstance(computed, int)
    return 1.0 - computed / total if total else 0.0


def _json_budget(budget: float | tuple[float, ...] | None) -> float | list[float] | None:
    return list(budget) if isinstance(budget, tuple) else budget


def _json_key(generation: Hashable) -> str | int | float | bool | None:
    if generation is None or isinstance(generation, str | int | float | bool):
        return generation
    return repr(generation)
