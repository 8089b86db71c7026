"""The machine code of the tests' programs: made by LLVM 19, committed, looked up here.

``machine_code/snippets.json`` has what assembly stands for, source -> hex. ``objects.json`` has
object files and linked code objects, by the SHA-256 of how they are made and of what. A test whose
source is not there fails and says how to add it. ``make machine-code`` makes both files again;
``make test-machine-code`` runs the tests with LLVM and fails where a file says something else.

What compares with LLVM itself is marked ``llvm`` and calls ``run``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from liteattention_emulator import llvm, snippet

FOLDER = Path(__file__).with_name("machine_code")
MODES = ("stored", "compare", "update")


class Store:
    """A file of machine code by source. Owner: this module; the conftest sets the mode and ends it.

    Modes: "stored" only looks up. "compare" makes everything and fails where the file differs.
    "update" makes everything and adds it to the file.
    """

    def __init__(
        self, file: str, packed: Callable[[bytes], str], unpacked: Callable[[str], bytes]
    ) -> None:
        self.path, self.mode = FOLDER / file, "stored"
        self._packed, self._unpacked = packed, unpacked
        self._used: dict[str, bytes] = {}
        self._elsewhere: set[str] = set()
        self._text: dict[str, str] = {}
        if self.path.exists():
            self._text = json.loads(self.path.read_text(encoding="utf-8"))

    def get(self, key: str, source: str, make: Callable[[], bytes]) -> bytes:
        """Machine code of ``key``; ``source`` is for the message that it is not there."""
        if key in self._used:
            return self._used[key]
        kept = self._unpacked(self._text[key]) if key in self._text else None
        if self.mode == "stored" or (kept is None and self.mode == "compare"):
            if kept is None:
                lines = "\n".join(f"    {line}" for line in source.strip().splitlines()[:8])
                pytest.fail(
                    f"this program is not in {self.path.name}: it is new, or its source changed.\n"
                    "With LLVM 19 (Debian: apt-get install clang-19 lld-19 llvm-19) run\n"
                    "    .venv/bin/pytest --machine-code=update tests/emulator tests/tools\n"
                    f"and commit {self.path.parent.name}/. The program begins:\n{lines}",
                    pytrace=False,
                )
            made = kept
        else:
            made = make()
            if self.mode == "compare" and made != kept:
                pytest.fail(
                    f"LLVM ({compiler()}) makes another machine code of this program than\n"
                    f"{self.path.name} has: run `make machine-code`. It begins:\n{source[:400]}",
                    pytrace=False,
                )
        self._used[key] = made
        return made

    def asked(self) -> list[str]:
        """The keys that tests of this process have asked for."""
        return list(self._used)

    def note(self, keys: list[str]) -> None:
        """Tests of another process have asked for these."""
        self._elsewhere.update(keys)

    def finish(self) -> list[str]:
        """Write an updated file; or the sources that it has and no test of this run asked for."""
        if self.mode == "update":
            self._text |= {key: self._packed(code) for key, code in self._used.items()}
            self.path.parent.mkdir(exist_ok=True)
            text = json.dumps(dict(sorted(self._text.items())), indent=0)
            self.path.write_text(text + "\n", encoding="utf-8")
        if self.mode != "compare":
            return []
        return sorted(self._text.keys() - self._used.keys() - self._elsewhere)


SNIPPETS = Store("snippets.json", bytes.hex, bytes.fromhex)
OBJECTS = Store(
    "objects.json",
    lambda code: base64.b64encode(zlib.compress(code, 9)).decode(),
    lambda text: zlib.decompress(base64.b64decode(text)),
)
STORES = (SNIPPETS, OBJECTS)


def stored_object(recipe: str, source: str, make: Callable[[], bytes]) -> bytes:
    """What ``make`` makes of ``source`` as ``recipe`` says, from the store."""
    key = hashlib.sha256(f"{recipe}\n{source}".encode()).hexdigest()[:32]
    return OBJECTS.get(f"{recipe.split()[0]} {key}", source, make)


# ---- LLVM itself


def run(tool: str, *arguments: str, text: str = "", cwd: Path | None = None) -> bytes:
    """What a program of LLVM 19 prints. Raises llvm.ToolMissing."""
    command = [llvm.find(tool), *arguments]
    done = subprocess.run(command, input=text.encode(), capture_output=True, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stderr.decode()[:4000]}"
    return done.stdout


@cache
def compiler() -> str:
    return run("clang++", "--version").decode().splitlines()[0]


def assembled(text: str) -> bytes:
    """An object file of gfx942 assembly; nothing is scheduled and no wait state inserted."""
    flags = "-triple=amdgcn-amd-amdhsa -mcpu=gfx942 -mattr=-xnack -filetype=obj -o -"
    return run("llvm-mc", *flags.split(), text=text)


def compiled(source: Path, *flags: str) -> bytes:
    """What clang makes of a HIP source without ROCm, the same from whatever folder."""
    command = "-x hip --offload-device-only -nogpuinc -nogpulib -fuse-cuid=none"
    command += " -fdebug-compilation-dir=. -o"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        run("clang++", *command.split(), str(out), *flags, source.name, cwd=source.parent)
        return out.read_bytes()


# -ffast-math and the rest are those of the shipped kernels: liteattention_tools.build.
SHIPPED = ["--offload-arch=gfx942:xnack-", "--no-gpu-bundle-output", "-O3", "-std=c++20"]
SHIPPED += ["-ffast-math", "-fno-math-errno", "-mllvm", "-amdgpu-early-inline-all=true"]
SHIPPED += ["-mcode-object-version=5"]


def insert_wait_states(mir: str) -> str:
    """Assembly of machine functions (LLVM MIR) after LLVM's own hazard recognizer."""
    flags = "-mtriple=amdgcn-amd-amdhsa -mcpu=gfx942 -mattr=-xnack -x mir"
    flags += " -start-before=post-RA-hazard-rec -filetype=asm -o - -"
    return run("llc", *flags.split(), text=mir).decode()


# ---- looked up


def assemble(text: str) -> bytes:
    """An object file of gfx942 assembly, as ``assembled``."""
    return stored_object("assembled", text, lambda: assembled(text))


def link(text: str) -> bytes:
    """A code object of gfx942 assembly that has a kernel's descriptor."""

    def make() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "k.o").write_bytes(assembled(text))
            run("ld.lld", "-shared", "-o", "k.co", "k.o", cwd=Path(folder))
            return Path(folder, "k.co").read_bytes()

    return stored_object("linked", text, make)


def build_hip(source: Path, *flags: str) -> bytes:
    """What clang makes of a HIP source with these flags, its targets among them."""
    recipe = f"compiled {source.name} {' '.join(flags)}"
    return stored_object(recipe, source.read_text("utf-8"), lambda: compiled(source, *flags))


def compile_hip(source: Path, *flags: str) -> bytes:
    """A linked code object of a HIP source, with the flags of the shipped kernels before these."""
    return build_hip(source, *SHIPPED, *flags)


def machine_code(text: str) -> bytes:
    """The instructions of gfx942 assembly, as snippet.assemble."""
    return SNIPPETS.get(text, text, lambda: snippet.assemble(text))


def function(name: str, body: str) -> str:
    """Assembly of a function symbol."""
    return f".text\n.p2align 8\n.type {name},@function\n{name}:\n{body}\n.size {name}, .-{name}\n"
