"""``liteattention-rocm bench video``: a Wan transformer with random weights, on a CPU."""

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

pytest.importorskip("diffusers", reason="diffusers is not installed (extra: diffusers)")

from liteattention_benchmark import cli, video
from liteattention_rocm import SkipPolicy, TileGeometry
from liteattention_rocm.lite import bitmap

CPU = torch.device("cpu")
CONFIGS = Path(video.__file__).parent / "configs"


@pytest.fixture(scope="module")
def smoke() -> video.Config:
    return video.load(CONFIGS / "wan-smoke.yaml")


def test_a_configuration_has_something_to_measure() -> None:
    for instead, message in (
        ({"attention": ()}, "name one contender at least"),
        ({"attention": ("lite",), "sparsity": ()}, "lite: give at least one sparsity"),
    ):
        with pytest.raises(ValidationError, match=message):
            video.load(CONFIGS / "wan-smoke.yaml", **instead)


def test_the_exact_sizes_of_the_model() -> None:
    config = video.load(CONFIGS / "wan2.1-1.3b.yaml")
    assert config.tokens == 32760 and config.steps == 20
    pipe = video.pipeline(config, torch.device("meta"))
    count = sum(p.numel() for p in pipe.transformer.parameters())
    assert count == 1_418_996_800  # that of Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    kinds = {p.dtype for p in pipe.transformer.parameters()}
    assert kinds == {torch.bfloat16, torch.float32}
    assert pipe.transformer.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert pipe.transformer.blocks[0].scale_shift_table.dtype == torch.float32


def test_every_contender_denoises_and_leaves_out_what_it_was_told_to(smoke: video.Config) -> None:
    rows = video.run(smoke, CPU)
    assert [row.contender for row in rows] == [
        "diffusers' default",
        "ours, dense",
        "ours, lite 50%",
    ]
    for row in rows:
        assert row.finite and not row.absent and row.seconds is not None
        assert len(row.steps) == smoke.steps
        assert sum(row.steps) == pytest.approx(row.seconds, rel=0.01)
    assert rows[2].skipped == pytest.approx(0.5) and rows[2].asked == 0.5
    assert rows[0].skipped is None and rows[1].skipped is None


def test_dense_contenders_make_the_same_latents_and_lite_others(
    smoke: video.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.Tensor] = []
    real = torch.isfinite

    def keep(latents: torch.Tensor) -> torch.Tensor:
        if latents.dim() == 5:
            found.append(latents.clone())
        return real(latents)

    monkeypatch.setattr(torch, "isfinite", keep)
    pipe = video.pipeline(smoke, CPU)
    lists = video.Lists(smoke, CPU)
    before = [
        m.processor._attention_backend
        for m in pipe.transformer.modules()
        if hasattr(m, "processor")
    ]
    for name, sparsity in (("default", None), ("dense", None), ("lite", 0.0), ("lite", 0.5)):
        one = video.Contender(name, sparsity)
        with video.attention(pipe, one, lists) as handle:
            video.denoise(pipe, smoke, CPU, one, 2, handle)
    after = [
        m.processor._attention_backend
        for m in pipe.transformer.modules()
        if hasattr(m, "processor")
    ]
    assert before == after
    base, dense, whole, half = (x.double() for x in found)

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm())

    assert distance(dense, base) < 0.02 and distance(whole, base) < 0.02
    # random weights attend evenly: half of the tiles is almost as good as all
    assert distance(half, whole) > 0.005 > 2 * distance(dense, whole)


