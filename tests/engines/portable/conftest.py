"""What needs Triton. `make test-machine-code` installs it, and runs each file in one mode."""

import os
from importlib.util import find_spec

import torch

COMPILED = [
    "test_amd_loop.py", "test_compiled.py", "test_launch.py", "test_shipped.py",
    "test_short.py",
    "test_tile_order.py", "test_tuning.py",
]  # fmt: skip
# TRITON_INTERPRET decides when kernels are defined: these want a process of their own.
INTERPRETED = ["test_interpreter.py", "test_replay.py", "test_hopper_machine.py", "test_levels.py"]
# With a GPU, the kernels themselves: named on the command line.
ON_GPUS_TOO = [
    "test_copies.py", "test_pieces.py", "test_weighing.py", "test_ragged_interpreter.py"
]  # fmt: skip
INTERPRETED += [] if torch.cuda.is_available() else ON_GPUS_TOO

if find_spec("triton") is None:
    collect_ignore = [*COMPILED, *INTERPRETED]
else:
    collect_ignore = COMPILED if os.environ.get("TRITON_INTERPRET") == "1" else INTERPRETED
