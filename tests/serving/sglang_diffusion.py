"""LiteAttention in SGLang's diffusion worker: what a request leaves behind is nothing.

Run by pytest in the environment that ``setup_sglang.sh VENV diffusion`` makes:

    VENV/bin/python -m pytest tests/serving/sglang_diffusion.py
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from liteattention_rocm import LiteAttention, SkipPolicy
from liteattention_sglang import generation
from liteattention_sglang.generation import Generation

from .sglang_worker import BOLD, SIZES, Result, Worker, live_states, shared_worker


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


def fail_at(worker: Worker, step: int, negative: bool, error: BaseException) -> Any:
    """Make the transformer fail in one call of the next request; returns what undoes it."""
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context

    def hook(module: Any, args: Any, output: Any) -> None:
        now = get_forward_context()
        if (now.current_timestep, now.forward_batch.is_cfg_negative) == (step, negative):
            raise error

    # Deep inside, so that some layers of the step have run and others have not.
    return worker.transformer.blocks[3].register_forward_hook(hook)


@contextlib.contextmanager
def failing(handle: Any, message: str) -> Iterator[None]:
    try:
        with pytest.raises(RuntimeError, match=message):
            yield
    finally:
        handle.remove()


def nothing(worker: Worker) -> None:
    pass


def same_request(worker: Worker) -> None:
    worker.run(BOLD)


def other_threshold(worker: Worker) -> None:
    worker.run({"threshold": -0.5, "soft_skip": True})


def other_prompt_and_steps(worker: Worker) -> None:
    worker.run(BOLD, prompt="a green square moves up on a white background", num_inference_steps=3)


def other_resolution(worker: Worker) -> None:
    worker.run(BOLD, height=32, width=64)


def other_resolution_with_as_many_tokens(worker: Worker) -> None:
    worker.run(BOLD, height=144, width=16)


def more_frames(worker: Worker) -> None:
    worker.run(BOLD, num_frames=6)


def without_guidance(worker: Worker) -> None:
    worker.run(BOLD, guidance_scale=1.0)


def warm_up(worker: Worker) -> None:
    worker.worker.execute_forward([worker.request(BOLD).copy_as_warmup()])


def warm_up_at_another_resolution(worker: Worker) -> None:
    request = worker.request(BOLD, height=32, width=32).copy_as_warmup(2)
    worker.worker.execute_forward([request])


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


def aborted(step: int, negative: bool) -> Callable[[Worker], None]:
    def disturb(worker: Worker) -> None:
        handle = fail_at(worker, step, negative, RuntimeError("the client went away"))
        with failing(handle, "the client went away"):
            worker.run(BOLD)

    disturb.__name__ = f"aborted_at_step_{step}_{generation.BRANCHES[negative]}"
    return disturb


ABORTS = [aborted(step, negative) for step in range(4) for negative in (False, True)]
DISTURBANCES = [
    nothing,
    same_request,
    other_threshold,
    other_prompt_and_steps,
    other_resolution,
    other_resolution_with_as_many_tokens,
    more_frames,
    without_guidance,
    warm_up,
    warm_up_at_another_resolution,
    failed_decoding,
    refused_options,
    *ABORTS,
]


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda item: item.__name__)
def test_a_request_is_the_same_after(
    worker: Worker, clean: Result, disturb: Callable[[Worker], None]
) -> None:
    disturb(worker)
    assert live_states() == 0, "lists outlive their request"
    assert worker.run(BOLD) == clean
    assert live_states() == 0


def test_lists_of_a_request_that_nobody_finishes_go_with_it(worker: Worker) -> None:
    """A stage that ends without our hook, or a worker that drops a request in the queue."""
    request = worker.request(BOLD)
    impl = self_attention(worker)[0]
    q, k, v = Video(0).tensors(0, 0, False)
    with context(request, 0, False):
        impl.forward(q, k, v, None)
    assert live_states() == 1
    del request
    assert live_states() == 0


@pytest.mark.parametrize(
    "options",
    [{"threshold": -4.0, "warmup_steps": 2}, {"threshold": [-8.0, -3.0, -1.0]}, {"last_step": -2}],
    ids=str,
)
def test_a_schedule_goes_by_the_step(worker: Worker, options: dict[str, Any]) -> None:
    result = worker.run(options)
    assert result.report is not None
    policy = SkipPolicy(**options)
    for record in result.report["records"]:
        tokens = 4 * 12 * 12
        wanted = policy.threshold_at(record["step"], record["layer"], tokens, 4)
        assert record["dense"] == (wanted is None)
        assert record["threshold"] == wanted
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
        ({"threshold": -6, "start": 3}, ["start: Extra inputs are not permitted"]),
        ({"threshold": "low", "warmup_steps": -1}, ["threshold.number: ", "warmup_steps: "]),
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
        worker.run({"must_do": [[0, 5000]]})
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
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

    other = ServerArgs.from_kwargs(model_path=worker.arguments.model_path, **chosen)
    monkeypatch.setattr(worker, "arguments", other)
    with pytest.raises(ValueError, match="--attention-backend liteattention_rocm") as error:
        worker.request({"threshold": 6})
    assert said in str(error.value)
    assert "did you mean -6" in str(error.value), "every reason at once"
    worker.request()


@pytest.mark.parametrize("key", ["transformer", "transformer.self"])
def test_a_component_may_run_the_backend_alone(
    worker: Worker, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

    from liteattention_sglang import diffusion

    other = ServerArgs.from_kwargs(
        model_path=worker.arguments.model_path,
        component_attention_backends={key: "liteattention_rocm"},
        attention_backend_config={"threshold": -3.0},
    )
    monkeypatch.setattr(worker, "arguments", other)
    worker.request(BOLD)
    assert diffusion._config(other) == {"threshold": -3.0}


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
    from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform

    member = AttentionBackendEnum["LITEATTENTION_ROCM"]
    # SGLang takes a ValueError here for "use something else", and anything else for the end.
    with pytest.raises(RuntimeError, match=reason) as error:
        current_platform.get_attn_backend_cls_str(member, 128, torch.float16)
    assert "LITEATTENTION_POLICY" in str(error.value)


# --- schedules of calls against one LiteAttention per request, layer and branch ---------------


def context(request: Any, step: int, negative: bool) -> Any:
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    request.is_cfg_negative = negative
    return set_forward_context(current_timestep=step, attn_metadata=None, forward_batch=request)


def state_of(request: Any) -> Generation | None:
    found = [item for item in request.extra.values() if isinstance(item, Generation)]
    return found[0] if found else None


def self_attention(worker: Worker) -> list[Any]:
    return [block.attn1.attn_impl for block in worker.transformer.blocks]


@dataclass(frozen=True)
class Video:
    """Queries, keys and values of one request: tokens near each other attend to each other.

    They depend on layer, step and branch, so that lists of one are wrong for another.
    """

    seed: int
    batch: int = 1
    tokens: int = 576

    def tensors(self, layer: int, step: int, negative: bool) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(
            ((self.seed * 31 + layer) * 31 + step // 2) * 31 + negative
        )
        # Prototypes of many lengths in runs of tokens, and a little noise: how far a tile stays
        # below the maximum then varies from 1 to 25 in log2 units.
        prototypes = torch.randn(11, 3, 128, generator=draw)
        prototypes *= torch.linspace(0.2, 1.3, 11)[:, None, None]
        which = torch.randint(0, 11, (self.batch, -(-self.tokens // 48)), generator=draw)
        which = which.repeat_interleave(48, dim=1)[:, : self.tokens]
        base = prototypes[which]
        noise = torch.randn(3, *base.shape, generator=draw)
        q, k = base + 0.1 * noise[0], base + 0.1 * noise[1]
        return [q.contiguous(), k.contiguous(), noise[2].contiguous()]


@dataclass(frozen=True)
class Call:
    request: str
    step: int
    negative: bool
    layer: int
    fails: bool = False
    counts: bool = True  # False: the same call comes again, or its request is given up


@dataclass(frozen=True)
class Schedule:
    """Calls in the order in which a server might make them; the last call of a key counts."""

    calls: tuple[Call, ...]
    videos: dict[str, Video] = field(default_factory=dict)
    warm_up: frozenset[str] = frozenset()


def steps_of(
    request: str, steps: range | list[int], branches: tuple[bool, ...] = (False,), layers: int = 2
) -> list[Call]:
    return [
        Call(request, step, negative, layer)
        for step in steps
        for negative in branches
        for layer in range(layers)
    ]


def interleaved(*schedules: list[Call]) -> tuple[Call, ...]:
    rows = itertools.zip_longest(*schedules)
    return tuple(call for row in rows for call in row if call is not None)


def abort_at(step: int) -> Schedule:
    given_up = [
        Call(c.request, c.step, c.negative, c.layer, counts=False)
        for c in steps_of("gone", range(step), (False, True))
    ]
    last = Call("gone", step, False, 0, fails=True, counts=False)
    return Schedule((*given_up, last, *steps_of("a", range(4), (False, True))))


CFG = (False, True)
SCHEDULES = {
    "guidance interleaved": Schedule(tuple(steps_of("a", range(4), CFG))),
    "guidance, negative first": Schedule(tuple(steps_of("a", range(4), (True, False)))),
    "guidance batched, two requests": Schedule(
        (*steps_of("a", range(4)), *steps_of("b", range(4))),
        {"a": Video(1, batch=2), "b": Video(2, batch=2)},
    ),
    "two requests in a row": Schedule((*steps_of("a", range(4)), *steps_of("b", range(4)))),
    "two requests step by step": Schedule(
        interleaved(steps_of("a", range(4), CFG), steps_of("b", range(4), CFG))
    ),
    "warm-up of one step": Schedule(
        (*steps_of("w", range(1), CFG), *steps_of("a", range(4), CFG)), warm_up=frozenset("w")
    ),
    "warm-up at another resolution": Schedule(
        (*steps_of("w", range(3), CFG), *steps_of("a", range(4), CFG)),
        {"w": Video(5, tokens=300)},
        frozenset("w"),
    ),
    "resolution changes, then back": Schedule(
        (*steps_of("a", range(3)), *steps_of("b", range(2)), *steps_of("c", range(4))),
        {"b": Video(8, tokens=700)},
    ),
    "every call twice in its step": Schedule(
        tuple(
            Call(c.request, c.step, c.negative, c.layer, counts=again)
            for c in steps_of("a", range(4))
            for again in (False, True)
        )
    ),
    "steps left out": Schedule(tuple(steps_of("a", [0, 1, 4, 5, 7], CFG))),
    "a layer left out of a step": Schedule(
        tuple(c for c in steps_of("a", range(5)) if (c.step, c.layer) != (2, 1))
    ),
    "a call fails and comes again": Schedule(
        tuple(
            call
            for c in steps_of("a", range(4))
            for call in (
                [Call("a", 2, False, 1, fails=True, counts=False), c]
                if (c.step, c.layer) == (2, 1)
                else [c]
            )
        )
    ),
    "the step index starts again": Schedule(
        (
            *(
                Call(c.request, c.step, c.negative, c.layer, counts=False)
                for c in steps_of("a", range(3))
            ),
            *steps_of("a", range(4)),
        )
    ),
    **{f"abort at step {step}": abort_at(step) for step in range(4)},
}
#: Thresholds by step, so that a step taken for another shows.
POLICY = {"threshold": [-6.0, -30.0, -3.0, -8.0, -2.0, -12.0, -4.0, -5.0], "warmup_steps": 0}


class Trouble(RuntimeError):
    pass


def play(
    worker: Worker, schedule: Schedule, call: Callable[..., torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs of the calls that count, and the lists that are left, by request/layer/branch."""
    impls = self_attention(worker)
    call = call or (lambda impl, q, k, v: impl.forward(q, k, v, None))
    requests: dict[str, Any] = {}
    outputs, lists = [], {}
    for item in schedule.calls:
        if item.request not in requests:
            made = worker.request(POLICY, num_inference_steps=8)
            requests[item.request] = made
            made.is_warmup = item.request in schedule.warm_up
        request = requests[item.request]
        q, k, v = video(schedule, item.request).tensors(item.layer, item.step, item.negative)
        with context(request, item.step, item.negative):
            if item.fails:
                with pytest.raises(ValueError):  # keys of another size than values
                    call(impls[item.layer], q, k, v[:, :-1].contiguous())
            else:
                result = call(impls[item.layer], q, k, v)
                if item.counts:
                    outputs.append(result)
    for name, request in requests.items():
        state = state_of(request)
        if name != "gone" and state is not None:
            lists.update({f"{name}/{key}": value for key, value in state.lists().items()})
    return outputs, lists


