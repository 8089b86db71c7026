"""SkipPolicy: what it decides at each step, and one error that lists everything wrong with it."""

from __future__ import annotations

import copy
import fnmatch
import inspect
import json
import math
import pickle
import pydoc
import time

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from liteattention_rocm import SkipPolicy
from liteattention_rocm.lite import bitmap

INF = math.inf


def reasons(**fields: object) -> str:
    with pytest.raises(ValidationError) as caught:
        SkipPolicy(**fields)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_defaults() -> None:
    """The setting that the documentation recommends: a budget of 0.05 after four dense steps."""
    policy = SkipPolicy()
    assert [policy.budget_at(step, "any") for step in (0, 3, 4, 49)] == [None, None, 0.05, 0.05]
    assert policy.threshold is None and policy.warmup_steps == 4
    assert policy == SkipPolicy(budget=0.05, warmup_steps=4)
    assert_twins_are_equal(policy)
    assert policy.key_masks(4096, 64) == (None, None)
    assert not policy.soft_skip and policy.direction == "alternate" and policy.enabled


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threshold": 2.0}, "threshold\n  Value error, thresholds are in log2 units and <= 0"),
        ({"threshold": 2.0}, "did you mean -2?"),
        ({"threshold": 10**400}, "did you mean -inf?"),
        ({"threshold": math.nan}, "cannot be NaN: use -inf to keep every tile"),
        ({"threshold": True}, "valid number [type=float_type, input_value=True"),
        ({"threshold": "low"}, "valid number [type=float_type, input_value='low'"),
        ({"threshold": ()}, "threshold\n  Value error, give at least one number"),
        ({"threshold": (-1.0, 3.0)}, "threshold.1\n"),
        ({"threshold": (-1.0, None)}, "threshold.1\n  Input should be a valid number"),
        ({"budget": None}, "give a threshold or a budget"),
        ({"threshold": "-4"}, "threshold\n  Value error, write the number without quotes, got"),
        ({"threshold": (-3, "1e999")}, "write the number without quotes, got '1e999'"),
        ({"budget": "0.1"}, "write the number without quotes"),
        ({"budget": 1.0}, "to below 1: 1 would drop everything, start with 0.05"),
        ({"budget": -0.1}, "from 0 (keeps every tile) to below 1"),
        ({"budget": math.nan}, "from 0 (keeps every tile) to below 1"),
        ({"budget": True}, "valid number [type=float_type, input_value=True"),
        ({"budget": 3}, "budget\n  Value error, a budget is"),
        ({"budget": (0.1, 3)}, "budget.1\n"),
        ({"budget": (3,)}, "1 validation error for"),
        ({"budget": 0.1, "threshold": -6.0}, "threshold and budget are two ways"),
        ({"budget": 0.1, "soft_skip": True}, "soft_skip needs a threshold"),
        ({"budget": 0.1, "threshold_scale": "length"}, "threshold_scale needs a threshold: a"),
        ({"soft_skip": True}, "soft_skip needs a threshold (give one: it replaces the budget): a"),
        ({"layer_thresholds": {"a": -1}}, "layer_thresholds need a threshold (give one: it"),
        ({"budget": 0.1, "layer_thresholds": {"a": -1}}, "with a budget, use layer_budgets"),
        ({"threshold": -6, "layer_budgets": {"a": 0.1}}, "layer_budgets need a budget"),
        ({"budget": 0.1, "layer_budgets": {"a*": 5.0}}, "layer_budgets.a*\n"),
        ({"budget": 0.1, "layer_budgets": {"a*": (0.1, 5)}}, "layer_budgets.a*.1\n"),
        ({"budget": 0.1, "layer_budgets": {"a*": []}}, "a*\n  Value error, give at least one"),
        ({"budget": 0.1, "layer_budgets": {"a*": [[]]}}, "layer_budgets.a*.0\n"),
        ({"budget": 0.1, "layer_budgets": {"a*": [[0.1], [5]]}}, "layer_budgets.a*.1.0\n"),
        ({"budget": 0.1, "layer_budgets": {"a*": [0.1, [0.2, 0.3]]}}, "give (0.1, ...) for 0.1"),
        (
            {"budget": 0.1, "layer_budgets": {"a*": [[0.1], [0, 0.2], [0, 0]]}},
            "steps have 1 or 2 budgets by head: give each step one for every query head",
        ),
        ({"threshold": -6, "layer_thresholds": {"a*": (-1, 2.0)}}, "layer_thresholds.a*.1\n"),
        ({"threshold_scale": "log"}, "'absolute' or 'length'"),
        ({"layer_thresholds": [-1.0]}, "valid dictionary"),
        ({"layer_thresholds": {"": -1.0}}, "at least 1 character"),
        ({"layer_thresholds": {"a*": 1.0}}, "layer_thresholds.a*\n"),
        ({"warmup_steps": -1}, "greater than or equal to 0"),
        ({"warmup_steps": 1.5}, "valid integer"),
        ({"warmup_steps": True}, "valid integer"),
        ({"last_step": "9"}, "last_step\n  Value error, write the number without quotes, got '9'"),
        ({"last_step": "end"}, "valid integer"),
        ({"last_step": 2**63}, "-(2^63 - 1) and 2^63 - 1, got 9223372036854775808"),
        ({"must_do": [(0, 10**5000)]}, "got an integer of 16610 bits"),
        ({"warmup_steps": 4, "last_step": 3}, "so nothing would ever skip: raise last_step"),
        ({"retest_every": 0}, "greater than or equal to 1"),
        ({"branches": "both"}, "'separate' or 'shared'"),
        ({"soft_skip": 1}, "valid boolean"),
        ({"direction": "up"}, "'alternate', 'ascending' or 'descending'"),
        ({"enabled": "yes"}, "valid boolean"),
        ({"must_do": 5}, "valid tuple"),
        ({"must_do": [(0, 1, 2)]}, "at most 2 items"),
        ({"must_do": [(0, 1.0)]}, "must_do.0.1\n  Input should be a valid integer"),
        ({"must_do": [(9, 3)]}, "[9, 3) is descending: write it as (3, 9)"),
        ({"must_skip": [(4, 4)]}, "[4, 4) is empty: remove it"),
        ({"must_skip": [(-4, 4)]}, "starts before key 0"),
        ({"must_do": [(8, 9), (0, 4)]}, "sort the ranges and merge those that overlap"),
        ({"must_do": [(0, 9), (8, 12)]}, "starts before the end of range 0 [0, 9)"),
        (
            {"must_do": [(0, 64)], "must_skip": [(60, 80)]},
            "must_skip [60, 80) overlaps must_do [0, 64): a key cannot be both, take tokens "
            "[60, 64) out of one of them",
        ),
        (
            {"treshold": -3.0},
            "treshold\n  a policy has no such field (did you mean threshold or threshold_scale?): "
            "its fields are threshold, budget, ",
        ),
        ({"start": 3}, "start\n  a policy has no such field: its fields are threshold, "),
    ],
)
def test_every_reason(fields: dict[str, object], message: str) -> None:
    assert message in reasons(**fields)


