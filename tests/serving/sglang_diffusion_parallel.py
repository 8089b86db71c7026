"""Several processes denoise one video: lists and frames are those of one process.

    VENV/bin/python -m pytest tests/serving/sglang_diffusion_parallel.py

Ulysses keeps the lists of each process's heads, a ring those of its rows against the keys of each
process, and guidance in parallel those of its branch.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from liteattention_e2e.metrics import psnr
from liteattention_rocm import LiteAttention, SkipPolicy, merge_states
from liteattention_sglang import generation

from .sglang_worker import (
    PROMPT,
    SIZES,
    Result,
    Worker,
    environment,
    four_heads,
    live_states,
    on_ranks,
    read_report,
)

HEADS, TOKENS = 4, 576
#: Ranges over 576 tokens, across the border of two splits.
RANGES = {"must_do": [[200, 300]], "must_skip": [[512, 576]]}
POLICIES: list[Any] = [
    {"threshold": -0.5, "warmup_steps": 0, **RANGES},
    {"threshold": "-inf", "warmup_steps": 0},
]
#: Where a process has whole rows of some heads.
BY_HEAD: dict[str, Any] = {
    "budget": 0.0, "layer_budgets": {"*": [0.3, 0.02, 0.0, 0.6]}, "warmup_steps": 0, **RANGES
}  # fmt: skip
#: name -> processes and what SGLang is told.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ulysses 2": (2, {"ulysses_degree": 2}),
    "ulysses 4": (4, {"ulysses_degree": 4}),
    "ring 2": (2, {"ring_degree": 2, "ulysses_degree": 1}),
    "ulysses 2 x ring 2": (4, {"ring_degree": 2, "ulysses_degree": 2}),
    "guidance 2": (2, {"enable_cfg_parallel": True}),
}


#: What the command line is given, beneath the request's own.
DEFAULTS, REQUEST = {"threshold": -0.5}, {"warmup_steps": 1}


def serve(
    rank: int, port: int, folder: Path, model: Path, arguments: Any, more: tuple[Any, ...] = ()
) -> list[Result]:
    worker = Worker(folder, model=model, rank=rank, port=port, dit_precision="fp32", **arguments)
    worker.run(POLICIES[1], height=32, width=32, num_inference_steps=2)
    abort(worker)
    return [worker.run(policy) for policy in (*POLICIES, *more)]


def abort(worker: Worker) -> None:
    """A request that dies inside its second step; nothing of it may be found later."""
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context

    def fail(module: Any, args: Any, output: Any) -> None:
        if get_forward_context().current_timestep == 1:
            raise RuntimeError("the client went away")

    handle = worker.transformer.blocks[3].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="the client went away"):
        worker.run({"threshold": -0.2, "warmup_steps": 0})
    handle.remove()
    assert live_states() == 0


def serve_as_ring(rank: int, port: int, folder: Path, model: Path) -> list[Result]:
    """One process that computes what a ring of two computes."""
    generation.Generation.attend = attend_as_ring  # type: ignore[method-assign]
    generation.Generation.lists = lists_of_ring  # type: ignore[method-assign]
    worker = Worker(folder, model=model, rank=rank, port=port, dit_precision="fp32")
    return [worker.run(policy) for policy in POLICIES]


def attend_as_ring(
    self: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    layer: str,
    step: int,
    negative: bool,
    scale: Any,
    out: Any,
    heads: Any = None,
    forward: Any = None,
) -> None:
    position = self._position(q, layer, step, negative, forward)
    halves = [slice(0, TOKENS // 2), slice(TOKENS // 2, TOKENS)]
    own = self.__dict__.setdefault("own", {})
    for rank, rows in enumerate(halves):
        parts = []
        for split, keys in enumerate(halves):
            lite = own.setdefault((rank, split), LiteAttention(half(self.lite.policy, split)))
            inputs = (x.contiguous() for x in (q[:, rows], k[:, keys], v[:, keys]))
            parts.append(lite(*inputs, scale=scale, return_lse=True, **position))
        out[:, rows] = merge_states([o for o, _ in parts], [lse for _, lse in parts])[0]


def half(policy: SkipPolicy, split: int) -> SkipPolicy:
    if not policy.must_do:
        return policy
    ranges = [
        {"must_do": ((200, 288),), "must_skip": ()},
        {"must_do": ((0, 12),), "must_skip": ((224, 288),)},
    ]
    return policy.model_copy(update=ranges[split])


def lists_of_ring(self: Any) -> dict[str, torch.Tensor]:
    return {
        f"{rank}/{layer}/{branch}/{split}": lite.lists(layer, branch)
        for (rank, split), lite in self.own.items()
        for layer in self.layers
        for branch in self._branches_of(layer)
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four_heads(tmp_path_factory.mktemp("four-heads"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    more = (BY_HEAD, {**DEFAULTS, **REQUEST})
    (results,) = on_ranks(serve, 1, tmp_path_factory.mktemp("alone"), model, {}, more)
    bold, exact, *_ = results
    assert 0.05 < bold.report["sparsity_last_step"] < 0.5, "lists that say nothing"
    assert exact.report["sparsity"] == 0.0
    assert not np.array_equal(bold.frames, exact.frames)
    return list(results)


@pytest.fixture(scope="module")
def as_ring(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    (results,) = on_ranks(serve_as_ring, 1, tmp_path_factory.mktemp("as-ring"), model)
    return list(results)


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[list[Result]]]:
    count, arguments = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("ranks")
    arguments = {"num_gpus": count, **arguments}
    more = () if "ring" in request.param else (BY_HEAD,)
    return request.param, on_ranks(serve, count, folder, model, arguments, more)


def tiles(results: list[Result], field: str) -> int:
    return sum(row[field] for item in results for row in item.report["records"])


def together(name: str, results: list[Result]) -> dict[str, np.ndarray]:
    """Lists of all ranks under the names that they have in one process, or in ``serve_as_ring``."""
    found = {}
    if name.startswith("guidance"):
        assert [{key.split("/")[1] for key in item.lists} for item in results] == [
            {"cond"},
            {"uncond"},
        ]
        return {key: value for item in results for key, value in item.lists.items()}
    group = len(results) // 2 if "ring" in name else len(results)  # that shares the heads
    for first in range(0, len(results), group):
        members = results[first : first + group]
        for key in members[0].lists:
            heads = [item.lists[key] for item in members]
            prefix = f"{first // group}/" if "ring" in name else ""
            found[prefix + key] = np.concatenate(heads, axis=1)
    return found


def test_lists_and_frames_are_those_of_one_process(
    ranks: tuple[str, list[list[Result]]], request: pytest.FixtureRequest
) -> None:
    name, answers = ranks
    wanted = request.getfixturevalue("as_ring" if "ring" in name else "alone")
    for index, expected in enumerate(wanted[: len(POLICIES)]):
        results = [answer[index] for answer in answers]
        difference = np.abs(results[0].frames.astype(int) - expected.frames.astype(int))
        assert expected.frames.std() > 10, "an empty video equals everything"
        # SGLang adds the branches of one step in another order if they come from two processes.
        assert difference.max() <= ("guidance" in name)
        lists = together(name, results)
        assert lists.keys() == expected.lists.keys() and len(lists) >= 12
        for key, value in expected.lists.items():
            assert lists[key].shape[1] == HEADS
            assert lists[key].tobytes() == value.tobytes(), key
        if "ring" not in name:
            for field in ("tiles_total", "tiles_computed", "tiles_kept"):
                assert tiles(results, field) == tiles([expected], field)
        skipped = 1 - tiles(results, "tiles_computed") / tiles(results, "tiles_total")
        assert (skipped > 0.02) == (index == 0)


def test_each_process_takes_the_budgets_of_its_heads(
    ranks: tuple[str, list[list[Result]]], alone: list[Result]
) -> None:
    name, answers = ranks
    if "ring" in name:
        pytest.skip("a ring keeps lists by split: tests/lite/test_parallel.py")
    results = [answer[len(POLICIES)] for answer in answers]
    expected = alone[len(POLICIES)]
    lists = together(name, results)
    assert lists.keys() == expected.lists.keys()
    for key, value in expected.lists.items():
        assert lists[key].tobytes() == value.tobytes(), key
    assert tiles(results, "tiles_kept") == tiles([expected], "tiles_kept")
    assert tiles(results, "tiles_kept") < 0.95 * tiles(results, "tiles_total")


def test_a_ring_that_skips_nothing_is_one_process(
    ranks: tuple[str, list[list[Result]]], alone: list[Result]
) -> None:
    _, answers = ranks
    difference = answers[0][1].frames.astype(int) - alone[1].frames.astype(int)
    assert np.abs(difference).max() <= 1


def test_the_command_line_on_two_processes(
    model: Path, alone: list[Result], tmp_path: Path
) -> None:
    command = [
        *("sglang", "generate", "--model-path", str(model), "--prompt", PROMPT),
        *("--attention-backend", "liteattention_rocm", "--dit-precision", "fp32"),
        *("--attention-backend-config", json.dumps(DEFAULTS)),
        *("--diffusers-kwargs", json.dumps({"liteattention": REQUEST})),
        *("--num-gpus=2", "--ulysses-degree=2", "--output-path", str(tmp_path / "videos")),
        *(f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()),
    ]
    done = subprocess.run(
        command,
        env=environment(LITEATTENTION_REPORT_DIR=str(tmp_path / "reports")),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "of the tiles of self-attention" in done.stdout + done.stderr
    names = sorted(Path(item).stem for item in os.listdir(tmp_path / "reports") if "json" in item)
    assert len(names) == 2
    ranks = [Result(np.empty(0), *read_report(tmp_path / "reports", name)) for name in names]
    expected = alone[-1]
    for result in ranks:
        assert result.report["policy"]["threshold"] == -0.5
        assert {r["step"] for r in result.report["records"] if r["dense"]} == {0}
    assert expected.report["sparsity_last_step"] > 0.05
    lists = together("ulysses 2", ranks)
    assert lists.keys() == expected.lists.keys() and len(lists) == 12
    for key, value in expected.lists.items():
        assert lists[key].tobytes() == value.tobytes(), key
    for field in ("tiles_total", "tiles_computed", "tiles_kept"):
        assert tiles(ranks, field) == tiles([expected], field)
    (video,) = (tmp_path / "videos").glob("*.mp4")
    assert psnr(iio.imread(video), expected.frames) > 20  # the file is compressed
