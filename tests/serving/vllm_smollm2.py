"""vLLM serves a published, trained language model through our attention, beside its own.

Run with -s to see the figures of docs/serving.md.
"""

from __future__ import annotations

import functools

from tests.serving import smollm2
from tests.serving.vllm_harness import BUILT_IN, OURS, engine, prepare

prepare()

import liteattention_vllm  # noqa: E402


@functools.cache
def answers(backend: str, dtype: str, cache: str = "auto") -> smollm2.Answers:
    from vllm import SamplingParams

    before = liteattention_vllm.statistics()["attention_rows"]
    text, prompts = smollm2.text(), smollm2.prompts()
    with engine(
        smollm2.folder(), backend, dtype=dtype, kv_cache_dtype=cache, enable_prefix_caching=False,
        max_num_batched_tokens=512,
    ) as llm:  # fmt: skip
        greedy = SamplingParams(temperature=0, max_tokens=smollm2.TOKENS, ignore_eos=True)
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        *found, read = llm.generate(
            [{"prompt_token_ids": ids} for ids in (*prompts, text)],
            [*[greedy] * len(prompts), scored],
            use_tqdm=False,
        )
    rows = liteattention_vllm.statistics()["attention_rows"] - before
    assert (rows > smollm2.LAYERS * len(text)) == (backend == OURS)
    made = smollm2.Answers(
        [list(each.outputs[0].token_ids) for each in found],
        [at[token].logprob for token, at in zip(text[1:], read.prompt_logprobs[1:], strict=True)],
    )
    print(f"{backend}, {dtype}, cache {cache}: loss {made.loss:.4f}")
    return made


def test_fp32_is_the_built_in_backends() -> None:
    ours, theirs = answers(OURS, "float32"), answers(BUILT_IN, "float32")
    print(f"fp32: largest difference of a log-likelihood {ours.furthest(theirs):.1e}")
    assert ours.tokens == theirs.tokens
    assert ours.furthest(theirs) < 1e-3


def test_bf16_and_fp8_caches_cost_little() -> None:
    """The model is as good: fp8 costs it no more than with the built-in backend's cache."""
    exact = answers(BUILT_IN, "float32")
    bf16, fp8 = answers(OURS, "bfloat16"), answers(OURS, "bfloat16", "fp8")
    theirs = answers(BUILT_IN, "bfloat16", "fp8")
    assert abs(bf16.loss - exact.loss) < 0.01
    assert 0.005 < fp8.loss - exact.loss < min(0.05, theirs.loss - exact.loss)
