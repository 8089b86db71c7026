"""The files of a request's report. Knows nothing of SGLang."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np
import torch

#: Environment: folder for one report per request; none are written if it is not set.
REPORT_VARIABLE = "LITEATTENTION_REPORT_DIR"
#: File systems take names of 255 bytes, endings included.
_LONGEST_NAME = 200


def folder() -> Path | None:
    """Return the folder that reports go into; None if the server wants none."""
    named = os.environ.get(REPORT_VARIABLE)
    return Path(named) if named else None


def check_folder() -> None:
    """Make the folder of reports and write a file there, which is removed again.

    Raises:
        ValueError: nothing can be written there.
    """
    target = folder()
    if target is None:
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target, prefix=".liteattention-") as probe:
            probe.write(b"?")
    except OSError as error:
        raise ValueError(
            f"{REPORT_VARIABLE}={str(target)!r}: no report can be written there ({error}): name a "
            "folder that the server may write to, or unset it"
        ) from error


def file_name(request: str) -> str:
    """Return the name of a request's files, without an ending.

    It is the request's id, with ``%XX`` for bytes that are not in ``A-Z a-z 0-9 _ . - ~``. Of an
    id that is too long for a file's name, the end is replaced by a hash of the whole.
    """
    name = quote(request, safe="", errors="backslashreplace")
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{name[: _LONGEST_NAME - 33]}-{digest}"


def write(
    target: Path, name: str, report: Mapping[str, Any], lists: Mapping[str, torch.Tensor]
) -> None:
    """Write ``name.npz`` with the lists, then ``name.json`` with the report.

    Both appear whole or not at all, so whoever waits for the JSON finds everything. Raises
    ``OSError`` if that fails; nothing half written stays behind.
    """
    target.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {key: value.cpu().numpy() for key, value in lists.items()}
    text = json.dumps(report, indent=1).encode()
    for path, save in (
        (target / f"{name}.npz", lambda file: np.savez(file, **arrays)),
        (target / f"{name}.json", lambda file: file.write(text)),
    ):
        partial = path.with_name(f"{path.name}.partial")
        try:
            file: BinaryIO
            with partial.open("wb") as file:
                save(file)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
