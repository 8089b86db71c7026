"""``enable`` and ``disable``: LiteAttention on the self-attention of a diffusers pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.utils.torch_utils import unwrap_module

from liteattention_rocm import SkipPolicy, TileGeometry, admission

from . import patterns
from .discovery import Found, attention_names, find
from .graphs import graph_reasons, recorder_for
from .handle import Handle, holder
from .reach import say_promises


def enable(
    target: Any,
    policy: SkipPolicy | None = None,
    *,
    geometry: TileGeometry | None = None,
    engine: str | None = None,
    exclude: Sequence[str] = (),
    cross_attention: bool = False,
    balance: bool = False,
    peer_memory: bool = False,
    graphs: bool = False,
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
        policy: what may be skipped (thresholds in log2 units); by default ``SkipPolicy()``, a
            budget of 0.05 after four dense steps; ``SkipPolicy(enabled=False)`` for the dense
            kernel. Layers are called as in the model, those of a pipeline's other denoisers after
            its name: "blocks.0.attn1", "transformer_2.blocks.0.attn1". Patterns that match no whole
            name of such a layer are tried on its name in the denoiser.
        geometry: tile geometry; the engine's own by default.
        engine: engine by name; chosen by the device by default.
        exclude: patterns (``fnmatch``) of names of layers to leave alone.
        cross_attention: run cross-attention on the same engine as well, always dense.
        balance: under ``ulysses_degree`` alone, deal heads to processes by the tiles that they
            kept; see :class:`~liteattention_rocm.SeqParallel`. Else they stay in
            their order. The result is the same.
        peer_memory: under ``ulysses_degree`` alone, let the processes of one host write to each
            other's memory instead of sending messages, which takes less time; see there. The result
            is the same. Calls raise ``ValueError`` in a ring, ``RuntimeError`` where memory cannot
            be reached.
        graphs: run the denoisers' forwards from CUDA graphs, where the host is what limits a step.
            A forward runs eagerly the first time its launches are asked for, is captured the second
            time and replayed from then on, so the first generations are slower. The results are the
            same. Keep the handle for many generations of one size: those of another are captured
            anew. The intermediate tensors of the graphs stay allocated. Caches, offloading and
            context parallelism are refused. Changed weights and adapters are noticed at the next
            run. Forward hooks of yours inside the model do not run at replays.

    Raises:
        TypeError: ``target``, ``policy`` or ``geometry`` has the wrong type; lists every reason.
        ValueError: it is already enabled, no self-attention goes through the dispatcher, the
            engine does not support a layer, or a pattern of ``exclude`` or the policy matches no
            layer of any denoiser; lists every layer, pattern and reason.
    """
    policy = SkipPolicy() if policy is None else policy
    pipeline, denoisers = _denoisers(target)
    kinds = []
    if not isinstance(policy, SkipPolicy):
        kinds.append(f"policy must be a SkipPolicy, got {type(policy).__name__}")
    if geometry is not None and not isinstance(geometry, TileGeometry):
        kinds.append(f"geometry must be a TileGeometry, got {type(geometry).__name__}")
    if isinstance(exclude, str):
        kinds.append(f"exclude must be a sequence of patterns, got a str: use [{exclude!r}]")
    if not denoisers:
        kinds.append(
            "target must be a diffusers pipeline with a transformer or unet, or a diffusers "
            f"transformer, got {type(target).__name__}"
        )
    if kinds:
        raise TypeError("cannot enable LiteAttention: " + "; ".join(kinds))

    reasons = []
    taken: list[tuple[str, torch.nn.Module, list[Found]]] = []
    layers: list[str] = []
    attention: list[str] = []
    for name, model in denoisers.items():
        prefix = "" if name == "transformer" else f"{name}."
        if holder(model) is not None:
            reasons.append(f"{name} is already enabled: disable() it first")
        there = find(model, cross_attention=cross_attention)
        layers += [prefix + layer.name for layer in there if layer.kind != "cross"]
        attention += [prefix + each for each in attention_names(model)]
        found = [layer for layer in there if not patterns.matches(prefix + layer.name, exclude)]
        reasons += _unsupported(prefix, found, policy, geometry, engine)
        if graphs:
            reasons += [f"{name}: {reason}" for reason in graph_reasons(model)]
        if found:
            taken.append((prefix, model, found))
    if not taken:
        reasons.append(
            f"no self-attention of {', '.join(denoisers)} goes through diffusers' attention "
            "dispatcher (its processors have no _attention_backend), or all of it is excluded"
        )
    given = {"exclude": exclude, **patterns.of_policy(policy)}
    reasons += patterns.reasons(given, layers, attention)
    if reasons:
        raise ValueError("cannot enable LiteAttention: " + "; ".join(reasons))

    recorder = recorder_for(taken[0][1]) if graphs else None
    handle = Handle(
        policy,
        geometry,
        engine,
        pipeline,
        cross_attention,
        balance,
        peer_memory,
        recorder,
        tuple(layers),
    )
    say_promises(
        (prefix + layer.name, layer.module.processor)
        for prefix, _, found in taken
        for layer in found
        if layer.kind != "cross"
    )
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
    held = [holder(model) for model in _denoisers(target)[1].values()]
    handles = {id(handle): handle for handle in held if handle is not None}
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
    found: list[torch.nn.Module] = []
    for name, component in components.items():
        if name.startswith(("transformer", "unet")) and isinstance(component, torch.nn.Module):
            model = unwrap_module(component)
            if all(model is not other for other in found):  # it may have two names
                found.append(model)
                yield name, model


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
        if layer.dtype is None or layer.device is None:
            continue  # the same where weights are quantized or offloaded
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
