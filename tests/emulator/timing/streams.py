"""Instruction streams written by hand, as micro-benchmarks have them, over real machine code."""

from collections.abc import Mapping, Sequence

import numpy as np

from liteattention_emulator.recording import STEP, Recording, Stream, recorded, recording
from liteattention_emulator.snippet import State
from liteattention_emulator.timing import replay
from tests.emulator import cached
from tests.emulator.toolchain import machine_code

#: Four of each kind with registers of their own, so that none waits for the one before it. The
#: 8-byte ones lie on 8 bytes; behind the s_nop, p and f do not.
KINDS = "MPFnpfVE"
PROGRAM = "\n".join(
    [
        *(f"v_mfma_f32_16x16x16_bf16 a[{4 * i}:{4 * i + 3}], v[0:1], v[2:3], a[{4 * i}:{4 * i + 3}]"
          for i in range(4)),
        *(f"v_pk_mul_f32 v[{20 + 2 * i}:{21 + 2 * i}], v[4:5], v[6:7]" for i in range(4)),
        *(f"v_fma_f32 v{30 + i}, v4, v5, v6" for i in range(4)),
        *["s_nop 0", "s_barrier", "s_setprio 1"],
        *(f"v_pk_mul_f32 v[{20 + 2 * i}:{21 + 2 * i}], v[4:5], v[6:7]" for i in range(4)),
        *(f"v_fma_f32 v{30 + i}, v4, v5, v6" for i in range(4)),
        *(f"v_add_f32 v{40 + i}, v4, v5" for i in range(4)),
        *(f"v_exp_f32 v{50 + i}, v4" for i in range(4)),
        "s_endpgm",
    ]
)  # fmt: skip
FIRST = {"M": 0, "P": 4, "F": 8, "B": 13, "H": 14, "p": 15, "f": 19, "V": 23, "E": 27}


def stream(kinds: str) -> Stream:
    """One wave that executes instructions by their letters.

    M mfma 16x16x16, P packed, F fma (8 bytes), p and f the same misaligned, V add, E exp,
    B barrier, H s_setprio 1.
    """
    seen = dict.fromkeys(FIRST, 0)
    steps = np.zeros(len(kinds), STEP)
    for at, kind in enumerate(kinds):
        steps[at]["index"] = FIRST[kind] + (0 if kind in "BH" else seen[kind] % 4)
        seen[kind] += 1
    return Stream(steps)


def streams(waves: Sequence[str]) -> Recording:
    """A workgroup of waves that execute these letters."""
    return Recording(machine_code(PROGRAM), tuple(map(stream, waves)))


def same_wave(group: str, overrides: Mapping[str, float] | None = None) -> float:
    """clk per group in a long stream of them, one wave on each SIMD."""
    count = 1000
    return replay(streams([group * count] * 4), overrides).clocks / count


def other_wave(first: str, second: str, overrides: Mapping[str, float] | None = None) -> float:
    """clk per group where one wave of a SIMD executes ``first`` and the other one ``second``.

    They change roles at barriers, as in the measured kernels.
    """
    count, phases = 500, 4
    low = "".join((first, second)[i % 2] * count + "B" for i in range(phases))
    high = "".join((second, first)[i % 2] * count + "B" for i in range(phases))
    return replay(streams([low] * 4 + [high] * 4), overrides).clocks / (count * phases)


def record(program: str, state: State) -> Recording:
    """Run assembly on the emulator and record its waves."""
    with recording():
        cached.run(program, state)
        return recorded()
