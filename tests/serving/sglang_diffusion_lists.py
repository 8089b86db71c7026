"""The same video in SGLang and in diffusers: the same lists, byte for byte.

Both runners work in fp32 with the same sampler on the same noise. They add in different orders, so
hidden states differ in the last bits; tiles are judged alike.

    VENV/bin/python -m pytest tests/serving/sglang_diffusion_lists.py

``LITEATTENTION_DIFFUSERS_PYTHON`` names the Python with ``liteattention-rocm[diffusers]``,
``.venv/bin/python`` of the checkout by default: SGLang pins another diffusers than we need.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from liteattention_e2e.metrics import psnr

from .sglang_worker import PROMPT, REPOSITORY, SIZES, Result, shared_worker

PYTHON = os.environ.get("LITEATTENTION_DIFFUSERS_PYTHON", str(REPOSITORY / ".venv/bin/python"))
POLICIES: list[dict[str, Any]] = [
    {"threshold": "-inf", "warmup_steps": 0},
    {"threshold": -2.0, "warmup_steps": 0},
    {"threshold": -4.0, "warmup_steps": 1, "soft_skip": True},
    {
        "threshold": [-8.0, -4.0, -1.0],
        "must_do": [[0, 64]],
        "warmup_steps": 0,
        "layer_thresholds": {"blocks.0.*": -9},
    },
    {
        "budget": 0.1,
        "layer_budgets": {
            "blocks.1.*": [0.02, 0.0, 0.2],
            "blocks.2.*": [[0.2, 0.0, 0.0], [0.2, 0.0, 0.0], [0.2, 0.1, 0.0]],
        },
        "warmup_steps": 1,
    },
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    if not Path(PYTHON).exists():
        pytest.fail(f"no {PYTHON}: `make test` makes it, or set LITEATTENTION_DIFFUSERS_PYTHON")
    target = tmp_path_factory.mktemp("diffusers") / "reference.npz"
    asked = json.dumps({"policies": POLICIES, "prompt": PROMPT, **SIZES})
    script = Path(__file__).with_name("diffusers_reference.py")
    done = subprocess.run(
        [PYTHON, str(script), str(target), asked],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        | ({"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(target) as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [shared_worker().run(policy) for policy in POLICIES]


@pytest.mark.parametrize("index", range(len(POLICIES)))
def test_lists_and_tiles_are_the_same(
    reference: dict[str, np.ndarray], results: list[Result], index: int
) -> None:
    lists = results[index].lists
    assert lists is not None
    wanted = {
        name.split("/", 1)[1]: value
        for name, value in reference.items()
        if name.startswith(f"lists{index}/")
    }
    assert lists.keys() == wanted.keys() and len(wanted) == 12
    for name, value in wanted.items():
        assert lists[name].tobytes() == value.tobytes(), name
    report = results[index].report
    assert report is not None
    records = json.loads(str(reference[f"records{index}"]))
    strip = lambda rows: [{**row, "generation": None} for row in rows]  # noqa: E731
    key = lambda row: (row["step"], row["layer"], row["branch"])  # noqa: E731
    assert sorted(strip(report["records"]), key=key) == sorted(strip(records), key=key)


@pytest.mark.parametrize("index", range(1, len(POLICIES)))
def test_quality_is_the_same(
    reference: dict[str, np.ndarray], results: list[Result], index: int
) -> None:
    """PSNR against the run that skips nothing, of each runner against its own."""
    mine = psnr(results[index].frames, results[0].frames)
    theirs = psnr(reference[f"frames{index}"], reference["frames0"])
    assert np.isfinite(theirs)
    assert mine == pytest.approx(theirs, abs=0.2)


def test_frames_are_the_same(reference: dict[str, np.ndarray], results: list[Result]) -> None:
    for index, result in enumerate(results):
        difference = np.abs(result.frames.astype(int) - reference[f"frames{index}"].astype(int))
        assert difference.max() <= 1
