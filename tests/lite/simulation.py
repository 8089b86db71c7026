"""LiteAttention beside a simulation that holds its lists by hand, on the reference engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry, lite_attention
from liteattention_rocm.contract import LiteTensors
from liteattention_rocm.engines import reference
from liteattention_rocm.lite import bitmap

TILE = TileGeometry(8, 4, 4)
THRESHOLD = -2.0
BUDGET = 0.08
POLICY = SkipPolicy(threshold=THRESHOLD, warmup_steps=0)
STEPS = 6
#: What POLICY and its like stand for in a test: "threshold", or "budget" by the fixture `limit`.
LIMIT = "threshold"

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    step: int, *, branch: str = "", clip: int = 0, batch: int = 1, length: int = 40
) -> Tensors:
    """q, k, v [B, S, 2, 8] of one step: keys that matter stay the same, the rest is noise."""
    fixed = torch.Generator().manual_seed(100 + clip)
    common = torch.randn(1, 1, 2, 8, generator=fixed)
    weight = torch.randn(batch, length, 1, 1, generator=fixed)
    noise = torch.Generator().manual_seed(1000 * clip + 10 * step + sum(map(ord, branch)))

    def randn() -> torch.Tensor:
        return torch.randn(batch, length, 2, 8, generator=noise)

    q = common + 0.5 * randn()
    k = common * weight + 0.5 * randn()
    return q.bfloat16(), k.bfloat16(), randn().bfloat16()


def judged(policy: SkipPolicy) -> SkipPolicy:
    """Return a policy with the usual threshold as one with a budget, if the test asks for that."""
    if LIMIT == "budget" and policy.threshold == THRESHOLD and not policy.soft_skip:
        return policy.model_copy(update={"budget": BUDGET})
    return policy


def make(policy: SkipPolicy = POLICY, **options: Any) -> LiteAttention:
    return LiteAttention(judged(policy), geometry=TILE, engine="reference", **options)


def call(lite: LiteAttention, tensors: Tensors, step: int, **where: Any) -> torch.Tensor:
    result = lite(*tensors, step=step, **{"layer": "blocks.0", **where})
    assert isinstance(result, torch.Tensor)
    return result


@dataclass
class By:
    """Lists held by hand: what one layer and branch of one generation ought to do."""

    read: torch.Tensor | None = None
    ordinal: int = 0
    threshold: float = THRESHOLD
    soft_skip: bool = False
    direction: str = "alternate"
    must_do: torch.Tensor | None = None
    must_skip: torch.Tensor | None = None

    def full(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return bitmap.full(
            q.shape[0], q.shape[2], TILE.q_blocks(q.shape[1]), TILE.k_blocks(k.shape[1])
        )

    def step(self, tensors: Tensors, *, advance: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = tensors
        read = self.full(q, k) if self.read is None else self.read
        write = torch.zeros_like(read)
        descending = {"alternate": self.ordinal % 2 == 1, "ascending": False, "descending": True}
        limit = {"threshold": self.threshold}
        if LIMIT == "budget" and self.threshold == THRESHOLD and not self.soft_skip:
            limit = {"budget": BUDGET}
        out = lite_attention(
            q, k, v, read, write, **limit, descending=descending[self.direction],
            soft_skip=self.soft_skip, must_do=self.must_do, must_skip=self.must_skip, geometry=TILE,
            engine="reference",
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        if advance:
            self.read, self.ordinal = write, self.ordinal + 1
        return out, write


def expect(lite: LiteAttention, by: By, step: int, tensors: Tensors, **where: Any) -> None:
    """Call ``lite`` and the simulation with the same tensors: same output, same next list."""
    out = call(lite, tensors, step, **where)
    want, want_list = by.step(tensors)
    assert torch.equal(out, want)
    listed = {k: v for k, v in where.items() if k in ("branch", "generation")}
    assert torch.equal(lite.lists(where.get("layer", "blocks.0"), **listed), want_list)


def shared_step(by: By, tensors: dict[str, Tensors]) -> dict[str, torch.Tensor]:
    """All branches read one list; the next one is the OR of what they write."""
    results = {name: by.step(x, advance=False) for name, x in tensors.items()}
    merged = torch.stack([write for _, write in results.values()])
    by.read = bitmap.pack(bitmap.unpack(merged, 10).any(0))
    by.ordinal += 1
    return {name: out for name, (out, _) in results.items()}


def expect_shared(lite: LiteAttention, by: By, step: int, tensors: dict[str, Tensors]) -> None:
    """Call the branches of ``lite`` one by one: each gives what the simulation gives."""
    want = shared_step(by, tensors)
    for name, x in tensors.items():
        assert torch.equal(call(lite, x, step, branch=name), want[name])


def branch_inputs(step: int, names: Iterable[str] = ("cond", "uncond")) -> dict[str, Tensors]:
    return {name: inputs(step, branch=name) for name in names}


SHARED = SkipPolicy(threshold=THRESHOLD, branches="shared", warmup_steps=0)


class Broken(RuntimeError):
    pass


def watch_engine(monkeypatch: pytest.MonkeyPatch, watch: Callable[[LiteTensors], None]) -> None:
    """Have ``watch`` called in every LiteAttention step, between its votes and its output."""
    run = reference._attend

    def watched(request: Any, tensors: Any, **options: Any) -> None:
        if isinstance(tensors, LiteTensors):
            watch(tensors)
        run(request, tensors, **options)

    monkeypatch.setattr(reference, "_attend", watched)


def break_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def scribble(tensors: LiteTensors) -> None:
        tensors.write.fill_(0)
        raise Broken

    watch_engine(monkeypatch, scribble)
