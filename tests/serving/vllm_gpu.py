"""vLLM on a GPU: captured graphs of our attention, fp8 caches, full caches, drafts.

    python -m pytest -n 6 tests/serving/vllm_gpu.py tests/serving/vllm_architectures.py

in an environment with vLLM's build for the GPU and this package; skipped where there is no GPU.
The model recites (:func:`tests.serving.models.recited`), so the right tokens are known, and its
margins are wider than what bf16 takes from a logit. A test that leaves the GPU in an error ends its
process: run in several (``-n``), the others lose nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import models
from tests.serving.vllm_harness import ENVIRONMENT, OURS, TOKENS, engine, generate, made, prepare

prepare()

import torch  # noqa: E402

import liteattention_vllm  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU here: these tests capture graphs", allow_module_level=True)

LAYERS = models.MODELS["overfit"].layers
#: Lengths of prompts: around pages, and beyond a step's rows (192), so that they come in chunks.
LENGTHS = [1, 2, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 96, 127, 128, 129, 200, 230]
PROMPTS = [line[:n] for line in models.recited() for n in LENGTHS]
TRUTH = [line[n : n + TOKENS] for line in models.recited() for n in LENGTHS]
#: Rows of captured graphs. Most steps lie between two of them and are padded.
SIZES = [1, 2, 8, 24, 64, 192]
PEERS = {"cuda": "FLASH_ATTN", "rocm": "TRITON_ATTN"}

GRAPHS = {
    "full": {"mode": 0, "cudagraph_mode": "FULL"},
    "full-decode": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "full-and-piecewise": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"},
}


@pytest.fixture(autouse=True)
def healthy_gpu() -> Iterator[None]:
    """End the process when a test left the GPU in an error, which would fail all that follow."""
    yield
    try:
        torch.cuda.synchronize()
    except Exception as error:
        print(f"the GPU is in an error: {error}", file=sys.stderr, flush=True)
        os._exit(13)


def options(graphs: str = "full", **more: Any) -> dict[str, Any]:
    return {
        "dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.05,
        "max_num_seqs": 64,
        "compilation_config": GRAPHS[graphs] | {"cudagraph_capture_sizes": SIZES}, **more,
    }  # fmt: skip


def calls() -> int:
    return liteattention_vllm.statistics()["attention_calls"]


def right(found: list[list[int]], truth: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(found, truth, strict=True))


def recites(llm: Any) -> None:
    """All requests at once, then from cached prefixes, then batches between graph sizes."""
    assert right(generate(llm, PROMPTS)[0], TRUTH) == len(PROMPTS)
    again, cached = generate(llm, PROMPTS)
    assert right(again, TRUTH) == len(PROMPTS) and any(cached)
    for count in (1, 3, 5, 13, 40):
        start = 7 * count % 30
        chosen = slice(start, start + count)
        assert right(generate(llm, PROMPTS[chosen])[0], TRUTH[chosen]) == count, count


@pytest.mark.parametrize("runner", ["2", "1"])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_graphs_recite(graphs: str, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs

    vllm.envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "2")))
    before = calls()
    with engine(made("overfit"), OURS, **options(graphs)) as llm:
        config = llm.llm_engine.vllm_config.compilation_config
        assert config.cudagraph_mode.name == GRAPHS[graphs]["cudagraph_mode"]  # was not lowered
        captured = calls()
        assert captured > before
        recites(llm)
        # A replay runs no Python of the layers: of a request's steps at most the prompt's does.
        start = calls()
        assert generate(llm, PROMPTS[20:21])[0] == TRUTH[20:21]
        assert calls() - start <= LAYERS
    vllm.envs.disable_envs_cache()


def test_the_peer_recites_the_same() -> None:
    """In vLLM's default graphs. With FULL alone, vLLM 0.32's FLASH_ATTN recites 2 of the 72."""
    from vllm.platforms import current_platform

    peer = PEERS["rocm" if current_platform.is_rocm() else "cuda"]
    with engine(made("overfit"), peer, **options("full-and-piecewise")) as llm:
        assert right(generate(llm, PROMPTS)[0], TRUTH) == len(PROMPTS)


@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2"])
def test_fp8_caches_recite(cache: str) -> None:
    with engine(made("overfit"), OURS, **options(kv_cache_dtype=cache)) as llm:
        found = right(generate(llm, PROMPTS)[0], TRUTH)
    print(f"{cache}: {found} of {len(PROMPTS)}")
    assert found == len(PROMPTS)


def test_a_graph_follows_the_scales_of_its_cache() -> None:
    """They are tensors of the layers. Values divided by 1e-4 leave the range of fp8."""
    fp8 = options(kv_cache_dtype="fp8", enable_prefix_caching=False)
    with engine(made("overfit"), OURS, **fp8) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        survivors = []
        for scale in (1.0, 1e-4, 0.7):
            with torch.inference_mode():
                for each in layers.values():
                    each._v_scale.fill_(scale)
            survivors.append(right(generate(llm, PROMPTS)[0], TRUTH))
    print(f"of {len(PROMPTS)}, by scale: {survivors}")
    assert survivors[0] == survivors[2] == len(PROMPTS) and survivors[1] < len(PROMPTS) / 2


def test_a_full_cache_loses_nothing() -> None:
    """Twice the requests that the cache holds: some are preempted and computed again."""
    lines, tokens = models.recited(), 64
    prompts = [lines[i % 4][: 8 + i] for i in range(64)]
    truth = [lines[i % 4][8 + i : 8 + i + tokens] for i in range(64)]
    small = options(
        block_size=16, num_gpu_blocks_override=160, enable_prefix_caching=False,
        disable_log_stats=False,
    )  # fmt: skip
    with engine(made("overfit"), OURS, **small) as llm:
        found = generate(llm, prompts, tokens)[0]
        preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preempted > 0
    assert right(found, truth) == len(prompts)


def test_drafts_change_no_token(tmp_path: Path) -> None:
    """In a process of its own: what drafts from n-grams load disturbs vLLM's next start."""
    program = """if __name__ == "__main__":
    import json, sys
    from tests.serving import models
    from tests.serving.vllm_gpu import options
    from tests.serving.vllm_harness import OURS, engine, generate, made
    prompts = [line[:n] for line in models.recited() for n in (40, 129)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
    chosen = options(sys.argv[1], speculative_config=drafts, disable_log_stats=False)
    with engine(made("overfit"), OURS, **chosen) as llm:
        found = {"tokens": generate(llm, prompts, 96)[0]}
        found |= {m.name: m.value for m in llm.get_metrics() if "spec_decode_num_" in m.name
                  and isinstance(getattr(m, "value", None), int)}
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
"""
    script, out = tmp_path / "run.py", tmp_path / "found.json"
    script.write_text(program)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script), "full", str(out)],
        env={
            **os.environ, **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        },
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads(out.read_text())
    assert found["tokens"] == [line[n : n + 96] for line in models.recited() for n in (40, 129)]
    drafted, accepted = (found[f"vllm:spec_decode_num_{x}_tokens"] for x in ("draft", "accepted"))
    assert 0 < accepted < drafted
