"""diffusers' own context parallelism on a whole pipeline, over gloo, against one process."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
import torch.distributed as dist

from liteattention_diffusers import Handle, disable, enable
from liteattention_e2e import pixel_vae, tiny
from liteattention_rocm import LiteAttention, SkipPolicy, merge_states
from liteattention_rocm.lite import bitmap, exchange, peers

from .diffusers_cases import PROMPT, TILE

HEADS, TOKENS = 4, 1024
#: Ranges over all tokens, across the borders of every split; a quarter of the keys is left out.
RANGES = {"must_do": ((200, 300),), "must_skip": ((768, 1024),)}
POLICY = SkipPolicy(threshold=-2.0, warmup_steps=0, **RANGES)
#: A ring judges a tile within its split, so fewer of them are negligible.
BOLD = SkipPolicy(threshold=-0.5, warmup_steps=0, **RANGES)
BY_HEAD = SkipPolicy(
    budget=0.1, layer_budgets={"*": (0.1, 0.6, 0.4, 0.0)}, warmup_steps=0, **RANGES
)
#: For sequences of any length, and heads that the processes cannot share equally.
UNCUT = SkipPolicy(threshold=-2.0, must_do=((200, 300),), warmup_steps=0)
ODD_HEADS = 3
EXACT = SkipPolicy(threshold=float("-inf"), warmup_steps=0)
#: name -> ring degree, Ulysses degree, what may be skipped; by number of processes.
MODES = {
    2: {
        "ulysses": (1, 2, POLICY),
        "balanced": (1, 2, POLICY),
        "peers": (1, 2, POLICY),
        "peers, balanced": (1, 2, POLICY),
        "by head": (1, 2, BY_HEAD),
        "by head, balanced": (1, 2, BY_HEAD),
        "ring": (2, 1, BOLD),
        "exact ring": (2, 1, EXACT),
    },
    4: {"ulysses": (1, 4, POLICY), "ring": (4, 1, BOLD), "both": (2, 2, BOLD)},
}


def pipeline(heads: int = HEADS) -> Any:
    return tiny.wan_pipeline(heads=heads, peaked=1.5)


def video(pipe: Any, latents: torch.Tensor | None = None) -> np.ndarray:
    frames: np.ndarray = pipe(
        PROMPT, height=32, width=64, num_frames=pixel_vae.pipeline_num_frames(8),
        num_inference_steps=4, guidance_scale=3.0, generator=torch.Generator().manual_seed(0),
        max_sequence_length=tiny.TEXT_LENGTH, output_type="np", latents=latents,
    ).frames[0]  # fmt: skip
    return frames


def odd_video(pipe: Any) -> np.ndarray:
    """One of 9 x 9 x 11 tokens."""
    draw = torch.Generator().manual_seed(0)
    return video(pipe, torch.randn(1, 12, 9, 18, 22, generator=draw))


def gather_unequal(found: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
    """``all_gather`` as NCCL has it; gloo wants equal parts."""
    parts: list[Any] = [None] * len(found)
    dist.all_gather_object(parts, mine, group)
    for place, part in zip(found, parts, strict=True):
        place.copy_(part)


def watched_video(pipe: Any) -> tuple[np.ndarray, list[str]]:
    """A video, and in which order tensors are sent for heads and queries normalised."""
    order: list[str] = []

    def sending(send: Any) -> Any:
        def sent(*arguments: Any) -> Any:
            order.append("sent")
            return send(*arguments)

        return sent

    hooks = [
        block.attn1.norm_q.register_forward_hook(lambda *_: order.append("norm"))
        for block in pipe.transformer.blocks
    ]
    with contextlib.ExitStack() as stack:
        for kind in (exchange.Messages, peers.PeerMemory):
            stack.enter_context(mock.patch.object(kind, "send", sending(kind.send)))
        frames = video(pipe)
    for hook in hooks:
        hook.remove()
    return frames, order


def lists_of(handle: Handle, splits: list[int | None]) -> dict[Any, torch.Tensor]:
    found = {}
    for layer, branch, split in itertools.product(handle.layers, ("cond", "uncond"), splits):
        try:
            found[layer, branch, split] = handle.lists(layer, branch, split=split)
        except KeyError:
            continue
    return found


def work(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.accelerator.device_count = lambda: 1  # diffusers numbers a machine's GPUs with it
    made = {}
    for name, (ring, ulysses, policy) in MODES[ranks].items():
        config = diffusers.ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
        pipe = pipeline()
        if name == "ring":  # either may come first
            pipe.transformer.enable_parallelism(config=config)
            handle = enable(pipe, policy, geometry=TILE)
        else:
            handle = enable(
                pipe, policy, geometry=TILE, balance=name.endswith("balanced"),
                peer_memory=name.startswith("peers"),
            )  # fmt: skip
            pipe.transformer.enable_parallelism(config=config)
        video(pipe)  # leaves nothing to the next run
        frames, order = watched_video(pipe)
        if ring == 1:  # v is under way before q is normalised, but where heads may be dealt
            ahead, dealing = ["sent", "norm", "sent", "sent"], ["norm", "sent", "sent", "sent"]
            if not name.endswith("balanced"):
                dealing = ahead
            assert order == [x for step in (ahead, dealing, dealing, ahead) for x in step * 2 * 2]
            assert not any(block.attn1.to_v._forward_hooks for block in pipe.transformer.blocks)
            ways = {parallel.peer_memory for parallel in handle._splits.values()}
            assert ways == {name.startswith("peers")}
        splits = [*range(ring)] if ring > 1 else [None]
        records = [row for row in handle.statistics.to_records() if row["generation"] == handle.run]
        heads = {(x, y): handle.heads(x, y) for x in handle.layers for y in ("cond", "uncond")}
        made[name] = (frames, lists_of(handle, splits), records, heads)
        if ring == 1:  # says what there is
            for layer, branch in heads:
                kept = handle.kept_tiles(layer, branch)
                assert torch.equal(bitmap.pack(kept), handle.lists(layer, branch))
            with pytest.raises(KeyError, match=r"no list of layer 'none'.*'cond'.*'uncond'"):
                handle.lists("none", "cond")
        disable(pipe)
        # what processes write to of each other's is given back, though the handle is there still
        assert "/liteattention-" not in Path("/proc/self/maps").read_text(encoding="ascii")
    pipe = pipeline()  # the dense kernel by its name, in diffusers' own ring
    pipe.transformer.set_attention_backend("liteattention_rocm")
    pipe.transformer.enable_parallelism(config=diffusers.ContextParallelConfig(ring_degree=ranks))
    made["dense"] = (video(pipe), {}, [])
    pipe.transformer.reset_attention_backend()
    pipe = pipeline()
    enable(pipe, geometry=TILE)
    pipe.transformer.enable_parallelism(
        config=diffusers.ContextParallelConfig(ring_degree=ranks, ring_anything=True)
    )
    with pytest.raises(
        ValueError, match=r"ring_anything splits .*\(with ulysses_anything\) instead"
    ):
        video(pipe)
    if ranks == 2:
        pipe = pipeline(ODD_HEADS)
        handle = enable(pipe, UNCUT, geometry=TILE)
        pipe.transformer.enable_parallelism(
            config=diffusers.ContextParallelConfig(ulysses_degree=ranks, ulysses_anything=True)
        )
        with mock.patch.object(dist, "all_gather", gather_unequal):
            frames = odd_video(pipe)
        made["unequal"] = (frames, lists_of(handle, [None]), handle.statistics.to_records())
        disable(pipe)
        enable(
            pipe,
            SkipPolicy(budget=0.1, layer_budgets={"*": (0.1, 0.6, 0.4)}, warmup_steps=0),
            geometry=TILE,
        )
        with pytest.raises(ValueError, match="3 budgets by head, but the call has"):
            odd_video(pipe)
    torch.save(made, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, args=(request.param, str(folder)), nprocs=request.param)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


class OneProcess:
    """What a ring of ``ranks`` computes, in one process: rows against every split of the keys."""

    def __init__(self, handle: Handle, ranks: int) -> None:
        self.ranks = ranks
        self.length = TOKENS // ranks
        self.handle = handle
        self.lite: dict[tuple[int, int], LiteAttention] = {}
        for layer in handle._layers:
            layer._attend = self.attend

    def policy(self, split: int) -> SkipPolicy | None:
        whole, start = self.handle.policy, split * self.length

        def within(ranges: Any) -> tuple[tuple[int, int], ...]:
            moved = ((max(a - start, 0), min(b - start, self.length)) for a, b in ranges)
            return tuple((a, b) for a, b in moved if a < b)

        must_skip = within(whole.must_skip)
        if must_skip == ((0, self.length),):
            return None
        return whole.model_copy(update={"must_do": within(whole.must_do), "must_skip": must_skip})

    def attend(self, layer: Any, q: Any, k: Any, v: Any, scale: Any, out: torch.Tensor) -> None:
        call = self.handle._position(layer)
        for rank in range(self.ranks):
            rows = slice(rank * self.length, (rank + 1) * self.length)
            parts = []
            for split in range(self.ranks):
                keys = slice(split * self.length, (split + 1) * self.length)
                policy = self.policy(split)
                if policy is None:
                    continue
                lite = self.lite.setdefault((rank, split), LiteAttention(policy, geometry=TILE))
                inputs = (x.contiguous() for x in (q[:, rows], k[:, keys], v[:, keys]))
                parts.append(lite(*inputs, scale=scale, return_lse=True, **call))
            merged = merge_states([o for o, _ in parts], [lse for _, lse in parts])[0]
            out[:, rows] = merged

    def lists(self, rank: int, layer: str, branch: str, split: int) -> torch.Tensor:
        return self.lite[rank, split].lists(layer, branch, self.handle.run)


def same_picture(one: np.ndarray, other: np.ndarray) -> bool:
    """Up to the last bits that a matrix product of fewer rows may round otherwise."""
    assert one.shape == other.shape and one.std() > 0.05
    return bool(np.abs(one - other).max() < 1e-4)


def skipped(records: list[dict[str, Any]]) -> float:
    total = sum(row["tiles_total"] for row in records)
    return 1 - sum(row["tiles_computed"] for row in records) / total


@pytest.mark.parametrize("policy", [POLICY, BY_HEAD], ids=["threshold", "by head"])
def test_ulysses_is_one_process(results: Any, policy: SkipPolicy) -> None:
    modes = MODES[len(results)]
    names = [name for name, mode in modes.items() if mode[1:] == (len(results), policy)]
    pipe = pipeline()
    with enable(pipe, policy, geometry=TILE) as handle:
        frames = video(pipe)
        lists = lists_of(handle, [None])
        whole = handle.statistics.to_records()
    assert 0.3 < skipped(whole) < 0.9
    assert len(lists) == 4
    for name in names:
        dealt = 0
        for rank in results:
            assert same_picture(rank[name][0], frames)
        for key, value in lists.items():
            together = torch.cat([rank[name][1][key] for rank in results], dim=1)
            heads = [rank[name][3][key[:2]] for rank in results]
            if heads[0] is not None:
                dealt += 1
                together = together[:, torch.tensor(heads).flatten().argsort()]
            assert torch.equal(together, value), key
        assert (dealt > 0) == name.endswith("balanced")
        for index, row in enumerate(whole):
            for field in ("tiles_total", "tiles_computed", "tiles_kept"):
                assert sum(rank[name][2][index][field] for rank in results) == row[field]


@pytest.mark.parametrize("results", [2], indirect=True)
def test_unequal_parts_are_one_process(results: Any) -> None:
    """Odd numbers of tokens and heads, which diffusers exchanges."""
    pipe = pipeline(ODD_HEADS)
    with enable(pipe, UNCUT, geometry=TILE) as handle:
        frames = odd_video(pipe)
        lists = lists_of(handle, [None])
        whole = handle.statistics.to_records()
    assert 0.3 < skipped(whole) < 0.9
    assert len(lists) == 4
    for rank in results:
        assert same_picture(rank["unequal"][0], frames)
    for key, value in lists.items():
        parts = [rank["unequal"][1][key] for rank in results]
        assert [part.shape[1] for part in parts] == [2, 1]
        assert torch.equal(torch.cat(parts, dim=1), value), key
    for rows in zip(whole, *(rank["unequal"][2] for rank in results), strict=True):
        for field in ("tiles_total", "tiles_computed", "tiles_kept"):
            assert sum(row[field] for row in rows[1:]) == rows[0][field]


RINGS = [(2, "ring"), (4, "ring"), (4, "both")]  # processes and how they are arranged


@pytest.mark.parametrize(
    ("results", "name"),
    [pytest.param(*ring, marks=[pytest.mark.slow] * (ring[0] == 4)) for ring in RINGS],
    indirect=["results"],
)
def test_a_ring_keeps_lists_by_the_ranks_of_the_keys(results: Any, name: str) -> None:
    ring, ulysses, policy = MODES[len(results)][name]
    pipe = pipeline()
    with enable(pipe, policy, geometry=TILE) as handle:
        oracle = OneProcess(handle, ring)
        frames = video(pipe)
        splits = {split for _, split in oracle.lite}
        assert splits == set(range(ring)) - ({3} if ring == 4 else set()), "split 3 is left out"
        for number, rank in enumerate(results):
            assert same_picture(rank[name][0], frames)
            assert rank[name][1].keys() == {
                (layer, branch, split)
                for layer in handle.layers
                for branch in ("cond", "uncond")
                for split in splits
            }
            heads = slice(
                number % ulysses * HEADS // ulysses, (number % ulysses + 1) * HEADS // ulysses
            )
            for (layer, branch, split), value in rank[name][1].items():
                wanted = oracle.lists(number // ulysses, layer, branch, split)[:, heads]
                assert torch.equal(value, wanted), (number, layer, branch, split)
    rows = [row for rank in results for row in rank[name][2]]
    wanted_rows = [row for lite in oracle.lite.values() for row in lite.statistics.to_records()]
    for field in ("tiles_total", "tiles_computed", "tiles_kept"):
        assert sum(r[field] for r in rows) == sum(r[field] for r in wanted_rows)
    assert 0.05 < skipped(rows) < 0.9


@pytest.mark.parametrize("results", [2], indirect=True)
def test_a_ring_that_skips_nothing_is_one_process(results: Any) -> None:
    pipe = pipeline()
    with enable(pipe, EXACT, geometry=TILE):
        frames = video(pipe)
    for rank in results:
        assert same_picture(rank["exact ring"][0], frames)
        assert skipped(rank["exact ring"][2]) == 0.0


def test_denoisers_may_share_the_processes_in_different_ways() -> None:
    """Meshes over all processes have one group, whichever way each of them shares a sequence."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pipe = pipeline()
    try:
        handle, group = enable(pipe, geometry=TILE), dist.group.WORLD
        assert group is not None
        made = {mode: handle._parallel(group, mode) for mode in ("ulysses", "ring")}
        for mode, parallel in made.items():
            assert parallel.mode == mode and handle._parallel(group, parallel.mode) is parallel
    finally:
        disable(pipe)
        dist.destroy_process_group()


def test_the_dense_kernel_in_diffusers_own_ring(results: Any) -> None:
    pipe = pipeline()
    with enable(pipe, EXACT, geometry=TILE):
        frames = video(pipe)
    for rank in results:
        assert same_picture(rank["dense"][0], frames)
