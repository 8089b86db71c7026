"""Ragged batches through the public API on the gfx942 engine, held against float64."""

from __future__ import annotations

from typing import Any

import torch

from liteattention_rocm import serving
from tests.oracle import attention
from tests.oracle.ragged import Case, paged


def expect_close(
    case: Case,
    out: torch.Tensor,
    lse: torch.Tensor,
    rounding: str = "rtne",
    *,
    sinks: bool = False,
    **options: Any,
) -> None:
    expected = case.exact(sinks=case.sinks if sinks else None, **options)
    attention.expect_close(
        out[case.rows], lse[:, case.rows], expected, rounding, what=case.requests, p_as_output=True
    )


def run(
    case: Case, page_size: int, *, rounding: Any = "rtne", sinks: bool = False, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of the gfx942 engine through the public API; page size 0: packed."""
    out = torch.full_like(case.q, 7.0)
    common = {
        "sinks": case.sinks if sinks else None,
        "rounding": rounding,
        "return_lse": True,
        "out": out,
        "engine": "gfx942",
        "causal": True,
    } | options
    if not page_size:
        k, v = torch.cat(case.k), torch.cat(case.v)
        _, lse = serving.attention_varlen(case.q, k, v, case.q_start, case.kv_start, **common)
    else:
        k, v, table = paged(case, page_size, options.get("window") or 0)
        # The API looks at every page that could be read; here some are hidden on purpose.
        batch = serving.PagedBatch(case.q_start, case.kv_len, table)
        batch.check_cache = lambda *sizes: None  # type: ignore[method-assign]
        _, lse = serving.attention_paged(case.q, k, v, batch, **common)
    end = int(case.q_start[-1])
    assert (out[end:] == 7.0).all()  # padding rows
    return out, lse


def check(
    case: Case, page_size: int, *, rounding: Any = "rtne", **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run, compare with float64, return what came out."""
    out, lse = run(case, page_size, rounding=rounding, **options)
    expect_close(case, out, lse, rounding, **options)
    return out, lse
