"""Small models of many architectures, random weights, and what transformers makes of their tokens.

Each has the layer kinds of the published family at sizes of a test: head dims, groups of heads,
windows, soft caps, sinks, experts. Weights are spread so that attention decides the tokens. The
oracle is transformers' eager attention in fp32, on the tokens that a framework chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Tokens of every model, and its longest context.
VOCAB, CONTEXT = 512, 1024

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    # All experts of a token: a tie in choosing some would leave two right answers.
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128
}  # fmt: skip
_WINDOWS = ["sliding_attention", "full_attention"]

#: What differs from _BASE, by name; ``model_type`` is the name unless it is given.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48},
    "mixtral": {"sliding_window": None, **_EXPERTS},
    "qwen2": {"num_attention_heads": 14, "hidden_size": 896, "use_sliding_window": False},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 64, **_EXPERTS},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {"hidden_size": 384, "sliding_window": None},  # head dim 96
    "gemma": {"head_dim": 256, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2": {
        "head_dim": 64, "sliding_window": 64, "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": None, "query_pre_attn_scalar": 64, "layer_types": _WINDOWS,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 256, "sliding_window": 64,
        "query_pre_attn_scalar": 256, "layer_types": _WINDOWS, "tie_word_embeddings": True,
    },
    "olmo2": {},
    "granite": {
        "attention_multiplier": 0.25, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "starcoder2": {"sliding_window": None},
    "stablelm": {},
    "cohere": {"logit_scale": 0.5, "tie_word_embeddings": True},
    "gpt_oss": {
        "head_dim": 64, "sliding_window": 48, "layer_types": _WINDOWS, **_EXPERTS,
    },
    "exaone4": {
        "head_dim": 64, "sliding_window": 48, "sliding_window_pattern": 2, "layer_types": _WINDOWS
    },
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "glm4": {"head_dim": 64, "pad_token_id": 0},
    "nemotron": {},
    "falcon": {
        "num_kv_heads": 1, "new_decoder_architecture": False, "multi_query": True, "alibi": False,
        "parallel_attn": True, "bias": False,
    },
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.25},
    "gpt2": {
        "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT,
        "tie_word_embeddings": True,
    },
    "gptj": {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "rotary_dim": 32},
    "opt": {
        "ffn_dim": 512, "word_embed_proj_dim": 256, "do_layer_norm_before": True,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def make(name: str, folder: Path, dtype: str = "float32") -> Any:
    """Write a model into ``folder`` as frameworks load it, and return it (transformers, fp32).

    Its weights are numbers of ``dtype``.
    """
    import torch
    import transformers

    chosen = _BASE | ARCHITECTURES[name]
    kind = chosen.pop("model_type", name)
    config = transformers.AutoConfig.for_model(kind, **chosen)
    state = torch.get_rng_state()
    torch.manual_seed(17)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model = model.float().eval()
        for parameter_name, weight in model.named_parameters():
            _spread(name, parameter_name, weight)
            weight.data = weight.data.to(getattr(torch, dtype)).float()
    finally:
        torch.set_rng_state(state)
    model.save_pretrained(folder)
    for module in model.modules():
        # vLLM runs some families in transformers' own classes, and then their calls look for this.
        module.do_not_compile = True
    return model


def _spread(family: str, name: str, weight: Any) -> None:
    """Weights that keep activations near 1 and attention neither flat nor one-hot."""
    import torch

    if name.endswith("sinks"):
        weight.data.copy_(torch.randn(weight.shape))
    elif weight.dim() >= 2:
        embedding = "emb" in name or "wte" in name or "wpe" in name or "embd" in name
        # Every projection has about as many inputs as its shorter side here.
        std = 0.125 if embedding else 1.5 * min(weight.shape[-2:]) ** -0.5
        if embedding and family.startswith("gemma"):
            # They multiply it by sqrt(hidden) and share it with the head: larger, tokens repeat.
            std = 0.25 * weight.shape[-1] ** -0.5
        torch.nn.init.normal_(weight, std=std)


def regret(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
    """How far the chosen tokens fall short of the best ones, at worst; 0 if each was the best.

    In standard deviations of the logits of a position.
    """
    import torch

    worst = 0.0
    device = next(model.parameters()).device
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=device)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1, :VOCAB].double()
        chosen = logits.gather(-1, torch.tensor(answer, device=device)[:, None])[:, 0]
        short = (logits.max(-1).values - chosen) / logits.std(-1)
        worst = max(worst, short.max().item())
    return worst
