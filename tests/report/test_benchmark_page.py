"""Pages of benchmarks: numbers of the rows, bars of the ratios, sorting; charts draw to scale."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from liteattention_benchmark import kernels, pages, timing
from liteattention_benchmark.cells import Config
from liteattention_report import Series, Table, bar_chart, chart, size_text, text_cells

from .conftest import Opened, overflow

CONFIG = Config.model_validate(
    {
        "dense": [
            {"batch": 1, "heads": 2, "length": 512 * n, "head_dim": 64} for n in (1, 2, 4)
        ],
        "lite": [
            {"batch": 1, "heads": 2, "length": 512, "head_dim": 64, "sparsity": share}
            for share in (0.0, 0.5)
        ],
        "decode": [
            {"requests": 4, "context": 512, "q_heads": 8, "kv_heads": 2, "head_dim": 64}
        ],
    }
)  # fmt: skip
FACTOR = {"ours": 1.0, "ours, lite": 1.25, "a peer": 1.6, "<i>fast</i>": 0.8}


def rows() -> list[kernels.Row]:
    found = []
    for i, cell in enumerate(CONFIG.cells):
        kind = type(cell).__name__.lower()
        for name, factor in FACTOR.items():
            if (name == "ours, lite") <= (kind == "lite"):
                took = (2 + i) * factor
                found.append(
                    kernels.Row(
                        kind, str(cell), name, took, took - 1, took + 1, 1e3 / took, 1e-3, ""
                    )
                )
    return [*found, kernels.Row("dense", "x", "gone", *[None] * 5, "it is not installed")]


def written(folder: Path, **unfinished: str) -> Path:
    stamp = {"commit": "1234567", "device": "Fake GPU", **unfinished}
    roofs = timing.Ceilings(700.0, 4.0)
    path = folder / "kernels.html"
    path.write_text(pages.kernels(CONFIG, rows(), stamp, "liteattention-rocm bench kernels", roofs))
    return path


def test_kernels_in_a_browser(tmp_path: Path, open_page: Opened) -> None:
    page = open_page(written(tmp_path))
    table = page.locator("table", has_text="Dense attention")
    texts = "all => all.map(row => [...row.cells].map(cell => cell.innerText.trim()))"

    def shown() -> list[list[str]]:
        found: list[list[str]] = table.locator("tbody tr").evaluate_all(texts)
        return found

    wanted = [row for row in rows() if row.kind == "dense" and not row.absent]
    assert [line[:3] for line in shown()] == [
        [row.cell, row.contender, f"{row.median_ms:.4g}"] for row in wanted
    ]
    ratio = [FACTOR[row.contender] for row in wanted]
    assert [float(line[6]) for line in shown()] == ratio
    bars = table.locator(".bar").evaluate_all(
        "all => all.map(e => ['--bar', '--mark'].map(n => +e.style.getPropertyValue(n)))"
    )
    assert bars == [[pytest.approx(each / 1.6, abs=1e-4), 0.625] for each in ratio]
    for name, column in (("median ms", 2), ("contender", 1)):
        head = table.locator("thead button", has_text=name)
        head.focus()
        page.keyboard.press("Enter")
        values = [line[column] for line in shown()]
        numbers = column == 2
        assert values == sorted(values, key=float if numbers else str.casefold, reverse=numbers)
    assert "gone: it is not installed" in page.locator("main").inner_text()
    assert page.locator(".chart").count() == 4
    assert page.locator("#machine dd").all_inner_texts()[1:] == ["1234567", "Fake GPU"]
    assert page.locator(".warning").count() == 0 and overflow(page) <= 0
    narrow = open_page(written(tmp_path, incomplete="2 of 6 cells"), width=360, scheme="dark")
    assert overflow(narrow) <= 0
    assert "2 of 6 cells" in narrow.locator(".warning").inner_text()


def test_serving_in_a_browser(tmp_path: Path, open_page: Opened) -> None:
    result: dict[str, Any] = {
        "environment": {"commit": "1234567"}, "framework": "vllm", "platform": "cuda",
        "in_turns": True, "complete": True, "start_s": {"PEER": 12.34},
        "sizes": "tiny", "rounds": 3, "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "rows": [
            {"kind": kind, "batch": 2, "context": 64, "backend": backend, "tokens_per_s": rate,
             "tokens_per_s_min": rate - 1, "tokens_per_s_max": rate + 1, "first_token_s": 0.02,
             "between_tokens_s": None if kind == "prefill" else 0.004}
            for kind in ("decode", "prefill")
            for backend, rate in (("CUSTOM", 1500.0), ("PEER", 1000.0))
        ],
    }  # fmt: skip
    path = tmp_path / "serving.html"
    path.write_text(pages.serving(result, "liteattention-rocm bench serving", "CUSTOM"))
    page = open_page(path, width=360)
    lines = page.locator("tbody tr").evaluate_all(
        "all => all.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    )
    decode = ["decode 2 x 64", "PEER", "1,000.0", "999.0", "1,001.0", "20.0", "4.00", "1.500"]
    assert lines[1] == decode
    assert lines[3][6:] == ["", "1.500"]
    assert page.locator("#machine dd").last.inner_text() == "12.3 s"
    assert page.locator(".chart").count() == 2 and overflow(page) <= 0


def places(svg: str, tag: str, *names: str) -> list[tuple[float, ...]]:
    found = re.findall(rf"<{tag} [^>]*>", svg)
    return [tuple(float(re.search(rf' {n}="([-\d.]+)"', x)[1]) for n in names) for x in found]  # type: ignore[index]


def test_charts_are_to_scale() -> None:
    lines = chart(
        "t",
        [Series("a", [0, 1, 4], [0, 5, None]), Series("b", [2], [10])],
        x_label="x",
        y_label="y",
    )
    points = places(lines.svg, "circle", "cx", "cy")
    assert len(points) == 3  # None is not drawn
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x2 - x0 == pytest.approx(2 * (x1 - x0), abs=0.2)
    assert y0 - y2 == pytest.approx(2 * (y0 - y1), abs=0.2) and y0 > y2
    logs = chart("t", [Series("a", [1, 10, 100], [1, 10, 100], style="points")], x_label="x",
                 y_label="y", log=True)  # fmt: skip
    (x0, y0), (x1, y1), (x2, y2) = places(logs.svg, "circle", "cx", "cy")
    assert (x2 - x1, y1 - y2) == (pytest.approx(x1 - x0, abs=0.2), pytest.approx(y0 - y1, abs=0.2))
    bars = bar_chart("t", ["g", "h"], [Series("a", (), [1.0, 4.0]), Series("b", (), [2.0, None])],
                     y_label="y")  # fmt: skip
    heights = [height for (height,) in places(bars.svg, "rect", "height")]
    assert sorted(each / min(heights) for each in heights) == pytest.approx([1, 2, 4], rel=0.02)
    with pytest.raises(ValueError, match="'t' has no values"):
        chart("t", [Series("a", [1], [None])], x_label="x", y_label="y")
    with pytest.raises(ValueError, match="needs 2 values"):
        bar_chart("t", ["g", "h"], [Series("a", (), [1.0])], y_label="y")


def test_rows_have_the_columns_of_their_table() -> None:
    with pytest.raises(ValueError, match=r"'t' has 2 columns; rows \[1\] have others"):
        Table("t", ["a", "b"], [text_cells("xy"), text_cells("x")])


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB")]
)
def test_sizes_for_people(number: int, text: str) -> None:
    assert size_text(number) == text
