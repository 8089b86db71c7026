"""The inner loops of the Hopper kernels, compiled for sm_90 as they are shipped, and counted.

The order of tiles, which is none of the inner loop's, is the hardware's here.

    PYTHONPATH=tools python -m liteattention_tools.sass [--early-wait]
        [--library FILE --kernel PIECE]

Needs PyTorch and the ``triton`` package, which brings ptxas and cuobjdump, and no GPU. A library's
kernel is counted the same way: the first whose mangled name contains the piece.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonASTSource

from liteattention_rocm.contract import (
    DenseRequest,
    DenseTensors,
    LiteRequest,
    LiteTensors,
    RaggedRequest,
    RaggedTensors,
    TileGeometry,
)
from liteattention_rocm.engines.triton import (
    hopper,
    hopper_ragged,
    launch,
    ragged_cut,
    ragged_launch,
    tiles,
)
from liteattention_rocm.engines.triton.compiled_tiles import HopperTile

#: Lengths of walks in which levels stay, and of others.
_LONG, _SHORT = 8192, 2048
#: Instructions by what they are for, in the order of a report; the rest is "other".
CLASSES = {
    "products": ("HGMMA", "WARPGROUP"),
    "exp2": ("MUFU",),
    "max": ("FMNMX", "VIMNMX", "VIMNMX3"),
    "fp32": ("FADD", "FMUL", "FFMA"),
    "to 16 bits": ("F2FP",),
    "shuffles": ("SHFL",),
    "barriers": ("BAR", "SYNCS"),
    "copies": ("MOV", "IMAD.MOV", "LDL", "STL"),
}
_POINTERS = {
    "lse": "*fp32", "parts": "*fp32", "mass": "*fp32", "sinks": "*fp32", "items": "*i16",
    "tally": "*i64", "counts": "*i32", "order": "*i32", "next_tile": "*i32", "spare": "*i32",
    "votes": "*i32", "weights": "*i32", "must_do": "*i32", "q_start": "*i32", "lengths": "*i32",
    "limits": "*i32", "page_table": "*i32", "out": "*bf16", "k_scale_at": "*fp32",
    "v_scale_at": "*fp32", "part_out": "*fp32", "part_lse": "*fp32", "part_count": "*i32",
}  # fmt: skip
_CPU = torch.device("cpu")
_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.M)
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.M)
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_JUMP = re.compile(r"^BRA(?:\.\S+)?\s.*?\b0x([0-9a-f]+)$")


@dataclass(frozen=True)
class Loop:
    """One round of an inner loop.

    ``keys`` that it takes, its instructions by class and in total, and how many maxima and
    exponentials come before the wait for the product of weights and values.
    """

    keys: int
    total: int
    classes: dict[str, int]
    before_wait: tuple[int, int]


def inner_loops(listing: str) -> list[list[str]]:
    """Instructions of each innermost loop with both products, q.k and p.v, of a kernel.

    ``listing`` is what cuobjdump says of it.
    """
    code = [(int(at, 16), _PREDICATE.sub("", text)) for at, text in _LINE.findall(listing)]
    place = {at: i for i, (at, _) in enumerate(code)}
    found = []
    for i, (_, text) in enumerate(code):
        jump = _JUMP.match(text)
        first = place.get(int(jump[1], 16)) if jump else None
        if first is None or first > i:
            continue
        products = [text for _, text in code[first : i + 1] if text.startswith("HGMMA")]
        if len({".tnspB" in text for text in products}) == 2:
            found.append(range(first, i + 1))
    # What lies out of line jumps back into the middle of a loop, and spans far more than one.
    longest = 1.5 * min(map(len, found), default=0)
    return [
        [code[i][1] for i in loop]
        for loop in found
        if len(loop) <= longest
        and not any(x != loop and x[0] in loop and x[-1] in loop for x in found)
    ]


def inner_loop(listing: str) -> Loop:
    """The shortest loop with both products, q.k and p.v, in what cuobjdump says of a kernel.

    Raises:
        ValueError: there is no such loop.
    """
    found = inner_loops(listing)
    if not found:
        raise ValueError("no loop has the products of queries and keys and of weights and values")
    body = min(found, key=len)
    total = len(body)
    product = next(x for x in body if x.startswith("HGMMA") and ".tnspB" not in x)
    names = [text.split()[0] for text in body]
    counts = Counter(_kind(name) for name in names)
    waits = [i for i, text in enumerate(body) if re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0", text)]
    before = names[: waits[-1]] if waits else []
    maxima = sum(_kind(name) == "max" for name in before)
    exponentials = sum(name.startswith("MUFU.EX2") for name in before)
    keys = re.match(r"HGMMA\.64x(\d+)x16", product)
    assert keys
    return Loop(int(keys[1]), total, dict(counts), (maxima, exponentials))


def _kind(name: str) -> str:
    for label, begins in CLASSES.items():
        if any(name == begin or name.startswith(begin + ".") for begin in begins):
            return label
    return "other"


def listing(binary: Path, function: str | None = None) -> str:
    """What cuobjdump says of a cubin, or of one function of a library."""
    tool = Path(get_ptxas(90).path).with_name("cuobjdump")
    command: list[str | Path] = [tool, "-sass", *(["-fun", function] if function else []), binary]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return str(done.stdout)


def function_of(library: Path, piece: str) -> str:
    """The first kernel of a library whose mangled name contains a piece.

    Raises:
        ValueError: there is none.
    """
    for name in re.findall(rb"_Z[A-Za-z0-9_]{20,}", library.read_bytes()):
        if piece.encode() in name:
            return str(name.decode())
    raise ValueError(f"no kernel of {library} has {piece} in its name")


def source_of(kernel: Any, bound: launch.Launch) -> GluonASTSource:
    """What a bound launch gives the compiler."""
    constants, _, _ = bound._how
    names = kernel.arg_names
    fixed = dict(zip(names[len(names) - len(constants) :], constants, strict=True))
    kinds = {}
    for name, held in zip([n for n in names if n.endswith("_desc")], bound._boxes, strict=True):
        shape = ", ".join(map(str, held["block_shape"]))
        kinds[name] = f"tensordesc<bf16[{shape}],{held['layout']!r}>"
    pointers = [n for n in names if n not in fixed and n not in kinds][: -len(bound._numbers)]
    kinds |= {name: _POINTERS[name] for name in pointers}
    numbers = names[len(kinds) : len(kinds) + len(bound._numbers)]
    for name, value in zip(numbers, bound._numbers, strict=True):
        kinds[name] = "fp32" if isinstance(value, float) else "i32"
    return GluonASTSource(
        fn=kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
    )


def compiled(kernel: Any, bound: launch.Launch) -> bytes:
    """The cubin of a bound launch, without a GPU."""
    _, options, _ = bound._how
    target = GPUTarget("cuda", 90, 32)
    chosen = {**dict(options), "enable_fp_fusion": True}  # as launches ask for
    built = triton.compile(source_of(kernel, bound), target=target, options=chosen)
    return bytes(built.asm["cubin"])


def dense(
    head_dim: int, causal: bool, early_wait: bool = False, fixed: bool = False
) -> launch.Launch:
    """The launch of dense attention in its shipped tile, with a late wait or without.

    With ``fixed`` that of long walks, in which levels stay.
    """
    keys = _LONG if fixed else _SHORT
    request = DenseRequest(
        1, 48, 48, _LONG, keys, head_dim, torch.bfloat16, _CPU, "bhsd", 0.1, causal, "rtne", False
    )
    q = torch.empty(1, 1, 512, head_dim, dtype=torch.bfloat16)
    shipped = tiles.shipped("hopper", request)
    assert isinstance(shipped, HopperTile)
    tile = _by_hardware(shipped)
    if early_wait:
        tile = replace(tile, late_wait=False, late_exp=False)
    return launch._attend(request, tile, DenseTensors(q, q, q, q, None), fixed=fixed)


def _by_hardware(tile: HopperTile) -> HopperTile:
    """The tile without an order of its own, which needs a GPU and is none of the inner loop's."""
    return replace(tile, persistent=False, counted=False, abreast=False)


