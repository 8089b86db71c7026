"""What a video request may skip, from the server's defaults and its own options; without SGLang."""

from __future__ import annotations

import json
from typing import Any

import pytest

from liteattention_rocm import SkipPolicy
from liteattention_sglang.policies import POLICY_VARIABLE, request_policy, server_policy


def test_a_request_takes_a_budget_where_the_server_has_a_threshold_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, '{"threshold": -4, "warmup_steps": 4}')
    votes = server_policy({"branches": "shared"})
    own = request_policy({"liteattention": {"budget": 0.05}}, votes)
    assert own == SkipPolicy(budget=0.05, warmup_steps=4, branches="shared")
    weighs = server_policy({"budget": [0.0, 0.05]})
    assert weighs == SkipPolicy(budget=(0.0, 0.05), warmup_steps=4)
    assert request_policy({"liteattention": {"threshold": "-inf"}}, weighs).budget is None
    assert request_policy({"liteattention": {"warmup_steps": 0}}, weighs).budget == (0.0, 0.05)
    assert request_policy(None, weighs) is weighs
    whole = weighs.model_dump(mode="json")  # all fields, as the suite sends them
    assert request_policy({"liteattention": whole}, votes) == weighs
    assert request_policy({"liteattention": False}, weighs).enabled is False


def test_the_default_is_the_recommended_policy() -> None:
    assert server_policy(None) == SkipPolicy(budget=0.05, warmup_steps=4)
    own = request_policy({"liteattention": {"threshold": -4}}, server_policy(None))
    assert own == SkipPolicy(threshold=-4, warmup_steps=4) and own.budget is None


#: All that fits a threshold alone, and all that fits a budget alone, beside what fits both.
VOTES = {
    "threshold": -6,
    "threshold_scale": "length",
    "layer_thresholds": {"blocks.0.*": -10},
    "soft_skip": True,
    "warmup_steps": 4,
}
WEIGHS = {"budget": 0.1, "layer_budgets": {"blocks.0.*": 0.01}, "warmup_steps": 4}


@pytest.mark.parametrize(
    ("server", "options", "wanted"),
    [
        (VOTES, {"budget": 0.05}, {"budget": 0.05, "warmup_steps": 4}),
        (WEIGHS, {"threshold": -3}, {"threshold": -3, "warmup_steps": 4}),
        # What the request itself names, stays ...
        (
            VOTES,
            {"budget": 0.05, "layer_budgets": {"a": 0.1}},
            {"budget": 0.05, "layer_budgets": {"a": 0.1}, "warmup_steps": 4},
        ),
        # ... and so does everything where the kind of limit does.
        (VOTES, {"threshold": -3}, {**VOTES, "threshold": -3}),
        (WEIGHS, {"budget": 0.2}, {**WEIGHS, "budget": 0.2}),
        (VOTES, {"warmup_steps": 1}, {**VOTES, "warmup_steps": 1}),
    ],
)
def test_one_kind_of_limit_replaces_the_other_with_all_that_fits_it_alone(
    server: dict[str, Any], options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    found = request_policy({"liteattention": options}, server_policy(server))
    assert found == SkipPolicy(**wanted)


def test_only_what_the_request_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"budget": 0.1, "soft_skip": True}
    with pytest.raises(ValueError, match="soft_skip") as error:
        request_policy({"liteattention": options}, server_policy(VOTES))
    assert str(error.value) == (
        "diffusers_kwargs['liteattention']: soft_skip needs a threshold: a tile's mass is known "
        "only after the step"
    )
    with pytest.raises(ValueError, match="budget") as error:
        request_policy({"liteattention": {"budget": 5, "last_step": "x"}}, server_policy(None))
    assert str(error.value).startswith("diffusers_kwargs['liteattention']: budget: a budget")
    assert "; last_step: " in str(error.value)
    # Places of the server replace each other in the same way.
    monkeypatch.setenv(POLICY_VARIABLE, json.dumps(VOTES))
    assert server_policy(WEIGHS) == SkipPolicy(**WEIGHS)


def test_a_request_takes_budgets_by_step_and_head() -> None:
    steps = [[0, 0.5], [0.1, 0.5]]
    options = {"budget": 0, "layer_budgets": {"blocks.0.*": steps}, "warmup_steps": 1}
    own = request_policy({"liteattention": options}, server_policy(None))
    assert own.layer_budgets == {"blocks.0.*": ((0.0, 0.5), (0.1, 0.5))}
    whole = own.model_dump(mode="json")
    assert request_policy({"liteattention": whole}, server_policy({"budget": 0.2})) == own


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"budget": 5}, ["budget: a budget is", "did you mean 0.05"]),
        ({"budget": 0.1, "threshold": -3}, ["two ways to choose tiles"]),
        ({"budget": 0.1, "soft_skip": True}, ["soft_skip needs a threshold"]),
        ({"threshold": -6, "layer_budgets": {"a": 0.1}}, ["layer_budgets need a budget"]),
        ({"layer_thresholds": {"a": -1}}, ["layer_thresholds need a threshold (give one: it rep"]),
        ({"threshold": "-4", "warmup_steps": "4"}, ["threshold: write", "warmup_steps: write"]),
        (
            {"budget": 0, "layer_budgets": {"a": [[0.1], [0.1, 0.2]], "b": [0.1, [0.1]]}},
            ["layer_budgets.a: ", "1 or 2 budgets by head", "give (0.1, ...) for 0.1"],
        ),
    ],
)
def test_budgets_that_make_no_sense_are_refused(options: object, reasons: list[str]) -> None:
    with pytest.raises(ValueError, match="liteattention") as error:
        request_policy({"liteattention": options}, server_policy(None))
    for reason in reasons:
        assert reason in str(error.value)
