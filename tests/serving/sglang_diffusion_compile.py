"""``--enable-torch-compile`` and ``--regional-compile`` leave lists and frames as they are.

    VENV/bin/python -m pytest tests/serving/sglang_diffusion_compile.py

SGLang traces and guards its transformer as it does on a GPU; only the graphs run as they are,
because compiling them takes minutes on a CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from .sglang_worker import BOLD, Result, Worker, on_ranks, shared_worker

#: The second must find nothing of the first, and a third threshold needs no new graph.
REQUESTS: list[Any] = [BOLD, BOLD, {"threshold": -0.5, "warmup_steps": 1}]
OPERATOR = "liteattention_layers.self_attention"


def serve(
    rank: int, port: int, folder: Path, arguments: Any
) -> tuple[list[Result], list[int], list[str]]:
    """Results, the number of graphs after each request, and what the graphs call."""
    graphs: list[list[str]] = []

    def eager(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    torch.compiler.set_stance("default", force_backend=eager)
    worker = Worker(folder, rank=rank, port=port, dit_precision="fp32", **arguments)
    results, counts = [], []
    for options in REQUESTS:
        results.append(worker.run(options))
        counts.append(len(graphs))
    return results, counts, [name for names in graphs for name in names]


@pytest.fixture(scope="module")
def eager() -> list[Result]:
    return [shared_worker().run(options) for options in REQUESTS]


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
def test_compiled_by_the_servers_flags(regional: bool, eager: list[Result], tmp_path: Path) -> None:
    # SGLang's offloading while it compiles does not know a CPU.
    flags = {"enable_torch_compile": True, "offload_during_compile": False}
    flags["regional_compile"] = regional
    ((results, counts, called),) = on_ranks(serve, 1, tmp_path, flags)
    assert any(OPERATOR in name for name in called), "it is in no graph"
    assert counts[0] > 0
    assert counts[1:] == [counts[0]] * 2, "a request, a step or a branch was compiled into a graph"
    for result, expected in zip(results, eager, strict=True):
        assert expected.report is not None and expected.report["sparsity_last_step"] > 0.05
        assert result == expected
