"""Registration with every platform of SGLang's diffusion runtime, by platform override.

    VENV/bin/python -m pytest tests/serving/sglang_diffusion_platforms.py

No GPU is needed: the platforms are asked which class they would take, in a process of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from .sglang_worker import environment

OWN = "sglang.multimodal_gen.runtime.layers.attention.backends."
SCRIPT = """
    import json, sys
    import torch
    from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks

    apply_plugin_hooks()
    from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform
    from sglang.multimodal_gen.runtime import server_args
    from liteattention_sglang import diffusion

    unset = (
        "attention_backend",
        "attention_backend_config",
        "component_attention_backends",
        "component_attention_backend_roles",
    )
    server_args.set_global_server_args(type("Arguments", (), dict.fromkeys(unset))())
    answers = {"platform": type(current_platform).__name__}
    answers["device"] = current_platform.device_type

    def ask(name, key):
        member = AttentionBackendEnum[name] if name else None
        try:
            answers[key] = current_platform.get_attn_backend_cls_str(member, 128, torch.float16)
        except Exception as error:
            answers[key] = f"{type(error).__name__}: {error}"

    ask("LITEATTENTION_ROCM", "without a GPU")
    # the question is who answers for which platform, not what this machine can run
    seen = []
    diffusion.unsupported = lambda device, head_size: seen.append((str(device), head_size)) or []
    ask("LITEATTENTION_ROCM", "ours")
    ask("TORCH_SDPA", "sdpa")
    ask("SLIDING_TILE_ATTN", "not theirs")
    answers["asked"] = seen
    print(json.dumps(answers))
"""


def answers(platform: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env=environment(SGLANG_DIFFUSION_PLATFORM_OVERRIDE=platform),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("platform", "name", "device"),
    [
        ("rocm", "RocmPlatform", "cuda"),
        ("cuda", "CudaPlatform", "cuda"),
        ("cpu", "CpuPlatform", "cpu"),
    ],
)
def test_the_platform_hands_out_our_backend(platform: str, name: str, device: str) -> None:
    found = answers(platform)
    assert found["device"] == device
    assert found["platform"].endswith(name)
    assert found["ours"] == "liteattention_sglang.diffusion_attention.LiteAttentionBackend"
    assert found["asked"] == [[device, 128]]
    assert found["sdpa"] == f"{OWN}sdpa.SDPABackend", "SGLang's own choices are its own"
    if platform == "rocm":
        assert "not supported on rocm" in found["not theirs"]
    if platform != "cpu":
        assert found["without a GPU"].startswith(
            "ValueError: attention backend 'liteattention_rocm'"
        )
