"""The generation-time suite over SGLang: the report of diffusers, with the same sparsity.

    VENV/bin/python -m pytest tests/serving/sglang_diffusion_suite.py

See ``sglang_diffusion_lists.py`` for ``LITEATTENTION_DIFFUSERS_PYTHON``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from liteattention_e2e.config import load_config
from liteattention_e2e.metrics import compare, psnr, summarise_quality
from liteattention_e2e.sglang_runner import SglangRunner

from .sglang_diffusion_lists import PYTHON
from .sglang_worker import MODEL, PROMPT, SIZES, environment

SCRIPT = """
    import sys
    from liteattention_e2e import cli

    cli.e2e(
        runner="sglang", model=sys.argv[3], prompts=sys.argv[1], out=sys.argv[2],
        threshold=["-2,-inf"], seeds=["3"],
        height="48", width="48", frames="4", steps="4", short_steps="2", dtype="float32",
        warmup="0",
    )
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "prompts.txt").write_text(PROMPT)
    done = subprocess.run(
        [
            *(sys.executable, "-c", textwrap.dedent(SCRIPT)),
            *(folder / "prompts.txt", folder / "out", MODEL),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    found["folder"] = folder / "out"
    return found


def test_a_device_that_sglang_does_not_run_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.multimodal_gen.runtime.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    sizes = {"height": 48, "width": 48, "frames": 4, "steps": 4, "short_steps": 2}
    config = load_config({"runner": "sglang", "model": str(MODEL), "prompts": [PROMPT], **sizes})
    with mock.patch.dict(os.environ), pytest.raises(ValueError, match="say --device cuda"):
        SglangRunner(config)


def test_the_report_is_whole(report: dict[str, Any]) -> None:
    names = [item["name"] for item in report["configurations"]]
    kinds = ["diffusers", "dense", "lite -2", "lite -inf"]
    assert names == [*kinds, *(f"{kind}, 2 steps" for kind in kinds)]
    assert report["settings"]["runner"] == "sglang"
    assert report["settings"]["tokens"] == 576
    assert any("SGLang made these videos" in note for note in report["notes"])
    for run in report["runs"]:
        assert len(run["steps"]) == (2 if "2 steps" in run["configuration"] else 4)
        assert 0 < sum(run["steps"]) <= run["denoise"] < run["total"]
        assert run["encode"] > 0 and run["decode"] > 0
        assert run["peak_memory_bytes"] is None, "SGLang measures it on a GPU only"
    for kind, files in report["artefacts"].items():
        for name in files if isinstance(files, list) else []:
            assert (report["folder"] / name).stat().st_size > 0, (kind, name)
    assert "sparsity_by_layer_lite_-2.png" in report["artefacts"]["plots"]


def test_sparsity_and_quality_are_those_of_diffusers(
    report: dict[str, Any], tmp_path: Path
) -> None:
    # The second is dense, and has lists to write.
    policies = [{"threshold": limit, "warmup_steps": 0} for limit in (-2.0, "-inf")]
    asked = {"policies": policies, "prompt": PROMPT, **SIZES}
    script = Path(__file__).with_name("diffusers_reference.py")
    target = tmp_path / "reference.npz"
    done = subprocess.run(
        [PYTHON, str(script), str(target), json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(target) as stored:
        records = json.loads(str(stored["records0"]))
        quality = psnr(stored["frames0"], stored["frames1"])
    total = sum(row["tiles_total"] for row in records)
    wanted = 1 - sum(row["tiles_computed"] for row in records) / total
    (lite,) = (item for item in report["configurations"] if item["name"] == "lite -2")
    assert wanted > 0.05
    assert lite["sparsity"]["mean"] == pytest.approx(wanted, abs=1e-12)
    assert lite["quality"]["vs_dense"]["psnr_db_mean"] == pytest.approx(quality, abs=0.2)
    (exact,) = (item for item in report["configurations"] if item["name"] == "lite -inf")
    assert exact["sparsity"]["mean"] == 0.0
    assert exact["quality"]["vs_dense"]["identical"]


@pytest.mark.parametrize("schedule", ["", ", 2 steps"])
def test_quality_is_also_against_sglangs_own_attention(
    report: dict[str, Any], schedule: str
) -> None:
    """The same seed through its torch_sdpa: in fp32 ours rounds alike, and skipping shows."""
    found = {item["name"]: item for item in report["configurations"]}
    own = {kind: found[f"{kind}{schedule}"] for kind in ("dense", "lite -2", "lite -inf")}
    frames = np.load(report["folder"] / "frames_p0_s3.npz")
    suffix = schedule.replace(", ", "_").replace(" ", "_")
    for kind, item in own.items():
        name = kind.replace(" ", "_") + suffix
        quality = item["quality"]["vs_diffusers"]
        pair = compare(frames[name], frames["diffusers" + suffix])
        assert quality == summarise_quality([pair])
        assert quality["identical"] or quality["psnr_db_min"] > (30 if kind == "lite -2" else 48)
    assert own["lite -2"]["sparsity"]["last_step"] > 0 == own["lite -inf"]["sparsity"]["last_step"]


def test_options_that_sglang_has_not_are_refused() -> None:
    from liteattention_e2e.config import load_config
    from liteattention_e2e.sglang_runner import SglangRunner

    options = {
        "runner": "sglang",
        "model": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "prompts": [PROMPT],
        "geometry": "mi300x",
        "cross_attention": "own",
    }
    with pytest.raises(ValueError, match="geometry") as error:
        SglangRunner(load_config(options))
    for word in ("cross_attention", "height", "frames", "steps", "guidance"):
        assert word in str(error.value)
