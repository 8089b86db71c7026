"""Take over the attention layers of a diffusers model, one by one.

A layer is taken over by its processor's ``_attention_backend`` and two forward hooks that tell
the backend which layer is calling. Nothing else on the module changes, and :meth:`Layer.release`
puts back exactly what was there, but for a backend that was set meanwhile.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import AttentionBackendName
from torch.utils.hooks import RemovableHandle

from liteattention_common.slots import new_slot
from liteattention_rocm.lite.parallel import Mode

from . import backend, context_parallel, copies, note
from .discovery import Found
from .module_hooks import HOOK_KEY, same_key, take_out
from .reach import ELSEWHERE, Reach

#: The names under which diffusers' attention modules take another sequence.
_CONTEXTS = ("encoder_hidden_states", "context", "cond")


class Layer:
    """One attention layer that is taken over.

    Self-attention goes to ``attend``, of a split sequence to ``attend_split``. Calls that attend
    to another sequence stay with the backend that the module had, or go to our dense kernel on
    ``engine`` if ``cross_attention`` says so.

    Key: the layer's name in its pipeline. Owner: the handle that enabled it. Lifetime: from
    ``enable`` to ``disable``; it keeps what the module had before, to put it back.
    """

    def __init__(
        self,
        name: str,
        found: Found,
        attend: Callable[..., None],
        attend_split: Callable[..., torch.Tensor],
        begin_split: Callable[..., None],
        calls: Reach,
        *,
        shared_processor: bool,
        cross_attention: bool,
        engine: str | None,
    ) -> None:
        if HOOK_KEY in found.module._forward_pre_hooks:
            raise ValueError(f"layer {name} is already taken over by another enable()")
        self.name = name
        self.slot = new_slot(self)
        #: Whether all calls so far have attended to another sequence alone.
        self.crossing = False
        self._attended = False
        self._attend = attend
        self._attend_split = attend_split
        self._begin_split = begin_split
        self._calls = calls
        self._module = found.module
        self._kind = found.kind
        self._kv_heads = found.kv_heads
        self._ahead: RemovableHandle | None = None
        self._cross_attention = cross_attention
        self._engine = engine
        parameters = list(inspect.signature(found.module.forward).parameters)
        self._contexts = {name: parameters.index(name) for name in _CONTEXTS if name in parameters}
        module: Any = found.module
        self._processor = module.processor
        self._was_set = "_attention_backend" in vars(self._processor)
        self._previous: AttentionBackendName | None = self._processor._attention_backend
        self._ours = self._processor
        if shared_processor:
            # Cross-attention holds the same object and keeps its own backend.
            self._ours = copy.copy(self._processor)
            module.processor = self._ours
        self._member = AttentionBackendName(backend.ENABLED_NAME)
        self._ours._attention_backend = self._member
        self._hooks = (
            same_key(
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module._forward_pre_hooks,
                module._forward_pre_hooks_with_kwargs,
            ),
            same_key(
                module.register_forward_hook(self._leave, always_call=True),
                module._forward_hooks,
                module._forward_hooks_always_called,
            ),
        )
        copies.stay_plain(module, self._undo)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        out: torch.Tensor,
    ) -> None:
        """Compute this layer's attention on [B,S,H,D] tensors into ``out``."""
        self._attended, self.crossing = True, False
        self._attend(self, q, k, v, scale, out)
        self._calls.attended(self.name)

    def attend_split(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return attention of this rank's rows [B,S_local,H,D] to those of all ranks."""
        self._attended, self.crossing = True, False
        out = self._attend_split(self, q, k, v, scale, *self._group())
        self._calls.attended(self.name)
        return out

    def _group(self) -> tuple[dist.ProcessGroup, Mode]:
        """The processes that share the sequence, and how."""
        module: Any = self._module
        context = module.processor._parallel_config.context_parallel_config
        if context.ring_degree > 1:
            return context._ring_mesh.get_group(), "ring"
        return context._ulysses_mesh.get_group(), "ulysses"

    def release(self) -> None:
        """Put the module back as it was, but for a backend that the user has set meanwhile."""
        for hook in self._hooks:
            hook.remove()
        copies.release(self._module)
        module: Any = self._module
        chosen = self._ours._attention_backend is not self._member  # by the user, meanwhile
        if not chosen:  # also of a copy, which somebody may have kept
            self._give_back(self._ours)
        # A processor that the user has set meanwhile is theirs.
        if self._ours is self._processor or module.processor is not self._ours:
            return
        parallel = vars(self._ours).get("_parallel_config")
        if parallel is not None:  # enable_parallelism() met only our copy
            self._processor._parallel_config = parallel
        if chosen:  # so did set_attention_backend()
            self._processor._attention_backend = self._ours._attention_backend
        module.processor = self._processor

    def _give_back(self, processor: Any) -> None:
        """Set the attention backend that the processor had before."""
        if self._was_set:
            processor._attention_backend = self._previous
        else:
            del processor._attention_backend

    def _undo(self, state: dict[str, Any]) -> None:
        """Take what is ours out of the attributes of a copy of the module."""
        take_out(state)
        home = "_modules" if "processor" in state["_modules"] else None
        holder = state if home is None else dict(state[home])
        # A backend that the user has set meanwhile is the copy's, too.
        if holder["processor"] is self._ours and self._ours._attention_backend is self._member:
            if self._ours is self._processor:
                holder["processor"] = copy.copy(self._ours)
                self._give_back(holder["processor"])
            else:
                holder["processor"] = self._processor
        if home is not None:
            state[home] = holder

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.processor._attention_backend != backend.ENABLED_NAME:
            raise RuntimeError(
                f"layer {self.name} is enabled for LiteAttention but its attention backend is now "
                f"{module.processor._attention_backend!r}: call disable() before "
                "set_attention_backend(), reset_attention_backend() or set_attn_processor()"
            )
        if self._kind == "by-call":
            context = self._context(args, kwargs)
            if context is not None:
                self._enter_beside(context)
                return
        if self._kind == "cross":
            note.enter(None, self._previous, dense=self._cross_attention, engine=self._engine)
        else:
            note.enter(self.slot, self._previous, missed=self._told())
            self._send_ahead(module)

    def _told(self) -> Callable[[str], None] | None:
        """Who is told of calls without skip state; nobody amid code that is traced."""
        return None if torch.compiler.is_compiling() else self._missed

    def _missed(self, reason: str) -> None:
        self._calls.missed(self.name, reason)

    def _context(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The other sequence that the module is given, if any."""
        for name, index in self._contexts.items():
            given = kwargs.get(name)
            if given is None and index < len(args):
                given = args[index]
            if given is not None:
                return given
        return None

    def _enter_beside(self, context: Any) -> None:
        """Note that the module is given another sequence [B, S, C]."""
        if not torch.compiler.is_compiling():
            self.crossing = not self._attended
        slot, beside = None, None
        if isinstance(context, torch.Tensor) and context.dim() == 3:
            slot, beside = self.slot, note.Beside(context.shape[1], self.name)
        note.enter(
            slot,
            self._previous,
            dense=self._cross_attention,
            engine=self._engine,
            beside=beside,
            missed=self._told(),
        )

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and output is not None:  # None: the call failed
            here = note.read()
            if here.slot is not None and not here.reached:
                self._missed(ELSEWHERE)
        note.leave()
        if self._ahead is not None:
            self._ahead.remove()
            self._ahead = None

    def _send_ahead(self, module: Any) -> None:
        """Let v be sent once it is projected, while q and k are normalised and rotated."""
        config = getattr(module.processor, "_parallel_config", None)
        project = getattr(module, "to_v", None)
        if torch.compiler.is_compiling() or project is None or self._kv_heads is None:
            return
        if context_parallel.is_ours(config) and context_parallel.ring_degree(config) == 1:
            self._ahead = project.register_forward_hook(self._projected)

    def _projected(self, project: Any, args: Any, v: torch.Tensor) -> None:
        if not torch.compiler.is_compiling() and v.dim() == 3 and self._kv_heads:
            heads = torch.unflatten(v, -1, (self._kv_heads, -1))
            self._begin_split(self, heads, *self._group())
