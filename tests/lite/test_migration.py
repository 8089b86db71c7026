"""What LiteAttention 0.4.0 has in lists and files, as a policy."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from liteattention_rocm import SkipPolicy
from liteattention_rocm.lite.migration import policy_of_registry, ranges

pytest.importorskip("tomllib")


def test_token_lists_of_every_version() -> None:
    assert ranges([2, 12, 40, 45, 60, 80]) == ((2, 12), (40, 45), (60, 80))
    assert ranges([80, 60, 45, 40, 12, 2]) == ((2, 12), (40, 45), (60, 80))
    assert ranges([]) == () and SkipPolicy(must_skip=ranges([80, 100])).must_skip == ((80, 100),)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([2, 12, 40], "3 numbers are no pairs"),
        ([2, 12, 12, 20], "neither ascend nor descend strictly"),
        ([2, 12, 8, 20], "neither ascend nor descend strictly"),
        ([-2, 12], "negative"),
        ([1.5, True], "1.5 is no token position; True is no token position"),
    ],
)
def test_lists_that_are_accepted_there_and_mean_nothing(tokens: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ranges(tokens)


def write(path: Path, **modules: list[object]) -> Path:
    """A file with a table for each call, as the registry writes it; None: skipping is disabled."""
    lines = []
    for name, calls in modules.items():
        for value in calls:
            kind = "Disabled" if value is None else "Run"
            lines += [f'[["{name}"]]', f'_type = "LiteAttention{kind}Config"']
            lines += [f"threshold = {0.0 if value is None else value}", ""]
    path.write_text("\n".join(lines))
    return path


def test_calibrated_thresholds_by_layer_and_step(tmp_path: Path) -> None:
    modules = {
        "blocks.0.self_attn.attn": [None, -9.0, -7.5, -3.25],
        "blocks.1.self_attn.attn": [None, None, -4.0, -4.0],
        "blocks.2.self_attn.attn": [None, -5, -5, -5],
    }
    policy = policy_of_registry(
        write(tmp_path / "t.toml", **modules),  # type: ignore[arg-type]
        names=lambda name: name.replace(".self_attn.attn", ".attn1"),
        last_step=-2,
    )
    assert policy.warmup_steps == 1 and policy.last_step == -2 and policy.budget is None
    for number, wanted in enumerate(
        [(None, -9.0, -7.5, -3.25), (None, -math.inf, -4.0, -4.0), (None, -5.0, -5.0, -5.0)]
    ):
        layer = f"blocks.{number}.attn1"
        assert tuple(policy.threshold_at(step, layer, 64, 6) for step in range(4)) == wanted
        assert policy.threshold_at(4, layer, 64, 6) == wanted[-1]
    assert policy.threshold_at(3, "blocks.3.attn1", 64, 6) == -10.0
    assert SkipPolicy.model_validate_json(policy.model_dump_json()) == policy


def test_one_table_for_all_calls_and_two_passes_in_a_step(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text('["a.b"]\n_type = "LiteAttentionRunConfig"\nthreshold = -6\n')
    assert policy_of_registry(path) == SkipPolicy(
        threshold=-10, layer_thresholds={"a.b": -6}, warmup_steps=0
    )
    guided = policy_of_registry(write(path, a=[-3, -5, -4, -2]), passes=2)
    assert guided.layer_thresholds == {"a": (-5.0, -4.0)}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = [", "is no TOML file"),
        ("", "there is no module in it"),
        ("a = 3", "'a', call 0: _type is None, not LiteAttentionRunConfig"),
        ('[a]\n_type = "LiteAttentionCalibConfig"', "_type is 'LiteAttentionCalibConfig'"),
        ('[a]\n_type = "LiteAttentionRunConfig"\nthreshold = nan', "threshold nan is no number"),
        ('[a]\n_type = "LiteAttentionRunConfig"\nthreshold = 2', "did you mean -2"),
    ],
)
def test_files_that_give_no_policy(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        policy_of_registry(path)


def test_every_reason_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "t.toml", a=[-3, None, -2], b=[-1, -1, -1])
    with pytest.raises(ValueError, match="gives no policy") as error:
        policy_of_registry(path, names=lambda name: "x", passes=0)
    for reason in ("passes must be", "disabled in step 1, after steps that", "two modules would"):
        assert reason in str(error.value)
    with pytest.raises(ValueError, match="3 calls are not 2 in each step"):
        policy_of_registry(path, passes=2)
    with pytest.raises(OSError, match="missing"):
        policy_of_registry(tmp_path / "missing.toml")
