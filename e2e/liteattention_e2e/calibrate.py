"""Budgets by layer or head, chosen by what they cost in the video: trials, a model, a check.

Layers differ in how much softmax mass they can lose before the video shows it. A calibration

1. makes the videos with dense attention: the reference;
2. lets one unit at a time skip with a trial budget, all others being kept whole, and measures how
   far the videos are from the reference and how many tiles the unit skipped; a unit is a group of
   layers, or one head of them; heads may be tried with several numbers of dense first steps;
3. chooses the budgets, and the steps at which heads begin, that skip the most tiles at a wanted
   quality, on the assumption that the units' mean squared errors add up;
4. runs that policy, compares, and corrects the assumption until the quality is met.

A part of the error is there whatever is skipped: where products are rounded otherwise, a video of
bf16 numbers changes. It must not be counted once a unit. Half of the least error of all trials is
taken for it.

The choice is a Lagrangian one: for a price of error, each unit takes the option for which the
tiles it skips, less the price of its error, are the most; the price is found by bisection
(Shoham and Gersho, Efficient bit allocation for an arbitrary set of quantizers, 1988).

Quality is PSNR in dB of 8-bit frames, the mean over the videos, so errors are geometric means.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from liteattention_rocm import SkipPolicy

from . import metrics
from .config import Configuration
from .runs import AnyRunner, Run

#: PSNR that equal videos count as, dB: less than one 8-bit level in 1,000 pixels.
MOST_DB = 80.0
#: The least budget that is chosen; the most is the largest that was tried.
LEAST_BUDGET = 1e-3
#: How far above the wanted quality a policy may end, dB, before another one is tried.
SLACK_DB = 0.3
_GRID = 96  # budgets to choose from, in equal ratios


class Choice(NamedTuple):
    """What one unit may do: drop within ``budget`` after the first ``dense_steps`` steps."""

    dense_steps: int
    budget: float


@dataclass(frozen=True)
class Trial:
    """What a budget did when only ``layers`` had one, after the first ``dense_steps`` steps.

    ``psnr_db`` is the mean over the videos against dense attention, ``skipped`` the share of the
    tiles of these layers that was not computed, over all steps. With ``head`` the budget was that
    of one query head of each layer, and the tiles are those of that head.
    """

    layers: tuple[str, ...]
    dense_steps: int
    budget: float
    psnr_db: float
    skipped: float
    head: int | None = None


@dataclass(frozen=True)
class Round:
    """A policy that was run: choices by unit, what was predicted of it and what it gave.

    ``psnr_db`` and ``worst_db`` are over the videos, ``skipped`` over all layers and steps.
    """

    aim_db: float
    choices: tuple[Choice, ...]
    predicted_db: float
    psnr_db: float
    worst_db: float
    skipped: float

    def to_json(self) -> dict[str, Any]:
        """As plain data, with dense steps and budgets in the order of the units."""
        data = asdict(self)
        del data["choices"]
        return {
            **data,
            "dense_steps": [choice.dense_steps for choice in self.choices],
            "budgets": [choice.budget for choice in self.choices],
        }


@dataclass
class Calibration:
    """Everything measured so far; :meth:`to_json` is what is kept of it.

    A *unit* is what has a budget of its own: a group of layers or, with ``heads``, one of that many
    query heads of a group. Where there are several ``dense_steps``, which needs ``heads``, each
    head takes one of them.
    """

    dense_steps: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...] = ()
    heads: int | None = None
    trials: list[Trial] = field(default_factory=list)
    #: Wanted PSNR in dB -> the policies run for it.
    rounds: dict[float, list[Round]] = field(default_factory=dict)

    @property
    def units(self) -> tuple[tuple[tuple[str, ...], int | None], ...]:
        """Layers and head of every unit; the heads of a group follow each other."""
        heads: Sequence[int | None] = [None] if self.heads is None else range(self.heads)
        return tuple((layers, head) for layers in self.groups for head in heads)

    def trials_of(self, layers: tuple[str, ...], head: int | None, dense_steps: int) -> list[Trial]:
        """The trials of one unit with one number of dense steps."""
        wanted = (layers, head, dense_steps)
        return [
            item for item in self.trials if (item.layers, item.head, item.dense_steps) == wanted
        ]

    def best(self, target: float) -> Round | None:
        """The round that skips the most at ``target`` dB or more, else the nearest; None yet."""
        made = self.rounds.get(target, [])
        good = [item for item in made if item.psnr_db >= target]
        if good:
            return max(good, key=lambda item: item.skipped)
        return max(made, key=lambda item: item.psnr_db, default=None)

    def policy(self, choices: Sequence[Choice]) -> SkipPolicy:
        """The policy with a choice for each unit; a layer that was not seen is kept whole.

        Steps are dense until the first unit begins; heads that begin later keep all until then.
        """
        by_layer: dict[str, Any] = {}
        first = min(choice.dense_steps for choice in choices)
        count = self.heads or 1
        for i, layers in enumerate(self.groups):
            own = choices[i * count : (i + 1) * count]
            budgets = own[0].budget if self.heads is None else _budgets_by_head(own, first)
            by_layer |= dict.fromkeys(layers, budgets)
        return SkipPolicy(budget=0.0, layer_budgets=by_layer, warmup_steps=first)

    def policies(self) -> dict[str, dict[str, Any]]:
        """The best policy for each wanted quality, as ``e2e --policies`` takes them."""
        found = {}
        for target in self.rounds:
            best = self.best(target)
            if best is not None:
                policy = self.policy(best.choices)
                found[f"calibrated {target:g} dB"] = {
                    "budget": policy.budget,
                    "layer_budgets": dict(policy.layer_budgets),
                    "warmup_steps": policy.warmup_steps,
                }
        return found

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "dense_steps": list(self.dense_steps),
            "groups": [list(layers) for layers in self.groups],
            "heads": self.heads,
            "trials": [asdict(item) for item in self.trials],
            "rounds": [
                {"target_db": target, **item.to_json()}
                for target, made in self.rounds.items()
                for item in made
            ],
        }


def _budgets_by_head(heads: Sequence[Choice], first: int) -> tuple[Any, ...]:
    """Budgets of a layer's heads; by step, too, unless all begin at step ``first``."""
    last = max(head.dense_steps for head in heads)
    steps = [
        tuple(head.budget if step >= head.dense_steps else 0.0 for head in heads)
        for step in range(last + 1)
    ]
    return steps[-1] if last == first else tuple(steps)


