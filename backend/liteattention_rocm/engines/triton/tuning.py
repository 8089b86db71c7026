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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from ... import json_text
from ...collect_env import installed_version
from ...contract import DenseRequest, RaggedRequest
from .compiled_tiles import HopperTile, PlainTile

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "LITEATTENTION_CACHE_DIR"

Tile = HopperTile | PlainTile
_KINDS: dict[str, type[HopperTile] | type[PlainTile]] = {
    "hopper": HopperTile, "plain": PlainTile, "prompts": HopperTile
}  # fmt: skip
#: Orders of work: tiles of one length, and causal ones, which differ.
_ORDERS: dict[bool, tuple[dict[str, bool], ...]] = {
    False: ({"persistent": False}, {"persistent": True}, {"counted": True}),
    True: (
        {"persistent": False}, {"persistent": True}, {"persistent": False, "abreast": True},
        {"counted": True, "abreast": True},
    ),
}  # fmt: skip

#: Waits for products: before the maxima, behind them, and with the exponentials behind the wait.
_WAITS: tuple[dict[str, bool], ...] = (
    {}, {"late_wait": True}, {"late_wait": True, "late_exp": True}
)  # fmt: skip


def shape_class(request: DenseRequest | RaggedRequest) -> str:
    """Name of what requests must share to share a tile: kind of call and orders of its sizes."""
    dtype = str(request.dtype).removeprefix("torch.")
    name = f"{dtype} d{request.head_dim} {_mask(request)}"
    if isinstance(request, RaggedRequest):
        stored = "paged" if request.page_size else "packed"
        sizes = f"2^{_order(request.rows)} rows 2^{_order(request.max_kv_len)}"
        return f"{name} {stored} {request.q_heads} heads {sizes}"
    heads = _order(request.batch * request.q_heads)
    return f"{name} 2^{heads} heads 2^{_order(max(request.q_len, request.kv_len))}"


def _mask(request: DenseRequest | RaggedRequest) -> str:
    """Which keys a row sees, as part of a class's name: how long tiles are depends on it."""
    if isinstance(request, RaggedRequest) and request.lookahead:
        return "lookahead"
    return "causal" if _causal(request) else "full"


def _causal(request: DenseRequest | RaggedRequest) -> bool:
    return request.lookahead == 0 if isinstance(request, RaggedRequest) else request.causal


def _order(size: int) -> int:
    """Exponent of the power of two that ``size`` does not exceed."""
    return max(0, int(size - 1).bit_length())


def space(kind: str, head_dim: int, causal: bool = False) -> list[Tile]:
    """All tiles that :func:`tune` tries, of the "hopper", the "prompts" or the "plain" kernel.

    Registers and shared memory bound them: more rows or stages spill or do not fit.
    """
    flags = (False, True)
    if kind == "plain":
        return [
            PlainTile(block_m, 64, warps, stages)
            for block_m, warps, stages in itertools.product((64, 128), (4, 8), (2, 3, 4))
        ]
    orders = _ORDERS[causal]
    if kind == "prompts":
        keys = 128 if head_dim <= 128 else 64
        stages = 3 if head_dim <= 64 else 2
        two = [HopperTile(2, keys, stages, 232, 40, turns=False, late_wait=late) for late in flags]
        three = [HopperTile(3, keys, stages, 160, 32, late_wait=late) for late in flags]
        orders = tuple(order for order in _ORDERS[True] if order != {"persistent": True})
    else:
        two = [
            HopperTile(2, 128, stages, *registers, turns, **wait)
            for stages, registers, turns, wait in itertools.product(
                (2,) if head_dim == 128 else (2, 3), ((232, 40), (240, 24)), flags, _WAITS
            )
        ]
        three = [
            HopperTile(3, 128, stages, 160, 32, turns, late_wait=late)
            for stages, turns, late in itertools.product((2, 3), flags, flags)
        ]
    return [
        replace(tile, **order)
        for tile in ([*two, *three] if head_dim <= 64 else two)
        for order in orders
    ]


