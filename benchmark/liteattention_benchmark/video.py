"""A whole video model, denoised with one attention after the other: seconds per step and per video.

diffusers' own ``WanPipeline`` runs, classifier-free guidance included, without text encoder and
VAE: embeddings are random and latents are the result. The weights are random, so the tiles that
LiteAttention leaves out are given: nothing is said about quality. Self-attention alone changes from
contender to contender; cross-attention is diffusers' default for all.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import diffusers
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

import liteattention_diffusers
from liteattention_diffusers import discovery
from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry, lite_attention
from liteattention_rocm.cli import tables
from liteattention_rocm.dense import default_geometry
from liteattention_rocm.lite import bitmap

from .cells import Lite
from .contenders import NOTHING_SKIPPED, tiles_to_keep
from .peers import Unavailable, compiled_flex

#: diffusers' names of the attentions that ours are compared with.
_BACKENDS = {"cudnn": "_native_cudnn", "fa2": "_native_flash", "flex": "flex", "default": None}
_NAMES = {
    "cudnn": "cuDNN (SDPA)",
    "fa2": "FA2 (SDPA)",
    "flex": "FlexAttention",
    "default": "diffusers' default",
    "dense": "ours, dense",
}
_TEXT = {"text_encoder": None, "tokenizer": None, "vae": None}


class Transformer(BaseModel):
    """Sizes of a Wan transformer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: PositiveInt
    heads: PositiveInt
    head_dim: PositiveInt
    ffn_dim: PositiveInt
    text_dim: PositiveInt
    channels: PositiveInt


class Config(BaseModel):
    """What to measure: a YAML file. Sizes in pixels and frames."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    transformer: Transformer
    height: Annotated[PositiveInt, Field(multiple_of=16)]
    width: Annotated[PositiveInt, Field(multiple_of=16)]
    frames: PositiveInt
    text_tokens: PositiveInt = 512
    steps: PositiveInt = 20
    warmup_steps: PositiveInt = 2
    guidance: float = Field(default=5.0, gt=1.0)
    attention: tuple[Literal["cudnn", "fa2", "flex", "default", "dense", "lite"], ...]
    sparsity: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = ()
    pattern: Literal["uniform", "clustered"] = "clustered"

    @property
    def tokens(self) -> int:
        """Video tokens of self-attention: 4 x 8 x 8 pixels a latent, 2 x 2 latents a token."""
        return ((self.frames - 1) // 4 + 1) * (self.height // 16) * (self.width // 16)


def load(path: Path, steps: int | None = None) -> Config:
    """Read a configuration; ``steps`` overrides its own.

    Raises:
        ValueError: (``pydantic.ValidationError``) lists every mistake of the file.
        yaml.YAMLError: the file is no YAML.
    """
    raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if steps is not None and isinstance(raw, dict):
        raw["steps"] = steps
    return Config.model_validate(raw)


@dataclass(frozen=True)
class Row:
    """One contender. Seconds of the denoising loop, and of each of its steps in order.

    ``asked``: share of tiles to leave out; ``skipped``: share that was. ``finite``: whether all
    latents at the end are. ``absent``: why there is no time.
    """

    contender: str
    seconds: float | None
    steps: tuple[float, ...]
    asked: float | None
    skipped: float | None
    finite: bool
    peak_bytes: int
    absent: str = ""

    @property
    def step(self) -> float | None:
        """Median seconds of a step."""
        return statistics.median(self.steps) if self.steps else None

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-friendly dictionary."""
        return {**asdict(self), "step": self.step}


