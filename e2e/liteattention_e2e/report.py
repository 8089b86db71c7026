"""Write what a suite found: JSON, CSV, Markdown, plots, videos, contact sheets, skipped tiles.

Everything is derived from the data of :func:`liteattention_e2e.suite.summarise` and the frames.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich import box
from rich.table import Table

from liteattention_rocm import skiplist
from liteattention_rocm.files import replacing, set_aside, write_text

from .metrics import Frames, psnr
from .runs import Run
from .suite import Result, summarise

_PICTURES = ("contact_sheets", "skipped_tiles", "plots")
_SHOWN_FRAMES = 8
_LABEL_WIDTH = 190
_SHEET_SIDE = 128  # pixels a frame takes on the contact sheet, at least
_GOOD_PSNR = 30.0  # dB; drawn as a line to judge by
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
        self._started = False
        #: Where earlier results went, None if there were none.
        self.earlier: Path | None = None

    def add(self, made: Run) -> None:
        """Write video and frames of a run, and the report of what is there so far."""
        self._begin()
        self._keep(made)
        self._tables(summarise(self._result), {})

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
        return self._tables(report, pictures)

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
        _add_frames(self._out / _frames_name(made.prompt, made.seed), item.slug, made.frames)
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
            "contact_sheets": [],
            "skipped_tiles": [],
            "plots": [],
            **pictures,
            "csv": "report.csv",
            "markdown": "report.md",
        }
        write_text(self._out / "report.csv", _csv(report))
        write_text(self._out / "report.md", markdown(report))
        text = json.dumps(report, indent=1, allow_nan=False)
        write_text(self._out / "report.json", text + "\n")
        return report


def earlier_files(out: Path) -> list[str]:
    """Names of the files that an earlier run left in ``out``.

    Raises:
        ValueError: there is a ``report.json`` of something else.
    """
    names = ["report.json", "report.md", "report.csv"]
    file = out / "report.json"
    if not file.exists():
        return names
    try:
        artefacts = json.loads(file.read_text(encoding="utf-8"))["artefacts"]
        listed = [artefacts[key] for key in ("videos", "frames", *_PICTURES)]
        found = [str(name) for group in listed for name in group]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(file)!r} is not a report of this suite: name another folder"
        ) from error
    return names + [name for name in found if Path(name).name == name]


def _frames_name(prompt: int, seed: int) -> str:
    return f"frames_p{prompt}_s{seed}.npz"


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One flat row per configuration: what the CSV, the Markdown and the terminal table show."""
    found = []
    for item in report["configurations"]:
        seconds, quality, sparsity = item["seconds"], item["quality"], item["sparsity"]
        row: dict[str, Any] = {
            "configuration": item["name"],
            "denoise_s": seconds["denoise"]["median"],
            "denoise_min_s": seconds["denoise"]["min"],
            "denoise_max_s": seconds["denoise"]["max"],
            "step_s": float(np.median(seconds["per_step"])),
            "self_attention_s": None,
            "encode_s": seconds["encode"]["median"],
            "decode_s": seconds["decode"]["median"],
            "total_s": seconds["total"]["median"],
            "speedup_vs_dense": None,
            "speedup_vs_diffusers": None,
            "sparsity": None if sparsity is None else sparsity["mean"],
            "sparsity_last_step": None if sparsity is None else sparsity["last_step"],
            "peak_memory_mib": None,
            "repeats_bit_equal": item["repeats_bit_equal"],
        }
        if item["peak_memory_bytes"] is not None:
            row["peak_memory_mib"] = item["peak_memory_bytes"] / 2**20
        if seconds["self_attention"] is not None:
            row["self_attention_s"] = seconds["self_attention"]["median"]
        for reference in ("dense", "diffusers"):
            speedup = item["speedup"][f"vs_{reference}"]
            row[f"speedup_vs_{reference}"] = None if speedup is None else speedup["median"]
            against = quality[f"vs_{reference}"] or {}
            row[f"psnr_vs_{reference}_db"] = against.get("psnr_db_mean")
            row[f"psnr_vs_{reference}_min_db"] = against.get("psnr_db_min")
            row[f"ssim_vs_{reference}"] = against.get("ssim_mean")
            row[f"identical_to_{reference}"] = against.get("identical")
        found.append(row)
    return found


_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("configuration", "attention", "{}"),
    ("sparsity", "sparsity", "{:.1%}"),
    ("sparsity_last_step", "last step", "{:.1%}"),
    ("denoise_s", "denoise s", "{:.2f}"),
    ("step_s", "step s", "{:.3f}"),
    ("self_attention_s", "self-attention s", "{:.2f}"),
    ("total_s", "total s", "{:.2f}"),
    ("speedup_vs_dense", "speed-up vs dense", "{:.2f}x"),
    ("speedup_vs_diffusers", "vs diffusers", "{:.2f}x"),
    ("psnr_vs_dense_db", "PSNR vs dense", "{:.1f} dB"),
    ("psnr_vs_dense_min_db", "worst", "{:.1f} dB"),
    ("ssim_vs_dense", "SSIM", "{:.4f}"),
    ("psnr_vs_diffusers_db", "PSNR vs diffusers", "{:.1f} dB"),
    ("peak_memory_mib", "peak MiB", "{:.0f}"),
)


