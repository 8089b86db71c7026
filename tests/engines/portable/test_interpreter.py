"""The plain kernels in Triton's interpreter, on CPU tensors, against float64 and the skip oracle.

``TRITON_INTERPRET`` decides when kernels are defined, so these tests want a process of their own:
``TRITON_INTERPRET=1 python -m pytest tests/engines/portable``.
"""

import math
from typing import Any

import pytest
import torch

from liteattention_rocm import TileGeometry, attention, lite_attention
from liteattention_rocm.lite import bitmap
from tests.lite import stray_bits
from tests.oracle.attention import HALF_ULP, bound, exact, expect_lse, expect_out
from tests.oracle.tensors import normal

# log2(0) of a row that saw no key, which NumPy warns of
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    """q, k, v: [B, H, S, D]; also as [B, S, H, D] without a copy."""
    expected = exact(q, k, v, causal=options.get("causal", False), scale=options.get("scale"))
    # The interpreter truncates where a GPU rounds to nearest: a whole ulp instead of half of one,
    # of the probabilities (which are in the dtype of the values) and of the output.
    allowed = bound(expected, q.dtype, "rtz") + HALF_ULP[q.dtype] * 2 * expected.weight
    for layout in ("bhsd", "bshd"):
        turned = [x.transpose(1, 2) if layout == "bshd" else x for x in (q, k, v)]
        target = torch.full_like(turned[0], math.nan)
        _, lse = attention(
            *turned, layout=layout, return_lse=True, out=target, engine="portable", **options
        )
        out = target.transpose(1, 2) if layout == "bshd" else target
        expect_out(out, expected, allowed)
        expect_lse(lse, expected.lse, rtol=1e-5)


@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (100, 130), (128, 128), (130, 64), (257, 50)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_around_every_edge(q_len: int, kv_len: int, causal: bool) -> None:
    q, k, v = normal(1, 2, q_len, 64), normal(1, 1, kv_len, 64, seed=1), normal(1, 1, kv_len, 64)
    check(q, k, v, causal=causal)


