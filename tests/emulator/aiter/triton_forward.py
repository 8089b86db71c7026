"""AITER's Triton attention in AITER's configuration, compiled here for gfx942, never committed.

The checkout is the one that ``AITER_HSA`` lies in. Its kernel is a module of a package whose other
parts need a GPU; the few names that it takes from them at import are replaced.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from liteattention_emulator import set_option
from liteattention_emulator.device import Module
from liteattention_emulator.recording import Recording
from liteattention_emulator.timing import residency

from .launch import on_a_page

DIM = 128
SCALE = DIM**-0.5
PACKAGES = ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.utils")
UTILS = "aiter.ops.triton.utils._triton"


def source(root: Path) -> Path | None:
    """aiter/ops/triton of the checkout with the folder of code objects; None: it is not there."""
    found = root.absolute().parents[1] / "aiter/ops/triton"
    return found if (found / "_triton_kernels/attention/mha.py").is_file() else None


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def kernel(folder: Path) -> Iterator[Any]:
    """``_attn_fwd`` as a Triton function."""
    before = dict(sys.modules)
    try:
        for name in (*PACKAGES, UTILS, f"{UTILS}.arch_info"):
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = []
        sys.modules[UTILS].arch_info = None  # type: ignore[attr-defined]
        core = sys.modules["aiter.ops.triton.utils.core"] = ModuleType("core")
        core.AITER_TRITON_CONFIGS_PATH = core.load_config_json = None  # type: ignore[attr-defined]
        for name in ("kernel_repr", "mha_kernel_utils", "pid_preprocessing"):
            _load(f"{UTILS}.{name}", folder / f"utils/_triton/{name}.py")
        yield _load("aiter_mha", folder / "_triton_kernels/attention/mha.py")._attn_fwd
    finally:
        for name in sys.modules.keys() - before.keys():
            if name.startswith("aiter"):
                del sys.modules[name]


def record(folder: Path, keys: int) -> tuple[Recording, float]:
    """As many workgroups as a CU holds over some keys, and the relative error against float64."""
    from tests.emulator.triton_kernels import compile_for_gfx942

    text = (folder / "configs/gfx942-MHA-DEFAULT.json").read_text()
    config = json.loads(text)["fwd"]["default"]
    tiles = {name: config.pop(name) for name in ("BLOCK_M", "BLOCK_N", "PRELOAD_V")}
    rows = 2 * tiles["BLOCK_M"]
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        on_a_page(torch.randn(n, 1, DIM, generator=g).bfloat16()) for n in (rows, keys, keys)
    )
    out, lse = torch.zeros_like(q), torch.zeros(1, rows)
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (rows, keys)]
    given: dict[str, Any] = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "softmax_lse_ptr": lse,
        "cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "sm_scale": SCALE, "dropout_p": 0.0,
        "SEQLEN_Q": rows, "SEQLEN_K": keys, "BATCH": 1, "stride_lse_h_in": rows,
        "stride_lse_m_in": 1,
        **{f"stride_{x}h_in": DIM for x in "qkvo"},
        **{name: DIM for name in ("stride_qm_in", "stride_kn_in", "stride_vn_in", "stride_om_in")},
        **{name: 1 for name in ("stride_qk_in", "stride_kk_in", "stride_vk_in", "stride_on_in")},
    }  # fmt: skip
    constants: dict[str, Any] = {
        "IS_CAUSAL": False, "NUM_Q_HEADS": 1, "NUM_K_HEADS": 1, "BLOCK_DMODEL": DIM,
        "BLOCK_DMODEL_POW2": DIM, "BLOCK_DMODEL_PE": 0, "RETURN_SCORES": False,
        "ENABLE_DROPOUT": False, "IS_FP8": False, "FP8_MAX": 0.0, "VARLEN": True, "NUM_XCD": 8,
        "SWIZZLE": "default", "USE_INT64_STRIDES": True, "ENABLE_SINK": False, "SLIDING_WINDOW": 0,
        "HEAD_STRIDE_ALIGNED_8": True, **tiles,
    }  # fmt: skip
    with kernel(folder) as function:
        signature, aligned, values = {}, [], []
        for name in function.arg_names:
            if name in constants:
                continue
            value = given.get(name, None if name.endswith("ptr") else 0)
            if value is None or (type(value) is int and value == 1):
                constants[name] = value
                continue
            signature[name] = _type(value)
            values.append(value)
            if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
                aligned.append(name)
        built = compile_for_gfx942(function, signature, constants, config, aligned)
    set_option("check", "off")
    try:
        with Module(built.code_object) as module:
            found = module.kernel(built.name)
            explicit = [argument for argument in found.arguments if not argument.hidden]
            values += [None] * (len(explicit) - len(values))  # Triton's scratch pointers
            held = residency(found.vgprs, built.lds_bytes, built.threads // 64)
            recordings = []
            for workgroup in range(2):
                report = module.launch(
                    built.name, [2], [built.threads], values, dynamic_lds=built.lds_bytes,
                    record=workgroup,
                )  # fmt: skip
                assert report.recording is not None
                recordings.append(report.recording)
    finally:
        set_option("check", "")
    x, y, z = (tensor[:, 0].double() for tensor in (q, k, v))
    exact = torch.softmax(x @ y.T * SCALE, -1) @ z
    error = float((out[:, 0].double() - exact).norm() / exact.norm())
    first = recordings[0]
    return first.beside(*(recordings[n % 2] for n in range(1, held))), error


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
