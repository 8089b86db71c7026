"""Models whose pipelines say less than Wan's about the request, the step or the branch.

Their weights are too large for tests. What reaches a layer is the same here as there: the stages
and the way they set the forward context are SGLang's, the layers are those of the small model.

    VENV/bin/python -m pytest tests/serving/sglang_diffusion_models.py
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from liteattention_rocm import LiteAttention, SkipPolicy, attention
from liteattention_sglang import diffusion_stages

from .sglang_diffusion_schedules import Video
from .sglang_worker import BOLD, Worker, context, self_attention, shared_worker, state_of

POLICY: dict[str, Any] = {"threshold": -4.0, "warmup_steps": 0}
VIDEO = Video(7)


@pytest.fixture(scope="session")
def worker() -> Worker:
    return shared_worker()


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Warnings and errors of ours since the test began."""
    diffusion_stages._warn_once.cache_clear()
    caplog.set_level(logging.INFO, "liteattention_sglang")
    yield lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("liteattention") and record.levelno >= logging.WARNING
    ]


def stage_of(name: str, **parts: Any) -> Any:
    """A stage of SGLang's without its models."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages import (
        helios_denoising,
        ltx_2,
        mova,
    )

    kinds = {
        "MOVA": mova.MOVADenoisingStage,
        "Helios": helios_denoising.HeliosChunkedDenoisingStage,
        "LTX-2": ltx_2.denoising.LTX2DenoisingStage,
    }
    stage = object.__new__(kinds[name])
    vars(stage).update(parts)
    return stage


def run(worker: Worker, stage: Any, request: Any, body: Callable[[], Any]) -> Any:
    """Run a stage with the small model's layers in place of its own; return its request."""

    def original(stage: Any, batch: Any, arguments: Any) -> Any:
        body()
        return batch

    return diffusion_stages.run_stage(original, stage, request, worker.arguments)


def layers(worker: Worker) -> list[Any]:
    return self_attention(worker)[:2]


def exact(layer: int, step: int, branch: int) -> torch.Tensor:
    return attention(*VIDEO.tensors(layer, step, branch), scale=128**-0.5)


def report_of(worker: Worker, request: Any) -> dict[str, Any]:
    return dict(json.loads((worker.reports / f"{request.request_id}.json").read_text()))


def test_the_branches_of_mova_have_lists_of_their_own(
    worker: Worker, said: Callable[[], list[str]]
) -> None:
    """Its pipeline runs both in each step and leaves ``is_cfg_negative`` as it is."""
    request = worker.request(POLICY, num_inference_steps=6)
    found: list[torch.Tensor] = []

    def forward(visual_dit: Any, context: tuple[int, int], **rest: Any) -> None:
        step, branch = context
        for layer, impl in enumerate(visual_dit):
            found.append(impl.forward(*VIDEO.tensors(layer, step, branch), None))

    stage = stage_of("MOVA", inference_single_step=forward)

    def body() -> None:
        for step in range(6):
            for branch in (0, 1):
                nothing = (None,) * 3
                stage._predict(
                    layers(worker), *nothing, (step, branch), None, None, 8, step, None, request
                )
        state = state_of(request)
        assert list(state.lists()) == [
            f"blocks.{layer}.attn1/{branch}" for layer in (0, 1) for branch in ("cond", "cond#2")
        ]

    run(worker, stage, request, body)
    wanted: list[torch.Tensor] = []
    own: dict[tuple[int, int], LiteAttention] = {}
    for step in range(6):
        if step == 1:  # that there are two in every step is known from the next one on
            own.clear()
        for branch in (0, 1):
            for layer in (0, 1):
                lite = own.setdefault((layer, branch), LiteAttention(SkipPolicy(**POLICY)))
                tensors = VIDEO.tensors(layer, step, branch)
                wanted.append(lite(*tensors, step=step, layer="x", scale=128**-0.5))
    assert len(found) == len(wanted) == 24
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    report = report_of(worker, request)
    assert report["sparsity_last_step"] > 0.1, "nothing is skipped: no test of lists"
    assert report["dense"] == [] and said() == []


