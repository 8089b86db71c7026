"""The platform class; imported by vLLM only once ``vllm.platforms`` is there."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class CustomAttentionCpuPlatform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(
                f"Selected backend {selected_backend} is not valid for this configuration. "
                f"Reason: {reasons}"
            )
        return selected_backend.get_path()