def table_path(device: torch.device) -> Path:
    """Where the table of a device lies: ``LITEATTENTION_CACHE_DIR`` or the user's cache folder."""
    folder = os.environ.get(DIRECTORY_VARIABLE)
    root = Path(folder) if folder else Path.home() / ".cache" / "liteattention_rocm"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    parts = (name, "triton", installed_version("triton"), installed_version("liteattention-rocm"))
    return root / ("tiles-" + re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(parts)) + ".json")


def tuned(kind: str, request: DenseRequest | RaggedRequest) -> Tile | None:
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
        return {key: _tile(key, entry) for key, entry in _entries(Path(path)).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("the table of tiles %s is unusable, delete it: %s", path, error)
        return {}


def _entries(path: Path) -> dict[str, Any]:
    """Read the entries of a table by key, as they stand.

    Raises:
        FileNotFoundError: there is no table.
        ValueError: it is no JSON, or no object.
    """
    found = json_text.read(path)
    if not isinstance(found, dict):
        raise ValueError("it is no object of entries")
    return found


def _tile(key: str, entry: Any) -> Tile:
    """Tile of an entry: flags, and numbers from 1 on."""
    tile = _KINDS[key.partition(" ")[0]](**entry["tile"])
    for field in fields(tile):
        value = getattr(tile, field.name)
        if type(value).__name__ != field.type or value < (field.type == "int"):
            raise ValueError(f"{key}: {field.name} is {value!r}")
    return tile


def tune(
    kind: str,
    request: DenseRequest | RaggedRequest,
    measure: Callable[[Tile], float],
    candidates: Sequence[Tile] | None = None,
    rounds: int = 7,
    beside: Mapping[str, Callable[[], float]] | None = None,
) -> dict[Tile | str, float]:
    """Measure every candidate and keep the fastest for the request's class.

    Kinds of calls that this process has made already keep the tile they have.

    Args:
        kind: "hopper", "prompts" or "plain".
        request: the request to measure.
        measure: milliseconds of one call with a tile; called in random turns, and once before
            (compilation). A candidate that raises ``RuntimeError`` is left out.
        candidates: tiles to try; :func:`space` by default.
        rounds: calls of each.
        beside: by name, what gives the milliseconds of other implementations in the same turns.

    Returns:
        Median milliseconds by candidate or name, fastest first.

    Raises:
        RuntimeError: no candidate ran; says what the last one raised.
    """
    tiles = list(
        space(kind, request.head_dim, _causal(request)) if candidates is None else candidates
    )
    calls: dict[Tile | str, Callable[[], float]] = {}
    last: RuntimeError | None = None
    for tile in tiles:
        try:
            measure(tile)
            calls[tile] = functools.partial(measure, tile)
        except RuntimeError as error:
            last = error
            logger.info("%s cannot run: %s", tile, error)
    if not calls:
        raise RuntimeError(f"no tile of the {kind} kernel runs here: {last}")
    calls.update(beside or {})
    times: dict[Tile | str, list[float]] = {name: [] for name in calls}
    turns = random.Random(0)
    for _ in range(rounds):
        order = list(calls)
        turns.shuffle(order)
        for name in order:
            times[name].append(calls[name]())
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    ranked = dict(sorted(medians.items(), key=lambda item: item[1]))
    best = next(tile for tile in ranked if not isinstance(tile, str))
    _store(table_path(request.device), f"{kind} {shape_class(request)}", best, ranked[best])
    return ranked


def _store(path: Path, key: str, tile: Tile, milliseconds: float) -> None:
    """Put an entry into a table; another process sees the old or the new file, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Any] = {}
    if path.exists():
        try:
            entries = _entries(path)
        except ValueError:
            logger.warning("replacing the damaged table of tiles %s", path)
    entries[key] = {"tile": asdict(tile), "ms": milliseconds}
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".json", delete=False, encoding="utf-8"
    ) as file:
        json.dump(entries, file, indent=1, sort_keys=True)
    os.replace(file.name, path)
    _table.cache_clear()
