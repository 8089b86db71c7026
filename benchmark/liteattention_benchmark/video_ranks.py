"""A video model on several GPUs of one host: what they gain, and how long they wait for each other.

diffusers' context parallelism splits the sequence; a process per GPU talks NCCL. CPU processes with
gloo run the same code, which proves the way and times nothing. First each GPU denoises the whole
video by itself, all at the same time, so that a slower one is known as such. Then they share one. A
pass after the timed one notes how long each process attends in a step, exchanges rows and heads or
keys, and waits for slower ones: there all of them meet before each exchange.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing as mp
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from liteattention_diffusers import handle as handles
from liteattention_rocm import LiteAttention, SeqParallel, SkipPolicy
from liteattention_rocm.cli import tables
from liteattention_rocm.lite import bitmap
from liteattention_rocm.lite.state import Shape, State

from . import video
from .peers import Unavailable
from .video import Config, Contender, Forced, Lists

Mode = Literal["ulysses", "ring"]
#: Steps at most of the pass that notes the parts of a step.
_NOTED = 8
#: How long a process waits for what others say of a contender that failed here or there.
_VERDICT = timedelta(seconds=20)
#: How long a collective may take before its process gives up.
_PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True)
class RankRow:
    """A contender on one process of ``ranks``: medians over steps, in seconds.

    With ``ranks`` 1, ``rank`` is the number of the GPU that denoised by itself. ``step`` is of the
    :func:`settled` steps, ``dealing`` of those before which heads were dealt, None if there are
    none. ``attending`` is self-attention on this process alone, ``waiting`` for other processes
    before an exchange, ``exchanging`` the rest of the calls, all of settled steps; they are None
    where diffusers' own backends attend. ``tiles`` are those computed in the last step. ``absent``
    says why there is no time.
    """

    contender: str
    ranks: int
    rank: int
    step: float | None
    steps: tuple[float, ...]
    dealing: float | None
    attending: float | None
    exchanging: float | None
    waiting: float | None
    tiles: int | None
    skipped: float | None
    finite: bool
    absent: str = ""


class Failed(RuntimeError):
    """A process ended; the message has its error."""


def problems(
    config: Config, gpus: int, mode: str, device: str, compiled: bool, peer_memory: bool = False
) -> list[str]:
    """Every reason why ``config`` cannot run on ``gpus`` processes."""
    reasons: list[str] = []
    sizes = config.transformer
    if not dist.is_available():
        return ["this build of torch has no torch.distributed"]
    if device == "cpu":
        if not dist.is_gloo_available():
            reasons.append("this build of torch has no gloo, which --device cpu needs")
    else:
        there = torch.cuda.device_count()
        if there < gpus:
            has = f"{there} GPU" + ("s" if there != 1 else "")
            reasons.append(f"--gpus {gpus}: this machine has {has} (--device cpu tries it without)")
        elif not dist.is_nccl_available():
            reasons.append("this build of torch has no NCCL, which several GPUs need")
    if mode == "ulysses" and sizes.heads % gpus:
        reasons.append(
            f"--gpus {gpus} cannot share {sizes.heads} heads equally, as ulysses does: "
            "use --parallel ring or another number"
        )
    if config.tokens % gpus:
        reasons.append(f"--gpus {gpus} cannot share {config.tokens:,} tokens equally")
    if "flex" in config.attention:
        reasons.append("flex is not for several processes in diffusers: leave it out")
    if compiled:
        reasons.append("--compile is for one GPU")
    if peer_memory and mode == "ring":
        reasons.append("--peer-memory is for --parallel ulysses")
    return reasons


def contenders(config: Config, mode: str, ranks: int) -> list[Contender]:
    """Those of a configuration; in Ulysses also with heads dealt, where there is a choice."""
    found = video.contenders(config)
    if mode == "ulysses" and 1 < ranks < config.transformer.heads:
        found += [
            Contender(one.attention, one.sparsity, balance=True)
            for one in found
            if one.attention == "lite"
        ]
    return found


def run(
    config: Config,
    gpus: int,
    mode: Mode,
    device: str,
    keep: Callable[[list[RankRow]], None] = lambda _: None,
    peer_memory: bool = False,
) -> list[RankRow]:
    """Measure every GPU by itself, then ``gpus`` of them together; rows of all processes of both.

    CPU processes would share one CPU in the first pass: there one of them is measured.

    With ``peer_memory`` our layers write to each other's memory instead of sending messages.
    ``keep`` is called with the rows so far, whenever there are more of them. Progress goes to
    standard error.

    Raises:
        Failed: a process ended with an error; all others are ended.
    """
    done: list[RankRow] = []
    for together in (False, True):
        processes = gpus if together or device != "cpu" else 1
        with tempfile.TemporaryDirectory(prefix="liteattention-") as folder:
            try:
                _run(
                    config, processes, mode, device, Path(folder),
                    lambda rows: keep(done + rows),  # noqa: B023
                    peer_memory, together,
                )  # fmt: skip
            finally:  # rows that came since the last look are kept, also if a process failed
                done += _collect(Path(folder), processes)
                if done:
                    keep(list(done))
    return done


def _run(
    config: Config,
    processes: int,
    mode: Mode,
    device: str,
    folder: Path,
    keep: Callable[[list[RankRow]], None],
    peer_memory: bool = False,
    together: bool = True,
) -> None:
    """Start the processes, wait for them, and leave none behind.

    Unless they work ``together``, each has a group of its own.
    """
    ports = [free_port()] * processes if together else [free_port() for _ in range(processes)]
    arguments = (
        ports, together, config.model_dump_json(), mode, device, str(folder), peer_memory
    )  # fmt: skip
    context = start_processes(  # type: ignore[no-untyped-call]
        _work, args=arguments, nprocs=processes, join=False, start_method="spawn"
    )
    assert context is not None
    seen = 0
    try:
        while not context.join(timeout=0.5):
            rows = _collect(folder, processes)
            if len(rows) > seen:
                seen = len(rows)
                keep(rows)
    except ProcessExitedException as error:
        how = f"exit code {error.exit_code}" if error.signal_name is None else error.signal_name
        raise Failed(f"process {error.error_index} of {processes} ended with {how}") from error
    except ProcessRaisedException as error:
        text = str(error).strip()
        raise Failed(f"process {error.error_index} of {processes} failed:\n{text}") from error
    finally:
        for process in context.processes:
            process.terminate()
        until = time.monotonic() + 10
        for process in context.processes:
            process.join(max(0.1, until - time.monotonic()))
            if process.is_alive():
                process.kill()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _collect(folder: Path, processes: int) -> list[RankRow]:
    """Rows of the contenders that all processes have written."""
    found = []
    for rank in range(processes):
        try:
            rows = json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
        except OSError:
            rows = []
        found.append([RankRow(**row | {"steps": tuple(row["steps"])}) for row in rows])
    complete = min(map(len, found))
    return [row for rows in found for row in rows[:complete]]


# in a process ------------------------------------------------------------------------------------


def _work(
    number: int, ports: Sequence[int], together: bool, config_json: str, mode: Mode, kind: str,
    folder: str, peer_memory: bool,
) -> None:  # fmt: skip
    """Measure all contenders on the process of this number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    end_with_parent()
    warnings.simplefilter("ignore", FutureWarning)  # of what diffusers calls in torch
    diffusers.utils.logging.set_verbosity_error()
    config = Config.model_validate_json(config_json)
    ranks = len(ports) if together else 1
    if kind == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // len(ports)))
        device = torch.device("cpu")
        # diffusers numbers the devices of a host with it
        torch.accelerator.device_count = lambda: 1
    else:
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl",
        init_method=f"tcp://127.0.0.1:{ports[number]}",
        rank=number if together else 0,
        world_size=ranks,
        timeout=_PATIENCE,
    )
    try:
        _measure(config, number, ranks, mode, device, Path(folder), peer_memory)
    finally:
        if sys.exc_info()[0] is None:  # else the others may never come
            dist.destroy_process_group()


