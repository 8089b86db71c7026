"""The short way into a compiled kernel on NVIDIA GPUs: parameters are packed once.

A compiled kernel is a function of CUDA's driver with parameters of known sizes, and that is all
that is used: not Triton's launcher, which reads all arguments and makes all tensor maps anew in
each call and which changes from version to version. The driver says which parameters the function
has; where these are not the expected ones, calls go through Triton's launcher.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

#: Numbers by Triton's names of their types.
_NUMBERS: dict[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
    "i64": ctypes.c_int64, "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "f32": ctypes.c_float,
    "fp64": ctypes.c_double,
}  # fmt: skip
#: CUtensorMapDataType by the beginning of Triton's names of types.
_DATA_TYPES = {"tensordesc<fp16[": 6, "tensordesc<bf16[": 9}
#: Addresses of scratch memory, which every kernel takes behind its own parameters.
_SCRATCH = 2
#: Shared memory of a workgroup from which on a launch wants another attribute, bytes.
_MOST_SHARED = 228 << 10


def short_launch(
    compiled: Any, grid: tuple[int, ...], boxes: tuple[dict[str, Any], ...], rest: tuple[Any, ...]
) -> Any | None:
    """What launches a compiled kernel over ``grid``, called with (stream, tensors, addresses).

    ``boxes``: descriptors of the tensors that it takes first, see :func:`.boxes.box`; ``rest``:
    arguments behind its addresses, constants included. The call returns False, and launches
    nothing, if the thread has no current CUDA context. None if the kernel is launched in a way that
    is not known here.
    """
    if torch.version.hip is not None or getattr(compiled.metadata, "target", None) is None:
        return None
    metadata = compiled.metadata
    if metadata.target.backend != "cuda" or not _plain(metadata):
        return None
    parameters = _parameters(compiled, boxes, rest)
    if parameters is None:
        return None
    try:
        from ... import _core
    except ImportError:  # a source tree without a compiler: Triton's launcher does
        return None
    return _core.cuda_kernel(
        compiled.function, grid, 32 * metadata.num_warps, metadata.shared,
        bool(getattr(metadata, "launch_pdl", False)), parameters,
    )  # fmt: skip


def _plain(metadata: Any) -> bool:
    """Whether a launch needs no scratch memory, no cluster and no cooperation."""
    return not (
        getattr(metadata, "global_scratch_size", 0)
        or getattr(metadata, "profile_scratch_size", 0)
        or getattr(metadata, "launch_cooperative_grid", False)
        or metadata.num_ctas != 1
        or metadata.shared > _MOST_SHARED
    )


def _parameters(
    compiled: Any, boxes: tuple[dict[str, Any], ...], rest: tuple[Any, ...]
) -> list[Any] | None:
    """Parameters of the compiled function: None a pointer, bytes a number, a tuple a box.

    None if there is one of another kind.
    """
    maps = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if len(maps) != len(boxes):
        return None
    types = list(compiled.src.signature.values())
    found: list[Any] = []
    for kind, held, meta in zip(types, boxes, maps, strict=False):
        made = _box(str(kind), held, meta)
        if made is None:
            return None
        found.append(made)
        # The function takes sizes and strides beside the map.
        found += [bytes(ctypes.c_int32(size)) for size in held["shape"]]
        found += [bytes(ctypes.c_int64(step)) for step in held["strides"]]
    first = len(types) - len(rest)
    for kind in types[len(boxes) : first]:
        if not isinstance(kind, str) or not kind.startswith("*"):
            return None
        found.append(None)
    for kind, value in zip(types[first:], rest, strict=True):
        if kind == "constexpr":
            continue
        if kind not in _NUMBERS:
            return None
        found.append(bytes(_NUMBERS[kind](value)))
    return found + [bytes(8)] * _SCRATCH


def _box(kind: str, held: dict[str, Any], meta: dict[str, Any]) -> tuple[Any, ...] | None:
    """A descriptor as the driver encodes it, or None if it needs more than is known here."""
    data_type = _DATA_TYPES.get(kind[: kind.find("[") + 1])
    if (
        data_type is None
        or not meta
        or meta.get("fp4_padded")
        or meta.get("is_im2col")
        or held.get("padding", "zero") != "zero"
    ):
        return None
    return (
        data_type, meta["swizzle"], held["shape"], held["strides"], meta["block_size"],
        meta["elem_size"],
    )  # fmt: skip
