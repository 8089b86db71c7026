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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from unittest import mock

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from typing_extensions import Self

from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry
from liteattention_rocm.cli import tables
from liteattention_rocm.lite import bitmap
from liteattention_rocm.lite.state import Shape, State
from liteattention_rocm.lite.statistics import SkipStatistics

from .cells import Lite
from .contenders import NOTHING_SKIPPED, tiles_to_keep
from .peers import Unavailable, compiled_flex

if TYPE_CHECKING:  # not every environment that denoises has them, or these versions
    import liteattention_diffusers

#: diffusers' names of the attentions that ours are compared with.
_BACKENDS = {"cudnn": "_native_cudnn", "fa2": "_native_flash", "flex": "flex", "default": None}
_NAMES = {
    "cudnn": "cuDNN (SDPA)",
    "fa2": "FA2 (SDPA)",
    "flex": "FlexAttention",
    "default": "diffusers' default",
    "dense": "ours, dense",
}
#: Bytes to which PyTorch's allocator for GPUs rounds what it hands out.
_BLOCK = 512
_TEXT = {"text_encoder": None, "tokenizer": None, "vae": None}


Attention = Literal["cudnn", "fa2", "flex", "default", "dense", "lite"]


class Transformer(BaseModel):
    """Sizes of a Wan transformer. ``of_layers``: how many the model has that ``layers`` stand for.

    Given by :func:`load` where a model is cut short, None where it is whole.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: PositiveInt
    heads: PositiveInt
    head_dim: PositiveInt
    ffn_dim: PositiveInt
    text_dim: PositiveInt
    channels: PositiveInt
    of_layers: PositiveInt | None = None


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
    attention: tuple[Attention, ...]
    sparsity: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = ()
    pattern: Literal["uniform", "clustered", "unequal"] = "clustered"
    needs_gpu: bool = Field(default=False, description="of such sizes that a CPU takes hours")

    @model_validator(mode="after")
    def _something_to_measure(self) -> Self:
        if not self.attention:
            raise ValueError("attention: name one contender at least")
        if "lite" in self.attention and not self.sparsity:
            raise ValueError("lite: give at least one sparsity")
        return self

    @property
    def tokens(self) -> int:
        """Video tokens of self-attention: 4 x 8 x 8 pixels a latent, 2 x 2 latents a token."""
        return ((self.frames - 1) // 4 + 1) * (self.height // 16) * (self.width // 16)


def load(path: Path, layers: int | None = None, **instead: Any) -> Config:
    """Read a configuration; ``instead`` overrides fields of its own unless it is None.

    ``layers`` cuts the transformer short: some layers stand for all.

    Raises:
        ValueError: (``pydantic.ValidationError``) lists every mistake of the file.
        yaml.YAMLError: the file is no YAML.
    """
    raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if isinstance(raw, dict):
        raw |= {name: value for name, value in instead.items() if value is not None}
        sizes = raw.get("transformer")
        if layers is not None and isinstance(sizes, dict) and sizes.get("layers") != layers:
            raw["transformer"] = sizes | {"layers": layers, "of_layers": sizes.get("layers")}
    return Config.model_validate(raw)


@dataclass(frozen=True)
class Row:
    """One contender. Seconds of the denoising loop, and of each of its steps in order.

    ``compiled``: whether the blocks of the transformer were. ``asked``: share of tiles to leave
    out; ``skipped``: share that was. ``finite``: whether all latents at the end are.
    ``peak_bytes``: most that PyTorch's allocator had handed out on the GPU, the model included, the
    benchmark's own lists (:class:`Lists`) not; 0 on a CPU.
    ``absent``: why there is no time.
    """

    contender: str
    seconds: float | None
    steps: tuple[float, ...]
    asked: float | None
    skipped: float | None
    finite: bool
    peak_bytes: int
    absent: str = ""
    compiled: bool = False

    @property
    def step(self) -> float | None:
        """Median seconds of a step."""
        return statistics.median(self.steps) if self.steps else None

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-friendly dictionary."""
        return {**asdict(self), "step": self.step}


@dataclass(frozen=True)
class Contender:
    """One row to be: the attention, the share of tiles that it leaves out, compiled or not.

    ``balance``: whether several processes deal heads by their tiles (:func:`.enable`).
    """

    attention: Attention
    sparsity: float | None = None
    compiled: bool = False
    balance: bool = False

    @property
    def title(self) -> str:
        """Its name in tables."""
        name = _NAMES.get(self.attention) or f"ours, lite {100 * (self.sparsity or 0):g}%"
        name += ", balanced" if self.balance else ""
        return name + (", compiled" if self.compiled else "")


