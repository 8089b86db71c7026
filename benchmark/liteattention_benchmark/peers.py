"""The implementations that ours are compared with, each a small plug-in.

A peer makes a call for tensors [B, H, S, D]; if it is not installed or cannot run on this machine
it says why (:class:`Unavailable`), which becomes a line of the report. ``PEERS`` lists those of
self-attention, ``TILE_PEERS`` those that take a list of tiles; a benchmark of one's own adds more
(:func:`given`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from liteattention_rocm.cli.text import unwritable

Call = Callable[[], torch.Tensor]
#: (q, k, v, causal) -> a call; raises Unavailable.
Maker = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Call]
#: (q, k, v, tiles to compute, rows and keys of a tile) -> a call; raises Unavailable.
TileMaker = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int]], Call
]


class Unavailable(Exception):
    """A contender that is not installed or cannot run a cell; says why."""


@dataclass(frozen=True)
class Peer:
    """An implementation of attention. ``beside_lite``: also timed, dense, beside LiteAttention."""

    name: str
    make: Maker
    beside_lite: bool = False


def sdpa(backend: str | None) -> Maker:
    """torch's own attention, held to one of its backends."""

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        function: Any = torch.nn.functional.scaled_dot_product_attention
        if backend is None:
            return lambda: function(q, k, v, is_causal=causal, **grouped)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, backend)

        def call() -> torch.Tensor:
            with sdpa_kernel(chosen):
                return function(q, k, v, is_causal=causal, **grouped)  # type: ignore[no-any-return]

        return call

    return make


@functools.cache
def compiled_flex() -> Any:
    """Compile FlexAttention, once per process."""
    try:
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError as error:
        raise Unavailable(str(error)) from error
    return torch.compile(flex_attention, dynamic=False)


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    """FlexAttention, compiled."""
    compiled = compiled_flex()
    mask = None
    if causal:
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            return i >= j

        mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=str(q.device))
    grouped = q.shape[1] != k.shape[1]
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


def flex_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: torch.Tensor, size: tuple[int, int]
) -> Call:
    """FlexAttention over the same tiles, as a ``BlockMask``."""
    flex = compiled_flex()
    from torch.nn.attention.flex_attention import BlockMask

    counts = tiles.sum(-1).int()
    indices = (~tiles).int().argsort(dim=-1, stable=True).int()
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(indices), counts, indices, BLOCK_SIZE=size,
        seq_lengths=(q.shape[2], k.shape[2]),
    )  # fmt: skip
    return lambda: flex(q, k, v, block_mask=mask)


