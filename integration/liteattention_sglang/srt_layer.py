"""What the attention layers of an SGLang model keep between steps: constants, caches, sinks."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from .srt_admission import is_causal, lookahead_of, scale_of, window_of


class ServedLayer:
    """One attention layer: its constants, and the views of its cache.

    Owner: the backend of its model runner. Lifetime: the backend's. The views are made again when
    SGLang hands out a cache at another address.
    """

    __slots__ = (
        "_address", "_keys", "_layer", "_page_size", "_pool", "_values",
        "causal", "head_dim", "lookahead", "q_heads", "scale", "soft_cap", "window", "windowed",
    )  # fmt: skip

    def __init__(self, layer: Any, pool: Any, page_size: int) -> None:
        """Take the constants of a ``RadixAttention`` over ``pool``."""
        self._layer, self._pool, self._page_size = layer, pool, page_size
        self._address = 0
        self.q_heads: int = layer.tp_q_head_num
        self.head_dim: int = layer.head_dim
        self.scale: float = layer.scaling
        self.causal = is_causal(layer)
        self.window = window_of(layer)
        self.lookahead = None if self.causal else lookahead_of(layer)
        self.soft_cap: float | None = layer.logit_cap or None
        #: Whether its cache is in the second pool, that of layers with a window.
        self.windowed = isinstance(pool, SWAKVPool) and pool.layers_mapping[layer.layer_id][1]

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, [pages, page_size, Hkv, D] each.

        Asks the pool every time: it may have to wait for what is loaded from the host.
        """
        keys, values = self._pool.get_kv_buffer(self._layer.layer_id)
        if keys.data_ptr() != self._address:
            self._keys, self._values = (_pages(x, self._page_size) for x in (keys, values))
            self._address = keys.data_ptr()
        return self._keys, self._values

    def scales(self) -> tuple[float, float] | tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of an fp8 cache; other caches have none, whatever the model says.

        The checkpoint's tensors where calls take them, else numbers.
        """
        if self._keys.element_size() > 1:
            return 1.0, 1.0
        layer = self._layer
        found = (layer.k_scale, layer.v_scale)
        if all(_readable(x, self._keys.device) for x in found):
            return found
        return scale_of(layer, "k_scale"), scale_of(layer, "v_scale")


def _readable(scale: Any, device: torch.device) -> bool:
    """Whether a scale is a tensor as the calls take them; a layer without one has None."""
    return (
        isinstance(scale, torch.Tensor)
        and scale.dtype == torch.float32
        and scale.numel() == 1
        and scale.device == device
    )


def _pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """View [slots, Hkv, D] as [pages, page_size, Hkv, D]; a last page that is not whole stays out.

    SGLang allocates whole pages, so nothing lies in that one.
    """
    if page_size == 1:
        return slots.unsqueeze(1)
    pages = slots.shape[0] // page_size
    return slots[: pages * page_size].view(pages, page_size, *slots.shape[1:])


class Sinks:
    """The sinks of a model's layers in fp32, as kernels want them.

    SGLang does not say when weights change, so they are converted in every step: those of all
    layers at once, by one operation, which a graph holds as well.

    Key: layer. Owner: the backend. Lifetime: the backend's.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._given: list[torch.Tensor] = []
        self._converted: list[torch.Tensor] = []

    def refresh(self) -> None:
        """Convert again what layers have given so far."""
        if self._given:
            torch._foreach_copy_(self._converted, self._given)

    def of(self, layer: int, sinks: torch.Tensor) -> torch.Tensor:
        """Return the ``sinks`` [Hq] that a layer gives in fp32, as they were at the last refresh.

        Those it gives for the first time are converted now.
        """
        if sinks.dtype == torch.float32:
            return sinks
        at = self._places.get(layer)
        if at is None:
            at = self._places[layer] = len(self._given)
            self._given.append(sinks.detach())
            self._converted.append(sinks.detach().float())
        elif self._given[at].data_ptr() != sinks.data_ptr():
            self._given[at] = sinks.detach()
            self._converted[at].copy_(sinks.detach())
        return self._converted[at]
