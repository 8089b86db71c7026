"""``sglang serve`` on the small Wan model, as users run it.

VENV/bin/python -m pytest tests/serving/sglang_diffusion_http.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import imageio.v3 as iio
import numpy as np
import pytest

from liteattention_e2e.metrics import psnr
from tests import ROOT
from tests.serving import processes

from .sglang_worker import BOLD, PROMPT, SIZES, environment, model_directory, read_report, server

FP32 = ("--dit-precision", "fp32")


class Server(processes.Server):
    """``sglang serve``, which may write reports into a folder beside its log."""

    @property
    def reports(self) -> Path:
        return self.folder / "reports"

    def post(self, options: Any = None, **changes: Any) -> httpx.Response:
        body = {
            "prompt": PROMPT,
            "negative_prompt": "",
            "generator_device": "cpu",
            "fps": 8,
            **SIZES,
            **({} if options is None else {"diffusers_kwargs": {"liteattention": options}}),
            **changes,
        }
        return self.client.post("/v1/videos", json=body)

    def finish(self, response: httpx.Response) -> dict[str, Any]:
        assert response.status_code == 200, response.text
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            job = self.client.get(f"/v1/videos/{response.json()['id']}").json()
            if job["status"] in ("completed", "failed"):
                return dict(job)
            time.sleep(0.1)
        raise TimeoutError(job)

    def video(self, options: Any = None, **changes: Any) -> tuple[np.ndarray, dict[str, Any], Any]:
        """Frames, report and lists of one request."""
        job = self.finish(self.post(options, **changes))
        assert job["status"] == "completed", job
        return iio.imread(job["file_path"]), *read_report(self.reports, job["id"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    variables = {
        "LITEATTENTION_REPORT_DIR": str(folder / "reports"),
        # The warm-up has fewer tokens than this range.
        "LITEATTENTION_POLICY": ('{"threshold": -4.0, "warmup_steps": 0, "must_do": [[500, 576]]}'),
    }
    options = ("--attention-backend", "liteattention_rocm", *FP32)
    warm = ("--warmup-mode", "server", "--warmup-resolutions", "32x32")
    batch = ("--batching-max-size", "2", "--batching-delay-ms", "400")
    with server(Server, folder, *options, *warm, *batch, **variables) as running:
        yield running


def test_requests_at_once_with_different_thresholds_and_budgets(served: Server) -> None:
    options = [
        {"threshold": -2.0}, {"threshold": "-inf"}, {"threshold": -8.0}, False, {"budget": 0.3},
        {"budget": 0.05},
    ]  # fmt: skip
    with ThreadPoolExecutor(len(options)) as pool:
        together = list(pool.map(served.video, options))
    alone = [served.video(item) for item in options]
    for (frames, report, lists), (again, report_again, lists_again) in zip(
        together, alone, strict=True
    ):
        assert frames.shape == (4, 48, 48, 3)
        assert np.array_equal(frames, again)
        assert report["records"] == report_again["records"]
        assert lists.keys() == lists_again.keys()
        assert all(np.array_equal(lists[name], lists_again[name]) for name in lists)
    bold, exact, shy, dense, much, little = (report for _, report, _ in together)
    assert bold["policy"]["threshold"] == -2.0
    assert bold["policy"]["must_do"] == [[500, 576]], "the server's defaults lie beneath"
    assert bold["sparsity"] > shy["sparsity"] >= exact["sparsity"] == 0.0
    assert much["sparsity"] > little["sparsity"] > 0.0
    assert (much["policy"]["threshold"], much["policy"]["budget"]) == (None, 0.3)
    assert {record["budget"] for record in little["records"]} == {0.05}
    assert dense["records"] == []
    assert np.array_equal(together[1][0], together[3][0])
    assert not np.array_equal(together[0][0], together[1][0])


def test_requests_in_one_batch_have_the_lists_that_they_have_alone(served: Server) -> None:
    """Equal options are batched, whatever the prompt and the seed."""
    asked = [{"seed": 3}, {"seed": 5, "prompt": "a green square moves up on a white background"}]
    before = served.log.count("LiteAttention: request")
    with ThreadPoolExecutor(len(asked)) as pool:
        jobs = list(pool.map(lambda item: served.finish(served.post(BOLD, **item)), asked))
    said = served.log.count("LiteAttention: request") - before
    assert said == 1, "they were not batched"
    alone = [served.video(BOLD, **item) for item in asked]
    batched = [read_report(served.reports, job["id"]) for job in jobs]
    for job, (report, lists), (frames, own, own_lists) in zip(jobs, batched, alone, strict=True):
        assert sorted(report["requests"]) == sorted(item["id"] for item in jobs)
        assert len(own["requests"]) == 1
        row = report["requests"].index(job["id"])
        assert lists.keys() == own_lists.keys()
        for name, value in own_lists.items():
            assert lists[name].shape[0] == 2
            assert np.array_equal(lists[name][row : row + 1], value), name
        assert psnr(iio.imread(job["file_path"]), frames) > 40
    for field in ("tiles_total", "tiles_computed"):
        together = sum(row[field] for row in batched[0][0]["records"])
        assert together == sum(row[field] for _, report, _ in alone for row in report["records"])


def test_the_servers_defaults(served: Server) -> None:
    _, report, _ = served.video()
    assert report["policy"]["threshold"] == -4.0
    assert {record["threshold"] for record in report["records"]} == {-4.0}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"threshold": 2.5}, "did you mean -2.5"),
        ({"thresh": -2}, "thresh: a policy has no such field (did you mean threshold?)"),
        (-2, "object"),
        ({"must_do": [[9, 3]] * 20_000}, "must_do has 20,000 ranges, of which a request may"),
        ({"threshold": ["a"] * 2000}, "and 1,994 more wrong items"),
    ],
)
def test_bad_options_fail_the_request_and_not_the_server(
    served: Server, options: Any, reason: str
) -> None:
    response = served.post(options)
    assert 400 <= response.status_code < 500, response.text
    assert reason in response.text and len(response.content) < 4500
    assert served.video(BOLD)[1]["sparsity"] > 0


def test_what_only_the_worker_can_know_fails_the_job(served: Server) -> None:
    job = served.finish(served.post({"must_do": [[0, 100000]]}))
    assert job["status"] == "failed"
    assert "ends past the 576 keys" in job["error"]["message"]
    assert served.video(BOLD)[1]["sparsity"] > 0


def test_the_server_was_warm_at_another_resolution(served: Server) -> None:
    log = served.log
    assert "Applied 1 hook(s)" in log
    assert "arm" in log and "32x32" in log
    finished = [line for line in log.splitlines() if "LiteAttention: request" in line]
    named = sum(line.split(" skipped")[0].count(",") + 1 for line in finished)
    assert len(list(served.reports.glob("*.json"))) == named


def test_options_for_a_server_of_another_backend(tmp_path: Path) -> None:
    """They would be ignored: nothing of ours runs in its worker."""
    with server(Server, tmp_path, "--attention-backend", "torch_sdpa", *FP32) as other:
        refused = other.post(BOLD)
        assert refused.status_code == 400, refused.text
        assert "runs attention backend 'torch_sdpa'" in refused.text
        assert other.finish(other.post())["status"] == "completed"


def test_options_for_sglang_generate_with_another_backend(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *("sglang", "generate", "--model-path", str(model_directory(tmp_path))),
            *("--prompt", PROMPT, "--height", "48", "--width", "48", "--num-frames", "4"),
            *("--num-inference-steps", "1", "--output-path", str(tmp_path / "videos")),
            *("--attention-backend", "torch_sdpa", *FP32),
            *("--diffusers-kwargs", '{"liteattention": {"threshold": -2}}'),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "runs attention backend 'torch_sdpa'" in done.stderr.splitlines()[-1], done.stderr
    assert not list((tmp_path / "videos").glob("*.mp4"))


def test_the_example_asks_with_other_settings_in_each_request(served: Server) -> None:
    before = set(served.reports.glob("*.json"))
    more = {"negative_prompt": "", "generator_device": "cpu", "fps": 8, **SIZES}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "sglang_video.py", "--url", served.url,
         "--prompt", PROMPT, "--more", json.dumps(more)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": completed, ") == 4, done.stdout
    files = {line.rpartition(", ")[2] for line in done.stdout.splitlines()}
    assert len(files) == 4 and all(Path(file).exists() for file in files)
    reports = [json.loads(p.read_text()) for p in set(served.reports.glob("*.json")) - before]
    sparse = [report["policy"] for report in reports if report["records"]]
    found = {(policy.get("threshold"), policy.get("budget")) for policy in sparse}
    assert len(reports) == 4 and found == {(-4.0, None), (None, 0.1), (-6.0, None)}
