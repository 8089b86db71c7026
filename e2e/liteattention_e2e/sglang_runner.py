"""Run one configuration of a pipeline in SGLang's diffusion runtime and measure it.

Through SGLang's Python interface, which runs the pipeline in a worker process of its own. Times are
SGLang's own marks of stages and steps; lists and tile counts are what the attention backend reports
of the request.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from liteattention_rocm import TileGeometry
from liteattention_rocm.engines import ENGINE_VARIABLE
from liteattention_rocm.lite import bitmap
from liteattention_sglang.generation import REPORT_VARIABLE
from liteattention_sglang.policies import REQUEST_KEY

from . import busy, sglang_model
from .config import Configuration, SuiteConfig, read_json_object
from .runs import DEFAULTS_FILE, Run, Settings, SkippedTiles
from .sizes import Grid

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SIZES = ("height", "width", "frames", "steps", "guidance")


class SglangRunner:
    """A pipeline in a worker of SGLang, which makes one video after the other.

    Videos of one prompt take turns as a whole: a request cannot be left in its middle.

    Owner: a suite. Lifetime: the process's; the worker and its folder go with it.

    Raises:
        ValueError: the options do not fit this runner, or SGLang cannot load the model; lists
            every reason.
    """

    turns: Literal["step", "video"] = "video"

    def __init__(self, config: SuiteConfig) -> None:
        self.config = config
        self.settings = _settings(config)
        self.tiles: dict[str, SkippedTiles] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="liteattention-sglang"))
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        os.environ[REPORT_VARIABLE] = str(self._folder / "reports")
        # A GPU works behind the marks that SGLang takes, unless it is waited for.
        os.environ["SGLANG_DIFFUSION_SYNC_STAGE_PROFILING"] = "1"
        if config.engine is not None:
            os.environ[ENGINE_VARIABLE] = config.engine
        if config.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(config.threads)
        model = config.model
        self._shapes = _is_small_model(Path(model))
        if self._shapes:
            os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "liteattention_e2e.sglang_wan"
            model = str(sglang_model.convert(Path(model), self._folder / "model"))
        from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import DiffGenerator
        from sglang.multimodal_gen.runtime.platforms import current_platform

        found = current_platform.device_type
        if torch.device(config.device).type != found:
            raise ValueError(
                f"device: SGLang chooses it, and runs on {found} here, not on {config.device!r}: "
                f"say --device {found}"
            )
        start = time.perf_counter()
        self._generator = DiffGenerator.from_pretrained(
            model_path=model,
            attention_backend="liteattention_rocm",
            dit_precision=_DTYPES[config.dtype],
            output_path=str(self._folder / "videos"),
        )
        atexit.register(self._generator.shutdown)
        self.load_seconds = time.perf_counter() - start
        self._count = 0
        self._tile: TileGeometry | None = None
        self._tokens = 0

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

        Without ``keep_tiles`` no list of it is read.

        Raises ``RuntimeError`` if SGLang failed; its log says why.
        """
        chosen = self.settings
        self._count += 1
        name = f"e2e{self._count}"
        request: dict[str, Any] = {
            "request_id": name,
            "prompt": self.config.prompts[prompt],
            "height": chosen.height,
            "width": chosen.width,
            "num_frames": chosen.frames,
            "num_inference_steps": steps or chosen.steps,
            "guidance_scale": chosen.guidance,
            "seed": seed,
            "generator_device": "cpu",  # so that every device starts from the same noise
            "save_output": False,
            "return_file_paths_only": False,
            "return_frames": True,
            # Without it SGLang keeps no marks of stages and steps.
            "perf_dump_path": str(self._folder / f"{name}.perf.json"),
        }
        if chosen.negative_prompt is not None:
            request["negative_prompt"] = chosen.negative_prompt
        if configuration.policy is None:
            request["attention_backend_override"] = "torch_sdpa"
        else:
            fields = json.loads(configuration.policy.model_dump_json())
            request["diffusers_kwargs"] = {REQUEST_KEY: fields}
        meter = busy.Meter(processor=busy.with_children)
        meter.start()
        made = self._generator.generate(sampling_params_kwargs=request)
        total, processor = meter.read()
        if made is None:
            raise RuntimeError(f"SGLang made no video of {configuration.name}: its log says why")
        frames = np.ascontiguousarray(np.stack([np.asarray(item) for item in made.frames]))
        marks = [value / 1e3 for value in made.metrics["steps"]]
        for _ in marks if on_step is not None else ():
            on_step()  # type: ignore[misc]
        return Run(
            configuration=configuration.name,
            prompt=prompt,
            seed=seed,
            repeat=repeat,
            encode=_stage(made.metrics, "TextEncoding"),
            denoise=_stage(made.metrics, "Denoising"),
            steps=marks,
            decode=_stage(made.metrics, "Decoding"),
            total=total,
            attention=None,
            # It has a figure for GPUs only.
            peak_memory=int(made.peak_memory_mb * 2**20) or None,
            digest=hashlib.sha256(frames.tobytes()).hexdigest(),
            frames=frames,
            skips=self._skips(configuration, name, keep_tiles=keep_tiles),
            # Of the whole request: a mark of a step says nothing about processors.
            step_processor=[processor.used / len(marks)] * len(marks),
            waited=processor.waited,
        )

    def in_turns(
        self,
        configurations: Sequence[Configuration],
        prompt: int,
        seed: int,
        repeat: int,
        on_step: Callable[[], None] | None = None,
    ) -> Iterator[Run]:
        """Make a video with each configuration, one after the other, and yield each."""
        for item in configurations:
            yield self.run(item, prompt, seed, repeat, on_step, steps=item.steps)

    def _skips(
        self, configuration: Configuration, name: str, *, keep_tiles: bool
    ) -> list[dict[str, Any]]:
        """Return the records of a request; with ``keep_tiles`` keep its most skipped list, too.

        A policy that is off has neither.
        """
        report = self._folder / "reports" / f"{name}.json"
        if configuration.kind != "lite":
            return []
        records: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["records"]
        if not records or not keep_tiles:
            return records
        best = max(records, key=lambda record: (record["step"], -record["tiles_kept"]))
        with np.load(report.with_suffix(".npz")) as stored:
            key = f"{best['layer']}/{best['branch']}"
            if key in stored.files:
                lists = torch.from_numpy(stored[key])
                columns = best["tiles_total"] // math.prod(lists.shape[:-1])
                self.tiles[configuration.name] = SkippedTiles(
                    best["layer"], best["branch"], bitmap.unpack(lists, columns)
                )
        return records

    def tokens(self, chosen: Settings | None = None) -> int:
        """Number of video tokens in self-attention, of the suite's sizes or of ``chosen``."""
        return _grid(self.config).tokens(chosen or self.settings)

    def heads(self) -> int | None:
        """Query heads of a layer of the denoiser; None if no configuration is at hand to say it."""
        path = Path(self.config.model) / "transformer" / "config.json"
        if not path.is_file():
            return None
        found: int | None = read_json_object(path).get("num_attention_heads")
        return found

    def geometry(self) -> TileGeometry | None:
        """The tile geometry of the engine; head dimension 128, as in every Wan."""
        return self.config.chosen_engine.geometry(128)


