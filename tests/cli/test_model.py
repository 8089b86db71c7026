"""``liteattention-rocm model``, as typed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from liteattention_benchmark import model as model_cases
from liteattention_benchmark import model_tables
from liteattention_benchmark.model_cli import model
from liteattention_emulator import Recording
from liteattention_emulator.timing import command
from tests import ROOT

APP = typer.Typer()
APP.command()(model)


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(APP, words, env={"COLUMNS": "2000"})
    return result.exit_code, result.stdout + " ".join(result.stderr.replace("│", " ").split())


def test_the_command_is_registered() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    line = next(row for row in text.splitlines() if row.startswith("model = "))
    value = line.partition("=")[2].strip().strip('"')
    assert EntryPoint("model", value, "liteattention_rocm.commands").load() is model


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording, as a user has one."""
    file = tmp_path_factory.mktemp("recorded") / "kernel.npz"
    case = model_cases.Case((1, 1, 64, 64), "dense", "rtne")
    model_cases.record(case)[0].save(file)
    return file


@pytest.mark.parametrize(("kernel", "dim"), [("dense", 128), ("lite", 64)])
def test_a_shipped_kernel(kernel: str, dim: int, tmp_path: Path) -> None:
    file = tmp_path / "kernel.npz"
    words = ("--kernel", kernel, "--no-range", "--record", str(file), "--rounding", "rtz", "--json")
    code, text = call("--shape", f"2,3,704,{dim}", *words)
    data = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert code == 0 and data["kernel"] == f"attention_{kernel}_bf16_d{dim}_rtz"
    for row in data["waves"]:  # 32 rows of a wave x 64 keys, two products of 32x32x8
        assert row["loop"]["matrix_instructions"] == 2 * 32 * 64 * dim / (32 * 32 * 8)
        assert row["clk_per_block"] == pytest.approx(row["loop"]["clk"])
    found = Recording.load(file)
    assert len(found.waves) == 8 and found.workgroup == 0
    # K and V lie as in tensors of three heads: the rows of K are that far apart.
    lines = {int(line) for wave in found.waves for line in wave.lines}
    assert max(lines) - min(lines) > 3 * 704 * dim * 2 // 128 * 0.9
    code, again = call(str(file), "--no-range", "--json")
    assert json.loads(again)["clk"] == data["clk"]


