"""vLLM serves encoders (embeddings) and speech through our attention; transformers is the oracle.

Encoders keep no cache: the requests of a step are packed, and each row sees its whole request.
Whisper's decoder reads what its encoder left in a cache by cross-attention, beside its own cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import encoders, speech
from tests.serving.vllm_harness import OURS, engine, prepare

prepare()


import liteattention_vllm  # noqa: E402
from liteattention_vllm import layer  # noqa: E402

#: Of embeddings of length 1: some thirty times what fp32 rounds off.
CLOSE = 1e-5
TOKENS = 16


def counted(before: dict[str, int]) -> dict[str, int]:
    return {name: n - before[name] for name, n in liteattention_vllm.statistics().items()}


@contextlib.contextmanager
def served(folder: Path, **more: Any) -> Iterator[Any]:
    """vLLM with an encoder. Several requests share a step."""
    with engine(
        folder, OURS, runner="pooling", max_model_len=encoders.CONTEXT, max_num_batched_tokens=256,
        enable_prefix_caching=False, pooler_config={"task": "token_embed", "use_activation": False},
        **more,
    ) as llm:  # fmt: skip
        yield llm


def worst(model: Any, llm: Any) -> float:
    """Largest difference between vLLM's embeddings and those of each request alone."""
    asked = [{"prompt_token_ids": ids} for ids in encoders.requests()]
    found = llm.encode(asked, pooling_task="token_embed", use_tqdm=False)
    return max(
        encoders.deviation(each.outputs.data, encoders.embeddings(model, ids))
        for each, ids in zip(found, encoders.requests(), strict=True)
    )


@pytest.mark.parametrize("name", [name for name in encoders.ENCODERS if name != "bert"])
def test_embeddings_are_those_of_each_request_alone(name: str, tmp_path: Path) -> None:
    model = encoders.make(name, tmp_path)
    with served(tmp_path) as llm:
        assert worst(model, llm) < CLOSE


def test_the_dtype_of_caches_is_nothing_to_an_encoder(tmp_path: Path) -> None:
    """A decoder in fp32 is refused over a cache in bf16."""
    model = encoders.make("bert", tmp_path)
    with served(tmp_path, kv_cache_dtype="bfloat16") as llm:
        assert worst(model, llm) < CLOSE


def test_broken_encoders_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = layer.attention_varlen

    def causal(*tensors: Any, **options: Any) -> Any:
        return attend(*tensors, **options | {"causal": True})

    def scaled(*tensors: Any, **options: Any) -> Any:
        return attend(*tensors, **options | {"scale": options["scale"] * 1.02})

    def joined(q: Any, k: Any, v: Any, starts: Any, _: Any, **options: Any) -> Any:
        whole = starts[[0, -1]]
        rows = {name: q.shape[0] for name in ("max_seqlen_q", "max_seqlen_k")}
        return attend(q, k, v, whole, whole, **options | rows)

    model = encoders.make("bert", tmp_path)
    before = liteattention_vllm.statistics()
    with served(tmp_path) as llm:
        assert worst(model, llm) < CLOSE
        after = counted(before)
        assert after["layers"] == model.config.num_hidden_layers
        assert after["attention_rows"] == after["layers"] * sum(map(len, encoders.requests()))
        assert after["attention_calls"] < after["layers"] * len(encoders.requests())
        assert not after["cache_writes"]
        for broken in (causal, scaled, joined):
            monkeypatch.setattr(layer, "attention_varlen", broken)
            far = worst(model, llm)
            print(f"{broken.__name__}: {far:.1e}")
            assert far > 50 * CLOSE


def transcribed(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    found = llm.generate(
        [
            {
                "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": sound}},
                "decoder_prompt": {"prompt_token_ids": speech.PROMPT},
            }
            for sound in speech.sounds()
        ],
        SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(each.outputs[0].token_ids) for each in found]


def test_speech_is_transcribed_with_the_best_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend: Callable[..., Any] = layer.attention_paged

    def windowed(*tensors: Any, **options: Any) -> Any:
        return attend(*tensors, **options | ({} if options["causal"] else {"window": 1000}))

    def scaled(*tensors: Any, **options: Any) -> Any:
        change = 1.0 if options["causal"] else 1.2
        return attend(*tensors, **options | {"scale": options["scale"] * change})

    model = speech.make(tmp_path)
    before = liteattention_vllm.statistics()
    with engine(
        tmp_path, OURS, max_model_len=448, max_num_batched_tokens=2048, enable_prefix_caching=False
    ) as llm:
        answers = transcribed(llm)
        after = counted(before)
        assert after["layers"] == 2 * model.config.decoder_layers  # and as many of cross-attention
        assert after["attention_calls"]
        assert speech.regret(model, answers) < 0.01
        # The sound decides: the tokens of another are not the best ones.
        assert speech.regret(model, answers[1:] + answers[:1]) > 0.5
        for broken in (windowed, scaled):
            monkeypatch.setattr(layer, "attention_paged", broken)
            lost = speech.regret(model, transcribed(llm))
            print(f"{broken.__name__}: {lost:.2f}")
            assert lost > 0.02
