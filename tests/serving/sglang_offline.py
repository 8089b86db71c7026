"""SGLang's offline engine: ``python sglang_offline.py JOB`` answers the prompts of a JSON file.

JOB holds ``options`` (of sglang.Engine), ``tokens`` (how many to make of each prompt) and
``batches``, lists of prompts given to the engine one after the other; their answers are added to it
as ``answers``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":  # the engine's processes import this file again
    import sglang

    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    sampling = {"temperature": 0.0, "max_new_tokens": job["tokens"], "ignore_eos": True}
    engine = sglang.Engine(**job["options"])
    try:
        job["answers"] = [
            engine.generate(input_ids=batch, sampling_params=sampling) for batch in job["batches"]
        ]
    finally:
        engine.shutdown()
    path.write_text(json.dumps(job))
