"""vLLM with one attention backend beside another on a device: throughput and latency of requests.

Each backend runs in a process of its own, in which vLLM's offline engine serves a model of a
published one's sizes with random weights; nothing is downloaded. Where the device's memory holds
all engines at once they are asked in turns, so that its temperature and clock reach all of them;
otherwise they run one after the other. Scheduling, sampling and the other layers are in the times.

All requests of a case arrive at once, with new prompts in every round, and nothing is cached from
before. From the times at which their tokens arrive follow

- tokens per second: of the prompts until the last first token (prefill); of new tokens while every
  request decodes (decode). A decode case also gives the rate of its prompts, a few tokens that
  decode beside them included;
- time to first token: median over the requests;
- time between tokens: median over the steps in which every request decodes.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from .serving import Case, Engine, engine_process
from .serving_sizes import SIZES, cache_bytes_per_token, parameters

MODULE = f"{__package__}.serving_vllm"
OURS = "CUSTOM"
#: Backends of each kind of device, ours first; the rest are those that vLLM prefers there.
BACKENDS = {
    "cuda": (OURS, "FLASH_ATTN", "TRITON_ATTN"),
    "rocm": (OURS, "ROCM_AITER_FA", "TRITON_ATTN"),
    "cpu": (OURS, "CPU_ATTN"),
}
DEFAULT_CASES = (
    Case("decode", 1, 1024),
    Case("decode", 64, 1024),
    Case("decode", 16, 8192),
    Case("prefill", 16, 8192),
)
#: New tokens of a request in a decode case.
TOKENS = 128
#: Rows of a step: prompts come in chunks of this many tokens.
STEP_ROWS = 8192
#: Tokens of cache beyond what the requests need: unfinished blocks, and vLLM's null block.
_SPARE_TOKENS = 1024
#: What an engine takes beside weights and cache: activations, logits, graphs, the context.
_OTHER_BYTES = 6 << 30
#: Share of a device's memory that engines may have.
_USABLE = 0.92
#: Seconds that importing vLLM for the look at a machine may take.
_PROBE_SECONDS = 300


class Timing(NamedTuple):
    """One round of a case. Tokens per second, and seconds; no time between tokens of a prefill.

    ``prompts`` is the rate at which all prompts were read.
    """

    rate: float
    first: float
    between: float | None
    prompts: float


@dataclass(frozen=True, slots=True)
class Row:
    """One case with one backend: its rounds, in order."""

    case: Case
    backend: str
    rounds: tuple[Timing, ...]

    @property
    def rate(self) -> float:
        """Median tokens per second."""
        return statistics.median(each.rate for each in self.rounds)

    @property
    def first(self) -> float:
        """Median seconds to the first token."""
        return statistics.median(each.first for each in self.rounds)

    @property
    def between(self) -> float | None:
        """Median seconds between tokens; None for a prefill."""
        found = [each.between for each in self.rounds if each.between is not None]
        return statistics.median(found) if found else None

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON; times are in seconds."""
        rates = [each.rate for each in self.rounds]
        return {
            **asdict(self.case),
            "backend": self.backend,
            "tokens_per_s": self.rate,
            "tokens_per_s_min": min(rates),
            "tokens_per_s_max": max(rates),
            "prompt_tokens_per_s": statistics.median(each.prompts for each in self.rounds),
            "first_token_s": self.first,
            "between_tokens_s": self.between,
            "rounds": [each._asdict() for each in self.rounds],
        }


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over the better peer of a case; above 1 ours is better, in every field.

    ``rates`` by round; ``first`` and ``between`` of the medians, the peer's time over ours.
    """

    case: Case
    peer: str
    rates: tuple[float, ...]
    first: float
    between: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the ratios for JSON."""
        return {
            **asdict(self.case),
            "peer": self.peer,
            "tokens_per_s": statistics.median(self.rates),
            "tokens_per_s_min": min(self.rates),
            "tokens_per_s_max": max(self.rates),
            "first_token": self.first,
            "between_tokens": self.between,
        }


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Hold ours against the peer with the most tokens per second, case by case."""
    found = []
    for case in dict.fromkeys(row.case for row in rows):
        here = {row.backend: row for row in rows if row.case == case}
        ours = here.pop(OURS, None)
        if ours is None or not here:
            continue
        peer = max(here.values(), key=lambda row: row.rate)
        between = None
        if ours.between is not None and peer.between is not None:
            between = peer.between / ours.between
        pairs = zip(ours.rounds, peer.rounds, strict=True)
        rates = tuple(a.rate / b.rate for a, b in pairs)
        found.append(Ratio(case, peer.backend, rates, peer.first / ours.first, between))
    return found


# --------------------------------------------------------------------- what is asked for


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run: see the options of ``bench serving``."""

    device: str
    sizes: str
    backends: tuple[str, ...]
    cases: tuple[Case, ...]
    rounds: int
    dtype: str
    kv_cache_dtype: str
    tokens: int
    threads: int

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration."""
        return SIZES[self.sizes]

    @property
    def cache_bytes(self) -> int:
        """Bytes of one engine's cache: the largest case's requests at their longest."""
        element = 1 if self.kv_cache_dtype.startswith("fp8") else self._element
        need = max(case.batch * (case.context + self.tokens + 128) for case in self.cases)
        return (need + _SPARE_TOKENS) * cache_bytes_per_token(self.config, element)

    @property
    def engine_bytes(self) -> int:
        """About what one engine takes of the device's memory."""
        return parameters(self.config) * self._element + self.cache_bytes + _OTHER_BYTES

    @property
    def _element(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def options(self, model: Path, backend: str, memory: int) -> dict[str, Any]:
        """Return the options of vLLM's engine; ``memory`` is all of the device's, 0 for a CPU."""
        longest = max(case.context for case in self.cases) + self.tokens
        most = max(case.batch for case in self.cases)
        rows = max(case.batch * case.context for case in self.cases)
        chosen: dict[str, Any] = {
            "model": str(model),
            "attention_backend": backend,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": longest,
            "max_num_batched_tokens": max(most, min(STEP_ROWS, rows)),
            "max_num_seqs": most,
            "kv_cache_memory_bytes": self.cache_bytes,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
        }
        if memory:
            # vLLM checks this share against what is free, though the cache's size is given.
            share = min(_USABLE, self.engine_bytes / memory)
            chosen["gpu_memory_utilization"] = round(share, 3)
            # Graphs of the batches that are measured: capturing dozens takes much of the start.
            sizes = sorted({case.batch for case in self.cases})
            chosen["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        else:
            chosen["enforce_eager"] = True
        return chosen


@dataclass(frozen=True, slots=True)
class Machine:
    """What :func:`look` found: "cuda", "rocm" or "cpu", and versions.

    ``memory`` bytes of the device's ``whole`` are free.
    """

    platform: str
    memory: int
    whole: int
    facts: dict[str, str]


def backends_of(device: str) -> tuple[str, ...]:
    """Backends that are compared on ``--device`` if none are named; needs torch for "cuda"."""
    if device == "cpu":
        return BACKENDS["cpu"]
    import torch

    return BACKENDS["rocm" if torch.version.hip else "cuda"]


def look(plan: Plan) -> tuple[Machine | None, list[str]]:
    """Find what would keep the plan from running, all of it, before an engine is started.

    A process of its own imports vLLM and asks each backend about the model.

    Returns:
        The machine, None if vLLM could not say, and every reason against the plan.
    """
    question = {
        "device": plan.device,
        "backends": plan.backends,
        "head_dim": plan.config["head_dim"],
        "window": bool(plan.config.get("sliding_window")),
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_cache_dtype,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE, "look", json.dumps(question)],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return None, [f"importing vLLM took more than {_PROBE_SECONDS} s"]
    except (IndexError, ValueError):
        last = " ".join(done.stderr.strip().splitlines()[-1:])
        return None, [f"vLLM cannot be imported: {last} (exit status {done.returncode})"]
    reasons = list(answer["reasons"])
    machine = Machine(answer["platform"], answer["memory"], answer["whole"], answer["facts"])
    if machine.memory and plan.engine_bytes > _USABLE * machine.memory:
        reasons.append(
            f"{plan.sizes} takes about {plan.engine_bytes / 1e9:.0f} GB of the device's memory, of "
            f"which {machine.memory / 1e9:.0f} GB are free: name smaller cases (--case) or sizes"
        )
    return machine, reasons


# ------------------------------------------------------------------------------- running


def run(
    plan: Plan,
    machine: Machine,
    report: Callable[[str], None],
    keep: Callable[[Sequence[Row], dict[str, float]], None] = lambda rows, starts: None,
) -> list[Row]:
    """Measure every case ``plan.rounds`` times with every backend, after one round uncounted.

    Engines that take turns start together. ``keep`` gets all rows so far whenever some were added,
    and the seconds that each engine took until it was ready.

    Raises:
        RuntimeError: an engine did not start, died, or runs another backend than it was asked to;
            with the end of what it printed.
    """
    rows: list[Row] = []
    starts: dict[str, float] = {}
    groups = [plan.backends]
    if not in_turns(plan, machine):
        groups = [(backend,) for backend in plan.backends]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(plan.config | {"dtype": plan.dtype}))
        for group in groups:
            with contextlib.ExitStack() as stack:
                engines = {}
                report(f"starting {', '.join(group)}")
                for backend in group:
                    options = plan.options(model, backend, machine.whole)
                    log = Path(folder) / f"{backend}.log"
                    engines[backend] = stack.enter_context(
                        engine_process(MODULE, log, options, plan.threads)
                    )
                for backend in group:
                    starts[backend] = round(engines[backend].wait(), 1)
                for case in plan.cases:
                    rows += _measure(plan, case, engines, report)
                    keep(rows, starts)
    order = {case: number for number, case in enumerate(plan.cases)}
    return sorted(rows, key=lambda row: order[row.case])


def in_turns(plan: Plan, machine: Machine) -> bool:
    """Whether the device holds all engines at once."""
    needed = len(plan.backends) * plan.engine_bytes
    return not machine.memory or needed <= _USABLE * machine.memory


def _asked(plan: Plan, case: Case, number: int) -> tuple[list[list[int]], int]:
    draw = random.Random(f"{case}{number}")
    words = min(plan.config["vocab_size"], 32000)
    prompts = [[draw.randrange(3, words) for _ in range(case.context)] for _ in range(case.batch)]
    return prompts, 1 if case.kind == "prefill" else plan.tokens


def timing(case: Case, arrivals: Sequence[Sequence[float]]) -> Timing:
    """Rates and times from the seconds after the start at which each request's tokens arrived.

    Tokens of one step have one time. Raises ValueError if no step decoded every request.
    """
    firsts = [each[0] for each in arrivals]
    first = statistics.median(firsts)
    prompts = case.batch * case.context / max(firsts)
    if case.kind == "prefill":
        return Timing(prompts, first, None, prompts)
    begin, end = max(firsts), min(each[-1] for each in arrivals)
    made = sum(begin < time <= end for each in arrivals for time in each)
    steps = sorted({time for each in arrivals for time in each if begin <= time <= end})
    if len(steps) < 2:
        raise ValueError(
            f"{case}: the first request ended before the last one began to decode: ask for more "
            "tokens (--tokens)"
        )
    gaps = [after - before for before, after in pairwise(steps)]
    return Timing(made / (end - begin), first, statistics.median(gaps), prompts)


def _measure(
    plan: Plan, case: Case, engines: dict[str, Engine], report: Callable[[str], None]
) -> list[Row]:
    found: dict[str, list[Timing]] = {name: [] for name in engines}
    for number in range(plan.rounds + 1):
        report(f"{case}, {', '.join(engines)}: round {number} of {plan.rounds}")
        # Who goes first changes, so that nobody always follows the same one.
        names = list(engines)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            taken = timing(case, engines[name].ask("arrivals", *_asked(plan, case, number)))
            if number:
                found[name].append(taken)
    return [Row(case, name, tuple(taken)) for name, taken in found.items()]
