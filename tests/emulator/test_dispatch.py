"""What a launch may do with the memory that all its workgroups see."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import liteattention_emulator as emulator

from .toolchain import compile_hip

SOURCE = Path(__file__).with_name("dispatch_kernels.hip")


@pytest.fixture(scope="module")
def module() -> Iterator[emulator.Module]:
    with emulator.Module(compile_hip(SOURCE, "-g")) as loaded:
        yield loaded


@pytest.fixture(params=["1", "3"], autouse=True)
def options(request: pytest.FixtureRequest) -> None:
    """One host thread, which runs workgroup after workgroup, and three."""
    emulator.set_option("threads", request.param)
    emulator.set_option("check", "on")


def words(count: int, value: int = 0) -> Any:
    return np.full(count, value, np.uint32)


def found(module: emulator.Module, kernel: str, groups: int, *args: Any) -> list[str]:
    """The kinds of findings of a launch of workgroups of one wave."""
    try:
        module.launch(kernel, [groups], [64], args)
    except emulator.LaunchFailed as error:
        return sorted({finding["kind"] for finding in error.findings})
    return []


RACE = ["global race"]


def test_rows_that_another_workgroup_reads(module: emulator.Module) -> None:
    data = words(5 * 64)
    assert found(module, "rows", 4, data, data, 1) == RACE
    # Its own row it may write in place, and another array anyhow.
    assert found(module, "rows", 4, data, data, 0) == []
    assert found(module, "rows", 4, data, words(5 * 64), 1) == []
    # One workgroup alone has its order.
    assert found(module, "rows", 1, data, data, 1) == []


def test_a_race_names_both_sides(module: emulator.Module) -> None:
    data = words(3 * 64)
    emulator.set_option("threads", "1")
    with pytest.raises(emulator.LaunchFailed) as caught:
        module.launch("rows", [2], [64], [data, data, 1])
    text = str(caught.value)
    assert "workgroup 1 loads global byte 0x" in text and "which workgroup 0 stores" in text
    assert "global_load_dword" in text and "global_store_dword" in text
    assert "dispatch_kernels.hip:" in text
    assert f"global byte {data.ctypes.data + 256:#x} " in text


def test_a_race_names_its_first_byte(module: emulator.Module) -> None:
    """Of two pages, the second one is touched first, by the store to the workgroup's own row."""
    emulator.set_option("threads", "1")
    memory = words(3 * 1024)
    start = -memory.ctypes.data // 4 % 1024 + 1024 - 2 * 64  # two rows below a page's end
    parts = memory[start : start + 4 * 64]
    with pytest.raises(emulator.LaunchFailed) as caught:
        module.launch("sum", [4], [64], [parts, words(1), words(64), 4, 1])
    assert f"workgroup 3 loads global byte {parts.ctypes.data:#x} " in str(caught.value)


def test_stores_of_several_workgroups_to_one_place(module: emulator.Module) -> None:
    assert found(module, "collide", 3, words(64), 0) == RACE
    out = words(64)
    assert found(module, "collide", 3, out, 9) == [] and (out == 9).all()
    assert found(module, "collide", 1, out, 0) == []


def test_neighbouring_bytes_are_apart(module: emulator.Module) -> None:
    out = np.zeros(256, np.uint8)
    assert found(module, "bytes", 4, out) == []
    assert out.tolist() == [1, 2, 3, 4] * 64
    assert found(module, "bytes", 5, np.zeros(260, np.uint8)) == RACE  # byte 4 is the next 0


def test_atomics_order(module: emulator.Module) -> None:
    groups, out = 6, words(64)
    args = (words(groups * 64), words(1), out, groups)
    assert found(module, "sum", groups, *args, 0) == []
    assert out.tolist() == [15 + groups * i for i in range(64)]
    assert found(module, "sum", groups, *args, 1) == RACE
    out = words(64)
    assert found(module, "hand_over", 2, words(64), words(1), out, 0) == []
    assert out.tolist() == [3 * i for i in range(64)]
    assert found(module, "hand_over", 2, words(64), words(1), words(64), 1) == RACE


def test_atomics_beside_plain_accesses(module: emulator.Module) -> None:
    bins = words(4)
    assert found(module, "count", 5, bins, words(64), 99) == []
    assert bins.tolist() == [80] * 4
    assert found(module, "count", 5, bins, words(64), 4) == RACE
    assert found(module, "count", 1, bins, words(64), 0) == []


@pytest.mark.parametrize("where", [0, 1, 2])
def test_stores_to_code_and_constants(module: emulator.Module, where: int) -> None:
    before = words(64)
    assert found(module, "scribble", 1, before, 3) == []  # loads alone
    assert found(module, "scribble", 1, words(64), where) == ["store to constant memory"]
    after = words(64)
    assert found(module, "scribble", 1, after, 3) == []
    assert np.array_equal(before, after)


def test_a_grid_that_leaves_output_untouched(module: emulator.Module) -> None:
    read, write = words(4 * 64), words(4 * 64)
    module.launch("rows", [4], [64], [read, write, 0], fills=[write])
    with pytest.raises(emulator.LaunchFailed, match=r"64 elements of array 0 .*first at \(192,\)"):
        module.launch("rows", [3], [64], [read, write, 0], fills=[write])
    # Views: only their own elements count.
    module.launch("rows", [3], [64], [read, write, 0], fills=[write[:192], write[:192:5][::-1]])
    with pytest.raises(emulator.LaunchFailed, match=r"2 elements of array 1 .*\(0, 0\)"):
        table = write.reshape(4, 64)
        module.launch("rows", [3], [64], [read, write, 0], fills=[write[:1], table[::-3, :2]])
    module.launch("rows", [1], [64], [read, write, 0], fills=[write[:0]])
    emulator.set_option("check", "off")
    with pytest.raises(emulator.EmulatorError, match="needs the checks"):
        module.launch("rows", [4], [64], [read, write, 0], fills=[write])