class Curve:
    """Error and skipped share of a unit by budget, through its trials after some dense steps.

    Between trials the logarithm of the error and the share are linear in the logarithm of the
    budget. Below them the error goes on as between the least two, and the share down to 0 at
    ``LEAST_BUDGET``: of a unit that skipped nearly all in every trial nobody knows when it began.
    Neither ever falls as the budget grows. Nothing is said of budgets above ``most``, the largest
    tried.

    Args:
        trials: of one unit and number of dense steps, at least two with different budgets.
        floor: squared error that is there without this unit, relative to the squared peak.
    """

    def __init__(self, trials: Iterable[Trial], floor: float = 0.0) -> None:
        ordered = sorted(trials, key=lambda item: item.budget)
        self._x = [math.log(item.budget) for item in ordered]
        if len(set(self._x)) < max(2, len(self._x)):
            raise ValueError("a curve needs trials at two budgets at least, one at each")
        self.most = ordered[-1].budget
        self._error = _rising([10 * math.log10(_beyond(item, floor)) for item in ordered])
        self._skipped = _rising([item.skipped for item in ordered])

    def error(self, budget: float) -> float:
        """Mean squared error, relative to the squared peak."""
        return float(10 ** (self._at(budget, self._error) / 10))

    def skipped(self, budget: float) -> float:
        """Share of the unit's tiles."""
        begin, least = math.log(LEAST_BUDGET), self._x[0]
        if begin < least and math.log(budget) < least:
            way = (math.log(budget) - begin) / (least - begin)
            return max(0.0, self._skipped[0] * way)
        return min(1.0, self._at(budget, self._skipped))

    def _at(self, budget: float, values: list[float]) -> float:
        x = math.log(budget)
        i = min(max(bisect.bisect(self._x, x), 1), len(self._x) - 1)
        share = (x - self._x[i - 1]) / (self._x[i] - self._x[i - 1])
        return values[i - 1] + share * (values[i] - values[i - 1])


