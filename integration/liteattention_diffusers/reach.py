"""Whether the calls of an enabled layer reach LiteAttention, counted and said.

A layer is enabled by the attention backend of its processor. Nothing makes the processor use it: it
may name another backend, call another attention function, or attend twice. diffusers drops such
calls without a word, so they are counted here, by layer and reason, and each reason is logged once.
"""

from __future__ import annotations

import ast
import collections
import inspect
import logging
import textwrap
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

#: A call of the module in which our backend was never called.
ELSEWHERE = "its processor called no attention, named another backend or another attention function"
#: What follows the first attention of a call and is self-attention as well.
SECOND = "a second self-attention in one call of the module has no skip list of its own"
#: A forward of the denoiser in which the module did not run where it can be seen.
NOT_RUN = "its block did not run (a cache or a skipped block), or compiled code sends it elsewhere"

#: Layers that a message names.
_SHOWN = 3
_DISPATCH = "dispatch_attention_fn"
_TORCH = "scaled_dot_product_attention"


class Reach:
    """Calls of layers that reached LiteAttention and that did not, by reason.

    Key: the layer's name. Owner: the handle of one enabled pipeline. Lifetime: until
    :meth:`clear`. Each reason is logged once, with the layers of the forward that met it first.
    """

    def __init__(self) -> None:
        self._attended: collections.Counter[str] = collections.Counter()
        self._missed: dict[str, collections.Counter[str]] = {}
        #: Layers by reason that the log has not named yet.
        self._unsaid: dict[str, list[str]] = {}
        self._said: set[str] = set()
        #: What LiteAttention had computed by the end of the run before.
        self._before: collections.Counter[str] = collections.Counter()
        #: All calls of a layer by the end of the forward before.
        self._seen: dict[str, int] = {}

    def attended(self, layer: str) -> None:
        """Count a call that LiteAttention computed."""
        self._attended[layer] += 1

    def missed(self, layer: str, reason: str, *, quiet: bool = False) -> None:
        """Count a call that it did not."""
        self._missed.setdefault(layer, collections.Counter())[reason] += 1
        if not quiet and reason not in self._said:
            layers = self._unsaid.setdefault(reason, [])
            if layer not in layers:
                layers.append(layer)

    def forward_over(self, layers: Iterable[str]) -> None:
        """Log the reasons that a forward met, and count layers that were not seen in it."""
        for layer in layers:
            if self._total(layer) == self._seen.get(layer, 0):
                self.missed(layer, NOT_RUN, quiet=True)
            self._seen[layer] = self._total(layer)
        self.say()

    def run_over(self, layers: Iterable[str]) -> None:
        """Log the layers none of whose calls was computed by LiteAttention in the run."""
        for layer in layers:
            found = self._missed.get(layer)
            if found and self._attended[layer] == self._before[layer]:
                reason = found.most_common(1)[0][0]
                if reason not in self._said:
                    self._unsaid.setdefault(reason, []).append(layer)
        self._before = self._attended.copy()
        self.say()

    def say(self) -> None:
        """Log each reason that was not logged before."""
        for reason, layers in self._unsaid.items():
            self._said.add(reason)
            named = ", ".join(map(repr, layers[:_SHOWN]))
            if len(layers) > _SHOWN:
                named += f" and {len(layers) - _SHOWN} more"
            logger.warning(
                "calls of enabled layers did not reach LiteAttention and skip nothing: %s (%s). "
                "handle.calls counts them; enable(..., exclude=[...]) leaves layers out",
                named,
                reason,
            )
        self._unsaid.clear()

    def counts(self, layers: Iterable[str]) -> dict[str, dict[str, int]]:
        """Return calls by layer: {"LiteAttention": n, reason: n, ...}."""
        return {
            layer: {"LiteAttention": self._attended[layer], **self._missed.get(layer, {})}
            for layer in layers
        }

    def clear(self) -> None:
        """Start counting again; what was logged is not logged again."""
        self._attended.clear()
        self._before.clear()
        self._missed.clear()
        self._unsaid.clear()
        self._seen.clear()

    def _total(self, layer: str) -> int:
        return self._attended[layer] + sum(self._missed.get(layer, {}).values())


def promises(processor: Any) -> list[str]:
    """Say which attention calls of a processor, by its source, will not come to its backend.

    Empty where the source cannot be read. A call in a branch that is never taken is named, too.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(processor).__call__)))
    except (OSError, TypeError, SyntaxError):
        return []
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _last_name(node.func)
        if called == _TORCH:
            found.append(f"calls torch's {_TORCH} itself")
        elif called == _DISPATCH:
            given = {word.arg: word.value for word in node.keywords}
            named = given.get("backend")
            if named is None:
                found.append(f"calls {_DISPATCH} without a backend")
            elif not _is_own(named):
                found.append(f"names the backend {ast.unparse(named)} in a call")
            causal = given.get("is_causal")
            if isinstance(causal, ast.Constant) and causal.value is True:
                found.append("has a causal call, which LiteAttention refuses")
    return list(dict.fromkeys(found))


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_own(backend: ast.expr) -> bool:
    """Whether it is the processor's ``_attention_backend``, or something computed from it."""
    return not isinstance(backend, ast.Constant) and "AttentionBackendName" not in ast.unparse(
        backend
    )


def say_promises(processors: Iterable[tuple[str, Any]]) -> None:
    """Log, once for each class of processor, what :func:`promises` finds."""
    by_class: dict[type, list[str]] = {}
    shown: dict[type, Any] = {}
    for layer, processor in processors:
        by_class.setdefault(type(processor), []).append(layer)
        shown[type(processor)] = processor
    for kind, layers in by_class.items():
        found = promises(shown[kind])
        if found:
            more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
            logger.warning(
                "%s of layer %r%s %s: such calls do not reach LiteAttention and skip nothing",
                kind.__name__,
                layers[0],
                more,
                "; ".join(found),
            )
