"""vLLM's engine for :mod:`.serving`, in the process that asks it: no HTTP, no other processes.

A decode step's time is the median of the engine's steps in which every request gets one token.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .serving import STEPS, Case, answer

OURS, BUILT_IN = "CUSTOM", "CPU_ATTN"


def options(model: Path, backend: str, dtype: str, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the engine's options."""
    longest = max(case.context for case in cases) + 2 * STEPS
    # Prompts of the decode cases stay cached from round to round.
    tokens = sum(case.batch * (case.context + 2 * STEPS + 128) for case in cases) + 2 * longest
    config = json.loads((model / "config.json").read_text())
    width = 2 * config["num_key_value_heads"] * config["head_dim"] * config["num_hidden_layers"]
    return {
        "model": str(model),
        "attention_backend": backend,
        "dtype": dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": longest,
        "max_num_batched_tokens": max(case.batch * case.context for case in cases),
        "max_num_seqs": max(case.batch for case in cases),
        "kv_cache_memory_bytes": tokens * width * (4 if dtype == "float32" else 2),
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "disable_log_stats": True,
        "seed": 0,
    }


class _Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._engine = LLM(**options).llm_engine
        self._number = 0
        if options["attention_backend"] == OURS:
            self.measure("prefill", [[3, 4, 5]])
            from liteattention_vllm import statistics as counted

            if not counted()["attention_calls"]:
                raise RuntimeError(
                    "vLLM did not take attention backend CUSTOM: on a CPU its platform ignores it; "
                    "install tests/serving/vllm_cpu_platform next to it"
                )

    def measure(self, kind: str, prompts: list[list[int]]) -> float:
        from vllm import SamplingParams

        steps = STEPS + 1 if kind == "decode" else 1
        sampling = SamplingParams(
            temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False
        )
        made: dict[str, int] = {}
        begin = time.perf_counter()
        for prompt in prompts:
            self._number += 1
            made[str(self._number)] = 0
            self._engine.add_request(str(self._number), {"prompt_token_ids": prompt}, sampling)
        seconds = []
        while self._engine.has_unfinished_requests():
            started = min(made.values()) > 0
            step = time.perf_counter()
            outputs = self._engine.step()
            if started:
                seconds.append(time.perf_counter() - step)
            for output in outputs:
                made[output.request_id] = len(output.outputs[0].token_ids)
        if set(made.values()) != {steps}:
            raise RuntimeError(f"vLLM answered with {made} instead of {steps} tokens each")
        return statistics.median(seconds) if seconds else time.perf_counter() - begin


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    answer(int(sys.argv[1]), _Engine(json.loads(sys.argv[2])).measure)