def _beyond(trial: Trial, floor: float) -> float:
    """Squared error of a trial without the floor; not 0, of which there is no logarithm."""
    return max(error_of(trial.psnr_db) - floor, 1e-12)


def error_of(psnr_db: float) -> float:
    """Mean squared error relative to the squared peak."""
    return float(10 ** (-psnr_db / 10))


def _rising(values: list[float]) -> list[float]:
    """Each value, or the largest before it."""
    found: list[float] = []
    for value in values:
        found.append(max([value, *found[-1:]]))
    return found


#: Of one unit, by number of dense steps.
Curves = Mapping[int, Curve]


def choose(
    curves: Sequence[Curves], sizes: Sequence[float], target_db: float, floor: float = 0.0
) -> tuple[Choice, ...]:
    """The choices that skip the most tiles while the summed errors stay within ``target_db``.

    Args:
        curves: of every unit.
        sizes: number of tiles of every unit, in any measure.
        target_db: PSNR; not met if even the least budgets lose more.
        floor: squared error that is there anyhow, relative to the squared peak.
    """
    options = [
        [
            (size * curve.skipped(budget), curve.error(budget), Choice(dense_steps, budget))
            for dense_steps, curve in own.items()
            for budget in _budgets_up_to(curve.most)
        ]
        for own, size in zip(curves, sizes, strict=True)
    ]

    def worth(option: tuple[float, float, Choice], price: float) -> tuple[float, float, float]:
        # Of two that are worth the same, the one that skips more, then the larger budget.
        skipped, error, choice = option
        return skipped - price * error, skipped, choice.budget

    def at(price: float) -> tuple[Choice, ...]:
        return tuple(max(rows, key=lambda row: worth(row, price))[2] for rows in options)

    low, high = 1e-6, 1e12  # of a price per squared error relative to the squared peak
    for _ in range(80):
        middle = math.sqrt(low * high)
        if predicted_db(curves, at(middle), floor) < target_db:
            low = middle
        else:
            high = middle
    return at(high)


def _budgets_up_to(most: float) -> list[float]:
    """Budgets in equal ratios, the last one exactly ``most``."""
    ratio = (LEAST_BUDGET / most) ** (1 / (_GRID - 1))
    return [most * ratio**i for i in range(_GRID - 1, -1, -1)]


def predicted_db(curves: Sequence[Curves], choices: Sequence[Choice], floor: float = 0.0) -> float:
    """PSNR, dB, if the units' errors add up, and to the floor."""
    pairs = zip(curves, choices, strict=True)
    total = sum(own[choice.dense_steps].error(choice.budget) for own, choice in pairs)
    return -10 * math.log10(floor + total)


