"""What the ranks of Ulysses exchange, over gloo: the very elements, whatever the layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from liteattention_rocm.lite import exchange, peers

WAYS: list[Any] = [exchange.Messages, peers.PeerMemory]
ROLES: list[exchange.Role] = ["q", "k", "v"]
RANKS, ROWS, HEADS, KV_HEADS = 3, 5, 12, 6
#: dtype, batch, width; the last two cannot be moved by words of 8 bytes.
KINDS = [
    (torch.bfloat16, 1, 32),
    (torch.bfloat16, 2, 8),
    (torch.float32, 2, 6),
    (torch.bfloat16, 2, 6),
    (torch.float32, 1, 5),
]
#: How heads are dealt: in their order, or these of q and of k and v.
ORDERS: list[tuple[list[int] | None, list[int] | None]] = [
    (None, None),
    ([3, 0, 7, 1, 11, 5, 2, 9, 4, 10, 8, 6], [4, 0, 5, 1, 3, 2]),
]


def whole(kind: tuple[torch.dtype, int, int], ranks: int) -> list[torch.Tensor]:
    dtype, batch, width = kind
    draw = torch.Generator().manual_seed(width)
    return [
        torch.randn(batch, ranks * ROWS, heads, width, generator=draw).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same tensor as it may lie in memory."""
    by_head = x.transpose(1, 2).contiguous().transpose(1, 2)
    among = torch.zeros(*x.shape[:3], 2 * x.shape[3] + 1, dtype=x.dtype)[..., 1 : x.shape[3] + 1]
    among.copy_(x)
    return {"contiguous": x.clone(), "heads before rows": by_head, "part of others": among}


def share(x: torch.Tensor, order: list[int] | None, rank: int, ranks: int) -> torch.Tensor:
    """Heads of a rank, all rows."""
    heads = x if order is None else x[:, :, order]
    return heads.chunk(ranks, dim=2)[rank]


def there_and_back(way: exchange.Exchange, group: Any) -> int:
    """All cases on the ranks of a group; returns their number."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    came_back = []
    for kind in KINDS:
        for queries, keys in ORDERS:
            tensors = whole(kind, ranks)
            index = [None if one is None else torch.tensor(one) for one in (queries, keys)]
            orders = [index[0], index[1], index[1]]
            for name in layouts(tensors[0]):
                mine = [layouts(x.chunk(ranks, dim=1)[rank])[name] for x in tensors]
                given = way.rows_for_heads(list(map(way.send, ROLES, mine, orders)))
                for x, y, order in zip(tensors, given, (queries, keys, keys), strict=True):
                    assert y.is_contiguous() and torch.equal(y, share(x, order, rank, ranks))
                out = way.output(given[0])
                out = layouts(given[0])[name] if out is None else out.copy_(given[0])
                for x in given:
                    x.fill_(-1)  # nobody reads them any more
                back = way.heads_for_rows(out, orders[0])
                assert back.is_contiguous()
                came_back.append((back, mine[0]))
    # only now: an output is the caller's, whatever is exchanged after it
    assert all(torch.equal(back, mine) for back, mine in came_back)
    return len(came_back)


def apart(name: str, token: bytes, *, size: int, rank: int, opened: Any) -> torch.Tensor:
    """What a rank finds in a container of its own: no such file, or another one."""
    found: torch.Tensor = opened(name + "gone" * (rank == 1), token[rank == 2 :], size=size)
    return found


def room(size: int, rank: int, create: Any, made: list[str]) -> tuple[str, bytes]:
    """A file for each rank but one, whose memory is full."""
    if rank == 1:
        raise OSError("no room")
    file: tuple[str, bytes] = create(size)
    made.append(file[0])
    return file


def refused(rank: int) -> None:
    """Ranks that cannot reach each other's memory hear of it together, with every reason.

    Then, and after a larger memory could not be had, they go on with what can.
    """
    way = peers.PeerMemory(None)
    against = ["no such memory"] if rank == 1 else []
    for rows in (ROWS, 2 * ROWS):
        with (
            mock.patch.object(peers, "_host", lambda: f"host {rank % 2}"),
            mock.patch.object(peers, "_reasons", lambda device: against.copy()),
            pytest.raises(
                RuntimeError, match=r"peer_memory off: the ranks are on 2 hosts; no such memory$"
            ),
        ):
            way.send("q", torch.zeros(1, rows, HEADS, 8), None)
        made: list[str] = []
        little = functools.partial(room, rank=rank, create=peers._create, made=made)
        with (
            mock.patch.object(peers, "_create", little),
            pytest.raises(RuntimeError, match="peer_memory off: no room"),
        ):
            way.send("q", torch.zeros(1, rows, HEADS, 8), None)
        # what it left behind would stay until the host ends
        assert len(made) == (rank != 1) and not any(Path(name).exists() for name in made)
        elsewhere = functools.partial(apart, rank=rank, opened=peers._opened)
        with (
            mock.patch.object(peers, "_opened", elsewhere),
            pytest.raises(RuntimeError, match=r"off: \[Errno 2\] No such .*; /.* is another file"),
        ):
            way.send("q", torch.zeros(1, rows, HEADS, 8), None)
        whole = torch.arange(RANKS * ROWS * HEADS * 8.0).view(1, -1, HEADS, 8)
        mine = whole.chunk(RANKS, dim=1)[rank]
        given = way.rows_for_heads([way.send("q", mine, None)])[0]
        assert torch.equal(given, share(whole, None, rank, RANKS))


def mapped() -> int:
    """How often memory of ranks is mapped into this process."""
    return Path("/proc/self/maps").read_text(encoding="ascii").count("/liteattention-")


def freed(rank: int) -> None:
    """Memory is gone once it is given back, and there again when it is needed."""
    way = peers.PeerMemory(None)
    way.free()  # there is none
    whole = torch.arange(RANKS * ROWS * HEADS * 8.0).view(1, -1, HEADS, 8)
    mine = whole.chunk(RANKS, dim=1)[rank]
    before = mapped()
    for _ in range(2):
        given = way.rows_for_heads([way.send("q", mine, None)])[0]
        back = way.heads_for_rows(way.output(given).copy_(given), None)
        assert mapped() == before + RANKS
        way.free()
        del given
        assert mapped() == before and torch.equal(back, mine)
    # what was sent into memory that was given back meanwhile
    sent = way.send("q", mine, None)
    way.free()
    given = way.rows_for_heads([sent, way.send("k", mine, None)])
    assert all(torch.equal(x, share(whole, None, rank, RANKS)) for x in given)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    pair = dist.new_group([0, 2])  # whose second rank is another one of all
    cases = 0
    for way in WAYS:
        cases += there_and_back(way(None), None)
        if rank != 1:
            cases += there_and_back(way(pair), pair)
    refused(rank)
    freed(rank)
    Path(folder, str(rank)).write_text(str(cases), encoding="utf-8")
    dist.destroy_process_group()


def test_rows_and_heads_come_to_their_places(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, args=(str(tmp_path),), nprocs=RANKS)
    cases = [int((tmp_path / str(rank)).read_text(encoding="utf-8")) for rank in range(RANKS)]
    assert cases == [120, 60, 120]


def test_a_process_alone_keeps_what_it_has() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert [there_and_back(way(None), None) for way in WAYS] == [30, 30]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_moved_by_words_where_they_can_be(kind: tuple[torch.dtype, int, int]) -> None:
    x = whole(kind, 1)[0]
    even = x.shape[3] * x.element_size() % 8 == 0
    assert (exchange.words(x).dtype == torch.int64) == even
    assert exchange.words(layouts(x)["part of others"]).dtype == x.dtype
