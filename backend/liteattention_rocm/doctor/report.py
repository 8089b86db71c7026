"""The examination: every check, what came out, and the one file to attach to a report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from .. import engines, hip_graphs
from ..contract import Engine
from ..engines import ENGINE_VARIABLE, ISA_VARIABLE, LIBRARY_VARIABLE, cpu
from ..engines.gfx942 import manifest
from ..engines.gfx942.engine import Gfx942Engine
from . import facts, isolated, judge, objects
from .cases import CASES, Case, Refused

FORMAT = 1

#: "differs": right within the tolerance, but not the expected bits, on a real GPU, which may round
#: exponentials and reciprocals otherwise than the software MI300X. "warning": failed on an engine
#: that calls here get only if they name it, or what serving with graphs must know.
Status = Literal["ok", "failed", "warning", "differs", "skipped"]

#: The group of checks of variables.
_ENVIRONMENT = "environment"
_NO_GPU = (
    "no MI300X here: `liteattention-rocm doctor --emulate` runs the same machine code in software"
)
#: Parts along the keys, so that the kernels that merge them run.
_SPLITS = 2
#: Seconds that a step on a GPU may take: Triton or a driver may compile.
_LIMIT = 300.0


@dataclass(frozen=True)
class Check:
    """One thing examined: its group, result, and what was seen.

    The group is "environment", "engines", "code objects" or an engine.

    ``bits`` are the SHA-256 of a case's results, ``error`` is its largest error as a share of what
    bf16 arithmetic allows.
    """

    group: str
    name: str
    status: Status
    detail: str = ""
    seconds: float = 0.0
    error: float | None = None
    bits: dict[str, str] = field(default_factory=dict)


@dataclass
class Report:
    """All that ``doctor`` found. ``times`` are measured on a real GPU alone.

    ``under_way`` is what runs, "" at the end: where the machine itself goes down, the file says
    what took it there.
    """

    emulated: bool
    installation: dict[str, str]
    gpus: list[dict[str, Any]]
    default_engines: dict[str, str]
    services: list[dict[str, Any]]
    checks: list[Check] = field(default_factory=list)
    times: list[dict[str, Any]] = field(default_factory=list)
    under_way: str = ""

    @property
    def broken(self) -> bool:
        """Whether something fails that no variable of the environment explains."""
        return any(check.group != _ENVIRONMENT for check in self.failures)

    @property
    def failures(self) -> list[Check]:
        """Return what should work and does not."""
        return [check for check in self.checks if check.status == "failed"]

    def to_dict(self) -> dict[str, Any]:
        """Return what the file holds: only JSON's types."""
        return {"format": FORMAT, "ok": not self.failures, **asdict(self)}


def begin() -> Report:
    """Return a report with everything that runs no kernel."""
    engine = engines.get("gfx942")
    checks: list[Check] = []
    try:
        gpus = facts.gpus()
    except RuntimeError as error:
        gpus = []
        text = facts.without_paths(f"PyTorch's build has them, and fails: {error}")
        checks.append(Check("engines", "GPUs", "failed", text))
    return Report(
        engine.emulated,
        facts.installation(),
        gpus,
        facts.default_engines(),
        facts.services(),
        checks,
    )


def examine(report: Report, say: Callable[[str], None]) -> None:
    """Run every check and add it to ``report``; ``say`` takes what is under way."""
    wrong = _variables()
    report.checks.extend(
        Check(_ENVIRONMENT, name, "failed", facts.without_paths(why)) for name, why in wrong.items()
    )
    graphs = hip_graphs.problem()
    if graphs is not None:
        report.checks.append(Check("engines", "HIP graphs", "warning", graphs))
    for checks in (_defaults(report, wrong), _code_objects(say, wrong), _cases(say, wrong)):
        for check in checks:  # one by one: the file is written between them
            report.checks.append(check)


def _variables() -> dict[str, str]:
    """Variables that no call can run with, and why: each is one cause of many failures."""
    found = {}
    given = engines.settings()
    if given.engine and given.engine not in engines.available():
        known = ", ".join(engines.available())
        found[ENGINE_VARIABLE] = f"unknown engine {given.engine!r}: set one of {known}, or unset it"
    try:
        cpu.chosen_isa()
    except ValueError as error:
        found[ISA_VARIABLE] = f"{error}, or unset it"
    try:
        Gfx942Engine().library()
    except RuntimeError as error:
        if given.hip_library:
            found[LIBRARY_VARIABLE] = f"{error}, or unset it"
    return found


