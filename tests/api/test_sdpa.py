"""`sdpa` against torch's function: the same call, the same meaning, or a refusal."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn import functional

from liteattention_rocm import attention, sdpa

#: Sq, Skv: square, fewer rows than keys, more rows than keys, one row, one key.
LENGTHS = [(65, 65), (33, 130), (130, 33), (1, 70), (70, 1)]


def tensors(q_len: int, kv_len: int, heads: int = 4, kv_heads: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(q_len * 1000 + kv_len)
    shapes = [(2, heads, q_len, 64), (2, kv_heads, kv_len, 64), (2, kv_heads, kv_len, 64)]
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_len, kv_len", LENGTHS)
def test_means_what_torch_means(
    q_len: int, kv_len: int, causal: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITEATTENTION_ENGINE", engine)
    q, k, v = tensors(q_len, kv_len)
    right = functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal, scale=0.2
    )
    torch.testing.assert_close(
        sdpa(q, k, v, None, 0.0, causal, 0.2).double(), right, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("q_len, kv_len", LENGTHS)
def test_causal_with_grouped_heads(q_len: int, kv_len: int) -> None:
    q, k, v = tensors(q_len, kv_len, 6, 2)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    right = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(sdpa(q, k, v, **options).double(), right, rtol=0, atol=1e-5)


def test_has_the_arguments_of_torch() -> None:
    ours = inspect.signature(sdpa).parameters
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert list(ours) == names
    q, k, v = tensors(9, 9)
    given = dict(zip(names, (q, k, v, None, 0.0, True, None, False), strict=True))
    torch.testing.assert_close(sdpa(**given), functional.scaled_dot_product_attention(**given))
    assert torch.equal(sdpa(q, k, v), attention(q, k, v, layout="bhsd"))


def test_takes_views_and_compiles() -> None:
    """[B, S, H, D] in memory, as most models hold it."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(40, 70))
    compiled = torch.compile(sdpa, fullgraph=True, backend="eager")
    for causal in (False, True):
        right = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(sdpa(q, k, v, is_causal=causal), right)
        torch.testing.assert_close(compiled(q, k, v, is_causal=causal), right)


@pytest.mark.parametrize(
    "changes, kind, reasons",
    [
        ({"attn_mask": torch.ones(16, 16) > 0}, ValueError, ["must be None", "attention_varlen"]),
        ({"dropout_p": 0.5}, ValueError, ["dropout_p must be 0, got 0.5", "inference only"]),
        ({"dropout_p": "0"}, TypeError, ["dropout_p must be a number, got str"]),
        ({"key": torch.zeros(2, 2, 16, 64), "value": torch.zeros(2, 2, 16, 64)}, ValueError,
         ["query has 4 heads and key 2", "enable_gqa=True"]),
        ({"query": torch.zeros(4, 16, 64)}, ValueError, ["must have 4 dimensions (B,H,S,D)"]),
        ({"attn_mask": torch.zeros(1), "dropout_p": 1, "scale": 1e30}, ValueError,
         ["attn_mask must be None", "dropout_p must be 0, got 1", "scale must be from 2^-60"]),
        ({"is_causal": 1}, TypeError, ["causal must be a bool"]),
        ({"query": [1.0]}, TypeError, ["q must be a tensor, got list"]),
        ({"value": torch.zeros(2, 4, 16, 64).half(), "attn_mask": 0}, TypeError,
         ["one dtype", "attn_mask must be None"]),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], kind: type[Exception], reasons: list[str]) -> None:
    q, k, v = tensors(16, 16)
    with pytest.raises(kind) as caught:
        sdpa(**{"query": q, "key": k, "value": v, **changes})
    for reason in reasons:
        assert reason in str(caught.value)


def test_gradients_are_refused_not_lost() -> None:
    q, k, v = tensors(8, 8)
    with pytest.raises(ValueError, match="no backward pass"):
        sdpa(q.requires_grad_(), k, v)
