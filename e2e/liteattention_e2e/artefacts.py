"""The files of a suite, written while it runs: videos, frames, pictures, and the report of them."""

from __future__ import annotations

import json
import shutil
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from liteattention_rocm import json_text
from liteattention_rocm.cli.files import replacing, set_aside, write_text
from liteattention_rocm.lite.picture import as_card, draw_steps, draw_tiles
from liteattention_rocm.lite.statistics import SkipStatistics

from . import page
from .metrics import Frames, psnr
from .report import markdown, rows, to_csv
from .runs import Run
from .suite import Result, summarise

_PICTURES = ("contact_sheets", "skipped_tiles", "plots")
#: The report as a page, written once, at the end: it holds the videos.
HTML = "report.html"
_SHOWN_FRAMES = 4
# Of the contact sheet, in pixels; and its colours.
_CELL, _GAP, _MARGIN = 176, 8, 20
_CARD, _INK, _QUIET = "#161b23", "#e7eaf0", "#9ba6b6"
_GOOD_PSNR = 30.0  # dB; drawn as a line to judge by
#: Most of a suite's time that goes into writing its report again and again, as one over it.
_REPORT_SHARE = 10
_VIDEO_SIDE = 384  # small videos are enlarged by a whole factor to about this height


class Writer:
    """Writes the files of a suite while it runs, so that one that is stopped keeps what it made.

    Earlier results in the folder are moved aside before the first file is written. Every file is
    whole or not there.

    Owner: a suite. Lifetime: the suite's.
    """

    def __init__(self, result: Result, out: Path) -> None:
        self._result = result
        self._out = out
        self._videos: set[str] = set()
        self._stored: set[tuple[str, int, int]] = set()
        self._tiles: set[str] = set()
        self._lists = page.Lists()
        self._started = False
        self._next_report = 0.0
        #: Where earlier results went, None if there were none.
        self.earlier: Path | None = None

    def add(self, made: Run) -> None:
        """Write video and frames of a run, and the report of what is there so far.

        The report of many runs takes long, so it may be left to one of the next runs.
        """
        self._begin()
        self._keep(made)
        start = time.monotonic()
        if start >= self._next_report:
            self._tables(summarise(self._result), {})
            end = time.monotonic()
            self._next_report = end + _REPORT_SHARE * (end - start)

    def finish(self) -> dict[str, Any]:
        """Write what is still to be written, pictures included, and return the report."""
        self._begin()
        for made in self._result.runs:
            self._keep(made)
        result, out = self._result, self._out
        report = summarise(result)
        pictures = {
            "contact_sheets": _contact_sheets(result, report, out),
            "skipped_tiles": _skipped_tiles(result, out),
            "plots": _plots(result, report, out),
        }
        report = self._tables(report, pictures)
        report["artefacts"]["html"] = HTML
        write_text(out / HTML, page.to_html(report, out, slugs(result), self._lists))
        _write_json(report, out)
        return report

    def _begin(self) -> None:
        if not self._started:
            self.earlier = set_aside(self._out, earlier_files(self._out))
            self._started = True

    def _keep(self, made: Run) -> None:
        item = next(x for x in self._result.configurations if x.name == made.configuration)
        key = (item.slug, made.prompt, made.seed)
        if made.repeat or key in self._stored:
            return
        name = f"{item.slug}_p{made.prompt}_s{made.seed}.mp4"
        if name not in self._videos:
            write_mp4(made.frames, self._out / name, self._result.config.fps)
            self._videos.add(name)
        frames = self._out / _frames_name(made.prompt, made.seed)
        # Lossless, so that PSNR and SSIM can be derived again.
        _add_arrays(frames, {item.slug: made.frames})
        if made.tiles:
            tiles = _tiles_name(made.prompt, made.seed)
            stored = {
                f"{item.slug}/{name}": array
                for each in made.tiles
                for name, array in each.arrays().items()
            }
            _add_arrays(self._out / tiles, stored)
            self._tiles.add(tiles)
            self._lists.add(made)
            made.tiles = ()
        self._stored.add(key)

    def _tables(self, report: dict[str, Any], pictures: dict[str, list[str]]) -> dict[str, Any]:
        result = self._result
        names = (
            f"{item.slug}_p{prompt}_s{seed}.mp4"
            for item in result.configurations
            for prompt, seed in result.cases
        )
        stored = {(prompt, seed) for _, prompt, seed in self._stored}
        report["artefacts"] = {
            "videos": [name for name in names if name in self._videos],
            "frames": [_frames_name(*case) for case in result.cases if case in stored],
            "tiles": [name for case in result.cases if (name := _tiles_name(*case)) in self._tiles],
            "contact_sheets": [],
            "skipped_tiles": [],
            "plots": [],
            **pictures,
            "csv": "report.csv",
            "markdown": "report.md",
            "html": None,
        }
        write_text(self._out / "report.csv", to_csv(report))
        write_text(self._out / "report.md", markdown(report))
        _write_json(report, self._out)
        return report


