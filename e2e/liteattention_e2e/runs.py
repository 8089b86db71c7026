"""What one run of a pipeline gave, whatever ran it, and what a suite asks of its runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from liteattention_rocm import TileGeometry

from .config import Configuration, SuiteConfig
from .metrics import Frames
from .step_tiles import StepTiles

#: Optional file in a model directory with the sizes and settings the model was made for.
DEFAULTS_FILE = "generation.json"
#: Denoising steps of a warm-up run, at most, after those that a policy keeps dense.
_WARMUP_STEPS = 2


def warmup_steps(configuration: Configuration, steps: int, whole: bool = False) -> int:
    """Denoising steps of a warm-up run: the last of them run the kernels that leave tiles out.

    Otherwise the first timed run would compile these. ``whole``: all ``steps``, for graphs.
    """
    if whole:
        return steps
    policy = configuration.policy
    dense = policy.warmup_steps if policy is not None and policy.enabled else 0
    return min(dense + _WARMUP_STEPS, steps)


@dataclass(frozen=True)
class Settings:
    """Sizes and settings of every run of a suite; ``frames`` is what the video will have."""

    height: int
    width: int
    frames: int
    steps: int
    guidance: float
    max_sequence_length: int | None
    negative_prompt: str | None


@dataclass
class Run:
    """What one run of one configuration gave. Times in seconds, memory in bytes.

    Times are those of the video's own turns (see :mod:`.turns`). ``attention`` is the time inside
    self-attention modules (on a GPU by its own events), None where it cannot be told apart.
    ``step_processor`` are seconds of processors that all threads got in each step, ``waited`` those
    that they waited for one in all steps, None where the system does not say it; ``step_device``
    are seconds of a GPU. ``peak_memory`` is None where the runner does not say it.
    ``digest`` is the SHA-256 of the float frames. ``tiles`` has what each step computed, of first
    repeats with ``keep_tiles`` and of runners that know it, until it is stored.
    """

    configuration: str
    prompt: int
    seed: int
    repeat: int
    encode: float
    denoise: float
    steps: list[float]
    decode: float
    total: float
    attention: float | None
    peak_memory: int | None
    digest: str
    frames: Frames
    skips: list[dict[str, Any]] = field(default_factory=list)
    tiles: tuple[StepTiles, ...] = ()
    step_processor: list[float] = field(default_factory=list)
    waited: float | None = None
    step_device: list[float] | None = None

    @property
    def processor(self) -> float:
        """Seconds of processors that all threads got in the denoising steps."""
        return sum(self.step_processor)

    @property
    def outside(self) -> float | None:
        """Seconds of the denoising steps outside self-attention."""
        if self.attention is None:
            return None
        whole = self.denoise if self.step_device is None else sum(self.step_device)
        return whole - self.attention


@dataclass(frozen=True)
class SkippedTiles:
    """The list of one layer after a run: bool [B, H, q_blocks, K_blocks], True = computed."""

    layer: str
    branch: str
    kept: torch.Tensor


class AnyRunner(Protocol):
    """A loaded pipeline that runs configurations: diffusers' or SGLang's.

    ``load_seconds`` is what loading took; ``tiles`` has the most skipped list of the last run of
    every lite configuration that was run with ``keep_tiles``. ``turns`` is what videos of one
    prompt take turns by.
    """

    turns: Literal["step", "video"]

    config: SuiteConfig
    settings: Settings
    load_seconds: float
    tiles: dict[str, SkippedTiles]

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
        """Make one video and measure it; ``steps`` overrides their number.

        Without ``keep_tiles`` no list outlives the run: neither in ``tiles`` nor in the result.
        """

    def in_turns(
        self,
        configurations: Sequence[Configuration],
        prompt: int,
        seed: int,
        repeat: int,
        on_step: Callable[[], None] | None = None,
    ) -> Iterator[Run]:
        """Make a video with each configuration, in turns, and yield each when it is ready."""

    def tokens(self, chosen: Settings | None = None) -> int:
        """Number of video tokens in self-attention, of the suite's sizes or of ``chosen``."""

    def heads(self) -> int | None:
        """Query heads of a layer of the denoiser; None if its configuration does not say."""

    def geometry(self) -> TileGeometry | None:
        """The tile geometry of lite configurations, None if it is not known."""
