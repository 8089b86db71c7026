"""Counters: what a profiler prints, joined with the calls between the marks."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from liteattention_benchmark import cells, counters, kernels, kernels_report

METRIC = counters._TENSOR_METRICS[0]
KEYS = [("dense", "1,2,512,64", "ours"), ("dense", "1,2,512,64", "SDPA")]
NCU = f"""==PROF== Connected to process 7
"ID","Kernel Name","{counters._TIME_METRIC}","{METRIC}"
"","","us","%"
"0","spin_kernel(long)","2.00","0"
"1","attention","1,000.00","80.0"
"2","merge","250.00","5.0"
"3","spin_kernel(long)","2.00","0"
"4","fill","900.00","99.0"
"5","spin_kernel(long)","2.00","0"
"6","flash_fwd","3,000.00","60.5"
"7","spin_kernel(long)","2.00","0"
"""
ROCPROF = """Dispatch_Id,Kernel_Name,Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp
12,spin_kernel,MfmaUtil,0,900,901
10,spin_kernel,MfmaUtil,0,100,101
11,attention,MfmaUtil,42.5,200,800
11,attention,GRBM_COUNT,7,200,800
"""


def test_a_call_gets_what_lies_between_its_marks_weighted_by_time() -> None:
    seen = counters.parse_ncu(NCU, METRIC)
    assert len(seen) == 8 and seen[1].nanoseconds == pytest.approx(1e6)
    found = counters.join(KEYS, seen)
    assert found == {
        KEYS[0]: pytest.approx((1000 * 80 + 250 * 5) / 1250),
        KEYS[1]: pytest.approx(60.5),
    }


def test_rocprof_tables_are_read_in_order_of_dispatch() -> None:
    seen = counters.parse_rocprof(ROCPROF)
    assert [item.name for item in seen] == ["spin_kernel", "attention", "spin_kernel"]
    assert counters.join(KEYS[:1], seen) == {KEYS[0]: pytest.approx(42.5)}


def test_a_mark_too_few_is_no_table() -> None:
    with pytest.raises(ValueError, match="2 calls were made and 1 seen"):
        counters.join(KEYS, counters.parse_rocprof(ROCPROF))
    with pytest.raises(ValueError, match="it printed no table"):
        counters.parse_ncu("==ERROR== no permission", METRIC)


class Ncu:
    """A profiler that runs nothing and prints a table."""

    def __init__(self, code: int = 0, known: str = METRIC) -> None:
        self.code = code
        self.known = known
        self.command: list[str] = []

    def __call__(self, command: list[str], **_: Any) -> Any:
        if "--query-metrics" in command:
            return subprocess.CompletedProcess(command, 0, self.known, "")
        self.command = command
        place = command[command.index("-m") + 3]
        Path(place).write_text(json.dumps(KEYS), encoding="utf-8")
        return subprocess.CompletedProcess(command, self.code, NCU, "==ERROR== no permission")


@pytest.fixture
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: f"/bin/{name}")


@pytest.mark.usefixtures("on_the_path")
def test_counters_are_joined_on_the_keys_of_the_rows() -> None:
    ncu = Ncu()
    found, why = counters.collect(Path("a.yaml"), None, ("x=y:z",), run=ncu)
    assert why == "" and set(found) == set(KEYS)
    assert METRIC in ncu.command[ncu.command.index("--metrics") + 1]
    assert ncu.command[ncu.command.index("--clock-control") + 1] == "none"
    assert ncu.command[-2:] == ["", "x=y:z"]
    rows = [
        kernels.Row(*KEYS[0], 1.0, 1.0, 1.0, 5.0, 1e-3, ""),
        kernels.Row("dense", "1,2,512,64", "FA3", None, None, None, None, None, "not installed"),
    ]
    added = counters.add(rows, found)
    assert added[0].matrix_percent == pytest.approx(65.0) and added[1].matrix_percent is None
    config = cells.Config(
        dense=({"batch": 1, "heads": 2, "length": 512, "head_dim": 64},)  # type: ignore[arg-type]
    )
    text = " ".join(kernels_report.to_markdown(config, added, {}, "command").split())
    assert "| 1,2,512,64 | 65 |" in text


@pytest.mark.usefixtures("on_the_path")
def test_a_profiler_that_fails_is_a_line() -> None:
    found, why = counters.collect(Path("a.yaml"), run=Ncu(code=1))
    assert not found and why == "ncu: it ended with 1: ==ERROR== no permission"
    found, why = counters.collect(Path("a.yaml"), run=Ncu(known="dram__bytes"))
    assert not found and "knows no counter of the matrix units" in why


def test_no_profiler_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda _: None)
    assert counters.collect(Path("a.yaml")) == ({}, "ncu is not on this machine")