def slugs(result: Result) -> dict[str, str]:
    """What the configurations are called in file names, by name."""
    return {item.name: item.slug for item in result.configurations}


def _write_json(report: dict[str, Any], out: Path) -> None:
    text = json.dumps(report, indent=1, allow_nan=False)
    write_text(out / "report.json", text + "\n")


#: What a run that was killed may have left beside its last report.
_LEFT = ("frames_p*_s*.npz", "tiles_p*_s*.npz", "*_p*_s*.mp4")


def earlier_files(out: Path) -> list[str]:
    """Names of the files that an earlier run left in ``out``, its report's or not.

    Raises:
        ValueError: there is a ``report.json`` of something else.
    """
    names = ["report.json", "report.md", "report.csv", HTML]
    names += sorted(path.name for pattern in _LEFT for path in out.glob(pattern))
    file = out / "report.json"
    if not file.exists():
        return names
    try:
        artefacts = json_text.read(file)["artefacts"]
        # Version 0.1 kept no tiles.
        listed = [artefacts[key] for key in ("videos", "frames", *_PICTURES)]
        listed.append(artefacts.get("tiles", []))
        found = [str(name) for group in listed for name in group]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(file)!r} is not a report of this suite: name another folder"
        ) from error
    return list(dict.fromkeys(names + [name for name in found if Path(name).name == name]))


def _frames_name(prompt: int, seed: int) -> str:
    return f"frames_p{prompt}_s{seed}.npz"


def _tiles_name(prompt: int, seed: int) -> str:
    return f"tiles_p{prompt}_s{seed}.npz"


