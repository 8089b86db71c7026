"""Which heights, widths and frame counts a pipeline takes, known before its weights are loaded."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch

from .runs import Settings


@dataclass(frozen=True)
class Axis:
    """One size: ``offset`` plus a multiple of ``multiple``, at most ``limit``; ``why`` says why."""

    name: str
    multiple: int
    offset: int
    limit: int | None
    why: str

    def problem(self, value: int) -> str | None:
        """What is wrong with ``value``, with the nearest sizes that work; None if it is fine."""
        rule = f"a multiple of {self.multiple}" + (f" plus {self.offset}" if self.offset else "")
        if (value - self.offset) % self.multiple:
            below = value - (value - self.offset) % self.multiple
            near = [size for size in (below, below + self.multiple) if self._fits(size)]
            listed = " or ".join(map(str, near))
            hint = f" (nearest: {listed})" if near else ""
            return f"{self.name} must be {rule} for this model ({self.why}), got {value}{hint}"
        if not self._fits(value):
            return f"{self.name} must be at most {self.limit} for this model, got {value}"
        return None

    def _fits(self, value: int) -> bool:
        return value > 0 and (self.limit is None or value <= self.limit)


@dataclass(frozen=True)
class Grid:
    """How pixels and frames become tokens: factors of the VAE, patch sizes (frames, rows, columns).

    ``own`` are the multiples that the pipeline itself demands of height and width; ``positions``
    is the number of rotary positions along an axis, None if there is no table of them.
    """

    spatial: int
    temporal: int
    patch: tuple[int, int, int] = (1, 1, 1)
    own: tuple[int, int] = (1, 1)
    positions: int | None = None
    pipeline: str = ""

    @staticmethod
    def of(pipe: Any) -> Grid:
        """The grid of a diffusers pipeline, with or without weights."""
        config = getattr(pipe.transformer, "config", None)
        patch = getattr(config, "patch_size", 1)
        if not isinstance(patch, list | tuple):
            patch = (1, patch, patch)
        return Grid(
            spatial=getattr(pipe, "vae_scale_factor_spatial", 1),
            temporal=getattr(pipe, "vae_scale_factor_temporal", 1),
            patch=(int(patch[0]), int(patch[1]), int(patch[2])),
            own=(own_multiple(pipe, "height"), own_multiple(pipe, "width")),
            positions=getattr(config, "rope_max_seq_len", None),
            pipeline=type(pipe).__name__,
        )

    def axes(self) -> tuple[Axis, ...]:
        """The rules of height, width and frames."""
        found = []
        for i, name in enumerate(("height", "width")):
            cell = self.spatial * self.patch[i + 1]
            why = f"VAE factor {self.spatial} x patch {self.patch[i + 1]}"
            if cell % self.own[i]:
                why += f"; {self.pipeline} takes multiples of {self.own[i]} only"
            limit = None if self.positions is None else self.positions * cell
            found.append(Axis(name, math.lcm(cell, self.own[i]), 0, limit, why))
        step = self.temporal * self.patch[0]
        # The first frame is a latent frame of its own; a patch takes patch[0] latent frames.
        offset = (1 - self.temporal) % step
        limit = None
        if self.positions is not None:
            limit = (self.positions * self.patch[0] - 1) * self.temporal + 1
        why = f"VAE factor {self.temporal} x patch {self.patch[0]}"
        return (*found, Axis("frames", step, offset, limit, why))

    def problems(self, chosen: Settings) -> list[str]:
        """Everything that is wrong with the sizes."""
        found = (axis.problem(getattr(chosen, axis.name)) for axis in self.axes())
        return [each for each in found if each is not None]

    def tokens(self, chosen: Settings) -> int:
        """Number of video tokens in self-attention."""
        frames = ((chosen.frames - 1) // self.temporal + 1) // self.patch[0]
        rows = chosen.height // self.spatial // self.patch[1]
        return frames * rows * (chosen.width // self.spatial // self.patch[2])


def own_multiple(pipe: Any, name: str) -> int:
    """What the pipeline's own ``check_inputs`` wants ``name`` to be a multiple of; 1 if nothing.

    It is asked: the smallest power of two of which an odd multiple passes.
    """
    check = getattr(pipe, "check_inputs", None)
    if check is None:
        return 1
    arguments: dict[str, Any] = {
        key: None
        for key, parameter in inspect.signature(check).parameters.items()
        if parameter.default is parameter.empty
    }
    arguments |= {"prompt": "any", "height": 1024, "width": 1024}

    def passes(value: int) -> bool:
        try:
            check(**(arguments | {name: value}))
        except ValueError:
            return False
        return True

    try:
        if not passes(1024):
            return 1
        return next(power for power in (1, 2, 4, 8, 16, 32, 64, 128, 1024) if passes(33 * power))
    except (TypeError, AttributeError, StopIteration):  # it cannot be asked on its own
        return 1


def without_weights(model: str, diffusers: Any) -> Any | None:
    """The pipeline of ``model`` with nothing but configurations; None if it cannot be made so.

    The denoiser and the VAE are on the ``meta`` device, encoders are left out; tokenizer and
    scheduler are real.

    Raises:
        OSError: there is no such model.
    """
    transformers = importlib.import_module("transformers")
    parts: dict[str, Any] = {}
    index = diffusers.DiffusionPipeline.load_config(model)
    # Its own class: DiffusionPipeline takes no ready-made parts that the class calls optional.
    pipeline = getattr(diffusers, index["_class_name"], None)
    if pipeline is None:
        return None
    for name, entry in index.items():
        if not isinstance(entry, list | tuple) or len(entry) != 2 or None in entry:
            continue
        module = sys.modules.get(entry[0])
        kind = getattr(module, entry[1], None)
        if not isinstance(kind, type):
            continue
        if issubclass(kind, transformers.PreTrainedModel):
            parts[name] = None
        elif issubclass(kind, diffusers.ModelMixin):
            with torch.device("meta"):
                config = kind.load_config(model, subfolder=name)  # type: ignore[attr-defined]
                parts[name] = kind.from_config(config)  # type: ignore[attr-defined]
    try:
        return pipeline.from_pretrained(model, **parts)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None  # a pipeline that asks its parts at once: sizes are checked once it is loaded
