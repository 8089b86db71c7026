"""Lets the torchvision that registries carry be imported beside a CPU build of PyTorch.

Its compiled part needs CUDA libraries. Without them two operators have no schema, and the import
fails on them, although nobody calls them here. Imported by a ``.pth`` file when Python starts, so
it must stay light: PyTorch is imported only when somebody asks for torchvision.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_library: object = None  # PyTorch forgets schemas whose library object is gone


class _Schemas:
    """A finder that finds nothing, but sees that torchvision is being looked for."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if name == "torchvision":
            sys.meta_path.remove(cls)
            _declare(importlib.machinery.PathFinder.find_spec(name))


def _declare(found: importlib.machinery.ModuleSpec | None) -> None:
    global _library
    if found is None or found.origin is None:
        return
    import torch

    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            _library.define(
                f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


sys.meta_path.insert(0, _Schemas)
