"""LLVM 19 for tests: assembler, compiler, hazard recognizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

DEBIAN = "clang-19 lld-19 llvm-19"


def needs(*tools: str) -> pytest.MarkDecorator:
    """Skip where one of these programs is not installed."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    reason = f"{', '.join(missing)} not found (Debian packages: {DEBIAN})"
    return pytest.mark.skipif(bool(missing), reason=reason)


def run(*command: str, text: str = "") -> bytes:
    done = subprocess.run(command, input=text.encode(), capture_output=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stderr.decode()[:4000]}"
    return done.stdout


def assemble(text: str) -> bytes:
    """An object file of gfx942 assembly; nothing is scheduled and no wait state inserted."""
    command = [
        "llvm-mc-19",
        "-triple=amdgcn-amd-amdhsa",
        "-mcpu=gfx942",
        "-filetype=obj",
        "-o",
        "-",
    ]
    return run(*command, "-mattr=-xnack", text=text)


def function(name: str, body: str) -> str:
    """Assembly of a function symbol."""
    return f".text\n.p2align 8\n.type {name},@function\n{name}:\n{body}\n.size {name}, .-{name}\n"


def compile_hip(source: Path, out: Path, *flags: str) -> bytes:
    """A linked code object of a HIP source, without ROCm and without XNACK replay."""
    command = "clang++-19 -x hip --offload-arch=gfx942:xnack- --offload-device-only -nogpuinc"
    command += " -nogpulib --no-gpu-bundle-output -O3 -std=c++20 -ffast-math -fno-math-errno"
    command += " -mllvm -amdgpu-early-inline-all=true -fuse-cuid=none -mcode-object-version=5"
    run(*command.split(), *flags, "-o", str(out), str(source))
    return out.read_bytes()


def insert_wait_states(mir: str) -> str:
    """Assembly of machine functions (LLVM MIR) after LLVM's own hazard recognizer."""
    command = "llc-19 -mtriple=amdgcn-amd-amdhsa -mcpu=gfx942 -mattr=-xnack -x mir"
    command += " -start-before=post-RA-hazard-rec -filetype=asm -o - -"
    return run(*command.split(), text=mir).decode()
