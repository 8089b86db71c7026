"""Calls in every order in which a server might make them, against one LiteAttention each.

VENV/bin/python -m pytest tests/serving/sglang_diffusion_schedules.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from liteattention_rocm import LiteAttention, SkipPolicy
from liteattention_sglang import generation
from liteattention_sglang.generation import Generation

from .sglang_worker import Worker, context, self_attention, shared_worker, state_of


@pytest.fixture(scope="session")
def worker() -> Worker:
    return shared_worker()


@dataclass(frozen=True)
class Video:
    """Queries, keys and values of one request: tokens near each other attend to each other.

    They depend on layer, step and branch, so that lists of one are wrong for another.
    """

    seed: int
    batch: int = 1
    tokens: int = 576

    def tensors(self, layer: int, step: int, negative: int) -> list[torch.Tensor]:
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
    unnamed: int = 0  # which branch of those that SGLang calls alike, by their order in a step

    @property
    def branch(self) -> int:
        return self.negative + 2 * self.unnamed


@dataclass(frozen=True)
class Schedule:
    """Calls in the order in which a server might make them; the last call of a key counts.

    In the steps ``afresh``, all lists start over.
    """

    calls: tuple[Call, ...]
    videos: dict[str, Video] = field(default_factory=dict)
    warm_up: frozenset[str] = frozenset()
    afresh: frozenset[int] = frozenset()


CFG = (False, True)


def uncounted(calls: list[Call]) -> list[Call]:
    return [replace(call, counts=False) for call in calls]


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
    given_up = uncounted(steps_of("gone", range(step), CFG))
    last = Call("gone", step, False, 0, fails=True, counts=False)
    return Schedule((*given_up, last, *steps_of("a", range(4), CFG)))


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
    "branches that SGLang calls alike": Schedule(
        tuple(replace(c, unnamed=n) for c in steps_of("a", range(6), CFG) for n in range(2)),
        afresh=frozenset({1}),
    ),
    "a pass before the first step": Schedule(
        tuple(
            replace(c, unnamed=n)
            for c in steps_of("a", range(6))
            for n in ((2, 0, 1) if c.step == 0 else (0, 1))
        ),
        afresh=frozenset({1, 2}),
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
                *([replace(c, fails=True, counts=False)] if (c.step, c.layer) == (2, 1) else []),
                c,
            )
        )
    ),
    "the step index starts again": Schedule(
        (*uncounted(steps_of("a", range(3))), *steps_of("a", range(4)))
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
        q, k, v = video(schedule, item.request).tensors(item.layer, item.step, item.branch)
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
    own: dict[tuple[str, int, bool, int], LiteAttention] = {}
    outputs, lists = [], {}
    started: set[int] = set()
    for item in schedule.calls:
        if item.step in schedule.afresh - started:
            started.add(item.step)
            own.clear()
        key = (item.request, item.layer, item.negative, item.unnamed)
        q, k, v = video(schedule, item.request).tensors(item.layer, item.step, item.branch)
        if item.counts:
            lite = own.setdefault(key, LiteAttention(policy))
            out = lite(q, k, v, step=item.step, layer="x", num_steps=8, scale=128**-0.5)
            outputs.append(out)
    for (request, layer, negative, unnamed), lite in own.items():
        name = f"{request}/blocks.{layer}.attn1/{generation.BRANCHES[negative]}"
        lists[f"{name}#{unnamed + 1}" if unnamed else name] = lite.lists("x")
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
    from liteattention_sglang import diffusion_layer

    schedule = SCHEDULES[name]
    state = ByCallCount()
    monkeypatch.setattr(diffusion_layer, "generation_of", lambda request: state)
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
    from liteattention_sglang.diffusion_layer import LiteAttentionImpl

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


def test_layers_of_two_experts_have_the_names_that_they_have_in_diffusers() -> None:
    """Wan 2.2: a policy made with diffusers finds the same layers here."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.base import PipelineStage

    from liteattention_sglang.diffusion_layer import LiteAttentionImpl
    from liteattention_sglang.diffusion_stages import _name_layers

    def expert(prefix: str) -> torch.nn.Module:
        attention = torch.nn.Module()
        attention.attn_impl = LiteAttentionImpl(3, 128, 128**-0.5, prefix=prefix)
        block = torch.nn.ModuleDict({"attn1": attention})
        return torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])})

    class Stage(PipelineStage):
        def __init__(self, prefix: str) -> None:
            self.transformer_2 = expert(prefix)
            self.transformer = expert(prefix)
            self.vae = expert("")

        def forward(self, batch: Any, server_args: Any) -> Any:
            return batch

    for prefix in ("", "blocks.0.attn1.impl"):
        stage = Stage(prefix)
        for _ in range(2):  # naming again changes nothing
            _name_layers(stage)
        names = [
            model["blocks"][0]["attn1"].attn_impl.name
            for model in (stage.transformer, stage.transformer_2, stage.vae)
        ]
        assert names == ["blocks.0.attn1", "transformer_2.blocks.0.attn1", "blocks.0.attn1"]
    policy = SkipPolicy(threshold=-9.0, layer_thresholds={"blocks.*": -3.0})
    assert {policy.threshold_at(4, name, 64) for name in names} == {-3.0}
