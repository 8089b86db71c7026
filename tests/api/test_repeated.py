"""Repeated calls skip the checks, and nothing else: what changes is looked at again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liteattention_rocm import (
    LiteAttention,
    PagedBatch,
    SkipPolicy,
    TileGeometry,
    attention,
    attention_paged,
    attention_varlen,
    engines,
    lite_attention,
    remembered,
    validation,
)
from liteattention_rocm.lite import bitmap
from liteattention_rocm.remembered import calls
from tests.oracle.attention import exact, exact_rows
from tests.oracle.tensors import normal

GEOMETRY = TileGeometry(16, 64, 16)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often arguments were checked."""
    found: list[int] = []
    real = validation.dense

    def counting(*args: Any, **options: Any) -> Any:
        found.append(1)
        return real(*args, **options)

    monkeypatch.setattr(validation, "dense", counting)
    return found


def qkv(seed: int = 0, length: int = 48) -> list[torch.Tensor]:
    return [normal(1, length, 2, 16, seed=seed + i) for i in range(3)]


def expected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str = "bshd",
    engine: str | None = None,
    **options: Any,
) -> torch.Tensor:
    return (exact if layout == "bhsd" else exact_rows)(q, k, v, **options).out


def close(out: Any, target: torch.Tensor) -> bool:
    return torch.allclose(out.double(), target, atol=0.03)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_a_repeated_call_is_checked_once_and_computes_with_its_own_tensors(
    checks: list[int], engine: str
) -> None:
    for seed in range(4):
        q, k, v = qkv(10 * seed)
        out, lse = attention(q, k, v, return_lse=True, engine=engine)
        assert close(out, expected(q, k, v))
        scores = torch.einsum("bshd,bthd->bhst", q.double(), k.double()) / 4
        assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-4)
    assert len(checks) == 1 and len(calls) == 1


CHANGES: list[dict[str, Any]] = [
    {"causal": True},
    {"scale": 0.5},
    {"layout": "bhsd"},
    {"engine": "reference"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_option_is_a_kind_of_its_own(checks: list[int], change: dict[str, Any]) -> None:
    q, k, v = qkv()
    attention(q, k, v)
    out = attention(q, k, v, **change)
    assert len(checks) == 2
    assert close(out, expected(q, k, v, **change))
    assert close(attention(q, k, v), expected(q, k, v))


def test_sizes_strides_and_dtypes_are_looked_at() -> None:
    q, k, v = qkv()
    attention(q, k, v)
    for other in (
        qkv(length=40),
        [x.half() for x in qkv(3)],
        [normal(1, 2, 48, 16, seed=i).transpose(1, 2) for i in range(3)],
        [normal(1, 48, 4, 16, seed=i)[:, :, ::2] for i in range(3)],
        [q, k[:, :30], v[:, :30]],
        [q, k[:, :, :1], v[:, :, :1]],
    ):
        x, y, z = other
        heads = x.shape[2] // y.shape[2]
        target = expected(x, *(t.repeat_interleave(heads, 2) for t in (y, z)))
        for _ in range(2):
            assert close(attention(x, y, z), target)
    assert len(calls) == 7


def test_unaligned_tensors_are_a_kind_of_their_own(checks: list[int]) -> None:
    q, k, v = qkv()
    attention(q, k, v)
    moved = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape).copy_(k)
    for _ in range(2):
        assert close(attention(q, moved, v), expected(q, k, v))
    assert len(checks) == 2 and len(calls) == 2


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"causal": 1}, TypeError, "causal must be a bool, got int"),
    ({"causal": 0}, TypeError, "causal must be a bool, got int"),
    ({"return_lse": 0}, TypeError, "return_lse must be a bool, got int"),
    ({"scale": True}, TypeError, "scale must be a number, got bool"),
    ({"scale": float("nan")}, ValueError, "scale must be finite"),
    ({"layout": ["bshd"]}, ValueError, "layout must be one of"),
    ({"rounding": "up"}, ValueError, "rounding must be one of"),
    ({"engine": "magic"}, ValueError, "unknown engine 'magic'"),
    ({"k": torch.zeros(1, 48, 2, 16)}, TypeError, "all tensors must have one dtype"),
    ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    ({"v": torch.zeros(1, 47, 2, 16).bfloat16()}, ValueError, "k and v must have one shape"),
    (
        {"q": torch.zeros(1, 48, 2, 16, requires_grad=True, dtype=torch.bfloat16)},
        ValueError,
        "q requires grad",
    ),
    ({"v": torch.zeros(1, 48, 2, 16).bfloat16().to("meta")}, ValueError, "must have one device"),
]


