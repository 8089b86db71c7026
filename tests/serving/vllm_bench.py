"""``bench serving --sizes`` with the real vLLM, on the CPU: seconds of a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import transformers

from liteattention_benchmark.serving_sizes import SIZES
from liteattention_benchmark.serving_vllm import look
from tests.serving.vllm_harness import ENVIRONMENT, prepare

prepare()

PROGRAM = "from liteattention_rocm_cli import main; main()"


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, "bench", "serving", "--framework", "vllm", *options]
    environment = os.environ | ENVIRONMENT
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_both_backends_of_the_cpu_serve_the_same_requests() -> None:
    done = bench(
        "--sizes", "tiny", "--rounds", "3", "--tokens", "12", "--dtype", "float32", "--threads",
        "1", "--case", "decode,2,40", "--case", "prefill,3,96", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    installed = metadata.version("vllm").partition("+")[0]
    assert found["environment"]["vllm"].startswith(installed) and found["complete"]
    rows = {(row["kind"], row["backend"]): row for row in found["rows"]}
    assert set(rows) == {(k, b) for k in ("decode", "prefill") for b in ("CUSTOM", "CPU_ATTN")}
    for (kind, _), row in rows.items():
        assert 0 < row["first_token_s"] < 60 and len(row["rounds"]) == 3
        if kind == "decode":  # both requests get a token in a step
            assert 0.3 < row["tokens_per_s"] * row["between_tokens_s"] / 2 < 3
        else:  # the last first token is not before the median one
            assert row["tokens_per_s"] <= 3 * 96 / row["first_token_s"] * 1.5
    assert [(r["kind"], r["peer"]) for r in found["ratios"]] == [
        ("decode", "CPU_ATTN"), ("prefill", "CPU_ATTN"),
    ]  # fmt: skip


def test_without_a_gpu_every_reason_is_named() -> None:
    question = {
        "device": "cuda", "backends": ["CUSTOM", "NO_SUCH_ATTN"], "head_dim": 128, "window": True,
        "dtype": "bfloat16", "kv_cache_dtype": "auto",
    }  # fmt: skip
    gpu, build = look(question)["reasons"]
    assert "PyTorch sees no GPU" in gpu and "install its build for CUDA" in build
    (unknown,) = look(question | {"device": "cpu"})["reasons"]
    assert unknown.startswith("NO_SUCH_ATTN: vLLM has no such attention backend")
    reasons = look(question | {"device": "cpu", "dtype": "float64"})["reasons"]
    assert all(each.startswith(("CUSTOM: ", "NO_SUCH_ATTN: ")) for each in reasons)
    assert any("dtype" in each for each in reasons)


@pytest.mark.parametrize("name", SIZES)
def test_a_framework_reads_the_sizes_as_they_are_meant(name: str) -> None:
    config = dict(SIZES[name])
    read = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    for field in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim"):
        assert getattr(read, field) == config[field], field
    assert getattr(transformers, config["architectures"][0])
    if name.startswith("gemma"):
        assert read.layer_types == config["layer_types"] and read.sliding_window == 1024
        assert read.layer_types.count("full_attention") == 5
    else:
        assert getattr(read, "sliding_window", None) is None
