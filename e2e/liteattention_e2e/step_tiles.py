"""Which tiles each step of a run computed: taken while it runs, stored, packed for a page."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from liteattention_rocm import SkipPolicy
from liteattention_rocm.lite import bitmap

if TYPE_CHECKING:  # other runners do without diffusers
    from liteattention_diffusers import Handle

#: Bytes of lists that are kept of one run; of longer ones every n-th step is kept.
LIMIT = 64 << 20


@dataclass(frozen=True)
class StepTiles:
    """The tiles that the steps of one layer and branch computed.

    ``bits`` is uint8 [steps, B, H, q_blocks, ceil(k_blocks / 8)]: K block j of a row is bit j % 8
    of byte j // 8, and a set bit is a tile that was computed. ``steps`` are the indices of the
    denoising steps, ascending; steps of which the tiles are not known or were not kept are missing.
    """

    layer: str
    branch: str
    steps: tuple[int, ...]
    k_blocks: int
    bits: npt.NDArray[np.uint8]

    def compressed(self) -> bytes:
        """zlib of the bits, where every step but the first is XORed with the one before it."""
        changed = self.bits.copy()
        changed[1:] ^= self.bits[:-1]
        return zlib.compress(changed.tobytes(), 9)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What is stored of it, under its names in an ``.npz``."""
        name = f"{self.layer}/{self.branch}"
        return {
            f"{name}/bits": self.bits,
            f"{name}/steps": np.array(self.steps),
            f"{name}/k_blocks": np.array(self.k_blocks),
        }


class Recorder:
    """Takes the lists of a pipeline's layers after each step of a run.

    Owner: the runner, for one run.
    """

    def __init__(self, handle: Handle, steps: int) -> None:
        self._handle = handle
        self._num_steps = steps
        self._branches: list[str] = []
        self._every: int | None = None
        # step -> (layer, branch) -> the list that the next step starts from
        self._after: dict[int, dict[tuple[str, str], torch.Tensor]] = {}
        #: Bytes of host memory that the lists take.
        self.nbytes = 0

    def step_end(self, step: int) -> None:
        """Take the lists as ``step`` leaves them; waits for the device."""
        if not self._branches:
            records = self._handle.statistics.to_records()
            self._branches = list(dict.fromkeys(record["branch"] for record in records))
        if self._every is not None and (step + 1) % self._every and step + 2 < self._num_steps:
            return
        taken = {}
        for layer in self._handle.layers:
            for branch in self._branches:
                try:
                    taken[layer, branch] = self._handle.lists(layer, branch).cpu()
                except KeyError:  # dense until now, or a layer of the other transformer
                    continue
        size = sum(one.numel() * one.element_size() for one in taken.values())
        self.nbytes += size
        if taken and self._every is None:
            self._every = max(1, -(-size * self._num_steps // LIMIT))
        self._after[step] = taken

    def tiles(
        self, records: Sequence[Mapping[str, Any]], policy: SkipPolicy, k_block: int, tokens: int
    ) -> tuple[StepTiles, ...]:
        """The tiles that each step computed, by layer and branch.

        Args:
            records: those of the run, see ``SkipStatistics.to_records``.
            policy: of the run.
            k_block: keys of a tile.
            tokens: keys of a layer.
        """
        forbidden = policy.key_masks(tokens, k_block)[1] if policy.must_skip else None
        series = defaultdict(list)
        for record in records:
            series[record["layer"], record["branch"]].append(record)
        found = []
        for key, listed in series.items():
            like = next((taken[key] for taken in self._after.values() if key in taken), None)
            if like is None:  # dense from the first step to the last
                continue
            batch, heads, q_blocks, _ = like.shape
            k_blocks = listed[0]["tiles_total"] // (batch * heads * q_blocks)
            every_tile = bitmap.full(batch, heads, q_blocks, k_blocks)
            allowed = every_tile if forbidden is None else every_tile & ~forbidden
            steps, bits = [], []
            before: int | None = None
            for record in sorted(listed, key=lambda each: int(each["step"])):
                candidates = [every_tile, allowed]
                if before is not None and key in self._after.get(before, {}):
                    candidates.append(self._after[before][key])
                before = record["step"]
                # Re-tests and first steps take all tiles: what the step counted says which it was.
                for one in candidates:
                    if int(bitmap.count(one).sum()) == record["tiles_computed"]:
                        steps.append(record["step"])
                        bits.append(_bytes(one, k_blocks))
                        break
            if steps:
                found.append(StepTiles(*key, tuple(steps), k_blocks, np.stack(bits)))
        return tuple(found)


def _bytes(lists: torch.Tensor, k_blocks: int) -> npt.NDArray[np.uint8]:
    words = np.ascontiguousarray(lists.numpy()).astype("<i4", copy=False)
    return np.array(words.view(np.uint8)[..., : -(-k_blocks // 8)])
