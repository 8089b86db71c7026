"""The programs of examples/ run as their heads say, on a tiny model. Servers: tests/serving."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

#: The tiny model's stand-in for a VAE has to be imported before its pipeline is loaded.
SMALL = (
    "import runpy, sys; import liteattention_e2e.pixel_vae; del sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
SIZE = ("--size", "32x32x8", "--steps", "4", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("diffusers")
    from liteattention_e2e import tiny

    where = tmp_path_factory.mktemp("model")
    tiny.wan_pipeline(peaked=1.5).save_pretrained(where)
    return str(where)


def example(name: str, *arguments: str) -> list[str]:
    """Lines that an example prints."""
    done = subprocess.run(
        [sys.executable, "-c", SMALL, str(ROOT / "examples" / name), *arguments],
        capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def share(line: str) -> int:
    """The percentage that a line ends with."""
    found = re.search(r"(\d+)% of the tiles", line)
    assert found, line
    return int(found[1])


def test_every_example_is_tested_and_listed() -> None:
    tests = [Path(__file__), *(ROOT / "tests" / "serving").glob("*.py")]
    text = "".join(path.read_text() for path in tests)
    listed = (ROOT / "examples" / "README.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f'"{path.name}"' in text and f"]({path.name})" in listed, path.name


@pytest.mark.parametrize("rule", [(), ("--threshold", "-4")], ids=["budget", "threshold"])
def test_a_video_in_diffusers(model: str, tmp_path: Path, rule: tuple[str, ...]) -> None:
    out = tmp_path / "new" / "folder" / "video.mp4"
    dense = ("--warmup-steps", "1")
    arguments = ("--model", model, *SIZE, *rule, *dense, "--out", str(out))
    (line,) = example("wan_diffusers.py", *arguments)
    assert 1 < share(line) < 90
    assert out.read_bytes()[4:8] == b"ftyp"


def test_a_calibrated_policy(model: str, tmp_path: Path) -> None:
    policies = tmp_path / "policies.json"
    policies.write_text(
        json.dumps({
            "nothing": {"budget": 0.0, "warmup_steps": 1},
            "bold": {"budget": 0.0, "layer_budgets": {"blocks.*": 0.3}, "warmup_steps": 1},
        })
    )  # fmt: skip
    nothing, bold = example(
        "calibrated_policy.py", "--model", model, *SIZE, "--policies", str(policies)
    )
    assert nothing.startswith("nothing: ") and share(nothing) == 0
    assert nothing.endswith(" equal to dense")
    assert bold.startswith("bold: ") and share(bold) > 2
    assert 10 < float(re.search(r"([\d.]+) dB", bold)[1]) < 60  # type: ignore[index]


def test_a_benchmark_on_this_device() -> None:
    arguments = ("--shape", "1,1024,2,64", "--device", "cpu", "--seconds", "0.02")
    *times, skipped = example("bench_attention.py", *arguments)
    assert [line[:13].strip() for line in times] == ["torch", "ours, dense", "LiteAttention"]
    assert all(float(line.split()[-2]) > 0 for line in times)
    assert share(skipped) > 30


def test_a_benchmark_of_any_number_of_tokens() -> None:
    show = "from runpy import run_path; print(run_path('bench_attention.py')['q'].shape[1])"
    for tokens in (100, 300):
        words = ("--shape", f"1,{tokens},1,64", "--device", "cpu", "--seconds", "0")
        done = subprocess.run(
            [sys.executable, "-c", show, *words],
            cwd=ROOT / "examples", capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1:] == [str(tokens)], done.stderr


def test_without_a_server_one_line_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "sglang_video.py"), "--url", "http://127.0.0.1:9"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: no server answers at http://127.0.0.1:9: " in done.stderr