def test_one_error_lists_all_reasons() -> None:
    text = reasons(threshold=1.0, retest_every=0, must_do=[(5, 3)], warmup_steps=-3, extra=2)
    assert text.startswith("5 validation errors for SkipPolicy")
    for part in ("threshold", "retest_every", "[5, 3) is desc", "warmup_steps", "extra"):
        assert part in text
    numbers = reasons(threshold=["a"] * 40, must_do=[[-1, 5]] * 40, retest_every=0)
    assert numbers.startswith("7 validation errors") and "and 36 more wrong items" in numbers
    for part in ("threshold.0\n", "must_do\n", "; and 75 more", "retest_every\n"):
        assert part in numbers  # no field hides another
    text = reasons(must_do=[(0, 9)], must_skip=[(4, 12)], warmup_steps=3, last_step=1)
    assert "must_skip [4, 12) overlaps must_do [0, 9)" in text and "last_step 1 lies" in text


def test_unknown_fields_are_named_wherever_they_come_from() -> None:
    """Beside all else that is wrong, by what type and with what value."""
    given = {"layer_threshold": {"a": -1}, "threshold": 1.0, "direction": "up"}
    for make in (
        lambda: SkipPolicy(**given),  # type: ignore[arg-type]
        lambda: SkipPolicy.model_validate_json(json.dumps(given)),
        lambda: SkipPolicy().model_copy(update=given),
    ):
        with pytest.raises(ValidationError) as caught:
            make()
        errors = caught.value.errors()
        assert [error["loc"] for error in errors] == [
            ("threshold",), ("direction",), ("layer_threshold",),
        ]  # fmt: skip
        assert [error["type"] for error in errors] == [
            "value_error", "literal_error", "unknown_field",
        ]  # fmt: skip
        assert "did you mean -1?" in errors[0]["msg"] and "'ascending'" in errors[1]["msg"]
        assert "(did you mean layer_thresholds" in errors[2]["msg"]
        assert errors[2]["input"] == {"a": -1}


