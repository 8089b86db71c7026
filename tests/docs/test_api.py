"""The Python in the pages runs as it stands and shows what the text says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT


def python(page: str) -> list[str]:
    """The snippets of a page of docs/."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


SNIPPETS = python("api.md")


def run(code: str, more: str = "", cwd: Path = ROOT) -> list[str]:
    """Run a snippet, and checks on its variables after it; return the lines it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{more}"],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_snippet_is_here() -> None:
    words = ["LiteAttention(", "sdpa(", "PagedBatch(", "attention_varlen(", "enable("]
    assert len(SNIPPETS) == len(words)
    assert all(word in code for word, code in zip(words, SNIPPETS, strict=True))


def test_attention_and_liteattention() -> None:
    more = """
whole, whole_lse = attention(q, k, v, return_lse=True)
out, lse = merge_states(*zip(*halves))
print((out - whole).abs().max().item(), (lse - whole_lse).abs().max().item())
"""
    sparsity, merged = run(SNIPPETS[0], more)
    assert 0.65 < float(sparsity) < 0.75
    out, lse = map(float, merged.split())
    assert out < 0.04 and lse < 1e-5


def test_paged_attention() -> None:
    assert run(SNIPPETS[2], "print(out.shape, bool(out.isfinite().all()))") == [
        f"{torch.Size([20, 8, 128])} True"
    ]


def test_a_window_that_reaches_both_ways() -> None:
    more = """
from torch.nn.functional import scaled_dot_product_attention as theirs
at = torch.arange(300)
near = (at[:, None] - at).abs() <= 64
mine = [x[200:].float().transpose(0, 1) for x in (q, k, v)]
print((out[200:].float() - theirs(*mine, attn_mask=near).transpose(0, 1)).abs().max().item())
"""
    assert float(run(SNIPPETS[3], more)[0]) < 0.04


def test_diffusers() -> None:
    pytest.importorskip("diffusers")
    sparsity, shape = run(SNIPPETS[4], "print(video.shape)")
    assert 0.02 < float(sparsity) < 0.9
    assert shape.endswith("32, 32, 3)")


def test_quickstart() -> None:
    on_cpu, on_gpu = python("quickstart.md")
    (line,) = run(on_cpu)
    assert 50 < int(line.removesuffix("% of the tiles skipped")) < 75
    compile(on_gpu, "quickstart.md", "exec")


def test_lists_and_thresholds_of_liteattention(tmp_path: Path) -> None:
    thresholds, lists = python("migration.md")
    assert run(lists) == ["11100011"]
    pytest.importorskip("tomllib")
    assert run(thresholds, cwd=tmp_path) == ["1 {'blocks.0.attn1': (-inf, -9.5, -6.25)}"]
