"""The hot loop of a recorded wave: where its iterations begin."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from liteattention_emulator.recording import Recording

SHARE = 0.8


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop of one wave.

    head: index of the instruction that taken backward branches lead to. starts: int [n], the steps
    at which the wave came to it by one, so that n - 1 whole iterations lie between them.
    matrix: matrix instructions of the wave between the first and the last of them.
    """

    wave: int
    head: int
    starts: npt.NDArray[np.intp]
    matrix: int

    @property
    def iterations(self) -> int:
        """Whole iterations between the first and the last start."""
        return len(self.starts) - 1


def find(recording: Recording, wave: int) -> Loop | None:
    """The loop of a wave: its most frequent backward branch; None when it has none.

    Only branches count between whose first and last execution lie at least 80 % of the matrix
    instructions that any has (of all instructions where there are none): a short loop beside the
    main one may run more often.
    """
    units = np.array([inst.unit == "mfma" for inst in recording.instructions])
    steps = recording.waves[wave].steps
    index = steps["index"].astype(np.intp)
    if len(index) < 2:
        return None
    matrix = np.concatenate([[0], np.cumsum(units[index])])
    work = matrix if matrix[-1] else np.arange(len(index) + 1)
    back = np.flatnonzero((steps["taken"][:-1] == 1) & (index[1:] <= index[:-1])) + 1
    found = []
    for head in np.unique(index[back]):
        starts = back[index[back] == head]
        if len(starts) > 1:
            inside = int(work[starts[-1]] - work[starts[0]])
            found.append((inside, Loop(wave, int(head), starts, _between(matrix, starts))))
    if not found:
        return None
    most = max(inside for inside, _ in found)
    return max(
        (loop for inside, loop in found if inside >= SHARE * most),
        key=lambda loop: len(loop.starts),
    )


def _between(matrix: npt.NDArray[np.intp], starts: npt.NDArray[np.intp]) -> int:
    return int(matrix[starts[-1]] - matrix[starts[0]])


def steady(loop: Loop | None, steps: int) -> tuple[int, int]:
    """The steps of a wave to account for, [begin, end): whole iterations without the edges.

    A tenth of the iterations at the beginning, one at least, and one at the end are left out where
    five or more were executed. Without a loop, all steps.
    """
    if loop is None:
        return 0, steps
    if loop.iterations < 5:
        return int(loop.starts[0]), int(loop.starts[-1])
    skipped = max(1, loop.iterations // 10)
    return int(loop.starts[skipped]), int(loop.starts[-2])
