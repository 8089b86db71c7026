"""LiteAttention in SGLang's diffusion worker: what a request leaves behind is nothing.

Run by pytest in the environment that ``setup_sglang.sh VENV diffusion`` makes:

    VENV/bin/python -m pytest tests/serving/sglang_diffusion.py
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from liteattention_rocm import SkipPolicy, remembered
from liteattention_rocm.engines.cpu import CpuEngine
from liteattention_sglang import diffusion_requests, diffusion_stages, generation

from .sglang_worker import (
    BOLD,
    SIZES,
    Result,
    Worker,
    context,
    live_states,
    self_attention,
    shared_worker,
    state_of,
)

LITTLE, MUCH = ({"budget": share, "warmup_steps": 0} for share in (0.1, 0.4))


@pytest.fixture(scope="session")
def worker() -> Worker:
    return shared_worker()


@pytest.fixture(scope="session")
def clean(worker: Worker) -> Result:
    """The reference request on a worker that has done nothing else."""
    result = worker.run(BOLD)
    assert result.report is not None
    assert result.report["sparsity_last_step"] > 0.1, "nothing is skipped: no test of lists"
    return result


@pytest.fixture(scope="session")
def weighed(worker: Worker) -> Result:
    """A request with a budget on a worker that has done nothing with one."""
    result = worker.run(LITTLE)
    assert result.report is not None
    assert result.report["sparsity_last_step"] > 0.1, "nothing is skipped: no test of lists"
    return result


# --- what comes out ------------------------------------------------------------------------


def test_nothing_skipped_is_the_runners_own_attention(worker: Worker) -> None:
    ours = worker.run({"threshold": "-inf"})
    theirs = worker.run(attention_backend_override="torch_sdpa")
    assert theirs.report is None, "the override did not replace our backend"
    assert ours.report is not None and ours.report["sparsity"] == 0.0
    difference = np.abs(ours.frames.astype(int) - theirs.frames.astype(int))
    assert ours.frames.std() > 10, "an empty video equals everything"
    assert difference.max() <= 1


def test_a_request_can_switch_skipping_off(worker: Worker, clean: Result) -> None:
    off = worker.run(False)
    exact = worker.run({"threshold": "-inf"})
    assert np.array_equal(off.frames, exact.frames)
    assert not np.array_equal(off.frames, clean.frames)


def test_cross_attention_is_told_by_the_runtime(worker: Worker) -> None:
    """Text of as many tokens as the video has is still text."""
    layers = {
        name: module.attn_impl
        for name, module in worker.transformer.named_modules()
        if hasattr(module, "attn_impl")
    }
    self_attention = [name for name, impl in layers.items() if impl.slot is not None]
    crossing = [name for name, impl in layers.items() if impl.slot is None]
    assert self_attention == [f"blocks.{i}.attn1" for i in range(6)]
    assert crossing == [f"blocks.{i}.attn2.attn" for i in range(6)]
    q = torch.randn(1, 256, 3, 128)
    with context(request := worker.request(BOLD), 0, False):
        layers[crossing[0]].forward(q, q, q, None)
    assert state_of(request) is None
    # and self-attention against more keys than queries, as some parallel layouts have it
    with context(request, 0, False):
        layers[self_attention[0]].forward(q[:, :128], q, q, None)
    assert state_of(request) is not None


# --- real requests: none sees another ------------------------------------------------------


def aborted(worker: Worker, step: int, negative: bool) -> None:
    """A request whose transformer fails in one call."""
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context

    def hook(module: Any, args: Any, output: Any) -> None:
        now = get_forward_context()
        if (now.current_timestep, now.forward_batch.is_cfg_negative) == (step, negative):
            raise RuntimeError("the client went away")

    # Deep inside, so that some layers of the step have run and others have not.
    handle = worker.transformer.blocks[3].register_forward_hook(hook)
    try:
        with pytest.raises(RuntimeError, match="the client went away"):
            worker.run(BOLD)
    finally:
        handle.remove()


def warm_up(worker: Worker, steps: int = 1, **changes: Any) -> None:
    worker.worker.execute_forward([worker.request(BOLD, **changes).copy_as_warmup(steps)])


def failed_decoding(worker: Worker) -> None:
    stage = next(s for s in worker.worker.pipeline.stages if type(s).__name__ == "DecodingStage")
    stage.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("no decoder today"))
    try:
        with pytest.raises(RuntimeError, match="no decoder today"):
            worker.run(BOLD)
    finally:
        del stage.forward


def refused_options(worker: Worker) -> None:
    request = worker.request(BOLD)
    request.extra["diffusers_kwargs"] = {"liteattention": {"threshold": 6}}
    with pytest.raises(RuntimeError, match="did you mean -6"):
        worker.execute(request)


def other(**changes: Any) -> Callable[[Worker], Any]:
    return lambda worker: worker.run(BOLD, **changes)


GREEN = "a green square moves up on a white background"
DISTURBANCES: dict[str, Callable[[Worker], Any]] = {
    "nothing": lambda worker: None,
    "the same request": other(),
    "another threshold": lambda worker: worker.run(
        {"threshold": -0.5, "soft_skip": True, "warmup_steps": 0}
    ),
    "a budget": lambda worker: worker.run(MUCH),
    "another prompt and schedule": other(prompt=GREEN, num_inference_steps=3),
    "another resolution": other(height=32, width=64),
    "another resolution with as many tokens": other(height=144, width=16),
    "more frames": other(num_frames=6),
    "no guidance": other(guidance_scale=1.0),
    "a warm-up": warm_up,
    "a warm-up at another resolution": functools.partial(warm_up, steps=2, height=32, width=32),
    "a failed decoding": failed_decoding,
    "refused options": refused_options,
    **{
        f"an abort at step {step}, {branch}": functools.partial(
            aborted, step=step, negative=negative
        )
        for step in range(SIZES["num_inference_steps"])
        for negative, branch in generation.BRANCHES.items()
    },
}


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_request_is_the_same_after(worker: Worker, clean: Result, name: str) -> None:
    DISTURBANCES[name](worker)
    assert live_states() == 0, "lists outlive their request"
    assert worker.run(BOLD) == clean
    assert live_states() == 0


@pytest.mark.parametrize(
    "name",
    ["the same request", "another threshold", "a budget", "another resolution",
     "an abort at step 1, uncond"],
)  # fmt: skip
def test_a_request_with_a_budget_is_the_same_after(
    worker: Worker, weighed: Result, name: str
) -> None:
    DISTURBANCES[name](worker)
    assert worker.run(LITTLE) == weighed
    assert live_states() == 0


def test_lists_of_a_request_that_nobody_finishes_go_with_it(worker: Worker) -> None:
    """A stage that ends without our hook, or a worker that drops a request in the queue."""
    request = worker.request(BOLD)
    impl = self_attention(worker)[0]
    q, k, v = torch.randn(3, 1, 576, 3, 128)
    with context(request, 0, False):
        impl.forward(q, k, v, None)
    assert live_states() == 1
    del request
    assert live_states() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": -4.0, "warmup_steps": 2},
        {"threshold": [-8.0, -3.0, -1.0]},
        {"last_step": -2},
        {"budget": [0.0, 0.1], "warmup_steps": 1},
    ],
    ids=str,
)
def test_a_schedule_goes_by_the_step(worker: Worker, options: dict[str, Any]) -> None:
    result = worker.run(options)
    assert result.report is not None
    policy = SkipPolicy(**options)
    for record in result.report["records"]:
        tokens = 4 * 12 * 12
        if policy.budget is None:
            wanted = policy.threshold_at(record["step"], record["layer"], tokens, 4)
        else:
            wanted = policy.budget_at(record["step"], record["layer"], 4)
        assert record["dense"] == (wanted is None)
        limits = (record["threshold"], record["budget"])
        assert limits == ((wanted, None) if policy.budget is None else (None, wanted))
    keys = [(r["step"], r["layer"], r["branch"]) for r in result.report["records"]]
    assert len(keys) == len(set(keys)) == 4 * 6 * 2


def test_forced_tiles_reach_the_lists(worker: Worker) -> None:
    options = {**BOLD, "must_do": [[0, 64]], "must_skip": [[512, 576]]}
    result = worker.run(options)
    assert result.lists is not None
    for words in result.lists.values():
        assert (words[..., 0] & 1 == 1).all(), "the first K block was to be kept"
        assert (words[..., 0] & (1 << 8) == 0).all(), "the last K block was to be skipped"


# --- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"threshold": 6}, ["did you mean -6"]),
        (
            {"threshold": -6, "start": 3},
            ["start: a policy has no such field: its fields are threshold, "],
        ),
        ({"threshold": "low", "warmup_steps": -1}, ["threshold: ", "warmup_steps: "]),
        ({"must_do": [[64, 0]]}, ["descending"]),
        (-6, ["must be an object"]),
        (True, ["must be an object"]),
    ],
)
def test_bad_options_are_refused_before_the_queue(
    worker: Worker, options: Any, reasons: list[str]
) -> None:
    with pytest.raises(ValueError, match="liteattention") as error:
        worker.request(options)
    for reason in reasons:
        assert reason in str(error.value)


def test_ranges_past_the_video_fail_the_request_alone(worker: Worker, clean: Result) -> None:
    with pytest.raises(RuntimeError, match=r"ends past the 576 keys"):
        worker.run({"must_do": [[0, 5000]], "warmup_steps": 0})
    assert live_states() == 0
    assert worker.run(BOLD) == clean


@pytest.mark.parametrize("options", [BOLD, False], ids=str)
def test_options_that_reach_no_layer_are_refused(worker: Worker, options: Any) -> None:
    with pytest.raises(ValueError, match="attention_backend_override 'torch_sdpa' runs another"):
        worker.request(options, attention_backend_override="torch_sdpa")
    request = worker.request(attention_backend_override="torch_sdpa")
    request.extra["diffusers_kwargs"] = {"liteattention": options}
    with pytest.raises(RuntimeError, match="--attention-backend liteattention_rocm"):
        worker.execute(request)


def test_an_override_that_names_the_servers_own_backend_changes_nothing(worker: Worker) -> None:
    """SGLang lets no request switch to it; where it runs, there is nothing to switch."""
    request = worker.request(BOLD, attention_backend_override="LiteAttention_ROCm")
    assert request.sampling_params.attention_backend_override is None


def elsewhere(worker: Worker, monkeypatch: pytest.MonkeyPatch, **chosen: Any) -> None:
    """Let requests be read as by a server with other arguments."""
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

    arguments = ServerArgs.from_kwargs(model_path=worker.arguments.model_path, **chosen)
    monkeypatch.setattr(worker, "arguments", arguments)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"attention_backend": "torch_sdpa"}, "runs attention backend 'torch_sdpa'"),
        ({}, "runs attention backend of its own choice"),
        ({"component_attention_backends": {"transformer.cross": "torch_sdpa"}}, "'torch_sdpa'"),
    ],
    ids=str,
)
def test_options_for_a_server_of_another_backend_are_refused(
    worker: Worker, chosen: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(worker, monkeypatch, **chosen)
    with pytest.raises(ValueError, match="--attention-backend liteattention_rocm") as error:
        worker.request({"threshold": 6})
    assert said in str(error.value)
    assert "did you mean -6" in str(error.value), "every reason at once"
    worker.request()


@pytest.mark.parametrize("key", ["transformer", "transformer.self"])
def test_a_component_may_run_the_backend_alone(
    worker: Worker, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(
        worker,
        monkeypatch,
        component_attention_backends={key: "liteattention_rocm"},
        attention_backend_config={"threshold": -3.0},
    )
    worker.request(BOLD)
    assert diffusion_requests._config(worker.arguments) == {"threshold": -3.0}


def test_server_defaults(worker: Worker, monkeypatch: pytest.MonkeyPatch, clean: Result) -> None:
    monkeypatch.setenv("LITEATTENTION_POLICY", '{"threshold": -2.0, "warmup_steps": 1}')
    result = worker.run()
    assert result.report is not None
    assert result.report["policy"]["threshold"] == -2.0
    assert result.report["policy"]["warmup_steps"] == 1
    # a request overrides field by field
    assert worker.run({"warmup_steps": 0}) == clean
    monkeypatch.setattr(worker.arguments, "attention_backend_config", {"warmup_steps": 0})
    assert worker.run() == clean


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "is not JSON"), ("[1]", "must be a JSON object"), ('{"threshold": 1}', "log2 units")],
)
def test_a_server_with_bad_defaults_does_not_start(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.setenv("LITEATTENTION_POLICY", text)
    # SGLang's launcher checks its arguments before it starts a worker.
    with pytest.raises(ValueError, match=f"'liteattention_rocm': LITEATTENTION_POLICY.*{reason}"):
        worker.arguments._validate_parameters()
    from sglang.multimodal_gen.runtime.platforms import current_platform

    from liteattention_sglang import diffusion

    # SGLang takes a ValueError here for "use something else", and anything else for the end.
    with pytest.raises(RuntimeError, match=reason) as error:
        current_platform.get_attn_backend_cls_str(diffusion.backend(), 128, torch.float16)
    assert "LITEATTENTION_POLICY" in str(error.value)


# --- registration --------------------------------------------------------------------------


def test_the_backend_is_a_member_like_any_other(worker: Worker) -> None:
    import copy
    import pickle

    from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum

    member = AttentionBackendEnum["LITEATTENTION_ROCM"]
    assert member in list(AttentionBackendEnum)
    assert str(member) == "liteattention_rocm"
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.deepcopy(member) is member
    assert AttentionBackendEnum(member.value) is member
    assert len({m.value for m in AttentionBackendEnum}) == len(list(AttentionBackendEnum))


def test_registering_again_changes_nothing(worker: Worker) -> None:
    from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry
    from sglang.multimodal_gen.runtime.server_args import server_args

    from liteattention_sglang import diffusion

    def registered() -> Any:
        hooks = {name: len(found) for name, found in HookRegistry._hooks.items()}
        return len(list(AttentionBackendEnum)), hooks, server_args.RING_CAPABLE_ATTENTION_BACKENDS

    before = registered()
    assert before[2].count("liteattention_rocm") == 1
    diffusion.register()
    assert registered() == before


def test_an_unsupported_head_size_is_said_with_its_reason(worker: Worker) -> None:
    from sglang.multimodal_gen.runtime.platforms import current_platform

    from liteattention_sglang import diffusion

    with pytest.raises(ValueError, match="head"):
        current_platform.get_attn_backend_cls_str(diffusion.backend(), 12345, torch.float16)


def test_dropout_is_refused(worker: Worker) -> None:
    from liteattention_sglang.diffusion_layer import LiteAttentionImpl

    with pytest.raises(ValueError, match="no dropout"):
        LiteAttentionImpl(3, 128, 128**-0.5, prefix="blocks.0.attn1.impl", dropout_p=0.1)


def test_reports_are_written_only_if_asked(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LITEATTENTION_REPORT_DIR")
    assert worker.run(BOLD).report is None
    monkeypatch.setenv("LITEATTENTION_REPORT_DIR", str(tmp_path / "new" / "folder"))
    request = worker.request(BOLD)
    worker.execute(request)
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == [
        f"{request.request_id}.json",
        f"{request.request_id}.npz",
    ]


def test_everything_but_attention_is_less_than_a_percent_of_a_step(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 8,192 tokens: what a call does besides running the engine, against a denoising step.

    In processor time of this thread, which takes part in everything: what else the machine does
    is not in it.
    """
    marks: list[float] = []
    hooks = [
        worker.transformer.register_forward_pre_hook(lambda *_: marks.append(time.thread_time())),
        worker.transformer.register_forward_hook(lambda *_: marks.append(time.thread_time())),
    ]
    try:
        worker.run(BOLD, height=128, width=128, num_frames=8, num_inference_steps=1)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(marks) == 4, "one step is a call for each branch"
    step = marks[1] - marks[0] + marks[3] - marks[2]

    monkeypatch.setattr(CpuEngine, "bind", lambda self, request, like: lambda tensors: None)
    remembered.forget()
    request = worker.request(BOLD, height=128, width=128, num_frames=8, num_inference_steps=12)
    q = torch.randn(1, 8192, 3, 128)
    rounds = []
    for index in range(12):
        begin = time.thread_time()
        for negative in (False, True):
            with context(request, index, negative):
                for impl in self_attention(worker):
                    impl.forward(q, q, q, None)
        rounds.append(time.thread_time() - begin)
    # The first rounds allocate the lists.
    overhead = sorted(rounds[2:])[len(rounds[2:]) // 2]
    print(
        f"overhead {overhead * 1e3:.2f} ms of a step of {step * 1e3:.0f} ms: {overhead / step:.3%}"
    )
    assert overhead < 0.01 * step


@pytest.mark.parametrize("failure", [OSError("no room"), torch.OutOfMemoryError("no room")])
def test_a_report_that_fails_costs_no_video(
    failure: Exception,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(diffusion_stages, "_names", lambda request: (["mine"], 1))
    monkeypatch.setattr(diffusion_stages, "get_world_rank", lambda: 1)
    monkeypatch.setattr(diffusion_stages.reports, "folder", lambda: tmp_path)
    state: Any = SimpleNamespace(write=Mock(side_effect=failure))
    diffusion_stages._report(SimpleNamespace(is_warmup=False), state, "model")
    assert "the report of request mine could not be written" in caplog.text
    assert "no room" in caplog.text