def as_json(*words: str) -> dict[str, Any]:
    code, text = call(*words, "--no-range", "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return found


def test_a_prefill_tile() -> None:
    """The last 64 rows of 4 heads over 320 keys: two products of 32 rows a wave and 64 keys."""
    data = as_json("--kernel", "prefill", "--shape", "1,8,320,128", "--kv-heads", "2")
    assert data["kernel"] == "attention_prefill_bf16_d128_rtne" and "hbm" not in data
    per_block = 2 * 32 * 64 * 128 / (32 * 32 * 8)
    for row in data["waves"]:
        assert row["loop"]["matrix_instructions"] == per_block
        assert row["clk_per_block"] == pytest.approx(row["loop"]["clk"])
    spent = data["per_mflop_or_flop"]
    assert spent["matrix"] == pytest.approx(1e6 / (2 * 32 * 32 * 8))
    assert spent["lds_bytes"] > spent["l1_bytes"] > 0


def test_two_decode_workgroups() -> None:
    words = ("--kernel", "decode", "--shape", "1,16,1280,128", "--kv-heads", "2", "--q-len", "2")
    data = as_json(*words)
    assert data["kernel"] == "attention_decode_bf16_d128_rtne" and len(data["waves"]) == 8
    assert data["constants"]["l2_latency"] == 876  # of HBM
    hbm, under_way = data["hbm"], data["under_way"]
    assert hbm["needed_bytes"] == pytest.approx(876 * 1800 / 304)
    # K and V of a block are asked for before the one before is done: 16 KB a wave and more.
    assert under_way["fetched_bytes"] > 8 * 16384 > 10 * hbm["needed_bytes"]
    assert hbm["under_way_over_needed"] == under_way["fetched_bytes"] / hbm["needed_bytes"]
    # K and V once each, two bytes times 128 an element, but for what lies outside the window.
    window = data["accounted"]
    fetched = under_way["fetched_bytes_per_clk"] * (window["end"] - window["begin"])
    assert 0.3 * 2 * 1280 * 512 < fetched <= 2 * 1280 * 512
    short = ("--kernel", "decode", "--shape", "1,1,128,64")
    assert as_json(*short, "--set", "l2_latency=300")["constants"]["l2_latency"] == 300
    code, text = call(*short, "--no-range")
    assert code == 0 and "HBM: a CU's share is 5.9 B/clk" in " ".join(text.split())


def test_the_tables_of_the_docs() -> None:
    """A row has what the report of its case says."""
    case = model_tables.Case((1, 1, 512, 64), "dense", "rtne")
    decode = model_tables.Case((1, 1, 256, 64), "decode", "rtne")
    text = model_tables.to_markdown(
        model_tables.run({"one": case}, ranges=False), model_tables.run_decode({"two": decode}), []
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    clocks, spent = (row for row in rows if row[:1] == ["one"])
    data = as_json("--shape", "1,1,512,64")
    assert clocks[1] == f"{data['clk_per_32x32x8']:.1f}"
    assert clocks[4] == f"{data['waves'][0]['clk_per_block']:.0f}"
    assert float(spent[1]) == pytest.approx(data["per_mflop_or_flop"]["matrix"], abs=0.1)
    [found] = (row for row in rows if row[:1] == ["two"])
    # With HBM's share of the rate no more comes, and more is under way.
    assert float(found[5]) < 6.1 < float(found[3])
    assert int(found[4].split()[0]) > int(found[1].split()[0])


def test_the_table_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order spreads uneven lists, no worse than none where they are alike; cutting does both."""
    assert model_tables.LISTED in model_tables.CASES
    case = model_tables.Case((1, 1, 512, 128), "weigh", "rtne")
    [row] = model_tables.run({model_tables.LISTED: case}, ranges=False)
    monkeypatch.setattr(model_tables, "SHAPES", ((1, 12, 8192),))
    text = model_tables.to_markdown([row], [], [model_tables.lists([row])])
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    found = {x[1]: [float(y) for y in x[2:5]] for x in cells if x[:1] == ["1, 12, 8,192"]}
    assert list(found) == ["0% uniform", "42% clustered", "42% uneven", "80% uneven"]
    assert found["0% uniform"][0] == found["0% uniform"][1] >= 1
    assert found["42% uneven"][1] < found["42% uneven"][0]
    assert found["0% uniform"][2] < 1.3 < found["0% uniform"][1]
    assert all(cut <= whole for _, whole, cut in found.values())


def test_the_table_of_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts come near evenly spread work where whole tiles leave compute units idle."""
    assert model_tables.PREFILL in model_tables.CASES
    case = model_tables.Case((1, 4, 4096, 128), "prefill", "rtne", 1)
    [row] = model_tables.run({model_tables.PREFILL: case}, ranges=False)
    shapes = ((512, 33280, 8, 1), (8192, 8192, 8, 1), (16384, 16384, 32, 8))
    monkeypatch.setattr(model_tables, "CHUNKS", shapes)
    text = model_tables.to_markdown([row], [], [model_tables.prefill([row])])
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    found = {x[0]: x for x in cells if x and "of" in x[0].split()}
    chunk, prompt, large = (found[f"{q:,} of {kv:,}"] for q, kv, _, _ in shapes)
    assert chunk[2] == "16" and int(chunk[3]) >= 16 * 8
    assert float(chunk[4]) > 15 and float(chunk[5]) < 2.5 and float(chunk[6]) > 8
    assert float(prompt[5]) < 1.7 < 2 < float(prompt[4])
    assert large[2] == large[3] == "2,048" and float(large[6]) == 1


def test_every_mistake_is_named(tmp_path: Path) -> None:
    code, text = call("--shape", "1,2,3", "--kernel", "x", "--rounding", "y", "--set", "z=1")
    assert code == 2
    for part in ("four positive numbers", "'x'", "'y'", "no constant z"):
        assert part in text
    code, text = call("--shape", f"1,2,{10**20},64")
    assert code == 2 and f"must be at most 2^31 - 1, got {10**20}" in text
    code, text = call("--shape", f"1,2,{2**31 - 1},96")
    assert code == 2 and "64 or 128" in text and "one tensor of --shape takes 768.0 GiB" in text
    pages = ("--kernel", "decode", "--page-size", str(2**31 - 1))
    code, text = call("--shape", "1,8,64,64", *pages)
    assert code == 2 and "one tensor of --shape takes 4,096.0 GiB" in text
    code, text = call("--shape", "1,1,64,96")
    assert code == 2 and "64 or 128" in text
    code, text = call("--shape", "1,6,64,72", "--kernel", "decode", "--q-len", "99")
    assert code == 2 and "112, 128, 192 or 256" in text and "at most S = 64, got 99" in text
    code, text = call("--shape", "1,6,64,96", "--kernel", "decode", "--rounding", "rtz")
    assert code == 2 and "--rounding must be rtne with D = 96, got rtz" in text
    code, text = call("--shape", "1,6,64,64", "--kernel", "prefill", "--kv-heads", "4")
    assert code == 2 and "H of --shape must be a multiple of --kv-heads, got 6 and 4" in text
    code, text = call("--shape", "1,1,8,64", "--kernel", "prefill", "--q-len", "2")
    assert code == 2 and "--q-len is for --kernel decode" in text
    code, text = call("--shape", "1,2,64,64", "--kv-heads", "1", "--page-size", "8")
    assert code == 2 and "--kv-heads, --page-size: only with --kernel prefill" in text
    for words in ((), ("file.npz", "--shape", "1,1,64,128")):
        code, text = call(*words)
        assert code == 2 and "one of both" in text
    file = tmp_path / "file"
    file.write_text("no recording")
    code, text = call("--shape", "1,2,64,77", "--kernel", "x", "--record", str(file / "x.npz"))
    assert code == 2 and "D of --shape: no kernel has 77" in text
    assert "'x'" in text and f"--record: '{file}' is no folder" in text
    for name, why in (("none.npz", "No such file or directory"), ("file", "not a recording")):
        code, text = call(str(tmp_path / name), "--timeline", str(tmp_path))
        assert code == 2 and f"{tmp_path / name}: {why}" in text
        assert "--timeline must end in .png" in text and "Errno" not in text


def test_a_recording_takes_no_options_of_a_run(recorded: Path, tmp_path: Path) -> None:
    words = ("--kernel", "dense", "--kv-heads", "2", "--q-len", "1", "--record", "x.npz")
    code, text = call(str(recorded), *words, "--top", "3")
    assert code == 2
    assert "--kernel, --kv-heads, --q-len, --record: only with --shape, which runs a kernel" in text
    assert "--rounding" not in text and "--top" not in text


@pytest.mark.parametrize("option", ["--timeline", "--record"])
def test_what_cannot_be_written_at_the_end_loses_no_table(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """The folder was there when the command looked."""
    folder = tmp_path / "folder"
    folder.mkdir()
    name = folder / ("x.png" if option == "--timeline" else "x.npz")
    shape = ("--shape", "1,1,64,64") if option == "--record" else (str(recorded),)

    @contextlib.contextmanager
    def written(path: Path) -> Iterator[Path]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        yield path

    monkeypatch.setattr(command, "written", written)
    result = CliRunner().invoke(APP, [*shape, "--no-range", "--json", option, str(name)])
    assert result.exit_code == 1 and json.loads(result.stdout)["clk"] > 0
    assert "No space left on device" in result.stderr and "Traceback" not in result.stderr


def test_a_timeline_where_no_file_can_be_made_is_refused(recorded: Path) -> None:
    """Whatever the permissions say: root has all of them."""
    code, text = call(str(recorded), "--no-range", "--timeline", "/proc/x.png")
    assert code == 2 and "--timeline: cannot write into '/proc': " in text


def test_a_wrong_variable_of_the_emulator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cases, "record", lambda case: pytest.fail("it ran"))
    monkeypatch.setenv("LITEATTENTION_EMULATOR_ORDER", "up")
    monkeypatch.setenv("LITEATTENTION_EMULATOR_THREADS", "2000")
    code, text = call("--shape", "1,1,64,77")
    assert code == 2 and "D of --shape must be" in text
    assert "LITEATTENTION_EMULATOR_ORDER must be round-robin[:QUANTUM]" in text
    assert "LITEATTENTION_EMULATOR_THREADS must be a number up to 1024" in text
    assert "got 'up'" in text and "got '2000'" in text


def test_files_are_checked_before_the_kernel_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_cases, "record", lambda case: pytest.fail("it ran"))
    picture = tmp_path / "x.png"
    picture.mkdir()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ("--shape", "1,1,64,64", "--record", str(tmp_path), "--timeline", str(picture))
    code, text = call(*words)
    assert code == 2
    for option, path in (("--record", tmp_path), ("--timeline", picture)):
        assert f"{option}: '{path}' is a folder, a file is needed" in text
    assert "--timeline needs matplotlib: pip install 'liteattention-rocm[bench]'" in text