def run(
    config: Config,
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Warm every contender up, then denoise a video with each, in random order.

    ``keep`` is called with the rows so far, in the order of the configuration, after each video.

    Raises:
        RuntimeError: LiteAttention left out other tiles than it was told to.
    """
    pipe = pipeline(config, device)
    contenders: list[tuple[str, float | None]] = []
    for asked in config.attention:
        shares = config.sparsity if asked == "lite" else (None,)
        contenders += [(asked, share) for share in shares]
    rows: dict[tuple[str, float | None], Row] = {}
    lists = _Lists(config, device)
    made: set[tuple[str, float | None]] = set()
    for steps, timed in ((config.warmup_steps, False), (config.steps, True)):
        order = [one for one in contenders if one not in rows or not rows[one].absent]
        random.Random(steps).shuffle(order)
        for name, sparsity in order:
            title = _NAMES.get(name) or f"ours, lite {sparsity:.0%}"
            progress(f"{title}, {steps} steps")
            try:
                with _attention(pipe, name, sparsity, lists) as handle:
                    rows[name, sparsity] = _denoise(pipe, config, device, title, steps, handle)
            except (Unavailable, RuntimeError, ValueError) as error:
                if isinstance(error, _WrongTiles):
                    raise
                why = " ".join(str(error).split())[:200]
                rows[name, sparsity] = Row(title, None, (), sparsity, None, False, 0, why)
            if timed:
                made.add((name, sparsity))
                keep([rows[one] for one in contenders if one in made])
    return [rows[one] for one in contenders]


def pipeline(config: Config, device: torch.device) -> Any:
    """Wan's transformer with random weights, made on the device, in diffusers' pipeline.

    bf16 except where diffusers keeps fp32 when it loads the real weights.
    """
    sizes = config.transformer
    torch.manual_seed(0)
    with device:
        model = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=sizes.heads,
            attention_head_dim=sizes.head_dim,
            in_channels=sizes.channels,
            out_channels=sizes.channels,
            text_dim=sizes.text_dim,
            ffn_dim=sizes.ffn_dim,
            num_layers=sizes.layers,
        )
    kept = set(model._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        if not kept & set(name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipe = diffusers.WanPipeline(transformer=model.eval(), scheduler=scheduler, **_TEXT)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _denoise(
    pipe: Any,
    config: Config,
    device: torch.device,
    title: str,
    steps: int,
    handle: liteattention_diffusers.Handle | None,
) -> Row:
    generator = torch.Generator(device).manual_seed(1)
    texts = [
        torch.randn(
            1, config.text_tokens, config.transformer.text_dim, device=device, generator=generator
        ).bfloat16()
        for _ in range(2)
    ]
    marks: list[float] = []

    def mark(*_: Any) -> Any:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())
        return {}

    def first(*_: Any) -> None:
        if not marks:
            mark()

    hook = pipe.transformer.register_forward_pre_hook(first)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        latents = pipe(
            prompt_embeds=texts[0],
            negative_prompt_embeds=texts[1],
            height=config.height,
            width=config.width,
            num_frames=config.frames,
            num_inference_steps=steps,
            guidance_scale=config.guidance,
            generator=generator,
            callback_on_step_end=mark,
            output_type="latent",
        ).frames
    finally:
        hook.remove()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    asked = skipped = None
    if handle is not None and isinstance(handle.lite, _Forced):
        asked, skipped = handle.lite.sparsity, handle.statistics.sparsity
        _check(handle)
    taken = tuple(b - a for a, b in itertools.pairwise(marks))
    finite = bool(torch.isfinite(latents).all())
    return Row(title, marks[-1] - marks[0], taken, asked, skipped, finite, peak)


class _WrongTiles(RuntimeError):
    pass


def _check(handle: liteattention_diffusers.Handle) -> None:
    """Make sure that voting took nothing away from the tiles that were given."""
    for record in handle.statistics.to_records():
        if record["tiles_kept"] != record["tiles_computed"]:
            raise _WrongTiles(
                f"{record['layer']} computed {record['tiles_computed']} tiles and kept "
                f"{record['tiles_kept']}: the threshold must be low enough to keep all"
            )


@contextlib.contextmanager
def _attention(
    pipe: Any, name: str, sparsity: float | None, lists: _Lists
) -> Iterator[liteattention_diffusers.Handle | None]:
    """Give self-attention to a contender, and take it back."""
    with contextlib.ExitStack() as stack:
        if name in ("dense", "lite"):
            handle = stack.enter_context(
                liteattention_diffusers.enable(pipe, SkipPolicy(enabled=name == "lite"))
            )
            if sparsity is not None:
                handle.lite = _Forced(sparsity, lists)
            yield handle
            return
        backend = _BACKENDS[name]
        if name == "flex":
            from torch.nn.attention import flex_attention

            # diffusers calls it as it is, which would hold all scores at once
            stack.enter_context(
                mock.patch.object(flex_attention, "flex_attention", compiled_flex())
            )
        for found in discovery.find(pipe.transformer) if backend is not None else ():
            processor: Any = found.module.processor
            stack.callback(setattr, processor, "_attention_backend", processor._attention_backend)
            module: Any = found.module
            module.set_attention_backend(backend)
        yield None


class _Lists:
    """Lists of tiles to compute, by layer and sparsity, made when first asked for.

    Owner: a run. Lifetime: that run's.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._made: dict[tuple[str, float], tuple[torch.Tensor, int]] = {}

    def of(self, layer: str, sparsity: float, tile: TileGeometry) -> tuple[torch.Tensor, int]:
        """The packed list of a layer and its number of tiles."""
        found = self._made.get((layer, sparsity))
        if found is None:
            sizes = self._config.transformer
            cell = Lite(
                batch=1,
                heads=sizes.heads,
                length=self._config.tokens,
                head_dim=sizes.head_dim,
                sparsity=sparsity,
                pattern=self._config.pattern,
            )
            seed = len(self._made) + 1
            tiles = tiles_to_keep(cell, tile.q_block, tile.k_block, self._device, seed)
            found = self._made[layer, sparsity] = bitmap.pack(tiles), int(tiles.sum())
        return found


class _Forced(LiteAttention):
    """LiteAttention that walks given tiles in every step; voting runs and takes nothing away."""

    def __init__(self, sparsity: float, lists: _Lists) -> None:
        super().__init__()
        self.sparsity = sparsity
        self._lists = lists
        self._write: torch.Tensor | None = None

    def __call__(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        step: int,
        layer: str,
        branch: str = "",
        generation: int = 0,
        num_steps: int | None = None,
        **options: Any,
    ) -> Any:
        """Attend over the layer's tiles, alternating in direction as LiteAttention does."""
        tile = default_geometry(q)
        read, computed = self._lists.of(layer, self.sparsity, tile)
        if self._write is None:
            self._write = torch.empty_like(read)
        result = lite_attention(
            q, k, v, read, self._write, threshold=NOTHING_SKIPPED,
            descending=step % 2 == 1, geometry=tile, **options,
        )  # fmt: skip
        self.statistics.record(
            generation, step, layer, branch, read[..., 0].numel() * tile.k_blocks(k.shape[1]),
            computed, self._counters.count(self._write), threshold=NOTHING_SKIPPED,
        )  # fmt: skip
        return result


def to_markdown(
    config: Config, rows: Sequence[Row], environment: dict[str, str], command: str
) -> str:
    """A line per contender, with its speed against the first."""
    sizes = config.transformer
    base = rows[0]
    lines = [
        f"`{command}`",
        "",
        ", ".join(f"{name} {value}" for name, value in environment.items()),
        "",
        f"{sizes.layers} layers, {sizes.heads} heads x {sizes.head_dim}, {config.tokens:,} tokens "
        f"({config.height} x {config.width} x {config.frames}), {config.steps} steps of two "
        "guidance branches, bf16, random weights; one video each after "
        f"{config.warmup_steps} steps of warm-up.",
        "",
    ]
    head = ["self-attention", "one step s", f"{config.steps} steps s", "tiles skipped"]
    head += [f"speed-up over {base.contender}", "peak memory GiB"]
    table = []
    for row in rows:
        if row.seconds is None or row.step is None:
            continue
        skipped = "" if row.skipped is None else f"{row.skipped:.1%}"
        speed = "" if not base.seconds else f"{base.seconds / row.seconds:.2f}x"
        finite = "" if row.finite else " (not finite)"
        memory = f"{row.peak_bytes / 2**30:.1f}" if row.peak_bytes else ""
        times = f"{row.step:.3f}", f"{row.seconds:.2f}"
        table.append([row.contender + finite, *times, skipped, speed, memory])
    lines += tables.markdown(head, table)
    absent = [f"- {row.contender}: {row.absent}" for row in rows if row.absent]
    return "\n".join([*lines, *([""] if absent else []), *absent]) + "\n"
