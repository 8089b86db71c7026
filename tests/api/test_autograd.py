"""Attention has no derivative and says so; what it writes, autograd learns of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from liteattention_rocm import (
    LiteAttention,
    PagedBatch,
    SkipPolicy,
    TileGeometry,
    attention,
    attention_paged,
    attention_varlen,
    lite_attention,
    merge_states,
    write_kv,
)
from liteattention_rocm.lite import bitmap
from tests.oracle.tensors import ints, normal

floats = functools.partial(normal, dtype=torch.float32)
ENGINES = pytest.mark.parametrize("engine", ["cpu", "reference"])
GEOMETRY = TileGeometry(16, 64, 16)


class Calls:
    """Every function that attends, with tensors of its own; each takes any of them by name."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.dense = {name: floats(1, 16, 2, 8, seed=i) for i, name in enumerate(("q", "k", "v"))}
        self.packed = {name: floats(5, 2, 8, seed=i) for i, name in enumerate(("q", "k", "v"))}
        self.cache = {name: floats(3, 4, 2, 8, seed=i) for i, name in enumerate(("k", "v"))}
        self.read = bitmap.full(1, 2, 1, 1)
        self.write = torch.empty_like(self.read)
        self.batch = PagedBatch(ints(0, 5), ints(7), ints(2, 0)[None])
        self.lite = LiteAttention(SkipPolicy(threshold=-1.0, warmup_steps=0), engine=engine)

    def attention(self, **changes: Any) -> Any:
        return attention(**(self.dense | changes), engine=self.engine)

    def lite_attention(self, **changes: Any) -> Any:
        lists = {"read": self.read, "write": self.write}
        options: dict[str, Any] = {"threshold": -1.0, "geometry": GEOMETRY, "engine": self.engine}
        return lite_attention(**(self.dense | lists | options | changes))

    def step(self, **changes: Any) -> Any:
        return self.lite(**(self.dense | changes), layer="a", step=1)

    def attention_varlen(self, **changes: Any) -> Any:
        starts: dict[str, Any] = {"cu_seqlens_q": ints(0, 5), "cu_seqlens_k": ints(0, 5)}
        return attention_varlen(**(self.packed | starts | changes), engine=self.engine)

    def attention_paged(self, **changes: Any) -> Any:
        caches: dict[str, Any] = {f"{name}_cache": t for name, t in self.cache.items()}
        caches |= {"q": self.packed["q"], "batch": self.batch}
        renamed = {f"{n}_cache" if n in ("k", "v") else n: t for n, t in changes.items()}
        return attention_paged(**(caches | renamed), engine=self.engine)


ATTENDING = ["attention", "lite_attention", "step", "attention_varlen", "attention_paged"]


@ENGINES
@pytest.mark.parametrize("name", ATTENDING)
@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_forward_mode_is_refused(engine: str, name: str, argument: str) -> None:
    calls = Calls(engine)
    call: Callable[..., Any] = getattr(calls, name)
    given = (calls.packed if name.endswith(("paged", "varlen")) else calls.dense)[argument]
    if name == "attention_paged" and argument != "q":
        given = calls.cache[argument]
    call()
    tangent = torch.ones_like(given)
    for _ in range(2):  # also once a call without derivatives is remembered
        with pytest.raises(ValueError, match=f"{argument}.* carries a forward-mode tangent"):
            torch.func.jvp(lambda x: call(**{argument: x}), (given,), (tangent,))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(given, tangent)
            with pytest.raises(ValueError, match="no derivative: detach it"):
                call(**{argument: dual})
            if name != "step":  # of other tensors a new step of the same layer is fine, too
                assert torch.equal(call(**{argument: dual.detach()}), call())


@ENGINES
def test_other_arguments_carry_no_tangents_either(engine: str) -> None:
    calls = Calls(engine)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.zeros(2), torch.ones(2))
        for call in (calls.attention_paged, calls.attention_varlen):
            with pytest.raises(ValueError, match="sinks carries a forward-mode tangent"):
                call(sinks=dual)
        dual = forward_ad.make_dual(torch.zeros(5, 2, 8), torch.ones(5, 2, 8))
        for call in (calls.attention_paged, calls.attention_varlen):
            with pytest.raises(ValueError, match="out carries a forward-mode tangent"):
                call(out=dual)
    sinks = torch.zeros(2, requires_grad=True)
    for call in (calls.attention_paged, calls.attention_varlen):
        call(sinks=sinks.detach())
        with pytest.raises(ValueError, match="sinks requires grad"):
            call(sinks=sinks)


@ENGINES
@pytest.mark.parametrize("argument", ["k", "v", "k_cache", "v_cache"])
def test_writes_have_no_derivative(engine: str, argument: str) -> None:
    tensors = {"k": floats(2, 2, 8), "v": floats(2, 2, 8)}
    tensors |= {"k_cache": floats(3, 4, 2, 8), "v_cache": floats(3, 4, 2, 8)}
    slots = torch.tensor([3, 9])
    write_kv(**tensors, slots=slots, engine=engine)
    wrong = tensors[argument]
    before = tensors["v_cache"].clone()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(wrong, torch.ones_like(wrong))
        with pytest.raises(ValueError, match=f"{argument} carries a forward-mode tangent"):
            write_kv(**(tensors | {argument: dual}), slots=slots, engine=engine)
    recorded = wrong.clone().requires_grad_()
    with pytest.raises(ValueError, match=f"{argument} requires grad"):
        write_kv(**(tensors | {argument: recorded}), slots=slots, engine=engine)
    assert torch.equal(tensors["v_cache"], before)
    with torch.no_grad():
        write_kv(**(tensors | {argument: recorded}), slots=slots, engine=engine)


