"""Calls of the gfx942 engine by its contract, and what of them reached a run-time that notes it."""

from __future__ import annotations

from typing import Any

import torch

from liteattention_rocm.contract import DenseRequest, DenseTensors, Engine, LiteRequest

from .conftest import FakeHip

LAUNCHING = {"hipModuleLaunchKernel", "hipHostRegister", "hipHostUnregister"}
#: Names of kernels, less their head dim, by dtype and rounding.
NUMBERS = {
    (torch.bfloat16, "rtne"): "bf16{}_rtne",
    (torch.bfloat16, "rtna"): "bf16{}_rtna",
    (torch.bfloat16, "rtz"): "bf16{}_rtz",
    (torch.float16, "rtne"): "fp16{}",
}


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def request_of(q: torch.Tensor, k: torch.Tensor, layout: Any = "bshd", **changes: Any) -> Any:
    """A dense request; a LiteAttention step if ``changes`` have a geometry."""
    rows, heads = (1, 2) if layout == "bshd" else (2, 1)
    fields = {
        "batch": q.shape[0], "q_heads": q.shape[heads], "kv_heads": k.shape[heads],
        "q_len": q.shape[rows], "kv_len": k.shape[rows], "head_dim": q.shape[-1], "dtype": q.dtype,
        "device": q.device, "layout": layout, "scale": 0.125, "causal": False, "rounding": "rtne",
        "return_lse": False,
    }  # fmt: skip
    if "geometry" in changes:
        fields |= {"threshold": -1.0, "descending": False, "soft_skip": False}
        return LiteRequest(**(fields | changes))
    return DenseRequest(**(fields | changes))


def run(engine: Engine, request: Any, tensors: Any) -> None:
    """Bind and call."""
    engine.bind(request, tensors)(tensors)


def run_dense(
    engine: Engine,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    layout: Any = "bshd",
    **changes: Any,
) -> None:
    request = request_of(q, k, layout, return_lse=lse is not None, **changes)
    run(engine, request, DenseTensors(q, k, v, out, lse))


def launches(hip: FakeHip) -> list[tuple[dict[str, str], bytes]]:
    found = []
    for call in hip.of("hipModuleLaunchKernel"):
        name, *fields = call.split()
        data = fields.pop() if "=" not in fields[-1] else ""
        found.append((dict(f.split("=") for f in fields) | {"name": name}, bytes.fromhex(data)))
    return found


def expect_launches(hip: FakeHip, expected: list[tuple[str, int, int, bytes]]) -> None:
    seen = [(made["name"], made["grid"], made["block"], data) for made, data in launches(hip)]
    assert seen == [
        (name, f"{grid}x1x1", f"{block}x1x1", data) for name, grid, block, data in expected
    ]