def in_groups(layers: Sequence[str], count: int | None) -> tuple[tuple[str, ...], ...]:
    """Neighbouring layers in ``count`` groups of nearly the same size; None: each for itself.

    Raises:
        ValueError: there are fewer layers than groups.
    """
    if count is None:
        count = len(layers)
    if not 1 <= count <= len(layers):
        raise ValueError(f"groups must be 1 to {len(layers)}, the number of layers, got {count}")
    edges = [len(layers) * i // count for i in range(count + 1)]
    return tuple(tuple(layers[a:b]) for a, b in itertools.pairwise(edges))


class Calibrator:
    """Runs a calibration on a loaded pipeline.

    Owner: the command. Lifetime: one calibration. It holds the dense frames of every case.

    Args:
        loaded: the runner; its configuration says prompts, seeds and sizes.
        dense_steps: numbers of first steps that run dense; several if heads are tried, each of
            which takes one.
        budgets: trial budgets, two at least.
        keep: called after every trial and round; what it writes is what a stopped one leaves.
        say: is told what comes next and of how many videos it consists.
        step: called after each denoising step.
    """

    def __init__(
        self,
        loaded: AnyRunner,
        dense_steps: Sequence[int],
        budgets: Sequence[float],
        keep: Callable[[Calibration], None],
        say: Callable[[str, int], None],
        step: Callable[[], None],
    ) -> None:
        self.made = Calibration(tuple(dense_steps))
        self._loaded, self._budgets = loaded, tuple(budgets)
        self._keep, self._say, self._step = keep, say, step
        config = loaded.config
        self._cases = [(i, seed) for i in range(len(config.prompts)) for seed in config.seeds]
        self._dense: dict[tuple[int, int], metrics.Frames] = {}

    def layers(self) -> list[str]:
        """Names of the layers that can skip, from two steps in which none does.

        Raises:
            ValueError: none can, or every step is to be dense.
        """
        steps, dense_steps = self._loaded.settings.steps, max(self.made.dense_steps)
        if dense_steps >= steps:
            raise ValueError(
                f"--dense-steps: {dense_steps} of {steps} steps would be dense, so that "
                "nothing skips: give fewer"
            )
        policy = SkipPolicy(budget=0.0, warmup_steps=0)
        self._say("which layers there are", 2)
        run = self._loaded.run(
            Configuration("layers", "lite", policy),
            *self._cases[0],
            0,
            self._step,
            steps=2,
            keep_tiles=False,
        )
        found = list(dict.fromkeys(str(record["layer"]) for record in run.skips))
        if not found:
            raise ValueError("no layer of this model runs LiteAttention")
        return found

    def measure(self, groups: tuple[tuple[str, ...], ...], heads: int | None = None) -> None:
        """Make the reference and all trials, of groups of layers or of each of their heads."""
        self.made.groups, self.made.heads = groups, heads
        units = self.made.units
        for run in self._runs("dense", Configuration("dense", "dense", SkipPolicy(enabled=False))):
            self._dense[run.prompt, run.seed] = run.frames
        for index, (layers, head) in enumerate(units):
            text = f"layers {layers[0]} to {layers[-1]}" if layers[1:] else layers[0]
            if head is not None:
                text += f", head {head}"
            for dense_steps, budget in itertools.product(self.made.dense_steps, self._budgets):
                alone = [Choice(dense_steps, 0.0)] * len(units)
                alone[index] = Choice(dense_steps, budget)
                title = f"{text}, budget {budget:g}"
                if self.made.dense_steps[1:]:
                    title += f" from step {dense_steps}"
                psnr, _, skipped = self._try(title, alone, set(layers))
                # The other heads of these layers keep all of their tiles.
                skipped *= heads or 1
                self.made.trials.append(Trial(layers, dense_steps, budget, psnr, skipped, head))
                self._keep(self.made)

    def aim(self, target_db: float, rounds: int) -> None:
        """Find a policy for a quality: at most ``rounds`` are run."""
        units = self.made.units
        floor = min(error_of(item.psnr_db) for item in self.made.trials) / 2
        curves = [
            {
                number: Curve(self.made.trials_of(layers, head, number), floor)
                for number in self.made.dense_steps
            }
            for layers, head in units
        ]
        sizes = [len(layers) for layers, _ in units]
        done = self.made.rounds.setdefault(target_db, [])
        aim = target_db
        for number in range(rounds):
            choices = choose(curves, sizes, aim, floor)
            if any(choices == item.choices for item in done):
                break
            title = f"policy for {target_db:g} dB, round {number + 1}"
            psnr, worst, skipped = self._try(title, choices, None)
            predicted = predicted_db(curves, choices, floor)
            done.append(Round(aim, choices, predicted, psnr, worst, skipped))
            self._keep(self.made)
            if target_db <= psnr <= target_db + SLACK_DB:
                break
            aim += target_db + SLACK_DB / 2 - psnr

    def _try(
        self, title: str, choices: Sequence[Choice], layers: set[str] | None
    ) -> tuple[float, float, float]:
        """Mean and worst PSNR in dB and the share skipped in ``layers`` (None: in all)."""
        ratios, total, computed = [], 0, 0
        for run in self._runs(title, Configuration(title, "lite", self.made.policy(choices))):
            ratio = metrics.psnr(run.frames, self._dense[run.prompt, run.seed])
            ratios.append(min(ratio, MOST_DB))
            for record in run.skips:
                if layers is None or record["layer"] in layers:
                    total += record["tiles_total"]
                    computed += record["tiles_computed"]
        return sum(ratios) / len(ratios), min(ratios), 1 - computed / total

    def _runs(self, title: str, configuration: Configuration) -> list[Run]:
        self._say(title, len(self._cases) * self._loaded.settings.steps)
        return [
            self._loaded.run(configuration, *case, 0, self._step, keep_tiles=False)
            for case in self._cases
        ]
