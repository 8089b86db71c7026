"""Every bad call raises one error that lists every reason."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

import liteattention_rocm
from liteattention_rocm import TileGeometry, engines
from liteattention_rocm.engines.cpu import chosen_isa
from liteattention_rocm.engines.triton import versions

B, S, H, D = 1, 16, 2, 8


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def call(**changes: Any) -> Any:
    return liteattention_rocm.attention(**{**of_each(ZERO), **changes})


def of_each(x: torch.Tensor) -> dict[str, Any]:
    return {name: x.clone() for name in "qkv"}


ZERO = zeros(B, S, H, D)

NO_ENGINE = "unknown engine 'magic': this build has cpu, gfx942, portable, reference"
ONLY_BF16 = "rounding 'rtz' is for bf16 outputs"
BAD_TYPES: list[Any] = [
    ({"q": [1.0]}, ["q must be a tensor, got list"]),
    ({"q": ZERO.int()}, ["q must be bf16, fp16 or fp32, got torch.int32"]),
    ({"k": ZERO.float()}, ["all tensors must have one dtype, got q torch.bfloat16"]),
    ({"scale": "1"}, ["scale must be a number, got str"]),
    ({"causal": 1}, ["causal must be a bool, got int"]),
    ({"return_lse": None}, ["return_lse must be a bool, got NoneType"]),
    ({"out": ZERO.float()}, ["all tensors must have one dtype", "out torch.float32"]),
]
BAD_VALUES = [
    ({"q": ZERO[0]}, ["q must have 4 dimensions (B,S,H,D), got [16, 2, 8]"]),
    ({"k": ZERO[:, :3]}, ["k and v must have one shape"]),
    ({"q": ZERO.expand(2, -1, -1, -1)}, ["one batch size, got 2 and 1"]),
    ({"k": ZERO[..., :4], "v": ZERO[..., :4]}, ["q and k must have one head dim, got 8 and 4"]),
    ({"q": zeros(B, S, 3, D)}, ["query heads must be a multiple of key heads, got 3 and 2"]),
    ({"q": ZERO[..., :0]}, ["q must have a head dim of at least 1, got [1, 16, 2, 0]"]),
    ({"q": ZERO.mT.contiguous().mT}, ["q must be contiguous in its last dimension"]),
    ({"v": ZERO.to("meta")}, ["all tensors must have one device", "v meta"]),
    ({"layout": "sbhd"}, ["layout must be one of bshd, bhsd, got 'sbhd'"]),
    ({"rounding": "up"}, ["rounding must be one of rtne, rtna, rtz, got 'up'"]),
    ({"scale": math.inf}, ["scale must be finite, got inf"]),
    ({"scale": math.nan}, ["scale must be finite, got nan"]),
    ({"scale": 3e38}, ["scale must be from 2^-60 to 2^60", "got 3e+38"]),
    ({"scale": -1e-45}, ["scale must be from 2^-60 to 2^60", "got -1e-45"]),
    ({"out": ZERO[:, :4]}, ["out must have q's shape [1, 16, 2, 8]"]),
    ({"out": ZERO[:, :1].expand(-1, S, -1, -1)}, ["out must not be an expanded tensor"]),
    ({"engine": "magic"}, [NO_ENGINE]),
    (
        of_each(zeros(B, S, H, 12)),
        ["engine 'cpu' cannot run this: head dim must be a multiple of 8", "engine='reference'"],
    ),
    (of_each(ZERO.float()) | {"rounding": "rtz"}, [ONLY_BF16, "no other engine"]),
    (of_each(ZERO.to("meta")), ["no engine of this build runs on device type 'meta'"]),
]


def each(error: type[Exception], rows: list[Any]) -> list[Any]:
    return [(changes, error, texts) for changes, texts in rows]


@pytest.mark.parametrize(
    ("changes", "error", "texts"), each(TypeError, BAD_TYPES) + each(ValueError, BAD_VALUES)
)
def test_each_reason(changes: dict[str, Any], error: type[Exception], texts: list[str]) -> None:
    with pytest.raises(error) as caught:
        call(**changes)
    for text in texts:
        assert text in str(caught.value)


def test_all_reasons_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        liteattention_rocm.attention(
            torch.zeros(2, S, 3, D),
            torch.zeros(B, S, H, 16, dtype=torch.int8),
            torch.zeros(B, S + 1, H, D),
            layout="nope",  # type: ignore[call-overload]
            scale=math.nan,
            rounding="up",
            causal="yes",
        )
    text = str(caught.value)
    for reason in (
        "k must be bf16, fp16 or fp32, got torch.int8",
        "all tensors must have one dtype",
        "causal must be a bool",
        "layout must be one of",
        "rounding must be one of",
        "scale must be finite",
        "k and v must have one shape",
        "one batch size, got 2 and 1",
        "one head dim, got 8 and 16",
        "got 3 and 2",
    ):
        assert reason in text


@pytest.mark.parametrize("wrong", [[1.0], torch.zeros(4, 2)], ids=["no tensor", "2 dimensions"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_wrong_tensor_hides_nothing_of_the_others(name: str, wrong: Any) -> None:
    """What is said of others is what they are wrong in by themselves, and beside each other."""
    buffer = torch.zeros(1, 8, 3, 16)
    given: dict[str, Any] = {
        "q": buffer,
        "k": torch.zeros(2, 9, 2, 24),
        "v": torch.zeros(2, 8, 2, 16),
        "out": buffer[:, :7],
    }
    about = {
        "q and k must have one batch size, got 1 and 2": {"q", "k"},
        "q and k must have one head dim, got 16 and 24": {"q", "k"},
        "query heads must be a multiple of key heads, got 3 and 2": {"q", "k"},
        "k and v must have one shape, got [2, 9, 2, 24] and [2, 8, 2, 16]": {"k", "v"},
        "out must have q's shape [1, 8, 3, 16], got [1, 7, 3, 16]": {"q"},
        "out must not overlap q": {"q"},
    }
    with pytest.raises((TypeError, ValueError)) as error:
        liteattention_rocm.attention(**given | {name: wrong})
    for reason, names in about.items():
        assert (reason in str(error.value)) == (name not in names), reason


def test_requires_grad_is_refused_only_while_recording() -> None:
    q = ZERO.clone().requires_grad_()
    with pytest.raises(ValueError, match="q requires grad, and there is no backward pass"):
        call(q=q)
    with torch.no_grad():
        call(q=q)


def test_overlapping_out() -> None:
    q = torch.randn(B, S, H, D).bfloat16()
    with pytest.raises(ValueError, match="out must not overlap q: give it memory of its own"):
        call(q=q, out=q)
    base = torch.zeros(B, S + 4, H, D, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out must not overlap k"):
        call(k=base[:, :S], out=base[:, 4:])
    # Interleaved heads of one buffer lie in one byte range, but share nothing.
    qkvo = torch.randn(B, S, H, 4, D).bfloat16()
    call(q=qkvo[..., 0, :], k=qkvo[..., 1, :], v=qkvo[..., 2, :], out=qkvo[..., 3, :])


def lite(**changes: Any) -> Any:
    lists = {"read": BITS.clone(), "write": BITS.clone()}
    options = {"threshold": -6.0, "geometry": TileGeometry(16, 64, 16)}
    return liteattention_rocm.lite_attention(**{**of_each(ZERO), **lists, **options, **changes})


BITS = torch.ones(B, H, 1, 1, dtype=torch.int32)
LITE_TYPES = [
    ({"threshold": "-6"}, ["threshold must be a number, got str"]),
    ({"threshold": None, "budget": True}, ["budget must be a number, got bool"]),
    ({"threshold": None, "budget": False}, ["budget must be a number, got bool"]),
    ({"threshold": None, "budget": ""}, ["budget must be a number, got str"]),
    ({"threshold": None, "budget": 0.1, "mass": BITS}, ["mass must be torch.float32"]),
    ({"threshold": None, "budget": 0.1, "limits": torch.ones(H)}, ["limits must be torch.int32"]),
    ({"geometry": (16, 64)}, ["geometry must be a TileGeometry, got tuple"]),
    ({"read": BITS.long()}, ["read must be torch.int32 (uint32 bit patterns)"]),
    ({"must_skip": [1]}, ["must_skip must be a tensor, got list"]),
    # Sizes are looked at beside types, of the engine's own tiles, too.
    (
        {"read": BITS[:, :1].long(), "write": BITS[..., 0], "descending": 1},
        [
            "read must be torch.int32",
            "descending must be a bool",
            "read must be [1, 2, 1, 1], got [1, 1, 1, 1]",
            "write must be [1, 2, 1, 1], got [1, 2, 1]",
        ],
    ),
    (
        {"geometry": None, "v": ZERO.float(), "read": BITS[:, :1]},
        ["must have one dtype", "read must be [1, 2, 1, 1], got [1, 1, 1, 1]"],
    ),
]
LITE_VALUES = [
    ({"threshold": 0.5}, ["log2 units and must be <= 0, got 0.5"]),
    ({"threshold": math.nan}, ["must be <= 0, got nan"]),
    ({"threshold": None}, ["give a threshold (log2 units) or a budget", "got neither"]),
    ({"budget": 0.1}, ["give a threshold (log2 units) or a budget", "got both"]),
    ({"threshold": None, "budget": 1.0}, ["from 0 to below 1, got 1.0"]),
    ({"threshold": None, "budget": math.nan}, ["from 0 to below 1, got nan"]),
    ({"threshold": None, "budget": 0.1, "soft_skip": True}, ["soft_skip needs a threshold"]),
    ({"mass": torch.empty(B, H, 1, 1)}, ["mass is written in a step with a budget above 0"]),
    (
        {"threshold": None, "budget": 0.1, "mass": torch.empty(B, H, 1, 2)},
        ["mass must be [1, 2, 1, 1], got [1, 2, 1, 2]"],
    ),
    ({"limits": torch.ones(H, dtype=torch.int32)}, ["limits are budgets by head"]),
    (
        {"threshold": None, "budget": 0.1, "limits": torch.ones(H + 1, dtype=torch.int32)},
        ["limits must be [2], got [3]"],
    ),
    ({"write": BITS[:, :1]}, ["write must be [1, 2, 1, 1], got [1, 1, 1, 1]"]),
    ({"must_do": BITS}, ["must_do must be [1], got [1, 2, 1, 1]"]),
    ({"read": BITS, "write": BITS}, ["write must not overlap read"]),
    (
        {"geometry": TileGeometry(16, 32, 16)},
        ["engine 'cpu' cannot run this: k_block must be 64, got 32", "engine='reference'"],
    ),
    (
        {"geometry": TileGeometry(8, 64, 8)},
        ["write must be [1, 2, 2, 1]", "read must be [1, 2, 2, 1]"],
    ),
    ({"threshold": 1.0, "scale": math.inf}, ["must be <= 0", "scale must be"]),
]


@pytest.mark.parametrize(
    ("changes", "error", "texts"), each(TypeError, LITE_TYPES) + each(ValueError, LITE_VALUES)
)
def test_lite_reasons(changes: dict[str, Any], error: type[Exception], texts: list[str]) -> None:
    with pytest.raises(error) as caught:
        lite(**changes)
    for text in texts:
        assert text in str(caught.value)


def test_geometry_reasons() -> None:
    with pytest.raises(ValueError, match=r"vote_rows 48 must divide q_block 128"):
        TileGeometry(128, 64, 48)
    with pytest.raises(ValueError, match=r"q_block .* got 0; k_block .* got -1"):
        TileGeometry(0, -1, 1)


def test_merge_reasons() -> None:
    out, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match="equally many and at least one, got 0 and 0"):
        liteattention_rocm.merge_states([], [])
    with pytest.raises(TypeError) as caught:
        liteattention_rocm.merge_states([out, out.double()], [lse, lse[:, :, :1].double()])
    for text in ("outs[1] is torch.float64", "lses[1] must be [1, 2, 4]", "lses[1] must be torch"):
        assert text in str(caught.value)


def test_one_reason_of_a_merge_hides_no_other() -> None:
    out, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    wrong: Any = "sbhd"
    for outs, lses, layout, reasons in (
        ([out, out.half()], [lse, lse.half()], wrong, ["layout must be one", "outs[1] is torch"]),
        ([out.int()], [lse.half(), lse], "bshd", ["got 1 and 2", "outs must be bf16, fp16"]),
        ([out[0]], [lse.half()], "bshd", ["outs must have 4 dimensions, got [4, 2, 8]"]),
        (None, [lse.half()], "bshd", ["outs must be a sequence of tensors, got NoneType"]),
        ([out, 3], [lse.half(), lse[:, :1]], "bshd", ["outs[1] must be a tensor", "got [1, 1, 4]"]),
    ):
        with pytest.raises(TypeError) as caught:
            liteattention_rocm.merge_states(outs, lses, layout=layout)
        text = str(caught.value)
        assert "must be torch.float32, got torch.float16" in text
        assert not [reason for reason in reasons if reason not in text]


def test_a_merge_holds_parts_against_the_first_that_is_a_tensor() -> None:
    outs: list[Any] = ["x", torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)]
    with pytest.raises(TypeError) as error:
        liteattention_rocm.merge_states(outs, [torch.zeros(1, 3, 2), torch.zeros(2), None])
    for reason in (
        "outs[0] must be a tensor, got str",
        "lses[2] must be a tensor, got NoneType",
        "outs[2] is torch.float32 [1, 2, 3, 5], outs[1] is torch.float32 [1, 2, 3, 4]",
        "lses[1] must be [1, 3, 2] (B, H, S), got [2]",
    ):
        assert reason in str(error.value)


def test_engine_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engines.ENGINE_VARIABLE, raising=False)
    assert engines.choose("cpu").name == "cpu"
    engines.settings.cache_clear()
    monkeypatch.setenv(engines.ENGINE_VARIABLE, "reference")
    assert engines.choose("cpu").name == "reference"
    assert engines.choose("cpu", "cpu").name == "cpu"
    engines.settings.cache_clear()
    monkeypatch.setenv(engines.ENGINE_VARIABLE, "fast")
    with pytest.raises(ValueError, match="unknown engine 'fast'"):
        call()


def test_engine_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engines.registry._announced.clear()
    with caplog.at_level("INFO", logger="liteattention_rocm.engines"):
        for _ in range(3):
            call(engine="cpu")
    lines = [r.getMessage() for r in caplog.records if "attention engine" in r.getMessage()]
    assert lines == [f"attention engine cpu, {chosen_isa()} (chosen by engine=)"]


def test_an_engine_that_lacks_triton_says_what_else_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "triton" else find(name, *more),
    )
    # another test of this process may have asked before
    monkeypatch.setattr(versions, "_asked", versions._asked.__wrapped__)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="engine 'portable' cannot run this: ") as caught:
        call(engine="portable")
    for reason in ("pip install triton; it runs on GPU tensors", "; head dim must be 64 or 128"):
        assert reason in str(caught.value)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_budgets_by_head_of_a_step_that_drops_nothing(engine: str) -> None:
    """As a policy's step of zeros: every tile stays, and the result is that with a budget of 0."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, B, 128, H, D, generator=g).bfloat16()
    full = torch.full((B, H, 8, 1), 3, dtype=torch.int32)
    results = []
    for limits in (None, torch.zeros(H, dtype=torch.int32), torch.ones(H, dtype=torch.int32)):
        for _ in range(2):  # the second call is a remembered one
            write = torch.zeros_like(full)
            out = lite(
                q=q, k=k, v=v, read=full, write=write, threshold=None, budget=0, limits=limits,
                engine=engine,
            )  # fmt: skip
            assert torch.equal(write, full)
            results.append(out)
    assert all(torch.equal(results[0], out) for out in results)
    with pytest.raises(ValueError, match=r"limits must be \[2\], got \[3\]"):
        lite(
            q=q, k=k, v=v, read=full, write=write, threshold=None, budget=0, engine=engine,
            limits=torch.zeros(H + 1, dtype=torch.int32),
        )  # fmt: skip
