"""What the import of the package needs, and what it does not."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_MODULE = """
import sys
sys.modules["liteattention_rocm._core"] = None
import torch
import liteattention_rocm as la
for name in la.__all__:
    getattr(la, name)
x = torch.randn(1, 3, 2, 64)
print(*la.attention(x, x, x, engine="reference").shape)
la.attention(x, x, x, engine="cpu")
"""


def test_only_engines_that_use_the_compiled_module_need_it() -> None:
    """A source tree on a machine with an NVIDIA GPU serves without a C++ compiler."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MODULE], capture_output=True, text=True, check=False
    )
    assert done.stdout == "1 3 2 64\n", done.stderr
    assert "liteattention_rocm._core" in done.stderr.splitlines()[-1]
