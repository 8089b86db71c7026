"""A framework's server as a user starts it: its process tree, its log and a client."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

#: A loaded machine takes minutes to import a framework in each of a server's processes.
START_SECONDS = 600
THREADS = os.environ.get("OMP_NUM_THREADS") or str(min(4, os.cpu_count() or 1))


class Server:
    """A running server, at ``url``. ``folder`` holds its log and what its processes counted."""

    #: Answers with 200 once requests may come.
    READY = "/health"

    def __init__(self, url: str, process: psutil.Process, folder: Path) -> None:
        self.url = url
        self.process = process
        self.folder = folder
        # Servers close a connection that was idle for 5 s: this client gives it up before they do.
        limits = httpx.Limits(max_connections=99, keepalive_expiry=1)
        self.client = httpx.Client(base_url=url, timeout=600, limits=limits)

    @property
    def log(self) -> str:
        """What the server has printed so far."""
        return (self.folder / "log").read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Return the processes of the server."""
        return [self.process, *self.process.children(recursive=True)]

    def started(self) -> bool:
        """Say whether requests may come."""
        with contextlib.suppress(httpx.TransportError):
            return self.client.get(self.READY).status_code == 200
        return False

    def busy(self) -> dict[str, float]:
        """Return what runs, waits or is in use, by name; nothing of it when all are zero."""
        raise NotImplementedError

    def idle(self, seconds: float = 60) -> None:
        """Wait until no request runs or waits and nothing of the cache is in use."""
        until = time.monotonic() + seconds
        while any((busy := self.busy()).values()):
            assert time.monotonic() < until, f"not idle after {seconds} s: {busy}"
            time.sleep(0.2)


Kind = TypeVar("Kind", bound=Server)


def options(**chosen: Any) -> list[str]:
    """Return a command line's options by name; an option of True is a flag."""
    line = []
    for name, value in chosen.items():
        line += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return line


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve(
    kind: type[Kind], command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[Kind]:
    """Run ``command`` until the block is left, from when the server answers; log in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    line = [*command, *options(host="127.0.0.1", port=port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            line, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    server = kind(f"http://127.0.0.1:{port}", psutil.Process(process.pid), folder)
    try:
        until = time.monotonic() + START_SECONDS
        while not server.started():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not start:\n{server.log[-4000:]}")
            time.sleep(0.2)
        yield server
    finally:
        server.client.close()
        stop(process)


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