@pytest.mark.parametrize("options", [POLICY, None, False], ids=str)
def test_a_timestep_that_is_no_step_makes_all_dense_and_is_said_once(
    worker: Worker, options: Any, said: Callable[[], list[str]]
) -> None:
    """Helios gives the scheduler's timesteps, which are tensors; SANA-WM gives them as integers."""
    timesteps: list[list[Any]] = [list(torch.tensor([999.0, 500.0, 3.0, 0.0])), [999, 500, 3, 0]]
    for given in timesteps:
        for _ in range(2):
            request = worker.request(options, num_inference_steps=4)
            found: list[tuple[torch.Tensor, torch.Tensor]] = []

            def body(request: Any = request, given: Any = given, found: Any = found) -> None:
                for step, timestep in enumerate(given):
                    with context(request, timestep, False):
                        for layer, impl in enumerate(layers(worker)):
                            out = impl.forward(*VIDEO.tensors(layer, step, 0), None)
                            found.append((out, exact(layer, step, 0)))

            run(worker, stage_of("Helios"), request, body)
            assert len(found) == 8 and all(torch.equal(*pair) for pair in found)
            report = report_of(worker, request)
            assert report["sparsity"] == 0.0 and report["records"] == []
            (dense,) = report["dense"]
            assert dense["layers"] == ["blocks.0.attn1", "blocks.1.attn1"]
            assert "no index of a step" in dense["reason"]
    if options is False:
        assert said() == []
        return
    assert len(said()) == 2, "one for tensors, one for integers"
    for text, value in zip(said(), ("a Tensor", "999"), strict=True):
        assert "LiteAttention did not run in 'blocks.0.attn1', 'blocks.1.attn1' of" in text
        assert worker.arguments.model_path in text and f"({value})" in text


def test_a_pass_between_steps_leaves_them_alone(
    worker: Worker, said: Callable[[], list[str]]
) -> None:
    """LingBot-World's context pass, which has current_timestep -1."""
    request = worker.request(POLICY, num_inference_steps=4)
    lite = LiteAttention(SkipPolicy(**POLICY))
    impl = layers(worker)[0]

    def body() -> None:
        for step in range(4):
            with context(request, -1, False):
                assert torch.equal(
                    impl.forward(*VIDEO.tensors(0, step, 1), None), exact(0, step, 1)
                )
            with context(request, step, False):
                tensors = VIDEO.tensors(0, step, 0)
                wanted = lite(*tensors, step=step, layer="x", scale=128**-0.5)
                assert torch.equal(impl.forward(*tensors, None), wanted)

    run(worker, stage_of("Helios"), request, body)
    (text,) = said()
    assert "current_timestep -1" in text and "'blocks.0.attn1'" in text


def test_encoders_of_a_request_are_outside_it(worker: Worker) -> None:
    """Qwen-Image 2.1 encodes prompts with the request, but without a step."""
    request = worker.request(POLICY)
    with context(request, None, False):
        out = layers(worker)[0].forward(*VIDEO.tensors(0, 0, 0), None)
    assert torch.equal(out, exact(0, 0, 0)) and state_of(request) is None


def ltx2(worker: Worker, options: Any, **changes: Any) -> Any:
    """One step of LTX-2's stage, whose forward context has no request."""
    request = worker.request(options, **changes)
    stage = stage_of("LTX-2")

    def body() -> None:
        settings = SimpleNamespace(use_ltx23_hq_timestep_semantics=False)
        step = SimpleNamespace(step_index=0, attn_metadata=None, current_model=SimpleNamespace())
        with stage._ltx2_model_forward_context(settings, step):
            out = layers(worker)[0].forward(*VIDEO.tensors(0, 0, 0), None)
        assert torch.equal(out, exact(0, 0, 0))

    return run(worker, stage, request, body)


