"""Run one configuration of a diffusers pipeline and measure it.

The pipeline is run as its users run it, through ``__call__``. Its parts are timed from outside:
``encode_prompt`` and ``vae.decode`` are wrapped on the instance, the denoising loop is the time
from the first call of a denoiser to the end of the last step, and the self-attention modules are
timed by forward hooks (their projections included) where that does not disturb the run.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import psutil
import torch
import transformers

import liteattention_diffusers
from liteattention_diffusers import discovery, graphs
from liteattention_rocm import SkipPolicy, TileGeometry

from . import pixel_vae  # diffusers finds its class by the module being imported
from .config import Configuration, SuiteConfig, read_json_object
from .metrics import to_8_bit
from .runs import DEFAULTS_FILE, Run, Settings, SkippedTiles
from .sizes import Grid, without_weights
from .step_tiles import Recorder, StepTiles


class Runner:
    """A loaded pipeline that runs configurations.

    Owner: a suite. Lifetime: the suite's. The pipeline is left as it was after every run.

    Raises:
        ValueError: the model cannot be loaded, the sizes do not fit it, the engine does not
            support its layers, or patterns of a policy match none of them; lists every reason.
    """

    def __init__(self, config: SuiteConfig) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        _check_place(config)
        empty = _without_weights(config)
        if empty is not None:  # say what is wrong with the sizes before minutes of loading
            settings(empty, config)
        start = time.perf_counter()
        self.pipeline = load(config)
        self.load_seconds = time.perf_counter() - start
        self.settings = settings(self.pipeline, config)
        if config.compiled:
            _compile(self.pipeline)
        self._grid = Grid.of(self.pipeline)
        self._check_policies()
        self.tiles: dict[str, SkippedTiles] = {}
        # What earlier runs left to whoever keeps them: frames and lists.
        self._left: list[weakref.ref[npt.NDArray[np.uint8]]] = []
        # Graphs serve later runs, so whoever has them is kept, by configuration.
        self._handles: dict[str, liteattention_diffusers.Handle] = {}
        self._plain: dict[str, list[graphs.StepGraphs]] = {}

    def run(
        self,
        configuration: Configuration,
        prompt: int,
        seed: int,
        repeat: int,
        on_step: Callable[[], None] | None = None,
        *,
        steps: int | None = None,
        keep_tiles: bool = True,
    ) -> Run:
        """Make one video and measure it; ``steps`` overrides their number (warm-up runs).

        Without ``keep_tiles`` no list is copied to the host or kept: neither the most skipped one
        in ``self.tiles`` nor those of the steps in the result.
        """
        pipe = self.pipeline
        chosen = self.settings if steps is None else replace(self.settings, steps=steps)
        recorder = None
        with contextlib.ExitStack() as stack:
            handle = self._attention(configuration, stack)
            keep_tiles = keep_tiles and configuration.kind == "lite"
            if handle is not None and keep_tiles and repeat == 0:
                recorder = Recorder(handle, chosen.steps)
            between = None if recorder is None else recorder.step_end
            clock = stack.enter_context(
                _Stopwatch(
                    pipe,
                    on_step,
                    between=between,
                    parts=not (self.config.compiled or self.config.graphs),
                )
            )
            gc.collect()
            held = functools.partial(_held, self._bytes_left(), recorder)
            memory = stack.enter_context(_PeakMemory(torch.device(self.config.device), held))
            stack.enter_context(_without("num_frames"))  # see pipeline_num_frames
            start = time.perf_counter()
            result = pipe(**self._arguments(chosen, prompt, seed, clock.step_end))
            clock.wait()
            total = time.perf_counter() - start - clock.uncounted
        video = np.asarray(result.frames[0])
        skips: list[dict[str, Any]] = []
        tiles: tuple[StepTiles, ...] = ()
        if handle is not None:
            skips = [
                record
                for record in handle.statistics.to_records()
                if record["generation"] == handle.run
            ]
            if keep_tiles and skips:
                # A run of dense first steps only, such as a short warm-up, has no list yet.
                with contextlib.suppress(KeyError):
                    self.tiles[configuration.name] = _most_skipped(handle, skips)
            tile = self.geometry()
            if recorder is not None and tile is not None:
                tiles = recorder.tiles(skips, handle.policy, tile.k_block, self.tokens(chosen))
        frames = to_8_bit(video)
        self._left += map(weakref.ref, (frames, *(each.bits for each in tiles)))
        return Run(
            configuration=configuration.name,
            prompt=prompt,
            seed=seed,
            repeat=repeat,
            encode=clock.encode,
            denoise=clock.denoise,
            steps=clock.steps,
            decode=clock.decode,
            total=total,
            attention=clock.attention,
            # What graphs hold is not among what the allocator counts.
            peak_memory=None if self.config.graphs else memory.peak,
            digest=hashlib.sha256(np.ascontiguousarray(video).tobytes()).hexdigest(),
            frames=frames,
            skips=skips,
            tiles=tiles,
        )

    def _bytes_left(self) -> int:
        """Bytes of host memory that earlier runs left and that somebody still keeps."""
        self._left = [each for each in self._left if each() is not None]
        arrays = (array for each in self._left if (array := each()) is not None)
        lists = sum(each.kept.nbytes for each in self.tiles.values())
        return lists + sum(array.nbytes for array in arrays)

    def _check_policies(self) -> None:
        """Say now what would fail after the first runs: ``ValueError`` with every reason."""
        refused: dict[str, list[str]] = {}
        for configuration in self.config.configurations():
            if configuration.policy is not None:
                try:
                    self._enable(configuration.policy).disable()
                except ValueError as error:
                    refused.setdefault(str(error), []).append(configuration.name)
        if refused:
            raise ValueError(
                "\n".join(f"{', '.join(names)}: {error}" for error, names in refused.items())
            )

    def _attention(
        self, configuration: Configuration, stack: contextlib.ExitStack
    ) -> liteattention_diffusers.Handle | None:
        """Give self-attention to the configuration until ``stack`` is closed."""
        if self.config.graphs:
            return self._graphed(configuration, stack)
        if configuration.policy is None:
            return None
        return stack.enter_context(self._enable(configuration.policy))

    def _graphed(
        self, configuration: Configuration, stack: contextlib.ExitStack
    ) -> liteattention_diffusers.Handle | None:
        """As :meth:`_attention`, with the denoisers' forwards from graphs."""
        name = configuration.name
        if configuration.policy is None:
            if name not in self._plain:
                self._plain[name] = [
                    graphs.StepGraphs(model, graphs.recorder_for(model))
                    for model in denoisers(self.pipeline)
                ]
            for each in self._plain[name]:
                stack.enter_context(graphs.attached(each))
            return None
        handle = self._handles.get(name)
        if handle is None:
            handle = self._handles[name] = self._enable(configuration.policy)
        else:
            handle.lite.statistics.clear()  # runs before have been read
            handle.resume()
        stack.callback(handle.pause)
        return handle

    def _enable(self, policy: SkipPolicy) -> liteattention_diffusers.Handle:
        return liteattention_diffusers.enable(
            self.pipeline,
            policy,
            geometry=self.config.geometry,
            engine=self.config.engine,
            cross_attention=self.config.dense_cross_attention,
            graphs=self.config.graphs,
        )

    def tokens(self, chosen: Settings | None = None) -> int:
        """Number of video tokens in self-attention, of the suite's sizes or of ``chosen``."""
        return self._grid.tokens(chosen or self.settings)

    def heads(self) -> int | None:
        """Query heads of a layer of the denoiser; None if its configuration does not say."""
        found = {
            getattr(model.config, "num_attention_heads", None) for model in denoisers(self.pipeline)
        }
        return found.pop() if len(found) == 1 else None

    def geometry(self) -> TileGeometry | None:
        """The tile geometry of lite configurations; None if the layers do not show their size."""
        return geometry(self)

    def step_seconds(self, configuration: Configuration, chosen: Settings, steps: int = 3) -> float:
        """Least seconds of a denoising step at these settings, of ``steps`` of them.

        On a CPU seconds of processor time on one thread, which other programs hardly change; on a
        GPU of the wall clock.
        """
        cpu = torch.device(self.config.device).type == "cpu"
        with contextlib.ExitStack() as stack:
            if cpu:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)
            self._attention(configuration, stack)
            now = time.process_time if cpu else time.perf_counter
            clock = stack.enter_context(_Stopwatch(self.pipeline, None, now))
            stack.enter_context(_without("num_frames"))
            seed = self.config.seeds[0]
            self.pipeline(**self._arguments(replace(chosen, steps=steps), 0, seed, clock.step_end))
        return min(clock.steps)

    def _arguments(
        self, chosen: Settings, prompt: int, seed: int, step_end: Callable[..., Any]
    ) -> dict[str, Any]:
        temporal = getattr(self.pipeline, "vae_scale_factor_temporal", 4)
        arguments: dict[str, Any] = {
            "prompt": self.config.prompts[prompt],
            "negative_prompt": chosen.negative_prompt,
            "height": chosen.height,
            "width": chosen.width,
            "num_frames": pixel_vae.pipeline_num_frames(chosen.frames, temporal),
            "num_inference_steps": chosen.steps,
            "guidance_scale": chosen.guidance,
            # On the CPU, so that every device starts from the same noise.
            "generator": torch.Generator("cpu").manual_seed(seed),
            "callback_on_step_end": step_end,
            "output_type": "np",
        }
        if chosen.max_sequence_length is not None:
            arguments["max_sequence_length"] = chosen.max_sequence_length
        return arguments