def _defaults(report: Report, wrong: Collection[str]) -> Iterator[Check]:
    """The engine that a device gets must serve what is typical."""
    for device, name in report.default_engines.items():
        cause = ENGINE_VARIABLE if ENGINE_VARIABLE in wrong else _cause(name, wrong)
        if cause:
            what = f"an engine for {device} tensors"
            yield Check("engines", what, "skipped", f"{cause} is wrong")
            continue
        asked = [s for s in report.services if (s["engine"], s["device"]) == (name, device)]
        refused = dict.fromkeys(reason for s in asked for reason in s["reasons"])
        yield Check(
            "engines",
            f"{name} serves {device} tensors",
            "failed" if refused or not asked else "ok",
            "; ".join(refused) or ("" if asked else f"it does not take {device} tensors"),
        )


def _cause(engine: str, wrong: Collection[str]) -> str:
    """The wrong variable that an engine cannot run with, "" if there is none."""
    variable = {"cpu": ISA_VARIABLE, "gfx942": LIBRARY_VARIABLE}.get(engine, "")
    return variable if variable in wrong else ""


# --------------------------------------------------------------------------- code objects


def _code_objects(say: Callable[[str], None], wrong: Collection[str]) -> Iterator[Check]:
    group = "code objects"
    say("loading the code objects")
    try:
        damaged = objects.damaged()
    except (OSError, ValueError) as error:
        yield Check(group, "manifest", "failed", facts.without_paths(str(error)))
        return
    missing, loaded = "", {}
    try:
        loaded = _loaded(*_hip(wrong))
    except _Nowhere as error:
        missing = str(error)
    except (OSError, RuntimeError) as error:
        yield Check(group, "HIP run-time", "failed", facts.without_paths(str(error)))
        missing = "the HIP run-time failed"
    kernels = {entry.file: len(entry.kernels) for entry in manifest.read().objects}
    for file, damage in damaged.items():
        detail = damage or loaded.get(file, "")
        status: Status = "failed" if detail else "skipped" if missing else "ok"
        detail = detail or missing or f"kernels: {kernels[file]}"
        yield Check(group, file, status, facts.without_paths(detail))


def _loaded(library: str, device: torch.device) -> dict[str, str]:
    """What :func:`.objects.refused` says. Raises as it does; RuntimeError: no word of it."""
    if not _isolate(device):
        return objects.refused(library, 0)
    (answer,) = isolated.each(_load, [(library, device.index)], lambda _: _LIMIT)
    if isinstance(answer, isolated.Lost):
        raise RuntimeError(answer.why)
    if isinstance(answer, str):
        raise OSError(answer)
    return answer


def _load(place: tuple[str, int]) -> dict[str, str] | str:
    try:
        return objects.refused(*place)
    except OSError as error:
        return str(error)


class _Nowhere(Exception):
    """There is no HIP run-time or no MI300X; says so, and what to do."""


def _hip(wrong: Collection[str]) -> tuple[str, torch.device]:
    """Return the path of the HIP run-time that is to load kernels, and where it runs them.

    Raises:
        _Nowhere: there is nothing that could.
        RuntimeError: there should be one; says what was tried.
    """
    if LIBRARY_VARIABLE in wrong:
        raise _Nowhere(f"{LIBRARY_VARIABLE} is wrong")
    try:
        library = Gfx942Engine().library()
    except RuntimeError as error:
        if torch.version.hip:
            raise
        raise _Nowhere(_NO_GPU) from error
    if library.emulated:
        return library.path, torch.device("cpu")
    ordinal = _mi300x()
    if ordinal is None:
        raise _Nowhere(_NO_GPU)
    return library.path, torch.device("cuda", ordinal)


