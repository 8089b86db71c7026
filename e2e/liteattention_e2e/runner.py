"""Run one configuration of a diffusers pipeline and measure it.

The pipeline is run as its users run it, through ``__call__``. Its parts are timed from outside:
``encode_prompt`` and ``vae.decode`` are wrapped on the instance, the denoising loop is the time
from the first call of a denoiser to the end of the last step, and the self-attention modules are
timed by forward hooks (their projections included) where that does not disturb the run.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import diffusers
import numpy as np
import numpy.typing as npt
import psutil
import torch
import transformers

import liteattention_diffusers
from liteattention_diffusers import discovery, graphs
from liteattention_rocm import SkipPolicy, TileGeometry

from . import (
    busy,
    pixel_vae,  # diffusers finds its class by the module being imported
    turns,
)
from .config import Configuration, SuiteConfig, read_json_object
from .metrics import to_8_bit
from .runs import DEFAULTS_FILE, Run, Settings, SkippedTiles
from .sizes import Grid, without_weights
from .step_tiles import Recorder, StepTiles


class Runner:
    """A loaded pipeline that runs configurations.

    Videos of one prompt take turns by denoising steps.

    Owner: a suite. Lifetime: the suite's. The pipeline is left as it was after every run.

    Raises:
        ValueError: the model cannot be loaded, the sizes do not fit it, the engine does not
            support its layers, or patterns of a policy match none of them; lists every reason.
    """

    turns: Literal["step", "video"] = "step"

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
        self._graphed: dict[str, _Attention] = {}
        self._making: list[_Video] = []

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
        chosen = self.settings if steps is None else replace(self.settings, steps=steps)
        video = _Video(self, configuration, chosen, (prompt, seed, repeat), on_step, keep_tiles)
        return next(self._make([video]))

    def in_turns(
        self,
        configurations: Sequence[Configuration],
        prompt: int,
        seed: int,
        repeat: int,
        on_step: Callable[[], None] | None = None,
    ) -> Iterator[Run]:
        """Make a video with each configuration, step by step in turns; yield each when it is ready.

        The model is loaded once; latents and lists of all of these videos are kept meanwhile.
        """
        case = (prompt, seed, repeat)
        steps = [item.steps or self.settings.steps for item in configurations]
        schedules = [replace(self.settings, steps=number) for number in steps]
        return self._make(
            [
                _Video(self, item, chosen, case, on_step, True)
                for item, chosen in zip(configurations, schedules, strict=True)
            ]
        )

    def _make(self, videos: list[_Video]) -> Iterator[Run]:
        self._making = videos
        made = turns.take([video.task for video in videos])
        try:
            yield from made
        finally:
            made.close()  # type: ignore[attr-defined]
            for video in videos:
                video.close()
            self._making = []

    def _bytes_left(self) -> int:
        """Bytes of host memory that are the suite's: left by runs and still kept, or recorded."""
        self._left = [each for each in self._left if each() is not None]
        arrays = (array for each in self._left if (array := each()) is not None)
        lists = sum(each.kept.nbytes for each in self.tiles.values())
        recorded = sum(video.recorded for video in self._making)
        return lists + recorded + sum(array.nbytes for array in arrays)

    def _check_policies(self) -> None:
        """Say now what would fail after the first runs: ``ValueError`` with every reason."""
        refused: dict[str, list[str]] = {}
        for configuration in self.config.configurations():
            if configuration.policy is not None:
                try:
                    self._enable(self.pipeline, configuration.policy).disable()
                except ValueError as error:
                    refused.setdefault(str(error), []).append(configuration.name)
        if refused:
            raise ValueError(
                "\n".join(f"{', '.join(names)}: {error}" for error, names in refused.items())
            )

    def _enable(self, pipeline: Any, policy: SkipPolicy) -> liteattention_diffusers.Handle:
        return liteattention_diffusers.enable(
            pipeline,
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
            attention = _Attention(self, configuration, self.pipeline)
            stack.callback(attention.close)
            stack.enter_context(attention.turn())
            meter = busy.Meter(time.process_time if cpu else time.perf_counter)
            clock = _Stopwatch(self.pipeline, meter)
            stack.enter_context(clock.attached())
            stack.enter_context(_without("num_frames"))
            few = self._arguments(replace(chosen, steps=steps), 0, self.config.seeds[0])
            self.pipeline(**few, callback_on_step_end=clock.step_end)
        return min(clock.steps)

    def _arguments(self, chosen: Settings, prompt: int, seed: int) -> dict[str, Any]:
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


def _view(pipe: Any) -> Any:
    """The same pipeline with a scheduler and a run of its own; models are shared."""
    view = copy.copy(pipe)
    # Not by its own __setattr__, which notes the new scheduler in the configuration of both.
    vars(view)["scheduler"] = copy.deepcopy(pipe.scheduler)
    return view


class _Attention:
    """Self-attention of the shared model as a configuration has it, turn by turn.

    Owner: one video, or with graphs, which serve later videos, the runner.
    """

    def __init__(self, runner: Runner, configuration: Configuration, pipe: Any) -> None:
        self.pipe = pipe
        self._runner = runner
        self._policy = configuration.policy
        self._plain: list[graphs.StepGraphs] = []
        if self._policy is None and runner.config.graphs:
            self._plain = [
                graphs.StepGraphs(model, graphs.recorder_for(model)) for model in denoisers(pipe)
            ]
        #: None with diffusers' own attention, and before the first turn.
        self.handle: liteattention_diffusers.Handle | None = None

    def graph_counts(self) -> list[dict[str, int]]:
        """How the forwards of each denoiser, or of all that have a handle, were run."""
        if self.handle is not None:
            return [self.handle.graph_counts()]
        return [each.counts for each in self._plain]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Give self-attention of the model to the configuration; lists and graphs are kept."""
        with contextlib.ExitStack() as stack:
            for each in self._plain:
                stack.enter_context(graphs.attached(each))
            if self._policy is not None:
                if self.handle is None:
                    self.handle = self._runner._enable(self.pipe, self._policy)
                else:
                    self.handle.resume()
                stack.callback(self.handle.pause)
            yield

    def close(self) -> None:
        """Drop lists and graphs."""
        if self.handle is not None:
            self.handle.disable()


class _Video:
    """A video that is being made, in turns with others.

    Owner: the runner. Lifetime: until all of the videos that it is made with are ready.
    """

    def __init__(
        self,
        runner: Runner,
        configuration: Configuration,
        chosen: Settings,
        case: tuple[int, int, int],
        on_step: Callable[[], None] | None,
        keep_tiles: bool,
    ) -> None:
        self._runner = runner
        self._configuration = configuration
        self._chosen = chosen
        self._case = case
        self._keep_tiles = keep_tiles and configuration.kind == "lite"
        config = runner.config
        if not config.graphs:
            self._attention = _Attention(runner, configuration, _view(runner.pipeline))
        elif (known := runner._graphed.get(configuration.name)) is not None:
            self._attention = known
            if known.handle is not None:
                known.handle.lite.statistics.clear()  # runs before have been read
        else:
            self._attention = _Attention(runner, configuration, _view(runner.pipeline))
            runner._graphed[configuration.name] = self._attention
        self._recorder: Recorder | None = None
        self._clock = _Stopwatch(
            self._attention.pipe,
            busy.Meter(),
            on_step,
            between=self._between,
            parts=not (config.compiled or config.graphs),
        )
        self._memory = _PeakMemory(
            torch.device(config.device), runner._bytes_left, self._kept_by_others
        )
        #: Takes the video a step further, and makes a :class:`Run` of it.
        self.task: turns.Task[Run] = turns.Task(self._make, self._turn)
        self._clock.hand_over = self.task.hand_over
        self._begun = False

    @property
    def recorded(self) -> int:
        """Bytes of host memory with the lists of its steps."""
        return 0 if self._recorder is None else self._recorder.nbytes

    def close(self) -> None:
        """Give up what only this video needs."""
        if not self._runner.config.graphs:
            self._attention.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The shared model in this video's state."""
        if not self._begun:
            gc.collect()
            self._begun = True
        with (
            self._attention.turn(),
            self._clock.attached(),
            _without("num_frames"),  # see pipeline_num_frames
            self._memory,
        ):
            yield

    def _kept_by_others(self) -> int:
        return sum(each._memory.kept for each in self._runner._making if each is not self)

    def _between(self, step: int) -> None:
        """Take the lists that a step leaves, if they are wanted; they are of first repeats."""
        handle = self._attention.handle
        if handle is None or not self._keep_tiles or self._case[2]:
            return
        if self._recorder is None:
            self._recorder = Recorder(handle, self._chosen.steps)
        self._recorder.step_end(step)

    def _make(self) -> Run:
        prompt, seed, repeat = self._case
        runner, clock = self._runner, self._clock
        clock.begin()
        result = self._attention.pipe(
            **runner._arguments(self._chosen, prompt, seed), callback_on_step_end=clock.step_end
        )
        clock.end()
        self._memory.end()
        video = np.asarray(result.frames[0])
        skips, tiles = self._tiles()
        frames = to_8_bit(video)
        runner._left += map(weakref.ref, (frames, *(each.bits for each in tiles)))
        return Run(
            configuration=self._configuration.name,
            prompt=prompt,
            seed=seed,
            repeat=repeat,
            encode=clock.encode,
            denoise=clock.denoise,
            steps=clock.steps,
            decode=clock.decode,
            total=clock.total,
            attention=clock.attention,
            # What graphs hold is not among what the allocator counts.
            peak_memory=None if runner.config.graphs else self._memory.peak,
            digest=hashlib.sha256(np.ascontiguousarray(video).tobytes()).hexdigest(),
            frames=frames,
            skips=skips,
            tiles=tiles,
            step_processor=clock.processor,
            waited=clock.waited,
            step_device=clock.device_seconds,
        )

    def _tiles(self) -> tuple[list[dict[str, Any]], tuple[StepTiles, ...]]:
        """What the handle counted of this run, and the tiles of its steps that were recorded."""
        handle, runner = self._attention.handle, self._runner
        if handle is None:
            return [], ()
        records = handle.statistics.to_records()
        skips = [record for record in records if record["generation"] == handle.run]
        if self._keep_tiles and skips:
            # A run of dense first steps only, such as a short warm-up, has no list yet.
            with contextlib.suppress(KeyError):
                runner.tiles[self._configuration.name] = _most_skipped(handle, skips)
        tile = runner.geometry()
        if self._recorder is None or tile is None:
            return skips, ()
        tokens = runner.tokens(self._chosen)
        tiles = self._recorder.tiles(skips, handle.policy, tile.k_block, tokens)
        self._recorder = None
        return skips, tiles


class _Stopwatch:
    """Times the parts of one pipeline call from outside, in the turns that are its own."""

    def __init__(
        self,
        pipe: Any,
        meter: busy.Meter,
        on_step: Callable[[], None] | None = None,
        between: Callable[[int], None] | None = None,
        parts: bool = True,
    ) -> None:
        """``between`` is called after each step, in no time here.

        ``parts``: time self-attention, too; its hooks break a graph.
        """
        self._pipe = pipe
        self._meter = meter
        self._between = between
        self._on_step = on_step
        self._device = torch.device(pipe.device)
        self._on_gpu = self._device.type == "cuda"
        #: Ends the turn, and returns in the next one.
        self.hand_over: Callable[[], None] | None = None
        self._step_meter = replace(meter)
        self._stepping = False
        self._entered = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._step_began: Any = None
        self.encode = 0.0
        self.decode = 0.0
        #: Of the turns so far.
        self.total = 0.0
        #: By step; those of ``device_seconds`` by the GPU's own clock.
        self.steps: list[float] = []
        self.processor: list[float] = []
        self.device_seconds: list[float] | None = [] if self._on_gpu else None
        self.waited: float | None = 0.0
        self.attention: float | None = 0.0 if parts else None

    @property
    def denoise(self) -> float:
        """Of all steps; the first one begins with the first call of a denoiser."""
        return sum(self.steps)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the pipeline; takes its wrappers off again, as its models are others', too."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._timed(self._pipe, "encode_prompt", "encode"))
            stack.enter_context(self._timed(self._pipe.vae, "decode", "decode"))
            for model in denoisers(self._pipe):
                stack.callback(model.register_forward_pre_hook(self._first_call).remove)
                for layer in discovery.find(model) if self.attention is not None else ():
                    module = layer.module
                    enter, leave = self._enter_attention, self._leave_attention
                    stack.callback(module.register_forward_pre_hook(enter).remove)
                    stack.callback(module.register_forward_hook(leave).remove)
            yield

    def begin(self) -> None:
        """The call begins, or goes on after others had their turns."""
        self._meter.start()

    def end(self) -> None:
        """The call is over, or others have their turns."""
        self.wait()
        self.total += self._meter.read()[0]

    def step_end(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> Any:
        """``callback_on_step_end`` of the pipeline."""
        ended = self._event()
        self.wait()
        seconds, processor = self._step_meter.read()
        self.end()
        self.steps.append(seconds)
        self.processor.append(processor.used)
        if self.waited is not None:
            self.waited = None if processor.waited is None else self.waited + processor.waited
        if self.device_seconds is not None:
            self.device_seconds.append(self._step_began.elapsed_time(ended) / 1e3)
            if self.attention is not None:
                between = (a.elapsed_time(b) for a, b in self._events)
                self.attention += sum(between) / 1e3
            self._events.clear()
        if self._on_step is not None:
            self._on_step()
        if self._between is not None:
            self._between(step)
        if self.hand_over is not None:
            self.hand_over()
        self.begin()
        self._begin_step()
        return tensors

    def _begin_step(self) -> None:
        self._stepping = True
        self._step_meter.start()
        self._step_began = self._event()

    def _event(self) -> Any:
        """A mark in the GPU's queue, None elsewhere."""
        if not self._on_gpu:
            return None
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def wait(self) -> None:
        """Wait for the device."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _first_call(self, module: Any, args: Any) -> None:
        if not self._stepping:
            self.wait()
            self._begin_step()

    def _enter_attention(self, module: Any, args: Any) -> None:
        if self._on_gpu:
            self._entered = self._event()
        else:
            self._entered = self._meter.clock()

    def _leave_attention(self, module: Any, args: Any, output: Any) -> None:
        if self._on_gpu:
            self._events.append((self._entered, self._event()))
        else:
            assert self.attention is not None
            self.attention += self._meter.clock() - self._entered

    @contextlib.contextmanager
    def _timed(self, owner: Any, method: str, total: str) -> Iterator[None]:
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            start = self._meter.clock()
            result = original(*args, **kwargs)
            self.wait()
            setattr(self, total, getattr(self, total) + self._meter.clock() - start)
            return result

        vars(owner)[method] = timed
        try:
            yield
        finally:
            del vars(owner)[method]


class _PeakMemory(contextlib.AbstractContextManager["_PeakMemory"]):
    """Highest memory in use in a video's turns, in bytes: the model, and what the video takes.

    On a GPU the allocator's own peak, less what other videos keep from turn to turn; on the CPU the
    resident set, sampled every 10 ms (the kernel's high-water mark covers the whole process and
    cannot be reset without privileges), less ``held``: bytes of host memory that are the suite's.
    What other videos keep on a CPU, their latents and lists, is in it.
    """

    _INTERVAL = 0.01

    def __init__(
        self,
        device: torch.device,
        held: Callable[[], int] = lambda: 0,
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        self._device = device
        self._held = held
        self._others = others
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._before = 0
        self._over = False
        self.peak = 0
        #: Bytes on a GPU that are kept between turns.
        self.kept = 0

    def __enter__(self) -> _PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._look()
            self._stop.clear()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is None:
            self._look()
            self.kept += torch.cuda.memory_allocated(self._device) - self._before
        else:
            self._stop.set()
            self._thread.join()

    def end(self) -> None:
        """The video is there: what the suite makes of it does not count."""
        self._look()
        self._over = True

    def _sample(self) -> None:
        while not self._stop.wait(self._INTERVAL):
            self._look()

    def _look(self) -> None:
        if self._over:
            return
        if self._device.type == "cuda":
            now = torch.cuda.max_memory_allocated(self._device) - self._others()
        else:
            now = int(self._process.memory_info().rss) - self._held()
        self.peak = max(self.peak, now)
