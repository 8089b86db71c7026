"""Budgets by layer: the choice among curves, and the command on a tiny random pipeline."""

from __future__ import annotations

import itertools
import json
import math
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from liteattention_diffusers import Handle
from liteattention_e2e import calibrate_cli, runner
from liteattention_e2e.calibrate import (
    LEAST_BUDGET,
    Calibration,
    Calibrator,
    Choice,
    Curve,
    Curves,
    Round,
    Trial,
    choose,
    in_groups,
    predicted_db,
)
from liteattention_e2e.config import CalibrationOptions, load_config
from liteattention_rocm import SkipPolicy
from liteattention_rocm.cli import files
from tests import ROOT

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
    kept = [
        json.loads(file.read_text()) for file in sorted((e2e / "policies").glob("wan-shapes*.json"))
    ]
    for fields in [fields for policies in kept for fields in policies.values()]:
        policy = SkipPolicy(**fields)
        for layer in policy.layer_budgets:
            budgets = policy.budget_at(policy.warmup_steps, layer)
            assert isinstance(budgets, float) or len(budgets) == depth["num_attention_heads"]
        assert list(policy.layer_budgets) == [
            f"blocks.{i}.attn1" for i in range(depth["num_layers"])
        ]


def trial(budget: float, psnr: float, skipped: float) -> Trial:
    return Trial(("layer",), 3, budget, psnr, skipped)


def by_steps(*curves: Curve) -> list[Curves]:
    """The curves of units that were tried with three dense steps only."""
    return [{3: curve} for curve in curves]


def choices(*budgets: float) -> tuple[Choice, ...]:
    return tuple(Choice(3, budget) for budget in budgets)


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
    assert predicted_db(by_steps(curve, curve), choices(0.03, 0.03), 4e-5) == pytest.approx(
        -10 * math.log10(4e-5 + 2 * 6e-5)
    )
    alone = choose(by_steps(*[Curve(trials)] * 3), [1] * 3, 35.0)
    above = choose(by_steps(*[curve] * 3), [1] * 3, 35.0, 4e-5)
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
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from([1, 3]), curves, min_size=1), st.integers(1, 5)),
        min_size=1,
        max_size=5,
    ),
    st.floats(25, 45),
    st.randoms(use_true_random=False),
)
def test_no_other_choices_skip_more_with_as_little_error(
    groups: list[tuple[dict[int, Curve], int]], target: float, rng: random.Random
) -> None:
    units, sizes = [unit for unit, _ in groups], [size for _, size in groups]
    chosen = choose(units, sizes, target)

    def skipped(made: Sequence[Choice]) -> float:
        pairs = zip(groups, made, strict=True)
        return sum(size * unit[one.dense_steps].skipped(one.budget) for (unit, size), one in pairs)

    def drawn(unit: dict[int, Curve]) -> Choice:
        start = rng.choice(sorted(unit))
        ends = math.log(LEAST_BUDGET), math.log(unit[start].most)
        return Choice(start, math.exp(rng.uniform(*ends)))

    if predicted_db(units, [Choice(max(unit), LEAST_BUDGET) for unit in units]) >= target:
        assert predicted_db(units, chosen) >= target - 1e-9  # sums are rounded
    for _ in range(50):
        other = [drawn(unit) for unit in units]
        if predicted_db(units, other) >= predicted_db(units, chosen):
            # A step of the grid, 6.8 % of a budget, is 0.02 of a share at most.
            assert skipped(other) <= skipped(chosen) + 0.02 * sum(sizes)


def test_what_costs_nothing_is_taken_whole() -> None:
    free = Curve([trial(0.03, 60.0, 0.3), trial(0.12, 60.0, 0.5)])
    dear = Curve([trial(0.03, 36.0, 0.3), trial(0.12, 30.0, 0.5)])
    (_, most), (_, less) = choose(by_steps(free, dear), [1, 1], 35.0)
    assert most == pytest.approx(0.12)
    assert 0.03 < less < 0.04