def video(schedule: Schedule, request: str) -> Video:
    return schedule.videos.get(request, Video(sum(request.encode())))


def expect(schedule: Schedule) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The same from one :class:`LiteAttention` for each request, layer and branch."""
    policy = SkipPolicy(**POLICY)
    own: dict[tuple[str, int, bool], LiteAttention] = {}
    outputs, lists = [], {}
    for item in schedule.calls:
        key = (item.request, item.layer, item.negative)
        q, k, v = video(schedule, item.request).tensors(item.layer, item.step, item.negative)
        if item.counts:
            lite = own.setdefault(key, LiteAttention(policy))
            out = lite(q, k, v, step=item.step, layer="x", num_steps=8, scale=128**-0.5)
            outputs.append(out)
    for (request, layer, negative), lite in own.items():
        name = f"{request}/blocks.{layer}.attn1/{generation.BRANCHES[negative]}"
        lists[name] = lite.lists("x")
    return outputs, lists


def same(one: Any, other: Any) -> bool:
    return (
        len(one[0]) == len(other[0])
        and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        and one[1].keys() == other[1].keys()
        and all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_equals_separate_lists(worker: Worker, name: str) -> None:
    schedule = SCHEDULES[name]
    wanted = expect(schedule)
    assert same(play(worker, schedule), wanted)


class ByCallCount(Generation):
    """What must not be done: one state for all requests, advanced by the calls of a layer."""

    def __init__(self) -> None:
        super().__init__(SkipPolicy(**POLICY), None)
        self.calls: dict[str, int] = {}

    def attend(
        self, q: Any, k: Any, v: Any, *, layer: str, step: int, negative: bool, **rest: Any
    ) -> None:
        count = self.calls[layer] = self.calls.get(layer, -1) + 1
        super().attend(q, k, v, layer=layer, step=count, negative=False, **rest)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_state_keyed_by_call_count_fails_every_schedule(
    worker: Worker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from liteattention_sglang import diffusion_attention

    schedule = SCHEDULES[name]
    state = ByCallCount()
    monkeypatch.setattr(diffusion_attention, "_generation", lambda request: state)
    outputs, _ = play(worker, schedule)
    wanted, _ = expect(schedule)
    assert not same((outputs, {}), (wanted, {}))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_keep_their_lists(
    worker: Worker, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing is not calling, and no step or request is compiled into a graph."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    impls = self_attention(worker)
    graphs = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    with torch._dynamo.config.patch(disable=False):
        torch._dynamo.reset()
        compiled = {
            id(impl): torch.compile(
                lambda q, k, v, impl=impl: impl.forward(q * 1.0, k, v, None) + 0.0,
                backend=counting,
                fullgraph=True,
            )
            for impl in impls[:2]
        }
        for name in ("guidance interleaved", "two requests step by step", "two requests in a row"):
            schedule = SCHEDULES[name]
            played = play(worker, schedule, lambda impl, *qkv: compiled[id(impl)](*qkv))
            assert same(played, expect(schedule))
    torch._dynamo.reset()
    assert graphs == 1, "one graph for all, whatever the layer, step, branch and request"


def test_layers_of_one_name_have_their_own_lists(worker: Worker) -> None:
    """Wan 2.2 has two transformers; both call their blocks alike."""
    from liteattention_sglang.diffusion_attention import LiteAttentionImpl

    first, second = (
        LiteAttentionImpl(3, 128, 128**-0.5, prefix="blocks.0.attn1.impl") for _ in range(2)
    )
    request = worker.request(POLICY, num_inference_steps=8)
    outputs = []
    for step in range(4):
        with context(request, step, False):
            for layer, impl in enumerate((first, second)):
                outputs.append(impl.forward(*Video(7).tensors(layer, step, False), None))
    state = state_of(request)
    assert state is not None
    lists = state.lists()
    assert list(lists) == ["blocks.0.attn1/cond", "blocks.0.attn1#2/cond"]
    for layer, name in enumerate(lists):
        lite = LiteAttention(SkipPolicy(**POLICY))
        for step in range(4):
            out = lite(*Video(7).tensors(layer, step, False), step=step, layer="x", num_steps=8)
            assert torch.equal(out, outputs[2 * step + layer])
        assert torch.equal(lite.lists("x"), lists[name])


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
    from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform

    member = AttentionBackendEnum["LITEATTENTION_ROCM"]
    with pytest.raises(ValueError, match="head"):
        current_platform.get_attn_backend_cls_str(member, 12345, torch.float16)


def test_dropout_is_refused(worker: Worker) -> None:
    from liteattention_sglang.diffusion_attention import LiteAttentionImpl

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


def test_sizes_are_small_enough_to_matter() -> None:
    assert SIZES["num_inference_steps"] == 4, "ABORTS covers every step"


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

    from liteattention_rocm import lite

    monkeypatch.setattr(lite.ops, "lite_attention", lambda *args, out, **_: out)
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
