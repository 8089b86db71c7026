"""Test-only: vLLM's CPU platform, but for one thing: it honours ``--attention-backend CUSTOM``.

vLLM's own CPU platform logs one line and takes CPU_ATTN, whatever was asked for, where its CUDA
and ROCm platforms validate the chosen backend and take it or fail. This one does as those do.
"""


def activate() -> str:
    """Name the platform's class; vLLM imports it when it needs a platform."""
    return "vllm_cpu_platform.platform.CustomAttentionCpuPlatform"
