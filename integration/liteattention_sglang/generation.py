"""The skip lists that one video request holds while it is denoised. Knows nothing of SGLang."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from liteattention_rocm import LiteAttention, SkipPolicy, engines
from liteattention_rocm.lite.parallel import SeqParallel
from liteattention_rocm.lite.statistics import SkipStatistics

#: Environment: folder for one report per request; none are written if it is not set.
REPORT_VARIABLE = "LITEATTENTION_REPORT_DIR"
#: Names of the classifier-free-guidance branches, by SGLang's ``is_cfg_negative``.
BRANCHES = {False: "cond", True: "uncond"}


class Generation:
    """LiteAttention of one request.

    Key: none; one object per request, and requests share nothing. Owner: the request that is
    being denoised. Lifetime: from the request's first self-attention call until the stage that
    made it ends, in whatever way. Inside, lists are kept by layer and guidance branch and advance
    by the step index, see :class:`~liteattention_rocm.LiteAttention`.

    Args:
        policy: what may be skipped.
        num_steps: length of the schedule, None if nothing says it.
    """

    def __init__(self, policy: SkipPolicy, num_steps: int | None) -> None:
        self.lite = LiteAttention(policy, max_generations=1)
        self._ring: SeqParallel | None = None  # instead of it, made by the first call in a ring
        self.num_steps = num_steps
        self.engine: str | None = None
        self._layers: dict[Hashable, str] = {}
        self._names: set[str] = set()
        self._branches: dict[str, set[str]] = {}

    def name(self, layer: Hashable, wanted: str) -> str:
        """Return the name that ``layer`` has in this request: ``wanted``, or ``wanted#2`` ...

        Names are not unique in every model: Wan 2.2 has two transformers, and the blocks of both
        are called alike.
        """
        known = self._layers.get(layer)
        if known is not None:
            return known
        name, count = wanted, 1
        while name in self._names:
            count += 1
            name = f"{wanted}#{count}"
        self._layers[layer] = name
        self._names.add(name)
        return name

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layer: str,
        step: int,
        negative: bool,
        scale: float | None,
        out: torch.Tensor,
        heads: tuple[int, ...] | None = None,
    ) -> None:
        """Compute self-attention on [B,S,H,D] tensors into ``out``; ``heads`` of the model."""
        position = self._position(q, layer, step, negative)
        self.lite(q, k, v, layout="bshd", scale=scale, out=out, heads=heads, **position)

    def attend_ring(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layer: str,
        step: int,
        negative: bool,
        scale: float | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Return self-attention of rows that are split over ``group``, [B,S_local,H,D] each.

        Keys and values go round; see :class:`~liteattention_rocm.lite.parallel.SeqParallel`.
        """
        if self._ring is None:
            policy = self.lite.policy
            self._ring = SeqParallel(policy, group=group, mode="ring", max_generations=1)
        position = self._position(q, layer, step, negative)
        return self._ring(q, k, v, scale=scale, **position)

    def _position(self, q: torch.Tensor, layer: str, step: int, negative: bool) -> dict[str, Any]:
        branch = BRANCHES[negative]
        if self.engine is None:
            self.engine = engines.choose(q.device).name
        self._branches.setdefault(layer, set()).add(branch)
        return {"step": step, "layer": layer, "branch": branch, "num_steps": self.num_steps}

    @property
    def statistics(self) -> SkipStatistics:
        """Tiles by step, layer and branch that this rank went through."""
        if self._ring is None:
            return self.lite.statistics
        # Layers that SGLang leaves out of sequence parallelism attend by themselves.
        return self.lite.statistics.merge(self._ring.statistics)

    def free(self) -> None:
        """Free the lists now, whoever still holds this object."""
        self.lite.reset()
        if self._ring is not None:
            self._ring.reset()

    def lists(self) -> dict[str, torch.Tensor]:
        """Copies of the lists as the last step left them, by "layer/branch".

        int32 [B, H, q_blocks, words], see :mod:`liteattention_rocm.lite.bitmap`. A layer and branch
        that never skipped has none. In a ring they are by "layer/branch/rank of the keys".
        """
        found = {}
        for layer, branches in self._branches.items():
            for branch in sorted(branches):
                for name, held in self._held(layer, branch):
                    try:
                        found[name] = held()
                    except KeyError:
                        continue
        return found

    def _held(self, layer: str, branch: str) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        name = f"{layer}/{branch}"
        yield name, partial(self.lite.lists, layer, branch)
        if self._ring is None:
            return
        for split in range(self._ring.ranks):
            yield f"{name}/{split}", partial(self._ring.lists, layer, branch, split=split)

    def report(self, requests: Sequence[str]) -> dict[str, Any]:
        """Return policy, engine and tile counts as JSON-friendly values. Waits for the device.

        ``requests`` are the ids of the requests that this was the denoising of, in their order in
        the batch.
        """
        statistics = self.statistics
        steps = statistics.by_step()
        return {
            "requests": list(requests),
            "policy": json.loads(self.lite.policy.model_dump_json()),
            "engine": self.engine,
            "num_steps": self.num_steps,
            "sparsity": statistics.sparsity,
            "sparsity_last_step": steps[-1]["sparsity"] if steps else 0.0,
            "records": statistics.to_records(),
        }

    def write(self, folder: Path, name: str, requests: Sequence[str]) -> None:
        """Write ``name.json`` (see :meth:`report`) and ``name.npz`` (see :meth:`lists`)."""
        folder.mkdir(parents=True, exist_ok=True)
        lists: dict[str, Any] = {key: value.cpu().numpy() for key, value in self.lists().items()}
        np.savez(folder / f"{name}.npz", **lists)
        # Last, and in one go: whoever waits for the JSON finds all of it.
        partial = folder / f"{name}.json.partial"
        partial.write_text(json.dumps(self.report(requests), indent=1), encoding="utf-8")
        partial.replace(folder / f"{name}.json")
