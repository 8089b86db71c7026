"""docs/model.md says what the model has: its constants, and what it makes of measured streams."""

from __future__ import annotations

from liteattention_emulator.timing import Constant, table
from tests import ROOT
from tests.emulator.timing.streams import other_wave, same_wave
from tests.emulator.timing.test_coissue import MISSED, OTHER_WAVE, SAME_WAVE

LINES = (ROOT / "docs/model.md").read_text(encoding="utf-8").splitlines()


def constant_row(constant: Constant) -> str:
    bounds = f"{constant.low:g} to {constant.high:g}" if constant.open else ""
    source = constant.source.replace("|", "\\|")
    return f"| `{constant.name}` | {constant.value:g} {constant.unit} | {bounds} | {source} |"


def stream_rows() -> list[str]:
    rows = []
    for group, measured in SAME_WAVE.items():
        rows.append(f"| {' '.join(group)} | | {measured:.2f} | {same_wave(group):.2f} |")
    for (first, second), measured in (OTHER_WAVE | MISSED).items():
        found = other_wave(first, second)
        rows.append(f"| {first} | {' '.join(second)} | {measured:.2f} | {found:.2f} |")
    return rows


def test_every_constant_stands_there_as_it_is() -> None:
    below = LINES[LINES.index("## Constants") :]
    assert [line for line in below if line.startswith("| `")] == list(map(constant_row, table()))


def test_every_measured_stream_stands_there() -> None:
    begin = LINES.index("| wave | other wave | measured | modelled |") + 2
    expected = stream_rows()
    assert LINES[begin : begin + len(expected)] == expected
