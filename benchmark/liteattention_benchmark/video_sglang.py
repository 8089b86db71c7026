"""A whole video model in SGLang's diffusion runtime: seconds per step and per video.

What :mod:`.video` measures in diffusers. SGLang's own worker runs its own Wan pipeline, without
text encoder and VAE; every attention of the transformer is the contender's, as in a server that
was started with it. Tiles that LiteAttention leaves out are given.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from liteattention_rocm import SkipPolicy

from . import video
from .video import Config, Contender, Row

_OURS = "liteattention_rocm"
#: SGLang's names of the attentions that ours are compared with.
_BACKENDS = {"cudnn": "torch_cudnn_sdpa", "fa2": "torch_sdpa", "default": None}


def problems(config: Config) -> list[str]:
    """Say why a configuration cannot run; empty if it can."""
    return [
        f"--attention {name} is not in SGLang's runtime: it has cudnn, fa2, default, dense, lite"
        for name in config.attention
        if name not in (*_BACKENDS, "dense", "lite")
    ]


def run(
    config: Config,
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[list[Row]], None] = lambda _: None,
    compiled: Sequence[bool] = (False,),
) -> list[Row]:
    """Denoise a video with each contender after its warm-up; as :func:`.video.run`.

    What is not compiled shares a process, in which SGLang's layers are switched. Compiled layers
    cannot be: each backend has a process. Compiling is SGLang's regional one, of the blocks.

    Raises:
        RuntimeError: a process failed; the text is its traceback.
    """
    asked = video.contenders(config, compiled)
    rows: dict[Contender, Row] = {}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="liteattention-video") as folder:
        for part in _parts(asked):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_measure, args=(there, config, device.type, part, Path(folder))
            )
            process.start()
            there.close()
            try:
                with contextlib.suppress(EOFError):
                    while True:
                        found = here.recv()
                        if isinstance(found, tuple):
                            rows[found[0]] = found[1]
                            keep([rows[one] for one in asked if one in rows])
                        elif found.startswith("Traceback"):
                            raise RuntimeError(found)
                        else:
                            progress(found)
                missing = [one.title for one in part if one not in rows]
                if missing:
                    process.join(10)
                    raise RuntimeError(
                        f"the process that measures ended (exit code {process.exitcode}) before "
                        f"{', '.join(missing)}"
                    )
            finally:
                process.kill()
                process.join()
    return [rows[one] for one in asked if one in rows]


def _parts(asked: Sequence[Contender]) -> list[list[Contender]]:
    """Contenders by the process that measures them."""
    found: dict[str | None, list[Contender]] = {}
    for one in asked:
        name = _name(one) or "default"
        found.setdefault(name if one.compiled else None, []).append(one)
    return list(found.values())


def _name(one: Contender) -> str | None:
    """SGLang's name of the backend of a contender; None for its default."""
    return _BACKENDS.get(one.attention, _OURS)


def _measure(
    pipe: Connection, config: Config, device: str, asked: list[Contender], folder: Path
) -> None:
    """Send a row per contender, and a line before each; at last the traceback of a failure."""
    os.dup2(2, 1)  # SGLang logs to the standard output, which is for the table
    try:
        with _Worker(config, torch.device(device), folder, asked[0]) as worker:
            for one in asked:
                pipe.send(f"{worker.title(one)}, {config.steps} steps")
                pipe.send((one, worker.measure(one)))
    except BaseException:
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()