def lite_tile(head_dim: int, budget: float, rows: int, fixed: bool = False) -> HopperTile:
    """The shipped tile of a LiteAttention step that votes or, with a budget, weighs."""
    found = tiles.hopper_lite(_lite_request(head_dim, budget, rows, fixed))
    assert found is not None
    return found


def _lite_request(head_dim: int, budget: float, rows: int, fixed: bool) -> LiteRequest:
    keys = _LONG if fixed else _SHORT
    return LiteRequest(
        1, 48, 48, _LONG, keys, head_dim, torch.bfloat16, _CPU, "bhsd", 0.1, False, "rtne", False,
        TileGeometry(rows, 128, 64), -float("inf") if budget else -4.0, True, False, budget,
    )  # fmt: skip


def lite(head_dim: int, budget: float, rows: int, fixed: bool = False) -> launch.Launch:
    """The launch of that step, q blocks of ``rows``; ``fixed`` as of :func:`dense`."""
    q = torch.empty(1, 1, 512, head_dim, dtype=torch.bfloat16)
    bits = torch.zeros(1, 1, 4, 1, dtype=torch.int32)
    tile = replace(lite_tile(head_dim, budget, rows, fixed), persistent=False)
    request = _lite_request(head_dim, budget, rows, fixed)
    tensors = LiteTensors(q, q, q, q, None, bits, bits, None, None)
    return launch._attend(request, tile, tensors, fixed=fixed)


