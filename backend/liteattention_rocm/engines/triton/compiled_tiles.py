"""How the kernels are compiled: tiles, warps and stages. :mod:`.tiles` says which ones ship."""

from __future__ import annotations

from dataclasses import dataclass

from . import hopper


@dataclass(frozen=True, slots=True)
class PlainTile:
    """How the plain kernel is compiled: tile, warps of a workgroup, stages of its loads.

    A workgroup computes as many rows as the next power of two from ``block_m`` on.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class HopperTile:
    """How the Hopper kernel is compiled.

    ``groups`` warpgroups of 64 rows, K blocks of ``block_n`` keys, ``stages`` of them in shared
    memory. ``registers`` of a computing thread, ``loader_registers`` of a loading one. ``turns``:
    warpgroups alternate in issuing products. ``persistent``: one workgroup per multiprocessor, so
    that a tile's first loads run under the end of the one before. ``counted``: persistent
    workgroups take tiles off a counter instead of a grid apart, whoever is through first.
    ``abreast``: causal tiles of several heads in turn, longest first, see :func:`.launch.abreast`.
    ``late_wait``: products of weights and values run under the exponentials of the next weights,
    too. ``late_exp``: these exponentials stand behind the wait, so that the outputs are scaled
    under them, which is rare at head dim 128. Those of prompts do wherever the wait is late.
    """

    groups: int
    block_n: int
    stages: int
    registers: int
    loader_registers: int
    turns: bool = True
    persistent: bool = True
    counted: bool = False
    abreast: bool = False
    late_wait: bool = False
    late_exp: bool = False

    @property
    def block_m(self) -> int:
        """Query rows of a workgroup."""
        return self.groups * hopper.WARPGROUP_ROWS
