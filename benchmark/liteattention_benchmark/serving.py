"""Tokens per second through a serving engine: our attention against the one it brings for a CPU.

Both engines run all the time, each in a process of its own, and are asked in turns, so that what
else the machine does reaches both; a round's ratio is taken within the round. The model has random
weights in the shape of a small Llama, made here. Scheduling, sampling and the other layers are in
the times.

A framework is a module (:mod:`.serving_vllm`) that names its two contenders, gives its options and
answers questions in the child process with :func:`answer`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

#: Decode steps of a measurement.
STEPS = 32
#: Seconds that a loaded machine may take to start an engine.
START_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Case:
    """``batch`` requests with ``context`` tokens of prompt: each is prefilled, or decodes STEPS."""

    kind: Literal["decode", "prefill"]
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.kind}, batch {self.batch}, {self.context} tokens"


DEFAULT_CASES = (
    Case("decode", 1, 1024),
    Case("decode", 1, 4096),
    Case("decode", 8, 1024),
    Case("decode", 8, 4096),
    Case("prefill", 1, 4096),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One case: tokens per second of both (medians), and the ratios ours / built-in by round."""

    case: Case
    built_in_name: str
    ours: float
    built_in: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios; above 1 ours is faster."""
        return statistics.median(self.ratios)

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            **asdict(self.case),
            "ours_tokens_per_s": self.ours,
            "built_in_tokens_per_s": self.built_in,
            "built_in": self.built_in_name,
            "ratio_median": self.ratio,
            "ratio_min": min(self.ratios),
            "ratio_max": max(self.ratios),
            "ratios": list(self.ratios),
        }


class Framework(Protocol):
    """What a framework's module offers."""

    #: The contenders, as ``--attention-backend`` names them.
    OURS: str
    BUILT_IN: str

    def options(
        self, model: Path, backend: str, dtype: str, cases: Sequence[Case]
    ) -> dict[str, Any]:
        """Return the engine's options, as JSON can hold them."""


def shape(head_dim: int) -> dict[str, Any]:
    """Return a configuration with GQA 4 in which attention is the better part of the time.

    So it is with long contexts in large models; their other layers are left narrow here.
    """
    heads = 2048 // head_dim
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": head_dim,
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def run(
    framework: Any,
    cases: Sequence[Case],
    rounds: int,
    dtype: str,
    head_dim: int,
    threads: int,
    report: Callable[[str], None],
    keep: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Measure every case ``rounds`` times with both engines, in turns, after one round uncounted.

    ``framework`` is a module as :class:`Framework` says; ``dtype`` is "bfloat16", "float16" or
    "float32". ``keep`` is called with the rows so far after each case.

    Raises:
        RuntimeError: an engine did not start, or died; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(shape(head_dim) | {"dtype": dtype}))
        engines = {}
        for backend in (framework.OURS, framework.BUILT_IN):
            report(f"starting {backend}")
            options = framework.options(model, backend, dtype, cases)
            engines[backend] = stack.enter_context(
                engine_process(
                    framework.__name__, Path(folder) / f"{backend}.log", options, threads
                )
            )
            # Not both at once: two of SGLang's may choose the same port.
            engines[backend].wait()
        rows: list[Row] = []
        for case in cases:
            rows.append(_measure(case, rounds, engines, report))
            keep(rows)
        return rows


def _measure(
    case: Case, rounds: int, engines: dict[str, Engine], report: Callable[[str], None]
) -> Row:
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        report(f"{case}, round {number} of {rounds}")
        # Who goes first takes turns, too.
        for name in list(engines)[:: 1 if number % 2 else -1]:
            rate = engines[name].rate(case, number)
            if number:
                rates[name].append(rate)
    ours, built_in = engines
    return Row(
        case,
        built_in,
        statistics.median(rates[ours]),
        statistics.median(rates[built_in]),
        tuple(a / b for a, b in zip(rates[ours], rates[built_in], strict=True)),
    )


class Engine:
    """An engine in a process of its own."""

    def __init__(self, connection: Connection, log: Path) -> None:
        self._connection = connection
        self._log = log
        self._begun = time.monotonic()

    def wait(self) -> float:
        """Return once it is ready, before the first question; seconds since it was started.

        Raises:
            RuntimeError: it did not start; with the end of what it printed.
        """
        try:
            if not self._connection.poll(START_SECONDS) or self._connection.recv() != "ready":
                raise _died(self._log)
        except (EOFError, OSError) as error:
            raise _died(self._log) from error
        return time.monotonic() - self._begun

    def ask(self, *question: Any) -> Any:
        """Return the answer of the process, see :func:`answer`.

        Raises:
            RuntimeError: it died; with the end of what it printed.
        """
        try:
            self._connection.send(question)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise _died(self._log) from error

    def rate(self, case: Case, number: int) -> float:
        """Return tokens per second: new ones of a decode case, the prompts' of a prefill case."""
        # A prompt that is prefilled must be new; one that is decoded after must be cached.
        draw = random.Random(f"{case}{number if case.kind == 'prefill' else ''}")
        prompts = [
            [draw.randrange(3, 1024) for _ in range(case.context)] for _ in range(case.batch)
        ]
        seconds: float = self.ask(case.kind, prompts)
        return case.batch * (case.context if case.kind == "prefill" else 1) / seconds


def _died(log: Path) -> RuntimeError:
    return RuntimeError(f"the engine ended:\n{log.read_text(errors='replace')[-2000:]}")


@contextlib.contextmanager
def engine_process(
    module: str, log: Path, options: dict[str, Any], threads: int
) -> Iterator[Engine]:
    """Run an engine in a process of its own, ``module`` called with its options, until left.

    It prints into ``log``. :meth:`Engine.wait` for it before the first question.
    """
    near, far = Pipe()
    with near, log.open("wb") as output:
        with far:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(far.fileno()), json.dumps(options)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                pass_fds=[far.fileno()],
                start_new_session=True,
            )
        try:
            yield Engine(near, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answer(descriptor: int, measure: Callable[..., Any]) -> None:
    """In an engine's process: say that it is ready, and answer until the other side hangs up.

    ``measure(kind, prompts)`` returns seconds: of the whole prefill, or of one decode step. vLLM's
    also takes kind "arrivals" with the number of new tokens, see :mod:`.serving_backends`.
    """
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError):
        connection.send("ready")
        while True:
            connection.send(measure(*connection.recv()))
