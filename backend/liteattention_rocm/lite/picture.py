"""Pictures of skipped tiles. They need matplotlib (extra "bench") and no display."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from .bitmap import unpack
from .statistics import SkipStatistics

_CARD, _INK, _QUIET = "#161b23", "#e7eaf0", "#9ba6b6"


def draw_tiles(
    tiles: torch.Tensor,
    path: str | PathLike[str],
    *,
    k_blocks: int | None = None,
    heads: Sequence[int] | None = None,
    title: str | None = None,
) -> Path:
    """Draw which tiles are kept (dark) and skipped (light), one panel per head; return the path.

    ``tiles`` is a bitmap int32 [B, H, q_blocks, words] (then ``k_blocks`` is required) or a bool
    mask [B, H, q_blocks, K_blocks], [H, q_blocks, K_blocks] or [q_blocks, K_blocks]. Batch entries
    are drawn one below the other, ``heads`` picks heads (all by default). The file format follows
    the suffix (.png, .svg, .pdf). Raises ``ImportError`` without matplotlib and ``ValueError`` or
    ``TypeError`` for input it cannot draw.
    """
    kept = _bool_mask(tiles, k_blocks)
    batch, n_heads = kept.shape[:2]
    chosen = list(range(n_heads)) if heads is None else list(heads)
    outside = [head for head in chosen if not 0 <= head < n_heads]
    if outside or not chosen or not kept.numel():
        raise ValueError(
            f"nothing to draw: {batch} x {n_heads} heads of {kept.shape[2]} x {kept.shape[3]} "
            f"tiles, heads asked for {chosen}"
        )
    figure = _figure(3.2 * len(chosen), 3.2 * batch + 0.3)
    from matplotlib.colors import ListedColormap

    axes = figure.subplots(batch, len(chosen), squeeze=False)
    colours = ListedColormap(["#e9ecf2", "#1f4e9c"])
    for b, n in ((b, n) for b in range(batch) for n in range(len(chosen))):
        panel = kept[b, chosen[n]]
        axis = axes[b][n]
        axis.imshow(
            panel.numpy(), cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest"
        )
        share = 1.0 - float(panel.float().mean())
        where = f"batch {b}, head {chosen[n]}" if batch > 1 else f"head {chosen[n]}"
        axis.set_title(f"{where}: {share:.1%} skipped", fontsize=9)
        axis.set_xlabel("K block", fontsize=8)
        axis.set_ylabel("q block", fontsize=8)
        axis.tick_params(labelsize=7)
    return _save(figure, path, title)


def draw_steps(
    statistics: SkipStatistics, path: str | PathLike[str], *, title: str | None = None
) -> Path:
    """Draw the share of skipped tiles by layer (rows) and step (columns); return the path.

    Cells without a call are hatched. The colours go from 0 to the largest share in the picture,
    which the bar beside it names. File format and errors as :func:`draw_tiles`.
    """
    layers, steps, cells = statistics.grid()
    if not layers:
        raise ValueError("nothing to draw: no calls are recorded")
    figure = _figure(2.6 + 0.22 * max(len(steps), 12), 1.4 + 0.22 * max(len(layers), 4))
    values = [[float("nan") if cell is None else 100 * cell for cell in row] for row in cells]
    axis = figure.subplots()
    axis.patch.set(hatch="///", edgecolor="#999999", facecolor="white")
    image = axis.imshow(values, cmap="viridis", vmin=0, aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(layers)), layers, fontsize=7)
    shown = range(0, len(steps), -(-len(steps) // 20))
    axis.set_xticks(list(shown), [str(steps[i]) for i in shown], fontsize=7)
    axis.set_xlabel("step", fontsize=8)
    figure.colorbar(image, ax=axis, label="skipped tiles, %")
    return _save(figure, path, title)


def _bool_mask(tiles: torch.Tensor, k_blocks: int | None) -> torch.Tensor:
    """[B, H, q_blocks, K_blocks] on the CPU."""
    if tiles.dtype == torch.int32:
        if k_blocks is None:
            raise ValueError(
                "a bitmap does not say how many K blocks it has: give k_blocks, or a bool mask "
                "from bitmap.unpack"
            )
        tiles = unpack(tiles, k_blocks)
    elif tiles.dtype != torch.bool:
        raise TypeError(f"draw_tiles takes an int32 bitmap or a bool mask, got {tiles.dtype}")
    if not 2 <= tiles.dim() <= 4:
        raise ValueError(
            "draw_tiles takes [B, H, q_blocks, K_blocks], [H, q_blocks, K_blocks] or "
            f"[q_blocks, K_blocks], got {tuple(tiles.shape)}"
        )
    return tiles.reshape((1,) * (4 - tiles.dim()) + tuple(tiles.shape)).cpu()


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'pictures need matplotlib: pip install "liteattention-rocm[bench]"'
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def as_card(figure: Any) -> None:
    """Give a figure of matplotlib a dark ground and light text, which suits pages of any colour."""
    figure.patch.set_facecolor(_CARD)
    for axis in figure.axes:
        if axis.get_facecolor() == (1.0, 1.0, 1.0, 1.0):
            axis.set_facecolor(_CARD)
        axis.tick_params(colors=_QUIET, which="both")
        for spine in axis.spines.values():
            spine.set_edgecolor(_QUIET)
        for text in (axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts):
            text.set_color(_INK)
        legend = axis.get_legend()
        if legend is not None:
            legend.get_frame().set(facecolor=_CARD, edgecolor=_QUIET)
            for text in legend.get_texts():
                text.set_color(_INK)
    if figure._suptitle is not None:
        figure._suptitle.set_color(_INK)


def _save(figure: Any, path: str | PathLike[str], title: str | None) -> Path:
    if title:
        figure.suptitle(title, fontsize=10)
    target = Path(path)
    as_card(figure)
    figure.savefig(target, dpi=120)
    return target
