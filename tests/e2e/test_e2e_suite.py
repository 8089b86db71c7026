"""The suite on a tiny random pipeline: files exist, and all of them say the same."""

from __future__ import annotations

import copy
import csv
import functools
import html
import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import imageio_ffmpeg
import numpy as np
import pytest
import torch
import typer
from markdown_it import MarkdownIt
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import liteattention_diffusers
from liteattention_diffusers import Handle, enabling, graphs
from liteattention_e2e import (
    artefacts,
    busy,
    checker,
    cli,
    metrics,
    pixel_vae,
    report,
    runner,
    step_tiles,
    suite,
    tiny,
)
from liteattention_e2e.clips import parse_prompt
from liteattention_e2e.config import Configuration, load_config, parse_geometry
from liteattention_rocm import MI300X_GEOMETRY, SkipPolicy, TileGeometry
from tests.integration.diffusers.graph_stand_in import StandIn

PROMPTS = [
    "a red circle moves left on a blue background",
    "a cyan diamond moves up on a gray background",
]
BY_LAYER = {"budget": 0.0, "warmup_steps": 0, "layer_budgets": {"blocks.0.*": 0.2}}
TILE = "32x64x16"
SIZES = {
    "--height": "32", "--width": "32", "--frames": "8", "--steps": "4", "--guidance": "3",
    "--dtype": "float32", "--geometry": TILE, "--threads": "1",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """A machine that nothing else keeps busy; test_e2e_busy.py has others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(busy, "signs", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def done(
    app: typer.Typer, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """One suite run: the report as printed and the folder it wrote."""
    folder = tmp_path_factory.mktemp("suite")
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    policies = folder / "policies.json"
    policies.write_text(
        json.dumps({"retest": {"threshold": -1, "warmup_steps": 0, "retest_every": 2}})
    )
    arguments = [text for pair in SIZES.items() for text in pair]
    out = folder / "out"
    outcome = CliRunner().invoke(
        app,
        ["e2e", "--model", str(model), "--prompts", str(prompts), "--threshold", "-inf,-2",
         "--policies", str(policies), "--repeats", "2", *arguments, "--out", str(out), "--json",
         "--check-prompts"],
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout), out


def item(printed: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in printed["configurations"] if each["name"] == name)


def test_prompts_are_checked_on_the_frames_that_are_kept(done: tuple[dict[str, Any], Path]) -> None:
    printed, out = done
    for one in printed["configurations"]:
        slug = one["name"].replace(" ", "_")
        seen = []
        for index, name in enumerate(printed["artefacts"]["frames"]):
            with np.load(out / name) as stored:
                frames = torch.from_numpy(stored[slug])
            video = frames.permute(3, 0, 1, 2).float() / 127.5 - 1
            seen.append(checker.check(video, parse_prompt(PROMPTS[index])))
        wanted = {
            name: np.mean([getattr(item, name) for item in seen]) for name in checker.ATTRIBUTES
        }
        wanted["all"] = np.mean(
            [all(getattr(item, name) for name in checker.ATTRIBUTES) for item in seen]
        )
        assert one["prompts_followed"] == pytest.approx(wanted)
    assert "prompts followed" in (out / "report.md").read_text()


def test_only_prompts_about_shapes_can_be_checked() -> None:
    with pytest.raises(ValueError, match=r"check_prompts.*a cat.*is not of the form"):
        load_config({"prompts": ["a cat plays the piano"], "check_prompts": True})


def test_compiled_blocks_serve_every_configuration(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled once, for all policies, and the same bits as without."""
    options = {
        "model": str(model), "prompts": PROMPTS[:1], "height": 32, "width": 32, "frames": 8,
        "steps": 4, "dtype": "float32", "geometry": TILE, "threads": 1, "thresholds": "-inf,-2",
        "policies": {"by layer": BY_LAYER},
    }  # fmt: skip
    plain = runner.Runner(load_config(options))
    wanted = [plain.run(x, 0, 0, 0).digest for x in plain.config.configurations()]
    torch._dynamo.reset()
    eager = functools.partialmethod(
        diffusers.WanTransformer3DModel.compile_repeated_blocks, backend="aot_eager"
    )  # no code is generated, which takes most of a minute
    monkeypatch.setattr(diffusers.WanTransformer3DModel, "compile_repeated_blocks", eager)
    loaded = runner.Runner(load_config({**options, "compiled": True}))
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    made, compilations = [], []
    for configuration in loaded.config.configurations():
        made.append(loaded.run(configuration, 0, 0, 0))
        compilations.append(counted["unique_graphs"])
    assert [x.digest for x in made] == wanted
    assert all(x.attention is None for x in made)
    # diffusers' own attention and ours have a graph each, and no policy has another
    assert [x.configuration for x in made] == [
        "diffusers",
        "dense",
        "lite -inf",
        "lite -2",
        "by layer",
    ]
    assert compilations == [1, 2, 2, 2, 2]
    with pytest.raises(ValueError, match="compiled is for the runner diffusers"):
        load_config({**options, "compiled": True, "runner": "sglang"})


def test_graphs_serve_every_configuration(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of all of them in turn, with the videos and tiles that eager runs give."""
    options = {
        "model": str(model), "prompts": PROMPTS[:1], "height": 32, "width": 32, "frames": 8,
        "steps": 6, "dtype": "float32", "geometry": TILE, "threads": 1, "thresholds": "-2",
        "policies": {"by layer": BY_LAYER},
    }  # fmt: skip
    with pytest.raises(ValueError, match="graphs are CUDA's: device must be a GPU, got 'cpu'"):
        load_config({**options, "graphs": True})
    with pytest.raises(ValueError, match=r"graphs is for the runner diffusers.*\ngraphs are"):
        load_config({**options, "graphs": True, "runner": "sglang"})
    eager = runner.Runner(load_config(options))
    monkeypatch.setattr(graphs, "_on_device", lambda tensor: True)
    for place in (graphs, enabling):
        monkeypatch.setattr(place, "recorder_for", lambda model: StandIn(monkeypatch))
    config = load_config(options).model_copy(update={"graphs": True, "warmup": 1})
    assert config.warmup_runs == 3
    loaded = runner.Runner(config)
    for _ in range(2):
        for item in config.configurations():
            made, truth = (each.run(item, 0, 0, 0) for each in (loaded, eager))
            assert made.digest == truth.digest
            assert [record["tiles_computed"] for record in made.skips] == [
                record["tiles_computed"] for record in truth.skips
            ]
    counts = [one for each in loaded._graphed.values() for one in each.graph_counts()]
    assert len(counts) == len(config.configurations()) and all(x["replayed"] for x in counts)


def test_a_long_report_is_not_written_after_every_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing it takes a tenth of the time or less; the videos are there at once."""
    loaded = runner.Runner(
        load_config({
            "model": str(model), "prompts": PROMPTS[:1], "height": 32, "width": 32, "frames": 8,
            "steps": 2, "dtype": "float32", "geometry": TILE, "threads": 1, "attention": "dense",
            "seeds": "0,1,2", "out": str(tmp_path),
        })
    )  # fmt: skip
    result = suite.Result.before(loaded)
    writer = artefacts.Writer(result, tmp_path)
    clock = iter([0.0, 5.0, 54.9, 55.0, 56.0])
    monkeypatch.setattr(artefacts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    said = []

    def keep(made: Any) -> None:
        writer.add(made)
        said.append(json.loads((tmp_path / "report.json").read_text())["runs_done"])

    suite.run(result, Console(quiet=True), keep)
    assert said == [1, 1, 3]
    assert len(list(tmp_path.glob("*.mp4"))) == 3


def test_every_file_named_exists_and_opens(done: tuple[dict[str, Any], Path]) -> None:
    printed, out = done
    assert json.loads((out / "report.json").read_text()) == printed
    named = printed["artefacts"]
    assert len(named["videos"]) == 2 * 5
    assert len(named["contact_sheets"]) == len(named["frames"]) == 2
    by_layer = {name for name in named["plots"] if name.startswith("sparsity_by_layer_")}
    assert len(by_layer) == 3
    assert set(named["plots"]) - by_layer == {
        "time_per_step.png", "sparsity_by_step.png", "quality_against_time.png",
    }  # fmt: skip
    assert len(named["skipped_tiles"]) == 3
    for picture in [*named["contact_sheets"], *named["plots"], *named["skipped_tiles"]]:
        with Image.open(out / picture) as image:
            assert min(image.size) > 100
    text = (out / "report.md").read_text()
    assert all(f"]({name})" in text for name in named["contact_sheets"])


def test_quality_can_be_derived_from_the_stored_frames(done: tuple[dict[str, Any], Path]) -> None:
    printed, out = done
    stored = [np.load(out / name) for name in printed["artefacts"]["frames"]]
    for name in ("diffusers", "lite_-2", "retest"):
        entry = item(printed, name.replace("_", " "))
        for reference in ("dense", "diffusers"):
            if name == reference:
                continue
            quality = entry["quality"][f"vs_{reference}"]
            pairs = [metrics.compare(frames[name], frames[reference]) for frames in stored]
            assert quality == metrics.summarise_quality(pairs)
    assert item(printed, "lite -inf")["quality"]["vs_dense"]["identical"] is True
    assert 30 < item(printed, "lite -2")["quality"]["vs_dense"]["psnr_db_min"] < 80
    assert item(printed, "dense")["quality"]["vs_dense"] is None


def test_videos_show_the_stored_frames(done: tuple[dict[str, Any], Path]) -> None:
    printed, out = done
    frames = np.load(out / "frames_p0_s0.npz")["dense"]
    reader = imageio_ffmpeg.read_frames(str(out / "dense_p0_s0.mp4"), pix_fmt="rgb24")
    meta = next(reader)
    decoded = [
        np.frombuffer(raw, np.uint8).reshape(meta["size"][1], meta["size"][0], 3) for raw in reader
    ]
    assert len(decoded) == 8
    assert meta["fps"] == printed["settings"]["fps"]
    factor = meta["size"][1] // 32
    small = np.stack(decoded).reshape(8, 32, factor, 32, factor, 3).mean((2, 4))
    # H.264 keeps half the colour resolution; noise of random weights suffers, brightness does not.
    weights = np.array([0.299, 0.587, 0.114])
    assert np.abs((small - frames) @ weights).mean() < 6


def test_sparsity_equals_the_statistics_of_the_handle(
    done: tuple[dict[str, Any], Path], model: Path
) -> None:
    printed, _ = done
    pipe = diffusers.DiffusionPipeline.from_pretrained(model, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    for module in (pipe.transformer.rope,):
        module.freqs_cos, module.freqs_sin = module.freqs_cos.float(), module.freqs_sin.float()
    tile = TileGeometry(32, 64, 16)
    totals = {"tiles_total": 0, "tiles_computed": 0}
    with liteattention_diffusers.enable(
        pipe, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=tile
    ) as handle:
        for prompt in PROMPTS:
            pipe(
                prompt=prompt, height=32, width=32, num_frames=pixel_vae.pipeline_num_frames(8),
                num_inference_steps=4, guidance_scale=3.0,
                generator=torch.Generator().manual_seed(0), max_sequence_length=tiny.TEXT_LENGTH,
            )  # fmt: skip
        for record in handle.statistics.to_records():
            for key in totals:
                totals[key] += record[key]
        steps = [row["sparsity"] for row in handle.statistics.by_step()]
        layers = {row["layer"]: row["sparsity"] for row in handle.statistics.by_layer()}
    sparsity = item(printed, "lite -2")["sparsity"]
    assert sparsity["mean"] == 1 - totals["tiles_computed"] / totals["tiles_total"] > 0.1
    assert sparsity["by_step"] == steps
    assert sparsity["last_step"] == steps[-1]
    assert sparsity["by_layer"] == layers
    assert set(sparsity["by_branch"]) == {"cond", "uncond"}
    assert item(printed, "lite -inf")["sparsity"]["mean"] == 0.0
    assert item(printed, "dense")["sparsity"] is None
    retest = item(printed, "retest")
    assert retest["policy"]["retest_every"] == 2
    assert retest["sparsity"]["by_step"][2] == 0.0 < retest["sparsity"]["by_step"][3]


def test_times_add_up(done: tuple[dict[str, Any], Path]) -> None:
    printed, _ = done
    assert len(printed["runs"]) == 5 * 2 * 2
    for run in printed["runs"]:
        assert len(run["steps"]) == 4
        assert sum(run["steps"]) == pytest.approx(run["denoise"], rel=1e-9)
        parts = run["encode"] + run["denoise"] + run["decode"]
        assert run["encode"] > 0 and run["decode"] > 0 and parts <= run["total"]
        assert 0 < run["self_attention"] < run["denoise"]
        assert run["peak_memory_bytes"] > 50 * 2**20
    for entry in printed["configurations"]:
        times = sorted(
            run["denoise"] for run in printed["runs"] if run["configuration"] == entry["name"]
        )
        spread = entry["seconds"]["denoise"]
        assert (spread["min"], spread["max"], spread["n"]) == (times[0], times[-1], 4)
        assert spread["median"] == (times[1] + times[2]) / 2
        assert len(entry["seconds"]["per_step"]) == 4
        assert entry["repeats_bit_equal"] is True
    dense = {
        (run["prompt"], run["repeat"]): run["denoise"]
        for run in printed["runs"]
        if run["configuration"] == "dense"
    }
    ratios = sorted(
        dense[run["prompt"], run["repeat"]] / run["denoise"]
        for run in printed["runs"]
        if run["configuration"] == "lite -2"
    )
    assert item(printed, "lite -2")["speedup"]["vs_dense"]["median"] == (ratios[1] + ratios[2]) / 2
    assert item(printed, "dense")["speedup"]["vs_dense"] is None


def test_configurations_are_interleaved(done: tuple[dict[str, Any], Path]) -> None:
    printed, _ = done
    order = [run["configuration"] for run in printed["runs"]]
    assert [set(order[i : i + 5]) for i in range(0, 20, 5)] == [set(order)] * 4
    assert len({tuple(order[i : i + 5]) for i in range(0, 20, 5)}) > 1


def test_csv_holds_the_same_figures(done: tuple[dict[str, Any], Path]) -> None:
    printed, out = done
    with (out / "report.csv").open() as file:
        stored = list(csv.DictReader(file))
    for row, expected in zip(stored, report.rows(printed), strict=True):
        assert row == {key: "" if value is None else str(value) for key, value in expected.items()}


def test_the_machine_is_recorded(done: tuple[dict[str, Any], Path]) -> None:
    printed, _ = done
    machine = printed["environment"]
    assert machine["threads"] == 1
    assert machine["packages"]["torch"] == torch.__version__
    assert machine["cpu"] and machine["python"] and machine["command"].startswith("liteattention")
    assert printed["settings"]["tokens"] == 512
    assert printed["settings"]["geometry"] == {"q_block": 32, "k_block": 64, "vote_rows": 16}
    assert printed["settings"]["max_sequence_length"] == tiny.TEXT_LENGTH


def test_the_pipeline_is_left_as_it_was(model: Path) -> None:
    from liteattention_e2e.runner import Runner

    config = load_config(
        {"model": str(model), "prompts": PROMPTS[:1], "height": 32, "width": 32, "steps": 2,
         "dtype": "float32", "geometry": TILE}
    )  # fmt: skip
    runner = Runner(config)
    own = Configuration("diffusers", "diffusers", None)

    def wrapped() -> tuple[bool, bool, int]:
        pipe = runner.pipeline
        hooks = sum(len(module._forward_hooks) for module in pipe.transformer.modules())
        return "encode_prompt" in vars(pipe), "decode" in vars(pipe.vae), hooks

    before = runner.run(own, 0, 0, 0)
    runner.run(Configuration("lite", "lite", SkipPolicy(threshold=-1.0, warmup_steps=0)), 0, 0, 0)
    assert wrapped() == (False, False, 0)
    assert runner.run(own, 0, 0, 0).digest == before.digest


def three_steps(model: Path) -> runner.Runner:
    """A loaded pipeline for small videos of three steps."""
    config = load_config(
        {"model": str(model), "prompts": PROMPTS[:1], "height": 32, "width": 32, "steps": 3,
         "dtype": "float32", "geometry": TILE}
    )  # fmt: skip
    return runner.Runner(config)


def test_peak_memory_has_nothing_of_earlier_runs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = three_steps(model)
    own = Configuration("diffusers", "diffusers", None)
    loaded.run(own, 0, 0, 0)
    large = 256 << 20
    with monkeypatch.context() as patch:
        patch.setattr(runner, "to_8_bit", lambda video: np.ones(large, np.uint8))
        kept = [loaded.run(own, 0, 0, 0)]
    peaks = [kept[0].peak_memory, loaded.run(own, 0, 0, 0).peak_memory]
    kept.clear()  # what nobody keeps is not taken off
    peaks.append(loaded.run(own, 0, 0, 0).peak_memory)
    assert max(peaks) - min(peaks) < large / 2
    # what the suite records of a run is not the run's
    record = step_tiles.Recorder.step_end

    def more(self: step_tiles.Recorder, step: int) -> None:
        record(self, step)
        if step == 1:
            lists = [one for taken in self._after.values() for one in taken.values()]
            assert lists and self.nbytes == sum(one.nbytes for one in lists)
            self.nbytes += large
            self.bulk = np.ones(large, np.uint8)  # type: ignore[attr-defined]

    monkeypatch.setattr(step_tiles.Recorder, "step_end", more)
    lite = Configuration("lite", "lite", SkipPolicy(threshold=-1.0, warmup_steps=0))
    assert loaded.run(lite, 0, 0, 0).peak_memory - max(peaks) < large / 2


def test_a_run_keeps_tiles_only_where_they_are_wanted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = three_steps(model)
    lite = Configuration("lite", "lite", SkipPolicy(threshold=-1.0, warmup_steps=0))
    with monkeypatch.context() as patch:
        for name in ("lists", "kept_tiles"):
            patch.setattr(Handle, name, lambda *_: pytest.fail("a list was copied"))
        without = loaded.run(lite, 0, 0, 0, keep_tiles=False)
    assert without.tiles == () and loaded.tiles == {}
    made = loaded.run(lite, 0, 0, 0)
    assert made.tiles and list(loaded.tiles) == ["lite"]
    assert made.digest == without.digest
    kept = [record["tiles_kept"] for record in made.skips]
    assert kept == [record["tiles_kept"] for record in without.skips]


def test_lists_that_are_kept_for_a_picture_leave_the_device() -> None:
    on_device = SimpleNamespace(cpu=lambda: torch.ones(1, dtype=torch.bool))
    handle: Any = SimpleNamespace(kept_tiles=lambda layer, branch: on_device)
    records = [{"layer": "blocks.0", "branch": "", "step": 1, "tiles_kept": 3}]
    assert isinstance(runner._most_skipped(handle, records).kept, torch.Tensor)


def test_generate_makes_one_video_and_names_the_files(
    app: typer.Typer, model: Path, tmp_path: Path
) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "--frames"}
    outcome = CliRunner().invoke(
        app,
        ["generate", PROMPTS[0], "--model", str(model), "--threshold", "-2", "--out",
         str(tmp_path), *(text for pair in sizes.items() for text in pair)],
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    printed = json.loads((tmp_path / "report.json").read_text())
    assert [each["name"] for each in printed["configurations"]] == ["diffusers", "dense", "lite -2"]
    assert printed["settings"]["frames"] == 8  # from generation.json of the model
    assert "sparsity" in outcome.stderr and "PSNR" in outcome.stderr, outcome.stderr
    for name in ("lite_-2_p0_s0.mp4", "contact_sheet_p0_s0.png"):
        assert (tmp_path / name).exists()
        assert str(tmp_path / name) in outcome.stderr


def test_a_warm_up_shorter_than_the_dense_steps(
    app: typer.Typer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its two steps are dense, so there are no lists of it to draw.
    made = []

    class Recorder(step_tiles.Recorder):
        def __init__(self, handle: Handle, steps: int) -> None:
            super().__init__(handle, steps)
            made.append(steps)

    monkeypatch.setattr(runner, "Recorder", Recorder)
    options = SIZES | {"--threshold": "-2", "--dense-steps": "3", "--warmup": "1"}
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPTS[0])
    flat = [word for option in options.items() for word in option]
    outcome = CliRunner().invoke(
        app,
        ["e2e", "--model", str(model), "--prompts", str(prompts), "--attention", "dense,lite",
         "--out", str(tmp_path / "out"), *flat],
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    assert json.loads((tmp_path / "out" / "report.json").read_text())["runs"]
    assert made == [4]  # lists of the timed run alone, which somebody reads


def test_a_short_schedule_is_compared_with_references_as_short(
    app: typer.Typer, model: Path, tmp_path: Path
) -> None:
    options = SIZES | {"--threshold": "-inf,-1", "--short-steps": "2", "--warmup": "0"}
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPTS[0])
    flat = [word for option in options.items() for word in option]
    out = tmp_path / "out"
    outcome = CliRunner().invoke(
        app, ["e2e", "--model", str(model), "--prompts", str(prompts), "--out", str(out), *flat]
    )
    assert outcome.exit_code == 0, outcome.output
    printed = json.loads((out / "report.json").read_text())
    kinds = ["diffusers", "dense", "lite -inf", "lite -1"]
    names = [*kinds, *(f"{name}, 2 steps" for name in kinds)]
    assert [each["name"] for each in printed["configurations"]] == names
    assert [each["steps"] for each in printed["configurations"]] == [4] * 4 + [2] * 4
    seconds = {run["configuration"]: run["denoise"] for run in printed["runs"]}
    frames = np.load(out / "frames_p0_s0.npz")
    for run in printed["runs"]:
        assert len(run["steps"]) == (2 if "2 steps" in run["configuration"] else 4)
    for name in ("lite -inf, 2 steps", "lite -1, 2 steps", "diffusers, 2 steps"):
        entry = item(printed, name)
        ratio = seconds["dense, 2 steps"] / seconds[name]
        assert entry["speedup"]["vs_dense"]["median"] == pytest.approx(ratio)
        slug = name.replace(", ", "_").replace(" ", "_")
        pair = metrics.compare(frames[slug], frames["dense_2_steps"])
        assert entry["quality"]["vs_dense"] == metrics.summarise_quality([pair])
    assert item(printed, "dense, 2 steps")["quality"]["vs_dense"] is None
    assert item(printed, "lite -inf, 2 steps")["quality"]["vs_dense"]["identical"] is True
    assert item(printed, "lite -inf, 2 steps")["sparsity"]["by_step"] == [0.0, 0.0]
    assert item(printed, "lite -1, 2 steps")["sparsity"]["by_step"][1] > 0
    text = (out / "report.md").read_text()
    assert "as many steps" in text and "keeps every tile (lite -inf; lite -inf, 2 steps)" in text
    assert "sparsity_by_layer_lite_-1_2_steps.png" in printed["artefacts"]["plots"]


def test_a_policy_that_is_off_is_reported_beside_others(
    app: typer.Typer, model: Path, tmp_path: Path
) -> None:
    """It counts no tiles, and the tables have the layers of the others."""
    policies = tmp_path / "policies.json"
    policies.write_text(
        json.dumps({"off": {"enabled": False}, "on": {"threshold": -1, "warmup_steps": 0}})
    )
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS[:1]))
    options = {
        **SIZES, "--steps": "2", "--threshold": "", "--attention": "dense,lite", "--warmup": "0",
        "--model": str(model), "--prompts": str(prompts), "--policies": str(policies),
        "--out": str(tmp_path / "out"),
    }  # fmt: skip
    arguments = [text for pair in options.items() for text in pair]
    outcome = CliRunner().invoke(app, ["e2e", *arguments, "--json"])
    assert outcome.exit_code == 0, outcome.output
    printed = json.loads(outcome.stdout)
    assert item(printed, "off")["quality"]["vs_dense"]["identical"] is True
    assert item(printed, "off")["sparsity"]["by_step"] == []
    assert item(printed, "on")["sparsity"]["last_step"] > 0
    assert re.search(r"\| *blocks\.0\.attn1 \|", (tmp_path / "out" / "report.md").read_text())
    assert '"button">blocks.0.attn1<' in (tmp_path / "out" / "report.html").read_text()


def test_what_keeps_every_tile_is_noted() -> None:
    given = {
        "nothing": {"threshold": ["-inf", "-inf"], "layer_thresholds": {"a": "-inf"}},
        "late": {"threshold": ["-inf", -2]},
        "none": {"budget": [0, 0], "layer_budgets": {"a": 0, "b": [0, 0], "c": [[0, 0], [0, 0]]}},
        "last head": {"budget": 0, "layer_budgets": {"a": [[0, 0], [0, 0.1]]}},
    }
    config = load_config({"model": "x", "thresholds": "", "policies": given})
    assert any("keeps every tile (nothing; none)" in note for note in suite.notes(config))


def test_every_wrong_option_is_reported_at_once(app: typer.Typer, tmp_path: Path) -> None:
    outcome = CliRunner().invoke(
        app,
        ["e2e", "--prompts", str(tmp_path / "none.txt"), "--threshold", "3,-2", "--attention",
         "dense,fast", "--steps", "0", "--height", "tall", "--geometry", "big", "--repeats", "-1",
         "--retest", "0", "--branches", "both", "--device", "abacus", "--engine", "warp",
         "--seeds", "1,1", "--dtype", "int8", "--layer-threshold", "blocks.0"],
    )  # fmt: skip
    assert outcome.exit_code == 2
    text = " ".join(outcome.stderr.split())
    for part in (
        "--prompts=", "none.txt", "--threshold=3: thresholds are in", "did you mean -3?",
        "--attention=fast: ", "--steps=0: ", "--height=tall: ", "--geometry: 'big'",
        "--repeats=-1: ", "--layer-threshold: blocks.0: write PATTERN=THRESHOLD", "--retest=0: ",
        "--branches=both: ", "--device: 'abacus'", "unknown engine 'warp'",
        "--seeds=1,1: each only once", "--dtype=int8: ",
    ):  # fmt: skip
        assert part in text, f"{part!r} is missing in {text}"


@pytest.mark.parametrize("option", ["--model", "--height", "--frames"])
def test_a_time_limit_that_cannot_count_is_refused(app: typer.Typer, option: str) -> None:
    words = ["generate", option, "x", "--time-limit", "0", "--steps", "x"]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 2
    for part in (
        "--time-limit must be at least 1, got 0", "--time-limit chooses between sizes",
        "--steps=x: must be a whole number",
    ):  # fmt: skip
        assert part in outcome.stderr


@pytest.mark.parametrize("option", ["--threshold", "--budget"])
def test_generate_names_what_was_typed_once(app: typer.Typer, option: str) -> None:
    outcome = CliRunner().invoke(app, ["generate", option, "4", "--seed", "x"])
    assert outcome.exit_code == 2
    _, limit, seed = outcome.stderr.splitlines()
    assert re.fullmatch(rf" *{option}=4: .* did you mean (-4|0\.04)\?", limit)
    assert seed.startswith("  --seed=x: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": {"retest_every": "0"}}, "retest_every"),
        (
            {"policies": {"x": {"threshold": 1, "speed": 2}}},
            "x: threshold=1: .*did you mean -1.*speed=2: a policy has no such field",
        ),
        ({"policies": {"dense": {}}}, "two configurations would be called dense"),
        ({"prompts": []}, "at least one prompt"),
        ({"attention": "lite", "thresholds": ""}, "give at least one threshold, budget or policy"),
        ({"attention": ""}, "give at least one"),
        ({"seeds": f"1,{2**64}"}, f"seeds.1={2**64}: must be below {2**64}"),
        ({"budgets": "0.02,2"}, "did you mean 0.02"),
        ({"budgets": "0.1", "policy": {"soft_skip": "true"}}, "soft_skip needs a threshold"),
        ({"policy": {"layer_budgets": ["a=1.5"]}}, r"layer_budgets\.a=1\.5: .*did you mean 0\.015"),
        ({"policy": {"layer_budgets": ["a"]}}, "write PATTERN=BUDGET"),
        (
            {"budgets": "0.05", "policy": {"layer_thresholds": ["a=-3"]}},
            "--layer-threshold: no row has a threshold: give --threshold too, or leave it out",
        ),
        (
            {"policy": {"layer_budgets": ["a=0.1"]}},
            "--layer-budget: no row has a budget: give --budgets too, or leave it out",
        ),
        (
            {
                "attention": "dense",
                "thresholds": "-4",
                "policy": {"layer_thresholds": ["a=-3"], "layer_budgets": ["b=0.1"]},
            },
            r"--layer-threshold: no row .* add lite to --attention.*\n--layer-budget: .* add lite",
        ),
        (
            {"attention": "diffusers,dense", "thresholds": "-4"},
            "--threshold: no row has a threshold: add lite to --attention, or leave it out",
        ),
        (
            {"attention": "dense", "thresholds": "-inf,-8,-6,-4"},
            "--threshold: no row has a threshold",
        ),
        (
            {"attention": "dense", "budgets": "0.05"},
            "^--budgets: no row has a budget: add lite to --attention, or leave it out$",
        ),
        (
            {"attention": "diffusers", "policies": {"mine": {"threshold": -2}}},
            "^--policies: no row has a policy: add lite to --attention, or leave it out$",
        ),
        (
            {
                "attention": "dense",
                "budgets": "0.05",
                "policy": {"warmup_steps": "4", "retest_every": "2", "soft_skip": "false"},
            },
            "^--budgets: .*\n--dense-steps, --retest, --soft-skip: no row has a threshold or "
            "budget: add lite to --attention, or leave out$",
        ),
        (
            {
                "thresholds": "",
                "policies": {"mine": {"threshold": -2}},
                "policy": {"direction": "ascending"},
            },
            "^--direction: no row has a threshold or budget: give --threshold or --budgets too, or",
        ),
        ({"policies": {" ": {"threshold": -2}}}, "' ' is no name of a policy"),
        (
            {"negative_prompt": "a \udcff"},
            r"negative_prompt: 'a \\udcff' has characters that are no U",
        ),
        ({"prompts": ["a", "b \udcff"]}, r"prompts: 'b \\udcff' has characters that are no UTF-8"),
        ({"policies": {"\udcff": {"threshold": -2}}}, "policies: .* no UTF-8, so no report could"),
        (
            {"policy": {"layer_thresholds": ["\udcff=-2"]}},
            "policy: .* no UTF-8, so no report could",
        ),
        ({"steps": "99999999999999999999"}, "^steps=99999999999999999999: must be at most 1000$"),
        ({"repeats": 10**20, "frames": 10**20}, r"frames=1\d*: must be at most \d+\nrepeats="),
        (
            {"budgets": "0.1,,0.2"},
            "^budgets: .0.1,,0.2. has an empty item: leave the extra comma out",
        ),
        ({"seeds": "1,"}, "^seeds: .1,. has an empty item"),
        ({"short_steps": 5, "steps": 5}, "short_steps must be fewer than steps, got 5 and 5"),
    ],
)
def test_wrong_configurations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config({"model": "x", "prompts": ["p"], **options})


