"""What the cycle model says of aiter's prefill kernels, beside what was measured on MI308X.

The measurements are tingqli/pyhip's (3 heads, 63k keys, not causal), in clk per matrix instruction
32x32x8, or 32x32x16 of fp8.
"""

from pathlib import Path

from liteattention_emulator.timing import Replay, replay

from .cases import prepare
from .prefill import Prefill

#: AITER's Triton kernel, in the same measurements, and how far the model may be off.
TRITON = (62.3, 0.12)
#: By kernel: clk measured, and how far the model may be off.
MEASURED = {
    "MI300/fwd_hd128_bf16_rtna_group": (38.96, 0.03),
    "MI308/fwd_hd128_bf16_rtna_group": (54.24, 0.03),
    "MI300/fwd_hd128_fp8": (49.03, 0.12),
    "MI308/fwd_hd128_fp8": (63.45, 0.12),
}
MODELLED = (
    "MI300/fwd_hd128_bf16_rtz",
    "MI300/fwd_hd128_bf16_rtne",
    *MEASURED,
    "MI300/fwd_hd192x128_bf16_rtne",
)


def modelled(root: Path, kernel: str, keys: int = 1536) -> Replay:
    """Replay the first workgroup of a kernel, 256 rows of q."""
    with prepare(root / f"fmha_v3_fwd/{kernel}.co", Prefill(((256, keys),), 1, 1)) as ready:
        recording = ready.run(record=0).recording
    assert recording is not None
    return replay(recording)