def test_a_head_begins_early_where_that_costs_little() -> None:
    late = Curve([trial(0.03, 44.0, 0.3), trial(0.12, 38.0, 0.5)])
    free = Curve([trial(0.03, 44.0, 0.35), trial(0.12, 38.0, 0.6)])
    dear = Curve([trial(0.03, 34.0, 0.35), trial(0.12, 28.0, 0.6)])
    units = [{1: free, 3: late}, {1: dear, 3: late}]
    chosen = choose(units, [1, 1], 36.0)
    assert [choice.dense_steps for choice in chosen] == [1, 3]
    assert predicted_db(units, chosen) >= 36.0
    begins = [choose([{1: dear, 3: late}], [1], target)[0].dense_steps for target in (26.0, 40.0)]
    assert begins == [1, 3], "the price of quality decides"


def test_groups_are_neighbours_of_nearly_one_size() -> None:
    layers = [f"blocks.{i}" for i in range(7)]
    assert in_groups(layers, None) == tuple((name,) for name in layers)
    groups = in_groups(layers, 3)
    assert [name for group in groups for name in group] == layers
    assert sorted(map(len, groups)) == [2, 2, 3]
    with pytest.raises(ValueError, match="1 to 7"):
        in_groups(layers, 8)


def test_the_policy_taken_is_the_one_that_skips_most_of_those_good_enough() -> None:
    made = Calibration((3,), (("a",), ("b", "c")))
    low = Round(33.0, choices(0.1, 0.2), 33.0, 32.0, 30.0, 0.6)
    good = Round(34.0, choices(0.05, 0.1), 34.0, 33.1, 31.0, 0.5)
    better = Round(35.0, choices(0.04, 0.1), 35.0, 36.0, 31.0, 0.4)
    made.rounds[33.0] = [low, better, good]
    made.rounds[50.0] = [low, better]
    assert made.best(33.0) is good
    assert made.best(50.0) is better
    policy = SkipPolicy(**made.policies()["calibrated 33 dB"])
    assert [policy.budget_at(3, name) for name in "abcd"] == [0.05, 0.1, 0.1, 0.0]
    assert policy.budget_at(2, "a") is None


def test_heads_have_budgets_of_their_own() -> None:
    made = Calibration((3,), (("a",), ("b", "c")), heads=2)
    assert made.units == ((("a",), 0), (("a",), 1), (("b", "c"), 0), (("b", "c"), 1))
    policy = made.policy(choices(0.05, 0.1, 0.2, 0.0))
    assert policy == SkipPolicy(
        budget=0.0,
        layer_budgets={"a": (0.05, 0.1), "b": (0.2, 0.0), "c": (0.2, 0.0)},
        warmup_steps=3,
    )


def test_heads_begin_at_steps_of_their_own() -> None:
    made = Calibration((3, 1), (("a",), ("b", "c"), ("d",)), heads=2)
    one, two, three, four = 0.1, 0.2, 0.3, 0.4
    early = [Choice(1, one), Choice(1, two)]
    mixed = [Choice(3, three), Choice(1, four)]
    late = [Choice(3, one), Choice(3, two)]
    policy = made.policy([*early, *mixed, *late])
    assert policy.warmup_steps == 1
    wanted = ((0.0, 0.0), (0.0, four), (0.0, four), (three, four))
    assert dict(policy.layer_budgets) == {
        "a": (one, two),
        "b": wanted,
        "c": wanted,
        "d": ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (one, two)),
    }
    alike = made.policy([*late, *late, *late])
    assert alike == Calibration((3,), made.groups, 2).policy(choices(*[one, two] * 3))
    assert alike.layer_budgets["a"] == (one, two) and alike.warmup_steps == 3


