"""The portable kernels as Triton compiles them for AMD GPUs: registers, spills, instructions.

    PYTHONPATH=tools python -m liteattention_tools.amdgcn [--target gfx942] [--target gfx950]

Needs PyTorch and the ``triton`` package, which brings LLVM, and no GPU. Tiles are those that the
engine ships; no count here is a time.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from liteattention_rocm.contract import (
    DenseRequest,
    DenseTensors,
    LiteRequest,
    LiteTensors,
    RaggedRequest,
    RaggedTensors,
    TileGeometry,
)
from liteattention_rocm.engines.triton import kernels, launch, ragged, ragged_launch, tiles

TARGETS = ("gfx942", "gfx950")
#: Instructions by how their names begin, the first that fits; the rest is "other".
CLASSES = {
    "MFMA": ("v_mfma_", "v_smfmac_"),
    "exp2": ("v_exp_",),
    "max": ("v_max",),
    "VALU": ("v_",),
    "SALU": ("s_waitcnt", "s_barrier", "s_nop", "s_"),
    "LDS": ("ds_",),
    "global": ("global_", "buffer_", "flat_"),
    "scratch": ("scratch_",),
}
#: Fields of a kernel's metadata, as LLVM writes them.
_FIELDS = (
    "vgpr_count", "agpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count",
    "private_segment_fixed_size",
)  # fmt: skip
_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(r"^\t([a-z]\w+)(?:\s+(.*?))?\s*(?:;.*)?$")
_POINTERS = {
    "lse": "*fp32", "sinks": "*fp32", "part_out": "*fp32", "part_lse": "*fp32", "mass": "*fp32",
    "k_scale_at": "*fp32", "v_scale_at": "*fp32", "items": "*i16", "tally": "*i64",
}  # fmt: skip
_TABLES = (
    "counts", "order", "votes", "weights", "must_do", "part_count", "q_start", "kv_len",
    "lengths", "page_table",
)  # fmt: skip
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Code:
    """A compiled kernel: bytes of LDS, fields of its metadata, and one round of its loop by class.

    The loop is the innermost one with the most matrix instructions.
    """

    lds: int
    fields: dict[str, int]
    loop: dict[str, int]


def read(assembly: str, lds: int) -> Code:
    """Read what LLVM wrote of one kernel, which Triton launches with ``lds`` bytes.

    Raises:
        ValueError: a field of the metadata is missing, or no loop has matrix instructions.
    """
    fields = {}
    for name in _FIELDS:
        found = re.search(rf"^\s*(?:- )?\.{name}:\s+(\d+)", assembly, re.M)
        if found is None:
            raise ValueError(f"the metadata have no .{name}")
        fields[name] = int(found[1])
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    for line in assembly.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(code)
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction:
            code.append((instruction[1], instruction[2] or ""))
    loops = [
        (labels[text], i + 1)
        for i, (name, text) in enumerate(code)
        if name.startswith(("s_cbranch", "s_branch")) and labels.get(text, i + 1) <= i
    ]
    products = {
        (first, end): sum(kind(name) == "MFMA" for name, _ in code[first:end])
        for first, end in loops
    }
    inner = [
        loop for loop, many in products.items()
        if many and not any(_within(other, loop) and products[other] for other in loops)
    ]  # fmt: skip
    if not inner:
        raise ValueError("no loop has matrix instructions")
    first, end = max(inner, key=lambda loop: (products[loop], loop[0] - loop[1]))
    counts = Counter(kind(name) for name, _ in code[first:end])
    return Code(lds, fields, {label: counts[label] for label in (*CLASSES, "other")})


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def kind(name: str) -> str:
    """The class of an instruction, one of :data:`CLASSES` or "other"."""
    for label, begins in CLASSES.items():
        if name.startswith(begins):
            return label
    return "other"


def count(kernel: Any, bound: launch.Launch, target: str) -> Code:
    """Compile a bound launch for a GPU, bf16, and count."""
    constants, options, _ = bound._how
    names = kernel.arg_names
    fixed = dict(zip(names[len(names) - len(constants) :], constants, strict=True))
    if "WIDEN" in fixed:  # what a launch on a CPU asks of the interpreter
        fixed["WIDEN"] = False
    rest = [name for name in names if name not in fixed]
    pointers = rest[: len(rest) - len(bound._numbers)]
    kinds = {name: _POINTERS.get(name, "*bf16") for name in pointers}
    kinds |= {name: "*i32" for name in pointers if name in _TABLES}
    aligned = set(pointers)
    for name, value in zip(rest[len(pointers) :], bound._numbers, strict=True):
        kinds[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, int) and value == 1 and name.startswith("stride"):
            fixed[name] = 1  # as Triton does
        elif isinstance(value, int) and name.startswith("stride") and value % 16 == 0:
            aligned.add(name)
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in fixed else kinds[name] for name in names},
        constexprs=fixed,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    asked = dict(options) | {"enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("hip", target, 64), options=asked)
    return read(str(built.asm["amdgcn"]), built.metadata.shared)


def dense(head_dim: int, causal: bool) -> launch.Launch:
    """The launch of dense attention in its shipped tile."""
    request = DenseRequest(
        1, 8, 8, 4096, 4096, head_dim, torch.bfloat16, _CPU, "bhsd", 0.1, causal, "rtne", False
    )
    q = torch.empty(1, 8, 4096, head_dim, dtype=torch.bfloat16)
    return launch._attend(request, tiles.shipped("plain", request), DenseTensors(q, q, q, q, None))


def lite(head_dim: int, budget: float, keys: int = 64, rows: int = 128) -> launch.Launch:
    """The launch of a LiteAttention step, which votes or, with a budget, weighs."""
    request = LiteRequest(
        1, 8, 8, 4096, 4096, head_dim, torch.bfloat16, _CPU, "bhsd", 0.1, False, "rtne", False,
        TileGeometry(rows, keys, 64), -float("inf") if budget else -4.0, True, False, budget,
    )  # fmt: skip
    q = torch.empty(1, 8, 4096, head_dim, dtype=torch.bfloat16)
    bits = torch.zeros(1, 8, -(-4096 // rows), 2, dtype=torch.int32)
    tensors = LiteTensors(q, q, q, q, None, bits, bits, None, None)
    return launch._attend(request, tiles.plain_lite(request), tensors)


def paged(head_dim: int, rows: int, number: int = 0) -> launch.Launch:
    """Launch ``number`` of a step of 8 requests with ``rows`` rows each, over pages of 16 tokens.

    Of a step with prompts launch 1 is that of requests of few rows.
    """
    request = RaggedRequest(
        8, 8 * rows, 32, 8, head_dim, torch.bfloat16, torch.bfloat16, _CPU, 16, rows, 4096, 0.1,
        0, 0, 0.0, False, 1.0, 1.0, "rtne", False,
    )  # fmt: skip
    q = torch.empty(8 * rows, 32, head_dim, dtype=torch.bfloat16)
    cache = torch.empty(16, 16, 8, head_dim, dtype=torch.bfloat16)
    starts = torch.zeros(9, dtype=torch.int32)
    table = torch.zeros(8, 256, dtype=torch.int32)
    tensors = RaggedTensors(q, cache, cache, q, None, None, starts, starts[:8], table)
    return ragged_launch.Attention(request, tensors)._attend[number]


def shipped() -> dict[str, tuple[Any, launch.Launch]]:
    """Kernels and launches by name."""
    with mock.patch.object(torch.version, "hip", "as on an AMD GPU"):
        return _shipped()


def _shipped() -> dict[str, tuple[Any, launch.Launch]]:
    one, many = kernels.attention, ragged.attention
    found: dict[str, tuple[Any, launch.Launch]] = {}
    for dim in (64, 128):
        found[f"dense {dim}"] = (one, dense(dim, False))
        found[f"causal {dim}"] = (one, dense(dim, True))
        found[f"lite {dim}, votes"] = (one, lite(dim, 0.0))
        found[f"lite {dim}, weighs"] = (one, lite(dim, 0.1))
        found[f"decode {dim}"] = (many, paged(dim, 1))
        found[f"prompts {dim}"] = (many, paged(dim, 512))
        found[f"mixed {dim}"] = (many, paged(dim, 512, 1))
    return found


def table(found: dict[str, Code]) -> str:
    """Kernels as a Markdown table."""
    labels = [*CLASSES, "other"]
    head = ["", "VGPR + AGPR", "spills", "scratch B", "LDS KB", "instructions", *labels]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for name, code in found.items():
        held = code.fields
        vectors = held["vgpr_count"] - held["agpr_count"]
        cells = [
            f"{vectors} + {held['agpr_count']}",
            f"{held['vgpr_spill_count']} + {held['sgpr_spill_count']}",
            held["private_segment_fixed_size"], code.lds >> 10, sum(code.loop.values()),
            *(code.loop[label] for label in labels),
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each target."""
    parser = argparse.ArgumentParser(
        prog="python -m liteattention_tools.amdgcn", description=__doc__
    )
    parser.add_argument("--target", action="append", choices=TARGETS, help="both by default")
    given = parser.parse_args(arguments)
    for target in given.target or TARGETS:
        code = {name: count(*one, target) for name, one in shipped().items()}
        print(f"{target}, Triton {triton.__version__}\n\n{table(code)}\n")


if __name__ == "__main__":
    main()
