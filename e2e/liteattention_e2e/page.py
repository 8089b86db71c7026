"""The report of a suite as one HTML page: videos in step, settings, maps of skipped tiles, tables.

Every figure comes from the data of :func:`liteattention_e2e.suite.summarise`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from liteattention_report import (
    Cell,
    Chart,
    Series,
    Table,
    base64_text,
    chart,
    figure_cells,
    ratio_cells,
    render,
    size_text,
    text_cells,
)
from liteattention_rocm.cli import tables
from liteattention_rocm.lite.statistics import SkipStatistics

from .report import cells_of, columns_of, load_lines, rows, sparsity_names, turns_text
from .runs import Run

#: Bytes of videos that a page holds; more are linked. In base64 they take a third more.
VIDEO_LIMIT = 16 << 20
#: Bytes of packed bitmaps that a page holds; those of later runs are left out.
TILE_LIMIT = 5 << 20

_CARDS = (
    ("psnr", "PSNR to dense"),
    ("ssim", "SSIM to dense"),
    ("followed", "Prompts followed"),
    ("sparsity", "Tiles skipped"),
    ("seconds", "Denoising"),
    ("speedup", "Speed-up to dense"),
)
_GROUPS = ("Threshold", "Budget", "Policy")
_SHORT_PROMPT = 90  # characters of a prompt in a list


@dataclass
class Lists:
    """Packed bitmaps of the runs so far, as many as a page may hold.

    Owner: the writer of a suite's files. Lifetime: the suite's.
    """

    limit: int = TILE_LIMIT
    left_out: int = 0
    size: int = 0
    #: (configuration, prompt, seed) -> what the page says of each layer and branch, and its bytes
    runs: dict[tuple[str, int, int], list[tuple[dict[str, Any], bytes]]] = field(
        default_factory=dict
    )

    def add(self, made: Run) -> None:
        """Pack the tiles of a run, or count it as left out if they are too many."""
        packed = []
        for one in made.tiles:
            _, batch, heads, q_blocks, _ = one.bits.shape
            about = {
                "layer": one.layer,
                "branch": one.branch,
                "steps": list(one.steps),
                "batch": batch,
                "heads": batch * heads,
                "q": q_blocks,
                "k": one.k_blocks,
            }
            packed.append((about, one.compressed()))
        size = sum(len(data) for _, data in packed)
        if self.size + size > self.limit:
            self.left_out += 1
            return
        self.size += size
        self.runs[made.configuration, made.prompt, made.seed] = packed


def to_html(
    report: dict[str, Any],
    folder: Path,
    slugs: Mapping[str, str],
    lists: Lists,
    *,
    video_limit: int = VIDEO_LIMIT,
) -> str:
    """The page of a report whose videos are in ``folder``.

    Args:
        report: see :func:`liteattention_e2e.suite.summarise`, with its artefacts.
        folder: where the page will be, beside the videos.
        slugs: what each configuration is called in file names.
        lists: the bitmaps of the runs.
        video_limit: bytes of videos that are written into the page; more are linked.
    """
    blobs: list[tuple[str, str]] = []
    videos, videos_note = _videos(report, folder, slugs, blobs, video_limit)
    tiles, tiles_note = _tiles(report, lists, blobs)
    settings = report["settings"]
    view = {
        "frames": settings["frames"],
        "fps": settings["fps"],
        "width": settings["width"],
        "height": settings["height"],
        "tokens": settings["tokens"],
        "tile": settings["geometry"],
        "cases": _cases(settings),
        "configurations": _configurations(report),
        "groups": _groups(report),
        "videos": videos,
        "quality": _quality(report),
        "heat": _heat(report),
        "tiles": tiles,
    }
    found = {key for item in view["configurations"] for key in item["cards"]}
    model = Path(settings["model"]).name
    embedded = sum(len(text) for _, text in blobs)
    return render(
        "suite",
        scripts=("suite",),
        title=f"Generation time and quality: {model}",
        lead=_lead(report),
        warnings=_warnings(report),
        facts=_facts(report),
        notes=report["notes"],
        sizes=f"; videos and bitmaps take {size_text(embedded)} of it",
        view=view,
        blobs=blobs,
        cards=[card for card in _CARDS if card[0] in found],
        heat=bool(view["heat"]),
        words=_words(report),
        charts=_charts(report),
        tables=_tables(report),
        videos_note=videos_note,
        tiles_note=tiles_note,
    )


def _key(report: dict[str, Any], name: str, prompt: int, seed: int) -> str:
    """How the page names a run: the index of its configuration and that of its case."""
    names = [item["name"] for item in report["configurations"]]
    seeds = report["settings"]["seeds"]
    return f"{names.index(name)}|{prompt * len(seeds) + seeds.index(seed)}"


def _cases(settings: dict[str, Any]) -> list[dict[str, str]]:
    found = []
    for number, prompt in enumerate(settings["prompts"], 1):
        short = prompt if len(prompt) <= _SHORT_PROMPT else prompt[: _SHORT_PROMPT - 1] + "…"
        for seed in settings["seeds"]:
            seeded = f", seed {seed}" if len(settings["seeds"]) > 1 else ""
            label = f"{number}. {short}" if len(settings["prompts"]) > 1 else short
            found.append({"label": label + seeded, "text": prompt + seeded})
    return found


def _videos(
    report: dict[str, Any],
    folder: Path,
    slugs: Mapping[str, str],
    blobs: list[tuple[str, str]],
    limit: int,
) -> tuple[dict[str, Any], str]:
    """Where the video of each run is, and a sentence about their sizes; adds to ``blobs``."""
    there = set(report["artefacts"]["videos"])
    files = {}
    for run in report["runs"]:
        name = f"{slugs[run['configuration']]}_p{run['prompt']}_s{run['seed']}.mp4"
        if run["repeat"] == 0 and name in there:
            files[_key(report, run["configuration"], run["prompt"], run["seed"])] = name
    total = sum((folder / name).stat().st_size for name in files.values())
    count = f"{len(files)} video{'s' if len(files) != 1 else ''}, {size_text(total)}, H.264"
    if total > limit:
        note = (
            f"{count}: more than the {size_text(limit)} that a page holds, so they are linked. "
            "Keep this file in the folder of the videos."
        )
        return {key: {"href": name} for key, name in files.items()}, note
    found = {}
    for key, name in files.items():
        found[key] = {"id": f"video-{len(blobs)}"}
        blobs.append((found[key]["id"], base64_text((folder / name).read_bytes())))
    return found, f"{count}, in this page."


def _tiles(
    report: dict[str, Any], lists: Lists, blobs: list[tuple[str, str]]
) -> tuple[dict[str, Any], str]:
    """What the page knows of each run's bitmaps, and a note; adds to ``blobs``."""
    found: dict[str, Any] = {}
    for case, packed in lists.runs.items():
        found[_key(report, *case)] = listed = []
        for about, data in packed:
            listed.append(about | {"id": f"tiles-{len(blobs)}"})
            blobs.append((listed[-1]["id"], base64_text(data)))
    if not found and not lists.left_out:
        return found, "The runner of this suite does not say which tiles each step computed."
    note = (
        "Arrow keys walk over the cells; a click or Enter opens the tiles of that layer and step, "
        "head by head."
    )
    if lists.left_out:
        stored = ", ".join(report["artefacts"]["tiles"])
        note += (
            f" Bitmaps of {lists.left_out} runs are not in this page, because all would take more "
            f"than {size_text(lists.limit)}; they are in {stored}."
        )
    return found, note