def end_with_parent() -> None:
    """End this process when its parent is gone, even if that was killed (Linux alone).

    torch asks the system for SIGINT then, which is ignored here.
    """
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
    parent = mp.parent_process()
    if parent is not None and not parent.is_alive():  # gone before we asked
        raise SystemExit(1)


def _measure(
    config: Config, rank: int, ranks: int, mode: Mode, device: torch.device, folder: Path,
    peer_memory: bool = False,
) -> None:  # fmt: skip
    pipe = video.pipeline(config, device)
    if ranks > 1:
        degrees = {f"{mode}_degree": ranks}
        pipe.transformer.enable_parallelism(config=diffusers.ContextParallelConfig(**degrees))
    asked = contenders(config, mode, ranks)
    lists = Lists(config, device)
    rows: dict[Contender, RankRow] = {}
    order = list(enumerate(asked))
    random.Random(config.steps).shuffle(order)
    for number, one in order:
        if rank == 0:
            who = f"{ranks} processes" if ranks > 1 else "by itself"
            print(f"{who}: {one.title}", file=sys.stderr, flush=True)
        why = ""
        try:
            row = _time(pipe, config, one, lists, rank, ranks, device, peer_memory)
        except (Unavailable, RuntimeError, ValueError, NotImplementedError) as error:
            if isinstance(error, video.WrongTiles):
                raise
            why = " ".join(str(error).split())[:200] or type(error).__name__
            none = (None,) * 6
            row = RankRow(one.title, ranks, rank, None, (), *none, finite=False, absent=why)
            if ranks > 1 and not _all_failed(number, ranks, rank, why):
                raise
        else:
            if ranks > 1 and any(_verdicts(number, ranks, rank, "")):
                raise RuntimeError(f"{one.title}: another process failed")
        rows[one] = row
        written = [asdict(rows[each]) for each in asked if each in rows]
        part = folder / f"{rank}.part"
        part.write_text(json.dumps(written), encoding="utf-8")
        part.replace(folder / f"{rank}.json")


