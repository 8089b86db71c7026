"""Builds the gfx942 code objects, refuses bad ones, and writes the manifest.

No ROCm is needed: Debian's ``clang-19`` and ``lld-19`` know the target. The compiler is pinned
because it decides the kernels' speed (a newer one spills); the flags make two builds
byte-identical.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from liteattention_emulator import cfg, hazards, listing, llvm
from liteattention_rocm.engines.gfx942.manifest import (
    DIRECTORY,
    FORMAT,
    CodeObject,
    Manifest,
    load_document,
    parse,
)

from . import loops, metadata

SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "gfx942"
TARGET = "gfx942"
LDS_LIMIT = 64 * 1024

#: -fno-honor-nans: no code asks arithmetic whether a value is NaN (number.h looks at the bits), and
#: without it every maximum of a score would be quieted first, 48 instructions per K block.
#: -fno-slp-vectorize: packed fp32 prolongs the other wave's matrix instruction by 5 clocks
#: (docs/model.md), where two plain instructions are hidden; softmax.h packs where it pays.
#: -ffast-math would also drop infinities, which the masks are made of.
#: -fuse-cuid=none and the code-object version: reproducible bytes.
FLAGS = (
    "-x",
    "hip",
    f"--offload-arch={TARGET}",
    "--offload-device-only",
    "-nogpuinc",
    "-nogpulib",
    "--no-gpu-bundle-output",
    "-O3",
    "-std=c++20",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-honor-nans",
    "-fno-signed-zeros",
    "-fno-slp-vectorize",
    "-mllvm",
    "-amdgpu-early-inline-all=true",
    "-fuse-cuid=none",
    "-mcode-object-version=5",
    "-Wall",
    "-Wextra",
    "-Werror",
)


class BuildError(RuntimeError):
    """The compiler refused a source, or the gate refused what it made; lists every reason."""


def find_compiler(name: str | None = None) -> str:
    """Return the path of the compiler: clang++ 19, or the one of another name.

    Raises:
        llvm.ToolMissing: it, or the linker that clang++ starts, is not installed; the message
            names the Debian package.
    """
    if name is None:
        llvm.find("ld.lld")
        return llvm.find("clang++")
    path = shutil.which(name)
    if path is None:
        raise llvm.ToolMissing(f"{name} is not installed")
    return path


def compiler_version(compiler: str) -> str:
    """Return the first line of the compiler's version text."""
    result = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True)
    return result.stdout.splitlines()[0].strip()


