"""How long a run will take, from short probes of small videos.

A step is taken to cost ``linear * tokens + quadratic * tokens**2``: attention is the second part,
everything else the first. Probes run on one thread and count its processor time, the least of a
few: unlike the wall clock that hardly changes where other programs keep the processor busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from liteattention_rocm.cli import processors, tables

from .config import Configuration
from .runner import Runner
from .runs import Settings, warmup_steps

#: (height, width, frames) of the probes: 512 and 2,048 tokens of the default model.
PROBES = ((64, 64, 2), (64, 128, 4))


@dataclass(frozen=True)
class Cost:
    """Seconds of one denoising step by number of tokens."""

    linear: float
    quadratic: float

    @staticmethod
    def through(small: tuple[int, float], large: tuple[int, float]) -> Cost:
        """The cost that passes through two measurements (tokens, seconds); neither part below 0."""
        (n, s), (m, t) = small, large
        quadratic = max(0.0, (t / m - s / n) / (m - n))
        linear = t / m - quadratic * m
        return Cost(linear, quadratic) if linear >= 0 else Cost(0.0, t / m**2)

    def seconds(self, tokens: int) -> float:
        """Seconds of a step."""
        return self.linear * tokens + self.quadratic * tokens**2


class Estimate:
    """What each configuration of a runner costs on this machine.

    LiteAttention is taken to cost what our dense kernel does: how much it will skip is not known.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._configurations = runner.config.configurations()
        probes = [replace(runner.settings, height=h, width=w, frames=f) for h, w, f in PROBES]
        self.probed = tuple(runner.tokens(probe) for probe in probes)
        self._costs: dict[str, Cost] = {}
        for item in self._configurations:
            if item.kind != "lite":
                seconds = (runner.step_seconds(item, probe) for probe in probes)
                small, large = zip(self.probed, seconds, strict=True)
                self._costs[item.kind] = Cost.through(small, large)
        self._costs.setdefault("lite", max(self._costs.values(), key=lambda c: c.quadratic))
        if "dense" in self._costs:
            self._costs["lite"] = self._costs["dense"]
        cpu = torch.device(runner.config.device).type == "cpu"
        self.threads = min(torch.get_num_threads(), processors.available()) if cpu else 1
        self.assumed = (
            f"probed at {' and '.join(f'{n:,}' for n in self.probed)} tokens; attention taken to "
            "grow with tokens squared and the rest linearly, LiteAttention to skip nothing"
        )
        if cpu:
            self.assumed += f", {tables.counted(self.threads, 'thread')} to be free for it"

    def seconds(self, chosen: Settings) -> float:
        """Seconds of all runs of ``chosen``, warm-up included."""
        tokens = self._runner.tokens(chosen)
        config = self._runner.config
        timed = chosen.steps * config.repeats
        costs: Sequence[Configuration] = self._configurations
        seconds = 0.0
        for item in costs:
            warm = warmup_steps(item, chosen.steps, whole=config.graphs)
            steps = config.warmup_runs * warm + timed
            seconds += steps * self._costs[item.kind].seconds(tokens)
        return seconds / self.threads