def _check_place(config: SuiteConfig) -> None:
    where = Path(config.model)
    if where.exists() and not (where / "model_index.json").exists():
        raise ValueError(f"{where} is no diffusers pipeline: it has no model_index.json")
    if not where.exists() and (where.is_absolute() or config.model.count("/") != 1):
        raise ValueError(f"model {config.model!r} is neither a directory nor OWNER/NAME of the hub")


def _without_weights(config: SuiteConfig) -> Any | None:
    try:
        with _no_bars(), _without("Expected types for"):
            return without_weights(config.model, diffusers)
    except OSError as error:
        raise _cannot_load(config, error) from error


def _cannot_load(config: SuiteConfig, error: OSError) -> ValueError:
    return ValueError(f"cannot load {config.model!r}: {error}")


def load(config: SuiteConfig) -> Any:
    """Load the pipeline of a directory or hub id.

    Raises:
        ValueError: it cannot be loaded, or its pipeline makes no videos from text.
    """
    try:
        with _no_bars(), _without("Expected types for vae"):
            pipe = diffusers.DiffusionPipeline.from_pretrained(
                config.model, dtype=config.torch_dtype
            )
    except OSError as error:
        raise _cannot_load(config, error) from error
    needed = {"prompt", "height", "width", "num_frames", "callback_on_step_end"}
    missing = needed - set(inspect.signature(type(pipe).__call__).parameters)
    if missing:
        raise ValueError(
            f"{type(pipe).__name__} takes no {', '.join(sorted(missing))}: this suite is for "
            "pipelines that make videos from text"
        )
    pipe.to(config.device)
    pipe.set_progress_bar_config(disable=True)
    if torch.device(config.device).type == "cpu":
        single_precision_rope(pipe)
    return pipe