def contenders(config: Config, compiled: Sequence[bool] = (False,)) -> list[Contender]:
    """All of a configuration, in its order; each as often as ``compiled`` says."""
    return [
        Contender(name, share, each)
        for each in compiled
        for name in config.attention
        for share in (config.sparsity if name == "lite" else (None,))
    ]


def run(
    config: Config,
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[list[Row]], None] = lambda _: None,
    compiled: Sequence[bool] = (False,),
) -> list[Row]:
    """Denoise a video with each contender, in random order, after its steps of warm-up.

    ``compiled`` says whether blocks are to be compiled (``compile_repeated_blocks``): not, all of
    them, or both. ``keep`` is called with the rows so far, in the order of the configuration, after
    each video.

    Raises:
        RuntimeError: LiteAttention left out other tiles than it was told to.
    """
    pipe = pipeline(config, device)
    asked = contenders(config, compiled)
    rows: dict[Contender, Row] = {}
    lists = Lists(config, device)
    order = list(asked)
    random.Random(config.steps).shuffle(order)
    for one in order:
        try:
            # One stay for both: what was compiled or tuned in the warm-up has to hold.
            with attention(pipe, one, lists) as handle:
                for steps in (config.warmup_steps, config.steps):
                    progress(f"{one.title}, {steps} steps")
                    held = lists.nbytes
                    row = denoise(pipe, config, device, one, steps, handle)
                    rows[one] = replace(row, peak_bytes=max(0, row.peak_bytes - held))
        except (Unavailable, RuntimeError, ValueError) as error:
            if isinstance(error, WrongTiles):
                raise
            why = " ".join(str(error).split())[:200]
            rows[one] = Row(
                one.title, None, (), one.sparsity, None, False, 0, why, compiled=one.compiled
            )
        keep([rows[each] for each in asked if each in rows])
    return [rows[one] for one in asked]


def pipeline(config: Config, device: torch.device) -> Any:
    """Wan's transformer with random weights in diffusers' pipeline."""
    import diffusers

    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    model = transformer(config, device)
    pipe = diffusers.WanPipeline(transformer=model, scheduler=scheduler, **_TEXT)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def transformer(config: Config, device: torch.device) -> Any:
    """Wan's transformer with random weights, made on the device.

    bf16 except where diffusers keeps fp32 when it loads the real weights.
    """
    import diffusers

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
    return model.eval()


def denoise(
    pipe: Any,
    config: Config,
    device: torch.device,
    one: Contender,
    steps: int,
    handle: liteattention_diffusers.Handle | None,
    step_end: Callable[[], None] = lambda: None,
) -> Row:
    """Denoise one video with the attention that the pipeline has now, and time it.

    ``step_end`` is called after each step, with the device idle.
    """
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
        if marks:
            step_end()
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
    if handle is not None and one.sparsity is not None:
        asked, skipped = one.sparsity, handle.statistics.sparsity
        check_tiles(handle.statistics)
    taken = tuple(b - a for a, b in itertools.pairwise(marks))
    finite = bool(torch.isfinite(latents).all())
    return Row(
        one.title, marks[-1] - marks[0], taken, asked, skipped, finite, peak, compiled=one.compiled
    )


class WrongTiles(RuntimeError):
    """LiteAttention left out other tiles than it was told to."""


def check_tiles(statistics: SkipStatistics) -> None:
    """Make sure that voting took nothing away from the tiles that were given."""
    for record in statistics.to_records():
        if record["tiles_kept"] != record["tiles_computed"]:
            raise WrongTiles(
                f"{record['layer']} computed {record['tiles_computed']} tiles and kept "
                f"{record['tiles_kept']}: the threshold must be low enough to keep all"
            )


@contextlib.contextmanager
def attention(
    pipe: Any, one: Contender, lists: Lists, peer_memory: bool = False
) -> Iterator[liteattention_diffusers.Handle | None]:
    """Give self-attention to a contender, and take it back."""
    import liteattention_diffusers

    with contextlib.ExitStack() as stack:
        handle = None
        if one.attention in ("dense", "lite"):
            handle = stack.enter_context(
                liteattention_diffusers.enable(
                    pipe,
                    SkipPolicy(enabled=one.attention == "lite", threshold=-6.0, warmup_steps=0),
                    balance=one.balance,
                    peer_memory=peer_memory,
                )
            )
            if one.sparsity is not None:
                handle.lite = Forced(one.sparsity, lists)
        else:
            _set_backend(pipe.transformer, one.attention, stack)
        if one.compiled:
            blocks = list(pipe.transformer.blocks)
            pipe.transformer.compile_repeated_blocks()
            for block in blocks:
                stack.callback(setattr, block, "_compiled_call_impl", None)
            stack.callback(torch._dynamo.reset)
        yield handle


