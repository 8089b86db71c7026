"""Compare attention configurations on the same prompts and seeds, and put the result together.

The videos of one prompt, seed and repeat are made in turns, denoising step by denoising step, so
that a machine that slows down or speeds up does so for all of them alike (SGLang's as a whole, one
after the other). Speed-ups are medians of the ratios within a repeat; while something else kept the
machine busy there are none, see :mod:`.busy`.
"""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console

from liteattention_rocm import SkipPolicy, collect_env
from liteattention_rocm.cli import tables
from liteattention_rocm.cli.progress import Steps
from liteattention_rocm.lite.statistics import SkipStatistics

from . import busy, checker, metrics
from .clips import parse_prompt
from .config import Configuration, SuiteConfig
from .metrics import Spread
from .runs import AnyRunner, Run, warmup_steps

SCHEMA = 1
_PACKAGES = (
    "liteattention-rocm",
    "torch",
    "diffusers",
    "sglang",
    "transformers",
    "numpy",
    "imageio-ffmpeg",
)


@dataclass
class Result:
    """Every run of a suite so far, in the order they were made, and what the machine is.

    Owner: whoever called :func:`run`. It holds the frames of the first repeat only.
    """

    config: SuiteConfig
    configurations: tuple[Configuration, ...]
    runner: AnyRunner
    environment: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    _distances: dict[tuple[str, str, int, int], dict[str, Any]] = field(default_factory=dict)
    _shown: dict[tuple[str, int, int], checker.Agreement] = field(default_factory=dict)

    @staticmethod
    def before(loaded: AnyRunner) -> Result:
        """The result of a suite that is about to start."""
        result = Result(loaded.config, loaded.config.configurations(), loaded, environment(loaded))
        result.environment["started"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        return result

    @property
    def planned(self) -> int:
        """Number of runs that make it complete."""
        return len(self.cases) * self.config.repeats * len(self.configurations)

    def of(self, name: str) -> list[Run]:
        """Runs of one configuration."""
        return [run for run in self.runs if run.configuration == name]

    def first(self, name: str, prompt: int, seed: int) -> Run | None:
        """The run whose frames were kept."""
        for run in self.runs:
            if (run.configuration, run.prompt, run.seed, run.repeat) == (name, prompt, seed, 0):
                return run
        return None

    def reference(self, configuration: Configuration, kind: str) -> str | None:
        """Name of the reference of ``kind`` on the same schedule; None if it is not there."""
        for item in self.configurations:
            if (item.kind, item.steps) == (kind, configuration.steps):
                return item.name
        return None

    def distance(self, name: str, reference: str, prompt: int, seed: int) -> dict[str, Any] | None:
        """How far the first videos of two configurations are apart; None until both are there."""
        key = (name, reference, prompt, seed)
        if key not in self._distances:
            mine, other = self.first(name, prompt, seed), self.first(reference, prompt, seed)
            if mine is None or other is None:
                return None
            self._distances[key] = metrics.compare(mine.frames, other.frames)
        return self._distances[key]

    def shown(self, run: Run) -> checker.Agreement:
        """What the first video of a configuration, prompt and seed shows of its prompt."""
        key = (run.configuration, run.prompt, run.seed)
        if key not in self._shown:
            video = torch.from_numpy(run.frames).permute(3, 0, 1, 2).float() / 127.5 - 1
            prompt = parse_prompt(self.config.prompts[run.prompt])
            self._shown[key] = checker.check(video, prompt)
        return self._shown[key]

    def signs(self, prompt: int, seed: int, repeat: int) -> list[str]:
        """What says that the machine was busy while the videos of a case were made.

        Nothing does where seconds are an emulator's, which nobody compares.
        """
        key = (prompt, seed, repeat)
        if self.config.emulated:
            return []
        together = [run for run in self.runs if (run.prompt, run.seed, run.repeat) == key]
        return busy.signs(
            together,
            {
                item.name: item.policy is not None or not self.config.dense_cross_attention
                for item in self.configurations
            },
        )

    @property
    def cases(self) -> list[tuple[int, int]]:
        """All (prompt index, seed)."""
        return [(i, seed) for i in range(len(self.config.prompts)) for seed in self.config.seeds]


def run(result: Result, console: Console, keep: Callable[[Run], None]) -> None:
    """Run everything that the configuration asks for, showing progress on ``console``.

    Each run is added to ``result``; ``keep`` is then called with it. What is there stays in
    ``result`` when this ends early, in whatever way.
    """
    loaded, config = result.runner, result.config
    schedules = {item.name: item.steps or loaded.settings.steps for item in result.configurations}
    warm = {
        item.name: warmup_steps(item, schedules[item.name], whole=config.graphs)
        for item in result.configurations
    }
    each = len(result.cases) * config.repeats
    total = sum(config.warmup_runs * warm[name] + each * schedules[name] for name in schedules)
    with Steps(console, total) as progress:
        for _ in range(config.warmup_runs):
            for item in result.configurations:
                progress.part(f"{item.name}, warm-up", warm[item.name])
                loaded.run(
                    item,
                    0,
                    config.seeds[0],
                    0,
                    progress.done,
                    steps=warm[item.name],
                    keep_tiles=False,
                )
        for repeat in range(config.repeats):
            for index, (prompt, seed) in enumerate(result.cases):
                items = _rotated(result.configurations, repeat + index)
                together = " in turns" if len(items) > 1 else ""
                progress.part(
                    f"{', '.join(item.name for item in items)}{together}, prompt {prompt}, "
                    f"seed {seed}",
                    sum(schedules[item.name] for item in items),
                )
                for made in loaded.in_turns(items, prompt, seed, repeat, progress.done):
                    _keep(result, made)
                    keep(made)


def _keep(result: Result, made: Run) -> None:
    first = result.first(made.configuration, made.prompt, made.seed)
    if first is not None:
        made.frames = first.frames if made.digest == first.digest else made.frames
        made.skips = first.skips if made.skips == first.skips else made.skips
    result.runs.append(made)


def _rotated(items: Sequence[Configuration], by: int) -> list[Configuration]:
    by %= len(items)
    return [*items[by:], *items[:by]]


def environment(loaded: AnyRunner) -> dict[str, Any]:
    """What a reader needs to judge the figures: machine, versions, commit, threads."""
    device = torch.device(loaded.config.device)
    found: dict[str, Any] = {
        "command": shlex.join(["liteattention-rocm", *sys.argv[1:]]),
        "commit": collect_env.source_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": collect_env.processor(),
        "cores": torch.multiprocessing.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": loaded.config.device,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "dtype": loaded.config.dtype,
        "isa": _isa() if device.type == "cpu" else None,
        "packages": {},
    }
    for name in _PACKAGES:
        try:
            found["packages"][name] = version(name)
        except PackageNotFoundError:
            found["packages"][name] = None
    found["packages"]["torch"] = torch.__version__
    return found


def _isa() -> str | None:
    try:
        from liteattention_rocm.engines.cpu import chosen_isa
    except ImportError:  # a build without the C++ engine
        return None
    return chosen_isa()


def summarise(result: Result) -> dict[str, Any]:
    """The report as JSON-friendly data; every figure in the other files comes from here."""
    config, loaded = result.config, result.runner
    tile = loaded.geometry()
    return {
        "schema": SCHEMA,
        "complete": len(result.runs) == result.planned,
        "runs_done": len(result.runs),
        "runs_planned": result.planned,
        "environment": result.environment,
        "settings": {
            "runner": config.runner,
            "model": config.model,
            "prompts": list(config.prompts),
            "seeds": list(config.seeds),
            "repeats": config.repeats,
            "warmup_runs": config.warmup,
            "short_steps": config.short_steps,
            **asdict(loaded.settings),
            "tokens": loaded.tokens(),
            "geometry": None if tile is None else asdict(tile),
            "engine": config.engine,
            "emulated": config.emulated,
            "compiled": config.compiled,
            "graphs": config.graphs,
            "cross_attention": "dense" if config.dense_cross_attention else "own",
            "check_prompts": config.check_prompts,
            "fps": config.fps,
        },
        "notes": notes(config),
        "load": _load(result),
        "load_seconds": loaded.load_seconds,
        "configurations": [
            _summary(result, item) for item in result.configurations if result.of(item.name)
        ],
        "runs": [_run_record(result, item) for item in result.runs],
    }


def _load(result: Result) -> dict[str, Any]:
    """How runs took turns, and which cases were made on a busy machine."""
    cases = dict.fromkeys((run.prompt, run.seed, run.repeat) for run in result.runs)
    found = [
        {"prompt": case[0], "seed": case[1], "repeat": case[2], "signs": signs}
        for case in cases
        if (signs := result.signs(*case))
    ]
    return {
        "turns": result.runner.turns,
        "cases": len(cases),
        "busy": found,
        "verdict": busy.BUSY if found and len(found) == len(cases) else None,
        "most_waited": busy.MOST_WAITED,
        "most_apart": busy.MOST_APART,
    }


def notes(config: SuiteConfig) -> list[str]:
    """What a reader must know to read the figures, in whole sentences."""
    found = []
    if config.runner == "sglang":
        found.append(
            "SGLang made these videos; the configuration called diffusers is its own torch_sdpa "
            "attention, in cross-attention, too."
        )
    exact = [
        item.name
        for item in config.configurations()
        if item.kind == "lite" and item.policy is not None and _keeps_all(item.policy)
    ]
    if exact:
        found.append(
            f"A threshold of -inf or a budget of 0 keeps every tile ({'; '.join(exact)}): what "
            "LiteAttention costs where nothing can be skipped."
        )
    dense: dict[int, list[str]] = {}
    for item in config.configurations():
        if item.kind == "lite" and item.policy is not None and item.policy.enabled:
            dense.setdefault(item.policy.warmup_steps, []).append(item.name)
    for steps, names in dense.items():
        if steps:
            found.append(f"Dense in the first {tables.counted(steps, 'step')}: {'; '.join(names)}.")
    if config.compiled:
        found.append("The transformer's blocks were compiled (torch.compile) in every row alike.")
    if config.graphs:
        found.append("The transformer ran from CUDA graphs in every row alike.")
    if config.short_steps is not None:
        found.append(
            f"Rows of {config.short_steps} steps are compared with the references of as many steps."
        )
    if config.uses_engine:
        engine = config.chosen_engine
        if config.emulated:
            found.append(
                f"Engine {engine.name} ran on the software MI300X: pictures are what the GPU's "
                "machine code computes, seconds are the emulator's on this processor and say "
                "nothing about a GPU."
            )
        if config.dense_cross_attention:
            found.append(
                f"Cross-attention ran on engine {engine.name}, too, except under diffusers."
            )
    return found


def _keeps_all(policy: SkipPolicy) -> bool:
    """Whether a policy keeps every tile at every step of every layer."""
    if policy.budget is None:
        thresholds = _numbers((policy.threshold, *policy.layer_thresholds.values()))
        return all(value == float("-inf") for value in thresholds)
    budgets = _numbers((policy.budget, *policy.layer_budgets.values()))
    return all(value == 0 for value in budgets)


def _numbers(given: Any) -> Iterator[Any]:
    """All numbers of a policy's field: one, by step, by head, or both."""
    if isinstance(given, tuple):
        for item in given:
            yield from _numbers(item)
    else:
        yield given


def _summary(result: Result, configuration: Configuration) -> dict[str, Any]:
    runs = result.of(configuration.name)
    policy = configuration.policy
    steps = range(len(runs[0].steps))

    def spread(value: Callable[[Run], float]) -> dict[str, Any]:
        return Spread.of(value(item) for item in runs).to_json()

    # One run of each case says all about the tiles: repeats are bit-equal, or reported not to be.
    skips = SkipStatistics.from_records(
        {**record, "generation": index}
        for index, item in enumerate(run for run in runs if run.repeat == 0)
        for record in item.skips
    )
    attention = [item.attention for item in runs if item.attention is not None]
    outside = [item.outside for item in runs if item.outside is not None]
    waited = [item.waited for item in runs if item.waited is not None]
    return {
        "name": configuration.name,
        "kind": configuration.kind,
        "steps": configuration.steps or result.runner.settings.steps,
        "policy": None if policy is None else json.loads(policy.model_dump_json()),
        "seconds": {
            "encode": spread(lambda item: item.encode),
            "denoise": spread(lambda item: item.denoise),
            "decode": spread(lambda item: item.decode),
            "total": spread(lambda item: item.total),
            "self_attention": Spread.of(attention).to_json() if attention else None,
            "outside_attention": Spread.of(outside).to_json() if outside else None,
            "processor": spread(lambda item: item.processor),
            "waited": Spread.of(waited).to_json() if waited else None,
            "per_step_processor": [
                statistics.median(item.step_processor[i] for item in runs) for i in steps
            ],
            "per_step": [statistics.median(item.steps[i] for item in runs) for i in steps],
        },
        "speedup": {
            f"vs_{reference}": _speedup(result, configuration, reference)
            for reference in ("dense", "diffusers")
        },
        "peak_memory_bytes": max(
            (item.peak_memory for item in runs if item.peak_memory is not None), default=None
        ),
        "sparsity": _sparsity(skips) if configuration.kind == "lite" else None,
        "quality": {
            f"vs_{reference}": _quality(result, configuration, reference)
            for reference in ("dense", "diffusers")
        },
        "prompts_followed": _followed(result, configuration),
        "repeats_bit_equal": all(
            len({item.digest for item in runs if (item.prompt, item.seed) == case}) <= 1
            for case in result.cases
        ),
    }


def _sparsity(skips: SkipStatistics) -> dict[str, Any]:
    steps = skips.by_step()
    return {
        "mean": skips.sparsity,
        "last_step": steps[-1]["sparsity"] if steps else 0.0,
        "by_step": [row["sparsity"] for row in steps],
        "by_layer": {row["layer"]: row["sparsity"] for row in skips.by_layer()},
        "by_branch": {row["branch"]: row["sparsity"] for row in skips.by_branch()},
    }


def _speedup(result: Result, configuration: Configuration, kind: str) -> dict[str, Any] | None:
    """Denoise seconds of the reference over this one's, paired by prompt, seed, repeat.

    None for the reference itself, and where seconds are an emulator's: there is nothing to compare.
    Cases that were made on a busy machine do not count; None if all were.
    """
    reference = result.reference(configuration, kind)
    if result.config.emulated or reference in (None, configuration.name):
        return None
    assert reference is not None
    base = {(run.prompt, run.seed, run.repeat): run.denoise for run in result.of(reference)}
    ratios = [
        base[run.prompt, run.seed, run.repeat] / run.denoise
        for run in result.of(configuration.name)
        if (run.prompt, run.seed, run.repeat) in base
        and not result.signs(run.prompt, run.seed, run.repeat)
    ]
    return Spread.of(ratios).to_json() if ratios else None


def _quality(result: Result, configuration: Configuration, kind: str) -> dict[str, Any] | None:
    reference = result.reference(configuration, kind)
    if reference in (None, configuration.name):
        return None
    assert reference is not None
    pairs = (result.distance(configuration.name, reference, *case) for case in result.cases)
    return metrics.summarise_quality([pair for pair in pairs if pair is not None])


def _followed(result: Result, configuration: Configuration) -> dict[str, float] | None:
    """Shares of the videos that show what their prompts ask for, by attribute and in all of them.

    None unless the suite is asked to look: only the small model's shapes can be read.
    """
    if not result.config.check_prompts:
        return None
    found = [result.shown(run) for run in result.of(configuration.name) if run.repeat == 0]
    shares = {
        name: statistics.fmean(getattr(item, name) for item in found) for name in checker.ATTRIBUTES
    }
    every = (all(getattr(item, name) for name in checker.ATTRIBUTES) for item in found)
    return {**shares, "all": statistics.fmean(every)}


def _run_record(result: Result, item: Run) -> dict[str, Any]:
    (configuration,) = (x for x in result.configurations if x.name == item.configuration)
    dense = result.reference(configuration, "dense")
    distance = None
    if dense is not None and dense != item.configuration and item.repeat == 0:
        distance = result.distance(item.configuration, dense, item.prompt, item.seed)
    return {
        "configuration": item.configuration,
        "prompt": item.prompt,
        "seed": item.seed,
        "repeat": item.repeat,
        "encode": item.encode,
        "denoise": item.denoise,
        "steps": item.steps,
        "steps_processor": item.step_processor,
        "steps_device": item.step_device,
        "processor_waited": item.waited,
        "decode": item.decode,
        "total": item.total,
        "self_attention": item.attention,
        "outside_attention": item.outside,
        "peak_memory_bytes": item.peak_memory,
        "frames_sha256": item.digest,
        "vs_dense": distance,
        "sparsity": item.skips,
    }