@pytest.mark.parametrize(
    "options", [{}, {"thresholds": ""}, {"budgets": ""}, {"policies": {}}, {"policy": {}}], ids=str
)
def test_defaults_of_lite_do_no_harm_without_it(options: dict[str, Any]) -> None:
    config = load_config({"model": "x", "prompts": ["p"], "attention": "dense", **options})
    assert [item.name for item in config.configurations()] == ["dense"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}", "has no policy: write NAME: FIELDS into it, or leave it out"),
        (b'{"a": {"threshold": -2}, "a": {"threshold": -3}}', "has 'a' several times: keep one"),
        (b'{"a": {"threshold": -2, "threshold": -3}}', "has 'threshold' several times: keep one"),
        (b'{"\\udcff": {"threshold": -2}}', "has characters that are no UTF-8"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is nested deeper than 64 levels"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "is nested deeper than 64 levels"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b'{"\xff": {}}', "is not UTF-8 (byte 2): save it as UTF-8"),
    ],
)
def test_policies_of_a_file_that_is_wrong(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "policies.json"
    file.write_bytes(text)
    with pytest.raises(ValueError) as error:
        load_config({"model": "x", "prompts": ["p"], "policies": str(file)})
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("prompts.txt", b"a \xff cat", "is not UTF-8 (byte 2): save it as UTF-8"),
        ("prompts.json", b"[" * 100_000 + b"]" * 100_000, "is nested deeper than 64 levels"),
        ("prompts.json", b'["a cat", "a \\ud800"]', r"'a \ud800' has characters that are no UTF-8"),
    ],
)
def test_prompts_that_no_report_could_name_are_refused(
    app: typer.Typer, tmp_path: Path, name: str, text: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(text)
    words = ["e2e", "--prompts", str(tmp_path / name), "--steps", "0", "--out", "x\udcff"]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 2 and message in outcome.stderr and "--steps=0" in outcome.stderr
    assert outcome.stderr.count("--out: ") == 1 and len(outcome.stderr.splitlines()) == 4
    outcome = CliRunner().invoke(app, ["generate", "a \udcff cat"])
    assert outcome.exit_code == 2
    assert r"PROMPT: 'a \udcff cat' has characters that are no UTF-8" in outcome.stderr


def test_everything_wrong_between_options_is_reported_at_once(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITEATTENTION_HIP_LIBRARY", "/nowhere/libhip.so")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat plays the piano")
    policies = tmp_path / "policies.json"
    policies.write_text(json.dumps({"mine": {"threshold": -2}}))
    outcome = CliRunner().invoke(
        app,
        ["e2e", "--prompts", str(prompts), "--attention", "dense", "--threshold", "-4",
         "--budgets", "0.1", "--policies", str(policies), "--layer-budget", "a=0.1", "--graphs",
         "--check-prompts", "--steps", "4", "--short-steps", "4", "--engine", "gfx942",
         "--dense-steps", "2", "--last-step", "3", "--geometry", "mi300x"],
    )  # fmt: skip
    assert outcome.exit_code == 2
    lines = [line.strip() for line in outcome.stderr.splitlines()[1:]]
    expected = (
        "--threshold: no row has a threshold: add lite",
        "--budgets: no row has a budget: add lite",
        "--policies: no row has a policy: add lite",
        "--layer-budget: no row has a budget: add lite",
        "--dense-steps, --last-step: no row has a threshold or budget: add lite",
        "check_prompts reads moving shapes, prompts of the small model: ",
        "graphs are CUDA's: device must be a GPU, got 'cpu'",
        "short_steps must be fewer than steps, got 4 and 4",
        "engine 'gfx942' cannot run here: ",
        "--geometry: no row has lists of tiles: add lite",
    )
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(beginning)


def test_a_row_without_limits_and_limits_without_a_row_are_both_reported() -> None:
    given = {"attention": "lite", "thresholds": "", "policy": {"layer_thresholds": ["a=-3"]}}
    with pytest.raises(ValueError) as error:
        load_config({"model": "x", "prompts": ["p"], **given})
    assert str(error.value).splitlines() == [
        "lite: give at least one threshold, budget or policy",
        "--layer-threshold: no row has a threshold: give --threshold too, or leave it out",
    ]


def test_models_and_sizes_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    from liteattention_e2e.runner import Runner

    base = {"prompts": ["a red circle moves left on a blue background"], "dtype": "float32"}
    with pytest.raises(ValueError, match="neither a directory nor OWNER/NAME"):
        Runner(load_config({**base, "model": "no-such-model"}))
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        Runner(load_config({**base, "model": str(tmp_path)}))
    with pytest.raises(ValueError) as error:
        Runner(load_config({**base, "model": str(model), "height": 33, "width": 18}))
    assert "height must be a multiple of 16" in str(error.value)
    assert "width must be a multiple of 16" in str(error.value)
    # Steps of the pipeline, 50, are known with the pipeline.
    with pytest.raises(ValueError, match="short_steps must be fewer than steps, got 50 and 50"):
        Runner(load_config({**base, "model": str(model), "short_steps": 50}))


def test_patterns_that_match_no_layer_are_refused_before_any_run(
    app: typer.Typer, model: Path, tmp_path: Path
) -> None:
    policies = tmp_path / "policies.json"
    mine = {"budget": 0.0, "layer_budgets": {"blocks.7.*": 0.1, "blocks.1.*": 0.1}}
    policies.write_text(json.dumps({"mine": mine}))
    options = {
        **SIZES, "--model": str(model), "--policies": str(policies), "--out": str(tmp_path / "out"),
        "--threshold": "-2,-4", "--budgets": "0.1", "--layer-threshold": "transformer.blocks.*=-9",
        "--layer-budget": "block.0.*=0.2",
    }  # fmt: skip
    arguments = [text for pair in options.items() for text in pair]
    outcome = CliRunner().invoke(app, ["e2e", *arguments])
    assert outcome.exit_code == 2, outcome.output
    lines = [line.strip() for line in outcome.stderr.splitlines()]
    for begin, pattern in (
        ("lite -2, lite -4: ", "'transformer.blocks.*' in layer_thresholds"),
        ("lite budget 0.1: ", "'block.0.*' in layer_budgets"),
        ("mine: ", "'blocks.7.*' in layer_budgets"),
    ):
        (line,) = (each for each in lines if each.startswith(begin))
        assert f"{pattern} (the layers are blocks.0.attn1 to blocks.1.attn1)" in line
    assert not (tmp_path / "out").exists()


def test_prompts_of_a_file_and_geometries(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("# shapes\n\n a red circle \na blue square\n")
    config = load_config({"model": "x", "prompts": str(file), "thresholds": "-inf,-1.5"})
    assert config.prompts == ("a red circle", "a blue square")
    assert config.thresholds == (-math.inf, -1.5)
    assert [each.slug for each in config.configurations()][-1] == "lite_-1.5"
    policy = {"layer_budgets": ["x=0.3"], "warmup_steps": "4"}
    both = load_config({"model": "x", "budgets": "0,0.05", "policy": policy})
    assert both.thresholds == ()
    assert [item.policy for item in both.configurations()][2:] == [
        SkipPolicy(budget=share, layer_budgets={"x": 0.3}, warmup_steps=4) for share in (0, 0.05)
    ]
    assert both.configurations()[-1].name == "lite budget 0.05"
    policy["layer_thresholds"] = ["x=-1"]
    more = load_config({"model": "x", "budgets": "0.05", "thresholds": "-3", "policy": policy})
    assert more.configurations()[-1].policy == both.configurations()[-1].policy
    assert [item.name for item in more.configurations()][2:] == ["lite -3", "lite budget 0.05"]
    steps = ((0.0, 0.3), (0.1, 0.3))
    by_head = load_config({"model": "x", "budgets": "0", "policy": {"layer_budgets": {"x": steps}}})
    assert by_head.configurations()[-1].policy == SkipPolicy(
        budget=0.0, layer_budgets={"x": steps}, warmup_steps=0
    )
    assert parse_geometry("cpu") is None
    assert parse_geometry("mi300x") == MI300X_GEOMETRY
    assert parse_geometry("64x64x8") == TileGeometry(64, 64, 8)


@pytest.mark.parametrize("text", ["[]", "{}", '{"artefacts": 1}', "[" * 100_000 + "]" * 100_000])
def test_a_report_of_something_else_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match="is not a report of this suite: name another folder"):
        artefacts.earlier_files(tmp_path)


def test_what_others_wrote_is_text_in_markdown(done: tuple[dict[str, Any], Path]) -> None:
    """Prompts, names and the command: a renderer shows them as they were typed."""
    printed = copy.deepcopy(done[0])
    prompt = "*a* <b>cat</b> | `x` [y](z) _w_ &amp; $5 # ~~no~~"
    printed["settings"] |= {"prompts": [prompt], "model": "/m/a|b_c_d*"}
    printed["environment"]["command"] = "liteattention-rocm e2e 'a `b` ``c``'"
    printed["configurations"][4]["name"] = "mine|*bold*"
    made = (
        MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(report.markdown(printed))
    )
    page = html.unescape(re.sub(r"<[^>]*>", "", made))
    assert prompt in page and "a|b_c_d*" in page and "mine|*bold*" in page
    assert printed["environment"]["command"] in page


def test_the_command_is_printed_as_a_shell_takes_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["/bin/liteattention-rocm", "generate", "a cat; rm -rf $HOME", "--out", "my folder"]
    monkeypatch.setattr("sys.argv", words)
    printed = suite.environment(three_steps(model))["command"]
    assert shlex.split(printed) == ["liteattention-rocm", *words[1:]]


def test_default_prompts_are_of_the_grammar_of_the_model() -> None:
    from liteattention_e2e.clips import parse_prompt
    from liteattention_e2e.config import read_prompts

    prompts = read_prompts(Path(cli.__file__).parents[1] / "prompts" / "shapes.txt")
    assert len(prompts) >= 4
    for prompt in [*prompts, cli.DEFAULT_PROMPT]:
        assert parse_prompt(prompt).prompt == prompt


def test_terminal_table_fits_80_columns(done: tuple[dict[str, Any], Path]) -> None:
    printed, _ = done
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(printed, "a title"))
    text = console.export_text()
    assert "lite -2" in text and "…" not in text


def test_a_contact_sheet_can_be_read_on_a_telephone_and_in_the_dark(tmp_path: Path) -> None:
    """An opaque dark card with transparent corners; capitals of 6 pixels and more at 360."""
    frames = np.full((8, 32, 32, 3), 128, np.uint8)
    long = "a red circle moves right and a green square moves up on a white background (seed 0)"
    strips = [(["lite budget 0.05", "31.0% of tiles skipped", "PSNR 39.3 dB"], frames)] * 2
    artefacts.contact_sheet(strips, tmp_path / "sheet.png", long)
    pixels = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGBA")).astype(int)
    assert pixels[0, 0, 3] == 0 and (pixels[20:-20, 20:-20, 3] == 255).all()
    assert pixels[10, pixels.shape[1] // 2, :3].max() < 60
    font = artefacts.ImageFont.load_default(25)
    top, bottom = (font.getbbox("H")[side] for side in (1, 3))
    assert (bottom - top) * 360 / pixels.shape[1] >= 6
    bright = (pixels[..., :3].min(-1) > 150).any(0).nonzero()[0]
    assert bright.min() >= 18 and bright.max() < pixels.shape[1] - 18  # no text is cut off