def _rule(item: dict[str, Any]) -> tuple[str, str, float]:
    """Group of a lite configuration, its name in the group, and what it is ordered by there."""
    name = item["name"].partition(", ")[0] if item["name"].endswith(" steps") else item["name"]
    policy = item["policy"] or {}
    if re.fullmatch(r"lite -?(inf|[\d.e+-]+)", name):
        value = name.removeprefix("lite ")
        return "Threshold", value, float(value)
    if re.fullmatch(r"lite budget [\d.e+-]+", name) and policy.get("budget") is not None:
        value = name.removeprefix("lite budget ")
        return "Budget", value, float(value)
    return "Policy", name, item["sparsity"]["mean"]


def _groups(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings that one slider goes over: a rule on one schedule."""
    found: dict[tuple[int, int], list[tuple[float, int]]] = {}
    steps = report["settings"]["steps"]
    for index, item in enumerate(report["configurations"]):
        if item["kind"] == "lite":
            rule, _, order = _rule(item)
            place = (-item["steps"], _GROUPS.index(rule))
            found.setdefault(place, []).append((order, index))
    return [
        {
            "label": _GROUPS[rule] + ("" if -less == steps else f", {-less} steps"),
            "points": [index for _, index in sorted(points)],
        }
        for (less, rule), points in sorted(found.items())
    ]


def _configurations(report: dict[str, Any]) -> list[dict[str, Any]]:
    flat = rows(report)
    names = [item["name"] for item in report["configurations"]]
    found = []
    for item, row in zip(report["configurations"], flat, strict=True):
        dense = next(
            (
                other
                for other in report["configurations"]
                if (other["kind"], other["steps"]) == ("dense", item["steps"])
            ),
            None,
        )
        base = None if dense is None else flat[names.index(dense["name"])]
        found.append(
            {
                "name": item["name"],
                "kind": item["kind"],
                "steps": item["steps"],
                "label": _rule(item)[1] if item["kind"] == "lite" else item["name"],
                "dense": None if dense is None else names.index(dense["name"]),
                "cards": _cards(row, base, report),
            }
        )
    return found


def _cards(
    row: dict[str, Any], base: dict[str, Any] | None, report: dict[str, Any]
) -> dict[str, tuple[str, str]]:
    """Figures of a configuration, each with what stands below it; those that it has."""
    found = {}

    def card(key: str, figure: str, form: str, more: str = "") -> None:
        if row[figure] is not None:
            found[key] = (form.format(row[figure]), more)

    def other(values: dict[str, Any] | None, figure: str, form: str) -> str:
        return "" if values is None or values[figure] is None else form.format(values[figure])

    worst = other(row, "psnr_vs_dense_min_db", "worst {:.1f} dB")
    card("psnr", "psnr_vs_dense_db", "{:.1f} dB", worst)
    if row["identical_to_dense"]:
        found["psnr"] = ("equal", "every pixel")
    card("ssim", "ssim_vs_dense", "{:.4f}")
    card("followed", "prompts_followed", "{:.0%}", other(base, "prompts_followed", "dense {:.0%}"))
    last = other(row, "sparsity_last_step", "last step {:.1%}")
    card("sparsity", "sparsity", "{:.1%}", last)
    if not report["settings"]["emulated"]:
        card("seconds", "denoise_s", "{:.2f} s", other(base, "denoise_s", "dense {:.2f} s"))
        versus = other(row, "speedup_vs_diffusers", "to diffusers {:.2f}x")
        card("speedup", "speedup_vs_dense", "{:.2f}x", versus)
        if report["load"]["verdict"] and base is not None and row is not base:
            found["speedup"] = ("none", report["load"]["verdict"])
    return found


def _quality(report: dict[str, Any]) -> dict[str, str]:
    """What stands below each video."""
    found = {}
    timed = not report["settings"]["emulated"] and not report["load"]["verdict"]
    for run in report["runs"]:
        if run["repeat"]:
            continue
        parts = []
        distance = run["vs_dense"]
        if distance is not None:
            same = distance["identical"]
            parts.append("equals dense" if same else f"PSNR {distance['psnr_db']:.1f} dB")
            parts += [] if same else [f"SSIM {distance['ssim']:.3f}"]
        total = sum(record["tiles_total"] for record in run["sparsity"])
        computed = sum(record["tiles_computed"] for record in run["sparsity"])
        if total and computed < total:
            parts.append(f"{1 - computed / total:.1%} skipped")
        if timed:
            parts.append(f"{run['denoise']:.1f} s")
        key = _key(report, run["configuration"], run["prompt"], run["seed"])
        found[key] = ", ".join(parts)
    return found


def _heat(report: dict[str, Any]) -> dict[str, Any]:
    """Share of skipped tiles by layer and step of each run, both guidance branches together."""
    kinds = {item["name"]: item["kind"] for item in report["configurations"]}
    found = {}
    for run in report["runs"]:
        if run["repeat"] or kinds[run["configuration"]] != "lite" or not run["sparsity"]:
            continue
        layers, steps, cells = SkipStatistics.from_records(run["sparsity"]).grid()
        key = _key(report, run["configuration"], run["prompt"], run["seed"])
        found[key] = {
            "layers": layers,
            "steps": steps,
            "cells": [[None if x is None else round(x, 5) for x in row] for row in cells],
        }
    return found


# ------------------------------------------------------------------------- charts and tables


def _charts(report: dict[str, Any]) -> list[Chart]:
    items = report["configurations"]
    # Nobody compares an emulator's seconds, or those that load made.
    timed = not report["settings"]["emulated"] and not report["load"]["verdict"]
    sparse = [item for item in items if item["sparsity"] is not None]
    found = []
    for label, across in (
        ("tiles skipped, %", lambda item: 100 * item["sparsity"]["mean"]),
        ("denoise seconds (median)", lambda item: item["seconds"]["denoise"]["median"]),
    ):
        if timed or "seconds" not in label:
            found += _quality_chart(report, label, across)
    if sparse:
        found.append(
            chart(
                "Tiles skipped by step",
                [
                    _steps(item, [100 * share for share in item["sparsity"]["by_step"]], i)
                    for i, item in enumerate(items)
                    if item["sparsity"] is not None
                ],
                x_label="step",
                y_label="tiles skipped, %",
            )
        )
    if timed:
        found.append(
            chart(
                "Seconds of a denoising step",
                [_steps(item, item["seconds"]["per_step"], i) for i, item in enumerate(items)],
                x_label="step",
                y_label="seconds (median)",
            )
        )
    return found


def _steps(item: dict[str, Any], values: Sequence[float], colour: int) -> Series:
    return Series(item["name"], range(len(values)), list(values), colour=colour)


def _quality_chart(
    report: dict[str, Any], label: str, across: Callable[[dict[str, Any]], float]
) -> list[Chart]:
    """PSNR against something, a colour for each rule; none if all videos equal those of dense."""
    series = []
    for colour, group in enumerate(_groups(report)):
        listed = [report["configurations"][index] for index in group["points"]]
        points = [
            (across(item), quality["psnr_db_mean"], item)
            for item in listed
            if (quality := item["quality"]["vs_dense"]) and quality["psnr_db_mean"] is not None
        ]
        if points:
            x, y, items = zip(*points, strict=True)
            series.append(
                Series(
                    group["label"],
                    x,
                    y,
                    style="points",
                    colour=colour,
                    tips=[
                        f"{item['name']}: {b:.1f} dB at {a:.4g} {label}" for a, b, item in points
                    ],
                    names=[_rule(item)[1] for item in items],
                    links=[item["name"] for item in items],
                )
            )
    if not series:
        return []
    return [
        chart(
            f"Quality against {label.partition(',')[0].partition(' (')[0]}",
            series,
            x_label=label,
            y_label="PSNR to dense, dB (mean)",
            zero=False,
            note="A point chooses its setting.",
        )
    ]


def _tables(report: dict[str, Any]) -> list[Table]:
    flat = rows(report)
    columns = columns_of(report)
    columns = [one for one in columns if any(row[one[0]] is not None for row in flat)]
    texts = [cells_of(row, columns) for row in flat]
    by_column = []
    for i, (key, _, _) in enumerate(columns):
        values = [row[key] for row in flat]
        if key.startswith("speedup"):
            by_column.append(ratio_cells(values))
        else:
            listed = zip(values, texts, strict=True)
            by_column.append([Cell(text[i], _sorted_by(value, text[i])) for value, text in listed])
    found = [
        Table(
            "Attention configurations",
            [title for _, title, _ in columns],
            list(zip(*by_column, strict=True)),
            "Sparsity is the share of tiles that were not computed, over all steps, layers and "
            "branches. PSNR and SSIM compare 8-bit frames (mean over videos that differ; worst is "
            "the smallest).",
        )
    ]
    sparse = [item for item in report["configurations"] if item["sparsity"] is not None]
    if sparse:
        found.append(_layer_table(sparse))
    found.append(_run_table(report))
    return found


def _sorted_by(value: Any, text: str) -> float | str | None:
    # Equal videos have no PSNR in JSON, and the best one.
    return 1e9 if text == "equal" else value


def _layer_table(sparse: list[dict[str, Any]]) -> Table:
    names = [
        (kind, name) for kind in ("by_layer", "by_branch") for name in sparsity_names(sparse, kind)
    ]
    listed = [text_cells(item["name"] for item in sparse)]
    for kind, name in names:
        shares = [item["sparsity"][kind].get(name, 0) for item in sparse]
        listed.append(figure_cells(shares, "{:.1%}"))
    return Table(
        "Tiles skipped by layer and guidance branch",
        ["attention", *(name or "one branch" for _, name in names)],
        list(zip(*listed, strict=True)),
    )


def _run_table(report: dict[str, Any]) -> Table:
    runs = report["runs"]
    prompts = report["settings"]["prompts"]
    distances = [run["vs_dense"] or {} for run in runs]
    columns: list[tuple[str, list[Cell]]] = [
        ("attention", text_cells(run["configuration"] for run in runs)),
        ("prompt", text_cells(prompts[run["prompt"]] for run in runs)),
        ("seed", figure_cells((run["seed"] for run in runs), "{}")),
        ("repeat", figure_cells((run["repeat"] for run in runs), "{}")),
    ]
    if not report["settings"]["emulated"]:
        for name in ("denoise", "decode", "total"):
            columns.append((f"{name} s", figure_cells((run[name] for run in runs), "{:.2f}")))
    ratios = [each.get("psnr_db") for each in distances]
    columns.append(("PSNR to dense", figure_cells(ratios, "{:.1f} dB")))
    columns.append(("SSIM", figure_cells((each.get("ssim") for each in distances), "{:.4f}")))
    return Table(
        "Every run",
        [name for name, _ in columns],
        list(zip(*(cells for _, cells in columns), strict=True)),
        text_columns=2,
        folded=True,
    )


# -------------------------------------------------------------------------------- the words


def _lead(report: dict[str, Any]) -> str:
    settings = report["settings"]
    tile = settings["geometry"]
    tiles = "" if tile is None else f", tiles of {tile['q_block']} x {tile['k_block']}"
    prompts, seeds = len(settings["prompts"]), len(settings["seeds"])
    repeats = settings["repeats"]
    return (
        f"{settings['width']} x {settings['height']} pixels x {settings['frames']} frames, "
        f"{settings['tokens']:,} tokens{tiles}; {settings['steps']} steps, guidance "
        f"{settings['guidance']:g}, {report['environment']['dtype']}; {_many(prompts, 'prompt')}, "
        f"{_many(seeds, 'seed')}, {_many(repeats, 'repeat')}; {turns_text(report)}."
    )


_WORDS = (
    (
        "diffusers",
        "The model as the library diffusers runs it, with PyTorch's own attention. It is the video "
        "that one gets without this project.",
    ),
    (
        "dense",
        "The same model with this project's attention, which computes everything. Its video should "
        "look the same; small rounding differences are normal.",
    ),
    (
        "LiteAttention (lite)",
        "The same model, with parts of attention left out that hardly change the picture. The "
        "number behind the name says how much may be left out.",
    ),
    (
        "tiles, skipped, sparsity",
        "Attention compares all parts of a video with each other, in blocks called tiles. A "
        "skipped tile is not computed. Sparsity is the share of skipped tiles: the larger it is, "
        "the less time attention takes.",
    ),
    (
        "budget, threshold",
        "The rule that decides which tiles are skipped. A budget of 0.05 lets a step leave out 5 % "
        "of what attention weighs; a threshold leaves out tiles below a weight, in powers of two.",
    ),
    (
        "PSNR, SSIM",
        "How alike two videos are. PSNR is in decibels: above 30 dB differences are hard to see, "
        "above 40 dB one does not see them; equal videos have no number. SSIM of equal ones is 1.",
    ),
    (
        "denoising, step",
        "A video begins as noise, and each step takes some of it away. Nearly all of the time goes "
        "into these steps.",
    ),
    (
        "speed-up",
        "How many times faster than another row the denoising was: 2x is half of the time. There "
        "is none if something else kept the machine busy.",
    ),
)


def _words(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What the page's words mean, for readers who know none of them; those that it uses."""
    kinds = {item["kind"] for item in report["configurations"]}
    timed = not report["settings"]["emulated"]
    left_out = {"diffusers", "dense"} - kinds
    if "lite" not in kinds:
        left_out |= {"LiteAttention (lite)", "tiles, skipped, sparsity", "budget, threshold"}
    if not timed:
        left_out.add("speed-up")
    return [(word, text) for word, text in _WORDS if word not in left_out]


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _warnings(report: dict[str, Any]) -> Iterable[str]:
    found = []
    if not report["complete"]:
        found.append(
            f"Incomplete: {report['runs_done']} of {report['runs_planned']} runs were made."
        )
    if report["settings"]["emulated"]:
        found.append("The GPU was a software MI300X: seconds say nothing about a GPU.")
    return found + load_lines(report)


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    machine, settings = report["environment"], report["settings"]
    processor = f"{machine['cpu']}, {tables.counted(machine['threads'], 'thread')}"
    if machine["isa"]:
        processor += f", path {machine['isa']}"
    packages = [f"{name} {number}" for name, number in machine["packages"].items() if number]
    found = [
        ("Command", machine["command"]),
        ("Commit", machine["commit"] or "not in a git checkout"),
        ("Started", machine["started"]),
        ("Processor", processor),
        ("GPU", machine["gpu"]),
        ("Platform", machine["platform"]),
        ("Versions", ", ".join([f"Python {machine['python']}", *packages])),
        ("Runner", settings["runner"]),
        ("Model", settings["model"]),
        ("Engine", settings["engine"]),
        ("Model loaded in", f"{report['load_seconds']:.1f} s, once for all configurations"),
    ]
    return [(name, text) for name, text in found if text]
