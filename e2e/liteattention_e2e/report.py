"""What a suite found, as CSV, Markdown and a table for the terminal.

Everything is derived from the data of :func:`liteattention_e2e.suite.summarise`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from liteattention_rocm.cli import tables


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
            "outside_attention_s": None,
            "processor_s": seconds["processor"]["median"],
            "encode_s": seconds["encode"]["median"],
            "decode_s": seconds["decode"]["median"],
            "total_s": seconds["total"]["median"],
            "speedup_vs_dense": None,
            "speedup_vs_diffusers": None,
            "sparsity": None if sparsity is None else sparsity["mean"],
            "sparsity_last_step": None if sparsity is None else sparsity["last_step"],
            "prompts_followed": (item["prompts_followed"] or {}).get("all"),
            "peak_memory_mib": None,
            "repeats_bit_equal": item["repeats_bit_equal"],
        }
        if item["peak_memory_bytes"] is not None:
            row["peak_memory_mib"] = item["peak_memory_bytes"] / 2**20
        if seconds["self_attention"] is not None:
            row["self_attention_s"] = seconds["self_attention"]["median"]
            row["outside_attention_s"] = seconds["outside_attention"]["median"]
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
    ("outside_attention_s", "rest of denoising s", "{:.2f}"),
    ("processor_s", "processor s", "{:.2f}"),
    ("total_s", "total s", "{:.2f}"),
    ("speedup_vs_dense", "speed-up vs dense", "{:.2f}x"),
    ("speedup_vs_diffusers", "vs diffusers", "{:.2f}x"),
    ("psnr_vs_dense_db", "PSNR vs dense", "{:.1f} dB"),
    ("psnr_vs_dense_min_db", "worst", "{:.1f} dB"),
    ("ssim_vs_dense", "SSIM", "{:.4f}"),
    ("psnr_vs_diffusers_db", "PSNR vs diffusers", "{:.1f} dB"),
    ("prompts_followed", "prompts followed", "{:.0%}"),
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


def columns_of(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Columns of the tables, (key of :func:`rows`, title, format).

    There are no seconds side by side where they are an emulator's, and no speed-ups where the
    machine was busy.
    """
    settings = report["settings"]
    busy = report["load"]["verdict"]

    def shown(key: str) -> bool:
        if key == "prompts_followed":
            return bool(settings["check_prompts"])
        if busy and key.startswith("speedup"):
            return False
        return not (settings["emulated"] and key.endswith("_s"))

    return [column for column in _COLUMNS if shown(column[0])]


def cells_of(row: dict[str, Any], columns: list[tuple[str, str, str]]) -> list[str]:
    """The texts of a row of :func:`rows`, by column."""
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
    columns = columns_of(report)
    listed = [cells_of(row, columns) for row in rows(report)]
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


def load_lines(report: dict[str, Any]) -> list[str]:
    """What to know about the machine's load, in sentences; none if it was quiet throughout."""
    load = report["load"]
    found = load["busy"]
    if not found:
        return []
    why = "; ".join(found[0]["signs"])
    if load["verdict"]:
        verdict = load["verdict"][0].upper() + load["verdict"][1:]
        return [f"{verdict}: {why}. Seconds are of this load, too."]
    return [
        f"The machine was busy in {len(found)} of {load['cases']} cases, which no speed-up counts; "
        f"in the first one {why}."
    ]


def turns_text(report: dict[str, Any]) -> str:
    """How the configurations shared the machine."""
    if len(report["configurations"]) < 2:
        return "one configuration"
    unit = {"step": "denoising step by step", "video": "video by video"}
    return f"configurations in turns, {unit[report['load']['turns']]}"


_SPECIAL = re.compile(r"([\\`*_\[\]<>|~#&$])")