def far(x: torch.Tensor, apart: int = 33 << 20) -> torch.Tensor:
    """[1, 1, S, D] in [1, S, 1, D] whose rows lie ``apart`` elements apart; mostly untouched."""
    rows, width = x.shape[2:]
    room = torch.empty((rows - 1) * apart + width, dtype=x.dtype)
    return room.as_strided((1, rows, 1, width), (room.numel(), apart, width, 1)).copy_(
        x[:, 0, :, None]
    )


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("lite", [False, True])
def test_rows_of_a_tile_that_lie_further_apart_than_32_bits(name: str, lite: bool) -> None:
    near = {x: normal(1, 1, 100, 64, seed=i) for i, x in enumerate(("q", "k", "v", "out"))}
    made = []
    for tensors in (near, near | {name: far(near[name]).transpose(1, 2)}):
        q, k, v, out = tensors.values()
        if lite:
            geometry = TileGeometry(128, 64, 64)
            read = bitmap.full(1, 1, 1, geometry.k_blocks(100))
            lite_attention(
                q, k, v, read, torch.empty_like(read), threshold=-math.inf, geometry=geometry,
                layout="bhsd", out=out, engine="portable",
            )  # fmt: skip
        else:
            attention(q, k, v, layout="bhsd", out=out, engine="portable")
        made.append(out.clone())
    assert torch.equal(*made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_batches_and_the_larger_head(dtype: torch.dtype) -> None:
    q = normal(2, 4, 70, 128, dtype=dtype)
    k, v = (normal(2, 2, 150, 128, dtype=dtype, seed=i) for i in (1, 2))
    check(q, k, v)


@pytest.mark.parametrize("rounding", ["rtne", "rtna", "rtz"])
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_roundings_and_scales(rounding: str, scale: float) -> None:
    q, k, v = (normal(1, 1, 40, 64, seed=i) for i in range(3))
    check(q, k, v, rounding=rounding, scale=scale)


def grid(*shape: int, seed: int) -> torch.Tensor:
    """Eighths within +-4: every dot product is exact in fp32, so votes have no near ties."""
    return (
        ((normal(*shape, dtype=torch.float32, seed=seed) * 8).round() / 8).clamp(-4, 4).bfloat16()
    )


@pytest.mark.parametrize("soft_skip", [False, True])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(
    ("tile", "q_len", "kv_len"),
    [
        (TileGeometry(32, 16, 16), 40, 600),  # 38 K blocks: votes of more than one word
        (TileGeometry(64, 32, 32), 130, 256),
        (TileGeometry(16, 16, 1), 16, 100),
        (TileGeometry(48, 16, 16), 130, 200),  # three in four rows of a program
    ],
)
def test_lists_equal_the_oracle_bit_for_bit(
    tile: TileGeometry, q_len: int, kv_len: int, masks: bool, soft_skip: bool
) -> None:
    k_blocks = tile.k_blocks(kv_len)
    numbers = torch.arange(k_blocks)
    must_do = bitmap.pack(numbers % 9 == 2) if masks else None
    must_skip = bitmap.pack(numbers % 7 == 3) if masks else None
    read = bitmap.full(1, 2, tile.q_blocks(q_len), k_blocks)
    read[0, 1, 0] = 0  # nothing to compute but what must be
    sparsities = []
    for step in range(3):
        q, k, v = (
            grid(1, heads, rows, 64, seed=10 * step + i)
            for i, (heads, rows) in enumerate(((2, q_len), (1, kv_len), (1, kv_len)))
        )
        # K blocks at different heights along one direction, so that whole tiles fall below
        heights = torch.linspace(-3, 3, k_blocks)[(numbers * 5) % k_blocks]
        k[..., 0] = heights.repeat_interleave(tile.k_block)[:kv_len].bfloat16()
        q[..., 0] = 4.0
        results = {}
        for engine in ("portable", "reference"):
            write = torch.full_like(read, -5)
            out, lse = lite_attention(
                q, k, v, read, write, threshold=-4.0, descending=step % 2 == 1, soft_skip=soft_skip,
                must_do=must_do, must_skip=must_skip, geometry=tile, layout="bhsd", scale=0.25,
                return_lse=True, engine=engine,
            )  # fmt: skip
            results[engine] = (write, out.double(), lse)
        ours, theirs = results["portable"], results["reference"]
        assert torch.equal(ours[0], theirs[0])
        assert torch.allclose(ours[1], theirs[1], atol=0.02, rtol=0.01)
        assert torch.allclose(ours[2], theirs[2], atol=1e-4)
        read = theirs[0]
        sparsities.append(bitmap.sparsity(read, k_blocks))
    assert 0.05 < sparsities[0] < sparsities[-1] < 0.99


def test_no_threshold_is_dense_bit_for_bit() -> None:
    q, k, v = (normal(1, 2, 200, 64, seed=i) for i in range(3))
    tile = TileGeometry(128, 64, 64)  # what dense calls are compiled for
    read = bitmap.full(1, 2, 2, 4)
    write = torch.zeros_like(read)
    out, lse = lite_attention(
        q, k, v, read, write, threshold=-math.inf, descending=True, geometry=tile,
        layout="bhsd", return_lse=True, engine="portable",
    )  # fmt: skip
    dense, dense_lse = attention(q, k, v, layout="bhsd", return_lse=True, engine="portable")
    assert torch.equal(out, dense)
    assert torch.equal(lse, dense_lse)
    assert torch.equal(write, read)


def test_a_tile_exactly_at_the_threshold_is_negligible() -> None:
    q = torch.zeros(1, 1, 20, 64, dtype=torch.bfloat16)
    q[..., 0] = 1.0
    k = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
    # scores of K blocks 0 to 3: 0, -4, -3.875, -4.125, in log2 units
    k[0, 0, :, 0] = torch.tensor([0.0, -4.0, -3.875, -4.125]).repeat_interleave(16)
    tile = TileGeometry(16, 16, 16)
    read = bitmap.full(1, 1, 2, 4)
    for engine in ("portable", "reference"):
        write = torch.zeros_like(read)
        lite_attention(
            q, k, k, read, write, threshold=-4.0, geometry=tile, layout="bhsd",
            scale=1 / math.log2(math.e), engine=engine,
        )  # fmt: skip
        # the second q block has 4 rows: those past the end have no vote
        assert bitmap.unpack(write, 4)[0, 0].tolist() == [[True, False, True, False]] * 2


def test_nan_keeps_every_later_tile() -> None:
    q, k, v = (grid(1, 1, 64, 64, seed=i) for i in range(3))
    k[0, 0, 20, 3] = math.nan
    tile = TileGeometry(16, 16, 16)
    read = bitmap.full(1, 1, 4, 4)
    lists = []
    for engine in ("portable", "reference"):
        write = torch.zeros_like(read)
        lite_attention(
            q, k, v, read, write, threshold=0.0, geometry=tile, layout="bhsd", engine=engine
        )
        lists.append(write)
    assert torch.equal(*lists)


def test_requests_it_cannot_run_list_every_reason() -> None:
    q = torch.zeros(1, 2, 40, 96, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"dtype must be bf16 or fp16.*head dim must be 64 or 128"):
        attention(q, q, q, layout="bhsd", engine="portable")
    x = torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16)
    tile = TileGeometry(80, 48, 16)
    read = bitmap.full(1, 2, 1, 1)
    with pytest.raises(ValueError, match=r"q_block must be a power of two.*k_block must be"):
        lite_attention(
            x, x, x, read, read.clone(), threshold=-4.0, geometry=tile, layout="bhsd",
            engine="portable",
        )  # fmt: skip


def test_bits_past_the_last_k_block_are_ignored() -> None:
    stray_bits.check("portable", 200)
