"""Find the attention layers of a diffusers model by their structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["self", "by-call", "cross"]


@dataclass(frozen=True)
class Found:
    """An attention module, by its name in the model.

    ``kind`` is "self" or "cross" if the module says so itself, "by-call" if only a call can tell:
    it is self-attention if no other sequence is passed, or if queries and keys are of both.
    ``heads``, ``kv_heads`` and ``head_dim`` are None if the module does not show them; ``dtype``
    and ``device`` are those of its calls, None if its weights do not show them: they are quantized,
    or offloaded.
    """

    name: str
    module: torch.nn.Module
    kind: Kind
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    dtype: torch.dtype | None
    device: torch.device | None


#: What attention may be given; weights of other dtypes are stored so only.
_COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Under this name diffusers' own offloading hooks the modules whose weights it moves.
_GROUP_OFFLOADING = "group_offloading"


def find(model: torch.nn.Module, *, cross_attention: bool = False) -> list[Found]:
    """List the self-attention modules of ``model`` that go through the attention dispatcher.

    Told by structure, not by name: a processor with ``_attention_backend``, and a module that
    does not attend to another sequence (``is_cross_attention``, projections of another width).
    ``cross_attention`` lists those that do, too.
    """
    found = []
    moved = _is_offloaded(model)
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None or not hasattr(processor, "_attention_backend"):
            continue
        kind = _kind(module)
        if kind == "cross" and not cross_attention:
            continue
        weight = next(module.parameters(), None)
        heads, kv_heads, head_dim = _sizes(module)
        found.append(
            Found(
                name,
                module,
                kind,
                heads,
                kv_heads,
                head_dim,
                weight.dtype if weight is not None and weight.dtype in _COMPUTED else None,
                None if weight is None or moved or weight.is_meta else weight.device,
            )
        )
    return found


def _is_offloaded(model: torch.nn.Module) -> bool:
    """Whether weights lie elsewhere than the model runs: accelerate's hooks or diffusers'."""
    return any(
        hasattr(module, "_hf_hook")
        or _GROUP_OFFLOADING in getattr(getattr(module, "_diffusers_hook", None), "hooks", ())
        for module in model.modules()
    )


def attention_names(model: torch.nn.Module) -> list[str]:
    """Names of all attention modules of ``model``, whatever they attend to and go through."""
    return [name for name, module in model.named_modules() if hasattr(module, "processor")]


def _kind(module: torch.nn.Module) -> Kind:
    flag = getattr(module, "is_cross_attention", None)
    if flag is not None:
        return "cross" if flag else "self"
    if getattr(module, "add_q_proj", None) is not None:  # joint text and video attention
        return "self"
    to_q, to_k = getattr(module, "to_q", None), getattr(module, "to_k", None)
    if to_q is not None and to_k is not None:
        widths = getattr(to_q, "in_features", None), getattr(to_k, "in_features", None)
        if None not in widths and widths[0] != widths[1]:
            return "cross"
    return "by-call"


def _sizes(module: torch.nn.Module) -> tuple[int | None, int | None, int | None]:
    heads = getattr(module, "heads", None) or getattr(module, "num_heads", None)
    widths = [
        getattr(getattr(module, name, None), "out_features", None) for name in ("to_q", "to_k")
    ]
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(heads, int):
        return None, None, head_dim if isinstance(head_dim, int) else None
    if not isinstance(head_dim, int):
        head_dim = widths[0] // heads if widths[0] else None
    kv_heads = widths[1] // head_dim if widths[1] and head_dim else None
    return heads, kv_heads, head_dim
