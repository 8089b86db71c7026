"""vLLM serves Gemma 3 with images through our attention; transformers is the oracle.

The tokens of an image see each other (``mm_prefix`` in vLLM). vLLM's own attention on CPUs refuses
that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving import images
from tests.serving.vllm_harness import OURS, engine, prepare

prepare()

from liteattention_vllm import builder  # noqa: E402

TOKENS = 12


def test_tokens_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, several requests in a step, and again from a cache of prefixes."""
    from vllm import SamplingParams

    model = images.make(tmp_path)
    asked = images.prompts()
    expected = [images.best(model, tmp_path, *prompt, TOKENS) for prompt in asked]

    def generate() -> list[list[int]]:
        answers = llm.generate(
            [{"prompt": text, "multi_modal_data": {"image": seen}} if seen else {"prompt": text}
             for text, seen in asked],
            SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True),
            use_tqdm=False,
        )  # fmt: skip
        return [list(each.outputs[0].token_ids) for each in answers]

    with engine(
        tmp_path, OURS, max_model_len=512, max_num_batched_tokens=96, block_size=16,
        limit_mm_per_prompt={"image": 3},
    ) as llm:  # fmt: skip
        assert generate() == expected
        assert generate() == expected
        assert llm.reset_prefix_cache()

        def none(common: Any) -> None:
            return None

        monkeypatch.setattr(builder, "images", none)
        causal = generate()
        # Text is what it was, and images are seen by what comes after them.
        assert causal[0] == expected[0]
        assert sum(a != b for a, b in zip(causal[1:], expected[1:], strict=True)) >= 2