def test_numbers_of_every_kind_are_taken() -> None:
    policy = SkipPolicy(
        threshold=np.float32(-2.5),
        layer_thresholds={"a": np.int64(-3), "b": -(10**5000)},
        warmup_steps=np.int32(2),
        must_do=[(np.int64(0), np.uint8(9))],
    )
    plain = SkipPolicy(
        threshold=-2.5, layer_thresholds={"a": -3.0, "b": -INF}, warmup_steps=2, must_do=[(0, 9)]
    )
    assert policy == plain and policy.model_dump_json() == plain.model_dump_json()
    assert SkipPolicy(threshold=[np.float64(-1), -2]).threshold == (-1.0, -2.0)


def test_immutable_hashable_and_comparable() -> None:
    policy = SkipPolicy(threshold=[-8, -6], layer_thresholds={"a.*": -3})
    same = SkipPolicy(threshold=(-8.0, -6.0), layer_thresholds={"a.*": -3.0})
    assert policy == same and hash(policy) == hash(same) and {policy: 1}[same] == 1
    with pytest.raises(ValidationError, match="frozen"):
        policy.threshold = -1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="does not support item assignment"):
        policy.layer_thresholds["a.*"] = -9.0  # type: ignore[index]
    assert policy.layer_thresholds == {"a.*": -3.0} and policy.layer_thresholds["a.*"] == -3.0


def test_the_order_of_patterns_is_part_of_the_value() -> None:
    one = SkipPolicy(threshold=-6.0, layer_thresholds={"a*": -3.0, "*": -4.0})
    other = SkipPolicy(threshold=-6.0, layer_thresholds={"*": -4.0, "a*": -3.0})
    assert one.threshold_at(4, "ab", 8) != other.threshold_at(4, "ab", 8)
    assert one != other