def _stage(metrics: dict[str, Any], name: str) -> float:
    return float(sum(value for stage, value in metrics["stages"].items() if name in stage)) / 1e3


def _is_small_model(model: Path) -> bool:
    index = model / "model_index.json"
    return index.exists() and sglang_model.VAE in index.read_text(encoding="utf-8")


def _settings(config: SuiteConfig) -> Settings:
    """Settle sizes: the option, then ``generation.json`` in the model directory."""
    reasons = []
    if config.geometry is not None:
        reasons.append("geometry: tiles are the engine's own in SGLang")
    if config.cross_attention == "own":
        reasons.append("cross_attention: SGLang runs it on our engine, dense")
    file = Path(config.model) / DEFAULTS_FILE
    stored = read_json_object(file) if file.exists() else {}
    found: dict[str, Any] = {}
    for name in _SIZES:
        value = getattr(config, name)
        found[name] = stored.get(name) if value is None else value
        if found[name] is None:
            reasons.append(f"{name}: say it, the model directory has no {DEFAULTS_FILE}")
    if reasons:
        raise ValueError("\n".join(reasons))
    negative = config.negative_prompt
    chosen = Settings(
        **found,
        max_sequence_length=None,
        negative_prompt=stored.get("negative_prompt") if negative is None else negative,
    )
    reasons = _grid(config).problems(chosen) + config.unfit_steps(chosen.steps)
    if reasons:
        raise ValueError("\n".join(reasons))
    return chosen


def _grid(config: SuiteConfig) -> Grid:
    """The small model's, or that of Wan 2.1."""
    if _is_small_model(Path(config.model)):
        return Grid(spatial=2, temporal=1, patch=(1, 2, 2))
    return Grid(spatial=8, temporal=4, patch=(1, 2, 2))