def compile_source(source: Path, output: Path, compiler: str) -> None:
    """Compile one ``.hip`` file into a code object.

    Raises:
        BuildError: with the compiler's messages.
    """
    # hipcc is clang with ROCm's headers in front; the kernels use none of them.
    extra = ("--genco",) if Path(compiler).name.startswith("hipcc") else ()
    result = subprocess.run(
        [compiler, *extra, *FLAGS, "-o", str(output), source.name],
        cwd=source.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise BuildError(f"{source.name}:\n{result.stderr.strip()}")


def gate(path: Path) -> list[str]:
    """Return every reason why the code object at ``path`` must not be shipped.

    Register spills, scratch memory inside a loop, more LDS than a compute unit has, wait-state
    hazards.
    """
    elf = path.read_bytes()
    reasons = []
    if metadata.target(elf) != TARGET:
        reasons.append(f"{path.name}: built for {metadata.target(elf)!r}, not {TARGET}")
    for kernel in metadata.kernels(elf):
        if kernel.vgpr_spills:
            reasons.append(f"{kernel.name}: {kernel.vgpr_spills} vector registers spilled")
        if kernel.sgpr_spills:
            reasons.append(f"{kernel.name}: {kernel.sgpr_spills} scalar registers spilled")
        if kernel.lds_bytes > LDS_LIMIT:
            reasons.append(
                f"{kernel.name}: {kernel.lds_bytes} bytes of LDS, a compute unit has {LDS_LIMIT}"
            )
    listed = listing.load(path)
    for entry in listed.entries:
        again = loops.scratch_in_loops(cfg.Graph(listed.instructions, entry.first))
        if again:
            reasons.append(
                f"{entry.name}: {len(again)} scratch instructions in loops, the first at "
                f"{again[0].offset:#x}"
            )
    return reasons + [f"{path.name}: {finding}" for finding in hazards.check(path)]


def _compile_and_gate(source: Path, path: Path, compiler: str) -> list[str]:
    """Compile a source; return every reason why its code object must not be shipped."""
    try:
        compile_source(source, path, compiler)
    except BuildError as error:
        return [str(error)]
    return gate(path)


def describe(path: Path) -> dict[str, Any]:
    """Return the manifest's entry for a code object."""
    elf = path.read_bytes()
    entry = CodeObject(
        file=path.name,
        sha256=hashlib.sha256(elf).hexdigest(),
        bytes=len(elf),
        code_object_version=metadata.code_object_version(elf),
        kernels=metadata.kernels(elf),
    )
    return dataclasses.asdict(entry)


def source_hashes(sources: Path = SOURCES) -> dict[str, str]:
    """Return the SHA-256 of every file that takes part in a build."""
    files = sorted(p for p in sources.iterdir() if p.suffix in (".h", ".hip", ".def"))
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def build(
    output: Path = DIRECTORY, sources: Path = SOURCES, compiler: str | None = None
) -> Manifest:
    """Build every ``.hip`` of ``sources`` into ``output`` and write ``manifest.json`` there.

    Nothing is written unless everything compiles and passes the gate.

    Raises:
        llvm.ToolMissing: compiler or linker are not installed.
        BuildError: with every reason of every file.
        FileNotFoundError: the sources are not here.
    """
    if not sources.is_dir():
        raise FileNotFoundError(
            f"no kernel sources at {sources}: build from a checkout of the repository"
        )
    compiler = find_compiler(compiler)
    with tempfile.TemporaryDirectory() as temporary:
        found = sorted(sources.glob("*.hip"))
        paths = {source: Path(temporary) / f"{source.stem}.co" for source in found}
        # The largest first: attention_prefill takes half of the time.
        largest = sorted(found, key=lambda source: -source.stat().st_size)
        with ProcessPoolExecutor() as pool:
            tried = {x: pool.submit(_compile_and_gate, x, paths[x], compiler) for x in largest}
        reasons = [reason for source in found for reason in tried[source].result()]
        made = list(paths.values())
        if reasons:
            raise BuildError("kernels refused:\n" + "\n".join(f"- {r}" for r in reasons))
        document = {
            "format": FORMAT,
            "target": TARGET,
            "compiler": compiler_version(compiler),
            "flags": list(FLAGS),
            "sources": source_hashes(sources),
            "objects": [describe(path) for path in made],
        }
        output.mkdir(parents=True, exist_ok=True)
        for old in output.glob("*.co"):
            old.unlink()
        for path in made:
            shutil.copyfile(path, output / path.name)
        (output / "manifest.json").write_text(
            json.dumps(document, indent=1) + "\n", encoding="utf-8"
        )
    return parse(document)


def check(directory: Path = DIRECTORY, sources: Path = SOURCES) -> list[str]:
    """Rebuild and return every difference from the code objects in ``directory``.

    Raises:
        llvm.ToolMissing, BuildError, FileNotFoundError: as :func:`build`.
    """
    committed = load_document(directory / "manifest.json")
    differences = []
    with tempfile.TemporaryDirectory() as temporary:
        rebuilt = build(Path(temporary), sources)
        if _release(rebuilt.compiler) != _release(committed.compiler):
            differences.append(
                f"compiler: {rebuilt.compiler!r} here, {committed.compiler!r} made the objects"
            )
        if rebuilt.flags != committed.flags:
            differences.append("flags: not those of the manifest")
        for name in sorted(rebuilt.sources.keys() | committed.sources.keys()):
            if rebuilt.sources.get(name) != committed.sources.get(name):
                differences.append(f"source {name}: changed since the objects were built")
        theirs = {p.name: p.read_bytes() for p in directory.glob("*.co")}
        ours = {p.name: p.read_bytes() for p in Path(temporary).glob("*.co")}
        for name in sorted(theirs.keys() | ours.keys()):
            if name not in ours:
                differences.append(f"{name}: no source builds it")
            elif name not in theirs:
                differences.append(f"{name}: not committed")
            elif ours[name] != theirs[name]:
                differences.append(f"{name}: other bytes")
        if {o.file: o for o in rebuilt.objects} != {o.file: o for o in committed.objects}:
            differences.append("manifest: describes other objects than a rebuild makes")
    return differences


def _release(version_line: str) -> str:
    match = re.search(r"\d+\.\d+\.\d+", version_line)
    return match[0] if match else version_line
