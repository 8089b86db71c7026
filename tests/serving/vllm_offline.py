"""vLLM's engine answers through our attention with the tokens of its own backend.

Run in the environment that setup_vllm.sh makes: ``python -m pytest tests/serving/vllm_offline.py``.
Tokens are greedy and in fp32, where the order of sums does not reach them; bf16 is tried on a
model whose answers are known. Engines run in this process but where a test says otherwise, so that
its counters and its cache can be looked at.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving import models
from tests.serving.vllm_harness import (
    BUILT_IN,
    ENVIRONMENT,
    OURS,
    STEP_ROWS,
    TOKENS,
    engine,
    generate,
    made,
    prepare,
)

prepare()

import torch  # noqa: E402

import liteattention_vllm  # noqa: E402
from liteattention_vllm import layer  # noqa: E402

PROMPTS = models.prompts(26, 500)
#: Of 26 continuations, at most so many may survive a broken attention.
SURVIVORS = 20


@functools.cache
def built_in(name: str, dtype: str = "float32") -> list[list[int]]:
    """Return what vLLM's own backend answers to PROMPTS."""
    with engine(made(name), BUILT_IN, dtype=dtype) as llm:
        return generate(llm, PROMPTS)[0]


def identical(found: list[list[int]], expected: list[list[int]]) -> int:
    assert all(len(tokens) == TOKENS for tokens in (*found, *expected))
    return sum(a == b for a, b in zip(found, expected, strict=True))


def counted(before: dict[str, int]) -> dict[str, int]:
    return {name: n - before[name] for name, n in liteattention_vllm.statistics().items()}


# No test of Gemma 4 in vLLM; a hybrid has its own.
@pytest.mark.parametrize(
    "name", [name for name in models.MODELS if name not in ("overfit", "gemma4", "lfm2")]
)
def test_tokens_are_those_of_the_built_in_backend(name: str) -> None:
    layers = models.MODELS[name].layers
    before = liteattention_vllm.statistics()
    expected = built_in(name)
    assert not any(counted(before).values())

    with engine(made(name), OURS) as llm:
        found, cached = generate(llm, PROMPTS)
        first = counted(before)
        again, cached_again = generate(llm, PROMPTS)
        second = counted(before)

    assert identical(found, expected) == len(PROMPTS)
    assert first["layers"] == layers
    # every new token but the last of each prompt and every prompt token went through each layer
    assert not any(cached)
    rows = sum(map(len, PROMPTS)) + (TOKENS - 1) * len(PROMPTS)
    assert first["attention_rows"] == layers * rows
    assert first["cache_writes"] == first["attention_calls"]
    # chunked: more steps than the prompts would need whole
    assert max(map(len, PROMPTS)) > STEP_ROWS
    assert first["attention_calls"] > layers * TOKENS

    assert identical(again, expected) == len(PROMPTS)
    hits = [len(p) for p, n in zip(PROMPTS, cached_again, strict=True) if n]
    assert hits and min(hits) > 16
    saved = first["attention_rows"] - (second["attention_rows"] - first["attention_rows"])
    assert saved == layers * sum(cached_again)


def test_hybrid() -> None:
    """Every second layer is a short convolution (LFM2); the two others are ours.

    One request at a time: where several share a step, vLLM's convolutions on CPUs are not those of
    each request alone, whoever attends.
    """
    found = {}
    before = liteattention_vllm.statistics()
    for backend in (BUILT_IN, OURS):
        with engine(made("lfm2"), backend, enable_prefix_caching=False, max_num_seqs=1) as llm:
            found[backend] = generate(llm, PROMPTS[:8])[0]
    assert identical(found[OURS], found[BUILT_IN]) == 8
    rows = sum(map(len, PROMPTS[:8])) + (TOKENS - 1) * 8
    assert counted(before)["layers"] == 2
    assert counted(before)["attention_rows"] == 2 * rows


LENGTHS = [1, 2, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 96, 127, 128, 129, 200, 230]


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_bf16_recites_what_the_model_learnt(cache: str) -> None:
    """Its margins are wider than what bf16, or a cache in fp8, takes from a logit."""
    prompts = [line[:n] for line in models.recited() for n in LENGTHS]
    truth = [line[n : n + TOKENS] for line in models.recited() for n in LENGTHS]
    assert len(prompts) == 72
    before = liteattention_vllm.statistics()
    options = {"dtype": "bfloat16", "kv_cache_dtype": cache}
    with engine(made("overfit"), OURS, **options) as llm:
        assert identical(generate(llm, prompts)[0], truth) == 72
    assert counted(before)["attention_calls"]
    if cache == "auto":
        with engine(made("overfit"), BUILT_IN, **options) as llm:
            assert identical(generate(llm, prompts)[0], truth) == 72


