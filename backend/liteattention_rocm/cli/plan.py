"""``liteattention-rocm plan``: what a call launches on an MI300X, without one.

Dense calls (``--shape``).

A workgroup computes a tile of 256 query rows of one head against all keys, and a round is as many
tiles as the GPU has compute units. What is left over for the last round ("tail") leaves units
idle; its tiles are then split along the keys into G parts that run on those units and are merged
(as in Flash-Decoding), if a cost model says that it pays: rounds of parts times K blocks of a
part, plus the merge. It declines where the tiles fill every round, where the last round is at
least 95 % full, and where the keys are too few to win 5 % of that round.

Times and speed-ups here are modelled, not measured. A K block takes a workgroup 4,230 clocks at
head dim 128 and 2,890 at 64, and its start and end as long as 2.6 and 3.2 of them, from the cycle
model (``liteattention-rocm model``). That two workgroups may share a compute unit at head dim 64 is
left out: it takes up to 9 % less. The clock is 1.1 GHz, at which published times put kernels that
use the matrix cores as much (``csrc/host/plan.h``). The merge takes 5 us to launch and moves 4
TB/s.

Ragged calls (``--ragged``), as language models make them, causal. Requests whose query rows times
the heads of a key head are 16 or fewer are decoded: one workgroup per request, key head and part of
the keys. The number of parts is chosen from bounds alone (requests, key heads, longest cache), by a
model of which no number was measured on an MI300X: 4 TB/s for all workgroups together, 64 KiB in
flight and 2 us of latency for each, two on a compute unit, 4 us to start and end one, 5 us for the
merge's launch and 0.1 us for each part that it reads. It splits only where that saves 5 %. Of an
fp8 cache (``--fp8``) half the bytes are read and half as many are in flight.

Longer requests are prefilled: a workgroup computes 256 packed query rows of a key head (128 from
head dim 192 on), or a part of their keys where such tiles leave compute units idle, as those of
short chunks behind a long prefix do. Parts are about equally long, so a tile that sees fewer keys
has fewer of them. Their number is chosen from bounds as well: each part goes to the first compute
unit that is free, at the cycle model's clocks for a K block (docs/model.md) and 14,000 to start and
end a workgroup, and the merge costs what it costs a decode.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .. import _core
from . import dimensions

#: A number that planning says all about itself; Python reads no int of thousands of digits.
_NUMBER = re.compile(r"\d+|-\d{1,20}")
#: What times that come from clocks assume.
_CLOCK = f"{_core.MODELLED_GIGAHERTZ:g} GHz"
_WHY_NOT = {
    "even": "the tiles fill every round",
    "nearly_full": f"the last round is at least {_core.TAIL_NEARLY_FULL:.0%} full",
    "too_short": "too few keys: the merge would cost more than the parts save",
}


def describe(
    batch: int,
    q_heads: int,
    q_len: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    kv_len: int | None = None,
    compute_units: int = _core.GFX942_COMPUTE_UNITS,
) -> dict[str, Any]:
    """Plan one dense call, ``q [B, q_len, Hq, D]`` against ``k, v [B, kv_len, Hkv, D]``.

    ``kv_heads`` and ``kv_len`` are those of the queries by default.

    Returns:
        JSON-friendly: ``shape``; ``tiles``; ``rounds`` (including the last) and
        ``last_round_occupancy`` (share of the compute units that it fills, 1 if it is full);
        ``splits`` (G, 1: none), ``split_tiles`` and ``declined`` (why not, None if split);
        ``modelled_ms``, ``modelled_unsplit_ms`` and their ratio ``modelled_speedup``;
        ``modelled_clock_ghz``, the clock that they assume;
        ``workspace_bytes`` of a dense call, ``lite_workspace_bytes`` of a LiteAttention step and
        ``budget_workspace_bytes`` of one with a budget; ``mapping`` of workgroups to tiles.

    Raises:
        ValueError: the kernels cannot take the shape; lists every reason.
    """
    kv_heads = q_heads if kv_heads is None else kv_heads
    kv_len = q_len if kv_len is None else kv_len
    _check_sizes(
        batch=batch, q_heads=q_heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len,
        head_dim=head_dim, compute_units=compute_units,
    )  # fmt: skip
    shape = _core.DenseShape(batch, q_heads, kv_heads, q_len, kv_len, head_dim)
    plan = _core.plan_dense(shape, compute_units, 0)
    tiles = batch * q_heads * -(-q_len // _core.GFX942_Q_BLOCK)
    tail = tiles % compute_units
    lite, weighs = (
        _core.plan_lite(shape, compute_units, budget).workspace_bytes for budget in (False, True)
    )
    return {
        "shape": {
            "batch": batch,
            "q_heads": q_heads,
            "kv_heads": kv_heads,
            "q_len": q_len,
            "kv_len": kv_len,
            "head_dim": head_dim,
        },
        "compute_units": compute_units,
        "tiles": tiles,
        "rounds": -(-tiles // compute_units),
        "last_round_occupancy": (tail or compute_units) / compute_units,
        "splits": plan.splits,
        "split_tiles": plan.tail_tiles,
        "declined": _WHY_NOT.get(plan.split.name),
        "modelled_ms": plan.modelled_us / 1000,
        "modelled_unsplit_ms": plan.modelled_unsplit_us / 1000,
        "modelled_speedup": plan.modelled_unsplit_us / plan.modelled_us,
        "modelled_clock_ghz": _core.MODELLED_GIGAHERTZ,
        "workspace_bytes": plan.workspace_bytes,
        "lite_workspace_bytes": lite,
        "budget_workspace_bytes": weighs,
        "mapping": plan.mapping.name,
    }


def describe_ragged(
    requests: int,
    q_heads: int,
    q_len: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    kv_len: int | None = None,
    window: int = 0,
    fp8: bool = False,
    compute_units: int = _core.GFX942_COMPUTE_UNITS,
) -> dict[str, Any]:
    """Plan one ragged call of ``requests`` requests, each with ``q_len`` rows and ``kv_len`` keys.

    ``kv_heads`` is ``q_heads`` and ``kv_len`` is ``q_len`` by default; ``window`` 0 is none;
    ``fp8``: of the cache, else 16 bits.

    Returns:
        JSON-friendly: ``shape``; ``decode`` and ``prefill``, each None if it is not launched or
        ``workgroups``, ``merge_workgroups`` (0: no merge), ``splits`` (parts of a request or tile
        at most), ``declined`` (why it is not split, None if it is), ``modelled_us``,
        ``modelled_unsplit_us`` and ``modelled_speedup``; of decode also ``kv_bytes`` (K and V,
        each read once) and ``modelled_tb_per_s``; ``modelled_clock_ghz``, the clock that times of
        prefill assume; ``workspace_bytes``.

    Raises:
        ValueError: the kernels cannot take the shape; lists every reason.
    """
    kv_heads = q_heads if kv_heads is None else kv_heads
    kv_len = q_len if kv_len is None else kv_len
    seen = window if window < kv_len else 0
    _check_sizes(
        requests=requests, q_heads=q_heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len,
        head_dim=head_dim, window=seen, compute_units=compute_units,
    )  # fmt: skip
    shape = _core.RaggedShape(
        requests, requests * q_len, q_heads, kv_heads, head_dim, 0, q_len, kv_len, q_len, seen, fp8
    )
    plan = _core.plan_ragged(shape, compute_units, 0)
    decode = _stage(plan.decode, "requests and key heads fill the GPU")
    if decode:
        decode["kv_bytes"] = int(plan.kv_bytes)
        decode["modelled_tb_per_s"] = plan.kv_bytes / plan.decode.modelled_us / 1e6
    return {
        "shape": {
            "requests": requests,
            "q_heads": q_heads,
            "kv_heads": kv_heads,
            "q_len": q_len,
            "kv_len": kv_len,
            "head_dim": head_dim,
            "window": window,
            "fp8": fp8,
        },
        "compute_units": compute_units,
        "decode": decode,
        "prefill": _stage(plan.prefill, "its tiles fill the GPU"),
        "modelled_clock_ghz": _core.MODELLED_GIGAHERTZ,
        "workspace_bytes": plan.workspace_bytes,
    }


def _stage(stage: _core.RaggedStage, full: str) -> dict[str, Any] | None:
    """A kernel of a ragged call; ``full``: why it is not split where it has work enough."""
    if stage.grid == 0:
        return None
    why_not = {"nearly_full": full, "too_short": "no number of parts would save 5 %"}
    return {
        "workgroups": stage.grid,
        "merge_workgroups": stage.merge_grid,
        "splits": stage.splits,
        "declined": None if stage.splits > 1 else why_not[stage.split.name],
        "modelled_us": stage.modelled_us,
        "modelled_unsplit_us": stage.modelled_unsplit_us,
        "modelled_speedup": stage.modelled_unsplit_us / stage.modelled_us,
    }


def _check_sizes(**sizes: int) -> None:
    """Raise ``ValueError`` for every number that is no 32-bit one, of which no plan can be made."""
    reasons = [
        f"{name} must be from 0 to 2^31 - 1, got {size}"
        for name, size in sizes.items()
        if abs(size) > dimensions.MOST
    ]
    if reasons:
        raise ValueError("no plan for this call: " + "; ".join(reasons))


def command(
    shape: Annotated[
        str | None,
        typer.Option(help="Queries of a dense call.", metavar="B,Hq,Sq,D", show_default=False),
    ] = None,
    ragged: Annotated[
        str | None,
        typer.Option(
            help="Requests of a ragged call and the rows of each; Sq 1 is decode.",
            metavar="R,Hq,Sq,D",
            show_default=False,
        ),
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key heads; Hq by default.", show_default=False)
    ] = None,
    kv_len: Annotated[int | None, typer.Option(help="Keys; Sq by default.")] = None,
    window: Annotated[int, typer.Option(help="Sliding window of a ragged call; 0: none.")] = 0,
    fp8: Annotated[bool, typer.Option(help="A ragged call's cache is fp8.")] = False,
    compute_units: Annotated[
        int, typer.Option(help="Of the GPU, or of a partition of it.")
    ] = _core.GFX942_COMPUTE_UNITS,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a call launches on an MI300X: rounds, parts, workspace (modelled)."""
    if (shape is None) == (ragged is None):
        raise typer.BadParameter("give one of --shape and --ragged", param_hint="--shape")
    option, given = ("--shape", shape) if shape is not None else ("--ragged", ragged)
    parts = [part.strip() for part in (given or "").split(",")]
    reasons = []
    large = [part for part in parts if part.isdecimal() and dimensions.too_large(part)]
    if len(parts) != 4 or not all(_NUMBER.fullmatch(part) for part in parts):
        letter = "B" if option == "--shape" else "R"
        reasons.append(
            f"{option} must be four whole numbers {letter},Hq,Sq,D, none negative, got {given!r}"
        )
    elif large:
        reasons.append(f"{option}: numbers must be at most 2^31 - 1, got {', '.join(large)}")
    sized = not reasons
    if option == "--shape" and (window or fp8):
        reasons.append("a window and an fp8 cache are for ragged calls")
    common: dict[str, Any] = {
        "kv_heads": kv_heads,
        "kv_len": kv_len,
        "compute_units": compute_units,
    }
    found: dict[str, Any] = {}
    try:
        if sized:
            first, q_heads, q_len, head_dim = map(int, parts)
            if option == "--ragged":
                common |= {"window": window, "fp8": fp8}
                found = describe_ragged(first, q_heads, q_len, head_dim, **common)
            else:
                found = describe(first, q_heads, q_len, head_dim, **common)
    except ValueError as error:
        reasons.append(str(error))
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    if print_json:
        typer.echo(json.dumps(found))
        return
    table = Table(show_header=False, box=None)
    for row in _ragged_rows(found) if option == "--ragged" else _dense_rows(found):
        table.add_row(*row)
    Console().print(table)


