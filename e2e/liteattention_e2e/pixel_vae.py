"""An exactly invertible stand-in for a video VAE: 2x2 pixel unshuffle, no loss, no weights.

A small model does not need a learned autoencoder, and a learned one would dominate the time of a
CPU run (7 s for 33 frames of 256x256 on two cores). Here a latent is simply the four pixels of a
2x2 square in 12 channels, so that decode(encode(x)) == x bit for bit, and the whole of a quality
difference comes from the transformer.

`PixelUnshuffleVAE` offers what `diffusers.WanPipeline` asks of its `vae`. diffusers loads classes
of foreign modules only if the module has been imported before, so::

    import liteattention_e2e.pixel_vae
    from diffusers import WanPipeline
    pipe = WanPipeline.from_pretrained("e2e/model/wan-shapes", dtype=torch.bfloat16)
    pipe(prompt, num_frames=pipeline_num_frames(8), ...)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config

# diffusers finds how to load a class by looking for the *name* ModelMixin in the class's module.
from diffusers.models.modeling_utils import ModelMixin
from torch.nn import functional

__all__ = ["ModelMixin", "PixelLatents", "PixelOutput", "PixelUnshuffleVAE", "pipeline_num_frames"]


def pipeline_num_frames(frames: int, scale_factor_temporal: int = 1) -> int:
    """The `num_frames` argument that makes WanPipeline return `frames` frames.

    WanPipeline (diffusers 0.42) rounds num_frames to a multiple of the temporal factor plus one;
    at a factor of one that makes 9 of 8. For larger factors `frames` is returned as it is.
    """
    if frames < 1:
        raise ValueError(f"frames is {frames}: at least 1 is needed")
    return frames - 1 if scale_factor_temporal == 1 else frames


@dataclass(frozen=True)
class PixelLatents:
    """The "distribution" of an exact encoder: a single point, float [B, z_dim, F, H/2, W/2]."""

    mean: torch.Tensor

    def mode(self) -> torch.Tensor:
        """The latents."""
        return self.mean

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """The latents (there is nothing to draw; `generator` is not used)."""
        return self.mean


@dataclass(frozen=True)
class PixelOutput:
    """Result of encode (`latent_dist`) or of decode (`sample`)."""

    latent_dist: PixelLatents | None = None
    sample: torch.Tensor | None = None


class PixelUnshuffleVAE(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Space-to-depth as a VAE.

    Args:
        factor: side of the square of pixels that becomes one latent position.
        in_channels: colour channels of the video.
        z_dim: latent channels, in_channels * factor * factor.
        latents_mean, latents_std: one number per latent channel (None: 0 and 0.5). WanPipeline
            applies them before decode; a power of two keeps the scaling exact. Pixels in [-1, 1]
            have a standard deviation near 0.5.
        scale_factor_spatial: the same number as factor.
        scale_factor_temporal: 1, time is not compressed.

    Raises:
        ValueError: the numbers do not go together; the message lists every reason.
    """

    config_name = "config.json"
    _supports_gradient_checkpointing = False

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        factor: int = 2,
        in_channels: int = 3,
        z_dim: int = 12,
        latents_mean: list[float] | None = None,
        latents_std: list[float] | None = None,
        scale_factor_spatial: int = 2,
        scale_factor_temporal: int = 1,
    ) -> None:
        super().__init__()
        mean = [0.0] * z_dim if latents_mean is None else list(latents_mean)
        std = [0.5] * z_dim if latents_std is None else list(latents_std)
        reasons = []
        if factor < 1 or in_channels < 1:
            reasons.append(f"factor {factor} and in_channels {in_channels} must be >= 1")
        if z_dim != in_channels * factor * factor:
            reasons.append(f"z_dim is {z_dim}, not {in_channels * factor * factor}")
        if len(mean) != z_dim or len(std) != z_dim or not all(value > 0 for value in std):
            reasons.append(f"latents_mean and latents_std (> 0) need {z_dim} numbers each")
        if scale_factor_spatial != factor or scale_factor_temporal != 1:
            reasons.append(f"scale_factor_spatial must be {factor} and scale_factor_temporal 1")
        if reasons:
            raise ValueError("; ".join(reasons))
        self.register_to_config(latents_mean=mean, latents_std=std)
        # Weight files must hold something; the buffer also carries the device.
        self.register_buffer("anchor", torch.zeros(1))

    @property
    def dtype(self) -> torch.dtype:
        """Always float32: bfloat16 has 8 bits of mantissa and would lose levels of the video."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        device: torch.device = self.anchor.device
        return device

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        """Video float [B, C, F, H, W] -> latents [B, C*f*f, F, H/f, W/f] (not scaled by std).

        Returns a `PixelOutput` with `latent_dist`, or a one-tuple if `return_dict` is False.
        """
        factor = self.config.factor
        reasons = []
        if x.ndim != 5:
            reasons.append(f"the video has {x.ndim} dimensions, [B, C, F, H, W] is needed")
        elif x.shape[1] != self.config.in_channels:
            reasons.append(f"the video has {x.shape[1]} channels, not {self.config.in_channels}")
        if x.shape[-1] % factor or x.shape[-2] % factor:
            reasons.append(f"height and width {tuple(x.shape[-2:])} are no multiples of {factor}")
        if reasons:
            raise ValueError("; ".join(reasons))
        latents = functional.pixel_unshuffle(x.transpose(1, 2), factor).transpose(1, 2)
        result = PixelLatents(latents.contiguous())
        return PixelOutput(latent_dist=result) if return_dict else (result,)

    def decode(self, z: torch.Tensor, return_dict: bool = True) -> Any:
        """The exact inverse of `encode`: latents -> video float [B, C, F, H, W].

        Returns a `PixelOutput` with `sample`, or a one-tuple if `return_dict` is False.
        """
        if z.ndim != 5 or z.shape[1] != self.config.z_dim:
            raise ValueError(
                f"latents are {tuple(z.shape)}: [B, {self.config.z_dim}, F, H, W] is needed"
            )
        video = functional.pixel_shuffle(z.transpose(1, 2), self.config.factor).transpose(1, 2)
        video = video.contiguous()
        return PixelOutput(sample=video) if return_dict else (video,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """decode(encode(x)), that is x."""
        (latents,) = self.encode(x, return_dict=False)
        (video,) = self.decode(latents.mode(), return_dict=False)
        return torch.as_tensor(video)
