"""SGLang serves a published, trained language model through our attention, beside its own.

Run with -s to see the figures of docs/serving.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.serving import smollm2
from tests.serving.sglang_server import BUILT_IN, OURS, serve


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., smollm2.Answers]:
    """What a server makes of the model, by attention backend, dtype and cache."""
    folder = tmp_path_factory.mktemp("smollm2")

    @functools.cache
    def ask(backend: str, dtype: str, cache: str = "auto") -> smollm2.Answers:
        with serve(
            folder / f"{backend}-{dtype}-{cache}", smollm2.folder(), backend, dtype=dtype,
            kv_cache_dtype=cache, page_size=16, chunked_prefill_size=512,
        ) as server:  # fmt: skip
            tokens = server.tokens(smollm2.prompts(), smollm2.TOKENS, clients=8)
            text = smollm2.text()
            read = server.post(
                "/generate",
                input_ids=text,
                sampling_params={"temperature": 0.0, "max_new_tokens": 1},
                return_logprob=True,
                logprob_start_len=0,
            ).json()["meta_info"]["input_token_logprobs"]
            assert [token for _, token, _ in read] == text
            rows = server.count("rows")
            assert (rows > smollm2.LAYERS * len(text)) == (backend == OURS)
        made = smollm2.Answers(tokens, [logprob for logprob, _, _ in read[1:]])
        print(f"{backend}, {dtype}, cache {cache}: loss {made.loss:.4f}")
        return made

    return ask


def test_fp32_is_the_built_in_backends(answers: Callable[..., smollm2.Answers]) -> None:
    ours, theirs = answers(OURS, "float32"), answers(BUILT_IN, "float32")
    print(f"fp32: largest difference of a log-likelihood {ours.furthest(theirs):.1e}")
    assert ours.tokens == theirs.tokens
    assert ours.furthest(theirs) < 1e-3


def test_bf16_over_an_fp8_cache_costs_little(answers: Callable[..., smollm2.Answers]) -> None:
    exact, fp8 = answers(BUILT_IN, "float32"), answers(OURS, "bfloat16", "fp8_e4m3")
    assert 0.005 < fp8.loss - exact.loss < 0.05
