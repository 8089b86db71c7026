"""An engine of made-up speed in vLLM's place: ``python -m tests.benchmark.fake_serving_engine``.

FAKE_MACHINE: JSON of what looking at the machine answers. FAKE_LOG: a file that gets a line per
engine started and per question. Ours decodes a step in 2 ms, FLASH_ATTN in 3, others in 4.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from liteattention_benchmark.serving import answer

STEP = {"CUSTOM": 0.002, "FLASH_ATTN": 0.003}


def note(**fact: Any) -> None:
    with Path(os.environ["FAKE_LOG"]).open("a") as log:
        log.write(json.dumps(fact) + "\n")


def main() -> None:
    if sys.argv[1] == "look":
        print("INFO something of vLLM's")
        print(os.environ["FAKE_MACHINE"])
        return
    options = json.loads(sys.argv[2])
    config = json.loads((Path(options["model"]) / "config.json").read_text())
    note(started=options["attention_backend"], options=options, config=config)
    if options["attention_backend"] == "DIES":
        raise SystemExit("no kernel for this model")
    step = STEP.get(options["attention_backend"], 0.004)

    def arrivals(kind: str, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        note(
            asked=options["attention_backend"], kind=kind, batch=len(prompts), first=prompts[0][:4]
        )
        assert all(0 <= token < config["vocab_size"] for each in prompts for token in each)
        # A prompt a step, then all decode.
        return [
            [step * (10 * len(prompts) if i else 10 * (r + 1)) + step * i for i in range(tokens)]
            for r in range(len(prompts))
        ]

    answer(int(sys.argv[1]), arrivals)


if __name__ == "__main__":
    main()
