"""vLLM's engine for :mod:`.serving` and :mod:`.serving_backends`, in a process of its own.

No HTTP, no further processes. For :mod:`.serving` a decode step's time is the median of the
engine's steps in which every request gets one token.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from .serving import STEPS, Case, answer

OURS, BUILT_IN = "CUSTOM", "CPU_ATTN"
NO_GPU = (
    "PyTorch sees no GPU: install its build for this machine's, https://pytorch.org/get-started"
)


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

        asked = options["attention_backend"]
        self._engine = LLM(**options).llm_engine
        self._number = 0
        if asked == OURS:
            self.measure("prefill", [[3, 4, 5]])
            from liteattention_vllm import statistics as counted

            if not counted()["attention_calls"]:
                raise RuntimeError(
                    "vLLM did not take attention backend CUSTOM: on a CPU its platform ignores it; "
                    "install tests/serving/vllm_cpu_platform next to it"
                )
        taken = self._backends()
        if taken != {_class_name(asked)}:
            raise RuntimeError(f"vLLM runs attention backend {', '.join(taken)}, not {asked}")

    def measure(self, kind: str, prompts: list[list[int]], tokens: int = 0) -> Any:
        """Answer a question of :mod:`.serving`, or of :mod:`.serving_backends` ("arrivals")."""
        if kind == "arrivals":
            return self._arrivals(prompts, tokens)[1]
        steps = STEPS + 1 if kind == "decode" else 1
        ends, arrivals = self._arrivals(prompts, steps)
        begun = max(each[0] for each in arrivals)
        ends = [end for end in ends if end >= begun]
        gaps = [after - before for before, after in pairwise(ends)]
        return statistics.median(gaps) if kind == "decode" else ends[-1]

    def _arrivals(
        self, prompts: list[list[int]], tokens: int
    ) -> tuple[list[float], list[list[float]]]:
        """Continue prompts at once: ends of all steps, and when each request's tokens came.

        Seconds since the requests were handed over.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        arrivals: dict[str, list[float]] = {}
        begin = time.perf_counter()
        for prompt in prompts:
            self._number += 1
            arrivals[str(self._number)] = []
            self._engine.add_request(str(self._number), {"prompt_token_ids": prompt}, sampling)
        ends = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            ends.append(time.perf_counter() - begin)
            for output in outputs:
                came = arrivals[output.request_id]
                came += [ends[-1]] * (len(output.outputs[0].token_ids) - len(came))
        made = {len(came) for came in arrivals.values()}
        if made != {tokens}:
            raise RuntimeError(f"vLLM answered with {made} tokens, not {tokens} each")
        return ends, list(arrivals.values())

    def _backends(self) -> set[str]:
        """Classes of the backends of the model's attention layers."""
        context = self._engine.vllm_config.compilation_config.static_forward_context
        found = (getattr(layer, "attn_backend", None) for layer in context.values())
        return {each.__name__ for each in found if each is not None}


def _class_name(backend: str) -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    name: str = AttentionBackendEnum[backend].get_class().__name__
    return name


def look(question: dict[str, Any]) -> dict[str, Any]:
    """Say what this machine is, and everything in it that keeps backends from running a model.

    See :func:`.serving_backends.look`, which asks.
    """
    import torch

    reasons: list[str] = []
    facts: dict[str, str] = {}
    memory = whole = 0
    if question["device"] == "cuda":
        if torch.cuda.is_available():
            memory, whole = torch.cuda.mem_get_info()
            facts["device"] = f"{torch.cuda.get_device_name()}, {whole / 2**30:.0f} GiB"
        else:
            reasons.append(NO_GPU)
    import vllm
    from vllm.platforms import current_platform

    facts["vllm"] = vllm.__version__
    kinds = {"cuda": current_platform.is_cuda, "rocm": current_platform.is_rocm}
    platform = next((name for name, holds in kinds.items() if holds()), "cpu")
    if (platform == "cpu") != (question["device"] == "cpu"):
        wanted = "CUDA or ROCm" if question["device"] == "cuda" else "CPUs"
        reasons.append(
            f"vLLM {vllm.__version__} runs on platform {current_platform.device_type!r} here: "
            f"install its build for {wanted}"
        )
    else:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        for backend in question["backends"]:
            reasons += [f"{backend}: {reason}" for reason in _against(backend, question)]
    return {
        "platform": platform,
        "memory": memory,
        "whole": whole,
        "facts": facts,
        "reasons": reasons,
    }


def _against(backend: str, question: dict[str, Any]) -> list[str]:
    """What a backend has against a model, or why it cannot be imported."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if backend not in AttentionBackendEnum.__members__:
        known = ", ".join(AttentionBackendEnum.__members__)
        return [f"vLLM has no such attention backend, only {known}"]
    try:
        found = AttentionBackendEnum[backend].get_class()
        reasons: list[str] = found.validate_configuration(
            head_size=question["head_dim"],
            dtype=getattr(torch, question["dtype"]),
            kv_cache_dtype=question["kv_cache_dtype"],
            block_size=None,
            use_mla=False,
            has_sink=False,
            use_sparse=False,
            use_mm_prefix=False,
            use_per_head_quant_scales=False,
            device_capability=current_platform.get_device_capability(),
            attn_type="decoder",
            has_sliding_window=question["window"],
        )
    except Exception as error:  # whatever a missing library of a backend makes it raise
        return [f"it cannot be loaded: {type(error).__name__}: {error}"]
    return reasons


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On ROCm one of the backends is AITER's. The other layers are to be the same for all of them.
    os.environ.setdefault("VLLM_ROCM_USE_AITER", "1")
    if sys.argv[1] == "look":
        print(json.dumps(look(json.loads(sys.argv[2]))))
    else:
        answer(int(sys.argv[1]), _Engine(json.loads(sys.argv[2])).measure)