def _all_failed(number: int, ranks: int, rank: int, why: str) -> bool:
    """Whether every process failed, as where a backend cannot do something: none is waiting."""
    try:
        return all(_verdicts(number, ranks, rank, why))
    except RuntimeError:  # the others wait for us, or are gone
        return False


def _verdicts(number: int, ranks: int, rank: int, why: str) -> list[str]:
    """Say how a contender ended here, "" for well, and hear how it did elsewhere."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"video/{number}/{rank}", why)
    keys = [f"video/{number}/{each}" for each in range(ranks)]
    store.wait(keys, _VERDICT)
    return [store.get(key).decode() for key in keys]


def _time(
    pipe: Any,
    config: Config,
    one: Contender,
    lists: Lists,
    rank: int,
    ranks: int,
    device: torch.device,
    peer_memory: bool,
) -> RankRow:
    """Denoise one video after the warm-up, as every process does."""
    watch = _Watch(device)
    with contextlib.ExitStack() as stack:
        if ranks > 1:
            made = functools.partial(_Timed, watch=watch, one=one, lists=lists)
            stack.enter_context(mock.patch.object(handles, "SeqParallel", made))
        handle = stack.enter_context(video.attention(pipe, one, lists, peer_memory))
        video.denoise(pipe, config, device, one, config.warmup_steps, handle)
        watch.dealt.clear()
        row = video.denoise(pipe, config, device, one, config.steps, handle)
        dealt = set(watch.dealt)
        tiles = None
        if handle is not None and one.attention == "lite":
            tiles = sum(
                record["tiles_computed"]
                for record in handle.statistics.to_records()
                if record["generation"] == handle.run and record["step"] == config.steps - 1
            )
        if ranks > 1 and handle is not None:
            steps = min(config.steps, _NOTED)
            with watch:
                video.denoise(pipe, config, device, one, steps, handle, watch.step_end)
    taken = [row.steps[step] for step in settled(len(row.steps), dealt)]
    dealing = [row.steps[step] for step in sorted(dealt)]
    return RankRow(
        one.title, ranks, rank, statistics.median(taken), row.steps,
        statistics.median(dealing) if dealing else None, *watch.medians(), tiles, row.skipped,
        row.finite,
    )  # fmt: skip


def settled(steps: int, dealt: set[int]) -> list[int]:
    """The steps that a long video consists of: heads are dealt already, and not anew.

    Of 50 steps, 43 are such. The first one has heads in their order, and six deal them. A video of
    three steps has none; then all steps before which no heads were dealt stand for them.
    """
    plain = [step for step in range(steps) if step not in dealt]
    return [step for step in plain if step > min(dealt, default=-1)] or plain


class _Watch:
    """Seconds of the parts of attention on this process, step by step, while it is entered.

    Owner: a contender on one process. Lifetime: that contender's.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._on = False
        self._open: dict[str, list[tuple[Any, Any]]] = {"call": [], "attention": [], "waiting": []}
        self._here = torch.zeros(1, device=device)
        self.steps: list[tuple[float, float, float]] = []
        #: Steps before which heads were dealt, noted at all times.
        self.dealt: set[int] = set()

    def __enter__(self) -> None:
        self._on = True

    def __exit__(self, *_: object) -> None:
        self._on = False

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        if not self._on:
            yield
            return
        begin = self._now()
        yield
        self._open[name].append((begin, self._now()))

    def meet(self, group: dist.ProcessGroup | None) -> None:
        """Wait for all processes, on the device where there is one, and time that."""
        if self._on:
            with self.part("waiting"):
                dist.all_reduce(self._here, group=group)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def step_end(self) -> None:
        """Add up what belongs to a step; the device is idle."""
        sums = {}
        for name, pairs in self._open.items():
            if self._cuda:
                sums[name] = sum(a.elapsed_time(b) for a, b in pairs) / 1e3
            else:
                sums[name] = sum(b - a for a, b in pairs)
            pairs.clear()
        attention, waiting = sums["attention"], sums["waiting"]
        self.steps.append((attention, sums["call"] - attention - waiting, waiting))

    def medians(self) -> tuple[float | None, float | None, float | None]:
        """Medians of attention, exchange and waiting in settled steps; None if none was seen."""
        if not any(attention for attention, _, _ in self.steps):
            return None, None, None
        parts = [self.steps[step] for step in settled(len(self.steps), self.dealt)]
        attending, exchanging, waiting = map(statistics.median, zip(*parts, strict=True))
        return attending, exchanging, waiting


