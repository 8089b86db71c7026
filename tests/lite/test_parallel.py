"""Sequence parallelism over gloo: 2 and 4 processes against one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from liteattention_rocm import (
    LiteAttention,
    SeqParallel,
    SkipPolicy,
    TileGeometry,
    attention,
    merge_states,
)
from liteattention_rocm.lite import bitmap, deal, exchange, peers

TILE = TileGeometry(64, 64, 32)
BATCH, ROWS, HEADS, KV_HEADS, WIDTH = 1, 1024, 8, 4, 32
STEPS = 3
#: How ranks exchange: by messages, or through each other's memory.
WAYS = {"messages": False, "peers": True}
POLICIES = {
    "plain": SkipPolicy(threshold=-5.0, warmup_steps=0),
    "exact": SkipPolicy(threshold=float("-inf"), warmup_steps=0),
    "length": SkipPolicy(
        threshold=(-1.0, 0.0),
        threshold_scale="length",
        layer_thresholds={"y": (-2.0, 0.0)},
        warmup_steps=0,
    ),
    "layers": SkipPolicy(
        threshold=-20.0, layer_thresholds={"x": -3.0}, branches="shared", warmup_steps=0
    ),
    "budget": SkipPolicy(budget=(0.1, 0.2), layer_budgets={"y": 0.0}, warmup_steps=0),
    # nothing for the heads of the first rank of two
    "by head": SkipPolicy(
        budget=0.1,
        layer_budgets={"x": tuple(0.08 * max(head - 3, 0) for head in range(HEADS))},
        warmup_steps=0,
    ),
    "by step and head": SkipPolicy(
        budget=0.1,
        layer_budgets={
            "x": tuple(tuple(0.04 * h * (s >= h % 3) for h in range(HEADS)) for s in range(3))
        },
        warmup_steps=1,
    ),
    # across the borders of 2 and 4 parts; the last quarter of the keys is left out altogether
    "ranges": SkipPolicy(
        threshold=-3.0, must_do=((200, 600),), must_skip=((768, 1024),), warmup_steps=0
    ),
}

IN_VAIN = (0, 1, 2, 2, 3, 4)
#: Rings whose second half of the keys is left out in some steps; the ranges touch.
HALF = ((512, 768), (768, 1024))
HALVED = {
    "not enabled": SkipPolicy(threshold=-3.0, must_skip=HALF, enabled=False, warmup_steps=0),
    "warm-up": SkipPolicy(threshold=float("-inf"), must_skip=HALF, warmup_steps=1),
    "last step": SkipPolicy(threshold=float("-inf"), must_skip=HALF, last_step=0, warmup_steps=0),
}
#: Policies of the steps of a ring, which leave its second half out in step 2.
_LEAVES_OUT = SkipPolicy(threshold=-5.0, must_skip=HALF, warmup_steps=0)
PASSED_OVER = {
    "once": [POLICIES["plain"]] * 2 + [_LEAVES_OUT] + [POLICIES["plain"]] * 2,
    "after dense steps": [SkipPolicy(threshold=-5.0, must_skip=HALF, warmup_steps=2)] * 3
    + [POLICIES["plain"]],
}
#: In which of the steps 0 and 1.
LEFT_OUT = {"not enabled": (False, False), "warm-up": (False, True), "last step": (True, False)}


def tensors(step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Runs of 64 tokens that are alike: they attend to runs like themselves."""
    draw = torch.Generator().manual_seed(int(step) // 2)
    alike = torch.randint(0, 5, (BATCH, ROWS // 64), generator=draw).repeat_interleave(64, dim=1)
    k = 1.5 * torch.randn(5, KV_HEADS, WIDTH, generator=draw)[alike]
    q = k.repeat_interleave(HEADS // KV_HEADS, dim=2)
    q = q + 0.3 * torch.randn(q.shape, generator=draw)
    return [x.to(dtype) for x in (q, k, torch.randn(k.shape, generator=draw))]


def unequal(step: int) -> list[torch.Tensor]:
    """The same with heads of k that skip much, and others that skip nearly nothing."""
    q, k, v = tensors(step)
    return [q, k * torch.tensor([1.5, 1.2, 0.1, 0.05])[:, None], v]


def history(call: Any) -> list[torch.Tensor]:
    """Repeated steps, one left out, two branches, and a generation begun anew."""
    steps = (0, 1, 1, 2, np.int64(4), 5, 5)
    outs = [call(unequal(step), step=step, branch=name) for step in steps for name in ("a", "b")]
    anew = (0, 1, 2)
    return outs + [call(unequal(step), step=step, branch=name) for step in anew for name in "ab"]


def abandoned(parallel: SeqParallel, rank: int, ranks: int) -> None:
    """A generation that dies of an error on one rank, and on the others of waiting for it."""

    def die(*_: Any, **__: Any) -> Any:
        raise RuntimeError("gone")

    for step in range(4):
        if step == 3:
            vars(parallel)["_heads_for_rows" if rank else "_attend"] = die
        try:
            parallel(*(part(x, rank, ranks) for x in unequal(step)), step=step, layer="x")
        except RuntimeError:
            assert step == 3
    vars(parallel).pop("_heads_for_rows", None)
    vars(parallel).pop("_attend", None)


def refused(parallel: SeqParallel, rank: int, ranks: int) -> list[torch.Tensor]:
    """Steps of which one is refused for its arguments, and an earlier one after it."""

    def call(step: int, **options: Any) -> torch.Tensor:
        mine = (part(x, rank, ranks) for x in unequal(step))
        return parallel(*mine, step=step, layer="x", generation="refused", **options)

    for step in range(4):
        call(step)
    records = parallel.statistics.to_records()
    with pytest.raises(ValueError, match="num_steps must be >= 1"):
        call(4, num_steps=0)
    with pytest.raises(ValueError, match="rounding 'rtz' is for bf16 outputs"):
        call(4, rounding="rtz")
    outs = [call(3), call(4)]
    assert parallel.statistics.to_records()[: len(records)] == records
    return outs


def ahead(rank: int, ranks: int, peer_memory: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Steps of which v is sent ahead, and numbers of tensors sent for the heads of each step.

    The first three steps get that v, the next one its copy in other memory. In another layer the
    last step gets a v that was written to, and in a third one heads of k are fewer.
    """
    outs, numbers = [], []
    parallel = SeqParallel(POLICIES["plain"], balance=True, peer_memory=peer_memory, geometry=TILE)

    def call(step: int, layer: str, change: Any, group: int = 1) -> None:
        q, k, v = (part(x, rank, ranks) for x in unequal(step))
        if group == 1:
            q = q[:, :, ::2].contiguous()
        kind = peers.PeerMemory if peer_memory else exchange.Messages
        sent = mock.Mock(wraps=parallel._exchange.send)
        with torch.no_grad(), mock.patch.object(kind, "send", sent):
            parallel.begin(v, step=step, layer=layer)
            outs.append(parallel(q, k, change(v), step=step, layer=layer))
        numbers.append(sent.call_count)

    for step in range(5):
        call(step, "x", torch.clone if step == 3 else lambda v: v.flatten(2).view(v.shape))
    for step in range(4):
        call(step, "y", lambda v, step=step: v.mul_(2) if step == 3 else v)
    for step in range(3):
        call(step, "z", lambda v: v, group=2)
    return outs, numbers


def begun_in_vain(rank: int, ranks: int) -> list[torch.Tensor]:
    """Steps before which v was sent ahead for the next one; then for a layer that does not call."""
    outs = []
    parallel = SeqParallel(POLICIES["plain"], balance=True, geometry=TILE)
    with torch.no_grad():
        for step in IN_VAIN:
            q, k, v = (part(x, rank, ranks) for x in unequal(step))
            parallel.begin(v, step=step + 1, layer="x")
            parallel.begin(v, step=step, layer="x")
            outs.append(parallel(q[:, :, ::2].contiguous(), k, v, step=step, layer="x"))
        parallel.begin(v.clone(), step=0, layer="without a call")
        outs.append(parallel(q[:, :, ::2].contiguous(), k, v, step=step, layer="x"))
    assert parallel._not_ahead == {"without a call"}
    return outs


def ring_under(policies: list[SkipPolicy], rank: int, ranks: int) -> Any:
    """Steps of a ring, each under a policy of its own."""
    parallel = SeqParallel(policies[0], mode="ring", geometry=TILE)
    outs = []
    for step, policy in enumerate(policies):
        parallel.policy = policy
        mine = (part(x, rank, ranks) for x in tensors(step))
        outs.append(parallel(*mine, step=step, layer="x"))
    lists = [parallel.lists("x", split=split) for split in range(ranks)]
    return outs, lists, parallel.statistics.to_records()


def failed_on_one_rank(rank: int, ranks: int) -> None:
    """A call of a ring that fails for the first of one rank's parts, and an earlier step."""
    parallel = SeqParallel(POLICIES["plain"], mode="ring", geometry=TILE)
    alone = SeqParallel(POLICIES["plain"], mode="ring", geometry=TILE)
    attend, failures = parallel._attend, [RuntimeError("gone")]

    def fail_once(*tensors: Any, **call: Any) -> Any:
        out = attend(*tensors, **call)
        if failures:
            raise failures.pop()
        return out

    for step in range(4):
        mine = [part(x, rank, ranks) for x in tensors(step)]
        if step < 3 or rank:  # nobody waits for the one that failed
            parallel(*mine, step=step, layer="x")
            continue
        with (
            mock.patch.object(parallel, "_attend", fail_once),
            pytest.raises(RuntimeError, match="gone"),
        ):
            parallel(*mine, step=step, layer="x")
    mine = [part(x, rank, ranks) for x in tensors(2)]
    assert torch.equal(*(one(*mine, step=2, layer="x") for one in (parallel, alone)))
    assert parallel.statistics.to_records() == alone.statistics.to_records()


def begun_anew_with_fewer_rows(rank: int, ranks: int) -> None:
    """A generation under an old name whose sequence is shorter, and steps of the longer one."""
    parallel = SeqParallel(POLICIES["plain"], mode="ring", geometry=TILE)
    alone = SeqParallel(POLICIES["plain"], mode="ring", geometry=TILE)

    def call(one: SeqParallel, step: int, rows: int) -> torch.Tensor:
        mine = (part(x[:, :rows], rank, ranks) for x in tensors(step))
        return one(*mine, step=step, layer="x")

    for step in range(3):
        call(parallel, step, ROWS)
    for step in range(2):
        assert torch.equal(call(parallel, step, ROWS // 2), call(alone, step, ROWS // 2))
        for split in range(ranks):
            lists = (one.lists("x", split=split) for one in (parallel, alone))
            assert torch.equal(*lists)
    assert parallel.statistics.to_records() == alone.statistics.to_records()
    call(parallel, 2, ROWS)
    last = parallel.statistics.to_records()[-1]
    assert last["step"] == 2 and last["tiles_computed"] == last["tiles_total"]


def another_policy(mode: Any, rank: int, ranks: int) -> tuple[list[torch.Tensor], Any]:
    """A generation under "ranges", after one under "plain"."""
    parallel = SeqParallel(POLICIES["plain"], mode=mode, geometry=TILE)
    for name in ("plain", "ranges"):
        parallel.policy = POLICIES[name]
        outs = [
            parallel(*(part(x, rank, ranks) for x in tensors(step)), step=step, layer="x")
            for step in range(STEPS)
        ]
    return outs, parallel.statistics.to_records()


def new_ranges(call: Any, policy: Any) -> list[torch.Tensor]:
    """A generation whose token ranges change after its heads were dealt."""
    outs = []
    for step in range(6):
        policy("ranges" if step > 2 else "plain")
        outs.append(call(unequal(step), step=step))
    return outs


def after_refusals(mode: Any, rank: int, ranks: int) -> list[torch.Tensor]:
    """Calls that all ranks refuse, by the policy and by the engine, then one that they take."""
    policy = SkipPolicy(threshold=float("-inf"), must_do=((ROWS - 8, ROWS),), warmup_steps=0)
    parallel = SeqParallel(policy, mode=mode, geometry=TILE)
    q, k, v = tensors(0)
    for cut, reason in (
        ((slice(None), slice(0, ROWS // 2)), "ranges.* past|end past"),
        ((..., slice(0, 12)), "head dim must be a multiple of 8"),
    ):
        with pytest.raises(ValueError, match=reason):
            parallel(*(part(x[cut], rank, ranks) for x in (q, k, v)), step=0, layer="x")
    if mode == "ring":  # the engine refuses the first split alone, which each rank meets elsewhere
        small = TileGeometry(64, 32, 32)
        policy = SkipPolicy(threshold=float("-inf"), must_skip=((0, 32),), warmup_steps=0)
        with pytest.raises(ValueError, match="k_block must be 64, got 32"):
            SeqParallel(policy, mode="ring", geometry=small, engine="cpu")(
                *(part(x, rank, ranks) for x in (q, k, v)), step=0, layer="x"
            )
    return [parallel(*(part(x, rank, ranks) for x in (q, k, v)), step=0, layer="x")]


def lengths(rank: int, ranks: int) -> None:
    """Two sequences in a ring, whose lists are read while both are under way."""
    parallel = SeqParallel(POLICIES["plain"], mode="ring", geometry=TILE)
    for generation, rows in (("long", ROWS), ("short", ROWS // 2)):
        mine = (part(x[:, :rows], rank, ranks) for x in tensors(0))
        parallel(*mine, step=0, layer="x", generation=generation)
    for generation, rows in (("long", ROWS), ("short", ROWS // 2)):
        blocks = rows // ranks // TILE.q_block
        assert parallel.lists("x", generation=generation, split=0).shape[2] == blocks
    with pytest.raises(KeyError, match="no lists of generation 'other'"):
        parallel.lists("x", generation="other", split=0)


def under_autocast(mode: Any, rank: int, ranks: int) -> list[torch.Tensor]:
    """Steps as they are, and under an autocast that has another 16-bit dtype."""
    outs = []
    for enabled in (False, True):
        parallel = SeqParallel(POLICIES["plain"], mode=mode, geometry=TILE)
        for step in range(STEPS):
            mine = [part(x, rank, ranks) for x in tensors(step, torch.bfloat16)]
            with torch.autocast("cpu", torch.float16, enabled):
                parallel.begin(mine[2], step=step, layer="x")
                outs.append(parallel(*mine, step=step, layer="x"))
    return outs


def part(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return x.chunk(ranks, dim=1)[rank].contiguous()


def work(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    found: dict[str, Any] = {}
    for mode, way in (("ulysses", "messages"), ("ulysses", "peers"), ("ring", "messages")):
        for name, policy in POLICIES.items():
            parallel = SeqParallel(
                policy, mode=mode, balance=True, peer_memory=WAYS[way], geometry=TILE
            )
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
                kept = parallel.kept_tiles("x", split=split)
                assert kept.shape[3] == ROWS // len(splits) // TILE.k_block
                assert torch.equal(bitmap.pack(kept), lists[split])
            heads = None if mode == "ring" else parallel.heads("x")
            found[mode, way, name] = (outs, lists, parallel.statistics.to_records(), heads)
            parallel.end()
            with pytest.raises(KeyError):
                parallel.lists("x", split=None if mode == "ulysses" else 0)
            with pytest.raises(ValueError, match="give split in a ring, and only there"):
                parallel.kept_tiles("x", split=0 if mode == "ulysses" else None)
    for balance, way in itertools.product((True, False), WAYS):
        parallel = SeqParallel(
            POLICIES["plain"], balance=balance, peer_memory=WAYS[way], geometry=TILE
        )
        if balance:
            abandoned(parallel, rank, ranks)

        def call(whole: list[torch.Tensor], **where: Any) -> torch.Tensor:
            mine = (part(x, rank, ranks) for x in whole)
            return parallel(*mine, layer="x", generation="next", **where)  # noqa: B023

        outs = history(call)
        records = [r for r in parallel.statistics.to_records() if r["generation"] == "next"]
        lists = {b: parallel.lists("x", b, "next") for b in ("a", "b")}
        heads = [parallel.heads("x", b, "next") for b in ("a", "b")]
        found["history", balance, way] = (outs, lists, records, heads)
    for way, peer_memory in WAYS.items():
        parallel = SeqParallel(
            POLICIES["plain"], balance=True, peer_memory=peer_memory, geometry=TILE
        )
        found["refused", way] = (refused(parallel, rank, ranks),)
        found["ahead", way] = ahead(rank, ranks, peer_memory)
    changed = SeqParallel(POLICIES["plain"], balance=True, geometry=TILE)
    found["new ranges"] = (
        new_ranges(
            lambda whole, step: changed(
                *(part(x, rank, ranks) for x in whole), step=step, layer="x"
            ),
            lambda name: setattr(changed, "policy", POLICIES[name]),
        ),
        changed.lists("x"),
        changed.heads("x"),
    )
    for name, policy in HALVED.items():
        parallel = SeqParallel(policy, mode="ring", geometry=TILE)
        found["halved", name] = (
            [
                parallel(*(part(x, rank, ranks) for x in tensors(step)), step=step, layer="x")
                for step in range(2)
            ],
        )
    for name, policies in PASSED_OVER.items():
        found["passed over", name] = ring_under(policies, rank, ranks)
    found["begun in vain"] = (begun_in_vain(rank, ranks),)
    begun_anew_with_fewer_rows(rank, ranks)
    failed_on_one_rank(rank, ranks)
    lengths(rank, ranks)
    for mode in ("ulysses", "ring"):
        found["another policy", mode] = another_policy(mode, rank, ranks)
        found["after refusals", mode] = (after_refusals(mode, rank, ranks),)
        found["autocast", mode] = (under_autocast(mode, rank, ranks),)
    q, k, v = unequal(0)
    nothing = SeqParallel(
        SkipPolicy(must_skip=((0, 512), *HALF), threshold=-6.0, warmup_steps=0),
        mode="ring",
        geometry=TILE,
    )
    with pytest.raises(ValueError, match="must_skip covers all 1024 keys, so that nothing is"):
        nothing(*(part(x, rank, ranks) for x in (q, k, v)), step=0, layer="x")
    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor, got NoneType"):
        parallel(None, k, v, step=0, layer="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layer must be a string, got list"):
        parallel.begin(v, step=0, layer=["x"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be of one dtype"):
        parallel(q, k.bfloat16(), v.bfloat16(), step=0, layer="x")
    for mode in ("ulysses", "ring"):
        with pytest.raises(ValueError, match=r"q requires grad.*use torch.no_grad\(\)"):
            SeqParallel(mode=mode, geometry=TILE)(
                q.clone().requires_grad_(), k, v, step=0, layer="x"
            )
    with pytest.raises(ValueError, match=r"3 heads.*use mode='ring'"):
        SeqParallel(geometry=TILE)(*(torch.randn(1, 8, 3, WIDTH) for _ in "qkv"), step=0, layer="x")
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, args=(request.param, str(folder)), nprocs=request.param)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


def whole_lists(parts: list[torch.Tensor], heads: list[tuple[int, ...] | None]) -> torch.Tensor:
    """Lists of all ranks, by heads in their order."""
    together = torch.cat(parts, dim=1)
    if heads[0] is None:
        return together
    every = [head for each in heads for head in each or ()]
    assert sorted(every) == list(range(HEADS))
    return together[:, [every.index(head) for head in range(HEADS)]]


def joined(results: Any, key: Any, step: int) -> torch.Tensor:
    return torch.cat([rank[key][0][step] for rank in results], dim=1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", POLICIES)
def test_ulysses_is_one_process(results: Any, name: str, way: str) -> None:
    lite = LiteAttention(POLICIES[name], geometry=TILE)
    for step in range(STEPS):
        wanted = lite(*tensors(step), step=step, layer="x")
        assert torch.equal(joined(results, ("ulysses", way, name), step), wanted)
    found = [rank["ulysses", way, name] for rank in results]
    lists = whole_lists([each[1][None] for each in found], [each[3] for each in found])
    assert torch.equal(lists, lite.lists("x"))
    whole = lite.statistics.to_records()
    for step in range(STEPS):
        for field in ("tiles_total", "tiles_computed", "tiles_kept"):
            assert whole[step][field] == sum(r[2][step][field] for r in found)
    if name != "exact":
        assert whole[-1]["tiles_computed"] < 0.9 * whole[-1]["tiles_total"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("balance", [True, False])
def test_heads_dealt_by_their_tiles_are_one_process(results: Any, balance: bool, way: str) -> None:
    lite = LiteAttention(POLICIES["plain"], geometry=TILE)
    wanted = history(lambda whole, **where: lite(*whole, layer="x", **where))
    for index, out in enumerate(wanted):
        assert torch.equal(joined(results, ("history", balance, way), index), out)
    found = [rank["history", balance, way] for rank in results]
    for index, branch in enumerate("ab"):
        heads = [each[3][index] for each in found]
        assert (heads[0] is not None) == (balance and len(found) < KV_HEADS)
        lists = whole_lists([each[1][branch] for each in found], heads)
        assert torch.equal(lists, lite.lists("x", branch))
    whole = lite.statistics.to_records()
    for index, row in enumerate(whole):
        for field in ("step", "branch"):
            assert all(each[2][index][field] == row[field] for each in found)
        for field in ("tiles_total", "tiles_computed", "tiles_kept"):
            assert sum(each[2][index][field] for each in found) == row[field]
        computed = [each[2][index]["tiles_computed"] for each in found]
        worst = max(computed) * len(computed) / sum(computed)
        if len(results) == 2 and row["step"] > 0:
            assert worst < 1.1 if balance else worst > 1.2, row


def test_token_ranges_that_change_leave_heads_where_they_are(results: Any) -> None:
    lite = LiteAttention(POLICIES["plain"], geometry=TILE)
    wanted = new_ranges(
        lambda whole, step: lite(*whole, step=step, layer="x"),
        lambda name: setattr(lite, "policy", POLICIES[name]),
    )
    for step, out in enumerate(wanted):
        assert torch.equal(joined(results, "new ranges", step), out)
    found = [rank["new ranges"] for rank in results]
    assert (found[0][2] is not None) == (len(found) < KV_HEADS)
    lists = whole_lists([each[1] for each in found], [each[2] for each in found])
    assert torch.equal(lists, lite.lists("x"))


@pytest.mark.parametrize("way", WAYS)
def test_an_earlier_step_after_a_refused_one(results: Any, way: str) -> None:
    """The refused one left no trace: no heads were dealt for it."""
    lite = LiteAttention(POLICIES["plain"], geometry=TILE)
    for step in range(4):
        lite(*unequal(step), step=step, layer="x")
    for index, step in enumerate((3, 4)):
        wanted = lite(*unequal(step), step=step, layer="x")
        assert torch.equal(joined(results, ("refused", way), index), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_v_that_is_sent_ahead_is_taken_up_if_it_is_the_one(results: Any, way: str) -> None:
    lite = LiteAttention(POLICIES["plain"], geometry=TILE)
    steps = [(step, "x") for step in range(5)] + [(step, "y") for step in range(4)]
    steps += [(step, "z") for step in range(3)]
    for index, (step, layer) in enumerate(steps):
        q, k, v = unequal(step)
        if layer != "z":
            q = q[:, :, ::2].contiguous()
        wanted = lite(q, k, 2 * v if (step, layer) == (3, "y") else v, step=step, layer=layer)
        assert torch.equal(joined(results, ("ahead", way), index), wanted), (step, layer)
    for rank in results:
        numbers = rank["ahead", way][1]
        assert numbers[:5] == [3, 3, 3, 4, 3]  # after the copy, none is sent ahead
        assert numbers[5:9] == [3, 3, 3, 4]
        if len(results) == 2:  # once heads are dealt, those of v alone are not enough
            assert numbers[9:] == [3, 4, 3]


def test_a_v_that_is_sent_for_no_call_changes_nothing(results: Any) -> None:
    """Not even the step of the lists of which heads are dealt."""
    lite = LiteAttention(POLICIES["plain"], geometry=TILE)
    for index, step in enumerate((*IN_VAIN, IN_VAIN[-1])):
        q, k, v = unequal(step)
        wanted = lite(q[:, :, ::2].contiguous(), k, v, step=step, layer="x")
        assert torch.equal(joined(results, "begun in vain", index), wanted), index


def test_heads_are_dealt_by_what_they_kept() -> None:
    assert deal.by_tiles([9, 8, 2, 1], 2) == (0, 3, 1, 2)
    assert deal.by_tiles([5, 5, 5, 5, 5, 5], 3) == (0, 3, 1, 4, 2, 5)
    assert deal.by_tiles([0] * 6, 3) == deal.in_order(6)
    assert deal.by_tiles([100, 1, 1, 1, 1, 1], 3) == (0, 5, 1, 3, 2, 4)  # equally many to each
    assert deal.most([9, 8, 2, 1], (0, 1, 2, 3), 2) == 17
    draw = torch.Generator().manual_seed(0)
    for ranks in (2, 4, 8):  # 42 % skipped, heads from none to all
        kept = [(1e4 * torch.rand(40, generator=draw) ** 0.72).long().tolist() for _ in range(50)]
        most = sum(deal.most(tiles, deal.by_tiles(tiles, ranks), ranks) for tiles in kept)
        in_order = sum(deal.most(tiles, deal.in_order(40), ranks) for tiles in kept)
        even = sum(map(sum, kept)) / ranks
        assert most < 1.03 * even and in_order > 1.05 * even


@pytest.mark.parametrize("name", POLICIES)
def test_ring_is_the_merge_of_its_splits(results: Any, name: str) -> None:
    """Every rank's rows against every split, each with its own lists, in one process."""
    ranks, policy = len(results), POLICIES[name]
    length = ROWS // ranks
    for rank in range(ranks):
        lists = results[rank]["ring", "messages", name][1]
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
                less = torch.tensor(float(ROWS)).log2().item()
                change = {
                    "threshold": (-1.0 - less, -less),
                    "layer_thresholds": {"y": (-2.0 - less, -less)},
                    "threshold_scale": "absolute",
                }
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
            assert torch.equal(results[rank]["ring", "messages", name][0][step], wanted)
        assert lists.keys() == own.keys()
        for split, lite in own.items():
            assert torch.equal(lists[split], lite.lists("x"))


@pytest.mark.parametrize("name", HALVED)
def test_a_ring_leaves_keys_out_in_steps_that_skip_alone(results: Any, name: str) -> None:
    for step, left_out in enumerate(LEFT_OUT[name]):
        q, k, v = tensors(step)
        keys = 512 if left_out else ROWS
        wanted = attention(q, k[:, :keys], v[:, :keys])
        torch.testing.assert_close(
            joined(results, ("halved", name), step), wanted, atol=2e-5, rtol=0.0
        )


@pytest.mark.parametrize("name", PASSED_OVER)
def test_a_split_that_a_step_leaves_out_starts_anew_and_keeps_its_records(
    results: Any, name: str
) -> None:
    ranks, policies = len(results), PASSED_OVER[name]
    for rank, found in enumerate(results):
        outs, lists, records = found["passed over", name]
        own = [LiteAttention(geometry=TILE) for _ in range(ranks)]
        for step, policy in enumerate(policies):
            q, k, v = tensors(step)
            parts = []
            for split, lite in enumerate(own):
                if split >= ranks // 2 and policy.must_skip and step >= policy.warmup_steps:
                    lite.forget("x")
                    continue
                lite.policy = policy.model_copy(update={"must_skip": ()})
                mine = (part(q, rank, ranks), part(k, split, ranks), part(v, split, ranks))
                parts.append(lite(*mine, step=step, layer="x", return_lse=True))
            wanted = merge_states([out for out, _ in parts], [lse for _, lse in parts])[0]
            assert torch.equal(outs[step], wanted), step
        for lite, listed in zip(own, lists, strict=True):
            assert torch.equal(listed, lite.lists("x"))
        merged = own[0].statistics.merge(*(lite.statistics for lite in own[1:]))
        assert records == merged.to_records()
        assert len(records) == len(policies)


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_another_policy_counts_from_the_next_call(results: Any, mode: str) -> None:
    for rank in results:
        outs, records = rank["another policy", mode]
        wanted, _, wanted_records, _ = rank[mode, "messages", "ranges"]
        assert all(torch.equal(*pair) for pair in zip(outs, wanted, strict=True))
        assert records == wanted_records


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_a_call_that_all_ranks_refuse_leaves_the_next_one_alone(results: Any, mode: str) -> None:
    found = joined(results, ("after refusals", mode), 0)
    torch.testing.assert_close(found, attention(*tensors(0)), atol=2e-5, rtol=0.0)


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_autocast_changes_nothing(results: Any, mode: str) -> None:
    for rank in results:
        (outs,) = rank["autocast", mode]
        for plain, cast in zip(outs[:STEPS], outs[STEPS:], strict=True):
            assert cast.dtype == torch.bfloat16 and torch.equal(plain, cast)


def test_a_ring_that_skips_nothing_is_dense(results: Any) -> None:
    for step in range(STEPS):
        alone = attention(*tensors(step))
        q, k, v = (x.double() for x in tensors(step))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * WIDTH**-0.5
        dense = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        bound = 2 * (alone - dense).abs().max()
        found = joined(results, ("ring", "messages", "exact"), step)
        assert (found - dense).abs().max() <= bound < 2e-5


def test_it_needs_a_group_and_a_known_mode() -> None:
    with pytest.raises(ValueError, match=r"mode must be .*; torch.distributed has no process"):
        SeqParallel(mode="tree")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"peer_memory is for mode 'ulysses'; torch.distributed"):
        SeqParallel(mode="ring", peer_memory=True)
