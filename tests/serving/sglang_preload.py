"""Imported once by the process that the workers of several ranks are forked from."""

from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks

apply_plugin_hooks()

import sglang.multimodal_gen.runtime.managers.cpu_worker  # noqa: E402
import sglang.multimodal_gen.runtime.pipelines.wan_pipeline  # noqa: E402, F401

import liteattention_e2e.sglang_wan  # noqa: E402, F401
