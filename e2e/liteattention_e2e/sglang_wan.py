"""The small Wan model of this repository, as SGLang's diffusion runtime wants a model from outside.

SGLang's own Wan pipeline is for the sizes of the published models: 16 latent channels, a learned
video VAE, texts of 512 tokens. This is its subclass for ``e2e/model/wan-shapes``; the transformer,
the text encoder and everything that runs them are SGLang's own. SGLang imports this module if the
environment says ``SGLANG_EXTERNAL_MODEL_PACKAGE=liteattention_e2e.sglang_wan``; the directory it
loads is made by :mod:`.sglang_model`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from diffusers import UniPCMultistepScheduler
from sglang.multimodal_gen.configs.models.encoders import T5Config
from sglang.multimodal_gen.configs.models.encoders.t5 import T5ArchConfig
from sglang.multimodal_gen.configs.pipeline_configs.wan import WanT2V480PConfig
from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.registry import register_pipeline
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.pipelines.wan_pipeline import WanPipeline

from .sglang_model import PIPELINE, TEXT_LENGTH, VAE

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class PixelUnshuffle(torch.nn.Module):
    """:class:`liteattention_e2e.pixel_vae.PixelUnshuffleVAE` as SGLang makes and calls a VAE."""

    use_parallel_decode = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.factor = int(config.arch_config.scale_factor_spatial)
        # Weight files must hold something; the buffer also carries the device.
        self.register_buffer("anchor", torch.zeros(1))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Latents [B, C*f*f, F, H/f, W/f] -> video [B, C, F, H, W]."""
        frames = torch.pixel_shuffle(z.transpose(1, 2), self.factor)
        return frames.transpose(1, 2).contiguous()


def pad_text(outputs: Any, _text_inputs: Any) -> torch.Tensor:
    """Zero the embeddings past a prompt's end: [B, TEXT_LENGTH, D], as the model was trained."""
    hidden: torch.Tensor = outputs.last_hidden_state
    mask: torch.Tensor = outputs.attention_mask.gt(0).unsqueeze(-1)
    return hidden * mask.to(hidden.dtype)


@dataclass
class WanShapesConfig(WanT2V480PConfig):  # type: ignore[misc]
    """Sizes that differ from Wan 2.1; the rest is in the model's own config files."""

    flow_shift: float | None = 6.0
    vae_decode_precision: str = "fp32"
    text_encoder_configs: tuple[Any, ...] = field(
        default_factory=lambda: (T5Config(arch_config=T5ArchConfig(text_len=TEXT_LENGTH)),)
    )
    postprocess_text_funcs: tuple[Any, ...] = (pad_text,)


@dataclass
class WanShapesSamplingParams(SamplingParams):  # type: ignore[misc]
    """What the model was made for, see ``generation.json`` of the model."""

    height: int = 128
    width: int = 128
    num_frames: int = 8
    fps: int = 8
    guidance_scale: float = 3.0
    negative_prompt: str = ""
    num_inference_steps: int = 20


class WanShapesPipeline(WanPipeline):  # type: ignore[misc]
    """SGLang's Wan pipeline with the model's own sampler."""

    pipeline_name = PIPELINE

    def initialize_pipeline(self, server_args: ServerArgs) -> None:
        """Take diffusers' sampler: what both runners sample with is then the same."""
        self.modules["scheduler"] = UniPCMultistepScheduler.from_pretrained(
            self.model_path, subfolder="scheduler"
        )


ModelRegistry.register_model(VAE, PixelUnshuffle)
register_pipeline(
    WanShapesPipeline,
    sampling_param_cls=WanShapesSamplingParams,
    pipeline_config_cls=WanShapesConfig,
    model_detectors=[lambda name: PIPELINE.lower() in name.lower()],
)