@pytest.mark.parametrize(("bad", "error", "text"), BAD, ids=lambda value: str(value)[:20])
def test_bad_calls_after_good_ones_still_raise(
    bad: dict[str, Any], error: type[Exception], text: str
) -> None:
    good: dict[str, Any] = dict(zip("qkv", qkv(), strict=True))
    for options in ({}, {"scale": 1.0}, {"causal": True}):
        attention(**(good | options))
    for _ in range(2):
        with pytest.raises(error, match=text):
            attention(**(good | bad))
    assert len(calls) == 3
    assert close(attention(**good), expected(*good.values()))


def test_grad_mode_is_looked_at_in_every_call() -> None:
    q, k, v = qkv()
    attention(q, k, v)
    k.requires_grad_()
    with torch.no_grad():
        attention(q, k, v)
    with pytest.raises(ValueError, match="k requires grad"):
        attention(q, k, v)


def test_out_is_checked_for_overlap_in_every_call(checks: list[int]) -> None:
    buffer = normal(5, 48, 2, 16)
    q, k, v, other, out = (x.unsqueeze(0) for x in buffer)
    for _ in range(2):
        assert attention(q, k, v, out=out) is out
        assert close(out, expected(q, k, v))
    assert len(checks) == 1
    for name, target in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"out must not overlap {name}"):
            attention(q, k, v, out=target)
    half = buffer.view(-1)[2 * q.numel() + 16 * 2 * 4 :][: q.numel()].view_as(q)
    with pytest.raises(ValueError, match="out must not overlap v"):
        attention(q, k, v, out=half)
    attention(q, k, v, out=other)
    assert close(other, expected(q, k, v))
    with pytest.raises(ValueError, match="out requires grad"):
        attention(q, k, v, out=torch.empty_like(q).requires_grad_())
    with pytest.raises(ValueError, match="out must have q's shape"):
        attention(q, k, v, out=out[:, :40])


def test_a_default_device_changes_nothing(checks: list[int]) -> None:
    """It is a mode of PyTorch's, too, but sees only where new tensors are made."""
    q, k, v = qkv()
    out = attention(q, k, v)
    with torch.device("cpu"):
        assert not remembered.watched()
        assert torch.equal(attention(q, k, v), out)
    with torch.device("meta"):
        assert torch.equal(attention(q, k, v), out)
    assert len(checks) == 1
    with torch.device("cpu"), torch.overrides.BaseTorchFunctionMode():
        assert remembered.watched()
        assert torch.equal(attention(q, k, v), out)
    assert len(checks) > 1


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_no_tensor_is_made_on_a_default_device(engine: str) -> None:
    q, k, v = qkv()
    starts = torch.tensor([0, 48]).int()
    table = torch.tensor([[1, 0]]).int()
    read = bitmap.full(1, 2, 3, 1)

    def everything() -> list[torch.Tensor]:
        remembered.forget()
        found = [attention(q, k, v, causal=True, engine=engine)]
        for limit in ({"threshold": -1.0}, {"budget": 0.3}):
            write = torch.empty_like(read)
            out = lite_attention(
                q, k, v, read, write, geometry=GEOMETRY, engine=engine, **limit
            )  # fmt: skip
            found += [out, write]
        policy = SkipPolicy(
            budget=0.1, layer_budgets={"a": (0.1, 0.3)}, must_do=((0, 20),), warmup_steps=0
        )
        lite = LiteAttention(policy, geometry=GEOMETRY, engine=engine)
        found += [lite(q, k, v, step=step, layer="a") for step in range(3)]
        packed = [x[0] for x in (q, k, v)]
        found.append(attention_varlen(*packed, starts, starts, window=9, engine=engine))
        batch = PagedBatch(starts, starts[1:], table)
        caches = (x.view(2, 24, 2, 16) for x in packed[1:])
        found.append(attention_paged(packed[0], *caches, batch, causal=False, engine=engine))
        return found

    expected = everything()
    with torch.device("meta"):
        for ours, wanted in zip(everything(), expected, strict=True):
            assert torch.equal(ours, wanted)


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    monkeypatch.setenv(engines.ENGINE_VARIABLE, "fast")
    with pytest.raises(
        ValueError, match=r"unknown engine 'fast' \(from LITEATTENTION_ENGINE\): this build has"
    ):
        attention(q, k, v)
    monkeypatch.delenv(engines.ENGINE_VARIABLE)
    with pytest.raises(ValueError, match="unknown engine 'fast'"):
        attention(q, k, v)
    attention(q, k, v, engine="cpu")
    engines.settings.cache_clear()
    attention(q, k, v)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_modes_profilers_and_transforms_still_see_the_operator() -> None:
    q, k, v = qkv()
    for _ in range(2):
        attention(q, k, v)
    with Seen() as seen:
        attention(q, k, v)
    assert "liteattention_rocm.attention.default" in seen.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(q, k, v)
    assert "liteattention_rocm::attention" in {event.key for event in profile.key_averages()}
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        assert isinstance(attention(*fakes), torch._subclasses.FakeTensor)
    assert [key[0][0] for key in calls] == ["dense", "dense operator"]


