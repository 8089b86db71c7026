"""LiteAttention's machine code on queries and keys of a video model, captured while it runs.

The small model in e2e/model makes a video in 8 denoising steps; the inputs of one self-attention
layer are taken at every step. Scores of such data are what skipping is for, and unlike those of the
other tests their sums are not exact in fp32: bitmaps equal the oracle's nevertheless, since a vote
would have to lie within 1e-6 of the threshold to differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liteattention_e2e import runner
from liteattention_e2e.config import SuiteConfig
from liteattention_rocm.lite import bitmap
from tests import ROOT
from tests.engines.gfx942.kernels import machine
from tests.engines.gfx942.kernels.test_lite import full, step
from tests.oracle import lpt

MODEL = ROOT / "e2e" / "model" / "wan-shapes"
STEPS, LAYER = 8, 3
ROWS = 11 * 12 * 12  # latent frames and places of 48 x 48: 7 q blocks, the last of 48 rows,
Q_BLOCKS, K_BLOCKS = 7, 25  # and 25 K blocks, the last of 48 keys
MFMA = 8 * 64  # of a tile at D = 128: 8 waves, 32 for each product

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulator")]


@pytest.fixture(scope="module")
def captured() -> list[Tensors]:
    """q, k, v [1, S, H, D] of one layer at each step."""
    from diffusers.models.transformers import transformer_wan

    pipe = runner.load(SuiteConfig(model=str(MODEL), prompts=("a red circle moves right",)))
    layers = pipe.transformer.config.num_layers
    dispatch = transformer_wan.dispatch_attention_fn
    calls: list[Tensors] = []

    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> Any:
        if query.shape == key.shape:
            calls.append((query.clone(), key.clone(), value.clone()))
        return dispatch(query, key, value, **more)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(transformer_wan, "dispatch_attention_fn", noted)
        pipe(
            prompt="a red circle moves right on a blue background", height=48, width=48,
            num_frames=10, num_inference_steps=STEPS, guidance_scale=1.0, max_sequence_length=32,
            generator=torch.Generator().manual_seed(0), output_type="latent",
        )  # fmt: skip
    found = calls[LAYER::layers]
    assert len(found) == STEPS and len(calls) == STEPS * layers
    assert found[0][0].shape == (1, ROWS, 3, 128) and found[0][0].dtype == torch.bfloat16
    assert not torch.equal(found[0][1], found[-1][1])
    return found


def kept_tiles(lists: torch.Tensor) -> torch.Tensor:
    """Tiles that each q block computes: [B, H, q_blocks]."""
    return bitmap.unpack(lists, K_BLOCKS).sum(-1)


@pytest.mark.parametrize("soft_skip", [False, True])
@pytest.mark.parametrize("walk", ["alternating", "ascending", "descending"])
def test_eight_denoising_steps(captured: list[Tensors], walk: str, soft_skip: bool) -> None:
    read = full(*captured[0][:2])
    must_do = bitmap.pack(torch.tensor([j in (0, K_BLOCKS - 1) for j in range(K_BLOCKS)]))
    sparsity = []
    for n, (q, k, v) in enumerate(captured):
        descending = n % 2 == 1 if walk == "alternating" else walk == "descending"
        walked = read | must_do
        order = machine.plan(walked)
        kept = kept_tiles(walked)
        assert order.tolist() == lpt.order(kept.flatten().tolist(), Q_BLOCKS, len(order), 152)
        # bitmaps, outputs and LSE are held against the oracle there
        write, _, _, report = step(
            q, k, v, read, threshold=-4.0, descending=descending, soft_skip=soft_skip,
            must_do=must_do, order=order,
        )  # fmt: skip
        tiles = int(kept.sum())
        executed = report.by_unit()["mfma"]
        # K and V of each tile, and one more copy of K per q block that has nothing to fetch
        walked_rows = int((kept > 0).sum())
        assert report.counters["lds_dma_bytes"] == (2 * tiles + walked_rows) * 64 * 128 * 2
        if soft_skip:  # a wave may leave the second product out
            assert tiles * MFMA // 2 < executed <= tiles * MFMA
        else:
            assert executed == tiles * MFMA
        read = write
        sparsity.append(bitmap.sparsity(read, K_BLOCKS))
    print(f"\n{walk}, soft_skip {soft_skip}: sparsity by step {[f'{s:.2f}' for s in sparsity]}")
    assert 0.05 < sparsity[-1] < 0.95
    assert sparsity == sorted(sparsity)  # what is left out stays left out
