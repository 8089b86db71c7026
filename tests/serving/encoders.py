"""Small encoders of the kinds that serve embeddings, random weights, and what transformers makes of
their tokens.

An encoder's rows see all tokens of their request, or those within a window on either side, and none
of another. Weights are spread so that a causal mask, another scale or a neighbour's tokens change
every embedding. The oracle is transformers in fp32, a request at a time.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.serving import models

#: Longest request of every encoder.
CONTEXT = 192

_SIZES: dict[str, Any] = {
    "vocab_size": models.VOCAB, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256,
    "pad_token_id": models.UNKNOWN, "bos_token_id": models.BEGIN, "eos_token_id": models.END,
}  # fmt: skip

#: What frameworks ask of configurations, and transformers no longer writes.
_POSITIONS = {"position_embedding_type": "absolute"}

#: By name: the architecture that frameworks know, its model type, and what differs from _SIZES.
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "bert", _POSITIONS),
    "bert-d128": ("BertModel", "bert", {"num_attention_heads": 2, **_POSITIONS}),
    # Head dim 32, as small embedding models have it.
    "xlm-roberta": (
        "XLMRobertaModel", "xlm-roberta", {"num_attention_heads": 8, **_POSITIONS}
    ),
    # A decoder's model without its mask, with fewer key heads, as several embedding models are.
    "qwen2": (
        "Qwen2ForCausalLM", "qwen2",
        {"num_key_value_heads": 2, "is_causal": False, "use_sliding_window": False},
    ),
    # Windows that reach both ways, 16 tokens before a row and 16 after it, beside full layers.
    "modernbert": (
        "ModernBertModel", "modernbert",
        {
            "local_attention": 32, "global_attn_every_n_layers": 3,
            "cls_token_id": models.BEGIN, "sep_token_id": models.END,
        },
    ),
    # 15 tokens before a row and 15 after it: transformers halves the window of its configuration.
    "embedding-gemma": (
        "Gemma3TextModel", "gemma3_text",
        {
            "num_key_value_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64,
            "use_bidirectional_attention": True, "sliding_window": 30,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> Any:
    """Write an encoder into ``folder`` as frameworks load it; return transformers' model, fp32."""
    import torch
    import transformers

    architecture, kind, more = ENCODERS[name]
    config = transformers.AutoConfig.for_model(kind, **_SIZES | more)
    config.architectures = [architecture]
    state = torch.get_rng_state()
    torch.manual_seed(11)
    try:
        model = transformers.AutoModel.from_config(config, attn_implementation="eager")
        model = model.float().eval()
        for parameter, weight in model.named_parameters():
            if weight.dim() >= 2:
                std = 0.125 if "emb" in parameter else 1.5 * weight.shape[1] ** -0.5
                torch.nn.init.normal_(weight, std=std)
    finally:
        torch.set_rng_state(state)
    model.save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return model


def requests() -> list[list[int]]:
    """Token ids of requests of 1 to CONTEXT tokens, around the sizes of tiles."""
    draw = random.Random(7)
    lengths = (1, 2, 15, 16, 17, 33, 63, 64, 65, 100, 129, CONTEXT)
    return [[draw.randrange(3, models.VOCAB) for _ in range(n)] for n in lengths]


def embeddings(model: Any, ids: list[int]) -> Any:
    """The last hidden state of each token of one request, [tokens, hidden] fp32."""
    import torch

    mask = torch.zeros(1, 1, len(ids), len(ids))  # hides nothing, whatever the model would hide
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        mask = torch.ones(1, len(ids))  # its windows
    with torch.no_grad():
        found = model(input_ids=torch.tensor([ids]), attention_mask=mask)
    return found.last_hidden_state[0]


def deviation(found: Any, expected: Any) -> float:
    """Largest difference of two sets of embeddings, each token's of length 1."""
    import torch

    ours, theirs = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (found, expected))
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())