def _mi300x() -> int | None:
    """Number of the first gfx942 GPU, None if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = (i for i in range(count) if engines.architecture(torch.device("cuda", i)) == "gfx942")
    return next(found, None)


# --------------------------------------------------------------------------------- cases


class Task(NamedTuple):
    """A case of CASES by name, the engine that runs it, and where."""

    engine: str
    device: str
    case: str


def _cases(say: Callable[[str], None], wrong: Collection[str]) -> Iterator[Check]:
    for engine, device, wanted in _engines():
        reasons, cause = engine.unavailable(device), _cause(engine.name, wrong)
        if not cause and not reasons:
            yield from _run(engine.name, device, wanted, say)
            continue
        status: Status = "failed" if wanted and not cause else "skipped"
        why = "; ".join(reasons) if wanted or engine.name != "gfx942" else _NO_GPU
        detail = f"{cause} is wrong" if cause else facts.without_paths(why)
        for case in CASES:
            yield Check(engine.name, case.name, status, detail)


def _run(
    engine: str, device: torch.device, wanted: bool, say: Callable[[str], None]
) -> Iterator[Check]:
    """Run all cases; on a GPU in a process of their own."""
    tasks = [Task(engine, str(device), case.name) for case in CASES]
    for task, check in isolated.each_begun(
        run_task, tasks, lambda _: _LIMIT,
        lambda task: say(f"{engine}: {task.case}"), _isolate(device),
    ):  # fmt: skip
        if isinstance(check, isolated.Lost):
            check = Check(engine, task.case, "failed", facts.without_paths(check.why))
        if check.status == "failed" and not wanted:
            calls = f"calls here get another engine, unless {ENGINE_VARIABLE} names this one"
            check = replace(check, status="warning", detail=f"{check.detail}; {calls}")
        yield check


def _isolate(device: torch.device) -> bool:
    """Whether a kernel that goes wrong could take the process with it."""
    return device.type == "cuda"


def run_task(task: Task) -> Check:
    """Run one case in this process."""
    device = torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    engine = native_engine() if task.engine == "gfx942" else engines.get(task.engine)
    return run_case(engine, device, next(case for case in CASES if case.name == task.case))


def _engines() -> Iterator[tuple[Engine, torch.device, bool]]:
    """Engines to run, where, and whether they must be able to."""
    yield engines.get("cpu"), torch.device("cpu"), True
    gfx942, ordinal = native_engine(), _mi300x()
    asked = bool(os.environ.get(LIBRARY_VARIABLE))
    if gfx942.emulated or ordinal is None:
        yield gfx942, torch.device("cpu"), asked
    else:
        yield gfx942, torch.device("cuda", ordinal), True
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        named = engines.settings().engine == "portable"
        yield engines.get("portable"), device, named or ordinal is None


def native_engine(library: str | None = None) -> Gfx942Engine:
    """Return the gfx942 engine that computes in parts wherever it can, on this HIP run-time."""
    return Gfx942Engine(kv_splits=_SPLITS, library=library)


def run_case(engine: Engine, device: torch.device, case: Case) -> Check:
    """Run one case and say what came out; it never raises."""
    begin, on_gpu = time.perf_counter(), device.type == "cuda"
    native = engine.name == "gfx942"
    try:
        expected = judge.read_expected()[case.name] if native else None
        verdict = judge.judge(case, engine, device, expected)
        if on_gpu:
            torch.cuda.synchronize(device)
    except Refused as error:
        return Check(engine.name, case.name, "failed", f"refused: {error}")
    except Exception as error:  # whatever a broken installation throws belongs in the report
        text = facts.without_paths(f"{type(error).__name__}: {error}")
        return Check(engine.name, case.name, "failed", text)
    seconds = time.perf_counter() - begin
    details: list[str] = list(verdict.wrong)
    status: Status = "failed" if verdict.wrong else "ok"
    if verdict.other_bits:
        near = "; within the tolerance of float64, all the same" if not verdict.wrong else ""
        details.append(f"bits differ from the expected ones: {', '.join(verdict.other_bits)}{near}")
        if not verdict.wrong:
            status = "differs" if on_gpu else "failed"
    detail = "; ".join(details) or ("the expected bits" if native else "")
    return Check(
        engine.name, case.name, status, detail, round(seconds, 3),
        round(verdict.worst, 3), verdict.bits,
    )  # fmt: skip