def denoisers(pipe: Any) -> list[Any]:
    """The transformers of a pipeline: one, or one for each range of noise."""
    found = (getattr(pipe, name, None) for name in ("transformer", "transformer_2"))
    return [model for model in found if model is not None]


def _compile(pipe: Any) -> None:
    """Compile the repeated blocks of a pipeline's transformers; later calls do, at their first run.

    Raises:
        ValueError: diffusers does not know which blocks of a model repeat.
    """
    for model in denoisers(pipe):
        if not getattr(model, "_repeated_blocks", None):
            raise ValueError(
                f"compile: {type(model).__name__} names no repeated blocks for diffusers to compile"
            )
        model.compile_repeated_blocks()


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Hide the loading bars of diffusers and transformers: the suite shows its own progress."""
    with contextlib.ExitStack() as stack:
        for library in (diffusers.utils.logging, transformers.utils.logging):
            if library.is_progress_bar_enabled():
                library.disable_progress_bar()
                stack.callback(library.enable_progress_bar)
        yield


def single_precision_rope(pipe: Any) -> None:
    """Keep Wan's rotary tables in fp32: diffusers makes them in fp64, which a CPU pays for.

    It is done for every configuration alike, so comparisons do not see it.
    """
    for model in pipe.components.values():
        if not isinstance(model, torch.nn.Module):
            continue
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name.startswith("freqs_") and buffer.dtype == torch.float64:
                    setattr(module, name, buffer.float())


def settings(pipe: Any, config: SuiteConfig) -> Settings:
    """Settle what the configuration leaves open.

    In this order: the option, ``generation.json`` in the model directory, the defaults of the
    pipeline's ``__call__``.

    Raises:
        ValueError: ``generation.json`` is not a JSON object, or sizes do not fit the pipeline;
            lists every reason.
    """
    stored: dict[str, Any] = {}
    file = Path(config.model) / DEFAULTS_FILE
    if file.exists():
        stored = read_json_object(file)
    own = {
        name: parameter.default
        for name, parameter in inspect.signature(type(pipe).__call__).parameters.items()
    }

    def pick(option: Any, key: str, parameter: str) -> Any:
        return option if option is not None else stored.get(key, own.get(parameter))

    length = pick(config.max_sequence_length, "max_sequence_length", "max_sequence_length")
    limit = getattr(getattr(pipe, "tokenizer", None), "model_max_length", None)
    if config.max_sequence_length is None and length is not None and limit is not None:
        length = min(length, limit)  # a small tokenizer cannot pad to the pipeline's 512
    chosen = Settings(
        height=pick(config.height, "height", "height"),
        width=pick(config.width, "width", "width"),
        frames=pick(config.frames, "frames", "num_frames"),
        steps=pick(config.steps, "steps", "num_inference_steps"),
        guidance=pick(config.guidance, "guidance", "guidance_scale"),
        max_sequence_length=length,
        negative_prompt=pick(config.negative_prompt, "negative_prompt", "negative_prompt"),
    )
    reasons = Grid.of(pipe).problems(chosen) + config.unfit_steps(chosen.steps)
    if reasons:
        raise ValueError("\n".join(reasons))
    return chosen


def geometry(runner: Runner) -> TileGeometry | None:
    """The tile geometry that lite configurations use; None if the layers do not show their size.

    Of one video and guidance branch: they attend one after the other.
    """
    if runner.config.geometry is not None:
        return runner.config.geometry
    for layer in discovery.find(runner.pipeline.transformer):
        if layer.head_dim is not None and layer.heads is not None:
            rows = layer.heads * runner.tokens()
            return runner.config.chosen_engine.geometry(layer.head_dim, rows)
    return None


def _most_skipped(handle: liteattention_diffusers.Handle, skips: list[dict[str, Any]]) -> Any:
    best = max(skips, key=lambda record: (record["step"], -record["tiles_kept"]))
    # On the host: it is kept for a picture, and is nothing that a later run needs on the device.
    kept = handle.kept_tiles(best["layer"], best["branch"]).cpu()
    return SkippedTiles(best["layer"], best["branch"], kept)


def _held(before: int, recorder: Recorder | None) -> int:
    """Bytes of host memory that the suite keeps: of earlier runs, and what it records of this."""
    return before + (0 if recorder is None else recorder.nbytes)


@contextlib.contextmanager
def _without(*phrases: str) -> Iterator[None]:
    """Leave out log lines of diffusers that speak of something done on purpose here."""

    def other(record: logging.LogRecord) -> bool:
        return not any(phrase in record.getMessage() for phrase in phrases)

    handlers = list(logging.getLogger("diffusers").handlers)
    for handler in handlers:
        handler.addFilter(other)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(other)


class _Stopwatch(contextlib.AbstractContextManager["_Stopwatch"]):
    """Times the parts of one pipeline call from outside; takes its wrappers off again."""

    def __init__(
        self,
        pipe: Any,
        on_step: Callable[[], None] | None,
        now: Callable[[], float] = time.perf_counter,
        between: Callable[[int], None] | None = None,
        parts: bool = True,
    ) -> None:
        """``parts``: time self-attention, too, which no GPU does; its hooks break a graph."""
        self._pipe = pipe
        self._clock = now
        self._between = between
        #: Seconds that ``between`` took, with the number of each step: no time here has them.
        self.uncounted = 0.0
        self._on_step = on_step
        self._device = torch.device(pipe.device)
        self._stack = contextlib.ExitStack()
        self._marks: list[float] = []
        self._entered = 0.0
        self.encode = 0.0
        self.decode = 0.0
        self.attention = 0.0 if parts and self._device.type != "cuda" else None

    def __enter__(self) -> _Stopwatch:
        self._stack.enter_context(self._timed(self._pipe, "encode_prompt", "encode"))
        self._stack.enter_context(self._timed(self._pipe.vae, "decode", "decode"))
        for model in denoisers(self._pipe):
            self._hook(model.register_forward_pre_hook(self._first_call))
            if self.attention is not None:
                for layer in discovery.find(model):
                    self._hook(layer.module.register_forward_pre_hook(self._enter_attention))
                    self._hook(layer.module.register_forward_hook(self._leave_attention))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def denoise(self) -> float:
        """From the first call of a denoiser to the end of the last step."""
        return self._marks[-1] - self._marks[0]

    @property
    def steps(self) -> list[float]:
        """Seconds of every step."""
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]

    def step_end(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> Any:
        """``callback_on_step_end`` of the pipeline."""
        self.wait()
        self._marks.append(self._now())
        if self._on_step is not None:
            self._on_step()
        if self._between is not None:
            start = self._clock()
            self._between(step)
            self.uncounted += self._clock() - start
        return tensors

    def _now(self) -> float:
        return self._clock() - self.uncounted

    def wait(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _hook(self, hook: Any) -> None:
        self._stack.callback(hook.remove)

    def _first_call(self, module: Any, args: Any) -> None:
        if not self._marks:
            self.wait()
            self._marks.append(self._now())

    def _enter_attention(self, module: Any, args: Any) -> None:
        self._entered = self._now()

    def _leave_attention(self, module: Any, args: Any, output: Any) -> None:
        assert self.attention is not None
        self.attention += self._now() - self._entered

    @contextlib.contextmanager
    def _timed(self, owner: Any, method: str, total: str) -> Iterator[None]:
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            start = self._now()
            result = original(*args, **kwargs)
            self.wait()
            setattr(self, total, getattr(self, total) + self._now() - start)
            return result

        vars(owner)[method] = timed
        try:
            yield
        finally:
            del vars(owner)[method]


class _PeakMemory(contextlib.AbstractContextManager["_PeakMemory"]):
    """Highest memory in use while it is entered, in bytes: the model, and what a run takes.

    On a GPU the allocator's own peak; on the CPU the resident set, sampled every 10 ms (the
    kernel's high-water mark covers the whole process and cannot be reset without privileges),
    without ``held``: bytes of host memory that are the suite's and not the run's.
    """

    _INTERVAL = 0.01

    def __init__(self, device: torch.device, held: Callable[[], int] = lambda: 0) -> None:
        self._device = device
        self._held = held
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.peak = 0

    def __enter__(self) -> _PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self.peak = self._now()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is None:
            self.peak = torch.cuda.max_memory_allocated(self._device)
        else:
            self._stop.set()
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._INTERVAL):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        return int(self._process.memory_info().rss) - self._held()