class _Timed(SeqParallel):
    """SeqParallel that is timed, and walks given tiles if the contender says so."""

    def __init__(
        self, *arguments: Any, watch: _Watch, one: Contender, lists: Lists, **options: Any
    ) -> None:
        self._watch, self._one, self._given = watch, one, lists
        super().__init__(*arguments, **options)

    def __call__(self, *tensors: Any, **call: Any) -> torch.Tensor:
        """Attend, and note how long it took."""
        with self._watch.part("call"):
            self._watch.meet(self.group)
            return super().__call__(*tensors, **call)

    def _heads_for_rows(self, out: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        self._watch.meet(self.group)
        return super()._heads_for_rows(out, order)

    def _deal_anew(self, state: State, kv_heads: int, group: int) -> None:
        self._watch.dealt.add(state.step)
        super()._deal_anew(state, kv_heads, group)

    def _attend(self, lite: LiteAttention, *tensors: torch.Tensor, **call: Any) -> Any:
        with self._watch.part("attention"):
            return super()._attend(lite, *tensors, **call)

    def _new(self, policy: SkipPolicy, split: int | None) -> LiteAttention:
        share = self._one.sparsity
        if share is None:
            return super()._new(policy, split)
        rank, ranks = self.rank, self.ranks
        if split is None:
            cut = functools.partial(heads_part, rank=rank, ranks=ranks)
            return Forced(share, self._given, cut, **self._rest)

        def part(whole: torch.Tensor, shape: Shape) -> torch.Tensor:
            length = shape.kv_len
            return ring_part(whole, shape, rank * shape.q_len, split * length, ranks * length)

        return Forced(share, self._given, part, **self._rest)


def heads_part(whole: torch.Tensor, shape: Shape, *, rank: int, ranks: int) -> torch.Tensor:
    """The list of the heads of a rank, in their order."""
    return whole.chunk(ranks, dim=1)[rank].clone()


def ring_part(
    whole: torch.Tensor, shape: Shape, first_row: int, first_key: int, tokens: int
) -> torch.Tensor:
    """The list of rows and keys from these on: tiles of ``whole`` at the middle of each.

    A q block without any keeps the first, as every part of a ring does.
    """
    tile = shape.geometry
    bits = bitmap.unpack(whole, tile.k_blocks(tokens))
    rows = first_row + tile.q_block * torch.arange(tile.q_blocks(shape.q_len)) + tile.q_block // 2
    keys = first_key + tile.k_block * torch.arange(tile.k_blocks(shape.kv_len)) + tile.k_block // 2
    rows = (rows // tile.q_block).clamp(max=bits.shape[2] - 1).to(bits.device)
    keys = (keys // tile.k_block).clamp(max=bits.shape[3] - 1).to(bits.device)
    found = bits.index_select(2, rows).index_select(3, keys)
    found[..., 0] |= ~found.any(-1)
    return bitmap.pack(found)


# report ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """A contender on GPUs by themselves and on several together. Seconds are medians over steps.

    ``alone`` has the seconds of each GPU by itself. ``together`` and ``efficiency``, the speed-up
    over the number of processes, are of :func:`settled` steps, ``dealing`` is the time of those
    before which heads were dealt. ``uneven`` is the tiles of the process that had most of them over
    the mean, in the last step.
    """

    contender: str
    alone: tuple[float, ...]
    together: float | None
    dealing: float | None
    attending: tuple[float, ...]
    exchanging: tuple[float, ...]
    waiting: tuple[float, ...]
    tiles: tuple[int, ...]
    skipped: float | None
    finite: bool
    absent: str
    ranks: int

    @property
    def one(self) -> float | None:
        """Seconds of a GPU of their mean speed: the harmonic mean of ``alone``.

        GPUs of unlike speed that shared the work without loss would take this over their number.
        """
        return statistics.harmonic_mean(self.alone) if self.alone else None

    @property
    def speed_up(self) -> float | None:
        """Time of one GPU over that of all."""
        if not self.one or not self.together:
            return None
        return self.one / self.together

    @property
    def efficiency(self) -> float | None:
        """Speed-up by process."""
        return None if self.speed_up is None else self.speed_up / self.ranks

    @property
    def uneven(self) -> float | None:
        """Tiles of the process that had most of them, over their mean."""
        return max(self.tiles) * len(self.tiles) / sum(self.tiles) if self.tiles else None


def gains(rows: Sequence[RankRow], gpus: int) -> list[Gain]:
    """Put the rows of all processes together, by contender in their order."""
    found = []
    for name in dict.fromkeys(row.contender for row in rows if row.ranks == gpus):
        ours = [row for row in rows if row.ranks == gpus and row.contender == name]
        same = name.removesuffix(", balanced")
        alone = [row.step for row in rows if row.ranks == 1 and row.contender == same]
        steps = [row.step for row in ours if row.step is not None]
        dealing = [row.dealing for row in ours if row.dealing is not None]
        skipped = [row.skipped for row in ours if row.skipped is not None]
        found.append(
            Gain(
                name,
                tuple(step for step in alone if step is not None),
                max(steps) if steps else None,
                max(dealing) if dealing else None,
                tuple(row.attending for row in ours if row.attending is not None),
                tuple(row.exchanging for row in ours if row.exchanging is not None),
                tuple(row.waiting for row in ours if row.waiting is not None),
                tuple(row.tiles for row in ours if row.tiles is not None),
                statistics.mean(skipped) if skipped else None,
                all(row.finite for row in ours),
                next((row.absent for row in ours if row.absent), ""),
                gpus,
            )
        )
    return found


def to_markdown(
    config: Config,
    rows: Sequence[RankRow],
    gpus: int,
    mode: str,
    device: str,
    environment: dict[str, str],
    command: str,
    peer_memory: bool = False,
) -> str:
    """A line per contender: one process beside all, then what each of them did."""
    kind = "CPU processes (gloo), which time nothing" if device == "cpu" else "GPUs (NCCL)"
    way = ", ours through each other's memory" if peer_memory else ""
    lines = [
        f"`{command}`", "", ", ".join(f"{name} {value}" for name, value in environment.items()), "",
        f"{gpus} {kind}, {mode}{way}. {video.describe(config)}", "",
    ]  # fmt: skip
    found = gains(rows, gpus)
    head = ["self-attention", "1: one step s", f"{gpus}: one step s", "speed-up", "efficiency"]
    head += ["a step that deals s", "tiles skipped", "most tiles / mean"]
    table = [
        [
            gain.contender + ("" if gain.finite else " (not finite)"),
            _number(gain.one, ".3f"),
            _number(gain.together, ".3f"),
            _number(gain.speed_up, ".2f", "x"),
            _number(gain.efficiency, ".3f"),
            _number(gain.dealing, ".3f"),
            _number(gain.skipped, ".1%"),
            _number(gain.uneven, ".3f"),
        ]
        for gain in found
        if not gain.absent
    ]
    lines += tables.markdown(head, table)
    apart = [
        gain for gain in found if len(gain.alone) > 1 and not gain.contender.endswith("balanced")
    ]
    if apart:
        lines += [
            "",
            "1: a GPU of their mean speed, the harmonic mean of each by itself. Seconds of",
        ]
        lines += ["a step by itself, while the others worked by themselves:", ""]
        table = [[gain.contender, *map("{:.3f}".format, gain.alone)] for gain in apart]
        lines += tables.markdown(["self-attention", *(f"GPU {n}" for n in range(gpus))], table)
    parts = [gain for gain in found if gain.attending]
    if parts:
        lines += ["", "By process, in a step: seconds attending + exchanging + waiting for others,"]
        lines += ["of a pass in which all meet before each exchange of Ulysses, or call of a ring."]
        lines += ["Tiles are those computed in the last timed step.", ""]
        head = ["self-attention", *(f"rank {rank}" for rank in range(gpus))]
        table = []
        for gain in parts:
            times = zip(gain.attending, gain.exchanging, gain.waiting, strict=True)
            table.append([gain.contender, *(" + ".join(map("{:.4f}".format, t)) for t in times)])
            if gain.tiles:
                table.append([f"{gain.contender}: tiles", *(f"{count:,}" for count in gain.tiles)])
        lines += tables.markdown(head, table)
    absent = [f"- {gain.contender}: {gain.absent}" for gain in found if gain.absent]
    return "\n".join([*lines, *([""] if absent else []), *absent]) + "\n"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
