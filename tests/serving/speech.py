"""A small Whisper with random weights, sounds for it, and what transformers makes of its tokens.

Its decoder sees the encoder's 1,500 frames by cross-attention, from a cache that is written once.
Weights are spread so that the sound decides the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Samples a second.
RATE = 16_000
_WORDS = 200
_SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|nospeech|>",
    "<|notimestamps|>", "<|startofprev|>", "<|startoflm|>", "<|translate|>",
]  # fmt: skip
_VOCABULARY = {f"t{i}": i for i in range(_WORDS)} | {
    word: _WORDS + i for i, word in enumerate(_SPECIAL)
}
#: What each answer begins with.
PROMPT = [
    _VOCABULARY[name]
    for name in ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
]


def make(folder: Path) -> Any:
    """Write the model into ``folder`` as frameworks load it; return transformers' model, fp32."""
    import torch
    import transformers

    end = _VOCABULARY["<|endoftext|>"]
    config = transformers.WhisperConfig(
        vocab_size=len(_VOCABULARY), d_model=128, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=256,
        decoder_ffn_dim=256, bos_token_id=end, eos_token_id=end, pad_token_id=end,
        decoder_start_token_id=PROMPT[0], begin_suppress_tokens=None,
    )  # fmt: skip
    config.architectures = ["WhisperForConditionalGeneration"]
    state = torch.get_rng_state()
    torch.manual_seed(3)
    try:
        model = transformers.WhisperForConditionalGeneration._from_config(
            config, attn_implementation="eager"
        )
        model = model.float().eval()
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                std = 0.25 if "embed" in name else 1.5 * weight[0].numel() ** -0.5
                if "encoder_attn" in name:
                    std *= 2
                torch.nn.init.normal_(weight, std=std)
    finally:
        torch.set_rng_state(state)
    model.save_pretrained(folder)
    _processor().save_pretrained(folder)
    return model


def sounds() -> list[tuple[Any, int]]:
    """Sweeps of 1 to 20 seconds with their rates, as frameworks take them."""
    import numpy as np

    found = []
    for i, seconds in enumerate((1, 6, 20)):
        time = np.arange(RATE * seconds) / RATE
        low, high = 150.0 * (i + 1), 700.0 * (i + 1)
        phase = low * time + (high - low) * time**2 / (2 * seconds)
        found.append((np.sin(2 * np.pi * phase).astype(np.float32), RATE))
    return found


def regret(model: Any, answers: Sequence[Sequence[int]]) -> float:
    """How far tokens fall short of the best ones, see :func:`.architectures.regret`."""
    import torch

    heard = [sound for sound, _ in sounds()]
    extract = _processor().feature_extractor
    features = extract(heard, sampling_rate=RATE, return_tensors="pt").input_features
    ids = torch.tensor([[*PROMPT, *answer] for answer in answers])
    with torch.no_grad():
        logits = model(input_features=features, decoder_input_ids=ids).logits
    logits = logits[:, len(PROMPT) - 1 : -1].double()
    chosen = logits.gather(-1, ids[:, len(PROMPT) :, None])[..., 0]
    return float(((logits.max(-1).values - chosen) / logits.std(-1)).max())


def _processor() -> Any:
    import transformers

    end = "<|endoftext|>"
    tokenizer = transformers.WhisperTokenizer(
        vocab=_VOCABULARY, merges=[], unk_token=end, bos_token=end, eos_token=end,
        additional_special_tokens=_SPECIAL,
    )  # fmt: skip
    extract = transformers.WhisperFeatureExtractor(feature_size=80)
    return transformers.WhisperProcessor(extract, tokenizer)