class _Worker:
    """A worker of SGLang's diffusion runtime in this process, made as its scheduler makes one.

    It is compiled if ``first`` is, and is for that contender's backend then.
    """

    def __init__(
        self, config: Config, device: torch.device, folder: Path, first: Contender
    ) -> None:
        os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "liteattention_benchmark.video_sglang_model"
        # A GPU works behind the marks that SGLang takes, unless it is waited for.
        os.environ["SGLANG_DIFFUSION_SYNC_STAGE_PROFILING"] = "1"
        from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks

        apply_plugin_hooks()
        from sglang.multimodal_gen.runtime.managers.cpu_worker import CPUWorker
        from sglang.multimodal_gen.runtime.managers.gpu_worker import GPUWorker
        from sglang.multimodal_gen.runtime.server_args import ServerArgs, set_global_server_args

        from liteattention_sglang import diffusion_stages, generation

        from . import video_sglang_model

        model = folder / "model"
        if not model.exists():
            video_sglang_model.write(config, model, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        compile_flags = {"enable_torch_compile": True, "regional_compile": True}
        self.arguments = ServerArgs.from_kwargs(
            model_path=str(model),
            attention_backend=_name(first) if first.compiled else _OURS,
            output_path=str(folder / "videos"),
            warmup_mode="off",
            offload_during_compile=False,
            dit_cpu_offload=False,
            dit_layerwise_offload=False,
            **(compile_flags if first.compiled else {}),
        )
        set_global_server_args(self.arguments)
        kind = GPUWorker if device.type == "cuda" else CPUWorker
        self._worker = kind(0, 0, _free_port(), self.arguments)
        self._config = config
        self._device = device
        self._folder = folder
        self._lists = video.Lists(config, device)
        self._share: float | None = None
        self._made: list[generation.Generation] = []
        stages = self._worker.pipeline.stages
        (self._stage,) = (one for one in stages if hasattr(one, "_torch_compile_registry"))
        worker = self

        class Given(generation.Generation):
            """Lists of a request that begin with given tiles."""

            def __init__(
                self, policy: SkipPolicy, num_steps: int | None, *, warm_up: bool = False
            ) -> None:
                super().__init__(policy, num_steps, warm_up=warm_up)
                if worker._share is not None:
                    self.lite = video.Forced(worker._share, worker._lists, max_generations=1)
                worker._made.append(self)

        self._patch = mock.patch.object(diffusion_stages, "Generation", Given)

    def __enter__(self) -> _Worker:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def title(self, one: Contender) -> str:
        """Name of a contender in tables."""
        if one.attention in ("dense", "lite"):
            return one.title
        name = f"SGLang's {self._backend(one).name.lower()}"
        return name + (", compiled" if one.compiled else "")

    def measure(self, one: Contender) -> Row:
        """Denoise one video after the warm-up; the row says why if that fails."""
        row = Row(self.title(one), None, (), one.sparsity, None, False, 0, compiled=one.compiled)
        try:
            if not one.compiled:
                self._switch(one)
            self._denoise(one, self._config.warmup_steps)
            held = self._lists.nbytes
            output = self._denoise(one, self._config.steps)
        except (RuntimeError, ValueError, ImportError) as error:
            return replace(row, absent=" ".join(str(error).split())[:300])
        skipped = None
        if one.sparsity is not None:
            (found,) = self._made
            video.check_tiles(found.statistics)
            skipped = found.statistics.sparsity
        steps = tuple(value / 1e3 for value in output.metrics.steps)
        cuda = self._device.type == "cuda"
        return replace(
            row,
            seconds=sum(steps),
            steps=steps,
            skipped=skipped,
            finite=bool(torch.isfinite(output.output).all()),
            peak_bytes=torch.cuda.max_memory_allocated() - held if cuda else 0,
        )

    def _backend(self, one: Contender) -> Any:
        """SGLang's enumeration member of what runs a contender."""
        from pkgutil import resolve_name

        from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform

        name = _name(one)
        if name is not None:
            return AttentionBackendEnum[name.upper()]
        size = self._config.transformer.head_dim
        found = current_platform.get_attn_backend_cls_str(None, size, torch.bfloat16)
        return resolve_name(found).get_enum()

    def _switch(self, one: Contender) -> None:
        """Give all attention to a contender's backend.

        As ``attention_backend_override`` of a request does, which SGLang has for some backends.
        """
        from sglang.multimodal_gen.runtime.layers.attention import layer as attention

        target = self._backend(one)
        layers = self._stage._request_switchable_attention_layers()
        for module in layers:
            attention.prepare_attention_backend_override(module, target)
        for module in layers:
            attention.apply_attention_backend_override(module, target)

    def _denoise(self, one: Contender, steps: int) -> Any:
        """Serve one request; return SGLang's output, whose ``metrics`` has the steps' times."""
        from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
        from sglang.multimodal_gen.runtime.entrypoints.utils import prepare_request

        self._share = one.sparsity
        self._made.clear()
        off = {"diffusers_kwargs": {"liteattention": False}} if one.attention == "dense" else {}
        parameters = SamplingParams.from_user_sampling_params_args(
            self.arguments.model_path,
            server_args=self.arguments,
            prompt="a video",
            negative_prompt="",
            request_id=f"{one.attention}-{steps}",
            height=self._config.height,
            width=self._config.width,
            num_frames=self._config.frames,
            num_inference_steps=steps,
            guidance_scale=self._config.guidance,
            seed=1,
            generator_device="cpu",
            save_output=False,
            return_file_paths_only=False,
            # Without it SGLang keeps no marks of steps.
            perf_dump_path=str(self._folder / "perf.json"),
            **off,
        )
        parameters._set_output_file_name()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        output = self._worker.execute_forward([prepare_request(self.arguments, parameters)])
        if output.error is not None:
            raise RuntimeError(output.error)
        if (one.attention in ("dense", "lite")) != bool(self._made):
            raise RuntimeError("another attention ran than the one that was asked for")
        return output


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
