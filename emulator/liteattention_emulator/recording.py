"""What the waves of one workgroup executed: instruction streams to replay, to keep and to load.

``recording(workgroup)`` makes the calling thread's launches record, through whichever API they are
made; ``recorded()`` is what the latest one recorded.
"""

import ctypes
import json
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import listing, native

STEP = np.dtype(
    [
        ("index", "u4"),
        ("bytes", "u4"),
        ("lines", "u2"),
        ("phases", "u2"),
        ("conflicts", "u2"),
        ("taken", "u2"),
    ]
)
"""One executed wave instruction (``emulator/src/record/recorder.h``).

index: of the instruction in ``Recording.instructions``. bytes: moved to or from global memory or
LDS. lines: how many of the wave's ``lines`` are this step's. phases, conflicts: of the LDS without
bank conflicts, and further ones. taken: 1 where the next step is not the following instruction.
"""

_FORMAT = 1


class BadRecording(ValueError):
    """A file is no recording of this version; the text says why."""


@dataclass(frozen=True, eq=False)
class Stream:
    """What one wave executed. steps: STEP [n]; lines: uint64 [m], address / 128, step by step."""

    steps: npt.NDArray[Any]
    lines: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))


@dataclass(frozen=True, eq=False)
class Recording:
    """The streams of one workgroup's waves over the machine code that they ran. Immutable.

    ``beside`` makes one of several workgroups. kernel, workgroup: whose; "" and 0 for bare code,
    the first one's of several. workgroups: of each wave, from 0, which of them it belongs to;
    nothing: all to one. text: the machine code. accum_offset: which
    vector register the first AGPR is, 0 when that is not known. source: byte offset in the text ->
    "file:line", where a line begins.
    """

    text: bytes
    waves: tuple[Stream, ...]
    kernel: str = ""
    workgroup: int = 0
    accum_offset: int = 0
    source: dict[int, str] = field(default_factory=dict)
    workgroups: tuple[int, ...] = ()

    @cached_property
    def instructions(self) -> list[listing.Instruction]:
        """The decoded text: names, units, registers read and written."""
        return listing.decode(self.text)

    @property
    def steps(self) -> int:
        """Executed wave instructions."""
        return sum(len(wave.steps) for wave in self.waves)

    def line(self, offset: int) -> str:
        """``"file:line"`` of a byte offset in the text, "" where it is not known."""
        at = max((start for start in self.source if start <= offset), default=None)
        return "" if at is None else self.source[at]

    def beside(self, *others: "Recording") -> "Recording":
        """These workgroups on one CU: the waves of all, and barriers of each one's own.

        Raises ValueError for recordings of other machine code or of several workgroups.
        """
        every = (self, *others)
        if any(one.text != self.text or one.accum_offset != self.accum_offset for one in every):
            raise ValueError("workgroups of one CU must be recordings of the same kernel")
        if any(one.workgroups for one in every):
            raise ValueError("give every workgroup as a recording of its own")
        waves = tuple(wave for one in every for wave in one.waves)
        groups = tuple(number for number, one in enumerate(every) for _ in one.waves)
        return replace(self, waves=waves, workgroups=groups)

    def save(self, path: Path | str) -> None:
        """Write everything to one compressed .npz file. Raises OSError."""
        about = {"format": _FORMAT, "kernel": self.kernel, "workgroup": self.workgroup}
        about |= {"accum_offset": self.accum_offset, "source": list(self.source.items())}
        about |= {"workgroups": self.workgroups}
        arrays = {"about": np.array(json.dumps(about)), "text": np.frombuffer(self.text, np.uint8)}
        for number, wave in enumerate(self.waves):
            arrays |= {f"steps{number}": wave.steps, f"lines{number}": wave.lines}
        with Path(path).open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @staticmethod
    def load(path: Path | str) -> "Recording":
        """Read what ``save`` wrote. Raises BadRecording for another file, OSError for none."""
        with Path(path).open("rb") as raw:
            if not zipfile.is_zipfile(raw):
                raise BadRecording(f"{path}: not a recording of the emulator: no .npz file")
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if about["format"] != _FORMAT:
                    raise BadRecording(f"{path}: format {about['format']}, not {_FORMAT}")
                count = sum(name.startswith("steps") for name in file.files)
                waves = [Stream(file[f"steps{n}"], file[f"lines{n}"]) for n in range(count)]
                text = file["text"].tobytes()
        except (
            KeyError,
            TypeError,
            ValueError,
            OSError,
            EOFError,
            RecursionError,
            zipfile.BadZipFile,
        ) as error:
            if isinstance(error, BadRecording):
                raise
            raise BadRecording(f"{path}: not a recording of the emulator: {error}") from error
        found = Recording(
            text,
            tuple(waves),
            about["kernel"],
            about["workgroup"],
            about["accum_offset"],
            dict(about["source"]),
            tuple(about.get("workgroups", ())),
        )
        if problem := found._problem():
            raise BadRecording(f"{path}: {problem}")
        return found

    def _problem(self) -> str:
        """What makes the streams unfit to replay; "" when nothing does."""
        for number, wave in enumerate(self.waves):
            if wave.steps.dtype != STEP or wave.lines.dtype != np.uint64:
                return f"wave {number} has arrays of another type"
            if len(wave.steps) and wave.steps["index"].max() >= len(self.instructions):
                return f"wave {number} executes instructions that the text does not have"
            if wave.steps["lines"].sum(dtype=np.int64) != len(wave.lines):
                return f"wave {number} has {len(wave.lines)} lines, its steps touch others"
        if self.workgroups and len(self.workgroups) != len(self.waves):
            return f"{len(self.workgroups)} waves of workgroups, {len(self.waves)} streams"
        return "" if self.waves else "no waves"


@contextmanager
def recording(workgroup: int = 0, kernels: str = "") -> Iterator[None]:
    """Record that workgroup (linear id in its grid) in all launches of the calling thread.

    Counters are on meanwhile. ``recorded()`` then has the latest launch's recording, or with
    ``kernels`` that of the latest launch of a kernel whose name begins so.
    """
    if workgroup < 0:
        raise ValueError(f"the workgroup to record must be at least 0, got {workgroup}")
    native.functions().lae_record(workgroup, kernels.encode())
    try:
        yield
    finally:
        native.functions().lae_record(-1, b"")


def recorded() -> Recording:
    """What the calling thread's latest launch or snippet recorded.

    Raises EmulatorError when it recorded nothing: it ran outside ``recording``, or its grid has no
    such workgroup.
    """
    found = native.json_of(native.functions().lae_recording())
    if not found:
        raise native.EmulatorError(
            "the latest launch recorded nothing: it ran outside `recording`, or its grid does not "
            "have the workgroup"
        )
    return Recording(
        _bytes(found["text"]),
        tuple(
            Stream(
                np.frombuffer(_bytes(steps, STEP.itemsize), STEP),
                np.frombuffer(_bytes(lines, 8), np.uint64),
            )
            for steps, lines in found["waves"]
        ),
        found["kernel"],
        found["workgroup"],
        found["accum_offset"],
        dict(found["lines"]),
    )


def _bytes(place: Sequence[int], size: int = 1) -> bytes:
    address, count = place
    return ctypes.string_at(address, count * size) if count else b""
