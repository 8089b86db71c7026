"""Tiles measured on a device: the space that is searched, and the table on disk.

Nothing is tuned while a program runs: :func:`tune` is called by ``liteattention-rocm bench tune``
and writes a table that later processes read once. A table belongs to one device, one version of
Triton and one of this package; without one, the shipped tiles of :mod:`.tiles` hold.

No candidate changes a result: blocks of keys are as wide as the shipped ones, so that LiteAttention
at threshold -inf stays equal to dense attention bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import random
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...contract import DenseRequest
from .launch import HopperTile, PlainTile

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "LITEATTENTION_CACHE_DIR"

Tile = HopperTile | PlainTile
_KINDS: dict[str, type[HopperTile] | type[PlainTile]] = {"hopper": HopperTile, "plain": PlainTile}


def shape_class(request: DenseRequest) -> str:
    """Name of what requests must share to share a tile: kind of call and order of its length."""
    length = max(request.q_len, request.kv_len)
    order = max(0, int(length - 1).bit_length())
    dtype = str(request.dtype).removeprefix("torch.")
    return f"{dtype} d{request.head_dim} {'causal' if request.causal else 'full'} 2^{order}"


def space(kind: str, head_dim: int) -> list[Tile]:
    """All tiles that :func:`tune` tries, of the "hopper" or the "plain" kernel.

    Registers and shared memory bound them: more rows or stages spill or do not fit.
    """
    flags = (False, True)
    if kind == "plain":
        return [
            PlainTile(block_m, 64, warps, stages)
            for block_m, warps, stages in itertools.product((64, 128), (4, 8), (2, 3, 4))
        ]
    two = [
        HopperTile(2, 128, stages, 232, 40, turns, persistent)
        for stages, turns, persistent in itertools.product(
            (2,) if head_dim == 128 else (2, 3), flags, flags
        )
    ]
    if head_dim == 128:
        return [*two]
    three = [
        HopperTile(3, 128, stages, 160, 32, turns, persistent)
        for stages, turns, persistent in itertools.product((2, 3), flags, flags)
    ]
    return [*two, *three]


def table_path(device: torch.device) -> Path:
    """Where the table of a device lies: ``LITEATTENTION_CACHE_DIR`` or the user's cache folder."""
    folder = os.environ.get(DIRECTORY_VARIABLE)
    root = Path(folder) if folder else Path.home() / ".cache" / "liteattention_rocm"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    parts = (name, "triton", _version("triton"), _version("liteattention-rocm"))
    return root / ("tiles-" + re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(parts)) + ".json")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "source"


def tuned(kind: str, request: DenseRequest) -> Tile | None:
    """Tile that was measured best for the class of a request, None if none was."""
    folder = os.environ.get(DIRECTORY_VARIABLE)
    return _table(_path(request.device, folder)).get(f"{kind} {shape_class(request)}")


@functools.cache
def _path(device: torch.device, folder: str | None) -> str:
    """Same as :func:`table_path`, found once: asking for versions takes longer than a launch."""
    return str(table_path(device))


@functools.cache
def _table(path: str) -> dict[str, Tile]:
    """Read a table, once per process; a damaged one is reported and ignored."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        return {
            key: _KINDS[key.split()[0]](**entry["tile"]) for key, entry in dict(entries).items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("the table of tiles %s is unusable, delete it: %s", path, error)
        return {}


def tune(
    kind: str,
    request: DenseRequest,
    measure: Callable[[Tile], float],
    candidates: Sequence[Tile] | None = None,
    rounds: int = 7,
) -> dict[Tile, float]:
    """Measure every candidate and keep the fastest for the request's class.

    Kinds of calls that this process has made already keep the tile they have.

    Args:
        kind: "hopper" or "plain".
        request: the request to measure.
        measure: milliseconds of one call with a tile; called in random turns, and once before
            (compilation). A candidate that raises ``RuntimeError`` is left out.
        candidates: tiles to try; :func:`space` by default.
        rounds: calls of each.

    Returns:
        Median milliseconds by candidate, fastest first.

    Raises:
        RuntimeError: no candidate ran; says what the last one raised.
    """
    tiles = list(space(kind, request.head_dim) if candidates is None else candidates)
    times: dict[Tile, list[float]] = {}
    last: RuntimeError | None = None
    for tile in tiles:
        try:
            measure(tile)
            times[tile] = []
        except RuntimeError as error:
            last = error
            logger.info("%s cannot run: %s", tile, error)
    if not times:
        raise RuntimeError(f"no tile of the {kind} kernel runs here: {last}")
    turns = random.Random(0)
    for _ in range(rounds):
        order = list(times)
        turns.shuffle(order)
        for tile in order:
            times[tile].append(measure(tile))
    medians = {tile: statistics.median(taken) for tile, taken in times.items()}
    ranked = dict(sorted(medians.items(), key=lambda item: item[1]))
    best = next(iter(ranked))
    _store(table_path(request.device), f"{kind} {shape_class(request)}", best, ranked[best])
    return ranked


def _store(path: Path, key: str, tile: Tile, milliseconds: float) -> None:
    """Put an entry into a table; another process sees the old or the new file, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Any] = {}
    if path.exists():
        try:
            entries = dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            logger.warning("replacing the damaged table of tiles %s", path)
    entries[key] = {"tile": asdict(tile), "ms": milliseconds}
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".json", delete=False, encoding="utf-8"
    ) as file:
        json.dump(entries, file, indent=1, sort_keys=True)
    os.replace(file.name, path)
    _table.cache_clear()
