from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from liteattention_rocm import _core
from liteattention_rocm.engines import LIBRARY_VARIABLE, gfx942
from liteattention_rocm.engines.workspace import Workspaces
from tests.engines.gfx942.kernels.variants import KERNELS

SOURCE = Path(__file__).with_name("fake_hip.c")

FLAGS = ("-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread")

#: Two files, as a run-time that runs nothing sees them.
OBJECTS = [
    ("attention.co", b"\x7fELF attention", KERNELS[:10]),
    ("others.co", b"\x7fELF others", KERNELS[10:]),
]


LAUNCHED = ctypes.CFUNCTYPE(None)


@dataclass
class FakeHip:
    """A HIP run-time that writes down its calls."""

    path: str
    native: ctypes.CDLL

    @property
    def calls(self) -> list[str]:
        return ctypes.string_at(self.native.fake_calls()).decode().splitlines()

    def of(self, name: str) -> list[str]:
        """Arguments of the calls of one function."""
        return [call.partition(" ")[2] for call in self.calls if call.split()[0] == name]

    def fail(self, name: str, error: int) -> None:
        self.native.fake_fail(name.encode(), error)

    def during_launches(self, call: Callable[[], None] | None) -> None:
        """What every launch does, on its thread, before it returns."""
        kept = LAUNCHED(call) if call else LAUNCHED()
        self.native.fake_during_launches(kept)
        self._kept = kept  # ctypes keeps no reference

    def devices(self, count: int) -> None:
        self.native.fake_devices(count)

    def units(self, count: int) -> None:
        """Compute units of a device."""
        self.native.fake_units(count)

    def stream(self, handle: int, *, captured: bool) -> None:
        """Make ``handle`` the current stream, and let it be captured or not."""
        self.native.fake_stream(ctypes.c_size_t(handle), int(captured))

    def library(self) -> _core.HipLibrary:
        return _core.HipLibrary(self.path)


Build = Callable[..., str]


@pytest.fixture(scope="session")
def build_fake(tmp_path_factory: pytest.TempPathFactory) -> Build:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler (Debian: apt-get install gcc)")
    folder = tmp_path_factory.mktemp("hip")

    def build(name: str, *options: str) -> str:
        path = folder / name
        if not path.exists():
            subprocess.run([compiler, *FLAGS, *options, str(SOURCE), "-o", str(path)], check=True)
        return str(path)

    return build


def opened(path: str) -> FakeHip:
    native = ctypes.CDLL(path)
    native.fake_calls.restype = ctypes.c_void_p
    native.fake_reset()
    native.fake_during_launches(None)
    return FakeHip(path, native)


@pytest.fixture
def gpu_hip(build_fake: Build) -> FakeHip:
    """One that looks like a GPU's."""
    return opened(build_fake("libfake_hip.so"))


@pytest.fixture
def cpu_hip(build_fake: Build) -> FakeHip:
    """One that looks like the software MI300X, so that CPU tensors go to it."""
    return opened(build_fake("libfake_emulator.so", "-DFAKE_EMULATOR"))


@pytest.fixture
def engine(cpu_hip: FakeHip, monkeypatch: pytest.MonkeyPatch) -> Iterator[gfx942.Gfx942Engine]:
    """An engine on that run-time; its kernels run nothing."""
    monkeypatch.setenv(LIBRARY_VARIABLE, cpu_hip.path)
    monkeypatch.setattr(gfx942.engine, "code_objects", lambda: OBJECTS)
    yield gfx942.Gfx942Engine()


class Poisoned(dict[Any, torch.Tensor]):
    """Workspaces that are NaN whenever a call gets them."""

    def get(self, key: Any, default: Any = None) -> Any:
        found = super().get(key, default)
        return found if found is None else found.fill_(0xFF)


@pytest.fixture
def memory_of_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What PyTorch allocates, and the workspace of every call, is NaN before a call.

    A byte that is read before it is written, or never written, shows.
    """
    # An engine that is made in the meantime keeps its own for later.
    held = property(
        lambda self: vars(self).setdefault("poisoned", Poisoned()),
        lambda self, held: vars(self).update(held=held),
    )
    monkeypatch.setattr(Workspaces, "held", held, raising=False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