def sparge(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: torch.Tensor, size: tuple[int, int]
) -> Call:
    """SpargeAttn's block-sparse kernel (int8 and fp8 inside) over the same tiles."""
    function = _function("spas_sage_attn", "block_sparse_sage2_attn_cuda")
    # its blocks: 64 rows x 128 keys on Hopper, 128 x 64 elsewhere
    wanted = (64, 128) if torch.cuda.get_device_capability(q.device)[0] == 9 else (128, 64)
    if any(have % want for have, want in zip(size, wanted, strict=True)):
        raise Unavailable(f"its blocks of {wanted} do not divide tiles of {size}")
    mask = tiles.repeat_interleave(size[0] // wanted[0], 2)
    mask = mask.repeat_interleave(size[1] // wanted[1], 3).to(torch.int8)
    blocks = (-(-q.shape[2] // wanted[0]), -(-k.shape[2] // wanted[1]))
    mask = mask[:, :, : blocks[0], : blocks[1]].contiguous()
    return lambda: function(q, k, v, mask_id=mask)


def _function(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, OSError, AttributeError) as error:
        raise Unavailable(f"package {module} is not installed") from error


def package(module: str, function: str) -> Maker:
    """A function of (q, k, v, causal=) on [B, S, H, D]."""

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        found = _function(module, function)
        x, y, z = (t.transpose(1, 2) for t in (q, k, v))

        def call() -> torch.Tensor:
            out = found(x, y, z, causal=causal)
            out = out[0] if isinstance(out, tuple) else out
            return out.transpose(1, 2)  # type: ignore[no-any-return]

        return call

    return make


def given(text: str) -> tuple[str, Maker]:
    """Read a peer from "NAME=FILE:FUNCTION" or "NAME=MODULE:FUNCTION".

    The function takes (q, k, v, causal, scale), contiguous tensors [B, H, S, D], and returns the
    output; Triton's tutorial ``06-fused-attention.py`` has one that is called ``attention``.

    Raises:
        ValueError: the text is of another form or no UTF-8, or the name is one of ours.
    """
    nameless = unwritable(text)
    if nameless is not None:
        raise ValueError(nameless)
    name, equals, place = text.partition("=")
    where, colon, function = place.rpartition(":")
    if not (name and equals and where and colon and function.isidentifier()):
        raise ValueError(f"a peer is NAME=FILE_OR_MODULE:FUNCTION, got {text!r}")
    if name.partition(",")[0].strip() == "ours":
        raise ValueError(f"{name!r} is a name of ours: give the peer another one")

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        found = getattr(_module(where), function, None)
        if found is None:
            raise Unavailable(f"{where} has no {function}")
        scale = q.shape[-1] ** -0.5
        # Examples leave strides out of account; the copies are made before anything is timed.
        x, y, z = (tensor.contiguous() for tensor in (q, k, v))
        return lambda: found(x, y, z, causal, scale)

    return name, make


@functools.cache
def _module(where: str) -> Any:
    """Import a module by its name, or a file by its path."""
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(Path(where).stem.replace("-", "_"), where)
        if spec is None or spec.loader is None:
            raise ImportError(f"{where} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (ImportError, OSError) as error:
        raise Unavailable(f"cannot import {where}: {error}") from error


def _only_given(project: str) -> Maker:
    """A project that ships its kernel as an example and no package that has it."""

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        raise Unavailable(f"it is an example of {project}: name your copy with --peer")

    return make


def fa3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, library: Path | None
) -> Call:
    """FlashAttention-3: its package, or the library of a vLLM wheel."""
    if library is None:
        return package("flash_attn_interface", "flash_attn_func")(q, k, v, causal)
    forward = fa3_forward(library)
    batch, length = q.shape[0], q.shape[2]
    x, y, z = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    starts = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * length

    def call() -> torch.Tensor:
        out = forward(x, y, z, starts, starts, length, length, None, None, causal)
        return out.view(batch, length, *out.shape[1:]).transpose(1, 2)

    return call


def fa3_forward(library: Path) -> Callable[..., torch.Tensor]:
    """The library's forward operator with what this benchmark uses of it."""
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        operator = torch.ops._vllm_fa3_C.fwd.default
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{library} has no FlashAttention-3: {error}") from error
    names = [argument.name for argument in operator._schema.arguments]

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_start: torch.Tensor,
        k_start: torch.Tensor | None,
        q_len: int,
        k_len: int,
        used: torch.Tensor | None,
        table: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        given = {
            "q": q, "k": k, "v": v, "cu_seqlens_q": q_start, "cu_seqlens_k": k_start,
            "max_seqlen_q": q_len, "max_seqlen_k": k_len, "seqused_k": used, "page_table": table,
            "softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal, "window_size_left": -1,
            "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True,
            "num_splits": 0 if table is not None else 1, "sm_margin": 0, "cp_world_size": 1,
            "cp_rank": 0,
        }  # fmt: skip
        return operator(  # type: ignore[no-any-return]
            **{
                name: given.get(name)
                for name, argument in zip(names, operator._schema.arguments, strict=True)
                if name in given or not argument.has_default_value()
            }
        )[0]

    return forward


#: Peers of self-attention on a GPU, by name.
PEERS = (
    Peer("cuDNN (SDPA)", sdpa("CUDNN_ATTENTION"), beside_lite=True),
    Peer("FA2 (SDPA)", sdpa("FLASH_ATTENTION")),
    Peer("efficient (SDPA)", sdpa("EFFICIENT_ATTENTION")),
    Peer("FlexAttention", flex),
    Peer("flash-attn 2", package("flash_attn", "flash_attn_func")),
    Peer("flash-attn 4", package("flash_attn.cute", "flash_attn_func")),
    Peer("AITER", package("aiter", "flash_attn_func")),
    Peer("TileLang", _only_given("TileLang")),
    Peer("Triton tutorial", _only_given("Triton")),
)

#: Peers that compute given tiles alone.
TILE_PEERS: Mapping[str, TileMaker] = {
    "FlexAttention, BlockMask": flex_blocks,
    "SpargeAttn (int8), same tiles": sparge,
}


def self_attention_peers(
    device: torch.device, fa3_library: Path | None, more: Mapping[str, Maker], lite: bool
) -> dict[str, Maker]:
    """Peers for a device; those given with ``more`` replace ours of the same name.

    Beside LiteAttention (``lite``) only the fastest dense ones run, and those given.
    """
    if device.type != "cuda":
        return {"SDPA": sdpa(None), **more}
    found = {peer.name: peer.make for peer in PEERS if peer.beside_lite or not lite}
    found["FA3"] = functools.partial(fa3, library=fa3_library)
    return {**found, **more}
