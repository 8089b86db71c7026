"""Sizes of published language models, as configurations that a framework reads; no weights.

The numbers are those of the models' own config.json. Special tokens and lengths of position tables
are chosen here, as weights are random.
"""

from __future__ import annotations

from typing import Any

_COMMON = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama(**sizes: Any) -> dict[str, Any]:
    return {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": 500000.0,
        **sizes,
    }


#: Models by the name that ``--sizes`` takes.
SIZES: dict[str, dict[str, Any]] = {
    # Llama 3 8B: GQA 4, head dim 128.
    "llama-3-8b": _llama(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256,
    ),
    # Qwen2 7B: GQA 7, head dim 128.
    "qwen2-7b": {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "rope_theta": 1e6, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 152064, "use_sliding_window": False,
    },
    # Gemma 3 4B, its text model: head dim 256, five layers with a window of 1,024 keys for each
    # full one.
    "gemma-3-4b": {
        **_COMMON,
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "hidden_size": 2560,
        "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 1024, "vocab_size": 262208, "tie_word_embeddings": True,
        "layer_types": [
            "sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(34)
        ],
    },
    # For tests: seconds on a CPU.
    "tiny": _llama(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=1024,
    ),
}  # fmt: skip


def cache_bytes_per_token(config: dict[str, Any], element_bytes: int) -> int:
    """Bytes of keys and values that one token takes in all layers; windows are not taken off."""
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    return int(2 * heads * dim * config["num_hidden_layers"] * element_bytes)


def parameters(config: dict[str, Any]) -> int:
    """Number of weights, those of norms and biases left out."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * config["intermediate_size"]
    tables = 1 if config["tie_word_embeddings"] else 2
    return int(layer * config["num_hidden_layers"] + tables * hidden * config["vocab_size"])
