"""Continue prompts with vLLM, its attention through this package.

    python examples/vllm_offline.py --model Qwen/Qwen3-8B "The kernel of a matrix is"

A server does the same: vllm serve MODEL --attention-backend CUSTOM.
"""

import argparse

from vllm import LLM, SamplingParams


def main(arguments: list[str] | None = None) -> None:
    """Print each prompt with its continuation; vLLM's log says which engine attended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(arguments)

    llm = LLM(options.model, attention_backend="CUSTOM", dtype=options.dtype, max_model_len=2048)
    greedy = SamplingParams(temperature=0, max_tokens=options.tokens)
    for answer in llm.generate(options.prompts, greedy, use_tqdm=False):
        print(f"{answer.prompt!r} -> {answer.outputs[0].text!r}")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
