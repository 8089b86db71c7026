"""Wan's denoising alone, as SGLang's diffusion runtime wants a model from outside.

SGLang's own pipeline without text encoder and VAE: embeddings are random and latents are the
result. SGLang imports this module if the environment says
``SGLANG_EXTERNAL_MODEL_PACKAGE=liteattention_benchmark.video_sglang_model``; :func:`write` makes
the directory that it loads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.multimodal_gen.configs.pipeline_configs.wan import WanT2V480PConfig
from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.registry import register_pipeline
from sglang.multimodal_gen.runtime.distributed import get_local_torch_device
from sglang.multimodal_gen.runtime.pipelines.wan_pipeline import WanPipeline
from sglang.multimodal_gen.runtime.pipelines_core.stages import InputValidationStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.base import PipelineStage

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

    from .video import Config

PIPELINE = "WanDenoisingPipeline"
_SIZES = "sizes.json"


def write(config: Config, folder: Path, device: torch.device) -> Path:
    """Write a model directory with random weights, made on ``device``; return it."""
    import diffusers

    from .video import transformer

    transformer(config, device).save_pretrained(folder / "transformer")
    sizes = {"text_tokens": config.text_tokens, "text_dim": config.transformer.text_dim}
    (folder / _SIZES).write_text(json.dumps(sizes), encoding="utf-8")
    index = {
        "_class_name": PIPELINE,
        "_diffusers_version": diffusers.__version__,
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": [None, None],  # SGLang wants to see two components
    }
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


class RandomText(PipelineStage):  # type: ignore[misc]
    """Embeddings of a text that nobody wrote: fp32 [1, tokens, width], as SGLang's encoder's."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.shape = (1, tokens, width)

    def forward(self, batch: Any, server_args: ServerArgs) -> Any:
        """Give a request embeddings of both guidance branches."""
        device = get_local_torch_device()
        generator = torch.Generator(device).manual_seed(1)
        texts = [torch.randn(self.shape, device=device, generator=generator) for _ in range(2)]
        batch.prompt_embeds, batch.negative_prompt_embeds = texts[:1], texts[1:]
        return batch


class Latents(PipelineStage):  # type: ignore[misc]
    """Nothing decodes them."""

    def forward(self, batch: Any, server_args: ServerArgs) -> Any:
        """Return a request's latents as its output."""
        batch.output = batch.latents
        return batch


class WanDenoisingPipeline(WanPipeline):  # type: ignore[misc]
    """SGLang's Wan pipeline from noise to latents."""

    pipeline_name = PIPELINE
    _required_config_modules = ["transformer"]

    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        """As the base class, without encoding and decoding."""
        sizes = json.loads((Path(self.model_path) / _SIZES).read_text(encoding="utf-8"))
        self.add_stage(InputValidationStage())
        self.add_stage(RandomText(sizes["text_tokens"], sizes["text_dim"]))
        self.add_standard_latent_preparation_stage()
        self.add_standard_timestep_preparation_stage()
        self.add_standard_denoising_stage()
        self.add_stage(Latents())


register_pipeline(
    WanDenoisingPipeline,
    sampling_param_cls=SamplingParams,
    pipeline_config_cls=WanT2V480PConfig,
    model_detectors=[lambda name: PIPELINE.lower() in name.lower()],
)