def _set_backend(model: Any, name: str, stack: contextlib.ExitStack) -> None:
    """Give the self-attention of a model to a backend of diffusers until ``stack`` is closed."""
    from liteattention_diffusers import discovery

    backend = _BACKENDS[name]
    if name == "flex":
        from torch.nn.attention import flex_attention

        # diffusers calls it as it is, which would hold all scores at once
        stack.enter_context(mock.patch.object(flex_attention, "flex_attention", compiled_flex()))
    for found in discovery.find(model) if backend is not None else ():
        module: Any = found.module
        processor = module.processor
        stack.callback(setattr, processor, "_attention_backend", processor._attention_backend)
        module.set_attention_backend(backend)


class Lists:
    """Lists of tiles to compute, by layer and sparsity, made when first asked for.

    Owner: a run. Lifetime: that run's.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._made: dict[tuple[str, float], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the lists made so far take, in blocks of the allocator."""
        return sum(-(-one.nbytes // _BLOCK) * _BLOCK for one in self._made.values())

    def of(self, layer: str, sparsity: float, tile: TileGeometry) -> torch.Tensor:
        """The packed list of a layer."""
        found = self._made.get((layer, sparsity))
        if found is None:
            seed = len(self._made) + 1
            heads = self._config.transformer.heads
            pattern = self._config.pattern
            if pattern == "unequal":
                shares = unequal_shares(sparsity, heads, seed)
                parts = [self._tiles(1, share, seed * heads + i, tile, "clustered")
                         for i, share in enumerate(shares)]  # fmt: skip
                tiles = torch.cat(parts, dim=1)
            else:
                tiles = self._tiles(heads, sparsity, seed, tile, pattern)
            found = self._made[layer, sparsity] = bitmap.pack(tiles)
        return found

    def _tiles(
        self,
        heads: int,
        sparsity: float,
        seed: int,
        tile: TileGeometry,
        pattern: Literal["uniform", "clustered"],
    ) -> torch.Tensor:
        cell = Lite(
            batch=1, heads=heads, length=self._config.tokens, sparsity=sparsity, pattern=pattern,
            head_dim=self._config.transformer.head_dim,
        )  # fmt: skip
        return tiles_to_keep(cell, tile.q_block, tile.k_block, self._device, seed)


def unequal_shares(sparsity: float, heads: int, seed: int) -> list[float]:
    """Share of tiles that each head leaves out, from few to nearly all, ``sparsity`` on average.

    The shares kept are x ** (s / (1 - s)) for x evenly between 0 and 1, in random order, which is
    about how heads of a trained model differ (docs/video.md).
    """
    power = sparsity / (1 - sparsity)
    kept = [((i + 0.5) / heads) ** power for i in range(heads)]
    random.Random(seed).shuffle(kept)
    off = sum(kept) / heads - (1 - sparsity)
    return [min(1 - share + off, 0.99) if share < 1 else 0.0 for share in kept]


class Forced(LiteAttention):
    """LiteAttention that begins with given tiles; its threshold takes none of them away."""

    def __init__(
        self,
        sparsity: float,
        lists: Lists,
        cut: Callable[[torch.Tensor, Shape], torch.Tensor] = lambda whole, shape: whole.clone(),
        **options: Any,
    ) -> None:
        """``cut`` copies a process's part out of a layer's list."""
        super().__init__(SkipPolicy(threshold=NOTHING_SKIPPED, warmup_steps=0), **options)
        self._sparsity = sparsity
        self._lists = lists
        self._cut = cut

    def _enter(self, shape: Shape, where: Any, key: tuple[str, str]) -> State:
        state = super()._enter(shape, where, key)
        if state.read is None:
            whole = self._lists.of(where[2], self._sparsity, shape.geometry)
            # A list of its own: states reuse the memory of lists that are behind them.
            state.read = self._cut(whole, shape)
            state.read_full, state.read_count = False, None
        return state


def describe(config: Config) -> str:
    """What is denoised, in a sentence; says where some layers stand for all."""
    sizes = config.transformer
    layers = f"{sizes.layers} layers"
    if sizes.of_layers is not None:
        layers = f"{sizes.layers} of {sizes.of_layers} layers, which stand for all"
    return (
        f"{layers}, {sizes.heads} heads x {sizes.head_dim}, {config.tokens:,} tokens "
        f"({config.height} x {config.width} x {config.frames}), {config.steps} steps of two "
        "guidance branches, bf16, random weights; one video each after "
        f"{config.warmup_steps} steps of warm-up."
    )


def to_markdown(
    config: Config, rows: Sequence[Row], environment: dict[str, str], command: str
) -> str:
    """A line per contender, with its speed against the first."""
    base = rows[0]
    lines = [
        f"`{command}`",
        "",
        ", ".join(f"{name} {value}" for name, value in environment.items()),
        "",
        describe(config),
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
