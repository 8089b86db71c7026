"""Settings by patterns of layer names: ``fnmatch``, of whole names, case sensitive."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_WILDCARDS = re.compile(r"[*?[]")
#: What pipelines with several denoisers put before the names of all but the first.
_OTHER_DENOISER = re.compile(r"(?:transformer|unet)_\d+\.")


def name_in_denoiser(layer: str) -> str:
    """Return a layer's name without that of its denoiser: "transformer_2.a" is "a" in it."""
    return _OTHER_DENOISER.sub("", layer, count=1) if _OTHER_DENOISER.match(layer) else layer


def matches_any(pattern: str, layers: Iterable[str]) -> bool:
    """Say whether a pattern of a policy is about any of the layers; see :class:`ByLayer`."""
    matches = matcher(pattern)
    return any(matches(layer) or matches(name_in_denoiser(layer)) for layer in layers)


def matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that is true for the layer names that a pattern matches.

    It takes time in proportion to the lengths of pattern and name at most: regular expressions of
    ``fnmatch`` do not backtrack over a ``*``. Its own cache of 32,768 expressions is left out,
    because servers get patterns from requests.
    """
    if _WILDCARDS.search(pattern) is None:
        return pattern.__eq__
    return re.compile(fnmatch.translate(pattern)).match


class ByLayer(Mapping[str, Any]):
    """Layer name patterns -> thresholds (log2 units) or budgets (shares); immutable and hashable.

    The order counts, because the first pattern that matches wins: two mappings are equal when
    they hold the same items in the same order. ``checked`` is what the values were validated as, so
    that a policy made from another does not validate them again.
    """

    __slots__ = ("_items", "_matchers", "_values", "checked")

    def __init__(self, items: Mapping[str, Any] | None = None, checked: str = "") -> None:
        self._items = tuple((items or {}).items())
        self._values = dict(self._items)
        self._matchers: list[tuple[Callable[[str], object], Any]] | None = None
        self.checked = checked

    def __getitem__(self, pattern: str) -> Any:
        return self._values[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self._items == tuple(other.items())

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._values, self.checked)

    def first_match(self, layer: str) -> Any:
        """Return what the first pattern that matches a layer's name has; None if none does.

        Layers of a second denoiser are looked up by their name in it then: patterns that name no
        denoiser are about all of them.
        """
        if self._matchers is None:
            self._matchers = [(matcher(pattern), value) for pattern, value in self._items]
        for name in dict.fromkeys((layer, name_in_denoiser(layer))):
            for matches, value in self._matchers:
                if matches(name):
                    return value
        return None
