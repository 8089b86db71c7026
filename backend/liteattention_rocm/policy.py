"""When LiteAttention may skip, and how much: one immutable, validated configuration object."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from . import skiplist

Ranges = tuple[tuple[int, int], ...]


class SkipPolicy(BaseModel):
    """Thresholds by step and layer, dense steps, forced tiles and walking order.

    Immutable; compared by value; one object serves any number of
    :class:`~liteattention_rocm.LiteAttention` objects. Steps count from 0.

    Attributes:
        threshold: log2 units of the scaled scores, <= 0; ``-inf`` keeps every tile. A tuple is
            indexed by step and its last value repeats.
        threshold_scale: "absolute", or "length": the effective threshold is
            ``threshold - log2(kv_len)``, which bounds the mass that skips can drop however many
            keys there are (dropped mass can reach keys * 2^threshold relative to a row's peak).
        layer_thresholds: fnmatch pattern on the layer name -> threshold in log2 units, replacing
            ``threshold`` at every step; the first pattern that matches wins.
        warmup_steps: steps [0, warmup_steps) are dense.
        last_step: last step that may skip, inclusive; later ones are dense. A negative value
            counts from the end (-1 is the last step) and needs ``num_steps``. None: no limit.
        retest_every: every N-th LiteAttention step of a state walks the full list again, so that
            tiles which stopped being negligible come back. None: skips only grow.
        branches: "separate" keeps one list per classifier-free-guidance branch; "shared" lets all
            branches of a step read one list and joins (ORs) what they write.
        must_do: token ranges [start, end) over keys, ascending and disjoint, whose tiles are
            always computed; rounded outward to K blocks.
        must_skip: token ranges whose tiles are never computed; rounded inward to K blocks.
        soft_skip: drop a negligible tile from the output in the very step that finds it (saves
            work at once, costs accuracy); off, the first step equals dense attention exactly.
        direction: walk the K blocks "ascending", "descending", or "alternate" by step, which
            finds more skips because tiles meet the maximum of either end.
        enabled: False runs plain dense attention and keeps no state.

    Raises:
        pydantic.ValidationError: (a ``ValueError``) listing every field that is wrong and every
            contradiction between fields, each with what to do instead.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, ser_json_inf_nan="strings"
    )

    threshold: float | tuple[float, ...] = -6.0
    threshold_scale: Literal["absolute", "length"] = "absolute"
    layer_thresholds: dict[str, float] = {}
    warmup_steps: int = 0
    last_step: int | None = None
    retest_every: int | None = None
    branches: Literal["separate", "shared"] = "separate"
    must_do: Ranges = ()
    must_skip: Ranges = ()
    soft_skip: bool = False
    direction: Literal["alternate", "ascending", "descending"] = "alternate"
    enabled: bool = True

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """Check every field and every pair of fields first, so that one error lists it all."""
        if not isinstance(data, dict):
            return data
        clean = dict(data)
        problems: list[tuple[str, str, Any]] = []
        for name, value in data.items():
            check = _CHECKS.get(name)
            if check is None:
                problems.append(
                    (str(name), f"unknown field: a policy has {', '.join(cls.model_fields)}", value)
                )
                continue
            found: list[str] = []
            clean[name] = check(value, found)
            problems += [(name, reason, value) for reason in found]
        wrong = {name for name, _, _ in problems}
        if not wrong & {"must_do", "must_skip"}:
            problems += [
                ("must_skip", reason, clean.get("must_skip"))
                for reason in _overlaps(clean.get("must_do", ()), clean.get("must_skip", ()))
            ]
        last = clean.get("last_step")
        warmup = clean.get("warmup_steps", 0)
        if not wrong & {"last_step", "warmup_steps"} and last is not None and 0 <= last < warmup:
            problems.append(
                (
                    "last_step",
                    f"last_step {last} lies in the {warmup} dense warm-up steps, so nothing would "
                    "ever skip: raise last_step, lower warmup_steps, or say enabled=False",
                    last,
                )
            )
        if problems:
            raise ValidationError.from_exception_data(
                cls.__name__,
                [
                    InitErrorDetails(
                        type=PydanticCustomError("skip_policy", "{reason}", {"reason": reason}),
                        loc=(name,),
                        input=value,
                    )
                    for name, reason, value in problems
                ],
            )
        return clean

    def threshold_at(
        self, step: int, layer: str, kv_len: int, num_steps: int | None = None
    ) -> float | None:
        """Return the effective threshold (log2 units) of a step, or None if it is to be dense.

        ``kv_len`` is the number of keys. Raises ``ValueError`` for a negative step, a step at or
        past ``num_steps``, fewer than one key, or a negative ``last_step`` without ``num_steps``.
        """
        if not self.enabled:
            return None
        last = self.last_step
        reasons = []
        if step < 0:
            reasons.append(f"step must be >= 0, got {step}")
        if kv_len < 1:
            reasons.append(f"kv_len must be >= 1, got {kv_len}")
        if num_steps is not None and step >= num_steps:
            reasons.append(f"step {step} is not one of num_steps {num_steps} (steps count from 0)")
        if last is not None and last < 0 and num_steps is None:
            reasons.append(
                f"last_step {last} counts from the end: give num_steps, or use a last_step >= 0"
            )
        if reasons:
            raise ValueError("cannot tell the threshold: " + "; ".join(reasons))
        if last is not None and last < 0 and num_steps is not None:
            last += num_steps
        if step < self.warmup_steps or (last is not None and step > last):
            return None
        value = self._layer_threshold(layer)
        if value is None:
            value = (
                self.threshold[min(step, len(self.threshold) - 1)]
                if isinstance(self.threshold, tuple)
                else self.threshold
            )
        return value - math.log2(kv_len) if self.threshold_scale == "length" else value

    def _layer_threshold(self, layer: str) -> float | None:
        for pattern, value in self.layer_thresholds.items():
            if fnmatchcase(layer, pattern):
                return value
        return None

    def descends(self, ordinal: int) -> bool:
        """Say whether a state's ``ordinal``-th executed LiteAttention step walks downwards."""
        return self.direction == "descending" or (
            self.direction == "alternate" and ordinal % 2 == 1
        )

    def retests(self, ordinal: int) -> bool:
        """Say whether a state's ``ordinal``-th executed step walks the full list again."""
        return self.retest_every is not None and ordinal % self.retest_every == 0

    def key_masks(
        self, kv_len: int, k_block: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return packed K-block masks (must_do, must_skip), int32 [words] on the CPU, or None.

        must_do is rounded outward to blocks of ``k_block`` keys, must_skip inward; a short last
        block is skipped when all keys that exist in it are. Raises one ``ValueError`` for every
        range that ends past ``kv_len`` and for a must_skip that covers every K block.
        """
        masks: list[torch.Tensor | None] = []
        reasons = []
        for name, ranges in (("must_do", self.must_do), ("must_skip", self.must_skip)):
            try:
                mask = skiplist.token_ranges_to_blocks(
                    ranges, kv_len, k_block, outward=name == "must_do"
                )
            except ValueError as error:
                reasons.append(f"{name}: {error}")
                continue
            if name == "must_skip" and len(mask) and bool(mask.all()):
                reasons.append(
                    f"must_skip covers all {kv_len} keys, so that nothing is left to attend to: "
                    "leave out at least one K block"
                )
            masks.append(skiplist.pack(mask) if bool(mask.any()) else None)
        if reasons:
            raise ValueError("policy does not fit this request: " + "; ".join(reasons))
        return masks[0], masks[1]


def _number(value: Any, found: list[str], what: str = "it") -> float:
    """Read one threshold; strings such as "-inf" come from JSON."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            found.append(f"{what} must be a number in log2 units, got {value!r}")
            return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        found.append(f"{what} must be a number in log2 units, got {type(value).__name__}")
        return 0.0
    number = float(value)
    if math.isnan(number):
        found.append(f"{what} is NaN: use -inf to keep every tile, or a number <= 0")
    elif number > 0:
        found.append(
            f"{what} is {number:g}, but thresholds are in log2 units and <= 0 (a tile is skipped "
            f"when it stays that far below the running maximum): did you mean {-number:g}?"
        )
    return number


def _check_threshold(value: Any, found: list[str]) -> Any:
    if isinstance(value, list | tuple):
        if not value:
            found.append("an empty list names no threshold: give at least one, or a single number")
        return tuple(_number(item, found, f"the value of step {i}") for i, item in enumerate(value))
    return _number(value, found)


def _check_layers(value: Any, found: list[str]) -> Any:
    if not isinstance(value, dict):
        found.append(
            f"must map layer name patterns to thresholds, got {type(value).__name__}: "
            'for example {"blocks.0.*": -8.0}'
        )
        return {}
    found += [
        f"pattern {pattern!r} must be a non-empty string"
        for pattern in value
        if not isinstance(pattern, str) or not pattern
    ]
    return {
        pattern: _number(item, found, f"the threshold of {pattern!r}")
        for pattern, item in value.items()
    }


def _integer(minimum: int | None, optional: bool, remedy: str) -> Callable[[Any, list[str]], Any]:
    def check(value: Any, found: list[str]) -> Any:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            found.append(f"must be an integer{' or None' if optional else ''}, got {value!r}")
        elif minimum is not None and value < minimum:
            found.append(f"must be >= {minimum}, got {value}: {remedy}")
        return value

    return check


def _choice(*names: str) -> Callable[[Any, list[str]], Any]:
    def check(value: Any, found: list[str]) -> Any:
        if value not in names:
            found.append(f"must be one of {', '.join(names)}, got {value!r}")
        return value

    return check


def _check_bool(value: Any, found: list[str]) -> Any:
    if not isinstance(value, bool):
        found.append(f"must be True or False, got {value!r}")
    return value


def _check_ranges(value: Any, found: list[str]) -> Any:
    shape = "must be a list of token ranges (start, end) with integers, for example [(0, 512)]"
    if not isinstance(value, list | tuple):
        found.append(f"{shape}, got {type(value).__name__}")
        return ()
    for i, item in enumerate(value):
        if (
            not isinstance(item, list | tuple)
            or len(item) != 2
            or any(isinstance(n, bool) or not isinstance(n, int) for n in item)
        ):
            found.append(f"{shape}, got {item!r} as range {i}")
    if found:
        return ()
    ranges = tuple((start, end) for start, end in value)
    found += skiplist.range_reasons(ranges)
    return ranges


def _overlaps(
    must_do: Sequence[tuple[int, int]], must_skip: Sequence[tuple[int, int]]
) -> list[str]:
    return [
        f"must_skip [{skip[0]}, {skip[1]}) overlaps must_do [{do[0]}, {do[1]}): a key cannot be "
        f"both, take tokens [{max(do[0], skip[0])}, {min(do[1], skip[1])}) out of one of them"
        for skip in must_skip
        for do in must_do
        if max(do[0], skip[0]) < min(do[1], skip[1])
    ]


_CHECKS: dict[str, Callable[[Any, list[str]], Any]] = {
    "threshold": _check_threshold,
    "threshold_scale": _choice("absolute", "length"),
    "layer_thresholds": _check_layers,
    "warmup_steps": _integer(0, False, "0 means no dense warm-up"),
    "last_step": _integer(None, True, ""),
    "retest_every": _integer(1, True, "None means never, 1 walks the full list in every step"),
    "branches": _choice("separate", "shared"),
    "must_do": _check_ranges,
    "must_skip": _check_ranges,
    "soft_skip": _check_bool,
    "direction": _choice("alternate", "ascending", "descending"),
    "enabled": _check_bool,
}
