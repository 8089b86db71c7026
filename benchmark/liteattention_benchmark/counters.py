"""Hardware counters of the same cells and contenders, where a profiler is on the machine.

A child process makes every call of a configuration once more, each between two marks (a kernel
that spins for a cycle), under ``ncu`` on NVIDIA or ``rocprofv3`` on AMD; what the profiler saw
between two marks belongs to that call. Times under a profiler mean nothing and are not kept.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import cells, contenders, kernels, peers

#: Name of the kernel behind ``torch.cuda._sleep``.
_MARK = "spin_kernel"
#: Share of the time in which the matrix units work; the names of chips differ.
_TENSOR_METRICS = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
)
_TIME_METRIC = "gpu__time_duration.sum"

#: (kind of cell, cell, contender), as in :class:`kernels.Row`.
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Seen:
    """A kernel as the profiler saw it: nanoseconds and per cent of the time in matrix units."""

    name: str
    nanoseconds: float
    matrix_percent: float | None


def profiler() -> str:
    """Name the program that counts on this machine's GPUs."""
    return "ncu" if torch.version.hip is None else "rocprofv3"


def problem() -> str | None:
    """Why nothing can be counted, None if it can be."""
    tool = profiler()
    return None if shutil.which(tool) else f"{tool} is not on this machine"


def collect(
    config: Path,
    fa3_library: Path | None = None,
    more: Sequence[str] = (),
    run: Callable[..., Any] = subprocess.run,
) -> tuple[dict[Key, float], str]:
    """Profile every contender of every cell once.

    Returns:
        The share of the time in which the matrix units work, per cent, by key, weighted over the
        kernels of a call by their time; and why there is none, or "".
    """
    tool = profiler()
    program = shutil.which(tool)
    if program is None:
        return {}, problem() or ""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        child = [sys.executable, "-m", __name__, str(config), str(keys)]
        child += ["" if fa3_library is None else str(fa3_library), *more]
        # Triton's kernels must be found by the child in the state in which they are compiled here.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            if tool == "ncu":
                seen = _ncu(program, child, environment, run)
            else:
                seen = _rocprof(program, child, environment, Path(folder), run)
            return join(json.loads(keys.read_text(encoding="utf-8")), seen), ""
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return {}, f"{tool}: {' '.join(str(error).split())[:200]}"


def _ncu(
    program: str, child: list[str], environment: Mapping[str, str], run: Callable[..., Any]
) -> list[Seen]:
    known = run([program, "--query-metrics"], capture_output=True, text=True, check=True).stdout
    metric = next((name for name in _TENSOR_METRICS if name.split(".")[0] in known), None)
    if metric is None:
        raise ValueError("it knows no counter of the matrix units of this chip")
    command = [program, "--metrics", f"{metric},{_TIME_METRIC}", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--csv", "--page", "raw", *child]
    done = run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise ValueError(f"it ended with {done.returncode}: {(done.stderr or done.stdout)[-200:]}")
    return parse_ncu(done.stdout, metric)


def parse_ncu(text: str, metric: str) -> list[Seen]:
    """Read ``ncu --csv --page raw``: a line per kernel, a column per counter, units below names.

    Raises:
        ValueError: there is no such table.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        raise ValueError("it printed no table")
    rows = csv.DictReader(io.StringIO("\n".join(lines[starts[0] :])))
    found = []
    scale = 1.0
    for row in rows:
        if not row["ID"]:  # the line of units
            scale = {"ns": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6}.get(row[_TIME_METRIC], 1.0)
            continue
        found.append(
            Seen(row["Kernel Name"], scale * _number(row[_TIME_METRIC]), _number(row[metric]))
        )
    return found


def _rocprof(
    program: str,
    child: list[str],
    environment: Mapping[str, str],
    folder: Path,
    run: Callable[..., Any],
) -> list[Seen]:
    command = [program, "--pmc", "MfmaUtil", "--output-format", "csv", "-d", str(folder)]
    done = run([*command, "--", *child], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise ValueError(f"it ended with {done.returncode}: {(done.stderr or done.stdout)[-200:]}")
    tables = sorted(folder.rglob("*counter_collection.csv"))
    if not tables:
        raise ValueError("it wrote no table")
    return parse_rocprof(tables[0].read_text(encoding="utf-8"))


def parse_rocprof(text: str) -> list[Seen]:
    """Read rocprofv3's ``counter_collection.csv``: a line per kernel, in order of dispatch."""
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["Counter_Name"] == "MfmaUtil"]
    rows.sort(key=lambda row: int(row["Dispatch_Id"]))
    return [
        Seen(
            row["Kernel_Name"],
            float(row["End_Timestamp"]) - float(row["Start_Timestamp"]),
            float(row["Counter_Value"]),
        )
        for row in rows
    ]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def join(keys: Iterable[Sequence[str]], seen: Iterable[Seen]) -> dict[Key, float]:
    """Give each call, in order, what lies between its two marks.

    Raises:
        ValueError: there are not two marks for every call.
    """
    parts = list(_between_marks(seen))
    named = [(kind, cell, contender) for kind, cell, contender in keys]
    if len(parts) != len(named):
        raise ValueError(f"{len(named)} calls were made and {len(parts)} seen")
    found: dict[Key, float] = {}
    for key, part in zip(named, parts, strict=True):
        counted = [item for item in part if item.matrix_percent is not None]
        time = sum(item.nanoseconds for item in counted)
        if time:
            weighted = sum(item.nanoseconds * (item.matrix_percent or 0.0) for item in counted)
            found[key] = weighted / time
    return found


def _between_marks(seen: Iterable[Seen]) -> Iterator[list[Seen]]:
    part: list[Seen] | None = None
    for item in seen:
        if _MARK in item.name:
            if part is None:
                part = []
            else:
                yield part
                part = None
        elif part is not None:
            part.append(item)


def add(rows: Iterable[kernels.Row], found: Mapping[Key, float]) -> list[kernels.Row]:
    """Return the rows with their counters."""
    return [
        replace(row, matrix_percent=found.get((row.kind, row.cell, row.contender))) for row in rows
    ]


def child(config: Path, keys: Path, fa3_library: Path | None, more: Sequence[str]) -> None:
    """Make every call once between two marks, and write down which they were."""
    asked = cells.load(config)
    device = torch.device("cuda")
    given = dict(map(peers.given, more))
    mark: Any = torch.cuda._sleep
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    made: list[Key] = []
    for cell in asked.cells:
        if isinstance(cell, cells.Host):
            continue
        calls = contenders.make(cell, device, fa3_library, given).calls
        for name, call in calls.items():
            try:
                call()
                torch.cuda.synchronize()
            except (RuntimeError, ValueError, NotImplementedError, peers.Unavailable):
                continue  # the timed run says why
            runtime.cudaProfilerStart()
            mark(1)
            call()
            mark(1)
            torch.cuda.synchronize()
            runtime.cudaProfilerStop()
            made.append((cells.kind_of(cell), str(cell), name))
        torch.cuda.empty_cache()
    keys.write_text(json.dumps(made), encoding="utf-8")


if __name__ == "__main__":
    _config, _keys, _library, *_more = sys.argv[1:]
    child(Path(_config), Path(_keys), Path(_library) if _library else None, _more)