@pytest.mark.parametrize(
    ("by_head", "dense_steps", "wanted"),
    [(False, [2], (45, 30)), (True, [2], (45, 30)), (True, [1, 3], (55, 30))],
    ids=["by layer", "by head", "by head and step"],
)
def test_the_command_writes_policies_that_the_suite_takes(
    app: typer.Typer,
    model: Path,
    tmp_path: Path,
    by_head: bool,
    dense_steps: list[int],
    wanted: tuple[int, int],
) -> None:
    def listed(numbers: Sequence[int]) -> str:
        return ",".join(map(str, numbers))

    prompts, out = tmp_path / "prompts.json", tmp_path / "out"
    prompts.write_text(json.dumps(PROMPTS[by_head:]))
    common = ["--model", str(model), "--prompts", str(prompts), "--height", "32", "--width", "32",
              "--frames", "8", "--steps", "6", "--dtype", "float32", "--geometry", "32x64x16",
              "--threads", "1"]  # fmt: skip
    outcome = CliRunner().invoke(
        app,
        ["calibrate", "--psnr", listed(wanted), "--dense-steps", listed(dense_steps),
         "--trial-budgets", "0.1,0.4", *common, *["--by-head"] * by_head, "--out", str(out)],
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    found = json.loads((out / "calibration.json").read_text())
    layers = [name for group in found["groups"] for name in group]
    assert len(layers) == len(set(layers)) > 1
    heads = found["heads"] or 1
    assert (heads > 1) == by_head
    tried = [(*item["layers"], item["head"], item["dense_steps"]) for item in found["trials"]]
    units = itertools.product(layers, range(heads) if by_head else [None], dense_steps)
    assert sorted(tried) == sorted(2 * list(units))
    assert all(0 <= item["skipped"] < 1 for item in found["trials"])
    assert any(item["skipped"] > 0 for item in found["trials"])
    policies = out / "policies.json"
    names = list(json.loads(policies.read_text()))
    assert names == [f"calibrated {target} dB" for target in wanted]
    assert found["dense_steps"] == dense_steps
    for item in found["rounds"]:
        assert len(item["budgets"]) == len(item["dense_steps"]) == heads * len(layers)
    assert {step for item in found["rounds"] for step in item["dense_steps"]} == set(dense_steps)
    text = (out / "calibration.md").read_text()
    assert ("from step 3" in text) == (len(dense_steps) > 1)

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


QUICK = (
    "--psnr", "30", "--rounds", "1", "--groups", "1", "--trial-budgets", "0.1,0.4",
    "--dense-steps", "2", "--steps", "4", "--height", "32", "--width", "32", "--frames", "8",
    "--dtype", "float32", "--geometry", "32x64x16", "--threads", "1",
)  # fmt: skip


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def quick(app: typer.Typer, model: Path, folder: Path) -> Any:
    (folder / "prompts.json").write_text(json.dumps(PROMPTS[:1]))
    prompts, out = str(folder / "prompts.json"), str(folder / "out")
    command = ["calibrate", "--model", str(model), "--prompts", prompts, "--out", out, *QUICK]
    return CliRunner().invoke(app, command)


def test_a_disk_that_is_full_for_a_while_costs_no_measurement(
    app: typer.Typer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = files.write_text, itertools.count()
    # the write of the first trial, the second and the first try of the last result
    monkeypatch.setattr(
        files, "write_text", lambda *given: full() if next(calls) < 3 else write(*given)
    )
    outcome = quick(app, model, tmp_path)
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stderr.count("not written yet: [Errno 28] No space left on device") == 3
    found = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert len(found["trials"]) == 2 and len(found["rounds"]) == 1
    assert list(json.loads((tmp_path / "out" / "policies.json").read_text()))


@pytest.mark.parametrize("stop", [None, signal.SIGTERM])
def test_what_cannot_be_written_at_the_end_is_printed(
    app: typer.Typer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int | None
) -> None:
    monkeypatch.setattr(files, "write_text", full)
    if stop is not None:
        monkeypatch.setattr(Calibrator, "aim", lambda *_: signal.raise_signal(stop))
    outcome = quick(app, model, tmp_path)
    assert outcome.exit_code == (1 if stop is None else 143), outcome.output
    assert "standard output has it instead" in outcome.stderr
    assert "what was measured is in" not in outcome.stderr
    assert "policies: " not in outcome.stderr
    found = json.loads(outcome.stdout)
    assert len(found["calibration.json"]["trials"]) == 2
    assert list(found["policies.json"]) == (["calibrated 30 dB"] if stop is None else [])


def test_trials_leave_no_lists_behind(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = runner.Runner(
        load_config({
            "model": str(model), "prompts": PROMPTS[:1], "attention": "dense", "height": 32,
            "width": 32, "frames": 8, "steps": 4, "dtype": "float32", "geometry": "32x64x16",
            "threads": 1,
        })
    )  # fmt: skip
    for name in ("lists", "kept_tiles"):
        monkeypatch.setattr(Handle, name, lambda *_: pytest.fail("a list was copied"))
    work = Calibrator(
        loaded, [1], [0.1, 0.4], lambda made: None, lambda text, videos: None, lambda: None
    )
    work.measure(in_groups(work.layers(), 1))
    work.aim(30.0, 1)
    assert any(item.skipped > 0 for item in work.made.trials) and work.made.rounds[30.0]
    assert loaded.tiles == {}


def test_policies_stay_until_there_are_new_ones(
    app: typer.Typer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, names = tmp_path / "out", ("policies.json", "calibration.json", "calibration.md")
    out.mkdir()
    for name in names:
        (out / name).write_text(f"earlier {name}")
    with monkeypatch.context() as patch:
        patch.setattr(Calibrator, "aim", lambda *_: signal.raise_signal(signal.SIGTERM))
        assert quick(app, model, tmp_path).exit_code == 143
    assert len(json.loads((out / "calibration.json").read_text())["trials"]) == 2
    assert (out / "policies.json").read_text() == "earlier policies.json"
    for name in names[1:]:
        (out / name).write_text(f"earlier {name}")
        next(out.glob("earlier-*")).joinpath(name).unlink()
    next(out.glob("earlier-*")).rmdir()
    outcome = quick(app, model, tmp_path)
    assert outcome.exit_code == 0, outcome.output
    assert list(json.loads((out / "policies.json").read_text())) == ["calibrated 30 dB"]
    (earlier,) = out.glob("earlier-*")
    for name in names:
        assert (earlier / name).read_text() == f"earlier {name}"
    (tmp_path / "fresh").mkdir()
    monkeypatch.setattr(Calibrator, "aim", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert quick(app, model, tmp_path / "fresh").exit_code == 143
    assert sorted(path.name for path in (tmp_path / "fresh" / "out").iterdir()) == sorted(names[1:])


def test_a_folder_in_a_files_place_is_said_before_the_model_is_loaded(
    app: typer.Typer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "load", lambda config: pytest.fail("the model was loaded"))
    for name in ("policies.json", "calibration.md"):
        (tmp_path / "out" / name).mkdir(parents=True)
    outcome = quick(app, model, tmp_path)
    assert outcome.exit_code == 2
    assert outcome.stderr.count("is a folder, a file is needed") == 2


def test_help_and_page_say_how_many_videos_are_made_by_default() -> None:
    config, options = load_config({}), CalibrationOptions()
    transformer = json.loads((Path(config.model) / "transformer" / "config.json").read_text())
    runs = transformer["num_layers"] * len(options.budgets) + 1 + options.rounds * len(options.psnr)
    said = f"{runs * len(config.prompts) * len(config.seeds)} videos"
    assert said in " ".join((calibrate_cli.calibrate.__doc__ or "").split())
    assert said in (ROOT / "docs" / "commands.md").read_text()


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dense-steps", "1,3"], "--dense-steps=1,3: several numbers are tried head by head"),
        (["--by-head", "--dense-steps", "3,3"], "--dense-steps=3,3: each only once"),
        (["--by-head", "--dense-steps", ","], "--dense-steps: ',' has an empty item"),
        (["--by-head", "--dense-steps", "1,-3"], "--dense-steps=-3: must be at least 0"),
        (["--by-head", "--dense-steps", "1,4"], "4 of 4 steps would be dense"),
    ],
)
def test_numbers_of_dense_steps_that_make_no_sense_are_refused(
    app: typer.Typer, model: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    common = ["--model", str(model), "--height", "32", "--width", "32", "--steps", "4"]
    outcome = CliRunner().invoke(
        app, ["calibrate", *common, *options, "--out", str(tmp_path / "out")]
    )
    assert outcome.exit_code == 2
    assert " ".join(outcome.output.split()).count("dense-steps") == 1 and message in outcome.output
    assert not (tmp_path / "out").exists()


def test_qualities_whose_policies_would_have_one_name_are_refused(app: typer.Typer) -> None:
    outcome = CliRunner().invoke(app, ["calibrate", "--psnr", "40,33,40.000001", "--rounds", "0"])
    assert outcome.exit_code == 2 and "--rounds=0" in outcome.output
    assert "--psnr=40,33,40.000001: each only once, in six digits" in outcome.output


def test_everything_that_is_wrong_is_said_at_once(app: typer.Typer, tmp_path: Path) -> None:
    outcome = CliRunner().invoke(
        app,
        ["calibrate", "--psnr", "400", "--trial-budgets", "0.1,0.1,0.2", "--rounds", "0",
         "--model", str(tmp_path / "none"), "--dtype", "int8"],
    )  # fmt: skip
    assert outcome.exit_code == 2
    for part in ("PSNR in dB", "--trial-budgets=", "two trial budgets", "--rounds=0", "dtype"):
        assert part in outcome.output
