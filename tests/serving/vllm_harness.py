"""Runs vLLM for the tests: engines in this process, and servers as a user would start them."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.serving import models, processes

#: The backend under test, and the one it is held against.
OURS, BUILT_IN = "CUSTOM", "CPU_ATTN"
#: Enough for every prompt at once, in blocks of 128 tokens, so that no request is preempted.
CACHE_BYTES = 192 << 20
#: Rows of a step, so that prompts of up to 500 tokens come in chunks.
STEP_ROWS = 192
TOKENS = 24

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": processes.THREADS,
    # Compiled models are run by PyTorch, not translated to C++: seconds instead of minutes.
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare() -> None:
    """Set what vLLM and OpenMP read when they are imported: call it before."""
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def made(name: str) -> Path:
    """Return the folder of a small model, kept over test runs."""
    version = hashlib.sha256(Path(models.__file__).read_bytes()).hexdigest()[:8]
    out = Path(__file__).parents[2] / "build" / "serving-models" / version
    out.mkdir(parents=True, exist_ok=True)
    return models.make(out, [name])[name]


@contextlib.contextmanager
def engine(model: Path, backend: str, **options: Any) -> Iterator[Any]:
    """Start an engine, in this process unless it is to have several workers; take it down."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    chosen: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": CACHE_BYTES,
        "max_num_batched_tokens": STEP_ROWS, "enable_prefix_caching": True, "enforce_eager": True,
        "disable_log_stats": True, "seed": 0, **options,
    }  # fmt: skip
    with _without_llvmlite():
        llm = LLM(str(model), attention_backend=backend, **chosen)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _without_llvmlite() -> Iterator[None]:
    """Hide what drafts bring by Numba: vLLM reads the dict of every attribute of every module.

    llvmlite's library has another attribute under that name, and engines after drafts would fail.
    """
    names = [name for name in sys.modules if name.startswith("llvmlite.binding")]
    hidden = {name: sys.modules.pop(name) for name in names}
    try:
        yield
    finally:
        sys.modules.update(hidden)


def generate(
    llm: Any, prompts: Sequence[Sequence[int]], tokens: int = TOKENS
) -> tuple[list[list[int]], list[int]]:
    """Continue prompts greedily; return the new tokens, and how many of the prompt were cached."""
    from vllm import SamplingParams

    answers = llm.generate(
        [{"prompt_token_ids": list(ids)} for ids in prompts],
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(a.outputs[0].token_ids) for a in answers], [
        a.num_cached_tokens or 0 for a in answers
    ]


class Server(processes.Server):
    """A running ``vllm serve``."""

    @property
    def calls(self) -> dict[int, dict[str, int]]:
        """What each of the server's processes counted, see ``liteattention_vllm.counters``."""
        from liteattention_vllm import read_statistics

        return read_statistics(self.folder)

    def post(self, prompt: Sequence[int], tokens: int = TOKENS, **more: Any) -> httpx.Response:
        body = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return self.client.post("/v1/completions", json=body | more)

    def generate(self, prompt: Sequence[int], tokens: int = TOKENS) -> list[int]:
        """Continue a prompt greedily; return the new tokens."""
        answer = self.post(prompt, tokens)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    def tokens(
        self, prompts: Sequence[Sequence[int]], tokens: int = TOKENS, clients: int = 1
    ) -> list[list[int]]:
        """Continue prompts, ``clients`` of them at a time."""
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(lambda ids: self.generate(ids, tokens), prompts))

    def metric(self, name: str) -> float:
        """Return a metric of the server, summed over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{")]
        assert found, f"no metric {name}"
        return sum(found)

    def busy(self) -> dict[str, float]:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return {name: self.metric(f"vllm:{name}") for name in names}

    def memory(self) -> int:
        """Return the bytes that the server's processes hold for themselves."""
        return sum(member.memory_full_info().uss for member in self.family())


@contextlib.contextmanager
def serve(model: Path, backend: str, folder: Path, **options: Any) -> Iterator[Server]:
    """Run ``vllm serve`` until the block is left."""
    chosen: dict[str, Any] = {
        "served_model_name": "model", "attention_backend": backend, "dtype": "float32",
        "max_model_len": 2048, "kv_cache_memory_bytes": CACHE_BYTES,
        "max_num_batched_tokens": STEP_ROWS, "enforce_eager": True, **options,
    }  # fmt: skip
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model)]
    environment = {**os.environ, **ENVIRONMENT, "LITEATTENTION_STATISTICS_DIR": str(folder)}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    command += processes.options(**chosen)
    with processes.serve(Server, command, folder, environment) as server:
        yield server
