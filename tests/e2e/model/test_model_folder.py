"""The pixel VAE is exact, and the committed model is a plain WanPipeline folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT

pytest.importorskip("diffusers")

from liteattention_e2e.clips import SHAPES
from liteattention_e2e.pixel_vae import PixelUnshuffleVAE, pipeline_num_frames

MODEL = ROOT / "e2e" / "model" / "wan-shapes"


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_vae_round_trip_is_bit_exact(factor: int, tmp_path: Path) -> None:
    vae = PixelUnshuffleVAE(factor=factor, z_dim=3 * factor * factor, scale_factor_spatial=factor)
    video = torch.randn(2, 3, 5, 16, 24, generator=torch.Generator().manual_seed(0))
    vae.save_pretrained(tmp_path / "vae")
    for one in (vae, PixelUnshuffleVAE.from_pretrained(tmp_path / "vae")):
        latents = one.encode(video).latent_dist.mode()
        assert latents.shape == (2, 3 * factor * factor, 5, 16 // factor, 24 // factor)
        assert torch.equal(one.decode(latents).sample, video)
        assert torch.equal(one.decode(latents, return_dict=False)[0], video)
        # The pipeline's scaling must not cost a bit either.
        std = torch.tensor(one.config.latents_std).view(1, -1, 1, 1, 1)
        assert torch.equal(one.decode((latents / std) / (1.0 / std)).sample, video)
        assert one.config.z_dim == 3 * factor * factor
        assert one.config.scale_factor_spatial == factor
        assert one.config.scale_factor_temporal == 1


def test_vae_latent_position_holds_its_own_pixels() -> None:
    vae = PixelUnshuffleVAE()
    video = torch.zeros(1, 3, 2, 8, 8)
    video[0, 1, 1, 5, 2] = 1.0
    place = vae.encode(video).latent_dist.sample().nonzero()
    assert place.shape == (1, 5)
    assert place[0, 2:].tolist() == [1, 2, 1]


def test_vae_stays_float32_when_the_pipeline_is_cast() -> None:
    vae = PixelUnshuffleVAE().to(torch.bfloat16)
    assert vae.dtype == torch.float32


def test_vae_refuses_what_it_cannot_do() -> None:
    vae = PixelUnshuffleVAE()
    with pytest.raises(ValueError, match=r"channels.*multiples"):
        vae.encode(torch.zeros(1, 4, 2, 7, 8))
    with pytest.raises(ValueError, match="latents"):
        vae.decode(torch.zeros(1, 3, 2, 8, 8))
    with pytest.raises(ValueError, match=r"z_dim.*scale_factor"):
        PixelUnshuffleVAE(z_dim=5, scale_factor_temporal=4)
    with pytest.raises(ValueError, match="frames"):
        pipeline_num_frames(0)


@pytest.fixture(scope="module")
def pipe():  # type: ignore[no-untyped-def]
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(MODEL, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_model_folder_makes_a_video_of_the_size_asked_for(pipe, frames: int) -> None:  # type: ignore[no-untyped-def]
    def make(seed: int) -> torch.Tensor:
        return pipe(
            "a red circle moves left on a gray background", height=32, width=48,
            num_frames=pipeline_num_frames(frames), num_inference_steps=2, guidance_scale=3.0,
            generator=torch.Generator().manual_seed(seed), max_sequence_length=32,
            output_type="pt",
        ).frames  # fmt: skip

    video = make(0)
    assert video.shape == (1, frames, 3, 32, 48)
    assert torch.isfinite(video).all()
    assert torch.equal(video, make(0)) and not torch.equal(video, make(1))


def test_model_folder_is_small_and_complete(pipe) -> None:  # type: ignore[no-untyped-def]
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 30_000_000
    assert max(path.stat().st_size for path in files) <= 15_000_000
    config = pipe.transformer.config
    assert config.attention_head_dim == 128 and tuple(config.patch_size) == (1, 2, 2)
    assert all(pipe.tokenizer.get_vocab()[shape] > 2 for shape in SHAPES)


def test_first_latents_follow_the_prompt(pipe) -> None:  # type: ignore[no-untyped-def]
    """One step from noise: the mean colour is that of the background asked for."""

    def mean(background: str) -> float:
        video = pipe(
            f"a red circle moves left on a {background} background", height=32, width=32,
            num_frames=pipeline_num_frames(4), num_inference_steps=3, guidance_scale=1.0,
            generator=torch.Generator().manual_seed(0), max_sequence_length=32,
            output_type="pt",
        ).frames  # fmt: skip
        return float(video.mean())

    assert mean("black") + 0.3 < mean("white")


@pytest.mark.slow
def test_training_script_writes_a_folder_that_loads(tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    subprocess.run(
        [sys.executable, str(MODEL.parent / "train.py"), "--out", str(out), "--device", "cpu",
         "--tiny", "--max-steps", "2", "--no-compile", "--no-evaluate", "--text-warmup", "2"],
        check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    from diffusers import WanPipeline

    video = WanPipeline.from_pretrained(out)(
        "a red circle moves left on a gray background", height=32, width=32,
        num_frames=pipeline_num_frames(2), num_inference_steps=1, max_sequence_length=32,
        output_type="pt",
    ).frames  # fmt: skip
    assert video.shape == (1, 2, 3, 32, 32)