def test_no_tensor_is_kept_and_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_most", 3)
    references = []
    for length in range(8, 60, 8):
        tensors = qkv(length=length)
        out = attention(*tensors)
        references += [weakref.ref(x) for x in (*tensors, out)]
        assert len(calls) <= 3
        del tensors, out
    gc.collect()
    assert not [r for r in references if r() is not None]


def lists(length: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    read = bitmap.full(1, 2, GEOMETRY.q_blocks(length), GEOMETRY.k_blocks(length))
    return read, torch.empty_like(read)


def test_a_repeated_step_is_checked_once_and_reads_and_writes_its_own_lists(
    checks: list[int],
) -> None:
    length = 256
    results = []
    for engine in ("cpu", "reference"):
        read, write = lists(length)
        votes = []
        for step in range(3):
            q, k, v = (x.abs() for x in qkv(step, length))
            k[:, :64] *= 8  # the first K block outshines the others
            out = lite_attention(
                q * 8, k, v, read, write, threshold=-4.0, geometry=GEOMETRY, engine=engine
            )
            votes.append(write.clone())
            read, write = write, read
        results.append((votes, out))
    assert len(checks) == 2 and len(calls) == 2
    for ours, theirs in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(ours, theirs)
    assert 0 < bitmap.sparsity(results[0][0][-1], 4) < 1
    assert torch.allclose(results[0][1].double(), results[1][1].double(), atol=0.03)


def test_bad_steps_after_good_ones_still_raise() -> None:
    q, k, v = qkv()
    read, write = lists()
    good: dict[str, Any] = dict(read=read, write=write, threshold=-1.0, geometry=GEOMETRY)
    lite_attention(q, k, v, **good)
    lite_attention(q, k, v, **good)
    assert len(calls) == 1
    both = torch.empty(2 * read.numel() - 1, dtype=torch.int32)
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"write": read}, ValueError, "write must not overlap read"),
        ({"read": read.long()}, TypeError, "read must be torch.int32"),
        ({"write": write[:, :1]}, ValueError, "write must be"),
        ({"threshold": 1.0}, ValueError, "must be <= 0, got 1.0"),
        ({"threshold": "-1"}, TypeError, "threshold must be a number"),
        ({"geometry": (16, 64, 16)}, TypeError, "geometry must be a TileGeometry"),
        ({"must_do": read}, ValueError, "must_do must be"),
        (
            {
                "read": both[: read.numel()].view_as(read),
                "write": both[read.numel() - 1 :].view_as(read),
            },
            ValueError,
            "write must not overlap read",
        ),
    ]
    for change, error, text in bad:
        with pytest.raises(error, match=text):
            lite_attention(q, k, v, **(good | change))
    assert len(calls) == 1


def test_masks_thresholds_and_directions_are_kinds_of_their_own() -> None:
    q, k, v = (x.abs() for x in qkv(length=256))
    read, _ = lists(256)
    mask = torch.tensor([2], dtype=torch.int32)
    cases: list[dict[str, Any]] = [
        {},
        {"must_do": mask},
        {"must_skip": mask},
        {"threshold": -0.25},
        {"descending": True},
        {"soft_skip": True},
    ]
    for _ in range(2):
        for case in cases:
            found = []
            for engine in ("cpu", "reference"):
                write = torch.empty_like(read)
                options: dict[str, Any] = {"threshold": -8.0, "geometry": GEOMETRY} | case
                out = lite_attention(q * 8, k, v, read, write, engine=engine, **options)
                found.append((write, out))
            assert torch.equal(found[0][0], found[1][0]), case
            assert torch.allclose(found[0][1].double(), found[1][1].double(), atol=0.03), case
    assert len(calls) == 2 * len(cases)


def test_numbers_that_are_not_in_memory_as_they_are() -> None:
    q, k, v = qkv()
    zero = torch._efficientzerotensor(q.shape, dtype=q.dtype)
    for _ in range(2):
        attention(q, k, v)  # remembers the kind of call
        assert torch.equal(attention(torch._neg_view(q), k, v), attention(-q, k, v))
        assert torch.equal(attention(q, k, torch._neg_view(v)), attention(q, k, -v))
        with pytest.raises(ValueError, match="k has no memory"):
            attention(q, zero, v)
    with pytest.raises(ValueError, match="out must not be a negated view"):
        attention(q, k, v, out=torch._neg_view(torch.empty_like(q)))