def literal(text: str) -> str:
    """Text of others for Markdown, one line: shown as it is, whatever it holds."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """A code span of a text that may hold backticks."""
    text = " ".join(text.split("\n"))
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def markdown(report: dict[str, Any]) -> str:
    """The report for people: what ran where, the table, per layer and branch, the pictures."""
    settings, machine = report["settings"], report["environment"]
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    columns = columns_of(report)
    tile = settings["geometry"]
    tile_text = "unknown" if tile is None else f"{tile['q_block']} x {tile['k_block']}"
    processor = f"{machine['cpu']}, {tables.counted(machine['threads'], 'thread')}"
    if machine["isa"]:
        processor += f", {machine['isa']}"
    prompts = tables.counted(len(settings["prompts"]), "prompt")
    repeats = tables.counted(settings["repeats"], "repeat")
    lines = [
        f"# Generation time and quality: {literal(Path(settings['model']).name)}",
        "",
        f"{settings['width']} x {settings['height']} x {settings['frames']} frames, "
        f"{settings['tokens']:,} tokens, {settings['steps']} steps, guidance "
        f"{settings['guidance']:g}, {machine['dtype']}; {prompts}, "
        f"seeds {', '.join(map(str, settings['seeds']))}, {repeats} "
        f"(medians; {turns_text(report)}). Tiles of {tile_text}.",
        "",
        *(line for text in load_lines(report) for line in (f"**{text}**", "")),
        *unfinished(report),
        f"- Processor: {processor}",
        *([f"- GPU: {machine['gpu']}"] if machine["gpu"] else []),
        f"- Versions: Python {machine['python']}, {packages}",
        f"- Commit: {machine['commit'] or 'not in a git checkout'}",
        f"- Command: {code(machine['command'])}",
        *(
            f"- Prompt {number}: {literal(prompt)}"
            for number, prompt in enumerate(settings["prompts"], 1)
        ),
        *(f"- {literal(note)}" for note in report["notes"]),
        f"- Model loaded in {report['load_seconds']:.1f} s, once for all configurations.",
        "",
        *tables.markdown(
            [title for _, title, _ in columns],
            [
                cells_of({**row, "configuration": literal(row["configuration"])}, columns)
                for row in rows(report)
            ],
        ),
        "",
        "Sparsity is the share of tiles that were not computed, over all steps, layers and "
        "branches. PSNR and SSIM compare 8-bit frames (mean over videos that differ; *worst* is "
        "the smallest)."
        + (
            ""
            if settings["emulated"]
            else " *self-attention s* is the time inside self-attention modules, projections and "
            "rotary embedding included; *rest of denoising s* is that of the other code, which is "
            "the same in all rows. *processor s* is what all threads together got of processors "
            f"in the denoising steps. There are no speed-ups of times in which threads waited for "
            f"a processor over {report['load']['most_waited']:.0%} of their time, or the other "
            f"code's seconds a step differ by over {report['load']['most_apart']:.0%}: something "
            "else kept the machine busy then."
        ),
    ]
    sparse = [item for item in report["configurations"] if item["sparsity"] is not None]
    if sparse:
        layers, branches = sparsity_names(sparse, "by_layer"), sparsity_names(sparse, "by_branch")
        listed = [
            [literal(item["name"])]
            + [f"{item['sparsity']['by_layer'].get(name, 0):.1%}" for name in layers]
            + [f"{item['sparsity']['by_branch'].get(name, 0):.1%}" for name in branches]
            for item in sparse
        ]
        lines += ["", "## Sparsity by layer and branch", ""]
        lines += tables.markdown(
            ["attention", *map(literal, layers), *map(literal, branches)], listed
        )
    pictures = [
        *report["artefacts"]["contact_sheets"],
        *report["artefacts"]["plots"],
        *report["artefacts"]["skipped_tiles"],
    ]
    lines += ["", "## Pictures", "", *(f"![{name}]({name})" for name in pictures)]
    return "\n".join(lines) + "\n"


def sparsity_names(sparse: Sequence[dict[str, Any]], kind: str) -> list[str]:
    """Layers or branches that any of these configurations has; one that is off has none."""
    return list(dict.fromkeys(name for item in sparse for name in item["sparsity"][kind]))


def unfinished(report: dict[str, Any]) -> list[str]:
    """Lines of the report that say that it is incomplete; none if it is not."""
    if report["complete"]:
        return []
    done, planned = report["runs_done"], report["runs_planned"]
    return [f"**Incomplete: {done} of {planned} runs were made.**", ""]


def to_csv(report: dict[str, Any]) -> str:
    """One line per configuration."""
    listed = rows(report)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(listed[0]))
    writer.writeheader()
    writer.writerows(listed)
    return text.getvalue()
