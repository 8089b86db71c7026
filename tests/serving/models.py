"""Small language models for the serving tests, made here: nothing is downloaded.

    python tests/serving/models.py OUT [NAME ...]

writes one folder per model (config.json, model.safetensors, tokenizer), as vLLM and SGLang load
them. All but ``overfit`` have random weights with standard deviations chosen so that the softmax
is neither flat nor one-hot: a wrong mask, a wrong slot or a scale off by 2% then changes the
greedy tokens. ``overfit`` is trained for some seconds until it recites :func:`recited`, so that
its greedy tokens have margins that bf16 cannot close and the right answer is known without any
other backend. Folders that exist are kept.

Needs torch, transformers, tokenizers and safetensors, which both frameworks bring.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Tokens of every model: three special ones, then the words "t3" ... "t511".
VOCAB = 512
UNKNOWN, BEGIN, END = 0, 1, 2
#: Longest context of every model.
CONTEXT = 8192
#: What ``overfit`` recites: this many lines of this many tokens.
LINES, LINE = 4, 256


@dataclass(frozen=True)
class Model:
    """Shape of a model. ``window`` is the sliding window of its windowed layers, 0 for none."""

    family: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int = 256
    layers: int = 3
    window: int = 0
    soft_cap: float = 0.0
    seed: int = 0


#: Every model by its folder's name.
MODELS = {
    "llama-d64": Model("llama", heads=8, kv_heads=2, head_dim=64, seed=1),
    "llama-d128": Model("llama", heads=6, kv_heads=2, head_dim=128, hidden=384, seed=2),
    "qwen3-d64": Model("qwen3", heads=8, kv_heads=1, head_dim=64, seed=3),
    "qwen3-d128": Model("qwen3", heads=4, kv_heads=4, head_dim=128, seed=4),
    "mistral-window": Model("mistral", heads=8, kv_heads=2, head_dim=64, window=48, seed=5),
    # Windowed and full layers take turns, and scores are capped.
    "gemma2-d64": Model(
        "gemma2", heads=8, kv_heads=4, head_dim=64, layers=4, window=64, soft_cap=4.0, seed=6
    ),
    "overfit": Model("llama", heads=4, kv_heads=2, head_dim=64, layers=2, seed=7),
    # Windowed and full layers, and sinks; its experts are mixed by a router.
    "gpt-oss": Model("gpt_oss", heads=8, kv_heads=2, head_dim=64, layers=4, window=48, seed=8),
    # Full layers have another head dim (twice this) than windowed ones; the last two share caches.
    "gemma4": Model("gemma4", heads=4, kv_heads=2, head_dim=64, layers=6, window=64, seed=9),
    # Three windowed layers for each full one, which has no rotary embedding.
    "exaone4": Model("exaone4", heads=4, kv_heads=2, head_dim=64, layers=4, window=48, seed=10),
    # A hybrid: every second layer is a short convolution, whose state is no cache of keys.
    "lfm2": Model("lfm2", heads=4, kv_heads=2, head_dim=64, layers=4, seed=11),
}


def prompts(count: int = 26, longest: int = 500, seed: int = 0) -> list[list[int]]:
    """Return ``count`` random prompts of 1 to ``longest`` tokens, both lengths among them.

    Lengths around the usual page sizes (16, 32, 64, 128) are there; the rest is spread evenly.
    """
    rng = random.Random(seed)
    edges = [1, longest, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]
    lengths = [n for n in edges if n <= longest][:count]
    rest = count - len(lengths)
    lengths += [max(1, round((i + 1) * longest / (rest + 1))) for i in range(rest)]
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def recited() -> list[list[int]]:
    """Return the lines that ``overfit`` continues: LINES lists of LINE tokens.

    Their first tokens differ; after that 61 words are drawn at random, so that a word has some 16
    successors and only attention to the words before it tells which comes next.
    """
    rng = random.Random(99)
    return [[3 + i, *(rng.randrange(64, 125) for _ in range(LINE - 1))] for i in range(LINES)]


def make(out: Path, names: list[str] | None = None) -> dict[str, Path]:
    """Write the named models (all by default) under ``out``; return their folders by name.

    Raises:
        ValueError: names that are no models; lists them all.
    """
    names = list(MODELS) if names is None else names
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise ValueError(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    folders = {}
    for name in names:
        folder = out / name
        folders[name] = folder
        if folder.is_dir():
            continue
        partial = out / f".{name}.{os.getpid()}"
        _write(name, MODELS[name], partial)
        try:
            partial.rename(folder)
        except OSError:  # somebody else was faster; theirs is the same
            shutil.rmtree(partial)
    return folders


def _write(name: str, shape: Model, folder: Path) -> None:
    import torch

    state = torch.get_rng_state()
    torch.manual_seed(shape.seed)
    try:
        model = _model(shape)
        if name == "overfit":
            _train(model)
        else:
            _spread(model, shape)
    finally:
        torch.set_rng_state(state)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def _model(shape: Model) -> Any:
    import torch
    import transformers

    sizes = dict(
        vocab_size=VOCAB, hidden_size=shape.hidden, intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT, bos_token_id=BEGIN, eos_token_id=END, pad_token_id=None,
        tie_word_embeddings=False, attn_implementation="sdpa", dtype=torch.float32,
    )  # fmt: skip
    if shape.family == "mistral":
        config = transformers.MistralConfig(sliding_window=shape.window, **sizes)
    elif shape.family == "gemma2":
        config = transformers.Gemma2Config(
            sliding_window=shape.window,
            attn_logit_softcapping=shape.soft_cap,
            final_logit_softcapping=None,
            query_pre_attn_scalar=shape.head_dim,
            **sizes | {"tie_word_embeddings": True, "attn_implementation": "eager"},
        )
    elif shape.family == "gpt_oss":
        config = transformers.GptOssConfig(
            sliding_window=shape.window,
            num_local_experts=4,
            num_experts_per_tok=2,
            **sizes | {"attn_implementation": "eager"},
        )
    elif shape.family == "gemma4":
        text = dict(
            sliding_window=shape.window,
            global_head_dim=2 * shape.head_dim,
            layer_types=["sliding_attention", "full_attention"] * (shape.layers // 2),
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=VOCAB,
            **sizes | {"tie_word_embeddings": True, "pad_token_id": UNKNOWN},
        )
        vision = dict(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            position_embedding_size=64,
        )
        config = transformers.Gemma4Config(
            text_config=text, vision_config=vision, tie_word_embeddings=True, dtype=torch.float32
        )
    elif shape.family == "exaone4":
        config = transformers.Exaone4Config(
            sliding_window=shape.window,
            sliding_window_pattern="LLLG",
            layer_types=[*["sliding_attention"] * 3, "full_attention"],
            # what SGLang takes, which looks for it where transformers 4 wrote it
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            **sizes,
        )
    elif shape.family == "lfm2":
        sizes.pop("head_dim")
        config = transformers.Lfm2Config(
            layer_types=["conv", "full_attention"] * (shape.layers // 2),
            block_auto_adjust_ff_dim=False,
            # vLLM reads these, as published models have them
            conv_dim=shape.hidden,
            block_dim=shape.hidden,
            **sizes | {"tie_word_embeddings": True, "pad_token_id": UNKNOWN},
        )
    elif shape.family == "qwen3":
        config = transformers.Qwen3Config(use_sliding_window=False, **sizes)
    else:
        config = transformers.LlamaConfig(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config).float()


def _spread(model: Any, shape: Model) -> None:
    """Give every weight the size that keeps activations near 1, and scores a deviation of 2.

    transformers' own 0.02 makes scores of a small model vanish: attention is then a plain mean,
    which a wrong scale does not change.
    """
    import torch

    for name, weight in model.named_parameters():
        if weight.dim() < 2 or "embed" in name:
            of_scores = any(part in name for part in ("q_norm", "k_norm", "q_layer", "k_layer"))
            if "norm" in name and weight.dim() == 1 and of_scores:
                # gemma4 does not divide its scores by sqrt(head_dim)
                gain = weight.numel() ** -0.25 if shape.family == "gemma4" else 1.0
                weight.data.fill_(2**0.5 * gain)
            elif name.endswith("sinks"):
                # as large as the scores, and exact in bf16, which is how SGLang keeps them
                weight.data.copy_(torch.randn(weight.shape).mul(3).bfloat16())
            elif "embed" in name:
                # gemma multiplies its embedding by sqrt(hidden), and its head shares it; so does
                # that of lfm2
                shared = shape.family.startswith("gemma") or shape.family == "lfm2"
                gain = shape.hidden**-0.5 if shared else 1.0
                if shape.family == "gemma4":
                    gain /= 4  # its layers' outputs are normalised; it would repeat its input
                torch.nn.init.normal_(weight, std=gain)
            continue
        gain = 2**0.5 if "q_proj" in name or "k_proj" in name else 1.0
        torch.nn.init.normal_(weight, std=gain * weight.shape[1] ** -0.5)


def _train(model: Any) -> None:
    """Train until every token of every line is certain: p > 0.95 for the least certain one."""
    import torch

    lines = torch.tensor(recited())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    least = 0.0
    for _ in range(400):
        logits = model(input_ids=lines[:, :-1]).logits.float()
        likelihood = torch.log_softmax(logits, -1).gather(-1, lines[:, 1:, None])[..., 0]
        least = likelihood.min().exp().item()
        if least > 0.95:
            return
        optimizer.zero_grad()
        (-likelihood.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise RuntimeError(f"the small model did not learn its lines: least certain token {least:.3f}")


def tokenizer() -> Any:
    """One word per token, so that text and token ids tell the same: "t3 t17" is [3, 17]."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": UNKNOWN, "<s>": BEGIN, "</s>": END}
    words |= {f"t{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    )


def main() -> None:
    """Make the models named on the command line."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: python {sys.argv[0]} OUT [NAME ...]\nmodels: {', '.join(MODELS)}")
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, folder in make(out, sys.argv[2:] or None).items():
        print(f"{name}: {folder}")


if __name__ == "__main__":
    main()