def prompts(head_dim: int) -> launch.Launch:
    """The launch of causal prompts in packed keys."""
    request = RaggedRequest(
        1, 512, 1, 1, head_dim, torch.bfloat16, torch.bfloat16, _CPU, 0, 512, 512, 0.1, 0, 0,
        0.0, False, 1.0, 1.0, "rtne", False,
    )  # fmt: skip
    q = torch.empty(512, 1, head_dim, dtype=torch.bfloat16)
    starts = torch.tensor([0, 512], dtype=torch.int32)
    tile = _by_hardware(tiles.shipped_prompts(request, ragged_cut.columns_of(head_dim)))
    with (
        mock.patch.object(ragged_launch, "architecture", lambda device: "sm_90"),
        mock.patch.object(ragged_launch, "compiles_hopper", lambda: True),  # the compiler will say
    ):
        bound = ragged_launch.prompts(
            request, RaggedTensors(q, q, q, q, None, None, starts, starts, None), tile
        )
    assert bound is not None
    return bound.launch


def shipped(early_wait: bool = False) -> dict[str, tuple[Any, launch.Launch]]:
    """Kernels and launches by name."""
    one, many = hopper.attention, hopper_ragged.attention
    found = {}
    for dim, rows in ((128, 128), (64, 192)):
        found[f"causal {dim}"] = (one, dense(dim, True, early_wait))
        for fixed, levels in ((True, "stay"), (False, "follow")):
            found[f"dense {dim}, levels {levels}"] = (one, dense(dim, False, early_wait, fixed))
            for does, budget in (("votes", 0.0), ("weighs", 0.1)):
                found[f"lite {dim}, {does}, levels {levels}"] = (
                    one,
                    lite(dim, budget, rows, fixed),
                )
    for dim in (64, 128, 256):
        found[f"prompts {dim}"] = (many, prompts(dim))
    return found


def count(kernel: Any, bound: launch.Launch) -> Loop:
    """Compile a launch and count its inner loop."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled(kernel, bound))
        return inner_loop(listing(path))


def table(loops: dict[str, Loop]) -> str:
    """Loops as a Markdown table."""
    labels = [*CLASSES, "other"]
    lines = [
        f"| | keys | instructions | {' | '.join(labels)} | max, exp2 before the wait |",
        f"|---|{'---:|' * (len(labels) + 3)}",
    ]
    for name, found in loops.items():
        cells = [found.keys, found.total, *(found.classes.get(x, 0) for x in labels)]
        early = ", ".join(map(str, found.before_wait))
        lines.append(f"| {name} | {' | '.join(map(str, cells))} | {early} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m liteattention_tools.sass", description=__doc__)
    parser.add_argument(
        "--early-wait", action="store_true", help="dense attention without late wait"
    )
    parser.add_argument("--library", type=Path, help="a library whose kernel is counted, too")
    parser.add_argument("--kernel", action="append", default=[], help="piece of a mangled name")
    given = parser.parse_args(arguments)
    if (given.library is None) != (not given.kernel):
        parser.error("--library and --kernel go together")
    loops = {name: count(*one) for name, one in shipped(given.early_wait).items()}
    for piece in given.kernel:
        name = function_of(given.library, piece)
        loops[f"{given.library.name}: {piece}"] = inner_loop(listing(given.library, name))
    print(table(loops))


if __name__ == "__main__":
    main()
