"""When LiteAttention may skip, and how much: one immutable, validated configuration object."""

from __future__ import annotations

import collections
import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainSerializer,
    StrictBool,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from typing_extensions import Self

from ..brief import first_few, shortened, shown
from . import bitmap
from .by_layer import ByLayer

#: Integers are int64 wherever they go: steps, counts of steps, positions of tokens.
_LARGEST = 2**63 - 1


def _plain_float(value: Any) -> Any:
    """Take reals of any kind but bool, and the strings that JSON has for infinities."""
    if isinstance(value, str):
        return _number_in_quotes(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return float(value)
    except OverflowError:  # an integer past the floats
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def _number_in_quotes(text: str) -> Any:
    """Return infinity or NaN, which JSON writes in quotes; refuse other numbers in quotes."""
    try:
        number = float(text)
    except ValueError:
        return text  # the strict type that follows says what is wrong
    if text.strip().lstrip("+-")[:1].isdigit() or math.isfinite(number):
        raise ValueError(f"write the number without quotes, got {shown(text)}")
    return number


def _check_int(value: Any) -> Any:
    value = plain_int(value)
    if type(value) is int and abs(value) > _LARGEST:
        raise ValueError(f"integers are within -(2^63 - 1) and 2^63 - 1, got {shown(value)}")
    if isinstance(value, str):
        _number_in_quotes(value)
    return value


def plain_int(value: Any) -> Any:
    """Turn integers of any kind but bool into ints; leave anything else as it is."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _check_threshold(value: float) -> float:
    if math.isnan(value):
        raise ValueError("a threshold cannot be NaN: use -inf to keep every tile, or a number <= 0")
    if value > 0:
        raise ValueError(
            "thresholds are in log2 units and <= 0 (a tile is skipped when it stays that far below "
            f"the running maximum): did you mean {-value:g}?"
        )
    return value


def _check_budget(value: float) -> float:
    if not 0 <= value < 1:
        hint = ""
        if 1 < value < 100:
            hint = f": did you mean {value / 100:g}?"
        elif value == 1:  # everything, or 1 per cent: nobody can tell
            hint = ": 1 would drop everything, start with 0.05"
        raise ValueError(
            "a budget is the share of softmax mass that a step may drop, from 0 (keeps every tile) "
            f"to below 1{hint}"
        )
    return value


def _check_ranges(ranges: Ranges) -> Ranges:
    reasons = bitmap.range_reasons(ranges)
    if reasons:
        raise ValueError(first_few(reasons))
    return ranges


Ranges = tuple[tuple[int, int], ...]
Threshold = Annotated[
    float, BeforeValidator(_plain_float), AfterValidator(_check_threshold), Field(strict=True)
]
Budget = Annotated[
    float, BeforeValidator(_plain_float), AfterValidator(_check_budget), Field(strict=True)
]


def _not_empty(value: Any) -> Any:
    # Before the items: pydantic's min_length counts those that passed.
    if isinstance(value, list | tuple) and not value:
        raise ValueError("give at least one number")
    return value


def _budgets_of_a_step(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError(
            "each step needs a budget for each query head: give "
            f"({shown(value)}, ...) for {shown(value)}"
        )
    return value


def _same_heads(steps: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    counts = sorted({len(heads) for heads in steps})
    if len(counts) > 1:
        raise ValueError(
            f"steps have {first_few(list(map(str, counts)), ' or ')} budgets by head: give each "
            "step one for every query head of the model"
        )
    return steps


_ByHead = Annotated[tuple[Budget, ...], BeforeValidator(_not_empty)]
_threshold: TypeAdapter[Any] = TypeAdapter(Threshold)
_thresholds: TypeAdapter[Any] = TypeAdapter(
    Annotated[tuple[Threshold, ...], BeforeValidator(_not_empty)]
)
_budget: TypeAdapter[Any] = TypeAdapter(Budget)
_budgets: TypeAdapter[Any] = TypeAdapter(_ByHead)
_budgets_by_step: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        tuple[Annotated[_ByHead, BeforeValidator(_budgets_of_a_step)], ...],
        AfterValidator(_same_heads),
    ]
)


def _is_several(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _of_layer_budgets(value: Any) -> TypeAdapter[Any]:
    if not _is_several(value):
        return _budget
    return _budgets_by_step if any(map(_is_several, value)) else _budgets


def _checked_by(choose: Callable[[Any], TypeAdapter[Any]]) -> WrapValidator:
    """Check a value in the form that it has.

    A union of pydantic's would put the name of the form into the places of errors, where it reads
    like a part of the field's name.
    """
    return WrapValidator(lambda value, _: choose(value).validate_python(value))


_Thresholds = Annotated[
    float | tuple[float, ...],
    _checked_by(lambda value: _thresholds if _is_several(value) else _threshold),
]
_Budgets = Annotated[
    float | tuple[float, ...],
    _checked_by(lambda value: _budgets if _is_several(value) else _budget),
]
#: A number, one for each head, or at each step one for each head.
LayerBudgets = Annotated[
    float | tuple[float, ...] | tuple[tuple[float, ...], ...], _checked_by(_of_layer_budgets)
]
_Int = Annotated[int, BeforeValidator(_check_int), Field(strict=True)]


def _by_layer(kind: str) -> WrapValidator:
    """Make mappings immutable; those of another policy were checked when it was made."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> ByLayer:
        if type(value) is ByLayer and value.checked == kind:
            return value
        return ByLayer(validate(value), kind)

    return WrapValidator(check)


_Pattern = Annotated[str, StringConstraints(strict=True, min_length=1)]
_Ranges = Annotated[tuple[tuple[_Int, _Int], ...], AfterValidator(_check_ranges)]


class Limit(NamedTuple):
    """What a step may drop: ``threshold`` in log2 units, or ``budget`` as a share of mass.

    The other one is -inf or 0, which drop nothing. ``heads`` are the budgets of the query heads, if
    they have their own; ``budget`` is then the largest that any head of the model has.
    """

    threshold: float
    budget: float
    heads: tuple[float, ...] = ()

    @property
    def drops(self) -> bool:
        """Whether a tile may be dropped at all."""
        return self.threshold > -math.inf or self.budget > 0


class Schedule(NamedTuple):
    """What a policy says about the steps of one layer.

    Steps ``first`` to ``last`` skip within ``limits`` by step, the last of which repeats; other
    steps before ``end`` are dense. ``descending`` is by the parity of the executed
    LiteAttention step; every ``retest_every``-th walks the full list (0: none does).
    """

    first: int
    last: float
    end: float
    limits: tuple[Limit, ...]
    descending: tuple[bool, bool]
    retest_every: int

    def limit(self, step: int) -> Limit | None:
        """What a step may drop; None if it is dense."""
        if not self.first <= step <= self.last:
            return None
        limits = self.limits
        return limits[step] if step < len(limits) else limits[-1]

    def of_heads(self, layer: str, count: int, heads: Sequence[int] | None) -> Schedule:
        """Return the schedule of a call with ``count`` query heads: ``heads`` of the model, or all.

        Raises ``ValueError`` if there are budgets by head for another number of heads.
        """
        limits = []
        for limit in self.limits:
            given = limit.heads
            if given:
                chosen = tuple(range(len(given))) if heads is None else tuple(heads)
                if len(chosen) != count or not set(chosen) <= set(range(len(given))):
                    these = "" if heads is None else f", as heads {list(heads)} of the model"
                    raise ValueError(
                        f"cannot tell what to skip: layer {layer!r} has {len(given)} budgets by "
                        f"head, but the call has {count} query heads{these}: give a budget for "
                        "each query head of the model, or one number for all"
                    )
                own = tuple([given[head] for head in chosen])
                # The largest of all heads, so that those of a process walk as those of one do.
                limit = Limit(limit.threshold, limit.budget, own)
            limits.append(limit)
        return self._replace(limits=tuple(limits))


#: Wrong items that one error describes; the others are counted.
_MOST_ERRORS = 6
_UNKNOWN = "extra_forbidden"


def _brief_error(error: ValidationError, fields: Sequence[str]) -> ValidationError:
    """Shorten an error of pydantic's, which repeats what it was given item by item.

    For unknown fields it says which fields there are.
    """
    items = error.errors(include_url=False)
    # The first of every field go before the second of any, so that no field hides another.
    counts = collections.Counter[Any]()
    ranked = []
    for index, item in enumerate(items):
        field = item["loc"][:1]
        ranked.append((counts[field], index))
        counts[field] += 1
    shorter = [items[index] for _, index in sorted(ranked)[:_MOST_ERRORS]]
    unknown = [item["loc"] for item in shorter if item["type"] == _UNKNOWN]
    lines = [_brief_item(item, fields, name_all=[item["loc"]] == unknown[-1:]) for item in shorter]
    more = len(items) - len(shorter)
    if more:
        kind = PydanticCustomError("more_errors", f"and {more:,} more wrong items")
        lines.append(InitErrorDetails(type=kind, input=None))
    return ValidationError.from_exception_data(error.title, lines)


def _brief_item(item: ErrorDetails, fields: Sequence[str], *, name_all: bool) -> InitErrorDetails:
    """One wrong item in a short place; for an unknown field, what it may mean."""
    kind: str | PydanticCustomError = item["type"]
    place = tuple(shortened(part) if isinstance(part, str) else part for part in item["loc"])
    if kind == _UNKNOWN:
        close = difflib.get_close_matches(str(place[-1]), fields, n=2)
        text = "a policy has no such field"
        text += f" (did you mean {' or '.join(close)}?)" if close else ""
        text += f": its fields are {', '.join(fields)}" if name_all else ""
        kind = PydanticCustomError("unknown_field", text)
    given = item["input"]
    return InitErrorDetails(type=kind, loc=place, input=given, ctx=item.get("ctx", {}))


#: Fields that make sense beside a budget alone, and beside a threshold alone.
_OF_BUDGETS = ("budget", "layer_budgets")
_OF_THRESHOLDS = ("threshold", "layer_thresholds", "threshold_scale", "soft_skip")


class SkipPolicy(BaseModel):
    """What may be dropped, by step and layer; dense steps, forced tiles and walking order.

    Immutable and hashable; compared by value; one object serves any number of
    :class:`~liteattention_rocm.LiteAttention` objects. Steps count from 0. Numbers may be of any
    real or integer type (numpy's too) except bool; JSON may write infinities as strings.

    A policy has exactly one of ``budget`` (tiles are weighed, the default) and ``threshold`` (tiles
    are voted on, which replaces the default budget): docs/budget.md says which to choose.

    Attributes:
        threshold: log2 units of the scaled scores, <= 0; ``-inf`` keeps every tile. A tuple is
            indexed by step and its last value repeats. None with a budget.
        budget: share of a q block's softmax mass that one step may drop of what is left, from 0
            (keeps every tile) to below 1: a mean over the rows, but a tile with more than a quarter
            of any single row stays. A tuple is indexed by step like thresholds. None with a
            threshold. See :mod:`liteattention_rocm.lite.budget`.
        threshold_scale: "absolute", or "length": the effective threshold is
            ``threshold - log2(kv_len)``, which bounds the mass that skips can drop however many
            keys there are (dropped mass can reach keys * 2^threshold relative to a row's peak).
        layer_thresholds: fnmatch pattern on the layer name -> threshold in log2 units, or a tuple
            of them by step, replacing ``threshold`` at every step; the first pattern that matches
            wins.
        layer_budgets: the same for budgets; a tuple has a budget for each query head of the model,
            and a tuple of such tuples is indexed by step, where its last one repeats.
        warmup_steps: steps [0, warmup_steps) are dense.
        last_step: last step that may skip, inclusive; later ones are dense. A negative value
            counts from the end (-1 is the last step) and needs ``num_steps``. None: no limit.
        retest_every: every N-th LiteAttention step of a state walks the full list again, so that
            tiles which stopped being negligible come back. None: skips only grow.
        branches: "separate" keeps one list per classifier-free-guidance branch; "shared" lets all
            branches of a step read one list and joins (ORs) what they write.
        must_do: token ranges [start, end) over keys, ascending and disjoint, whose tiles are
            always computed; rounded outward to K blocks.
        must_skip: token ranges whose tiles no step that may skip computes; rounded inward to K
            blocks. Dense steps attend to all keys: leave padding out of k and v.
        soft_skip: drop a negligible tile from the output in the very step that finds it (saves
            work at once, costs accuracy); off, the first step equals dense attention exactly. Not
            with a budget.
        direction: walk the K blocks "ascending", "descending", or "alternate" by step, which
            finds more skips because tiles meet the maximum of either end.
        enabled: False runs plain dense attention and keeps no state.

    Raises:
        pydantic.ValidationError: (a ``ValueError``) listing every field that is wrong, or else
            every contradiction between fields, each with what to do instead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    threshold: _Thresholds | None = None
    budget: _Budgets | None = 0.05
    threshold_scale: Literal["absolute", "length"] = "absolute"
    layer_thresholds: Annotated[
        Mapping[_Pattern, _Thresholds],
        _by_layer("thresholds"),
        PlainSerializer(dict, return_type=dict[str, Any]),
    ] = ByLayer()
    layer_budgets: Annotated[
        Mapping[_Pattern, LayerBudgets],
        _by_layer("budgets"),
        PlainSerializer(dict, return_type=dict[str, Any]),
    ] = ByLayer()
    warmup_steps: Annotated[_Int, Field(ge=0)] = 4
    last_step: _Int | None = None
    retest_every: Annotated[_Int, Field(ge=1)] | None = None
    branches: Literal["separate", "shared"] = "separate"
    must_do: _Ranges = ()
    must_skip: _Ranges = ()
    soft_skip: StrictBool = False
    direction: Literal["alternate", "ascending", "descending"] = "alternate"
    enabled: StrictBool = True

    @model_validator(mode="wrap")
    @classmethod
    def _keep_errors_short(cls, given: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """Name the first few wrong items, and in place of an unknown field those that there are."""
        try:
            return check(given)
        except ValidationError as error:
            raise _brief_error(error, list(cls.model_fields)) from None

    @model_validator(mode="before")
    @classmethod
    def _instead_of_the_default(cls, given: Any) -> Any:
        """A threshold takes the place of the default budget."""
        if isinstance(given, Mapping) and given.get("threshold") is not None:
            return {"budget": None, **given}
        return given

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        reasons = self._limit_reasons() + _overlaps(self.must_do, self.must_skip)
        last = self.last_step
        if last is not None and 0 <= last < self.warmup_steps:
            reasons.append(
                f"last_step {last} lies in the {self.warmup_steps} dense warm-up steps, so nothing "
                "would ever skip: raise last_step, lower warmup_steps, or say enabled=False"
            )
        if reasons:
            raise ValueError("; ".join(reasons))
        return self

    def _limit_reasons(self) -> list[str]:
        if self.threshold is None and self.budget is None:
            return ["give a threshold or a budget: both are None"]
        if self.budget is None:
            if self.layer_budgets:
                return ["layer_budgets need a budget: give one, or use layer_thresholds"]
            return []
        reasons = []
        if self.threshold is not None:
            reasons.append("threshold and budget are two ways to choose tiles: give one of them")
        instead = "" if "budget" in self.model_fields_set else " (give one: it replaces the budget)"
        if self.layer_thresholds:
            reasons.append(
                f"layer_thresholds need a threshold{instead}: with a budget, use layer_budgets"
            )
        if self.threshold_scale != "absolute":
            reasons.append(
                f"threshold_scale needs a threshold{instead}: a budget is a share, whatever the "
                "length"
            )
        if self.soft_skip:
            reasons.append(
                f"soft_skip needs a threshold{instead}: a tile's mass is known only after the step"
            )
        return reasons

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a policy with the fields in ``update`` changed; they are checked like any other.

        A budget replaces the threshold and the other way round, and with it the fields that fit
        the replaced one alone (``layer_thresholds``, ``threshold_scale`` and ``soft_skip``, or
        ``layer_budgets``). ``deep`` changes nothing: nothing in a policy can change.
        """
        if not update:
            return self
        given = {name: getattr(self, name) for name in self.model_fields_set}
        for name, replaced in (("threshold", _OF_BUDGETS), ("budget", _OF_THRESHOLDS)):
            if update.get(name) is not None:
                for other in replaced:
                    given.pop(other, None)
        return type(self).model_validate({**given, **update})

    def threshold_at(
        self, step: int, layer: str, kv_len: int, num_steps: int | None = None
    ) -> float | None:
        """Return the effective threshold (log2 units) of a step, or None if it is to be dense.

        It is -inf if the policy has a budget. ``kv_len`` is the number of keys. Raises
        ``ValueError`` for a negative step, a step at or past ``num_steps``, fewer than one key, or
        a negative ``last_step`` without ``num_steps``.
        """
        limit = self._limit_at(step, layer, kv_len, num_steps)
        return None if limit is None else limit.threshold

    def budget_at(
        self, step: int, layer: str, num_steps: int | None = None
    ) -> float | tuple[float, ...] | None:
        """Return the budget (share of mass) of a step, or None if it is to be dense.

        It is 0 if the policy has a threshold, and a tuple if heads have budgets of their own.
        Raises as :meth:`threshold_at`.
        """
        limit = self._limit_at(step, layer, 1, num_steps)
        return None if limit is None else limit.heads or limit.budget

    @property
    def by_head(self) -> bool:
        """Whether the heads of any layer have budgets of their own."""
        return any(isinstance(value, tuple) for value in self.layer_budgets.values())

    def _limit_at(self, step: int, layer: str, kv_len: int, num_steps: int | None) -> Limit | None:
        if not self.enabled:
            return None
        return self.schedule(layer, kv_len, num_steps, step).limit(step)

    def schedule(self, layer: str, kv_len: int, num_steps: int | None, step: int) -> Schedule:
        """Return the schedule of a layer over ``kv_len`` keys; raises as :meth:`threshold_at`."""
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
            raise ValueError("cannot tell what to skip: " + "; ".join(reasons))
        if last is not None and last < 0 and num_steps is not None:
            last += num_steps
        limits: tuple[Limit, ...]
        if self.budget is None:
            less = math.log2(kv_len) if self.threshold_scale == "length" else 0.0
            thresholds = _of_layer(self.threshold, cast(ByLayer, self.layer_thresholds), layer)
            limits = tuple([Limit(value - less, 0.0) for value in thresholds])
        else:
            own = cast(ByLayer, self.layer_budgets).first_match(layer)
            if isinstance(own, tuple):
                by_step = own if isinstance(own[0], tuple) else (own,)
                limits = tuple([Limit(-math.inf, max(heads), heads) for heads in by_step])
            else:
                budgets = _of_layer(self.budget, cast(ByLayer, self.layer_budgets), layer)
                limits = tuple([Limit(-math.inf, value) for value in budgets])
        return Schedule(
            self.warmup_steps,
            math.inf if last is None else last,
            math.inf if num_steps is None else num_steps,
            limits,
            (self.direction == "descending", self.direction != "ascending"),
            self.retest_every or 0,
        )

    def nothing_skips(self, num_steps: int | None = None) -> str:
        """Say why no step can leave a tile out, and what to change.

        Without ``num_steps`` only what holds for every number of steps counts. "" if a step can, or
        if the policy is not ``enabled``. Numbers that drop nothing, such as a threshold of -inf,
        are taken as meant.
        """
        first, last, end = self.warmup_steps, self.last_step, num_steps
        if last is not None and last < 0:
            last = None if end is None else end + last
        final = min(math.inf if last is None else last, math.inf if end is None else end - 1)
        at_once = self.soft_skip or bool(self.must_skip)
        cures = []
        if final < first or (final == first and not at_once):
            named = {"warmup_steps": first or None, "last_step": self.last_step, "num_steps": end}
            given = [f"{name} {value}" for name, value in named.items() if value is not None]
            why = (
                f"with {', '.join(given)} it has {'no' if final < first else 'a single'} step, and "
                "skipping takes two (one finds negligible tiles, the next leaves them out)"
            )
            cures += ["lower warmup_steps"] if first else []
            cures += ["raise last_step"] if self.last_step is not None else []
            cures += ["run more steps"] if end is not None else []
        elif self.retest_every == 1 and not at_once:
            why = "with retest_every 1 it walks the full list in every step"
            cures = ["raise retest_every"]
        if not self.enabled or not cures:
            return ""
        if self.budget is None and final >= first:
            cures.append("set soft_skip=True")
        return f"{why}: {', '.join(cures)}, or say enabled=False for dense attention"

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
                mask = bitmap.token_ranges_to_blocks(
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
            masks.append(bitmap.pack(mask) if bool(mask.any()) else None)
        if reasons:
            raise ValueError("policy does not fit this request: " + "; ".join(reasons))
        return masks[0], masks[1]


def _plain(annotation: Any) -> Any:
    """A type without the validators that its parts are annotated with."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plain(parts[0])
    if origin in (None, Literal):
        return annotation
    parts = tuple(part if part is ... else _plain(part) for part in parts)
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, parts)
    return origin[parts]


# Pydantic's own shows how each field is validated, a screen of it.
SkipPolicy.__signature__ = inspect.Signature(
    [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_plain(field.annotation),
        )
        for name, field in SkipPolicy.model_fields.items()
    ]
)


def _of_layer(
    by_step: float | tuple[float, ...] | None, by_layer: ByLayer, layer: str
) -> tuple[float, ...]:
    """The numbers of a layer by step: of the first pattern that matches its name, or of all."""
    own = by_layer.first_match(layer)
    by_step = by_step if own is None else own
    return by_step if isinstance(by_step, tuple) else (cast(float, by_step),)


def _overlaps(must_do: Ranges, must_skip: Ranges) -> list[str]:
    """What is wrong with ranges, both ascending and disjoint, that hold the same keys."""
    found, i, j = [], 0, 0
    while i < len(must_do) and j < len(must_skip):
        do, skip = must_do[i], must_skip[j]
        start, end = max(do[0], skip[0]), min(do[1], skip[1])
        if start < end:
            found.append(
                f"must_skip [{skip[0]}, {skip[1]}) overlaps must_do [{do[0]}, {do[1]}): a key "
                f"cannot be both, take tokens [{start}, {end}) out of one of them"
            )
        if do[1] <= skip[1]:
            i += 1
        else:
            j += 1
    return [first_few(found)] if found else []
