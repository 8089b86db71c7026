"""SGLang's own diffusion worker in this process, and commands of SGLang in others.

Only what a test must see inside runs here; everything else is SGLang's: argument parsing, plugin
discovery, model loading, pipeline stages, request objects.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.serving import processes
from tests.serving.processes import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "e2e" / "model" / "wan-shapes"
PROMPT = "a red circle moves left on a blue background"
#: 48 x 48 x 4 frames: 576 tokens, 5 x 9 tiles of 128 x 64 per head.
SIZES = {"height": 48, "width": 48, "num_frames": 4, "num_inference_steps": 4, "seed": 3}
#: A threshold at which many tiles are skipped at these sizes.
BOLD = {"threshold": -2.0, "warmup_steps": 0}


def environment(**more: str) -> dict[str, str]:
    """The environment of every process that runs SGLang here."""
    return {
        **os.environ,
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "liteattention_e2e.sglang_wan",
        "OMP_NUM_THREADS": "1",  # two would wait for each other on a busy machine
        # Helpers that SGLang decorates with torch.compile take minutes on a CPU.
        "TORCHDYNAMO_DISABLE": os.environ.get("TORCHDYNAMO_DISABLE", "1"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **more,
    }


def model_directory(folder: Path, source: Path = MODEL) -> Path:
    """The small model as SGLang loads it."""
    from liteattention_e2e.sglang_model import convert

    return convert(source, folder / f"{source.name}-sglang")


def four_heads(folder: Path) -> Path:
    """The small model with its weights cut into four heads of 96, for two and four processes.

    It is trained with three of 128 and paints no shapes like this; tiles differ all the same.
    """
    made = folder / "wan-four-heads"
    (made / "transformer").mkdir(parents=True)
    for item in [*MODEL.iterdir(), *(MODEL / "transformer").iterdir()]:
        if item.name not in ("transformer", "config.json"):
            (made / item.relative_to(MODEL)).symlink_to(item)
    config = json.loads((MODEL / "transformer" / "config.json").read_text())
    config |= {"num_attention_heads": 4, "attention_head_dim": 96}
    (made / "transformer" / "config.json").write_text(json.dumps(config))
    return model_directory(folder, made)


@dataclass
class Result:
    """One request: frames uint8 [F, H, W, 3], its report and its lists (None: not written)."""

    frames: np.ndarray
    report: dict[str, Any] | None
    lists: dict[str, np.ndarray] | None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Result)
            and self.lists is not None
            and other.lists is not None
            and self.lists.keys() == other.lists.keys()
            and all(np.array_equal(self.lists[name], other.lists[name]) for name in self.lists)
            and np.array_equal(self.frames, other.frames)
            and self.report is not None
            and other.report is not None
            and self.report["records"] == other.report["records"]
        )


def read_report(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    report = json.loads((folder / f"{name}.json").read_text())
    with np.load(folder / f"{name}.npz") as stored:
        return report, {key: stored[key] for key in stored.files}


class Worker:
    """A worker of SGLang's diffusion runtime, made as its scheduler makes one.

    ``rank`` of the workers that meet at ``port``; the only one by default.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: Path | None = None,
        rank: int = 0,
        port: int | None = None,
        **arguments: Any,
    ) -> None:
        os.environ.update({k: v for k, v in environment().items() if os.environ.get(k) != v})
        self.reports = folder / "reports"
        os.environ["LITEATTENTION_REPORT_DIR"] = str(self.reports)
        from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks

        apply_plugin_hooks()
        from sglang.multimodal_gen.runtime.managers.cpu_worker import CPUWorker
        from sglang.multimodal_gen.runtime.server_args import ServerArgs, set_global_server_args

        self.arguments = ServerArgs.from_kwargs(
            model_path=str(model or model_directory(folder)),
            attention_backend="liteattention_rocm",
            output_path=str(folder / "videos"),
            **arguments,
        )
        set_global_server_args(self.arguments)
        self.worker = CPUWorker(rank, rank, port or free_port(), self.arguments)
        self._suffix = f".rank{rank}" if rank else ""
        self._count = 0

    @property
    def transformer(self) -> torch.nn.Module:
        module = self.worker.pipeline.modules["transformer"]
        assert isinstance(module, torch.nn.Module)
        return module

    def request(self, options: Any = None, **changes: Any) -> Any:
        """A request as the HTTP server and the command line make one."""
        from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
        from sglang.multimodal_gen.runtime.entrypoints.utils import prepare_request

        self._count += 1
        parameters = SamplingParams.from_user_sampling_params_args(
            self.arguments.model_path,
            server_args=self.arguments,
            **{
                "prompt": PROMPT,
                "request_id": f"request{self._count}",
                "generator_device": "cpu",
                "save_output": False,
                "return_file_paths_only": False,
                **({} if options is None else {"diffusers_kwargs": {"liteattention": options}}),
                **SIZES,
                **changes,
            },
        )
        parameters._set_output_file_name()
        return prepare_request(self.arguments, parameters)

    def execute(self, request: Any) -> Result:
        """Run a request to its end. Raises ``RuntimeError`` with SGLang's error message."""
        name = request.request_id + self._suffix
        output = self.worker.execute_forward([request])
        if output.error is not None:
            raise RuntimeError(output.error)
        frames = as_frames(output.output) if output.output is not None else np.empty(0)
        if (self.reports / f"{name}.json").exists():
            return Result(frames, *read_report(self.reports, name))
        return Result(frames, None, None)

    def run(self, options: Any = None, **changes: Any) -> Result:
        return self.execute(self.request(options, **changes))