def test_a_model_that_hides_its_request_is_named_once(
    worker: Worker, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ltx2(worker, False)
    monkeypatch.setenv("LITEATTENTION_POLICY", '{"enabled": false}')
    ltx2(worker, None)
    assert said() == [], "dense is what they asked for"
    monkeypatch.delenv("LITEATTENTION_POLICY")
    for _ in range(2):
        ltx2(worker, None)
    (text,) = said()
    assert "LTX2DenoisingStage" in text and worker.arguments.model_path in text
    assert "does not say whose request it denoises, so all its self-attention was dense" in text
    with pytest.raises(ValueError, match="does not say whose request") as error:
        ltx2(worker, POLICY)
    assert text in str(error.value) and "--attention-backend" not in str(error.value)


def test_a_stage_without_our_layers_is_told_as_before(
    worker: Worker, said: Callable[[], list[str]]
) -> None:
    request = worker.request(attention_backend_override="torch_sdpa")
    run(worker, stage_of("LTX-2"), request, lambda: None)
    request.extra["diffusers_kwargs"] = {"liteattention": POLICY}
    with pytest.raises(ValueError, match="--attention-backend liteattention_rocm"):
        run(worker, stage_of("LTX-2"), request, lambda: None)
    assert said() == []


# --- names of layers --------------------------------------------------------------------------


@pytest.fixture
def unnamed(worker: Worker) -> Iterator[list[Any]]:
    """The layers as they are in models that build them without a prefix."""
    impls = self_attention(worker)
    before = [(impl.name, impl.named, impl.placed) for impl in impls]
    for impl in impls:
        impl.name, impl.named, impl.placed = "attention", False, False
    yield impls
    for impl, (name, named, placed) in zip(impls, before, strict=True):
        impl.name, impl.named, impl.placed = name, named, placed


def test_layers_without_a_prefix_have_the_names_of_their_modules(
    worker: Worker, unnamed: list[Any]
) -> None:
    from liteattention_sglang.diffusion_layer import LiteAttentionImpl

    made = LiteAttentionImpl(3, 128, 128**-0.5, prefix=".impl")
    assert (made.name, made.named) == ("attention", False)
    result = worker.run({**BOLD, "layer_thresholds": {"blocks.0.*": -30}})
    assert result.report is not None
    assert {r["layer"] for r in result.report["records"]} == {f"blocks.{i}.attn1" for i in range(6)}
    thresholds = {r["threshold"] for r in result.report["records"] if r["layer"][:8] == "blocks.0"}
    assert thresholds == {-30.0} and result.report["unmatched_patterns"] == []


def test_patterns_that_match_no_layer_are_said_once(
    worker: Worker, said: Callable[[], list[str]]
) -> None:
    options = {**BOLD, "layer_thresholds": {"layers.*": -3, "blocks.1.*": -4, "x": -5}}
    for _ in range(2):
        result = worker.run(options)
        assert result.report is not None
        assert result.report["unmatched_patterns"] == ["layers.*", "x"]
    (text,) = said()
    assert "matches the policy's patterns 'layers.*', 'x': the layers" in text
    assert "the layers are 'blocks.0.attn1', 'blocks.1.attn1', " in text and "2 more" in text
    worker.run({**options, "threshold": -3})
    assert len(said()) == 1
    worker.run({**options, "enabled": False, "layer_thresholds": {"y": -1}})
    assert len(said()) == 1
    worker.run({**options, "layer_thresholds": {f"y{i}": -1 for i in range(99)}})
    assert len(said()) == 2 and "'y3', and 95 more: the layers" in said()[-1]


# --- reports ------------------------------------------------------------------------------------


def test_a_report_that_cannot_be_written_costs_no_video(
    worker: Worker, said: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = worker.run(BOLD)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LITEATTENTION_REPORT_DIR", str(tmp_path / "file"))
    found = worker.run(BOLD, request_id="mine")
    assert np.array_equal(found.frames, wanted.frames)
    (text,) = said()
    assert "request mine" in text and str(tmp_path / "file" / "mine.json") in text
    monkeypatch.setenv("LITEATTENTION_REPORT_DIR", str(tmp_path / "reports"))
    worker.run(BOLD, request_id="../a/b")
    assert sorted(path.name for path in (tmp_path / "reports").iterdir()) == [
        "..%2Fa%2Fb.json",
        "..%2Fa%2Fb.npz",
    ]


def test_a_server_whose_reports_have_no_place_does_not_start(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.multimodal_gen.runtime.platforms import current_platform

    from liteattention_sglang import diffusion

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LITEATTENTION_REPORT_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("LITEATTENTION_POLICY", "{")
    with pytest.raises(RuntimeError, match="LITEATTENTION_REPORT_DIR") as error:
        current_platform.get_attn_backend_cls_str(diffusion.backend(), 128, torch.float16)
    assert "is not JSON" in str(error.value), "every reason at once"


@pytest.mark.parametrize(
    ("progress", "ids"),
    [((False, False), ["first"]), ((False, True), ["second"]), ((True, True), ["first", "second"])],
)
def test_reports_of_a_batch_have_the_ids_that_sglang_passes_on(
    worker: Worker, progress: tuple[bool, bool], ids: list[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler

    monkeypatch.setenv("LITEATTENTION_REPORT_DIR", str(tmp_path))
    requests = [worker.request(BOLD, request_id=name) for name in ("first", "second")]
    for request, reports in zip(requests, progress, strict=True):
        request.report_progress = reports
    scheduler = object.__new__(Scheduler)
    monkeypatch.setattr(Scheduler, "_can_dynamic_batch", lambda *_: True)
    merged = scheduler._try_merge_generation_reqs(requests)
    assert merged is not None and merged.request_id == "dynamic_batch::first"
    merged.report_progress = False  # there is no server that would hear of it
    worker.execute(merged)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{name}.{ending}" for name in ids for ending in ("json", "npz")
    ]
    for name in ids:
        report = json.loads((tmp_path / f"{name}.json").read_text())
        assert report["requests"] == ids and report["batched_requests"] == 2
        with np.load(tmp_path / f"{name}.npz") as lists:
            assert {lists[key].shape[0] for key in lists.files} == {2}
    (line,) = [text for text in caplog.messages if "LiteAttention: request" in text]
    assert ("and 1 more in its batch" in line) == (len(ids) == 1)