#: The columns that fit a terminal of 80 characters, under short names.
_TERMINAL = {
    "configuration": "attention",
    "sparsity": "sparsity",
    "denoise_s": "denoise s",
    "total_s": "total s",
    "speedup_vs_dense": "vs dense",
    "speedup_vs_diffusers": "vs diffusers",
    "psnr_vs_dense_db": "PSNR",
}


def _columns(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Columns of the tables: no seconds side by side where they are an emulator's."""
    emulated = report["settings"]["emulated"]
    return [column for column in _COLUMNS if not (emulated and column[0].endswith("_s"))]


def _cells(row: dict[str, Any], columns: list[tuple[str, str, str]]) -> list[str]:
    cells = []
    for key, _, form in columns:
        value = row[key]
        if value is None and key.startswith("psnr") and row[f"identical_to_{key.split('_')[2]}"]:
            cells.append("equal")
        else:
            cells.append("" if value is None else form.format(value))
    return cells


def table(report: dict[str, Any], title: str) -> Table:
    """The comparison for the terminal, PSNR against dense; empty columns are left out."""
    columns = _columns(report)
    listed = [_cells(row, columns) for row in rows(report)]
    shown = [
        i
        for i, (key, _, _) in enumerate(columns)
        if key in _TERMINAL and any(cells[i] for cells in listed)
    ]
    made = Table(title=title, box=box.SIMPLE)
    for i in shown:
        made.add_column(_TERMINAL[columns[i][0]], justify="left" if i == 0 else "right")
    for cells in listed:
        made.add_row(*(cells[i] for i in shown))
    return made


def markdown(report: dict[str, Any]) -> str:
    """The report for people: what ran where, the table, per layer and branch, the pictures."""
    settings, machine = report["settings"], report["environment"]
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    columns = _columns(report)
    tile = settings["geometry"]
    tile_text = "unknown" if tile is None else f"{tile['q_block']} x {tile['k_block']}"
    processor = f"{machine['cpu']}, {machine['threads']} threads"
    if machine["isa"]:
        processor += f", {machine['isa']}"
    lines = [
        f"# Generation time and quality: {Path(settings['model']).name}",
        "",
        f"{settings['width']} x {settings['height']} x {settings['frames']} frames, "
        f"{settings['tokens']:,} tokens, {settings['steps']} steps, guidance "
        f"{settings['guidance']:g}, {machine['dtype']}; {len(settings['prompts'])} prompts, "
        f"seeds {', '.join(map(str, settings['seeds']))}, {settings['repeats']} repeats "
        f"(medians; configurations interleaved). Tiles of {tile_text}.",
        "",
        *unfinished(report),
        f"- Processor: {processor}",
        *([f"- GPU: {machine['gpu']}"] if machine["gpu"] else []),
        f"- Versions: Python {machine['python']}, {packages}",
        f"- Commit: {machine['commit'] or 'not in a git checkout'}",
        f"- Command: `{machine['command']}`",
        *(f"- {note}" for note in report["notes"]),
        f"- Model loaded in {report['load_seconds']:.1f} s, once for all configurations.",
        "",
        "| " + " | ".join(title for _, title, _ in columns) + " |",
        "|" + "|".join(["---", *["---:"] * (len(columns) - 1)]) + "|",
        *("| " + " | ".join(_cells(row, columns)) + " |" for row in rows(report)),
        "",
        "Sparsity is the share of tiles that were not computed, over all steps, layers and "
        "branches. PSNR and SSIM compare 8-bit frames (mean over videos that differ; *worst* is "
        "the smallest)."
        + (
            ""
            if settings["emulated"]
            else " *self-attention s* is the time inside self-attention modules, projections and "
            "rotary embedding included."
        ),
    ]
    sparse = [item for item in report["configurations"] if item["sparsity"] is not None]
    if sparse:
        layers = list(sparse[0]["sparsity"]["by_layer"])
        branches = list(sparse[0]["sparsity"]["by_branch"])
        lines += [
            "",
            "## Sparsity by layer and branch",
            "",
            "| attention | " + " | ".join([*layers, *branches]) + " |",
            "|---|" + "---:|" * (len(layers) + len(branches)),
        ]
        for item in sparse:
            cells = [f"{item['sparsity']['by_layer'].get(name, 0):.1%}" for name in layers]
            cells += [f"{item['sparsity']['by_branch'].get(name, 0):.1%}" for name in branches]
            lines.append(f"| {item['name']} | " + " | ".join(cells) + " |")
    pictures = [
        *report["artefacts"]["contact_sheets"],
        *report["artefacts"]["plots"],
        *report["artefacts"]["skipped_tiles"],
    ]
    lines += ["", "## Pictures", "", *(f"![{name}]({name})" for name in pictures)]
    return "\n".join(lines) + "\n"


def unfinished(report: dict[str, Any]) -> list[str]:
    """Lines of the report that say that it is incomplete; none if it is not."""
    if report["complete"]:
        return []
    done, planned = report["runs_done"], report["runs_planned"]
    return [f"**Incomplete: {done} of {planned} runs were made.**", ""]


def _csv(report: dict[str, Any]) -> str:
    listed = rows(report)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(listed[0]))
    writer.writeheader()
    writer.writerows(listed)
    return text.getvalue()


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
            output_params=["-crf", "16", "-preset", "medium"],
            ffmpeg_log_level="error",
        )
        writer.send(None)
        for frame in large:
            writer.send(np.ascontiguousarray(frame))
        writer.close()


