"""A model directory for SGLang from the small Wan model of this repository.

::

    python -m liteattention_e2e.sglang_model e2e/model/wan-shapes DIR
    export SGLANG_EXTERNAL_MODEL_PACKAGE=liteattention_e2e.sglang_wan
    sglang generate --model-path DIR --prompt "a red circle moves left on a blue background"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from liteattention_rocm import json_text

PIPELINE = "WanShapesPipeline"
VAE = "PixelUnshuffleVAE"
#: Words of a prompt; SGLang's Wan pipeline pads to 512.
TEXT_LENGTH = 32


def convert(source: Path, target: Path) -> Path:
    """Make a model directory that SGLang loads from one that diffusers loads; return it.

    Weights are linked, not copied. Raises ``ValueError`` if ``source`` is no diffusers pipeline or
    ``target`` exists and was not made by this function.
    """
    index_file = source / "model_index.json"
    if not index_file.exists():
        raise ValueError(f"{source} is no diffusers pipeline: it has no model_index.json")
    index = json_text.read(index_file)
    made = target / "model_index.json"
    ours = made.exists() and PIPELINE in made.read_text(encoding="utf-8")
    if target.exists() and any(target.iterdir()) and not ours:
        raise ValueError(f"{target} exists and is something else: name another directory")
    target.mkdir(parents=True, exist_ok=True)
    components = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
    for name in components:
        link = target / name
        if not link.exists():
            link.symlink_to((source / name).resolve(), target_is_directory=True)
    made.write_text(
        json.dumps(
            {
                "_class_name": PIPELINE,
                "_diffusers_version": index["_diffusers_version"],
                **{name: index[name] for name in components if name != "vae"},
                "vae": ["diffusers", VAE],
            },
            indent=2,
        ),
        encoding="utf-8",
    )
    return target


def _main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m liteattention_e2e.sglang_model",
        description="Make a model directory for SGLang from e2e/model/wan-shapes.",
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args(arguments)
    try:
        print(convert(options.source, options.target))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
