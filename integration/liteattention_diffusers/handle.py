"""``enable`` and ``disable``: LiteAttention on the self-attention of a diffusers pipeline."""

from __future__ import annotations

import collections
import fnmatch
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from diffusers.utils.torch_utils import unwrap_module

from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry, admission, skiplist
from liteattention_rocm.parallel import SeqParallel

from . import clock as clocks
from .backend import BACKEND_NAME
from .layers import Found, Layer, find

#: Who holds a denoiser now. Weak on both sides: neither keeps the other alive.
_enabled: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Handle]] = (
    weakref.WeakKeyDictionary()
)


class Handle:
    """LiteAttention on one pipeline, from :func:`enable` until :meth:`disable`.

    Key: none; one handle per pipeline, and handles share nothing. Owner: the caller; the
    pipeline's hooks keep it alive while it is enabled. Lifetime of the skip lists: one run of
    the pipeline (they are kept after it, for pictures, until the next run begins).
    """

    def __init__(
        self,
        policy: SkipPolicy,
        geometry: TileGeometry | None,
        engine: str | None,
        pipeline: Any | None,
        cross_attention: bool,
    ) -> None:
        self.lite = LiteAttention(policy, geometry=geometry, engine=engine)
        # One per ring of processes that the layers say they are in: one at most, as a rule.
        self._rings: dict[dist.ProcessGroup, SeqParallel] = {}
        self._geometry = geometry
        self._clock = clocks.Clock(pipeline)
        self._denoisers: list[tuple[torch.nn.Module, clocks.DenoiserHook]] = []
        self._layers: dict[Layer, clocks.Context] = {}
        self._cross_layers: list[Layer] = []
        self._cross_attention = cross_attention
        self._run = 0

    @property
    def policy(self) -> SkipPolicy:
        """The policy given to :func:`enable`."""
        return self.lite.policy

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the self-attention layers, as ``layer_thresholds`` patterns see them."""
        return tuple(layer.name for layer in self._layers)

    @property
    def statistics(self) -> Any:
        """``LiteAttention.statistics``: tiles by generation (:attr:`run`), step, layer, branch.

        Under context parallelism those of this rank; ``merge`` those of all ranks for the whole.
        """
        if not self._rings:
            return self.lite.statistics
        return self.lite.statistics.merge(*(ring.statistics for ring in self._rings.values()))

    @property
    def run(self) -> int:
        """Number of the latest run, counted from 1: the ``generation`` of its lists."""
        return self._clock.run

    @property
    def enabled(self) -> bool:
        """Whether the pipeline is still taken over."""
        return bool(self._denoisers)

    def lists(self, layer: str, branch: str, *, split: int | None = None) -> torch.Tensor:
        """Return a copy of this rank's list of the latest run.

        int32 [B, H, q_blocks, words], see :mod:`liteattention_rocm.skiplist`; under context
        parallelism of the heads or rows that this rank attends with. In a ring ``split`` names the
        rank whose keys it is about. Raises ``KeyError`` naming what there is if there is none.
        """
        if split is None:
            return self.lite.lists(layer, branch, self.run)
        missing = KeyError(f"no list for the keys of rank {split}: nothing ran in a ring")
        for ring in self._rings.values():
            try:
                return ring.lists(layer, branch, self.run, split=split)
            except KeyError as error:  # another ring may hold the layer
                missing = error
        raise missing

    def kept_tiles(self, layer: str, branch: str) -> torch.Tensor:
        """Tiles that the next step of the latest run would compute; not for a ring.

        Bool [B, H, q_blocks, K_blocks], True = compute; ``skiplist.picture`` draws it. Raises
        ``KeyError`` naming what there is if the layer and branch hold no list.
        """
        bitmap = self.lite.lists(layer, branch, self.run)
        tiles = next(
            record["tiles_total"]
            for record in self.statistics.to_records()
            if record["generation"] == self.run and record["layer"] == layer
        )
        return skiplist.unpack(bitmap, tiles // bitmap[..., 0].numel())

    def reset(self) -> None:
        """Forget all skip lists and statistics; the next call begins a new run."""
        self.lite.reset()
        for ring in self._rings.values():
            ring.reset()
        self._clock.end_run()

    def disable(self) -> None:
        """Give the pipeline back exactly as it was; repeated calls do nothing."""
        for layer in (*self._layers, *self._cross_layers):
            layer.release()
        for model, hook in self._denoisers:
            clocks.detach(model, hook)
            _enabled.pop(model, None)
        self._denoisers = []

    def __getstate__(self) -> Any:
        raise TypeError(
            "a handle cannot be copied or pickled: it belongs to one enabled pipeline; copy its "
            "statistics or its LiteAttention (handle.lite), or enable() the other pipeline"
        )

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disable()

    def _take(self, prefix: str, model: torch.nn.Module, found: list[Found]) -> None:
        hook = clocks.attach(model, self._clock)
        self._denoisers.append((model, hook))
        _enabled[model] = weakref.ref(self)
        chosen = {id(layer.module) for layer in found}
        others = {
            id(module.processor)
            for module in model.modules()
            if hasattr(module, "processor") and id(module) not in chosen
        }
        held = collections.Counter(id(layer.module.processor) for layer in found)
        for layer in found:
            processor = id(layer.module.processor)
            taken = Layer(
                prefix + layer.name,
                layer,
                self._attend,
                self._attend_ring,
                shared_processor=processor in others or held[processor] > 1,
                cross_attention=self._cross_attention,
                engine=self.lite.engine,
            )
            if layer.kind == "cross":
                self._cross_layers.append(taken)
            else:
                self._layers[taken] = hook.context

    def _attend(
        self,
        layer: Layer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        out: torch.Tensor,
    ) -> None:
        self.lite(q, k, v, layout="bshd", scale=scale, out=out, **self._position(layer))

    def _attend_ring(
        self,
        layer: Layer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        if group not in self._rings:
            self._rings[group] = SeqParallel(
                self.policy,
                group=group,
                mode="ring",
                geometry=self._geometry,
                engine=self.lite.engine,
            )
        return self._rings[group](q, k, v, scale=scale, **self._position(layer))

    def _position(self, layer: Layer) -> dict[str, Any]:
        """Where a call of ``layer`` stands, as LiteAttention takes it; ends a run that is over."""
        at = self._clock.locate(self._layers[layer])
        if at.run != self._run:
            self.lite.end(self._run)
            for ring in self._rings.values():
                ring.end(self._run)
            self._run = at.run
        return {
            "step": at.step,
            "layer": layer.name,
            "branch": at.branch,
            "generation": at.run,
            "num_steps": at.num_steps,
        }


def enable(
    target: Any,
    policy: SkipPolicy | None = None,
    *,
    geometry: TileGeometry | None = None,
    engine: str | None = None,
    exclude: Sequence[str] = (),
    cross_attention: bool = False,
) -> Handle:
    """Run the self-attention of a diffusers pipeline or transformer with LiteAttention.

    Everything else stays as it is, cross-attention too unless ``cross_attention`` is set. Use the
    handle as a context manager, or call :func:`disable`. The tensors the layers pass are [B,S,H,D]
    in the model's dtype.

    Copies and pickles of an enabled pipeline or model (``copy.deepcopy``, ``torch.save``) are plain
    ones without LiteAttention, which a warning says; enable them on their own.

    Args:
        target: a diffusers pipeline (its ``transformer*`` and ``unet*`` models are taken), or a
            diffusers transformer. With a transformer alone the step is taken from
            ``cache_context`` or from changes of its ``timestep`` argument.
        policy: what may be skipped (thresholds in log2 units); ``SkipPolicy()`` by default,
            ``SkipPolicy(enabled=False)`` for the dense kernel.
        geometry: tile geometry; the engine's own by default.
        engine: engine by name; chosen by the device by default.
        exclude: patterns (``fnmatch``) of layer names to leave alone.
        cross_attention: run cross-attention on the same engine as well, always dense.

    Raises:
        TypeError: ``target``, ``policy`` or ``geometry`` has the wrong type; lists every reason.
        ValueError: it is already enabled, no self-attention goes through the dispatcher, or the
            engine does not support a layer; lists every layer and reason.
    """
    policy = SkipPolicy() if policy is None else policy
    pipeline, denoisers = _denoisers(target)
    kinds = []
    if not isinstance(policy, SkipPolicy):
        kinds.append(f"policy must be a SkipPolicy, got {type(policy).__name__}")
    if geometry is not None and not isinstance(geometry, TileGeometry):
        kinds.append(f"geometry must be a TileGeometry, got {type(geometry).__name__}")
    if not denoisers:
        kinds.append(
            "target must be a diffusers pipeline with a transformer or unet, or a diffusers "
            f"transformer, got {type(target).__name__}"
        )
    if kinds:
        raise TypeError("cannot enable LiteAttention: " + "; ".join(kinds))

    reasons = []
    taken: list[tuple[str, torch.nn.Module, list[Found]]] = []
    for name, model in denoisers.items():
        prefix = "" if name == "transformer" else f"{name}."
        if model in _enabled:
            reasons.append(f"{name} is already enabled: disable() it first")
        found = [
            layer
            for layer in find(model, cross_attention=cross_attention)
            if not any(fnmatch.fnmatchcase(prefix + layer.name, pattern) for pattern in exclude)
        ]
        reasons += _unsupported(prefix, found, policy, geometry, engine)
        if found:
            taken.append((prefix, model, found))
    if not taken:
        reasons.append(
            f"no self-attention of {', '.join(denoisers)} goes through diffusers' attention "
            "dispatcher (its processors have no _attention_backend), or all of it is excluded"
        )
    if reasons:
        raise ValueError("cannot enable LiteAttention: " + "; ".join(reasons))

    handle = Handle(policy, geometry, engine, pipeline, cross_attention)
    try:
        for prefix, model, found in taken:
            handle._take(prefix, model, found)
    except BaseException:
        handle.disable()
        raise
    return handle


def disable(target: Any) -> None:
    """Undo :func:`enable` on a pipeline or transformer.

    Raises:
        ValueError: it is not enabled.
    """
    handles = {
        id(handle): handle
        for model in _denoisers(target)[1].values()
        if (reference := _enabled.get(model)) is not None and (handle := reference()) is not None
    }
    if not handles:
        raise ValueError(f"LiteAttention is not enabled on this {type(target).__name__}")
    for handle in handles.values():
        handle.disable()


def _denoisers(target: Any) -> tuple[Any | None, dict[str, torch.nn.Module]]:
    """Return the pipeline, if ``target`` is one, and its denoising models by name."""
    if isinstance(target, torch.nn.Module):
        return None, {"transformer": unwrap_module(target)}
    components = getattr(target, "components", None)
    if not isinstance(components, dict):
        return None, {}
    return target, dict(_models(components))


def _models(components: dict[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, component in components.items():
        if name.startswith(("transformer", "unet")) and isinstance(component, torch.nn.Module):
            yield name, unwrap_module(component)


def _unsupported(
    prefix: str,
    found: list[Found],
    policy: SkipPolicy,
    geometry: TileGeometry | None,
    engine: str | None,
) -> list[str]:
    reasons = []
    for layer in found:
        if layer.heads is None or layer.head_dim is None:
            continue  # the module does not show its sizes; its first call is checked instead
        against = admission.video_reasons(
            layer.device,
            heads=layer.heads,
            kv_heads=layer.kv_heads or layer.heads,
            head_dim=layer.head_dim,
            dtype=layer.dtype,
            skips=policy.enabled and layer.kind != "cross",
            engine=engine,
            geometry=geometry,
        )
        if against:
            reasons.append(f"layer {prefix}{layer.name}: {', '.join(against)}")
    return reasons


__all__ = ["BACKEND_NAME", "Handle", "disable", "enable"]