def on_ranks(task: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """What ``task(rank, port, *arguments)`` returns in as many processes of their own.

    They are forked from one process that has imported SGLang, which takes most of a start.
    """
    os.environ.update(environment())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.serving.sglang_preload"])
    port = free_port()
    pipes, processes = [], []
    for rank in range(ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(there, task, rank, port, arguments))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        found = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(300):
                raise TimeoutError(f"rank {rank} of {task.__name__} has not answered in 300 s")
            found.append(pipe.recv())
        for result in found:
            if isinstance(result, str):
                raise RuntimeError(result)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(pipe: Any, task: Callable[..., Any], rank: int, port: int, arguments: Any) -> None:
    try:
        pipe.send(task(rank, port, *arguments))
    except BaseException:
        pipe.send(traceback.format_exc())
    threading.Event().wait()  # others may still need this rank's end of a connection


@functools.cache
def shared_worker() -> Worker:
    """The one worker of a test process: SGLang keeps a process's arguments and groups for ever.

    It computes in fp32, so that the runner's own attention and ours round alike.
    """
    folder = tempfile.mkdtemp(prefix="sglang-worker")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Worker(Path(folder), dit_precision="fp32")


def as_frames(output: Any) -> np.ndarray:
    """uint8 [F, H, W, 3] from a worker's output: one video, float in 0..1 or uint8."""
    video = output[0] if isinstance(output, list | tuple) or output.ndim == 5 else output
    array = torch.as_tensor(video)
    if array.ndim == 4 and array.shape[0] == 3:
        array = array.permute(1, 2, 3, 0)
    if array.is_floating_point():
        array = (array * 255).round().clamp(0, 255).to(torch.uint8)
    return array.numpy()


def context(request: Any, step: int, negative: bool) -> Any:
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    request.is_cfg_negative = negative
    return set_forward_context(current_timestep=step, attn_metadata=None, forward_batch=request)


def state_of(request: Any) -> Any:
    from liteattention_sglang.generation import Generation

    found = [item for item in request.extra.values() if isinstance(item, Generation)]
    return found[0] if found else None


def self_attention(worker: Worker) -> list[Any]:
    return [block.attn1.attn_impl for block in worker.transformer.blocks]


def live_states() -> int:
    """How many requests' skip lists are in this process's memory."""
    from liteattention_sglang.generation import Generation

    gc.collect()
    found = [item for item in gc.get_objects() if type(item) is Generation]
    # A traceback that a log keeps may hold the object, but not what it had.
    holders = [item.lite for item in found]
    for item in found:
        if item._ring is not None:
            holders += item._ring._made()
    return sum(bool(lite._generations) for lite in holders)


@contextlib.contextmanager
def server(
    kind: type[processes.Kind], folder: Path, *arguments: str, **variables: str
) -> Iterator[processes.Kind]:
    """Run ``sglang serve`` on the small model until the block is left."""
    command = [
        *("sglang", "serve", "--model-path", str(model_directory(folder))),
        *("--output-path", str(folder / "videos")),
        *("--master-port", str(free_port()), "--scheduler-port", str(free_port())),
        "--sleep-on-idle",  # it polls without pause otherwise, on a core that others need
        *arguments,
    ]
    with processes.serve(kind, command, folder, environment(**variables)) as running:
        yield running
