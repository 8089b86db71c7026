"""SGLang's engine for :mod:`.serving`: the offline engine, whose scheduler is another process.

A decode step's time is that of a whole ``Engine.generate`` over its steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .serving import STEPS, Case, answer

OURS, BUILT_IN = "liteattention_rocm", "torch_native"


def options(model: Path, backend: str, dtype: str, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the engine's options."""
    longest = max(case.context for case in cases) + 2 * STEPS
    return {
        "model_path": str(model),
        "attention_backend": backend,
        "device": "cpu",
        "dtype": dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        # Prompts of the decode cases stay cached from round to round.
        "max_total_tokens": sum(case.batch * (case.context + 2 * STEPS) for case in cases)
        + 2 * longest,
        "max_running_requests": max(case.batch for case in cases),
        "chunked_prefill_size": longest,
        "sleep_on_idle": True,
        "random_seed": 0,
        "log_level": "error",
    }


def _work(descriptor: int, options: dict[str, Any]) -> None:
    import sglang

    engine = sglang.Engine(**options)

    def measure(kind: str, prompts: list[list[int]]) -> float:
        # With its prefix cached, a prompt's first new token is a step like the others.
        tokens = 1 if kind == "prefill" else STEPS
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        begin = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - begin
        made = {len(each["output_ids"]) for each in answers}
        if made != {tokens}:
            raise RuntimeError(f"SGLang answered with {made} tokens, not {tokens}")
        return seconds / tokens

    try:
        answer(descriptor, measure)
    finally:
        engine.shutdown()


if __name__ == "__main__":  # the engine's processes import this file again
    _work(int(sys.argv[1]), json.loads(sys.argv[2]))