def _add_frames(path: Path, name: str, frames: Frames) -> None:
    """Add lossless frames, from which PSNR and SSIM can be derived again, to an ``.npz``."""
    with replacing(path) as part:
        if path.exists():
            shutil.copyfile(path, part)
        with (
            zipfile.ZipFile(part, "a", zipfile.ZIP_DEFLATED) as archive,
            archive.open(f"{name}.npy", "w", force_zip64=True) as file,
        ):
            np.lib.format.write_array(file, frames, allow_pickle=False)


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
            if not result.config.emulated:
                label.append(f"denoise {run.denoise:.1f} s")
            if row["sparsity"] is not None:
                total = sum(record["tiles_total"] for record in run.skips)
                computed = sum(record["tiles_computed"] for record in run.skips)
                label.append(f"sparsity {1 - computed / total:.1%}")
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
    """Draw one row per configuration: its label, then up to eight frames from first to last."""
    shown = min(_SHOWN_FRAMES, strips[0][1].shape[0])
    picks = np.linspace(0, strips[0][1].shape[0] - 1, shown).round().astype(int)
    height, width = strips[0][1].shape[1:3]
    scale = max(1, _SHEET_SIDE // height) if height < _SHEET_SIDE else _SHEET_SIDE / height
    cell = (round(width * scale), round(height * scale))
    gap, head = 4, 40
    sheet = Image.new(
        "RGB",
        (_LABEL_WIDTH + shown * (cell[0] + gap), head + len(strips) * (cell[1] + gap)),
        "white",
    )
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(14)
    draw.text((8, 4), title, fill="black", font=font)
    for column, pick in enumerate(picks):
        x = _LABEL_WIDTH + column * (cell[0] + gap)
        draw.text((x, 22), f"frame {pick}", fill="#555555", font=ImageFont.load_default(12))
    for line, (label, frames) in enumerate(strips):
        y = head + line * (cell[1] + gap)
        for number, text in enumerate(label):
            draw.text(
                (8, y + 4 + 19 * number),
                text,
                fill="black" if number == 0 else "#444444",
                font=font,
            )
        for column, pick in enumerate(picks):
            frame = Image.fromarray(frames[pick]).resize(
                cell, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS
            )
            sheet.paste(frame, (_LABEL_WIDTH + column * (cell[0] + gap), y))
    with replacing(path) as part:
        sheet.save(part)


def _skipped_tiles(result: Result, out: Path) -> list[str]:
    names = []
    for configuration in result.configurations:
        tiles = result.runner.tiles.get(configuration.name)
        if tiles is None:
            continue
        name = f"skipped_tiles_{configuration.slug}.png"
        title = f"{configuration.name}: {tiles.layer}, {tiles.branch}, after the last step"
        with replacing(out / name) as part:
            skiplist.picture(tiles.kept, part, title=title)
        names.append(name)
    return names


def _plots(result: Result, report: dict[str, Any], out: Path) -> list[str]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def chart(x: str, y: str, title: str) -> tuple[Any, Any]:
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        axis.set(xlabel=x, ylabel=y, title=title)
        axis.grid(alpha=0.3)
        return figure, axis

    names = []

    def save(figure: Any, name: str) -> None:
        with replacing(out / name) as part:
            figure.savefig(part, dpi=130)
        names.append(name)

    items = report["configurations"]
    timed = not report["settings"]["emulated"]  # nobody compares an emulator's seconds
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

    slugs = {item.name: item.slug for item in result.configurations}
    for item in sparse:
        runs = [
            {**record, "generation": index}
            for index, run in enumerate(report["runs"])
            if run["configuration"] == item["name"] and run["repeat"] == 0
            for record in run["sparsity"]
        ]
        if runs:
            name = f"sparsity_by_layer_{slugs[item['name']]}.png"
            statistics = skiplist.SkipStatistics.from_records(runs)
            title = f"{item['name']}: skipped tiles by layer and step"
            with replacing(out / name) as part:
                skiplist.picture_by_step(statistics, part, title=title)
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