def write_mp4(frames: Frames, path: Path, fps: int) -> None:
    """Encode uint8 frames [F, H, W, 3] as H.264, small ones enlarged by a whole factor."""
    import imageio_ffmpeg

    factor = max(1, _VIDEO_SIDE // frames.shape[1])
    large = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = large.shape[1:3]
    with replacing(path) as part:
        writer = imageio_ffmpeg.write_frames(
            str(part),
            (width, height),
            fps=fps,
            codec="libx264",
            quality=None,
            macro_block_size=2,
            # A player that goes frame by frame seeks: from the last key frame on.
            output_params=["-crf", "16", "-preset", "medium", "-g", "12"],
            ffmpeg_log_level="error",
        )
        writer.send(None)
        for frame in large:
            writer.send(np.ascontiguousarray(frame))
        writer.close()


def _add_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Add arrays to an ``.npz``, which is made if it is not there."""
    with replacing(path) as part:
        if path.exists():
            shutil.copyfile(path, part)
        with zipfile.ZipFile(part, "a", zipfile.ZIP_DEFLATED) as archive:
            there = set(archive.namelist())  # of an attempt that did not store all
            for name, array in arrays.items():
                if f"{name}.npy" in there:
                    continue
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)


def _contact_sheets(result: Result, report: dict[str, Any], out: Path) -> list[str]:
    names = []
    figures = {row["configuration"]: row for row in rows(report)}
    for prompt, seed in result.cases:
        strips = []
        for configuration in result.configurations:
            run = result.first(configuration.name, prompt, seed)
            if run is None:
                continue
            row = figures[configuration.name]
            label = [configuration.name]
            if not result.config.emulated and not report["load"]["verdict"]:
                label.append(f"denoise {run.denoise:.1f} s")
            if row["sparsity"] is not None:
                total = sum(record["tiles_total"] for record in run.skips)
                computed = sum(record["tiles_computed"] for record in run.skips)
                # A policy that is off counts no tiles.
                label.append(f"{1 - computed / total if total else 0:.1%} of tiles skipped")
            dense = result.reference(configuration, "dense")
            base = None if dense is None else result.first(dense, prompt, seed)
            if base is not None and configuration.name != dense:
                ratio = psnr(run.frames, base.frames)
                label.append("equals dense" if np.isinf(ratio) else f"PSNR {ratio:.1f} dB")
            strips.append((label, run.frames))
        if not strips:
            continue
        name = f"contact_sheet_p{prompt}_s{seed}.png"
        contact_sheet(
            strips, out / name, f"{result.config.prompts[prompt]} (seed {seed}; PSNR against dense)"
        )
        names.append(name)
    return names


def contact_sheet(strips: Sequence[tuple[Sequence[str], Frames]], path: Path, title: str) -> None:
    """Draw a strip of four frames for each configuration, its label above it, on a dark card.

    Letters are so large that they can be read where the picture is 360 pixels wide, and a dark
    card suits pages of either colour; its corners are transparent.
    """
    shown = min(_SHOWN_FRAMES, strips[0][1].shape[0])
    picks = np.linspace(0, strips[0][1].shape[0] - 1, shown).round().astype(int)
    height, width = strips[0][1].shape[1:3]
    cell = (_CELL, round(_CELL * height / width))
    inside = shown * (cell[0] + _GAP) - _GAP
    whole = max(inside, 4 * (_CELL + _GAP) - _GAP)  # so that labels have room
    large, small = ImageFont.load_default(28), ImageFont.load_default(25)
    heading = _lines(title, small, whole)
    labels = [_lines(", ".join(label), large, whole) for label, _ in strips]
    line = 34
    body = sum(line * len(label) + cell[1] + 2 * _GAP for label in labels)
    size = (whole + 2 * _MARGIN, 2 * _MARGIN + line * len(heading) + _GAP + body)
    sheet = Image.new("RGBA", size, (0, 0, 0, 0))
    draw = ImageDraw.Draw(sheet)
    draw.rounded_rectangle((0, 0, size[0] - 1, size[1] - 1), 16, fill=_CARD)
    y = _MARGIN

    def write(lines: Sequence[str], font: Any, fill: str) -> None:
        nonlocal y
        for text in lines:
            draw.text((_MARGIN, y), text, fill=fill, font=font)
            y += line

    write(heading, small, _QUIET)
    y += _GAP
    for label, (_, frames) in zip(labels, strips, strict=True):
        write(label, large, _INK)
        for column, pick in enumerate(picks):
            enlarged = cell[0] >= width
            frame = Image.fromarray(frames[pick]).resize(
                cell, Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
            )
            sheet.paste(frame, (_MARGIN + column * (cell[0] + _GAP), y + 2))
        y += cell[1] + 2 * _GAP
    with replacing(path) as part:
        sheet.save(part, optimize=True)


def _lines(text: str, font: Any, width: int) -> list[str]:
    """Break a text between words where it is wider than ``width`` pixels."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _skipped_tiles(result: Result, out: Path) -> list[str]:
    names = []
    for configuration in result.configurations:
        tiles = result.runner.tiles.get(configuration.name)
        if tiles is None:
            continue
        name = f"skipped_tiles_{configuration.slug}.png"
        title = f"{configuration.name}: {tiles.layer}, {tiles.branch}, after the last step"
        with replacing(out / name) as part:
            draw_tiles(tiles.kept, part, title=title)
        names.append(name)
    return names


def _plots(result: Result, report: dict[str, Any], out: Path) -> list[str]:
    from matplotlib.figure import Figure

    def chart(x: str, y: str, title: str) -> tuple[Any, Any]:
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axis = figure.subplots()
        axis.set(xlabel=x, ylabel=y, title=title)
        axis.grid(alpha=0.3)
        return figure, axis

    names = []

    def save(figure: Any, name: str) -> None:
        with replacing(out / name) as part:
            as_card(figure)
            figure.savefig(part, dpi=130)
        names.append(name)

    items = report["configurations"]
    # Nobody compares an emulator's seconds, or those that load made.
    timed = not report["settings"]["emulated"] and not report["load"]["verdict"]
    if timed:
        figure, axis = chart("step", "seconds", "Time per denoising step (median)")
        for item in items:
            axis.plot(item["seconds"]["per_step"], label=item["name"], marker=".")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
        save(figure, "time_per_step.png")

    sparse = [item for item in items if item["sparsity"] is not None]
    if sparse:
        figure, axis = chart("step", "skipped tiles, %", "Sparsity by step")
        for item in sparse:
            axis.plot(
                [100 * value for value in item["sparsity"]["by_step"]],
                label=item["name"],
                marker=".",
            )
        axis.set_ylim(0, None)
        axis.legend(fontsize=8)
        save(figure, "sparsity_by_step.png")

    named = slugs(result)
    for item in sparse:
        runs = [
            {**record, "generation": index}
            for index, run in enumerate(report["runs"])
            if run["configuration"] == item["name"] and run["repeat"] == 0
            for record in run["sparsity"]
        ]
        if runs:
            name = f"sparsity_by_layer_{named[item['name']]}.png"
            statistics = SkipStatistics.from_records(runs)
            title = f"{item['name']}: skipped tiles by layer and step"
            with replacing(out / name) as part:
                draw_steps(statistics, part, title=title)
            names.append(name)

    points = [
        (item["seconds"]["denoise"]["median"], item["quality"]["vs_dense"]["psnr_db_mean"], item)
        for item in sparse
        if item["quality"]["vs_dense"] and item["quality"]["vs_dense"]["psnr_db_mean"] is not None
    ]
    if points and timed:
        figure, axis = chart(
            "denoise seconds (median)", "PSNR against dense, dB", "Quality against time"
        )
        axis.plot([x for x, _, _ in points], [y for _, y, _ in points], "o")
        for x, y, item in points:
            axis.annotate(item["name"], (x, y), textcoords="offset points", xytext=(5, 4))
        for item in items:
            if item["kind"] != "lite":
                x = item["seconds"]["denoise"]["median"]
                axis.axvline(x, linestyle="--", color="#999999")
                axis.annotate(
                    item["name"],
                    (x, 0.97),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    xytext=(-11, 0),
                    rotation=90,
                    va="top",
                )
        axis.axhline(_GOOD_PSNR, color="#cc4444", linewidth=0.8)
        axis.margins(x=0.12, y=0.1)
        save(figure, "quality_against_time.png")
    return names