def _dense_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    units = found["compute_units"]
    split = f"G = {found['splits']} parts for each of {found['split_tiles']} tiles"
    return [
        ("tiles of 256 query rows", f"{found['tiles']:,}"),
        ("rounds", f"{found['rounds']:,} of {units} workgroups"),
        ("last round", f"{found['last_round_occupancy']:.1%} of the compute units"),
        ("tail split", f"none: {found['declined']}" if found["declined"] else split),
        ("speed-up of the split", f"{found['modelled_speedup']:.2f}x (modelled)"),
        ("time", f"{found['modelled_ms']:.3f} ms (modelled at {_CLOCK})"),
        ("workspace", _bytes(found["workspace_bytes"])),
        ("workspace, LiteAttention", _bytes(found["lite_workspace_bytes"])),
        ("workspace, with a budget", _bytes(found["budget_workspace_bytes"])),
        ("mapping", found["mapping"].replace("_", " ")),
    ]


def _ragged_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, whole in (("decode", "request and key head"), ("prefill", "tile")):
        stage = found[name]
        if stage is None:
            continue
        split = f"{stage['splits']} parts of each {whole} at most"
        clock = f" at {_CLOCK}" if name == "prefill" else ""  # decode goes by HBM's rate
        rows += [
            (name, f"{stage['workgroups']:,} workgroups at most"),
            ("  split", f"none: {stage['declined']}" if stage["declined"] else split),
            ("  merge", f"{stage['merge_workgroups']:,} workgroups"),
            ("  speed-up of the split", f"{stage['modelled_speedup']:.2f}x (modelled)"),
            ("  time", f"{stage['modelled_us']:.1f} us (modelled{clock})"),
        ]
        if name == "decode":
            rows += [
                ("  K and V", _bytes(stage["kv_bytes"])),
                ("  rate", f"{stage['modelled_tb_per_s']:.2f} TB/s of 5.3 (modelled)"),
            ]
    return [*rows, ("workspace", _bytes(found["workspace_bytes"]))]


def _bytes(count: int | None) -> str:
    return "not supported" if count is None else f"{count:,} bytes"
