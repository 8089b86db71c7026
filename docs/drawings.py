"""Draws the pictures of concepts.md: ``python docs/drawings.py`` writes them beside it.

They are SVG with colours for light and dark and a ground of their own, so that they can be read on
any page. What they show is computed here: schedules, cuts and shares are not made up.
"""

from __future__ import annotations

import argparse
import heapq
import random
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
svg { --ground: #ffffff; --ink: #1b212b; --quiet: #5b6576; --line: #c3cad5; --kept: #1f4e9c;
  --skipped: #e6eaf1; --mark: #c2410c; --soft: #eef2f8; color-scheme: light; }
@media (prefers-color-scheme: dark) { svg { --ground: #161b23; --ink: #e7eaf0; --quiet: #9ba6b6;
  --line: #46536a; --kept: #7eabf5; --skipped: #2a3342; --mark: #ff9a62; --soft: #202938; } }
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  fill: var(--ink); }
.small { font-size: 12px; fill: var(--quiet); } .bold { font-weight: 600; }
.mono { font: 13px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.mid { text-anchor: middle; } .end { text-anchor: end; } .over { fill: var(--ground); }
.kept { fill: var(--kept); } .skipped { fill: var(--skipped); } .soft { fill: var(--soft); }
.frame { fill: none; stroke: var(--mark); stroke-width: 2.5; }
.box { fill: var(--soft); stroke: var(--line); } .warn { stroke: var(--mark); }
.line { fill: none; stroke: var(--quiet); stroke-width: 1.5; }
.cut { stroke: var(--mark); stroke-width: 2; stroke-dasharray: 5 4; } .mark { fill: var(--mark); }
"""


class Drawing:
    """An SVG of a fixed size, in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="context-stroke"/>'
            "</marker></defs>",
            f'<rect width="{width}" height="{height}" rx="10" fill="var(--ground)"/>',
        ]

    def rect(self, x: float, y: float, width: float, height: float, kind: str, r: int = 2) -> None:
        """A rectangle of a class of the style sheet."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{r}" '
            f'class="{kind}"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """A line of text; its left end is at x unless the class says otherwise."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], kind: str = "line") -> None:
        """A line through points with a tip at the last."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path d="M{path}" class="{kind}" marker-end="url(#tip)"/>')

    def line(self, x0: float, y0: float, x1: float, y1: float, kind: str = "line") -> None:
        """A straight line."""
        self._parts.append(f'<path d="M{x0:g} {y0:g}L{x1:g} {y1:g}" class="{kind}"/>')

    def tiles(self, x: float, y: float, size: float, kept: list[list[bool]]) -> None:
        """Tiles of an attention matrix: q blocks down, K blocks across."""
        for i, row in enumerate(kept):
            for j, bit in enumerate(row):
                kind = "kept" if bit else "skipped"
                self.rect(x + j * size, y + i * size, size - 2, size - 2, kind)

    def write(self, name: str) -> None:
        """Write it beside this file."""
        (HERE / name).write_text("\n".join([*self._parts, "</svg>"]) + "\n", encoding="utf-8")


def matter(rows: int, columns: int, seed: int) -> list[list[float]]:
    """How much each tile matters: most on the diagonal, and in a few K blocks for everybody."""
    draw = random.Random(seed)
    sinks = {0, columns // 2}
    return [
        [
            draw.random() * 0.5
            + (1.2 if abs(j * rows / columns - i) < 1.3 else 0)
            + (0.45 if j in sinks else 0)
            for j in range(columns)
        ]
        for i in range(rows)
    ]


def tiles() -> None:
    """One head's attention matrix, a tile of it, and the bits of a q block."""
    made = Drawing(760, 330, "A head's attention matrix in tiles, and its skip bitmap")
    kept = [[value > 0.42 for value in row] for row in matter(8, 14, 5)]
    x, y, size = 96, 62, 28
    made.tiles(x, y, size, kept)
    made.text(x, 28, "K blocks: 64 keys each", "small")
    made.arrow((x, 40), (x + 14 * size, 40))
    made.text(14, y + 14, "q blocks:", "small")
    made.text(14, y + 32, "256 rows", "small")
    made.arrow((80, y), (80, y + 8 * size))
    row = 3
    made.rect(x - 2, y + row * size - 2, 14 * size + 2, size + 2, "frame")
    made.text(510, 84, "One tile", "bold")
    made.text(510, 106, "256 queries x 64 keys of a head.", "small")
    made.text(510, 124, "It is computed (blue) or skipped", "small")
    made.text(510, 142, "(grey) as a whole: then its K and V", "small")
    made.text(510, 160, "are not loaded, no product is formed.", "small")
    word = "".join("1" if bit else "0" for bit in kept[row])
    made.arrow((x + 14 * size + 4, y + (row + 0.5) * size), (498, 196))
    made.text(510, 200, "A q block's bits", "bold")
    made.text(510, 222, f"{word[:7]} {word[7:]}", "mono")
    made.text(510, 242, "One bit per tile, K block 0 first;", "small")
    made.text(510, 260, "32 bits make a word of the bitmap.", "small")
    left = sum(map(sum, kept))
    made.text(
        x,
        312,
        f"{left} of {8 * 14} tiles are left: {1 - left / (8 * 14):.0%} are skipped.",
        "small",
    )
    made.write("concept-tiles.svg")


def steps() -> None:
    """The list of a layer over four denoising steps."""
    made = Drawing(760, 292, "What one denoising step learns about tiles, the next one skips")
    values = matter(8, 8, 2)
    bounds = (-1.0, 0.12, 0.24, 0.36)
    size, width = 17, 184
    for n, bound in enumerate(bounds):
        x = 24 + n * width
        kept = [[value > bound for value in row] for row in values]
        share = sum(map(sum, kept)) / 64
        made.text(x, 30, f"step {n}", "bold")
        made.text(
            x, 50, "walks " + ("down, K block 7 first" if n % 2 else "up, K block 0 first"), "small"
        )
        made.tiles(x, 62, size, kept)
        made.text(x, 62 + 8 * size + 18, f"computes {share:.0%}", "small")
        if n < 3:
            made.arrow((x + 8 * size + 6, 130), (x + width - 8, 130))
            made.text(x + 8 * size + 24, 120, "list", "small mid")
    made.text(
        24,
        250,
        "In each tile that it computes, a step finds out whether it matters. One that does not is",
        "small",
    )
    made.text(
        24,
        268,
        "left out from the next step on. Lists are kept by layer, guidance branch and generation.",
        "small",
    )
    made.write("concept-steps.svg")


def budget() -> None:
    """The masses of one q block's tiles, and the cut of a budget."""
    made = Drawing(760, 300, "A budget drops the lightest tiles of a q block")
    draw = random.Random(11)
    weights = [draw.expovariate(1) ** 2.2 + 0.01 for _ in range(22)]
    total = sum(weights)
    shares = sorted((value / total for value in weights), reverse=True)
    limit, dropped, count = 0.05, 0.0, 0
    while dropped + shares[-1 - count] <= limit:
        dropped += shares[-1 - count]
        count += 1
    base, height, width = 232, 170, 22
    for i, share in enumerate(shares):
        tall = max(2.0, height * (share / shares[0]) ** 0.5)  # roots, so that light ones are seen
        kind = "skipped" if i >= len(shares) - count else "kept"
        made.rect(64 + i * width, base - tall, width - 4, tall, kind)
    at = 64 + (len(shares) - count) * width - 2
    made.line(at, 44, at, base + 8, "cut")
    made.text(at - 8, 56, "the cut", "end")
    made.text(64, 254, f"{len(shares) - count} tiles stay", "small")
    made.text(at + 4, 254, f"{count} tiles are dropped", "small")
    made.line(56, base + 1, 64 + len(shares) * width, base + 1)
    made.text(
        64,
        30,
        "softmax mass of each tile of one q block, heaviest first (heights: square roots)",
        "small",
    )
    made.text(568, 96, f"budget {limit:.0%}", "bold")
    made.text(568, 118, f"dropped: {dropped:.2%}", "")
    made.text(568, 140, "of the mass, never more", "small")
    made.text(568, 158, "than the budget in one", "small")
    made.text(568, 176, "step. The heaviest tile", "small")
    made.text(568, 194, "always stays.", "small")
    made.text(
        64,
        282,
        "A threshold asks instead whether every row's largest score in the tile is negligible.",
        "small",
    )
    made.write("concept-budget.svg")


def schedule(lengths: list[int], workers: int) -> list[list[tuple[int, int]]]:
    """(start, length) of the jobs of each worker, who takes the next job when free."""
    free = [(0, worker) for worker in range(workers)]
    taken: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    for length in lengths:
        start, worker = heapq.heappop(free)
        taken[worker].append((start, length))
        heapq.heappush(free, (start + length, worker))
    return taken


def order() -> None:
    """The same q blocks in their own order and longest first."""
    lengths = [3, 4, 2, 5, 3, 6, 4, 2, 7, 3, 12, 5]
    made = Drawing(760, 330, "q blocks with most kept tiles first: compute units finish together")
    scale, top = 22, 0
    for title, jobs in (
        ("In the order of the rows", lengths),
        ("Longest first (LPT)", sorted(lengths, reverse=True)),
    ):
        taken = schedule(jobs, 4)
        end = max(start + length for jobs in taken for start, length in jobs)
        made.text(24, top + 28, title, "bold")
        for worker, listed in enumerate(taken):
            y = top + 42 + worker * 24
            made.text(24, y + 14, f"CU {worker}", "small")
            made.rect(72, y, end * scale, 20, "soft")
            for start, length in listed:
                made.rect(72 + start * scale, y, length * scale - 2, 20, "kept")
                made.text(72 + (start + length / 2) * scale, y + 15, str(length), "mid over small")
        made.line(72 + end * scale, top + 36, 72 + end * scale, top + 142, "cut")
        made.text(80 + end * scale, top + 92, f"done after {end}", "bold")
        top += 144
    made.text(
        24,
        312,
        "Numbers are K blocks that a q block keeps. A unit takes the next q block when it is free.",
        "small",
    )
    made.write("concept-order.svg")


def contract() -> None:
    """What happens between a call and a kernel."""
    made = Drawing(760, 326, "A call is described, admitted by an engine, bound once and run")
    boxes = (
        (24, "Caller", "attention, a step of", "LiteAttention, a batch"),
        (212, "Request", "sizes and options,", "no addresses"),
        (400, "Engine", "gfx942, portable,", "cpu or reference"),
        (588, "Bound call", "remembered; takes", "addresses only"),
    )
    for x, title, *lines in boxes:
        made.rect(x, 40, 148, 84, "box", 8)
        made.text(x + 74, 66, title, "bold mid")
        for i, line in enumerate(lines):
            made.text(x + 74, 88 + 18 * i, line, "small mid")
    for x in (172, 360):
        made.arrow((x + 2, 82), (x + 37, 82))
    made.text(474, 28, "chosen by device or name", "small mid")
    made.rect(400, 168, 148, 52, "box", 8)
    made.text(474, 199, "reasons(request)", "mono mid")
    made.arrow((474, 126), (474, 165))
    made.rect(588, 168, 148, 52, "box", 8)
    made.text(662, 199, "bind(request)", "mono mid")
    made.arrow((550, 194), (585, 194))
    made.text(567, 160, "none", "small mid")
    made.arrow((662, 166), (662, 127))
    made.rect(212, 168, 148, 52, "box warn", 8)
    made.text(286, 190, "one error", "bold mid")
    made.text(286, 208, "with every reason", "small mid")
    made.arrow((398, 194), (363, 194))
    made.text(380, 160, "some", "small mid")
    made.text(
        24,
        262,
        "An engine lists all that it cannot do. Nothing falls back silently: the error",
        "small",
    )
    made.text(
        24,
        280,
        "names one that can. geometry(head_dim, rows) says its tiles, so the shape of bitmaps.",
        "small",
    )
    made.text(24, 302, "A second call like the first one goes to the bound call directly.", "small")
    made.write("concept-engine.svg")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for draw in (tiles, steps, budget, order, contract):
        draw()