def test_copies_and_pickles_are_equal() -> None:
    policy = SkipPolicy(threshold=(-INF, -6.0), layer_thresholds={"a": -INF}, must_do=[(0, 4)])
    for twin in (copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert twin == policy and hash(twin) == hash(policy)


def test_a_changed_copy_is_checked_like_a_new_policy() -> None:
    policy = SkipPolicy(threshold=-4.0, warmup_steps=2)
    changed = policy.model_copy(update={"layer_thresholds": {"a": -1}, "last_step": 5})
    assert changed == SkipPolicy(
        threshold=-4.0, warmup_steps=2, layer_thresholds={"a": -1.0}, last_step=5
    )
    assert isinstance(hash(changed), int) and policy.model_copy() == policy
    with pytest.raises(ValidationError, match="did you mean -1"):
        policy.model_copy(update={"threshold": 1.0})
    with pytest.raises(ValidationError, match="so nothing would ever skip"):
        policy.model_copy(update={"last_step": 0})


def test_a_budget_takes_the_place_of_the_threshold_and_back() -> None:
    voted = SkipPolicy(threshold=-4.0, warmup_steps=2)
    weighed = voted.model_copy(update={"budget": 0.1})
    assert weighed == SkipPolicy(budget=0.1, warmup_steps=2) and weighed.threshold is None
    assert weighed.model_copy(update={"threshold": -4.0}) == voted
    assert weighed.model_copy(update={"last_step": 9}).budget == 0.1
    with pytest.raises(ValidationError, match="two ways to choose tiles"):
        voted.model_copy(update={"threshold": -3.0, "budget": 0.1})
    for twin in (
        copy.deepcopy(weighed),
        pickle.loads(pickle.dumps(weighed)),
        SkipPolicy.model_validate_json(weighed.model_dump_json()),
        SkipPolicy(**weighed.model_dump()),
    ):
        assert twin == weighed and hash(twin) == hash(weighed)
        assert twin.model_copy(update={"budget": 0.2}).budget == 0.2


def test_budget_by_step_and_layer() -> None:
    policy = SkipPolicy(
        budget=[0, 0.01, 0.05], layer_budgets={"*.0": 0.5}, last_step=-2, warmup_steps=0
    )
    assert [policy.budget_at(s, "x", 6) for s in range(6)] == [0.0, 0.01, 0.05, 0.05, 0.05, None]
    assert policy.budget_at(0, "blocks.0", 6) == 0.5
    assert policy.threshold_at(1, "x", 64, 6) == -INF
    assert (
        SkipPolicy(threshold=-6.0).budget_at(4, "x") == 0.0
        and SkipPolicy(enabled=False).budget_at(0, "x") is None
    )


def assert_twins_are_equal(policy: SkipPolicy) -> None:
    for twin in (
        SkipPolicy.model_validate_json(policy.model_dump_json()),
        SkipPolicy(**json.loads(policy.model_dump_json())),
        SkipPolicy(**policy.model_dump()),
        pickle.loads(pickle.dumps(policy)),
        copy.deepcopy(policy),
    ):
        assert twin == policy and hash(twin) == hash(policy)


def test_budgets_by_head() -> None:
    policy = SkipPolicy(budget=0.2, layer_budgets={"a": [0.3, 0, 0.1], "b*": 0.5}, warmup_steps=1)
    assert policy.budget_at(0, "a") is None
    assert policy.budget_at(1, "a") == (0.3, 0.0, 0.1) and policy.budget_at(1, "b1") == 0.5
    assert policy.by_head and not SkipPolicy(budget=0.2, layer_budgets={"b*": 0.5}).by_head
    assert_twins_are_equal(policy)

    schedule = policy.schedule("a", 64, None, 1)
    assert schedule.of_heads("a", 3, None).limits == ((-INF, 0.3, (0.3, 0.0, 0.1)),)
    assert schedule.of_heads("a", 2, (2, 1)).limits == ((-INF, 0.3, (0.1, 0.0)),)
    for count, heads in ((2, None), (4, None), (3, (0, 1)), (2, (1, 3)), (1, (-1,))):
        with pytest.raises(ValueError, match=f"'a' has 3 budgets by head.* {count} query heads"):
            schedule.of_heads("a", count, heads)
    other = policy.schedule("b1", 64, None, 1)
    assert other.of_heads("b1", 7, None) == other


def test_budgets_by_step_and_head() -> None:
    """The steps count from 0, dense ones too; the last budgets stay."""
    steps = ((0, 0.5, 0), (0, 0.5, 0), [0.1, 0.5, 0])
    policy = SkipPolicy(budget=0.2, layer_budgets={"a": steps}, warmup_steps=1, last_step=-2)
    assert [policy.budget_at(step, "a", 6) for step in range(6)] == [
        None, (0.0, 0.5, 0.0), *3 * [(0.1, 0.5, 0.0)], None,
    ]  # fmt: skip
    assert policy.budget_at(1, "b", 6) == 0.2 and policy.by_head
    assert_twins_are_equal(policy)
    assert policy != policy.model_copy(update={"layer_budgets": {"a": steps[:2]}})
    assert policy.model_copy(update={"warmup_steps": 0}).budget_at(0, "a", 6) == (0.0, 0.5, 0.0)

    schedule = policy.schedule("a", 64, 6, 1)
    assert schedule.of_heads("a", 2, (2, 0)).limits == (
        (-INF, 0.5, (0.0, 0.0)), (-INF, 0.5, (0.0, 0.0)), (-INF, 0.5, (0.0, 0.1)),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"'a' has 3 budgets by head.* 2 query heads"):
        schedule.of_heads("a", 2, None)


def test_json_round_trip_keeps_infinity() -> None:
    policy = SkipPolicy(
        threshold=(-INF, -6.0), layer_thresholds={"a": -INF}, must_skip=[(0, 64)], last_step=-2
    )
    text = policy.model_dump_json()
    assert SkipPolicy.model_validate_json(text) == policy
    assert SkipPolicy(**json.loads(text)) == policy


def test_threshold_by_step_repeats_its_last_value() -> None:
    policy = SkipPolicy(threshold=(-10.0, -8.0, -6.0), warmup_steps=0)
    assert [policy.threshold_at(s, "x", 64) for s in range(5)] == [-10, -8, -6, -6, -6]


def test_threshold_scaled_with_length() -> None:
    policy = SkipPolicy(threshold=-3.0, threshold_scale="length", warmup_steps=0)
    assert policy.threshold_at(0, "x", 4096) == -15.0
    assert policy.threshold_at(0, "x", 1) == -3.0
    assert (
        SkipPolicy(threshold=-INF, threshold_scale="length", warmup_steps=0).threshold_at(0, "x", 8)
        == -INF
    )


def test_first_matching_layer_pattern_wins_and_is_scaled_too() -> None:
    policy = SkipPolicy(
        threshold=(-9.0, -6.0),
        threshold_scale="length",
        layer_thresholds={"blocks.0.*": -4.0, "blocks.*": -5.0},
        warmup_steps=0,
    )
    assert policy.threshold_at(0, "blocks.0.attn1", 16) == -8.0
    assert policy.threshold_at(1, "blocks.7.attn1", 16) == -9.0
    assert policy.threshold_at(1, "head", 16) == -10.0
    assert policy.threshold_at(0, "BLOCKS.0.attn1", 16) == -13.0  # names are case sensitive


def test_warmup_and_last_step_are_dense_outside() -> None:
    policy = SkipPolicy(warmup_steps=2, last_step=4)
    lite = [s for s in range(8) if policy.threshold_at(s, "x", 64) is not None]
    assert lite == [2, 3, 4]
    from_end = SkipPolicy(last_step=-2, warmup_steps=0)
    lite = [s for s in range(8) if from_end.threshold_at(s, "x", 64, num_steps=8) is not None]
    assert lite == list(range(7))


def test_switched_off_is_always_dense() -> None:
    assert SkipPolicy(enabled=False).threshold_at(-5, "x", 0) is None


def test_threshold_at_lists_every_reason() -> None:
    with pytest.raises(ValueError) as caught:
        SkipPolicy(last_step=-1).threshold_at(-1, "x", 0)
    for part in ("step must be >= 0", "kv_len must be >= 1", "give num_steps, or use a last_step"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="step 8 is not one of num_steps 8"):
        SkipPolicy().threshold_at(8, "x", 4, num_steps=8)


def test_direction_and_retest() -> None:
    by_parity = {"alternate": (False, True), "ascending": (False,) * 2, "descending": (True,) * 2}
    for direction, expected in by_parity.items():
        made = SkipPolicy(direction=direction).schedule("x", 64, None, 0)
        assert made.descending == expected and made.retest_every == 0
    assert SkipPolicy(retest_every=3).schedule("x", 64, None, 0).retest_every == 3


def blocks(mask: torch.Tensor | None, k_blocks: int) -> list[int]:
    if mask is None:
        return []
    return bitmap.unpack(mask, k_blocks).nonzero().flatten().tolist()


def test_must_do_rounds_outward_and_must_skip_inward() -> None:
    policy = SkipPolicy(must_do=[(0, 1), (130, 193)], must_skip=[(200, 450), (450, 512)])
    do, skip = policy.key_masks(1000, 64)
    assert blocks(do, 16) == [0, 2, 3]
    assert blocks(skip, 16) == [4, 5, 6, 7]  # two ranges that touch cover block 7 together


def test_short_last_block_is_skipped_when_its_keys_are() -> None:
    assert blocks(SkipPolicy(must_skip=[(128, 150)]).key_masks(150, 64)[1], 3) == [2]
    assert blocks(SkipPolicy(must_skip=[(128, 149)]).key_masks(150, 64)[1], 3) == []


def test_masks_lie_in_words() -> None:
    do, skip = SkipPolicy(must_do=[(31 * 64, 33 * 64)]).key_masks(40 * 64, 64)
    assert do is not None and do.dtype == torch.int32 and do.tolist() == [-(2**31), 1]
    assert skip is None


def test_ranges_that_do_not_fit_the_keys() -> None:
    policy = SkipPolicy(must_do=[(0, 300)], must_skip=[(400, 500)])
    with pytest.raises(ValueError) as caught:
        policy.key_masks(256, 64)
    text = str(caught.value)
    assert "must_do: invalid token ranges: range 0 [0, 300) ends past the 256 keys: clip it" in text
    assert "must_skip: invalid token ranges: range 0 [400, 500) ends past" in text


def test_must_skip_of_everything() -> None:
    policy = SkipPolicy(must_skip=[(0, 100), (100, 256)])
    with pytest.raises(ValueError, match="covers all 256 keys, so that nothing is left"):
        policy.key_masks(256, 64)
    assert blocks(policy.key_masks(257, 64)[1], 5) == [0, 1, 2, 3]


def test_what_is_large_takes_a_time_in_proportion() -> None:
    """Twice 10,000 ranges, 8,000 patterns: quadratic code takes many seconds."""
    ranges = [(2 * i, 2 * i + 1) for i in range(10_000)]
    patterns = {f"blocks.{i}.*": 0.1 for i in range(8000)}
    begin = time.process_time()
    text = reasons(must_do=ranges, must_skip=[*ranges[:-1], (19_999, 20_000)])
    assert "must_skip [0, 1) overlaps must_do [0, 1)" in text and "and 9,995 more" in text
    many = SkipPolicy(budget=0.2, layer_budgets=patterns, must_do=ranges)
    assert many.budget_at(4, "blocks.7999.a") == 0.1 and many.budget_at(4, "x") == 0.2
    for _ in range(20):
        many.budget_at(4, "blocks.7999.a")
    assert blocks(many.key_masks(20_000, 64)[0], 313) == list(range(313))
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    ("pattern", "layer", "matches"),
    [
        ("blocks.1.attn1", "blocks.1.attn1", True),
        ("blocks.1.attn1", "blocks.1.attn10", False),
        ("blocks.[1-3].*", "blocks.2.attn1", True),
        ("blocks.[!2].*", "blocks.2.attn1", False),
        ("block?.*", "blocks.2", True),
        ("*a" * 1000 + "b", "a" * 3000, False),
        ("[z-a]*", "a", False),
    ],
)
def test_patterns_match_whole_names_as_fnmatch_does(
    pattern: str, layer: str, matches: bool
) -> None:
    policy = SkipPolicy(budget=0.2, layer_budgets={pattern: 0.1})
    assert (policy.budget_at(4, layer) == 0.1) is matches is fnmatch.fnmatchcase(layer, pattern)


