"""Options of ``bench`` that cannot work: all are listed, by their names, before anything runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from liteattention_benchmark import counters, cpu, emulator, kernels, video, video_ranks
from liteattention_benchmark.cli import app
from liteattention_e2e.config import load_config
from liteattention_rocm.cli import needs

RUNNER = CliRunner()
HUGE, MOST = str(10**20), str(2**31 - 1)


def refused(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """Run a command that must refuse its options; what it says, in one line."""
    for module in (cpu, emulator, kernels, video, video_ranks):
        monkeypatch.setattr(module, "run", lambda *_, **__: pytest.fail("it was measured"))
    result = RUNNER.invoke(app, words, env={"COLUMNS": "2000"})
    assert result.exit_code == 2, result.output
    assert "pydantic" not in result.output and "validation error" not in result.output
    return " ".join(result.output.replace("│", " ").split())


def test_bench_cpu_asks_the_engine_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ("1,8,64,300", "1,1,128,64", "1,8,64,7", f"1,2,{HUGE},64", f"1,8,{MOST},64")
    text = refused(monkeypatch, "cpu", *(word for shape in shapes for word in ("--shape", shape)))
    for part in (
        "--shape 1,8,64,300: engine 'cpu': head dim must be a multiple of 8 from 8 to 256, got 300",
        "--shape 1,8,64,7: engine 'cpu': head dim must be a multiple of 8 from 8 to 256, got 7",
        f"numbers of --shape must be at most 2^31 - 1, got {HUGE} in '1,2,{HUGE},64'",
        f"--shape 1,8,{MOST},64: it takes 12,288.0 GiB, and this machine has",
    ):
        assert part in text
    assert "1,1,128,64" not in text


@pytest.mark.parametrize("threads", [3, 10**12])
def test_threads_without_a_processor_are_refused(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 7})
    text = refused(monkeypatch, "cpu", "--threads", str(threads), "--shape", "x")
    wanted = "must be at most 2, as many as there are processors for"
    assert f"--threads {wanted}, got {threads}" in text and "--shape must be four" in text
    given = {"model": "x", "prompts": ["p"]}
    assert load_config({**given, "threads": "2"}).threads == 2
    with pytest.raises(ValueError, match=f"threads={threads}: {wanted}"):
        load_config({**given, "threads": str(threads)})


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16"])
def test_dtypes_have_two_names(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    serving = ("serving", "--framework", "vllm", "--case", "x")
    for words in (("cpu", "--shape", "x"), ("tune", "--shape", "x"), serving):
        text = refused(monkeypatch, *words, "--dtype", dtype)
        assert "--dtype" not in text
    assert load_config({"model": "x", "dtype": dtype}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("1,2,64,96", "--shape 1,2,64,96: head dim must be 64 or 128, got 96"),
        (f"1,2,{MOST},64", "it takes 3,072.0 GiB, and this machine has"),
        (f"1,2,{'9' * 5000},64", "numbers of --shape must be at most 2^31 - 1"),
        ("1,2,0,64", "--shape must be four positive numbers B,H,S,D, got '1,2,0,64'"),
    ],
    ids=["dim", "memory", "digits", "zero"],
)
def test_bench_emulator_asks_the_kernels(
    monkeypatch: pytest.MonkeyPatch, shape: str, reason: str
) -> None:
    assert reason in refused(monkeypatch, "emulator", "--shape", shape)


def test_bench_video_names_the_options_and_not_the_file_of_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = ("--sparsity", "0.5", "--sparsity", "1.5", "--pattern", "foo", "--attention", "nope")
    text = refused(monkeypatch, "video", *wrong, "--eager", "--device", "tpu")
    for part in (
        "--sparsity: Input should be less than 1, got 1.5",
        "--pattern: Input should be 'uniform', 'clustered' or 'unequal', got 'foo'",
        "--attention: Input should be 'cudnn'", "got 'nope'",
        "--eager is for --compile: without it no block is compiled: leave it out",
        "--device must be cpu or cuda, got 'tpu'",
    ):  # fmt: skip
        assert part in text
    assert ".yaml" not in text
    file = tmp_path / "mine.yaml"
    file.write_text("height: 7\nsparsity: [3]\n")
    text = refused(monkeypatch, "video", "--config", str(file), "--pattern", "foo", "--gpus", "2")
    for part in (
        f"--config {file}: height: Input should be a multiple of 16, got 7",
        f"--config {file}: sparsity.0: Input should be less than 1, got 3",
        f"--config {file}: transformer: Field required", "--pattern: Input should be 'uniform'",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("more", [(), ("--gpus", "2"), ("--runtime", "sglang")])
def test_bench_video_of_sizes_for_a_gpu_needs_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(needs, "installed", lambda name: True)
    for words in ((), ("--config", "wan2.1-14b"), ("--config", "wan2.1-14b-720p")):
        text = refused(monkeypatch, "video", *words, *more, "--out", str(tmp_path), "--steps", "1")
        name = words[1] if words else "wan2.1-1.3b"
        assert f"--config {name}: its sizes are for a GPU, and PyTorch sees none: take" in text
        assert "take --config wan-smoke --device cpu, or a file of your own without needs" in text


def test_bench_video_on_a_cpu_that_was_asked_for_runs_any_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = video.Row("ours, dense", 1.0, (0.5, 0.5), None, None, True, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(video, "run", lambda *_, **__: [row])
    for words in (("--config", "wan-smoke"), ("--layers", "1", "--device", "cpu")):
        result = RUNNER.invoke(app, ["video", *words, "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output


def test_bench_kernels_lists_what_is_wrong_with_file_peers_and_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("rounds: 1\ndense:\n  - {batch: 0}\n")
    words = ("--config", str(file), "--peer", "x", "--peer", "y", "--out", str(file))
    words += ("--peer", "ours, lite=a:b", "--peer", "mine=a:b", "--peer", "mine=c:d")
    words += ("--peer", "\udcff=a:b")
    text = refused(monkeypatch, "kernels", *words)
    for part in (
        f"--config {file}: rounds: Input should be greater than or equal to 3, got 1",
        f"--config {file}: dense.0.batch: Input should be greater than 0, got 0",
        "--peer: a peer is NAME=FILE_OR_MODULE:FUNCTION, got 'x'", "got 'y'", "--out: ",
        "--peer: 'ours, lite' is a name of ours: give the peer another one",
        "--peer: two are called 'mine'", r"--peer: '\udcff=a:b' has characters that are no UTF-8",
    ):  # fmt: skip
        assert part in text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = refused(monkeypatch, "kernels", "--config", "gpu", "--peer", "x")
    for part in ("--config gpu: its sizes are for a GPU", "take --config smoke", "got 'x'"):
        assert part in text
    file.write_text("")
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    text = refused(monkeypatch, "kernels", "--config", str(file), "--counters")
    assert f"--config {file}: it has no shapes" in text
    assert "--counters: ncu is not on this machine: install it, or leave --counters out" in text
    file.write_text("a: b\nc: d: e\n")
    text = refused(monkeypatch, "kernels", "--config", str(file))
    assert f"--config {file} is no YAML (line 2) ╰" in text
    text = refused(monkeypatch, "kernels", "--config", "absent")
    names = "chunks, counters, gpu, lite, serving, short, smoke"
    assert f"--config: no file absent; those of the package are {names} " in text


@pytest.mark.parametrize("command", ["kernels", "tune"])
def test_a_library_that_is_not_there_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    for path, why in ((tmp_path / "fa3.so", "does not exist"), (tmp_path, "is a directory")):
        text = refused(monkeypatch, command, "--fa3-library", str(path))
        assert "--fa3-library" in text and why in text


def test_what_is_for_several_gpus_is_refused_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("video", "--config", "wan-smoke", "--device", "cpu", "--peer-memory", "--parallel")
    text = refused(monkeypatch, *words, "ring")
    for name in ("--parallel", "--peer-memory"):
        assert f"{name} is for --gpus 2 or more with --runtime diffusers: leave it out" in text
