"""A small Gemma 3 that looks at images, made here, as vLLM loads it: random weights.

The tokens of an image see each other; every second layer has a window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.serving import models

#: Tokens of an image, and its size in pixels.
TOKENS, SIZE = 16, 56
BEGIN, END, SOFT = 3, 4, 5


def make(folder: Path) -> Any:
    """Write the model into ``folder``; return it (transformers, fp32)."""
    import safetensors.torch
    import torch
    import transformers

    shape = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    text = dict(
        vocab_size=models.VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, query_pre_attn_scalar=64,
        sliding_window=24, layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=1024, bos_token_id=models.BEGIN, eos_token_id=models.END,
        pad_token_id=models.UNKNOWN,
    )  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**shape, "image_size": SIZE, "patch_size": 7},
        mm_tokens_per_image=TOKENS, boi_token_index=BEGIN, eoi_token_index=END,
        image_token_index=SOFT, attn_implementation="eager", dtype=torch.float32,
    )  # fmt: skip
    state = torch.get_rng_state()
    torch.manual_seed(23)
    try:
        model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                embedding = "embed_tokens" in name
                sharp = 2**0.5 if "q_proj" in name or "k_proj" in name else 1.0
                std = 0.25 if embedding else sharp
                torch.nn.init.normal_(weight, std=std * weight.shape[-1] ** -0.5)
            elif "mm_soft_emb_norm" in name:
                # Gemma multiplies embeddings of words by sqrt(hidden), not those of images.
                weight.data.fill_(3.0)
    finally:
        torch.set_rng_state(state)
    model.save_pretrained(folder)
    # As published; transformers 5 leaves a level out, and vLLM does not look for that.
    weights = folder / "model.safetensors"
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model."): weight
        for name, weight in safetensors.torch.load_file(weights).items()
    }
    safetensors.torch.save_file(named, weights, {"format": "pt"})
    pixels = transformers.Gemma3ImageProcessorPil(
        size={"height": SIZE, "width": SIZE}, image_seq_length=TOKENS
    )
    transformers.Gemma3Processor(pixels, tokenizer(), image_seq_length=TOKENS).save_pretrained(
        folder
    )
    return model


def tokenizer() -> Any:
    """The words of :func:`.models.tokenizer`, three of them with the names of images."""
    import transformers
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = {"<unk>": models.UNKNOWN, "<s>": models.BEGIN, "</s>": models.END}
    words |= {"<begin>": BEGIN, "<end>": END, "<soft>": SOFT}
    lines = ["\n" * count for count in (1, 2, 3, 4)]  # vLLM joins those around images
    words |= {line: len(words) + i for i, line in enumerate(lines)}
    words |= {f"t{i}": i for i in range(len(words), models.VOCAB)}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.add_special_tokens(lines)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        extra_special_tokens={
            "boi_token": "<begin>", "eoi_token": "<end>", "image_token": "<soft>"
        },
    )  # fmt: skip


def pictures(count: int) -> list[Any]:
    """Return images of noise."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(5)
    return [
        Image.fromarray(draw.integers(0, 256, (SIZE, SIZE, 3), dtype=numpy.uint8))
        for _ in range(count)
    ]


def prompts() -> list[tuple[str, list[Any]]]:
    """Return texts with their images: none, one at either end or in the middle, three."""
    first, second, third = pictures(3)

    def words(begin: int, count: int) -> str:
        return " ".join(f"t{10 + (begin * 31 + 17 * i) % 500}" for i in range(count))

    return [
        (words(1, 30), []),
        (f"<begin> {words(2, 9)}", [first]),
        (f"{words(3, 40)} <begin>", [second]),
        (f"{words(4, 70)} <begin> {words(5, 50)}", [third]),
        (f"{words(6, 5)} <begin> {words(7, 20)} <begin> t400 <begin> {words(8, 33)}",
         [first, second, third]),
    ]  # fmt: skip


def best(model: Any, folder: Path, text: str, seen: list[Any], tokens: int) -> list[int]:
    """Return the greedy tokens that transformers' eager attention continues a prompt with."""
    import torch
    import transformers

    processor = transformers.AutoProcessor.from_pretrained(folder)
    inputs = processor(text=text, images=seen or None, return_tensors="pt")
    with torch.inference_mode():
        made = model.generate(
            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
    found: list[int] = made[0, inputs["input_ids"].shape[1] :].tolist()
    return found