def test_messages_stay_short_whatever_is_wrong() -> None:
    for fields in (
        {"must_do": [[9, 3]] * 9000, "must_skip": [[-9, -3]] * 9000, "threshold": [3] * 9000},
        {"x" * 9000 + str(i): "y" * 9000 for i in range(90)},
        {"budget": 0.1, "layer_budgets": {"z" * 9000 + str(i): ["a"] * 90 for i in range(90)}},
        {"layer_budgets": {"a": ["b" * 9000, [0.1]]}, "branches": "c" * 9000},
    ):
        text = reasons(**fields)
        assert len(text.encode()) <= 4096, text
    keys = SkipPolicy(must_do=[(64 * i, 64 * i + 1) for i in range(1000)])
    with pytest.raises(ValueError, match="and 996 more") as caught:
        keys.key_masks(0, 64)
    assert len(str(caught.value)) < 1000


def test_patterns_that_name_no_denoiser_are_about_all_of_them() -> None:
    """Those that name one come first, whatever the order."""
    policy = SkipPolicy(
        budget=0.5, layer_budgets={"blocks.0.*": 0.1, "transformer_2.blocks.0.*": 0.2, "*.9": 0.3}
    )
    layers = {
        "blocks.0.a": 0.1, "transformer_2.blocks.0.a": 0.2, "transformer_3.blocks.0.a": 0.1,
        "unet_2.blocks.0.a": 0.1, "transformer_2.blocks.1.a": 0.5, "decoder.blocks.0.a": 0.5,
        "transformer_2.blocks.9": 0.3,
    }  # fmt: skip
    assert {layer: policy.budget_at(4, layer) for layer in layers} == layers


def test_the_signature_is_one_that_people_can_read() -> None:
    text = str(inspect.signature(SkipPolicy))
    for part in (
        "(*, threshold: float | tuple[float, ...] | None = None, budget: float | tuple[float, ...]",
        "| None = 0.05, threshold_scale: Literal['absolute', 'length'] = 'absolute'",
        "layer_budgets: collections.abc.Mapping[str, float | tuple[float, ...] | tuple[tuple[float",
        "warmup_steps: int = 4, last_step: int | None = None, retest_every: int | None = None",
        "must_do: tuple[tuple[int, int], ...] = ()",
        "soft_skip: bool = False",
    ):
        assert part in text, text
    assert len(text) < 900 and "Annotated" not in text
    assert list(inspect.signature(SkipPolicy).parameters) == list(SkipPolicy.model_fields)
    assert text in pydoc.render_doc(SkipPolicy, renderer=pydoc.plaintext)