@ENGINES
@pytest.mark.parametrize("name", ATTENDING)
def test_vmap_is_refused(engine: str, name: str) -> None:
    calls = Calls(engine)
    call: Callable[..., Any] = getattr(calls, name)
    q = (calls.packed if name.endswith(("paged", "varlen")) else calls.dense)["q"]
    with pytest.raises(ValueError, match=r"q is batched by torch\.vmap"):
        torch.func.vmap(lambda x: call(q=x))(torch.stack([q, q]))
    with pytest.raises(ValueError, match="q requires grad"):
        torch.func.grad(lambda x: call(q=x).sum())(q)


@ENGINES
@pytest.mark.parametrize("name", [name for name in ATTENDING if name != "step"])
def test_a_backward_pass_that_saved_out_refuses(engine: str, name: str) -> None:
    calls = Calls(engine)
    call: Callable[..., Any] = getattr(calls, name)
    out = torch.empty_like(call())
    for _ in range(3):  # looked at, planned, remembered
        weight = torch.ones_like(out, requires_grad=True)
        saved = (weight * out).sum()
        call(out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()
    before = out._version
    with torch.inference_mode():
        call(out=out)
        inference = torch.empty_like(out)
        call(out=inference)
    assert out._version > before
    call(out=inference)
    assert torch.equal(out, inference)


@ENGINES
def test_operators_and_unaligned_calls_count_as_writes(engine: str) -> None:
    calls = Calls(engine)
    q, k, v = calls.dense.values()
    out, lse = torch.empty_like(q), torch.empty(1, 2, 16)
    torch.ops.liteattention_rocm.attention(q, k, v, out, lse, "bshd", 1.0, False, "rtne", engine)
    assert out._version and lse._version
    moved = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    for _ in range(2):
        before = out._version
        calls.attention(q=moved, out=out)
        assert out._version > before
    compiled = torch.compile(lambda q, out: calls.attention(q=q, out=out), backend="eager")
    before = out._version
    compiled(q, out)
    assert out._version > before


@ENGINES
def test_lists_and_caches_count_as_written(engine: str) -> None:
    calls = Calls(engine)
    for _ in range(3):
        before = calls.write._version, calls.read._version
        calls.lite_attention()
        assert calls.write._version > before[0]
        assert calls.read._version == before[1]
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 8)
    rows, slots = floats(2, 2, 8), torch.tensor([3, 9])
    pools = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    for _ in range(3):
        versions = [pool._version for pool in pools]
        write_kv(rows, rows, *pools, slots, engine=engine)
        assert all(pool._version > v for pool, v in zip(pools, versions, strict=True))
    weight = torch.ones_like(k_cache, requires_grad=True)
    saved = (weight * pools[0]).sum()
    write_kv(rows, rows, *pools, slots, engine=engine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
    with torch.inference_mode():
        mine = torch.zeros(3, 4, 2, 8)
        write_kv(rows, rows, mine, v_cache, slots, engine=engine)
    write_kv(rows, rows, mine, v_cache, slots, engine=engine)
    assert torch.equal(mine, pools[0])


def test_a_batch_beside_what_is_written_stays_right() -> None:
    # One buffer, one version: every write makes the batch look again, and never wrongly.
    buffer = torch.zeros(64 + 4 * 16)
    indices = buffer[:64].view(torch.int32)
    indices[:6] = ints(0, 1, 5, 0, 2, 0)
    batch = PagedBatch(indices[:2], indices[2:3], indices[4:6][None])
    cache, out = floats(3, 4, 2, 8), buffer[64:80].view(1, 2, 8)
    expected = attention_paged(
        floats(1, 2, 8), cache, cache, PagedBatch(ints(0, 1), ints(5), ints(2, 0)[None])
    )
    for _ in range(3):
        attention_paged(floats(1, 2, 8), cache, cache, batch, out=out)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_merging_has_derivatives(layout: Any) -> None:
    shape = (1, 3, 2, 4) if layout == "bshd" else (1, 2, 3, 4)
    outs = [floats(*shape, seed=i).double().requires_grad_() for i in range(2)]
    lses = [floats(1, 2, 3, seed=9 + i) for i in range(2)]
    lses[0][0, 1, 2] = lses[0][0, 0, 0] = lses[1][0, 0, 0] = -torch.inf

    def model(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> torch.Tensor:
        shares = torch.softmax(torch.stack([x.double() for x in lses]), 0).nan_to_num(0.0)
        shares = shares.transpose(-1, -2) if layout == "bshd" else shares
        return (torch.stack(outs) * shares[..., None]).sum(0)

    recorded = [x.clone().requires_grad_() for x in lses]
    merged = merge_states(outs, recorded, layout=layout)[0].square().sum()
    expected = model(outs, recorded).square().sum()
    for ours, theirs in zip(
        torch.autograd.grad(merged, [*outs, *recorded]),
        torch.autograd.grad(expected, [*outs, *recorded]),
        strict=True,
    ):
        known = theirs.isfinite()  # the model's are NaN where no part saw a key
        assert ours.isfinite().all()
        assert torch.allclose(ours[known], theirs[known], atol=1e-6)
    tangents = tuple(floats(*shape, seed=20 + i).double() for i in range(2))
    plain = tuple(x.detach() for x in outs)
    ours = torch.func.jvp(lambda *o: merge_states(o, lses, layout=layout)[0], plain, tangents)[1]
    theirs = torch.func.jvp(lambda *o: model(list(o), lses), plain, tangents)[1]
    assert torch.allclose(ours, theirs, atol=1e-6)
