"""Sequence parallelism over gloo: 2 and 4 processes against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry, attention, merge_states
from liteattention_rocm.lite.parallel import SeqParallel

TILE = TileGeometry(64, 64, 32)
BATCH, ROWS, HEADS, KV_HEADS, WIDTH = 1, 1024, 8, 4, 32
STEPS = 3
POLICIES = {
    "plain": SkipPolicy(threshold=-5.0),
    "exact": SkipPolicy(threshold=float("-inf")),
    "length": SkipPolicy(threshold=(-1.0, 0.0), threshold_scale="length"),
    "layers": SkipPolicy(threshold=-20.0, layer_thresholds={"x": -3.0}, branches="shared"),
    "budget": SkipPolicy(budget=(0.1, 0.2), layer_budgets={"y": 0.0}),
    # across the borders of 2 and 4 parts; the last quarter of the keys is left out altogether
    "ranges": SkipPolicy(threshold=-3.0, must_do=((200, 600),), must_skip=((768, 1024),)),
}


def tensors(step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Runs of 64 tokens that are alike: they attend to runs like themselves."""
    draw = torch.Generator().manual_seed(step // 2)
    alike = torch.randint(0, 5, (BATCH, ROWS // 64), generator=draw).repeat_interleave(64, dim=1)
    k = 1.5 * torch.randn(5, KV_HEADS, WIDTH, generator=draw)[alike]
    q = k.repeat_interleave(HEADS // KV_HEADS, dim=2)
    q = q + 0.3 * torch.randn(q.shape, generator=draw)
    return [x.to(dtype) for x in (q, k, torch.randn(k.shape, generator=draw))]


def part(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return x.chunk(ranks, dim=1)[rank].contiguous()


def work(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    found: dict[str, Any] = {}
    for mode in ("ulysses", "ring"):
        for name, policy in POLICIES.items():
            parallel = SeqParallel(policy, mode=mode, geometry=TILE)
            outs = [
                parallel(*(part(x, rank, ranks) for x in tensors(step)), step=step, layer="x")
                for step in range(STEPS)
            ]
            splits = range(ranks) if mode == "ring" else [None]
            lists = {}
            for split in splits:
                try:
                    lists[split] = parallel.lists("x", split=split)
                except KeyError:
                    continue
            found[mode, name] = (outs, lists, parallel.statistics.to_records())
            parallel.end()
            with pytest.raises(KeyError):
                parallel.lists("x", split=None if mode == "ulysses" else 0)
    with pytest.raises(ValueError, match=r"3 heads.*use mode='ring'"):
        SeqParallel(geometry=TILE)(*(torch.randn(1, 8, 3, WIDTH) for _ in "qkv"), step=0, layer="x")
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, args=(request.param, str(folder)), nprocs=request.param)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


def joined(results: Any, key: tuple[str, str], step: int) -> torch.Tensor:
    return torch.cat([rank[key][0][step] for rank in results], dim=1)


@pytest.mark.parametrize("name", POLICIES)
def test_ulysses_is_one_process(results: Any, name: str) -> None:
    lite = LiteAttention(POLICIES[name], geometry=TILE)
    for step in range(STEPS):
        assert torch.equal(
            joined(results, ("ulysses", name), step), lite(*tensors(step), step=step, layer="x")
        )
    lists = torch.cat([rank["ulysses", name][1][None] for rank in results], dim=1)
    assert torch.equal(lists, lite.lists("x"))
    whole = lite.statistics.to_records()
    for step in range(STEPS):
        for field in ("tiles_total", "tiles_computed", "tiles_kept"):
            assert whole[step][field] == sum(r["ulysses", name][2][step][field] for r in results)
    if name != "exact":
        assert whole[-1]["tiles_computed"] < 0.9 * whole[-1]["tiles_total"]


@pytest.mark.parametrize("name", POLICIES)
def test_ring_is_the_merge_of_its_splits(results: Any, name: str) -> None:
    """Every rank's rows against every split, each with its own lists, in one process."""
    ranks, policy = len(results), POLICIES[name]
    length = ROWS // ranks
    for rank in range(ranks):
        lists = results[rank]["ring", name][1]
        own: dict[int, LiteAttention] = {}
        for split in range(ranks):
            start = split * length
            if name == "ranges" and start >= 768:
                continue
            change: dict[str, Any] = {}
            if name == "ranges":
                last = start + length
                change = {
                    "must_do": [(max(200, start) - start, min(600, last) - start)]
                    if max(200, start) < min(600, last)
                    else [],
                    "must_skip": [(max(768, start) - start, length)] if last > 768 else [],
                }
            if name == "length":
                absolute = tuple(t - torch.tensor(float(ROWS)).log2().item() for t in (-1.0, 0.0))
                change = {"threshold": absolute, "threshold_scale": "absolute"}
            own[split] = LiteAttention(
                SkipPolicy(**{**policy.model_dump(), **change}), geometry=TILE
            )
        for step in range(STEPS):
            q, k, v = tensors(step)
            parts = [
                lite(
                    part(q, rank, ranks), part(k, split, ranks), part(v, split, ranks),
                    step=step, layer="x", return_lse=True,
                )
                for split, lite in own.items()
            ]  # fmt: skip
            wanted = merge_states([out for out, _ in parts], [lse for _, lse in parts])[0]
            assert torch.equal(results[rank]["ring", name][0][step], wanted)
        assert lists.keys() == own.keys()
        for split, lite in own.items():
            assert torch.equal(lists[split], lite.lists("x"))


def test_a_ring_that_skips_nothing_is_dense(results: Any) -> None:
    for step in range(STEPS):
        alone = attention(*tensors(step))
        q, k, v = (x.double() for x in tensors(step))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * WIDTH**-0.5
        dense = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        bound = 2 * (alone - dense).abs().max()
        assert (joined(results, ("ring", "exact"), step) - dense).abs().max() <= bound < 2e-5


def test_it_needs_a_group_and_a_known_mode() -> None:
    with pytest.raises(ValueError, match=r"mode must be .*; torch.distributed has no process"):
        SeqParallel(mode="tree")  # type: ignore[arg-type]
