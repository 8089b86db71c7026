"""Starts SGLang servers as a user would, talks to them, and takes their whole process tree down."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from sglang_cpu_platform import watch

from tests.serving import processes

#: The backend under test, and the one it is held against.
OURS, BUILT_IN = "liteattention_rocm", "torch_native"


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with what the servers of the tests need."""
    return {**os.environ, "OMP_NUM_THREADS": processes.THREADS, "HF_HUB_OFFLINE": "1", **more}


class Server(processes.Server):
    """A running server of SGLang."""

    def started(self) -> bool:
        return "The server is fired up" in self.log

    @property
    def calls(self) -> dict[int, dict[str, int]]:
        """Calls of our attention by process, see :data:`sglang_cpu_platform.watch.COUNTS`."""
        return watch.read(self.folder)

    def count(self, name: str) -> int:
        """Return one count, summed over the processes."""
        return sum(counts[name] for counts in self.calls.values())

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a JSON body."""
        return self.client.post(path, json=body)

    def generate(self, ids: Sequence[int], tokens: int = 16, **sampling: Any) -> dict[str, Any]:
        """Continue a prompt as :func:`greedy` says; return the server's answer."""
        chosen = greedy(tokens) | sampling
        answer = self.post("/generate", input_ids=list(ids), sampling_params=chosen)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def tokens(
        self, prompts: Sequence[Sequence[int]], count: int = 16, clients: int = 1
    ) -> list[list[int]]:
        """Continue prompts, ``clients`` of them at a time; return the new tokens of each."""
        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(lambda ids: self.generate(ids, count), prompts))
        return [answer["output_ids"] for answer in answers]

    def load(self) -> dict[str, Any]:
        """Return what the scheduler says of its queues and of its cache."""
        found: dict[str, Any] = self.client.get("/v1/loads").json()["loads"][0]
        return found

    def busy(self) -> dict[str, float]:
        load = self.load()
        return {
            name: load[f"num_{name}"] for name in ("running_reqs", "waiting_reqs", "used_tokens")
        }

    def flush(self) -> None:
        """Forget every cached prefix."""
        self.idle()
        answer = self.client.post("/flush_cache")
        assert answer.status_code == 200, answer.text

    def memory(self) -> int:
        """Return the bytes that the server's processes hold (RSS, pages shared counted twice)."""
        return sum(member.memory_info().rss for member in self.family())

    @contextlib.contextmanager
    def broken(self, fault: str) -> Iterator[None]:
        """Break our attention in the server's processes for a while, with no prefix cached."""
        self.flush()
        watch.set_fault(self.folder, fault)
        try:
            yield
        finally:
            watch.set_fault(self.folder, "none")
            self.flush()


def greedy(tokens: int) -> dict[str, Any]:
    """Return sampling parameters for exactly ``tokens`` greedy tokens."""
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}


@contextlib.contextmanager
def serve(
    folder: Path,
    model: Path,
    backend: str,
    launcher: Sequence[str] = ("-m", "sglang.launch_server"),
    **options: Any,
) -> Iterator[Server]:
    """Run a server until the block is left: :data:`OURS` watched, with its log in ``folder``."""
    chosen = {
        "model_path": model,
        "attention_backend": backend,
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 4096,
        "max_running_requests": 16,
        "random_seed": 0,
        "enable_cache_report": True,
        "sleep_on_idle": True,  # a waiting server leaves the cores to the others
        **options,
    }
    command = [sys.executable, *launcher, *processes.options(**chosen)]
    watched = environment(**{watch.VARIABLE: str(folder)})
    with processes.serve(Server, command, folder, watched) as server:
        yield server
