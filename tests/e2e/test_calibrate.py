"""Budgets by layer: the choice among curves, and the command on a tiny random pipeline."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from liteattention_e2e.calibrate import (
    LEAST_BUDGET,
    Calibration,
    Curve,
    Round,
    Trial,
    choose,
    in_groups,
    predicted_db,
)
from liteattention_rocm import SkipPolicy

PROMPTS = [
    "a red circle moves left on a blue background",
    "a cyan diamond moves up on a gray background",
]


def test_prompts_to_calibrate_with_are_not_those_to_compare_on() -> None:
    folder = Path(__file__).parents[2] / "e2e" / "prompts"
    calibrate, compare = (
        {line for line in (folder / name).read_text().splitlines() if not line.startswith("#")}
        for name in ("shapes-calibrate.txt", "shapes-12.txt")
    )
    assert len(calibrate) == len(compare) == 12
    assert not calibrate & compare


def test_the_policies_kept_for_the_small_model_name_its_layers() -> None:
    e2e = Path(__file__).parents[2] / "e2e"
    depth = json.loads((e2e / "model" / "wan-shapes" / "transformer" / "config.json").read_text())
    kept = [json.loads(file.read_text()) for file in sorted((e2e / "policies").glob("*.json"))]
    for fields in [fields for policies in kept for fields in policies.values()]:
        policy = SkipPolicy(**fields)
        for budgets in policy.layer_budgets.values():
            assert isinstance(budgets, float) or len(budgets) == depth["num_attention_heads"]
        assert list(policy.layer_budgets) == [
            f"blocks.{i}.attn1" for i in range(depth["num_layers"])
        ]


def trial(budget: float, psnr: float, skipped: float) -> Trial:
    return Trial(("layer",), budget, psnr, skipped)


curves = st.builds(
    lambda db, fall, share, rise: Curve(
        [trial(0.03, db, share), trial(0.12, db - fall, share + rise)]
    ),
    st.floats(35, 60), st.floats(0, 15), st.floats(0, 0.5), st.floats(0, 0.4),
)  # fmt: skip


def test_a_curve_goes_through_its_trials_and_on_in_straight_lines() -> None:
    curve = Curve([trial(0.12, 34.0, 0.5), trial(0.03, 40.0, 0.3)])
    assert curve.error(0.03) == pytest.approx(1e-4)
    assert curve.error(0.12) == pytest.approx(10**-3.4)
    assert curve.error(0.06) == pytest.approx(10**-3.7)
    assert curve.error(0.0075) == pytest.approx(10**-4.6)
    assert curve.skipped(0.06) == pytest.approx(0.4)
    assert curve.skipped(0.001) == 0.0
    assert curve.most == 0.12


def test_what_is_there_anyhow_is_counted_once() -> None:
    trials = [trial(0.03, 40.0, 0.3), trial(0.12, 36.0, 0.5)]
    curve = Curve(trials, 4e-5)
    assert curve.error(0.03) == pytest.approx(6e-5)
    assert predicted_db([curve, curve], [0.03, 0.03], 4e-5) == pytest.approx(
        -10 * math.log10(4e-5 + 2 * 6e-5)
    )
    alone = choose([Curve(trials)] * 3, [1] * 3, 35.0)
    above = choose([curve] * 3, [1] * 3, 35.0, 4e-5)
    assert above > alone, "three layers share one floor, so each may lose more"


def test_noise_does_not_make_a_larger_budget_look_better() -> None:
    curve = Curve([trial(0.03, 40.0, 0.3), trial(0.12, 41.0, 0.2)])
    assert curve.error(0.12) == curve.error(0.03) == pytest.approx(1e-4)
    assert curve.skipped(0.12) == curve.skipped(0.03) == pytest.approx(0.3)


def test_a_curve_needs_two_budgets() -> None:
    with pytest.raises(ValueError, match="two budgets"):
        Curve([trial(0.03, 40.0, 0.3), trial(0.03, 41.0, 0.3)])
    with pytest.raises(ValueError, match="one at each"):
        Curve([trial(0.03, 40.0, 0.3), trial(0.03, 41.0, 0.3), trial(0.1, 30.0, 0.4)])


@given(
    st.lists(st.tuples(curves, st.integers(1, 5)), min_size=1, max_size=5),
    st.floats(25, 45),
    st.randoms(use_true_random=False),
)
def test_no_other_budgets_skip_more_with_as_little_error(
    groups: list[tuple[Curve, int]], target: float, rng: random.Random
) -> None:
    listed, sizes = [curve for curve, _ in groups], [size for _, size in groups]
    chosen = choose(listed, sizes, target)
    least = [LEAST_BUDGET] * len(groups)
    if predicted_db(listed, least) >= target:
        assert predicted_db(listed, chosen) >= target

    def skipped(budgets: Any) -> float:
        return sum(size * c.skipped(b) for c, size, b in zip(listed, sizes, budgets, strict=True))

    for _ in range(50):
        other = [math.exp(rng.uniform(math.log(LEAST_BUDGET), math.log(c.most))) for c in listed]
        if predicted_db(listed, other) >= predicted_db(listed, chosen):
            # A step of the grid, 6.8 % of a budget, is 0.02 of a share at most.
            assert skipped(other) <= skipped(chosen) + 0.02 * sum(sizes)


def test_what_costs_nothing_is_taken_whole() -> None:
    free = Curve([trial(0.03, 60.0, 0.3), trial(0.12, 60.0, 0.5)])
    dear = Curve([trial(0.03, 36.0, 0.3), trial(0.12, 30.0, 0.5)])
    budgets = choose([free, dear], [1, 1], 35.0)
    assert budgets[0] == pytest.approx(0.12)
    assert 0.03 < budgets[1] < 0.04


def test_groups_are_neighbours_of_nearly_one_size() -> None:
    layers = [f"blocks.{i}" for i in range(7)]
    assert in_groups(layers, None) == tuple((name,) for name in layers)
    groups = in_groups(layers, 3)
    assert [name for group in groups for name in group] == layers
    assert sorted(map(len, groups)) == [2, 2, 3]
    with pytest.raises(ValueError, match="1 to 7"):
        in_groups(layers, 8)


def test_the_policy_taken_is_the_one_that_skips_most_of_those_good_enough() -> None:
    made = Calibration(2, (("a",), ("b", "c")))
    low = Round(33.0, (0.1, 0.2), 33.0, 32.0, 30.0, 0.6)
    good = Round(34.0, (0.05, 0.1), 34.0, 33.1, 31.0, 0.5)
    better = Round(35.0, (0.04, 0.1), 35.0, 36.0, 31.0, 0.4)
    made.rounds[33.0] = [low, better, good]
    made.rounds[50.0] = [low, better]
    assert made.best(33.0) is good
    assert made.best(50.0) is better
    policy = SkipPolicy(**made.policies()["calibrated 33 dB"])
    assert [policy.budget_at(2, name) for name in "abcd"] == [0.05, 0.1, 0.1, 0.0]
    assert policy.budget_at(1, "a") is None


def test_heads_have_budgets_of_their_own() -> None:
    made = Calibration(1, (("a",), ("b", "c")), heads=2)
    assert made.units == ((("a",), 0), (("a",), 1), (("b", "c"), 0), (("b", "c"), 1))
    policy = made.policy((0.05, 0.1, 0.2, 0.0))
    assert [policy.budget_at(1, name) for name in "abcd"] == [
        (0.05, 0.1), (0.2, 0.0), (0.2, 0.0), 0.0,
    ]  # fmt: skip


@pytest.mark.parametrize("by_head", [False, True], ids=["by layer", "by head"])
def test_the_command_writes_policies_that_the_suite_takes(
    app: typer.Typer, model: Path, tmp_path: Path, by_head: bool
) -> None:
    prompts, out = tmp_path / "prompts.json", tmp_path / "out"
    prompts.write_text(json.dumps(PROMPTS[by_head:]))
    common = ["--model", str(model), "--prompts", str(prompts), "--height", "32", "--width", "32",
              "--frames", "8", "--steps", "6", "--dtype", "float32", "--geometry", "32x64x16",
              "--threads", "1"]  # fmt: skip
    outcome = CliRunner().invoke(
        app,
        ["calibrate", "--psnr", "45,30", "--dense-steps", "2", "--trial-budgets", "0.1,0.4",
         *common, *["--by-head"] * by_head, "--out", str(out)],
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    found = json.loads((out / "calibration.json").read_text())
    layers = [name for group in found["groups"] for name in group]
    assert len(layers) == len(set(layers)) > 1
    heads = found["heads"] or 1
    assert (heads > 1) == by_head
    assert len(found["trials"]) == 2 * heads * len(layers)
    assert all(0 <= item["skipped"] < 1 for item in found["trials"])
    assert any(item["skipped"] > 0 for item in found["trials"])
    policies = out / "policies.json"
    names = list(json.loads(policies.read_text()))
    assert names == ["calibrated 45 dB", "calibrated 30 dB"]

    again = CliRunner().invoke(
        app,
        ["e2e", "--attention", "dense,lite", "--threshold=-inf", "--policies", str(policies),
         *common, "--out", str(tmp_path / "suite"), "--json"],
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    suite = {item["name"]: item for item in json.loads(again.stdout)["configurations"]}
    best: dict[float, Any] = {}
    for item in found["rounds"]:
        held = best.get(item["target_db"])
        if item["psnr_db"] >= item["target_db"] and (
            held is None or item["skipped"] > held["skipped"]
        ):
            best[item["target_db"]] = item
    assert best, "no quality was met"
    for target, item in best.items():
        ran = suite[f"calibrated {target:g} dB"]
        assert ran["sparsity"]["mean"] == pytest.approx(item["skipped"])
        measured = ran["quality"]["vs_dense"]["psnr_db_mean"]
        assert measured is None or measured == pytest.approx(item["psnr_db"], abs=0.01)


def test_a_calibration_in_which_nothing_can_skip_is_refused(
    app: typer.Typer, model: Path, tmp_path: Path
) -> None:
    outcome = CliRunner().invoke(
        app,
        ["calibrate", "--model", str(model), "--height", "32", "--width", "32", "--steps", "4",
         "--dense-steps", "4", "--dtype", "float32", "--out", str(tmp_path / "out")],
    )  # fmt: skip
    assert outcome.exit_code == 2
    assert "4 of 4 steps would be dense" in outcome.output
    assert not (tmp_path / "out").exists()


def test_everything_that_is_wrong_is_said_at_once(app: typer.Typer, tmp_path: Path) -> None:
    outcome = CliRunner().invoke(
        app,
        ["calibrate", "--psnr", "400", "--trial-budgets", "0.1,0.1,0.2", "--rounds", "0",
         "--model", str(tmp_path / "none"), "--dtype", "int8"],
    )  # fmt: skip
    assert outcome.exit_code == 2
    for part in ("PSNR in dB", "two trial budgets", "rounds", "dtype"):
        assert part in outcome.output