def test_broken_attention_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, write = layer.attention_paged, layer.write_kv

    def without_causal_mask(*tensors: Any, **options: Any) -> Any:
        return attend(*tensors, **options | {"causal": False})

    def with_scale(*tensors: Any, **options: Any) -> Any:
        return attend(*tensors, **options | {"scale": options["scale"] * 1.02})

    def to_next_slot(k: Any, v: Any, keys: Any, values: Any, slots: Any, **options: Any) -> None:
        page = keys.shape[1]
        slots = torch.where(slots < 0, slots, slots // page * page + (slots % page + 1) % page)
        write(k, v, keys, values, slots, **options)

    def with_heads_swapped(k: Any, v: Any, *others: Any, **options: Any) -> None:
        write(k.flip(1), v.flip(1), *others, **options)

    broken: dict[str, tuple[str, Callable[..., Any]]] = {
        "no causal mask": ("attention_paged", without_causal_mask),
        "scale x 1.02": ("attention_paged", with_scale),
        "wrong slot": ("write_kv", to_next_slot),
        "swapped GQA heads": ("write_kv", with_heads_swapped),
    }
    expected = built_in("llama-d64")
    survivors = {}
    with engine(made("llama-d64"), OURS, enable_prefix_caching=False) as llm:
        assert identical(generate(llm, PROMPTS)[0], expected) == len(PROMPTS)
        for name, (function, replacement) in broken.items():
            with monkeypatch.context() as patch:
                patch.setattr(layer, function, replacement)
                survivors[name] = identical(generate(llm, PROMPTS)[0], expected)
        assert identical(generate(llm, PROMPTS)[0], expected) == len(PROMPTS)
    print(f"identical of {len(PROMPTS)}: {survivors}")
    assert max(survivors.values()) <= SURVIVORS


def test_other_layouts_of_the_cache_and_compiled_models(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "llama-d64"
    expected = built_in(name)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBNHC")
    before = liteattention_vllm.statistics()
    with engine(made(name), OURS, block_size=16, enforce_eager=False) as llm:
        assert identical(generate(llm, PROMPTS)[0], expected) == len(PROMPTS)
        caches = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        cache = caches.worker.model_runner.kv_caches[0]
    rows = sum(map(len, PROMPTS)) + (TOKENS - 1) * len(PROMPTS)
    assert counted(before)["attention_rows"] >= models.MODELS[name].layers * rows
    _, heads, block, width = cache.shape
    assert (heads, block, width) == (2, 16, 128)
    assert cache.stride()[1:] == (width, heads * width, 1)  # not the default, head by head


def test_a_cache_too_small_for_its_requests_loses_nothing() -> None:
    name, many, tokens = "llama-d64", 64, 64
    prompts = [[3 + i, *ids] for i, ids in enumerate(models.prompts(many, 24, seed=1))]
    with engine(made(name), BUILT_IN) as llm:
        expected = generate(llm, prompts, tokens)[0]
    # 64 requests of 25 to 89 tokens want some 300 blocks of 16 tokens
    with engine(
        made(name), OURS, block_size=16, num_gpu_blocks_override=140, disable_log_stats=False
    ) as llm:
        core = llm.llm_engine.engine_core.engine_core
        pool = core.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        found = generate(llm, prompts, tokens)[0]
        preempted = sum(
            metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
        )
        assert preempted > 0
        assert pool.get_num_free_blocks() == free
        assert not core.scheduler.running and not core.scheduler.waiting
    assert [len(ids) for ids in found] == [tokens] * many
    assert found == expected


# The last one in this process: drafts from n-grams load llvmlite, and vLLM's next start trips over
# its modules (triton_utils/dispatcher.py, vars(value).get).
def test_drafts_change_no_token() -> None:
    """Requests bring one row or up to four to a step; the keys of rejected drafts are replaced."""
    prompts = [line[:n] for line in models.recited() for n in (40, 129)]
    truth = [line[n : n + 96] for line in models.recited() for n in (40, 129)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
    options = {"speculative_config": drafts, "disable_log_stats": False}
    with engine(made("overfit"), OURS, **options) as llm:
        assert generate(llm, prompts, 96)[0] == truth
        drafted, accepted = (
            sum(m.value for m in llm.get_metrics() if m.name == f"vllm:spec_decode_num_{name}")
            for name in ("draft_tokens", "accepted_tokens")
        )
    assert 0 < accepted < drafted


def test_every_worker_process_runs_ours(tmp_path: Path) -> None:
    """Two workers, each with half of the heads, in processes of their own."""
    name = "llama-d64"
    expected = built_in(name)
    answers = _in_other_process(
        tmp_path,
        name,
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # else it wants a NUMA node for each worker
    )
    assert identical(answers, expected) == len(PROMPTS)
    counts = list(liteattention_vllm.read_statistics(tmp_path).values())
    assert len(counts) == 2
    rows = sum(map(len, PROMPTS)) + (TOKENS - 1) * len(PROMPTS)
    assert [c["attention_rows"] for c in counts] == [models.MODELS[name].layers * rows] * 2


def test_counters_notice_a_silent_fallback(tmp_path: Path) -> None:
    """vLLM's own CPU platform ignores CUSTOM and answers all the same: only counters tell."""
    answers = _in_other_process(tmp_path, "llama-d64", {}, VLLM_TARGET_DEVICE="cpu")
    assert identical(answers, built_in("llama-d64")) == len(PROMPTS)
    assert liteattention_vllm.read_statistics(tmp_path) == {}


def _in_other_process(
    folder: Path, name: str, options: dict[str, Any], **variables: str
) -> list[list[int]]:
    program = """if __name__ == "__main__":
    import json, sys
    from tests.serving.vllm_harness import OURS, engine, generate
    from tests.serving.vllm_offline import PROMPTS
    model, options, out = sys.argv[1:]
    with engine(model, OURS, **json.loads(options)) as llm:
        tokens = generate(llm, PROMPTS)[0]
    with open(out, "w") as file:
        json.dump(tokens, file)
"""
    script, out = folder / "run.py", folder / "tokens.json"
    script.write_text(program)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script), str(made(name)), json.dumps(options), str(out)],
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
            "LITEATTENTION_STATISTICS_DIR": str(folder),
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    tokens: list[list[int]] = json.loads(out.read_text())
    return tokens
