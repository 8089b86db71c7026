"""Starts SGLang servers as a user would, talks to them, and takes their whole process tree down."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from sglang_cpu_platform import watch

#: The backend under test, and the one it is held against.
OURS, BUILT_IN = "liteattention_rocm", "torch_native"
#: A loaded machine takes minutes to import SGLang in each of a server's processes.
START_SECONDS = 600
THREADS = os.environ.get("OMP_NUM_THREADS") or str(min(4, os.cpu_count() or 1))


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with what the servers of the tests need."""
    return {**os.environ, "OMP_NUM_THREADS": THREADS, "HF_HUB_OFFLINE": "1", **more}


def arguments(model: Path, backend: str, **options: Any) -> list[str]:
    """Return the server's command line; an option of True is a flag."""
    chosen = {
        "model_path": model,
        "attention_backend": backend,
        "device": "cpu",
        "dtype": "float32",
        "host": "127.0.0.1",
        "max_total_tokens": 4096,
        "max_running_requests": 16,
        "random_seed": 0,
        "enable_cache_report": True,
        "sleep_on_idle": True,  # a waiting server leaves the cores to the others
        **options,
    }
    line = []
    for name, value in chosen.items():
        line += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return line


class Server:
    """A running server, at ``url``. ``folder`` holds its log and, of ours, the counted calls."""

    def __init__(self, url: str, process: psutil.Process, folder: Path) -> None:
        self.url = url
        self.process = process
        self.folder = folder
        self.client = httpx.Client(
            base_url=url, timeout=600, limits=httpx.Limits(max_connections=99)
        )

    @property
    def log(self) -> str:
        """What the server has printed so far."""
        return (self.folder / "log").read_text(errors="replace")

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

    def idle(self, seconds: float = 60) -> dict[str, Any]:
        """Wait until nothing runs or waits and no slot is in use; return the load then."""
        until = time.monotonic() + seconds
        while True:
            load = self.load()
            busy = [load[f"num_{name}"] for name in ("running_reqs", "waiting_reqs", "used_tokens")]
            if not any(busy):
                return load
            assert time.monotonic() < until, f"not idle after {seconds} s: {load}"
            time.sleep(0.2)

    def flush(self) -> None:
        """Forget every cached prefix."""
        self.idle()
        answer = self.client.post("/flush_cache")
        assert answer.status_code == 200, answer.text

    def memory(self) -> int:
        """Return the bytes that the server's processes hold (RSS, pages shared counted twice)."""
        return sum(p.memory_info().rss for p in [self.process, *self.process.children(True)])

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
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, *launcher, *arguments(model, backend, port=port, **options)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(**{watch.VARIABLE: str(folder)}),
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid), folder)
    try:
        _wait(server, process)
        yield server
    finally:
        server.client.close()
        stop(process)


def _wait(server: Server, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while "The server is fired up" not in server.log:
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the server did not start:\n{server.log[-4000:]}")
        time.sleep(0.2)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its session and everything it started, and wait for the end."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in family:  # one that left the session
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(family, timeout=30)
