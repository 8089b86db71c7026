"""The example of vLLM gives the tokens that vLLM's own attention gives.

Run in the environment that setup_vllm.sh makes: ``python -m pytest tests/serving/vllm_example.py``.
"""

from __future__ import annotations

import runpy

import pytest

from tests import ROOT
from tests.serving.vllm_harness import BUILT_IN, engine, made, prepare

prepare()

import liteattention_vllm  # noqa: E402

PROMPTS = ["t3 t4 t5", "t100 t20 t3 t77"]


def test_the_example_continues_prompts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    with engine(made("llama-d64"), BUILT_IN) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8)
        expected = [a.outputs[0].text for a in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    main = runpy.run_path(str(ROOT / "examples" / "vllm_offline.py"))["main"]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    before = liteattention_vllm.statistics()["attention_calls"]
    main([*PROMPTS, "--model", str(made("llama-d64")), "--tokens", "8", "--dtype", "float32"])
    assert liteattention_vllm.statistics()["attention_calls"] > before
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if " -> " in line]
    assert found == [f"{p!r} -> {t!r}" for p, t in zip(PROMPTS, expected, strict=True)]