def test_peak_memory_is_without_the_lists_of_the_benchmark(
    smoke: video.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that counts what is there: the model, the lists, what a contender takes."""
    model, own, tile = 1 << 30, 1 << 20, TileGeometry(128, 64, 32)
    made: list[video.Lists] = []

    class Lists(video.Lists):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    def denoise(_: Any, config: Any, device: Any, one: video.Contender, *more: Any) -> video.Row:
        (lists,) = made
        if one.sparsity is not None:
            lists.of("blocks.0", one.sparsity, tile)
            lists.of("blocks.1", one.sparsity, tile)
        there = sum(-(-one.nbytes // 512) * 512 for one in lists._made.values())
        return video.Row(one.title, 1.0, (1.0,), None, None, True, model + own + there)

    monkeypatch.setattr(video, "Lists", Lists)
    monkeypatch.setattr(video, "denoise", denoise)
    monkeypatch.setattr(video, "pipeline", lambda *_: None)
    monkeypatch.setattr(video, "attention", lambda *_: contextlib.nullcontext())
    config = smoke.model_copy(update={"attention": ("dense", "lite"), "sparsity": (0.25, 0.5)})
    rows = video.run(config, torch.device("cpu"))
    assert {row.peak_bytes for row in rows} == {model + own}
    assert made[0].nbytes >= 4 * 512


def test_tiles_that_are_dropped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of eight tiles, none of which a guard keeps."""

    def dropping(**fields: Any) -> SkipPolicy:
        if "threshold" in fields:
            return SkipPolicy(budget=0.5, warmup_steps=0)
        return SkipPolicy(**fields)

    monkeypatch.setattr(video, "SkipPolicy", dropping)
    large = video.load(CONFIGS / "wan-smoke.yaml", height=256, width=256)
    with pytest.raises(RuntimeError, match=r"computed \d+ tiles and kept \d+"):
        video.run(large, CPU)


def test_a_contender_that_cannot_run_is_a_line(
    smoke: video.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Any:
        raise video.Unavailable("no compiler")

    monkeypatch.setattr(video, "compiled_flex", refuse)
    rows = video.run(smoke.model_copy(update={"attention": ("default", "flex")}), CPU)
    assert rows[1].absent == "no compiler" and rows[1].seconds is None
    text = video.to_markdown(smoke, rows, {}, "command")
    assert "- FlexAttention: no compiler" in text and "| FlexAttention" not in text


def test_compiled_blocks_are_rows_of_their_own(
    smoke: video.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    short = smoke.model_copy(update={"attention": ("default", "lite"), "steps": 1})
    rows = video.run(short, CPU, compiled=(False, True))
    assert [row.contender for row in rows] == [
        "diffusers' default",
        "ours, lite 50%",
        "diffusers' default, compiled",
        "ours, lite 50%, compiled",
    ]
    assert all(row.finite and not row.absent for row in rows)
    assert [row.compiled for row in rows] == [False, False, True, True]
    assert rows[3].skipped == pytest.approx(0.5)


def test_some_layers_stand_for_all() -> None:
    config = video.load(CONFIGS / "wan2.1-14b.yaml", layers=4, attention=["dense"], steps=3)
    assert (config.tokens, config.transformer.layers, config.steps) == (32760, 4, 3)
    assert "4 of 40 layers, which stand for all, 40 heads x 128" in video.describe(config)
    assert video.load(CONFIGS / "wan2.1-14b-720p.yaml").tokens == 75600
    assert "40 layers, 40 heads" in video.describe(video.load(CONFIGS / "wan2.1-14b.yaml"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITEATTENTION_COMMIT", "0123456789ab")
    arguments = ["video", "--config", "wan-smoke", "--steps", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "video.md").read_text()
    assert "`liteattention-rocm bench video --config wan-smoke --steps 1`" in text
    assert "commit 0123456789ab," in text and "256 tokens" in text
    report = json.loads((tmp_path / "video.json").read_text())
    assert report["config"]["steps"] == 1
    assert [row["contender"] for row in report["rows"]][-1] == "ours, lite 50%"


def test_configurations_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("transformer: {layers: 0}\nheight: 100\nattention: [fast]\nspeed: 1\n")
    with pytest.raises(ValidationError) as caught:
        video.load(path)
    wrong = {".".join(map(str, e["loc"])) for e in caught.value.errors()}
    assert {"transformer.layers", "transformer.heads", "height", "attention.0", "speed"} <= wrong
    result = CliRunner().invoke(cli.app, ["video", "--config", str(path)])
    assert result.exit_code == 2


def test_lists_differ_by_layer(smoke: video.Config) -> None:
    lists = video.Lists(smoke, CPU)
    from liteattention_rocm import TileGeometry

    tile = TileGeometry(32, 32, 32)
    a, b = (lists.of(name, 0.5, tile) for name in ("one", "two"))
    assert not torch.equal(a, b) and int(bitmap.count(a)) == 128
    assert lists.of("one", 0.5, tile) is a
