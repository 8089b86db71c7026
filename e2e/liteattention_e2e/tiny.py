"""A text-to-video pipeline of diffusers' own Wan classes, with random weights, made on the spot.

For trying the plumbing where no model is at hand: it loads nothing, runs in a fraction of a second
and shows noise. Random weights attend almost evenly, so nothing could be skipped; with ``peaked``
above 1 queries and keys share their weights and are scaled by it, so that tokens attend to tokens
like themselves and near them, as in trained models.
"""

from __future__ import annotations

import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from .clips import vocabulary
from .pixel_vae import PixelUnshuffleVAE

TEXT_LENGTH = 24


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over the words of `clips`."""
    words = ["<pad>", "</s>", "<unk>", *vocabulary()]
    base = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    base.pre_tokenizer = Whitespace()
    base.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=base,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=TEXT_LENGTH,
    )


def wan_transformer(
    *, layers: int = 2, heads: int = 2, head_dim: int = 32, peaked: float = 1.0, seed: int = 0
) -> WanTransformer3DModel:
    """A small Wan transformer over 12 latent channels, fp32, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            in_channels=12,
            out_channels=12,
            text_dim=32,
            freq_dim=32,
            ffn_dim=64,
            num_layers=layers,
            cross_attn_norm=True,
            rope_max_seq_len=64,
        )
    if peaked > 1.0:
        with torch.no_grad():
            for block in model.blocks:
                block.attn1.to_k.load_state_dict(block.attn1.to_q.state_dict())
                block.attn1.norm_q.weight.mul_(peaked)
                block.attn1.norm_k.weight.mul_(peaked)
    return model.eval()


def wan_pipeline(
    *,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 32,
    peaked: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> WanPipeline:
    """A whole pipeline; height and width are multiples of 16, any number of frames."""
    words = tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(words), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2
            )
        )
    model = wan_transformer(layers=layers, heads=heads, head_dim=head_dim, peaked=peaked, seed=seed)
    pipe = WanPipeline(
        tokenizer=words,
        text_encoder=encoder.eval(),
        vae=PixelUnshuffleVAE(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=model,
    )
    if dtype != torch.float32:
        pipe.to(dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe
