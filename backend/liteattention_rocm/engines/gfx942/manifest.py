"""The gfx942 code objects that the package ships, and what the manifest says about them.

``objects/*.co`` are raw ELF code objects for MI300X, built from ``csrc/gfx942`` and committed with
``objects/manifest.json`` by the checkout's tools: users need no compiler, and a rebuild with the
pinned compiler gives the same bytes (``make test-machine-code``). Standard library only.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import json_text

__all__ = ["DIRECTORY", "FORMAT", "CodeObject", "Kernel", "Manifest", "load", "parse", "read"]

DIRECTORY = Path(__file__).resolve().parent / "objects"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class KernelArgument:
    """One entry of a kernel's argument block: byte offset, bytes and kind (``by_value``, ...)."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel as its code object describes it.

    Registers are per lane (``vgprs``, of which ``agprs`` are accumulators) and per wave
    (``sgprs``); ``scratch_bytes`` is per lane, ``lds_bytes`` per workgroup. ``variant`` holds
    ``head_dim`` and ``rounding`` where the kernel has them.
    """

    name: str
    variant: dict[str, int | str]
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    max_workgroup: int
    kernarg_bytes: int
    kernarg: tuple[KernelArgument, ...] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class CodeObject:
    """One ``.co`` file: its SHA-256, size and kernels."""

    file: str
    sha256: str
    bytes: int
    code_object_version: int
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was built, by which compiler with which flags, from which sources (name: SHA-256)."""

    target: str
    compiler: str
    flags: tuple[str, ...]
    sources: dict[str, str]
    objects: tuple[CodeObject, ...]

    def find(self, kernel: str) -> tuple[CodeObject, Kernel]:
        """Return the kernel called ``kernel`` and its code object.

        Raises:
            KeyError: no code object has such a kernel; the message lists those there are.
        """
        for code_object in self.objects:
            for candidate in code_object.kernels:
                if candidate.name == kernel:
                    return code_object, candidate
        names = sorted(k.name for o in self.objects for k in o.kernels)
        raise KeyError(f"no kernel {kernel!r} in the manifest: it has {', '.join(names)}")


def parse(document: Any) -> Manifest:
    """Read a manifest that was loaded from JSON.

    Raises:
        ValueError: it is of another format.
    """
    if not isinstance(document, dict):
        raise ValueError(f"a kernel manifest is a JSON object, got a {type(document).__name__}")
    if document.get("format") != FORMAT:
        raise ValueError(
            f"kernel manifest of format {document.get('format')!r}: this package reads format "
            f"{FORMAT}"
        )
    try:
        return _manifest(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"this kernel manifest is damaged, install the package again ({why})"
        ) from error


def _manifest(document: dict[str, Any]) -> Manifest:
    objects = []
    for entry in document["objects"]:
        kernels = tuple(
            Kernel(**{**kernel, "kernarg": tuple(KernelArgument(**a) for a in kernel["kernarg"])})
            for kernel in entry["kernels"]
        )
        objects.append(CodeObject(**{**entry, "kernels": kernels}))
    return Manifest(
        target=document["target"],
        compiler=document["compiler"],
        flags=tuple(document["flags"]),
        sources=dict(document["sources"]),
        objects=tuple(objects),
    )


@functools.cache
def read() -> Manifest:
    """Return the manifest of the shipped code objects; read once per process."""
    return load_document(DIRECTORY / "manifest.json")


def load_document(path: Path) -> Manifest:
    """Return the manifest of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no manifest of this format.
    """
    return parse(json_text.read(path))


def load(file: str) -> bytes:
    """Return the bytes of a shipped code object, checked against the manifest.

    Raises:
        KeyError: the manifest has no such file.
        ValueError: the file is not the one that the manifest describes.
    """
    entry = next((o for o in read().objects if o.file == file), None)
    if entry is None:
        names = ", ".join(o.file for o in read().objects)
        raise KeyError(f"no code object {file!r} in the manifest: it has {names}")
    data = (DIRECTORY / file).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.sha256:
        raise ValueError(
            f"{DIRECTORY / file} has SHA-256 {digest}, the manifest says {entry.sha256}: "
            "reinstall the package, or run 'make kernels' in a checkout"
        )
    return data
