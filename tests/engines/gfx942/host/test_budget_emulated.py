"""Budgets in machine code, on the software MI300X: steps that carry their lists on, and requests.

The kernels' weights and choices are tried one by one in ../kernels/test_weigh.py. Here a step of
the engine is held to the reference engine's masses, to the rule, bit for bit, and in its outputs to
the voting kernel; then the policy, the skip state and diffusers are on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from liteattention_diffusers import enable
from liteattention_e2e import pixel_vae, tiny
from liteattention_rocm import MI300X_GEOMETRY, LiteAttention, SkipPolicy, lite_attention
from liteattention_rocm.contract import LiteRequest
from liteattention_rocm.engines.reference import shares
from liteattention_rocm.lite import bitmap, budget
from tests.engines.gfx942.kernels.test_weigh import rounding
from tests.guards import wrong_masses

from .test_lite_emulated import Case

NEVER = -1e30  # a threshold that no tile falls to; -inf would always ascend

pytestmark = pytest.mark.usefixtures("emulator", "memory_of_nan")


@dataclass(frozen=True)
class Budgeted(Case):
    scale: float = 0.06
    budget: float = 0.1
    must_do: tuple[int, ...] = field(default=())
    must_skip: tuple[int, ...] = field(default=())


CASES = {
    "d64": Budgeted(400, 1000),
    "d128, GQA, bshd": Budgeted(257, 450, 128, kv_heads=2, group=2, layout="bshd"),
    "batches, RTNA": Budgeted(97, 449, batch=2, kv_heads=2, rounding="rtna", budget=0.3),
    "a row, RTZ, d128": Budgeted(1, 640, 128, rounding="rtz"),
    "two words of bits": Budgeted(60, 2111, budget=0.03),
    "fp16, masks": Budgeted(
        300, 650, dtype=torch.float16, must_do=(2, 7), must_skip=(0, 7, 10), budget=0.2
    ),
    "negative scale, diffuse": Budgeted(100, 500, scale=-0.05, peaked=False, budget=0.5),
    "one block": Budgeted(50, 33, budget=0.9),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_follow_the_rule(name: str) -> None:
    case = CASES[name]
    k_blocks = MI300X_GEOMETRY.k_blocks(case.kv_len)
    heads = case.kv_heads * case.group
    read = bitmap.full(case.batch, heads, MI300X_GEOMETRY.q_blocks(case.q_len), k_blocks)
    do, skip = (
        torch.tensor([j in blocks for j in range(k_blocks)])
        for blocks in (case.must_do, case.must_skip)
    )
    start = int(bitmap.count(read))
    for step in range(4):
        q, k, v = case.tensors(step)
        common: dict[str, Any] = {
            "layout": case.layout, "scale": case.scale, "descending": step % 2 == 1,
            "must_do": bitmap.pack(do) if case.must_do else None,
            "must_skip": bitmap.pack(skip) if case.must_skip else None,
            "geometry": MI300X_GEOMETRY, "return_lse": True,
        }  # fmt: skip
        rounded = {"rounding": case.rounding, "engine": "gfx942"}
        write, mass = (
            torch.full_like(read, 0x3C3C3C3C),
            torch.full((*read.shape[:3], k_blocks), 9.0),
        )
        out, lse = lite_attention(
            q, k, v, read, write, budget=case.budget, mass=mass, **common, **rounded
        )
        walked = (bitmap.unpack(read, k_blocks) | do) & ~skip
        assert torch.equal(write, bitmap.pack(budget.select(mass, walked, do, case.budget)))
        request = LiteRequest(
            case.batch, heads, case.kv_heads, case.q_len, case.kv_len, q.shape[-1], q.dtype,
            q.device, case.layout, case.scale, False, "rtne", True, MI300X_GEOMETRY, -math.inf,
            common["descending"], False, case.budget,
        )  # fmt: skip
        exact = shares(request, q, k, read, common["must_do"], common["must_skip"])[1]
        wrong = wrong_masses(mass, exact, MI300X_GEOMETRY.q_block, rounding(k_blocks))
        assert not wrong.any() and not mass[~walked].any()
        other = torch.empty_like(write)
        lite_attention(q, k, v, read, other, budget=case.budget, **common, **rounded)
        assert torch.equal(other, write)  # no tensor for masses: the same choice
        voted, voted_lse = lite_attention(
            q, k, v, read, other, threshold=NEVER, **common, **rounded
        )
        assert torch.equal(out, voted) and torch.equal(lse, voted_lse)
        assert torch.equal(other, bitmap.pack(walked))
        read = write
    kept = int(bitmap.count(read)) / start
    assert kept == 1 if name == "one block" else 0.05 < kept < 0.95, kept


def test_heads_have_budgets_of_their_own() -> None:
    """Four heads of two entries, two q blocks each; one of them keeps all."""
    case, shares = Budgeted(257, 500, batch=2, kv_heads=2, group=2), (0.3, 0.0, 0.01, 0.5)
    read = bitmap.full(2, 4, 2, 8)
    write, mass = torch.empty_like(read), torch.full((2, 4, 2, 8), 9.0)
    lite_attention(
        *case.tensors(0), read, write, budget=max(shares), limits=budget.limits(shares), mass=mass,
        layout=case.layout, scale=case.scale, geometry=MI300X_GEOMETRY, engine="gfx942",
    )  # fmt: skip
    walked, nothing = torch.ones(2, 2, 8, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
    each = [budget.select(mass[:, h], walked, nothing, share) for h, share in enumerate(shares)]
    assert torch.equal(write, bitmap.pack(torch.stack(each, 1)))
    kept = bitmap.unpack(write, 8).sum((0, 2, 3))
    assert kept[1] == 32 and kept.max(0).indices == 1 and kept.unique().numel() == 4, kept


def run(lite: LiteAttention, case: Case, step: int, **where: Any) -> list[torch.Tensor]:
    q, k, v = case.tensors(step)
    out = lite(q, k, v, step=step, layer="a", layout="bhsd", scale=0.06, **where)
    return [out, lite.lists("a", **where)]


def test_requests_with_budgets_of_their_own_repeat_and_abort() -> None:
    """Two at once, each step twice, one of them aborted and begun anew: each as if alone."""
    case, other = Case(257, 700), Case(257, 700, peaked=False)
    policies = [SkipPolicy(budget=share, warmup_steps=0) for share in (0.05, 0.4)]

    def make(index: int) -> LiteAttention:
        return LiteAttention(policies[index], engine="gfx942")

    alone: list[list[torch.Tensor]] = []
    for index in range(2):
        lite = make(index)
        alone.append([x for step in range(4) for x in run(lite, case, step)])
    kept = [int(bitmap.count(found[-1])) for found in alone]
    assert 0 < kept[1] < kept[0] < 22

    together: list[list[torch.Tensor]] = [[], []]
    both = [make(index) for index in range(2)]
    for step in range(4):
        for index, lite in enumerate(both):
            run(lite, other, step)  # repeated with other tensors: the last call counts
            together[index] += run(lite, case, step)
    for index in range(2):
        assert all(map(torch.equal, together[index], alone[index]))

    for step in range(2):
        run(both[0], other, step, generation="aborted")
    both[0].end("aborted")
    again = [x for s in range(4) for x in run(both[0], case, s, generation="aborted")]
    assert all(map(torch.equal, again, alone[0]))


class Boom(RuntimeError):
    pass


def generate(pipe: Any, **changes: Any) -> np.ndarray:
    """Frames of 512 tokens: 2 x 8 tiles."""
    return pipe(
        prompt="a red circle", height=32, width=32, num_frames=pixel_vae.pipeline_num_frames(8),
        num_inference_steps=3, guidance_scale=1.0, generator=torch.Generator().manual_seed(0),
        max_sequence_length=tiny.TEXT_LENGTH, output_type="np", **changes,
    ).frames[0]  # fmt: skip


def test_diffusers_pipelines_with_two_budgets_nest_and_abort() -> None:
    pipes = [
        tiny.wan_pipeline(
            layers=1, heads=1, head_dim=64, peaked=1.5, seed=seed, dtype=torch.bfloat16
        )
        for seed in (0, 1)
    ]
    policies = [SkipPolicy(budget=share, warmup_steps=0) for share in (0.02, 0.3)]

    def on(index: int) -> Any:
        return enable(pipes[index], policies[index], engine="gfx942")

    expected, computed = [], []
    for index in range(2):
        with on(index) as handle:
            expected.append(generate(pipes[index]))
            computed.append([row["tiles_computed"] for row in handle.statistics.to_records()])
    assert computed[0][0] == computed[1][0] == 16
    assert all(counts[-1] < 16 for counts in computed)

    def abort(_: Any, step: int, *__: Any) -> Any:
        if step == 1:
            raise Boom
        return {}

    def run_the_other(_: Any, step: int, *__: Any) -> Any:
        if step == 0:
            with pytest.raises(Boom):
                generate(pipes[1], callback_on_step_end=abort)
            inner.append(generate(pipes[1]))
        return {}

    inner: list[np.ndarray] = []
    with on(0), on(1):
        outer = generate(pipes[0], callback_on_step_end=run_the_other)
    assert np.array_equal(outer, expected[0]) and np.array_equal(inner[0], expected[1])
