"""Whole launches in the model beside counters and times of an MI300X, as in docs/model.md."""

from pathlib import Path

import pytest

from . import launch, public_kernel, whole
from .published import COUNTED, TIMES

FOLDER, SOURCE = launch.folder(), public_kernel.folder()
REASON = f"{launch.VARIABLE} names no folder with aiter's code objects (its hsa/gfx942)"
pytestmark = [pytest.mark.aiter, pytest.mark.skipif(FOLDER is None, reason=REASON)]
ROOT = FOLDER or Path()


@pytest.mark.parametrize("length", COUNTED)
def test_counters_of_a_causal_launch(length: int) -> None:
    """Flops to the last one; what workgroups do with their time; and how long CUs have one."""
    measured, found = COUNTED[length], whole.causal(ROOT, length)
    assert found.flops == measured.flops
    near = 5 if length > 1024 else 7  # short launches: see the table
    assert 100 * found.inside == pytest.approx(100 * measured.inside, abs=near)
    assert found.matrix_use * whole.FULL == pytest.approx(measured.matrix_use, abs=near)
    assert found.matrix_use > measured.matrix_use + 5  # a miss, without what is fitted


def test_rounds_and_tails_explain_times_of_one_kernel() -> None:
    """AITER's times by shape: nothing is fitted, and a kernel's clock cancels."""
    rows = whole.own_rows(ROOT)
    assert len(rows) == 3 * (len(TIMES) - 1)
    for shape, rounding, measured, modelled in rows:
        assert modelled == pytest.approx(measured, rel=0.08), (shape, rounding)


@pytest.mark.skipif(SOURCE is None, reason=f"{public_kernel.VARIABLE} names no checkout")
def test_the_public_kernel_against_aiter() -> None:
    assert SOURCE is not None
    rows = whole.rows(ROOT, SOURCE)
    others = [row for row in rows if not row.fitted]
    assert (len(rows), len(others)) == (27, 24)
    for row in rows:
        assert row.in_time == pytest.approx(row.measured, rel=0.08), row
    # Without clocks most of them are missed.
    off = [abs(row.in_clk / row.measured - 1) > 0.08 for row in rows]
    assert sum(off) >= 20


@pytest.mark.skipif(SOURCE is None, reason=f"{public_kernel.VARIABLE} names no checkout")
def test_the_public_kernel_is_built_right(tmp_path: Path) -> None:
    assert SOURCE is not None
    _, error = public_kernel.record(public_kernel.build(SOURCE, "rtne", tmp_path), 300)
    assert error < 3e-3
