"""A whole generation of a small llama-shaped model, attention on the MI300X's machine code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from liteattention_rocm import _core, serving, write_kv

pytestmark = pytest.mark.usefixtures("emulator")

LAYERS, HIDDEN, Q_HEADS, KV_HEADS, VOCABULARY = 2, 192, 4, 2, 96
PAGE, PAGES = 16, 18
#: Of weights with which no step's two best tokens are close: by head dim.
SEEDS = {64: 35, 128: 37}


@dataclass
class Generated:
    """Tokens of each prompt and the logits that they were taken from, [steps, prompts, V]."""

    tokens: list[list[int]]
    logits: torch.Tensor


class Model:
    """Pre-norm attention and SwiGLU, rotary positions; fp32 but for q, k, v and the cache."""

    def __init__(self, dim: int, dtype: torch.dtype, engine: str) -> None:
        g = torch.Generator().manual_seed(SEEDS[dim])

        def weight(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            return torch.randn(rows, columns, generator=g) * gain / columns**0.5

        self.dim, self.dtype, self.engine = dim, dtype, engine
        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=g)
        self.layers = [
            {
                "q": weight(Q_HEADS * dim, HIDDEN, 1.6),
                "k": weight(KV_HEADS * dim, HIDDEN, 1.6),
                "v": weight(KV_HEADS * dim, HIDDEN, 2.0),
                "o": weight(HIDDEN, Q_HEADS * dim, 2.0),
                "gate": weight(2 * HIDDEN, HIDDEN),
                "up": weight(2 * HIDDEN, HIDDEN),
                "down": weight(HIDDEN, 2 * HIDDEN),
            }
            for _ in range(LAYERS)
        ]
        self.head = weight(VOCABULARY, HIDDEN, 4.0)
        shape = (LAYERS, 2, PAGES, PAGE, KV_HEADS, dim)
        self.cache = torch.full(shape, torch.nan).to(dtype)

    def rotate(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of [T, H, D] at ``position`` [T]."""
        half = self.dim // 2
        angle = position[:, None] * 10000.0 ** (-torch.arange(half) / half)
        sin, cos = angle.sin()[:, None], angle.cos()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def step(
        self, tokens: torch.Tensor, position: torch.Tensor, batch: serving.PagedBatch
    ) -> torch.Tensor:
        """Logits of every row; its keys and values are in the cache afterwards."""
        owner = torch.repeat_interleave(torch.diff(batch.q_start).long())
        slots = batch.page_table[owner, position // PAGE].long() * PAGE + position % PAGE
        x = self.embedding[tokens]
        for layer, w in enumerate(self.layers):
            k_cache, v_cache = self.cache[layer]
            h = torch.nn.functional.rms_norm(x, (HIDDEN,))
            q, k, v = ((h @ w[name].T).unflatten(-1, (-1, self.dim)) for name in "qkv")
            q, k = self.rotate(q, position), self.rotate(k, position)
            q, k, v = (part.to(self.dtype) for part in (q, k, v))
            write_kv(k, v, k_cache, v_cache, slots, engine=self.engine)
            attended = serving.attention_paged(q, k_cache, v_cache, batch, engine=self.engine)
            x = x + attended.float().flatten(1) @ w["o"].T
            h = torch.nn.functional.rms_norm(x, (HIDDEN,))
            x = x + (torch.nn.functional.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T
        return torch.nn.functional.rms_norm(x, (HIDDEN,)) @ self.head.T

    def generate(self, prompts: list[list[int]], steps: int) -> Generated:
        """Greedy tokens: one prefill of all prompts together, then ``steps`` - 1 decode steps."""
        table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).int()
        table = table.view(len(prompts), -1)
        tokens = [list(prompt) for prompt in prompts]
        done = [0] * len(prompts)
        logits = []
        for _ in range(steps):
            new = [row[n:] for row, n in zip(tokens, done, strict=True)]
            starts = torch.tensor([0, *(len(rows) for rows in new)]).cumsum(0).int()
            lengths = torch.tensor([len(row) for row in tokens]).int()
            batch = serving.PagedBatch(starts, lengths, table)
            position = torch.cat(
                [torch.arange(n, len(row)) for row, n in zip(tokens, done, strict=True)]
            )
            found = self.step(torch.tensor([t for rows in new for t in rows]), position, batch)
            last = found[starts[1:].long() - 1]
            logits.append(last)
            done = [len(row) for row in tokens]
            for row, token in zip(tokens, last.argmax(-1).tolist(), strict=True):
                row.append(token)
        made = [row[len(prompt) :] for row, prompt in zip(tokens, prompts, strict=True)]
        return Generated(made, torch.stack(logits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
def test_tokens_equal_the_cpu_engines(
    dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    plan = _core.plan_ragged
    monkeypatch.setattr(
        _core, "plan_ragged", lambda *given: plans.append(plan(*given)) or plans[-1]
    )
    g = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCABULARY, (n,), generator=g).tolist() for n in (41, 5, 60)]
    steps = 20
    expected = Model(dim, dtype, "cpu").generate(prompts, steps)
    found = Model(dim, dtype, "gfx942").generate(prompts, steps)

    # 41 and 60 rows are for the prefill kernel, 5 rows of two heads for decode; then all decode.
    # The layers of a step share a plan.
    first, *others = plans
    assert first.prefill.grid > 0 and first.decode.grid > 0
    assert len(others) == steps - 1
    assert all(plan.prefill.grid == 0 and plan.decode.grid > 0 for plan in others)

    assert found.tokens == expected.tokens
    # Nor is that luck: no winner's lead over the second differs by more than half between engines.
    top = expected.logits.topk(2)
    lead = top.values[..., 0] - top.values[..., 1]
    found_top = found.logits.gather(-1, top.indices)
    change = (found_top[..., 0] - found_top[..., 1] - lead).abs()
    assert (lead > 2 * change).all(), f"lead {lead.min():.4f}, {(lead / change).min():.2f} changes"
    # And tokens depend on what attention sees: they are not one repeated, and differ by prompt.
    assert len({tuple(tokens) for tokens in found.tokens}) == len(prompts)
    assert all(len(set(tokens)) >= 4 for tokens in found.tokens)


def test_a_wrong_mask_changes_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCABULARY, (41,), generator=g).tolist() for _ in range(2)]
    expected = Model(64, torch.float16, "cpu").generate(prompts, 4)
    attend = serving.attention_paged

    def shorter(*arguments: Any, **options: Any) -> Any:
        return attend(*arguments, window=30, **options)

    monkeypatch.setattr(serving, "attention_paged", shorter)
    assert Model(64, torch.float16, "gfx942").generate(prompts, 4).tokens != expected.tokens
