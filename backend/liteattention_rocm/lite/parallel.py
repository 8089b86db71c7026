"""LiteAttention on a sequence that is split over processes: Ulysses and ring.

Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): the processes exchange rows for heads, each attends
with some of the heads over the whole sequence and keeps the lists of those heads; lists and outputs
are those of one process with the same tiles (an engine may prefer others for fewer heads). Ring
(Ring Attention, arXiv 2310.01889): queries stay, keys and values go round, and the parts are merged
by their log-sum-exps; each process keeps a list per split of the keys.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import Self

from ..arguments import Reasons
from ..brief import first_few
from ..contract import Rounding, TileGeometry
from ..dense import merge_states
from . import deal, exchange
from .attention import LiteAttention
from .names import checked_names
from .peers import PeerMemory
from .policy import Ranges, SkipPolicy, plain_int
from .state import State
from .statistics import SkipStatistics

Mode = Literal["ulysses", "ring"]


class _Begun(NamedTuple):
    """A v that was sent before its call, as it was then."""

    v: torch.Tensor
    version: int
    dealt: deal.Deal | None
    layer: str
    sent: Any  # what the exchange made of it

    def is_of(self, v: torch.Tensor, dealt: deal.Deal | None) -> bool:
        """Whether a call with this v means it: the same memory, not written to since."""
        then = self.v
        if v.data_ptr() != then.data_ptr() or v.dtype != then.dtype or v.shape != then.shape:
            return False
        steps = zip(v.shape, v.stride(), then.stride(), strict=True)
        same = all(size == 1 or one == other for size, one, other in steps)
        return same and then._version == self.version and dealt is self.dealt


class _Part(NamedTuple):
    """The policy for the keys of one rank of a ring."""

    made_by: SkipPolicy  # for the keys of all ranks
    policy: SkipPolicy
    left_out: bool  # all of these keys, in steps that may skip


class SeqParallel:
    """Self-attention of one model whose sequence is split over the processes of a group.

    Called on every rank with that rank's rows, in the same order everywhere. Rank r holds rows
    [r * S_local, (r + 1) * S_local) of the sequence; S_local is the same on all ranks.

    Heads skip unequally, so ``balance`` deals them to the ranks anew by the tiles that they kept
    (:mod:`.deal`): before the LiteAttention steps that follow upon 1, 2, 4, 8 ... others, each
    layer and branch for itself. Lists go with their heads. That is one gathering of the lists and
    one wait for the device each time. What heads a rank has is part of the state of that
    generation, layer and branch: a new one begins with heads in their order. Results do not depend
    on it.

    State: key, owner and lifetime are those of :class:`LiteAttention`, of which it holds one
    ("ulysses": the lists of this rank's heads) or one per split of the keys ("ring": the lists of
    this rank's rows against that split). A tile in a ring is judged against the maximum, or weighed
    against the mass, within its split. So a ring never skips a tile that the whole row's maximum
    would have kept, counts no tile for less than its mass, and keeps at least one tile per q block
    and split; a budget is a share of each split's mass. Token ranges of the policy are over the
    whole sequence, and so is ``threshold_scale="length"``. A step that leaves out all keys of a
    split frees that list: later ones start from the full list.

    A copy (shallow or deep) belongs to the same processes and has lists and statistics of its own.

    An error that only some ranks see leaves the others waiting, as in every collective; go on with
    a new generation, or with an earlier step, on all of them.

    Args:
        policy: as in :class:`LiteAttention`.
        group: the processes; the default group if None.
        mode: "ulysses" needs head counts that the number of ranks divides; "ring" does not.
        balance: whether "ulysses" deals heads by their tiles; else rank r has the r-th part.
        peer_memory: whether the ranks of "ulysses" write to each other's memory instead of sending
            messages: GPUs of one host that reach each other, or CPU processes of one host. It takes
            less time, and holds four times the largest of a rank's q, k, v and output. The result
            is the same. The first call raises ``RuntimeError``, on all ranks, where it cannot be.
        geometry, engine, max_generations: as in :class:`LiteAttention`.

    Raises:
        ValueError: the mode is unknown, ``peer_memory`` is asked for in a ring, or
            torch.distributed is not initialised.
    """

    def __init__(
        self,
        policy: SkipPolicy | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        mode: Mode = "ulysses",
        balance: bool = False,
        peer_memory: bool = False,
        geometry: TileGeometry | None = None,
        engine: str | None = None,
        max_generations: int = 8,
    ) -> None:
        reasons = []
        if mode not in ("ulysses", "ring"):
            reasons.append(f"mode must be 'ulysses' or 'ring', got {mode!r}")
        if peer_memory and mode == "ring":
            reasons.append("peer_memory is for mode 'ulysses'")
        if not dist.is_initialized():
            reasons.append("torch.distributed has no process group: call init_process_group first")
        if reasons:
            raise ValueError("invalid SeqParallel: " + "; ".join(reasons))
        self.mode: Mode = mode
        self.balance = balance
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.peer_memory = peer_memory
        self._exchange = self._new_exchange()
        self._rest: dict[str, Any] = {
            "geometry": geometry,
            "engine": engine,
            "max_generations": max_generations,
        }
        self._whole = self._new(SkipPolicy() if policy is None else policy, None)
        self._splits: dict[int, LiteAttention] = {}  # by the rank of the keys
        self._parts: dict[tuple[int, int], _Part] = {}  # by that rank and the number of its keys
        self._begun: _Begun | None = None
        self._not_ahead: set[str] = set()  # layers that attend with another v than was begun

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        # a process group cannot be copied, and a copy in it is what is meant
        kept = {"group": self.group, "_begun": None, "_exchange": self._new_exchange()}
        for name, value in vars(self).items():
            vars(made)[name] = kept[name] if name in kept else copy.deepcopy(value, memo)
        return made

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    def __getstate__(self) -> Any:
        raise TypeError(
            "SeqParallel cannot be pickled: it belongs to a group of running processes; pickle its "
            "policy or statistics, and make it again on each rank: SeqParallel(policy, group=...)"
        )

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        step: int,
        layer: str,
        branch: str = "",
        generation: Hashable = 0,
        num_steps: int | None = None,
        scale: float | None = None,
        rounding: Rounding = "rtne",
    ) -> torch.Tensor:
        """Attend over the whole sequence; [B, S_local, H, D] in, the same shape and dtype out.

        Arguments as in :meth:`LiteAttention.__call__`; the layout is "bshd". Raises ``TypeError``
        and ``ValueError`` as it does, and ``ValueError`` with every reason for shapes that cannot
        be split.
        """
        self._check(q, k, v)
        call: dict[str, Any] = {
            "step": step,
            "layer": layer,
            "branch": branch,
            "generation": generation,
            "num_steps": num_steps,
            "scale": scale,
            "rounding": rounding,
        }
        if self.mode == "ring":
            return self._ring(q, k, v, call)
        dealt = self._deal(q, k, call)
        if self.policy.by_head:
            every = deal.in_order(q.shape[2]) if dealt is None else dealt.queries
            call["heads"] = self._own(every)
        queries, keys = (None, None) if dealt is None else (dealt.query_index, dealt.key_index)
        values = self._take_begun(v, dealt)
        sent = [
            self._exchange.send("q", q, queries),
            self._exchange.send("k", k, keys),
            self._exchange.send("v", v, keys) if values is None else values,
        ]
        given = self._exchange.rows_for_heads(sent)
        out = self._attend(self._whole, *given, out=self._exchange.output(given[0]), **call)
        return self._heads_for_rows(out, queries)

    def begin(
        self,
        v: torch.Tensor,
        *,
        step: int,
        layer: str,
        branch: str = "",
        generation: Hashable = 0,
        num_steps: int | None = None,
    ) -> None:
        """Send ``v`` of the next call ahead, while its q and k are made; on all ranks or none.

        That call takes it up if it is given the same memory, unchanged. Else it sends its own v,
        and no more is sent ahead for that layer. Results do not depend on it, nor on whether the
        call comes. It is for Ulysses and as many heads of q as of v; elsewhere, where a change
        could not be noticed (inference mode), and where the call is going to deal heads, nothing
        is sent. Arguments as those of the call.
        """
        step, num_steps = checked_names(generation, step, layer, branch, num_steps)
        self._drop_begun()
        if self.mode == "ring" or layer in self._not_ahead:
            return
        if v.is_inference() or v.requires_grad or v.dim() != 4 or v.shape[2] % self.ranks:
            return
        call = {
            "step": step,
            "layer": layer,
            "branch": branch,
            "generation": generation,
            "num_steps": num_steps,
        }
        state = self._dealt(v, v, call)
        if (
            state is not None
            and self._goes_on(state, step, v.shape[2])
            and deal.is_due(state.ordinal + state.complete)
        ):
            return  # the call deals heads: only it may bring the lists to its step
        dealt = None if state is None else state.deal
        order = None if dealt is None else dealt.key_index
        self._begun = _Begun(v, v._version, dealt, layer, self._exchange.send("v", v, order))

    def _take_begun(self, v: torch.Tensor, dealt: deal.Deal | None) -> Any:
        """What was sent ahead, if it is this v."""
        begun = self._begun
        if begun is not None and begun.is_of(v, dealt):
            self._begun = None
            return begun.sent
        if begun is not None:
            self._not_ahead.add(begun.layer)
        self._drop_begun()
        return None

    def _drop_begun(self) -> None:
        """Let what nobody takes up arrive."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._exchange.drop(begun.sent)

    def _new_exchange(self) -> exchange.Exchange:
        """Make what Ulysses exchanges by."""
        return PeerMemory(self.group) if self.peer_memory else exchange.Messages(self.group)

    def _new(self, policy: SkipPolicy, split: int | None) -> LiteAttention:
        """Make what attends with this rank's heads, or in a ring to the keys of rank ``split``."""
        return LiteAttention(policy, **self._rest)

    def _attend(self, lite: LiteAttention, *tensors: torch.Tensor, **call: Any) -> Any:
        """Attend on this rank alone."""
        return lite(*tensors, **call)

    def _deal(self, q: torch.Tensor, k: torch.Tensor, call: dict[str, Any]) -> deal.Deal | None:
        """Return which heads go where in this call; None: in their order.

        All ranks decide alike: by the step, by what ran before, and by the lists of all.
        """
        state, step = self._dealt(q, k, call), plain_int(call["step"])
        if state is None:
            return None
        heads, kv_heads = q.shape[2], k.shape[2]
        if self._goes_on(state, step, kv_heads):
            self._check_whole(q, k, call)
            with self._whole._lock:
                state.advance(step)
                state.step = step  # if the call fails now, an earlier step begins anew
            if deal.is_due(state.ordinal) and state.read is not None:
                self._deal_anew(state, kv_heads, heads // kv_heads)
        return state.deal

    def _dealt(self, q: torch.Tensor, k: torch.Tensor, call: dict[str, Any]) -> State | None:
        """Find the lists that a call goes on with; None if it begins with heads in their order."""
        if not self.balance:
            return None
        step = plain_int(call["step"])
        state = self._whole._held(call["generation"], call["layer"], call["branch"])
        if state is None or type(step) is not int or step < state.step:
            return None
        batch, rows, heads, width = q.shape
        sizes = (batch, heads // self.ranks, k.shape[2] // self.ranks, rows * self.ranks)
        if state.shape[:4] != sizes or state.shape[5:8] != (width, q.dtype, q.device):
            return None  # the lists do not fit, and begin anew
        return state

    def _goes_on(self, state: State, step: int, kv_heads: int) -> bool:
        """Whether a call goes on to a later step with lists of heads that can be dealt."""
        return 1 < self.ranks < kv_heads and step > state.lite_step and bool(state.counts)

    def _check_whole(self, q: torch.Tensor, k: torch.Tensor, call: dict[str, Any]) -> None:
        """Raise if attention with this rank's heads would be refused, as on all ranks alike."""
        given = []
        for x in (q, k, k):
            batch, rows, heads, width = x.shape
            one = x.new_empty((1, 1, 1, width))
            given.append(one.expand(batch, rows * self.ranks, heads // self.ranks, -1))
        own = self._own(deal.in_order(q.shape[2])) if self.policy.by_head else None
        self._whole._check(*given, **call, heads=own)

    def _deal_anew(self, state: State, kv_heads: int, group: int) -> None:
        """Deal heads by the tiles of the list to be read, and fetch that list's new part."""
        own = state.read
        assert own is not None
        gathered = own.new_empty((self.ranks, *own.shape))
        dist.all_gather(list(gathered), own, group=self.group)
        lists = gathered.transpose(0, 1).flatten(1, 2)  # [B, Hq, q_blocks, words], as dealt so far
        before = deal.in_order(kv_heads) if state.deal is None else state.deal.keys
        tiles = [0] * kv_heads
        for head, count in zip(before, deal.tiles_by_head(lists, group), strict=True):
            tiles[head] = count
        now = deal.by_tiles(tiles, self.ranks)
        if deal.most(tiles, now, self.ranks) >= deal.most(tiles, before, self.ranks):
            return
        made = deal.Deal.of(now, group, own.device)
        room = lists.shape[1] // self.ranks
        mine = now[self.rank * room // group : (self.rank + 1) * room // group]
        places = [before.index(head) * group + i for head in mine for i in range(group)]
        own.copy_(lists[:, places])
        state.read_count, state.read_full, state.deal = None, False, made

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        given = {"q": q, "k": k, "v": v}
        types = [
            f"{name} must be a torch.Tensor, got {type(x).__name__}"
            for name, x in given.items()
            if not isinstance(x, torch.Tensor)
        ]
        if types:
            raise TypeError("cannot split this over ranks: " + "; ".join(types))
        reasons = []
        for name, x in given.items():
            if x.dim() != 4:
                reasons.append(f"{name} must be [B, S_local, H, D], got {tuple(x.shape)}")
            elif self.mode == "ulysses" and x.shape[2] % self.ranks:
                reasons.append(
                    f"{name} has {x.shape[2]} heads, which {self.ranks} ranks cannot share "
                    "equally: use mode='ring' or another number of ranks"
                )
        if not reasons and self.mode == "ulysses" and q.shape[1] != k.shape[1]:
            reasons.append(
                f"q has {q.shape[1]} rows and k {k.shape[1]}: it is for self-attention only"
            )
        if k.shape != v.shape:
            reasons.append(f"k and v differ: {tuple(k.shape)} and {tuple(v.shape)}")
        if len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
            kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
            reasons.append(f"q, k and v must be of one dtype and on one device, got {kinds}")
        wrong = Reasons()
        wrong.no_derivative(given)
        reasons += wrong.values
        if reasons:
            raise ValueError("cannot split this over ranks: " + "; ".join(reasons))

    def _heads_for_rows(self, out: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """Give the output of this rank's heads for that of its rows."""
        return self._exchange.heads_for_rows(out, order)

    def _ring(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: dict[str, Any]
    ) -> torch.Tensor:
        length = k.shape[1]
        leaves_out = self._leaves_out(call, self.ranks * length)
        splits = [self._split(source, length) for source in range(self.ranks)]
        skipped = [lite for lite, left_out in splits if left_out and leaves_out]
        held = k.new_empty((2, *k.shape))
        held[0].copy_(k)  # autocast has a say in torch.stack
        held[1].copy_(v)
        arriving = torch.empty_like(held)
        parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        failed: Exception | None = None
        before, after = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        for hop in range(self.ranks):
            waits = []
            if hop + 1 < self.ranks:
                waits = exchange.post([(held, after)], [(arriving, before)], self.group)
            source = (self.rank - hop) % self.ranks
            lite, _ = splits[source]
            if lite not in skipped:
                try:
                    parts[source] = self._attend(lite, q, held[0], held[1], return_lse=True, **call)
                except Exception as error:
                    # Keys go on, for ranks may meet what is refused in different hops, and so do
                    # lists: an earlier step then begins anew for all of them.
                    failed = failed or error
            for wait in waits:
                wait.wait()
            held, arriving = arriving, held
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # which would hold this frame and its tensors
        where = {name: call[name] for name in ("step", "layer", "branch", "generation")}
        for lite in skipped:
            lite._pass_over(**where)
        if len(parts) == 1:
            return next(iter(parts.values()))[0]
        # In the order of the keys, so that the rounding does not depend on the rank.
        ordered = [parts[source] for source in sorted(parts)]
        return merge_states([out for out, _ in ordered], [lse for _, lse in ordered])[0]

    def _leaves_out(self, call: dict[str, Any], length: int) -> bool:
        """Whether ranges of ``length`` keys are skipped in the step of a call: not if it is dense.

        Raises as a call of one process does, before anything goes round.
        """
        names = (call[name] for name in ("generation", "step", "layer", "branch", "num_steps"))
        step, num_steps = checked_names(*names)
        if not self.policy.enabled:
            return False
        if self.policy.schedule(call["layer"], length, num_steps, step).limit(step) is None:
            return False
        if _within(self.policy.must_skip, 0, length) == ((0, length),):
            raise ValueError(
                f"policy does not fit this request: must_skip covers all {length} keys, so that "
                "nothing is left to attend to: leave out at least one K block"
            )
        return True

    def _split(self, source: int, length: int) -> tuple[LiteAttention, bool]:
        """What attends to the keys of rank ``source`` by the policy as it is now.

        And whether the policy leaves out all of them, in steps that may skip.
        """
        part = self._parts.get((source, length))
        if part is None or part.made_by is not self.policy:
            part = self._parts[source, length] = self._part(source * length, length)
        lite = self._splits.get(source)
        if lite is None:
            lite = self._splits[source] = self._new(part.policy, source)
        lite.policy = part.policy
        return lite, part.left_out

    def _part(self, start: int, length: int) -> _Part:
        """Make the policy for keys [start, start + length).

        Raises ``ValueError`` for a token range past the whole sequence.
        """
        whole = self.policy
        total = self.ranks * length
        past = [item for item in (*whole.must_do, *whole.must_skip) if item[1] > total]
        if past:
            named = first_few([f"[{start}, {end})" for start, end in past], ", ")
            raise ValueError(
                f"token ranges {named} end past the {total} keys of all {self.ranks} ranks"
            )
        must_skip = _within(whole.must_skip, start, length)
        left_out = must_skip == ((0, length),)
        change: dict[str, Any] = {
            "must_do": _within(whole.must_do, start, length),
            "must_skip": () if left_out else must_skip,  # dense steps attend to all keys
        }
        if whole.threshold_scale == "length":
            # LiteAttention subtracts log2 of the split's length, not of the whole one.
            more = math.log2(self.ranks)
            assert whole.threshold is not None  # lengths scale thresholds only
            change["threshold"] = _lowered(whole.threshold, more)
            change["layer_thresholds"] = {
                name: _lowered(value, more) for name, value in whole.layer_thresholds.items()
            }
        return _Part(whole, whole.model_copy(update=change), left_out)

    @property
    def policy(self) -> SkipPolicy:
        """What skips. Another one counts from the next call on; set it on all ranks alike."""
        return self._whole.policy

    @policy.setter
    def policy(self, policy: SkipPolicy) -> None:
        self._whole.policy = policy

    @property
    def statistics(self) -> SkipStatistics:
        """Tiles of this rank, by generation, step, layer and branch; over splits in a ring.

        A step in which the policy leaves out all keys of a split does not count their tiles.
        """
        if self.mode == "ulysses":
            return self._whole.statistics
        return SkipStatistics().merge(*(lite.statistics for lite in self._splits.values()))

    def lists(
        self, layer: str, branch: str = "", generation: Hashable = 0, *, split: int | None = None
    ) -> torch.Tensor:
        """Return a copy of this rank's list, see :meth:`LiteAttention.lists`.

        In a ring ``split`` names the rank whose keys it is about. Raises ``KeyError`` if there is
        none, ``ValueError`` if ``split`` is given without a ring or missing in one.
        """
        return self._read(lambda lite: lite.lists(layer, branch, generation), split)

    def kept_tiles(
        self, layer: str, branch: str = "", generation: Hashable = 0, *, split: int | None = None
    ) -> torch.Tensor:
        """Return the tiles of :meth:`lists`, see :meth:`LiteAttention.kept_tiles`."""
        return self._read(lambda lite: lite.kept_tiles(layer, branch, generation), split)

    def _read(
        self, read: Callable[[LiteAttention], torch.Tensor], split: int | None
    ) -> torch.Tensor:
        """What ``read`` finds of this rank's lists; see :meth:`lists`."""
        if (split is None) == (self.mode == "ring"):
            raise ValueError("give split in a ring, and only there")
        if split is None:
            return read(self._whole)
        if split not in self._splits:
            raise KeyError(f"no list for the keys of rank {split}")
        return read(self._splits[split])

    def heads(
        self, layer: str, branch: str = "", generation: Hashable = 0
    ) -> tuple[int, ...] | None:
        """Return the heads of q that this rank's list is of, in its order; None if they were not
        dealt by their tiles, and rank r has the r-th part of them. Ulysses only."""
        state = self._whole._held(generation, layer, branch)
        if state is None or state.deal is None:
            return None
        return self._own(state.deal.queries)

    def _own(self, heads: tuple[int, ...]) -> tuple[int, ...]:
        """This rank's part of the heads of all ranks."""
        room = len(heads) // self.ranks
        return heads[self.rank * room : (self.rank + 1) * room]

    def forget(self, layer: str, branch: str = "", generation: Hashable = 0) -> None:
        """Let a layer and branch start from the full list, see :meth:`LiteAttention.forget`."""
        for lite in (self._whole, *self._splits.values()):
            lite.forget(layer, branch, generation)

    def reset(self, generation: Hashable | None = None) -> None:
        """Forget lists and statistics of one generation, or of all when it is None."""
        for lite in (self._whole, *self._splits.values()):
            lite.reset(generation)
        if generation is None:
            self._splits.clear()
            self._parts.clear()

    def end(self, generation: Hashable = 0) -> None:
        """Free the lists of a generation that is over; its statistics stay readable."""
        for lite in (self._whole, *self._splits.values()):
            lite.end(generation)

    def free_memory(self) -> None:
        """Give back the memory of ``peer_memory``, on all ranks; lists and statistics stay.

        A later call has such memory again.
        """
        self._exchange.free()


def _lowered(thresholds: float | tuple[float, ...], by: float) -> float | tuple[float, ...]:
    """Thresholds, of one step or of all, that are lower by a number."""
    if isinstance(thresholds, tuple):
        return tuple(value - by for value in thresholds)
    return thresholds - by


def _within(ranges: Ranges, start: int, length: int) -> Ranges:
    """Clip token ranges to keys [start, start + length), count from there, join what touches."""
    joined: list[tuple[int, int]] = []
    for a, b in ranges:  # ascending
        a, b = max(a - start, 0), min(b - start, length)
        if a < b:
            if joined and joined[-1][1] == a:
                a = joined.pop()[0]
            joined.append((a, b))
    return tuple(joined)
